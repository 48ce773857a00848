"""Accuracy of the timing model's predictions, against iterations that are measured after them.

    python -m experiments.validate_timing_model                   validate_timing_model.csv, .png, _decisions.csv
    python -m experiments.validate_timing_model --settings "4 x 200mbit mlp"
    python -m experiments.validate_timing_model --finished        the same files, from the finished settings

A setting is a testbed (nodes, rate, latency) and a workload. On each, pipesgd.calibrate measures the cluster and the
model; then the iteration times of all its cells, the configurations, are predicted; then all are measured in one job,
in two rounds of two passes each, in turns. The mean iteration in the steady state counts. The same cells show whether
the planner knows when a codec helps (outside of a tie of 3 %), and what its choice among them costs: for that, the
chosen cell and the fastest one are measured again, in turns.

Settings "calibrated on" something smaller are extrapolated, and count separately: they are calibrated on three nodes,
or with a model of an eighth of the size. The prediction allows for more nodes of the testbed sharing this machine's
cores.

Cells that a hypervisor's other guests disturbed, by more than 2 % of the cores' time, are measured once more.

Errors are reported twice. The raw error is that of the prediction as it was made, and is the one that is judged. The
corrected error lets the computation take as many times longer as a fixed product of matrices took when the cell was
measured than when the setting was calibrated ("drift"). An error that is raw but not corrected is due to this machine,
which others use, too; the rest is due to the model.

Finished settings are kept in validate_timing_model.runs.json in the output folder: the same command measures only those
that are missing. All settings take two and a half hours.
"""

from __future__ import annotations

import shlex
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.results import Row, save, save_panels
from experiments.style import COLOURS
from experiments.validation_runs import QUICK, ROUNDS, SETTINGS, Measured, Setting, judge, mean_of, measure
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from timing_model.cluster_profile import UNCOMPRESSED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIE = 0.03
"""Share of the time below which a gain or loss means that a codec neither helps nor hurts."""
MEAN_ERROR, P95_ERROR, COVERAGE = 0.03, 0.08, (0.85, 0.95)
MEAN_EXTRAPOLATED_ERROR = 0.05
MEAN_REGRET, LARGEST_REGRET, CODECS_RIGHT = 0.005, 0.05, 0.95
"""Targets for errors, the coverage of intervals, regret and the choice of codecs."""
RAW, CORRECTED = "raw", "corrected"
HELD_OUT, EXTRAPOLATED = "held out", "extrapolated"


def compute(
    settings: Sequence[Setting], kept: KeptRuns[Measured], console: Console, *, quick: bool = False
) -> dict[str, Measured]:
    """Return the settings by name; those that are missing are predicted and measured now."""
    done = kept.load()
    missing = [one for one in settings if one.name not in done or done[one.name].final is None]
    command.say_kept(console, len(settings), len(missing))
    with command.progress(console, "timing model", len(missing)) as advance:
        for setting in missing:
            with tempfile.TemporaryDirectory() as folder:
                if setting.name not in done:
                    done[setting.name] = measure(setting, Path(folder), quick=quick)
                    kept.add(setting.name, done[setting.name])
                done[setting.name] = judge(setting, done[setting.name], Path(folder), quick=quick)
            kept.add(setting.name, done[setting.name])
            advance(1, setting.name)
    return {one.name: done[one.name] for one in settings}


def tabulate(found: Mapping[str, Measured]) -> list[Row]:
    """Return a row for every cell."""
    rows = []
    for name, setting in found.items():
        for words, cell in setting.cells.items():
            rounds = [cell[f"round_{number}_s"] for number in range(ROUNDS)]
            measured = mean_of(cell)
            rows.append(
                {
                    "setting": name,
                    "words": words,
                    "kind": EXTRAPOLATED if setting.extrapolated else HELD_OUT,
                    **cell,
                    "measured_s": measured,
                    "raw_error": cell["predicted_s"] / measured - 1,
                    "corrected_error": cell["corrected_s"] / measured - 1,
                    "repeatability": max(rounds) / min(rounds) - 1,
                    "raw_covered": sum(cell["low_s"] <= one <= cell["high_s"] for one in rounds),
                    "corrected_covered": sum(
                        cell["corrected_low_s"] <= one <= cell["corrected_high_s"] for one in rounds
                    ),
                }
            )
    return rows


