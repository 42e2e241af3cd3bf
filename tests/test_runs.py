"""What a user sees of a run: its folder, its determinism, its refusals."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from catalog import row
from conftest import (
    ALL_SCRIPTS,
    ATARI,
    DEVICE,
    DISCRETE,
    FILES,
    GYM,
    MEMORY,
    OFF_POLICY,
    PPO,
    ROOT,
    SCRIPTS,
    SLICED,
    forked,
    load,
    tiny,
    train,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.mark.parametrize("name", SCRIPTS)
def test_run_folder_holds_events_and_summary(monkeypatch, name):
    run = train(monkeypatch, name, **tiny(name) | {"num_envs": 2})
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["metrics"] == run.metrics
    assert summary["device"] == "cpu"
    assert summary["args"]["env_id"] == tiny(name)["env_id"] and summary["args"]["exp_name"] == name
    assert run.metrics["global_step"] == 1024
    assert all(torch.isfinite(torch.tensor(value)) for value in run.metrics.values())
    # Pendulum: 200 steps of at worst -16.3; Breakout: a random policy hits a few bricks.
    low, high = (5, 500) if name in DISCRETE else (-0.1, 15) if name in ATARI else (-1600 * 1.3, 0)
    assert run.metrics["SPS"] > 0 and low < run.metrics["episodic_return"] < high
    events = EventAccumulator(str(run.run_dir)).Reload()
    losses = row(name).losses
    losses = [f"losses/{loss}" for loss in losses.split()]
    keys = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", *losses}
    keys |= {f"summary/{name}" for name in run.metrics}
    assert set(events.Tags()["scalars"]) - {"charts/learning_rate", "charts/epsilon"} == keys
    assert events.Scalars("summary/SPS")[0].value == pytest.approx(run.metrics["SPS"])
    reports = [256, 512, 768, 1024] if name in ATARI + MEMORY else [512, 1024]
    reports = [500, 1000, 1024] if name in OFF_POLICY else [640, 1024] if name in DEVICE else reports
    assert [e.step for e in events.Scalars("charts/SPS")] == reports
    assert [e.step for e in events.Scalars(losses[0])] == [step for step in reports if step != 500]
    lengths, returns = ([e.value for e in events.Scalars(f"charts/episodic_{x}")] for x in ("length", "return"))
    assert name in ATARI or lengths == (returns if name in DISCRETE else [200] * len(returns))
    if name in PPO + MEMORY + DEVICE:
        share = np.array([1, 0.75, 0.5, 0.25] if name in ATARI + MEMORY else [1, 0.5])
        share = np.array([7 / 16, 1 / 16]) if name in DEVICE else share  # of the last rollout before each report
        rates = [e.value for e in events.Scalars("charts/learning_rate")]
        assert rates == pytest.approx(share * load(name).Args.learning_rate)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_that_is_broken_off_has_its_flags(monkeypatch, name, own_folder):
    """In summary.json and in TensorBoard, where they can be compared with those of other runs."""

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(load(name), "report", broken)
    with pytest.raises(KeyboardInterrupt):
        train(monkeypatch, name, **tiny(name), seed=5)
    (run_dir,) = (own_folder / "runs").iterdir()
    assert json.loads((run_dir / "summary.json").read_text())["args"]["seed"] == 5
    for _ in range(50):  # TensorBoard's writer is a thread of its own
        events = EventAccumulator(str(run_dir), size_guidance={"tensors": 0}).Reload()
        if "args/text_summary" in events.Tags()["tensors"]:
            break
        time.sleep(0.1)
    (text,) = events.Tensors("args/text_summary")[0].tensor_proto.string_val
    assert json.loads(text)["seed"] == 5


@pytest.mark.parametrize("name", [name for name in PPO + MEMORY + DEVICE if "compile" not in name])
def test_flags_of_ppo_do_what_they_say(monkeypatch, name):
    """Each changes the parameters; without annealing, the rate stays."""
    runs = {}
    norm_adv = {"norm_adv": not load(name).Args.norm_adv}
    for flags in ({}, {"anneal_lr": False}, {"max_grad_norm": 0.01}, norm_adv, {"vf_coef": 0.1}):
        runs[str(flags)] = train(monkeypatch, name, **tiny(name) | {"total_timesteps": 512}, **flags)
    values = {next(iter(run.parameters.values())).flatten()[:100].tolist().__repr__() for run in runs.values()}
    assert len(values) == len(runs)
    events = EventAccumulator(str(runs["{'anneal_lr': False}"].run_dir)).Reload()
    assert [e.value for e in events.Scalars("charts/learning_rate")] == pytest.approx(
        [load(name).Args.learning_rate] * (1 if name in DEVICE else 2)
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_another_seed_gives_other_numbers(monkeypatch, name):
    """That the same seed gives the same ones, a run that is killed and resumed shows."""
    sizes = tiny(name) | ({"total_timesteps": 256} if name in PPO + MEMORY + DEVICE else {})
    a, b = (train(monkeypatch, name, **sizes, seed=seed).parameters for seed in (7, 8))
    assert not all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", SCRIPTS)
def test_tf32_is_what_the_flag_says(monkeypatch, name):
    """Settings of the whole process; without the flag they are off, though PyTorch has one of them on."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    script = load(name)
    for tf32 in (True, False):
        *_, writer = script.start_run(script.Args(device="cpu", tf32=tf32))
        writer.close()
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == tf32


