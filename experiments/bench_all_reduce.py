"""All-reduces over emulated links: every algorithm with every codec, interleaved, next to what the wire allows.

    python -m experiments.bench_all_reduce --rate 200mbit        bench_all_reduce_200mbit.csv
    python -m experiments.bench_all_reduce --rate 200mbit --world-sizes 3 4 5 --name bench_all_reduce_matrix
    python -m experiments.bench_all_reduce --rate 1gbit --world-sizes 4 --algorithms native ring --codecs fp32 int8

Each node of the testbed has one rank. A round times every contender once, in rotated order, each after a barrier and
on the same values, with error feedback where pipesgd.train has it. The time of a call is that of the slowest rank; its
CPU seconds (user and system, of the whole process) are those of the busiest. The wire's limit is what the busiest rank
sends or receives, including the headers of full packets, over the rate; the efficiency is the limit over the median.
"""

from __future__ import annotations

import dataclasses
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
from experiments.limits import wire_seconds
from experiments.paired import interquartile_range, median, paired_ratio, ratio_columns, slowest
from experiments.results import REPOSITORY, Row, load, save
from experiments.testbed import Link, Testbed, parse_rate, rate_name
from pipesgd.codecs.options import DENSE_CODECS, NATIVE_CODECS, CodecOptions, codec_named
from pipesgd.comm.all_reduce import AllReduce
from pipesgd.comm.connections import Connections
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT
from timing_model.schedules import ALL_REDUCES

ALGORITHMS = tuple(name for name in ALL_REDUCES if name != "hierarchical")
"""All-reduces to compare; hierarchical is left out, since each node has one rank."""
DEFAULT_CODECS = ("fp32", "bf16", "int8", "int4")
QUICK_CODECS, QUICK_ALGORITHMS = ("fp32", "int8"), ("native", "ring")
LEAST_EFFICIENCY, LEAST_TO_NATIVE = 0.90, 0.97
"""Targets (at least) for the efficiency of the ring with a codec, and for native's time over that of the fp32 ring."""
TARGET_NODES, TARGET_RATE, TARGET_SIZES = 4, 200e6, (1_000_000, 40_000_000)
WARM_UP_ROUNDS = 1


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
    sizes=(4_000, 64_000, 1_000_000, 4_000_000, 16_000_000, 40_000_000),
    seconds_per_size=90.0,
    least_rounds=5,
    most_rounds=60,
)
QUICK = Effort(sizes=(4_000, 400_000), seconds_per_size=0.2, least_rounds=2, most_rounds=3)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An algorithm with a codec."""

    algorithm: str
    codec: CodecOptions
    all_reduce: AllReduce
    connections: Connections

    @property
    def name(self) -> str:
        return f"{self.algorithm}, {self.codec.codec}"

    def busiest(self, flat: Tensor) -> float:
        """Reduce ``flat`` and return the bytes that the busiest rank sends or receives for it. Collective."""
        if self.algorithm == "native":
            self.all_reduce(flat)
            return float(slowest([self.all_reduce.wire_bytes(flat)])[0])
        transport = self.connections.transport
        sent, received = transport.bytes_sent, transport.bytes_received
        self.all_reduce(flat)
        return float(slowest([max(transport.bytes_sent - sent, transport.bytes_received - received)])[0])


def make_contenders(ranks: Ranks, algorithms: Sequence[str], codecs: Sequence[str]) -> list[Contender]:
    """Return all combinations that exist: torch's own all-reduce cannot sum every codec. Collective."""
    contenders = []
    for algorithm in algorithms:
        connections = Connections(algorithm, ranks, timeout=DEFAULT_TIMEOUT)
        for name in codecs:
            if algorithm != "native" or name in NATIVE_CODECS:
                options = codec_named(name)
                all_reduce = connections.all_reduce(options.make())
                contenders.append(
                    Contender(algorithm=algorithm, codec=options, all_reduce=all_reduce, connections=connections)
                )
    return contenders


class Timed:
    """A timer for calls on the same values in the same memory, which keeps their CPU seconds."""

    def __init__(self, contender: Contender, values: Tensor, flat: Tensor):
        self._contender, self._values, self._flat = contender, values, flat
        self._residual = torch.zeros_like(values) if contender.codec.gives_back else None
        self.cpu_seconds: list[float] = []

    def __call__(self) -> float:
        self._flat.copy_(self._values)
        dist.barrier()
        used, begin = time.process_time(), time.perf_counter()
        self._contender.all_reduce(self._flat, self._residual, 1)
        seconds = time.perf_counter() - begin
        self.cpu_seconds.append(time.process_time() - used)
        return seconds


