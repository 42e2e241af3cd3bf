"""MuJoCo's worlds: Gymnasium's numbers from either engine, and nothing that one world does to another."""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from catalog import row
from conftest import FAST_TD3, MUJOCO, ROOT, load, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

mujoco_ = load("ppo_mujoco")
CPU = torch.device("cpu")
# The share of steps from Gymnasium's own states whose observations Warp gets right to 1e-3, relative to 1 + |x|. Where
# an ant's leg is steep, Warp turns the pyramid of friction directions otherwise than C MuJoCo.
SHARES = {"Ant-v5": 0.85}


def worlds(env_id: str, physics: str, num_envs: int, **flags):
    return mujoco_.Worlds(mujoco_.ROBOTS[env_id], num_envs, CPU, mujoco_.Args(physics=physics, **flags))


@pytest.fixture(scope="module")
def played() -> dict[str, tuple]:
    """By env, 1,000 steps of Gymnasium's with random actions: the rows before and after, actions, and what it gave."""
    found = {}
    for env_id, task in mujoco_.ROBOTS.items():
        env = gym.make(env_id).unwrapped
        names = ["qpos", "qvel", "qacc_warmstart", *task.extras]
        rng = np.random.default_rng(0)
        env.reset(seed=1)
        steps = []
        for seed in range(1000):
            row = mujoco_.read_row(env.data, names)
            action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            ctrl = (action * env.action_space.high).astype(np.float32)  # the bounds are symmetric
            obs, reward, terminated, _, _ = env.step(ctrl)
            steps.append((row, action, obs, reward, terminated))
            if terminated:
                env.reset(seed=seed)
        found[env_id] = tuple(np.array(x) for x in zip(*steps))
    return found


@pytest.mark.parametrize("physics", ["host", "warp"])
@pytest.mark.parametrize("env_id", mujoco_.ROBOTS)
def test_a_step_from_gymnasiums_states_gives_gymnasiums_numbers(played, env_id, physics):
    rows, action, obs, reward, terminated = played[env_id]
    env = worlds(env_id, physics, len(rows))
    state, paid, ended = env.transition(
        torch.as_tensor(rows, dtype=env.physics.dtype), torch.as_tensor(action), torch.zeros(len(rows), 1)
    )
    error = (env.observation(state).double().numpy() - obs) / (1 + abs(obs))
    if physics == "host":
        assert (error == 0).all() and (ended.numpy() == terminated).all()
        assert abs(paid.numpy() - reward).max() < 1e-5  # of float32 actions, squared and summed in another order
        return
    share = SHARES.get(env_id, 0.99)
    assert np.quantile(abs(error).max(1), share) < 1e-3
    assert np.quantile(abs(paid.numpy() - reward) / (1 + abs(reward)), share) < 1e-3
    assert (ended.numpy() != terminated).mean() <= 0.002
    assert not env.physics.overflow.any()


@pytest.mark.parametrize("env_id", mujoco_.ROBOTS)
def test_episodes_start_as_gymnasiums(env_id):
    """The same distribution of each coordinate, and the same observation at each start."""
    env, theirs = worlds(env_id, "host", 1), gym.make(env_id).unwrapped
    starts = env.arrays(env.starts)
    resets = []
    for seed in range(1000):
        theirs.reset(seed=seed)
        resets.append(np.concatenate([theirs.data.qpos, theirs.data.qvel]))
    resets = np.array(resets)
    ours = torch.cat([starts["qpos"], starts["qvel"]], -1).numpy()
    spread = resets.std(0) + 1e-9
    assert (abs(ours.mean(0) - resets.mean(0)) < 0.25 * spread).all()
    assert (abs(ours.std(0) / spread - 1) < 0.15).all()
    for i in range(5):
        theirs.reset(seed=i)  # clears the rest
        theirs.set_state(starts["qpos"][i].numpy(), starts["qvel"][i].numpy())
        assert (theirs._get_obs() == env.observation(env.starts)[i].numpy()).all()


