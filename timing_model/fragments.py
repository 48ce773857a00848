"""Fragments of the weights, which are exchanged in turns, one at the end of each window of local steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import fmean

from timing_model.all_reduce import CollectiveTime
from timing_model.buckets import Cut
from timing_model.costs import costs_of, iteration_time
from timing_model.iteration import IterationTime
from timing_model.job import Job
from timing_model.measured import ComputeProfile, LowRankProfile
from timing_model.params import ComputeTimes
from timing_model.predict import Answer, predict

MOST_LOCAL_STEPS = 500
"""Longest window of local steps that is considered; nobody reports a use of longer ones."""


def fragments_of(tensors: Sequence[int], fragments: int) -> list[tuple[int, ...]]:
    """Return the sizes of the ``tensors`` in each of the ``fragments``, as the trainer cuts them: the last ones first.

    Raises ``ValueError`` if there are fewer tensors than fragments.

    >>> fragments_of((4, 1, 3, 2), 2)
    [(3, 2), (4, 1)]
    """
    last_first = tensors[::-1]
    return [tuple(last_first[part.start : part.stop][::-1]) for part in Cut(count=fragments)(last_first)]


def windows_of(job: Job, local_steps: int, fragments: int) -> list[Job]:
    """Return ``job`` in windows of ``local_steps`` iterations that each end with the exchange of one of ``fragments``.

    There is a job for each fragment, in the order of their turns, whose gradient is that fragment. The computation
    stays that of the whole model: all weights are updated in every iteration, and moved, packed and predicted at the
    end of every window.

    Raises ``ValueError`` if there are fewer parameters than fragments.
    """
    compute = dataclasses.replace(job.compute, measured=())
    if local_steps == 1:  # a window of one iteration has both updates, too
        inner, outer = compute.updates(job.width, local_steps=2).values()
        both = inner.plus(outer)
        compute = dataclasses.replace(compute, update=both, late_update=both)
    cut = [
        dataclasses.replace(compute, tensors=fragment, released=(), low_rank=_share_of(compute, fragment))
        for fragment in fragments_of(compute.tensors, fragments)
    ]
    return [dataclasses.replace(job, local_steps=local_steps, compute=own) for own in cut]


def _share_of(compute: ComputeProfile, fragment: tuple[int, ...]) -> LowRankProfile | None:
    """Return the part of the model's factors that belongs to the ``fragment``, in the mean of all of them."""
    low, share = compute.low_rank, sum(fragment) / compute.numel
    if low is None:
        return None
    left, right = (round(share * numel) for numel in (low.left, low.right))
    return dataclasses.replace(low, left=left, right=right, work=low.work.times(share))


def in_windows(job: Job, local_steps: int, fragments: int) -> Job:
    """Return the one of ``windows_of`` whose exchange takes longest, that of the largest fragment.

    Raises ``ValueError`` if there are fewer parameters than fragments.
    """
    return max(windows_of(job, local_steps, fragments), key=lambda one: one.compute.numel)


def predict_in_turns(job: Job, local_steps: int, fragments: int) -> Answer:
    """Predict ``job`` in windows that exchange the ``fragments`` in turns: the mean over these of all times.

    The rest of the answer, as what limits it, is that of the largest fragment.

    Raises:
        ValueError: there are fewer parameters than fragments, or as ``predict``.
    """
    answers = [predict(one, extrapolate=True) for one in windows_of(job, local_steps, fragments)]
    totals = [one.total for one in answers if one.total is not None]
    return dataclasses.replace(
        max(answers, key=lambda one: one.job.compute.numel),
        iteration=IterationTime(*map(fmean, zip(*(one.iteration for one in answers), strict=True))),
        low=fmean(one.low for one in answers),
        high=fmean(one.high for one in answers),
        lasting=fmean(one.lasting for one in answers),
        total=fmean(totals) if totals else None,
    )


def hiding_fragments(job: Job, local_steps: int) -> int | None:
    """Return the fewest fragments of which each is exchanged while a window computes, in a pipeline; None if the
    exchange of the largest parameter alone takes longer."""
    smallest: float = math.inf
    for fragments in range(1, len(job.compute.tensors) + 1):
        windows = in_windows(job, local_steps, fragments)
        times, exchange = _times_of(windows)
        if windows.compute.numel < smallest and times.window(local_steps).hides(exchange.total):
            return fragments
        smallest = min(smallest, windows.compute.numel)
    return None


def hiding_windows(job: Job, fragments: int) -> int | None:
    """Return the fewest local steps of a window that hides the exchange of the largest of the ``fragments``, in a
    pipeline; None if they are above ``MOST_LOCAL_STEPS``. With whole weights there are at least 2 of them.

    Raises ``ValueError`` if there are fewer parameters than fragments.
    """
    times, exchange = _times_of(in_windows(job, 2, fragments))  # those of longer windows are the same
    steps = range(2 if fragments == 1 else 1, MOST_LOCAL_STEPS + 1)
    return next((one for one in steps if times.window(one).hides(exchange.total)), None)


def _times_of(windows: Job) -> tuple[ComputeTimes, CollectiveTime]:
    """Return the times of an iteration, and that of an exchange."""
    costs = costs_of(windows)
    return costs.times.with_workers(windows.loader_workers), iteration_time(windows, costs)[1]
