"""Recursive halving, then recursive doubling (Rabenseifner, 2004; Thakur, Rabenseifner & Gropp, 2005)."""

from __future__ import annotations

from pipesgd.comm.schedule import Encode, Operation, Receive, Schedule, Send


def halving_doubling(rank: int, world_size: int) -> Schedule:
    """2 log2 p steps with q chunks, q being the largest power of two that is not above p.

    Reduce-scatter: at distances q/2, ..., 2, 1 a rank gives its partner the half of its chunks that is the partner's,
    and adds up its own half, until one chunk is left: that of its own number. All-gather: the same backwards. Where p
    is no power of two, each of the p - q ranks above q gives all of its values to one below first, and gets the result
    from it at the end.

    Seen from a rank, chunk ``rank ^ k`` is at distance k. Chunks come in the order of falling distances, since what is
    far is sent on first, and are gathered in the order of rising ones.
    """
    q = 1 << (world_size.bit_length() - 1)
    steps = q.bit_length() - 1
    operations: list[Operation] = []
    if rank >= q:  # an extra rank
        partner = rank - q
        for k in reversed(range(q)):
            operations += [Encode(partner ^ k), Send(partner ^ k, partner, 0)]
        operations += [Receive(partner ^ k, partner, 2 * steps + 1, reduce=False) for k in range(q)]
        return Schedule(chunks=q, operations=tuple(operations))
    extra = rank + q if rank + q < world_size else None
    if extra is not None:
        operations += [Receive(rank ^ k, extra, 0, reduce=True) for k in reversed(range(q))]
    for step in range(1, steps + 1):
        distance = q >> step
        partner = rank ^ distance
        for k in reversed(range(distance)):
            operations += [Encode(partner ^ k), Send(partner ^ k, partner, step)]
        operations += [Receive(rank ^ k, partner, step, reduce=True) for k in reversed(range(distance))]
    if world_size > 1:
        operations.append(Encode(rank))
    for step in range(steps):
        distance = 1 << step
        partner = rank ^ distance
        operations += [Send(rank ^ k, partner, steps + 1 + step) for k in range(distance)]
        operations += [Receive(partner ^ k, partner, steps + 1 + step, reduce=False) for k in range(distance)]
    if extra is not None:
        operations += [Send(rank ^ k, extra, 2 * steps + 1) for k in range(q)]
    return Schedule(chunks=q, operations=tuple(operations))
