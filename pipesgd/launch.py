"""Joining and leaving the other ranks, and what they tell each other outside of training.

The only reader of the variables that torchrun sets. Ranks talk here through the key-value store that
torchrun's agent (or rank 0) holds: to agree on something before any of them acts on it, and, when the
run fails, to find out who is missing. Gradients never pass through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from pipesgd.config import DEFAULT_TIMEOUT, differing_options
from pipesgd.errors import CommunicationError, DeadlineExceeded, DisagreementError, UserInputError

T = TypeVar("T")

HOW_TO_START = "torchrun --nproc-per-node 4 -m pipesgd.train ..."
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

LONGEST_PAUSE = 0.02
"""Seconds between two looks into the store, at most."""

SPEECH_SECONDS = 5.0
"""How long a rank that exits waits for the others to say why they do."""

REPORT_GRACE_SECONDS = 2.0
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
    local_world_size: int = 1
    """Ranks on this node."""
    restart_count: int = 0
    """How often torchrun has restarted this job (``--max-restarts``)."""
    by_torchrun: bool = True
    timeout: float = DEFAULT_TIMEOUT
    iteration: int | None = None
    """What this rank is at: for its last words."""
    job_size: int = 0
    """All ranks of the job, where these are only its ``first``; by default these are all."""
    _exchanges: int = field(default=0, init=False)
    _process_groups: int = field(default=0, init=False)
    _own_keys: list[str] = field(default_factory=list, init=False)
    _first: dict[int, Ranks] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.job_size = self.job_size or self.world_size
        self._first[self.world_size] = self

    def first(self, number: int) -> Ranks:
        """The first ``number`` of these ranks, who exchange among themselves from now on; the others take no part."""
        if number not in self._first:  # the same object every time, since it counts its exchanges
            self._first[number] = dataclasses.replace(self, world_size=number)
        return self._first[number]

    def per_node(self) -> int:
        """Ranks on each node. Collective.

        Raises:
            UserInputError: nodes differ in it, or a node's ranks have no adjoining numbers, as torchrun gives them.
        """
        places = self.exchange("ranks on each node", [self.local_world_size, self.local_rank])
        numbers = sorted({number for number, _ in places})
        number: int = numbers[0]
        if len(numbers) > 1 or self.world_size % number or any(r % number != p for r, (_, p) in enumerate(places)):
            failure = UserInputError(
                "all-reduce must not be hierarchical unless all nodes have the same number of ranks, and those of a "
                f"node adjoining numbers; got {self.world_size} ranks on nodes of {' and '.join(map(str, numbers))}"
            )
            failure.known_to_all = True
            raise failure
        return number

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value`` (anything JSON can write), in rank order.

        Raises:
            DeadlineExceeded: some ranks did not come to this exchange within ``timeout`` seconds.
            CommunicationError: a rank has failed meanwhile.
        """
        self._exchanges += 1
        key = f"exchange of {self.world_size}/{self._exchanges}/{what}/{{}}"
        try:
            self.store.set(key.format(self.rank), json.dumps(value))
            missing = self._missing(key, self.timeout, until_a_failure=True)
            if missing:
                self._raise_missing(missing, f"exchange of {what}")
            values = [json.loads(self.store.get(key.format(rank))) for rank in range(self.world_size)]
            # Who has come to this exchange has read the one before: its key can go, so the store stays small.
            self._own_keys.append(key.format(self.rank))
            if len(self._own_keys) > 2:
                self.store.delete_key(self._own_keys.pop(0))
        except dist.DistError as failure:
            raise lost(failure, self.rank, None, f"exchange of {what} through the store", self.timeout) from failure
        return values

    def _raise_missing(self, missing: list[int], operation: str) -> NoReturn:
        failed = [rank for rank in range(self.job_size) if self.store.check([f"failure/{rank}"])]
        if failed:
            report = self.store.get(f"failure/{failed[0]}").decode()
            raise CommunicationError(
                rank=self.rank, peer=failed[0], operation=operation, reason=report, iteration=self.iteration
            )
        raise DeadlineExceeded(
            rank=self.rank,
            peer=missing[0],
            operation=operation,
            reason=f"no word within {self.timeout:g} s from rank{'s' if len(missing) > 1 else ''} "
            + ", ".join(map(str, missing)),
            iteration=self.iteration,
        )

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
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody is left to wait for
            self.store.set(f"spoken/{self.rank}", "")
            self._missing("spoken/{}", SPEECH_SECONDS)

    def start_process_group(self, device: str, timeout: float) -> None:
        """Start torch's default process group with this deadline for every operation; there must be none.

        It may be one after another: each has keys of its own in the store.

        Raises:
            CommunicationError: not every rank could be reached.
        """
        self.timeout = timeout
        self._process_groups += 1
        if device == "cuda":
            torch.cuda.set_device(self.local_rank)
        try:
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=dist.PrefixStore(f"process group of {self.world_size}/{self._process_groups}", self.store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout),
            )
        except RuntimeError as failure:
            raise lost(failure, self.rank, None, "connection to all ranks", timeout) from failure

    def report(self, error: str) -> None:
        """Tell the other ranks that this one has failed."""
        self.store.set(f"failure/{self.rank}", error)
        self.store.set("a failure", "")

    def diagnose(self, error: str) -> str:
        """``error``, and which ranks have no word to say about the failure: they are dead or hang.

        Every failing rank leaves its report in the store and waits a moment for the others'.
        """
        try:
            self.report(error)
            silent = self._missing("failure/{}", REPORT_GRACE_SECONDS)
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

    def _missing(self, key: str, timeout: float, *, until_a_failure: bool = False) -> list[int]:
        """The ranks whose ``key`` is not in the store, once there are none, or ``timeout`` has passed."""
        keys = [key.format(rank) for rank in range(self.world_size)]
        _poll(lambda: self.store.check(keys) or (until_a_failure and self.store.check(["a failure"])), timeout)
        return [rank for rank, one in enumerate(keys) if not self.store.check([one])]


