"""The timing model: iteration time against width, ranks, bandwidth and latency; and the best choice in each region.

    python -m experiments.fig05_timing_model        fig05_timing_model.csv, .png

Nothing is measured. The job is AlexNet's gradient (61.1 million parameters) and 0.3 s of computation on 10 Gbit/s
Ethernet, unless an axis says otherwise. Lines are formulas, marks are iterations that were simulated one by one. If
experiments/results has a validate_timing_model.csv, one more panel plots predictions over the times measured later.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments import command, figures
from experiments.figures import PaperFigure
from experiments.results import RESULTS, Row, load
from experiments.style import BLACK, BLUE, GREY, ORANGE, SKY, VERMILLION, YELLOW, method_styles, method_title
from pipesgd.ranks import Ranks
from timing_model.cluster_profile import Profile
from timing_model.costs import costs_of, iteration_time
from timing_model.jitter import steady_state_period
from timing_model.job import Job
from timing_model.measured import LinkProfile
from timing_model.options import NOTHING, computation_of
from timing_model.params import LinkParams, Noise
from timing_model.presets import MODELS, NETWORKS, PAYLOAD_SHARE
from timing_model.simulate import simulate_iterations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig05_timing_model"
MODEL, COMPUTE, NETWORK = "alexnet", 0.3, "10GbE"
FEW, MANY = 4, 64
"""Numbers of ranks: the paper's, and one at which jitter shows."""
METHODS: dict[str, dict[str, Any]] = {
    "ps-sync": {"strategy": "ps-sync", "all_reduce": None},
    "ddp": {"strategy": "ddp", "all_reduce": "native"},
    "D-Sync": {"width": 1},
    "D-Sync, int8": {"width": 1, "codec": "int8", "buckets": "4"},
    "D-Sync, int4": {"width": 1, "codec": "int4", "buckets": "4"},
    "width 2": {"width": 2},
    "width 2, int8": {"width": 2, "codec": "int8"},
    "width 2, int4": {"width": 2, "codec": "int4"},
}
BUCKETED, BUCKETS = ("D-Sync, int8", "D-Sync, int4"), ("1", "4", "16")
"""Methods whose best number of buckets counts in the map, as in a plan, and these numbers."""
SPREADS = (0.0, 0.1, 0.3)
WIDTHS = range(1, 7)
SIMULATED_ITERATIONS, QUICK_ITERATIONS = 4000, 200
NEAR = 0.05
"""Fraction by which a simpler method may be slower than the fastest and still count as good as it."""
STARVED = 2.0
"""Longest iteration, in times of its computation, beyond which local steps are worth their trouble."""
BORDER_RANKS, BORDER_LATENCY = 8, 50e-6
SYNCHRONOUS, COMPRESS, PIPELINE, BOTH, LOCAL_STEPS = (
    "synchronous",
    "synchronous, codec",
    "width 2",
    "width 2, codec",
    "local steps",
)
REGIONS = {SYNCHRONOUS: ORANGE, COMPRESS: YELLOW, PIPELINE: SKY, BOTH: BLUE, LOCAL_STEPS: GREY}
"""Choices, from the simplest, and their colours."""
BY_WIDTH, BY_RANKS, BY_BANDWIDTH, BY_LATENCY, BORDER, MEASURED = (
    "width",
    "ranks",
    "bandwidth",
    "latency",
    "border",
    "measured",
)


def seconds(
    method: str,
    *,
    world_size: int,
    link: LinkParams = NETWORKS[NETWORK],
    compute: float = COMPUTE,
    buckets: str | None = None,
) -> float:
    """Return the seconds of an iteration of the job, by the formulas, with the method's ``buckets`` or others."""
    job = Job(
        cluster=Profile(calibrated=NOTHING, link=LinkProfile.exact(link)),
        compute=computation_of(MODEL, MODELS[MODEL], compute),
        world_size=world_size,
        **METHODS[method] | ({} if buckets is None else {"buckets": buckets}),
    )
    return iteration_time(job, costs_of(job))[0].total


def with_bandwidth(rate: float) -> LinkParams:
    """Return the network with links of ``rate`` bit/s."""
    return dataclasses.replace(NETWORKS[NETWORK], beta=8 / (rate * PAYLOAD_SHARE))


def region(compute: float, rate: float) -> str:
    """Return the simplest choice that is good enough for ``compute`` s of computation on links of ``rate`` bit/s."""
    link = dataclasses.replace(with_bandwidth(rate), alpha=BORDER_LATENCY)
    at = partial(seconds, world_size=BORDER_RANKS, link=link, compute=compute)
    times = {name: at(name) for name in METHODS}
    times |= {name: min(at(name, buckets=number) for number in BUCKETS) for name in BUCKETED}
    best = min(times.values())
    if best > STARVED * compute:
        return LOCAL_STEPS
    good = {name for name, time in times.items() if time <= best * (1 + NEAR)}
    if good & {"D-Sync", "ddp"}:
        return SYNCHRONOUS
    if good & {"D-Sync, int8", "D-Sync, int4"}:
        return COMPRESS
    return PIPELINE if "width 2" in good else BOTH


