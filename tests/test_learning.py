"""Small problems that each script must solve. A twin computes what the plain file does, which test_twins.py proves."""

import numpy as np
import pytest
from catalog import CATALOG
from conftest import ATARI, QuadrantPool, load, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MODES = {
    "eager": ("", {}),
    "compile on cuda": ("_torchcompile", {"compile": True, "cuda": True}),
    "cudagraphs": ("_torchcompile", {"cudagraphs": True, "cuda": True}),
    "compile+cudagraphs": ("_torchcompile", {"compile": True, "cudagraphs": True, "cuda": True}),
}
GATES = [name for name in CATALOG if CATALOG[name].gate]
# which learn much as another does, or as the robot of test_mujoco.py, or find the best action in test_faults.py
LONG = ("sac_continuous_action", "td3_continuous_action", "ppo_atari_envpool", "ppo_lru")
LONG += ("a2c_device_env", "ppo_device_env", "ppo_mujoco", "pqn_device_env")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.cuda] * ("cuda" in m)) for m in MODES])
@pytest.mark.parametrize("script", [pytest.param(s, marks=[pytest.mark.long] * (s in LONG)) for s in GATES])
def test_a_small_problem_is_solved(monkeypatch, script, mode):
    suffix, flags = MODES[mode]
    problem, first, last = CATALOG[script].gate
    if script in ATARI:
        monkeypatch.setattr(load(script + suffix), "make_envs", QuadrantPool)
    run = train(monkeypatch, script + suffix, seed=1, **problem, **flags)
    returns = [e.value for e in EventAccumulator(str(run.run_dir)).Reload().Scalars("charts/episodic_return")]
    assert np.mean(returns[:3]) < first
    assert np.mean(returns[-max(10, len(returns) // 20) :]) > last
