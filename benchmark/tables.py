"""The tables that documents and terminals show, each made from what benchmark/results holds. plot.py writes them."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from statistics import fmean

import numpy as np
from catalog import CATALOG, JAX
from results import RESULTS, ROOT, against, first_of_each_script, may_pay, of_catalog, pays_after, read_csv, tables

PHASES = ("act", "learn", "step and store", "report")
LIBRARIES = {"sb3": "Stable-Baselines3", "sbx": "SBX", "sb3-contrib": "SB3-Contrib"}
PHASES_TOGETHER = {"microseconds": "together", "simulator": "of it in the simulator"}


def with_content(columns: list[str], rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The heading and the rows, without a column in which no row has a value."""
    kept = [x for x in range(len(columns)) if not rows or any(row[x] not in ("", "-") for row in rows)]
    return [tuple(cells[x] for x in kept) for cells in (columns, *rows)]


def markdown(columns: list[str], rows: list[tuple[str, ...]]) -> str:
    heading, *lines = (f"| {' | '.join(cells)} |" for cells in with_content(columns, rows))
    return "\n".join([heading, "|" + "---|" * (heading.count(" | ") + 1), *lines])


def aligned(columns: list[str], rows: list[tuple[str, ...]]) -> str:
    """For a terminal."""
    lines = with_content(columns, rows)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def amount(value: float | None, template: str) -> str:
    """A cell of a table; - where nothing was measured, as of a program that is timed from outside."""
    return "-" if value is None else template.format(max(value, 0))  # what a start took may be below 0, by noise


def mean_std(mean: float, std: float | None) -> str:
    """With a decimal below 100, and three below 2."""
    decimals = 3 if abs(mean) < 2 else 1 if abs(mean) < 100 else 0
    return f"{mean:,.{decimals}f}" + ("" if std is None else f" ± {std:,.{decimals}f}")


def turns(row: dict) -> str:
    """How often a mode was run; results from before there were slices say so."""
    n = len(row["runs"])
    return f"{n} turn{'s' if n > 1 else ''}{'' if 'rates' in row['runs'][0] else ' of whole runs'}"


def run_length(steps: int, seconds: float | None) -> str:
    return f"at most {steps:,} steps and {seconds:g} s" if seconds else f"{steps:,} steps"


def steps_until(steps: int | None) -> str:
    return "no gain shown" if steps is None else f"{steps:,.0f} steps"


def where(table: dict, *names: str) -> str:
    """Where and when a table was measured."""
    here = table["machine"]
    known = {"torch": f"torch {here['torch']}", "cores": f"{here['cores']} cores", "commit": f"commit {here['commit']}"}
    return ", ".join([here["gpu"] or here["cpu"], *(known.get(name, here.get(name, name)) for name in names)])


# ---------- speed ----------


def speed_cells(table: dict) -> tuple[list[str], list[tuple[str, ...]]]:
    """A row a mode, in all columns that there may be."""
    first = table["rows"][0]
    columns = ["mode", "steps/s", "95 % interval", f"ratio to {first['mode']}", "cold start", "warm start"]
    columns += ["pays off after", "host memory", "in the simulator"]  # so far in documents; on a terminal, these too
    columns += ["GPU memory", "GPU use", "in graphs", "in reductions", "efficiency"]
    rows = []
    for row in table["rows"]:
        (sps, low, high), ratio = row["sps"], row["ratio"]
        cells = [row["mode"], f"{sps:,.0f}", f"{low:,.0f} - {high:,.0f}"]
        cells += [f"{ratio[0]:.2f} ({ratio[1]:.2f} - {ratio[2]:.2f})"]
        cells += [amount(row.get(name), "{:.0f} s") for name in ("startup_seconds", "warm_seconds")]
        cells += [steps_until(pays_after(row, first)) if may_pay(row, first) else "-"]
        cells += [amount(row["host_mb"], "{:,.0f} MB"), amount(row["env_share"], "{:.0%}")]
        cells += [amount(row.get("device_mb"), "{:,.0f} MB"), amount(row.get("gpu_utilisation"), "{:.0f}%")]
        cells += [amount(row.get(name), "{:.0%}") for name in ("graph_share", "communication", "efficiency")]
        rows.append(tuple(cells))
    return columns, rows


