"""Lines that a stranger reads at walking pace, and help texts that stand alone."""

import ast
import re
from dataclasses import fields

import pytest
import tyro
from conftest import ALL_SCRIPTS, ROOT, load

SPECIAL = ("_torchcompile", "_multigpu")  # scripts that may be longer
LONGEST = {"ppo_rnn_torchcompile": 587}  # holds an operator and its gradient, too
# hold the workers, too, and what is done when one is lost
LONGEST |= {"ppo_continuous_action_ray": 758, "ppo_continuous_action_ray_torchcompile": 820}
LONGEST |= {"ppo_atari_ray": 672, "ppo_atari_ray_torchcompile": 757}
# hold two envs, too; these twins and the next hold a pass over the compiler's graph
LONGEST |= {"a2c_device_env": 500, "a2c_device_env_torchcompile": 582}
LONGEST |= {"ppo_device_env": 527, "ppo_device_env_torchcompile": 609}
LONGEST |= {"ppo_lru_torchcompile": 587}
LONGEST |= {"sac_continuous_action_torchcompile": 587, "td3_continuous_action_torchcompile": 563}


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


@pytest.mark.parametrize("name", [*ALL_SCRIPTS, "play"])
def test_a_script_can_be_read_in_ten_minutes(name):
    widths = sorted(len(line) for line in source(name).splitlines() if line.strip())
    assert len(widths) <= LONGEST.get(name, 560 if name.endswith(SPECIAL) else 480)  # lines that are not empty
    assert widths[-1] <= 120
    assert widths[len(widths) * 9 // 10] <= 106
    tree = ast.parse(source(name))
    docstring = ast.get_docstring(tree)
    assert len(docstring.splitlines()) <= 14
    to_read = "".join(re.findall(r"To learn the algorithm, read ([\w(), ]+)", docstring)).replace(" and ", ", ")
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(re.findall(r"\w+", to_read)) <= defined


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
