"""Who sends which chunk to whom at which ring step. Integers only: no tensors, no communication."""

from __future__ import annotations

from dataclasses import dataclass


def split(numel: int, parts: int) -> list[tuple[int, int]]:
    """``parts`` adjoining (start, stop) that cover ``numel`` elements, sizes differing by one at most.

    >>> split(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    return [(numel * i // parts, numel * (i + 1) // parts) for i in range(parts)]


@dataclass(frozen=True, kw_only=True)
class RingStep:
    """What one rank does at one ring step: send a chunk to the right, receive another from the left."""

    send_chunk: int
    receive_chunk: int
    reduce: bool
    """Add what arrives to the own chunk (reduce-scatter), or put it in its place (all-gather)."""


def ring_steps(rank: int, world_size: int) -> list[RingStep]:
    """The 2(p-1) ring steps of ``rank`` in a ring all-reduce (Patarasuk & Yuan, 2009).

    Reduce-scatter, p-1 steps: chunk r travels from rank r around the ring, summed up on its way, and is
    finished on rank r-1. All-gather, p-1 steps: the finished chunks travel around once more. What a rank
    receives at one step is what it sends at the next: there is no other dependence.
    """
    p = world_size
    reduce_scatter = [
        RingStep(send_chunk=(rank - s) % p, receive_chunk=(rank - s - 1) % p, reduce=True) for s in range(p - 1)
    ]
    all_gather = [
        RingStep(send_chunk=(rank - s + 1) % p, receive_chunk=(rank - s) % p, reduce=False) for s in range(p - 1)
    ]
    return reduce_scatter + all_gather


def ring_bytes_sent(rank: int, world_size: int, nbytes_of_chunk: list[int]) -> int:
    """Bytes that ``rank`` sends in one ring all-reduce of chunks of these sizes: about 2(p-1)/p of all."""
    return sum(nbytes_of_chunk[step.send_chunk] for step in ring_steps(rank, world_size))


def ring_wire_bytes(rank: int, world_size: int, numel: int, element_size: int) -> int:
    """Bytes that ``rank`` sends in one ring all-reduce of ``numel`` elements, cut into p chunks."""
    chunks = split(numel, world_size)
    return ring_bytes_sent(rank, world_size, [(stop - start) * element_size for start, stop in chunks])
