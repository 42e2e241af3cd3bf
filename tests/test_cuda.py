"""What only a GPU can prove about graphs and compilation; each test runs on the CPU too, where it proves less."""

import inspect
import socket
import traceback
import warnings

import numpy as np
import pytest
import torch
from conftest import ATARI, DEVICE, OFF_POLICY, SLICED, TWINS, ScriptedEnv, ScriptedPool, load, tiny, train

CUDA = pytest.mark.cuda
MODES = {"twin": {}, "cudagraphs": {"cudagraphs": True}, "compile+cudagraphs": {"compile": True, "cudagraphs": True}}
MODES_HERE = [("cpu", "twin"), ("cpu", "compile+cudagraphs")]  # on a CPU "cudagraphs" is what "twin" is
MODES_HERE += [pytest.param("cuda", mode, marks=CUDA) for mode in MODES]
NOT_COMPILED_HERE = [here for here in MODES_HERE if here != ("cpu", "compile+cudagraphs")]
FLAGS = [{"env_groups": 2}, {"bf16": True}]  # of the twin that plays Atari
TWIN = "ppo_continuous_action_torchcompile"
OFF_POLICY_TWINS = [twin for _, twin in TWINS if twin in OFF_POLICY]


def rewrite_sample(monkeypatch, name: str, old: str, new: str):
    """Puts new code in the place of old in how a batch is drawn, also where it is compiled."""
    script = load(name)
    function = "sample_slices" if name in SLICED else "sample"
    source, namespace = inspect.getsource(getattr(script, function)), dict(vars(script))
    assert source.count(old) == 1
    exec(source.replace(old, new), namespace)
    monkeypatch.setattr(script, function, namespace[function])


def without_chance(monkeypatch, name: str):
    """What a graph draws depends on how it was captured: make noise a pattern, and rows follow from the step."""
    old = "torch.rand(3, batch_size, dtype=torch.float64, device=ring.device)"
    new = "((newest * 7919 + torch.arange(3 * batch_size, device=ring.device) * 104729) % 1021 / 1021.0).view(3, -1)"
    if name in SLICED:
        old = "torch.rand(args.batch_size, dtype=torch.float64, device=ring.device)"
        new = "(newest * 7919 + torch.arange(args.batch_size, device=ring.device) * 104729) % 1021 / 1021.0"
    rewrite_sample(monkeypatch, name, old, new)
    monkeypatch.setattr(torch, "randn_like", lambda x: torch.linspace(-2, 2, x.numel(), device=x.device).view_as(x))


def frozen(name: str) -> dict:
    """Flags with which nothing is learned."""
    return {"policy_lr": 0.0, "q_lr": 0.0} if "sac" in name else {"learning_rate": 0.0}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return sum((a[name] - b[name].reshape_as(a[name])).square().sum().item() for name in a) ** 0.5


@pytest.mark.cuda  # test_twins.py and test_checkpoints.py compare what runs on a CPU, more closely
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("eager", "twin", "flags"), [(*pair, {}) for pair in TWINS] + [(*ATARI, f) for f in FLAGS])
def test_every_mode_learns_the_same(monkeypatch, eager, twin, flags, mode):
    """Graphs are captured in the first updates, so stale weights, rates or batches would show in the next dozens."""
    problem, flags = tiny(eager), flags | MODES[mode]
    if eager in OFF_POLICY and "compile" in mode:  # the other modes: one env, and SAC with a temperature that learns
        problem = problem | {"num_envs": 2} | ({"autotune": False} if "sac" in eager else {})
    with monkeypatch.context() as patch:
        if eager in OFF_POLICY:
            without_chance(patch, eager), without_chance(patch, twin)
        if eager in ATARI:  # frames that do not depend on the action: a tie broken otherwise must not change them
            patch.setattr(load(eager), "make_envs", ScriptedPool), patch.setattr(load(twin), "make_envs", ScriptedPool)
        a = train(patch, eager, **problem, cuda=True)
        b = train(patch, twin, **problem, **flags, cuda=True)
        still = train(patch, eager, **problem | frozen(eager), cuda=True)
    moved = distance(a.parameters, still.parameters)
    # Off-policy, Adam's tiny eps makes a step of any rounding where gradients vanish: a tenth for SAC on a CPU. A third
    # with bf16; the opposite of a step would give 2.
    bound = 0.6 if "bf16" in flags else 0.25 if eager in OFF_POLICY else 0.05
    assert moved > 0 and distance(a.parameters, b.parameters) < bound * moved
    for name in a.metrics.keys() - {"SPS"}:
        assert a.metrics[name] == pytest.approx(b.metrics[name], rel=0.05, abs=0.01), name


