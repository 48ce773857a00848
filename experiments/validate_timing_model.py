"""Accuracy of the timing model's predictions, and regret of ``--width auto``, against iterations measured afterwards.

    python -m experiments.validate_timing_model           validate_timing_model.csv and _auto.csv
    python -m experiments.validate_timing_model --settings "4 x 200mbit, 75ms"
    python -m experiments.validate_timing_model --finished        the same files, from the finished settings

A setting is a testbed (nodes, rate, latency) and an emulated accelerator of each rank, which leaves the cores of this
machine to the network. In each, the command is that of a user who knows nothing: a run of two thousand iterations with
``--width auto --codec auto --all-reduce auto``, which calibrates, plans, and auditions on copies of the model before it
trains. It is stopped after some iterations. The predictions are those of that run's calibration, without its audition.
Then all configurations that the run could have chosen are measured in one job, in four passes in turns, every second
one in reverse order. Those in which the ranks leave at least 40 % of the cores to others count.

The fastest configuration by one half of the passes is judged by the other half, as is the choice of the run, and
the regret is the mean of both ways: a configuration that was measured to be fast by luck gains nothing. It may be
negative. "reported" is the time that the run said it measured. Its error is that of what the run should know: the mean
of its own iterations. How far that is from the same configuration's time in the job that measures all of them, later
and without what else a run does (metrics, heartbeats), is given as well.

Settings "from" something smaller are extrapolated, and count separately: pipesgd.calibrate measures half of the nodes,
or a model with an eighth of the values on accelerators that take an eighth of the time. Settings with "shared cores"
have no accelerators: all ranks compute on the cores of this machine, which no user has. They have no target.

Finished settings are kept in validate_timing_model.runs.json in the output folder: the same command measures only those
that are missing. All settings take an hour and a half.
"""

from __future__ import annotations

import math
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.results import Row, save
from experiments.style import BLUE, GREY, ORANGE
from experiments.validation_runs import (
    EXTRAPOLATED,
    HELD_OUT,
    QUICK,
    SETTINGS,
    SHARED,
    Measured,
    Setting,
    mean_of,
    measure,
)
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "validate_timing_model"
BUSY = 0.6
"""Share of the cores from which on a configuration does not count: its ranks wait for them."""
TARGETS: dict[str, dict[str, Any]] = {
    HELD_OUT: {"mean_error": 0.02, "p95_error": 0.05, "coverage": (0.85, 0.95)},
    EXTRAPOLATED: {"mean_error": 0.04},
}
"""Largest errors, and the shares of measurements that the 90 % intervals should hold."""
AUTO_TARGETS = {
    "mean_regret": 0.005,
    "largest_regret": 0.03,
    "largest_reported_error": 0.02,
    "largest_audition_share": 0.01,
    "largest_planning_s": 5.0,
}
"""Largest values. ``planning`` is calibration and audition together: 5 s, or 2 % of the run if that is more."""
PLANNING_SHARE = 0.02
CHOSEN = ("width", "codec", "all-reduce")
"""Options that the run chooses."""


def words_of(choices: Mapping[str, Any]) -> str:
    """Return the arguments of a choice, without those that are not left to the run."""
    return " ".join(f"--{name} {choices[name]}" for name in CHOSEN)


def tabulate(found: Mapping[str, Measured], settings: Mapping[str, Setting]) -> list[Row]:
    """Return a row for every configuration of every setting."""
    rows: list[Row] = []
    for name, one in found.items():
        chosen = words_of(one.choice["choices"]) if one.choice else None
        for words, cell in one.cells.items():
            measured = mean_of(cell)
            halves = [cell["half_0_s"], cell["half_1_s"]]
            rows.append(
                {
                    "setting": name,
                    "kind": settings[name].kind,
                    "words": words,
                    **cell,
                    "measured_s": measured,
                    "error": cell["predicted_s"] / measured - 1,
                    "repeatability": max(halves) / min(halves) - 1,
                    "covered": cell["low_s"] <= measured <= cell["high_s"],
                    "counts": settings[name].kind == SHARED or cell["cpu_share"] < BUSY,
                    "chosen": words == chosen,
                }
            )
    return rows


def regret(cells: Mapping[str, Mapping[str, float]], chosen: str) -> float:
    """Return the share by which the choice takes longer than the configuration that was fastest in the other half."""
    found = []
    for own, other in ((0, 1), (1, 0)):
        best = min(cells, key=lambda words: cells[words][f"half_{other}_s"])
        found.append(cells[chosen][f"half_{own}_s"] / cells[best][f"half_{own}_s"] - 1)
    return float(np.mean(found))


