"""Results of a calibration for people: a table, warnings, a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pipesgd.calibration import machines
from pipesgd.calibration.codec_speeds import CodecSpeed
from pipesgd.calibration.computation import MOST_SLOWDOWN, Computation
from pipesgd.calibration.fit_cluster import CollectiveFit
from pipesgd.errors import UserInputError
from timing_model.measured import PARAMETER_SERVER, Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
"""Colours of Okabe and Ito."""
POOR = 0.25
"""Residual above which the figures are not worth much."""


def show(
    console: Console,
    *,
    fits: Mapping[str, CollectiveFit],
    codecs: Mapping[str, CodecSpeed],
    computation: Computation,
) -> None:
    """Print the tables."""
    for name, one in fits.items():
        table = Table(title=titled(name), title_justify="left", show_header=False, box=None)
        for parameter, value in zip(one.names, one.fit.estimates(), strict=True):
            table.add_row(parameter, _parameter(parameter, value))
        table.add_row("held-out cells", held_out(one))
        console.print(table)
    if codecs:
        table = Table(title="codecs, ns a value", title_justify="left", box=None)
        for head in ("", "encode", "decode", "add", "hop"):
            table.add_column(head, justify="right" if head else "left")
        for name, speed in codecs.items():
            table.add_row(name, *(f"{1e9 * rate.value:.2f}" for rate in speed.memory.values()))
        console.print(table)
    table = Table(title="computation of an iteration", title_justify="left", show_header=False, box=None)
    for name, part in computation.parts.items():
        table.add_row(name.replace("_", " "), f"{_ms(part)}")
    table.add_row("spread", f"{computation.cv:.1%} between iterations (cv)")
    table.add_row("persistence of it", _number(computation.persistence))
    table.add_row("spread of the all-reduce", _number(computation.comm_cv))
    table.add_row("during a collective", slower(computation.compute_slowdown))
    table.add_row("during a compressed one", slower(computation.codec_compute_slowdown))
    for name, handover in computation.late_handovers.items():
        table.add_row(f"late handover, {name}", _ms(handover))
    console.print(table)


def slower(slowdown: Estimate) -> str:
    """Describe by how much the computation is slower; from a limit on, a fit cannot tell how much more it is."""
    if slowdown.value >= MOST_SLOWDOWN:
        return f"at least {MOST_SLOWDOWN:.0%} slower: computing and communicating share too few cores"
    return f"{slowdown.value:.1%} slower"


def titled(name: str) -> str:
    """Return the title of a fit."""
    return "parameter server" if name == PARAMETER_SERVER else f"{name} all-reduce"


def held_out(one: CollectiveFit) -> str:
    """Describe the formula's error in cells that it was not fitted to."""
    if len(one.errors) == 1:
        return f"{one.residual:.1%} off, which tells little: only one repeats ({one.smallest_bytes >> 10} KiB)"
    return f"{one.errors.mean():.1%} off on average, {one.residual:.1%} at p90, from {one.smallest_bytes >> 10} KiB on"


def warnings(computation: Computation, fits: Mapping[str, CollectiveFit], stolen: float) -> list[str]:
    """Return a line for every rank that is always slow, for a formula that does not describe this cluster, and for a
    hypervisor that gave cores to others (``machines.StolenTime``).
    """
    lines = [
        f"slow rank: rank {rank} computes {factor:.2f} times as long as the median rank"
        for rank, factor in computation.slow_ranks.items()
    ]
    lines += [
        f"poor fit: {titled(name)} on this cluster does not follow the model; held-out cells are {held_out(one)}"
        for name, one in fits.items()
        if one.residual > POOR
    ]
    if stolen > machines.DISTURBED:
        lines.append(
            f"busy host: its hypervisor gave {stolen:.1%} of a machine's cores to other guests during the calibration; "
            "calibrate again when the host is quieter"
        )
    return lines


def check_plot(path: Path | None) -> None:
    """Raise ``UserInputError`` unless the picture can be written at the end."""
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserInputError(
            "plot must be left out where matplotlib is not installed (pip install matplotlib)"
        ) from None
    if path.suffix.removeprefix(".").lower() not in FigureCanvasBase.get_supported_filetypes():
        raise UserInputError(f"plot must end in a format of matplotlib, such as .png; got {path}")
    if not path.parent.is_dir():
        raise UserInputError(f"plot must be a file in an existing folder; got {path}")


def save_plot(fits: Mapping[str, CollectiveFit], path: Path) -> None:
    """Save a plot of the residuals of every all-reduce."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(fits), 4), layout="constrained")
    panels = figure.subplots(1, len(fits), squeeze=False)[0]
    for axes, one in zip(panels, fits.values(), strict=True):
        plot_residuals(one, axes)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as failure:  # cannot be written, or no format of this name
        raise UserInputError(f"plot must be a file to write, e.g. residuals.png; got {path}: {failure}") from None


def plot_residuals(one: CollectiveFit, axes: Axes) -> Axes:
    """Plot fitted over measured, minus 1, against the size: each cell by a fit to the other half of the cells."""
    world_sizes = sorted({cell.world_size for cell in one.cells})
    for number, world_size in enumerate(world_sizes):
        chosen = [index for index, cell in enumerate(one.cells) if cell.world_size == world_size]
        axes.plot(
            [one.cells[index].nbytes for index in chosen],
            [100 * one.held_out[index] for index in chosen],
            color=COLOURS[number % len(COLOURS)],
            marker="o",
            label=f"{world_size} ranks",
        )
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="gradient (bytes)", ylabel="held-out residual (%)", title=one.all_reduce)
    axes.legend()
    return axes


def _parameter(name: str, value: Estimate) -> str:
    if name == "beta" and value.value > 0:
        low, middle, high = (
            f"{8e-6 / one:,.0f}" if one else "no limit" for one in (value.high, value.value, value.low)
        )
        return f"{1e9 * value.value:.4g} ns a byte: {middle} Mbit/s ({low} to {high})"
    unit, scale = ("ns a byte", 1e9) if name == "shared" else ("us", 1e6)
    return f"{scale * value.value:.3g} {unit} ({scale * value.low:.3g} to {scale * value.high:.3g})"


def _number(value: Estimate) -> str:
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"


def _ms(value: Estimate) -> str:
    return f"{1e3 * value.value:.3g} ms ({1e3 * value.low:.3g} to {1e3 * value.high:.3g})"
