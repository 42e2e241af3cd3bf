"""Faults that users met or would have met: one small test for each."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import local_ray
import numpy as np
import pytest
import torch
import yaml
from catalog import row
from conftest import DISCRETE, GYM, ROOT, forked, load, tiny, train

SOURCES = {name: (ROOT / "leanrl" / f"{name}.py").read_text() for name in GYM}
SCRIPTS = [name for name, source in SOURCES.items() if "From here on, every script is the same" in source]
PLAIN = [name for name in SCRIPTS if not name.endswith("_torchcompile")]
RAY = "ppo_continuous_action_ray"  # its workers step the envs, here in one process
SQUASHED = [name for name in PLAIN if "sac" in name or "td3" in name]
SAC = load("sac_continuous_action")  # whose shared part is that of all
PPO = load("ppo_continuous_action")


class OddEnv(gym.Env):
    """Draws from generators that are not its own, and may write anything into its infos, as envs may."""

    observation_space = gym.spaces.Box(-10, 10, (3,))
    infos: list[dict] = [{}]  # in turn
    seeds: list[int] = []
    seen: list[list[float]] = []
    returns: list[float] = []

    def __init__(self, discrete: bool, pay: float = 1):
        self.action_space = gym.spaces.Discrete(3) if discrete else gym.spaces.Box(-1, 1, (2,))
        self.pay = pay

    def observe(self) -> np.ndarray:
        drawn = [np.random.normal(), random.gauss(0, 1), np.ravel(self.action_space.sample())[0]]  # noqa: NPY002
        self.seen.append(drawn)
        return np.array(drawn, np.float32).clip(-10, 10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds += [] if seed is None else [seed]
        self.rewards = []
        return self.observe(), dict(self.infos[len(self.seen) % len(self.infos)])

    def step(self, action):
        self.rewards.append(self.pay * (1 + 0.1 * len(self.seen) % 1))
        over = len(self.rewards) == 7
        self.returns += [sum(self.rewards)] if over else []
        return self.observe(), self.rewards[-1], over, False, dict(self.infos[len(self.seen) % len(self.infos)])


class SmallBoxEnv(gym.Env):
    """Pays most for an action of 0.4 times the bound."""

    observation_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, bound: float):
        self.action_space = gym.spaces.Box(-bound, bound, (1,))
        self.bound = bound

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.ones(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.ones(2, np.float32), -((action.item() / self.bound - 0.4) ** 2), False, self.steps == 50, {}


class FarBoxEnv(SmallBoxEnv):
    """Takes actions far from zero."""

    acted: list[float] = []

    def __init__(self):
        super().__init__(10)
        self.action_space = gym.spaces.Box(5, 10, (1,))

    def step(self, action):
        self.acted.append(action.item())
        return super().step(action)


class LargeEnv(gym.Env):
    """Observes large numbers that differ by little, such as coordinates of a map."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 4.6e6 + self.np_random.normal(size=2), {}

    def step(self, action):
        return 4.6e6 + self.np_random.normal(size=2), 0.0, False, self.np_random.random() < 0.1, {}


class NewSpace(gym.Space):
    """A space that Gymnasium does not know."""


class UnfitEnv(gym.Env):
    """Has spaces that no script takes."""

    def __init__(self, obs: gym.Space | None = None, action: gym.Space | None = None, discrete: bool = False):
        self.observation_space = obs or gym.spaces.Box(-1, 1, (2,))
        self.action_space = action or (gym.spaces.Discrete(3) if discrete else gym.spaces.Box(-1, 1, (2,)))


UNFIT = {
    "ImageInDict": {
        "obs": gym.spaces.Dict(
            {"image": gym.spaces.Box(0, 255, (84, 84, 3), np.uint8), "speed": gym.spaces.Box(-1, 1, (2,))}
        )
    },
    "IntegerActions": {"action": gym.spaces.Box(-3, 3, (2,), np.int64)},
    "Graph": {"obs": gym.spaces.Graph(gym.spaces.Box(-1, 1, (2,)), None)},
    "NewSpace": {"obs": NewSpace((2,), np.float32)},
}

