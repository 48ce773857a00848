"""Parameter servers as a worker sees them, in its own process or on another rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from pipesgd.collectives.transport import Group, Pending
from pipesgd.collectives.worker import CLOSE_SECONDS
from pipesgd.errors import CommunicationError
from pipesgd.gradients import FlatBuffer
from pipesgd.strategies.server import (
    REPLY_NUMBERS,
    REQUEST_NUMBERS,
    Links,
    Request,
    ShardServer,
    receive_all,
    send_all,
    wait_for,
)
from pipesgd.strategies.shard import Reply, ShardLayout

T = TypeVar("T")
Answer = Callable[[], T]
"""Waits for an answer, and gives it."""


class Server(Protocol):
    """A server as a worker sees it."""

    is_beside: bool
    wire_bytes: int
    """Bytes that this rank sends through it in an iteration."""

    def push(self, gradient: FlatBuffer, finite: bool, lrs: Sequence[float], weights: FlatBuffer) -> Answer[Reply]:
        """Give it its range of ``gradient``; with the answer, its range of ``weights`` is there."""

    def pull(self, weights: FlatBuffer) -> Answer[Reply]:
        """Get its range of ``weights``."""

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

    def push(self, gradient: FlatBuffer, finite: bool, lrs: Sequence[float], weights: FlatBuffer) -> Answer[Reply]:
        layout = self._shard.layout
        reply = self._shard.push(self._worker, layout.ranges_of(gradient), finite, lrs)
        self._shard.copy_weights_to(layout.ranges_of(weights))
        return lambda: reply

    def pull(self, weights: FlatBuffer) -> Answer[Reply]:
        self._shard.copy_weights_to(self._shard.layout.ranges_of(weights))
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
        groups: int,
    ):
        self._links = links
        self._farewells = Links(group, CLOSE_SECONDS).requests
        self._rank = rank
        self._own_rank = own_rank
        self._layout = layout
        self._groups = groups
        self._listens = True
        range_bytes = sum(part.nbytes for part in layout.ranges_of(gradient))
        self.wire_bytes = 8 * (REQUEST_NUMBERS + groups) + range_bytes

    def push(self, gradient: FlatBuffer, finite: bool, lrs: Sequence[float], weights: FlatBuffer) -> Answer[Reply]:
        ranges, into = self._layout.ranges_of(gradient), self._layout.ranges_of(weights)
        return self._ask(self._request(Request.PUSH, finite=finite, lrs=lrs), gradient=ranges, into=into)

    def pull(self, weights: FlatBuffer) -> Answer[Reply]:
        return self._ask(self._request(Request.PULL), into=self._layout.ranges_of(weights))

    def save(self) -> Answer[Tensor]:
        answer = self._ask(self._request(Request.SAVE))

        def receive() -> Tensor:
            state = torch.empty(answer().state_bytes, dtype=torch.uint8)
            self._links.states.receive(state, self._rank, "a state").wait()
            return state

        return receive

    def load(self, saved: Tensor) -> Answer[Reply]:
        return self._ask(self._request(Request.LOAD, state_bytes=saved.nbytes), state=[saved])

    def leave(self) -> list[Pending]:
        return [self._farewells.send(self._request(Request.BYE), self._rank, "a farewell")] if self._listens else []

    def _request(
        self, kind: Request, *, finite: bool = True, lrs: Sequence[float] | None = None, state_bytes: int = 0
    ) -> Tensor:
        return torch.tensor([kind, finite, state_bytes, *(lrs or [0.0] * self._groups)], dtype=torch.float64)

    def _ask(
        self,
        request: Tensor,
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
            links.requests.send(request, rank, "a request"),
            *send_all(links.gradients, gradient, rank, "a gradient"),
            *send_all(links.states, state, rank, "a state"),
        ]

        def answer() -> Reply:
            reply.wait()
            arrivals, applied, lost, state_bytes = (int(number) for number in numbers.tolist())
            if lost >= 0:
                self._listens = False
                self._raise_lost(lost)
            wait_for(weights)
            wait_for(sent)
            return Reply(arrivals, bool(applied), state_bytes)

        return answer

    def _raise_lost(self, lost: int) -> NoReturn:
        reasons = {self._rank: "it has failed", self._own_rank: "the server has given up waiting for this rank"}
        raise CommunicationError(
            rank=self._own_rank,
            peer=self._rank if lost == self._own_rank else lost,
            operation="exchange of gradients",
            reason=reasons.get(lost, f"the server on rank {self._rank} has lost it"),
        )
