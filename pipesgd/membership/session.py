"""The part of a store that belongs to one attempt of a job."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from pipesgd.errors import DeadlineExceeded, UserInputError, named
from pipesgd.membership.sealed import is_of_another_secret, part
from pipesgd.membership.store import BoundedStore, decode_text, poll
from pipesgd.membership.watcher import FAILURE, report_key

_PROCESS = uuid.uuid4().hex
"""Name of this process, with which all names that it chooses begin."""

FORGED_SECONDS = 1.5
"""Seconds for which a rank's name may be a forged one, which that rank writes again, before the start fails."""


def open_session(
    store: dist.Store, rank: int, world_size: int, timeout: float, number: Callable[[int], int] = int
) -> dist.Store:
    """Return a part of ``store`` that no process of an earlier attempt has written to.

    torchrun keeps the store when it restarts the ranks (``--max-restarts``), and its count of restarts may
    differ between machines. So every process chooses a name of its own, and rank 0 answers each name that it
    finds with its own name, which becomes the session's. Nobody reads an answer to a dead process.
    The other ranks may not know yet that a process is dead, and its successor would wait for them in vain: so it first
    reports its predecessor's end to the session that this was in.
    Errors name each rank by its ``number``.

    Raises:
        UserInputError: another rank has another secret, or none where this one has one.
        DeadlineExceeded: a rank has not come in time.
    """
    calls = BoundedStore(store, lambda: timeout)
    me = _PROCESS + uuid.uuid4().hex
    _report_predecessor(calls, rank, number(rank))
    calls.set(f"name of rank {rank}", me)
    if rank == 0:
        calls.set(f"answer to {me}", me)
        calls.set(f"{me}/joined by 0", "")
    else:
        check_secret = _secret_check(calls, number)

        def is_answered() -> bool:
            check_secret([0])
            return calls.check([f"answer to {me}"])

        if not poll(is_answered, timeout):
            reason = f"no answer within {timeout:g} s"
            raise DeadlineExceeded(rank=number(rank), peer=number(0), operation="start", reason=reason)
        session = decode_text(calls.get([f"answer to {me}"])[0])
        calls.set(f"{session}/joined by {rank}", "")
        return part(store, session)

    missing = list(range(1, world_size))
    check_secret = _secret_check(calls, number)

    def answer() -> bool:
        # Names are read first: one that is read later may be of a rank that has joined, and is at its next session.
        present = [other for other in missing if calls.check([f"name of rank {other}"])]
        names = {other: decode_text(calls.get([f"name of rank {other}"])[0]) for other in present}
        missing[:] = [other for other in missing if not calls.check([f"{me}/joined by {other}"])]
        check_secret(missing)
        for other in missing:
            if other in names:
                calls.set(f"answer to {names[other]}", me)
        return not missing

    if not poll(answer, timeout):
        reason = f"no message within {timeout:g} s from {named([number(other) for other in missing])}"
        raise DeadlineExceeded(rank=number(rank), peer=number(missing[0]), operation="start", reason=reason)
    return part(store, me)


def _secret_check(calls: BoundedStore, number: Callable[[int], int]) -> Callable[[list[int]], None]:
    """Return a function that is to be called with the ranks that are waited for, while they are."""
    since: dict[int, float] = {}

    def check(others: list[int]) -> None:
        now = time.monotonic()
        for other in others:
            if not calls.run(lambda store, key=f"name of rank {other}": is_of_another_secret(store, key)):  # type: ignore[misc]
                since.pop(other, None)
            elif now >= since.setdefault(other, now) + FORGED_SECONDS:
                raise UserInputError(
                    "secret-file must be the same on all ranks, or be given on none; got a name of rank "
                    f"{number(other)} in the store that has another secret's seal, or is forged"
                )

    return check


def _report_predecessor(calls: BoundedStore, rank: int, number: int) -> None:
    """Report that the process that was this ``rank`` before has ended, if it was in a session without a failure."""
    if not calls.check([f"name of rank {rank}"]):
        return
    name = decode_text(calls.get([f"name of rank {rank}"])[0])
    if name.startswith(_PROCESS) or not calls.check([f"answer to {name}"]):
        return
    session = decode_text(calls.get([f"answer to {name}"])[0])
    # A process that had not joined yet is simply replaced by this one.
    if calls.check([f"{session}/joined by {rank}"]) and not calls.check([f"{session}/{FAILURE}"]):
        reason = f"rank {number}: its process has ended without a word, and another one has been started"
        calls.set(f"{session}/{report_key(rank)}", json.dumps([reason, None]))
        calls.set(f"{session}/{FAILURE}", "")