def decide(found: Mapping[str, Measured], settings: Mapping[str, Setting]) -> list[Row]:
    """Return a row for every setting in which a run chose."""
    rows: list[Row] = []
    for name, one in found.items():
        if one.choice is None:
            continue
        chosen = words_of(one.choice["choices"])
        if chosen not in one.cells:
            raise RunError(f"{name}: the choice must be among the measured configurations; got {chosen}")
        means = {words: mean_of(cell) for words, cell in one.cells.items()}
        first = min(one.cells, key=lambda words: one.cells[words]["predicted_s"])
        assert one.after_s is not None
        reported = one.choice["iteration_seconds"]
        rows.append(
            {
                "setting": name,
                "kind": settings[name].kind,
                "chosen": chosen,
                "fastest": min(means, key=lambda words: means[words]),
                "measured_s": means[chosen],
                "reported_s": reported,
                "reported_how": one.choice["support"],
                "after_s": one.after_s,
                "reported_error": reported / one.after_s - 1,
                "after_to_measured": one.after_s / means[chosen],
                "predicted_error": one.cells[chosen]["predicted_s"] / means[chosen] - 1,
                "regret": regret(one.cells, chosen),
                "regret_of_the_prediction": regret(one.cells, first),
                "run_s": settings[name].iterations * means[chosen],
                "audition_s": one.choice["audition_seconds"],
                "calibration_s": one.calibration_s,
                "began_after_s": one.began_after,
            }
        )
    return rows


