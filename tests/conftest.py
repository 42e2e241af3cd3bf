"""What the tests share: scripts as modules, training in a throw-away folder, a scripted environment."""

import contextlib
import importlib
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "leanrl"))
sys.path.insert(0, str(ROOT / "benchmark"))
from catalog import RANKS, row  # noqa: E402

FILES = sorted(path.stem for path in (ROOT / "leanrl").glob("*.py") if path.stem != "play")  # that train
JAX = [name for name in FILES if name.endswith("_jax")]
ALL_SCRIPTS = [name for name in FILES if name not in JAX]  # in PyTorch
RAY = [name for name in ALL_SCRIPTS if "_ray" in name]  # that spread their simulators over processes
SCRIPTS = [name for name in ALL_SCRIPTS if row(name).modes is not RANKS and name not in RAY]  # that one process can run
TWINS = [(name.removesuffix("_torchcompile"), name) for name in SCRIPTS if name.endswith("_torchcompile")]
PPO_CONTINUOUS = ["ppo_continuous_action", "ppo_continuous_action_torchcompile"]
ATARI = ["ppo_atari_envpool", "ppo_atari_envpool_torchcompile"]
PPO_DISCRETE = ["ppo", "ppo_torchcompile"]
PPO = PPO_CONTINUOUS + PPO_DISCRETE + ATARI
SLICED = [name for name in SCRIPTS if "dqn_lru" in name]
MEMORY = [name for name in SCRIPTS if row(name).requirements == "memory" and name not in SLICED]  # PPO
DEVICE = [name for name in SCRIPTS if row(name).on_device]  # whose envs are in the file
MUJOCO = [name for name in DEVICE if "mujoco" in name]
FAST_TD3 = [name for name in MUJOCO if "td3" in name]  # which learns from a ring of many worlds
OFF_POLICY = [name for name in SCRIPTS if name not in PPO + MEMORY + DEVICE]
GYM = [name for name in SCRIPTS if name not in ATARI + DEVICE]
DISCRETE = [name for name in SCRIPTS if "dqn" in name or name in PPO_DISCRETE + MEMORY + DEVICE and name not in MUJOCO]
# How many command lines test_fuzz.py draws for each script: with --hypothesis-profile=long, 1,000.
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("long", max_examples=1000, **QUIET)
settings.register_profile("ci", max_examples=14, derandomize=True, **QUIET)
settings.load_profile("ci")


def tiny(name: str) -> dict:
    """Flags of a run of seconds that goes past the first updates."""
    return row(name).tiny


def pytest_addoption(parser):
    parser.addoption(
        "--long", action="store_true", help="run tests whose subject a shorter test has nearly proven, too"
    )


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="runs with --long"))
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def no_network(socket_, address, connect=socket.socket.connect):
    if socket_.family != socket.AF_UNIX and address[0] != "127.0.0.1":
        raise AssertionError(f"a connection to {address}, though nothing here needs a network")
    connect(socket_, address)


WRITERS = []  # those of TensorBoard that the test has opened


def close_writers():
    """A run that was broken off leaves its own open, whose thread fails once its folder is moved or gone."""
    while WRITERS:
        writer = WRITERS.pop()
        if writer.all_writers is not None:  # not closed
            Path(writer.log_dir).mkdir(parents=True, exist_ok=True)
            writer.close()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Every test writes its runs to a folder of its own and leaves torch as it found it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # what is compared should differ by little
    monkeypatch.setattr(socket.socket, "connect", no_network)
    threads = torch.get_num_threads()
    make_writer = SummaryWriter.__init__
    monkeypatch.setattr(SummaryWriter, "__init__", lambda w, *a, **k: WRITERS.append(w) or make_writer(w, *a, **k))
    yield tmp_path
    close_writers()
    if torch.cuda.is_available():  # a capture that failed leaves its stream current
        torch.cuda.set_stream(torch.cuda.default_stream())
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


