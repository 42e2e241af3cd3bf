"""What measure.py learns beside the speed: the time of simulators, reductions and graphs, and the use of a GPU."""

import math
import subprocess
import threading
import time
from collections.abc import Callable


def time_pool_steps(env_id: str, num_envs: int = 8) -> list[float]:
    """EnvPool alone, with random actions: [seconds, env steps]."""
    import envpool
    import numpy as np

    envs, rng = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=1), np.random.default_rng(1)
    envs.reset()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < 3:
        envs.step(rng.integers(envs.action_space.n, size=num_envs, dtype=np.int32))
        steps += num_envs
    seconds = time.perf_counter() - start
    envs.close()
    return [seconds, steps]


def time_env_steps(env_id: str) -> list[float]:
    """Makes every env of this id add to the list the seconds that a step takes, as [seconds, steps]."""
    import gymnasium as gym

    gym.logger.min_level = gym.logger.ERROR
    env = gym.make(env_id)
    cls, spent = type(env.unwrapped), [0.0, 0]
    env.close()
    step = cls.step

    def timed_step(self, action):
        start = time.perf_counter()
        result = step(self, action)
        spent[0] += time.perf_counter() - start
        spent[1] += 1
        return result

    cls.step = timed_step
    return spent


def time_communication(script, dist, cuda) -> Callable[[], float]:
    """Times what ranks do together, waiting for slower ranks included; returns what tells the seconds so far.

    So is what DDP reduces while other gradients are still computed. What overlaps counts once. On a GPU by events in
    the stream: waiting on the host would make the run slower than it is.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    spans, spent = [], [0.0]

    def now():
        if not cuda.is_available():
            return time.perf_counter()
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(function: Callable):
        def call(*args, **kwargs):
            start = now()
            result = function(*args, **kwargs)
            spans.append((start, now()))
            return result

        return call

    def reduce_bucket(group, bucket):
        def end(future):
            spans.append((start, now()))
            return future.value()

        start = now()
        return allreduce_hook(group, bucket).then(end)

    class TimedDDP(script.DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, reduce_bucket)

    def seconds() -> float:
        if cuda.is_available():
            cuda.synchronize()
        first, until = spans[0][0] if spans else None, -math.inf
        since = [[t - first if isinstance(t, float) else first.elapsed_time(t) / 1000 for t in span] for span in spans]
        for start, end in sorted(since):
            spent[0] += max(0.0, end - max(start, until))
            until = max(until, end)
        spans.clear()
        return spent[0]

    for name in ("all_reduce", "all_gather_object"):
        setattr(dist, name, timed(getattr(dist, name)))
    script.DistributedDataParallel = TimedDDP
    return seconds


def know_graphs(script) -> list:
    """Makes the script's CUDA graphs known: the list gets each CudaGraphModule, which counts its calls."""
    graphs = []

    class Known(script.CudaGraphModule):
        def __init__(self, function: Callable, **options):
            super().__init__(function, **options)
            self.name, self.calls = getattr(function, "__name__", ""), 0
            graphs.append(self)

        def __call__(self, *args):
            self.calls += 1
            return super().__call__(*args)

    script.CudaGraphModule = Known
    return graphs


def graph_share(graphs: list, seconds_per_step: float, learning_steps: int, synchronize: Callable) -> float | None:
    """The time that replays of the update graphs alone take, per env step, as a share of the loop's."""
    spent = 0.0
    for graph in graphs:
        if graph.name in ("update", "update_with_actor", "update_epoch", "iterate") and graph.calls > 10:
            synchronize()
            start = time.perf_counter()
            for _ in range(200):
                graph.graph.replay()
            synchronize()
            spent += (time.perf_counter() - start) / 200 * graph.calls
    return spent / learning_steps / seconds_per_step if spent else None


def sample_gpu(gpu: str, samples: list[float], is_measuring: threading.Event, every: float = 0.5):
    """Appends the utilisation of a GPU in percent while a run is measured; in a thread of its own."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", gpu]
    while True:
        time.sleep(every)
        if is_measuring.is_set():
            percent = subprocess.run(query, capture_output=True, text=True).stdout.strip()
            if not percent.isdigit():  # some GPUs, and parts of one, do not say
                return
            samples.append(float(percent))
