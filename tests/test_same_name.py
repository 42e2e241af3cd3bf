"""Same name, same code: a top-level name that stands in several scripts has one source text."""

import ast
import difflib
from collections import defaultdict

from conftest import ALL_SCRIPTS, RAY, ROOT, SCRIPTS

EXEMPT = {"Args", "train", "REPORT_EVERY"}  # a rollout lasts longer than a step


def definitions(name: str) -> dict[str, str]:
    """Source of each top-level function, class and constant, with its decorators, by name."""
    text = (ROOT / "leanrl" / f"{name}.py").read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = ast.get_source_segment(text, node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.get_source_segment(text, node)
    return found


def test_same_name_same_code():
    versions = defaultdict(dict)
    for script in ALL_SCRIPTS:
        for name, source in definitions(script).items():
            if name not in EXEMPT:
                versions[name].setdefault(source, script)
    for name, sources in versions.items():
        (first, a), *others = sources.items()
        for second, b in others:
            diff = "\n".join(difflib.unified_diff(first.splitlines(), second.splitlines(), a, b, lineterm=""))
            raise AssertionError(f"{name} differs between scripts; rename one or make them equal:\n{diff}")
    assert {"make_env", "ppo_loss", "gae", "gae_scan"} <= set(versions)  # the comparison has seen the scripts


def test_what_stands_below_the_divider_is_the_same_in_all_scripts():
    """So what it does is tested once, on one of them. The data-parallel script ends in its own way."""
    endings = {(ROOT / "leanrl" / f"{script}.py").read_text().split("\n# ----------")[1] for script in SCRIPTS + RAY}
    assert len(endings) == 1
