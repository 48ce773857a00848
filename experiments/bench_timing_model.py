"""Response times of the timing model on one core.

    python -m experiments.bench_timing_model              bench_timing_model.csv

Each line is the median of several runs after an untimed one: of the ``timing-model`` command in a process of its own,
from its start to its end, for GPT-2 at 10 Gbit/s, or of calls in this process. The model's caches are emptied before
each run of a plan and of the 96 all-reduces. Memory is the peak of the command's process, or the growth of this
process's peak in all runs up to that line. Linux only.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import command
from experiments.paired import median
from experiments.results import REPOSITORY, Row, save
from pipesgd.ranks import Ranks
from timing_model import all_reduce
from timing_model.all_reduce import all_reduce_time
from timing_model.choices import Space
from timing_model.cluster_profile import Profile
from timing_model.collective_time import ring_all_reduce_time
from timing_model.jitter import steady_state_period
from timing_model.job import Job
from timing_model.measured import UNCOMPRESSED, ComputeProfile, LinkProfile
from timing_model.options import NOTHING
from timing_model.params import CodecCost, LinkParams, Noise
from timing_model.plan import plan
from timing_model.presets import CODECS, NETWORKS
from timing_model.schedules import ALL_REDUCES
from timing_model.simulate import simulate_iterations
from timing_model.simulate_messages import simulate_ring

LINK = LinkParams(alpha=5e-5, beta=8e-10, gamma=1e-10, sync=1e-4, overhead=1e-5)
CODEC = CodecCost(name="int8", bits=8.03, encode=2e-10, decode=1e-10, add=2e-10, hop=3e-10, call=1e-5)
NOISE = Noise(cv=0.1)
JOB = "--network 10GbE --compute 0.3s --model gpt2"
ASKED = """
import sys
from timing_model.cli import main
code = main()
print(*[line for line in open("/proc/self/status") if line.startswith("VmHWM")], file=sys.stderr)
sys.exit(code)
"""
"""Program that runs the command, then prints its peak memory; the system's count for a child includes its parent's."""
COLD_S = 2.0
"""Target for a command from a cold start, in seconds."""
FULL: dict[str, Any] = {
    "ranks": 10_000,
    "iterations": 1_000,
    "calls": 100_000,
    "world_sizes": (4, 31, 1_000, 10_000, 65_535, 65_536),
}
QUICK: dict[str, Any] = {"ranks": 100, "iterations": 10, "calls": 100, "world_sizes": (4,)}
RUNS = 5
KIB = 1024
"""Bytes in the unit of the peak memory that the system reports."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task to time, which is something done ``times`` in a row."""

    name: str
    do: Callable[[], int | None]
    """Function that does all of it; returns the other process's peak memory in bytes if it runs in one."""
    target_s: float | None = None
    """Target for all of it, in seconds (issue 6)."""
    most_bytes: float | None = None
    """Target for the memory of all of it, in bytes (issue 6)."""
    times: int = 1