@pytest.mark.parametrize("number", [torch.nan, 1e8])
@pytest.mark.parametrize("physics", ["host", "warp"])
def test_a_broken_state_stays_in_its_world(physics, number):
    env = worlds("Hopper-v5", physics, 5)
    torch.manual_seed(0)
    first = mujoco_.first_worlds(env, 5, CPU)
    first["clock"][:] = 3
    hurt = first | {"state": first["state"].clone()}
    hurt["state"][2, 5] = number
    action, uniform = torch.zeros(5, 3), torch.rand(5, 1)
    well, reward, _, valid = mujoco_.step_worlds(env, first, action, uniform)
    now, paid, terminated, counts = mujoco_.step_worlds(env, hurt, action, uniform)
    others = [0, 1, 3, 4]
    assert valid.all() and counts.tolist() == [True, True, False, True, True]
    assert (now["state"][others] == well["state"][others]).all() and (paid[others] == reward[others]).all()
    assert (now["state"][2] == env.initial(uniform)[2]).all() and paid[2] == 0
    assert now["broken"].tolist() == [0, 0, 1, 0, 0] and now["clock"][2] == 0 and not terminated[2] and now["done"][2]


ROBOT = """<mujoco><worldbody><body><joint name="hinge"/><geom size="0.1"/></body></worldbody>
<actuator><motor joint="hinge" {}/></actuator></mujoco>"""


def test_a_robot_of_ones_own_may_have_actuators_without_limits(tmp_path):
    task = type("Robot", (mujoco_.HalfCheetah,), {"xml": tmp_path / "robot.xml"})
    task.xml.write_text(ROBOT.format(""))
    env = mujoco_.Worlds(task, 2, CPU, mujoco_.Args(physics="host"))
    state, _, _ = env.transition(env.starts[[0, 0]], torch.tensor([[-2.0], [2.0]]), torch.zeros(2, 1))
    assert state[0, 0] < env.starts[0, 0] < state[1, 0]


DELAY = ROBOT.format('delay="0.05" nsample="5"')
WELD = ROBOT.format("").replace("<body>", '<body name="arm">')
WELD = WELD.replace("</m", '<equality><weld body1="arm"/></equality></m')
MOCAP = ROBOT.format("").replace("</w", '<body mocap="true"><geom size="0.1"/></body></w')


@pytest.mark.parametrize("xml", [DELAY, WELD, MOCAP], ids=["delay", "equality", "mocap"])
def test_a_robot_whose_state_is_more_than_a_row_is_refused(tmp_path, capsys, xml):
    task = type("Robot", (mujoco_.HalfCheetah,), {"xml": tmp_path / "robot.xml"})
    task.xml.write_text(xml)
    with pytest.raises(SystemExit):
        mujoco_.Worlds(task, 2, CPU, mujoco_.Args(physics="host"))
    assert "no row has them" in capsys.readouterr().err


def test_an_action_beyond_the_bounds_is_one_at_the_bounds():
    """The reward counts the torque that acts, not the one that was asked for."""
    env = worlds("HalfCheetah-v5", "host", 2)
    sides = torch.tensor([[1.0], [-1.0]]).expand(2, 6)
    beyond, at = (env.transition(env.starts[:2], scale * sides, torch.zeros(2, 1)) for scale in (3, 1))
    assert (beyond[0] == at[0]).all() and (beyond[1] == at[1]).all()


def test_first_episodes_end_at_different_times_and_have_no_score():
    env = worlds("HalfCheetah-v5", "host", 2)
    assert len(mujoco_.first_worlds(env, 100, CPU)["clock"].unique()) > 50
    now = mujoco_.first_worlds(env, 2, CPU)
    now["clock"][:] = 999
    for done in (True, False):
        now, *_ = mujoco_.step_worlds(env, now, torch.zeros(2, 6), torch.zeros(2, 1))
        assert (now["done"] == done).all() and now["last_return"].isnan().all()
    assert (now["score"] == 0).all()


def test_a_limit_of_time_is_no_termination():
    env = worlds("HalfCheetah-v5", "host", 2)
    now = mujoco_.first_worlds(env, 2, CPU)
    now["clock"][:] = torch.tensor([998, 999])
    action, uniform = torch.zeros(2, 6), torch.zeros(2, 1)
    now, _, terminated, valid = mujoco_.step_worlds(env, now, action, uniform)
    assert now["done"].tolist() == [False, True] and not terminated.any() and valid.all()
    now, reward, terminated, valid = mujoco_.step_worlds(env, now, action, uniform)
    assert now["clock"].tolist() == [1000, 0] and valid.tolist() == [True, False] and reward[1] == 0
    assert now["done"].tolist() == [True, False] and (now["state"][1] == env.starts[0]).all()


