"""Training loops timed in turns on the nodes of a testbed: the shared parts of the benches that do so.

An experiment is one module that starts itself by torchrun on every node; its ranks call ``measure``. A round has a
block of iterations of each loop, in rotated order. Pipelines are empty when a block begins, and are emptied again
within the timed region, unless the block is steady. The time of a block is that of the slowest rank.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from experiments import command, paired
from experiments.bench_pipelined import UNTIMED_ITERATIONS, Workload, make_blocks
from experiments.cpu_time import CpuTime
from experiments.loops import Loop
from experiments.paired import Contender, interquartile_range, median, paired_ratio
from experiments.results import Panels, Row
from experiments.testbed import Link, Testbed
from experiments.testbed_jobs import run_job
from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MakeLoops: TypeAlias = Callable[[nn.Module, Ranks], Mapping[str, Loop]]
"""Function that returns every loop, by name, each with a copy of a model. All ranks call it together."""

JOB_SECONDS = 3000.0
TIMES_FILE, PROGRESS_FILE = "times.json", "progress"


@dataclass(frozen=True)
class Effort:
    """Iterations of a block, those before it, and rounds."""

    block: int
    rounds: int
    untimed: int = UNTIMED_ITERATIONS
    steady: bool = False
    """True if pipelines are full when a block begins and when it ends, False if they are empty."""


Meter: TypeAlias = Callable[[], Callable[[], float]]
"""Function that is called when a block begins, and returns one that is called when it ends and returns a figure. All
ranks call them together."""


class Metered:
    """A contender that keeps the figures of ``meters`` for each block, untimed iterations included, by their names."""

    def __init__(self, contender: Contender, meters: Mapping[str, Meter]):
        self._contender, self._meters = contender, meters
        self.figures: dict[str, list[float]] = {name: [] for name in meters}

    def __call__(self) -> float:
        ends = {name: begin() for name, begin in self._meters.items()}
        seconds = self._contender()
        for name, end in reversed(ends.items()):  # the last to begin sees nothing of what the others do at the end
            self.figures[name].append(end())
        return seconds


def cpu_share(ranks: Ranks) -> Meter:
    """Return a meter of the share of the cores' time that all ranks use."""

    def begin() -> Callable[[], float]:
        cpu = CpuTime()
        return lambda: cpu.used(ranks).share

    return begin


def measure(
    workload: Workload,
    make_loops: MakeLoops,
    ranks: Ranks,
    effort: Effort,
    folder: Path,
    meters: Mapping[str, Meter] | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Time all loops on these ranks; rank 0 writes what ``on_testbed`` returns. Collective.

    ``meters`` are further ones than that of the cores; the median of each is written by its name, and their figures of
    all rounds in "figures". ``known`` are further figures of each loop. After every round, rank 0 writes how much is
    left.
    """
    data = ranks.raise_together("data", workload.load)
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    loops = make_loops(workload.build(data), ranks)
    batches = workload.batches(data, ranks, effort.untimed + effort.block)
    made = make_blocks(loops, batches, untimed=effort.untimed, steady=effort.steady)
    all_meters = {"cpu_share": cpu_share(ranks), **(meters or {})}
    blocks = {name: Metered(block, all_meters) for name, block in made.items()}
    after_round = partial(_write_progress, folder, ranks, effort.rounds + 1, count(1), time.perf_counter())
    seconds = paired.interleave(blocks, effort.rounds, warm_up=1, after_round=after_round)
    sent = {name: ranks.all_gather_object("bytes sent", loop.wire_bytes) for name, loop in loops.items()}
    for loop in loops.values():
        loop.close()
    if ranks.rank == 0:
        found = {
            name: {
                "seconds": list(times),
                "wire_bytes": sent[name][0],
                "wire_bytes_of_ranks": sent[name],
                **{figure: median(values[1:]) for figure, values in blocks[name].figures.items()},
                "figures": {figure: values[1:] for figure, values in blocks[name].figures.items()},
                **(known or {}).get(name, {}),
            }
            for name, times in seconds.items()
        }
        (folder / TIMES_FILE).write_text(json.dumps(found), encoding="utf-8")


def _write_progress(folder: Path, ranks: Ranks, rounds: int, numbers: Iterator[int], begin: float) -> None:
    """Write, on rank 0, the rounds that are done and the time that is left, for ``_progress_shown``."""
    done = next(numbers)
    left = timedelta(seconds=round((time.perf_counter() - begin) / done * (rounds - done)))
    if ranks.rank == 0:
        (folder / PROGRESS_FILE).write_text(f"round {done} of {rounds}, {left} left", encoding="utf-8")


@contextlib.contextmanager
def _progress_shown(module: str, path: Path) -> Iterator[None]:
    """Print what the ranks write to ``path``, at most every ``command.LINE_SECONDS``."""
    ended = threading.Event()

    def watch() -> None:
        said = ""
        while not ended.wait(command.LINE_SECONDS):
            text = path.read_text(encoding="utf-8") if path.exists() else "starting"
            if text not in ("", said):
                print(f"{module}: {text}", file=sys.stderr, flush=True)
            said = text

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def on_testbed(
    module: str,
    words: Sequence[str],
    *,
    nodes: int,
    link: Link,
    nproc_per_node: int = 1,
    before: Callable[[Testbed, Path], None] = lambda testbed, folder: None,
) -> dict[str, dict[str, Any]]:
    """Run ``module`` with ``words`` and a folder as ``--output`` on every node, after ``before`` with that folder.

    Returns, for each loop, "seconds": those of an iteration in every round, "cpu_share": the median share of the cores'
    time that all ranks used, "wire_bytes": those that rank 0 sent in the last iteration, if the loop knows,
    "wire_bytes_of_ranks": those that each rank sent, and what else ``measure`` has written. Meanwhile, the time that is
    left is printed now and then.

    Raises:
        RunError: it failed.
    """
    with tempfile.TemporaryDirectory() as name, Testbed(nodes=nodes, link=link) as testbed:
        before(testbed, Path(name))
        job = ["-m", f"experiments.{module}", "--output", name, *words]
        log = Path(name, "log")
        with _progress_shown(module, Path(name, PROGRESS_FILE)):
            failure = run_job(testbed, job, log, deadline=JOB_SECONDS, nproc_per_node=nproc_per_node)
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


def verdicts(
    seconds: Mapping[str, Sequence[float]], targets: Mapping[tuple[str, str], tuple[str, float]]
) -> dict[str, dict[str, float | str]]:
    """Return the ratio of every target with its 95 % interval, and whether the interval reaches the bound.

    A target is the bound, "at most" or "at least" a number, of the ratio of the first loop's time to the second's.
    """
    found: dict[str, dict[str, float | str]] = {}
    for (one, other), (side, bound) in targets.items():
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
    """Draw a bar for every loop: the median, with a whisker as long as the interquartile range."""
    names = [row["contender"] for row in rows][::-1]
    times = [row["median_s"] * 1e3 for row in rows][::-1]
    bars = axes.barh(names, times, xerr=[row["iqr_s"] * 5e2 for row in rows][::-1], capsize=3)
    axes.bar_label(bars, fmt="%.0f", padding=6)
    axes.set(title=textwrap.fill(rows[0]["title"], 30), xlabel="time of an iteration, median (ms)")
    axes.margins(x=0.12)
    return axes


draw = Panels(by=("title",), plot=plot).save
"""Function that writes the figure, with a panel for every title."""


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


def show_verdicts(found: Mapping[str, Mapping[str, float | str]]) -> None:
    """Print what ``verdicts`` returned."""
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
