"""The line on accuracy at the end of a run is that of the nearest measured training, and no more."""

from __future__ import annotations

import json

import pytest
from torch import nn

from experiments.accuracy import shipped
from experiments.results import RESULTS, load
from pipesgd.planning.accuracy import MEASURED, line, workload

WORDS = nn.Sequential(nn.Embedding(256, 4), nn.LayerNorm(4), nn.Linear(4, 4))
PAIRS = nn.Sequential(nn.Embedding(1024, 4), nn.RMSNorm(4), nn.Linear(4, 4))
PICTURES = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Linear(4, 4))
DENSE = nn.Linear(4, 4)
BAGS = nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 4))


def test_the_table_is_that_of_the_results() -> None:
    """A failure means that results changed: `python -m experiments.accuracy --finished` writes the table again."""
    rows = shipped(load(RESULTS / "accuracy.csv"))
    assert len(rows) > 40
    assert json.loads(MEASURED.read_text(encoding="utf-8")) == rows


def test_the_training_is_the_one_that_is_most_alike() -> None:
    adapted = nn.Sequential(nn.Embedding(256, 40).requires_grad_(False), nn.Linear(4, 4))
    found = [workload(model) for model in (WORDS, PAIRS, PICTURES, DENSE, BAGS, adapted)]
    assert found == ["transformer, bytes", "transformer, byte pairs", "convnet, batch norm", None, None, "LoRA"]


@pytest.mark.parametrize(("width", "codec"), [(1, "fp32"), (1, "bf16"), (1, "int8")])
def test_nothing_is_said_where_nothing_is_late_or_coarse(width: int, codec: str) -> None:
    assert line(WORDS, width=width, codec=codec, iterations=100) is None


@pytest.mark.parametrize(("model", "width", "codec"), [(DENSE, 2, "int8"), (WORDS, 3, "int8"), (WORDS, 2, "ternary")])
def test_a_training_that_was_not_measured_is_said_to_be_so(model: nn.Module, width: int, codec: str) -> None:
    said = line(model, width=width, codec=codec, iterations=100)
    assert said == (
        f"accuracy: no training like this one was measured with width {width}, {codec}: compare it with one at width 1 "
        "without a codec"
    )


@pytest.mark.parametrize(("iterations", "nearest"), [(1, 200), (300, 200), (400, 600), (600, 600)])
def test_the_length_is_the_nearest_that_is_finished(iterations: int, nearest: int) -> None:
    said = line(WORDS, width=2, codec="int4", iterations=iterations)
    [row] = [
        row
        for row in load(RESULTS / "accuracy.csv")
        if (row["workload"], row["iterations"], row["method"]) == ("transformer, bytes", nearest, "width 2, int4")
    ]
    assert said == (
        f"accuracy: width 2, int4 in the nearest training that was measured (transformer, bytes, {nearest} iterations, "
        f"{row['seeds']} seeds): loss {row['cost']:+.1f} % from synchronous training "
        f"({row['cost_low']:+.1f} to {row['cost_high']:+.1f})"
    )


def test_points_of_accuracy_that_were_lost_are_below_zero() -> None:
    """The table counts what is lost, for both units."""
    [row] = [
        row
        for row in load(RESULTS / "accuracy.csv")
        if (row["workload"], row["iterations"], row["method"]) == ("convnet, batch norm", 600, "compress low rank")
    ]
    assert row["cost"] > 0
    said = line(PICTURES, width=1, codec="powersgd", iterations=600)
    assert said is not None
    assert said.startswith("accuracy: compress factors of rank 4 in the nearest training that was measured (convnet")
    assert said.endswith(
        f"accuracy {-row['cost']:+.1f} points from synchronous training "
        f"({-row['cost_high']:+.1f} to {-row['cost_low']:+.1f})"
    )
