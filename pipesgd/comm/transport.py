"""Point-to-point messages between ranks, with a deadline on every wait, counted, and logged on demand."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
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


class Tagged(Transport, Protocol):
    """A transport whose messages bear a tag, and which takes only messages with the tag that it has now."""

    tag: int
    before_waits: Callable[[], None]
    """Function called before each wait for a message."""


class Links(Protocol):
    """Connections of one kind to all ranks, for one thread. Each kind of transport is one file with a class of these.

    All ranks make one together. Both transports may be used at once, and their messages never meet.
    """

    def control(self, before_sends: Callable[[int], None]) -> Transport:
        """Return the transport of headers; ``before_sends`` is called with the bytes of each message."""

    def messages(self, before_waits: Callable[[], None], before_sends: Callable[[int], None]) -> Tagged:
        """Return the transport of what headers are about; ``before_waits`` is called before each wait."""

    def wait_for_all(self) -> None:
        """Return when all ranks have called this.

        Raises:
            CommunicationError: a rank was lost, or silent for longer than the deadline.
        """

    def push(self) -> None:
        """Return when all that was begun to be sent will leave without another call, such as a header.

        Raises:
            CommunicationError: a rank was lost, or silent for longer than the deadline.
        """

    def abort(self, error: BaseException) -> None:
        """End every wait of this rank because of ``error``, as far as the transport can; any thread may call this."""

    def close(self) -> None:
        """End the connections; the transports cannot be used any more."""


class CountedTransport(ABC):
    """Part of every transport that counts and logs its messages; ``_begin`` begins one."""

    def __init__(self, rank: int, world_size: int, tag: int, before_sends: Callable[[int], None]):
        self.tag = tag
        self.rank, self.world_size = rank, world_size
        self.bytes_sent = self.bytes_received = 0
        self._before_sends = before_sends
        self._logging = log.isEnabledFor(logging.DEBUG)

    def send(self, tensor: Tensor, peer: int, what: str) -> Pending:
        nbytes = tensor.nbytes
        self._before_sends(nbytes)
        self.bytes_sent += nbytes
        if self._logging:
            log.debug("r%d | send -> %d %s, %d B", self.rank, peer, what, nbytes)
        return self._begin(tensor, peer, f"send of {what}", outgoing=True)

    def receive(self, tensor: Tensor, peer: int, what: str) -> Pending:
        nbytes = tensor.nbytes
        self.bytes_received += nbytes
        if self._logging:
            log.debug("r%d | recv <- %d %s, %d B", self.rank, peer, what, nbytes)
        return self._begin(tensor, peer, f"receive of {what}", outgoing=False)

    @abstractmethod
    def _begin(self, tensor: Tensor, peer: int, operation: str, *, outgoing: bool) -> Pending:
        """Begin to send ``tensor`` to ``peer``, or to receive into it; ``operation`` names that in errors."""


class TorchTransport(CountedTransport):
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
        super().__init__(groups[0].rank(), groups[0].size(), tag, before_sends)
        self._groups = groups
        self._sends: Counter[int] = Counter()  # so far, to each rank
        self._receives: Counter[int] = Counter()
        self._timeout = timeout
        self.before_waits = before_waits

    def _next(self, messages: Counter[int], peer: int) -> dist.ProcessGroup:
        messages[peer] += 1
        return self._groups[messages[peer] % len(self._groups)]

    def _begin(self, tensor: Tensor, peer: int, operation: str, *, outgoing: bool) -> Pending:
        group = self._next(self._sends if outgoing else self._receives, peer)
        try:
            work = (group.send if outgoing else group.recv)([tensor], peer, self.tag)
        except RuntimeError as failure:
            raise lost(failure, self.rank, peer, operation, self._timeout) from failure
        return _TorchPending(work, self.rank, peer, operation, self._timeout, self.before_waits)


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


class TorchLinks:
    """Process groups of torch.distributed between ``ranks``. All ranks of the job make one together.

    Args:
        ranks: the ranks.
        timeout: seconds that a rank waits for another one in any one operation.
        connections: groups for messages, used in turn.
        backend: their backend; None stands for torch's choice, which may be unable to send tensors on the host.
        on_host: whether they can send tensors on the host, as headers are; else headers have a group of their own.
    """

    def __init__(self, ranks: Ranks, timeout: float, connections: int, *, backend: str | None, on_host: bool):
        self.groups = [communication_group(ranks, timeout, backend) for _ in range(connections)]
        """Groups for messages, and for torch's own operations; none after ``close``."""
        self._control = self.groups[:1] if on_host else [communication_group(ranks, timeout, "gloo")]
        self._timeout = timeout

    def control(self, before_sends: Callable[[int], None]) -> TorchTransport:
        return TorchTransport(self._control, self._timeout, before_sends=before_sends)

    def messages(self, before_waits: Callable[[], None], before_sends: Callable[[int], None]) -> TorchTransport:
        return TorchTransport(self.groups, self._timeout, before_waits=before_waits, before_sends=before_sends)

    def wait_for_all(self) -> None:
        group = self._control[0]
        try:
            group.barrier().wait(timedelta(seconds=self._timeout))
        except RuntimeError as failure:
            raise lost(failure, group.rank(), None, "last meeting of all ranks", self._timeout) from failure

    def push(self) -> None:
        """Do nothing: gloo's threads send."""

    def abort(self, error: BaseException) -> None:
        """Do nothing: gloo's waits end at their deadline."""

    def close(self) -> None:
        for group in {*self.groups, *self._control}:
            with contextlib.suppress(Exception):  # the default group was destroyed, and all others with it
                dist.destroy_process_group(group)
        self.groups.clear()  # transports and collectives share this list, so nobody holds a group any more
        self._control.clear()