def speed(found: list[dict]) -> str:
    """Tables of speed, each under a line that says of what."""
    lines = []
    for table in found:
        used = {row["threads"] for row in table["rows"] if row.get("threads")}
        here = where(table, "cores", *(["one thread a process"] if used == {1} else []), "torch", "date", "commit")
        length = run_length(table["steps"], table.get("seconds"))
        title = f"`{' '.join([table['script'], table['flags']]).strip()}` on {table['env_id']}, {length} a run"
        columns, rows = speed_cells(table)
        shown = markdown(columns[:9], [row[:9] for row in rows])
        lines += [f"{title}, {turns(table['rows'][0])} ({here}):", "", shown, ""]
    return "\n".join(lines).rstrip()


def gpu() -> str:
    """A row for each script that was measured on a GPU: plain, compiled, and compiled with CUDA graphs."""
    found = [table for table in of_catalog() if table["machine"]["gpu"]]
    rows = []
    for table in found:
        speeds = {row["mode"]: row["sps"][0] for row in table["rows"]}
        shown = [amount(speeds.get(mode), "{:,.0f}") for mode in ("eager", "compile", "compile+cudagraphs")]
        gain = speeds["compile+cudagraphs"] / speeds["eager"]
        rows.append((f"{table['script']}, {table['env_id']}", *shown, f"{gain:.1f} x"))
    columns = ["script", "plain", "compiled", "compiled, with CUDA graphs", "against plain"]
    details = where(found[0], turns(found[0]["rows"][0]), "torch", "date", "commit")
    length = run_length(found[0]["steps"], found[0]["seconds"])
    return f"{markdown(columns, rows)}\n\nEnv steps a second, {length} a mode ({details})."


def is_ours(mode: str) -> bool:
    return mode not in JAX and any(mode in row.modes for row in CATALOG.values())


def best_rows(table: dict) -> tuple[dict, dict, dict | None]:
    """The rows of the plain file, of the compiled twin, and of the fastest peer, if there is one."""
    rows = {row["mode"]: row for row in table["rows"]}
    # which of ours is shown is settled beforehand: the fastest of many would flatter
    compiled = rows.get("compile+cudagraphs") or rows["compile"]
    peers = [row for mode, row in rows.items() if not is_ours(mode) and mode not in JAX]  # JAX: our own file
    return rows["eager"], compiled, max(peers, key=lambda row: row["sps"][0], default=None)


def best() -> str:
    """A row for each script that the README names: plain, compiled, and the gain over the best other library."""
    rows, starts = [], []
    for table in sorted(first_of_each_script(), key=lambda table: list(CATALOG).index(table["script"])):
        if CATALOG[table["script"]].in_readme:
            eager, compiled, peer = best_rows(table)
            cells = [f"{row['sps'][0]:,.0f}" for row in (eager, compiled)]
            gain = f"**{against(compiled, peer):.1f} x** ({LIBRARIES[peer['mode'].split()[0]]})"
            rows.append((f"{table['script']}, {table['env_id'].split('-v')[0].split('-')[-1]}", *cells, gain))
            starts.append(compiled["startup_seconds"])
    columns = ["script", "plain (eager)", "compiled", "compiled, against the best other library"]
    text = "Environment steps per second on a 2-core cloud CPU, on one day ([details](benchmark/notebook.md"
    text += "#speed-of-all-scripts)). With `--compile`, a first start takes "
    text += f"{min(starts):.0f} to {max(starts):.0f} seconds more." if starts else "longer."
    return f"{markdown(columns, rows)}\n\n{text}"


def minutes(row: dict) -> float:
    """What a million steps take, with the first start and its compilation."""
    return (1e6 / row["sps"][0] + max(row["startup_seconds"], 0)) / 60


