"""Time of an iteration of a DDP program by each of pipesgd's doors, on emulated links, interleaved.

    python -m experiments.bench_doors        4 nodes at 200 Mbit/s: bench_doors.csv, bench_doors.png

The program starts itself by torchrun on every node of a testbed. A round has a block of iterations of each contender,
in rotated order; all train a copy of the same model on the same batches, which are already in memory. Pipelines are
empty when a block begins, and are emptied again within the timed region. The time of a block is that of the slowest
rank. The nodes share the cores of this machine, so computing takes longer here than on machines of their own.
"""

from __future__ import annotations

import copy
import json
import tempfile
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments import command, paired
from experiments.bench_pipelined import UNTIMED_ITERATIONS, Workload, make_blocks
from experiments.loops import Loop, Piped, Plain
from experiments.paired import interquartile_range, median, paired_ratio
from experiments.results import Row, save, save_figure
from experiments.testbed import Link, Testbed, rate_name
from experiments.testbed_jobs import run_job
from pipesgd.backend import BackendOptions
from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.data import load_dataset
from pipesgd.ddp import attach, compress
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NODES, RATE = 4, 200e6
WORKLOAD = Workload(name="mlp 2x1000, batch 128", model="mlp", hidden_sizes=(1000, 1000), batch_size=128)
BLOCK, ROUNDS = 8, 12
QUICK_BLOCK, QUICK_ROUNDS = 2, 1
JOB_SECONDS = 3000.0

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


def measure(ranks: Ranks, file: Path, console: Console, *, quick: bool) -> None:
    """Time all loops on these ranks; rank 0 writes the times of the rounds, in seconds per iteration, to ``file``."""
    data = ranks.raise_together("data", lambda: load_dataset("fashion-mnist", None, image_size=64))
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    loops = make_loops(WORKLOAD.build(data), ranks)
    block, rounds = (QUICK_BLOCK, QUICK_ROUNDS) if quick else (BLOCK, ROUNDS)
    blocks = make_blocks(loops, WORKLOAD.batches(data, ranks, UNTIMED_ITERATIONS + block))
    seconds = paired.interleave(blocks, rounds, warm_up=1)
    for loop in loops.values():
        loop.close()
    if ranks.rank == 0:
        file.write_text(json.dumps({name: list(times) for name, times in seconds.items()}), encoding="utf-8")


def summarize(seconds: dict[str, list[float]]) -> list[Row]:
    """Return a row for each contender; times are per iteration."""
    rows = []
    for name, times in seconds.items():
        ratio = paired_ratio(seconds[DDP], times)
        rows.append(
            {
                "contender": name,
                "median_s": median(times),
                "iqr_s": interquartile_range(times),
                "times_as_fast_as_ddp": ratio.median,
                "low": ratio.low,
                "high": ratio.high,
                "rounds": len(times),
            }
        )
    return rows


def verdicts(seconds: dict[str, list[float]]) -> dict[str, dict[str, float | str]]:
    """Return the ratio of every target with its 95 % interval, and whether the interval reaches the bound."""
    found: dict[str, dict[str, float | str]] = {}
    for (one, other), (side, bound) in TARGETS.items():
        ratio = paired_ratio(seconds[one], seconds[other])
        reached = ratio.low <= bound if side == "at most" else ratio.high >= bound
        found[f"{one} / {other}"] = {
            "median": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
            "target": f"{side} {bound}",
            "verdict": "met" if reached else "MISSED",
        }
    return found


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw a bar for every contender: the median, with a whisker as long as the interquartile range."""
    names = [row["contender"] for row in rows][::-1]
    times = [row["median_s"] * 1e3 for row in rows][::-1]
    bars = axes.barh(names, times, xerr=[row["iqr_s"] * 5e2 for row in rows][::-1], capsize=3)
    axes.bar_label(bars, fmt="%.0f", padding=6)
    axes.set(title=textwrap.fill(rows[0]["title"], 30), xlabel="time of an iteration, median (ms)")
    axes.margins(x=0.12)
    return axes


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser("bench_doors", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    if ranks.by_torchrun:
        measure(ranks, arguments.output / "times.json", console, quick=arguments.quick)
        return
    link = Link(rate=RATE)
    with tempfile.TemporaryDirectory() as name, Testbed(nodes=NODES, link=link) as testbed:
        job = ["-m", "experiments.bench_doors", "--output", name, *(["--quick"] if arguments.quick else [])]
        log = Path(name, "log")
        if failure := run_job(testbed, job, log, deadline=JOB_SECONDS):
            raise RunError(f"the timed program must succeed; got {failure}")
        seconds = json.loads(Path(name, "times.json").read_text(encoding="utf-8"))
    rows, found = summarize(seconds), verdicts(seconds)
    title = f"{WORKLOAD.name}, {NODES} nodes at {rate_name(link.rate)} (emulated)"
    rows = [{"title": title, **row} for row in rows]
    save("bench_doors", rows, extra={"targets": found, "block": BLOCK}, folder=arguments.output)
    save_figure("bench_doors", rows, by="title", plot=plot, folder=arguments.output)
    command.show(
        title,
        [
            {
                "contender": row["contender"],
                "ms": f"{row['median_s'] * 1e3:.1f}",
                "IQR ms": f"{row['iqr_s'] * 1e3:.1f}",
                "times as fast as DDP": f"{row['times_as_fast_as_ddp']:.2f} ({row['low']:.2f} to {row['high']:.2f})",
            }
            for row in rows
        ],
    )
    command.show(
        "Targets",
        [
            {
                "ratio": name,
                "found": f"{one['median']:.3f} ({one['low']:.3f} to {one['high']:.3f})",
                "target": str(one["target"]),
                "verdict": str(one["verdict"]),
            }
            for name, one in found.items()
        ],
    )


if __name__ == "__main__":
    command.run(main)
