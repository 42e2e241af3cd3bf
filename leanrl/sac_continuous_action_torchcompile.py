# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0", "tensordict==0.15.3"]
# ///
"""Soft actor-critic (SAC) for continuous actions, compiled and captured as CUDA graphs.

    python leanrl/sac_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --seed 1 --compile --cudagraphs

Paper: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905, whose equations are cited below as "eq.".
Plain twin: sac_continuous_action.py. docs/performance.md explains each perf[name].
To learn the algorithm, read GaussianActor, sample() and train(). The rest is plumbing.
Shapes: N = num_envs, B = batch_size, O = size of an observation, A = size of an action.
Differences from CleanRL's sac_continuous_action.py:
1. The loop is act, learn, step, store: a GPU learns while the envs step. New rows are drawn a step later.
2. Each observation is stored once. A step in which an env resets itself is drawn anew, or gets weight 0.
3. With several envs there is one update per env step, not one per step of all envs.
4. The temperature reuses the log-probabilities of the actor's loss instead of sampling actions again.
"""

import copy
import json
import logging  # perf[capture]
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

if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads OpenMP: idle threads spin briefly, then sleep
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
import gymnasium as gym
import numpy as np
import torch
import tyro
from tensordict.nn import CudaGraphModule  # perf[capture]
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # perf[onednn]
from torch.func import functional_call, grad_and_value, stack_module_state, vmap  # perf[graph] perf[vmap]
from torch.utils._pytree import tree_leaves  # perf[graph]
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

REPORT_INTERVAL = 500  # env steps between two reports
# perf[capture] what an update returns; one without the actor, the first five
SAC_LOSSES = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "qf_loss", "actor_loss", "alpha", "alpha_loss")
WARMUP_REPORTS = 3  # the first reports, slowed by compilation and cold caches, do not count for the speed


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; different seeds never share an env's random stream
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a specific device, e.g. cuda:1; overrides --cuda
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "HalfCheetah-v4"  # any Gymnasium id with a bounded Box of actions, also my_package:MyEnv-v0
    total_timesteps: int = 1_000_000  # env steps, summed over all envs
    policy_lr: float = 3e-4  # learning rate of the actor
    q_lr: float = 1e-3  # learning rate of the critics and of the temperature
    num_envs: int = 1  # number of envs, stepped one after the other
    buffer_size: int = 1_000_000  # capacity of the replay ring, in transitions
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # how far the target networks move towards the trained ones at each of their updates
    batch_size: int = 256  # transitions per update
    learning_starts: int = 5_000  # env steps with random actions before the first update
    policy_frequency: int = 2  # update the actor after every so many critic updates, and that many times
    target_network_frequency: int = 1  # update the target networks after every so many critic updates
    alpha: float = 0.2  # temperature (weight of the entropy), used with --no-autotune
    autotune: bool = True  # learn the temperature

    # perf[graph] perf[capture] perf[bf16]
    compile: bool = False  # compile the policy and the updates
    cudagraphs: bool = False  # capture the policy and the updates as CUDA graphs
    bf16: bool = False  # multiply the layers of 256 x 256 in bfloat16

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


class GaussianActor(nn.Module):
    """A Gaussian policy, squashed by tanh into the bounds of each dimension of the action."""

    def __init__(self, obs_dim: int, low: Tensor, high: Tensor):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2 * len(low))
        )
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("scale", (high - low) / 2)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:  # (.., O) -> (.., A), (..)
        """Samples actions and returns them with their log-probabilities (appendix C).

        u ~ N(mean, std), a = scale * tanh(u) + center, log p(a) = log p(u) - log(scale) - log(1 - tanh(u)^2)
        """
        mean, logstd = self.layers(obs).chunk(2, dim=-1)
        logstd = -1.5 + 3.5 * logstd.tanh()  # within -5 .. 2
        noise = torch.randn_like(mean)
        u = mean + logstd.exp() * noise
        logprob = -0.5 * noise**2 - logstd - 0.5 * math.log(2 * math.pi) - self.scale.log()
        logprob = logprob - 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))  # log(1 - tanh(u)^2), stable
        return u.tanh() * self.scale + self.center, logprob.sum(-1)


