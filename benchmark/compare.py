"""Measures scripts in all their modes, side by side, against each other and against other libraries.

    python benchmark/compare.py ppo_continuous_action --pairs 5
    python benchmark/compare.py dqn --external "mine=python my_dqn.py --total-timesteps {steps} --seed {seed}"

Each run is a fresh process (measure.py), and the runs of all modes take turns slice by slice, there and back, one at a
time, so that a machine whose speed drifts slows all of them alike. A ratio is that of two slices of a round. All of it
is repeated --pairs times. The first time, a mode finds the compiler's cache empty (cold start), then full (warm start).

A program of yours is timed from outside, after each turn: it runs for half the steps and for all of them, and the
difference of both times is that of the other half.

Prints a table, draws OUT/SCRIPT.png, and keeps the table in OUT/speed.json.
"""

import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tyro
from catalog import CATALOG, JAX, RANKS
from plot import bars
from results import RESULTS, RUNS, interval, keep, machine, ratios
from runs import Run, best_threads, measure_external, run_external, take_turns
from tables import aligned, run_length, speed_cells, where
from tqdm import tqdm


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = tuple(CATALOG)
    env_id: str | None = None  # another env that the script can learn; default: the script's own
    steps: int | None = None  # env steps of each run; default: the script's own
    seconds: float | None = None  # end each run earlier, once it has been measured for so long; not for ranks
    pairs: int = 3  # runs of each mode
    slices: int | None = None  # parts of a run, in turn; default: 20, or 1 for ppo_atari_ray; 1: runs take no turns
    modes: tuple[str, ...] = ()  # only these modes and peers; default: all that this machine has
    flags: str = ""  # more flags of the scripts, in one string; write --flags="--num-envs 1024"
    threads: int | None = None  # of every run, on as many cores; default: those of the script in catalog.py
    peers: bool = True  # measure the other libraries that are installed
    external: tuple[str, ...] = ()  # programs of your own, each NAME=COMMAND, with {steps} (and {seed}) in the command
    out: Path = RUNS  # where the table and the picture go


def modes_here(script: str, here: dict, with_peers: bool) -> tuple[list[str], list[str]]:
    """The modes of a script, and its peers, that this machine can run."""
    entry = CATALOG[script]
    ours = [mode for mode in entry.modes if here["gpu"] or "cudagraphs" not in mode]
    has_jax = find_spec("jax") and (
        find_spec("jax_cuda12_plugin") or not here["gpu"]
    )  # on a GPU as well, or not at all
    if not (with_peers and has_jax):
        ours = [mode for mode in ours if mode not in JAX]
    if entry.modes is RANKS and here["gpu"] and here["gpus"] < 2:
        ours = [mode for mode in ours if mode[0] == "1"]  # each rank needs a GPU
    peers = [name for name, (package, _) in entry.peers.items() if find_spec(package)]
    return ours, [name for name in peers if has_jax or entry.peers[name][0] != "sbx"]


def summarise(runs: dict[str, list[dict]]) -> list[dict]:
    """One row a mode. The ratio is to the first mode (eager), taken slice by slice.

    The efficiency of ranks is their speed over as many times that of one rank with the same flags.
    """
    base = next(iter(runs.values()))
    rows = []
    for mode, results in runs.items():
        row = {"mode": mode, "sps": interval([run["rates"] for run in results])}
        row["ratio"] = interval(ratios(results, base))
        ranks, comma, flags = mode.partition(",")
        alone = runs.get(f"1 rank{comma}{flags}") if mode in RANKS else None
        row["efficiency"] = interval(ratios(results, alone))[0] / int(ranks[0]) if alone else None
        # the first run finds the compiler's cache empty
        cold, *warm = [run.get("startup_seconds") for run in results]
        row["startup_seconds"] = None if cold is None else max(cold, 0.0)
        row["warm_seconds"] = max(float(np.median(warm)), 0) if warm and None not in warm else None
        for key in ("threads", "host_mb", "device_mb", "gpu_utilisation", "env_share", "graph_share", "communication"):
            values = [run.get(key) for run in results]
            row[key] = None if None in values else float(np.median(values))
        rows.append(row | {"runs": results})
    return rows


