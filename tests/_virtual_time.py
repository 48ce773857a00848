"""The project's collectives in virtual time: recorded as they run, then timed message by message.

Every rank runs the real code in a thread, over a Transport that records its operations: waiting for a message,
working in a codec for as long as a ``CodecCost`` says, sending. ``timing_model.simulate_messages`` then plays these
programs. The record, and thus the time, does not depend on the order in which threads run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from _memory_transport import MemoryTransport, Pending, run_threads
from torch import Tensor

from pipesgd.codecs.base import Codec
from pipesgd.comm.all_reduce import ScheduledAllReduce
from timing_model.params import CodecCost
from timing_model.schedules import Schedule
from timing_model.simulate_messages import Network, Task, simulate_messages


class RecordingTransport:
    """A Transport that delegates to another one, and records this rank's operations as ``Task``s."""

    def __init__(self, transport: MemoryTransport, posted: bool):
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.bytes_sent = 0
        self.bytes_received = 0
        self.tasks: list[Task] = []
        self._transport = transport
        self._posted = posted

    def send(self, tensor: Tensor, peer: int, what: str) -> Pending:
        pending = self._transport.send(tensor, peer, what)
        memory = tensor.data_ptr()
        sends = ((peer, tensor.nbytes),)
        if self.tasks and self.tasks[-1].sends and self.tasks[-1].memory == memory:  # the same message, to another rank
            self.tasks[-1] = self.tasks[-1]._replace(sends=self.tasks[-1].sends + sends)
        else:
            self.tasks.append(Task(sends=sends, memory=memory))

        def wait() -> None:
            pending.wait()
            self.tasks.append(Task(memory=memory))

        return Pending(wait)

    def receive(self, tensor: Tensor, peer: int, what: str) -> Pending:
        pending = self._transport.receive(tensor, peer, what)
        if self._posted:
            self.tasks.append(Task(posts=(peer,)))

        def wait() -> None:
            pending.wait()
            self.tasks.append(Task(source=peer))

        return Pending(wait)


class TimedCodec:
    """A wrapper of ``codec`` that records the time of each call, according to ``cost``, in ``transport``."""

    def __init__(self, codec: Codec, cost: CodecCost, transport: RecordingTransport):
        self.name, self.block = codec.name, codec.block
        self.unbiased, self.in_place = codec.unbiased, codec.in_place
        self.wire_bytes = codec.wire_bytes
        self._codec, self._cost, self._transport = codec, cost, transport

    def encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        self._spend("encode", values)
        self._codec.encode(values, residual, wire, key)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        self._spend("decode", values)
        self._codec.decode(wire, values)

    def decode_add(self, wire: Tensor, values: Tensor) -> None:
        self._spend("add", values)
        self._codec.decode_add(wire, values)

    def decode_add_encode(
        self, received: Tensor, values: Tensor, residual: Tensor | None, wire: Tensor, key: int
    ) -> None:
        self._spend("hop", values)
        self._codec.decode_add_encode(received, values, residual, wire, key)

    def _spend(self, operation: str, values: Tensor) -> None:
        self._transport.tasks.append(Task(seconds=self._cost.seconds(values.numel())[operation]))


def virtual_time(
    schedule: Callable[[int, int], Schedule],
    world_size: int,
    network: Network,
    codec: Codec,
    cost: CodecCost,
    numel: int,
    segment_bytes: int,
    *,
    posted: bool = False,
) -> float:
    """Return the seconds that ``ScheduledAllReduce`` takes to reduce ``numel`` values, until the last rank is done.

    With ``posted``, no message leaves before its receive is posted.
    """

    def record(memory: MemoryTransport) -> list[Task]:
        transport = RecordingTransport(memory, posted)
        all_reduce = ScheduledAllReduce(
            transport,
            schedule(transport.rank, world_size),
            TimedCodec(codec, cost, transport),
            segment_bytes=segment_bytes,
        )
        all_reduce(torch.ones(numel))
        return transport.tasks

    programs, _ = run_threads(world_size, record)
    return max(simulate_messages(programs, network))
