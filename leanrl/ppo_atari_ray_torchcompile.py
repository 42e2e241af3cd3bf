# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "envpool==1.2.5", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "ray==2.60.0", "tensordict==0.15.3"]
# ///
"""Asynchronous PPO, and IMPALA, on Atari games with Ray, compiled and captured as CUDA graphs.

    python leanrl/ppo_atari_ray_torchcompile.py --env-id Breakout-v5 --num-workers 2 --compile --cudagraphs

Papers: Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (PPO, "eq."); Espeholt et al. 2018,
https://arxiv.org/abs/1802.01561 (V-trace). Plain twin: ppo_atari_ray.py. docs/performance.md explains each perf[name].
Shapes: T = num_steps, W = num_workers, E = envs_per_worker, N = W * E, B = T * N, A = number of actions.
Differences from IMPALA:
1. The ratio that PPO clips is to the policy at the start of the batch; V-trace corrects for the one that played.
2. With --lag 1, a rollout comes from the policy of one update before, and runs of a seed give the same bits.
3. --update-epochs 1 --num-minibatches 1 --no-norm-adv --gae-lambda 1 make the loss IMPALA's.
"""

import difflib
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
from collections import Counter, deque, namedtuple
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

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
Call = namedtuple("Call", "worker result version since")  # a rollout that was asked for; of a policy, at a time


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; env seeds of two runs overlap only by chance
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "Breakout-v5"  # any Atari id of EnvPool
    total_timesteps: int = 10_000_000  # env steps (of 4 frames each), summed over all envs, in whole rollouts
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_workers: int = 2  # processes that play; on a cluster, each takes a CPU
    envs_per_worker: int = 8  # envs of each worker
    num_steps: int = 64  # steps of each env per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch; must divide --num-workers * --envs-per-worker * --num-steps
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # clip range of the policy ratio and, with --clip-vloss, of the value
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the norm of the gradient to this value
    target_kl: float | None = None  # stop a rollout's epochs once the last minibatch of an epoch exceeds this KL

    ray_address: str | None = None  # cluster to join: auto, or host:port of its head; default: none
    worker_threads: int = 1  # threads of each worker, for its envs and its policy
    worker_timeout: float = 300.0  # seconds for a rollout; a worker is replaced if lag + 1 of them take longer
    lag: int = 1  # age in updates of the policy that acts; 0: workers wait for the learner
    first_come: bool = False  # learn from whichever rollouts are ready, in no fixed order, as IMPALA does
    max_lag: int = 8  # drop a rollout whose policy is more updates old than this, with --first-come
    rho_clip: float = 1.0  # V-trace: clips rho, the weight of a temporal difference
    c_clip: float = 1.0  # V-trace: clips c, the weight of what follows it

    # perf[graph] perf[capture]
    compile: bool = False  # compile the update
    cudagraphs: bool = False  # capture an epoch of updates as a CUDA graph

    save_model: bool = True  # export the trained policy as policy.pt2 to the run folder
    checkpoint_interval: int = 0  # env steps between saves, which truncate all episodes; 0: only at signals
    resume: str | None = None  # go on from this checkpoint.pt; "auto" takes the newest of the same settings

    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project, used with --track
    wandb_entity: str | None = None  # Weights & Biases team or user, used with --track


def make_envs(env_id: str, seeds: list[int], num_threads: int = 0):
    """EnvPool envs of an Atari game, one per seed: a lost life ends an episode, rewards are clipped to -1, 0 or 1."""
    options = {"episodic_life": True, "reward_clip": True, "num_threads": num_threads}  # 0: one per env or core
    try:
        import envpool  # here, so that its absence gets a sentence
    except ImportError:
        fail("EnvPool is missing; pip install envpool==1.2.5")
    try:
        return envpool.make(env_id, env_type="gymnasium", num_envs=len(seeds), env_seed=seeds, **options)
    except (AssertionError, TypeError):
        games = [name for name, spec in envpool.registration.registry.specs.items() if spec[0] == "envpool.atari"]
        near = difflib.get_close_matches(env_id, games, cutoff=0)
        fail(f"{env_id!r} is no Atari game; try {', '.join(near)}.")


