"""The wire half of a pipeline whose ranks may be lost: each sum is a unit, which those who remain do again."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipesgd.comm.thread import CLOSE_SECONDS, CommunicationThread
from pipesgd.elastic.letters import Result
from pipesgd.elastic.ranks import ElasticRanks
from pipesgd.elastic.units import Unit
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.pipeline.flight import Flight
from pipesgd.pipeline.in_flight import Known, Outgoing, Reduction
from pipesgd.ranks import Ranks
from pipesgd.reducers.base import Undo
from pipesgd.reducers.dense import DenseReducer
from pipesgd.replicas import sum_buffer
from pipesgd.strategy import Comparison

T = TypeVar("T")


class ElasticFlight(Flight[Known]):
    """Gradients on their way between members of which some may be lost; see ``Flight``.

    A bucket's sum is destroyed in its buffer if it is interrupted, so the bucket and what the codec has left out of
    earlier sums are copied before. Where a survivor has the mean, the others get it encoded, as it was on the wire.
    """

    ranks: ElasticRanks
    reducer: DenseReducer

    def _make_thread(self) -> CommunicationThread:
        self._copies = Undo()
        self._kept: dict[int, list[Tensor]] = {}
        """Newest result of each bucket, by the bucket's number."""
        self._handed_over: list[dict[int, Tensor]] = []
        """Values left out of sums that the last member's next gradient gets, since it sums nothing any more."""
        self._is_connected = False
        return self.ranks.units.thread

    def _connect(self, ranks: Ranks) -> None:
        units = self.ranks.units
        units.on_change = self._on_change
        units.reconnect()
        units.call(lambda ranks: None)

    def _on_change(self, ranks: Ranks) -> None:
        """Connect to the ranks of a generation, and end the connections of the one before."""
        if hasattr(self, "connections"):
            for functions, one in (
                (self._ends.closing, self.connections.close),
                (self._ends.aborting, self.connections.abort),
            ):
                if one in functions:
                    functions.remove(one)  # type: ignore[arg-type]
            self.connections.close()
        if self._is_connected:
            self._connect_to(ranks)
            self.reducer.reconnect(self.connections.all_reduce(self._codec.make(self.device.type)))
        else:
            super()._connect(ranks)
            assert isinstance(self.reducer, DenseReducer), "others were refused"
            self._is_connected = True
        self.ranks.units.abort = self.connections.abort
        if ranks.world_size == 1 and (left_out := self.reducer.state_dict()["residuals"]):
            self._handed_over.append(dict(enumerate(left_out)))
            self.reducer.load_state_dict({"residuals": []})

    def next_outgoing(self, iteration: int) -> Outgoing:
        while self._handed_over:
            self._carry(self._handed_over.pop())
        return super().next_outgoing(iteration)

    # ---- Units

    def meet(self, call: str, iteration: int, job: Callable[[], T]) -> Future[T]:
        self._flush = None
        return self._submit(Unit(lambda ranks: self.connections.run(call, iteration, job)))

    def _meet_for_mean(
        self, call: str, outgoing: Outgoing, number: int, compare: Callable[[], Comparison | None] | None = None
    ) -> Future[Any]:
        return self._submit(_Bucket(self, call, outgoing, number, compare))

    def _sum(self, call: str, iteration: int, buffer: FlatBuffer) -> None:
        before = self.ranks.record
        _, record = self.ranks.units.submit(_Buffer(self, call, iteration, buffer)).result()
        self.ranks.see(record)
        self.ranks.check_same_since(before)

    def _submit(self, unit: Unit[T]) -> Future[T]:
        units = self.ranks.units
        return self.thread.submit(lambda: units.run(unit)[0])

    def wait_until_summed(self) -> None:
        self.thread.submit(lambda: None).result()

    def close(self, *, together: bool) -> None:
        """End the connections; the thread continues, since exchanges of values may follow."""
        units = self.ranks.units
        atexit.unregister(self._ends.end_unclosed)
        units.on_change = None
        units.abort = lambda error: None
        if self.thread.failed:
            self._end_connections()
        else:
            self._flush = None
            with contextlib.suppress(TimeoutError):
                self.thread.submit(self._end_connections).result(None if together else CLOSE_SECONDS)

    def _end_connections(self) -> None:
        for one in self._ends.closing:
            one()


