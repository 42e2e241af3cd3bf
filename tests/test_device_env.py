"""Envs on the device: equal to Gymnasium's and MinAtar's, and an iteration that never leaves the device."""

import contextlib
import itertools
import re
import sys
import types
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import DEVICE, MUJOCO, Springs, load, train
from one_device import OneDevice
from torch.func import debug_unwrap

EAGER = load("ppo_device_env")
TENSOR_ENVS = [name for name in DEVICE if name not in MUJOCO]  # without a simulator of somebody else


def cartpole_policy(state: torch.Tensor, t: int, rng: np.random.Generator) -> np.ndarray:
    """At random, so that poles fall; later one that holds most of them up to the time limit."""
    if t < 300:
        return rng.integers(2, size=len(state))
    return (state @ torch.tensor([0.05, 0.1, 1.0, 0.5]) > 0).long().numpy()


def test_cartpole_is_gymnasiums():
    """Step by step, from the same states: rounding aside, all is equal for 307,200 steps."""
    theirs = gym.make_vec("CartPole-v1", num_envs=256, vectorization_mode="vector_entry_point")
    assert theirs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    theirs.reset(seed=1)

    def their_state() -> torch.Tensor:
        return torch.tensor(theirs.unwrapped.state.T, dtype=torch.float32)

    envs = EAGER.first_envs(EAGER.CartPole, 256, torch.device("cpu"))
    envs |= {"state": their_state(), "clock": torch.zeros(256, dtype=torch.long), "score": torch.zeros(256)}
    rng = np.random.default_rng(0)
    resets = truncations = 0
    returns, their_returns = torch.zeros(256), np.zeros(256)
    for t in range(1200):
        action = cartpole_policy(envs["state"], t, rng)
        was_done = envs["done"]
        obs, their_reward, their_terminated, their_truncated, _ = theirs.step(action)
        uniform = (their_state() + 0.05) / 0.1  # what makes our reset draw their state
        envs, reward, terminated = EAGER.step_device(EAGER.CartPole, envs, torch.as_tensor(action), uniform)
        torch.testing.assert_close(EAGER.CartPole.observation(envs["state"]), torch.tensor(obs), rtol=0, atol=1e-6)
        np.testing.assert_array_equal(reward, their_reward)
        np.testing.assert_array_equal(terminated, their_terminated)
        np.testing.assert_array_equal(envs["done"] & ~terminated, their_truncated & ~their_terminated)
        envs["state"] = their_state()  # balancing is unstable: a rounding would grow
        their_returns = np.where(was_done, 0, their_returns) + their_reward
        ended = envs["done"]
        returns = torch.where(ended, torch.tensor(their_returns, dtype=torch.float32), returns)
        assert torch.equal(envs["last_return"][returns > 0], returns[returns > 0])
        assert torch.equal(envs["last_length"][returns > 0].float(), returns[returns > 0])
        resets += was_done.sum()
        truncations += (envs["done"] & ~terminated).sum()
    assert resets > 3000 and truncations > 100


class ScriptedRandom:
    """Stands in for MinAtar's generator: gives the numbers that our env is given."""

    uniform = 0.0

    def rand(self):
        return self.uniform

    def randint(self, n):
        return int(self.uniform >= 0.5)


def follow(game) -> int:
    """Stay, left or right: to where the ball is."""
    return 1 if game.ball_x < game.pos else 2 if game.ball_x > game.pos else 0


