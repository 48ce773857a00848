"""Cost of a codec in accuracy: the same training with every codec on the wire, for several seeds.

    python -m experiments.codec_accuracy                          codec_accuracy.csv
    python -m experiments.codec_accuracy --models mlp --codecs fp32 int8 "int8 stochastic"

A run is pipesgd.train at width 1 on four ranks of this machine, over loopback. A row has all seeds of a codec;
differences to fp32 compare runs of the same seed, which start from the same weights and see the same samples.

Finished runs are kept in codec_accuracy.runs.json in the output folder, by their arguments and with the commit that
made them: the same command runs only what is missing.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.paired import median
from experiments.results import Row, code_state, save
from experiments.testbed_jobs import NEVER, run_training
from pipesgd.cli import parse as parse_training
from pipesgd.data import make_workload
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.output import SUMMARY_FILE
from timing_model.collective_time import ring_all_reduce_bytes

WORLD_SIZE = 4
RECIPE = "--width 1 --optimizer sgd --momentum 0.9 --lr 0.05 --schedule one-cycle"
MODELS = {
    "mlp": "--dataset fashion-mnist --model mlp --hidden-sizes 500 500 --batch-size 32",
    "convnet": "--dataset fashion-mnist --model convnet --batch-size 64",
    "digits": "--dataset digits --model mlp --hidden-sizes 64 --batch-size 16",
}
"""Arguments of ``pipesgd.train`` for each model; the last model is for trying things out."""
EPOCHS = {"mlp": 3, "convnet": 1, "digits": 3}
CODECS = {
    "fp32": "--codec fp32",
    "truncate16": "--codec truncate16",
    "bf16": "--codec bf16",
    "fp16": "--codec fp16",
    "int8": "--codec int8",
    "int8 stochastic": "--codec int8 --rounding stochastic",
    "int4": "--codec int4",
    "ternary": "--codec ternary --rounding stochastic",
    "ternary nearest": "--codec ternary --rounding nearest --error-feedback on",
    "qsgd": "--codec qsgd",
    "qsgd nearest": "--codec qsgd --rounding nearest",
    "sign": "--codec sign",
    "topk": "--codec topk",
    "powersgd": "--codec powersgd",
}
BASELINE = "fp32"
TARGETED, MOST_LOST = ("int8", "int4"), 0.2
"""Codecs with a target, and the most points of accuracy that they may lose."""
SEEDS, QUICK_SEEDS, QUICK_ITERATIONS = 3, 1, 30


@dataclass(frozen=True, kw_only=True)
class Run:
    """Outcome of one run on all ranks."""

    started: str
    commit: str | None
    """Commit of the code that made the run; None if there is no repository."""
    seconds: float
    test_accuracy: float
    wire_bytes: int
    """Bytes that rank 0 sends in an iteration."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run to be made."""

    model: str
    codec: str
    seed: int
    words: str
    """Arguments of ``pipesgd.train``, all but --output."""

    @property
    def name(self) -> str:
        """Name of the run for people."""
        return f"{self.model}, {self.codec}, seed {self.seed}"


def plan(models: Sequence[str], codecs: Sequence[str], seeds: int, *, quick: bool) -> list[Planned]:
    """Return all planned runs, seed by seed."""
    planned = []
    for model in models:
        length = f"--iterations {QUICK_ITERATIONS}" if quick else f"--epochs {EPOCHS[model]}"
        rest = f"{RECIPE} {length} --checkpoint-iterations {NEVER}"
        for seed in range(seeds):
            for codec in codecs:
                words = f"{MODELS[model]} {CODECS[codec]} {rest} --seed {seed}"
                planned.append(Planned(model=model, codec=codec, seed=seed, words=words))
    return planned


def train(one: Planned) -> Run:
    """Run ``pipesgd.train`` once by torchrun.

    Raises:
        RunError: it failed.
    """
    started, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        if failure := run_training([*one.words.split(), "--output", str(folder)], WORLD_SIZE):
            raise RunError(failure)
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    return Run(
        started=started,
        commit=code_state(),
        seconds=time.perf_counter() - begin,
        test_accuracy=summary["final"]["test_accuracy"],
        wire_bytes=summary["wire_bytes_per_iteration"],
    )


def parameters(model: str) -> int:
    """Return the number of parameters of the model."""
    _, built = make_workload(parse_training(MODELS[model].split()))
    return sum(parameter.numel() for parameter in built.parameters())


