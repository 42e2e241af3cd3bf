"""FastTD3's own parts: the projection of a distribution, sums of n rewards, and a ring whose resets do not count."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FAST_TD3, load, tiny, train

script = load("td3_mujoco")


def project_by_a_loop(probability, reward, discount, support) -> np.ndarray:
    """Algorithm 1 of Bellemare et al. 2017 in float64, an atom at a time."""
    low, high = float(support[0]), float(support[-1])
    gap = (high - low) / (len(support) - 1)
    result = np.zeros(probability.shape)
    for row in range(len(probability)):
        for atom, value in enumerate(support):
            place = (min(max(float(reward[row]) + float(discount[row]) * float(value), low), high) - low) / gap
            below, above = int(np.floor(place)), int(np.ceil(place))
            if below == above:
                result[row, below] += probability[row, atom]
            else:
                result[row, below] += probability[row, atom] * (above - place)
                result[row, above] += probability[row, atom] * (place - below)
    return result


def projected(probability, reward, discount, support) -> list:
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (probability, reward, discount, support))
    return script.project(*tensors).tolist()


@pytest.mark.parametrize("num_atoms", [2, 3, 101])
def test_the_projection_is_that_of_a_loop(num_atoms):
    rng = np.random.default_rng(num_atoms)
    probability = rng.dirichlet(np.ones(num_atoms), 64)
    reward = rng.normal(0, 5, 64)
    discount = rng.choice([0, 0.9, 0.99**3], 64)
    support = np.linspace(-10, 7, num_atoms)
    found = projected(probability, reward, discount, support)
    np.testing.assert_allclose(found, project_by_a_loop(probability, reward, discount, support), atol=1e-12)


HAND = {  # on the support -2, 0, 2: probability, reward, discount, and what comes of it
    "a return beyond the largest atom": ([0, 0, 1], 3, 1, [0, 0, 1]),
    "a return below the least atom": ([1, 0, 0], -3, 1, [1, 0, 0]),
    "just the largest atom": ([0, 0.25, 0.75], 2, 0, [0, 0, 1]),
    "just the least atom": ([0, 0.25, 0.75], -2, 0, [1, 0, 0]),
    "nothing moves": ([0.2, 0.3, 0.5], 0, 1, [0.2, 0.3, 0.5]),
    "a termination": ([0.2, 0.3, 0.5], 1, 0, [0, 0.5, 0.5]),
    "half a gap": ([0.5, 0.5, 0], 1, 1, [0.25, 0.5, 0.25]),
    "half the discount": ([0.4, 0.2, 0.4], 0, 0.5, [0.2, 0.6, 0.2]),
}


@pytest.mark.parametrize("case", HAND)
def test_the_projection_by_hand(case):
    probability, reward, discount, expected = HAND[case]
    (found,) = projected([probability], [reward], [discount], [-2, 0, 2])
    assert found == pytest.approx(expected)


def test_numbers_that_are_not_finite_do_not_crash_the_projection():
    """The report says so; an index beyond the ring's memory would end the program on a GPU."""
    for number in (torch.nan, torch.inf):
        found = script.project(
            torch.full((1, 3), 1 / 3), torch.tensor([number]), torch.ones(1), torch.tensor([-1.0, 0, 1])
        )
        assert found.shape == (1, 3)


def test_on_a_degenerate_support_the_mean_is_the_target_of_td3():
    """All mass on two atoms at the ends, as a linear critic has it, and targets between them."""
    rng = torch.Generator().manual_seed(0)
    support = torch.tensor([-1000.0, 1000.0], dtype=torch.float64)
    batch = {"reward": torch.randn(32, generator=rng).double(), "terminated": (torch.arange(32) % 4 == 0).double()}
    next_value = torch.empty(32).uniform_(-40, 40, generator=rng).double()
    probability = torch.stack([1000 - next_value, 1000 + next_value], -1) / 2000
    discount = 0.99 * (1 - batch["terminated"])
    mean = script.project(probability, batch["reward"], discount, support) @ support
    torch.testing.assert_close(mean, load("td3_continuous_action").td_target(batch, next_value, 0.99))