def test_breakout_is_minatars():
    """Exactly, for 102,400 steps with lost balls, cleared walls and repeated actions."""
    with warnings.catch_warnings(action="ignore"):
        Environment = pytest.importorskip("minatar").Environment
    games = [Environment("breakout") for _ in range(64)]
    numbers = ScriptedRandom()
    for game in games:
        game.random = game.env.random = numbers
        game.reset()
    envs = EAGER.first_envs(EAGER.Breakout, 64, torch.device("cpu"))
    envs |= {"state": EAGER.Breakout.initial(torch.zeros(64, 1)), "clock": torch.zeros(64, dtype=torch.long)}
    rng = np.random.default_rng(0)
    minimal = games[0].minimal_action_set()
    steps = np.zeros(64, int)
    counts = dict.fromkeys(("repeated", "lost", "truncated", "cleared", "broken"), 0)
    for _ in range(1600):
        follows = rng.random(64) < np.linspace(0, 1.5, 64)  # the first game is played at random, the last one well
        action = [follow(game.env) if f else rng.integers(3) for game, f in zip(games, follows)]
        uniform = torch.tensor(rng.random((64, 1)), dtype=torch.float32)
        uniform[::2] = 0.1 + 0.9 * uniform[::2]  # in every second game, no action is repeated
        over = envs["done"].numpy()
        their_reward, their_terminated = np.zeros((2, 64))
        for i, game in enumerate(games):
            numbers.uniform = uniform[i].item()
            if over[i]:
                game.reset()
                game.last_action = 0  # in MinAtar it lives on in the next episode
                steps[i] = 0
                continue
            counts["repeated"] += numbers.uniform < 0.1
            walls = game.env.brick_map.sum()
            their_reward[i], their_terminated[i] = game.act(minimal[action[i]])
            steps[i] += 1
            counts["cleared"] += game.env.brick_map.sum() > walls
        envs, reward, terminated = EAGER.step_device(EAGER.Breakout, envs, torch.tensor(action), uniform)
        np.testing.assert_array_equal(reward, their_reward)
        np.testing.assert_array_equal(terminated, their_terminated)
        truncated = steps == 1000
        np.testing.assert_array_equal(envs["done"], truncated | (their_terminated > 0))
        seen = np.stack([game.state().reshape(-1) for game in games])
        np.testing.assert_array_equal(EAGER.Breakout.observation(envs["state"]), seen)
        counts["lost"] += int(their_terminated.sum())
        counts["truncated"] += int(truncated.sum())
        counts["broken"] += int(their_reward.sum())
    assert min(counts.values()) >= 10, counts


@pytest.mark.parametrize("env", EAGER.ENVS.values())
def test_an_env_says_its_sizes(env):
    envs = EAGER.first_envs(env, 5, torch.device("cpu"))
    obs = env.observation(envs["state"])
    assert obs.shape == (5, env.obs_dim)
    action = torch.tensor([0, 1, 0, 1, env.num_actions - 1])
    state, reward, terminated = env.transition(envs["state"], action, torch.rand(5, env.num_uniforms))
    assert state.shape == envs["state"].shape and state.dtype == envs["state"].dtype
    assert reward.shape == terminated.shape == (5,)
    assert reward.dtype == torch.float32 and terminated.dtype == torch.bool


def test_first_clocks_differ_and_the_first_episodes_do_not_count():
    envs = EAGER.first_envs(EAGER.CartPole, 1000, torch.device("cpu"))
    assert envs["clock"].min() < 10 and envs["clock"].max() > 490 and len(envs["clock"].unique()) > 400
    for _ in range(600):  # an env that never terminates
        envs["state"].zero_()
        envs, _, _ = EAGER.step_device(EAGER.CartPole, envs, torch.zeros(1000), torch.full((1000, 4), 0.5))
        counted = ~envs["last_return"].isnan()
        assert (envs["last_return"][counted] == 500).all() and (envs["last_length"][counted] == 500).all()
    assert 0.1 < counted.float().mean() < 0.5  # those with a second end after 600 steps


class Clocks:
    """Episodes that end by themselves after two or four steps, or are truncated after three; a step k pays k."""

    obs_dim = 3
    num_actions = 2
    num_uniforms = 1
    time_limit = 3

    @staticmethod
    def initial(uniform):
        length = torch.where(uniform < 0.5, 2.0, 4.0)
        return torch.cat([torch.zeros_like(length), length, uniform], -1)

    @staticmethod
    def transition(state, action, uniform):
        steps = state[:, :1] + 1
        return torch.cat([steps, state[:, 1:]], -1), steps[:, 0], steps[:, 0] >= state[:, 1]

    @staticmethod
    def observation(state):
        return state


