"""The figure of ``experiments/staleness.py``: a panel for every workload and optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from experiments import style
from experiments.results import Panels, Row
from experiments.staleness_runs import BASELINE, METHODS, WORKLOADS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHOD_COLOURS = {
    "sync": style.METHODS["D-Sync"],
    "stale": style.METHODS["no prediction"],
    "eager": style.METHODS["width 2"],
    "eager, width 3": style.METHODS["width 3"],
    "local": style.WINE,
}
"""Colours of methods, as in all figures but for ``local``, which elsewhere is training without communication."""


class Judged(NamedTuple):
    """The measure that a workload is judged by."""

    mean: str
    """Column of the mean over seeds."""
    seeds: str
    """Prefix of the columns of single seeds."""
    factor: float
    """Factor from a value in the column to the one shown."""
    label: str
    shown: Callable[[Sequence[float]], tuple[float, float]]
    """Function from all values to the lowest and the highest one that the figure has room for."""


ACCURACY = Judged(
    "accuracy_mean", "accuracy_seed_", 100, "test accuracy (%)", lambda values: (max(values) - 8, max(values) + 0.5)
)
LOSS = Judged(
    "test_loss_mean", "loss_seed_", 1, "test loss (nats)", lambda values: (0.98 * min(values), 1.3 * min(values))
)


def plot(rows: Sequence[Row], axes: Axes) -> Axes:
    """Plot accuracy or loss against the learning rate for one workload and optimizer; with one rate only, all seeds.

    Methods that were tried at only one of several rates appear in the table alone.
    """
    judged = LOSS if WORKLOADS[rows[0]["workload"]].judged_by_loss else ACCURACY
    axes.set_title(f"{rows[0]['workload']}, {rows[0]['optimizer']}")
    if len({row["lr"] for row in rows}) == 1:
        return _plot_methods(rows, judged, axes)
    good = [row for row in rows if row[judged.mean] is not None]
    spare, markers = itertools.cycle(style.SPARE), itertools.cycle("os^Dv<>P")
    for method in METHODS:
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["lr"])
        if len(own) > 1:
            there = [row for row in own if row in good]
            values, colour = (
                [judged.factor * row[judged.mean] for row in there],
                METHOD_COLOURS.get(method) or next(spare),
            )
            axes.plot([row["lr"] for row in there], values, color=colour, marker=next(markers), label=method)
    values = [judged.factor * row[judged.mean] for row in good]
    if values:
        axes.set_ylim(*judged.shown(values))
    axes.set_xscale("log", base=2)
    axes.set(xlabel="peak learning rate", ylabel=f"{judged.label}, mean of seeds")
    axes.set_xticks(sorted({row["lr"] for row in rows}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend()
    return axes


def _plot_methods(rows: Sequence[Row], judged: Judged, axes: Axes) -> Axes:
    """Plot every seed of every method, their mean, and a line at synchronous training's mean."""
    rows = sorted(rows, key=lambda row: list(METHODS).index(row["method"]))
    for place, row in enumerate(rows):
        if row[judged.mean] is None:
            axes.annotate("diverges", (0.02, place), xycoords=("axes fraction", "data"), va="center")
            continue
        seeds = [judged.factor * value for name, value in row.items() if name.startswith(judged.seeds)]
        colour = METHOD_COLOURS.get(row["method"], style.GREY)
        axes.plot(seeds, [place] * len(seeds), linestyle="", marker="o", markerfacecolor="none", color=colour)
        axes.plot([judged.factor * row[judged.mean]], [place], linestyle="", marker="|", markersize=14, color=colour)
        if row["method"] == BASELINE:
            axes.axvline(judged.factor * row[judged.mean], color=colour, linewidth=1)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"{judged.label}, every seed and their mean; learning rate {rows[0]['lr']:g}")
    return axes


draw = Panels(by=("workload", "optimizer"), plot=plot, panel=(7.0, 4.5), abreast=3).save
"""Function that writes the figure, with a panel for every workload and optimizer."""
