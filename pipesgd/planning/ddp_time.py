"""The time of an iteration of DDP, calculated from the exchanges of a run that is not DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipesgd.strategy import Step, Tally
from timing_model.all_reduce import CollectiveTime
from timing_model.gloo import native_all_reduce_time
from timing_model.iteration import ddp_buckets, layerwise_iteration_time
from timing_model.params import ComputeTimes, LinkParams

LEAST_EXCHANGES = 20
"""Number of exchanges below which nothing is said about DDP, and of blocks of longer runs: single exchanges differ by
more than the iterations of which DDP's time is the median."""
WIDEST = 2.0
"""Ratio of the ends of the rate's interval above which nothing is said about DDP."""
PERCENTILES = (5, 95)
"""Ends of the intervals of rate and computation."""
FORWARD = 1 / 3
"""Share of the forward pass in the computation, of which nothing is measured: a backward pass takes twice as long."""


class Uncompressed(NamedTuple):
    """Times of sums without a codec when a door is opened, the shortest of several, in s."""

    latency: float
    """Time of the sum of one value."""
    byte_seconds: float
    """Time of a byte that a rank sends, without the latency."""


def ddp_seconds(
    tally: Tally, uncompressed: Uncompressed, nbytes: Sequence[float], world_size: int
) -> tuple[float, float] | str:
    """Return between which times, in s, an iteration of DDP on gloo would take, by the exchanges of this run.

    The time of a byte is that of this run's exchanges, without the latency, as the medians of blocks of neighbours and
    of these the 5 and 95 % percentiles; that of uncompressed sums counts as the least one if it is less, since the
    codec's work does not grow with DDP's bytes. With this run's computation, at the same percentiles, it is put into
    the timing model's formula for DDP. It is not known when gradients are complete: with the shorter times, all are
    when the backward pass begins; with the longer ones, as in dense layers.
    Returns the reason why nothing can be said if the run has too few exchanges, or if their rates differ too much.

    Args:
        tally: the reports of the run's steps.
        uncompressed: times of sums without a codec.
        nbytes: bytes of each parameter's gradient, in the order of the forward pass.
        world_size: number of ranks.
    """
    totals = tally.totals()
    exchanges: list[Step] = [step for step in tally.recent if step.communication > 0]
    if len(exchanges) < LEAST_EXCHANGES:
        return f"there were fewer than {LEAST_EXCHANGES} exchanges"
    sent = totals.wire_bytes / totals.iterations
    transfers = [(step.communication - uncompressed.latency) / sent for step in exchanges]
    fast, slow = _between(transfers)
    fast = min(fast, uncompressed.byte_seconds)
    if not 0 < slow <= WIDEST * fast:
        return f"the rates of exchanges differ by more than {WIDEST:g} times"
    short, long = _between([step.computing for step in exchanges])
    dense = ddp_buckets(nbytes)
    at_once = [(0.0, size) for _, size in dense]

    def iteration(byte_seconds: float, computing: float, buckets: Sequence[tuple[float, float]]) -> float:
        alpha = uncompressed.latency / (2 * (world_size - 1))
        link = LinkParams(alpha=alpha, beta=byte_seconds, gamma=0.0, sync=0.0)
        seconds = [native_all_reduce_time(link, size, world_size) for _, size in buckets]
        collectives = [(share, CollectiveTime(t, t, 0.0)) for (share, _), t in zip(buckets, seconds, strict=True)]
        times = ComputeTimes(update=0.0, forward=FORWARD * computing, backward=(1 - FORWARD) * computing)
        return layerwise_iteration_time(times, collectives).total

    return iteration(fast, short, at_once), iteration(slow, long, dense)


def _between(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the percentiles of the medians of ``LEAST_EXCHANGES`` blocks of neighbours."""
    low, high = np.percentile([np.median(block) for block in np.array_split(seconds, LEAST_EXCHANGES)], PERCENTILES)
    return float(low), float(high)
