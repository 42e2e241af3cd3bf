# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "jaxlib==0.10.2", "optax==0.2.8", "numpy==2.4.6", "tyro==1.0.17", "tqdm==4.70.1",
#     "torch==2.13.0", "tensorboard==2.21.0", "wandb==0.31.0"]
# ///
"""Parallelised Q-network (PQN) with envs on the device, in JAX: to be held against the PyTorch files.

    python leanrl/pqn_device_env_jax.py --env-id CartPole-v1 --num-envs 128

Paper: Gallici et al. 2024, https://arxiv.org/abs/2407.04811.
From the same weights and the same random numbers it computes what pqn_device_env.py does. All iterations between two
reports are one call of one compiled function. It logs the same, but has no checkpoints and exports no policy.
PyTorch writes the logs and does nothing else. Shapes are those of pqn_device_env.py.
"""

import json
import math
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array, lax
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

REPORT_EVERY = 10  # rollouts between two reports, in which the host waits for the device


@dataclass(frozen=True)  # so that it can be hashed, as jax.jit needs it
class Args:
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seeds the agent and the envs
    cuda: bool = True  # use a GPU if there is one
    tf32: bool = False  # let a GPU multiply float32 numbers in TensorFloat32: faster, less exact

    env_id: str = "CartPole-v1"  # an env of this file, by its name in ENVS
    total_timesteps: int = 2_000_000  # env steps, summed over all envs, in whole rollouts
    learning_rate: float = 1e-3  # learning rate of Adam
    num_envs: int = 128  # number of envs, stepped together; a GPU likes thousands
    num_steps: int = 32  # steps of each env per rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero over the run
    gamma: float = 0.99  # discount factor
    q_lambda: float = 0.65  # lambda of Q(lambda): weight of the next step's return; its value has the rest
    num_minibatches: int = 4  # minibatches per epoch; must divide --num-envs times --num-steps
    update_epochs: int = 2  # passes over each rollout
    start_e: float = 1.0  # share of random actions at first
    end_e: float = 0.05  # share of random actions after --exploration-fraction of the run
    exploration_fraction: float = 0.2  # share of the run over which random actions become fewer
    max_grad_norm: float = 10.0  # clip the norm of the gradient to this value

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
    def initial(uniform: Array) -> Array:  # (N, num_uniforms) in [0, 1) -> state (N, 4)
        return 0.1 * uniform - 0.05

    @staticmethod
    def transition(state: Array, action: Array, uniform: Array) -> tuple[Array, Array, Array]:
        """The next state (N, 4), the reward (N,), and whether the episode terminates (N,)."""
        x, x_dot, theta, theta_dot = state.T  # position in m, angle in rad, and their rates per second
        force = 20.0 * action - 10.0
        sin = jnp.sin(theta)
        cos = jnp.cos(theta)
        push = (force + 0.05 * theta_dot**2 * sin) / 1.1
        theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        x_acc = push - 0.05 * theta_acc * cos / 1.1
        x = x + 0.02 * x_dot  # Euler's method, 50 steps a second
        theta = theta + 0.02 * theta_dot
        terminated = (jnp.abs(x) > 2.4) | (jnp.abs(theta) > math.radians(12))
        state = jnp.stack([x, x_dot + 0.02 * x_acc, theta, theta_dot + 0.02 * theta_acc], -1)
        return state, jnp.ones_like(x), terminated

    @staticmethod
    def observation(state: Array) -> Array:  # (N, O)
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
    def initial(uniform: Array) -> Array:  # -> ball x, y, its direction dx, dy, trail x, y, paddle, ... (N, 39)
        from_left = (uniform[:, 0] < 0.5).astype(jnp.int32)
        x = 9 - 9 * from_left
        dx = 2 * from_left - 1
        one = jnp.ones_like(x)
        numbers = jnp.stack([x, 3 * one, dx, one, x, 3 * one, 4 * one, 0 * one, 0 * one], -1)
        return jnp.concatenate([numbers, jnp.ones((len(x), 30), jnp.int32)], -1)  # the 30 bricks

    @staticmethod
    def transition(state: Array, action: Array, uniform: Array) -> tuple[Array, Array, Array]:
        old_x, old_y, dx, dy, _, _, paddle, struck, last_action = state[:, :9].T
        bricks = state[:, 9:]
        action = jnp.where(uniform[:, 0] < 0.1, last_action, action)  # now and then the last one is repeated
        paddle = jnp.clip(paddle + (action == 2) - (action == 1), 0, 9)
        x = old_x + dx
        y = old_y + dy
        dx = jnp.where((x < 0) | (x > 9), -dx, dx)
        dy = jnp.where(y < 0, -dy, dy)
        x = jnp.clip(x, 0, 9)
        y = jnp.maximum(y, 0)

        # a brick that is met breaks and throws the ball back, but not in two steps in a row
        field = 10 * (y - 1) + x
        met = bricks * (field[:, None] == jnp.arange(30))
        meets = met.sum(-1) > 0
        breaks = meets & (struck == 0)
        bricks = jnp.where(breaks[:, None], bricks - met, bricks)
        dy = jnp.where(breaks, -dy, dy)

        # under the ball's old place the paddle mirrors it, under the new one it sends it back; else the ball is lost
        at_bottom = y == 9
        bricks = jnp.where((at_bottom & (bricks.sum(-1) == 0))[:, None], 1, bricks)
        straight = at_bottom & (old_x == paddle)
        corner = at_bottom & ~straight & (x == paddle)
        dx = jnp.where(corner, -dx, dx)
        dy = jnp.where(straight | corner, -dy, dy)
        y = jnp.where(breaks | straight | corner, old_y, y)
        numbers = jnp.stack([x, y, dx, dy, old_x, old_y, paddle, meets, action], -1)
        return jnp.concatenate([numbers, bricks], -1), breaks * 1.0, at_bottom & ~straight & ~corner

    @staticmethod
    def observation(state: Array) -> Array:  # bytes (N, 400): of each field paddle, ball, trail and brick
        x, y, _, _, trail_x, trail_y, paddle, _, _ = state[:, :9].T
        fields = jnp.stack([90 + paddle, 10 * y + x, 10 * trail_y + trail_x], -1)
        obs = jnp.zeros((len(state), 400), jnp.uint8)
        obs = obs.at[jnp.arange(len(state))[:, None], 4 * fields + jnp.arange(3)].set(1)
        return obs.at[:, 43:160:4].set(state[:, 9:].astype(jnp.uint8))