for prefix, discrete in (("", False), ("Discrete", True)):
    gym.register(f"{prefix}Odd-v0", entry_point=OddEnv, kwargs={"discrete": discrete}, disable_env_checker=True)
    for case, spaces in UNFIT.items():
        settings = {"kwargs": spaces | {"discrete": discrete}, "disable_env_checker": True}
        gym.register(f"{prefix}{case}-v0", entry_point=UnfitEnv, **settings)
gym.register("SmallBox-v0", entry_point=SmallBoxEnv, disable_env_checker=True)
gym.register("FarBox-v0", entry_point=FarBoxEnv, disable_env_checker=True)
gym.register("Large-v0", entry_point=LargeEnv, disable_env_checker=True)


@pytest.fixture
def odd(monkeypatch):
    """The class with empty records."""
    for name in ("seeds", "seen", "returns"):
        monkeypatch.setattr(OddEnv, name, [])
    return OddEnv


def env_of(name: str, env_id: str) -> str:
    return f"Discrete{env_id}-v0" if name in DISCRETE else f"{env_id}-v0"


def run(monkeypatch, name: str, **flags) -> dict[str, float]:
    """Trains past two checkpoints, in a folder that stays below runs/."""
    script = load(name)
    monkeypatch.setattr(script, "REPORT_INTERVAL", 100, raising=False)
    sizes = tiny(name) | row(name).saving | {"env_id": env_of(name, "Odd")}
    sizes |= {"num_workers": 2} if name == RAY else {"num_envs": 2}
    monkeypatch.setitem(sys.modules, "ray", local_ray)
    return script.train(script.Args(**sizes | {"cuda": False, "save_model": False} | flags))


def newest(pattern: str) -> Path:
    return max(Path("runs").glob(f"*/{pattern}"), key=os.path.getmtime)


