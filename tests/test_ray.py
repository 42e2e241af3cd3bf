"""Simulators on Ray: what the script of one process computes, wherever the policy acts, whatever happens to workers.

Most tests run Ray's calls in this process (local_ray.py), where a worker can be lost at a chosen call. Those that are
marked slow run Ray itself.
"""

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import local_ray
import numpy as np
import pytest
import torch
from catalog import row
from conftest import RAY, ROOT, QuadrantPool, ScriptedEnv, ScriptedPool, largest_difference, load, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_checkpoints import same_run, train_and_keep
from test_cuda import distance
from test_scripted_env import DONE, OBS, REWARD, TERMINATED, VALID, record
from torch._dynamo.utils import counters

CONTINUOUS = [name for name in RAY if "continuous" in name]
ON_LEARNER = {"act_on": "learner"}
ONE_WORKER = {"num_workers": 1, "envs_per_worker": 2}
TWO_WORKERS = {"num_workers": 2, "envs_per_worker": 1}


def alone(name: str) -> str:
    """The script that does the same in one process."""
    return name.replace("_ray", "")


def problem(name: str) -> dict:
    flags = tiny(name) | row(name).saving
    return {key: value for key, value in flags.items() if key not in ("num_workers", "envs_per_worker")}


def same(a, b) -> bool:
    ignored = dict.fromkeys(("SPS", "lost_workers", "share_waited"), 0)
    same_parameters = all(torch.equal(p, b.parameters[name]) for name, p in a.parameters.items())
    return same_parameters and a.metrics | ignored == b.metrics | ignored


@pytest.fixture
def local(monkeypatch):
    """With Ray's calls in this process; `killed` are the workers that were replaced."""
    local_ray.reset()
    monkeypatch.setitem(sys.modules, "ray", local_ray)
    return local_ray


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "ScriptedEnv-v0"])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_workers_compute_what_one_process_computes(monkeypatch, local, name, env_id):
    """To the bit; but two workers that act know less of each other's observations, which they normalize by."""
    flags = problem(name) | {"env_id": env_id, "checkpoint_interval": 0}
    monkeypatch.setattr(load(alone(CONTINUOUS[1])), "gae_scan", load(name).gae)  # which rounds otherwise
    one = train(monkeypatch, alone(name), **flags, num_envs=2)
    assert one.metrics["episodic_return"] is not None or env_id == "Pendulum-v1"
    for where in ({}, ON_LEARNER):
        assert same(one, train(monkeypatch, name, **flags | ONE_WORKER | where))
    assert same(one, train(monkeypatch, name, **flags | TWO_WORKERS | ON_LEARNER))
    two = train(monkeypatch, name, **flags | TWO_WORKERS)
    assert 0 < largest_difference(one, two) < 0.02
    assert same(two, train(monkeypatch, name, **flags | TWO_WORKERS))


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("groups", [1, 2])
def test_groups_step_every_env_in_order(monkeypatch, local, name, groups):
    """Worker 0 has the envs 0 and 1 of the scripted env, worker 1 has 2 and 3; a group has one env of each worker."""
    sizes = ON_LEARNER | {"num_workers": 2, "envs_per_worker": 2, "env_groups": groups}
    calls, batches, _ = record(monkeypatch, name, num_steps=7, total_timesteps=28, **sizes)
    obs = batches[0]["obs"].view(7, 4, 3)
    assert obs[0, :, 0].tolist() == [0, 1, 2, 3]
    even, odd = [0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 1]  # as in test_scripted_env.py
    assert calls[0][3].T.tolist() == [even, odd] * 2
    assert all(len(set(env)) == 1 for env in obs[:, :, 0].T.tolist())
    order = [method for _, method in local.calls]
    assert order == ["reset"] * 2 + ["rollout"] * 14 * groups
    assert all(len(np.unique(batch["action"])) > 14 for batch in batches)


DIED = local_ray.RayActorError("the worker died")
HANGS = local_ray.GetTimeoutError("no answer")


@pytest.mark.parametrize("error", [DIED, HANGS])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_lost_step_is_a_truncation_and_a_reset(monkeypatch, local, capsys, name, groups, error):
    """Of the envs of that worker alone. With two groups, both of its calls are lost, and it is replaced once."""
    sizes = ON_LEARNER | {"num_workers": 2, "envs_per_worker": 2, "env_groups": groups}
    before = record(monkeypatch, name, num_steps=7, total_timesteps=28, **sizes)
    local.reset()
    lost = 2 + 2 * groups * 2 + 2  # two resets, two steps of all; the third of worker 1, or of its first group
    local.lost[lost] = error
    after = record(monkeypatch, name, num_steps=7, total_timesteps=28, **sizes)
    of_worker_0 = [0, 1]
    of_worker_1 = [2, 3]
    (done, valid, obs), (done_before, valid_before, obs_before) = (
        (calls[0][3], batches[0]["valid"].view(7, 4), batches[0]["obs"].view(7, 4, 3))
        for calls, batches, _ in (after, before)
    )
    for x, y in ((done, done_before), (valid, valid_before), (obs, obs_before)):
        assert torch.equal(x[:, of_worker_0], y[:, of_worker_0])
        assert torch.equal(x[:1, of_worker_1], y[:1, of_worker_1])
    assert done[1, of_worker_1].tolist() == [1, 1]
    assert valid[1:4, of_worker_1].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert obs[3, of_worker_1].tolist() == [[2, 1, 0], [3, 1, 0]]  # a first observation, after two resets
    assert after[2].metrics["lost_workers"] == 1 and before[2].metrics["lost_workers"] == 0
    message = "no answer in time; see --worker-timeout" if error is HANGS else "the worker died"
    assert f"warning: worker 1 was lost: {message}" in capsys.readouterr().err
    assert local.killed == [local.calls[1][0]]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_lost_rollout_is_made_again_by_that_worker_alone(monkeypatch, local, name):
    sizes = {"num_workers": 2, "envs_per_worker": 1, "num_steps": 6, "total_timesteps": 24}
    local.lost[6] = DIED  # two resets, two rollouts, the second of worker 1
    calls, batches, run = record(monkeypatch, name, **sizes)
    assert [method for _, method in local.calls] == ["reset"] * 2 + ["rollout"] * 4 + ["reset", "rollout"]
    assert local.killed == [local.calls[1][0]] and len({id(worker) for worker, _ in local.calls}) == 3
    assert local.calls[-1][0] is local.calls[-2][0]
    assert run.metrics["lost_workers"] == 1 and run.metrics["global_step"] == 24
    # env 0 has ended its episode with the first rollout, env 1 was in the middle of one
    assert calls[0][3][-1].tolist() == [1, 0]
    assert batches[1]["valid"].view(6, 2)[:2].T.tolist() == [[0, 1], [0, 1]]
    assert batches[1]["obs"].view(6, 2, 3)[1, 1].tolist() == [1, 1, 0]


