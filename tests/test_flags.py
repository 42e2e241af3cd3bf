"""Flags are CleanRL's, names and defaults, but for the departures that docs/faq.md lists."""

import json
from dataclasses import MISSING, fields

import pytest
from catalog import row
from conftest import ALL_SCRIPTS, ROOT, load

CLEANRL = json.loads((ROOT / "tests" / "cleanrl_flags.json").read_text())
ABSENT = {"capture_video", "upload_model", "hf_entity"}  # of CleanRL, without a counterpart here
OF_PPO = {"num_minibatches", "update_epochs", "clip_coef", "clip_vloss"}  # A2C takes one step on a rollout
COMPUTED = {"batch_size", "minibatch_size", "num_iterations"}  # by CleanRL at run time; PPO has them as locals
COUNTERPARTS = {
    "ppo_lru": "ppo_atari_lstm",
    "ppo_rnn": "ppo_atari_lstm",
    "dqn_lru": "dqn",
    "ppo_continuous_action_ray": "ppo_continuous_action",
    "ppo_atari_ray": "ppo_atari_envpool",
    "ppo_device_env": "ppo_atari_envpool",
    "a2c_device_env": "ppo_atari_envpool",
    "ppo_mujoco": "ppo_continuous_action",
    "td3_mujoco": "td3_continuous_action",
    "pqn_device_env": "pqn",
}  # of CleanRL's, where its name is another
OF_MEMORY = {"env_id": "popgym:popgym-RepeatPreviousEasy-v0", "total_timesteps": 500_000, "learning_rate": 1e-3}
OF_MEMORY |= {"num_envs": 32, "clip_coef": 0.2}
OTHER_DEFAULTS = {  # script -> flag -> our default
    "td3_continuous_action": {"env_id": "HalfCheetah-v4"},
    "sac_continuous_action": {"env_id": "HalfCheetah-v4"},
    "ppo_atari_multigpu": {"env_id": "Breakout-v5", "backend": None},
    "ppo_continuous_action_ray": {"num_steps": 128},
    "ppo_atari_ray": {"num_steps": 64},
    "ppo_lru": OF_MEMORY,
    "ppo_rnn": OF_MEMORY | {"learning_rate": 3e-3},
    "ppo_device_env": {"env_id": "CartPole-v1", "total_timesteps": 2_000_000, "learning_rate": 2.5e-3, "num_envs": 512}
    | {"num_steps": 32, "clip_coef": 0.2},
    "a2c_device_env": {"env_id": "CartPole-v1", "total_timesteps": 5_000_000, "learning_rate": 5e-3, "num_envs": 128}
    | {"num_steps": 8, "norm_adv": False, "ent_coef": 0.0},
    "ppo_mujoco": {"env_id": "HalfCheetah-v5", "total_timesteps": 20_000_000, "learning_rate": 1e-3, "num_envs": None}
    | {"num_steps": 32, "num_minibatches": 4, "update_epochs": 5, "clip_vloss": False},
    "td3_mujoco": {"env_id": "HalfCheetah-v5", "num_envs": None, "buffer_size": 10_000, "batch_size": None}
    | {"learning_starts": 10_000, "learning_rate": 1e-3, "tau": 0.1},
    "pqn_device_env": {"total_timesteps": 2_000_000, "learning_rate": 1e-3, "num_envs": 128, "num_steps": 32}
    | {"update_epochs": 2, "exploration_fraction": 0.2},
    "dqn_lru": {"env_id": "popgym:popgym-PositionOnlyCartPoleEasy-v0", "total_timesteps": 300_000, "num_envs": 8}
    | {"learning_rate": 1e-3, "buffer_size": 100_000, "batch_size": 32, "train_frequency": 40},
}
OF_RANKS = {"device_ids", "world_size", "num_envs", "local_batch_size", "local_minibatch_size"}  # torchrun says them
OURS = {"tf32", "checkpoint_interval", "resume"}  # in every script
OF_WORKERS = {"num_workers", "envs_per_worker", "ray_address", "worker_timeout"}
OF_SLICES = {"hidden_size", "state_interval", "burn_in", "seq_length"}
OF_FAST_TD3 = {"weight_decay", "num_updates", "num_steps", "num_atoms", "v_min", "v_max", "std_min", "std_max"}
OURS_OF = {
    "_torchcompile": {"compile", "cudagraphs"},
    "ppo_mujoco": {"physics", "nconmax", "njmax", "graph_conditional"},
    "ppo_mujoco_torchcompile": {"physics", "nconmax", "njmax", "graph_conditional", "cut_graph"},
    "td3_mujoco": {"physics", "nconmax", "njmax", "graph_conditional"} | OF_FAST_TD3,
    "td3_mujoco_torchcompile": {"physics", "nconmax", "njmax", "graph_conditional", "cut_graph"} | OF_FAST_TD3,
    "ppo_lru": {"hidden_size", "reward_scale"},
    "ppo_lru_torchcompile": {"hidden_size", "reward_scale"},
    "ppo_rnn": {"cell", "hidden_size", "reward_scale"},
    "ppo_rnn_torchcompile": {"cell", "hidden_size", "reward_scale"},
    "dqn_lru": OF_SLICES,
    "dqn_lru_torchcompile": OF_SLICES,
    "ppo_atari_envpool_torchcompile": {"env_groups", "bf16"},
    "td3_continuous_action_torchcompile": {"bf16"},
    "sac_continuous_action_torchcompile": {"bf16"},
    "ppo_continuous_action_ray": OF_WORKERS | {"act_on", "env_groups"},
    "ppo_continuous_action_ray_torchcompile": OF_WORKERS | {"act_on", "env_groups"},
    "ppo_atari_ray": OF_WORKERS | {"worker_threads", "lag", "first_come", "max_lag", "rho_clip", "c_clip"},
    "ppo_atari_ray_torchcompile": OF_WORKERS | {"worker_threads", "lag", "first_come", "max_lag", "rho_clip", "c_clip"},
    "ppo_atari_multigpu": {"timeout", "compile", "ddp", "cudagraphs"},
}


