"""Measures what each trick is worth: takes it out of a script, leaves the rest, and times both in turns.

    python benchmark/ablate.py --pairs 5

An entry runs beside the script as it is, slice by slice in turn, as in compare.py: a machine whose speed drifts would
hide most tricks otherwise.

An entry is the mode to run and the edits of the source that undo the trick (or try one that was turned down). Edits
that no longer apply are an error, so this list follows the scripts. Writes OUT/SCRIPT.json for docs/performance.md.
"""

import json
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import tyro
from compare import SCRIPTS, Run, interval, machine, measure, ratios
from measure import ROOT, modes

Edits = tuple[tuple[str, str], ...]
SKIP = "torch.compiler.set_stance(skip_guard_eval_unsafe=True)"
WRAPPER, GENERATOR = '"cpp_wrapper": not on_gpu', '"fallback_random": True'
AUTOTUNE = ((WRAPPER, f'{WRAPPER}, "max_autotune": True'),)
POWERS = (
    ("    power = (step * math.log(0.9)).exp()", "    power = 0.9**step"),
    ("    power_sq = (step * math.log(0.999)).exp()", "    power_sq = 0.999**step"),
)
NUMPY = "            hidden = np.tanh(obs @ w1 + b1)  # perf[host]\n            hidden = np.tanh(hidden @ w2 + b2)\n"

