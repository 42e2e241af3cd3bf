"""Measures env steps a second in N worlds of HalfCheetah-v5: the simulator alone, and PPO with it.

    python benchmark/worlds.py --out benchmark/results

Alone are C MuJoCo and Warp as leanrl/ppo_mujoco.py runs them, and EnvPool. Keeps a table in OUT/worlds.json.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from results import ROOT, RUNS, keep, machine
from runs import Run, take_turns
from tqdm import tqdm

TRAINING = {  # name -> mode, flags
    "plain, C MuJoCo": ("eager", ("--physics", "host")),
    "compiled, C MuJoCo": ("compile", ("--physics", "host")),
    "compiled, Warp": ("compile", ("--physics", "warp")),
}


@dataclass
class Args:
    worlds: tuple[int, ...] = (1, 64, 1024, 4096)
    seconds: float = 10  # how long each cell is measured
    out: Path = RUNS  # where the table goes


def calls_per_second(call: Callable[[], object], seconds: float) -> float:
    """After a first call, which may compile."""
    call()
    start = time.perf_counter()
    calls = 0
    while time.perf_counter() < start + seconds:
        call()
        calls += 1
    return calls / (time.perf_counter() - start)


def simulators(num_envs: int) -> dict[str, Callable[[], object]]:
    """What steps all worlds once, by name."""
    import envpool
    import ppo_mujoco_torchcompile as script

    def physics_of(engine: str):
        args = script.Args(physics=engine)
        env = script.Worlds(script.HalfCheetah, num_envs, torch.device("cpu"), args)
        return env.physics, env.initial(torch.rand(num_envs, 1)), torch.zeros(num_envs, env.act_dim)

    host, *inputs_of_host = physics_of("host")
    launched, *inputs = physics_of("warp")
    recorded, *_ = physics_of("warp")
    script.record(recorded)
    pool = envpool.make("HalfCheetah-v5", env_type="gymnasium", num_envs=num_envs, seed=1)
    pool.reset()
    return {
        "C MuJoCo": lambda: host.step(*inputs_of_host),
        "EnvPool": lambda: pool.step(np.zeros((num_envs, 6))),
        "Warp, launched": lambda: launched.step(*inputs),
        "Warp, recorded": lambda: recorded.step(*inputs),
    }


def training(num_envs: int, seconds: float, folder: Path) -> dict[str, float]:
    """Env steps a second of whole iterations, by name."""
    about = {"steps": 10**8, "env_id": "HalfCheetah-v5", "seed": 1, "slices": 2, "seconds": seconds}
    about["report_interval"] = max(2048 // (32 * num_envs), 1)  # rollouts
    rates = {}
    for name, (mode, flags) in TRAINING.items():
        flags = (*flags, "--num-envs", str(num_envs))
        run = Run("ppo_mujoco", mode, flags=flags, cache=folder / name.replace(", ", "-").replace(" ", "-"), **about)
        (result,) = take_turns(run, progress=tqdm(disable=True))
        rates[name] = float(np.median(result["rates"]))
    return rates


def main(args: Args):
    sys.path.insert(0, str(ROOT / "leanrl"))
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for num_envs in args.worlds:
            alone = simulators(num_envs).items()
            row = {"worlds": num_envs}
            row["alone"] = {name: num_envs * calls_per_second(call, args.seconds) for name, call in alone}
            row["training"] = training(num_envs, args.seconds, Path(folder))
            print(row, flush=True)
            rows.append(row)
    print(keep(args.out, "worlds", {"machine": machine(), "seconds": args.seconds, "rows": rows}))


if __name__ == "__main__":
    main(tyro.cli(Args))
