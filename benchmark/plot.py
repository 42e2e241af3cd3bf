"""Draws what benchmark/results holds, and writes its numbers into README.md and docs/.

    python benchmark/plot.py            # results/*.png, and every block between <!-- NAME --> and <!-- end -->
    python benchmark/plot.py --check    # change nothing; exit code 1 if a block does not show the results

A block is one of the functions in BLOCKS. A measured number outside of blocks says "by hand".
"""

import csv
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

from catalog import CATALOG, JAX

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS, PEER = "#2b6cb0", "#a0aec0"
COLORS = {"eager": "#c05621", "compile+bf16": "#2f855a", "no memory": "#718096"}
COLORS |= {"jax": "#805ad5", "sb3 contrib": "#d69e2e"}
COLORS |= {"compile annealed over 10M": "#319795", "eager annealed over 10M": "#d53f8c"}


def bars(reports: list[dict], path: Path):
    """One panel a script: steps/s of each mode, with its 95 % interval and its ratio to eager."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = sum(len(report["modes"]) for report in reports)
    heights = [len(report["modes"]) for report in reports]
    figure, panels = plt.subplots(
        len(reports), 1, figsize=(8, 0.7 + 0.34 * rows + 0.6 * len(reports)), squeeze=False, height_ratios=heights
    )
    for panel, report in zip(panels[:, 0], reports, strict=True):
        names = [row["mode"] for row in report["modes"]]
        speeds = [row["sps"][0] for row in report["modes"]]
        errors = [[s - row["sps"][1], row["sps"][2] - s] for s, row in zip(speeds, report["modes"], strict=True)]
        colors = [OURS if is_ours(name) else PEER for name in names]
        panel.barh(names, speeds, xerr=list(zip(*errors, strict=True)), color=colors, error_kw={"lw": 1})
        for y, row in enumerate(report["modes"]):
            panel.text(
                row["sps"][2] + max(speeds) * 0.01, y, f"{row['sps'][0]:,.0f}  ({row['ratio'][0]:.2f} x)", va="center"
            )
        panel.invert_yaxis()
        panel.set_xlim(0, max(row["sps"][2] for row in report["modes"]) * 1.2)
        where = report["machine"]
        env_id = report["env_id"].removeprefix("popgym:popgym-")
        title = f"{report['script']}, {env_id}: steps/s\n{where['gpu'] or where['cpu']}, {where['cores']} cores"
        panel.set_title(title, loc="left", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def busy_seconds(samples: list[list[float]]) -> float:
    """The area under the curve of utilisation: samples are (seconds, percent)."""
    import numpy as np

    seconds, percent = np.array(samples).T
    return float(np.trapezoid(percent / 100, seconds))


def utilisation(report: dict, path: Path):
    """One panel a mode: what a GPU is used for during its first run, and for how many seconds in all it was busy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = {row["mode"]: row["runs"][0].get("gpu_samples") for row in report["modes"]}
    curves = {mode: samples for mode, samples in curves.items() if samples}
    if not curves:  # the GPU does not say
        return
    figure, panels = plt.subplots(len(curves), 1, figsize=(8, 1.3 * len(curves) + 0.6), squeeze=False, sharex=True)
    for panel, (mode, samples) in zip(panels[:, 0], curves.items(), strict=True):
        seconds = [second - samples[0][0] for second, _ in samples]
        panel.fill_between(seconds, [percent for _, percent in samples], color=OURS if is_ours(mode) else PEER)
        panel.set_title(f"{mode}: busy for {busy_seconds(samples):.0f} of {seconds[-1]:.0f} s", loc="left", fontsize=9)
        panel.set_ylim(0, 100)
    panels[-1, 0].set_xlabel(f"seconds of {report['script']}; GPU utilisation in %")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def is_ours(mode: str) -> bool:
    return mode not in JAX and any(mode in row.modes for row in CATALOG.values())


