"""Ray in one process, for tests: actors are objects, and a call is made at once. What goes in and out is pickled.

As with Ray, arrays that come out cannot be written to. A call whose number is in `lost` ends with an error, and so do
those that are made of its actor before it is reset.
"""

import pickle
from types import SimpleNamespace

import cloudpickle
import torch


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class RayActorError(RayError):
    pass


class ActorDiedError(RayActorError):
    pass


class GetTimeoutError(RayError, TimeoutError):
    pass


ERRORS = (RayError, RayTaskError, RayActorError, ActorDiedError, GetTimeoutError)
exceptions = SimpleNamespace(**{error.__name__: error for error in ERRORS})
cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None, dumps=cloudpickle.dumps)
calls = []  # (actor, method) of every call
UNREACHABLE = RayError("unreachable")  # of a worker that hangs while it starts: until it is killed
lost = {}  # number of a call -> the error that it ends with; the actor begins anew
killed = []  # actors


def reset():
    calls.clear()
    lost.clear()
    killed.clear()


def through_pickle(x):
    buffers = []
    data = cloudpickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])


class Reference:
    def __init__(self, value, raises: bool = False):
        self.value = value
        self.raises = raises  # a call may also return an exception


def put(x) -> Reference:
    return Reference(through_pickle(x))


def get(reference: Reference, timeout: float = 0):
    if reference.raises:
        raise reference.value
    return reference.value


def wait(references: list, num_returns: int = 1, timeout: float = 0) -> tuple[list, list]:
    """Those that do not hang; if only one is wanted, the last one is ready first."""
    late = [x for x in references if isinstance(x.value, GetTimeoutError)]
    ready = [x for x in references if x not in late]
    return ready if num_returns > 1 or len(references) == 1 else ready[-1:], late


class Actor:
    def __init__(self, cls, *args):
        self.make = lambda: cls(*through_pickle(args))
        self.instance = self.make()
        self.error = None  # that its calls end with, since it was lost

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.call(name, *args))

    def call(self, name, *args) -> Reference:
        calls.append((self, name))
        if len(calls) in lost:
            self.instance = self.make()
            self.error = lost[len(calls)]
        elif name == "reset" and self.error is not UNREACHABLE:  # it has been started again
            self.error = None
        if self.error:
            return Reference(self.error, raises=True)
        args = [get(x, 0) if isinstance(x, Reference) else x for x in args]
        with torch.random.fork_rng(devices=[]):  # a process has random numbers of its own
            try:
                return put(getattr(self.instance, name)(*through_pickle(args)))
            except Exception as error:  # comes out as one that is of both kinds
                both = type("RayTaskError", (RayTaskError, type(error)), {})(str(error))
                return Reference(both, raises=True)


def remote(**options):
    assert options["max_task_retries"] == 0  # a step is never repeated behind the learner's back
    return lambda cls: SimpleNamespace(remote=lambda *args: Actor(cls, *args))


def kill(actor):
    killed.append(actor)


def is_initialized() -> bool:
    return True


def cluster_resources() -> dict[str, float]:
    return {"CPU": 4.0}


def available_resources() -> dict[str, float]:
    return {"CPU": 3.0}
