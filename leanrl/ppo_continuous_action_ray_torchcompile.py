# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0", "ray==2.60.0", "tensordict==0.15.3"]
# ///
"""Proximal policy optimization (PPO) for slow simulators on Ray, compiled and captured as CUDA graphs.

    python leanrl/ppo_continuous_action_ray_torchcompile.py --num-workers 2 --envs-per-worker 8 --compile --cudagraphs

The algorithm is that of ppo_continuous_action_torchcompile.py; with one worker and one group, on a CPU, to the bit.
Plain twin: ppo_continuous_action_ray.py. docs/performance.md explains each perf[name].
To learn how the work is spread, read Rollout, Simulators, collect() and train(). The rest is plumbing.
Shapes: T = num_steps, W = num_workers, E = envs_per_worker, N = W * E, B = T * N; O, A = sizes of obs and action.
Differences from CleanRL's ppo_continuous_action.py, beside those that ppo_continuous_action.py lists:
1. Several workers that act normalize by what they see themselves; their statistics are merged after each rollout.
2. A worker that dies or hangs is started again; what it was doing is done again, with new episodes.
"""

import json
import logging  # perf[capture]
import math
import os
import re
import shlex
import signal
import socket
import sys
import time
import warnings
import zipfile
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensordict.nn import CudaGraphModule  # perf[capture]
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value  # perf[graph]
from torch.utils._pytree import tree_leaves  # perf[graph]
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

PPO_LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")  # by ppo_loss
WARMUP_REPORTS = 3  # the first reports, slowed by compilation and cold caches, do not count for the speed
START_SECONDS = 5  # that a worker may take to start, times their number if they share a core
MOST_LOSSES = 10  # losses per worker, on average, that a run survives in one rollout


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; different seeds never share an env's random stream
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a specific device, e.g. cuda:1; overrides --cuda
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "HalfCheetah-v4"  # any Gymnasium id with a Box of actions, also my_package:MyEnv-v0
    total_timesteps: int = 1_000_000  # env steps, summed over all envs
    learning_rate: float = 3e-4  # learning rate of Adam
    num_workers: int = 2  # processes that step envs; on a cluster, each takes a CPU
    envs_per_worker: int = 8  # envs of each worker, stepped one after the other
    num_steps: int = 128  # steps of each env per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # minibatches per epoch; must divide --num-workers * --envs-per-worker * --num-steps
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the policy ratio and, with --clip-vloss, the value may move
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # scale larger gradients down to this norm
    target_kl: float | None = None  # skip the other epochs once the last minibatch of one exceeds this KL

    ray_address: str | None = None  # cluster to join: auto, or the head's host:port; default: only this machine
    act_on: Literal["worker", "learner"] = "worker"  # who acts; calls are per rollout, or per step of a worker's envs
    env_groups: int = 1  # groups of each worker's envs; with 2, one steps while the learner acts for the other
    worker_timeout: float = 300.0  # a worker is started again if a call, maybe a rollout, takes more seconds than this

    # perf[graph] perf[capture]
    compile: bool = False  # compile the update
    cudagraphs: bool = False  # capture an epoch of updates as a CUDA graph

    save_model: bool = True  # export the trained policy as policy.pt2 to the run folder
    checkpoint_interval: int = 0  # env steps between saves, which truncate all open episodes; 0: only at signals
    resume: str | None = None  # go on from this checkpoint.pt; "auto" takes the newest of this script, env and seed

    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project, used with --track
    wandb_entity: str | None = None  # Weights & Biases team or user, used with --track


def fail(message: str):
    """Ends the program with exit code 2 and one line on stderr."""
    print("error:", " ".join(message.split()), file=sys.stderr)  # a quoted message may span several lines
    sys.exit(2)


def check_numbers(args: Args):
    """Refuses numbers that are negative, huge or NaN, counts of zero, and shares above 1."""
    for name, value in vars(args).items():
        if type(value) in (int, float):
            may_be_zero = type(value) is float or name in ("seed", "learning_starts", "checkpoint_interval", "lag")
            least = 0 if may_be_zero else 1
            is_share = name in ("gamma", "gae_lambda", "tau", "start_e", "end_e", "exploration_fraction")
            if not least <= value < 2**63 or (is_share and value > 1):  # NaN fails, too
                limits = "between 0 and 1" if is_share else f"at least {least} and below 2**63"
                fail(f"--{name.replace('_', '-')} must be {limits}, not {value}.")


