"""Measures what a checkpoint of a long off-policy run costs, and how long an exported policy needs for an action.

    python benchmark/saving.py           # keeps a table in runs/benchmark/saving.json

It saves the replay of SAC on HalfCheetah, full with a million transitions, by the script's own functions, five times.
Then it exports an untrained policy, loads it, and calls it a thousand times in one thread, each time with one row.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro
from results import ROOT, RUNS, keep, machine

sys.path.insert(0, str(ROOT / "leanrl"))
import sac_continuous_action as sac

TRANSITIONS = 1_000_000
OBS_DIM, ACTION_DIM = 17, 6  # of HalfCheetah


def measure(transitions: int) -> dict:
    ring = torch.randn(transitions + 1, 1, OBS_DIM + ACTION_DIM + 3)
    saving, loading = [], []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder, "checkpoint.pt")
        for _ in range(5):
            start = time.perf_counter()
            sac.save_checkpoint(path.parent, sac.Args(), {"step": transitions, "replay": ring.clone()})
            saving.append(time.perf_counter() - start)
            start = time.perf_counter()
            sac.load_checkpoint(sac.Args(resume=str(path)))
            loading.append(time.perf_counter() - start)
        size = path.stat().st_size
    times = {"save_seconds": median(saving), "load_seconds": median(loading)}
    return {"transitions": transitions, "bytes": size} | times


def policy_microseconds() -> float:
    """Median of a call of the policy's program."""
    torch.set_num_threads(1)
    actor = sac.GreedyActor(sac.GaussianActor(OBS_DIM, ACTION_DIM), np.zeros(ACTION_DIM), np.ones(ACTION_DIM))
    obs = torch.zeros(2, OBS_DIM)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        sac.finish_run(sac.Args(), Path(folder), {}, sac.SummaryWriter(folder), actor, obs)
        policy = torch.export.load(Path(folder, "policy.pt2")).module()
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        policy(obs[:1]).numpy()
        times.append(time.perf_counter() - start)
    return 1e6 * median(times)


def main(out: Path = RUNS):
    row = measure(TRANSITIONS) | {"policy_microseconds": policy_microseconds()}
    keep(out, "saving", {"machine": machine(), "rows": [row]})
    print(row)


if __name__ == "__main__":
    tyro.cli(main)
