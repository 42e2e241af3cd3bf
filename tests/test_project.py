"""Requirements, PEP 723 blocks, and every command that the documents show."""

import ast
import csv
import dataclasses
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import tyro
from catalog import row
from conftest import ALL_SCRIPTS, ROOT, load
from torch.distributed.run import get_args_parser

DOCUMENTS = [ROOT / "README.md", ROOT / "benchmark" / "notebook.md", *sorted((ROOT / "docs").glob("*.md"))]


def pins(*names: str) -> set[str]:
    text = "\n".join((ROOT / "requirements" / name).read_text() for name in names)
    return {line for line in text.splitlines() if line and not line.startswith(("#", "-r"))}


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_pep_723_block_holds_the_pins_of_requirements(name):
    text = (ROOT / "leanrl" / f"{name}.py").read_text()
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", text)[1]
    listed = set(tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))["dependencies"])
    extras = [f"requirements-{row(name).requirements}.txt"] if row(name).requirements else []
    assert listed <= pins("requirements.txt", *extras)
    assert pins(*extras) <= listed
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    packages = {pin.split("==")[0] for pin in listed}
    imported = {{"warp": "warp-lang", "mujoco_warp": "mujoco-warp"}.get(name, name) for name in imported}
    unseen = {"tensorboard"} | {pin.split("==")[0] for pin in pins(*extras)}  # some extras are imported by others
    assert imported - sys.stdlib_module_names - unseen == packages - unseen


@pytest.mark.parametrize("name", ALL_SCRIPTS)
def test_every_flag_has_a_line_with_its_help(name):
    """tyro takes the comment behind a field, if it stands on the same line."""
    lines = inspect.getsource(load(name).Args).splitlines()
    for field in dataclasses.fields(load(name).Args):
        assert [line for line in lines if re.match(rf"    {field.name}: .* = .+  # \w.+", line)], field.name


def test_all_pins_are_exact():
    """But for triton, since a PyTorch with CUDA asks for a triton of its own."""
    for path in (ROOT / "requirements").glob("*.txt"):
        listed = pins(path.name) - {"triton"}
        assert all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\w.]+", pin) for pin in listed), path


