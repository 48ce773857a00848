"""Ranks as threads that share a store in memory: agreements between ranks are tested in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pipesgd.ranks import Ranks, Standing

DEADLINE = 20.0


def run_rank_threads(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(ranks, *args)`` in one thread per rank; return what each returned or raised, in rank order.

    Every rank is the only one of its machine.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            ranks = Ranks(rank=rank, world_size=world_size, store=store, standing=Standing(DEADLINE))
            results[rank] = function(ranks, *args)
        except Exception as failure:  # noqa: BLE001 (the test looks at it)
            results[rank] = failure

    in_threads(world_size, run, 2 * DEADLINE)
    return results


def in_threads(world_size: int, run: Callable[[int], None], seconds: float) -> None:
    """Run ``run(rank)`` in one thread per rank, each of which must end within ``seconds``."""
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a thread hangs"