FOREVER = 10_000
AGAIN = "worker . is lost again and again; 3 CPUs of the cluster are free: "


@pytest.mark.parametrize("where", [{}, ON_LEARNER])
@pytest.mark.parametrize("name", CONTINUOUS[:1])
def test_workers_that_are_lost_again_and_again_end_the_run(monkeypatch, local, name, where):
    local.lost.update({number: DIED for number in range(3, FOREVER) if number % 2})  # some resets work
    with pytest.raises(SystemExit, match=AGAIN + "the worker died"):
        train(monkeypatch, name, **problem(name) | TWO_WORKERS | where)
    assert 9 < len(local.calls) < 20


@pytest.mark.parametrize("where", [{}, ON_LEARNER])
@pytest.mark.parametrize("name", CONTINUOUS[:1])
def test_workers_may_be_lost_now_and_then(monkeypatch, local, name, where):
    """Also more often than in a row, in one rollout or in many."""
    local.lost.update(dict.fromkeys((3, 9, 16, 22, 29), DIED))
    run = train(monkeypatch, name, **problem(name) | TWO_WORKERS | where | {"total_timesteps": 64 * 2 * 12})
    assert run.metrics["lost_workers"] == 5 and run.metrics["global_step"] == 64 * 2 * 12


NO_MODULE = local_ray.ActorDiedError("No module named 'my_envs'")


@pytest.mark.parametrize("first", [1, 5])  # at the start, or after a loss, as when no CPU is free
@pytest.mark.parametrize("error", [DIED, HANGS, NO_MODULE])
@pytest.mark.parametrize("name", RAY)
def test_a_worker_that_never_starts_ends_the_run(monkeypatch, local, name, error, first):
    local.lost.update(dict.fromkeys(range(first, FOREVER), error))
    reason = "no answer in time; see --worker-timeout" if error is HANGS else str(error)
    with pytest.raises(SystemExit, match=AGAIN + reason):
        train(monkeypatch, name, **tiny(name) | TWO_WORKERS | {"worker_timeout": 5.0})
    assert len(local.killed) == 5


@pytest.mark.parametrize("name", RAY)
def test_a_worker_that_hangs_while_it_starts_is_replaced(monkeypatch, local, name):
    """Ray would say that it cannot be reached, for ever."""
    local.lost[1] = local.UNREACHABLE
    run = train(monkeypatch, name, **tiny(name))
    assert local.killed == [local.calls[0][0]] and run.metrics["global_step"] == tiny(name)["total_timesteps"]


@pytest.mark.parametrize("name", CONTINUOUS)
def test_statistics_of_several_workers_are_those_of_all_they_saw(monkeypatch, local, name):
    """To the bit, on observations that do not depend on the actions."""
    flags = problem(name) | {"env_id": "ScriptedEnv-v0", "checkpoint_interval": 0}

    def statistics(script: str, **sizes) -> list[torch.Tensor]:
        policies = []
        finish_run = load(script).finish_run
        with monkeypatch.context() as patch:
            patch.setattr(load(script), "finish_run", lambda *args: policies.append(args[4]) or finish_run(*args))
            train(patch, script, **flags | sizes)
        return [policies[0].mean, policies[0].std]

    one = statistics(alone(name), num_envs=2)
    for where in ({}, ON_LEARNER):
        two = statistics(name, **TWO_WORKERS | where)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def check_resume(monkeypatch, name: str, **flags):
    """A run that is resumed from its second checkpoint computes what the whole one computes, to the last checkpoint."""
    whole = train_and_keep(monkeypatch, name, **flags)
    resumed = train(monkeypatch, name, **flags, resume=whole.second)
    waited = {"share_waited": 0} if "share_waited" in whole.metrics else {}  # it is a time
    whole.metrics |= waited
    resumed.metrics |= waited
    same_run(whole, resumed)
    assert not same(whole, train(monkeypatch, name, **flags | {"checkpoint_interval": 0}))


