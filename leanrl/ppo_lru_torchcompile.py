# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "popgym==1.0.7", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0", "tensordict==0.15.3"]
# ///
"""Proximal policy optimization (PPO) with a memory: an LRU, compiled and captured as CUDA graphs.

    python leanrl/ppo_lru_torchcompile.py --env-id popgym:popgym-RepeatPreviousEasy-v0 --compile --cudagraphs

Papers: Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("eq."), Orvieto et al. 2023, arxiv.org/abs/2303.06349
Plain twin: ppo_lru.py. docs/performance.md explains each perf[name].
To learn the algorithm, read lru(), LRUAgent, gae(), ppo_loss() and train(). The rest is plumbing.
Shapes: T = num_steps, N = num_envs; O = size of an observation, A = number of actions, H = hidden_size.
How the memory is handled:
1. Nothing is padded: where an episode starts, a factor of 0 drops the memory (picture: docs/memory.md).
2. A minibatch holds whole rollouts of some envs, and starts from the state with which the policy acted.
3. Gradients reach to the start of the rollout, the memory further. Truncations are bootstrapped.
"""

import copy  # perf[host]
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
import torch.nn.functional as F
import tyro
from tensordict.nn import CudaGraphModule  # perf[capture]
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # perf[onednn]
from torch.func import functional_call, grad_and_value  # perf[graph]
from torch.utils._pytree import tree_leaves  # perf[graph]
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

PPO_LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")  # by ppo_loss
WARMUP_REPORTS = 3  # the first reports, slowed by compilation and cold caches, do not count for the speed


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; different seeds never share an env's random stream
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a specific device, e.g. cuda:1; overrides --cuda
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "popgym:popgym-RepeatPreviousEasy-v0"  # any Gymnasium id with vectors and discrete actions
    total_timesteps: int = 500_000  # env steps, summed over all envs
    learning_rate: float = 1e-3  # learning rate of Adam
    num_envs: int = 32  # number of envs, stepped one after the other
    num_steps: int = 128  # steps of each env per rollout, through which gradients flow
    hidden_size: int = 128  # width of each layer, and number of complex numbers that are remembered
    reward_scale: float = 10.0  # factor of each reward; choose it so that returns are near 10
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch, of whole envs; must divide --num-envs
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the policy ratio and, with --clip-vloss, the value may move
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # scale larger gradients down to this norm

    # perf[graph] perf[capture]
    compile: bool = False  # compile the update
    cudagraphs: bool = False  # capture an epoch of updates as a CUDA graph

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


