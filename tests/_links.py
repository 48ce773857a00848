"""Ranks as threads of one process that communicate over real connections, of each transport, with a secret or not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _rank_threads import in_threads

from pipesgd import keys
from pipesgd.membership.heartbeat import Standing
from pipesgd.membership.sealed import sealed
from pipesgd.membership.secret import Secret, job_secret
from pipesgd.ranks import Ranks
from pipesgd.sections import TRANSPORTS

DEADLINE = 20.0
OWN_TRANSPORTS = tuple(name for name in TRANSPORTS if name != "gloo")


def ranks_of_threads(
    world_size: int, secret: Secret | None = None, timeout: float = DEADLINE, store: dist.Store | None = None
) -> list[Ranks]:
    """Return ranks of one store in memory. Their numbers let gloo connect without a default process group."""
    shared = sealed(dist.HashStore() if store is None else store, secret)
    return [
        Ranks(
            rank=rank,
            world_size=world_size,
            store=shared,
            secret=secret,
            standing=Standing(timeout),
            numbers=tuple(range(world_size)),
        )
        for rank in range(world_size)
    ]


def run(all_ranks: list[Ranks], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(ranks, *args)`` in one thread for each rank; return what each returned or raised."""
    results: list[Any] = [None] * len(all_ranks)

    def one(rank: int) -> None:
        try:
            results[rank] = function(all_ranks[rank], *args)
        except Exception as failure:  # noqa: BLE001 (the test looks at it)
            results[rank] = failure

    in_threads(len(all_ranks), one, 2 * DEADLINE)
    return results


def secured(ranks: Ranks, transport: str) -> Ranks:
    """Return the ``ranks``, with a secret and a certificate if the ``transport`` needs them. Collective."""
    if transport == "tls" and ranks.secret is None:
        path = ""
        if ranks.rank == 0:
            path = f"{tempfile.mkdtemp()}/job.key"
            keys.make(Path(path), certificate=True)
        ranks.secret = job_secret(ranks.all_gather_object("file of the secret", path)[0])
    return ranks


def new_secret(folder: Path, *, certificate: bool = False) -> Secret:
    """Return a new secret, in a file of its own in ``folder``."""
    path = folder / f"{len(list(folder.iterdir()))}.key"
    keys.make(path, certificate=certificate)
    secret = job_secret(path)
    assert secret is not None
    return secret
