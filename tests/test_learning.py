"""Small problems that each script must solve. A twin computes what the plain file does, which test_twins.py proves."""

import numpy as np
import pytest
from conftest import ATARI, QuadrantPool, load, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MODES = {
    "eager": ("", {}),
    "compile": ("_torchcompile", {"compile": True}),
    "compile on cuda": ("_torchcompile", {"compile": True, "device": "cuda"}),
    "cudagraphs": ("_torchcompile", {"cudagraphs": True, "device": "cuda"}),
    "compile+cudagraphs": ("_torchcompile", {"compile": True, "cudagraphs": True, "device": "cuda"}),
}
PENDULUM = {"env_id": "Pendulum-v1", "total_timesteps": 4_500, "learning_starts": 1000, "batch_size": 64}
PENDULUM |= {"gamma": 0.95, "tau": 0.02}
GATES = {  # script -> problem, most that the first 3 episodes may pay, least that the last 10 must
    # 1000 is the most an episode can pay, an untrained policy gets about 10
    "ppo_continuous_action": (
        {"env_id": "InvertedPendulum-v5", "total_timesteps": 24_576, "num_steps": 1024, "learning_rate": 1e-3}, 50, 900
    ),
    # a policy that keeps the pendulum up gets about -150 (after a bad start -380), an untrained one -1200
    "td3_continuous_action": (PENDULUM | {"learning_rate": 2e-3}, -700, -450),
    "sac_continuous_action": (PENDULUM | {"policy_lr": 2e-3, "q_lr": 2e-3}, -700, -450),
    # 500 is the most, a random policy gets about 22
    "dqn": ({"total_timesteps": 40_000, "learning_rate": 1e-3, "learning_starts": 1000}, 60, 150),
    # 20 is the most, a random policy gets 5
    "ppo_atari_envpool": ({"total_timesteps": 6_144, "num_steps": 64, "learning_rate": 5e-4}, 9, 12),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.cuda] * ("cuda" in m)) for m in MODES])
@pytest.mark.parametrize("script", GATES)
def test_a_small_problem_is_solved(monkeypatch, script, mode):
    suffix, flags = MODES[mode]
    if mode == "compile" and script not in ("ppo_continuous_action", "dqn"):
        pytest.skip("compiled, it takes a minute and computes the same")
    problem, first, last = GATES[script]
    if script in ATARI:
        monkeypatch.setattr(load(script + suffix), "make_envs", QuadrantPool)
    run = train(monkeypatch, script + suffix, seed=1, **problem, **flags)
    returns = [e.value for e in EventAccumulator(str(run.run_dir)).Reload().Scalars("charts/episodic_return")]
    assert np.mean(returns[:3]) < first
    assert np.mean(returns[-10:]) > last
