# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""Proximal policy optimization (PPO) for continuous actions, in plain PyTorch.

    python leanrl/ppo_continuous_action.py --env-id HalfCheetah-v4 --seed 1

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, whose equations are cited below as "eq.".
Fast twin: ppo_continuous_action_torchcompile.py. `diff -u` the two files to see what makes it faster.
Shapes: T = num_steps, N = num_envs, B = T * N, the rows of a rollout; O, A = sizes of an observation and an action.
Differences from CleanRL's ppo_continuous_action.py:
1. Values are bootstrapped through a truncation; only a termination ends the return.
2. A step that only resets an env is masked out of the losses and the statistics of rewards.
3. All envs share one normalizer of observations and one of rewards, which start without a prior.
4. The policy's actions are scaled, so that -1 .. 1 spans the bounds of the env, and then clipped.
"""

import atexit
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

PPO_LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")  # by ppo_loss


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; env seeds of two runs overlap only by chance
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "HalfCheetah-v4"  # any Gymnasium id with a Box of actions, also my_package:MyEnv-v0
    env_kwargs: str = "{}"  # settings of the env as JSON, e.g. '{"forward_reward_weight": 2}'
    total_timesteps: int = 1_000_000  # env steps, summed over all envs, in whole rollouts
    learning_rate: float = 3e-4  # learning rate of Adam
    num_envs: int = 1  # number of envs
    async_envs: bool = False  # step envs at the same time, each in a process of its own; for slow simulators
    num_steps: int = 2048  # steps of each env per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 32  # minibatches per epoch; must divide --num-envs times --num-steps
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # clip range of the policy ratio and, with --clip-vloss, of the value
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the norm of the gradient to this value
    target_kl: float | None = None  # stop a rollout's epochs once the last minibatch of an epoch exceeds this KL

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


def action_scale(space: gym.spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Center and scale, which map -1 .. 1 to the bounds of a Box; 0 and 1 in dimensions that lack a bound."""
    is_bounded = (space.low > -1e30) & (space.high < 1e30)  # some envs write the largest float for no bound
    low = np.where(is_bounded, space.low, -1.0)
    high = np.where(is_bounded, space.high, 1.0)
    return (high + low) / 2, (high - low) / 2


def update_stats(stats: np.ndarray, x: np.ndarray):
    """Adds rows x (n, O) to statistics (4, O): their count, mean, squared deviations and std (Welford 1962)."""
    count, mean, squares, std = stats  # in float64
    count += len(x)
    deviation = x - mean
    mean += np.add.reduce(deviation) / count
    squares += np.add.reduce(deviation * (x - mean))
    std[:] = np.sqrt(squares / count + 1e-8)


def normalize_obs(stats: np.ndarray, obs: np.ndarray) -> np.ndarray:
    """Adds observations (N, O) to the statistics, which start empty, and scales by them; clips at 10."""
    update_stats(stats, obs)
    _, mean, _, std = stats
    return ((obs - mean) / std).clip(-10, 10)


def normalize_reward(stats: np.ndarray, returns, reward, terminated, valid, gamma: float) -> np.ndarray:
    """Scales rewards (N,) by the std of their discounted sum, as Gymnasium's NormalizeReward; clips at 10."""
    np.copyto(returns, returns * gamma * (1 - terminated) + reward, where=valid)
    if valid.any():
        update_stats(stats, returns[valid, None])
    return (reward / stats[3]).clip(-10, 10)


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
    """The policy without noise, as it is exported: it normalizes observations and scales actions itself."""

    def __init__(self, agent: Agent, stats: np.ndarray, space: gym.spaces.Box):
        super().__init__()
        self.actor_mean = agent.actor_mean
        center, scale = action_scale(space)
        buffers = {"center": center, "scale": scale, "low": space.low, "high": space.high}
        buffers |= {"mean": stats[1], "std": stats[3]}  # in float64, for large numbers that differ by little
        for name, value in buffers.items():
            self.register_buffer(name, torch.as_tensor(value.ravel()))

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B, A)
        action = self.actor_mean(((obs - self.mean) / self.std).clip(-10, 10).float())
        return (self.center + self.scale * action).clip(self.low, self.high)


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


