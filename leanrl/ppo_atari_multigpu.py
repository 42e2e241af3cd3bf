# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "envpool==1.2.5", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "tensordict==0.15.3"]
# ///
"""Proximal policy optimization (PPO) on Atari games through EnvPool, data parallel on several GPUs.

    torchrun --standalone --nproc-per-node=2 leanrl/ppo_atari_multigpu.py --env-id Breakout-v5 --compile

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, whose equations are cited below as "eq.".
Each rank (process) has its own envs and, if there are any, its own GPU. Gradients are averaged over the ranks,
so all ranks hold equal parameters. See docs/multigpu.md, also for several nodes.
Shapes: T = num_steps, N = local_num_envs, B = T * N of a rank, A = number of actions.
Differences from CleanRL: those of ppo_atari_envpool.py; means are over the minibatches of all ranks together.
"""

import difflib
import json
import logging
import math
import os
import random
import re
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import tyro
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

PPO_LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")  # by ppo_loss


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; env seeds of two runs overlap only by chance
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use one GPU per rank if there are any
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact
    backend: str | None = None  # how ranks communicate: nccl, the default with GPUs, or gloo, that without
    timeout: int = 300  # seconds to wait for another rank before giving up

    env_id: str = "Breakout-v5"  # any Atari id of EnvPool
    total_timesteps: int = 10_000_000  # env steps (4 frames) of all ranks, in whole rollouts
    learning_rate: float = 2.5e-4  # learning rate of Adam
    local_num_envs: int = 8  # number of envs of each rank, stepped in parallel by EnvPool's threads
    num_steps: int = 128  # steps of each env per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch; must divide --local-num-envs times --num-steps
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # clip range of the policy ratio and, with --clip-vloss, of the value
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the norm of the gradient to this value
    target_kl: float | None = None  # stop a rollout's epochs once the last minibatch of an epoch exceeds this KL

    compile: bool = False  # compile the network and the loss
    ddp: bool = True  # reduce gradients while others are computed; --no-ddp: all at once, afterwards
    cudagraphs: bool = False  # capture policy, gradients and optimizer step as CUDA graphs, without DDP

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


def categorical_logprob_entropy(action: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability (..) of actions (..) under logits (.., A), and the entropy (..) in nats."""
    logprobs = logits.log_softmax(-1)  # of all actions
    logprob = logprobs.gather(-1, action[..., None]).squeeze(-1)
    return logprob, -(logprobs.exp() * logprobs).sum(-1)


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


@torch.no_grad()
def act_on_frames(agent: AtariAgent, frames: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Samples actions; returns them with their log-probabilities, and the values of the frames."""
    logits, value = agent(frames)
    action = (logits + noise).argmax(-1)  # with Gumbel noise, this samples from softmax(logits)
    logprob, _ = categorical_logprob_entropy(action, logits)
    return action, logprob, value


def mean_over_ranks(x: Tensor) -> Tensor:
    """The mean of a tensor over all ranks, equal on each of them."""
    x = x / dist.get_world_size()
    dist.all_reduce(x)
    return x


def advantage_moments(batch: dict[str, Tensor], minibatches: Tensor) -> Tensor:
    """Count, mean and standard deviation (M, 3) of the advantages in minibatches (M, b), over the rows of all ranks."""
    valid = batch["valid"][minibatches].double()
    advantage = batch["advantage"][minibatches].double()
    sums = torch.stack([valid.sum(-1), (valid * advantage).sum(-1), (valid * advantage**2).sum(-1)], -1)
    dist.all_reduce(sums)
    count = sums[:, 0].clamp(min=2)
    mean = sums[:, 1] / count
    variance = (sums[:, 2] - count * mean**2).clamp(min=0) / (count - 1)
    return torch.stack([count, mean, variance.sqrt()], -1).float()


def gradient_of_rank(model, loss_of, batch: dict, args: Args, idx: Tensor, moments: Tensor) -> Tensor:
    """Adds the gradient of this rank's share of the loss over the minibatches of all ranks; returns what to log."""
    minibatch = {name: x[idx] for name, x in batch.items()}
    count, mean, deviation = moments
    if args.norm_adv:
        minibatch["advantage"] = (minibatch["advantage"] - mean) / (deviation + 1e-8)
    logits, value = model(minibatch["obs"])
    logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
    local_count = minibatch["valid"].sum().clamp(min=2)
    loss, losses = loss_of(logprob, entropy, value, minibatch, replace(args, norm_adv=False))
    (loss * dist.get_world_size() * local_count / count).backward()  # averaged over ranks: the mean over all rows
    return losses


def gather(games: list, signals: list[int], params: list[Tensor]) -> tuple[list, bool]:
    """The games of all ranks by time, and whether a rank got a signal; their parameters must be equal."""
    norms = torch.stack([p.double().norm() for p in params]).tolist()
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (games, len(signals), str(norms)))  # as text, since NaN is not equal to NaN
    games_of_ranks, signals_of_ranks, norms_of_ranks = zip(*of_ranks)
    assert len(set(norms_of_ranks)) == 1, f"the ranks have different parameters, whose norms are {norms_of_ranks}"
    return sorted(game for games in games_of_ranks for game in games), any(signals_of_ranks)


