# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""Soft actor-critic (SAC) for continuous actions, in plain PyTorch.

    python leanrl/sac_continuous_action.py --env-id HalfCheetah-v4 --seed 1

Paper: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905, whose equations are cited below as "eq.".
Fast twin: sac_continuous_action_torchcompile.py. `diff -u` the two files to see what makes it faster.
Shapes: N = num_envs, B = batch_size, O = size of an observation, A = size of an action.
Differences from CleanRL's sac_continuous_action.py:
1. The loop is act, learn, step, store: a GPU learns while the envs step. A step is drawn a turn later.
2. Each observation is stored once. Where a drawn step only reset an env, another draw replaces it, or it has weight 0.
3. With several envs there is one update per env step, not one per step of all envs.
4. The temperature reuses the log-probabilities of the actor's loss instead of sampling actions again.
5. The networks see actions scaled to -1 .. 1, and log-probabilities are of these.
"""

import atexit
import copy
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

REPORT_INTERVAL = 500  # env steps between two reports


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; env seeds of two runs overlap only by chance
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "HalfCheetah-v4"  # any Gymnasium id with a bounded Box of actions, also my_package:MyEnv-v0
    env_kwargs: str = "{}"  # settings of the env as JSON, e.g. '{"forward_reward_weight": 2}'
    total_timesteps: int = 1_000_000  # env steps, summed over all envs
    policy_lr: float = 3e-4  # learning rate of the actor
    q_lr: float = 1e-3  # learning rate of the critics and of the temperature
    num_envs: int = 1  # number of envs
    async_envs: bool = False  # step envs at the same time, each in a process of its own; for slow simulators
    buffer_size: int = 1_000_000  # capacity of the replay ring, in transitions
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # how far the target networks move towards the trained ones at each update
    batch_size: int = 256  # transitions per update
    learning_starts: int = 5_000  # env steps with random actions before the first update
    policy_frequency: int = 2  # update the actor after every so many critic updates, that many times at once
    target_network_frequency: int = 1  # update the target networks after every so many critic updates
    alpha: float = 0.2  # temperature (weight of the entropy), used with --no-autotune
    autotune: bool = True  # learn the temperature

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


def step_processes(envs, action, obs, reward, terminated, truncated, totals) -> list[tuple[float, float]]:
    """Does what step_envs does, for the vector env of start_processes."""
    over = np.logical_or(terminated, truncated)
    paid = np.zeros(len(over))
    if over.all():  # after a save, which truncates all episodes
        obs[:], _ = envs[0].reset()
        terminated[:] = truncated[:] = False
    else:
        obs[:], paid, terminated[:], truncated[:], _ = envs[0].step(action)  # envs whose episode is over reset
    reward[:] = paid
    totals += np.stack([paid, np.ones(len(over))])
    totals[:, over] = 0
    over = np.logical_or(terminated, truncated)
    return [tuple(x) for x in totals.T[over].tolist()]


def start_anew(seed: int, step: int, envs: list[gym.Env]) -> list[np.ndarray]:
    """Seeds all generators and envs from seed and step alone; returns the observations."""
    first = int(np.random.SeedSequence([seed, step, bool(envs)]).generate_state(1)[0])
    random.seed(first)  # an env may draw from Python's global generator, or NumPy's
    np.random.seed(first)  # noqa: NPY002
    torch.manual_seed(first)
    for i, env in enumerate(envs):
        env.unwrapped.action_space.seed((first + i) % 2**31)
    return [env.reset(seed=(first + i) % 2**31)[0] for i, env in enumerate(envs)]


class EnvOfProcess(gym.Wrapper):
    """An env in a process of its own. Its seed is that of all generators there, and infos stay there."""

    def reset(self, *, seed: int | None = None, **settings):
        if seed is not None:
            start_anew(seed, 0, [])
            self.unwrapped.action_space.seed(seed)
        return self.env.reset(seed=seed, **settings)[0], {}

    def step(self, action):
        return *self.env.step(action)[:4], {}


def start_processes(make, num_envs: int) -> list[gym.vector.VectorEnv]:
    """Calls make() in a process for each env; returns one vector env of them all, in a list."""
    envs = []  # kept to the end of the program
    # a fork inherits our signal handlers, so Ctrl-C stops it only after the save, and SIGTERM does not stop it
    atexit.register(lambda _: [process.kill() for process in multiprocessing.active_children()], envs)
    makers = [lambda: EnvOfProcess(make())] * num_envs
    envs.append(gym.vector.AsyncVectorEnv(makers, context="fork"))
    return envs


class GaussianActor(nn.Module):
    """A Gaussian policy, squashed by tanh into -1 .. 1."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2 * action_dim)
        )

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:  # (.., O) -> (.., A), (..)
        """Samples actions tanh(u), u ~ N(mean, std), and returns them with their log-probabilities (appendix C)."""
        mean, logstd = self.layers(obs).chunk(2, dim=-1)
        logstd = -1.5 + 3.5 * logstd.tanh()  # within -5 .. 2
        noise = torch.randn_like(mean)
        u = mean + logstd.exp() * noise
        logprob = -0.5 * noise**2 - logstd - 0.5 * math.log(2 * math.pi)
        logprob = logprob - 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))  # log(1 - tanh(u)^2), stable
        return u.tanh(), logprob.sum(-1)


