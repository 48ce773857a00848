"""Lines of a door on rank 0, when a program begins and ends: what is sent, what was hidden, what DDP would take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesgd.codecs.options import CodecOptions
from pipesgd.pipeline.flight import Flight
from pipesgd.planning.ddp_time import Uncompressed, ddp_seconds
from pipesgd.process import QUIET, say
from pipesgd.reducers.dense import DenseReducer
from pipesgd.strategy import Tally
from timing_model.units import format_bytes, format_seconds

EMPTY, FULL = 5, 2
"""Numbers of sums of one value, and of ``PROBED`` ones, when a door is opened."""
PROBED = 1 << 20
"""Most float32 values of an uncompressed sum."""


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
    sent = flight.connections.bytes_sent(torch.float32.itemsize * values)
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
        accuracy: function that returns the line on accuracy, given ``width`` and ``iterations``; None if there is none.
        width: the width at which gradients are late.
        hides: False for a method that waits for each mean.
    """

    def __init__(
        self,
        how: str,
        flight: Flight[Any],
        codec: CodecOptions,
        tally: Tally,
        parameters: Sequence[Tensor],
        accuracy: Callable[..., str | None] | None = None,
        width: int = 1,
        *,
        hides: bool = True,
    ):
        self._accuracy, self._width = accuracy, width
        self._hides = hides
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

    def end(self, iterations: int) -> None:
        """Say what the exchanges have cost, once; ``iterations`` are all of the training, also before a restart."""
        if not self._speaks:
            return
        self._speaks = False
        totals = self._tally.totals()
        if totals.iteration_seconds is None or totals.hidden_share is None:
            return
        hidden = f"{totals.hidden_share:.0%} of the communication hidden; ".replace("%", " %")
        text = (
            f"pipesgd: {hidden if self._hides else ''}an iteration {format_seconds(totals.iteration_seconds)}, of "
            f"which {format_seconds(totals.waiting_seconds)} waiting"
        )
        if self._width > 1:
            text += f"; {totals.late} of {totals.iterations} gradients were late"
        if sums := self._uncompressed:
            found = ddp_seconds(self._tally, sums, self._nbytes, self._world_size)
            if isinstance(found, str):
                text += f"; what DDP would take is not calculated, as {found}"
            else:
                low, high = map(format_seconds, found)
                text += f"; DDP would take about {low} to {high}, calculated"
        say(text)
        if self._accuracy is not None:
            known = self._accuracy(width=self._width if totals.late else 1, iterations=iterations)
            if known is not None:
                say(f"pipesgd: {known}")