def test_the_smaller_mean_wins():
    support = torch.tensor([-1.0, 0.0, 1.0])
    logits = torch.tensor([[[0.0, 0, 5], [5.0, 0, 0]], [[0.0, 0, 4], [4.0, 0, 0]]])  # of two critics, in two states
    expected = torch.stack([logits[1, 0], logits[0, 1]]).softmax(-1)
    torch.testing.assert_close(script.smaller(logits, support), expected)


def test_the_loss_is_the_cross_entropy_over_rows_that_count():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 5, generator=rng)
    target = torch.rand(6, 5, generator=rng).softmax(-1)
    valid = torch.tensor([1.0, 0, 1, 1, 0, 1])
    support = torch.linspace(-2, 2, 5)
    loss, losses = script.distribution_losses(logits, target, valid / valid.sum(), support)
    keep = valid > 0
    expected = [torch.nn.functional.cross_entropy(x[keep], target[keep]) for x in logits]
    torch.testing.assert_close(loss, sum(expected))
    torch.testing.assert_close(losses["qf2_loss"], expected[1])
    torch.testing.assert_close(losses["qf1_values"], (logits[0, keep].softmax(-1) @ support).mean())


def written_ring(newest: int, rows: int, num_envs: int) -> tuple[torch.Tensor, list[dict]]:
    """A ring of episodes that end in both ways, as a run writes it, and each row ever written."""
    rng = np.random.default_rng(0)
    ring = torch.zeros(rows, num_envs, 2 + 1 + 3, dtype=torch.float64)
    done = np.zeros(num_envs, bool)
    history = []
    for time in range(newest + 1):
        resets = done | (time == 0)
        terminated = (rng.random(num_envs) < 0.15) & ~resets
        truncated = (rng.random(num_envs) < 0.15) & ~resets
        broken = (rng.random(num_envs) < 0.05) & ~resets  # reset at once, since its numbers were not finite
        valid = ~resets & ~broken
        done = terminated & valid | truncated | broken
        reward = np.where(valid, rng.normal(size=num_envs), 0)
        written = {"reward": reward, "terminated": terminated & valid, "valid": valid}
        history.append(written)
        outcome = torch.tensor(np.stack([*written.values()], -1).astype(float))
        place = torch.tensor([[time, i, time + 0.5] for i in range(num_envs)])
        ring[time % rows] = torch.cat([place, outcome], -1)
    return ring, history


def sum_by_recursion(history, time: int, i: int, n: int, gamma: float) -> tuple[float, float, int]:
    """Return, discount of the next value, and time of the next observation, from the step that led to row `time`."""
    reward = float(history[time]["reward"][i])
    if history[time]["terminated"][i]:
        return reward, 0.0, time
    if n == 1 or not history[time + 1]["valid"][i]:  # the rest is another episode
        return reward, gamma, time
    later, discount, last = sum_by_recursion(history, time + 1, i, n - 1, gamma)
    return reward + gamma * later, gamma * discount, last


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("newest", [12, 40, 90])  # before the ring is full, and after
def test_a_batch_sums_n_rewards_of_one_episode(n, newest):
    ring, history = written_ring(newest, rows=20, num_envs=3)
    args = SimpleNamespace(num_steps=n, batch_size=4000, gamma=0.9)
    torch.manual_seed(0)
    starts = min(newest, 19) - (n - 1)
    batch = script.sample_n_steps(ring, newest, starts, 2, args)
    seen = set()
    counted = 0
    for k in range(args.batch_size):
        before, i = (int(x) for x in batch["obs"][k])
        first = before + 1
        seen.add((first, i))
        valid = history[first]["valid"][i]
        counted += valid
        assert (batch["weight"][k] > 0) == valid  # a mere reset has no weight
        if not valid:
            continue
        return_, discount, last = sum_by_recursion(history, first, i, n, args.gamma)
        assert batch["action"][k].item() == first + 0.5
        assert batch["reward"][k].item() == pytest.approx(return_, rel=1e-5, abs=1e-6)
        assert batch["discount"][k].item() == pytest.approx(discount)
        assert batch["next_obs"][k].tolist() == [last, i] or discount == 0
    assert seen == {(newest - n + 1 - back, i) for back in range(starts) for i in range(3)}  # each start, and no other
    torch.testing.assert_close(batch["weight"], (batch["weight"] > 0).double() / counted)


