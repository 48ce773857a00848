"""Computation times of a model, from laps in which it was trained: after collectives, and while they run."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipesgd.calibration.options import UNCOMPRESSED
from pipesgd.calibration.robust_fit import Floats
from pipesgd.calibration.training import (
    BACKWARD,
    COMMUNICATION,
    CPU,
    FORWARD,
    UPDATE,
    WAIT,
    Laps,
    TrainingMode,
)
from timing_model.jitter import variance_of_mean
from timing_model.measured import MOST_PERSISTENCE, Estimate
from timing_model.params import Noise

LEAST_GROUPS = 4
"""Fewest groups of iterations in a jackknife; fewer laps are cut in halves."""
SLOW_RANK, STRETCHES = 1.1, 4
"""Multiple of the median rank's time (the faster one of two), and number of stretches: a rank above it in every stretch
is always slow."""
INTERRUPTED = 3.0
"""Multiple of the median: a longer iteration was interrupted by something else on its core, and is left out, but never
more than half of a lap."""
LEAST_OVERLAP, MOST_SLOWED = 0.2, 0.75
"""Smallest overlap with a collective (share of the computation) that is assumed when dividing by it, to avoid
amplifying noise; and the largest share of that time which counts as lost."""
MOST_SLOWDOWN = MOST_SLOWED / (1 - MOST_SLOWED)
"""Largest slowdown that a fit can find."""
CROWDED = 0.6
"""Share of their cores that ranks use together, in the passes, from which on they wait for each other's."""
LEAST_BUSY = 0.02
"""Smallest share of the computation that is taken to need a core."""
LEAST_VARIANCE, ROUNDS = 1e-12, 50
"""Variance, relative to the mean, below which times are all the same; and rounds of an iteration that converges in
fewer."""
T90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Standard errors to the ends of a 90 % interval, with 1, 2, ... degrees of freedom (Student)."""
PARTS = ("forward", "backward", "update", "late_update", "loading", "handover", "local_update")
EXPOSED = 0.05
"""Share of an iteration: if every rank waits for longer, all-reduces follow each other without a pause."""
Lap = NDArray[np.float64]
"""Seconds of one lap: (ranks, iterations, 9)."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Iteration times of the ranks, in s."""

    parts: dict[str, Estimate]
    """Means of ``PARTS`` over iterations and ranks, without the ranks that are always slow."""
    cv: float
    """Spread between ranks in an iteration: standard deviation over mean of one rank's time."""
    persistence: Estimate
    """Correlation of a rank's deviation with that of its iteration before, from 0 to ``MOST_PERSISTENCE``."""
    comm_cv: Estimate
    """Spread of the all-reduce's time between iterations, where no computation runs: standard deviation over mean."""
    slow_ranks: dict[int, float]
    """Slowdown of each rank that is always slow: its median time of both passes over the median rank's."""
    processor_share: float
    """Share of the passes for which the rank has a core; in the rest it waits, as for an accelerator."""
    compute_slowdown: Estimate
    codec_compute_slowdown: Estimate
    """Slowdown by an all-reduce that is compressed."""
    late_handovers: dict[str, Estimate]
    """Time by which each all-reduce is longer in a pipeline than outside of training, in s, by name."""


class LateIteration(Protocol):
    """A late iteration, in which the ranks wait for each other, too."""

    def all_reduce(self, total: float, computation: float) -> float:
        """Return the time of the all-reduce, in s, given those of the whole iteration and of its computation."""


