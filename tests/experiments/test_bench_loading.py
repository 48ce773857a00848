"""The benchmark of loading: a real run of two ranks gives a row for each contender."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks
from rich.console import Console

from experiments.bench_loading import Effort, contender_of, measure, write_images
from experiments.results import Row
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

TINY = Effort(files=4, batch_size=2, block=1, rounds=1, workers=(0,))  # forked ranks may have no worker processes


def _measure(ranks: Ranks, folder: Path) -> list[Row]:
    return measure(ranks, TINY, folder, Console(quiet=True))


def test_all_ranks_get_the_same_rows(tmp_path: Path) -> None:
    write_images(tmp_path, TINY.files)
    first, second = run_ranks(2, _measure, tmp_path)
    assert first == second
    assert [row["loaded"] for row in first] == [contender_of(0), "in memory"]
    assert first[0]["times_as_fast"] == 1.0
    assert all(0 < row["exposed_loading_median_s"] < row["median_s"] for row in first)
