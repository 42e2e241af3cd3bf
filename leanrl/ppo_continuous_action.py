# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for continuous actions, in plain PyTorch.

    python leanrl/ppo_continuous_action.py --env-id HalfCheetah-v4 --seed 1

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, whose equations are cited below as "eq.".
Fast twin: ppo_continuous_action_torchcompile.py. `diff -u` the two files to see what makes it faster.
To learn the algorithm, read Agent, gae(), ppo_loss() and train(). The rest is plumbing.
Shapes: T = num_steps, N = num_envs, B = T * N, the rows of a rollout; O, A = sizes of an observation and an action.
Differences from CleanRL's ppo_continuous_action.py:
1. Values are bootstrapped through a truncation; only a termination ends the return.
2. The step in which an env resets itself is masked out of the losses and the statistics of rewards.
3. All envs share one normalizer of observations and one of rewards.
"""

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
import tyro
from torch import Tensor, nn
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

    env_id: str = "HalfCheetah-v4"  # any Gymnasium id with a Box of actions, also my_package:MyEnv-v0
    total_timesteps: int = 1_000_000  # env steps, summed over all envs
    learning_rate: float = 3e-4  # learning rate of Adam
    num_envs: int = 1  # number of envs, stepped one after the other
    num_steps: int = 2048  # steps of each env per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # minibatches per epoch; must divide --num-envs times --num-steps
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # how far the policy ratio and, with --clip-vloss, the value may move
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # scale larger gradients down to this norm
    target_kl: float | None = None  # skip the other epochs once the last minibatch of one exceeds this KL

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


class RunningMeanStd:
    """Running mean and standard deviation of rows, in float64 (Welford 1962, for several rows at a time)."""

    def __init__(self, *shape: int):
        self.count = 1e-4  # the prior of Gymnasium's wrappers: almost no weight on mean 0 and variance 1
        self.mean = np.zeros(shape)
        self.std = np.ones(shape)
        self.squares = np.full(shape, self.count)  # sum of squared deviations from the mean

    def update(self, x: np.ndarray):  # (rows, *shape)
        deviation = x - self.mean
        self.count += len(x)
        self.mean += np.add.reduce(deviation) / self.count
        self.squares += np.add.reduce(deviation * (x - self.mean))
        self.std = np.sqrt(self.squares / self.count + 1e-8)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Tensor]):
        vars(self).update({name: value.numpy() for name, value in state.items()})


def normalize_obs(stats: RunningMeanStd, obs: np.ndarray) -> np.ndarray:
    """Adds observations (N, O) to the statistics and scales them, as Gymnasium's NormalizeObservation; clips at 10."""
    stats.update(obs)
    return ((obs - stats.mean) / stats.std).clip(-10, 10)


def normalize_reward(stats: RunningMeanStd, returns, reward, terminated, valid, gamma: float) -> np.ndarray:
    """Scales rewards (N,) by the std of their discounted sum, as Gymnasium's NormalizeReward; clips at 10."""
    np.copyto(returns, returns * gamma * (1 - terminated) + reward, where=valid)
    stats.update(returns[valid])
    return (reward / stats.std).clip(-10, 10)


def mlp(in_dim: int, out_dim: int, out_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, with orthogonal weights and zero biases."""
    layers = [nn.Linear(in_dim, 64), nn.Linear(64, 64), nn.Linear(64, out_dim)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, out_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """A Gaussian policy whose standard deviation does not depend on the state, and a value function."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.critic = mlp(obs_dim, 1, out_gain=1.0)
        self.actor_mean = mlp(obs_dim, action_dim, out_gain=0.01)  # so the first actions are near zero
        self.actor_logstd = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (.., O) -> mean (.., A), logstd (A,), value (..)
        return self.actor_mean(obs), self.actor_logstd, self.critic(obs).squeeze(-1)


class NormalizedActor(nn.Module):
    """The mean of the policy, with the normalization of observations inside."""

    def __init__(self, agent: Agent, stats: RunningMeanStd, low: np.ndarray, high: np.ndarray):
        super().__init__()
        self.actor_mean = agent.actor_mean
        buffers = {"mean": stats.mean, "std": stats.std, "low": low.ravel(), "high": high.ravel()}
        for name, value in buffers.items():
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float32))

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B, A)
        return self.actor_mean(((obs - self.mean) / self.std).clip(-10, 10)).clip(self.low, self.high)


