"""CUDA graphs, proven on a CPU: under an emulated GPU that is always late, every twin computes the same bits.

What the emulation sees is tested with faults planted into the scripts: each of them must change the numbers, or raise.
"""

import sys
import types
from pathlib import Path

import local_ray
import pytest
import torch
from capture_emulation import Gpu, emulated_gpu
from catalog import row
from conftest import FAST_TD3, OFF_POLICY, RAY, TWINS, ScriptedPool, Springs, load, tiny

SHORT = {"total_timesteps": 150, "learning_starts": 100, "batch_size": 16, "buffer_size": 80}
SHORT |= {"learning_rate": 1e-2, "policy_lr": 1e-2, "q_lr": 1e-2, "target_network_frequency": 3}

SHORT_TD3 = {"total_timesteps": 320, "learning_starts": 100, "batch_size": 16, "buffer_size": 40, "learning_rate": 1e-2}


def problem_of(name: str) -> dict:
    """A run of seconds that replays each graph dozens of times."""
    script = load(name)
    if name in OFF_POLICY:
        problem = tiny(name) | {flag: value for flag, value in SHORT.items() if hasattr(script.Args, flag)}
        return problem | ({"total_timesteps": 500} if "dqn" in name else {})
    if name in FAST_TD3:
        return tiny(name) | SHORT_TD3
    problem = tiny(name) | {"num_steps": 16} | ({"num_minibatches": 2} if "ppo" in name else {})
    return problem | {"total_timesteps": 16 * 8 * problem.get("num_envs", problem.get("envs_per_worker", 1))}


def trained(monkeypatch, script: types.ModuleType, schedule: str | None, **flags):
    """The policy's final parameters, and the launches and waits up to each report; no schedule: on the CPU itself."""
    policies = []
    network = getattr(script, row(script.__name__).policy)
    make = network.__init__

    def spied(self, *dims):
        make(self, *dims)
        policies.append(self)

    problem = problem_of(script.__name__) | flags | {"save_model": False}
    args = script.Args(**problem, cuda=schedule is not None)
    reports = []  # env steps, launches and waits so far

    def report(losses, parameters, last_returns, global_step, *rest):
        if schedule:
            reports.append((global_step, Gpu.active.launches.total(), Gpu.active.syncs.total()))
        return original(losses, parameters, last_returns, global_step, *rest)

    with monkeypatch.context() as patch:
        original = script.report
        patch.setattr(network, "__init__", spied)
        patch.setattr(script, "report", report)
        patch.setattr(script, "REPORT_INTERVAL", 10, raising=False)
        patch.setattr(script, "REPORT_EVERY", 1, raising=False)
        patch.setitem(sys.modules, "ray", local_ray)
        if hasattr(script, "make_envs"):
            patch.setattr(script, "make_envs", ScriptedPool)
        if hasattr(script, "WarpPhysics"):  # which needs a true GPU
            patch.setattr(script, "WarpPhysics", Springs)
            patch.setattr(script, "physics_operator", lambda physics: physics.step)
        if schedule is None:
            script.train(args)
        else:
            with emulated_gpu(schedule):
                script.train(args)
    parameters = [(p.numbers if p.is_cuda else p).detach().clone().flatten() for p in policies[0].parameters()]
    return parameters, reports


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


