"""A sum up a binomial tree and down again: an all-reduce of your own, used by the command and by the timing model.

    torchrun --nproc-per-node 3 -m pipesgd.train --all-reduce own_all_reduce:binomial_tree --lr 0.05
    python -m timing_model predict --all-reduce own_all_reduce:binomial_tree --world-size 6 \
        --latency 50us --bandwidth 1Gbit/s --parameters 11.7M --compute 0.3s

Run them in this folder. docs/extending.md explains it.
"""

from __future__ import annotations

from timing_model.schedules import Encode, Operation, Receive, Schedule, Send


def binomial_tree(rank: int, world_size: int) -> Schedule:
    """Return a schedule of one chunk: rank 0 gets the sum in about log2(p) steps, and all get it in as many more."""
    children: list[int] = []
    parent, distance = None, 1
    while parent is None and distance < world_size:
        if rank & distance:
            parent = rank - distance
        elif rank + distance < world_size:
            children.append(rank + distance)
        distance *= 2
    operations: list[Operation] = [Receive(0, child, child - rank, reduce=True) for child in children]
    if world_size > 1:
        operations.append(Encode(0))
    if parent is not None:
        operations += [Send(0, parent, rank - parent), Receive(0, parent, rank - parent, reduce=False)]
    operations += [Send(0, child, child - rank) for child in reversed(children)]
    return Schedule(chunks=1, operations=tuple(operations))
