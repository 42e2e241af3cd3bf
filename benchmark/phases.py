"""Measures where the time of a training loop goes: act, learn, step and store, report.

    python benchmark/phases.py dqn --modes eager compile

A clock is read at the comment that begins each phase of a script's loop, in a copy of its source. Shown is the time per
environment step after the warm-up, on the host: what a GPU does meanwhile is not in it. Keeps a table in
OUT/phases.json.
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
from measure import WARMUP_REPORTS
from results import RUNS, keep, machine
from runs import Run, file_of, take_turns
from tables import PHASES, PHASES_TOGETHER, aligned, phases_cells

CLOCK = """
import atexit, collections, json, os, time as _time  # the clock of benchmark/phases.py
_spent, _last, _reports = collections.Counter(), ["", 0.0], [0]
def _mark(phase):
    now = _time.perf_counter()
    _spent[_last[0]] += now - _last[1]
    _last[:] = phase, now
def _reported(losses):
    _reports[0] += len(losses) > 0  # learning has begun
    if _reports[0] == WARMUP:
        _spent.clear()
def _write():
    with open(os.environ["PHASES_OUT"], "w") as file:
        json.dump(_spent, file)
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
    out: Path = RUNS  # where the table goes


def timed(source: str) -> str:
    """The source with a mark at the comment of each phase; the last report of the warm-up starts the count anew."""
    for phase in PHASES:
        source, found = re.subn(rf"^( +)# {phase}\b.*$", rf'\1_mark("{phase}")', source, flags=re.MULTILINE)
        assert found == 1, f"{found} phases {phase!r}"
    warm = r"\1\2\n\1_reported(losses)\n"
    source, found = re.subn(r"^( +)(metrics = report\(.*\))\n", warm, source, flags=re.MULTILINE)
    assert found == 1 and "\n\n\n@dataclass" in source
    clock = CLOCK.replace("WARMUP", str(WARMUP_REPORTS))
    return source.replace("\n\n\n@dataclass", clock + "\n\n@dataclass", 1)


def measure_phases(run: Run) -> dict:
    """Microseconds of an environment step in each phase of a run."""
    file = file_of(run.script, run.mode)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file.name).write_text(timed(file.read_text()))
        os.environ["PHASES_OUT"] = str(Path(folder, "spent"))
        (result,) = take_turns(replace(run, folder=Path(folder)))
        spent = Counter(json.loads(Path(folder, "spent").read_text()))
    del spent[""]  # before the first phase
    microseconds = 1e6 / result["SPS"]
    row = {"mode": run.mode, "microseconds": microseconds, "simulator": result["env_share"] * microseconds}
    return row | {phase: spent[phase] / spent.total() * microseconds for phase in PHASES}


def main(args: Args):
    if elsewhere := [script for script in args.scripts if not has_phases(script)]:
        sys.exit(f"error: the loop of {', '.join(elsewhere)} has no phases to measure.")
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
        table = {"script": script, "env_id": env_id, "machine": machine(), "turns": args.pairs, "steps": steps}
        keep(args.out, "phases", table | {"rows": rows})
        columns = ["mode", *PHASES, *PHASES_TOGETHER.values()]
        print(f"\n{script}, microseconds per env step\n{aligned(columns, phases_cells({'rows': rows}))}")


if __name__ == "__main__":
    main(tyro.cli(Args))
