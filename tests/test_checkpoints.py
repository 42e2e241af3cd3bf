"""Exact resume, damaged checkpoints, signals, and the policy as a program."""

import json
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from catalog import row
from conftest import (
    ATARI,
    DEVICE,
    DISCRETE,
    GYM,
    MEMORY,
    OFF_POLICY,
    PPO_CONTINUOUS,
    ROOT,
    SCRIPTS,
    SLICED,
    TWINS,
    close_writers,
    largest_difference,
    load,
    tiny,
    train,
)
from torch.utils._pytree import tree_leaves, tree_map

COUNTS = {"made_by", "global_step"}  # of a checkpoint: not what it restores


def problem(name: str) -> dict:
    """Two checkpoints, then some more steps."""
    return tiny(name) | row(name).saving | {"num_envs": 2}


class Killed(BaseException):
    pass


def kept(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def equal(a, b) -> bool:
    a, b = tree_leaves(a), tree_leaves(b)
    return len(a) == len(b) and all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in zip(a, b))


def train_until_killed(monkeypatch, name: str, **args) -> Path:
    """As by kill -9 right after the second checkpoint; returns its path. The first one lies beside it."""
    script, saves = load(name), []

    def save_and_die(run_dir, state):
        path = save_checkpoint(run_dir, state)
        assert path == run_dir / "checkpoint.pt"
        saves.append(run_dir / "checkpoint.pt")
        if len(saves) == 2:
            raise Killed
        return path

    save_checkpoint = script.save_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(script, "save_checkpoint", save_and_die)
        with pytest.raises(Killed):
            train(patch, name, **args)
    close_writers()
    return saves[-1].parent.rename("killed") / "checkpoint.pt"


def same_metrics(a: dict, b: dict) -> bool:
    return {**a, "SPS": 0, "startup_seconds": 0} == {**b, "SPS": 0, "startup_seconds": 0}


def patch_reports(monkeypatch, name: str):
    """Off-policy, a report at every checkpoint of these short runs."""
    monkeypatch.setattr(load(name), "REPORT_INTERVAL", 100, raising=False)


EAGER_AND_COMPILED = [(name, {}) for name in SCRIPTS] + [(twin, {"compile": True}) for _, twin in TWINS]
ON_CUDA = [(twin, flags | {"device": "cuda"}) for twin, flags in EAGER_AND_COMPILED[-len(TWINS) :]]
ON_CUDA += [(twin, {"cudagraphs": True, "device": "cuda"}) for _, twin in TWINS]


@pytest.mark.parametrize(("name", "flags"), EAGER_AND_COMPILED)
def test_a_killed_and_resumed_run_computes_the_same_bits(monkeypatch, name, flags):
    """Parameters, metrics and all that the last checkpoint holds: optimizer, replay, statistics, returns.

    The killed run is also a second run of the same seed. TD3 has two threads, all others have one.
    """
    torch.set_num_threads(2 if name == "td3_continuous_action" else 1)
    patch_reports(monkeypatch, name)
    sizes = problem(name) | flags
    whole = train(monkeypatch, name, **sizes)
    torch._dynamo.reset()
    path = train_until_killed(monkeypatch, name, **sizes)
    torch._dynamo.reset()
    resumed = train(monkeypatch, name, **sizes, resume=str(path))
    assert all(torch.equal(p, resumed.parameters[k]) for k, p in whole.parameters.items())
    assert same_metrics(whole.metrics, resumed.metrics)
    assert equal(kept(whole.run_dir / "checkpoint.pt"), kept(resumed.run_dir / "checkpoint.pt"))
    plain = train(monkeypatch, name, **(sizes if name in DEVICE else problem(name)) | {"checkpoint_interval": 0})
    starts_anew = not all(torch.equal(p, plain.parameters[k]) for k, p in whole.parameters.items())
    assert starts_anew == (name not in DEVICE)  # a checkpoint with the envs in it changes nothing


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "flags"), ON_CUDA)
def test_a_killed_and_resumed_run_on_a_gpu_learns_the_same(monkeypatch, name, flags):
    """To rounding: some kernels add in an order of their own. Without the checkpoint, it would be another run.

    Where the envs are in the checkpoint, it changes nothing: another seed tells how far apart two runs are.
    """
    patch_reports(monkeypatch, name)
    sizes = problem(name) | flags
    whole = train(monkeypatch, name, **sizes)
    path = train_until_killed(monkeypatch, name, **sizes)
    resumed = train(monkeypatch, name, **sizes, resume=str(path))
    other = train(monkeypatch, name, **sizes | ({"seed": 2} if name in DEVICE else {"checkpoint_interval": 0}))
    assert largest_difference(whole, resumed) < 0.1 * largest_difference(whole, other)


