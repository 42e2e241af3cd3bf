# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0", "ray==2.60.0", "tensordict==0.15.3"]
# ///
"""Proximal policy optimization (PPO) for slow simulators on Ray, compiled and captured as CUDA graphs.

    python leanrl/ppo_continuous_action_ray_torchcompile.py --num-workers 2 --envs-per-worker 8 --compile --cudagraphs

The algorithm is that of ppo_continuous_action_torchcompile.py; with one worker, on a CPU, to rounding.
Plain twin: ppo_continuous_action_ray.py. docs/performance.md explains each perf[name].
Shapes: T = num_steps, W = num_workers, E = envs_per_worker, N = W * E, B = T * N; O, A = sizes of obs, action.
A worker that acts normalizes by what all saw up to the last rollout, and by what it has seen since. A worker
that dies or hangs is replaced; what it was doing is done again, with new episodes.
"""

import json
import logging  # perf[capture]
import math
import os
import random
import re
import signal
import socket
import sys
import time
from collections import Counter, deque
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


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; env seeds of two runs overlap only by chance
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "HalfCheetah-v4"  # any Gymnasium id with a Box of actions, also my_package:MyEnv-v0
    env_kwargs: str = "{}"  # settings of the env as JSON, e.g. '{"forward_reward_weight": 2}'
    total_timesteps: int = 1_000_000  # env steps, summed over all envs, in whole rollouts
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
    clip_coef: float = 0.2  # clip range of the policy ratio and, with --clip-vloss, of the value
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the norm of the gradient to this value
    target_kl: float | None = None  # stop a rollout's epochs once the last minibatch of an epoch exceeds this KL

    ray_address: str | None = None  # cluster to join: auto, or host:port of its head; default: none
    act_on: Literal["worker", "learner"] = "worker"  # who acts; calls are rollouts, or single steps
    env_groups: int = 1  # groups of a worker's envs; with 2, one steps while the learner acts
    worker_timeout: float = 300.0  # seconds for a call, maybe a rollout; then a worker is replaced

    # perf[graph] perf[capture]
    compile: bool = False  # compile the update
    cudagraphs: bool = False  # capture an epoch of updates as a CUDA graph

    save_model: bool = True  # export the trained policy as policy.pt2 to the run folder
    checkpoint_interval: int = 0  # env steps between saves, which truncate all episodes; 0: only at signals
    resume: str | None = None  # go on from this checkpoint.pt; "auto" takes the newest of the same settings

    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project, used with --track
    wandb_entity: str | None = None  # Weights & Biases team or user, used with --track


def make_env(args: Args, action_type: type[gym.Space]) -> gym.Env:
    """Makes an env that observes flat vectors; fails on images and on other actions."""
    try:
        env = gym.make(args.env_id, **json.loads(args.env_kwargs))
        obs_dim = gym.spaces.flatdim(env.observation_space)
    except Exception as error:  # the env's own code may raise anything
        fail(f"cannot make the env {args.env_id!r} with {args.env_kwargs}: {error}")  # the error names similar envs
    if obs_dim > 4096:
        fail(f"{args.env_id} observes {env.observation_space}; needed: vectors of at most 4,096 numbers, not images.")
    if not isinstance(env.action_space, action_type):
        fail(f"{args.env_id} takes actions in {env.action_space}; needed: a {action_type.__name__}.")
    return env if len(env.observation_space.shape or ()) == 1 else gym.wrappers.FlattenObservation(env)


def step_envs(envs: list[gym.Env], action, obs, reward, terminated, truncated, totals) -> list[tuple[float, float]]:
    """Steps each env, writes `obs` and the arrays after it, and returns (return, length) of the episodes that ended."""
    episodes = []
    for i, env in enumerate(envs):
        if terminated[i] or truncated[i]:  # this step only resets (autoreset mode NEXT_STEP)
            obs[i], _ = env.reset()
            reward[i] = 0
            terminated[i] = truncated[i] = False
            totals[:, i] = 0
            continue
        obs[i], paid, terminated[i], truncated[i], _ = env.step(action[i])
        reward[i] = paid
        totals[:, i] += paid, 1
        if terminated[i] or truncated[i]:
            episodes.append(tuple(totals[:, i].tolist()))
    return episodes


