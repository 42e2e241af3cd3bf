"""Trains RLlib's IMPALA or APPO on an Atari game of EnvPool, as a program that compare.py times from outside.

    .venv-rllib/bin/python benchmark/rllib_peer.py impala --steps 16384

It runs in an environment of its own, since RLlib pins another Gymnasium: ./run.sh rllib makes it. The network, the
game, the number of envs and the length of a rollout are those of ppo_atari_ray. It ends once it has learned from
--steps env steps.
"""

import argparse
import os

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on the loopback interface only
os.environ.setdefault("RAY_worker_niceness", "0")  # by default any other program goes before a worker

import envpool
import gymnasium as gym
import numpy as np
import ray
from gymnasium.vector.utils import batch_space
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

ALGORITHMS = {"appo": APPOConfig, "impala": IMPALAConfig}


class Game(gym.vector.VectorEnv):
    """EnvPool's envs, with one thread, as RLlib's network wants them: float32 frames in [0, 1], channels last."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, env_id: str, num_envs: int, seed: int):
        options = {"episodic_life": True, "reward_clip": True, "num_threads": 1}
        self.envs = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=seed, **options)
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 1, (84, 84, 4), np.float32)
        self.single_action_space = gym.spaces.Discrete(int(self.envs.action_space.n))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def frames(self, obs: np.ndarray) -> np.ndarray:
        return obs.transpose(0, 2, 3, 1).astype(np.float32) / 255

    def reset(self, *, seed=None, options=None) -> tuple:
        return self.frames(self.envs.reset()[0]), {}

    def step(self, action) -> tuple:
        obs, *outcome, _ = self.envs.step(np.asarray(action))
        return self.frames(obs), *outcome, {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("algorithm", choices=ALGORITHMS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8, help="envs of each runner")
    parser.add_argument("--learners", type=int, default=0, help="processes that learn; 0: the driver does")
    args = parser.parse_args()
    new_game = lambda context: Game("Breakout-v5", context.get("num_envs", 1), args.seed * 100_000 + os.getpid())  # noqa: E731
    register_env("game", new_game)
    ray.init(num_cpus=args.runners + args.learners + 1, include_dashboard=False, object_store_memory=2 * 2**30)
    convolutions = [[32, 8, 4, "valid"], [64, 4, 2, "valid"], [64, 3, 1, "valid"], [512, 7, 1, "valid"]]
    network = {"conv_filters": convolutions, "conv_activation": "relu", "vf_share_layers": True}
    sampling = {"num_env_runners": args.runners, "num_envs_per_env_runner": args.envs}
    sampling |= {"rollout_fragment_length": 64, "gym_env_vectorize_mode": "vector_entry_point"}
    learning = {"train_batch_size_per_learner": args.runners * args.envs * 64, "lr": 2.5e-4, "grad_clip": 40.0}
    config = (
        ALGORITHMS[args.algorithm]()
        .environment("game")
        .env_runners(**sampling)
        .learners(num_learners=args.learners)
        .training(**learning, entropy_coeff=0.01, vf_loss_coeff=0.5)
        .rl_module(model_config=DefaultModelConfig(**network))
        .debugging(seed=args.seed)
        .reporting(min_time_s_per_iteration=1)
    )
    algorithm = config.build_algo()
    parameters = sum(p.numel() for p in algorithm.get_module().parameters())
    assert parameters == 1_686_693 - 513, parameters  # those of AtariAgent for four actions; players have no value
    steps = 0
    while steps < args.steps:
        result = algorithm.train()
        learned = result.get("learners", {}).get("__all_modules__", {}).get("num_env_steps_trained_lifetime", 0)
        sampled = result.get("env_runners", {}).get("num_env_steps_sampled_lifetime", 0)
        steps = min(learned, sampled)  # APPO counts a step each time that it learns from it
    algorithm.stop()


if __name__ == "__main__":
    main()
