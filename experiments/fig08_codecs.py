"""Savings of codecs on the wire, against the error of the sum, the CPU time, and the accuracy.

    python -m experiments.fig08_codecs        fig08_codecs.csv, .png

The error is computed here: the ring's sum of random values of 2 to 16 ranks, with the codec at every hop, is compared
with the exact sum, without error feedback, which gives most of the error back later. The error would say nothing about
topk and powersgd, whose sums leave values out rather than round. CPU time is what a rank spends on a ring of four ranks
for each value of the gradient, from bench_codecs.csv: encoding its own chunk, then hops, then decoding. Accuracies are
those of codec_accuracy.csv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from experiments import command, figures, style
from experiments.bench_codecs import CODECS as TIMED
from experiments.figures import PaperFigure
from experiments.results import RESULTS, Row, grouped, load
from experiments.simulated_sums import Ring
from pipesgd.codecs.options import DENSE_CODECS, codec_named
from pipesgd.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

NAME = "fig08_codecs"
SPEEDS, ACCURACIES = "bench_codecs.csv", "codec_accuracy.csv"
WORLD_SIZES, RING = (2, 4, 8, 16), 4
NUMEL, QUICK_NUMEL = 1 << 18, 1 << 12
BY_ERROR, BY_RANKS, BY_TIME, BY_ACCURACY = "error", "ranks", "time", "accuracy"
LINEAR_POINTS = 0.5
"""Points of accuracy up to which the axis is linear; beyond them it is logarithmic."""
HOLLOW: dict[str, Any] = {"fillstyle": "none"}
"""Style of hollow markers."""


def error_of_sum(codec: str, world_size: int, numel: int, seed: int = 0) -> float:
    """Return the root mean square error of a sum of independent standard normal values, relative to the sum's own."""
    generator = torch.Generator().manual_seed(seed)
    flats = [torch.randn(numel, generator=generator) for _ in range(world_size)]
    exact = torch.stack(flats).double().sum(0)
    Ring(codec_named(codec).make(), world_size).sum(flats, [None] * world_size, key=seed)
    return float((flats[-1].double() - exact).norm() / exact.norm())


def bits(codec: str, numel: int = NUMEL) -> float:
    """Return the bits of a value on the wire, scales included."""
    return 8 * codec_named(codec).make().wire_bytes(numel) / numel


def compute(results: Path = RESULTS, *, quick: bool = False) -> list[Row]:
    """Return a row for every point: panel, codec, variant, x and y in the panel's units, and the ends of y."""
    numel = QUICK_NUMEL if quick else NUMEL
    lossy = [name for name in DENSE_CODECS if name != "fp32"]
    errors = {(codec, p): error_of_sum(codec, p, numel) for codec in lossy for p in WORLD_SIZES}
    rows = [_row(BY_ERROR, codec, f"{p} ranks", bits(codec), error) for (codec, p), error in errors.items()]
    rows += [_row(BY_RANKS, codec, f"{p} ranks", p, error) for (codec, p), error in errors.items()]
    return rows + _times(results) + _accuracies(results)


def _times(results: Path) -> list[Row]:
    """Return rows of the nanoseconds per value around a ring, for values that come from the cache or from memory."""
    of = {(row["size"], row["contender"], row["operation"]): row for row in load(results / SPEEDS)}
    rows = []
    for name, options in TIMED.items():
        if options.stochastic != codec_named(options.codec).stochastic:
            continue  # the variant that is not the default
        for size in ("cache", "memory"):
            spent = 0.0
            for operation, share in (("encode", 1 / RING), ("hop", 1 - 1 / RING), ("decode", 1 - 1 / RING)):
                row = of[size, name, operation]
                spent += share * row["median_s"] / (row["nbytes"] / 4)
            rows.append(_row(BY_TIME, options.codec, f"in {size}", bits(options.codec), 1e9 * spent))
    return rows


def _accuracies(results: Path) -> list[Row]:
    return [
        _row(
            f"{BY_ACCURACY}, {row['model']}",
            row["codec"].split()[0],
            row["codec"],
            row["bits_per_value"],
            row["difference_to_fp32_points"],
            row["difference_lowest_points"],
            row["difference_highest_points"],
        )
        for row in load(results / ACCURACIES)
        if row["difference_to_fp32_points"] is not None
    ]


