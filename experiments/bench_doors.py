"""Time of an iteration of a DDP program by each of pipesgd's doors, on emulated links, interleaved.

    python -m experiments.bench_doors        4 nodes at 200 Mbit/s: bench_doors.csv

All contenders train a copy of the same model on the same batches, which are already in memory; loops_on_links.py says
how they are timed. The nodes share the cores of this machine, so computing takes longer here than on machines of their
own: bench_accelerators shows the other case.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments import command
from experiments.bench_pipelined import Workload
from experiments.loops import Loop, Piped, Plain
from experiments.loops_on_links import Effort, measure, on_testbed, show, show_verdicts, summarize, verdicts
from experiments.results import save
from experiments.testbed import Link, rate_name
from pipesgd.backend import BackendOptions
from pipesgd.ddp import attach, compress
from pipesgd.ranks import Ranks

NODES, RATE = 4, 200e6
WORKLOAD = Workload(name="mlp 2x1000, batch 128", model="mlp", hidden_sizes=(1000, 1000), batch_size=128)
FULL, QUICK = Effort(block=8, rounds=12), Effort(block=2, rounds=1)

DDP, PIPELINED, ATTACHED = "DDP", "Pipelined, width 2, int8", "DDP + attach, width 2, int8"
COMPRESSED, BACKEND = "DDP + compress, int8", "DDP on backend pipesgd, int8"
TARGETS = {(ATTACHED, PIPELINED): ("at most", 1.05), (DDP, BACKEND): ("at least", 2.5)}
"""Bounds of the ratio of the first contender's time to the second's."""


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model``. Collective."""

    def ddp(backend: str | None = None) -> DistributedDataParallel:
        group = dist.new_group(backend="pipesgd", pg_options=BackendOptions(codec=backend)) if backend else None
        return DistributedDataParallel(copy.deepcopy(model), process_group=group)

    return {
        DDP: Plain(ddp()),
        PIPELINED: Piped(copy.deepcopy(model), ranks, width=2, codec="int8"),
        ATTACHED: Plain(ddp(), partial(attach, width=2, codec="int8")),
        COMPRESSED: Plain(ddp(), lambda ddp_model, optimizer: compress(ddp_model, "int8")),
        BACKEND: Plain(ddp("int8")),
        "DDP on backend pipesgd, fp32": Plain(ddp("fp32")),
        "no communication": Plain(copy.deepcopy(model)),
    }


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser("bench_doors", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    effort = QUICK if arguments.quick else FULL
    if ranks.by_torchrun:
        measure(WORKLOAD, make_loops, ranks, effort, arguments.output)
        return
    link = Link(rate=RATE)
    found = on_testbed("bench_doors", ["--quick"] * arguments.quick, nodes=NODES, link=link)
    title = f"{WORKLOAD.name}, {NODES} nodes at {rate_name(link.rate)} (emulated)"
    rows = summarize(found, title, DDP)
    targets = verdicts({name: one["seconds"] for name, one in found.items()}, TARGETS)
    save("bench_doors", rows, extra={"targets": targets, "block": effort.block}, folder=arguments.output)
    show(rows)
    show_verdicts(targets)


if __name__ == "__main__":
    command.run(main)