CASES = [  # twin, flags, launches and waits per env step at most; a replay counts once, also if it draws
    ("dqn_torchcompile", {}, 0.95, 0.2),
    ("td3_continuous_action_torchcompile", {}, 3.3, 1.1),
    ("sac_continuous_action_torchcompile", {}, 3.3, 1.1),
    ("ppo_continuous_action_torchcompile", {}, 6.3, 0.7),
    ("ppo_torchcompile", {}, 3.1, 0.4),
    ("dqn_lru_torchcompile", {}, 3.4, 2.4),
    ("ppo_device_env_torchcompile", {}, 0.7, 0.15),  # most launches and all waits are those of a report
    ("a2c_device_env_torchcompile", {}, 0.6, 0.15),
    ("pqn_device_env_torchcompile", {}, 0.35, 0.15),
    ("ppo_mujoco_torchcompile", {"physics": "warp"}, 0.7, 0.15),
    ("ppo_mujoco_torchcompile", {"physics": "warp", "cut_graph": True}, 2.95, 0.15),  # and those of the springs
    ("td3_mujoco_torchcompile", {"physics": "warp"}, 3.8, 1.8),
    ("ppo_lru_torchcompile", {}, 2.0, 0.75),
    ("ppo_rnn_torchcompile", {"cell": "lstm"}, 1.9, 0.6),
    ("ppo_atari_envpool_torchcompile", {}, 3.65, 0.63),
    ("ppo_atari_envpool_torchcompile", {"env_groups": 2}, 4.2, 1.13),
    ("ppo_continuous_action_ray_torchcompile", {}, 7.1, 0.7),
    ("ppo_continuous_action_ray_torchcompile", {"act_on": "learner"}, 7.1, 0.7),
    ("ppo_atari_ray_torchcompile", {}, 5.6, 0.6),
]
CUT = pytest.param("td3_mujoco_torchcompile", {"physics": "warp", "cut_graph": True}, 5.8, 1.8, marks=pytest.mark.long)
RAY_TWINS = {name for name in RAY if name.endswith("_torchcompile")}
assert {twin for twin, *_ in CASES} == {twin for _, twin in TWINS} | RAY_TWINS


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("twin", "flags", "max_launches", "max_waits"), [*CASES, CUT])
def test_a_late_gpu_with_graphs_computes_the_same_bits(monkeypatch, twin, flags, max_launches, max_waits):
    script = load(twin)
    at_once, _ = trained(monkeypatch, script, None, **flags)
    late, reports = trained(monkeypatch, script, "late", cudagraphs=True, **flags)
    assert equal(at_once, late)
    (start, launches, waits), (end, more_launches, more_waits) = reports[-3], reports[-1]
    assert max_launches - 0.1 < (more_launches - launches) / (end - start) <= max_launches  # lower it where it fell
    assert max_waits - 0.1 < (more_waits - waits) / (end - start) <= max_waits


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_late_gpu_with_graphs_computes_the_same_bits_as_a_rank(monkeypatch):
    """A world of one rank, which has nobody to talk to."""
    script = load("ppo_atari_multigpu")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    alone = {"init_process_group": lambda *_, **__: None, "destroy_process_group": lambda: None}
    alone |= {"rendezvous": lambda *_, **__: iter([(None, 0, 1)]), "PrefixStore": lambda *_: None}
    alone |= {"get_world_size": lambda: 1, "get_backend": lambda: "none", "broadcast": lambda *_, **__: None}
    alone |= {
        "all_reduce": lambda x: None,
        "all_gather_object": lambda all_of_them, own: all_of_them.__setitem__(0, own),
    }
    for name, function in alone.items():
        monkeypatch.setattr(script.dist, name, function)
    monkeypatch.setattr(script, "make_envs", ScriptedPool)
    runs = []
    for schedule, cudagraphs in (("now", False), ("late", True)):
        agents = []

        class Spied(load("ppo_atari_envpool").AtariAgent):
            def __init__(self, *dims, agents=agents):
                super().__init__(*dims)
                agents.append(self)

        sizes = {"local_num_envs": 2, "num_steps": 16, "num_minibatches": 2, "total_timesteps": 16 * 2 * 5}
        with monkeypatch.context() as patch, emulated_gpu(schedule) as gpu:
            patch.setattr(script, "AtariAgent", Spied)
            script.train(script.Args(**sizes, ddp=False, cudagraphs=cudagraphs, save_model=False))
        runs.append([p.numbers.clone() for p in agents[0].parameters()])
    assert equal(*runs) and gpu.replays > 20


FAULTS = {  # what goes wrong -> twin, its lines, what stands there instead
    "no wait for the action": ("td3_continuous_action_torchcompile", "        acted.synchronize()", "        pass"),
    "no wait for the weights that act on the host": (
        "dqn_torchcompile",
        "            updated.synchronize()",
        "            pass",
    ),
    "a wait that comes too early": (
        "td3_continuous_action_torchcompile",
        "        acted.record()\n",
        "        acted.record()\n        acted = torch.cuda.Event()\n",
    ),
    "rows overwritten before they are copied": (
        "dqn_torchcompile",
        "        host_rows[step % num_rows] = host_row\n",
        "        host_rows[(step + 1) % num_rows] = host_row\n",
    ),
    "a learning rate that is replaced": (
        "ppo_continuous_action_torchcompile",
        '        state["lr"].fill_(learning_rate)',
        '        state["lr"] = torch.full((), learning_rate, device=device)',
    ),
    "a batch that is replaced": (
        "ppo_continuous_action_torchcompile",
        "            batch.setdefault(name, x.flatten(0, 1)).copy_(x.flatten(0, 1))",
        "            batch[name] = x.flatten(0, 1)",
    ),
    "a number of the host, frozen in": (
        "td3_continuous_action_torchcompile",
        "sample(ring, newest,",
        "sample(ring, step,",
    ),
    "a step counted on the host": ("dqn_torchcompile", "    newest.add_(len(rows))", "    newest = newest + len(rows)"),
    "a read by the host in a graph": (
        "dqn_torchcompile",
        '    return {"td_loss": loss.detach()',
        '    loss.item()\n    return {"td_loss": loss.detach()',
    ),
    "memory that is not pinned": (
        "td3_continuous_action_torchcompile",
        "    host_action = torch.zeros(N, action_dim, pin_memory=on_gpu)",
        "    host_action = torch.zeros(N, action_dim)",
    ),
    "a shape that depends on numbers": (
        "dqn_torchcompile",
        "    target = td_target(",
        "    batch['reward'][batch['reward'] > 0].sum()\n    target = td_target(",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_sees_a_planted_fault(monkeypatch, fault):
    twin, old, new = FAULTS[fault]
    right, _ = trained(monkeypatch, load(twin), None)
    path = Path(load(twin).__file__)
    source = path.read_text()
    assert source.count(old) == 1
    script = types.ModuleType(twin)
    script.__file__ = str(path)
    monkeypatch.setitem(sys.modules, twin, script)  # where dataclasses look
    exec(compile(source.replace(old, new), path, "exec"), vars(script))
    try:
        wrong, _ = trained(monkeypatch, script, "late", cudagraphs=True)
    except (RuntimeError, SystemExit):
        return
    assert not equal(right, wrong)