FORKS = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session")
def fork_server():
    """A process that has imported PyTorch and the scripts: what is forked from it starts at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("PYTHONPATH", f"{ROOT / 'leanrl'}:{ROOT / 'tests'}")
        FORKS.set_forkserver_preload(["conftest", "torch._inductor.compile_fx", *ALL_SCRIPTS])
        multiprocessing.resource_tracker.ensure_running()
        multiprocessing.forkserver.ensure_running()


def call_with_output_in_file(path: Path, function: Callable, *args):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(*args)


def forked(function: Callable, *calls: tuple) -> list[tuple[int, str]]:
    """Calls the function in processes of their own at once: their exit codes and what they print. Needs fork_server."""
    paths = [Path(f"output{i}").absolute() for i in range(len(calls))]
    processes = [
        FORKS.Process(target=call_with_output_in_file, args=(path, function, *call))
        for path, call in zip(paths, calls, strict=True)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 240
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
        process.kill()
        process.join()
    return [(process.exitcode, path.read_text()) for process, path in zip(processes, paths)]


class KnownSeeds(np.random.SeedSequence):
    """Of a list, as the scripts ask: the first seed of a run's envs ends with 0, as ScriptedEnv expects."""

    def generate_state(self, *count) -> np.ndarray:
        if isinstance(self.entropy, list):
            return np.array([10_000 * self.entropy[0] + 10 * self.entropy[1]])
        return super().generate_state(*count)


def train(monkeypatch, name: str, **args) -> SimpleNamespace:
    """Trains on the CPU unless told otherwise: metrics, the policy's final parameters by name, and the run folder."""
    script, policies = load(name), []
    network = row(name).policy

    class SpiedNetwork(getattr(script, network)):
        def __init__(self, *dims):
            super().__init__(*dims)
            policies.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(script, network, SpiedNetwork)
        patch.setattr(np.random, "SeedSequence", KnownSeeds)
        metrics = script.train(script.Args(**({"cuda": False, "save_model": False} | args)))
    (run_dir,) = Path("runs").iterdir()
    run_dir = run_dir.rename(f"run{len(list(Path().iterdir()))}")
    parameters = {k: p.detach().cpu().clone() for k, p in policies[0].named_parameters()}
    return SimpleNamespace(metrics=metrics, parameters=parameters, run_dir=run_dir)


def largest_difference(a: SimpleNamespace, b: SimpleNamespace) -> float:
    return max((a.parameters[k] - b.parameters[k].reshape_as(a.parameters[k])).abs().max().item() for k in a.parameters)


class ScriptedEnv(gym.Env):
    """Episodes that are known in advance. An observation is (env, episode, step); step k of episode e pays 10 e + k.

    Env 0 ends its episodes after 2 (terminated), 3 (truncated), 1 (both) steps and so on; env 1 after 4 (truncated),
    2 (terminated), env 2 as env 0. The env is told which it is by the last digit of its first seed; see KnownSeeds.
    """

    ENDS = (((2, True, False), (3, False, True), (1, True, True)), ((4, False, True), (2, True, False)))
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(np.array([-0.5, -3.0], np.float32), np.array([0.1, np.inf], np.float32))
    actions: list[np.ndarray] = []
    seeds: list[int | None] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        if seed is not None:
            self.index, self.episode = seed % 10, -1
        self.episode, self.step_in_episode = self.episode + 1, 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.index, self.episode, self.step_in_episode], np.float32)

    def step(self, action):
        self.actions.append(action)  # kept as it is: whoever overwrites it is found out
        self.step_in_episode += 1
        ends = self.ENDS[self.index % 2]
        length, terminates, truncates = ends[self.episode % len(ends)]
        over = self.step_in_episode == length
        reward = 10.0 * self.episode + self.step_in_episode
        return self.observe(), reward, over and terminates, over and truncates, {}


class BoundedEnv(ScriptedEnv):
    """With finite bounds, other in each dimension."""

    action_space = gym.spaces.Box(np.array([-0.5, -3.0], np.float32), np.array([0.1, 2.0], np.float32))


