"""Prints the env steps a second of Tianshou's RayVectorEnv, with one of Ray's workers for each env that sleeps.

    .venv-rllib/bin/python benchmark/tianshou_peer.py 16 10

The numbers are those of the workers and of the milliseconds that a step takes. efficiency.py runs it, in the
environment that ./run.sh rllib makes.
"""

import sys
import time

import gymnasium as gym
import numpy as np
import ray
from tianshou.env import RayVectorEnv

workers, milliseconds = map(int, sys.argv[1:])
ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
envs = RayVectorEnv([lambda: gym.make(f"sleeping:Sleep{milliseconds}ms-v0")] * workers)
envs.reset()
action = np.zeros((workers, 6), np.float32)
steps = max(3, 3000 // milliseconds)
for _ in range(2):
    envs.step(action)
start = time.perf_counter()
for _ in range(steps):
    envs.step(action)
print(steps * workers / (time.perf_counter() - start))