def gaussian_logprob_entropy(action: Tensor, mean: Tensor, logstd: Tensor) -> tuple[Tensor, Tensor]:
    """Log-density (..) of actions (.., A) under a diagonal Gaussian, and its entropy () in nats."""
    half_log_2pi = 0.5 * math.log(2 * math.pi)
    logprob = -0.5 * ((action - mean) / logstd.exp()) ** 2 - logstd - half_log_2pi
    return logprob.sum(-1), (logstd + half_log_2pi + 0.5).sum()


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
    T = args.num_steps
    N = args.num_envs
    batch_size = T * N
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if minibatch_size < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    envs = [make_env(args.env_id, gym.spaces.Box) for _ in range(N)]
    obs_dim = envs[0].observation_space.shape[0]
    action_space = envs[0].action_space
    action_dim = math.prod(action_space.shape)
    made_by = [Path(__file__).stem, args.env_id, T, N, obs_dim, action_dim]
    saved = load_checkpoint(args, made_by) if args.resume is not None else {}
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        print("nothing is left to do; raise --total-timesteps to go on.", file=sys.stderr)
        sys.exit(0)
    device = pick_device(args)
    run_dir, writer = start_run(args)
    torch.set_num_threads(1)  # for matrices this small, a second thread brings nothing

    raw_obs = np.zeros((N, obs_dim))
    for i, env in enumerate(envs):
        raw_obs[i], _ = env.reset(seed=10_000 * args.seed + i)  # later resets continue the env's stream
    reward, discounted_return = np.zeros((2, N))
    terminated, truncated = np.zeros((2, N), bool)
    obs_stats = RunningMeanStd(obs_dim)
    return_stats = RunningMeanStd()
    obs = torch.as_tensor(normalize_obs(obs_stats, raw_obs), dtype=torch.float32, device=device)

    agent = Agent(obs_dim, action_dim).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)

    def start_anew(iteration: int):
        """Cuts the open episodes off and seeds anew by seed and iteration, so that a resumed run goes on alike."""
        seeds = np.random.SeedSequence([args.seed, iteration]).generate_state(N + 1).tolist()
        torch.manual_seed(seeds[N])
        for env, seed in zip(envs, seeds):
            env.reset(seed=seed)
        truncated[:] = True  # the next step resets every env

    parameters = dict(agent.named_parameters())
    learners = {"agent": agent, "optimizer": optimizer, "obs_stats": obs_stats, "return_stats": return_stats}
    if saved:
        for name, learner in learners.items():
            learner.load_state_dict(saved[name])
        discounted_return[:] = saved["discounted_return"].numpy()
        start_anew(first_iteration)

    obs_buffer = torch.zeros(T, N, obs_dim, device=device)
    action_buffer = torch.zeros(T, N, action_dim, device=device)
    logprob_buffer = torch.zeros(T, N, device=device)
    value = torch.zeros(T + 1, N, device=device)
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full

    def update(idx: Tensor) -> Tensor:
        """A gradient step on the rows idx of the batch; returns what to log."""
        minibatch = {name: x[idx] for name, x in batch.items()}
        mean, logstd, value = agent(minibatch["obs"])
        logprob, entropy = gaussian_logprob_entropy(minibatch["action"], mean, logstd)
        loss, losses = ppo_loss(logprob, entropy, value, minibatch, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        return losses

    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    marks = [(time.perf_counter(), global_step)]
    interval = args.checkpoint_interval or math.inf
    saved_at = global_step
    path = stopped_by = None  # the last checkpoint, if its save did not fail, and a signal
    for iteration in range(first_iteration, num_iterations):
        noise = torch.randn(T, N, action_dim, device=device)
        for t in range(T):
            # act
            with torch.no_grad():
                mean, logstd, value[t] = agent(obs)
                action = mean + logstd.exp() * noise[t]
                logprob_buffer[t], _ = gaussian_logprob_entropy(action, mean, logstd)
            obs_buffer[t] = obs
            action_buffer[t] = action
            env_action = action.cpu().numpy()  # waits for the GPU; so does the copy of the observation
            env_action = env_action.reshape(N, *action_space.shape).clip(action_space.low, action_space.high)

            # step and store
            valid = ~(terminated | truncated)  # an env whose episode has ended only resets
            global_step += N
            for episode in step_envs(envs, global_step, env_action, raw_obs, reward, terminated, truncated):
                writer.add_scalar("charts/episodic_return", episode["r"], global_step)
                writer.add_scalar("charts/episodic_length", episode["l"], global_step)
                last_returns.append(float(episode["r"]))
            obs = torch.as_tensor(normalize_obs(obs_stats, raw_obs), dtype=torch.float32, device=device)
            done = terminated | truncated
            scaled_reward = normalize_reward(return_stats, discounted_return, reward, terminated, valid, args.gamma)
            env_buffer[:, t] = scaled_reward, terminated, done, valid

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer, device=device)
        value[T] = agent(obs)[2].detach()
        advantage = gae(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"obs": obs_buffer, "action": action_buffer, "logprob": logprob_buffer, "value": value[:T]}
        rollout |= {"advantage": advantage, "return": advantage + value[:T], "valid": valid_buffer}
        batch = {name: x.flatten(0, 1) for name, x in rollout.items()}
        remaining = 1 - iteration / num_iterations if args.anneal_lr else 1.0
        learning_rate = args.learning_rate * remaining
        optimizer.param_groups[0]["lr"] = learning_rate
        for _ in range(args.update_epochs):
            for idx in torch.randperm(batch_size, device=device).split(minibatch_size):
                losses = dict(zip(PPO_LOSSES, update(idx)))
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break

        # report
        losses["explained_variance"] = explained_variance(batch)
        marks.append((time.perf_counter(), global_step))
        metrics = report(losses, parameters, [batch["obs"], reward_buffer], last_returns, marks, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)

        # save
        if signals or global_step // interval > saved_at // interval:
            kept = {"made_by": made_by, "iteration": iteration + 1, "global_step": global_step}
            kept |= {"last_returns": list(last_returns), "discounted_return": torch.as_tensor(discounted_return)}
            kept |= {name: learner.state_dict() for name, learner in learners.items()}
            path = save_checkpoint(run_dir, kept)
            saved_at = global_step
            if signals:
                stopped_by = signals[0]
                break
            start_anew(iteration + 1)

    policy = NormalizedActor(agent, obs_stats, action_space.low, action_space.high)
    finish_run(args, run_dir, writer, {"device": str(device)}, metrics, policy, torch.zeros(2, obs_dim))
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