def check_spread(actions: np.ndarray, low: float, high: float):
    """That (64, 2) actions of a policy that never learns differ, and their deviations lie between low and high."""
    assert len(np.unique(actions, axis=0)) > 60  # two may lie at the same corner of the bounds
    assert ((actions.std(0) > low) & (actions.std(0) < high)).all()
    assert abs(np.corrcoef(actions[1:, 0], actions[:-1, 0])[0, 1]) < 0.4  # no step repeats the noise of the one before


@pytest.mark.parametrize(("device", "mode"), NOT_COMPILED_HERE)
@pytest.mark.parametrize("twin", OFF_POLICY_TWINS)
def test_64_updates_draw_64_batches_and_64_steps_64_actions(monkeypatch, twin, mode, device):
    """Losses and actions differ by what was drawn alone, SAC's losses by noise too.

    For networks never change, the ring is full, and all that is seen of a row is which it is.
    """
    script, losses = load(twin), []
    old = "split_row(ring[t % rows, i], obs_dim)\n"
    new = "obs, next_obs, action, reward = 0 * obs, 0 * next_obs, 0 * action, draw.float()"
    new = f"{old}    {new}\n    terminated, valid = draw * 0.0, draw * 0.0 + 1\n"
    if twin in SLICED:
        old = "    return ring[t % num_rows, i], states[start % len(states), i]\n"
        new = "    slices, values = 0 * ring[t % num_rows, i], 0 * states[start % len(states), i]\n"
        new += "    slices[..., -3] = draws\n    slices[..., -1] = 1\n    return slices, values\n"
    rewrite_sample(monkeypatch, twin, old, new)
    original = script.report

    def report(values, *rest):
        if values:  # learning has begun
            losses.append(values["td_loss" if "dqn" in twin else "qf_loss"].item())
        return original(values, *rest)

    monkeypatch.setattr(script, "report", report)
    monkeypatch.setattr(script, "REPORT_INTERVAL", 1)
    problem = tiny(twin) | frozen(twin) | {"buffer_size": 80, "learning_starts": 100}
    problem |= {"total_timesteps": 900} if "dqn" in twin else {"total_timesteps": 260, "env_id": "IdleEnv-v0"}
    problem |= {"policy_noise": 0.0} if "td3" in twin else {}
    ScriptedEnv.actions.clear()
    train(monkeypatch, twin, **problem, **MODES[mode], cuda=device == "cuda")
    updates = 1 + np.count_nonzero(np.diff(losses))
    assert updates >= 64 and len(np.unique(losses)) > 0.95 * updates
    if "dqn" not in twin:
        actions = np.array(ScriptedEnv.actions)[-64:] / [0.3, 2.5]  # half of each range
        check_spread(actions, *((0.07, 0.13) if "td3" in twin else (0.1, 0.5)))


@pytest.mark.parametrize(("device", "mode"), NOT_COMPILED_HERE)
def test_64_steps_of_ppos_policy_give_64_actions_of_unit_deviation(monkeypatch, mode, device):
    ScriptedEnv.actions.clear()
    monkeypatch.setattr(ScriptedEnv, "action_space", type(ScriptedEnv.action_space)(-np.inf, np.inf, (2,)))
    problem = {"env_id": "ScriptedEnv-v0", "num_steps": 128, "num_minibatches": 4, "total_timesteps": 128}
    train(monkeypatch, TWIN, **problem, learning_rate=0.0, **MODES[mode], cuda=device == "cuda")
    check_spread(np.array(ScriptedEnv.actions)[-64:], 0.75, 1.3)


