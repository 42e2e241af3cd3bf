"""CartPole-v1 without velocities, so that a policy needs a memory: env id no_velocity:CartPoleNoVel-v1.

It observes the position of the cart and the angle of the pole (2,), in metres and radians.
"""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

SEEN = [0, 2]  # of position, velocity, angle, angular velocity


def make_env(render_mode: str | None = None) -> gym.Env:
    env = CartPoleEnv(render_mode=render_mode)
    space = gym.spaces.Box(env.observation_space.low[SEEN], env.observation_space.high[SEEN], dtype=np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[SEEN], space)


gym.register("CartPoleNoVel-v1", make_env, max_episode_steps=500)