class GreedyActor(nn.Module):
    """The policy without noise."""

    def __init__(self, actor: GaussianActor):
        super().__init__()
        self.actor = actor

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B, A)
        mean, _ = self.actor.layers(obs).chunk(2, dim=-1)
        return mean.tanh() * self.actor.scale + self.actor.center


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


def sample(ring: Tensor, newest: int | Tensor, pairs: int | Tensor, batch_size: int, obs_dim: int) -> dict[str, Tensor]:
    """A batch of transitions, drawn uniformly from the last `pairs` pairs of rows up to time `newest`."""
    rows, num_envs, _ = ring.shape
    # Three draws for each place in the batch, in case that one is a reset. Float32 would miss rows of a large ring.
    draws = (torch.rand(3, batch_size, dtype=torch.float64, device=ring.device) * (pairs * num_envs)).long()
    is_valid = ring[(newest - draws // num_envs) % rows, draws % num_envs, -1]  # (3, B); 0: an env reset itself
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


def td_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean squared error of values (.., B) over the rows that count."""
    return (weight * (q - target) ** 2).sum(-1)


# perf[ring] the host sends each row once, and the place where it goes is counted on the device
def insert_(ring: Tensor, newest: Tensor, rows: Tensor):
    """Puts rows (K, N, row_size) into the next places of the ring, and moves the time `newest` () on by K."""
    index = newest + torch.arange(1, len(rows) + 1, device=ring.device)
    ring.index_copy_(0, index % len(ring), rows)
    newest.add_(len(rows))


# perf[graph] Adam as a function of tensors, so that it compiles into the update
def adam_(params, grads, exp_avgs, exp_avg_sqs, step: Tensor, lr: Tensor, eps: float):
    """A step of Adam in place (Kingma & Ba 2015, end of section 2)."""
    step += 1  # perf[tensor] step and lr are tensors: numbers would be compiled as constants
    power = (step * math.log(0.9)).exp()  # 0.9**step would be slow, see docs/performance.md
    power_sq = (step * math.log(0.999)).exp()
    unbias = (1 - power_sq).sqrt()
    rate = lr * unbias / (1 - power)
    eps = eps * unbias
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs):
        exp_avg.lerp_(grad, 0.1)
        exp_avg_sq.lerp_(grad**2, 0.001)
        param.sub_(rate * exp_avg / (exp_avg_sq.sqrt() + eps))


def adam_state(params) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Both moments of each parameter, and the number of steps, which is counted on the device."""
    exp_avgs, exp_avg_sqs = ([torch.zeros_like(param) for param in params] for _ in range(2))
    return exp_avgs, exp_avg_sqs, torch.zeros((), dtype=torch.long, device=exp_avgs[0].device)


def multiply_in_bfloat16(layers: nn.Sequential):  # perf[bf16]
    """Lets the layer of 256 x 256, which is nine tenths of the work, multiply in bfloat16."""
    linear = layers[2]
    multiply = nn.functional.linear
    linear.forward = lambda x: multiply(x.bfloat16(), linear.weight.bfloat16()).to(linear.bias.dtype) + linear.bias


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


# perf[onednn] on Zen 5: PyTorch multiplies by MKL, which leaves AMD's AVX-512 unused; oneDNN does not
def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product (M, N) of (M, K) and (K, N), plus a bias (N,); or (B, M, N) of B such pairs."""
    if a.dim() == 3:
        products = torch.empty(*a.shape[:2], b.shape[2])
        for x, y, xy in zip(a, b, products):
            xy.copy_(product(x, y))
        return products
    b = b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()  # slices are slow
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


torch.library.custom_op("leanrl::product", product, mutates_args=()).register_fake(lambda a, b, bias=None: a @ b)


class ProductsByOneDNN(CustomGraphPass):
    """Replaces the float32 products in a compiled graph, except small ones: a call costs too much."""

    def __call__(self, graph: torch.fx.Graph):
        for node in graph.nodes:
            if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default):
                *bias, a, b = node.args
                is_large = math.prod(node.meta["val"].shape[-2:]) * a.meta["val"].shape[-1] >= 2**23
                if is_large and a.meta["val"].dtype == torch.float32 and not node.kwargs:
                    node.target = torch.ops.leanrl.product.default
                    node.args = (a, b, *bias)
                    values = [a.meta["val"].contiguous()] + [x.meta["val"] for x in (b, *bias)]
                    node.meta["eager_input_vals"] = (values, {})  # else oneDNN copies a, slowly

    def uuid(self) -> bytes:  # names what this file does in the compiler's cache
        return get_hash_for_files((__file__,))


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


@torch.compiler.set_stance("default")  # perf[guards] guards are back when train ends, even by an error
def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; after a signal it saves and exits instead."""
    check_numbers(args)
    N = args.num_envs
    total_steps = math.ceil(args.total_timesteps / N)
    random_steps = max(math.ceil(args.learning_starts / N), 1)
    if total_steps <= random_steps:
        print("warning: nothing is learned: --total-timesteps ends before --learning-starts.", file=sys.stderr)
    envs = [make_env(args.env_id, gym.spaces.Box) for _ in range(N)]
    obs_dim = envs[0].observation_space.shape[0]
    action_space = envs[0].action_space
    if not ((action_space.low < action_space.high) & np.isfinite(action_space.high - action_space.low)).all():
        fail(f"{args.env_id} takes any action in {action_space}; needed: finite bounds, the lower below the upper.")
    action_dim = math.prod(action_space.shape)
    made_by = [Path(__file__).stem, args.env_id, N, obs_dim, action_dim, args.buffer_size]
    saved = load_checkpoint(args, made_by) if args.resume is not None else {}
    first_step = saved.get("step", 0)
    if first_step >= total_steps:
        print("nothing is left to do; raise --total-timesteps to go on.", file=sys.stderr)
        sys.exit(0)
    device = pick_device(args)
    ring = replay_ring(args.buffer_size, N, obs_dim + action_dim + 3, device)
    on_gpu = device.type == "cuda"
    if args.cudagraphs and not on_gpu:  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False
    if args.bf16 and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":  # perf[bf16]
        print("warning: this CPU is many times slower in bfloat16; leave --bf16 out.", file=sys.stderr)
    run_dir, writer = start_run(args)
    low = torch.as_tensor(action_space.low.ravel(), dtype=torch.float32, device=device)
    high = torch.as_tensor(action_space.high.ravel(), dtype=torch.float32, device=device)

    # The newest row of the replay ring, on the host. Its parts are views: writing to them fills it.
    # perf[pinned] pinned memory: copies of the row and of the action do not wait, and can be captured
    row = torch.zeros(N, obs_dim + action_dim + 3, pin_memory=on_gpu)
    host_action = torch.zeros(N, action_dim, pin_memory=on_gpu)
    obs, row_action, reward, terminated, valid = split_row(row.numpy(), obs_dim)
    truncated = np.zeros(N, bool)
    for i, env in enumerate(envs):
        obs[i], _ = env.reset(seed=10_000 * args.seed + i)  # later resets continue the env's stream
    newest = torch.full((), -1, device=device)  # perf[ring] time of the newest row

    actor = GaussianActor(obs_dim, low, high).to(device)
    critics = nn.ModuleList(Critic(obs_dim, action_dim) for _ in range(2)).to(device)
    # perf[vmap] stack the parameters of both critics: one call computes both
    critic_params = {name: p.detach() for name, p in stack_module_state(list(critics))[0].items()}
    critic_params_target = copy.deepcopy(critic_params)
    actor_params = dict(actor.requires_grad_(False).named_parameters())
    alpha = 1.0 if args.autotune else max(args.alpha, 1e-30)  # 0 has no logarithm
    log_alpha = torch.full((), math.log(alpha), device=device)
    actor_adam = adam_state(actor_params.values())
    critics_adam = adam_state(critic_params.values())
    alpha_adam = adam_state([log_alpha])
    policy_lr, q_lr = torch.tensor([args.policy_lr, args.q_lr], device=device)  # perf[tensor]

    def start_anew(step: int):
        """Cuts the open episodes off and seeds anew by seed and step, so that a resumed run goes on alike."""
        seeds = np.random.SeedSequence([args.seed, step]).generate_state(N + 1).tolist()
        torch.manual_seed(seeds[N])
        for env, seed in zip(envs, seeds):
            env.reset(seed=seed)
        truncated[:] = True  # the next step resets every env

    # perf[graph] the state of a run is tensors alone
    parameters = {f"actor.{name}": p for name, p in actor_params.items()}
    parameters |= {f"critics.{name}": p for name, p in critic_params.items()}
    state = {"actor": actor_params, "critics": critic_params, "critics_target": critic_params_target}
    state |= {"actor_adam": actor_adam, "critics_adam": critics_adam, "alpha_adam": alpha_adam}
    state |= {"log_alpha": log_alpha, "newest": newest}
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(state), tree_leaves(saved["state"]), strict=True):  # perf[graph]
            tensor.copy_(saved_tensor.view_as(tensor))
        row.copy_(saved["row"])
        ring[: len(saved["replay"])] = saved["replay"]
        if not args.autotune:
            log_alpha.data.fill_(math.log(alpha))  # what the flags say now
        start_anew(first_step)

    def call_critics(params: dict, obs: Tensor, action: Tensor) -> Tensor:  # -> (2, B)
        # perf[vmap] critics[0] lends its code alone: the parameters are those of both critics
        return vmap(lambda p: functional_call(critics[0], p, (obs, action)))(params)

    def learn_critics() -> tuple[dict, dict]:
        """Moves both critics towards the soft TD target (eq. 5), and the target networks when due."""
        batch = sample(ring, newest, newest.clamp(max=len(ring) - 1), args.batch_size, obs_dim)
        next_action, next_logprob = actor(batch["next_obs"])
        next_q = call_critics(critic_params_target, batch["next_obs"], next_action)
        target = td_target(batch, next_q.amin(0) - log_alpha.exp() * next_logprob, args.gamma)

        def loss_of(params: dict):
            q = call_critics(params, batch["obs"], batch["action"])
            loss = td_loss(q, target, batch["weight"])
            return loss.sum(), (q, loss)

        grads, (_, (q, loss)) = grad_and_value(loss_of, has_aux=True)(critic_params)  # perf[graph]
        adam_(critic_params.values(), grads.values(), *critics_adam, q_lr, eps=1e-8)
        is_due = critics_adam[-1] % args.target_network_frequency == 0  # perf[tensor] Adam counts the updates
        for name, param in critic_params.items():
            critic_params_target[name].lerp_(param, args.tau * is_due)

        q1, q2 = (batch["weight"] * q.detach()).sum(-1)
        loss1, loss2 = loss.detach()
        losses = {"qf1_values": q1, "qf2_values": q2, "qf1_loss": loss1, "qf2_loss": loss2}
        return losses | {"qf_loss": (loss1 + loss2) / 2}, batch

    def learn_actor(batch: dict) -> dict[str, Tensor]:
        """Moves the actor up value and entropy (eq. 7), and the temperature so that the entropy nears -A (eq. 18)."""

        def loss_of(params: dict):
            action, logprob = functional_call(actor, params, batch["obs"])
            q = call_critics(critic_params, batch["obs"], action)
            return (batch["weight"] * (log_alpha.exp() * logprob - q.amin(0))).sum(), logprob

        grads, (loss, logprob) = grad_and_value(loss_of, has_aux=True)(actor_params)  # perf[graph]
        adam_(actor_params.values(), grads.values(), *actor_adam, policy_lr, eps=1e-8)
        losses = {"actor_loss": loss.detach(), "alpha": log_alpha.detach().exp()}
        if args.autotune:
            alpha_loss = -log_alpha.exp() * (batch["weight"] * (logprob.detach() - action_dim)).sum()
            adam_([log_alpha], [alpha_loss], *alpha_adam, q_lr, eps=1e-8)  # perf[graph] exp is its own derivative
            losses["alpha_loss"] = alpha_loss.detach()
        return losses

    def update() -> Tensor:  # perf[capture] a replay copies each result, so there is one
        losses, _ = learn_critics()
        return torch.stack(list(losses.values()))

    def update_with_actor() -> Tensor:
        losses, batch = learn_critics()
        for _ in range(args.policy_frequency):
            losses |= learn_actor(batch)
        return torch.stack(list(losses.values()))

    def policy(row: Tensor) -> Tensor:
        insert_(ring, newest, row[None])
        return actor(row[:, :obs_dim])[0]

    def act():  # captured, but not compiled: the copies between host and device stay as they are written
        host_action.copy_(policy(row.to(device, non_blocking=True)), non_blocking=True)

    def explore():  # as act(), but for random actions; it is called too seldom to be captured
        insert_(ring, newest, row[None].to(device, non_blocking=True))
        host_action.copy_(low + (high - low) * torch.rand(N, action_dim, device=device), non_blocking=True)

    if args.bf16:
        for network in (actor, critics[0]):
            multiply_in_bfloat16(network.layers)
    if args.compile:  # perf[graph] one graph each; act() finds the compiled policy by its name
        options = {"fallback_random": True, "cpp_wrapper": device.type == "cpu"}  # perf[cpp]
        cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        if "AMD" in cpu.get("cpu_name", "") and cpu.get("avx_vnni"):  # Zen 5
            options["post_grad_custom_pre_pass"] = ProductsByOneDNN()  # perf[onednn]
        policy = torch.compile(policy, fullgraph=True, options=options)
        update = torch.compile(update, fullgraph=True, options=options)
        update_with_actor = torch.compile(update_with_actor, fullgraph=True, options=options)
    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        act, update, update_with_actor = (CudaGraphModule(f, warmup=3) for f in (act, update, update_with_actor))
    acted = torch.cuda.Event() if on_gpu else torch.cpu.Event()  # perf[overlap] the latter does nothing

    progress = tqdm(total=total_steps * N, initial=first_step * N, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    losses = {}
    updates = saved.get("updates", 0)
    global_step = first_step * N
    marks = [(time.perf_counter(), global_step)]
    interval = args.checkpoint_interval or math.inf
    saved_at = global_step
    path = stopped_by = None  # the last checkpoint, if its save did not fail, and a signal
    for step in range(first_step, total_steps):
        if step == random_steps:
            marks = [(time.perf_counter(), global_step)]  # the clock starts anew with learning

        # act
        if step >= random_steps:
            act()
        else:
            explore()
        acted.record()

        # learn
        for _ in range(N if step >= random_steps else 0):
            updates += 1
            learn = update_with_actor if updates % args.policy_frequency == 0 else update
            losses |= dict(zip(SAC_LOSSES, learn()))
        acted.synchronize()  # perf[overlap] wait for act() alone: the GPU learns while the envs step

        # step and store; perf[ring] the row goes to the ring at the start of the next step, in act()
        env_action = host_action.numpy().reshape(N, *action_space.shape).clip(action_space.low, action_space.high)
        row_action[:] = env_action.reshape(N, action_dim)
        valid[:] = 1 - np.maximum(terminated, truncated)  # an env whose episode has ended only resets
        global_step += N
        for episode in step_envs(envs, global_step, env_action, obs, reward, terminated, truncated):
            writer.add_scalar("charts/episodic_return", episode["r"], global_step)
            writer.add_scalar("charts/episodic_length", episode["l"], global_step)
            last_returns.append(float(episode["r"]))

        # report
        if not (global_step % REPORT_INTERVAL < N or step + 1 == total_steps or signals):
            continue
        marks.append((time.perf_counter(), global_step))
        metrics = report(losses, parameters, [ring, row], last_returns, marks, writer, progress)
        if args.compile and "actor_loss" in losses and len(marks) > 2:
            torch.compiler.set_stance(skip_guard_eval_unsafe=True)  # perf[guards] both updates are compiled by now

        # save
        if signals or global_step // interval > saved_at // interval:
            kept = {"made_by": made_by, "step": step + 1, "global_step": global_step, "updates": updates}
            kept["last_returns"] = list(last_returns)
            kept["replay"] = ring[: step + 2].to("cpu", copy=True)  # a view would keep the whole ring
            kept |= {"row": row, "state": state}  # perf[graph]
            path = save_checkpoint(run_dir, kept)
            saved_at = global_step
            if signals:
                stopped_by = signals[0]
                break
            start_anew(step + 1)

    finish_run(args, run_dir, writer, {"device": str(device)}, metrics, GreedyActor(actor), torch.zeros(2, obs_dim))
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