def test_a_step_of_warp_depends_on_nothing_but_the_row():
    """In another world, after another history, among others: the same bits."""
    env = worlds("Hopper-v5", "warp", 4)
    action = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    state = env.starts[:4]
    for _ in range(30):
        state, _, _ = env.transition(state, action, torch.zeros(4, 1))
    new, _, _ = env.transition(state, action, torch.zeros(4, 1))
    env.transition(env.starts[4:8], -action, torch.zeros(4, 1))
    turned, _, _ = env.transition(state.flip(0), action.flip(0), torch.zeros(4, 1))
    assert (turned.flip(0) == new).all()
    alone = worlds("Hopper-v5", "warp", 1)
    assert (alone.transition(state[2:3], action[2:3], torch.zeros(1, 1))[0] == new[2:3]).all()


def test_a_recorded_step_of_warp_is_that_of_its_launches():
    twin = load("ppo_mujoco_torchcompile")
    env = worlds("HalfCheetah-v5", "warp", 3)
    recorded = worlds("HalfCheetah-v5", "warp", 3)
    twin.record(recorded.physics)
    state, ctrl = env.starts[:3], torch.full((3, 6), 0.5)
    assert (env.physics.step(state, ctrl) == recorded.physics.step(state, ctrl)).all()


def test_a_graph_of_pytorch_takes_the_launches_of_warp_and_not_its_graph(monkeypatch):
    """CUDA lets no captured stream launch a graph; after the capture, steps replay Warp's own graph again."""
    done = []

    class Capture:
        graph = "the graph"

        def __init__(self, **options):
            self.options = options

        def __enter__(self):
            done.append(("begin", self.options))
            return self

        def __exit__(self, *_):
            done.append("end")

    launch = partial(done.append, "launch")
    wp = SimpleNamespace(ScopedCapture=Capture, get_stream=lambda: "the stream", capture_launch=done.append)
    wp.ScopedDevice = lambda device: nullcontext(done.append(device))
    physics = SimpleNamespace(wp=wp, launch=launch, is_cuda=True, data=SimpleNamespace(qpos=torch.zeros(1)))
    captures = [False, True, False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures.pop(0))
    load("ppo_mujoco_torchcompile").record(physics)
    assert done == [CPU, "launch", ("begin", {}), "launch", "end"]
    done.clear()
    for _ in range(3):
        physics.launch()
    within = [("begin", {"stream": "the stream", "external": True}), "launch", "end"]
    assert done == ["the graph", *within, "the graph"]


def test_warp_computes_on_the_cpu_where_its_default_is_a_gpu(monkeypatch):
    """Each step and the recording stand in a scope of the right device."""
    env = worlds("Hopper-v5", "warp", 2)
    launch, there = env.physics.launch, env.physics.wp.ScopedDevice
    scopes, launched = [], []

    class Scope(there):
        def __enter__(self):
            scopes.append(str(self.device))
            return super().__enter__()

        def __exit__(self, *error):
            scopes.pop()
            return super().__exit__(*error)

    def watched():
        launched.append(list(scopes))
        launch()

    monkeypatch.setattr(env.physics.wp, "ScopedDevice", Scope)
    env.physics.launch = watched
    env.physics.step(env.starts[:2], torch.zeros(2, 3))
    load("ppo_mujoco_torchcompile").record(env.physics)
    assert launched == [["cpu"]] * 3


@pytest.fixture(scope="module", params=["ppo_mujoco", "ppo_mujoco_torchcompile"])
def two_rollouts(request, tmp_path_factory):
    """The rollouts of a training, and what the advantages are computed from; a world breaks in the fourth step."""
    script = load(request.param)
    trace = "gae_scan" if "torch" in request.param else "gae"
    gae, add_rollout, step = (getattr(script, x) for x in (trace, "add_rollout", "step_worlds"))
    steps, traces, rollouts = [], [], []

    def break_once(env, worlds, action, uniform):
        steps.append(worlds)
        if len(steps) == 4:
            worlds["state"][1] = torch.nan
        return step(env, worlds, action, uniform)

    def watch_gae(*args):
        traces.append([x.clone() for x in args[:4]])
        return gae(*args)

    def watch_rollout(scales, rollout, gamma):
        rollouts.append({key: x.clone() for key, x in rollout.items()})
        add_rollout(scales, rollout, gamma)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("rollouts"))
        for function, watched in ((trace, watch_gae), ("add_rollout", watch_rollout), ("step_worlds", break_once)):
            patch.setattr(script, function, watched)
        run = train(patch, request.param, **tiny(request.param) | {"physics": "host"})
        events = EventAccumulator(str(run.run_dir)).Reload()
    return rollouts[:2], traces[:2], events


