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
from dataclasses import dataclass
from pathlib import Path

import tyro
from compare import SCRIPTS, machine, measure
from measure import ROOT, modes

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


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = tuple(name for name in SCRIPTS if "multigpu" not in name)
    steps: int | None = None  # env steps of each run; default: the script's own
    modes: tuple[str, ...] = ("eager", "twin", "compile")
    out: Path = Path("runs/phases")  # where the JSON goes


def timed(source: str) -> str:
    """The source with a mark at the comment of each phase; the last report of the warm-up starts the count anew."""
    for phase in PHASES:
        source, found = re.subn(rf"^( +)# {phase}\b.*$", rf'\1_mark("{phase}")', source, flags=re.MULTILINE)
        assert found == 1, f"{found} phases {phase!r}"
    warm = r"\1\2\n\1if len(marks) == WARMUP_REPORTS + 1:\n\1    _spent.clear()\n"
    source, found = re.subn(r"^( +)(metrics = report\(.*\))\n", warm, source, flags=re.MULTILINE)
    assert found == 1
    return source.replace("\n\n\n@dataclass", CLOCK + "\n\n@dataclass", 1)


def main(args: Args):
    args.out.mkdir(parents=True, exist_ok=True)
    for script in args.scripts:
        env_id, steps = SCRIPTS[script]
        rows = []
        for mode in args.modes:
            file = f"{script}{modes(script)[mode][0]}.py"
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, file).write_text(timed((ROOT / "leanrl" / file).read_text()))
                os.environ["PHASES_OUT"] = str(Path(folder, "spent"))
                result = measure(script, mode, args.steps or steps, env_id, 1, Path(folder))
                spent = Counter(eval(Path(folder, "spent").read_text()))  # written by CLOCK above
            microseconds = 1e6 / result["SPS"]
            shares = {phase: spent[phase] / spent.total() for phase in PHASES}
            row = {"mode": mode, "microseconds": microseconds} | {p: shares[p] * microseconds for p in PHASES}
            rows.append(row | {"simulator": result["env_share"] * microseconds})
            print(mode, {k: round(v, 1) for k, v in rows[-1].items() if k != "mode"}, file=sys.stderr)
        report = {"script": script, "env_id": env_id, "machine": machine(), "modes": rows}
        (args.out / f"{script}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
