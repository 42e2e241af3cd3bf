# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "envpool==1.2.5", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0", "tensordict==0.15.3"]
# ///
"""Proximal policy optimization (PPO) on Atari games through EnvPool, data parallel on several GPUs.

    torchrun --standalone --nproc-per-node=2 leanrl/ppo_atari_multigpu.py --env-id Breakout-v5 --compile

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, whose equations are cited below as "eq.".
Each rank (process) has its own envs and, if there are any, its own GPU. Gradients are averaged over the ranks,
so all ranks hold equal parameters. See docs/multigpu.md, also for several nodes.
To learn the algorithm, read AtariAgent, gae(), ppo_loss() and train(). The rest is plumbing.
Shapes: T = num_steps, N = local_num_envs, B = T * N of a rank, A = number of actions.
A rollout has the shape (T, N, ...); flattened to (B, ...) it is the batch.
Differences from CleanRL: those of ppo_atari_envpool.py; means are over the minibatches of all ranks together.
"""

import atexit
import difflib
import json
import logging
import math
import os
import re
import signal
import sys
import time
import zipfile
from collections import deque
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads OpenMP: idle threads spin briefly, then sleep
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
import numpy as np
import torch
import torch.distributed as dist
import tyro
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

PPO_LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")  # by ppo_loss
WARMUP_REPORTS = 3  # the first reports, slowed by compilation and cold caches, do not count for the speed


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; different seeds never share an env's random stream
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use one GPU per rank if there are any
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact
    backend: Literal["nccl", "gloo"] | None = None  # how ranks communicate; default: nccl on GPUs, gloo on CPUs
    timeout: int = 300  # seconds to wait for another rank before giving up

    env_id: str = "Breakout-v5"  # any Atari id of EnvPool
    total_timesteps: int = 10_000_000  # env steps (of 4 frames each), summed over all envs of all ranks
    learning_rate: float = 2.5e-4  # learning rate of Adam
    local_num_envs: int = 8  # number of envs of each rank, stepped in parallel by EnvPool's threads
    num_steps: int = 128  # steps of each env per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch; must divide --local-num-envs times --num-steps
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.1  # how far the policy ratio and, with --clip-vloss, the value may move
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # scale larger gradients down to this norm
    target_kl: float | None = None  # skip the other epochs once the last minibatch of one exceeds this KL

    compile: bool = False  # compile the network and the loss
    ddp: bool = True  # reduce gradients while others are computed; --no-ddp: all at once, afterwards
    cudagraphs: bool = False  # capture policy, gradients and optimizer step as CUDA graphs, without DDP

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


def make_envs(env_id: str, seeds: list[int], num_threads: int = 0):
    """Makes EnvPool envs of an Atari game, one per seed; with 0 threads, one per env, and at most one per core.

    A lost life ends an episode, and rewards are clipped to -1, 0 or 1. The unclipped reward is in info["reward"].
    """
    options = {"episodic_life": True, "reward_clip": True, "num_threads": num_threads}
    try:
        import envpool  # here, so that its absence gets a sentence
    except ImportError:
        fail("EnvPool is missing; pip install envpool==1.2.5")
    try:
        return envpool.make(env_id, env_type="gymnasium", num_envs=len(seeds), env_seed=seeds, **options)
    except (AssertionError, TypeError):
        games = [name for name, spec in envpool.registration.registry.specs.items() if spec[0] == "envpool.atari"]
        near = difflib.get_close_matches(env_id, games, cutoff=0)
        fail(f"{env_id!r} is no Atari game; try {', '.join(near)}.")


def games_that_end(info: dict, truncated: np.ndarray, scores: np.ndarray) -> list[dict]:
    """Adds the unclipped rewards of a step to the running scores (N,), and returns the games that ended.

    A game is a dict with its return "r" and its length "l". Its score starts anew at 0.
    """
    scores += info["reward"]
    over = np.flatnonzero(info["terminated"] | truncated)  # terminated: the last life is lost
    games = [{"r": scores[i], "l": info["elapsed_step"][i]} for i in over]
    scores[over] = 0
    return games


