"""The benchmark measures what it says, and the documents show what it measured."""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import ablate
import compare
import gymnasium as gym
import local_ray
import measure
import numpy as np
import peers
import phases
import plot
import probes
import purejaxql_peer
import pytest
import results
import returns
import runs
import tables
import torch
import torch.distributed as dist
import tyro
from catalog import CATALOG, RANKS, TWIN
from conftest import FAST_TD3, FILES, ROOT, SCRIPTS, ScriptedPool, load
from runs import Run
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

RESULT = {"rates": [1.0, 1.0], "startup_seconds": 0.0}
HERE = {"cpu": "a CPU", "gpu": None, "gpus": 0, "cores": 2, "torch": "2", "date": "today", "commit": "1"}


class Ended(Exception):
    """Ends a run where the test has seen enough."""


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """compare.py without its processes: the runs that it starts, and the rows of the table that it keeps."""
    started = []

    def take_turns(*turn, progress=None):
        started.extend(turn)
        return [dict(RESULT) for _ in turn]

    def call(script: str, **flags) -> list[dict]:
        started.clear()
        compare.main(compare.Args((script,), **({"pairs": 1, "out": tmp_path} | flags)))
        return json.loads((tmp_path / "speed.json").read_text())[-1]["rows"]

    monkeypatch.setattr(compare, "take_turns", take_turns)
    monkeypatch.setattr(runs, "take_turns", take_turns)  # of trials of threads
    return SimpleNamespace(call=call, started=started)


# ---------- what exists ----------


def test_modules_import_in_one_direction():
    imports = {}
    for path in (ROOT / "benchmark").glob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes}
        imports[path.stem] = names & {other.stem for other in (ROOT / "benchmark").glob("*.py")}
    while imports:
        ends = {name for name, needed in imports.items() if not needed & imports.keys()}
        assert ends, f"a circle: {imports}"
        imports = {name: needed for name, needed in imports.items() if name not in ends}


def test_the_catalog_has_a_row_for_each_script():
    assert {f"{name}{suffix}" for name, entry in CATALOG.items() for suffix, _ in entry.modes.values()} == set(FILES)


def test_scripts_have_what_the_benchmark_relies_on():
    """And the page lists it."""
    page = (ROOT / "benchmark" / "notebook.md").read_text()
    section = page[page.index("## What the benchmark needs of a script") :].split("\n## ")[0]
    needed = ["Args", "train", "report", "episodic_return", "# act", "# learn", "# step and store", "# report"]
    needed += ["CudaGraphModule", "DistributedDataParallel", "--local-num-envs", "REPORT_INTERVAL", "dist.all_reduce"]
    assert all(re.search(rf"`{name}[`(]", section) for name in [*needed, "summary.json", "charts/episodic_return"])
    for name in FILES:
        script, text = load(name), (ROOT / "leanrl" / f"{name}.py").read_text()
        parameters = list(inspect.signature(script.report).parameters)
        assert parameters[0] == "losses" and parameters[-4:] == ["global_step", "clock", "writer", "progress"], name
        assert "charts/episodic_return" in text and "summary.json" in text
        replays = "learning_starts" in vars(script.Args) and name not in FAST_TD3
        assert hasattr(script, "REPORT_INTERVAL") == replays
        assert ("multigpu" in name) == ("DistributedDataParallel" in text) == ("local_num_envs" in text)
        assert ("multigpu" in name) == ("dist.all_reduce(" in text) == ("dist.all_gather_object(" in text)
        if name.endswith(TWIN):
            captured = ", ".join(re.findall(r"\n *([\w, ]+) = \(?CudaGraphModule\(", text))
            assert set(captured.split(", ")) & {"update", "update_with_actor", "update_epoch", "iterate"}
        if phases.has_phases(name.removesuffix(TWIN).removesuffix("_jax")):
            compile(phases.timed(text), name, "exec")


def test_cuda_sh_has_parts_for_every_twin(tmp_path):
    """Its list of parts, as it is shown to whom names another; Python does nothing here."""
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    command = ["bash", ROOT / "benchmark" / "cuda.sh", tmp_path / "out", "nothing"]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 1
    error, _, parts = process.stdout.strip().rpartition("error: no part nothing; there are: ")
    twins = [name for name in CATALOG if f"{name}{TWIN}" in SCRIPTS]
    expected = {f"{what}-{name}" for what in ("tests", "resume", "learning", "speed") for name in twins}
    expected |= {"tests-others", "tests-ray", "tests-ranks", "speed-ppo_atari_multigpu"}
    assert set(parts.split()) == expected and len(twins) >= 10