ENVS = {"CartPole-v1": CartPole, "MinAtar/Breakout-v1": Breakout}


def step_device(env: type, envs: dict[str, Array], action: Array, uniform: Array):
    """Steps N envs: returns what they are then, their rewards (N,), and which episodes terminated (N,).

    An env whose episode has ended is reset instead; that step ignores the action and has reward 0 (autoreset mode
    NEXT_STEP). `envs` holds each env's state, its steps and its reward in the episode so far (clock and score), whether
    the episode is done, and the score and length of its last whole episode.
    """
    over = envs["done"]
    state, reward, terminated = env.transition(envs["state"], action, uniform)
    state = jnp.where(over[:, None], env.initial(uniform), state)
    reward = jnp.where(over, 0, reward)
    terminated = terminated & ~over
    clock = jnp.where(over, 0, envs["clock"] + 1)
    score = jnp.where(over, 0, envs["score"]) + reward
    done = terminated | (clock >= env.time_limit)
    last_return = jnp.where(done, score, envs["last_return"])
    last_length = jnp.where(done, clock, envs["last_length"])
    envs = {"state": state, "clock": clock, "score": score, "done": done}
    return envs | {"last_return": last_return, "last_length": last_length}, reward, terminated


def first_envs(env: type, num_envs: int, key: Array) -> dict[str, Array]:
    """N envs for step_device(). Their clocks differ, so that they are not all truncated in the same step."""
    clock_key, state_key = jax.random.split(key)
    clock = jax.random.randint(clock_key, (num_envs,), 0, env.time_limit)
    unknown = jnp.full(num_envs, jnp.nan)  # the first episode of an env, cut short, has no score
    envs = {"state": env.initial(jax.random.uniform(state_key, (num_envs, env.num_uniforms))), "clock": clock}
    envs |= {"score": unknown, "done": jnp.zeros(num_envs, bool)}
    return envs | {"last_return": unknown.copy(), "last_length": jnp.zeros_like(clock)}