def ppo_rows() -> tuple[dict, dict[str, dict]]:
    """The table of PPO on HalfCheetah, and a row for each way to run it, by name. Other libraries are at their best."""
    (table,) = (table for table in first_of_each_script() if table["script"] == "ppo_continuous_action")
    eager, compiled, _ = best_rows(table)
    found = {"LeanRL, compiled": compiled, "LeanRL, plain": eager}
    for library in ("sbx", "sb3"):
        rows = [row for row in table["rows"] if row["mode"].split()[0] == library]
        found[LIBRARIES[library]] = min(rows, key=minutes)
    return table, found


def claim() -> str:
    """How long a million steps of PPO take."""
    table, rows = ppo_rows()
    compiled, plain, sbx, sb3 = (f"{minutes(row):.1f}" for row in rows.values())
    env = table["env_id"].split("-")[0]
    return (
        f"At the speeds below, a million steps of PPO on {env} take **{compiled} minutes** with our compiled file on a "
        f"{table['machine']['cores']}-core CPU, compiling included. They take {plain} minutes with our plain file, "
        f"{sbx} with SBX (JAX) and {sb3} with Stable-Baselines3."
    )


def gpu_claim() -> str:
    """What CUDA graphs gain in off-policy algorithms on a GPU, in a sentence."""
    found = [table for table in of_catalog() if table["machine"]["gpu"]]
    gains = []
    for table in found:
        speeds = {row["mode"]: row["sps"][0] for row in table["rows"]}
        if table["script"] in ("sac_continuous_action", "td3_continuous_action"):
            gains.append(f"{speeds['compile']:,.0f} to {speeds['compile+cudagraphs']:,.0f} ({table['script']})")
    text = f"On an {found[0]['machine']['gpu']}, CUDA graphs raise the speed of the compiled file from "
    return f"{text}{' and '.join(gains)} env steps a second, in one short run each ([all](docs/gpu.md))."


def scaling() -> str:
    """What more ranks bring, and the part of the time that reductions over them take."""
    (table,) = of_catalog(script="ppo_atari_multigpu")
    rows = [
        (row["mode"], f"{row['sps'][0]:,.0f}", f"{row['ratio'][0]:.2f}")
        + tuple(amount(row[name], "{:.0%}").replace("%", " %") for name in ("efficiency", "communication"))
        for row in table["rows"]
    ]
    return markdown(["ranks", "steps/s", "relative to one rank", "efficiency", "in reductions"], rows)


# ---------- tricks, phases, and what single tools measure ----------


def measured_on(kind: str) -> list[str]:
    return [f"- {table['script']}: {where(table, 'cores', 'date', 'commit')}" for table in tables(kind)]


def ablation() -> str:
    """What each trick is worth, measured by taking it out, and what was tried and turned down."""
    rows = []
    for table in tables("ablate"):
        for row in table["rows"]:
            ratio, low, high = row["ratio"]
            how = turns(row) + (f" of {row['steps']:,} steps" if "steps" in row else "")  # older rows lack them
            shown = "-" if low == high else f"{low:.2f} - {high:.2f}"  # a single slice has no interval
            rows.append((table["script"], row["variant"], f"{ratio:.2f}", shown, how))
    columns = ["script", "change", "speed, relative to the script as it is", "95 % interval", "measured"]
    return "\n".join([markdown(columns, rows), "", "Measured on:", "", *measured_on("ablate")])


NO_GAIN = {  # of tricks that no ablation takes out; of others: the script does not work without them
    "capture": "[measured on a GPU](gpu.md), as the step from compiled to compiled with CUDA graphs",
    "flat": "not measured apart",
    "overlap": "not measured yet; it is for a GPU",
    "pinned": "not measured yet; it is for a GPU",
    "operator": "measured only together with perf[graph]: see ppo_rnn there",
}


