# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "mujoco-warp==4.0.0",
#     "warp-lang==1.19.0", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) in many MuJoCo worlds at once: by Warp on a GPU, by C MuJoCo on the cores.

    python leanrl/ppo_mujoco.py --env-id HalfCheetah-v5

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, whose equations are cited below as "eq.".
Fast twin: ppo_mujoco_torchcompile.py. `diff -u` the two files to see what makes it faster.
Shapes: T = num_steps, N = num_envs, B = T * N, rows of a rollout; O, A = sizes of an observation and an action.
S = size of a world's state, which is all that a step of the simulator depends on: a row of numbers.
Differences from CleanRL's ppo_continuous_action.py:
1. Values are bootstrapped through a truncation; only a termination ends the return.
2. A step that only resets a world is masked out of the losses.
3. Observations and rewards are scaled by statistics of all rollouts before; those of a rollout are added after it.
4. An episode starts from one of 1,000 states, which are drawn as Gymnasium draws one.
"""

import json
import math
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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

PPO_LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")  # by ppo_loss
REPORT_EVERY = 10  # rollouts between two reports, in which the host waits for the device
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
    total_timesteps: int = 20_000_000  # env steps, summed over all worlds, in whole rollouts
    learning_rate: float = 1e-3  # learning rate of Adam
    num_envs: int | None = None  # number of worlds, stepped together; default: 64, or 4,096 on a GPU
    num_steps: int = 32  # steps of each world per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch; must divide --num-envs times --num-steps
    update_epochs: int = 5  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # clip range of the policy ratio and, with --clip-vloss, of the value
    clip_vloss: bool = False  # clip the change of the value, too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the norm of the gradient to this value

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


def first_scales(env: Worlds, num_envs: int, device: torch.device) -> list[Tensor]:
    """Moments of observations (3, O) and of discounted returns (3, 1), and each world's return so far (N,)."""
    moments = [torch.zeros(3, n, dtype=torch.float64, device=device) for n in (env.obs_dim, 1)]
    for x in moments:
        x[2] = 1  # so that nothing is scaled in the first rollout
    return [*moments, torch.zeros(num_envs, device=device)]


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


def add_rollout(scales: list[Tensor], rollout: dict[str, Tensor], gamma: float):
    """Adds a rollout's observations and discounted returns to their moments."""
    obs_moments, return_moments, discounted_return = scales
    returns = []
    for reward, done in zip(rollout["reward"], rollout["done"]):
        discounted_return.copy_(discounted_return * gamma + reward)
        returns.append(discounted_return.clone())
        discounted_return.mul_(1 - done)
    add_moments(return_moments, torch.stack(returns)[..., None], rollout["valid"])
    add_moments(obs_moments, rollout["raw_obs"], rollout["valid"])


def normalize(moments: Tensor, x: Tensor) -> Tensor:
    """Scales rows x (.., n) by their moments (3, n), and clips at 10."""
    return ((x - moments[1]) / (moments[2] + 1e-8).sqrt()).clamp(-10, 10).float()


def mlp(in_dim: int, out_dim: int, out_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, with orthogonal weights and zero biases."""
    layers = [nn.Linear(in_dim, 64), nn.Linear(64, 64), nn.Linear(64, out_dim)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, out_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """A Gaussian policy whose standard deviation does not depend on the state, and a value function."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.critic = mlp(obs_dim, 1, out_gain=1.0)
        self.actor_mean = mlp(obs_dim, action_dim, out_gain=0.01)  # so the first actions are near zero
        self.actor_logstd = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (.., O) -> mean (.., A), logstd (A,), value (..)
        return self.actor_mean(obs), self.actor_logstd, self.critic(obs).squeeze(-1)


class NormalizedActor(nn.Module):
    """The policy without noise, as it is exported: it normalizes observations and scales actions itself."""

    def __init__(self, agent: Agent, stats: np.ndarray, space: gym.spaces.Box):
        super().__init__()
        self.actor_mean = agent.actor_mean
        center, scale = action_scale(space)
        buffers = {"center": center, "scale": scale, "low": space.low, "high": space.high}
        buffers |= {"mean": stats[1], "std": stats[3]}  # in float64, for large numbers that differ by little
        for name, value in buffers.items():
            self.register_buffer(name, torch.as_tensor(value.ravel()))

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B, A)
        action = self.actor_mean(((obs - self.mean) / self.std).clip(-10, 10).float())
        return (self.center + self.scale * action).clip(self.low, self.high)


