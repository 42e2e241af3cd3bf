"""Trains seeds to the end and records their learning curves.

    python benchmark/returns.py dqn --env-ids CartPole-v1 Acrobot-v1 --seeds 1 2 3 --modes eager compile

Each run appends one row to returns.csv in --out and its curve, in 100 bins, to curves/SCRIPT__ENV__STEPS__MODE.csv
there. The return is the mean of the last 100 training episodes; with envs on the device, of each env's last episode. A
run that is recorded already is not repeated: an interrupted sweep goes on where it stopped. To repeat it, take out its
row and its part of the curve.
"""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np
import tyro
from catalog import CATALOG, RANKS
from results import RESULTS, ROOT, machine, read_csv
from runs import Run, best_threads, file_of, patched
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BINS = 100
LANDER = "--num-envs 16 --num-steps 256 --num-minibatches 16 --update-epochs 10 --learning-rate 1e-3 --no-clip-vloss"
CAR = """--num-envs 16 --num-steps 16 --learning-rate 3e-3 --no-clip-vloss --env-kwargs '{"max_episode_steps": 1000}'"""
FLAGS = {  # of a script in an env for which its defaults, chosen for another, are not good
    ("ppo", "LunarLander-v3"): f"{LANDER} --gamma 0.999 --gae-lambda 0.98",
    ("ppo", "MountainCar-v0"): f"{CAR} --gae-lambda 0.98",
    ("ppo_atari_ray", "Pong-v5"): "--envs-per-worker 4 --num-steps 128",  # the batches of ppo_atari_envpool
    ("ppo_device_env", "MinAtar/Breakout-v1"): "--num-envs 64 --num-steps 128 --num-minibatches 8 --learning-rate 5e-3",
    ("ppo_mujoco", "Hopper-v5"): "--num-minibatches 16 --learning-rate 3e-4",
    ("pqn_device_env", "MinAtar/Breakout-v1"): "--num-minibatches 32 --learning-rate 5e-4 --exploration-fraction 0.1",
}


@dataclass
class Args:
    script: tyro.conf.Positional[str] = "ppo_continuous_action"  # of the eager file; --modes pick the twin
    env_ids: tuple[str, ...] = ("HalfCheetah-v4",)
    seeds: tuple[int, ...] = (1, 2, 3)
    modes: tuple[str, ...] = ("compile",)  # or peers, as in compare.py
    total_timesteps: int = 1_000_000
    flags: str = ""  # more flags of the script, in one string; they are recorded in place of the mode
    patch: Path | None = None  # applied to a copy; its name is recorded in place of the mode
    play: int = 0  # games that play.py plays with the policy, in Gymnasium's env and without noise
    out: Path = RESULTS  # returns.csv, and a file for each curve in curves/, go there


