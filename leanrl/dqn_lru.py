# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "popgym==1.0.7", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""Deep Q-learning (DQN) with a memory: a linear recurrent unit (LRU), in plain PyTorch.

    python leanrl/dqn_lru.py --env-id popgym:popgym-PositionOnlyCartPoleEasy-v0 --seed 1

Papers: Kapturowski et al. 2019, openreview.net/forum?id=r1lyTjAqYX; Orvieto et al. 2023, arxiv.org/abs/2303.06349
Fast twin: dqn_lru_torchcompile.py. `diff -u` the two files to see what makes it faster.
To learn the algorithm, read lru(), LRUQNetwork, sample_slices() and train(). The rest is plumbing.
Shapes: T = seq_length, N = num_envs, B = batch_size; O = size of an observation, A = number of actions, H = hidden_size
How the memory is handled:
1. Nothing is padded: where an episode starts, a factor of 0 drops the memory (picture: docs/memory.md).
2. A slice of the replay starts from the memory that the agent had there, and runs it up to date before it learns.
"""

import copy
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import warnings
import zipfile
from collections import deque
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
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

    env_id: str = "popgym:popgym-PositionOnlyCartPoleEasy-v0"  # any Gymnasium id with vectors and discrete actions
    total_timesteps: int = 300_000  # env steps, summed over all envs
    learning_rate: float = 1e-3  # learning rate of Adam
    num_envs: int = 8  # number of envs, stepped one after the other; must divide --train-frequency
    buffer_size: int = 100_000  # capacity of the replay ring, in transitions
    hidden_size: int = 64  # width of each layer, and number of complex numbers that are remembered
    state_interval: int = 20  # steps of each env between two stored memories; slices start at them
    burn_in: int = 20  # rows of a slice that only bring its memory up to date
    seq_length: int = 40  # rows of a slice that are learned from, through which gradients flow
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # how far the target network moves towards the trained one at each of its updates
    target_network_frequency: int = 500  # env steps between updates of the target network
    batch_size: int = 32  # slices per update
    start_e: float = 1.0  # probability of a random action at the start
    end_e: float = 0.05  # probability of a random action at the end of exploration
    exploration_fraction: float = 0.5  # share of the run in which random actions get rarer, from --start-e to --end-e
    learning_starts: int = 10_000  # env steps before the first update; more if no slice is there yet
    train_frequency: int = 40  # env steps between updates

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


def make_env(env_id: str, action_type: type[gym.Space]) -> gym.Env:
    """Makes an env that observes flat vectors and records episode returns; fails on images and on other actions."""
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # advice to use v5 of a v4 env
            env = gym.make(env_id)
    except Exception as error:  # of the env's code, too
        fail(f"cannot make the env {env_id!r}: {error}")  # the error names similar envs
    space = env.observation_space
    shape = space.shape or ()  # dicts and sequences have none
    is_image = len(shape) > 2 or (len(shape) == 2 and space.dtype == np.uint8)
    if len(shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    if is_image or not env.observation_space.shape or not isinstance(env.action_space, action_type):
        fail(f"{env_id} maps {space} to {env.action_space}; needed: vectors to a {action_type.__name__}.")
    return gym.wrappers.RecordEpisodeStatistics(env)


def step_envs(envs: list[gym.Env], global_step: int, action, obs, reward, terminated, truncated) -> list[dict]:
    """Steps every env, writes the results into the last four arrays, and returns the episodes that ended.

    An env whose episode has ended is reset instead; that step ignores the action and has reward 0 (autoreset mode
    NEXT_STEP). An episode is a dict with its return "r" and its length "l".
    """
    episodes = []
    for i, env in enumerate(envs):
        try:
            if terminated[i] or truncated[i]:
                obs[i], _ = env.reset()
                reward[i] = 0
                terminated[i] = truncated[i] = False
                continue
            obs[i], reward[i], terminated[i], truncated[i], info = env.step(action[i])
        except Exception as error:
            error.add_note(f"error: env {i} raised this in env step {global_step}. Earlier checkpoints are kept.")
            raise
        if "episode" in info:
            episodes.append(info["episode"])
    return episodes


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
        return self.q(encoded + F.silu(self.readout(states))), states[-1]


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
        return action + self.first_action, torch.cat([state, F.one_hot(action, num_actions)], -1)


def replay_ring(buffer_size: int, num_envs: int, row_size: int, device: torch.device) -> Tensor:
    """Zeros (C, N, row_size) with room for `buffer_size` transitions; fails if the memory does not suffice.

    C is a number of time steps. Row t % C holds the observation at time t, and the action, reward, terminated and valid
    of the step that led to it. A transition is a pair of neighbouring rows, and no observation is stored twice.
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