def test_no_advantage_looks_beyond_a_broken_step(two_rollouts):
    """The trace ends before a step that is reset, since its value is of another episode."""
    (rollout, _), ((_, _, _, done), _), events = two_rollouts
    assert events.Scalars("charts/broken_worlds")[-1].value == 1
    assert rollout["valid"][3, 1] == 0 and rollout["done"][2, 1] == 0 and done[2, 1] == 1
    follows = rollout["valid"][1:] == 1
    assert (done[:-1][follows] == rollout["done"][:-1][follows]).all()


def test_rewards_are_scaled_by_the_returns_of_the_rollouts_before(two_rollouts):
    (first, second), ((reward, *_), (next_reward, *_)), _ = two_rollouts
    returns, so_far = [], np.zeros(first["reward"].shape[1])
    for paid, done in zip(first["reward"].numpy(), first["done"].numpy()):
        so_far = 0.99 * so_far + paid
        returns.append(so_far)
        so_far = np.where(done, 0, so_far)
    std = np.array(returns)[first["valid"].numpy() == 1].std()
    assert (reward == first["reward"]).all() and abs(std - 1) > 0.1
    np.testing.assert_allclose(next_reward, (second["reward"] / std).clip(-10, 10), rtol=1e-5)


def test_warps_solver_may_make_all_iterations():
    """Without conditional nodes in a graph, for drivers that lack them: the same numbers."""
    fixed = worlds("Hopper-v5", "warp", 2, graph_conditional=False)
    early = worlds("Hopper-v5", "warp", 2)
    assert early.physics.model.opt.graph_conditional and not fixed.physics.model.opt.graph_conditional
    state, ctrl = early.starts[:2], torch.full((2, 3), 0.5)
    torch.testing.assert_close(fixed.physics.step(state, ctrl), early.physics.step(state, ctrl), rtol=0, atol=1e-5)


@pytest.mark.parametrize("flags", [{"nconmax": 1, "njmax": 200}, {"nconmax": 50, "njmax": 4}], ids=str)
def test_contacts_and_constraints_without_room_are_told(flags):
    env = worlds("Ant-v5", "warp", 2, **flags)
    state = env.starts[:2].clone()
    state[:, 2] = 0.2  # its body is on the floor
    env.transition(state, torch.zeros(2, 8), torch.zeros(2, 1))
    assert (env.physics.overflow & env.physics.no_room).all()


@pytest.mark.parametrize("name", MUJOCO)
def test_contacts_without_room_end_the_run(name, capsys):
    script = load(name)
    flags = tiny(name) | {"env_id": "Ant-v5", "physics": "warp", "nconmax": 1, "njmax": 4, "total_timesteps": 128}
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**flags, cuda=False, save_model=False))
    assert "--nconmax" in str(exit.value)


@pytest.mark.parametrize("name", MUJOCO)
def test_a_solver_with_few_iterations_does_not_end_the_run(name, tmp_path, monkeypatch):
    """Warp flags that, too, in the tensor that tells of contacts without room."""
    script = load(name)
    task = script.ROBOTS["Hopper-v5"]
    xml = tmp_path / "hopper.xml"
    xml.write_text(task.xml.read_text().replace("<option ", '<option iterations="1" ls_iterations="1" '))
    monkeypatch.setattr(task, "xml", xml)
    seen = []

    class Physics(script.WarpPhysics):
        def step(self, state, ctrl):
            new = super().step(state, ctrl)
            seen.append(self.overflow.any())
            return new

    monkeypatch.setattr(script, "WarpPhysics", Physics)
    train(monkeypatch, name, **tiny(name) | {"physics": "warp", "total_timesteps": 128, "nconmax": 50, "njmax": 200})
    assert any(seen)


