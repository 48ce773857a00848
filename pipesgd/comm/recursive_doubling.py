"""Recursive doubling: few messages, each with the whole buffer, for small ones (Thakur et al., 2005)."""

from __future__ import annotations

from pipesgd.comm.schedule import Encode, Operation, Receive, Schedule, Send


def recursive_doubling(rank: int, world_size: int) -> Schedule:
    """log2 p steps with one chunk: partners at distances 1, 2, 4, ... exchange what they have, and add it up.

    Both add the same two messages, so they go on with the same values, and encode them to the same bytes. Where p is no
    power of two, each rank above the largest one, q, gives its values to one below first, and gets the result at the
    end, which therefore all encode once more.
    """
    q = 1 << (world_size.bit_length() - 1)
    steps = q.bit_length() - 1
    if rank >= q:  # an extra rank
        partner = rank - q
        return Schedule(
            chunks=1,
            operations=(Encode(0), Send(0, partner, 0), Receive(0, partner, steps + 1, reduce=False)),
        )
    extra = rank + q if rank + q < world_size else None
    operations: list[Operation] = []
    if extra is not None:
        operations.append(Receive(0, extra, 0, reduce=True))
    for step in range(steps):
        partner = rank ^ (1 << step)
        operations += [
            Encode(0, holders=1 << step),
            Send(0, partner, step + 1),
            Receive(0, partner, step + 1, reduce=True),
        ]
    if world_size > q:
        operations.append(Encode(0, holders=q))
    if extra is not None:
        operations.append(Send(0, extra, steps + 1))
    return Schedule(chunks=1, operations=tuple(operations))
