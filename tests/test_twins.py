"""A pair of twins computes the same, and its difference is a lesson."""

import difflib
import re
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from catalog import row
from conftest import ATARI, DEVICE, OFF_POLICY, RAY, ROOT, TWINS, ScriptedPool, largest_difference, load, tiny, train
from torch._dynamo.utils import counters


def body(name: str) -> list[str]:
    """The lines of a script below its docstring: the header names the file, so it differs by nature."""
    text = (ROOT / "leanrl" / f"{name}.py").read_text()
    return text[text.index("\nimport ") :].splitlines()


PAIRS = TWINS + [(name.removesuffix("_torchcompile"), name) for name in RAY if name.endswith("_torchcompile")]


@pytest.mark.parametrize(("eager", "twin"), PAIRS)
def test_each_hunk_names_its_trick(eager, twin):
    headings = set(re.findall(r"^### (perf\[\w+\])", (ROOT / "docs" / "performance.md").read_text(), re.MULTILINE))
    hunks = re.split(r"^@@.*\n", "\n".join(difflib.unified_diff(body(eager), body(twin), lineterm="")), flags=re.M)[1:]
    assert hunks
    for hunk in hunks:
        assert len(hunk.splitlines()) <= 80, f"too long a hunk of {twin}:\n{hunk}"
        added = "\n".join(line for line in hunk.splitlines() if line.startswith("+"))
        tags = set(re.findall(r"perf\[\w+\]", added))
        assert tags, f"no perf[name] in this hunk of {twin}:\n{hunk}"
        assert tags <= headings, f"{tags - headings} have no heading in docs/performance.md"
        for run in re.findall(r"(?:^\+.*\n){4,}", hunk + "\n", re.M):
            assert "perf[" in run, f"no perf[name] in these lines of {twin}:\n{run}"


@pytest.mark.parametrize(("eager", "twin"), PAIRS)
def test_twins_align(eager, twin):
    assert difflib.SequenceMatcher(None, body(eager), body(twin), autojunk=False).ratio() >= 0.8
    assert "perf[" not in "\n".join(body(eager))


FLAGS = [(*twins, {"num_envs": num_envs}) for twins in TWINS for num_envs in (1, 2)]
FLAGS += [(*twins, {"num_envs": 1, "autotune": False}) for twins in TWINS if "sac" in twins[0]]


@pytest.mark.parametrize(("eager", "twin", "sizes"), FLAGS)
def test_flags_off_computes_what_eager_computes(monkeypatch, eager, twin, sizes):
    precise = eager in ATARI or eager in OFF_POLICY and eager != "dqn"
    torch.set_default_dtype(torch.float64 if precise else torch.float32)
    sizes = sizes | ({"num_steps": 32, "total_timesteps": 320} if eager in ATARI else {})
    sizes |= {"learning_rate": 3e-4} if eager in DEVICE else {}
    a, b = (train(monkeypatch, name, **tiny(name) | sizes) for name in (eager, twin))
    # Rounding is all that may differ. PPO: up to 32 Adam steps of up to 3e-4. TD3, SAC: 124 updates with an Adam whose
    # tiny eps makes much of a small difference; float64 tells that from a wrong formula. DQN: 13 updates. PPO on Atari
    # needs float64 too: its sums over thousands of pixels depend on their order.
    assert largest_difference(a, b) < (1e-5 if precise else 5e-6)
    assert a.metrics.keys() == b.metrics.keys()
    for name in a.metrics.keys() - {"SPS", "startup_seconds"}:
        assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-3, abs=1e-4), name


# The sizes are those of test_checkpoints.py, so that the compiler finds in its cache what that one has compiled.
COMPILED = [(twin, row(twin).saving | {"checkpoint_interval": 0, "num_envs": 2}) for _, twin in TWINS]
COMPILED += [(ATARI[1], {"env_groups": 2, "num_envs": 4, "num_steps": 64})]
COMPILED += [("ppo_rnn_torchcompile", dict(COMPILED)["ppo_rnn_torchcompile"] | {"cell": "lstm", "num_steps": 4})]


