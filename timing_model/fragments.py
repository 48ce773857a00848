"""Fragments of the weights, which are exchanged in turns, one at the end of each window of local steps."""

from __future__ import annotations

import dataclasses
import math

from timing_model.buckets import Cut
from timing_model.costs import costs_of, iteration_time
from timing_model.job import Job

MOST_LOCAL_STEPS = 500
"""Longest window of local steps that is considered; nobody reports a use of longer ones."""


def in_windows(job: Job, local_steps: int, fragments: int) -> Job:
    """Return ``job`` in windows of ``local_steps`` iterations that each end with the exchange of one of ``fragments``.

    Its gradient is the largest fragment, the one whose exchange takes longest. The computation stays that of the whole
    model: all weights are updated in every iteration, and moved, packed and predicted at the end of every window.

    Raises ``ValueError`` if there are fewer parameters than fragments.
    """
    compute, tensors = job.compute, job.compute.tensors[::-1]  # cut as the trainer cuts them
    parts = [tensors[part.start : part.stop] for part in Cut(count=fragments)(tensors)]
    late_update = compute.late_update
    if local_steps == 1:  # a window of one iteration has both updates, too
        late_update = compute.update.plus(late_update)
    fragment = dataclasses.replace(compute, tensors=max(parts, key=sum)[::-1], late_update=late_update, measured=())
    return dataclasses.replace(job, compute=fragment, local_steps=local_steps)


def hiding_fragments(job: Job, local_steps: int) -> int | None:
    """Return the fewest fragments of which each is exchanged while a window computes, in a pipeline; None if the
    exchange of the largest parameter alone takes longer."""
    smallest: float = math.inf
    for fragments in range(1, len(job.compute.tensors) + 1):
        windows = in_windows(job, local_steps, fragments)
        if windows.compute.numel < smallest and _hides(windows):
            return fragments
        smallest = min(smallest, windows.compute.numel)
    return None


def hiding_windows(job: Job, fragments: int) -> int | None:
    """Return the fewest local steps of a window that hides the exchange of the largest of the ``fragments``, in a
    pipeline; None if they are above ``MOST_LOCAL_STEPS``.

    Raises ``ValueError`` if there are fewer parameters than fragments.
    """
    steps = range(1, MOST_LOCAL_STEPS + 1)
    return next((one for one in steps if _hides(in_windows(job, one, fragments))), None)


def _hides(windows: Job) -> bool:
    costs = costs_of(windows)
    times = costs.times if windows.loader_workers else costs.times.loading_itself()
    return times.window(windows.local_steps).hides(iteration_time(windows, costs)[1].total)
