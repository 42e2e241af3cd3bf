"""Measures scripts in all their modes, side by side, against each other and against other libraries.

    python benchmark/compare.py ppo_continuous_action --pairs 5
    python benchmark/compare.py dqn --external "mine=python my_dqn.py --total-timesteps {steps} --seed {seed}"

Each run is a fresh process (measure.py), and the runs of all modes take turns slice by slice, there and back, one at a
time, so that a machine whose speed drifts slows all of them alike. A ratio is that of two slices of a round. All of it
is repeated --pairs times. The first time, a mode finds the compiler's cache empty (cold start), then full (warm start).

A program of yours is timed from outside, after each turn: it runs for half the steps and for all of them, and the
difference of both times is that of the other half.

Prints a table; writes OUT/SCRIPT.json and .png.
"""

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from catalog import CATALOG, JAX, RANKS
from measure import HAND_OVER, JAX_ON_A_GPU, ROOT
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
    threads: int | None = None  # of every run, on as many cores; default: the script's; of JAX and peers 1 or all
    peers: bool = True  # measure the other libraries that are installed
    external: tuple[str, ...] = ()  # programs of your own, each NAME=COMMAND, with {steps} (and {seed}) in the command
    profile: bool = False  # also print where the microseconds of a step go
    out: Path = Path("runs/compare")  # where the JSON and the picture go


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


