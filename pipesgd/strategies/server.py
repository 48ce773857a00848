"""A parameter server: a shard, and a thread for every worker elsewhere that pushes to it and pulls from it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pipesgd.collectives.transport import Group, Pending, TorchTransport, Transport
from pipesgd.errors import CommunicationError
from pipesgd.strategies.shard import Reply, Shard

FOREVER = 10 * 365 * 86400.0
"""Seconds that a server waits for a worker's next request: it may compute or evaluate for long. One that has died is
noticed by its closed connection, and who waits for one that hangs has a deadline."""


class Request(enum.IntEnum):
    """What a worker asks of a server."""

    PUSH = 0
    """Take this gradient; give the weights as soon as I may go on."""
    PULL = 1
    """Give the weights."""
    SAVE = 2
    """Give all that you know."""
    LOAD = 3
    """Know this."""
    BYE = 4
    """Nothing more will come from me."""


class Links:
    """The kinds of messages between workers and servers, for one thread of one rank.

    All threads use one process group. Each kind has a tag of its own, and goes from one thread of a rank to one thread
    of another: no message can be taken for another thread's. One connection between two ranks carries them all.
    Requests and replies may have deadlines of their own, in seconds.
    """

    def __init__(self, group: Group, timeout: float, *, requests: float | None = None, replies: float | None = None):
        self.requests = TorchTransport([group], requests or timeout, tag=1)
        self.gradients = TorchTransport([group], timeout, tag=2)
        self.replies = TorchTransport([group], replies or timeout, tag=3)
        self.weights = TorchTransport([group], timeout, tag=4)
        self.states = TorchTransport([group], timeout, tag=5)

    @property
    def bytes_sent(self) -> int:
        kinds = (self.requests, self.gradients, self.replies, self.weights, self.states)
        return sum(kind.bytes_sent for kind in kinds)


REQUEST_NUMBERS = 3
"""Before the learning rates, in float64: the request, whether the gradient is finite, bytes of the state."""
REPLY_NUMBERS = 4
"""In float64: arrivals, whether the gradient was applied, the rank that was lost or -1, bytes of the state."""


class WorkerThread(threading.Thread):
    """Serves one worker that is on another rank, until it says bye.

    The receives of its next request and gradient are posted ahead, since gloo's sender starts only when the receiver
    is ready. Weights are sent as they are in rounds, in which nobody writes them until all have pushed again;
    otherwise from a copy of one moment.
    """

    def __init__(self, shard: Shard, worker: int, groups: int, links: Links):
        super().__init__(name=f"pipesgd-server-of-{worker}", daemon=True)  # daemon: it may wait for a lost worker
        self._shard = shard
        self._worker = worker
        self.links = links
        self._request = torch.empty(REQUEST_NUMBERS + groups, dtype=torch.float64)
        self._gradient = [torch.empty_like(weights) for weights in shard.weights]
        self._copy = shard.weights if shard.in_rounds else [torch.empty_like(weights) for weights in shard.weights]

    def run(self) -> None:
        try:
            request, gradient = self._expect_request(), self._expect_gradient()
            while True:
                request.wait()
                kind, finite, nbytes, *lrs = self._request.tolist()
                if kind == Request.BYE:
                    self._shard.leave(self._worker)
                    return
                reply, state = Reply(self._shard.arrivals, True), torch.empty(0, dtype=torch.uint8)
                if kind == Request.PUSH:
                    wait_for(gradient)
                    reply = self._shard.push(self._worker, self._gradient, bool(finite), lrs)
                    gradient = self._expect_gradient()
                elif kind == Request.SAVE:
                    state = self._shard.save()
                elif kind == Request.LOAD:
                    saved = torch.empty(int(nbytes), dtype=torch.uint8)
                    self.links.states.receive(saved, self._worker, "a state").wait()
                    self._shard.load(saved)
                request = self._expect_request()
                self._answer(reply, state, weights=kind in (Request.PUSH, Request.PULL))
        except BaseException as failure:  # noqa: BLE001 (the others that use this server get it)
            self._shard.fail(self._worker, failure)
            with contextlib.suppress(CommunicationError):
                self._send_reply(Reply(0, False), lost=self._lost_rank()).wait()

    def _expect_request(self) -> Pending:
        return self.links.requests.receive(self._request, self._worker, "a request")

    def _expect_gradient(self) -> list[Pending]:
        return receive_all(self.links.gradients, self._gradient, self._worker, "a gradient")

    def _answer(self, reply: Reply, state: Tensor, *, weights: bool) -> None:
        under_way = [self._send_reply(dataclasses.replace(reply, state_bytes=state.nbytes))]
        if weights:
            if not self._shard.in_rounds:
                self._shard.copy_weights_to(self._copy)
            under_way += send_all(self.links.weights, self._copy, self._worker, "weights")
        under_way += send_all(self.links.states, [state], self._worker, "a state")
        wait_for(under_way)

    def _send_reply(self, reply: Reply, *, lost: int = -1) -> Pending:
        numbers = torch.tensor([reply.arrivals, reply.applied, lost, reply.state_bytes], dtype=torch.float64)
        return self.links.replies.send(numbers, self._worker, "a reply")

    def _lost_rank(self) -> int:
        failure = self._shard.failure
        if isinstance(failure, CommunicationError) and failure.peer is not None:
            return failure.peer
        return self._shard.rank


class ShardServer:
    """A shard, and the threads that serve it to the workers on other ranks."""

    def __init__(self, shard: Shard, group: Group, workers: Sequence[int], groups: int, timeout: float):
        self.shard = shard
        self.workers = [
            WorkerThread(shard, worker, groups, Links(group, timeout, requests=FOREVER)) for worker in workers
        ]
        for thread in self.workers:
            thread.start()

    @property
    def bytes_sent(self) -> int:
        return sum(thread.links.bytes_sent for thread in self.workers)

    @property
    def wire_bytes(self) -> int:
        """Bytes that it sends when each of these workers pushes once."""
        weights = sum(part.nbytes for part in self.shard.weights)
        return len(self.workers) * (8 * REPLY_NUMBERS + weights)

    def close(self, seconds: float) -> None:
        """Wait for the threads to end, but not longer than this for all of them."""
        end = time.monotonic() + seconds
        for thread in self.workers:
            thread.join(max(0.0, end - time.monotonic()))


def send_all(transport: Transport, tensors: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
    """Begin to send ``tensors``, but those without an element."""
    return [transport.send(tensor, peer, what) for tensor in tensors if tensor.numel()]


def receive_all(transport: Transport, tensors: Sequence[Tensor], peer: int, what: str) -> list[Pending]:
    """Begin to receive what ``send_all`` sends."""
    return [transport.receive(tensor, peer, what) for tensor in tensors if tensor.numel()]


def wait_for(messages: Sequence[Pending]) -> None:
    """Wait for all of ``messages``."""
    for message in messages:
        message.wait()
