"""Parts of an iteration for every strategy and codec, measured, next to what the timing model predicted.

    python -m experiments.fig02_breakdown                         fig02_breakdown.csv, .png
    python -m experiments.fig02_breakdown --workloads mlp convnet

Four nodes at 200 Mbit/s. For every workload pipesgd.calibrate measures the cluster and the model, all iterations are
predicted, and then each method trains and its trace is cut into parts. A trace cannot show what an iteration waits for;
the prediction says how much of the wait is the network, and how much codec and sums. alexnet and resnet18 train on
small images here, so only their times count.

Finished workloads are kept in fig02_breakdown.runs.json in the output folder: the same command measures the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from experiments import command, figures
from experiments.figures import PaperFigure
from experiments.kept_runs import KeptRuns
from experiments.results import Row, code_state
from experiments.style import BLACK, ORANGE, PURPLE, SKY, method_title, model_title
from experiments.testbed import Link, Testbed
from experiments.testbed.links import parse_rate
from experiments.testbed_jobs import trained
from experiments.traces import PARTS, breakdown, read_trace
from experiments.validation_runs import ALL_MEASURED, ask, calibrate
from experiments.workloads import WORKLOADS
from pipesgd.ranks import Ranks
from pipesgd.run.output import TRACE_FILE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

NAME = "fig02_breakdown"
CHOSEN = ("mlp", "convnet", "alexnet", "resnet18", "transformer")
NODES, QUICK_NODES, RATE = 4, 2, "200mbit"
LINK = Link(rate=parse_rate(RATE))
METHODS = {
    "ps-sync": "--strategy ps-sync",
    "ddp": "--strategy ddp",
    "D-Sync": "--width 1",
    "D-Sync, int8": "--width 1 --codec int8",
    "width 2": "--width 2",
    "width 2, int8": "--width 2 --codec int8",
    "width 2, int4": "--width 2 --codec int4",
}
ITERATIONS, QUICK_ITERATIONS, FIRST = 14, 8, 4
"""Iterations of a run, full and quick, and the first one that counts."""
CALIBRATION_SECONDS, QUICK_CALIBRATION_SECONDS = 60.0, 4.0
DEADLINE = 1800.0
MEASURED, PREDICTED = "measured", "predicted"
PREDICTED_PARTS = ("compute", "wire", "codec", "jitter")
COMPUTING, WAITING = "computing", "waiting for communication"
LOOKS = {COMPUTING: SKY, WAITING: ORANGE}
"""Colours of the bars' parts."""
SERVER, COMPARED = "ps-sync", ("ddp", "width 2, int8")
"""Method whose bar would be too long for the axis, and those that the message compares."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Mean seconds of the parts of an iteration of one workload, by method, as measured and as predicted."""

    commit: str | None
    measured: dict[str, dict[str, float]]
    predicted: dict[str, dict[str, float]]


def measure(workload: str, *, quick: bool) -> Measured:
    """Calibrate, predict, and only then measure."""
    nodes, iterations = QUICK_NODES if quick else NODES, QUICK_ITERATIONS if quick else ITERATIONS
    seconds = QUICK_CALIBRATION_SECONDS if quick else CALIBRATION_SECONDS
    with tempfile.TemporaryDirectory() as name, Testbed(nodes=nodes, link=LINK) as testbed:
        profile = calibrate(testbed, f"{WORKLOADS[workload]} {ALL_MEASURED} --seconds {seconds}", Path(name))
    [known] = profile.compute
    predicted = {method: ask(profile, known, nodes, own).iteration._asdict() for method, own in METHODS.items()}
    measured = {}
    with Testbed(nodes=nodes, link=LINK) as testbed:
        for method, own in METHODS.items():
            line = f"{WORKLOADS[workload]} {own} --iterations {iterations} --trace --timeout 600"
            with trained(testbed, line, deadline=DEADLINE) as folder:
                measured[method] = breakdown(read_trace(folder / TRACE_FILE), range(FIRST, iterations - 1))
    return Measured(commit=code_state(), measured=measured, predicted=predicted)


