"""The wire half of a pipeline: flat gradients of this rank leave, and means over the ranks arrive.

It knows neither weights nor optimizer. What the other half knows of a gradient travels with it, unread.
"""

from __future__ import annotations

import atexit
import collections
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pipesgd.codecs.options import CodecOptions
from pipesgd.comm.connections import Connections
from pipesgd.comm.headers import STEP
from pipesgd.comm.thread import CLOSE_SECONDS, CommunicationThread
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import (
    BucketedBuffer,
    FlatBuffer,
    all_finite,
    are_finite,
    check_sizes,
    finite_norm,
    on_device,
    sizes_of_flats,
    take_mean,
    take_shares,
)
from pipesgd.pipeline.in_flight import WHOLE, InFlight, Known, Layout, Members, Outgoing, Reduction
from pipesgd.process import ends_by_exception
from pipesgd.ranks import Ranks
from pipesgd.reducers.base import Undo, added_by_place, as_real
from pipesgd.reducers.make import GATHERING, make_gathering_reducer, make_reducer
from pipesgd.replicas import SumOverRanks, nonfinite_ranks, sum_buffer
from pipesgd.sections import Wire
from pipesgd.strategy import Comparison, Span, StepReport

T = TypeVar("T")


class Flight(Generic[Known]):
    """Gradients on their way, from the first bucket that leaves to the mean that arrives.

    A gradient passes through these phases:

    0. ``next_outgoing``: it gets a flat buffer of a pool, which its user fills, bucket by bucket;
    1. ``leave``: a bucket that is filled goes to the communication thread;
    2. ``depart``: the last bucket goes, and the gradient is in flight;
    3. on the thread, all ranks compare headers and sum the bucket; each part becomes the mean, and is looked at;
    4. ``next_mean``: waits for the oldest one;
    5. ``land``: its buffer returns to the pool.

    Sums are computed in the order in which they are asked for. ``connect`` must be called once before any of them.

    Args:
        ranks: the ranks that have the same parameters.
        layout: the tensors of a gradient, in buckets.
        codec: encoding of what is summed whole.
        wire: how gradients travel.
        seed: seed of the random numbers of the codec.
        members: the ranks that hold one replica of the model together with this one; None if it does so alone.
        skips: whether a gradient whose mean is not finite is to be left out: nothing of it stays in the state of the
            sums then, of which copies are kept for that.
        looks: whether the communication thread looks if this rank's own gradients are finite, as nobody else can later.
        agrees: whether norms of means must be the same bits on all ranks, whatever processors they have.
        unclosed: function that is called first if the program ends before ``close``, but by no exception.
    """

    def __init__(
        self,
        ranks: Ranks,
        layout: Layout,
        codec: CodecOptions,
        wire: Wire,
        *,
        seed: int,
        members: Members | None = None,
        skips: bool = False,
        looks: bool = False,
        agrees: bool = False,
        unclosed: Callable[[], None] = lambda: None,
    ):
        self.ranks = ranks
        self.layout = layout
        self.device = layout.tensors[0].device
        self.in_flight: collections.deque[InFlight[Known]] = collections.deque()
        self.outgoing: Outgoing | None = None
        """Gradient whose buckets are leaving, or will: it has a buffer of the pool."""
        self.left = 0
        """Number of its buckets that have left."""
        self.buffers_allocated = 0
        self.carried: dict[int, Tensor] = {}
        """Values that the next gradient gets in addition, by number of its flat tensor."""
        self.thread = self._make_thread()
        self._codec = codec
        self._wire = wire
        self._seed = seed
        self._members = members
        self._skips = skips
        self._looks = looks
        self._agrees = agrees
        self._pool: list[BucketedBuffer] = []
        self._flush: Future[None] | None = None
        """Meeting of the ranks for a flush that has begun and not ended."""
        self._ends = _Ends(self.thread, unclosed)

    def _make_thread(self) -> CommunicationThread:
        return CommunicationThread(self.device)

    def connect(self) -> None:
        """Connect to the other ranks, and make what sums gradients. Collective.

        Raises:
            CommunicationError: a rank was lost.
            UserInputError: the codec cannot be made.
        """
        atexit.register(self._ends.end_unclosed)
        self._ends.stop_watching = self.ranks.watch(self._ends.fail)
        if self._members is not None:
            self._ends.closing.append(self._members.close)
            self._ends.aborting.append(self._members.abort)
            self._members.connect(self._wire.transport_on(self.device.type))
        self._connect(self.ranks)

    def regroup(self, ranks: Ranks, iteration: int, left_out: Sequence[Tensor] | None = None) -> None:
        """Continue with other ranks, or with the same ones on new connections. Collective.

        1. drain: all that has left is summed, and the means in flight stay there;
        2. carry: what the codec has left out, as a mean over the ranks that it is of, is added to the next gradient;
        3. reconnect: the connections end, and others are made under a new name.

        Args:
            ranks: the ranks from now on.
            iteration: the iteration that the ranks are in.
            left_out: the mean of what the codec of other ranks has left out, one for each flat tensor of a gradient;
                by default it is that of the present ranks.

        Raises:
            UserInputError: the codec has the gradients' momentum, which would count again what it has left out.
        """
        if self._codec.own_momentum:
            raise UserInputError.on_all_ranks(
                f"momentum_correction must be 0 where ranks change; got {self._codec.own_momentum:g}"
            )
        self.wait_until_summed()
        if left_out is None:
            left_out = self.reducer.state_dict().get("residuals", [])
            self.average(left_out, iteration)
        self.meet("regroup", iteration, self.connections.wait_for_all).result()
        self._ends.closing.remove(self.connections.close)
        self._ends.aborting.remove(self.connections.abort)
        self.thread.submit(self.connections.close).result()
        if ranks is not self.ranks:
            self._ends.stop_watching()
            self.ranks = ranks
            self._ends.stop_watching = ranks.watch(self._ends.fail)
        self._connect(ranks)
        self._carry(dict(enumerate(on_device(list(left_out), self.device))))

    def _connect(self, ranks: Ranks) -> None:
        self._connect_to(ranks)
        device = self.device.type
        self.reducer = make_reducer(self._codec, self.connections, device=device, seed=self._seed)
        self._undo = Undo() if self._skips else None
        kinds = [kind for kind in GATHERING if kind in self.layout.exchange]
        self._gathering = {kind: make_gathering_reducer(kind, self.connections) for kind in kinds}

    def _connect_to(self, ranks: Ranks) -> None:
        """Connect to ``ranks``, between which sums are computed from now on."""
        wire, device = self._wire, self.device.type
        self.connections = Connections(
            wire.all_reduce,
            ranks,
            timeout=ranks.timeout if wire.timeout is None else wire.timeout,
            segment_bytes=wire.segment_bytes,
            connections=wire.connections,
            transport=wire.transport_on(device),
            rate_limit=wire.rate,
            device=device,
            buckets=len(self.layout.buckets),
        )
        self._ends.closing.append(self.connections.close)
        self._ends.aborting.append(self.connections.abort)
        self.exact = self.connections.all_reduce()

    # ---- 0. A buffer of the pool

    def next_outgoing(self, iteration: int) -> Outgoing:
        """Return the gradient of this iteration, some of whose buckets may have left."""
        if self.outgoing is None:
            self.outgoing = Outgoing(iteration, self.free_buffer(), [None] * len(self.layout.tensors))
        return self.outgoing

    def free_buffer(self) -> BucketedBuffer:
        """Take a buffer out of the pool."""
        if self._pool:
            return self._pool.pop()
        self.buffers_allocated += 1
        return BucketedBuffer(self.layout.tensors, self.layout.buckets)

    # ---- 1. and 2. Buckets leave

    def leave(self, outgoing: Outgoing, number: int) -> None:
        """Let a packed bucket leave that is not the last one."""
        self._add_carried(outgoing, number)
        self.meet(STEP, outgoing.iteration, functools.partial(self._take_mean, outgoing, number))
        self.left += 1

    def depart(
        self,
        outgoing: Outgoing,
        numbers: Sequence[int],
        known: Known,
        compare: Callable[[], Comparison | None],
        own: Sequence[Tensor] | None,
        *,
        call: str = STEP,
    ) -> InFlight[Known]:
        """Let the buckets of these ``numbers`` leave, the last ones of a gradient, all of which are packed.

        Args:
            outgoing: the gradient.
            numbers: numbers of its buckets that are summed and have not left.
            known: what the other half of the pipeline knows of the gradient.
            compare: function that compares the mean with what was expected of it; the communication thread calls it.
            own: this rank's own gradient if that is kept; else the communication thread looks if it is finite.
            call: what this rank does, one of ``headers.CALLS``, which must be the same on all ranks.
        """
        *early, last = numbers
        for number in early:
            self.leave(outgoing, number)
        self._add_carried(outgoing, last)
        take_last = functools.partial(self._take_last_mean, outgoing, last, compare)
        reduction = self.meet(call, outgoing.iteration, take_last)
        own_is_finite = outgoing.own_is_finite if own is None else functools.partial(are_finite, own)
        gradient = InFlight(outgoing.iteration, outgoing.buffer, known, own_is_finite, reduction)
        self.outgoing = None  # before it is in flight: no interruption may leave the buffer in two places
        self.left = 0
        self.in_flight.append(gradient)
        return gradient

    def wire_bytes(self, gradient: InFlight[Known], numbers: Sequence[int]) -> int:
        """Return the bytes that this rank sends for those of the buckets ``numbers`` that are summed whole."""
        buckets, exchange = gradient.buffer.buckets, self.layout.exchange
        whole = [buckets[number] for number in numbers if exchange[number] == WHOLE]
        return sum(self.reducer.wire_bytes(bucket, gradient.iteration) for bucket in whole)

    def uncompressed_bytes(self) -> int:
        """Return the bytes that this rank would send for a gradient that is summed whole and without a codec."""
        return self.connections.bytes_sent(sum(one.numel() * one.element_size() for one in self.layout.tensors))

    def _add_carried(self, outgoing: Outgoing, number: int) -> None:
        """Add what earlier sums have left out, if anything is carried."""
        if not self.carried:
            return
        bucket, world_size = outgoing.buffer.buckets[number], self.ranks.world_size
        for place, flat in enumerate(bucket.flats, bucket.first):
            if (carried := self.carried.pop(place, None)) is not None:
                # float16 gradients are divided before they are summed: these are what shares of a mean lost.
                as_real(flat).add_(carried, alpha=world_size if flat.dtype == torch.float16 else 1)

    def _carry(self, values: Mapping[int, Tensor]) -> None:
        """Add ``values`` to those that the next gradient gets in addition."""
        self.carried = added_by_place(
            [self.carried, values]
        )  # both, if no gradient left since the last change of ranks

    # ---- 3. On the communication thread

    def meet(self, call: str, iteration: int, job: Callable[[], T]) -> Future[T]:
        """Have the thread do ``job`` after sending a header that says that this rank is at ``call``."""
        self._flush = None  # a flush that was interrupted before this call is not resumed
        return self.thread.submit(functools.partial(self.connections.run, call, iteration, job))

    def _take_mean(self, outgoing: Outgoing, number: int) -> None:
        """Replace a bucket's gradients by their mean over the ranks. Collective."""
        start = time.perf_counter()
        self._reduce(outgoing, number)
        outgoing.sums.append(Span("communication", outgoing.iteration, start, time.perf_counter()))

    def _take_last_mean(self, outgoing: Outgoing, number: int, compare: Callable[[], Comparison | None]) -> Reduction:
        """Take the mean of a gradient's last bucket, and report on the whole mean. Collective."""
        start = time.perf_counter()
        self._reduce(outgoing, number)
        # Parts arrive in another order on every rank.
        of_finite = sorted(norm for norm in outgoing.norms if norm is not None)
        finite = len(of_finite) == len(outgoing.norms)
        if self._members is not None:
            self._members.begin(outgoing.iteration)
            agree = self._agreed if self._agrees else _as_it_is
            finite, norm = self._members.finite_norm(finite, outgoing.buffer.views, agree)
        else:
            norm = self._agreed_norm(outgoing.buffer) if self._agrees else math.hypot(*of_finite)
        if self._undo is not None:
            self._undo.end(put_back=not finite)  # before the next gradient, which the ranks sum after this one
        comparison = compare()
        outgoing.sums.append(Span("communication", outgoing.iteration, start, time.perf_counter()))
        return Reduction(finite, outgoing.sums, comparison, norm, outgoing.gathered_bytes)

    def _reduce(self, outgoing: Outgoing, number: int) -> None:
        bucket, world_size = outgoing.buffer.buckets[number], self.connections.ranks.world_size
        norms: list[float | None] = []
        if self._looks:
            outgoing.own_finite.append(all_finite(bucket))

        def finish(part: Tensor) -> None:
            take_mean(part, world_size)
            norms.append(finite_norm(part))

        gathering = self._gathering.get(self.layout.exchange[number])
        take_shares(bucket.flats, world_size)
        if gathering is not None:
            gathering.parts, outgoing.parts = outgoing.parts, ()  # which the gradient in flight would keep
            gathering.sum(bucket, outgoing.iteration, finish)
            outgoing.gathered_bytes += gathering.bytes_sent
        else:
            if self._undo is not None:
                self._undo.keep(number, self.reducer.state(bucket))
            self.reducer.sum(bucket, outgoing.iteration, finish)
        outgoing.norms += norms

    def _agreed_norm(self, buffer: BucketedBuffer) -> float:
        """Return the mean's norm, bit-identical on all ranks, whatever processors they have. Collective."""
        norms = [torch.linalg.vector_norm(as_real(flat), dtype=torch.float64) for flat in buffer.flats]
        return math.sqrt(self._agreed(torch.stack(norms).square().sum()).item())

    def _agreed(self, number: Tensor) -> Tensor:
        """Return the mean of the ranks' numbers, which are about the same: the same bits on all of them. Collective."""
        total = number.reshape(1)
        self.exact(total)
        return total / self.connections.ranks.world_size

    # ---- 4. and 5. Means arrive

    def next_mean(self) -> tuple[InFlight[Known], StepReport]:
        """Return the oldest gradient in flight when its mean has arrived, and a report of what is to become of it.

        An interrupted wait changes nothing.
        """
        gradient = self.in_flight[0]
        begin = time.perf_counter()
        reduction = gradient.reduction.result()
        wait = Span("wait", gradient.iteration, begin, time.perf_counter())
        culprits: list[int] = []
        if not reduction.finite:  # on all ranks, in the same step
            own_is_finite = gradient.own_is_finite()
            if self._members is not None:
                own_is_finite = self._members.is_so(own_is_finite)
            culprits = nonfinite_ranks(self.ranks, "gradients", own_is_finite)
        return gradient, StepReport(
            applied=(gradient.iteration,) if reduction.finite else (),
            skipped=() if reduction.finite else (gradient.iteration,),
            nonfinite_ranks=tuple(culprits),
            spans=(*reduction.spans, wait),
            wire_bytes=reduction.gathered_bytes,
            gradient_norm=reduction.norm if reduction.finite else None,
            comparison=reduction.comparison,
        )

    def land(self) -> None:
        """Return the buffer of the oldest gradient in flight to the pool."""
        self._pool.append(self.in_flight.popleft().buffer)

    # ---- Other sums

    def sum_in(self, call: str, iteration: int) -> SumOverRanks:
        """Return the function that sums a buffer over the ranks in this ``call``, uncompressed."""
        return lambda buffer: self._sum(call, iteration, buffer)

    def _sum(self, call: str, iteration: int, buffer: FlatBuffer) -> None:
        self.meet(call, iteration, functools.partial(sum_buffer, buffer, self.exact)).result()

    def average(self, tensors: Sequence[Tensor], iteration: int) -> tuple[int, bool]:
        """Give all ranks the means of ``tensors`` over the ranks, unless a mean is not finite. Collective.

        Returns the number of bytes sent, and whether all means are finite, which all ranks find alike.
        """
        buffer = FlatBuffer(tensors)
        buffer.fill_from(tensors)
        take_shares(buffer.flats, self.ranks.world_size)
        self.sum_in(STEP, iteration)(buffer)
        for flat in buffer.flats:
            take_mean(flat, self.ranks.world_size)
        finite = all_finite(buffer)
        if finite:
            buffer.copy_to(tensors)
        return sum(self.exact.wire_bytes(flat) for flat in buffer.flats), finite

    # ---- Flush, state, end

    def begin_flush(self, iteration: int) -> None:
        """Let the ranks meet for a flush, unless one that was interrupted has begun."""
        if self._flush is None:
            self._flush = self.meet("flush", iteration, lambda: None)

    def end_flush(self) -> None:
        """Return when all ranks have begun the flush."""
        if self._flush is not None:
            self._flush.result()
            self._flush = None

    def wait_until_summed(self) -> None:
        """Return when all that has left is summed in its buffer.

        Raises:
            CommunicationError: another rank has not sent a bucket or a gradient that has left on this rank.
        """
        self.thread.submit(lambda: None).result()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the means in flight, after waiting for them, and of what the codec has left out."""
        in_flight = [gradient.state_dict() for gradient in self.in_flight]
        # Only now is the communication thread idle, and with it the reducer.
        carried = {place: value.clone() for place, value in self.carried.items()}
        return {"in_flight": in_flight, "reducer": self.reducer.state_dict(), "carried": carried}

    def of_members(self, alike: Mapping[str, Any], taken: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of the codec with which this rank takes over from other ranks; see ``Reducer``."""
        reducer = self.reducer.of_members(alike["reducer"], [state["reducer"] for state in taken])
        left_out = [state["carried"] for state in taken]
        if self.ranks.world_size == 1:  # a single rank sends nothing, and would never add what others left out
            left_out.append(dict(enumerate(reducer["residuals"])))
            reducer["residuals"] = []
        return {"reducer": reducer, "carried": added_by_place(left_out)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ``UserInputError`` if ``state`` is of gradients of other sizes."""
        sizes = sizes_of_flats(self.layout.of_buckets())
        for gradient in state["in_flight"]:
            check_sizes([as_real(flat).numel() for flat in gradient["flats"]], sizes)
        self.reducer.check_state(state["reducer"], self.layout.of_buckets(WHOLE))

    def load_state_dict(self, state: Mapping[str, Any], known: Sequence[Known]) -> None:
        """Continue from a ``state_dict``, in which the other half has ``known`` this of the gradients in flight.

        What is in flight and what has left is dropped.
        """
        self._flush = None
        self.carried = on_device(dict(state["carried"]), self.device)
        self.left = 0
        if self.outgoing is not None:
            self._pool.append(self.outgoing.buffer)
            self.outgoing = None
        while self.in_flight:
            self.land()
        self.reducer.load_state_dict(on_device(state["reducer"], self.device))
        for entry, of_entry in zip(state["in_flight"], known, strict=True):
            self.in_flight.append(InFlight.of_state(entry, self.free_buffer(), of_entry))

    def wait_for_all(self) -> None:
        """Return when no rank has a message for another one any more. On the thread; see ``Connections``."""
        self.connections.wait_for_all()
        if self._members is not None:
            self._members.wait_for_all()

    def fail(self, error: BaseException) -> None:
        """End all waits with ``error`` at once; any thread may call this."""
        self._ends.fail(error)

    def drop(self) -> None:
        """Forget all gradients and their buffers."""
        self.in_flight.clear()
        self._pool.clear()
        self.outgoing = None

    def close(self, *, together: bool) -> None:
        """End the thread, and with it the connections.

        With ``together``, all ranks have come to this point, and all sums are waited for.
        """
        atexit.unregister(self._ends.end_unclosed)
        self._ends.end(together=together)


class _Ends:
    """Ends of a flight's thread, connections and watch; the interpreter's exit knows these, and no gradient."""

    def __init__(self, thread: CommunicationThread, unclosed: Callable[[], None]):
        self.stop_watching: Callable[[], None] = lambda: None
        self.closing: list[Callable[[], None]] = []
        """Functions that end connections."""
        self.aborting: list[Callable[[BaseException], None]] = []
        """Functions that end waits of connections."""
        # Not a method: what watches for failures would refer to what refers to it, and keep all of this open.
        self.fail = functools.partial(_fail, thread, self.aborting)
        """Function that ends all waits with an error: the main thread's, and those of messages if the transport can."""
        self._thread = thread
        self._unclosed = unclosed

    def end(self, *, together: bool) -> None:
        """No longer fail when another rank does, and end the thread; see ``Flight.close``."""
        self.stop_watching()
        # Peers may still read what this rank has sent them: the connections end when all have come to this point.
        # Not a method: the thread would refer to what refers to it.
        at_the_end = functools.partial(_call_all, self.closing)
        self._thread.close(at_the_end=at_the_end, within=None if together else CLOSE_SECONDS)

    def end_unclosed(self) -> None:
        """End what is open when the program ends; a thread in a wait of gloo's would abort it."""
        try:
            if not ends_by_exception():  # which is on the screen
                self._unclosed()
        finally:
            self.end(together=False)


def _as_it_is(number: Tensor) -> Tensor:
    return number


def _fail(
    thread: CommunicationThread, aborting: Sequence[Callable[[BaseException], None]], error: BaseException
) -> None:
    thread.fail(error)
    for abort in list(aborting):
        abort(error)


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