ABLATIONS: dict[str, dict[str, tuple[str, Edits]]] = {  # script -> what is done to it -> (mode, edits)
    "ppo_continuous_action": {
        "without perf[graph]: no compilation": ("twin", ()),
        "without perf[scan]: GAE as a loop over time": (
            "compile",
            (
                (
                    "    while span < len(delta):\n",
                    "    for t in reversed(range(len(delta) - 1)):\n"
                    "        delta[t] += decay[t] * delta[t + 1]\n"
                    "    while span < 0:\n",
                ),
            ),
        ),
        "without perf[batch]: value and log-prob of each row while acting": (
            "compile",
            (
                (
                    "            obs_buffer[t] = obs\n",
                    "            obs_buffer[t] = obs\n            agent.critic(torch.as_tensor(obs))\n"
                    "            row = torch.as_tensor(action)\n"
                    "            gaussian_logprob_entropy(row, row, agent.actor_logstd)\n",
                ),
            ),
        ),
        "without perf[flat]: 13 parameters, not one vector": (
            "compile",
            (
                (
                    "    flat = nn.utils.parameters_to_vector(agent.parameters())  # perf[flat]\n"
                    "    nn.utils.vector_to_parameters(flat, agent.parameters())  "
                    "# from here on they are views of the vector\n"
                    "    adam = adam_state([flat])\n",
                    "    flat = {name: p.detach() for name, p in agent.named_parameters()}\n"
                    "    adam = adam_state(flat.values())\n",
                ),
                ("functional_call(agent, unflatten(flat, shapes), ", "functional_call(agent, flat, "),
                (
                    "        grad *= (args.max_grad_norm / (grad.norm() + 1e-6)).clamp(max=1)\n"
                    "        adam_([flat], [grad], *adam, lr, eps=1e-5)\n",
                    "        norm = torch.stack([g.norm() for g in grad.values()]).norm()\n"
                    "        scale = (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)\n"
                    "        adam_(flat.values(), [g * scale for g in grad.values()], *adam, lr, eps=1e-5)\n",
                ),
            ),
        ),
        "without perf[guards]: guards before each call": ("compile", ((SKIP, "pass"),)),
        "without perf[host]: act through nn.Module": (
            "compile",
            (
                (NUMPY, ""),
                ("action = hidden @ w3 + b3 +", "action = agent.actor_mean(torch.as_tensor(obs)).numpy() +"),
            ),
        ),
        "without perf[tanh]: the compiler's own tanh": ("compile", ((', "cpp.use_decompose_tanh": True', ""),)),
        "with as many threads as cores": ("compile", (("    torch.set_num_threads(1)", "    _ = (1)"),)),
        "tried: compile the policy step too": (
            "compile",
            (
                (
                    "    lr = torch.zeros(()",
                    "    policy = torch.compile(lambda obs: agent.actor_mean(obs), fullgraph=True)\n"
                    "    lr = torch.zeros(()",
                ),
                (NUMPY, ""),
                ("action = hidden @ w3 + b3 +", "action = policy(torch.as_tensor(obs)).numpy() +"),
            ),
        ),
        "without perf[cpp]: glue in Python": ("compile", ((WRAPPER, '"cpp_wrapper": False'),)),
        "tried: max-autotune": ("compile", AUTOTUNE),
        "eager: Adam without fused=True": ("eager", ((", fused=True", ""),)),
        "eager: as many threads as cores": ("eager", (("    torch.set_num_threads(1)", "    _ = (1)"),)),
        "eager: SyncVectorEnv": (
            "eager",
            (
                (
                    "    raw_obs = np.zeros(",
                    "    fns = [lambda: make_env(args.env_id, gym.spaces.Box)] * N\n"
                    "    vector = gym.vector.SyncVectorEnv(fns, copy=False)\n"
                    "    envs = vector.envs\n    vector.reset()\n    raw_obs = np.zeros(",
                ),
                (
                    "            for episode in step_envs("
                    "envs, global_step, env_action, raw_obs, reward, terminated, truncated):\n",
                    "            raw_obs, reward, terminated, truncated, info = vector.step(env_action)\n"
                    "            ended = info.get('episode', {'r': (), 'l': ()})\n"
                    "            for episode in [{'r': r, 'l': n} for r, n in zip(ended['r'], ended['l'])]:\n",
                ),
            ),
        ),
        "eager: losses read at each minibatch": (
            "eager",
            (
                (
                    "        optimizer.step()\n",
                    "        optimizer.step()\n        _ = losses.tolist()\n",
                ),
            ),
        ),
    },
}
SET_UP = "    envs = [make_env("
RATES = {  # of each optimizer
    "td3": {"actor.parameters()": "learning_rate", "critics.parameters()": "learning_rate"},
    "sac": {"actor.parameters()": "policy_lr", "critics.parameters()": "q_lr", "[log_alpha]": "q_lr"},
}
FUSED = {
    algorithm: tuple((f"({of}, lr=args.{rate}, fused=True)", f"({of}, lr=args.{rate})") for of, rate in rates.items())
    for algorithm, rates in RATES.items()
}
for algorithm in ("td3", "sac"):
    ABLATIONS[f"{algorithm}_continuous_action"] = {
        "without perf[graph]: no compilation": ("twin", ()),
        "without perf[vmap]: one critic after the other": (
            "compile",
            (
                (
                    "        return vmap(lambda p: functional_call(critics[0], p, (obs, action)))(params)\n",
                    "        each = [{name: p[i] for name, p in params.items()} for i in range(2)]\n"
                    "        return torch.stack([functional_call(critics[0], p, (obs, action)) for p in each])\n",
                ),
            ),
        ),
        "without perf[guards]: guards before each call": ("compile", ((SKIP, "pass"),)),
        "without perf[cpp]: glue in Python": ("compile", ((WRAPPER, '"cpp_wrapper": False'),)),
        "with the policy step not compiled": (
            "compile",
            (("        policy = torch.compile(policy, fullgraph=True, options=options)\n", ""),),
        ),
        "with one thread": ("compile", ((SET_UP, "    torch.set_num_threads(1)\n" + SET_UP),)),
        "with Adam's powers written with **, inlined into its loop": ("compile", POWERS),
        "with the compiler's own random numbers": ("compile", ((GENERATOR, '"fallback_random": False'),)),
        "eager: Adam without fused=True": ("eager", FUSED[algorithm]),
        "eager: gradients of the critics' weights in the actor's loss": (
            "eager",
            (("loss.backward(inputs=list(actor.parameters()))", "loss.backward()"),),
        ),
        "eager: with one thread": ("eager", ((SET_UP, "    torch.set_num_threads(1)\n" + SET_UP),)),
    }
