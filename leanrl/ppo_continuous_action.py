# /// script
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.38.1", "numpy==2.4.6",
#                 "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO for continuous actions (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), in plain PyTorch.

    python leanrl/ppo_continuous_action.py --env-id HalfCheetah-v4 --seed 1

Twin: ppo_continuous_action_torchcompile.py computes the same several times faster; `diff -u` the two to see how.
Shapes: T = num_steps, N = num_envs, B = T * N; a rollout is (T, N, ...), the batch made of it (B, ...).
Departures from CleanRL's script of this name:
1. Values are bootstrapped through a truncation; only a termination ends the return.
2. The row in which an env resets itself (action ignored, reward 0) is masked out of losses and statistics.
3. All envs share one observation and one reward normaliser.
"""

import difflib
import json
import math
import re
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WARMUP_REPORTS = 3  # not in the reported rate: compilation, capture, cold caches


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # of everything random; different seeds share no env stream
    torch_deterministic: bool = True  # let cuDNN choose only deterministic kernels
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a certain device, such as cuda:1; overrides --cuda

    env_id: str = "HalfCheetah-v4"  # any Gymnasium id with a Box action space, also my_package:MyEnv-v0
    total_timesteps: int = 1_000_000  # env steps, summed over envs
    learning_rate: float = 3e-4  # of Adam
    num_envs: int = 1  # envs stepped in turn
    num_steps: int = 2048  # steps of each env in a rollout
    anneal_lr: bool = True  # linearly towards zero
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # of generalised advantage estimation
    num_minibatches: int = 32  # per epoch; divides num_envs * num_steps
    update_epochs: int = 10  # passes over a rollout
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # of the policy ratio, and of the value's change with --clip-vloss
    clip_vloss: bool = True  # clip the value's change
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # the gradient is scaled down to this norm
    target_kl: float | None = None  # judged after each epoch, on its last minibatch: above it, the others are skipped

    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "leanrl"  # with --track
    wandb_entity: str | None = None  # with --track


def fail(message: str):
    """Ends the program with one sentence on stderr and exit code 2."""
    print("error:", *message.split(), file=sys.stderr)  # on one line, whatever it quotes
    sys.exit(2)


def make_env(env_id: str, actions: type[gym.Space]) -> gym.Env:
    """An env from vectors to this kind of actions, which counts its returns, or one sentence on why not."""
    try:
        env = gym.make(env_id)
    except (gym.error.Error, ImportError, ValueError) as error:
        near = difflib.get_close_matches(env_id, gym.registry.keys() - {env_id})
        fail(f"cannot make the env {env_id!r}: {error} Near matches: {', '.join(near) or 'none'}.")
    flat = env if len(env.observation_space.shape or ()) == 1 else gym.wrappers.FlattenObservation(env)
    image = len(env.observation_space.shape or ()) + (env.observation_space.dtype == np.uint8) > 2
    if image or not flat.observation_space.shape or not isinstance(env.action_space, actions):  # sequence: no shape
        fail(f"{env_id} maps {env.observation_space} to {env.action_space}; needed: vectors to a {actions.__name__}.")
    return gym.wrappers.RecordEpisodeStatistics(flat)


def step_envs(envs: list[gym.Env], action, obs, reward, terminated, truncated) -> list[dict]:
    """Steps every env, fills the last four arrays (N, ...), returns the "r"eturn and "l"ength of episodes that end.

    An env whose episode has ended resets instead; that step ignores the action and pays 0 (autoreset mode NEXT_STEP).
    """
    episodes = []
    for i, env in enumerate(envs):
        if terminated[i] or truncated[i]:
            obs[i], reward[i], terminated[i], truncated[i] = env.reset()[0], 0, False, False
        else:
            obs[i], reward[i], terminated[i], truncated[i], info = env.step(action[i])
            episodes += [info["episode"]] if "episode" in info else []
    return episodes


class RunningMeanStd:
    """Running mean and standard deviation of rows, in float64 (Welford 1962, several rows at a time)."""

    def __init__(self, *shape: int):
        self.mean, self.std, self.count = np.zeros(shape), np.ones(shape), 1e-4  # Gymnasium's prior
        self.squares = np.full(shape, self.count)  # sum of squared deviations from the mean

    def update(self, x: np.ndarray):  # (rows, *shape)
        deviation = x - self.mean
        self.count += len(x)
        self.mean += np.add.reduce(deviation) / self.count
        self.squares += np.add.reduce(deviation * (x - self.mean))
        self.std = np.sqrt(self.squares / self.count + 1e-8)


def normalize_obs(stats: RunningMeanStd, obs: np.ndarray) -> np.ndarray:
    """Observations (N, obs_dim) at mean 0 and std 1, clipped at 10; as Gymnasium's NormalizeObservation."""
    stats.update(obs)
    return ((obs - stats.mean) / stats.std).clip(-10, 10)


