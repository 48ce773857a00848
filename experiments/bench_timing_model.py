"""How fast the timing model answers, on one core.

    python -m experiments.bench_timing_model              bench_timing_model.csv

Each line is the median of some runs, in one process, after one that is not timed; what the model keeps between calls
is dropped before each run of "anew". Memory is how much the process grew, at most, in all runs up to that line.
"""

from __future__ import annotations

import resource
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments import command
from experiments.paired import median
from experiments.results import Row, save
from pipesgd.launch import Ranks
from timing_model import (
    CodecCost,
    LinkParams,
    Noise,
    all_reduce,
    all_reduce_time,
    ring_all_reduce_time,
    simulate_iterations,
    steady_state_period,
)
from timing_model.messages import simulate_ring

LINK = LinkParams(alpha=5e-5, beta=8e-10, gamma=1e-10, sync=1e-4, overhead=1e-5)
CODEC = CodecCost(name="int8", bits=8.03, encode=2e-10, decode=1e-10, add=2e-10, hop=3e-10, call=1e-5)
NOISE = Noise(cv=0.1)
RUNS = 5
KIB = 1024 if sys.platform != "darwin" else 1
"""Unit of the largest size that the system reports, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed: something done ``times`` in a row."""

    name: str
    do: Callable[[], object]
    target_s: float | None = None
    """For all of it; issue 6."""
    times: int = 1


def cases(ranks: int, iterations: int, calls: int) -> list[Case]:
    """All of them; targets are for the numbers of a full run."""

    def periods() -> None:
        for number in range(calls):
            steady_state_period(1.0, 0.5 + number / calls, 2, 64, NOISE)

    def closed() -> None:
        for number in range(calls):
            ring_all_reduce_time(LINK, 1e6 + number, 8)

    def anew() -> None:
        all_reduce.forget()
        for world_size in range(2, 34):
            for name in ("ring", "halving-doubling", "all-to-all"):
                all_reduce_time(name, LINK, 1e7, world_size, codec=CODEC)

    return [
        Case(
            name=f"simulate {iterations} iterations of {ranks} ranks",
            do=lambda: simulate_iterations(
                t_compute=1.0, t_comm=1.0, width=2, world_size=ranks, iterations=iterations, noise=NOISE
            ),
            target_s=5.0,
        ),
        Case(name=f"simulate a ring of {ranks} ranks", do=lambda: simulate_ring(LINK, 1e8, ranks), target_s=1.0),
        Case(name=f"{calls} periods with jitter", do=periods, target_s=1.0, times=calls),
        Case(name=f"{calls} rings, closed form", do=closed, target_s=1.0, times=calls),
        Case(name="96 all-reduces of 2 to 33 ranks, anew", do=anew, times=96),
    ]


def compute(chosen: Sequence[Case], runs: int, console: Console) -> list[Row]:
    """A row for every case."""
    rows: list[Row] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with command.progress(console, "timing model", len(chosen)) as advance:
        for case in chosen:
            seconds = []
            for _ in range(1 + runs):
                begin = time.perf_counter()
                case.do()
                seconds.append(time.perf_counter() - begin)
            taken = median(seconds[1:])
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * KIB
            rows.append(
                {
                    "case": case.name,
                    "median_s": taken,
                    "each_s": taken / case.times,
                    "grown_bytes": grown,
                    "target_s": case.target_s,
                    "target_met": None if case.target_s is None else taken <= case.target_s,
                    "runs": runs,
                }
            )
            advance(1, case.name)
    return rows


def publish(rows: list[Row], folder: Path) -> None:
    """Save the rows, and print them."""
    save("bench_timing_model", rows, folder=folder)
    command.show(
        "How fast the timing model answers",
        [
            {
                "case": row["case"],
                "s": f"{row['median_s']:.3f}",
                "each, us": f"{row['each_s'] * 1e6:.1f}",
                "grown, MB": f"{row['grown_bytes'] / 1e6:.0f}",
                "target": "" if row["target_s"] is None else f"{row['target_s']:g} s",
                "": {None: "", True: "met", False: "MISSED"}[row["target_met"]],
            }
            for row in rows
        ],
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """The options; raises ``UserInputError``."""
    arguments = command.parse(command.parser("bench_timing_model", __doc__), words)
    command.check_alone("bench_timing_model", by_torchrun, "it needs one process")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """The command."""
    arguments = ranks.agree("options", lambda: parse(words, ranks.by_torchrun))
    chosen = cases(100, 10, 100) if arguments.quick else cases(10_000, 1_000, 100_000)
    publish(compute(chosen, 1 if arguments.quick else RUNS, console), arguments.output)


if __name__ == "__main__":
    command.run(main)
