"""All-reduces over message size and number of ranks: the model's lines and the measured points.

    python -m experiments.fig06_all_reduces        fig06_all_reduces.csv, .png

The points are the uncompressed ones of experiments/results/bench_all_reduce_matrix.csv. The lines use two numbers: the
rate that the links were given, and the cost of a message, which is the median over p of the time that the ring's
smallest all-reduce took for each of its 2(p-1) steps. This cost is not the latency of a wire but the time that ranks
that share cores wait for their turn, so the formulas take it as a message's CPU time. Lines and points differ by what
the model does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from experiments import command, figures
from experiments.bench_all_reduce import readable
from experiments.figures import PaperFigure
from experiments.results import RESULTS, Row, load
from experiments.style import ALL_REDUCE_MARKERS, ALL_REDUCES, BLACK
from pipesgd.ranks import Ranks
from timing_model.all_reduce import all_reduce_time
from timing_model.params import FLOAT_BYTES, LinkParams
from timing_model.presets import PAYLOAD_SHARE, SUMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig06_all_reduces"
SOURCE = "bench_all_reduce_matrix.csv"
CODEC = "fp32"
SIZES_OVER_RANKS = (4_000, 1_000_000, 16_000_000)
"""Sizes of buffers, in bytes, among those that were measured."""
MOST_RANKS = 16
POINTS, QUICK_POINTS = 48, 8


def link_of(rows: Sequence[Row]) -> LinkParams:
    """Return the link of the lines: the given rate, and the cost of a message in the ring's smallest all-reduces."""
    smallest = min(row["nbytes"] for row in rows)
    rings = [row for row in rows if (row["algorithm"], row["nbytes"]) == ("ring", smallest)]
    overhead = float(np.median([row["median_s"] / (2 * (row["p"] - 1)) for row in rings]))
    beta = 8 / (rows[0]["rate"] * PAYLOAD_SHARE)
    return LinkParams(alpha=0.0, beta=beta, gamma=SUMS, sync=0.0, overhead=overhead)


def compute(results: Path = RESULTS, *, quick: bool = False) -> list[Row]:
    """Return a row for every point and every step of a line: panel, algorithm, kind, ranks, bytes, seconds."""
    measured = [row for row in load(results / SOURCE) if row["codec"] == CODEC]
    link, algorithms = link_of(measured), list(dict.fromkeys(row["algorithm"] for row in measured))
    world_sizes, sizes = (sorted({row[name] for row in measured}) for name in ("p", "nbytes"))

    def model(panel: str, algorithm: str, p: int, nbytes: float) -> Row:
        total = all_reduce_time(algorithm, link, nbytes / FLOAT_BYTES, p).total
        return _row(panel, algorithm, "model", p, nbytes, total)

    rows: list[Row] = []
    spaced = np.geomspace(sizes[0], sizes[-1], QUICK_POINTS if quick else POINTS)
    for p in world_sizes:
        panel = f"{p} ranks"
        rows += [_measured(panel, row) for row in measured if row["p"] == p]
        rows += [model(panel, name, p, float(f"{nbytes:.4g}")) for name in algorithms for nbytes in spaced]
    for nbytes in SIZES_OVER_RANKS:
        panel = readable(nbytes)
        rows += [_measured(panel, row) for row in measured if row["nbytes"] == nbytes]
        rows += [model(panel, name, p, nbytes) for name in algorithms for p in range(2, MOST_RANKS + 1)]
    return rows


def _measured(panel: str, row: Row) -> Row:
    return _row(panel, row["algorithm"], "measured", row["p"], row["nbytes"], row["median_s"])


def _row(panel: str, algorithm: str, kind: str, p: int, nbytes: float, seconds: float) -> Row:
    return {
        "panel": panel,
        "algorithm": algorithm,
        "kind": kind,
        "p": p,
        "nbytes": nbytes,
        "seconds": float(f"{seconds:.7g}"),
    }


def extremes(rows: Sequence[Row], p: int, nbytes: int) -> tuple[Row, Row]:
    """Return the measured rows of the fastest and of the slowest algorithm, for ``p`` ranks and ``nbytes``."""
    own = [row for row in rows if (row["kind"], row["p"], row["nbytes"]) == ("measured", p, nbytes)]
    own.sort(key=lambda row: row["seconds"])
    return own[0], own[-1]


def message(rows: list[Row]) -> str:
    """Return the largest differences between algorithms, for a small and for a large buffer."""
    parts = []
    for nbytes in (SIZES_OVER_RANKS[0], SIZES_OVER_RANKS[-1]):
        p = max(row["p"] for row in rows if (row["kind"], row["nbytes"]) == ("measured", nbytes))
        fastest, slowest = extremes(rows, p, nbytes)
        ratio = slowest["seconds"] / fastest["seconds"]
        names = f"{fastest['algorithm']} is {ratio:.1f} times as fast as {slowest['algorithm']}"
        parts.append(f"for {readable(nbytes)}, {names} ({p} ranks)")
    return f"On emulated links, {'; '.join(parts)}"


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw one panel: over bytes for one p, or over p for one size."""
    from matplotlib.ticker import LogLocator, NullFormatter

    over = "nbytes" if len({row["p"] for row in rows}) == 1 else "p"
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        points, line = (
            sorted((row for row in rows if (row["algorithm"], row["kind"]) == (name, kind)), key=lambda row: row[over])
            for kind in ("measured", "model")
        )
        colour, marker = ALL_REDUCES[name], ALL_REDUCE_MARKERS[name]
        axes.plot([row[over] for row in line], [row["seconds"] for row in line], color=colour, label=name)
        axes.plot(
            [row[over] for row in points],
            [row["seconds"] for row in points],
            color=colour,
            marker=marker,
            linestyle="",
            fillstyle="none",
            label="_",
        )
    axes.plot([], [], color=BLACK, marker="o", linestyle="", fillstyle="none", label="measured (median)")
    axes.set(title=rows[0]["panel"], xscale="log", yscale="log", ylabel="time of an all-reduce (s)")
    if over == "p":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("buffer (bytes)" if over == "nbytes" else "ranks p")
    figures.legend_below(axes, ncols=6)
    return axes


FIGURE = PaperFigure(
    name=NAME,
    title="All-reduce algorithms",
    caption="Time of an all-reduce over emulated links of 200 Mbit/s against the size of the buffer with 4 ranks, and "
    "against the number of ranks for 16 MB: measured points, and lines of the timing model. For 4 kB, where ranks wait "
    "for shared cores, points lie up to 1.3 times off the lines.",
    message=message,
    plot=plot,
    height=3.2,
    abreast=2,
    has=lambda row: row["panel"] in ("4 ranks", "16 MB"),
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: figures.parse(NAME, __doc__, words, ranks.by_torchrun))
    link = link_of([row for row in load(RESULTS / SOURCE) if row["codec"] == CODEC])
    known = {"link": {"overhead": link.overhead, "beta": link.beta, "gamma": link.gamma}}
    FIGURE.publish(compute(quick=arguments.quick), arguments, console, figures.sources([SOURCE]) | known)


if __name__ == "__main__":
    command.run(main)