def join() -> Ranks:
    """The ranks that torchrun started this process with; one rank alone without torchrun.

    Raises:
        UserInputError: torchrun's variables are set in part only.
        CommunicationError: the store of the job cannot be reached.
    """
    given = [name for name in _TORCHRUN_VARIABLES if name in os.environ]
    if not given:
        return alone()
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise UserInputError(
            f"torchrun's variables must be set all or none; got {', '.join(given)} without {', '.join(missing)} "
            f"(start with: {HOW_TO_START})"
        )
    rank = int(os.environ["RANK"])
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=DEFAULT_TIMEOUT))))
        session = _open_session(store, rank, world_size, DEFAULT_TIMEOUT)
    except dist.DistError as failure:
        raise lost(failure, rank, None, "connection to the other ranks", DEFAULT_TIMEOUT) from failure
    return Ranks(
        rank=rank,
        world_size=world_size,
        store=session,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def alone() -> Ranks:
    """This process as the only rank, whatever others there are."""
    return Ranks(rank=0, world_size=1, store=dist.HashStore(), by_torchrun=False)


def check_same_options(ranks: Ranks, options: dict[str, Any], *, free: frozenset[str]) -> None:
    """Raise ``DisagreementError`` if ``options``, but those in ``free``, differ between the ranks. Collective."""
    everybody = ranks.exchange("configuration", options)
    for rank, others in enumerate(everybody):
        for name in differing_options(everybody[0], others, free=free):
            raise DisagreementError(
                f"--{name} must be the same on all ranks; got {everybody[0][name]!r} on rank 0, "
                f"{others[name]!r} on rank {rank}"
            )


def current(timeout: float) -> Ranks:
    """The ranks of the process group that is there already, or else of ``join()``, which it then starts."""
    if not dist.is_initialized():
        ranks = join()
        ranks.start_process_group("cuda" if torch.cuda.is_available() else "cpu", timeout)
        return ranks
    # torch offers no public way to the store of a group that somebody else has started.
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    session = _open_session(store, rank, world_size, timeout)
    return Ranks(rank=rank, world_size=world_size, store=session, timeout=timeout)


def _open_session(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """A part of ``store`` that no process of an earlier attempt has written to.

    torchrun keeps the store when it restarts the ranks (``--max-restarts``), and its count of restarts may
    differ between machines. So every process takes a name of its own, and rank 0 answers each name that it
    finds with its own, which is the session's: an answer to a dead process is read by nobody.
    """
    store = dist.PrefixStore("pipesgd", store)
    me = uuid.uuid4().hex
    if rank > 0:
        store.set(f"name of rank {rank}", me)
        if not _poll(lambda: store.check([f"answer to {me}"]), timeout):
            raise DeadlineExceeded(rank=rank, peer=0, operation="start", reason=f"no answer within {timeout:g} s")
        session = store.get(f"answer to {me}").decode()
        store.set(f"{session}/joined by {rank}", "")
        return dist.PrefixStore(session, store)

    missing = list(range(1, world_size))

    def answer() -> bool:
        missing[:] = [other for other in missing if not store.check([f"{me}/joined by {other}"])]
        for other in missing:
            if store.check([f"name of rank {other}"]):
                store.set(f"answer to {store.get(f'name of rank {other}').decode()}", me)
        return not missing

    if not _poll(answer, timeout):
        reason = f"no word within {timeout:g} s from ranks {missing}"
        raise DeadlineExceeded(rank=rank, peer=missing[0], operation="start", reason=reason)
    return dist.PrefixStore(me, store)


def _poll(done: Callable[[], bool], timeout: float) -> bool:
    """Whether ``done()`` became true within ``timeout`` seconds.

    torch's stores can wait themselves, but write warnings of their own to stderr when that takes long.
    """
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def lost(failure: RuntimeError, rank: int, peer: int | None, operation: str, timeout: float) -> CommunicationError:
    """What torch's ``failure`` means, as the error to raise: torch has one type for all of them."""
    if "timed out" in str(failure).lower():
        reason = f"no answer within {timeout:g} s"
        return DeadlineExceeded(rank=rank, peer=peer, operation=operation, reason=reason)
    # gloo's message ends in advice; its first sentence says what happened, after the place in its source.
    reason = str(failure).split("] ", 1)[-1].split(". ")[0]
    return CommunicationError(rank=rank, peer=peer, operation=operation, reason=reason)


def network_address() -> str:
    """The address at which gloo makes this rank reachable, and its interface: "10.0.0.2 (eth0)".

    gloo takes the interface that GLOO_SOCKET_IFNAME names, else the address that the host's name stands for, else
    loopback; a slow or wrong network card is a common cause of a slow job. Linux tells which address an interface
    has; elsewhere the interface is not named.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    addresses = _interface_addresses()
    if interface:
        return f"{addresses.get(interface, 'no address')} ({interface})"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    # Hosts often have an entry 127.0.1.1 for their own name: any such address is loopback's.
    names = [name for name, own in addresses.items() if own == address or {own[:4], address[:4]} == {"127."}]
    return f"{address} ({names[0]})" if names else address


def _interface_addresses() -> dict[str, str]:
    """The IPv4 address of every network interface that has one; none where the system is not Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl  # not on every system

    get_interface_address = 0x8915  # SIOCGIFADDR
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, get_interface_address, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def die_with_parent() -> None:
    """Have the kernel send this process SIGTERM when torchrun's agent dies: no orphan keeps training.

    Linux only; elsewhere a rank whose agent died fails at its next exchange instead.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
