"""Exact resume, damaged checkpoints, signals, and the policy as a program."""

import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from catalog import CATALOG, row
from conftest import (
    ATARI,
    DEVICE,
    DISCRETE,
    FAST_TD3,
    MEMORY,
    MUJOCO,
    OFF_POLICY,
    PPO_CONTINUOUS,
    ROOT,
    SCRIPTS,
    SLICED,
    TWINS,
    ScriptedPool,
    largest_difference,
    load,
    tiny,
    train,
)
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

COUNTS = {"settings", "wandb_id"}  # of a checkpoint: not what it restores


def problem(name: str) -> dict:
    """Two checkpoints, then some more steps."""
    return tiny(name) | row(name).saving | {"num_envs": 2}


def kept(path: Path) -> dict:
    saved = torch.load(path, weights_only=True)
    return {key: value for key, value in saved.items() if key not in COUNTS}


def equal(a, b) -> bool:
    a, b = tree_leaves(a), tree_leaves(b)
    return len(a) == len(b) and all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in zip(a, b))


def train_and_keep(monkeypatch, name: str, **args) -> SimpleNamespace:
    """A run; its first two checkpoints are kept as run.first and run.second: what a kill -9 would have left."""
    script, saves = load(name), []
    save_checkpoint = script.save_checkpoint

    def save_and_copy(run_dir, args, kept):
        save_checkpoint(run_dir, args, kept)
        saves.append((run_dir / "checkpoint.pt").read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr(script, "save_checkpoint", save_and_copy)
        run = train(patch, name, **args)
    for number, data in zip(("first", "second"), saves):
        path = run.run_dir.absolute() / f"{number}.pt"
        path.write_bytes(data)
        setattr(run, number, str(path))
    return run


def same_metrics(a: dict, b: dict) -> bool:
    return a | {"SPS": 0} == b | {"SPS": 0}


def patch_reports(monkeypatch, name: str):
    """Off-policy, a report at every checkpoint of these short runs."""
    monkeypatch.setattr(load(name), "REPORT_INTERVAL", 100, raising=False)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name in CATALOG])
def test_a_killed_and_resumed_run_computes_the_same_bits(monkeypatch, name):
    """Parameters, metrics and all that the last checkpoint holds: optimizer, replay, statistics, returns."""
    patch_reports(monkeypatch, name)
    whole = train_and_keep(monkeypatch, name, **problem(name))
    resumed = train(monkeypatch, name, **problem(name), resume=whole.second)
    same_run(whole, resumed)
    plain = train(monkeypatch, name, **problem(name) | {"checkpoint_interval": 0})
    starts_anew = not all(torch.equal(p, plain.parameters[k]) for k, p in whole.parameters.items())
    assert starts_anew == (name not in DEVICE)  # a checkpoint with the envs in it changes nothing


def same_run(whole: SimpleNamespace, resumed: SimpleNamespace):
    assert all(torch.equal(p, resumed.parameters[k]) for k, p in whole.parameters.items())
    assert same_metrics(whole.metrics, resumed.metrics)
    assert equal(kept(whole.run_dir / "checkpoint.pt"), kept(resumed.run_dir / "checkpoint.pt"))


COMPILED = [(twin, {"num_steps": 4} if "ppo_rnn" in twin else {}) for _, twin in TWINS]
# One has its kernels made in every run of the tests: g++ takes a second for each kernel. The others' are `long`.
SOON = "dqn_torchcompile"
INDUCTOR = [pytest.param(*case, marks=[pytest.mark.long] * (case[0] != SOON)) for case in COMPILED]


def sizes_of(monkeypatch, twin: str, flags: dict) -> dict:
    """Few updates, since a rounding grows with each."""
    patch_reports(monkeypatch, twin)
    sizes = problem(twin) | flags
    if twin in OFF_POLICY and "dqn" not in twin:
        sizes |= {"learning_starts": 180, "total_timesteps": 300}
    sizes |= {"learning_rate": 3e-4} if twin in DEVICE else {}
    sizes |= {"learning_starts": 600, "learning_rate": 3e-5} if twin in FAST_TD3 else {}
    if twin in ATARI:
        monkeypatch.setattr(load(twin), "make_envs", ScriptedPool)
    return sizes


def compiled(monkeypatch, twin: str, **flags) -> SimpleNamespace:
    """A run in whole graphs, none of which is compiled twice."""
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        run = train_and_keep(monkeypatch, twin, **flags, compile=True)
    assert counters["stats"]["unique_graphs"] == row(twin).graphs
    assert not counters["graph_break"]
    assert counters["aot_autograd"]["total"] >= counters["stats"]["unique_graphs"]  # the backend has compiled them
    return run


