"""Measures what each step of docs/your-own-script.md brings: it runs the program of that page, and times its updates.

    python benchmark/steps.py            # keeps a table in runs/benchmark/steps.json

The updates take turns, 50 calls each, so that a machine whose speed drifts slows all of them alike.
"""

import re
from pathlib import Path
from statistics import median

import torch
import tyro
from results import ROOT, RUNS, keep, machine

PAGE = ROOT / "docs" / "your-own-script.md"
UPDATES = {  # what is timed -> a call of it in the page's program
    "plain (step 1)": "plain_update(batch)",
    "plain, the network alone compiled (step 3, stopped)": "plain_update(batch, compiled_network)",
    "one function, not compiled (steps 2 to 4)": "update(batch)",
    "one function, compiled (step 5)": "compiled_update(batch)",
}


def program(page: Path = PAGE) -> dict:
    """The names that the page's Python blocks define, run one after the other."""
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, page, "exec"), names)  # its functions have a file, as those of a script do
    return names


def main(out: Path = RUNS, turns: int = 40):
    torch.set_num_threads(1)
    names = program()
    seconds = {update: [] for update in UPDATES}
    for _ in range(turns):
        for update, call in UPDATES.items():
            names["call"] = eval(f"lambda: {call}", names)
            seconds[update].append(names["seconds_per_call"](names["call"], calls=50))
    rows = [{"update": update, "microseconds": 1e6 * median(values)} for update, values in seconds.items()]
    keep(out, "steps", {"machine": machine(), "rows": rows})
    print(*rows, sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
