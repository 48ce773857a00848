"""Time of an iteration on this machine: pipelined against torch's DistributedDataParallel, interleaved.

    torchrun --nproc-per-node 4 -m experiments.bench_pipelined      bench_pipelined.csv

A round has a block of iterations of each contender, in rotated order. Two untimed iterations and a barrier
precede each block. A pipeline is empty when a block begins and is emptied again, by flush(), within the timed
region, so that every gradient is computed, reduced and applied inside it. All contenders train a copy of the
same model on the same batches, which are already in memory: loading is not measured. The time of a block is
that of the slowest rank.
"""

from __future__ import annotations

import copy
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments import command, paired
from experiments.loops import Batch, Loop, Piped, Plain
from experiments.paired import Contender, Seconds, interquartile_range, median, paired_ratio, ratio_columns
from experiments.results import Row, save
from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.data import DataSplits, ShardedBatches, build_model, load_dataset
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

TARGET_RATIO = 1.05
TARGETED = ("pipelined width 2, ring", "pipelined width 2, native")
UNTIMED_ITERATIONS = 2


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and batch size to train on Fashion-MNIST, unless ``load`` returns other data."""

    name: str
    model: str
    batch_size: int
    hidden_sizes: tuple[int, ...] = ()

    def load(self) -> DataSplits:
        """Return the data."""
        return load_dataset("fashion-mnist", None, image_size=64)

    def build(self, data: DataSplits) -> nn.Module:
        """Return the model, with the same weights every time."""
        torch.manual_seed(0)
        return build_model(
            self.model, sample_shape=data.sample_shape, num_classes=data.num_classes, hidden_sizes=self.hidden_sizes
        )

    def shards(self, data: DataSplits, ranks: Ranks) -> ShardedBatches:
        """Return the batches of this rank."""
        return ShardedBatches(
            data.train, batch_size=self.batch_size, rank=ranks.rank, world_size=ranks.world_size, seed=0
        )

    def batches(self, data: DataSplits, ranks: Ranks, number: int) -> list[Batch]:
        """Return the first ``number`` batches of this rank, in memory."""
        return list(islice(self.shards(data, ranks).from_iteration(0), number))


WORKLOADS = (
    Workload(name="mlp 2x500, batch 64", model="mlp", hidden_sizes=(500, 500), batch_size=64),
    Workload(name="mlp 2x1000, batch 128", model="mlp", hidden_sizes=(1000, 1000), batch_size=128),
    Workload(name="mlp 2x1000, batch 512", model="mlp", hidden_sizes=(1000, 1000), batch_size=512),
    Workload(name="convnet, batch 64", model="convnet", batch_size=64),
)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The workloads, iterations and rounds to measure."""

    workloads: tuple[Workload, ...]
    block: int
    """Iterations that are timed together."""
    rounds: int


