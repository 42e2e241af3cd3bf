"""Data-parallel training, by processes on the CPU: as exact as one process, and no rank waits for another for ever."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, KnownSeeds, ScriptedPool, forked, load
from conftest import train as train_here
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cuda import distance

SCRIPT = "ppo_atari_multigpu"
SIZES = {"num_steps": 12, "num_minibatches": 2, "update_epochs": 3, "total_timesteps": 72}
GREEDY_ON_SCRIPTED_GAMES = """
script.make_envs = ScriptedPool
torch.Tensor.exponential_ = lambda self: self.fill_(1.0)
torch.randperm = lambda n, device=None: torch.arange(n, device=device)
"""
WITHOUT_KERNELS = """
compile = torch.compile
torch.compile = lambda function, **settings: compile(function, backend="aot_eager_decomp_partition", **settings)
"""


@pytest.fixture(autouse=True)
def no_process_is_left(own_folder, fork_server):
    """Neither a rank nor a child of one: whoever works in the test's folder and is not the test."""
    yield
    left = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if int(link.parent.name) != os.getpid() and link.readlink().is_relative_to(own_folder):
                left.append((link.parent / "cmdline").read_text().replace("\0", " "))
                os.kill(int(link.parent.name), signal.SIGKILL)
    assert not left


def rank_variables(world_size: int, nodes: int = 1) -> list[dict[str, str]]:
    """The environment variables that torchrun would give each rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    local = [str(rank % (world_size // nodes)) for rank in range(world_size)]
    return [common | {"RANK": str(rank), "LOCAL_RANK": local[rank]} for rank in range(world_size)]


class Ranks:
    """Processes that run the file itself, started as torchrun would start them; none outlives the test."""

    def __init__(self, world_size: int, **args):
        args = {"cuda": False, "timeout": 20} | args
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in args.items() if type(value) is not bool]
        flags += [f"--{'' if value else 'no-'}{name}" for name, value in args.items() if type(value) is bool]
        self.processes = [
            subprocess.Popen(
                [sys.executable, ROOT / "leanrl" / f"{SCRIPT}.py", *flags],
                env=os.environ | variables,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
            )
            for variables in rank_variables(world_size)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stderr.close()

    def wait(self, seconds: float) -> list[tuple[int, str]]:
        """Exit codes and what the ranks wrote to stderr, once all have ended; an error if one has not by then."""
        deadline = time.monotonic() + seconds
        outputs = [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[1] for process in self.processes]
        return [(process.returncode, output) for process, output in zip(self.processes, outputs, strict=True)]


def be_rank(variables: dict[str, str], cwd, patch: str, args: dict):
    """Trains as one rank and writes the final parameters; `patch` is code that changes the script before."""
    os.chdir(cwd)
    os.environ.update(variables)
    rank = int(variables["RANK"])
    script = load(SCRIPT)
    agents = []

    class SpiedAgent(script.AtariAgent):
        def __init__(self, *args):
            super().__init__(*args)
            for p in self.parameters():
                p.data += rank  # the broadcast of rank 0's parameters must put that right
            agents.append(self)

        def forward(self, frames):
            assert frames.is_contiguous(memory_format=torch.channels_last)
            return super().forward(frames)

    script.AtariAgent = SpiedAgent
    torch.set_num_threads(1)
    np.random.SeedSequence = KnownSeeds  # as in conftest.train()
    exec(patch, {"os": os, "rank": rank, "script": script, "sys": sys, "torch": torch, "ScriptedPool": ScriptedPool})
    script.train(script.Args(**args | {"save_model": False}))
    torch.save({name: p.detach() for name, p in agents[0].named_parameters()}, f"parameters{rank}.pt")
    counters = torch._dynamo.utils.counters
    torch.save((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())), f"graphs{rank}.pt")
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not any("gloo" in name for name in threads), threads  # one that outlives the interpreter may hang


def run_ranks(world_size: int, cwd, patch: str, nodes: int = 1, **args) -> list[tuple[int, str]]:
    """Exit codes and what the ranks wrote, once all have ended."""
    cwd.mkdir(exist_ok=True)
    args = {"cuda": False, "timeout": 20} | args
    return forked(be_rank, *((variables, cwd, patch, args) for variables in rank_variables(world_size, nodes)))


def train(world_size: int, cwd, patch: str = GREEDY_ON_SCRIPTED_GAMES, **args) -> list[dict[str, torch.Tensor]]:
    """The final parameters on each rank."""
    for code, output in run_ranks(world_size, cwd, patch, **args):
        assert code == 0, output
    return [torch.load(cwd / f"parameters{rank}.pt", map_location="cpu") for rank in range(world_size)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, fork_server):
    """The final parameters of one process on env 0 and env 1, computed once for each value of norm_adv."""

    @functools.cache
    def train_one(norm_adv: bool) -> dict[str, torch.Tensor]:
        (one,) = train(1, tmp_path_factory.mktemp("one") / "run", local_num_envs=2, **SIZES, norm_adv=norm_adv)
        return one

    return train_one


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [{}, {"norm_adv": False}, {"ddp": False}, {"compile": True}], ids=lambda flags: "-".join(flags) or "ddp"
)
def test_two_ranks_compute_what_one_process_computes_on_all_envs(own_folder, one_process, flags):
    """Env 0 and env 1 have different numbers of rows that count, so a mean of means would not do."""
    one = one_process(norm_adv=flags.get("norm_adv", True))
    patch = GREEDY_ON_SCRIPTED_GAMES + WITHOUT_KERNELS
    a, b = train(2, own_folder / "two", patch, local_num_envs=1, **SIZES, **flags)
    assert torch.load(own_folder / "two" / "graphs0.pt") == ((3 if "compile" in flags else 0), 0)  # none twice
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert max((a[name] - one[name]).abs().max().item() for name in a) < 2e-6  # 18 steps of Adam of 2.5e-4


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flags", [{}, {"ddp": False}, {"cudagraphs": True}, {"compile": True, "cudagraphs": True}])
def test_two_gpus_compute_what_one_computes_on_all_envs(own_folder, flags):
    """Ten rollouts, so that graphs are captured early in the first and replayed in the others."""
    sizes = {"cuda": True, "timeout": 60} | SIZES | {"total_timesteps": 240}
    (one,) = train(1, own_folder / "one", local_num_envs=2, **sizes)
    (still,) = train(1, own_folder / "still", local_num_envs=2, **sizes, learning_rate=0.0)
    a, b = train(2, own_folder / "two", local_num_envs=1, **sizes, **flags)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert distance(one, a) < 0.02 * distance(one, still)


@pytest.mark.slow
def test_one_rank_computes_what_the_script_for_one_process_computes(monkeypatch, one_process):
    one = one_process(norm_adv=True)
    plain = load("ppo_atari_envpool")
    monkeypatch.setattr(plain, "make_envs", ScriptedPool)
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self: self.fill_(1.0))
    monkeypatch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n))
    other, still = (
        train_here(monkeypatch, "ppo_atari_envpool", num_envs=2, **SIZES, **flags).parameters
        for flags in ({}, {"learning_rate": 0.0})
    )
    assert max((one[name] - other[name]).abs().max().item() for name in one) < 2e-6
    assert max((one[name] - still[name]).abs().max().item() for name in one) > 5e-4


@pytest.mark.slow
def test_rank_0_reports_the_games_of_all(own_folder):
    """The hand-checked games of test_two_envs_keep_their_own_episodes, each env on a rank of its own."""
    sizes = {"local_num_envs": 1, "num_steps": 7, "num_minibatches": 1, "total_timesteps": 14}
    train(2, own_folder / "run", **sizes)
    (run_dir,) = (own_folder / "run" / "runs").iterdir()
    events = EventAccumulator(str(run_dir)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("charts/episodic_return")] == [(8, 100), (12, 390), (14, 230)]
    assert [e.value for e in events.Scalars("charts/episodic_length")] == [4, 5, 2]
    assert json.loads((run_dir / "summary.json").read_text())["metrics"]["episodic_return"] == 240


@pytest.mark.slow
def test_ranks_play_games_of_their_own_and_rank_0_logs_for_all(own_folder):
    patch = (
        "original, make_envs = script.advantage_moments, script.make_envs\n"
        "def spied(batch, minibatches):\n"
        "    torch.save((batch, seeds, torch.initial_seed()), f'spied{rank}.pt')\n"
        "    return original(batch, minibatches)\n"
        "def spied_envs(env_id, its_seeds):\n"
        "    global seeds\n    seeds = its_seeds\n    return make_envs(env_id, its_seeds)\n"
        "script.advantage_moments, script.make_envs = spied, spied_envs\n"
    )
    sizes = {"local_num_envs": 2, "num_steps": 128, "total_timesteps": 1024, "update_epochs": 1}
    train(2, own_folder / "run", patch, nodes=2, **sizes)  # each has LOCAL_RANK 0
    spied = (torch.load(own_folder / "run" / f"spied{rank}.pt") for rank in range(2))
    (a, env_seeds, seed), (b, other_env_seeds, other_seed) = spied
    assert not torch.equal(a["obs"], b["obs"]) and not torch.equal(a["action"], b["action"])
    assert len({*env_seeds, *other_env_seeds}) == 4 and seed != other_seed
    (run_dir,) = (own_folder / "run" / "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["args"]["local_num_envs"] == 2
    assert summary["metrics"]["global_step"] == 1024
    events = EventAccumulator(str(run_dir)).Reload()
    assert [e.step for e in events.Scalars("charts/SPS")] == [512, 1024]
    rates = [(e.step, e.value) for e in events.Scalars("charts/learning_rate")]
    assert rates == [(512, pytest.approx(2.5e-4)), (1024, pytest.approx(1.25e-4))]
    steps = [e.step for e in events.Scalars("charts/episodic_return")]
    assert steps == sorted(steps) and all(step % 4 == 0 for step in steps) and len(steps) >= 2


def test_a_rollout_with_one_valid_row_is_no_divergence(own_folder):
    sizes = {"local_num_envs": 1, "num_steps": 2, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 64}
    train(1, own_folder / "one", **sizes)


@pytest.mark.slow
def test_the_largest_seed_and_a_signal_too_late_to_stop_anything_do_no_harm(own_folder):
    patch = GREEDY_ON_SCRIPTED_GAMES + (
        "train, finish_run, signals = script.train, script.finish_run, []\n"
        "script.train = lambda args: train(args, signals)\n"
        "def finish_late(*args):\n    signals.append(15)\n    finish_run(*args)\n"
        "script.finish_run = finish_late\n"
    )
    ((code, output),) = run_ranks(1, own_folder, patch, local_num_envs=2, **SIZES, seed=2**63 - 1)
    assert code == 0 and "to go on" not in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "fault", "flags"),
    [
        pytest.param(1, signal.SIGSTOP, {}, marks=pytest.mark.long),
        (0, signal.SIGKILL, {"ddp": False}),  # where all meet
    ],
)
def test_a_rank_that_fails_ends_the_others(own_folder, victim, fault, flags):
    sizes = {"local_num_envs": 2, "num_steps": 16, "num_minibatches": 1, "total_timesteps": 10**9, "timeout": 10}
    with Ranks(2, **sizes, **flags) as ranks:
        shown = b""
        while b"episodic_return" not in shown:  # of rank 0's bar, after an iteration; the time limit is the test's
            shown += (part := os.read(ranks.processes[0].stderr.fileno(), 4096))
            assert part, shown
        ranks.processes[victim].send_signal(fault)
        other = ranks.processes[1 - victim]
        _, output = other.communicate(timeout=25)
    said = r"Connection (closed|reset) by peer|Timed out waiting \d+ms"
    assert other.returncode == 1 and re.search(said, output), output


@pytest.mark.slow
def test_a_break_is_decided_by_all_ranks(own_folder):
    """Rank 0 alone has moved far, by 1. The mean over ranks is 0.5, so both leave the epochs."""
    patch = GREEDY_ON_SCRIPTED_GAMES + (
        "original = script.ppo_loss\n"
        "def ppo_loss(*args):\n    loss, losses = original(*args)\n    print('a minibatch', file=sys.stderr)\n"
        "    losses[script.PPO_LOSSES.index('approx_kl')] = 1.0 - rank\n    return loss, losses\n"
        "script.ppo_loss = ppo_loss\n"
    )
    for code, output in run_ranks(2, own_folder, patch, local_num_envs=1, **SIZES, target_kl=0.4):
        assert code == 0 and output.count("a minibatch\n") == 6, output  # three rollouts of two minibatches
    (summary,) = own_folder.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["metrics"]["approx_kl"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "patch", "message"),
    [
        (
            2,
            "original = script.ppo_loss\n"
            "def ppo_loss(*args):\n    loss, losses = original(*args)\n"
            "    losses[script.PPO_LOSSES.index('approx_kl')] += float('nan') if rank else 0\n    return loss, losses\n"
            "script.ppo_loss = ppo_loss\n",
            "error: not finite: ",  # of rank 1 alone
        ),
        (
            3,
            "original = script.gather\n"
            "def gather(games, signals, params):\n"
            "    params[0].data += rank == 0\n    return original(games, signals, params)\n"
            "script.gather = gather\n",
            "the ranks have different parameters",
        ),
    ],
    ids=["nan", "divergence"],
)
def test_what_stops_one_rank_stops_all(own_folder, world_size, patch, message):
    sizes = SIZES | {"total_timesteps": 36 * world_size}
    for code, output in run_ranks(world_size, own_folder, GREEDY_ON_SCRIPTED_GAMES + patch, local_num_envs=1, **sizes):
        assert code == 1 and message in output, output


def test_without_torchrun_it_says_how_to_start(capsys, monkeypatch):
    script = load(SCRIPT)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args())
    assert exit.value.code == 2 and "torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"env_id": "Pnog-v5"}, "Pong-v5"),
        ({"num_minibatches": 3}, "a rollout has 1024 steps; --num-minibatches must divide it"),
        ({"total_timesteps": 100}, "--total-timesteps must be at least 2048"),
        ({"timeout": 0}, "--timeout"),
    ],
    ids=str,
)
def test_bad_input_gets_a_sentence(own_folder, capsys, monkeypatch, flags, message):
    script = load(SCRIPT)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(cuda=False, **flags))
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_the_local_rank_chooses_the_gpu(monkeypatch):
    """The tenth rank of all is the second one of its node."""
    script = load(SCRIPT)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception, match="would use 1"):
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"would use {device}"))
        script.start_rank(script.Args(), {})


def test_moments_are_those_of_the_valid_rows(monkeypatch):
    script, rng = load(SCRIPT), np.random.default_rng(0)
    monkeypatch.setattr(script.dist, "all_reduce", lambda sums: None)  # of one rank
    valid, advantage = rng.random(64) < 0.8, rng.normal(3, 2, 64)
    batch = {"valid": torch.tensor(valid).float(), "advantage": torch.tensor(advantage).float()}
    minibatches = torch.randperm(64).view(4, 16)
    for idx, moments in zip(minibatches, script.advantage_moments(batch, minibatches), strict=True):
        rows = advantage[idx][valid[idx]]
        np.testing.assert_allclose(moments, [len(rows), rows.mean(), rows.std(ddof=1)], rtol=1e-4)


SCRIPTED_GAMES = "script.make_envs = ScriptedPool\n"
DIE_AFTER_TWO_SAVES = SCRIPTED_GAMES + (
    "original, saves = script.save_checkpoint, []\n"
    "def save_checkpoint(*args):\n    original(*args)\n    saves.append(1)\n    len(saves) == 2 and os._exit(9)\n"
    "script.save_checkpoint = save_checkpoint\n"
)


@pytest.mark.slow
def test_two_killed_and_resumed_ranks_compute_the_same_bits(own_folder):
    """Rank 0 dies after its second checkpoint, of three iterations; rank 1 learns of it."""
    sizes = SIZES | {"local_num_envs": 1, "checkpoint_interval": 24}
    whole = train(2, own_folder / "whole", SCRIPTED_GAMES, **sizes)
    assert run_ranks(2, own_folder / "killed", DIE_AFTER_TWO_SAVES, **sizes)[0][0] == 9
    (path,) = (own_folder / "killed").glob("runs/*/checkpoint.pt")
    resumed = train(2, own_folder / "resumed", SCRIPTED_GAMES, **sizes, resume=str(path))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(whole, resumed) for name in a)
    states = [torch.load(next((own_folder / x).glob("runs/*/checkpoint.pt"))) for x in ("whole", "resumed")]
    assert states[0]["last_returns"] == states[1]["last_returns"] and len(states[0]["last_returns"]) > 0


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(own_folder):
    sizes = {"env_id": "Pong-v5", "local_num_envs": 2, "num_steps": 32, "total_timesteps": 10**6}
    with Ranks(2, **sizes) as ranks:
        while not list(own_folder.glob("runs/*/events*")):
            time.sleep(0.1)
        time.sleep(3)
        ranks.processes[1].send_signal(signal.SIGTERM)
        codes = [code for code, _ in ranks.wait(30)]
    assert codes == [0, 128 + signal.SIGTERM]
    (folder,) = own_folder.glob("runs/*")
    step = json.loads((folder / "summary.json").read_text())["metrics"]["global_step"]
    assert 0 < step < 10**6 and torch.load(folder / "checkpoint.pt")["global_step"] == step
    assert (folder / "policy.pt2").exists()


@pytest.mark.long
@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint_after_a_rank_is_killed(own_folder):
    copy = shutil.copy(ROOT / "leanrl" / f"{SCRIPT}.py", own_folder)  # needs no other file
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [copy, "--env-id", "Pong-v5", "--local-num-envs", 2, "--num-steps", 32, "--update-epochs", 1]
    command += ["--total-timesteps", 128 * 16, "--no-cuda", "--cudagraphs"]
    command += ["--checkpoint-interval", 256, "--resume", "auto"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([str(part) for part in command], cwd=own_folder, env=env, **pipes)
    try:
        while not list(own_folder.glob("runs/*/checkpoint.pt")):
            time.sleep(0.1)
            assert process.poll() is None
        ranks = [p for p in Path("/proc").glob("[0-9]*") if is_rank(p, own_folder)]
        os.kill(int(ranks[-1].name), signal.SIGKILL)
        _, output = process.communicate(timeout=200)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=40)
        process.kill()
    assert process.returncode == 0, output
    assert output.count("--cudagraphs needs a GPU; going on without") == 2  # of rank 0, at each start
    first, second = sorted(own_folder.glob(f"runs/Pong-v5__{SCRIPT}__1__*"))
    assert not (first / "summary.json").exists()
    assert json.loads((second / "summary.json").read_text())["metrics"]["global_step"] == 128 * 16
    events = EventAccumulator(str(second)).Reload()
    assert events.Scalars("charts/SPS")[0].step > 128  # not from the beginning


def is_rank(process: Path, folder: Path) -> bool:
    """Whether a process of /proc runs the script in this folder. torchrun names it, too, and is none."""
    with contextlib.suppress(OSError):
        words = (process / "cmdline").read_text().split("\0")
        is_script = any(word.endswith(f"{SCRIPT}.py") for word in words) and "torch.distributed.run" not in words
        return is_script and (process / "cwd").readlink() == folder
    return False