@pytest.mark.parametrize(
    "name", ["ppo_continuous_action_ray", pytest.param("ppo_atari_ray_torchcompile", marks=pytest.mark.long)]
)
def test_a_run_that_lost_a_worker_before_it_was_saved_resumes_to_the_bit(monkeypatch, local, name):
    """Seeds of the envs follow from the step alone once more."""
    local.lost[3] = DIED
    whole = train_and_keep(monkeypatch, name, **problem(name) | TWO_WORKERS)
    assert whole.metrics["lost_workers"] == 1
    local.lost.clear()
    assert same(whole, train(monkeypatch, name, **problem(name) | TWO_WORKERS, resume=whole.first))


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("where", [{}, ON_LEARNER, ON_LEARNER | {"env_groups": 2}])
def test_a_killed_and_resumed_run_computes_the_same_bits(monkeypatch, local, name, where):
    sizes = TWO_WORKERS | {"envs_per_worker": 2, "total_timesteps": 64 * 4 * 4}
    check_resume(monkeypatch, name, **problem(name) | sizes | where)


ATARI = [name for name in RAY if "atari" in name]
SYNC = {"lag": 0}
GAME = {"num_workers": 1, "envs_per_worker": 4, "num_steps": 16, "total_timesteps": 512, "learning_rate": 1e-3}


class Pools:
    """Pools of one env each, which therefore plays the same games whichever worker has it."""

    def __init__(self, env_id: str, seeds: list[int], num_threads: int = 0):
        self.pools = [QuadrantPool(env_id, [seed]) for seed in seeds]
        self.action_space = QuadrantPool.action_space

    def reset(self):
        return np.concatenate([pool.reset()[0] for pool in self.pools]), {}

    def send(self, action: np.ndarray):
        self.sent = action

    def recv(self):
        *results, infos = zip(*(pool.step(self.sent[i : i + 1]) for i, pool in enumerate(self.pools)))
        info = {key: np.concatenate([info[key] for info in infos]) for key in infos[0]}
        return *map(np.concatenate, results), info

    def step(self, action: np.ndarray):
        self.send(action)
        return self.recv()

    def close(self):
        pass


@pytest.fixture
def quadrants(monkeypatch):
    for name in ("ppo_atari_envpool", "ppo_atari_envpool_torchcompile", *ATARI):
        monkeypatch.setattr(load(name), "make_envs", Pools)


def test_without_a_lag_it_is_ppo(monkeypatch, local, quadrants, name="ppo_atari_ray"):
    """To rounding, since the learner looks at all frames once more."""
    torch.set_default_dtype(torch.float64)
    flags = tiny(name) | GAME | SYNC
    one = {key: value for key, value in flags.items() if key not in ("num_workers", "envs_per_worker", "lag")}
    alone = train(monkeypatch, name.replace("ray", "envpool"), **one, num_envs=4)
    run = train(monkeypatch, name, **flags)
    assert largest_difference(alone, run) < 2e-5
    assert run.metrics["episodic_return"] == alone.metrics["episodic_return"] is not None
    assert run.metrics["ratio"] == pytest.approx(1, abs=1e-6) and run.metrics["lag_max"] == 0


GRAPHS = {"cudagraphs": True}
ON_CUDA = [pytest.param("cuda", flags, marks=pytest.mark.cuda) for flags in ({}, GRAPHS, GRAPHS | {"compile": True})]


@pytest.mark.parametrize(("device", "flags"), [("cpu", {}), *ON_CUDA])
@pytest.mark.parametrize("eager", ["ppo_continuous_action_ray", "ppo_atari_ray"])
def test_every_mode_learns_the_same(monkeypatch, local, eager, device, flags):
    twin = f"{eager}_torchcompile"
    if "atari" in eager:
        for name in (eager, twin):
            monkeypatch.setattr(load(name), "make_envs", ScriptedPool)
    sizes = tiny(eager) | {"cuda": device == "cuda"}
    plain = train(monkeypatch, eager, **sizes)
    fast = train(monkeypatch, twin, **sizes | flags)
    still = train(monkeypatch, eager, **sizes | {"learning_rate": 0.0})
    moved = distance(plain.parameters, still.parameters)
    assert moved > 0 and distance(plain.parameters, fast.parameters) < 0.05 * moved


@pytest.mark.long
@pytest.mark.parametrize("lag", [1, 2])
def test_a_lag_costs_no_reproducibility(monkeypatch, local, quadrants, lag, name=ATARI[1]):
    """Not between runs and, but for rounding, not between one worker and two; a rollout is `lag` updates behind."""
    torch.set_default_dtype(torch.float64)
    flags = tiny(name) | GAME | {"lag": lag, "total_timesteps": 256}
    one = train(monkeypatch, name, **flags)
    flags_of_two = flags | {"num_workers": 2, "envs_per_worker": 2}
    two = train(monkeypatch, name, **flags_of_two)
    assert same(two, train(monkeypatch, name, **flags_of_two))
    assert largest_difference(one, two) < 2e-5  # kernels round by the size of their batch; logprob is in float32
    assert one.metrics["episodic_return"] == two.metrics["episodic_return"] is not None
    events = EventAccumulator(str(one.run_dir)).Reload()
    for tag in ("charts/lag_mean", "charts/lag_max"):
        assert [e.value for e in events.Scalars(tag)] == [min(i, lag) for i in range(4)]
    assert one.metrics["ratio"] != 1 and largest_difference(one, train(monkeypatch, name, **flags | SYNC)) > 1e-3


@pytest.mark.parametrize("name", ATARI[1:])
def test_first_come_learns_from_what_is_ready_and_drops_what_is_old(monkeypatch, local, quadrants, name):
    flags = tiny(name) | GAME | {"num_workers": 2, "envs_per_worker": 2, "first_come": True}
    run = train(monkeypatch, name, **flags)
    assert run.metrics["global_step"] == 512 and run.metrics["dropped_rollouts"] == 0
    methods = [method for _, method in local.calls]
    assert methods == ["reset"] * 2 + ["rollout"] * (2 * 2 + 2 * 7)  # none is asked for behind the last update
    # the last one is ready first (local_ray.py), so only the latest are learnt from, unless others are late
    monkeypatch.setattr(load(name), "time", SimpleNamespace(**vars(time) | {"monotonic": itertools.count().__next__}))
    late = train(monkeypatch, name, **flags | {"worker_timeout": 12.0, "max_lag": 2})
    events = EventAccumulator(str(late.run_dir)).Reload()
    assert late.metrics["dropped_rollouts"] > 0 and max(e.value for e in events.Scalars("charts/lag_max")) <= 2


