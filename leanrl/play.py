# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "pygame==2.6.1",
#     "moviepy==2.2.1", "envpool==1.2.5", "popgym==1.0.7", "minatar==1.0.15", "numpy==2.4.6", "tyro==1.0.17"]
# ///
"""Plays the policy that a training script has left, prints the returns and, with --video, films it.

    python leanrl/play.py runs/.../policy.pt2 --episodes 10 --video

It plays whole games, with unclipped rewards, without exploration, from seeds that training does not use.
The last line of its output is JSON: the returns, their mean and their standard deviation.
A policy is a program: whoever loads one runs it.
"""

import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro


@dataclass
class Args:
    policy: tyro.conf.Positional[Path]  # the file policy.pt2 of a run
    episodes: int = 10  # number of whole games
    seed: int = 1  # seeds of the episodes follow from it; training uses others
    env_id: str | None = None  # env to play in; default: the one that the policy was trained in
    env_kwargs: str | None = None  # settings of the env as JSON; default: those of training, in its env
    video: bool = False  # write an mp4 of every episode to videos/ beside the policy; needs no screen
    render: bool = False  # watch it in a window; needs a screen


def fail(message: str):
    """Ends the program with exit code 2 and one line on stderr."""
    print("error:", " ".join(message.split()), file=sys.stderr)  # a quoted message may span several lines
    sys.exit(2)


def load_policy(path: Path) -> tuple[Callable, list[torch.Tensor], torch.Tensor, dict]:
    """What a policy.pt2 holds: the program, examples of its inputs (2, ...), an action, its card."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # no part of the file is unpickled
    try:
        with zipfile.ZipFile(path) as archive:
            cards = [name for name in archive.namelist() if name.endswith("/extra/card.json")]
            if not cards or archive.testzip():  # torch.export.load() does not look at the checksums
                raise ValueError("it is damaged" if cards else "it is no policy.pt2 of a training script")
            card = json.loads(archive.read(cards[0]))
        program = torch.export.load(io.BytesIO(path.read_bytes()))  # as bytes, from a file of any name
        policy = program.module()
        examples = list(program.example_inputs[0])
        outputs = policy(*(example[:1] for example in examples))  # fails if it takes no single row
        actions = outputs[0] if isinstance(outputs, tuple) else outputs
        return policy, examples, actions[0], {"script": card["script"]} | card["args"]
    except Exception as error:  # a damaged file may lead to any
        fail(f"cannot play {path}: {(str(error) or repr(error)).splitlines()[0]}")


class AtariGame(gym.Env):
    """Whole games of EnvPool's Atari, with unclipped rewards. As in training, a lost life leads to the next serve."""

    render_mode = "rgb_array"
    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def __init__(self, env_id: str):
        import envpool  # an optional dependency

        self.make = lambda **seed: envpool.make(env_id, env_type="gymnasium", num_envs=1, episodic_life=True, **seed)
        self.action_space = gym.spaces.Discrete(self.make().action_space.n)

    def reset(self, *, seed: int, options=None):
        self.pool = self.make(seed=seed)  # EnvPool takes seeds only here
        self.obs, _ = self.pool.reset()
        return self.obs[0], {}

    def step(self, action):
        self.obs, _, _, truncated, info = self.pool.step(np.array([action]))
        return self.obs[0], info["reward"][0], bool(info["terminated"][0]), bool(truncated[0]), {}

    def render(self) -> np.ndarray:  # (168, 168, 3), the newest frame
        return np.broadcast_to(self.obs[0, -1].repeat(2, 0).repeat(2, 1)[..., None], (168, 168, 3))


class MinAtarFilm(gym.Wrapper):
    """Draws MinAtar for a film: its 10 x 10 colours between 0 and 1 become (160, 160, 3) bytes."""

    def render(self) -> np.ndarray:
        return (255 * self.env.render()).astype(np.uint8).repeat(16, 0).repeat(16, 1)


