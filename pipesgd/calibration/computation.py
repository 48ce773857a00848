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
from timing_model.measured import Estimate

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

    parts: dict[str, Estimate]
    """Of ``PARTS``: means over iterations and ranks, those that are always slow apart."""
    cv: float
    """By how much ranks differ in an iteration: standard deviation over mean of one rank's time."""
    slow_ranks: dict[int, float]
    """Of the ranks that are always slow: median iteration over the median rank's."""
    contention: Estimate
    codec_contention: Estimate
    """Beside an all-reduce that is compressed."""
    hindrances: dict[str, Estimate]
    """By all-reduce."""


class Way(NamedTuple):
    """How a model is trained to be timed."""

    width: int
    all_reduce: str
    codec: str


class LateIteration(Protocol):
    """What the parts of a late iteration take, in s, if all of it, and the other part, take so long."""

    def all_reduce(self, total: float, computation: float) -> float: ...

    def computation(self, total: float, all_reduce: float) -> float: ...


class Training:
    """A model in training on all ranks, in several ways. All ranks make one, and call it, together."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        batches: ShardedBatches,
        prediction: str,
        ways: Sequence[Way],
        ranks: Ranks,
    ):
        self._config = config
        self._batches = batches
        self._ranks = ranks
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=config.optimization.loss_scale, enabled=config.optimization.precision == "fp16"
        )
        self._strategies = []
        for way in ways:
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
        """Seconds of an iteration, so far."""
        self.laps: list[Laps] = [[] for _ in self._strategies]
        """By way."""

    def lap(self, seconds: float) -> None:
        """Train in each way, for so many seconds together, about, and keep the times."""
        self._ranks.exchange("computation", None)  # all begin together
        share = seconds / len(self._strategies)
        asked = [min(share / pace, MOST_ITERATIONS) if pace else 0.0 for pace in self._paces]
        agreed = np.min(self._ranks.exchange("iterations of a lap", asked), axis=0)
        for number, strategy in enumerate(self._strategies):
            begin = time.perf_counter()
            untimed = strategy.width + UNTIMED
            times = self._train(strategy, max(untimed + LEAST_ITERATIONS, int(agreed[number])))
            self._paces[number] = (time.perf_counter() - begin) / len(times)
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


def ways(all_reduces: Sequence[str], codecs: Sequence[str]) -> list[Way]:
    """Synchronous with the first all-reduce, late with each of them, and late with the first one and a codec, if one
    is to be measured: beside it the computation is the limit more often, and not as fast as where it waits.

    >>> [tuple(way) for way in ways(["ring", "native"], ["bf16", "int8"])]
    [(1, 'ring', 'fp32'), (2, 'ring', 'fp32'), (2, 'native', 'fp32'), (2, 'ring', 'int8')]
    """
    compressed = [TYPICAL_CODEC] if TYPICAL_CODEC in codecs else codecs[:1]
    return [
        Way(SYNCHRONOUS, all_reduces[0], UNCOMPRESSED),
        *(Way(LATE, name, UNCOMPRESSED) for name in all_reduces),
        *(Way(LATE, all_reduces[0], name) for name in compressed),
    ]


def summarize(
    everybody: Sequence[Sequence[Laps]],
    *,
    t_comms: Mapping[str, float],
    t_compressed: float,
    late_iteration: Callable[[int, float, tuple[float, ...]], LateIteration],
    shared_cores: bool = False,
) -> Computation:
    """From every rank's ``Training.laps``.

    With ``shared_cores`` ranks are compared by their CPU time: which of them waits for a core longest is chance.

    Args:
        everybody: of each rank, the laps in each of the ways of ``ways``.
        t_comms: what each all-reduce of the gradient takes with no computation beside it, in s.
        t_compressed: the same of the first one with a codec.
        late_iteration: ``profile.LateIteration``.
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
    count, cv = len(synchronous), _cv(totals)
    model = late_iteration(len(everybody), cv, tuple(slow.values()))

    def values(laps: list[int]) -> Floats:
        alone, *beside = (np.concatenate([way[lap] for lap in laps], axis=1) for way in (synchronous, *late))
        return _values(alone, beside, list(t_comms.values()), t_compressed, model)

    value = values(list(range(count)))
    # What another calibration would find: by leaving out one lap after the other (jackknife).
    without = [values([lap for lap in range(count) if lap != left]) for left in range(count) if count > 1]
    deviations = np.sqrt((count - 1) * np.var(without, axis=0)) if without else np.zeros(len(value))
    reach = np.sqrt(2) * deviations * T90[min(max(count - 1, 1), len(T90)) - 1]
    found = [
        Estimate(float(middle), max(0.0, float(middle - far)), float(middle + far))
        for middle, far in zip(value, reach, strict=True)
    ]
    contention, codec_contention, *hindrances = found[len(PARTS) :]
    return Computation(
        parts=dict(zip(PARTS, found, strict=False)),
        cv=cv,
        slow_ranks=slow,
        contention=contention,
        codec_contention=codec_contention,
        hindrances=dict(zip(t_comms, hindrances, strict=True)),
    )


