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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import tyro

HAND_OVER = "your turn"
LEARNING_STARTS = 1_000  # env steps of random actions, off-policy: short, since what counts comes after
ROOT = Path(__file__).resolve().parent.parent
MODES = {  # mode -> which file, and its flags
    "eager": ("", []),
    "twin": ("_torchcompile", []),
    "compile": ("_torchcompile", ["--compile"]),
    "cudagraphs": ("_torchcompile", ["--cudagraphs"]),
    "compile+cudagraphs": ("_torchcompile", ["--compile", "--cudagraphs"]),
}
BF16 = {"compile+bf16": ("_torchcompile", ["--compile", "--bf16"])}
BF16["compile+cudagraphs+bf16"] = ("_torchcompile", ["--compile", "--cudagraphs", "--bf16"])
MORE_MODES = {  # of the scripts that have the flag
    "td3_continuous_action": BF16,
    "sac_continuous_action": BF16,
    "ppo_atari_envpool": {
        "compile+groups": ("_torchcompile", ["--compile", "--env-groups", 2]),
        "compile+bf16": ("_torchcompile", ["--compile", "--bf16"]),
        "compile+cudagraphs+groups": ("_torchcompile", ["--compile", "--cudagraphs", "--env-groups", 2]),
        "compile+cudagraphs+groups+bf16": (
            "_torchcompile",
            ["--compile", "--cudagraphs", "--env-groups", 2, "--bf16"],
        ),
    },
}
RANKS = {  # of the data-parallel script
    "1 rank": ("", ["--compile"]),
    "2 ranks": ("", ["--compile"]),
    "1 rank, one bucket": ("", ["--compile", "--no-ddp"]),
    "2 ranks, one bucket": ("", ["--compile", "--no-ddp"]),
    "1 rank, cudagraphs": ("", ["--compile", "--cudagraphs"]),
    "2 ranks, cudagraphs": ("", ["--compile", "--cudagraphs"]),
}


@dataclass
class Args:
    script: tyro.conf.Positional[str]
    mode: str  # of modes(script), or a peer of PEERS
    steps: int  # env steps
    env_id: str
    seed: int = 1
    folder: Path = ROOT / "leanrl"  # where the script is
    slices: int = 20  # parts of a run, of equally many steps; each at least a report
    in_turns: bool = False  # wait for stdin after each slice


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
    """A list of steps/s, a slice each, and what fills it: a function of the steps done, to be called at each report."""
    rates, last, reports = [], [], [0]

    def on_report(steps: int):
        reports[0] += 1
        if (
            reports[0] < warmup_reports
            or last
            and last[1] * args.slices // args.steps == steps * args.slices // args.steps
        ):
            return
        now = clock()
        if last:
            rates.append((steps - last[1]) / (now - last[0]))
        last[:] = now, steps
        MEASURING.clear()
        if args.in_turns:
            wait_for_turn()
        MEASURING.set()

    return rates, on_report


def modes(script: str) -> dict[str, tuple[str, list]]:
    return RANKS if "multigpu" in script else MODES | MORE_MODES.get(script, {})


