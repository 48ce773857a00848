"""The ring: reduce-scatter, then all-gather, between neighbours (Patarasuk & Yuan, 2009)."""

from __future__ import annotations

from collections.abc import Sequence

from pipesgd.comm.schedule import Encode, Operation, Receive, Schedule, Send, split


def ring(rank: int, world_size: int) -> Schedule:
    """The 2(p-1) ring steps of ``rank``, with p chunks.

    Reduce-scatter, p-1 steps: chunk r travels from rank r around the ring, summed up on its way, and is finished on
    rank r-1. All-gather, p-1 steps: the finished chunks travel around once more. What a rank receives at one step is
    what it sends at the next: there is no other dependence.
    """
    p = world_size
    if p == 1:
        return Schedule(chunks=1, operations=())
    own = reduce_scatter(rank, range(p), [[chunk] for chunk in range(p)])
    return Schedule(
        chunks=p,
        operations=(
            *own,
            Encode((rank + 1) % p),
            *all_gather(rank, range(p), [[chunk] for chunk in range(p)], first_step=p - 1),
        ),
    )


def reduce_scatter(
    index: int, members: Sequence[int], groups: Sequence[Sequence[int]], first_step: int = 0
) -> list[Operation]:
    """Ring steps after which ``members[index]`` holds the sum of the chunks in ``groups[index + 1]``.

    ``members`` are the ranks on the ring, ``groups`` the chunks that travel together, one group for each member.
    """
    p = len(members)
    left, right = members[(index - 1) % p], members[(index + 1) % p]
    operations: list[Operation] = []
    for step in range(p - 1):
        for chunk in groups[(index - step) % p]:
            operations += [Encode(chunk), Send(chunk, right, first_step + step)]
        for chunk in groups[(index - step - 1) % p]:
            operations.append(Receive(chunk, left, first_step + step, reduce=True))
    return operations


def all_gather(
    index: int, members: Sequence[int], groups: Sequence[Sequence[int]], first_step: int = 0
) -> list[Operation]:
    """Ring steps that bring the chunks of ``groups[index + 1]``, which ``members[index]`` has, to all members."""
    p = len(members)
    left, right = members[(index - 1) % p], members[(index + 1) % p]
    operations: list[Operation] = []
    for step in range(p - 1):
        operations += [Send(chunk, right, first_step + step) for chunk in groups[(index - step + 1) % p]]
        operations += [Receive(chunk, left, first_step + step, reduce=False) for chunk in groups[(index - step) % p]]
    return operations


def ring_wire_bytes(rank: int, world_size: int, numel: int, element_size: int) -> int:
    """Bytes that ``rank`` sends in a ring all-reduce of ``numel`` elements: about 2(p-1)/p of them."""
    chunks = split(numel, world_size)
    sizes = [(stop - start) * element_size for start, stop in chunks]
    return sum(sizes[send.chunk] for send in ring(rank, world_size).sends)


def gather_ring(rank: int, world_size: int) -> Schedule:
    """The p-1 ring steps that give every rank all p chunks, of which rank r has chunk r."""
    p = world_size
    gathered = all_gather(rank, range(p), [[(member - 1) % p] for member in range(p)])
    return Schedule(chunks=p, operations=(Encode(rank), *gathered) if p > 1 else ())
