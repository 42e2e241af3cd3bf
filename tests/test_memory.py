"""Recurrent policies: the memory is that of the episode, in a rollout as in a minibatch, and it is of use."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
from catalog import CATALOG
from conftest import MEMORY, load, train
from test_scripted_env import DONE, OBS, REWARD, TERMINATED, VALID
from torch._library.custom_ops import OPDEF_TO_LIB
from torch.func import grad_and_value

SMALL = {"hidden_size": 16, "num_minibatches": 1, "update_epochs": 1, "num_envs": 1}
RESETS = {"env_id": "DiscreteScriptedEnv-v0", "num_envs": 4, "num_steps": 25, "num_minibatches": 2}
RESETS |= {"hidden_size": 16, "learning_rate": 0.1, "update_epochs": 2, "total_timesteps": 4 * 25 * 3}


def spied(monkeypatch, name: str, function: str) -> list[tuple]:
    """Calls of one of a script's functions: (arguments, result), of clones."""
    script, calls = load(name), []
    original = getattr(script, function)

    def clone(x):
        return x.detach().clone() if isinstance(x, torch.Tensor) else x

    def spy(*args):
        kept = [{k: clone(v) for k, v in x.items()} if isinstance(x, dict) else clone(x) for x in args]
        result = original(*args)
        calls.append((kept, clone(result)))
        return result

    monkeypatch.setattr(script, function, spy)
    return calls


def largest_ratios(monkeypatch, name: str, fault=None) -> list[float]:
    """How far the ratio of any valid row is from 1, at the first update of each rollout.

    A fault changes what the update gets: the factors that keep the memory, and the state at the start of the rollout.
    """
    script = load(name)
    recurrence = next(function for function in ("recur", "lru_scan", "lru") if hasattr(script, function))
    original = getattr(script, recurrence)

    def faulty(*inputs):
        *others, keep, state = inputs
        if fault and len(keep) > 1:
            keep, state = fault(keep, state)
        return original(*others, keep, state)

    with monkeypatch.context() as patch:
        patch.setattr(script, recurrence, faulty)
        calls = spied(patch, name, "ppo_loss")
        train(patch, name, **RESETS)
    first = calls[:: RESETS["num_minibatches"] * RESETS["update_epochs"]]
    assert len(first) == 3
    return [
        ((logprob - batch["logprob"]).exp() - 1).abs().mul(batch["valid"]).max().item()
        for (logprob, _, _, batch, _), _ in first
    ]