def number(value):
    """CleanRL writes some counts as floats, or as int(1e6)."""
    if isinstance(value, str) and value.startswith("int("):
        return int(float(value[4:-1]))
    return value


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_names_and_defaults_are_cleanrls(name):
    base = name.removesuffix("_torchcompile")
    theirs = {flag: number(value) for flag, value in CLEANRL[COUNTERPARTS.get(base, base)].items()}
    ours = {field.name: field.default for field in fields(load(name).Args)}
    assert MISSING not in ours.values()
    absent = ABSENT | ({"target_kl"} if base in COUNTERPARTS else set())
    absent |= COMPUTED if "ppo" in name else COMPUTED | OF_PPO if "a2c" in name else set()
    absent |= {"exploration_noise"} if base == "td3_mujoco" else set()  # --std-min and --std-max in its place
    absent |= OF_RANKS if "multigpu" in name else {"num_envs"} if "_ray" in name else set()
    assert theirs.keys() - ours.keys() <= absent
    added = set().union(*(flags for part, flags in OURS_OF.items() if name.endswith(part)))
    added |= set() if "atari" in name or row(name).on_device else {"env_kwargs"}  # of Gymnasium's envs
    added |= {"async_envs"} if hasattr(load(name), "step_processes") else set()
    assert ours.keys() - theirs.keys() - {"save_model"} == added | OURS
    expected = theirs | {"exp_name": name, "wandb_project_name": "leanrl"} | OTHER_DEFAULTS.get(base, {})
    for flag in ours.keys() & theirs.keys() - {"save_model"}:
        assert ours[flag] == expected[flag], f"--{flag.replace('_', '-')}"


def test_the_faq_lists_the_departures():
    section = (
        (ROOT / "docs" / "faq.md").read_text().split("\n## Which flags differ from CleanRL's?\n")[1].split("\n## ")[0]
    )
    listed = ABSENT | OURS | {"no_save_model", "wandb_project_name", "env_id", "device_ids", "backend", "target_kl"}
    for flag in listed | {"num_workers", "envs_per_worker", "num_steps", "norm_adv", "ent_coef", "clip_coef"}:
        assert f"`--{flag.replace('_', '-')}`" in section, flag
    for script in set(OTHER_DEFAULTS) - {"td3_continuous_action", "sac_continuous_action"}:
        assert f"`{script}`" in section or "_ray" in script, script