def test_the_cart_without_velocities_is_the_cart():
    env, whole = gym.make("no_velocity:CartPoleNoVel-v1"), gym.make("CartPole-v1")
    assert env.observation_space.shape == (2,) and env.spec.max_episode_steps == 500
    (obs, _), (whole_obs, _) = env.reset(seed=3), whole.reset(seed=3)
    over = False
    while not over:
        assert obs.tolist() == whole_obs[[0, 2]].tolist()
        obs, *rest, _ = env.step(0)
        whole_obs, *same_rest, _ = whole.step(0)
        assert rest == same_rest
        over = rest[1]


# ---------- a measured run ----------


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The seconds of a clock that the test turns."""
    now = [0.0]
    for module in (measure, probes):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=module.time.sleep))
    monkeypatch.setattr(measure, "WAITED", [0.0])
    measure.MEASURING.clear()
    return now


def test_the_clock_starts_with_learning_and_the_first_reports_do_not_count(monkeypatch, own_folder, now):
    """A second a report of 500 steps. Random steps take 7 s, compilation 30 s, and caches are cold for two reports."""
    reports = []

    def train(args):
        last_report = now[0], 0
        for global_step in range(500, args.total_timesteps + 1, 500):
            now[0] += {500: 7, 1500: 31, 2000: 2, 2500: 3}.get(global_step, 1)
            losses = {"loss": 1.0} if global_step > 1000 else {}
            script.report(losses, [], [], global_step, last_report, None, None)
            last_report = now[0], global_step

    def report(losses, *rest):
        reports.append(losses)
        return {"episodic_return": 3.0}

    flags = ("learning_starts", "total_timesteps", "seed")
    script = SimpleNamespace(train=train, report=report, Args=type("Args", (), dict.fromkeys(flags)))
    monkeypatch.setattr(measure, "load", lambda args: script)
    monkeypatch.setattr(measure.tyro, "cli", lambda cls, args: SimpleNamespace(total_timesteps=5000))
    result = measure.run_script(measure.Args("dqn", "eager", 5000, "CartPole-v1", slices=5))
    assert len(reports) == 10 and result["SPS"] == 500 and result["startup_seconds"] == 33
    assert set(result["rates"]) == {500} and result["episodic_return"] == 3


def test_the_clock_stands_still_in_others_turns(monkeypatch, now):
    """100 steps a second, an hour for the others after each slice: 20 slices, of which the warm-up is not one."""

    def line():
        assert not measure.MEASURING.is_set()
        now[0] += 3600
        return "\n"

    monkeypatch.setattr(measure.sys, "stdin", SimpleNamespace(readline=line))
    rates, on_report = measure.slices(measure.Args("x", "eager", 4000, "e", in_turns=True))
    for steps in range(100, 4001, 100):
        now[0] += 1
        on_report(steps)
        assert measure.MEASURING.is_set() == (steps >= 300)
    assert rates == pytest.approx([100] * 19) and now[0] == pytest.approx(40 + 20 * 3600)


def test_a_run_in_one_piece_takes_no_turns(monkeypatch):
    monkeypatch.setattr(measure, "wait_for_turn", lambda: pytest.fail("players of its own would play on meanwhile"))
    rates, on_report = measure.slices(measure.Args("x", "eager", 4000, "e", in_turns=True, slices=1))
    for steps in range(100, 4001, 100):
        on_report(steps)
    assert len(rates) == 1


def test_a_run_ends_when_it_has_been_measured_for_long_enough(now):
    """100 steps a second: 2 reports of warm-up, then two slices of 5 seconds, and no more."""
    rates, on_report = measure.slices(measure.Args("x", "eager", 10**6, "e", seconds=10, slices=2))
    with pytest.raises(measure.Enough):
        for steps in range(100, 10**6, 100):
            now[0] += 1
            on_report(steps)
    assert rates == [100, 100] and steps == 1300 and not measure.MEASURING.is_set()


def test_what_a_run_asks_for_reaches_the_process():
    about = {"slices": 5, "seconds": 3.0, "flags": ("--num-envs", "64", "--batch-size", "32")}
    run = Run("sac_continuous_action", "compile", 5000, "Pendulum-v1", 2, **about)
    args = tyro.cli(measure.Args, args=run.command()[4:])
    asked = (args.script, args.mode, args.steps, args.env_id, args.seed, args.slices, args.seconds, args.in_turns)
    assert asked == ("sac_continuous_action", "compile", 5000, "Pendulum-v1", 2, 5, 3.0, True)
    assert args.flags == "--num-envs 64 --batch-size 32"


def test_threads_are_those_of_the_run_or_of_the_catalog(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small, peer, large = (Run(*x, 1, "e", 1) for x in (("dqn", "compile"), ("dqn", "sb3"), ("ppo_lru", "eager")))
    assert small.environment()["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in peer.environment() | large.environment()
    small.threads = 2
    assert "intra_op_parallelism_threads=2" in small.environment()["XLA_FLAGS"]


def test_communication_is_what_ranks_do_together(monkeypatch, own_folder, now):
    """Also within DDP, whose gradients it leaves as they are. What overlaps counts once."""

    def gather(*args):
        if args == ("twice",):
            dist.all_gather_object()
        now[0] += 2
        return args

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "all_reduce", dist.all_reduce)  # to be undone
    dist.init_process_group("gloo", init_method=f"file://{own_folder}/ranks", rank=0, world_size=1)
    try:
        script = SimpleNamespace(DistributedDataParallel=DistributedDataParallel)
        seconds = probes.time_communication(script, dist, torch.cuda)
        layer = torch.nn.Linear(4, 3)
        model = script.DistributedDataParallel(layer)
        assert dist.all_gather_object("twice") == ("twice",)
        now[0] += 5
        assert seconds() == 4
        monkeypatch.setattr(probes, "time", time)
        model(torch.ones(2, 4)).sum().backward()
        assert 4 < seconds() < 9 and (layer.weight.grad == 2).all()
    finally:
        model = None
        dist.destroy_process_group()


def test_the_share_of_the_graphs_counts_calls_of_updates_alone(now):
    """A graph of 2 ms, called at each of 100 steps that take 8 ms, and one that is no update: a quarter."""

    class Module:
        def __init__(self, function, warmup=2):
            self.graph = SimpleNamespace(replay=function)

        def __call__(self):
            pass

    def update():
        now[0] += 0.002

    def act():
        now[0] += 0.004

    script = SimpleNamespace(CudaGraphModule=Module)
    graphs = probes.know_graphs(script)
    for graph in (script.CudaGraphModule(update, warmup=3), script.CudaGraphModule(act)):
        for _ in range(100):
            graph()
    assert probes.graph_share(graphs, 0.008, 100, lambda: None) == pytest.approx(0.25)
    assert probes.graph_share([], 0.008, 100, lambda: None) is None


@pytest.mark.parametrize(("script", "mode"), [("ppo_device_env", "jax"), ("sac_continuous_action", "sbx")])
def test_jax_on_the_cpu_is_not_measured_beside_a_gpu(monkeypatch, script, mode):
    pytest.importorskip("jax")
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="PyTorch has a GPU here, and JAX has none"):
        patch.setattr(torch.cuda, "is_available", lambda: True)
        measure.main(measure.Args(script, mode, 1000, "CartPole-v1"))


@pytest.mark.long
@pytest.mark.slow
def test_a_script_on_ray_is_measured_whose_simulators_are_elsewhere(own_folder):
    command = [sys.executable, ROOT / "benchmark" / "measure.py", "ppo_continuous_action_ray", "--mode", "eager"]
    command += ["--steps", "12288", "--slices", "1", "--env-id", "HalfCheetah-v4"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["SPS"] > 50 and result["env_share"] is None


CHILD = """
import json, os, sys
for i in range({slices}):
    print({name!r}, i, file=open("log", "a"))
    print("no newline ...", end="")
    print({hand_over!r}, flush=True)
    if {name!r} == "killed":
        os.kill(os.getpid(), 9)
    if not sys.stdin.readline():
        print({name!r}, "left", file=open("log", "a")), sys.exit(1)