def gain(tag: str) -> str:
    """How much faster each script is with a trick than without."""
    gains, losses, unclear = [], [], []
    for table in tables("ablate"):
        for row in table["rows"]:
            ratio, low, high = row["ratio"]
            if not row["variant"].startswith(f"without perf[{tag}]"):
                continue
            if low <= 1 <= high or low == high:  # a single run has no interval
                unclear.append(table["script"])
            else:
                (gains if ratio < 1 else losses).append(f"{1 / ratio:.2f} x ({table['script']})")
    if unclear:
        gains.append(f"no certain gain ({', '.join(unclear)})")
    if tag in NO_GAIN:
        gains.append(NO_GAIN[tag])
    for table in first_of_each_script() if tag in ("bf16", "groups") else ():  # flags, so they are modes
        speeds = {row["mode"]: row["sps"][0] for row in table["rows"]}
        if f"compile+{tag}" in speeds:
            ratio = speeds[f"compile+{tag}"] / speeds["compile"]
            (gains if ratio > 1 else losses).append(f"{ratio:.2f} x ({table['script']})")
    found = [f"**Gain:** {', '.join(gains)}."] * bool(gains) + [f"**Slower:** {', '.join(losses)}."] * bool(losses)
    return " ".join(found) or "**Gain:** not measured apart, since the script does not work without it."


def phases_cells(table: dict) -> list[tuple[str, ...]]:
    names = (*PHASES, *PHASES_TOGETHER)
    return [(row["mode"], *(f"{row[name]:,.1f}" for name in names)) for row in table["rows"]]


def phases() -> str:
    """Microseconds of an environment step in each phase of the loop, and of them in the simulator itself."""
    rows = [(table["script"], *cells) for table in tables("phases") for cells in phases_cells(table)]
    columns = ["script", "mode", *PHASES, *PHASES_TOGETHER.values()]
    return "\n".join([markdown(columns, rows), "", *measured_on("phases")])


def lowered() -> str:
    """What an H100 would run of each function that a twin compiles."""
    rows = []
    for table in tables("lowered"):
        for row in table["rows"]:
            counts = (f"{row[name]:,}" for name in ("launches", "products", "kernels", "registers", "spilled"))
            fallbacks = ", ".join(row["fallbacks"])
            size = f"{row['bytes'] / 1e6:,.1f}"
            rows.append((table["script"], row["function"], *counts, fallbacks, size, f"{row['microseconds']:,.1f}"))
    columns = ["script", "function", "launches", "products", "own kernels", "registers of a thread"]
    columns += ["bytes spilled", "falls back", "MB moved", "at least, in microseconds"]
    where_all = tables("lowered")[0]["machine"]
    return "\n".join([markdown(columns, rows), "", f"Lowered by PyTorch {where_all['torch']}, {where_all['date']}."])


def saving() -> str:
    """What a checkpoint with a full replay costs, in a sentence."""
    (table,) = tables("saving")
    (row,) = table["rows"]
    times = f"{row['save_seconds']:.1f} s to write and {row['load_seconds']:.1f} s to load"
    size = f"{row['transitions']:,} transitions of HalfCheetah take {row['bytes'] / 1e6:,.0f} MB"
    return f"{size}, {times} ({where(table)})."


def latency() -> str:
    """How long an exported policy needs for an action, in a sentence."""
    (table,) = tables("saving")
    microseconds = table["rows"][0]["policy_microseconds"]
    return f"SAC's policy of HalfCheetah takes {microseconds:,.0f} microseconds an action ({where(table)}, one thread)."


def steps() -> str:
    """How long the updates of docs/your-own-script.md take."""
    (table,) = tables("steps")
    plain = table["rows"][0]["microseconds"]
    rows = [(r["update"], f"{r['microseconds']:,.0f}", f"{plain / r['microseconds']:.2f}") for r in table["rows"]]
    shown = markdown(["update", "microseconds", "speed, relative to plain"], rows)
    return f"{shown}\n\n({where(table)}, one thread, torch {table['machine']['torch']})"


def scans() -> str:
    """How long recurrent networks take for a sequence, by its length."""
    (table,) = tables("scans")
    found = {(row["network"], row["mode"], row["steps"]): row for row in table["rows"]}
    lengths = sorted({row["steps"] for row in table["rows"]})
    rows = []
    for network, mode in dict.fromkeys(key[:2] for key in found):
        of_lengths = [found.get((network, mode, T)) for T in lengths]
        cells = [f"{row['ms']:,.1f} ms ({row['first_call_s']:,.0f} s)" if row else "-" for row in of_lengths]
        rows.append((network, mode, *cells))
    sizes = f"{table['num_envs']} envs, width {table['width']}, an episode starts in {table['resets']:.0%} of the steps"
    shown = markdown(["network", "mode", *(f"T = {T}" for T in lengths)], rows)
    return f"{shown}\n\n({sizes}; one core of {where(table, 'torch', 'date', 'commit')})"


