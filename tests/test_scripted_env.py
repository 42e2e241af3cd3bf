"""The scripts' own loops on episodes known in advance: what they store, mask, bootstrap and count."""

import envpool
import numpy as np
import pytest
import torch
from catalog import row
from conftest import ATARI, DISCRETE, PPO, PPO_CONTINUOUS, ScriptedEnv, ScriptedPool, load, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPTED = ("ScriptedEnv-v0", "DiscreteScriptedEnv-v0")  # by whether actions are discrete
# One env, 2 rollouts of 5 steps. Episodes: 2 steps (terminated), 3 (truncated), 1 (terminated and truncated), 2, ...
# Each end is followed by a row that only resets. Rewards: 1 2 | 0 | 11 12 13 | 0 | 21 | 0 | 31
REWARD = [[1, 2, 0, 11, 12], [13, 0, 21, 0, 31]]
TERMINATED = [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]
DONE = [[0, 1, 0, 0, 0], [1, 0, 1, 0, 0]]
VALID = [[1, 1, 0, 1, 1], [1, 0, 1, 0, 1]]
OBS = [  # (env, episode, step)
    [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1]],
    [[0, 1, 2], [0, 1, 3], [0, 2, 0], [0, 2, 1], [0, 3, 0]],
]


def record(monkeypatch, name: str, **args):
    """Trains with the normalisers off and a known critic, V(s) = 100 episode + 10 step; returns what GAE or V-trace was
    given and gave, and the rows of the batches in the order in which the env made them."""
    script, calls, batches = load(name), [], []
    gae_name = next(function for function in ("gae", "gae_scan", "vtrace") if hasattr(script, function))
    atari = hasattr(script, "AtariAgent")
    agent = getattr(script, row(name).policy)
    original_gae, original_loss, original_forward = getattr(script, gae_name), script.ppo_loss, agent.forward

    def spied_gae(*inputs):
        result = original_gae(*inputs)
        results = result if isinstance(result, tuple) else [result]
        calls.append([x.clone() if isinstance(x, torch.Tensor) else x for x in (*inputs, *results)])
        return result

    def spied_loss(logprob, entropy, value, batch, args):
        batches.append({k: v.detach().clone() for k, v in batch.items()})
        return original_loss(logprob, entropy, value, batch, args)

    def known_value(self, obs):
        *policy, value = original_forward(self, obs)
        seen = obs[:, 0, 0, :3].float() if atari else obs
        return *policy, value * 0 + 100 * seen[..., 1] + 10 * seen[..., 2]

    with monkeypatch.context() as patch:
        patch.setattr(script, gae_name, spied_gae)
        patch.setattr(script, "ppo_loss", spied_loss)
        patch.setattr(agent, "forward", known_value)
        if atari:
            patch.setattr(script, "make_envs", ScriptedPool)
        elif hasattr(script, "normalize_obs"):
            patch.setattr(script, "normalize_obs", lambda stats, obs: obs)
            patch.setattr(script, "normalize_reward", lambda stats, returns, reward, *rest: reward)
        patch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n, device=device))
        args = {"num_minibatches": 1, "update_epochs": 1, "learning_rate": 0.0} | args
        if hasattr(script.Args, "num_envs"):
            args = {"num_envs": 1} | args
        args["env_id"] = SCRIPTED[name in DISCRETE]
        run = train(patch, name, **args)
    return calls, batches, run


