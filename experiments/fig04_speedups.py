"""Final accuracy and speed-up of every workload and every method that was compared.

    python -m experiments.fig04_speedups        fig04_speedups.csv, .png

From the result files of experiments.compare, which ran all methods in the same minutes on four nodes: the iterations of
compare_*, and the lengths of the runs of accuracy_*. The interval of an iteration's speed-up over DDP is that of the
comparison (95 %, paired rounds). Over the parameter server it is, too, where a comparison has a paired ratio to that;
else the ends of the intervals of both to DDP are combined, which makes it wider. Lengths of runs have the slowest and
the fastest of their seeds, and none where there is one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from experiments import command, figures
from experiments.figures import PaperFigure
from experiments.results import RESULTS, Row, load
from experiments.style import BLACK, method_styles
from pipesgd.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig04_speedups"
COMPARISONS = tuple(
    f"compare_{workload}_4x{rate}" for workload in ("mlp", "convnet") for rate in ("100mbit", "200mbit", "1gbit")
)
RACES = tuple(
    f"accuracy_{workload}_4x{rate}"
    for rate in ("200mbit", "1gbit")
    for workload in ("mlp", "small-mlp", "small-convnet", "transformer")
)
"""Comparisons of times to accuracy; only those that were run count."""
SERVER, DDP = "ps-sync", "ddp"
TICKS = (0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 20)
LEFT_OUT = ("local",)
"""Contenders that are left out because they are not a way to train."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """A speed-up and the ends of its interval; None where unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None

    def columns(self, over: str) -> Row:
        return {f"over_{over}": self.value, f"over_{over}_low": self.low, f"over_{over}_high": self.high}


def compute(results: Path = RESULTS) -> list[Row]:
    """Return a row for every comparison and method."""
    rows = [row for name in COMPARISONS for row in _of_comparison(name, results)]
    return rows + [row for name in run_races(results) for row in _of_race(name, results)]


def run_races(results: Path = RESULTS) -> list[str]:
    """Return those of ``RACES`` that have results."""
    return [name for name in RACES if (results / f"{name}.json").exists()]


def races(results: Path = RESULTS) -> list[str]:
    """The panels that are lengths of runs."""
    return list(dict.fromkeys(row["panel"] for row in FIGURE.table(results) if row["accuracy"] is not None))


def _of_comparison(name: str, results: Path) -> list[Row]:
    rows = {row["contender"]: row for row in load(results / f"{name}.csv")}
    manifest = figures.manifest(name, results)
    paired = {one["width_2"]: one for one in manifest["against_servers"] if one["server"] == SERVER}
    server = rows[SERVER]
    found = []
    for contender, row in rows.items():
        if contender in LEFT_OUT or row["iteration_median_s"] is None:
            continue
        to_ddp, low, high = (row[f"ratio_to_ddp_{end}"] for end in ("median", "low", "high"))
        if contender in paired:
            ratio = paired[contender]
            over_server = Speedup(**{one: ratio[f"ratio_to_width_2_{end}"] for one, end in _ENDS.items()})
        else:
            over_server = Speedup(
                value=server["ratio_to_ddp_median"] / to_ddp,
                low=server["ratio_to_ddp_low"] / high,
                high=server["ratio_to_ddp_high"] / low,
            )
        if contender == SERVER:
            over_server = Speedup(value=1.0, low=1.0, high=1.0)
        found.append(
            {
                "panel": f"an iteration: {figures.title_of(manifest)}",
                "method": contender,
                "seconds": row["iteration_median_s"],
                **over_server.columns("server"),
                **Speedup(value=1 / to_ddp, low=1 / high, high=1 / low).columns("ddp"),
                "runs": row["rounds"],
                "accuracy": None,
                "accuracy_low": None,
                "accuracy_high": None,
            }
        )
    return found


_ENDS = {"value": "median", "low": "low", "high": "high"}


def _of_race(name: str, results: Path) -> list[Row]:
    rows = load(results / f"{name}.json")
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["final_seconds"] is not None:
            times.setdefault(row["contender"], {})[row["seed"]] = row["final_seconds"]
    manifest = figures.manifest(name, results)
    found = []
    for contender, own in times.items():
        accuracies = [row["final_accuracy"] for row in rows if row["contender"] == contender]
        found.append(
            {
                "panel": f"{manifest['iterations']} iterations: {figures.title_of(manifest)}",
                "method": contender,
                "seconds": fmean(own.values()),
                **_over(times.get(SERVER, {}), own).columns("server"),
                **_over(times.get(DDP, {}), own).columns("ddp"),
                "runs": len(own),
                "accuracy": fmean(accuracies),
                "accuracy_low": min(accuracies),
                "accuracy_high": max(accuracies),
            }
        )
    return found


def _over(baseline: dict[int, float], own: dict[int, float]) -> Speedup:
    """Return the speed-up over ``baseline``, comparing times of the same seeds."""
    ratios = [baseline[seed] / own[seed] for seed in sorted(baseline.keys() & own.keys())]
    if not ratios:
        return Speedup()
    ends = {"low": min(ratios), "high": max(ratios)} if len(ratios) > 1 else {}
    return Speedup(value=fmean(ratios), **ends)


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw the speed-ups of one comparison: a mark and interval for each baseline, and the final accuracy if known."""
    looks = method_styles([row["method"] for row in rows])
    for place, row in enumerate(rows):
        colour = looks[row["method"]]["color"]
        for over, marker, face, shift in (("server", "o", colour, -0.15), ("ddp", "D", "white", 0.15)):
            value, low, high = (row[f"over_{over}{end}"] for end in ("", "_low", "_high"))
            if value is None:
                continue
            ends = None if low is None else [[max(value - low, 0.0)], [max(high - value, 0.0)]]
            axes.errorbar(
                [value],
                [place + shift],
                xerr=ends,
                marker=marker,
                color=colour,
                markerfacecolor=face,
                capsize=2,
                linewidth=1,
                label="_",
            )
    texts = [
        row["method"] + ("" if row["accuracy"] is None else f"\n{100 * row['accuracy']:.2f} % accuracy") for row in rows
    ]
    axes.axvline(1, color=BLACK, linewidth=0.8, linestyle=":", label="_")
    for label, marker, face in (("over ps-sync", "o", BLACK), ("over ddp", "D", "white")):
        axes.plot([], [], marker=marker, color=BLACK, markerfacecolor=face, linestyle="", label=label)
    axes.set_yticks(range(len(rows)), texts)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    axes.set_xlim(*_limits(rows))
    axes.set(title=rows[0]["panel"], xlabel="times as fast")
    figures.legend_below(axes, ncols=2)
    return axes


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the limits of the axis, so that ticks beyond the data do not widen it."""
    ends = [row[f"over_{over}{end}"] for row in rows for over in ("server", "ddp") for end in ("", "_low", "_high")]
    known = [end for end in ends if end is not None]
    return 0.85 * min(known), 1.2 * max(known)


FIGURE = PaperFigure(
    name=NAME,
    title="Speed-ups and final accuracy",
    caption="How many times as fast as a synchronous parameter server (dots) and as DistributedDataParallel (diamonds) "
    "each method is on four emulated nodes: iterations, and runs of the same length with their final accuracy.",
    plot=plot,
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: figures.parse(NAME, __doc__, words, ranks.by_torchrun))
    names = [*(f"{name}.csv" for name in COMPARISONS), *(f"{name}.json" for name in run_races())]
    FIGURE.publish(compute(), arguments, console, figures.sources(names))


if __name__ == "__main__":
    command.run(main)
