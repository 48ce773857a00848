"""Our ring all-reduce against torch's own, over gloo on this machine, in one interleaved run.

    python -m experiments.bench_ring --all                    p = 2, 3, 4, loopback: bench_ring.csv
    python -m experiments.bench_ring --all --rate 200mbit     p = 3, 4, 5, one rank a node: bench_ring_200mbit.csv
    torchrun --nproc-per-node 2 -m experiments.bench_ring     one p: bench_ring_p2.csv

A round times each of the two once, in alternating order, each after a barrier and on the same values.
The time of a call is that of the slowest rank. The first rounds are left out.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from experiments import command, paired
from experiments.limits import SLOW_LINK
from experiments.paired import Contender, Seconds, interquartile_range, median, paired_ratio, ratio_columns
from experiments.results import REPOSITORY, Row, load, save
from experiments.testbed import Link, Testbed, parse_rate, rate_name
from pipesgd.comm.all_reduce import AllReduce
from pipesgd.comm.connections import make_all_reduce
from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from timing_model.schedules import SEGMENT_BYTES

WORLD_SIZES, LINK_WORLD_SIZES = (2, 3, 4), (3, 4, 5)
TARGET_RATIO = 1.10
TARGET_RATIO_SLOW_LINK, TARGET_RATIO_LINK = 1.03, 1.05
"""Targets (at most) for the ring's time over native's, on links up to ``SLOW_LINK`` and on faster ones."""
TARGET_FROM_NBYTES = 1_000_000
WARM_UP_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The sizes to measure, and the seconds and rounds for each."""

    sizes: tuple[int, ...]
    """Sizes of buffers, in bytes."""
    seconds_per_size: float
    least_rounds: int
    most_rounds: int

    def rounds(self, round_seconds: float) -> int:
        """Return the number of rounds for one size if a round takes ``round_seconds``."""
        return min(self.most_rounds, max(self.least_rounds, int(self.seconds_per_size / round_seconds)))


FULL = Effort(
    sizes=(4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 100 << 20),
    seconds_per_size=15.0,
    least_rounds=15,
    most_rounds=400,
)
QUICK = Effort(sizes=FULL.sizes[:6], seconds_per_size=0.3, least_rounds=3, most_rounds=20)
LINK = Effort(
    sizes=(1_000_000, 4_000_000, 16_000_000, 40_000_000), seconds_per_size=8.0, least_rounds=9, most_rounds=60
)
LINK_QUICK = Effort(sizes=(400_000, 1_000_000), seconds_per_size=0.2, least_rounds=3, most_rounds=5)


def compute(ranks: Ranks, effort: Effort, console: Console) -> list[Row]:
    """Return a row for every size, the same on all ranks.

    Raises:
        RunError: the two all-reduces do not give the same sums.
    """
    all_reduces = {
        name: make_all_reduce(name, ranks, timeout=DEFAULT_TIMEOUT, segment_bytes=SEGMENT_BYTES)
        for name in ("native", "ring")
    }
    # 1. Check the sums, and choose the number of rounds by how long one takes.
    round_seconds = {}
    for nbytes in effort.sizes:
        check_sums(all_reduces, input_values(ranks.rank, nbytes))
        round_seconds[nbytes] = paired.round_seconds(make_contenders(all_reduces, ranks.rank, nbytes))
    rounds = {nbytes: effort.rounds(seconds) for nbytes, seconds in round_seconds.items()}
    # 2. Time them.
    total = sum((WARM_UP_ROUNDS + rounds[nbytes]) * round_seconds[nbytes] for nbytes in effort.sizes)
    rows = []
    with command.progress(console, f"p = {ranks.world_size}", total, show=ranks.rank == 0) as advance:
        for nbytes in effort.sizes:
            contenders = make_contenders(all_reduces, ranks.rank, nbytes)
            after_round = partial(advance, round_seconds[nbytes], readable(nbytes))
            times = paired.interleave(contenders, rounds[nbytes], warm_up=WARM_UP_ROUNDS, after_round=after_round)
            rows.append(summarize(ranks.world_size, nbytes, times["native"], times["ring"]))
    return rows


def check_sums(all_reduces: Mapping[str, AllReduce], values: Tensor) -> None:
    """Raise ``RunError`` unless all all-reduces give the same sums."""
    sums = [values.clone() for _ in all_reduces]
    for all_reduce, flat in zip(all_reduces.values(), sums, strict=True):
        all_reduce(flat)
    if not all(torch.equal(sums[0], other) for other in sums[1:]):
        raise RunError(f"{' and '.join(all_reduces)} must give the same sums; they differ for {values.nbytes} bytes")