@pytest.mark.parametrize("name", PPO)
def test_transitions_and_advantages_are_those_worked_out_by_hand(monkeypatch, name):
    gamma, gae_lambda = 0.5, 0.5
    calls, batches, _ = record(monkeypatch, name, num_steps=5, total_timesteps=10, gamma=gamma, gae_lambda=gae_lambda)
    # By hand, V(s) = 100 episode + 10 step, delta = r + V'/2 - V, or r - V at a termination; the trace halves twice:
    # rollout 1: s4 12+60-110 = -38; s3 11+55-100-38/4 = -43.5; row 2 (resets) 0+50-20-43.5/4 = 19.125;
    #            s1 2-10 = -8 (terminated); s0 1+5-0-8/4 = 4
    # rollout 2: s4 31+155-300 = -114; row 3 (resets) 0+150-210-114/4 = -88.5; s2 21-200 = -179 (terminated);
    #            row 1 (resets) 0+100-130-179/4 = -74.75; s0 13+65-120 = -42 (truncated: bootstraps V = 130)
    by_hand = [[4, -8, 19.125, -43.5, -38], [-42, -74.75, -179, -88.5, -114]]
    for i, (reward, value, terminated, done, *_, advantage) in enumerate(calls):
        assert reward.squeeze(1).tolist() == REWARD[i]
        assert terminated.squeeze(1).tolist() == TERMINATED[i]
        assert done.squeeze(1).tolist() == DONE[i]
        assert value.squeeze(1).tolist()[:-1] == [100 * e + 10 * s for _, e, s in OBS[i]]
        assert advantage.squeeze(1).tolist() == by_hand[i]
        obs = batches[i]["obs"]
        assert (obs[:, 0, 0, :3] if name in ATARI else obs).tolist() == OBS[i]
        assert batches[i]["valid"].tolist() == VALID[i]
        assert batches[i]["advantage"].tolist() == by_hand[i]
        assert batches[i]["return"].tolist() == (torch.tensor(by_hand[i]) + value[:-1, 0]).tolist()
    assert len(calls) == len(batches) == 2


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", PPO)
def test_two_envs_keep_their_own_episodes(monkeypatch, name, groups):
    if groups > 1 and name != ATARI[1]:
        pytest.skip("has no groups")
    flags = {"env_groups": groups} if name == ATARI[1] else {}
    calls, batches, run = record(monkeypatch, name, num_envs=2, num_steps=7, total_timesteps=14, **flags)
    done = calls[0][3].T.tolist()
    assert done == [[0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 1]]  # env 0: 2, reset, 3, reset; env 1: 4, reset, 2
    assert calls[0][2].T.tolist() == [[0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1]]
    valid = batches[0]["valid"].view(7, 2).T.tolist()
    assert valid == [[1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1, 1]]
    # returns of the four episodes: 1+2, 11+12+13, 1+2+3+4, 11+12; at 4, 8, 12 and 14 steps summed over envs. In
    # games, the first two episodes of env 0 are lives of one, whose return counts rewards before they were clipped.
    ended = [(8, 100), (12, 30 + 360), (14, 230)] if name in ATARI else [(4, 3), (8, 10), (12, 36), (14, 23)]
    if groups == 2:
        ended[1] = (11, 30 + 360)  # env 0 is the first half of a step
    assert run.metrics["episodic_return"] == np.mean([value for _, value in ended])
    events = EventAccumulator(str(run.run_dir)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("charts/episodic_return")] == ended
    lengths = [e.value for e in events.Scalars("charts/episodic_length")]
    assert lengths == ([4, 5, 2] if name in ATARI else [2, 4, 3, 2])


@pytest.mark.parametrize("name", PPO_CONTINUOUS)
def test_actions_respect_each_dimensions_bounds_and_the_first_reset_alone_is_seeded(monkeypatch, name):
    ScriptedEnv.actions.clear(), ScriptedEnv.seeds.clear()
    record(monkeypatch, name, num_envs=2, num_steps=20, total_timesteps=40, seed=3)
    actions = np.array(ScriptedEnv.actions)
    assert actions[:, 0].min() == np.float32(-0.5) and actions[:, 0].max() == np.float32(0.1)
    assert actions[:, 1].min() >= -3 and actions[:, 1].max() > 0.5
    assert ScriptedEnv.seeds[:2] == [30_000, 30_001] and set(ScriptedEnv.seeds[2:]) == {None}
    assert len(ScriptedEnv.seeds) > 4