def curves(path: Path):
    """A panel for each environment and length of training: return against steps, a thin line a seed.

    A thick line is the mean of the seeds. What is published is shown where it took as many steps.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels_of = defaultdict(list)
    for file in sorted((RESULTS / "curves").glob("*.csv")):
        script, env_id, total_timesteps, mode = file.stem.split("__")
        panels_of[script, env_id, total_timesteps].append((mode.replace("-", " "), read_csv(file)))
    height = -(-len(panels_of) // 2)
    figure, panels = plt.subplots(height, 2, figsize=(9, 2.4 * height), squeeze=False, layout="constrained")
    for panel in panels.flat[len(panels_of) :]:
        panel.axis("off")
    for panel, ((script, env_id, total_timesteps), runs) in zip(panels.flat, panels_of.items()):
        for mode, rows in runs:
            color = COLORS.get(mode, OURS)
            for seed in dict.fromkeys(row["seed"] for row in rows):
                own = [row for row in rows if row["seed"] == seed]
                returns = [float(row["episodic_return"]) for row in own]
                panel.plot([int(row["step"]) for row in own], returns, color=color, lw=0.8, alpha=0.4)
            returns_at = defaultdict(list)
            for row in rows:
                returns_at[int(row["step"])].append(float(row["episodic_return"]))
            steps = sorted(returns_at)
            panel.plot(steps, [fmean(returns_at[step]) for step in steps], color=color, lw=1.5, label=mode)
        for published in read_csv(ROOT / "benchmark" / "published.csv"):
            if (published["script"], published["env_id"], published["steps"]) == (script, env_id, total_timesteps):
                mean, std = float(published["mean"]), float(published["std"])
                panel.axhspan(mean - std, mean + std, color="#718096", alpha=0.2, lw=0)
                panel.plot([], [], color="#718096", alpha=0.4, lw=6, label="published, final")
        panel.set_title(f"{script}, {env_id.removeprefix('popgym_popgym-')}", loc="left", fontsize=8)
        panel.legend(fontsize=7, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=7)
    figure.supxlabel("environment steps", fontsize=8)
    figure.supylabel("mean episodic return", fontsize=8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def race(path: Path, modes: tuple[str, ...] = ("compile", "eager", "sbx")):
    """Return against minutes of PPO on HalfCheetah: the twin, the plain file and SBX, one seed each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = {"compile": "LeanRL, compiled", "eager": "LeanRL, plain", "sbx": "SBX", "sb3": "Stable-Baselines3"}
    colors = {"compile": OURS, "eager": "#c05621"}
    figure, panel = plt.subplots(figsize=(8, 3.2))
    for mode in modes:
        file = RESULTS / "race" / "curves" / f"ppo_continuous_action__HalfCheetah-v4__1000000__{mode}.csv"
        rows = read_csv(file)
        minutes = [float(row["seconds"]) / 60 for row in rows]
        returns = [float(row["episodic_return"]) for row in rows]
        panel.plot(minutes, returns, color=colors.get(mode, PEER), label=f"{labels[mode]}: {minutes[-1]:.0f} minutes")
        panel.plot(minutes[-1:], returns[-1:], "o", color=colors.get(mode, PEER))
    device = read_csv(RESULTS / "race" / "returns.csv")[0]["device"]
    panel.set_title(f"PPO, HalfCheetah-v4, a million steps ({device}), one seed each", loc="left", fontsize=10)
    panel.set_xlabel("minutes", fontsize=9)
    panel.set_ylabel("mean episodic return", fontsize=9)
    panel.legend(fontsize=9, frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def growth(report: dict, path: Path):
    """A column for each size of a script: steps/s, memory and cold start of the plain file and the compiled twin."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = list(dict.fromkeys(row["what"] for row in report["sizes"]))
    figure, panels = plt.subplots(3, len(columns), figsize=(2.4 * len(columns), 6), squeeze=False, sharey="row")
    for x, what in enumerate(columns):
        rows = [row for row in report["sizes"] if row["what"] == what]
        values = [row["value"] for row in rows]
        for mode, color in (("eager", "#c05621"), ("compile", OURS)):
            speeds = [row[mode]["sps"][0] for row in rows]
            panels[0, x].plot(values, speeds, "o-", color=color, label=mode, ms=3)
            panels[1, x].plot(values, [row[mode]["host_mb"] for row in rows], "o-", color=color, ms=3)
            starts = [max(row[mode]["startup_seconds"], 0) for row in rows]
            panels[2, x].plot(values, starts, "o-", color=color, ms=3)
        panels[0, x].set_title(what, fontsize=9)
        for panel in panels[:, x]:
            panel.set_xscale("log", base=10 if what == "buffer_size" else 2)
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=7)
        panels[0, x].set_yscale("log")
    for y, label in enumerate(("env steps/s", "host memory, MB", "cold start, s")):
        panels[y, 0].set_ylabel(label, fontsize=8)
    panels[0, 0].legend(fontsize=7, frameon=False)
    here = report["machine"]
    title = f"{report['script']}, {report['env_id']} ({here['cpu']}, {here['date']}, commit {here['commit']})"
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def speed_reports(folder: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / folder).glob("*.json"))]


def table(columns: list[str], rows: list[tuple[str, ...]]) -> str:
    """Markdown: a line a row. A column in which no row has a value is left out."""
    kept = [x for x in range(len(columns)) if not rows or any(row[x] not in ("", "-") for row in rows)]

    def line(cells) -> str:
        return f"| {' | '.join(cells[x] for x in kept)} |"

    return "\n".join([line(columns), "|" + "---|" * len(kept), *map(line, rows)])


def turns(row: dict) -> str:
    """How often a mode was run; results from before there were slices say so."""
    n = len(row["runs"])
    return f"{n} turn{'s' if n > 1 else ''}{'' if 'rates' in row['runs'][0] else ' of whole runs'}"


def run_length(steps: int, seconds: float | None) -> str:
    return f"at most {steps:,} steps and {seconds:g} s" if seconds else f"{steps:,} steps"


def amount(value: float | None, template: str) -> str:
    """A cell of a table; - where nothing was measured, as of a program that is timed from outside."""
    return "-" if value is None else template.format(max(value, 0))  # what a start took may be below 0, by noise


def speed_block(folder: str = "cpu", script: str | None = None) -> str:
    """Markdown: a table a script, of all modes and peers."""
    lines = []
    for report in speed_reports(folder):
        if script not in (None, report["script"]):
            continue
        where = report["machine"]
        length = run_length(report["steps"], report.get("seconds"))
        used = {row["threads"] for row in report["modes"] if row.get("threads")}
        cores = f"{where['cores']} cores" + (", one thread a process" if used == {1} else "")
        lines += [
            f"`{' '.join([report['script'], report.get('flags', '')]).strip()}` on {report['env_id']}, {length} a run, "
            f"{turns(report['modes'][0])} ({where['gpu'] or where['cpu']}, {cores}, "
            f"torch {where['torch']}, {where['date']}, commit {where['commit']}):",
            "",
        ]
        columns = ["mode", "steps/s", "95 % interval", f"ratio to {report['modes'][0]['mode']}", "cold start"]
        columns += ["warm start", "pays off after", "host memory", "in the simulator"]
        rows = []
        for row in report["modes"]:
            (sps, low, high), ratio = row["sps"], row["ratio"]
            cold, warm = (amount(row.get(key), "{:.0f} s") for key in ("startup_seconds", "warm_seconds"))
            eager = report["modes"][0]
            pays = steps_until(pays_after(row, eager)) if may_pay(row, eager) else "-"
            cells = (row["mode"], f"{sps:,.0f}", f"{low:,.0f} - {high:,.0f}")
            cells += (f"{ratio[0]:.2f} ({ratio[1]:.2f} - {ratio[2]:.2f})", cold, warm, pays)
            rows.append(cells + (amount(row["host_mb"], "{:,.0f} MB"), amount(row["env_share"], "{:.0%}")))
        lines += [table(columns, rows), ""]
    return "\n".join(lines).rstrip()


def against(row: dict, other: dict) -> float:
    """How many times as fast a mode is as another: the median of the ratios of slices of a round."""
    runs = zip(row["runs"], other["runs"], strict=True)
    return median(a / b for own, its in runs for a, b in zip(own["rates"], its["rates"]))


def may_pay(row: dict, first: dict) -> bool:
    """Whether a row is of compiled code beside the plain file; ranks all compile."""
    return "compile" in row["mode"] and first["mode"] == "eager"


def pays_after(compiled: dict, eager: dict) -> int | None:
    """The number of env steps after which the compiled script has made up for its start-up; None: no gain is shown."""
    ratio, low, _ = compiled["ratio"]
    if compiled.get("startup_seconds") is None or low <= 1:
        return None
    waited = max(compiled["startup_seconds"], 0) - max(eager["startup_seconds"], 0)
    return round(max(waited, 0) * eager["sps"][0] / (1 - 1 / ratio), -3)


def steps_until(steps: int | None) -> str:
    return "no gain shown" if steps is None else f"{steps:,.0f} steps"


def best(report: dict) -> tuple[dict, dict, dict | None]:
    """The rows of the plain file, of the compiled twin, and of the fastest peer, if there is one."""
    rows = {row["mode"]: row for row in report["modes"]}
    # which of ours is shown is settled beforehand: the fastest of many would flatter
    compiled = rows.get("compile+cudagraphs") or rows["compile"]
    peers = [row for mode, row in rows.items() if not is_ours(mode) and mode not in JAX]  # JAX: our own file
    return rows["eager"], compiled, max(peers, key=lambda row: row["sps"][0], default=None)


def best_block(folder: str = "cpu") -> str:
    """Markdown: a row for each script that the README names, the twin beside the plain file and the fastest peer."""
    rows = []
    for report in speed_reports(folder):
        if not CATALOG[report["script"]].in_readme:
            continue
        eager, compiled, peer = best(report)
        beside = f"{against(compiled, peer):.1f} x ({peer['mode']})" if peer else "none measured"
        cells = (f"{report['script']}, {report['env_id']}", f"{eager['sps'][0]:,.0f}", f"**{compiled['sps'][0]:,.0f}**")
        rows.append(cells + (f"{against(compiled, eager):.1f} x", beside, steps_until(pays_after(compiled, eager))))
    return table(["script", "plain", "compiled", "against plain", "against the fastest peer", "pays off after"], rows)


def claim_block(script: str = "ppo_continuous_action", folder: str = "cpu") -> str:
    """Markdown: one sentence with the gains of one script."""
    (report,) = (report for report in speed_reports(folder) if report["script"] == script)
    eager, compiled, peer = best(report)
    where = report["machine"]
    env = report["env_id"].split("-")[0]
    return (
        f"PPO on {env} trains **{against(compiled, peer):.1f} times as fast** as with the faster of Stable-Baselines3 "
        f"and SBX, and {against(compiled, eager):.1f} times as fast as our own plain file, on {where['cores']} cores "
        f"of a CPU: {where['cpu']}."
    )


def mean_std(mean: float, std: float | None) -> str:
    """With a decimal below 100, and three below 2."""
    decimals = 3 if abs(mean) < 2 else 1 if abs(mean) < 100 else 0
    return f"{mean:,.{decimals}f}" + ("" if std is None else f" ± {std:,.{decimals}f}")


def many_seeds(returns: list[float]) -> str:
    """From 5 seeds on: the interquartile mean with a 95 % bootstrap interval (Agarwal et al. 2021, rliable)."""
    from scipy.stats import bootstrap, trim_mean

    if len(returns) < 5:
        return ""

    def iqm(values, axis=-1):
        return trim_mean(values, 0.25, axis=axis)

    low, high = bootstrap((returns,), iqm, method="percentile", rng=0).confidence_interval
    return f"IQM {mean_std(iqm(returns), None)} [{mean_std(low, None)}, {mean_std(high, None)}]"


def in_order(group: tuple) -> tuple:
    """Sorts groups of runs: scripts and modes as the catalog does; a mode that it lacks is that of a patch."""
    (script, env_id, steps, mode), _ = group
    modes = [*CATALOG[script].modes, *CATALOG[script].peers]
    return list(CATALOG).index(script), env_id, int(steps), modes.index(mode) if mode in modes else len(modes), mode


def return_rows() -> list[tuple]:
    """(script, env_id, steps, mode, seeds, mean ± std, published) for each group of recorded runs, in order."""
    import numpy as np

    published = read_csv(ROOT / "benchmark" / "published.csv")
    theirs = {
        (p["script"], p["env_id"]): (p["steps"], f"{mean_std(float(p['mean']), float(p['std']))} ({p['source']})")
        for p in published
    }
    groups = defaultdict(dict)
    for run in read_csv(RESULTS / "returns.csv"):
        groups[run["script"], run["env_id"], run["steps"], run["mode"]][run["seed"]] = float(run["episodic_return"])
    rows = []
    for (script, env_id, steps, mode), returns in sorted(groups.items(), key=in_order):
        values = np.array(list(returns.values()))
        shown = mean_std(values.mean(), values.std(ddof=1) if len(values) > 1 else None)
        if iqm := many_seeds(values.tolist()):
            shown += f"; {iqm}"
        after, beside = theirs.get((script, env_id), (steps, ""))
        beside = beside if after == steps else ""  # never beside a run of another length
        rows.append((script, env_id, f"{int(steps):,}", mode, " ".join(sorted(returns, key=int)), shown, beside))
    return rows


def returns_block(only: str | None = None) -> str:
    """Markdown: mean and standard deviation over seeds, beside the published ones, of all scripts or of one."""
    columns = ["script", "environment", "steps", "mode", "seeds", "return", "published, 3 seeds"]
    return table(columns, [row for row in return_rows() if only in (None, row[0])])


def bf16_block(script: str = "ppo_atari_envpool", env_id: str = "Breakout-v5", steps: str = "150000") -> str:
    """Markdown: returns without and with --bf16, and their difference with a 95 % bootstrap interval."""
    import numpy as np

    modes, rng = ("compile", "compile+bf16"), np.random.default_rng(0)
    ends, whole = [], []  # a row a mode: the last 100 episodes, and the curve's mean, of each seed
    for mode in modes:
        key, runs = (script, env_id, steps, mode), read_csv(RESULTS / "returns.csv")
        runs = [run for run in runs if (run["script"], run["env_id"], run["steps"], run["mode"]) == key]
        curve = read_csv(RESULTS / "curves" / f"{'__'.join(key)}.csv".replace(":", "_"))
        of_seeds = [[float(row["episodic_return"]) for row in curve if row["seed"] == run["seed"]] for run in runs]
        ends.append([float(run["episodic_return"]) for run in runs])
        whole.append([np.mean(of_seed) for of_seed in of_seeds])
    rows = []
    for name, values in (("of the last 100 episodes", ends), ("over the whole run", whole)):
        without, rounded = (rng.choice(v, (10_000, len(v))).mean(1) for v in values)
        low, high = np.percentile(rounded - without, [2.5, 97.5])
        digits = 2 if abs(np.mean(values[0])) < 100 else 0
        cells = [f"{np.mean(v):.{digits}f} ± {np.std(v, ddof=1):.{digits}f} ({len(v)} seeds)" for v in values]
        difference = np.mean(values[1]) - np.mean(values[0])
        cells += [f"{difference:.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"]
        rows.append((name, *cells))
    return table(["mean return", *modes, "difference", "95 % interval"], rows)


def pong_block() -> str:
    """Markdown: the first quarter of Pong's 10,000,000 steps: mean return of the 100,000 steps before each row's."""
    cleanrl = {1_000_000: -11.5, 2_500_000: 15.5}  # read off the curve that it publishes, by hand
    rows = []
    for steps, published in cleanrl.items():
        cells = [f"{steps:,}"]
        for mode in ("eager", "compile"):
            name = f"ppo_atari_envpool__Pong-v5__2500000__{mode}-annealed-over-10M.csv"
            returns_of = defaultdict(list)
            for row in read_csv(RESULTS / "curves" / name):
                if steps - 100_000 < int(row["step"]) <= steps:
                    returns_of[row["seed"]] += [float(row["episodic_return"])] * int(row["episodes"])
            cells.append(", ".join(f"{fmean(returns_of[seed]):.1f}" for seed in sorted(returns_of)) or "-")
        rows.append((*cells, str(published)))
    return table(["steps of 10,000,000", "eager", "compile", "CleanRL"], rows)


def measured_where(folder: str) -> list[str]:
    """Markdown: the processor, the date and the commit of each report."""
    lines = []
    for report in speed_reports(folder):
        here = report["machine"]
        lines.append(
            f"- {report['script']}: {here['cpu']}, {here['cores']} cores, {here['date']}, commit {here['commit']}"
        )
    return lines


def ablation_block() -> str:
    """Markdown: what each trick is worth, measured by taking it out, and what was tried and turned down."""
    rows = []
    for script, row in ablation_rows():
        ratio, low, high = row["ratio"]
        how = turns(row) + (f" of {row['steps']:,} steps" if "steps" in row else "")  # older rows lack them
        rows.append((script, row["variant"], f"{ratio:.2f}", f"{low:.2f} - {high:.2f}", how))
    columns = ["script", "change", "speed, relative to the script as it is", "95 % interval", "measured"]
    return "\n".join([table(columns, rows), "", "Measured on:", "", *measured_where("ablate")])


def ablation_rows() -> list[tuple[str, dict]]:
    """(script, row) of what was measured and is still there: without its patch, a row would be of another script."""
    from ablate import variants

    reports = speed_reports("ablate")
    return [(r["script"], row) for r in reports for row in r["variants"] if row["variant"] in variants(r["script"])]


def gain_block(tag: str) -> str:
    """Markdown: how much faster each script is with a trick than without, or how it is measured."""
    of_a_gpu = "not measured yet, since it is for a GPU"
    elsewhere = {"capture": of_a_gpu, "overlap": of_a_gpu, "pinned": of_a_gpu}
    elsewhere["operator"] = "not measured apart; with perf[graph], that of `compile` over `eager` in benchmark.md"
    measured = [(s, row["ratio"]) for s, row in ablation_rows() if row["variant"].startswith(f"without perf[{tag}]")]
    unclear = [script for script, (_, low, high) in measured if low <= 1 <= high]
    gains = [f"{1 / ratio:.2f} x ({script})" for script, (ratio, *_) in measured if script not in unclear]
    if unclear:
        gains.append(f"none shown ({', '.join(unclear)})")
    if tag in elsewhere:
        gains.append(elsewhere[tag])
    if tag in ("bf16", "groups"):
        gains += [
            f"{rows[f'compile+{tag}'] / rows['compile']:.2f} x ({report['script']})"
            for report in speed_reports("cpu")
            if f"compile+{tag}" in (rows := {row["mode"]: row["sps"][0] for row in report["modes"]})
        ]
    patches = list((ROOT / "benchmark" / "ablations").glob(f"*/{tag}.patch"))
    none = "not measured yet" if patches else "not measured apart, since the script does not work without it"
    return f"**Gain:** {', '.join(gains) or none}."


def scaling_block(folder: str = "cpu") -> str:
    """Markdown: what more ranks bring, and the part of the time that reductions over them take."""
    rows = []
    for report in speed_reports(folder):
        for row in report["modes"] if "multigpu" in report["script"] else []:
            ratio, share = row["ratio"][0], row["communication"]
            shown = "-" if share is None else f"{100 * share:.0f} %"
            efficiency = "-" if row["efficiency"] is None else f"{100 * row['efficiency']:.0f} %"
            rows.append((row["mode"], f"{row['sps'][0]:,.0f}", f"{ratio:.2f}", efficiency, shown))
    return table(["ranks", "steps/s", "relative to one rank", "efficiency", "in reductions"], rows)


def phases_block() -> str:
    """Markdown: microseconds of an environment step in each phase of the loop, and of them in the simulator itself."""
    names = ("act", "learn", "step and store", "report", "microseconds", "simulator")
    rows = [
        (report["script"], row["mode"], *(f"{row[name]:,.1f}" for name in names))
        for report in speed_reports("phases")
        for row in report["modes"]
    ]
    columns = ["script", "mode", "act", "learn", "step and store", "report", "together", "of it in the simulator"]
    return "\n".join([table(columns, rows), "", *measured_where("phases")])


def saving_block() -> str:
    """Markdown: what a checkpoint with a full replay costs, in a sentence."""
    r = json.loads((RESULTS / "saving.json").read_text())
    size = f"{r['bytes'] / 1e6:,.0f} MB"
    times = f"{r['save_seconds']:.1f} s to write and {r['load_seconds']:.1f} s to load"
    return f"{r['transitions']:,} transitions of HalfCheetah take {size}, {times} ({r['machine']['cpu']})."


def steps_block() -> str:
    """Markdown: how long the updates of docs/your-own-script.md take."""
    report = json.loads((RESULTS / "steps.json").read_text())
    times = report["microseconds"]
    rows = [(name, f"{time:,.0f}", f"{times['plain (step 1)'] / time:.2f}") for name, time in times.items()]
    shown = table(["update", "microseconds", "speed, relative to plain"], rows)
    return "\n".join([shown, "", f"({report['machine']['cpu']}, one thread, torch {report['machine']['torch']})"])


def scans_block() -> str:
    """Markdown: how long recurrent networks take for a sequence, by its length."""
    report = json.loads((RESULTS / "scans.json").read_text())
    lengths = sorted({row["steps"] for row in report["rows"]})
    found = {(row["network"], row["mode"], row["steps"]): row for row in report["rows"]}
    rows = []
    for network, mode in dict.fromkeys((row["network"], row["mode"]) for row in report["rows"]):
        of_lengths = [found.get((network, mode, T)) for T in lengths]
        cells = [f"{row['ms']:,.1f} ms ({row['first_call_s']:,.0f} s)" if row else "-" for row in of_lengths]
        rows.append((network, mode, *cells))
    sizes = f"{report['sizes']['num_envs']} envs, width {report['sizes']['width']}"
    resets = f"an episode starts in {report['sizes']['resets']:.0%} of the steps"
    where = report["machine"]
    where = f"one core of {where['cpu']}, torch {where['torch']}, {where['date']}, commit {where['commit']}"
    shown = table(["network", "mode", *(f"T = {T}" for T in lengths)], rows)
    return "\n".join([shown, "", f"({sizes}, {resets}; {where})"])


def ray_block() -> str:
    """Markdown: the efficiency of sleeping simulators, by the way they are called, and the formula that fits."""
    report = json.loads((RESULTS / "ray.json").read_text())
    found = {(row["way"], row["milliseconds"], row["workers"]): row["efficiency"] for row in report["rows"]}
    counts = sorted({workers for _, _, workers in found})
    rows = []
    for way, milliseconds in dict.fromkeys((way, milliseconds) for way, milliseconds, _ in found):
        cells = [found.get((way, milliseconds, n)) for n in counts]
        rows.append((f"{milliseconds:,} ms", way, *("-" if x is None else f"{x:.0%}" for x in cells)))
    shown = table(["step", "called by", *(f"{n} worker{'s' * (n > 1)}" for n in counts)], rows)
    steps = dict.fromkeys(milliseconds for _, milliseconds, _ in found)
    envs = ", ".join(f"{report['envs'][str(milliseconds)]} at {milliseconds:,} ms" for milliseconds in steps)
    where = report["machine"]
    where = f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, {where['date']}, commit {where['commit']}"
    text = "Share of the time of sampling in which simulators work, which sleep for a step; "
    text += f"envs of a worker: {envs} ({where})."
    if fit := report.get("fit"):
        text += f" For one env a call, the formula fits with l = {fit['latency_ms']:.2f} ms, "
        text += f"c = {fit['cost_ms']:.2f} ms (rms error {fit['rms']:.1%})."
    return "\n".join([shown, "", text])


BLOCKS = {"speed cpu": speed_block, "best cpu": best_block, "claim": claim_block, "returns": returns_block}
BLOCKS |= {
    "speed cpu-amx": lambda: speed_block("cpu-amx"),
    "speed cpu-avx2": lambda: speed_block("cpu-avx2"),
    "speed cpu-zen-4": lambda: speed_block("cpu-zen-4"),
    "speed cpu-impala": lambda: speed_block("cpu-impala"),
    "speed cpu-one-worker": lambda: speed_block("cpu-one-worker"),
    "speed cpu-appo": lambda: speed_block("cpu-appo"),
    "speed ppo_continuous_action_ray": lambda: speed_block("cpu", "ppo_continuous_action_ray"),
    "speed ppo_device_env": lambda: speed_block("cpu", "ppo_device_env"),
    "speed a2c_device_env": lambda: speed_block("cpu", "a2c_device_env"),
    "speed cpu-memory-one-thread": lambda: speed_block("cpu-memory-one-thread"),
    "speed cpu-memory-one-thread-long": lambda: speed_block("cpu-memory-one-thread-long"),
    "speed cpu-one-thread": lambda: speed_block("cpu-one-thread"),
    "speed cpu-1024-envs": lambda: speed_block("cpu-1024-envs"),
    "ablation": ablation_block,
    "scans": scans_block,
    "phases": phases_block,
    "scaling": scaling_block,
    "bf16": bf16_block,
    "bf16 td3": lambda: bf16_block("td3_continuous_action", "HalfCheetah-v4", "200000"),
    "bf16 sac": lambda: bf16_block("sac_continuous_action", "HalfCheetah-v4", "200000"),
    "pong": pong_block,
    "saving": saving_block,
    "steps": steps_block,
    "ray": ray_block,
}
for tag in re.findall(r"<!-- gain (\w+) -->", (ROOT / "docs" / "performance.md").read_text()):
    BLOCKS[f"gain {tag}"] = lambda tag=tag: gain_block(tag)
for script in CATALOG:
    BLOCKS[f"returns {script}"] = lambda script=script: returns_block(script)


def main(check: bool):
    stale = []
    for path in DOCUMENTS:
        text = path.read_text()
        for name, block in BLOCKS.items():
            pattern = rf"(<!-- {name} -->\n)(?:(?!<!--).)*(<!-- end -->)"  # never past another mark
            text = re.sub(
                pattern, lambda match, block=block: match[1] + block() + "\n" + match[2], text, flags=re.DOTALL
            )
        if text != path.read_text():
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check:
        sys.exit(f"error: {', '.join(stale)} do not show benchmark/results; run benchmark/plot.py" if stale else 0)
    bars(speed_reports("cpu"), RESULTS / "speed.png")
    curves(RESULTS / "returns.png")
    race(RESULTS / "race.png")
    for report in speed_reports("scale"):
        growth(report, RESULTS / "scale" / f"{report['script']}.png")
    print("updated:", ", ".join(stale) or "nothing", "- drew results/speed.png, returns.png and race.png")


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