def refused(capsys, function, *args, **flags) -> str:
    """The one line with which it ends, with exit code 2."""
    with pytest.raises(SystemExit) as exit:
        function(*args, **flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and line.startswith("error: ")
    return line


@pytest.mark.parametrize("name", [*PLAIN, RAY])
def test_an_info_with_the_key_episode_is_the_envs_own(monkeypatch, odd, name):
    """Gymnasium's RecordEpisodeStatistics fails on it, or takes it for its own."""
    monkeypatch.setattr(odd, "infos", [{"episode": value} for value in ("a word", 7, None, {"r": 1e6, "l": 3}, {})])
    metrics = run(monkeypatch, name, checkpoint_interval=0)
    assert len(odd.returns) > 10 and metrics["episodic_return"] == pytest.approx(np.mean(odd.returns[-100:]))


@pytest.mark.parametrize("name", [*PLAIN, RAY])
def test_simulators_can_take_the_seeds_of_a_run(monkeypatch, odd, name):
    """At the start and at a checkpoint, of two envs."""
    run(monkeypatch, name, seed=2**40)
    assert len(set(odd.seeds)) == len(odd.seeds) >= 6
    assert all(0 <= seed < 2**31 for seed in odd.seeds)


def test_no_two_envs_share_a_stream(odd):
    """Of one run or of runs of other seeds, at the start and at a checkpoint; with 31 bits, chance may join two."""
    spaces = []
    for seed, step in itertools.product([0, 1, 2, 3, 299_999, 300_000, 300_001, 2**40, 2**40 + 1], [0, 1000, 2000]):
        envs = [gym.make("Odd-v0") for _ in range(5)]
        SAC.start_anew(seed, step, envs)
        spaces += [env.unwrapped.action_space.sample().tobytes() for env in envs]
    assert len(set(odd.seeds)) == len(set(spaces)) == len(odd.seeds) == 9 * 3 * 5
    assert all(0 <= seed < 2**31 for seed in odd.seeds)


@pytest.mark.parametrize("name", ["sac_continuous_action", "ppo_continuous_action"])
def test_an_env_may_draw_from_global_generators(monkeypatch, odd, name):
    """It observes nothing but draws. Those of a run and those of its seed are the same, after a resume, too."""

    def seen(**flags) -> list[list[float]]:
        monkeypatch.setattr(odd, "seen", [])
        run(monkeypatch, name, **flags)
        return odd.seen

    whole = seen()
    total, interval = (row(name).saving[key] for key in ("total_timesteps", "checkpoint_interval"))
    part = seen(total_timesteps=total - interval)
    resumed = seen(resume="auto")  # with more steps than before
    assert len(resumed) < 0.6 * len(whole) and whole == part[: len(whole) - len(resumed)] + resumed
    assert not np.isin(seen(seed=2), whole).any(0)[:2].any()


def save(name: str, **flags) -> Path:
    """A checkpoint of a run with these flags, in a folder with a name."""
    args = SAC.Args(**flags)
    run_dir = Path("runs") / f"{SAC.run_prefix(args)}{name}"
    run_dir.mkdir(parents=True)
    SAC.save_checkpoint(run_dir, args, {"step": int(name)})
    return run_dir / "checkpoint.pt"


def test_auto_skips_checkpoints_of_other_settings(capsys):
    path = save("2", gamma=0.9)
    os.utime(save("1"), (1e9, 1e9))  # older
    assert SAC.load_checkpoint(SAC.Args(resume="auto"))["step"] == 1
    skipped, taken = capsys.readouterr().err.splitlines()
    assert skipped.startswith(f"warning: cannot resume from {path}: ") and "gamma 0.9" in skipped
    assert taken.startswith("resuming runs/")
    assert "gamma 0.9" in refused(capsys, SAC.load_checkpoint, SAC.Args(resume=str(path)))
    assert SAC.load_checkpoint(SAC.Args(resume="auto", gamma=0.9, total_timesteps=2_000_000))["step"] == 2


def test_auto_takes_what_was_written_last(capsys):
    """A folder's name tells when the run began, by a clock that may have been wrong. The user is told which it is."""
    for name, changed in (("1", 3e8), ("2", 9e8), ("3", 5e8)):
        os.utime(save(name), (changed, changed))
    assert SAC.load_checkpoint(SAC.Args(resume="auto"))["step"] == 2
    assert re.fullmatch(r"resuming runs/.*2/checkpoint.pt\n", capsys.readouterr().err)


@pytest.fixture
def parse(monkeypatch):
    """What run_until_signal makes of a command line; the handlers of signals are restored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]

    def parsed(name: str, *flags: str):
        monkeypatch.setattr(sys, "argv", [f"leanrl/{name}.py", *flags])
        got = []
        load(name).run_until_signal(lambda args, signals: got.append(args))
        return got[0]

    yield parsed
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


FLAGS = {  # words of a command line, and what they mean
    "--cuda False": {"cuda": False},
    "--cuda=false --track False": {"cuda": False, "track": False},
    "--track=False": {"track": False},
    "--anneal_lr=true": {"anneal_lr": True},
    "--anneal-lr False": {"anneal_lr": False},
    "--norm_adv=False --clip_vloss True": {"norm_adv": False, "clip_vloss": True},
    "--no-cuda": {"cuda": False},
    "--cuda --no-track": {"cuda": True, "track": False},
    "--exp-name false-start --seed 3": {"exp_name": "false-start", "seed": 3},
}


@pytest.mark.parametrize("words", FLAGS)
def test_flags_may_be_written_as_for_cleanrl(parse, words):
    args = parse("ppo_continuous_action", *words.split())
    assert {name: getattr(args, name) for name in FLAGS[words]} == FLAGS[words]


def test_a_sweep_of_wandb_runs(parse):
    """Each command line of the file in the FAQ, as wandb's agent writes them."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "faq.md").read_text(), re.DOTALL)
    sweep = yaml.safe_load(text)
    choices = {name: setting.get("values", [setting.get("value")]) for name, setting in sweep["parameters"].items()}
    assert {True, False} in [set(values) for values in choices.values()]
    for values in itertools.product(*choices.values()):
        args = parse(Path(sweep["program"]).stem, *(f"--{name}={value}" for name, value in zip(choices, values)))
        assert [getattr(args, name) for name in choices] == list(values)


def signalled(number: int, is_ignored: bool):
    """Trains in this process, which gets the signal in its first report."""
    if is_ignored:
        signal.signal(number, signal.SIG_IGN)  # as nohup does
    report = SAC.report

    def report_and_kill(*args):
        SAC.report = report
        os.kill(os.getpid(), number)
        return report(*args)

    SAC.report = report_and_kill
    flags = "--no-cuda --no-save-model --env-id Pendulum-v1 --learning-starts 450 --total-timesteps 600 --batch-size 8"
    sys.argv = ["leanrl/sac_continuous_action.py", *flags.split()]
    SAC.run_until_signal(SAC.train)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_saves_a_checkpoint(fork_server, number):
    """That of SLURM before the time is up, and that of a terminal that is closed."""
    ((code, output),) = forked(signalled, (number, False))
    assert code == 128 + number and output.splitlines()[-1] == "to go on, add --resume auto"
    assert output.splitlines()[0] == f"run folder: {newest('checkpoint.pt').parent}"
    assert torch.load(newest("checkpoint.pt"), weights_only=True)["step"] == 500


def test_nohup_keeps_a_run_alive(fork_server):
    ((code, output),) = forked(signalled, (signal.SIGHUP, True))
    assert code == 0, output
    assert not list(Path("runs").glob("*/checkpoint.pt"))
    assert json.loads(newest("summary.json").read_text())["metrics"]["global_step"] == 600


@pytest.mark.slow
@pytest.mark.parametrize("name", SQUASHED)
def test_the_best_action_in_a_small_box_is_found(monkeypatch, name):
    rates = {"policy_lr": 2e-3, "q_lr": 2e-3} if "sac" in name else {"learning_rate": 2e-3}
    flags = {"env_id": "SmallBox-v0", "env_kwargs": '{"bound": 0.01}', "num_envs": 1, "gamma": 0.0, "save_model": True}
    flags |= {"total_timesteps": 1500, "learning_starts": 200, "batch_size": 32, "buffer_size": 3000}
    run(monkeypatch, name, **flags | rates, checkpoint_interval=0)
    policy = torch.export.load(newest("policy.pt2")).module()
    assert policy(torch.ones(1, 2)).item() == pytest.approx(0.004, abs=0.001)


@pytest.mark.parametrize("name", SQUASHED)
def test_the_networks_do_not_see_how_large_a_box_is(monkeypatch, name):
    """The same bits are learned in a box of +-1 and in one of +-2^-7: what they multiply by rounds nothing."""
    flags = tiny(name) | row(name).saving | {"env_id": "SmallBox-v0"}
    small, one = (train(monkeypatch, name, **flags, env_kwargs=f'{{"bound": {b}}}').parameters for b in (2**-7, 1))
    assert all(torch.equal(small[key], one[key]) for key in one)


@pytest.mark.parametrize("name", ["ppo_continuous_action", RAY])
def test_ppo_begins_in_the_middle_of_a_box(monkeypatch, name):
    """Unscaled, a Gaussian around 0 would be clipped to the nearer bound; so would the policy that is exported."""
    monkeypatch.setattr(FarBoxEnv, "acted", [])
    run(monkeypatch, name, env_id="FarBox-v0", learning_rate=0.0, save_model=True)
    assert np.mean(FarBoxEnv.acted) == pytest.approx(7.5, abs=0.3) and np.std(FarBoxEnv.acted) > 1
    policy = torch.export.load(newest("policy.pt2")).module()
    assert policy(torch.ones(1, 2)).item() == pytest.approx(7.5, abs=0.2)


COMPILERS_WORDS = {
    "no compiler": ({"CXX": "/nowhere/g++"}, ["InvalidCxxCompiler: No working C++ compiler found"]),
    "a space": ({"TORCHINDUCTOR_CACHE_DIR": "a folder"}, ["CppCompileError: ", "is the same as output file"]),
}


@pytest.mark.parametrize("case", ["no compiler", pytest.param("a space", marks=pytest.mark.long)])
def test_the_faq_has_the_words_of_the_compilers_errors(monkeypatch, own_folder, case):
    variables, words = COMPILERS_WORDS[case]
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(own_folder)} | variables
    code = "import torch; torch.compile(torch.sin)(torch.ones(3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 1 and all(word in done.stderr for word in words)
    headings = re.findall("## (.+)", (ROOT / "docs" / "faq.md").read_text())
    assert any(all(word in heading for word in words) for heading in headings)


