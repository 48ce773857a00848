"""The README's picture: time of an iteration with DDP, with pipesgd, and without any network, at two link rates.

    python -m experiments.first_screen        first_screen.csv, .png, first_screen_narrow.png

Drawn from the table of experiments.systems: the MLP on emulated accelerators. A bar ends at the median iteration of the
median rank, which is the number next to it; how many times as fast as DDP that is comes from iterations of the same
rounds. The narrow picture is for phones.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from experiments import command, figures
from experiments.figures import PaperFigure
from experiments.results import RESULTS, Row, grouped
from experiments.style import BLUE, GREY, LOUD, ORANGE, PURPLE, SKY, TITLES
from experiments.systems.pictures import SPEEDUPS
from experiments.systems.workloads import ACCELERATOR
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "first_screen"
RATES = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
"""Rates of the table, as they are written for people."""
SLOW = RATES["200mbit"]
"""Rate at which one bar is set off: the README's number."""
NAME_LETTERS = 18
"""Letters of a name in one line."""
DDP, SYNCHRONOUS, SET_OFF, ALONE = "ddp", "d-sync", "pipesgd-int8", "local"
SHOWN = (DDP, "ddp-fp16", SYNCHRONOUS, "pipesgd", SET_OFF, "pipesgd-int4", ALONE)
WIDTH = 2
"""Iterations in flight of the systems named pipesgd."""
COLUMNS = ("iteration_s", "times_as_fast_as_ddp", "times_as_fast_as_ddp_low", "times_as_fast_as_ddp_high", "rounds")
"""Columns that are those of the table."""
COLOURS = {DDP: PURPLE, "ddp-fp16": PURPLE, SYNCHRONOUS: ORANGE, SET_OFF: BLUE, ALONE: GREY}
"""Colours of bars; those of other systems are ``SKY``."""


def compute(results: Path = RESULTS) -> list[Row]:
    """Return a row for every rate and system: seconds of an iteration, and how many times as fast as DDP that is."""
    table = grouped(SPEEDUPS.table(results), "workload", "rate", "computes", "system")
    rows = []
    for rate, title in RATES.items():
        for name in SHOWN:
            [row] = table["mlp", rate, ACCELERATOR, name]
            rows.append({"panel": f"links of {title}", "system": name, **{column: row[column] for column in COLUMNS}})
    return rows


def message(rows: list[Row]) -> str:
    """Return how many times as fast as DDP the system that is set off is, at each rate."""
    slow, fast = (row for row in rows if row["system"] == SET_OFF)
    return (
        f"{TITLES[SET_OFF]}, width {WIDTH}: {slow['times_as_fast_as_ddp']:.1f}x as fast as DDP on {slow['panel']}, "
        f"{fast['times_as_fast_as_ddp']:.1f}x on {fast['panel']}"
    )


def plot(rows: list[Row], axes: Axes, room: float = 0.5) -> Axes:
    """Draw the bars of one rate, each with its milliseconds and its speed-up over DDP at its end.

    ``room`` is that for the numbers, in lengths of the longest bar.
    """
    set_off = next(row for row in rows if row["system"] == SET_OFF) if SLOW in rows[0]["panel"] else None
    for place, row in enumerate(rows):
        name, milliseconds = row["system"], 1e3 * row["iteration_s"]
        axes.barh(place, milliseconds, color=COLOURS.get(name, SKY))
        faster = "" if name == DDP else f"   {row['times_as_fast_as_ddp']:.1f}x"
        axes.annotate(
            f"{milliseconds:.0f} ms{faster}",
            (milliseconds, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            **(LOUD if row == set_off else {}),
        )
    axes.set_yticks(range(len(rows)), [textwrap.fill(TITLES[row["system"]], NAME_LETTERS) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, (1 + room) * 1e3 * max(row["iteration_s"] for row in rows))
    axes.grid(visible=False, axis="y")
    axes.set(title=f"emulated {rows[0]['panel']}", xlabel="time of an iteration (ms)")
    return axes


FIGURE = PaperFigure(
    name=NAME,
    title="pipesgd and DDP",
    caption="Time of an iteration with DistributedDataParallel, with pipesgd at width 1 (no gradient is late) and 2 "
    "(all others), and with no network at all, on four emulated nodes. Bars end at the median; the number behind it "
    "is the speed-up over DDP. MLP 784-1000-1000-10; on each node an emulated accelerator takes 75 ms an iteration.",
    message=message,
    plot=plot,
    height=3.3,
    abreast=2,
    share_y=True,
)
NARROW = dataclasses.replace(
    FIGURE,
    name=f"{NAME}_narrow",
    table_name=NAME,
    plot=partial(plot, room=1.1),
    shown_px=figures.PHONE_PX,
    height=2.6,
    abreast=1,
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: figures.parse(NAME, __doc__, words, ranks.by_torchrun))
    rows = compute()
    FIGURE.publish(rows, arguments, console, figures.sources([SPEEDUPS.file]))
    say(console, f"wrote {NARROW.save(rows, arguments.output)}")


if __name__ == "__main__":
    command.run(main)
