"""Measures recurrent networks over a sequence with resets: loop, padding, parallel scan; eager, compiled, JAX.

    python benchmark/scans.py --steps 32 128 512

What is timed is the loss and its gradient, of an encoder, a recurrence and a linear layer, on one core. All are
measured in turns. A chain of T steps makes the compiler work for minutes, so loops are compiled for the shortest T
only. First calls, which compile, may use all cores. Keeps a table in OUT/scans.json.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # first calls are cold
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from results import ROOT, RUNS, keep, machine
from torch import Tensor, nn
from torch.func import grad_and_value
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "leanrl"))
from ppo_lru_torchcompile import lru, lru_scan, times  # noqa: E402
from ppo_rnn_torchcompile import as_operator, gru, lstm, recur  # noqa: E402

NUM_ENVS = 8  # of a minibatch
WIDTH = 128
INPUTS = 16
RESETS = 0.02  # share of the steps in which an episode starts
STEPS = {"LSTM": lstm, "GRU": gru}
PARTS = {"LSTM": 4, "GRU": 3, "LRU": 2}  # what the input of each kind is mapped to, in widths


@dataclass
class Args:
    steps: tuple[int, ...] = (32, 128, 512)  # lengths of the sequence
    rounds: int = 7  # turns of all networks
    seconds: float = 0.3  # of each network in each turn
    longest_compilation: int = 32  # loops are compiled up to this length
    out: Path = RUNS  # where the table goes


# Networks: an encoded sequence x (T, N, H), weights, kept (T, N, 1) -> features (T, N, ..). The state starts as zeros.


def gated(recurrence: Callable, step: Callable, x: Tensor, weights: dict, kept: Tensor) -> Tensor:
    gates = F.linear(x, weights["input"], weights["bias"])
    state = x.new_zeros(NUM_ENVS, WIDTH * (2 if step is lstm else 1))
    return recurrence(step, weights["state"], gates, kept, state)[..., :WIDTH]


def linear(recurrence: Callable, x: Tensor, weights: dict, kept: Tensor) -> Tensor:
    drive = F.linear(x, weights["input"], weights["bias"])
    return recurrence(-weights["rate"].exp(), weights["angle"], drive, kept, torch.zeros_like(drive[0]))


@cache
def pieces(T: int) -> list[tuple[int, slice]]:
    """The env and the steps of each piece of an episode; found once, so that only padding is timed."""
    _, _, kept = make_sequence(T)
    bounds = [[0, *(t for t in range(1, T) if not kept[t, n]), T] for n in range(NUM_ENVS)]
    return [(n, slice(a, b)) for n, ts in enumerate(bounds) for a, b in zip(ts, ts[1:])]


def padded_lstm(x: Tensor, weights: dict, kept: Tensor) -> Tensor:
    """Each piece of an episode is a sequence of its own, filled up to the longest."""
    places = pieces(len(x))
    padded = nn.utils.rnn.pad_sequence([x[place, n] for n, place in places])
    zeros = x.new_zeros(1, len(places), WIDTH)
    flat = [weights["input"], weights["state"], weights["bias"], torch.zeros_like(weights["bias"])]
    states, *_ = torch.lstm(padded, (zeros, zeros), flat, True, 1, 0.0, False, False, False)
    rows = [[] for _ in range(NUM_ENVS)]
    for i, (n, place) in enumerate(places):
        rows[n].append(states[: place.stop - place.start, i])
    return torch.stack([torch.cat(row) for row in rows], 1)


def doubling(log_radius: Tensor, angle: Tensor, drive: Tensor, kept: Tensor, state: Tensor) -> Tensor:
    """lru() from a state of zeros in log2(T) steps: eigenvalues to the power of 1, 2, 4, ..., and products of kept."""
    h = torch.stack(drive.chunk(2, -1))
    span = 1
    while span < h.shape[1]:
        power = (span * log_radius).exp() * torch.stack([(span * angle).cos(), (span * angle).sin()])
        h = torch.cat([h[:, :span], h[:, span:] + times(power[:, None, None], kept[span:] * h[:, :-span])], 1)
        kept = torch.cat([kept[:span], kept[span:] * kept[:-span]])
        span *= 2
    return torch.cat(h.unbind(), -1)


NETWORKS = {  # name, which begins with its kind -> (network, whether it is a chain of T steps)
    "LSTM, loop": (partial(gated, recur, lstm), True),
    "LSTM, torch.lstm on padded pieces": (padded_lstm, True),
    "GRU, loop": (partial(gated, recur, gru), True),
    "LRU, loop": (partial(linear, lru), True),
    "LRU, doubling": (partial(linear, doubling), False),
    "LRU, two levels": (partial(linear, lru_scan), False),
}


def make_weights(kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    weights = {"encoder": matrix(WIDTH, INPUTS), "input": matrix(PARTS[kind] * WIDTH, WIDTH)}
    weights |= {"bias": np.zeros(PARTS[kind] * WIDTH, np.float32)}
    weights |= {"output": matrix(INPUTS, 2 * WIDTH if kind == "LRU" else WIDTH)}
    if kind == "LRU":
        weights |= {"rate": rng.uniform(-6, -1, WIDTH).astype(np.float32)}
        weights |= {"angle": rng.uniform(0, math.pi, WIDTH).astype(np.float32)}
    else:
        weights["state"] = matrix(PARTS[kind] * WIDTH, WIDTH)
    return weights


def make_sequence(T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs and targets (T, N, 16), and kept (T, N, 1): 0 where an episode starts."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.standard_normal((2, T, NUM_ENVS, INPUTS)).astype(np.float32)
    return inputs, targets, (rng.random((T, NUM_ENVS, 1)) > RESETS).astype(np.float32)


def torch_call(kind: str, network: Callable, T: int, compiled: bool) -> Callable[[], tuple[dict, float]]:
    """A function that computes the gradient by name, and the loss."""
    weights = {name: torch.from_numpy(weight) for name, weight in make_weights(kind).items()}
    inputs, targets, kept = map(torch.from_numpy, make_sequence(T))

    def loss_of(weights):
        x = torch.tanh(F.linear(inputs, weights["encoder"]))
        return ((F.linear(network(x, weights, kept), weights["output"]) - targets) ** 2).mean()

    gradient = grad_and_value(loss_of)
    if compiled:
        gradient = torch.compile(gradient, fullgraph=True, dynamic=False)
    return lambda: gradient(weights)


def jax_calls(T: int) -> dict[str, Callable]:
    """The same networks in JAX: lax.scan, and lax.associative_scan where the recurrence is linear."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def lstm(x, weights, kept):
        def step(state, inputs):
            h, c = state
            gates_t, kept_t = inputs
            i, f, g, o = jnp.split(gates_t + (kept_t * h) @ weights["state"].T, 4, -1)
            c = jax.nn.sigmoid(f) * (kept_t * c) + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros_like(x[0])
        return lax.scan(step, (zeros, zeros), (x @ weights["input"].T + weights["bias"], kept))[1]

    def gru(x, weights, kept):
        def step(h, inputs):
            gates_t, kept_t = inputs
            h = kept_t * h
            reset, update, new = jnp.split(gates_t, 3, -1)
            h_reset, h_update, h_new = jnp.split(h @ weights["state"].T, 3, -1)
            new = jnp.tanh(new + jax.nn.sigmoid(reset + h_reset) * h_new)
            h = new + jax.nn.sigmoid(update + h_update) * (h - new)
            return h, h

        return lax.scan(step, jnp.zeros_like(x[0]), (x @ weights["input"].T + weights["bias"], kept))[1]

    def scan(a, b):
        def step(h, inputs):
            h = inputs[0] * h + inputs[1]
            return h, h

        return lax.scan(step, jnp.zeros_like(b[0]), (a, b))[1]

    def associative_scan(a, b):
        return lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b))[1]

    def lru(recurrence, x, weights, kept):
        real, imaginary = jnp.split(x @ weights["input"].T + weights["bias"], 2, -1)
        eigenvalue = jnp.exp(-jnp.exp(weights["rate"]) + 1j * weights["angle"])
        h = recurrence(eigenvalue * kept, real + 1j * imaginary)
        return jnp.concatenate([h.real, h.imag], -1)

    def call(kind: str, network: Callable) -> Callable:
        weights = jax.tree.map(jnp.asarray, make_weights(kind))
        inputs, targets, kept = make_sequence(T)

        def loss_of(weights):
            x = jnp.tanh(inputs @ weights["encoder"].T)
            return ((network(x, weights, kept) @ weights["output"].T - targets) ** 2).mean()

        gradient = jax.jit(jax.value_and_grad(loss_of))
        return lambda: jax.block_until_ready(gradient(weights))[::-1]

    networks = {"LSTM, scan": lstm, "GRU, scan": gru, "LRU, scan": partial(lru, scan)}
    networks["LRU, associative_scan"] = partial(lru, associative_scan)
    return {f"JAX: {name}": call(name.split(",")[0], network) for name, network in networks.items()}


