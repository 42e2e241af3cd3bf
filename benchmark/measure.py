"""Measures one mode of one script, or one peer, in this process, and prints a line of JSON. runs.py starts it.

    python benchmark/measure.py ppo_continuous_action --mode compile --steps 40960 --env-id HalfCheetah-v4

A clock is read at each report of the script. With --in-turns it prints HAND_OVER after the warm-up and after each of
its slices, and waits for a line on stdin, so that other runs can have the machine for as long as theirs takes. Its
clock stands still meanwhile.
"""

import importlib
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import probes
import tyro
from catalog import CATALOG, JAX, RANKS
from peers import LEARNING_STARTS

HAND_OVER = "your turn"
WARMUP_REPORTS = 3  # the first reports, slowed by compilation and cold caches, do not count for the speed
JAX_ON_A_GPU = "pip install 'jax[cuda12]==0.10.2'"
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    script: tyro.conf.Positional[str]
    mode: str  # of its modes or peers in catalog.py
    steps: int  # env steps
    env_id: str
    seed: int = 1
    folder: Path = ROOT / "leanrl"  # where the script is
    slices: int = 20  # parts of a run, of equally many steps; each at least a report
    in_turns: bool = False  # wait for stdin after each slice
    seconds: float | None = None  # end the run once it has been measured for so long; default: after all steps
    report_interval: int | None = None  # env steps (rollouts, with envs on the device) between two reports
    flags: str = ""  # more flags of the script, in one string
    monitor: str | None = None  # folder for the episodes of a peer
    learning_starts: int = LEARNING_STARTS  # env steps of random actions, off-policy


class Enough(Exception):
    """A run has been measured for as long as was asked for."""


WAITED = [0.0]  # seconds in which others had the machine
MEASURING = threading.Event()  # set while a slice runs


def clock() -> float:
    """Seconds, but for those of others' turns."""
    return time.perf_counter() - WAITED[0]


@cache
def ranks_that_wait():
    """All ranks, as a group that waits on the host: NCCL's would keep the GPUs busy."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=timedelta(hours=2))


def wait_for_turn():
    """Lets others go on until a line comes; all ranks of a run wait for its first."""
    start = time.perf_counter()
    if os.environ.get("RANK", "0") == "0":
        print(HAND_OVER, flush=True)
        if not sys.stdin.readline():
            sys.exit("error: nobody is there to take turns with.")
    if "RANK" in os.environ:
        import torch.distributed as dist

        dist.barrier(ranks_that_wait())
    WAITED[0] += time.perf_counter() - start


def slices(args: Args) -> tuple[list[float], Callable[[int], None]]:
    """A list of steps/s, a slice each, and what fills it: a function of the steps done, to be called at each report.

    A slice is a part of the steps or, with --seconds, of that time. Then the last slice ends the run by raising Enough.
    """
    rates, last, reports = [], [], [0]

    def goes_on(steps: int) -> bool:
        if args.seconds:
            return clock() - last[0] < args.seconds / args.slices
        return last[1] * args.slices // args.steps == steps * args.slices // args.steps

    def on_report(steps: int):
        reports[0] += 1
        if reports[0] < WARMUP_REPORTS or (last and goes_on(steps)):
            return
        now = clock()
        if last:
            rates.append((steps - last[1]) / (now - last[0]))
        last[:] = now, steps
        MEASURING.clear()
        if args.seconds and len(rates) == args.slices:
            raise Enough
        if args.in_turns and args.slices > 1:
            wait_for_turn()
        MEASURING.set()

    return rates, on_report


def speed(marks: list[tuple[float, int]]) -> dict[str, float]:
    """Env steps per second after the warm-up, and how much longer the warm-up took than as many steps take now.

    A mark is (seconds, env steps): first where learning begins, then one of each report.
    """
    warm = min(WARMUP_REPORTS, len(marks) - 2)
    sps = (marks[-1][1] - marks[warm][1]) / (marks[-1][0] - marks[warm][0])
    startup_seconds = marks[warm][0] - marks[0][0] - (marks[warm][1] - marks[0][1]) / sps
    return {"SPS": sps, "startup_seconds": startup_seconds}


def load(args: Args):
    """The script that the mode names, as a module."""
    sys.path.insert(0, str(args.folder))
    return importlib.import_module(args.script + CATALOG[args.script].modes[args.mode][0])


def run_script(args: Args) -> dict:
    """Trains by a call of the script's train(), in a folder that is thrown away."""
    import torch

    script = load(args)
    report, marks, metrics = script.report, [], {}
    rates, on_report = slices(args)
    graphs = probes.know_graphs(script) if hasattr(script, "CudaGraphModule") else []
    shared = []  # with several ranks, at each report the seconds so far in what they do together
    if args.mode in RANKS:
        seconds_shared = probes.time_communication(script, torch.distributed, torch.cuda)

    def timed_report(losses, *rest):
        metrics.update(report(losses, *rest))
        *_, global_step, last_report, writer, progress = rest
        if not losses:  # learning has not begun
            return metrics
        if not marks:
            marks.append(last_report)  # learning began after it, or where the loop begins
        marks.append((clock(), global_step))
        if args.mode in RANKS:
            shared.append(seconds_shared())
        try:
            on_report(global_step)
        except Enough:
            writer.close()
            progress.close()
            raise
        return metrics

    script.report = timed_report
    script.print = lambda *words, file: words[0].startswith("run folder") or print(*words, file=file)
    flags = [*CATALOG[args.script].modes[args.mode][1], "--exp-name", args.mode]
    flags += ["--total-timesteps", args.steps, "--env-id", args.env_id, "--seed", args.seed]
    flags += ["--no-save-model"] if hasattr(script.Args, "save_model") else []
    flags += ["--learning-starts", args.learning_starts] if hasattr(script.Args, "learning_starts") else []
    flags += shlex.split(args.flags)
    if args.report_interval:
        script.REPORT_INTERVAL = script.REPORT_EVERY = args.report_interval
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with suppress(Enough):
            script.train(tyro.cli(script.Args, args=[str(flag) for flag in flags]))
        os.chdir(ROOT)
    if not rates:
        sys.exit(f"error: {args.steps} steps are too few; a run of one slice needs a multiple of its rollout.")
    result = speed(marks) | {"episodic_return": metrics["episodic_return"], "rates": rates}
    learning_steps = marks[-1][1] - marks[0][1]
    if share := probes.graph_share(graphs, 1 / result["SPS"], learning_steps, torch.cuda.synchronize):
        result["graph_share"] = share
    if shared:
        first = WARMUP_REPORTS - 1  # shared[i] belongs to marks[i + 1]
        result["communication"] = (shared[-1] - shared[first]) / (marks[-1][0] - marks[first + 1][0])
    return result


