"""Both ends of the talk between a worker and a parameter server: who sends which message when."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipesgd.baselines.parameter_server.messages import (
    REPLY_NUMBERS,
    REQUEST_NUMBERS,
    Reply,
    Request,
    RequestMessage,
    check_state_bytes,
)
from pipesgd.baselines.parameter_server.shard import Shard
from pipesgd.baselines.parameter_server.update_rule import ShardLayout
from pipesgd.comm.transport import Group, Pending, TorchTransport, Transport
from pipesgd.errors import CommunicationError
from pipesgd.flat_buffer import FlatBuffer

FOREVER = 10 * 365 * 86400.0
"""Seconds that a server waits for a worker's next request: it may compute or evaluate for long. One that has died is
noticed by its closed connection, and who waits for one that hangs has a deadline."""

Answer = Callable[[], tuple[Reply, Tensor]]
"""Waits for a server's reply, and gives it with the state that follows, which has no byte unless one was asked for."""


class Links(NamedTuple):
    """The kinds of messages between workers and servers, for one thread of one rank."""

    requests: Transport
    gradients: Transport
    replies: Transport
    weights: Transport
    states: Transport

    @classmethod
    def over(
        cls, group: Group, timeout: float, *, requests: float | None = None, replies: float | None = None
    ) -> Links:
        """Links over one process group, which all threads use; requests and replies may have their own deadlines, in s.

        Each kind has a tag of its own, and goes from one thread of a rank to one thread of another: no message can be
        taken for another thread's. One connection between two ranks carries them all.
        """
        deadlines = (requests or timeout, timeout, replies or timeout, timeout, timeout)
        return cls(*(TorchTransport([group], deadline, tag=tag) for tag, deadline in enumerate(deadlines, start=1)))

    @property
    def bytes_sent(self) -> int:
        return sum(kind.bytes_sent for kind in self)


