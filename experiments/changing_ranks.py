"""Accuracy of a run whose number of ranks changes, next to one that is left alone.

    python -m experiments.changing_ranks      changing_ranks.csv

All four ranks are killed at a random moment, and two continue from the newest checkpoint; then three, and then four
again. Both runs see every sample once in each epoch. The moments are drawn from the seed, which is also that of the
training. Ranks are forked from this process, as in ``experiments.kill_anywhere``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from experiments import command, forked_ranks
from experiments.forked_ranks import TRAINING, Kill
from experiments.results import save
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.metrics import read_metrics
from pipesgd.run.output import METRICS_FILE, SUMMARY_FILE

RANKS = (4, 2, 3, 4)
"""Numbers of ranks, in turns."""
BATCH = 32
WORDS = (
    "--model mlp --hidden-sizes 100 --lr 0.05 --schedule cosine --width 2 --codec int8 --error-feedback on "
    f"--batch-size {BATCH} --checkpoint-iterations 50 --timeout 120"
)
DATA, QUICK_DATA = "--dataset fashion-mnist --epochs 4", "--dataset digits --epochs 20"
SAMPLES, QUICK_SAMPLES = 60_000 * 4, 1_497 * 20
"""Samples that such a run sees."""
SEEDS, QUICK_SEEDS = 3, 1
DEADLINE_SECONDS = 900.0
"""Seconds after which an attempt counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """Outcome of a run whose ranks change, and of the one that is left alone."""

    seed: int
    changes: str
    """Iteration after which each change was, and the number of ranks from there on."""
    iterations: int
    alone_iterations: int
    accuracy: float
    alone_accuracy: float
    points: float
    """Accuracy minus that of the run that is left alone, in percentage points."""


def kills_of(seed: int, samples: int) -> list[Kill]:
    """Return the kills that end all ranks, each after 15 to 30 % of the samples of the whole run."""
    chance = random.Random(seed)
    calls = [int(chance.uniform(0.15, 0.3) * samples / (ranks * BATCH)) for ranks in RANKS[:-1]]
    return [Kill(phase=TRAINING, rank=0, call=call, seconds=0.0, all_ranks=True) for call in calls]


def trained(words: str, kills: Sequence[Kill]) -> tuple[dict[str, Any], str]:
    """Return the summary of a run with these ``kills``, and its changes of ranks in words.

    Raises:
        RunError: it fails or hangs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = RANKS[: len(kills) + 1]
        if forked_ranks.run(words, sizes, folder, kills, deadline=DEADLINE_SECONDS) != len(kills):
            log = (folder / "log").read_text(encoding="utf-8", errors="replace")
            raise RunError(f"a run must survive its changes of ranks; it said:\n{log}")
        summary = json.loads((folder / "run" / SUMMARY_FILE).read_text(encoding="utf-8"))
        rates = [
            line["samples_per_second"] * line["seconds"]["iteration"]
            for line in read_metrics(folder / "run" / METRICS_FILE)
        ]
    of_ranks = [round(rate / BATCH) for rate in rates]
    changes = [f"{i}: {now}" for i, (before, now) in enumerate(itertools.pairwise(of_ranks), 1) if now != before]
    return summary, ", ".join(changes)


def compare(seed: int, quick: bool) -> Changed:
    """Train with one seed, with and without changes of ranks."""
    words = f"{WORDS} {QUICK_DATA if quick else DATA} --seed {seed}"
    alone, _ = trained(words, [])
    changed, changes = trained(words, kills_of(seed, QUICK_SAMPLES if quick else SAMPLES))
    accuracy, alone_accuracy = (one["final"]["test_accuracy"] for one in (changed, alone))
    return Changed(
        seed=seed,
        changes=changes,
        iterations=changed["iterations"],
        alone_iterations=alone["iterations"],
        accuracy=accuracy,
        alone_accuracy=alone_accuracy,
        points=round(100 * (accuracy - alone_accuracy), 2),
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("changing_ranks", __doc__)
    arguments = command.parse(options, words)
    command.check_alone("changing_ranks", by_torchrun, "it forks its ranks itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    seeds = QUICK_SEEDS if arguments.quick else SEEDS
    forked_ranks.import_all()
    rows: list[Changed] = []
    with command.progress(console, "pairs of runs", seeds) as advance:
        for seed in range(seeds):
            rows.append(compare(seed, arguments.quick))
            advance(1, f"{len(rows)} of {seeds}")
    found: list[dict[str, Any]] = [dataclasses.asdict(row) for row in rows]
    save("changing_ranks", found, extra={"options": f"{WORDS} {DATA}", "ranks": RANKS}, folder=arguments.output)
    difference = mean(row.points for row in rows)
    command.show(
        f"accuracy with changes of ranks minus that without: {difference:+.2f} points",
        [{name: str(value) for name, value in row.items()} for row in found],
    )


if __name__ == "__main__":
    command.run(main)
