"""What a door says on rank 0 when a program begins and when it ends: what is sent, what was hidden, what DDP would take."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pipesgd.codecs.options import CodecOptions
from pipesgd.pipeline.flight import Flight
from pipesgd.process import say
from pipesgd.reducers.dense import DenseReducer
from pipesgd.strategy import Step, Tally
from timing_model.all_reduce import CollectiveTime
from timing_model.gloo import native_all_reduce_time
from timing_model.iteration import ddp_buckets, layerwise_iteration_time
from timing_model.params import ComputeTimes, LinkParams
from timing_model.units import format_bytes, format_seconds

QUIET = "PIPESGD_QUIET"
"""Environment variable that silences the lines, if it is set and not empty."""
LEAST_EXCHANGES = 20
"""Number of exchanges below which nothing is said about DDP."""
WIDEST = 2.0
"""Ratio of the ends of the rate's interval above which nothing is said about DDP."""
PERCENTILES = (5, 95)
"""Ends of the intervals of rate and computation."""
FORWARD = 1 / 3
"""Share of the forward pass in the computation, of which nothing is measured: a backward pass takes twice as long."""


class Proof:
    """The lines of a door, on rank 0 alone.

    Args:
        how: the method in a few words, such as "width 2".
        flight: the wire half, whose exchanges are counted.
        codec: the codec of the exchanges.
        tally: the reports of all steps.
        parameters: the parameters that are trained, in the order of the forward pass; none if nothing is to be said
            about DDP.
    """

    def __init__(self, how: str, flight: Flight, codec: CodecOptions, tally: Tally, parameters: Sequence[Tensor]):
        self._speaks = flight.ranks.rank == 0 and not os.environ.get(QUIET)
        self._tally = tally
        self._world_size = flight.ranks.world_size
        self._nbytes = [float(one.numel() * one.element_size()) for one in parameters]
        if not self._speaks:
            return
        ranks = f"{self._world_size} rank{'s' if self._world_size > 1 else ''}"
        sent = tally.uncompressed_bytes
        text = f"pipesgd: {how}, {codec.describe()}, {ranks}, {format_bytes(sent)} an exchange"
        if isinstance(flight.reducer, DenseReducer):  # others send what depends on shapes or values
            encoder = codec.make()
            share = encoder.wire_bytes(1000 * encoder.block) / (4000 * encoder.block)
            text += f" -> {format_bytes(share * sent)}"
        say(text)

    def end(self) -> None:
        """Say what the exchanges have cost, once."""
        if not self._speaks:
            return
        self._speaks = False
        totals = self._tally.totals()
        if totals.iteration_seconds is None or totals.hidden_share is None:
            return
        text = (
            f"pipesgd: {totals.hidden_share:.0%} of the communication hidden; an iteration "
            f"{format_seconds(totals.iteration_seconds)}, of which {format_seconds(totals.waiting_seconds)} waiting"
        ).replace("%", " %")
        if self._nbytes and (between := ddp_seconds(self._tally, self._nbytes, self._world_size)) is not None:
            low, high = map(format_seconds, between)
            text += f"; DDP would take about {low} to {high}, calculated"
        say(text)


def ddp_seconds(tally: Tally, nbytes: Sequence[float], world_size: int) -> tuple[float, float] | None:
    """Return between which times, in s, an iteration of DDP on gloo would take, by the exchanges of this run.

    A rate is fitted to the bytes that this rank has sent and the durations of its exchanges, and put with this run's
    computation into the timing model's formula for DDP; the ends are those at the 5 and 95 % percentiles of both.
    Returns None if the run has too few exchanges, or if they have too different rates.

    Args:
        tally: the reports of the run's steps.
        nbytes: bytes of each parameter's gradient, in the order of the forward pass.
        world_size: number of ranks.
    """
    totals = tally.totals()
    exchanges: list[Step] = [step for step in tally.recent if step.communication > 0]
    if len(exchanges) < LEAST_EXCHANGES or world_size == 1:
        return None
    sent = totals.wire_bytes / totals.iterations
    fast, slow = np.percentile([step.communication / sent for step in exchanges], PERCENTILES)
    if slow > WIDEST * fast:
        return None
    short, long = np.percentile([step.computing for step in exchanges], PERCENTILES)
    low, high = (
        _ddp_iteration(float(beta), float(computing), nbytes, world_size)
        for beta, computing in ((fast, short), (slow, long))
    )
    return low, high


def _ddp_iteration(beta: float, computing: float, nbytes: Sequence[float], world_size: int) -> float:
    """Return the time of an iteration of DDP, in s, at ``beta`` s a byte."""
    link = LinkParams(alpha=0.0, beta=beta, gamma=0.0, sync=0.0)
    buckets = []
    for share, size in ddp_buckets(nbytes):
        seconds = native_all_reduce_time(link, size, world_size)
        buckets.append((share, CollectiveTime(seconds, seconds, 0.0)))
    times = ComputeTimes(update=0.0, forward=FORWARD * computing, backward=(1 - FORWARD) * computing)
    return layerwise_iteration_time(times, buckets).total
