"""Measures where the time of a training loop goes: act, learn, step and store, report.

    python benchmark/phases.py dqn --modes eager compile

A clock is read at the comment that begins each phase of a script's loop, in a copy of its source. Shown is the time per
environment step after the warm-up, on the host: what a GPU does meanwhile is not in it. Writes OUT/SCRIPT.json.
"""

import json
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import tyro
from catalog import CATALOG, RANKS
from compare import Run, machine, measure, phases_table
from measure import ROOT
from tqdm import tqdm

PHASES = ("act", "learn", "step and store", "report")
CLOCK = """
import atexit, collections, os, time as _time  # the clock of benchmark/phases.py
_spent, _last = collections.Counter(), [None, 0.0]
def _mark(phase):
    now = _time.perf_counter()
    _spent[_last[0]] += now - _last[1]
    _last[:] = phase, now
def _write():
    with open(os.environ["PHASES_OUT"], "w") as file:
        file.write(repr({k: v for k, v in _spent.items() if k}))
atexit.register(_write)
"""


def has_phases(script: str) -> bool:
    """Whether one process acts, learns and steps in its loop."""
    return CATALOG[script].modes is not RANKS and not CATALOG[script].steps_elsewhere


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = tuple(filter(has_phases, CATALOG))
    steps: int | None = None  # env steps of each run; default: the script's own
    modes: tuple[str, ...] = ("eager", "twin", "compile")
    pairs: int = 3  # turns of all modes; shown is each mode's run of median speed, and the median simulator
    out: Path = Path("runs/phases")  # where the JSON goes


def timed(source: str) -> str:
    """The source with a mark at the comment of each phase; the last report of the warm-up starts the count anew."""
    for phase in PHASES:
        source, found = re.subn(rf"^( +)# {phase}\b.*$", rf'\1_mark("{phase}")', source, flags=re.MULTILINE)
        assert found == 1, f"{found} phases {phase!r}"
    warm = r"\1\2\n\1if len(marks) == WARMUP_REPORTS + 1:\n\1    _spent.clear()\n"
    source, found = re.subn(r"^( +)(metrics = report\(.*\))\n", warm, source, flags=re.MULTILINE)
    assert found == 1 and "marks.append(" in source and "\n\n\n@dataclass" in source
    return source.replace("\n\n\n@dataclass", CLOCK + "\n\n@dataclass", 1)


def measure_phases(run: Run, progress: tqdm | None = None) -> dict:
    """Microseconds of an environment step in each phase of a run."""
    file = f"{run.script}{CATALOG[run.script].modes[run.mode][0]}.py"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file).write_text(timed((ROOT / "leanrl" / file).read_text()))
        os.environ["PHASES_OUT"] = str(Path(folder, "spent"))
        (result,) = measure(replace(run, folder=Path(folder)), progress=progress)
        spent = Counter(eval(Path(folder, "spent").read_text()))  # written by CLOCK above
    microseconds = 1e6 / result["SPS"]
    row = {"mode": run.mode, "microseconds": microseconds, "simulator": result["env_share"] * microseconds}
    return row | {phase: spent[phase] / spent.total() * microseconds for phase in PHASES}


def main(args: Args):
    if elsewhere := [script for script in args.scripts if not has_phases(script)]:
        sys.exit(f"error: the loop of {', '.join(elsewhere)} has no phases to measure.")
    args.out.mkdir(parents=True, exist_ok=True)
    for script in args.scripts:
        env_id = CATALOG[script].env_id
        steps = args.steps or CATALOG[script].steps
        turns = []
        for seed in range(1, args.pairs + 1):
            turns.append([measure_phases(Run(script, mode, steps, env_id, seed)) for mode in args.modes])
        # of each mode, the run of median speed: the phases of one run add up
        rows = [sorted(runs, key=lambda row: row["microseconds"])[len(runs) // 2] for runs in zip(*turns)]
        for row, runs in zip(rows, zip(*turns)):  # of all turns, since it drifts, too
            row["simulator"] = median(run["simulator"] for run in runs)
        report = {"script": script, "env_id": env_id, "machine": machine(), "turns": args.pairs}
        report |= {"steps": steps, "modes": rows}
        (args.out / f"{script}.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"\n{script}, microseconds per env step\n{phases_table(rows)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