def _values(
    synchronous: Lap, late: Sequence[Lap], t_comms: Sequence[float], t_compressed: float, model: LateIteration
) -> Floats:
    """``PARTS``, contentions and hindrances, of these iterations: ``ComputeTimes.at_width`` the other way round.

    In a pipeline of width 2 the all-reduce begins just before the update, and the next passes follow.
    """
    uncompressed, compressed = late[: len(t_comms)], late[len(t_comms) :]
    forward, backward, update, *_ = synchronous.mean(axis=(0, 1))
    all_reduces = np.array([_all_reduce(way, model) for way in uncompressed])
    hindered = [
        min(1 - t_comm / all_reduce, MOST_SLOWED) if all_reduce > t_comm else 0.0
        for all_reduce, t_comm in zip(all_reduces, t_comms, strict=True)
    ]
    # 1. What the passes lose where they wait for the all-reduce: of all of them together, since one alone is noise.
    late_passes = np.array([way[:, :, : BACKWARD + 1].sum(axis=2).mean() for way in uncompressed])
    late_updates = np.array([way[:, :, UPDATE].mean() for way in uncompressed])
    beside = np.clip(all_reduces - late_updates, LEAST_OVERLAP * late_passes, late_passes)
    lost = float(np.clip((late_passes - forward - backward).sum() / beside.sum(), 0.0, MOST_SLOWED))
    late_update = (late_updates - lost * np.minimum(late_updates, all_reduces)).mean()

    # 2. What all of the computation does where it is the limit, in which case ranks wait for each other, too.
    def lost_of(way: Lap, all_reduce: float, otherwise: float) -> float:
        total = float(way[:, :, : WAIT + 1].sum(axis=2).mean())
        if total < (1 + EXPOSED) * all_reduce:
            return otherwise
        computation = model.computation(total, all_reduce)
        shared = np.clip(all_reduce, LEAST_OVERLAP * computation, computation)
        return float(np.clip((computation - forward - backward - late_update) / shared, 0.0, MOST_SLOWED))

    own = lost_of(uncompressed[0], float(all_reduces[0]), lost)
    with_codec = lost_of(compressed[0], t_compressed / (1 - hindered[0]), own) if compressed else own
    shares = np.array([own, with_codec, *hindered])
    return np.array([forward, backward, update, late_update, *(shares / (1 - shares))])


def _all_reduce(late: Lap, model: LateIteration) -> float:
    """What the all-reduce takes beside the computation."""
    forward, backward, update, wait, *_ = map(float, late.mean(axis=(0, 1)))
    computed = forward + backward + update
    if late[:, :, WAIT].min(axis=0).mean() < EXPOSED * (computed + wait):
        return float(late[:, :, COMMUNICATION].min(axis=0).mean())  # of the rank that waited for no other
    return model.all_reduce(computed + wait, computed)


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
