# /// script
# dependencies = ["torch==2.13.0", "tensordict==0.15.3", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1",
#                 "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""SAC with a learned temperature (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905), compiled and captured.

    python leanrl/sac_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --seed 1 --compile --cudagraphs

Twin: sac_continuous_action.py, in plain PyTorch; `diff -u` the two. Each perf[n] is explained in docs/performance.md.
Shapes: N = num_envs, B = batch_size, O and A the sizes of an observation and an action.
Departures from CleanRL's script of this name:
1. The order is act, learn, step, store: the newest transition can be drawn one step later.
2. An observation is stored once, and the step in which an env resets itself weighs nothing in a loss.
3. With several envs there are as many updates as env steps.
4. The temperature learns from the log-probabilities in the actor's loss, without drawing actions anew.
"""

import copy
import difflib
import json
import math
import os
import re
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensordict.nn import CudaGraphModule  # perf[2]
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap  # perf[1] perf[5]
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

REPORT_INTERVAL = 500  # env steps
WARMUP_REPORTS = 3  # not in the reported rate: compilation, capture, cold caches


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # of everything random; different seeds share no env stream
    torch_deterministic: bool = True  # let cuDNN choose only deterministic kernels
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a certain device, such as cuda:1; overrides --cuda

    env_id: str = "HalfCheetah-v4"  # any Gymnasium id with a bounded Box action space, also my_package:MyEnv-v0
    total_timesteps: int = 1_000_000  # env steps, summed over envs
    policy_lr: float = 3e-4  # of Adam, for the actor
    q_lr: float = 1e-3  # of Adam, for the critics and the temperature
    num_envs: int = 1  # envs stepped in turn
    buffer_size: int = 1_000_000  # transitions that the replay ring holds
    gamma: float = 0.99  # discount
    tau: float = 0.005  # share of the new parameters in a step of the targets
    batch_size: int = 256  # transitions in an update
    learning_starts: int = 5_000  # env steps of random actions before the first update
    policy_frequency: int = 2  # every so many updates of the critics, as many of the actor follow
    target_network_frequency: int = 1  # updates of the critics for each of the targets
    alpha: float = 0.2  # weight of the entropy (temperature), with --no-autotune
    autotune: bool = True  # learn the temperature

    compile: bool = False  # perf[1] compile the policy and the updates
    cudagraphs: bool = False  # perf[2] capture the policy and the update as CUDA graphs

    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "leanrl"  # with --track
    wandb_entity: str | None = None  # with --track


def fail(message: str):
    """Ends the program with one sentence on stderr and exit code 2."""
    print("error:", *message.split(), file=sys.stderr)  # on one line, whatever it quotes
    sys.exit(2)


def make_env(env_id: str, actions: type[gym.Space]) -> gym.Env:
    """An env from vectors to this kind of actions, which counts its returns, or one sentence on why not."""
    try:
        env = gym.make(env_id)
    except (gym.error.Error, ImportError, ValueError) as error:
        near = difflib.get_close_matches(env_id, gym.registry.keys() - {env_id})
        fail(f"cannot make the env {env_id!r}: {error} Near matches: {', '.join(near) or 'none'}.")
    flat = env if len(env.observation_space.shape or ()) == 1 else gym.wrappers.FlattenObservation(env)
    image = len(env.observation_space.shape or ()) + (env.observation_space.dtype == np.uint8) > 2
    if image or not flat.observation_space.shape or not isinstance(env.action_space, actions):  # sequence: no shape
        fail(f"{env_id} maps {env.observation_space} to {env.action_space}; needed: vectors to a {actions.__name__}.")
    return gym.wrappers.RecordEpisodeStatistics(flat)


def step_envs(envs: list[gym.Env], action, obs, reward, terminated, truncated) -> list[dict]:
    """Steps every env, fills the last four arrays (N, ...), returns the "r"eturn and "l"ength of episodes that end.

    An env whose episode has ended resets instead; that step ignores the action and pays 0 (autoreset mode NEXT_STEP).
    """
    episodes = []
    for i, env in enumerate(envs):
        if terminated[i] or truncated[i]:
            obs[i], reward[i], terminated[i], truncated[i] = env.reset()[0], 0, False, False
        else:
            obs[i], reward[i], terminated[i], truncated[i], info = env.step(action[i])
            episodes += [info["episode"]] if "episode" in info else []
    return episodes


class GaussianActor(nn.Module):
    """A Gaussian policy, squashed by tanh into the bounds of each dimension of the action."""

    def __init__(self, obs_dim: int, low: Tensor, high: Tensor):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2 * len(low))
        )
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:  # (.., O) -> (.., A) and its log density (..)
        """Draws actions u ~ N(mean, std), a = tanh(u), with log p(a) = log p(u) - log(1 - tanh(u)^2) (appendix C)."""
        mean, logstd = self.layers(obs).chunk(2, -1)
        logstd, noise = -1.5 + 3.5 * logstd.tanh(), torch.randn_like(mean)  # a logstd within -5 .. 2
        u = mean + logstd.exp() * noise
        logprob = -0.5 * noise**2 - logstd - 0.5 * math.log(2 * math.pi) - self.scale.log()
        logprob = logprob - 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))  # = log(1 - tanh(u)^2), stable
        return u.tanh() * self.scale + self.center, logprob.sum(-1)


class Critic(nn.Module):
    """The value of an action in a state."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim + action_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:  # (B, O), (B, A) -> (B,)
        return self.layers(torch.cat([obs, action], -1)).squeeze(-1)