def accuracy(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the errors of these rows, the coverage of their intervals, and how far two measurements are apart."""
    errors = np.array([row["error"] for row in rows])
    return {
        "cells": len(rows),
        "mean_error": float(np.abs(errors).mean()),
        "p95_error": float(np.quantile(np.abs(errors), 0.95)),
        "mean_signed_error": float(errors.mean()),
        "coverage": float(np.mean([row["covered"] for row in rows])),
        "repeatability": float(np.mean([row["repeatability"] for row in rows])),
    }


def of_auto(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what choices cost in these settings, and how far from the truth the runs' reports were."""
    planning = [(row["calibration_s"] + row["audition_s"], row["run_s"]) for row in rows]
    errors = [abs(row["reported_error"]) for row in rows if row["reported_how"] == "measured"]
    return {
        "settings": len(rows),
        "mean_regret": float(np.mean([row["regret"] for row in rows])),
        "largest_regret": max(row["regret"] for row in rows),
        "mean_regret_of_the_prediction": float(np.mean([row["regret_of_the_prediction"] for row in rows])),
        "reported_as_measured": len(errors),
        "mean_reported_error": float(np.mean(errors)) if errors else None,
        "largest_reported_error": max(errors, default=None),
        "mean_after_to_measured": float(np.mean([row["after_to_measured"] for row in rows])),
        "largest_audition_share": max(row["audition_s"] / row["run_s"] for row in rows),
        "largest_planning_s": max(seconds for seconds, _ in planning),
        "planning_above_target": sum(
            seconds > max(AUTO_TARGETS["largest_planning_s"], PLANNING_SHARE * run) for seconds, run in planning
        ),
    }


def summarize(rows: Sequence[Row], decisions: Sequence[Row]) -> dict[str, Any]:
    """Return the accuracy of each kind of settings, and the figures of ``auto`` in each kind that has any."""
    summary: dict[str, Any] = {"targets": TARGETS, "targets_of_auto": AUTO_TARGETS}
    for kind in (HELD_OUT, EXTRAPOLATED, SHARED):
        if own := [row for row in rows if row["kind"] == kind and row["counts"]]:
            summary[kind] = accuracy(own)
        if chosen := [row for row in decisions if row["kind"] == kind]:
            summary[f"auto, {kind}"] = of_auto(chosen)
    return summary


def lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the figures in lines for people, each with its target."""
    said = []
    for kind in (HELD_OUT, EXTRAPOLATED, SHARED):
        targets_of: dict[str, Mapping[str, Any]] = {kind: TARGETS.get(kind, {}), f"auto, {kind}": AUTO_TARGETS}
        for title, targets in targets_of.items():
            if title not in summary:
                continue
            said.append(f"{title}:")
            for name, value in summary[title].items():
                target = targets.get(name) if kind != SHARED else None
                said.append(f"  {name.replace('_', ' ')}: {_figure(name, value)}{_against(value, target, name)}")
    return said


def _figure(name: str, value: Any) -> str:
    if value is None:
        return "none"
    return str(value) if isinstance(value, int) else f"{value:.1f}" if name.endswith("_s") else f"{value:.2%}"


def _against(value: Any, target: Any, name: str) -> str:
    if target is None or value is None:
        return ""
    low, high = target if isinstance(target, tuple) else (-math.inf, target)
    words = f"{low:.0%} to {high:.0%}" if low > 0 else f"at most {_figure(name, high)}"
    return f" (target {words}: {'met' if low <= value <= high else 'missed'})"


def plot(rows: Sequence[Row], axes: Axes) -> Axes:
    """Plot predicted over measured times, a colour for every kind of settings, with the identity line."""
    for (kind, colour), marker in zip({SHARED: GREY, HELD_OUT: BLUE, EXTRAPOLATED: ORANGE}.items(), "^os", strict=True):
        own = [row for row in rows if row["kind"] == kind and row["counts"]]
        if not own:
            continue
        predicted = np.array([row["predicted_s"] for row in own])
        low, high = (np.array([row[f"{end}_s"] for row in own]) for end in ("low", "high"))
        axes.errorbar(
            [row["measured_s"] for row in own],
            predicted,
            yerr=[predicted - low, high - predicted],
            linestyle="",
            marker=marker,
            color=colour,
            markersize=4,
            label=kind,
        )
    ends = [min(row["measured_s"] for row in rows), max(row["measured_s"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured iteration (s)",
        ylabel="predicted before, 90 % interval (s)",
        title="timing model",
    )
    axes.legend(loc="upper left")
    return axes


def publish(found: Mapping[str, Measured], settings: Mapping[str, Setting], folder: Path, console: Console) -> None:
    """Save both tables, and print them with a summary."""
    rows, decisions = tabulate(found, settings), decide(found, settings)
    summary = summarize(rows, decisions)
    extra = {"summary": summary, "made_with": sorted({str(one.commit) for one in found.values()})}
    for name in found:
        command.show(f"{name}, predicted before", [_cell_texts(row) for row in rows if row["setting"] == name])
    if decisions:
        command.show("What --width auto chose", [_decision_texts(row) for row in decisions])
    tables = {NAME: rows, f"{NAME}_auto": decisions}
    paths = [save(name, table, extra=extra, folder=folder) for name, table in tables.items() if table]
    say(console, *lines(summary), *(f"wrote {path}" for path in paths))


def _cell_texts(row: Row) -> dict[str, str]:
    ms = {name: f"{1e3 * row[f'{name}_s']:.1f}" for name in ("predicted", "low", "high", "half_0", "half_1")}
    return {
        "": row["words"].replace("--", ""),
        "predicted ms": f"{ms['predicted']} ({ms['low']}-{ms['high']})",
        "measured ms": f"{ms['half_0']}, {ms['half_1']}",
        "cores %": f"{100 * row['cpu_share']:.0f}",
        "error %": f"{100 * row['error']:+.1f}",
    }


def _decision_texts(row: Row) -> dict[str, str]:
    return {
        "setting": row["setting"],
        "chosen": row["chosen"].replace("--", ""),
        "fastest": row["fastest"].replace("--", ""),
        "ms": f"{1e3 * row['measured_s']:.1f}",
        "reported ms": f"{1e3 * row['reported_s']:.1f} ({row['reported_how']})",
        "after it": f"{1e3 * row['after_s']:.1f}",
        "regret %": f"{100 * row['regret']:+.1f}",
        "by prediction %": f"{100 * row['regret_of_the_prediction']:+.1f}",
        "audition s": f"{row['audition_s']:.1f}",
    }


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser(NAME, __doc__)
    add = options.add_argument
    add("--settings", nargs="+", metavar="NAME", default=list(SETTINGS), help=f"settings: {'; '.join(SETTINGS)} (all)")
    one_of = options.add_mutually_exclusive_group()
    one_of.add_argument("--fresh", action="store_true", help="forget the finished settings in the output folder")
    one_of.add_argument("--finished", action="store_true", help="measure nothing; publish the finished settings")
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"settings": SETTINGS})
    command.check_alone(NAME, by_torchrun, "it starts torchrun itself, on every node")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))

    def made(setting: Setting) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            return measure(setting, Path(folder), quick=arguments.quick)

    kept = KeptRuns(arguments.output / f"{NAME}.runs.json", Measured, fresh=arguments.fresh)
    settings = {QUICK.name: QUICK} if arguments.quick else {name: SETTINGS[name] for name in arguments.settings}
    found = kept.complete(settings, made, console, "timing model", finished=arguments.finished)
    if not found:
        raise UserInputError("--finished must find a setting that was measured; there is none")
    publish(found, settings, arguments.output, console)


if __name__ == "__main__":
    command.run(main)
