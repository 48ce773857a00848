"""The wait for batches: its share of a run, and when more loader workers are recommended."""

from __future__ import annotations

import pytest
import torch

from pipesgd.run import loading_time
from pipesgd.run.loading_time import ExposedLoading, LoadingTimes, hint, workers_that_hide


def test_a_worker_more_where_loading_takes_longer_than_the_iteration() -> None:
    assert [workers_that_hide(load, 2.0) for load in (0.0, 1.0, 2.0, 2.1, 4.0, 5.0)] == [1, 1, 1, 2, 2, 3]
    assert workers_that_hide(1.0, 0.0) is None


@pytest.mark.parametrize(
    ("cores", "workers", "hidden_by"),
    [
        (8, 0, 2),  # 6 s to load, 4 s of other work, and 3 free cores for each of two ranks
        (8, 1, 2),
        (8, 2, None),  # there are enough already
        (5, 0, None),  # one free core for each rank
    ],
)
def test_workers_are_recommended_only_if_there_are_cores_for_them(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, hidden_by: int | None
) -> None:
    monkeypatch.setattr(loading_time, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    times = LoadingTimes(workers=workers)
    times.add(100.0, 96.0, 6.0)  # in which the workers start
    times.add(9.0, 5.0, 5.0)
    times.add(11.0, 7.0, 7.0)
    assert times.summarize(2) == ExposedLoading(share=0.6, hidden_by=hidden_by)


def test_one_iteration_says_nothing() -> None:
    times = LoadingTimes(workers=0)
    times.add(2.0, 1.0, 1.0)
    assert times.summarize(1) is None


def test_the_hint_is_about_the_rank_that_waits_longest() -> None:
    slow = ExposedLoading(share=0.25, hidden_by=3)
    line = hint([None, ExposedLoading(share=0.1, hidden_by=1), slow], [0, 1, 2])
    assert line is not None
    assert line.startswith("hint: rank 2 spent 25% of its time waiting for batches; ")
    assert " --loader-workers 3 " in line
    assert str(hint([slow], [7])).startswith("hint: rank 7 spent ")
    assert hint([ExposedLoading(share=0.02, hidden_by=1)], [0]) is None
    assert hint([ExposedLoading(share=0.5, hidden_by=None)], [0]) is None
    assert hint([None], [0]) is None