def commands() -> list[str]:
    """The lines of all shell blocks in the documents and of the scripts' docstrings that run something of ours."""
    lines = []
    for path in DOCUMENTS:
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", path.read_text(), re.DOTALL):
            lines += block.replace("\\\n", " ").splitlines()
    for path in (ROOT / "benchmark").glob("*.py"):
        lines += (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    for name in ALL_SCRIPTS:
        lines += ast.get_docstring(ast.parse((ROOT / "leanrl" / f"{name}.py").read_text())).splitlines()
    lines = [re.sub(r"^srun .* (?=torchrun )", "", line.split("  #")[0].strip()) for line in lines]
    lines = [line for line in (re.sub(r"\$[A-Za-z_]+", "1", line) for line in lines) if "$" not in line]
    return sorted({line for line in lines if re.match(r"(python|uv run|torchrun|\./run\.sh)\b", line)})


@pytest.mark.parametrize("line", commands())
def test_every_command_in_the_documents_parses(line):
    program, *words = shlex.split(line)
    if program == "./run.sh":
        if not words or words[0] in ("help", "test"):
            return
        if words[0] == "sweep":
            assert not words[1:]
            return
        programs = {"compare": ["benchmark/compare.py"], "play": ["play"], "train": []}
        words = [*programs[words[0]], *words[1:]]
    elif program == "torchrun":
        launch = get_args_parser().parse_args(words)
        words = [launch.training_script, *launch.training_script_args]
    elif program == "uv":
        words = words[1:]
    name = words[0].removesuffix(".py").removeprefix("leanrl/")
    if name in ("benchmark/plot", "benchmark/saving", "benchmark/steps"):
        flags = inspect.signature(importlib.import_module(name.removeprefix("benchmark/")).main).parameters
        assert {word for word in words if word.startswith("--")} <= {f"--{flag}" for flag in flags}
    elif name.startswith("benchmark/"):
        tool = name.removeprefix("benchmark/")
        args = tyro.cli(importlib.import_module(tool).Args, args=words[1:])
        names_no_script = tool in ("scans", "efficiency", "processes", "film", "worlds", "purejaxql_peer")
        scripts = [] if names_no_script else getattr(args, "scripts", None) or [args.script]
        assert all((ROOT / "leanrl" / f"{script}.py").exists() for script in scripts)
    else:
        tyro.cli(load(name).Args, args=words[1:])


def test_commands_are_found():
    assert len(commands()) >= 8
    assert any("--rdzv-id" in line for line in commands())  # the one with variables of a shell


def words(page: str) -> int:
    """What a reader reads: pieces between blanks with a letter or a digit, in text, tables and code."""
    return sum(bool(re.search(r"[^\W_]", piece)) for piece in (ROOT / "docs" / f"{page}.md").read_text().split())


def test_the_documents_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    pages = {path.stem: words(path.stem) for path in (ROOT / "docs").glob("*.md")}
    assert sum(pages.values()) <= 14_000
    assert all(pages[page] <= 700 for page in ("ppo", "atari", "sac", "td3", "dqn"))
    assert all(pages[page] <= 1_100 for page in ("memory", "ray", "multigpu"))  # of several algorithms
    assert pages["device"] <= 1_200  # and of two kinds of simulators
    assert pages["performance"] <= 2_500


def test_readme_shows_a_real_hunk():
    eager, twin = (
        (ROOT / "leanrl" / f"ppo_continuous_action{suffix}.py").read_text() for suffix in ("", "_torchcompile")
    )
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    removed, added = ("\n".join(x[1:] for x in block.splitlines() if x[0] == sign) for sign in "-+")
    assert removed in eager and removed not in twin and added in twin and added not in eager


def test_the_calculator_of_the_page_gives_the_figures_of_the_page():
    page = (ROOT / "benchmark" / "notebook.md").read_text()
    names = {}
    exec(re.search(r"```python\n(def limits.+?)```", page, re.S)[1], names)
    limits, defaults = names["limits"], inspect.signature(names["limits"]).parameters
    (table,) = json.loads((ROOT / "benchmark" / "results" / "ray.json").read_text())
    fit = table["fit"]
    words = " ".join(page.split())
    latency, cost = (defaults[name].default for name in ("latency", "cost"))
    assert (latency, cost) == pytest.approx((fit["latency_ms"] / 1000, fit["cost_ms"] / 1000), rel=0.1)
    cheetah = limits(50, 32, 0.01, 6 * 64, 140, learner=1e5)
    steps = cheetah["simulators, which all wait for the slowest"]
    assert f"{steps:,.0f} steps a second while sampling, with 384 steps a call" in words
    assert f"leaves {1 / (1 / steps + 1 / 1e5):,.0f} of both together" in words
    assert min(cheetah, key=cheetah.get) == "learner"
    stacks = limits(1, 1, 1, 1, 4 * 84 * 84, 1, updates=0)["network"]
    assert round(stacks, -3) == 44_000 and "10 Gb/s carry 44,000 steps" in words
    one_call_a_step = limits(1, 16, 0.01, 1, 140, learner=1e5)["simulators, which all wait for the slowest"]
    assert one_call_a_step == pytest.approx(16 / (0.01 + latency + 16 * cost))  # the formula of the page


def test_run_sh_help_lists_every_command_and_refuses_others():
    text = (ROOT / "run.sh").read_text()
    shown = subprocess.run(["./run.sh", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for command in re.findall(r"^  (\w+)\)", text, re.MULTILINE):
        assert f"./run.sh {command}" in shown
    assert len(text.splitlines()) <= 80


def test_the_sweep_trains_every_published_run(tmp_path):
    """A copy of both, in which nothing is to be installed and python only prints what it was told."""
    shutil.copy(ROOT / "run.sh", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "benchmark").mkdir()
    shutil.copy(ROOT / "benchmark" / "sweep.sh", tmp_path / "benchmark")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\t" python "$@"\necho\n')
    python.chmod(0o755)
    checksum = subprocess.check_output("cat requirements/*.txt | cksum", shell=True, cwd=tmp_path, text=True)
    (tmp_path / ".venv-rllib").mkdir()
    for name in (".venv/core", ".venv/peers", ".venv-rllib/core"):
        (tmp_path / f"{name}-{checksum.split()[0]}").touch()
    ran = subprocess.check_output(["./run.sh", "sweep"], cwd=tmp_path, text=True)
    lines = [shlex.join(line.rstrip("\t").split("\t")) for line in ran.splitlines()]
    trained = set()
    for line in lines:
        test_every_command_in_the_documents_parses(line)
        _, program, *words = shlex.split(line)
        if program == "benchmark/returns.py":
            args = tyro.cli(importlib.import_module("returns").Args, args=words)
            modes = [args.patch.stem] if args.patch else args.modes
            if args.patch:
                apply = ["git", "apply", "--check", "--recount", "--directory=leanrl", args.patch]
                subprocess.run(apply, cwd=ROOT, check=True)
            runs = itertools.product([args.script], args.env_ids, modes, args.seeds, [args.total_timesteps])
            trained |= {tuple(map(str, run)) for run in runs}
        if program == "benchmark/purejaxql_peer.py":
            args = tyro.cli(importlib.import_module("purejaxql_peer").Args, args=words)
            runs = itertools.product(args.seeds, [args.total_timesteps])
            trained |= {("pqn_device_env", "MinAtar/Breakout-v1", "purejaxql", *map(str, run)) for run in runs}
    with (ROOT / "benchmark" / "results" / "returns.csv").open() as file:
        for row in csv.DictReader(file):
            assert tuple(row[name] for name in ("script", "env_id", "mode", "seed", "steps")) in trained
    assert lines[-1] == "python benchmark/plot.py" and any("benchmark/compare.py" in line for line in lines)


def test_the_project_speaks_of_itself_alone():
    """No machine's paths in what is committed."""
    search = ["git", "grep", "-nIE", "/(root|work|home)/[[:alnum:]]", "--", ":!tests"]
    found = subprocess.run(search, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, ""), found.stdout or found.stderr  # 1: nothing found


def test_the_site_builds_strictly(tmp_path):
    """No dead link, no page that is left out of the navigation."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "site" / "mkdocs.yml", "-d", tmp_path]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    assert "not included in the" not in process.stderr
    for page in ("index.html", "docs/ppo/index.html", "leanrl/dqn.py", "benchmark/results/minutes.png"):
        assert (tmp_path / page).stat().st_size > 5000, page
