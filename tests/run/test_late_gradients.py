"""Late gradients of runs of the command: how many there are, and what a run says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _runs import SHORT, run, summary

from pipesgd.cli import parse
from pipesgd.optim.build import build_schedule
from pipesgd.pipeline.width import make_width
from pipesgd.strategies import MOST_TRIED, start_iterations


def _start(words: str, iterations: int) -> int:
    return start_iterations(parse(words.split()), iterations)


def _tried(iterations: int) -> int:
    """Return how many iterations a pipeline finds synchronous, one after the other."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    config = parse(["--schedule", "one-cycle", "--lr", "0.3"])
    schedule, width, found = build_schedule(config.optimization, optimizer, iterations), make_width(2), 0
    for iteration in range(iterations):
        found += width.of(iteration, optimizer.param_groups) == 1
        optimizer.step()
        if iteration + 1 < iterations:
            schedule.step()
    return found


@pytest.mark.parametrize("iterations", [2, 3, 10, 200, 1404])
def test_the_start_of_a_run_is_known_before(iterations: int) -> None:
    assert _start("--schedule one-cycle", iterations) == _tried(iterations)


def test_a_long_run_has_the_same_share() -> None:
    assert _start("--schedule one-cycle", 1000 * MOST_TRIED) == 1000 * _start("--schedule one-cycle", MOST_TRIED)
    assert _start("--lr-warmup 200", 2 * MOST_TRIED) == _start("--lr-warmup 200", 1000), "by its own length"
    assert 0.22 * MOST_TRIED < _start("--schedule one-cycle", MOST_TRIED) < 0.24 * MOST_TRIED


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", 0),
        ("--schedule cosine", 0),
        ("--schedule cosine --lr-warmup 10", 8),
        ("--schedule cosine --lr-warmup 1", 0),
        ("--width 1 --schedule one-cycle", 0),
        ("--strategy ddp --schedule one-cycle", 0),
        ("--schedule one-cycle --synchronous-start 0", 0),
        ("--synchronous-start 7", 7),
        ("--synchronous-start 70", 50),
        ("--local-steps 4 --schedule one-cycle", 0),
        ("--local-steps 4 --synchronous-start 7", 7),
    ],
)
def test_other_runs_have_none_or_the_number_that_was_given(words: str, expected: int) -> None:
    assert _start(words, 50) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "begins", "ends", "late"),
    [
        (
            "--schedule one-cycle",
            ", the first 2 of 12 iterations synchronous",
            "late gradients 10 of 12 iterations; the first 2 were synchronous",
            10,
        ),
        ("", "fp32", "late gradients 12 of 12 iterations", 12),
        ("--synchronous-start 12", "synchronous", "late gradients none: the run ended in its synchronous start", 0),
        ("--width 1", "fp32", "test loss", None),
        ("--local-steps 4", "fp32", "test loss", None),
    ],
)
def test_a_run_says_at_its_end_how_many_gradients_were_late(
    tmp_path: Path, words: str, begins: str, ends: str, late: Any
) -> None:
    results = run(2, f"{SHORT} {words}", tmp_path)
    assert [error for error, _, _ in results] == ["", ""]
    text = results[0][1]
    assert begins in " ".join(text.split())
    assert ends in " ".join(text.split())
    assert summary(tmp_path)["late_iterations"] == late
    assert ("late gradients" in text) == (late is not None)
