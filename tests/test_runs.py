"""What a user sees of a run: its folder, its determinism, its refusals."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from catalog import CATALOG, row
from conftest import (
    ATARI,
    DEVICE,
    DISCRETE,
    FAST_TD3,
    GYM,
    MEMORY,
    MUJOCO,
    OFF_POLICY,
    PPO,
    PPO_CONTINUOUS,
    PPO_DISCRETE,
    ROOT,
    SCRIPTS,
    SLICED,
    forked,
    load,
    tiny,
    train,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name in CATALOG])
def test_run_folder_holds_events_and_summary(monkeypatch, name):
    run = train(monkeypatch, name, **tiny(name) | {"num_envs": 2})
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["metrics"] == run.metrics
    assert summary["args"]["env_id"] == tiny(name)["env_id"] and summary["args"]["exp_name"] == name
    assert run.metrics["global_step"] == 1024
    assert all(torch.isfinite(torch.tensor(value)) for value in run.metrics.values())
    # Pendulum: 200 steps of at worst -16.3; Breakout: a random policy hits a few bricks; Hopper: it may fall backwards.
    low, high = (5, 500) if name in DISCRETE else (-0.1, 15) if name in ATARI else (-1600 * 1.3, 0)
    low, high = (-50, 500) if name in MUJOCO else (low, high)
    assert run.metrics["SPS"] > 0 and low < run.metrics["episodic_return"] < high
    events = EventAccumulator(str(run.run_dir)).Reload()
    losses = row(name).losses
    losses = [f"losses/{loss}" for loss in losses.split()]
    keys = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", *losses}
    assert set(events.Tags()["scalars"]) - {"charts/learning_rate", "charts/epsilon", "charts/broken_worlds"} == keys
    assert events.Scalars("charts/SPS")[-1].value == pytest.approx(run.metrics["SPS"])
    small = name in PPO_DISCRETE + ATARI + MEMORY  # rollouts of 256 steps, not 512
    reports = [256, 512, 768, 1024] if small else [512, 1024]
    reports = [500, 1000, 1024] if name in OFF_POLICY else [640, 1024] if name in DEVICE else reports
    reports = [200, 400, 600, 800, 1000, 1024] if name in FAST_TD3 else reports
    assert [e.step for e in events.Scalars("charts/SPS")] == reports
    random_steps = 928 if name in FAST_TD3 else 500 if name in OFF_POLICY else 0
    assert [e.step for e in events.Scalars(losses[0])] == [step for step in reports if step > random_steps]
    lengths, returns = ([e.value for e in events.Scalars(f"charts/episodic_{x}")] for x in ("length", "return"))
    assert name in ATARI + MUJOCO or lengths == (returns if name in DISCRETE else [200] * len(returns))
    if name in PPO + MEMORY + DEVICE and name not in FAST_TD3:
        share = np.array([1, 0.75, 0.5, 0.25] if small else [1, 0.5])
        share = np.array([7 / 16, 1 / 16]) if name in DEVICE else share  # of the last rollout before each report
        rates = [e.value for e in events.Scalars("charts/learning_rate")]
        assert rates == pytest.approx(share * load(name).Args.learning_rate)


def test_a_run_that_is_broken_off_has_its_flags(monkeypatch, own_folder):
    """In TensorBoard, where they can be compared with those of other runs."""

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(load("dqn"), "report", broken)
    with pytest.raises(KeyboardInterrupt):
        train(monkeypatch, "dqn", **tiny("dqn"), seed=5)
    (run_dir,) = (own_folder / "runs").iterdir()
    for _ in range(50):  # TensorBoard's writer is a thread of its own
        events = EventAccumulator(str(run_dir), size_guidance={"tensors": 0}).Reload()
        if "args/text_summary" in events.Tags()["tensors"]:
            break
        time.sleep(0.1)
    (text,) = events.Tensors("args/text_summary")[0].tensor_proto.string_val
    assert json.loads(text)["seed"] == 5


ON_POLICY = ["ppo_continuous_action", "ppo_lru", "ppo_rnn", "ppo_device_env", "a2c_device_env", "ppo_mujoco"]


@pytest.mark.parametrize("name", ON_POLICY)
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


def test_flags_of_pqn_do_what_they_say(monkeypatch):
    """Each changes the parameters, and epsilon falls in a line."""
    name, values = "pqn_device_env", set()
    for flags in ({}, {"anneal_lr": False}, {"max_grad_norm": 0.01}, {"q_lambda": 0.1}, {"exploration_fraction": 1.0}):
        run = train(monkeypatch, name, **tiny(name) | {"total_timesteps": 512}, **flags)
        values.add(str(next(iter(run.parameters.values())).flatten()[:100].tolist()))
    assert len(values) == 5
    (epsilon,) = EventAccumulator(str(run.run_dir)).Reload().Scalars("charts/epsilon")
    assert epsilon.value == pytest.approx(1 + 3 / 4 * (load(name).Args.end_e - 1))  # in the last of four rollouts


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name in CATALOG])
def test_another_seed_gives_other_numbers(monkeypatch, name):
    """That the same seed gives the same ones, a run that is killed and resumed shows."""
    sizes = tiny(name) | ({"total_timesteps": 256} if name in PPO + MEMORY + DEVICE else {})
    a, b = (train(monkeypatch, name, **sizes, seed=seed).parameters for seed in (7, 8))
    assert not all(torch.equal(a[k], b[k]) for k in a)


def test_tf32_is_what_the_flag_says(monkeypatch):
    """Settings of the whole process; without the flag they are off, though PyTorch has one of them on."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    script = load("dqn")
    for tf32 in (True, False):
        _, writer, _ = script.start_run(script.Args(cuda=False, tf32=tf32), {})
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