def simulated(uniform: np.ndarray, state: np.ndarray, clock: np.ndarray, done: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of a rollout in Clocks, env by env, in plain Python."""
    T, N = uniform.shape
    rows = {name: np.zeros((T, N)) for name in ("step", "reward", "terminated", "done", "valid")}
    for i in range(N):
        step, length = state[i, :2]
        elapsed, over = clock[i], done[i]
        for t in range(T):
            rows["step"][t, i] = step
            rows["valid"][t, i] = not over
            if over:
                step, length, elapsed, over = 0, 2 if uniform[t, i] < 0.5 else 4, 0, False
                continue
            step += 1
            elapsed += 1
            terminated = step >= length
            over = terminated or elapsed >= 3
            rows["reward"][t, i] = step
            rows["terminated"][t, i] = terminated
            rows["done"][t, i] = over
    return rows


@pytest.mark.parametrize("name", [name for name in TENSOR_ENVS if "pqn" not in name])
def test_rollouts_and_advantages_are_those_of_a_loop_over_steps(monkeypatch, name):
    """Rewards, resets, truncations and bootstraps of 16 rollouts, which follow one another without a seam."""
    script, draws, starts, batches, outcomes, log_ratios = load(name), [], [], [], [], []
    of_ppo = "ppo" in name
    gae_name = "gae" if hasattr(script, "gae") else "gae_scan"
    loss_name = "ppo_loss" if of_ppo else "a2c_loss"
    originals = {x: getattr(script, x) for x in (gae_name, loss_name, "step_device", "first_envs")}

    def spied_first_envs(*args):
        envs = originals["first_envs"](*args)
        starts.append({k: x.numpy().copy() for k, x in envs.items()})
        return envs

    def spied_step_device(env, envs, action, uniform):
        draws.append(debug_unwrap(uniform.clone()))
        return originals["step_device"](env, envs, action, uniform)

    def spied_gae(*inputs):
        result = originals[gae_name](*inputs)
        outcomes.append([debug_unwrap(x.clone()) for x in (*inputs[:4], result)])
        return result

    def spied_loss(*inputs):
        result = originals[loss_name](*inputs)
        batch = inputs[3] if of_ppo else result[1]
        batches.append({k: debug_unwrap(x.clone()) for k, x in batch.items()})
        if of_ppo:
            log_ratios.append(inputs[0].detach() - batch["logprob"])
        return result

    spies = {gae_name: spied_gae, loss_name: spied_loss, "step_device": spied_step_device}
    for key, spy in (spies | {"first_envs": spied_first_envs}).items():
        monkeypatch.setattr(script, key, spy)
    monkeypatch.setitem(script.ENVS, "Clocks", Clocks)
    monkeypatch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n, device=device))
    sizes = {"num_envs": 7, "num_steps": 5, "total_timesteps": 35 * 16}
    sizes |= {"num_minibatches": 1, "update_epochs": 1} if of_ppo else {}
    run = train(monkeypatch, name, env_id="Clocks", **sizes, gamma=0.5, gae_lambda=0.5)
    uniform = torch.stack(draws)[..., 0].numpy()
    rows = simulated(uniform, starts[0]["state"], starts[0]["clock"], starts[0]["done"])
    assert len(outcomes) == len(batches) == 16
    for i, (reward, value, terminated, done, advantage) in enumerate(outcomes):
        now = slice(5 * i, 5 * i + 5)
        batch = batches[i]
        for key, got in {"reward": reward, "terminated": terminated, "done": done}.items():
            np.testing.assert_array_equal(got, rows[key][now], err_msg=key)
        np.testing.assert_array_equal(batch["valid"].view(5, 7), rows["valid"][now])
        trace = torch.zeros(7)
        for t in reversed(range(5)):
            delta = reward[t] + 0.5 * (1 - terminated[t]) * value[t + 1] - value[t]
            trace = delta + 0.25 * (1 - done[t]) * trace
            torch.testing.assert_close(advantage[t], trace)
        torch.testing.assert_close(batch["value"].view(5, 7), value[:5])
        torch.testing.assert_close(batch["return"].view(5, 7), advantage + value[:5])
        if of_ppo:
            np.testing.assert_array_equal(batch["obs"].view(5, 7, 3)[..., 0], rows["step"][now])
            torch.testing.assert_close(batch["advantage"], advantage.flatten())
            assert log_ratios[i].abs().max() < 1e-5  # what is evaluated is what acted
    lasts = [ended.sum() for ended in (rows["done"][:, i] for i in range(7))]
    assert min(lasts) > 10 and 1 < run.metrics["episodic_return"] < 10


def test_the_loss_of_pqn_is_half_the_squared_error_of_valid_rows():
    q = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    batch = {"action": torch.tensor([1, 0, 1]), "target": torch.tensor([0.0, 1.0, 9.0])}
    loss, logged = load("pqn_device_env").q_loss(q, batch | {"valid": torch.tensor([1.0, 1.0, 0.0])})
    assert loss == (2**2 + 2**2) / 2 / 2 and logged.tolist() == [loss, (2 + 3) / 2]


@pytest.mark.parametrize("q_lambda", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", [name for name in TENSOR_ENVS if "pqn" in name])
def test_targets_are_those_of_q_lambda(monkeypatch, name, q_lambda):
    """Peng and Williams' recursion in float64, through terminations and truncations, of 16 rollouts without a seam."""
    script, networks, draws, starts, batches = load(name), [], [], [], []

    class Spied(script.LayerNormQNetwork):
        def __init__(self, *dims):
            super().__init__(*dims)
            networks.append(self)

    def spied_first_envs(*args):
        envs = first_envs(*args)
        starts.append({k: x.numpy().copy() for k, x in envs.items()})
        return envs

    def spied_step_device(env, envs, action, uniform):
        draws.append(debug_unwrap(uniform.clone()))
        return step_device(env, envs, action, uniform)

    def spied_loss(q, batch):
        batches.append({k: debug_unwrap(x.clone()) for k, x in batch.items()})
        batches[-1]["weights"] = {k: debug_unwrap(p.detach().clone()) for k, p in networks[0].named_parameters()}
        return q_loss(q, batch)

    first_envs, step_device, q_loss = script.first_envs, script.step_device, script.q_loss
    spies = {"LayerNormQNetwork": Spied, "first_envs": spied_first_envs, "step_device": spied_step_device}
    for key, spy in (spies | {"q_loss": spied_loss}).items():
        monkeypatch.setattr(script, key, spy)
    monkeypatch.setitem(script.ENVS, "Clocks", Clocks)
    monkeypatch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n, device=device))
    sizes = {"num_envs": 7, "num_steps": 5, "total_timesteps": 35 * 16, "num_minibatches": 1, "update_epochs": 1}
    train(
        monkeypatch, name, env_id="Clocks", **sizes, gamma=0.5, q_lambda=q_lambda, exploration_fraction=0.5, end_e=0.0
    )
    uniform = torch.stack(draws)[..., 0].numpy()
    rows = simulated(uniform, starts[0]["state"], starts[0]["clock"], starts[0]["done"])
    assert len(batches) == 16
    greedy, network = [], networks[0].requires_grad_(False)
    for i, (batch, next_batch) in enumerate(itertools.pairwise(batches)):
        now = slice(5 * i, 5 * i + 5)
        np.testing.assert_array_equal(batch["obs"].view(5, 7, 3)[..., 0], rows["step"][now])
        np.testing.assert_array_equal(batch["valid"].view(5, 7), rows["valid"][now])
        obs = torch.cat([batch["obs"], next_batch["obs"][:7]])
        q = torch.func.functional_call(network, batch["weights"], obs).view(6, 7, 2).numpy()
        greedy.append((batch["action"].view(5, 7).numpy() == q[:5].argmax(-1)).mean())
        value = q.max(-1)
        target = np.zeros((6, 7))
        for t in reversed(range(5)):
            reward, terminated, done = (rows[key][now][t] for key in ("reward", "terminated", "done"))
            mixed = (1 - q_lambda) * value[t + 1] + q_lambda * target[t + 1]
            is_last = (done == 1) | (t == 4)
            target[t] = reward + 0.5 * (1 - terminated) * np.where(is_last, value[t + 1], mixed)
        valid = rows["valid"][now] == 1
        np.testing.assert_allclose(batch["target"].view(5, 7).numpy()[valid], target[:5][valid], rtol=1e-5, atol=1e-5)
    assert min(rows["done"].sum(0)) > 10
    assert 0.3 < greedy[0] < 0.8 and set(greedy[8:]) == {1.0}  # the share of random actions falls from 1 to 0