@dataclass
class Run:
    script: str
    mode: str
    steps: int
    env_id: str
    seed: int
    folder: Path = ROOT / "leanrl"
    cache: Path | None = None  # the compiler's cache; default: an empty one, so that the start is cold
    slices: int = 20
    seconds: float | None = None
    report_interval: int | None = None
    flags: tuple[str, ...] = ()  # more flags of the script
    threads: int | None = None  # default: what the script or the library chooses

    def command(self) -> list[str]:
        """The command line of measure.py."""
        command = [sys.executable, "-W", "ignore", Path(__file__).parent / "measure.py", self.script, "--in-turns"]
        command += ["--mode", self.mode, "--steps", self.steps, "--env-id", self.env_id, "--seed", self.seed]
        command += ["--folder", self.folder, "--slices", self.slices, f"--flags={shlex.join(self.flags)}"]
        if self.seconds:
            command += ["--seconds", self.seconds]
        if self.report_interval:
            command += ["--report-interval", self.report_interval]
        return [str(part) for part in command]

    def environment(self) -> dict[str, str]:
        """The environment variables, for as many threads as are asked for; without a progress bar of its own."""
        env = os.environ | {"TQDM_DISABLE": "1"}
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX would take most of a GPU that others use as well
        if self.threads:
            env["OMP_NUM_THREADS"] = str(self.threads)
            many = "true" if self.threads > 1 else "false"
            env["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={many} intra_op_parallelism_threads={self.threads}"
        return env

    def start(self, empty: Path) -> subprocess.Popen:
        """The process, with its compiler cache in `empty` unless it has one."""
        env = self.environment() | {"TORCHINDUCTOR_CACHE_DIR": str(self.cache or empty)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.command(), cwd=ROOT, env=env, **pipes)


def measure(*runs: Run, progress: tqdm | None = None) -> list[dict]:
    """The result of each run. They go on in turn, one at a time: up to the end of the warm-up, then slice by slice.

    Every other round goes backwards, so that what comes last is not always compared with something older.
    """
    processes, results, order = {}, {}, list(enumerate(runs))
    left = [run.slices for run in runs]  # of the progress bar; a run may report less often
    own = nullcontext(progress) if progress is not None else tqdm(total=sum(left), unit="slice", desc=runs[0].script)
    with own as progress, tempfile.TemporaryDirectory() as empty:
        try:
            while len(results) < len(runs):
                for i, run in order:
                    if i in results:
                        continue
                    progress.set_postfix_str(run.mode)
                    if i not in processes:
                        processes[i] = run.start(Path(empty, str(i)))
                    else:
                        with suppress(BrokenPipeError):  # it was killed while it waited
                            print(file=processes[i].stdin, flush=True)
                    for line in processes[i].stdout:
                        if line.endswith(f"{HAND_OVER}\n"):
                            progress.update(min(left[i], 1))
                            left[i] -= min(left[i], 1)
                            break
                    else:  # the end
                        if processes[i].wait():
                            code = processes[i].returncode
                            sys.exit(f"error: {run.mode} of {run.script} failed with exit code {code}")
                        results[i] = json.loads(line)
                        progress.update(left[i])
                order.reverse()
        finally:
            for process in processes.values():  # those that wait end by themselves
                with suppress(BrokenPipeError):
                    process.stdin.close()
                process.stdout.close(), process.wait()
    return [results[i] for i in range(len(runs))]


def best_threads(run: Run, progress: tqdm | None = None) -> int:
    """The number of threads with which a peer is faster, one or as many as there are cores, by a trial of both."""
    trials = [replace(run, threads=threads) for threads in sorted({1, os.cpu_count()})]
    rates = [np.median(result["rates"]) for result in measure(*trials, progress=progress)]
    return trials[int(np.argmax(rates))].threads


def run_external(command: str, steps: int, seed: int) -> float:
    """The seconds that a program takes."""
    words = [word.replace("{steps}", str(steps)).replace("{seed}", str(seed)) for word in shlex.split(command)]
    start = time.perf_counter()
    process = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        sys.exit(f"error: {shlex.join(words)} failed with {process.returncode}:\n{process.stderr[-2000:]}")
    return time.perf_counter() - start


def measure_external(command: str, steps: int, seed: int, slices: int) -> dict:
    """Times a program from outside, in two lengths. The rate is that of the steps which only the longer run takes."""
    short, long = (run_external(command, length, seed) for length in (steps // 2, steps))
    if long <= short:
        sys.exit(f"error: {command} took {long:.1f} s for {steps} steps, {short:.1f} s for half; give it more --steps.")
    sps = (steps - steps // 2) / (long - short)
    return {"rates": [sps] * slices, "SPS": sps}


def interval(turns: list[list[float]]) -> list[float]:
    """Median and its 95 % bootstrap interval, [median, low, high], where turns and what is in them are drawn anew."""
    rng, counts = np.random.default_rng(0), np.array([len(turn) for turn in turns])
    values = np.array([turn + [np.nan] * (counts.max() - len(turn)) for turn in turns])
    turn = rng.integers(len(turns), size=(2_000, len(turns), 1))
    drawn = values[turn, rng.integers(counts[turn], size=(*turn.shape[:2], counts.max()))]
    medians = np.nanmedian(np.where(np.arange(counts.max()) < counts[turn], drawn, np.nan), axis=(1, 2))
    return [float(np.nanmedian(values)), *np.quantile(medians, [0.025, 0.975]).tolist()]


def ratios(results: list[dict], base: list[dict]) -> list[list[float]]:
    """Of each turn, the ratios of slices of a round; a library may report once less."""
    return [[a / b for a, b in zip(r["rates"], s["rates"])] for r, s in zip(results, base, strict=True)]


def summarise(runs: dict[str, list[dict]]) -> list[dict]:
    """One row a mode. The ratio is to the first mode (eager), taken slice by slice.

    The efficiency of ranks is their speed over as many times that of one rank with the same flags.
    """
    base = next(iter(runs.values()))
    rows = []
    for mode, results in runs.items():
        row = {"mode": mode, "sps": interval([r["rates"] for r in results])}
        row["ratio"] = interval(ratios(results, base))
        ranks, comma, flags = mode.partition(",")
        alone = runs.get(f"1 rank{comma}{flags}") if mode in RANKS else None
        row["efficiency"] = interval(ratios(results, alone))[0] / int(ranks[0]) if alone else None
        # the first run finds the compiler's cache empty
        cold, *warm = [r.get("startup_seconds") for r in results]
        row["startup_seconds"] = None if cold is None else max(cold, 0.0)
        row["warm_seconds"] = max(float(np.median(warm)), 0) if warm and None not in warm else None
        for key in (
            "threads",
            "host_mb",
            "device_mb",
            "gpu_utilisation",
            "env_share",
            "graph_share",
            "communication",
        ):
            values = [r.get(key) for r in results]
            row[key] = None if None in values else float(np.median(values))
        rows.append(row | {"runs": results})
    return rows


def text_table(rows: list[dict]) -> str:
    """A line a mode; a column for which no mode has a value is left out."""

    def shown(value: float | None, template: str, factor: float = 1) -> str | None:
        return None if value is None else template.format(factor * value)

    from plot import may_pay, pays_after

    cells = []
    for row in rows:
        sps, low, high = row["sps"]
        cells.append({
            "mode": row["mode"],
            "steps/s": f"{sps:,.0f}",
            "95 % interval": f"{low:,.0f} - {high:,.0f}" if low < high else None,
            f"x {rows[0]['mode']}": f"{row['ratio'][0]:.2f}",
            "cold start s": shown(row["startup_seconds"], "{:.1f}"),
            "warm start s": shown(row["warm_seconds"], "{:.1f}"),
            "pays off after": shown(pays_after(row, rows[0]) if may_pay(row, rows[0]) else None, "{:,.0f} steps"),
            "host MB": shown(row["host_mb"], "{:,.0f}"),
            "GPU MB": shown(row["device_mb"], "{:,.0f}"),
            "GPU %": shown(row["gpu_utilisation"], "{:.0f}"),
            "simulator %": shown(row["env_share"], "{:.0f}", 100),  # its rate, as a part of the bare simulator's
            "graphs %": shown(row["graph_share"], "{:.0f}", 100),  # and of replaying the update's graphs alone
            "reductions %": shown(row["communication"], "{:.0f}", 100),  # of its time, in reductions over ranks
            "efficiency %": shown(row["efficiency"], "{:.0f}", 100),
        })  # fmt: skip
    return pd.DataFrame(cells).dropna(axis=1, how="all").fillna("-").to_string(index=False)


def compare(script: str, args: Args, externals: dict[str, str]):
    """Measures a script in all modes that are asked for; prints and writes the results."""
    from phases import has_phases, measure_phases  # which imports this file
    from plot import bars, run_length, utilisation  # after the command line is checked: matplotlib is slow to import

    entry, here = CATALOG[script], machine()
    env_id = args.env_id or entry.env_id
    steps = args.steps or entry.steps
    ours = [mode for mode in entry.modes if here["gpu"] or "cudagraphs" not in mode]
    has_jax = bool(importlib.util.find_spec("jax"))
    if args.peers and has_jax and here["gpu"] and not importlib.util.find_spec("jax_cuda12_plugin"):
        has_jax = False
        print(f"note: nothing in JAX is measured (SBX included), since JAX has no GPU here: {JAX_ON_A_GPU}")
    if not (args.peers and has_jax):
        ours = [mode for mode in ours if mode not in JAX]
    if entry.modes is RANKS and here["gpu"] and here["gpus"] < 2:
        ours = [mode for mode in ours if mode[0] == "1"]  # each rank needs a GPU
    peers = [name for name, (package, _) in entry.peers.items() if importlib.util.find_spec(package)]
    peers = [name for name in peers if has_jax or entry.peers[name][0] != "sbx"]
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
    profiled = [mode for mode in ours if mode in chosen and args.profile and has_phases(script)]
    total = slices * (args.pairs * len(chosen) + 2 * len(tried) + len(profiled)) + args.pairs * len(externals)
    runs = {mode: [] for mode in [*chosen, *externals]}
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
            results = measure(*turn, progress=progress)
            for name, command in externals.items():
                progress.set_postfix_str(name)
                results.append(measure_external(command, steps, seed, slices))
                progress.update()
            for mode, result in zip(runs, results, strict=True):
                runs[mode].append(result)
        one = {"seed": 1, "threads": args.threads, **about}
        phases = [measure_phases(Run(script, mode, **one), progress) for mode in profiled]
    rows = summarise(runs)
    report = {"script": script, "env_id": env_id, "steps": steps, "seconds": seconds, "flags": args.flags}
    report |= {"machine": here, "modes": rows}
    path = args.out / f"{script}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    bars([report], path.with_suffix(".png"))
    cores = f"{here['cpu']}, {here['cores']} cores" + (f", {here['gpu']}" if here["gpu"] else "")
    print(f"\n{script}, {env_id} ({cores}, torch {here['torch']})\n{text_table(rows)}\n")
    print(path, path.with_suffix(".png"), sep="\n")
    if here["gpu"]:
        utilisation(report, args.out / f"{script}_gpu.png")
    if phases:
        print("\nmicroseconds per env step\n" + phases_table(phases))
    elif args.profile and not has_phases(script):
        print(f"no --profile: the loop of {script} has no phases to measure.")


def phases_table(rows: list[dict]) -> str:
    """A line a mode: the microseconds of an env step that each phase of the loop takes."""
    from phases import PHASES  # which imports this file

    names = {"microseconds": "together", "simulator": "of it in the simulator"}
    table = pd.DataFrame(rows)[["mode", *PHASES, *names]]
    return table.rename(columns=names).round(1).to_string(index=False)


def main(args: Args):
    if unknown := set(args.scripts) - set(CATALOG):
        sys.exit(f"error: no script {', '.join(unknown)}; there are: {', '.join(CATALOG)}")
    externals = dict(external.partition("=")[::2] for external in args.external)
    for name, command in externals.items():
        if "{steps}" not in command:
            sys.exit(f"error: --external {name}: say NAME=COMMAND, with {{steps}} where the number of env steps goes.")
        if not shutil.which(shlex.split(command)[0]):
            sys.exit(f"error: --external {name}: there is no program {shlex.split(command)[0]!r}.")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.threads:  # the number that is asked for does not bind all threads of JAX
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    for script in args.scripts:
        compare(script, args, externals)
    first = args.scripts[0]
    if not args.peers and "compile" in CATALOG[first].modes:
        print(f"""
What to try next:
  ./run.sh compare {first} --pairs 5   beside other libraries, with narrower intervals
  ./run.sh compare {first} --profile --no-peers --pairs 1   where the time of a step goes
  ./run.sh help   all commands, e.g. to train and to play
  diff -u leanrl/{first}.py leanrl/{first}_torchcompile.py   what makes it fast""")


if __name__ == "__main__":
    main(tyro.cli(Args))
