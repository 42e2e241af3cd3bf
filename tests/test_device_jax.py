"""The JAX counterpart computes what the PyTorch script does."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from catalog import row
from conftest import load
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

jax = pytest.importorskip("jax", reason="JAX is installed with requirements-dev.txt, not with a script's own")

NAMES = ["ppo_device_env", "a2c_device_env", "pqn_device_env"]
EAGER = load(NAMES[0])


def to_jax(x: torch.Tensor):
    return jax.numpy.asarray(x.detach().numpy())


def parameters_of(name: str, weights: dict) -> dict:
    """Weights of the PyTorch script, by name, as the JAX script wants them."""

    def layers(*names: str) -> list:
        return [(to_jax(weights[f"{n}.weight"]).T, to_jax(weights[f"{n}.bias"])) for n in names]

    if "pqn" in name:
        return {"layers": layers("layers.0", "layers.3", "layers.6"), "norms": layers("layers.1", "layers.4")}
    return {part: layers(*(f"{part}.{i}" for i in (0, 2, 4))) for part in ("actor", "critic")}


CASES = [(NAMES[0], "CartPole-v1", {}), pytest.param(NAMES[1], "MinAtar/Breakout-v1", {}, marks=pytest.mark.long)]
CASES += [pytest.param(NAMES[2], "MinAtar/Breakout-v1", {}, marks=pytest.mark.long)]
CASES += [(NAMES[2], "CartPole-v1", {"q_lambda": x}) for x in (0.0, 1.0)]


@pytest.mark.parametrize(("name", "env_id", "flags"), CASES)
def test_jax_computes_the_same_from_the_same_weights_and_numbers(monkeypatch, name, env_id, flags, num_iterations=3):
    """The parameters after the iterations differ by less than 1e-4, and the losses by a thousandth."""
    ours = load(name)
    other = load(f"{name}_jax")
    for script in (ours, other):  # many a truncation
        monkeypatch.setattr(script.ENVS[env_id], "time_limit", 7)
    sizes = {"env_id": env_id, "num_envs": 32, "num_steps": 16, "total_timesteps": 512 * num_iterations} | flags
    sizes |= {"exploration_fraction": 0.8} if "pqn" in name else {"ent_coef": 0.03, "norm_adv": True}
    policy, agents, starts = row(name).policy, [], []

    class Spied(getattr(ours, policy)):
        def __init__(self, *dims):
            super().__init__(*dims)
            agents.append(self)
            starts.append({k: p.detach().clone() for k, p in self.named_parameters()})

    def spied_first_envs(*args):
        envs = first_envs(*args)
        envs["done"][::5] = True  # some begin with a reset
        starts.append({k: x.clone() for k, x in envs.items()})
        return envs

    first_envs = ours.first_envs
    with monkeypatch.context() as patch:
        patch.setattr(ours, policy, Spied)
        patch.setattr(ours, "first_envs", spied_first_envs)
        args = ours.Args(**sizes, cuda=False, save_model=False)
        noises, uniforms, permutations = [], [], []
        exponential_, rand, randperm = torch.Tensor.exponential_, torch.rand, torch.randperm
        patch.setattr(torch.Tensor, "exponential_", lambda x: noises.append(exponential_(x).clone()) or noises[-1])
        patch.setattr(torch, "rand", lambda *size, **k: uniforms.append(rand(*size, **k)) or uniforms[-1])
        patch.setattr(torch, "randperm", lambda n, **k: permutations.append(randperm(n, **k)) or permutations[-1])
        metrics = ours.train(args)
    weights, envs = starts
    their_args = other.Args(**sizes)
    parameters = parameters_of(name, weights)
    learner = {"parameters": parameters, "adam": other.adam(their_args).init(parameters)}
    envs = {k: to_jax(x) for k, x in envs.items()}
    uniforms = uniforms[1:]  # the first was for the first envs
    epochs = len(permutations) // num_iterations
    jax.config.update("jax_default_matmul_precision", "highest")
    for i in range(num_iterations):
        numbers = [-noises[i].log()] if noises else [max(1 - i / (0.8 * num_iterations) * 0.95, 0.05)]
        numbers.append(uniforms[i])
        numbers += [torch.stack(permutations[epochs * i : epochs * (i + 1)])] if permutations else []
        lr = their_args.learning_rate * (1 - i / num_iterations)
        learner, envs, losses = other.iterate(their_args, learner, envs, lr, *map(jax.numpy.asarray, numbers))
    expected = parameters_of(name, dict(agents[0].named_parameters()))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(learner["parameters"]), strict=True):
        assert np.abs(a - b).max() < 1e-4
    for key, loss in zip(row(name).losses.split(), losses.tolist(), strict=True):
        assert metrics[key] == pytest.approx(loss, rel=1e-3, abs=1e-5), key


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_jax_script_learns_and_logs_the_same(own_folder, name):
    script, ours = load(f"{name}_jax"), load(name)
    sizes = {"num_envs": 32, "learning_rate": 3e-3} if "a2c" in name else {"num_envs": 64, "num_steps": 64}
    metrics = script.train(script.Args(**sizes, total_timesteps=300_000))
    assert metrics["episodic_return"] > (150 if "ppo" in name else 80) and metrics["SPS"] > 0  # 22 at random
    our_metrics = ours.train(ours.Args(num_envs=4, num_steps=32, total_timesteps=2048, cuda=False, save_model=False))
    assert metrics.keys() - {"startup_seconds"} == our_metrics.keys()
    theirs, own = (
        set(EventAccumulator(str(path.parent)).Reload().Tags()["scalars"])
        for path in (next(own_folder.glob(f"runs/*{x}__1__*/events*")) for x in ("env_jax", "device_env"))
    )
    assert {key for key in theirs if not key.startswith("summary/")} == own


@pytest.mark.parametrize("name", NAMES[:2])
def test_explained_variance_is_that_of_pytorch(name):
    """Where no row counts, too: a rollout may hold resets alone."""
    generator = torch.Generator().manual_seed(0)
    batch = {key: torch.randn(5, 4, generator=generator) for key in ("return", "value")}
    for share in (0.6, 0):
        batch["valid"] = (torch.rand(5, 4, generator=generator) < share).float()
        expected = load(name).explained_variance(batch).item()
        found = load(f"{name}_jax").explained_variance({key: jax.numpy.asarray(x) for key, x in batch.items()})
        assert float(found) == pytest.approx(expected, abs=1e-5)


BAD = [{"env_id": "CartPol-v1"}, {"total_timesteps": 1}, {"gamma": 2.0}, {"num_envs": 0}, {"seed": 2**32}]
CASES = [(name, flags) for name in NAMES for flags in BAD]
CASES += [(name, {"num_minibatches": 7}) for name in (NAMES[0], NAMES[2])]


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_the_jax_script_refuses_bad_input(capsys, name, flags, own_folder):
    script = load(f"{name}_jax")
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**flags))
    message = capsys.readouterr().err.strip()
    assert exit.value.code == 2 and message.startswith("error: ") and "\n" not in message
    assert not (own_folder / "runs").exists()


@pytest.mark.parametrize("name", NAMES)
def test_jax_is_what_the_requirements_say(name):
    text = Path(load(f"{name}_jax").__file__).read_text()
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", text)[1]
    listed = set(tomllib.loads(re.sub(r"^# ?", "", block, flags=re.M))["dependencies"])
    folder = Path(__file__).parent.parent / "requirements"
    pins = {line for x in ("", "-jax") for line in (folder / f"requirements{x}.txt").read_text().splitlines()}
    assert listed <= pins and {"jax==0.10.2", "optax==0.2.8"} <= listed
    flags = {field.name: field.default for field in fields(load(name).Args)}
    theirs = {field.name: field.default for field in fields(load(f"{name}_jax").Args)}
    assert theirs.items() - {("exp_name", f"{name}_jax")} <= flags.items()
    assert max(map(len, text.splitlines())) <= 120