def sample_slices(ring: Tensor, states: Tensor, newest: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """Slices (burn_in + T, B, row_size) of the ring, drawn uniformly, and the states (B, 2H) from which they start.

    They start where a state is stored. None spans the place between the newest row, of time `newest`, and the oldest.
    """
    num_rows, num_envs, _ = ring.shape
    interval = args.state_interval
    length = args.burn_in + args.seq_length
    first = ((newest - num_rows).clamp(min=-1) + interval) // interval  # the oldest state whose rows are all there
    last = (newest + 1 - length) // interval
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


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; after a signal it saves and exits instead."""
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
    envs = [make_env(args.env_id, gym.spaces.Discrete) for _ in range(N)]
    obs_dim = envs[0].observation_space.shape[0]
    num_actions = int(envs[0].action_space.n)
    first_action = int(envs[0].action_space.start)
    made_by = [Path(__file__).stem, args.env_id, N, obs_dim, num_actions, args.buffer_size]
    made_by += [args.hidden_size, args.state_interval]
    saved = load_checkpoint(args, made_by) if args.resume is not None else {}
    first_step = saved.get("step", 0)
    if first_step >= total_steps:
        print("nothing is left to do; raise --total-timesteps to go on.", file=sys.stderr)
        sys.exit(0)
    device = pick_device(args)
    ring = replay_ring(args.buffer_size, N, obs_dim + num_actions + 3, device)
    states = torch.zeros(len(ring) // args.state_interval + 1, N, 2 * args.hidden_size, device=device)
    run_dir, writer = start_run(args)
    torch.set_num_threads(1)  # for matrices this small, a second thread brings nothing
    rng = np.random.default_rng(args.seed)
    exploration_steps = args.exploration_fraction * args.total_timesteps

    # The newest row of the replay ring, on the host. Its parts are views: writing to them fills it.
    row = torch.zeros(N, obs_dim + num_actions + 3)
    obs, row_action, reward, terminated, valid = split_row(row.numpy(), obs_dim)
    truncated = np.zeros(N, bool)
    for i, env in enumerate(envs):
        obs[i], _ = env.reset(seed=10_000 * args.seed + i)  # later resets continue the env's stream
    ring[0] = row

    memory = torch.zeros(N, 2 * args.hidden_size, device=device)  # what has been seen of the open episodes
    q_network = LRUQNetwork(obs_dim + num_actions, num_actions, args.hidden_size).to(device)
    target_network = copy.deepcopy(q_network).requires_grad_(False)
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate, fused=True)

    def start_anew(step: int):
        """Cuts the open episodes off and seeds anew by seed and step, so that a resumed run goes on alike."""
        seeds = np.random.SeedSequence([args.seed, step]).generate_state(N + 1).tolist()
        torch.manual_seed(seeds[N])
        rng.bit_generator.state = np.random.default_rng(seeds[N]).bit_generator.state
        for env, seed in zip(envs, seeds):
            env.reset(seed=seed)
        row.zero_()
        memory.zero_()
        truncated[:] = True  # the next step resets every env

    parameters = dict(q_network.named_parameters())
    learners = {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}
    if saved:
        for name, learner in learners.items():
            if isinstance(learner, torch.optim.Optimizer):  # its learning rate is what the flags say now
                saved[name]["param_groups"] = learner.state_dict()["param_groups"]
            learner.load_state_dict(saved[name])
        ring[: len(saved["replay"])] = saved["replay"]
        states.copy_(saved["states"])
        start_anew(first_step)

    def act() -> np.ndarray:
        with torch.no_grad():
            q, state = q_network(row[None, :, :-3].to(device), memory)
            memory.copy_(state)
            return first_action + q[0].argmax(-1).cpu().numpy()

    def update(newest: Tensor) -> dict[str, Tensor]:
        """Moves the network towards the target of double Q-learning (arXiv:1509.06461, eq. 4) on new slices."""
        slices, state = sample_slices(ring, states, newest, args)
        old_inputs, inputs = slices[..., :-3].split([args.burn_in, args.seq_length])
        _, action, reward, terminated, valid = split_row(slices[args.burn_in + 1 :], obs_dim)  # T - 1 steps
        with torch.no_grad():
            _, target_state = target_network(old_inputs, state)
            target_q, _ = target_network(inputs, target_state)
            _, state = q_network(old_inputs, state)
        q, _ = q_network(inputs, state)
        next_q = target_q[1:].gather(-1, q[1:].argmax(-1, keepdim=True)).squeeze(-1)
        target = td_target({"reward": reward, "terminated": terminated}, next_q, args.gamma)
        q = (q[:-1] * action).sum(-1)
        weight = valid / valid.sum().clamp(min=1)
        loss = td_loss(q, target, weight).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"td_loss": loss.detach(), "q_values": (weight * q.detach()).sum()}

    progress = tqdm(total=total_steps * N, initial=first_step * N, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    losses = {}
    global_step = first_step * N
    marks = [(time.perf_counter(), global_step)]
    interval = args.checkpoint_interval or math.inf
    saved_at = global_step
    path = stopped_by = None  # the last checkpoint, if its save did not fail, and a signal
    for step in range(first_step, total_steps):
        # act
        if step % args.state_interval == 0:
            states[step // args.state_interval % len(states)] = memory
        epsilon = np.interp(global_step, [0, exploration_steps], [args.start_e, args.end_e])
        random_action = first_action + rng.integers(num_actions, size=N)
        action = np.where(rng.random(N) < epsilon, random_action, act())

        # learn
        learning = global_step >= learning_starts
        if learning and global_step % args.train_frequency == 0:
            if not losses:
                marks = [(time.perf_counter(), global_step)]  # the clock starts anew with learning
            losses = update(torch.tensor(step, device=device))
        if learning and global_step % args.target_network_frequency < N:
            with torch.no_grad():
                torch._foreach_lerp_(list(target_network.parameters()), list(q_network.parameters()), args.tau)

        # step and store
        valid[:] = 1 - np.maximum(terminated, truncated)  # an env whose episode has ended only resets
        row_action[:] = np.eye(num_actions)[action - first_action] * valid[:, None]  # no action precedes an episode
        global_step += N
        for episode in step_envs(envs, global_step, action, obs, reward, terminated, truncated):
            writer.add_scalar("charts/episodic_return", episode["r"], global_step)
            writer.add_scalar("charts/episodic_length", episode["l"], global_step)
            last_returns.append(float(episode["r"]))
        ring[(step + 1) % len(ring)] = row

        # report
        if not (global_step % REPORT_INTERVAL < N or step + 1 == total_steps or signals):
            continue
        marks.append((time.perf_counter(), global_step))
        metrics = report(losses, parameters, [ring], last_returns, marks, writer, progress)
        writer.add_scalar("charts/epsilon", epsilon, global_step)

        # save
        if signals or global_step // interval > saved_at // interval:
            kept = {"made_by": made_by, "step": step + 1, "global_step": global_step}
            kept["replay"] = ring[: step + 2].to("cpu", copy=True)  # a view would keep the whole ring
            kept |= {"states": states, "last_returns": list(last_returns)}
            kept |= {name: learner.state_dict() for name, learner in learners.items()}
            path = save_checkpoint(run_dir, kept)
            saved_at = global_step
            if signals:
                stopped_by = signals[0]
                break
            start_anew(step + 1)

    policy = GreedyRecurrentQNetwork(q_network, first_action)
    example = torch.zeros(2, obs_dim), torch.zeros(2, 2 * args.hidden_size + num_actions)
    finish_run(args, run_dir, writer, {"device": str(device)}, metrics, policy, *example)
    for resource in (progress, *envs):
        resource.close()
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
    except RuntimeError as error:
        if "allocate" not in str(error) or hasattr(error, "__notes__"):  # the note: an env has raised it
            raise
        sys.exit(f"\nerror: too little memory; lower --batch-size or --buffer-size. {error!s:.300}")
