# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "tensordict==0.15.3"]
# ///
"""Deep Q-learning (DQN) on vector observations, compiled and captured as CUDA graphs.

    python leanrl/dqn_torchcompile.py --env-id CartPole-v1 --seed 1 --compile --cudagraphs

Paper: Mnih et al. 2015, https://www.nature.com/articles/nature14236.
Plain twin: dqn.py. docs/performance.md explains each perf[name].
Shapes: N = num_envs, B = batch_size, O = size of an observation, A = number of actions.
Differences from CleanRL's dqn.py:
1. The loop is act, learn, step, store: a GPU learns while the envs step. A step is drawn a turn later.
2. Each observation is stored once. Where a drawn step only reset an env, another draw replaces it, or it has weight 0.
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
DRAW_AHEAD = 500  # steps of the loop whose random numbers are drawn at once


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; env seeds of two runs overlap only by chance
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "CartPole-v1"  # any Gymnasium id with vectors and discrete actions, also my_package:MyEnv-v0
    env_kwargs: str = "{}"  # settings of the env as JSON, e.g. '{"sutton_barto_reward": true}'
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
    exploration_fraction: float = 0.5  # share of the run over which epsilon falls from --start-e to --end-e
    learning_starts: int = 10_000  # env steps before the first update
    train_frequency: int = 10  # env steps between updates

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


class QNetwork(nn.Module):
    """The values of all actions in a state."""

    def __init__(self, obs_dim: int, num_actions: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_actions)
        )

    def forward(self, obs: Tensor) -> Tensor:  # (.., O) -> (.., A)
        return self.layers(obs)


def relu_mlp_on_host(weights: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """perf[host] What QNetwork computes, in NumPy: many times faster for single rows."""
    w1, b1, w2, b2, w3, b3 = weights
    hidden = np.maximum(x @ w1 + b1, 0)
    hidden = np.maximum(hidden @ w2 + b2, 0)
    return hidden @ w3 + b3


class GreedyQNetwork(nn.Module):
    """The action of the largest value."""

    def __init__(self, q_network: nn.Module, first_action: int):
        super().__init__()
        self.q_network = q_network
        self.first_action = first_action

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B,)
        return self.q_network(obs).argmax(-1) + self.first_action


# A ring has C rows. Row t % C holds, of each env, the observation at time t, and the action, reward, terminated and
# valid of the step that led to it: valid is 0 if it only reset the env. A transition is two neighbouring rows.
def split_row(row, obs_dim: int):
    """Views of the parts of replay rows (.., O + A + 3): obs, action, reward, terminated, valid."""
    return row[..., :obs_dim], row[..., obs_dim:-3], row[..., -3], row[..., -2], row[..., -1]


# perf[ring] the host sends each row once, and the device counts where it goes
def insert_(ring: Tensor, newest: Tensor, rows: Tensor):
    """Puts K rows (K, N, O + A + 3) into the next places of the ring, and adds K to the time of the newest one."""
    index = newest + torch.arange(1, len(rows) + 1, device=ring.device)
    ring.index_copy_(0, index % len(ring), rows)
    newest.add_(len(rows))


# perf[flat] keep all parameters in one vector, so that Adam and all else meets one tensor
def unflatten(flat: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The parameters by name, as views of their vector (P,)."""
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}


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


