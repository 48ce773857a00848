"""Time of an iteration on a folder of JPEGs, by the number of loader workers of each rank, interleaved.

    torchrun --nproc-per-node 2 -m experiments.bench_loading      bench_loading.csv

Rank 0 writes synthetic JPEGs of 256x256 pixels into a temporary folder. A round has a block of iterations of each
contender, in rotated order: batches that are loaded by the rank itself, by worker processes, or are in memory already,
which is the limit. Iterations before each block, as many as batches are loaded ahead and two more, are not timed. A
pipeline is empty when a block begins, and is emptied again within the timed region. The time of a block is that of the
slowest rank, and so is the time in which it waited for batches. The files stay in the system's cache: what is measured
is decoding, not a disk. Each rank computes on an emulated accelerator (accelerators.py), which leaves the cores to the
loading, as a GPU does.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from rich.console import Console

from experiments import accelerators, command, paired
from experiments.loops import Batch, Piped
from experiments.paired import Seconds, interquartile_range, median, paired_ratio, slowest
from experiments.results import Row, save
from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.data import ShardedBatches, build_model, load_dataset
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

CLASSES, JPEG_SIDE, COARSE_SIDE = 2, 256, 32
"""Classes, side of a JPEG in pixels, and side of the random picture that it is enlarged from."""
IMAGE_SIZE = 32
ACCELERATOR = "60ms"
AHEAD = 2
"""Batches that each worker loads ahead, torch's default."""
IN_MEMORY = "in memory"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes and numbers of what is measured."""

    files: int
    """JPEGs of each class."""
    batch_size: int
    block: int
    """Iterations that are timed together."""
    rounds: int
    workers: tuple[int, ...] = (0, 1, 2)
    """Numbers of loader workers; the first one is what the others are compared with."""


FULL = Effort(files=400, batch_size=32, block=20, rounds=12)
QUICK = Effort(files=16, batch_size=4, block=2, rounds=2)


@dataclass(kw_only=True)
class TimedLoop:
    """A training loop with the batches that it takes; each call times a block."""

    loop: Piped
    batches: Iterator[Batch]
    untimed: int
    block: int
    waits: list[float] = field(default_factory=list)
    """Seconds per iteration of each block in which this rank waited for its batch."""

    def __call__(self) -> float:
        """Run a block, and return its seconds per iteration."""
        for batch in itertools.islice(self.batches, self.untimed):
            self.loop.iterate(*batch)
        self.loop.flush()
        dist.barrier()
        begin, waited = time.perf_counter(), 0.0
        for _ in range(self.block):
            asked = time.perf_counter()
            batch = next(self.batches)
            waited += time.perf_counter() - asked
            self.loop.iterate(*batch)
        self.loop.flush()
        self.waits.append(waited / self.block)
        return (time.perf_counter() - begin) / self.block


def write_images(folder: Path, files: int) -> None:
    """Write ``files`` JPEGs of each class for training, and one for testing."""
    generator = np.random.default_rng(0)
    for split, number in (("train", files), ("test", 1)):
        for one in range(CLASSES):
            (folder / split / str(one)).mkdir(parents=True)
            for index in range(number):
                coarse = generator.integers(256, size=(COARSE_SIDE, COARSE_SIDE, 3), dtype=np.uint8)
                picture = Image.fromarray(coarse).resize((JPEG_SIDE, JPEG_SIDE), Image.Resampling.BICUBIC)
                picture.save(folder / split / str(one) / f"{index}.jpg", quality=90)


def measure(ranks: Ranks, effort: Effort, folder: Path, console: Console) -> list[Row]:
    """Return a row for every contender, the same on all ranks."""
    data = load_dataset("images", folder, image_size=IMAGE_SIZE)
    torch.manual_seed(0)
    model = build_model("convnet", sample_shape=data.sample_shape, num_classes=data.num_classes)
    accelerator, _ = accelerators.parse(ACCELERATOR, synthetic=True)
    with contextlib.ExitStack() as stack:

        def timed(batches: Iterator[Batch], untimed: int) -> TimedLoop:
            emulated = accelerators.Emulated(copy.deepcopy(model), accelerator, rank=ranks.rank)
            loop = Piped(emulated, ranks, width=2)
            stack.callback(loop.close)
            return TimedLoop(loop=loop, batches=batches, untimed=untimed, block=effort.block)

        contenders = {}
        for workers in effort.workers:
            shards = ShardedBatches(
                data.train,
                batch_size=effort.batch_size,
                rank=ranks.rank,
                world_size=ranks.world_size,
                seed=0,
                loader_workers=workers,
            )
            batches = stack.enter_context(contextlib.closing(shards.from_iteration(0)))
            contenders[contender_of(workers)] = timed(batches, 2 + AHEAD * workers)
        with contextlib.closing(shards.from_iteration(0)) as few:
            kept = list(itertools.islice(few, min(effort.block, shards.iterations_per_epoch)))
        contenders[IN_MEMORY] = timed(itertools.cycle(kept), 2)
        with command.progress(console, "loading", effort.rounds + 1, show=ranks.rank == 0) as advance:
            seconds = paired.interleave(
                contenders, effort.rounds, warm_up=1, after_round=lambda: advance(1, "time of an iteration")
            )
        waits = {name: slowest(one.waits[1:]) for name, one in contenders.items()}
    return summarize(seconds, waits, baseline=contender_of(effort.workers[0]))


def contender_of(workers: int) -> str:
    """Return the name of the contender whose ranks have this many loader workers."""
    return "by the rank itself" if workers == 0 else f"by {workers} worker{'s' if workers > 1 else ''} a rank"


def summarize(seconds: dict[str, Seconds], waits: dict[str, Seconds], *, baseline: str) -> list[Row]:
    """Return a row for each contender; times are per iteration."""
    rows = []
    for name, times in seconds.items():
        ratio = paired_ratio(seconds[baseline], times)
        rows.append(
            {
                "loaded": name,
                "median_s": median(times),
                "iqr_s": interquartile_range(times),
                "exposed_loading_median_s": median(waits[name]),
                "times_as_fast": ratio.median,
                "low": ratio.low,
                "high": ratio.high,
                "rounds": len(times),
            }
        )
    return rows


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command on torchrun's ranks, which are on one machine."""
    options = command.parser("bench_loading", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    if ranks.local_world_size != ranks.world_size:
        raise UserInputError("ranks must be on one machine, which shares a temporary folder; got several machines")
    effort = QUICK if arguments.quick else FULL
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory()) if ranks.rank == 0 else ""
        folder = Path(ranks.all_gather_object("folder", name)[0])
        ranks.raise_together("images", lambda: write_images(folder, effort.files) if ranks.rank == 0 else None)
        ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
        rows = measure(ranks, effort, folder, console)
        number = f"{ranks.world_size} rank{'s' if ranks.world_size > 1 else ''} on {os.cpu_count()} cores"
        title = f"accelerators of {ACCELERATOR} (emulated), {effort.batch_size} JPEGs a rank, {number}"
        rows = [{"title": title, **row} for row in rows]
        if ranks.rank == 0:
            publish(rows, arguments.output)
        dist.barrier()


def publish(rows: list[Row], folder: Path) -> None:
    """Save the rows and print them."""
    save("bench_loading", rows, folder=folder)
    command.show(
        rows[0]["title"],
        [
            {
                "loaded": row["loaded"],
                "ms": f"{row['median_s'] * 1e3:.1f}",
                "IQR ms": f"{row['iqr_s'] * 1e3:.1f}",
                "exposed loading ms": f"{row['exposed_loading_median_s'] * 1e3:.1f}",
                "times as fast": f"{row['times_as_fast']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
            }
            for row in rows
        ],
    )


if __name__ == "__main__":
    command.run(main)
