"""Pictures of the table: speed and accuracy of some systems, and the convergence of the Pipe-SGD paper's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments import figures
from experiments.figures import PaperFigure
from experiments.results import Row, grouped
from experiments.style import BLACK, BLUE, ORANGE, PURPLE, SKY, TITLES, method_styles, model_title
from experiments.systems.accuracy import Curve, Key, best_curves
from experiments.systems.catalogue import NAME
from experiments.systems.table import BASELINE, REFERENCE, seconds_until
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
OURS = "pipesgd-int4"
SHOWN_SHARE = 0.75
"""Share of the best accuracy at which the axis of a curve begins, unless a curve ends lower."""
COMPARED = {
    "ps-sync": BLACK,
    REFERENCE: ORANGE,
    BASELINE: PURPLE,
    "ddp-fp16": PURPLE,
    "diloco": BLACK,
    "pipe-sgd-q": BLACK,
    "pipesgd": SKY,
    "pipesgd-int8": BLUE,
    "pipesgd-int4": SKY,
}
"""Systems of the picture of speed-ups, from the top, and their colours; the table has all others."""
SET_OFF = "pipesgd-int8"
RATES = {"200mbit": ("200 Mbit/s", "full"), "1gbit": ("1 Gbit/s", "none")}
"""Rates of the links as people write them, and how their marks are filled."""
TICKS = (0.2, 0.5, 1, 2, 5, 10)


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
        linewidth = 2.4 if system in (BASELINE, OURS) else 1.4
        axes.plot(x, percent.mean(axis=0), label=TITLES[system], markersize=3, linewidth=linewidth, **look)
        if shortest:  # else a seed has diverged
            axes.fill_between(x, percent.min(axis=0), percent.max(axis=0), color=look["color"], alpha=0.15)
            ends.append(float(percent.mean(axis=0)[-1]))
    timed = rows[0]["timed"]
    if timed:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    if ends:
        axes.set_ylim(min(SHOWN_SHARE * max(ends), 0.95 * min(ends)), 1.01 * max(ends))
    axes.set(
        title=model_of(rows),
        xlabel="calculated time of training (s)" if timed else "iterations",
        ylabel="test accuracy (%)",
    )
    figures.legend_below(axes, ncols=4)
    return axes


def model_of(rows: Sequence[Row]) -> str:
    """Return the name of the rows' model, for people."""
    return model_title(rows[0].get("workload") or rows[0]["panel"].split(",")[0])


def convergence_message(rows: list[Row]) -> str:
    """Return how long synchronous training with DDP takes, in times of our method's, and how the paper's ends."""
    ends: dict[tuple[str, str], list[list[float]]] = {}
    for row in rows:
        if row["points"]:
            ends.setdefault((row["panel"], row["system"]), []).append(row["points"][-1])
    mean = {key: np.mean(points, axis=0) for key, points in ends.items()}
    compared = (OURS, BASELINE, REFERENCE, "pipe-sgd")
    panels = [panel for panel, name in mean if name == OURS and all((panel, one) in mean for one in compared)]
    if not panels:
        return "Test accuracy over the calculated time of training"
    faster = [mean[panel, BASELINE][0] / mean[panel, OURS][0] for panel in panels]
    lost = [100 * (mean[panel, REFERENCE][1] - mean[panel, "pipe-sgd"][1]) for panel in panels]
    return (
        f"{TITLES[OURS]} runs {min(faster):.1f} to {max(faster):.1f} times as fast as DDP (emulated, 200 Mbit/s); "
        f"Pipe-SGD without warm-up and prediction ends {min(lost):.0f} to {max(lost):.0f} points lower"
    )


def plot_speedups(rows: list[Row], axes: Axes) -> Axes:
    """Draw one workload with accelerators: how many times as fast as DDP each system is, a mark for each rate.

    At the right end is by how many points its accuracy differs from that of synchronous training.
    """
    own = {(row["system"], row["rate"]): row for row in rows}
    names = [name for name in COMPARED if (name, rows[0]["rate"]) in own]
    for place, name in enumerate(names):
        for rate, (_, fill) in RATES.items():
            row = own.get((name, rate))
            if row is None or row["times_as_fast_as_ddp"] is None:
                continue
            ratio, colour = row["times_as_fast_as_ddp"], COMPARED[name]
            axes.plot([ratio], [place], "o", color=colour, fillstyle=fill, markersize=6, label="_")
            low, high = (row[f"times_as_fast_as_ddp_{end}"] for end in ("low", "high"))
            axes.plot([low, high], [place, place], color=colour, linewidth=1, label="_")
        axes.annotate(
            _difference(own[name, rows[0]["rate"]]),
            (1, place),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
        )
    axes.axvline(1, color=BLACK, linewidth=0.8, linestyle=":")
    for title, fill in RATES.values():
        axes.plot([], [], "o", color=BLACK, fillstyle=fill, label=f"{title}, with 95 % interval")
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    ratios = [row["times_as_fast_as_ddp"] for row in own.values() if row["times_as_fast_as_ddp"] is not None]
    axes.set_xlim(min(0.25, *ratios) / 1.2, 4 * max(5, *ratios))  # room for the points of accuracy
    axes.set(title=f"{model_of(rows)} (right: points of accuracy)", xlabel="times as fast as DDP")
    figures.legend_below(axes, ncols=2)
    return axes


def speedups_message(rows: list[Row]) -> str:
    """Return the speed-ups of the system that is set off, over the workloads, at each rate."""
    parts = []
    for rate, (title, _) in RATES.items():
        ratios = [row["times_as_fast_as_ddp"] for row in rows if (row["system"], row["rate"]) == (SET_OFF, rate)]
        if ratios:
            parts.append(f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as DDP at {title}")
    return f"{TITLES[SET_OFF]} (width 2) is {', '.join(parts)} (emulated links and accelerators)"


def _difference(row: Row) -> str:
    if row["accuracy_mean"] is None:
        return "diverges" if row["seeds"] else ""
    return "" if row["accuracy_difference"] is None else f"{100 * row['accuracy_difference']:+.1f}"


CONVERGENCE = PaperFigure(
    name=f"{NAME}_convergence",
    title="Convergence",
    caption="Test accuracy over the time of training on four emulated nodes at 200 Mbit/s with emulated accelerators. "
    "The time is calculated: iterations times the time of one. The methods are those of the Pipe-SGD paper (a "
    "parameter server, synchronous all-reduces, and the pipeline without warm-up, also with its two codecs), DDP, and "
    "pipesgd with int4, which predicts weights. Lines are means of three seeds, in the band from the lowest to the "
    "highest; the parameter server and DDP have one seed.",
    message=convergence_message,
    plot=plot_curves,
    height=2.6,
    abreast=2,
    has=lambda row: row["timed"],
    columns="json",
    module=NAME,
)
SPEEDUPS = PaperFigure(
    name=NAME,
    title="Speed-ups and final accuracy",
    caption="How many times as fast as DistributedDataParallel an iteration of some systems is, on four emulated nodes "
    "with emulated accelerators at two rates, with the 95 % interval of the median. At the right is by how many points "
    "a system's accuracy ends above that of synchronous training. pipesgd at width 1 has no late gradient.",
    message=speedups_message,
    plot=plot_speedups,
    height=2.7,
    abreast=2,
    by=("workload",),
    has=lambda row: row["system"] in COMPARED and row["computes"] != CORES,
    share_y=True,
)