@pytest.mark.parametrize("name", PPO)
def test_target_kl_ends_the_epochs_after_the_first_that_exceeds_it(monkeypatch, name):
    script, calls = load(name), []
    original = script.ppo_loss
    monkeypatch.setattr(script, "ppo_loss", lambda *args: calls.append(1) or original(*args))
    train(monkeypatch, name, **tiny(name) | {"update_epochs": 5, "total_timesteps": 256}, target_kl=1e-15)
    assert len(calls) == 4  # one epoch of 4 minibatches, not one minibatch
    train(monkeypatch, name, **tiny(name) | {"update_epochs": 5, "total_timesteps": 256}, target_kl=1e9)
    assert len(calls) == 4 + 20


@pytest.mark.parametrize("name", GYM)
def test_dict_observations_and_matrix_actions(monkeypatch, name):
    run = train(
        monkeypatch, name, **tiny(name) | {"env_id": "DiscreteDictEnv-v0" if name in DISCRETE else "DictEnv-v0"}
    )
    shapes = [tuple(p.shape) for name, p in run.parameters.items() if p.ndim == 2 and name != "state_gates"]
    actor = shapes[-2] if name in MEMORY else shapes[-1]  # the critic is the last
    assert shapes[0][1] == 4 + 3 + (3 if name in MEMORY + SLICED else 0)  # the previous action
    assert actor[0] == (3 if name in DISCRETE else 8 if "sac" in name else 4)  # SAC: mean and deviation
    assert run.metrics["episodic_return"] == 5


@pytest.mark.parametrize("name", GYM)
def test_a_vector_of_bytes_is_no_image(name):
    assert load(name).make_env("RamEnv-v0", gym.spaces.Box).observation_space.shape == (8,)


@pytest.mark.parametrize("name", GYM)
def test_ids_of_a_users_own_package(monkeypatch, name, own_folder):
    env = "CartPoleEnv" if name in DISCRETE else "PendulumEnv"
    (own_folder / "my_package.py").write_text(
        "import gymnasium as gym\n"
        f"gym.register('Mine-v0', entry_point='gymnasium.envs.classic_control:{env}', max_episode_steps=50)\n"
    )
    monkeypatch.syspath_prepend(str(own_folder))
    gym.registry.pop("Mine-v0", None), sys.modules.pop("my_package", None)
    run = train(monkeypatch, name, **tiny(name) | {"env_id": "my_package:Mine-v0"})
    assert json.loads((run.run_dir / "summary.json").read_text())["args"]["env_id"] == "my_package:Mine-v0"