def first_layers(key: Array, obs_dim: int, num_actions: int) -> list[tuple[Array, Array]]:
    """Weights and biases of two hidden layers of 128 units and an output, drawn as PyTorch draws those of nn.Linear."""
    sizes = ((obs_dim, 128), (128, 128), (128, num_actions))
    layers = []
    for k, (n, m) in zip(jax.random.split(key, len(sizes)), sizes):
        weight_key, bias_key = jax.random.split(k)
        bound = n**-0.5
        weight = jax.random.uniform(weight_key, (n, m), minval=-bound, maxval=bound)
        layers.append((weight, jax.random.uniform(bias_key, (m,), minval=-bound, maxval=bound)))
    return layers


def q_values(parameters: dict, obs: Array) -> Array:  # (.., O) -> (.., A)
    """The value of each action. Layer norm keeps it from diverging, as a target network does in DQN (section 4)."""
    x = obs * 1.0
    *hidden, (weight, bias) = parameters["layers"]
    for (hidden_weight, hidden_bias), (scale, shift) in zip(hidden, parameters["norms"]):
        x = x @ hidden_weight + hidden_bias
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        x = jax.nn.relu(x * scale + shift)
    return x @ weight + bias


def gae(reward: Array, value: Array, terminated: Array, done: Array, gamma: float, gae_lambda: float) -> Array:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16); all are (T, N), but value is (T + 1, N).

    If an episode ends at t, value[t + 1] is the value of its last observation, since the env resets one step later.
    A truncated step bootstraps from it, a terminated one does not. Both cut the trace.
    """
    delta = reward + gamma * (1 - terminated) * value[1:] - value[:-1]
    decay = gamma * gae_lambda * (1 - done)

    def step(advantage: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        delta_t, decay_t = now
        advantage = delta_t + decay_t * advantage
        return advantage, advantage

    _, advantages = lax.scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)
    return advantages


def q_loss(q: Array, batch: dict[str, Array]) -> tuple[Array, Array]:
    """Half the mean squared error of the actions' values, from q (B, A), and what to log; only valid rows count."""
    weight = batch["valid"] / jnp.maximum(batch["valid"].sum(), 1)
    value = jnp.take_along_axis(q, batch["action"][:, None], -1)[:, 0]
    loss = 0.5 * (weight * (value - batch["target"]) ** 2).sum()
    return loss, jnp.stack([loss, (weight * value).sum()])


def adam(args: Args) -> optax.GradientTransformation:
    """Gradients, scaled down to a norm, to steps of Adam that are not yet multiplied by the learning rate."""
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-5))