def test_statistics_begin_with_the_first_row():
    """Not with a made-up one of mean 0, against which large numbers that differ by little would look alike."""
    rows = 4.6e6 + np.random.default_rng(1).normal(size=(50, 1, 2))
    stats = np.zeros((4, 2))
    normalized = [PPO.normalize_obs(stats, row)[0] for row in rows]
    assert normalized[0].tolist() == [0, 0]
    for i in range(1, 50):
        seen = rows[: i + 1, 0]
        assert normalized[i] == pytest.approx((seen[-1] - seen.mean(0)) / seen.std(0), abs=1e-4)


@pytest.mark.parametrize("name", ["ppo_continuous_action", RAY])
def test_a_policy_takes_numbers_of_both_precisions(monkeypatch, name):
    """The program is exported once; large numbers need float64 to be told apart."""
    flags = {"save_model": True, "learning_rate": 0.01}
    run(monkeypatch, name, env_id="Odd-v0", **flags)
    policy = torch.export.load(newest("policy.pt2")).module()
    obs = torch.randn(64, 3)
    assert torch.allclose(policy(obs).float(), policy(obs.double()).float(), atol=1e-6)
    run(monkeypatch, name, env_id="Large-v0", **flags)
    program = torch.export.load(newest("policy.pt2"))
    assert program.example_inputs[0][0].dtype == torch.float64  # as play.py gives them
    mean, std = (program.state_dict[name] for name in ("mean", "std"))
    z = torch.randn(64, 2, dtype=torch.float64)
    action = program.module()(mean + std * z)
    layers = PPO.mlp(2, 1, 1.0)
    layers.load_state_dict({k.removeprefix("actor_mean."): v for k, v in program.state_dict.items() if "actor" in k})
    assert torch.allclose(action.float(), layers(z.float().clip(-10, 10)).clip(-1, 1), atol=1e-5)
    assert action.std() > 1e-3  # float32 would leave of z what is a multiple of 0.5


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("name", [*PLAIN, RAY])
def test_spaces_that_do_not_fit_are_refused(monkeypatch, capsys, name, case):
    line = refused(capsys, run, monkeypatch, name, env_id=env_of(name, case))
    assert env_of(name, case) in line and not Path("runs").exists()


