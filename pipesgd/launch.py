"""Joining and leaving the other ranks, and what they tell each other outside of training.

The only reader of the variables that torchrun sets. Ranks talk here through the key-value store that
torchrun's agent (or rank 0) holds: to agree on something before any of them acts on it, and, when the
run fails, to find out who is missing. Gradients never pass through it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.errors import CommunicationError, DeadlineExceeded, RunError, UserInputError

T = TypeVar("T")

HOW_TO_START = "torchrun --nproc-per-node 4 -m pipesgd.train ..."
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

POLL_SECONDS = 0.5
"""How often a wait for other ranks looks whether one of them has failed."""

REPORT_GRACE_SECONDS = 1.0
"""How long a failing rank waits for the others' reports before it names the silent ones."""


@dataclass(eq=False)
class Ranks:
    """The ranks of this job and the store that they share.

    ``exchange`` and ``agree`` must be called by all ranks in the same order.
    """

    rank: int
    world_size: int
    store: dist.Store
    local_rank: int = 0
    restart_count: int = 0
    """How often torchrun has restarted this job (``--max-restarts``)."""
    by_torchrun: bool = True
    timeout: float = DEFAULT_TIMEOUT
    _exchanges: int = field(default=0, init=False)
    _own_keys: list[str] = field(default_factory=list, init=False)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value`` (anything JSON can write), in rank order.

        Raises:
            DeadlineExceeded: some ranks did not come to this exchange within ``timeout`` seconds.
            CommunicationError: a rank has failed meanwhile.
        """
        self._exchanges += 1
        keys = [f"exchange/{self._exchanges}/{what}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(value))
        self._wait_for(keys, f"exchange of {what}")
        values = [json.loads(self.store.get(key)) for key in keys]
        # Who has come to this exchange has read the last one: its key can go, so the store stays small.
        self._own_keys.append(keys[self.rank])
        if len(self._own_keys) > 2:
            self.store.delete_key(self._own_keys.pop(0))
        return values

    def agree(self, what: str, attempt: Callable[[], T]) -> T:
        """This rank's ``attempt()``; if it raises ``UserInputError`` on any rank, all ranks raise that.

        The error is then ``known_to_all``: one rank's word is enough.
        """
        failure: UserInputError | None = None
        try:
            result = attempt()
        except UserInputError as error:
            failure = error
        said = self.exchange(what, None if failure is None else str(failure))
        errors = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if not errors:
            return result
        rank, text = errors[0]
        agreed = UserInputError(text if said.count(text) == self.world_size else f"rank {rank}: {text}")
        agreed.known_to_all = True
        raise agreed from failure

    def wait_until_all_have_spoken(self) -> None:
        """Return once all ranks have called this, or after some seconds.

        torchrun ends all ranks as soon as one exits: nobody may exit before the others have said why.
        """
        try:
            self.store.set(f"spoken/{self.rank}", "")
            self.store.wait([f"spoken/{rank}" for rank in range(self.world_size)], timedelta(seconds=5))
        except RuntimeError:
            return  # a rank, or the store, is gone: nobody is left to wait for

    def start_process_group(self, device: str, timeout: float) -> None:
        """Start torch's default process group with this deadline for every operation.

        Raises:
            CommunicationError: not every rank could be reached.
        """
        self.timeout = timeout
        if device == "cuda":
            torch.cuda.set_device(self.local_rank)
        try:
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=dist.PrefixStore("default", self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout),
            )
        except RuntimeError as failure:
            raise lost(failure, self.rank, None, "connection to all ranks", timeout) from failure

    def diagnose(self, error: str) -> str:
        """``error``, and which ranks have no word to say about the failure: they are dead or hang.

        Every failing rank leaves its report in the store and waits a moment for the others'.
        """
        try:
            self.store.set(f"failure/{self.rank}", error)
            silent = self._silent_ranks(REPORT_GRACE_SECONDS)
        except RuntimeError:
            return f"{error} (the store that the ranks share is gone too)"
        if not silent:
            return error
        names = ", ".join(str(rank) for rank in silent)
        return f"{error}; no word from rank{'s' if len(silent) > 1 else ''} {names}"

    def leave(self) -> None:
        """End torch's process groups of this process."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait_for(self, keys: list[str], what: str) -> None:
        deadline = time.monotonic() + self.timeout
        while not self._wait_briefly(keys):
            failed = [rank for rank in range(self.world_size) if self.store.check([f"failure/{rank}"])]
            if failed:
                report = self.store.get(f"failure/{failed[0]}").decode()
                raise CommunicationError(rank=self.rank, peer=failed[0], operation=what, reason=report)
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise DeadlineExceeded(
                    rank=self.rank,
                    peer=missing[0] if missing else None,
                    operation=what,
                    reason=f"no word within {self.timeout:g} s from ranks {missing}",
                )

    def _wait_briefly(self, keys: list[str]) -> bool:
        try:
            self.store.wait(keys, timedelta(seconds=min(POLL_SECONDS, self.timeout)))
        except RuntimeError as failure:
            if "timeout" in str(failure).lower():  # torch's stores have no type of their own for it
                return False
            raise RunError(f"rank {self.rank}: the store that the ranks share is gone: {failure}") from failure
        return True

    def _silent_ranks(self, grace: float) -> list[int]:
        deadline = time.monotonic() + grace
        silent = list(range(self.world_size))
        while silent:
            silent = [rank for rank in silent if not self.store.check([f"failure/{rank}"])]
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return silent


