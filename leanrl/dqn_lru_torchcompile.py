# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "popgym==1.0.7", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0", "tensordict==0.15.3"]
# ///
"""Deep Q-learning (DQN) with a memory: a linear recurrent unit (LRU), compiled and captured as CUDA graphs.

    python leanrl/dqn_lru_torchcompile.py --env-id popgym:popgym-PositionOnlyCartPoleEasy-v0 --compile --cudagraphs

Papers: Kapturowski et al. 2019, openreview.net/forum?id=r1lyTjAqYX; Orvieto et al. 2023, arxiv.org/abs/2303.06349
Plain twin: dqn_lru.py. docs/performance.md explains each perf[name].
Shapes: T = seq_length, N = num_envs, B = batch_size; O = size of an observation, A = number of actions, H = hidden_size
How the memory is handled:
1. Nothing is padded: where an episode starts, a factor of 0 drops the memory (picture: docs/memory.md).
2. A slice of the replay starts from the memory that the agent had there, and runs it up to date before it learns.
"""

import copy
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
from pathlib import Path

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

REPORT_INTERVAL = 500  # env steps between two reports


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; env seeds of two runs overlap only by chance
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "popgym:popgym-PositionOnlyCartPoleEasy-v0"  # any Gymnasium id with vectors and discrete actions
    env_kwargs: str = "{}"  # settings of the env as JSON, e.g. '{"max_episode_length": 50}'
    total_timesteps: int = 300_000  # env steps, summed over all envs
    learning_rate: float = 1e-3  # learning rate of Adam
    num_envs: int = 8  # number of envs, stepped one after the other; must divide --train-frequency
    buffer_size: int = 100_000  # capacity of the replay ring, in transitions
    hidden_size: int = 64  # width of each layer, and number of complex numbers in the memory
    state_interval: int = 20  # store the memory every so many steps of an env; slices start there
    burn_in: int = 20  # first rows of a slice, which only bring its memory up to date
    seq_length: int = 40  # rows of a slice to learn from; gradients flow through them
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # how far the target network moves towards the trained one at each of its updates
    target_network_frequency: int = 500  # env steps between updates of the target network
    batch_size: int = 32  # slices per update
    start_e: float = 1.0  # probability of a random action at the start
    end_e: float = 0.05  # probability of a random action at the end of exploration
    exploration_fraction: float = 0.5  # share of the run over which epsilon falls from --start-e to --end-e
    learning_starts: int = 10_000  # env steps before the first update, or until there is a slice
    train_frequency: int = 40  # env steps between updates

    # perf[graph] perf[capture]
    compile: bool = False  # compile the update
    cudagraphs: bool = False  # capture the update as a CUDA graph

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


def start_anew(seed: int, step: int, envs: list[gym.Env]) -> list[np.ndarray]:
    """Seeds all generators and envs from seed and step alone; returns the observations."""
    first = int(np.random.SeedSequence([seed, step, bool(envs)]).generate_state(1)[0])
    random.seed(first)  # an env may draw from Python's global generator, or NumPy's
    np.random.seed(first)  # noqa: NPY002
    torch.manual_seed(first)
    for i, env in enumerate(envs):
        env.unwrapped.action_space.seed((first + i) % 2**31)
    return [env.reset(seed=(first + i) % 2**31)[0] for i, env in enumerate(envs)]


def lru(log_radius: Tensor, angle: Tensor, drive: Tensor, keep: Tensor, state: Tensor) -> Tensor:
    """Runs h[t] = eigenvalue * keep[t] * h[t - 1] + drive[t] from h[-1] = state, and returns all h (T, N, 2H).

    The eigenvalues exp(log_radius + i * angle) (H,) are complex. So are h and drive: their last axis has
    H real parts, then H imaginary ones. Where keep (T, N, 1) is 0, the memory is dropped.
    """
    eigenvalue = torch.polar(log_radius.exp(), angle)
    drive = torch.complex(*drive.chunk(2, -1))
    h = torch.complex(*state.chunk(2, -1))
    states = []
    for decay_t, drive_t in zip((eigenvalue * keep).unbind(), drive.unbind()):
        h = decay_t * h + drive_t
        states.append(h)
    states = torch.stack(states)
    return torch.cat([states.real, states.imag], -1)


def times(a: Tensor, b: Tensor) -> Tensor:
    """The products of complex numbers, as (2, ...) real and imaginary parts: the compiler has no complex kernels."""
    return torch.stack([a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]])