@pytest.mark.parametrize("name", OFF_POLICY)
def test_a_checkpoint_holds_no_more_of_the_replay_than_is_filled(monkeypatch, name):
    patch_reports(monkeypatch, name)
    run = train(monkeypatch, name, **problem(name) | {"buffer_size": 10_000})
    replay = kept(run.run_dir / "checkpoint.pt")["replay"]
    assert len(replay) < 5_000 and replay.untyped_storage().nbytes() == replay.numel() * replay.element_size()


def leaves(saved: dict) -> list[tuple]:
    """Where the parts of a checkpoint are: its entries, those of "state" one by one."""
    return [(k,) for k in saved if k not in COUNTS | {"state"}] + [("state", k) for k in saved.get("state", {})]


ENDING = {"env_id": "BoundedEnv-v0"}  # episodes of a few steps, whose returns differ


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_part_of_a_checkpoint_counts(monkeypatch, name, own_folder):
    """With any one of them taken from an older checkpoint, a resumed run computes something else."""
    patch_reports(monkeypatch, name)
    flags = problem(name) | ({} if name in DISCRETE or name in ATARI else ENDING)
    path = train_until_killed(monkeypatch, name, **flags)
    new, old = kept(path), kept(path.with_suffix(".old"))

    def outcome(saved: dict) -> tuple[dict, dict]:
        torch.save(saved, own_folder / "mixed.pt")
        run = train(monkeypatch, name, **flags, resume=str(own_folder / "mixed.pt"))
        last = kept(run.run_dir / "checkpoint.pt")
        return run.metrics, {k: v for k, v in last.items() if k != "made_by"}

    metrics, last = outcome(new)
    for where in leaves(new):
        if name in ATARI and where == ("last_returns",):
            continue  # no game ends so soon
        mixed = tree_map(lambda x: x, new)
        part, source = (mixed["state"], old["state"]) if where[0] == "state" else (mixed, old)
        part[where[-1]] = source[where[-1]]
        other_metrics, other_last = outcome(mixed)
        assert not (same_metrics(metrics, other_metrics) and equal(last, other_last)), where


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def damage(path: Path, how: str):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "a bit flipped":  # in the middle of the numbers
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "code":
        torch.save({"made_by": Evil()}, path)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    elif how == "absent":
        path.unlink()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["truncated", "a bit flipped", "empty", "code", "pickle", "absent"])
@pytest.mark.parametrize("name", ["sac_continuous_action", PPO_CONTINUOUS[1]])
def test_a_damaged_checkpoint_is_refused_by_path_and_skipped_by_auto(monkeypatch, capsys, name, how, own_folder):
    patch_reports(monkeypatch, name)
    path = train_until_killed(monkeypatch, name, **problem(name))
    damage(path, how)
    script = load(name)
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**problem(name), device="cpu", resume=str(path)))
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code == 2 and message.startswith("error: --resume: ") and str(path) in message
    assert not any(Path("runs").iterdir()) and not Path("pwned").exists()

    path.parent.rename(f"runs/{problem(name)['env_id']}__{name}__1__20260101-000000-000000")
    saved = script.load_checkpoint(script.Args(**problem(name), resume="auto"), made_by(name))
    assert saved["global_step"] == problem(name)["checkpoint_interval"]  # the older one
    assert ("warning: " in capsys.readouterr().err) == (how != "absent") and not Path("pwned").exists()


