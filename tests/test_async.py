"""Envs in processes of their own: --async-envs computes the same run, to the last bit, and leaves no process behind."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from conftest import PPO_DISCRETE, ROOT, load
from test_checkpoints import patch_reports, problem, same_run, train_and_keep
from test_masks import MaskedEnv

PLAIN = ["ppo", "ppo_continuous_action", "td3_continuous_action", "sac_continuous_action"]
NAMES = [name + twin for name in PLAIN for twin in ("", "_torchcompile")]


class OwnDraws(gym.Env):
    """Observes what it draws from its generator and the last action; episodes of 3 to 9 steps that end in both ways."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 10))
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action):
        self.left -= 1
        obs = np.array([self.np_random.normal(), np.ravel(action)[0]], np.float32)
        return (
            obs,
            float(obs.sum()) / 3,
            self.left == 0 and obs[0] > 0,
            self.left == 0 and obs[0] <= 0,
            {"odd": [1.0] * self.left},
        )


class GlobalDraws(OwnDraws):
    """Pays what it draws from the generators of its process."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        drawn = random.random() + np.random.random() + self.action_space.sample()[0]  # noqa: NPY002
        return obs, float(drawn), *rest


class Faulty(OwnDraws):
    """Fails at its tenth reset, or where it is made, but in processes of its own only; or dies."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, how: str):
        self.how = how
        self.resets = 0
        if how == "made" and multiprocessing.current_process().name.endswith("-1"):
            raise OSError("no licence is left")

    def reset(self, **settings):
        self.resets += 1
        if self.how == "raises" and self.resets == 10:
            raise OSError("the simulator is broken")
        if self.how == "dies" and self.resets == 10:
            os._exit(7)
        return super().reset(**settings)


for env in (OwnDraws, GlobalDraws, Faulty):
    gym.register(f"{env.__name__}-v0", entry_point=env, disable_env_checker=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in NAMES[3:7])) for name in NAMES]
)
def test_envs_in_processes_give_the_same_run(monkeypatch, name):
    """To the bit: parameters, metrics, checkpoints; also where the run went on from a checkpoint of the other mode."""
    patch_reports(monkeypatch, name)
    env_id = f"{MaskedEnv.__name__}-v0" if name in PPO_DISCRETE else "OwnDraws-v0"
    flags = problem(name) | {"env_id": env_id, "num_envs": 4}
    plain = train_and_keep(monkeypatch, name, **flags)
    processes = train_and_keep(monkeypatch, name, async_envs=True, **flags)
    same_run(plain, processes)
    assert plain.metrics["episodic_return"] == processes.metrics["episodic_return"] is not None
    same_run(plain, train_and_keep(monkeypatch, name, async_envs=True, resume=plain.first, **flags))
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_envs_in_processes_draw_differently_and_repeat_themselves(monkeypatch):
    """Even from generators that belong to their process, which would all start alike."""
    flags = problem("ppo_continuous_action") | {"env_id": "GlobalDraws-v0", "async_envs": True, "num_envs": 2}
    script = load("ppo_continuous_action")
    steps = []
    step_processes = script.step_processes

    def step(envs, action, obs, reward, *rest):
        episodes = step_processes(envs, action, obs, reward, *rest)
        steps.append(reward.copy())
        return episodes

    monkeypatch.setattr(script, "step_processes", step)
    first, second = (train_and_keep(monkeypatch, "ppo_continuous_action", **flags) for _ in range(2))
    same_run(first, second)
    paid = np.array(steps)
    assert len(np.unique(paid[paid != 0])) >= 0.8 * paid.size / 2 > 100  # as many in one run as there are steps


def start(how: str, *flags) -> subprocess.Popen:
    """ppo.py with faulty envs in four processes; the whole group has the number of the main process."""
    command = [sys.executable, ROOT / "leanrl" / "ppo.py", "--env-id", "test_async:Faulty-v0", "--no-cuda"]
    command += ["--env-kwargs", f'{{"how": "{how}"}}', "--async-envs", "--exp-name", how, *flags]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    path = {"PYTHONPATH": str(ROOT / "tests")}
    return subprocess.Popen(command, env=os.environ | path, start_new_session=True, **streams)


@pytest.mark.slow
def test_a_fault_or_a_signal_ends_all_processes(own_folder):
    """A fault with exit code 1 and its error; a signal to all of them once the run is saved, as the checkpoint is."""
    faults = {"made": "no licence is left", "raises": "OSError: the simulator is broken", "dies": "Error"}
    processes = {how: start(how, "--checkpoint-interval", "64", "--num-steps", "16") for how in (*faults, "nothing")}
    while not list(own_folder.glob("runs/*__nothing__*/checkpoint.pt")):
        assert processes["nothing"].poll() is None
        time.sleep(0.1)
    os.killpg(processes["nothing"].pid, signal.SIGTERM)
    errors = {how: process.communicate(timeout=60)[1] for how, process in processes.items()}
    for how, error in faults.items():
        assert processes[how].returncode == 1 and error in errors[how]
        assert len(list(own_folder.glob(f"runs/*__{how}__*/checkpoint.pt"))) == (how != "made")
    assert processes["nothing"].returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors["nothing"] and "to go on, add --resume auto" in errors["nothing"]
    for process in processes.values():
        with pytest.raises(ProcessLookupError):  # nothing is left of the group
            os.killpg(process.pid, 0)