def orthogonal(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Gives a layer orthogonal weights (Saxe et al. 2014) and zero biases, and returns it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


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


class LRUAgent(nn.Module):
    """A policy and a value function that remember, by a linear recurrent unit with a skip over it."""

    def __init__(self, input_dim: int, num_actions: int, hidden: int):
        super().__init__()
        self.recurrence = lru
        self.encoder = orthogonal(nn.Linear(input_dim, hidden))
        # radii from 0.5, which forgets within steps, to 0.999, which remembers a thousand (Orvieto et al., 3.4)
        radius_squared = torch.rand(hidden) * (0.999**2 - 0.5**2) + 0.5**2
        self.log_rate = nn.Parameter((-0.5 * radius_squared.log()).log())  # radius = exp(-exp(log_rate)) < 1
        self.angle = nn.Parameter(torch.rand(hidden) * math.pi)
        self.drive = orthogonal(nn.Linear(hidden, 2 * hidden), gain=1.0)
        self.readout = orthogonal(nn.Linear(2 * hidden, hidden), gain=1.0)
        self.actor = orthogonal(nn.Linear(hidden, num_actions), gain=0.01)  # so the first actions are almost uniform
        self.critic = orthogonal(nn.Linear(hidden, 1), gain=1.0)

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (T, N, O + A), state (N, 2H) -> logits (T, N, A), value (T, N), last state (N, 2H)."""
        keep = inputs[..., -self.actor.out_features :].sum(-1, keepdim=True)  # 0 in a first step
        encoded = self.encoder(inputs).tanh()
        log_radius = -self.log_rate.exp()
        scale = (-(2 * log_radius).expm1()).sqrt()  # keeps the state's variance near 1 (Orvieto et al., eq. 7)
        drive = self.drive(encoded) * torch.cat([scale, scale])
        states = self.recurrence(log_radius, self.angle, drive, keep, state)
        hidden = encoded + F.silu(self.readout(states))
        return self.actor(hidden), self.critic(hidden).squeeze(-1), states[-1]


class GreedyRecurrentAgent(nn.Module):
    """The most probable action. The memory (B, M), at first zeros: state and previous action."""

    def __init__(self, agent: nn.Module, first_action: int):
        super().__init__()
        self.agent = agent
        self.first_action = first_action

    def forward(self, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # (B, O), (B, M) -> (B,), (B, M)
        num_actions = self.agent.actor.out_features
        state, previous_action = memory.split([memory.shape[1] - num_actions, num_actions], -1)
        logits, _, state = self.agent(torch.cat([obs, previous_action], -1)[None], state)
        action = logits[0].argmax(-1)
        return action + self.first_action, torch.cat([state, F.one_hot(action, num_actions)], -1)


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
    T = args.num_steps
    N = args.num_envs
    batch_size = T * N
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if N % args.num_minibatches:
        fail(f"--num-minibatches must divide --num-envs ({N}): a minibatch holds whole envs.")
    envs = [make_env(args.env_id, gym.spaces.Discrete) for _ in range(N)]
    obs_dim = envs[0].observation_space.shape[0]
    num_actions = int(envs[0].action_space.n)
    first_action = int(envs[0].action_space.start)
    made_by = [Path(__file__).stem, args.env_id, T, N, obs_dim, num_actions, args.hidden_size]
    saved = load_checkpoint(args, made_by) if args.resume is not None else {}
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        print("nothing is left to do; raise --total-timesteps to go on.", file=sys.stderr)
        sys.exit(0)
    device = pick_device(args)
    if args.cudagraphs and device.type != "cuda":  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False
    run_dir, writer = start_run(args)

    inputs = np.zeros((N, obs_dim + num_actions), np.float32)  # an observation, and the previous action as one-hot
    obs = inputs[:, :obs_dim]
    for i, env in enumerate(envs):
        obs[i], _ = env.reset(seed=10_000 * args.seed + i)  # later resets continue the env's stream
    reward = np.zeros(N)
    terminated, truncated = np.zeros((2, N), bool)

    agent = LRUAgent(obs_dim + num_actions, num_actions, args.hidden_size).to(device).requires_grad_(False)
    parameters = dict(agent.named_parameters())
    adam = adam_state(parameters.values())  # perf[graph]
    lr = torch.zeros((), device=device)  # perf[tensor] a number would keep the value it was compiled with
    state = torch.zeros(N, 2 * args.hidden_size)  # perf[host]

    def start_anew(iteration: int):
        """Cuts the open episodes off and seeds anew by seed and iteration, so that a resumed run goes on alike."""
        seeds = np.random.SeedSequence([args.seed, iteration]).generate_state(N + 1).tolist()
        torch.manual_seed(seeds[N])
        for env, seed in zip(envs, seeds):
            env.reset(seed=seed)
        truncated[:] = True  # the next step resets every env, and with it the memory

    learned = {"parameters": parameters, "adam": adam}  # perf[graph] the state of a run is tensors alone
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(learned), tree_leaves(saved["state"]), strict=True):  # perf[graph]
            tensor.copy_(saved_tensor.view_as(tensor))
        start_anew(first_iteration)

    host_agent = copy.deepcopy(agent).cpu()  # perf[host] acts beside the envs: a GPU would be waited for
    agent.recurrence = lru_scan  # perf[scan]
    input_buffer = torch.zeros(T + 1, N, obs_dim + num_actions)  # perf[host]
    action_buffer = torch.zeros(T, N, dtype=torch.long)
    logprob_buffer = torch.zeros(T, N)
    value = torch.zeros(T + 1, N)
    batch = {}
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid

    def update(idx: Tensor) -> Tensor:
        """A gradient step on the rollouts of the envs idx; returns what to log."""
        minibatch = {name: x[:, idx] for name, x in batch.items()}

        def loss_of(parameters: dict[str, Tensor]):
            logits, value, _ = functional_call(agent, parameters, (minibatch["inputs"], minibatch["first_state"][0]))
            logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
            return ppo_loss(logprob, entropy, value, minibatch, args)

        grads, (_, losses) = grad_and_value(loss_of, has_aux=True)(parameters)  # perf[graph]
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
        adam_(parameters.values(), [grad * scale for grad in grads.values()], *adam, lr, eps=1e-5)
        return losses

    def update_epoch(permutation: Tensor) -> Tensor:  # perf[capture] all updates of an epoch in one graph
        for idx in permutation.split(N // args.num_minibatches):
            losses = update(idx)
        return losses

    if args.compile:  # perf[graph]; update_epoch() calls the compiled update from here on
        options = {"cpp_wrapper": device.type == "cpu", "cpp.use_decompose_tanh": True}  # perf[cpp] perf[tanh]
        cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        if "AMD" in cpu.get("cpu_name", "") and cpu.get("avx_vnni"):  # Zen 5
            options["post_grad_custom_pre_pass"] = ProductsByOneDNN()  # perf[onednn]
        update = torch.compile(update, fullgraph=True, options=options)
    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        update_epoch = CudaGraphModule(update_epoch, warmup=3)

    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    marks = [(time.perf_counter(), global_step)]
    interval = args.checkpoint_interval or math.inf
    saved_at = global_step
    path = stopped_by = None  # the last checkpoint, if its save did not fail, and a signal
    for iteration in range(first_iteration, num_iterations):
        noise = -torch.empty(T, N, num_actions, device=device).exponential_().log().cpu()  # Gumbel noise
        first_state = state
        for t in range(T):
            # act
            input_buffer[t] = torch.as_tensor(inputs)
            with torch.no_grad():
                logits, value[t], state = host_agent(input_buffer[t : t + 1], state)
                action_buffer[t] = (logits[0] + noise[t]).argmax(-1)  # this samples from softmax(logits)
                logprob_buffer[t], _ = categorical_logprob_entropy(action_buffer[t], logits[0])
            env_action = action_buffer[t].numpy()  # perf[host] no sync

            # step and store
            valid = ~(terminated | truncated)  # an env whose episode has ended only resets
            global_step += N
            for episode in step_envs(envs, global_step, first_action + env_action, obs, reward, terminated, truncated):
                writer.add_scalar("charts/episodic_return", episode["r"], global_step)
                writer.add_scalar("charts/episodic_length", episode["l"], global_step)
                last_returns.append(float(episode["r"]))
            inputs[:, obs_dim:] = np.eye(num_actions)[env_action] * valid[:, None]  # no action precedes an episode
            env_buffer[:, t] = args.reward_scale * reward, terminated, terminated | truncated, valid

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer)
        input_buffer[T] = torch.as_tensor(inputs)
        value[T] = host_agent(input_buffer[T:], state)[1]
        advantage = gae(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"inputs": input_buffer[:T], "first_state": first_state[None]}
        rollout |= {"action": action_buffer, "logprob": logprob_buffer, "value": value[:T]}
        rollout |= {"advantage": advantage, "return": advantage + value[:T], "valid": valid_buffer}
        for name, x in rollout.items():  # perf[capture] a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, torch.empty(x.shape, dtype=x.dtype, device=device)).copy_(x)
        remaining = 1 - iteration / num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * remaining
        lr.fill_(learning_rate)  # perf[tensor]
        for _ in range(args.update_epochs):
            losses = dict(zip(PPO_LOSSES, update_epoch(torch.randperm(N, device=device))))
        host_agent.load_state_dict(agent.state_dict())  # perf[host]

        # report
        losses["explained_variance"] = explained_variance(batch)
        marks.append((time.perf_counter(), global_step))
        metrics = report(losses, parameters, [input_buffer, reward_buffer], last_returns, marks, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        if args.compile:  # perf[guards] all is compiled by now: skip the guards
            torch.compiler.set_stance(skip_guard_eval_unsafe=True)

        # save
        if signals or global_step // interval > saved_at // interval:
            kept = {"made_by": made_by, "iteration": iteration + 1, "global_step": global_step}
            kept["last_returns"] = list(last_returns)
            kept["state"] = learned  # perf[graph]
            path = save_checkpoint(run_dir, kept)
            saved_at = global_step
            if signals:
                stopped_by = signals[0]
                break
            start_anew(iteration + 1)

    policy = GreedyRecurrentAgent(host_agent, first_action)  # perf[host]
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
    except torch.OutOfMemoryError as error:
        sys.exit(f"\nerror: too little memory on the GPU; lower --num-envs or --num-steps. {error!s:.300}")
