"""The code of docs/recipes.md, in shorter runs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, load, tiny

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL)


def block(words: str) -> str:
    (found,) = [text for text in BLOCKS if words in text]
    assert len(re.findall(r"\S.*", found)) <= 20
    return found


def test_the_env_of_the_page_trains(monkeypatch, own_folder):
    Path("my_env.py").write_text(block("class Corridor"))
    monkeypatch.syspath_prepend(own_folder)
    script = load("ppo")
    flags = {"env_id": "my_env:Corridor-v0", "total_timesteps": 30_000, "learning_rate": 1e-3}
    metrics = script.train(script.Args(**flags, cuda=False, save_model=False))
    assert metrics["episodic_return"] > 0.1  # at best 1 - 8 * 0.1


def test_training_from_python_seeds_and_their_plot():
    """And the policy in another program."""
    for seed in (1, 2):
        code = block("from ppo import").replace("100_000", f"2_048, seed={seed}")
        exec(code, {})
    exec(block("matplotlib").replace("100_000", "2_048"), {})
    assert Path("curve.png").stat().st_size > 1000
    (path, *_) = Path("runs").glob("*/policy.pt2")
    path.rename("policy.pt2")
    names = {"obs": np.zeros(4, np.float32)}
    exec(block('torch.export.load("policy.pt2")'), names)
    assert names["action"] in (0, 1)


def test_the_network_and_the_metric_of_the_page():
    source = (ROOT / "leanrl" / "ppo.py").read_text()
    report = "        metrics = report("
    assert source.count(report) == 1
    network = re.search(r"def mlp\(.*?\n\n\n", source, re.DOTALL)[0]
    changed = source.replace(network, block("def mlp") + "\n\n")
    changed = changed.replace(report, "        " + block("largest_weight") + report)
    Path("my_ppo.py").write_text(changed)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in tiny("ppo").items()]
    done = subprocess.run([sys.executable, "my_ppo.py", "--no-cuda", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = Path("runs").glob("*/summary.json")
    assert '"largest_weight": ' in path.read_text()
    program = torch.export.load(path.parent / "policy.pt2")
    assert max(p.numel() for p in program.state_dict.values()) == 128 * 128


@pytest.mark.long
def test_legs_of_training_keep_the_best_policy(capfd):
    Path("leanrl").symlink_to(ROOT / "leanrl")
    exec(block("scores = {}").replace("51_200", "4_096").replace("204_801", "8_193").replace("51200", "4096"), {})
    assert "the best policy is runs/CartPole-v1__ppo__1__" in capfd.readouterr().out
    assert len(list(Path("runs").iterdir())) == 2