def test_a2c_takes_the_gradient_at_the_states_and_actions_of_the_rollout(monkeypatch):
    """Written out once more, from what the envs were told and what they were, with returns of its own."""
    script, agents, states, actions, outcomes, grads = load("a2c_device_env"), [], [], [], [], []

    class Spied(script.DiscreteAgent):
        def __init__(self, *dims):
            super().__init__(*dims)
            agents.append(self)

    def spied_step_device(env, envs, action, uniform):
        states.append(envs["state"].clone())
        actions.append(action)
        new_envs, reward, terminated = step_device(env, envs, action, uniform)
        outcomes.append((new_envs["state"], reward, terminated.float(), new_envs["done"].float(), ~envs["done"]))
        return new_envs, reward, terminated

    def spied_clip(parameters, _):
        parameters = list(parameters)
        grads.append([p.grad.clone() for p in parameters])
        logits, value = agents[0](torch.stack(states))
        policy = torch.distributions.Categorical(logits=logits)
        next_state, reward, terminated, done, valid = map(torch.stack, zip(*outcomes))
        next_value = agents[0].critic(next_state).squeeze(-1).detach()
        return_, trace = [], torch.zeros(50)
        for t in reversed(range(10)):
            delta = reward[t] + 0.99 * (1 - terminated[t]) * next_value[t] - value[t].detach()
            trace = delta + 0.99 * 0.95 * (1 - done[t]) * trace
            return_.insert(0, trace + value[t].detach())
        return_ = torch.stack(return_)
        policy_loss = -((return_ - value.detach()) * policy.log_prob(torch.stack(actions)))[valid].mean()
        value_loss = 0.5 * ((value - return_) ** 2)[valid].mean()
        loss = policy_loss - 0.01 * policy.entropy()[valid].mean() + 0.5 * value_loss
        shares.append(valid.float().mean())
        grads.append(torch.autograd.grad(loss, parameters))

    shares = []
    step_device = script.step_device
    for key, spy in {"DiscreteAgent": Spied, "step_device": spied_step_device}.items():
        monkeypatch.setattr(script, key, spy)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spied_clip)
    monkeypatch.setattr(script.CartPole, "time_limit", 7)
    sizes = {"num_envs": 50, "num_steps": 10, "total_timesteps": 500, "ent_coef": 0.01}
    script.train(script.Args(**sizes, cuda=False, save_model=False))
    assert 0 < shares[0] < 1
    for grad, expected in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


