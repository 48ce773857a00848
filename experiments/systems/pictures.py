"""Pictures of the table: speed and accuracy of every system, and the convergence of the Pipe-SGD paper's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments import figures
from experiments.figures import PaperFigure
from experiments.results import Row, grouped
from experiments.style import BLACK, GREY, method_styles
from experiments.systems.accuracy import Curve, Key, best_curves
from experiments.systems.catalogue import NAME
from experiments.systems.table import BASELINE, seconds_until
from experiments.systems.workloads import CORES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = {
    "ps-sync": "ps-sync",
    "d-sync": "D-Sync",
    "ddp": "ddp",
    "pipe-sgd": "pipelined",
    "pipe-sgd-t": "pipelined, truncate16",
    "pipe-sgd-q": "pipelined, int8",
    "pipesgd-int4": "ours, int4",
}
"""Systems with a curve, the paper's, DDP and ours, and the names by which they have colours in other pictures, too."""
TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50)
SHOWN_SHARE = 0.75
"""Share of the best accuracy at which the axis of a curve begins, unless a curve ends lower."""


def curve_rows(rows: Sequence[Row], curves: Mapping[Key, Curve]) -> list[Row]:
    """Return a row for every curve, first over iterations, and then over their time in the table's first place.

    That time is calculated: ``table.seconds_until``. ``rows`` are those of the table.
    """
    place, best = (rows[0]["rate"], rows[0]["computes"]), best_curves(curves)
    there = {(row["workload"], row["system"]): row for row in rows if (row["rate"], row["computes"]) == place}
    return [
        {
            "panel": f"{workload}, {place[0]}" if timed else workload,
            "timed": timed,
            "system": system,
            "seed": seed,
            "points": [[seconds_until(row, at) if timed else at, accuracy] for at, accuracy in curve.points],
        }
        for timed in (False, True)
        for (workload, system), row in there.items()
        if system in SHOWN
        for seed, curve in enumerate(best[workload, system][1])
    ]


def plot_curves(rows: list[Row], axes: Axes) -> Axes:
    """Draw a panel of curves: the mean of the seeds, and the band between the lowest and the highest."""
    looks = method_styles(list(SHOWN.values()))
    ends = []
    for system, own in grouped(rows, "system").items():
        look = looks[SHOWN[system]]
        shortest = min(len(row["points"]) for row in own)
        points = np.array([row["points"][:shortest] for row in own], dtype=float).reshape(len(own), shortest, 2)
        x, percent = points[:, :, 0].mean(axis=0), 100 * points[:, :, 1]
        axes.plot(x, percent.mean(axis=0), label=system, markersize=2, **look)
        if shortest:  # else a seed has diverged
            axes.fill_between(x, percent.min(axis=0), percent.max(axis=0), color=look["color"], alpha=0.15)
            ends.append(float(percent.mean(axis=0)[-1]))
    timed = rows[0]["timed"]
    if timed:
        axes.set_xscale("log")
    if ends:
        axes.set_ylim(min(SHOWN_SHARE * max(ends), 0.95 * min(ends)), 1.01 * max(ends))
    axes.set(
        title=rows[0]["panel"],
        xlabel="calculated time of training (s)" if timed else "iterations",
        ylabel="test accuracy (%)",
    )
    figures.legend_below(axes, ncols=4)
    return axes


def plot_speedups(rows: list[Row], axes: Axes) -> Axes:
    """Draw one workload and link, with DDP: how many times as fast as that each system is, measured and predicted.

    The fastest is at the top. Next to its name is the difference of its accuracy from that of synchronous training.
    """
    baseline_s = next(row["iteration_s"] for row in rows if row["system"] == BASELINE)
    known = [row for row in rows if row["times_as_fast_as_ddp"] is not None]
    known.sort(key=lambda row: -row["times_as_fast_as_ddp"])
    for place, row in enumerate(known):
        ratio = row["times_as_fast_as_ddp"]
        ends = [[max(ratio - row["times_as_fast_as_ddp_low"], 0)], [max(row["times_as_fast_as_ddp_high"] - ratio, 0)]]
        axes.errorbar([ratio], [place], xerr=ends, fmt="o", color=BLACK, markersize=3, capsize=2, linewidth=1)
        if row["predicted_s"] is not None:
            axes.plot([baseline_s / row["predicted_s"]], [place], "x", color=GREY, markersize=5)
    axes.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
    axes.plot([], [], "o", color=BLACK, label="measured, with 95 % interval")
    axes.plot([], [], "x", color=GREY, label="predicted")
    axes.set_yticks(range(len(known)), [f"{row['system']}  {_difference(row)}" for row in known])
    axes.tick_params(axis="y", labelsize="x-small")
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    ratios = [row[f"times_as_fast_as_ddp{end}"] for row in known for end in ("_low", "_high")]
    axes.set_xlim(0.85 * min(ratios), 1.2 * max(ratios))
    cores = ", no accelerators" if rows[0]["computes"] == CORES else ""
    axes.set(title=f"{rows[0]['workload']}, {rows[0]['rate']}{cores}", xlabel="times as fast as DDP")
    figures.legend_below(axes, ncols=2)
    return axes


def _difference(row: Row) -> str:
    if row["accuracy_mean"] is None:
        return "(diverges)" if row["seeds"] else ""
    return "" if row["accuracy_difference"] is None else f"({100 * row['accuracy_difference']:+.1f})"


CONVERGENCE = PaperFigure(
    name=f"{NAME}_convergence",
    title="Convergence",
    caption="Test accuracy over iterations, and over the time that these take on four emulated nodes at 200 Mbit/s "
    "with emulated accelerators, which is calculated: the methods of the Pipe-SGD paper (a parameter server, "
    "synchronous all-reduces, and pipelines without a prediction, also with its two codecs), DDP, and pipesgd with "
    "int4. Lines are means of three seeds, in the band from the lowest to the highest; the parameter server and DDP "
    "have one seed.",
    plot=plot_curves,
    panel=(3.6, 3.2),
    abreast=4,
    columns="json",
    module=NAME,
)
SPEEDUPS = PaperFigure(
    name=NAME,
    title="Speed-ups and final accuracy",
    caption="How many times as fast as DistributedDataParallel an iteration of each system is on four emulated nodes, "
    "measured (dots, with the 95 % interval of the median) and predicted (crosses). In brackets next to a name: by how "
    "many points its accuracy ends above that of synchronous training.",
    plot=plot_speedups,
    panel=(4.6, 5.0),
    by=("workload", "rate", "computes"),
)
