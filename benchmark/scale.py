"""Measures how speed, memory and start-up grow with the sizes that a user chooses, one at a time.

    python benchmark/scale.py sac_continuous_action --what batch_size

The plain file and the compiled twin take turns, as in compare.py. They are copies in which the size is another. The
compiler's cache is empty at each size. Keeps a table in OUT/scale.json, which plot.py draws.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from catalog import CATALOG
from results import RUNS, interval, keep, machine
from runs import Run, file_of, take_turns

MODES = ("eager", "compile")
WIDTHS = (64, 256, 1024)
SIZES = {  # script -> size -> its values, in ascending order
    "ppo_continuous_action": {"num_envs": (1, 4, 16, 64), "width": WIDTHS, "threads": (1, 2)},
    "sac_continuous_action": {
        "num_envs": (1, 4, 16, 64),
        "batch_size": (64, 256, 1024, 4096),
        "width": WIDTHS,
        "buffer_size": (10_000, 100_000, 1_000_000),
        "threads": (1, 2),
    },
}
LAYER = {"ppo_continuous_action": 64, "sac_continuous_action": 256}  # the width of a hidden layer as it is
FULL = {  # a replay that is full from the start, so that batches come from all of it
    "N, obs_dim + action_dim + 3, device=device)": "N, obs_dim + action_dim + 3, device=device).fill_(1)",
    "min(newest, len(ring) - 1)": "len(ring) - 1",
    "newest.clamp(max=len(ring) - 1)": "newest * 0 + len(ring) - 1",
}


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = tuple(SIZES)
    what: tuple[str, ...] = ()  # only these sizes; default: all of the script
    seconds: float = 5  # how long each mode is measured
    out: Path = RUNS  # where the table goes


def with_size(script: str, source: str, what: str, value: int) -> tuple[str, list]:
    """The source of a script and its flags, for one value of one size."""
    if what == "width":  # every hidden layer
        of_width, to_width = f", {LAYER[script]})", f"({LAYER[script]}, "
        assert of_width in source and to_width in source
        return source.replace(of_width, f", {value})").replace(to_width, f"({value}, "), []
    if what == "threads":  # of the process, see measure_size()
        return source, []
    if what == "buffer_size":
        assert sum(old in source for old in FULL) == 2  # a plain file and a twin count the pairs in different ways
        for old, new in FULL.items():
            source = source.replace(old, new)
    flags = [f"--{what.replace('_', '-')}", str(value)]
    if what == "num_envs" and "ppo" in script:
        flags += ["--num-steps", str(2048 // value)]  # a rollout of as many env steps
    return source, flags


def measure_size(script: str, what: str, value: int, seconds: float) -> dict:
    """The speed of both modes at one value of one size, with their memory and start-up."""
    entry = CATALOG[script]
    with tempfile.TemporaryDirectory() as root:
        runs = []
        for mode in MODES:
            file = file_of(script, mode)
            source, flags = with_size(script, file.read_text(), what, value)
            folder = Path(root, mode)
            folder.mkdir()
            (folder / file.name).write_text(source)
            run = Run(script, mode, 1_000_000, entry.env_id, 1, folder, slices=5, seconds=seconds)
            run.flags = tuple(flags)
            run.threads = value if what == "threads" else None
            run.report_interval = None if "ppo" in script else 128
            runs.append(run)
        results = take_turns(*runs)
    row = {"what": what, "value": value}
    for mode, result in zip(MODES, results, strict=True):
        kept = {name: result[name] for name in ("startup_seconds", "host_mb")}
        row[mode] = kept | {"sps": interval([result["rates"]])}
    return row


def main(args: Args):
    if unknown := set(args.what) - {what for script in args.scripts for what in SIZES[script]}:
        sys.exit(f"error: no size {', '.join(unknown)} of {', '.join(args.scripts)}.")
    for script in args.scripts:
        rows = []
        for what, values in SIZES[script].items():
            for value in values if not args.what or what in args.what else ():
                rows.append(measure_size(script, what, value, args.seconds))
                print(*rows[-1].values(), flush=True)
                table = {"script": script, "env_id": CATALOG[script].env_id, "machine": machine(), "rows": rows}
                keep(args.out, "scale", table)  # of all so far


if __name__ == "__main__":
    main(tyro.cli(Args))
