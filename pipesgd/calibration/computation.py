"""What the computation of a model takes where it is trained: after collectives, and beside them.

Not alone: a processor that waited is slower for a while, one that sends and receives while it computes is slower all
the time, and ranks that share cores take turns. So it is trained, with its all-reduces, in many short laps spread over
the calibration: the machine's speed drifts, too.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipesgd.calibration.fit import Floats, Range
from pipesgd.calibration.machines import busy_seconds
from pipesgd.computation import forward_backward
from pipesgd.config import TrainConfig
from pipesgd.launch import Ranks
from pipesgd.optimization import build_optimizer
from pipesgd.strategies.pipelined import Pipelined
from pipesgd.workloads import ShardedBatches

SYNCHRONOUS, LATE = 1, 2
"""Widths that are trained. Every one above 1 does the same as 2, and a prediction for each gradient more in flight."""
UNTIMED = 2
"""Iterations of a lap, beside those that fill the pipeline, before any counts: connections that were idle begin slowly,
and what was done before is in the caches."""
LEAST_ITERATIONS, MOST_ITERATIONS = 2, 100
"""Of a lap that count."""
SLOW_RANK, STRETCHES = 1.1, 4
"""Of the median rank: who takes longer in every one of so many stretches of time is always slow."""
INTERRUPTED = 3.0
"""Of the median: an iteration that takes longer was interrupted by something else on its core, and is left out."""
LEAST_OVERLAP, MOST_SLOWED = 0.2, 0.75
"""Of the computation, that counts as beside a collective even if less was: what it is slower by would be noise. And the
largest share of that time which counts as lost."""
T90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Standard errors to the ends of a 90 % interval, with 1, 2, ... degrees of freedom (Student)."""
PARTS = ("forward", "backward", "update", "late_update")
FORWARD, BACKWARD, UPDATE, WAIT, COMMUNICATION, CPU = range(6)
"""Of the seconds of an iteration, which the first four add up to; then the all-reduce that ended in it, and for how
long this thread had a core in the passes."""
EXPOSED = 0.05
"""A share of an iteration: if every rank waits for longer, all-reduces follow each other without a pause."""


Laps = list[list[list[float]]]
"""Of one rank: laps, iterations, seconds."""
Lap = NDArray[np.float64]
"""(ranks, iterations, 6)."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """What the ranks' iterations took, in s."""

    parts: dict[str, Range]
    """Of ``PARTS``: means over iterations and ranks, those that are always slow apart."""
    cv: float
    """By how much ranks differ in an iteration: standard deviation over mean of one rank's time."""
    slow_ranks: dict[int, float]
    """Of the ranks that are always slow: median iteration over the median rank's."""
    contention: Range
    hindrances: dict[str, Range]
    """By all-reduce."""
    busy: Range
    """All cores of a machine, with an iteration at a width above 1 without its all-reduce."""


