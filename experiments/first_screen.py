"""The README's picture: time of an iteration with DDP, with pipesgd, and without any network, at two link rates.

    python -m experiments.first_screen        first_screen.csv, .png

Drawn from the table of experiments.systems: the MLP on emulated accelerators. A bar ends at the median iteration of the
median rank, which is the number next to it; how many times as fast as DDP that is comes from iterations of the same
rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from experiments import command, figures
from experiments.figures import PaperFigure
from experiments.results import RESULTS, Row, grouped
from experiments.style import BLUE, GREY, PURPLE, TITLES
from experiments.systems.pictures import SPEEDUPS
from experiments.systems.workloads import ACCELERATOR
from pipesgd.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "first_screen"
RATES = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
"""Rates of the table, as they are written for people."""
SHOWN = ("ddp", "ddp-fp16", "pipesgd", "pipesgd-int8", "pipesgd-int4", "local")
DDP = "ddp"
WIDTH = 2
"""Iterations in flight of the systems named pipesgd."""
COLUMNS = ("iteration_s", "times_as_fast_as_ddp", "times_as_fast_as_ddp_low", "times_as_fast_as_ddp_high", "rounds")
"""Columns that are those of the table."""
COLOURS = {"DDP": PURPLE, "pipesgd": BLUE, "no": GREY}
"""Colours by the first word of a bar's name."""


def compute(results: Path = RESULTS) -> list[Row]:
    """Return a row for every rate and system: seconds of an iteration, and how many times as fast as DDP that is."""
    table = grouped(SPEEDUPS.table(results), "workload", "rate", "computes", "system")
    rows = []
    for rate, title in RATES.items():
        for name in SHOWN:
            [row] = table["mlp", rate, ACCELERATOR, name]
            rows.append({"panel": f"links of {title}", "system": name, **{column: row[column] for column in COLUMNS}})
    return rows


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw the bars of one rate, each with its milliseconds and its speed-up over DDP at its end."""
    for place, row in enumerate(rows):
        name, milliseconds = TITLES[row["system"]], 1e3 * row["iteration_s"]
        axes.barh(place, milliseconds, color=COLOURS[name.replace(",", " ").split()[0]])
        faster = "" if row["system"] == DDP else f"   {row['times_as_fast_as_ddp']:.1f}x"
        axes.annotate(
            f"{milliseconds:.0f} ms{faster}",
            (milliseconds, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if name.startswith("pipesgd") else "normal",
        )
    axes.set_yticks(range(len(rows)), [TITLES[row["system"]] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.4 * 1e3 * max(row["iteration_s"] for row in rows))
    best = max(row["times_as_fast_as_ddp"] for row in rows if row["system"] not in (DDP, "local"))
    title = f"emulated {rows[0]['panel']}, width {WIDTH}: up to {best:.1f}x as fast as DDP"
    axes.set(title=title, xlabel="time of an iteration (ms)")
    return axes


FIGURE = PaperFigure(
    name=NAME,
    title="pipesgd and DDP",
    caption="Time of an iteration with DistributedDataParallel, with pipesgd at width 2, and with no network at all, "
    "on four emulated nodes at 200 Mbit/s and 1 Gbit/s. Bars end at the median; the number behind it is the speed-up "
    "over DDP. MLP 784-1000-1000-10; on each node an emulated accelerator takes 75 ms an iteration.",
    plot=plot,
    panel=(5.6, 2.2),
    abreast=1,
)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: figures.parse(NAME, __doc__, words, ranks.by_torchrun))
    FIGURE.publish(compute(), arguments, console, figures.sources([SPEEDUPS.file]))


if __name__ == "__main__":
    command.run(main)