@pytest.mark.parametrize("name", ATARI)
def test_first_come_takes_the_oldest_of_what_is_late(monkeypatch, local, quadrants, name):
    """After a loss, that is not the first call, which is asked again and stands where it was."""
    asked, oldest, taken = [], [], []  # results of calls
    call, wait, get = local.Actor.call, local.wait, local.get

    def wait_and_record(results: list, **options):
        if "num_returns" not in options:  # one of them is to be learnt from
            oldest.append(min(results, key=asked.index))
        return wait(results, **options)

    monkeypatch.setattr(local.Actor, "call", lambda *args: asked.append(call(*args)) or asked[-1])
    monkeypatch.setattr(local, "wait", wait_and_record)
    monkeypatch.setattr(local, "get", lambda result, timeout: taken.append(result) or get(result, timeout))
    local.lost[7] = DIED  # as in the test that follows
    everything_is_late = {"first_come": True, "worker_timeout": 1e-9}
    run = train(monkeypatch, name, **tiny(name) | GAME | {"num_workers": 2, "envs_per_worker": 2} | everything_is_late)
    assert run.metrics["lost_workers"] == 1 and len(oldest) == 2 * 8 + 1
    assert [result for result in taken if result in oldest] == oldest


@pytest.mark.parametrize(("name", "error"), [(ATARI[0], DIED), (ATARI[1], HANGS)])
def test_lost_rollouts_are_asked_for_again(monkeypatch, local, quadrants, name, error):
    """In the same order, of that worker alone."""
    flags = tiny(name) | GAME | {"num_workers": 2, "envs_per_worker": 2}
    local.lost[7] = error  # two resets, two rounds of rollouts; the first of worker 0 of the third round
    run = train(monkeypatch, name, **flags)
    assert run.metrics["lost_workers"] == 1 and run.metrics["global_step"] == 512
    first, second = (actor for actor, _ in local.calls[:2])
    rounds = [first, second] * 4  # of rollouts, up to that in which the loss comes to light
    assert [actor for actor, _ in local.calls[: 2 + len(rounds)]] == [first, second, *rounds]
    new, method = local.calls[2 + len(rounds)]
    assert method == "reset" and new not in (first, second)
    assert [actor for actor, _ in local.calls[3 + len(rounds) :]] == [new, new, *[new, second] * 5]  # what it was to do
    assert local.killed == [first]
    events = EventAccumulator(str(run.run_dir)).Reload()
    assert [e.value for e in events.Scalars("charts/lag_max")] == [0, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("name", "lag"), [pytest.param(ATARI[0], 1, marks=pytest.mark.long), (ATARI[1], 0)])
def test_an_asynchronous_run_resumes_to_the_bit(monkeypatch, local, name, lag):
    check_resume(monkeypatch, name, **problem(name) | TWO_WORKERS | {"lag": lag})


def a_batch(seed: int = 1) -> list[torch.Tensor]:
    """Ratio, reward, value, terminated, done of 9 steps of 5 envs, in float64."""
    rng = torch.Generator().manual_seed(seed)
    ratio = torch.rand(9, 5, generator=rng, dtype=torch.float64) * 2
    reward, terminated, done = torch.rand(3, 9, 5, generator=rng, dtype=torch.float64)
    value = torch.randn(10, 5, generator=rng, dtype=torch.float64)
    terminated = (terminated > 0.8).double()
    return [ratio, reward, value, terminated, ((done > 0.9) | (terminated > 0)).double()]


def test_vtrace_is_the_sum_of_the_paper():
    """Espeholt et al. 2018, eq. 1, written out, with lambda in c as in remark 2; at ratio 1, GAE."""
    script = load(ATARI[0])
    args = script.Args(gamma=0.9, gae_lambda=0.8, rho_clip=1.2, c_clip=0.7)
    ratio, reward, value, terminated, done = a_batch()
    target, advantage = script.vtrace(ratio.clone(), reward, value, terminated, done, args)
    T, N = reward.shape
    for n in range(N):
        for s in range(T):
            v, weight = value[s, n].item(), 1.0
            for t in range(s, T):
                bootstrap = (1 - terminated[t, n]) * value[t + 1, n]
                delta = min(1.2, ratio[t, n]) * (reward[t, n] + 0.9 * bootstrap - value[t, n])
                v += weight * delta.item()
                weight *= 0.9 * 0.8 * min(0.7, ratio[t, n].item())
                if done[t, n]:
                    break
            assert target[s, n].item() == pytest.approx(v, abs=1e-9)
    following = torch.cat([(target - value[:-1])[1:], torch.zeros(1, N)])
    q = reward + 0.9 * ((1 - terminated) * value[1:] + 0.8 * (1 - done) * following)
    torch.testing.assert_close(advantage, ratio.clamp(max=1.2) * (q - value[:-1]))
    _, advantage = script.vtrace(torch.ones(9, 5), reward, value, terminated, done, script.Args(gamma=0.9))
    gae = load("ppo_atari_envpool").gae(reward, value, terminated, done, 0.9, 0.95)
    torch.testing.assert_close(advantage, gae)
    args = script.Args(gamma=0.9, gae_lambda=1.0)
    target, advantage = script.vtrace(ratio, reward, value, terminated, done, args)
    following = torch.cat([target[1:], value[-1:]])
    following = torch.where(done > 0, (1 - terminated) * value[1:], following)
    torch.testing.assert_close(advantage, ratio.clamp(max=1) * (reward + 0.9 * following - value[:-1]))  # IMPALA's