class Training:
    """A model in training on all ranks: synchronous with the first all-reduce, and late with each of them.

    All ranks make one, and call it, together.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        batches: ShardedBatches,
        prediction: str,
        all_reduces: Sequence[str],
        ranks: Ranks,
    ):
        self._config = config
        self._batches = batches
        self._ranks = ranks
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=config.optimization.loss_scale, enabled=config.optimization.precision == "fp16"
        )
        self._strategies = []
        for width, all_reduce in ways(all_reduces):
            own = copy.deepcopy(model).train()
            optimizer = build_optimizer(config.optimization, own)
            self._strategies.append(
                Pipelined(
                    own,
                    optimizer,
                    width=width,
                    prediction=prediction,
                    scaler=self._scaler,
                    all_reduce=all_reduce,
                    ranks=ranks,
                )
            )
        self._paces = [0.0] * len(self._strategies)
        """Seconds of an iteration, so far."""
        self.busy: list[float] = []
        """Of each lap, late with the first all-reduce: seconds of all cores of this machine in an iteration."""
        self.laps: list[Laps] = [[] for _ in self._strategies]
        """By the ways of ``ways``."""

    def lap(self, seconds: float) -> None:
        """Train in each way, for so many seconds together, about, and keep the times."""
        self._ranks.exchange("computation", None)  # all begin together
        share = seconds / len(self._strategies)
        asked = [min(share / pace, MOST_ITERATIONS) if pace else 0.0 for pace in self._paces]
        agreed = np.min(self._ranks.exchange("iterations of a lap", asked), axis=0)
        for number, strategy in enumerate(self._strategies):
            begin, busy = time.perf_counter(), busy_seconds()
            untimed = strategy.width + UNTIMED
            times = self._train(strategy, max(untimed + LEAST_ITERATIONS, int(agreed[number])))
            self._paces[number] = (time.perf_counter() - begin) / len(times)
            if number == 1:
                self.busy.append((busy_seconds() - busy) / len(times))
            self.laps[number].append(times[untimed:])

    def close(self) -> None:
        """End the communication threads."""
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
                times.append([forward, backward, update, wait, report.seconds("communication"), cpu])
        strategy.flush()
        return times


def ways(all_reduces: Sequence[str]) -> list[tuple[int, str]]:
    """Widths and all-reduces that are trained.

    >>> ways(["ring", "native"])
    [(1, 'ring'), (2, 'ring'), (2, 'native')]
    """
    return [(SYNCHRONOUS, all_reduces[0]), *((LATE, name) for name in all_reduces)]


def summarize(
    everybody: Sequence[Sequence[Laps]],
    busy: Sequence[Sequence[float]],
    *,
    t_comms: Mapping[str, float] | None = None,
    late_all_reduce: Callable[..., float],
    carrying: float = 0.0,
    shared_cores: bool = False,
) -> Computation:
    """From every rank's ``Training.laps``.

    With ``shared_cores`` ranks are compared by their CPU time: which of them waits for a core longest is chance.

    Args:
        everybody: of each rank, the laps in each of the ways.
        busy: of each rank, ``Training.busy``.
        t_comms: what each all-reduce of the gradient takes with no computation beside it, in s; none for one rank
            alone.
        late_all_reduce: ``profile.late_all_reduce``, of the same ranks: what the all-reduce takes in an iteration that
            is longer than its computation.
        carrying: for how long the first one keeps all cores busy, in s.
        shared_cores: whether there are more ranks than cores.
    """
    synchronous, *late = (
        [_uninterrupted(np.array(lap)) for lap in zip(*(laps[number] for laps in everybody), strict=True)]
        for number in range(len(everybody[0]))
    )
    totals = np.concatenate([lap[:, :, : UPDATE + 1].sum(axis=2) for lap in synchronous], axis=1)
    compared = np.concatenate([lap[:, :, CPU] for lap in synchronous], axis=1) if shared_cores else totals
    slow = _slow_ranks(compared)
    others = [rank for rank in range(len(everybody)) if rank not in slow]
    synchronous, late = [lap[others] for lap in synchronous], [[lap[others] for lap in laps] for laps in late]
    names = list(t_comms or {})
    times: list[float | None] = list((t_comms or {}).values()) or [None]
    count = len(synchronous)
    busy_laps = np.mean(busy, axis=0)
    cv = _cv(totals)

    def values(laps: list[int]) -> Floats:
        alone, busy = [synchronous[lap] for lap in laps], float(busy_laps[laps].mean())
        within = partial(late_all_reduce, busy=busy, cv=cv, slow_ranks=tuple(slow.values()))
        own, *others = (
            _values(alone, [of_way[lap] for lap in laps], t_comm, within)
            for of_way, t_comm in zip(late, times, strict=False)
        )
        return np.array([max(busy - carrying, 0.0), *own, *(other[-1] for other in others)])

    value = values(list(range(count)))
    # What another calibration would find: by leaving out one lap after the other (jackknife).
    without = [values([lap for lap in range(count) if lap != left]) for left in range(count) if count > 1]
    deviations = np.sqrt((count - 1) * np.var(without, axis=0)) if without else np.zeros(len(value))
    reach = np.sqrt(2) * deviations * T90[min(max(count - 1, 1), len(T90)) - 1]
    ranges = [
        Range(float(middle), max(0.0, float(middle - far)), float(middle + far))
        for middle, far in zip(value, reach, strict=True)
    ]
    all_cores, *found = ranges
    contention, *hindrances = found[len(PARTS) :]
    return Computation(
        parts=dict(zip(PARTS, found, strict=False)),
        cv=cv,
        slow_ranks=slow,
        contention=contention,
        hindrances=dict(zip(names, hindrances, strict=False)),  # none for one rank alone
        busy=all_cores,
    )


def _values(
    synchronous: Sequence[Lap], late: Sequence[Lap], t_comm: float | None, within: Callable[[float, float], float]
) -> Floats:
    """``PARTS``, contention and hindrance, of these laps.

    In a pipeline of width 2 the all-reduce begins just before the update, and the next passes follow:
    ``ComputeTimes.at_width`` the other way round.
    """
    forward, backward, update, *_ = np.concatenate(synchronous, axis=1).mean(axis=(0, 1))
    every_late = np.concatenate(late, axis=1)
    late_forward, late_backward, late_update, wait, *_ = every_late.mean(axis=(0, 1))
    if t_comm is None:
        return np.array([forward, backward, update, late_update, 0.0, 0.0])
    passes, late_passes = forward + backward, late_forward + late_backward
    total = late_passes + late_update + wait
    if every_late[:, :, WAIT].min(axis=0).mean() < EXPOSED * total:
        communication = every_late[:, :, COMMUNICATION].min(axis=0).mean()  # of the rank that waited for no other
    else:
        communication = within(float(total), float(late_passes + late_update))
    beside = np.clip(communication - late_update, LEAST_OVERLAP * late_passes, late_passes)
    lost = np.clip((late_passes - passes) / beside, 0.0, MOST_SLOWED)
    hindered = 0.0
    if communication > t_comm:
        hindered = min((communication - t_comm) / min(late_passes + late_update, communication), MOST_SLOWED)
    late_update -= min(late_update, communication) * lost
    return np.array([forward, backward, update, late_update, lost / (1 - lost), hindered / (1 - hindered)])


def _uninterrupted(lap: Lap) -> Lap:
    totals = lap[:, :, : UPDATE + 1].sum(axis=2)
    kept: Lap = lap[:, (totals <= INTERRUPTED * np.median(totals)).all(axis=0)]
    return kept


def _cv(totals: Floats) -> float:
    """Of (ranks, iterations). What slows all ranks down together makes nobody wait; with one rank, all counts."""
    ranks = len(totals)
    relative = totals / totals.mean(axis=1, keepdims=True)
    if ranks == 1:
        return float(relative.std())
    return float(np.sqrt(np.square(relative - relative.mean(axis=0)).mean() * ranks / (ranks - 1)))


def _slow_ranks(times: Floats) -> dict[int, float]:
    """The factors of the ranks that are slow in every stretch of their iterations; times are (ranks, iterations)."""
    stretches = np.array_split(times, min(STRETCHES, times.shape[1]), axis=1)
    medians = np.array([np.median(one, axis=1) for one in stretches]).T
    factors = medians / np.median(medians, axis=0)
    return {rank: float(np.median(own)) for rank, own in enumerate(factors) if np.all(own > SLOW_RANK)}
