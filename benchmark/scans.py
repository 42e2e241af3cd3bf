"""Measures recurrent networks over a sequence with resets: loop, padding, parallel scan; eager, compiled, JAX.

    python benchmark/scans.py --steps 32 128 512

What is timed is the loss and its gradient, of an encoder, a recurrence and a linear layer, on one core. All are
measured in turns. A chain of T steps makes the compiler work for minutes, so loops are compiled for the shortest T
only. First calls, which compile, may use all cores. Writes a JSON file.
"""

import json
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
from compare import machine
from measure import ROOT
from torch import Tensor, nn
from torch.func import grad_and_value
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "leanrl"))
from ppo_lru_torchcompile import lru, lru_scan, times  # noqa: E402
from ppo_rnn_torchcompile import as_operator, gru, lstm  # noqa: E402

NUM_ENVS = 8  # of a minibatch
WIDTH = 128
INPUTS = 16
OPTIONS = {"cpp_wrapper": True, "cpp.use_decompose_tanh": True}  # as in the twins
RESETS = 0.02  # share of the steps in which an episode starts


@dataclass
class Args:
    steps: tuple[int, ...] = (32, 128, 512)  # lengths of the sequence
    rounds: int = 7  # turns of all networks
    seconds: float = 0.3  # of each network in each turn
    longest_compilation: int = 32  # loops are compiled up to this length
    out: Path = Path("runs/scans.json")  # where the JSON goes


# Networks: an encoded sequence x (T, N, H), weights, keep (T, N, 1) -> features (T, N, ..). The state starts as zeros.


def gru_loop(x: Tensor, weights: dict, keep: Tensor) -> Tensor:
    gates = F.linear(x, weights["input"], weights["bias"])
    h = torch.zeros_like(x[0])
    states = []
    for gates_t, keep_t in zip(gates.unbind(), keep.unbind()):
        h = keep_t * h
        reset, update, new = gates_t.chunk(3, -1)
        h_reset, h_update, h_new = F.linear(h, weights["state"]).chunk(3, -1)
        new = torch.tanh(new + torch.sigmoid(reset + h_reset) * h_new)
        h = torch.lerp(new, h, torch.sigmoid(update + h_update))
        states.append(h)
    return torch.stack(states)


def lstm_loop(x: Tensor, weights: dict, keep: Tensor) -> Tensor:
    gates = F.linear(x, weights["input"], weights["bias"])
    h = c = torch.zeros_like(x[0])
    states = []
    for gates_t, keep_t in zip(gates.unbind(), keep.unbind()):
        i, f, g, o = (gates_t + F.linear(keep_t * h, weights["state"])).chunk(4, -1)
        c = torch.sigmoid(f) * (keep_t * c) + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append(h)
    return torch.stack(states)


@cache
def pieces(T: int) -> list[tuple[int, slice]]:
    """The env and the steps of each piece of an episode; found once, so that only padding is timed."""
    _, _, keep = make_sequence(T)
    bounds = [[0, *(t for t in range(1, T) if not keep[t, n]), T] for n in range(NUM_ENVS)]
    return [(n, slice(a, b)) for n, ts in enumerate(bounds) for a, b in zip(ts, ts[1:])]


def lstm_padded(x: Tensor, weights: dict, keep: Tensor) -> Tensor:
    """Each piece of an episode is a sequence of its own, filled up to the longest."""
    places = pieces(len(x))
    padded = nn.utils.rnn.pad_sequence([x[place, n] for n, place in places])
    zeros = x.new_zeros(1, len(places), x.shape[2])
    flat = [weights["input"], weights["state"], weights["bias"], torch.zeros_like(weights["bias"])]
    states, *_ = torch.lstm(padded, (zeros, zeros), flat, True, 1, 0.0, False, False, False)
    rows = [[] for _ in range(x.shape[1])]
    for i, (n, place) in enumerate(places):
        rows[n].append(states[: place.stop - place.start, i])
    return torch.stack([torch.cat(pieces) for pieces in rows], 1)


