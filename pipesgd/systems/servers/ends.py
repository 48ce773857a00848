"""Both ends of the protocol between a worker and a parameter server: which messages each sends and when."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipesgd.comm.transport import Group, Pending, TorchTransport, Transport
from pipesgd.errors import CommunicationError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.systems.servers import messages
from pipesgd.systems.servers.messages import Reply, Request, RequestMessage
from pipesgd.systems.servers.shard import Shard
from pipesgd.systems.servers.update_rule import ShardLayout

FOREVER = 10 * 365 * 86400.0
"""Seconds that a server waits for a worker's next request, since a worker may compute or evaluate for a long time. A
dead worker is noticed by its closed connection, and those that wait for one that hangs have a deadline."""

Answer = Callable[[], tuple[Reply, Tensor]]
"""Function that waits for a server's reply, and returns it with the state that was asked for, if any."""


class Links(NamedTuple):
    """The kinds of messages between workers and servers, for one thread of one rank.

    Each kind has its own tag, and goes from one thread of a rank to one thread of another, so no message can be taken
    for another thread's. One connection between two ranks carries them all.
    """

    requests: Transport
    gradients: Transport
    replies: Transport
    weights: Transport
    states: Transport

    @classmethod
    def over(
        cls, group: Group, timeout: float, *, requests: float | None = None, replies: float | None = None
    ) -> Links:
        """Make links over the group that all threads use; requests and replies may have their own deadlines in s."""
        deadlines = (requests or timeout, timeout, replies or timeout, timeout, timeout)
        return cls(*(TorchTransport([group], deadline, tag=tag) for tag, deadline in enumerate(deadlines, start=1)))

    @property
    def bytes_sent(self) -> int:
        return sum(kind.bytes_sent for kind in self)


