"""A Transport between threads of one process: collectives tested in milliseconds, message by message."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _rank_threads import in_threads
from torch import Tensor

DEADLINE = 10.0


@dataclass
class Network:
    """The wires between ``world_size`` threads: one first-in, first-out queue for each ordered pair."""

    world_size: int
    wires: dict[tuple[int, int], queue.Queue[Tensor]] = field(init=False)
    log: list[tuple[int, int, int, str]] = field(default_factory=list)
    """Sender, receiver, number of bytes and description (``what``) of every message."""

    def __post_init__(self) -> None:
        ranks = range(self.world_size)  # all created now: two threads creating the same one would lose messages
        self.wires = {(sender, receiver): queue.Queue() for sender in ranks for receiver in ranks}


class MemoryTransport:
    """One rank's end of a ``Network``. A receive takes its message when it is waited for, in the order posted."""

    def __init__(self, network: Network, rank: int):
        self.rank = rank
        self.world_size = network.world_size
        self.bytes_sent = 0
        self.bytes_received = 0
        self._network = network

    def send(self, tensor: Tensor, peer: int, what: str) -> Pending:
        self.bytes_sent += tensor.nbytes
        self._network.log.append((self.rank, peer, tensor.nbytes, what))
        self._network.wires[self.rank, peer].put(tensor.clone())
        return Pending(lambda: None)

    def receive(self, tensor: Tensor, peer: int, what: str) -> Pending:
        def take() -> None:
            message = self._network.wires[peer, self.rank].get(timeout=DEADLINE)
            assert message.shape == tensor.shape, (what, message.shape, tensor.shape)
            tensor.copy_(message)
            self.bytes_received += message.nbytes

        return Pending(take)


@dataclass
class Pending:
    wait: Callable[[], None]


def run_threads(world_size: int, function: Callable[[MemoryTransport], Any]) -> tuple[list[Any], Network]:
    """Run ``function(transport)`` in one thread per rank; return the results, and the network with its log."""
    network = Network(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(MemoryTransport(network, rank))
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    in_threads(world_size, run, 2 * DEADLINE)
    if errors:
        raise errors[0]
    left = {pair: wire.qsize() for pair, wire in network.wires.items() if wire.qsize()}
    assert not left, f"messages that nobody received: {left}"
    return results, network


def integers(numel: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return small integers that differ by rank: their sums are exact in every order and every dtype."""
    return ((torch.arange(numel) * 7 + rank * 3) % 11 - 5).to(dtype)


def first_of_equals(results: list[tuple[list[Tensor], Any]]) -> tuple[list[Tensor], list[Any]]:
    """Return the first rank's tensors, which must be the same bytes on all, and what every rank has found with them."""
    for tensors, _ in results[1:]:
        for ours, theirs in zip(tensors, results[0][0], strict=True):
            assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), "they differ"
    return results[0][0], [found for _, found in results]
