"""The line that a run prints when its iterations take more or less time than predicted."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from _plans import prediction
from _rank_threads import run_rank_threads

from pipesgd.cli import parse
from pipesgd.pipeline.divergence_guard import SYNCHRONOUS_ITERATIONS
from pipesgd.planning.drift import SETTLING, TOLERANCE, WINDOW, WINDOWS, Drift
from pipesgd.planning.followed import FollowedPlan
from pipesgd.ranks import Ranks
from pipesgd.run.console import screen
from pipesgd.run.metrics import SECONDS, IterationMetrics
from pipesgd.run.output import METRICS_FILE


@pytest.mark.parametrize(("factor", "word"), [(1.01, "slower"), (0.99, "faster")])
def test_a_drift_is_told_once_and_only_when_it_lasts(factor: float, word: str) -> None:
    planned = prediction()
    edge = planned.high * (1 + TOLERANCE) if word == "slower" else planned.low / (1 + TOLERANCE)
    within = Drift(planned)
    assert not any(within.observe(edge / factor) for _ in range(10 * WINDOW * WINDOWS))
    drift = Drift(planned)
    said = [drift.observe(edge * factor) for _ in range(SETTLING + 10 * WINDOW * WINDOWS)]
    [line] = [one for one in said if one]
    assert said.index(line) == SETTLING + WINDOW * WINDOWS - 1
    assert f"the cluster is {word} than" in line


def test_medians_are_compared_with_the_median() -> None:
    """A few iterations are long, so that the mean is as predicted but the median is below it."""
    planned = dataclasses.replace(prediction(low=0.99, high=1.01), median_share=0.8)
    as_predicted, at_the_mean = Drift(planned), Drift(planned)
    for _ in range(SETTLING + WINDOW * WINDOWS - 1):
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


def _said_of_a_fallback(ranks: Ranks, fell_back: bool, resumed_in: Path | None) -> str:
    """Return what a run says of iterations that take longer than predicted, for as long as a fallback is.

    If it is ``resumed_in`` a folder, that is one that was resumed in the iteration after it fell back.
    """
    out = io.StringIO()
    nothing: Any = None  # no audition: nothing is replaced
    config = parse(["--guard", *([] if resumed_in is None else ["--output", str(resumed_in)])])
    plan = FollowedPlan(config, prediction(), ranks, screen(ranks, out), nothing, nothing)
    first = 0 if resumed_in is None else SETTLING + 1
    plan.begin(first)
    for iteration in range(first, SETTLING + SYNCHRONOUS_ITERATIONS):
        plan.observe(iteration, 9.0, fell_back=fell_back and iteration == SETTLING)
    return out.getvalue()


def test_a_fallback_of_the_guard_is_no_drift(tmp_path: Path) -> None:
    assert "slower" in run_rank_threads(1, _said_of_a_fallback, False, None)[0]
    assert run_rank_threads(1, _said_of_a_fallback, True, None) == [""]
    for fell_back in (False, True):
        line = IterationMetrics(
            iteration=SETTLING,
            epoch=0,
            loss=1.0,
            lr=0.1,
            samples_per_second=10.0,
            seconds=dict.fromkeys(SECONDS, 1.0),
            wire_bytes=100,
            skipped=0,
            fell_back=fell_back,
        )
        (tmp_path / METRICS_FILE).write_text(json.dumps(dataclasses.asdict(line)) + "\n")
        [said] = run_rank_threads(1, _said_of_a_fallback, fell_back, tmp_path)
        assert ("slower" in said) == (not fell_back)


def _said_after_a_warm_up(ranks: Ranks, words: list[str], window: int) -> str:
    """Return what a run says of iterations that take longer than predicted, in a warm-up and long after it."""
    out = io.StringIO()
    nothing: Any = None  # no audition: nothing is replaced
    planned = dataclasses.replace(prediction(), window=window)
    plan = FollowedPlan(
        parse([*words, "--warmup-iterations", "200"]), planned, ranks, screen(ranks, out), nothing, nothing
    )
    plan.begin(0)
    for iteration in range(200 + window * (SETTLING + WINDOW * WINDOWS)):
        assert out.getvalue() == ""
        plan.observe(iteration, 9.0, fell_back=False)
    return out.getvalue()


@pytest.mark.parametrize(("words", "window"), [([], 1), (["--local-steps", "4"], 4)])
def test_a_warm_up_is_no_drift_and_hides_none_after_it(words: list[str], window: int) -> None:
    [said] = run_rank_threads(1, _said_after_a_warm_up, words, window)
    assert "slower" in said