class DictEnv(gym.Env):
    """Observes a dictionary, acts in a matrix, ends by truncation after 5 steps."""

    observation_space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2, 2)), "b": gym.spaces.Discrete(3)})
    action_space = gym.spaces.Box(-1, 1, (2, 2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return {"a": self.np_random.random((2, 2), np.float32), "b": 1}, {}

    def step(self, action):
        assert action.shape == (2, 2)
        self.t += 1
        return {"a": self.np_random.random((2, 2), np.float32), "b": 2}, 1.0, False, self.t == 5, {}


class IdleEnv(BoundedEnv):
    """Observes nothing but zeros."""

    def observe(self):
        return np.zeros(3, np.float32)


class DiscreteScriptedEnv(ScriptedEnv):
    """With three actions, numbered from 1."""

    action_space = gym.spaces.Discrete(3, start=1)


class DiscreteDictEnv(DictEnv):
    """With three actions, numbered from 1."""

    action_space = gym.spaces.Discrete(3, start=1)

    def step(self, action):
        assert action in (1, 2, 3)
        return super().step(np.zeros((2, 2)))


class ImageEnv(DictEnv):
    """Observes an image."""

    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)


class RamEnv(DictEnv):
    """Observes a vector of bytes."""

    observation_space = gym.spaces.Box(0, 255, (8,), np.uint8)


class SequenceEnv(DictEnv):
    """Observes a sequence of varying length."""

    observation_space = gym.spaces.Sequence(gym.spaces.Box(-1, 1, (2,)))


class StuckEnv(DictEnv):
    """Has no choice in one of many dimensions of its action, of which NumPy makes several lines."""

    action_space = gym.spaces.Box(np.linspace(-2, 0.5, 20, dtype=np.float32), np.full(20, 0.5, np.float32))


class DoubleEnv(BoundedEnv):
    """With bounds in float64."""

    action_space = gym.spaces.Box(np.array([-0.5, -3.0]), np.array([0.1, 2.0]), dtype=np.float64)


class Springs:
    """Physics for a GPU that is not there: each number of a world swings, pushed by the mean control."""

    dtype = torch.float32
    no_room = 1

    def __init__(self, model, frame_skip, names, num_envs, device, args):
        self.overflow = torch.zeros(num_envs, dtype=torch.int32, device=device)
        self.on_stream = contextlib.nullcontext

    def launch(self):
        state = self.state + 0.1 * self.ctrl.mean(-1, keepdim=True) - 0.05 * self.state.roll(1, -1)
        self.state.copy_(state.clamp(-2, 2))

    def step(self, state: torch.Tensor, ctrl: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "state"):
            self.state, self.ctrl = state.clone(), ctrl.clone()
        self.state.copy_(state)
        self.ctrl.copy_(ctrl)
        self.launch()
        return self.state.clone()


class ScriptedPool:
    """ScriptedEnv's episodes as EnvPool's Atari envs tell of them; a game is two episodes, or ends with a truncation.

    The first pixels of a frame are (env, episode, step); unclipped rewards are ten times those of ScriptedEnv.
    """

    action_space = gym.spaces.Discrete(4)
    actions: list[list[int]] = []  # of each step, of all envs of a pool

    def __init__(self, env_id: str, seeds: list[int], num_threads: int = 0):
        self.envs = [ScriptedEnv() for _ in seeds]
        self.seeds, self.elapsed = seeds, np.zeros(len(seeds), int)
        self.done, self.game_over = [False] * len(seeds), [False] * len(seeds)

    def frames(self, obs: list[np.ndarray]) -> np.ndarray:
        frames = np.zeros((len(obs), 4, 84, 84), np.uint8)
        frames[:, 0, 0, :3] = obs
        return frames

    def reset(self):
        return self.frames([env.reset(seed=seed)[0] for env, seed in zip(self.envs, self.seeds, strict=True)]), {}

    def send(self, action: np.ndarray):
        self.sent = action

    def recv(self):
        self.actions.append(self.sent.tolist())
        obs, reward, terminated, truncated, game_over = zip(*map(self.step_one, range(len(self.envs))), strict=True)
        info = {"reward": 10 * np.array(reward, np.float32), "terminated": np.array(game_over, np.int32)}
        info["elapsed_step"] = self.elapsed.copy()
        return self.frames(obs), np.array(reward, np.float32), np.array(terminated), np.array(truncated), info

    def step(self, action: np.ndarray):
        self.send(action)
        return self.recv()

    def step_one(self, i: int):
        env = self.envs[i]
        if self.done[i]:
            self.done[i] = False
            self.elapsed[i] *= not self.game_over[i]
            return env.reset()[0], 0.0, False, False, False
        obs, reward, terminated, truncated, _ = env.step(np.zeros(2))
        self.elapsed[i] += 1
        self.done[i] = terminated or truncated
        self.game_over[i] = truncated or env.episode % 2 == 1
        return obs, reward, terminated, truncated, terminated and self.game_over[i]

    def close(self):
        pass


class QuadrantPool:
    """Games of 20 steps; naming the bright quadrant of a frame pays 1, another 0."""

    action_space = gym.spaces.Discrete(4)

    def __init__(self, env_id: str, seeds: list[int], num_threads: int = 0):
        self.rng, self.t = np.random.default_rng(seeds), np.zeros(len(seeds), int)

    def observe(self):
        self.bright = self.rng.integers(4, size=len(self.t))
        frames = np.zeros((len(self.t), 4, 2, 42, 2, 42), np.uint8)
        for i, bright in enumerate(self.bright):
            frames[i, :, bright // 2, :, bright % 2] = 255
        return frames.reshape(-1, 4, 84, 84)

    def reset(self):
        return self.observe(), {}

    def send(self, action: np.ndarray):
        self.sent = np.array(action)

    def recv(self):
        resets = self.t == 20
        reward = ((self.sent == self.bright) & ~resets).astype(np.float32)
        self.t = np.where(resets, 0, self.t + 1)
        over = self.t == 20
        info = {"reward": reward, "terminated": over.astype(np.int32), "elapsed_step": self.t.copy()}
        return self.observe(), reward, over, np.zeros_like(over), info

    def step(self, action: np.ndarray):
        self.send(action)
        return self.recv()

    def close(self):
        pass


class CueEnv(gym.Env):
    """Shows one of two cues, then eight blanks, then a question: naming the cue pays 1, the other one -1."""

    observation_space = gym.spaces.Discrete(4)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue = int(self.np_random.integers(2))
        self.t = 0
        return self.cue, {}

    def step(self, action):
        self.t += 1
        over = self.t == 10
        reward = 0 if not over else 1 if action == self.cue else -1
        return (3 if self.t == 9 else 2), reward, over, False, {}


class RaisingEnv(BoundedEnv):
    """Has a defect that shows in its third step."""

    def step(self, action):
        if self.step_in_episode == 2:
            raise ZeroDivisionError("a defect of the env")
        return super().step(action)

    ENDS = (((5, True, False),),) * 2


class IntegerResetEnv(DictEnv):
    """Observes integers at first, then what is no integer."""

    observation_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([0, 1]), {}

    def step(self, action):
        _, *rest = super().step(action)
        return np.array([0.25, 0.75]), *rest


ENVS = (
    ScriptedEnv,
    BoundedEnv,
    IdleEnv,
    DiscreteScriptedEnv,
    DictEnv,
    DiscreteDictEnv,
    ImageEnv,
    RamEnv,
    SequenceEnv,
    StuckEnv,
    DoubleEnv,
    RaisingEnv,
    IntegerResetEnv,
    CueEnv,
)
for env in ENVS:
    gym.register(env.__name__ + "-v0", entry_point=env, disable_env_checker=True)