@dataclass
class Server:
    """A server as a worker sees it. A server in the worker's own process gets no messages and is called directly."""

    rank: int
    layout: ShardLayout
    links: Links
    farewells: Transport
    options: int
    """Number of optimizer options that are sent with a gradient."""
    shard: Shard | None
    """Server itself if it is in this process, else None."""
    listens: bool = True

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in an iteration: its gradient to the server, or the replies of its own server."""
        if self.shard is None:
            return 8 * (messages.REQUEST_NUMBERS + self.options) + self.layout.nbytes
        return (self.shard.workers - 1) * (8 * messages.REPLY_NUMBERS + self.layout.nbytes)

    def ask(
        self, request: RequestMessage, values: FlatBuffer | None, into: FlatBuffer | None, state: Tensor | None
    ) -> Answer:
        """Send a request with the server's range of ``values`` or a ``state``; weights in reply go ``into`` a buffer.

        A server in this process has answered when this returns.
        """
        given, weights = ([] if flat is None else self.layout.ranges_of(flat) for flat in (values, into))
        if state is not None:
            messages.check_state_bytes(state.nbytes, self.layout.most_state_bytes)
            request, given = dataclasses.replace(request, number=state.nbytes), [state]
        links, peer = self.links, self.rank
        if self.shard is not None:
            outcome = self.shard.serve(links.requests.rank, request, given)
            if weights:
                self.shard.copy_answer_to(weights, request.kind, given)
            return lambda: outcome
        # Receives are posted first, since gloo's sender starts only when the receiver is ready.
        numbers = torch.empty(messages.REPLY_NUMBERS, dtype=torch.float64)
        reply = links.replies.receive(numbers, peer, "a reply")
        under_way = begin(links.weights.receive, weights, peer, "weights")
        under_way += [links.requests.send(request.pack(self.options), peer, "a request")]
        kind, what = (links.gradients, "a gradient") if state is None else (links.states, "a state")
        under_way += begin(kind.send, given, peer, what)

        def answer() -> tuple[Reply, Tensor]:
            reply.wait()
            told = self._checked(numbers)
            saved = torch.empty(told.state_bytes, dtype=torch.uint8)
            wait_for(under_way + begin(links.states.receive, [saved], peer, "a state"))
            return told, saved

        return answer

    def leave(self) -> list[Pending]:
        """Begin to say goodbye to the server, if it still listens."""
        bye = RequestMessage(Request.BYE)
        if self.shard is not None:
            self.shard.serve(self.links.requests.rank, bye)
        elif self.listens:
            return [self.farewells.send(bye.pack(self.options), self.rank, "a farewell")]
        return []

    def _checked(self, numbers: Tensor) -> Reply:
        own, job = self.links.requests.rank, self.links.requests.world_size
        with blamed(own, self.rank, "a reply"):
            told = Reply.unpack(numbers.tolist(), ranks=job, most_state_bytes=self.layout.most_state_bytes)
        if told.lost is None:
            return told
        self.listens = False
        reasons = {self.rank: "it has failed", own: "the server has given up on this rank"}
        reason = reasons.get(told.lost, f"the server on rank {self.rank} has lost it")
        peer = self.rank if told.lost == own else told.lost
        raise CommunicationError(rank=own, peer=peer, operation="exchange of gradients", reason=reason)


class WorkerThread(threading.Thread):
    """Serves one worker that is on another rank, until that worker says goodbye."""

    def __init__(self, shard: Shard, worker: int, options: int, links: Links):
        super().__init__(name=f"pipesgd-server-of-{worker}", daemon=True)  # daemon: may wait for a lost worker
        self.links = links
        self._shard = shard
        self._worker = worker
        self._request = torch.empty(messages.REQUEST_NUMBERS + options, dtype=torch.float64)
        self._gradient = [torch.empty_like(weights) for weights in shard.weights]
        # In rounds nobody writes the weights until all have pushed again; else a consistent copy is sent.
        self._weights = shard.weights if shard.in_rounds else [torch.empty_like(weights) for weights in shard.weights]

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as failure:  # noqa: BLE001 (the others that use this server get it)
            self._shard.fail(self._worker, failure)
            first, lost = self._shard.failure, self._shard.rank
            if isinstance(first, CommunicationError) and first.peer is not None:
                lost = first.peer
            with contextlib.suppress(CommunicationError):
                self.links.replies.send(Reply(0, False, lost=lost).pack(), self._worker, "a reply").wait()

    def _serve(self) -> None:
        shard, worker, links = self._shard, self._worker, self.links
        most = shard.most_state_bytes
        # Receives are posted ahead, since gloo's sender starts only when the receiver is ready.
        request = links.requests.receive(self._request, worker, "a request")
        gradient = begin(links.gradients.receive, self._gradient, worker, "a gradient")
        while True:
            request.wait()
            shard.heard(worker)
            with blamed(shard.rank, worker, "a request"):
                asked = RequestMessage.unpack(self._request.tolist(), worker=worker, most_state_bytes=most)
            tensors, loads = [], asked.kind == Request.LOAD
            if loads:
                tensors = [torch.empty(asked.number, dtype=torch.uint8)]
                wait_for(begin(links.states.receive, tensors, worker, "a state"))
            elif asked.kind in (Request.PUSH, Request.STORE):
                wait_for(gradient)
                tensors = self._gradient
            with blamed(shard.rank, worker, "a state") if loads else contextlib.nullcontext():
                reply, state = shard.serve(worker, asked, tensors)
            if asked.kind == Request.BYE:
                return
            answers = asked.kind in (Request.PUSH, Request.PULL)
            if answers and not shard.in_rounds:
                shard.copy_answer_to(self._weights, asked.kind, tensors)
            if tensors is self._gradient:
                gradient = begin(links.gradients.receive, self._gradient, worker, "a gradient")
            request = links.requests.receive(self._request, worker, "a request")
            under_way = [links.replies.send(reply.pack(), worker, "a reply")]
            if answers:
                under_way += begin(links.weights.send, self._weights, worker, "weights")
            wait_for(under_way + begin(links.states.send, [state], worker, "a state"))
            shard.heard(worker)


@contextlib.contextmanager
def blamed(rank: int, peer: int, what: str) -> Iterator[None]:
    """Turn a ``ValueError`` about ``what`` the peer has sent into an error that names the peer."""
    try:
        yield
    except ValueError as failure:
        reason = str(failure)
        raise CommunicationError(rank=rank, peer=peer, operation=f"receive of {what}", reason=reason) from failure


def begin(act: Callable[[Tensor, int, str], Pending], tensors: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
    """Begin to send or receive those of ``tensors`` that are not empty."""
    return [act(tensor, peer, what) for tensor in tensors if tensor.numel()]


def wait_for(under_way: Sequence[Pending]) -> None:
    """Wait for all messages that are ``under_way``."""
    for message in under_way:
        message.wait()