def test_three_steps_by_hand():
    """gamma = 0.5. World 0 terminates in its second step; world 1 is truncated there; world 2 goes on."""
    ring = torch.zeros(4, 3, 1 + 1 + 3)
    ring[..., 0] = torch.arange(4)[:, None]  # the observation tells the time
    ring[1:, :, -3] = torch.tensor([1.0, 2, 4])[:, None]
    ring[1:, :, -1] = 1
    ring[3, :2, -3] = ring[3, :2, -1] = 0  # the third step only resets two of them
    ring[2, 0, -2] = 1
    batch = script.sample_n_steps(ring, 3, 1, 1, SimpleNamespace(num_steps=3, batch_size=64, gamma=0.5))
    found = {tuple(float(batch[name][k].sum()) for name in ("reward", "discount", "next_obs")) for k in range(64)}
    assert found == {(2.0, 0.0, 2.0), (2.0, 0.25, 2.0), (3.0, 0.125, 3.0)}


@pytest.mark.parametrize("name", FAST_TD3)
def test_a_run_too_short_to_learn_warns_and_runs(monkeypatch, capsys, name):
    run = train(monkeypatch, name, **tiny(name) | {"total_timesteps": 40})
    assert "--learning-starts" in capsys.readouterr().err
    assert run.metrics["global_step"] == 40 and "qf_loss" not in run.metrics


def test_worlds_differ_in_their_noise(monkeypatch):
    """With an actor that stands still, actions show the noise: as the flags say in the first and the last world."""
    actions = []
    step_worlds = script.step_worlds
    monkeypatch.setattr(
        script, "step_worlds", lambda env, w, action, u: actions.append(action) or step_worlds(env, w, action, u)
    )
    monkeypatch.setattr(script.Actor, "forward", lambda self, obs: 0 * self.layers(obs))
    sizes = {"num_envs": 3, "learning_starts": 3, "total_timesteps": 1200, "num_updates": 1, "policy_frequency": 1}
    train(monkeypatch, "td3_mujoco", **tiny("td3_mujoco") | sizes, std_min=0.01, std_max=0.2)
    stds = torch.stack(actions[3:]).std((0, 2))
    assert stds.tolist() == pytest.approx([0.2, 0.105, 0.01], rel=0.1)


