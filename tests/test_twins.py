"""A pair of twins computes the same, and its difference is a lesson."""

import difflib
import re

import numpy as np
import pytest
import torch
from conftest import ATARI, DEVICE, OFF_POLICY, RAY, ROOT, TWINS, largest_difference, load, tiny, train


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
        assert len(hunk.splitlines()) <= 70, f"too long a hunk of {twin}:\n{hunk}"
        added = "\n".join(line for line in hunk.splitlines() if line.startswith("+"))
        if not added:  # an import that the twin does not need
            continue
        tags = set(re.findall(r"perf\[\w+\]", added))
        assert tags, f"no perf[name] in this hunk of {twin}:\n{hunk}"
        assert tags <= headings, f"{tags - headings} have no heading in docs/performance.md"
        for run in re.findall(r"(?:^\+.*\n){4,}", hunk + "\n", re.M):
            assert "perf[" in run, f"no perf[name] in these lines of {twin}:\n{run}"


@pytest.mark.parametrize(("eager", "twin"), PAIRS)
def test_twins_align(eager, twin):
    assert difflib.SequenceMatcher(None, body(eager), body(twin), autojunk=False).ratio() >= 0.8
    assert "perf[" not in "\n".join(body(eager))


FLAGS = [(*twins, {"num_envs": n}) for twins in TWINS for n in ((2,) if twins[0] in ATARI else (1, 2))]
FLAGS += [(*twins, {"num_envs": 1, "autotune": False}) for twins in TWINS if "sac" in twins[0]]


@pytest.mark.parametrize(("eager", "twin", "sizes"), FLAGS)
def test_flags_off_computes_what_eager_computes(monkeypatch, eager, twin, sizes):
    precise = eager in ATARI or eager in OFF_POLICY and eager != "dqn"
    torch.set_default_dtype(torch.float64 if precise else torch.float32)
    sizes = sizes | ({"num_steps": 32, "total_timesteps": 320} if eager in ATARI else {})
    sizes |= {"learning_rate": 3e-4} if eager in DEVICE else {}
    sizes |= {"total_timesteps": 816, "learning_rate": 3e-5} if eager == "td3_mujoco" else {}
    a, b = (train(monkeypatch, name, **tiny(name) | sizes) for name in (eager, twin))
    # Rounding is all that may differ. PPO: up to 32 Adam steps of up to 3e-4. TD3, SAC: 124 updates with an Adam whose
    # tiny eps makes much of a small difference; float64 tells that from a wrong formula. DQN: 13 updates. FastTD3:
    # up to 32, of 3e-5. PPO on Atari needs float64 too: its sums over thousands of pixels depend on their order.
    assert largest_difference(a, b) < 1e-5
    assert a.metrics.keys() == b.metrics.keys()
    numbers = {name: value for name, value in a.metrics.items() if name != "SPS" and value is not None}
    assert numbers == pytest.approx({name: b.metrics[name] for name in numbers}, rel=1e-3, abs=1e-4)


@pytest.mark.long
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
    problem |= {"learning_rate": 1e-2, "anneal_lr": False, "bf16": True}
    script = "ppo_atari_envpool_torchcompile"
    first, second = (train(monkeypatch, script, **problem, update_epochs=epochs) for epochs in (1, 2))
    assert abs(first.metrics["approx_kl"]) < 1e-4
    assert second.metrics["approx_kl"] > 1e-3


@pytest.mark.parametrize("twin", [twin for _, twin in TWINS if "td3_c" in twin or "sac" in twin])
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
def test_cudagraphs_without_a_gpu_warns_in_one_line_and_goes_on(monkeypatch, capsys, twin):
    run = train(monkeypatch, twin, **tiny(twin), cudagraphs=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "cudagraphs" in line]
    assert lines == ["warning: --cudagraphs needs a GPU; going on without."]
    assert '"cudagraphs": false' in (run.run_dir / "summary.json").read_text()  # what ran, not what was asked for