def append_csv(path: Path, rows: list[dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def learning_curve(step: np.ndarray, seconds: np.ndarray, value: np.ndarray, total_timesteps: int) -> list[dict]:
    """Mean return of the episodes that end in each of 100 equal bins of steps, with the wall-clock seconds."""
    bins = np.minimum((step - 1) * BINS // total_timesteps, BINS - 1)
    return [
        {
            "step": (b + 1) * total_timesteps // BINS,
            "seconds": f"{seconds[bins == b].max():.1f}",
            "episodes": (bins == b).sum(),
            "episodic_return": f"{value[bins == b].mean():.6g}",
        }
        for b in np.unique(bins)
    ]


def run_script(script: str, env_id: str, seed: int, mode: str, folder: str, args: Args) -> tuple:
    """Trains in a fresh process: step, seconds, return of each episode; means of the last 100 and of played games."""
    patch = args.patch
    _, flags = CATALOG[script].modes[mode]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={mode[0]}"] if mode in RANKS else []
    path = patched(script, mode, patch.resolve(), Path(folder, "patched")) if patch else file_of(script, mode)
    command = [sys.executable, "-W", "ignore", *launch, path, *flags]
    command += ["--env-id", env_id, "--seed", seed, "--total-timesteps", args.total_timesteps]
    command += shlex.split(FLAGS.get((script, env_id), "")) + shlex.split(args.flags)
    if mode in RANKS:
        command += ["--local-num-envs", 8 // int(mode[0])]  # together as many as one process has: the same updates
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmark")}  # where no_velocity.py is
    if threads := CATALOG[script].threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    subprocess.run([str(part) for part in command], cwd=folder, check=True, env=environment)
    (run_dir,) = Path(folder, "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    episodes = events.Scalars("charts/episodic_return")
    seconds = np.array([e.wall_time for e in episodes]) - events.FirstEventTimestamp()
    step, value = np.array([(e.step, e.value) for e in episodes]).T
    return step.astype(int), seconds, value, summary["metrics"]["episodic_return"], played(run_dir, args.play)


def played(run_dir: Path, episodes: int) -> str:
    """The mean return of games that play.py plays with the policy of a run; empty if it plays none, or fails."""
    if not episodes:
        return ""
    command = [sys.executable, "-W", "ignore", ROOT / "leanrl/play.py", run_dir / "policy.pt2", "--episodes", episodes]
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if process.returncode:  # hours of training are recorded all the same
        print(process.stderr, file=sys.stderr)
        return ""
    return f"{json.loads(process.stdout.splitlines()[-1])['mean']:.6g}"


def run_peer(script: str, env_id: str, seed: int, mode: str, folder: str, args: Args) -> tuple:
    """Likewise, with another library. For each env, its Monitor writes a row an episode: return, length, seconds."""
    run = Run(script, mode, CATALOG[script].steps, env_id, seed)
    environment = replace(run, threads=best_threads(run)).environment()
    command = [sys.executable, "-W", "ignore", ROOT / "benchmark" / "measure.py", script, "--mode", mode]
    command += ["--env-id", env_id, "--seed", seed, "--steps", args.total_timesteps, "--monitor", folder]
    ours = re.search(r"learning_starts: int = ([\d_]+)", file_of(script, "eager").read_text())
    command += ["--learning-starts", ours[1]] if ours else []
    subprocess.run([str(part) for part in command], check=True, env=environment)
    paths = list(Path(folder).glob("*.monitor.csv"))
    episodes = []  # step, seconds, value; all envs step together
    for path in paths:
        value, length, seconds = np.loadtxt(path, delimiter=",", skiprows=2).T
        episodes.append([length.cumsum() * len(paths), seconds, value])
    step, seconds, value = np.concatenate(episodes, 1)
    order = step.argsort(kind="stable")
    return step[order].astype(int), seconds[order], value[order], value[order][-100:].mean(), ""


def recorded(mode: str, args: Args) -> str:
    """What a run is recorded as."""
    return args.patch.stem if args.patch else args.flags or mode


def run(script: str, env_id: str, seed: int, mode: str, args: Args):
    """Trains and records the outcome."""
    total_timesteps, here = args.total_timesteps, machine()
    train = run_peer if mode in CATALOG[script].peers else run_script
    with tempfile.TemporaryDirectory() as folder:
        step, seconds, value, episodic_return, mean_played = train(script, env_id, seed, mode, folder, args)
    curve = learning_curve(step, seconds, value, total_timesteps)
    run = {"script": script, "env_id": env_id, "mode": recorded(mode, args), "seed": seed, "steps": total_timesteps}
    keep(run | {"episodic_return": f"{episodic_return:.6g}"}, curve, here, mean_played, args.out)


def keep(run: dict, curve: list[dict], here: dict, mean_played: str, out: Path):
    """Appends a run on this machine to returns.csv, and its curve to a file of its kind."""
    kind = "__".join(str(run[name]) for name in ("script", "env_id", "steps", "mode"))
    name = re.sub("[/:]", "_", f"{kind}.csv").replace(" ", "-")
    row = run | {"minutes": f"{float(curve[-1]['seconds']) / 60:.1f}"}
    row |= {"device": here["gpu"] or here["cpu"], "torch": here["torch"], "commit": here["commit"]}
    row |= {"date": date.today().isoformat(), "played": mean_played}
    append_csv(out / "curves" / name, [{"seed": run["seed"]} | row for row in curve])
    append_csv(out / "returns.csv", [row])


def main(args: Args):
    for mode in args.modes:
        if mode not in CATALOG[args.script].modes | CATALOG[args.script].peers:
            there = ", ".join(CATALOG[args.script].modes | CATALOG[args.script].peers)
            sys.exit(f"error: no mode {mode} of {args.script}; there are: {there}")
    if (args.patch or args.flags) and (len(args.modes) > 1 or args.modes[0] in CATALOG[args.script].peers):
        sys.exit("error: --patch and --flags need one mode of the script itself.")
    done = {
        (r["script"], r["env_id"], r["mode"], r["seed"], r["steps"]): r["commit"]
        for r in read_csv(args.out / "returns.csv")
    }
    for mode, env_id, seed in product(args.modes, args.env_ids, args.seeds):
        kind = recorded(mode, args)
        if commit := done.get((args.script, env_id, kind, str(seed), str(args.total_timesteps))):
            print(f"recorded already: {args.script} {env_id} {kind} seed {seed}, at commit {commit}")
        else:
            run(args.script, env_id, seed, mode, args)
    print((args.out / "returns.csv").read_text())


if __name__ == "__main__":
    main(tyro.cli(Args))