@dataclass
class Server:
    """A server as a worker sees it. No message goes to one in its own process, which it asks directly."""

    rank: int
    layout: ShardLayout
    links: Links
    farewells: Transport
    options: int
    """How many options of the optimizer travel with a gradient."""
    shard: Shard | None
    """The server itself if it is in this process."""
    listens: bool = True

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in an iteration: its gradient to the server, or this server's replies."""
        if self.shard is None:
            return 8 * (REQUEST_NUMBERS + self.options) + self.layout.nbytes
        return (self.shard.workers - 1) * (8 * REPLY_NUMBERS + self.layout.nbytes)

    def ask(
        self, request: RequestMessage, values: FlatBuffer | None, into: FlatBuffer | None, state: Tensor | None
    ) -> Answer:
        """Send a request, with the server's range of ``values`` or a ``state``; the weights in reply go ``into`` this.

        A server in this process is done when this returns.
        """
        given, weights = ([] if flat is None else self.layout.ranges_of(flat) for flat in (values, into))
        if state is not None:
            check_state_bytes(state.nbytes, self.layout.most_state_bytes)
            request, given = dataclasses.replace(request, number=state.nbytes), [state]
        if self.shard is not None:
            outcome = self.shard.serve(self.links.requests.rank, request, given)
            if weights:
                self.shard.copy_weights_to(weights)
            return lambda: outcome
        links, peer = self.links, self.rank
        # Receives are posted first, since gloo's sender starts only when the receiver is ready.
        numbers = torch.empty(REPLY_NUMBERS, dtype=torch.float64)
        reply = links.replies.receive(numbers, peer, "a reply")
        under_way = receive_all(links.weights, weights, peer, "weights")
        under_way.append(links.requests.send(request.pack(self.options), peer, "a request"))
        kind, what = (links.gradients, "a gradient") if state is None else (links.states, "a state")
        under_way += send_all(kind, given, peer, what)

        def answer() -> tuple[Reply, Tensor]:
            reply.wait()
            told = self._checked(numbers)
            saved = torch.empty(told.state_bytes, dtype=torch.uint8)
            wait_for([*under_way, *receive_all(links.states, [saved], peer, "a state")])
            return told, saved

        return answer

    def leave(self) -> list[Pending]:
        """Begin to take leave of it, if it still listens."""
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
    """Serves one worker that is on another rank, until it says bye.

    The receives of its next request and gradient are posted ahead, since gloo's sender starts only when the receiver
    is ready. Weights are sent as they are in rounds, in which nobody writes them until all have pushed again;
    otherwise from a copy of one moment.
    """

    def __init__(self, shard: Shard, worker: int, options: int, links: Links):
        super().__init__(name=f"pipesgd-server-of-{worker}", daemon=True)  # daemon: it may wait for a lost worker
        self.links = links
        self._shard = shard
        self._worker = worker
        self._request = torch.empty(REQUEST_NUMBERS + options, dtype=torch.float64)
        self._gradient = [torch.empty_like(weights) for weights in shard.weights]
        self._copy = shard.weights if shard.in_rounds else [torch.empty_like(weights) for weights in shard.weights]

    def run(self) -> None:
        shard, worker, links = self._shard, self._worker, self.links
        try:
            request, gradient = self._expect_request(), self._expect_gradient()
            while True:
                request.wait()
                shard.heard(worker)
                with blamed(shard.rank, worker, "a request"):
                    asked = RequestMessage.unpack(
                        self._request.tolist(), worker=worker, most_state_bytes=shard.rule.most_state_bytes
                    )
                tensors: list[Tensor] = []
                if asked.kind in (Request.PUSH, Request.STORE):
                    wait_for(gradient)
                    tensors = self._gradient
                elif asked.kind == Request.LOAD:
                    tensors = [torch.empty(asked.number, dtype=torch.uint8)]
                    wait_for(receive_all(links.states, tensors, worker, "a state"))
                loads = asked.kind == Request.LOAD
                with blamed(shard.rank, worker, "a state") if loads else contextlib.nullcontext():
                    reply, state = shard.serve(worker, asked, tensors)
                if asked.kind == Request.BYE:
                    return
                if tensors is self._gradient:
                    gradient = self._expect_gradient()
                request = self._expect_request()
                under_way = [links.replies.send(reply.pack(), worker, "a reply")]
                if asked.kind in (Request.PUSH, Request.PULL):
                    if not shard.in_rounds:
                        shard.copy_weights_to(self._copy)
                    under_way += send_all(links.weights, self._copy, worker, "weights")
                wait_for([*under_way, *send_all(links.states, [state], worker, "a state")])
                shard.heard(worker)
        except BaseException as failure:  # noqa: BLE001 (the others that use this server get it)
            shard.fail(worker, failure)
            first = shard.failure
            lost = first.peer if isinstance(first, CommunicationError) and first.peer is not None else shard.rank
            with contextlib.suppress(CommunicationError):
                links.replies.send(Reply(0, False, lost=lost).pack(), worker, "a reply").wait()

    def _expect_request(self) -> Pending:
        return self.links.requests.receive(self._request, self._worker, "a request")

    def _expect_gradient(self) -> list[Pending]:
        return receive_all(self.links.gradients, self._gradient, self._worker, "a gradient")


@contextlib.contextmanager
def blamed(rank: int, peer: int, what: str) -> Iterator[None]:
    """Turn a ``ValueError`` about ``what`` the peer has sent into an error that names it."""
    try:
        yield
    except ValueError as failure:
        raise CommunicationError(rank=rank, peer=peer, operation=f"receive of {what}", reason=str(failure)) from failure


def send_all(transport: Transport, tensors: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
    """Begin to send ``tensors``, but those without an element."""
    return [transport.send(tensor, peer, what) for tensor in tensors if tensor.numel()]


def receive_all(transport: Transport, tensors: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
    """Begin to receive the tensors that ``send_all`` sends."""
    return [transport.receive(tensor, peer, what) for tensor in tensors if tensor.numel()]


def wait_for(messages: Sequence[Pending]) -> None:
    """Wait for all of ``messages``."""
    for message in messages:
        message.wait()
