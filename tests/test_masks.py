"""PPO for discrete actions: several choices at a time, masks, and the policy that it exports."""

import gymnasium as gym
import numpy as np
import play
import pytest
import torch
from conftest import PPO_DISCRETE, load, tiny, train

SIZES = [3, 2, 4]


class MaskedEnv(gym.Env):
    """Rules out some actions, fails if one of them is taken, and pays for each choice that is the last one allowed."""

    observation_space = gym.spaces.Dict({"a": gym.spaces.Discrete(5), "b": gym.spaces.Box(-1, 1, (2,))})
    action_space = gym.spaces.MultiDiscrete(SIZES, start=[0, 1, -1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe()

    def observe(self):
        self.mask = tuple((self.np_random.random(n) < 0.5).astype(np.int8) for n in SIZES)
        for part in self.mask:
            part[self.np_random.integers(len(part))] = 1
        return {"a": int(self.steps % 5), "b": np.zeros(2, np.float32)}, {"action_mask": self.mask}

    def step(self, action):
        choices = action - self.action_space.start
        assert action in self.action_space and all(part[k] for part, k in zip(self.mask, choices))
        reward = np.mean([k == np.flatnonzero(part)[-1] for part, k in zip(self.mask, choices)])
        self.steps += 1
        obs, info = self.observe()
        return obs, reward, False, self.steps == 10, info


class MaskedCart(gym.Env):
    """One choice of three, numbered from 1; the mask allows one of them at a time."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(3, start=1)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {"action_mask": np.eye(3, dtype=np.int8)[0]}

    def step(self, action):
        assert action == 1 + self.steps % 3
        self.steps += 1
        info = {"action_mask": np.eye(3, dtype=np.int8)[self.steps % 3]}
        return np.zeros(2, np.float32), 1.0, self.steps == 7, False, info


for env in (MaskedEnv, MaskedCart):
    gym.register(f"{env.__name__}-v0", entry_point=env, disable_env_checker=True)


@pytest.mark.parametrize("name", [PPO_DISCRETE[0], pytest.param(PPO_DISCRETE[1], marks=pytest.mark.long)])
def test_masked_choices_are_learned_and_played(monkeypatch, name):
    """The env itself fails at an action that is ruled out: in training, and where play.py plays the exported policy."""
    sizes = {"num_envs": 2, "total_timesteps": 8192, "learning_rate": 3e-3, "save_model": True}
    run = train(monkeypatch, name, env_id="MaskedEnv-v0", **sizes)
    assert run.metrics["episodic_return"] > 9  # 6 at random
    assert play.play(play.Args(run.run_dir / "policy.pt2", episodes=3))["mean"] > 9


@pytest.mark.parametrize("name", PPO_DISCRETE)
def test_a_mask_of_one_choice(monkeypatch, name):
    run = train(monkeypatch, name, **tiny(name) | {"env_id": "MaskedCart-v0", "save_model": True})
    assert run.metrics["episodic_return"] == 7 and run.metrics["entropy"] == 0
    assert play.play(play.Args(run.run_dir / "policy.pt2", episodes=1))["returns"] == [7]


@pytest.mark.parametrize("name", PPO_DISCRETE)
def test_a_ruled_out_action_has_no_probability_and_its_gradient_is_finite(name):
    agent = load(name).FactoredAgent(4, SIZES)
    mask = torch.tensor([[1, 0, 0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 0, 1, 1, 1, 1, 1]])
    logits, _ = agent(torch.cat([torch.randn(2, 4), mask], -1))
    action = torch.tensor([[0, 1, 2], [2, 1, 0]])
    logprob, entropy = load(name).factored_logprob_entropy(action, logits, SIZES)
    (logprob + entropy).sum().backward()
    assert all(p.grad.isfinite().all() for p in agent.actor.parameters()) and agent.actor[4].bias.grad.any()
    assert (agent.actor[4].bias.grad[mask.sum(0) == 0] == 0).all()
    parts = list(zip(logits.split(SIZES, -1), mask.split(SIZES, -1), action.unbind(-1), strict=True))
    assert all((choice.softmax(-1)[part == 0] == 0).all() for choice, part, _ in parts)
    by_hand = [torch.distributions.Categorical(logits=choice) for choice, *_ in parts]
    torch.testing.assert_close(logprob, sum(d.log_prob(k) for d, (*_, k) in zip(by_hand, parts)))
    torch.testing.assert_close(entropy, sum(d.entropy() for d in by_hand))
