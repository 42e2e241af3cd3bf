# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "mujoco-warp==4.0.0",
#     "warp-lang==1.19.0", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""TD3 in many MuJoCo worlds at once: distributional critics, and few updates on large batches (FastTD3).

    python leanrl/td3_mujoco.py --env-id HalfCheetah-v5

Papers: Seo et al. 2025, https://arxiv.org/abs/2505.22642; Fujimoto et al. 2018 (TD3), whose equations are "eq." below.
Fast twin: td3_mujoco_torchcompile.py. `diff -u` the two files to see what makes it faster.
Shapes: N = num_envs, B = batch_size, n = num_steps, M = num_atoms; O, A = sizes of an observation and an action.
S = size of a world's state, which is all that a step of the simulator depends on: a row of numbers.
Differences from the authors' FastTD3:
1. A target actor picks the target's action, with noise of 0.2; theirs is the actor, with 0.001.
2. The targets move with the actor, as in TD3; theirs move after each update of the critics.
3. The actor climbs the first critic, theirs the smaller. A step that only resets a world has weight 0.
4. A world keeps its scale of noise. The first actions are random. Sizes and rates are our own.
"""

import copy
import json
import math
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import gymnasium as gym
import mujoco
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

REPORT_EVERY = 100  # steps of all worlds between two reports, in which the host waits for the device
ASSETS = Path(gym.__file__).parent / "envs/mujoco/assets"  # Gymnasium's models
FORCES = {"cacc", "cfrc_int", "cfrc_ext"}  # arrays that a step of MuJoCo leaves out


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "HalfCheetah-v5"  # a task of this file, by its name in ROBOTS
    physics: Literal["auto", "warp", "host"] = "auto"  # MuJoCo Warp, or C MuJoCo on the cores; auto: by device
    nconmax: int | None = None  # contacts of a world that Warp has memory for; default: Warp's guess
    njmax: int | None = None  # constraints of a world that Warp has memory for; default: Warp's guess
    graph_conditional: bool = True  # let Warp's solver stop early inside a CUDA graph, which needs CUDA 12.4
    total_timesteps: int = 1_000_000  # env steps, summed over all worlds
    learning_rate: float = 1e-3  # learning rate of the actor and the critics
    weight_decay: float = 0.1  # weight decay of AdamW
    num_envs: int | None = None  # number of worlds, stepped together; default: 64, or 1,024 on a GPU
    buffer_size: int = 10_000  # steps of each world in the replay: 104 bytes each in HalfCheetah, 1,472 in Humanoid
    batch_size: int | None = None  # transitions per update; default: 256, or 32,768 on a GPU
    num_updates: int = 4  # updates per step of all worlds, a multiple of --policy-frequency
    num_steps: int = 3  # rewards that a target sums before it takes the target critic's value
    gamma: float = 0.99  # discount factor
    tau: float = 0.1  # how far the target networks move towards the trained ones at each update of the actor
    num_atoms: int = 101  # values that the critics' distributions are made of
    v_min: float = -1000.0  # least of these values, of a discounted return
    v_max: float = 1000.0  # largest of these values: at gamma 0.99, a reward of 10 in each step
    policy_noise: float = 0.2  # std of noise on the target's actions, relative to half the action range
    noise_clip: float = 0.5  # largest noise on the target's actions, relative to half the action range
    std_min: float = 0.001  # std of noise on the actions of the last world, relative to half the action range
    std_max: float = 0.4  # std of noise on the actions of the first world; those between have stds between
    learning_starts: int = 10_000  # env steps with random actions before the first update
    policy_frequency: int = 2  # update the actor and the targets after every so many critic updates

    save_model: bool = True  # export the trained policy as policy.pt2 to the run folder
    checkpoint_interval: int = 0  # env steps between saves; 0: only at signals
    resume: str | None = None  # go on from this checkpoint.pt; "auto" takes the newest of the same settings

    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project, used with --track
    wandb_entity: str | None = None  # Weights & Biases team or user, used with --track


class HalfCheetah:
    """Gymnasium's HalfCheetah-v5: two legs run. Its functions see arrays of MjData by name, (N, ..) of each."""

    xml = ASSETS / "half_cheetah.xml"
    frame_skip = 5  # steps of the simulator in an env step
    time_limit = 1000  # env steps, after which an episode is truncated
    extras = ()  # arrays besides qpos and qvel that the functions read, flat

    @staticmethod
    def start(rng: np.random.Generator, qpos: np.ndarray, nv: int) -> tuple[np.ndarray, np.ndarray]:
        """Where an episode starts: qpos (nq,), near that of the model, and qvel (nv,)."""
        return qpos + rng.uniform(-0.1, 0.1, len(qpos)), 0.1 * rng.standard_normal(nv)

    @staticmethod
    def outcome(old: dict, new: dict, ctrl: Tensor, dt: float) -> tuple[Tensor, Tensor]:
        """Reward (N,) and termination (N,) of a step of dt seconds, before and after which these were the arrays."""
        speed = (new["qpos"][:, 0] - old["qpos"][:, 0]) / dt
        return speed - 0.1 * ctrl.square().sum(-1), torch.zeros_like(speed, dtype=torch.bool)

    @staticmethod
    def observe(now: dict) -> Tensor:  # (N, O)
        return torch.cat([now["qpos"][:, 1:], now["qvel"]], -1)