@pytest.mark.parametrize("kwargs", ["{pay: 1}", '{"unknown": 1}', "[1]", "3", ""])
@pytest.mark.parametrize("name", PLAIN)
def test_settings_of_an_env_are_checked(monkeypatch, capsys, name, kwargs):
    assert f"with {kwargs}: " in refused(capsys, run, monkeypatch, name, env_kwargs=kwargs)


@pytest.mark.parametrize("name", PLAIN)
def test_settings_of_an_env_reach_it_and_the_card(monkeypatch, odd, name):
    run(monkeypatch, name, env_kwargs='{"pay": -1000}', save_model=True, checkpoint_interval=0)
    assert odd.returns and max(odd.returns) <= -7000
    texts = {"card.json": ""}
    torch.export.load(newest("policy.pt2"), extra_files=texts)
    assert json.loads(texts["card.json"])["args"]["env_kwargs"] == '{"pay": -1000}'


@pytest.mark.parametrize("name", PLAIN)
def test_a_resumed_run_goes_on_in_its_run_of_wandb(monkeypatch, name):
    started = []
    fake = SimpleNamespace(init=lambda **names: started.append(names), run=SimpleNamespace(id="r2d2"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    interval = row(name).saving["checkpoint_interval"]
    run(monkeypatch, name, track=True, total_timesteps=interval)
    assert torch.load(newest("checkpoint.pt"), weights_only=True)["wandb_id"] == "r2d2"
    run(monkeypatch, name, track=True, total_timesteps=2 * interval, resume="auto")
    assert [names["id"] for names in started] == [None, "r2d2"] and started[1]["resume"] == "allow"


@pytest.mark.parametrize("name", ["ppo_torchcompile", "ppo_continuous_action_torchcompile", "dqn_torchcompile"])
def test_a_network_that_was_changed_in_one_place_only_is_noticed(monkeypatch, name):
    """The twin acts in NumPy: another activation in the network alone would train on actions of another policy."""
    script = load(name)
    monkeypatch.setattr(torch.nn, "Tanh", torch.nn.ReLU)
    monkeypatch.setattr(torch.nn, "ReLU", torch.nn.SiLU)
    monkeypatch.setattr(torch.Tensor, "relu", torch.nn.functional.silu)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        script.train(script.Args(**tiny(name), cuda=False))
