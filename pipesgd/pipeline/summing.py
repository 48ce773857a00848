"""Sums over the ranks, computed by a thread of its own while the caller computes gradients."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from pipesgd.codecs.options import CodecOptions
from pipesgd.comm.connections import Connections
from pipesgd.comm.thread import CLOSE_SECONDS, CommunicationThread
from pipesgd.flat_buffer import BucketedBuffer, FlatBuffer, all_finite, finite_norm
from pipesgd.pipeline.in_flight import Outgoing, Reduction
from pipesgd.pipeline.islands import Island
from pipesgd.ranks import Ranks
from pipesgd.reducers.base import Undo, as_real, mean_over_ranks
from pipesgd.reducers.make import GATHERING, make_gathering_reducer, make_reducer
from pipesgd.replicas import sum_buffer
from pipesgd.strategy import Comparison, Span

T = TypeVar("T")


class Summing:
    """Means of gradients over the ranks, each bucket by its own exchange, and exact sums of anything else.

    ``start`` must be called once before any sum. Sums are computed in the order in which they are asked for.

    Args:
        ranks: the ranks that have the same parameters.
        island: the ranks that hold one replica of the model together with this one; None if it does so alone.
        device: device of the gradients.
    """

    def __init__(self, ranks: Ranks, island: Island | None, device: torch.device):
        self._ranks = ranks
        self._island = island
        self._device = device
        self._connections: Connections | None = None
        self.thread = CommunicationThread(device)
        self._stop_watching: Callable[[], None] = lambda: None

    @property
    def connections(self) -> Connections:
        """Connections to the ranks; there are none before ``start``."""
        assert self._connections is not None
        return self._connections

    def watch(self) -> None:
        """End all waits when another rank is lost, from now until ``stop_watching``."""
        self._stop_watching = self._ranks.watch(self.thread.fail)

    def start(
        self,
        connections: Connections,
        options: CodecOptions,
        *,
        gathered: Collection[str],
        seed: int,
        skips: bool,
    ) -> None:
        """Make what sums gradients: whole ones with the codec of these ``options``. Collective.

        Buckets of the exchanges ``gathered`` are gathered. The ``connections`` are closed with this. With ``skips``, a
        gradient whose mean is not finite is to be left out: nothing of it stays in the state of the sums, of which
        copies are kept for that.

        Raises:
            CommunicationError: a rank was lost.
            UserInputError: the codec cannot be made.
        """
        self._connections = connections
        if self._island is not None:
            self._island.connect()
        self.exact = self.connections.all_reduce()
        self.reducer = make_reducer(options, self.connections, device=self._device.type, seed=seed)
        self._undo = Undo() if skips else None
        kinds = [kind for kind in GATHERING if kind in gathered]
        self._gathering = {kind: make_gathering_reducer(kind, self.connections) for kind in kinds}

    def meet(self, call: str, iteration: int, job: Callable[[], T]) -> Future[T]:
        """Have the thread do ``job`` after sending a header that says that this rank is at ``call``."""
        return self.thread.submit(functools.partial(self.connections.run, call, iteration, job))

    def sum_exactly(self, buffer: FlatBuffer) -> None:
        """Replace the values of ``buffer`` by their sums over the ranks, uncompressed. Collective, on the thread."""
        sum_buffer(buffer, self.exact)

    def take_mean(self, outgoing: Outgoing, number: int, exchange: str, *, looks: bool) -> None:
        """Replace a bucket's gradients by their mean over the ranks. Collective, on the thread.

        Args:
            outgoing: the gradient.
            number: number of its bucket.
            exchange: how the bucket is exchanged.
            looks: whether to look if this rank's own gradients are finite: here, during the computation, and not in the
                caller's thread.
        """
        start = time.perf_counter()
        self._take_mean(outgoing, number, exchange, looks=looks)
        outgoing.sums.append(Span("communication", outgoing.iteration, start, time.perf_counter()))

    def take_last_mean(
        self,
        outgoing: Outgoing,
        number: int,
        exchange: str,
        compare: Callable[[], Comparison | None],
        *,
        looks: bool,
        agreed_norm: bool,
    ) -> Reduction:
        """Take the mean of a gradient's last bucket, and report on the whole mean. Collective, on the thread.

        Args:
            outgoing: the gradient.
            number: number of its last bucket.
            exchange: how the bucket is exchanged.
            compare: function that compares the mean with this rank's guess.
            looks: see ``take_mean``.
            agreed_norm: whether the mean's norm must be the same bits on all ranks, whatever processors they have.
        """
        start = time.perf_counter()
        self._take_mean(outgoing, number, exchange, looks=looks)
        # Parts arrive in another order on every rank.
        of_finite = sorted(norm for norm in outgoing.norms if norm is not None)
        finite = len(of_finite) == len(outgoing.norms)
        if self._island is not None:
            self._island.begin(outgoing.iteration)
            agree = self._agreed if agreed_norm else _as_it_is
            finite, norm = self._island.finite_norm(finite, outgoing.buffer.views, agree)
        else:
            norm = self._agreed_norm(outgoing.buffer) if agreed_norm else math.hypot(*of_finite)
        if self._undo is not None:
            self._undo.end(put_back=not finite)  # before the next gradient, which the ranks sum after this one
        comparison = compare()
        outgoing.sums.append(Span("communication", outgoing.iteration, start, time.perf_counter()))
        return Reduction(finite, outgoing.sums, comparison, norm, outgoing.gathered_bytes)

    def _take_mean(self, outgoing: Outgoing, number: int, exchange: str, *, looks: bool) -> None:
        bucket = outgoing.buffer.buckets[number]
        if looks:
            outgoing.own_finite.append(all_finite(bucket))

        def look(part: Tensor) -> None:
            outgoing.norms.append(finite_norm(part))

        gathering = self._gathering.get(exchange)
        if gathering is not None:
            gathering.parts, outgoing.parts = outgoing.parts, ()  # which the gradient in flight would keep
        elif self._undo is not None:
            self._undo.keep(number, self.reducer.state(bucket))
        world_size = self._ranks.world_size
        mean_over_ranks(gathering or self.reducer, bucket, outgoing.iteration, world_size, look)
        if gathering is not None:
            outgoing.gathered_bytes += gathering.bytes_sent

    def _agreed_norm(self, buffer: BucketedBuffer) -> float:
        """Return the mean's norm, bit-identical on all ranks, whatever processors they have. Collective."""
        norms = [torch.linalg.vector_norm(as_real(flat), dtype=torch.float64) for flat in buffer.flats]
        return math.sqrt(self._agreed(torch.stack(norms).square().sum()).item())

    def _agreed(self, number: Tensor) -> Tensor:
        """Return the mean of the ranks' numbers, which are about the same: the same bits on all of them. Collective."""
        total = number.reshape(1)
        self.exact(total)
        return total / self._ranks.world_size

    def wait_for_all(self) -> None:
        """Return when no rank has a message for another one any more. On the thread; see ``Connections``."""
        self.connections.wait_for_all()
        if self._island is not None:
            self._island.wait_for_all()

    def stop_watching(self) -> None:
        """No longer fail when another rank does."""
        self._stop_watching()

    def close(self, *, together: bool) -> None:
        """End the thread, and with it the connections.

        With ``together``, all ranks have come to this point, and all sums are waited for.
        """
        # Peers may still read what this rank has sent them: the connections end when all have come to this point.
        # Not a method: the thread would refer to what refers to it.
        ended = [self._connections.close] if self._connections is not None else []
        if self._island is not None:
            ended.append(self._island.close)
        at_the_end = functools.partial(_call_all, ended)
        self.thread.close(at_the_end=at_the_end, within=None if together else CLOSE_SECONDS)


def _as_it_is(number: Tensor) -> Tensor:
    return number


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
