# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "popgym==1.0.7", "numpy==2.4.6",
#     "tyro==1.0.17", "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0", "tensordict==0.15.3"]
# ///
"""Proximal policy optimization (PPO) with a memory: an LRU, compiled and captured as CUDA graphs.

    python leanrl/ppo_lru_torchcompile.py --env-id popgym:popgym-RepeatPreviousEasy-v0 --compile --cudagraphs

Papers: Schulman et al. 2017, https://arxiv.org/abs/1707.06347 ("eq."), Orvieto et al. 2023, arxiv.org/abs/2303.06349
Plain twin: ppo_lru.py. docs/performance.md explains each perf[name].
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
import random
import re
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial  # perf[graph]
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

PPO_LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")  # by ppo_loss


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs; env seeds of two runs overlap only by chance
    torch_deterministic: bool = True  # use deterministic cuDNN kernels only
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "popgym:popgym-RepeatPreviousEasy-v0"  # any Gymnasium id with vectors and discrete actions
    env_kwargs: str = "{}"  # settings of the env as JSON, e.g. '{"max_episode_length": 50}'
    total_timesteps: int = 500_000  # env steps, summed over all envs, in whole rollouts
    learning_rate: float = 1e-3  # learning rate of Adam
    num_envs: int = 32  # number of envs, stepped one after the other
    num_steps: int = 128  # steps of each env per rollout, through which gradients flow
    hidden_size: int = 128  # width of each layer, and number of complex numbers in the memory
    reward_scale: float = 10.0  # factor of each reward; choose it so that returns are near 10
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch, of whole envs; must divide --num-envs
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize the advantages of each minibatch
    clip_coef: float = 0.2  # clip range of the policy ratio and, with --clip-vloss, of the value
    clip_vloss: bool = True  # clip the change of the value, too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip the norm of the gradient to this value

    # perf[graph] perf[capture]
    compile: bool = False  # compile the update
    cudagraphs: bool = False  # capture an epoch of updates as a CUDA graph

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
        hidden = encoded + nn.functional.silu(self.readout(states))
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
        return action + self.first_action, torch.cat([state, nn.functional.one_hot(action, num_actions)], -1)


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


def learn_from_rollouts_(agent: nn.Module, learned: dict, batch: dict, args: Args, idx: Tensor) -> Tensor:
    """A gradient step on the rollouts of the envs idx (n,); returns what to log, PPO_LOSSES in one tensor."""
    minibatch = {name: x[:, idx] for name, x in batch.items()}

    def loss_of(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, value, _ = functional_call(agent, parameters, (minibatch["inputs"], minibatch["first_state"][0]))
        logprob, entropy = categorical_logprob_entropy(minibatch["action"], logits)
        return ppo_loss(logprob, entropy, value, minibatch, args)

    parameters = learned["parameters"]
    grads, (_, losses) = grad_and_value(loss_of, has_aux=True)(parameters)  # perf[graph]
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    adam_(parameters.values(), [grad * scale for grad in grads.values()], *learned["adam"], learned["lr"], eps=1e-5)
    return losses


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it save and stop early."""
    check_numbers(args)
    T = args.num_steps
    N = args.num_envs
    batch_size = T * N
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if N % args.num_minibatches:
        fail(f"--num-minibatches must divide --num-envs ({N}): a minibatch holds whole envs.")
    saved = load_checkpoint(args)
    first_iteration = saved.get("iteration", 0)
    if first_iteration >= num_iterations:
        fail("nothing is left to do; raise --total-timesteps to go on.")
    start_anew(args.seed, 0, [])  # seeds what makes envs and networks
    envs = [make_env(args, gym.spaces.Discrete) for _ in range(N)]
    obs_dim = envs[0].observation_space.shape[0]
    num_actions = int(envs[0].action_space.n)
    first_action = int(envs[0].action_space.start)
    run_dir, writer, device = start_run(args, saved)
    if args.cudagraphs and device.type != "cuda":  # perf[capture]
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)
        args.cudagraphs = False

    inputs = np.zeros((N, obs_dim + num_actions), np.float32)  # an observation, and the previous action as one-hot
    obs = inputs[:, :obs_dim]
    reward = np.zeros(N)
    terminated = np.zeros(N, bool)
    truncated = np.full(N, first_iteration > 0)  # a resumed run begins with resets, as after a save
    totals = np.zeros((2, N))  # return and length of the open episodes
    agent = LRUAgent(obs_dim + num_actions, num_actions, args.hidden_size).to(device).requires_grad_(False)
    # perf[graph] what a run has learned is tensors alone; perf[tensor] a number would be compiled as a constant
    learned = {"parameters": dict(agent.named_parameters()), "lr": torch.zeros((), device=device)}
    learned["adam"] = adam_state(learned["parameters"].values())
    state = torch.zeros(N, 2 * args.hidden_size)  # perf[host]
    obs[:] = start_anew(args.seed, first_iteration, envs)
    if saved:
        for tensor, saved_tensor in zip(tree_leaves(learned), saved["state"]):  # perf[graph]
            tensor.copy_(saved_tensor)

    env_buffer = np.zeros((4, T, N), np.float32)  # reward, terminated, done, valid
    global_step = first_iteration * batch_size
    progress = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", desc=args.exp_name)
    last_returns = deque(saved.get("last_returns", []), maxlen=100)
    clock = time.perf_counter(), global_step  # of the last report
    interval = args.checkpoint_interval or math.inf

    host_agent = copy.deepcopy(agent).cpu()  # perf[host] acts beside the envs: a GPU would be waited for
    agent.recurrence = lru_scan  # perf[scan]
    input_buffer = torch.zeros(T + 1, N, obs_dim + num_actions)  # perf[host]
    action_buffer = torch.zeros(T, N, dtype=torch.long)
    logprob_buffer = torch.zeros(T, N)
    value = torch.zeros(T + 1, N)
    batch = {}  # the first rollout fills it
    update = partial(learn_from_rollouts_, agent, learned, batch, args)
    if args.compile:  # perf[graph]
        update = torch.compile(update, fullgraph=True)

    def update_epoch(permutation: Tensor) -> Tensor:  # perf[capture] all updates of an epoch in one graph
        for idx in permutation.split(N // args.num_minibatches):
            losses = update(idx)
        return losses

    if args.cudagraphs:  # perf[capture] record the launches once, replay them with one call
        logging.getLogger("tensordict").setLevel(logging.WARNING)  # a line per graph would tear the progress bar
        update_epoch = CudaGraphModule(update_epoch, warmup=3)

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
            action = action_buffer[t].numpy()  # perf[host] no sync

            # step and store
            valid = ~(terminated | truncated)  # where the last step ended an episode, this one only resets
            global_step += N
            for return_, length in step_envs(envs, first_action + action, obs, reward, terminated, truncated, totals):
                writer.add_scalar("charts/episodic_return", return_, global_step)
                writer.add_scalar("charts/episodic_length", length, global_step)
                last_returns.append(return_)
            inputs[:, obs_dim:] = np.eye(num_actions)[action] * valid[:, None]  # no action precedes an episode
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
        learning_rate = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        learned["lr"].fill_(learning_rate)  # perf[tensor]
        for _ in range(args.update_epochs):
            losses = dict(zip(PPO_LOSSES, update_epoch(torch.randperm(N, device=device))))
        host_agent.load_state_dict(agent.state_dict())  # perf[host]

        # report and save
        losses["explained_variance"] = explained_variance(batch)
        metrics = report(losses, agent.parameters(), last_returns, global_step, clock, writer, progress)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        is_due = global_step // interval > clock[1] // interval  # passed since the last report
        clock = time.perf_counter(), global_step
        if is_due or signals:
            kept = {"iteration": iteration + 1, "last_returns": list(last_returns)}
            kept["state"] = tree_leaves(learned)  # perf[graph]
            save_checkpoint(run_dir, args, kept)
            start_anew(args.seed, iteration + 1, envs)  # as a run that resumes here does
            truncated[:] = True  # the next step resets every env, and with it the memory
        if signals:
            break

    policy = GreedyRecurrentAgent(host_agent, first_action)  # perf[host]
    example = torch.zeros(2, obs_dim), torch.zeros(2, 2 * args.hidden_size + num_actions)
    finish_run(args, run_dir, metrics, writer, policy, *example)
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