def summarize(
    everybody: Sequence[Sequence[Laps]],
    *,
    modes: Sequence[TrainingMode],
    t_comms: Sequence[float],
    late_iteration: Callable[[int, Noise], LateIteration],
    ranks_per_core: float = 1.0,
) -> Computation:
    """Summarize every rank's ``Training.laps``.

    Ranks that keep shared cores busy are compared by CPU time: chance decides which of them waits longest for a core.

    Args:
        everybody: each rank's laps, in each of ``modes``.
        modes: the synchronous way first, then late ones.
        t_comms: seconds that each way's all-reduce of the gradient takes outside of training.
        late_iteration: a ``LateIteration``, given the number of ranks and their noise.
        ranks_per_core: number of ranks over that of cores.
    """
    halves = 2 if len(everybody[0][0]) < LEAST_GROUPS else 1
    synchronous, *late = (
        [
            _uninterrupted(half)
            for lap in zip(*(laps[number] for laps in everybody), strict=True)
            for half in np.array_split(np.array(lap), halves, axis=1)
        ]
        for number in range(len(everybody[0]))
    )
    lap_totals = [lap[:, :, : UPDATE + 1].sum(axis=2) for lap in synchronous]
    totals = np.concatenate(lap_totals, axis=1)
    whole = np.concatenate(synchronous, axis=1)
    crowded = ranks_per_core > 1 and ranks_per_core * _processor_share(whole) > CROWDED
    compared = whole[:, :, CPU] if crowded else whole[:, :, : BACKWARD + 1].sum(axis=2)
    slow = _slow_ranks(compared)
    others = [rank for rank in range(len(everybody)) if rank not in slow]
    # The last rank to begin waits for no other.
    lap_collectives = [lap[:, :, COMMUNICATION].min(axis=0) for lap in synchronous]
    count, cv = len(synchronous), _cv(totals)

    def of_noise(laps: list[int]) -> Floats:
        totals, collectives = ([of[lap] for lap in laps] for of in (lap_totals, lap_collectives))
        return np.array([_persistence(totals), _comm_cv(collectives)])

    persistence, comm_cv = _estimates(of_noise, count)
    noise = Noise(cv=cv, persistence=persistence.value, comm_cv=comm_cv.value, slow_ranks=tuple(slow.values()))
    model = late_iteration(len(everybody), noise)
    names = list(dict.fromkeys(way.all_reduce for way in modes[1:]))

    def values(laps: list[int]) -> Floats:
        alone, *beside = (np.concatenate([way[lap] for lap in laps], axis=1) for way in (synchronous, *late))
        return _values(alone, beside, others, modes[1:], t_comms, model, names)

    found = _estimates(values, count)
    compute_slowdown, codec_compute_slowdown, *late_handovers = found[len(PARTS) :]
    return Computation(
        parts=dict(zip(PARTS, found, strict=False)),
        cv=cv,
        persistence=dataclasses.replace(persistence, high=min(persistence.high, MOST_PERSISTENCE)),
        comm_cv=comm_cv,
        slow_ranks=slow,
        processor_share=_processor_share(whole[others]),
        compute_slowdown=compute_slowdown,
        codec_compute_slowdown=codec_compute_slowdown,
        late_handovers=dict(zip(names, late_handovers, strict=True)),
    )


def _estimates(values: Callable[[list[int]], Floats], count: int) -> list[Estimate]:
    """Return the ``values`` of all laps, whose number is ``count``, with intervals in which those of another
    calibration would be: by leaving out one lap after the other (jackknife). A value below 0 becomes 0."""
    value = values(list(range(count)))
    without = [values([lap for lap in range(count) if lap != left]) for left in range(count) if count > 1]
    deviations = np.sqrt((count - 1) * np.var(without, axis=0)) if without else np.zeros(len(value))
    reach = np.sqrt(2) * deviations * T90[min(max(count - 1, 1), len(T90)) - 1]
    return [
        Estimate(*(max(0.0, float(end)) for end in (middle, middle - far, middle + far)))
        for middle, far in zip(value, reach, strict=True)
    ]


def _values(
    synchronous: Lap,
    late: Sequence[Lap],
    others: Sequence[int],
    ways: Sequence[TrainingMode],
    t_comms: Sequence[float],
    model: LateIteration,
    names: Sequence[str],
) -> Floats:
    """Return ``PARTS``, the slowdowns of the computation and the late handovers of the all-reduces with these names, by
    inverting ``ComputeTimes.at_width``.

    In a pipeline of width 2 the all-reduce begins just before the update, and the next passes follow. Means are those
    of ``others``, the ranks that are not slow.
    """
    forward, backward, update, _, _, cpu, data, loading, local_update = synchronous[others].mean(axis=(0, 1))
    # The rank that is the last to begin waits for no other.
    handover = max(0.0, float(synchronous[:, :, WAIT].min(axis=0).mean()) - t_comms[0])
    # 1. Time by which each all-reduce is longer next to the update: that counts where ranks wait for it. Updates count
    # where they do not.
    all_reduces = np.array([_all_reduce(way, others, model) for way in late])
    waited = [_all_wait(way) for way in late]
    everything = range(len(ways))
    late_handovers = []
    for name in names:
        own = [number for number in everything if ways[number].all_reduce == name]
        longer = [all_reduces[number] - t_comms[1 + number] for number in _if_any(own, waited)]
        late_handovers.append(max(0.0, float(np.mean(longer))))

    # 2. Share that the processor loses in the passes, which follow the update, while an all-reduce runs.
    passes, updates = (
        np.array([way[others][:, :, columns].sum(axis=2).mean() for way in late])
        for columns in (slice(FORWARD, BACKWARD + 1), slice(UPDATE, UPDATE + 1))
    )
    idle = max(0.0, forward + backward - cpu)

    def slowdown(*, compressed: bool) -> float:
        """Return it over all ways with a codec or without, since one alone is noise."""
        own = _if_any(everything, [(way.codec != UNCOMPRESSED) == compressed for way in ways])
        busy = np.maximum(passes[own] - idle, LEAST_BUSY * passes[own])
        beside = np.clip(all_reduces[own] - updates[own], LEAST_OVERLAP * busy, busy)
        lost = float(np.clip((passes[own] - forward - backward).sum() / beside.sum(), 0.0, MOST_SLOWED))
        return lost / (1 - lost)

    free = _if_any(everything, [not waits for waits in waited])
    parts = [forward - data, backward, update, updates[free].mean(), loading, handover, local_update]
    return np.array([*parts, slowdown(compressed=False), slowdown(compressed=True), *late_handovers])