def replay_ring(buffer_size: int, num_envs: int, row_size: int, device: torch.device) -> Tensor:
    """Zeros (C, N, row_size) for `buffer_size` transitions, or one sentence on the memory that it takes.

    Row t % C holds, for each env, the observation at time t, and the action, reward, terminated and valid of the step
    that led to it. So a transition is two neighbouring rows, and no observation is stored twice.
    """
    rows = max(buffer_size // num_envs, 1) + 1
    needed, available = 4 * rows * num_envs * row_size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    elif (meminfo := Path("/proc/meminfo")).exists():
        available = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text())[1])
    if needed > available:
        fail(f"--buffer-size {buffer_size} needs {needed:,} bytes on {device}, where {available:,} are available.")
    return torch.zeros(rows, num_envs, row_size, device=device)


def sample(ring: Tensor, newest, pairs, batch_size: int, obs_dim: int) -> dict[str, Tensor]:
    """A batch of transitions from the ring, uniform over the last `pairs` pairs of rows up to time `newest`.

    Drawn in float64, since float32 would miss some rows of a large ring. A mean over the rows that count is a sum
    weighted by `weight`, 0 where an env reset itself.
    """
    rows, num_envs, _ = ring.shape
    draw = (torch.rand(batch_size, dtype=torch.float64, device=ring.device) * (pairs * num_envs)).long()
    time, env = newest - draw // num_envs, draw % num_envs
    obs, after = ring[(time - 1) % rows, env, :obs_dim], ring[time % rows, env]
    reward, terminated, valid = after[:, -3:].unbind(-1)
    batch = {"obs": obs, "action": after[:, obs_dim:-3], "next_obs": after[:, :obs_dim]}
    return batch | {"reward": reward, "terminated": terminated, "weight": valid / valid.sum().clamp(min=1)}


def td_target(batch: dict[str, Tensor], next_value: Tensor, gamma: float) -> Tensor:
    """One-step targets (B,): the reward and, unless the episode terminated, the discounted next value."""
    return batch["reward"] + gamma * (1 - batch["terminated"]) * next_value