def make_env(env_id: str, action_type: type[gym.Space]) -> gym.Env:
    """Makes an env that observes flat vectors and records episode returns; fails on images and on other actions."""
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # advice to use v5 of a v4 env
            env = gym.make(env_id)
    except Exception as error:  # of the env's code, too
        fail(f"cannot make the env {env_id!r}: {error}")  # the error names similar envs
    space = env.observation_space
    shape = space.shape or ()  # dicts and sequences have none
    is_image = len(shape) > 2 or (len(shape) == 2 and space.dtype == np.uint8)
    if len(shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if is_image or not env.observation_space.shape or not isinstance(env.action_space, action_type):
        fail(f"{env_id} maps {space} to {env.action_space}; needed: vectors to a {action_type.__name__}.")
    return gym.wrappers.RecordEpisodeStatistics(env)


def step_envs(envs: list[gym.Env], global_step: int, action, obs, reward, terminated, truncated) -> list[dict]:
    """Steps every env, writes the results into the last four arrays, and returns the episodes that ended.

    An env whose episode has ended is reset instead; that step ignores the action and has reward 0 (autoreset mode
    NEXT_STEP). An episode is a dict with its return "r" and its length "l".
    """
    episodes = []
    for i, env in enumerate(envs):
        try:
            if terminated[i] or truncated[i]:
                obs[i], _ = env.reset()
                reward[i] = 0
                terminated[i] = truncated[i] = False
                continue
            obs[i], reward[i], terminated[i], truncated[i], info = env.step(action[i])
        except Exception as error:
            error.add_note(f"error: env {i} raised this in env step {global_step}. Earlier checkpoints are kept.")
            raise
        if "episode" in info:
            episodes.append(info["episode"])
    return episodes


class RunningMeanStd:
    """Running mean and standard deviation of rows, in float64 (Welford 1962, for several rows at a time)."""

    def __init__(self, *shape: int):
        self.count = 1e-4  # the prior of Gymnasium's wrappers: almost no weight on mean 0 and variance 1
        self.mean = np.zeros(shape)
        self.std = np.ones(shape)
        self.squares = np.full(shape, self.count)  # sum of squared deviations from the mean

    def update(self, x: np.ndarray):  # (rows, *shape)
        deviation = x - self.mean
        self.count += len(x)
        self.mean += np.add.reduce(deviation) / self.count
        self.squares += np.add.reduce(deviation * (x - self.mean))
        self.std = np.sqrt(self.squares / self.count + 1e-8)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Tensor]):
        vars(self).update({name: value.numpy() for name, value in state.items()})


def normalize_obs(stats: RunningMeanStd, obs: np.ndarray) -> np.ndarray:
    """Adds observations (N, O) to the statistics and scales them, as Gymnasium's NormalizeObservation; clips at 10."""
    stats.update(obs)
    return ((obs - stats.mean) / stats.std).clip(-10, 10)


def normalize_reward(stats: RunningMeanStd, returns, reward, terminated, valid, gamma: float) -> np.ndarray:
    """Scales rewards (N,) by the std of their discounted sum, as Gymnasium's NormalizeReward; clips at 10."""
    np.copyto(returns, returns * gamma * (1 - terminated) + reward, where=valid)
    stats.update(returns[valid])
    return (reward / stats.std).clip(-10, 10)


def merge_stats(stats: RunningMeanStd, parts: list[dict]):
    """Merges the states of statistics that went on from `stats`, each in a worker; what was seen before counts once.

    Two samples are merged by Chan et al. 1979, eq. 2.1. A single part is taken over as it is.
    """
    merged = deepcopy(parts[0])
    for part in parts[1:]:
        # what this worker has seen: the equation, solved for the second sample
        count = part["count"] - stats.count
        if count == 0:
            continue
        mean = stats.mean + (part["mean"] - stats.mean) * part["count"] / count
        squares = part["squares"] - stats.squares - (mean - stats.mean) ** 2 * stats.count * count / part["count"]
        # with what the workers before it have seen
        total = merged["count"] + count
        shift = mean - merged["mean"]
        merged["squares"] += squares + shift**2 * merged["count"] * count / total
        merged["mean"] += shift * count / total
        merged["count"] = total
        merged["std"] = np.sqrt(merged["squares"] / total + 1e-8)
    vars(stats).update(merged)


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
    """The mean of the policy, with the normalization of observations inside."""

    def __init__(self, agent: Agent, stats: RunningMeanStd, low: np.ndarray, high: np.ndarray):
        super().__init__()
        self.actor_mean = agent.actor_mean
        buffers = {"mean": stats.mean, "std": stats.std, "low": low.ravel(), "high": high.ravel()}
        for name, value in buffers.items():
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float32))

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B, A)
        return self.actor_mean(((obs - self.mean) / self.std).clip(-10, 10)).clip(self.low, self.high)


