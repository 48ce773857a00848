"""A program that adds an all-reduce as a user would, by its schedule and one entry, and then runs a command with it.

torchrun ... _sixth_all_reduce.py train [options of pipesgd.train]
python _sixth_all_reduce.py predict [options of timing-model predict]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from timing_model import schedules
from timing_model.schedules import Encode, Operation, Receive, Schedule, Send


def binomial_tree(rank: int, world_size: int) -> Schedule:
    """Return the schedule that sums up a binomial tree to rank 0, and sends the result back down."""
    operations: list[Operation] = []
    children: list[int] = []
    parent, step = None, 0
    while parent is None and 1 << step < world_size:
        if rank & (1 << step):
            parent = rank - (1 << step)
        elif rank + (1 << step) < world_size:
            children.append(rank + (1 << step))
        step += 1
    operations += [Receive(0, child, child - rank, reduce=True) for child in children]
    if world_size > 1:
        operations.append(Encode(0))
    if parent is not None:
        operations += [Send(0, parent, rank - parent), Receive(0, parent, rank - parent, reduce=False)]
    operations += [Send(0, child, child - rank) for child in reversed(children)]
    return Schedule(chunks=1, operations=tuple(operations))


def main(command: str, words: Sequence[str]) -> None:
    if command == "predict":
        from timing_model.cli import main as timing_model

        sys.exit(timing_model(["predict", *words]))
    from pipesgd.exit import run_and_exit
    from pipesgd.train import train

    run_and_exit(train, words)


if __name__ == "__main__":
    schedules.SCHEDULES["binomial-tree"] = binomial_tree
    schedules.ALL_REDUCES = (*schedules.SCHEDULES, "hierarchical", "native")
    main(sys.argv[1], sys.argv[2:])
