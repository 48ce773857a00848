"""Paired measurements: contenders take turns in every round, and only times of one round are compared.

The speed of a shared machine drifts by more than the differences that matter here. A round is short
compared with that drift, so the ratio of two times of the same round is free of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

T = TypeVar("T")
Seconds = NDArray[np.float64]
"""Times of one contender in seconds, (rounds,)."""

Contender = Callable[[], float]
"""Function that prepares and does the compared work, and returns the seconds of this rank's timed part."""

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Ratio of a contender's time to the baseline's: the median over rounds, and its 95 % interval."""

    median: float
    low: float
    high: float


def turns(contenders: Sequence[T], index: int) -> list[T]:
    """Return the contenders in the order of round ``index``: each comes first equally often.

    >>> turns("abc", 0), turns("abc", 1)
    (['a', 'b', 'c'], ['b', 'c', 'a'])
    """
    first = index % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def slowest(seconds: Sequence[float]) -> Seconds:
    """Return the time of the slowest rank in every round, the same on all ranks. Collective."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.numpy()


def interleave(
    contenders: Mapping[str, Contender],
    rounds: int,
    *,
    warm_up: int = 0,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, Seconds]:
    """Return each contender's times on the slowest rank in ``rounds`` rounds, after ``warm_up`` rounds. Collective."""
    seconds = interleave_here(contenders, rounds, warm_up=warm_up, after_round=after_round)
    return {name: slowest(times) for name, times in seconds.items()}


def interleave_here(
    contenders: Mapping[str, Contender],
    rounds: int,
    *,
    warm_up: int = 0,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Return each contender's times on this rank alone in ``rounds`` rounds, after ``warm_up`` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(warm_up + rounds):
        for name in turns(list(contenders), index):
            seconds[name].append(contenders[name]())
        after_round()
    return {name: times[warm_up:] for name, times in seconds.items()}


def round_seconds(contenders: Mapping[str, Contender]) -> float:
    """Return the seconds of one round, preparations included, the same on all ranks. Collective."""
    begin = time.perf_counter()
    interleave(contenders, rounds=1)
    return float(slowest([time.perf_counter() - begin])[0])


def median(seconds: Sequence[float] | Seconds) -> float:
    """Return the median, in seconds."""
    return float(np.median(seconds))


def interquartile_range(seconds: Sequence[float] | Seconds) -> float:
    """Return the spread of the middle half, in seconds."""
    low, high = np.percentile(seconds, [25, 75])
    return float(high - low)


def paired_ratio(seconds: Sequence[float] | Seconds, baseline: Sequence[float] | Seconds) -> Ratio:
    """Return the median over rounds of ``seconds / baseline``, with a percentile bootstrap interval.

    With fewer than six rounds, that is the range of the ratios, which holds the median of all possible rounds less
    often than in 95 of 100 cases: with five rounds in 94, with three in 75. Rounds are resampled with replacement, from
    a fixed seed. Raises ``ValueError`` unless both have equally many.
    """
    times, against = np.asarray(seconds, float), np.asarray(baseline, float)
    if times.shape != against.shape or times.ndim != 1 or not times.size:
        raise ValueError(f"paired times must be of the same rounds; got shapes {times.shape} and {against.shape}")
    ratios = times / against
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, ratios.size))  # (resamples, rounds)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def ratio_columns(name: str, ratio: Ratio | None) -> dict[str, float | None]:
    """Return a ratio as columns of a table, ``name`` and _median, _low and _high; None where there is no ratio."""
    return {f"{name}_{field}": None if ratio is None else getattr(ratio, field) for field in ("median", "low", "high")}