def _row(
    panel: str, codec: str, variant: str, x: float, y: float, low: float | None = None, high: float | None = None
) -> Row:
    shortened = {"x": float(f"{x:.6g}"), "y": float(f"{y:.6g}")}
    return {"panel": panel, "codec": codec, "variant": variant, **shortened, "low": low, "high": high}


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw one panel."""
    draw: dict[str, Callable[[list[Row], Axes], None]] = {
        BY_ERROR: _plot_errors,
        BY_RANKS: _plot_ranks,
        BY_TIME: _plot_times,
        BY_ACCURACY: _plot_accuracies,
    }
    draw[rows[0]["panel"].split(",")[0]](rows, axes)
    figures.legend_below(axes, ncols=11, handles=_codec_handles())
    return axes


def _codec_handles() -> list[Line2D]:
    """Return a legend handle with the colour of every codec, for any panel."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=colour, marker="o", label=name) for name, colour in style.CODECS.items()]


def _plot_errors(rows: list[Row], axes: Axes) -> None:
    for name, own in grouped(rows, "codec").items():
        colour = style.CODECS[name]
        axes.plot([row["x"] for row in own], [row["y"] for row in own], color=colour, marker="o", label=name)
    axes.set(
        title=f"error of the sum; a mark for each of {', '.join(map(str, WORLD_SIZES))} ranks",
        xlabel="bits on the wire for each value",
        ylabel="root mean square error, relative",
    )
    _logarithmic_bits(axes)
    axes.set_yscale("log")
    axes.margins(y=0.1)


def _plot_ranks(rows: list[Row], axes: Axes) -> None:
    for name, own in grouped(rows, "codec").items():
        axes.plot(
            [row["x"] for row in own], [row["y"] for row in own], color=style.CODECS[name], marker="o", label=name
        )
    axes.set(title="the same, over ranks", xlabel="ranks p", ylabel="root mean square error, relative", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _plot_times(rows: list[Row], axes: Axes) -> None:
    for name, own in grouped(rows, "codec").items():
        for row in own:
            filled = {} if row["variant"] == "in memory" else HOLLOW
            axes.plot([row["x"]], [row["y"]], color=style.CODECS[name], marker="o", linestyle="", label="_", **filled)
    for label, filled in (("values in memory", {}), ("values in the cache", HOLLOW)):
        axes.plot([], [], color=style.BLACK, marker="o", linestyle="", label=label, **filled)
    axes.set(
        title=f"CPU time around a ring of {RING}",
        xlabel="bits on the wire for each value",
        ylabel="time for each value (ns)",
    )
    _logarithmic_bits(axes)
    axes.set_ylim(bottom=0)
    axes.legend()


def _plot_accuracies(rows: list[Row], axes: Axes) -> None:
    for name, own in grouped(rows, "codec").items():
        for row in own:
            hollow = "nearest" in row["variant"] or "stochastic" in row["variant"]
            axes.errorbar(
                [row["x"]],
                [row["y"]],
                yerr=[[row["y"] - row["low"]], [row["high"] - row["y"]]],
                color=style.CODECS[name],
                marker="D" if hollow else "o",
                markerfacecolor="white" if hollow else style.CODECS[name],
                linestyle="",
                label="_",
            )
    axes.axhline(0, color=style.BLACK, linewidth=0.8, label="_")
    for label, marker, face in (("as by default", "o", style.BLACK), ("the other rounding", "D", "white")):
        axes.plot([], [], color=style.BLACK, marker=marker, markerfacecolor=face, linestyle="", label=label)
    axes.set_yscale("symlog", linthresh=LINEAR_POINTS)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_yticks([-10, -3, -1, -0.5, 0, 0.5])
    axes.set_ylim(-20, 1)
    axes.set(
        title=f"test accuracy, {rows[0]['panel'].split(', ')[1]}; lowest to highest seed",
        xlabel="bits on the wire for each value",
        ylabel="difference to fp32 (points)",
    )
    _logarithmic_bits(axes)
    axes.legend(loc="lower right")


def _logarithmic_bits(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


FIGURE = PaperFigure(
    name=NAME,
    title="Codecs",
    caption="What each codec sends for a value, against the error of the ring's sum for 2 to 16 ranks, the CPU time "
    "around a ring of four, and the difference in test accuracy to uncompressed training (MLP and convnet).",
    plot=plot,
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: figures.parse(NAME, __doc__, words, ranks.by_torchrun))
    FIGURE.publish(compute(quick=arguments.quick), arguments, console, figures.sources([SPEEDS, ACCURACIES]))


if __name__ == "__main__":
    command.run(main)
