"""Ranks that are killed or stopped, over each transport of ours: do all others name the right one, and how soon?

    python -m experiments.named_ranks      300 kills and 100 stops, over tcp and tls: named_ranks.csv

Each run has three ranks on this machine's loopback, forked from this process, one of which is killed or stopped in a
phase that is drawn: while it computes, at a hop of a sum, before it waits for a mean and applies it, in an evaluation
or a checkpoint. Seconds are from the end of the process, as the kernel tells it, or from the stop, to the
line of the last of the others. A run is right if each of the others prints an error that names that rank and no other
one, and ends by itself. Exit code 1 if one is not, if the median of the kills is above 50 ms, or if a stop takes more
than a second longer than the silence for which heartbeats are waited for.
"""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments import command, elastic_ranks, forked_ranks, watched_ranks
from experiments.elastic_ranks import CALLS, CHECKPOINT, EVALUATION, Kill
from experiments.kept_runs import KeptRuns
from experiments.results import save, sources
from experiments.watched_ranks import WatchedRanks
from pipesgd import keys
from pipesgd.errors import RunError
from pipesgd.exit import EXIT_FAILED
from pipesgd.membership.heartbeat import SHORTEST_SILENCE
from pipesgd.ranks import Ranks

STATE = Path("runs/named_ranks.json")
"""File of the kept runs, below the folder where the command is started."""
HARNESS = tuple(Path(str(one.__file__)) for one in (elastic_ranks, forked_ranks, watched_ranks))
RANKS = 3
WORDS = (
    "--dataset digits --model mlp --hidden-sizes 64 --batch-size 8 --iterations 1000000 --width 2 "
    f"--timeout {SHORTEST_SILENCE:g} --checkpoint-iterations 12 --evaluate-iterations 9"
)
CODECS = ("fp32", "int8", "int4")
TRANSPORTS = ("tcp", "tls")
KILL, STOP = "kill", "stop"
RUNS, QUICK_RUNS = {KILL: 300, STOP: 100}, {KILL: 4, STOP: 2}
AT = 20
"""Iteration in which the fault comes, about."""
CALL = {EVALUATION: AT // 9, CHECKPOINT: AT // 12, "hop": AT * 4}
"""Number of the call in which it comes; by default that of the iteration."""
MOST_KILL_SECONDS, MOST_STOP_SECONDS = 0.05, SHORTEST_SILENCE + 1.0
DEADLINE_SECONDS = 40.0
LOOK_SECONDS = 0.002

ERROR = re.compile(r"error: rank (\d+): (.*)")
OTHERS = re.compile(r"\branks? (\d+(?:, \d+)*)")
IN_ORDER = re.compile(r" with rank \d+ [^;]*failed: it has closed its connections;")
"""Place of an error whose cause comes after it: a connection that another one of the others has closed in order."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """Outcome of one run."""

    run: int
    fault: str
    transport: str
    codec: str
    phase: str
    rank: int
    seconds: float | None
    """Seconds until the last of the others had named the rank; None if one did not."""
    right: bool
    problem: str
    """Description of what was wrong; empty if nothing was."""


def named_in(line: str) -> tuple[int, set[int]] | None:
    """Return the rank whose error ``line`` is, and the other ranks that it names; None if it is no error.

    >>> named_in("error: rank 2: receive with rank 1 in iteration 4 failed: rank 1 has ended")
    (2, {1})
    """
    found = ERROR.match(line)
    if found is None:
        return None
    cause = IN_ORDER.sub("", found[2])
    return int(found[1]), {int(rank) for words in OTHERS.findall(cause) for rank in words.split(", ")}


def named(fault: str, run: int, seed: int, folder: Path, secret: Path) -> Named:
    """Make one run in ``folder``."""
    chance = random.Random(f"{seed}/{fault}/{run}")
    transport, codec = TRANSPORTS[run % len(TRANSPORTS)], chance.choice(CODECS)
    phase, rank = chance.choice([*CALLS]), chance.randrange(RANKS)
    words = f"{WORDS} --codec {codec} --transport {transport} --secret-file {secret}"
    later = chance.choice([0.0, chance.uniform(0.0, 0.005)]) if fault == KILL else 0.0
    hit = Kill(rank=rank, phase=phase, call=CALL.get(phase, AT), seconds=later, stop=fault == STOP)
    others = {*range(RANKS)} - {rank}
    begin: float | None = None
    with (
        forked_ranks.store() as port,
        WatchedRanks(folder, RANKS, lambda one: elastic_ranks.fork(words, one, RANKS, folder, port, [hit])) as ranks,
    ):
        end = time.monotonic() + DEADLINE_SECONDS
        while others & set(ranks.pids) and time.monotonic() < end:
            ranks.look(LOOK_SECONDS)
            if fault == STOP and begin is None and rank in ranks.pids:
                stopped = os.waitid(os.P_PID, ranks.pids[rank], os.WSTOPPED | os.WNOHANG)
                begin = None if stopped is None else time.monotonic()
        hung = sorted(others & set(ranks.pids))
    code = None if fault == STOP else ranks.codes[rank]
    begin = begin if fault == STOP else ranks.ends[rank]
    outcome = functools.partial(Named, run=run, fault=fault, transport=transport, codec=codec, phase=phase, rank=rank)
    said: dict[int, tuple[float, set[int]]] = {}
    for when, line in ranks.lines:
        if (found := named_in(line)) is not None:
            first, before = said.get(found[0], (when, set()))
            said[found[0]] = first, before | found[1]
    problem = ""
    if begin is None or code not in (None, -signal.SIGKILL, -signal.SIGALRM):
        problem = f"rank {rank} was not hit, and ended with code {code}"
    elif hung:
        problem = f"ranks {hung} did not end"
    elif codes := {one: ranks.codes[one] for one in others if ranks.codes[one] != EXIT_FAILED}:
        problem = f"exit codes {codes}"
    elif wrong := {one: names for one in others if (names := said.get(one, (0.0, set()))[1]) != {rank}}:
        problem = f"not rank {rank} alone was named, but {wrong}"
    if problem or begin is None:
        return outcome(seconds=None, right=False, problem=f"{problem}: {_last(ranks.lines)}")
    return outcome(seconds=max(said[one][0] for one in others) - begin, right=True, problem="")


def _last(lines: Sequence[tuple[float, str]]) -> str:
    return " / ".join(line for _, line in lines[-4:])[:400]


def compute(planned: Sequence[tuple[str, int]], seed: int, kept: KeptRuns[Named], console: Console) -> list[Named]:
    """Return the planned runs; those that are not kept yet are made now."""

    def make(one: tuple[str, int]) -> Named:
        with tempfile.TemporaryDirectory() as name:
            secret = Path(name) / "job.key"
            keys.make(secret, certificate=True)
            return named(*one, seed, Path(name), secret)

    forked_ranks.import_all()
    code = sources(Path(__file__), *HARNESS)[:16]
    return list(
        kept.complete(
            {f"seed {seed}, code {code}, {fault} {run}": (fault, run) for fault, run in planned},
            make,
            console,
            "runs",
            named=lambda one: f"{one[0]} {one[1]}:",
            told=lambda row: row.problem or f"{row.seconds:.3f} s",
        ).values()
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("named_ranks", __doc__)
    options.add_argument("--seed", type=command.at_least(0), default=0, help="seed of the ranks and moments (0)")
    options.add_argument("--fresh", action="store_true", help="repeat kept runs")
    arguments = command.parse(options, words)
    command.check_alone("named_ranks", by_torchrun, "it forks its ranks itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(STATE.resolve(), Named, fresh=arguments.fresh)
    numbers = QUICK_RUNS if arguments.quick else RUNS
    found = compute([(fault, run) for fault in numbers for run in range(numbers[fault])], arguments.seed, kept, console)
    save("named_ranks", [asdict(one) for one in found], extra={"options": WORDS}, folder=arguments.output)
    lines, late = [], []
    for fault, most in ((KILL, MOST_KILL_SECONDS), (STOP, MOST_STOP_SECONDS)):
        for transport in TRANSPORTS:
            cell = [one for one in found if (one.fault, one.transport) == (fault, transport)]
            seconds = [one.seconds for one in cell if one.seconds is not None]
            if not seconds:
                continue
            bounded = statistics.median(seconds) if fault == KILL else max(seconds)
            if bounded > most:
                late.append(f"{fault}s over {transport} {bounded:.3f} s (bound {most:g})")
            figures = (statistics.median(seconds), float(np.quantile(seconds, 0.99)), max(seconds))
            lines.append(
                {
                    "": f"{fault}, {transport}",
                    "right": f"{sum(one.right for one in cell)} of {len(cell)}",
                    **dict(zip(("median s", "99 % s", "worst s"), (f"{one:.3f}" for one in figures), strict=True)),
                }
            )
    command.show("The rank that was hit, named by both others", lines)
    if wrong := [f"{one.fault} {one.run} ({one.problem})" for one in found if not one.right]:
        raise RunError(f"the right rank must be named; not so: {', '.join(wrong)}")
    if late:
        raise RunError(f"the rank must be named in time; not so: {', '.join(late)}")


if __name__ == "__main__":
    command.run(main)
