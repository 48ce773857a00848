"""Time of an iteration where every rank has an emulated accelerator, on emulated links, interleaved.

    python -m experiments.bench_accelerators                    bench_accelerators.csv, bench_accelerators.png
    python -m experiments.bench_accelerators --cells 4x200mbit,75ms

A cell is a number of nodes, the rate of their links, and the time of a forward and backward pass. The accelerators are
synthetic (accelerators.py): a pass is a wait that leaves the cores of this machine to the network. loops_on_links.py
says how the contenders are timed; blocks are steady. "wire" is the time of the all-reduce's bytes on the links, headers
included. The limit of a pipeline is that, or the iteration without communication if it takes longer.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments import accelerators, command
from experiments.bench_pipelined import Workload
from experiments.limits import Cluster, ring_limit
from experiments.loops import Loop, Piped, Plain, to_fp16
from experiments.loops_on_links import Effort, draw, measure, on_testbed, show, show_verdicts, summarize, verdicts
from experiments.results import Row, save
from experiments.testbed import Link, parse_rate
from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import CodecOptions
from pipesgd.data import build_model
from pipesgd.ranks import Ranks

CELLS = ("4x200mbit,75ms", "2x200mbit,75ms", "4x100mbit,150ms", "4x1gbit,25ms")
CLUSTER = Cluster(nodes=4, link=Link(rate=200e6))
"""Cluster of the first cell."""
WORKLOAD = Workload(name="mlp 2x1000", model="mlp", hidden_sizes=(1000, 1000), batch_size=32)
ACCELERATOR = "75ms"
FULL, QUICK = Effort(block=8, rounds=8, steady=True), Effort(block=2, rounds=1, steady=True)

ALONE, DDP, DDP_FP16 = "no communication", "DDP", "DDP, fp16"
PIPELINES: dict[str, dict[str, Any]] = {
    **{
        f"width {width}, {codec}": {"width": width, "codec": codec}
        for width, codec in itertools.product((1, 2), ("fp32", "int8", "int4"))
    },
    **{f"width 1, {codec}, buckets": {"width": 1, "codec": codec, "buckets": 2} for codec in ("fp32", "int8", "int4")},
}
LIMITED = ("width 2, int8", "width 2, int4")
"""Contenders that are compared with their limits."""
MOST_OF_LIMIT = {2: 1.06, 4: 1.10}
"""Bound of that ratio, by the number of nodes."""
MOST_OF_FP16 = 0.5
"""Bound of the ratio of width 1 with int4 and buckets to DDP with fp16."""


class Cell(NamedTuple):
    """A cluster, and the time of a pass on the accelerators of its nodes."""

    cluster: Cluster
    accelerator: str

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the cell of one of ``CELLS``."""
        nodes, rate, accelerator = re.split("[x,]", name)
        return cls(Cluster(nodes=int(nodes), link=Link(rate=parse_rate(rate))), accelerator)


def emulate(model: nn.Module, rank: int, accelerator: str | None = None) -> accelerators.Emulated:
    """Return a copy of ``model`` on its accelerator, by default ``ACCELERATOR``."""
    made, _ = accelerators.parse(accelerator or ACCELERATOR, synthetic=True)
    return accelerators.Emulated(copy.deepcopy(model), made, rank=rank)


def make_loops(model: nn.Module, ranks: Ranks, accelerator: str | None = None) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model`` on an accelerator. Collective."""
    emulated = partial(emulate, model, ranks.rank, accelerator)
    return {
        ALONE: Plain(emulated()),
        **{name: Piped(emulated(), ranks, **options) for name, options in PIPELINES.items()},
        DDP: Plain(DistributedDataParallel(emulated())),
        DDP_FP16: Plain(DistributedDataParallel(emulated()), to_fp16),
    }


def wire_seconds(cluster: Cluster = CLUSTER) -> dict[str, float]:
    """Return the least time of each loop's all-reduce on the links, in seconds."""
    model = build_model(WORKLOAD.model, sample_shape=(1, 28, 28), num_classes=10, hidden_sizes=WORKLOAD.hidden_sizes)
    return wire_seconds_of(cluster, sum(one.numel() for one in model.parameters()), PIPELINES)


def wire_seconds_of(cluster: Cluster, numel: int, pipelines: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the least time of an all-reduce of ``numel`` values by each of ``pipelines`` and by DDP, in seconds."""
    nbytes = {ALONE: 0, DDP: 4 * numel, DDP_FP16: 2 * numel}
    for name, options in pipelines.items():
        nbytes[name] = make_codec(CodecOptions(codec=options["codec"])).wire_bytes(numel)
    return {name: ring_limit(cluster, one) for name, one in nbytes.items()}


def judge(found: Mapping[str, Mapping[str, Any]], cluster: Cluster) -> dict[str, dict[str, float | str]]:
    """Return the ratios that have a target, with their intervals."""
    wire, seconds = wire_seconds(cluster), {name: one["seconds"] for name, one in found.items()}
    limits = {f"limit of {name}": [max(wire[name], alone) for alone in seconds[ALONE]] for name in LIMITED}
    targets = {(name, f"limit of {name}"): ("at most", MOST_OF_LIMIT[cluster.nodes]) for name in LIMITED}
    targets["width 1, int4, buckets", DDP_FP16] = ("at most", MOST_OF_FP16)
    return verdicts(seconds | limits, targets)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser("bench_accelerators", __doc__)
    options.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL", help="(all)")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    effort = QUICK if arguments.quick else FULL
    if ranks.by_torchrun:
        accelerator = Cell.of(arguments.cells[0]).accelerator
        measure(WORKLOAD, partial(make_loops, accelerator=accelerator), ranks, effort, arguments.output)
        return
    rows: list[Row] = []
    judged = {}
    for name in arguments.cells:
        cluster, accelerator = Cell.of(name)
        job = ["--cells", name, *["--quick"] * arguments.quick]
        found = on_testbed("bench_accelerators", job, nodes=cluster.nodes, link=cluster.link)
        title = f"{WORKLOAD.name} on accelerators of {accelerator}, {cluster.describe()} (all emulated)"
        wire, judged[name] = wire_seconds(cluster), judge(found, cluster)
        of_cell = [{**row, "wire_s": wire[row["contender"]]} for row in summarize(found, title, DDP)]
        show(of_cell, wire_s="wire ms")
        show_verdicts(judged[name])
        rows += of_cell
    save("bench_accelerators", rows, extra={"block": effort.block, "targets": judged}, folder=arguments.output)
    draw("bench_accelerators", rows, arguments.output)


if __name__ == "__main__":
    command.run(main)
