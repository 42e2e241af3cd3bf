# /// script
# dependencies = ["torch==2.13.0", "tensordict==0.15.3", "envpool==1.2.5", "numpy==2.4.6", "tyro==1.0.17",
#                 "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO on Atari games through EnvPool (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), data parallel.

    torchrun --standalone --nproc-per-node=2 leanrl/ppo_atari_multigpu.py --env-id Breakout-v5 --compile

Each rank (process) has its own envs and, if there are GPUs, its own GPU; gradients are averaged over ranks, so all
ranks hold equal parameters. See docs/multigpu.md for several nodes, and docs/performance.md for perf[n].
Shapes: T = num_steps, N = local_num_envs, B = T * N of a rank; a rollout is (T, N, ...), the batch made of it (B, ...).
Departures from CleanRL: those of ppo_atari_envpool.py; a minibatch is normalised and averaged over all ranks at once.
"""

import atexit
import difflib
import gc
import json
import math
import os
import re
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WARMUP_REPORTS = 3  # not in the reported rate: compilation, capture, cold caches


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # of everything random; different seeds share no env stream
    torch_deterministic: bool = True  # let cuDNN choose only deterministic kernels
    cuda: bool = True  # a GPU for each rank, if there are any
    backend: Literal["nccl", "gloo"] | None = None  # how ranks communicate; default: nccl on GPUs, gloo without
    timeout: int = 300  # seconds to wait for another rank before giving up

    env_id: str = "Breakout-v5"  # any Atari id of EnvPool
    total_timesteps: int = 10_000_000  # env steps (of 4 frames), summed over envs
    learning_rate: float = 2.5e-4  # of Adam
    local_num_envs: int = 8  # of each rank, stepped at once by EnvPool's threads
    num_steps: int = 128  # steps of each env in a rollout
    anneal_lr: bool = True  # linearly towards zero
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # of generalised advantage estimation
    num_minibatches: int = 4  # per epoch; divides local_num_envs * num_steps
    update_epochs: int = 4  # passes over a rollout
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.1  # of the policy ratio, and of the value's change with --clip-vloss
    clip_vloss: bool = True  # clip the value's change
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient is scaled down to this norm
    target_kl: float | None = None  # judged after each epoch, on its last minibatch: above it, the others are skipped

    compile: bool = False  # compile the network and the loss
    ddp: bool = True  # reduce gradients while they are computed; --no-ddp: afterwards, in one bucket
    cudagraphs: bool = False  # capture the policy, the gradients and the optimizer's step as CUDA graphs; as --no-ddp

    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "leanrl"  # with --track
    wandb_entity: str | None = None  # with --track


def fail(message: str):
    """Ends the program with one sentence on stderr and exit code 2."""
    print("error:", *message.split(), file=sys.stderr)  # on one line, whatever it quotes
    sys.exit(2)


def make_envs(env_id: str, seeds: list[int]):
    """EnvPool's envs of a game, one a seed; a lost life ends an episode, rewards are clipped to -1, 0, 1."""
    try:
        import envpool  # only here: its absence gets a sentence
    except ImportError:
        fail("EnvPool is missing; pip install envpool==1.2.5")
    try:
        return envpool.make(
            env_id, env_type="gymnasium", num_envs=len(seeds), env_seed=seeds, episodic_life=True, reward_clip=True
        )
    except (AssertionError, TypeError):
        games = [name for name, spec in envpool.registration.registry.specs.items() if spec[0] == "envpool.atari"]
        fail(f"{env_id!r} is no Atari game; try {', '.join(difflib.get_close_matches(env_id, games, cutoff=0))}.")


def games_that_end(info: dict, truncated: np.ndarray, scores: np.ndarray) -> list[dict]:
    """Adds a step's unclipped rewards to the running scores (N,); the "r"eturn and "l"ength of games that end."""
    scores += info["reward"]
    over = np.flatnonzero(info["terminated"] | truncated)  # terminated says that the last life is lost
    games = [{"r": scores[i], "l": info["elapsed_step"][i]} for i in over]
    scores[over] = 0
    return games


