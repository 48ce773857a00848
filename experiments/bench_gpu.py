"""Time of an iteration where the ranks compute on one GPU, on emulated links, interleaved.

    python -m experiments.bench_gpu                          bench_gpu.csv
    python -m experiments.bench_gpu --cells 4x1gbit

A cell is a number of nodes and the rate of their links. The nodes are on one machine and share its GPU, which serves
one rank at a time: an iteration without communication is one that computes next to the others. Every iteration ends
with a wait for the GPU, as by ``loss.item()``. DDP is on gloo: nccl refuses ranks that share a GPU.
loops_on_links.py says how the contenders are timed. "wire" is the time of the all-reduce's bytes on
the links, headers included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments import command
from experiments.limits import Cluster
from experiments.loops import Batch, Loop, Piped, Plain, to_fp16
from experiments.loops_on_links import (
    ALONE,
    DDP,
    DDP_FP16,
    Effort,
    Workload,
    measure,
    on_testbed,
    show,
    summarize,
    wire_seconds_of,
)
from experiments.results import Row, save
from experiments.testbed import Link, parse_rate
from pipesgd.data import DataSplits
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class OnGpu(Workload):
    """A workload whose model and batches are on the GPU."""

    def build(self, data: DataSplits) -> nn.Module:
        return super().build(data).cuda()

    def batches(self, data: DataSplits, ranks: Ranks, number: int) -> list[Batch]:
        return [(images.cuda(), labels.cuda()) for images, labels in super().batches(data, ranks, number)]


WORKLOAD = OnGpu(name="resnet18, batch 128", model="resnet18", batch_size=128)
PIPELINES: dict[str, dict[str, Any]] = {
    "width 1, int4, buckets": {"width": 1, "codec": "int4", "buckets": 2},
    "width 2, fp32": {"width": 2, "codec": "fp32"},
    "width 2, int8": {"width": 2, "codec": "int8"},
    "width 2, int4": {"width": 2, "codec": "int4"},
}


class Case(NamedTuple):
    """The contenders of a cell, and how long they are timed."""

    contenders: tuple[str, ...]
    effort: Effort


CASES = {
    "4x200mbit": Case((ALONE, DDP, DDP_FP16, "width 2, int8", "width 2, int4"), Effort(4, 4, untimed=2)),
    "4x1gbit": Case((ALONE, DDP, DDP_FP16, *PIPELINES), Effort(6, 6)),
    "4x10gbit": Case((ALONE, DDP, DDP_FP16, *PIPELINES), Effort(10, 10)),
}
"""Cells by name, each of two to three minutes: a block of the slowest contender takes 12 s at 200 Mbit/s."""
QUICK = Effort(block=2, rounds=1)


class Finished:
    """A loop each of whose iterations ends when the GPU is done."""

    def __init__(self, loop: Loop):
        self._loop, self.model = loop, loop.model

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        """Run an iteration to its end on the GPU."""
        self._loop.iterate(images, labels)
        torch.cuda.synchronize()

    def flush(self) -> None:
        """Apply the gradients that are still in flight."""
        self._loop.flush()

    def close(self) -> None:
        """End the loop's threads."""
        self._loop.close()


def make_loops(model: nn.Module, ranks: Ranks, contenders: Sequence[str]) -> dict[str, Loop]:
    """Return the loops of these contenders, each with a copy of ``model``. Collective."""
    # DDP without broadcasts of the batch normalization's buffers, which pipelines do not send either.
    with_ddp = partial(DistributedDataParallel, broadcast_buffers=False)
    made: dict[str, Callable[[], Loop]] = {
        ALONE: lambda: Plain(copy.deepcopy(model)),
        DDP: lambda: Plain(with_ddp(copy.deepcopy(model))),
        DDP_FP16: lambda: Plain(with_ddp(copy.deepcopy(model)), to_fp16),
        **{name: partial(Piped, copy.deepcopy(model), ranks, **options) for name, options in PIPELINES.items()},
    }
    return {name: Finished(made[name]()) for name in contenders}


def cluster_of(cell: str) -> Cluster:
    """Return the cluster of a cell.

    >>> cluster_of("4x10gbit").describe()
    '4 nodes at 10 Gbit/s'
    """
    nodes, rate = cell.split("x")
    return Cluster(nodes=int(nodes), link=Link(rate=parse_rate(rate)))


def check_gpu() -> None:
    """Raise ``UserInputError`` if there is no GPU."""
    if not torch.cuda.is_available():
        raise UserInputError("bench_gpu must run on a machine with a GPU; torch finds none")


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser("bench_gpu", __doc__)
    options.add_argument("--cells", nargs="+", choices=CASES, default=list(CASES), metavar="CELL", help="(all)")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    ranks.raise_together("GPU", check_gpu)
    if ranks.by_torchrun:
        case = CASES[arguments.cells[0]]
        make = partial(make_loops, contenders=case.contenders)
        measure(WORKLOAD, make, ranks, QUICK if arguments.quick else case.effort, arguments.output)
        return
    numel = sum(one.numel() for one in WORKLOAD.build(WORKLOAD.load()).parameters())
    rows: list[Row] = []
    for name in arguments.cells:
        cluster = cluster_of(name)
        job = ["--cells", name, *["--quick"] * arguments.quick]
        found = on_testbed("bench_gpu", job, nodes=cluster.nodes, link=cluster.link)
        title = f"{WORKLOAD.name} on one GPU, {cluster.describe()} (emulated)"
        wire = wire_seconds_of(cluster, numel, PIPELINES)
        of_cell = [{**row, "wire_s": wire[row["contender"]]} for row in summarize(found, title, DDP)]
        show(of_cell, wire_s="wire ms")
        rows += of_cell
        save("bench_gpu", rows, extra={"values": numel}, folder=arguments.output)


if __name__ == "__main__":
    command.run(main)