def decide(found: Mapping[str, Measured]) -> list[Row]:
    """Return for every setting that is judged the model's choice among its cells, and what that costs against the
    fastest one: nothing if the choice is the faster of the two when both are measured again.
    """
    decisions = []
    for name, setting in found.items():
        if setting.extrapolated or setting.final is None:
            continue
        final = {words: float(np.mean(seconds)) for words, seconds in setting.final.items()}
        decisions.append(
            {
                "setting": name,
                "chosen": setting.chosen,
                "best": setting.fastest,
                "regret": final[setting.chosen] / min(final.values()) - 1 if final else 0.0,
                "codec_gain_predicted": codec_gain(setting, lambda cell: float(cell["predicted_s"])),
                "codec_gain_measured": codec_gain(setting, mean_of),
            }
        )
    return decisions


def codec_gain(setting: Measured, seconds: Callable[[Mapping[str, Any]], float]) -> float:
    """Return the share by which the fastest cell without a codec takes longer than the fastest one with a codec."""
    plain, compressed = (
        min(seconds(cell) for cell in setting.cells.values() if (cell["codec"] == UNCOMPRESSED) is without)
        for without in (True, False)
    )
    return plain / compressed - 1


def accuracy(rows: Sequence[Row]) -> dict[str, Any]:
    """Return these cells' raw and corrected errors, coverage of the intervals, and repeatability.

    Coverage is how often a measurement was in its interval, repeatability how far two are apart. ``drift`` says how
    many times as long the product took as when it was calibrated.
    """
    found: dict[str, Any] = {"cells": len(rows)}
    for how in (RAW, CORRECTED):
        errors = np.array([row[f"{how}_error"] for row in rows])
        found[how] = {
            "mean_error": float(np.abs(errors).mean()),
            "median_error": float(np.median(np.abs(errors))),
            "p95_error": float(np.quantile(np.abs(errors), 0.95)),
            "mean_signed_error": float(errors.mean()),
            "coverage": sum(row[f"{how}_covered"] for row in rows) / (ROUNDS * len(rows)),
        }
    repeated, drifts = ([row[name] for row in rows] for name in ("repeatability", "drift"))
    found["repeatability"] = {"mean": float(np.mean(repeated)), "p95": float(np.quantile(repeated, 0.95))}
    found["drift"] = {"mean": float(np.mean(drifts)), "least": min(drifts), "most": max(drifts)}
    return found


def summarize(rows: Sequence[Row], decisions: Sequence[Row]) -> dict[str, Any]:
    """Return the accuracy of each kind of cells, and what wrong choices cost."""
    summary: dict[str, Any] = {
        "target": {
            HELD_OUT: {"mean_error": MEAN_ERROR, "p95_error": P95_ERROR, "coverage": COVERAGE},
            EXTRAPOLATED: {"mean_error": MEAN_EXTRAPOLATED_ERROR},
            "mean_regret": MEAN_REGRET,
            "largest_regret": LARGEST_REGRET,
            "codecs_right": CODECS_RIGHT,
        }
    }
    for kind in (HELD_OUT, EXTRAPOLATED):
        if own := [row for row in rows if row["kind"] == kind]:
            summary[kind] = accuracy(own)
    if decisions:
        regrets = [row["regret"] for row in decisions]
        told = [row for row in decisions if abs(row["codec_gain_measured"]) > TIE]
        right = [row for row in told if (row["codec_gain_predicted"] > 0) == (row["codec_gain_measured"] > 0)]
        summary["decisions"] = {
            "settings": len(decisions),
            "mean_regret": float(np.mean(regrets)),
            "largest_regret": max(regrets),
            "codecs_right": f"{len(right)} of {len(told)}",
        }
    return summary


