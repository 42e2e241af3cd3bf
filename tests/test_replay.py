"""The off-policy loops on episodes known in advance: what they store, draw, mask and count; and their formulas."""

import conftest
import numpy as np
import pytest
import torch
from conftest import SLICED, BoundedEnv, DoubleEnv, ScriptedEnv, largest_difference, load, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.flop_counter import FlopCounterMode

OFF_POLICY = [name for name in conftest.OFF_POLICY if name not in SLICED]  # whose batches hold single transitions
CONTINUOUS = [name for name in OFF_POLICY if "continuous" in name]
SAC = ["sac_continuous_action", "sac_continuous_action_torchcompile"]
# One env, times 0 .. 12. Episodes: 2 steps (terminated), 3 (truncated), 1 (both), 2 (terminated); each end is followed
# by a step that only resets. obs is (env, episode, step); the others are of the step that led to it.
OBS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0)]
REWARD = [0, 1, 2, 0, 11, 12, 13, 0, 21, 0, 31, 32, 0]
TERMINATED = [0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0]
VALID = [0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0]


def record(monkeypatch, name: str, **args):
    """Trains on scripted episodes; returns the ring, and what sample() was given and gave, in order."""
    script, rings, draws = load(name), [], []
    original_sample = script.sample
    ScriptedEnv.actions.clear(), ScriptedEnv.seeds.clear()

    def spied_sample(ring, newest, pairs, batch_size, obs_dim):
        rings.append(ring)
        batch = original_sample(ring, newest, pairs, batch_size, obs_dim)
        draws.append((int(newest), int(pairs), {k: v.clone() for k, v in batch.items()}))
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(script, "sample", spied_sample)
        problem = {"env_id": "BoundedEnv-v0", "learning_starts": 4, "batch_size": 64, "buffer_size": 100}
        if "dqn" in name:
            problem |= {"env_id": "DiscreteScriptedEnv-v0", "train_frequency": 2}
        run = train(patch, name, **problem | args)
    return rings[0], draws, run


def scale_(actor, factor: float):
    """Multiplies the weights of the last layer, so that tanh is at its ends."""
    with torch.no_grad():
        actor.layers[-1].weight *= factor


