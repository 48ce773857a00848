"""Accuracy of an elastic run that loses a rank every 20 s, next to one that is left alone.

    python -m experiments.churn      churn.csv; exit code 1 if the mean difference is more than 0.2 points

Six ranks on emulated accelerators lose one of them every 20 s until two are left. These are asked to stop 20 s later,
and the job is started again with six ranks and ``--resume``, until the epochs are done. Which ranks are killed is drawn
from the seed, which is also that of the training. Ranks are forked from this process, as in ``experiments.survivors``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from experiments import command, elastic_ranks, forked_ranks
from experiments.results import save
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.output import SUMMARY_FILE

RANKS, LEAST = 6, 2
EVERY_SECONDS, QUICK_EVERY_SECONDS = 20.0, 4.0
WORDS = (
    "--model experiments.accelerators:at_least=75ms --hidden-sizes 100 --lr 0.05 --schedule cosine --width 2 "
    "--codec int8 --error-feedback on --batch-size 16 --transport tcp --elastic 1 --timeout 60"
)
DATA, QUICK_DATA = "--dataset fashion-mnist --epochs 4", "--dataset digits --epochs 20"
SEEDS, QUICK_SEEDS = 3, 1
MOST_POINTS = 0.2
DEADLINE_SECONDS = 1800.0
"""Seconds after which an attempt counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Churned:
    """Outcome of a run that loses ranks, and of the one that is left alone."""

    seed: int
    killed: int
    starts: int
    iterations: int
    alone_iterations: int
    accuracy: float
    alone_accuracy: float
    points: float
    """Accuracy minus that of the run that is left alone, in percentage points."""


def losses(chance: random.Random, every: float) -> Callable[[Mapping[int, int]], None]:
    """Return a function that kills a rank every ``every`` seconds, and at last asks those that are left to stop."""
    due = time.monotonic() + every
    asked = False

    def meanwhile(pids: Mapping[int, int]) -> None:
        nonlocal due, asked
        if asked or time.monotonic() < due:
            return
        due += every
        asked = len(pids) <= LEAST
        for rank in sorted(pids) if asked else [chance.choice(sorted(pids))]:
            os.kill(pids[rank], signal.SIGTERM if asked else signal.SIGKILL)

    return meanwhile


def trained(words: str, chance: random.Random | None, every: float) -> tuple[dict[str, Any], int, int]:
    """Return the summary of a run, the ranks that it has lost, and how often it was started.

    Raises:
        RunError: a rank ended otherwise than it must.
    """
    killed, starts = 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while True:
            meanwhile = (lambda pids: None) if chance is None else losses(chance, every)
            resumes = " --resume" if starts else ""
            ended = elastic_ranks.run(words + resumes, RANKS, folder, meanwhile=meanwhile, deadline=DEADLINE_SECONDS)
            starts += 1
            killed += sum(code == -signal.SIGKILL for code in ended.codes.values())
            left = {code for code in ended.codes.values() if code != -signal.SIGKILL}
            if ended.hung or left not in ({0}, {128 + signal.SIGTERM}):
                log = (folder / "log").read_text(encoding="utf-8", errors="replace")
                raise RunError(f"those that are left must continue; got exit codes {ended.codes} after\n{log}")
            if left == {0}:
                return json.loads((folder / "run" / SUMMARY_FILE).read_text(encoding="utf-8")), killed, starts


def compare(seed: int, quick: bool) -> Churned:
    """Train with one seed, with and without losses."""
    words = f"{WORDS} {QUICK_DATA if quick else DATA} --seed {seed}"
    every = QUICK_EVERY_SECONDS if quick else EVERY_SECONDS
    alone, _, _ = trained(words, None, every)
    churned, killed, starts = trained(words, random.Random(seed), every)
    accuracy, alone_accuracy = (one["final"]["test_accuracy"] for one in (churned, alone))
    return Churned(
        seed=seed,
        killed=killed,
        starts=starts,
        iterations=churned["iterations"],
        alone_iterations=alone["iterations"],
        accuracy=accuracy,
        alone_accuracy=alone_accuracy,
        points=round(100 * (accuracy - alone_accuracy), 2),
    )


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("churn", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    command.check_alone("churn", ranks.by_torchrun, "it forks its ranks itself")
    seeds = QUICK_SEEDS if arguments.quick else SEEDS
    forked_ranks.import_all()
    rows: list[Churned] = []
    with command.progress(console, "pairs of runs", seeds) as advance:
        for seed in range(seeds):
            rows.append(compare(seed, arguments.quick))
            advance(1, f"{len(rows)} of {seeds}")
    found: list[dict[str, Any]] = [dataclasses.asdict(row) for row in rows]
    save("churn", found, extra={"options": f"{WORDS} {DATA}", "every_s": EVERY_SECONDS}, folder=arguments.output)
    difference = mean(row.points for row in rows)
    command.show(
        f"accuracy with losses minus that without: {difference:+.2f} points",
        [{name: str(value) for name, value in row.items()} for row in found],
    )
    if abs(difference) > MOST_POINTS and not arguments.quick:
        raise RunError(f"losses must change the accuracy by at most {MOST_POINTS} points; got {difference:+.2f}")


if __name__ == "__main__":
    command.run(main)