print()
print(json.dumps({{"rates": [1.0] * {slices}}}) if {code} == 0 else "")
sys.exit({code})
"""


@pytest.mark.parametrize("code", (0, 3))
def test_runs_go_on_one_at_a_time(monkeypatch, own_folder, code):
    def start(run, empty):
        source = CHILD.format(slices=run.steps, name=run.mode, hand_over=measure.HAND_OVER, code=run.seed)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", source], text=True, **pipes)

    monkeypatch.setattr(Run, "start", start)
    turn = [Run("dqn", name, steps, "e", seed) for name, steps, seed in (("a", 3, 0), ("b", 1, code))]
    log = own_folder / "log"
    if code == 0:
        assert [result["rates"] for result in runs.take_turns(*turn)] == [[1.0] * 3, [1.0]]
        assert log.read_text().split("\n")[:-1] == ["a 0", "b 0", "a 1", "a 2"]
        with pytest.raises(SystemExit, match="killed of dqn failed with exit code -9"):
            runs.take_turns(*turn, Run("dqn", "killed", 3, "e", 0))
    else:
        with pytest.raises(SystemExit, match="b of dqn failed with exit code 3"):
            runs.take_turns(*turn)
        assert log.read_text().split("\n")[:-1] == ["a 0", "b 0", "a left"]  # nobody stays behind


# ---------- comparisons ----------


def test_interval_covers_the_median():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(60):
        median, low, high = results.interval(rng.normal(10, 1, size=(5, 20)).tolist())
        assert low <= median <= high
        hits += low <= 10 <= high
    assert hits >= 50
    _, low, high = results.interval([[0.9] * 20, [1.1] * 20])  # a run is slow or fast as a whole
    assert (low, high) == (0.9, 1.1)


def test_summary_pairs_the_slices():
    """A machine that halves its speed after a slice leaves the ratio as it is. The first start is cold."""
    turns = {"eager": ([100.0, 50.0], [50.0, 50.0], [50.0, 50.0]), "compile": ([300.0, 150.0], [150.0], [150.0])}
    starts = {"eager": (0.0, 0.0, 0.0), "compile": (30.0, 4.0, 5.0)}
    measured_runs = {
        mode: [{"rates": r, "startup_seconds": s, "host_mb": 9.0} for r, s in zip(turns[mode], starts[mode])]
        for mode in turns
    }
    eager, compiled = compare.summarise(measured_runs)
    assert eager["ratio"] == [1, 1, 1] and compiled["ratio"] == [3, 3, 3]
    assert compiled["sps"][0] == 150 and compiled["device_mb"] is None
    assert (compiled["startup_seconds"], compiled["warm_seconds"]) == (30, 4.5)
    (once,) = compare.summarise({"compile": [RESULT]})
    assert once["warm_seconds"] is None
    shown = tables.aligned(*tables.speed_cells({"rows": [eager, compiled]}))
    assert "3.00" in shown and "warm start" in shown and "pays off after" in shown
    assert "GPU" not in shown and "reductions" not in shown  # no column without content


def test_efficiency_is_that_of_adding_ranks_not_of_flags():
    rates = {"1 rank": 100.0, "2 ranks": 150.0, "1 rank, one bucket": 90.0, "2 ranks, one bucket": 162.0}
    rows = compare.summarise({mode: [{"rates": [rate], "startup_seconds": 0.0}] for mode, rate in rates.items()})
    assert [row["efficiency"] for row in rows] == [1, 0.75, 1, 0.9]
    assert [row["ratio"][0] for row in rows] == [1, 1.5, 0.9, 1.62]
    for alone in ("2 ranks", "eager"):
        assert compare.summarise({alone: [RESULT]})[0]["efficiency"] is None


def test_each_mode_has_a_cache_of_its_own_that_a_compiler_takes(measured):
    measured.call("ppo_atari_multigpu")
    names = {run.cache.name for run in measured.started}
    assert len(names) == len(measured.started) > 2 and not any(" " in name for name in names)


def test_a_number_of_threads_binds_every_run_to_as_many_cores(monkeypatch, measured):
    """And no trial chooses another number for JAX."""
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(list(cores)))
    measured.call("ppo_device_env", threads=2)
    assert bound == [[2, 5]] and {run.threads for run in measured.started} == {2}
    assert {run.mode for run in measured.started} == {"eager", "twin", "compile", "jax"}
    measured.call("ppo_device_env", modes=("eager",), peers=False)
    assert len(bound) == 1 and measured.started[-1].threads is None


def test_beside_a_gpu_jax_needs_it_as_well(monkeypatch, measured):
    monkeypatch.setattr(results, "gpu_names", lambda: ["a GPU"])
    monkeypatch.setattr(compare, "find_spec", lambda name: name != "jax_cuda12_plugin")
    modes = [row["mode"] for row in measured.call("ppo_device_env")]
    assert modes == ["eager", "twin", "compile", "cudagraphs", "compile+cudagraphs"]
    assert [row["mode"] for row in measured.call("ppo_atari_multigpu")] == [mode for mode in RANKS if mode[0] == "1"]


def test_a_gpu_is_one_that_pytorch_can_use(monkeypatch, tmp_path):
    """A driver alone, as of a machine whose PyTorch is built for the CPU, is none."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert results.gpu_names() == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def test_a_program_of_the_users_is_timed_without_its_start(monkeypatch, measured):
    """Five seconds of start-up, at first a minute; then a millisecond a step."""
    clock, commands = [0.0], []

    def run(words, **_):
        commands.append(words)
        clock[0] += 5 + 60 * (len(commands) == 1) + 0.001 * int(words[1])
        return SimpleNamespace(returncode=int(words[2] == "9"), stderr="no such seed")

    with monkeypatch.context() as patch:
        patch.setattr(results, "machine", lambda: HERE)
        patch.setattr(compare, "machine", lambda: HERE)
        patch.setattr(runs.subprocess, "run", run)
        patch.setattr(runs, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        about = {"modes": ("eager",), "peers": False, "pairs": 2, "steps": 1000, "slices": 1}
        _, row = measured.call("dqn", external=("mine=sh {steps} {seed} 'a b'",), **about)
        assert commands[:2] == [["sh", "500", "1", "a b"]] * 2 and row["sps"] == pytest.approx([1000] * 3)
        with pytest.raises(SystemExit, match="(?s)failed with 1:.*no such seed"):
            runs.measure_external("mine {steps} {seed}", 1000, seed=9, slices=4)
        with pytest.raises(SystemExit, match="give it more --steps"):
            runs.measure_external("mine 4 {seed} {steps}", 1000, seed=3, slices=4)
    refused = {"mine=python mine.py": "say NAME=COMMAND", "x=nothing {steps}": "there is no program"}
    for external, message in (refused | {"eager=python {steps}": "the name of a mode"}).items():
        with pytest.raises(SystemExit, match=message):
            measured.call("dqn", external=(external,))


@pytest.mark.slow
def test_compare_from_the_command_line(own_folder):
    command = [sys.executable, ROOT / "benchmark" / "compare.py", "ppo_continuous_action", "--pairs", "1"]
    flags = ["--steps", "10240", "--modes", "eager", "twin", "--no-peers", "--out", str(own_folder / "out")]
    process = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr
    assert "ratio to eager" in process.stdout
    assert process.stdout.endswith("ppo_continuous_action_torchcompile.py   what makes it fast\n")
    (table,) = json.loads((own_folder / "out" / "speed.json").read_text())
    assert [row["mode"] for row in table["rows"]] == ["eager", "twin"]
    assert all(row["sps"][0] > 50 and 0 < row["env_share"] < 0.6 for row in table["rows"])
    assert (own_folder / "out" / "ppo_continuous_action.png").stat().st_size > 5000


# ---------- tricks, phases, sizes, returns ----------


@pytest.mark.parametrize("script", ablate.Args().scripts)
def test_a_script_with_a_trick_taken_out_trains(monkeypatch, tmp_path, script):
    """Each patch applies, and the first update is made. Nothing is compiled here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setitem(sys.modules, "ray", local_ray)
    for i, (mode, patch) in enumerate(ablate.variants(script).values()):
        mode, *words = mode.split()
        path = runs.patched(script, mode, patch, tmp_path / f"{script}{i}")
        assert (path.read_text() == (ROOT / "leanrl" / path.name).read_text()) == (patch is None)
        spec = importlib.util.spec_from_file_location(f"{script}{i}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
        spec.loader.exec_module(module)
        original = module.report

        def report(losses, *rest, original=original):
            metrics = original(losses, *rest)
            if losses:
                raise Ended
            return metrics

        module.report = report
        if "atari" in script:
            module.make_envs = ScriptedPool
        short = {"learning_starts": 50, "total_timesteps": 70} if "learning_starts" in CATALOG[script].tiny else {}
        flags = CATALOG[script].tiny | short | ({"compile": True} if mode.startswith("compile") else {})
        flags |= {"num_steps": 16} if "atari" in script else {}
        flags |= {"num_steps": 4, "total_timesteps": 16} if "ppo_mujoco" in script else {}
        flags |= {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2])}
        with pytest.raises(Ended):
            module.train(module.Args(**flags, cuda=False))


def test_a_patch_that_does_not_apply_says_so(tmp_path):
    with pytest.raises(SystemExit, match="ring.patch does not apply to sac_continuous_action_torchcompile.py"):
        runs.patched("sac_continuous_action", "compile", ablate.ABLATIONS / "dqn" / "ring.patch", tmp_path / "copy")


def test_ablation_pairs_slices_and_starts_cold_once(monkeypatch, tmp_path):
    """A machine that loses a tenth of its speed from slice to slice: what a trick is worth comes out exactly."""
    script, started = "td3_continuous_action", []

    def slowing(*turn):
        for run in turn:
            source = (run.folder / f"{script}{CATALOG[script].modes[run.mode][0]}.py").read_text()
            worth = {"twin": 0.5, "eager": 1.0 if "fused=True" in source else 0.8}.get(run.mode, 1.0)
            started.append(run.cache)
            yield {"rates": [worth * 0.9**k for k in range(9)]}

    monkeypatch.setattr(ablate, "take_turns", lambda *turn: list(slowing(*turn)))
    ablate.ablate(script, ablate.Args(pairs=2, out=tmp_path))
    (table,) = json.loads((tmp_path / "ablate.json").read_text())
    worth = {"without perf[graph]: no compilation": 0.5, "eager: Adam without fused=True": 0.8}
    assert [row["variant"] for row in table["rows"]] == list(ablate.variants(script))
    for row in table["rows"]:
        assert row["ratio"] == pytest.approx([worth.get(row["variant"], 1)] * 3), row["variant"]
    assert len(started) == 4 * len(table["rows"]) and len(set(started)) == len(table["rows"]) + 2
    assert not any(" " in str(cache.relative_to(cache.parents[1])) for cache in started)  # no compiler takes it


def test_the_phases_show_the_median_simulator(capsys, monkeypatch, tmp_path):
    """The second of three runs has the median speed, the third the median simulator."""
    outcomes = iter([(100, 50), (200, 10), (300, 20)])

    def measure_phases(run):
        row = {"mode": run.mode} | dict.fromkeys(tables.PHASES, 7.04)
        return row | dict(zip(("microseconds", "simulator"), next(outcomes)))

    monkeypatch.setattr(phases, "measure_phases", measure_phases)
    phases.main(phases.Args(scripts=("dqn",), modes=("eager",), out=tmp_path))
    title, names, numbers = capsys.readouterr().out.strip().splitlines()
    assert title == "dqn, microseconds per env step" and names.split()[:3] == ["mode", "act", "learn"]
    assert numbers.split() == ["eager", "7.0", "7.0", "7.0", "7.0", "200.0", "20.0"]
    for script in ("ppo_device_env", "ppo_atari_multigpu", "ppo_atari_ray"):
        with pytest.raises(SystemExit, match=f"the loop of {script} has no phases"):
            phases.main(phases.Args(scripts=("dqn", script)))


@pytest.mark.slow
def test_the_phases_of_a_run_add_up():
    row = phases.measure_phases(Run("dqn", "eager", 1_000_000, "CartPole-v1", 1, seconds=0.5))
    assert sum(row[phase] for phase in tables.PHASES) == pytest.approx(row["microseconds"])
    assert row["learn"] > 0 and 0 < row["simulator"] < row["step and store"]


def test_runs_of_other_lengths_have_curves_of_their_own(monkeypatch, own_folder):
    """A run as often as its length is new."""

    def run(command, **options):
        if "--episodes" in command:
            return SimpleNamespace(returncode=0, stdout=f'a line\n{{"mean": {command[-1]}}}')
        train(command, options["cwd"])

    def train(command, cwd):
        total_timesteps = int(command[command.index("--total-timesteps") + 1])
        with SummaryWriter(f"{cwd}/runs/x") as writer:
            for step in (8, total_timesteps // 2, total_timesteps):
                writer.add_scalar("charts/episodic_return", step / 1000, step)
        with open(f"{cwd}/runs/x/summary.json", "w") as file:
            json.dump({"metrics": {"episodic_return": total_timesteps / 1000}}, file)

    monkeypatch.setattr(returns.subprocess, "run", run)
    monkeypatch.setattr(returns, "machine", lambda: HERE)
    monkeypatch.setattr(plot, "RESULTS", own_folder)
    monkeypatch.setattr(tables, "RESULTS", own_folder)
    for steps, play in ((2000, 0), (4000, 7), (2000, 0)):
        returns.main(
            returns.Args("ppo_atari_envpool", ("Pong-v5",), (1,), total_timesteps=steps, play=play, out=own_folder)
        )
    for steps in (2000, 4000):
        curve = results.read_csv(own_folder / f"curves/ppo_atari_envpool__Pong-v5__{steps}__compile.csv")
        assert [int(row["step"]) for row in curve] == [steps // 100, steps // 2, steps]
        assert float(curve[-1]["episodic_return"]) == steps / 1000
    assert [row["steps"] for row in results.read_csv(own_folder / "returns.csv")] == ["2000", "4000"]
    assert [row[5:7] for row in tables.return_rows()] == [("2.0", ""), ("4.0", "7.0")]
    plot.curves("ppo_atari_envpool", own_folder / "x.png")
    assert (own_folder / "x.png").stat().st_size > 5000


def test_the_authors_pqn_is_recorded_once(monkeypatch, tmp_path):
    """Its settings are those of their file, but for what the peer says; a recorded seed is not trained again."""
    folder = tmp_path / "purejaxql/config/alg"
    folder.mkdir(parents=True)
    (folder / "pqn_minatar.yaml").write_text("NUM_ENVS: 4\nNUM_STEPS: 5\nLAMBDA: 0.65\nENV_NAME: Asterix-MinAtar\n")
    configs = []
    monkeypatch.setattr(purejaxql_peer, "train", lambda _, config, seed: configs.append(config) or np.arange(10.0))
    monkeypatch.setattr(purejaxql_peer, "machine", lambda: HERE)
    for _ in range(2):
        purejaxql_peer.main(purejaxql_peer.Args(tmp_path, (3, 4), 200, tmp_path))
    assert len(configs) == 2 and configs[0]["LAMBDA"] == 0.65 and configs[0]["ENV_NAME"] == "Breakout-MinAtar"
    assert [(row["seed"], row["episodic_return"]) for row in results.read_csv(tmp_path / "returns.csv")] == [
        ("3", "9"),
        ("4", "9"),
    ]
    (curve,) = (tmp_path / "curves").glob("*.csv")
    assert [int(row["step"]) for row in results.read_csv(curve)] == [*range(20, 201, 20)] * 2


def test_the_curve_of_a_peer_is_that_of_its_monitor(monkeypatch, tmp_path):
    """As many threads as the trial found best, and the episodes that its Monitor has written."""
    (tmp_path / "0.monitor.csv").write_text("#{}\nr,l,t\n1.5,100,2.0\n2.5,50,3.0\n")
    seen = []
    monkeypatch.setattr(returns, "best_threads", lambda run: 1)
    monkeypatch.setattr(returns.subprocess, "run", lambda command, env, check: seen.append((command, env)))
    step, seconds, value, last, _ = returns.run_peer(
        "dqn", "CartPole-v1", 3, "sbx", str(tmp_path), returns.Args(total_timesteps=5000)
    )
    assert (step.tolist(), seconds.tolist(), value.tolist(), last) == ([100, 150], [2, 3], [1.5, 2.5], 2)
    ((command, env),) = seen
    assert env["OMP_NUM_THREADS"] == "1" and "eigen=false intra_op_parallelism_threads=1" in env["XLA_FLAGS"]
    args = tyro.cli(measure.Args, args=command[4:])
    assert (args.mode, args.steps, args.seed, args.monitor) == ("sbx", 5000, 3, str(tmp_path))
    assert args.learning_starts == load("dqn").Args().learning_starts > peers.LEARNING_STARTS


# ---------- results and documents ----------


def test_a_table_replaces_one_of_the_same_settings(tmp_path):
    """Speeds of two processors stand side by side; of other kinds, one is kept."""
    old = {"script": "dqn", "env_id": "e", "flags": "", "threads": None, "machine": HERE, "rows": [1]}
    elsewhere, one_thread = old | {"machine": HERE | {"cpu": "another"}}, old | {"threads": 1}
    for kind, kept in (("speed", [old | {"rows": [2]}, elsewhere, one_thread]), ("phases", [elsewhere, one_thread])):
        for table in (old, old | {"rows": [2]}, elsewhere, one_thread):
            path = results.keep(tmp_path, kind, table)
        assert json.loads(path.read_text()) == kept


def test_envpool_resets_in_the_step_that_ends_an_episode():
    """As Stable-Baselines3 expects it; of a Hopper that falls."""
    pytest.importorskip("stable_baselines3", reason="the peers are not installed")
    envs, rng, ends = peers.envpool_envs("Hopper-v5", 4, 1), np.random.default_rng(0), 0
    envs.reset()
    for _ in range(60):
        obs, _, done, infos = envs.step(rng.uniform(-1, 1, (4, 3)))
        for i in range(4):
            assert done[i] == ("terminal_observation" in infos[i]) == (abs(obs[i] - [1.25, *[0] * 10]) < 0.006).all()
            if done[i]:  # it leans too far, or is too low
                height, angle = infos[i]["terminal_observation"][:2]
                assert (abs(angle) >= 0.2 or height <= 0.7) and not infos[i]["TimeLimit.truncated"]
        ends += done.sum()
    assert ends > 5


def test_the_documents_show_the_results_and_all_of_them():
    names = tables.blocks()
    text = "".join(path.read_text() for path in plot.DOCUMENTS)
    assert text.count("<!-- end -->") == sum(text.count(f"<!-- {name} -->") for name in names) > 50
    assert "".join(plot.filled(path.read_text()) for path in plot.DOCUMENTS) == text, "run benchmark/plot.py"
    assert all(f"<!-- {name} -->" in text for name in names if not name.startswith("returns "))
    assert all(tables.speed([table]) in text for table in results.tables("speed"))
    for table in results.tables("ablate"):  # of a patch that is gone, a row would be of another script
        assert {row["variant"] for row in table["rows"]} <= set(ablate.variants(table["script"]))


def test_a_block_is_replaced_and_nothing_else(monkeypatch):
    """Empty, filled, and filled again: the text around and between the blocks stays."""
    monkeypatch.setattr(plot, "blocks", lambda: {"one": lambda: "| 1 |\n| 1 |", "two": lambda: "| 2 |"})
    text = "a\n<!-- one -->\n<!-- end -->\nb\n<!-- two -->\nold\n<!-- end -->\nc\n"
    for _ in range(2):
        text = plot.filled(text)
        assert text == "a\n<!-- one -->\n| 1 |\n| 1 |\n<!-- end -->\nb\n<!-- two -->\n| 2 |\n<!-- end -->\nc\n"


def test_the_readme_shows_one_mode_and_not_the_luckiest(monkeypatch):
    """The compiled twin without further flags, beside the fastest of the other libraries."""
    speeds = {"eager": 100, "compile": 150, "compile+bf16": 300, "sb3": 50, "sbx": 60, "sbx unnormalised": 75}
    rows = [
        {"mode": mode, "sps": [sps] * 3, "startup_seconds": 6 * sps / 10, "runs": [{"rates": [sps]}]}
        for mode, sps in speeds.items()
    ]
    here = HERE | {"cores": 2}
    table = {"script": "ppo_continuous_action", "env_id": "HalfCheetah-v4", "rows": rows, "machine": here}
    monkeypatch.setattr(tables, "first_of_each_script", lambda: [table])
    assert "| ppo_continuous_action, HalfCheetah | 100 | 150 | **2.0 x** (SBX) |" in tables.best()
    _, shown = tables.ppo_rows()
    assert [row["mode"] for row in shown.values()] == ["compile", "eager", "sbx unnormalised", "sb3"]
    assert tables.minutes(rows[1]) == pytest.approx(1e6 / 150 / 60 + 90 / 60)
    assert "**112.6 minutes**" in tables.claim() and "223.0 with SBX" in tables.claim()
    table["script"] = "ppo_atari_ray"
    assert tables.best().count("|\n") == 2  # the heading alone
    assert 3 < sum(entry.in_readme for entry in CATALOG.values()) <= 6


def test_compiling_pays_when_the_start_up_is_made_up_for():
    """By the ratio of slices beside each other: the median speeds, of other moments, may say otherwise."""
    eager = {"sps": [100.0] * 3, "startup_seconds": -1.0, "ratio": [1.0] * 3, "runs": [{"rates": [100.0, 50.0]}]}
    compiled = {"sps": [90.0] * 3, "startup_seconds": 50.0, "ratio": [2.0, 1.9, 2.1]}
    compiled["runs"] = [{"rates": [200.0, 100.0]}]
    assert results.pays_after(compiled, eager) == 10_000  # 100 s, or 50 s after a start of 50 s
    assert results.against(compiled, eager) == 2
    assert results.pays_after(compiled | {"ratio": [1.1, 0.9, 1.3]}, eager) is None  # perhaps it is slower
    assert results.pays_after(compiled | {"startup_seconds": None}, eager) is None  # a program of the user's


def test_the_page_names_the_scripts_whose_default_run_is_too_short_to_compile():
    short = set()
    for table in results.first_of_each_script():
        modes = {row["mode"]: row for row in table["rows"]}
        if "eager" in modes:
            after = results.pays_after(modes["compile"], modes["eager"])
            default = load(f"{table['script']}{TWIN}").Args().total_timesteps
            short |= {table["script"]} if after is None or after > default else set()
    page = (ROOT / "docs" / "faq.md").read_text()
    page = page[page.index("## When does compiling not pay?") : page.index("## Why not")]
    assert short and short == {name for name in CATALOG if f"`{name}`" in page}


def test_a_gain_is_a_figure_if_its_interval_leaves_out_one(monkeypatch):
    ratios = {"dqn": [0.5, 0.4, 0.6], "dqn_lru": [0.9, 0.8, 1.0], "ppo_lru": [1.25, 1.1, 1.3]}
    found = [{"script": s, "rows": [{"variant": "without perf[graph]", "ratio": r}]} for s, r in ratios.items()]
    monkeypatch.setattr(tables, "tables", lambda kind: found)
    assert tables.gain("graph") == "**Gain:** 2.00 x (dqn), no certain gain (dqn_lru). **Slower:** 0.80 x (ppo_lru)."


def test_returns_against_minutes_are_of_the_newest_bin_by_then(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "curves").mkdir()
    runs = ["dqn,A-v0,sb3,50", "dqn,A-v0,sb3,100", "dqn,B-v0,sb3,100"]
    (tmp_path / "returns.csv").write_text("\n".join(["script,env_id,mode,steps", *runs]))
    bins = ["1,50,30,10", "1,100,119,30", "2,50,61,20", "2,100,121,40"]  # of the longest runs in A-v0
    (tmp_path / "curves/dqn__A-v0__100__sb3.csv").write_text("\n".join(["seed,step,seconds,episodic_return", *bins]))
    shown = tables.against_minutes("A-v0", (1, 2, 3)).splitlines()[2:]
    assert shown == ["| dqn, Stable-Baselines3 | 100 | 10 (10) | 25 (30, 20) | 35 (30, 40) |"]


def test_policies_are_held_against_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    runs = ["dqn,A-v0,1,4,4000", "td3,A-v0,1,5,7000", "td3,A-v0,2,6,9000", "td3,B-v0,1,6,1", "td3,A-v0,3,6,"]
    (tmp_path / "returns.csv").write_text("\n".join(["script,env_id,seed,minutes,played", *runs]))
    shown = tables.policies_against_minutes("A-v0", "td3", "dqn")
    assert "After 5.5 (5.0, 6.0) minutes, the policies of `td3` return 8,000 (7,000, 9,000)." in shown
    assert "After 4.0 (4.0) minutes, the policies of `dqn` return 4,000 (4,000)." in shown


def test_returns_stand_beside_published_ones_of_equal_length():
    """And CleanRL's JAX scripts end elsewhere than its scripts in PyTorch."""
    rows = {(script, steps): beside for script, _, steps, *_, beside in tables.return_rows()}
    assert rows["td3_continuous_action", "130,000"] == "" and "±" in rows["dqn", "500,000"]
    for row in results.read_csv(ROOT / "benchmark" / "published.csv"):
        assert row["source"] in ("CleanRL", "RL Zoo")
    assert tables.many_seeds([1.0, 2.0, 3.0, 4.0, 1000.0]).startswith("; IQM 3.0 [")  # an outlier does not move it
