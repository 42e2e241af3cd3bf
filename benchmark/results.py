"""What was measured, in one format: a file a kind, a list of tables. A table has settings, its machine, and rows.

benchmark/results holds what the documents show. Its speed.json, say, has a table for each script, set of flags and
processor; of those, a script's first in its own settings stands in the README.
"""

import csv
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
from catalog import CATALOG

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
RUNS = Path("runs/benchmark")  # where results go unless they are to be published
SETTINGS = {"script": None, "env_id": None, "flags": "", "threads": None}  # that tell tables apart, with defaults
NAME_GPUS = """
import torch
for i in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(i))
"""


def gpu_names() -> list[str]:
    """The names of the GPUs that PyTorch can use. Another process asks it: this one would hold memory on them."""
    if not shutil.which("nvidia-smi"):
        return []  # importing torch takes seconds
    process = subprocess.run([sys.executable, "-c", NAME_GPUS], stdout=subprocess.PIPE, text=True, check=True)
    return process.stdout.splitlines()


def machine() -> dict:
    """What a figure depends on besides the code."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = re.findall(r"model name\s*: (.*)", text)
    generation = re.findall(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)", text)  # a name may be that of several
    details = "".join(" (family {}, model {})".format(*numbers) for numbers in generation[:1])
    details += f" {'with' if ' avx512f ' in text else 'without'} AVX-512"
    gpus = gpu_names()
    commit = ["git", "rev-parse", "--short", "HEAD"]
    git = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True) if shutil.which("git") else None
    return {
        "cpu": names[0] + details if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": next(iter(gpus), None),
        "gpus": len(gpus),
        "torch": version("torch"),
        "python": platform.python_version(),
        "commit": (git.stdout.strip() if git else "") or None,
        "date": date.today().isoformat(),
    }


def tables(kind: str, **settings) -> list[dict]:
    """The published tables of a kind that have these settings, by script."""
    path = RESULTS / f"{kind}.json"
    found = json.loads(path.read_text()) if path.exists() else []
    found = [table for table in found if all(table[name] == value for name, value in settings.items())]
    return sorted(found, key=lambda table: table.get("script", ""))


def of_catalog(**settings) -> list[dict]:
    """The tables of speed of scripts as they are: in their own env, without further flags, with their own threads."""
    found = tables("speed", flags="", threads=None, **settings)
    return [table for table in found if table["env_id"] == CATALOG[table["script"]].env_id]


def first_of_each_script() -> list[dict]:
    found = {}
    for table in of_catalog():
        found.setdefault(table["script"], table)
    return list(found.values())


def keep(folder: Path, kind: str, table: dict) -> Path:
    """Writes a table to its file, in place of one with the same settings; of speed, on the same processor."""
    path = folder / f"{kind}.json"

    def key(table: dict) -> tuple:
        where = table["machine"]
        settings = tuple(table.get(name, default) for name, default in SETTINGS.items())
        return (*settings, where["cpu"], where["gpu"]) if kind == "speed" else settings

    kept = json.loads(path.read_text()) if path.exists() else []
    keys = [key(other) for other in kept]
    if key(table) in keys:
        kept[keys.index(key(table))] = table
    else:
        kept.append(table)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")  # a line a table
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def interval(turns: list[list[float]]) -> list[float]:
    """Median and its 95 % bootstrap interval, [median, low, high], where turns and what is in them are drawn anew."""
    rng, counts = np.random.default_rng(0), np.array([len(turn) for turn in turns])
    values = np.array([turn + [np.nan] * (counts.max() - len(turn)) for turn in turns])
    turn = rng.integers(len(turns), size=(2_000, len(turns), 1))
    drawn = values[turn, rng.integers(counts[turn], size=(*turn.shape[:2], counts.max()))]
    medians = np.nanmedian(np.where(np.arange(counts.max()) < counts[turn], drawn, np.nan), axis=(1, 2))
    return [float(np.nanmedian(values)), *np.quantile(medians, [0.025, 0.975]).tolist()]


def ratios(runs: list[dict], base: list[dict]) -> list[list[float]]:
    """Of each turn, the ratios of slices of a round; a library may report once less."""
    return [[a / b for a, b in zip(r["rates"], s["rates"])] for r, s in zip(runs, base, strict=True)]


def against(row: dict, other: dict) -> float:
    """How many times as fast a mode is as another: the median of the ratios of slices of a round."""
    return median(ratio for turn in ratios(row["runs"], other["runs"]) for ratio in turn)


def may_pay(row: dict, first: dict) -> bool:
    """Whether a row is of compiled code beside the plain file; ranks all compile."""
    return "compile" in row["mode"] and first["mode"] == "eager"


def pays_after(compiled: dict, eager: dict) -> int | None:
    """The number of env steps after which the compiled script has made up for its start-up; None: no gain is shown."""
    ratio, low, _ = compiled["ratio"]
    if compiled.get("startup_seconds") is None or low <= 1:
        return None
    waited = max(compiled["startup_seconds"], 0) - max(eager["startup_seconds"], 0)
    return round(max(waited, 0) * eager["sps"][0] / (1 - 1 / ratio), -3)