def orthogonal(layer: nn.Module, gain: float = 2**0.5) -> nn.Module:
    """Gives a layer orthogonal weights (Saxe et al. 2014) and zero biases, and returns it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class AtariAgent(nn.Module):
    """A policy and a value function on the convolutions of Mnih et al. 2015; they see four frames."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.trunk = nn.Sequential(
            *(orthogonal(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU()),
            *(orthogonal(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()),
            *(orthogonal(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(), nn.Flatten()),
            *(orthogonal(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
        )
        self.actor = orthogonal(nn.Linear(512, num_actions), gain=0.01)  # so the first actions are almost uniform
        self.critic = orthogonal(nn.Linear(512, 1), gain=1.0)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:  # uint8 (B, 4, 84, 84) -> logits (B, A), value (B,)
        hidden = self.trunk(frames / 255.0)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class GreedyAgent(nn.Module):
    """The most probable action."""

    def __init__(self, agent: AtariAgent):
        super().__init__()
        self.agent = agent

    def forward(self, frames: Tensor) -> Tensor:  # uint8 (B, 4, 84, 84) -> (B,)
        logits, _ = self.agent(frames)
        return logits.argmax(-1)


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


def start_rank(args: Args, rank: int) -> tuple[torch.device, Path, SummaryWriter | SimpleNamespace]:
    """Joins the other ranks, as torchrun's variables say; rank 0 alone makes the run folder and logs."""
    if args.timeout > 10**9:
        fail(f"--timeout must be at most {10**9}, not {args.timeout}.")
    local_rank = int(os.environ["LOCAL_RANK"])  # among the processes of this node
    gpus = torch.cuda.device_count() if args.cuda else 0
    if local_rank >= gpus and (gpus or args.backend == "nccl"):
        fail(f"local rank {local_rank} needs a GPU; there are {gpus}: start fewer, or say --no-cuda --backend=gloo.")
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    run_dir = Path("runs", re.sub("[/:]", "_", run_name))
    writer = SimpleNamespace(**dict.fromkeys(("add_scalar", "add_text", "close"), lambda *_: None))
    try:
        if gpus:
            torch.cuda.set_device(device)
        if rank == 0:
            if args.track:
                import wandb

                names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
                wandb.init(**names, config=asdict(args), sync_tensorboard=True, save_code=False)
            run_dir.mkdir(parents=True)  # fails if another run has it
            writer = SummaryWriter(run_dir, flush_secs=10)  # what is not flushed is lost if a rank dies
            (run_dir / "summary.json").write_text(json.dumps({"args": asdict(args)}, indent=2))
    except Exception as error:
        fail(f"cannot use {device}, the folder {run_dir} or wandb: {error!s:.300}")
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=args.timeout)))
    # after a restart by torchrun, the store still holds the addresses of the ranks before
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    group = {"store": store, "rank": rank, "world_size": world_size, "timeout": timedelta(seconds=args.timeout)}
    dist.init_process_group(args.backend or ("nccl" if gpus else "gloo"), **group)
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)  # also after sys.exit
    torch.set_flush_denormal(True)  # Adam's moments of idle weights decay to denormals, which are slow on a CPU
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.tf32
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    return device, run_dir, writer


def mean_over_ranks(x: Tensor) -> Tensor:
    """The mean of a tensor over all ranks, equal on each of them."""
    x = x / dist.get_world_size()
    dist.all_reduce(x)
    return x


def check_equal(parameters: list[Tensor], rank: int):
    """Ends the program, on every rank, if the parameters of a rank differ from those of most ranks."""
    checksum = [f(p.double()) for p in parameters for f in (torch.sum, torch.norm)]
    bits = torch.stack(checksum).view(torch.long).tolist()  # integers, since NaN is not equal to NaN
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, bits)
    most = max(of_ranks, key=of_ranks.count)
    others = ", ".join(str(r) for r, theirs in enumerate(of_ranks) if theirs != most)
    if others:
        sys.exit(f"error: rank {rank} sees that the parameters of rank {others} differ from those of the others.")


