"""Environments whose step takes a given time, in which they sleep: Sleep1ms-v0, Sleep10ms-v0 and so on.

They stand for a simulator that is slow. Their observations have the size of HalfCheetah's, and are zeros.
"""

import time

import gymnasium as gym
import numpy as np

MILLISECONDS = (1, 10, 100, 1000)


class Sleep(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (17,))
    action_space = gym.spaces.Box(-1, 1, (6,))

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.obs = np.zeros(17, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.obs, {}

    def step(self, action):
        time.sleep(self.seconds)
        return self.obs, 0.0, False, False, {}


for milliseconds in MILLISECONDS:
    gym.register(f"Sleep{milliseconds}ms-v0", Sleep, kwargs={"seconds": milliseconds / 1000}, disable_env_checker=True)


def steps_per_second(envs, workers: int, milliseconds: int) -> float:
    """Env steps a second of a vector env of so many workers, over about three seconds if they never waited."""
    envs.reset()
    action = np.zeros((workers, 6), np.float32)
    steps = max(3, 3000 // milliseconds)
    for _ in range(2):
        envs.step(action)
    start = time.perf_counter()
    for _ in range(steps):
        envs.step(action)
    return steps * workers / (time.perf_counter() - start)
