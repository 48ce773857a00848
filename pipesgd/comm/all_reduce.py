"""Protocol of all-reduces, and one that runs any schedule by messages, with any codec decoded at every hop."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pipesgd.codecs.base import Codec, mixed
from pipesgd.comm.transport import Pending, Transport
from timing_model import schedules
from timing_model.schedules import SEGMENT_BYTES, SEGMENTS_AHEAD, Receive, Schedule, Send, segments_of, split

MOST_PLANS = 16
"""Number of kinds of buffers whose plans are kept by default, since a run reduces them again and again."""
ALIGNMENT = 64
"""Alignment of segments in memory, in bytes."""


Finish = Callable[[Tensor], None]
"""Function that is called with a part of a sum as soon as it is ready."""


def no_op(part: Tensor) -> None:
    """Leave ``part`` as it is."""


class AllReduce(Protocol):
    """Sums a flat tensor over all ranks, in place, leaving the same bytes on every rank.

    One instance serves one thread. It never takes a mean, which only ``flat_buffer.take_mean`` does.
    """

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        """Replace ``flat`` (numel,) by its sum over the ranks, as exactly as the codec on the wire allows.

        Args:
            flat: the values, contiguous.
            residual: shaped like ``flat``, or None. It is added to the values first, and afterwards holds what this
                rank's encodings have left out: sums and all ranks' residuals together equal the ranks' inputs.
            key: 32 bits, the same on all ranks, that choose the random numbers of a codec that draws any.
            finish: called once with each part of ``flat`` when this rank has the part's sum and no longer needs it,
                while it is still in the cache and other parts are on the wire. The mean is taken here.

        Raises:
            CommunicationError: a peer was lost, or silent for longer than the deadline.
        """

    def wire_bytes(self, flat: Tensor) -> int:
        """Return the bytes that this rank sends to reduce ``flat``, without headers of the network."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a chunk, with the place of its values in the buffer and of its bytes on the wire."""

    name: str
    values: slice
    wire: slice


@dataclass(frozen=True, slots=True)
class _Encoding:
    holders: int
    nonce: int
    """Salt for random numbers that no other encoding in this all-reduce draws."""
    keep: bool
    """True if this rank continues with the encoded values, since it receives nothing in their place."""


@dataclass(frozen=True, slots=True)
class _Message:
    peer: int
    what: str


@dataclass(frozen=True, slots=True)
class _Event:
    """A segment that arrives, or one to begin with, and the operations on it."""

    segment: _Segment
    arrival: _Message | None
    reduce: bool
    encoding: _Encoding | None
    sends: tuple[_Message, ...]
    last: bool
    """True if the values are the final sum after this event."""


@dataclass(slots=True)
class _Plan:
    """Operations on buffers of one kind, segment by segment, and the memory for them."""

    events: list[_Event]
    wire_bytes: int
    wire: Tensor
    """Encoded bytes of all segments, uint8; empty if the values' own memory is sent."""
    inboxes: list[Tensor]
    """Buffers, uint8, one for each receive that is posted ahead and will be added up."""
    shared_residual: Tensor
    """Residual of a segment that several ranks encode alike, float32; empty if there is none."""


