"""How near the timing model's predictions come to iterations that are measured after them.

    python -m experiments.validate_timing_model                   validate_timing_model.csv, .png
    python -m experiments.validate_timing_model --settings "4 x 200mbit mlp"
    python -m experiments.validate_timing_model --finished        the same files, of the cells that are there

A setting is a testbed (nodes, rate, latency) and a workload. On each, pipesgd.calibrate measures the cluster and the
model; then the iteration times of its cells are predicted; then each cell is measured twice, in two rounds in opposite
order. Cells are drawn, the same ones every time, from widths x codecs x all-reduces, with a parameter server, DDP or
torch's own all-reduce beside them. The mean iteration counts, without the first ones.

Finished cells are kept in validate_timing_model.runs.json in the output folder, by their setting and their words: the
same command measures only those that are missing, after a calibration of their testbed.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import shlex
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments import command
from experiments.cells import UNTIMED_ITERATIONS
from experiments.iteration_times import COLOURS
from experiments.kept_runs import KeptRuns
from experiments.results import Row, code_state, save, save_panels
from experiments.testbed import Link, Testbed
from experiments.testbed.links import parse_latency, parse_rate
from experiments.testbed_jobs import run_job
from pipesgd.command_line import parse as parse_training
from pipesgd.errors import RunError, UserInputError
from pipesgd.launch import Ranks
from pipesgd.metrics import read_metrics
from pipesgd.output import METRICS_FILE
from timing_model.predict import Answer, predict
from timing_model.profile import Profile
from timing_model.question import OWN_ALL_REDUCE, Question, compute_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKLOADS = {
    "mlp": "--dataset fashion-mnist --model mlp --hidden-sizes 1000 1000 --batch-size 512",
    "small-mlp": "--dataset fashion-mnist --model mlp --hidden-sizes 500 500 --batch-size 32",
    "convnet": "--dataset fashion-mnist --model convnet --batch-size 64",
    "digits": "--dataset digits --model mlp --hidden-sizes 64 --batch-size 16",
}
"""The last one is for quick runs."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A testbed, and what trains on it."""

    nodes: int
    rate: str
    latency: str = "0s"
    workload: str

    @property
    def name(self) -> str:
        late = "" if self.latency == "0s" else f" {self.latency}"
        return f"{self.nodes} x {self.rate}{late} {self.workload}"

    @property
    def link(self) -> Link:
        return Link(rate=parse_rate(self.rate), latency=parse_latency(self.latency))


SETTINGS = {
    one.name: one
    for one in (
        Setting(nodes=2, rate="200mbit", workload="mlp"),
        Setting(nodes=2, rate="1gbit", workload="convnet"),
        Setting(nodes=3, rate="50mbit", workload="convnet"),
        Setting(nodes=3, rate="500mbit", workload="mlp"),
        Setting(nodes=3, rate="200mbit", latency="5ms", workload="small-mlp"),
        Setting(nodes=4, rate="100mbit", workload="mlp"),
        Setting(nodes=4, rate="200mbit", workload="mlp"),
        Setting(nodes=4, rate="1gbit", workload="mlp"),
        Setting(nodes=4, rate="500mbit", latency="2ms", workload="small-mlp"),
        Setting(nodes=5, rate="200mbit", workload="convnet"),
        Setting(nodes=5, rate="1gbit", workload="small-mlp"),
    )
}
WIDTHS = (1, 2, 3)
CODECS = ("fp32", "bf16", "int8", "int4", "ternary")
ALL_REDUCES = ("ring", "halving-doubling", "all-to-all")
QUICK = Setting(nodes=2, rate="200mbit", workload="digits")
PIPELINED_CELLS = 5
OTHERS = ("--strategy ps-sync", "--strategy ddp", "--width 2 --all-reduce native")
"""Of which each setting has one, in turns."""
SECONDS, QUICK_SECONDS, LEAST_ITERATIONS, MOST_ITERATIONS = 8.0, 0.5, 12, 200
"""Of a measurement: as many iterations as are predicted to take so long."""
ROUNDS = 2
DEADLINE = 300.0
CALIBRATION_SECONDS, QUICK_CALIBRATION_SECONDS = 40.0, 4.0
MEAN_ERROR, P95_ERROR, COVERAGE = 0.03, 0.08, (0.85, 0.95)
"""What is to be reached."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one cell was predicted to take, and took."""

    commit: str | None
    predicted_s: float
    low_s: float
    high_s: float
    parts_s: dict[str, float]
    support: str
    limit: str
    measured_s: list[float]
    """Mean iteration, in each round; empty where it failed."""
    failure: str | None = None


