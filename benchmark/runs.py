"""Runs of scripts, changed copies of them, other libraries and programs: each a process, several in turns."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from catalog import CATALOG
from measure import HAND_OVER
from results import ROOT
from tqdm import tqdm


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
    threads: int | None = None  # default: those of its row in the catalog; a library's own choice

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
        is_ours = self.mode in CATALOG[self.script].modes
        threads = self.threads or (CATALOG[self.script].threads if is_ours else None)
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
            many = "true" if threads > 1 else "false"
            env["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen={many} intra_op_parallelism_threads={threads}"
        return env

    def start(self, empty: Path) -> subprocess.Popen:
        """The process, with its compiler cache in `empty` unless it has one."""
        env = self.environment() | {"TORCHINDUCTOR_CACHE_DIR": str(self.cache or empty)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.command(), cwd=ROOT, env=env, **pipes)


def take_turns(*runs: Run, progress: tqdm | None = None) -> list[dict]:
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
                        if code := processes[i].wait():
                            sys.exit(f"error: {run.mode} of {run.script} failed with exit code {code}")
                        results[i] = json.loads(line)
                        progress.update(left[i])
                order.reverse()
        finally:
            for process in processes.values():  # those that wait end by themselves
                with suppress(BrokenPipeError):
                    process.stdin.close()
                process.stdout.close()
                process.wait()
    return [results[i] for i in range(len(runs))]


def best_threads(run: Run, progress: tqdm | None = None) -> int:
    """The number of threads with which a peer is faster, one or as many as there are cores, by a trial of both."""
    trials = [replace(run, threads=threads) for threads in sorted({1, os.cpu_count()})]
    rates = [np.median(result["rates"]) for result in take_turns(*trials, progress=progress)]
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
    return {"rates": [(steps - steps // 2) / (long - short)] * slices}


def file_of(script: str, mode: str) -> Path:
    return ROOT / "leanrl" / f"{script}{CATALOG[script].modes[mode][0]}.py"


def patched(script: str, mode: str, patch: Path | None, folder: Path) -> Path:
    """Copies the script of this mode into the folder, which must be new, and applies the patch to the copy."""
    file = file_of(script, mode)
    folder.mkdir()
    copy = folder / file.name
    copy.write_text(file.read_text())
    if patch:
        command = ["git", "apply", "--recount", patch]
        applied = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if applied.returncode:
            sys.exit(f"error: {patch.relative_to(ROOT)} does not apply to {file.name}:\n{applied.stderr}")
    return copy