def gaussian_logprob_entropy(action: Tensor, mean: Tensor, logstd: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density (..) of actions (.., A) under a diagonal Gaussian, and its entropy () in nats."""
    half_log_2pi = 0.5 * math.log(2 * math.pi)
    logprob = -0.5 * ((action - mean) / logstd.exp()) ** 2 - logstd - half_log_2pi
    return logprob.sum(-1), (logstd + half_log_2pi + 0.5).sum()


def gae(reward: Tensor, value: Tensor, terminated: Tensor, done: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16); all are (T, N), but value is (T + 1, N).

    If an episode ends at t, value[t + 1] is the value of its last observation, since the env resets one step later.
    A truncated step bootstraps from it, a terminated one does not. Both cut the trace.
    """
    delta = reward + gamma * (1 - terminated) * value[1:] - value[:-1]
    decay = gamma * gae_lambda * (1 - done)
    advantages = [torch.zeros_like(delta[0])]
    for delta_t, decay_t in zip(reversed(delta.unbind()), reversed(decay.unbind())):
        advantages.append(delta_t + decay_t * advantages[-1])
    return torch.stack(advantages[:0:-1])  # without the zeros at the start, and in the order of time


def ppo_loss(logprob: Tensor, entropy: Tensor, value: Tensor, batch: dict[str, Tensor], args: Args):
    """PPO's clipped loss () (eq. 7 and 9) and what to log, PPO_LOSSES in one tensor; every mean is over the valid rows.

    logprob, value (..) and entropy (..) or () are of the current parameters; the batch is from before its first update.
    """
    count = batch["valid"].sum().clamp(min=2)
    weight = batch["valid"] / count
    advantage = batch["advantage"]
    if args.norm_adv:
        advantage = advantage - (weight * advantage).sum()
        variance = (batch["valid"] * advantage**2).sum() / (count - 1)
        advantage = advantage / (variance.sqrt() + 1e-8)

    log_ratio = logprob - batch["logprob"]
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = (weight * torch.maximum(-advantage * ratio, -advantage * clipped_ratio)).sum()

    value_error = (value - batch["return"]) ** 2
    if args.clip_vloss:
        clipped_value = batch["value"] + (value - batch["value"]).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.maximum(value_error, (clipped_value - batch["return"]) ** 2)
    value_loss = 0.5 * (weight * value_error).sum()

    entropy = (weight * entropy).sum()
    old_approx_kl = -(weight * log_ratio).sum()
    approx_kl = (weight * (ratio - 1 - log_ratio)).sum()  # http://joschu.net/blog/kl-approx.html
    clipfrac = (weight * ((ratio - 1).abs() > args.clip_coef)).sum()
    losses = torch.stack([policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac])
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, losses.detach()


def set_defaults(args: Args):
    """Picks the physics and the number of worlds that suit the device, if no flag says them."""
    has_gpu = args.cuda and torch.cuda.is_available()
    if args.physics == "auto":
        args.physics = "warp" if has_gpu else "host"
    if args.num_envs is None:
        args.num_envs = 4096 if args.physics == "warp" and has_gpu else 64


def explained_variance(batch: dict[str, Tensor]) -> Tensor:
    """The share () of the returns' variance that the values explain, over valid rows; 1 is perfect."""
    weight = batch["valid"] / batch["valid"].sum().clamp(min=1)
    error = batch["return"] - batch["value"]
    variances = [(weight * (x - (weight * x).sum()) ** 2).sum() for x in (error, batch["return"])]
    return 1 - variances[0] / variances[1].clamp(min=1e-8)


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    set_defaults(args)
    T = args.num_steps
    N = args.num_envs
    batch_size = T * N
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    if args.env_id not in ROBOTS:
        fail(f"no env {args.env_id!r} in this file; try {' or '.join(ROBOTS)}.")
    saved = load_checkpoint(args)
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    run_dir, writer, device = start_run(args, saved)
    if args.physics == "host":
        device = torch.device("cpu")
    env = Worlds(ROBOTS[args.env_id], N, device, args)
    torch.manual_seed(args.seed)

    agent = Agent(env.obs_dim, env.act_dim).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    worlds = first_worlds(env, N, device)
    scales = first_scales(env, N, device)
    obs_moments, return_moments, _ = scales

    random = torch.cuda if device.type == "cuda" else torch  # whose generator draws all that follows
    if saved:
        for name, x in worlds.items():
            x.copy_(saved["worlds"][name])
        for x, saved_x in zip(scales, saved["scales"]):
            x.copy_(saved_x)
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        random.set_rng_state(saved["rng_state"])

    def step(worlds: dict, noise: Tensor, uniform: Tensor) -> tuple[dict, dict]:
        """Acts in all worlds and steps them. Returns what they are then, and a row of the rollout, (N, ..) of each."""
        obs = env.observation(worlds["state"])
        mean = agent.actor_mean(normalize(obs_moments, obs))
        action = mean + agent.actor_logstd.exp() * noise
        logprob, _ = gaussian_logprob_entropy(action, mean, agent.actor_logstd)
        worlds, reward, terminated, valid = step_worlds(env, worlds, action, uniform)
        row = {"raw_obs": obs, "action": action, "logprob": logprob, "valid": valid.float()}
        return worlds, row | {"reward": reward, "terminated": terminated.float(), "done": worlds["done"].float()}

    def prepare(rollout: dict, last_obs: Tensor) -> dict[str, Tensor]:
        """What the updates need of a rollout, (T, N, ..) of each name: its rows, (B, ..) of each."""
        obs = normalize(obs_moments, torch.cat([rollout["raw_obs"], last_obs[None]]))
        value = agent.critic(obs).squeeze(-1)
        reward = (rollout["reward"] / (return_moments[2] + 1e-8).sqrt().float()).clamp(-10, 10)
        done = torch.maximum(rollout["done"], 1 - rollout["valid"].roll(-1, 0))  # no trace enters a broken step
        advantage = gae(reward, value, rollout["terminated"], done, args.gamma, args.gae_lambda)
        batch = {name: rollout[name] for name in ("action", "logprob", "valid")}
        batch |= {"obs": obs[:T], "value": value[:T], "advantage": advantage, "return": advantage + value[:T]}
        add_rollout(scales, rollout, args.gamma)  # for the next rollouts
        return {name: x.flatten(0, 1) for name, x in batch.items()}

    def update(batch: dict, idx: Tensor) -> Tensor:
        """A gradient step on the rows idx of the batch; returns what to log."""
        minibatch = {name: x[idx] for name, x in batch.items()}
        mean, logstd, value = agent(minibatch["obs"])
        logprob, entropy = gaussian_logprob_entropy(minibatch["action"], mean, logstd)
        loss, losses = ppo_loss(logprob, entropy, value, minibatch, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        return losses

    def iterate(worlds: dict, noise: Tensor, uniform: Tensor, permutations: Tensor) -> tuple[dict, dict, Tensor]:
        """A rollout and all updates on it."""
        rows = []
        with torch.no_grad():
            for t in range(T):
                worlds, row = step(worlds, noise[t], uniform[t])
                rows.append(row)
            rollout = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            batch = prepare(rollout, env.observation(worlds["state"]))
        for permutation in permutations:
            for idx in permutation.split(minibatch_size):
                losses = update(batch, idx)
        return worlds, batch, losses

    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    clock = time.perf_counter(), global_step  # of the last report
    interval = args.checkpoint_interval or math.inf
    for iteration in range(first_iteration, num_iterations):
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"] = learning_rate
        noise = torch.randn(T, N, env.act_dim, device=device)
        uniform = torch.rand(T, N, env.num_uniforms, device=device)
        permutations = torch.stack([torch.randperm(batch_size, device=device) for _ in range(args.update_epochs)])
        worlds, batch, losses = iterate(worlds, noise, uniform, permutations)
        global_step += batch_size

        # report and save
        if (iteration + 1) % REPORT_EVERY and iteration + 1 < num_iterations and not signals:
            continue
        losses = dict(zip(PPO_LOSSES, losses)) | {"explained_variance": explained_variance(batch)}
        ended = ~worlds["last_return"].isnan()
        last_returns = worlds["last_return"][ended].tolist()
        if args.physics == "warp" and (env.physics.overflow & env.physics.no_room).any():
            sys.exit("\nerror: Warp had no room for all contacts; raise --nconmax and --njmax, and resume.")
        metrics = report(losses, agent.parameters(), last_returns, global_step, clock, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        writer.add_scalar("charts/broken_worlds", worlds["broken"].sum(), global_step)
        if last_returns:
            writer.add_scalar("charts/episodic_return", metrics["episodic_return"], global_step)
            writer.add_scalar("charts/episodic_length", worlds["last_length"][ended].float().mean(), global_step)
        is_due = global_step // interval > clock[1] // interval  # passed since the last report
        clock = time.perf_counter(), global_step
        if is_due or signals:
            kept = {"iteration": iteration + 1, "rng_state": random.get_rng_state(), "worlds": worlds, "scales": scales}
            kept |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(run_dir, args, kept)
        if signals:
            break

    stats = torch.cat([obs_moments, (obs_moments[2:] + 1e-8).sqrt()]).cpu().numpy()
    policy = NormalizedActor(agent, stats, env.action_space)
    finish_run(args, run_dir, metrics, writer, policy, torch.zeros(2, env.obs_dim, dtype=torch.float64))
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
