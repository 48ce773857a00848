"""All-to-all, a sum, and all-gather: every rank with every other at once (Theano-MPI's ASA, Ma et al., 2016)."""

from __future__ import annotations

from pipesgd.comm.schedule import Encode, Operation, Receive, Schedule, Send


def all_to_all(rank: int, world_size: int) -> Schedule:
    """Two steps with p chunks: chunk r of all ranks goes to rank r, which sums it up in float32 and sends it to all.

    A value is encoded once by each rank, and once as a sum: the fewest roundings of all algorithms. p-1 senders meet at
    every card.
    """
    p = world_size
    if p == 1:
        return Schedule(chunks=1, operations=())
    operations: list[Operation] = []
    for k in range(1, p):
        peer = (rank + k) % p
        operations += [Encode(peer), Send(peer, peer, 0)]
    operations += [Receive(rank, (rank - k) % p, 0, reduce=True) for k in range(1, p)]
    operations.append(Encode(rank))
    operations += [Send(rank, (rank + k) % p, 1) for k in range(1, p)]
    operations += [Receive((rank - k) % p, (rank - k) % p, 1, reduce=False) for k in range(1, p)]
    return Schedule(chunks=p, operations=tuple(operations))