def iterate(args: Args, learner: dict, envs: dict, lr: Array, epsilon: Array, uniform: Array, permutations: Array):
    """A rollout and all updates on it: returns the learner, the envs, and the losses of the last update.

    The learner has parameters and Adam's state. Random numbers are uniform (T, N, num_uniforms + 2) and permutations
    (update_epochs, B).
    """
    env = ENVS[args.env_id]

    def step(envs: dict, uniform_t: Array) -> tuple[dict, dict]:
        obs = env.observation(envs["state"])
        q = q_values(learner["parameters"], obs)
        explores, draw = uniform_t[:, -2:].T
        action = jnp.where(explores < epsilon, (draw * env.num_actions).astype(int), q.argmax(-1))
        valid = ~envs["done"]  # where the last step ended an episode, this one only resets
        envs, reward, terminated = step_device(env, envs, action, uniform_t[:, :-2])
        row = {"obs": obs, "action": action, "value": q.max(-1), "valid": valid * 1.0}
        return envs, row | {"reward": reward, "terminated": terminated * 1.0, "done": envs["done"] * 1.0}

    envs, rollout = lax.scan(step, envs, uniform)
    last_value = q_values(learner["parameters"], env.observation(envs["state"])).max(-1)
    value = jnp.concatenate([rollout["value"], last_value[None]])  # of the best action
    outcome = (rollout["reward"], value, rollout["terminated"], rollout["done"])
    target = value[:-1] + gae(*outcome, args.gamma, args.q_lambda)
    batch = {name: rollout[name] for name in ("obs", "action", "valid")} | {"target": target}
    batch = {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}

    def update(learner: dict, idx: Array) -> tuple[dict, Array]:
        minibatch = {name: x[idx] for name, x in batch.items()}

        def loss_of(parameters: dict) -> tuple[Array, Array]:
            return q_loss(q_values(parameters, minibatch["obs"]), minibatch)

        grads, losses = jax.grad(loss_of, has_aux=True)(learner["parameters"])
        steps, adam_state = adam(args).update(grads, learner["adam"])
        parameters = jax.tree.map(lambda p, step: p - lr * step, learner["parameters"], steps)
        return {"parameters": parameters, "adam": adam_state}, losses

    minibatches = permutations.reshape(args.update_epochs * args.num_minibatches, -1)
    learner, losses = lax.scan(update, learner, minibatches)
    return learner, envs, losses[-1]


@jax.jit(static_argnums=0, donate_argnums=1)
def iterations(args: Args, carry: dict, first: int, last: int, num_iterations: int) -> dict:
    """Iterations first to last - 1. The carry has the learner, the envs, a key, and the losses."""
    env = ENVS[args.env_id]
    T = args.num_steps
    N = args.num_envs

    def body(iteration: Array, carry: dict) -> dict:
        key, uniform_key, permutation_key = jax.random.split(carry["key"], 3)
        uniform = jax.random.uniform(uniform_key, (T, N, env.num_uniforms + 2))  # two for exploring
        keys = jax.random.split(permutation_key, args.update_epochs)
        permutations = jax.vmap(lambda k: jax.random.permutation(k, T * N))(keys)
        lr = args.learning_rate * (1 - iteration / num_iterations if args.anneal_lr else 1)
        annealed = jnp.minimum(iteration / jnp.maximum(args.exploration_fraction * num_iterations, 1), 1)
        epsilon = args.start_e + annealed * (args.end_e - args.start_e)
        learner, envs, losses = iterate(args, carry["learner"], carry["envs"], lr, epsilon, uniform, permutations)
        return {"learner": learner, "envs": envs, "key": key, "losses": losses}

    return lax.fori_loop(first, last, body, carry)


