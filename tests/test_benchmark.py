"""The benchmark measures what it says, and the documents show what it measured."""

import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import ablate
import compare
import gymnasium as gym
import local_ray
import measure
import numpy as np
import phases
import plot
import pytest
import returns
import scale
import torch
import torch.distributed as dist
import tyro
from catalog import CATALOG, TWIN
from conftest import FILES, ROOT, SCRIPTS, ScriptedPool, load
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter


def test_the_catalog_has_a_row_for_each_script():
    assert {f"{name}{suffix}" for name, entry in CATALOG.items() for suffix, _ in entry.modes.values()} == set(FILES)


def test_the_tricks_of_every_pair_can_be_taken_out(tmp_path):
    """Each patch applies and leaves Python; so do the clocks of phases.py and the published schedule of Atari."""
    pairs = ablate.Args().scripts
    assert set(pairs) == {name for name in CATALOG if f"{name}_torchcompile" in SCRIPTS} | {"ppo_atari_ray"}
    for script in pairs:
        for i, (mode, patch) in enumerate(ablate.variants(script).values()):
            path = ablate.patched(script, mode, patch, tmp_path / f"{script}{i}")
            assert (path.read_text() == (ROOT / "leanrl" / path.name).read_text()) == (patch is None)
            compile(path.read_text(), path, "exec")
        for suffix in ("", "_torchcompile") if script in phases.Args().scripts else ():
            compile(phases.timed((ROOT / "leanrl" / f"{script}{suffix}.py").read_text()), script, "exec")
    for mode in ("eager", "compile"):
        patch = ROOT / "benchmark" / "schedules" / f"{mode}-annealed-over-10M.patch"
        path = ablate.patched("ppo_atari_envpool", mode, patch, tmp_path / mode)
        assert "remaining = 1 - iteration * batch_size / 10_000_000" in path.read_text()


OFF_POLICY_SHORT = {"learning_starts": 50, "total_timesteps": 70}


class Trained(Exception):
    """Ends a run at its first report after an update."""


