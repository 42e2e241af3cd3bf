"""Measures what each trick is worth: takes it out of a script, leaves the rest, and times both in turns.

    python benchmark/ablate.py dqn --pairs 5

A trick is taken out, or one that was turned down is tried, by a patch in ablations/SCRIPT/. Its first line says what it
does, its second the mode that is run, with flags. It is applied to a copy of the script, and runs beside the script as
it is, slice by slice in turn, as in compare.py. A patch that no longer applies is an error. Keeps a table in
OUT/ablate.json.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from catalog import CATALOG
from results import ROOT, RUNS, interval, keep, machine, ratios
from runs import Run, patched, take_turns

ABLATIONS = ROOT / "benchmark" / "ablations"
NOT_COMPILED = "without perf[graph]: no compilation"  # the twin without flags: it needs no patch


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = tuple(sorted(folder.name for folder in ABLATIONS.iterdir()))
    steps: int | None = None  # env steps of each run; default: the script's own
    pairs: int = 3  # turns of all variants
    out: Path = RUNS  # where the table goes


def variants(script: str) -> dict[str, tuple[str, Path | None]]:
    """What is done to the script -> the mode that is run, and the patch."""
    found = {NOT_COMPILED: ("twin", None)}
    for patch in sorted((ABLATIONS / script).glob("*.patch")):
        title, mode = re.match(r"(.+)\nmode: (.+)\n\n--- ", patch.read_text()).groups()
        found[title] = (mode, patch)
    return found


def ablate(script: str, args: Args) -> list[dict]:
    entry = CATALOG[script]
    steps = args.steps or entry.steps
    runs = {title: [] for title in variants(script)}  # [(its result, that of the script as it is)]
    with tempfile.TemporaryDirectory() as root:

        def run(mode: str, patch: Path | None, turn: int) -> Run:
            """The script with the patch; the first run of each variant finds its compiler cache empty."""
            folder = Path(root, f"{mode.replace(' ', '')}-{patch.stem if patch else 'as-it-is'}")
            mode, *flags = mode.split()
            if not folder.exists():
                patched(script, mode, patch, folder)
            about = {"cache": folder / "cache", "slices": entry.slices, "flags": tuple(flags)}
            return Run(script, mode, steps, entry.env_id, turn + 1, folder, **about)

        for turn in range(args.pairs):
            for title, (mode, patch) in variants(script).items():
                print(f"{script}, turn {turn + 1} of {args.pairs}: {title}", file=sys.stderr)
                as_it_is = "compile" if mode == "twin" else mode
                runs[title].append(take_turns(run(mode, patch, turn), run(as_it_is, None, turn)))
            rows = []
            for title, (mode, _) in variants(script).items():
                own, base = zip(*runs[title], strict=True)
                rows.append({"variant": title, "mode": mode, "ratio": interval(ratios(own, base))})
                rows[-1] |= {"steps": steps, "runs": own, "as_it_is": base}
            table = {"script": script, "env_id": entry.env_id, "machine": machine(), "rows": rows}
            keep(args.out, "ablate", table)  # of all turns so far
    return rows


def main(args: Args):
    for script in args.scripts:
        for row in ablate(script, args):
            ratio, low, high = row["ratio"]
            print(f"{row['variant']:65s} {ratio:5.2f}  ({low:.2f} - {high:.2f})")


if __name__ == "__main__":
    main(tyro.cli(Args))
