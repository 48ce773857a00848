"""Layer-wise against sequential communication: when splitting the gradient helps, and when it only costs.

    python -m experiments.fig07_layerwise        fig07_layerwise.csv, .png

An MLP of eight layers trains on four nodes at 200 Mbit/s, without and with 5 ms of latency. The gradient is all-reduced
in more and more parts: during the backward pass by torch's DistributedDataParallel, whose buckets are ready one by one;
after it, at width 1; and during the next iteration, at width 2, where splitting can gain nothing, since the whole
gradient is there. Lines are the timing model's, with the computation measured alone in the same job, the links' rate
and latency, and the cost of a message that fig06_all_reduces found.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from experiments import command, fig06_all_reduces, figures
from experiments.figures import PaperFigure
from experiments.loops import Batch, Loop, Piped, Plain, sgd
from experiments.results import REPOSITORY, Row, load, save
from experiments.style import BLACK, METHODS
from experiments.testbed import Link, Testbed
from pipesgd.comm.all_reduce import AllReduce, Finish, no_op
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT
from timing_model.all_reduce import CollectiveTime, all_reduce_time
from timing_model.iteration import layerwise_iteration_time, pipelined_iteration_time
from timing_model.params import FLOAT_BYTES, ComputeTimes, LinkParams
from timing_model.presets import PAYLOAD_SHARE, SUMS
from timing_model.schedules import split

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig07_layerwise"
NODES, RATE, LATENCIES = 4, 200e6, (0.0, 5e-3)
QUICK_NODES, QUICK_LATENCIES = 2, (0.0,)
SIZES, BATCH, QUICK_BATCH = (784, *(7 * (400,)), 10), 512, 16
PARTS, QUICK_PARTS = (1, 2, 4, 8, 32), (1, 4)
LAYERWISE, SEQUENTIAL, PIPELINED = "layer-wise (ddp)", "after the backward pass (D-Sync)", "pipelined (width 2)"
COLOURS = {LAYERWISE: METHODS["ddp"], SEQUENTIAL: METHODS["D-Sync"], PIPELINED: METHODS["width 2"]}
TITLES = {
    LAYERWISE: "DDP (during backward)",
    SEQUENTIAL: "width 1 (after backward)",
    PIPELINED: "width 2 (pipelined)",
}
MARKERS = {LAYERWISE: "s", SEQUENTIAL: "^", PIPELINED: "o"}
PASSES, QUICK_PASSES = 4, 1
UNTIMED, ITERATIONS, QUICK_ITERATIONS = 3, 8, 2
"""Iterations of each configuration in each pass: untimed, timed, and timed in a quick run."""
COMPUTATION = "computation"


class InParts:
    """An all-reduce in ``parts`` parts, one after the other."""

    def __init__(self, all_reduce: AllReduce, parts: int):
        self._all_reduce = all_reduce
        self._parts = parts

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        assert residual is None
        for start, stop in split(flat.numel(), self._parts):
            self._all_reduce(flat[start:stop], None, key, finish)

    def wire_bytes(self, flat: Tensor) -> int:
        return sum(self._all_reduce.wire_bytes(flat[start:stop]) for start, stop in split(flat.numel(), self._parts))


class Cut(Piped):
    """A pipeline that sends its gradient in parts, all of them after the backward pass.

    The trainer has no option for this, since it never helps: its buckets leave during the backward pass.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, width: int, parts: int):
        super().__init__(model, ranks, width=width)
        pipeline: Any = self._pipeline
        reducer = pipeline.pipeline.flight.reducer
        reducer._all_reduce = InParts(reducer._all_reduce, parts)


class LayerWise(Plain):
    """DistributedDataParallel with about ``parts`` buckets; ``buckets`` is the actual number."""

    def __init__(self, model: nn.Module, *, parts: int):
        nbytes = sum(FLOAT_BYTES * parameter.numel() for parameter in model.parameters())
        ddp = DistributedDataParallel(model, bucket_cap_mb=nbytes / parts / (1 << 20))
        super().__init__(ddp)
        self.buckets = 0
        # torch wants annotations to be types, not their names, or to be absent.
        ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def iterate(self, images: Tensor, labels: Tensor) -> None:
        self.buckets = 0
        super().iterate(images, labels)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.buckets += 1
        group = dist.group.WORLD
        assert group is not None
        return default_hooks.allreduce_hook(group, bucket)