# with perf[cpp], torch 2.13 fails to compile SAC so
ABLATIONS["td3_continuous_action"]["tried: max-autotune"] = ("compile", AUTOTUNE)
THREADS = "    torch.set_num_threads(1)"
ABLATIONS["dqn"] = {
    "without perf[graph]: no compilation": ("twin", ()),
    "without perf[ring]: each row inserted as it comes": (
        "compile",
        (
            ("        host_rows[step % num_rows] = host_row\n", "        ring[(step + 1) % len(ring)] = row\n"),
            ("    ring.index_copy_(0, index % len(ring), rows)\n", ""),
        ),
    ),
    "without perf[guards]: guards before each call": ("compile", ((SKIP, "pass"),)),
    "without perf[host]: act through nn.Module": (
        "compile",
        (
            (
                "        hidden = np.maximum(obs @ w1 + b1, 0)  # perf[host]\n"
                "        hidden = np.maximum(hidden @ w2 + b2, 0)\n"
                "        return first_action + (hidden @ w3 + b3).argmax(-1)\n",
                "        return first_action + q_network(torch.as_tensor(obs)).argmax(-1).numpy()\n",
            ),
        ),
    ),
    "with as many threads as cores": ("compile", ((THREADS, "    _ = (1)"),)),
    "without perf[cpp]: glue in Python": ("compile", ((WRAPPER, '"cpp_wrapper": False'),)),
    "tried: max-autotune": ("compile", AUTOTUNE),
    "eager: denormal numbers": ("eager", (("torch.set_flush_denormal(True)", "torch.set_flush_denormal(False)"),)),
    "eager: the network asked in exploring steps too": (
        "eager",
        (("        if any_greedy[now]:\n", "        if True:\n"),),
    ),
    "eager: as many threads as cores": ("eager", ((THREADS, "    _ = (1)"),)),
}
COMPILED = "        policy = torch.compile(policy, fullgraph=True, options=options)\n"
PARAMS = "    params = dict(agent.named_parameters())\n"
AUTOCAST, FIRST, BLOCKS = "        with torch.autocast(", '"trunk.0.weight"', "nn.functional.pixel_unshuffle"
SECOND = '"trunk.2.weight"'
HALVE = """
    def halve(x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        x = x.reshape(B, C, H // 2, 2, W // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(B, 4 * C, H // 2, W // 2)
        return x.contiguous(memory_format=torch.channels_last)

    class Halve(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return halve(x.relu())

"""
BRIEFLY = '"GOMP_SPINCOUNT", "5000"'
ABLATIONS["ppo_atari_envpool"] = {
    "without perf[graph]: no compilation": ("twin", ()),
    "without perf[channels]: channels first": (
        "compile",
        (
            (".to(device, memory_format=torch.channels_last)", ".to(device)"),
            ("obs_buffer.to(memory_format=torch.channels_last)", "obs_buffer"),
            ("non_blocking=True, memory_format=torch.channels_last)", "non_blocking=True)"),
        ),
    ),
    "without kept memory: freed memory goes back to the system": ("compile", (("    keep_freed_memory()\n", ""),)),
    "without brief spinning: idle threads spin for milliseconds": ("compile", ((BRIEFLY, '"NO_SUCH", ""'),)),
    "without brief spinning: idle threads sleep at once": ("compile", ((BRIEFLY, '"OMP_WAIT_POLICY", "passive"'),)),
    "--bf16: idle threads spin for milliseconds": ("compile+bf16", ((BRIEFLY, '"NO_SUCH", ""'),)),
    "--bf16: idle threads sleep at once": ("compile+bf16", ((BRIEFLY, '"OMP_WAIT_POLICY", "passive"'),)),
    "--bf16, without perf[bf16]: weights converted at each policy step": (
        "compile+bf16",
        (("evaluate(acting_params, frames)", "evaluate(params, frames)"),),
    ),
    "without perf[guards]: guards before each call": ("compile", ((SKIP, "pass"),)),
    "with the policy step not compiled": ("compile", ((COMPILED, ""),)),
    "without perf[cpp]: glue in Python": ("compile", ((WRAPPER, '"cpp_wrapper": False'),)),
    "without perf[conv]: the layer of 512 as a matrix product": (
        "compile",
        (("    if not on_gpu and not args.bf16:\n", "    if False:\n"),),
    ),
    "tried: max-autotune": ("compile", AUTOTUNE),
    "tried: a first convolution of 2 x 2 blocks, 16 pixels each": (
        "compile",
        (
            (PARAMS, PARAMS + "    agent.trunk[0].stride = 1, 1\n"),
            ("torch.zeros((T + 1) * N, *obs.shape[1:],", "torch.zeros((T + 1) * N, 64, 21, 21,"),
            (AUTOCAST, f"        params = params | {{{FIRST}: {BLOCKS}(params[{FIRST}], 4)}}\n{AUTOCAST}"),
            ("frames = obs[groups[g]].to(", f"frames = {BLOCKS}(obs[groups[g]], 4).to("),
        ),
    ),
    "tried: a second convolution of 2 x 2 blocks, 128 channels each": (
        "compile",
        (
            (PARAMS, f"{HALVE}{PARAMS}    agent.trunk[2].stride = 1, 1\n    agent.trunk[1] = Halve()\n"),
            (AUTOCAST, f"        params = params | {{{SECOND}: halve(params[{SECOND}])}}\n{AUTOCAST}"),
        ),
    ),
    "eager: freed memory goes back to the system": ("eager", (("    keep_freed_memory()\n", ""),)),
    "eager: idle threads spin for milliseconds": ("eager", ((BRIEFLY, '"NO_SUCH", ""'),)),
    "eager: channels first": (
        "eager",
        (("(num_actions).to(device, memory_format=torch.channels_last)", "(num_actions).to(device)"),),
    ),
    "eager: Adam without fused=True": ("eager", ((", fused=True", ""),)),
}


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = tuple(ABLATIONS)
    steps: int | None = None  # env steps of each run; default: the script's own
    pairs: int = 3  # turns of all entries
    out: Path = Path("runs/ablate")  # where the JSON goes