class Hopper:
    """Gymnasium's Hopper-v5: one leg hops."""

    xml = ASSETS / "hopper.xml"
    frame_skip = 4
    time_limit = 1000
    extras = ()

    @staticmethod
    def start(rng: np.random.Generator, qpos: np.ndarray, nv: int) -> tuple[np.ndarray, np.ndarray]:
        return qpos + rng.uniform(-5e-3, 5e-3, len(qpos)), rng.uniform(-5e-3, 5e-3, nv)

    @staticmethod
    def outcome(old: dict, new: dict, ctrl: Tensor, dt: float) -> tuple[Tensor, Tensor]:
        speed = (new["qpos"][:, 0] - old["qpos"][:, 0]) / dt
        height = new["qpos"][:, 1]
        angle = new["qpos"][:, 2]
        in_range = (torch.cat([new["qpos"][:, 2:], new["qvel"]], -1).abs() < 100).all(-1)
        healthy = in_range & (height > 0.7) & (angle.abs() < 0.2)
        return healthy + speed - 1e-3 * ctrl.square().sum(-1), ~healthy

    @staticmethod
    def observe(now: dict) -> Tensor:
        return torch.cat([now["qpos"][:, 1:], now["qvel"].clamp(-10, 10)], -1)


class Walker2d:
    """Gymnasium's Walker2d-v5: two legs walk in a plane."""

    xml = ASSETS / "walker2d_v5.xml"
    frame_skip = 4
    time_limit = 1000
    extras = ()
    start = Hopper.start
    observe = Hopper.observe

    @staticmethod
    def outcome(old: dict, new: dict, ctrl: Tensor, dt: float) -> tuple[Tensor, Tensor]:
        speed = (new["qpos"][:, 0] - old["qpos"][:, 0]) / dt
        height = new["qpos"][:, 1]
        angle = new["qpos"][:, 2]
        healthy = (height > 0.8) & (height < 2) & (angle.abs() < 1)
        return healthy + speed - 1e-3 * ctrl.square().sum(-1), ~healthy


class Ant:
    """Gymnasium's Ant-v5: four legs walk. cfrc_ext has 6 numbers for each body, and xpos 3; body 0 is the world."""

    xml = ASSETS / "ant.xml"
    frame_skip = 5
    time_limit = 1000
    extras = ("xpos", "cfrc_ext")
    start = HalfCheetah.start

    @staticmethod
    def outcome(old: dict, new: dict, ctrl: Tensor, dt: float) -> tuple[Tensor, Tensor]:
        speed = (new["xpos"][:, 3] - old["xpos"][:, 3]) / dt
        height = new["qpos"][:, 2]
        healthy = (height >= 0.2) & (height <= 1)
        contact = new["cfrc_ext"].clamp(-1, 1).square().sum(-1)
        return healthy + speed - 0.5 * ctrl.square().sum(-1) - 5e-4 * contact, ~healthy

    @staticmethod
    def observe(now: dict) -> Tensor:
        return torch.cat([now["qpos"][:, 2:], now["qvel"], now["cfrc_ext"][:, 6:].clamp(-1, 1)], -1)