def seed_process(numbers: list[int], offset: int = 0) -> int:
    """Seeds this process by seed, step and whether it has envs; their seeds count on from what is returned."""
    first = int(np.random.SeedSequence(numbers).generate_state(1)[0]) + offset
    random.seed(first)  # an env may draw from Python's global generator, or NumPy's
    np.random.seed(first % 2**32)  # noqa: NPY002
    torch.manual_seed(first)
    return first


def action_scale(space: gym.spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Center and scale, which map -1 .. 1 to the bounds of a Box; 0 and 1 in dimensions that lack a bound."""
    is_bounded = (space.low > -1e30) & (space.high < 1e30)  # some envs write the largest float for no bound
    low = np.where(is_bounded, space.low, -1.0)
    high = np.where(is_bounded, space.high, 1.0)
    return (high + low) / 2, (high - low) / 2


def update_stats(stats: np.ndarray, x: np.ndarray):
    """Adds rows x (n, O) to statistics (4, O): their count, mean, squared deviations and std (Welford 1962)."""
    count, mean, squares, std = stats  # in float64
    count += len(x)
    deviation = x - mean
    mean += np.add.reduce(deviation) / count
    squares += np.add.reduce(deviation * (x - mean))
    std[:] = np.sqrt(squares / count + 1e-8)


def normalize_obs(stats: np.ndarray, obs: np.ndarray) -> np.ndarray:
    """Adds observations (N, O) to the statistics, which start empty, and scales by them; clips at 10."""
    update_stats(stats, obs)
    _, mean, _, std = stats
    return ((obs - mean) / std).clip(-10, 10)


def normalize_reward(stats: np.ndarray, returns, reward, terminated, valid, gamma: float) -> np.ndarray:
    """Scales rewards (N,) by the std of their discounted sum, as Gymnasium's NormalizeReward; clips at 10."""
    np.copyto(returns, returns * gamma * (1 - terminated) + reward, where=valid)
    if valid.any():
        update_stats(stats, returns[valid, None])
    return (reward / stats[3]).clip(-10, 10)


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


def explained_variance(batch: dict[str, Tensor]) -> Tensor:
    """The share () of the returns' variance that the values explain, over valid rows; 1 is perfect."""
    weight = batch["valid"] / batch["valid"].sum().clamp(min=1)
    error = batch["return"] - batch["value"]
    variances = [(weight * (x - (weight * x).sum()) ** 2).sum() for x in (error, batch["return"])]
    return 1 - variances[0] / variances[1].clamp(min=1e-8)


# perf[graph] Adam as a function of tensors, so that it compiles into the update
def adam_(params, grads, exp_avgs, exp_avg_sqs, step: Tensor, lr: Tensor, eps: float):
    """A step of Adam in place (Kingma & Ba 2015, end of section 2)."""
    step += 1  # perf[tensor] step and lr are tensors: numbers would be compiled as constants
    unbias = (1 - 0.999**step).sqrt()
    rate = lr * unbias / (1 - 0.9**step)
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs):
        exp_avg.lerp_(grad, 0.1)
        exp_avg_sq.lerp_(grad**2, 0.001)
        param.sub_(rate * exp_avg / (exp_avg_sq.sqrt() + eps * unbias))