def input_values(rank: int, nbytes: int) -> Tensor:
    """Return whole numbers, float32 (nbytes / 4,), whose sums are exact in whatever order they are added."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (nbytes // 4,), generator=generator).float()


def make_contenders(all_reduces: Mapping[str, AllReduce], rank: int, nbytes: int) -> dict[str, Contender]:
    """Return a timer for each all-reduce, on the same values in the same memory."""
    values = input_values(rank, nbytes)
    flat = torch.empty_like(values)

    def timed(all_reduce: AllReduce) -> float:
        flat.copy_(values)
        dist.barrier()
        begin = time.perf_counter()
        all_reduce(flat)
        return time.perf_counter() - begin

    return {name: partial(timed, all_reduce) for name, all_reduce in all_reduces.items()}


def summarize(world_size: int, nbytes: int, native: Seconds, ring: Seconds) -> Row:
    """Return one line of the table, with algbw and busbw, in byte/s, as nccl-tests defines them."""
    ratio = paired_ratio(ring, native)
    bus = 2 * (world_size - 1) / world_size
    return {
        "p": world_size,
        "nbytes": nbytes,
        "native_median_s": median(native),
        "ring_median_s": median(ring),
        **ratio_columns("ratio", ratio),
        "rounds": len(native),
        "native_iqr_s": interquartile_range(native),
        "ring_iqr_s": interquartile_range(ring),
        "native_algbw": nbytes / median(native),
        "ring_algbw": nbytes / median(ring),
        "native_busbw": bus * nbytes / median(native),
        "ring_busbw": bus * nbytes / median(ring),
    }


def readable(nbytes: int) -> str:
    """Return ``nbytes`` in whole units."""
    for unit, size in (("MiB", 1 << 20), ("MB", 1_000_000), ("KiB", 1 << 10), ("kB", 1000)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def publish(name: str, rows: list[Row], folder: Path, *, target: float, facts: dict[str, Any] | None = None) -> None:
    """Save the rows and print them; ``facts`` are added to the manifest."""
    goal = {"ratio_median_at_most": target, "from_nbytes": TARGET_FROM_NBYTES}
    save(name, rows, extra={"target": goal, **(facts or {})}, folder=folder)
    command.show(
        f"All-reduce, ring / native; target: at most {target:.2f} from {readable(TARGET_FROM_NBYTES)} on",
        [
            {
                "p": str(row["p"]),
                "size": readable(row["nbytes"]),
                "native ms": f"{row['native_median_s'] * 1e3:.3f}",
                "ring ms": f"{row['ring_median_s'] * 1e3:.3f}",
                "ratio": f"{row['ratio_median']:.3f}",
                "95 %": f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
                "rounds": str(row["rounds"]),
                "target": verdict(row, target),
            }
            for row in rows
        ],
    )


def verdict(row: Row, target: float) -> str:
    """Return "met" or "MISSED", or an empty string if the row has no target."""
    if row["nbytes"] < TARGET_FROM_NBYTES:
        return ""
    return "met" if row["ratio_median"] <= target else "MISSED"


def run_jobs(
    module: str, words: Sequence[str], world_sizes: Sequence[int], rate: float | None
) -> tuple[list[Row], dict[str, Any]]:
    """Run a job of ``module`` for each p, one after the other, over loopback or, with a ``rate``, on p nodes.

    Returns the rows of all p, from the table whose name ends in p<p>, and the measurements of the links.
    """
    rows: list[Row] = []
    links: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = ["-m", f"experiments.{module}", *words, "--output", folder]
        for p in world_sizes:
            if rate is None:
                codes = [subprocess.run(command.torchrun(p, *job), cwd=REPOSITORY).returncode]
            else:
                with Testbed(nodes=p, link=Link(rate=rate)) as testbed:
                    links[f"links of {p} nodes"] = [asdict(measured) for measured in testbed.measure()]
                    codes = testbed.torchrun(job, cwd=REPOSITORY).wait()
            if any(codes):
                raise RunError(f"the run with p = {p} has failed")
            [result] = Path(folder).glob(f"*p{p}.csv")
            rows += load(result)
    return rows, links


@command.testbed_errors_as_ours()
def parse(words: Sequence[str], world_size: int) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    options = command.parser("bench_ring", __doc__)
    options.add_argument("--all", action="store_true", help="run every p; start it without torchrun")
    options.add_argument("--rate", help="rate of the links that --all emulates, or that the ranks use, e.g. 200mbit")
    options.add_argument(
        "--world-sizes",
        type=command.at_least(2),
        nargs="+",
        metavar="P",
        help="numbers of ranks with --all (2 3 4; 3 4 5 with --rate)",
    )
    arguments = command.parse(options, words)
    if arguments.all and world_size > 1:
        raise UserInputError("--all must be run without torchrun: it starts torchrun itself")
    if not arguments.all and world_size < 2:
        raise UserInputError("--all must be given, or at least 2 ranks started by torchrun; got 1 rank")
    if arguments.world_sizes and not arguments.all:
        raise UserInputError("--all must be given with --world-sizes")
    arguments.rate = None if arguments.rate is None else parse_rate(arguments.rate)
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.world_size))
    rate = arguments.rate
    name, target, full, quick, world_sizes = "bench_ring", TARGET_RATIO, FULL, QUICK, WORLD_SIZES
    if rate is not None:
        name += f"_{rate_name(rate)}"
        target = TARGET_RATIO_SLOW_LINK if rate <= SLOW_LINK else TARGET_RATIO_LINK
        full, quick, world_sizes = LINK, LINK_QUICK, LINK_WORLD_SIZES
    if arguments.all:
        job = [*([] if rate is None else ["--rate", rate_name(rate)]), *["--quick"] * arguments.quick]
        rows, links = run_jobs("bench_ring", job, arguments.world_sizes or world_sizes, rate)
        publish(name, rows, arguments.output, target=target, facts=links)
        return
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    rows = compute(ranks, quick if arguments.quick else full, console)
    if ranks.rank == 0:
        publish(f"{name}_p{ranks.world_size}", rows, arguments.output, target=target)


if __name__ == "__main__":
    command.run(main)