def learn_from_vectors(agent: Agent, optimizer, batch: dict[str, Tensor], args: Args, idx: Tensor) -> Tensor:
    """A gradient step on the rows idx (b,) of the batch; returns what to log, PPO_LOSSES in one tensor."""
    minibatch = {name: x[idx] for name, x in batch.items()}
    mean, logstd, value = agent(minibatch["obs"])
    logprob, entropy = gaussian_logprob_entropy(minibatch["action"], mean, logstd)
    loss, losses = ppo_loss(logprob, entropy, value, minibatch, args)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return losses


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
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
    saved = load_checkpoint(args)
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    start_anew(args.seed, 0, [])  # seeds what makes envs and networks
    envs = [make_env(args, gym.spaces.Box) for _ in range(1 if args.async_envs else N)]
    obs_dim = envs[0].observation_space.shape[0]
    action_space = envs[0].action_space
    if action_space.dtype.kind != "f":
        fail(f"{args.env_id} takes actions in {action_space}; needed: floats.")
    action_dim = math.prod(action_space.shape)
    center, scale = action_scale(action_space)
    if args.async_envs:
        envs[0].close()
        envs = start_processes(lambda: make_env(args, gym.spaces.Box), N)
    step_all = step_processes if args.async_envs else step_envs
    run_dir, writer, device = start_run(args, saved)

    reward, discounted_return = np.zeros((2, N))
    terminated = np.zeros(N, bool)
    truncated = np.full(N, first_iteration > 0)  # a resumed run begins with resets, as after a save
    totals = np.zeros((2, N))  # return and length of the open episodes
    obs_stats = np.zeros((4, obs_dim))
    return_stats = np.zeros((4, 1))
    normalizer = [torch.from_numpy(x) for x in (obs_stats, return_stats, discounted_return)]  # for checkpoints
    agent = Agent(obs_dim, action_dim).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    raw_obs = np.vstack(start_anew(args.seed, first_iteration, envs)).astype(np.float64)
    obs = torch.as_tensor(normalize_obs(obs_stats, raw_obs), dtype=torch.float32, device=device)
    if saved:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        for tensor, saved_tensor in zip(normalizer, saved["normalizer"]):
            tensor.copy_(saved_tensor)

    obs_buffer = torch.zeros(T, N, obs_dim, device=device)
    action_buffer = torch.zeros(T, N, action_dim, device=device)
    logprob_buffer = torch.zeros(T, N, device=device)
    value = torch.zeros(T + 1, N, device=device)
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full
    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    clock = time.perf_counter(), global_step  # of the last report
    interval = args.checkpoint_interval or math.inf

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
            action = action.cpu().numpy()  # waits for the GPU; so does the copy of the observation

            # step and store
            env_action = center + scale * action.reshape(N, *action_space.shape)
            env_action = env_action.clip(action_space.low, action_space.high)
            valid = ~(terminated | truncated)  # where the last step ended an episode, this one only resets
            global_step += N
            for return_, length in step_all(envs, env_action, raw_obs, reward, terminated, truncated, totals):
                writer.add_scalar("charts/episodic_return", return_, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
                last_returns.append(return_)
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
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"] = learning_rate
        for _ in range(args.update_epochs):
            for idx in torch.randperm(batch_size, device=device).split(minibatch_size):
                losses = dict(zip(PPO_LOSSES, learn_from_vectors(agent, optimizer, batch, args, idx)))
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break

        # report and save
        losses["explained_variance"] = explained_variance(batch)
        metrics = report(losses, agent.parameters(), last_returns, global_step, clock, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        is_due = global_step // interval > clock[1] // interval  # passed since the last report
        clock = time.perf_counter(), global_step
        if is_due or signals:
            kept = {"iteration": iteration + 1, "last_returns": list(last_returns)}
            kept |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "normalizer": normalizer}
            save_checkpoint(run_dir, args, kept)
            start_anew(args.seed, iteration + 1, envs)  # as a run that resumes here does
            truncated[:] = True  # the next step resets every env
        if signals:
            break

    policy = NormalizedActor(agent, obs_stats, action_space)
    finish_run(args, run_dir, metrics, writer, policy, torch.zeros(2, obs_dim, dtype=torch.float64))
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
