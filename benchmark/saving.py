"""Measures what a checkpoint of a long off-policy run costs: bytes, and seconds to write it and to load it.

    python benchmark/saving.py           # keeps a table in benchmark/results/saving.json

It saves the replay of SAC on HalfCheetah, full with a million transitions, by the script's own functions, five times.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from results import RESULTS, ROOT, keep, machine

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


if __name__ == "__main__":
    row = measure(TRANSITIONS)
    keep(RESULTS, "saving", {"machine": machine(), "rows": [row]})
    print(row)