def compute(
    ranks: Ranks, contenders: Sequence[Contender], sizes: Sequence[int], rate: float, effort: Effort, console: Console
) -> list[Row]:
    """Return a row for every size and contender, the same on all ranks.

    Raises:
        RunError: the exact contenders do not give the same sums.
    """
    # 1. Check the sums; measure the bytes that travel and the duration of a round.
    prepared = []
    for nbytes in sizes:
        values = input_values(ranks.rank, nbytes)
        flat, sums = torch.empty_like(values), values.clone()
        dist.all_reduce(sums)
        wire = {}
        for one in contenders:
            flat.copy_(values)
            wire[one.name] = one.busiest(flat)
            if one.codec.codec == "fp32" and not torch.equal(flat, sums):
                raise RunError(f"{one.name} must give torch's sums; they differ for {nbytes} bytes")
        timed = {one.name: Timed(one, values, flat) for one in contenders}
        prepared.append((nbytes, wire, timed, paired.round_seconds(timed)))
    # 2. Time them.
    total = sum((WARM_UP_ROUNDS + effort.rounds(seconds)) * seconds for *_, seconds in prepared)
    rows = []
    with command.progress(console, f"p = {ranks.world_size}", total, show=ranks.rank == 0) as advance:
        for nbytes, wire, timed, seconds in prepared:
            after_round = partial(advance, seconds, readable(nbytes))
            times = paired.interleave(timed, effort.rounds(seconds), warm_up=WARM_UP_ROUNDS, after_round=after_round)
            for one in contenders:
                cpu = slowest(timed[one.name].cpu_seconds[-len(times[one.name]) :])
                rows.append(summarize(one, ranks.world_size, rate, nbytes, wire[one.name], times, cpu))
    return rows


def input_values(rank: int, nbytes: int) -> Tensor:
    """Return whole numbers, float32 (nbytes / 4,), whose sums are exact in whatever order they are added."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (nbytes // 4,), generator=generator).float()


def summarize(
    contender: Contender,
    world_size: int,
    rate: float,
    nbytes: int,
    wire_bytes: float,
    times: Mapping[str, paired.Seconds],
    cpu_seconds: paired.Seconds,
) -> Row:
    """Return one line of the table, with algbw and busbw, in byte/s, as nccl-tests defines them."""
    own, native = times[contender.name], times.get("native, fp32")
    limit = wire_seconds(wire_bytes, rate)
    to_native = None if native is None else paired_ratio(native, own)
    row: Row = {
        "p": world_size,
        "rate": rate,
        "nbytes": nbytes,
        "algorithm": contender.algorithm,
        "codec": contender.codec.codec,
        "median_s": median(own),
        "iqr_s": interquartile_range(own),
        "rounds": len(own),
        "wire_bytes_busiest": wire_bytes,
        "wire_limit_s": limit,
        "efficiency": limit / median(own),
        **ratio_columns("native_fp32_over_it", to_native),
        "algbw": nbytes / median(own),
        "busbw": 2 * (world_size - 1) / world_size * nbytes / median(own),
        "cpu_median_s": median(cpu_seconds),
    }
    return {**row, "target_met": target_met(row)}


def readable(nbytes: int) -> str:
    """Return ``nbytes`` in whole units."""
    for unit, size in (("MiB", 1 << 20), ("MB", 1_000_000), ("KiB", 1 << 10), ("kB", 1000)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def target_met(row: Row) -> bool | None:
    """Return True if the row meets its target, False if it misses it, None if it has none."""
    least, most = TARGET_SIZES
    on_target = row["p"] == TARGET_NODES and row["rate"] <= TARGET_RATE and least <= row["nbytes"] <= most
    if not on_target or row["algorithm"] != "ring":
        return None
    if row["codec"] != "fp32":
        return bool(row["efficiency"] >= LEAST_EFFICIENCY)
    to_native = row["native_fp32_over_it_median"]
    return None if to_native is None else bool(to_native >= LEAST_TO_NATIVE)


def publish(name: str, rows: list[Row], links: dict[str, Any], folder: Path) -> None:
    """Save the rows and print them."""
    target = {
        "nodes": TARGET_NODES,
        "rate_at_most": TARGET_RATE,
        "nbytes_from_to": TARGET_SIZES,
        "ring_with_codec_efficiency_at_least": LEAST_EFFICIENCY,
        "native_over_fp32_ring_at_least": LEAST_TO_NATIVE,
    }
    save(name, rows, extra={"target": target, **links}, folder=folder)
    command.show(
        f"All-reduces; target: ring with a codec at least {LEAST_EFFICIENCY} of the wire, fp32 ring at least "
        f"{LEAST_TO_NATIVE} of native",
        [
            {
                "p": str(row["p"]),
                "size": readable(row["nbytes"]),
                "algorithm": row["algorithm"],
                "codec": row["codec"],
                "ms": f"{row['median_s'] * 1e3:.2f}",
                "IQR": f"{row['iqr_s'] * 1e3:.2f}",
                "of the wire": f"{row['efficiency']:.3f}",
                "of native": "" if (x := row["native_fp32_over_it_median"]) is None else f"{x:.3f}",
                "busbw MB/s": f"{row['busbw'] / 1e6:.1f}",
                "CPU ms": f"{row['cpu_median_s'] * 1e3:.2f}",
                "target": {None: "", True: "met", False: "MISSED"}[row["target_met"]],
            }
            for row in rows
        ],
    )


def run_all(arguments: Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Run a job for each p, one after the other, on p nodes; return all rows and the measurements of the links."""
    words = ["--rate", rate_name(arguments.rate), "--sizes", *map(str, arguments.sizes), "--codecs", *arguments.codecs]
    words += ["--algorithms", *arguments.algorithms, *["--quick"] * arguments.quick]
    words += ["--seconds", str(arguments.seconds)] if arguments.seconds else []
    rows: list[Row] = []
    links: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = ["-m", "experiments.bench_all_reduce", *words, "--output", folder]
        for p in arguments.world_sizes:
            with Testbed(nodes=p, link=Link(rate=arguments.rate)) as testbed:
                links[f"links of {p} nodes"] = [asdict(measured) for measured in testbed.measure()]
                codes = testbed.torchrun(job, cwd=REPOSITORY).wait()
            if any(codes):
                raise RunError(f"the run with p = {p} has failed")
            rows += load(Path(folder, f"p{p}.csv"))
    return rows, links


