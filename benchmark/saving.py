"""Measures what a checkpoint of a long off-policy run costs: bytes, and seconds to write it and to load it.

    python benchmark/saving.py

It saves the replay of SAC on HalfCheetah, full with a million transitions, by the script's own functions, five times.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from compare import ROOT, machine

sys.path.insert(0, str(ROOT / "leanrl"))
import sac_continuous_action as sac

TRANSITIONS = 1_000_000
OBS_DIM, ACTION_DIM = 17, 6  # of HalfCheetah


def main():
    ring = sac.replay_ring(TRANSITIONS, 1, OBS_DIM + ACTION_DIM + 3, torch.device("cpu")).normal_()
    saving, loading = [], []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for _ in range(5):
            start = time.perf_counter()
            state = {"made_by": ["sac"], "global_step": TRANSITIONS, "replay": ring.clone()}
            path = sac.save_checkpoint(Path(folder), state)
            saving.append(time.perf_counter() - start)
            start = time.perf_counter()
            sac.load_checkpoint(sac.Args(resume=str(path)), ["sac"])
            loading.append(time.perf_counter() - start)
        size = path.stat().st_size
    result = {"transitions": TRANSITIONS, "bytes": size, "save_seconds": median(saving)}
    result |= {"load_seconds": median(loading), "machine": machine()}
    (ROOT / "benchmark" / "results" / "saving.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