def adam_state(params) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Both moments of each parameter, and the number of steps, which is counted on the device."""
    exp_avgs = [torch.zeros_like(param) for param in params]
    return exp_avgs, [x.clone() for x in exp_avgs], torch.zeros((), dtype=torch.long, device=exp_avgs[0].device)


def learn_from_vectors_(agent: Agent, state: dict, batch: dict, args: Args, idx: Tensor) -> Tensor:
    """A gradient step on the rows idx (b,) of the batch; returns what to log, PPO_LOSSES in one tensor."""
    minibatch = {name: x[idx] for name, x in batch.items()}

    def loss_of(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mean, logstd, value = functional_call(agent, parameters, minibatch["obs"])
        logprob, entropy = gaussian_logprob_entropy(minibatch["action"], mean, logstd)
        return ppo_loss(logprob, entropy, value, minibatch, args)

    parameters = state["parameters"]
    grads, (_, losses) = grad_and_value(loss_of, has_aux=True)(parameters)  # perf[graph]
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    adam_(parameters.values(), [grad * scale for grad in grads.values()], *state["adam"], state["lr"], eps=1e-5)
    return losses


# perf[host] the weights stay the same for a rollout: act in NumPy, many times faster for a few rows
def sample_on_host(weights: list[np.ndarray], obs: np.ndarray, exploration: np.ndarray) -> np.ndarray:
    """Actions (N, A) for observations (N, O), with scaled Gaussian noise (N, A)."""
    w1, b1, w2, b2, w3, b3 = weights
    hidden = np.tanh(obs @ w1 + b1)
    hidden = np.tanh(hidden @ w2 + b2)
    return hidden @ w3 + b3 + exploration


class Simulators:
    """The E envs of a worker: as an actor of Ray a process of its own, on any machine of the cluster."""

    def __init__(self, args: Args):
        torch.set_flush_denormal(True)  # as in the learner
        self.args = args
        self.envs = []
        self.totals = np.zeros((2, args.envs_per_worker))  # return and length of the open episodes

    def reset(self, step: int, offset: int) -> np.ndarray:
        """Seeds and resets all envs, before which `offset` others come; returns observations (E, O)."""
        seed_process([self.args.seed, 0, 0], offset)  # what makes an env may draw numbers, too
        try:
            self.envs = self.envs or [make_env(self.args, gym.spaces.Box) for _ in self.totals[0]]
        except SystemExit as error:  # Ray would not say why
            raise RuntimeError(f"no {self.args.env_id} there: {error.__context__ or 'wrong spaces'}") from error
        first = seed_process([self.args.seed, step, 1], offset)
        self.totals[:] = 0
        for i, env in enumerate(self.envs):
            env.unwrapped.action_space.seed((first + i) % 2**31)
        obs = [env.reset(seed=(first + i) % 2**31)[0] for i, env in enumerate(self.envs)]
        return np.array(obs, np.float64)

    def rollout(self, shared: tuple, first: int, noise, obs, done) -> tuple[np.ndarray, list]:
        """T steps of n envs, from `first` on: rows (T, n, ..), and (step, return, length) of episodes that ended.

        The policy and the statistics of observations are those of all workers; if they are None, the noise is
        the actions. A row is observation, action (and what else the policy says), reward, terminated, truncated,
        valid, and the next observation as it comes from the env.
        """
        policy, stats, noise, obs = deepcopy((*shared, noise, obs))  # what Ray hands over is read-only
        envs = slice(first, first + len(done))
        space = self.envs[0].action_space
        center, scale = action_scale(space)
        rows = []
        episodes = []
        for t, noise_t in enumerate(noise):
            acted = policy(obs, noise_t) if policy else noise_t
            action = center + scale * acted[:, : scale.size].reshape(-1, *space.shape)
            next_obs = np.zeros(obs.shape)
            outcome = [np.zeros(len(done)), np.zeros_like(done), done.copy()]  # reward, both flags
            arrays = [action.clip(space.low, space.high), next_obs, *outcome, self.totals[:, envs]]
            episodes += [(t, *episode) for episode in step_envs(self.envs[envs], *arrays)]
            rows.append(np.column_stack([obs, acted, *outcome, ~done, next_obs]))
            done = outcome[1] | outcome[2]
            if policy:
                obs = normalize_obs(stats, next_obs).astype(np.float32)
        return np.array(rows), episodes


class Workers:
    """Processes, here or on a cluster, that step E envs each; one that is lost is replaced."""

    def __init__(self, args: Args, simulators: type, seconds: float, bytes_needed: int):
        self.args = args
        self.seconds = seconds  # that an answer may take
        self.lost = 0  # workers so far
        self.failures = Counter()  # of each worker in a row
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # or `uv run` changes workers' packages
        settings = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        if args.ray_address is None:
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # nobody else may connect
            os.environ.setdefault("RAY_worker_niceness", "0")  # or other programs go before workers
            settings["num_cpus"] = max(args.num_workers, os.cpu_count())
            settings["object_store_memory"] = bytes_needed + 10**8
        handler = signal.getsignal(signal.SIGTERM)
        try:
            import ray

            address = args.ray_address or "local"
            if address == "auto":
                address = ray._private.services.get_ray_address_from_environment("auto", None)
            if address != "local" and not ray.is_initialized():  # Ray itself would try for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, port), timeout=10).close()
            if not ray.is_initialized():
                ray.init(address, **settings)
        except ImportError:
            fail("Ray is missing; pip install ray==2.60.0")
        except Exception as error:
            fail(f"cannot start or join Ray on {args.ray_address or 'this machine'}: {error!s:.300}")
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own in its place
        cpus = ray.cluster_resources().get("CPU", 0)
        if cpus < args.num_workers:
            fail(f"--num-workers {args.num_workers} needs as many CPUs; the cluster has {cpus:.0f}.")
        ray.cloudpickle.register_pickle_by_value(sys.modules[simulators.__module__])  # also if imported
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_task_retries": 0}
        self.make_actor = partial(ray.remote(**options)(simulators).remote, args)
        self.actors = [self.make_actor() for _ in range(args.num_workers)]
        self.ray = ray

    def collect(self, refs: dict, seconds: float) -> dict:
        """The answers to calls, by worker, or the error if it has died or does not answer in time."""
        _, late = self.ray.wait(list(refs.values()), num_returns=len(refs), timeout=max(seconds, 1))
        answers = {}
        for w, ref in refs.items():
            try:
                answers[w] = self.ray.get(ref, timeout=0 if ref in late else 60)
            except self.ray.exceptions.RayTaskError:  # of an env, which would raise it again
                raise
            except self.ray.exceptions.RayError as error:
                answers[w] = error
        return answers

    def reset(self, numbers, step: int) -> list:
        """Resets the envs of these workers, which may be starting, with seeds that follow from `step`."""
        calls = {w: self.actors[w].reset.remote(step, w * self.args.envs_per_worker) for w in numbers}
        answers = self.collect(calls, self.seconds + 5 * (10 + len(self.actors)))  # 5 to start each, on one core
        for w, error in answers.items():
            if isinstance(error, Exception):
                answers[w] = self.replace(w, error, step)
        return list(answers.values())

    def replace(self, w: int, error: Exception, step: int):
        """Resets a new worker, in place of one that was lost; ends the run if that happens again and again."""
        self.lost += 1
        self.failures[w] += 1
        reason = " ".join(str(error).split())[-300:]
        if isinstance(error, TimeoutError):  # it hangs, or its machine is gone, and the result with it
            reason = "no answer in time; see --worker-timeout"
        if self.failures[w] > 5:
            free = f"{self.ray.available_resources().get('CPU', 0):.0f} CPUs of the cluster are free"
            sys.exit(f"error: worker {w} is lost again and again; {free}: {reason}")
        tqdm.write(f"warning: worker {w} was lost: {reason}", sys.stderr)
        self.ray.kill(self.actors[w])
        self.actors[w] = self.make_actor()
        return self.reset([w], step + 2**32 * self.lost)[0]  # seeds that no other step has


def make_rollout(workers: Workers, policy: Callable, noise, rows, obs, done, stats, global_step: int) -> list:
    """Fills rows (T, N, ..) with steps of all envs, on which obs, done and stats move on; returns the episodes.

    If the workers act, a call is a whole rollout of a worker. If the learner acts, it is a step of n of its envs:
    such groups take turns, so that one steps while the policy acts for another.
    """
    args = workers.args
    acts = args.act_on == "learner"
    steps = 1 if acts else len(noise)  # of a call
    shared = (None, None) if acts else workers.ray.put((policy, stats))  # sent once to each machine
    obs_dim = obs.shape[1]
    envs = np.arange(len(done)).reshape(args.num_workers, args.env_groups, -1)  # (W, G, n)
    acted = {}  # noise or actions (steps, W, n, ..), by group
    pending = {}  # calls, by group and worker
    episodes = []

    def send(g: int, w: int):
        arrays = acted[g][:, w], obs[envs[w, g]], done[envs[w, g]]
        pending[g, w] = workers.actors[w].rollout.remote(shared, g * envs.shape[2], *arrays)

    def receive(g: int) -> list:
        answers = workers.collect({w: pending[g, w] for w in range(len(envs))}, workers.seconds)
        while lost := {w: error for w, error in answers.items() if isinstance(error, Exception)}:
            for w, error in lost.items():
                workers.replace(w, error, global_step)
                done[envs[w]] = True  # cuts the episodes off: what is pending begins with a reset
                for h in acted:
                    send(h, w)
            answers |= workers.collect({w: pending[g, w] for w in lost}, workers.seconds)
        workers.failures.clear()
        return list(answers.values())

    for t in range(0, len(noise) + steps, steps):
        for g in range(args.env_groups):
            group = envs[:, g].ravel()
            if t > 0:
                parts, ended = zip(*receive(g))
                part = np.concatenate(parts, axis=1)
                for next_obs in part[..., -obs_dim:]:
                    obs[group] = normalize_obs(stats, next_obs)
                rows[t - steps : t, group] = part[..., :-obs_dim]
                done[group] = rows[t - 1, group, -3:-1].any(1)  # terminated or truncated
                episodes += [(t - steps + s, *episode) for s, *episode in sum(ended, [])]
            if t < len(noise):
                acted[g] = noise[t : t + steps, envs[:, g]]
                if acts:
                    acted[g] = policy(obs[group], noise[t, group]).reshape(1, *envs[:, g].shape, -1)
                for w in range(len(envs)):
                    send(g, w)
    rows[..., -2] = np.concatenate([1 - rows[1:, :, -1], done[None]])  # done: the next step only resets
    return episodes


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    T = args.num_steps
    N = args.num_workers * args.envs_per_worker
    batch_size = T * N
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    if args.envs_per_worker % args.env_groups or (args.env_groups > 1 and args.act_on == "worker"):
        fail("--env-groups must divide --envs-per-worker, and is 1 unless --act-on is learner.")
    saved = load_checkpoint(args)
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    seed_process([args.seed, 0, 0])  # seeds what makes envs and networks
    env = make_env(args, gym.spaces.Box)
    obs_dim = env.observation_space.shape[0]
    if env.action_space.dtype.kind != "f":
        fail(f"{args.env_id} takes actions in {env.action_space}; needed: floats.")
    action_dim = math.prod(env.action_space.shape)
    rows = np.zeros((T, N, obs_dim + action_dim + 4))  # perf[batch] reward, terminated, done, valid
    workers = Workers(args, Simulators, args.worker_timeout, 4 * rows.nbytes)
    run_dir, writer, device = start_run(args, saved)
    if args.cudagraphs and device.type != "cuda":  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False

    def start_anew(iteration: int) -> np.ndarray:  # seeds all by it, and returns the first observations
        seed_process([args.seed, iteration, 1])
        return np.concatenate(workers.reset(range(args.num_workers), iteration))

    discounted_return = np.zeros(N)
    done = np.full(N, first_iteration > 0)  # a resumed run begins with resets, as after a save
    obs_stats = np.zeros((4, obs_dim))
    return_stats = np.zeros((4, 1))
    normalizer = [torch.from_numpy(x) for x in (obs_stats, return_stats, discounted_return)]  # for checkpoints
    agent = Agent(obs_dim, action_dim).to(device).requires_grad_(False)
    # perf[graph] the state of a run is tensors alone; perf[tensor] a number would keep the value it was compiled with
    state = {"parameters": dict(agent.named_parameters()), "lr": torch.zeros((), device=device)}
    state |= {"adam": adam_state(agent.parameters()), "normalizer": normalizer}
    obs = normalize_obs(obs_stats, start_anew(first_iteration)).astype(np.float32)
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(state), saved["state"]):  # perf[graph]
            tensor.copy_(saved_tensor)

    batch = {}  # of tensors that stay where they are
    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    clock = time.perf_counter(), global_step  # of the last report
    interval = args.checkpoint_interval or math.inf
    update = partial(learn_from_vectors_, agent, state, batch, args)
    if args.compile:  # perf[graph]
        update = torch.compile(update, fullgraph=True)

    def update_epoch(permutation: Tensor) -> Tensor:  # perf[capture] all updates of an epoch in one graph
        for idx in permutation.split(minibatch_size):
            losses = update(idx)
        return losses

    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        update_epoch = CudaGraphModule(update_epoch, warmup=3)

    for iteration in range(first_iteration, num_iterations):
        # act and step
        began = time.perf_counter()
        noise = torch.randn(T, N, action_dim, device=device)
        noise = (agent.actor_logstd.exp() * noise).cpu().numpy()  # perf[batch]
        weights = [p.cpu().numpy().T for p in agent.actor_mean.parameters()]  # perf[host]
        policy = partial(sample_on_host, weights)
        episodes = make_rollout(workers, policy, noise, rows, obs, done, obs_stats, global_step)
        for t, return_, length in sorted(episodes, key=lambda episode: episode[0]):
            writer.add_scalar("charts/episodic_return", return_, global_step + (t + 1) * N)
            writer.add_scalar("charts/episodic_length", length, global_step + (t + 1) * N)
            last_returns.append(return_)
        global_step += batch_size
        writer.add_scalar("charts/sampling_seconds", time.perf_counter() - began, global_step)

        # learn
        for row in rows:
            reward, terminated, _, valid = row[:, -4:].T
            is_valid = valid > 0
            reward[:] = normalize_reward(return_stats, discounted_return, reward, terminated, is_valid, args.gamma)
        stored = torch.as_tensor(rows, dtype=torch.float32, device=device)
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = stored[..., -4:].unbind(-1)
        # perf[batch] evaluate the rollout as one batch, not while acting
        actions = stored[..., obs_dim:-4]
        all_obs = np.concatenate([rows[..., :obs_dim], obs[None]])
        all_obs = torch.as_tensor(all_obs, dtype=torch.float32, device=device)
        mean, logstd, value = agent(all_obs)
        logprob, _ = gaussian_logprob_entropy(actions, mean[:T], logstd)
        advantage = gae(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"obs": all_obs[:T], "action": actions, "logprob": logprob, "value": value[:T]}
        rollout |= {"advantage": advantage, "return": advantage + value[:T], "valid": valid_buffer}
        for name, x in rollout.items():  # perf[capture] a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, x.flatten(0, 1)).copy_(x.flatten(0, 1))
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        state["lr"].fill_(learning_rate)  # perf[tensor]
        for _ in range(args.update_epochs):
            losses = dict(zip(PPO_LOSSES, update_epoch(torch.randperm(batch_size, device=device))))
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break

        # report and save
        losses["explained_variance"] = explained_variance(batch)
        metrics = report(losses, agent.parameters(), last_returns, global_step, clock, writer, progress)
        metrics["lost_workers"] = workers.lost
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        writer.add_scalar("charts/lost_workers", metrics["lost_workers"], global_step)
        is_due = global_step // interval > clock[1] // interval  # passed since the last report
        clock = time.perf_counter(), global_step
        if is_due or signals:
            kept = {"iteration": iteration + 1, "last_returns": list(last_returns)}
            kept["state"] = tree_leaves(state)  # perf[graph]
            save_checkpoint(run_dir, args, kept)
        if signals:
            break
        if is_due:
            start_anew(iteration + 1)
            done[:] = True  # the next step resets every env

    policy = NormalizedActor(agent, obs_stats, env.action_space)
    finish_run(args, run_dir, metrics, writer, policy, torch.zeros(2, obs_dim, dtype=torch.float64))
    for resource in (progress, env):
        resource.close()
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