def advantage_moments(batch: dict[str, Tensor], minibatches: Tensor) -> Tensor:
    """Count, mean and standard deviation (M, 3) of the advantages in minibatches (M, b), over the rows of all ranks."""
    valid = batch["valid"][minibatches].double()
    advantage = batch["advantage"][minibatches].double()
    sums = torch.stack([valid.sum(-1), (valid * advantage).sum(-1), (valid * advantage**2).sum(-1)], -1)
    dist.all_reduce(sums)
    count = sums[:, 0].clamp(min=2)
    mean = sums[:, 1] / count
    variance = (sums[:, 2] - count * mean**2).clamp(min=0) / (count - 1)
    return torch.stack([count, mean, variance.sqrt()], -1).float()


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
    """Trains an agent and returns the final metrics; after a signal all ranks save and exit instead."""
    check_numbers(args)
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        fail(f"start it with torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    rank = int(os.environ["RANK"])  # among all processes of all nodes
    world_size = int(os.environ["WORLD_SIZE"])
    T = args.num_steps
    N = args.local_num_envs
    batch_size = T * N
    minibatch_size = batch_size // args.num_minibatches
    iteration_size = batch_size * world_size
    num_iterations = args.total_timesteps // iteration_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {iteration_size}, a rollout of all ranks.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    if N * world_size > 10_000:
        fail("more than 10,000 envs would share random streams with those of other seeds.")
    seeds = [(10_000 * args.seed + N * rank + i) % 2**31 for i in range(N)]  # of this rank's envs
    envs = make_envs(args.env_id, seeds)
    made_by = [Path(__file__).stem, args.env_id, T, N, world_size]
    saved = load_checkpoint(args, made_by) if args.resume is not None else {}
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        print("nothing is left to do; raise --total-timesteps to go on.", file=sys.stderr)
        sys.exit(0)
    device, run_dir, writer = start_rank(args, rank)
    num_actions = int(envs.action_space.n)
    obs = torch.from_numpy(envs.reset()[0])
    obs = obs.pin_memory() if device.type == "cuda" else obs  # copies from and to pinned memory do not wait
    env_action = torch.zeros(N, dtype=torch.long, pin_memory=device.type == "cuda")
    done = np.zeros(N, bool)
    scores = np.zeros(N)
    torch.manual_seed(args.seed)  # every rank starts with the same parameters
    agent = AtariAgent(num_actions).to(device, memory_format=torch.channels_last)
    torch.manual_seed((10_000 * args.seed + rank) % 2**63)  # but draws its own noise and minibatches
    capture = args.cudagraphs and device.type == "cuda"
    if args.cudagraphs and not capture and rank == 0:
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
    loss_of = torch.compile(ppo_loss, dynamic=False) if args.compile else ppo_loss
    if args.compile:
        agent.forward = torch.compile(agent.forward, dynamic=False)
    parameters = dict(agent.named_parameters())
    one_bucket = capture or not args.ddp  # a graph cannot contain DDP's reductions
    model = agent if one_bucket else DistributedDataParallel(agent, gradient_as_bucket_view=True)
    if one_bucket:
        bucket = torch.zeros(sum(p.numel() for p in agent.parameters()), device=device)
        for p, part in zip(agent.parameters(), bucket.split([p.numel() for p in agent.parameters()])):
            p.grad = part.as_strided(p.shape, p.stride())  # a view: gradients are computed in the bucket
            dist.broadcast(p.data, src=0)  # as DDP does
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5, fused=True, capturable=capture)
    clear_gradients = bucket.zero_ if one_bucket else optimizer.zero_grad

    def start_anew(iteration: int):
        """Makes the envs anew and seeds anew by seed, iteration and rank, so that a resumed run goes on alike."""
        nonlocal envs
        seeds = (np.random.SeedSequence([args.seed, iteration, rank]).generate_state(N + 1) // 2).tolist()
        torch.manual_seed(seeds[N])
        done[:] = False
        scores[:] = 0
        envs.close()
        envs = make_envs(args.env_id, seeds[:N])
        obs.numpy()[:], _ = envs.reset()

    if saved:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["lr"] = lr  # load_state_dict() has put another tensor there
        optimizer.param_groups[0]["capturable"] = capture
        start_anew(first_iteration)

    channels, height, width = obs.shape[1:]
    obs_buffer = torch.zeros(T, N, height, width, channels, dtype=torch.uint8, device=device)
    obs_buffer = obs_buffer.permute(0, 1, 4, 2, 3)  # the bytes of a pixel lie together, as the convolutions read them
    action_buffer = torch.zeros(T, N, dtype=torch.long, device=device)
    logprob_buffer = torch.zeros(T, N, device=device)
    value = torch.zeros(T + 1, N, device=device)
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full
    batch = {}
    local_args = replace(args, norm_adv=False)  # advantages are normalized over all ranks, before the loss

    @torch.no_grad()
    def policy(frames: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Samples actions; returns them with their log-probabilities, and the values of the frames."""
        logits, value = agent(frames)
        action = (logits + noise).argmax(-1)  # with Gumbel noise, this samples from softmax(logits)
        logprob, _ = categorical_logprob_entropy(action, logits)
        return action, logprob, value

    def gradient(idx: Tensor, moments: Tensor) -> Tensor:
        """Adds the gradient of this rank's share of the loss over the minibatches of all ranks."""
        minibatch = {name: x[idx] for name, x in batch.items()}
        count, mean, deviation = moments
        if args.norm_adv:
            minibatch["advantage"] = (minibatch["advantage"] - mean) / (deviation + 1e-8)
        logits, value = model(minibatch["obs"])
        logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
        local_count = minibatch["valid"].sum().clamp(min=2)
        loss, losses = loss_of(logprob, entropy, value, minibatch, local_args)
        # the average over ranks of this is the mean over the rows of all ranks
        (loss * world_size * local_count / count).backward()
        return losses

    def step():
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()

    if capture:
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        policy = CudaGraphModule(policy, warmup=3)
        gradient = CudaGraphModule(gradient, warmup=3)
        step = CudaGraphModule(step, warmup=3)

    def update(idx: Tensor, moments: Tensor) -> Tensor:
        """A gradient step of all ranks, on the rows idx of the batch of this one; returns what to log."""
        clear_gradients()
        losses = gradient(idx, moments)  # under DDP, its backward pass averages over the ranks
        if one_bucket:
            dist.all_reduce(bucket.div_(world_size))
        step()
        return losses

    ran = {"device": str(device), "backend": dist.get_backend(), "ddp": not one_bucket, "world_size": world_size}
    ran |= {"compile": args.compile, "cudagraphs": capture, "num_envs": N * world_size, "batch_size": iteration_size}
    ran |= {"minibatch_size": minibatch_size * world_size, "num_iterations": num_iterations}
    writer.add_text("args", json.dumps({"ran": ran, "args": asdict(args)}, indent=2))
    global_step = first_iteration * iteration_size
    progress = tqdm(total=num_iterations * iteration_size, initial=global_step, unit="step", disable=rank > 0)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    marks = [(time.perf_counter(), global_step)]
    interval = args.checkpoint_interval or math.inf
    saved_at = global_step
    for iteration in range(first_iteration, num_iterations):
        noise = -torch.empty(T, N, num_actions, device=device).exponential_().log()  # Gumbel noise
        games = []
        for t in range(T):
            # act
            obs_buffer[t].copy_(obs, non_blocking=True)
            action_buffer[t], logprob_buffer[t], value[t] = policy(obs_buffer[t], noise[t])
            env_action.copy_(action_buffer[t], non_blocking=True)
            torch.get_device_module(device).synchronize()  # the one sync of a step; on a CPU, it does nothing

            # step and store
            valid = ~done  # an env whose episode has ended only resets
            global_step += N * world_size
            obs.numpy()[:], reward, terminated, truncated, info = envs.step(env_action.numpy())
            games += [(global_step, game["r"], game["l"]) for game in games_that_end(info, truncated, scores)]
            done[:] = terminated | truncated
            env_buffer[:, t] = reward, terminated, done, valid

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer, device=device)
        last_obs = obs.to(device, non_blocking=True, memory_format=torch.channels_last)
        _, _, value[T] = policy(last_obs, noise[0])
        advantage = gae(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"obs": obs_buffer, "action": action_buffer, "logprob": logprob_buffer, "value": value[:T]}
        rollout |= {"advantage": advantage, "return": advantage + value[:T], "valid": valid_buffer}
        for name, x in rollout.items():  # a graph reads fixed addresses: those of the first rollout
            batch.setdefault(name, x.flatten(0, 1)).copy_(x.flatten(0, 1))
        remaining = 1 - iteration / num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * remaining
        lr.fill_(learning_rate)
        for _ in range(args.update_epochs):
            minibatches = torch.randperm(batch_size, device=device).view(args.num_minibatches, minibatch_size)
            for idx, moments in zip(minibatches, advantage_moments(batch, minibatches)):
                losses = dict(zip(PPO_LOSSES, update(idx, moments)))
            # decided by all ranks: one that left alone would keep the others waiting
            if args.target_kl is not None and mean_over_ranks(losses["approx_kl"]) > args.target_kl:
                break

        # report
        losses["explained_variance"] = explained_variance(batch)
        losses["stopped"] = torch.tensor(float(len(signals) > 0), device=device)  # by a signal to any rank
        losses = dict(zip(losses, mean_over_ranks(torch.stack(list(losses.values())))))  # so all stop or none
        games_of_ranks = [None] * world_size
        dist.all_gather_object(games_of_ranks, games)
        for step_of_game, score, length in sorted(game for games in games_of_ranks for game in games):
            writer.add_scalar("charts/episodic_return", score, step_of_game)
            writer.add_scalar("charts/episodic_length", length, step_of_game)
            last_returns.append(float(score))
        stopped = losses.pop("stopped") > 0
        marks.append((time.perf_counter(), global_step))
        metrics = report(losses, parameters, [reward_buffer], last_returns, marks, writer, progress)
        check_equal(list(parameters.values()), rank)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)

        # save
        if stopped or global_step // interval > saved_at // interval:
            kept = {"made_by": made_by, "iteration": iteration + 1, "global_step": global_step}
            kept["last_returns"] = list(last_returns)
            kept |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
            if rank == 0:
                save_checkpoint(run_dir, kept)
            saved_at = global_step
            if stopped:
                break
            start_anew(iteration + 1)

    if rank == 0:
        network = AtariAgent(num_actions)  # not compiled
        network.load_state_dict(agent.state_dict())
        frames = torch.zeros(2, *obs.shape[1:], dtype=torch.uint8)
        finish_run(args, run_dir, writer, {"ran": ran}, metrics, GreedyAgent(network), frames)
    progress.close()
    envs.close()
    model = policy = gradient = step = None  # graphs and DDP end before the group, or Gloo's threads would live on
    dist.destroy_process_group()
    if stopped and signals:
        print("to go on: start it again with --resume auto", file=sys.stderr)
        sys.exit(128 + signals[0])
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
    except Exception as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            print(f"\nerror: rank {os.environ['RANK']} lost the others:", *str(error).split(), file=sys.stderr)
        elif isinstance(error, torch.OutOfMemoryError):
            advice = "lower --local-num-envs or --num-steps"
            print(f"\nerror: too little memory on the GPU; {advice}. {error!s:.300}", file=sys.stderr)
        else:
            sys.excepthook(*sys.exc_info())
        os._exit(1)  # at once: an orderly end would wait for threads that wait for the others