@pytest.mark.parametrize("name", ATARI)
def test_vtrace_over_episodes_known_in_advance(monkeypatch, local, name):
    """Espeholt et al. 2018, remark 1, as a recursion in float64 over the rows of test_scripted_env.py."""
    script, played, lam, gamma = load(name), [], 0.5, 0.75
    collect = script.Workers.collect

    def spied_collect(*args):
        results = collect(*args)
        played.extend(result["logprob"] for result in results.values() if isinstance(result, dict))
        return results

    monkeypatch.setattr(script.Workers, "collect", spied_collect)
    sizes = {"num_workers": 1, "envs_per_worker": 1, "num_steps": 5, "total_timesteps": 10, "learning_rate": 0.05}
    flags = {"gamma": gamma, "gae_lambda": lam, "rho_clip": 0.95, "c_clip": 0.95, "anneal_lr": False}
    calls, batches, _ = record(monkeypatch, name, **sizes | flags, seed=7)  # has ratios on both sides of 0.95
    last_value = [120, 310]  # of what follows OBS
    for i, (ratio, *_, target, advantage) in enumerate(calls):
        ratios = (batches[i]["logprob"] - torch.tensor(played[i]).flatten()).exp()
        torch.testing.assert_close(ratio.flatten(), ratios)
        value = [100 * e + 10 * s for _, e, s in OBS[i]] + [last_value[i]]
        error, targets, advantages = 0.0, [], []  # target - value of the row that follows
        for t in reversed(range(5)):
            rho = min(0.95, ratios[t].item())  # and c, but for lambda
            bootstrap = gamma * (1 - TERMINATED[i][t]) * value[t + 1]
            following = gamma * (1 - DONE[i][t]) * error
            advantages.append(rho * (REWARD[i][t] + bootstrap + lam * following - value[t]))
            error = rho * (REWARD[i][t] + bootstrap - value[t]) + lam * rho * following
            targets.append(value[t] + error)
        for given, kept, by_hand in ((target, "return", targets), (advantage, "advantage", advantages)):
            assert given.flatten().tolist() == batches[i][kept].tolist() == pytest.approx(by_hand[::-1], rel=1e-5)
        assert batches[i]["valid"].tolist() == VALID[i]
    assert (ratios < 0.95).any() and (ratios > 0.95).any() and len(calls) == 2


def test_one_update_of_everything_is_impala():
    """The gradient of PPO's loss is that of the policy gradient, if the policy has not moved yet."""
    script, rng = load(ATARI[0]), torch.Generator().manual_seed(1)
    args = script.Args(norm_adv=False)
    logits = torch.randn(40, 4, generator=rng, dtype=torch.float64, requires_grad=True)
    value = torch.randn(40, generator=rng, dtype=torch.float64, requires_grad=True)
    action = torch.randint(4, (40,), generator=rng)
    advantage, return_ = torch.randn(2, 40, generator=rng, dtype=torch.float64)
    logprob, entropy = script.categorical_logprob_entropy(action, logits)
    batch = {"valid": torch.ones(40), "advantage": advantage, "logprob": logprob.detach()}
    batch |= {"return": return_, "value": value.detach()}
    loss, _ = script.ppo_loss(logprob, entropy, value, batch, args)
    impala = -(advantage * logprob).mean() + 0.5 * 0.5 * ((value - return_) ** 2).mean() - 0.01 * entropy.mean()
    for a, b in zip(*(torch.autograd.grad(x, (logits, value), retain_graph=True) for x in (loss, impala))):
        torch.testing.assert_close(a, b)


def test_a_worker_has_as_many_threads_as_it_is_given(monkeypatch, local, name="ppo_atari_ray"):
    script, made = load(name), []

    def new_pool(env_id: str, seeds: list[int], num_threads: int = 0) -> ScriptedPool:
        made.append((num_threads, torch.get_num_threads()))
        return ScriptedPool(env_id, seeds)

    monkeypatch.setattr(script, "make_envs", new_pool)
    threads = torch.get_num_threads()
    train(monkeypatch, name, **tiny(name) | {"worker_threads": 2, "total_timesteps": 32})
    torch.set_num_threads(threads)
    assert made[1:] == [(2, 2)]  # the first ones tell the learner of the actions


REFUSED = {
    "groups that do not divide": (ON_LEARNER | {"env_groups": 3}, "--env-groups"),
    "groups without a learner that acts": ({"env_groups": 2}, "--act-on is learner"),
    "more workers than cores": ({"num_workers": 5}, "--num-workers 5 needs as many CPUs; the cluster has 4"),
    "sizes that do not divide": ({"num_minibatches": 7}, "--num-minibatches must divide it"),
    "less than a rollout": ({"total_timesteps": 1}, "--total-timesteps must be at least"),
    "discrete actions": ({"env_id": "CartPole-v1"}, "Discrete(2)"),
    "unknown env": ({"env_id": "HalfCheeta-v4"}, "HalfCheetah"),
    "no worker": ({"num_workers": 0}, "--num-workers"),
    "a setting that the env lacks": ({"env_kwargs": '{"gravitation": 1}'}, "gravitation"),
}
REFUSED_GAMES = {
    "unknown game": ({"env_id": "Breakot-v5"}, "Breakout-v5"),
    "a negative lag": ({"lag": -1}, "--lag must lie between 0 and"),
    "a lag that is dropped": ({"first_come": True, "lag": 9}, "--lag must be at most --max-lag"),
}
for case in ("more workers than cores", "sizes that do not divide", "less than a rollout", "no worker"):
    REFUSED_GAMES[case] = REFUSED[case]