def lines(summary: dict[str, Any]) -> list[str]:
    """Return lines for people: each target with the raw figure, which counts, and the corrected one."""
    said = []
    for kind, targets in ((HELD_OUT, summary["target"][HELD_OUT]), (EXTRAPOLATED, summary["target"][EXTRAPOLATED])):
        if kind not in summary:
            continue
        own = summary[kind]
        said.append(f"{own['cells']} {kind} cells (raw: as predicted; corrected: for the machine's drift since then)")
        for name, words in (("mean_error", "mean error"), ("p95_error", "95 % of errors within")):
            target = f" (target {targets[name]:.0%}: {_met(own, name, targets[name])})" if name in targets else ""
            said.append(f"  {words}: raw {own[RAW][name]:.1%}, corrected {own[CORRECTED][name]:.1%}{target}")
        raw, corrected = own[RAW]["coverage"], own[CORRECTED]["coverage"]
        said.append(f"  in the 90 % interval: raw {raw:.0%}, corrected {corrected:.0%} of measurements")
        repeated, drift = own["repeatability"], own["drift"]
        said.append(f"  the same cell measured again: {repeated['mean']:.1%} off, 95 % within {repeated['p95']:.1%}")
        said.append(
            f"  drift: a fixed product took {drift['mean']:.2f} times as long as when it was calibrated "
            f"({drift['least']:.2f} to {drift['most']:.2f})"
        )
    if "decisions" in summary:
        own = summary["decisions"]
        said.append(
            f"regret {own['mean_regret']:.2%} on average (target {MEAN_REGRET:.1%}), at most "
            f"{own['largest_regret']:.1%} ({LARGEST_REGRET:.0%}); whether a codec helps: {own['codecs_right']} right"
        )
    return said


def _met(own: dict[str, Any], name: str, target: float) -> str:
    """Say whether the raw and the corrected figure meet the target."""
    raw, corrected = ("met" if own[how][name] <= target else "missed" for how in (RAW, CORRECTED))
    return f"raw {raw}, corrected {corrected}"


def plot(rows: Sequence[Row], axes: Axes) -> Axes:
    """Plot predicted over measured times, a colour for every setting, with the identity line."""
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
    """Save the rows, the decisions and the figure, and print them with a summary."""
    rows = tabulate(found)
    decisions = decide(found)
    summary = summarize(rows, decisions)
    extra = {"summary": summary, "made_with": sorted({str(one.commit) for one in found.values()})}
    path = save("validate_timing_model", rows, extra=extra, folder=folder)
    if decisions:
        save("validate_timing_model_decisions", decisions, extra=extra, folder=folder)
    draw("validate_timing_model", rows, folder)
    for name in found:
        command.show(f"{name}, predicted before", [_cell_texts(row) for row in rows if row["setting"] == name])
    if decisions:
        command.show("What the model would choose", [_decision_texts(row) for row in decisions])
    say(console, *lines(summary), f"wrote {path}")


def _cell_texts(row: Row) -> dict[str, str]:
    ms = {name: f"{1e3 * row[f'{name}_s']:.1f}" for name in ("predicted", "low", "high", "round_0", "round_1")}
    return {
        "": _brief(row["words"]),
        "predicted ms": f"{ms['predicted']} ({ms['low']}-{ms['high']})",
        "measured ms": f"{ms['round_0']}, {ms['round_1']}",
        "drift": f"{row['drift']:.2f}",
        "error %: raw": f"{100 * row['raw_error']:+.1f}",
        "corrected": f"{100 * row['corrected_error']:+.1f}",
    }


def _decision_texts(row: Row) -> dict[str, str]:
    gain = {name: f"{100 * row[f'codec_gain_{name}']:.0f}" for name in ("measured", "predicted")}
    return {
        "setting": row["setting"],
        "chosen": _brief(row["chosen"]),
        "fastest": _brief(row["best"]),
        "regret %": f"{100 * row['regret']:.1f}",
        "a codec gains %": f"{gain['measured']} ({gain['predicted']} predicted)",
    }


def _brief(words: str) -> str:
    """Return the values alone: width, codec and all-reduce, or a strategy."""
    return ", ".join(shlex.split(words)[1::2])


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("validate_timing_model", __doc__)
    add = options.add_argument
    add("--settings", nargs="+", metavar="NAME", default=list(SETTINGS), help=f"settings: {'; '.join(SETTINGS)} (all)")
    one_of = options.add_mutually_exclusive_group()
    one_of.add_argument("--fresh", action="store_true", help="forget the finished settings in the output folder")
    one_of.add_argument("--finished", action="store_true", help="measure nothing; publish the finished settings")
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"settings": SETTINGS})
    command.check_alone("validate_timing_model", by_torchrun, "it starts torchrun itself, on every node")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
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