class GreedyActor(nn.Module):
    """The policy without noise, as it is exported: its actions are scaled to the env's bounds."""

    def __init__(self, actor: GaussianActor, center: np.ndarray, scale: np.ndarray):
        super().__init__()
        self.layers = actor.layers
        self.register_buffer("center", torch.as_tensor(center.ravel(), dtype=torch.float32))
        self.register_buffer("scale", torch.as_tensor(scale.ravel(), dtype=torch.float32))

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B, A)
        mean, _ = self.layers(obs).chunk(2, dim=-1)
        return self.center + self.scale * mean.tanh()


class Critic(nn.Module):
    """The value of an action in a state."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim + action_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:  # (B, O), (B, A) -> (B,)
        return self.layers(torch.cat([obs, action], -1)).squeeze(-1)


# A ring has C rows. Row t % C holds, of each env, the observation at time t, and the action, reward, terminated and
# valid of the step that led to it: valid is 0 if it only reset the env. A transition is two neighbouring rows.
def split_row(row, obs_dim: int):
    """Views of the parts of replay rows (.., O + A + 3): obs, action, reward, terminated, valid."""
    return row[..., :obs_dim], row[..., obs_dim:-3], row[..., -3], row[..., -2], row[..., -1]


def sample(ring: Tensor, newest: int | Tensor, pairs: int | Tensor, batch_size: int, obs_dim: int) -> dict[str, Tensor]:
    """A batch of transitions, drawn uniformly from the last `pairs` pairs of rows up to time `newest`."""
    rows, num_envs, _ = ring.shape  # float64 below, since float32 would miss rows of a large ring
    # A draw is rows back from the newest, times envs, plus an env. A place of the batch has three: one may be a reset.
    draws = (torch.rand(3, batch_size, dtype=torch.float64, device=ring.device) * (pairs * num_envs)).long()
    is_valid = ring[(newest - draws // num_envs) % rows, draws % num_envs, -1]  # (3, B); 0: a mere reset
    draw = draws.gather(0, is_valid.argmax(0, keepdim=True))[0]  # (B,), the first valid one
    t = newest - draw // num_envs
    i = draw % num_envs
    obs = ring[(t - 1) % rows, i, :obs_dim]
    next_obs, action, reward, terminated, valid = split_row(ring[t % rows, i], obs_dim)
    batch = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "terminated": terminated}
    return batch | {"weight": valid / valid.sum().clamp(min=1)}  # 0 where all three are resets


def td_target(batch: dict[str, Tensor], next_value: Tensor, gamma: float) -> Tensor:
    """One-step targets (B,): the reward and, unless the episode terminated, the discounted next value."""
    return batch["reward"] + gamma * (1 - batch["terminated"]) * next_value


def learn_soft_critics(batch, actor, critics, critics_target, log_alpha, optimizer, updates: int, args: Args) -> dict:
    """Moves both critics towards the soft TD target (eq. 5), and the target networks when due."""
    with torch.no_grad():
        next_action, next_logprob = actor(batch["next_obs"])
        next_q = torch.stack([critic(batch["next_obs"], next_action) for critic in critics_target])
        target = td_target(batch, next_q.amin(0) - log_alpha.exp() * next_logprob, args.gamma)
    q = torch.stack([critic(batch["obs"], batch["action"]) for critic in critics])
    loss = (batch["weight"] * (q - target) ** 2).sum(-1)  # (2,), of each critic
    optimizer.zero_grad()
    loss.sum().backward()
    optimizer.step()
    if updates % args.target_network_frequency == 0:
        with torch.no_grad():
            torch._foreach_lerp_(list(critics_target.parameters()), list(critics.parameters()), args.tau)
    q1, q2 = (batch["weight"] * q.detach()).sum(-1)
    loss1, loss2 = loss.detach()
    return {"qf1_values": q1, "qf2_values": q2, "qf1_loss": loss1, "qf2_loss": loss2, "qf_loss": (loss1 + loss2) / 2}


def learn_soft_actor(batch, actor, critics, log_alpha, optimizer, alpha_optimizer, args: Args) -> dict:
    """Moves the actor up value and entropy (eq. 7), and the temperature so that the entropy nears -A (eq. 18)."""
    action, logprob = actor(batch["obs"])
    q = torch.stack([critic(batch["obs"], action) for critic in critics])
    loss = (batch["weight"] * (log_alpha.detach().exp() * logprob - q.amin(0))).sum()
    optimizer.zero_grad()
    loss.backward(inputs=list(actor.parameters()))  # the critics' weights need no gradients here
    optimizer.step()
    losses = {"actor_loss": loss.detach(), "alpha": log_alpha.detach().exp()}
    if args.autotune:
        alpha_loss = -log_alpha.exp() * (batch["weight"] * (logprob.detach() - action.shape[-1])).sum()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        alpha_optimizer.step()
        losses["alpha_loss"] = alpha_loss.detach()
    return losses


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    N = args.num_envs
    total_steps = math.ceil(args.total_timesteps / N)
    random_steps = max(math.ceil(args.learning_starts / N), 1)
    if total_steps <= random_steps:
        print("warning: nothing is learned: --total-timesteps ends before --learning-starts.", file=sys.stderr)
    saved = load_checkpoint(args)
    first_step = saved.get("step", 0)
    if first_step >= total_steps:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    start_anew(args.seed, 0, [])  # seeds what makes envs and networks
    envs = [make_env(args, gym.spaces.Box) for _ in range(1 if args.async_envs else N)]
    obs_dim = envs[0].observation_space.shape[0]
    action_space = envs[0].action_space
    action_dim = math.prod(action_space.shape)
    center = (action_space.high + action_space.low) / 2
    scale = (action_space.high - action_space.low) / 2
    if not ((scale > 0) & np.isfinite(scale)).all() or action_space.dtype.kind != "f":
        fail(f"{args.env_id} takes actions in {action_space}; needed: floats with finite bounds, low below high.")
    if args.async_envs:
        envs[0].close()
        envs = start_processes(lambda: make_env(args, gym.spaces.Box), N)
    step_all = step_processes if args.async_envs else step_envs
    run_dir, writer, device = start_run(args, saved)

    ring = torch.zeros(max(args.buffer_size // N, 1) + 1, N, obs_dim + action_dim + 3, device=device)
    row = torch.zeros(N, obs_dim + action_dim + 3)
    obs, row_action, reward, terminated, valid = split_row(row.numpy(), obs_dim)  # views
    truncated = np.full(N, first_step > 0)  # a resumed run begins with resets, as after a save
    totals = np.zeros((2, N))  # return and length of the open episodes
    actor = GaussianActor(obs_dim, action_dim).to(device)
    critics = nn.ModuleList(Critic(obs_dim, action_dim) for _ in range(2)).to(device)
    critics_target = copy.deepcopy(critics).requires_grad_(False)
    alpha = 1.0 if args.autotune else max(args.alpha, 1e-30)  # 0 has no logarithm
    log_alpha = nn.Parameter(torch.tensor(math.log(alpha), device=device))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr, fused=True)
    critics_optimizer = torch.optim.Adam(critics.parameters(), lr=args.q_lr, fused=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=args.q_lr, fused=True)
    networks = nn.ModuleList([actor, critics, critics_target, nn.ParameterList([log_alpha])])
    optimizers = [actor_optimizer, critics_optimizer, alpha_optimizer]
    obs[:] = np.vstack(start_anew(args.seed, first_step, envs))
    ring[0] = row
    if saved:
        networks.load_state_dict(saved["networks"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        ring[: len(saved["replay"])] = saved["replay"]

    progress = tqdm(total=total_steps * N, initial=first_step * N, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    losses = {}
    clock = time.perf_counter(), first_step * N  # of the last report
    interval = args.checkpoint_interval or math.inf
    updates = max(first_step - random_steps, 0) * N

    def learn(newest: int, updates: int) -> dict[str, Tensor]:
        batch = sample(ring, newest, min(newest, len(ring) - 1), args.batch_size, obs_dim)
        losses = learn_soft_critics(batch, actor, critics, critics_target, log_alpha, critics_optimizer, updates, args)
        if updates % args.policy_frequency == 0:
            for _ in range(args.policy_frequency):  # one for each critic update since its last turn
                losses |= learn_soft_actor(batch, actor, critics, log_alpha, actor_optimizer, alpha_optimizer, args)
        return losses

    for step in range(first_step, total_steps):
        # act
        if step < random_steps:
            action = 2 * torch.rand(N, action_dim, device=device) - 1
        else:
            with torch.no_grad():
                action, _ = actor(ring[step % len(ring), :, :obs_dim])
        action = action.cpu().numpy()  # waits for the actor; the update comes next, beside the envs

        # learn
        for _ in range(N if step >= random_steps else 0):
            updates += 1
            losses |= learn(step, updates)

        # step and store
        row_action[:] = action
        env_action = (center + scale * action.reshape(N, *action_space.shape)).clip(action_space.low, action_space.high)
        valid[:] = 1 - np.maximum(terminated, truncated)  # where the last step ended an episode, this one only resets
        global_step = (step + 1) * N
        for return_, length in step_all(envs, env_action, obs, reward, terminated, truncated, totals):
            writer.add_scalar("charts/episodic_return", return_, global_step)
            writer.add_scalar("charts/episodic_length", length, global_step)
            last_returns.append(return_)
        ring[(step + 1) % len(ring)] = row

        # report and save
        if global_step % REPORT_INTERVAL < N or step + 1 == total_steps or signals:
            metrics = report(losses, networks.parameters(), last_returns, global_step, clock, writer, progress)
            is_due = global_step // interval > clock[1] // interval  # passed since the last report
            clock = time.perf_counter(), global_step
            if is_due or signals:
                kept = {"step": step + 1, "last_returns": list(last_returns)}
                kept |= {"networks": networks.state_dict(), "optimizers": [x.state_dict() for x in optimizers]}
                kept["replay"] = ring[: step + 2].to("cpu", copy=True)  # a view would keep the whole ring
                save_checkpoint(run_dir, args, kept)
                start_anew(args.seed, step + 1, envs)  # as a run that resumes here does
                truncated[:] = True  # the next step resets every env
            if signals:
                break

    finish_run(args, run_dir, metrics, writer, GreedyActor(actor, center, scale), torch.zeros(2, obs_dim))
    for resource in (progress, *envs):
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
