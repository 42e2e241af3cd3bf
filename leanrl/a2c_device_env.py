# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""Advantage actor-critic (A2C) whose envs are functions of tensors: nothing leaves the device.

    python leanrl/a2c_device_env.py --env-id CartPole-v1 --num-envs 128

Paper: Mnih et al. 2016, https://arxiv.org/abs/1602.01783, section 4.
REINFORCE (Williams 1992) is the same with --num-steps 500 --gae-lambda 1: long rollouts, and the value as its baseline.
Fast twin: a2c_device_env_torchcompile.py. `diff -u` the two files to see what makes it faster.
Shapes: T = num_steps, N = num_envs; O = size of an observation, A = number of actions.
Differences from the paper:
1. Adam instead of RMSProp, advantages by GAE, and one learner whose envs step together.
2. Values are bootstrapped through a truncation; a step that only resets an env is masked out.
"""

import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

A2C_LOSSES = ("policy_loss", "value_loss", "entropy")  # by a2c_loss
REPORT_EVERY = 10  # rollouts between two reports, in which the host waits for the device


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "CartPole-v1"  # an env of this file, by its name in ENVS
    total_timesteps: int = 5_000_000  # env steps, summed over all envs, in whole rollouts
    learning_rate: float = 5e-3  # learning rate of Adam
    num_envs: int = 128  # number of envs, stepped together; a GPU likes thousands
    num_steps: int = 8  # steps of each env per rollout, and so per gradient step
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    norm_adv: bool = False  # normalize the advantages of each rollout
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the norm of the gradient to this value

    save_model: bool = True  # export the trained policy as policy.pt2 to the run folder
    checkpoint_interval: int = 0  # env steps between saves; 0: only at signals
    resume: str | None = None  # go on from this checkpoint.pt; "auto" takes the newest of the same settings

    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "leanrl"  # Weights & Biases project, used with --track
    wandb_entity: str | None = None  # Weights & Biases team or user, used with --track


class CartPole:
    """Gymnasium's CartPole-v1 (Barto, Sutton & Anderson 1983): a cart keeps a pole upright for 500 steps."""

    obs_dim = 4
    num_actions = 2
    num_uniforms = 4  # random numbers that a step of one env takes
    time_limit = 500  # steps, after which an episode is truncated

    @staticmethod
    def initial(uniform: Tensor) -> Tensor:  # (N, num_uniforms) in [0, 1) -> state (N, 4)
        return 0.1 * uniform - 0.05

    @staticmethod
    def transition(state: Tensor, action: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state (N, 4), the reward (N,), and whether the episode terminates (N,)."""
        x, x_dot, theta, theta_dot = state.unbind(-1)  # position in m, angle in rad, and their rates per second
        force = 20.0 * action - 10.0
        sin = theta.sin()
        cos = theta.cos()
        push = (force + 0.05 * theta_dot**2 * sin) / 1.1
        theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        x_acc = push - 0.05 * theta_acc * cos / 1.1
        x = x + 0.02 * x_dot  # Euler's method, 50 steps a second
        theta = theta + 0.02 * theta_dot
        terminated = (x.abs() > 2.4) | (theta.abs() > math.radians(12))
        state = torch.stack([x, x_dot + 0.02 * x_acc, theta, theta_dot + 0.02 * theta_acc], -1)
        return state, torch.ones_like(x), terminated

    @staticmethod
    def observation(state: Tensor) -> Tensor:  # (N, O)
        return state


class Breakout:
    """MinAtar's Breakout (Young & Tian 2019), with its three useful actions: stay, left, right.

    The ball flies diagonally over 10 x 10 fields and breaks bricks in rows 1 to 3; the paddle is in row 9.
    """

    obs_dim = 10 * 10 * 4
    num_actions = 3
    num_uniforms = 1
    time_limit = 1000  # MinAtar has none

    @staticmethod
    def initial(uniform: Tensor) -> Tensor:  # -> ball x, y, its direction dx, dy, trail x, y, paddle, ... (N, 39)
        from_left = (uniform[:, 0] < 0.5).int()
        x = 9 - 9 * from_left
        dx = 2 * from_left - 1
        one = torch.ones_like(x)
        numbers = torch.stack([x, 3 * one, dx, one, x, 3 * one, 4 * one, 0 * one, 0 * one], -1)
        return torch.cat([numbers, one[:, None].expand(-1, 30)], -1)  # the 30 bricks

    @staticmethod
    def transition(state: Tensor, action: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        old_x, old_y, dx, dy, _, _, paddle, struck, last_action = state[:, :9].unbind(-1)
        bricks = state[:, 9:]
        action = torch.where(uniform[:, 0] < 0.1, last_action, action.int())  # now and then the last one is repeated
        paddle = (paddle + (action == 2).int() - (action == 1).int()).clamp(0, 9)
        x = old_x + dx
        y = old_y + dy
        dx = torch.where((x < 0) | (x > 9), -dx, dx)
        dy = torch.where(y < 0, -dy, dy)
        x = x.clamp(0, 9)
        y = y.clamp(min=0)

        # a brick that is met breaks and throws the ball back, but not in two steps in a row
        field = 10 * (y - 1) + x
        met = bricks * (field[:, None] == torch.arange(30, device=state.device)).int()
        meets = met.sum(-1) > 0
        breaks = meets & (struck == 0)
        bricks = torch.where(breaks[:, None], bricks - met, bricks)
        dy = torch.where(breaks, -dy, dy)

        # under the ball's old place the paddle mirrors it, under the new one it sends it back; else the ball is lost
        at_bottom = y == 9
        bricks = torch.where((at_bottom & (bricks.sum(-1) == 0))[:, None], 1, bricks)
        straight = at_bottom & (old_x == paddle)
        corner = at_bottom & ~straight & (x == paddle)
        dx = torch.where(corner, -dx, dx)
        dy = torch.where(straight | corner, -dy, dy)
        y = torch.where(breaks | straight | corner, old_y, y)
        numbers = torch.stack([x, y, dx, dy, old_x, old_y, paddle, meets.int(), action], -1)
        return torch.cat([numbers, bricks], -1), breaks.float(), at_bottom & ~straight & ~corner

    @staticmethod
    def observation(state: Tensor) -> Tensor:  # bytes (N, 400): of each field paddle, ball, trail and brick
        x, y, _, _, trail_x, trail_y, paddle, _, _ = state[:, :9].unbind(-1)
        fields = torch.stack([90 + paddle, 10 * y + x, 10 * trail_y + trail_x], -1)
        obs = torch.zeros(len(state), 400, dtype=torch.uint8, device=state.device)
        obs.scatter_(1, 4 * fields + torch.arange(3, device=state.device), 1)
        obs[:, 43:160:4] = state[:, 9:]
        return obs


ENVS = {"CartPole-v1": CartPole, "MinAtar/Breakout-v1": Breakout}


def step_device(env: type, envs: dict[str, Tensor], action: Tensor, uniform: Tensor):
    """Steps N envs: returns what they are then, their rewards (N,), and which episodes terminated (N,).

    An env whose episode has ended is reset instead; that step ignores the action and has reward 0 (autoreset mode
    NEXT_STEP). `envs` holds each env's state, its steps and its reward in the episode so far (clock and score), whether
    the episode is done, and the score and length of its last whole episode.
    """
    over = envs["done"]
    state, reward, terminated = env.transition(envs["state"], action, uniform)
    state = torch.where(over[:, None], env.initial(uniform), state)
    reward = reward.masked_fill(over, 0)
    terminated = terminated & ~over
    clock = (envs["clock"] + 1).masked_fill(over, 0)
    score = envs["score"].masked_fill(over, 0) + reward
    done = terminated | (clock >= env.time_limit)
    last_return = torch.where(done, score, envs["last_return"])
    last_length = torch.where(done, clock, envs["last_length"])
    envs = {"state": state, "clock": clock, "score": score, "done": done}
    return envs | {"last_return": last_return, "last_length": last_length}, reward, terminated


def first_envs(env: type, num_envs: int, device: torch.device) -> dict[str, Tensor]:
    """N envs for step_device(). Their clocks differ, so that they are not all truncated in the same step."""
    clock = torch.randint(env.time_limit, (num_envs,), device=device)
    unknown = torch.full((num_envs,), math.nan, device=device)  # the first episode of an env, cut short, has no score
    envs = {"state": env.initial(torch.rand(num_envs, env.num_uniforms, device=device)), "clock": clock}
    envs |= {"score": unknown, "done": torch.zeros_like(clock, dtype=torch.bool)}
    return envs | {"last_return": unknown.clone(), "last_length": torch.zeros_like(clock)}


def mlp(in_dim: int, out_dim: int, out_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, with orthogonal weights and zero biases."""
    layers = [nn.Linear(in_dim, 64), nn.Linear(64, 64), nn.Linear(64, out_dim)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, out_gain)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class DiscreteAgent(nn.Module):
    """A policy over discrete actions, and a value function."""

    def __init__(self, obs_dim: int, num_actions: int):
        super().__init__()
        self.critic = mlp(obs_dim, 1, out_gain=1.0)
        self.actor = mlp(obs_dim, num_actions, out_gain=0.01)  # so the first actions are almost uniform

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:  # (.., O) -> logits (.., A), value (..)
        obs = obs.float()
        return self.actor(obs), self.critic(obs).squeeze(-1)


class GreedyDiscreteAgent(nn.Module):
    """The most probable action."""

    def __init__(self, agent: DiscreteAgent):
        super().__init__()
        self.actor = agent.actor

    def forward(self, obs: Tensor) -> Tensor:  # (B, O) -> (B,)
        return self.actor(obs).argmax(-1)


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


def a2c_loss(logits: Tensor, value: Tensor, last_value: Tensor, rollout: dict[str, Tensor], args: Args):
    """A2C's loss () (section 4), what explained_variance() needs, (T, N) of each, and A2C_LOSSES in one tensor.

    logits (T, N, A) and value (T, N) are of the observations in the rollout, last_value (N,) is of those after it.
    Every mean is over the valid rows.
    """
    old_value = value.detach()
    values = torch.cat([old_value, last_value[None]])
    outcome = (rollout["reward"], values, rollout["terminated"], rollout["done"])
    advantage = gae(*outcome, args.gamma, args.gae_lambda)
    return_ = advantage + old_value
    count = rollout["valid"].sum().clamp(min=2)
    weight = rollout["valid"] / count
    if args.norm_adv:
        advantage = advantage - (weight * advantage).sum()
        variance = (rollout["valid"] * advantage**2).sum() / (count - 1)
        advantage = advantage / (variance.sqrt() + 1e-8)
    logprob, entropy = categorical_logprob_entropy(rollout["action"], logits)
    policy_loss = -(weight * advantage * logprob).sum()
    value_loss = 0.5 * (weight * (value - return_) ** 2).sum()
    entropy = (weight * entropy).sum()
    losses = torch.stack([policy_loss, value_loss, entropy]).detach()
    learned = {"valid": rollout["valid"], "value": old_value, "return": return_}
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, learned, losses


def explained_variance(batch: dict[str, Tensor]) -> Tensor:
    """The share () of the returns' variance that the values explain, over valid rows; 1 is perfect."""
    weight = batch["valid"] / batch["valid"].sum().clamp(min=1)
    error = batch["return"] - batch["value"]
    variances = [(weight * (x - (weight * x).sum()) ** 2).sum() for x in (error, batch["return"])]
    return 1 - variances[0] / variances[1].clamp(min=1e-8)


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    T = args.num_steps
    N = args.num_envs
    batch_size = T * N
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if batch_size < 2:
        fail("--num-envs times --num-steps, the steps of a rollout, must be at least 2.")
    if args.env_id not in ENVS:
        fail(f"no env {args.env_id!r} in this file; try {' or '.join(ENVS)}.")
    env = ENVS[args.env_id]
    saved = load_checkpoint(args)
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    run_dir, writer, device = start_run(args, saved)
    torch.manual_seed(args.seed)

    agent = DiscreteAgent(env.obs_dim, env.num_actions).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    envs = first_envs(env, N, device)
    random = torch.cuda if device.type == "cuda" else torch  # whose generator draws all that follows
    if saved:
        for name, x in envs.items():
            x.copy_(saved["envs"][name])
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        random.set_rng_state(saved["rng_state"])

    def step(envs: dict, noise: Tensor, uniform: Tensor) -> tuple[dict, dict]:
        """Acts in all envs and steps them. Returns what they are then, and a row of the rollout, (N, ..) of each."""
        obs = env.observation(envs["state"])
        action = (agent.actor(obs.float()) + noise).argmax(-1)  # with Gumbel noise, this samples from softmax(logits)
        valid = ~envs["done"]  # where the last step ended an episode, this one only resets
        envs, reward, terminated = step_device(env, envs, action, uniform)
        row = {"obs": obs, "action": action, "valid": valid.float(), "reward": reward}
        return envs, row | {"terminated": terminated.float(), "done": envs["done"].float()}

    def iterate(envs: dict, noise: Tensor, uniform: Tensor) -> tuple[dict, dict, Tensor]:
        """A rollout and a gradient step on it; the host reads nothing."""
        rows = []
        with torch.no_grad():
            for t in range(T):
                envs, row = step(envs, noise[t], uniform[t])
                rows.append(row)
            last_value = agent.critic(env.observation(envs["state"]).float()).squeeze(-1)
        rollout = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        logits, value = agent(rollout["obs"])
        loss, learned, losses = a2c_loss(logits, value, last_value, rollout, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
        optimizer.step()
        return envs, learned, losses

    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    clock = time.perf_counter(), global_step  # of the last report
    interval = args.checkpoint_interval or math.inf
    for iteration in range(first_iteration, num_iterations):
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"] = learning_rate
        noise = -torch.empty(T, N, env.num_actions, device=device).exponential_().log()  # Gumbel noise
        uniform = torch.rand(T, N, env.num_uniforms, device=device)
        envs, learned, losses = iterate(envs, noise, uniform)
        global_step += batch_size

        # report and save
        if (iteration + 1) % REPORT_EVERY and iteration + 1 < num_iterations and not signals:
            continue
        losses = dict(zip(A2C_LOSSES, losses)) | {"explained_variance": explained_variance(learned)}
        ended = ~envs["last_return"].isnan()
        last_returns = envs["last_return"][ended].tolist()
        metrics = report(losses, agent.parameters(), last_returns, global_step, clock, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        if last_returns:
            writer.add_scalar("charts/episodic_return", metrics["episodic_return"], global_step)
            writer.add_scalar("charts/episodic_length", envs["last_length"][ended].float().mean(), global_step)
        is_due = global_step // interval > clock[1] // interval  # passed since the last report
        clock = time.perf_counter(), global_step
        if is_due or signals:
            kept = {"iteration": iteration + 1, "rng_state": random.get_rng_state()}
            kept |= {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "envs": envs}
            save_checkpoint(run_dir, args, kept)
        if signals:
            break

    finish_run(args, run_dir, metrics, writer, GreedyDiscreteAgent(agent), torch.zeros(2, env.obs_dim))
    progress.close()
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
