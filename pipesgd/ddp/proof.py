"""Lines of a door on rank 0, when a program begins and ends: what is sent, what was hidden, what DDP would take."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipesgd.codecs.options import CodecOptions
from pipesgd.pipeline.flight import Flight
from pipesgd.process import say
from pipesgd.reducers.dense import DenseReducer
from pipesgd.strategy import Step, Tally
from timing_model.all_reduce import CollectiveTime
from timing_model.gloo import native_all_reduce_time
from timing_model.iteration import ddp_buckets, layerwise_iteration_time
from timing_model.params import FLOAT_BYTES, ComputeTimes, LinkParams
from timing_model.units import format_bytes, format_seconds

QUIET = "PIPESGD_QUIET"
"""Environment variable that silences the lines, if it is set and not empty."""
LEAST_EXCHANGES = 20
"""Number of exchanges below which nothing is said about DDP."""
WIDEST = 2.0
"""Ratio of the ends of the rate's interval above which nothing is said about DDP."""
PERCENTILES = (5, 95)
"""Ends of the intervals of rate and computation."""
EMPTY, FULL = 5, 2
"""Numbers of sums of one value, and of ``PROBED`` ones, when a door is opened."""
PROBED = 1 << 20
"""Most float32 values of an uncompressed sum."""
FORWARD = 1 / 3
"""Share of the forward pass in the computation, of which nothing is measured: a backward pass takes twice as long."""


class Uncompressed(NamedTuple):
    """Times of sums without a codec when a door is opened, the shortest of several, in s."""

    latency: float
    """Time of the sum of one value."""
    byte_seconds: float
    """Time of a byte that a rank sends, without the latency."""


def probe(flight: Flight[Any], numel: int) -> Uncompressed:
    """Return the times of sums of one value, and of ``numel`` or ``PROBED`` float32 values. Collective."""

    def shortest(values: int, times: int) -> float:
        zeros = torch.zeros(values, device=flight.device)

        def timed() -> float:
            begin = time.perf_counter()
            flight.exact(zeros)
            return time.perf_counter() - begin

        return min(flight.meet("Pipelined", 0, timed).result() for _ in range(times))

    values = min(numel, PROBED)
    latency, whole = shortest(1, EMPTY), shortest(values, FULL)
    sent = flight.connections.bytes_sent(FLOAT_BYTES * values)
    return Uncompressed(latency, max(0.0, whole - latency) / sent if sent else 0.0)


class Proof:
    """The lines of a door, on rank 0 alone. All ranks make one together.

    Args:
        how: the method in a few words, such as "width 2".
        flight: the wire half, whose exchanges are counted.
        codec: the codec of the exchanges.
        tally: the reports of all steps.
        parameters: the parameters that are trained, in the order of the forward pass; none if nothing is to be said
            about DDP.
    """

    def __init__(self, how: str, flight: Flight[Any], codec: CodecOptions, tally: Tally, parameters: Sequence[Tensor]):
        self._speaks = flight.ranks.rank == 0 and not os.environ.get(QUIET)
        self._tally = tally
        self._world_size = flight.ranks.world_size
        self._nbytes = [float(one.numel() * one.element_size()) for one in parameters]
        numel = sum(one.numel() for one in parameters)
        compares = parameters and self._world_size > 1 and flight.device.type == "cpu"  # nccl is not modelled
        self._uncompressed = probe(flight, numel) if compares else None
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
        known = self._uncompressed
        if known and (between := ddp_seconds(self._tally, known, self._nbytes, self._world_size)) is not None:
            low, high = map(format_seconds, between)
            text += f"; DDP would take about {low} to {high}, calculated"
        say(text)


def ddp_seconds(
    tally: Tally, uncompressed: Uncompressed, nbytes: Sequence[float], world_size: int
) -> tuple[float, float] | None:
    """Return between which times, in s, an iteration of DDP on gloo would take, by the exchanges of this run.

    The time of a byte is that of this run's exchanges, without the latency, at the 5 and 95 % percentiles; that of
    uncompressed sums counts as the least one if it is less, since the codec's work does not grow with DDP's bytes. With
    this run's computation, at the same percentiles, it is put into the timing model's formula for DDP. It is not known
    when gradients are complete: with the shorter times, all are when the backward pass begins; with the longer ones, as
    in dense layers.
    Returns None if the run has too few exchanges, or if their rates differ too much.

    Args:
        tally: the reports of the run's steps.
        uncompressed: times of sums without a codec.
        nbytes: bytes of each parameter's gradient, in the order of the forward pass.
        world_size: number of ranks.
    """
    totals = tally.totals()
    exchanges: list[Step] = [step for step in tally.recent if step.communication > 0]
    if len(exchanges) < LEAST_EXCHANGES or world_size == 1:
        return None
    sent = totals.wire_bytes / totals.iterations
    transfers = [(step.communication - uncompressed.latency) / sent for step in exchanges]
    fast, slow = np.percentile(transfers, PERCENTILES)
    fast = min(fast, uncompressed.byte_seconds)
    if not 0 < slow <= WIDEST * fast:
        return None
    short, long = np.percentile([step.computing for step in exchanges], PERCENTILES)
    dense = ddp_buckets(nbytes)
    at_once = [(0.0, size) for _, size in dense]

    def iteration(byte_seconds: float, computing: float, buckets: Sequence[tuple[float, float]]) -> float:
        alpha = uncompressed.latency / (2 * (world_size - 1))
        link = LinkParams(alpha=alpha, beta=byte_seconds, gamma=0.0, sync=0.0)
        seconds = [native_all_reduce_time(link, size, world_size) for _, size in buckets]
        collectives = [(share, CollectiveTime(t, t, 0.0)) for (share, _), t in zip(buckets, seconds, strict=True)]
        times = ComputeTimes(update=0.0, forward=FORWARD * computing, backward=(1 - FORWARD) * computing)
        return layerwise_iteration_time(times, collectives).total

    return iteration(float(fast), float(short), at_once), iteration(float(slow), float(long), dense)
