"""Pictures of archived experiments that pages show, drawn again from their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments.figures import PaperFigure
from experiments.results import Row, grouped
from experiments.style import TITLES, method_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DDP, PLAIN, SPLIT = "DDP", "pipesgd, int4", "pipesgd, int4, 2 fragments, all-to-all"
CONTENDERS = {DDP: "ddp", "DDP, fp16": "ddp, fp16", PLAIN: "width 2, int4", SPLIT: "width 2, int8"}
"""Contenders that are shown, and the methods whose looks they have."""
NAMES = {DDP: (DDP, 0), "DDP, fp16": (TITLES["ddp-fp16"], 0), PLAIN: (PLAIN, 4), SPLIT: ("2 fragments, all-to-all", -4)}
"""Names at the right ends of their lines, and how much above them, in points."""
ACCELERATORS = "at_least"
"""Accelerators that run the real model, and take the given time or more."""


def best_of(rows: list[Row]) -> dict[str, dict[float, Row]]:
    """Return, by contender and rate of the links, the row of the local steps that reach the accuracy first."""
    best: dict[str, dict[float, Row]] = {}
    for (contender, rate), own in grouped(rows, "contender", "mbit_per_s").items():
        reached = [row for row in own if row["seconds_to_accuracy"] is not None]
        if reached:
            best.setdefault(contender, {})[rate] = min(reached, key=lambda row: row["seconds_to_accuracy"])
    return best


def message(rows: list[Row]) -> str:
    """Return how much earlier than DDP the fastest contender is at the slowest rate."""
    best = best_of(rows)
    rate = min(best[DDP])
    ratios = [best[name][rate]["times_as_fast_as_ddp"] for name in CONTENDERS if rate in best.get(name, {})]
    return (
        f"On emulated lines of {rate:g} Mbit/s, local steps reach {100 * rows[0]['accuracy_to_reach']:.1f} % up to "
        f"{max(ratios):.0f} times as early as DDP (calculated)"
    )


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw the minutes to the accuracy against the rate of the links, each line with its name and its local steps."""
    best, looks = best_of(rows), method_styles(list(CONTENDERS.values()))
    for name, method in CONTENDERS.items():
        line = best.get(name, {})
        minutes = [row["seconds_to_accuracy"] / 60 for row in line.values()]
        axes.plot(list(line), minutes, **looks[method], linewidth=2.4 if name == DDP else 1.4, label=name)
        title, above = NAMES[name]
        for (rate, row), at in zip(line.items(), minutes, strict=True):
            steps = f"H {row['local_steps']}" if row["local_steps"] > 1 else ""
            if rate == max(line):
                name = ", ".join(filter(None, (title, steps)))
                axes.annotate(name, (rate, at), xytext=(8, above), textcoords="offset points", va="center")
            elif steps:
                axes.annotate(
                    steps,
                    (rate, at),
                    xytext=(0, 3 * above / 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if above > 0 else "top",
                )
    axes.set(xscale="log", yscale="log", xlabel="rate of the links (Mbit/s)", ylabel="minutes to the accuracy")
    axes.minorticks_off()
    axes.set_xticks(sorted({row["mbit_per_s"] for row in rows}))
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=1)
    axes.set_xlim(right=2.5 * max(row["mbit_per_s"] for row in rows))  # room for the names
    return axes


LOCAL_STEPS_TIME = PaperFigure(
    name="local_steps_time",
    title="Time to an accuracy with local steps",
    caption="Minutes to an accuracy against the rate of the links, with the best number H of local steps at each rate.",
    message=message,
    plot=plot,
    height=3.3,
    by=("accelerator",),
    has=lambda row: row["accelerator"] == ACCELERATORS,
)
