"""Cost of a job: the parts of its iteration, with an interval, what limits it, and what would change it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from timing_model.all_reduce import CollectiveTime
from timing_model.costs import (
    Costs,
    as_measured,
    correction_of,
    costs_of,
    estimates_of,
    iteration_time,
    loaded_time,
    times_of,
)
from timing_model.iteration import IterationTime, job_time
from timing_model.jitter import lasting_period
from timing_model.job import Job
from timing_model.memory import check_memory, rank_memory
from timing_model.support import OUTSIDE, Support, support_of

COMPUTATION, NETWORK, LATENCY, CODEC, JITTER = "computation", "network", "latency", "codec", "jitter"
LOADING, HOST = "loading", "host"
LIMITS = (COMPUTATION, NETWORK, HOST, LATENCY, CODEC, JITTER, LOADING)
BALANCE = "balance"
"""Limit of an answer without a single one: several of them take about equally long."""
LEAST_GAIN = 0.05
"""Gain of the best of the ``LIMITS`` below which none of them is the limit."""
FORM_ERROR = 0.03
"""Share by which formula and machine may be off even where all was measured: half of a 90 % interval."""
EQUAL = 0.03
"""Relative difference between two gains up to which both parts are named as the limit."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Predicted cost of a job. Times are in s."""

    job: Job
    iteration: IterationTime
    """Mean of an iteration in the steady state; its parts sum to the total."""
    low: float
    """Lower end of the iteration's 90 % interval, by the intervals of all estimates, the profile's residual and
    ``FORM_ERROR``."""
    high: float
    lasting: float
    """Mean of an iteration if ranks stay slow or fast for many iterations, not for one: the most that jitter costs."""
    collective: CollectiveTime
    """Time of a whole collective, hidden or not; with ddp, of all buckets."""
    support: Support
    efficiency: float
    """Throughput of all ranks over as many times that of one rank alone."""
    samples_per_second: float | None
    """Samples per second of all workers; None if the batch size is not known."""
    epoch: float | None
    """Time of an epoch; None if samples or batch size are not known."""
    total: float | None
    """Time of the whole job; None if neither its iterations nor its epochs are given."""
    memory: float | None
    """Bytes that a rank holds (``memory.rank_memory``); None if that is not known."""
    limit: str
    """The one of ``LIMITS`` with the largest gain, or ``BALANCE`` if none gains ``LEAST_GAIN``."""
    gains: dict[str, float]
    """Factors by which an iteration is faster with half of each of the ``LIMITS``, and without any jitter and slow
    ranks: 1 if that changes nothing."""

    @property
    def limits(self) -> tuple[str, ...]:
        """The limit, and after it those of the ``LIMITS`` whose gain is as large, up to ``EQUAL``."""
        if self.limit == BALANCE:
            return (BALANCE,)
        least = max(1 + LEAST_GAIN, self.gains[self.limit] / (1 + EQUAL))
        return (self.limit, *(name for name in LIMITS if name != self.limit and self.gains[name] >= least))

    def as_json(self) -> dict[str, Any]:
        """Return the answer for programs; times are in s."""
        job, iteration = self.job, self.iteration
        return {
            "iteration_seconds": iteration._asdict()
            | {"exposed": iteration.exposed, "low": self.low, "high": self.high, "lasting": self.lasting},
            "collective_seconds": self.collective._asdict(),
            "epoch_seconds": self.epoch,
            "job_seconds": self.total,
            "epoch_cost": job.cost(self.epoch),
            "job_cost": job.cost(self.total),
            "samples_per_second": self.samples_per_second,
            "memory_bytes": self.memory,
            "efficiency": self.efficiency,
            "limited_by": self.limit,
            "limits": list(self.limits),
            "gains": self.gains,
            "support": self.support.kind,
            "reasons": list(self.support.reasons),
            "job": job.values()
            | {"parts": [dataclasses.asdict(one) for one in job.parts]}
            | {"model": job.compute.model, "batch_size": job.compute.batch_size or None}
            | {"parameters": job.compute.numel},
        }


def predict(job: Job, *, extrapolate: bool = False) -> Answer:
    """Predict what the job will cost.

    Raises:
        ValueError: the job is outside of what was measured, and ``extrapolate`` is False; or its messages cannot be
            followed (``Job.check_messages``); or it does not fit into the memory of a rank.
    """
    job.check_messages()
    check_memory(job)
    support = support_of(job)
    refuse_outside(support, extrapolate)
    costs = costs_of(job)
    iteration, collective = iteration_time(job, costs)
    below, above = _spread(job, costs, iteration.total)
    gains = _gains(job, costs, iteration)
    if job.measured is not None:
        iteration, found = as_measured(job, iteration), job.measured.iteration
        below, above = found.value - found.low, found.high - found.value
    one = job.changed(width=1, members=1, all_reduce="ring") if job.islands.members > 1 else job.changed(width=1)
    alone = loaded_time(one, costs_of(one), lambda times: IterationTime(times.total, times.total, 0.0, 0.0, 0.0)).total
    workers, batch_size = job.workers, job.accumulated.batch_size
    per_epoch = job.iterations_per_epoch
    iterations = job.job_iterations
    in_flight = collective.total if job.width > 1 else 0.0
    return Answer(
        job=job,
        iteration=iteration,
        low=max(0.0, iteration.total - below),
        high=iteration.total + above,
        lasting=_lasting(job, costs, iteration, collective),
        collective=collective,
        support=support,
        efficiency=workers / job.world_size * (alone / iteration.total if iteration.total > 0 else 1.0),
        samples_per_second=workers * batch_size / iteration.total if batch_size and iteration.total > 0 else None,
        epoch=None if per_epoch is None else per_epoch * iteration.total,
        total=None if iterations is None else _job_time(job, costs, iteration, iterations, in_flight),
        memory=rank_memory(job),
        limit=_limit(gains),
        gains=gains,
    )


