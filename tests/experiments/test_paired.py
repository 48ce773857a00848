"""Turns and statistics of paired measurements, checked against cases worked out on paper."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from _ranks import run_ranks

from experiments.paired import (
    Ratio,
    interleave,
    interquartile_range,
    median,
    paired_ratio,
    ratio_columns,
    slowest,
    turns,
)
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow


def test_everybody_goes_first_equally_often() -> None:
    names = ["ddp", "ring", "native"]
    orders = [turns(names, index) for index in range(9)]
    assert Counter(order[0] for order in orders) == {"ddp": 3, "ring": 3, "native": 3}
    assert all(sorted(order) == sorted(names) for order in orders)


def test_median_and_spread() -> None:
    assert median([3.0, 1.0, 2.0, 100.0]) == 2.5
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0


def test_the_ratio_is_free_of_a_drift_that_both_share() -> None:
    drift = np.geomspace(1.0, 1000.0, 30)
    ratio = paired_ratio(1.5 * drift, drift)
    assert ratio.median == pytest.approx(1.5)
    assert (ratio.low, ratio.high) == pytest.approx((1.5, 1.5))


def test_only_times_of_one_round_are_compared() -> None:
    assert paired_ratio([10.0, 2.0, 3.0], [10.0, 1.0, 1.0]).median == 2.0  # of 1, 2, 3; the medians' ratio is 3


def test_the_interval_is_the_same_every_time_and_holds_the_median() -> None:
    noise = np.random.default_rng(1)
    baseline = noise.uniform(1.0, 2.0, 40)
    seconds = baseline * noise.uniform(1.0, 1.2, 40)
    ratio = paired_ratio(seconds, baseline)
    assert ratio == paired_ratio(seconds, baseline)
    assert 1.0 < ratio.low < ratio.median < ratio.high < 1.2


def test_the_interval_narrows_with_more_rounds() -> None:
    noise = np.random.default_rng(2)
    few, many = (paired_ratio(noise.uniform(1.0, 2.0, rounds), np.ones(rounds)) for rounds in (20, 2000))
    assert many.high - many.low < (few.high - few.low) / 3  # about a tenth, by the root of the number


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    noise = np.random.default_rng(3)
    ratios = [paired_ratio(noise.lognormal(0.0, 0.3, 25), np.ones(25)) for _ in range(200)]
    covered = sum(ratio.low <= 1.0 <= ratio.high for ratio in ratios)
    assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize("baseline", [[1.0], [], [[1.0, 2.0]]])
def test_times_of_other_rounds_are_refused(baseline: list[float]) -> None:
    with pytest.raises(ValueError, match="same rounds"):
        paired_ratio([1.0, 2.0], baseline)


def _interleaved(ranks: Ranks) -> tuple[dict[str, list[float]], list[str]]:
    called: list[str] = []

    def contender(name: str) -> float:
        called.append(name)
        return float(ranks.rank if name == "a" else -ranks.rank) + len(called)

    times = interleave({name: partial(contender, name) for name in "ab"}, 2, warm_up=1)
    return {name: list(values) for name, values in times.items()}, called


def test_interleaved_times_are_those_of_the_slowest_rank_after_the_warm_up() -> None:
    for times, called in run_ranks(2, _interleaved):
        assert called == ["a", "b", "b", "a", "a", "b"]
        assert times == {"a": [4.0 + 1, 5.0 + 1], "b": [3.0, 6.0]}


def _slowest(ranks: Ranks) -> list[float]:
    return list(slowest([ranks.rank, 10.0 - ranks.rank]))


def test_the_slowest_rank_of_every_round_counts() -> None:
    assert run_ranks(3, _slowest) == [[2.0, 10.0]] * 3


def test_a_ratio_has_three_columns_and_one_that_is_missing_has_them_empty() -> None:
    assert ratio_columns("to_ddp", Ratio(1.5, 1.0, 2.0)) == {
        "to_ddp_median": 1.5,
        "to_ddp_low": 1.0,
        "to_ddp_high": 2.0,
    }
    assert ratio_columns("to_ddp", None) == dict.fromkeys(("to_ddp_median", "to_ddp_low", "to_ddp_high"))