def made_by(name: str) -> list:
    sizes = [2, 3, 1, problem(name)["buffer_size"]] if name in OFF_POLICY else [problem(name)["num_steps"], 2, 3, 1]
    return [name, problem(name)["env_id"], *sizes]


@pytest.mark.parametrize("name", ["dqn", "dqn_torchcompile"])
def test_another_train_frequency_is_refused(monkeypatch, capsys, name):
    """The twin keeps the rows of one update apart: as many as steps lie between two."""
    patch_reports(monkeypatch, name)
    path = train_until_killed(monkeypatch, name, **problem(name))
    script = load(name)
    frequency = 2 * script.Args(**problem(name)).train_frequency
    with pytest.raises(SystemExit):
        script.train(script.Args(**problem(name) | {"train_frequency": frequency}, device="cpu", resume=str(path)))
    assert "is of ['" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["td3_continuous_action", PPO_CONTINUOUS[1]])
def test_another_script_env_or_size_is_refused(monkeypatch, capsys, name):
    patch_reports(monkeypatch, name)
    path = train_until_killed(monkeypatch, name, **problem(name))
    cases = [(name, {"num_envs": 1}), (name, {"env_id": "BoundedEnv-v0"}), ("sac_continuous_action", {})]
    for script, flags in cases:
        with pytest.raises(SystemExit) as exit:
            script = load(script)
            flags = {key: value for key, value in (problem(name) | flags).items() if hasattr(script.Args, key)}
            script.train(script.Args(**flags, device="cpu", resume=str(path)))
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert exit.value.code == 2 and f"is of {made_by(name)}, not of" in message
    assert not any(Path("runs").iterdir())


def test_auto_takes_the_newest_run_of_just_this_name_and_seed():
    script = load("dqn")

    def keep(run: str, step: int, file: str = "checkpoint.pt"):
        folder = Path("runs", f"CartPole-v1__{run}")
        folder.mkdir(parents=True, exist_ok=True)
        script.save_checkpoint(folder, {"made_by": ["x"], "global_step": step}).rename(folder / file)

    keep("a__1__7__20260303-000000-000000", 7)  # of the name a__1
    assert script.load_checkpoint(script.Args(exp_name="a", seed=1, resume="auto"), ["x"]) == {}
    keep("lr[3e-4]__1__20260101-000000-000000", 1)
    keep("lr[3e-4]__1__20260202-000000-000000", 3)
    keep("lr[3e-4]__1__20260202-000000-000000", 2, "checkpoint.old")  # written later, but older by its name
    args = script.Args(exp_name="lr[3e-4]", resume="auto")
    assert script.load_checkpoint(args, ["x"])["global_step"] == 2  # there is no other in the newest run
    keep("lr[3e-4]__1__20260202-000000-000000", 3)
    assert script.load_checkpoint(args, ["x"])["global_step"] == 3


def test_auto_without_a_checkpoint_starts_a_new_run(monkeypatch):
    run = train(monkeypatch, PPO_CONTINUOUS[0], **problem(PPO_CONTINUOUS[0]), resume="auto")
    assert run.metrics["global_step"] == problem(PPO_CONTINUOUS[0])["total_timesteps"]


def test_a_finished_run_goes_on_with_more_steps(monkeypatch):
    """The checkpoint of its end is one like any other."""
    name = "td3_continuous_action"
    patch_reports(monkeypatch, name)
    short = train(monkeypatch, name, **problem(name) | {"total_timesteps": 200})
    longer = train(monkeypatch, name, **problem(name), resume=str(short.run_dir / "checkpoint.pt"))
    whole = train(monkeypatch, name, **problem(name))
    assert all(torch.equal(p, longer.parameters[k]) for k, p in whole.parameters.items())