class Humanoid:
    """Gymnasium's Humanoid-v5: it walks upright. Each body has 10 numbers in cinert and 6 in cvel and cfrc_ext."""

    xml = ASSETS / "humanoid.xml"
    frame_skip = 5
    time_limit = 1000
    extras = ("subtree_com", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")

    @staticmethod
    def start(rng: np.random.Generator, qpos: np.ndarray, nv: int) -> tuple[np.ndarray, np.ndarray]:
        return qpos + rng.uniform(-0.01, 0.01, len(qpos)), rng.uniform(-0.01, 0.01, nv)

    @staticmethod
    def outcome(old: dict, new: dict, ctrl: Tensor, dt: float) -> tuple[Tensor, Tensor]:
        speed = (new["subtree_com"][:, 0] - old["subtree_com"][:, 0]) / dt  # of the centre of mass
        height = new["qpos"][:, 2]
        healthy = (height > 1) & (height < 2)
        contact = (5e-7 * new["cfrc_ext"].square().sum(-1)).clamp(max=10)
        return 5 * healthy + 1.25 * speed - 0.1 * ctrl.square().sum(-1) - contact, ~healthy

    @staticmethod
    def observe(now: dict) -> Tensor:
        bodies = [now["cinert"][:, 10:], now["cvel"][:, 6:], now["qfrc_actuator"][:, 6:], now["cfrc_ext"][:, 6:]]
        return torch.cat([now["qpos"][:, 2:], now["qvel"], *bodies], -1)


ROBOTS = {"HalfCheetah-v5": HalfCheetah, "Hopper-v5": Hopper, "Walker2d-v5": Walker2d, "Ant-v5": Ant}
ROBOTS |= {"Humanoid-v5": Humanoid}


def read_row(data: mujoco.MjData, names: list[str]) -> np.ndarray:
    """The state of a world as one row (S,)."""
    return np.concatenate([getattr(data, name).ravel() for name in names])


class HostPhysics:
    """C MuJoCo, a thread for each core, in float64: Gymnasium's observations, bit for bit."""

    dtype = torch.float64

    def __init__(self, model: mujoco.MjModel, frame_skip: int, names: list[str]):
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET  # step_worlds() resets
        self.model = model
        self.frame_skip = frame_skip
        self.names = names
        self.has_forces = not FORCES.isdisjoint(names)
        self.datas = [mujoco.MjData(model) for _ in os.sched_getaffinity(0)]
        self.pool = ThreadPoolExecutor(len(self.datas))

    def step(self, state: Tensor, ctrl: Tensor) -> Tensor:
        """The states (N, S) after an env step with controls (N, A)."""
        bits = mujoco.mjtState
        parts = int(bits.mjSTATE_QPOS | bits.mjSTATE_QVEL | bits.mjSTATE_WARMSTART | bits.mjSTATE_CTRL)
        rows = torch.cat([state[:, : self.model.nq + 2 * self.model.nv], ctrl], -1).numpy()
        new = np.empty(state.shape)

        def step_some(k: int):
            data = self.datas[k]
            for i in range(k, len(rows), len(self.datas)):
                mujoco.mj_setState(self.model, data, rows[i], parts)
                mujoco.mj_step(self.model, data, self.frame_skip)
                if self.has_forces:
                    mujoco.mj_rnePostConstraint(self.model, data)
                new[i] = read_row(data, self.names)

        list(self.pool.map(step_some, range(len(self.datas))))
        return torch.from_numpy(new)


class WarpPhysics:
    """MuJoCo Warp on the device, in float32."""

    dtype = torch.float32

    def __init__(self, model: mujoco.MjModel, frame_skip: int, names: list[str], num_envs: int, device, args: Args):
        import mujoco_warp  # these take seconds, and C MuJoCo does without them
        import warp

        self.mjw = mujoco_warp
        self.wp = warp
        self.frame_skip = frame_skip
        self.has_forces = not FORCES.isdisjoint(names)
        self.is_cuda = device.type == "cuda"
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON  # Warp has no PGS
        with warp.ScopedDevice(str(device)):
            self.model = mujoco_warp.put_model(model)
            self.model.opt.warn_overflow = 0  # the report tells
            self.model.opt.graph_conditional = args.graph_conditional
            self.data = mujoco_warp.make_data(model, nworld=num_envs, nconmax=args.nconmax, njmax=args.njmax)
        self.views = [warp.to_torch(getattr(self.data, name)).flatten(1) for name in names]
        self.ctrl = warp.to_torch(self.data.ctrl)
        bits = mujoco_warp.OverflowType
        self.no_room = int(bits.NEFC | bits.NJMAX_NNZ | bits.BROADPHASE | bits.NARROWPHASE)
        self.overflow = warp.to_torch(self.data.overflow)  # (N,), with these bits where a contact found no room

    def on_stream(self):
        """In a with block, Warp launches on PyTorch's stream."""
        if self.is_cuda:
            return self.wp.ScopedStream(self.wp.stream_from_torch(torch.cuda.current_stream()), sync_enter=False)
        return self.wp.ScopedDevice("cpu")  # Warp's default is a GPU if there is one

    def launch(self):
        """Starts the kernels of an env step."""
        for _ in range(self.frame_skip):
            self.mjw.step(self.model, self.data)
        if self.has_forces:
            self.mjw.rne_postconstraint(self.model, self.data)

    def step(self, state: Tensor, ctrl: Tensor) -> Tensor:
        """The states (N, S) after an env step with controls (N, A)."""
        for view, part in zip(self.views, state.split([view.shape[1] for view in self.views], -1)):
            view.copy_(part)
        self.ctrl.copy_(ctrl)
        with self.on_stream():
            self.launch()
        return torch.cat(self.views, -1)


def action_scale(space: gym.spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Center and scale, which map -1 .. 1 to the bounds of a Box; 0 and 1 in dimensions that lack a bound."""
    is_bounded = (space.low > -1e30) & (space.high < 1e30)  # some envs write the largest float for no bound
    low = np.where(is_bounded, space.low, -1.0)
    high = np.where(is_bounded, space.high, 1.0)
    return (high + low) / 2, (high - low) / 2


class Worlds:
    """N worlds of a task: their states are tensors, and so is all that a step does (docs/device.md)."""

    num_uniforms = 1  # random numbers that a step of one world takes

    def __init__(self, task: type, num_envs: int, device: torch.device, args: Args):
        model = mujoco.MjModel.from_xml_path(str(task.xml))
        whole = mujoco.mj_stateSize(model, int(mujoco.mjtState.mjSTATE_FULLPHYSICS)) - 1  # without the time
        if whole > model.nq + model.nv or model.neq or model.nmocap:
            fail(f"{task.xml} has actuator states, delays, equalities, mocap bodies or plugins; no row has them.")
        names = ["qpos", "qvel", "qacc_warmstart", *task.extras]
        data = mujoco.MjData(model)
        rng = np.random.default_rng(args.seed)
        starts = []
        for _ in range(1000):
            mujoco.mj_resetData(model, data)
            data.qpos[:], data.qvel[:] = task.start(rng, model.qpos0, model.nv)
            mujoco.mj_forward(model, data)
            starts.append(read_row(data, names))
        if args.physics == "warp":
            self.physics = WarpPhysics(model, task.frame_skip, names, num_envs, device, args)
        else:
            self.physics = HostPhysics(model, task.frame_skip, names)
        self.starts = torch.as_tensor(np.array(starts), dtype=self.physics.dtype, device=device)  # (1000, S)
        self.sizes = {name: getattr(data, name).size for name in names}
        self.task = task
        self.time_limit = task.time_limit
        self.dt = model.opt.timestep * task.frame_skip  # seconds of an env step
        ranges = np.where(model.actuator_ctrllimited[:, None], model.actuator_ctrlrange, [-np.inf, np.inf])
        self.action_space = gym.spaces.Box(*ranges.astype(np.float32).T)
        center, scale = action_scale(self.action_space)
        bounds = (center, scale, self.action_space.low, self.action_space.high)
        self.bounds = torch.as_tensor(np.array(bounds), dtype=torch.float32, device=device)  # (4, A)
        self.act_dim = model.nu
        self.obs_dim = self.observation(self.starts).shape[1]

    def arrays(self, state: Tensor) -> dict[str, Tensor]:
        """What the columns of states (N, S) are."""
        return dict(zip(self.sizes, state.split([*self.sizes.values()], -1)))

    def initial(self, uniform: Tensor) -> Tensor:  # (N, num_uniforms) in [0, 1) -> state (N, S)
        return self.starts[(uniform[:, 0] * len(self.starts)).long()]

    def transition(self, state: Tensor, action: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state (N, S), the reward (N,), and whether the episode terminates (N,)."""
        center, scale, low, high = self.bounds
        ctrl = (center + scale * action).clamp(low, high)
        new = self.physics.step(state, ctrl)
        return new, *self.task.outcome(self.arrays(state), self.arrays(new), ctrl, self.dt)

    def observation(self, state: Tensor) -> Tensor:  # (N, O)
        return self.task.observe(self.arrays(state))


def step_worlds(env: Worlds, worlds: dict[str, Tensor], action: Tensor, uniform: Tensor):
    """Steps N worlds: returns what they are then, their rewards (N,), which episodes terminated, and which steps count.

    A world whose episode has ended is reset instead; that step ignores the action and has reward 0 (autoreset mode
    NEXT_STEP). So is a world with a number beyond 1e6, or NaN; its episode ends, and it is counted as broken.
    """
    over = worlds["done"]
    state, reward, terminated = env.transition(worlds["state"], action, uniform)
    broken = ~(state.abs() < 1e6).all(-1) & ~over
    valid = ~over & ~broken
    state = torch.where(valid[:, None], state, env.initial(uniform))
    reward = torch.where(valid, reward, 0).float()
    terminated = terminated & valid
    clock = (worlds["clock"] + 1).masked_fill(~valid, 0)
    score = worlds["score"].masked_fill(~valid, 0) + reward
    ended = terminated | (clock >= env.time_limit)
    last_return = torch.where(ended, score, worlds["last_return"])
    last_length = torch.where(ended, clock, worlds["last_length"])
    now = {"state": state, "clock": clock, "score": score, "done": ended | broken, "broken": worlds["broken"] + broken}
    return now | {"last_return": last_return, "last_length": last_length}, reward, terminated, valid


def first_worlds(env: Worlds, num_envs: int, device: torch.device) -> dict[str, Tensor]:
    """N worlds for step_worlds(). Their clocks differ, so that they are not all truncated in the same step."""
    clock = torch.randint(env.time_limit, (num_envs,), device=device)
    unknown = torch.full((num_envs,), math.nan, device=device)  # the first episode, cut short, has no score
    worlds = {"state": env.initial(torch.rand(num_envs, env.num_uniforms, device=device)), "clock": clock}
    worlds |= {"score": unknown, "done": torch.zeros_like(clock, dtype=torch.bool), "broken": torch.zeros_like(clock)}
    return worlds | {"last_return": unknown.clone(), "last_length": torch.zeros_like(clock)}


def add_moments(moments: Tensor, x: Tensor, valid: Tensor):
    """Adds the valid (T, N) of rows x (T, N, n) to their count, mean and variance (3, n) (Chan et al. 1983)."""
    weight = valid[..., None].double()
    added = weight.sum()
    mean = (weight * x).sum((0, 1)) / added.clamp(min=1)
    variance = (weight * (x - mean) ** 2).sum((0, 1)) / added.clamp(min=1)
    count = moments[0] + added
    moved = mean - moments[1]
    variance = (moments[0] * moments[2] + added * variance + moved**2 * moments[0] * added / count) / count
    moments.copy_(torch.stack([count, moments[1] + moved * added / count, variance]))


def normalize(moments: Tensor, x: Tensor) -> Tensor:
    """Scales rows x (.., n) by their moments (3, n), and clips at 10."""
    return ((x - moments[1]) / (moments[2] + 1e-8).sqrt()).clamp(-10, 10).float()


class Actor(nn.Module):
    """A deterministic policy whose actions lie within -1 .. 1."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, action_dim), nn.Tanh()
        )

    def forward(self, obs: Tensor) -> Tensor:  # (.., O) -> (.., A)
        return self.layers(obs)


class NormalizedPolicy(nn.Module):
    """The policy as it is exported: it normalizes observations, and its actions lie within the env's bounds."""

    def __init__(self, actor: Actor, moments: Tensor, bounds: Tensor):
        super().__init__()
        self.actor = actor
        self.register_buffer("mean", moments[1].clone())  # in float64, for large numbers that differ by little
        self.register_buffer("std", (moments[2] + 1e-8).sqrt())
        self.register_buffer("bounds", bounds)

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B, A)
        center, scale, low, high = self.bounds
        action = self.actor(((obs - self.mean) / self.std).clamp(-10, 10).float())
        return (center + scale * action).clamp(low, high)


class DistributionalCritic(nn.Module):
    """How likely each atom, a value of an action in a state, is: logits."""

    def __init__(self, obs_dim: int, action_dim: int, num_atoms: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim + action_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, num_atoms)
        )

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:  # (B, O), (B, A) -> (B, M)
        return self.layers(torch.cat([obs, action], -1))