def ppo_continuous_action_peer(library: str, args: Args, on_report: Callable[[int], None], normalize: bool = True):
    """PPO of Stable-Baselines3 (PyTorch) or SBX (JAX) with our defaults; `on_report` gets the steps done so far."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    envs = make_vec_env(args.env_id, n_envs=1, seed=args.seed)
    envs = VecNormalize(envs, gamma=0.99) if normalize else envs
    settings = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "gamma": 0.99}
    settings |= {"gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
    settings["policy_kwargs"] = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    return learn(library, "PPO", envs, args, settings, on_report, interval=2048)


def off_policy_peer(library: str, algorithm: str, settings: dict, args: Args, on_report: Callable[[int], None]):
    """An off-policy algorithm of either library with our defaults, as `settings`."""
    import numpy as np
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise

    envs = make_vec_env(args.env_id, 1, args.seed)
    settings = {"gamma": 0.99, "gradient_steps": 1, "learning_starts": LEARNING_STARTS} | settings
    if algorithm == "TD3":
        (dims,) = envs.action_space.shape
        settings["action_noise"] = NormalActionNoise(np.zeros(dims), np.full(dims, 0.1))
    if (library, algorithm) == ("sbx", "SAC"):  # Stable-Baselines3 has one rate for all
        settings["qf_learning_rate"] = 1e-3
    return learn(library, algorithm, envs, args, settings, on_report, interval=500)


def learn(
    library: str, algorithm: str, envs, args: Args, settings: dict, on_report: Callable[[int], None], interval: int
):
    """Trains and returns the mean episodic return; reports at the first learning, then every `interval` steps."""
    import numpy as np
    from stable_baselines3.common.callbacks import BaseCallback

    class Clock(BaseCallback):
        def _on_step(self):
            done = self.num_timesteps - settings.get("learning_starts", 0)
            if done >= 0 and done % interval == 0:
                on_report(self.num_timesteps)
            return True

    model_class = getattr(importlib.import_module({"sb3": "stable_baselines3", "sbx": "sbx"}[library]), algorithm)
    model = model_class("MlpPolicy", envs, seed=args.seed, **settings)
    if "learning_starts" not in settings:
        on_report(0)
    model.learn(args.steps, callback=Clock())
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer or [{"r": math.nan}]]))


def peers(function: Callable) -> dict[str, tuple[str, Callable]]:
    return {"sb3": ("stable_baselines3", partial(function, "sb3")), "sbx": ("sbx", partial(function, "sbx"))}


TD3 = {"learning_rate": 3e-4, "buffer_size": 1_000_000, "batch_size": 256, "tau": 0.005, "train_freq": 1}
TD3 |= {"policy_delay": 2, "policy_kwargs": {"net_arch": [256, 256]}}
SAC = {"learning_rate": 3e-4, "buffer_size": 1_000_000, "batch_size": 256, "tau": 0.005, "train_freq": 1}
SAC |= {"ent_coef": "auto", "policy_kwargs": {"net_arch": [256, 256]}}
DQN = {"learning_rate": 2.5e-4, "buffer_size": 10_000, "batch_size": 128, "tau": 1.0, "train_freq": 10}
DQN |= {"target_update_interval": 500, "exploration_initial_eps": 1.0, "exploration_final_eps": 0.05}
DQN |= {"exploration_fraction": 0.5, "policy_kwargs": {"net_arch": [120, 84]}}
PEERS = {  # script -> name of the peer -> (package it needs, function)
    "ppo_continuous_action": peers(ppo_continuous_action_peer)
    | {
        f"{library} unnormalised": (package, partial(function, normalize=False))
        for library, (package, function) in peers(ppo_continuous_action_peer).items()
    },
    "td3_continuous_action": peers(lambda library, *rest: off_policy_peer(library, "TD3", TD3, *rest)),
    "sac_continuous_action": peers(lambda library, *rest: off_policy_peer(library, "SAC", SAC, *rest)),
    "ppo_atari_envpool": {},  # neither library steps EnvPool
    "ppo_atari_multigpu": {},
    "dqn": peers(lambda library, *rest: off_policy_peer(library, "DQN", DQN, *rest)),
}


def load(args: Args):
    """The script that the mode names, as a module."""
    sys.path.insert(0, str(args.folder))
    return importlib.import_module(args.script + modes(args.script)[args.mode][0])


def run_script(args: Args) -> dict:
    """Trains by a call of the script's train(), in a folder that is thrown away."""
    import torch

    script, flags = load(args), modes(args.script)[args.mode][1]
    script.time = SimpleNamespace(perf_counter=clock, time=time.time)
    report, (rates, on_report) = script.report, slices(args, script.WARMUP_REPORTS)

    def report_and_wait(losses, *rest):
        metrics = report(losses, *rest)
        if losses:  # learning has begun
            on_report(metrics["global_step"])
        return metrics

    script.report = report_and_wait
    graphs = know_graphs(script) if hasattr(script, "CudaGraphModule") else []
    flags = [*flags, "--no-save-model", "--total-timesteps", args.steps, "--env-id", args.env_id, "--seed", args.seed]
    flags += ["--learning-starts", LEARNING_STARTS] if hasattr(script.Args, "learning_starts") else []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        metrics = script.train(tyro.cli(script.Args, args=[*map(str, flags), "--exp-name", args.mode]))
        os.chdir(ROOT)
    MEASURING.clear()
    if not rates:
        sys.exit(f"error: {args.steps} steps are too few to be measured.")
    result = {name: metrics[name] for name in ("SPS", "startup_seconds", "episodic_return")} | {"rates": rates}
    learning_steps = max(args.steps - LEARNING_STARTS * hasattr(script.Args, "learning_starts"), 1)
    result["graph_share"] = graph_share(graphs, 1 / metrics["SPS"], learning_steps, torch.cuda.synchronize)
    return result


