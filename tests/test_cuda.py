"""What only a GPU can prove about graphs and compilation; each test runs on the CPU too, where it proves less."""

import contextlib

import numpy as np
import pytest
import torch
from conftest import ScriptedEnv, largest_difference, load, train
from tensordict.nn import CudaGraphModule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
MODES = {"twin": {}, "cudagraphs": {"cudagraphs": True}, "compile+cudagraphs": {"compile": True, "cudagraphs": True}}
TWIN = "ppo_continuous_action_torchcompile"
SMALL = {"env_id": "Pendulum-v1", "num_steps": 128, "num_minibatches": 4, "update_epochs": 5, "total_timesteps": 1024}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns_the_same(monkeypatch, mode, device):
    """8 iterations of 5 epochs: graphs are captured in the first, so stale weights or rates would show."""
    eager = train(monkeypatch, "ppo_continuous_action", **SMALL, device=device)
    run = train(monkeypatch, TWIN, **SMALL, **MODES[mode], device=device)
    assert largest_difference(eager, run) < 5e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_64_steps_of_the_policy_give_64_actions_of_the_right_spread(monkeypatch, mode, device):
    monkeypatch.setattr(ScriptedEnv, "action_space", type(ScriptedEnv.action_space)(-np.inf, np.inf, (2,)))
    ScriptedEnv.actions.clear()
    problem = {"env_id": "ScriptedEnv-v0", "num_steps": 128, "num_minibatches": 4, "total_timesteps": 128}
    train(monkeypatch, TWIN, **problem, learning_rate=0.0, **MODES[mode], device=device)
    actions = np.array(ScriptedEnv.actions)[:64]
    assert len(np.unique(actions, axis=0)) == 64
    assert ((actions.std(0) > 0.75) & (actions.std(0) < 1.3)).all()
    assert abs(np.corrcoef(actions[1:, 0], actions[:-1, 0])[0, 1]) < 0.4  # no step repeats the noise of the one before


def update_on(device: str, compiled: bool):
    """ppo_update on a random batch of 256 rows, as a function of the row numbers, and the parameters it changes."""
    script = load(TWIN)
    torch.manual_seed(0)
    agent = script.Agent(5, 2).to(device).requires_grad_(False)
    shapes = {name: p.shape for name, p in agent.named_parameters()}
    flat = torch.nn.utils.parameters_to_vector(agent.parameters())
    torch.nn.utils.vector_to_parameters(flat, agent.parameters())
    adam_state = [torch.zeros_like(flat)], [torch.zeros_like(flat)], torch.zeros((), device=device)
    batch = {name: torch.randn(256, device=device) for name in ("logprob", "value", "advantage", "return")}
    batch |= {"obs": torch.randn(256, 5, device=device), "action": torch.randn(256, 2, device=device)}
    batch["valid"] = torch.ones(256, device=device)
    lr, args = torch.full((), 1e-3, device=device), script.Args()
    update = torch.compile(script.ppo_update, fullgraph=True) if compiled else script.ppo_update
    return (lambda idx: update(agent, shapes, flat, adam_state, lr, batch, idx, args)), flat, agent


@contextlib.contextmanager
def no_synchronisation(device: str):
    """Raises at the first operation that makes the host wait for the GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_update_never_makes_the_host_wait(device, compiled):
    update, flat, agent = update_on(device, compiled)
    idx, before = torch.arange(64, device=device), flat.clone()
    for _ in range(3):
        update(idx)
    with no_synchronisation(device):
        update(idx)
    assert not torch.equal(flat, before)
    assert torch.equal(flat, torch.nn.utils.parameters_to_vector(agent.parameters()))  # still views of the vector


@pytest.mark.filterwarnings("ignore:This module is instantiated on a machine without CUDA")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_replay_leaves_the_outputs_of_the_one_before_alone(device, compiled):
    update, flat, _ = update_on(device, compiled)
    reference_update, reference, _ = update_on(device, compiled=False)
    update, kept = CudaGraphModule(update, warmup=3), []
    for i in range(10):
        idx = torch.arange(i, i + 64, device=device)
        losses = update(idx)
        kept.append((losses, {name: loss.clone() for name, loss in losses.items()}))
        reference_update(idx)
    assert all(torch.equal(losses[name], copy[name]) for losses, copy in kept for name in copy)
    assert len({losses["value_loss"].item() for losses, _ in kept}) == 10
    torch.testing.assert_close(flat, reference, rtol=1e-3, atol=2e-5)