def summarize(planned: Sequence[Planned], runs: Mapping[str, Run], numel: Mapping[str, int]) -> list[Row]:
    """Return a row for every model and codec; ``numel`` is the number of parameters of each model.

    Differences to fp32, in points, are None where it was left out.
    """
    kept = {(one.model, one.codec, one.seed): runs[one.words] for one in planned}
    seeds = sorted({one.seed for one in planned})
    rows = []
    for model, codec in dict.fromkeys((one.model, one.codec) for one in planned):
        own = [kept[model, codec, seed] for seed in seeds]
        accuracies, wire = [run.test_accuracy for run in own], own[0].wire_bytes
        plain = ring_all_reduce_bytes(numel[model], WORLD_SIZE)  # values that a rank sends
        base = [run.test_accuracy for seed in seeds if (run := kept.get((model, BASELINE, seed)))]
        # Rounded, so that a value exactly on the target meets it.
        lost = [round(100 * (ours - theirs), 6) for ours, theirs in zip(accuracies, base, strict=False)]
        rows.append(
            {
                "model": model,
                "codec": codec,
                "words": CODECS[codec],
                "wire_bytes_per_iteration": wire,
                "bits_per_value": 8 * wire / plain,
                "wire_bytes_to_fp32": wire / (4 * plain),
                **{f"accuracy_seed_{seed}": accuracy for seed, accuracy in zip(seeds, accuracies, strict=True)},
                "accuracy_median": median(accuracies),
                "accuracy_mean": float(np.mean(accuracies)),
                "difference_to_fp32_points": round(float(np.mean(lost)), 6) if lost else None,
                "difference_lowest_points": min(lost, default=None),
                "difference_highest_points": max(lost, default=None),
                "run_median_s": median([run.seconds for run in own]),
            }
        )
    return rows


def verdict(row: Row) -> str:
    """Return "met" or "MISSED", or an empty string if there is no target or no fp32 to compare with."""
    if row["codec"] not in TARGETED or row["difference_to_fp32_points"] is None:
        return ""
    return "met" if row["difference_to_fp32_points"] >= -MOST_LOST else "MISSED"


def publish(rows: list[Row], runs: Mapping[str, Run], folder: Path) -> None:
    """Save the rows and print them."""
    extra = {
        "target": {"codecs": TARGETED, "difference_to_fp32_points_at_least": -MOST_LOST},
        "world_size": WORLD_SIZE,
        "words_of_runs": sorted(runs),
        "runs_started": {
            "first": min(run.started for run in runs.values()),
            "last": max(run.started for run in runs.values()),
        },
        "runs_made_with": sorted({str(run.commit) for run in runs.values()}),
    }
    save("codec_accuracy", rows, extra=extra, folder=folder)
    command.show(
        f"Test accuracy; target: {' and '.join(TARGETED)} lose at most {MOST_LOST} points to {BASELINE}",
        [_texts(row) for row in rows],
    )


def _texts(row: Row) -> dict[str, str]:
    text = partial(command.text_of, row, missing="")
    accuracies = [value for name, value in row.items() if name.startswith("accuracy_seed_")]
    return {
        "model": row["model"],
        "codec": row["codec"],
        "kB sent": text("wire_bytes_per_iteration", ".0f", 1e-3),
        "bits": text("bits_per_value", ".2f"),
        "accuracy % by seed": " ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies),
        "mean": text("accuracy_mean", ".2f", 100),
        "to fp32": text("difference_to_fp32_points", "+.2f"),
        "s": text("run_median_s", ".0f"),
        "target": verdict(row),
    }


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    options = command.parser("codec_accuracy", __doc__)
    add, number = options.add_argument, command.at_least
    add(
        "--models",
        nargs="+",
        default=["mlp", "convnet"],
        metavar="NAME",
        help=f"any of {', '.join(MODELS)} (mlp convnet)",
    )
    add("--codecs", nargs="+", default=list(CODECS), metavar="NAME", help=f"any of {'; '.join(CODECS)} (all)")
    add(
        "--seeds",
        type=number(1),
        help=f"number of seeds ({SEEDS}; quick: {QUICK_SEEDS}, {QUICK_ITERATIONS} iterations)",
    )
    add("--fresh", action="store_true", help="forget the finished runs in the output folder")
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"models": MODELS, "codecs": CODECS})
    command.check_alone("codec_accuracy", by_torchrun, "it starts torchrun itself")
    arguments.seeds = arguments.seeds or (QUICK_SEEDS if arguments.quick else SEEDS)
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(arguments.output / "codec_accuracy.runs.json", Run, fresh=arguments.fresh)
    planned = plan(arguments.models, arguments.codecs, arguments.seeds, quick=arguments.quick)
    numel = ranks.raise_together("data", lambda: {model: parameters(model) for model in arguments.models})
    by_words = {one.words: one for one in planned}
    done = kept.complete(by_words, train, console, "accuracy", named=lambda one: one.name)
    publish(summarize(planned, done, numel), done, arguments.output)


if __name__ == "__main__":
    command.run(main)
