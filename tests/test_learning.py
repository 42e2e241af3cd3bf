"""Small problems that each script must solve, in each mode."""

import numpy as np
import pytest
from conftest import train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MODES = {
    "eager": ("ppo_continuous_action", {}),
    "twin": ("ppo_continuous_action_torchcompile", {}),
    "compile": ("ppo_continuous_action_torchcompile", {"compile": True}),
    "cudagraphs": ("ppo_continuous_action_torchcompile", {"cudagraphs": True, "device": "cuda"}),
    "compile+cudagraphs": (
        "ppo_continuous_action_torchcompile",
        {"compile": True, "cudagraphs": True, "device": "cuda"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.cuda] * ("cuda" in m)) for m in MODES])
def test_ppo_balances_the_pendulum(monkeypatch, mode):
    """24,576 steps; 1000 is the most an episode can pay, an untrained policy gets about 10."""
    name, flags = MODES[mode]
    problem = {"env_id": "InvertedPendulum-v5", "total_timesteps": 24_576, "num_steps": 1024, "learning_rate": 1e-3}
    run = train(monkeypatch, name, seed=1, **problem, **flags)
    returns = [e.value for e in EventAccumulator(str(run.run_dir)).Reload().Scalars("charts/episodic_return")]
    assert np.mean(returns[:10]) < 50
    assert np.mean(returns[-10:]) > 900