@pytest.mark.parametrize("processors", [("AVX512", "AVX2"), ("AVX2", "AVX512")])
def test_a_run_goes_on_on_another_kind_of_processor(monkeypatch, processors):
    """The weights of Atari's layer of 512 are a convolution's on one of them, and a matrix on the other."""
    name = "ppo_atari_envpool_torchcompile"
    runs, shapes = [], []
    for processor in processors:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda processor=processor: processor)
        resume = str(runs[0].run_dir / "checkpoint.pt") if runs else None
        steps = {"total_timesteps": 192 if runs else 96, "num_steps": 16, "checkpoint_interval": 96}
        runs.append(train(monkeypatch, name, **tiny(name) | steps, resume=resume, learning_rate=0.0 if runs else 1e-3))
        shapes.append(runs[-1].parameters["trunk.7.weight"].ndim)
    assert shapes == [4 if processor == "AVX512" else 2 for processor in processors]
    assert largest_difference(*runs) == 0  # with a learning rate of 0, the second one only carries on


def save_forever(script, folder: Path, step: int):
    """In a process of its own; the file `ended` tells of the last save that has ended."""
    torch.set_num_threads(1)  # OpenMP's other threads were not forked
    with (folder / "ended").open("w") as ended:
        while True:
            step += 1
            state = {"made_by": ["x"], "global_step": step, "x": torch.full((100_000,), float(step))}
            script.save_checkpoint(folder, state)
            ended.seek(0)
            ended.write(str(step))
            ended.flush()


@pytest.mark.slow
def test_kill_9_in_a_save_never_loses_all_checkpoints(own_folder, kills=50):
    """At random moments; what can be read afterwards is whole, and no older than the last save that had ended."""
    script, rng, step = load("dqn"), random.Random(1), 0
    args = script.Args(resume="auto")
    folder = own_folder / "runs" / "CartPole-v1__dqn__1__20260101-000000-000000"
    folder.mkdir(parents=True)
    (folder / "ended").touch()
    script.save_checkpoint(folder, {"made_by": ["x"], "global_step": 0, "x": torch.zeros(100_000)})
    for _ in range(kills):
        process = os.fork()
        if process == 0:
            save_forever(script, folder, step)
        time.sleep(0.01 + rng.random() * 0.03)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        saved = script.load_checkpoint(args, ["x"])
        assert (saved["x"] == saved["global_step"]).all()
        ended = int((folder / "ended").read_text() or 0)
        assert saved["global_step"] >= max(step, ended)
        step = saved["global_step"]
    assert step > kills / 5  # on a busy machine, many processes save nothing in so short a life


