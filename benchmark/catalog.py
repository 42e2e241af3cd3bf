"""The one table of the scripts. The benchmark and the tests read it. docs/contributing.md says what else a pair needs.

A mode is (suffix of the file, its flags). "eager" is the plain file, all others are of its twin. The data-parallel
script has no twin; its modes are numbers of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import peers

TWIN = "_torchcompile"
MODES = {
    "eager": ("", []),
    "twin": (TWIN, []),
    "compile": (TWIN, ["--compile"]),
    "cudagraphs": (TWIN, ["--cudagraphs"]),
    "compile+cudagraphs": (TWIN, ["--compile", "--cudagraphs"]),
}
BF16 = {
    "compile+bf16": (TWIN, ["--compile", "--bf16"]),
    "compile+cudagraphs+bf16": (TWIN, ["--compile", "--cudagraphs", "--bf16"]),
}
GROUPS = {
    "compile+groups": (TWIN, ["--compile", "--env-groups", 2]),
    "compile+cudagraphs+groups": (TWIN, ["--compile", "--cudagraphs", "--env-groups", 2]),
    "compile+cudagraphs+groups+bf16": (TWIN, ["--compile", "--cudagraphs", "--env-groups", 2, "--bf16"]),
}
RANKS = {
    "1 rank": ("", ["--compile"]),
    "2 ranks": ("", ["--compile"]),
    "1 rank, one bucket": ("", ["--compile", "--no-ddp"]),
    "2 ranks, one bucket": ("", ["--compile", "--no-ddp"]),
    "1 rank, cudagraphs": ("", ["--compile", "--cudagraphs"]),
    "2 ranks, cudagraphs": ("", ["--compile", "--cudagraphs"]),
}
JAX = {"jax": ("_jax", [])}  # measured where JAX is installed, with as many threads as are best for it
PPO_LOSSES = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac explained_variance"
CRITIC_LOSSES = "qf1_values qf2_values qf1_loss qf2_loss qf_loss"


@dataclass(frozen=True)
class Script:
    env_id: str  # the env that it is measured in
    steps: int  # env steps of a measured run
    requirements: str  # what it needs beside the core: requirements/requirements-{this}.txt
    policy: str  # the class of its policy
    losses: str  # what it logs under losses/
    tiny: dict  # flags of a test that takes seconds and goes past the first updates
    saving: dict = field(default_factory=dict)  # more of them, for a run with two checkpoints and some more
    # flags of a small problem, most that the first 3 episodes may pay, least that the last 10 must
    gate: tuple[dict, float, float] | None = None
    adam: tuple[dict, list, float] | None = None  # flags; the rate that each of its optimizers then has; Adam's eps
    graphs: int = 0  # how many functions --compile compiles
    on_device: bool = False  # its envs are in the script
    in_readme: bool = False  # whether it is a row of the table there
    threads: int | None = None  # of a measured run, where one thread is enough; None: as many as there are cores
    slices: int = 20  # parts of a measured run, in turns; 1 where players would play on while others have theirs
    modes: dict[str, tuple[str, list]] = field(default_factory=lambda: MODES)
    peers: dict[str, tuple[str, Callable]] = field(default_factory=dict)  # what is measured beside it; see peers.py

    @property
    def steps_elsewhere(self) -> bool:
        """Whether there is no simulator in the loop that learns: it is on the device, or on Ray's workers."""
        return self.on_device or self.requirements.startswith("ray")


SWING_UP = {"env_id": "Pendulum-v1", "total_timesteps": 4_500, "learning_starts": 1000, "batch_size": 64}
SWING_UP |= {"gamma": 0.95, "tau": 0.02}
OFF_POLICY = {"total_timesteps": 1024, "learning_starts": 900, "batch_size": 32, "buffer_size": 700}
OFF_POLICY_SAVING = {"total_timesteps": 300, "learning_starts": 50, "checkpoint_interval": 100, "buffer_size": 100}
CUE = {"env_id": "CueEnv-v0", "num_envs": 16, "num_steps": 32, "hidden_size": 32}
MEMORY = {"env_id": "CartPole-v1", "num_envs": 2, "num_minibatches": 1, "update_epochs": 2, "hidden_size": 16}
MEMORY |= {"total_timesteps": 1024}
SLICES = {"env_id": "CartPole-v1", "num_envs": 1, "train_frequency": 10, "target_network_frequency": 50}
SLICES |= {"hidden_size": 16, "burn_in": 4, "seq_length": 8, "state_interval": 4}
ATARI = {"env_id": "Breakout-v5", "num_envs": 2, "update_epochs": 2, "total_timesteps": 1024}