def games_that_end(info: dict, truncated: np.ndarray, scores: np.ndarray) -> list[dict]:
    """Adds the unclipped rewards of a step to the scores (N,); returns the games that ended, whose scores become 0."""
    scores += info["reward"]
    over = np.flatnonzero(info["terminated"] | truncated)  # terminated: the last life is lost
    games = [{"r": scores[i], "l": info["elapsed_step"][i]} for i in over]
    scores[over] = 0
    return games


def seed_all(seed: int, step: int, envs: range) -> list[int]:
    """Seeds all by seed and step, so that what follows depends on them alone; returns seeds of the envs of a rank."""
    first = int(np.random.SeedSequence([seed, step]).generate_state(1)[0])
    env_seeds = [(first + i) % 2**31 for i in envs]
    random.seed(env_seeds[0])  # so each rank draws numbers of its own
    np.random.seed(env_seeds[0])  # noqa: NPY002
    torch.manual_seed(env_seeds[0])
    return env_seeds


def orthogonal(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Gives a layer orthogonal weights (Saxe et al. 2014) and zero biases, and returns it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class AtariAgent(nn.Module):
    """A policy and a value function on the convolutions of Mnih et al. 2015; they see four frames."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.trunk = nn.Sequential(
            *(orthogonal(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU()),
            *(orthogonal(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()),
            *(orthogonal(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(), nn.Flatten()),
            *(orthogonal(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
        )
        self.actor = orthogonal(nn.Linear(512, num_actions), gain=0.01)  # so the first actions are almost uniform
        self.critic = orthogonal(nn.Linear(512, 1), gain=1.0)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:  # uint8 (B, 4, 84, 84) -> logits (B, A), value (B,)
        hidden = self.trunk(frames / 255.0)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class GreedyAgent(nn.Module):
    """The most probable action."""

    def __init__(self, agent: AtariAgent):
        super().__init__()
        self.agent = agent.to(memory_format=torch.contiguous_format)  # torch.export.save() warns of others

    def forward(self, frames: Tensor) -> Tensor:  # uint8 (B, 4, 84, 84) -> (B,)
        logits, _ = self.agent(frames)
        return logits.argmax(-1)


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


def categorical_logprob_entropy(action: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability (..) of actions (..) under logits (.., A), and the entropy (..) in nats."""
    logprobs = logits.log_softmax(-1)  # of all actions
    logprob = logprobs.gather(-1, action[..., None]).squeeze(-1)
    return logprob, -(logprobs.exp() * logprobs).sum(-1)


def vtrace(ratio: Tensor, reward: Tensor, value: Tensor, terminated: Tensor, done: Tensor, args: Args):
    """V-trace (Espeholt et al. 2018, eq. 1): targets of the value and advantages; all are (T, N), value is (T + 1, N).

    The ratio is that of the learner's policy to the one that played. Where it is 1, the advantage is that of GAE.
    """
    rho = ratio.clamp(max=args.rho_clip)
    c = args.gae_lambda * ratio.clamp(max=args.c_clip)
    delta = rho * (reward + args.gamma * (1 - terminated) * value[1:] - value[:-1])
    decay = args.gamma * (1 - done) * c
    error = [torch.zeros_like(delta[0])]  # target - value, from the end
    for delta_t, decay_t in zip(reversed(delta.unbind()), reversed(decay.unbind())):
        error.append(delta_t + decay_t * error[-1])
    error = torch.stack(error[::-1])
    following = args.gae_lambda * (1 - done) * error[1:]
    advantage = rho * (reward + args.gamma * ((1 - terminated) * value[1:] + following) - value[:-1])
    return value[:-1] + error[:-1], advantage


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


@torch.no_grad()
def act_on_frames(agent: AtariAgent, frames: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Samples actions; returns them with their log-probabilities, and the values of the frames."""
    logits, value = agent(frames)
    action = (logits + noise).argmax(-1)  # with Gumbel noise, this samples from softmax(logits)
    logprob, _ = categorical_logprob_entropy(action, logits)
    return action, logprob, value


def learn_from_stacks_(agent: AtariAgent, state: dict, batch: dict[str, Tensor], args: Args, idx: Tensor) -> Tensor:
    """A gradient step on the rows idx (b,) of the batch; returns what to log, PPO_LOSSES in one tensor."""
    minibatch = {name: x[idx] for name, x in batch.items()}

    def loss_of(params: dict) -> tuple[Tensor, Tensor]:
        logits, value = functional_call(agent, params, minibatch["obs"])
        logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
        return ppo_loss(logprob, entropy, value, minibatch, args)

    grads, (_, losses) = grad_and_value(loss_of, has_aux=True)(state["agent"])  # perf[graph]
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    adam_(state["agent"].values(), [grad * scale for grad in grads.values()], *state["adam"], state["lr"], eps=1e-5)
    return losses


@torch.no_grad()
def evaluate_rollout(agent: AtariAgent, obs: Tensor, action: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (T, N) of the actions, and values (T + 1, N) of the observations, `rows` of them at a time."""
    parts = [agent(part) for part in obs.flatten(0, 1).split(rows)]
    logits = torch.cat([logits for logits, _ in parts]).unflatten(0, obs.shape[:2])
    value = torch.cat([value for _, value in parts]).unflatten(0, obs.shape[:2])
    logprob, _ = categorical_logprob_entropy(action, logits[:-1])
    return logprob, value


class Players:
    """The E envs of a worker: as an actor of Ray a process of its own, on any machine of the cluster."""

    def __init__(self, args: Args):
        torch.set_num_threads(args.worker_threads)  # the other cores are for other workers
        torch.set_flush_denormal(True)  # as in the learner
        self.args = args
        self.envs = None

    def reset(self, step: int, offset: int):
        """Makes the envs anew, with seeds that follow from the step; `offset` envs of other workers come first."""
        if self.envs is not None:
            self.envs.close()
        seeds = seed_all(self.args.seed, step, range(offset, offset + self.args.envs_per_worker))
        try:
            self.envs = make_envs(self.args.env_id, seeds, self.args.worker_threads)
        except SystemExit as error:  # Ray would not say why
            raise RuntimeError(f"no {self.args.env_id} there: {error.__context__}") from error
        self.obs, _ = self.envs.reset()
        self.done = np.zeros(len(seeds), bool)
        self.scores = np.zeros(len(seeds))

    def rollout(self, agent: AtariAgent, noise: np.ndarray) -> dict:
        """T steps of all envs, with Gumbel noise (T, E, A): arrays (T, E, ..), and games (step, return, length)."""
        T, E, _ = noise.shape
        noise = torch.tensor(noise)
        obs = np.zeros((T + 1, *self.obs.shape), np.uint8)
        action = np.zeros((T, E), np.int64)
        logprob = np.zeros((T, E), np.float32)
        value = np.zeros((T + 1, E), np.float32)
        outcome = np.zeros((T, E, 4), np.float32)  # reward, terminated, done, valid
        games = []
        for t in range(T):
            obs[t] = self.obs
            action[t], logprob[t], value[t] = act_on_frames(agent, torch.as_tensor(self.obs), noise[t])
            valid = ~self.done  # where the last step ended an episode, this one only resets
            self.obs, reward, terminated, truncated, info = self.envs.step(action[t])
            games += [(t, float(game["r"]), int(game["l"])) for game in games_that_end(info, truncated, self.scores)]
            self.done = terminated | truncated
            outcome[t] = np.stack([reward, terminated, self.done, valid], -1)
        obs[T] = self.obs
        _, _, value[T] = act_on_frames(agent, torch.as_tensor(self.obs), noise[0])
        stored = {"obs": obs, "action": action, "logprob": logprob, "value": value, "outcome": outcome}
        return stored | {"games": games}


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


class Requests:
    """Rollouts that are on their way: lag + 1 of each worker, so that none waits while the learner learns."""

    def __init__(self, workers: Workers, num_actions: int):
        self.workers = workers
        self.num_actions = num_actions
        self.pending = []  # calls, oldest first
        self.dropped = 0  # rollouts of a policy that was too old

    def ask(self, numbers) -> list[Call]:
        """Asks each of these workers for a rollout with the newest policy."""
        args = self.workers.args
        noise = torch.empty(args.num_steps, len(numbers) * args.envs_per_worker, self.num_actions).exponential_()
        noise = np.split(-noise.log().numpy(), len(numbers), axis=1)  # Gumbel noise
        refs = [self.workers.actors[w].rollout.remote(self.policy, part) for w, part in zip(numbers, noise)]
        return [Call(w, ref, self.version, time.monotonic()) for w, ref in zip(numbers, refs)]

    def next_call(self) -> Call:
        """The first call, or with --first-come one that is ready, unless the oldest is late."""
        args = self.workers.args
        if not args.first_come:
            return self.pending[0]
        oldest = min(self.pending, key=lambda call: call.since)
        ready, _ = self.workers.ray.wait([call.result for call in self.pending], timeout=args.worker_timeout)
        if ready and time.monotonic() < oldest.since + args.worker_timeout * (args.lag + 1):
            return next(call for call in self.pending if call.result == ready[0])
        return oldest

    def receive(self, global_step: int) -> list[tuple[Call, dict]]:
        """As many rollouts as there are workers, which make a batch."""
        args = self.workers.args
        received = []
        while len(received) < args.num_workers:
            call = self.next_call()
            seconds_left = call.since + args.worker_timeout * (args.lag + 1) - time.monotonic()
            [rollout] = self.workers.collect({call.worker: call.result}, seconds_left).values()
            if isinstance(rollout, Exception):
                self.workers.replace(call.worker, rollout, global_step)
                # ask again, also for what the worker was to do afterwards, in the same places
                self.pending = [self.ask([c.worker])[0] if c.worker == call.worker else c for c in self.pending]
                continue
            self.workers.failures[call.worker] = 0
            self.pending.remove(call)
            if args.first_come and self.version - call.version > args.max_lag:
                self.dropped += 1
                self.pending += self.ask([call.worker])
            else:
                received.append((call, rollout))
        return received


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    T = args.num_steps
    W = args.num_workers
    N = W * args.envs_per_worker
    batch_size = T * N
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    if args.first_come and args.lag > args.max_lag:
        fail("--lag must be at most --max-lag, or --first-come would drop what it has waited for.")
    saved = load_checkpoint(args)
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    seed_all(args.seed, 0, range(N))
    envs = make_envs(args.env_id, [1])
    num_actions = int(envs.action_space.n)
    bytes_of_rollout = (T + 1) * N * math.prod(envs.reset()[0].shape)
    envs.close()
    workers = Workers(args, Players, args.worker_timeout * (args.lag + 2), (args.lag + 2) * bytes_of_rollout)
    requests = Requests(workers, num_actions)
    run_dir, writer, device = start_run(args, saved)
    if args.cudagraphs and device.type != "cuda":  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False

    agent = AtariAgent(num_actions).to(device, memory_format=torch.channels_last)  # faster convolutions
    params = dict(agent.requires_grad_(False).named_parameters())
    # perf[graph] the state of a run is tensors alone; perf[tensor] a number would keep the value it was compiled with
    state = {"agent": params, "adam": adam_state(params.values()), "lr": torch.zeros((), device=device)}
    # perf[channels] the bytes of a pixel lie together, as the convolutions read them
    obs = torch.zeros(batch_size, 4, 84, 84, dtype=torch.uint8, device=device)
    batch = {"obs": obs.to(memory_format=torch.channels_last)}  # perf[capture] the first rollout adds the rest
    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(state), saved["state"]):  # perf[graph]
            tensor.copy_(saved_tensor)

    clock = time.perf_counter(), global_step  # of the last report
    interval = args.checkpoint_interval or math.inf
    starts_anew = bool(saved)  # as a run goes on after a save
    received = []  # calls and their rollouts
    update = partial(learn_from_stacks_, agent, state, batch, args)
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
        # ask and receive
        began = time.perf_counter()
        requests.policy = workers.ray.put(deepcopy(agent).cpu())  # sent once to each machine
        requests.version = iteration
        if starts_anew:
            seed_all(args.seed, iteration, range(N))
        if starts_anew or iteration == first_iteration:
            workers.reset(range(W), iteration)  # behind the rollouts on their way, which are dropped
            requests.pending = [call for _ in range(args.lag + 1) for call in requests.ask(range(W))]
        else:
            requests.pending += requests.ask([call.worker for call, _ in received])
        received = requests.receive(global_step)
        seconds_waited = time.perf_counter() - began
        rollouts = [rollout for _, rollout in received]
        games = sum((rollout["games"] for rollout in rollouts), [])
        for t, return_, length in sorted(games, key=lambda game: game[0]):
            writer.add_scalar("charts/episodic_return", return_, global_step + (t + 1) * N)
            writer.add_scalar("charts/episodic_length", length, global_step + (t + 1) * N)
            last_returns.append(return_)
        global_step += batch_size

        # learn
        names = ("obs", "action", "logprob", "value", "outcome")
        stored = [np.concatenate([rollout[name] for rollout in rollouts], axis=1) for name in names]
        obs, action, logprob_played, value, outcome = (torch.as_tensor(x, device=device) for x in stored)
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = outcome.unbind(-1)
        logprob = logprob_played
        if args.lag > 0:  # an older policy played
            logprob, value = evaluate_rollout(agent, obs, action, minibatch_size)
        log_ratio = logprob - logprob_played
        ratio = log_ratio.exp()
        target, advantage = vtrace(ratio, reward_buffer, value, terminated_buffer, done_buffer, args)
        rollout = {"obs": obs[:T], "action": action, "logprob": logprob, "value": value[:T]}
        rollout |= {"advantage": advantage, "return": target, "valid": valid_buffer}
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
        weight = valid_buffer / valid_buffer.sum().clamp(min=1)
        losses["ratio"] = (weight * ratio).sum()
        losses["ratio_clipfrac"] = (weight * (ratio > args.rho_clip)).sum()
        losses["played_approx_kl"] = (weight * (ratio - 1 - log_ratio)).sum()  # of the policy that played
        metrics = report(losses, agent.parameters(), last_returns, global_step, clock, writer, progress)
        lags = [iteration - call.version for call, _ in received]
        counts = {"lag_mean": float(np.mean(lags)), "lag_max": max(lags), "lost_workers": workers.lost}
        share_waited = seconds_waited / (time.perf_counter() - clock[0])
        counts |= {"dropped_rollouts": requests.dropped, "share_waited": share_waited}
        metrics |= counts
        for name, count in (counts | {"learning_rate": learning_rate}).items():
            writer.add_scalar(f"charts/{name}", count, global_step)
        starts_anew = global_step // interval > clock[1] // interval
        clock = time.perf_counter(), global_step
        if starts_anew or signals:
            kept = {"iteration": iteration + 1, "last_returns": list(last_returns)}
            kept["state"] = tree_leaves(state)  # perf[graph]
            save_checkpoint(run_dir, args, kept)
        if signals:
            break

    finish_run(args, run_dir, metrics, writer, GreedyAgent(agent), torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
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