def test_a_save_that_fails_leaves_the_old_checkpoint_and_goes_on(capsys, own_folder):
    """A full disk, as a limit to the size of files; a folder that has vanished."""
    script = load("dqn")
    state = {"made_by": ["x"], "global_step": 7, "x": torch.zeros(100_000)}
    script.save_checkpoint(own_folder, state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        script.save_checkpoint(own_folder, state | {"global_step": 8})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "error: no checkpoint at step 8: " in capsys.readouterr().err
    assert kept(own_folder / "checkpoint.pt")["global_step"] == 7
    script.save_checkpoint(own_folder / "vanished", state | {"global_step": 9})
    assert "error: no checkpoint at step 9: " in capsys.readouterr().err
    script.save_checkpoint(own_folder, state | {"global_step": 10})  # there is room again
    assert [kept(own_folder / f"checkpoint.{x}")["global_step"] for x in ("pt", "old")] == [10, 7]


@pytest.mark.parametrize("name", GYM)
def test_an_env_that_raises_is_named_with_its_step(monkeypatch, name):
    env_id = f"{'Discrete' * (name in DISCRETE)}RaisingEnv-v0"
    with pytest.raises(ZeroDivisionError, match="a defect of the env") as error:
        train(monkeypatch, name, **tiny(name) | {"env_id": env_id, "num_envs": 2})
    assert error.value.__notes__ == ["error: env 0 raised this in env step 6. Earlier checkpoints are kept."]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_parameter_that_is_not_finite_is_named_with_the_step(name):
    """Though all losses are finite, as after the last update before a report."""
    script, closed = load(name), []
    closing = SimpleNamespace(close=lambda: closed.append(1), add_scalar=lambda *_: None)
    parameters = {"a.weight": torch.ones(2), "b.bias": torch.tensor([1.0, float("nan")])}
    marks = [(0.0, 0), (1.0, 500)]
    with pytest.raises(SystemExit, match=r"parameter b.bias is nan at step 500; .*Earlier checkpoints are kept"):
        script.report({"a_loss": torch.ones(())}, parameters, [], deque(), marks, closing, closing)
    assert len(closed) == 2


@pytest.mark.parametrize("name", [PPO_CONTINUOUS[0], "dqn"])
def test_a_finished_run_that_is_resumed_says_that_nothing_is_left(monkeypatch, capsys, name):
    flags = problem(name)
    run = train(monkeypatch, name, **flags)
    script = load(name)
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**flags, device="cpu", resume=str(run.run_dir / "checkpoint.pt")))
    assert exit.value.code == 0 and "nothing is left to do" in capsys.readouterr().err
    assert not any(Path("runs").iterdir())


def test_a_replay_with_nan_is_not_saved(capsys, own_folder):
    state = {"global_step": 7, "replay": torch.tensor([1.0, float("nan")])}
    assert load("dqn").save_checkpoint(own_folder, state) is None
    assert "error: no checkpoint at step 7: the replay holds NaN" in capsys.readouterr().err
    assert not list(own_folder.iterdir())


