# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "envpool==1.2.5", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "ray==2.60.0", "tensordict==0.15.3"]
# ///
"""Asynchronous PPO, and IMPALA, on Atari games with Ray, compiled and captured as CUDA graphs.

    python leanrl/ppo_atari_ray_torchcompile.py --env-id Breakout-v5 --num-workers 2 --compile --cudagraphs

Papers: Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (PPO, "eq."); Espeholt et al. 2018,
https://arxiv.org/abs/1802.01561 (V-trace). Plain twin: ppo_atari_ray.py. docs/performance.md explains each perf[name].
To learn the algorithm, read vtrace_scan(), ppo_loss() and train(); how the work is spread: FramePlayers and collect().
Shapes: T = num_steps, W = num_workers, E = envs_per_worker, N = W * E, B = T * N, A = number of actions.
Differences from IMPALA:
1. The ratio that PPO clips is to the policy at the start of the batch; V-trace corrects for the one that played.
2. With --lag 1, a rollout comes from the policy of one update before, and runs of a seed give the same bits.
3. --update-epochs 1 --num-minibatches 1 --no-norm-adv --gae-lambda 1 make the loss IMPALA's.
"""

import ctypes
import difflib
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
import zipfile
from collections import defaultdict, deque  # perf[frames]
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads OpenMP: idle threads spin briefly, then sleep
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
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

    env_id: str = "Breakout-v5"  # any Atari id of EnvPool
    total_timesteps: int = 10_000_000  # env steps (of 4 frames each), summed over all envs
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
    clip_coef: float = 0.1  # how far the policy ratio and, with --clip-vloss, the value may move
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # scale larger gradients down to this norm
    target_kl: float | None = None  # skip the other epochs once the last minibatch of one exceeds this KL

    ray_address: str | None = None  # cluster to join: auto, or the head's host:port; default: only this machine
    worker_threads: int = 1  # threads of each worker, for its envs and its policy
    worker_timeout: float = 300.0  # seconds for a rollout; a worker is started again if lag + 1 of them take longer
    lag: int = 1  # updates between the policy that plays and the one that learns; 0: the workers wait
    first_come: bool = False  # learn from whichever rollouts are ready, in no fixed order, as IMPALA does
    max_lag: int = 8  # drop a rollout whose policy is more updates old than this, with --first-come
    rho_clip: float = 1.0  # V-trace: largest weight of a temporal difference
    c_clip: float = 1.0  # V-trace: largest weight of what follows it

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


def make_envs(env_id: str, seeds: list[int], num_threads: int = 0):
    """Makes EnvPool envs of an Atari game, one per seed; with 0 threads, one per env, and at most one per core.

    A lost life ends an episode, and rewards are clipped to -1, 0 or 1. The unclipped reward is in info["reward"].
    """
    options = {"episodic_life": True, "reward_clip": True, "num_threads": num_threads}
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
    """Adds the unclipped rewards of a step to the running scores (N,), and returns the games that ended.

    A game is a dict with its return "r" and its length "l". Its score starts anew at 0.
    """
    scores += info["reward"]
    over = np.flatnonzero(info["terminated"] | truncated)  # terminated: the last life is lost
    games = [{"r": scores[i], "l": info["elapsed_step"][i]} for i in over]
    scores[over] = 0
    return games


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
        self.agent = agent

    def forward(self, frames: Tensor) -> Tensor:  # uint8 (B, 4, 84, 84) -> (B,)
        logits, _ = self.agent(frames)
        return logits.argmax(-1)