@pytest.mark.parametrize(("twin", "flags"), COMPILED)
def test_compile_computes_the_same_in_whole_graphs_without_recompiling(monkeypatch, twin, flags):
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        problem = tiny(twin) | flags
        if twin in OFF_POLICY:  # a dozen or two updates, since a rounding grows with each, and an episode's end
            updates = 120 if "dqn" in twin else 44
            problem |= {"total_timesteps": 1500, "learning_starts": 1500 - updates}
        problem |= {"learning_rate": 3e-4} if twin in DEVICE else {}
        if twin in ATARI:
            monkeypatch.setattr(load(twin), "make_envs", ScriptedPool)
            problem |= {"total_timesteps": 512} if "env_groups" in flags else {}
        plain, compiled = (train(monkeypatch, twin, **problem, compile=flag) for flag in (False, True))
    assert largest_difference(plain, compiled) < (2e-5 if twin in ATARI else 5e-6)
    for name in plain.metrics.keys() - {"SPS", "startup_seconds"}:
        assert plain.metrics[name] == pytest.approx(compiled.metrics[name], rel=1e-3, abs=1e-4), name
    assert counters["stats"]["unique_graphs"] == row(twin).graphs
    assert not counters["graph_break"]
    assert counters["aot_autograd"]["total"] >= counters["stats"]["unique_graphs"]  # inductor has compiled them


def test_bfloat16_moves_a_gradient_by_little_beside_the_draw_of_its_minibatch(monkeypatch):
    """On frames of a real game, on which both runs have the same parameters at each update."""
    script = load("ppo_atari_envpool_torchcompile")
    make_envs, adam_, ppo_loss, path = script.make_envs, script.adam_, script.ppo_loss, []

    def spied_ppo_loss(*args):
        assert all(x.dtype == torch.float32 for x in args[:3])  # only the network computes in bfloat16
        return ppo_loss(*args)

    class PlayedAtRandom:
        """What is played does not depend on rounding."""

        def __init__(self, env_id, seeds):
            self.pool, self.rng = make_envs(env_id, seeds), np.random.default_rng(seeds)

        def __getattr__(self, name):
            return getattr(self.pool, name)

        def send(self, action):
            self.pool.send(self.rng.integers(self.action_space.n, size=len(action)))

    def gradients(bf16: bool) -> torch.Tensor:
        """Of each update, (4, parameters)."""
        grads = []

        def spied_adam_(params, grad, *rest, **kwargs):
            grads.append(torch.cat([g.flatten() for g in grad]))
            adam_(params, grad, *rest, **kwargs)
            if bf16:
                for param, exact_param in zip(params, path[len(grads) - 1]):
                    param.copy_(exact_param.reshape_as(param))
            else:
                path.append([param.clone() for param in params])

        monkeypatch.setattr(script, "adam_", spied_adam_)
        problem = {"env_id": "Breakout-v5", "total_timesteps": 512, "num_envs": 8, "num_steps": 32}
        train(monkeypatch, script.__name__, **problem, update_epochs=2, bf16=bf16)
        return torch.stack(grads)

    monkeypatch.setattr(script, "make_envs", PlayedAtRandom)
    monkeypatch.setattr(script, "ppo_loss", spied_ppo_loss)
    exact, rounded = gradients(bf16=False), gradients(bf16=True)
    assert len(exact) == 16
    exact, rounded = (grads.unflatten(0, (4, 4)) for grads in (exact, rounded))  # epochs of four minibatches
    error, spread = (rounded - exact).norm(dim=2), (exact - exact.mean(1, keepdim=True)).norm(dim=2)
    assert 0 < error.median() < 0.1 * spread.median()
    bias = (rounded - exact).mean(1).norm(dim=1) / exact.mean(1).norm(dim=1)  # what does not cancel in an epoch
    assert bias.median() < 0.1


def test_with_bfloat16_each_rollout_acts_with_the_newest_parameters(monkeypatch):
    """perf[bf16] An update that is the first of its rollout meets the policy that has acted, a second one does not."""
    problem = {"env_id": "Breakout-v5", "total_timesteps": 128, "num_envs": 2, "num_steps": 32, "num_minibatches": 1}
    problem |= {"learning_rate": 3e-3, "anneal_lr": False, "bf16": True}
    script = "ppo_atari_envpool_torchcompile"
    first, second = (train(monkeypatch, script, **problem, update_epochs=epochs) for epochs in (1, 2))
    assert abs(first.metrics["approx_kl"]) < 1e-4
    assert second.metrics["approx_kl"] > 1e-3


