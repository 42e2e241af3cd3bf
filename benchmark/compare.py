"""Measures scripts in all their modes, side by side, against each other and against other libraries.

    python benchmark/compare.py ppo_continuous_action --pairs 5

Each run is a fresh process (measure.py), and the runs of all modes take turns slice by slice, there and back, one at a
time, so that a machine whose speed drifts slows all of them alike. A ratio is that of two slices of a round. All of it
is repeated --pairs times. Prints a table; writes OUT/SCRIPT.json and .png.
"""

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tyro
from measure import HAND_OVER, PEERS, RANKS, ROOT, modes

SCRIPTS = {  # script -> (env, steps of one run)
    "ppo_continuous_action": ("HalfCheetah-v4", 40_960),
    "td3_continuous_action": ("HalfCheetah-v4", 6_000),
    "sac_continuous_action": ("HalfCheetah-v4", 5_000),
    "dqn": ("CartPole-v1", 100_000),
    "ppo_atari_envpool": ("Breakout-v5", 16_384),
    "ppo_atari_multigpu": ("Breakout-v5", 16_384),
}


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = tuple(SCRIPTS)
    steps: int | None = None  # env steps of each run; default: the script's own
    pairs: int = 3  # runs of each mode
    slices: int = 20  # parts of a run, in turn; 1 on a machine of one's own, to see what a GPU is used for long enough
    modes: tuple[str, ...] = ()  # only these modes and peers; default: all that this machine has
    peers: bool = True  # measure the other libraries that are installed
    out: Path = Path("runs/compare")  # where the JSON and the picture go


