"""Draws what benchmark/results holds, and writes its numbers into README.md and docs/.

    python benchmark/plot.py            # results/*.png, and every block between <!-- NAME --> and <!-- end -->
    python benchmark/plot.py --check    # change nothing; exit code 1 if a block does not show the results

A block is a function of tables.py. A measured number outside of blocks says "by hand".
"""

import re
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import numpy as np
import tyro
from results import RESULTS, ROOT, read_csv
from tables import blocks, is_ours, minutes, ppo_rows, where

DOCUMENTS = [ROOT / "README.md", ROOT / "benchmark" / "notebook.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS, PEER, PLAIN = "#2b6cb0", "#a0aec0", "#c05621"
COLORS = {"eager": PLAIN, "no memory": "#718096", "jax": "#805ad5", "no sticky actions": "#2f855a"}
COLORS |= dict.fromkeys(("sb3", "sb3 contrib", "purejaxql"), "#d69e2e")


@contextmanager
def picture(path: Path, rows: int, columns: int, size: tuple[float, float], **options):
    """Panels to draw on, (rows, columns), which are saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    yield figure, panels
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=7)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def bars(found: list[dict], path: Path):
    """One panel a table: steps/s of each mode, with its 95 % interval and its ratio to the first."""
    heights = [len(table["rows"]) for table in found]
    size = (8, 0.7 + 0.34 * sum(heights) + 0.6 * len(found))
    with picture(path, len(found), 1, size, height_ratios=heights) as (_, panels):
        for panel, table in zip(panels[:, 0], found, strict=True):
            names = [row["mode"] for row in table["rows"]]
            speeds, low, high = np.array([row["sps"] for row in table["rows"]]).T
            colors = [OURS if is_ours(name) else PEER for name in names]
            panel.barh(names, speeds, xerr=[speeds - low, high - speeds], color=colors, error_kw={"lw": 1})
            for y, row in enumerate(table["rows"]):
                panel.text(
                    high[y] + speeds.max() * 0.01, y, f"{speeds[y]:,.0f}  ({row['ratio'][0]:.2f} x)", va="center"
                )
            panel.invert_yaxis()
            panel.set_xlim(0, high.max() * 1.2)
            env_id = table["env_id"].removeprefix("popgym:popgym-")
            title = f"{table['script']}, {env_id}: steps/s\n{where(table, 'cores')}"
            panel.set_title(title, loc="left", fontsize=8)


def curves(script: str, path: Path):
    """A panel for each environment and length of training of a script: return against steps, a thin line a seed.

    A thick line is the mean of the seeds. What is published is shown where it took as many steps.
    """
    panels_of = defaultdict(list)
    for file in sorted((RESULTS / "curves").glob(f"{script}__*.csv")):
        _, env_id, total_timesteps, mode = file.stem.split("__")
        panels_of[script, env_id, total_timesteps].append((mode.replace("-", " "), read_csv(file)))
    height = -(-len(panels_of) // 2)
    with picture(path, height, 2, (7.2, 1.9 * height)) as (figure, panels):
        for panel in panels.flat[len(panels_of) :]:
            panel.axis("off")
        for panel, (key, runs) in zip(panels.flat, panels_of.items()):
            for mode, rows in runs:
                color = COLORS.get(mode, OURS)
                returns_at = defaultdict(list)
                returns_of = defaultdict(dict)
                for row in rows:
                    returns_at[int(row["step"])].append(float(row["episodic_return"]))
                    returns_of[row["seed"]][int(row["step"])] = float(row["episodic_return"])
                for of_seed in returns_of.values():
                    panel.plot(of_seed.keys(), of_seed.values(), color=color, lw=0.8, alpha=0.4)
                steps = sorted(returns_at)
                panel.plot(steps, [fmean(returns_at[step]) for step in steps], color=color, lw=1.5, label=mode)
            for published in read_csv(ROOT / "benchmark" / "published.csv"):
                if (published["script"], published["env_id"], published["steps"]) == key:
                    mean, std = float(published["mean"]), float(published["std"])
                    panel.axhspan(mean - std, mean + std, color="#718096", alpha=0.2, lw=0, label="published, final")
            panel.set_title(key[1].removeprefix("popgym_popgym-"), loc="left", fontsize=8)
            panel.legend(fontsize=7, frameon=False)
        figure.supxlabel("environment steps", fontsize=8)
        figure.supylabel("mean episodic return", fontsize=8)


def duration(path: Path):
    """The minutes that a million steps of PPO take, a bar for each way to run it; the first start is shaded."""
    table, rows = ppo_rows()
    with picture(path, 1, 1, (7.2, 2.2)) as (_, panels):
        panel = panels[0, 0]
        starts = np.array([max(row["startup_seconds"], 0) / 60 for row in rows.values()])
        totals = np.array([minutes(row) for row in rows.values()])
        colors = [OURS, PLAIN, PEER, PEER]
        panel.barh([*rows], starts, color=colors, hatch="////", edgecolor="white", lw=0)
        panel.barh([*rows], totals - starts, left=starts, color=colors)
        for y, total in enumerate(totals):
            panel.text(total + totals.max() * 0.01, y, f"{total:.1f}", va="center", fontsize=9)
        panel.invert_yaxis()
        panel.set_xlabel("minutes for a million steps; shaded: the first start, with its compilation", fontsize=8)
        cores = table["machine"]["cores"]
        panel.set_title(f"PPO, {table['env_id']}, on {cores} cores of a CPU", loc="left", fontsize=9)


def cheetahs(path: Path):
    """Mean returns of HalfCheetah-v5 against env steps, of one env and of many worlds."""
    with picture(path, 1, 1, (7.2, 2.4)) as (_, panels):
        panel = panels[0, 0]
        for script, color in (("ppo_continuous_action", PLAIN), ("ppo_mujoco", OURS)):
            for file in sorted((RESULTS / "curves").glob(f"{script}__HalfCheetah-v5__*__compile.csv")):
                returns_at = defaultdict(list)
                for row in read_csv(file):
                    returns_at[int(row["step"])].append(float(row["episodic_return"]))
                steps = sorted(returns_at)
                label = f"{script}, {int(file.stem.split('__')[2]) / 1e6:g}M steps"
                panel.plot(np.array(steps) / 1e6, [fmean(returns_at[step]) for step in steps], color=color, label=label)
        panel.set_xlabel("million env steps", fontsize=8)
        panel.set_ylabel("mean episodic return", fontsize=8)
        panel.legend(fontsize=7, frameon=False)
        panel.set_title("HalfCheetah-v5", loc="left", fontsize=9)


def filled(text: str) -> str:
    """A document with all of its blocks made anew."""
    for name, block in blocks().items():
        pattern = rf"(<!-- {name} -->\n)(?:(?!<!--).)*(<!-- end -->)"  # never past another mark
        text = re.sub(pattern, lambda found, block=block: found[1] + block() + "\n" + found[2], text, flags=re.DOTALL)
    return text


def main(check: bool = False):
    stale = [path for path in DOCUMENTS if filled(path.read_text()) != path.read_text()]
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if check:
        sys.exit(f"error: {names} do not show benchmark/results; run benchmark/plot.py" if stale else 0)
    for path in stale:
        path.write_text(filled(path.read_text()))
    for script in sorted({file.stem.split("__")[0] for file in (RESULTS / "curves").glob("*.csv")}):
        curves(script, RESULTS / f"returns_{script}.png")
    duration(RESULTS / "minutes.png")
    cheetahs(RESULTS / "cheetahs.png")
    print(f"updated: {names or 'nothing'}; drew the pictures")


if __name__ == "__main__":
    tyro.cli(main)