def same_to_rounding(twin: str, plain: SimpleNamespace, fast: SimpleNamespace):
    assert largest_difference(plain, fast) < (2e-5 if twin in ATARI else 5e-6)
    numbers = {name: value for name, value in plain.metrics.items() if name != "SPS" and value is not None}
    assert numbers == pytest.approx({name: fast.metrics[name] for name in numbers}, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("twin", "flags"), INDUCTOR)
def test_a_compiled_run_computes_and_resumes_the_same(monkeypatch, twin, flags):
    sizes = sizes_of(monkeypatch, twin, flags)
    plain, whole = train(monkeypatch, twin, **sizes), compiled(monkeypatch, twin, **sizes)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        resumed = train(monkeypatch, twin, **sizes, compile=True, resume=whole.second)
    same_run(whole, resumed)
    same_to_rounding(twin, plain, whole)


@pytest.mark.parametrize(("twin", "flags"), [case for case in COMPILED if case[0] != SOON])
def test_a_twin_resumes_the_same_and_its_graphs_compute_the_same(monkeypatch, twin, flags):
    """PyTorch runs the operators of the graphs here. Inductor would make kernels of them, which takes long."""
    sizes = sizes_of(monkeypatch, twin, flags)
    plain = train_and_keep(monkeypatch, twin, **sizes)
    same_run(plain, train(monkeypatch, twin, **sizes, resume=plain.second))
    compile = torch.compile

    def without_kernels(function, options=None, **settings):
        guards = {key: value for key, value in (options or {}).items() if key == "guard_filter_fn"}
        return compile(function, backend="aot_eager_decomp_partition", options=guards or None, **settings)

    monkeypatch.setattr(torch, "compile", without_kernels)
    same_to_rounding(twin, plain, compiled(monkeypatch, twin, **sizes))


ON_CUDA = [(twin, flags | {"cuda": True}) for _, twin in TWINS for flags in ({"compile": True}, {"cudagraphs": True})]


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "flags"), ON_CUDA)
def test_a_killed_and_resumed_run_on_a_gpu_learns_the_same(monkeypatch, name, flags):
    """To rounding: some kernels add in an order of their own. Without the checkpoint, it would be another run.

    Where the envs are in the checkpoint, it changes nothing: another seed tells how far apart two runs are.
    """
    patch_reports(monkeypatch, name)
    sizes = problem(name) | flags
    whole = train_and_keep(monkeypatch, name, **sizes)
    resumed = train(monkeypatch, name, **sizes, resume=whole.second)
    other = train(monkeypatch, name, **sizes | ({"seed": 2} if name in DEVICE else {"checkpoint_interval": 0}))
    assert largest_difference(whole, resumed) < 0.1 * largest_difference(whole, other)


@pytest.mark.parametrize("name", [name for name in OFF_POLICY if name in CATALOG])
def test_a_checkpoint_holds_no_more_of_the_replay_than_is_filled(monkeypatch, name):
    patch_reports(monkeypatch, name)
    run = train(monkeypatch, name, **problem(name) | {"buffer_size": 10_000})
    replay = kept(run.run_dir / "checkpoint.pt")["replay"]
    assert len(replay) < 5_000 and replay.untyped_storage().nbytes() == replay.numel() * replay.element_size()


ENDING = {"env_id": "BoundedEnv-v0"}  # episodes of a few steps, whose returns differ


@pytest.mark.parametrize("name", ["dqn_lru", "ppo_continuous_action", "ppo_device_env"])
def test_every_part_of_a_checkpoint_counts(monkeypatch, name, own_folder):
    """With any one of them taken from an older checkpoint, a resumed run computes something else."""
    patch_reports(monkeypatch, name)
    flags = problem(name) | ({} if name in DISCRETE or name in ATARI else ENDING)
    run = train_and_keep(monkeypatch, name, **flags)
    new, old = (torch.load(path, weights_only=True) for path in (run.second, run.first))

    def outcome(saved: dict) -> tuple[dict, dict]:
        torch.save(saved, own_folder / "mixed.pt")
        run = train(monkeypatch, name, **flags, resume=str(own_folder / "mixed.pt"))
        return run.metrics, kept(run.run_dir / "checkpoint.pt")

    metrics, last = outcome(new)
    for part in new.keys() - COUNTS:
        if name in ATARI and part == "last_returns":
            continue  # no game ends so soon
        other_metrics, other_last = outcome(new | {part: old[part]})
        assert not (same_metrics(metrics, other_metrics) and equal(last, other_last)), part


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def damage(path: Path, how: str):
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "code":
        torch.save({"settings": Evil()}, path)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Evil()))


