"""Savings of codecs on the wire, against the error of the sum, the CPU time, and the accuracy.

    python -m experiments.fig08_codecs        fig08_codecs.csv, .png

The error is computed here: the ring's sum of random values of 2 to 16 ranks, with the codec at every hop, is compared
with the exact sum, without error feedback, which gives most of the error back later. The error would say nothing about
topk and powersgd, whose sums leave values out rather than round. CPU time is what a rank spends on a ring of four ranks
for each value of the gradient, from bench_codecs.csv: encoding its own chunk, then hops, then decoding. Accuracies are
those of codec_accuracy.csv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

NAME = "fig08_codecs"
SPEEDS, ACCURACIES = "bench_codecs.csv", "codec_accuracy.csv"
WORLD_SIZES, RING = (2, 4, 8, 16), 4
NUMEL, QUICK_NUMEL = 1 << 18, 1 << 12
BY_BITS, BY_ERROR, BY_RANKS, BY_TIME, BY_ACCURACY = "bits", "error", "ranks", "time", "accuracy"
LINEAR_POINTS = 0.5
"""Points of accuracy up to which the axis is linear; beyond them it is logarithmic."""
MANY_BITS, IN_MEMORY = 4, "in memory"
ABOVE = {"truncate16": 3, "int8": -3}
"""Points by which the names of lines that end close together are moved up."""
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
    accuracies = _accuracies(results)
    rows = [
        _row(BY_BITS, row["codec"], row["variant"], row["x"], row["x"])
        for row in accuracies
        if row["panel"] == accuracies[0]["panel"] and not _other_rounding(row)
    ]
    rows += [_row(BY_ERROR, codec, f"{p} ranks", bits(codec), error) for (codec, p), error in errors.items()]
    rows += [_row(BY_RANKS, codec, f"{p} ranks", p, error) for (codec, p), error in errors.items()]
    return rows + _times(results) + accuracies


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
    """Draw one panel, with a line for each codec, except for that of the errors over ranks."""
    draw: dict[str, Callable[[list[Row], Axes], None]] = {
        BY_BITS: _plot_bits,
        BY_ERROR: _plot_errors,
        BY_RANKS: _plot_ranks,
        BY_TIME: _plot_times,
        BY_ACCURACY: _plot_accuracies,
    }
    draw[rows[0]["panel"].split(",")[0]](rows, axes)
    if rows[0]["panel"] != BY_RANKS:
        axes.set_yticks(range(len(style.CODECS)), list(style.CODECS))
        axes.set_ylim(len(style.CODECS) - 0.5, -0.5)
    return axes


def _lines(rows: list[Row]) -> Iterable[tuple[int, str, list[Row]]]:
    """Yield the place, the colour and the rows of each codec."""
    for name, own in grouped(rows, "codec").items():
        yield list(style.CODECS).index(name), style.CODECS[name], own


def _plot_bits(rows: list[Row], axes: Axes) -> None:
    for place, colour, own in _lines(rows):
        axes.barh(place, own[0]["y"], color=colour)
        axes.annotate(f"{own[0]['y']:.2g}", (own[0]["y"], place), (3, 0), textcoords="offset points", va="center")
    axes.set(title="bits on the wire", xlabel="bits a value")
    axes.margins(x=0.3)


def _plot_errors(rows: list[Row], axes: Axes) -> None:
    for place, colour, own in _lines(rows):
        axes.plot([row["y"] for row in own], [place for _ in own], color=colour, marker="o")
    few, many = min(WORLD_SIZES), max(WORLD_SIZES)
    axes.set(title=f"error, {few} to {many} ranks", xlabel="relative RMS", xscale="log")
    axes.set_xticks([1e-3, 1e-1, 1e1])
    axes.margins(x=0.1)


def _plot_ranks(rows: list[Row], axes: Axes) -> None:
    for name, own in grouped(rows, "codec").items():
        axes.plot(
            [row["x"] for row in own], [row["y"] for row in own], color=style.CODECS[name], marker="o", label=name
        )
        end, above = (own[-1]["x"], own[-1]["y"]), ABOVE.get(name, 0)
        axes.annotate(name, end, (6, above), textcoords="offset points", va="center")
    axes.set(title="error of the sum", xlabel="ranks p", ylabel="root mean square error, relative", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(right=1.6 * max(WORLD_SIZES))


def _plot_times(rows: list[Row], axes: Axes) -> None:
    for place, colour, own in _lines(rows):
        for row in own:
            filled = {} if row["variant"] == IN_MEMORY else HOLLOW
            axes.plot([row["y"]], [place], color=colour, marker="o", linestyle="", label="_", **filled)
    for label, filled in ((IN_MEMORY, {}), ("in the cache", HOLLOW)):
        axes.plot([], [], color=style.BLACK, marker="o", linestyle="", label=label, **filled)
    axes.set(title=f"CPU time, ring of {RING}", xlabel="time a value (ns)")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")


def _plot_accuracies(rows: list[Row], axes: Axes) -> None:
    for place, colour, own in _lines(rows):
        for row in own:
            other = _other_rounding(row)
            axes.errorbar(
                [row["y"]],
                [place],
                xerr=[[row["y"] - row["low"]], [row["high"] - row["y"]]],
                color=colour,
                marker="D" if other else "o",
                markerfacecolor="white" if other else colour,
                linestyle="",
                label="_",
            )
    axes.axvline(0, color=style.BLACK, linewidth=0.8, label="_")
    for label, marker, face in (("default", "o", style.BLACK), ("other rounding", "D", "white")):
        axes.plot([], [], color=style.BLACK, marker=marker, markerfacecolor=face, linestyle="", label=label)
    axes.set_xscale("symlog", linthresh=LINEAR_POINTS)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xticks([-10, -1, 0, 0.5])
    axes.set_xlim(-20, 1)
    axes.set(
        title=f"accuracy, {style.model_title(_model(rows))}",
        xlabel=f"points to fp32\n(log below -{LINEAR_POINTS:g})",
    )


def _other_rounding(row: Row) -> bool:
    return "nearest" in row["variant"] or "stochastic" in row["variant"]


def _model(rows: Sequence[Row]) -> str:
    return str(rows[0]["panel"]).split(", ")[1]


def message(rows: list[Row]) -> str:
    """Return how far from uncompressed training codecs end, those of at least ``MANY_BITS`` and those of fewer."""
    ends = [row for row in rows if row["panel"].startswith(BY_ACCURACY) and not _other_rounding(row)]
    many = max(abs(row["y"]) for row in ends if row["x"] >= MANY_BITS)
    few = min(ends, key=lambda row: row["y"])
    return (
        f"Codecs of {MANY_BITS} and more bits end within {many:.1f} points of uncompressed training; "
        f"{few['codec']}, of {few['x']:.0f} bit, up to {-few['y']:.0f} points below it"
    )


FIGURE = PaperFigure(
    name=NAME,
    title="Codecs",
    caption="What each codec sends for a value, the error of the ring's sum (a mark for each of 2, 4, 8 and 16 ranks), "
    "the CPU time around a ring of four, and the difference in test accuracy to uncompressed training, with the lowest "
    "and the highest seed. Diamonds: stochastic rounding in place of nearest, or the reverse.",
    message=message,
    plot=plot,
    height=3.7,
    abreast=5,
    has=lambda row: row["panel"] != BY_RANKS,
    share_y=True,
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: figures.parse(NAME, __doc__, words, ranks.by_torchrun))
    FIGURE.publish(compute(quick=arguments.quick), arguments, console, figures.sources([SPEEDS, ACCURACIES]))


if __name__ == "__main__":
    command.run(main)
