"""The wire half of a pipeline whose ranks may be lost: each sum is a unit, which those who remain do again."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipesgd.codecs.options import CodecOptions
from pipesgd.comm.thread import CLOSE_SECONDS, CommunicationThread
from pipesgd.elastic.letters import Result
from pipesgd.elastic.ranks import ElasticRanks
from pipesgd.elastic.units import Unit, gathered
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer, on_device, sizes_of_flats
from pipesgd.pipeline.flight import Flight
from pipesgd.pipeline.in_flight import Known, Layout, Outgoing, Reduction
from pipesgd.ranks import Ranks
from pipesgd.reducers.base import Undo, added_by_place
from pipesgd.reducers.dense import DenseReducer
from pipesgd.replicas import sum_buffer
from pipesgd.rules import ELASTIC, check_rules, options_of_sections
from pipesgd.sections import Wire
from pipesgd.strategy import Comparison, Span

T = TypeVar("T")

LEAVE_VALUES = ("int8", "int4")
"""Codecs that, without residuals, leave the values as they are when they encode the first message. Exact sums are
received where the values are, and codecs of one's own may overwrite them."""


class ElasticFlight(Flight[Known]):
    """Gradients on their way between members of which some may be lost; see ``Flight``.

    A bucket's sum is destroyed in its buffer if it is interrupted, so the bucket and what the codec has left out of
    earlier sums are copied before. Where a survivor has the mean, the others get it encoded, as it was on the wire.
    """

    ranks: ElasticRanks
    reducer: DenseReducer

    def __init__(self, ranks: Ranks, layout: Layout, codec: CodecOptions, wire: Wire, **others: Any):
        assert isinstance(ranks, ElasticRanks)
        transport = wire.transport or ranks.transport
        names = {"all_reduce_name": wire.all_reduce_name, "transport_name": transport, "codec": codec.codec}
        check_rules(options_of_sections(wire, **names, strategy="pipelined", asked="", trace=False), ELASTIC)
        if transport != ranks.transport:
            raise UserInputError(f"transport must be {ranks.transport}, that of the ranks; got {transport}")
        wire = dataclasses.replace(wire, transport=transport)
        for bucket in layout.of_buckets() if codec.codec != "fp32" else ():
            sizes = sizes_of_flats([bucket])
            if len({*sizes}) < len(sizes):  # the encoded sum of one would be taken for that of the other
                raise UserInputError(
                    "parameters of two dtypes must not have equally many values with --elastic and a codec (other "
                    f"--buckets may help); got {sizes}"
                )
        if wire.timeout is not None:
            for one in (ranks, ranks.units.ranks):
                one.timeout = wire.timeout  # also by which a member knows that it is missed
        super().__init__(ranks, layout, codec, wire, **others)

    def _make_thread(self) -> CommunicationThread:
        self.copies = Undo()
        """Copies of a bucket, and of what was left out of sums before, until it is summed."""
        self.due: tuple[int, list[Tensor]] | None = None
        """Number of the bucket, and what is to be copied, which is done while the first messages travel."""
        self.results: dict[int, list[Tensor]] = {}
        """Newest result of each bucket, by the bucket's number."""
        self.at: _Bucket | None = None
        """Bucket that the communication thread sums; None in another meeting."""
        self._handed_over: list[dict[int, Tensor]] = []
        """Values left out of sums that this rank's next gradient gets: of a member that has left, or its own, if it is
        the last one, which sums nothing any more."""
        self._is_connected = False
        self.ahead: int | None = None
        """Iterations by which the record is ahead of the pipeline, which may begin from 0 in a run that continues; None
        before the first."""
        return self.ranks.units.thread

    def _connect(self, ranks: Ranks) -> None:
        units = self.ranks.units
        units.on_change = self._on_change
        self.ranks.members.leaving.sums = self
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
        self.connections.meanwhile(self.keep_what_is_due)
        if ranks.world_size == 1 and (left_out := self.reducer.state_dict()["residuals"]):
            self._handed_over.append(dict(enumerate(left_out)))
            self.reducer.load_state_dict({"residuals": []})

    def keep_what_is_due(self) -> None:
        """Copy what a sum is about to change, unless this was done."""
        if self.due is not None:
            self.copies.keep(*self.due)
            self.due = None

    def end_copies(self, *, put_back: bool) -> None:
        """Put back what a sum has changed, or leave it."""
        self.due = None
        self.copies.end(put_back=put_back)

    def next_outgoing(self, iteration: int) -> Outgoing:
        self._take_what_was_handed_over()
        if self.ahead is None:
            self.ahead = self.ranks.iteration_of_loop(iteration) - iteration
        return super().next_outgoing(iteration)

    # ---- Units

    def meet(self, call: str, iteration: int, job: Callable[[], T]) -> Future[T]:
        self._flush = None
        return self._submit(_Meeting(self, lambda: self.meet_all(call, iteration, job)))

    def meet_all(self, call: str, iteration: int, job: Callable[[], T]) -> T:
        """Return ``job()``, but not before all members have begun this meeting. On the thread.

        Whoever holds the result of a unit must know that. The ring of a bucket shows it; a header, which is all that a
        meeting without values sends, is of one other rank alone.
        """

        def whole() -> T:
            value = job()
            if self.at is None:
                self.connections.wait_for_all()
            return value

        return self.connections.run(call, iteration, whole)

    def begin_flush(self, iteration: int) -> None:
        if self._flush is None:
            super().begin_flush(iteration)
            self._flushed = self.ranks.units.submit(Unit(gathered("members", None, within=0.0, close_by=False)))

    def end_flush(self) -> None:
        if self._flush is not None:
            _, record = self._flushed.result()
            super().end_flush()
            self.ranks.see(record)  # from here on, one of those who remain is rank 0

    def regroup(self, ranks: Ranks, iteration: int, left_out: Sequence[Tensor] | None = None) -> None:
        raise UserInputError("regroup() must be left out with elastic ranks, which do it themselves when one is lost")

    def state_dict(self) -> dict[str, Any]:
        self._take_what_was_handed_over()
        return super().state_dict()

    def left_out(self) -> list[memoryview]:
        """Return what this rank's next gradient would get in addition, by the number of its place, float32."""
        self._take_what_was_handed_over()
        found = added_by_place([dict(enumerate(self.reducer.state_dict()["residuals"])), self.carried])
        if not found:
            return []
        sizes = sizes_of_flats(self.layout.of_buckets())
        return [_bytes_of(found.get(place, torch.zeros(size))) for place, size in enumerate(sizes)]

    def forget_left_out(self) -> None:
        self.reducer.load_state_dict({"residuals": []})
        self.carried = {}

    def take_over(self, parts: Sequence[bytes]) -> bool:
        """Give this rank's next gradient what a member that leaves has left out. On the members' thread."""
        if [len(part) for part in parts] != [4 * size for size in sizes_of_flats(self.layout.of_buckets())]:
            return False
        self._handed_over.append({place: _tensor_of(part).view(torch.float32) for place, part in enumerate(parts)})
        return True

    def _take_what_was_handed_over(self) -> None:
        while self._handed_over:
            self._carry(on_device(self._handed_over.pop(), self.device))

    def _take_mean(self, outgoing: Outgoing, number: int) -> None:
        self.at = _Bucket(self, outgoing, number)
        super()._take_mean(outgoing, number)

    def _take_last_mean(self, outgoing: Outgoing, number: int, compare: Callable[[], Comparison | None]) -> Reduction:
        self.at = _Bucket(self, outgoing, number, compare)
        return super()._take_last_mean(outgoing, number, compare)

    def _sum(self, call: str, iteration: int, buffer: FlatBuffer) -> None:
        _, record = self.ranks.units.submit(_Buffer(self, call, iteration, buffer)).result()
        self.ranks.see(record)

    def _submit(self, unit: Unit[T]) -> Future[T]:
        units = self.ranks.units
        return self.thread.submit(lambda: units.run(unit)[0])

    def close(self, *, together: bool) -> None:
        """End the connections; the thread continues, since exchanges of values may follow."""
        units = self.ranks.units
        atexit.unregister(self._ends.end_unclosed)
        units.on_change = None
        units.abort = lambda error: None
        self.ranks.members.leaving.sums = None
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
        super().__init__(lambda ranks: flight.meet_all(call, iteration, lambda: sum_buffer(buffer, flight.exact)))
        self._flight = flight
        self._flats = buffer.flats
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        self._flight.at = None
        self._copies = [flat.clone() for flat in self._flats]

    def put_back(self) -> None:
        for flat, copy in zip(self._flats, self._copies, strict=True):
            flat.copy_(copy)

    def result(self, value: None) -> Result:
        return Result(None, [_bytes_of(flat.clone()) for flat in self._flats])

    def take(self, result: Result) -> None:
        for flat, part in zip(self._flats, result.parts, strict=True):
            flat.view(torch.uint8).copy_(_tensor_of(part))