@pytest.mark.parametrize("name", OFF_POLICY)
@pytest.mark.parametrize("buffer_size", [100, 5])  # with 5, the ring wraps, two rows at once lie at its end and start
def test_the_ring_holds_the_steps_worked_out_by_hand(monkeypatch, name, buffer_size):
    ring, _, _ = record(monkeypatch, name, total_timesteps=13, buffer_size=buffer_size)
    assert len(ring) == buffer_size + 1
    executed = iter(ScriptedEnv.actions)
    actions = [next(executed) if valid else None for valid in VALID[1:]]
    # Times 9 .. 12 at least are there in any case: some scripts store the newest row at their next step only.
    for t in range(9 if buffer_size == 5 else 0, 13):
        *obs, reward, terminated, valid = ring[t % len(ring), 0, [0, 1, 2, -3, -2, -1]].tolist()
        assert obs == [0, *OBS[t]], t
        if t:
            assert (reward, terminated, valid) == (REWARD[t], TERMINATED[t], VALID[t]), t
        if VALID[t]:
            action = ring[t % len(ring), 0, 3:-3].numpy()
            if name in CONTINUOUS:  # from -1 .. 1 to the bounds
                low, high = BoundedEnv.action_space.low, BoundedEnv.action_space.high
                action = (low + high) / 2 + (high - low) / 2 * action
            np.testing.assert_allclose(action, actions[t - 1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("buffer_size", [100, 5])
@pytest.mark.parametrize("name", OFF_POLICY)
def test_batches_hold_the_transitions_up_to_now_and_nothing_else(monkeypatch, name, buffer_size):
    _, draws, _ = record(monkeypatch, name, total_timesteps=13, buffer_size=buffer_size)
    times = {(0.0, *map(float, obs)): t for t, obs in enumerate(OBS)}
    seen = set()
    for newest, pairs, batch in draws:
        assert pairs == min(newest, buffer_size)
        after = [times[tuple(obs)] for obs in batch["next_obs"].tolist()]
        assert min(after) > newest - pairs and max(after) <= newest
        assert [times[tuple(obs)] for obs in batch["obs"].tolist()] == [t - 1 for t in after]
        assert batch["reward"].tolist() == [REWARD[t] for t in after]
        assert batch["terminated"].tolist() == [TERMINATED[t] for t in after]
        count = sum(VALID[t] for t in after)
        assert batch["weight"].tolist() == pytest.approx([VALID[t] / count for t in after])
        seen |= set(after)
    assert [newest for newest, _, _ in draws] == list(range(4, 13, 2 if "dqn" in name else 1))
    assert {t for t in seen if VALID[t]} == {t for t in range(1, draws[-1][0] + 1) if VALID[t]}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_two_envs_share_a_ring_and_count_together(monkeypatch, name):
    ring, draws, run = record(monkeypatch, name, total_timesteps=20, num_envs=2, seed=3)
    assert ring.shape[:2] == (51, 2)  # 100 transitions
    # env 1: 4 steps (truncated), a reset, 2 steps (terminated), a reset, ...
    assert ring[:9, 1, 2].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert ring[1:9, 1, -3].tolist() == [1, 2, 3, 4, 0, 11, 12, 0]
    assert ring[1:9, 1, -2].tolist() == [0, 0, 0, 0, 0, 0, 1, 0]
    assert ring[1:9, 1, -1].tolist() == [1, 1, 1, 1, 0, 1, 1, 0]
    assert ring[:9, 0, 1:3].tolist() == [list(obs) for obs in OBS[:9]]
    updates = {newest: sum(n == newest for n, _, _ in draws) for newest, _, _ in draws}
    assert updates == {t: 1 if "dqn" in name else 2 for t in range(2, 10)}  # an update an env step, DQN every other
    assert any(0 in batch["obs"][:, 0] and 1 in batch["obs"][:, 0] for _, _, batch in draws)
    assert ScriptedEnv.seeds[:2] == [30_000, 30_001] and set(ScriptedEnv.seeds[2:]) == {None}
    events = EventAccumulator(str(run.run_dir)).Reload()
    ended = [(e.step, e.value) for e in events.Scalars("charts/episodic_return")]
    assert ended == [(4, 3), (8, 10), (12, 36), (14, 23), (16, 21)]
    assert [e.value for e in events.Scalars("charts/episodic_length")] == [2, 4, 3, 2, 1]


@pytest.mark.parametrize("name", OFF_POLICY)
def test_an_update_comes_before_the_step_of_the_envs(monkeypatch, name):
    """So that a GPU has something to do while the envs step."""
    script, order = load(name), []
    sample, step_envs = script.sample, script.step_envs
    monkeypatch.setattr(script, "sample", lambda *args: order.append("learn") or sample(*args))
    monkeypatch.setattr(script, "step_envs", lambda *args: order.append("step") or step_envs(*args))
    train(monkeypatch, name, **tiny(name) | {"total_timesteps": 921})
    frequency = 10 if "dqn" in name else 1
    assert order[:900] == ["step"] * 900
    assert order[900:] == (["learn"] + ["step"] * frequency) * (20 // frequency) + ["learn", "step"]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_actions_respect_each_dimensions_bounds(monkeypatch, name):
    """The first 300 are uniform; those of the policy stay within, too, however loud TD3's noise is."""
    noise = {"exploration_noise": 1.0} if "td3" in name else {}
    record(monkeypatch, name, total_timesteps=600, learning_starts=450, **noise)
    actions, low, high = np.array(ScriptedEnv.actions), np.array([-0.5, -3.0]), np.array([0.1, 2.0])
    assert (actions >= low - 1e-6).all() and (actions <= high + 1e-6).all()
    if noise:
        assert np.ptp(actions[300:], axis=0) == pytest.approx(high - low)
    share = (actions[:300] - low) / (high - low)
    assert (abs(share.mean(0) - 0.5) < 0.06).all() and (abs(share.std(0) - 12**-0.5) < 0.03).all()
    assert len(np.unique(actions, axis=0)) > 0.9 * len(actions)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_actions_respect_bounds_that_float32_rounds_away(monkeypatch, name):
    """-0.5 + 1e-9 is -0.5 in float32. Loud noise and a large gain drive the policy to its bounds."""
    box = DoubleEnv.action_space
    tight = type(box)(box.low + 1e-9, box.high - 1e-9, dtype=np.float64)
    monkeypatch.setattr(DoubleEnv, "action_space", tight)
    loud = {"exploration_noise": 3.0} if "td3" in name else {}
    if "sac" in name:
        layers = load(name).GaussianActor.__init__
        monkeypatch.setattr(
            load(name).GaussianActor, "__init__", lambda self, *dims: (layers(self, *dims), scale_(self, 100.0))[0]
        )
    record(monkeypatch, name, env_id="DoubleEnv-v0", total_timesteps=100, **loud)
    actions = np.array(ScriptedEnv.actions)
    assert (actions >= tight.low).all() and (actions <= tight.high).all()
    assert (actions == tight.low).any() and (actions == tight.high).any()


@pytest.mark.parametrize("name", OFF_POLICY)
def test_sample_is_uniform_and_takes_numbers_or_tensors(name):
    """A ring of 5 rows after time 11: rows 7 .. 11 are there, so 4 pairs of each of 3 envs."""
    script, ring = load(name), torch.zeros(5, 3, 1 + 1 + 3)
    for t in range(12):
        ring[t % 5, :, 0] = 10 * t + torch.arange(3.0)
    ring[..., -1] = 1
    torch.manual_seed(0)
    batch = script.sample(ring, 11, 4, 12_000, 1)
    torch.manual_seed(0)
    same = script.sample(ring, torch.tensor(11), torch.tensor(4), 12_000, 1)
    assert all(torch.equal(batch[key], same[key]) for key in batch)
    assert torch.equal(batch["next_obs"], batch["obs"] + 10)
    values, counts = batch["obs"].unique(return_counts=True)
    assert values.tolist() == [10 * t + n for t in range(7, 11) for n in range(3)]
    assert counts.min() > 850 and counts.max() < 1150  # 1000 each, deviation 30


@pytest.mark.parametrize("name", OFF_POLICY)
def test_rows_of_resets_are_drawn_anew(name):
    """The first of three draws that counts is taken: if half of the rows are resets, an eighth of a batch is left."""
    script, ring = load(name), torch.zeros(100, 2, 1 + 1 + 3)
    ring[..., 0] = torch.arange(200.0).view(100, 2)
    ring[::2, :, -1] = 1
    batch = script.sample(ring, 99, 98, 40_000, 1)
    assert (batch["weight"] > 0).float().mean().item() == pytest.approx(7 / 8, abs=0.01)
    drawn, counts = batch["next_obs"][batch["weight"] > 0].unique(return_counts=True)
    assert len(drawn) == 2 * 49 and counts.min() > 280 and counts.max() < 440  # 357 each, deviation 19
    assert batch["weight"].sum().item() == pytest.approx(1, abs=1e-3)


def test_every_row_of_a_large_ring_can_be_drawn():
    """Above 2^24 a float32 holds even numbers only."""
    rows = 20_000_000
    ring = torch.ones(rows, 1, 4, dtype=torch.int32)
    ring[:, 0, 0] = torch.arange(rows)
    drawn = load("dqn").sample(ring, rows - 1, rows - 1, 4000, 1)["next_obs"]
    late = drawn[drawn > 2**24]
    assert len(late) > 400 and 0.4 < (late % 2).double().mean() < 0.6
    assert drawn.min() < rows / 100 and drawn.max() > rows * 0.99


def test_tanh_gaussian_against_torch():
    actor, obs = load("sac_continuous_action").GaussianActor(4, 2), torch.randn(64, 4)
    action, logprob = actor(obs)
    mean, logstd = actor.layers(obs).chunk(2, -1)
    base = torch.distributions.Normal(mean, (-1.5 + 3.5 * logstd.tanh()).exp())
    reference = torch.distributions.TransformedDistribution(base, [torch.distributions.TanhTransform()])
    torch.testing.assert_close(logprob, reference.log_prob(action).sum(-1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", SAC)
def test_a_fixed_temperature_stays(monkeypatch, name):
    run = train(monkeypatch, name, **tiny(name), autotune=False, alpha=0.3)
    assert run.metrics["alpha"] == pytest.approx(0.3) and "alpha_loss" not in run.metrics


@pytest.mark.parametrize("name", SAC)
def test_targets_stay_until_they_are_due(monkeypatch, name):
    """With the targets moved every 100 updates of 50, they never move: their rate makes no difference."""
    problem = tiny(name) | {"learning_starts": 974, "target_network_frequency": 100}
    a, b = (train(monkeypatch, name, **problem, tau=tau).parameters for tau in (0.005, 1.0))
    assert all(torch.equal(a[k], b[k]) for k in a)
    c, d = (
        train(monkeypatch, name, **problem | {"target_network_frequency": 2}, tau=tau).parameters
        for tau in (0.005, 1.0)
    )
    assert not all(torch.equal(c[k], d[k]) for k in c)


def one_number(network: type, biases: list[float]) -> type:
    """Networks whose value is their last bias, whatever the inputs; the first have the given biases."""
    biases = iter(biases)

    class OneNumber(network):
        def __init__(self, *dims):
            super().__init__(*dims)
            torch.nn.init.constant_(self.layers[-1].bias, next(biases))

        def forward(self, obs, *action):
            return 0 * super().forward(obs, *action) + self.layers[-1].bias.mean()

    return OneNumber


def constant_logprob(monkeypatch, script, logprob: float):
    """Makes the actor of SAC say that all its actions have this log density."""
    forward = script.GaussianActor.forward

    def spied(self, obs):
        action, original = forward(self, obs)
        return action, 0 * original + logprob

    monkeypatch.setattr(script.GaussianActor, "forward", spied)


@pytest.mark.parametrize("name", OFF_POLICY)
def test_targets_follow_the_networks_when_due_and_the_lesser_one_counts(monkeypatch, name):
    """With values that are numbers: each target moves by tau of its distance, when due; SAC adds its entropy."""
    script = load(name)
    frequency = {"td3": "policy_frequency", "sac": "target_network_frequency", "dqn": "target_network_frequency"}
    network, values, next_values = script.QNetwork if "dqn" in name else script.Critic, [], []

    report, td_target = script.report, script.td_target

    def spied_report(losses, *rest):
        keys = ("q_values",) if "dqn" in name else ("qf1_values", "qf2_values")
        values.extend([torch.stack([losses[key] for key in keys])] if losses else [])
        return report(losses, *rest)

    def spied_target(batch, next_value, gamma):
        next_values.append(next_value.detach())
        return td_target(batch, next_value, gamma)

    problem = {"policy_lr": 0.0, "q_lr": 0.1} if "sac" in name else {"learning_rate": 0.1}
    problem |= {"autotune": False, "alpha": 0.3} if "sac" in name else {}
    problem |= {"train_frequency": 2} if "dqn" in name else {}
    problem |= tiny(name) | {"learning_starts": 1000, "total_timesteps": 1025, "tau": 0.25}
    with monkeypatch.context() as patch:
        patch.setattr(script, network.__name__, one_number(network, [1.0, 3.0]))
        if "sac" in name:
            constant_logprob(patch, script, 2.0)
        if name == "dqn_torchcompile":
            patch.setattr(script, "relu_mlp_on_host", lambda weights, x: np.ones((len(x), 2)))
        patch.setattr(script, "td_target", spied_target)
        patch.setattr(script, "report", spied_report)
        patch.setattr(script, "REPORT_INTERVAL", 2 if "dqn" in name else 1)  # a report after each update
        train(patch, name, **problem | {frequency[name[:3]]: 4})
    values = torch.stack(values)  # (updates, 2), DQN (updates, 1)
    assert len(values) == len(next_values) == (13 if "dqn" in name else 25)
    assert (values.diff(dim=0) != 0).all()
    targets = torch.tensor([1.0] if "dqn" in name else [1.0, 3.0])
    torch.testing.assert_close(values[0], targets)
    for i, next_value in enumerate(next_values):
        expected = targets.min() - (0.3 * 2.0 if "sac" in name else 0)
        torch.testing.assert_close(next_value, expected.expand(len(next_value)), rtol=1e-5, atol=1e-6)
        # DQN updates at steps 1000, 1002, ... and moves its target at 1000, 1004, ...; the others count updates.
        if (i % 2 == 0 if "dqn" in name else (i + 1) % 4 == 0) and i + 1 < len(values):
            targets = torch.lerp(targets, values[i + 1], 0.25)


@pytest.mark.parametrize("name", SAC)
@pytest.mark.parametrize(("logprob", "direction"), [(1.9, -1), (2.1, 1)])
def test_the_temperature_seeks_an_entropy_of_minus_the_actions_size(monkeypatch, name, logprob, direction):
    """BoundedEnv acts in two dimensions: log densities above 2 raise alpha, below 2 lower it, by Adam's rate a step."""
    constant_logprob(monkeypatch, load(name), logprob)
    problem = tiny(name) | {"env_id": "BoundedEnv-v0", "total_timesteps": 1001}  # reports at 1000, 1001
    run = train(monkeypatch, name, **problem, q_lr=0.001)
    assert run.metrics["alpha"] == pytest.approx(np.exp(direction * 0.001 * 99), rel=0.02)
    assert run.metrics["alpha_loss"] == pytest.approx(-run.metrics["alpha"] * (logprob - 2), rel=0.02)


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("values", [(1.0, 3.0), (3.0, 1.0)])
def test_the_actor_climbs_the_first_value_or_the_lesser_one(monkeypatch, name, values):
    """What TD3 minimises is minus the first critic's value; SAC, without entropy here, minus the lesser one."""
    script, sac = load(name), "sac" in name
    rates = {"q_lr": 0.0, "policy_lr": 0.0, "autotune": False, "alpha": 0.0} if sac else {"learning_rate": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(script, "Critic", one_number(script.Critic, values))
        run = train(patch, name, **tiny(name) | rates)
    assert run.metrics["actor_loss"] == pytest.approx(-min(values) if sac else -values[0])


@pytest.mark.parametrize("name", [name for name in OFF_POLICY if "dqn" in name])
def test_steps_of_several_envs_never_jump_over_a_step_of_the_target(monkeypatch, name):
    """Three envs are at 951 and 1002 steps, not at 950 or 1000, when the target is due: its rate makes a difference."""
    problem = tiny(name) | {"num_envs": 3, "train_frequency": 3, "learning_starts": 905}
    a, b = (train(monkeypatch, name, **problem, tau=tau).parameters for tau in (1e-9, 1.0))
    assert not all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_no_gradient_is_computed_in_vain(monkeypatch, name):
    """Floating-point operations of the matrix products, counted by hand; O = 3, A = 1 in Pendulum."""
    rows, sac = 32, "sac" in name
    with FlopCounterMode(display=False) as counter:
        train(monkeypatch, name, **tiny(name) | {"learning_starts": 1000})
    hidden = 256 * 256
    actor, actor_inner = 3 * 256 + hidden + 256 * (1 + sac), hidden + 256 * (1 + sac)
    critic, critic_inner = 4 * 256 + hidden + 256, hidden + 256
    critics_step = actor + 2 * critic + 2 * (critic + critic + critic_inner)  # targets; values, weights, layers between
    critics_of_actor = 2 if sac else 1
    actor_step = actor + critics_of_actor * (critic + critic) + actor + actor_inner  # no weights of a critic
    steps, actor_steps = 24, 24 if sac else 12
    expected = 2 * rows * (steps * critics_step + actor_steps * actor_step) + 2 * steps * actor
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("name", [name for name in CONTINUOUS if "td3" in name])
def test_td3_asks_its_target_critics_for_the_smoothed_action(monkeypatch, name):
    """With the same action in all targets, how fast the targets move matters by their critics alone."""
    script, asked = load(name), []
    forward = script.Critic.forward

    def spied(self, obs, action):
        asked.append(action)
        return forward(self, obs, action)

    monkeypatch.setattr(script.Critic, "forward", spied)
    monkeypatch.setattr(script, "smooth", lambda action, args: 0 * action + 0.125)
    slow, fast = (train(monkeypatch, name, **tiny(name) | {"total_timesteps": 910}, tau=tau) for tau in (1e-9, 1.0))
    assert (asked[0] == 0.125).all() and len(asked[0]) == 32
    assert largest_difference(slow, fast) > 0


@pytest.mark.parametrize("name", CONTINUOUS)
def test_bounds_in_float64(monkeypatch, name):
    run = train(monkeypatch, name, **tiny(name) | {"env_id": "DoubleEnv-v0"})
    assert {p.dtype for p in run.parameters.values()} == {torch.float32}


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("frequency", [1, 3])
def test_the_actor_learns_when_due(monkeypatch, name, frequency):
    """Every so many updates of the critics; SAC makes up for the wait by as many steps of the actor."""
    script, rows = load(name), []
    network = script.GaussianActor if "sac" in name else script.Actor
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda self, obs: rows.append(len(obs)) or forward(self, obs))
    train(monkeypatch, name, **tiny(name) | {"learning_starts": 1013}, policy_frequency=frequency)
    steps = 11 // frequency * (frequency if "sac" in name else 1)
    assert rows.count(32) == 11 + steps  # for each target, and for each step of the actor; the others act
    assert rows.count(1) == 11


def test_td3_smooths_within_the_clip_and_the_bounds():
    script = load("td3_continuous_action")
    noise = script.smooth(torch.zeros(20_000, 2), script.Args())
    assert noise.abs().amax().item() == pytest.approx(0.5)  # clipped
    torch.testing.assert_close(noise.std(0), torch.tensor([0.2, 0.2]), rtol=0.03, atol=0)
    smoothed = script.smooth(torch.tensor([[1.0, -1.0]]).expand(1000, 2), script.Args())
    assert smoothed.abs().max() <= 1


def test_targets_by_hand():
    script = load("dqn")
    batch = {"reward": torch.tensor([1.0, 2.0, 3.0]), "terminated": torch.tensor([0.0, 1.0, 0.0])}
    target = script.td_target(batch, torch.tensor([10.0, 10.0, 20.0]), 0.5)
    assert target.tolist() == [6.0, 2.0, 13.0]


DQN_MODES = [("dqn", {}), ("dqn_torchcompile", {}), ("dqn_torchcompile", {"compile": True})]
DQN_MODES += [("dqn", {"num_envs": 2}), ("dqn_torchcompile", {"num_envs": 2})]


@pytest.mark.parametrize("mode", DQN_MODES)
def test_epsilon_follows_the_step_in_every_mode(monkeypatch, mode):
    """From 1 at step 0 to 0.05 at half of the steps and on; and exploring means random actions."""
    name, flags = mode
    used, interp = [], np.interp

    def spied(step, *line):
        used.append((step, interp(step, *line)))
        return used[-1][1]

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # epsilon is the host's
    with monkeypatch.context() as patch:
        patch.setattr(np, "interp", spied)
        run = train(patch, name, **tiny(name), **flags)
    expected = range(0, 1024, flags.get("num_envs", 1))
    steps, epsilons = (np.concatenate(arrays)[: len(expected), 0] for arrays in zip(*used, strict=True))
    assert steps.tolist() == list(expected)
    assert epsilons.tolist() == pytest.approx([max(1 - 0.95 * step / 512, 0.05) for step in expected])
    recorded = [(e.step, e.value) for e in EventAccumulator(str(run.run_dir)).Reload().Scalars("charts/epsilon")]
    assert recorded == [
        (500, pytest.approx(1 - 0.95 * 499 / 512, abs=0.004)),
        (1000, pytest.approx(0.05)),
        (1024, pytest.approx(0.05)),
    ]
    for epsilon in (0.0, 1.0):
        ScriptedEnv.actions.clear()
        problem = tiny(name) | {"env_id": "DiscreteScriptedEnv-v0", "learning_rate": 0.0, "seed": 0}
        train(monkeypatch, name, **problem, start_e=epsilon, end_e=epsilon, **flags)
        actions = np.array(ScriptedEnv.actions)
        if epsilon == 1:
            assert set(actions.tolist()) == {1, 2, 3} and np.bincount(actions)[1:].min() > len(actions) / 4.5
        else:
            assert np.bincount(actions).max() > len(actions) / 2.2  # the network's choice, next to constant


@pytest.mark.parametrize("name", ["dqn", "dqn_torchcompile"])
def test_each_env_explores_for_itself(monkeypatch, name):
    """The first of two envs always explores, the second never: its actions alone are the network's."""
    script, seen = load(name), []
    step_envs = script.step_envs

    def spied(envs, action, obs, *rest):
        seen.append((obs.copy(), action.copy()))
        return step_envs(envs, action, obs, *rest)

    monkeypatch.setattr(script, "step_envs", spied)
    monkeypatch.setattr(np, "interp", lambda *line: np.array([[1.0, 0.0]]).repeat(500, 0))
    run = train(monkeypatch, name, **tiny(name) | {"num_envs": 2, "total_timesteps": 300, "learning_starts": 10**6})
    obs, action = (torch.as_tensor(np.stack(arrays)) for arrays in zip(*seen, strict=True))
    q = torch.func.functional_call(script.QNetwork(4, 2), run.parameters, obs)
    same = q.argmax(-1) == action
    assert same[:, 1].all() and 0.2 < same[:, 0].float().mean() < 0.8
