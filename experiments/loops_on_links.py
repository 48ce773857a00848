"""Training loops timed in turns on the nodes of a testbed: the shared parts of the benches that do so.

An experiment is one module that starts itself by torchrun on every node; its ranks call ``measure``. A round has a
block of iterations of each loop, in rotated order. Pipelines are full at both ends of the timed iterations. The time of
a block is that of the slowest rank.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from experiments import command, paired
from experiments.cpu_time import CpuTime
from experiments.limits import Cluster, ring_limit
from experiments.loops import Batch, Loop
from experiments.paired import Contender, interquartile_range, median, paired_ratio
from experiments.results import Row
from experiments.testbed import Link, Testbed
from experiments.testbed_jobs import run_job
from pipesgd.codecs.options import codec_named
from pipesgd.data import DataSplits, ShardedBatches, build_model, load_dataset
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT

MakeLoops: TypeAlias = Callable[[nn.Module, Ranks], Mapping[str, Loop]]
"""Function that returns every loop, by name, each with a copy of a model. All ranks call it together."""

ALONE, DDP, DDP_FP16 = "no communication", "DDP", "DDP, fp16"
"""Names of the loops that benches compare theirs with."""
JOB_SECONDS = 3000.0
TIMES_FILE = "times.json"
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


@dataclass(frozen=True)
class Effort:
    """Iterations of a block, those before it, and rounds."""

    block: int
    rounds: int
    untimed: int = UNTIMED_ITERATIONS


class Metered:
    """A contender that keeps the share of the cores' time that all ranks use, for each block with its untimed part."""

    def __init__(self, contender: Contender, ranks: Ranks):
        self._contender, self._ranks = contender, ranks
        self.cpu_shares: list[float] = []

    def __call__(self) -> float:
        cpu = CpuTime()
        seconds = self._contender()
        self.cpu_shares.append(cpu.used(self._ranks).share)
        return seconds


def measure(workload: Workload, make_loops: MakeLoops, ranks: Ranks, effort: Effort, folder: Path) -> None:
    """Time all loops on these ranks; rank 0 writes what ``on_testbed`` returns. Collective."""
    data = ranks.raise_together("data", workload.load)
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    loops = make_loops(workload.build(data), ranks)
    batches = workload.batches(data, ranks, effort.untimed + effort.block)
    made = make_blocks(loops, batches, effort.untimed)
    blocks = {name: Metered(block, ranks) for name, block in made.items()}
    seconds = paired.interleave(blocks, effort.rounds, warm_up=1)
    for loop in loops.values():
        loop.close()
    if ranks.rank == 0:
        found = {
            name: {"seconds": list(times), "cpu_share": median(blocks[name].cpu_shares[1:])}
            for name, times in seconds.items()
        }
        (folder / TIMES_FILE).write_text(json.dumps(found), encoding="utf-8")


def make_blocks(loops: Mapping[str, Loop], batches: Sequence[Batch], untimed: int) -> dict[str, Contender]:
    """Return, for each loop, a function that times a block of its iterations and returns seconds per iteration.

    The first ``untimed`` batches are not timed: they make a pipeline as full as it is when the timed iterations end.
    """
    before, timed = batches[:untimed], batches[untimed:]

    def block(loop: Loop) -> float:
        for batch in before:
            loop.iterate(*batch)
        begin = time.perf_counter()
        for batch in timed:
            loop.iterate(*batch)
        seconds = (time.perf_counter() - begin) / len(timed)
        loop.flush()
        return seconds

    return {name: partial(block, loop) for name, loop in loops.items()}


def on_testbed(module: str, words: Sequence[str], *, nodes: int, link: Link) -> dict[str, dict[str, Any]]:
    """Run ``module`` with ``words`` and a folder as ``--output`` on every node.

    Returns, for each loop, "seconds": those of an iteration in every round, and "cpu_share": the median share of the
    cores' time that all ranks used.

    Raises:
        RunError: it failed.
    """
    with tempfile.TemporaryDirectory() as name, Testbed(nodes=nodes, link=link) as testbed:
        job = ["-m", f"experiments.{module}", "--output", name, *words]
        failure = run_job(testbed, job, Path(name, "log"), deadline=JOB_SECONDS)
        if failure:
            raise RunError(f"the timed program must succeed; got {failure}")
        found: dict[str, dict[str, Any]] = json.loads(Path(name, TIMES_FILE).read_text(encoding="utf-8"))
    return found


def summarize(found: Mapping[str, Mapping[str, Any]], title: str, baseline: str) -> list[Row]:
    """Return a row for each loop; times are per iteration, ratios are to ``baseline``, which is DDP."""
    rows = []
    for name, one in found.items():
        ratio = paired_ratio(found[baseline]["seconds"], one["seconds"])
        rows.append(
            {
                "title": title,
                "contender": name,
                "median_s": median(one["seconds"]),
                "iqr_s": interquartile_range(one["seconds"]),
                "times_as_fast_as_ddp": ratio.median,
                "low": ratio.low,
                "high": ratio.high,
                "cpu_share": one["cpu_share"],
                "rounds": len(one["seconds"]),
            }
        )
    return rows


def wire_seconds_of(cluster: Cluster, numel: int, pipelines: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the least time of an all-reduce of ``numel`` values by each of ``pipelines`` and by DDP, in seconds."""
    nbytes = {ALONE: 0, DDP: 4 * numel, DDP_FP16: 2 * numel}
    for name, options in pipelines.items():
        nbytes[name] = codec_named(options["codec"]).make().wire_bytes(numel)
    return {name: ring_limit(cluster, one) for name, one in nbytes.items()}


def show(rows: Sequence[Row], **columns: str) -> None:
    """Print the rows; ``columns`` are further ones in seconds, which need not be known, by name, and their heads."""
    command.show(
        rows[0]["title"],
        [
            {
                "contender": row["contender"],
                "ms": f"{row['median_s'] * 1e3:.1f}",
                "IQR ms": f"{row['iqr_s'] * 1e3:.1f}",
                **{head: "" if row[name] is None else f"{row[name] * 1e3:.1f}" for name, head in columns.items()},
                "times as fast as DDP": f"{row['times_as_fast_as_ddp']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
                "cores used": f"{row['cpu_share']:.0%}",
            }
            for row in rows
        ],
    )