def calls(T: int, args: Args) -> dict[tuple[str, str], Callable]:
    found = {}
    for name, (network, is_chain) in NETWORKS.items():
        kind = name.split(",")[0]
        found[name, "eager"] = torch_call(kind, network, T, compiled=False)
        if "padded" not in name and not (is_chain and args.longest_compilation < T):
            found[name, "compiled"] = torch_call(kind, network, T, compiled=True)
    for kind, step in STEPS.items():  # as in the twin of ppo_rnn: compiled pieces of the loop, called as one operator
        weight = torch.zeros(PARTS[kind] * WIDTH, WIDTH)
        recurrence = as_operator(step, T, weight, torch.zeros(NUM_ENVS, WIDTH * (2 if step is lstm else 1)))
        found[f"{kind}, one operator", "compiled"] = torch_call(
            kind, partial(gated, recurrence, step), T, compiled=True
        )
    return found | {(name, "jit"): call for name, call in jax_calls(T).items()}


def check(outcomes: dict[tuple[str, str], dict[str, float]]):
    """All networks of a kind must have the same loss and gradients."""
    expected = {}
    for (name, mode), found in outcomes.items():
        kind = name.removeprefix("JAX: ").split(",")[0]
        for what, value in expected.setdefault(kind, found).items():
            if not math.isclose(found[what], value, rel_tol=1e-3):
                sys.exit(f"error: {name}, {mode}: {what} is {found[what]}, not {value}.")