CATALOG = {
    "ppo": Script(
        env_id="CartPole-v1",
        steps=102_400,
        threads=1,
        requirements="",
        policy="FactoredAgent",
        losses=PPO_LOSSES,
        tiny={"env_id": "CartPole-v1", "num_envs": 2, "update_epochs": 2, "total_timesteps": 1024},
        saving={"num_steps": 32, "num_minibatches": 2, "total_timesteps": 64 * 4 * 2, "checkpoint_interval": 128},
        # an episode pays 500 at most, and 22 with random actions
        gate=({"total_timesteps": 20_480, "learning_rate": 1e-3}, 60, 120),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=1,
        in_readme=True,
        peers=peers.DISCRETE_PPO,
    ),
    "ppo_continuous_action": Script(
        env_id="HalfCheetah-v4",
        steps=40_960,
        threads=1,
        requirements="mujoco",
        policy="Agent",
        losses=PPO_LOSSES,
        tiny={"env_id": "Pendulum-v1", "num_steps": 256, "num_minibatches": 4, "update_epochs": 2}
        | {"total_timesteps": 1024},
        saving={"num_steps": 64, "num_minibatches": 2, "total_timesteps": 64 * 4 * 2, "checkpoint_interval": 128},
        # an episode pays 1000 at most, and 10 with an untrained policy
        gate=(
            {"env_id": "InvertedPendulum-v5", "total_timesteps": 20_480, "num_steps": 1024, "num_minibatches": 8}
            | {"learning_rate": 3e-3},
            50,
            250,
        ),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=1,
        in_readme=True,
        peers=peers.PPO | peers.PPO_UNNORMALISED,
    ),
    "ppo_continuous_action_ray": Script(
        env_id="HalfCheetah-v4",
        steps=40_960,
        threads=1,
        requirements="ray",
        policy="Agent",
        losses=PPO_LOSSES,
        tiny={"env_id": "Pendulum-v1", "num_steps": 256, "num_minibatches": 4, "update_epochs": 2}
        | {"num_workers": 1, "envs_per_worker": 1, "total_timesteps": 1024},
        saving={"num_steps": 64, "num_minibatches": 2, "total_timesteps": 64 * 4 * 2, "checkpoint_interval": 128},
        graphs=1,
    ),
    "td3_continuous_action": Script(
        env_id="HalfCheetah-v4",
        steps=6_000,
        requirements="mujoco",
        policy="Actor",
        losses=f"{CRITIC_LOSSES} actor_loss",
        tiny=OFF_POLICY | {"env_id": "Pendulum-v1"},
        saving=OFF_POLICY_SAVING,
        # a policy that keeps the pendulum up gets -150 (after a bad start -380), an untrained one -1200
        gate=(SWING_UP | {"learning_rate": 2e-3}, -700, -450),
        adam=({"learning_rate": 3e-3}, [3e-3, 3e-3], 1e-8),
        graphs=3,
        modes=MODES | BF16,
        in_readme=True,
        peers=peers.TD3,
    ),
    "sac_continuous_action": Script(
        env_id="HalfCheetah-v4",
        steps=5_000,
        requirements="mujoco",
        policy="GaussianActor",
        losses=f"{CRITIC_LOSSES} actor_loss alpha alpha_loss",
        tiny=OFF_POLICY | {"env_id": "Pendulum-v1"},
        saving=OFF_POLICY_SAVING,
        gate=(SWING_UP | {"policy_lr": 2e-3, "q_lr": 2e-3}, -700, -450),
        # the critics step first, then the actor, then the temperature, which learns as fast as the critics
        adam=({"policy_lr": 1e-3, "q_lr": 2e-3}, [2e-3, 1e-3, 2e-3], 1e-8),
        graphs=3,
        modes=MODES | BF16,
        in_readme=True,
        peers=peers.SAC,
    ),
    "dqn": Script(
        env_id="CartPole-v1",
        steps=100_000,
        threads=1,
        requirements="",
        policy="QNetwork",
        losses="td_loss q_values",
        tiny=OFF_POLICY | {"env_id": "CartPole-v1", "target_network_frequency": 50},
        saving={"total_timesteps": 1500, "learning_starts": 200, "checkpoint_interval": 500},
        # an episode pays 500 at most, and 22 with random actions
        gate=({"total_timesteps": 40_000, "learning_rate": 1e-3, "learning_starts": 1000}, 60, 150),
        adam=({"learning_rate": 3e-3}, [3e-3], 1e-8),
        graphs=1,
        in_readme=True,
        peers=peers.DQN,
    ),
    "ppo_lru": Script(
        env_id="popgym:popgym-RepeatPreviousEasy-v0",
        steps=81_920,
        requirements="memory",
        policy="LRUAgent",
        losses=PPO_LOSSES,
        tiny=MEMORY,
        saving={"num_steps": 16, "total_timesteps": 16 * 6 * 2, "checkpoint_interval": 64},
        # an episode pays 1 or -1, each as often without a memory
        gate=(CUE | {"total_timesteps": 20_480, "learning_rate": 3e-3}, 0.9, 0.7),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=1,
        peers=peers.RECURRENT_PPO,
    ),
    "ppo_rnn": Script(
        env_id="popgym:popgym-RepeatPreviousEasy-v0",
        steps=40_960,
        threads=1,
        requirements="memory",
        policy="RNNAgent",
        losses=PPO_LOSSES,
        tiny=MEMORY,
        saving={"num_steps": 16, "total_timesteps": 16 * 6 * 2, "checkpoint_interval": 64},
        gate=(CUE | {"total_timesteps": 20_480, "learning_rate": 3e-3}, 0.9, 0.7),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=3,  # the update, and of the recurrence a step and its gradient
        peers=peers.RECURRENT_PPO,
    ),
    "dqn_lru": Script(
        env_id="popgym:popgym-PositionOnlyCartPoleEasy-v0",
        steps=40_000,
        threads=1,
        requirements="memory",
        policy="LRUQNetwork",
        losses="td_loss q_values",
        tiny=OFF_POLICY | SLICES,
        saving={"total_timesteps": 1500, "learning_starts": 200, "checkpoint_interval": 500, "state_interval": 1},
        gate=(
            {"env_id": "CueEnv-v0", "total_timesteps": 20_000, "learning_rate": 3e-3, "hidden_size": 32}
            | {"learning_starts": 1000, "burn_in": 10, "seq_length": 20, "state_interval": 10},
            0.9,
            0.7,
        ),
        adam=({"learning_rate": 3e-3}, [3e-3], 1e-8),
        graphs=1,
    ),
    "ppo_device_env": Script(
        env_id="CartPole-v1",
        steps=3_276_800,
        requirements="",
        policy="DiscreteAgent",
        losses=PPO_LOSSES,
        tiny={"env_id": "CartPole-v1", "num_envs": 4, "num_steps": 32, "total_timesteps": 1024},
        saving={"num_steps": 16, "total_timesteps": 16 * 30 * 2, "checkpoint_interval": 320},
        # an episode pays 500 at most, and 22 with random actions
        gate=({"num_envs": 64, "num_steps": 16, "total_timesteps": 250_000}, 140, 180),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=3,  # a step of all envs, the preparation of a rollout, an update
        on_device=True,
        modes=MODES | JAX,
    ),
    "pqn_device_env": Script(
        env_id="CartPole-v1",
        steps=3_276_800,
        requirements="",
        policy="LayerNormQNetwork",
        losses="td_loss q_values",
        tiny={"env_id": "CartPole-v1", "num_envs": 4, "num_steps": 32, "total_timesteps": 1024},
        saving={"num_steps": 16, "total_timesteps": 16 * 30 * 2, "checkpoint_interval": 320},
        # an episode pays 500 at most, and 22 with random actions
        gate=({"num_envs": 32, "total_timesteps": 200_000}, 120, 150),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=3,  # eight steps of all envs, the preparation of a rollout, four updates
        on_device=True,
        modes=MODES | JAX,
    ),
    "ppo_mujoco": Script(
        env_id="HalfCheetah-v5",
        steps=409_600,
        threads=1,
        requirements="warp",
        policy="Agent",
        losses=PPO_LOSSES,
        tiny={"env_id": "Hopper-v5", "num_envs": 4, "num_steps": 32, "total_timesteps": 1024, "num_minibatches": 4}
        | {"update_epochs": 2},
        saving={"num_steps": 16, "total_timesteps": 16 * 30 * 2, "checkpoint_interval": 320},
        # an episode pays 15 with an untrained policy
        gate=({"env_id": "Hopper-v5", "num_envs": 16, "total_timesteps": 65_536, "learning_rate": 3e-3}, 200, 300),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=3,  # a step of all worlds, the preparation of a rollout, an update
        on_device=True,
        peers=peers.WORLDS_PPO,
    ),
    "td3_mujoco": Script(
        env_id="HalfCheetah-v5",
        steps=64_000,
        requirements="warp",
        policy="Actor",
        losses=f"{CRITIC_LOSSES} actor_loss",
        tiny={"env_id": "Hopper-v5", "num_envs": 4, "total_timesteps": 1024, "learning_starts": 928, "batch_size": 32}
        | {"buffer_size": 150, "num_updates": 4, "num_steps": 3},
        saving={"total_timesteps": 620, "learning_starts": 340, "checkpoint_interval": 200},
        adam=({"learning_rate": 3e-3}, [3e-3, 3e-3], 1e-8),
        graphs=2,  # a step of all worlds, and updates of the critics and the actor
        on_device=True,
    ),
    "a2c_device_env": Script(
        env_id="CartPole-v1",
        steps=8_192_000,
        requirements="",
        policy="DiscreteAgent",
        losses="policy_loss value_loss entropy explained_variance",
        tiny={"env_id": "CartPole-v1", "num_envs": 4, "num_steps": 32, "total_timesteps": 1024},
        saving={"num_steps": 4, "total_timesteps": 4 * 30 * 2, "checkpoint_interval": 80},
        # an episode pays 500 at most, and 22 with random actions
        gate=({"num_envs": 32, "total_timesteps": 250_000, "learning_rate": 3e-3, "ent_coef": 0.01}, 60, 100),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=1,  # an iteration
        on_device=True,
        modes=MODES | JAX,
    ),
    "ppo_atari_envpool": Script(
        env_id="Breakout-v5",
        steps=16_384,
        requirements="atari",
        policy="AtariAgent",
        losses=PPO_LOSSES,
        tiny=ATARI,
        saving={"num_steps": 16, "total_timesteps": 16 * 6 * 2, "checkpoint_interval": 64},
        # on a screen of four quadrants: an episode pays 20 at most, and 5 with random actions
        gate=({"total_timesteps": 6_144, "num_steps": 64, "learning_rate": 5e-4}, 9, 12),
        adam=({"learning_rate": 3e-3, "anneal_lr": False}, [3e-3], 1e-5),
        graphs=2,
        modes=MODES | BF16 | GROUPS,  # neither Stable-Baselines3 nor SBX steps EnvPool
    ),
    "ppo_atari_ray": Script(
        env_id="Breakout-v5",
        steps=16_384,
        requirements="ray-atari",
        policy="AtariAgent",
        losses=f"{PPO_LOSSES} ratio ratio_clipfrac played_approx_kl",
        tiny={"env_id": "Breakout-v5", "num_workers": 1, "envs_per_worker": 2, "num_steps": 16, "update_epochs": 2}
        | {"total_timesteps": 256},
        saving={"total_timesteps": 16 * 6 * 2, "checkpoint_interval": 64},
        graphs=1,
        slices=1,
    ),
    "ppo_atari_multigpu": Script(
        env_id="Breakout-v5",
        steps=16_384,
        threads=1,
        requirements="atari",
        policy="AtariAgent",
        losses=PPO_LOSSES,
        tiny=ATARI,
        modes=RANKS,
    ),
}


def row(script: str) -> Script:
    """The row of a file, which may be a twin."""
    return CATALOG[script.removesuffix(TWIN)]
