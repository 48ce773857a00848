"""Computation times of a model where it is trained: after collectives, and while they run.

Timed alone, the model would be too fast: a processor that waited is slower for a while, one that sends and receives
while it computes is slower all the time, and ranks that share cores take turns. So the model is trained with its
all-reduces, in many short laps spread over the calibration, since the machine's speed drifts, too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipesgd.calibration.options import TYPICAL_CODEC, UNCOMPRESSED
from pipesgd.calibration.robust_fit import Floats
from pipesgd.config import TrainConfig
from pipesgd.data import ShardedBatches
from pipesgd.optim.build import build_optimizer
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.ranks import Ranks
from pipesgd.run.forward_backward import forward_backward
from timing_model.jitter import variance_of_mean
from timing_model.measured import MOST_PERSISTENCE, Estimate
from timing_model.params import Noise

SYNCHRONOUS, LATE = 1, 2
"""Widths that are trained. Any width above 1 adds to 2 only a prediction for each further gradient in flight."""
UNTIMED = 2
"""Iterations at the start of a lap, after those that fill the pipeline, that do not count: idle connections start
slowly, and the caches still hold earlier data."""
LEAST_ITERATIONS, MOST_ITERATIONS = 4, 100
"""Fewest iterations that count in a lap, and most iterations that a lap is planned with."""
LEAST_LAPS, LEAST_GROUPS = 2, 4
"""Fewest laps, whatever they take, and fewest groups of iterations in a jackknife; fewer laps are cut in halves."""
SLOW_RANK, STRETCHES = 1.1, 4
"""Multiple of the median rank's time, and number of stretches: a rank above it in every stretch is always slow."""
INTERRUPTED = 3.0
"""Multiple of the median: a longer iteration was interrupted by something else on its core, and is left out, but never
more than half of a lap."""
LEAST_OVERLAP, MOST_SLOWED = 0.2, 0.75
"""Smallest overlap with a collective (share of the computation) that is assumed when dividing by it, to avoid
amplifying noise; and the largest share of that time which counts as lost."""
CROWDED = 0.6
"""Share of their cores that ranks use together, in the passes, from which on they wait for each other's."""
LEAST_BUSY = 0.02
"""Smallest share of the computation that is taken to need a core."""
LEAST_VARIANCE, ROUNDS = 1e-12, 50
"""Variance, relative to the mean, below which times are all the same; and rounds of an iteration that converges in
fewer."""
T90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Standard errors to the ends of a 90 % interval, with 1, 2, ... degrees of freedom (Student)."""
PARTS = ("forward", "backward", "update", "late_update", "loading", "handover")
FORWARD, BACKWARD, UPDATE, WAIT, COMMUNICATION, CPU, DATA, LOADING = range(8)
"""Indices of an iteration's seconds. The first four add up to the iteration; then come the all-reduce that ended in it,
the time for which this thread had a core in the passes, the part of the first in which the rank waited for its batch,
and the time in which a process loaded that batch."""
EXPOSED = 0.05
"""Share of an iteration: if every rank waits for longer, all-reduces follow each other without a pause."""
SURELY_WAIT = 1.25
"""Multiple of the computation's time: if an all-reduce is estimated to take longer, ranks wait for it."""

Laps = list[list[list[float]]]
"""One rank's times: laps, iterations, seconds."""
Lap = NDArray[np.float64]
"""Seconds of one lap: (ranks, iterations, 8)."""


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
    """Slowdown of each rank that is always slow: its median iteration over the median rank's."""
    processor_share: float
    """Share of the passes for which the rank has a core; in the rest it waits, as for an accelerator."""
    compute_slowdown: Estimate
    codec_compute_slowdown: Estimate
    """Slowdown by an all-reduce that is compressed."""
    late_handovers: dict[str, Estimate]
    """Time by which each all-reduce is longer in a pipeline than outside of training, in s, by name."""


class TrainingMode(NamedTuple):
    """One way of training a model to time it."""

    width: int
    all_reduce: str
    codec: str


class LateIteration(Protocol):
    """A late iteration, in which the ranks wait for each other, too."""

    def all_reduce(self, total: float, computation: float) -> float:
        """Return the time of the all-reduce, in s, given those of the whole iteration and of its computation."""


def least_iterations(modes: Iterable[TrainingMode]) -> int:
    """Return the fewest iterations of a training in these ways."""
    return LEAST_LAPS * sum(_least_of_lap(way.width) for way in modes)


def _least_of_lap(width: int) -> int:
    return _untimed(width) + LEAST_ITERATIONS


