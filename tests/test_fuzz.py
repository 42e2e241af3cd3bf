"""Command lines of extreme values: each trains past an update or is refused with a sentence.

A thousand of each script: pytest tests/test_fuzz.py --hypothesis-profile=long
"""

import contextlib
import io
import re
import runpy
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import local_ray
import pytest
import torch.utils.tensorboard
from conftest import ATARI, DISCRETE, MUJOCO, RAY, ROOT, SCRIPTS, load
from hypothesis import given, note
from hypothesis import strategies as st

INTS = [-(2**63), -1, 0, 1, 2, 3, 7, 100, 2**31, 2**63, 10**30]
FLOATS = [
    "-inf",
    "-1",
    "-0.0",
    "0",
    "5e-324",
    "1e-45",
    "1e-8",
    "0.3",
    "1",
    "1.0000001",
    "7",
    "1e30",
    "1e308",
    "inf",
    "nan",
]
TEXTS = ["", " ", "a b", "../x", "a/b:c", "\u2603", "-", "x" * 300, "'", "nan"]
ENVS = ["Pendulum-v1", "CartPole-v1", "Breakout-v5", "Pong-v5", "MountainCarContinuous-v0", "Pendulum", "CartPole-v0"]
SMALL = {  # these cost time or memory, so that large ones would only be slow or end in PyTorch's own message
    "total_timesteps": [-1, 0, 1, 2, 63, 64, 65, 130, 300],
    "num_envs": [-1, 0, 1, 2, 3, 8],
    "batch_size": [-1, 0, 1, 2, 3, 100],
    "buffer_size": [-1, 0, 1, 2, 3, 1000],
    "num_workers": [-1, 0, 1, 2, 3, 100, 2**31],
    "envs_per_worker": [-1, 0, 1, 2, 3, 8, 2**31],
    "hidden_size": [-1, 0, 1, 2, 3, 64],
    "worker_threads": [-1, 0, 1, 2],
    "lag": [-1, 0, 1, 2, 7],
    "update_epochs": [-1, 0, 1, 2],
    "env_groups": [-1, 0, 1, 2, 3, 2**31],
    "num_updates": [-1, 0, 1, 2, 3, 6],
    "num_atoms": [-1, 0, 1, 2, 3, 51],
    "policy_frequency": [-1, 0, 1, 2, 50, 2**31, 2**63],
    "train_frequency": [-1, 0, 1, 2, 3, 10, 64, 2**31, 2**63],
}
STRINGS = {
    "env_id": [*ENVS, *TEXTS, "no_such_package:X-v0", ":x", "CartPole-v99"],
    "resume": ["auto", ".", "nowhere/checkpoint.pt", *TEXTS],
    "cell": ["gru", "lstm", "GRU", *TEXTS],
    "act_on": ["learner", "worker", "both", *TEXTS],
    "ray_address": ["auto", "10.0.0.1:6379", *TEXTS],  # none is called, since Ray runs already
    "exp_name": TEXTS,
    "wandb_project_name": TEXTS,
    "wandb_entity": TEXTS,
}
BASE = {"total_timesteps": 130, "num_steps": 64, "num_minibatches": 2, "learning_starts": 60, "batch_size": 32}
BASE |= {"buffer_size": 100, "update_epochs": 1, "num_envs": 2, "train_frequency": 2}
BASE |= {"num_workers": 2, "envs_per_worker": 1}
BASE |= {"burn_in": 4, "seq_length": 8, "state_interval": 4}


def flags_of(name: str) -> st.SearchStrategy[dict]:
    """Up to four flags of a script, each with one of its extreme values; more would nearly always be refused."""
    strategies = {}
    for field in fields(load(name).Args):
        values = SMALL.get(field.name) or STRINGS.get(field.name) or (FLOATS if "float" in str(field.type) else INTS)
        strategies[field.name] = st.booleans() if field.type is bool else st.sampled_from(values)
    for costly in ("compile", "track", "save_model"):
        strategies.pop(costly, None)
    names = st.sets(st.sampled_from(sorted(strategies)), max_size=4)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: strategies[name] for name in sorted(chosen)}))


def command_line(name: str, flags: dict) -> list[str]:
    own = {field.name for field in fields(load(name).Args)}
    env_id = "Breakout-v5" if "atari" in name else "CartPole-v1" if name in DISCRETE else "Pendulum-v1"
    env_id = "Hopper-v5" if name in MUJOCO else env_id
    flags = {k: v for k, v in BASE.items() if k in own} | {"env_id": env_id, "save_model": False} | flags
    words = []
    for key, value in flags.items():
        flag = key.replace("_", "-")
        words.append(f"--no-{flag}" if value is False else f"--{flag}" if value is True else f"--{flag}={value}")
    return words


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # that a script handles in a way of its own


class Silent(SimpleNamespace):
    """A SummaryWriter without files and threads."""

    def __init__(self, *_, **__):
        super().__init__(**dict.fromkeys(("add_scalar", "add_text", "close"), lambda *_: None))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's advice to name a version
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ATARI))  # whose flags are those of ppo_atari_ray
        for name in SCRIPTS + RAY
        if not name.endswith("_torchcompile")
    ],
)
def test_any_command_line_trains_or_is_refused_with_a_sentence(name, monkeypatch):
    load(name)  # while the module that other tests get, too, finds the real SummaryWriter
    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", Silent)
    monkeypatch.setitem(sys.modules, "ray", local_ray)
    outcomes = Counter()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    @given(flags_of(name))
    def run(flags):
        words = command_line(name, flags)
        note(f"python leanrl/{name}.py {' '.join(map(repr, words))}")
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        shutil.rmtree("runs", ignore_errors=True)
        local_ray.reset()
        started = time.monotonic()
        with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
            try:
                runpy.run_path(str(ROOT / "leanrl" / f"{name}.py"), run_name="__main__")
                code = 0
            except SystemExit as exit:
                code = exit.code
        said = " ".join(re.sub("[─│╭╮╰╯]", " ", errors.getvalue()).split())  # tyro boxes and wraps long texts
        note(said)
        outcomes["trained" if code == 0 else "refused" if code == 2 else "ended by a sentence"] += 1
        if isinstance(code, str):  # it had begun to train
            assert re.match(r"\s*error: not finite: \{.*\}, norms of parameters .*\. Checkpoints are kept\.$", code)
        elif code == 2:
            assert re.search(r"(^| )error: .+|For full helptext, run python \S+\.py --help$", said), said
        else:
            assert code == 0
        assert time.monotonic() - started < 20

    try:
        run()
        assert outcomes["trained"] > 1 and outcomes["refused"] > 1
    finally:
        print(name, dict(outcomes))
        for number, handler in handlers.items():
            signal.signal(number, handler)
