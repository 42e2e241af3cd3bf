"""What a flag says reaches the formula that it is for. The twins follow, since they compute what the plain files do."""

import pytest
import torch
from catalog import CATALOG
from conftest import ATARI, OFF_POLICY, PPO_CONTINUOUS, ScriptedPool, load, tiny, train

EAGER = [name for name in CATALOG if CATALOG[name].adam]


@pytest.mark.parametrize("name", EAGER)
def test_optimizers_have_the_rates_that_the_flags_say(monkeypatch, name):
    flags, rates, eps = CATALOG[name].adam
    decay = getattr(load(name).Args, "weight_decay", 0)
    seen = {}

    for kind in (torch.optim.Adam, torch.optim.AdamW):

        class Spied(kind):
            def step(self):
                (group,) = self.param_groups
                seen.setdefault(id(self), (group["lr"], group["eps"], group["betas"], group["weight_decay"]))
                super().step()

        monkeypatch.setattr(torch.optim, kind.__name__, Spied)
    if name in ATARI:
        monkeypatch.setattr(load(name), "make_envs", ScriptedPool)
    train(monkeypatch, name, **tiny(name) | {"total_timesteps": 1024, "num_envs": 1} | flags)
    assert list(seen.values()) == [(rate, eps, (0.9, 0.999), decay) for rate in rates]


ANNEALED = ["ppo_continuous_action", "ppo_lru", "ppo_device_env", "a2c_device_env", "pqn_device_env"]
ANNEALED += ["ppo_atari_envpool"]


@pytest.mark.parametrize("name", ANNEALED)
def test_the_learning_rate_falls_in_a_line_to_its_last_share(monkeypatch, name):
    rates = []

    class SpiedAdam(torch.optim.Adam):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            super().step()

    monkeypatch.setattr(torch.optim, "Adam", SpiedAdam)
    if name in ATARI:
        monkeypatch.setattr(load(name), "make_envs", ScriptedPool)
    sizes = {"num_envs": 1, "num_steps": 32, "total_timesteps": 128}
    sizes |= {} if "a2c" in name else {"num_minibatches": 1, "update_epochs": 1}
    train(monkeypatch, name, **tiny(name) | sizes | {"learning_rate": 1.0})
    assert rates == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("name", [name for name in OFF_POLICY if name in EAGER])
def test_targets_discount_by_gamma(monkeypatch, name):
    script, calls = load(name), []
    original = script.td_target

    def spied(batch, next_value, gamma):
        target = original(batch, next_value, gamma)
        calls.append((target - batch["reward"] - 0.5 * (1 - batch["terminated"]) * next_value).abs().max().item())
        return target

    monkeypatch.setattr(script, "td_target", spied)
    train(monkeypatch, name, **tiny(name), gamma=0.5)
    assert calls and max(calls) < 1e-4


def test_rewards_are_scaled_by_the_discounted_return(monkeypatch):
    """Rewards of 1 sum to at most 1 / (1 - gamma): what the statistics see tells gamma."""
    script, seen = load(PPO_CONTINUOUS[0]), []
    original = script.normalize_reward

    def spied(stats, returns, reward, *rest):
        result = original(stats, returns, reward * 0 + 1, *rest)
        seen.append(returns.max())
        return result

    monkeypatch.setattr(script, "normalize_reward", spied)
    train(monkeypatch, script.__name__, **tiny(script.__name__), gamma=0.75)
    assert max(seen) == pytest.approx(4)


@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_atari_envpool"])
def test_weights_start_orthogonal_with_their_gains(name):
    """The singular values of an orthogonal matrix are all its gain: the root of 2, for the last layers 0.01 and 1."""
    torch.manual_seed(0)
    script = load(name)
    if name in ATARI:
        agent = script.AtariAgent(4)
        layers = [(layer, 2**0.5) for layer in agent.trunk if hasattr(layer, "weight")]
        layers += [(agent.actor, 0.01), (agent.critic, 1.0)]
    else:
        agent = script.Agent(5, 3)
        layers = [(part[i], 2**0.5) for part in (agent.actor_mean, agent.critic) for i in (0, 2)]
        layers += [(agent.actor_mean[4], 0.01), (agent.critic[4], 1.0)]
        assert (agent.actor_logstd == 0).all()
    for layer, gain in layers:
        values = torch.linalg.svdvals(layer.weight.flatten(1))
        torch.testing.assert_close(values, torch.full_like(values, gain), rtol=1e-3, atol=1e-6)
        assert (layer.bias == 0).all()
