"""How near the timing model's predictions come to iterations that are measured after them.

    python -m experiments.validate_timing_model                   validate_timing_model.csv, .png, _decisions.csv
    python -m experiments.validate_timing_model --settings "4 x 200mbit mlp"
    python -m experiments.validate_timing_model --finished        the same files, of the settings that are there

A setting is a testbed (nodes, rate, latency) and a workload. On each, pipesgd.calibrate measures the cluster and the
model; then the iteration times of all its cells, the configurations, are predicted; then all are measured in one job,
in two rounds of two passes each, in turns. What counts is the mean iteration in the steady state. The same cells tell
what the planner's choice among them costs, and whether it knows when a codec helps (outside of a tie of 3 %).

Finished settings are kept in validate_timing_model.runs.json in the output folder: the same command measures only those
that are missing. All of it takes an hour and a half.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.results import Row, save, save_panels
from experiments.style import COLOURS
from experiments.testbed import Testbed
from experiments.validation_runs import QUICK, ROUNDS, SETTINGS, Measured, Setting, measure
from pipesgd.errors import UserInputError
from pipesgd.launch import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIE = 0.03
"""A codec that gains or loses less than this neither helps nor hurts."""
MEAN_ERROR, P95_ERROR, COVERAGE = 0.03, 0.08, (0.85, 0.95)
MEAN_REGRET, LARGEST_REGRET, CODECS_RIGHT = 0.005, 0.05, 0.95
"""What is to be reached."""


def compute(
    settings: Sequence[Setting], kept: KeptRuns[Measured], console: Console, *, quick: bool = False
) -> dict[str, Measured]:
    """The settings by name; those that are not there yet are predicted and measured now."""
    done = kept.load()
    missing = [one for one in settings if one.name not in done]
    command.say_kept(console, len(settings), len(missing))
    with command.progress(console, "timing model", len(missing)) as advance:
        for setting in missing:
            with Testbed(nodes=setting.nodes, link=setting.link) as testbed, tempfile.TemporaryDirectory() as folder:
                done[setting.name] = measure(testbed, setting, Path(folder), quick=quick)
            kept.add(setting.name, done[setting.name])
            advance(1, setting.name)
    return {one.name: done[one.name] for one in settings}


def tabulate(found: Mapping[str, Measured]) -> list[Row]:
    """A row for every cell."""
    rows = []
    for name, setting in found.items():
        for words, cell in setting.cells.items():
            rounds = [cell[f"round_{number}_s"] for number in range(ROUNDS)]
            measured = float(np.mean(rounds))
            rows.append(
                {
                    "setting": name,
                    "words": words,
                    **cell,
                    "measured_s": measured,
                    "error": cell["predicted_s"] / measured - 1,
                    "repeatability": max(rounds) / min(rounds) - 1,
                    "covered": sum(cell["low_s"] <= one <= cell["high_s"] for one in rounds),
                }
            )
    return rows


def decide(rows: Sequence[Row]) -> list[Row]:
    """For every setting: what the model would choose among its cells, and what that costs against the best one."""
    decisions = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        cells = [row for row in rows if row["setting"] == name]
        chosen = next(row for row in cells if row["chosen"])
        best = min(cells, key=lambda row: row["measured_s"])
        gains = {
            key: min(row[key] for row in cells if row["codec"] == "fp32")
            / min(row[key] for row in cells if row["codec"] != "fp32")
            for key in ("predicted_s", "measured_s")
        }
        decisions.append(
            {
                "setting": name,
                "chosen": chosen["words"],
                "best": best["words"],
                "regret": chosen["measured_s"] / best["measured_s"] - 1,
                "codec_gain_predicted": gains["predicted_s"] - 1,
                "codec_gain_measured": gains["measured_s"] - 1,
            }
        )
    return decisions


def summarize(rows: Sequence[Row], decisions: Sequence[Row]) -> dict[str, Any]:
    """Errors of all cells, how often a measurement was in its interval, and what wrong choices cost."""
    errors = np.abs([row["error"] for row in rows])
    repeated, regrets = [row["repeatability"] for row in rows], [row["regret"] for row in decisions]
    told = [row for row in decisions if abs(row["codec_gain_measured"]) > TIE]
    right = [row for row in told if (row["codec_gain_predicted"] > 0) == (row["codec_gain_measured"] > 0)]
    return {
        "cells": len(rows),
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "p95_error": float(np.quantile(errors, 0.95)),
        "mean_signed_error": float(np.mean([row["error"] for row in rows])),
        "coverage": sum(row["covered"] for row in rows) / (ROUNDS * len(rows)),
        "repeatability_mean": float(np.mean(repeated)),
        "repeatability_p95": float(np.quantile(repeated, 0.95)),
        "settings": len(decisions),
        "mean_regret": float(np.mean(regrets)),
        "largest_regret": max(regrets),
        "codecs_right": f"{len(right)} of {len(told)}",
        "target": {
            "mean_error": MEAN_ERROR,
            "p95_error": P95_ERROR,
            "coverage": COVERAGE,
            "mean_regret": MEAN_REGRET,
            "largest_regret": LARGEST_REGRET,
            "codecs_right": CODECS_RIGHT,
        },
    }


def plot(rows: Sequence[Row], axes: Axes) -> Axes:
    """Predicted over measured, a colour for every setting, with the identity line."""
    for number, name in enumerate(dict.fromkeys(row["setting"] for row in rows)):
        own = [row for row in rows if row["setting"] == name]
        predicted = [row["predicted_s"] for row in own]
        axes.errorbar(
            [row["measured_s"] for row in own],
            predicted,
            yerr=[
                [row["predicted_s"] - row["low_s"] for row in own],
                [row["high_s"] - row["predicted_s"] for row in own],
            ],
            linestyle="",
            marker="os^Dv<>P"[number // len(COLOURS) % 8],
            color=COLOURS[number % len(COLOURS)],
            markersize=4,
            label=name,
        )
    ends = [min(row["measured_s"] for row in rows), max(row["measured_s"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured iteration (s)",
        ylabel="predicted before, with 90 % interval (s)",
        title="timing model",
    )
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes


def draw(name: str, rows: list[Row], folder: Path) -> Path:
    """Write the figure."""
    return save_panels(name, [partial(plot, rows)], size=(8.5, 5.0), folder=folder)


def publish(found: Mapping[str, Measured], folder: Path, console: Console) -> None:
    """Save the rows, the decisions and the figure, and print what they come to."""
    rows = tabulate(found)
    decisions = decide(rows)
    summary = summarize(rows, decisions)
    extra = {"summary": summary, "made_with": sorted({str(one.commit) for one in found.values()})}
    path = save("validate_timing_model", rows, extra=extra, folder=folder)
    save("validate_timing_model_decisions", decisions, extra=extra, folder=folder)
    draw("validate_timing_model", rows, folder)
    command.show("Predicted before they were measured", [_cell_texts(row) for row in rows])
    command.show("What the model would choose", [_decision_texts(row) for row in decisions])
    for line in (
        f"{summary['cells']} cells: error {summary['mean_error']:.1%} on average (target {MEAN_ERROR:.0%}), 95 % "
        f"within {summary['p95_error']:.1%} ({P95_ERROR:.0%})",
        f"{summary['coverage']:.0%} of measurements in the 90 % interval",
        f"the same cell measured again: {summary['repeatability_mean']:.1%} off on average, 95 % within "
        f"{summary['repeatability_p95']:.1%}",
        f"regret {summary['mean_regret']:.2%} on average ({MEAN_REGRET:.1%}), at most {summary['largest_regret']:.1%} "
        f"({LARGEST_REGRET:.0%}); whether a codec helps: {summary['codecs_right']} right",
        f"wrote {path}",
    ):
        command.say(console, line)


def _cell_texts(row: Row) -> dict[str, str]:
    ms = {name: f"{1e3 * row[f'{name}_s']:.1f}" for name in ("predicted", "low", "high", "round_0", "round_1")}
    return {
        "setting": row["setting"],
        "words": row["words"].replace("--", ""),
        "predicted ms": f"{ms['predicted']} ({ms['low']}-{ms['high']})",
        "measured ms": f"{ms['round_0']}, {ms['round_1']}",
        "error %": f"{100 * row['error']:+.1f}",
    }


def _decision_texts(row: Row) -> dict[str, str]:
    gain = {name: f"{100 * row[f'codec_gain_{name}']:.0f}" for name in ("measured", "predicted")}
    return {
        "setting": row["setting"],
        "chosen": row["chosen"].replace("--", ""),
        "best": row["best"].replace("--", ""),
        "regret %": f"{100 * row['regret']:.1f}",
        "a codec gains %": f"{gain['measured']} ({gain['predicted']} predicted)",
    }


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """The options; raises ``UserInputError``."""
    options = command.parser("validate_timing_model", __doc__)
    add = options.add_argument
    add("--settings", nargs="+", metavar="NAME", default=list(SETTINGS), help=f"of {'; '.join(SETTINGS)} (all)")
    one_of = options.add_mutually_exclusive_group()
    one_of.add_argument("--fresh", action="store_true", help="forget the finished settings in the output folder")
    one_of.add_argument("--finished", action="store_true", help="measure nothing: publish the settings that are there")
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"settings": SETTINGS})
    command.check_alone("validate_timing_model", by_torchrun, "it starts torchrun itself, on every node")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """The command."""
    arguments = ranks.agree("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(arguments.output / "validate_timing_model.runs.json", Measured)
    if arguments.fresh:
        kept.forget()
    settings = [QUICK] if arguments.quick else [SETTINGS[name] for name in arguments.settings]
    if arguments.finished:
        done = kept.load()
        found = {one.name: done[one.name] for one in settings if one.name in done}
    else:
        found = compute(settings, kept, console, quick=arguments.quick)
    if not found:
        raise UserInputError("--finished must find a setting that was measured; there is none")
    publish(found, arguments.output, console)


if __name__ == "__main__":
    command.run(main)
