"""Trains seeds to the end and records their learning curves.

    python benchmark/returns.py dqn --env-ids CartPole-v1 Acrobot-v1 --seeds 1 2 3 --modes eager compile

Each run appends one row to results/returns.csv (the mean return of its last 100 training episodes) and its curve, in
100 bins, to results/curves/SCRIPT__ENV__STEPS__MODE.csv. A run that is recorded already is not repeated: an
interrupted sweep goes on where it stopped. To repeat it, take out its row and its part of the curve.
"""

import csv
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np
import tyro
from compare import machine
from measure import RANKS, ROOT, modes
from plot import RESULTS, read_csv, returns_block
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

BINS = 100


@dataclass
class Args:
    script: tyro.conf.Positional[str] = "ppo_continuous_action"  # of the eager file; --modes pick the twin
    env_ids: tuple[str, ...] = ("HalfCheetah-v4",)
    seeds: tuple[int, ...] = (1, 2, 3)
    modes: tuple[str, ...] = ("compile",)  # as in compare.py
    total_timesteps: int = 1_000_000


def append_csv(path: Path, rows: list[dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def learning_curve(run_dir: Path, total_timesteps: int) -> list[dict]:
    """Mean episodic return of each of 100 equal bins of steps that saw an episode end, with the wall-clock seconds."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    episodes = events.Scalars("charts/episodic_return")
    step, value = np.array([e.step for e in episodes]), np.array([e.value for e in episodes])
    seconds = np.array([e.wall_time for e in episodes]) - events.FirstEventTimestamp()
    bins = np.minimum((step - 1) * BINS // total_timesteps, BINS - 1)
    return [
        {
            "step": (b + 1) * total_timesteps // BINS,
            "seconds": f"{seconds[bins == b].max():.1f}",
            "episodes": (bins == b).sum(),
            "episodic_return": f"{value[bins == b].mean():.2f}",
        }
        for b in np.unique(bins)
    ]


def run(script: str, env_id: str, seed: int, mode: str, total_timesteps: int):
    """Trains in a fresh process and records the outcome."""
    suffix, flags = modes(script)[mode]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={mode[0]}"] if mode in RANKS else []
    command = [sys.executable, "-W", "ignore", *launch, ROOT / "leanrl" / f"{script}{suffix}.py", *flags]
    command += ["--env-id", env_id, "--seed", seed, "--total-timesteps", total_timesteps]
    if mode in RANKS:
        command += ["--local-num-envs", 8 // int(mode[0])]  # together as many as one process has: the same updates
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(part) for part in command], cwd=folder, check=True)
        (run_dir,) = Path(folder, "runs").iterdir()
        summary = json.loads((run_dir / "summary.json").read_text())
        curve = learning_curve(run_dir, total_timesteps)
    key = {"script": script, "env_id": env_id, "mode": mode, "seed": seed}
    name = f"{script}__{env_id}__{total_timesteps}__{mode}.csv".replace("/", "_").replace(" ", "-")
    append_csv(RESULTS / "curves" / name, [{"seed": seed} | row for row in curve])
    metrics, here = summary["metrics"], machine()
    row = key | {
        "steps": total_timesteps,
        "episodic_return": f"{metrics['episodic_return']:.2f}",
        "minutes": f"{float(curve[-1]['seconds']) / 60:.1f}",
        "device": here["gpu"] or here["cpu"],
        "torch": here["torch"],
        "commit": here["commit"],
        "date": date.today().isoformat(),
    }
    append_csv(RESULTS / "returns.csv", [row])


def main(args: Args):
    for mode in args.modes:
        if mode not in modes(args.script):
            sys.exit(f"error: no mode {mode} of {args.script}; there are: {', '.join(modes(args.script))}")
    done = {
        (r["script"], r["env_id"], r["mode"], r["seed"], r["steps"]): r["commit"]
        for r in read_csv(RESULTS / "returns.csv")
    }
    for mode, env_id, seed in product(args.modes, args.env_ids, args.seeds):
        if commit := done.get((args.script, env_id, mode, str(seed), str(args.total_timesteps))):
            print(f"recorded already: {args.script} {env_id} {mode} seed {seed}, at commit {commit}")
        else:
            run(args.script, env_id, seed, mode, args.total_timesteps)
    print(returns_block())


if __name__ == "__main__":
    main(tyro.cli(Args))
