"""A Transport whose clock is not the machine's: the project's collectives, timed message by message, exactly.

Each rank has a clock of its own, a wire inside its node and one to other nodes. A message leaves when its sender has
come to it and the wire is free; it occupies the wire for bytes * beta and arrives alpha later. Who waits for it goes on
then, or at once if it has come. Codecs cost what ``TimedCodec`` says. Threads carry the messages, but since all
times travel with them, the result does not depend on which thread runs when.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipesgd.codecs.base import Codec
from pipesgd.collectives.schedule import Schedule
from pipesgd.collectives.scheduled import ScheduledAllReduce
from timing_model import CodecCost, LinkParams

DEADLINE = 30.0


@dataclass
class VirtualNetwork:
    """Equal nodes of ranks with adjoining numbers, joined by equal links."""

    world_size: int
    link: LinkParams
    inner: LinkParams
    ranks_per_node: int = 1
    wires: dict[tuple[int, int], queue.Queue[tuple[Tensor, float]]] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(self.world_size)
        self.wires = {(sender, receiver): queue.Queue() for sender in ranks for receiver in ranks}


class VirtualTransport:
    """One rank's end of a ``VirtualNetwork``."""

    def __init__(self, network: VirtualNetwork, rank: int):
        self.rank = rank
        self.world_size = network.world_size
        self.bytes_sent = 0
        self.bytes_received = 0
        self.now = 0.0
        self._network = network
        self._free = [0.0, 0.0]
        """When the wire inside the node has sent all so far, and the one to others."""

    @property
    def end(self) -> float:
        return max(self.now, *self._free)

    def send(self, tensor: Tensor, peer: int, what: str) -> _Pending:
        network = self._network
        outside = peer // network.ranks_per_node != self.rank // network.ranks_per_node
        link = network.link if outside else network.inner
        self.now += link.overhead
        left = max(self._free[outside], self.now) + tensor.nbytes * link.beta
        self._free[outside] = left
        network.wires[self.rank, peer].put((tensor.clone(), left + link.alpha))
        return _Pending(lambda: self._wait_until(left))

    def receive(self, tensor: Tensor, peer: int, what: str) -> _Pending:
        def take() -> None:
            message, arrival = self._network.wires[peer, self.rank].get(timeout=DEADLINE)
            assert message.shape == tensor.shape, (what, message.shape, tensor.shape)
            tensor.copy_(message)
            self._wait_until(arrival)

        return _Pending(take)

    def _wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass
class _Pending:
    wait: Callable[[], None]


class TimedCodec:
    """``codec``, whose calls take the time that ``cost`` says, on the clock of ``transport``."""

    def __init__(self, codec: Codec, cost: CodecCost, transport: VirtualTransport):
        self.name, self.block = codec.name, codec.block
        self.unbiased, self.in_place = codec.unbiased, codec.in_place
        self.wire_bytes = codec.wire_bytes
        self._codec, self._cost, self._transport = codec, cost, transport

    def encode(self, values: Tensor, residual: Tensor | None, wire: Tensor, key: int) -> None:
        self._spend(self._cost.encode, values)
        self._codec.encode(values, residual, wire, key)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        self._spend(self._cost.decode, values)
        self._codec.decode(wire, values)

    def decode_add(self, wire: Tensor, values: Tensor) -> None:
        self._spend(self._cost.add, values)
        self._codec.decode_add(wire, values)

    def decode_add_encode(
        self, received: Tensor, values: Tensor, residual: Tensor | None, wire: Tensor, key: int
    ) -> None:
        self._spend(self._cost.hop, values)
        self._codec.decode_add_encode(received, values, residual, wire, key)

    def _spend(self, rate: float, values: Tensor) -> None:
        self._transport.now += rate * values.numel() + self._cost.call


def virtual_time(
    schedule: Callable[[int, int], Schedule],
    network: VirtualNetwork,
    codec: Codec,
    cost: CodecCost,
    numel: int,
    segment_bytes: int,
) -> float:
    """Seconds that ``ScheduledAllReduce`` takes to reduce ``numel`` values, until the last rank is done."""
    transports = [VirtualTransport(network, rank) for rank in range(network.world_size)]
    errors: list[BaseException] = []

    def run(transport: VirtualTransport) -> None:
        try:
            ScheduledAllReduce(
                transport,
                schedule(transport.rank, network.world_size),
                TimedCodec(codec, cost, transport),
                segment_bytes=segment_bytes,
            )(torch.ones(numel))
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return max(transport.end for transport in transports)
