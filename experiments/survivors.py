"""Ranks that are killed in an elastic run, at any moment: do the others continue, and how soon?

    python -m experiments.survivors      survivors.csv; exit code 1 if a run ends otherwise than the protocol says

Runs of 2 to 6 ranks on this machine's loopback, forked from this process, lose one rank after another until one or two
are left. Each is killed in a phase that is drawn: while it computes, at a hop of a sum, before it waits for a mean and
applies it, in an evaluation, in a checkpoint, or when it sends one of the messages of the change that another kill has
caused. A run is right if every rank that was not killed ends with code 0, or with 75 if fewer are left than
``--elastic`` says, whose checkpoint is then that of what they have; if all of them, and those that were killed until
then, have the same weights after each iteration, but for the last one of a rank that was killed, which may hold a mean
that the others have summed without it; and if each took the slices of samples that the generations say, each of which
was summed in exactly one iteration.

A kill's time is from the end of the process, as the kernel tells it, to the first iteration that needs a mean of those
who remain, at the slowest of them, less a median iteration; from the first end, if others died in the change. Finished
runs are kept in runs/survivors.json, by a hash of the code: the same command continues where it was stopped.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from experiments import command, elastic_ranks, forked_ranks, integer_sums, rank_notes, watched_ranks
from experiments.elastic_ranks import CALLS, CHECKPOINT, COMPUTING, EVALUATION, LAST_SEND, MESSAGES, Ended, Kill
from experiments.kept_runs import KeptRuns
from experiments.rank_notes import Wrong, check_notes, check_summed, checksum, generations_of
from experiments.results import save, sources
from pipesgd.errors import RunError
from pipesgd.exit import EXIT_TRY_AGAIN
from pipesgd.ranks import Ranks
from pipesgd.run.checkpoint_folder import CheckpointFolder

STATE = Path("runs/survivors.json")
"""File of the kept runs, below the folder where the command is started."""
HARNESS = tuple(
    Path(str(one.__file__)) for one in (elastic_ranks, forked_ranks, integer_sums, rank_notes, watched_ranks)
)
ITERATIONS, EVERY = 100, 20
"""Iterations of a run, and about how many lie between two kills."""
WORDS = (
    f"--dataset digits --model mlp --hidden-sizes 64 --batch-size 8 --iterations {ITERATIONS} --transport tcp "
    "--timeout 20 --checkpoint-iterations 12 --evaluate-iterations 9"
)
LEAST = (1, 1, 1, 2, 3)
"""Least numbers of ranks, of which each run draws one."""
OPTIONS = ("--width 2 --codec int8", "--width 2 --codec int4", "--width 1 --codec int8", "--width 3 --codec fp32")
"""Options added to ``WORDS``, one of them in each run."""
LEVELLING, LED = ("Level", "Fetch", "Results"), ("Prepare", "Accept", "Decided")
"""Messages by which a rank gets a mean that others have, and those that only the first living rank sends."""
RUNS, QUICK_RUNS = 400, 6
"""Runs, which kill about three ranks each."""
LEAST_KILLS = 10
"""Kills in each phase in all these runs, at least."""


@dataclass(frozen=True, kw_only=True)
class Survived:
    """Outcome of one run."""

    run: int
    options: str
    ranks: int
    least: int
    phases: list[str]
    """Phase of each kill; one in a message that was never sent hits nobody, and is not among them."""
    left: int
    right: bool
    problem: str
    """Description of what was wrong; empty if nothing was."""
    seconds: list[float]
    """Seconds of each change, as the module says; one after which no rank trained until its end has none."""
    deaths: list[int]
    """Number of deaths that it was about: of one rank, or of several until the others trained again."""


def kills_of(chance: random.Random, ranks: int) -> list[Kill]:
    """Return the kills of a run: of all ranks but one, in an order that is drawn."""
    living, kills, hops, before = list(range(ranks)), list[Kill](), 0, 0
    while len(living) > 1:
        at = EVERY // 2 + EVERY * len(kills) * 4 // max(4, ranks - 1)
        hops += 4 * (len(living) - 1) * (at - before)
        before = at
        phase = chance.choice([*CALLS, "message", "message"])
        message = chance.choice(MESSAGES) if phase == "message" else ""
        if message in LEVELLING and len(living) > 2:
            # The rank after the first to die lacks a mean, which the first of the others has and tells it to fetch.
            hit, sender = (living[0], living[1]) if message == "Fetch" else (living[1], living[0])
            kills += [Kill(rank=hit, phase=LAST_SEND, call=at), Kill(rank=sender, phase=message, call=0)]
            living = [one for one in living if one not in (hit, sender)]
            continue
        if message and kills:
            phase, call = message, chance.randrange(2)
        elif message:
            phase, call = COMPUTING, at  # there is no change yet
        else:
            call = {EVALUATION: at // 9, CHECKPOINT: at // 12, "hop": hops}.get(phase, at)
        rank = living.pop(0 if message in LED else chance.randrange(message != "", len(living)))
        kills.append(Kill(rank=rank, phase=phase, call=call, seconds=chance.choice([0.0, chance.uniform(0, 0.005)])))
    return kills


def problem_of(ended: Ended, folder: Path, width: int, least: int) -> str:
    """Return what is wrong with the end of a run; empty if nothing is."""
    killed = ended.was_killed
    left = ended.codes.keys() - killed
    code = 0 if len(left) >= least else EXIT_TRY_AGAIN
    if ended.hung:
        return "it hung"
    if wrong := {rank: ended.codes[rank] for rank in left if ended.codes[rank] != code}:
        return f"exit codes {wrong}, not {code}"
    try:
        weights = check_notes(ended.notes, killed, width)
        done = 1 + max(one.number for rank in left for one in ended.notes[rank].iterations)
        check_summed(ended.notes, ITERATIONS if code == 0 else done)
    except Wrong as problem:
        return str(problem)
    generations = generations_of(ended.notes)
    if not left <= set(generations[-1]["members"]):
        return f"members {generations[-1]['members']} at the end, of {sorted(left)}"
    if code:
        iteration, path = max(CheckpointFolder(folder / "run" / "checkpoints").published())
        state = torch.load(path / "shared.pt", weights_only=True)["state"]
        is_right = weights.get(iteration - 1) == checksum(state["parameters"].values())
        return "" if is_right and iteration == done else f"the last checkpoint is of iteration {iteration}"
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    told = [{name: value for name, value in one.items() if name != "time"} for one in summary["generations"]]
    return "" if summary["replicas_identical"] and told == generations else "summary.json says otherwise"


def seconds_of(ended: Ended, width: int) -> list[tuple[int, float]]:
    """Return the deaths and the seconds of each change that a death has caused.

    Changes that follow each other before a mean of those who remain has been needed are one.
    """
    done = {rank: notes.iterations for rank, notes in ended.notes.items()}
    pace = statistics.median(b.time - a.time for one in done.values() for a, b in itertools.pairwise(one))
    found: list[tuple[int, float]] = []
    joined: list[dict[str, Any]] = []
    for generation in generations_of(ended.notes)[1:]:
        if joined and generation["iterations_done"] == joined[-1]["iterations_done"]:
            generation = generation | {"lost": [*joined.pop()["lost"], *generation["lost"]]}
        joined.append(generation)
    for generation in joined:
        ends = [ended.times[one["rank"]] for one in generation["lost"] if ended.codes[one["rank"]] < 0]
        needs = generation["iterations_done"] + width - 1
        after = {
            rank: min((one.time for one in done[rank] if one.number >= needs and one.time > max(ends)), default=None)
            for rank in (generation["members"] if ends else [])
        }
        times = [one for one in after.values() if one is not None]
        if times and all(after[rank] is not None for rank in after if ended.codes[rank] == 0):
            found.append((len(ends), max(times) - min(ends) - pace))
    return found


def survived(run: int, seed: int, output: Path) -> Survived:
    """Make one run; keep its log in ``output`` if it ends wrongly."""
    chance = random.Random(f"{seed}/{run}")
    ranks, options = chance.randint(2, 6), OPTIONS[run % len(OPTIONS)]
    width, least = int(options.split()[1]), min(chance.choice(LEAST), ranks)
    words = f"{WORDS} {options} --elastic {least}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = elastic_ranks.run(words, ranks, folder, kills_of(chance, ranks))
        problem = problem_of(ended, folder, width, least)
        if problem:
            shutil.copy(folder / "log", output / f"survivors.run-{run}.log")
        seconds = [] if problem else seconds_of(ended, width)
    return Survived(
        run=run,
        options=options,
        ranks=ranks,
        least=least,
        phases=[phase for notes in ended.notes.values() for phase in notes.kills],
        left=len(ended.codes.keys() - ended.was_killed),
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
            told=lambda row: f"{len(row.phases)} killed, {row.left} left {row.problem}",
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
    """Print how the runs ended, where ranks were killed, and how long changes took."""
    changes = [pair for row in rows for pair in zip(row.deaths, row.seconds, strict=True)]
    command.show(f"{sum(row.right for row in rows)} of {len(rows)} elastic runs ended rightly", lines_of(changes))
    command.show("ranks killed", [{"phase": phase, "": str(number)} for phase, number in phases_of(rows).items()])


def phases_of(rows: Sequence[Survived]) -> dict[str, int]:
    """Return the kills in each phase."""
    found = Counter(phase for row in rows for phase in row.phases)
    return {phase: found[phase] for phase in (*CALLS, LAST_SEND, *MESSAGES)}


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
    rows = [
        {name: value for name, value in dataclasses.asdict(one).items() if name not in ("phases", "deaths", "seconds")}
        | {"killed": len(one.phases), "phases": "; ".join(one.phases)}
        for one in found
    ]
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
    if number >= RUNS and (rare := [phase for phase, kills in phases_of(found).items() if kills < LEAST_KILLS]):
        raise RunError(f"at least {LEAST_KILLS} ranks must be killed in each phase; not so in {', '.join(rare)}")


if __name__ == "__main__":
    command.run(main)
