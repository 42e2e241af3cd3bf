"""Trains the PQN of its authors, purejaxql, on MinAtar's Breakout with their settings, as returns.py trains ours.

    python benchmark/purejaxql_peer.py --folder purejaxql --seeds 1

It needs JAX from `./run.sh compare`, `pip install gymnax==0.0.8`, and their code in --folder:

    git clone https://github.com/mttga/purejaxql && git -C purejaxql checkout 47af6d7

Their Breakout is gymnax's, without sticky actions. The return is that of each env's last episode, 0 before its first;
it is the mean over the envs and the steps of a rollout. The whole run is one function of JAX, so the seconds of its
curve are spread evenly. It takes an hour on a core. A run that is recorded already is not repeated.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import tyro
import yaml
from results import RESULTS, machine, read_csv
from returns import keep, learning_curve


@dataclass
class Args:
    folder: Path = Path("purejaxql")  # a clone of purejaxql
    seeds: tuple[int, ...] = (1,)
    total_timesteps: int = 10_000_000
    out: Path = RESULTS  # returns.csv, and a file for the curve in curves/, go there


def settings(folder: Path, total_timesteps: int) -> dict:
    """The authors' settings for MinAtar, without tests during training."""
    config = yaml.safe_load((folder / "purejaxql/config/alg/pqn_minatar.yaml").read_text())
    config |= {"ENV_NAME": "Breakout-MinAtar", "TOTAL_TIMESTEPS": total_timesteps}
    config |= {"TOTAL_TIMESTEPS_DECAY": total_timesteps, "TEST_DURING_TRAINING": False, "WANDB_MODE": "disabled"}
    return config | {"NUM_SEEDS": 1}


def train(folder: Path, config: dict, seed: int) -> np.ndarray:
    """The mean return of the envs' last episodes after each update."""
    for name in ("wandb", "hydra", "omegaconf"):  # which their file imports, and this run does not use
        sys.modules[name] = ModuleType(name)
    sys.modules["hydra"].main = lambda **settings: lambda function: function
    sys.modules["omegaconf"].OmegaConf = None
    sys.path.insert(0, str(folder))
    import jax

    jax.tree_map = jax.tree_util.tree_map  # gymnax knows its old name
    from purejaxql.pqn_minatar import make_train

    trained = jax.jit(make_train(config))(jax.random.PRNGKey(seed))
    return np.asarray(trained["metrics"]["returned_episode_returns"])


def main(args: Args):
    done = {row["seed"] for row in read_csv(args.out / "returns.csv") if row["mode"] == "purejaxql"}
    config = settings(args.folder, args.total_timesteps)
    for seed in args.seeds:
        if str(seed) in done:
            continue
        here, begin = machine(), time.perf_counter()
        value = train(args.folder, config, seed)
        seconds = time.perf_counter() - begin
        rollouts = np.arange(1, len(value) + 1)
        step = rollouts * config["NUM_ENVS"] * config["NUM_STEPS"]
        curve = learning_curve(step, rollouts / len(value) * seconds, value, args.total_timesteps)
        run = {"script": "pqn_device_env", "env_id": "MinAtar/Breakout-v1", "mode": "purejaxql", "seed": seed}
        run |= {"steps": args.total_timesteps, "episodic_return": f"{value[-1]:.6g}"}
        keep(run, curve, here, "", args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
