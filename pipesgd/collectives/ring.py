"""The ring all-reduce: reduce-scatter, then all-gather (Patarasuk & Yuan, 2009)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipesgd.collectives.schedule import ring_steps, ring_wire_bytes, split
from pipesgd.collectives.transport import Pending, Transport
from pipesgd.config import DEFAULT_SEGMENT_BYTES

SEGMENTS_AHEAD = 4
"""Receives of the reduce-scatter half that are posted before their segment is due. gloo's sender starts only when the
receiver is ready, so with one the wire would rest while a segment is added up. Each takes a segment of scratch."""
LEAST_SEGMENTS, SMALLEST_SEGMENT = 2, 128 << 10
"""A chunk is cut in two, as long as that leaves messages of some size, in bytes. A ring step waits for the one before
only segment by segment: with a second one on its way, a rank that the computation holds up leaves no gap on the wire.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """One message each way: elements of the buffer, and their names in errors and in the log."""

    send: slice
    receive: slice
    reduce: bool
    sent: str
    received: str


class RingAllReduce:
    """Sums a flat tensor over the ranks of ``transport``, in place, the same bytes on every rank.

    The buffer is cut into p chunks, a chunk into segments of at most ``segment_bytes``, and the segments
    of all 2(p-1) ring steps form one stream. What arrives as segment i of the stream is sent on as
    segment i + (segments of a chunk), so only the first chunk is ours to send unasked:

    1. Post the first receives, and send the segments of the own chunk.
    2. For each segment of the stream, in order: wait for it; in the reduce-scatter half add it to the own
       values; send it on, if the stream goes on that far; post more receives. Those of the all-gather half go
       straight to their place, so all of them are posted as soon as those of the reduce-scatter half are.
    3. Wait for the sends.

    A finished chunk is added up by one rank, whose bytes the others copy: hence the same on every rank.
    """

    def __init__(self, transport: Transport, *, segment_bytes: int = DEFAULT_SEGMENT_BYTES):
        self._transport = transport
        self._segment_bytes = segment_bytes
        self._scratch: list[Tensor] = []  # uint8, one for each receive that is posted ahead
        self._streams: dict[tuple[int, int], tuple[list[_Segment], int]] = {}

    def __call__(self, flat: Tensor) -> None:
        transport = self._transport
        right = (transport.rank + 1) % transport.world_size
        left = (transport.rank - 1) % transport.world_size
        stream, per_chunk = self._stream(flat)
        receives: list[tuple[Pending, Tensor]] = []
        sends: list[Pending] = []

        def post_receives(consumed: int) -> None:
            until = consumed + SEGMENTS_AHEAD
            for index in range(len(receives), until if until < len(stream) // 2 else len(stream)):
                segment = stream[index]
                place = flat[segment.receive]
                if segment.reduce:
                    place = self._scratch[index % SEGMENTS_AHEAD][: place.nbytes].view(flat.dtype)
                receives.append((transport.receive(place, left, segment.received), place))

        def send(index: int) -> None:
            segment = stream[index]
            sends.append(transport.send(flat[segment.send], right, segment.sent))

        # 1. The first receives, and the own chunk.
        post_receives(0)
        for index in range(min(per_chunk, len(stream))):
            send(index)
        # 2. The stream.
        for index, segment in enumerate(stream):
            pending, place = receives[index]
            pending.wait()
            if segment.reduce:
                flat[segment.receive].add_(place)
            if index + per_chunk < len(stream):
                send(index + per_chunk)
            post_receives(index + 1)
        # 3. The sends.
        for pending in sends:
            pending.wait()

    def wire_bytes(self, flat: Tensor) -> int:
        transport = self._transport
        return ring_wire_bytes(transport.rank, transport.world_size, flat.numel(), flat.element_size())

    def _stream(self, flat: Tensor) -> tuple[list[_Segment], int]:
        """The stream of segments for buffers like ``flat``, and how many a chunk has.

        Planned once: a run reduces buffers of a few sizes many thousand times.
        """
        key = (flat.numel(), flat.element_size())
        if key not in self._streams:
            self._streams[key] = self._plan(*key)
        return self._streams[key]

    def _plan(self, numel: int, element_size: int) -> tuple[list[_Segment], int]:
        transport = self._transport
        chunks = split(numel, transport.world_size)
        largest = max(stop - start for start, stop in chunks)
        nbytes = largest * element_size
        per_chunk = max(1, -(-nbytes // self._segment_bytes), min(LEAST_SEGMENTS, nbytes // SMALLEST_SEGMENT))
        segments = [
            [slice(start + begin, start + end) for begin, end in split(stop - start, per_chunk)]
            for start, stop in chunks
        ]
        stream = [
            _Segment(
                send=segments[step.send_chunk][j],
                receive=segments[step.receive_chunk][j],
                reduce=step.reduce,
                sent=f"chunk {step.send_chunk} segment {j} at ring step {s}",
                received=f"chunk {step.receive_chunk} segment {j} at ring step {s}",
            )
            for s, step in enumerate(ring_steps(transport.rank, transport.world_size))
            for j in range(per_chunk)
        ]
        needed = element_size * max((part.stop - part.start for chunk in segments for part in chunk), default=0)
        if stream and (not self._scratch or self._scratch[0].numel() < needed):
            self._scratch = [torch.empty(needed, dtype=torch.uint8) for _ in range(SEGMENTS_AHEAD)]
        return stream, per_chunk
