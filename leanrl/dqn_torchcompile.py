# /// script
# dependencies = ["torch==2.13.0", "tensordict==0.15.3", "gymnasium==1.4.0", "numpy==2.4.6", "tyro==1.0.17",
#                 "tqdm==4.70.1", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""DQN (Mnih et al. 2015, https://www.nature.com/articles/nature14236) on vectors, compiled and captured.

    python leanrl/dqn_torchcompile.py --env-id CartPole-v1 --seed 1 --compile --cudagraphs

Twin: dqn.py, in plain PyTorch; `diff -u` the two. Each perf[n] is explained in docs/performance.md.
Shapes: N = num_envs, B = batch_size, O the size of an observation, A the number of actions.
Departures from CleanRL's script of this name:
1. The order is act, learn, step, store: the newest transition can be drawn one step later.
2. An observation is stored once, and the step in which an env resets itself weighs nothing in a loss.
3. The network is asked only when it decides: an exploring step draws its action without it.
"""

import copy
import difflib
import json
import math
import os
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
from tensordict.nn import CudaGraphModule  # perf[2]
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value  # perf[1]
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

REPORT_INTERVAL = 500  # env steps
WARMUP_REPORTS = 3  # not in the reported rate: compilation, capture, cold caches


@dataclass
class Args:
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # of everything random; different seeds share no env stream
    torch_deterministic: bool = True  # let cuDNN choose only deterministic kernels
    cuda: bool = True  # use a GPU if there is one
    device: str | None = None  # a certain device, such as cuda:1; overrides --cuda

    env_id: str = "CartPole-v1"  # any Gymnasium id with vectors and discrete actions, also my_package:MyEnv-v0
    total_timesteps: int = 500_000  # env steps, summed over envs
    learning_rate: float = 2.5e-4  # of Adam
    num_envs: int = 1  # envs stepped in turn; divides --train-frequency
    buffer_size: int = 10_000  # transitions that the replay ring holds
    gamma: float = 0.99  # discount
    tau: float = 1.0  # share of the new parameters in a step of the target
    target_network_frequency: int = 500  # env steps between steps of the target
    batch_size: int = 128  # transitions in an update
    start_e: float = 1.0  # probability of a random action at the start
    end_e: float = 0.05  # and in the end
    exploration_fraction: float = 0.5  # of total_timesteps, until --end-e is reached
    learning_starts: int = 10_000  # env steps before the first update
    train_frequency: int = 10  # env steps between updates

    compile: bool = False  # perf[1] compile the update
    cudagraphs: bool = False  # perf[2] capture the update as a CUDA graph

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


class QNetwork(nn.Module):
    """The values of all actions in a state."""

    def __init__(self, obs_dim: int, num_actions: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(obs_dim, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_actions)
        )

    def forward(self, obs: Tensor) -> Tensor:  # (.., O) -> (.., A)
        return self.layers(obs)


def linear_schedule(start: float, end: float, duration: float, step: np.ndarray) -> np.ndarray:
    """From start at step 0 to end at step `duration`, and end from there on."""
    share = np.minimum(step / max(duration, 1e-9), 1)
    return (1 - share) * start + share * end


def replay_ring(buffer_size: int, num_envs: int, row_size: int, device: torch.device) -> Tensor:
    """Zeros (C, N, row_size) for `buffer_size` transitions, or one sentence on the memory that it takes.

    Row t % C holds, for each env, the observation at time t, and the action, reward, terminated and valid of the step
    that led to it. So a transition is two neighbouring rows, and no observation is stored twice.
    """
    rows = max(buffer_size // num_envs, 1) + 1
    needed, available = 4 * rows * num_envs * row_size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    elif (meminfo := Path("/proc/meminfo")).exists():
        available = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text())[1])
    if needed > available:
        fail(f"--buffer-size {buffer_size} needs {needed:,} bytes on {device}, where {available:,} are available.")
    return torch.zeros(rows, num_envs, row_size, device=device)


def sample(ring: Tensor, newest, pairs, batch_size: int, obs_dim: int) -> dict[str, Tensor]:
    """A batch of transitions from the ring, uniform over the last `pairs` pairs of rows up to time `newest`.

    Drawn in float64, since float32 would miss some rows of a large ring. A mean over the rows that count is a sum
    weighted by `weight`, 0 where an env reset itself.
    """
    rows, num_envs, _ = ring.shape
    draw = (torch.rand(batch_size, dtype=torch.float64, device=ring.device) * (pairs * num_envs)).long()
    time, env = newest - draw // num_envs, draw % num_envs
    obs, after = ring[(time - 1) % rows, env, :obs_dim], ring[time % rows, env]
    reward, terminated, valid = after[:, -3:].unbind(-1)
    batch = {"obs": obs, "action": after[:, obs_dim:-3], "next_obs": after[:, :obs_dim]}
    return batch | {"reward": reward, "terminated": terminated, "weight": valid / valid.sum().clamp(min=1)}


def td_target(batch: dict[str, Tensor], next_value: Tensor, gamma: float) -> Tensor:
    """One-step targets (B,): the reward and, unless the episode terminated, the discounted next value."""
    return batch["reward"] + gamma * (1 - batch["terminated"]) * next_value


def td_loss(q: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean squared error of values (.., B) over the rows that count."""
    return (weight * (q - target) ** 2).sum(-1)