# perf[scan] about 2 * sqrt(T) steps of whole tensors, where a loop over time takes T steps of single rows
def lru_scan(log_radius: Tensor, angle: Tensor, drive: Tensor, keep: Tensor, state: Tensor) -> Tensor:
    """Computes what lru() computes, in K chunks of C steps; best if T has a divisor near its root."""
    T = len(drive)
    C = max(c for c in range(1, math.isqrt(T) + 1) if T % c == 0)
    drive = torch.stack(drive.chunk(2, -1)).unflatten(1, (-1, C))  # (2, K, C, N, H)
    keep = keep.unflatten(0, (-1, C))
    kept = keep.cumprod(1)  # 1 until an episode starts in the chunk
    exponent = keep.new_ones(C, 1, 1).cumsum(0)
    phase = exponent * angle
    power = (exponent * log_radius).exp() * torch.stack([phase.cos(), phase.sin()])  # eigenvalue ** (1 .. C)

    # C steps, taken in all chunks at once, each from a state of zeros
    h = drive[:, :, 0]
    local = [h]
    for c in range(1, C):
        h = times(power[:, 0], keep[:, c] * h) + drive[:, :, c]
        local.append(h)
    local = torch.stack(local, 2)

    # K steps from chunk to chunk: the state from which each chunk really starts
    h = torch.stack(state.chunk(2, -1))
    start = [h]
    for k in range(T // C - 1):
        h = times(power[:, -1], kept[k, -1] * h) + local[:, k, -1]
        start.append(h)
    start = torch.stack(start, 1)[:, :, None]

    states = local + times(power, kept * start)  # what is left of that state in each step of its chunk
    return torch.cat(states.flatten(1, 2).unbind(), -1)


class LRUQNetwork(nn.Module):
    """The values of all actions, with a memory: a linear recurrent unit and a skip over it."""

    def __init__(self, input_dim: int, num_actions: int, hidden: int):
        super().__init__()
        self.recurrence = lru
        self.encoder = nn.Linear(input_dim, hidden)
        # radii from 0.5, which forgets within steps, to 0.999, which remembers a thousand (Orvieto et al., 3.4)
        radius_squared = torch.rand(hidden) * (0.999**2 - 0.5**2) + 0.5**2
        self.log_rate = nn.Parameter((-0.5 * radius_squared.log()).log())  # radius = exp(-exp(log_rate)) < 1
        self.angle = nn.Parameter(torch.rand(hidden) * math.pi)
        self.drive = nn.Linear(hidden, 2 * hidden)
        self.readout = nn.Linear(2 * hidden, hidden)
        self.q = nn.Linear(hidden, num_actions)

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (T, N, O + A), state (N, 2H) -> values (T, N, A), last state (N, 2H)."""
        keep = inputs[..., -self.q.out_features :].sum(-1, keepdim=True)  # 0 in a first step
        encoded = self.encoder(inputs).tanh()
        log_radius = -self.log_rate.exp()
        scale = (-(2 * log_radius).expm1()).sqrt()  # keeps the state's variance near 1 (Orvieto et al., eq. 7)
        drive = self.drive(encoded) * torch.cat([scale, scale])
        states = self.recurrence(log_radius, self.angle, drive, keep, state)
        return self.q(encoded + nn.functional.silu(self.readout(states))), states[-1]


class GreedyRecurrentQNetwork(nn.Module):
    """The action of the largest value. The memory (B, M), at first zeros: state and previous action."""

    def __init__(self, q_network: nn.Module, first_action: int):
        super().__init__()
        self.q_network = q_network
        self.first_action = first_action

    def forward(self, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # (B, O), (B, M) -> (B,), (B, M)
        num_actions = self.q_network.q.out_features
        state, previous_action = memory.split([memory.shape[1] - num_actions, num_actions], -1)
        q, state = self.q_network(torch.cat([obs, previous_action], -1)[None], state)
        action = q[0].argmax(-1)
        return action + self.first_action, torch.cat([state, nn.functional.one_hot(action, num_actions)], -1)


# A ring has C rows. Row t % C holds, of each env, the observation at time t, and the action, reward, terminated and
# valid of the step that led to it: valid is 0 if it only reset the env.
def split_row(row, obs_dim: int):
    """Views of the parts of replay rows (.., O + A + 3): obs, action, reward, terminated, valid."""
    return row[..., :obs_dim], row[..., obs_dim:-3], row[..., -3], row[..., -2], row[..., -1]


def sample_slices(ring: Tensor, states: Tensor, newest: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """Slices (burn_in + T, B, row_size) of the ring, drawn uniformly, and the states (B, 2H) from which they start."""
    num_rows, num_envs, _ = ring.shape
    interval = args.state_interval
    length = args.burn_in + args.seq_length
    first = ((newest - num_rows).clamp(min=-1) + interval) // interval  # the oldest state whose rows are all there
    last = (newest + 1 - length) // interval  # the newest state whose rows are all there
    draws = torch.rand(args.batch_size, dtype=torch.float64, device=ring.device) * ((last + 1 - first) * num_envs)
    start = first + draws.long() // num_envs
    i = draws.long() % num_envs
    t = interval * start + torch.arange(length, device=ring.device)[:, None]  # (burn_in + T, B)
    return ring[t % num_rows, i], states[start % len(states), i]


def td_target(batch: dict[str, Tensor], next_value: Tensor, gamma: float) -> Tensor:
    """One-step targets (B,): the reward and, unless the episode terminated, the discounted next value."""
    return batch["reward"] + gamma * (1 - batch["terminated"]) * next_value


def td_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean squared error of values (.., B) over the rows that count."""
    return (weight * (q - target) ** 2).sum(-1)


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


def learn_from_slices_(slices, memory, state: dict, q_network, target_network, obs_dim: int, args: Args) -> dict:
    """Moves the network towards the target of double Q-learning (arXiv:1509.06461, eq. 4)."""
    old_inputs, inputs = slices[..., :-3].split([args.burn_in, args.seq_length])
    _, action, reward, terminated, valid = split_row(slices[args.burn_in + 1 :], obs_dim)  # T - 1 steps
    _, target_memory = target_network(old_inputs, memory)
    target_q, _ = target_network(inputs, target_memory)
    _, memory = q_network(old_inputs, memory)
    weight = valid / valid.sum().clamp(min=1)

    def loss_of(parameters: dict[str, Tensor]):
        q, _ = functional_call(q_network, parameters, (inputs, memory))
        next_q = target_q[1:].gather(-1, q[1:].argmax(-1, keepdim=True)).squeeze(-1)
        target = td_target({"reward": reward, "terminated": terminated}, next_q, args.gamma)
        q = (q[:-1] * action).sum(-1)
        return td_loss(q, target, weight).sum(), q

    grads, (loss, q) = grad_and_value(loss_of, has_aux=True)(state["q_network"])  # perf[graph]
    adam_(state["q_network"].values(), grads.values(), *state["adam"], state["lr"], eps=1e-8)
    return {"td_loss": loss.detach(), "q_values": (weight * q.detach()).sum()}


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    N = args.num_envs
    total_steps = math.ceil(args.total_timesteps / N)
    if args.train_frequency % N:
        fail("--train-frequency must be a multiple of --num-envs.")
    least = N * (args.burn_in + args.seq_length + args.state_interval)
    if args.seq_length < 2 or args.buffer_size < least:
        fail(f"--seq-length must be at least 2, and --buffer-size at least {least}.")
    learning_starts = max(args.learning_starts, least)  # slices must be there
    if total_steps * N <= math.ceil(learning_starts / args.train_frequency) * args.train_frequency:
        print("warning: nothing is learned: the run ends before an update; see --learning-starts.", file=sys.stderr)
    saved = load_checkpoint(args)
    first_step = saved.get("step", 0)
    if first_step >= total_steps:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    start_anew(args.seed, 0, [])  # seeds what makes envs and networks
    envs = [make_env(args, gym.spaces.Discrete) for _ in range(N)]
    obs_dim = envs[0].observation_space.shape[0]
    num_actions = int(envs[0].action_space.n)
    first_action = int(envs[0].action_space.start)
    run_dir, writer, device = start_run(args, saved)
    if args.cudagraphs and device.type != "cuda":  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False

    ring = torch.zeros(max(args.buffer_size // N, 1) + 1, N, obs_dim + num_actions + 3, device=device)
    states = torch.zeros(len(ring) // args.state_interval + 1, N, 2 * args.hidden_size, device=device)
    row = torch.zeros(N, obs_dim + num_actions + 3)
    obs, row_action, reward, terminated, valid = split_row(row.numpy(), obs_dim)  # views
    truncated = np.full(N, first_step > 0)  # a resumed run begins with resets, as after a save
    totals = np.zeros((2, N))  # return and length of the open episodes
    memory = torch.zeros(N, 2 * args.hidden_size)  # perf[host] what has been seen of the open episodes
    q_network = LRUQNetwork(obs_dim + num_actions, num_actions, args.hidden_size).to(device).requires_grad_(False)
    target_network = copy.deepcopy(q_network)
    newest = torch.zeros((), dtype=torch.long, device=device)
    obs[:] = start_anew(args.seed, first_step, envs)
    ring[0] = row
    # perf[graph] the state of a run is tensors alone, which are updated in place
    networks = {"q_network": dict(q_network.named_parameters()), "target": dict(target_network.named_parameters())}
    state = networks | {"adam": adam_state(networks["q_network"].values())}
    state["lr"] = torch.full((), args.learning_rate, device=device)  # perf[tensor]
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(state), saved["state"]):  # perf[graph]
            tensor.copy_(saved_tensor)
        ring[: len(saved["replay"])] = saved["replay"]
        states.copy_(saved["states"])

    host_network = copy.deepcopy(q_network).cpu()  # perf[host] acts beside the envs: a GPU would be waited for
    q_network.recurrence = target_network.recurrence = lru_scan  # perf[scan]

    def update(newest: Tensor) -> dict[str, Tensor]:
        slices, memory = sample_slices(ring, states, newest, args)
        return learn_from_slices_(slices, memory, state, q_network, target_network, obs_dim, args)

    if args.compile:  # perf[graph] one graph, which draws the plain file's random numbers
        update = torch.compile(update, fullgraph=True, options={"fallback_random": True})
    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        update = CudaGraphModule(update, warmup=3)

    progress = tqdm(total=total_steps * N, initial=first_step * N, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    losses = {}
    clock = time.perf_counter(), first_step * N  # of the last report
    interval = args.checkpoint_interval or math.inf
    exploration_steps = args.exploration_fraction * args.total_timesteps
    rng = np.random.default_rng([args.seed, first_step])
    for step in range(first_step, total_steps):
        # act
        if step % args.state_interval == 0:
            states[step // args.state_interval % len(states)] = memory
        global_step = step * N
        epsilon = np.interp(global_step, [0, exploration_steps], [args.start_e, args.end_e])
        random_action = rng.integers(num_actions, size=N)
        q, memory = host_network(row[None, :, :-3], memory)  # perf[host] no sync
        action = np.where(rng.random(N) < epsilon, random_action, q[0].argmax(-1).numpy())

        # learn
        learning = global_step >= learning_starts
        if learning and global_step % args.train_frequency == 0:
            losses = update(newest.fill_(step))  # perf[tensor]
        if learning and global_step % args.target_network_frequency < N:
            torch._foreach_lerp_(list(target_network.parameters()), list(q_network.parameters()), args.tau)

        # step and store
        valid[:] = 1 - np.maximum(terminated, truncated)  # where the last step ended an episode, this one only resets
        row_action[:] = np.eye(num_actions)[action] * valid[:, None]  # no action precedes an episode
        global_step += N
        for return_, length in step_envs(envs, first_action + action, obs, reward, terminated, truncated, totals):
            writer.add_scalar("charts/episodic_return", return_, global_step)
            writer.add_scalar("charts/episodic_length", length, global_step)
            last_returns.append(return_)
        ring[(step + 1) % len(ring)] = row
        if learning and step * N % args.train_frequency == 0:  # perf[overlap] it has learned while the envs stepped
            host_network.load_state_dict(q_network.state_dict())

        # report and save
        if global_step % REPORT_INTERVAL < N or step + 1 == total_steps or signals:
            metrics = report(losses, q_network.parameters(), last_returns, global_step, clock, writer, progress)
            writer.add_scalar("charts/epsilon", epsilon, global_step)
            is_due = global_step // interval > clock[1] // interval  # passed since the last report
            clock = time.perf_counter(), global_step
            if is_due or signals:
                kept = {"step": step + 1, "states": states, "last_returns": list(last_returns)}
                kept["replay"] = ring[: step + 2].to("cpu", copy=True)  # a view would keep the whole ring
                kept["state"] = tree_leaves(state)  # perf[graph]
                save_checkpoint(run_dir, args, kept)
                row.zero_()
                memory.zero_()
                obs[:] = start_anew(args.seed, step + 1, envs)  # the policy acts on it, too, when a run resumes
                truncated[:] = True  # the next step resets every env
                rng = np.random.default_rng([args.seed, step + 1])
            if signals:
                break

    policy = GreedyRecurrentQNetwork(host_network, first_action)  # perf[host]
    example = torch.zeros(2, obs_dim), torch.zeros(2, 2 * args.hidden_size + num_actions)
    finish_run(args, run_dir, metrics, writer, policy, *example)
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
