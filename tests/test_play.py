"""play.py: the returns of a policy in whole games, its film, and the files that it refuses."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gymnasium as gym
import imageio.v3 as imageio
import local_ray
import numpy as np
import play
import pytest
import torch
import tyro
from catalog import CATALOG
from conftest import MEMORY, ROOT, tiny, train
from torch import nn

KINDS = ("ppo_continuous_action", "sac_continuous_action", "td3_mujoco", "dqn", "ppo_lru", "pqn_device_env")
KINDS += ("ppo_atari_envpool",)
SOON = ("dqn", "td3_mujoco", "ppo_lru")  # in every run of the tests; the others are `long`
GAMES = {name: "Pong-v5" if "atari" in name else CATALOG[name].tiny["env_id"] for name in KINDS}


class Pushes(nn.Module):
    """Pushes Pendulum to one side, or a cart to where its pole leans."""

    def __init__(self, discrete: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4 if discrete else 3))
        self.discrete = discrete

    def forward(self, obs):
        obs = obs @ self.weight
        return (obs[:, 2] > 0).long() if self.discrete else obs[:, 1:2] * 2


class Always(nn.Module):
    """Takes one action, always."""

    def __init__(self, action):
        super().__init__()
        self.register_buffer("action", torch.tensor(action))

    def forward(self, obs):
        return self.action.expand(obs.shape[0], *self.action.shape)


class PaidEnv(gym.Env):
    """Pays the action, times what it is told to, for 3 steps. Observes what it is told to."""

    action_space = gym.spaces.Box(-1, 2, (1, 1), np.float64)
    seeds: list[int] = []

    def __init__(self, pay: float = 1, obs: object = 0.0):
        self.obs = np.array(obs, ndmin=1)
        self.observation_space = gym.spaces.Box(-1e9, 1e9, self.obs.shape, self.obs.dtype)
        self.pay = pay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.steps = 0
        return self.obs, {}

    def step(self, action):
        assert action in self.action_space
        self.steps += 1
        return self.obs, self.pay * action.item(), self.steps == 3, False, {}


gym.register("PaidEnv-v0", entry_point=PaidEnv, disable_env_checker=True)
gym.register("PaidElsewhere-v0", entry_point=PaidEnv, disable_env_checker=True)


def save(path: Path, policy: nn.Module, obs: torch.Tensor, env_id: str, **flags) -> Path:
    card = json.dumps({"script": "by hand", "args": {"env_id": env_id} | flags})
    program = torch.export.export(policy, (obs,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.export.save(program, path, extra_files={"card.json": card})
    return path


@pytest.fixture
def pendulum(own_folder) -> Path:
    return save(own_folder / "policy.pt2", Pushes(discrete=False), torch.zeros(2, 3), "Pendulum-v1")


@pytest.fixture
def cart(own_folder) -> Path:
    return save(own_folder / "policy.pt2", Pushes(discrete=True), torch.zeros(2, 4), "CartPole-v1")


def played(path: Path, *flags) -> dict:
    """What a new process prints last."""
    command = [sys.executable, ROOT / "leanrl" / "play.py", path, *map(str, flags)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.long] * (x not in SOON)) for x in GAMES])
def test_a_policy_plays_in_a_new_process_as_here(monkeypatch, name, own_folder):
    """Of a script of each kind, after a run of moments: the same seed gives the same returns, another gives others."""
    sizes = {"num_steps": 128, "total_timesteps": 256} if "ppo" in name else {"total_timesteps": 200}
    sizes |= {"num_minibatches": 2} if name in MEMORY else {}
    sizes |= {"num_steps": 32} if "device" in name else {}
    sizes |= {"num_workers": 2, "envs_per_worker": 1} if "ray" in name else {"num_envs": 2}
    monkeypatch.setitem(sys.modules, "ray", local_ray)
    run = train(monkeypatch, name, env_id=GAMES[name], save_model=True, **sizes)
    path = run.run_dir / "policy.pt2"
    episodes = 1 if "atari" in name else 2
    here = play.play(play.Args(path, episodes=episodes))
    assert played(path, "--episodes", episodes) == here
    assert here["script"] == name and here["env_id"] == GAMES[name] and len(here["lengths"]) == episodes
    assert here["mean"] == np.mean(here["returns"]) and here["std"] == np.std(here["returns"])
    other = play.play(play.Args(path, episodes=episodes, seed=2))
    assert other["returns"] != here["returns"] or other["lengths"] != here["lengths"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # moviepy leaves its pipes open
@pytest.mark.filterwarnings("ignore:.*Overriding environment MinAtar")  # which a second call registers again
def test_a_policy_of_minatar_plays_in_its_own_package(monkeypatch):
    """Its actions and observations are those of training, up to the same time limit."""
    sizes = {"num_envs": 64, "num_steps": 16, "total_timesteps": 61_440, "learning_rate": 3e-3}
    run = train(monkeypatch, "ppo_device_env", env_id="MinAtar/Breakout-v1", save_model=True, **sizes)
    result = play.play(play.Args(run.run_dir / "policy.pt2", episodes=20))
    assert result["mean"] > 0.8  # untrained, it stays where it is and gets next to nothing
    assert 5 < np.mean(result["lengths"]) <= 1000
    film = play.play(play.Args(run.run_dir / "policy.pt2", episodes=1, video=True))
    frames = imageio.imread(run.run_dir / "videos" / "seed1-episode-0.mp4", plugin="FFMPEG")
    assert film["lengths"][0] <= len(frames) <= film["lengths"][0] + 1 and frames.shape[1:] == (160, 160, 3)
    assert frames[:, 144:].max() > 50  # the paddle, in the lowest row


def test_returns_are_those_of_a_loop_by_hand(cart):
    result = play.play(play.Args(cart, episodes=3))
    seeds = np.random.SeedSequence([0x504C4159, 1]).generate_state(3) // 2
    env = gym.make("CartPole-v1")
    for seed, return_, length in zip(seeds.tolist(), result["returns"], result["lengths"], strict=True):
        obs, _ = env.reset(seed=seed)
        steps = 0
        over = False
        while not over:
            obs, _, terminated, truncated, _ = env.step(int(obs[2] > 0))
            steps += 1
            over = terminated or truncated
        assert (return_, length) == (steps, steps)


def test_an_atari_game_is_played_to_its_last_life_for_its_unclipped_score():
    infos = []

    class SpiedGame(play.AtariGame):
        def reset(self, **kwargs):
            result = super().reset(**kwargs)
            step = self.pool.step

            def spied(action):
                results = step(action)
                infos.append(results[-1])
                return results

            self.pool.step = spied
            return result

    game = SpiedGame("MsPacman-v5")  # a dot pays 10 points
    policy = lambda obs: torch.tensor([len(infos) // 9 % 9])  # noqa: E731
    return_, length = play.play_episode(policy, [torch.zeros(2, 4, 84, 84, dtype=torch.uint8)], game, seed=3)
    lives = [int(info["lives"][0]) for info in infos]
    assert sorted(set(lives)) == [0, 1, 2, 3] and lives.index(0) == len(lives) - 1
    assert return_ == sum(info["reward"][0] for info in infos) and return_ >= 10 * 20
    assert length == len(infos)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # moviepy leaves its pipes open
def test_a_film_shows_every_step(cart, capsys):
    result = play.play(play.Args(cart, episodes=2, video=True))
    for i, length in enumerate(result["lengths"]):
        frames = imageio.imread(cart.parent / "videos" / f"seed1-episode-{i}.mp4", plugin="FFMPEG")
        assert length <= len(frames) <= length + 1
        assert frames.shape[1:] == (400, 600, 3) and (frames[0] != frames[-1]).any()
    assert f"films go to {cart.parent}/videos\n" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # moviepy leaves its pipes open
def test_a_film_of_an_atari_game_shows_what_the_policy_saw(own_folder):
    path = save(own_folder / "policy.pt2", Always(0), torch.zeros(2, 4, 84, 84, dtype=torch.uint8), "Pong-v5")
    result = play.play(play.Args(path, episodes=1, video=True))
    assert result["returns"] == [-21]
    frames = imageio.imread(own_folder / "videos" / "seed1-episode-0.mp4", plugin="FFMPEG")
    assert result["lengths"][0] <= len(frames) <= result["lengths"][0] + 1
    assert frames.shape[1:] == (168, 168, 3) and (frames[50] != frames[60]).any()


LAYERS = {  # names of copied scripts, and what stands there in place of a layer
    "my-sac.py": "nn.ReLU()",
    "sac.v2.py": "nn.LayerNorm(256), nn.ReLU()",
    "sac (1).py": "nn.GELU()",
    "sac.conv.py": "nn.Unflatten(-1, (4, 8, 8)), nn.Conv2d(4, 16, 3, stride=2, padding=1), nn.Flatten(-3), nn.ReLU()",
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_policy_of_a_copied_script_plays(own_folder, name):
    """Whatever its name, and with other layers."""
    text = (ROOT / "leanrl" / "sac_continuous_action.py").read_text()
    changed = text.replace("nn.ReLU(), nn.Linear(256, 256)", f"{LAYERS[name]}, nn.Linear(256, 256)")
    assert (changed == text) == (LAYERS[name] == "nn.ReLU()")
    (own_folder / name).write_text(changed)
    spec = importlib.util.spec_from_file_location("copied", own_folder / name)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    copied.train(copied.Args(**tiny("sac_continuous_action") | {"total_timesteps": 910, "cuda": False}))
    (path,) = own_folder.glob("runs/*/policy.pt2")
    result = play.play(play.Args(path, episodes=1))
    assert result["script"] == Path(name).stem and result["lengths"] == [200]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_policy_of_images_plays(own_folder, dtype):
    """A convolution sums 3 x 3 pixels of 2 channels, each of which is 3, with a weight of 0.01."""

    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 1, 3)
            nn.init.constant_(self.conv.weight, 0.01)
            nn.init.constant_(self.conv.bias, 0.0)

        def forward(self, obs):
            return self.conv(obs.float().permute(0, 3, 1, 2)).mean((1, 2, 3))[:, None]

    kwargs = json.dumps({"obs": np.full((8, 8, 2), 3).tolist()})
    obs = torch.zeros(2, 8, 8, 2, dtype=dtype)
    path = save(own_folder / "policy.pt2", Convolution(), obs, "PaidEnv-v0", env_kwargs=kwargs)
    assert play.play(play.Args(path, episodes=1))["mean"] == pytest.approx(3 * 0.01 * 18 * 3)


def test_an_observation_has_the_type_that_the_policy_takes(own_folder):
    class Difference(nn.Module):
        def forward(self, obs):
            return obs - 123_456_789

    kwargs = json.dumps({"obs": 123_456_789.25})
    for dtype, action in {torch.float64: 0.25, torch.float32: 0}.items():
        path = save(
            own_folder / "policy.pt2", Difference(), torch.zeros(2, 1, dtype=dtype), "PaidEnv-v0", env_kwargs=kwargs
        )
        assert play.play(play.Args(path, episodes=1))["returns"] == [3 * action]


SETTINGS = {  # flags of training and of playing, and what is paid
    "those of training": ({"env_kwargs": '{"pay": 5}'}, {}, 5),
    "none, as in training": ({"env_kwargs": "{}"}, {}, 1),
    "a script without them": ({}, {}, 1),
    "by flag": ({"env_kwargs": '{"pay": 5}'}, {"env_kwargs": '{"pay": 2}'}, 2),
    "the same env by flag": ({"env_kwargs": '{"pay": 5}'}, {"env_id": "PaidEnv-v0"}, 5),
    "another env": ({"env_kwargs": '{"pay": 5}'}, {"env_id": "PaidElsewhere-v0"}, 1),
    "another env by flags": ({}, {"env_id": "PaidElsewhere-v0", "env_kwargs": '{"pay": 3}'}, 3),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_the_env_is_made_as_in_training(own_folder, case):
    """And the action, 7, is clipped to its bounds, which end at 2."""
    trained, played, pay = SETTINGS[case]
    path = save(own_folder / "policy.pt2", Always([7.0]), torch.zeros(2, 1), "PaidEnv-v0", **trained)
    result = play.play(play.Args(path, episodes=1, **played))
    assert result["returns"] == [3 * 2 * pay] and result["env_id"] == played.get("env_id", "PaidEnv-v0")


def test_an_env_of_another_package_plays(own_folder, monkeypatch):
    (own_folder / "their_package.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('Theirs-v0', entry_point='gymnasium.envs.classic_control:PendulumEnv', max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(str(own_folder))
    path = save(own_folder / "policy.pt2", Pushes(discrete=False), torch.zeros(2, 3), "their_package:Theirs-v0")
    assert play.play(play.Args(path, episodes=1))["lengths"] == [5]


@pytest.mark.parametrize("seed", [0, 2**40])
def test_simulators_can_take_the_seeds(own_folder, monkeypatch, seed):
    monkeypatch.setattr(PaidEnv, "seeds", [])
    path = save(own_folder / "policy.pt2", Always([1.0]), torch.zeros(2, 1), "PaidEnv-v0")
    play.play(play.Args(path, episodes=20, seed=seed))
    assert len(set(PaidEnv.seeds)) == 20 and all(0 <= seed < 2**31 for seed in PaidEnv.seeds)


def test_help_and_readme_say_that_a_policy_is_a_program(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(play.Args, description=play.__doc__, args=["--help"])
    assert "A policy is a program: whoever loads one runs it." in " ".join(capsys.readouterr().out.split())
    assert "Loading a policy runs its code" in " ".join((ROOT / "README.md").read_text().split())


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def damage(path: Path, how: str):
    content = path.read_bytes()
    if how == "cut off":
        path.write_bytes(content[: len(content) // 2])
    if how == "a flipped bit":
        place = content.index(torch.eye(3).numpy().tobytes())  # the weight
        path.write_bytes(content[:place] + b"\1" + content[place + 1 :])
    if how == "a pickled object":
        torch.save(Evil(), "evil.pt")
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, Path("evil.pt").read_bytes() if name.endswith(".pt") else part)


@pytest.mark.parametrize("how", ["cut off", "a flipped bit", "a pickled object"])
def test_a_damaged_policy_is_refused(pendulum, capsys, how):
    damage(pendulum, how)
    with pytest.raises(SystemExit) as exit:
        play.play(play.Args(pendulum))
    assert exit.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith(
        f"error: cannot play {pendulum}: "
    )
    assert not Path("pwned").exists()


BAD = {  # flags, and a part of the sentence that refuses them
    "no file": ({"policy": Path("nowhere.pt2")}, "cannot play nowhere.pt2"),
    "no policy": ({"policy": Path(__file__)}, "is not a zip file"),
    "a checkpoint": ({"policy": Path("checkpoint.pt")}, "it is no policy.pt2 of a training script"),
    "no episode": ({"episodes": 0}, "--episodes must be at least 1"),
    "negative seed": ({"seed": -1}, "--seed"),
    "unknown env": ({"env_id": "Pendulm-v1"}, "Pendulum"),
    "other observations": ({"env_id": "InvertedPendulum-v5"}, "it observes (4,)"),
    "other actions": ({"env_id": "DiscretePendulum-v0"}, "takes Discrete(2)"),
    "an action out of range": ({"policy": Path("wild.pt2"), "env_id": "CartPole-v1"}, "action 7 is not in Discrete(2)"),
    "an action that is no number": (
        {"policy": Path("nan.pt2"), "env_id": "PaidEnv-v0"},
        "action [[nan]] is not in Box",
    ),
    "settings that are no JSON": ({"env_kwargs": "{g: 1}"}, "with {g: 1}: Expecting"),
    "settings that the env has not": ({"env_kwargs": '{"nonsense": 1}'}, "'nonsense'"),
    "an unwritable folder": ({"policy": Path("full/policy.pt2"), "video": True}, "full/videos"),
    "no screen": ({"render": True}, "--render needs a screen"),
    "film and window": ({"render": True, "video": True}, "exclude each other"),
}


class DiscretePendulum(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Discrete(2)


gym.register("DiscretePendulum-v0", entry_point=DiscretePendulum)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence_and_exit_code_2(monkeypatch, pendulum, capsys, case):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    flags, words = BAD[case]
    if case == "an action out of range":
        save(Path("wild.pt2"), Always(7), torch.zeros(2, 4), "CartPole-v1")
    if case == "an action that is no number":
        save(Path("nan.pt2"), Always([float("nan")]), torch.zeros(2, 1), "PaidEnv-v0")
    if case == "an unwritable folder":
        Path("full").mkdir()
        Path("full/videos").touch()
        Path("full/policy.pt2").write_bytes(pendulum.read_bytes())
    torch.save({}, "checkpoint.pt")
    with pytest.raises(SystemExit) as exit:
        play.play(play.Args(**{"policy": pendulum} | flags))
    *_, message = capsys.readouterr().err.strip().splitlines()
    assert exit.value.code == 2 and message.startswith("error: ") and words in message