FAULTS = {
    "a reset that comes late": lambda keep, state: (torch.cat([keep[:1], keep[:-1]]), state),
    "a reset that comes early": lambda keep, state: (torch.cat([keep[1:], keep[-1:]]), state),
    "no reset": lambda keep, state: (torch.ones_like(keep), state),
    "a start from nothing": lambda keep, state: (keep, torch.zeros_like(state)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_the_first_update_meets_the_policy_that_has_acted(monkeypatch, name):
    assert max(largest_ratios(monkeypatch, name)) < 1e-5


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", MEMORY)
def test_the_ratio_shows_a_planted_fault(monkeypatch, name, fault):
    assert max(largest_ratios(monkeypatch, name, FAULTS[fault])) > 1e-4


def new_agent(name: str, input_dim: int, num_actions: int, *cell: str) -> tuple[torch.nn.Module, int]:
    """An agent of 16 units as the script makes it, and the size of its state."""
    cell = cell or (("gru",) if "rnn" in name else ())
    agent = getattr(load(name), CATALOG[name.removesuffix("_torchcompile")].policy)(input_dim, num_actions, 16, *cell)
    return agent, getattr(agent, "state_dim", 2 * 16)


def problem(T: int, N: int = 3, H: int = 5) -> list[torch.Tensor]:
    """Random arguments of lru(), in float64; with resets in the first step, and in two that follow each other."""
    generator = torch.Generator().manual_seed(T)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    keep = (draw(T, N, 1) > -1).double()
    keep[0, 0] = keep[T // 2 : T // 2 + 2, 1] = 0
    return [-draw(H).abs(), draw(H), draw(T, N, 2 * H), keep, draw(N, 2 * H)]


@pytest.mark.parametrize("T", [1, 2, 7, 12, 16, 128])
def test_the_scan_computes_what_the_loop_computes(T):
    script = load("ppo_lru_torchcompile")
    weight = torch.randn(T, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outcomes = []
    for function in (script.lru, script.lru_scan):
        inputs = [x.requires_grad_(i != 3) for i, x in enumerate(problem(T))]
        states = function(*inputs)
        gradients = torch.autograd.grad((states * weight).sum(), [x for x in inputs if x.requires_grad])
        outcomes.append([states, *gradients])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_loop_is_the_equation():
    log_radius, angle, drive, keep, h = problem(7)
    eigenvalue = np.exp(log_radius.numpy() + 1j * angle.numpy())
    h = h[:, :5].numpy() + 1j * h[:, 5:].numpy()
    states = load("ppo_lru").lru(*problem(7))
    for t in range(7):
        h = eigenvalue * keep[t].numpy() * h + drive[t, :, :5].numpy() + 1j * drive[t, :, 5:].numpy()
        np.testing.assert_allclose(states[t], np.concatenate([h.real, h.imag], 1), rtol=1e-12)


@pytest.mark.parametrize("function", ["lru", "lru_scan"])
def test_nothing_leaks_from_an_episode_into_the_next(function):
    """Neither numbers, to the bit, nor gradients."""
    function = getattr(load("ppo_lru_torchcompile"), function)
    *numbers, drive, keep, state = problem(12)
    keep[:] = 1
    keep[5] = 0  # an episode starts
    drive.requires_grad_()
    state.requires_grad_()
    states = function(*numbers, drive, keep, state)
    other = drive.detach().clone()
    other[:5] += 100
    assert torch.equal(function(*numbers, other, keep, state + 100)[5:], states[5:])
    gradient, gradient_of_state = torch.autograd.grad(states[5:].sum(), [drive, state])
    assert (gradient[:5] == 0).all() and (gradient[5:] != 0).all() and (gradient_of_state == 0).all()


CELLS = {"gru": (3, 1, torch.nn.GRU), "lstm": (4, 2, torch.nn.LSTM)}  # gates and parts of the state, in units


def sequence(cell: str, T: int, N: int = 3, H: int = 5) -> list[torch.Tensor]:
    """Random arguments of recur(), in float64, with resets."""
    gates, parts, _ = CELLS[cell]
    _, _, _, keep, _ = problem(T, N)
    generator = torch.Generator().manual_seed(T)
    shapes = (gates * H, H), (T, N, gates * H), (N, parts * H)
    weight, gates_x, state = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return [weight, gates_x, keep, state]


@pytest.mark.parametrize("cell", CELLS)
def test_the_cells_are_pytorchs(cell):
    """Without resets; PyTorch adds the gates of the input, here the input itself, and a bias of the state, here 0."""
    script = load("ppo_rnn")
    weight, gates_x, keep, state = sequence(cell, 7)
    module = CELLS[cell][2](gates_x.shape[-1], 5).double()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
        module.weight_hh_l0.copy_(weight)
        module.weight_ih_l0.copy_(torch.eye(len(weight)))
        first = state[None] if cell == "gru" else tuple(x[None].contiguous() for x in state.chunk(2, -1))
        expected, _ = module(gates_x, first)
    states = script.recur(getattr(script, cell), weight, gates_x, torch.ones_like(keep), state)
    torch.testing.assert_close(states[..., :5], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("C", [1, 4, 7])
def test_the_operator_computes_what_the_loop_computes(C):
    """Value and gradients, of either cell and any number of envs in turn, as by several runs of a process.

    A piece of C steps is compiled once, whatever T is, and so is its gradient.
    """
    script = load("ppo_rnn_torchcompile")
    compiled = []

    def backend(graph, inputs, options=None):
        compiled.append(graph)
        return graph

    for i, (cell, N) in enumerate([("gru", 3), ("lstm", 3), ("gru", 2)]):
        step = getattr(script, cell)
        weight, _, _, state = sequence(cell, 1, N)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
            operator = script.as_operator(step, C, weight, state)
        for T in (C, 2 * C, 3 * C):
            outcomes = []
            for function in (script.recur, operator):
                inputs = sequence(cell, T, N)
                factor = torch.randn(T, *state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

                def loss(weight, gates_x, state, function=function, step=step, keep=inputs[2], factor=factor):
                    states = function(step, weight, gates_x, keep, state)
                    return (states * factor).sum(), states

                grads, (_, states) = grad_and_value(loss, argnums=(0, 1, 2), has_aux=True)(*inputs[:2], inputs[3])
                outcomes.append([states, *grads])
            for a, b in zip(*outcomes, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert len(compiled) == 2 * (i + 1)


def test_an_operator_is_not_compiled_anew_when_an_older_one_is_collected(monkeypatch):
    """PyTorch forgets the name that both have. A second run in a process may lose the first one's at any time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=lambda graph, inputs, options=None: graph))
    script, (weight, gates_x, keep, state) = load("ppo_rnn_torchcompile"), sequence("gru", 2)
    script.as_operator(script.gru, 2, weight, state)
    older = [OPDEF_TO_LIB["leanrl::gru"]]
    operator = script.as_operator(script.gru, 2, weight, state)

    def loss_of(weight):
        return operator(None, 1 * weight, gates_x, keep, state).sum()  # of a tensor that needs a gradient

    run = torch.compile(lambda: grad_and_value(loss_of)(weight), fullgraph=True)
    grad, _ = run()
    older.clear()
    gc.collect()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(run()[0], grad)


@pytest.mark.parametrize("cell", CELLS)
def test_no_cell_leaks_from_an_episode_into_the_next(cell):
    script = load("ppo_rnn")
    weight, gates_x, keep, state = sequence(cell, 12)
    keep[:] = 1
    keep[5] = 0  # an episode starts
    run = partial(script.recur, getattr(script, cell), weight)
    states = run(gates_x.requires_grad_(), keep, state.requires_grad_())
    other = gates_x.detach().clone()
    other[:5] += 100
    assert torch.equal(run(other, keep, state + 100)[5:], states[5:])
    gradient, gradient_of_state = torch.autograd.grad(states[5:].sum(), [gates_x, state])
    assert (gradient[:5] == 0).all() and (gradient_of_state == 0).all()
    assert (gradient[6:] != 0).all()  # gates of a zero state are idle


@pytest.mark.parametrize("name", MEMORY)
def test_transitions_and_advantages_are_those_worked_out_by_hand(monkeypatch, name):
    """The numbers of test_scripted_env.py; V(s) = 100 episode + 10 step. A row holds the previous action, too."""
    script = load(name)
    agent = getattr(script, CATALOG[name.removesuffix("_torchcompile")].policy)
    forward = agent.forward

    def known_value(self, inputs, state):
        logits, value, state = forward(self, inputs, state)
        return logits, value * 0 + 100 * inputs[..., 1] + 10 * inputs[..., 2], state

    monkeypatch.setattr(agent, "forward", known_value)
    gaes = spied(monkeypatch, name, "gae")
    losses = spied(monkeypatch, name, "ppo_loss")
    flags = {
        "num_steps": 5,
        "total_timesteps": 10,
        "gamma": 0.5,
        "gae_lambda": 0.5,
        "learning_rate": 0.0,
        "reward_scale": 1.0,
    }
    train(monkeypatch, name, env_id="DiscreteScriptedEnv-v0", **SMALL, **flags)
    by_hand = [[4, -8, 19.125, -43.5, -38], [-42, -74.75, -179, -88.5, -114]]
    batches = [batch for (_, _, _, batch, _), _ in losses]
    for i, ((reward, _, terminated, done, *_), advantage) in enumerate(gaes):
        assert reward.squeeze(1).tolist() == REWARD[i]
        assert terminated.squeeze(1).tolist() == TERMINATED[i]
        assert done.squeeze(1).tolist() == DONE[i]
        assert advantage.squeeze(1).tolist() == by_hand[i]
        assert batches[i]["inputs"][:, 0, :3].tolist() == OBS[i]
        assert batches[i]["valid"].squeeze(1).tolist() == VALID[i]
    rows = torch.cat([batch["inputs"][:, 0, 3:] for batch in batches])
    actions = torch.cat([batch["action"][:, 0] for batch in batches])
    valid = torch.tensor(sum(VALID, []), dtype=torch.bool)
    expected = torch.nn.functional.one_hot(actions[:-1], 3) * valid[:-1, None]
    assert torch.equal(rows[1:], expected.float()) and not rows[0].any()
    assert len(gaes) == len(batches) == 2


@pytest.mark.parametrize("name", MEMORY)
def test_a_value_knows_its_episode_and_no_other(monkeypatch, name):
    """Through both rollouts, and at its last observation, from which a truncation is bootstrapped."""
    gaes = spied(monkeypatch, name, "gae")
    losses = spied(monkeypatch, name, "ppo_loss")
    run = train(
        monkeypatch, name, env_id="DiscreteScriptedEnv-v0", **SMALL, num_steps=5, total_timesteps=10, learning_rate=0.0
    )
    agent, size = new_agent(name, 3 + 3, 3)
    agent.load_state_dict(run.parameters)
    inputs = torch.cat([batch["inputs"] for (_, _, _, batch, _), _ in losses])
    values = torch.cat([value[:-1, 0] for (_, value, *_), _ in gaes])
    assert torch.allclose(
        gaes[0][0][1][-1], gaes[1][0][1][0], atol=1e-6
    )  # the value after a rollout is the next's first
    starts = [0, 3, 7, 9]  # rows of first observations; the row before shows the last one of the episode before
    for start, end in zip(starts, [*starts[1:], 10]):
        _, expected, _ = agent(inputs[start:end], torch.zeros(1, size))
        torch.testing.assert_close(values[start:end], expected[:, 0].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MEMORY)
def test_an_epoch_meets_each_env_once(monkeypatch, name):
    calls = spied(monkeypatch, name, "ppo_loss")
    train(monkeypatch, name, **RESETS | {"total_timesteps": 4 * 25})
    envs = [batch["inputs"][0, :, 0].tolist() for (_, _, _, batch, _), _ in calls]  # env i observes its number
    assert [sorted(envs[i] + envs[i + 1]) for i in (0, 2)] == [[0, 1, 2, 3]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recurrence"), [("ppo_lru", "lru"), ("ppo_rnn", "recur")])
def test_the_same_agent_without_memory_cannot_solve_the_problem(monkeypatch, name, recurrence):
    """With it, it does: test_learning.py."""
    script = load(name)
    original = getattr(script, recurrence)
    monkeypatch.setattr(script, recurrence, lambda *inputs: original(*inputs[:3], inputs[3] * 0, inputs[4]))
    run = train(monkeypatch, name, seed=1, **CATALOG[name].gate[0])
    assert run.metrics["episodic_return"] < 0.3


@pytest.mark.parametrize(("name", "cell"), [*((name, None) for name in MEMORY), ("ppo_rnn", "lstm")])
def test_an_exported_policy_acts_as_in_training(monkeypatch, name, cell):
    """Row by row, from a memory of zeros: the actions that the agent finds most probable in whole episodes."""
    flags = SMALL | {"num_steps": 32, "total_timesteps": 320, "save_model": True} | ({"cell": cell} if cell else {})
    run = train(monkeypatch, name, env_id="CueEnv-v0", **flags)
    agent, size = new_agent(name, 4 + 2, 2, *([cell] if cell else []))
    agent.load_state_dict(run.parameters)
    policy = torch.export.load(run.run_dir / "policy.pt2").module()
    obs = torch.nn.functional.one_hot(torch.randint(4, (20, 3)), 4).float()
    memory = torch.zeros(3, size + 2)
    previous_action = torch.zeros(3, 2)
    inputs = torch.zeros(0, 3, 6)
    for row in obs:
        inputs = torch.cat([inputs, torch.cat([row, previous_action], -1)[None]])
        action, memory = policy(row, memory)
        logits, _, state = agent(inputs, torch.zeros(3, size))
        assert torch.equal(action, logits[-1].argmax(-1))
        previous_action = torch.nn.functional.one_hot(action, 2).float()
        torch.testing.assert_close(memory, torch.cat([state, previous_action], -1), rtol=1e-4, atol=1e-5)