class Done(Exception):
    pass


def iterate_on_meta(monkeypatch, script, env_id: str, dims: int = 3, **flags):
    """All of train(), from the first envs to the end of two iterations, where nothing has numbers."""

    def spied_rand(*size, **device):
        iterations[0] += len(size) == dims  # each draws such numbers once
        if iterations[0] > 2:
            raise Done
        return rand(*size, **device)

    rand, iterations = torch.rand, [0]
    sgd = lambda params, lr, eps, fused: torch.optim.SGD(params, lr=lr)  # noqa: E731 fused Adam knows no meta device
    first = "first_worlds" if hasattr(script, "first_worlds") else "first_envs"
    first_envs, start_run = getattr(script, first), script.start_run

    def end_of_set_up(*args):  # from here on, a tensor is on the CPU if nobody says where
        set_up.close()
        return first_envs(*args)

    with monkeypatch.context() as patch, OneDevice("meta") as mode, contextlib.ExitStack() as set_up:
        set_up.enter_context(torch.device("meta"))
        patch.setattr(script, first, end_of_set_up)
        patch.setattr(script, "start_run", lambda *args: (*start_run(*args)[:2], torch.device("meta")))
        patch.setattr(torch, "rand", spied_rand)
        patch.setattr(script, "REPORT_EVERY", 99)  # the host waits for a report
        patch.setattr(torch.optim, "Adam", sgd)
        patch.setattr(torch.optim, "AdamW", lambda params, lr, weight_decay, fused: torch.optim.SGD(params, lr=lr))
        patch.setattr(torch, "randperm", lambda n, device: torch.empty(n, dtype=torch.long, device=device))
        with pytest.raises(Done):
            script.train(script.Args(env_id=env_id, num_envs=8, num_steps=4, total_timesteps=1024, **flags))
    assert mode.count > 1000


