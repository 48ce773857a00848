"""Point-to-point messages between ranks, with a deadline on every wait, counted, and logged on demand."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor

from pipesgd.ranks import Ranks, lost

log = logging.getLogger(__name__)

Group = dist.ProcessGroup
"""Type that ``communication_group`` returns, for annotations elsewhere."""

Mesh = dist.DeviceMesh
"""Type of meshes of devices, for annotations elsewhere."""


class Pending(Protocol):
    """A message under way. The tensor must not be touched before ``wait`` has returned."""

    def wait(self) -> None:
        """Return once the message has left its tensor or arrived in it.

        Raises:
            DeadlineExceeded: that took longer than the transport's deadline, counted from this call.
            CommunicationError: the peer is gone.
        """


class Transport(Protocol):
    """Sends and receives contiguous tensors. Messages between two ranks arrive in the order sent."""

    rank: int
    world_size: int

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages whose sending has begun."""

    @property
    def bytes_received(self) -> int:
        """Bytes of all messages whose receiving has begun."""

    def send(self, tensor: Tensor, peer: int, what: str) -> Pending:
        """Begin to send ``tensor`` to ``peer``; ``what`` names it in errors and in the log."""

    def receive(self, tensor: Tensor, peer: int, what: str) -> Pending:
        """Begin to receive into ``tensor`` from ``peer``."""


class TorchTransport:
    """Transport of messages with ``tag`` over process groups of torch.distributed, used by no other thread.

    ``before_waits`` is called before each wait for a message, and ``before_sends`` before a message is sent, with its
    bytes: it may wait, to keep a pace.

    Each group has its own connections. Messages between two ranks use them in turn, in the same order at both
    ends, since one TCP stream may not fill a fast or long link. All groups have the same ranks.

    Two threads that issue operations in different orders on different ranks would mix up their messages, so each needs
    its own group (``communication_group``), or, if messages differ in kind, its own tag in a common group:
    gloo keeps the tags of a connection apart, and lets any thread send and receive.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        timeout: float,
        tag: int = 0,
        before_waits: Callable[[], None] = lambda: None,
        before_sends: Callable[[int], None] = lambda nbytes: None,
    ):
        self.tag = tag
        self.rank = groups[0].rank()
        self.world_size = groups[0].size()
        self.bytes_sent = 0
        self.bytes_received = 0
        self._groups = groups
        self._sends: Counter[int] = Counter()  # so far, to each rank
        self._receives: Counter[int] = Counter()
        self._timeout = timeout
        self._before_waits = before_waits
        self._before_sends = before_sends
        self._logging = log.isEnabledFor(logging.DEBUG)

    def send(self, tensor: Tensor, peer: int, what: str) -> Pending:
        nbytes = tensor.nbytes
        self._before_sends(nbytes)
        self.bytes_sent += nbytes
        if self._logging:
            log.debug("r%d | send -> %d %s, %d B", self.rank, peer, what, nbytes)
        return self._begin(self._next(self._sends, peer).send, tensor, peer, f"send of {what}")

    def receive(self, tensor: Tensor, peer: int, what: str) -> Pending:
        nbytes = tensor.nbytes
        self.bytes_received += nbytes
        if self._logging:
            log.debug("r%d | recv <- %d %s, %d B", self.rank, peer, what, nbytes)
        return self._begin(self._next(self._receives, peer).recv, tensor, peer, f"receive of {what}")

    def _next(self, messages: Counter[int], peer: int) -> dist.ProcessGroup:
        messages[peer] += 1
        return self._groups[messages[peer] % len(self._groups)]

    def _begin(
        self, begin: Callable[[list[Tensor], int, int], dist.Work], tensor: Tensor, peer: int, operation: str
    ) -> Pending:
        try:
            work = begin([tensor], peer, self.tag)
        except RuntimeError as failure:
            raise lost(failure, self.rank, peer, operation, self._timeout) from failure
        return _TorchPending(work, self.rank, peer, operation, self._timeout, self._before_waits)


class _TorchPending:
    def __init__(
        self, work: dist.Work, rank: int, peer: int, operation: str, timeout: float, before: Callable[[], None]
    ):
        self._work = work
        self._rank = rank
        self._peer = peer
        self._operation = operation
        self._timeout = timeout
        self._before = before

    def wait(self) -> None:
        self._before()
        try:
            self._work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as failure:
            raise lost(failure, self._rank, self._peer, self._operation, self._timeout) from failure


def communication_group(
    ranks: Ranks, timeout: float, backend: str | None, members: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Return a new process group of ``ranks``, for a single thread. All ranks of the job must call this together.

    With ``members``, only these ranks form the group, and the others get a placeholder that is not a group.

    Ranks of another group than torch's default one call this without the rest of the job. torch's own way of doing that
    (``use_local_synchronization``) names a group after the number of groups that its ranks have, which may differ
    between them and repeats after one has ended, so here gloo's group is made from the store of ``ranks``.

    Raises:
        CommunicationError: not every rank could be reached.
    """
    try:
        if ranks.numbers:
            own: Any = dist.ProcessGroupGloo(
                ranks.group_store(), ranks.rank, ranks.world_size, timedelta(seconds=timeout)
            )
            return cast(dist.ProcessGroup, own)  # it has all that is used of a group
        group: dist.ProcessGroup = dist.new_group(
            list(range(ranks.world_size) if members is None else members),
            timeout=timedelta(seconds=timeout),
            backend=backend,
        )
    except RuntimeError as failure:
        raise lost(failure, ranks.number(ranks.rank), None, "connection to all ranks", timeout) from failure
    return group


def wait_for_all(group: dist.ProcessGroup, timeout: float) -> None:
    """Return when all ranks of ``group`` have called this.

    Raises:
        CommunicationError: a rank was lost, or silent for longer than ``timeout`` seconds.
    """
    try:
        group.barrier().wait(timedelta(seconds=timeout))
    except RuntimeError as failure:
        raise lost(failure, group.rank(), None, "last meeting of all ranks", timeout) from failure


def destroy(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy these process groups. Their connections end when nobody holds one of them any more."""
    for group in groups:
        with contextlib.suppress(Exception):  # the default group was destroyed, and all others with it
            dist.destroy_process_group(group)
