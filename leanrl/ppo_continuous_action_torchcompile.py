# /// script
# dependencies = ["torch==2.13.0", "tensordict==0.15.3", "gymnasium==1.4.0", "mujoco==4.0.0", "imageio==2.37.2",
#                 "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""PPO for continuous actions (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), compiled and captured.

    python leanrl/ppo_continuous_action_torchcompile.py --env-id HalfCheetah-v4 --seed 1 --compile --cudagraphs

Twin: ppo_continuous_action.py is the same in plain PyTorch; `diff -u` the two: each perf[n] is a trick, explained
in docs/performance.md.
Shapes: T = num_steps, N = num_envs, B = T * N. A rollout is (T, N, ...), the batch made of it (B, ...).
Departures from CleanRL's script of this name:
1. Values are bootstrapped through a truncation; only a termination ends the return.
2. The row in which an env resets itself (action ignored, reward 0) is masked out of losses and statistics.
3. All envs share one observation and one reward normaliser.
4. The noise of the actions is drawn once per rollout.
"""

import difflib
import json
import math
import random
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensordict.nn import CudaGraphModule  # perf[2]
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value  # perf[1]
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

WARMUP_ITERATIONS = 3  # not in the reported rate: compilation, capture, cold caches


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # of everything random; different seeds share no env stream
    torch_deterministic: bool = True  # let cuDNN choose only deterministic kernels
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a certain device, such as cuda:1; goes before --cuda

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

    compile: bool = False  # perf[1] compile the update
    cudagraphs: bool = False  # perf[2] capture the policy and the updates of an epoch in CUDA graphs

    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "leanrl"  # with --track
    wandb_entity: str | None = None  # with --track

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


def fail(message: str):
    """Ends the program with one sentence on stderr and exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def make_env(env_id: str) -> gym.Env:
    """An env with a vector of observations and a Box of actions, or one sentence on why not."""
    try:
        env = gym.make(env_id)
    except (gym.error.Error, ImportError) as error:
        near = difflib.get_close_matches(env_id, gym.registry)
        fail(f"cannot make the env {env_id!r}: {error} Near matches: {', '.join(near) or 'none'}.")
    if not isinstance(env.action_space, gym.spaces.Box):
        fail(f"{env_id} has the action space {env.action_space}, and this script needs a Box; for Discrete, see DQN.")
    if env.observation_space.dtype == np.uint8:
        fail(f"{env_id} observes images {env.observation_space.shape}, and this script needs vectors.")
    is_vector = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
    return env if is_vector else gym.wrappers.FlattenObservation(env)


class RunningMeanStd:
    """Running mean and standard deviation of rows, in float64 (Welford 1962, several rows at a time)."""

    def __init__(self, *shape: int):
        self.mean, self.count = np.zeros(shape), 1e-4  # Gymnasium's prior: variance 1 with next to no weight
        self.squares = np.full(shape, self.count)  # sum of squared deviations from the mean

    def update(self, x: np.ndarray):  # (rows, *shape)
        deviation = x - self.mean
        self.count += len(x)
        self.mean += np.add.reduce(deviation) / self.count
        self.squares += np.add.reduce(deviation * (x - self.mean))

    @property
    def std(self) -> np.ndarray:
        return np.sqrt(self.squares / self.count + 1e-8)


class Normalizer:
    """Scales observations to mean 0, std 1 and rewards to discounted returns of std 1; clips both at 10.

    One set of statistics for all envs; the same numbers as Gymnasium's NormalizeObservation and NormalizeReward.
    """

    def __init__(self, num_envs: int, obs_dim: int, gamma: float):
        self.obs_stats, self.return_stats = RunningMeanStd(obs_dim), RunningMeanStd()
        self.gamma, self.discounted_return = gamma, np.zeros(num_envs)

    def obs(self, obs: np.ndarray) -> np.ndarray:  # (N, obs_dim), and back
        self.obs_stats.update(obs)
        return ((obs - self.obs_stats.mean) / self.obs_stats.std).clip(-10, 10)

    def reward(self, reward: np.ndarray, terminated: np.ndarray, valid: np.ndarray) -> np.ndarray:  # (N,), and back
        decay = np.where(valid, self.gamma * (1 - terminated), 1)  # a row that only resets is not a step
        self.discounted_return = self.discounted_return * decay + reward
        self.return_stats.update(self.discounted_return[valid])
        return (reward / self.return_stats.std).clip(-10, 10)


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