def ray() -> str:
    """The efficiency of sleeping simulators, by the way they are called, and the formula that fits."""
    (table,) = tables("ray")
    found = {(row["way"], row["milliseconds"], row["workers"]): row["efficiency"] for row in table["rows"]}
    counts = sorted({workers for *_, workers in found})
    rows = []
    for way, milliseconds in dict.fromkeys(key[:2] for key in found):
        cells = [amount(found.get((way, milliseconds, n)), "{:.0%}") for n in counts]
        rows.append((f"{milliseconds:,} ms", way, *cells))
    shown = markdown(["step", "called by", *(f"{n} worker{'s' * (n > 1)}" for n in counts)], rows)
    durations = dict.fromkeys(milliseconds for _, milliseconds, _ in found)
    envs = ", ".join(f"{table['envs'][str(milliseconds)]} at {milliseconds:,} ms" for milliseconds in durations)
    text = "Share of the time of sampling in which simulators work, which sleep for a step; "
    text += f"envs of a worker: {envs} ({where(table, 'cores', 'torch', 'date', 'commit')})."
    if fit := table.get("fit"):
        text += f" For one env a call, the formula fits with l = {fit['latency_ms']:.2f} ms, "
        text += f"c = {fit['cost_ms']:.2f} ms (rms error {fit['rms']:.1%})."
    return f"{shown}\n\n{text}"


def processes() -> str:
    """Env steps a second by who steps the simulators, one that computes and one that sleeps."""
    (table,) = tables("processes")
    kinds = ("simulator", "milliseconds", "envs")
    rates = {(*(row[kind] for kind in kinds), row["way"]): row["steps_per_second"] for row in table["rows"]}
    ways = list(dict.fromkeys(key[3] for key in rates))
    rows = []
    for simulator, milliseconds, envs in dict.fromkeys(key[:3] for key in rates):
        cells = [amount(rates.get((simulator, milliseconds, envs, way)), "{:,.0f}") for way in ways]
        rows.append((simulator, f"{milliseconds:g} ms", str(envs), *cells))
    shown = markdown(["simulator", "step", "envs", *ways], rows)
    turns = f"{table['turns']} turn{'s' * (table['turns'] > 1)}"
    details = where(table, turns, "cores", "torch", "date", "commit")
    return f"{shown}\n\nEnv steps a second, without policy and update ({details})."


def worlds() -> str:
    """Env steps a second by the number of MuJoCo worlds: the simulator alone, and PPO with it."""
    (table,) = tables("worlds")
    alone = {"C MuJoCo": "C MuJoCo alone", "EnvPool": "EnvPool alone", "Warp, recorded": "Warp alone"}
    training = {"plain, C MuJoCo": "PPO, plain", "compiled, C MuJoCo": "PPO, compiled"}
    training["compiled, Warp"] = "PPO, compiled, with Warp"
    rows = []
    for row in table["rows"]:
        cells = [f"{row['alone'][name]:,.0f}" for name in alone]
        cells += [f"{row['training'][name]:,.0f}" for name in training]
        share = row["training"]["compiled, C MuJoCo"] / row["alone"]["C MuJoCo"]
        rows.append((f"{row['worlds']:,}", *cells, f"{share:.0%}".replace("%", " %")))
    columns = ["worlds", *alone.values(), *training.values(), "the simulator's part of PPO, compiled"]
    details = where(table, "cores", "torch", "date", "commit")
    return f"{markdown(columns, rows)}\n\nEnv steps a second of HalfCheetah-v5 ({details})."


# ---------- returns ----------