def linear_loop(a: Tensor, b: Tensor) -> Tensor:
    """h[t] = a[t] * h[t - 1] + b[t], step by step."""
    h = torch.zeros_like(b[0])
    states = []
    for a_t, b_t in zip(a.unbind(), b.unbind()):
        h = a_t * h + b_t
        states.append(h)
    return torch.stack(states)


def linear_doubling(a: Tensor, b: Tensor) -> Tensor:
    """The same in log2(T) steps, as an associative scan."""
    span = 1
    while span < len(b):
        b = torch.cat([b[:span], b[span:] + a[span:] * b[:-span]])
        a = torch.cat([a[:span], a[span:] * a[:-span]])
        span *= 2
    return b


def linear_levels(a: Tensor, b: Tensor) -> Tensor:
    """The same on two levels, as lru_scan() does it."""
    C = max(c for c in range(1, math.isqrt(len(b)) + 1) if len(b) % c == 0)
    a = a.unflatten(0, (-1, C))
    b = b.unflatten(0, (-1, C))
    decay = [a[:, 0]]
    local = [b[:, 0]]
    for c in range(1, C):
        decay.append(a[:, c] * decay[-1])
        local.append(a[:, c] * local[-1] + b[:, c])
    decay = torch.stack(decay, 1)
    local = torch.stack(local, 1)
    h = torch.zeros_like(b[0, 0])
    start = []
    for k in range(len(b)):
        start.append(h)
        h = decay[k, -1] * h + local[k, -1]
    return (local + decay * torch.stack(start)[:, None]).flatten(0, 1)


def mingru(scan: Callable, x: Tensor, weights: dict, keep: Tensor) -> Tensor:
    """Gates that do not see the state (Feng et al. 2024), which makes the recurrence linear."""
    gate, new = F.linear(x, weights["input"], weights["bias"]).chunk(2, -1)
    gate = torch.sigmoid(gate)
    return scan((1 - gate) * keep, gate * new)


def lru_doubling(log_radius: Tensor, angle: Tensor, drive: Tensor, keep: Tensor, state: Tensor) -> Tensor:
    """lru() from a state of zeros in log2(T) steps: eigenvalues to the power of 1, 2, 4, ..., and products of keep."""
    h = torch.stack(drive.chunk(2, -1))
    span = 1
    while span < h.shape[1]:
        power = (span * log_radius).exp() * torch.stack([(span * angle).cos(), (span * angle).sin()])
        h = torch.cat([h[:, :span], h[:, span:] + times(power[:, None, None], keep[span:] * h[:, :-span])], 1)
        keep = torch.cat([keep[:span], keep[span:] * keep[:-span]])
        span *= 2
    return torch.cat(h.unbind(), -1)


def lru_network(recurrence: Callable, x: Tensor, weights: dict, keep: Tensor) -> Tensor:
    drive = F.linear(x, weights["input"], weights["bias"])
    return recurrence(-weights["rate"].exp(), weights["angle"], drive, keep, torch.zeros_like(drive[0]))


def one_operator(kind: str, step: Callable, T: int) -> Callable:
    """A GRU or an LSTM as in the twin of ppo_rnn: pieces of the loop are compiled, and called as one operator."""
    weight = torch.zeros(PARTS[kind] * WIDTH, WIDTH)
    state = torch.zeros(NUM_ENVS, WIDTH * (2 if kind == "lstm" else 1))
    recur = as_operator(step, T, weight, state, OPTIONS)

    def network(x: Tensor, weights: dict, keep: Tensor) -> Tensor:
        gates = F.linear(x, weights["input"], weights["bias"])
        return recur(step, weights["state"], gates, keep, state)[..., :WIDTH]

    return network