def compare(script: str, args: Args, externals: dict[str, str]):
    """Measures a script in all modes that are asked for; prints, draws and keeps the table."""
    entry, here = CATALOG[script], machine()
    env_id = args.env_id or entry.env_id
    steps = args.steps or entry.steps
    ours, peers = modes_here(script, here, args.peers)
    if unknown := set(args.modes) - set(ours) - set(peers):
        sys.exit(f"error: no mode {', '.join(unknown)} here; there are: {', '.join(ours + peers)}")
    chosen = [m for m in ours + (peers if args.peers else []) if not args.modes or m in args.modes]
    if not chosen or set(chosen) & set(externals):
        sys.exit("error: nothing to measure, or an --external with the name of a mode.")
    seconds = None if entry.modes is RANKS else args.seconds  # ranks would not end at the same report
    names = ", ".join([*chosen, *externals])
    print(f"{script} on {env_id}: {names}; {args.pairs} x {run_length(steps, seconds)}", flush=True)
    if args.flags and set(chosen) & set(peers):
        print("note: other libraries do not get --flags; theirs stand in benchmark/peers.py.")
    slices = args.slices or entry.slices
    about = {"steps": steps, "env_id": env_id, "slices": slices, "seconds": seconds}
    about["flags"] = tuple(shlex.split(args.flags))
    tried = [m for m in chosen if (m in peers or m in JAX) and os.cpu_count() > 1 and not args.threads]
    runs = {mode: [] for mode in [*chosen, *externals]}
    total = slices * (args.pairs * len(chosen) + 2 * len(tried)) + args.pairs * len(externals)
    bar = tqdm(total=total, unit="slice", desc=script, smoothing=0)
    with bar as progress, tempfile.TemporaryDirectory() as caches:
        threads = {mode: best_threads(Run(script, mode, seed=1, **about), progress) for mode in tried}
        for name, command in externals.items():
            progress.set_postfix_str(name)
            run_external(command, steps // 2, seed=1)  # not measured: it may fill the cache of a compiler
        for seed in range(1, args.pairs + 1):
            turn = []
            for mode in chosen:
                cache = Path(caches, mode.replace(" ", "-"))  # the compiler of C++ is called with this path unquoted
                run_threads = args.threads or threads.get(mode)
                turn.append(Run(script, mode, seed=seed, threads=run_threads, cache=cache, **about))
            results = take_turns(*turn, progress=progress)
            for name, command in externals.items():
                progress.set_postfix_str(name)
                results.append(measure_external(command, steps, seed, slices))
                progress.update()
            for mode, result in zip(runs, results, strict=True):
                runs[mode].append(result)
    table = {"script": script, "env_id": env_id, "flags": args.flags, "threads": args.threads, "steps": steps}
    table |= {"seconds": seconds, "machine": here, "rows": summarise(runs)}
    path = keep(args.out, "speed", table)
    print(f"\n{script}, {env_id} ({where(table, 'cores', 'torch')})\n{aligned(*speed_cells(table))}\n")
    print(path)
    if args.out.resolve() != RESULTS:  # of which plot.py draws one picture for all
        bars([table], args.out / f"{script}.png")
        print(args.out / f"{script}.png")


def main(args: Args):
    if unknown := set(args.scripts) - set(CATALOG):
        sys.exit(f"error: no script {', '.join(unknown)}; there are: {', '.join(CATALOG)}")
    externals = dict(external.partition("=")[::2] for external in args.external)
    for name, command in externals.items():
        if "{steps}" not in command:
            sys.exit(f"error: --external {name}: say NAME=COMMAND, with {{steps}} where the number of env steps goes.")
        if not shutil.which(shlex.split(command)[0]):
            sys.exit(f"error: --external {name}: there is no program {shlex.split(command)[0]!r}.")
    if args.threads:  # the number that is asked for does not bind all threads of JAX
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    for script in args.scripts:
        compare(script, args, externals)
    first = args.scripts[0]
    if not args.peers and "compile" in CATALOG[first].modes:
        print(f"""
What to try next:
  ./run.sh compare {first} --pairs 5   beside other libraries, with narrower intervals
  .venv/bin/python benchmark/phases.py {first}   where the time of a step goes
  ./run.sh help   all commands, e.g. to train and to play
  diff -u leanrl/{first}.py leanrl/{first}_torchcompile.py   what makes it fast""")


if __name__ == "__main__":
    main(tyro.cli(Args))