def plan(settings: Sequence[Setting]) -> dict[Setting, list[str]]:
    """Words of ``pipesgd.train`` for the cells of each setting, besides the workload's."""
    choices = [
        f"--width {width} --codec {codec} --all-reduce {all_reduce}"
        for width, codec, all_reduce in itertools.product(WIDTHS, CODECS, ALL_REDUCES)
    ]
    places = list(SETTINGS.values())
    return {
        one: [
            *random.Random(one.name).sample(choices, PIPELINED_CELLS),
            OTHERS[places.index(one) % len(OTHERS)],
        ]
        for one in settings
    }


QUICK_PLAN = {QUICK: ["--width 2 --codec int8"]}


def ask(profile: Profile, setting: Setting, words: str) -> Answer:
    """What the model says of a cell."""
    config = parse_training(shlex.split(f"{WORKLOADS[setting.workload]} {words}"))
    strategy = config.pipeline.strategy
    pipelined = strategy == "pipelined"
    return predict(
        Question(
            cluster=profile,
            compute=compute_of(profile, config.model.model, config.data.batch_size),
            world_size=setting.nodes,
            strategy=strategy,
            width=config.pipeline.width if pipelined else 1,
            codec=config.compression.codec,
            all_reduce=config.pipeline.all_reduce if pipelined else OWN_ALL_REDUCE[strategy],
        ),
        extrapolate=True,
    )


def compute(
    todo: Mapping[Setting, list[str]], kept: KeptRuns[Cell], console: Console, *, quick: bool = False
) -> dict[str, Cell]:
    """The cells by setting and words; those that are not there yet are predicted and measured now."""
    done = kept.load()
    missing = {one: [words for words in cells if _key(one, words) not in done] for one, cells in todo.items()}
    total = sum(map(len, missing.values()))
    command.say_kept(console, sum(map(len, todo.values())), total)
    with command.progress(console, "timing model", total) as advance, tempfile.TemporaryDirectory() as folder:
        for setting, cells in missing.items():
            if not cells:
                continue
            with Testbed(nodes=setting.nodes, link=setting.link) as testbed:
                for words, cell in measure(testbed, setting, cells, Path(folder), quick=quick):
                    kept.add(_key(setting, words), cell)
                    done[_key(setting, words)] = cell
                    advance(1, f"{setting.name}, {words}: {_outcome(cell)}")
    return done


def measure(
    testbed: Testbed, setting: Setting, cells: Sequence[str], folder: Path, *, quick: bool = False
) -> Iterator[tuple[str, Cell]]:
    """Calibrate, predict all, and only then measure all.

    Raises:
        RunError: the calibration failed.
    """
    profile_file, log = folder / "cluster.toml", folder / "log"
    seconds, measured_seconds = (QUICK_CALIBRATION_SECONDS, QUICK_SECONDS) if quick else (CALIBRATION_SECONDS, SECONDS)
    line = f"-m pipesgd.calibrate --out {profile_file} --overwrite --seconds {seconds} {WORKLOADS[setting.workload]}"
    if failure := run_job(testbed, shlex.split(line), log, deadline=DEADLINE):
        raise RunError(f"{setting.name}: the calibration must succeed; got {failure}")
    profile = Profile.load(profile_file)
    answers = {words: ask(profile, setting, words) for words in cells}
    times: dict[str, list[float]] = {words: [] for words in cells}
    failures: dict[str, str] = {}
    for number in range(ROUNDS):
        for words in cells if number % 2 == 0 else reversed(cells):
            total = answers[words].iteration.total
            iterations = round(min(max(measured_seconds / total, LEAST_ITERATIONS), MOST_ITERATIONS))
            run = folder / "run"
            shutil.rmtree(run, ignore_errors=True)
            line = f"-m pipesgd.train {WORKLOADS[setting.workload]} {words} --iterations {iterations} --output {run}"
            if failure := run_job(testbed, shlex.split(line), log, deadline=DEADLINE):
                failures[words] = failure
                continue
            lines = read_metrics(run / METRICS_FILE)[UNTIMED_ITERATIONS:]
            times[words].append(float(np.mean([one["seconds"]["iteration"] for one in lines])))
    for words, answer in answers.items():
        yield (
            words,
            Cell(
                commit=code_state(),
                predicted_s=answer.iteration.total,
                low_s=answer.low,
                high_s=answer.high,
                parts_s=answer.iteration._asdict(),
                support=answer.support.kind,
                limit=answer.limit,
                measured_s=times[words],
                failure=failures.get(words),
            ),
        )