@pytest.mark.parametrize("env_id", EAGER.ENVS)
@pytest.mark.parametrize("name", TENSOR_ENVS)
def test_an_iteration_never_leaves_the_device_nor_waits_for_it(monkeypatch, name, env_id):
    iterate_on_meta(monkeypatch, load(name), env_id)


ONE_UPDATE = {"learning_starts": 40, "num_updates": 1, "policy_frequency": 1, "batch_size": 8}
PLAIN = {"ppo_mujoco": {}, "td3_mujoco": {"dims": 1} | ONE_UPDATE}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("env_id", ["Hopper-v5", "Ant-v5", "Humanoid-v5"])  # the others do what a Hopper does
def test_an_iteration_of_mujocos_worlds_never_leaves_the_device(monkeypatch, env_id, name):
    """But for the simulator itself. In the plain file; test_capture.py runs the twin."""
    script = load(name)
    monkeypatch.setattr(script, "WarpPhysics", Springs)
    env = script.Worlds(script.ROBOTS[env_id], 8, torch.device("cpu"), script.Args(physics="warp"))
    for part in ("starts", "bounds"):
        setattr(env, part, getattr(env, part).to("meta"))
    monkeypatch.setattr(script, "Worlds", lambda *_: env)
    iterate_on_meta(monkeypatch, script, env_id, physics="warp", **PLAIN[name])


