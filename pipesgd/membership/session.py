"""The part of a store that belongs to one attempt of a job."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import torch.distributed as dist

from pipesgd.errors import DeadlineExceeded, named
from pipesgd.membership.store import BoundedStore, decode_text, poll


def open_session(
    store: dist.Store, rank: int, world_size: int, timeout: float, number: Callable[[int], int] = int
) -> dist.Store:
    """Return a part of ``store`` that no process of an earlier attempt has written to.

    torchrun keeps the store when it restarts the ranks (``--max-restarts``), and its count of restarts may
    differ between machines. So every process chooses a name of its own, and rank 0 answers each name that it
    finds with its own name, which becomes the session's. Nobody reads an answer to a dead process.
    Errors name each rank by its ``number``.
    """
    calls = BoundedStore(store, lambda: timeout)
    me = uuid.uuid4().hex
    if rank > 0:
        calls.set(f"name of rank {rank}", me)
        if not poll(lambda: calls.check([f"answer to {me}"]), timeout):
            reason = f"no answer within {timeout:g} s"
            raise DeadlineExceeded(rank=number(rank), peer=number(0), operation="start", reason=reason)
        session = decode_text(calls.get([f"answer to {me}"])[0])
        calls.set(f"{session}/joined by {rank}", "")
        return dist.PrefixStore(session, store)

    missing = list(range(1, world_size))

    def answer() -> bool:
        missing[:] = [other for other in missing if not calls.check([f"{me}/joined by {other}"])]
        for other in missing:
            if calls.check([f"name of rank {other}"]):
                name = decode_text(calls.get([f"name of rank {other}"])[0])
                calls.set(f"answer to {name}", me)
        return not missing

    if not poll(answer, timeout):
        reason = f"no message within {timeout:g} s from {named([number(other) for other in missing])}"
        raise DeadlineExceeded(rank=number(rank), peer=number(missing[0]), operation="start", reason=reason)
    return dist.PrefixStore(me, store)