@pytest.mark.parametrize("name", PPO_CONTINUOUS)
def test_log_probabilities_are_those_of_the_stored_actions(monkeypatch, name):
    _, batches, _ = record(monkeypatch, name, num_steps=64, total_timesteps=64)
    script = load(name)
    torch.manual_seed(10_000)  # see KnownSeeds
    agent = script.Agent(3, 2)  # as train() made it: the learning rate is 0, so it has not changed
    mean, logstd, _ = agent(batches[0]["obs"])
    expected = torch.distributions.Normal(mean, logstd.exp().expand_as(mean)).log_prob(batches[0]["action"]).sum(-1)
    torch.testing.assert_close(batches[0]["logprob"], expected.detach(), rtol=1e-4, atol=1e-4)
    spread = (batches[0]["action"] - mean).std(0)
    assert ((spread > 0.75) & (spread < 1.3)).all()  # unit deviation, and no two steps share their noise
    assert len(batches[0]["action"].unique(dim=0)) == 64


@pytest.mark.parametrize("name", ATARI)
def test_actions_are_drawn_from_the_policy(monkeypatch, name):
    """Log-probabilities are those of the stored, executed actions, and these follow the policy's probabilities."""
    script = load(name)
    with monkeypatch.context() as patch:
        forward = script.AtariAgent.forward
        logits = torch.tensor([0.0, 1.0, 2.0, -20.0])
        patch.setattr(script.AtariAgent, "forward", lambda self, x: (forward(self, x)[0] * 0 + logits, x[:, 0, 0, 0]))
        ScriptedPool.actions.clear()
        _, batches, _ = record(patch, name, num_envs=2, num_steps=512, total_timesteps=1024)
    actions = batches[0]["action"]
    assert actions.view(512, 2).tolist() == ScriptedPool.actions
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(batches[0]["logprob"], expected[actions])
    share = torch.bincount(actions, minlength=4) / len(actions)
    assert (share - expected.exp()).abs().max() < 0.05
    assert (actions[2:] == actions[:-2]).float().mean() < 0.7  # 0.51 expected; the noise of a step is its own


@pytest.mark.parametrize("name", ATARI)
def test_the_entropy_is_that_of_the_rows_that_count(monkeypatch, name):
    """The logits depend on the step, so that the rows in which an env only resets would change it."""
    agent = load(name).AtariAgent
    forward, logit = agent.forward, torch.tensor([1.0, 0, 0, 0])
    known = lambda self, x: (forward(self, x)[0] * 0 + x[:, 0, 0, 2:3] * logit, x[:, 0, 0, 0])  # noqa: E731
    monkeypatch.setattr(agent, "forward", known)
    _, (batch,), run = record(monkeypatch, name, num_envs=2, num_steps=7, total_timesteps=14)
    entropy = torch.distributions.Categorical(logits=batch["obs"][:, 0, 0, 2:3] * logit).entropy()
    assert run.metrics["entropy"] == pytest.approx(entropy[batch["valid"] > 0].mean().item(), rel=1e-5)
    assert run.metrics["entropy"] != pytest.approx(entropy.mean().item(), rel=1e-2)


def test_groups_of_envs_live_the_same_lives(monkeypatch):
    """Real games: each env's rows are the same, whether its group is all of the envs or half of them."""
    script, recorded = load(ATARI[1]), {1: [], 2: []}
    original = script.ppo_loss
    monkeypatch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n, device=device))
    for groups, rows in recorded.items():

        def spied_loss(*inputs, rows=rows):
            rows.append(inputs[3])
            return original(*inputs)

        monkeypatch.setattr(script, "ppo_loss", spied_loss)
        sizes = {"num_envs": 4, "num_steps": 64, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 512}
        train(monkeypatch, ATARI[1], **sizes, env_groups=groups)
    for a, b in zip(*recorded.values(), strict=True):
        for key in ("obs", "action", "valid"):
            assert torch.equal(a[key], b[key]), key
        torch.testing.assert_close(a["return"], b["return"], rtol=1e-4, atol=1e-5)
    assert len(recorded[1]) == 2 and recorded[1][0]["obs"].float().std() > 1


