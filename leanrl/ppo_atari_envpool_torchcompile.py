# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "envpool==1.2.5", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "tensordict==0.15.3"]
# ///
"""Proximal policy optimization (PPO) on Atari games through EnvPool, compiled and captured as CUDA graphs.

    python leanrl/ppo_atari_envpool_torchcompile.py --env-id Breakout-v5 --seed 1 --compile --cudagraphs

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, whose equations are cited below as "eq.".
Plain twin: ppo_atari_envpool.py. docs/performance.md explains each perf[name].
Shapes: T = num_steps, N = num_envs, B = T * N, A = number of actions.
Differences from CleanRL's ppo_atari_envpool.py:
1. Values are bootstrapped through a truncation; a termination (or a lost life) ends the return.
2. The step after an episode's end, whose action EnvPool ignores, is masked out of losses and statistics.
3. A game that ends by its time limit counts among the returns, and its score ends there.
"""

import difflib
import json
import logging  # perf[capture]
import math
import os
import random
import re
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial  # perf[groups]
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
    num_envs: int = 8  # number of envs, stepped in parallel by EnvPool's threads
    num_steps: int = 128  # steps of each env per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch; must divide --num-envs times --num-steps
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # clip range of the policy ratio and, with --clip-vloss, of the value
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the norm of the gradient to this value
    target_kl: float | None = None  # stop a rollout's epochs once the last minibatch of an epoch exceeds this KL

    # perf[graph] perf[capture] perf[groups] perf[bf16]
    compile: bool = False  # compile the policy and the update
    cudagraphs: bool = False  # capture the policy and the epochs of updates as CUDA graphs
    env_groups: int = 1  # number of groups of envs; with 2, EnvPool steps one while the policy acts for the other
    bf16: bool = False  # compute the network in bfloat16

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


def make_pools(args: Args, step: int, groups: list[slice], old_pools: list = ()) -> list:
    # perf[groups] one pool for each group: EnvPool steps one while the policy acts for another
    for pool in old_pools:
        pool.close()
    env_seeds = seed_all(args.seed, step, range(args.num_envs))
    return [make_envs(args.env_id, env_seeds[rows]) for rows in groups]


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