def gaussian_logprob_entropy(action: Tensor, mean: Tensor, logstd: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density (..) of actions (.., A) under a diagonal Gaussian, and its entropy () in nats."""
    half_log_2pi = 0.5 * math.log(2 * math.pi)
    logprob = -0.5 * ((action - mean) / logstd.exp()) ** 2 - logstd - half_log_2pi
    return logprob.sum(-1), (logstd + half_log_2pi + 0.5).sum()


# perf[scan] log2(T) steps of whole tensors, where a loop over time takes T steps of single rows
def gae_scan(reward: Tensor, value: Tensor, terminated: Tensor, done: Tensor, gamma: float, gae_lambda: float):
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16); all are (T, N), but value is (T + 1, N).

    If an episode ends at t, value[t + 1] is the value of its last observation, since the env resets one step later.
    A truncated step bootstraps from it, a terminated one does not. Both cut the trace.
    """
    delta = reward + gamma * (1 - terminated) * value[1:] - value[:-1]
    decay = gamma * gae_lambda * (1 - done)
    span = 1  # perf[scan] delta[t] sums the steps t .. t + span - 1, and decay[t] discounts what follows them
    while span < len(delta):
        delta[:-span] = delta[:-span] + decay[:-span] * delta[span:]
        decay[:-span] = decay[:-span] * decay[span:]
        span *= 2
    return delta


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


def explained_variance(batch: dict[str, Tensor]) -> Tensor:
    """The share () of the returns' variance that the values explain, over valid rows; 1 is perfect."""
    weight = batch["valid"] / batch["valid"].sum().clamp(min=1)
    error = batch["return"] - batch["value"]
    variances = [(weight * (x - (weight * x).sum()) ** 2).sum() for x in (error, batch["return"])]
    return 1 - variances[0] / variances[1].clamp(min=1e-8)


# perf[host] the weights stay the same for a rollout: act in NumPy, many times faster for a few rows
def sample_on_host(weights: list[np.ndarray], obs: np.ndarray, exploration: np.ndarray) -> dict[str, np.ndarray]:
    """Actions for observations (N, O), with scaled Gaussian noise (N, A)."""
    w1, b1, w2, b2, w3, b3 = weights
    hidden = np.tanh(obs @ w1 + b1)
    hidden = np.tanh(hidden @ w2 + b2)
    return {"action": hidden @ w3 + b3 + exploration}


class Rollout:
    """T steps of N envs: in the learner, of the envs of all workers, or in a worker, of its own."""

    def __init__(self, T: int, gamma: float, stats: list[RunningMeanStd], obs, done, discounted_return):
        N, obs_dim = obs.shape
        self.gamma = gamma
        self.stats = stats  # of observations and of returns
        self.done = done  # (N,): these episodes have ended, and the next step resets their envs
        self.discounted_return = discounted_return  # (N,)
        self.stored = {"obs": np.zeros((T + 1, N, obs_dim), np.float32)}
        self.stored["obs"][0] = obs
        self.stored["outcome"] = np.zeros((T, N, 4), np.float32)  # reward, terminated, done, valid
        self.steps = np.zeros(N, int)  # of each env so far
        self.episodes = []  # (step, return, length)

    def act(self, rows: slice, policy: Callable, noise: np.ndarray) -> np.ndarray:
        """Actions (n, A) for the next step of the envs `rows`, with noise (T, N, A)."""
        t = self.steps[rows][0]
        sampled = policy(self.stored["obs"][t, rows], noise[t, rows])
        for name, x in sampled.items():
            if name not in self.stored:
                self.stored[name] = np.zeros((*noise.shape[:2], *x.shape[1:]), np.float32)
            self.stored[name][t, rows] = x
        return sampled["action"]

    def store(self, rows: slice, raw_obs, reward, terminated, truncated, episodes: list):
        """Stores the step that act() began: arrays with a row for each env, and (return, length) of ended episodes."""
        t = self.steps[rows][0]
        obs_stats, return_stats = self.stats
        returns = self.discounted_return[rows]
        valid = ~self.done[rows]  # an env whose episode has ended only resets
        done = terminated | truncated
        self.stored["obs"][t + 1, rows] = normalize_obs(obs_stats, raw_obs)
        scaled_reward = normalize_reward(return_stats, returns, reward, terminated, valid, self.gamma)
        self.stored["outcome"][t, rows] = np.stack([scaled_reward, terminated, done, valid], -1)
        self.done[rows] = done
        self.steps[rows] += 1
        self.episodes += [(t, *episode) for episode in episodes]

    def cut_off(self, rows: slice):
        """Ends the episodes of envs that were lost with their worker, as if they had been truncated."""
        self.done[rows] = True
        steps = self.steps[rows][0]
        if steps > 0:
            self.stored["outcome"][steps - 1, rows, 2] = 1

    def results(self) -> dict:
        """All that is known, in arrays and numbers, which travel faster than objects."""
        return vars(self) | {"stats": [vars(stats) for stats in self.stats]}


class Simulators:
    """The E envs of a worker: as an actor of Ray a process of its own, on any machine of the cluster."""

    def __init__(self, env_id: str, num_envs: int, sample: Callable, gamma: float):
        torch.set_num_threads(1)  # the other cores are for other workers
        torch.set_flush_denormal(True)  # as in the learner
        try:
            self.envs = [make_env(env_id, gym.spaces.Box) for _ in range(num_envs)]
        except SystemExit as error:  # to Ray this would be a worker to be started again
            raise RuntimeError(f"{env_id} cannot be made there: {error.__context__ or 'wrong spaces'}") from error
        self.obs = np.zeros((num_envs, *self.envs[0].observation_space.shape))
        self.reward = np.zeros(num_envs)
        self.terminated, self.truncated = np.zeros((2, num_envs), bool)
        self.sample = sample
        self.gamma = gamma
        self.steps = 0  # of all envs, since this process was started
        self.is_reset = False

    def reset(self, seeds: list[int], cut_off: bool) -> np.ndarray:
        """Seeds and resets all envs; returns observations (E, O). With cut_off, the next step resets them once more."""
        for i, env in enumerate(self.envs):
            self.obs[i], _ = env.reset(seed=seeds[i])
        self.terminated[:] = False
        self.truncated[:] = cut_off
        self.is_reset = True
        return self.obs

    def step(self, first: int, last: int, action: np.ndarray) -> tuple | RuntimeError:
        """Steps the envs `first` to before `last`: observations, rewards, both flags, and episodes (return, length)."""
        if not self.is_reset:  # Ray has started this process anew, and nobody was told
            return RuntimeError("it was started again")
        self.steps += last - first
        space = self.envs[0].action_space
        action = action.reshape(-1, *space.shape).clip(space.low, space.high)
        arrays = [x[first:last] for x in (self.obs, self.reward, self.terminated, self.truncated)]
        episodes = step_envs(self.envs[first:last], self.steps, action, *arrays)
        return *arrays, [(float(episode["r"]), int(episode["l"])) for episode in episodes]

    def rollout(self, shared: tuple, noise: np.ndarray, *state: np.ndarray) -> dict | RuntimeError:
        """T steps of all envs, with the policy and the states of the statistics that all workers share."""
        if not self.is_reset:
            return RuntimeError("it was started again")
        policy, states = shared
        states, noise, *state = deepcopy((states, noise, *state))  # what Ray hands over cannot be written to
        stats = [RunningMeanStd(), RunningMeanStd()]
        for i in range(2):
            vars(stats[i]).update(states[i])
        rollout = Rollout(len(noise), self.gamma, stats, *state)
        E = len(self.envs)
        for _ in range(len(noise)):
            action = rollout.act(slice(E), partial(self.sample, policy), noise)
            rollout.store(slice(E), *self.step(0, E, action))
        return rollout.results()


def start_ray(args: Args, simulators: type, inputs: tuple, bytes_needed: int) -> tuple:
    """Starts Ray on this machine, or joins a cluster, and makes the workers if they fit; returns Ray and them."""
    if args.ray_address is None:  # Ray reads the first when it is imported, its workers the second when they start
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # nobody else may connect
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default any other program goes before a worker
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # under `uv run`, workers would get other packages
    handler = signal.getsignal(signal.SIGTERM)
    try:
        import ray

        if not ray.is_initialized():
            settings = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            if args.ray_address is not None:  # Ray itself would try for minutes
                address = args.ray_address
                if address == "auto":
                    address = ray._private.services.get_ray_address_from_environment("auto", None)
                host, _, port = address.rpartition(":")
                socket.create_connection((host, port), timeout=10).close()
            else:
                settings |= {"num_cpus": max(args.num_workers, os.cpu_count())}
                settings |= {"object_store_memory": bytes_needed + 100 * 2**20}
            ray.init(args.ray_address or "local", **settings)
    except ImportError:
        fail("Ray is missing; pip install ray==2.60.0")
    except Exception as error:
        fail(f"cannot start or join Ray on {args.ray_address or 'this machine'}: {error!s:.300}")
    signal.signal(signal.SIGTERM, handler)  # Ray has put its own in its place
    here = ray.get_runtime_context().get_node_id()
    [store] = [node["Resources"]["object_store_memory"] for node in ray.nodes() if node["NodeID"] == here]
    cpus = ray.cluster_resources().get("CPU", 0)
    if cpus < args.num_workers:
        fail(f"--num-workers {args.num_workers} needs as many CPUs; the cluster has {cpus:.0f}.")
    if store < bytes_needed:
        fail(f"the rollouts need {bytes_needed:,} bytes in Ray's object store here, which has {store:,.0f}.")
    # a worker that dies is started again; what it was doing is not repeated unless the learner asks for it
    options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": -1, "max_task_retries": 0}
    ray.cloudpickle.register_pickle_by_value(sys.modules[simulators.__module__])  # if other programs import this file
    make_worker = ray.remote(**options)(simulators).remote
    return ray, [make_worker(*inputs) for _ in range(args.num_workers)]


def collect(workers: list, refs: list, timeout: float) -> list:
    """The results of a call to each worker, in order; for one that has died or does not answer, the error instead."""
    import ray

    _, late = ray.wait(refs, num_returns=len(refs), timeout=max(timeout, 1))
    results = []
    for worker, ref in zip(workers, refs):
        try:
            if ref in late:  # it hangs, or its machine is gone, and the result with it
                raise TimeoutError("no answer in time; see --worker-timeout")
            results.append(ray.get(ref, timeout=60))  # it is on this machine by now
        except ray.exceptions.RayTaskError as error:  # an env has raised it, and would do so again
            error.add_note("error: a worker raised this; an env and a step that it names are of its group of envs.")
            raise
        except (TimeoutError, ray.exceptions.RayError) as error:
            if isinstance(error, TimeoutError):
                ray.kill(worker, no_restart=False)
            results.append(error)
    return results


# perf[flat] keep all parameters in one vector, so that Adam and all else meets one tensor
def unflatten(flat: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The parameters by name, as views of their vector (P,)."""
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}


# perf[graph] Adam as a function of tensors, so that it compiles into the update
def adam_(params, grads, exp_avgs, exp_avg_sqs, step: Tensor, lr: Tensor, eps: float):
    """A step of Adam in place (Kingma & Ba 2015, end of section 2)."""
    step += 1  # perf[tensor] step and lr are tensors: numbers would be compiled as constants
    power = (step * math.log(0.9)).exp()  # 0.9**step would be slow, see docs/performance.md
    power_sq = (step * math.log(0.999)).exp()
    unbias = (1 - power_sq).sqrt()
    rate = lr * unbias / (1 - power)
    eps = eps * unbias
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs):
        exp_avg.lerp_(grad, 0.1)
        exp_avg_sq.lerp_(grad**2, 0.001)
        param.sub_(rate * exp_avg / (exp_avg_sq.sqrt() + eps))


def adam_state(params) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Both moments of each parameter, and the number of steps, which is counted on the device."""
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(param) for param in params] for _ in range(2))
    return exp_avgs, exp_avg_sqs, torch.zeros((), dtype=torch.long, device=exp_avgs[0].device)


