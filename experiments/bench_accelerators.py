"""Time of an iteration where every rank has an emulated accelerator, on emulated links, interleaved.

    python -m experiments.bench_accelerators     4 nodes at 200 Mbit/s: bench_accelerators.csv, bench_accelerators.png

The accelerators are synthetic (accelerators.py): a forward and backward pass is a wait that leaves the cores of this
machine to the network. loops_on_links.py says how the contenders are timed. "wire" is the time of the all-reduce's
bytes on the links, headers included: the least time of an iteration.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from experiments import accelerators, command
from experiments.bench_pipelined import Workload
from experiments.limits import Cluster, ring_limit
from experiments.loops import Loop, Piped, Plain
from experiments.loops_on_links import Effort, measure, on_testbed, plot, show, summarize
from experiments.results import save, save_figure
from experiments.testbed import Link
from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import CodecOptions
from pipesgd.data import build_model
from pipesgd.ranks import Ranks

CLUSTER = Cluster(nodes=4, link=Link(rate=200e6))
WORKLOAD = Workload(name="mlp 2x1000", model="mlp", hidden_sizes=(1000, 1000), batch_size=32)
ACCELERATOR = "75ms"
FULL, QUICK = Effort(block=16, rounds=8), Effort(block=2, rounds=1)

ALONE, DDP, DDP_FP16 = "no communication", "DDP", "DDP, fp16"
PIPELINES: dict[str, dict[str, Any]] = {
    **{
        f"width {width}, {codec}": {"width": width, "codec": codec}
        for width, codec in ((1, "fp32"), (2, "fp32"), (1, "int8"), (2, "int8"), (2, "int4"))
    },
    **{f"width 1, {codec}, buckets": {"width": 1, "codec": codec, "buckets": 2} for codec in ("fp32", "int8")},
}


def emulate(model: nn.Module, rank: int) -> accelerators.Emulated:
    """Return a copy of ``model`` on its accelerator."""
    accelerator, _ = accelerators.parse(ACCELERATOR, synthetic=True)
    return accelerators.Emulated(copy.deepcopy(model), accelerator, rank=rank)


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model`` on an accelerator. Collective."""
    with_hook = DistributedDataParallel(emulate(model, ranks.rank))
    with_hook.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return {
        ALONE: Plain(emulate(model, ranks.rank)),
        **{name: Piped(emulate(model, ranks.rank), ranks, **options) for name, options in PIPELINES.items()},
        DDP: Plain(DistributedDataParallel(emulate(model, ranks.rank))),
        DDP_FP16: Plain(with_hook),
    }


def wire_seconds() -> dict[str, float]:
    """Return the least time of each loop's all-reduce on the links, in seconds."""
    model = build_model(WORKLOAD.model, sample_shape=(1, 28, 28), num_classes=10, hidden_sizes=WORKLOAD.hidden_sizes)
    numel = sum(one.numel() for one in model.parameters())
    nbytes = {ALONE: 0, DDP: 4 * numel, DDP_FP16: 2 * numel}
    for name, options in PIPELINES.items():
        nbytes[name] = make_codec(CodecOptions(codec=options["codec"])).wire_bytes(numel)
    return {name: ring_limit(CLUSTER, one) for name, one in nbytes.items()}


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser("bench_accelerators", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    effort = QUICK if arguments.quick else FULL
    if ranks.by_torchrun:
        measure(WORKLOAD, make_loops, ranks, effort, arguments.output)
        return
    found = on_testbed("bench_accelerators", ["--quick"] * arguments.quick, nodes=CLUSTER.nodes, link=CLUSTER.link)
    title = f"{WORKLOAD.name} on accelerators of {ACCELERATOR}, {CLUSTER.describe()} (all emulated)"
    wire = wire_seconds()
    rows = [{**row, "wire_s": wire[row["contender"]]} for row in summarize(found, title, DDP)]
    save("bench_accelerators", rows, extra={"accelerator": ACCELERATOR, "block": effort.block}, folder=arguments.output)
    save_figure("bench_accelerators", rows, by="title", plot=plot, folder=arguments.output)
    show(rows, wire_s="wire ms")


if __name__ == "__main__":
    command.run(main)