def test_a_vector_of_bytes_is_no_image():
    script = load("dqn")
    args = script.Args(env_id="RamEnv-v0")
    assert script.make_env(args, gym.spaces.Box).observation_space.shape == (8,)


@pytest.mark.parametrize("name", ["dqn", "td3_continuous_action"])
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


BAD = {  # by what is the same source in all scripts: flags, and a word of the sentence that refuses them
    "unknown package": ({"env_id": "no_such_package:Mine-v0"}, "no_such_package"),
    "no module": ({"env_id": ":x"}, "':x'"),
    "unknown env": ({"env_id": "CartPol-v1"}, "CartPole"),
    "image observations": ({"env_id": "ImageEnv-v0"}, "at most 4,096 numbers"),
    "a sequence as observation": ({"env_id": "SequenceEnv-v0"}, "Sequence"),
    "continuous actions": ({"env_id": "Pendulum-v1"}, "Discrete"),
    "no env": ({"num_envs": 0}, "--num-envs must lie between 1 and"),
    "negative seed": ({"seed": -1}, "--seed"),
    "a negative interval": ({"checkpoint_interval": -1}, "--checkpoint-interval"),
    "no step": ({"total_timesteps": 0}, "--total-timesteps"),
    "a negative rate": ({"learning_rate": -0.1}, "--learning-rate"),
    "an infinite rate": ({"learning_rate": float("inf")}, "--learning-rate"),
    "a rate that is no number": ({"gamma": float("nan")}, "--gamma"),
    "a share above 1": ({"gamma": 1.01}, "--gamma must lie between 0 and 1"),
    "no checkpoint there": ({"resume": "nowhere/checkpoint.pt"}, "cannot resume from nowhere/checkpoint.pt"),
    "a folder as checkpoint": ({"resume": "."}, "cannot resume from .: "),
    "no replay": ({"buffer_size": 0}, "--buffer-size"),
    "no batch": ({"batch_size": 0}, "--batch-size"),
    "a target that overshoots": ({"tau": 2.0}, "--tau"),
    "no target": ({"target_network_frequency": 0}, "--target-network-frequency"),
    "more than all": ({"end_e": 1.2}, "--end-e"),
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
    "minibatches of one row": ({"num_steps": 256, "num_envs": 1, "num_minibatches": 256}, "num-minibatches"),
    "a rollout of one step": ({"num_steps": 1, "num_envs": 1, "num_minibatches": 1}, "a rollout has 1 steps"),
}
BAD_A2C = {
    "a rollout of one step": ({"num_steps": 1, "num_envs": 1}, "must be at least 2"),
}
BAD_A2C["less than a rollout"] = BAD_PPO["less than a rollout"]
BAD_MEMORY = {
    "envs that do not divide": ({"num_minibatches": 7}, "--num-minibatches must divide --num-envs (2)"),
    "less than a rollout": BAD_PPO["less than a rollout"],
}
BAD_CONTINUOUS = {
    "discrete actions": ({"env_id": "CartPole-v1"}, "Discrete(2)"),
    "unbounded actions": ({"env_id": "ScriptedEnv-v0"}, "bounds"),
    "no freedom to act": ({"env_id": "StuckEnv-v0"}, "bounds"),
}
BAD_FAST_TD3 = {
    "values upside down": ({"v_min": 2.0, "v_max": 1.0}, "--v-min"),
    "a least value that is no number": ({"v_min": float("nan")}, "--v-min"),
    "one atom": ({"num_atoms": 1}, "--num-atoms"),
    "steps that differ": ({"num_updates": 3}, "--policy-frequency must divide --num-updates"),
    "no room for n steps": ({"buffer_size": 2, "num_steps": 3}, "--buffer-size"),
}
BAD_DQN = {"envs that do not divide": ({"num_envs": 3}, "--train-frequency")}
BAD_SLICES = {
    "no transition in a slice": ({"seq_length": 1}, "--seq-length must be at least 2"),
    "no room for a slice": ({"buffer_size": 15}, "--buffer-size at least 16"),
}
CASES = [("dqn", *case) for case in BAD.items()]
CASES += [(ATARI[0], *case) for case in BAD_ATARI.items()]
CASES += [(name, *case) for name in DEVICE if name not in MUJOCO for case in BAD_DEVICE.items()]
CASES += [(name, "another version", ({"env_id": "Hopper-v4"}, "Hopper-v5")) for name in MUJOCO]
CASES += [
    (name, *case) for name in PPO + DEVICE if "a2c" not in name and name not in FAST_TD3 for case in BAD_PPO.items()
]
CASES += [(name, *case) for name in DEVICE if "a2c" in name for case in BAD_A2C.items()]
CASES += [
    ("a2c_device_env_torchcompile", "minutes of compilation", ({"num_steps": 65, "compile": True}, "--num-steps"))
]
CASES += [(name, *case) for name in MEMORY for case in BAD_MEMORY.items()]
CASES += [(name, "discrete actions", BAD_CONTINUOUS["discrete actions"]) for name in PPO_CONTINUOUS]
CASES += [(name, "continuous actions", ({"env_id": "Pendulum-v1"}, "MultiDiscrete")) for name in PPO_DISCRETE]
CASES += [(ATARI[1], "groups that do not divide", ({"env_groups": 3}, "--env-groups"))]
CASES += [(name, *case) for name in SLICED for case in BAD_SLICES.items()]
CASES += [(name, *case) for name in OFF_POLICY for case in (BAD_DQN if "dqn" in name else BAD_CONTINUOUS).items()]
CASES += [(name, *case) for name in FAST_TD3 for case in BAD_FAST_TD3.items()]
CASES += [(name, "nothing left", ({"resume": "done.pt"}, "nothing is left to do")) for name in SCRIPTS]


