"""Lines that a stranger reads at walking pace, and help texts that stand alone."""

import ast
import re
from dataclasses import fields

import pytest
import tyro
from conftest import ALL_SCRIPTS, JAX, ROOT, load

DIVIDER = (
    "# ---------- From here on, every script is the same: checks, run folder, checkpoints, report, signals. ----------"
)


# Lines on top, for what other scripts find in a library or need not have.
OWN = {"def update_stats(": 46, "def lru(": 31, "def gru(": 55, "ENVS = {": 75}
OWN |= {"class MaskInObservation(": 30, "def step_processes(": 46, "def add_moments(": 35}
OWN |= {"ROBOTS = {": 135, "class HostPhysics:": 35, "class WarpPhysics:": 55, "class Worlds:": 68}
OWN |= {"class CutGraph:": 48, "def project(": 24}


def budget(name: str) -> int:
    """Lines, every one counted."""
    if name == "play":
        return 180
    own = sum(lines for start, lines in OWN.items() if start in source(name))
    if "_ray" in name:
        return 740 + own
    return (580 if name.endswith(("_torchcompile", "_multigpu")) else 480) + own


def source(name: str) -> str:
    return (ROOT / "leanrl" / f"{name}.py").read_text()


def levels(node: ast.AST) -> int:
    """How deep loops and conditions are nested in a function; functions in it count for themselves."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        opens = isinstance(child, (ast.For, ast.While, ast.If, ast.With, ast.Try)) and not is_elif
        deepest = max(deepest, levels(child) if isinstance(child, ast.FunctionDef) else opens + levels(child))
    return deepest


@pytest.mark.parametrize("name", [*ALL_SCRIPTS, *JAX, "play"])
def test_a_script_can_be_read_in_ten_minutes(name):
    lines = source(name).splitlines()
    assert len(lines) <= budget(name)
    widths = sorted(len(line) for line in lines if line.strip())
    assert widths[-1] <= 120
    assert widths[len(widths) * 9 // 10] <= 106
    assert len(ast.get_docstring(ast.parse(source(name))).splitlines()) <= 14


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_a_script_ends_with_its_loop_and_then_the_plumbing(name):
    """train() is the last thing above the divider, of one length that can be read, and one statement runs it all."""
    above, below = source(name).split(f"\n{DIVIDER}\n")
    loop = ast.parse(above).body[-1]
    assert loop.name == "train"
    assert loop.end_lineno - loop.lineno < (180 if "_ray" in name else 150)
    assert len(below.splitlines()) <= 150
    *_, main = ast.parse(below).body
    assert ast.unparse(main.test) == "__name__ == '__main__'" and len(main.body) == 1


@pytest.mark.parametrize("name", [*ALL_SCRIPTS, "play"])
def test_a_line_holds_one_thought(name):
    """A tuple stands on the left only where the right side is one thing, and no expression is a statement."""
    tree = ast.parse(source(name))
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    of_tuples = [node for node in assignments if any(isinstance(target, ast.Tuple) for target in node.targets)]
    assert len(of_tuples) <= len(assignments) / 4
    assert not [ast.unparse(node) for node in of_tuples if isinstance(node.value, ast.Tuple)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, (ast.Call, ast.Constant, ast.Yield, ast.YieldFrom)), ast.unparse(node)
    main = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in ("train", "play")]
    assert levels(main[0]) <= 3


FRAGMENT = re.compile(r"(of|with|and|or|in|until|for|from|to|by|as|than|that|which|but)\b", re.IGNORECASE)


@pytest.mark.parametrize("name", [*ALL_SCRIPTS, "play"])
def test_every_help_text_stands_alone(name):
    """tyro takes the comment behind a field, if it stands on the same line; tags of the twins are not for --help."""
    for field in fields(load(name).Args):
        (line,) = re.findall(rf"^    {field.name}: .*  # (.+)$", source(name), re.MULTILINE)
        text = re.sub(r"^perf\[\w+\] ", "", line)
        assert not FRAGMENT.match(text), f"--{field.name}: {text}"
        assert len(text.split()) >= 2, f"--{field.name}: {text}"


def test_help_shows_the_text(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(load("sac_continuous_action").Args, args=["--help"])
    assert "learning rate of the actor" in capsys.readouterr().out
