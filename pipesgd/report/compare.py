"""Runs next to each other: as they ended, after equally many samples, and what they were asked to do differently."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipesgd.errors import UserInputError
from pipesgd.report.charts import Axis, Curve, curves
from pipesgd.report.folder import RunFolder, number
from pipesgd.report.html import COLOURS, Child, Html, join, page, table, tag
from pipesgd.report.page import hidden_part, in_words, key, middle, time_axis
from pipesgd.run.metrics import statistics
from timing_model.units import format_bytes, format_seconds

MOST_RUNS = COLOURS
TASK = ("dataset", "loss", "context")
"""Options that say what a loss is of: losses of other samples, or other losses, are not compared."""
OF_NO_RUN = ("output", "overwrite", "resume", "dry-run")
"""Options that say nothing of what a run does."""
LAST_SHARE = 0.1
"""Share of the compared samples, at their end, whose losses are averaged."""
NOT_KNOWN = "-"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table of a comparison: a title, and rows of a name and a cell for each run."""

    title: str
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs, tables with a column for each, and notes that limit what can be concluded."""

    runs: list[RunFolder]
    names: list[str]
    parts: list[Part]
    notes: list[str]
    same_task: bool
    """True if all runs learn the same, so that their losses are comparable."""


def compare(runs: Sequence[RunFolder]) -> Comparison:
    """Compare runs; the first is what others are as fast as.

    Where they have trained on different numbers of samples, they are also compared after those of the shortest run.

    Raises:
        UserInputError: there are fewer than two runs, or more than ``MOST_RUNS``.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise UserInputError(f"runs must be 2 to {MOST_RUNS} folders; got {len(runs)}")
    others_task = [name for name in TASK if len({_option(run, name) for run in runs}) > 1]
    parts = [Part(title="At the end", rows=_ends(runs))]
    if not others_task and all(len(run.iterations) for run in runs):
        parts.append(_after_equal_samples(runs))
    if options := _differing(runs, lambda run: {f"--{name}": _option(run, name) for name in run.options}, OF_NO_RUN):
        parts.append(Part(title="Options that differ", rows=options))
    if versions := _differing(runs, lambda run: run.versions):
        parts.append(Part(title="Versions that differ", rows=versions))
    return Comparison(
        runs=list(runs),
        names=_names(runs),
        parts=parts,
        notes=_notes(runs, others_task),
        same_task=not others_task,
    )