def run_peer(args: Args, warmup_reports: int = 3) -> dict:
    """Trains with another library; the same clock as in our scripts: the first 3 reports do not count."""
    from tqdm import tqdm

    times, steps = [], []
    progress = tqdm(total=args.steps, unit="step", desc=args.mode, dynamic_ncols=True)
    rates, end_of_slice = slices(args, warmup_reports + 1)  # the first report is the start

    def on_report(num_timesteps: int):
        times.append(clock())
        steps.append(num_timesteps)
        progress.update(num_timesteps - progress.n)
        end_of_slice(num_timesteps)

    _, train = PEERS[args.script][args.mode]
    episodic_return = train(args, on_report)
    progress.close()
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
        if graph.name in ("update", "update_with_actor", "update_epoch") and graph.calls > 10:
            synchronize()
            start = time.perf_counter()
            for _ in range(200):
                graph.graph.replay()
            synchronize()
            spent += (time.perf_counter() - start) / 200 * graph.calls
    return spent / learning_steps / seconds_per_step if spent else None


def sample_gpu(samples: list[float], stop: threading.Event):
    """Appends the GPU's utilisation in percent twice a second until told to stop, while a slice runs."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
    while not stop.wait(0.5):
        if MEASURING.is_set():
            samples.append(float(subprocess.run(query, capture_output=True, text=True, check=True).stdout))


def main(args: Args):
    if args.mode in RANKS and "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.mode[0]}"]
        # a thread for each rank, also where there is one rank: the ratio is that of adding ranks
        sys.exit(subprocess.run([*launch, *sys.argv], env={"OMP_NUM_THREADS": "1"} | os.environ).returncode)
    if find_spec("mujoco"):
        import mujoco

        mujoco.set_mju_user_warning(lambda _: None)  # about its own models' files, in the middle of a progress bar
    if args.mode in modes(args.script):
        load(args)  # before PyTorch, since a script may set what PyTorch reads while it is loaded
    import torch

    has_gpu, samples, stop = torch.cuda.is_available(), [], threading.Event()
    if has_gpu:
        threading.Thread(target=sample_gpu, args=(samples, stop), daemon=True).start()
    spent = (time_pool_steps if "atari" in args.script else time_env_steps)(args.env_id)
    run = run_ranks if args.mode in RANKS else run_script if args.mode in modes(args.script) else run_peer
    result = run(args)
    stop.set()
    if result is None:
        return
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    result["env_share"] = spent[0] / spent[1] * result["SPS"] / ranks  # of the steady rate's time, in the simulator
    result["threads"] = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))  # at most
    result["tf32"] = torch.get_float32_matmul_precision() != "highest"
    result["host_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result["device_mb"] = torch.cuda.max_memory_reserved() / 2**20 if has_gpu else None
    result["gpu_utilisation"] = sum(samples) / len(samples) if samples else None
    print(f"\n{json.dumps(result)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