def tabulate(todo: Mapping[Setting, list[str]], cells: Mapping[str, Cell]) -> list[Row]:
    """A row for every cell that is there."""
    rows = []
    for setting, words in ((setting, words) for setting, all_words in todo.items() for words in all_words):
        cell = cells.get(_key(setting, words))
        if cell is None:
            continue
        complete = len(cell.measured_s) == ROUNDS
        measured = float(np.mean(cell.measured_s)) if complete else None
        rows.append(
            {
                **dataclasses.asdict(setting),
                "setting": setting.name,
                "words": words,
                "predicted_s": cell.predicted_s,
                "low_s": cell.low_s,
                "high_s": cell.high_s,
                **{f"round_{number}_s": cell.measured_s[number] if complete else None for number in range(ROUNDS)},
                "measured_s": measured,
                "error": None if measured is None else cell.predicted_s / measured - 1,
                "repeatability": max(cell.measured_s) / min(cell.measured_s) - 1 if complete else None,
                "covered": sum(cell.low_s <= one <= cell.high_s for one in cell.measured_s) if complete else None,
                "support": cell.support,
                "limit": cell.limit,
                "failure": cell.failure,
            }
        )
    return rows


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors of all cells that were measured, and how often a measurement was in its interval."""
    good = [row for row in rows if row["error"] is not None]
    errors = np.abs([row["error"] for row in good])
    covered = sum(row["covered"] for row in good) / (ROUNDS * len(good))
    return {
        "cells": len(good),
        "failed": len(rows) - len(good),
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "p95_error": float(np.quantile(errors, 0.95)),
        "mean_signed_error": float(np.mean([row["error"] for row in good])),
        "coverage": covered,
        "repeatability_mean": float(np.mean([row["repeatability"] for row in good])),
        "repeatability_p95": float(np.quantile([row["repeatability"] for row in good], 0.95)),
        "target": {"mean_error": MEAN_ERROR, "p95_error": P95_ERROR, "coverage": COVERAGE},
    }


def plot(rows: Sequence[Row], axes: Axes) -> Axes:
    """Predicted over measured, a colour for every setting, with the identity line."""
    good = [row for row in rows if row["error"] is not None]
    for number, name in enumerate(dict.fromkeys(row["setting"] for row in good)):
        own = [row for row in good if row["setting"] == name]
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
    ends = [min(row["measured_s"] for row in good), max(row["measured_s"] for row in good)]
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


def publish(rows: list[Row], folder: Path, console: Console) -> None:
    """Save the rows and their figure, and print them."""
    summary = summarize(rows)
    path = save("validate_timing_model", rows, extra={"summary": summary}, folder=folder)
    save_panels("validate_timing_model", [partial(plot, rows)], size=(8.5, 5.0), folder=folder)
    command.show("Predicted before measured", [_texts(row) for row in rows])
    command.say(
        console,
        f"{summary['cells']} cells: error {summary['mean_error']:.1%} on average (target {MEAN_ERROR:.0%}), "
        f"95 % within {summary['p95_error']:.1%} ({P95_ERROR:.0%}); {summary['coverage']:.0%} of measurements in the "
        f"90 % interval; the same cell measured again: {summary['repeatability_mean']:.1%} off on average",
    )
    command.say(console, f"wrote {path}")


def _texts(row: Row) -> dict[str, str]:
    def ms(name: str) -> str:
        return "-" if row[name] is None else f"{1e3 * row[name]:.1f}"

    return {
        "setting": row["setting"],
        "words": row["words"].replace("--", ""),
        "predicted ms": f"{ms('predicted_s')} ({ms('low_s')}-{ms('high_s')})",
        "measured ms": row["failure"] or f"{ms('round_0_s')}, {ms('round_1_s')}",
        "error %": "-" if row["error"] is None else f"{100 * row['error']:+.1f}",
    }


def _outcome(cell: Cell) -> str:
    if cell.failure:
        return f"failed: {cell.failure}"
    return f"predicted {1e3 * cell.predicted_s:.1f} ms, was {1e3 * float(np.mean(cell.measured_s)):.1f}"


def _key(setting: Setting, words: str) -> str:
    return f"{setting.name}: {words}"


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """The options; raises ``UserInputError``."""
    options = command.parser("validate_timing_model", __doc__)
    add = options.add_argument
    add("--settings", nargs="+", metavar="NAME", default=list(SETTINGS), help=f"of {'; '.join(SETTINGS)} (all)")
    one_of = options.add_mutually_exclusive_group()
    one_of.add_argument("--fresh", action="store_true", help="forget the finished cells in the output folder")
    one_of.add_argument("--finished", action="store_true", help="measure nothing: publish the cells that are there")
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"settings": SETTINGS})
    command.check_alone("validate_timing_model", by_torchrun, "it starts torchrun itself, on every node")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """The command."""
    arguments = ranks.agree("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(arguments.output / "validate_timing_model.runs.json", Cell)
    if arguments.fresh:
        kept.forget()
    todo = QUICK_PLAN if arguments.quick else plan([SETTINGS[name] for name in arguments.settings])
    cells = kept.load() if arguments.finished else compute(todo, kept, console, quick=arguments.quick)
    rows = tabulate(todo, cells)
    if not any(row["error"] is not None for row in rows):
        raise UserInputError("validate_timing_model must have a cell that was measured; there is none")
    publish(rows, arguments.output, console)


if __name__ == "__main__":
    command.run(main)
