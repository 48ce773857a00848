"""Alternatives to a plan that change the job itself: accumulation, coarser codecs, local steps, other numbers of ranks.

A plan searches configurations of one job. These change how many samples an update sees, or cost accuracy, so they are
mentioned with their price, and never chosen.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from timing_model.advice import waits
from timing_model.buckets import WHOLE
from timing_model.choices import Choice, Space, all_codecs
from timing_model.configurations import training_arguments
from timing_model.costs import costs_of, iteration_time, times_of
from timing_model.fragments import MOST_LOCAL_STEPS, hiding_windows, in_windows
from timing_model.job import LARGEST_WORLD, Job
from timing_model.measured import LOW_RANK, UNCOMPRESSED
from timing_model.memory import fits
from timing_model.plan import Plan, plan
from timing_model.units import format_cost, format_seconds

MOST_ACCUMULATION = 64
"""Largest factor on the micro-batches of the job that is considered, if the job may have as many."""
WORTH = 0.25
"""Gain in samples per second from which accumulation, a coarser codec or local steps are mentioned."""
LEAST_SAVED = 0.1
"""Share of an epoch that twice as many ranks must save to be worth it."""
FURTHEST = 8
"""Factor on the number of ranks up to which more of them are considered."""
MANY = 10
"""Ratio from which on decimals say nothing."""

LEAST_WINDOWS = 20
"""Fewest exchanges of a weight in a job in which ranks still train together."""
MOST_FRAGMENTS = 4
"""Most fragments that are considered with local steps."""
WHOLE_COSTS = {2: 1.9, 4: 1.4, 8: 1.7, 32: 2.2}
FRAGMENTS_COSTS = {2: 1.0, 4: 0.7, 8: 1.2, 32: 1.8}
"""Accuracy that width 2 lost to synchronous training, in percentage points, rounded up, by the number of iterations
between two exchanges of a weight: with whole weights, and with 2 or 4 fragments. It is the largest of an MLP and a
convnet on Fashion-MNIST, fp32 and int4, on four simulated ranks with SGD, means of three seeds; with 32, of the MLP
alone, as the convnet had fewer than ``LEAST_WINDOWS`` exchanges (``experiments/results/local_steps_accuracy``)."""
COARSER, COARSER_COST = "ternary", 0.1
"""Codec of 2 bits, and the most that it was measured to cost in accuracy on average, in percentage points, rounded up:
MLP and convnet on Fashion-MNIST, four ranks, three seeds, width 1 (``experiments/results/codec_accuracy``)."""

LOW_RANK_COST, LARGER_RANK_COST = 15, 1
"""Most percents of the loss that factors of low rank cost two small transformers after 600 iterations, rounded up: of
rank 4, and of rank 16 after whole gradients in a quarter of the iterations (``experiments/results/accuracy``)."""


class Epoch(NamedTuple):
    """An epoch on some number of ranks."""

    world_size: int
    seconds: float
    cost: float | None
    """Price of the epoch; None if that of a rank is not known."""


def alternatives(found: Plan, space: Space, *, extrapolate: bool = False) -> list[str]:
    """Return sentences on what else a person could do, after the search of ``space`` that found the plan.

    None where parts of gradients are gathered: what their size is with other batches or ranks is not known.
    """
    if found.best.job.parts:
        return []
    sentences = (
        _accumulation(found, space),
        _low_rank(found, space),
        _coarser_codec(found, space),
        _local_steps(found, space),
        _more_ranks(found.best.job, space, extrapolate),
    )
    return [one for one in sentences if one is not None]


def most_accumulation(job: Job) -> int:
    """Return the largest factor on the micro-batches of ``job`` that is considered: with more, a job may be refused."""
    return min(MOST_ACCUMULATION, job.most_micro_batches // job.accumulation)


def hiding(choice: Choice, width: int) -> int | None:
    """Return the smallest factor on the micro-batches with which a pipeline of this width hides the communication of
    ``choice`` behind the computation; None if it is above ``most_accumulation``."""
    job = dataclasses.replace(choice.job, width=width)
    times = times_of(job, costs_of(job)).with_workers(job.loader_workers)
    for factor in range(1, most_accumulation(job) + 1):
        more = dataclasses.replace(times, forward=factor * times.forward, backward=factor * times.backward)
        if more.hides(choice.collective.total):
            return factor
    return None


def _before_windows(job: Job) -> Job:
    """Return the job, with as many micro-batches, as a pipeline that can have windows: of width 2, without accumulation
    and buckets."""
    iterations = None if job.length.iterations is None else job.accumulation * job.length.iterations
    return job.changed(width=2, accumulation=1, buckets="1", iterations=iterations)


def local_steps_cost(between: int, fragments: int) -> float | None:
    """Return the accuracy that local steps cost, in percentage points, with this number of iterations ``between`` two
    exchanges of a weight: in a straight line between what was measured; None for more than that.

    >>> [local_steps_cost(between, 1) for between in (4, 8, 20, 100)]
    [1.4, 1.7, 1.95, None]
    """
    costs = WHOLE_COSTS if fragments == 1 else FRAGMENTS_COSTS
    if between > max(costs):
        return None
    return float(np.interp(between, list(costs), list(costs.values())))


class _Windows(NamedTuple):
    """Local steps that hide the communication."""

    job: Job
    """Job whose exchanges are those of the largest fragment."""
    fragments: int

    @property
    def between(self) -> int:
        """Number of iterations between two exchanges of a weight."""
        return self.job.local_steps * self.fragments

    @property
    def meetings(self) -> int | None:
        """Number of exchanges of a weight in the job; None if its length is not known."""
        iterations = self.job.job_iterations
        return None if iterations is None else math.ceil(iterations / self.between)

    @property
    def meet_rarely(self) -> bool:
        """True if ranks hardly train together."""
        return self.meetings is not None and self.meetings < LEAST_WINDOWS

    @property
    def cost(self) -> float | None:
        """Accuracy that it costs, in percentage points; None if that is not known."""
        return local_steps_cost(self.between, self.fragments)

    @property
    def order(self) -> tuple[bool, float, int, int]:
        """Place among others, the best first: of those that cost the same, the one with the smallest fragments."""
        return self.meet_rarely, math.inf if self.cost is None else self.cost, self.between, -self.fragments

    @property
    def options(self) -> str:
        """Options of ``pipesgd.train`` that run it."""
        return training_arguments(self.job) + (f" --fragments {self.fragments}" if self.fragments > 1 else "")


def _hiding_windows(choice: Choice) -> list[_Windows]:
    """Return the fewest local steps that hide the communication of ``choice``: of whole weights, and by fragments."""
    job = _before_windows(choice.job)
    # Codecs that gather compress a movement as a whole.
    most = 1 if job.gathered else min(MOST_FRAGMENTS, len(job.compute.tensors))
    fewest = {fragments: hiding_windows(job, fragments) for fragments in range(1, most + 1)}
    return [_Windows(in_windows(job, one, number), number) for number, one in fewest.items() if one is not None]


def epochs(job: Job, space: Space, extrapolate: bool = False) -> list[Epoch]:
    """Return an epoch of this configuration, with the best of the all-reduces of ``space``, on 1, 2, 4 and so on nodes.

    There are at most ``FURTHEST`` times the job's ranks, and no more than the job's where a file places links, since
    those of further ranks are not known. Numbers outside of what was measured, or with too many ranks for an iteration,
    are left out; all are if the samples are not known.
    """
    most = job.world_size if job.cluster.placed else min(LARGEST_WORLD, FURTHEST * job.world_size)
    sizes = (job.nodes.ranks_per_node << power for power in range(LARGEST_WORLD.bit_length()))
    rows = (epoch(job, one, space, extrapolate) for one in sizes if one <= most)
    return [one for one in rows if one is not None]


def epoch(job: Job, world_size: int, space: Space, extrapolate: bool) -> Epoch | None:
    """Return an epoch on this many ranks; None if it is not known, or has not even one iteration."""
    try:
        base = job.changed(world_size=world_size, strategy="pipelined", width=1, codec=UNCOMPRESSED, all_reduce="ring")
        usual = Space.of(base).all_reduces
        same = Space(
            strategies=(job.strategy,),
            widths=(job.width,),
            codecs=(job.codec,),
            segments=(job.segment_bytes,),
            buckets=(job.buckets,),
            all_reduces=tuple(one for one in space.all_reduces if one in usual),
            members=(job.islands.members,),
        )
        best = plan(base, same, extrapolate=extrapolate).best
    except ValueError:  # beyond what was measured, or too few samples
        return None
    iterations = best.job.iterations_per_epoch
    if iterations is None:
        return None
    seconds = iterations * best.iteration.total
    return Epoch(world_size, seconds, best.job.cost(seconds))


def last_worth(rows: list[Epoch]) -> int | None:
    """Return the number of ranks from which on no doubling saves ``LEAST_SAVED``; None if the last one does.

    >>> rows = [Epoch(p, seconds, None) for p, seconds in ((1, 1.0), (2, 3.0), (4, 1.6), (8, 1.5), (16, 1.4))]
    >>> last_worth(rows), last_worth(rows[:3])
    (4, None)
    """
    found = None
    for fewer, more in reversed(list(pairwise(rows))):
        if more.seconds <= (1 - LEAST_SAVED) * fewer.seconds:
            break
        found = fewer.world_size
    return found


def _pipelined(found: Plan) -> Choice | None:
    """Return the best pipeline, one without buckets if there is any: those gain nothing at the widths that follow."""
    pipelined = [one for one in found.ranking if one.job.strategy == "pipelined"]
    return next((one for one in pipelined if one.job.cut == WHOLE), pipelined[0] if pipelined else None)


def _accumulation(found: Plan, space: Space) -> str | None:
    choice = _pipelined(found)
    if choice is None or max(space.widths) == 1:
        return None
    width = max(min(one for one in space.widths if one > 1), choice.job.width)
    computation = times_of(choice.job, costs_of(choice.job)).total
    if computation == 0:
        return None
    ratio = choice.collective.total / computation
    times = f"Communication takes {ratio:,.0f} times" if ratio >= MANY else f"Communication takes {ratio:.1f} times"
    factor = hiding(choice, width)
    if factor is None:
        most = most_accumulation(choice.job) * choice.job.micro_batches
        return (
            f"{times} as long as computation, which --accumulation {most} would not hide: this network is too slow for "
            "this model with this batch."
        )
    per_epoch = choice.job.iterations_per_epoch
    if factor == 1 or (per_epoch is not None and per_epoch < factor):
        return None  # that width hides it as it is, or the data set has fewer samples than that
    job = dataclasses.replace(choice.job, width=width, accumulation=factor * choice.job.accumulation)
    if not fits(job):
        return None
    seconds = iteration_time(job, costs_of(job))[0].total
    gain = factor * found.best.iteration.total / seconds if seconds > 0 else 1.0
    if gain < 1 + WORTH:
        return None
    return (
        f"{times} as long as computation: {training_arguments(job)} would hide it, with "
        f"{gain:.1f} times as many samples a second, in iterations of {format_seconds(seconds)}; the price is a batch "
        f"{factor} times as large, so an epoch has {factor} times fewer updates."
    )


def _exposed_pipeline(found: Plan, space: Space) -> Choice | None:
    """Return the fastest pipeline of a plan whose ranks wait for communication; at width 2, if it is synchronous."""
    choice = _pipelined(found)
    if choice is None or max(space.widths) == 1 or not waits(found.best.iteration):
        return None
    job = dataclasses.replace(choice.job, width=max(2, choice.job.width))
    exposed = fits(job) and waits(iteration_time(job, costs_of(job))[0])
    return dataclasses.replace(choice, job=job) if exposed else None


def _coarser(choice: Choice, space: Space) -> Job | None:
    """Return the job with the coarser codec; None if it was searched, is not known on this cluster, or does not fit."""
    if COARSER in space.codecs or COARSER not in all_codecs(choice.job):
        return None
    all_reduce = "ring" if choice.job.all_reduce == "native" else choice.job.all_reduce
    job = dataclasses.replace(choice.job, codec=COARSER, all_reduce=all_reduce)
    return job if fits(job) else None


def _coarser_codec(found: Plan, space: Space) -> str | None:
    """Return a sentence on a codec with fewer bits than those that are searched, if it gains enough."""
    choice = _exposed_pipeline(found, space)
    job = None if choice is None else _coarser(choice, space)
    if job is None:
        return None
    iteration = iteration_time(job, costs_of(job))[0]
    gain = found.best.iteration.total / iteration.total
    if gain < 1 + WORTH:
        return None
    hides = "" if waits(iteration) else ", and hide the communication"
    return (
        f"A coarser codec, {training_arguments(job)}, would be {gain:.1f} times as fast{hides}; the price was "
        f"{COARSER_COST:.1f} points of accuracy on average, measured at width 1 with two small image models."
    )


def _low_rank(found: Plan, space: Space) -> str | None:
    """Return a sentence on factors of low rank, if they were measured but not searched, and gain enough."""
    choice = _exposed_pipeline(found, space)
    if choice is None or LOW_RANK in space.codecs or LOW_RANK not in all_codecs(choice.job):
        return None
    try:
        job = choice.job.changed(codec=LOW_RANK, all_reduce="ring")
    except ValueError:  # such as islands, between which there are none
        return None
    iteration = iteration_time(job, costs_of(job))[0]
    gain = found.best.iteration.total / iteration.total
    if gain < 1 + WORTH or job.low_rank is None or not fits(job):
        return None
    hides = "" if waits(iteration) else ", and hide the communication"
    return (
        f"Factors of rank {job.low_rank.rank}, {training_arguments(job)}, would be {gain:.1f} times as fast{hides}. "
        f"Of rank 4 they cost small transformers up to {LOW_RANK_COST} % of the loss; of slower rank 16, after "
        f"whole gradients in a quarter (--dense-start), {LARGER_RANK_COST} % at width 1: compare in a short training."
    )


def _local_steps(found: Plan, space: Space) -> str | None:
    """Return a sentence on the local steps that hide what no codec hides, and on their price."""
    choice = _exposed_pipeline(found, space)
    if choice is None or choice.job.islands.members > 1 or choice.job.islands.memory is not None:
        return None  # islands have no local steps, whose memory is not known
    if choice.job.compute.accumulation > 1:
        return None  # local steps refuse it, and the time of one of its micro-batches was not measured
    coarser = _coarser(choice, space)
    if coarser is not None and not waits(iteration_time(coarser, costs_of(coarser))[0]):
        return None
    hiding = _hiding_windows(choice)
    if not hiding:
        return f"Local steps are senseless here: --local-steps {MOST_LOCAL_STEPS} would not hide the communication."
    windows = min(hiding, key=lambda one: one.order)
    if windows.meet_rarely:
        return (
            f"Local steps are senseless here: {windows.options} would hide the communication, but in this job the "
            f"ranks would exchange a weight only {windows.meetings} times."
        )
    before = found.best.iteration.total / found.best.job.accumulation
    gain = before / iteration_time(windows.job, costs_of(windows.job))[0].total
    if gain < 1 + WORTH:
        return None
    if windows.cost is None:
        most = max(FRAGMENTS_COSTS)
        price = f"the price of more than {most} iterations between two exchanges of a weight was not measured"
    else:
        price = f"the price was up to {windows.cost:.1f} points of accuracy with two small image models"
    return f"{windows.options} would hide the communication, with {gain:.1f} times as many samples a second; {price}."


def _more_ranks(job: Job, space: Space, extrapolate: bool) -> str | None:
    """Return a sentence on the number of ranks from which on more of them hardly help."""
    here, rows = epoch(job, job.world_size, space, extrapolate), epochs(job, space, extrapolate)
    if here is None or len(rows) < 2:
        return None
    if rows[0].world_size == 1 < job.world_size and rows[0].seconds <= here.seconds:
        return f"One rank alone is as fast ({_told(rows[0])}, {_told(here)} for an epoch): do not distribute this job."
    worth = last_worth(rows)
    if worth is None:
        said, shown = f"More ranks help, up to {rows[-1].world_size} at least", rows[-2:]
    else:
        said = f"From {worth} ranks on, twice as many save less than {LEAST_SAVED:.0%} of an epoch"
        shown = [one for one in rows if one.world_size in (worth, 2 * worth)]
    return f"{said} ({', '.join(map(_told, shown))} for an epoch; the batch of each rank stays as it is)."


def _told(one: Epoch) -> str:
    ranks = "1 rank" if one.world_size == 1 else f"{one.world_size} ranks"
    cost = "" if one.cost is None else f" and {format_cost(one.cost)}"
    return f"{ranks}: {format_seconds(one.seconds)}{cost}"