@pytest.mark.parametrize(("name", "case", "refused"), CASES, ids=[f"{name}-{case}" for name, case, _ in CASES])
def test_bad_input_gets_one_sentence_and_exit_code_2_and_leaves_nothing(name, case, refused, capsys, own_folder):
    args, word = refused
    script = load(name)
    args = script.Args(**tiny(name) | args)
    if args.resume == "done.pt":
        done = {"step": 10**9, "iteration": 10**9}
        script.save_checkpoint(own_folder, replace(args, physics="host") if name in MUJOCO else args, done)
        (own_folder / "checkpoint.pt").rename("done.pt")
    with pytest.raises(SystemExit) as exit:
        script.train(args)
    message = capsys.readouterr().err.strip().removeprefix("resuming done.pt\n")
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


def test_runs_started_in_one_second_have_folders_of_their_own():
    script = load("dqn")
    folders = []
    for _ in range(50):
        run_dir, writer, _ = script.start_run(script.Args(cuda=False), {})
        writer.close()
        folders.append(run_dir)
    assert len(set(folders)) == 50


def test_a_run_never_takes_the_folder_of_another(monkeypatch, capsys):
    """If the clock stands still, it says so."""
    script = load("dqn")
    clock = SimpleNamespace(now=lambda: datetime(2026, 1, 1))
    monkeypatch.setattr(script, "datetime", clock)
    _, writer, _ = script.start_run(script.Args(cuda=False), {})
    writer.close()
    with pytest.raises(SystemExit):
        script.start_run(script.Args(cuda=False), {})
    assert "exists" in capsys.readouterr().err