def use_cores(cores: set[int]):
    """Restricts all threads of this process, those of JAX too, to these cores."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def main(args: Args):
    cores = os.sched_getaffinity(0)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch._dynamo.config.recompile_limit = 64  # one function is compiled for each network and length
    rows = []
    for T in args.steps:
        networks, first, outcomes, times_of = calls(T, args), {}, {}, {}
        use_cores(cores)
        for key, call in tqdm(networks.items(), desc=f"first calls, T = {T}"):
            start = time.perf_counter()
            gradient, loss = call()
            first[key] = time.perf_counter() - start
            norms = {weight: float(np.linalg.norm(np.asarray(g))) for weight, g in gradient.items()}
            outcomes[key] = norms | {"loss": float(loss)}
        check(outcomes)
        use_cores({min(cores)})
        for _ in tqdm(range(args.rounds), desc=f"turns, T = {T}"):
            for key, call in networks.items():
                end = time.perf_counter() + args.seconds
                while time.perf_counter() < end:
                    start = time.perf_counter()
                    call()
                    times_of.setdefault(key, []).append(time.perf_counter() - start)
        for (name, mode), seconds in times_of.items():
            row = {"steps": T, "network": name, "mode": mode, "ms": 1e3 * float(np.median(seconds))}
            rows.append(row | {"first_call_s": first[name, mode]})
            print(f"T {T:4d}  {name:36s} {mode:9s} {row['ms']:8.2f} ms, first call {first[name, mode]:6.1f} s")
    sizes = {"num_envs": NUM_ENVS, "width": WIDTH, "resets": RESETS}
    keep(args.out, "scans", sizes | {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main(tyro.cli(Args))
