# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "pygame==2.6.1",
#     "moviepy==2.2.1", "envpool==1.2.5", "popgym==1.0.7", "minatar==1.0.15", "numpy==2.4.6", "tyro==1.0.17"]
# ///
"""Plays the policy that a training script has left, prints the returns and, with --video, films it.

    python leanrl/play.py runs/.../policy.pt2 --episodes 10 --video

It plays whole games, with unclipped rewards, without exploration, from seeds that training does not use.
The last line of its output is JSON: the returns, their mean and their standard deviation.
"""

import contextlib
import io
import json
import math
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

LARGEST = 2**30  # bytes of a policy.pt2
PLAY = 0x504C4159  # stands first in the seeds of play.py; no training run has this --seed by chance
# A policy.pt2 is a ZIP file with text that torch.export.load() runs as Python. These parts and texts alone are safe:
SAFE_PARTS = r"archive_(format|version)|byteorder|\.data/(version|serialization_id)|extra/card\.json|models/model\.json"
SAFE_PARTS += r"|data/(sample_inputs/model\.pt|weights/(weight_\d+|\w+_config\.json)|constants/\w+_config\.json)"
NAMES = r"((?!\w*__)[A-Za-z_]\w*(\.(?!\w*__)\w+)*)?"  # any text that has no key of its own below
TUPLE = '{"type": "builtins.tuple", "context": "null", "children_spec": ['
LEAF = '{"type": null, "context": null, "children_spec": []}'
LEAVES = f"{re.escape(LEAF)}(, {re.escape(LEAF)})?"  # the memory of a policy that has one comes second
OPERATIONS = "add|sub|rsub|neg|mul|div|clip|exp|sqrt|tanh|relu|silu|sigmoid|linear|matmul|conv2d|argmax|one_hot|gt|sum"
OPERATIONS += "|complex|polar|real|imag|cat|stack|unbind|chunk|split|split_with_sizes|select|slice|squeeze|unsqueeze"
OPERATIONS += "|flatten|to|alias|expm1|_assert_tensor_metadata"
ROWS = r"Symbol\('s\d{1,9}', positive=True, integer=True\)"
SAFE_TEXT = {
    "expr_str": rf"\d{{1,18}}|{ROWS}|Mul\(Integer\(\d{{1,18}}\), {ROWS}\)",  # a number, also a multiple of the rows
    "target": rf"torch\.ops\.aten\.({OPERATIONS})\.[A-Za-z]\w*|_operator\.getitem",
    "guards_code": re.escape("L['memory'].size()[0] == L['obs'].size()[0]"),
    "in_spec": re.escape(f"[1, {TUPLE}{TUPLE}")
    + LEAVES
    + re.escape(']}, {"type": "builtins.dict", "context": "[]", "children_spec": []}]}]'),
    "out_spec": rf"\[1, ({re.escape(LEAF)}|{re.escape(TUPLE)}{LEAVES}\]\}})\]",
    "torch_version": r"[\w.+]*",
}


@dataclass
class Args:
    policy: tyro.conf.Positional[Path]  # the file policy.pt2 of a run
    episodes: int = 10  # number of whole games
    seed: int = 1  # seeds of the episodes follow from it; training uses others
    env_id: str | None = None  # env to play in; default: the one that the policy was trained in
    video: bool = False  # write an mp4 of every episode to the folder videos beside the policy; needs no screen
    render: bool = False  # watch it in a window; needs a screen


def fail(message: str):
    """Ends the program with exit code 2 and one line on stderr."""
    print("error:", " ".join(message.split()), file=sys.stderr)  # a quoted message may span several lines
    sys.exit(2)


def unsafe_text(program, key: str = "") -> Iterator[str]:
    """What is unsafe in parsed JSON that stands under a key. Metadata, such as where the code stood, is emptied."""
    if isinstance(program, str) and not re.fullmatch(SAFE_TEXT.get(key, NAMES), program, re.ASCII):
        yield program
    if key == "use_pickle" and program is not False:
        yield "a pickled object"
    if isinstance(program, list):
        for part in program:
            yield from unsafe_text(part, key)
    if isinstance(program, dict):
        if "metadata" in program:
            program["metadata"] = {}
        for name, part in program.items():
            yield from unsafe_text(name)
            yield from unsafe_text(part, name)