def test_the_adamw_of_the_twin_is_pytorchs():
    twin = load("td3_mujoco_torchcompile")
    param = torch.randn(50)
    reference = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([reference], lr=1e-2, weight_decay=0.3)
    state = [torch.zeros(50)], [torch.zeros(50)], torch.zeros((), dtype=torch.long)
    args = SimpleNamespace(learning_rate=1e-2, weight_decay=0.3)
    for i in range(200):
        reference.grad = torch.randn(50) * 10.0 ** (i % 5 - 2)
        optimizer.step()
        twin.adamw_([param], [reference.grad], *state, args)
    torch.testing.assert_close(param, reference.detach(), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run whose ring wraps: its steps, samples and updates, what the actor saw, its moments and its checkpoints."""
    seen = SimpleNamespace(steps=[], samples=[], batches=[], actor=[], moments=[], saved=[], actor_updates=0)
    step_worlds, sample, learn = script.step_worlds, script.sample_n_steps, script.learn_distributions
    add_moments, forward = script.add_moments, script.Actor.forward
    learn_mean_actor, save = script.learn_mean_actor, script.save_checkpoint

    def watch_step(env, worlds, action, uniform):
        before = env.observation(worlds["state"]).clone()
        now, reward, terminated, valid = step_worlds(env, worlds, action, uniform)
        after = env.observation(now["state"]).float()
        step = {"before": before, "after": after, "action": action, "reward": reward, "valid": valid}
        seen.steps.append(step | {"terminated": terminated})
        return now, reward, terminated, valid

    def watch_moments(moments, x, valid):
        add_moments(moments, x, valid)
        seen.moments.append(moments.clone())

    def watch_sample(ring, newest, starts, *rest):
        batch = sample(ring, newest, starts, *rest)
        seen.samples.append((ring.clone(), newest, starts, dict(batch)))
        return batch

    def watch_learn(batch, *rest):
        seen.batches.append(batch)
        return learn(batch, *rest)

    def watch_actor(*args):
        seen.actor_updates += 1
        return learn_mean_actor(*args)

    def watch_forward(self, obs):
        if len(obs) == 4:  # acting in the worlds
            seen.actor.append(obs)
        return forward(self, obs)

    def watch_save(run_dir, args, kept):
        seen.saved.append(kept)
        save(run_dir, args, kept)

    names = {"step_worlds": watch_step, "add_moments": watch_moments, "sample_n_steps": watch_sample}
    names |= {"learn_distributions": watch_learn, "learn_mean_actor": watch_actor, "save_checkpoint": watch_save}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("watched"))
        for name, function in names.items():
            patch.setattr(script, name, function)
        patch.setattr(script.Actor, "forward", watch_forward)
        sizes = {"total_timesteps": 832, "learning_starts": 800, "checkpoint_interval": 400, "std_max": 2.0}
        train(patch, "td3_mujoco", **tiny("td3_mujoco") | sizes)
    return seen


def test_the_ring_holds_what_happened(watched):
    ring, newest, starts, _ = watched.samples[-1]
    assert len(ring) == 151 and newest == 208 == len(watched.steps) and starts == 150 - 2
    for time in range(newest - 150, newest + 1):
        step = watched.steps[time - 1]  # a row is written after the step that led to it
        outcome = torch.stack([step[name].float() for name in ("reward", "terminated", "valid")], -1)
        assert (ring[time % 151] == torch.cat([step["after"], step["action"], outcome], -1)).all()
    assert any((~step["valid"]).any() for step in watched.steps[-150:])


def test_actions_are_drawn_from_all_that_are_allowed(watched):
    actions = torch.stack([step["action"] for step in watched.steps])
    assert (actions.abs() <= 1).all() and (actions[200:].abs() == 1).any()  # noise that goes beyond is cut off
    assert actions[:200].min() < -0.9 and actions[:200].max() > 0.9 and abs(actions[:200].mean()) < 0.1


def test_observations_are_normalized_by_those_of_the_run(watched):
    """A reset's observation does not count. Acting and learning use the moments of then."""
    rows = torch.cat([step["before"][step["valid"]] for step in watched.steps]).double()
    count, mean, variance = watched.moments[-1]
    assert (count == len(rows)).all()
    torch.testing.assert_close(mean, rows.mean(0))
    torch.testing.assert_close(variance, rows.var(0, correction=0))
    for obs, step, moments in zip(watched.actor, watched.steps[200:], watched.moments[199:]):
        assert (obs == script.normalize(moments, step["before"])).all()
    for k, ((*_, sampled), batch) in enumerate(zip(watched.samples, watched.batches)):
        for name in ("obs", "next_obs"):
            assert (batch[name] == script.normalize(watched.moments[200 + k // 4], sampled[name])).all()


def test_each_step_is_followed_by_its_updates(watched):
    assert len(watched.actor) == 8 and len(watched.batches) == 4 * 8 and watched.actor_updates == 2 * 8


def test_a_checkpoint_keeps_the_ring_up_to_its_newest_row(watched):
    first = watched.saved[0]
    assert first["step"] == 100 and len(first["replay"]) == 101
    assert (first["replay"][-1, :, :11] == watched.steps[99]["after"]).all()


def test_the_exported_policy_normalizes_and_keeps_the_bounds():
    actor = script.Actor(3, 2)
    moments = torch.tensor([[9.0] * 3, [1.0, 50.0, -3.0], [4.0, 100.0, 0.25]], dtype=torch.float64)
    bounds = torch.tensor([[0.5, 0.0], [2.0, 1.0], [-1.5, -1.0], [2.5, 0.001]])
    obs = torch.randn(64, 3, dtype=torch.float64) * 10
    expected = (bounds[0] + bounds[1] * actor(script.normalize(moments, obs))).clamp(bounds[2], bounds[3])
    torch.testing.assert_close(script.NormalizedPolicy(actor, moments, bounds)(obs), expected)


class ConstantCritic(torch.nn.Module):
    """Values every action as one atom, or as the action says."""

    def __init__(self, atom: int | None):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.atom = atom

    def forward(self, obs, action):
        if self.atom is None:
            return torch.cat([-action, 0 * action, action], -1) + self.bias
        return 50 * torch.nn.functional.one_hot(torch.full((len(obs),), self.atom), 3) + self.bias


def test_the_target_is_that_of_the_smaller_critic_at_a_smoothed_action(monkeypatch):
    support = torch.tensor([-1.0, 0.0, 1.0])
    batch = {"obs": torch.zeros(4, 1), "next_obs": torch.zeros(4, 1), "action": torch.zeros(4, 1)}
    batch |= {"reward": torch.zeros(4), "discount": torch.ones(4), "weight": torch.full((4,), 0.25)}
    smoothed, targets = [], []
    monkeypatch.setattr(script, "smooth", lambda action, args: smoothed.append(action) or action + 1)
    losses = script.distribution_losses
    monkeypatch.setattr(script, "distribution_losses", lambda *a: targets.append(a[1]) or losses(*a))
    critics = torch.nn.ModuleList([ConstantCritic(0), ConstantCritic(1)])
    for pair in ((2, 0), (0, 2), (1, 2)):
        optimizer = torch.optim.SGD(critics.parameters(), lr=0.0)
        of_target = [ConstantCritic(atom) for atom in pair]
        script.learn_distributions(batch, lambda obs: obs, critics, of_target, optimizer, support, None)
        assert (targets[-1].argmax(-1) == min(pair)).all()
    of_target = [ConstantCritic(None), ConstantCritic(2)]
    script.learn_distributions(batch, lambda obs: obs, critics, of_target, optimizer, support, None)
    torch.testing.assert_close(targets[-1][0], torch.tensor([-1.0, 0.0, 1.0]).softmax(-1))  # of action 0 + 1
    assert len(smoothed) == 4


def test_the_actor_climbs_the_first_critic_over_rows_that_count_and_targets_follow():
    support = torch.tensor([-1.0, 0.0, 1.0])
    actor, actor_target = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    critics = torch.nn.ModuleList([ConstantCritic(None), ConstantCritic(0)])
    critics_target = torch.nn.ModuleList([ConstantCritic(1), ConstantCritic(1)])
    critics[0].bias.data[:] = torch.tensor([0.3, 0.2, 0.1])
    batch = {"obs": torch.tensor([[1.0], [5.0]]), "weight": torch.tensor([1.0, 0.0])}
    before = actor_target.weight.clone()
    action = actor(batch["obs"]).detach()
    value = (torch.cat([-action, 0 * action, action], -1) + critics[0].bias).softmax(-1) @ support
    old = actor.weight.clone()
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    args = SimpleNamespace(tau=0.25)
    losses = script.learn_mean_actor(batch, actor, actor_target, critics, critics_target, optimizer, support, args)
    torch.testing.assert_close(losses["actor_loss"], -value[0].detach())
    assert actor.weight > old  # a larger action has a larger value
    torch.testing.assert_close(actor_target.weight, 0.75 * before + 0.25 * actor.weight)
    torch.testing.assert_close(critics_target[0].bias, 0.25 * critics[0].bias)


RAIL = """<mujoco><option timestep="0.02"/><worldbody>
<body><joint name="rail" type="slide" axis="1 0 0" damping="5"/><geom size="0.1"/></body></worldbody>
<actuator><motor joint="rail" ctrlrange="-1 1" gear="20"/></actuator></mujoco>"""


class Rail(script.HalfCheetah):
    """A ball on a rail. Each of 50 steps pays 1 near place 1, and less elsewhere."""

    xml = Path("rail.xml")
    time_limit = 50

    @staticmethod
    def outcome(old: dict, new: dict, ctrl, dt: float):
        place = new["qpos"][:, 0]
        return (-((place - 1) ** 2)).exp(), torch.zeros_like(place, dtype=torch.bool)

    @staticmethod
    def observe(now: dict):
        return torch.cat([now["qpos"], now["qvel"]], -1)


@pytest.mark.slow
def test_a_ball_learns_to_stay_at_its_place(monkeypatch, own_folder):
    Rail.xml.write_text(RAIL)
    monkeypatch.setitem(script.ROBOTS, "Rail", Rail)
    sizes = {"num_envs": 16, "total_timesteps": 11_200, "learning_starts": 1600, "num_updates": 2}
    run = train(monkeypatch, "td3_mujoco", env_id="Rail", v_min=-100.0, v_max=100.0, **sizes)
    assert run.metrics["episodic_return"] > 35  # 20 where it starts, 45 at best