def pick_device(args: Args) -> torch.device:
    """The device that the flags name; fails if it cannot be used."""
    default = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    try:
        number = torch.zeros((), device=args.device or default)
        number.item()  # a device like "meta" has none
    except Exception as error:
        fail(f"cannot use the device {args.device or default}: {error!s:.300}")
    if number.is_cuda:
        torch.cuda.set_device(number.device)
    return number.device


def start_run(args: Args) -> tuple[Path, SummaryWriter]:
    """Seeds PyTorch, and makes the run folder with its TensorBoard writer (W&B follows it)."""
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    run_dir = Path("runs", re.sub("[/:]", "_", run_name))
    try:
        if args.track:
            import wandb

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
            wandb.init(**names, config=asdict(args), sync_tensorboard=True, save_code=False)
        run_dir.mkdir(parents=True)  # fails if another run has it
    except Exception as error:
        fail(f"cannot use the folder {run_dir} or wandb: {error!s:.300}")
    torch.set_flush_denormal(True)  # Adam's moments of idle weights decay to denormals, which are slow on a CPU
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    writer = SummaryWriter(run_dir, flush_secs=10)
    writer.add_text("args", json.dumps(asdict(args), indent=2))
    (run_dir / "summary.json").write_text(json.dumps({"args": asdict(args)}, indent=2))  # results follow at the end
    return run_dir, writer