class _Buffer(Unit[None]):
    """The exact sum of a buffer."""

    def __init__(self, flight: ElasticFlight[Any], call: str, iteration: int, buffer: FlatBuffer):
        super().__init__(
            lambda ranks: flight.connections.run(call, iteration, lambda: sum_buffer(buffer, flight.exact))
        )
        self._flats = buffer.flats
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        self._copies = [flat.clone() for flat in self._flats]

    def put_back(self) -> None:
        for flat, copy in zip(self._flats, self._copies, strict=True):
            flat.copy_(copy)

    def result(self, value: None) -> Result:
        return Result(None, [_bytes_of(flat.clone()) for flat in self._flats])

    def take(self, result: Result) -> None:
        for flat, part in zip(self._flats, result.parts, strict=True):
            flat.view(torch.uint8).copy_(_tensor_of(part))


class _Bucket(Unit[Any]):
    """The mean of a bucket of a gradient."""

    def __init__(
        self,
        flight: ElasticFlight[Any],
        call: str,
        outgoing: Outgoing,
        number: int,
        compare: Callable[[], Comparison | None] | None,
    ):
        job = flight._mean_of(outgoing, number, compare)
        super().__init__(lambda ranks: flight.connections.run(call, outgoing.iteration, job))
        self._flight, self._outgoing, self._number, self._compare = flight, outgoing, number, compare
        self._bucket = outgoing.buffer.buckets[number]
        self._start = time.perf_counter()
        self._norms_before = 0

    @property
    def settles(self) -> int | None:
        return None if self._compare is None else self._outgoing.iteration + 1

    def keep(self) -> None:
        flight = self._flight
        self._start = time.perf_counter()
        self._norms_before = len(self._outgoing.norms)
        if flight.ranks.units.ranks.world_size > 1:  # else nobody is left who could be lost
            state = flight.reducer.state(self._bucket) if flight._is_connected else []
            flight._copies.keep(self._number, [*self._bucket.flats, *state])

    def put_back(self) -> None:
        self._flight._copies.end(put_back=True)
        del self._outgoing.norms[self._norms_before :]
        self.keep()

    def result(self, value: Any) -> Result:
        flight = self._flight
        flight._copies.end(put_back=False)
        text: list[Any] = [self._outgoing.norms[self._norms_before :]]
        if isinstance(value, Reduction):
            text += [value.finite, value.norm]
        if flight.ranks.units.ranks.world_size == 1:
            return Result(text)
        found = flight.reducer.result(self._bucket)
        kept = flight._kept.get(self._number)
        if kept is None or [one.shape for one in kept] != [one.shape for one in found]:
            kept = flight._kept[self._number] = [torch.empty_like(one) for one in found]
        for target, origin in zip(kept, found, strict=True):
            target.copy_(origin)
        return Result(text, [_bytes_of(one) for one in kept])

    def take(self, result: Result) -> Any:
        flight, outgoing = self._flight, self._outgoing
        flight._copies.end(put_back=False)  # whoever completes a ring knows that all have encoded all they had to
        norms, *report = result.text
        ranks = flight.connections.ranks.world_size
        flight.reducer.take_result(self._bucket, [_tensor_of(part) for part in result.parts], ranks)
        outgoing.norms[self._norms_before :] = norms
        if self._compare is None:
            return None
        finite, norm = report
        return flight._reduction(outgoing, finite, norm, self._start, self._compare)


def _bytes_of(tensor: Tensor) -> memoryview:
    found: memoryview = tensor.cpu().view(torch.uint8).numpy().data
    return found


def _tensor_of(part: memoryview | bytes) -> Tensor:
    return torch.frombuffer(bytearray(part), dtype=torch.uint8)