CASES = [(name, *case) for name in CONTINUOUS for case in REFUSED.items()]
CASES += [(name, *case) for name in ATARI for case in REFUSED_GAMES.items()]


@pytest.mark.parametrize(("name", "case", "refused"), CASES, ids=[f"{name}-{case}" for name, case, _ in CASES])
def test_bad_input_gets_one_sentence_and_exit_code_2(local, name, case, refused, capsys):
    args, word = refused
    script = load(name)
    with pytest.raises(SystemExit) as exit:
        script.train(script.Args(**tiny(name) | {"envs_per_worker": 4, "total_timesteps": 2**14} | args))
    message = capsys.readouterr().err.strip()
    assert exit.value.code == 2 and message.startswith("error: ") and word in message and "\n" not in message
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", RAY)
def test_ray_missing_gets_a_command(monkeypatch, name, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(SystemExit):
        train(monkeypatch, name, **tiny(name))
    assert "pip install ray==" in capsys.readouterr().err


@pytest.mark.parametrize("where", [{}, ON_LEARNER])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_an_env_that_raises_ends_the_run_with_its_error(monkeypatch, local, name, where):
    """It would come again, so no worker is replaced."""
    with pytest.raises(ZeroDivisionError, match="a defect of the env"):
        train(monkeypatch, name, **tiny(name) | ONE_WORKER | where | {"env_id": "RaisingEnv-v0"})
    assert not local.killed


@pytest.mark.parametrize("where", [{}, ON_LEARNER])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_settings_reach_the_envs_of_the_workers(monkeypatch, local, name, where):
    flags = {"env_id": "InvertedPendulum-v5", "num_steps": 32, "total_timesteps": 64}
    lengths = []
    for kwargs in ("{}", '{"max_episode_steps": 3}'):
        run = train(monkeypatch, name, **tiny(name) | flags | where | {"env_kwargs": kwargs})
        events = EventAccumulator(str(run.run_dir)).Reload()
        lengths.append({event.value for event in events.Scalars("charts/episodic_length")})
    assert max(lengths[0]) > 3 and lengths[1] == {3}


class DrawingEnv(ScriptedEnv):
    """Draws from all generators that it can reach when it is made, and in each step, and tells of it by its reward."""

    def __init__(self):
        self.drawn = self.draw()

    def draw(self) -> float:
        return random.random() + np.random.random() + torch.rand(()).item()  # noqa: NPY002

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, self.drawn + self.draw() + self.action_space.sample()[0], *rest


@pytest.mark.parametrize("where", [{}, ON_LEARNER])
def test_an_env_that_draws_from_global_generators_draws_the_same_in_every_run(monkeypatch, local, where):
    name = CONTINUOUS[0]
    gym.register("DrawingEnv-v0", DrawingEnv)
    try:
        flags = problem(name) | TWO_WORKERS | where | {"env_id": "DrawingEnv-v0"}
        whole = train_and_keep(monkeypatch, name, **flags)
        again = train(monkeypatch, name, **flags)
        resumed = train(monkeypatch, name, **flags, resume=whole.second)
        other = train(monkeypatch, name, **flags, seed=2)
    finally:
        gym.registry.pop("DrawingEnv-v0")
    assert same(whole, again) and same(whole, resumed)
    assert whole.metrics["episodic_return"] != other.metrics["episodic_return"]
    events = EventAccumulator(str(whole.run_dir)).Reload().Scalars("charts/episodic_return")
    assert len({event.value for event in events}) == len(events) > 10


@pytest.mark.parametrize(
    "name, where", [(CONTINUOUS[0], {}), (CONTINUOUS[0], ON_LEARNER), (ATARI[0], {}), (ATARI[1], {})]
)
def test_a_worker_that_dies_while_nobody_waits_is_counted(monkeypatch, local, name, where):
    """It is found out by the next call."""
    flags = tiny(name) | where
    local.lost[2 * flags["num_workers"] + 1] = local.ActorDiedError("killed")  # after a reset and a rollout, or a step
    run = train(monkeypatch, name, **flags)
    assert run.metrics["lost_workers"] == 1 and run.metrics["global_step"] == flags["total_timesteps"]


@pytest.mark.parametrize("name", RAY)
def test_the_policy_is_a_program(monkeypatch, local, name):
    run = train(monkeypatch, name, **tiny(name), save_model=True)
    policy = torch.export.load(run.run_dir / "policy.pt2").module()
    shape = (5, 4, 84, 84) if name in ATARI else (5, 3)
    assert len(policy(torch.zeros(shape, dtype=torch.uint8 if name in ATARI else torch.float32))) == 5


@pytest.mark.long
def test_compile_computes_the_same_in_whole_graphs_without_recompiling(monkeypatch, local, name=ATARI[1]):
    counters.clear()
    monkeypatch.setattr(load(name), "make_envs", ScriptedPool, raising=False)
    flags = tiny(name) | {"total_timesteps": 128 if name in ATARI else 1024}
    with torch._dynamo.config.patch(error_on_recompile=True):
        plain, compiled = (train(monkeypatch, name, **flags, compile=flag) for flag in (False, True))
    assert largest_difference(plain, compiled) < 2e-5
    assert counters["stats"]["unique_graphs"] == row(name).graphs and not counters["graph_break"]


# Ray itself, in processes of its own


SMALL = {"env_id": "Pendulum-v1", "num_workers": 2, "envs_per_worker": 1, "num_steps": 64, "num_minibatches": 2}
STARTED = []  # by start()


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    """Neither a run nor Ray's processes, whatever a test has found."""
    yield
    for process in STARTED:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    STARTED.clear()


def environment() -> dict[str, str]:
    """Nobody else may connect to what a test starts, and the other tests do not go before it."""
    alone = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    return os.environ | alone | {"PYTHONPATH": str(ROOT / "leanrl"), "OMP_NUM_THREADS": "1"}


def start(name: str, **flags) -> subprocess.Popen:
    """Without what environment() says about Ray: that is for the script to see to."""
    words = [str(word) for flag, value in flags.items() for word in ("--" + flag.replace("_", "-"), value)]
    command = [sys.executable, ROOT / "leanrl" / f"{name}.py", "--no-cuda", *words]
    env = environment()
    del env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], env["RAY_worker_niceness"]
    STARTED.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True))
    return STARTED[-1]