def test_rewards_are_clipped_and_scores_are_not():
    """A pellet of Ms. Pac-Man pays 10."""
    env = load(ATARI[0]).make_envs("MsPacman-v5", [1])
    env.reset()
    steps = [env.step(np.full(1, t // 20 % 9)) for t in range(200)]
    assert {reward[0] for _, reward, *_ in steps} == {0, 1}
    assert max(info["reward"][0] for *_, info in steps) >= 10
    env.close()


def test_envpools_time_limit_truncates_a_game_and_resets_a_step_later():
    script, limit = load(ATARI[0]), 20
    env = envpool.make("Breakout-v5", env_type="gymnasium", num_envs=1, episodic_life=True, max_episode_steps=limit)
    env.reset()
    scores, games = np.zeros(1), []
    for step in range(1, 2 * limit + 3):
        _, _, terminated, truncated, info = env.step(np.zeros(1, int))
        assert truncated[0] == (step in (limit, 2 * limit + 1)) and not terminated[0]
        games += [(step, game["l"]) for game in script.games_that_end(info, truncated, scores)]
    assert games == [(limit, limit), (2 * limit + 1, limit)]  # between the games, a row without a reward
    env.close()


def test_envpool_resets_a_step_after_an_end_and_ignores_that_steps_action():
    """What the masks rest on: two pools are given other actions where a reset is due, and play the same games."""
    script, rng = load(ATARI[0]), np.random.default_rng(0)
    a, b = (script.make_envs("Breakout-v5", [1, 2, 3, 4]) for _ in range(2))
    a.reset(), b.reset()
    due, lives, ends, games = np.zeros(4, bool), np.full(4, 5), 0, 0
    for _ in range(600):
        action = rng.integers(4, size=4)
        obs, reward, terminated, truncated, info = a.step(action)
        same, *_ = b.step(np.where(due, rng.integers(4, size=4), action))
        assert np.array_equal(obs, same)
        assert not reward[due].any() and not info["reward"][due].any() and not (terminated | truncated)[due].any()
        assert np.array_equal(terminated, ~due & (info["lives"] < lives))
        assert np.array_equal(info["terminated"] > 0, terminated & (info["lives"] == 0))  # a game's end, not a life's
        due, lives = terminated | truncated, info["lives"]
        ends, games = ends + terminated.sum(), games + (info["terminated"] > 0).sum()
    assert ends > 20 and games > 3
    a.close(), b.close()


@pytest.mark.parametrize("name", PPO)
def test_a_rollout_with_one_valid_row_is_no_divergence(monkeypatch, name):
    """Of two rows the second one counts where the first is a reset; the variance of a single return is 0."""
    if name in ATARI:
        monkeypatch.setattr(load(name), "make_envs", ScriptedPool)
    sizes = {"num_envs": 1, "num_steps": 2, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 64}
    run = train(monkeypatch, name, env_id=SCRIPTED[name in DISCRETE], seed=0, **sizes)
    assert run.metrics["global_step"] == 64


@pytest.mark.parametrize("name", PPO_CONTINUOUS)
def test_observations_keep_their_fractions_though_the_first_are_integers(monkeypatch, name):
    seen = []
    monkeypatch.setattr(load(name), "normalize_obs", lambda stats, obs: seen.append(obs.copy()) or obs)
    train(monkeypatch, name, env_id="IntegerResetEnv-v0", num_steps=8, num_minibatches=1, total_timesteps=8)
    assert seen[0].tolist() == [[0, 1]] and seen[1].tolist() == [[0.25, 0.75]]
