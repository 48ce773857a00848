"""Groups of ranks that reduce together while a calibration measures fewer ranks than there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipesgd.comm.transport import Pending, Transport
from pipesgd.ranks import Ranks

MOST_IN_TURN = 4
"""Largest number up to which every number of ranks is measured; after it come powers of two, and all ranks."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Location of a rank."""

    node: int
    """Number of the node, counted from 0 in the order of the ranks."""
    local_rank: int


def places_of(ranks: Ranks) -> list[Placement]:
    """Return the place of every rank. Collective."""
    return places(ranks.all_gather_object("places", ranks.local_rank))


def places(local_ranks: Sequence[int]) -> list[Placement]:
    """Return the places of ranks with these local ranks; torchrun gives the ranks of a node consecutive numbers.

    >>> [place.node for place in places([0, 1, 0, 1])]
    [0, 0, 1, 1]
    """
    found: list[Placement] = []
    node = -1
    for local_rank in local_ranks:
        node += local_rank == 0
        found.append(Placement(node=max(node, 0), local_rank=local_rank))
    return found


def groups_to_measure(where: Sequence[Placement], slow: Sequence[int] = ()) -> list[list[int]]:
    """Return the ranks of each group, smallest first, all ranks last.

    Smaller groups have no two ranks on one node, unless all are on the same one: they are meant to show the network.
    Ranks in ``slow`` are in every group that has room for them, since all ranks together are as fast as their links.
    """
    world_size = len(where)
    one_node = where[0].node == where[-1].node
    spread = [rank for rank, place in enumerate(where) if one_node or place.local_rank == 0]
    spread.sort(key=lambda rank: (rank not in slow, rank))
    sizes = {*range(2, MOST_IN_TURN + 1), *(1 << k for k in range(3, world_size.bit_length()))}
    groups = [sorted(spread[:size]) for size in sorted(sizes) if size <= len(spread) and size < world_size]
    return [*groups, list(range(world_size))]


class Part:
    """Some of the ranks of a transport, renumbered: rank 0 is ``members[0]``."""

    def __init__(self, transport: Transport, members: Sequence[int]):
        self.rank = members.index(transport.rank)
        self.world_size = len(members)
        self._transport = transport
        self._members = members

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._transport.bytes_received

    def send(self, tensor: Tensor, peer: int, what: str) -> Pending:
        return self._transport.send(tensor, self._members[peer], what)

    def receive(self, tensor: Tensor, peer: int, what: str) -> Pending:
        return self._transport.receive(tensor, self._members[peer], what)