def orthogonal(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """The layer, with orthogonal weights of this gain (Saxe et al. 2014) and without biases at first."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class AtariAgent(nn.Module):
    """A policy and a value function on the convolutions of Mnih et al. 2015, from the last four frames."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.trunk = nn.Sequential(
            *(orthogonal(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU()),
            *(orthogonal(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()),
            *(orthogonal(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(), nn.Flatten()),
            *(orthogonal(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
        )
        self.actor = orthogonal(nn.Linear(512, num_actions), gain=0.01)  # at first all actions are about as likely
        self.critic = orthogonal(nn.Linear(512, 1), gain=1.0)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:  # uint8 (B, 4, 84, 84) -> logits (B, A), value (B,)
        hidden = self.trunk(frames / 255.0)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def categorical_logprob_entropy(action: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log probability (B,) of actions (B,) under logits (B, A), and the entropy (B,) in nats."""
    logprob = logits.log_softmax(-1)
    return logprob.gather(-1, action[..., None]).squeeze(-1), -(logprob.exp() * logprob).sum(-1)


def gae_scan(reward: Tensor, value: Tensor, terminated: Tensor, done: Tensor, gamma: float, gae_lambda: float):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (T, N) each, but value (T + 1, N).

    value[t + 1] is that of the last observation of an episode that ended at t, since its env resets one step later.
    So a truncated step bootstraps from it and a terminated one does not; both cut the trace.
    """
    delta = reward + gamma * (1 - terminated) * value[1:] - value[:-1]
    decay = gamma * gae_lambda * (1 - done)
    span = 1  # perf[8] delta[t] sums the discounted steps t .. t + span - 1, decay[t] discounts what follows them
    while span < len(delta):
        delta[:-span] = delta[:-span] + decay[:-span] * delta[span:]
        decay[:-span] = decay[:-span] * decay[span:]
        span *= 2
    return delta


def ppo_loss(logprob: Tensor, entropy: Tensor, value: Tensor, batch: dict[str, Tensor], args: Args):
    """The clipped objective (eq. 7 and 9 of the paper) as a loss (), and what to log; means are over valid rows.

    logprob, value (B,) are of the current parameters, batch["logprob"], batch["value"] of those that acted.
    """
    count = batch["valid"].sum().clamp(min=2)
    weight, advantage = batch["valid"] / count, batch["advantage"]
    if args.norm_adv:
        advantage = advantage - (weight * advantage).sum()
        advantage = advantage / ((batch["valid"] * advantage**2).sum().div(count - 1).sqrt() + 1e-8)
    log_ratio = logprob - batch["logprob"]
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = (weight * torch.maximum(-advantage * ratio, -advantage * clipped_ratio)).sum()
    value_error = (value - batch["return"]) ** 2
    if args.clip_vloss:
        clipped_value = batch["value"] + (value - batch["value"]).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.maximum(value_error, (clipped_value - batch["return"]) ** 2)
    value_loss = 0.5 * (weight * value_error).sum()

    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    losses["old_approx_kl"] = -(weight * log_ratio).sum()
    losses["approx_kl"] = (weight * (ratio - 1 - log_ratio)).sum()  # http://joschu.net/blog/kl-approx.html
    losses["clipfrac"] = (weight * ((ratio - 1).abs() > args.clip_coef)).sum()
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, losses


def start_rank(args: Args, rank: int) -> tuple[torch.device, Path, SummaryWriter | SimpleNamespace]:
    """Joins the ranks, as torchrun's environment says; rank 0 alone makes the run folder and logs."""
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() if args.cuda else 0  # on this node
    if local_rank >= gpus and (gpus or args.backend == "nccl"):
        fail(f"local rank {local_rank} needs a GPU; there are {gpus}: start fewer, or say --no-cuda --backend=gloo.")
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    writer = SimpleNamespace(**dict.fromkeys(("add_scalar", "add_text", "close"), lambda *_: None))
    run_dir = Path("runs", re.sub("[/:]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"))
    try:
        if gpus:
            torch.cuda.set_device(device)
        if rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            if args.track:
                import wandb  # only here: nobody else needs it

                names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
                wandb.init(**names, config=asdict(args), sync_tensorboard=True)
            writer = SummaryWriter(run_dir, flush_secs=10)  # a rank that loses the others ends at once
    except Exception as error:
        fail(f"cannot use {device}, the folder {run_dir} or wandb: {str(error).splitlines()[0]}")
    dist.init_process_group(args.backend or ("nccl" if gpus else "gloo"), timeout=timedelta(seconds=args.timeout))
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)  # also after sys.exit
    torch.set_flush_denormal(True)  # the moments of idle weights decay into denormal numbers, which slow a CPU down
    torch.backends.cudnn.deterministic = args.torch_deterministic
    return device, run_dir, writer


def check_equal(parameters: list[Tensor], rank: int):
    """Ends the program, on every rank, if the parameters of a rank differ from those of most."""
    checksum = torch.stack([p.double().sum() for p in parameters] + [p.double().norm() for p in parameters])
    bits = checksum.view(torch.long).tolist()  # since NaN is not equal to NaN
    dist.all_gather_object(checksums := [None] * dist.get_world_size(), bits)
    most = max(checksums, key=checksums.count)
    if other := ", ".join(str(r) for r, theirs in enumerate(checksums) if theirs != most):
        sys.exit(f"error: rank {rank} sees that the parameters of rank {other} differ from those of the others.")


def advantage_moments(batch: dict[str, Tensor], minibatches: Tensor) -> Tensor:
    """Of the valid rows of each minibatch (M, b) over all ranks: count, mean and deviation of the advantage (M, 3)."""
    valid, advantage = batch["valid"][minibatches].double(), batch["advantage"][minibatches].double()
    sums = torch.stack([valid.sum(-1), (valid * advantage).sum(-1), (valid * advantage**2).sum(-1)], -1)
    dist.all_reduce(sums)
    count, mean = sums[:, 0].clamp(min=2), sums[:, 1] / sums[:, 0].clamp(min=2)
    variance = (sums[:, 2] - count * mean**2).clamp(min=0) / (count - 1)
    return torch.stack([count, mean, variance.sqrt()], -1).float()


def report(losses: dict, last_returns: deque, marks: list, global_step: int, writer, progress) -> dict[str, float]:
    """Writes and returns the losses, read in one sync, and speed from marks, the (seconds, steps) of all reports."""
    metrics = dict(zip(losses, torch.stack(list(losses.values())).tolist()))
    for name, loss in metrics.items():
        writer.add_scalar(f"losses/{name}", loss, global_step)
        if not math.isfinite(loss):
            progress.close(), writer.close()
            sys.exit(f"error: losses/{name} is {loss} at step {global_step}; a smaller learning rate may help.")
    marks.append((time.perf_counter(), global_step))
    (start, first), (warm, warm_step), (before, last) = marks[0], marks[min(WARMUP_REPORTS, len(marks) - 2)], marks[-2]
    writer.add_scalar("charts/SPS", (global_step - last) / (marks[-1][0] - before), global_step)
    metrics["SPS"] = (global_step - warm_step) / (marks[-1][0] - warm)
    metrics["startup_seconds"] = warm - start - (warm_step - first) / metrics["SPS"]  # the warm-up beyond that rate
    metrics["episodic_return"] = float(np.mean(last_returns)) if last_returns else None
    progress.set_postfix(episodic_return=metrics["episodic_return"], refresh=False)
    progress.update(global_step - progress.n)
    return metrics | {"global_step": global_step}


def train(args: Args) -> dict[str, float]:
    """Trains an agent and returns the final metrics, which summary.json in the run folder holds too."""
    for name, value in vars(args).items():
        least = int(type(value) is int and name != "seed")
        if type(value) in (int, float) and not value >= least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        fail(f"start it with torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # among all processes of all nodes
    T, N, batch_size = args.num_steps, args.local_num_envs, args.num_steps * args.local_num_envs
    minibatch_size, iteration_size = batch_size // args.num_minibatches, batch_size * world_size
    num_iterations = args.total_timesteps // iteration_size
    if num_iterations < 1 or batch_size != max(minibatch_size, 2) * args.num_minibatches:
        fail(f"--total-timesteps must be at least {iteration_size}, --num-minibatches a divisor below {batch_size}.")
    envs = make_envs(args.env_id, [(10_000 * args.seed + N * rank + i) % 2**31 for i in range(N)])  # of this rank
    device, run_dir, writer = start_rank(args, rank)
    num_actions, done, scores = int(envs.action_space.n), np.zeros(N, bool), np.zeros(N)
    obs, _ = envs.reset()
    torch.manual_seed(args.seed)
    agent = AtariAgent(num_actions).to(device, memory_format=torch.channels_last)
    torch.manual_seed(10_000 * args.seed + rank)  # but every rank draws noise and minibatches of its own
    capture = args.cudagraphs and device.type == "cuda"
    if args.cudagraphs and not capture and rank == 0:
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
    loss_of, agent.forward = (torch.compile(f, dynamic=False) if args.compile else f for f in (ppo_loss, agent.forward))
    model = DistributedDataParallel(agent, gradient_as_bucket_view=True)  # sends the parameters of rank 0 to all
    lr, parameters = torch.tensor(args.learning_rate, device=device), list(agent.parameters())
    if one_bucket := capture or not args.ddp:  # a graph cannot reduce: one bucket, the gradients are its views
        model, bucket = agent, torch.zeros(sum(p.numel() for p in parameters), device=device)
        for p, part in zip(parameters, bucket.split([p.numel() for p in parameters])):
            p.grad = part.as_strided(p.shape, p.stride())
    optimizer = torch.optim.Adam(parameters, lr=lr, eps=1e-5, fused=True, capturable=capture)
    obs_buffer = torch.zeros(T, *obs.shape, dtype=torch.uint8, device=device)
    action_buffer = torch.zeros(T, N, dtype=torch.long, device=device)
    logprob_buffer, value_buffer = torch.zeros(2, T, N, device=device)
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full
    batch, local_args = {}, replace(args, norm_adv=False)  # normalised over all ranks, before the loss

    @torch.no_grad()
    def policy(frames: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, value = agent(frames)
        action = (logits + noise).argmax(-1)
        logprob, _ = categorical_logprob_entropy(action, logits)
        return action, logprob, value

    def gradient(idx: Tensor, moments: Tensor) -> dict[str, Tensor]:
        """Adds the gradient of this rank's share of the loss over the minibatches of all ranks."""
        minibatch, (count, mean, deviation) = {name: x[idx] for name, x in batch.items()}, moments
        if args.norm_adv:
            minibatch["advantage"] = (minibatch["advantage"] - mean) / (deviation + 1e-8)
        logits, value = model(minibatch["obs"])
        logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
        local_count = minibatch["valid"].sum().clamp(min=2)
        entropy = (minibatch["valid"] * entropy).sum() / local_count
        loss, losses = loss_of(logprob, entropy, value, minibatch, local_args)
        (loss * world_size * local_count / count).backward()  # the average over ranks is then the mean over all rows
        return {name: loss.detach() for name, loss in losses.items()}

    def step():
        nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        optimizer.step()

    if capture:
        gc.collect()  # else DDP, which is not used then, may live on, and its hooks would break the capture
        policy, gradient, step = (CudaGraphModule(f, warmup=3) for f in (policy, gradient, step))

    def update(idx: Tensor, moments: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=False)
        losses = gradient(idx, moments)  # DDP averages while it goes back
        if one_bucket:
            dist.all_reduce(bucket.div_(world_size))
        step()
        return losses

    ran = {"device": str(device), "backend": dist.get_backend(), "ddp": not one_bucket, "world_size": world_size}
    ran |= {"compile": args.compile, "cudagraphs": capture, "num_envs": N * world_size, "batch_size": iteration_size}
    ran |= {"minibatch_size": minibatch_size * world_size, "num_iterations": num_iterations}
    writer.add_text("ran", json.dumps(ran))  # also what follows from --local-num-envs and the number of ranks
    progress = tqdm(total=num_iterations * iteration_size, unit="step", desc=args.exp_name, disable=rank > 0)
    last_returns, marks, global_step = deque(maxlen=100), [(time.perf_counter(), 0)], 0
    for iteration in range(num_iterations):
        noise = -torch.empty(T, N, num_actions, device=device).exponential_().log()  # Gumbel: its argmax is a sample
        games = []
        for t in range(T):
            # act
            obs_buffer[t] = torch.as_tensor(obs)
            action_buffer[t], logprob_buffer[t], value_buffer[t] = policy(obs_buffer[t], noise[t])
            env_action = action_buffer[t].cpu().numpy()

            # step and store
            valid, global_step = ~done, global_step + N * world_size
            obs, reward, terminated, truncated, info = envs.step(env_action)
            games += [(global_step, game["r"], game["l"]) for game in games_that_end(info, truncated, scores)]
            done = terminated | truncated
            env_buffer[:, t] = reward, terminated, done, valid

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer, device=device)
        _, _, last_value = policy(torch.as_tensor(obs, device=device), noise[0])  # of the rows after the rollout
        value = torch.cat([value_buffer, last_value[None]])
        advantage = gae_scan(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"obs": obs_buffer, "action": action_buffer, "logprob": logprob_buffer, "value": value_buffer}
        rollout |= {"advantage": advantage, "return": advantage + value_buffer, "valid": valid_buffer}
        for name, x in rollout.items():  # a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, x.flatten(0, 1)).copy_(x.flatten(0, 1))
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        lr.fill_(learning_rate)
        for _ in range(args.update_epochs):
            minibatches = torch.randperm(batch_size, device=device).view(args.num_minibatches, minibatch_size)
            for idx, moments in zip(minibatches, advantage_moments(batch, minibatches)):
                losses = update(idx, moments)
            if args.target_kl is not None:  # decided by all ranks: one that left alone would keep the others waiting
                dist.all_reduce(losses["approx_kl"].div_(world_size))
                if losses["approx_kl"] > args.target_kl:
                    break

        # report
        value, return_ = (batch[name][batch["valid"] > 0] for name in ("value", "return"))
        losses["explained_variance"] = 1 - (return_ - value).var(correction=0) / return_.var(correction=0).clamp(1e-8)
        reduced = torch.stack(list(losses.values()))
        dist.all_reduce(reduced)
        losses = dict(zip(losses, reduced / world_size))  # equal on all ranks, and so is what report() decides
        dist.all_gather_object(of_ranks := [None] * world_size, games)
        for step_of_game, score, length in sorted(game for games in of_ranks for game in games):
            writer.add_scalar("charts/episodic_return", score, step_of_game)
            writer.add_scalar("charts/episodic_length", length, step_of_game)
            last_returns.append(score)
        metrics = report(losses, last_returns, marks, global_step, writer, progress)
        check_equal(parameters, rank)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)

    summary = {"ran": ran, "metrics": metrics, "args": asdict(args)}
    if rank == 0:
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    [resource.close() for resource in (progress, writer, envs)]
    model = policy = gradient = step = None  # graphs and DDP end before the group, or Gloo's threads would live on
    dist.destroy_process_group()
    return metrics


if __name__ == "__main__":
    try:
        train(tyro.cli(Args))
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            print(f"\nerror: rank {os.environ['RANK']} lost the others:", *str(error).split(), file=sys.stderr)
        else:
            sys.excepthook(*sys.exc_info())
        os._exit(1)  # at once: an orderly end would wait for threads that wait for the others