def edited(source: str, edits: Edits) -> str:
    """The source with each edit made; every old text must stand in it exactly once."""
    for old, new in edits:
        assert source.count(old) == 1, f"this edit applies {source.count(old)} times:\n{old}"
        source = source.replace(old, new)
    return source


def ablate(script: str, args: Args):
    env_id, steps = SCRIPTS[script]
    runs = {name: [] for name in ABLATIONS[script]}  # [(its result, that of the script as it is)]
    with tempfile.TemporaryDirectory() as folder:

        def run(mode: str, edits: Edits, turn: int) -> Run:
            """The script with the edits; the first run of each variant finds its compiler cache empty."""
            file = f"{script}{modes(script)[mode][0]}.py"
            source = edited((ROOT / "leanrl" / file).read_text(), edits)
            place = Path(folder, f"{mode}-{zlib.crc32(source.encode())}")
            place.mkdir(exist_ok=True)
            (place / file).write_text(source)
            return Run(script, mode, args.steps or steps, env_id, turn + 1, place, cache=place / "cache")

        for turn in range(args.pairs):
            for name, (mode, edits) in ABLATIONS[script].items():
                print(f"turn {turn + 1} of {args.pairs}: {name}", file=sys.stderr)
                base = "compile" if mode == "twin" else mode
                runs[name].append(measure(run(mode, edits, turn), run(base, (), turn)))
            rows = []
            for name, (mode, _) in ABLATIONS[script].items():
                own, base = zip(*runs[name], strict=True)
                rows.append({"variant": name, "mode": mode, "ratio": interval(ratios(own, base))})
                rows[-1] |= {"steps": args.steps or steps, "runs": own, "as_it_is": base}
            report = {"script": script, "env_id": env_id, "machine": machine(), "variants": rows}
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{script}.json").write_text(json.dumps(report, indent=1) + "\n")  # of all turns so far
    for row in rows:
        ratio, low, high = row["ratio"]
        print(f"{row['variant']:65s} {ratio:5.2f}  ({low:.2f} - {high:.2f})")


def main(args: Args):
    for script in args.scripts:
        ablate(script, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
