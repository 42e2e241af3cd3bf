"""The page that takes a reader's script to a fast one: its program runs, and its diffs are those of the DQN pair."""

import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))
import steps  # noqa: E402


def test_the_program_runs_and_each_update_can_be_timed(monkeypatch, own_folder, capsys):
    """The program itself asserts that the compiled update computes what the plain one does."""
    names = steps.program()
    assert re.search(r"plain \d+ us, compiled \d+ us", capsys.readouterr().out)
    for call in steps.UPDATES.values():
        assert eval(call, names).isfinite()


def test_a_wrong_update_ends_the_program(own_folder):
    page = own_folder / "page.md"
    page.write_text(steps.PAGE.read_text().replace("exp_avg.lerp_(grad, 0.1)", "exp_avg.lerp_(grad, 0.2)"))
    with pytest.raises(AssertionError):
        steps.program(page)


def test_its_diffs_are_those_of_the_pair():
    plain, twin = ((ROOT / "leanrl" / f"{name}.py").read_text().splitlines() for name in ("dqn", "dqn_torchcompile"))
    diffs = re.findall(r"^```diff\n(.*?)^```", steps.PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(diffs) == 8 and all(6 <= len(diff.replace("@@\n", "").splitlines()) <= 10 for diff in diffs)
    for hunk in "@@\n".join(diffs).split("@@\n"):  # the lines of a hunk follow each other in their file
        for signs, file in ((" -", plain), (" +", twin)):
            lines = [line[1:] for line in hunk.splitlines() if line[0] in signs]
            assert any(file[at : at + len(lines)] == lines for at in range(len(file))), hunk
