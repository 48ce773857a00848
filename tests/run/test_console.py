"""The screen of a run: the progress bar at every width of a terminal."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping

import pytest
from rich.console import Console

from pipesgd.run.console import ProgressBar
from pipesgd.run.metrics import IterationMetrics


def last_frame(width: int, losses: Mapping[int, float] = {}) -> str:
    """Return the bar on a terminal of ``width`` columns, some iterations into a run, without colours.

    ``losses`` are those of some iterations; the others have the same.
    """
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=24)
    with ProgressBar(console, total=12_000, start=0) as bar:
        for iteration in range(150):
            bar.record(
                IterationMetrics(
                    iteration=iteration,
                    epoch=0,
                    loss=losses.get(iteration, 2.254),
                    lr=0.1,
                    samples_per_second=8119.0,
                    seconds={"iteration": 3.0, "compute": 1.5, "communication": 4.0, "exposed": 0.84, "update": 0.5},
                    wire_bytes=100,
                    skipped=0,
                    test_accuracy=0.71,
                )
            )
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if "training" in line][-1]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_bar_count_and_time_left_are_there_and_nothing_is_cut(width: int) -> None:
    frame = last_frame(width)
    assert len(frame) <= width
    assert frame.startswith("training ")
    assert len(re.findall("[━╸╺]", frame)) >= 10
    assert " 150/12000 " in frame
    assert re.search(r" (\d+:\d\d:\d\d|-:--:--)( |$)", frame)
    assert "…" not in frame


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (60, "loss 2.254"),
        (80, "loss 2.254, accuracy 71.0%, 79% hidden"),
        (100, "loss 2.254, accuracy 71.0%, 79% hidden, 8,119 samples/s"),
    ],
)
def test_a_narrow_terminal_shows_the_more_important_figures(width: int, figures: str) -> None:
    assert last_frame(width).rstrip().endswith(f" {figures}")


def test_where_no_figure_fits_the_count_stays() -> None:
    assert "150/12000" in last_frame(30)


@pytest.mark.parametrize(("iteration", "shown"), [(0, "2.254"), (70, "2.254"), (149, "nan")])
def test_a_loss_that_is_not_finite_is_shown_until_the_next_one(iteration: int, shown: str) -> None:
    assert f"loss {shown}" in last_frame(60, {iteration: math.nan})