class ScheduledAllReduce:
    """Sums a flat tensor over the ranks of ``transport``, in place, leaving the same bytes on every rank.

    The buffer is split into the schedule's chunks, and a chunk into segments whose messages have at most
    ``segment_bytes``. The schedule's operations on a chunk are done on its segments one by one, each as soon as it has
    arrived, so that one is encoded while another is on the wire:

    1. Post the first receives. Encode and send the segments that need not be received first.
    2. For each segment to receive, in the schedule's order: wait for it. Add it to this rank's values or let it replace
       them; if it is to be sent on, encode it again in the same pass, or send the very bytes that arrived. Post more
       receives: replacements go straight to their place, and segments to be added up go to one of ``SEGMENTS_AHEAD``
       inboxes. Call ``finish`` on values that are the final sum and no longer needed for the wire.
    3. Wait for the sends.

    A ``paced`` all-reduce hands a message to the transport only when the one before has left, so that messages leave at
    the transport's pace even if a peer was late: gloo sends a message once its receiver is ready, and those that had
    gathered until then would leave at the line's speed. Lest ranks wait for each other, all receives are posted in 1.,
    with an inbox for each segment to be added up. They take as much memory as the encoded parts that arrive to be added
    up: (p-1)/p of the encoded buffer with most schedules.

    Only its owner encodes a finished chunk, and all ranks, including the owner, decode the same bytes, which gives the
    same values on every rank.
    """

    def __init__(
        self,
        transport: Transport,
        schedule: Schedule,
        codec: Codec,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        most_plans: int = MOST_PLANS,
        paced: bool = False,
    ):
        self._transport = transport
        self._schedule = schedule
        self._codec = codec
        self._segment_bytes = segment_bytes
        self._most_plans = most_plans
        self._paced = paced
        self._plans: dict[tuple[int, torch.dtype, torch.device], _Plan] = {}

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        transport, codec = self._transport, self._codec
        plan = self._plan(flat)
        wire = flat.view(torch.uint8) if codec.in_place else plan.wire
        free = list(plan.inboxes)
        arrivals: deque[tuple[Pending, Tensor]] = deque()
        sent: dict[str, list[Pending]] = {}
        posted = 0

        def post_receives() -> None:
            nonlocal posted
            while posted < len(plan.events) and (free or not plan.events[posted].reduce):
                event = plan.events[posted]
                posted += 1
                if event.arrival is not None:
                    inbox = free.pop() if event.reduce else wire[event.segment.wire]
                    place = inbox[: _length(event.segment.wire)]
                    arrivals.append((transport.receive(place, event.arrival.peer, event.arrival.what), inbox))

        def wait_for_sends() -> None:
            for pendings in sent.values():
                for pending in pendings:
                    pending.wait()
            sent.clear()

        # 1. and 2.
        post_receives()
        for event in plan.events:
            segment = event.segment
            values, outgoing = flat[segment.values], wire[segment.wire]
            if event.arrival is not None:
                pending, inbox = arrivals.popleft()
                pending.wait()
            for pending in sent.pop(segment.name, ()):  # the sent bytes are about to change, or have been answered
                pending.wait()
            received = inbox[: outgoing.numel()] if event.reduce else None
            if event.encoding is not None:
                own = None if residual is None else residual[segment.values]
                self._encode(event.encoding, plan, received, values, own, outgoing, key)
            elif received is not None:
                codec.decode_add(received, values)
            else:
                codec.decode(outgoing, values)
            for message in event.sends:
                if self._paced:
                    wait_for_sends()
                sent.setdefault(segment.name, []).append(transport.send(outgoing, message.peer, message.what))
            if event.reduce:
                free.append(inbox)
            post_receives()
            if event.last and not codec.in_place:
                finish(values)
        # 3.
        wait_for_sends()
        if codec.in_place or not plan.events:  # the wire needed the values until now
            finish(flat)

    def wire_bytes(self, flat: Tensor) -> int:
        return self._plan(flat).wire_bytes

    def take_encoded_sum(self, flat: Tensor, spare: Tensor | None) -> Tensor:
        """Return the bytes that all ranks have decoded the last sum of a buffer like ``flat`` from, uint8.

        The next sum uses other memory: ``spare``, if there is any like it. An exact sum is its own encoding, and is not
        asked for here.
        """
        assert not self._codec.in_place
        plan = self._plan(flat)
        taken = plan.wire
        plan.wire = torch.empty_like(taken) if spare is None or spare.shape != taken.shape else spare
        return taken

    def decode_sum(self, encoded: Tensor, flat: Tensor) -> None:
        """Replace ``flat`` by the sum that another rank has of it, given what its ``take_encoded_sum`` has returned."""
        for event in self._plan(flat).events:
            if event.last:
                self._codec.decode(encoded[event.segment.wire], flat[event.segment.values])

    def _encode(
        self,
        encoding: _Encoding,
        plan: _Plan,
        received: Tensor | None,
        values: Tensor,
        residual: Tensor | None,
        wire: Tensor,
        key: int,
    ) -> None:
        codec = self._codec
        shared = residual is not None and encoding.holders > 1  # the residual has been added to the values before
        own = plan.shared_residual[: values.numel()].zero_() if shared else residual
        key = 0 if codec.in_place else mixed(key, encoding.nonce)  # exact codecs draw no random numbers
        if received is None:
            codec.encode(values, own, wire, key)
        else:
            codec.decode_add_encode(received, values, own, wire, key)
        if residual is not None and own is not None and shared:
            residual.add_(own, alpha=1 / encoding.holders)
        if encoding.keep:
            codec.decode(wire, values)

    def _plan(self, flat: Tensor) -> _Plan:
        """Return the plan for buffers like ``flat``, made once: a run reduces a few kinds of buffers many times."""
        kind = (flat.numel(), flat.dtype, flat.device)
        if kind not in self._plans:
            if len(self._plans) == self._most_plans:  # a size that keeps changing must not fill the memory
                del self._plans[next(iter(self._plans))]
            return self._plans.setdefault(kind, self._make_plan(flat))  # two threads may come at once
        return self._plans[kind]

    def _make_plan(self, flat: Tensor) -> _Plan:
        segments, nbytes = self._segments(flat)
        events = [self._event(event, segment) for event in self._schedule.events for segment in segments[event.chunk]]
        largest = max((_length(event.segment.wire) for event in events), default=0)
        most = max((_length(event.segment.values) for event in events), default=0)
        shared = any(event.encoding is not None and event.encoding.holders > 1 for event in events)
        inboxes = sum(event.reduce for event in events)
        if not self._paced:
            inboxes = min(SEGMENTS_AHEAD, inboxes)
        new = partial(torch.empty, device=flat.device)
        return _Plan(
            events=events,
            wire_bytes=sum(len(event.sends) * _length(event.segment.wire) for event in events),
            wire=new(0 if self._codec.in_place else nbytes, dtype=torch.uint8),
            inboxes=[new(largest, dtype=torch.uint8) for _ in range(inboxes)],
            shared_residual=new(most if shared and not self._codec.in_place else 0, dtype=torch.float32),
        )

    def _segments(self, flat: Tensor) -> tuple[list[list[_Segment]], int]:
        """Return the segments of each chunk, and the bytes in memory that all of them take."""
        codec, element_size = self._codec, flat.element_size()

        def wire_bytes(numel: int) -> int:
            return numel * element_size if codec.in_place else codec.wire_bytes(numel)

        chunks = segments_of_chunks(
            flat.numel(), self._schedule.chunks, codec.block, wire_bytes, self._segment_bytes, paced=self._paced
        )
        segments: list[list[_Segment]] = []
        position = 0
        for chunk, parts in enumerate(chunks):
            segments.append([])
            for index, (begin, end) in enumerate(parts):
                size = wire_bytes(end - begin)
                name = f"chunk {chunk} segment {index}"
                segments[-1].append(_Segment(name, slice(begin, end), slice(position, position + size)))
                position += size if codec.in_place else math.ceil(size / ALIGNMENT) * ALIGNMENT
        return segments, position

    def _event(self, event: schedules.Event, segment: _Segment) -> _Event:
        """Return the schedule's event for a chunk, narrowed to one segment of it."""
        arrival, encoding = event.arrival, None
        if event.encode is not None:
            holders = event.encode.holders
            nonce = nonce_of(self._transport.rank, segment.values.start, holders)
            encoding = _Encoding(holders=holders, nonce=nonce, keep=event.keeps_encoded)
        return _Event(
            segment=segment,
            arrival=None if arrival is None else _message(arrival, segment),
            reduce=event.reduces,
            encoding=encoding,
            sends=tuple(_message(send, segment) for send in event.sends),
            last=event.following is None,
        )


