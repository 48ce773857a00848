"""Ranks that are killed in an elastic run, at any moment: do the others continue, and how soon?

    python -m experiments.survivors      survivors.csv; exit code 1 if a run ends otherwise than the protocol says

Runs of 2 to 6 ranks on this machine's loopback, forked from this process, lose one rank after another until one or two
are left. Each is killed in a phase that is drawn: while it computes, at a hop of a sum, before it waits for a mean and
applies it, in an evaluation, in a checkpoint, or when it sends one of the messages of the change that another kill has
caused. A run is right if every rank that was not killed ends with code 0, all of them with the same weights,
and if every slice of samples was used in exactly one iteration, which is computed from the generations in
summary.json alone.

A kill's time is from the end of the process, as the kernel tells it, to the first iteration that needs a mean of those
who remain, at the slowest of them, less a median iteration. Finished runs are kept in runs/survivors.json, by a hash of
the code: the same command continues where it was stopped.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
import statistics
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments import command, elastic_ranks, forked_ranks, watched_ranks
from experiments.elastic_ranks import CALLS, CHECKPOINT, COMPUTING, EVALUATION, MESSAGES, Ended, Kill
from experiments.integer_sums import rest, slice_of, span_at, spans_of
from experiments.kept_runs import KeptRuns
from experiments.results import save, sources
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks

STATE = Path("runs/survivors.json")
"""File of the kept runs, below the folder where the command is started."""
HARNESS = tuple(Path(str(one.__file__)) for one in (elastic_ranks, forked_ranks, watched_ranks))
ITERATIONS, EVERY = 100, 20
"""Iterations of a run, and about how many lie between two kills."""
WORDS = (
    f"--dataset digits --model mlp --hidden-sizes 64 --batch-size 8 --iterations {ITERATIONS} --transport tcp "
    "--elastic 1 --timeout 20 --checkpoint-iterations 12 --evaluate-iterations 9"
)
OPTIONS = ("--width 2 --codec int8", "--width 2 --codec int4", "--width 1 --codec int8", "--width 3 --codec fp32")
"""Options added to ``WORDS``, one of them in each run."""
RUNS, QUICK_RUNS = 340, 6
"""Runs, which kill about three ranks each."""


@dataclass(frozen=True, kw_only=True)
class Survived:
    """Outcome of one run."""

    run: int
    options: str
    ranks: int
    kills: list[tuple[int, str, int]]
    """Rank, phase and call of each kill that was armed."""
    killed: int
    """Ranks that were killed; a kill in a message that was never sent hits nobody."""
    left: int
    right: bool
    problem: str
    """Description of what was wrong; empty if nothing was."""
    seconds: list[float]
    """Seconds of each change, as the module says."""
    deaths: list[int]
    """Number of deaths that it was about: of one rank, or of several until the others trained again."""


def kills_of(chance: random.Random, ranks: int) -> list[Kill]:
    """Return the kills of a run: of all ranks but one, in an order that is drawn."""
    order = chance.sample(range(ranks), ranks - 1)
    kills = []
    for place, rank in enumerate(order):
        at = EVERY // 2 + EVERY * place * 4 // max(4, ranks - 1)
        phase = chance.choice([*CALLS, "message"])
        if phase == "message" and place == 0:
            phase = COMPUTING  # there is no change yet
        call = {EVALUATION: at // 9, CHECKPOINT: at // 12, "hop": at * 4 * (ranks - 1)}.get(phase, at)
        if phase == "message":
            phase, call = chance.choice(MESSAGES), chance.randrange(2)
        kills.append(Kill(rank=rank, phase=phase, call=call, seconds=chance.choice([0.0, chance.uniform(0, 0.005)])))
    return kills


def slices_missing(summary: Mapping[str, Any], iterations: int) -> str:
    """Return what is wrong with the slices of samples, given the generations of a run; empty if nothing is."""
    generations = summary["generations"]
    spans = spans_of(generations)
    used: Counter[int] = Counter()
    for iteration in range(iterations):
        used.update(slice_of(spans, iteration, member) for member in span_at(spans, iteration)[1])
    used -= Counter(
        number for generation in generations for lost in generation["lost"] for number in lost["slices_given_back"]
    )
    waiting, end = rest(spans[-1], iterations)
    wrong = [number for number in range(end) if used[number] != (0 if number in waiting else 1)]
    return f"slices {wrong[:5]} were used {[used[one] for one in wrong[:5]]} times" if wrong else ""


def problem_of(ended: Ended, kills: Sequence[Kill], folder: Path, ranks: int) -> str:
    """Return what is wrong with the end of a run; empty if nothing is."""
    armed = {kill.rank for kill in kills}
    if ended.hung:
        return "it hung"
    if wrong := {rank: code for rank, code in ended.codes.items() if code != 0 and not (rank in armed and code < 0)}:
        return f"exit codes {wrong}"
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    left = [rank for rank in range(ranks) if ended.codes[rank] == 0]
    if not summary["replicas_identical"] or summary["iterations"] != ITERATIONS:
        return "the weights differ"
    if not set(left) <= set(summary["generations"][-1]["members"]):
        return f"members {summary['generations'][-1]['members']} at the end, of {left}"
    return slices_missing(summary, ITERATIONS)


def seconds_of(ended: Ended, summary: Mapping[str, Any], width: int) -> list[tuple[int, float]]:
    """Return the deaths and the seconds of each change that a death has caused.

    Changes that follow each other before a mean of those who remain has been needed are one.
    """
    paces = [b - a for done in ended.iterations.values() for (_, a), (_, b) in itertools.pairwise(done)]
    pace = statistics.median(paces)
    found: list[tuple[int, float]] = []
    joined: list[dict[str, Any]] = []
    for generation in summary["generations"][1:]:
        if joined and generation["iterations_done"] == joined[-1]["iterations_done"]:
            generation = generation | {"lost": [*joined.pop()["lost"], *generation["lost"]]}
        joined.append(generation)
    for generation in joined:
        ends = [ended.times[one["rank"]] for one in generation["lost"] if ended.codes[one["rank"]] < 0]
        needs = generation["iterations_done"] + width - 1
        after = [
            min((when for iteration, when in done if iteration >= needs and when > max(ends)), default=None)
            for rank, done in ended.iterations.items()
            if ends and ended.codes[rank] == 0
        ]
        if after and None not in after:
            found.append((len(ends), max(one for one in after if one is not None) - max(ends) - pace))
    return found


def survived(run: int, seed: int, output: Path) -> Survived:
    """Make one run; keep its log in ``output`` if it ends wrongly."""
    chance = random.Random(f"{seed}/{run}")
    ranks, options = chance.randint(2, 6), OPTIONS[run % len(OPTIONS)]
    kills = kills_of(chance, ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = elastic_ranks.run(f"{WORDS} {options}", ranks, folder, kills)
        problem = problem_of(ended, kills, folder, ranks)
        seconds: list[tuple[int, float]] = []
        if problem:
            shutil.copy(folder / "log", output / f"survivors.run-{run}.log")
        else:
            summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
            seconds = seconds_of(ended, summary, int(options.split()[1]))
    return Survived(
        run=run,
        options=options,
        ranks=ranks,
        kills=[(kill.rank, kill.phase, kill.call) for kill in kills],
        killed=sum(code < 0 for code in ended.codes.values()),
        left=sum(code == 0 for code in ended.codes.values()),
        right=not problem,
        problem=problem,
        seconds=[one for _, one in seconds],
        deaths=[deaths for deaths, _ in seconds],
    )


def compute(number: int, seed: int, kept: KeptRuns[Survived], output: Path, console: Console) -> list[Survived]:
    """Return ``number`` runs; those that are not kept yet are made now."""
    forked_ranks.import_all()
    code = sources(Path(__file__), *HARNESS)[:16]
    return list(
        kept.complete(
            {f"seed {seed}, code {code}, run {run}": run for run in range(number)},
            lambda run: survived(run, seed, output),
            console,
            "runs",
            named=lambda run: f"run {run}:",
            told=lambda row: f"{row.killed} killed, {row.left} left {row.problem}",
        ).values()
    )


def lines_of(changes: Sequence[tuple[int, float]]) -> list[dict[str, str]]:
    """Return lines of a table, given the ranks that each change has lost, and its seconds."""
    lines = []
    for lost, several in (("one", False), ("several", True)):
        seconds = [one for number, one in changes if (number > 1) is several]
        if seconds:
            figures = (statistics.median(seconds), float(np.quantile(seconds, 0.99)), max(seconds))
            words = dict(zip(("median s", "99 % s", "worst s"), (f"{one:.3f}" for one in figures), strict=True))
            lines.append({"lost in a change": lost, "changes": str(len(seconds)), **words})
    return lines


def show(rows: Sequence[Survived]) -> None:
    """Print how the runs ended, and how long changes took."""
    killed, right = sum(row.killed for row in rows), sum(row.right for row in rows)
    changes = [pair for row in rows for pair in zip(row.deaths, row.seconds, strict=True)]
    command.show(f"{right} of {len(rows)} elastic runs ended rightly, {killed} ranks killed", lines_of(changes))


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("survivors", __doc__)
    options.add_argument("--runs", type=command.at_least(1), help=f"runs ({RUNS}; quick: {QUICK_RUNS})")
    options.add_argument("--seed", type=command.at_least(0), default=0, help="seed of the ranks and moments (0)")
    options.add_argument("--fresh", action="store_true", help="repeat kept runs")
    arguments = command.parse(options, words)
    command.check_alone("survivors", by_torchrun, "it forks its ranks itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(STATE.resolve(), Survived, fresh=arguments.fresh)
    number = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    found = compute(number, arguments.seed, kept, arguments.output, console)
    left_out = ("kills", "deaths", "seconds")
    rows = [{name: value for name, value in dataclasses.asdict(one).items() if name not in left_out} for one in found]
    changes: list[dict[str, Any]] = [
        {"run": one.run, "ranks": one.ranks, "options": one.options, "deaths": deaths, "seconds": seconds}
        for one in found
        for deaths, seconds in zip(one.deaths, one.seconds, strict=True)
    ]
    extra = {"options": WORDS, "added": OPTIONS}
    save("survivors", rows, extra=extra, folder=arguments.output)
    save("survivors_changes", changes, extra=extra, folder=arguments.output)
    show(found)
    if wrong := [f"{one.run} ({one.problem})" for one in found if not one.right]:
        raise RunError(f"every run must end as the protocol says; not so: {', '.join(wrong)}")


if __name__ == "__main__":
    command.run(main)