@pytest.mark.parametrize("script", ablate.Args().scripts)
def test_a_script_with_a_trick_taken_out_trains(monkeypatch, tmp_path, script):
    """Nothing is compiled here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setitem(sys.modules, "ray", local_ray)
    for i, (mode, patch) in enumerate(ablate.variants(script).values()):
        path = ablate.patched(script, mode, patch, tmp_path / f"{script}{i}")
        spec = importlib.util.spec_from_file_location(f"{script}{i}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
        spec.loader.exec_module(module)
        original = module.report

        def report(losses, *rest, original=original):
            metrics = original(losses, *rest)
            if losses:
                raise Trained
            return metrics

        module.report = report
        if "atari" in script:
            module.make_envs = ScriptedPool
        flags = CATALOG[script].tiny | (OFF_POLICY_SHORT if "learning_starts" in CATALOG[script].tiny else {})
        flags |= {"compile": True} if mode.startswith("compile") else {}
        flags |= {"num_steps": 16} if "atari" in script else {}
        with pytest.raises(Trained):
            module.train(module.Args(**flags, device="cpu"))


def test_scripts_have_the_names_that_the_benchmark_relies_on():
    """And the page lists those names."""
    needed = ["Args", "WARMUP_REPORTS", "time", "SPS", "startup_seconds", "episodic_return", "global_step"]
    needed += ["train", "report", "# act", "# learn", "# step and store", "# report", "CudaGraphModule"]
    needed += ["summary.json", "charts/episodic_return", "DistributedDataParallel", "--local-num-envs"]
    needed += ["REPORT_INTERVAL", "marks", "dist.all_reduce", "dist.all_gather_object"]
    page = (ROOT / "docs" / "benchmark.md").read_text()
    section = page[page.index("### What the benchmark needs") : page.index("### Tables")]
    assert all(re.search(rf"`{name}[`(]", section) for name in needed)
    for name in FILES:
        script, text = load(name), (ROOT / "leanrl" / f"{name}.py").read_text()
        assert script.time is time and script.WARMUP_REPORTS > 0
        assert list(inspect.signature(script.train).parameters)[0] == "args"
        assert list(inspect.signature(script.report).parameters)[0] == "losses"
        assert all(f'metrics["{key}"]' in text or f'"{key}":' in text for key in needed[3:7])
        assert len(re.findall(r"\n +metrics = report\(", text)) == 1
        assert "charts/episodic_return" in text and "summary.json" in text
        assert "marks.append(" in text and "\n\n\n@dataclass" in text
        assert hasattr(script, "REPORT_INTERVAL") == ("learning_starts" in vars(script.Args))
        assert ("multigpu" in name) == ("DistributedDataParallel" in text) == ("local_num_envs" in text)
        assert ("multigpu" in name) == ("dist.all_reduce(" in text) == ("dist.all_gather_object(" in text)
        assert not re.search(r"(?<!dist\.)\b(all_reduce|all_gather_object)\(", text)
        assert list(inspect.signature(script.report).parameters)[-2:] == ["writer", "progress"]
        if name.endswith(TWIN):
            assigned = ", ".join(re.findall(r"\n *([\w, ]+) = \(?CudaGraphModule\(", text))
            assert set(assigned.split(", ")) & {"update", "update_with_actor", "update_epoch", "iterate"}


def test_a_patch_that_does_not_apply_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(ablate, "ROOT", tmp_path)
    (tmp_path / "leanrl").mkdir()
    (tmp_path / "leanrl" / "dqn_torchcompile.py").write_text("something else\n")
    (tmp_path / "x.patch").write_text((ablate.ABLATIONS / "dqn" / "host.patch").read_text())
    with pytest.raises(SystemExit, match="x.patch does not apply to dqn_torchcompile.py"):
        ablate.patched("dqn", "compile", tmp_path / "x.patch", tmp_path / "copy")


def test_ablation_pairs_slices_and_starts_cold_once(monkeypatch, tmp_path):
    """A machine that loses a tenth of its speed from slice to slice: what a trick is worth comes out exactly."""
    script, started = "td3_continuous_action", []

    def slowing(*runs):
        results = []
        for run in runs:
            source = (run.folder / f"{script}{CATALOG[script].modes[run.mode][0]}.py").read_text()
            worth = {"twin": 0.5, "eager": 1.0 if "fused=True" in source else 0.8}.get(run.mode, 1.0)
            started.append((run.mode, run.seed, run.cache))
            results.append({"rates": [worth * 0.9**k for k in range(9)]})
        return results

    monkeypatch.setattr(ablate, "measure", slowing)
    ablate.ablate(script, ablate.Args(pairs=2, out=tmp_path))
    rows = {row["variant"]: row for row in json.loads((tmp_path / f"{script}.json").read_text())["variants"]}
    assert rows.keys() == set(ablate.variants(script))
    worth = {"without perf[graph]: no compilation": 0.5, "eager: Adam without fused=True": 0.8}
    for name, row in rows.items():
        assert row["ratio"] == pytest.approx([worth.get(name, 1)] * 3), name
    assert len(started) == 4 * len(rows) and len({cache for *_, cache in started}) == len(rows) + 2
    assert not any(" " in str(cache.relative_to(cache.parents[1])) for *_, cache in started)  # no compiler takes it


def test_interval_covers_the_median():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(60):
        median, low, high = compare.interval(rng.normal(10, 1, size=(5, 20)).tolist())
        assert low <= median <= high
        hits += low <= 10 <= high
    assert hits >= 50
    _, low, high = compare.interval([[0.9] * 20, [1.1] * 20])  # a run is slow or fast as a whole
    assert (low, high) == (0.9, 1.1)


def test_summary_pairs_the_slices():
    """A machine that halves its speed after a slice leaves the ratio as it is."""
    run = {"startup_seconds": 1.0, "host_mb": 100.0, "device_mb": None, "gpu_utilisation": None, "env_share": 0.1}
    runs = {
        "eager": [run | {"rates": [100.0, 50.0]}, run | {"rates": [50.0, 50.0]}],
        "compile": [run | {"rates": [300.0, 150.0]}, run | {"rates": [150.0]}],
    }
    eager, compiled = compare.summarise(runs)
    assert eager["ratio"] == [1, 1, 1] and compiled["ratio"] == [3, 3, 3]
    assert compiled["sps"][0] == 150 and compiled["device_mb"] is None
    table = compare.text_table([eager, compiled])
    assert "3.00" in table and "warm start s" in table
    assert "GPU" not in table and "comm" not in table  # no column without content
    assert "pays off after" in table and "pays off" not in compare.text_table([eager | {"mode": "1 rank"}, compiled])


def test_each_mode_has_a_cache_of_its_own_that_a_compiler_takes(monkeypatch, tmp_path):
    runs = []

    def spied(*turn, progress):
        runs.extend(turn)
        raise Trained

    monkeypatch.setattr(compare, "measure", spied)
    with pytest.raises(Trained):
        compare.main(compare.Args(scripts=("ppo_atari_multigpu",), out=tmp_path))
    names = {run.cache.name for run in runs}
    assert len(names) == len(runs) > 2 and not any(" " in name for name in names)


def test_the_first_start_is_cold_and_the_others_are_warm():
    starts = [30.0, 4.0, 5.0]
    (row,) = compare.summarise({"compile": [{"rates": [1.0], "startup_seconds": seconds} for seconds in starts]})
    assert (row["startup_seconds"], row["warm_seconds"]) == (30, 4.5)
    (row,) = compare.summarise({"compile": [{"rates": [1.0], "startup_seconds": 30.0}]})
    assert row["warm_seconds"] is None


def test_a_program_of_the_users_is_timed_without_its_start(monkeypatch, tmp_path):
    """Five seconds of start-up, then a millisecond a step."""
    now, commands = [0.0], []

    def run(words, **_):
        commands.append(words)
        now[0] += 5 + 0.001 * int(words[1])
        return SimpleNamespace(returncode=int(words[2] == "9"), stderr="no such seed")

    with monkeypatch.context() as patch:
        patch.setattr(compare.subprocess, "run", run)
        patch.setattr(compare, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        result = compare.measure_external("mine {steps} {seed} 'a b'", 1000, seed=3, slices=4)
        with pytest.raises(SystemExit, match="(?s)failed with 1:.*no such seed"):
            compare.measure_external("mine {steps} {seed}", 1000, seed=9, slices=4)
        with pytest.raises(SystemExit, match="give it more --steps"):
            compare.measure_external("mine 4 {seed} {steps}", 1000, seed=3, slices=4)
    assert commands[:2] == [["mine", "500", "3", "a b"], ["mine", "1000", "3", "a b"]]
    assert result["rates"] == [result["SPS"]] * 4 and result["SPS"] == pytest.approx(1000)
    for external, message in (
        ("mine=python mine.py", "say NAME=COMMAND"),
        ("x=nothing {steps}", "there is no program"),
    ):
        with pytest.raises(SystemExit, match=message):
            compare.main(compare.Args(("dqn",), external=(external,), out=tmp_path))
    with pytest.raises(SystemExit, match="the name of a mode"):
        compare.main(compare.Args(("dqn",), external=("eager=python {steps}",), out=tmp_path))


def test_the_first_run_of_the_users_program_does_not_count(monkeypatch, tmp_path):
    """It compiles for a minute, and finds its cache later; a step takes a millisecond."""
    lengths = []

    def run_external(command, steps, seed):
        lengths.append(steps)
        return 0.001 * steps + 60 * (len(lengths) == 1)

    monkeypatch.setattr(compare, "run_external", run_external)
    result = {"rates": [1.0], "startup_seconds": 0.0}
    monkeypatch.setattr(compare, "measure", lambda *turn, progress: [result] * len(turn))
    about = {"modes": ("eager",), "peers": False, "pairs": 2, "steps": 1000, "slices": 1, "out": tmp_path}
    compare.main(compare.Args(("dqn",), external=("mine=python {steps}",), **about))
    _, row = json.loads((tmp_path / "dqn.json").read_text())["modes"]
    assert lengths == [500, 500, 1000, 500, 1000] and row["sps"] == pytest.approx([1000] * 3)


def test_cuda_sh_has_parts_for_every_twin(tmp_path):
    """Its list of parts, as it is shown to whom names another; Python does nothing here."""
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "python3").chmod(0o755)
    process = subprocess.run(
        ["bash", ROOT / "benchmark" / "cuda.sh", tmp_path / "out", "nothing"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert process.returncode == 1
    error, _, parts = process.stdout.strip().rpartition("error: no part nothing; there are: ")
    twins = [name for name in CATALOG if f"{name}{TWIN}" in SCRIPTS]
    expected = {f"{what}-{name}" for what in ("tests", "resume", "learning", "speed") for name in twins}
    expected |= {"tests-others", "tests-ray", "tests-ranks", "speed-ppo_atari_multigpu"}
    assert set(parts.split()) == expected and len(twins) >= 10


def test_the_use_of_a_gpu_is_sampled_and_drawn(monkeypatch, tmp_path):
    """A stand-in for nvidia-smi says 40 and 60 % in turn."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho $((40 + 20 * ($(wc -l < "$0.log") % 2)))\necho "$@" >> "$0.log"\n')
    smi.chmod(0o755)
    (tmp_path / "nvidia-smi.log").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    samples, stop = [], threading.Event()
    sampler = threading.Thread(target=measure.sample_gpu, args=("GPU-1", samples, stop, 0.01))
    measure.MEASURING.set()
    sampler.start()
    while len(samples) < 4:
        time.sleep(0.01)
    measure.MEASURING.clear()
    stop.set()
    sampler.join()
    seconds, percent = zip(*samples)
    assert percent[:4] == (40, 60, 40, 60) and list(seconds) == sorted(seconds)
    assert all(line.endswith(" -i GPU-1") for line in (tmp_path / "nvidia-smi.log").read_text().splitlines())
    rows = [{"mode": "eager", "runs": [{"gpu_samples": [[10.0, 50.0], [12.0, 50.0]]}]}, {"mode": "sb3", "runs": [{}]}]
    plot.utilisation({"script": "sac", "modes": rows}, tmp_path / "gpu.png")
    assert plot.busy_seconds([[10.0, 50.0], [12.0, 50.0], [14.0, 100.0]]) == 1 + 1.5
    assert (tmp_path / "gpu.png").stat().st_size > 5000