def run_peer(args: Args) -> dict:
    """Trains with another library, by the same clock."""
    marks = []
    rates, end_of_slice = slices(args)

    def on_report(num_timesteps: int):
        marks.append((clock(), num_timesteps))
        if len(marks) > 1:  # the first is where learning begins
            end_of_slice(num_timesteps)

    _, train = CATALOG[args.script].peers[args.mode]
    with suppress(Enough):
        train(args.env_id, args.seed, args.steps, on_report, args.monitor, learning_starts=args.learning_starts)
    return speed(marks) | {"rates": rates}


def uses_jax(args: Args) -> bool:
    """Whether JAX computes, not PyTorch."""
    package, _ = CATALOG[args.script].peers.get(args.mode, (None, None))
    return args.mode in JAX or package == "sbx"


def main(args: Args):
    if args.mode in RANKS and "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.mode[0]}"]
        sys.exit(subprocess.run([*launch, *sys.argv]).returncode)
    if find_spec("mujoco"):
        import mujoco

        mujoco.set_mju_user_warning(lambda _: None)  # about its own models' files, in the middle of a progress bar
    import torch

    has_gpu, samples = torch.cuda.is_available(), []
    if has_gpu and uses_jax(args):
        import jax

        if jax.default_backend() == "cpu":
            sys.exit(f"error: PyTorch has a GPU here, and JAX has none: {JAX_ON_A_GPU}")
    if has_gpu:
        uuid = str(torch.cuda.get_device_properties(0).uuid)  # nvidia-smi may count in another order
        inputs = (f"GPU-{uuid.removeprefix('GPU-')}", samples, MEASURING)
        threading.Thread(target=probes.sample_gpu, args=inputs, daemon=True).start()
    entry = CATALOG[args.script]
    if not entry.steps_elsewhere:
        probe = probes.time_pool_steps if entry.requirements == "atari" else probes.time_env_steps
        seconds_and_steps = probe(args.env_id)
    result = (run_script if args.mode in entry.modes else run_peer)(args)
    MEASURING.clear()
    result["env_share"] = None  # of the steady rate's time, in the simulator
    if not entry.steps_elsewhere:
        seconds, steps = seconds_and_steps
        result["env_share"] = seconds / steps * result["SPS"] / int(os.environ.get("WORLD_SIZE", 1))
    result["threads"] = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))  # at most
    result["host_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if has_gpu:
        result["device_mb"] = None if uses_jax(args) else torch.cuda.max_memory_reserved() / 2**20
        result["gpu_utilisation"] = sum(samples) / len(samples) if samples else None
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{json.dumps(result)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