def many_seeds(returns: list[float]) -> str:
    """From 5 seeds on: the interquartile mean with a 95 % bootstrap interval (Agarwal et al. 2021, rliable)."""
    from scipy.stats import bootstrap, trim_mean

    if len(returns) < 5:
        return ""

    def iqm(values, axis=-1):
        return trim_mean(values, 0.25, axis=axis)

    low, high = bootstrap((returns,), iqm, method="percentile", rng=0).confidence_interval
    return f"; IQM {mean_std(iqm(returns), None)} [{mean_std(low, None)}, {mean_std(high, None)}]"


def in_order(group: tuple) -> tuple:
    """Sorts groups of runs: scripts and modes as the catalog does; a mode that it lacks is that of a patch."""
    (script, env_id, steps, mode), _ = group
    modes = [*CATALOG[script].modes, *CATALOG[script].peers]
    return list(CATALOG).index(script), env_id, int(steps), modes.index(mode) if mode in modes else len(modes), mode


def return_rows() -> list[tuple[str, ...]]:
    """(script, env_id, steps, mode, seeds, mean ± std, played, published) for each group of recorded runs, in order."""
    published = {}
    for row in read_csv(ROOT / "benchmark" / "published.csv"):
        shown = f"{mean_std(float(row['mean']), float(row['std']))} ({row['source']})"
        published[row["script"], row["env_id"], row["steps"]] = shown  # never beside a run of another length
    groups = defaultdict(dict)
    played = defaultdict(list)
    for run in read_csv(RESULTS / "returns.csv"):
        key = run["script"], run["env_id"], run["steps"], run["mode"]
        groups[key][run["seed"]] = float(run["episodic_return"])
        if run["played"]:
            played[key].append(float(run["played"]))
    rows = []
    for key, returns in sorted(groups.items(), key=in_order):
        script, env_id, steps, mode = key
        values = np.array(list(returns.values()))
        shown = mean_std(values.mean(), values.std(ddof=1) if len(values) > 1 else None) + many_seeds(values.tolist())
        beside = published.get((script, env_id, steps), "")
        in_games = ", ".join(mean_std(value, None) for value in played[key])
        seeds = " ".join(sorted(returns, key=int))
        rows.append((script, env_id, f"{int(steps):,}", mode, seeds, shown, in_games, beside))
    return rows


def returns(only: str | None = None) -> str:
    """Mean and standard deviation over seeds, beside the published ones, of all scripts, or of one with less detail."""
    columns = [
        "script",
        "environment",
        "steps",
        "mode",
        "seeds",
        "return",
        "each, by play.py",
        "published (CleanRL: 3 seeds)",
    ]
    if only:
        columns[5] = "[return](benchmark.md#returns)"  # where IQM is explained
        rows = [(*row[1:4], str(len(row[4].split())), *row[5:]) for row in return_rows() if row[0] == only]
        return markdown(columns[1:], rows)
    return markdown(columns, return_rows())


def mean_and_each(values: Collection[float], form: str = ",.0f") -> str:
    return f"{fmean(values):{form}} ({', '.join(f'{value:{form}}' for value in values)})"


def against_minutes(env_id: str, minutes: tuple[int, ...]) -> str:
    """Returns of all that was trained in an env after some minutes: mean, and of each seed.

    Of each mode of a script, the runs of most steps count. What has ended keeps its last return.
    """
    longest = defaultdict(int)
    for run in read_csv(RESULTS / "returns.csv"):
        if run["env_id"] == env_id:
            longest[run["script"], run["mode"]] = max(longest[run["script"], run["mode"]], int(run["steps"]))
    rows = []
    for (script, mode), steps in longest.items():
        curve = read_csv(RESULTS / "curves" / f"{script}__{env_id}__{steps}__{mode}.csv")
        cells = []
        for minute in minutes:
            so_far = [row for row in curve if float(row["seconds"]) <= 60 * minute]
            newest = {row["seed"]: float(row["episodic_return"]) for row in so_far}
            cells.append(mean_and_each(newest.values()) if newest else "-")
        rows.append((f"{script}, {LIBRARIES.get(mode, mode)}", f"{steps:,}", *cells))
    columns = ["script", "env steps", *(f"{minute} minutes" for minute in minutes)]
    return markdown(columns, rows)