# A ring has C rows. Row t % C holds, of each env, the observation at time t, and the action, reward, terminated and
# valid of the step that led to it: valid is 0 if it only reset the env. A transition is two neighbouring rows.
def split_row(row, obs_dim: int):
    """Views of the parts of replay rows (.., O + A + 3): obs, action, reward, terminated, valid."""
    return row[..., :obs_dim], row[..., obs_dim:-3], row[..., -3], row[..., -2], row[..., -1]


def smooth(action: Tensor, args: Args) -> Tensor:
    """Adds clipped noise to the target's actions (B, A), so that similar actions get similar values (eq. 14)."""
    noise = (torch.randn_like(action) * args.policy_noise).clamp(-args.noise_clip, args.noise_clip)
    return (action + noise).clamp(-1, 1)


def sample_n_steps(ring: Tensor, newest: int | Tensor, starts: int | Tensor, obs_dim: int, args: Args) -> dict:
    """A batch whose first steps are drawn uniformly from the last `starts` that n steps have followed by now.

    The rewards that follow are summed up to the end of the episode, or n of them; `next_obs` comes after these.
    """
    rows, num_envs, _ = ring.shape  # float64 below, since float32 would miss rows of a large ring
    draw = (torch.rand(args.batch_size, dtype=torch.float64, device=ring.device) * (starts * num_envs)).long()
    i = draw % num_envs  # (B,), a world
    first = newest - (args.num_steps - 1) - draw // num_envs  # (B,), a time
    k = torch.arange(args.num_steps, device=ring.device)[:, None]  # (n, 1)
    _, _, reward, terminated, valid = split_row(ring[(first + k) % rows, i], obs_dim)  # (n, B)
    counts = valid.cumprod(0)  # a step that only resets ends the sum, whether its episode terminated or not
    length = counts.sum(0).long()
    has_next = 1 - (counts * terminated).amax(0)
    batch = {"obs": ring[(first - 1) % rows, i, :obs_dim], "action": ring[first % rows, i, obs_dim:-3]}
    batch |= {"reward": (counts * reward * args.gamma**k).sum(0), "discount": has_next * args.gamma**length}
    batch |= {"next_obs": ring[(first + length - 1) % rows, i, :obs_dim]}
    return batch | {"weight": valid[0] / valid[0].sum().clamp(min=1)}  # 0 where the first step is a reset


