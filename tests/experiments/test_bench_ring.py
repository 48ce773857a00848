"""The ring's benchmark: rows of a real run of two ranks, and the formulas of a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _ranks import run_ranks
from rich.console import Console

from experiments.bench_ring import FULL, Effort, check_sums, compute, input_values, summarize, verdict
from experiments.results import Row
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

TINY = Effort(sizes=(4 << 10, 64 << 10), seconds_per_size=0.01, least_rounds=2, most_rounds=4)


def _compute(ranks: Ranks) -> list[Row]:
    return compute(ranks, TINY, Console())


def test_all_ranks_get_the_same_row_for_every_size() -> None:
    first, second = run_ranks(2, _compute)
    assert first == second
    assert [(row["p"], row["nbytes"]) for row in first] == [(2, 4 << 10), (2, 64 << 10)]
    assert all(2 <= row["rounds"] <= 4 for row in first)


def test_the_number_of_rounds_follows_from_their_duration() -> None:
    assert FULL.rounds(round_seconds=1e-3) == 400
    assert FULL.rounds(round_seconds=0.1) == 150
    assert FULL.rounds(round_seconds=10.0) == 15


def test_a_row_follows_the_definitions_of_nccl_tests() -> None:
    row = summarize(4, 1 << 20, native=np.full(15, 0.01), ring=np.full(15, 0.02))
    assert row["ratio_median"] == row["ratio_low"] == row["ratio_high"] == 2.0
    assert row["native_algbw"] == (1 << 20) / 0.01
    assert row["ring_busbw"] == row["ring_algbw"] * 2 * 3 / 4
    assert row["rounds"] == 15


@pytest.mark.parametrize(
    ("nbytes", "ratio", "said"), [(4096, 2.0, ""), (1_000_000, 1.1, "met"), (1_000_000, 1.11, "MISSED")]
)
def test_the_target_holds_from_one_megabyte_on(nbytes: int, ratio: float, said: str) -> None:
    assert verdict({"nbytes": nbytes, "ratio_median": ratio}, target=1.1) == said


def test_sums_that_differ_end_the_run() -> None:
    def wrong(flat: torch.Tensor) -> None:
        flat[-1] += 1

    values = input_values(rank=0, nbytes=4096)
    assert (values.dtype, values.nbytes) == (torch.float32, 4096)
    with pytest.raises(RunError, match="must give the same sums"):
        check_sums({"native": lambda flat: None, "ring": wrong}, values)  # type: ignore[dict-item]