def normalize_reward(stats: RunningMeanStd, returns, reward, terminated, valid, gamma: float) -> np.ndarray:
    """Rewards (N,) whose discounted return has std 1, clipped at 10; as Gymnasium's NormalizeReward.

    returns (N,), the running discounted return, changes in place; rows that are not valid leave it as it is.
    """
    np.copyto(returns, returns * gamma * (1 - terminated) + reward, where=valid)
    stats.update(returns[valid])
    return (reward / stats.std).clip(-10, 10)


def mlp(in_dim: int, out_dim: int, out_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units; orthogonal weights, no biases at first."""
    layers = [nn.Linear(in_dim, 64), nn.Linear(64, 64), nn.Linear(64, out_dim)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, out_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Agent(nn.Module):
    """A Gaussian policy, whose standard deviation is the same in every state, and a value function."""

    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        self.critic = mlp(obs_dim, 1, out_gain=1.0)
        self.actor_mean = mlp(obs_dim, action_dim, out_gain=0.01)  # the first actions are near zero
        self.actor_logstd = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # mean (.., A), logstd (A,), value (..,)
        return self.actor_mean(obs), self.actor_logstd, self.critic(obs).squeeze(-1)


def gaussian_logprob_entropy(action: Tensor, mean: Tensor, logstd: Tensor) -> tuple[Tensor, Tensor]:
    """Log density (..,) of actions (.., A) under a diagonal Gaussian, and its entropy () in nats."""
    half_log_2pi = 0.5 * math.log(2 * math.pi)
    logprob = -0.5 * ((action - mean) / logstd.exp()) ** 2 - logstd - half_log_2pi
    return logprob.sum(-1), (logstd + half_log_2pi + 0.5).sum()


def gae(reward: Tensor, value: Tensor, terminated: Tensor, done: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (T, N) each, but value (T + 1, N).

    value[t + 1] is that of the last observation of an episode that ended at t, since its env resets one step later.
    So a truncated step bootstraps from it and a terminated one does not; both cut the trace.
    """
    delta = reward + gamma * (1 - terminated) * value[1:] - value[:-1]
    decay = gamma * gae_lambda * (1 - done)
    advantages = [torch.zeros_like(delta[0])]
    for delta_t, decay_t in zip(reversed(delta.unbind()), reversed(decay.unbind())):
        advantages.append(delta_t + decay_t * advantages[-1])
    return torch.stack(advantages[:0:-1])


def ppo_loss(logprob: Tensor, entropy: Tensor, value: Tensor, batch: dict[str, Tensor], args: Args):
    """The clipped objective (eq. 7 and 9 of the paper) as a loss (), and what to log; means are over valid rows.

    logprob, value (B,) are of the current parameters, batch["logprob"], batch["value"] of those that acted.
    """
    count = batch["valid"].sum().clamp(min=2)
    weight, advantage = batch["valid"] / count, batch["advantage"]
    if args.norm_adv:
        advantage = advantage - (weight * advantage).sum()
        advantage = advantage / ((batch["valid"] * advantage**2).sum().div(count - 1).sqrt() + 1e-8)
    log_ratio = logprob - batch["logprob"]
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = (weight * torch.maximum(-advantage * ratio, -advantage * clipped_ratio)).sum()
    value_error = (value - batch["return"]) ** 2
    if args.clip_vloss:
        clipped_value = batch["value"] + (value - batch["value"]).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.maximum(value_error, (clipped_value - batch["return"]) ** 2)
    value_loss = 0.5 * (weight * value_error).sum()

    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    losses["old_approx_kl"] = -(weight * log_ratio).sum()
    losses["approx_kl"] = (weight * (ratio - 1 - log_ratio)).sum()  # http://joschu.net/blog/kl-approx.html
    losses["clipfrac"] = (weight * ((ratio - 1).abs() > args.clip_coef)).sum()
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, losses


def start_run(args: Args) -> tuple[torch.device, Path, SummaryWriter]:
    """Seeds, picks the device, makes the run folder with a TensorBoard writer, which W&B follows under --track."""
    device_name = args.device or ("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    run_dir = Path("runs", re.sub("[/:]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"))
    try:
        device = torch.zeros((), device=device_name).device
        run_dir.mkdir(parents=True, exist_ok=True)
        if args.track:
            import wandb  # only here: nobody else needs it

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
            wandb.init(**names, config=asdict(args), sync_tensorboard=True)
    except Exception as error:
        fail(f"cannot use the device {device_name}, the folder {run_dir} or wandb: {str(error).splitlines()[0]}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_flush_denormal(True)  # the moments of idle weights decay into denormal numbers, which slow a CPU down
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    return device, run_dir, SummaryWriter(run_dir)


def report(losses: dict, last_returns: deque, marks: list, global_step: int, writer, progress) -> dict[str, float]:
    """Writes and returns the losses, read in one sync, and speed from marks, the (seconds, steps) of all reports."""
    metrics = dict(zip(losses, torch.stack(list(losses.values())).tolist()))
    for name, loss in metrics.items():
        writer.add_scalar(f"losses/{name}", loss, global_step)
        if not math.isfinite(loss):
            progress.close(), writer.close()
            sys.exit(f"error: losses/{name} is {loss} at step {global_step}; a smaller learning rate may help.")
    marks.append((time.perf_counter(), global_step))
    (start, first), (warm, warm_step), (before, last) = marks[0], marks[min(WARMUP_REPORTS, len(marks) - 2)], marks[-2]
    writer.add_scalar("charts/SPS", (global_step - last) / (marks[-1][0] - before), global_step)
    metrics["SPS"] = (global_step - warm_step) / (marks[-1][0] - warm)
    metrics["startup_seconds"] = warm - start - (warm_step - first) / metrics["SPS"]  # the warm-up beyond that rate
    metrics["episodic_return"] = float(np.mean(last_returns)) if last_returns else None
    progress.set_postfix(episodic_return=metrics["episodic_return"], refresh=False)
    progress.update(global_step - progress.n)
    return metrics | {"global_step": global_step}


def train(args: Args) -> dict[str, float]:
    """Trains an agent and returns the final metrics, which summary.json in the run folder holds too."""
    for name, value in vars(args).items():
        least = int(type(value) is int and name != "seed")
        if type(value) in (int, float) and not value >= least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
    T, N, batch_size = args.num_steps, args.num_envs, args.num_steps * args.num_envs
    minibatch_size, num_iterations = batch_size // args.num_minibatches, args.total_timesteps // batch_size
    if num_iterations < 1 or batch_size != max(minibatch_size, 2) * args.num_minibatches:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout, and --num-minibatches a divisor below it.")
    envs = [make_env(args.env_id, gym.spaces.Box) for _ in range(N)]
    device, run_dir, writer = start_run(args)
    torch.set_num_threads(1)  # matrices this small leave a second core little to do but to be waited for
    actions, obs_dim = envs[0].action_space, envs[0].observation_space.shape[0]
    raw_obs = np.stack([env.reset(seed=10_000 * args.seed + i)[0] for i, env in enumerate(envs)])  # once
    reward, terminated, truncated, done = np.zeros(N), np.zeros(N, bool), np.zeros(N, bool), np.zeros(N, bool)
    action_dim = math.prod(actions.shape)
    obs_stats, return_stats, discounted_return = RunningMeanStd(obs_dim), RunningMeanStd(), np.zeros(N)
    obs = torch.as_tensor(normalize_obs(obs_stats, raw_obs), dtype=torch.float32, device=device)
    agent = Agent(obs_dim, action_dim).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    obs_buffer, action_buffer = (torch.zeros(T, N, dim, device=device) for dim in (obs_dim, action_dim))
    logprob_buffer, value_buffer = torch.zeros(2, T, N, device=device)
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full

    progress = tqdm(total=num_iterations * batch_size, unit="step", desc=args.exp_name, dynamic_ncols=True)
    last_returns, marks, global_step = deque(maxlen=100), [(time.perf_counter(), 0)], 0
    for iteration in range(num_iterations):
        noise = torch.randn(T, N, action_dim, device=device)
        for t in range(T):
            # act; the one sync of a step is the copy of the action to the host
            with torch.no_grad():
                mean, logstd, value_buffer[t] = agent(obs)
                action = mean + logstd.exp() * noise[t]
                logprob_buffer[t], _ = gaussian_logprob_entropy(action, mean, logstd)
            obs_buffer[t], action_buffer[t] = obs, action
            env_action = action.cpu().numpy().reshape(N, *actions.shape).clip(actions.low, actions.high)

            # step and store
            valid, global_step = ~done, global_step + N
            for episode in step_envs(envs, env_action, raw_obs, reward, terminated, truncated):
                writer.add_scalar("charts/episodic_return", episode["r"], global_step)
                writer.add_scalar("charts/episodic_length", episode["l"], global_step)
                last_returns.append(episode["r"])
            obs = torch.as_tensor(normalize_obs(obs_stats, raw_obs), dtype=torch.float32, device=device)
            done = terminated | truncated
            scaled = normalize_reward(return_stats, discounted_return, reward, terminated, valid, args.gamma)
            env_buffer[:, t] = scaled, terminated, done, valid

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer, device=device)
        value = torch.cat([value_buffer, agent(obs)[2].detach()[None]])
        advantage = gae(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        batch = {"obs": obs_buffer, "action": action_buffer, "logprob": logprob_buffer, "value": value_buffer}
        batch |= {"advantage": advantage, "return": advantage + value_buffer, "valid": valid_buffer}
        batch = {name: x.flatten(0, 1) for name, x in batch.items()}
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"] = learning_rate
        for _ in range(args.update_epochs):
            for idx in torch.randperm(batch_size, device=device).split(minibatch_size):
                minibatch = {name: x[idx] for name, x in batch.items()}
                mean, logstd, value = agent(minibatch["obs"])
                logprob, entropy = gaussian_logprob_entropy(minibatch["action"], mean, logstd)
                loss, losses = ppo_loss(logprob, entropy, value, minibatch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break

        # report
        value, return_ = (batch[name][batch["valid"] > 0] for name in ("value", "return"))
        losses["explained_variance"] = 1 - (return_ - value).var(correction=0) / return_.var(correction=0).clamp(1e-8)
        metrics = report(losses, last_returns, marks, global_step, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)

    ran = {"device": str(device), "compile": False, "cudagraphs": False}
    (run_dir / "summary.json").write_text(json.dumps({"ran": ran, "metrics": metrics, "args": asdict(args)}, indent=2))
    [resource.close() for resource in (progress, writer, *envs)]
    return metrics


if __name__ == "__main__":
    train(tyro.cli(Args))
