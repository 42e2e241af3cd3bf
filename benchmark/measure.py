"""Measures one mode of one script, or one peer, in this process, and prints a line of JSON. compare.py runs it.

    python benchmark/measure.py ppo_continuous_action --mode compile --steps 40960 --env-id HalfCheetah-v4

With --in-turns it prints HAND_OVER after the warm-up and after each of its slices, and waits for a line on stdin, so
that other runs can have the machine for as long as theirs takes. Its clock stands still meanwhile.
"""

import importlib
import json
import math
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
from types import SimpleNamespace

import tyro
from catalog import CATALOG, JAX, RANKS
from peers import LEARNING_STARTS

HAND_OVER = "your turn"
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
    report_interval: int | None = None  # env steps between two reports, off-policy; default: the script's own
    flags: str = ""  # more flags of the script, in one string
    monitor: str | None = None  # folder for the episodes of a peer


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


def slices(args: Args, warmup_reports: int) -> tuple[list[float], Callable[[int], None]]:
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
        if reports[0] < warmup_reports or (last and goes_on(steps)):
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


def load(args: Args):
    """The script that the mode names, as a module."""
    sys.path.insert(0, str(args.folder))
    return importlib.import_module(args.script + CATALOG[args.script].modes[args.mode][0])


def run_script(args: Args) -> dict:
    """Trains by a call of the script's train(), in a folder that is thrown away."""
    import torch

    script, flags = load(args), CATALOG[args.script].modes[args.mode][1]
    script.time = SimpleNamespace(**vars(time) | {"perf_counter": clock})
    report, (rates, on_report) = script.report, slices(args, script.WARMUP_REPORTS)

    metrics = {}

    def report_and_wait(losses, *rest):
        metrics.update(report(losses, *rest))
        if losses:  # learning has begun
            try:
                on_report(metrics["global_step"])
            except Enough:
                *_, writer, progress = rest
                writer.close()
                progress.close()
                raise
        return metrics

    script.report = report_and_wait
    graphs = know_graphs(script) if hasattr(script, "CudaGraphModule") else []
    flags = [*flags, "--total-timesteps", args.steps, "--env-id", args.env_id, "--seed", args.seed]
    flags += ["--no-save-model"] if hasattr(script.Args, "save_model") else []
    flags += ["--learning-starts", LEARNING_STARTS] if hasattr(script.Args, "learning_starts") else []
    flags += shlex.split(args.flags)
    if args.report_interval:
        script.REPORT_INTERVAL = args.report_interval
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with suppress(Enough):
            script.train(tyro.cli(script.Args, args=[*map(str, flags), "--exp-name", args.mode]))
        os.chdir(ROOT)
    MEASURING.clear()
    if not rates:
        sys.exit(f"error: {args.steps} steps are too few; a run of one slice needs a multiple of its rollout.")
    result = {name: metrics[name] for name in ("SPS", "startup_seconds", "episodic_return")} | {"rates": rates}
    learning_steps = max(metrics["global_step"] - LEARNING_STARTS * hasattr(script.Args, "learning_starts"), 1)
    result["graph_share"] = graph_share(graphs, 1 / metrics["SPS"], learning_steps, torch.cuda.synchronize)
    return result


def run_peer(args: Args, warmup_reports: int = 3) -> dict:
    """Trains with another library; the same clock as in our scripts: the first 3 reports do not count."""
    times, steps = [], []
    rates, end_of_slice = slices(args, warmup_reports + 1)  # the first report is the start

    def on_report(num_timesteps: int):
        times.append(clock())
        steps.append(num_timesteps)
        end_of_slice(num_timesteps)

    _, train = CATALOG[args.script].peers[args.mode]
    episodic_return = None
    with suppress(Enough):
        episodic_return = train(args.env_id, args.seed, args.steps, on_report, args.monitor)
    sps = (steps[-1] - steps[warmup_reports]) / (times[-1] - times[warmup_reports])
    startup_seconds = times[warmup_reports] - times[0] - (steps[warmup_reports] - steps[0]) / sps
    return {"SPS": sps, "startup_seconds": startup_seconds, "episodic_return": episodic_return, "rates": rates}


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


