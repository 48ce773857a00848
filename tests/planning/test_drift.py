"""The line that a run prints when its iterations take more or less time than predicted."""

from __future__ import annotations

import dataclasses

import pytest
from _plans import prediction

from pipesgd.pipeline.width import SYNCHRONOUS_ITERATIONS
from pipesgd.planning.drift import SETTLING, TOLERANCE, WINDOW, WINDOWS, Drift


@pytest.mark.parametrize(("factor", "word"), [(1.01, "slower"), (0.99, "faster")])
def test_a_drift_is_told_once_and_only_when_it_lasts(factor: float, word: str) -> None:
    planned = prediction()
    edge = planned.high * (1 + TOLERANCE) if word == "slower" else planned.low / (1 + TOLERANCE)
    within = Drift(planned)
    assert not any(within.observe(number, edge / factor) for number in range(10 * WINDOW * WINDOWS))
    drift = Drift(planned)
    said = [drift.observe(number, edge * factor) for number in range(SETTLING + 10 * WINDOW * WINDOWS)]
    [line] = [one for one in said if one]
    assert said.index(line) == SETTLING + WINDOW * WINDOWS - 1
    assert f"the cluster is {word} than" in line


def test_medians_are_compared_with_the_median() -> None:
    """A few iterations are long, so that the mean is as predicted but the median is below it."""
    planned = dataclasses.replace(prediction(low=0.99, high=1.01), median_share=0.8)
    as_predicted, at_the_mean = Drift(planned), Drift(planned)
    last = SETTLING + WINDOW * WINDOWS - 1
    for number in range(last):
        assert as_predicted.observe(number, 0.8) is None
        assert at_the_mean.observe(number, 1.0) is None
    assert as_predicted.observe(last, 0.8) is None
    assert at_the_mean.observe(last, 1.0) is not None


def test_a_hiccup_is_no_drift() -> None:
    drift = Drift(prediction())
    for _ in range(10):
        for seconds in [9.0] * (WINDOW * (WINDOWS - 1)) + [1.0] * WINDOW:
            assert drift.observe(0, seconds) is None


def test_windows_of_local_steps_are_compared_by_their_means() -> None:
    """Iterations of 1.5 s follow those of 0.5 s, as where an exchange is not hidden: the mean is as predicted."""
    planned = dataclasses.replace(prediction(low=0.99, high=1.01), window=2)
    as_predicted, slower = Drift(planned), Drift(planned)
    said = []
    for number in range(2 * (SETTLING + WINDOW * WINDOWS)):
        assert as_predicted.observe(number, 0.5 + number % 2) is None
        said.append(slower.observe(number, 0.7 + number % 2))
    assert not any(said[:-1])
    assert said[-1] is not None
    assert said[-1].startswith("the median window takes 1.20 s an iteration, predicted ")
    assert planned.compare(1.0).startswith("the median window took 1.00 s an iteration, predicted 1.00 s ")
    assert planned.windows([1.0, 2.0, 5.0, 6.0, 9.0]) == [1.5, 5.5]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_fallback_of_the_guard_is_no_drift(resumed: bool) -> None:
    """It may have begun before the run was resumed."""
    for fell_back in (False, True):
        drift = Drift(prediction(), fell_back=[SETTLING] if fell_back and resumed else [])
        first = SETTLING + 1 if resumed else 0
        said = [
            drift.observe(iteration, 9.0, fell_back=fell_back and iteration == SETTLING)
            for iteration in range(first, SETTLING + SYNCHRONOUS_ITERATIONS)
        ]
        assert any(said) == (not fell_back)


@pytest.mark.parametrize("window", [1, 4])
def test_a_warm_up_is_no_drift_and_hides_none_after_it(window: int) -> None:
    drift = Drift(dataclasses.replace(prediction(), window=window), warmup_iterations=200)
    *said, last = [drift.observe(iteration, 9.0) for iteration in range(200 + window * (SETTLING + WINDOW * WINDOWS))]
    assert not any(said)
    assert last is not None
    assert "slower" in last
