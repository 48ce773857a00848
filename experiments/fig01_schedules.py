"""Timelines of computation and communication: a parameter server, synchronous all-reduces, and the pipeline.

    python -m experiments.fig01_schedules        fig01_schedules.csv, .png

The measured panels are three real runs on a testbed of four nodes at 200 Mbit/s, from their traces, with all ranks on
one clock. The others, which the table alone has, are the same schedules simulated by the timing model, with the traced
computation and the transfers that the rate allows, the same for all ranks. A worker's exchange with the server,
gradient and weights, is traced as one span.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from experiments import command, figures
from experiments.figures import PaperFigure
from experiments.limits import Cluster, ring_limit, wire_seconds
from experiments.results import Row
from experiments.testbed import Link, Testbed
from experiments.testbed_jobs import trained
from experiments.traces import Traced, breakdown, read_trace
from experiments.workloads import WORKLOADS
from pipesgd.cli import parse as parse_training
from pipesgd.data import make_workload
from pipesgd.ranks import Ranks
from pipesgd.run.output import TRACE_FILE
from timing_model.params import ComputeTimes
from timing_model.plots import COLOURS, plot_timeline
from timing_model.trace import ALL_REDUCE, COMPUTATION, GRADIENT, UPDATE, WEIGHTS, Span, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig01_schedules"
CLUSTER, QUICK_CLUSTER = Cluster(nodes=4, link=Link(rate=200e6)), Cluster(nodes=2, link=Link(rate=200e6))
WORKLOAD, QUICK_WORKLOAD = "mlp", "digits"
SCHEDULES = {
    "parameter server": ("parameter-server", "--strategy ps-sync", GRADIENT),
    "synchronous (D-Sync)": ("synchronous", "--width 1", ALL_REDUCE),
    "pipelined (width 2)": ("pipelined", "--width 2", ALL_REDUCE),
}
"""Schedules, each with its name in the timing model, its arguments of pipesgd.train, and its communication's name."""
ITERATIONS, FIRST = 16, 6
"""Iterations of a run, and the first one shown, by which the pipeline is full and memory has been touched."""
SHOWN = 2.0
"""Length of the time axis, in iterations with the parameter server."""
DEADLINE = 900.0
SIMULATED, MEASURED = "simulated", "measured"


def compute(*, quick: bool = False) -> list[Row]:
    """Return a row for every span: panel, who, what, iteration, start and end in s, and the length of all panels.

    Makes a testbed and three runs.
    """
    cluster = QUICK_CLUSTER if quick else CLUSTER
    workload = WORKLOADS[QUICK_WORKLOAD if quick else WORKLOAD]
    traces: dict[str, list[Traced]] = {}
    with Testbed(nodes=cluster.nodes, link=cluster.link) as testbed:
        for name, (_, words, _) in SCHEDULES.items():
            line = f"{workload} --lr 0.01 --iterations {ITERATIONS} --trace {words}"
            with trained(testbed, line, deadline=DEADLINE) as folder:
                traces[name] = read_trace(folder / TRACE_FILE)
    _, model = make_workload(parse_training(workload.split()))
    nbytes = sum(4 * parameter.numel() for parameter in model.parameters())
    return tabulate(traces, cluster, nbytes)


def tabulate(traces: dict[str, list[Traced]], cluster: Cluster, nbytes: int) -> list[Row]:
    """Return the rows of the simulated schedules, then of the traced ones, from the start of iteration ``FIRST``."""
    parts = {name: breakdown(trace, range(FIRST, ITERATIONS - 1)) for name, trace in traces.items()}
    end = SHOWN * parts[next(iter(SCHEDULES))]["iteration"]
    rows = []
    for name, (strategy, _, _) in SCHEDULES.items():
        own = parts[name]
        times = ComputeTimes(update=own["update"], forward=own["forward"], backward=own["backward"])
        servers = strategy == "parameter-server"
        t_comm = wire_seconds(nbytes, cluster.link.rate) if servers else ring_limit(cluster, nbytes)
        last = FIRST + round(end / own["iteration"]) + 3
        spans = timeline(strategy, times, t_comm, world_size=cluster.nodes, iterations=last)
        rows += _window(f"{name}, {SIMULATED}", spans, end)
    for name, (_, _, exchange) in SCHEDULES.items():
        rows += _window(f"{name}, {MEASURED}", as_timeline(traces[name], exchange), end)
    return rows