def make_model() -> nn.Module:
    """Return the network, the same on all ranks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(SIZES):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def time_all(ranks: Ranks, arguments: Namespace, console: Console) -> list[Row]:
    """Return the rows of one job, in seconds: each pass of every series and number of parts. All ranks call this."""
    quick = arguments.quick
    parts = QUICK_PARTS if quick else PARTS
    model, batch = make_model(), make_batch(QUICK_BATCH if quick else BATCH, ranks.rank)
    iterations, passes = (QUICK_ITERATIONS, QUICK_PASSES) if quick else (ITERATIONS, PASSES)
    makers: list[tuple[str, int, Callable[[nn.Module], Loop]]] = []
    for number in parts:
        makers += [
            (LAYERWISE, number, functools.partial(LayerWise, parts=number)),
            (SEQUENTIAL, number, functools.partial(Cut, ranks=ranks, width=1, parts=number)),
            (PIPELINED, number, functools.partial(Cut, ranks=ranks, width=2, parts=number)),
        ]
    rows: list[Row] = []
    with command.progress(console, NAME, passes, show=ranks.rank == 0) as advance:
        for turn in range(passes):
            times = computation(model, batch, iterations)
            means = np.mean(ranks.all_gather_object("computation", times), axis=0)
            rows.append({"series": COMPUTATION, "parts": 1, **_named(*means), "seconds": float(sum(means))})
            for series, number, maker in makers[:: 1 if turn % 2 == 0 else -1]:
                with process_group(ranks), contextlib.closing(maker(copy.deepcopy(model))) as loop:
                    seconds = mean_iteration(loop, batch, iterations)
                    number = loop.buckets if isinstance(loop, LayerWise) else number
                everybody = ranks.all_gather_object("seconds", seconds)
                rows.append({"series": series, "parts": number, **_named(), "seconds": float(np.median(everybody))})
            advance(1, f"pass {turn + 1}")
    return rows


@contextlib.contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    """Open torch's process group for one configuration: threads of idle groups would take time from later ones."""
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    yield
    ranks.leave()


def _named(forward: float | None = None, backward: float | None = None, update: float | None = None) -> Row:
    return {"forward": forward, "backward": backward, "update": update}


def make_batch(size: int, rank: int) -> Batch:
    """Return a random batch, since only time counts."""
    generator = torch.Generator().manual_seed(rank)
    labels = torch.randint(SIZES[-1], (size,), generator=generator)
    return torch.randn(size, 1, 28, 28, generator=generator), labels


def computation(model: nn.Module, batch: Batch, iterations: int) -> tuple[float, float, float]:
    """Return the mean seconds of forward, backward and update of this rank, alone."""
    own = copy.deepcopy(model)
    optimizer, spent = sgd(own), np.zeros(3)
    images, labels = batch
    for iteration in range(UNTIMED + iterations):
        optimizer.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        loss = cross_entropy(own(images), labels)
        predicted = time.perf_counter()
        loss.backward()
        done = time.perf_counter()
        optimizer.step()
        if iteration >= UNTIMED:
            spent += (predicted - begin, done - predicted, time.perf_counter() - done)
    forward, backward, update = spent / iterations
    return float(forward), float(backward), float(update)


def mean_iteration(loop: Loop, batch: Batch, iterations: int) -> float:
    """Return the mean seconds of an iteration in the steady state."""
    for _ in range(UNTIMED):
        loop.iterate(*batch)
    begin = time.perf_counter()
    for _ in range(iterations):
        loop.iterate(*batch)
    seconds = (time.perf_counter() - begin) / iterations
    loop.flush()
    return seconds


def compute(*, quick: bool = False) -> list[Row]:
    """Return a row for every panel, series, kind and number of parts. Makes a testbed and a job for each latency."""
    rows: list[Row] = []
    nodes, latencies = (QUICK_NODES, QUICK_LATENCIES) if quick else (NODES, LATENCIES)
    for latency in latencies:
        link = Link(rate=RATE, latency=latency)
        with Testbed(nodes=nodes, link=link) as testbed, tempfile.TemporaryDirectory() as folder:
            words = ["-m", f"experiments.{NAME}", "--output", folder, *(["--quick"] if quick else [])]
            if any(testbed.torchrun(words, cwd=REPOSITORY).wait()):
                raise RunError(f"the job with a latency of {latency} s has failed")
            rows += tabulate(load(Path(folder, "times.csv")), nodes, latency)
    return rows


def tabulate(times: Sequence[Row], nodes: int, latency: float) -> list[Row]:
    """Return the rows of one latency: medians, lowest and highest over passes, and the model's lines."""
    panel = f"{1e3 * latency:g} ms of latency" if latency else "no latency"
    rows = []
    for series in (LAYERWISE, SEQUENTIAL, PIPELINED):
        for parts in sorted({row["parts"] for row in times if row["series"] == series}):
            own = [row["seconds"] for row in times if (row["series"], row["parts"]) == (series, parts)]
            rows.append(_row(panel, series, "measured", parts, float(np.median(own)), min(own), max(own)))
    alone = [row for row in times if row["series"] == COMPUTATION]
    compute_times = ComputeTimes(
        **{name: float(np.median([row[name] for row in alone])) for name in ("forward", "backward", "update")}
    )
    link = LinkParams(
        alpha=latency, beta=8 / (RATE * PAYLOAD_SHARE), gamma=SUMS, sync=0.0, overhead=_cost_of_a_message()
    )
    most = max(row["parts"] for row in rows)
    for parts in sorted({*(2**power for power in range(most.bit_length())), most}):
        for series, seconds in model(compute_times, link, nodes, parts):
            if series != LAYERWISE or parts <= max(row["parts"] for row in rows if row["series"] == LAYERWISE):
                rows.append(_row(panel, series, "model", parts, seconds))
    return rows