def summary(script: str) -> dict:
    [path] = Path("runs").glob(f"*__{script}__*/summary.json")
    return json.loads(path.read_text())


def descendants(driver: int) -> list[Path]:
    """The folders in /proc of all processes that this one has started, and those they have."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(path.name)] = int(re.search(r"PPid:\t(\d+)", (path / "status").read_text())[1])
    found, newest = set(), {driver}
    while newest := {pid for pid, parent in parents.items() if parent in newest} - found:
        found |= newest
    return [Path("/proc", str(pid)) for pid in sorted(found)]


def processes(name: str, driver: int) -> list[int]:
    """Of the workers that this process has started; Ray names each after its class."""
    found = []
    for path in descendants(driver):
        with suppress(OSError):
            if path.joinpath("cmdline").read_bytes().startswith(b"ray::" + name.encode()):
                found.append(int(path.name))
    return found


def addresses_that_listen(driver: int) -> set[str]:
    """As /proc writes them: of the sockets of this process and of all that it has started."""
    sockets = set()
    for path in [Path("/proc", str(driver)), *descendants(driver)]:
        with suppress(OSError):
            for link in (path / "fd").iterdir():
                with suppress(OSError):
                    sockets.add(os.readlink(link))
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path("/proc/net", kind).read_text().splitlines()[1:]]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUOUS[:1])
def test_on_ray_itself_a_run_computes_the_same(monkeypatch, name):
    one = {key: value for key, value in SMALL.items() if key not in ("num_workers", "envs_per_worker")}
    script = load(alone(name))
    torch.set_num_threads(1)  # as environment() says
    metrics = script.train(script.Args(**one, num_envs=2, total_timesteps=512, cuda=False, save_model=False))
    process = start(name, **SMALL | {"act_on": "learner", "total_timesteps": 512})
    errors = process.communicate(timeout=200)[1]
    assert process.returncode == 0, errors
    timed = {"SPS": None}
    assert summary(name)["metrics"] | timed == metrics | timed | {"lost_workers": 0}


SHORT = SMALL | {"update_epochs": 1, "worker_timeout": 4.0}
IN_TWO_GROUPS = {"act_on": "learner", "env_groups": 2, "envs_per_worker": 2}
KILLED = SHORT | IN_TWO_GROUPS | {"num_steps": 256, "total_timesteps": 12 * 1024}


@pytest.mark.long
@pytest.mark.slow
def test_on_ray_itself_a_run_survives_its_workers(name="ppo_continuous_action_ray"):
    """One that dies, and one that hangs."""
    process = start(name, **KILLED)
    have_worked = set()  # one that hangs while it starts would not be counted
    for number in (signal.SIGKILL, signal.SIGSTOP):
        while len(workers := [x for x in processes("Simulators", process.pid) if x in have_worked]) < 2:
            assert process.poll() is None, process.stderr.read()
            have_worked.update(processes("Simulators.rollout", process.pid))  # Ray writes the method behind the class
        os.kill(workers[-1], number)
        time.sleep(1)  # a process that is killed is there for a moment
        have_worked.remove(workers[-1])
    errors = process.communicate(timeout=200)[1]
    assert process.returncode == 0, errors
    metrics = summary(name)["metrics"]
    assert metrics["lost_workers"] == errors.count("warning: worker") >= 2
    assert metrics["global_step"] == KILLED["total_timesteps"]


ON_RAY = """
import json, sys
import {name} as script
metrics = script.train(script.Args(cuda=False, save_model=False, **json.loads(sys.argv[1])))
from ray._private.internal_api import memory_summary
address = sys.modules["ray"].get_runtime_context().gcs_address  # others may have started a cluster meanwhile
print(json.dumps([metrics, memory_summary(address, stats_only=True)]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_on_ray_itself_a_lag_gives_the_same_bits_and_no_rollout_is_kept(monkeypatch, local):
    """As with calls in one process; and whoever imports the script may train with it."""
    name = ATARI[0]
    flags = tiny(name) | {"num_workers": 2, "envs_per_worker": 2, "num_steps": 32, "update_epochs": 1}
    flags |= {"num_minibatches": 1, "total_timesteps": 12 * 128}
    script = load(name)
    torch.set_num_threads(1)  # as environment() says
    here = script.train(script.Args(**flags, cuda=False, save_model=False))
    command = [sys.executable, "-c", ON_RAY.format(name=name), json.dumps(flags)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment())
    assert process.returncode == 0, process.stderr
    metrics, memory = json.loads(process.stdout.splitlines()[-1])
    timed = dict.fromkeys(("SPS", "share_waited"))
    assert metrics | timed == here | timed
    [objects] = re.findall(r"Plasma memory usage \d+ MiB, (\d+) objects", memory)
    assert int(objects) < 25  # of more than 40 rollouts and policies


@pytest.mark.slow
def test_ctrl_c_ends_a_run_on_ray_in_order(name="ppo_atari_ray"):
    """It saves, says how to go on, and leaves no process behind. Nobody else may connect, or goes before a worker.

    Nothing is reported to Ray's makers. A terminal sends Ctrl-C to Ray's processes, too.
    """
    process = start(name, env_id="Breakout-v5", num_steps=16, num_workers=2, envs_per_worker=1)
    while len(workers := processes("Players", process.pid)) < 2 or not list(Path("runs").glob("*/events*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    time.sleep(2)
    listening = addresses_that_listen(process.pid)
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}  # of IPv4 and 6
    assert listening and listening <= loopback
    [store] = [path for path in descendants(process.pid) if b"gcs_server" in path.joinpath("cmdline").read_bytes()]
    assert b"RAY_USAGE_STATS_ENABLED=0" in store.joinpath("environ").read_bytes().split(b"\0")
    assert {os.getpriority(os.PRIO_PROCESS, worker) for worker in workers} == {os.getpriority(os.PRIO_PROCESS, 0)}
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=100)[1]
    assert process.returncode == 128 + signal.SIGINT and "to go on, add --resume auto" in errors, errors
    assert "was lost" not in errors
    [run_dir] = Path("runs").iterdir()
    assert {"checkpoint.pt", "policy.pt2", "summary.json"} <= {path.name for path in run_dir.iterdir()}
    deadline = time.monotonic() + 20
    while any(Path("/proc", str(worker)).exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.2)


MACHINES = """
import json, sys, threading, time
from ray.cluster_utils import Cluster
import {name} as script
store = {{"object_store_memory": 100 * 2**20, "include_dashboard": False}}
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 0}} | store)
machines = [cluster.add_node(num_cpus=1, **store) for _ in range(2)]
report, reports = script.report, []

def lose_a_machine(*args):
    reports.append(args)
    if len(reports) == 5:
        cluster.remove_node(machines[0], allow_graceful=False)
        cluster.add_node(num_cpus=1, **store)
    return report(*args)

script.report = lose_a_machine
metrics = script.train(script.Args(cuda=False, ray_address=cluster.address, **json.loads(sys.argv[1])))
print(json.dumps(metrics), flush=True)
script.sys.modules["ray"].shutdown()
cluster.shutdown()
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_run_survives_a_machine(name="ppo_atari_ray"):
    """Of three of Ray's nodes on this one, of which one vanishes with its worker and its results; a new one comes."""
    flags = {"num_workers": 2, "envs_per_worker": 1, "num_minibatches": 2, "save_model": False, "worker_timeout": 20.0}
    flags |= {"env_id": "Breakout-v5" if name in ATARI else "Pendulum-v1", "num_steps": 16, "total_timesteps": 16 * 20}
    command = [sys.executable, "-c", MACHINES.format(name=name), json.dumps(flags)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment())
    assert process.returncode == 0, process.stderr
    [line] = [line for line in process.stdout.splitlines() if line.startswith("{")]
    metrics = json.loads(line)
    assert metrics["global_step"] == 16 * 20 and metrics["lost_workers"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RAY)
def test_a_worker_says_why_it_cannot_make_the_env(monkeypatch, name):
    """And does not exit, of which Ray would not tell the reason."""
    script = load(name)
    cls = next(value for key, value in vars(script).items() if key == "Simulators" or key.endswith("Players"))
    flags = {"env_id": "nowhere:X-v0"} if name in CONTINUOUS else {}
    monkeypatch.setitem(sys.modules, "envpool", None)
    word = "No module named 'nowhere'" if name in CONTINUOUS else "import of envpool halted"
    with pytest.raises(RuntimeError, match=f"no .* there: {word}"):
        cls(script.Args(**flags)).reset(0, 0)
    if name in CONTINUOUS:
        with pytest.raises(RuntimeError, match="no CartPole-v1 there: wrong spaces"):
            cls(script.Args(env_id="CartPole-v1")).reset(0, 0)


def test_a_ray_that_does_not_start_gets_a_sentence(monkeypatch, capsys):
    def init(*args, **kwargs):
        raise OSError("no space left on the device")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, is_initialized=lambda: False))
    with pytest.raises(SystemExit):
        train(monkeypatch, "ppo_atari_ray", **tiny("ppo_atari_ray"))
    assert "error: cannot start or join Ray on this machine: no space left on the device\n" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["nowhere", "auto"])
def test_a_cluster_that_is_not_there_gets_a_sentence(monkeypatch, address):
    """So does one that has ended, where Ray looks for it. An address that is named counts more than Ray's variable."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = 9 if address == "auto" else server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        process = start("ppo_atari_ray", ray_address=address)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and f"error: cannot start or join Ray on {address}: [Errno" in errors, errors


@pytest.mark.long
def test_an_asynchronous_run_learns(monkeypatch, local, quadrants, name="ppo_atari_ray_torchcompile"):
    """A game pays 20 at most, and 5 with random actions."""
    flags = {"env_id": "Breakout-v5", "num_workers": 2, "envs_per_worker": 4, "num_steps": 64}
    run = train(monkeypatch, name, **flags, total_timesteps=8192, learning_rate=5e-4)
    events = EventAccumulator(str(run.run_dir)).Reload().Scalars("charts/episodic_return")
    assert np.mean([event.value for event in events[:8]]) < 8
    assert np.mean([event.value for event in events[-30:]]) > 12
