# /// script
# dependencies = [
#     "torch==2.13.0", "gymnasium==1.4.0", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0",
# ]
# ///
"""Deep Q-learning (DQN) on vector observations, in plain PyTorch.

    python leanrl/dqn.py --env-id CartPole-v1 --seed 1

Paper: Mnih et al. 2015, https://www.nature.com/articles/nature14236.
Fast twin: dqn_torchcompile.py. `diff -u` the two files to see what makes it faster.
Shapes: N = num_envs, B = batch_size, O = size of an observation, A = number of actions.
Differences from CleanRL's script of the same name:
1. The loop is act, learn, step, store, so a new transition can be sampled one step later than in CleanRL.
2. Each observation is stored once. The step in which an env resets itself gets weight 0 in the loss.
3. The network is only evaluated when it decides: a random action needs no forward pass.
"""

import copy
import difflib
import json
import math
import os
import re
import sys
import time
import warnings
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
WARMUP_REPORTS = 3  # the first reports, slowed by compilation and cold caches, do not count for the speed


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; different seeds never share an env's random stream
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a specific device, e.g. cuda:1; overrides --cuda
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "CartPole-v1"  # any Gymnasium id with vectors and discrete actions, also my_package:MyEnv-v0
    total_timesteps: int = 500_000  # env steps, summed over all envs
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 1  # number of envs, stepped one after the other; must divide --train-frequency
    buffer_size: int = 10_000  # capacity of the replay ring, in transitions
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # how far the target network moves towards the trained one at each of its updates
    target_network_frequency: int = 500  # env steps between updates of the target network
    batch_size: int = 128  # transitions per update
    start_e: float = 1.0  # probability of a random action at the start
    end_e: float = 0.05  # probability of a random action at the end of exploration
    exploration_fraction: float = 0.5  # share of the run in which that probability falls from --start-e to --end-e
    learning_starts: int = 10_000  # env steps before the first update
    train_frequency: int = 10  # env steps between updates

    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project, used with --track
    wandb_entity: str | None = None  # Weights & Biases team or user, used with --track


def fail(message: str):
    """Ends the program with exit code 2 and one line on stderr."""
    print("error:", " ".join(message.split()), file=sys.stderr)  # a quoted message may span several lines
    sys.exit(2)


def check_numbers(args: Args):
    """Refuses negative and infinite numbers, counts of zero where one is needed, and shares above 1."""
    for name, value in vars(args).items():
        if type(value) in (int, float):
            least = int(type(value) is int and name not in ("seed", "learning_starts"))
            is_share = name in ("gamma", "gae_lambda", "tau", "start_e", "end_e", "exploration_fraction")
            if not least <= value < math.inf or (is_share and value > 1):  # NaN fails, too
                limits = "between 0 and 1" if is_share else f"at least {least} and finite"
                fail(f"--{name.replace('_', '-')} must be {limits}, not {value}.")


def make_env(env_id: str, action_type: type[gym.Space]) -> gym.Env:
    """Makes an env that observes flat vectors and records episode returns; fails if it has other actions or images."""
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # advice to use v5 of a v4 env
            env = gym.make(env_id)
    except (gym.error.Error, ImportError, ValueError) as error:
        near = difflib.get_close_matches(env_id, gym.registry.keys() - {env_id})
        fail(f"cannot make the env {env_id!r}: {error} Near matches: {', '.join(near) or 'none'}.")
    space = env.observation_space
    shape = space.shape or ()  # dicts and sequences have none
    is_image = len(shape) > 2 or (len(shape) == 2 and space.dtype == np.uint8)
    if len(shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if is_image or not env.observation_space.shape or not isinstance(env.action_space, action_type):
        fail(f"{env_id} maps {space} to {env.action_space}; needed: vectors to a {action_type.__name__}.")
    return gym.wrappers.RecordEpisodeStatistics(env)


def step_envs(envs: list[gym.Env], action, obs, reward, terminated, truncated) -> list[dict]:
    """Steps every env, writes the results into the last four arrays, and returns the episodes that ended.

    An env whose episode has ended is reset instead; that step ignores the action and has reward 0 (autoreset mode
    NEXT_STEP). An episode is a dict with its return "r" and its length "l".
    """
    episodes = []
    for i, env in enumerate(envs):
        if terminated[i] or truncated[i]:
            obs[i], _ = env.reset()
            reward[i] = 0
            terminated[i] = truncated[i] = False
        else:
            obs[i], reward[i], terminated[i], truncated[i], info = env.step(action[i])
            if "episode" in info:
                episodes.append(info["episode"])
    return episodes


class QNetwork(nn.Module):
    """The values of all actions in a state."""

    def __init__(self, obs_dim: int, num_actions: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_actions)
        )

    def forward(self, obs: Tensor) -> Tensor:  # (.., O) -> (.., A)
        return self.layers(obs)


def linear_schedule(start: float, end: float, duration: float, step: np.ndarray) -> np.ndarray:
    """Falls linearly from start at step 0 to end at step `duration`, and stays there."""
    share = np.minimum(step / max(duration, 1e-9), 1)
    return (1 - share) * start + share * end