BAD = {  # for every script: flags, and a word of the sentence that refuses them
    "unknown package": ({"env_id": "no_such_package:Mine-v0"}, "no_such_package"),
    "no env": ({"num_envs": 0}, "num"),
    "negative seed": ({"seed": -1}, "--seed"),
    "a negative interval": ({"checkpoint_interval": -1}, "--checkpoint-interval"),
    "no checkpoint there": ({"resume": "nowhere/checkpoint.pt"}, "--resume: nowhere/checkpoint.pt cannot be read"),
    "an empty path": ({"resume": ""}, "--resume: . cannot be read"),
    "a folder as checkpoint": ({"resume": "."}, "--resume: . cannot be read"),
    "unknown device": ({"device": "gpu"}, "gpu"),
    "a device without numbers": ({"device": "meta"}, "meta"),
    "absent device": ({"device": "cuda:99"}, "cuda:99"),
    "no step": ({"total_timesteps": 0}, "--total-timesteps"),
    "no module": ({"env_id": ":x"}, "':x'"),
    "a negative rate": ({"gamma": -0.1}, "--gamma"),
    "a rate that is no number": ({"gamma": float("nan")}, "--gamma"),
    "a share above 1": ({"gamma": 1.01}, "--gamma must be between 0 and 1"),
}
BAD_GYM = {
    "unknown env": ({"env_id": "HalfCheeta-v4"}, "HalfCheetah"),
    "image observations": ({"env_id": "ImageEnv-v0"}, "uint8"),
    "an image of floats": ({"env_id": "FloatImageEnv-v0"}, "(8, 8, 3)"),
    "a sequence as observation": ({"env_id": "SequenceEnv-v0"}, "Sequence"),
}
BAD_ATARI = {
    "unknown game": ({"env_id": "Breakot-v5"}, "Breakout-v5"),
    "no Atari game": ({"env_id": "CartPole-v1"}, "'CartPole-v1' is no Atari game; try "),
}
BAD_DEVICE = {
    "unknown env": ({"env_id": "CartPol-v1"}, "try CartPole-v1"),
    "an env of Gymnasium": ({"env_id": "Pendulum-v1"}, "in this file"),
}
BAD_PPO = {
    "sizes that do not divide": ({"num_minibatches": 7}, "--num-minibatches must divide it into equal parts"),
    "less than a rollout": ({"total_timesteps": 1}, "--total-timesteps must be at least"),
    "no minibatch": ({"num_minibatches": 0}, "num-minibatches"),
    "minibatches of one row": ({"num_steps": 256, "num_envs": 1, "num_minibatches": 256}, "num-minibatches"),
    "no epoch": ({"update_epochs": 0}, "--update-epochs"),
    "a rollout of one step": ({"num_steps": 1, "num_envs": 1, "num_minibatches": 1}, "a rollout has 1 steps"),
    "a trace that grows": ({"gae_lambda": 1.5}, "--gae-lambda"),
    "an infinite rate": ({"learning_rate": float("inf")}, "--learning-rate"),
}
BAD_A2C = {
    "a rollout of one step": ({"num_steps": 1, "num_envs": 1}, "must be at least 2"),
}
for case in ("less than a rollout", "a trace that grows", "an infinite rate"):
    BAD_A2C[case] = BAD_PPO[case]
BAD_MEMORY = {
    "envs that do not divide": ({"num_minibatches": 7}, "--num-minibatches must divide --num-envs (2)"),
    "no neuron": ({"hidden_size": 0}, "--hidden-size"),
    "continuous actions": ({"env_id": "Pendulum-v1"}, "Discrete"),
}
for case in ("less than a rollout", "no minibatch", "no epoch", "a trace that grows", "an infinite rate"):
    BAD_MEMORY[case] = BAD_PPO[case]