def start_rank(args: Args, saved: dict) -> tuple[Path | None, SummaryWriter | SimpleNamespace, torch.device]:
    """Joins the other ranks, as torchrun's variables say; rank 0 alone makes the run folder and logs."""
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # among the processes of this node
    timeout = timedelta(seconds=args.timeout)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # no addresses of a run before
    group = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    dist.init_process_group(args.backend or ("nccl" if device.type == "cuda" else "gloo"), **group)
    if rank == 0:
        return start_run(args, saved)
    torch.set_flush_denormal(True)  # the settings of start_run()
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    return None, SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None), device


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal to any rank makes all of them save and stop early."""
    check_numbers(args)
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        fail(f"start it with torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    rank = int(os.environ["RANK"])  # among all processes of all nodes
    world_size = int(os.environ["WORLD_SIZE"])
    T = args.num_steps
    N = args.local_num_envs
    batch_size = T * N
    minibatch_size = batch_size // args.num_minibatches
    iteration_size = batch_size * world_size
    num_iterations = args.total_timesteps // iteration_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {iteration_size}, a rollout of all ranks.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    saved = load_checkpoint(args)
    first_iteration = saved.get("global_step", 0) // iteration_size  # there may be more ranks now, or fewer
    if first_iteration >= num_iterations:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    envs_of_rank = range(N * rank, N * rank + N)  # so each rank draws noise and minibatches of its own, too
    envs = make_envs(args.env_id, seed_all(args.seed, 0, envs_of_rank))
    num_actions = int(envs.action_space.n)
    run_dir, writer, device = start_rank(args, saved)
    if args.cudagraphs and device.type == "cpu" and rank == 0:
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
    args.cudagraphs = args.cudagraphs and device.type == "cuda"
    args.ddp = args.ddp and not args.cudagraphs  # a graph cannot contain DDP's reductions
    obs, _ = envs.reset()
    agent = AtariAgent(num_actions).to(device, memory_format=torch.channels_last)  # faster convolutions
    params = list(agent.parameters())
    network = torch.compile(agent, dynamic=False) if args.compile else agent
    loss_of = torch.compile(ppo_loss, dynamic=False) if args.compile else ppo_loss
    model = DistributedDataParallel(network, gradient_as_bucket_view=True) if args.ddp else network
    if not args.ddp:
        bucket = torch.zeros(sum(p.numel() for p in params), device=device)
        for p, part in zip(params, bucket.split([p.numel() for p in params])):
            p.grad = part.as_strided(p.shape, p.stride())  # a view: gradients are computed in the bucket
            dist.broadcast(p.data, src=0)  # as DDP does
    lr = torch.tensor(args.learning_rate, device=device)  # a graph would keep a number
    optimizer = torch.optim.Adam(params, lr=lr, eps=1e-5, fused=True, capturable=args.cudagraphs)
    if saved:
        agent.load_state_dict(saved["agent"])
        saved["optimizer"]["param_groups"] = optimizer.state_dict()["param_groups"]  # made for this device
        optimizer.load_state_dict(saved["optimizer"])
    obs_buffer = torch.zeros(T, N, 84, 84, 4, dtype=torch.uint8, device=device).permute(0, 1, 4, 2, 3)
    action_buffer = torch.zeros(T, N, dtype=torch.long, device=device)
    logprob_buffer = torch.zeros(T, N, device=device)
    value = torch.zeros(T + 1, N, device=device)  # value[T] is that of the last observation
    batch = {}
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full
    done = np.zeros(N, bool)
    scores = np.zeros(N)

    def step():
        nn.utils.clip_grad_norm_(params, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # in place: a bucket or a graph holds the gradients

    policy = partial(act_on_frames, network)
    gradient = partial(gradient_of_rank, model, loss_of, batch, args)
    if args.cudagraphs:  # the reduction stays between two graphs
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        policy, gradient, step = (CudaGraphModule(f, warmup=3) for f in (policy, gradient, step))

    def update_epoch() -> Tensor:
        minibatches = torch.randperm(batch_size, device=device).view(args.num_minibatches, minibatch_size)
        for idx, moments in zip(minibatches, advantage_moments(batch, minibatches)):
            losses = gradient(idx, moments)  # under DDP, its backward pass averages over the ranks
            if not args.ddp:
                dist.all_reduce(bucket.div_(world_size))
            step()
        return losses

    global_step = first_iteration * iteration_size
    progress = tqdm(total=num_iterations * iteration_size, initial=global_step, unit="step", disable=rank > 0)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    clock = time.perf_counter(), global_step  # of the last report
    interval = args.checkpoint_interval or math.inf
    starts_anew = bool(saved)  # as a run goes on after a save

    for iteration in range(first_iteration, num_iterations):
        if starts_anew:  # with a new pool, since EnvPool cannot seed one that exists
            envs.close()
            envs = make_envs(args.env_id, seed_all(args.seed, iteration, envs_of_rank))
            obs, _ = envs.reset()
            done[:] = False
            scores[:] = 0
        noise = -torch.empty(T, N, num_actions, device=device).exponential_().log()  # Gumbel noise
        games = []
        for t in range(T):
            # act
            obs_buffer[t] = torch.as_tensor(obs)
            action_buffer[t], logprob_buffer[t], value[t] = policy(obs_buffer[t], noise[t])
            env_action = action_buffer[t].cpu().numpy()  # waits for the GPU; so does the copy of the frames

            # step and store
            valid = ~done  # where the last step ended an episode, this one only resets
            global_step += N * world_size
            obs, reward, terminated, truncated, info = envs.step(env_action)
            games += [(global_step, game["r"], game["l"]) for game in games_that_end(info, truncated, scores)]
            done[:] = terminated | truncated
            env_buffer[:, t] = reward, terminated, done, valid

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer, device=device)
        _, _, value[T] = policy(torch.as_tensor(obs).to(device, memory_format=torch.channels_last), noise[0])
        advantage = gae(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"obs": obs_buffer, "action": action_buffer, "logprob": logprob_buffer, "value": value[:T]}
        rollout |= {"advantage": advantage, "return": advantage + value[:T], "valid": valid_buffer}
        for name, x in rollout.items():  # a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, x.flatten(0, 1)).copy_(x.flatten(0, 1))
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"].fill_(learning_rate)
        for _ in range(args.update_epochs):
            losses = dict(zip(PPO_LOSSES, mean_over_ranks(update_epoch())))
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:  # on all ranks or on none
                break

        # report and save
        losses["explained_variance"] = mean_over_ranks(explained_variance(batch))
        games, is_stopped = gather(games, signals, params)  # so all stop or none
        for step_of_game, score, length in games:
            writer.add_scalar("charts/episodic_return", score, step_of_game)
            writer.add_scalar("charts/episodic_length", length, step_of_game)
            last_returns.append(float(score))
        metrics = report(losses, params, last_returns, global_step, clock, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        starts_anew = global_step // interval > clock[1] // interval
        clock = time.perf_counter(), global_step
        if rank == 0 and (starts_anew or is_stopped):
            kept = {"global_step": global_step, "last_returns": list(last_returns)}
            kept |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(run_dir, args, kept)
        if is_stopped:
            break

    metrics["world_size"] = world_size
    if rank == 0:
        finish_run(args, run_dir, metrics, writer, GreedyAgent(agent), torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
    for resource in (progress, envs):
        resource.close()
    model = policy = gradient = step = None  # graphs and DDP end before the group, or Gloo's threads would live on
    dist.destroy_process_group()
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
