"""The line that a run prints when its iterations take more or less time than predicted."""

from __future__ import annotations

import dataclasses

import pytest
from _plans import prediction

from pipesgd.planning.drift import REFILL, SETTLING, TOLERANCE, WINDOW, WINDOWS, Drift


@pytest.mark.parametrize(("factor", "word"), [(1.01, "slower"), (0.99, "faster")])
def test_a_drift_is_told_once_and_only_when_it_lasts(factor: float, word: str) -> None:
    planned = prediction()
    edge = planned.high * (1 + TOLERANCE) if word == "slower" else planned.low / (1 + TOLERANCE)
    within = Drift(planned)
    assert not any(within.observe(edge / factor) for number in range(10 * WINDOW * WINDOWS))
    drift = Drift(planned)
    said = [drift.observe(edge * factor) for number in range(SETTLING + 10 * WINDOW * WINDOWS)]
    [line] = [one for one in said if one]
    assert said.index(line) == SETTLING + WINDOW * WINDOWS - 1
    assert f"the cluster is {word} than" in line


def test_medians_are_compared_with_the_median() -> None:
    """A few iterations are long, so that the mean is as predicted but the median is below it."""
    planned = dataclasses.replace(prediction(low=0.99, high=1.01), median_share=0.8)
    as_predicted, at_the_mean = Drift(planned), Drift(planned)
    last = SETTLING + WINDOW * WINDOWS - 1
    for _ in range(last):
        assert as_predicted.observe(0.8) is None
        assert at_the_mean.observe(1.0) is None
    assert as_predicted.observe(0.8) is None
    assert at_the_mean.observe(1.0) is not None


def test_a_hiccup_is_no_drift() -> None:
    drift = Drift(prediction())
    for _ in range(10):
        for seconds in [9.0] * (WINDOW * (WINDOWS - 1)) + [1.0] * WINDOW:
            assert drift.observe(seconds) is None


def test_windows_of_local_steps_are_compared_by_their_means() -> None:
    """Iterations of 1.5 s follow those of 0.5 s, as where an exchange is not hidden: the mean is as predicted."""
    planned = dataclasses.replace(prediction(low=0.99, high=1.01), window=2)
    as_predicted, slower = Drift(planned), Drift(planned)
    said = []
    for number in range(2 * (SETTLING + WINDOW * WINDOWS)):
        assert as_predicted.observe(0.5 + number % 2) is None
        said.append(slower.observe(0.7 + number % 2))
    assert not any(said[:-1])
    assert said[-1] is not None
    assert said[-1].startswith("the median window takes 1.20 s an iteration, predicted ")
    assert planned.compare(1.0).startswith("the median window took 1.00 s an iteration, predicted 1.00 s ")
    assert planned.windows([1.0, 2.0, 5.0, 6.0, 9.0]) == [1.5, 5.5]


def test_a_synchronous_time_is_no_drift() -> None:
    """It begins with a run, or when the guard falls back."""
    for synchronous in (False, True):
        drift = Drift(prediction())
        said = [drift.observe(9.0, unlike=synchronous) for _ in range(SETTLING + WINDOW * WINDOWS)]
        said += [drift.observe(9.0) for _ in range(REFILL)]
        assert any(said) == (not synchronous)


@pytest.mark.parametrize("window", [1, 4])
def test_a_synchronous_start_is_no_drift_and_hides_none_after_it(window: int) -> None:
    drift = Drift(dataclasses.replace(prediction(), window=window))
    for _ in range(200):
        assert drift.observe(9.0, unlike=True) is None
    *said, last = [drift.observe(9.0) for _ in range(REFILL + window * (SETTLING + WINDOW * WINDOWS))]
    assert not any(said)
    assert last is not None
    assert "slower" in last