def load_policy(path: Path) -> tuple[Callable, list[torch.Tensor], dict]:
    """The policy in a policy.pt2, examples (2, ...) of its inputs, and its card.

    The inputs are what it observes and, if it has one, its memory. It maps them to actions, and to the next memory.
    Fails if the file is damaged, or holds anything that no training script writes and that could run as code. What is
    loaded is a new file in memory, with the parts that have been looked at and no others.
    """
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # no part is unpickled
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(part.file_size for part in archive.infolist()) > LARGEST:
                raise ValueError("it is too large")
            parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        if "extra/card.json" not in parts:
            raise ValueError("it is no policy.pt2 of a training script")
        card = json.loads(parts["extra/card.json"])
        if not re.fullmatch(r"[\w./:-]{1,200}", card["args"]["env_id"]) or not re.fullmatch(r"[\w ]+", card["script"]):
            raise ValueError("its card names no script and env")
        unsafe = [name for name in parts if not re.fullmatch(SAFE_PARTS, name, re.ASCII)]
        checked = io.BytesIO()
        with zipfile.ZipFile(checked, "w") as archive:
            for name, part in parts.items():
                if name.endswith(".json"):
                    content = json.loads(part)
                    unsafe += [] if name == "extra/card.json" else unsafe_text(content)
                    part = json.dumps(content)
                archive.writestr(f"policy/{name}", part)
        if unsafe:
            raise ValueError(f"it holds what no training script writes: {unsafe[0][:200]!r}")
        checked.seek(0)
        with contextlib.redirect_stderr(io.StringIO()):  # what is wrong is said in one sentence
            program = torch.export.load(checked)
            module = program.module()
            examples = list(program.example_inputs[0])

            def policy(*inputs: torch.Tensor) -> list[torch.Tensor]:
                outputs = module(*inputs)
                return list(outputs) if isinstance(outputs, tuple) else [outputs]

            for rows in (2, 1):
                outputs = policy(*(example[:rows] for example in examples))
                if [len(output) for output in outputs] != [rows] * len(examples):
                    raise ValueError("it does not map rows to as many actions")
                if [memory.shape for memory in outputs[1:]] != [memory[:rows].shape for memory in examples[1:]]:
                    raise ValueError("its memory does not keep its shape")
        return policy, examples, card
    except Exception as error:  # a damaged file may lead to any
        fail(f"cannot play {path}: {(str(error) or repr(error)).splitlines()[0]}")


class AtariGame(gym.Env):
    """Whole games of EnvPool's Atari, with unclipped rewards. As in training, a lost life leads to the next serve."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # EnvPool shows every fourth frame of 60 per second
    render_mode = "rgb_array"
    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def __init__(self, env_id: str):
        self.env_id = env_id
        self.action_space = gym.spaces.Discrete(self.make(seed=0).action_space.n)

    def make(self, seed: int):
        import envpool  # an optional dependency

        return envpool.make(self.env_id, env_type="gymnasium", num_envs=1, seed=seed, episodic_life=True)

    def reset(self, *, seed: int, options=None):
        self.pool = self.make(seed)  # EnvPool takes seeds only here
        obs, _ = self.pool.reset()
        self.frame = obs[0, -1]
        return obs[0], {}

    def step(self, action):
        obs, _, _, truncated, info = self.pool.step(np.array([action]))
        self.frame = obs[0, -1]
        return obs[0], info["reward"][0], bool(info["terminated"][0]), bool(truncated[0]), {}

    def render(self) -> np.ndarray:  # (168, 168, 3)
        return np.broadcast_to(self.frame.repeat(2, 0).repeat(2, 1)[..., None], (168, 168, 3))


class MinAtarFilm(gym.Wrapper):
    """Draws MinAtar for a film: its 10 x 10 colours between 0 and 1 become (160, 160, 3) bytes."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def render(self) -> np.ndarray:
        return (255 * self.env.render()).astype(np.uint8).repeat(16, 0).repeat(16, 1)