BAD_OFF_POLICY = {
    "more memory than there is": ({"buffer_size": 10**12}, "bytes"),
    "no replay": ({"buffer_size": 0}, "--buffer-size"),
    "no batch": ({"batch_size": 0}, "--batch-size"),
    "a target that overshoots": ({"tau": 2.0}, "--tau"),
}
BAD_CONTINUOUS = {
    "discrete actions": ({"env_id": "CartPole-v1"}, "Discrete(2)"),
    "unbounded actions": ({"env_id": "ScriptedEnv-v0"}, "bounds"),
    "no freedom to act": ({"env_id": "StuckEnv-v0"}, "bounds"),
    "no actor update": ({"policy_frequency": 0}, "--policy-frequency"),
}
BAD_DQN = {
    "continuous actions": ({"env_id": "Pendulum-v1"}, "Discrete"),
    "envs that do not divide": ({"num_envs": 3}, "--train-frequency"),
    "no target": ({"target_network_frequency": 0}, "--target-network-frequency"),
    "more than all": ({"end_e": 1.2}, "--end-e"),
}
BAD_SLICES = {
    "no transition in a slice": ({"seq_length": 1}, "--seq-length must be at least 2"),
    "no room for a slice": ({"buffer_size": 15}, "--buffer-size at least 16"),
    "no burn-in": ({"burn_in": 0}, "--burn-in"),
}
CASES = [(name, *case) for name in SCRIPTS for case in BAD.items()]
CASES += [(name, *case) for name in GYM for case in BAD_GYM.items()]
CASES += [(name, *case) for name in ATARI for case in BAD_ATARI.items()]
CASES += [(name, *case) for name in DEVICE for case in BAD_DEVICE.items()]
CASES += [(name, *case) for name in PPO + DEVICE if "ppo" in name for case in BAD_PPO.items()]
CASES += [(name, *case) for name in DEVICE if "a2c" in name for case in BAD_A2C.items()]
CASES += [
    ("a2c_device_env_torchcompile", "minutes of compilation", ({"num_steps": 65, "compile": True}, "--num-steps"))
]
CASES += [(name, *case) for name in MEMORY for case in BAD_MEMORY.items()]
CASES += [(name, "discrete actions", BAD_CONTINUOUS["discrete actions"]) for name in PPO if name not in ATARI]
CASES += [(ATARI[1], "groups that do not divide", ({"env_groups": 3}, "--env-groups"))]
CASES += [(name, *case) for name in OFF_POLICY for case in BAD_OFF_POLICY.items()]
CASES += [(name, *case) for name in SLICED for case in BAD_SLICES.items()]
CASES += [(name, *case) for name in OFF_POLICY for case in (BAD_DQN if "dqn" in name else BAD_CONTINUOUS).items()]


@pytest.mark.parametrize(("name", "case", "refused"), CASES, ids=[f"{name}-{case}" for name, case, _ in CASES])
def test_bad_input_gets_one_sentence_and_exit_code_2_and_leaves_nothing(name, case, refused, capsys, own_folder):
    args, word = refused
    script = load(name)
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**tiny(name) | args))
    message = capsys.readouterr().err.strip()
    assert exit.value.code == 2
    assert message.startswith("error: ") and word in message and "\n" not in message
    assert not (own_folder / "runs").exists()


@pytest.mark.parametrize("name", OFF_POLICY)
@pytest.mark.parametrize("steps", [1, 256])
def test_a_run_too_short_to_learn_warns_and_runs(monkeypatch, capsys, name, steps):
    """As people do to see whether something runs at all: with all other flags at their defaults."""
    run = train(monkeypatch, name, env_id=tiny(name)["env_id"], total_timesteps=steps, buffer_size=1000, num_envs=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(lines) == 1 and "--learning-starts" in lines[0]
    assert run.metrics["global_step"] == steps and not run.metrics.keys() & {"td_loss", "qf_loss"}
    events = EventAccumulator(str(run.run_dir)).Reload()
    assert [e.step for e in events.Scalars("charts/SPS")] == [steps]


@pytest.mark.parametrize("name", OFF_POLICY)
def test_the_shortest_run_learns_once(monkeypatch, capsys, name):
    """One that is a step shorter warns."""
    steps = {"learning_starts": 901, "total_timesteps": 911} if "dqn" in name else {"total_timesteps": 901}
    losses = train(monkeypatch, name, **tiny(name) | steps).metrics.keys() & {"td_loss", "qf_loss"}
    assert len(losses) == 1 and "warning: nothing" not in capsys.readouterr().err
    steps["total_timesteps"] -= 1
    assert not train(monkeypatch, name, **tiny(name) | steps).metrics.keys() & {"td_loss", "qf_loss"}
    assert "warning: nothing is learned" in capsys.readouterr().err


@pytest.mark.parametrize("name", ATARI)
def test_envpool_missing_gets_a_command(monkeypatch, capsys, name):
    script = load(name)
    monkeypatch.setitem(sys.modules, "envpool", None)  # as if it were not installed
    with pytest.raises(SystemExit):
        script.train(script.Args(**tiny(name)))
    assert "pip install envpool" in capsys.readouterr().err


def test_tracking_without_wandb_says_so(monkeypatch, capsys):
    script = load(SCRIPTS[0])
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**tiny(SCRIPTS[0]), track=True))
    message = capsys.readouterr().err.strip()
    assert exit.value.code == 2 and "wandb" in message and "\n" not in message


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_started_in_one_second_have_folders_of_their_own(name):
    script = load(name)
    args = script.Args(**tiny(name), device="cpu")
    folders = []
    for _ in range(50):
        run_dir, writer = script.start_run(args)
        writer.close()
        folders.append(run_dir)
    assert len(set(folders)) == 50