def test_c_mujoco_has_64_worlds_where_there_is_a_gpu_too(monkeypatch):
    host, auto = mujoco_.Args(physics="host"), mujoco_.Args()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        mujoco_.set_defaults(host)
        mujoco_.set_defaults(auto)
    assert (host.num_envs, auto.num_envs, auto.physics) == (64, 4096, "warp")


def test_humanoids_on_the_floor_have_room_for_their_contacts():
    env = worlds("Humanoid-v5", "warp", 8)
    torch.manual_seed(0)
    state = env.starts[:8].clone()
    qpos = env.arrays(state)["qpos"]
    qpos[:, 2] = 1
    qpos[:, 3:7] = torch.nn.functional.normalize(torch.randn(8, 4), dim=-1)  # which side is up
    most = 0
    load("ppo_mujoco_torchcompile").record(env.physics)
    for _ in range(60):
        state, _, _ = env.transition(state, 2 * torch.rand(8, env.act_dim) - 1, torch.zeros(8, 1))
        most = max(most, int(env.physics.data.nacon.numpy()[0]))
    assert (env.arrays(state)["qpos"][:, 2] < 0.8).all() and state.isfinite().all()
    assert most > 40 and not env.physics.overflow.any()


def test_c_mujoco_is_not_captured(capsys):
    script = load("ppo_mujoco_torchcompile")
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(physics="host", cudagraphs=True))
    assert exit.value.code == 2 and "--physics warp" in capsys.readouterr().err


@pytest.mark.parametrize("name", MUJOCO)
def test_worlds_of_warp_train(monkeypatch, name):
    sizes = {"total_timesteps": 128} | ({"learning_starts": 100} if name in FAST_TD3 else {})
    run = train(monkeypatch, name, **tiny(name) | sizes, physics="warp")
    assert np.isfinite(run.metrics[row(name).losses.split()[0]])


def test_the_robot_of_the_page_learns(monkeypatch, own_folder):
    """The model and the class of docs/device.md, in both engines; the pole comes up."""
    page = (ROOT / "docs" / "device.md").read_text()
    (xml,) = re.findall(r"```xml\n(.*?)```", page, re.DOTALL)
    code, play = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Pole" in block]
    Path("pole.xml").write_text(xml)
    exec(code, names := {})
    monkeypatch.setitem(mujoco_.ROBOTS, "Pole", names["Pole"])
    flags = {"num_envs": 16, "total_timesteps": 40_960, "learning_rate": 3e-3, "save_model": True}
    run = train(monkeypatch, "ppo_mujoco", env_id="Pole", **flags)
    assert run.metrics["episodic_return"] > -50  # of 200 steps, each pays -1 hanging and 1 upright
    (run.run_dir / "policy.pt2").rename("policy.pt2")
    robots, rest = (ROOT / "leanrl" / "ppo_mujoco.py").read_text().split("\n\n\ndef read_row")
    Path("my_ppo.py").write_text(f'{robots}\n{code}\nROBOTS["Pole"] = Pole\n\n\ndef read_row{rest}')
    monkeypatch.syspath_prepend(Path.cwd())
    exec(play, {})
    env = worlds("Pole", "warp", 2)
    state, reward, _ = env.transition(env.starts[:2], torch.ones(2, 1), torch.zeros(2, 1))
    assert env.observation(state).shape == (2, 3) and (reward < -0.9).all()


def test_the_moments_are_those_of_all_valid_rows():
    rng = np.random.default_rng(0)
    moments = torch.tensor([[0.0] * 3, [0.0] * 3, [1.0] * 3], dtype=torch.float64)
    seen = []
    for share in (0.7, 0.7, 0, 0.7):  # where all worlds are reset, no row is valid
        x, valid = rng.normal(5, 2, (6, 2, 3)), rng.random((6, 2)) < share
        mujoco_.add_moments(moments, torch.as_tensor(x), torch.as_tensor(valid))
        seen.append(x[valid])
    seen = np.concatenate(seen)
    assert moments[0].tolist() == [len(seen)] * 3
    np.testing.assert_allclose(moments[1:], [seen.mean(0), seen.var(0)], rtol=1e-12)
    scaled = mujoco_.normalize(moments, torch.as_tensor(seen))
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-6)
