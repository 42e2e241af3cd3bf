"""Each formula against an independent one: a plain loop, a library, or numbers worked out by hand."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import PPO_CONTINUOUS, load

EAGER, TWIN = PPO_CONTINUOUS


@pytest.mark.parametrize(("script", "function"), [(EAGER, "gae"), (TWIN, "gae_scan")])
def test_gae_by_hand(script, function):
    """gamma = 0.5, lambda = 0.5: a step, a termination, a reset row, a truncation, a reset row, a last step."""
    reward = torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0, 8.0])
    value = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0])
    terminated = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    done = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    advantage = getattr(load(script), function)(*(x[:, None] for x in (reward, value, terminated, done)), 0.5, 0.5)
    # 5: 8 + 35 - 60 = -17; 4: 0 + 30 - 50 - 17/4 = -24.25; 3: 4 + 25 - 40 = -11 (bootstraps 50, trace cut);
    # 2: 0 + 20 - 30 - 11/4 = -12.75; 1: 2 - 20 = -18 (terminated); 0: 1 + 10 - 10 - 18/4 = -3.5
    assert advantage.squeeze(1).tolist() == [-3.5, -18.0, -12.75, -11.0, -24.25, -17.0]


@pytest.mark.parametrize(("script", "function"), [(EAGER, "gae"), (TWIN, "gae_scan")])
@pytest.mark.parametrize("T", [1, 2, 37, 2048])
def test_gae_against_a_plain_loop(script, function, T):
    rng = np.random.default_rng(T)
    reward, terminated = rng.normal(size=(T, 3)), rng.random((T, 3)) < 0.05
    done, value = terminated | (rng.random((T, 3)) < 0.05), rng.normal(size=(T + 1, 3))
    expected = np.zeros((T + 1, 3))
    for t in reversed(range(T)):
        for n in range(3):
            bootstrap = 0.0 if terminated[t, n] else value[t + 1, n]
            trace = 0.0 if done[t, n] else expected[t + 1, n]
            expected[t, n] = reward[t, n] + 0.99 * bootstrap - value[t, n] + 0.99 * 0.95 * trace
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (reward, value, terminated, done)]
    copies = [x.clone() for x in tensors]
    torch.testing.assert_close(getattr(load(script), function)(*tensors, 0.99, 0.95), torch.tensor(expected[:-1]))
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))  # the inputs are left alone


def test_gaussian_against_torch():
    mean, logstd, action = torch.randn(5, 3), torch.randn(3), torch.randn(5, 3)
    logprob, entropy = load(EAGER).gaussian_logprob_entropy(action, mean, logstd)
    reference = torch.distributions.Normal(mean, logstd.exp().expand_as(mean))
    torch.testing.assert_close(logprob, reference.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, reference.entropy().sum(-1)[0])


@pytest.mark.parametrize(
    "flags", [{}, {"clip_vloss": False}, {"norm_adv": False, "clip_coef": 0.1, "vf_coef": 0.7}], ids=str
)
def test_ppo_loss_ignores_masked_rows_and_equals_the_textbook(flags):
    script, rng = load(EAGER), torch.Generator().manual_seed(0)
    rows = {name: torch.randn(64, generator=rng) for name in ("logprob", "value", "advantage", "return")}
    batch = rows | {"valid": (torch.rand(64, generator=rng) < 0.8).float()}
    logprob, value = (torch.randn(64, generator=rng) * 0.3 + rows[name] for name in ("logprob", "value"))
    args = script.Args(ent_coef=0.01, **flags)
    clip = args.clip_coef
    entropy = torch.rand(64, generator=rng)
    loss, losses = script.ppo_loss(logprob, entropy, value, batch, args)
    of_one, _ = script.ppo_loss(logprob, torch.tensor(1.5), value, batch, args)  # a Gaussian has the same in all rows
    losses = dict(zip(script.PPO_LOSSES, losses, strict=True))

    keep = batch["valid"] > 0
    advantage = rows["advantage"][keep]
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (logprob - rows["logprob"])[keep].exp()
    policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    error = (value - rows["return"])[keep] ** 2
    clipped = rows["value"][keep] + (value - rows["value"])[keep].clamp(-clip, clip)
    if args.clip_vloss:
        error = torch.maximum(error, (clipped - rows["return"][keep]) ** 2)
    torch.testing.assert_close(loss, policy_loss - 0.01 * entropy[keep].mean() + args.vf_coef * 0.5 * error.mean())
    torch.testing.assert_close(of_one, policy_loss - 0.01 * 1.5 + args.vf_coef * 0.5 * error.mean())
    torch.testing.assert_close(losses["approx_kl"], (ratio - 1 - ratio.log()).mean())
    torch.testing.assert_close(losses["old_approx_kl"], -ratio.log().mean())
    torch.testing.assert_close(losses["clipfrac"], ((ratio - 1).abs() > clip).float().mean())


@pytest.mark.parametrize("flags", [{}, {"norm_adv": True, "vf_coef": 0.7, "gamma": 0.9}], ids=str)
def test_a2c_loss_ignores_masked_rows_and_equals_the_textbook(flags):
    """Its gradients, too: none goes through an advantage or a return."""
    script, rng = load("a2c_device_env"), torch.Generator().manual_seed(0)
    rollout = {name: (torch.rand(9, 7, generator=rng) < 0.2).float() for name in ("terminated", "done")}
    rollout |= {"reward": torch.randn(9, 7, generator=rng), "valid": (torch.rand(9, 7, generator=rng) < 0.8).float()}
    rollout |= {"action": torch.randint(3, (9, 7), generator=rng)}
    logits, value, last_value = (torch.randn(shape, generator=rng) for shape in ((9, 7, 3), (9, 7), (7,)))
    learnable = [logits.requires_grad_(), value.requires_grad_()]
    args = script.Args(ent_coef=0.03, **flags)
    loss, learned, losses = script.a2c_loss(logits, value, last_value, rollout, args)

    keep = rollout["valid"] > 0
    values = torch.cat([value.detach(), last_value[None]])
    outcome = (rollout["reward"], values, rollout["terminated"], rollout["done"])
    advantage = script.gae(*outcome, args.gamma, args.gae_lambda)
    return_ = (advantage + values[:-1])[keep]
    advantage = advantage[keep]
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = torch.distributions.Categorical(logits=logits)
    policy_loss = -(advantage * policy.log_prob(rollout["action"])[keep]).mean()
    value_loss = 0.5 * ((value[keep] - return_) ** 2).mean()
    entropy = policy.entropy()[keep].mean()
    expected = policy_loss - 0.03 * entropy + args.vf_coef * value_loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(losses, torch.stack([policy_loss, value_loss, entropy]))
    grads, expected_grads = (torch.autograd.grad(x, learnable) for x in (loss, expected))
    for grad, expected_grad in zip(grads, expected_grads):
        torch.testing.assert_close(grad, expected_grad)
    torch.testing.assert_close(learned["return"][keep], return_)
    assert torch.equal(learned["value"], value) and torch.equal(learned["valid"], rollout["valid"])


def test_adam_against_torch():
    script = load(TWIN)
    param = torch.randn(50)
    reference = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.Adam([reference], lr=1e-2, eps=1e-5)
    state = [torch.zeros(50)], [torch.zeros(50)], torch.zeros(())
    for i in range(200):
        optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)  # a changing rate, as with annealing
        reference.grad = torch.randn(50) * 10.0 ** (i % 5 - 2)
        optimizer.step()
        script.adam_([param], [reference.grad], *state, torch.tensor(1e-2 / (i + 1)), eps=1e-5)
    torch.testing.assert_close(param, reference.detach(), rtol=1e-5, atol=1e-6)


def test_unflatten_gives_views_by_name():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    shapes = {name: p.shape for name, p in module.named_parameters()}
    flat = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    views = load("dqn_torchcompile").unflatten(flat, shapes)
    assert all(torch.equal(views[name], p) for name, p in module.named_parameters())
    flat.zero_()
    assert not any(view.any() for view in views.values())


@pytest.mark.parametrize("num_envs", [1, 3])
def test_normalisers_equal_numpys_statistics_and_come_to_gymnasiums(num_envs):
    """On an env with terminations and truncations, reset rows included, for 300 steps.

    Gymnasium's begin at mean 0 and variance 1, with the weight of 1e-4 rows; ours begin with the first rows.
    """
    script = load(EAGER)

    def make():
        env_fns = [lambda: gym.make("ScriptedEnv-v0")] * num_envs
        return gym.vector.SyncVectorEnv(env_fns, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)

    plain = make()
    wrapped = gym.wrappers.vector.NormalizeReward(gym.wrappers.vector.NormalizeObservation(make()), gamma=0.9)
    obs_stats, return_stats, returns = np.zeros((4, 3)), np.zeros((4, 1)), np.zeros(num_envs)
    seeds = [0, 1, 10][:num_envs]
    obs, _ = plain.reset(seed=seeds)
    wrapped.reset(seed=seeds)
    script.normalize_obs(obs_stats, obs)
    rows, sums = [obs], []
    done, action = np.zeros(num_envs, bool), np.zeros((num_envs, 2), np.float32)
    for step in range(300):
        obs, reward, terminated, truncated, _ = plain.step(action)
        theirs, their_reward, *_ = wrapped.step(action)
        rows.append(obs)
        ours = script.normalize_obs(obs_stats, obs)
        seen = np.concatenate(rows).astype(np.float64)
        np.testing.assert_allclose(
            ours, ((obs - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)).clip(-10, 10), rtol=1e-6, atol=1e-7
        )
        our_reward = script.normalize_reward(return_stats, returns, reward, terminated, ~done, 0.9)
        sums.extend(returns[~done])
        deviation = np.sqrt(np.var(sums) + 1e-8)
        np.testing.assert_allclose(our_reward, (reward / deviation).clip(-10, 10), rtol=1e-6, atol=1e-7)
        done = terminated | truncated
        if step > 200:
            np.testing.assert_allclose(ours, np.clip(theirs, -10, 10), rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(our_reward, np.clip(their_reward, -10, 10), rtol=1e-3)


def test_lambda_1_makes_a2c_reinforce():
    """With whole episodes in the rollout, the gradient is that of Williams 1992: later rewards, less a baseline."""
    script, rng = load("a2c_device_env"), torch.Generator().manual_seed(1)
    T, N, gamma = 6, 3, 0.9
    logits = torch.randn(T, N, 4, generator=rng, requires_grad=True)
    value = torch.randn(T, N, generator=rng)
    ends = torch.zeros(T, N)
    ends[-1] = 1  # every episode is as long as the rollout, and is terminated
    rollout = {"reward": torch.randn(T, N, generator=rng), "action": torch.randint(4, (T, N), generator=rng)}
    rollout |= {"terminated": ends, "done": ends, "valid": torch.ones(T, N)}
    args = script.Args(gae_lambda=1.0, gamma=gamma, vf_coef=0.0)
    loss, learned, _ = script.a2c_loss(logits, value, torch.full((N,), 1e6), rollout, args)

    later = torch.stack([sum(gamma ** (k - t) * rollout["reward"][k] for k in range(t, T)) for t in range(T)])
    torch.testing.assert_close(learned["return"], later)
    logprob = torch.distributions.Categorical(logits=logits).log_prob(rollout["action"])
    expected = -((later - value) * logprob).mean()
    grads = (torch.autograd.grad(x, logits)[0] for x in (loss, expected))
    torch.testing.assert_close(*grads)


def test_explained_variance_counts_valid_rows_and_survives_their_absence():
    explained_variance = load("ppo_continuous_action").explained_variance
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(5, 4, generator=generator) for name in ("return", "value")}
    batch["valid"] = (torch.rand(5, 4, generator=generator) < 0.6).float()
    return_, value = (batch[name][batch["valid"] > 0].double().numpy() for name in ("return", "value"))
    expected = 1 - np.var(return_ - value) / np.var(return_)
    assert explained_variance(batch).item() == pytest.approx(expected, abs=1e-5)
    assert explained_variance(batch | {"valid": torch.zeros(5, 4)}).isfinite()