def join() -> Ranks:
    """The ranks that torchrun started this process with; one rank alone without torchrun.

    Raises:
        UserInputError: torchrun's variables are set in part only.
        CommunicationError: the store of the job cannot be reached.
    """
    given = [name for name in _TORCHRUN_VARIABLES if name in os.environ]
    if not given:
        return Ranks(rank=0, world_size=1, store=dist.HashStore(), by_torchrun=False)
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise UserInputError(
            f"torchrun's variables must be set all or none; got {', '.join(given)} without {', '.join(missing)} "
            f"(start with: {HOW_TO_START})"
        )
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=DEFAULT_TIMEOUT))))
    except RuntimeError as failure:
        rank = int(os.environ["RANK"])
        raise lost(failure, rank, None, "connection to the other ranks", DEFAULT_TIMEOUT) from failure
    return Ranks(
        rank=rank,
        world_size=world_size,
        store=dist.PrefixStore("pipesgd", store),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def current(timeout: float) -> Ranks:
    """The ranks of the process group that is there already, or else of ``join()``, which it then starts."""
    if not dist.is_initialized():
        ranks = join()
        ranks.start_process_group("cuda" if torch.cuda.is_available() else "cpu", timeout)
        return ranks
    # torch offers no public way to the store of a group that somebody else has started.
    store = dist.distributed_c10d._get_default_store()
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        store=dist.PrefixStore("pipesgd", store),
        timeout=timeout,
    )


def lost(failure: RuntimeError, rank: int, peer: int | None, operation: str, timeout: float) -> CommunicationError:
    """What torch's ``failure`` means, as the error to raise: torch has one type for all of them."""
    if "timed out" in str(failure).lower():
        reason = f"no answer within {timeout:g} s"
        return DeadlineExceeded(rank=rank, peer=peer, operation=operation, reason=reason)
    # gloo's message ends in advice; its first sentence says what happened, after the place in its source.
    reason = str(failure).split("] ", 1)[-1].split(". ")[0]
    return CommunicationError(rank=rank, peer=peer, operation=operation, reason=reason)


def die_with_parent() -> None:
    """Have the kernel send this process SIGTERM when torchrun's agent dies: no orphan keeps training.

    Linux only; elsewhere a rank whose agent died fails at its next exchange instead.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