def project(probability: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """The distribution of reward + discount * value (B, M), if the value's is `probability` (B, M) on the support (M,).

    Each atom moves; its mass is shared between the two places nearest to it (Bellemare et al. 2017, Algorithm 1).
    """
    gap = (support[-1] - support[0]) / (len(support) - 1)
    moved = (reward[:, None] + discount[:, None] * support).clamp(support[0], support[-1])
    place = (moved - support[0]) / gap  # (B, M), from 0 to M - 1
    lower = place.long().clamp(0, len(support) - 2)  # also where a number is not finite
    share = place - lower  # of the upper one
    result = torch.zeros_like(probability).scatter_add_(1, lower, probability * (1 - share))
    return result.scatter_add_(1, lower + 1, probability * share)


def smaller(logits: Tensor, support: Tensor) -> Tensor:
    """Of two critics' distributions, logits (2, B, M), that of the smaller mean: probabilities (B, M)."""
    probability = logits.softmax(-1)
    q1, q2 = probability @ support
    return torch.where((q1 < q2)[:, None], *probability)


def distribution_losses(logits: Tensor, target: Tensor, weight: Tensor, support: Tensor) -> tuple[Tensor, dict]:
    """The sum () of both critics' cross entropies with the target (B, M), and what to log; logits are (2, B, M)."""
    log_probability = logits.log_softmax(-1)
    loss = -(weight * (target * log_probability).sum(-1)).sum(-1)  # (2,)
    q1, q2 = (log_probability.detach().exp() @ support) @ weight
    loss1, loss2 = loss.detach()
    losses = {"qf1_values": q1, "qf2_values": q2, "qf1_loss": loss1, "qf2_loss": loss2}
    return loss.sum(), losses | {"qf_loss": (loss1 + loss2) / 2}


def learn_distributions(batch, actor_target, critics, critics_target, optimizer, support, args: Args) -> dict:
    """Moves both critics towards the target distribution of the one whose mean is smaller (eq. 10)."""
    with torch.no_grad():
        next_action = smooth(actor_target(batch["next_obs"]), args)
        next_logits = torch.stack([critic(batch["next_obs"], next_action) for critic in critics_target])
        target = project(smaller(next_logits, support), batch["reward"], batch["discount"], support)
    logits = torch.stack([critic(batch["obs"], batch["action"]) for critic in critics])
    loss, losses = distribution_losses(logits, target, batch["weight"], support)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return losses


def learn_mean_actor(batch, actor, actor_target, critics, critics_target, optimizer, support, args: Args) -> dict:
    """Moves the actor towards a larger mean of the first critic (eq. 1), then all targets after their networks."""
    logits = critics[0](batch["obs"], actor(batch["obs"]))
    loss = -(batch["weight"] * (logits.softmax(-1) @ support)).sum()
    optimizer.zero_grad()
    loss.backward(inputs=list(actor.parameters()))  # the critic's weights need no gradients here
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(actor_target.parameters()), list(actor.parameters()), args.tau)
        torch._foreach_lerp_(list(critics_target.parameters()), list(critics.parameters()), args.tau)
    return {"actor_loss": loss.detach()}