def categorical_logprob_entropy(action: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability (..) of actions (..) under logits (.., A), and the entropy (..) in nats."""
    logprobs = logits.log_softmax(-1)  # of all actions
    logprob = logprobs.gather(-1, action[..., None]).squeeze(-1)
    return logprob, -(logprobs.exp() * logprobs).sum(-1)


# perf[scan] log2(T) steps of whole tensors, where a loop over time takes T steps of single rows
def vtrace_scan(ratio: Tensor, reward: Tensor, value: Tensor, terminated: Tensor, done: Tensor, args: Args):
    """V-trace (Espeholt et al. 2018, eq. 1): targets of the value and advantages; all are (T, N), value is (T + 1, N).

    The ratio is that of the learner's policy to the one that played. Where it is 1, the advantage is that of GAE.
    """
    rho = ratio.clamp(max=args.rho_clip)
    c = args.gae_lambda * ratio.clamp(max=args.c_clip)
    delta = rho * (reward + args.gamma * (1 - terminated) * value[1:] - value[:-1])
    decay = args.gamma * (1 - done) * c
    error = torch.cat([delta, torch.zeros_like(delta[:1])])  # target - value
    span = 1  # perf[scan] error[t] sums the steps t .. t + span - 1, and decay[t] discounts what follows them
    while span < len(delta):
        error[: -span - 1] = error[: -span - 1] + decay[:-span] * error[span:-1]
        decay[:-span] = decay[:-span] * decay[span:]
        span *= 2
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


class Call(NamedTuple):
    """A rollout that a worker has been asked for."""

    worker: int
    result: object  # of Ray: a reference
    version: int  # of the policy
    since: float  # time.monotonic() of the call


class FramePlayers:  # perf[frames] perf[vector]
    """The E envs of a worker: as an actor of Ray a process of its own, on any machine of the cluster."""

    def __init__(self, env_id: str, num_envs: int, num_threads: int):
        torch.set_num_threads(num_threads)  # the other cores are for other workers
        torch.set_flush_denormal(True)  # as in the learner
        self.env_id = env_id
        self.num_threads = num_threads
        self.envs = None
        self.agent = None  # perf[vector] made by the first rollout
        self.done = np.zeros(num_envs, bool)
        self.scores = np.zeros(num_envs)

    def reset(self, seeds: list[int]):
        """Makes the envs anew."""
        if self.envs is not None:
            self.envs.close()
        try:
            self.envs = make_envs(self.env_id, seeds, self.num_threads)
        except SystemExit as error:  # to Ray this would be a worker to be started again
            raise RuntimeError(f"{self.env_id} cannot be made there: {error.__context__}") from error
        self.obs, _ = self.envs.reset()
        self.done[:] = False
        self.scores[:] = 0

    @torch.no_grad()
    def rollout(self, vector: np.ndarray, noise: np.ndarray) -> dict | RuntimeError:
        """T steps of all envs, with Gumbel noise (T, E, A)."""
        if self.envs is None:  # Ray has started this process anew, and nobody was told
            return RuntimeError("it was started again")
        T, E, num_actions = noise.shape
        noise = torch.tensor(noise)
        if self.agent is None:  # perf[vector] the parameters come as one vector
            self.agent = AtariAgent(num_actions).to(memory_format=torch.channels_last)
        load_vector(self.agent, torch.tensor(vector))
        first = self.obs
        frame = np.zeros((T, E, 84, 84), np.uint8)  # perf[frames] the newest of each observation but the first
        stacks = []  # perf[frames] (step, env, observation) of those that are not the one before with a newer frame
        action = np.zeros((T, E), np.int64)
        logprob = np.zeros((T, E), np.float32)
        value = np.zeros((T + 1, E), np.float32)
        outcome = np.zeros((T, E, 4), np.float32)  # reward, terminated, done, valid
        ended = []  # games: (step, return, length)
        for t in range(T):
            before = self.obs
            logits, value[t] = self.agent(torch.as_tensor(self.obs))
            sampled = (logits + noise[t]).argmax(-1)  # with Gumbel noise, this samples from softmax(logits)
            logprob[t] = categorical_logprob_entropy(sampled, logits)[0]
            action[t] = sampled
            valid = ~self.done  # an env whose episode has ended only resets
            self.obs, reward, terminated, truncated, info = self.envs.step(action[t])
            ended += [(t, float(game["r"]), int(game["l"])) for game in games_that_end(info, truncated, self.scores)]
            self.done = terminated | truncated
            outcome[t] = np.stack([reward, terminated, self.done, valid], -1)
            frame[t] = self.obs[:, 3]  # perf[frames]
            anew = (self.obs[:, :3] != before[:, 1:]).any((1, 2, 3))
            stacks += [(t, i, self.obs[i]) for i in np.flatnonzero(anew)]
        _, value[T] = self.agent(torch.as_tensor(self.obs))
        stored = {"frame": frame, "action": action, "logprob": logprob, "value": value, "outcome": outcome}
        return stored | {"games": ended, "first": first, "stacks": stacks}


def load_vector(agent: AtariAgent, vector: Tensor):  # perf[vector]
    """Sets all parameters from one vector (P,)."""
    for p, part in zip(agent.parameters(), vector.split([p.numel() for p in agent.parameters()])):
        p.data.copy_(part.view_as(p))


# perf[frames] a quarter of the bytes crosses the network; the learner restores the rest
def restore_stacks(obs: Tensor, first: Tensor, frame: Tensor, stacks: list):
    """Fills obs (T + 1, N, 4, 84, 84) from the first one, the newest frames (T, N, 84, 84), and what began anew."""
    began = defaultdict(list)
    for t, i, stack in stacks:
        began[t].append((i, stack))
    obs[0] = first
    for t in range(len(frame)):
        obs[t + 1, :, :3] = obs[t, :, 1:]
        obs[t + 1, :, 3] = frame[t]
        for i, stack in began[t]:
            obs[t + 1, i] = torch.tensor(stack)


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


def convolve_last_layer(trunk: nn.Sequential):  # perf[conv]
    """Turns the layer of 512 into a convolution, the same sum over all 7 x 7 positions of 64 channels."""
    trunk[6] = nn.Identity()  # nothing to flatten
    linear = trunk[7]
    linear.weight = nn.Parameter(linear.weight.unflatten(1, (64, 7, 7)), requires_grad=False)
    linear.forward = lambda x: nn.functional.conv2d(x, linear.weight, linear.bias).flatten(1)


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


def keep_freed_memory():
    """Lets glibc keep freed memory: mapping it anew costs a page fault for every 4 kB."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: map no large block on its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never give back the end of the heap


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
    if args.first_come and args.lag > args.max_lag:
        fail("--lag must be at most --max-lag, or --first-come would drop what it has waited for.")
    if N > 10_000:
        fail("more than 10,000 envs would share random streams with those of other seeds.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    envs = make_envs(args.env_id, [1])
    num_actions = int(envs.action_space.n)
    frames = torch.zeros(2, *envs.reset()[0].shape[1:], dtype=torch.uint8)
    envs.close()
    made_by = [Path(__file__).stem, args.env_id, T, N]
    saved = load_checkpoint(args, made_by) if args.resume is not None else {}
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        print("nothing is left to do; raise --total-timesteps to go on.", file=sys.stderr)
        sys.exit(0)
    keep_freed_memory()
    device = pick_device(args)
    on_gpu = device.type == "cuda"
    if args.cudagraphs and not on_gpu:  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False
    bytes_of_rollouts = (args.lag + 2) * (T + 1) * N * frames[0].numel()
    ray, workers = start_ray(args, FramePlayers, (args.env_id, E, args.worker_threads), bytes_of_rollouts)
    run_dir, writer = start_run(args)
    agent = AtariAgent(num_actions).requires_grad_(False)
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"  # perf[conv] slower without
    if has_avx512 and not on_gpu:
        convolve_last_layer(agent.trunk)
    agent.to(device, memory_format=torch.channels_last)  # faster convolutions
    parameters = dict(agent.named_parameters())
    adam = adam_state(parameters.values())
    lr = torch.zeros((), device=device)  # perf[tensor] a number would keep the value it was compiled with
    batch = {}
    # perf[channels] the bytes of a pixel lie together, as the convolutions read them
    obs = torch.zeros((T + 1) * N, *frames.shape[1:], dtype=torch.uint8, device=device)
    obs = obs.to(memory_format=torch.channels_last).unflatten(0, (T + 1, N))

    def reset(numbers: list[int], seeds: list[int]):
        """Makes the envs of these workers anew; the workers may be starting."""
        patience = args.worker_timeout * (args.lag + 2) + START_SECONDS * (10 + W)  # behind other calls
        kill_at = time.monotonic() + patience
        deadline = kill_at + 2 * patience  # so that one that hangs has another chance
        left = list(numbers)
        while left:
            refs = [workers[w].reset.remote(seeds[w * E : (w + 1) * E]) for w in left]
            results = collect([workers[w] for w in left], refs, patience)
            errors = {w: result for w, result in zip(left, results) if isinstance(result, Exception)}
            left = list(errors)
            hangs = time.monotonic() > kill_at
            for w, error in errors.items():
                if isinstance(error, ray.exceptions.ActorDiedError) or time.monotonic() > deadline:
                    free = f"{ray.available_resources().get('CPU', 0):.0f} CPUs of the cluster are free"
                    sys.exit(f"error: worker {w} does not start; {free}: {' '.join(str(error).split())[-300:]}")
                if hangs and not isinstance(error, TimeoutError):  # it hung while it started, and Ray waits for it
                    ray.kill(workers[w], no_restart=False)
            if hangs:
                kill_at += patience
            if left:
                time.sleep(0.1)

    def ask(numbers: list[int]) -> list[Call]:
        """Asks each of these workers for a rollout with the newest policy."""
        noise = -torch.empty(T, len(numbers) * E, num_actions).exponential_().log()  # Gumbel noise
        parts = np.split(noise.numpy(), len(numbers), axis=1)
        now = time.monotonic()
        return [Call(w, workers[w].rollout.remote(policy, part), version, now) for w, part in zip(numbers, parts)]

    def next_call() -> Call:
        """The first call, or with --first-come one that is ready, unless the oldest is late."""
        if not args.first_come:
            return pending[0]
        oldest = min(pending, key=lambda call: call.since)
        ready, _ = ray.wait([call.result for call in pending], timeout=args.worker_timeout)
        if ready and time.monotonic() < oldest.since + args.worker_timeout * (args.lag + 1):
            return next(call for call in pending if call.result == ready[0])
        return oldest

    def receive() -> list[tuple[Call, dict]]:
        """As many rollouts as there are workers, which make a batch."""
        nonlocal lost, dropped
        lost_before = lost
        received = []
        while len(received) < W:
            call = next_call()
            pending.remove(call)
            seconds_left = call.since + args.worker_timeout * (args.lag + 1) - time.monotonic()
            [rollout] = collect([workers[call.worker]], [call.result], seconds_left)
            if isinstance(rollout, Exception):
                lost += 1
                message = f"warning: worker {call.worker} was lost: {' '.join(str(rollout).split())[:300]}"
                progress.write(message, sys.stderr)
                if lost > lost_before + MOST_LOSSES * W:
                    sys.exit(f"error: workers were lost {lost - lost_before} times in one rollout.")
                seeds = np.random.SeedSequence([args.seed, global_step, lost]).generate_state(N) // 2
                reset([call.worker], seeds.tolist())
                # ask again, also for what the worker was to do afterwards, in the same places
                calls = [call, *pending]
                pending[:] = [ask([c.worker])[0] if c.worker == call.worker else c for c in calls]
            elif args.first_come and version - call.version > args.max_lag:
                dropped += 1
                pending.extend(ask([call.worker]))
            else:
                received.append((call, rollout))
        return received

    def publish():
        """Hands the policy to Ray, which sends it once to every machine."""
        return ray.put(torch.cat([p.reshape(-1) for p in parameters.values()]).cpu().numpy())  # perf[vector]

    def start_anew(iteration: int):
        """Drops the rollouts in flight, and makes the envs anew with seeds that follow from seed and iteration."""
        seeds = (np.random.SeedSequence([args.seed, iteration]).generate_state(N + 1) // 2).tolist()
        torch.manual_seed(seeds[N])
        reset(list(range(W)), seeds)
        pending[:] = [call for _ in range(args.lag + 1) for call in ask(list(range(W)))]

    state = {"parameters": parameters, "adam": adam}  # perf[graph] the state of a run is tensors alone
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(state), tree_leaves(saved["state"]), strict=True):  # perf[graph]
            tensor.copy_(saved_tensor.reshape(tensor.shape))
    pending = []  # calls, oldest first
    version = first_iteration  # of the policy: updates so far
    policy = publish()
    if saved:
        start_anew(first_iteration)
    else:
        reset(list(range(W)), [(10_000 * args.seed + i) % 2**31 for i in range(N)])
        pending += [call for _ in range(args.lag + 1) for call in ask(list(range(W)))]

    @torch.no_grad()
    def evaluate(obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (T, N) of the actions, and values (T + 1, N) of the observations."""
        parts = [agent(part) for part in obs.flatten(0, 1).split(minibatch_size)]
        logits = torch.cat([logits for logits, _ in parts]).unflatten(0, (T + 1, -1))
        value = torch.cat([value for _, value in parts]).unflatten(0, (T + 1, -1))
        logprob, _ = categorical_logprob_entropy(action, logits[:T])
        return logprob, value

    def loss_of(params: dict, minibatch: dict) -> tuple[Tensor, Tensor]:
        logits, value = functional_call(agent, params, minibatch["obs"])  # perf[graph]
        logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
        return ppo_loss(logprob, entropy, value, minibatch, args)

    def update(idx: Tensor) -> Tensor:
        """A gradient step on the rows idx of the batch; returns what to log."""
        minibatch = {name: x[idx] for name, x in batch.items()}
        grads, (_, losses) = grad_and_value(loss_of, has_aux=True)(parameters, minibatch)  # perf[graph]
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        adam_(parameters.values(), [grad * scale for grad in grads.values()], *adam, lr, eps=1e-5)
        return losses

    def update_epoch(permutation: Tensor) -> Tensor:  # perf[capture] all updates of an epoch in one graph
        for idx in permutation.split(minibatch_size):
            losses = update(idx)
        return losses

    if args.compile:  # perf[graph]; update_epoch() calls the compiled update from here on
        update = torch.compile(update, fullgraph=True, options={"cpp_wrapper": device.type == "cpu"})  # perf[cpp]
    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        update_epoch = CudaGraphModule(update_epoch, warmup=3)

    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    marks = [(time.perf_counter(), global_step)]
    interval = args.checkpoint_interval or math.inf
    saved_at = global_step
    lost = 0  # workers that had to be started again
    dropped = 0  # rollouts of a policy that was too old
    path = stopped_by = None  # the last checkpoint, if its save did not fail, and a signal
    for iteration in range(first_iteration, num_iterations):
        # receive
        began = time.perf_counter()
        received = receive()
        seconds_waited = time.perf_counter() - began
        calls = [call for call, _ in received]
        rollouts = [rollout for _, rollout in received]
        games = sum((rollout["games"] for rollout in rollouts), [])
        for t, episodic_return, length in sorted(games, key=lambda game: game[0]):
            writer.add_scalar("charts/episodic_return", episodic_return, global_step + (t + 1) * N)
            writer.add_scalar("charts/episodic_length", length, global_step + (t + 1) * N)
            last_returns.append(episodic_return)
        global_step += batch_size

        # learn
        remaining = 1 - iteration / num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * remaining
        lr.fill_(learning_rate)  # perf[tensor]
        names = ("frame", "action", "logprob", "value", "outcome")
        stored = [np.concatenate([r[name] for r in rollouts], 1) for name in names]
        frame, action, logprob_played, value, outcome = (torch.as_tensor(x, device=device) for x in stored)
        first = torch.as_tensor(np.concatenate([r["first"] for r in rollouts]), device=device)  # perf[frames]
        stacks = [(t, i * E + k, stack) for i, r in enumerate(rollouts) for t, k, stack in r["stacks"]]
        restore_stacks(obs, first, frame, stacks)
        reward, terminated, done, valid = outcome.unbind(-1)
        logprob = logprob_played
        if args.lag > 0:  # an older policy played
            logprob, value = evaluate(obs, action)
        log_ratio = logprob - logprob_played
        ratio = log_ratio.exp()
        target, advantage = vtrace_scan(ratio, reward, value, terminated, done, args)
        rows = {"obs": obs, "action": action, "logprob": logprob, "value": value}
        rows |= {"advantage": advantage, "return": target, "valid": valid}
        for name, x in rows.items():  # perf[capture] a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, x[:T].flatten(0, 1)).copy_(x[:T].flatten(0, 1))
        for _ in range(args.update_epochs):
            losses = dict(zip(PPO_LOSSES, update_epoch(torch.randperm(batch_size, device=device))))
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break
        version = iteration + 1
        policy = publish()
        pending += ask([call.worker for call in calls])

        # report
        losses["explained_variance"] = explained_variance(batch)
        weight = valid / valid.sum().clamp(min=1)
        losses["ratio"] = (weight * ratio).sum()
        losses["ratio_clipfrac"] = (weight * (ratio > args.rho_clip)).sum()
        losses["played_approx_kl"] = (weight * (ratio - 1 - log_ratio)).sum()  # of the policy that played
        marks.append((time.perf_counter(), global_step))
        metrics = report(losses, parameters, [reward], last_returns, marks, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        lags = [version - 1 - call.version for call in calls]
        counts = {"lag_mean": np.mean(lags), "lag_max": max(lags), "lost_workers": lost, "dropped_rollouts": dropped}
        counts["share_waited"] = seconds_waited / (marks[-1][0] - marks[-2][0])
        for name, count in counts.items():
            writer.add_scalar(f"charts/{name}", count, global_step)
        if args.compile:  # perf[guards] all is compiled by now: skip the guards
            torch.compiler.set_stance(skip_guard_eval_unsafe=True)

        # save
        if signals or global_step // interval > saved_at // interval:
            kept = {"made_by": made_by, "iteration": iteration + 1, "global_step": global_step}
            kept["last_returns"] = list(last_returns)
            kept["state"] = state  # perf[graph]
            path = save_checkpoint(run_dir, kept)
            saved_at = global_step
            if signals:
                stopped_by = signals[0]
                break
            start_anew(iteration + 1)

    metrics |= {name: float(count) for name, count in counts.items()}
    ran = {"device": str(device), "nodes": sum(node["Alive"] for node in ray.nodes())}
    finish_run(args, run_dir, writer, ran, metrics, GreedyAgent(agent), frames)
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