def test_unwritable_runs_folder(capsys, own_folder):
    (own_folder / "runs").write_text("a file where the folder should be")
    script = load("dqn")
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**tiny("dqn")))
    assert exit.value.code == 2 and "cannot make the run folder" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.* encountered in")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(monkeypatch, name):
    problem = {"q_lr": 1e18, "policy_lr": 1e18} if "sac" in name else {"learning_rate": 1e18}
    problem |= {"total_timesteps": 2000}
    with pytest.raises(SystemExit, match=r"error: not finite: .*'global_step': \d+.*Checkpoints are kept") as exit:
        train(monkeypatch, name, **tiny(name) | problem)
    assert exit.value.code not in (0, None)


def command(*parts, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, parts)], capture_output=True, text=True, timeout=280, **kwargs)


def test_a_mistyped_flag_is_told_what_to_type():
    process = command(ROOT / "leanrl" / "ppo_continuous_action.py", "--learning-rat", "1")
    assert process.returncode == 2
    assert "--learning-rate" in process.stderr and "Traceback" not in process.stderr


@pytest.mark.slow
def test_a_copied_script_runs_alone_and_is_tracked_offline_if_asked(own_folder, name="dqn_torchcompile"):
    """That no script imports another, test_project.py shows of all."""
    copy = shutil.copy(ROOT / "leanrl" / f"{name}.py", own_folder / "my copy (1).py")
    flags = [str(part) for key, value in tiny(name).items() for part in ("--" + key.replace("_", "-"), value)]
    tracked = name == "dqn_torchcompile"
    if tracked:  # W&B may look for changes that are not committed
        subprocess.run(["git", "init", "-q"], check=True)
        flags.append("--track")
    process = command(copy, *flags, cwd=own_folder, env=os.environ | {"WANDB_MODE": "offline"})
    assert process.returncode == 0, process.stderr
    (summary,) = (own_folder / "runs").glob(f"{tiny(name)['env_id']}__my copy (1)__1__*/summary.json")
    assert json.loads(summary.read_text())["metrics"]["global_step"] == tiny(name)["total_timesteps"]
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

    def spied(losses, parameters, last_returns, global_step, *rest):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory[global_step] = pages // 256  # of 4 KiB
        return report(losses, parameters, last_returns, global_step, *rest)

    script.report = spied
    script.train(script.Args(**args))
    print("\nmemory", memory[1500], memory[3000])


@pytest.mark.long
@pytest.mark.slow
def test_nothing_grows_with_time(fork_server, name="dqn_torchcompile"):
    """After twice as many steps as when the replay was full, memory in use is the same."""
    args = tiny(name) | {"total_timesteps": 3000, "batch_size": 8, "cuda": False, "save_model": False}
    args |= {"target_network_frequency": 10, "train_frequency": 1, "compile": True}
    [(code, output)] = forked(print_memory, (name, args))
    assert code == 0, output
    short, long = map(int, output.splitlines()[-1].split()[1:])
    assert long - short < 8, f"{short} MB after 1500 steps, {long} MB after 3000"