def keep(script, folder: str, args, **kept) -> Path:
    """Saves a checkpoint as a run with these flags would."""
    path = Path("runs", folder)
    path.mkdir(parents=True, exist_ok=True)
    script.save_checkpoint(path, args, kept)
    return path / "checkpoint.pt"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["truncated", "empty", "code", "pickle"])
def test_a_damaged_checkpoint_is_refused_by_path_and_skipped_by_auto(capsys, how):
    script = load("dqn")
    keep(script, "CartPole-v1__dqn__1__a", script.Args(), step=1)
    time.sleep(0.01)
    path = keep(script, "CartPole-v1__dqn__1__b", script.Args(), step=2)
    damage(path, how)
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(resume=str(path)))
    message = capsys.readouterr().err.strip()
    assert exit.value.code == 2 and message.startswith(f"error: cannot resume from {path}: ") and "\n" not in message
    assert script.load_checkpoint(script.Args(resume="auto"))["step"] == 1
    assert capsys.readouterr().err.startswith(f"warning: cannot resume from {path}: ")
    assert not Path("pwned").exists()


def test_a_checkpoint_of_another_script_is_refused(capsys):
    script, other = load("dqn"), load("dqn_torchcompile")
    path = keep(other, "elsewhere", other.Args(), step=1)
    with pytest.raises(SystemExit):
        script.train(script.Args(resume=str(path)))
    assert "it was made with script dqn_torchcompile, not dqn" in capsys.readouterr().err


def test_a_run_goes_on_with_more_room_for_its_contacts_and_with_other_graphs():
    script = load("ppo_mujoco_torchcompile")
    flags = {"env_id": "Hopper-v5", "nconmax": 8, "njmax": 40}
    keep(script, "Hopper-v5__ppo_mujoco_torchcompile__1__20260101", script.Args(**flags), step=3)
    others = {"nconmax": 64, "njmax": 320, "cudagraphs": True, "cut_graph": True, "graph_conditional": False}
    assert script.load_checkpoint(script.Args(**flags | others, resume="auto"))["step"] == 3


def test_auto_takes_the_run_of_just_this_name_and_seed():
    script = load("dqn")
    keep(script, "CartPole-v1__a__1__7__20260303", script.Args(exp_name="a__1", seed=7), step=7)
    assert script.load_checkpoint(script.Args(exp_name="a", seed=1, resume="auto")) == {}
    args = script.Args(exp_name="lr[3e-4]")
    keep(script, "CartPole-v1__lr[3e-4]__1__20260101", args, step=3)
    assert script.load_checkpoint(script.Args(exp_name="lr[3e-4]", resume="auto"))["step"] == 3


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


def save_forever(script, folder: Path, step: int):
    """In a process of its own; the file `ended` tells of the last save that has ended."""
    torch.set_num_threads(1)  # OpenMP's other threads were not forked
    with (folder / "ended").open("w") as ended:
        while True:
            step += 1
            script.save_checkpoint(folder, script.Args(), {"step": step, "x": torch.full((100_000,), float(step))})
            ended.seek(0)
            ended.write(str(step))
            ended.flush()


@pytest.mark.slow
def test_kill_9_in_a_save_never_loses_all_checkpoints(own_folder, kills=30):
    """At random moments; what can be read afterwards is whole, and no older than the last save that had ended."""
    script, rng, step = load("dqn"), random.Random(1), 0
    folder = keep(script, "CartPole-v1__dqn__1__20260101", script.Args(), step=0, x=torch.zeros(100_000)).parent
    (folder / "ended").touch()
    for _ in range(kills):
        process = os.fork()
        if process == 0:
            save_forever(script, folder, step)
        time.sleep(0.01 + rng.random() * 0.03)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        saved = script.load_checkpoint(script.Args(resume="auto"))
        assert (saved["x"] == saved["step"]).all()
        ended = int((folder / "ended").read_text() or 0)
        assert saved["step"] >= max(step, ended)
        step = saved["step"]
    assert step > kills / 5  # on a busy machine, many processes save nothing in so short a life