def policies_against_minutes(env_id: str, *scripts: str) -> str:
    """How long each script trains, and what its policies return then: means, and of each seed."""
    sentences = []
    for script in scripts:
        runs = [run for run in read_csv(RESULTS / "returns.csv") if (run["script"], run["env_id"]) == (script, env_id)]
        runs = [run for run in runs if run["played"]]
        trained = mean_and_each([float(run["minutes"]) for run in runs], ".1f")
        played = mean_and_each([float(run["played"]) for run in runs])
        sentences.append(f"After {trained} minutes, the policies of `{script}` return {played}.")
    return " ".join(sentences)


def sweep(script: str) -> str:
    """Returns with other flags than the published ones."""
    groups = defaultdict(dict)
    for run in read_csv(RESULTS / "sweep" / "returns.csv"):
        if run["script"] == script:
            groups[run["env_id"], run["steps"], run["mode"]][run["seed"]] = float(run["episodic_return"])
    rows = []
    for (env_id, steps, mode), returns in groups.items():
        of_each = ", ".join(f"{value:,.0f}" for value in returns.values())
        rows.append((env_id, f"{int(steps):,}", f"`{mode}`", " ".join(returns), of_each))
    return markdown(["environment", "steps", "flags", "seeds", "return of each"], rows)


def earlier() -> str:
    """Returns of runs that took hours, each group with the commits of the scripts that made them."""
    groups = defaultdict(list)
    for run in read_csv(RESULTS / "earlier.csv"):
        groups[run["script"], run["env_id"], run["steps"], run["mode"]].append(run)
    rows = []
    for (script, env_id, steps, mode), runs in sorted(groups.items(), key=in_order):
        values = ", ".join(mean_std(float(run["episodic_return"]), None) for run in runs)
        commits = " ".join(sorted({run["commit"] for run in runs}))
        rows.append((script, env_id, f"{int(steps):,}", mode, values, commits))
    return markdown(["script", "environment", "steps", "mode", "return of each seed", "commits"], rows)


# ---------- what stands in the documents between <!-- NAME --> and <!-- end --> ----------

IMPALA = "--num-minibatches=1 --update-epochs=1 --no-norm-adv --gae-lambda=1"
APPO = "--num-minibatches=1 --update-epochs=2"


def blocks() -> dict[str, Callable[[], str]]:
    """What each name stands for."""
    named = {"claim": claim, "best": best, "ablation": ablation, "phases": phases, "scaling": scaling}
    named |= {"saving": saving, "steps": steps, "scans": scans, "ray": ray, "returns": returns, "lowered": lowered}
    named |= {"processes": processes, "gpu": gpu, "gpu claim": gpu_claim, "worlds": worlds}
    named |= {"latency": latency, "earlier": earlier}
    named["speed"] = lambda: speed(first_of_each_script())
    named["speed elsewhere"] = lambda: speed([t for t in of_catalog() if t not in first_of_each_script()])
    breakout = {"script": "pqn_device_env", "env_id": "MinAtar/Breakout-v1"}
    named["speed of pqn in breakout"] = lambda: speed(tables("speed", **breakout))
    for name, value in {"impala": IMPALA, "appo": APPO}.items():
        named[f"speed {name}"] = lambda value=value: speed(tables("speed", flags=value))
    for script in CATALOG:
        named[f"returns {script}"] = lambda script=script: returns(script)
    named["minutes"] = lambda: against_minutes("HalfCheetah-v5", (2, 4, 8, 16))
    off_policy = ("td3_mujoco", "td3_continuous_action")
    named["policies"] = lambda: policies_against_minutes("HalfCheetah-v5", *off_policy)
    named["sweep ppo_mujoco"] = lambda: sweep("ppo_mujoco")
    for tag in re.findall(r"<!-- gain (\w+) -->", (ROOT / "docs" / "performance.md").read_text()):
        named[f"gain {tag}"] = lambda tag=tag: gain(tag)
    return named