@pytest.mark.parametrize(("device", "mode"), NOT_COMPILED_HERE)
def test_64_steps_of_an_even_policy_give_all_actions(monkeypatch, mode, device):
    """A policy that has learned nothing, on Atari's frames: four actions, about as likely, none of them a habit."""
    monkeypatch.setattr(load(ATARI[1]), "make_envs", ScriptedPool)
    ScriptedPool.actions.clear()
    problem = {"num_envs": 2, "total_timesteps": 512, "learning_rate": 0.0}
    train(monkeypatch, ATARI[1], **problem, **MODES[mode], cuda=device == "cuda")
    actions = np.array(ScriptedPool.actions)[-64:]
    counts = np.bincount(actions.ravel(), minlength=4)
    assert counts.sum() == 128 and counts.min() > 15 and counts.max() < 50
    assert (actions[1:] == actions[:-1]).mean() < 0.4


def train_one_rank(monkeypatch, device: str, **flags) -> dict[str, torch.Tensor]:
    """Final parameters of a world of one rank, on scripted games without chance: greedy actions, rows in order."""
    script, agents = load("ppo_atari_multigpu"), []

    class SpiedAgent(script.AtariAgent):
        def __init__(self, *args):
            super().__init__(*args)
            agents.append(self)

    with socket.socket() as listener, monkeypatch.context() as patch:
        listener.bind(("127.0.0.1", 0))
        rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": listener.getsockname()[1]}
        for name, value in (rank | {"MASTER_ADDR": "127.0.0.1"}).items():
            patch.setenv(name, str(value))
        listener.close()
        patch.setattr(script, "AtariAgent", SpiedAgent)
        patch.setattr(script, "make_envs", ScriptedPool)
        patch.setattr(torch.Tensor, "exponential_", lambda self: self.fill_(1.0))
        patch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n, device=device))
        sizes = {"local_num_envs": 2, "num_steps": 16, "num_minibatches": 2, "total_timesteps": 320, "timeout": 60.0}
        script.train(script.Args(**sizes, cuda=device == "cuda", save_model=False, **flags))
    return {name: p.detach().clone() for name, p in agents[0].named_parameters()}