def test_a_save_that_fails_leaves_the_old_checkpoint_and_goes_on(capsys, own_folder):
    """A full disk, as a limit to the size of files; a folder that has vanished."""
    script = load("dqn")
    x = torch.zeros(100_000)
    path = keep(script, "run", script.Args(), step=7, x=x)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        script.save_checkpoint(path.parent, script.Args(), {"step": 8, "x": x})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "error: no checkpoint in runs/run: " in capsys.readouterr().err
    assert kept(path)["step"] == 7
    script.save_checkpoint(own_folder / "vanished", script.Args(), {"step": 9})
    assert "error: no checkpoint in " in capsys.readouterr().err
    script.save_checkpoint(path.parent, script.Args(), {"step": 10, "x": x})  # there is room again
    assert kept(path)["step"] == 10


def test_a_parameter_that_is_not_finite_ends_a_run():
    """Though all losses are finite, as after the last update before a report."""
    script, closed = load("dqn"), []
    writer = SimpleNamespace(close=lambda: closed.append(1), add_scalar=lambda *_: None)
    parameters = [torch.ones(2), torch.tensor([1.0, float("nan")])]
    with pytest.raises(SystemExit, match="not finite: .*'global_step': 500.*norms of parameters .*nan"):
        script.report({"a_loss": torch.ones(())}, parameters, deque(), 500, (0.0, 0), writer, None)
    assert len(closed) == 1


PLAY = """
import sys, torch
policy = torch.export.load(sys.argv[1]).module()
print(policy(torch.load("obs.pt")).tolist())
"""


def played(name: str, path: Path) -> list:
    """The actions of an exported policy for five random observations. Nothing of ours is needed, or unpickled."""
    torch.manual_seed(0)
    if name in ATARI:
        obs = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8)
    else:
        obs = torch.randn(5, 4 if name in DISCRETE else 11 if name in MUJOCO else 3)
    program = torch.export.load(path).module()
    memory = [torch.rand(5, (16 if "rnn" in name else 32) + 2)] if name in MEMORY + SLICED else []
    policy = (lambda *inputs: program(*inputs)[0]) if memory else program
    one, five = (policy(obs[:n], *(x[:n] for x in memory)).tolist() for n in (1, 5))
    np.testing.assert_allclose(one, five[:1], rtol=1e-4, atol=1e-5)
    if name == "sac_continuous_action":
        torch.save(obs, "obs.pt")
        process = subprocess.run([sys.executable, "-c", PLAY, path], capture_output=True, text=True, check=True)
        np.testing.assert_allclose(json.loads(process.stdout), five, rtol=1e-4, atol=1e-5)
    return five


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name in CATALOG])
def test_a_signal_ends_a_run_in_order(monkeypatch, name):
    """A checkpoint, though none was asked for, the results so far, and the policy as a program; and it goes on."""
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    patch_reports(monkeypatch, name)
    script, signals = load(name), []
    report = script.report

    def interrupted(*args):
        signals.append(signal.SIGTERM)  # it comes during the first report
        return report(*args)

    with monkeypatch.context() as patch:
        patch.setattr(script, "report", interrupted)
        metrics = script.train(script.Args(**problem(name) | {"checkpoint_interval": 0}, cuda=False), signals)
    (folder,) = Path("runs").iterdir()
    assert 0 < metrics["global_step"] < problem(name)["total_timesteps"]
    assert json.loads((folder / "summary.json").read_text())["metrics"] == metrics
    actions = np.array(played(name, folder / "policy.pt2"))
    if "continuous" in name or name in MUJOCO:
        assert actions.shape == (5, 3 if name in MUJOCO else 1) and (np.abs(actions) <= 2.001).all()
    else:
        assert actions.shape == (5,) and set(actions) <= set(range(4))
    torch.export.load(folder / "policy.pt2", extra_files=(extra := {"card.json": ""}))
    card = json.loads(extra["card.json"])
    assert card["script"] == name and card["args"]["env_id"] == problem(name)["env_id"]
    assert card["metrics"] == metrics
    more = script.Args(**problem(name) | {"checkpoint_interval": 0, "resume": "auto", "save_model": False}, cuda=False)
    assert script.train(more)["global_step"] == problem(name)["total_timesteps"]


def start(name: str, *flags) -> subprocess.Popen:
    command = [sys.executable, ROOT / "leanrl" / f"{name}.py", "--no-cuda", *map(str, flags)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(Path("runs").glob("*/events*")):
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(2)
    return process


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once():
    process = start("ppo_continuous_action", "--num-steps", 200_000)  # a step that lasts
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == -signal.SIGINT
