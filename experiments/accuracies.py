"""Test accuracy over wall-clock time: from cells to rows, a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments import command
from experiments.cells import Cell
from experiments.contenders import Contender
from experiments.paired import median
from experiments.results import Row
from experiments.style import method_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def seconds_to(target: float, points: Sequence[Sequence[float]]) -> float | None:
    """Return the seconds at the first of ``points`` that has reached ``target``; None if none has. No interpolation.

    >>> seconds_to(0.8, [[10.0, 0.75], [20.0, 0.81], [30.0, 0.79]])
    20.0
    """
    return next((seconds for seconds, accuracy in points if accuracy >= target), None)


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
    """Return medians over seeds, a row for every contender; the seconds are None unless every seed reached the target.

    A median over only the seeds that reached it would be that of the lucky ones.
    """
    found = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == name]
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
    """Draw a line for every contender and seed, a colour for every contender, and a horizontal line at the target."""
    styles = method_styles([row["contender"] for row in rows])
    for row in rows:
        points = row["seconds_and_accuracy"]
        first = row is next(other for other in rows if other["contender"] == row["contender"])
        label = row["contender"] + ("" if points else " (failed)")
        axes.plot(
            [seconds for seconds, _ in points],
            [100 * accuracy for _, accuracy in points],
            linewidth=1,
            label=label if first else "_",
            **styles[row["contender"]],
        )
    target = 100 * rows[0]["target_accuracy"]
    axes.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target, {target:g} %")
    axes.set(title=title, xlabel="time of training (s)", ylabel="test accuracy (%)")
    axes.legend(loc="lower right", fontsize="small")
    return axes


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
                "median": f"{middle['reached']} of {middle['seeds']} reached" if seconds is None else f"{seconds:.1f}",
                "final accuracy %": ""
                if final[0] is None
                else "{:.2f} {:.2f}-{:.2f}".format(*(100 * x for x in final)),
            }
        )
    command.show(title, texts)


def _reached(row: Row) -> str:
    if row["failure"]:
        return "failed"
    return "not reached" if row["seconds_to_target"] is None else f"{row['seconds_to_target']:.1f}"


def notes(rows: Sequence[Row]) -> list[str]:
    """Return notes that the table does not contain, one per line: what the seconds include, and why runs failed."""
    lines = ["seconds of training, without evaluations, which are made at the end of every epoch and of the run"]
    return lines + [
        f"{row['contender']}, seed {row['seed']} failed: {row['failure']}" for row in rows if row["failure"]
    ]