NETWORKS = {  # name -> (kind of weights, network, whether it is a chain of T steps)
    "LSTM, loop": ("lstm", lstm_loop, True),
    "LSTM, torch.lstm on padded pieces": ("lstm", lstm_padded, True),
    "GRU, loop": ("gru", gru_loop, True),
    "minGRU, loop": ("mingru", partial(mingru, linear_loop), True),
    "minGRU, doubling": ("mingru", partial(mingru, linear_doubling), False),
    "minGRU, two levels": ("mingru", partial(mingru, linear_levels), False),
    "LRU, loop": ("lru", partial(lru_network, lru), True),
    "LRU, doubling": ("lru", partial(lru_network, lru_doubling), False),
    "LRU, two levels": ("lru", partial(lru_network, lru_scan), False),
}
PARTS = {"lstm": 4, "gru": 3, "mingru": 2, "lru": 2}  # what the input is mapped to, in widths


def make_weights(kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    weights = {"encoder": matrix(WIDTH, INPUTS), "input": matrix(PARTS[kind] * WIDTH, WIDTH)}
    weights |= {"bias": np.zeros(PARTS[kind] * WIDTH, np.float32)}
    weights |= {"output": matrix(INPUTS, 2 * WIDTH if kind == "lru" else WIDTH)}
    if kind in ("lstm", "gru"):
        weights["state"] = matrix(PARTS[kind] * WIDTH, WIDTH)
    if kind == "lru":
        weights |= {"rate": rng.uniform(-6, -1, WIDTH).astype(np.float32)}
        weights |= {"angle": rng.uniform(0, math.pi, WIDTH).astype(np.float32)}
    return weights


def make_sequence(T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs and targets (T, N, 16), and keep (T, N, 1)."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.standard_normal((2, T, NUM_ENVS, INPUTS)).astype(np.float32)
    return inputs, targets, (rng.random((T, NUM_ENVS, 1)) > RESETS).astype(np.float32)


def torch_call(kind: str, network: Callable, T: int, compiled: bool) -> Callable[[], tuple[dict, float]]:
    """A function that computes the gradient by name, and the loss."""
    weights = {name: torch.from_numpy(weight) for name, weight in make_weights(kind).items()}
    inputs, targets, keep = map(torch.from_numpy, make_sequence(T))

    def loss_of(weights):
        x = torch.tanh(F.linear(inputs, weights["encoder"]))
        return ((F.linear(network(x, weights, keep), weights["output"]) - targets) ** 2).mean()

    gradient = grad_and_value(loss_of)
    if compiled:
        gradient = torch.compile(gradient, fullgraph=True, dynamic=False, options=OPTIONS)
    return lambda: gradient(weights)


def jax_calls(T: int) -> dict[str, Callable]:
    """The same networks in JAX: lax.scan, and lax.associative_scan where the recurrence is linear."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def gru(x, weights, keep):
        def step(h, inputs):
            gates_t, keep_t = inputs
            h = keep_t * h
            reset, update, new = jnp.split(gates_t, 3, -1)
            h_reset, h_update, h_new = jnp.split(h @ weights["state"].T, 3, -1)
            new = jnp.tanh(new + jax.nn.sigmoid(reset + h_reset) * h_new)
            update = jax.nn.sigmoid(update + h_update)
            h = new + update * (h - new)
            return h, h

        return lax.scan(step, jnp.zeros_like(x[0]), (x @ weights["input"].T + weights["bias"], keep))[1]

    def lstm(x, weights, keep):
        def step(state, inputs):
            h, c = state
            gates_t, keep_t = inputs
            i, f, g, o = jnp.split(gates_t + (keep_t * h) @ weights["state"].T, 4, -1)
            c = jax.nn.sigmoid(f) * (keep_t * c) + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros_like(x[0])
        return lax.scan(step, (zeros, zeros), (x @ weights["input"].T + weights["bias"], keep))[1]

    def scan(a, b):
        def step(h, inputs):
            h = inputs[0] * h + inputs[1]
            return h, h

        return lax.scan(step, jnp.zeros_like(b[0]), (a, b))[1]

    def associative_scan(a, b):
        return lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b))[1]

    def mingru(linear, x, weights, keep):
        gate, new = jnp.split(x @ weights["input"].T + weights["bias"], 2, -1)
        gate = jax.nn.sigmoid(gate)
        return linear((1 - gate) * keep, gate * new)

    def lru(linear, x, weights, keep):
        real, imaginary = jnp.split(x @ weights["input"].T + weights["bias"], 2, -1)
        eigenvalue = jnp.exp(-jnp.exp(weights["rate"]) + 1j * weights["angle"])
        h = linear(eigenvalue * keep, real + 1j * imaginary)
        return jnp.concatenate([h.real, h.imag], -1)

    networks = {"JAX: LSTM, scan": ("lstm", lstm), "JAX: GRU, scan": ("gru", gru)}
    networks |= {"JAX: minGRU, scan": ("mingru", partial(mingru, scan))}
    networks |= {"JAX: minGRU, associative_scan": ("mingru", partial(mingru, associative_scan))}
    networks |= {"JAX: LRU, scan": ("lru", partial(lru, scan))}
    networks |= {"JAX: LRU, associative_scan": ("lru", partial(lru, associative_scan))}
    inputs, targets, keep = make_sequence(T)

    def call(kind: str, network: Callable) -> Callable:
        weights = jax.tree.map(jnp.asarray, make_weights(kind))

        def loss_of(weights):
            x = jnp.tanh(inputs @ weights["encoder"].T)
            return ((network(x, weights, keep) @ weights["output"].T - targets) ** 2).mean()

        gradient = jax.jit(jax.value_and_grad(loss_of))
        return lambda: jax.block_until_ready(gradient(weights))[::-1]

    return {name: call(*network) for name, network in networks.items()}


def calls(T: int, args: Args) -> dict[tuple[str, str], Callable]:
    found = {}
    for name, (kind, network, is_chain) in NETWORKS.items():
        found[name, "eager"] = torch_call(kind, network, T, compiled=False)
        too_long = is_chain and args.longest_compilation < T
        if "padded" not in name and not too_long:
            found[name, "compiled"] = torch_call(kind, network, T, compiled=True)
    for kind, step in (("lstm", lstm), ("gru", gru)):
        network = one_operator(kind, step, T)
        found[f"{kind.upper()}, one operator", "compiled"] = torch_call(kind, network, T, compiled=True)
    return found | {(name, "jit"): call for name, call in jax_calls(T).items()}


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
        first = {}
        times_of = {}
        losses = {}
        norms = {}
        networks = calls(T, args)
        use_cores(cores)
        for key, call in tqdm(networks.items(), desc=f"first calls, T = {T}"):
            start = time.perf_counter()
            gradient, losses[key] = call()
            first[key] = time.perf_counter() - start
            norms[key] = {weight: float(np.linalg.norm(np.asarray(g))) for weight, g in gradient.items()}
        expected = {}
        for (name, mode), norm in norms.items():  # all of a kind compute the same
            kind = name.removeprefix("JAX: ").split(",")[0]
            found = norm | {"loss": float(losses[name, mode])}
            for weight, value in expected.setdefault(kind, found).items():
                if not math.isclose(found[weight], value, rel_tol=1e-3):
                    sys.exit(f"error: {name}, {mode}: {weight} is {found[weight]}, not {value}.")
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
            rows.append(row | {"least_ms": 1e3 * min(seconds), "first_call_s": first[name, mode]})
            print(f"T {T:4d}  {name:36s} {mode:9s} {row['ms']:8.2f} ms, first call {first[name, mode]:6.1f} s")
    sizes = {"num_envs": NUM_ENVS, "width": WIDTH, "inputs": INPUTS, "resets": RESETS}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine(), "sizes": sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