FULL = Effort(workloads=WORKLOADS, block=20, rounds=20)
QUICK = Effort(workloads=WORKLOADS[:1], block=5, rounds=3)


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model``. Collective."""
    return {
        "ddp": Plain(DistributedDataParallel(copy.deepcopy(model))),
        "pipelined width 2, ring": Piped(copy.deepcopy(model), ranks, width=2, all_reduce="ring"),
        "pipelined width 2, native": Piped(copy.deepcopy(model), ranks, width=2, all_reduce="native"),
        "synchronous (width 1), ring": Piped(copy.deepcopy(model), ranks, width=1, all_reduce="ring"),
        "local (no communication)": Plain(copy.deepcopy(model)),
    }


def compute(ranks: Ranks, effort: Effort, data: DataSplits, console: Console) -> list[Row]:
    """Return a row for every workload and contender, the same on all ranks."""
    return time_in_rounds(ranks, effort, data, console, "time of an iteration", make_loops, summarize)


def time_in_rounds(
    ranks: Ranks,
    effort: Effort,
    data: DataSplits,
    console: Console,
    title: str,
    make: Callable[[nn.Module, Ranks], Mapping[str, Loop]],
    tabulate: Callable[[Workload, dict[str, Seconds]], list[Row]],
) -> list[Row]:
    """Return the rows that ``tabulate`` makes of the times of each workload's loops, in interleaved rounds. Collective.

    ``make`` makes the loops of a model. ``title`` is that of the progress, on rank 0.
    """
    # 1. Warm up with one round of each, which also shows how long everything will take.
    loops = {workload: make(workload.build(data), ranks) for workload in effort.workloads}
    blocks = {
        workload: make_blocks(loops[workload], workload.batches(data, ranks, UNTIMED_ITERATIONS + effort.block))
        for workload in effort.workloads
    }
    round_seconds = {workload: paired.round_seconds(blocks[workload]) for workload in effort.workloads}
    # 2. Time them.
    rows: list[Row] = []
    total = effort.rounds * sum(round_seconds.values())
    with command.progress(console, title, total, show=ranks.rank == 0) as advance:
        for workload in effort.workloads:
            after_round = partial(advance, round_seconds[workload], workload.name)
            rows += tabulate(workload, paired.interleave(blocks[workload], effort.rounds, after_round=after_round))
    for loop in (loop for some in loops.values() for loop in some.values()):
        loop.close()
    return rows


def make_blocks(
    loops: Mapping[str, Loop], batches: Sequence[Batch], *, untimed: int = UNTIMED_ITERATIONS, steady: bool = False
) -> dict[str, Contender]:
    """Return, for each loop, a function that times a block of its iterations and returns seconds per iteration.

    The first ``untimed`` batches are not timed. A pipeline is empty when the timed iterations begin and end; in a
    ``steady`` block it is as full as the untimed iterations have made it.
    """
    before, timed = batches[:untimed], batches[untimed:]

    def block(loop: Loop) -> float:
        for batch in before:
            loop.iterate(*batch)
        if not steady:
            loop.flush()
            dist.barrier()
        begin = time.perf_counter()
        for batch in timed:
            loop.iterate(*batch)
        if not steady:
            loop.flush()
        seconds = (time.perf_counter() - begin) / len(timed)
        if steady:
            loop.flush()
        return seconds

    return {name: partial(block, loop) for name, loop in loops.items()}


def summarize(workload: Workload, seconds: dict[str, Seconds]) -> list[Row]:
    """Return the lines of the table for one workload; times are per iteration."""
    rows = []
    for name, times in seconds.items():
        ratio = paired_ratio(times, seconds["ddp"])
        rows.append(
            {
                "workload": workload.name,
                "batch_size": workload.batch_size,
                "contender": name,
                "median_s": median(times),
                "iqr_s": interquartile_range(times),
                **ratio_columns("ratio_to_ddp", ratio),
                "rounds": len(times),
            }
        )
    return rows


def publish(rows: list[Row], folder: Path) -> None:
    """Save the rows and print them."""
    save("bench_pipelined", rows, extra={"target": {"ratio_to_ddp_median_at_most": TARGET_RATIO}}, folder=folder)
    command.show(
        f"Time of an iteration; target: pipelined width 2 / ddp at most {TARGET_RATIO:.2f}",
        [
            {
                "workload": row["workload"],
                "contender": row["contender"],
                "ms": f"{row['median_s'] * 1e3:.2f}",
                "IQR ms": f"{row['iqr_s'] * 1e3:.2f}",
                "/ ddp": f"{row['ratio_to_ddp_median']:.3f}",
                "95 %": f"{row['ratio_to_ddp_low']:.3f} to {row['ratio_to_ddp_high']:.3f}",
                "target": verdict(row),
            }
            for row in rows
        ],
    )


def verdict(row: Row) -> str:
    """Return "met" or "MISSED", or an empty string if the row has no target."""
    if row["contender"] not in TARGETED:
        return ""
    return "met" if row["ratio_to_ddp_median"] <= TARGET_RATIO else "MISSED"


def parse(words: Sequence[str], world_size: int) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    arguments = command.parse(command.parser("bench_pipelined", __doc__), words)
    if world_size < 2:
        raise UserInputError("at least 2 ranks must be started (torchrun --nproc-per-node 4 ...); got 1")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.world_size))
    data = ranks.raise_together("data", WORKLOADS[0].load)
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    rows = compute(ranks, QUICK if arguments.quick else FULL, data, console)
    if ranks.rank == 0:
        publish(rows, arguments.output)


if __name__ == "__main__":
    command.run(main)
