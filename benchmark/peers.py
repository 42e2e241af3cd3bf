"""The libraries that compare.py measures beside our scripts: Stable-Baselines3 and its contrib (PyTorch), SBX (JAX).

Each runs with our defaults. A peer is (the package that it needs, what trains it). The latter is a function of an env
id, a seed, a number of env steps and a callback that gets the steps done so far, first when learning begins.
"""

import importlib
from collections.abc import Callable
from functools import partial

PACKAGES = {"sb3": "stable_baselines3", "sbx": "sbx", "sb3-contrib": "sb3_contrib"}
LEARNING_STARTS = 1_000  # env steps of random actions, off-policy: short, since what counts comes after

PPO_SETTINGS = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "gamma": 0.99}
PPO_SETTINGS |= {"gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
PPO_SETTINGS |= {"policy_kwargs": {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}}
DISCRETE_PPO_SETTINGS = PPO_SETTINGS | {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "learning_rate": 2.5e-4}
DISCRETE_PPO_SETTINGS |= {"ent_coef": 0.01}
WORLDS_PPO_SETTINGS = PPO_SETTINGS | {"n_steps": 32, "batch_size": 512, "n_epochs": 5, "learning_rate": 1e-3}
LSTM = {
    "lstm_hidden_size": 128,
    "shared_lstm": True,
    "enable_critic_lstm": False,
    "net_arch": {"pi": [128], "vf": [128]},
}
RECURRENT_PPO_SETTINGS = PPO_SETTINGS | {"n_steps": 128, "batch_size": 32 * 128 // 4, "n_epochs": 4}
RECURRENT_PPO_SETTINGS |= {"learning_rate": 1e-3, "ent_coef": 0.01, "policy_kwargs": LSTM}
OFF_POLICY_SETTINGS = {"gamma": 0.99, "gradient_steps": 1}
CONTINUOUS_SETTINGS = OFF_POLICY_SETTINGS | {"learning_rate": 3e-4, "buffer_size": 1_000_000, "batch_size": 256}
CONTINUOUS_SETTINGS |= {"tau": 0.005, "train_freq": 1, "policy_kwargs": {"net_arch": [256, 256]}}
TD3_SETTINGS = CONTINUOUS_SETTINGS | {"policy_delay": 2}
SAC_SETTINGS = CONTINUOUS_SETTINGS | {"ent_coef": "auto"}
DQN_SETTINGS = OFF_POLICY_SETTINGS | {"learning_rate": 2.5e-4, "buffer_size": 10_000, "batch_size": 128, "tau": 1.0}
DQN_SETTINGS |= {"train_freq": 10, "target_update_interval": 500, "policy_kwargs": {"net_arch": [120, 84]}}
DQN_SETTINGS |= {"exploration_initial_eps": 1.0, "exploration_final_eps": 0.05, "exploration_fraction": 0.5}


def envpool_envs(env_id: str, num_envs: int, seed: int):
    """EnvPool's envs as Stable-Baselines3 takes them: reset in the step that ends an episode."""
    import envpool
    import numpy as np
    from stable_baselines3.common.vec_env import VecEnv

    pool = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=seed)

    class Envs(VecEnv):
        get_attr = env_is_wrapped = lambda self, *_: [None] * num_envs
        set_attr = env_method = close = lambda self, *_: None

        def reset(self):
            return pool.reset()[0]

        def step_async(self, actions: np.ndarray):
            self.actions = actions.astype(np.float64)

        def step_wait(self):
            obs, reward, terminated, truncated, _ = pool.step(self.actions)
            over = np.flatnonzero(terminated | truncated)
            infos = [{} for _ in range(num_envs)]
            for i in over:
                infos[i] = {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": not terminated[i]}
            if len(over):
                obs[over] = pool.reset(over)[0]
            return obs, reward, terminated | truncated, infos

    return Envs(num_envs, pool.observation_space, pool.action_space)


def train(
    library: str,
    algorithm: str,
    settings: dict,
    env_id: str,
    seed: int,
    steps: int,
    on_report: Callable[[int], None],
    monitor: str | None = None,
    normalize: bool = False,
    policy: str = "MlpPolicy",
    num_envs: int = 1,
    by_envpool: bool = False,
    learning_starts: int = LEARNING_STARTS,
):
    """Trains; reports once per rollout of PPO, and every 500 steps of learning off-policy.

    With `monitor`, a folder, Stable-Baselines3's Monitor writes each episode to it.
    """
    import gymnasium as gym
    import numpy as np
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    known = isinstance(gym.make(env_id).observation_space, gym.spaces.Box | gym.spaces.Discrete)
    wrapper = None if known else gym.wrappers.FlattenObservation
    if by_envpool:
        envs = envpool_envs(env_id, num_envs, seed)
    else:
        envs = make_vec_env(env_id, n_envs=num_envs, seed=seed, monitor_dir=monitor, wrapper_class=wrapper)
    if normalize:
        envs = VecNormalize(envs, gamma=settings["gamma"])
    if algorithm == "TD3":
        (dims,) = envs.action_space.shape
        settings = settings | {"action_noise": NormalActionNoise(np.zeros(dims), np.full(dims, 0.1))}
    if "gradient_steps" in settings:  # off-policy
        settings = settings | {"learning_starts": learning_starts}
    if (library, algorithm) == ("sbx", "SAC"):  # Stable-Baselines3 has one rate for all
        settings = settings | {"qf_learning_rate": 1e-3}
    learning_starts = settings.get("learning_starts", 0)
    interval = settings.get("n_steps", 500) * num_envs

    class Clock(BaseCallback):
        def _on_step(self):
            done = self.num_timesteps - learning_starts
            if done >= 0 and done % interval == 0:
                on_report(self.num_timesteps)
            return True

    model = getattr(importlib.import_module(PACKAGES[library]), algorithm)(policy, envs, seed=seed, **settings)
    if not learning_starts:
        on_report(0)
    model.learn(steps, callback=Clock())


def both(suffix: str, algorithm: str, settings: dict, **kwargs) -> dict[str, tuple[str, Callable]]:
    """Both libraries' peers by name."""
    return {
        library + suffix: (package, partial(train, library, algorithm, settings, **kwargs))
        for library, package in PACKAGES.items()
        if library in ("sb3", "sbx")
    }


PPO = both("", "PPO", PPO_SETTINGS, normalize=True)
PPO_UNNORMALISED = both(" unnormalised", "PPO", PPO_SETTINGS)
DISCRETE_PPO = both("", "PPO", DISCRETE_PPO_SETTINGS, num_envs=4)
WORLDS_PPO = both(" on EnvPool", "PPO", WORLDS_PPO_SETTINGS, normalize=True, num_envs=64, by_envpool=True)
TD3 = both("", "TD3", TD3_SETTINGS)
SAC = both("", "SAC", SAC_SETTINGS)
DQN = both("", "DQN", DQN_SETTINGS)
RECURRENT_PPO = {
    "sb3-contrib": (
        "sb3_contrib",
        partial(train, "sb3-contrib", "RecurrentPPO", RECURRENT_PPO_SETTINGS, policy="MlpLstmPolicy", num_envs=32),
    )
}