def ask(words: str) -> int:
    """Run the ``timing-model`` command and return its peak memory, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *words.split()], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"timing-model {words} ended with {done.returncode}")
    return int(done.stderr.split()[1]) * KIB


def job(world_size: int) -> Job:
    """Return a job to plan in this process, without the command."""
    tensors = (2_000_000,) * 50
    compute = ComputeProfile.exact(model="", batch_size=1, tensors=tensors, compute=0.3, update=0.01)
    cluster = Profile(calibrated=NOTHING, link=LinkProfile.exact(NETWORKS["10GbE"]))
    return Job(cluster=cluster, compute=compute, world_size=world_size)


def space(configurations: int) -> Space:
    """Return a search space of at least ``configurations``, spread over widths and segment sizes."""
    codecs = (UNCOMPRESSED, *CODECS)
    all_reduces = tuple(name for name in ALL_REDUCES if name not in ("hierarchical", "native"))
    pairs = len(codecs) * len(all_reduces)
    segments = 64
    widths = -(-configurations // (pairs * segments))
    return Space(
        codecs=codecs,
        all_reduces=(*all_reduces, "native"),
        widths=tuple(range(1, widths + 1)),
        segments=tuple((64 << 10) * (number + 1) for number in range(segments)),
    )


def cases(ranks: int, iterations: int, calls: int, world_sizes: Sequence[int]) -> list[Case]:
    """Return all cases; targets are for the numbers of a full run."""

    def periods() -> None:
        for number in range(calls):
            steady_state_period(1.0, 0.5 + number / calls, 2, 64, NOISE)

    def closed() -> None:
        for number in range(calls):
            ring_all_reduce_time(LINK, 1e6 + number, 8)

    def planned() -> None:
        all_reduce.forget()
        found = plan(job(4), space(calls))
        assert found.considered >= calls

    def iterated() -> None:
        simulate_iterations(t_compute=1.0, t_comm=1.0, width=2, world_size=ranks, iterations=iterations, noise=NOISE)

    def passed_on() -> None:
        simulate_ring(LINK, 1e8, ranks)

    def anew() -> None:
        all_reduce.forget()
        for world_size in range(2, 34):
            for name in ("ring", "halving-doubling", "all-to-all"):
                all_reduce_time(name, LINK, 1e7, world_size, codec=CODEC)

    commands = [
        *((f"plan --world-size {size}", COLD_S, None) for size in world_sizes),
        (f"simulate --world-size {ranks} --iterations {iterations} --cv 0.1", 5.0, 1e9),
    ]
    return [
        Case(name=f"simulate {iterations} iterations of {ranks} ranks", do=iterated, target_s=5.0, most_bytes=1e9),
        Case(name=f"simulate a ring of {ranks} ranks", do=passed_on, target_s=1.0),
        Case(name=f"plan, {calls} configurations of 4 ranks", do=planned, target_s=1.0, times=calls),
        Case(name=f"{calls} periods with jitter", do=periods, target_s=1.0, times=calls),
        Case(name=f"{calls} rings, closed form", do=closed, target_s=1.0, times=calls),
        Case(name="96 all-reduces of 2 to 33 ranks, anew", do=anew, times=96),
        *(
            Case(name=f"timing-model {words}", do=partial(ask, f"{words} {JOB}"), target_s=seconds, most_bytes=most)
            for words, seconds, most in commands
        ),
    ]


def compute(chosen: Sequence[Case], runs: int, console: Console) -> list[Row]:
    """Return a row for every case."""
    rows: list[Row] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with command.progress(console, "timing model", len(chosen)) as advance:
        for case in chosen:
            seconds, used = [], 0
            for _ in range(1 + runs):
                begin = time.perf_counter()
                used = max(used, case.do() or 0)
                seconds.append(time.perf_counter() - begin)
            taken = median(seconds[1:])
            memory = used or (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * KIB
            met = (case.target_s is None or taken <= case.target_s) and memory <= (case.most_bytes or math.inf)
            rows.append(
                {
                    "case": case.name,
                    "median_s": taken,
                    "each_s": taken / case.times,
                    "memory_bytes": memory,
                    "target_s": case.target_s,
                    "most_bytes": case.most_bytes,
                    "target_met": None if case.target_s is None else met,
                    "runs": runs,
                }
            )
            advance(1, case.name)
    return rows


def publish(rows: list[Row], folder: Path) -> None:
    """Save the rows and print them."""
    save("bench_timing_model", rows, folder=folder)
    command.show(
        "How fast the timing model answers",
        [
            {
                "case": row["case"],
                "s": f"{row['median_s']:.3f}",
                "each, us": f"{row['each_s'] * 1e6:.1f}",
                "memory, MB": f"{row['memory_bytes'] / 1e6:.0f}",
                "target": "" if row["target_s"] is None else f"{row['target_s']:g} s",
                "": {None: "", True: "met", False: "MISSED"}[row["target_met"]],
            }
            for row in rows
        ],
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    arguments = command.parse(command.parser("bench_timing_model", __doc__), words)
    command.check_alone("bench_timing_model", by_torchrun, "it needs one process")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    chosen = cases(**QUICK if arguments.quick else FULL)
    publish(compute(chosen, 1 if arguments.quick else RUNS, console), arguments.output)


if __name__ == "__main__":
    command.run(main)
