"""What is said of ranks' computation, from times that are known."""

from __future__ import annotations

import numpy as np
import pytest

from pipesgd.calibration.computation import CPU, PARTS, Computation, summarize


def times(scale: float, seed: int, *, count: int = 40, cv: float = 0.02) -> dict[str, list[float]]:
    """Forward 1, backward 2, update 0.5 and late update 0.75 s, times ``scale``."""
    generator = np.random.default_rng(seed)
    means = dict(zip(PARTS, (1.0, 2.0, 0.5, 0.75), strict=True))
    noise = np.exp(cv * generator.standard_normal(count))
    return {name: list(scale * mean * noise) for name, mean in means.items()} | {CPU: list(3.0 * noise)}


def of(scales: list[float], **options: float) -> Computation:
    return summarize([times(scale, seed, **options) for seed, scale in enumerate(scales)], [])  # type: ignore[arg-type]


def test_means_are_those_of_the_median_rank_and_its_spread_is_found() -> None:
    found = of([0.9, 1.0, 3.0], cv=0.05)
    assert [found.parts[name].value for name in PARTS] == pytest.approx([1.0, 2.0, 0.5, 0.75], rel=0.03)
    assert found.cv == pytest.approx(0.05, rel=0.3)
    assert found.contention == (0.0, 0.0, 0.0)


def test_a_rank_that_is_always_slow_is_found_by_its_factor() -> None:
    assert of([1.0, 1.0, 1.3, 1.0]).slow_ranks == {2: pytest.approx(1.3, rel=0.03)}
    assert of([1.0, 1.05, 1.0, 1.0]).slow_ranks == {}
    assert of([1.0]).slow_ranks == {}


def test_ranks_that_share_cores_are_compared_by_what_they_compute() -> None:
    ranks = [times(scale, seed) for seed, scale in enumerate((1.0, 1.6, 1.0))]
    assert summarize(ranks, [], shared_cores=True).slow_ranks == {}
    ranks[2][CPU] = [2 * one for one in ranks[2][CPU]]
    assert summarize(ranks, [], shared_cores=True).slow_ranks == {2: pytest.approx(2.0, rel=0.03)}


def test_a_rank_that_was_slow_for_a_while_is_not_always_slow() -> None:
    ranks = [times(1.0, seed) for seed in range(3)]
    for name in PARTS:
        ranks[1][name][:25] = [3 * one for one in ranks[1][name][:25]]
    assert summarize(ranks, []).slow_ranks == {}


def test_an_interrupted_iteration_does_not_count() -> None:
    ranks = [times(1.0, seed) for seed in range(3)]
    for own in ranks:
        own["forward"][7] = 100.0
    found = summarize(ranks, [])
    assert found.parts["forward"].value == pytest.approx(1.0, rel=0.02)
    assert found.cv < 0.05


def test_contention_is_that_of_the_median_rank_and_never_negative() -> None:
    alone = [times(1.0, seed) for seed in range(3)]
    beside = [([1.0] * 9, [1.0 + slower] * 9) for slower in (0.0, 0.25, 0.5)]
    assert summarize(alone, beside).contention == pytest.approx((0.25, 0.25, 0.25))
    faster = [([1.0] * 9, [0.9] * 9)] * 3
    assert summarize(alone, faster).contention == (0.0, 0.0, 0.0)