def td_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean squared error of values (.., B) over the rows that count."""
    return (weight * (q - target) ** 2).sum(-1)


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
        least = int(type(value) is int and name not in ("seed", "learning_starts"))
        if type(value) in (int, float) and not value >= least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
    N, B, total_steps = args.num_envs, args.batch_size, args.total_timesteps // args.num_envs
    if args.total_timesteps < (needed := N * (max(-(-args.learning_starts // N), 1) + 1)):
        fail(f"--total-timesteps must be at least {needed}, or nothing is learned after --learning-starts.")
    envs = [make_env(args.env_id, gym.spaces.Box) for _ in range(N)]
    actions, obs_dim = envs[0].action_space, envs[0].observation_space.shape[0]
    if not ((actions.low < actions.high) & np.isfinite(actions.high - actions.low)).all():
        fail(f"{args.env_id} takes any action in {actions}; needed: finite bounds, the lower below the upper.")
    device, run_dir, writer = start_run(args)
    low, high = (torch.as_tensor(bound.ravel(), device=device).float() for bound in (actions.low, actions.high))
    # A row of the replay ring. Its parts are views: stepping the envs fills it.
    # perf[7] It and the actions cross the bus through pinned buffers of fixed address: asynchronous, capturable copies.
    on_gpu = device.type == "cuda"
    row, truncated = torch.zeros(N, obs_dim + len(low) + 3, pin_memory=on_gpu), np.zeros(N, bool)
    host_action = torch.zeros(N, len(low), pin_memory=on_gpu)
    host_row = row.numpy()
    obs, row_action, (reward, terminated, valid) = host_row[:, :obs_dim], host_row[:, obs_dim:-3], host_row.T[-3:]
    for i, env in enumerate(envs):
        obs[i], _ = env.reset(seed=10_000 * args.seed + i)  # once; later resets continue the env's stream
    ring = replay_ring(args.buffer_size, *row.shape, device)
    newest = torch.full((), -1, device=device)  # perf[4] time of the ring's newest row, counted on the device

    actor = GaussianActor(obs_dim, low, high).to(device)
    critics = nn.ModuleList(Critic(obs_dim, len(low)) for _ in range(2)).to(device)
    # perf[5] stack the critics: one call computes both
    critic, (critics, _) = critics[0], stack_module_state(list(critics))
    critics = {name: p.detach() for name, p in critics.items()}
    actor_params = dict(actor.requires_grad_(False).named_parameters())
    critics_target = copy.deepcopy(critics)
    log_alpha = torch.full((), math.log(1 if args.autotune else args.alpha or 1e-30), device=device)
    actor_adam, critics_adam, alpha_adam = (
        ([torch.zeros_like(p) for p in net], [torch.zeros_like(p) for p in net], torch.full((), 0, device=device))
        for net in (actor_params.values(), critics.values(), [log_alpha])
    )
    policy_lr, q_lr = (torch.full((), lr, device=device) for lr in (args.policy_lr, args.q_lr))  # perf[3]

    def call_critics(params: dict, obs: Tensor, action: Tensor) -> Tensor:  # -> (2, B); perf[5]
        return vmap(lambda params: functional_call(critic, params, (obs, action)))(params)

    def learn_critics() -> tuple[dict, dict]:
        """A step of both critics towards the lesser target value plus entropy (eq. 5), and of the targets when due."""
        batch = sample(ring, newest, newest.clamp(max=len(ring) - 1), B, obs_dim)
        next_action, next_logprob = actor(batch["next_obs"])
        next_q = call_critics(critics_target, batch["next_obs"], next_action)
        target = td_target(batch, next_q.amin(0) - log_alpha.exp() * next_logprob, args.gamma)

        def loss_of(critics: dict):
            q = call_critics(critics, batch["obs"], batch["action"])
            loss = td_loss(q, target, batch["weight"])
            return loss.sum(), (q, loss)

        grads, (_, (q, loss)) = grad_and_value(loss_of, has_aux=True)(critics)  # perf[1]
        adam_(critics.values(), grads.values(), *critics_adam, q_lr, eps=1e-8)
        due = critics_adam[-1] % args.target_network_frequency == 0  # perf[3] counted on the device
        for name, param in critics.items():
            critics_target[name].lerp_(param, args.tau * due)
        names = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss")
        return dict(zip(names, (*(batch["weight"] * q).sum(-1), *loss, loss.mean()))), batch

    def learn_actor(batch: dict) -> dict[str, Tensor]:
        """A step of the actor up the value and entropy of its actions (eq. 7), and one of the temperature (eq. 18)."""

        def loss_of(actor_params: dict):
            action, logprob = functional_call(actor, actor_params, batch["obs"])
            q = call_critics(critics, batch["obs"], action)
            return (batch["weight"] * (log_alpha.exp() * logprob - q.amin(0))).sum(), logprob

        grads, (loss, logprob) = grad_and_value(loss_of, has_aux=True)(actor_params)  # perf[1]
        adam_(actor_params.values(), grads.values(), *actor_adam, policy_lr, eps=1e-8)
        losses = {"actor_loss": loss, "alpha": log_alpha.exp()}
        if args.autotune:
            # perf[1] this loss is its own gradient, as d exp(x) = exp(x)
            alpha_loss = -log_alpha.exp() * (batch["weight"] * (logprob - len(low))).sum()
            adam_([log_alpha], [alpha_loss], *alpha_adam, q_lr, eps=1e-8)
            losses["alpha_loss"] = alpha_loss
        return losses

    # perf[1] two graphs, for an update without and with the actor
    def update() -> dict[str, Tensor]:
        return learn_critics()[0]

    def update_with_actor() -> dict[str, Tensor]:
        losses, batch = learn_critics()
        for _ in range(args.policy_frequency):
            losses |= learn_actor(batch)
        return losses

    def store(row: Tensor):
        """Inserts a row that is on the device at the next place of the ring; perf[4] the index is a tensor."""
        newest.add_(1)
        ring.index_copy_(0, newest[None] % len(ring), row[None])

    def policy(row: Tensor) -> Tensor:
        store(row)
        action, _ = actor(row[:, :obs_dim])
        return action.clamp(low, high)

    def act():  # captured, but not compiled: the copies between host and device stay as they are written
        host_action.copy_(policy(row.to(device, non_blocking=True)), non_blocking=True)

    def explore():
        store(row.to(device, non_blocking=True))
        action = low + (high - low) * torch.rand(N, len(low), device=device)
        host_action.copy_(action.clamp(low, high), non_blocking=True)

    if args.compile:  # perf[1]
        options = {"fallback_random": True, "cpp_wrapper": device.type == "cpu"}  # perf[17] C++ glue, torch's generator
        compiled = (torch.compile(f, fullgraph=True, options=options) for f in (policy, update, update_with_actor))
        policy, update, update_with_actor = compiled
    if args.cudagraphs and on_gpu:  # perf[2] record the launches once, replay them with one call
        act, update, update_with_actor = (CudaGraphModule(f, warmup=3) for f in (act, update, update_with_actor))
    elif args.cudagraphs:
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)

    progress = tqdm(total=total_steps * N, unit="step", desc=args.exp_name, dynamic_ncols=True)
    acted = torch.cuda.Event() if on_gpu else None  # perf[6]
    last_returns, losses, marks, global_step, updates = deque(maxlen=100), {}, [], 0, 0
    for step in range(total_steps):
        # act
        learning = step > 0 and global_step >= args.learning_starts
        marks = marks or [(time.perf_counter(), global_step)] * learning  # the clock starts with learning
        act() if learning else explore()
        if on_gpu:
            acted.record()

        # learn; perf[6] launch the update before waiting for the action: the GPU learns while the CPU steps the envs
        for _ in range(N * learning):
            updates += 1
            losses |= (update if updates % args.policy_frequency else update_with_actor)()
        if on_gpu:
            acted.synchronize()  # the one sync of a step

        # step and store
        env_action = host_action.numpy().copy()  # perf[7] a copy: an env may keep it
        row_action[:], valid[:] = env_action, 1 - np.maximum(terminated, truncated)
        global_step += N
        for episode in step_envs(envs, env_action.reshape(N, *actions.shape), obs, reward, terminated, truncated):
            writer.add_scalar("charts/episodic_return", episode["r"], global_step)
            writer.add_scalar("charts/episodic_length", episode["l"], global_step)
            last_returns.append(episode["r"])

        # report
        if losses and (global_step % REPORT_INTERVAL < N or step + 1 == total_steps):
            metrics = report(losses, last_returns, marks, global_step, writer, progress)
            if args.compile and "actor_loss" in losses:  # perf[13] all is compiled, no shape changes: skip the guards
                torch.compiler.set_stance(skip_guard_eval_unsafe=True)

    ran = {"device": str(device), "compile": args.compile, "cudagraphs": args.cudagraphs and on_gpu}
    (run_dir / "summary.json").write_text(json.dumps({"ran": ran, "metrics": metrics, "args": asdict(args)}, indent=2))
    [resource.close() for resource in (progress, writer, *envs)]
    return metrics


if __name__ == "__main__":
    train(tyro.cli(Args))
