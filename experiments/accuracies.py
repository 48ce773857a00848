"""Test accuracy over wall-clock time: from cells to rows, a table and a figure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments import command
from experiments.cells import Cell
from experiments.contenders import Contender
from experiments.paired import median
from experiments.results import Row, grouped
from experiments.style import BLACK, TITLES, method_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOWEST_SHOWN = 20
"""Points of accuracy below the target from where a curve is drawn."""


def seconds_to(target: float, points: Sequence[Sequence[float]]) -> float | None:
    """Return the seconds at which the line through the ``points`` first reaches ``target``; None if it never does.

    None, too, if the first point has reached it already: nobody evaluated before, so the crossing is not known.

    >>> seconds_to(0.75, [[10.0, 0.5], [20.0, 1.0], [30.0, 0.5]])
    15.0
    """
    if points and points[0][1] < target:
        for (begin, low), (end, high) in itertools.pairwise(points):
            if high >= target:
                return begin + (end - begin) * (target - low) / (high - low)
    return None


def summarize(contenders: Sequence[Contender], cells: Sequence[Cell], target: float) -> list[Row]:
    """Return a row for every contender and seed, with all points of its curve."""
    return [
        {
            "contender": one.name,
            "seed": cell.index,
            "target_accuracy": target,
            "seconds_to_target": seconds_to(target, cell.points),
            "final_accuracy": cell.points[-1][1] if cell.points else None,
            "final_seconds": cell.points[-1][0] if cell.points else None,
            "iteration_median_s": cell.iteration_s,
            "train_loss": cell.loss,
            "failure": cell.failure,
            "seconds_and_accuracy": cell.points,
        }
        for one in contenders
        for cell in sorted((cell for cell in cells if cell.contender == one.name), key=lambda cell: cell.index)
    ]


def medians(rows: Sequence[Row]) -> list[Row]:
    """Return a row for every contender: medians over seeds; no seconds unless every seed was seen to cross the target.

    A median over only the seeds that reached it would be that of the lucky ones.
    """
    found = []
    for name, own in grouped(rows, "contender").items():
        reached = [row["seconds_to_target"] for row in own if row["seconds_to_target"] is not None]
        final = [row["final_accuracy"] for row in own if row["final_accuracy"] is not None]
        found.append(
            {
                "contender": name,
                "seeds": len(own),
                "reached": len(reached),
                "seconds_to_target_median": median(reached) if len(reached) == len(own) else None,
                "final_accuracy_median": median(final) if final else None,
                "final_accuracy_lowest": min(final, default=None),
                "final_accuracy_highest": max(final, default=None),
            }
        )
    return found


def plot(rows: Sequence[Row], axes: Axes, title: str) -> Axes:
    """Draw curves of accuracy over seconds; bars that end at the seconds where runs were evaluated only once."""
    if any(len(row["seconds_and_accuracy"]) > 1 for row in rows):
        _plot_curves(rows, axes)
    else:
        _plot_ends(rows, axes)
    axes.set_title(title)
    return axes


def _plot_curves(rows: Sequence[Row], axes: Axes) -> None:
    """Draw a line for every contender and seed, a colour for every contender; the target as a line across."""
    styles = method_styles([row["contender"] for row in rows])
    for middle in medians(rows):
        name, seconds = str(middle["contender"]), middle["seconds_to_target_median"]
        curves = [row["seconds_and_accuracy"] for row in rows if row["contender"] == name]
        label = TITLES.get(name, name) + ("" if seconds is None else f": {seconds:.1f} s")
        if not any(curves):
            label += " (failed)"
        for number, points in enumerate(curves):
            axes.plot(
                [at for at, _ in points],
                [100 * accuracy for _, accuracy in points],
                linewidth=1,
                label="_" if number else label,
                **(styles[name] | {"marker": ""}),
            )
    target = 100 * rows[0]["target_accuracy"]
    axes.axhline(target, color=BLACK, linestyle="--", linewidth=1, label="_")
    last = max((row["final_seconds"] for row in rows if row["final_seconds"] is not None), default=1.0)
    axes.annotate(f"{target:g} %", (last, target), xytext=(0, -4), textcoords="offset points", ha="right", va="top")
    axes.set_xlim(0, 1.02 * last)
    axes.set_ylim(target - LOWEST_SHOWN)
    axes.set(xlabel="seconds of training, evaluations left out", ylabel="test accuracy (%)")
    axes.legend(title=f"median seconds to {target:g} %", loc="lower right", fontsize="small")


def _plot_ends(rows: Sequence[Row], axes: Axes) -> None:
    """Draw a bar for every contender: the median length of its runs, with the median final accuracy at its end."""
    styles = method_styles([row["contender"] for row in rows])
    names = list(dict.fromkeys(row["contender"] for row in rows))
    for place, middle in enumerate(medians(rows)):
        name, accuracy = middle["contender"], middle["final_accuracy_median"]
        own = [row["final_seconds"] for row in rows if row["contender"] == name and row["final_seconds"] is not None]
        seconds = median(own) if own else 0.0
        axes.barh(place, seconds, color=styles[name]["color"])
        text = f"{seconds:.0f} s, {100 * accuracy:.2f} %" if own and accuracy is not None else "failed"
        axes.annotate(text, (seconds, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(names)), [TITLES.get(name, name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
    axes.set_xlabel("seconds of training (the same iterations for all); test accuracy at the end")


def show(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table for people."""
    texts = []
    for middle in medians(rows):
        own = [row for row in rows if row["contender"] == middle["contender"]]
        seconds = middle["seconds_to_target_median"]
        final = [middle[f"final_accuracy_{name}"] for name in ("median", "lowest", "highest")]
        texts.append(
            {
                "contender": middle["contender"],
                "s to target, by seed": ", ".join(map(_reached, own)),
                "median": f"{middle['reached']} of {middle['seeds']} seen" if seconds is None else f"{seconds:.1f}",
                "final accuracy %": ""
                if final[0] is None
                else "{:.2f} {:.2f}-{:.2f}".format(*(100 * x for x in final)),
            }
        )
    command.show(title, texts)


def _reached(row: Row) -> str:
    if row["failure"]:
        return "failed"
    return "not seen" if row["seconds_to_target"] is None else f"{row['seconds_to_target']:.1f}"


def notes(rows: Sequence[Row]) -> list[str]:
    """Return notes that the table does not contain, one per line."""
    lines = ["seconds of training, without evaluations; the crossing of the target is interpolated between two of them"]
    return lines + [
        f"{row['contender']}, seed {row['seed']} failed: {row['failure']}" for row in rows if row["failure"]
    ]
