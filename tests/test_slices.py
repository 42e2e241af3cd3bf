"""Replay of slices: where they lie, the memory they start from, and what is learned from them."""

import numpy as np
import pytest
import torch
from conftest import SLICED, ScriptedEnv, load, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_memory import FAULTS

PROBLEM = {"env_id": "DiscreteScriptedEnv-v0", "num_envs": 2, "train_frequency": 4, "learning_starts": 40}
PROBLEM |= {"learning_rate": 0.0, "total_timesteps": 200, "batch_size": 32}
PROBLEM |= {"burn_in": 4, "seq_length": 8, "state_interval": 4, "hidden_size": 16}


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.parametrize("newest", [*range(11, 40), 1000])
def test_slices_lie_between_the_oldest_row_and_the_newest(name, newest):
    """A ring of 26 rows and 3 envs, filled as train() fills it. Slices of 12 rows start at multiples of 4."""
    script = load(name)
    args = script.Args(burn_in=4, seq_length=8, state_interval=4, batch_size=3000)
    ring = torch.full((26, 3, 2), -1.0)
    states = torch.full((26 // 4 + 1, 3, 2), -1.0)
    for t in range(newest + 1):
        ring[t % 26] = torch.tensor([[t, i] for i in range(3)])
        if t % 4 == 0:
            states[t // 4 % len(states)] = torch.tensor([[t, i] for i in range(3)])
    torch.manual_seed(newest)
    slices, state = script.sample_slices(ring, states, torch.tensor(newest), args)
    assert slices.shape == (12, 3000, 2) and torch.equal(slices[0], state)
    assert (slices.diff(dim=0) == torch.tensor([1.0, 0.0])).all()
    starts, counts = state.unique(dim=0, return_counts=True)
    oldest = max(newest - 25, 0)
    possible = [[t, i] for t in range(0, newest + 1, 4) for i in range(3) if oldest <= t <= newest - 11]
    assert starts.tolist() == possible
    mean = 3000 / len(possible)
    assert counts.min() > mean - 6 * mean**0.5 and counts.max() < mean + 6 * mean**0.5


def history(monkeypatch, name: str, **flags) -> tuple:
    """A run of a network that never changes: what its loss was given, all of its rows, and the values by row.

    The values are computed step by step from the first row on; the memory that enters each row is given, too.
    """
    script = load(name)
    rings, draws, losses = [], [], []
    sample_slices, td_loss = script.sample_slices, script.td_loss

    def spied_slices(*args):
        rings.append(args[0])
        draws.append(sample_slices(*args))
        return draws[-1]

    def spied_loss(*args):
        losses.append([x.detach().clone() for x in args])
        return td_loss(*args)

    ScriptedEnv.actions.clear()
    with monkeypatch.context() as patch:
        patch.setattr(script, "sample_slices", spied_slices)
        patch.setattr(script, "td_loss", spied_loss)
        run = train(patch, name, **PROBLEM | flags)
    network = load("dqn_lru").LRUQNetwork(3 + 3, 3, 16)
    network.load_state_dict(run.parameters)
    rows = rings[0]
    memory = [torch.zeros(2, 32)]
    values = []
    for row in rows:
        with torch.no_grad():
            q, state = network(row[None, :, :-3], memory[-1])
        values.append(q[0])
        memory.append(state)
    return draws, losses, rows, torch.stack(values), torch.stack(memory)


def found(slices: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Times (T, B) and envs (B,) of slices, whose observations are different ones in each row of an env."""
    i = slices[0, :, 0].long()
    same = (rows[:, i, :3] == slices[0, :, :3]).all(-1)  # (time, B)
    assert (same.sum(0) == 1).all()
    return same.int().argmax(0) + torch.arange(len(slices))[:, None], i


@pytest.mark.parametrize("name", SLICED)
@pytest.mark.parametrize("buffer_size", [200, 40])  # with 40, the ring wraps: 21 rows
def test_what_is_learned_from_is_what_happened_with_the_memory_of_then(monkeypatch, name, buffer_size):
    _, _, rows, values, memory = history(monkeypatch, name, buffer_size=200)
    draws, losses, *_ = history(monkeypatch, name, buffer_size=buffer_size)
    assert len(draws) == len(losses) > 20
    ended = set()
    for (slices, state), (q, _, weight) in zip(draws, losses):
        t, i = found(slices, rows)
        assert torch.equal(slices, rows[t, i])
        torch.testing.assert_close(state, memory[t[0], i], rtol=1e-5, atol=1e-6)
        after = t[5:]  # the steps that lead to these rows are learned from
        action = rows[after, i, 3:6]
        expected = (values[after - 1, i] * action).sum(-1)
        torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-5)
        valid = rows[after, i, -1]
        torch.testing.assert_close(weight, valid / valid.sum())
        assert torch.equal(action.sum(-1), valid)
        ended |= {len(slices) - 1 - k for k in range(12) if (slices[k, :, -1] == 0).any()}
    assert ended >= set(range(7))  # episodes end at every place of a slice


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SLICED)
def test_the_values_show_a_planted_fault(monkeypatch, name, fault):
    """As above: a reset at the wrong row, or a slice that starts from nothing, gives other values."""
    script = load(name)
    recurrence = "lru_scan" if hasattr(script, "lru_scan") else "lru"
    original = getattr(script, recurrence)

    def faulty(*inputs):
        *others, keep, state = inputs
        if len(keep) > 1:  # not as it acts
            keep, state = FAULTS[fault](keep, state)
        return original(*others, keep, state)

    monkeypatch.setattr(script, recurrence, faulty)
    draws, losses, rows, values, _ = history(monkeypatch, name, buffer_size=200)
    errors = []
    for (slices, _), (q, _, weight) in zip(draws, losses):
        t, i = found(slices, rows)
        expected = (values[t[4:-1], i] * rows[t[5:], i, 3:6]).sum(-1)
        errors.append(((q - expected).abs() * (weight > 0)).max().item())
    assert max(errors) > 1e-3


@pytest.mark.parametrize("name", SLICED)
def test_the_target_is_the_reward_and_the_old_value_of_the_action_that_is_best_now(monkeypatch, name):
    """With values that are three numbers, whatever is observed. The target network keeps the first ones.

    Each network runs its own memory up to date, the target network first.
    """
    script, agents, seen, runs = load(name), [], [], []
    first = torch.tensor([1.0, 0.5, 0.25])

    class ThreeNumbers(script.LRUQNetwork):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            agents.append(self)
            with torch.no_grad():
                self.q.bias.copy_(first)

        def forward(self, inputs, state):
            q, last_state = super().forward(inputs, state)
            if len(inputs) > 1:  # not as it acts
                runs.append((self is agents[0], len(inputs), state, last_state))
            return 0 * q + self.q.bias, last_state

    td_target, td_loss = script.td_target, script.td_loss

    def spied_target(batch, next_value, gamma):
        best = agents[0].q.bias.argmax().item()
        seen.append(best)
        assert (next_value == first[best]).all()
        return td_target(batch, next_value, gamma)

    def spied_loss(q, target, weight):
        batch = batches.pop()
        (*_, start, middle), (*_, target_start, _), (*_, same_start, own_middle), (*_, own_start, _) = runs
        assert start is same_start and target_start is middle and own_start is own_middle
        assert [run[:2] for run in runs] == [(False, 4), (False, 8), (True, 4), (True, 8)]
        runs.clear()
        expected = batch[5:, :, -3] + 0.25 * (1 - batch[5:, :, -2]) * first[seen[-1]]
        torch.testing.assert_close(target, expected)
        return td_loss(q, target, weight)

    sample_slices, batches = script.sample_slices, []

    def spied_slices(*args):
        slices, state = sample_slices(*args)
        batches.append(slices)
        return slices, state

    monkeypatch.setattr(script, "LRUQNetwork", ThreeNumbers)
    monkeypatch.setattr(script, "sample_slices", spied_slices)
    monkeypatch.setattr(script, "td_target", spied_target)
    monkeypatch.setattr(script, "td_loss", spied_loss)
    flags = {"learning_rate": 0.1, "gamma": 0.25, "target_network_frequency": 10**6, "start_e": 0.5, "end_e": 0.5}
    script.train(script.Args(**PROBLEM | {"env_id": "DiscreteDictEnv-v0"} | flags, cuda=False, save_model=False))
    assert len(seen) > 20 and len(set(seen)) > 1 and not batches


@pytest.mark.parametrize("name", SLICED)
def test_epsilon_falls_in_a_line_and_exploring_means_random_actions(monkeypatch, name):
    run = train(monkeypatch, name, **tiny(name), exploration_fraction=0.75)
    recorded = [e.value for e in EventAccumulator(str(run.run_dir)).Reload().Scalars("charts/epsilon")]
    expected = [1 - 0.95 * min(step / (0.75 * 1024), 1) for step in (499, 999, 1023)]
    assert recorded == pytest.approx(expected)
    _, _, rows, values, _ = history(monkeypatch, name, buffer_size=200, start_e=0.0, end_e=0.0)
    taken = rows[1:101, :, 3:6]
    best = torch.nn.functional.one_hot(values[:100].argmax(-1), 3)
    assert torch.equal(taken, best * rows[1:101, :, -1:])  # no action leads to the first row of an episode
    _, _, rows, _, _ = history(monkeypatch, name, buffer_size=200, start_e=1.0, end_e=1.0)
    counts = rows[1:101, :, 3:6].sum((0, 1))
    assert counts.min() > counts.sum() / 4.5
    assert np.bincount(ScriptedEnv.actions)[1:].tolist() == counts.tolist()
