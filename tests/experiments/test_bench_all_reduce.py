"""All-reduces over links: a real run of two ranks, the rows and their targets, the options; a testbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from _ranks import run_module, run_ranks
from rich.console import Console

from experiments import testbed
from experiments.bench_all_reduce import (
    ALGORITHMS,
    Contender,
    Effort,
    Timed,
    compute,
    make_contenders,
    parse,
    summarize,
    target_met,
)
from experiments.results import RESULTS, Row, load
from experiments.testbed.links import Link
from pipesgd.codecs.options import codec_named
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

TINY = Effort(sizes=(4000, 64_000), seconds_per_size=0.01, least_rounds=2, most_rounds=3)
HEADERS = 1514 / 1448
RATE = ["--rate", "200mbit"]


def _compute(ranks: Ranks) -> list[Row]:
    contenders = make_contenders(ranks, ALGORITHMS, ["fp32", "int8"])
    return compute(ranks, contenders, TINY.sizes, 1e9, TINY, Console())


def test_all_ranks_get_the_same_row_for_every_size_and_contender() -> None:
    first, second = run_ranks(2, _compute)
    assert first == second
    names = [(name, codec) for name in ALGORITHMS for codec in ("fp32", "int8") if (name, codec) != ("native", "int8")]
    assert [(row["nbytes"], row["algorithm"], row["codec"]) for row in first] == [
        (nbytes, *name) for nbytes in (4000, 64_000) for name in names
    ]
    wire = {(row["nbytes"], row["algorithm"], row["codec"]): row["wire_bytes_busiest"] for row in first}
    assert wire[64_000, "ring", "fp32"] == wire[64_000, "native", "fp32"] == 64_000
    assert wire[64_000, "recursive-doubling", "fp32"] == 64_000
    assert 16_000 < wire[64_000, "ring", "int8"] < 16_200
    assert all(2 <= row["rounds"] <= 3 and row["cpu_median_s"] > 0 for row in first)


def contender(algorithm: str = "ring", codec: str = "int8") -> Contender:
    nothing = cast(Any, None)
    return Contender(algorithm=algorithm, codec=codec_named(codec), all_reduce=nothing, connections=nothing)


def row(algorithm: str, codec: str, seconds: float) -> Row:
    times = {"native, fp32": np.full(5, 0.2), f"{algorithm}, {codec}": np.full(5, seconds)}
    return summarize(contender(algorithm, codec), 4, 200e6, 1_000_000, 1_500_000, times, np.full(5, 0.01))


def test_a_row_says_how_near_it_is_to_the_wire_and_to_native() -> None:
    got = row("ring", "int8", 0.1)
    assert got["wire_limit_s"] == pytest.approx(0.06 * HEADERS)
    assert got["efficiency"] == pytest.approx(0.6 * HEADERS)
    assert got["native_fp32_over_it_median"] == pytest.approx(2.0)
    assert (got["algbw"], got["busbw"]) == (1e7, 1.5e7)
    assert (got["cpu_median_s"], got["rounds"]) == (0.01, 5)
    alone = summarize(contender(), 4, 2e8, 4000, 6000, {"ring, int8": np.ones(5)}, np.ones(5))
    assert alone["native_fp32_over_it_median"] is None


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, False),
        ({"efficiency": 0.9}, True),
        ({"efficiency": 0.9, "p": 3}, None),
        ({"efficiency": 0.9, "rate": 1e9}, None),
        ({"efficiency": 0.9, "nbytes": 40_000_001}, None),
        ({"efficiency": 0.9, "nbytes": 999_999}, None),
        ({"efficiency": 0.9, "algorithm": "all-to-all"}, None),
        ({"codec": "fp32", "native_fp32_over_it_median": 0.97}, True),
        ({"codec": "fp32", "native_fp32_over_it_median": 0.96, "efficiency": 0.95}, False),
        ({"codec": "fp32", "native_fp32_over_it_median": None}, None),
    ],
)
def test_targets_are_for_the_ring_on_slow_links(changed: Row, met: bool | None) -> None:
    assert target_met(row("ring", "int8", 0.1) | changed) is met


def _timed(ranks: Ranks) -> tuple[bool, int, bool]:
    (one,) = make_contenders(ranks, ["ring"], ["int4"])
    values = torch.arange(4096.0)
    flat = torch.empty_like(values)
    timed = Timed(one, values, flat)
    timed()
    first = flat.clone()
    timed()
    # The residual of the first call is in the second one's sums.
    return torch.equal(first, flat), len(timed.cpu_seconds), torch.equal(values, torch.arange(4096.0))


def test_calls_are_on_the_same_values_with_error_feedback() -> None:
    assert run_ranks(2, _timed) == [(False, 2, True)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "fast"], "rate must be a number and a unit"),
        ([*RATE, "--algorithms", "hierarchical"], "--algorithms must be one of"),
        ([*RATE, "--codecs", "topk"], "--codecs must be one of"),
        ([*RATE, "--codecs", "int8", "int8"], "--codecs must name each once; got 'int8' twice"),
        ([*RATE, "--world-sizes", "4", "4"], "--world-sizes must name each once; got 4 twice"),
        ([*RATE, "--algorithms", "native", "--codecs", "int8"], "--codecs must have one that torch can add up"),
        ([*RATE, "--sizes", "1"], "--sizes: must be a whole number of at least 4"),
        ([*RATE, "--output", str(RESULTS)], "--output must name another folder"),
        ([], "--rate"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=message) as error:
        parse(["--quick", "--output", str(tmp_path), *words])
    assert "\n" not in str(error.value)


def test_a_quick_run_on_a_testbed(tmp_path: Path) -> None:
    try:
        testbed.Testbed(nodes=2, link=Link(rate=200e6)).close()
    except testbed.InvalidInputError as failure:
        pytest.skip(str(failure))
    words = ["--quick", *RATE, "--world-sizes", "2", "--sizes", "4000", "--output", str(tmp_path)]
    done = run_module("experiments.bench_all_reduce", *words)
    assert done.returncode == 0, done.stderr
    rows = load(tmp_path / "bench_all_reduce_200mbit.csv")
    assert [(row["algorithm"], row["codec"]) for row in rows] == [
        ("native", "fp32"),
        ("ring", "fp32"),
        ("ring", "int8"),
    ]
    assert all(row["rate"] == 200e6 and row["median_s"] > 0 for row in rows)
    endings = ("csv", "manifest.json")
    assert {path.name for path in tmp_path.iterdir()} == {f"bench_all_reduce_200mbit.{end}" for end in endings}