def _untimed(width: int) -> int:
    return width - 1 + UNTIMED


class Training:
    """A model that all ranks train in several ways. All ranks create it, and call it, together."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        batches: ShardedBatches,
        prediction: str,
        training_modes: Sequence[TrainingMode],
        ranks: Ranks,
    ):
        self._config = config
        self._batches = batches
        self._ranks = ranks
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=config.optimization.loss_scale, enabled=config.optimization.precision == "fp16"
        )
        self._strategies = []
        for way in training_modes:
            own = copy.deepcopy(model).train()
            optimizer = build_optimizer(config.optimization, own)
            self._strategies.append(
                Pipelined(
                    own,
                    optimizer,
                    width=way.width,
                    prediction=prediction,
                    scaler=self._scaler,
                    codec=way.codec,
                    all_reduce=way.all_reduce,
                    ranks=ranks,
                )
            )
        self._paces = [0.0] * len(self._strategies)
        """Seconds of an iteration in each way, as of the last lap."""
        self._due = 0.0
        """Seconds that may be trained and were not yet."""
        self.laps: list[Laps] = [[] for _ in self._strategies]
        """Timed laps of each way."""

    def pace(self) -> float:
        """Return about how long forward and backward passes take, in s, on the slowest rank. Collective."""
        *_, times = self._train(self._strategies[0], UNTIMED)
        paces: list[float] = self._ranks.all_gather_object("time of the passes", sum(times[: BACKWARD + 1]))
        return max(paces)

    def lap(self, seconds: float) -> bool:
        """Train in each way, for about this many seconds together, and keep the times; return True.

        If that is too short for the fewest iterations, the seconds are added to those of the next lap, once there are
        ``LEAST_LAPS`` laps; then return False.
        """
        self._ranks.all_gather_object("computation", None)  # all begin together
        self._due += seconds
        share = self._due / len(self._strategies)
        asked = [min(share / pace, MOST_ITERATIONS) if pace else 0.0 for pace in self._paces]
        agreed = np.min(self._ranks.all_gather_object("iterations of a lap", asked), axis=0)
        least = [_least_of_lap(strategy.width) for strategy in self._strategies]
        if len(self.laps[0]) >= LEAST_LAPS and any(agreed < least):
            return False
        self._due = 0.0
        for number, strategy in enumerate(self._strategies):
            begin = time.perf_counter()
            times = self._train(strategy, max(least[number], int(agreed[number])))
            self._paces[number] = (time.perf_counter() - begin) / len(times)
            self.laps[number].append(times[_untimed(strategy.width) :])
        return True

    def close(self) -> None:
        """Stop the communication threads."""
        for strategy in self._strategies:
            strategy.close()

    def _train(self, strategy: Pipelined, iterations: int) -> list[list[float]]:
        times = []
        with contextlib.closing(self._batches.from_iteration(strategy.iteration)) as samples:
            for number in range(iterations):
                cpu, begin = time.thread_time(), time.perf_counter()
                _, spans = forward_backward(strategy, samples, self._config, self._scaler, number)
                computed, cpu = time.perf_counter(), time.thread_time() - cpu
                report = strategy.step()
                wait = report.seconds("wait")
                update = time.perf_counter() - computed - wait
                backward = sum(span.seconds for span in spans if span.what == "backward")
                forward = computed - begin - backward
                data = sum(span.seconds for span in spans if span.what == "data")
                communication = report.seconds("communication")
                times.append([forward, backward, update, wait, communication, cpu, data, samples.last.seconds])
        strategy.flush()
        return times


def training_modes(all_reduces: Sequence[str], codecs: Sequence[str]) -> list[TrainingMode]:
    """Return the ways to train: synchronous with the first all-reduce, late with each, and late with the first one and
    a codec, if any is measured: next to that the computation is the limit more often.

    >>> [tuple(way) for way in training_modes(["ring", "native"], ["bf16", "int8"])]
    [(1, 'ring', 'fp32'), (2, 'ring', 'fp32'), (2, 'native', 'fp32'), (2, 'ring', 'int8')]
    """
    compressed = [TYPICAL_CODEC] if TYPICAL_CODEC in codecs else codecs[:1]
    return [
        TrainingMode(SYNCHRONOUS, all_reduces[0], UNCOMPRESSED),
        *(TrainingMode(LATE, name, UNCOMPRESSED) for name in all_reduces),
        *(TrainingMode(LATE, all_reduces[0], name) for name in compressed),
    ]


def brief_training_modes(
    all_reduce: str, bits: Mapping[str, float], t_comm: float, t_compute: float
) -> list[TrainingMode]:
    """Return ways to train where collectives take too long for ``training_modes``: synchronous and late with the codec
    that has the fewest bits, and late with that of the fewest bits for which ranks wait, if that is another one.

    Args:
        all_reduce: name of the all-reduce.
        bits: bits of a value with each codec, fp32 among them.
        t_comm: approximate time of an uncompressed all-reduce, in s.
        t_compute: approximate time of the computation, in s.

    >>> bits = {"fp32": 32.0, "bf16": 16.0, "int4": 4.0}
    >>> [tuple(way) for way in brief_training_modes("ring", bits, t_comm=0.2, t_compute=0.05)]
    [(1, 'ring', 'int4'), (2, 'ring', 'int4'), (2, 'ring', 'bf16')]
    >>> [tuple(way) for way in brief_training_modes("ring", bits, t_comm=0.2, t_compute=0.01)]
    [(1, 'ring', 'int4'), (2, 'ring', 'int4')]
    """
    fewest = min(bits, key=lambda name: bits[name])
    waited = [name for name in bits if t_comm * bits[name] / bits[UNCOMPRESSED] >= SURELY_WAIT * t_compute]
    late = {fewest: None, min(waited, key=lambda name: bits[name], default=fewest): None}
    return [TrainingMode(SYNCHRONOUS, all_reduce, fewest), *(TrainingMode(LATE, all_reduce, name) for name in late)]


def summarize(
    everybody: Sequence[Sequence[Laps]],
    *,
    training_modes: Sequence[TrainingMode],
    t_comms: Sequence[float],
    late_iteration: Callable[[int, Noise], LateIteration],
    ranks_per_core: float = 1.0,
) -> Computation:
    """Summarize every rank's ``Training.laps``.

    Ranks that keep shared cores busy are compared by CPU time: chance decides which of them waits longest for a core.

    Args:
        everybody: each rank's laps, in each of ``training_modes``.
        training_modes: the synchronous way first, then late ones.
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
    compared = whole[:, :, CPU] if crowded else totals
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
    names = list(dict.fromkeys(way.all_reduce for way in training_modes[1:]))

    def values(laps: list[int]) -> Floats:
        alone, *beside = (np.concatenate([way[lap] for lap in laps], axis=1) for way in (synchronous, *late))
        return _values(alone, beside, others, training_modes[1:], t_comms, model, names)

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
    forward, backward, update, _, _, cpu, data, loading = synchronous[others].mean(axis=(0, 1))
    # The rank that is the last to begin waits for no other.
    handover = max(0.0, float(synchronous[:, :, WAIT].min(axis=0).mean()) - t_comms[0])
    # 1. Time by which each all-reduce is longer next to the update: that counts where ranks wait for it. Updates count
    # where they do not.
    all_reduces = np.array([_all_reduce(way, others, model) for way in late])
    waited = [_all_wait(way) for way in late]
    late_handovers = []
    for name in names:
        own = [number for number, way in enumerate(ways) if way.all_reduce == name]
        own = [number for number in own if waited[number]] or own
        longer = [all_reduces[number] - t_comms[1 + number] for number in own]
        late_handovers.append(max(0.0, float(np.mean(longer))))

    # 2. Share that the processor loses in the passes, which follow the update, while an all-reduce runs.
    passes, updates = (
        np.array([way[others][:, :, columns].sum(axis=2).mean() for way in late])
        for columns in (slice(FORWARD, BACKWARD + 1), slice(UPDATE, UPDATE + 1))
    )
    idle = max(0.0, forward + backward - cpu)

    def slowdown(own: Sequence[int]) -> float:
        """Return it over all of these ways, since one alone is noise."""
        busy = np.maximum(passes[own] - idle, LEAST_BUSY * passes[own])
        beside = np.clip(all_reduces[own] - updates[own], LEAST_OVERLAP * busy, busy)
        lost = float(np.clip((passes[own] - forward - backward).sum() / beside.sum(), 0.0, MOST_SLOWED))
        return lost / (1 - lost)

    everything = range(len(ways))
    plain, compressed = (
        [number for number in everything if (ways[number].codec != UNCOMPRESSED) == packed] or list(everything)
        for packed in (False, True)
    )
    free = [number for number in everything if not waited[number]] or list(everything)
    parts = [forward - data, backward, update, updates[free].mean(), loading, handover]
    return np.array([*parts, slowdown(plain), slowdown(compressed), *late_handovers])


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
    factors = medians / np.median(medians, axis=0)
    return {rank: float(np.median(own)) for rank, own in enumerate(factors) if np.all(own > SLOW_RANK)}
