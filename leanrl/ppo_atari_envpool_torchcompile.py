# /// script
# dependencies = ["torch==2.13.0", "tensordict==0.15.3", "envpool==1.2.5", "numpy==2.4.6", "tyro==1.0.17",
#                 "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO on Atari games through EnvPool (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), compiled and captured.

    python leanrl/ppo_atari_envpool_torchcompile.py --env-id Breakout-v5 --seed 1 --compile --cudagraphs

Twin: ppo_atari_envpool.py, in plain PyTorch; `diff -u` the two. Each perf[n] is explained in docs/performance.md.
Shapes: T = num_steps, N = num_envs, B = T * N; a rollout is (T, N, ...), the batch made of it (B, ...).
Departures from CleanRL's script of this name:
1. Values are bootstrapped through a truncation; a termination, which a lost life is too, ends the return.
2. The row after an end, in which EnvPool ignores the action, is masked out of losses and statistics.
3. Games that end by their time limit count among the returns, and their score ends there.
"""

import ctypes  # perf[15]
import difflib
import json
import math
import os  # perf[16]
import re
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # perf[16] set before torch is loaded: idle threads wait briefly
import numpy as np
import torch
import tyro
from tensordict.nn import CudaGraphModule  # perf[2]
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value  # perf[1]
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WARMUP_REPORTS = 3  # not in the reported rate: compilation, capture, cold caches


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # of everything random; different seeds share no env stream
    torch_deterministic: bool = True  # let cuDNN choose only deterministic kernels
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a certain device, such as cuda:1; overrides --cuda

    env_id: str = "Breakout-v5"  # any Atari id of EnvPool
    total_timesteps: int = 10_000_000  # env steps (of 4 frames), summed over envs
    learning_rate: float = 2.5e-4  # of Adam
    num_envs: int = 8  # envs stepped at once, by EnvPool's threads
    num_steps: int = 128  # steps of each env in a rollout
    anneal_lr: bool = True  # linearly towards zero
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # of generalised advantage estimation
    num_minibatches: int = 4  # per epoch; divides num_envs * num_steps
    update_epochs: int = 4  # passes over a rollout
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.1  # of the policy ratio, and of the value's change with --clip-vloss
    clip_vloss: bool = True  # clip the value's change
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient is scaled down to this norm
    target_kl: float | None = None  # judged after each epoch, on its last minibatch: above it, the others are skipped

    compile: bool = False  # perf[1] compile the policy and the update
    cudagraphs: bool = False  # perf[2] capture the policy and the epochs of updates as CUDA graphs
    env_groups: int = 1  # perf[10] with 2, EnvPool steps one half while the policy acts for the other
    bf16: bool = False  # perf[11] compute the network in bfloat16

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


# perf[8] scan in log2(T) doublings: 7 steps of whole tensors, where a loop over time takes 128 of single rows
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


def adam_(params, grads, exp_avgs, exp_avg_sqs, step: Tensor, lr: Tensor, eps: float):
    """A step of Adam (Kingma & Ba 2015, end of section 2) in place; perf[3] step and lr are tensors, not constants."""
    step += 1
    power, power_sq = (step * math.log(0.9)).exp(), (step * math.log(0.999)).exp()  # as ** a loop would repeat them
    unbias = (1 - power_sq).sqrt()
    rate, eps = lr * unbias / (1 - power), eps * unbias
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs):
        exp_avg.lerp_(grad, 0.1)
        exp_avg_sq.lerp_(grad**2, 0.001)
        param.sub_(rate * exp_avg / (exp_avg_sq.sqrt() + eps))


def start_run(args: Args) -> tuple[torch.device, Path, SummaryWriter]:
    """Seeds, picks the device, makes the run folder with a TensorBoard writer, which W&B follows under --track."""
    device_name = args.device or ("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    run_dir = Path("runs", re.sub("[/:]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"))
    try:
        device = torch.zeros((), device=device_name).device
        run_dir.mkdir(parents=True, exist_ok=True)
        if args.track:
            import wandb  # only here: nobody else needs it

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
            wandb.init(**names, config=asdict(args), sync_tensorboard=True)
    except Exception as error:
        fail(f"cannot use the device {device_name}, the folder {run_dir} or wandb: {str(error).splitlines()[0]}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_flush_denormal(True)  # the moments of idle weights decay into denormal numbers, which slow a CPU down
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    return device, run_dir, SummaryWriter(run_dir)


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


@torch.compiler.set_stance("default")  # perf[13] guards are back when train ends, also by an error
def train(args: Args) -> dict[str, float]:
    """Trains an agent and returns the final metrics, which summary.json in the run folder holds too."""
    for name, value in vars(args).items():
        least = int(type(value) is int and name != "seed")
        if type(value) in (int, float) and not value >= least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
    T, N, batch_size = args.num_steps, args.num_envs, args.num_steps * args.num_envs
    minibatch_size, num_iterations = batch_size // args.num_minibatches, args.total_timesteps // batch_size
    if num_iterations < 1 or batch_size != max(minibatch_size, 2) * args.num_minibatches:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout, and --num-minibatches a divisor below it.")
    G, size = args.env_groups, N // args.env_groups  # perf[10] EnvPool steps one, the policy serves another
    if N % G:
        fail(f"--env-groups must divide --num-envs, {N}.")
    groups = [slice(g * size, (g + 1) * size) for g in range(G)]
    seeds = [(10_000 * args.seed + i) % 2**31 for i in range(N)]
    pools = [make_envs(args.env_id, seeds[rows]) for rows in groups]
    device, run_dir, writer = start_run(args)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # perf[15] let glibc keep freed memory, not fault it in anew
        libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)  # M_MMAP_MAX, M_TRIM_THRESHOLD
    num_actions, done, scores = int(pools[0].action_space.n), np.zeros(N, bool), np.zeros(N)
    # perf[7] cross the bus through pinned buffers, so that the copies are asynchronous
    on_gpu = device.type == "cuda"
    obs = torch.from_numpy(np.concatenate([pool.reset()[0] for pool in pools]))
    env_action = torch.zeros(N, dtype=torch.long, pin_memory=on_gpu)
    obs = obs.pin_memory() if on_gpu else obs
    # perf[1] nothing is recorded for backward(), so no no_grad() is needed
    agent = AtariAgent(num_actions).requires_grad_(False)
    if device.type == "cpu" and not args.bf16:  # perf[18] the layer of 512 as a convolution over all 7 x 7 positions
        agent.trunk[6], wide = nn.Identity(), agent.trunk[7]
        wide.weight = nn.Parameter(wide.weight.unflatten(1, (64, 7, 7)), requires_grad=False)
        wide.forward = lambda x: nn.functional.conv2d(x, wide.weight, wide.bias).flatten(1)
    agent.to(device, memory_format=torch.channels_last)  # perf[11] channels of a pixel lie together
    params = dict(agent.named_parameters())
    adam_state = (*([torch.zeros_like(p) for p in params.values()] for _ in range(2)), torch.full((), 0, device=device))
    lr = torch.zeros((), device=device)  # perf[3] a constant would be compiled and captured with its first value
    # perf[11] the bytes of a pixel lie together in memory, as the convolutions read them
    obs_buffer = torch.empty(T * N, *obs.shape[1:], dtype=torch.uint8, device=device, memory_format=torch.channels_last)
    obs_buffer = obs_buffer.unflatten(0, (T, N))
    action_buffer = torch.zeros(T, N, dtype=torch.long, device=device)
    logprob_buffer, value_buffer = torch.zeros(2, T, N, device=device)
    batch = {}
    acting = {name: p.bfloat16() if args.bf16 else p for name, p in params.items()}  # perf[19]
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full

    def evaluate(params: dict, frames: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):  # perf[11]
            logits, value = functional_call(agent, params, frames)
        return logits.to(lr.dtype), value.to(lr.dtype)

    def policy(frames: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, value = evaluate(acting, frames)  # perf[19]
        action = (logits + noise).argmax(-1)
        logprob, _ = categorical_logprob_entropy(action, logits)
        return action, logprob, value

    def update(idx: Tensor) -> dict[str, Tensor]:
        """A step of Adam on the rows idx of the batch."""
        minibatch = {name: x[idx] for name, x in batch.items()}

        def loss_of(params: dict):
            logits, value = evaluate(params, minibatch["obs"])
            logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
            entropy = (minibatch["valid"] * entropy).sum() / minibatch["valid"].sum().clamp(min=1)
            return ppo_loss(logprob, entropy, value, minibatch, args)

        grads, (_, losses) = grad_and_value(loss_of, has_aux=True)(params)  # perf[1]
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        adam_(params.values(), [grad * scale for grad in grads.values()], *adam_state, lr, eps=1e-5)
        return losses

    if args.compile:  # perf[1]
        options = {"cpp_wrapper": device.type == "cpu"}  # perf[17] no Python between the kernels
        policy, update = (torch.compile(f, fullgraph=True, options=options) for f in (policy, update))

    def update_epoch(permutation: Tensor) -> dict[str, Tensor]:
        for idx in permutation.split(minibatch_size):
            losses = update(idx)
        return losses

    if args.cudagraphs and on_gpu:  # perf[2] capture the launches of an epoch, and of a policy step, and replay them
        policy, update_epoch = CudaGraphModule(policy, warmup=3), CudaGraphModule(update_epoch, warmup=3)
    elif args.cudagraphs:
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)

    progress = tqdm(total=num_iterations * batch_size, unit="step", desc=args.exp_name, dynamic_ncols=True)
    last_returns, marks, global_step = deque(maxlen=100), [(time.perf_counter(), 0)], 0
    for iteration in range(num_iterations):
        for name, p in params.items():  # perf[19] convert the weights once a rollout, not in each policy step
            acting[name].copy_(p)
        noise = -torch.empty(T, N, num_actions, device=device).exponential_().log()  # Gumbel: its argmax is a sample
        for k in range(T * G + G - 1):  # perf[10] act for one group, then receive what the other has done meanwhile
            # act; perf[7] copies that do not wait, then one sync
            if k < T * G:
                t, rows = k // G, groups[k % G]
                obs_buffer[t, rows].copy_(obs[rows], non_blocking=True)
                decision = policy(obs_buffer[t, rows], noise[t, rows])
                action_buffer[t, rows], logprob_buffer[t, rows], value_buffer[t, rows] = decision
                env_action[rows].copy_(action_buffer[t, rows], non_blocking=True)
                if on_gpu:
                    torch.cuda.current_stream().synchronize()
                pools[k % G].send(env_action[rows].numpy())
            if k + 1 < G:
                continue

            # step and store; perf[10] the other group
            t, rows = (k + 1) // G - 1, groups[(k + 1) % G]
            valid, global_step = ~done[rows], global_step + size
            obs.numpy()[rows], reward, terminated, truncated, info = pools[(k + 1) % G].recv()
            for game in games_that_end(info, truncated, scores[rows]):
                writer.add_scalar("charts/episodic_return", game["r"], global_step)
                writer.add_scalar("charts/episodic_length", game["l"], global_step)
                last_returns.append(game["r"])
            done[rows] = terminated | truncated
            env_buffer[:, t, rows] = reward, terminated, done[rows], valid

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer, device=device)
        last_obs = obs.to(device, non_blocking=True, memory_format=torch.channels_last)  # perf[11]
        last_value = torch.cat([policy(last_obs[rows], noise[0, rows])[2] for rows in groups])  # perf[10]
        value = torch.cat([value_buffer, last_value[None]])
        advantage = gae_scan(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"obs": obs_buffer, "action": action_buffer, "logprob": logprob_buffer, "value": value_buffer}
        rollout |= {"advantage": advantage, "return": advantage + value_buffer, "valid": valid_buffer}
        for name, x in rollout.items():  # perf[2] a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, x.flatten(0, 1)).copy_(x.flatten(0, 1))
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        lr.fill_(learning_rate)  # perf[3]
        for _ in range(args.update_epochs):
            losses = update_epoch(torch.randperm(batch_size, device=device))  # perf[2]
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break

        # report
        value, return_ = (batch[name][batch["valid"] > 0] for name in ("value", "return"))
        losses["explained_variance"] = 1 - (return_ - value).var(correction=0) / return_.var(correction=0).clamp(1e-8)
        metrics = report(losses, last_returns, marks, global_step, writer, progress)
        if args.compile:  # perf[13] all is compiled and no shape changes: skip the guards
            torch.compiler.set_stance(skip_guard_eval_unsafe=True)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)

    ran = {"device": str(device), "compile": args.compile, "cudagraphs": args.cudagraphs and on_gpu}  # perf[1]
    (run_dir / "summary.json").write_text(json.dumps({"ran": ran, "metrics": metrics, "args": asdict(args)}, indent=2))
    [resource.close() for resource in (progress, writer, *pools)]
    return metrics


if __name__ == "__main__":
    train(tyro.cli(Args))