def save_checkpoint(run_dir: Path, state: dict) -> Path | None:
    """Replaces checkpoint.pt; the one before becomes checkpoint.old. Returns the path, or None if it fails."""
    path = run_dir / "checkpoint.pt"
    new = run_dir / "checkpoint.new"
    try:
        if not all(state[name].sum().isfinite() for name in ("replay", "row", "rows") if name in state):
            raise OSError("the replay holds NaN or infinity")
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            path.replace(run_dir / "checkpoint.old")
        new.replace(path)
        return path
    except (OSError, RuntimeError) as error:
        print(f"\nerror: no checkpoint at step {state['global_step']}: {error}", file=sys.stderr)
        new.unlink(missing_ok=True)
        return None


def load_checkpoint(args: Args, made_by: list) -> dict:
    """The checkpoint that --resume names, of the same script, env and sizes; "auto": of the newest run, or {}."""
    paths = [Path(args.resume)]
    if args.resume == "auto":
        name = re.sub("[/:]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__")  # a time follows
        runs = [run for run in Path("runs").glob("*") if re.fullmatch(re.escape(name) + r"[\d-]{22}", run.name)]
        paths = [path for run in sorted(runs)[::-1] for path in sorted(run.glob("checkpoint.[po]*"))[::-1]]  # pt, old
    for path in paths:
        try:
            damaged = zipfile.ZipFile(path).testzip()  # torch.load() does not look at the checksums
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if not damaged and saved["made_by"] == made_by:
                return saved
            message = f"{path} is damaged" if damaged else f"{path} is of {saved['made_by']}, not of {made_by}"
        except Exception as error:  # a damaged file may lead to any
            message = f"{path} cannot be read: {error!r:.300}"
        if args.resume != "auto":
            fail(f"--resume: {message}.")
        print(f"warning: {message}.", file=sys.stderr)
    return {}


def report(losses: dict, parameters: dict, data: list, last_returns, marks, writer, progress) -> dict[str, float]:
    """Logs and returns the metrics; exits if one is not finite. A mark is (seconds, env steps)."""
    global_step = marks[-1][1]
    norms = torch._foreach_norm([p.detach() for p in parameters.values()])
    names = [f"losses/{name}" for name in losses] + [f"parameter {name}" for name in parameters]
    values = torch.stack([*losses.values(), *norms]).tolist()  # the one sync, if all is well
    metrics = dict(zip(losses, values))
    for name, loss in metrics.items():
        writer.add_scalar(f"losses/{name}", loss, global_step)
    for name, value in zip(names, values):
        if not math.isfinite(value):
            progress.close()
            writer.close()
            advice = "a smaller learning rate may help"
            if not all(x.isfinite().all() for x in data):
                advice = "an observation, a reward or an action is not finite, either"
            sys.exit(f"error: {name} is {value} at step {global_step}; {advice}. Earlier checkpoints are kept.")
    del marks[WARMUP_REPORTS + 1 : -2]  # nobody reads these, and a run of days would slow down
    seconds, steps = np.array(marks).T
    warm = min(WARMUP_REPORTS, len(marks) - 2)
    metrics["SPS"] = (steps[-1] - steps[warm]) / (seconds[-1] - seconds[warm])
    # compilation, capture, cold caches: how much longer the warm-up took than as many steps take now
    metrics["startup_seconds"] = seconds[warm] - seconds[0] - (steps[warm] - steps[0]) / metrics["SPS"]
    metrics["episodic_return"] = float(np.mean(last_returns)) if last_returns else None
    writer.add_scalar("charts/SPS", (steps[-1] - steps[-2]) / (seconds[-1] - seconds[-2]), global_step)
    progress.set_postfix(episodic_return=metrics["episodic_return"], refresh=False)
    progress.update(global_step - progress.n)
    return metrics | {"global_step": global_step}