def tabulate(found: Mapping[str, Measured]) -> list[Row]:
    """Return the rows, in seconds; parts that one of the kinds does not have are None."""
    columns = dict.fromkeys((*PARTS, "other", "communication", *PREDICTED_PARTS, "iteration"))
    rows = []
    for workload, one in found.items():
        for method in one.measured:
            rows.append(_row(workload, method, MEASURED, columns | one.measured[method]))
            parts = dict(one.predicted[method])
            rows.append(_row(workload, method, PREDICTED, columns | {"iteration": parts.pop("total")} | parts))
    return rows


def _row(workload: str, method: str, kind: str, columns: Mapping[str, float | None]) -> Row:
    return {"panel": workload, "method": method, "kind": kind, **columns}


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw the bars of one workload, measured, each with a mark at the prediction; the server's time is written."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    measured, predicted = (
        {row["method"]: row for row in rows if row["kind"] == kind and row["method"] != SERVER}
        for kind in (MEASURED, PREDICTED)
    )
    for place, (name, row) in enumerate(measured.items()):
        axes.barh(place, row["iteration"] - row["waiting"], color=LOOKS[COMPUTING])
        axes.barh(
            place, row["waiting"], left=row["iteration"] - row["waiting"], color=PURPLE if name == "ddp" else ORANGE
        )
        axes.plot([predicted[name]["iteration"]], [place], "D", color=BLACK, markersize=4)
    axes.set_yticks(range(len(measured)), [method_title(name) for name in measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    title = model_title(rows[0]["panel"])
    servers = [row["iteration"] for row in rows if (row["method"], row["kind"]) == (SERVER, MEASURED)]
    title += f" (server: {servers[0]:.1f} s)" if servers else ""
    axes.set(title=title, xlabel="time of an iteration (s)")
    handles: list[Artist] = [Patch(color=colour, label=label) for label, colour in LOOKS.items()]
    handles += [
        Patch(color=PURPLE, label=f"{WAITING}, DDP"),
        Line2D([], [], color=BLACK, marker="D", markersize=4, linestyle="", label="predicted before the run"),
    ]
    figures.legend_below(axes, ncols=4, handles=handles)
    return axes


def message(rows: list[Row]) -> str:
    """Return which share of an iteration is waiting, with DDP and with the pipeline."""
    shares = []
    for method in COMPARED:
        own = [row for row in rows if (row["method"], row["kind"]) == (method, MEASURED)]
        waits = [row["waiting"] / row["iteration"] for row in own]
        shares.append(f"{min(waits):.0%} to {max(waits):.0%} of an iteration with {method_title(method)}")
    return f"On emulated links of 200 Mbit/s, ranks wait for {shares[0]}, and for {shares[1]}"


FIGURE = PaperFigure(
    name=NAME,
    title="What an iteration consists of",
    caption="Mean iterations of five models on four emulated nodes at 200 Mbit/s, whose computation shares two cores: "
    "computing, and waiting for communication. Diamonds are the timing model's predictions, made before the runs; for "
    "the convnet at width 2 with a codec they are a fifth too short. The time with a parameter server is in brackets.",
    message=message,
    plot=plot,
    height=2.2,
    abreast=3,
    share_y=True,
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser(NAME, __doc__)
    options.add_argument(
        "--workloads", nargs="+", default=list(CHOSEN), metavar="NAME", help=f"any of {', '.join(CHOSEN)}"
    )
    options.add_argument("--fresh", action="store_true", help="forget the finished workloads in the output folder")
    arguments = ranks.raise_together("options", lambda: figures.checked(NAME, options, words, ranks.by_torchrun))
    command.check_each_once(arguments, {"workloads": CHOSEN})
    kept = KeptRuns(arguments.output / f"{NAME}.runs.json", Measured, fresh=arguments.fresh)
    workloads = ["digits"] if arguments.quick else arguments.workloads
    measured = partial(measure, quick=arguments.quick)
    rows = tabulate(kept.complete({one: one for one in workloads}, measured, console, "breakdown"))
    made_with = sorted({str(one.commit) for one in kept.load().values()})
    nodes = QUICK_NODES if arguments.quick else NODES
    FIGURE.publish(rows, arguments, console, {"nodes": nodes, "rate": RATE, "made_with": made_with})


if __name__ == "__main__":
    command.run(main)