def refuse_outside(support: Support, extrapolate: bool) -> None:
    """Raise ``ValueError`` if a job is outside of what was measured or checked, unless ``extrapolate`` is True."""
    if support.kind == OUTSIDE and not extrapolate:
        raise ValueError(
            f"extrapolate must be asked for outside of what was measured or checked; got {support.reasons[0]}"
        )


def _job_time(job: Job, costs: Costs, iteration: IterationTime, iterations: int, in_flight: float) -> float:
    """Return the time of the whole job, in s, whose last window may have fewer iterations than the others."""
    steps = job.local_steps
    windows = math.ceil(iterations / steps)
    step = iteration.compute - costs.times.outer_update / steps + iteration.jitter + iteration.loading
    missing = max(0.0, (windows * steps - iterations) * step)
    return job_time(iteration.times(steps), windows, in_flight, missing=missing)


def _spread(job: Job, costs: Costs, total: float) -> tuple[float, float]:
    """Return how far, in s, the interval reaches below and above ``total``: the roots of the sums of squares over the
    residual and each group of estimates that come together, each moved to its ends alone; and, if anything was
    measured, over ``FORM_ERROR``."""
    below = above = (FORM_ERROR * total) ** 2 if job.cluster.calibrated.world_sizes else 0.0

    def add(changed: list[Costs]) -> None:
        nonlocal below, above
        ends = [iteration_time(job, one)[0].total - total for one in changed]
        below += min(0.0, *ends) ** 2
        above += max(0.0, *ends) ** 2

    correction = correction_of(job)
    error = correction[1] if correction else job.cluster.calibrated.residual_of(job.measured_as)
    add([dataclasses.replace(costs, link=costs.link.times(max(0.0, 1 + sign * error))) for sign in (-1, 1)])
    for part, estimates in estimates_of(job):
        if any(one.low < one.high for one in estimates.values()):
            whole = getattr(costs, part)
            lows, highs = ({name: getattr(one, end) for name, one in estimates.items()} for end in ("low", "high"))
            ends = (dataclasses.replace(whole, **end) for end in (lows, highs))
            add([dataclasses.replace(costs, **{part: one}) for one in ends])
    sharing = job.cluster.sharing
    if job.strategy == "ps-sync" and correction is None:
        low, high = (0.0, 1.0) if sharing is None else (sharing.low, sharing.high)
        add([dataclasses.replace(costs, sharing=end) for end in (low, high)])
    return math.sqrt(below), math.sqrt(above)


def _gains(job: Job, costs: Costs, iteration: IterationTime) -> dict[str, float]:
    """Return the factors by which an iteration is faster with half of each limit, and without any jitter.

    Jitter and slow ranks are shares of the computation: halving the computation halves them, too, and would always gain
    more than halving them alone.
    """

    def half(value: Any, *names: str) -> Any:
        return dataclasses.replace(value, **{name: getattr(value, name) / 2 for name in names})

    def with_links(*names: str) -> Costs:
        """Return the costs with half of each of these parameters of all links."""
        placed = tuple(dataclasses.replace(one, link=half(one.link, *names)) for one in costs.placed)
        inner = costs.inner and half(costs.inner, *names)
        return dataclasses.replace(costs, link=half(costs.link, *names), inner=inner, placed=placed)

    changed = {
        COMPUTATION: dataclasses.replace(
            costs, times=half(costs.times, "update", "outer_update", "forward", "backward")
        ),
        LOADING: dataclasses.replace(costs, times=half(costs.times, "loading")),
        NETWORK: with_links("beta"),
        HOST: with_links("host"),
        LATENCY: with_links("alpha", "overhead", "sync"),
        CODEC: dataclasses.replace(
            with_links("gamma"),
            codec=half(costs.codec, "encode", "decode", "add", "hop", "call"),
            factors=costs.factors and half(costs.factors, "work"),
            parts=tuple(half(one, "work") for one in costs.parts),
        ),
    }
    times = {name: iteration_time(job, one)[0].total for name, one in changed.items()}
    times[JITTER] = iteration.total - iteration.jitter
    return {name: iteration.total / time if time > 0 else 1.0 for name, time in times.items()}


def _lasting(job: Job, costs: Costs, iteration: IterationTime, collective: CollectiveTime) -> float:
    if job.width == job.local_steps == job.accumulation == 1:  # each iteration waits for its own slowest rank
        return iteration.total
    noise = dataclasses.replace(job.noise, cv=job.compute.cv)  # what lasts, a window or an iteration does not average
    if job.width == job.local_steps == 1:  # ddp and servers, too
        return max(iteration.total, iteration_time(job, dataclasses.replace(costs, noise=noise))[0].total)
    times = times_of(job, costs).with_workers(job.loader_workers)
    t_compute, t_comm = times.window(job.local_steps).at_width(job.width, collective.total)
    window = lasting_period(t_compute, t_comm, job.width, job.workers, noise)
    return max(iteration.total, window / job.local_steps)


def _limit(gains: dict[str, float]) -> str:
    largest = max(gains, key=lambda name: gains[name])
    return largest if gains[largest] >= 1 + LEAST_GAIN else BALANCE