def gae_scan(reward: Tensor, value: Tensor, terminated: Tensor, done: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): (T, N) each, but value (T + 1, N).

    value[t + 1] is that of the last observation of an episode that ended at t, since its env resets one step later.
    So a truncated step bootstraps from it and a terminated one does not; both cut the trace.
    """
    delta = reward + gamma * (1 - terminated) * value[1:] - value[:-1]
    decay = gamma * gae_lambda * (1 - done)
    span = 1  # perf[8] double the span of the sum until it reaches the end: log2(T) steps in place of T
    while span < len(delta):
        delta[:-span] = delta[:-span] + decay[:-span] * delta[span:]
        decay[:-span] = decay[:-span] * decay[span:]
        span *= 2
    return delta


def ppo_loss(logprob: Tensor, entropy: Tensor, value: Tensor, batch: dict[str, Tensor], args: Args):
    """The clipped objective (eq. 7 and 9 of the paper) as a loss (), and what to log; means are over valid rows.

    logprob and value (B,) come from the current parameters, batch["logprob"] and batch["value"] from those that acted.
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


# perf[12] keep all parameters in one vector: the norm, Adam and the compiler's checks deal with one tensor, not 13
def flatten_parameters(module: nn.Module) -> Tensor:
    """Moves the parameters into one vector (P,), of which they become views, and returns it."""
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())
    return flat


