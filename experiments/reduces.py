"""Time of an iteration by what of a gradient is exchanged, whole matrices, factors or rows, on emulated links.

    python -m experiments.reduces        4 nodes at 200 Mbit/s: reduces.csv

Two models: AlexNet for small images, most of whose weights are in a linear layer (factors), and a classifier of texts
with an embedding of 100,000 rows (rows), whose words are drawn uniformly, so that hardly any row is used twice in a
batch. All contenders train a copy of the same model on the same batches, which are already in memory; loops_on_links.py
says how they are timed, interleaved. "auto" has chosen in the rounds that are not timed. The nodes share the cores of
this machine, so computing, and multiplying the factors of all ranks, takes longer here than on machines of their own.
"sent" is what rank 0 has sent in an iteration, and "wire" the time of these bytes on its link, headers included.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from experiments import command
from experiments.bench_pipelined import Workload
from experiments.limits import Cluster, wire_seconds
from experiments.loops import Batch, Loop, Piped, Plain
from experiments.loops_on_links import Effort, measure, on_testbed, show, summarize
from experiments.results import save
from experiments.testbed import Link
from pipesgd.data import DataSplits
from pipesgd.ranks import Ranks

CLUSTER = Cluster(nodes=4, link=Link(rate=200e6))
FULL, QUICK = Effort(block=8, rounds=8), Effort(block=2, rounds=1)


@dataclass(frozen=True, kw_only=True)
class Texts(Workload):
    """A classifier of synthetic texts: words (B, ``words``), each with a row in an embedding, of two classes."""

    rows: int
    """Rows of the embedding."""
    columns: int
    words: int
    """Words in a text."""

    def build(self, data: DataSplits) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(self.rows, self.columns), nn.Linear(self.columns, 2))

    def batches(self, data: DataSplits, ranks: Ranks, number: int) -> list[Batch]:
        numbers = torch.Generator().manual_seed(1 + ranks.rank)
        shape = (self.batch_size, self.words)
        return [
            (
                torch.randint(self.rows, shape, generator=numbers),
                torch.randint(2, (self.batch_size,), generator=numbers),
            )
            for _ in range(number)
        ]


WORKLOADS: dict[str, Workload] = {
    "alexnet": Workload(name="small AlexNet, batch 32", model="alexnet", batch_size=32),
    "texts": Texts(
        name="texts of 64 words, embedding of 100,000 x 16, batch 32",
        model="embedding",
        batch_size=32,
        rows=100_000,
        columns=16,
        words=64,
    ),
}
DDP, DDP_FP16 = "DDP", "DDP, fp16"
PIPELINES: dict[str, dict[str, Any]] = {
    f"width {width}, {codec}, {reduce}": {"width": width, "codec": codec, "reduce": reduce}
    for width in (1, 2)
    for codec in ("fp32", "int8", "int4")
    for reduce in ("matrix", "auto")
}


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model``. Collective."""
    with_hook = DistributedDataParallel(copy.deepcopy(model))
    with_hook.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return {
        DDP: Plain(DistributedDataParallel(copy.deepcopy(model))),
        DDP_FP16: Plain(with_hook),
        **{name: Piped(copy.deepcopy(model), ranks, **options) for name, options in PIPELINES.items()},
    }


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser("reduces", __doc__)
    options.add_argument("--workload", choices=sorted(WORKLOADS), help="one of the models; by default all, in turn")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    effort = QUICK if arguments.quick else FULL
    if ranks.by_torchrun:
        measure(WORKLOADS[arguments.workload or "alexnet"], make_loops, ranks, effort, arguments.output)
        return
    rows = []
    for name in [arguments.workload] if arguments.workload else WORKLOADS:
        job = ["--workload", name, *["--quick"] * arguments.quick]
        found = on_testbed("reduces", job, nodes=CLUSTER.nodes, link=CLUSTER.link)
        title = f"{WORKLOADS[name].name}, {CLUSTER.describe()} (emulated)"
        for row in summarize(found, title, DDP):
            sent = found[row["contender"]]["wire_bytes"]
            wire = None if sent is None else wire_seconds(sent, CLUSTER.link.rate)
            rows.append({**row, "wire_bytes": sent, "wire_s": wire})
    save("reduces", rows, extra={"block": effort.block}, folder=arguments.output)
    for title in dict.fromkeys(row["title"] for row in rows):
        show([row for row in rows if row["title"] == title], wire_s="wire ms")


if __name__ == "__main__":
    command.run(main)