def train(args: Args, signals: list[int] = ()) -> dict[str, float]:
    """Trains an agent and returns the final metrics; a signal makes it stop early."""
    check_numbers(args)
    batch_size = args.num_steps * args.num_envs
    num_iterations = args.total_timesteps // batch_size
    if num_iterations < 1:
        fail(f"--total-timesteps must be at least {batch_size}, a rollout.")
    if batch_size // args.num_minibatches < 2 or batch_size % args.num_minibatches:
        fail(f"a rollout has {batch_size} steps; --num-minibatches must divide it into equal parts of at least two.")
    if args.env_id not in ENVS:
        fail(f"no env {args.env_id!r} in this file; try {' or '.join(ENVS)}.")
    env = ENVS[args.env_id]
    if args.seed >= 2**32:
        fail(f"--seed must be below 2**32 for JAX, not {args.seed}.")
    run_dir, writer = start_run(args)

    layer_key, env_key, key = jax.random.split(jax.random.key(args.seed), 3)
    norms = [(jnp.ones(128), jnp.zeros(128)) for _ in range(2)]
    parameters = {"layers": first_layers(layer_key, env.obs_dim, env.num_actions), "norms": norms}
    carry = {"learner": {"parameters": parameters, "adam": adam(args).init(parameters)}, "key": key}
    carry |= {"envs": first_envs(env, args.num_envs, env_key), "losses": jnp.zeros(2)}

    progress = tqdm(total=num_iterations * batch_size, unit="step", desc=args.exp_name)
    clock = time.perf_counter(), 0  # of the last report
    for first in range(0, num_iterations, REPORT_EVERY):
        last = min(first + REPORT_EVERY, num_iterations)
        carry = iterations(args, carry, first, last, num_iterations)
        losses = dict(zip(("td_loss", "q_values"), carry["losses"].tolist()))  # waits for the device
        last_return = np.asarray(carry["envs"]["last_return"])
        ended = ~np.isnan(last_return)
        global_step = last * batch_size
        metrics = report(losses, last_return[ended].tolist(), global_step, clock, writer, progress)
        clock = time.perf_counter(), global_step
        learning_rate = args.learning_rate * (1 - (last - 1) / num_iterations if args.anneal_lr else 1)
        writer.add_scalar("charts/learning_rate", learning_rate, global_step)
        annealed = min((last - 1) / max(args.exploration_fraction * num_iterations, 1), 1)
        writer.add_scalar("charts/epsilon", args.start_e + annealed * (args.end_e - args.start_e), global_step)
        if ended.any():
            length = np.asarray(carry["envs"]["last_length"])[ended].mean()
            writer.add_scalar("charts/episodic_return", metrics["episodic_return"], global_step)
            writer.add_scalar("charts/episodic_length", length, global_step)
        if signals:
            break

    summary = {"script": Path(__file__).stem, "args": asdict(args), "metrics": metrics}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    writer.close()
    progress.close()
    return metrics


# ---------- From here on: checks, run folder, report, signals. ----------


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


def start_run(args: Args) -> tuple[Path, SummaryWriter]:
    """Makes the run folder with its TensorBoard writer (W&B follows it), and picks the device."""
    if not args.cuda:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if args.tf32 else "highest")
    run_dir = Path("runs", f"{run_prefix(args)}{datetime.now():%Y%m%d-%H%M%S-%f}")
    try:
        run_dir.mkdir(parents=True)  # fails if another run has it
    except OSError as error:
        fail(f"cannot make the run folder: {error}")
    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
        wandb.init(**names, config=asdict(args), sync_tensorboard=True)
    print(f"run folder: {run_dir}", file=sys.stderr)
    writer = SummaryWriter(run_dir, flush_secs=10)
    writer.add_text("args", json.dumps(asdict(args), indent=2))
    return run_dir, writer


def report(losses: dict, last_returns: list[float], global_step: int, clock, writer, progress) -> dict:
    """Logs and returns the metrics; exits if a loss is not finite."""
    metrics = losses | {"global_step": global_step}
    for name, loss in losses.items():
        writer.add_scalar(f"losses/{name}", loss, global_step)
    if not math.isfinite(sum(losses.values())):
        writer.close()
        sys.exit(f"\nerror: not finite: {metrics}.")
    metrics["episodic_return"] = float(np.mean(last_returns)) if last_returns else None
    progress.set_postfix(episodic_return=metrics["episodic_return"], refresh=False)
    progress.update(global_step - progress.n)
    metrics["SPS"] = (global_step - clock[1]) / (time.perf_counter() - clock[0])  # since the last report
    writer.add_scalar("charts/SPS", metrics["SPS"], global_step)
    return metrics


def run_until_stopped(train):
    """Reads the flags and trains; Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 makes train() end after its next report."""
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
        sys.exit(128 + signals[0])


if __name__ == "__main__":
    run_until_stopped(train)