def test_a_run_never_takes_the_folder_of_another(monkeypatch, capsys):
    """If the clock stands still, it says so."""
    script = load(SCRIPTS[0])
    clock = SimpleNamespace(now=lambda: datetime(2026, 1, 1))
    monkeypatch.setattr(script, "datetime", clock)
    args = script.Args(device="cpu")
    *_, writer = script.start_run(args)
    writer.close()
    with pytest.raises(SystemExit):
        script.start_run(args)
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", SCRIPTS)
def test_unwritable_runs_folder(name, capsys, own_folder):
    (own_folder / "runs").write_text("a file where the folder should be")
    script = load(name)
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**tiny(name)))
    assert exit.value.code == 2 and "runs" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loss_that_is_not_finite_ends_the_run_by_name_and_step(monkeypatch, name):
    problem = {"q_lr": 1e18, "policy_lr": 1e18} if "sac" in name else {"learning_rate": 1e18}
    problem |= {"total_timesteps": 2000}
    message = r"(losses/\w+|parameter [\w.]+) is (nan|-?inf) at step (256|512|1000|1280|1500); "
    message += "(a smaller learning|an obs.* an action is not finite)"
    with pytest.raises(SystemExit, match=message) as exit:
        train(monkeypatch, name, **tiny(name) | problem)
    assert exit.value.code not in (0, None)


@pytest.mark.parametrize("name", GYM)
@pytest.mark.parametrize("kind", ["Nan", "NanObs"])
def test_an_env_that_gives_no_numbers_is_told_from_a_learning_rate(monkeypatch, name, kind):
    env_id = f"{'Discrete' * (name in DISCRETE)}{kind}Env-v0"
    with pytest.raises(SystemExit, match=r"losses/\w+ is nan at step (256|1000); an observation, a reward"):
        train(monkeypatch, name, **tiny(name) | {"env_id": env_id})


def command(*parts, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, parts)], capture_output=True, text=True, timeout=280, **kwargs)


def test_a_mistyped_flag_is_told_what_to_type():
    process = command(ROOT / "leanrl" / "ppo_continuous_action.py", "--learning-rat", "1")
    assert process.returncode == 2
    assert "--learning-rate" in process.stderr and "Traceback" not in process.stderr