class _Meeting(Unit[Any]):
    """The work of one meeting of the ranks: the mean of a bucket, or nothing that leaves a result."""

    def __init__(self, flight: ElasticFlight[Any], job: Callable[[], Any]):
        super().__init__(lambda ranks: job())
        self._flight = flight

    @property
    def settles(self) -> int | None:
        return None if self._flight.at is None else self._flight.at.settles

    def keep(self) -> None:
        self._flight.at = None  # the job says which bucket it is about to sum, if any

    def put_back(self) -> None:
        if self._flight.at is not None:
            self._flight.at.put_back()

    def result(self, value: Any) -> Result:
        return Result(None) if self._flight.at is None else self._flight.at.result(value)

    def take(self, result: Result) -> Any:
        return None if self._flight.at is None else self._flight.at.take(result)


class _Bucket:
    """The mean of a bucket of a gradient, which is about to be taken, and what is kept for the case that this fails."""

    def __init__(
        self,
        flight: ElasticFlight[Any],
        outgoing: Outgoing,
        number: int,
        compare: Callable[[], Comparison | None] | None = None,
    ):
        self._flight, self._outgoing, self._number, self._compare = flight, outgoing, number, compare
        self._bucket = outgoing.buffer.buckets[number]
        self._start = time.perf_counter()
        self._norms_before = len(outgoing.norms)
        self.settles = None if compare is None else outgoing.iteration + (flight.ahead or 0) + 1
        """Number of iterations whose means are there with this one; None if it is not the last one of a gradient."""
        self._is_alone = flight.connections.ranks.world_size == 1
        if not self._is_alone:  # else nobody is left who could be lost
            state = flight.reducer.state(self._bucket)
            flight.due = number, [*self._bucket.flats, *state]
            is_halved = any(flat.dtype == torch.float16 for flat in self._bucket.flats)  # shares of a mean are summed
            if state or is_halved or flight._codec.codec not in LEAVE_VALUES:
                flight.keep_what_is_due()  # these may change before the first message is waited for

    def put_back(self) -> None:
        """Put back the bucket, and what was left out of sums before."""
        self._flight.end_copies(put_back=True)
        del self._outgoing.norms[self._norms_before :]

    def result(self, value: Any) -> Result:
        """Return the result as it travels: the encoded sum, norms, and the report of the last bucket."""
        flight = self._flight
        flight.end_copies(put_back=False)
        text: list[Any] = [self._outgoing.norms[self._norms_before :]]
        if isinstance(value, Reduction):
            text += [value.finite, value.norm]
        if self._is_alone:
            return Result(text)
        kept = flight.reducer.result(self._bucket, flight.results.get(self._number, ()))
        flight.results[self._number] = kept
        return Result(text, [_bytes_of(one) for one in kept])

    def take(self, result: Result) -> Reduction | None:
        """Take the mean that another member has, after this one has encoded its part of it."""
        flight, outgoing = self._flight, self._outgoing
        flight.end_copies(put_back=False)  # whoever completes a ring knows that all have encoded all they had to
        norms, *report = result.text
        ranks = flight.connections.ranks.world_size
        flight.reducer.take_result(self._bucket, [_tensor_of(part).to(flight.device) for part in result.parts], ranks)
        outgoing.norms[self._norms_before :] = norms
        if self._compare is None:
            return None
        finite, norm = report
        if flight._undo is not None:
            flight._undo.end(put_back=not finite)
        comparison = self._compare()
        outgoing.sums.append(Span("communication", outgoing.iteration, self._start, time.perf_counter()))
        return Reduction(finite, outgoing.sums, comparison, norm, outgoing.gathered_bytes)


def _bytes_of(tensor: Tensor) -> memoryview:
    found: memoryview = tensor.cpu().view(torch.uint8).numpy().data
    return found


def _tensor_of(part: memoryview | bytes) -> Tensor:
    if not part:  # frombuffer refuses it
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(part), dtype=torch.uint8)