def unflatten(flat: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The parameters by name, as views of the vector."""
    return {k: x.view(s) for (k, s), x in zip(shapes.items(), flat.split([s.numel() for s in shapes.values()]))}


def adam_(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: Tensor, eps: float):
    """One step of Adam (Kingma & Ba 2015, algorithm 1), in place. perf[3] step and lr are tensors ()."""
    step += 1
    exp_avg.lerp_(grad, 0.1)
    exp_avg_sq.lerp_(grad**2, 0.001)
    param -= lr * (exp_avg / (1 - 0.9**step)) / ((exp_avg_sq / (1 - 0.999**step)).sqrt() + eps)


# perf[1] make the update one function of tensors, without backward() and optimizer: it compiles to one graph
def ppo_update(agent, shapes, flat, adam_state, lr, batch, idx, args: Args) -> dict[str, Tensor]:
    """A gradient step of the parameters `flat` on the rows `idx` of the batch, in place. Returns what to log."""
    minibatch = {name: x[idx] for name, x in batch.items()}

    def loss_of(flat):
        mean, logstd, value = functional_call(agent, unflatten(flat, shapes), minibatch["obs"])
        logprob, entropy = gaussian_logprob_entropy(minibatch["action"], mean, logstd)
        return ppo_loss(logprob, entropy, value, minibatch, args)

    grad, (_, losses) = grad_and_value(loss_of, has_aux=True)(flat)
    grad *= (args.max_grad_norm / (grad.norm() + 1e-6)).clamp(max=1)
    adam_(flat, grad, *adam_state, lr, eps=1e-5)
    return losses


# perf[13] step the envs in a plain loop: the same transitions as SyncVectorEnv's without its overhead
def step_envs(envs: list[gym.Env], action, obs, reward, terminated, truncated):
    """Steps each env and fills the four arrays (N, ...) in place; an env whose episode has ended resets instead."""
    for i, env in enumerate(envs):
        if terminated[i] or truncated[i]:
            obs[i], reward[i], terminated[i], truncated[i] = env.reset()[0], 0, False, False
        else:
            obs[i], reward[i], terminated[i], truncated[i], _ = env.step(action[i])


def select_device(args: Args) -> torch.device:
    """--device if given, else a GPU if there is one and --cuda, else the CPU."""
    name = args.device or ("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    try:
        device = torch.zeros((), device=name).device
    except (RuntimeError, AssertionError) as error:
        fail(f"cannot use --device {name}: {str(error).splitlines()[0]}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def start_run(args: Args) -> tuple[Path, SummaryWriter]:
    """Makes the run folder with a TensorBoard writer in it; with --track, W&B copies what is written."""
    env_name = args.env_id.replace("/", "_").replace(":", "_")
    run_dir = Path("runs", f"{env_name}__{args.exp_name}__{args.seed}__{int(time.time())}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"cannot write to the runs folder: {error}")
    if args.track:
        import wandb  # needed by those who track only

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
        wandb.init(**names, config=asdict(args), sync_tensorboard=True)
    writer = SummaryWriter(run_dir)
    writer.add_text("hyperparameters", "\n".join(f"    {name} = {value}" for name, value in asdict(args).items()))
    return run_dir, writer


def log_losses(writer: SummaryWriter, losses: dict[str, Tensor], step: int) -> dict[str, float]:
    """Writes the losses and returns them as floats: the one sync of a report. One that is not finite ends the run."""
    values = dict(zip(losses, torch.stack(list(losses.values())).tolist()))
    for name, value in values.items():
        writer.add_scalar(f"losses/{name}", value, step)
        if not math.isfinite(value):
            sys.exit(f"error: losses/{name} is {value} at step {step}; a smaller --learning-rate may help.")
    return values


def train(args: Args) -> dict[str, float]:
    """Trains an agent and returns the final metrics, which summary.json in the run folder holds too."""
    if args.num_iterations < 1:
        fail(f"--total-timesteps {args.total_timesteps} is less than one rollout of {args.batch_size} steps.")
    if args.batch_size % args.num_minibatches:
        fail(f"num_envs * num_steps = {args.batch_size} is not a multiple of --num-minibatches {args.num_minibatches}.")
    device = select_device(args)
    torch.set_num_threads(1)  # matrices this small lose more by waiting for a second core than it gives
    torch.backends.cudnn.deterministic = args.torch_deterministic
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    T, N = args.num_steps, args.num_envs

    # NEXT_STEP: when an episode has ended, the next step ignores the action and returns reward 0 and a new first obs.
    envs = [make_env(args.env_id) for _ in range(N)]
    raw_obs = np.stack([env.reset(seed=10_000 * args.seed + i)[0] for i, env in enumerate(envs)])
    reward, terminated, truncated = np.zeros(N), np.zeros(N, bool), np.zeros(N, bool)
    obs_dim, actions = envs[0].observation_space.shape[0], envs[0].action_space
    normalizer = Normalizer(N, obs_dim, args.gamma)

    agent = Agent(obs_dim, math.prod(actions.shape)).to(device)
    shapes = {name: p.shape for name, p in agent.named_parameters()}
    flat = flatten_parameters(agent.requires_grad_(False))
    adam_state = torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros((), device=device)
    lr = torch.zeros((), device=device)

    # perf[7] pinned
    pin = device.type == "cuda"
    obs, mean = torch.zeros(N, obs_dim, pin_memory=pin), torch.zeros(N, math.prod(actions.shape), pin_memory=pin)
    obs_buffer = np.zeros((T + 1, N, obs_dim), np.float32)
    obs.numpy()[:] = normalizer.obs(raw_obs)
    batch = {}
    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid: sent to the device when full

    def act():
        mean.copy_(agent.actor_mean(obs.to(device, non_blocking=True)), non_blocking=True)

    update = torch.compile(ppo_update, fullgraph=True) if args.compile else ppo_update

    def update_epoch(permutation):
        for idx in permutation.split(args.minibatch_size):
            losses = update(agent, shapes, flat, adam_state, lr, batch, idx, args)
        return losses

    if args.cudagraphs:
        act, update_epoch = CudaGraphModule(act), CudaGraphModule(update_epoch, warmup=3)

    run_dir, writer = start_run(args)
    progress = tqdm(total=args.num_iterations * args.batch_size, unit="step", desc=args.exp_name, dynamic_ncols=True)
    episode_return, episode_length, last_returns = np.zeros(N), np.zeros(N, int), deque(maxlen=100)
    done = np.zeros(N, bool)
    start_time = warm_time = report_time = time.perf_counter()
    global_step = warm_step = 0
    for iteration in range(args.num_iterations):
        noise = torch.randn(T, N, math.prod(actions.shape), device=device)
        exploration = (noise * agent.actor_logstd.exp()).cpu().numpy()
        for t in range(T):
            # act
            obs_buffer[t] = obs
            act()
            if pin:
                torch.cuda.current_stream().synchronize()
            env_action = (mean.numpy() + exploration[t]).reshape(N, *actions.shape)

            # step and store
            valid = ~done
            step_envs(envs, env_action.clip(actions.low, actions.high), raw_obs, reward, terminated, truncated)
            obs.numpy()[:] = normalizer.obs(raw_obs)
            done = terminated | truncated
            env_buffer[:, t] = normalizer.reward(reward, terminated, valid), terminated, done, valid
            global_step += N
            episode_return += reward
            episode_length += valid
            for i in np.flatnonzero(done):
                writer.add_scalar("charts/episodic_return", episode_return[i], global_step)
                writer.add_scalar("charts/episodic_length", episode_length[i], global_step)
                last_returns.append(episode_return[i])
                episode_return[i] = episode_length[i] = 0

        # learn
        reward_buffer, terminated_buffer, done_buffer, valid_buffer = torch.as_tensor(env_buffer, device=device)
        # perf[9] values and log-probs
        obs_buffer[T] = obs
        all_obs = torch.as_tensor(obs_buffer, device=device)
        policy_mean, logstd, value = agent(all_obs)
        action = policy_mean[:-1] + logstd.exp() * noise
        logprob, _ = gaussian_logprob_entropy(action, policy_mean[:-1], logstd)
        advantage = gae_scan(reward_buffer, value, terminated_buffer, done_buffer, args.gamma, args.gae_lambda)
        rollout = {"obs": all_obs[:-1], "action": action, "logprob": logprob, "value": value[:-1]}
        rollout |= {"advantage": advantage, "return": advantage + value[:-1], "valid": valid_buffer}
        for name, x in rollout.items():
            batch.setdefault(name, x.flatten(0, 1).clone()).copy_(x.flatten(0, 1))
        learning_rate = args.learning_rate * (1 - iteration / args.num_iterations if args.anneal_lr else 1)
        lr.fill_(learning_rate)
        for _ in range(args.update_epochs):
            losses = update_epoch(torch.randperm(args.batch_size, device=device))
            if args.target_kl is not None and losses["approx_kl"] > args.target_kl:
                break

        # report
        is_valid = batch["valid"].bool()
        error, return_ = (batch["return"] - batch["value"])[is_valid], batch["return"][is_valid]
        losses["explained_variance"] = 1 - error.var() / return_.var()
        metrics = log_losses(writer, losses, global_step)
        report_time, previous_time = time.perf_counter(), report_time
        writer.add_scalar("charts/SPS", args.batch_size / (report_time - previous_time), global_step)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        mean_return = float(np.mean(last_returns)) if last_returns else math.nan
        progress.set_postfix(episodic_return=f"{mean_return:.1f}", refresh=False)
        progress.update(args.batch_size)
        if iteration + 1 == min(WARMUP_ITERATIONS, args.num_iterations - 1):
            warm_time, warm_step = report_time, global_step

    sps = (global_step - warm_step) / (report_time - warm_time)
    metrics |= {"episodic_return": mean_return, "global_step": global_step, "SPS": sps}
    metrics["startup_seconds"] = warm_time - start_time - warm_step / sps  # what the warm-up took beyond that rate
    summary = {"device": str(device), "compile": args.compile, "cudagraphs": args.cudagraphs, "metrics": metrics, "args": asdict(args)}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    progress.close(), writer.close(), [env.close() for env in envs]
    return metrics


if __name__ == "__main__":
    train(tyro.cli(Args))