@command.testbed_errors_as_ours()
def parse(words: Sequence[str]) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    options = command.parser("bench_all_reduce", __doc__)
    add, number = options.add_argument, command.at_least
    add("--rate", required=True, help="rate of every link, e.g. 200mbit")
    add("--world-sizes", type=number(2), nargs="+", default=[4], metavar="P", help="numbers of nodes (4)")
    add("--sizes", type=number(4), nargs="+", metavar="BYTES", help=f"buffer sizes ({' '.join(map(str, FULL.sizes))})")
    add("--algorithms", nargs="+", metavar="NAME", help=f"all-reduces: {', '.join(ALGORITHMS)} (all)")
    add("--codecs", nargs="+", metavar="NAME", help=f"any of {', '.join(DENSE_CODECS)} ({' '.join(DEFAULT_CODECS)})")
    add("--seconds", type=number(1), help=f"time for each size, for at least 5 rounds ({FULL.seconds_per_size:g})")
    add("--name", help="name of the result files (bench_all_reduce_RATE)")
    arguments = command.parse(options, words)
    quick = arguments.quick
    arguments.rate = parse_rate(arguments.rate)
    arguments.sizes = arguments.sizes or list((QUICK if quick else FULL).sizes)
    arguments.algorithms = arguments.algorithms or list(QUICK_ALGORITHMS if quick else ALGORITHMS)
    arguments.codecs = arguments.codecs or list(QUICK_CODECS if quick else DEFAULT_CODECS)
    known = {"algorithms": ALGORITHMS, "codecs": DENSE_CODECS, "world_sizes": None, "sizes": None}
    command.check_each_once(arguments, known)
    if arguments.algorithms == ["native"] and not set(arguments.codecs) & set(NATIVE_CODECS):
        raise UserInputError("--codecs must have one that torch can add up with --algorithms native; got none")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command, or one rank of its job if torchrun started this process."""
    arguments = ranks.raise_together("options", lambda: parse(words))
    if not ranks.by_torchrun:
        rows, links = run_all(arguments)
        publish(arguments.name or f"bench_all_reduce_{rate_name(arguments.rate)}", rows, links, arguments.output)
        return
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    contenders = make_contenders(ranks, arguments.algorithms, arguments.codecs)
    effort = QUICK if arguments.quick else FULL
    if arguments.seconds:
        effort = dataclasses.replace(effort, seconds_per_size=arguments.seconds)
    rows = compute(ranks, contenders, arguments.sizes, arguments.rate, effort, console)
    if ranks.rank == 0:
        save(f"p{ranks.world_size}", rows, folder=arguments.output)


if __name__ == "__main__":
    command.run(main)