def gpu_names() -> list[str]:
    """The names of all GPUs, without importing torch."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def machine() -> dict:
    """What a figure depends on besides the code."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    gpus = gpu_names()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": next(iter(gpus), None),
        "gpus": len(gpus),
        "torch": version("torch"),
        "python": platform.python_version(),
        "commit": git.stdout.strip() or None,
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
    cache: Path | None = None  # of the compiler; default: empty, so that start-up is cold
    slices: int = 20
    threads: int | None = None  # default: what the script or the library chooses

    def start(self, empty: Path) -> subprocess.Popen:
        """The process; its progress bar passes through."""
        command = [sys.executable, "-W", "ignore", Path(__file__).parent / "measure.py", self.script, "--in-turns"]
        command += ["--mode", self.mode, "--steps", self.steps, "--env-id", self.env_id, "--seed", self.seed]
        command = [str(part) for part in (*command, "--folder", self.folder, "--slices", self.slices)]
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(self.cache or empty)}
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX would take most of a GPU that others use as well
        if self.threads:
            env["OMP_NUM_THREADS"] = str(self.threads)
            env["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={'true' if self.threads > 1 else 'false'}"
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def measure(*runs: Run) -> list[dict]:
    """The result of each run. They go on in turn, one at a time: up to the end of the warm-up, then slice by slice.

    Every other round goes backwards, so that what comes last is not always compared with something older.
    """
    processes, results, order = {}, {}, list(enumerate(runs))
    with tempfile.TemporaryDirectory() as empty:
        try:
            while len(results) < len(runs):
                for i, run in order:
                    if i in results:
                        continue
                    if i not in processes:
                        processes[i] = run.start(Path(empty, str(i)))
                    else:
                        with suppress(BrokenPipeError):  # it was killed while it waited
                            print(file=processes[i].stdin, flush=True)
                    for line in processes[i].stdout:
                        if line.endswith(f"{HAND_OVER}\n"):
                            break
                    else:  # the end
                        if processes[i].wait():
                            code = processes[i].returncode
                            sys.exit(f"error: {run.mode} of {run.script} failed with exit code {code}")
                        results[i] = json.loads(line)
                order.reverse()
        finally:
            for process in processes.values():  # those that wait end by themselves
                with suppress(BrokenPipeError):
                    process.stdin.close()
                process.stdout.close(), process.wait()
    return [results[i] for i in range(len(runs))]


def best_threads(run: Run) -> int:
    """The number of threads with which a peer is faster, one or as many as there are cores, by a trial of both."""
    trials = [replace(run, threads=threads) for threads in sorted({1, os.cpu_count()})]
    rates = [np.median(result["rates"]) for result in measure(*trials)]
    return trials[int(np.argmax(rates))].threads


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
        for key in (
            "startup_seconds",
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
    header = ["mode", "steps/s", "95 % interval", f"x {rows[0]['mode']}", "start-up s", "host MB", "GPU MB", "GPU %"]
    # the rate, as a part of the bare simulator's and of replaying the update's graphs alone; time in reductions; ranks
    header += ["of env %", "of graph %", "comm %", "efficiency %"]
    cells, shares = [header], ("graph_share", "communication", "efficiency")
    for row in rows:
        (sps, low, high), none = row["sps"], "-"
        cells.append([
            row["mode"], f"{sps:,.0f}", f"{low:,.0f} - {high:,.0f}", f"{row['ratio'][0]:.2f}",
            f"{max(row['startup_seconds'], 0):.1f}", f"{row['host_mb']:,.0f}",
            none if row["device_mb"] is None else f"{row['device_mb']:,.0f}",
            none if row["gpu_utilisation"] is None else f"{row['gpu_utilisation']:.0f}",
            f"{100 * row['env_share']:.0f}",
            *(none if row[share] is None else f"{100 * row[share]:.0f}" for share in shares),
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def main(args: Args):
    from plot import bars  # after the command line is checked: matplotlib is slow to import

    here = machine()
    args.out.mkdir(parents=True, exist_ok=True)
    if unknown := set(args.scripts) - set(SCRIPTS):
        sys.exit(f"error: no script {', '.join(unknown)}; there are: {', '.join(SCRIPTS)}")
    for script in args.scripts:
        env_id, steps = SCRIPTS[script]
        ours = [mode for mode in modes(script) if here["gpu"] or "cudagraphs" not in mode]
        if "multigpu" in script and here["gpu"] and here["gpus"] < 2:
            ours = [mode for mode in ours if mode[0] == "1"]  # each rank needs a GPU
        peers = [name for name, (package, _) in PEERS.get(script, {}).items() if importlib.util.find_spec(package)]
        if unknown := set(args.modes) - set(ours) - set(peers):
            sys.exit(f"error: no mode {', '.join(unknown)} here; there are: {', '.join(ours + peers)}")
        chosen = [m for m in ours + (peers if args.peers else []) if not args.modes or m in args.modes]
        print(f"{script} on {env_id}: {', '.join(chosen)}; {args.pairs} turns of {args.steps or steps:,} steps each")
        print(
            "They go on in turn, so the rates that their progress bars show include waiting for each other.", flush=True
        )
        runs = {mode: [] for mode in chosen}
        about = {"steps": args.steps or steps, "env_id": env_id, "slices": args.slices}
        threads = {mode: best_threads(Run(script, mode, seed=1, **about)) for mode in chosen if mode in peers}
        for turn in range(args.pairs):
            results = measure(*(Run(script, m, seed=turn + 1, threads=threads.get(m), **about) for m in chosen))
            for mode, result in zip(chosen, results, strict=True):
                runs[mode].append(result)
        rows = summarise(runs)
        report = {"script": script, "env_id": env_id, "steps": args.steps or steps, "machine": here, "modes": rows}
        path = args.out / f"{script}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        bars([report], path.with_suffix(".png"))
        cores = f"{here['cpu']}, {here['cores']} cores" + (f", {here['gpu']}" if here["gpu"] else "")
        print(f"\n{script}, {env_id} ({cores}, torch {here['torch']})\n{text_table(rows)}\n")
        print(path, path.with_suffix(".png"), sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