def make_played_env(env_id: str, is_atari: bool, render_mode: str | None) -> gym.Env:
    """Makes an Atari game, or a Gymnasium env that observes flat vectors, as in training."""
    try:
        if is_atari:
            return AtariGame(env_id)
        settings = {"render_mode": render_mode} if render_mode else {}
        is_minatar = env_id.startswith("MinAtar/")
        if is_minatar:
            from minatar.gym import register_envs  # an optional dependency

            if env_id not in gym.registry:
                register_envs()
            settings["max_episode_steps"] = 1000  # as in training; MinAtar has no limit
            settings["disable_env_checker"] = True  # it warns that MinAtar names no frames per second
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # advice to use v5 of a v4 env
            env = gym.make(env_id, **settings)
        if is_minatar:
            env = MinAtarFilm(env)
    except Exception as error:  # of the env's code, too
        fail(f"cannot make the env {env_id!r}: {error}")
    if len(env.observation_space.shape or ()) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return env


@torch.no_grad()
def play_episode(policy: Callable, examples: list[torch.Tensor], env: gym.Env, seed: int) -> tuple[float, int]:
    """Plays an episode, and returns its return and its length. A memory starts with zeros."""
    memory = [torch.zeros_like(example[:1]) for example in examples[1:]]
    obs, _ = env.reset(seed=seed)
    return_ = 0.0
    length = 0
    while True:
        actions, *memory = policy(torch.as_tensor(obs[None], dtype=examples[0].dtype), *memory)
        action = actions[0].numpy()
        if isinstance(env.action_space, gym.spaces.Discrete):
            action = int(action)
            is_valid = action in env.action_space
        else:
            action = action.reshape(env.action_space.shape)
            is_valid = np.isfinite(action).all()
        if not is_valid:
            fail(f"the policy's action {action} is not in {env.action_space}.")
        obs, reward, terminated, truncated, _ = env.step(action)
        return_ += float(reward)
        length += 1
        if terminated or truncated:
            return return_, length


def play(args: Args) -> dict:
    """Plays all episodes, and returns what the last line of the output says."""
    if args.episodes < 1 or args.seed < 0:
        fail("--episodes must be at least 1, and --seed at least 0.")
    if args.video and args.render:
        fail("--video and --render exclude each other.")
    on_linux = sys.platform == "linux"
    if args.render and on_linux and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        fail("--render needs a screen; use --video.")
    if args.video and on_linux:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo draws without a screen
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # so does pygame
    policy, examples, card = load_policy(args.policy)
    example = examples[0]
    env_id = args.env_id or card["args"]["env_id"]
    if ":" in env_id and not args.env_id:
        fail(f"the policy was trained in an env of another package; to import that, say --env-id {env_id}")

    is_atari = example.dtype == torch.uint8
    if is_atari and args.render:
        fail("EnvPool has no window; use --video.")
    render_mode = "human" if args.render else "rgb_array" if args.video else None
    env = make_played_env(env_id, is_atari, render_mode)
    action = policy(*examples)[0][0]
    is_discrete = isinstance(env.action_space, gym.spaces.Discrete)
    fits = tuple(example.shape[1:]) == env.observation_space.shape
    fits = fits and action.numel() == math.prod(env.action_space.shape or ())
    if not fits or is_discrete == action.is_floating_point():
        asked = f"observes {env.observation_space.shape} and takes {env.action_space}"
        fail(f"{env_id} {asked}; the policy maps {tuple(example.shape[1:])} to {tuple(action.shape)} {action.dtype}.")
    if args.video:
        folder = str(args.policy.parent / "videos")
        name = f"seed{args.seed}"
        try:
            with warnings.catch_warnings(action="ignore"):  # the folder exists
                env = gym.wrappers.RecordVideo(env, folder, episode_trigger=lambda _: True, name_prefix=name)
        except (gym.error.Error, OSError) as error:
            fail(f"cannot write to {folder}: {error}")

    returns = []
    lengths = []
    seeds = np.random.SeedSequence([PLAY, args.seed]).generate_state(args.episodes) // 2  # below 2^31, for EnvPool
    for i, seed in enumerate(seeds.tolist()):
        return_, length = play_episode(policy, examples, env, seed)
        print(f"episode {i + 1}: return {return_:.2f}, {length} steps")
        returns.append(return_)
        lengths.append(length)
    env.close()
    result = {"policy": str(args.policy), "script": card["script"], "env_id": env_id, "seed": args.seed}
    result |= {"mean": float(np.mean(returns)), "std": float(np.std(returns))}
    result |= {"returns": returns, "lengths": lengths}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    play(tyro.cli(Args))