def _ends(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    rows: dict[str, Callable[[RunFolder], str | None]] = {
        "state": lambda run: run.state.partition(":")[0],
        "ranks": lambda run: str(run.world_size),
        "iterations": lambda run: f"{len(run.iterations):,}",
        "samples": lambda run: f"{_samples(run):,.0f}",
        "training time": lambda run: format_seconds(float(run.iterations.elapsed[-1])) if len(run.iterations) else None,
        "wall clock": lambda run: _told(number(run.summary.get("wall_seconds")), format_seconds),
        "loss, last epoch": lambda run: _told(run.final("train_loss"), "{:.4g}".format),
        "test accuracy": lambda run: _told(run.final("test_accuracy"), "{:.2%}".format),
        "test loss": lambda run: _told(run.final("test_loss"), "{:.4g}".format),
        "iteration": _period,
        "communication hidden": lambda run: _told(hidden_part(run), "{:.0%}".format),
        "sent per iteration, rank 0": lambda run: _told(
            number(run.summary.get("wire_bytes_per_iteration")), format_bytes
        ),
        "updates left out": lambda run: f"{float(np.nansum(run.iterations['skipped'])):,.0f}",
    }
    cells = {name: [cell(run) for run in runs] for name, cell in rows.items()}
    return [(name, [one or NOT_KNOWN for one in row]) for name, row in cells.items() if any(row)]


def _period(run: RunFolder) -> str | None:
    period = statistics(run.iterations.known("iteration_seconds"))[middle(run)]
    return None if period is None else f"{format_seconds(period)} {middle(run)}"


def _samples(run: RunFolder) -> float:
    return float(run.iterations.samples[-1]) if len(run.iterations) else 0.0


def _after_equal_samples(runs: Sequence[RunFolder]) -> Part:
    """Return how long each run took for as many samples as the shortest has trained on, and its loss there."""
    common = min(map(_samples, runs))
    rows: dict[str, list[str]] = {"iterations": [], "training time": [], "as fast as the first": [], "loss": []}
    first = None
    for run in runs:
        samples, elapsed = run.iterations.samples, run.iterations.elapsed
        end = int(np.searchsorted(samples, common)) + 1
        start = int(np.searchsorted(samples, (1 - LAST_SHARE) * common + 0.5))  # samples are whole
        seconds = float(elapsed[end - 1])
        first = seconds if first is None else first
        losses = run.iterations["loss"][min(start, end - 1) : end]
        finite = losses[~np.isnan(losses)]
        rows["iterations"].append(f"{end:,}")
        rows["training time"].append(format_seconds(seconds))
        rows["as fast as the first"].append(f"{first / seconds:.2f}x" if seconds > 0 else NOT_KNOWN)
        rows["loss"].append(f"{finite.mean():.4g}" if finite.size else "not finite")
    return Part(title=f"After the same {common:,.0f} samples", rows=list(rows.items()))


def _differing(
    runs: Sequence[RunFolder], values: Callable[[RunFolder], dict[str, str]], without: Sequence[str] = ()
) -> list[tuple[str, list[str]]]:
    """Return the names whose values differ between runs, with those of each run."""
    of_runs = [values(run) for run in runs]
    names = sorted({name for one in of_runs for name in one} - {f"--{name}" for name in without})
    rows = [(name, [one.get(name, NOT_KNOWN) for one in of_runs]) for name in names]
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


def _option(run: RunFolder, name: str) -> str:
    return in_words(run.options.get(name))


def _notes(runs: Sequence[RunFolder], others_task: Sequence[str]) -> list[str]:
    """Return what limits the comparison, each in a sentence."""
    lengths = {_samples(run) for run in runs}
    sizes = {run.world_size for run in runs}
    notes = {
        f"They do not learn the same ({', '.join(f'--{name}' for name in others_task)}): neither losses nor times are "
        "compared.": bool(others_task),
        "Lengths differ: below the ends they are compared after as many samples as the shortest run has trained on.": (
            not others_task and len(lengths) > 1
        ),
        "The learning rate follows a schedule over other lengths, so losses on the way are not those of equal rates.": (
            len({len(run.iterations) for run in runs}) > 1
            and {_option(run, "schedule") for run in runs} != {"constant"}
        ),
        "Numbers of ranks differ: an iteration has other numbers of samples, and one learning rate may not suit all.": (
            len(sizes) > 1
        ),
        "Runs that have not finished have no evaluation at their end.": any(not run.summary for run in runs),
        "They ran on other machines, or at other addresses.": (
            len({str(run.summary.get("network")) for run in runs if run.summary and run.world_size == max(sizes)}) > 1
        ),
        "Each is one run: other seeds show whether a difference is more than chance.": not others_task,
    }
    return [note for note, holds in notes.items() if holds]


def _names(runs: Sequence[RunFolder]) -> list[str]:
    """Return a name for each run: its folder without what all have in common, if these names differ."""
    paths = [run.path.absolute() for run in runs]
    parent = os.path.commonpath([path.parent for path in paths])
    names = [str(path.relative_to(parent)) for path in paths]
    return names if len(set(names)) == len(names) else [run.name for run in runs]


def _told(value: float | None, notation: Callable[[float], str]) -> str | None:
    return None if value is None else notation(value)


def lines(comparison: Comparison) -> str:
    """Return a comparison as text, its columns aligned."""
    head = ("", comparison.names)
    rows = [row for part in comparison.parts for row in part.rows]
    widths = [max(len(name) for name, _ in rows)]
    widths += [max(len(cells[index]) for _, cells in (head, *rows)) for index in range(len(comparison.names))]

    def aligned(name: str, cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip([name, *cells], widths, strict=True)).rstrip()

    said = [aligned(*head)]
    for part in comparison.parts:
        said += ["", f"{part.title}:", *(aligned(*row) for row in part.rows)]
    return "\n".join([*said, "", *comparison.notes])


def comparison_page(comparison: Comparison) -> Html:
    """Return a comparison as a page: the loss of each run over samples and over time, and the tables."""
    runs, names = comparison.runs, comparison.names
    head: list[Child] = ["", *(join(key(index), name) for index, name in enumerate(names))]
    sections: list[Child] = [tag("p", note) for note in comparison.notes]
    if comparison.same_task:
        keys = tag("p", *(tag("span", key(index), name, class_="name") for index, name in enumerate(names)))
        longest = max((float(run.iterations.elapsed[-1]) for run in runs if len(run.iterations)), default=0.0)
        time, per_second = time_axis(longest)
        for axis, of in (
            (Axis(name="samples", notation="{:,.0f}".format), lambda run: run.iterations.samples),
            (time, lambda run: per_second * run.iterations.elapsed),
        ):
            sections.append(_losses(runs, names, axis, of, keys))
    for part in comparison.parts:
        rows: list[list[Child]] = [[name, *cells] for name, cells in part.rows]
        sections.append(tag("section", tag("h2", part.title), table(head, rows)))
    title = f"Comparison of {', '.join(names)}"
    return page(title, tag("h1", title), *sections)


def _losses(
    runs: Sequence[RunFolder], names: Sequence[str], x: Axis, of: Callable[[RunFolder], Any], keys: Html
) -> Html | None:
    shown = [
        Curve(name=name, x=of(run), y=run.iterations["loss"], colour=index)
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
        if run.iterations.known("loss").size
    ]
    if not shown:
        return None
    text = f"Loss of {', '.join(one.name for one in shown)} over {x.name}"
    return tag("figure", keys, curves(shown, description=text, x=x, y=Axis(name="loss"), legend=False))