def make_env(args: Args, is_atari: bool, obs: torch.Tensor, action: torch.Tensor) -> gym.Env:
    """Makes an env that takes such an action and observes rows of `obs` (2, ...), if need be flattened."""
    settings = json.loads(args.env_kwargs or "{}")
    if args.video or args.render:
        settings["render_mode"] = "human" if args.render else "rgb_array"
    is_minatar = args.env_id.startswith("MinAtar/")
    if is_minatar:
        from minatar.gym import register_envs  # an optional dependency

        register_envs()
        settings |= {"max_episode_steps": 1000, "disable_env_checker": True}  # as in training
    env = AtariGame(args.env_id) if is_atari else gym.make(args.env_id, **settings)
    env = MinAtarFilm(env) if is_minatar else env
    if env.observation_space.shape != obs.shape[1:]:
        env = gym.wrappers.FlattenObservation(env)
    space = env.action_space
    maps = [env.observation_space.shape, np.prod(space.shape or ()), isinstance(space, gym.spaces.Box)]
    if maps != [obs.shape[1:], action.numel(), action.is_floating_point()]:
        policy = f"the policy maps {tuple(obs.shape[1:])} to {tuple(action.shape)} {action.dtype}"
        raise ValueError(f"it observes {env.observation_space.shape} and takes {space}; {policy}.")
    if args.video:
        folder = f"{args.policy.parent}/videos"
        print(f"films go to {folder}")
        fps = env.metadata.get("render_fps", 15)  # EnvPool shows every fourth frame of 60 per second
        env = gym.wrappers.RecordVideo(env, folder, lambda _: True, name_prefix=f"seed{args.seed}", fps=fps)
    return env


@torch.no_grad()
def play_episode(policy: Callable, examples: list[torch.Tensor], env: gym.Env, seed: int) -> tuple[float, int]:
    """Plays an episode: its return and its length. A second input is memory, at first zeros, or an action mask."""
    takes_mask = len(examples) > 1 and isinstance(policy(*examples), torch.Tensor)  # with memory, it gives a tuple
    memory = [torch.zeros_like(example[:1]) for example in examples[1:]]
    obs, info = env.reset(seed=seed)
    space = env.action_space
    rewards = []
    while True:
        if takes_mask:
            memory = [torch.as_tensor(np.hstack([*info["action_mask"]])[None], dtype=examples[1].dtype)]
        outputs = policy(torch.as_tensor(np.array([obs]), dtype=examples[0].dtype), *memory)
        actions, *memory = outputs if isinstance(outputs, tuple) else [outputs]
        action = actions[0].numpy().astype(space.dtype).reshape(space.shape)[()]  # a number, if the shape is ()
        if isinstance(space, gym.spaces.Box):
            action = action.clip(space.low, space.high)
        if action not in space:  # NaN, too
            fail(f"the policy's action {action} is not in {space}.")
        obs, reward, terminated, truncated, info = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            print(f"seed {seed}: return {sum(rewards):.2f}, {len(rewards)} steps")
            return sum(rewards), len(rewards)


def play(args: Args) -> dict:
    """Plays all episodes, and returns what the last line of the output says."""
    if args.episodes < 1 or args.seed < 0 or (args.video and args.render):
        fail("--episodes must be at least 1, --seed at least 0, and --video and --render exclude each other.")
    policy, examples, action, card = load_policy(args.policy)
    is_atari = examples[0].dtype == torch.uint8 and "env_kwargs" not in card  # a flag that EnvPool lacks
    has_screen = sys.platform != "linux" or os.getenv("DISPLAY") or os.getenv("WAYLAND_DISPLAY")
    if args.render and (is_atari or not has_screen):
        fail("--render needs a screen, and an env that is not EnvPool's; use --video.")
    if args.video and sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo draws without a screen
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # so does pygame
    args.env_id = args.env_id or card["env_id"]
    if args.env_id == card["env_id"]:
        args.env_kwargs = args.env_kwargs or card.get("env_kwargs")
    try:
        env = make_env(args, is_atari, examples[0], action)
    except Exception as error:  # the env's own code may raise anything
        fail(f"cannot play in {args.env_id!r} with {args.env_kwargs or {}}: {error}")
    seeds = np.random.SeedSequence([0x504C4159, args.seed]).generate_state(args.episodes) // 2  # 31 bits
    returns, lengths = map(list, zip(*[play_episode(policy, examples, env, seed) for seed in seeds.tolist()]))
    env.close()
    result = {"policy": str(args.policy), "script": card["script"], "env_id": args.env_id, "seed": args.seed}
    result |= {"mean": float(np.mean(returns)), "std": float(np.std(returns)), "returns": returns, "lengths": lengths}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    play(tyro.cli(Args, prog=f"python {sys.argv[0]}", description=__doc__))
