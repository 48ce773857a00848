"""The line on accuracy at the end of a run is that of the nearest measured training, and no more."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from torch import nn

from experiments.accuracy import shipped
from experiments.results import RESULTS, Row, load
from pipesgd.cli import parse
from pipesgd.codecs.options import CodecOptions, Int4, Int8, codec_named
from pipesgd.codecs.own import OwnCodecOptions
from pipesgd.planning.accuracy import MEASURED, line, line_of_run, workload

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
    head = nn.Sequential(nn.Conv2d(1, 9, 9).requires_grad_(False), nn.Linear(4, 4))
    found = [workload(model) for model in (WORDS, PAIRS, PICTURES, DENSE, BAGS, adapted, head)]
    assert found == ["transformer, bytes", "transformer, byte pairs", "convnet, batch norm", None, None, "LoRA", None]


@pytest.mark.parametrize(("width", "codec"), [(1, "fp32"), (1, "bf16"), (1, "int8")])
def test_nothing_is_said_where_nothing_is_late_or_coarse(width: int, codec: str) -> None:
    assert line(WORDS, width=width, codec=codec_named(codec), iterations=100) is None


def _not_measured(how: str) -> str:
    return (
        f"accuracy: no training like this one was measured with {how}: compare it with one at width 1 without a codec"
    )


@pytest.mark.parametrize(
    ("model", "width", "codec", "how"),
    [
        (DENSE, 2, Int8(), "int8 in blocks of 1024"),
        (WORDS, 3, Int8(), "int8 in blocks of 1024"),
        (WORDS, 2, codec_named("ternary"), codec_named("ternary").describe()),
        (WORDS, 1, Int4(block=64), "int4 in blocks of 64 with error feedback"),
        (WORDS, 1, codec_named("powersgd", low_rank=1), "powersgd of rank 1"),
        (WORDS, 1, codec_named("powersgd", factors="int8"), "powersgd of rank 4 in int8"),
        (WORDS, 1, codec_named("powersgd", dense_start=10), "powersgd of rank 4 after 10 whole gradients"),
        (WORDS, 1, codec_named("powersgd", dense_start=90), "powersgd of rank 4 after 90 whole gradients"),
        (WORDS, 1, OwnCodecOptions(name="own", made=SimpleNamespace(gives_back=False)), "own"),
    ],
)
def test_a_training_that_was_not_measured_is_said_to_be_so(
    model: nn.Module, width: int, codec: CodecOptions, how: str
) -> None:
    assert line(model, width=width, codec=codec, iterations=100) == _not_measured(f"width {width}, {how}")


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("--prediction none", "width 2, prediction none, int8 in blocks of 1024"),
        ("--synchronous-start 0", "width 2, synchronous start 0, int8 in blocks of 1024"),
        ("--guard --clip-norm 1", None),
    ],
)
def test_late_gradients_of_another_kind_were_not_measured(words: str, how: str | None) -> None:
    said = line_of_run(parse(f"--width 2 --codec int8 {words}".split()), WORDS, 200)
    assert said is not None
    assert said == _not_measured(how) if how else said.startswith("accuracy: width 2, int8 in the nearest training")


def _row(*wanted: object) -> Row:
    rows = load(RESULTS / "accuracy.csv")
    [row] = [row for row in rows if (row["workload"], row["iterations"], row["method"]) == wanted]
    return row


@pytest.mark.parametrize(
    ("codec", "method", "called"),
    [
        (Int4(rounding="nearest", error_feedback=True), "int4", "int4"),
        (Int4(block=32), "int4, blocks of 32", "int4, blocks of 32"),
        (Int4(block=128), "int4, blocks of 128", "int4, blocks of 128"),
        (Int4(rounding="stochastic"), "int4, stochastic", "int4, stochastic"),
        (codec_named("powersgd"), "low rank", "factors of rank 4"),
        (codec_named("powersgd", low_rank=16), "low rank, rank 16", "factors of rank 16"),
        (
            codec_named("powersgd", dense_start=50),
            "low rank, dense start of a quarter",
            "factors of rank 4, dense start of a quarter",
        ),
        (
            codec_named("powersgd", low_rank=16, dense_start=90),
            "low rank, rank 16, dense start of a quarter",
            "factors of rank 16, dense start of a quarter",
        ),
    ],
)
def test_ways_that_were_tried_are_found_by_their_options(codec: CodecOptions, method: str, called: str) -> None:
    cost = _row("transformer, bytes", 200, f"compress {method}")["cost"]
    said = line(WORDS, width=1, codec=codec, iterations=200)
    assert said is not None
    assert said.startswith(f"accuracy: compress {called} in the nearest training that was measured (transformer, bytes")
    assert f"loss {cost:+.1f} % from synchronous training" in said


@pytest.mark.parametrize(("iterations", "nearest"), [(1, 200), (300, 200), (400, 600), (600, 600)])
def test_the_length_is_the_nearest_that_is_finished(iterations: int, nearest: int) -> None:
    said = line(WORDS, width=2, codec=Int4(), iterations=iterations)
    row = _row("transformer, bytes", nearest, "width 2, int4")
    assert said == (
        f"accuracy: width 2, int4 in the nearest training that was measured (transformer, bytes, {nearest} iterations, "
        f"{row['seeds']} seeds): loss {row['cost']:+.1f} % from synchronous training "
        f"({row['cost_low']:+.1f} to {row['cost_high']:+.1f})"
    )


@pytest.mark.parametrize(("words", "unit"), [("--optimizer adagrad", "accuracy"), ("--optimizer adamw", "loss")])
def test_adagrad_counts_more_than_the_model(words: str, unit: str) -> None:
    said = line_of_run(parse(f"--width 2 --codec int8 {words}".split()), WORDS, 200)
    assert said is not None
    assert ("MLP, Adagrad" in said) == ("adagrad" in words)
    assert f"): {unit} " in said


def test_points_of_accuracy_that_were_lost_are_below_zero() -> None:
    """The table counts what is lost, for both units."""
    row = _row("convnet, batch norm", 600, "compress low rank")
    assert row["cost"] > 0
    said = line(PICTURES, width=1, codec=codec_named("powersgd"), iterations=600)
    assert said is not None
    assert said.startswith("accuracy: compress factors of rank 4 in the nearest training that was measured (convnet")
    assert said.endswith(
        f"accuracy {-row['cost']:+.1f} points from synchronous training "
        f"({-row['cost_high']:+.1f} to {-row['cost_low']:+.1f})"
    )