FAULTS = {  # what goes wrong -> the line that does it, and what is said
    "a number read": ("float(reward.sum())", "cannot be called on meta tensors"),
    "a condition": ("reward = reward if terminated.any() else reward + 1", "cannot be called on meta tensors"),
    "a boolean index": ("reward[over]", "nonzero"),
    "an assignment by a mask": ("reward[over] = 0", "by a boolean mask"),
    "a copy to the host": ("reward.cpu()", "Cannot copy out of meta tensor"),
    "a list": ("reward.tolist()", "Cannot copy out of meta tensor"),
    "places of what is true": ("over.nonzero()", "nonzero"),
    "a number of the host": ("reward * torch.full((), 2.0, device='cpu')", r"touches \['cpu'\]"),
    "numbers drawn on the host": ("reward + torch.rand(8, device='cpu').to('meta')", r"touches \['cpu'\]"),
    "a tensor made nobody says where": ("reward * torch.arange(8)", r"touches \['cpu'\]"),
    "numbers copied to the device": ("reward * torch.tensor([2.0], device='meta')", "copies numbers from the host"),
    "an array": ("np.asarray(reward)", "can't convert meta device type tensor to numpy"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_proof_sees_a_planted_fault(monkeypatch, fault):
    path = Path(load("ppo_device_env").__file__)
    line = "    reward = reward.masked_fill(over, 0)\n"
    source = path.read_text()
    assert source.count(line) == 1
    script = types.ModuleType("faulty")
    script.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "faulty", script)  # where dataclasses look
    code, said = FAULTS[fault]
    exec(compile(source.replace(line, f"{line}    {code}\n"), path, "exec"), vars(script))
    with pytest.raises((RuntimeError, TypeError), match=said):  # a NotImplementedError is a RuntimeError
        iterate_on_meta(monkeypatch, script, "CartPole-v1")


def names_of_the_page() -> dict:
    """What the code of the pages defines."""
    root = Path(__file__).parent.parent
    page = (root / "docs" / "device.md").read_text() + (root / "benchmark" / "notebook.md").read_text()
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "policy.pt2" not in block:  # test_mujoco.py trains that policy
            exec(block, names)
    return names


def test_the_env_of_the_page_is_gymnasiums_and_stays_on_the_device(monkeypatch):
    names = names_of_the_page()
    env = names["MountainCar"]
    theirs = gym.make("MountainCar-v0")
    rng = np.random.default_rng(0)
    ends = 0
    for seed in range(20):
        obs, _ = theirs.reset(seed=seed)
        assert env.initial(torch.tensor([[(obs[0] + 0.6) / 0.2]])).tolist()[0] == pytest.approx(obs, abs=1e-6)
        envs = EAGER.first_envs(env, 1, torch.device("cpu"))
        envs |= {"state": torch.tensor(obs)[None], "clock": torch.zeros(1, dtype=torch.long)}
        over = False
        while not over:
            action = int(obs[1] > 0) * 2 if seed % 2 else rng.integers(3)  # swings itself up, or does not
            obs, their_reward, their_terminated, truncated, _ = theirs.step(action)
            envs, reward, terminated = EAGER.step_device(env, envs, torch.tensor([action]), torch.rand(1, 1))
            np.testing.assert_allclose(env.observation(envs["state"])[0], obs, atol=1e-6)
            assert (reward.item(), terminated.item()) == (their_reward, their_terminated)
            over = their_terminated or truncated
            assert envs["done"].item() == over
            envs["state"] = torch.tensor(obs)[None]
        ends += their_terminated
    assert 5 <= ends <= 15
    monkeypatch.setitem(EAGER.ENVS, "MountainCar-v0", env)
    iterate_on_meta(monkeypatch, EAGER, "MountainCar-v0")


def test_a_step_of_the_adapter_leaves_earlier_observations_alone():
    env = names_of_the_page()["DeviceEnv"](gym.make_vec("CartPole-v1", 3), torch.device("cpu"), 1)
    envs = env.first()
    expected = torch.as_tensor(gym.make_vec("CartPole-v1", 3).reset(seed=1)[0])
    for _ in range(2):
        state = envs["state"]
        envs, _, _ = env.step(envs, torch.zeros(3, dtype=torch.long))
        assert torch.equal(state, expected) and not torch.equal(envs["state"], expected)
        expected = envs["state"].clone()


def test_the_script_trains_with_envs_of_gymnasium_as_the_page_says(monkeypatch, tmp_path):
    """The copy that the page describes; its returns are those that Gymnasium counts, and it learns."""
    source = Path(EAGER.__file__).read_text()
    made = '    env = DeviceEnv(gym.make_vec("CartPole-v1", N), device, args.seed)\n'
    line = "    run_dir, writer, device = start_run(args, saved)\n"
    edits = {"    env = ENVS[args.env_id]\n": "", line: line + made, "first_envs(env, N, device)": "env.first()"}
    edits["step_device(env, envs, action, uniform)"] = "env.step(envs, action)"
    for old, new in edits.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    script = types.ModuleType("copied")
    script.__file__ = EAGER.__file__
    monkeypatch.setitem(sys.modules, "copied", script)  # where dataclasses look
    vars(script).update(names_of_the_page())
    exec(compile(source, "copied.py", "exec"), vars(script))
    made_envs = []
    make_vec = gym.make_vec

    def counted(*args):
        made_envs.append(gym.wrappers.vector.RecordEpisodeStatistics(make_vec(*args), buffer_length=10_000))
        return made_envs[0]

    monkeypatch.setattr(gym, "make_vec", counted)
    reports = []
    report = script.report
    monkeypatch.setattr(script, "report", lambda *args: reports.append(args[2]) or report(*args))
    metrics = script.train(
        script.Args(num_envs=8, num_steps=64, total_timesteps=512 * 40, cuda=False, save_model=False)
    )
    queue = made_envs[0].return_queue
    assert len(queue) > 100 and set(sum(reports, [])) <= set(queue)
    assert np.mean(list(queue)[:20]) < 40 and metrics["episodic_return"] > 80
