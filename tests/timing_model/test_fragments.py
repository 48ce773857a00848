"""Fragments of the weights: whose exchange takes longest, and how many of them a window of local steps hides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.timing_model import test_alternatives
from tests.timing_model._profiles import MLP, ask
from timing_model.fragments import hiding_fragments, hiding_windows, in_windows, predict_in_turns, windows_of
from timing_model.job import Job
from timing_model.measured import Estimate
from timing_model.predict import predict
from timing_model.simulate_job import simulate_job

TENSORS = (400_000, 100_000, 300_000, 200_000)


def job_of(ratio: float, **changes: Any) -> Job:
    """Return a job whose exchange of all weights takes ``ratio`` times as long as the computation of 1 s."""
    job = test_alternatives.job_of(ratio, width=2, segment_bytes=1 << 30)
    return dataclasses.replace(job, compute=dataclasses.replace(job.compute, tensors=TENSORS, **changes))


@pytest.mark.parametrize(("fragments", "largest"), [(1, TENSORS), (2, (300_000, 200_000)), (3, (100_000, 300_000))])
def test_windows_exchange_the_largest_fragment_of_those_that_the_trainer_cuts(
    fragments: int, largest: tuple[int, ...]
) -> None:
    whole = job_of(1.0)
    windows = in_windows(whole, 4, fragments)
    assert windows.compute.tensors == largest
    assert windows == dataclasses.replace(
        whole, local_steps=4, compute=dataclasses.replace(whole.compute, tensors=largest)
    )


@pytest.mark.parametrize("ratio", [0.5, 2.0, 6.0])
def test_a_prediction_is_the_mean_over_the_turns_of_all_fragments(ratio: float) -> None:
    """At width 2 a window takes as long as its computation of 2 s, or as the exchange before it."""
    sizes = [one.compute.numel for one in windows_of(job_of(ratio), 2, 3)]
    assert sum(sizes) == sum(TENSORS)
    expected = sum(max(2.0, ratio * size / sum(TENSORS)) for size in sizes) / (2 * 3)
    answer = predict_in_turns(job_of(ratio).changed(iterations=60), 2, 3)
    assert answer.iteration.total == pytest.approx(expected)
    assert sum(answer.iteration[1:]) == pytest.approx(expected)
    assert (answer.low, answer.high) == (pytest.approx(expected), pytest.approx(expected)), "nothing was measured"
    assert answer.total == pytest.approx(60 * expected, rel=0.1)


def test_at_width_1_a_window_of_one_iteration_has_both_updates_too() -> None:
    one, two = (predict(in_windows(ask(width=1), steps, 3)).iteration.compute for steps in (1, 2))
    assert one == pytest.approx(0.06 + 2 * MLP.update.value)
    assert two == pytest.approx(0.06 + 1.5 * MLP.update.value)


def test_a_window_updates_all_weights_in_every_iteration_and_once_more_at_its_end() -> None:
    inner, outer = MLP.update.value, MLP.late_update.value
    for steps in (1, 4):
        answer = predict(in_windows(ask(width=2), steps, 3))
        assert answer.iteration.compute == pytest.approx(0.06 + inner + outer / steps)
        assert answer.job.measured is None


@pytest.mark.parametrize(
    ("ratio", "steps", "fragments"),
    [(3.9, 4, 1), (4.1, 4, 2), (7.9, 4, 2), (8.1, 4, 3), (9.9, 4, 3), (10.1, 4, None), (0.9, 1, 1), (2.4, 1, 3)],
)
def test_the_fewest_fragments_are_found_whose_exchange_takes_no_longer_than_a_window(
    ratio: float, steps: int, fragments: int | None
) -> None:
    """Half of the weights, or the largest parameter's four tenths, are in the largest of two or three."""
    job = job_of(ratio)
    assert hiding_fragments(job, steps) == fragments
    for number in range(1, len(TENSORS) + 1):
        iteration = simulate_job(in_windows(job, steps, number)).period
        assert (iteration <= 1.0 + 1e-6) == (fragments is not None and number >= fragments)


def test_what_slows_the_exchange_needs_more_fragments_and_what_slows_the_computation_fewer() -> None:
    job = job_of(3.9)
    assert hiding_fragments(job, 4) == 1
    assert hiding_fragments(dataclasses.replace(job, cluster=job.cluster.limited_to(6e6 / 3.9 / 2)), 4) == 2
    assert hiding_fragments(job_of(7.8, loading=Estimate.exact(1.0)), 4) == 1, "the rank loads its batches itself"
    loaded = dataclasses.replace(job_of(7.8, loading=Estimate.exact(1.0)), loader_workers=1)
    assert hiding_fragments(loaded, 4) == 2


@pytest.mark.parametrize(("ratio", "steps"), [(10.1, 5), (2.4, 1), (1249.0, 500), (1251.0, None)])
def test_the_fewest_local_steps_hide_the_exchange_of_the_largest_parameter(ratio: float, steps: int | None) -> None:
    assert hiding_windows(job_of(ratio), len(TENSORS)) == steps