def pick_sizes(args: Args):
    """Picks the physics and the sizes that suit the device, if no flag says them."""
    has_gpu = args.cuda and torch.cuda.is_available()
    if args.physics == "auto":
        args.physics = "warp" if has_gpu else "host"
    if args.num_envs is None:
        args.num_envs = 1024 if args.physics == "warp" and has_gpu else 64
    if args.batch_size is None:
        args.batch_size = 32_768 if args.physics == "warp" and has_gpu else 256


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(replace(args, v_min=0.0))  # which alone may be negative
    pick_sizes(args)
    N = args.num_envs
    total_steps = math.ceil(args.total_timesteps / N)
    random_steps = max(math.ceil(args.learning_starts / N), args.num_steps)
    if not -(2**63) < args.v_min < args.v_max:
        fail(f"--v-min must lie between {-(2**63)} and --v-max, not {args.v_min}.")
    if args.num_atoms < 2:
        fail("--num-atoms must be at least 2.")
    if args.num_updates % args.policy_frequency:
        fail("--policy-frequency must divide --num-updates, so that all steps are alike.")
    if args.buffer_size < args.num_steps:
        fail("--buffer-size must be at least --num-steps.")
    if args.env_id not in ROBOTS:
        fail(f"no env {args.env_id!r} in this file; try {' or '.join(ROBOTS)}.")
    if total_steps <= random_steps:
        print("warning: nothing is learned: --total-timesteps ends before --learning-starts.", file=sys.stderr)
    saved = load_checkpoint(args)
    first_step = saved.get("step", 0)
    if first_step >= total_steps:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    run_dir, writer, device = start_run(args, saved)
    if args.physics == "host":
        device = torch.device("cpu")
    env = Worlds(ROBOTS[args.env_id], N, device, args)
    obs_dim = env.obs_dim
    act_dim = env.act_dim
    torch.manual_seed(args.seed)

    actor = Actor(obs_dim, act_dim).to(device)
    critics = nn.ModuleList(DistributionalCritic(obs_dim, act_dim, args.num_atoms) for _ in range(2)).to(device)
    actor_target = copy.deepcopy(actor).requires_grad_(False)
    critics_target = copy.deepcopy(critics).requires_grad_(False)
    settings = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "fused": True}
    actor_optimizer = torch.optim.AdamW(actor.parameters(), **settings)
    critics_optimizer = torch.optim.AdamW(critics.parameters(), **settings)
    networks = nn.ModuleList([actor, critics, actor_target, critics_target])
    optimizers = [actor_optimizer, critics_optimizer]
    parameters = list(networks.parameters())
    support = torch.linspace(args.v_min, args.v_max, args.num_atoms, device=device)  # (M,), the atoms
    std = torch.linspace(args.std_max, args.std_min, N, device=device)[:, None]  # of each world's noise
    obs_moments = torch.zeros(3, obs_dim, dtype=torch.float64, device=device)
    obs_moments[2] = 1  # so that nothing is scaled in the first step
    worlds = first_worlds(env, N, device)
    ring = torch.zeros(args.buffer_size + 1, N, obs_dim + act_dim + 3, device=device)
    ring[0, :, :obs_dim] = env.observation(worlds["state"])

    random = torch.cuda if device.type == "cuda" else torch  # whose generator draws all that follows
    if saved:
        networks.load_state_dict(saved["networks"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        for name, x in worlds.items():
            x.copy_(saved["worlds"][name])
        obs_moments.copy_(saved["obs_moments"])
        ring[: len(saved["replay"])] = saved["replay"]
        random.set_rng_state(saved["rng_state"])

    def advance(action: Tensor, newest: int):
        """Steps all worlds, and puts the step into the ring."""
        obs = env.observation(worlds["state"])
        uniform = torch.rand(N, env.num_uniforms, device=device)
        now, reward, terminated, valid = step_worlds(env, worlds, action, uniform)
        for name, x in now.items():
            worlds[name].copy_(x)
        add_moments(obs_moments, obs[None], valid[None])
        outcome = torch.stack([reward, terminated.float(), valid.float()], -1)
        ring[newest % len(ring)] = torch.cat([env.observation(now["state"]).float(), action, outcome], -1)

    def explore(newest: int):
        advance(2 * torch.rand(N, act_dim, device=device) - 1, newest)

    def act(newest: int):
        with torch.no_grad():
            action = actor(normalize(obs_moments, env.observation(worlds["state"])))
        advance((action + std * torch.randn_like(action)).clamp(-1, 1), newest)

    def learn(newest: int) -> dict[str, Tensor]:
        """As many updates of the critics as --policy-frequency says, and one of the actor."""
        starts = min(newest, len(ring) - 1) - (args.num_steps - 1)
        for _ in range(args.policy_frequency):
            batch = sample_n_steps(ring, newest, starts, obs_dim, args)
            batch |= {name: normalize(obs_moments, batch[name]) for name in ("obs", "next_obs")}
            networks = (actor_target, critics, critics_target)
            losses = learn_distributions(batch, *networks, critics_optimizer, support, args)
        networks = (actor, actor_target, critics, critics_target)
        return losses | learn_mean_actor(batch, *networks, actor_optimizer, support, args)

    def iterate(newest: int) -> dict[str, Tensor]:
        """A step of all worlds and the updates after it."""
        act(newest)
        for _ in range(args.num_updates // args.policy_frequency):
            losses = learn(newest)
        return losses

    losses = {}
    progress = tqdm(total=total_steps * N, initial=first_step * N, unit="step", desc=args.exp_name)
    clock = time.perf_counter(), first_step * N  # of the last report
    interval = args.checkpoint_interval or math.inf
    for step in range(first_step, total_steps):
        if step < random_steps:
            explore(step + 1)
        else:
            losses = iterate(step + 1)
        global_step = (step + 1) * N

        # report and save
        if (step + 1) % REPORT_EVERY and step + 1 < total_steps and not signals:
            continue
        ended = ~worlds["last_return"].isnan()
        last_returns = worlds["last_return"][ended].tolist()
        if args.physics == "warp" and (env.physics.overflow & env.physics.no_room).any():
            sys.exit("\nerror: Warp had no room for all contacts; raise --nconmax and --njmax, and resume.")
        metrics = report(losses, parameters, last_returns, global_step, clock, writer, progress)
        writer.add_scalar("charts/broken_worlds", worlds["broken"].sum(), global_step)
        if last_returns:
            writer.add_scalar("charts/episodic_return", metrics["episodic_return"], global_step)
            writer.add_scalar("charts/episodic_length", worlds["last_length"][ended].float().mean(), global_step)
        is_due = global_step // interval > clock[1] // interval  # passed since the last report
        clock = time.perf_counter(), global_step
        if is_due or signals:
            kept = {"step": step + 1, "rng_state": random.get_rng_state(), "obs_moments": obs_moments}
            kept |= {"networks": networks.state_dict(), "optimizers": [x.state_dict() for x in optimizers]}
            kept["worlds"] = worlds
            kept["replay"] = ring[: step + 2].to("cpu", copy=True)  # a view would keep the whole ring
            save_checkpoint(run_dir, args, kept)
        if signals:
            break

    policy = NormalizedPolicy(actor, obs_moments, env.bounds)
    finish_run(args, run_dir, metrics, writer, policy, torch.zeros(2, obs_dim, dtype=torch.float64))
    progress.close()
    return metrics


# ---------- From here on, every script is the same: checks, run folder, checkpoints, report, signals. ----------


def fail(message: str):
    """Ends the program with exit code 2 and one line on stderr."""
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def check_numbers(args: Args):
    """Refuses numbers that are negative or NaN, counts of zero, and shares above 1."""
    shares = ("gamma", "gae_lambda", "tau", "q_lambda", "start_e", "end_e", "exploration_fraction")
    may_be_zero = ("seed", "learning_starts", "checkpoint_interval", "lag")
    for name, value in vars(args).items():
        least = 1 if type(value) is int and name not in may_be_zero else 0
        most = 1 if name in shares else 2**63 - 1
        if type(value) in (int, float) and not least <= value <= most:  # NaN fails, too
            fail(f"--{name.replace('_', '-')} must lie between {least} and {most}, not {value}.")


def run_prefix(args: Args) -> str:
    """What the folders of all runs of this script, env and seed begin with."""
    return f"{args.env_id}__{args.exp_name}__{args.seed}__".replace("/", "_").replace(":", "_")


def start_run(args: Args, saved: dict) -> tuple[Path, SummaryWriter, torch.device]:
    """Makes the run folder with its TensorBoard writer (W&B follows it), and picks the device."""
    device = torch.device("cuda:0" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.set_flush_denormal(True)  # to which Adam's moments of idle weights decay; a CPU is slow on them
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    run_dir = Path("runs", f"{run_prefix(args)}{datetime.now():%Y%m%d-%H%M%S-%f}")
    try:
        run_dir.mkdir(parents=True)  # fails if another run has it
    except OSError as error:
        fail(f"cannot make the run folder: {error}")
    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
        names["id"] = saved.get("wandb_id")  # a resumed run goes on in the same W&B run
        wandb.init(**names, config=asdict(args), sync_tensorboard=True, resume="allow")
    print(f"run folder: {run_dir}", file=sys.stderr)
    writer = SummaryWriter(run_dir, flush_secs=10)
    writer.add_text("args", json.dumps(asdict(args), indent=2))
    return run_dir, writer, device


def save_checkpoint(run_dir: Path, args: Args, kept: dict):
    """Replaces checkpoint.pt in one step: a kill leaves the old one or the new one, whole."""
    kept["settings"] = {"script": Path(__file__).stem} | asdict(args)
    kept["wandb_id"] = sys.modules["wandb"].run.id if args.track else None
    try:
        with open(run_dir / "checkpoint.new", "wb") as file:
            torch.save(kept, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(run_dir / "checkpoint.new", run_dir / "checkpoint.pt")
    except (OSError, RuntimeError) as error:  # a full disk does not end a run of days
        print(f"\nerror: no checkpoint in {run_dir}: {error}", file=sys.stderr)


def load_checkpoint(args: Args) -> dict:
    """The checkpoint that --resume names; "auto": the newest of this script, env, seed and settings."""
    free = "exp_name total_timesteps resume torch_deterministic cuda compile cudagraphs bf16 async_envs track".split()
    free += "env_groups act_on ddp backend timeout worker_timeout worker_threads ray_address tf32 save_model".split()
    free += "checkpoint_interval wandb_project_name wandb_entity nconmax njmax cut_graph graph_conditional".split()
    settings = {"script": Path(__file__).stem} | asdict(args)
    paths = [args.resume] if args.resume else []
    if args.resume == "auto":
        paths = [path for path in Path("runs").glob("*/checkpoint.pt") if path.parent.name.startswith(run_prefix(args))]
        paths.sort(key=os.path.getmtime, reverse=True)
    for path in paths:
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            for name, value in settings.items():
                if name not in free and saved["settings"][name] != value:
                    raise ValueError(f"it was made with {name} {saved['settings'][name]}, not {value}")
            print(f"resuming {path}", file=sys.stderr)
            return saved
        except Exception as error:  # a damaged file may lead to any
            message = f"cannot resume from {path}: {str(error)[:300] or 'it is damaged'}"
        if args.resume != "auto":
            fail(message)
        print(f"warning: {message}", file=sys.stderr)
    return {}


def report(losses: dict, parameters, last_returns, global_step: int, clock, writer, progress) -> dict:
    """Logs and returns the metrics; exits if a loss or a parameter is not finite."""
    norms = torch._foreach_norm([p.detach() for p in parameters])
    values = torch.stack([*losses.values(), *norms]).tolist()  # the one sync
    metrics = dict(zip(losses, values)) | {"global_step": global_step}
    for name in losses:
        writer.add_scalar(f"losses/{name}", metrics[name], global_step)
    if not math.isfinite(sum(values)):
        writer.close()
        sys.exit(f"\nerror: not finite: {metrics}, norms of parameters {values[len(losses) :]}. Checkpoints are kept.")
    metrics["episodic_return"] = float(np.mean(last_returns)) if last_returns else None
    progress.set_postfix(episodic_return=metrics["episodic_return"], refresh=False)
    progress.update(global_step - progress.n)
    metrics["SPS"] = (global_step - clock[1]) / (time.perf_counter() - clock[0])  # since the last report
    writer.add_scalar("charts/SPS", metrics["SPS"], global_step)
    return metrics


def finish_run(args: Args, run_dir: Path, metrics: dict, writer, policy: nn.Module, *example: Tensor):
    """Writes summary.json, and policy.pt2: a program from rows like `example` to noiseless actions."""
    summary = {"script": Path(__file__).stem, "args": asdict(args), "metrics": metrics}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    writer.close()
    if args.save_model:
        shapes = ({0: torch.export.Dim("rows")},) * len(example)
        program = torch.export.export(policy.cpu().requires_grad_(False), example, dynamic_shapes=shapes)
        torch.export.save(program, run_dir / "policy.pt2", extra_files={"card.json": json.dumps(summary)})


def run_until_signal(train):
    """Reads the flags and trains; Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 makes train() save and stop."""
    words = "\0".join(sys.argv)  # --cuda False and --cuda=false mean --no-cuda, for W&B and CleanRL
    words = re.sub(r"(?i)\0--([\w-]+)[=\0]false(?=\0|$)", r"\0--no-\1", words)
    words = re.sub(r"(?i)\0--([\w-]+)[=\0]true(?=\0|$)", r"\0--\1", words)
    args = tyro.cli(Args, prog=f"python {sys.argv[0]}", args=words.split("\0")[1:])
    signals = []

    def remember(number: int, _):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, remember)
    train(args, signals)
    if signals:
        print("to go on, add --resume auto", file=sys.stderr)
        sys.exit(128 + signals[0])


if __name__ == "__main__":
    run_until_signal(train)