def _cost_of_a_message() -> float:
    """Return the cost of a message that fig06_all_reduces found, in seconds."""
    return float(figures.manifest(fig06_all_reduces.NAME)["link"]["overhead"])


def model(times: ComputeTimes, link: LinkParams, nodes: int, parts: int) -> Iterable[tuple[str, float]]:
    """Yield the seconds of an iteration of each series, with ``parts`` equal parts."""
    numel = sum(parameter.numel() for parameter in make_model().parameters()) / parts
    native, ring = (all_reduce_time(name, link, numel, nodes) for name in ("native", "ring"))
    buckets = [((number + 1) / parts, native) for number in range(parts)]
    yield LAYERWISE, layerwise_iteration_time(times, buckets).total
    whole = CollectiveTime(*(parts * part for part in ring))
    yield SEQUENTIAL, pipelined_iteration_time(times, whole, 1).total
    yield PIPELINED, pipelined_iteration_time(times, whole, 2).total


def _row(
    panel: str, series: str, kind: str, parts: int, seconds: float, low: float | None = None, high: float | None = None
) -> Row:
    return {
        "panel": panel,
        "series": series,
        "kind": kind,
        "parts": parts,
        "seconds": seconds,
        "low": low,
        "high": high,
    }


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw one latency."""
    for series, colour in COLOURS.items():
        points, line = (
            [row for row in rows if (row["series"], row["kind"]) == (series, kind)] for kind in ("measured", "model")
        )
        axes.plot([row["parts"] for row in line], [row["seconds"] for row in line], color=colour, label=TITLES[series])
        axes.errorbar(
            [row["parts"] for row in points],
            [row["seconds"] for row in points],
            yerr=[
                [row["seconds"] - row["low"] for row in points],
                [row["high"] - row["seconds"] for row in points],
            ],
            color=colour,
            marker=MARKERS[series],
            linestyle="",
            fillstyle="none",
            capsize=2,
            label="_",
        )
    lines = {(row["series"], row["parts"]): row["seconds"] for row in rows if row["kind"] == "model"}
    errors = sorted(
        lines[row["series"], row["parts"]] / row["seconds"] - 1
        for row in rows
        if row["kind"] == "measured" and (row["series"], row["parts"]) in lines
    )
    axes.plot([], [], color=BLACK, marker="o", linestyle="", fillstyle="none", label="measured, lowest to highest")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1.08 * max(row["high"] or row["seconds"] for row in rows))
    axes.set(
        title=f"{rows[0]['panel']} (the model is {errors[0]:+.0%} to {errors[-1]:+.0%} off)",
        xlabel="parts of the gradient",
        ylabel="time of an iteration (s)",
    )
    figures.legend_below(axes, ncols=4)
    return axes


def message(rows: list[Row]) -> str:
    """Return what cutting a pipeline's gradient costs where latency is largest."""
    own = [
        row for row in rows if (row["series"], row["kind"], row["panel"]) == (PIPELINED, "measured", rows[-1]["panel"])
    ]
    whole, cut = (choose(own, key=lambda row: row["parts"]) for choose in (min, max))
    ratio = cut["seconds"] / whole["seconds"]
    return (
        f"A pipeline that sends its gradient in {cut['parts']} parts takes {ratio:.1f} times as long as one that sends "
        f"it whole (emulated links, {whole['panel']})"
    )


FIGURE = PaperFigure(
    name=NAME,
    title="Layer-wise against sequential communication",
    caption="Time of an iteration against the number of parts in which the gradient travels, on four emulated nodes at "
    "200 Mbit/s without and with latency: under the backward pass, after it, and in a pipeline. Marks are measured, "
    "lines are the timing model's.",
    message=message,
    plot=plot,
    height=3.1,
    abreast=2,
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command, or one rank of its job if torchrun started this process."""
    arguments = ranks.raise_together("options", lambda: command.parse(command.parser(NAME, __doc__), words))
    if ranks.by_torchrun:
        rows = time_all(ranks, arguments, console)
        if ranks.rank == 0:
            save("times", rows, folder=arguments.output)
        return
    known = {"nodes": NODES, "rate": RATE, "sizes": SIZES, "batch_size": BATCH}
    FIGURE.publish(compute(quick=arguments.quick), arguments, console, known)


if __name__ == "__main__":
    command.run(main)