def learn_q_network_(batch, state: dict, shapes: dict, q_network, first_action: int, args: Args) -> dict[str, Tensor]:
    """Moves the network towards the target (arXiv:1312.5602, eq. 2)."""
    next_q = functional_call(q_network, unflatten(state["target_flat"], shapes), batch["next_obs"])
    target = td_target(batch, next_q.amax(-1), args.gamma)

    def loss_of(flat: Tensor):
        q = functional_call(q_network, unflatten(flat, shapes), batch["obs"])
        q = q.gather(-1, batch["action"].long() - first_action).squeeze(-1)
        return (batch["weight"] * (q - target) ** 2).sum(), q

    grad, (loss, q) = grad_and_value(loss_of, has_aux=True)(state["flat"])  # perf[graph]
    adam_([state["flat"]], [grad], *state["adam"], state["lr"], eps=1e-8)
    return {"td_loss": loss.detach(), "q_values": (batch["weight"] * q.detach()).sum()}


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    N = args.num_envs
    total_steps = math.ceil(args.total_timesteps / N)
    if args.train_frequency % N or args.buffer_size < args.train_frequency:
        fail("--train-frequency must be a multiple of --num-envs, and --buffer-size at least --train-frequency.")
    first_update = max(math.ceil(args.learning_starts / args.train_frequency), 1) * args.train_frequency
    if total_steps * N <= first_update:
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
    on_gpu = device.type == "cuda"
    if args.cudagraphs and not on_gpu:  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False

    ring = torch.zeros(max(args.buffer_size // N, 1) + 1, N, obs_dim + 1 + 3, device=device)
    row = torch.zeros(N, obs_dim + 1 + 3)
    obs, row_action, reward, terminated, valid = split_row(row.numpy(), obs_dim)  # views
    truncated = np.full(N, first_step > 0)  # a resumed run begins with resets, as after a save
    totals = np.zeros((2, N))  # return and length of the open episodes
    # perf[ring] rows go to the device with the update, many at a time
    num_rows = args.train_frequency // N
    newest = torch.zeros((), dtype=torch.long, device=device)
    rows = torch.zeros(num_rows, *row.shape, pin_memory=on_gpu)  # perf[pinned] the copy does not wait
    host_row = row.numpy()  # arrays copy to arrays much faster than a tensor does
    host_rows = rows.numpy()
    q_network = QNetwork(obs_dim, num_actions).to(device).requires_grad_(False)
    shapes = {name: p.shape for name, p in q_network.named_parameters()}
    flat = nn.utils.parameters_to_vector(q_network.parameters())  # perf[flat]
    nn.utils.vector_to_parameters(flat, q_network.parameters())  # from here on they are views of the vector
    # perf[graph] the state of a run is tensors alone, which are updated in place
    state = {"flat": flat, "target_flat": copy.deepcopy(flat), "adam": adam_state([flat]), "newest": newest}
    state["lr"] = torch.full((), args.learning_rate, device=device)  # perf[tensor]
    obs[:] = start_anew(args.seed, first_step, envs)
    ring[0] = row
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(state), saved["state"]):  # perf[graph]
            tensor.copy_(saved_tensor)
        rows.copy_(saved["rows"])  # perf[ring]
        ring[: len(saved["replay"])] = saved["replay"]

    progress = tqdm(total=total_steps * N, initial=first_step * N, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    losses = {}
    clock = time.perf_counter(), first_step * N  # of the last report
    interval = args.checkpoint_interval or math.inf
    exploration_steps = args.exploration_fraction * args.total_timesteps
    rng = np.random.default_rng([args.seed, first_step])
    first_drawn = first_step

    # perf[host] act in NumPy, many times faster for single rows; a GPU sends the parameters after each update
    host_flat = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat) if on_gpu else flat
    weights = [p.numpy().T for p in unflatten(host_flat, shapes).values()]
    # whoever changes QNetwork must change relu_mlp_on_host(), too
    on_device = functional_call(q_network, unflatten(flat, shapes), torch.eye(obs_dim, device=device))
    np.testing.assert_allclose(relu_mlp_on_host(weights, np.eye(obs_dim)), on_device.cpu(), atol=1e-3)

    def act() -> np.ndarray:
        return first_action + relu_mlp_on_host(weights, obs).argmax(-1)  # perf[host]

    def learn(new_rows: Tensor) -> dict[str, Tensor]:
        insert_(ring, newest, new_rows)
        batch = sample(ring, newest, newest.clamp(max=len(ring) - 1), args.batch_size, obs_dim)
        return learn_q_network_(batch, state, shapes, q_network, first_action, args)

    def update() -> dict[str, Tensor]:  # captured, but not compiled: the copies stay as they are written
        losses = learn(rows.to(device, non_blocking=True))
        if on_gpu:
            host_flat.copy_(flat, non_blocking=True)
        return losses

    if args.compile:  # perf[graph] one graph, which draws the plain file's random numbers; update() calls it
        learn = torch.compile(learn, fullgraph=True, options={"fallback_random": True})
    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        update = CudaGraphModule(update, warmup=3)
    updated = torch.cuda.Event() if on_gpu else torch.cpu.Event()  # perf[overlap] a CPU's event does nothing

    for step in range(first_step, total_steps):
        # act
        now = (step - first_drawn) % DRAW_AHEAD
        if now == 0:  # draw the random numbers of many steps at once
            steps = step * N + N * np.arange(DRAW_AHEAD)[:, None]
            epsilon = np.interp(steps, [0, exploration_steps], [args.start_e, args.end_e])
            random_action = first_action + rng.integers(num_actions, size=(DRAW_AHEAD, N))
            greedy = rng.random((DRAW_AHEAD, N)) >= epsilon
            any_greedy = greedy.any(1)
        action = random_action[now]
        if any_greedy[now]:
            np.copyto(action, act(), where=greedy[now])

        # learn
        global_step = step * N
        learning = step > 0 and global_step >= args.learning_starts
        if learning and global_step % args.train_frequency == 0:
            losses = update()
            updated.record()
        elif step > 0 and global_step % args.train_frequency == 0:
            insert_(ring, newest, rows.to(device))  # perf[ring]
        if learning and global_step % args.target_network_frequency < N:
            state["target_flat"].lerp_(flat, args.tau)  # perf[flat]

        # step and store
        row_action[:, 0] = action
        valid[:] = 1 - np.maximum(terminated, truncated)  # where the last step ended an episode, this one only resets
        global_step += N
        for return_, length in step_envs(envs, action, obs, reward, terminated, truncated, totals):
            writer.add_scalar("charts/episodic_return", return_, global_step)
            writer.add_scalar("charts/episodic_length", length, global_step)
            last_returns.append(return_)
        if step % num_rows == 0:  # perf[overlap] the device has learned while the envs stepped
            updated.synchronize()  # the one sync of an update: the parameters are here
        host_rows[step % num_rows] = host_row

        # report and save
        if global_step % REPORT_INTERVAL < N or step + 1 == total_steps or signals:
            metrics = report(losses, [flat], last_returns, global_step, clock, writer, progress)
            writer.add_scalar("charts/epsilon", epsilon[now, 0], global_step)
            is_due = global_step // interval > clock[1] // interval  # passed since the last report
            clock = time.perf_counter(), global_step
            if is_due or signals:
                kept = {"step": step + 1, "last_returns": list(last_returns)}
                kept |= {"state": tree_leaves(state), "rows": rows}  # perf[graph] perf[ring]
                kept["replay"] = ring[: step + 2].to("cpu", copy=True)  # a view would keep the whole ring
                save_checkpoint(run_dir, args, kept)
                obs[:] = start_anew(args.seed, step + 1, envs)  # the policy acts on it, too, when a run resumes
                truncated[:] = True  # the next step resets every env
                rng = np.random.default_rng([args.seed, step + 1])
                first_drawn = step + 1
            if signals:
                break

    for p in q_network.parameters():
        p.data = p.clone()  # perf[flat] a view cannot be saved alone
    policy = GreedyQNetwork(q_network, first_action)
    finish_run(args, run_dir, metrics, writer, policy, torch.zeros(2, obs_dim))
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
