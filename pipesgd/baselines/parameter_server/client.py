"""Parameter servers as a worker sees them, in its own process or on another rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from pipesgd.baselines.parameter_server.messages import REPLY_NUMBERS, REQUEST_NUMBERS, Reply, Request, RequestMessage
from pipesgd.baselines.parameter_server.server import (
    MEETING_SECONDS,
    Links,
    ShardServer,
    receive_all,
    send_all,
    wait_for,
)
from pipesgd.baselines.parameter_server.shard_layout import ShardLayout
from pipesgd.baselines.parameter_server.shard_state import check_state_bytes
from pipesgd.comm.thread import CLOSE_SECONDS
from pipesgd.comm.transport import Group, Pending
from pipesgd.errors import CommunicationError
from pipesgd.flat_buffer import FlatBuffer

T = TypeVar("T")
Answer = Callable[[], T]
"""Waits for an answer, and gives it."""


class Server(Protocol):
    """A server as a worker sees it."""

    is_beside: bool
    wire_bytes: int
    """Bytes that this rank sends through it in an iteration."""

    def push(self, gradient: FlatBuffer, finite: bool, options: list[float], weights: FlatBuffer) -> Answer[Reply]:
        """Give it its range of ``gradient``; with the answer, its range of ``weights`` is there."""

    def pull(self, weights: FlatBuffer) -> Answer[Reply]:
        """Get its range of ``weights``."""

    def meet(self, number: int, place: int) -> Answer[Reply]:
        """Ask whether all workers have come to meeting ``number``; ``place`` stands for the collective call."""

    def store(self, weights: FlatBuffer) -> Answer[Reply]:
        """Give it its range of ``weights`` to continue from."""

    def save(self) -> Answer[Tensor]:
        """Get all that it knows."""

    def load(self, saved: Tensor) -> Answer[Reply]:
        """Give it what ``save`` gave."""

    def leave(self) -> list[Pending]:
        """Begin to take leave of it, if it still listens."""


class ServerBeside:
    """A server in this process: no message is sent, and its answer may be a while in coming."""

    is_beside = True

    def __init__(self, server: ShardServer, worker: int):
        self._shard = server.shard
        self._worker = worker
        self.wire_bytes = server.wire_bytes

    def push(self, gradient: FlatBuffer, finite: bool, options: list[float], weights: FlatBuffer) -> Answer[Reply]:
        layout = self._shard.layout
        reply = self._shard.push(self._worker, layout.ranges_of(gradient), finite, options)
        self._shard.copy_weights_to(layout.ranges_of(weights))
        return lambda: reply

    def pull(self, weights: FlatBuffer) -> Answer[Reply]:
        self._shard.copy_weights_to(self._shard.layout.ranges_of(weights))
        return self._at_once

    def meet(self, number: int, place: int) -> Answer[Reply]:
        here = self._shard.meet(self._worker, number, place, MEETING_SECONDS)
        return lambda: Reply(self._shard.arrivals, here)

    def store(self, weights: FlatBuffer) -> Answer[Reply]:
        self._shard.store(self._shard.layout.ranges_of(weights))
        return self._at_once

    def save(self) -> Answer[Tensor]:
        return self._shard.save

    def load(self, saved: Tensor) -> Answer[Reply]:
        self._shard.load(saved)
        return self._at_once

    def leave(self) -> list[Pending]:
        self._shard.leave(self._worker)
        return []

    def _at_once(self) -> Reply:
        return Reply(self._shard.arrivals, True)


class RemoteServer:
    """A server on another rank."""

    is_beside = False

    def __init__(
        self,
        rank: int,
        layout: ShardLayout,
        gradient: FlatBuffer,
        *,
        links: Links,
        group: Group,
        own_rank: int,
        ranks: int,
        options: int,
    ):
        self._links = links
        self._farewells = Links.over(group, CLOSE_SECONDS).requests
        self._rank = rank
        self._own_rank = own_rank
        self._layout = layout
        self._ranks = ranks
        self._options = options
        self._listens = True
        self._most_state_bytes = layout.most_state_bytes(gradient)
        range_bytes = sum(part.nbytes for part in layout.ranges_of(gradient))
        self.wire_bytes = 8 * (REQUEST_NUMBERS + options) + range_bytes

    def push(self, gradient: FlatBuffer, finite: bool, options: list[float], weights: FlatBuffer) -> Answer[Reply]:
        ranges, into = self._layout.ranges_of(gradient), self._layout.ranges_of(weights)
        request = RequestMessage(Request.PUSH, finite=finite, options=tuple(options))
        return self._ask(request, gradient=ranges, into=into)

    def pull(self, weights: FlatBuffer) -> Answer[Reply]:
        return self._ask(RequestMessage(Request.PULL), into=self._layout.ranges_of(weights))

    def meet(self, number: int, place: int) -> Answer[Reply]:
        return self._ask(RequestMessage(Request.MEET, number=number, place=place))

    def store(self, weights: FlatBuffer) -> Answer[Reply]:
        return self._ask(RequestMessage(Request.STORE), gradient=self._layout.ranges_of(weights))

    def save(self) -> Answer[Tensor]:
        answer = self._ask(RequestMessage(Request.SAVE))

        def receive() -> Tensor:
            state = torch.empty(answer().state_bytes, dtype=torch.uint8)
            self._links.states.receive(state, self._rank, "a state").wait()
            return state

        return receive

    def load(self, saved: Tensor) -> Answer[Reply]:
        check_state_bytes(saved.nbytes, self._most_state_bytes)
        return self._ask(RequestMessage(Request.LOAD, number=saved.nbytes), state=[saved])

    def leave(self) -> list[Pending]:
        if not self._listens:
            return []
        return [self._farewells.send(RequestMessage(Request.BYE).pack(self._options), self._rank, "a farewell")]

    def _ask(
        self,
        request: RequestMessage,
        *,
        gradient: Sequence[Tensor] = (),
        state: Sequence[Tensor] = (),
        into: Sequence[Tensor] = (),
    ) -> Answer[Reply]:
        """Send a request and what belongs to it; the answer's weights go ``into`` these."""
        links, rank = self._links, self._rank
        # Receives are posted first, since gloo's sender starts only when the receiver is ready.
        numbers = torch.empty(REPLY_NUMBERS, dtype=torch.float64)
        reply = links.replies.receive(numbers, rank, "a reply")
        weights = receive_all(links.weights, into, rank, "weights")
        sent = [
            links.requests.send(request.pack(self._options), rank, "a request"),
            *send_all(links.gradients, gradient, rank, "a gradient"),
            *send_all(links.states, state, rank, "a state"),
        ]

        def answer() -> Reply:
            reply.wait()
            told = self._read_reply(numbers)
            if told.lost is not None:
                self._listens = False
                self._raise_lost(told.lost)
            wait_for(weights)
            wait_for(sent)
            return told

        return answer

    def _read_reply(self, numbers: Tensor) -> Reply:
        try:
            return Reply.unpack(numbers.tolist(), ranks=self._ranks, most_state_bytes=self._most_state_bytes)
        except ValueError as failure:
            raise CommunicationError(
                rank=self._own_rank, peer=self._rank, operation="receive of a reply", reason=str(failure)
            ) from failure

    def _raise_lost(self, lost: int) -> NoReturn:
        reasons = {self._rank: "it has failed", self._own_rank: "the server has given up on this rank"}
        raise CommunicationError(
            rank=self._own_rank,
            peer=self._rank if lost == self._own_rank else lost,
            operation="exchange of gradients",
            reason=reasons.get(lost, f"the server on rank {self._rank} has lost it"),
        )