@pytest.mark.parametrize("twin", [twin for _, twin in TWINS if "td3" in twin or "sac" in twin])
def test_with_bfloat16_the_hidden_products_are_rounded_and_nothing_else(monkeypatch, twin):
    """The layers' results lie within bfloat16's rounding of the exact ones; what a run learns differs by little."""
    script = load(twin)
    torch.manual_seed(0)
    critic = script.Critic(5, 2)
    obs, action = torch.randn(64, 5), torch.randn(64, 2)
    exact = critic(obs, action)
    script.multiply_in_bfloat16(critic.layers)
    rounded = critic(obs, action)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.02 * exact.abs().max()
    plain, run = (train(monkeypatch, twin, **tiny(twin), bf16=bf16) for bf16 in (False, True))
    assert 0 < largest_difference(plain, run) < 0.1
    assert run.metrics["qf1_loss"] == pytest.approx(plain.metrics["qf1_loss"], rel=0.1)


@pytest.mark.parametrize("twin", [twin for _, twin in TWINS])
def test_start_up_includes_the_first_call_of_all_that_is_compiled(monkeypatch, twin):
    """By a clock of its own: a first call takes 1000 s, any other a second, and a look at the clock a millisecond."""
    now, called = [0.0], []

    def perf_counter():
        now[0] += 1e-3
        return now[0]

    def slow_at_first(function, **_):
        def call(*args):
            now[0] += 1.0 if function in called else 1000.0
            called.append(function)
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", slow_at_first)
    monkeypatch.setattr(load(twin), "time", SimpleNamespace(time=time.time, perf_counter=perf_counter))
    monkeypatch.setattr(load(twin), "REPORT_EVERY", 1, raising=False)
    run = train(monkeypatch, twin, **tiny(twin), compile=True)
    count = len(set(called))
    assert count == row(twin).graphs
    assert 1000 * count - 10 < run.metrics["startup_seconds"] < 1000 * count + 10


@pytest.mark.parametrize("twin", [twin for _, twin in TWINS])
def test_cudagraphs_without_a_gpu_warns_in_one_line_and_goes_on(monkeypatch, capsys, twin):
    run = train(monkeypatch, twin, **tiny(twin), cudagraphs=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "cudagraphs" in line]
    assert lines == ["warning: --cudagraphs needs a GPU; going on without."]
    assert '"cudagraphs": false' in (run.run_dir / "summary.json").read_text()  # what ran, not what was asked for


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("twin", ["sac_continuous_action", "td3_continuous_action", "ppo_atari_envpool"])
def test_a_cpu_that_is_slow_in_bfloat16_is_named(monkeypatch, capsys, twin, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(load(f"{twin}_torchcompile"), "start_run", lambda args: sys.exit())  # what precedes is enough
    with pytest.raises(SystemExit):
        train(monkeypatch, f"{twin}_torchcompile", **tiny(f"{twin}_torchcompile"), bf16=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "bf16" in line]
    warning = "warning: this CPU is many times slower in bfloat16; leave --bf16 out."
    assert lines == [warning] * (capability == "AVX2")


@pytest.mark.parametrize("twin", [twin for _, twin in TWINS])
def test_guards_are_back_after_a_run_that_was_broken_off(monkeypatch, twin):
    """Without them, what was compiled for one number would go on computing with it."""
    script, reports = load(twin), []
    times = torch.compile(lambda x, k: x * k, backend="eager", dynamic=False)
    assert times(torch.ones(()), 2) == 2
    report = script.report

    def broken(*args):
        reports.append(torch._dynamo.eval_frame._stance.skip_guard_eval_unsafe)
        if reports[-1]:
            raise KeyboardInterrupt
        return report(*args)

    with monkeypatch.context() as patch:
        patch.setattr(script, "report", broken)
        patch.setattr(torch, "compile", lambda function, **_: function)
        with pytest.raises(KeyboardInterrupt):
            train(patch, twin, **tiny(twin) | {"total_timesteps": 2048}, compile=True)
    assert not reports[0]
    assert times(torch.ones(()), 3) == 3
