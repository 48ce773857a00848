"""Time and bytes of an iteration on islands of two ranks, on emulated links, next to torch's own ways, interleaved.

    python -m experiments.bench_islands                     2 and 3 nodes, two models: bench_islands.csv, .png
    python -m experiments.bench_islands --cells 2,alexnet

A cell is a number of nodes at 200 Mbit/s, with two ranks on each, which are an island, and a model. DDP, FSDP2 over all
ranks and HSDP (``fully_shard`` on a mesh: sharded inside nodes, replicas between them) are torch's, with float32 and as
torch has them by default. pipesgd's rings exchange gradients between islands, inside of which the model is split by
FSDP2, in the same groups as HSDP, or by tensor parallelism. All see the same samples (island_loops.py). Blocks are
steady; loops_on_links.py says how the contenders are timed. gloo's reduce-scatter sends as much as an all-reduce.

Up to six ranks share the two cores of this machine, which would be what is measured if they computed all the time. So
the models are real ones, batches are small (a window of 64 bytes of text, or two images, a rank), and every forward and
backward pass takes at least ``ACCELERATOR``, as on an accelerator of each rank: a rank that is faster waits at the end
of its pass. All that torch communicates during a pass counts as hidden behind it, as well as it could be; with pipesgd,
that is only what is sent inside islands.

Bytes are those that all ranks together receive in an iteration (connection_bytes.py). "announced" is what pipesgd's
reports say that ranks send between islands; gloo's own headers come on top of it, and are in the payload.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from rich.console import Console
from torch import nn

from experiments import command, connection_bytes
from experiments.island_loops import (
    DDP,
    HSDP,
    INSIDE,
    MEMBERS,
    WAYS,
    IslandLoop,
    IslandWorkload,
    alexnet,
    pipelined,
    transformer,
)
from experiments.limits import Cluster
from experiments.loops import Loop
from experiments.loops_on_links import Effort, measure, on_testbed, plot, show, show_verdicts, summarize, verdicts
from experiments.paired import paired_ratio
from experiments.results import Row, save, save_figure
from experiments.testbed import Link
from pipesgd.ranks import Ranks

NAME = "bench_islands"
WORKLOADS: dict[str, IslandWorkload] = {
    "transformer": transformer(layers=2, batch_size=1),
    "alexnet": alexnet(batch_size=2),
}
CELLS = ("2,transformer", "2,alexnet", "3,transformer", "3,alexnet")
RATE = 200e6
ACCELERATOR = 0.1
"""Seconds that a forward and backward pass takes at least."""
FULL, QUICK = Effort(block=3, rounds=8, steady=True), Effort(block=1, rounds=1, steady=True)
BYTES = ("inside_payload", "between_payload", "inside_interfaces", "between_interfaces")
LEAST_OF_HSDP = 3.0
"""Bound of the ratio of HSDP's time to that of width 2 with int4."""
TARGETS = {(HSDP, pipelined(inside, 2, "int4")): ("at least", LEAST_OF_HSDP) for inside in INSIDE}


class Cell(NamedTuple):
    """A cluster and what is trained on it."""

    cluster: Cluster
    workload: IslandWorkload

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the cell of one of ``CELLS``."""
        nodes, workload = name.split(",")
        cluster = Cluster(nodes=int(nodes), link=Link(rate=RATE), nproc_per_node=MEMBERS)
        return cls(cluster, WORKLOADS[workload])

    @property
    def title(self) -> str:
        return f"{self.workload.model}, {self.cluster.describe()}"


def make_loops(model: nn.Module, ranks: Ranks, workload: IslandWorkload) -> dict[str, Loop]:
    """Return the loop of every way, each with a copy of ``model``. Collective."""
    return {
        name: IslandLoop(way, copy.deepcopy(model), workload, ranks, least_seconds=ACCELERATOR)
        for name, way in WAYS.items()
    }


def rows_of(found: Mapping[str, Mapping[str, Any]], cell: Cell, effort: Effort) -> list[Row]:
    """Return a row for each loop: its time, and the bytes of an iteration."""
    iterations = effort.untimed + effort.block
    rows = []
    for row in summarize(found, cell.title, DDP):
        one = found[row["contender"]]
        ratio = paired_ratio(found[HSDP]["seconds"], one["seconds"])
        sent = one["wire_bytes_of_ranks"]
        rows.append(
            {
                **row,
                "times_as_fast_as_hsdp": ratio.median,
                "hsdp_low": ratio.low,
                "hsdp_high": ratio.high,
                **{f"{name}_bytes": one[name] / iterations for name in BYTES},
                "announced_bytes": None if None in sent else sum(sent),
            }
        )
    return rows


def show_bytes(rows: Sequence[Row]) -> None:
    """Print the bytes of the rows, and their times next to HSDP's."""
    heads = {
        "inside_payload_bytes": "inside",
        "inside_interfaces_bytes": "lo",
        "between_payload_bytes": "between",
        "between_interfaces_bytes": "eth0",
        "announced_bytes": "announced",
    }
    command.show(
        "Bytes of an iteration, all ranks together",
        [
            {
                "contender": row["contender"],
                "times as fast as HSDP": "{times_as_fast_as_hsdp:.2f} ({hsdp_low:.2f} to {hsdp_high:.2f})".format(
                    **row
                ),
                **{head: command.text_of(row, name, ",.0f", missing="") for name, head in heads.items()},
            }
            for row in rows
        ],
    )


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser(NAME, __doc__)
    options.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL", help="(all)")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    effort = QUICK if arguments.quick else FULL
    if ranks.by_torchrun:
        workload = Cell.of(arguments.cells[0]).workload
        make = partial(make_loops, workload=workload)
        measure(workload, make, ranks, effort, arguments.output, connection_bytes.meters(ranks))
        return
    rows: list[Row] = []
    judged = {}
    for name in arguments.cells:
        cell = Cell.of(name)
        job = ["--cells", name, *["--quick"] * arguments.quick]
        found = on_testbed(NAME, job, nodes=cell.cluster.nodes, link=cell.cluster.link, nproc_per_node=MEMBERS)
        of_cell = rows_of(found, cell, effort)
        judged[name] = verdicts({name: one["seconds"] for name, one in found.items()}, TARGETS)
        show(of_cell)
        show_bytes(of_cell)
        show_verdicts(judged[name])
        rows += of_cell
    described = {name: workload.name for name, workload in WORKLOADS.items()}
    extra = {"accelerator_s": ACCELERATOR, "block": effort.block, "workloads": described, "targets": judged}
    save(NAME, rows, extra=extra, folder=arguments.output)
    save_figure(NAME, rows, by="title", plot=plot, folder=arguments.output)


if __name__ == "__main__":
    command.run(main)
