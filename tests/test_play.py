"""play.py: the returns of a policy in whole games, its film, and what it refuses to load."""

import json
import os
import re
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
from catalog import CATALOG
from conftest import MEMORY, ROOT, train
from torch import nn

GAMES = {name: "Pong-v5" if "atari" in name else entry.tiny["env_id"] for name, entry in CATALOG.items()}
del GAMES["ppo_atari_multigpu"]  # its policy is that of ppo_atari_envpool


class Pushes(nn.Module):
    """Pushes Pendulum to one side, or a cart to where its pole leans."""

    def __init__(self, discrete: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4 if discrete else 3))
        self.discrete = discrete

    def forward(self, obs):
        obs = obs @ self.weight
        return (obs[:, 2] > 0).long() if self.discrete else obs[:, 1:2] * 2


class Wild(nn.Module):
    """Takes action 7, always."""

    def forward(self, obs):
        return (obs.sum(1) * 0 + 7).long()


def save(path: Path, policy: nn.Module, obs: torch.Tensor, env_id: str) -> Path:
    card = json.dumps({"script": "by hand", "args": {"env_id": env_id}})
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
@pytest.mark.parametrize("name", GAMES)
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
    seeds = np.random.SeedSequence([play.PLAY, 1]).generate_state(3) // 2
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
    policy = lambda obs: [torch.tensor([len(infos) // 9 % 9])]  # noqa: E731
    return_, length = play.play_episode(policy, [torch.zeros(2, 4, 84, 84, dtype=torch.uint8)], game, seed=3)
    lives = [int(info["lives"][0]) for info in infos]
    assert sorted(set(lives)) == [0, 1, 2, 3] and lives.index(0) == len(lives) - 1
    assert return_ == sum(info["reward"][0] for info in infos) and return_ >= 10 * 20
    assert length == len(infos)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # moviepy leaves its pipes open
def test_a_film_shows_every_step(cart):
    result = play.play(play.Args(cart, episodes=2, video=True))
    for i, length in enumerate(result["lengths"]):
        frames = imageio.imread(cart.parent / "videos" / f"seed1-episode-{i}.mp4", plugin="FFMPEG")
        assert length <= len(frames) <= length + 1
        assert frames.shape[1:] == (400, 600, 3) and (frames[0] != frames[-1]).any()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # moviepy leaves its pipes open
def test_a_film_of_an_atari_game_shows_what_the_policy_saw(own_folder):
    class Waits(nn.Module):
        def forward(self, frames):
            return frames.flatten(1).sum(1) * 0

    path = save(own_folder / "policy.pt2", Waits(), torch.zeros(2, 4, 84, 84, dtype=torch.uint8), "Pong-v5")
    result = play.play(play.Args(path, episodes=1, video=True))
    assert result["returns"] == [-21]
    frames = imageio.imread(own_folder / "videos" / "seed1-episode-0.mp4", plugin="FFMPEG")
    assert result["lengths"][0] <= len(frames) <= result["lengths"][0] + 1
    assert frames.shape[1:] == (168, 168, 3) and (frames[50] != frames[60]).any()


CODE = "__import__('os').system('touch pwned')"
CRAFTED = {
    "an operation": lambda text: text.replace("aten.matmul.default", "aten.from_file.default"),
    "an endless size": lambda text: re.sub(r'"expr_str": "[^"]*"', '"expr_str": "9*9"', text, count=1),
    "a name of Python's": lambda text: text.replace('"obs"', '"__class__"'),
    "a size": lambda text: re.sub(r'"expr_str": "[^"]*"', f'"expr_str": "{CODE}"', text, count=1),
    "a guard": lambda text: text.replace('"guards_code": []', f'"guards_code": ["{CODE} or True"]'),
    "a name": lambda text: text.replace('"obs"', f'"obs={CODE}"'),
    "a type to import": lambda text: text.replace("builtins.tuple", "this.tuple"),
    "a function": lambda text: re.sub(r'"target": "torch.ops[^"]*"', '"target": "torch.os.system"', text, count=1),
}


ADDED = {  # parts that torch.export.load() would unpickle, link or take for the program
    "an opaque object": "policy/data/constants/opaque_obj_0",
    "a library": "policy/data/aotinductor/x/x.wrapper.so",
    "a second program": "policy/models/model.jsOn",
    "an old layout": "serialized_exported_program.json",
}


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def craft(path: Path, how: str):
    """Lets a policy run code when it is loaded with torch.export.load() alone."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for name, part in parts.items():
        if how in CRAFTED and name.endswith("models/model.json"):
            parts[name] = CRAFTED[how](part.decode()).encode()
            assert parts[name] != part
        elif how == "a pickled object" and name.endswith(".pt"):
            torch.save(Evil(), "evil.pt")
            parts[name] = Path("evil.pt").read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
        if how in ADDED:
            archive.writestr(ADDED[how], b"{}")


@pytest.mark.parametrize("how", [*CRAFTED, *ADDED, "a pickled object"])
def test_a_policy_that_would_run_code_is_refused(pendulum, capsys, how, own_folder):
    craft(pendulum, how)
    with pytest.raises(SystemExit) as exit:
        play.play(play.Args(pendulum))
    assert exit.value.code == 2 and capsys.readouterr().err.startswith(f"error: cannot play {pendulum}: ")
    assert not (own_folder / "pwned").exists()


BAD = {  # flags, and a part of the sentence that refuses them
    "no file": ({"policy": Path("nowhere.pt2")}, "cannot play nowhere.pt2"),
    "no policy": ({"policy": Path(__file__)}, "is not a zip file"),
    "a checkpoint": ({"policy": Path("checkpoint.pt")}, "it is no policy.pt2 of a training script"),
    "no episode": ({"episodes": 0}, "--episodes must be at least 1"),
    "negative seed": ({"seed": -1}, "--seed"),
    "unknown env": ({"env_id": "Pendulm-v1"}, "Pendulum"),
    "other observations": ({"env_id": "HalfCheetah-v4"}, "observes (17,)"),
    "other actions": ({"env_id": "DiscretePendulum-v0"}, "takes Discrete(2)"),
    "an action out of range": ({"policy": Path("wild.pt2")}, "action 7 is not in Discrete(2)"),
    "no screen": ({"render": True}, "--render needs a screen; use --video"),
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
        save(Path("wild.pt2"), Wild(), torch.zeros(2, 4), "CartPole-v1")
    torch.save({}, "checkpoint.pt")
    with pytest.raises(SystemExit) as exit:
        play.play(play.Args(**{"policy": pendulum} | flags))
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit.value.code == 2 and message.startswith("error: ") and words in message


def test_a_package_is_imported_only_if_the_player_names_it(own_folder, capsys, monkeypatch):
    """The card is part of the file, so it must not say what is imported."""
    (own_folder / "their_package.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('Theirs-v0', entry_point='gymnasium.envs.classic_control:PendulumEnv', max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(str(own_folder))
    env_id = "their_package:Theirs-v0"
    path = save(own_folder / "policy.pt2", Pushes(discrete=False), torch.zeros(2, 3), env_id)
    with pytest.raises(SystemExit):
        play.play(play.Args(path))
    assert f"say --env-id {env_id}" in capsys.readouterr().err and "their_package" not in sys.modules
    assert play.play(play.Args(path, env_id=env_id, episodes=1))["lengths"] == [5]
