"""Measures how much of their time slow simulators work, by how they are called: envs that sleep, on Ray's workers.

    python benchmark/efficiency.py --workers 1 4 16 --milliseconds 1 10

The efficiency is the rate of env steps, while sampling, over that of as many simulators that never wait. Each way is
the twin ppo_continuous_action_ray_torchcompile.py with other flags; Gymnasium's AsyncVectorEnv and Tianshou's
RayVectorEnv stand beside, the latter in the environment that ./run.sh rllib makes. Keeps a table in OUT/ray.json, with
the formula that fits a call per env step (docs/ray.md).
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import gymnasium as gym
import numpy as np
import sleeping
import tyro
from results import RUNS, keep, machine
from scipy.optimize import curve_fit

FOLDER = Path(__file__).resolve().parent
WAYS = {
    "one env a call": {"envs_per_worker": 1, "act_on": "learner"},
    "many envs a call": {"act_on": "learner"},
    "many envs a call, in two groups": {"act_on": "learner", "env_groups": 2},
    "rollouts": {"act_on": "worker"},
}
ASYNC = "AsyncVectorEnv"
TIANSHOU = "Tianshou's RayVectorEnv"
PYTHON_OF_TIANSHOU = FOLDER.parent / ".venv-rllib" / "bin" / "python"
ENVS = {1: 16, 10: 16, 100: 4, 1000: 2}  # of each worker, by the milliseconds of a step


@dataclass
class Args:
    workers: tuple[int, ...] = (1, 4, 16)  # numbers of workers
    milliseconds: tuple[int, ...] = (1, 10)  # times that a step takes
    ways: tuple[str, ...] = (*WAYS, ASYNC, TIANSHOU)  # how the simulators are called
    out: Path = RUNS  # where the table goes
    cell: str | None = None  # measure this one alone, "way/workers/milliseconds", and print its steps per second


def steps_of_ray(way: str, workers: int, milliseconds: float, **settings) -> float:
    """Env steps a second while sampling, after a first iteration; each takes about 2 s, within 2 to 128 steps."""
    sys.path.insert(0, str(FOLDER.parent / "leanrl"))
    import ppo_continuous_action_ray_torchcompile as script

    flags = {"env_id": f"sleeping:Sleep{milliseconds}ms-v0", "envs_per_worker": ENVS.get(milliseconds, 4)}
    flags |= WAYS[way] | settings
    envs = flags["envs_per_worker"]
    num_steps = int(np.clip(2000 / envs / milliseconds, 2, 128))
    rates = []
    add_scalar = script.SummaryWriter.add_scalar

    def spied(writer, name, value, step):
        if name == "charts/sampling_seconds":
            rates.append(num_steps * workers * envs / value)
        add_scalar(writer, name, value, step)

    script.SummaryWriter.add_scalar = spied
    iterations = 3 if milliseconds == 1000 else 5
    flags |= {"num_workers": workers, "num_steps": num_steps, "num_minibatches": 1, "update_epochs": 1}
    flags |= {"total_timesteps": iterations * num_steps * workers * envs, "save_model": False, "cuda": False}
    script.train(script.Args(**flags))
    return mean(rates[1:])


def steps_of_gymnasium(workers: int, milliseconds: int) -> float:
    """Env steps a second of a vector env with a process for each env."""
    env_id = f"Sleep{milliseconds}ms-v0"
    envs = gym.vector.AsyncVectorEnv([lambda: gym.make(env_id)] * workers)
    rate = sleeping.steps_per_second(envs, workers, milliseconds)
    envs.close()
    return rate


def measure(cell: str) -> float:
    """In a process of its own, since Ray's processes outlive a call."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}
    with tempfile.TemporaryDirectory() as folder:
        way, *numbers = cell.split("/")
        command = [sys.executable, __file__, "--cell", cell]
        if way == TIANSHOU:
            command = [PYTHON_OF_TIANSHOU, FOLDER / "tianshou_peer.py", *numbers]
        process = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    if process.returncode:
        sys.exit(process.stderr)
    return float(re.search(r"^steps/s: (.*)$", process.stdout, re.MULTILINE)[1])  # Ray may warn before and after it


def fit(rows: list[dict]) -> dict:
    """Latency and cost of a call, in milliseconds: efficiency = D / (D + latency + workers * cost)."""
    points = [row for row in rows if row["way"] == "one env a call"]
    x = np.array([[row["milliseconds"], row["workers"]] for row in points], float).T
    y = [row["efficiency"] for row in points]
    formula = lambda x, latency, cost: x[0] / (x[0] + latency + x[1] * cost)  # noqa: E731
    (latency, cost), _ = curve_fit(formula, x, y, p0=(1, 0.3), bounds=(0, np.inf))
    rms = float(np.sqrt(np.mean((formula(x, latency, cost) - y) ** 2)))
    return {"latency_ms": latency, "cost_ms": cost, "rms": rms}


def main(args: Args):
    if args.cell:
        way, workers, milliseconds = args.cell.split("/")
        numbers = int(workers), int(milliseconds)
        print(f"steps/s: {steps_of_gymnasium(*numbers) if way == ASYNC else steps_of_ray(way, *numbers)}")
        return
    if TIANSHOU in args.ways and not PYTHON_OF_TIANSHOU.exists():
        sys.exit("error: Tianshou is not there; ./run.sh rllib installs it, or leave it out of --ways.")
    rows = []
    table = {"machine": machine(), "envs": ENVS, "rows": rows}
    for milliseconds in args.milliseconds:
        for workers in args.workers:
            for way in args.ways:
                rate = measure(f"{way}/{workers}/{milliseconds}")
                row = {"way": way, "workers": workers, "milliseconds": milliseconds, "steps_per_second": rate}
                rows.append(row | {"efficiency": rate * milliseconds / 1000 / workers})
                print(*rows[-1].values(), flush=True)
    if sum(row["way"] == "one env a call" for row in rows) > 2:
        table["fit"] = fit(rows)
    keep(args.out, "ray", table)


if __name__ == "__main__":
    main(tyro.cli(Args))
