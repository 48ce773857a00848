"""When a run says that its iterations take another time than was predicted."""

from __future__ import annotations

import pytest
from _plans import prediction

from pipesgd.drift import SETTLING, TOLERANCE, WINDOW, WINDOWS, Drift


@pytest.mark.parametrize(("factor", "word"), [(1.01, "slower"), (0.99, "faster")])
def test_a_drift_is_told_once_and_only_when_it_lasts(factor: float, word: str) -> None:
    planned = prediction()
    edge = planned.high * (1 + TOLERANCE) if word == "slower" else planned.low / (1 + TOLERANCE)
    within = Drift(planned)
    assert not any(within.saw(edge / factor) for _ in range(10 * WINDOW * WINDOWS))
    drift = Drift(planned)
    said = [drift.saw(edge * factor) for _ in range(SETTLING + 10 * WINDOW * WINDOWS)]
    [line] = [one for one in said if one]
    assert said.index(line) == SETTLING + WINDOW * WINDOWS - 1
    assert f"the cluster is {word} than" in line


def test_a_hiccup_is_no_drift() -> None:
    drift = Drift(prediction())
    for _ in range(10):
        for seconds in [9.0] * (WINDOW * (WINDOWS - 1)) + [1.0] * WINDOW:
            assert drift.saw(seconds) is None
