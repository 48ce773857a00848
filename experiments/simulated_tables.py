"""Means over the seeds of simulated runs, where their curves cross a target, what they cost, how they are published."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import command
from experiments.results import Row, save
from experiments.simulated_runs import WORLD_SIZE, Run


def outcome(run: Run) -> Row:
    """Return what a run came to, as columns of a table."""
    return {
        "test_accuracy": run.test_accuracy,
        "test_loss": run.test_loss,
        "train_loss": run.train_loss,
        "diverged_at": run.diverged_at,
    }


def texts_next_to_sync(row: Row) -> dict[str, str]:
    """Return accuracy and loss of a row of a summary for people, each with its distance from synchronous training."""
    text = partial(command.text_of, row)
    return {
        "accuracy %": text("accuracy_mean", ".2f", 100),
        "to sync": text("accuracy_to_sync_points", "+.2f"),
        "loss": text("test_loss_mean", ".4f"),
        "to sync %": text("loss_to_sync_percent", "+.2f"),
    }


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean, rounded for values at a target's edge; None if there is none.

    None, too, if one of the values is missing, since survivors would flatter.
    """
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 6) if known and len(known) == len(values) else None


def mean_change(
    values: Sequence[float | None], base: Sequence[float | None], change: Callable[[float, float], float]
) -> float | None:
    """Return the mean of ``change(value, base)`` over the seeds; None if a value is missing."""
    return mean_of_all([None if a is None or b is None else change(a, b) for a, b in zip(values, base, strict=True)])


def crossing_of(target: float, curve: Sequence[Sequence[float]]) -> float | None:
    """Return where the line through the points (x, y) of ``curve`` first reaches ``target``; None if it never does.

    None, too, if the first point has reached it already: nobody evaluated before, so the crossing is not known.

    >>> crossing_of(0.75, [[10.0, 0.5], [20.0, 1.0], [30.0, 0.5]])
    15.0
    """
    if curve and curve[0][1] < target:
        for (begin, low), (end, high) in itertools.pairwise(curve):
            if high >= target:
                return begin + (end - begin) * (target - low) / (high - low)
    return None


def points(value: float, base: float) -> float:
    """Return by how many percentage points an accuracy is above another one."""
    return 100 * (value - base)


def percent(value: float, base: float) -> float:
    """Return by how many percent a loss is above another one."""
    return 100 * (value / base - 1)


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    """Return a column of ``rows``."""
    return [row[name] for row in rows]


def changes(own: Sequence[Row], base: Sequence[Row] | None, name: str) -> Row:
    """Return how far a cell is from another one, in the mean over seeds; None where it has none, or a seed diverged.

    Args:
        own: rows of the cell, one a seed.
        base: rows of the other cell, of the same seeds.
        name: name of the other cell in the columns.
    """
    accuracy = loss = None
    if base is not None:
        accuracy = mean_change(column(own, "test_accuracy"), column(base, "test_accuracy"), points)
        loss = mean_change(column(own, "test_loss"), column(base, "test_loss"), percent)
    return {f"accuracy_to_{name}_points": accuracy, f"loss_to_{name}_percent": loss}


def cost_of(row: Row, name: str, *, by_loss: bool) -> float | None:
    """Return what a cell costs by ``changes``: percent of the loss, or points of accuracy; None if not known."""
    more: float | None = row[f"loss_to_{name}_percent"]
    gained: float | None = row[f"accuracy_to_{name}_points"]
    return more if by_loss else None if gained is None else -gained


def publish(
    name: str,
    rows: list[Row],
    summary: list[Row],
    runs: Mapping[str, Run],
    facts: Mapping[str, Any],
    folder: Path,
) -> None:
    """Save the rows and their summary; ``facts`` go into the manifests."""
    extra = {
        "world_size": WORLD_SIZE,
        "simulated": True,
        **facts,
        "runs": len(runs),
        "runs_made_with": sorted({str(run.commit) for run in runs.values()}),
    }
    save(name, rows, extra=extra, folder=folder)
    save(f"{name}_summary", summary, extra=extra, folder=folder)