def evaluate_frames(agent: AtariAgent, params: dict, frames: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    # perf[bf16] the network computes in bfloat16, what follows in the default type
    with torch.autocast(frames.device.type, torch.bfloat16, enabled=args.bf16):
        logits, value = functional_call(agent, params, frames)
    return logits.to(torch.get_default_dtype()), value.to(torch.get_default_dtype())


@torch.no_grad()
def act_on_frames_(agent: AtariAgent, params: dict, args: Args, frames: Tensor, noise: Tensor):
    """Samples actions; returns them with their log-probabilities, and the values of the frames."""
    logits, value = evaluate_frames(agent, params, frames, args)
    action = (logits + noise).argmax(-1)  # with Gumbel noise, this samples from softmax(logits)
    logprob, _ = categorical_logprob_entropy(action, logits)
    return action, logprob, value


def learn_from_frames_(agent: AtariAgent, state: dict, batch: dict[str, Tensor], args: Args, idx: Tensor) -> Tensor:
    """A gradient step on the rows idx (b,) of the batch; returns what to log, PPO_LOSSES in one tensor."""
    minibatch = {name: x[idx] for name, x in batch.items()}

    def loss_of(params: dict) -> tuple[Tensor, Tensor]:
        logits, value = evaluate_frames(agent, params, minibatch["obs"], args)
        logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
        return ppo_loss(logprob, entropy, value, minibatch, args)

    grads, (_, losses) = grad_and_value(loss_of, has_aux=True)(state["agent"])  # perf[graph]
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    adam_(state["agent"].values(), [grad * scale for grad in grads.values()], *state["adam"], state["lr"], eps=1e-5)
    return losses


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    T = args.num_steps
    N = args.num_envs
    G = args.env_groups  # perf[groups] EnvPool steps one group while the policy acts for another
    batch_size = T * N
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    if N % G:  # perf[groups]
        fail(f"--env-groups must divide --num-envs, {N}.")
    saved = load_checkpoint(args)
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    groups = [slice(i, i + N // G) for i in range(0, N, N // G)]
    pools = make_pools(args, 0, groups)
    num_actions = int(pools[0].action_space.n)
    run_dir, writer, device = start_run(args, saved)
    on_gpu = device.type == "cuda"
    if args.cudagraphs and not on_gpu:  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False

    # perf[pinned] pinned memory: the copies do not wait
    obs = torch.from_numpy(np.concatenate([pool.reset()[0] for pool in pools]))
    obs = obs.pin_memory() if on_gpu else obs
    env_action = torch.zeros(N, dtype=torch.long, pin_memory=on_gpu)
    agent = AtariAgent(num_actions).to(device, memory_format=torch.channels_last)  # faster convolutions
    params = dict(agent.requires_grad_(False).named_parameters())
    acting_params = {name: p.bfloat16() if args.bf16 else p for name, p in params.items()}  # perf[bf16]
    # perf[graph] the state of a run is tensors alone; perf[tensor] a number would keep the value it was compiled with
    state = {"agent": params, "adam": adam_state(params.values()), "lr": torch.zeros((), device=device)}
    # perf[channels] the bytes of a pixel lie together, as the convolutions read them
    obs_buffer = torch.zeros((T + 1) * N, *obs.shape[1:], dtype=torch.uint8, device=device)
    obs_buffer = obs_buffer.to(memory_format=torch.channels_last).unflatten(0, (T + 1, N))
    action_buffer = torch.zeros(T + 1, N, dtype=torch.long, device=device)
    logprob_buffer = torch.zeros(T + 1, N, device=device)
    noise = torch.zeros(T + 1, N, num_actions, device=device)
    times = torch.zeros(G, 1, dtype=torch.long, device=device)  # perf[tensor] the time of each group in the rollout
    batch = {}
    value = torch.zeros(T + 1, N, device=device)  # value[T] is that of the last observation
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full
    done = np.zeros(N, bool)
    scores = np.zeros(N)
    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(state), saved["state"]):  # perf[graph]
            tensor.copy_(saved_tensor)

    # perf[graph] one graph each
    policy = torch.compile(act_on_frames_, fullgraph=True) if args.compile else act_on_frames_
    update = torch.compile(learn_from_frames_, fullgraph=True) if args.compile else learn_from_frames_

    def act(g: int):  # captured, but not compiled: the copies between host and device stay as they are written
        now = times[g], groups[g]
        frames = obs[groups[g]].to(device, non_blocking=True, memory_format=torch.channels_last)
        obs_buffer[now] = frames
        action_buffer[now], logprob_buffer[now], value[now] = policy(agent, acting_params, args, frames, noise[now][0])
        env_action[groups[g]].copy_(action_buffer[now][0], non_blocking=True)
        times[g] = (times[g] + 1) % (T + 1)

    def update_epoch(permutation: Tensor) -> Tensor:  # perf[capture] all updates of an epoch in one graph
        for idx in permutation.split(minibatch_size):
            losses = update(agent, state, batch, args, idx)
        return losses

    acts = [partial(act, g) for g in range(G)]
    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        acts = [CudaGraphModule(act, warmup=3) for act in acts]
        update_epoch = CudaGraphModule(update_epoch, warmup=3)

    clock = time.perf_counter(), global_step  # of the last report
    interval = args.checkpoint_interval or math.inf
    starts_anew = bool(saved)  # as a run goes on after a save

    for iteration in range(first_iteration, num_iterations):
        if starts_anew:  # with a new pool, since EnvPool cannot seed one that exists
            pools = make_pools(args, iteration, groups, pools)  # perf[groups]
            obs.numpy()[:] = np.concatenate([pool.reset()[0] for pool in pools])
            done[:] = False
            scores[:] = 0
        noise[:T] = -torch.empty(T, N, num_actions, device=device).exponential_().log()  # Gumbel noise
        for name, p in params.items():  # perf[bf16] convert the weights once per rollout
            acting_params[name].copy_(p)
        for k in range(1 - G, T * G):  # perf[groups] every turn, one group acts and another is received from
            # act
            g = (k - 1) % G  # perf[groups] the group that was received from last
            if k <= T * G - G:
                acts[g]()
                torch.get_device_module(device).synchronize()  # the one sync of a group's step; on a CPU, nothing
                pools[g].send(env_action[groups[g]].numpy())
            if k < 0:
                continue  # perf[groups] at first, no group has waited long enough

            # step and store
            t, g = divmod(k, G)  # perf[groups] the group that has waited longest
            rows = groups[g]
            valid = ~done[rows]  # where the last step ended an episode, this one only resets
            global_step += len(valid)
            obs.numpy()[rows], reward, terminated, truncated, info = pools[g].recv()
            for game in games_that_end(info, truncated, scores[rows]):
                writer.add_scalar("charts/episodic_return", game["r"], global_step)
                writer.add_scalar("charts/episodic_length", game["l"], global_step)
                last_returns.append(float(game["r"]))
            done[rows] = terminated | truncated
            env_buffer[:, t, rows] = reward, terminated, done[rows], valid

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer, device=device)
        for act_of_group in acts:  # perf[capture] acts at time T, too, for the value of the last observation
            act_of_group()
        advantage = gae(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"obs": obs_buffer, "action": action_buffer, "logprob": logprob_buffer, "value": value}
        rollout |= {"advantage": advantage, "return": advantage + value[:T], "valid": valid_buffer}
        for name, x in rollout.items():  # perf[capture] a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, x[:T].flatten(0, 1)).copy_(x[:T].flatten(0, 1))
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        state["lr"].fill_(learning_rate)  # perf[tensor]
        for _ in range(args.update_epochs):
            losses = dict(zip(PPO_LOSSES, update_epoch(torch.randperm(batch_size, device=device))))
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break

        # report and save
        losses["explained_variance"] = explained_variance(batch)
        metrics = report(losses, agent.parameters(), last_returns, global_step, clock, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        starts_anew = global_step // interval > clock[1] // interval
        clock = time.perf_counter(), global_step
        if starts_anew or signals:
            kept = {"iteration": iteration + 1, "last_returns": list(last_returns)}
            kept["state"] = tree_leaves(state)  # perf[graph]
            save_checkpoint(run_dir, args, kept)
        if signals:
            break

    finish_run(args, run_dir, metrics, writer, GreedyAgent(agent), torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
    for resource in (progress, *pools):  # perf[groups]
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