def compute(results: Path = RESULTS, *, quick: bool = False) -> list[Row]:
    """Return a row for every point: panel, series, kind (formula, simulated, predicted), x and y in SI units."""
    fewer = 4 if quick else 1
    rows = _by_width(QUICK_ITERATIONS if quick else SIMULATED_ITERATIONS)
    sweeps: list[tuple[str, Sequence[float], Callable[[str, float], float]]] = [
        (BY_RANKS, _whole(2, 10_000, 24 // fewer), lambda name, p: seconds(name, world_size=int(p))),
        (
            BY_BANDWIDTH,
            _spaced(1e8, 1e11, 36 // fewer),
            lambda name, rate: seconds(name, world_size=FEW, link=with_bandwidth(rate)),
        ),
        (BY_LATENCY, _spaced(1e-6, 1e-1, 30 // fewer), _at_latency),
    ]
    for panel, points, at in sweeps:
        rows += [_row(panel, name, "formula", x, at(name, x)) for name in METHODS for x in points]
    rows += [
        _row(BORDER, region(c, rate), "formula", c, rate)
        for c in _spaced(1e-2, 10.0, 30 // fewer)
        for rate in _spaced(1e7, 1e11, 32 // fewer)
    ]
    return rows + _measured(results)


def _by_width(iterations: int) -> list[Row]:
    """Return rows for a collective as long as the computation, where a pipeline gains most and is most in danger."""
    rows = []
    for cv in SPREADS:
        noise, series = Noise(cv=cv), f"{cv:.0%} jitter" if cv else "no jitter"
        for width in WIDTHS:
            formula = steady_state_period(COMPUTE, COMPUTE, width, MANY, noise)
            simulation = simulate_iterations(
                t_compute=COMPUTE, t_comm=COMPUTE, width=width, world_size=MANY, iterations=iterations, noise=noise
            )
            rows.append(_row(BY_WIDTH, series, "formula", width, formula))
            rows.append(_row(BY_WIDTH, series, "simulated", width, simulation.period))
    return rows


def _at_latency(name: str, latency: float) -> float:
    link = dataclasses.replace(NETWORKS[NETWORK], alpha=latency)
    return seconds(name, world_size=MANY, link=link)


def _measured(results: Path) -> list[Row]:
    """Return rows of predictions over measurements; none if there are no measurements."""
    path = results / "validate_timing_model.csv"
    if not path.exists():
        return []
    return [
        _row(MEASURED, row["kind"], "predicted", row["measured_s"], row["predicted_s"], row["low_s"], row["high_s"])
        for row in load(path)
        if row["counts"]
    ]


def _row(
    panel: str, series: str, kind: str, x: float, y: float, low: float | None = None, high: float | None = None
) -> Row:
    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.7g}")

    return {
        "panel": panel,
        "series": series,
        "kind": kind,
        "x": short(x),
        "y": short(y),
        "low": short(low),
        "high": short(high),
    }


def _spaced(first: float, last: float, number: int) -> list[float]:
    return [float(x) for x in np.geomspace(first, last, number + 1)]


def _whole(first: int, last: int, number: int) -> list[float]:
    return [float(x) for x in dict.fromkeys(round(x) for x in _spaced(first, last, number))]


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw one panel."""
    draw: dict[str, Callable[[list[Row], Axes], None]] = {
        BY_WIDTH: _plot_widths,
        BY_RANKS: partial(_plot_methods, title=_of_ranks, xlabel="ranks"),
        BY_BANDWIDTH: partial(_plot_methods, title=_of_bandwidth, xlabel="bandwidth of a link (bit/s)"),
        BY_LATENCY: partial(_plot_methods, title=_of_latency, xlabel="latency (s)"),
        BORDER: _plot_border,
        MEASURED: _plot_measured,
    }
    draw[rows[0]["panel"]](rows, axes)
    return axes


def _plot_widths(rows: list[Row], axes: Axes) -> None:
    for (series, colour), marker in zip(
        zip(dict.fromkeys(row["series"] for row in rows), (BLACK, BLUE, VERMILLION), strict=True), "os^", strict=True
    ):
        for kind in ("formula", "simulated"):
            own = [row for row in rows if (row["series"], row["kind"]) == (series, kind)]
            line: dict[str, Any] = {"label": series} if kind == "formula" else {"linestyle": "", "marker": marker}
            axes.plot([row["x"] for row in own], [row["y"] for row in own], color=colour, **line)
    axes.plot([], [], linestyle="", marker="o", color=BLACK, label="simulated, one by one")
    axes.axhline(COMPUTE, color=BLACK, linestyle=":", linewidth=1, label="computation alone")
    most = max(SPREADS)
    two, three = (_at(rows, f"{most:.0%} jitter", width) for width in (2, 3))
    title = f"{MANY} ranks, {most:.0%} jitter: width 3 saves another {1 - three / two:.0%}"
    axes.set(title=title, xlabel="width K", ylabel="time of an iteration (s)")
    axes.set_ylim(bottom=0)
    axes.legend()


def _at(rows: Sequence[Row], series: str, x: float) -> float:
    """Return the value of a series' formula at the point that is nearest to ``x`` on a logarithmic axis."""
    own = [row for row in rows if (row["series"], row["kind"]) == (series, "formula")]
    return float(min(own, key=lambda row: abs(math.log(row["x"] / x)))["y"])


def _of_ranks(rows: Sequence[Row]) -> str:
    few, many = (_at(rows, "ps-sync", ranks) for ranks in (FEW, MANY))
    return f"from {FEW} to {MANY} ranks, a server gets {many / few:.0f}x as slow"


def _of_bandwidth(rows: Sequence[Row]) -> str:
    ratio = _at(rows, "ddp", 1e9) / _at(rows, "width 2, int8", 1e9)
    return f"1 Gbit/s: width 2, int8 is {ratio:.1f}x as fast as DDP"


def _of_latency(rows: Sequence[Row]) -> str:
    ratio = _at(rows, "ddp", 1e-3) / _at(rows, "D-Sync", 1e-3)
    return f"{MANY} ranks, 1 ms of latency: DDP takes {ratio:.1f}x width 1"


def _plot_methods(rows: list[Row], axes: Axes, *, title: Callable[[Sequence[Row]], str], xlabel: str) -> None:
    names = list(dict.fromkeys(row["series"] for row in rows))
    for name, look in method_styles(names).items():
        own = [row for row in rows if row["series"] == name]
        line = look | {"marker": "", "linewidth": 2.4 if name == "ddp" else 1.4}
        axes.plot([row["x"] for row in own], [row["y"] for row in own], label=method_title(name), **line)
    axes.set(title=title(rows), xlabel=xlabel, ylabel="time of an iteration (s)", xscale="log", yscale="log")
    axes.legend()


def _plot_border(rows: list[Row], axes: Axes) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    x, y = (sorted({row[name] for row in rows}) for name in ("x", "y"))
    names = list(REGIONS)
    which = {(row["x"], row["y"]): names.index(row["series"]) for row in rows}
    numbers = np.array([[which[one, other] for one in x] for other in y])
    colours = ListedColormap(list(REGIONS.values()))
    axes.pcolormesh(x, y, numbers, cmap=colours, vmin=-0.5, vmax=len(names) - 0.5, alpha=0.75, rasterized=True)
    axes.grid(visible=False)
    present = [name for name in names if name in {row["series"] for row in rows}]
    axes.legend(
        handles=[Patch(color=REGIONS[name], alpha=0.75, label=name) for name in present],
        loc="lower left",
        frameon=True,
        framealpha=0.9,
    )
    axes.set(
        title=f"{BORDER_RANKS} ranks: simplest within {NEAR:.0%} of the fastest",
        xlabel="computation of an iteration (s)",
        ylabel="bandwidth of a link (bit/s)",
        xscale="log",
        yscale="log",
    )


def _plot_measured(rows: list[Row], axes: Axes) -> None:
    from experiments.validate_timing_model import plot as plot_validation

    plot_validation(
        [
            {
                "kind": row["series"],
                "counts": True,
                "measured_s": row["x"],
                "predicted_s": row["y"],
                "low_s": row["low"],
                "high_s": row["high"],
            }
            for row in rows
        ],
        axes,
    )
    axes.set_title(f"predicted, and measured later: half within {_median_error(rows):.1%}")


def _median_error(rows: Sequence[Row]) -> float:
    return float(np.median([abs(row["y"] / row["x"] - 1) for row in rows]))


def message(rows: list[Row]) -> str:
    """Return how good predictions were; before there is one, what the lines are."""
    own = [row for row in rows if row["panel"] == MEASURED]
    if not own:
        return "Time of an iteration by the formulas"
    return (
        f"Half of {len(own)} iteration times on emulated clusters were within {_median_error(own):.1%} of the "
        "predictions made before"
    )


FIGURE = PaperFigure(
    name=NAME,
    title="The timing model",
    caption="Iteration time of AlexNet with 0.3 s of computation by the formulas, against the width of the pipeline "
    "(with simulated iterations as marks) and the bandwidth of the links of 4 ranks; the simplest way to train AlexNet "
    "that is good enough, with the best of 1, 4 and 16 buckets, and local steps where all take more than twice the "
    "computation; and predictions over the times that were measured later.",
    message=message,
    plot=plot,
    height=3.1,
    abreast=2,
    has=lambda row: row["panel"] not in (BY_RANKS, BY_LATENCY),
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: figures.parse(NAME, __doc__, words, ranks.by_torchrun))
    rows = compute(quick=arguments.quick)
    made_from = [name for name in ("validate_timing_model.csv",) if (RESULTS / name).exists()]
    FIGURE.publish(rows, arguments, console, figures.sources(made_from))


if __name__ == "__main__":
    command.run(main)
