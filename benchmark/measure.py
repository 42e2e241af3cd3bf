"""Measures one mode of one script, or one peer, in this process, and prints a line of JSON. compare.py runs it.

python benchmark/measure.py ppo_continuous_action --mode compile --steps 40960
"""

import importlib
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
MODES = {  # mode -> which file, and its flags
    "eager": ("", []),
    "twin": ("_torchcompile", []),
    "compile": ("_torchcompile", ["--compile"]),
    "cudagraphs": ("_torchcompile", ["--cudagraphs"]),
    "compile+cudagraphs": ("_torchcompile", ["--compile", "--cudagraphs"]),
}


@dataclass
class Args:
    script: tyro.conf.Positional[str]
    mode: str  # of MODES, or a peer of PEERS
    steps: int  # env steps
    env_id: str
    seed: int = 1
    folder: Path = ROOT / "leanrl"  # where the script is


def ppo_continuous_action_peer(library: str, args: Args, on_rollout: Callable[[int], None], normalize: bool = True):
    """PPO of Stable-Baselines3 (PyTorch) or SBX (JAX) with our defaults; `on_rollout` gets the steps done so far."""
    import numpy as np
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    class Clock(BaseCallback):
        def _on_rollout_start(self):
            on_rollout(self.num_timesteps)

        def _on_step(self):
            return True

    PPO = importlib.import_module({"sb3": "stable_baselines3", "sbx": "sbx"}[library]).PPO
    envs = make_vec_env(args.env_id, n_envs=1, seed=args.seed)
    envs = VecNormalize(envs, gamma=0.99) if normalize else envs
    model = PPO("MlpPolicy", envs, n_steps=2048, batch_size=64, n_epochs=10, learning_rate=3e-4, gamma=0.99,
                gae_lambda=0.95, clip_range=0.2, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5, seed=args.seed,
                policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}})  # fmt: skip
    model.learn(args.steps, callback=Clock())
    on_rollout(model.num_timesteps)
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer or [{"r": math.nan}]]))


PEERS = {  # script -> name of the peer -> (package it needs, function)
    "ppo_continuous_action": {
        "sb3": ("stable_baselines3", lambda *a: ppo_continuous_action_peer("sb3", *a)),
        "sbx": ("sbx", lambda *a: ppo_continuous_action_peer("sbx", *a)),
        "sb3 unnormalised": ("stable_baselines3", lambda *a: ppo_continuous_action_peer("sb3", *a, normalize=False)),
        "sbx unnormalised": ("sbx", lambda *a: ppo_continuous_action_peer("sbx", *a, normalize=False)),
    },
}


def run_script(args: Args) -> dict:
    """Trains by a call of the script's train(), in a folder that is thrown away."""
    suffix, flags = MODES[args.mode]
    sys.path.insert(0, str(args.folder))
    script = importlib.import_module(args.script + suffix)
    flags = [*flags, "--total-timesteps", args.steps, "--env-id", args.env_id, "--seed", args.seed]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        metrics = script.train(tyro.cli(script.Args, args=[*map(str, flags), "--exp-name", args.mode]))
        os.chdir(ROOT)
    return {name: metrics[name] for name in ("SPS", "startup_seconds", "episodic_return")}


def run_peer(args: Args, warmup_rollouts: int = 3) -> dict:
    """Trains with another library; the same clock as in our scripts: the first 3 rollouts do not count."""
    from tqdm import tqdm

    times, steps = [], []
    progress = tqdm(total=args.steps, unit="step", desc=args.mode, dynamic_ncols=True)

    def on_rollout(num_timesteps: int):
        times.append(time.perf_counter())
        steps.append(num_timesteps)
        progress.update(num_timesteps - progress.n)

    _, train = PEERS[args.script][args.mode]
    episodic_return = train(args, on_rollout)
    progress.close()
    sps = (steps[-1] - steps[warmup_rollouts]) / (times[-1] - times[warmup_rollouts])
    startup_seconds = times[warmup_rollouts] - times[0] - steps[warmup_rollouts] / sps
    return {"SPS": sps, "startup_seconds": startup_seconds, "episodic_return": episodic_return}


def time_env_steps(env_id: str) -> list[float]:
    """Makes every env of this id add to the list the seconds that a step takes, as [seconds, steps]."""
    import gymnasium as gym

    gym.logger.min_level = gym.logger.ERROR
    env = gym.make(env_id)
    cls, spent = type(env.unwrapped), [0.0, 0]
    env.close()
    step = cls.step

    def timed_step(self, action):
        start = time.perf_counter()
        result = step(self, action)
        spent[0] += time.perf_counter() - start
        spent[1] += 1
        return result

    cls.step = timed_step
    return spent


def sample_gpu(samples: list[float], stop: threading.Event):
    """Appends the GPU's utilisation in percent twice a second until told to stop."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0"]
    while not stop.wait(0.5):
        samples.append(float(subprocess.run(query, capture_output=True, text=True, check=True).stdout))


def main(args: Args):
    import torch

    has_gpu, samples, stop = torch.cuda.is_available(), [], threading.Event()
    if has_gpu:
        threading.Thread(target=sample_gpu, args=(samples, stop), daemon=True).start()
    spent = time_env_steps(args.env_id)
    result = run_script(args) if args.mode in MODES else run_peer(args)
    stop.set()
    result["env_share"] = spent[0] / spent[1] * result["SPS"]  # of the steady rate's time, in the simulator
    result["host_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result["device_mb"] = torch.cuda.max_memory_reserved() / 2**20 if has_gpu else None
    late = samples[len(samples) // 2 :]  # the second half: start-up is over
    result["gpu_utilisation"] = sum(late) / len(late) if late else None
    print(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Args))