def run_copy(copy: Path, flags: list[str]):
    """As `python copy` does, where nothing else of the project can be imported."""
    sys.path[:] = [part for part in sys.path if not Path(part).is_relative_to(ROOT / "leanrl")]
    for name in ALL_SCRIPTS:
        del sys.modules[name]
    sys.argv = [str(copy), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_copied_script_runs_alone_and_is_tracked_offline_if_asked(name, own_folder, fork_server):
    copy = shutil.copy(ROOT / "leanrl" / f"{name}.py", own_folder)
    problem = tiny(name)
    if name == "ppo_continuous_action_torchcompile":  # compiled, with sizes that the compiler's cache may know
        problem = problem | row(name).saving | {"checkpoint_interval": 0, "num_envs": 2}
    flags = [str(part) for key, value in problem.items() for part in ("--" + key.replace("_", "-"), value)]
    tracked = name == "dqn_torchcompile"
    if tracked:  # W&B may look for changes that are not committed
        subprocess.run(["git", "init", "-q"], check=True)
        flags.append("--track")
    if name in ("dqn_torchcompile", "ppo_continuous_action_torchcompile"):
        flags += ["--compile"] * ("ppo" in name)
        process = command(copy, *flags, cwd=own_folder, env=os.environ | {"WANDB_MODE": "offline"})
        code, output = process.returncode, process.stderr
    else:
        [(code, output)] = forked(run_copy, (copy, flags))
    assert code == 0, output
    (summary,) = (own_folder / "runs").glob(f"{tiny(name)['env_id']}__{name}__1__*/summary.json")
    assert json.loads(summary.read_text())["metrics"]["global_step"] == problem["total_timesteps"]
    assert bool(list(own_folder.glob("wandb/offline-run-*/run-*.wandb"))) == tracked
    sent = [path.read_bytes() for path in own_folder.glob("wandb/offline-run-*/**/*") if path.is_file()]
    assert not any(b"def check_numbers(" in data for data in sent)  # no code


def test_wandb_is_not_imported_without_track(own_folder):
    code = (
        "import sys; import ppo_continuous_action as script;"
        "script.train(script.Args(env_id='Pendulum-v1', num_steps=256, total_timesteps=256));"
        "assert 'wandb' not in sys.modules"
    )
    process = command("-c", code, cwd=own_folder, env=os.environ | {"PYTHONPATH": str(ROOT / "leanrl")})
    assert process.returncode == 0, process.stderr


def print_memory(name: str, args: dict):
    """In MB, after 1500 and after 3000 steps."""
    script = load(name)
    memory = {}
    report = script.report

    def spied(losses, parameters, data, last_returns, marks, *rest):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory[marks[-1][1]] = pages // 256  # of 4 KiB
        return report(losses, parameters, data, last_returns, marks, *rest)

    script.report = spied
    script.train(script.Args(**args))
    print("\nmemory", memory[1500], memory[3000])


@pytest.mark.slow
@pytest.mark.parametrize("name", OFF_POLICY)
def test_nothing_grows_with_time(name, fork_server):
    """After twice as many steps as when the replay was full, memory in use is the same."""
    args = tiny(name) | {"total_timesteps": 3000, "batch_size": 8, "device": "cpu", "save_model": False}
    args |= {"target_network_frequency": 10, "train_frequency": 1} if "dqn" in name else {}
    args |= {"compile": True} if name == "dqn_torchcompile" else {}  # the others would take a minute to compile
    [(code, output)] = forked(print_memory, (name, args))
    assert code == 0, output
    short, long = map(int, output.splitlines()[-1].split()[1:])
    assert long - short < 8, f"{short} MB after 1500 steps, {long} MB after 3000"


@pytest.mark.parametrize("name", FILES)
def test_a_report_costs_the_same_after_days(name):
    """The list of marks stays short, and the speed is what all of them say."""
    script = load(name)
    nothing = SimpleNamespace(add_scalar=lambda *_: None, set_postfix=lambda **_: None, update=lambda _: None, n=0)
    marks = [(0.0, 0)]
    for i in range(1, 30):
        marks.append((float(i * i), 100 * i))
        more = () if name.endswith("_jax") else ({"weight": torch.ones(1)}, [])
        metrics = script.report({"a_loss": torch.ones(())}, *more, deque(), marks, nothing, nothing)
        warm = min(i - 1, script.WARMUP_REPORTS)
        assert metrics["SPS"] == pytest.approx(100 * (i - warm) / (i * i - warm * warm))
        assert len(marks) <= script.WARMUP_REPORTS + 3


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's OpenMP")
@pytest.mark.parametrize("name", [name for name in ALL_SCRIPTS if not re.match("dqn|ppo_continuous|ppo_rnn", name)])
def test_openmp_is_loaded_with_threads_that_wait_briefly(name):
    """In every script with several threads; set before whatever loads OpenMP, which reads the setting once."""
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    env |= {"PYTHONPATH": str(ROOT / "leanrl"), "OMP_DISPLAY_ENV": "verbose"}
    assert "GOMP_SPINCOUNT = '5000'" in command("-c", f"import {name}", env=env).stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's OpenMP")
def test_openmp_waits_as_the_user_says():
    for variable, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "77")):
        env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        env |= {"PYTHONPATH": str(ROOT / "leanrl"), "OMP_DISPLAY_ENV": "verbose", variable: value}
        shown = command("-c", "import td3_continuous_action", env=env).stderr
        assert f"{variable} = '{value}'" in shown and "GOMP_SPINCOUNT = '5000'" not in shown