def segments_of_chunks(
    numel: int, chunks: int, block: int, wire_bytes: Callable[[int], int], segment_bytes: int, *, paced: bool = False
) -> list[list[tuple[int, int]]]:
    """Return (start, stop) of the segments of each chunk of ``numel`` values.

    No segment is empty, and all but a chunk's last consist of whole blocks. So a message may exceed ``segment_bytes``
    by less than a block; a paced one does only if it is a single block. ``wire_bytes`` says how many bytes values take.
    """
    ends = split(numel, chunks)
    largest = max(stop - start for start, stop in ends)
    per_chunk = segments_of(wire_bytes(largest), segment_bytes)
    if paced:
        numbers = range(block, largest + block, block)  # of values in whole blocks
        whole_blocks = bisect.bisect_right(numbers, segment_bytes, key=wire_bytes)
        per_chunk = max(per_chunk, math.ceil(len(numbers) / max(1, whole_blocks)))
    return [
        [
            (start + first * block, min(start + last * block, stop))
            for first, last in split(math.ceil((stop - start) / block), per_chunk)
            if last > first
        ]
        for start, stop in ends
    ]


def nonce_of(rank: int, start: int, holders: int = 1) -> int:
    """Return the salt of random numbers for the segment from ``start`` on, which ``holders`` ranks encode alike."""
    return mixed(rank // holders * holders, holders, start)


def _message(operation: Send | Receive, segment: _Segment) -> _Message:
    return _Message(operation.peer, f"{segment.name} at step {operation.step}")


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length