class LateNanEnv(gym.Env):
    """Observes what is not a number once, in the 500th step of a run: episodes have five steps and one of a reset."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    observed = 0

    def observe(self):
        LateNanEnv.observed += 1
        return np.full(2, np.nan if LateNanEnv.observed == 501 else 0.5, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 1.0, False, LateNanEnv.observed % 6 == 0, {}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_nan_in_the_newest_row_is_not_saved(monkeypatch, capsys, name):
    """Before it is in the replay."""
    space = gym.spaces.Discrete(2) if name in DISCRETE else gym.spaces.Box(-1, 1, (1,))
    monkeypatch.setattr(LateNanEnv, "action_space", space, raising=False)
    monkeypatch.setattr(LateNanEnv, "observed", 0)
    monkeypatch.setattr(gym, "make", lambda _: LateNanEnv())
    run = train(monkeypatch, name, **tiny(name) | {"total_timesteps": 500, "checkpoint_interval": 500})
    assert "no checkpoint at step 500: the replay holds NaN" in capsys.readouterr().err
    assert not list(run.run_dir.glob("checkpoint*"))


def test_a_resumed_run_learns_at_the_rate_that_its_flags_say(monkeypatch):
    name = "td3_continuous_action"
    patch_reports(monkeypatch, name)
    path = train_until_killed(monkeypatch, name, **problem(name))
    script, original = load(name), torch.optim.Adam.step
    rates = set()

    def step(self):
        rates.add(self.param_groups[0]["lr"])
        original(self)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    train(monkeypatch, script.__name__, **problem(name), resume=str(path), learning_rate=0.25)
    assert rates == {0.25}


SIGNALS = [("sac_continuous_action", signal.SIGTERM), ("ppo_continuous_action_torchcompile", signal.SIGINT)]
SIGNALS += [("ppo_atari_envpool", signal.SIGTERM), ("dqn_torchcompile", signal.SIGINT)]
SIGNALS += [("ppo_lru_torchcompile", signal.SIGTERM)]


def start(name: str, *flags) -> subprocess.Popen:
    flags = [str(flag) for flag in flags]
    command = [sys.executable, ROOT / "leanrl" / f"{name}.py", "--no-cuda", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(Path("runs").glob("*/events*")):
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(2)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), SIGNALS)
def test_a_signal_ends_a_run_in_order(name, number):
    """A checkpoint, though none was asked for, the policy and the results so far; the printed command goes on."""
    steps = 500_000 if name in MEMORY else 40_000 if "ppo_c" in name else 20_000
    small = ["--learning-starts", 100] if name in OFF_POLICY else []
    small = ["--num-envs", 2, "--num-steps", 32] if name in ATARI else small
    process = start(name, "--total-timesteps", steps, *small)
    sent = time.monotonic()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - sent < 30  # a quiet machine takes a tenth of it
    assert process.returncode == 128 + number, stderr
    (folder,) = Path("runs").iterdir()
    metrics = json.loads((folder / "summary.json").read_text())["metrics"]
    assert 0 < metrics["global_step"] < steps and (folder / "policy.pt2").exists()
    assert kept(folder / "checkpoint.pt")["global_step"] == metrics["global_step"]
    (command,) = re.findall(r"^to go on: python (.*)$", stderr, re.MULTILINE)
    more = metrics["global_step"] + (500 if name in OFF_POLICY else 256 if name in ATARI else 4096)
    flags = command.replace(str(steps), str(more)).split()
    again = subprocess.run([sys.executable, *flags], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    last = max(Path("runs").iterdir(), key=os.path.getmtime)
    assert json.loads((last / "summary.json").read_text())["metrics"]["global_step"] > metrics["global_step"]


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once():
    process = start("ppo_continuous_action", "--num-steps", 200_000)  # a step that lasts
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == -signal.SIGINT


PLAY = """
import sys, torch
policy = torch.export.load(sys.argv[1]).module()
print(policy(torch.load("obs.pt")).tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_policy_is_a_program_that_needs_nothing_of_ours(monkeypatch, name):
    """Nothing is unpickled. It maps any number of rows to the greedy actions of the trained network."""
    run = train(monkeypatch, name, **tiny(name) | {"num_envs": 2, "save_model": True})
    script = load(name)
    if name in ATARI:
        obs = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8)
    else:
        obs = torch.randn(5, 4 if name in DISCRETE else 3)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    program = torch.export.load(run.run_dir / "policy.pt2").module()
    memory = [torch.rand(5, (16 if "rnn" in name else 32) + 2)] if name in MEMORY + SLICED else []
    policy = (lambda *inputs: program(*inputs)[0]) if memory else program
    one, five = (policy(obs[:n], *(x[:n] for x in memory)).tolist() for n in (1, 5))
    np.testing.assert_allclose(one, five[:1], rtol=1e-4, atol=1e-5)
    if name == "sac_continuous_action":
        torch.save(obs, "obs.pt")
        command = [sys.executable, "-c", PLAY, run.run_dir / "policy.pt2"]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        np.testing.assert_allclose(json.loads(process.stdout), five, rtol=1e-4, atol=1e-5)
    program = torch.export.load(run.run_dir / "policy.pt2", extra_files=(extra := {"card.json": ""}))
    card = json.loads(extra["card.json"])
    assert card["script"] == name and card["args"]["env_id"] == tiny(name)["env_id"]
    assert card["metrics"]["episodic_return"] == run.metrics["episodic_return"]
    for key, p in program.named_parameters():  # what it holds is what was trained
        same = [q for q in run.parameters.values() if q.shape == p.shape and torch.equal(q, p)]
        assert same or "actor" not in key
    actions = np.array(five)
    if "continuous" in name:
        assert actions.shape == (5, 1) and (np.abs(actions) <= 2).all()
    else:
        assert actions.shape == (5,) and set(actions) <= set(range(4))
    assert not list(run.run_dir.glob("*new*")) and script.__name__ == name