def know_graphs(script) -> list:
    """Makes the script's CUDA graphs known: the list gets each CudaGraphModule, which counts its calls."""
    graphs = []

    class Known(script.CudaGraphModule):
        def __init__(self, function: Callable, **kwargs):
            super().__init__(function, **kwargs)
            self.name, self.calls = getattr(function, "__name__", ""), 0
            graphs.append(self)

        def __call__(self, *args):
            self.calls += 1
            return super().__call__(*args)

    script.CudaGraphModule = Known
    return graphs


def time_communication(script, dist, cuda) -> Callable[[], float]:
    """Times what ranks do together, waiting for slower ranks included; returns what tells the seconds so far.

    So is what DDP reduces while other gradients are still computed. What overlaps counts once. On a GPU by events in
    the stream: waiting on the host would make the run slower than it is.
    """
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

    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    for name in ("all_reduce", "all_gather_object"):
        setattr(dist, name, timed(getattr(dist, name)))
    script.DistributedDataParallel = TimedDDP
    return seconds


def run_ranks(args: Args) -> dict | None:
    """Trains as one of the ranks that torchrun has started; the result on rank 0."""
    import torch

    script = load(args)
    seconds = time_communication(script, torch.distributed, torch.cuda)
    reports, report = [], script.report  # [(seconds, of them in communication)]

    def timed_report(*args):
        reports.append((clock(), seconds()))
        return report(*args)

    script.report = timed_report
    result = run_script(args)
    (start, before), (end, after) = reports[script.WARMUP_REPORTS - 1], reports[-1]
    result["communication"] = (after - before) / (end - start)
    return result if os.environ["RANK"] == "0" else None


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


def sample_gpu(gpu: str, samples: list[tuple[float, float]], stop: threading.Event, every: float = 0.5):
    """Appends (seconds, the utilisation of a GPU in percent) until told to stop, while a slice runs."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", gpu]
    while not stop.wait(every):
        if MEASURING.is_set():
            percent = subprocess.run(query, capture_output=True, text=True).stdout.strip()
            if not percent.isdigit():  # some GPUs, and parts of one, do not say
                return
            samples.append((clock(), float(percent)))


def uses_jax(args: Args) -> bool:
    """Whether JAX computes, not PyTorch."""
    package, _ = CATALOG[args.script].peers.get(args.mode, (None, None))
    return args.mode in JAX or package == "sbx"


def main(args: Args):
    if args.mode in RANKS and "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.mode[0]}"]
        # a thread for each rank, also where there is one rank: the ratio is that of adding ranks
        sys.exit(subprocess.run([*launch, *sys.argv], env={"OMP_NUM_THREADS": "1"} | os.environ).returncode)
    if find_spec("mujoco"):
        import mujoco

        mujoco.set_mju_user_warning(lambda _: None)  # about its own models' files, in the middle of a progress bar
    if args.mode in CATALOG[args.script].modes:
        load(args)  # before PyTorch, since a script may set what PyTorch reads while it is loaded
    import torch

    has_gpu, samples, stop = torch.cuda.is_available(), [], threading.Event()
    if has_gpu and uses_jax(args):
        import jax

        if jax.default_backend() == "cpu":
            sys.exit(f"error: PyTorch has a GPU here, and JAX has none: {JAX_ON_A_GPU}")
    if has_gpu:
        uuid = str(torch.cuda.get_device_properties(0).uuid)  # nvidia-smi may count in another order
        gpu = f"GPU-{uuid.removeprefix('GPU-')}"
        threading.Thread(target=sample_gpu, args=(gpu, samples, stop), daemon=True).start()
    entry = CATALOG[args.script]
    if not entry.steps_elsewhere:
        spent = (time_pool_steps if entry.requirements == "atari" else time_env_steps)(args.env_id)
    run = run_ranks if args.mode in RANKS else run_script if args.mode in CATALOG[args.script].modes else run_peer
    result = run(args)
    stop.set()
    if result is None:
        return
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    # of the steady rate's time, in the simulator
    result["env_share"] = None if entry.steps_elsewhere else spent[0] / spent[1] * result["SPS"] / ranks
    result["threads"] = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))  # at most
    result["tf32"] = torch.get_float32_matmul_precision() != "highest"
    result["host_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result["device_mb"] = torch.cuda.max_memory_reserved() / 2**20 if has_gpu and not uses_jax(args) else None
    result["gpu_utilisation"] = sum(percent for _, percent in samples) / len(samples) if samples else None
    result["gpu_samples"] = samples
    print(f"\n{json.dumps(result)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