def finish_run(args: Args, run_dir: Path, writer, ran: dict, metrics: dict, policy: nn.Module, *example):
    """Writes summary.json, and policy.pt2: a program from rows like `example` to noiseless actions."""
    summary = {"script": Path(__file__).stem} | ran | {"args": asdict(args), "metrics": metrics}
    try:
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
        for name, value in metrics.items():  # for W&B, too
            writer.add_scalar(f"summary/{name}", math.nan if value is None else value, metrics["global_step"])
        writer.close()
        if args.save_model:
            for p in policy.cpu().requires_grad_(False).parameters():  # those that are views could not be saved
                p.data = p.clone(memory_format=torch.contiguous_format)
            rows = {0: torch.export.Dim("rows")}
            program = torch.export.export(policy, example, dynamic_shapes=(rows,) * len(example))
            torch.export.save(program, run_dir / "new.pt2", extra_files={"card.json": json.dumps(summary)})
            (run_dir / "new.pt2").rename(run_dir / "policy.pt2")
    except (OSError, RuntimeError) as error:
        print(f"error: cannot save the results: {error}", file=sys.stderr)


@torch.compiler.set_stance("default")  # perf[guards] guards are back when train ends, even by an error
def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; after a signal it saves and exits instead."""
    check_numbers(args)
    T = args.num_steps
    W = args.num_workers
    E = args.envs_per_worker
    N = W * E
    batch_size = T * N
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if N > 10_000:
        fail("more than 10,000 envs would share random streams with those of other seeds.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    if E % args.env_groups or (args.env_groups > 1 and args.act_on == "worker"):
        fail("--env-groups must divide --envs-per-worker, and is 1 unless --act-on is learner.")
    env = make_env(args.env_id, gym.spaces.Box)
    obs_dim = env.observation_space.shape[0]
    action_space = env.action_space
    action_dim = math.prod(action_space.shape)
    env.close()
    made_by = [Path(__file__).stem, args.env_id, T, N, obs_dim, action_dim]
    saved = load_checkpoint(args, made_by) if args.resume is not None else {}
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        print("nothing is left to do; raise --total-timesteps to go on.", file=sys.stderr)
        sys.exit(0)
    device = pick_device(args)
    if args.cudagraphs and device.type != "cuda":  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False
    bytes_of_rollout = 4 * T * N * (obs_dim + 2 * action_dim + 6)
    ray, workers = start_ray(
        args, Simulators, (args.env_id, E, sample_on_host, args.gamma), bytes_needed=4 * bytes_of_rollout
    )
    run_dir, writer = start_run(args)
    torch.set_num_threads(1)  # for matrices this small, a second thread brings nothing

    n = E // args.env_groups  # envs of a worker in a group
    rows_of = [slice(g * W * n, (g + 1) * W * n) for g in range(args.env_groups)]  # envs of all workers in a group
    lost = 0  # workers that had to be started again

    def reset(numbers: list[int], seeds: list[int], cut_off: bool) -> list[np.ndarray]:
        """Seeds and resets the envs of these workers, which may be starting; returns observations (E, O) of each."""
        patience = args.worker_timeout + START_SECONDS * (10 + W)
        kill_at = time.monotonic() + patience
        deadline = kill_at + 2 * patience  # so that one that hangs has another chance
        found = {}
        while left := [w for w in numbers if w not in found]:
            refs = [workers[w].reset.remote(seeds[w * E : (w + 1) * E], cut_off) for w in left]
            results = collect([workers[w] for w in left], refs, patience)
            found |= {w: result for w, result in zip(left, results) if not isinstance(result, Exception)}
            errors = {w: result for w, result in zip(left, results) if w not in found}
            hangs = time.monotonic() > kill_at
            for w, error in errors.items():
                if isinstance(error, ray.exceptions.ActorDiedError) or time.monotonic() > deadline:
                    free = f"{ray.available_resources().get('CPU', 0):.0f} CPUs of the cluster are free"
                    sys.exit(f"error: worker {w} does not start; {free}: {' '.join(str(error).split())[-300:]}")
                if hangs and not isinstance(error, TimeoutError):  # it hung while it started, and Ray waits for it
                    ray.kill(workers[w], no_restart=False)
            if hangs:
                kill_at += patience
            if errors:
                time.sleep(0.1)
        return [found[w] for w in numbers]

    def revive(worker: int, error: Exception):
        """Waits until a worker that was lost has been started again, and resets its envs."""
        nonlocal lost
        lost += 1
        progress.write(f"warning: worker {worker} was lost: {' '.join(str(error).split())[:300]}", sys.stderr)
        if lost > lost_before + MOST_LOSSES * W:
            sys.exit(f"error: workers were lost {lost - lost_before} times in one rollout.")
        seeds = np.random.SeedSequence([args.seed, global_step, lost]).generate_state(N).tolist()
        reset([worker], seeds, cut_off=True)

    def act_on_workers(policy, noise: np.ndarray) -> list[dict]:
        """Lets every worker make a rollout of its envs."""
        shared = ray.put((policy, [vars(x) for x in stats]))  # sent once to each machine

        def ask(w: int):
            rows = slice(w * E, (w + 1) * E)
            return workers[w].rollout.remote(shared, noise[:, rows], obs[rows], done[rows], discounted_return[rows])

        results = dict.fromkeys(range(W))
        while left := [w for w in results if results[w] is None]:
            answers = collect([workers[w] for w in left], [ask(w) for w in left], args.worker_timeout)
            for w, answer in zip(left, answers):
                if isinstance(answer, Exception):  # once more, with new episodes
                    revive(w, answer)
                    done[w * E : (w + 1) * E] = True
                else:
                    results[w] = answer
        return list(results.values())

    def act_on_learner(policy: Callable, noise: np.ndarray) -> list[dict]:
        """Makes a rollout of the envs of all workers, which step one group of them after the other."""
        rollout = Rollout(T, args.gamma, stats, obs, done, discounted_return)
        pending = {}  # what a worker has been asked for, by worker and group

        def ask(w: int, group: int, action: np.ndarray):
            pending[w, group] = workers[w].step.remote(group * n, (group + 1) * n, action)

        def send(group: int, actions: np.ndarray):
            for w, action in enumerate(np.split(actions, W)):
                ask(w, group, action)

        def begin_anew(w: int, error: Exception):
            revive(w, error)
            for g in range(args.env_groups):
                rollout.cut_off(slice((g * W + w) * n, (g * W + w + 1) * n))
                if (w, g) in pending:  # any action: this step will only reset
                    ask(w, g, np.zeros((n, action_dim), np.float32))

        def receive(group: int):
            results = collect(workers, [pending[w, group] for w in range(W)], args.worker_timeout)
            for w in range(W):
                while isinstance(results[w], Exception):
                    begin_anew(w, results[w])
                    [results[w]] = collect([workers[w]], [pending[w, group]], args.worker_timeout)
                del pending[w, group]
            *arrays, episodes = zip(*results)
            rollout.store(rows_of[group], *map(np.concatenate, arrays), sum(episodes, []))

        for t in range(T + 1):
            for group, rows in enumerate(rows_of):
                if t > 0:
                    receive(group)
                if t < T:
                    send(group, rollout.act(rows, policy, noise))
        return [rollout.results()]

    raw_obs = reset(list(range(W)), [10_000 * args.seed + i for i in range(N)], cut_off=False)
    raw_obs = np.stack(raw_obs).reshape(W, args.env_groups, n, obs_dim).swapaxes(0, 1).reshape(N, obs_dim)
    done = np.zeros(N, bool)
    discounted_return = np.zeros(N)
    stats = [RunningMeanStd(obs_dim), RunningMeanStd()]  # of observations and of returns
    obs = normalize_obs(stats[0], raw_obs)

    agent = Agent(obs_dim, action_dim).to(device).requires_grad_(False)
    shapes = {name: p.shape for name, p in agent.named_parameters()}
    flat = nn.utils.parameters_to_vector(agent.parameters())  # perf[flat]
    nn.utils.vector_to_parameters(flat, agent.parameters())  # from here on they are views of the vector
    adam = adam_state([flat])
    lr = torch.zeros((), device=device)  # perf[tensor] a number would keep the value it was compiled with

    def start_anew(iteration: int):
        """Cuts the open episodes off and seeds anew by seed and iteration, so that a resumed run goes on alike."""
        seeds = np.random.SeedSequence([args.seed, iteration]).generate_state(N + 1).tolist()
        torch.manual_seed(seeds[N])
        reset(list(range(W)), seeds, cut_off=True)
        done[:] = True

    parameters = {"agent": flat}
    learners = {"obs_stats": stats[0], "return_stats": stats[1]}
    state = {"flat": flat, "adam": adam}  # perf[graph] the state of a run is tensors alone
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(state), tree_leaves(saved["state"]), strict=True):  # perf[graph]
            tensor.copy_(saved_tensor.view_as(tensor))
        for name, learner in learners.items():
            learner.load_state_dict(saved[name])
        discounted_return[:] = saved["discounted_return"].numpy()
        start_anew(first_iteration)

    batch = {}

    def update(idx: Tensor) -> Tensor:
        """A gradient step on the rows idx of the batch; returns what to log."""
        minibatch = {name: x[idx] for name, x in batch.items()}

        def loss_of(flat: Tensor):
            mean, logstd, value = functional_call(agent, unflatten(flat, shapes), minibatch["obs"])
            logprob, entropy = gaussian_logprob_entropy(minibatch["action"], mean, logstd)
            return ppo_loss(logprob, entropy, value, minibatch, args)

        grad, (_, losses) = grad_and_value(loss_of, has_aux=True)(flat)  # perf[graph]
        grad *= (args.max_grad_norm / (grad.norm() + 1e-6)).clamp(max=1)
        adam_([flat], [grad], *adam, lr, eps=1e-5)
        return losses

    def update_epoch(permutation: Tensor) -> Tensor:  # perf[capture] all updates of an epoch in one graph
        for idx in permutation.split(minibatch_size):
            losses = update(idx)
        return losses

    if args.compile:  # perf[graph]; update_epoch() calls the compiled update from here on
        options = {"cpp_wrapper": device.type == "cpu", "cpp.use_decompose_tanh": True}  # perf[cpp] perf[tanh]
        update = torch.compile(update, fullgraph=True, options=options)
    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        update_epoch = CudaGraphModule(update_epoch, warmup=3)

    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    marks = [(time.perf_counter(), global_step)]
    interval = args.checkpoint_interval or math.inf
    saved_at = global_step
    path = stopped_by = None  # the last checkpoint, if its save did not fail, and a signal
    for iteration in range(first_iteration, num_iterations):
        # act and step
        began = time.perf_counter()
        lost_before = lost
        noise = torch.randn(T, N, action_dim)
        exploration = (agent.actor_logstd.exp().cpu() * noise).numpy()  # perf[batch]
        weights = [p.cpu().numpy().T for p in agent.actor_mean.parameters()]  # perf[host]
        if args.act_on == "worker":
            rollouts = act_on_workers(weights, exploration)
        else:
            rollouts = act_on_learner(partial(sample_on_host, weights), exploration)
        seconds_sampling = time.perf_counter() - began
        for i in range(2):
            merge_stats(stats[i], [rollout["stats"][i] for rollout in rollouts])
        episodes = sum((rollout["episodes"] for rollout in rollouts), [])
        for t, episodic_return, length in sorted(episodes, key=lambda episode: episode[0]):
            writer.add_scalar("charts/episodic_return", episodic_return, global_step + (t + 1) * N)
            writer.add_scalar("charts/episodic_length", length, global_step + (t + 1) * N)
            last_returns.append(episodic_return)
        global_step += batch_size
        done = np.concatenate([rollout["done"] for rollout in rollouts])
        discounted_return = np.concatenate([rollout["discounted_return"] for rollout in rollouts])
        arrays = [rollout["stored"] for rollout in rollouts]
        stored = {name: np.concatenate([x[name] for x in arrays], 1) for name in arrays[0]}
        obs = stored["obs"][T]

        # learn
        rows = {name: torch.as_tensor(x, device=device) for name, x in stored.items()}
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = rows.pop("outcome").unbind(-1)
        mean, logstd, value = agent(rows["obs"])  # perf[batch] evaluate the rollout as one batch, not while acting
        rows["logprob"], _ = gaussian_logprob_entropy(rows["action"], mean[:T], logstd)
        rows["value"] = value[:T]
        advantage = gae_scan(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rows |= {"advantage": advantage, "return": advantage + value[:T], "valid": valid_buffer}
        for name, x in rows.items():  # perf[capture] a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, x[:T].flatten(0, 1)).copy_(x[:T].flatten(0, 1))
        remaining = 1 - iteration / num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * remaining
        lr.fill_(learning_rate)  # perf[tensor]
        for _ in range(args.update_epochs):
            losses = dict(zip(PPO_LOSSES, update_epoch(torch.randperm(batch_size, device=device))))
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break

        # report
        losses["explained_variance"] = explained_variance(batch)
        marks.append((time.perf_counter(), global_step))
        metrics = report(losses, parameters, [batch["obs"], reward_buffer], last_returns, marks, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        writer.add_scalar("charts/sampling_seconds", seconds_sampling, global_step)
        writer.add_scalar("charts/lost_workers", lost, global_step)
        if args.compile:  # perf[guards] all is compiled by now: skip the guards
            torch.compiler.set_stance(skip_guard_eval_unsafe=True)

        # save
        if signals or global_step // interval > saved_at // interval:
            kept = {"made_by": made_by, "iteration": iteration + 1, "global_step": global_step}
            kept |= {"last_returns": list(last_returns), "discounted_return": torch.as_tensor(discounted_return)}
            kept |= {name: learner.state_dict() for name, learner in learners.items()}
            kept["state"] = state  # perf[graph]
            path = save_checkpoint(run_dir, kept)
            saved_at = global_step
            if signals:
                stopped_by = signals[0]
                break
            start_anew(iteration + 1)

    metrics["lost_workers"] = lost
    policy = NormalizedActor(agent, stats[0], action_space.low, action_space.high)
    ran = {"device": str(device), "nodes": sum(node["Alive"] for node in ray.nodes())}
    finish_run(args, run_dir, writer, ran, metrics, policy, torch.zeros(2, obs_dim))
    progress.close()
    for worker in workers:
        ray.kill(worker)
    if stopped_by:
        print("to go on: python", shlex.join([*sys.argv, "--resume", str(path or "auto")]), file=sys.stderr)
        sys.exit(128 + stopped_by)
    return metrics


if __name__ == "__main__":
    signals = []

    def remember(number: int, _):
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    try:
        train(tyro.cli(Args), signals)
    except torch.OutOfMemoryError as error:
        sys.exit(f"\nerror: too little memory on the GPU; lower --num-workers or --num-steps. {error!s:.300}")