def test_a_gpu_is_one_that_pytorch_can_use(monkeypatch, tmp_path):
    """A driver alone, as of a machine whose PyTorch is built for the CPU, is none."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert compare.gpu_names() == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def test_beside_a_gpu_its_use_is_drawn_and_jax_needs_it_as_well(capsys, monkeypatch, tmp_path):
    result = {"rates": [1.0], "startup_seconds": 0.0, "gpu_samples": [[1.0, 50.0], [3.0, 60.0]]}
    monkeypatch.setattr(compare, "measure", lambda *turn, progress: [result] * len(turn))
    monkeypatch.setattr(compare, "gpu_names", lambda: ["a GPU"])
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: name != "jax_cuda12_plugin")
    for peers in (True, False):
        compare.main(compare.Args(("ppo_device_env",), pairs=1, peers=peers, out=tmp_path))
        assert ("since JAX has no GPU here: pip install" in capsys.readouterr().out) == peers
        modes = [row["mode"] for row in json.loads((tmp_path / "ppo_device_env.json").read_text())["modes"]]
        assert modes == ["eager", "twin", "compile", "cudagraphs", "compile+cudagraphs"]
    assert (tmp_path / "ppo_device_env_gpu.png").stat().st_size > 5000


def test_sizes_reach_the_scripts_and_are_drawn(monkeypatch, tmp_path):
    """Each value of a size is run in both modes, by flags or in the source, and drawn."""
    seen = []

    def spied(*runs):
        results = []
        for run in runs:
            file = f"{run.script}{CATALOG[run.script].modes[run.mode][0]}.py"
            seen.append((run.mode, (run.folder / file).read_text(), run.flags, run.threads))
            results.append({"rates": [100.0] * 5, "startup_seconds": 1.0, "host_mb": 300.0, "device_mb": None})
        return results

    monkeypatch.setattr(scale, "measure", spied)
    for script in scale.SIZES:
        scale.main(scale.Args((script,), out=tmp_path))
        report = json.loads((tmp_path / f"{script}.json").read_text())
        plot.growth(report, tmp_path / "growth.png")
        assert (tmp_path / "growth.png").stat().st_size > 5000
        assert {(row["what"], row["value"]) for row in report["sizes"]} >= {("width", 1024), ("num_envs", 64)}
    wide = [source for _, source, *_ in seen if "nn.Linear(1024, 1024)" in source]
    assert len(wide) == 4  # both scripts, both modes
    full = [source for _, source, flags, _ in seen if "--buffer-size" in flags]
    assert len(full) == 6 and all(".fill_(1)\n" in source and "clamp(max=len(ring)" not in source for source in full)
    threads = [(source, threads) for _, source, _, threads in seen if threads]
    assert len(threads) == 8 and all(
        f"num_threads({n})" in source or "num_threads" not in source for source, n in threads
    )
    assert {flags for *_, flags, _ in seen} >= {("--num-envs", "64", "--num-steps", "32"), ("--num-envs", "4")}


def test_five_seeds_have_an_interquartile_mean():
    """The best and the worst quarter do not count: an outlier moves the mean and not this."""
    text = plot.many_seeds([1.0, 2.0, 3.0, 4.0, 1000.0])
    assert text.startswith("IQM 3.0 [")
    assert plot.many_seeds([1.0, 2.0, 3.0, 4.0]) == ""


def test_efficiency_is_that_of_adding_ranks_not_of_flags():
    runs = {"1 rank": 100.0, "2 ranks": 150.0, "1 rank, one bucket": 90.0, "2 ranks, one bucket": 162.0}
    runs |= {"1 rank, cudagraphs": 200.0, "2 ranks, cudagraphs": 300.0}
    rows = compare.summarise({mode: [{"rates": [rate], "startup_seconds": 0.0}] for mode, rate in runs.items()})
    assert [row["efficiency"] for row in rows] == [1, 0.75, 1, 0.9, 1, 0.75]
    assert [row["ratio"][0] for row in rows] == [1, 1.5, 0.9, 1.62, 2, 3]
    (alone,) = compare.summarise({"2 ranks": [{"rates": [1.0], "startup_seconds": 0.0}]})
    assert alone["efficiency"] is None
    (eager,) = compare.summarise({"eager": [{"rates": [1.0], "startup_seconds": 0.0}]})
    assert eager["efficiency"] is None


def test_communication_is_what_ranks_do_together(monkeypatch):
    clock = [0.0]

    def collective(*args):
        clock[0] += 2
        return args

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    group = SimpleNamespace(all_reduce=collective, all_gather_object=collective, barrier=collective)
    script = SimpleNamespace(DistributedDataParallel=object)
    seconds = measure.time_communication(script, group, SimpleNamespace(is_available=lambda: False))
    assert group.all_reduce(1, 2) == (1, 2)
    clock[0] += 5
    group.barrier()
    assert seconds() == 2
    group.all_gather_object()
    assert seconds() == 4


def test_communication_within_ddp_counts_and_changes_no_gradient(monkeypatch, own_folder):
    for name in ("all_reduce", "all_gather_object"):
        monkeypatch.setattr(dist, name, getattr(dist, name))  # to be undone
    dist.init_process_group("gloo", init_method=f"file://{own_folder}/ranks", rank=0, world_size=1)
    try:
        script = SimpleNamespace(DistributedDataParallel=DistributedDataParallel)
        seconds = measure.time_communication(script, dist, torch.cuda)
        layer = torch.nn.Linear(4, 3)
        model = script.DistributedDataParallel(layer)
        assert seconds() == 0
        before = time.perf_counter()
        model(torch.ones(2, 4)).sum().backward()
        assert 0 < seconds() < time.perf_counter() - before
        assert (layer.weight.grad == 2).all()
    finally:
        model = None
        dist.destroy_process_group()


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

    monkeypatch.setattr(compare.Run, "start", start)
    runs = [compare.Run("x", name, steps, "e", seed) for name, steps, seed in (("a", 3, 0), ("b", 1, code))]
    log = own_folder / "log"
    if code == 0:
        assert [result["rates"] for result in compare.measure(*runs)] == [[1.0] * 3, [1.0]]
        assert log.read_text().split("\n")[:-1] == ["a 0", "b 0", "a 1", "a 2"]
        with pytest.raises(SystemExit, match="killed of x failed with exit code -9"):
            compare.measure(*runs, compare.Run("x", "killed", 3, "e", 0))
    else:
        with pytest.raises(SystemExit, match="b of x failed with exit code 3"):
            compare.measure(*runs)
        assert log.read_text().split("\n")[:-1] == ["a 0", "b 0", "a left"]  # nobody stays behind


def test_the_clock_stands_still_in_others_turns(monkeypatch):
    """100 steps a second, an hour for the others after each slice: 20 slices, of which the warm-up is not one."""
    now = [0.0]

    def line():
        assert not measure.MEASURING.is_set()
        now[0] += 3600
        return "\n"

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(measure, "WAITED", [0.0])
    monkeypatch.setattr(measure.sys, "stdin", SimpleNamespace(readline=line))
    rates, on_report = measure.slices(measure.Args("x", "eager", 4000, "e", in_turns=True), 3)
    for steps in range(100, 4001, 100):
        now[0] += 1
        on_report(steps)
        assert measure.MEASURING.is_set() == (steps >= 300)
    assert rates == pytest.approx([100] * 19) and now[0] == pytest.approx(40 + 20 * 3600)


def test_a_run_in_one_piece_takes_no_turns(monkeypatch):
    monkeypatch.setattr(measure, "wait_for_turn", lambda: pytest.fail("players of its own would play on meanwhile"))
    rates, on_report = measure.slices(measure.Args("x", "eager", 4000, "e", in_turns=True, slices=1), 3)
    for steps in range(100, 4001, 100):
        on_report(steps)
    assert len(rates) == 1


def test_a_run_ends_when_it_has_been_measured_for_long_enough(monkeypatch):
    """100 steps a second: 2 reports of warm-up, then two slices of 5 seconds, and no more."""
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(measure, "WAITED", [0.0])
    rates, on_report = measure.slices(measure.Args("x", "eager", 10**6, "e", seconds=10, slices=2), 3)
    with pytest.raises(measure.Enough):
        for steps in range(100, 10**6, 100):
            now[0] += 1
            on_report(steps)
    assert rates == [100, 100] and steps == 1300 and not measure.MEASURING.is_set()


@pytest.mark.slow
def test_a_profile_says_where_the_time_of_a_step_goes(capsys, tmp_path):
    """A million steps would take minutes: the run ends when it has been measured for half a second."""
    about = {"modes": ("eager",), "pairs": 1, "steps": 1_000_000, "seconds": 0.5, "peers": False, "out": tmp_path}
    started = time.monotonic()
    compare.main(compare.Args(("dqn",), profile=True, **about))
    assert time.monotonic() - started < 60
    printed = capsys.readouterr()
    assert len(set(re.findall(r"^(\w+): +\d+%", printed.err.replace("\r", "\n"), re.MULTILINE))) == 1  # one bar
    names, numbers = printed.out.split("\nmicroseconds per env step\n")[1].splitlines()[:2]
    assert names.split()[:3] == ["mode", "act", "learn"]
    mode, *phases_of_a_step, together, simulator = numbers.split()
    assert mode == "eager" and len(phases_of_a_step) == 4 and float(phases_of_a_step[1]) > 0
    assert sum(map(float, phases_of_a_step)) == pytest.approx(float(together), abs=0.3)
    assert 0 < float(simulator) < float(together)


@pytest.mark.parametrize(("script", "mode"), [("ppo_device_env", "jax"), ("sac_continuous_action", "sbx")])
def test_jax_on_the_cpu_is_not_measured_beside_a_gpu(monkeypatch, script, mode):
    pytest.importorskip("jax")
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="PyTorch has a GPU here, and JAX has none"):
        patch.setattr(torch.cuda, "is_available", lambda: True)
        measure.main(measure.Args(script, mode, 1000, "CartPole-v1"))


def test_the_share_of_the_graphs_counts_calls_of_updates_alone(monkeypatch):
    """One graph of 2 ms called at each of 100 steps that take 8 ms, another that is no update: a quarter."""

    clock = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: sum(clock)))

    def graph(name: str, seconds: float):
        replay = SimpleNamespace(replay=lambda: clock.append(seconds))
        return SimpleNamespace(name=name, calls=100, graph=replay)

    graphs = [graph("update", 0.002), graph("act", 0.004)]
    assert measure.graph_share(graphs, 0.008, 100, lambda: None) == pytest.approx(0.25)
    assert measure.graph_share([], 0.008, 100, lambda: None) is None


def test_graphs_become_known():
    class Module:
        def __init__(self, function, warmup=2):
            self.function = function

        def __call__(self, *args):
            return self.function(*args)

    script = SimpleNamespace(CudaGraphModule=Module)
    graphs = measure.know_graphs(script)
    update = script.CudaGraphModule(lambda x: x + 1, warmup=3)
    assert update(1) == 2 and [(graph.name, graph.calls) for graph in graphs] == [("<lambda>", 1)]


@pytest.mark.slow
def test_compare_from_the_command_line(own_folder):
    command = [sys.executable, ROOT / "benchmark" / "compare.py", "ppo_continuous_action", "--pairs", "1"]
    flags = ["--steps", "10240", "--modes", "eager", "twin", "--no-peers", "--out", str(own_folder / "out")]
    process = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr
    assert "x eager" in process.stdout and "ppo_continuous_action.png" in process.stdout
    assert process.stdout.endswith("ppo_continuous_action_torchcompile.py   what makes it fast\n")
    report = json.loads((own_folder / "out" / "ppo_continuous_action.json").read_text())
    assert [row["mode"] for row in report["modes"]] == ["eager", "twin"]
    assert all(row["sps"][0] > 50 and 0 < row["env_share"] < 0.6 for row in report["modes"])
    assert (own_folder / "out" / "ppo_continuous_action.png").stat().st_size > 5000


def test_a_script_on_ray_is_measured_whose_simulators_are_elsewhere(own_folder):
    command = [sys.executable, ROOT / "benchmark" / "measure.py", "ppo_continuous_action_ray", "--mode", "eager"]
    command += ["--steps", "12288", "--slices", "1", "--env-id", "HalfCheetah-v4"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["SPS"] > 50 and result["env_share"] is None
    assert result["gpu_utilisation"] is None or result["gpu_samples"]


def test_the_documents_show_the_results():
    process = subprocess.run(
        [sys.executable, ROOT / "benchmark" / "plot.py", "--check"], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


def test_the_readme_shows_one_mode_and_not_the_luckiest(monkeypatch):
    speeds = {"eager": 100, "compile": 150, "compile+groups": 170, "compile+bf16": 300}
    rows = [
        {"mode": mode, "sps": [sps] * 3, "ratio": [sps / 100] * 3, "startup_seconds": 0}
        | {"runs": [{"rates": [sps, sps]}] * 3}
        for mode, sps in speeds.items()
    ]
    report = {"script": "ppo_atari_envpool", "env_id": "Breakout-v5", "modes": rows}
    monkeypatch.setattr(plot, "speed_reports", lambda folder: [report])
    assert "| 100 | **150** | 1.5 x | none measured | 0 steps |" in plot.best_block()
    rows[1]["ratio"] = [1.1, 0.9, 1.2]
    assert "| no gain shown |" in plot.best_block()
    assert sum(entry.in_readme for entry in CATALOG.values()) == 6
    report["script"] = "ppo_atari_ray"
    assert plot.best_block().count("\n") == 1  # the heading alone


def test_the_phases_show_the_median_simulator(capsys, monkeypatch, tmp_path):
    """The second of three runs has the median speed, the third the median simulator."""
    runs = iter([(100, 50), (200, 10), (300, 20)])

    def measured(run):
        microseconds, simulator = next(runs)
        return {"mode": run.mode, "microseconds": microseconds, "simulator": simulator} | dict.fromkeys(
            phases.PHASES, 7.04
        )

    monkeypatch.setattr(phases, "measure_phases", measured)
    phases.main(phases.Args(scripts=("dqn",), modes=("eager",), out=tmp_path))
    (row,) = json.loads((tmp_path / "dqn.json").read_text())["modes"]
    assert (row["microseconds"], row["simulator"]) == (200, 20)
    title, names, numbers = capsys.readouterr().out.strip().splitlines()
    assert title == "dqn, microseconds per env step" and names.split()[:3] == ["mode", "act", "learn"]
    assert numbers.split() == ["eager", "7.0", "7.0", "7.0", "7.0", "200", "20"]


@pytest.mark.parametrize("script", ["ppo_device_env", "ppo_atari_multigpu", "ppo_atari_ray"])
def test_a_script_without_phases_is_refused(capsys, monkeypatch, tmp_path, script):
    result = {"rates": [1.0], "startup_seconds": 0.0}
    monkeypatch.setattr(compare, "measure", lambda *turn, progress: [result] * len(turn))
    with pytest.raises(SystemExit, match=f"the loop of {script} has no phases"):
        phases.main(phases.Args(scripts=("dqn", script)))
    compare.main(compare.Args((script,), profile=True, peers=False, pairs=1, out=tmp_path))
    assert f"no --profile: the loop of {script} has no phases to measure.\n" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(compare.importlib.util, "find_spec", lambda name: name)
        compare.main(compare.Args(("dqn",), modes=("sb3",), profile=True, pairs=1, out=tmp_path))
    printed = capsys.readouterr().out
    assert "no phases" not in printed  # it has some; none of ours was chosen
    assert "What to try next" not in printed  # which names the peers


def test_the_returns_with_bf16_are_beside_those_without(monkeypatch, own_folder):
    """Three seeds each, and a run of another game and a longer one."""
    monkeypatch.setattr(plot, "RESULTS", own_folder)
    (own_folder / "curves").mkdir()
    runs = ["script,env_id,mode,seed,steps,episodic_return", "ppo_atari_envpool,Pong-v5,compile,1,150000,-20"]
    runs += ["ppo_atari_envpool,Breakout-v5,compile,1,1000000,100"]
    for mode, ends in (("compile", (1.0, 2.0, 3.0)), ("compile+bf16", (2.0, 3.0, 4.0))):
        runs += [f"ppo_atari_envpool,Breakout-v5,{mode},{seed},150000,{end}" for seed, end in enumerate(ends)]
        curve = [f"{seed},{episodic_return}" for seed, end in enumerate(ends) for episodic_return in (0, -2 * end)]
        path = own_folder / "curves" / f"ppo_atari_envpool__Breakout-v5__150000__{mode}.csv"
        path.write_text("\n".join(["seed,episodic_return", *curve]))
    (own_folder / "returns.csv").write_text("\n".join(runs))
    *_, ends, whole = plot.bf16_block().splitlines()
    assert ends.startswith("| of the last 100 episodes | 2.00 ± 1.00 (3 seeds) | 3.00 ± 1.00 (3 seeds) | 1.00 | ")
    assert whole.startswith("| over the whole run | -2.00 ± 1.00 (3 seeds) | -3.00 ± 1.00 (3 seeds) | -1.00 | ")
    low, high = map(float, ends.split("|")[-2].split(" to "))  # the mean of three has a deviation of 0.47 if drawn anew
    assert low == pytest.approx(1 - 1.96 * 0.47 * 2**0.5, abs=0.15) and high == pytest.approx(2 - low)


def test_the_early_returns_of_pong_are_those_of_each_seed(monkeypatch, own_folder):
    monkeypatch.setattr(plot, "RESULTS", own_folder)
    (own_folder / "curves").mkdir()
    curve = [
        "1,900000,9,-99",
        "1,925000,1,-10",
        "1,1000000,3,-14",
        "2,1000000,1,-20",
        "2,2500000,1,9",
        "1,2500000,1,10",
    ]
    path = own_folder / "curves" / "ppo_atari_envpool__Pong-v5__2500000__compile-annealed-over-10M.csv"
    path.write_text("\n".join(["seed,step,episodes,episodic_return", *curve]))
    *_, early, late = plot.pong_block().splitlines()
    assert early.startswith("| 1,000,000 | -13.0, -20.0 | ")  # means over episodes, in the order of seeds
    assert late.startswith("| 2,500,000 | 10.0, 9.0 | ")


def test_runs_of_other_lengths_have_curves_of_their_own(monkeypatch, own_folder):
    """A run as often as its length is new."""

    def train(command, cwd, check, env):
        total_timesteps = int(command[command.index("--total-timesteps") + 1])
        with SummaryWriter(f"{cwd}/runs/x") as writer:
            for step in (8, total_timesteps // 2, total_timesteps):
                writer.add_scalar("charts/episodic_return", step / 1000, step)
        with open(f"{cwd}/runs/x/summary.json", "w") as file:
            json.dump({"metrics": {"episodic_return": total_timesteps / 1000}}, file)

    monkeypatch.setattr(returns.subprocess, "run", train)
    monkeypatch.setattr(returns, "machine", lambda: dict.fromkeys(("gpu", "cpu", "torch", "commit"), "x"))
    monkeypatch.setattr(plot, "RESULTS", own_folder)
    for total_timesteps in (2000, 4000, 2000):
        returns.main(
            returns.Args("ppo_atari_envpool", ("Pong-v5",), (1,), total_timesteps=total_timesteps, out=own_folder)
        )
    for total_timesteps in (2000, 4000):
        curve = plot.read_csv(own_folder / f"curves/ppo_atari_envpool__Pong-v5__{total_timesteps}__compile.csv")
        assert [int(row["step"]) for row in curve] == [total_timesteps // 100, total_timesteps // 2, total_timesteps]
        assert float(curve[-1]["episodic_return"]) == total_timesteps / 1000
    assert [row["steps"] for row in plot.read_csv(own_folder / "returns.csv")] == ["2000", "4000"]
    plot.curves(own_folder / "x.png")
    assert {beside for *_, beside in plot.return_rows()} == {""}  # what is published took 10,000,000 steps


def test_compiling_pays_when_the_start_up_is_made_up_for():
    """By the ratio of slices beside each other: the median speeds, of other moments, may say otherwise."""
    eager = {"sps": [100.0] * 3, "startup_seconds": -1.0, "ratio": [1.0] * 3, "runs": [{"rates": [100.0, 50.0]}]}
    compiled = {"sps": [90.0] * 3, "startup_seconds": 50.0, "ratio": [2.0, 1.9, 2.1]}
    compiled["runs"] = [{"rates": [200.0, 100.0]}]
    assert plot.pays_after(compiled, eager) == 10_000  # 100 s, or 50 s after a start of 50 s
    assert plot.against(compiled, eager) == 2
    assert plot.pays_after(compiled | {"ratio": [1.1, 0.9, 1.3]}, eager) is None  # perhaps it is slower
    assert plot.pays_after(compiled | {"startup_seconds": None}, eager) is None  # a program of the user's


def test_a_table_leaves_out_columns_without_a_value():
    shown = plot.table(["mode", "warm", "cold", "note"], [("eager", "-", "-", ""), ("compile", "-", "9 s", "")])
    assert shown == "| mode | cold |\n|---|---|\n| eager | - |\n| compile | 9 s |"
    assert plot.table(["mode", "warm"], []) == "| mode | warm |\n|---|---|"


def test_an_ablation_is_shown_while_its_patch_is_there(monkeypatch):
    rows = [{"variant": name, "ratio": [0.5, 0.4, 0.6]} for name in ("without perf[ring]: gone", "tried: max-autotune")]
    monkeypatch.setattr(plot, "speed_reports", lambda folder: [{"script": "dqn", "variants": rows}])
    assert [row["variant"] for _, row in plot.ablation_rows()] == ["tried: max-autotune"]
    assert plot.gain_block("ring") == "**Gain:** not measured yet."


def test_a_gain_is_a_figure_if_its_interval_leaves_out_one(monkeypatch):
    ratios = {"dqn": [0.5, 0.4, 0.6], "dqn_lru": [0.9, 0.8, 1.0], "ppo_lru": [1.25, 1.1, 1.3]}
    rows = [(script, {"variant": "without perf[cpp]", "ratio": ratio}) for script, ratio in ratios.items()]
    monkeypatch.setattr(plot, "ablation_rows", lambda: rows)
    assert plot.gain_block("cpp") == "**Gain:** 2.00 x (dqn), 0.80 x (ppo_lru), none shown (dqn_lru)."


def test_a_table_of_speed_says_how_long_and_on_what_it_was_measured(monkeypatch):
    machine = {"gpu": None, "cpu": "a CPU", "cores": 2, "torch": "2", "date": "today", "commit": "1"}
    row = {"mode": "eager", "sps": [1.0] * 3, "ratio": [1.0] * 3, "host_mb": 1.0, "env_share": None, "threads": 1.0}
    rows = [row | {"runs": [{"rates": [1.0]}]}, row | {"mode": "sbx", "threads": 2.0}]
    report = {"script": "dqn", "env_id": "e", "steps": 1000, "seconds": None, "machine": machine, "modes": rows}
    monkeypatch.setattr(plot, "speed_reports", lambda folder: [report])
    for row in rows[1:]:
        row |= {"runs": [{"rates": [1.0]}]}
    assert "1,000 steps a run, 1 turn (a CPU, 2 cores, torch 2," in plot.speed_block()
    rows[1]["threads"], report["seconds"] = 1.0, 30.0
    heading = "at most 1,000 steps and 30 s a run, 1 turn (a CPU, 2 cores, one thread a process, torch 2,"
    assert heading in plot.speed_block()


def test_the_page_names_the_scripts_whose_default_run_is_too_short_to_compile():
    short = set()
    for report in plot.speed_reports("cpu"):
        modes = {row["mode"]: row for row in report["modes"]}
        if "eager" in modes:
            after = plot.pays_after(modes["compile"], modes["eager"])
            default = load(f"{report['script']}{TWIN}").Args().total_timesteps
            short |= {report["script"]} if after is None or after > default else set()
    page = (ROOT / "docs" / "faq.md").read_text()
    page = page[page.index("## When does compiling not pay?") : page.index("## Why not")]
    assert short and short == {name for name in CATALOG if f"`{name}`" in page}


def test_the_returns_stand_in_the_order_of_the_catalog(monkeypatch, own_folder):
    monkeypatch.setattr(plot, "RESULTS", own_folder)
    runs = [
        "dqn,CartPole-v1,compile,1,500000,9",
        "td3_continuous_action,HalfCheetah-v4,no-memory,1,200000,9",
        "td3_continuous_action,HalfCheetah-v4,compile,10,200000,9",
        "td3_continuous_action,HalfCheetah-v4,compile,2,200000,9",
        "td3_continuous_action,HalfCheetah-v4,compile,1,90000,9",
        "td3_continuous_action,HalfCheetah-v4,eager,1,200000,9",
    ]
    (own_folder / "returns.csv").write_text("\n".join(["script,env_id,mode,seed,steps,episodic_return", *runs]))
    shown = [(script, steps, mode, seeds) for script, _, steps, mode, seeds, *_ in plot.return_rows()]
    assert shown == [
        ("td3_continuous_action", "90,000", "compile", "1"),
        ("td3_continuous_action", "200,000", "eager", "1"),
        ("td3_continuous_action", "200,000", "compile", "2 10"),
        ("td3_continuous_action", "200,000", "no-memory", "1"),
        ("dqn", "500,000", "compile", "1"),
    ]


def test_the_race_is_drawn_from_its_own_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    (tmp_path / "race" / "curves").mkdir(parents=True)
    (tmp_path / "race" / "returns.csv").write_text("mode,device\ncompile,a processor\n")
    for mode in ("compile", "eager", "sbx"):
        path = tmp_path / "race" / "curves" / f"ppo_continuous_action__HalfCheetah-v4__1000000__{mode}.csv"
        path.write_text("seed,step,seconds,episodes,episodic_return\n1,10000,60.0,9,5.0\n1,20000,120.0,9,7.0\n")
    plot.race(tmp_path / "race.png")
    assert (tmp_path / "race.png").stat().st_size > 5000


def test_the_curve_of_a_peer_is_that_of_its_monitor(monkeypatch, tmp_path):
    """As many threads as the trial found best, and the episodes that its Monitor has written."""
    (tmp_path / "0.monitor.csv").write_text("#{}\nr,l,t\n1.5,100,2.0\n2.5,50,3.0\n")
    seen = []
    monkeypatch.setattr(returns, "best_threads", lambda run: 1)
    monkeypatch.setattr(returns.subprocess, "run", lambda command, env, check: seen.append((command, env)))
    step, seconds, value, last = returns.run_peer("dqn", "CartPole-v1", 3, "sbx", 5000, str(tmp_path), None)
    assert (step.tolist(), seconds.tolist(), value.tolist(), last) == ([100, 150], [2, 3], [1.5, 2.5], 2)
    ((command, env),) = seen
    assert env["OMP_NUM_THREADS"] == "1" and "eigen=false intra_op_parallelism_threads=1" in env["XLA_FLAGS"]
    args = tyro.cli(measure.Args, args=command[4:])
    assert (args.mode, args.steps, args.seed, args.monitor) == ("sbx", 5000, 3, str(tmp_path))


def test_what_a_run_asks_for_reaches_the_process():
    run = compare.Run("sac_continuous_action", "compile", 5000, "Pendulum-v1", 2, slices=5, seconds=3.0)
    run.flags = ("--num-envs", "64", "--batch-size", "32")
    args = tyro.cli(measure.Args, args=run.command()[4:])
    assert (args.script, args.mode, args.steps, args.env_id, args.seed) == (
        run.script,
        "compile",
        5000,
        "Pendulum-v1",
        2,
    )
    assert (args.slices, args.seconds, args.in_turns) == (5, 3.0, True)
    assert tuple(shlex.split(args.flags)) == run.flags


def test_a_block_is_replaced_and_nothing_else(monkeypatch, own_folder):
    """Empty, filled, and filled again: the text around and between the blocks stays."""
    document = own_folder / "x.md"
    document.write_text("a\n<!-- one -->\n<!-- end -->\nb\n<!-- two -->\nold\n<!-- end -->\nc\n")
    monkeypatch.setattr(plot, "ROOT", own_folder)
    monkeypatch.setattr(plot, "DOCUMENTS", [document])
    monkeypatch.setattr(plot, "BLOCKS", {"one": lambda: "| 1 |\n| 1 |", "two": lambda: "| 2 |"})
    monkeypatch.setattr(plot, "bars", lambda *args: None)
    monkeypatch.setattr(plot, "curves", lambda *args: None)
    monkeypatch.setattr(plot, "race", lambda *args: None)
    monkeypatch.setattr(plot, "growth", lambda *args: None)
    with pytest.raises(SystemExit, match="x.md"):
        plot.main(check=True)
    for _ in range(2):
        plot.main(check=False)
        assert document.read_text() == (
            "a\n<!-- one -->\n| 1 |\n| 1 |\n<!-- end -->\nb\n<!-- two -->\n| 2 |\n<!-- end -->\nc\n"
        )


def test_every_block_of_the_documents_is_known():
    text = "".join(path.read_text() for path in plot.DOCUMENTS)
    assert text.count("<!-- end -->") == sum(text.count(f"<!-- {name} -->") for name in plot.BLOCKS) >= 3


def test_a_published_return_is_of_the_same_algorithm_and_says_whose():
    """CleanRL's JAX script of Atari ends elsewhere than its PyTorch one."""
    rows = plot.read_csv(ROOT / "benchmark" / "published.csv")
    assert rows and all(row["source"] == f"CleanRL's {row['script']}.py" for row in rows)
    shown = {beside for *_, beside in plot.return_rows()}
    assert all(beside.endswith(".py)") for beside in shown if beside)


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


def test_a_number_of_threads_binds_every_run_to_as_many_cores(monkeypatch, tmp_path):
    """And no trial chooses another number for JAX."""
    bound, runs = [], []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(list(cores)))

    def measured(*turn, progress=None):
        runs.extend(turn)
        return [{"rates": [1.0, 1.0], "startup_seconds": 0.0} for _ in turn]

    monkeypatch.setattr(compare, "measure", measured)
    monkeypatch.setattr(compare, "text_table", lambda rows: "")
    compare.main(compare.Args(scripts=("ppo_device_env",), pairs=1, threads=2, out=tmp_path))
    assert bound == [[2, 5]] and {run.threads for run in runs} == {2}
    assert {run.mode for run in runs} == {"eager", "twin", "compile", "jax"}
    assert "intra_op_parallelism_threads=2" in runs[0].environment()["XLA_FLAGS"]
    compare.main(compare.Args(scripts=("ppo_device_env",), pairs=1, peers=False, modes=("eager",), out=tmp_path))
    assert len(bound) == 1 and runs[-1].threads is None