def _if_any(numbers: Sequence[int], holds: Sequence[bool]) -> list[int]:
    """Return those of ``numbers`` for which it ``holds``; all if it does for none."""
    return [number for number in numbers if holds[number]] or list(numbers)


def _processor_share(lap: Lap) -> float:
    """Return the share of the passes for which the ranks had a core."""
    forward, backward, _, _, _, cpu, *_ = lap.mean(axis=(0, 1))
    return float(min(1.0, cpu / (forward + backward)))


def _all_reduce(late: Lap, others: Sequence[int], model: LateIteration) -> float:
    """Return the seconds that the all-reduce takes while the computation runs."""
    if not _all_wait(late):
        return float(late[:, :, COMMUNICATION].min(axis=0).mean())  # the rank that waited for no other
    forward, backward, update, wait, *_ = map(float, late[others].mean(axis=(0, 1)))
    return model.all_reduce(forward + backward + update + wait, forward + backward + update)


def _all_wait(late: Lap) -> bool:
    """Return True if every rank waits for the all-reduce."""
    total = float(late[:, :, : WAIT + 1].sum(axis=2).mean())
    return float(late[:, :, WAIT].min(axis=0).mean()) >= EXPOSED * total


def _uninterrupted(lap: Lap) -> Lap:
    totals = lap[:, :, : UPDATE + 1].sum(axis=2)
    longest = totals.max(axis=0)
    kept: Lap = lap[:, longest <= max(INTERRUPTED * np.median(totals), np.median(longest))]
    return kept


def _cv(totals: Floats) -> float:
    """Return the spread of times (ranks, iterations), without what several ranks have in common."""
    ranks = len(totals)
    relative = totals / totals.mean(axis=1, keepdims=True)
    if ranks == 1:
        return float(relative.std())
    return float(np.sqrt(np.square(relative - relative.mean(axis=0)).mean() * ranks / (ranks - 1)))


def _persistence(laps: Sequence[Floats]) -> float:
    """Return the correlation of a rank's deviation with that of its iteration before, given the ranks' times in every
    lap, (ranks, iterations).

    Deviations are from the rank's mean over all laps, and without what several ranks have in common. A mean over few
    iterations takes some of the persistence with it: with v the variance of that mean, as a share of one deviation's,
    a correlation of rho is found as (rho - v) / (1 - v). Since v depends on rho, it is found by iteration. By
    chance the result may be below 0.
    """
    deviations = np.log(np.concatenate(laps, axis=1))
    deviations -= deviations.mean(axis=1, keepdims=True)
    if len(deviations) > 1:
        deviations -= deviations.mean(axis=0)
    lengths = [lap.shape[1] for lap in laps]
    by_lap = np.split(deviations, np.cumsum(lengths)[:-1], axis=1)
    pairs = np.concatenate([(lap[:, 1:] * lap[:, :-1]).ravel() for lap in by_lap])
    variance = float(np.square(deviations).mean())
    if variance < LEAST_VARIANCE or len(pairs) == 0:
        return 0.0
    found = float(pairs.mean()) / variance
    persistence = 0.0
    for _ in range(ROUNDS):
        of_laps = [number * n**2 * variance_of_mean(persistence, n) for n, number in Counter(lengths).items()]
        taken = sum(of_laps) / sum(lengths) ** 2
        persistence = min(max(-MOST_PERSISTENCE, taken + (1 - taken) * found), MOST_PERSISTENCE)
    return persistence


def _comm_cv(laps: Sequence[Floats]) -> float:
    """Return the spread of the all-reduce's times, (iterations,) of every lap, from the mean of their lap.

    What changes from lap to lap is a drift of the machine, which no iteration in flight averages out. An all-reduce
    that was interrupted does not count, as with computations.
    """
    kept = [lap[lap <= INTERRUPTED * np.median(lap)] for lap in laps]
    squares = [float(np.square(lap / lap.mean() - 1).sum()) for lap in kept if lap.mean() > 0]
    freedom = sum(len(lap) - 1 for lap in kept)
    return math.sqrt(sum(squares) / freedom) if freedom else 0.0


def _slow_ranks(times: Floats) -> dict[int, float]:
    """Return the factors of the ranks that are slow in every stretch of their iterations (ranks, iterations)."""
    stretches = np.array_split(times, min(STRETCHES, times.shape[1]), axis=1)
    medians = np.array([np.median(one, axis=1) for one in stretches]).T
    factors = medians / np.quantile(medians, 0.5, axis=0, method="lower")  # a mean of two would be partly slow
    return {rank: float(np.median(own)) for rank, own in enumerate(factors) if np.all(own > SLOW_RANK)}
