"""Measures env steps a second by who steps the simulators: a script's loop, its --async-envs, EnvPool, workers on Ray.

    python benchmark/processes.py --milliseconds 0.1 1 10 --envs 1 8

A simulator is HalfCheetah with as many frames a step as take that long, or an env that sleeps, as it would on a core of
its own. EnvPool has HalfCheetah only. No policy acts, but on Ray, whose workers make rollouts of up to 128 steps. Cells
are measured in turns; the table in OUT/processes.json holds medians (docs/ppo.md).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import efficiency
import gymnasium as gym
import numpy as np
import tyro
from results import RUNS, keep, machine

FOLDER = Path(__file__).resolve().parent
WAYS = ("loop", "--async-envs", "EnvPool", "Ray")
SIMULATORS = ("HalfCheetah", "asleep")


@dataclass
class Args:
    milliseconds: tuple[float, ...] = (0.1, 1, 10)  # times that a step takes
    envs: tuple[int, ...] = (1, 8)  # numbers of envs
    simulators: tuple[str, ...] = SIMULATORS  # what a step does
    turns: int = 3  # how often each cell is measured
    out: Path = RUNS  # where the table goes
    cell: str | None = None  # measure this one alone, "simulator/way/envs/milliseconds/frames", and print its steps/s


def calls_per_second(step: Callable, seconds: float = 2) -> float:
    for _ in range(3):
        step()
    start = time.perf_counter()
    calls = 0
    while time.perf_counter() < start + seconds:
        step()
        calls += 1
    return calls / (time.perf_counter() - start)


def make_pool(num_envs: int, frames: int):
    import envpool

    threads = min(num_envs, os.cpu_count())
    settings = {"num_envs": num_envs, "num_threads": threads, "frame_skip": frames, "max_episode_steps": 10**9}
    pool = envpool.make("HalfCheetah-v4", env_type="gymnasium", seed=1, **settings)
    pool.reset()
    return pool


def frames_per_millisecond() -> dict[str, float]:
    """Of the simulator alone, by Gymnasium and by EnvPool, whose versions of MuJoCo differ."""
    env = gym.make("HalfCheetah-v5", frame_skip=100).unwrapped
    env.reset(seed=1)
    pool = make_pool(1, frames=100)
    by_gymnasium = calls_per_second(lambda: env.step(np.zeros(6))) / 10
    return {"gymnasium": by_gymnasium, "EnvPool": calls_per_second(lambda: pool.step(np.zeros((1, 6)))) / 10}


def steps_of_script(num_envs: int, async_envs: bool, **settings) -> float:
    """By what ppo_continuous_action does between two actions."""
    sys.path.insert(0, str(FOLDER.parent / "leanrl"))
    import ppo_continuous_action as script

    args = script.Args(num_envs=num_envs, **settings)
    make = lambda: script.make_env(args, gym.spaces.Box)  # noqa: E731
    envs = script.start_processes(make, num_envs) if async_envs else [make() for _ in range(num_envs)]
    step_all = script.step_processes if async_envs else script.step_envs
    obs = np.vstack(script.start_anew(1, 0, envs)).astype(np.float64)
    reward = np.zeros(num_envs)
    terminated, truncated = np.zeros((2, num_envs), bool)
    totals = np.zeros((2, num_envs))
    action = np.zeros((num_envs, 6))
    rate = calls_per_second(lambda: step_all(envs, action, obs, reward, terminated, truncated, totals))
    for env in envs:
        env.close()
    return num_envs * rate


def steps_per_second(simulator: str, way: str, num_envs: int, milliseconds: float, frames: int) -> float:
    if way == "EnvPool":
        pool = make_pool(num_envs, frames)
        return num_envs * calls_per_second(lambda: pool.step(np.zeros((num_envs, 6))))
    settings = {"env_id": "HalfCheetah-v5", "env_kwargs": json.dumps({"frame_skip": frames})}
    if simulator == "asleep":
        settings = {"env_id": "sleeping:Sleep1ms-v0", "env_kwargs": json.dumps({"seconds": milliseconds / 1000})}
    if way == "Ray":
        return efficiency.steps_of_ray("rollouts", num_envs, milliseconds, envs_per_worker=1, **settings)
    return steps_of_script(num_envs, way == "--async-envs", **settings)


def measure(cell: str) -> float:
    """In a process of its own, since Ray's processes outlive a call."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, __file__, "--cell", cell]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    if process.returncode:
        sys.exit(process.stderr)
    return float(re.search(r"^steps/s: (.*)$", process.stdout, re.MULTILINE)[1])


def main(args: Args):
    if args.cell:
        simulator, way, num_envs, milliseconds, frames = args.cell.split("/")
        print(f"steps/s: {steps_per_second(simulator, way, int(num_envs), float(milliseconds), int(frames))}")
        return
    per_millisecond = frames_per_millisecond()
    cells = {}
    for _ in range(args.turns):
        for simulator in args.simulators:
            for milliseconds in args.milliseconds:
                for num_envs in args.envs:
                    for way in WAYS if simulator == "HalfCheetah" else [way for way in WAYS if way != "EnvPool"]:
                        frames = round(milliseconds * per_millisecond["EnvPool" if way == "EnvPool" else "gymnasium"])
                        key = simulator, milliseconds, num_envs, way
                        rate = measure(f"{simulator}/{way}/{num_envs}/{milliseconds}/{frames}")
                        cells.setdefault(key, []).append(rate)
                        print(*key, f"{rate:.0f}", flush=True)
    names = ("simulator", "milliseconds", "envs", "way")
    rows = [dict(zip(names, key)) | {"steps_per_second": median(rates)} for key, rates in cells.items()]
    keep(args.out, "processes", {"machine": machine(), "turns": args.turns, "frames": per_millisecond, "rows": rows})


if __name__ == "__main__":
    main(tyro.cli(Args))
