"""A long training over each transport of ours: do descriptors, threads or memory of the ranks grow?

    python -m experiments.soak                    45 minutes over tcp, and as many over tls: soak.csv
    python -m experiments.soak --minutes 5 --output DIR

Three ranks on this machine's loopback, forked from this process, train with checkpoints and evaluations. Each minute
their descriptors, threads and private memory are counted. Those of the last third of the minutes are compared with
those of the second third, since a rank takes more in its first minutes: medians of the memory, and the least of the
others, since threads come and go (each heartbeat has one for a moment), but a leak does not. A transport that is
finished is kept in runs/soak.json, and the run of one that was interrupted is resumed by the same command. Exit code 1
if a rank has more descriptors or threads, or more memory than by 5 MB, or if the job ends by itself.
"""

from __future__ import annotations

import signal
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from experiments import command, forked_ranks
from experiments.forked_ranks import fork_rank, store, trained
from experiments.kept_runs import KeptRuns
from experiments.results import Row, save, sources
from experiments.strangers import private_bytes
from experiments.watched_ranks import WatchedRanks
from pipesgd import keys
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks

STATE = Path("runs/soak.json")
"""File of the kept runs, below the folder where the command is started."""
FOLDER = Path("runs/soak")
"""Folder of the runs, with a folder for each transport."""
RANKS = 3
TRANSPORTS = ("tcp", "tls")
MINUTES, QUICK_MINUTES = 45, 1
WORDS = (
    "--dataset fashion-mnist --model mlp --hidden-sizes 100 --batch-size 32 --width 2 --codec int4 "
    "--iterations 100000000 --checkpoint-iterations 1000 --evaluate-iterations 500 --timeout 60 --resume"
)
QUICK_SECONDS = 5.0
"""Seconds between two looks of a quick run."""
END_SECONDS = 60.0
MOST_BYTES = 5_000_000
COUNTS = ("descriptors", "threads", "bytes")


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """The looks at a run over one transport, one after another; each has a number for each rank."""

    transport: str
    seconds: list[float]
    descriptors: list[list[int]]
    threads: list[list[int]]
    bytes: list[list[int]]
    problem: str
    """Description of how the job ended, if not as it must; else empty."""


def look(pid: int) -> tuple[int, int, int]:
    """Return the descriptors, threads and private bytes of a process."""
    return (
        len(list(Path(f"/proc/{pid}/fd").iterdir())),
        len(list(Path(f"/proc/{pid}/task").iterdir())),
        private_bytes(pid),
    )


def soaked(transport: str, minutes: float, every: float, advance: Any) -> Soaked:
    """Train over ``transport`` for some minutes, and look at the ranks every ``every`` seconds."""
    folder = (FOLDER / transport).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    secret = folder / "job.key"
    if not secret.exists():
        keys.make(secret, certificate=True)
    words = f"{WORDS} --transport {transport} --secret-file {secret}"
    looks: dict[str, list[list[int]]] = {name: [] for name in COUNTS}
    seconds: list[float] = []
    with (
        store() as port,
        WatchedRanks(
            folder, RANKS, lambda rank: fork_rank(lambda: trained(words, folder), rank, RANKS, folder, port)
        ) as ranks,
    ):
        begin = time.monotonic()
        while not ranks.codes and time.monotonic() < begin + 60 * minutes:
            if ranks.wait(lambda: bool(ranks.codes), begin + every * (len(seconds) + 1) - time.monotonic()):
                break
            seconds.append(round(time.monotonic() - begin, 1))
            for name, values in zip(COUNTS, zip(*map(look, ranks.pids.values()), strict=True), strict=True):
                looks[name].append(list(values))
            advance(every / 60, f"{transport}: {looks['descriptors'][-1]} descriptors")
        early = bool(ranks.codes)
        for rank in range(RANKS):
            ranks.signal(rank, signal.SIGTERM)
        ranks.wait_for_all(END_SECONDS)
    problem = ""
    if early or set(ranks.codes.values()) != {128 + signal.SIGTERM}:
        last = [line for _, line in ranks.lines[-3:]]
        problem = f"exit codes {sorted(ranks.codes.values())}: {' / '.join(last)}"
    return Soaked(transport=transport, seconds=seconds, problem=problem, **looks)


def growth(found: Soaked, name: str) -> float:
    """Return by how much this count of the last third of the looks is above that of the second, at most of a rank."""
    looks: list[list[int]] = getattr(found, name)
    third = max(1, len(looks) // 3)
    second, last = looks[third : 2 * third] or looks[-1:], looks[-third:]
    of: Callable[[list[int]], float] = median if name == "bytes" else min
    return max(of([row[rank] for row in last]) - of([row[rank] for row in second]) for rank in range(len(looks[0])))


def grown(found: Soaked) -> str:
    """Return what has grown; empty if nothing."""
    if found.problem:
        return found.problem
    most = {"descriptors": 0, "threads": 0, "bytes": MOST_BYTES}
    return ", ".join(f"{by:g} {name} more" for name in COUNTS if (by := growth(found, name)) > most[name])


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("soak", __doc__)
    options.add_argument("--minutes", type=command.at_least(1), help=f"minutes of each transport ({MINUTES})")
    options.add_argument("--fresh", action="store_true", help="repeat kept runs")
    arguments = command.parse(options, words)
    command.check_alone("soak", by_torchrun, "it forks its ranks itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
    every = QUICK_SECONDS if arguments.quick else 60.0
    kept = KeptRuns(STATE.resolve(), Soaked, fresh=arguments.fresh)
    code = sources(Path(__file__))[:16]
    planned = {f"{transport}, {minutes} minutes, code {code}": transport for transport in TRANSPORTS}
    forked_ranks.import_all()
    with command.progress(console, "minutes", minutes * len(TRANSPORTS)) as advance:
        for key, transport in planned.items():
            if key not in kept.load():
                kept.add(key, soaked(transport, minutes, every, advance))
    found = [kept.load()[key] for key in planned]
    rows: list[Row] = [
        {"transport": one.transport, "seconds": seconds, "rank": rank, **dict(zip(COUNTS, values, strict=True))}
        for one in found
        for index, seconds in enumerate(one.seconds)
        for rank, values in enumerate(zip(*(getattr(one, name)[index] for name in COUNTS), strict=True))
    ]
    save("soak", rows, extra={"options": WORDS, "minutes": minutes}, folder=arguments.output)
    command.show(
        "Growth from the second to the last third of the time, of the rank with the most",
        [
            {"": one.transport, **{name: f"{growth(one, name):g}" for name in COUNTS}, "end": one.problem}
            for one in found
            if one.seconds
        ],
    )
    if wrong := [f"{one.transport}: {why}" for one in found if (why := grown(one))]:
        raise RunError(f"nothing must grow; it did: {'; '.join(wrong)}")


if __name__ == "__main__":
    command.run(main)