# perf[12] keep all parameters in one vector: Adam and the checks before a call meet one tensor
def unflatten(flat: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The parameters by name, as views of their vector (P,)."""
    return {k: x.view(s) for (k, s), x in zip(shapes.items(), flat.split([s.numel() for s in shapes.values()]))}


def adam_(params, grads, exp_avgs, exp_avg_sqs, step: Tensor, lr: Tensor, eps: float):
    """A step of Adam (Kingma & Ba 2015, end of section 2) in place; perf[3] step and lr are tensors, not constants."""
    step += 1
    power, power_sq = (step * math.log(0.9)).exp(), (step * math.log(0.999)).exp()  # as ** a loop would repeat them
    unbias = (1 - power_sq).sqrt()
    rate, eps = lr * unbias / (1 - power), eps * unbias
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs):
        exp_avg.lerp_(grad, 0.1)
        exp_avg_sq.lerp_(grad**2, 0.001)
        param.sub_(rate * exp_avg / (exp_avg_sq.sqrt() + eps))


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


@torch.compiler.set_stance("default")  # perf[13] guards are back when train ends, also by an error
def train(args: Args) -> dict[str, float]:
    """Trains an agent and returns the final metrics, which summary.json in the run folder holds too."""
    for name, value in vars(args).items():
        least = int(type(value) is int and name not in ("seed", "learning_starts"))
        if type(value) in (int, float) and not value >= least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
    N, B, total_steps = args.num_envs, args.batch_size, args.total_timesteps // args.num_envs
    if args.train_frequency % N or args.buffer_size < args.train_frequency:
        fail("--train-frequency must be a multiple of --num-envs, and --buffer-size at least --train-frequency.")
    needed = N + -(-max(args.learning_starts, 1) // args.train_frequency) * args.train_frequency  # one update
    if args.total_timesteps < needed:
        fail(f"--total-timesteps must be at least {needed}, or nothing is learned after --learning-starts.")
    envs = [make_env(args.env_id, gym.spaces.Discrete) for _ in range(N)]
    actions, obs_dim = envs[0].action_space, envs[0].observation_space.shape[0]
    device, run_dir, writer = start_run(args)
    torch.set_num_threads(1)  # matrices this small leave a second core little to do but to be waited for
    rng, ahead = np.random.default_rng(args.seed), np.arange(REPORT_INTERVAL)[:, None]
    exploration_steps = args.exploration_fraction * args.total_timesteps
    # A row of the replay ring. Its parts are views: stepping the envs fills it.
    row, truncated = np.zeros((N, obs_dim + 1 + 3), np.float32), np.zeros(N, bool)
    obs, row_action, (reward, terminated, valid) = row[:, :obs_dim], row[:, obs_dim], row.T[-3:]
    for i, env in enumerate(envs):
        obs[i], _ = env.reset(seed=10_000 * args.seed + i)  # once; later resets continue the env's stream
    ring = replay_ring(args.buffer_size, *row.shape, device)
    ring[0] = torch.as_tensor(row)
    # perf[4] rows go to the device a batch at a time, with the update; time of the newest is counted there
    on_gpu, K = device.type == "cuda", args.train_frequency // N
    rows = torch.zeros(K, *row.shape, pin_memory=on_gpu)  # perf[7] asynchronous, capturable copies
    newest, offsets = torch.zeros((), dtype=torch.long, device=device), torch.arange(1, K + 1, device=device)
    host_rows, updated = rows.numpy(), torch.cuda.Event() if on_gpu else None

    q_network = QNetwork(obs_dim, int(actions.n)).to(device)
    flat = nn.utils.parameters_to_vector(q_network.requires_grad_(False).parameters())  # perf[12]
    nn.utils.vector_to_parameters(flat, q_network.parameters())  # from here on they are views of it
    target_flat, shapes = copy.deepcopy(flat), {name: p.shape for name, p in q_network.named_parameters()}
    adam_state = [torch.zeros_like(flat)], [torch.zeros_like(flat)], torch.full((), 0, device=device)
    lr = torch.full((), args.learning_rate, device=device)  # perf[3]
    # perf[14] act on the host in NumPy, many times faster on single rows; a GPU sends the parameters after each update
    host_flat = torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat) if on_gpu else flat
    start = int(actions.start)
    w1, b1, w2, b2, w3, b3 = (p.numpy().T for p in unflatten(host_flat, shapes).values())

    def act() -> np.ndarray:
        hidden = np.maximum(obs @ w1 + b1, 0)  # perf[14]
        return (np.maximum(hidden @ w2 + b2, 0) @ w3 + b3).argmax(-1) + actions.start

    def insert(new_rows: Tensor):  # perf[4]
        ring.index_copy_(0, (newest + offsets) % len(ring), new_rows)
        newest.add_(K)

    def learn(new_rows: Tensor) -> dict[str, Tensor]:
        """A step of the network towards the target (arXiv:1312.5602, eq. 2) on a new batch."""
        insert(new_rows)
        batch = sample(ring, newest, newest.clamp(max=len(ring) - 1), B, obs_dim)
        next_q = functional_call(q_network, unflatten(target_flat, shapes), batch["next_obs"])
        target = td_target(batch, next_q.amax(-1), args.gamma)

        def loss_of(flat: Tensor):
            q = functional_call(q_network, unflatten(flat, shapes), batch["obs"])
            q = q.gather(-1, batch["action"].long() - start).squeeze(-1)
            return td_loss(q, target, batch["weight"]), q

        grad, (loss, q) = grad_and_value(loss_of, has_aux=True)(flat)  # perf[1]
        adam_([flat], [grad], *adam_state, lr, eps=1e-8)
        return {"td_loss": loss, "q_values": (batch["weight"] * q).sum()}

    def update() -> dict[str, Tensor]:
        losses = learn(rows.to(device, non_blocking=True))
        if on_gpu:
            host_flat.copy_(flat, non_blocking=True)
        return losses

    if args.compile:  # perf[1]
        options = {"fallback_random": True, "cpp_wrapper": device.type == "cpu"}  # perf[17] C++ glue, torch's generator
        learn = torch.compile(learn, fullgraph=True, options=options)
    if args.cudagraphs and on_gpu:  # perf[2] record the launches once, replay them with one call
        update = CudaGraphModule(update, warmup=3)
    elif args.cudagraphs:
        print("warning: --cudagraphs needs a GPU; going on without.", file=sys.stderr)

    progress = tqdm(total=total_steps * N, unit="step", desc=args.exp_name, dynamic_ncols=True)
    last_returns, losses, marks, global_step = deque(maxlen=100), {}, [], 0
    for step in range(total_steps):
        # act
        now = step % REPORT_INTERVAL
        if now == 0:  # draw many at once
            random_action = actions.start + rng.integers(actions.n, size=(REPORT_INTERVAL, N))
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, global_step + N * ahead)
            greedy = rng.random((REPORT_INTERVAL, N)) >= epsilon
            ask = greedy.any(1).tolist()
        action = np.where(greedy[now], act(), random_action[now]) if ask[now] else random_action[now]

        # learn
        learning = step > 0 and global_step >= args.learning_starts
        if learning and global_step % args.train_frequency == 0:
            marks = marks or [(time.perf_counter(), global_step)]
            losses = update()
            updated.record() if on_gpu else None
        elif step > 0 and global_step % args.train_frequency == 0:
            insert(rows.to(device))  # perf[4]
        if learning and global_step % args.target_network_frequency < N:
            target_flat.lerp_(flat, args.tau)

        # step and store
        row_action[:], valid[:] = action, 1 - np.maximum(terminated, truncated)
        global_step += N
        for episode in step_envs(envs, action, obs, reward, terminated, truncated):
            writer.add_scalar("charts/episodic_return", episode["r"], global_step)
            writer.add_scalar("charts/episodic_length", episode["l"], global_step)
            last_returns.append(episode["r"])
        if on_gpu and step % K == 0:  # perf[6] the device has learned meanwhile
            updated.synchronize()  # the one sync of an update, on the parameters
        host_rows[step % K] = row

        # report
        if losses and (global_step % REPORT_INTERVAL < N or step + 1 == total_steps):
            metrics = report(losses, last_returns, marks, global_step, writer, progress)
            writer.add_scalar("charts/epsilon", epsilon[now, 0], global_step)
            if args.compile:  # perf[13] all is compiled and no shape changes: skip the guards
                torch.compiler.set_stance(skip_guard_eval_unsafe=True)

    ran = {"device": str(device), "compile": args.compile, "cudagraphs": args.cudagraphs and on_gpu}
    (run_dir / "summary.json").write_text(json.dumps({"ran": ran, "metrics": metrics, "args": asdict(args)}, indent=2))
    [resource.close() for resource in (progress, writer, *envs)]
    return metrics


if __name__ == "__main__":
    train(tyro.cli(Args))