def replay_ring(buffer_size: int, num_envs: int, row_size: int, device: torch.device) -> Tensor:
    """Zeros (C, N, row_size) with room for `buffer_size` transitions; fails if the memory does not suffice.

    Row t % C holds the observation at time t, and the action, reward, terminated and valid of the step that led to it.
    A transition is therefore a pair of neighbouring rows, and no observation is stored twice.
    """
    rows = max(buffer_size // num_envs, 1) + 1
    needed = 4 * rows * num_envs * row_size
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        memory, _ = torch.cuda.mem_get_info(device)
    if needed > memory:
        fail(f"--buffer-size {buffer_size} needs {needed:,} bytes on {device}, which has {memory:,}.")
    return torch.zeros(rows, num_envs, row_size, device=device)


def split_row(row, obs_dim: int):
    """Views of the parts of replay rows (.., O + A + 3): obs, action, reward, terminated, valid."""
    return row[..., :obs_dim], row[..., obs_dim:-3], row[..., -3], row[..., -2], row[..., -1]


def sample(ring: Tensor, newest, pairs, batch_size: int, obs_dim: int) -> dict[str, Tensor]:
    """A batch of transitions, drawn uniformly from the last `pairs` pairs of rows up to time `newest`."""
    rows, num_envs, _ = ring.shape
    # three draws each, in float64 since float32 would miss rows; the first that is no reset of an env is taken
    draws = (torch.rand(3, batch_size, dtype=torch.float64, device=ring.device) * (pairs * num_envs)).long()
    valid = ring[(newest - draws // num_envs) % rows, draws % num_envs, -1]
    draw = draws.gather(0, valid.argmax(0, keepdim=True))[0]
    time = newest - draw // num_envs
    env = draw % num_envs
    obs = ring[(time - 1) % rows, env, :obs_dim]
    next_obs, action, reward, terminated, valid = split_row(ring[time % rows, env], obs_dim)
    batch = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "terminated": terminated}
    return batch | {"weight": valid / valid.sum().clamp(min=1)}  # 0 where all three are resets


def td_target(batch: dict[str, Tensor], next_value: Tensor, gamma: float) -> Tensor:
    """One-step targets (B,): the reward and, unless the episode terminated, the discounted next value."""
    return batch["reward"] + gamma * (1 - batch["terminated"]) * next_value


def td_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean squared error of values (.., B) over the rows that count."""
    return (weight * (q - target) ** 2).sum(-1)


def start_run(args: Args) -> tuple[torch.device, Path, SummaryWriter]:
    """Seeds PyTorch, picks the device, and makes the run folder with its TensorBoard writer (W&B follows it)."""
    device_name = args.device or ("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    run_dir = Path("runs", re.sub("[/:]", "_", run_name))
    try:
        device = torch.zeros((), device=device_name).device
        run_dir.mkdir(parents=True)  # fails if another run has it
        if args.track:
            import wandb  # an optional dependency

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
            wandb.init(**names, config=asdict(args), sync_tensorboard=True)
    except Exception as error:
        fail(f"cannot use the device {device_name}, the folder {run_dir} or wandb: {str(error).splitlines()[0]}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_flush_denormal(True)  # Adam's moments of idle weights decay to denormals, which are slow on a CPU
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    writer = SummaryWriter(run_dir, flush_secs=10)
    writer.add_text("args", json.dumps(asdict(args), indent=2))
    (run_dir / "summary.json").write_text(json.dumps({"args": asdict(args)}, indent=2))  # results follow at the end
    return device, run_dir, writer


def report(losses: dict, data: list[Tensor], last_returns: deque, marks: list, writer, progress) -> dict[str, float]:
    """Logs and returns the metrics; reading the losses is the only sync. marks are (seconds, env steps) of reports."""
    global_step = marks[-1][1]
    metrics = dict(zip(losses, torch.stack(list(losses.values())).tolist())) if losses else {}
    for name, loss in metrics.items():
        writer.add_scalar(f"losses/{name}", loss, global_step)
        if not math.isfinite(loss):
            progress.close()
            writer.close()
            is_finite = all(x.isfinite().all() for x in data)
            advice = "a smaller learning rate may help" if is_finite else "so is an observation, a reward or an action"
            sys.exit(f"error: losses/{name} is {loss} at step {global_step}; {advice}.")
    seconds, steps = np.array(marks).T
    warm = min(WARMUP_REPORTS, len(marks) - 2)
    metrics["SPS"] = (steps[-1] - steps[warm]) / (seconds[-1] - seconds[warm])
    # compilation, capture and cold caches: how much longer the warm-up took than the same steps take now
    metrics["startup_seconds"] = seconds[warm] - seconds[0] - (steps[warm] - steps[0]) / metrics["SPS"]
    metrics["episodic_return"] = float(np.mean(last_returns)) if last_returns else None
    writer.add_scalar("charts/SPS", (steps[-1] - steps[-2]) / (seconds[-1] - seconds[-2]), global_step)
    progress.set_postfix(episodic_return=metrics["episodic_return"], refresh=False)
    progress.update(global_step - progress.n)
    return metrics | {"global_step": global_step}


def train(args: Args) -> dict[str, float]:
    """Trains an agent and returns the final metrics, which summary.json in the run folder holds, too."""
    check_numbers(args)
    N = args.num_envs
    total_steps = math.ceil(args.total_timesteps / N)
    if args.train_frequency % N or args.buffer_size < args.train_frequency:
        fail("--train-frequency must be a multiple of --num-envs, and --buffer-size at least --train-frequency.")
    if args.total_timesteps <= args.learning_starts:
        print("warning: nothing is learned: --total-timesteps ends before --learning-starts.", file=sys.stderr)
    envs = [make_env(args.env_id, gym.spaces.Discrete) for _ in range(N)]
    obs_dim = envs[0].observation_space.shape[0]
    num_actions = int(envs[0].action_space.n)
    first_action = int(envs[0].action_space.start)
    device, run_dir, writer = start_run(args)
    torch.set_num_threads(1)  # for matrices this small, a second thread costs more than it computes
    rng = np.random.default_rng(args.seed)
    exploration_steps = args.exploration_fraction * args.total_timesteps

    # The newest row of the replay ring, on the host. Its parts are views: stepping the envs fills it.
    row = torch.zeros(N, obs_dim + 1 + 3)
    obs, row_action, reward, terminated, valid = split_row(row.numpy(), obs_dim)
    truncated = np.zeros(N, bool)
    for i, env in enumerate(envs):
        obs[i], _ = env.reset(seed=10_000 * args.seed + i)  # only here; later resets continue the env's stream
    ring = replay_ring(args.buffer_size, *row.shape, device)
    ring[0] = row

    q_network = QNetwork(obs_dim, num_actions).to(device)
    target_network = copy.deepcopy(q_network).requires_grad_(False)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)

    def act() -> np.ndarray:
        with torch.no_grad():
            return first_action + q_network(torch.as_tensor(obs, device=device)).argmax(-1).cpu().numpy()

    def learn(newest: int) -> dict[str, Tensor]:
        """Moves the network towards the target (arXiv:1312.5602, eq. 2) on a new batch."""
        batch = sample(ring, newest, min(newest, len(ring) - 1), args.batch_size, obs_dim)
        with torch.no_grad():
            next_q = target_network(batch["next_obs"])
            target = td_target(batch, next_q.amax(-1), args.gamma)
        q = q_network(batch["obs"])
        q = q.gather(-1, batch["action"].long() - first_action).squeeze(-1)
        loss = td_loss(q, target, batch["weight"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"td_loss": loss.detach(), "q_values": (batch["weight"] * q.detach()).sum()}

    progress = tqdm(total=total_steps * N, unit="step", desc=args.exp_name, dynamic_ncols=True)
    last_returns = deque(maxlen=100)
    losses = {}
    marks = [(time.perf_counter(), 0)]
    global_step = 0
    for step in range(total_steps):
        # act
        now = step % REPORT_INTERVAL
        if now == 0:  # draw the random numbers of many steps at once
            steps = global_step + N * np.arange(REPORT_INTERVAL)[:, None]
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, steps)
            random_action = first_action + rng.integers(num_actions, size=(REPORT_INTERVAL, N))
            greedy = rng.random((REPORT_INTERVAL, N)) >= epsilon
            any_greedy = greedy.any(1)
        action = random_action[now]
        if any_greedy[now]:
            action = np.where(greedy[now], act(), action)

        # learn
        learning = step > 0 and global_step >= args.learning_starts
        if learning and global_step % args.train_frequency == 0:
            if not losses:
                marks = [(time.perf_counter(), global_step)]  # the clock starts anew with learning
            losses = learn(step)
        if learning and global_step % args.target_network_frequency < N:
            with torch.no_grad():
                torch._foreach_lerp_(list(target_network.parameters()), list(q_network.parameters()), args.tau)

        # step and store
        row_action[:, 0] = action
        valid[:] = 1 - np.maximum(terminated, truncated)  # an env whose episode has ended only resets
        global_step += N
        for episode in step_envs(envs, action, obs, reward, terminated, truncated):
            writer.add_scalar("charts/episodic_return", episode["r"], global_step)
            writer.add_scalar("charts/episodic_length", episode["l"], global_step)
            last_returns.append(episode["r"])
        ring[(step + 1) % len(ring)] = row

        # report
        if global_step % REPORT_INTERVAL < N or step + 1 == total_steps:
            marks.append((time.perf_counter(), global_step))
            metrics = report(losses, [ring], last_returns, marks, writer, progress)
            writer.add_scalar("charts/epsilon", epsilon[now, 0], global_step)

    summary = {"device": str(device), "args": asdict(args), "metrics": metrics}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    for name, value in metrics.items():
        writer.add_scalar(f"summary/{name}", math.nan if value is None else value, global_step)  # for W&B, too
    for resource in (progress, writer, *envs):
        resource.close()
    return metrics


if __name__ == "__main__":
    train(tyro.cli(Args))
