"""A pair of twins computes the same, and its difference is a lesson."""

import difflib
import re

import pytest
import torch
from conftest import ROOT, SCRIPTS, TWINS, largest_difference, train
from torch._dynamo.utils import counters

SMALL = {"env_id": "Pendulum-v1", "num_steps": 128, "num_minibatches": 4, "update_epochs": 3, "total_timesteps": 1024}


def body(name: str) -> list[str]:
    """The lines of a script below its docstring: the header names the file, so it differs by nature."""
    text = (ROOT / "leanrl" / f"{name}.py").read_text()
    return text[text.index("\nimport ") :].splitlines()


@pytest.mark.parametrize(("eager", "twin"), TWINS)
def test_each_hunk_names_its_trick(eager, twin):
    headings = set(re.findall(r"^### (perf\[\d+\])", (ROOT / "docs" / "performance.md").read_text(), re.MULTILINE))
    hunks = re.split(r"^@@.*\n", "\n".join(difflib.unified_diff(body(eager), body(twin), lineterm="")), flags=re.M)[1:]
    assert 1 <= len(hunks) <= 12
    for hunk in hunks:
        added = "\n".join(line for line in hunk.splitlines() if line.startswith("+"))
        tags = set(re.findall(r"perf\[\d+\]", added))
        assert tags, f"no perf[n] in this hunk of {twin}:\n{hunk}"
        assert tags <= headings, f"{tags - headings} have no heading in docs/performance.md"


@pytest.mark.parametrize(("eager", "twin"), TWINS)
def test_twins_align(eager, twin):
    assert difflib.SequenceMatcher(None, body(eager), body(twin), autojunk=False).ratio() > 0.75
    assert "perf[" not in "\n".join(body(eager))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_read_in_ten_minutes(name):
    lines = (ROOT / "leanrl" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= (400 if name.endswith(("_torchcompile", "_multigpu")) else 330)
    assert max(map(len, lines)) <= 120
    assert next(i for i, line in enumerate(lines) if line.startswith('"""')) <= 5


def test_flags_off_computes_what_eager_computes(monkeypatch):
    eager = train(monkeypatch, "ppo_continuous_action", **SMALL, num_envs=2)
    twin = train(monkeypatch, "ppo_continuous_action_torchcompile", **SMALL, num_envs=2)
    # 4 iterations x 3 epochs x 4 minibatches = 48 Adam steps of up to 3e-4; float32 rounding is all that may differ
    assert largest_difference(eager, twin) < 5e-6
    assert eager.metrics["episodic_return"] == pytest.approx(twin.metrics["episodic_return"], rel=1e-4)
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "explained_variance"):
        assert eager.metrics[name] == pytest.approx(twin.metrics[name], rel=1e-3, abs=1e-4), name


def test_compile_computes_the_same_in_one_graph_without_recompiling(monkeypatch):
    counters.clear()
    with (
        torch._inductor.config.patch(fallback_random=True),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        twin = train(monkeypatch, "ppo_continuous_action_torchcompile", **SMALL)
        compiled = train(monkeypatch, "ppo_continuous_action_torchcompile", **SMALL, compile=True)
    assert largest_difference(twin, compiled) < 5e-6
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["aot_autograd"]["total"] == 1  # what compiled it is inductor, not a backend that runs it eagerly


def test_cudagraphs_without_a_gpu_warns_in_one_line_and_goes_on(monkeypatch, capsys):
    run = train(monkeypatch, "ppo_continuous_action_torchcompile", **SMALL, cudagraphs=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "cudagraphs" in line]
    assert lines == ["warning: --cudagraphs needs a GPU; going on without."]
    assert '"cudagraphs": false' in (run.run_dir / "summary.json").read_text()