@pytest.mark.parametrize(
    ("device", "flags"),
    [
        ("cpu", {"ddp": False}),
        pytest.param("cuda", {"ddp": False}, marks=CUDA),
        pytest.param("cuda", {"cudagraphs": True}, marks=CUDA),
        pytest.param("cuda", {"compile": True, "cudagraphs": True}, marks=CUDA),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it, and shows no user
def test_ranks_learn_the_same_with_and_without_ddp_and_graphs(monkeypatch, device, flags):
    """Ten rollouts of eight updates: the graphs are captured in the first of them."""
    reference, parameters = (train_one_rank(monkeypatch, device, **f) for f in ({}, flags))
    moved = distance(reference, train_one_rank(monkeypatch, device, learning_rate=0.0))
    assert moved > 0 and distance(reference, parameters) < 0.02 * moved


@pytest.mark.parametrize(("device", "mode"), NOT_COMPILED_HERE)
@pytest.mark.parametrize("twin", [twin for twin in OFF_POLICY_TWINS if twin not in SLICED])  # they copy row by row
def test_a_training_step_waits_for_nothing_but_the_action(monkeypatch, twin, mode, device):
    """From the first updates to a report, an operation that synchronises with the GPU is an error, but for the wait."""
    script, steps, waits = load(twin), [], []

    class Event(torch.cuda.Event):
        def synchronize(self):
            waits.append(len(steps))
            super().synchronize()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    original = script.step_envs

    def step_envs(*args):
        steps.append(1)
        if device == "cuda" and len(steps) in (950, 990):  # the capture is over by 950, the next report is at 1000
            torch.cuda.set_sync_debug_mode("error" if len(steps) == 950 else "default")
        return original(*args)

    monkeypatch.setattr(script, "step_envs", step_envs)
    problem = tiny(twin) | {"learning_starts": 700}
    try:
        run = train(monkeypatch, twin, **problem, **MODES[mode], cuda=device == "cuda")
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == run.metrics["global_step"] == 1024
    if device == "cuda":  # DQN waits once an update
        assert len([step for step in waits if 950 <= step < 990]) == (4 if "dqn" in twin else 40)


@pytest.mark.parametrize(("device", "mode"), NOT_COMPILED_HERE)
@pytest.mark.parametrize("twin", [ATARI[1], TWIN])
def test_ppo_waits_for_the_gpu_at_known_lines_only(monkeypatch, twin, mode, device):
    """For the action of each step; and, once a rollout, as it sends the rollout and reads what it reports."""
    script, reports, waits = load(twin), [], []
    if twin in ATARI:
        monkeypatch.setattr(script, "make_envs", ScriptedPool)
    original = script.report

    def showwarning(message, *_):
        if "called a synchronizing" in str(message):  # perhaps in a function of torch: the script's line counts
            frames = traceback.extract_stack()
            waits.append(next(frame.line for frame in reversed(frames) if frame.filename == script.__file__))

    def report(*args):
        reports.append(1)
        if device == "cuda":  # the capture is over by the fourth iteration
            torch.cuda.set_sync_debug_mode("warn" if 3 <= len(reports) < 5 else "default")
        return original(*args)

    monkeypatch.setattr(script, "report", report)
    problem = tiny(twin) | {"total_timesteps": 6 * 256}
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", showwarning)
        try:
            train(monkeypatch, twin, **problem, **MODES[mode], cuda=device == "cuda")
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert len(reports) == 6
    known = ("get_device_module(device).synchronize()", "torch.as_tensor(env_buffer", ".tolist()")
    known += () if twin in ATARI else (".cpu().numpy()", "torch.as_tensor(obs_buffer", "torch.as_tensor(action_buffer")
    assert all(any(part in line for part in known) for line in waits), set(waits)
    assert bool(waits) == (device == "cuda")


@pytest.mark.parametrize(("device", "mode"), NOT_COMPILED_HERE)
@pytest.mark.parametrize("twin", [ATARI[1], TWIN, *OFF_POLICY_TWINS])
def test_a_replay_leaves_the_outputs_of_the_one_before_alone(monkeypatch, twin, mode, device):
    """The losses that each report was given are, at the end of the run, what they were then."""
    script, kept = load(twin), []
    if twin in ATARI:
        monkeypatch.setattr(script, "make_envs", ScriptedPool)
    original = script.report

    def report(losses, *rest):
        if losses:  # learning has begun
            kept.append((dict(losses), {name: loss.clone() for name, loss in losses.items()}))
        return original(losses, *rest)

    monkeypatch.setattr(script, "report", report)
    monkeypatch.setattr(script, "REPORT_INTERVAL", 10, raising=False)
    train(
        monkeypatch,
        twin,
        **tiny(twin) | {"total_timesteps": 2048 if twin in (*ATARI, TWIN) else 1024},
        **MODES[mode],
        cuda=device == "cuda",
    )
    assert len(kept) >= 8
    assert all(torch.equal(losses[name], copy[name]) for losses, copy in kept for name in copy)
    assert len({float(next(iter(copy.values()))) for _, copy in kept}) >= 8


@CUDA
@pytest.mark.parametrize("flags", [{"cudagraphs": True}, {"compile": True, "cudagraphs": True}])
@pytest.mark.parametrize("twin", [twin for _, twin in TWINS if twin in DEVICE])
def test_an_iteration_on_the_device_neither_waits_nor_copies_to_the_host(monkeypatch, twin, flags):
    """Of the graph that holds it; test_device_env.py proves the same of the functions in it, on any machine."""
    script, copies, kernels = load(twin), [], []

    class Watched(script.CudaGraphModule):
        calls = 0

        def __call__(self, *args):
            self.calls += 1
            if self.calls < 6:  # not captured yet
                return super().__call__(*args)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    result = super().__call__(*args)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            copies.append([event.key for event in profile.key_averages() if "Memcpy" in event.key])
            kernels.append(sum(event.count for event in profile.key_averages()) - len(copies[-1]))
            return result

    monkeypatch.setattr(script, "CudaGraphModule", Watched)
    train(monkeypatch, twin, **tiny(twin) | {"total_timesteps": 2048}, **flags, cuda=True)
    assert kernels and min(kernels) > 10  # the profile saw the graph
    assert not [key for keys in copies for key in keys if "HtoD" in key or "DtoH" in key]