def as_timeline(trace: Sequence[Traced], exchange: str) -> list[Span]:
    """Return the spans under the timing model's names; those of one name are one unless the rank waits between them."""
    names = {"forward": COMPUTATION, "backward": COMPUTATION, "communication": exchange}
    names |= dict.fromkeys(("pack", "update", "predict"), UPDATE)
    spans: list[Span] = []
    waited = False
    for one in sorted(trace, key=lambda one: (one.rank, one.what == "communication", one.start)):
        waited = waited or one.what == "wait"
        if one.what not in names:
            continue
        own = Span(f"rank {one.rank}", names[one.what], one.iteration, one.start, one.start + one.seconds)
        if spans and not waited and _belong_together(spans[-1], own):
            spans[-1] = dataclasses.replace(spans[-1], end=own.end)
        else:
            spans.append(own)
        waited = False
    return spans


def _belong_together(span: Span, following: Span) -> bool:
    return (span.who, span.what, span.iteration) == (following.who, following.what, following.iteration)


def _window(panel: str, spans: Iterable[Span], end: float) -> list[Row]:
    """Return rows of the spans that fall in the ``end`` seconds after rank 0 begins to compute iteration ``FIRST``."""
    spans = list(spans)
    zero = min(span.start for span in spans if (span.who, span.what, span.iteration) == ("rank 0", COMPUTATION, FIRST))
    return [
        {
            "panel": panel,
            "who": span.who,
            "what": span.what,
            "iteration": span.iteration,
            "start": round(max(span.start - zero, 0.0), 6),
            "end": round(min(span.end - zero, end), 6),
            "shown_s": round(end, 6),
        }
        for span in spans
        if span.start - zero < end and span.end - zero > 0
    ]


def begun(rows: Sequence[Row], panel: str) -> int:
    """Return the number of iterations whose computation rank 0 begins within the time axis."""
    chosen = (panel, "rank 0", COMPUTATION)
    return len({row["iteration"] for row in rows if (row["panel"], row["who"], row["what"]) == chosen})


def message(rows: list[Row]) -> str:
    """Return how many iterations each schedule begins in the time shown."""
    servers, synchronous, pipelined = (begun(rows, f"{name}, {MEASURED}") for name in SCHEDULES)
    return (
        f"In {rows[0]['shown_s']:.1f} s on emulated links, a rank begins {servers} iterations with a parameter server, "
        f"{synchronous} with synchronous all-reduces, and {pipelined} in a pipeline of width 2"
    )


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw one timeline."""
    from matplotlib.patches import Patch

    spans = [Span(*(row[name] for name in ("who", "what", "iteration", "start", "end"))) for row in rows]
    plot_timeline(spans, axes, title=rows[0]["panel"], end=rows[0]["shown_s"])
    own = axes.get_legend()
    assert own is not None
    own.remove()
    axes.grid(visible=False)
    labels = {COMPUTATION: COMPUTATION, UPDATE: UPDATE, ALL_REDUCE: "communication"}
    if any(row["what"] == WEIGHTS for row in rows):
        labels[WEIGHTS] = WEIGHTS
    handles = [Patch(color=COLOURS[what], label=label) for what, label in labels.items()]
    figures.legend_below(axes, ncols=len(handles), handles=handles)
    return axes


FIGURE = PaperFigure(
    name=NAME,
    title="Three schedules",
    caption="Timelines of a parameter server, synchronous all-reduces and a pipeline of width 2 on the same time axis, "
    "traced on four emulated nodes at 200 Mbit/s. Each rank has its computation above its communication; numbers are "
    "iterations. The pipeline's communication never stops.",
    message=message,
    plot=plot,
    height=2.1,
    has=lambda row: row["panel"].endswith(MEASURED),
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: figures.parse(NAME, __doc__, words, ranks.by_torchrun))
    rows = compute(quick=arguments.quick)
    FIGURE.publish(rows, arguments, console, {"cluster": CLUSTER.describe(), "workload": WORKLOADS[WORKLOAD]})


if __name__ == "__main__":
    command.run(main)
