"""Prints the env steps a second of Tianshou's RayVectorEnv, with one of Ray's workers for each env that sleeps.

    .venv-rllib/bin/python benchmark/tianshou_peer.py 16 10

The numbers are those of the workers and of the milliseconds that a step takes. efficiency.py runs it, in the
environment that ./run.sh rllib makes.
"""

import os
import sys

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on the loopback interface only
os.environ.setdefault("RAY_worker_niceness", "0")  # by default any other program goes before a worker

import gymnasium as gym
import ray
import sleeping
from tianshou.env import RayVectorEnv

workers, milliseconds = map(int, sys.argv[1:])
ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
envs = RayVectorEnv([lambda: gym.make(f"sleeping:Sleep{milliseconds}ms-v0")] * workers)
print(f"steps/s: {sleeping.steps_per_second(envs, workers, milliseconds)}")
