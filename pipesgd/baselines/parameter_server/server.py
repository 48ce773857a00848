"""A parameter server: a shard, and a thread for every worker elsewhere that pushes to it and pulls from it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipesgd.baselines.parameter_server.messages import REPLY_NUMBERS, REQUEST_NUMBERS, Reply, Request, RequestMessage
from pipesgd.baselines.parameter_server.shard import Shard
from pipesgd.comm.transport import Group, Pending, TorchTransport, Transport
from pipesgd.errors import CommunicationError

FOREVER = 10 * 365 * 86400.0
"""Seconds that a server waits for a worker's next request: it may compute or evaluate for long. One that has died is
noticed by its closed connection, and who waits for one that hangs has a deadline."""

MEETING_SECONDS = 1.0
"""How long a server waits for all workers to come to a meeting before it tells those who ask that not all have."""


@dataclass(frozen=True)
class Links:
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
        """Links over one process group, which all threads use.

        Each kind has a tag of its own, and goes from one thread of a rank to one thread of another: no message can be
        taken for another thread's. One connection between two ranks carries them all. Requests and replies may have
        deadlines of their own, in seconds.
        """
        deadlines = (requests or timeout, timeout, replies or timeout, timeout, timeout)
        return cls(*(TorchTransport([group], deadline, tag=tag) for tag, deadline in enumerate(deadlines, start=1)))

    @property
    def bytes_sent(self) -> int:
        kinds = (self.requests, self.gradients, self.replies, self.weights, self.states)
        return sum(kind.bytes_sent for kind in kinds)


class WorkerThread(threading.Thread):
    """Serves one worker that is on another rank, until it says bye.

    The receives of its next request and gradient are posted ahead, since gloo's sender starts only when the receiver
    is ready. Weights are sent as they are in rounds, in which nobody writes them until all have pushed again;
    otherwise from a copy of one moment.
    """

    def __init__(self, shard: Shard, worker: int, options: int, links: Links):
        super().__init__(name=f"pipesgd-server-of-{worker}", daemon=True)  # daemon: it may wait for a lost worker
        self._shard = shard
        self._worker = worker
        self.links = links
        self._request = torch.empty(REQUEST_NUMBERS + options, dtype=torch.float64)
        self._gradient = [torch.empty_like(weights) for weights in shard.weights]
        self._copy = shard.weights if shard.in_rounds else [torch.empty_like(weights) for weights in shard.weights]

    def run(self) -> None:
        try:
            request, gradient = self._expect_request(), self._expect_gradient()
            while True:
                request.wait()
                self._shard.heard(self._worker)
                asked = self._read_request()
                if asked.kind == Request.BYE:
                    self._shard.leave(self._worker)
                    return
                if asked.kind in (Request.PUSH, Request.STORE):
                    wait_for(gradient)
                reply, state = self._serve(asked)
                if asked.kind in (Request.PUSH, Request.STORE):
                    gradient = self._expect_gradient()
                request = self._expect_request()
                self._answer(reply, state, weights=asked.kind in (Request.PUSH, Request.PULL))
                self._shard.heard(self._worker)
        except BaseException as failure:  # noqa: BLE001 (the others that use this server get it)
            self._shard.fail(self._worker, failure)
            with contextlib.suppress(CommunicationError):
                self._send_reply(Reply(0, False, lost=self._lost_rank())).wait()

    def _read_request(self) -> RequestMessage:
        with self._blamed("a request"):
            most = self._shard.most_state_bytes
            return RequestMessage.unpack(self._request.tolist(), worker=self._worker, most_state_bytes=most)

    def _serve(self, asked: RequestMessage) -> tuple[Reply, Tensor]:
        """Do what is asked; the reply, and the state that goes with it."""
        shard, state = self._shard, torch.empty(0, dtype=torch.uint8)
        if asked.kind == Request.PUSH:
            return shard.push(self._worker, self._gradient, asked.finite, asked.options), state
        if asked.kind == Request.MEET:
            here = shard.meet(self._worker, asked.number, asked.place, MEETING_SECONDS)
            return Reply(shard.arrivals, here), state
        if asked.kind == Request.SAVE:
            state = shard.save()
        elif asked.kind == Request.LOAD:
            saved = torch.empty(asked.number, dtype=torch.uint8)
            wait_for(receive_all(self.links.states, [saved], self._worker, "a state"))
            with self._blamed("a state"):
                shard.load(saved)
        elif asked.kind == Request.STORE:
            shard.store(self._gradient)
        return Reply(shard.arrivals, True), state

    @contextlib.contextmanager
    def _blamed(self, what: str) -> Iterator[None]:
        """Turn a ``ValueError`` about what the worker has sent into an error that names it."""
        try:
            yield
        except ValueError as failure:
            raise CommunicationError(
                rank=self._shard.rank, peer=self._worker, operation=f"receive of {what}", reason=str(failure)
            ) from failure

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

    def _send_reply(self, reply: Reply) -> Pending:
        return self.links.replies.send(reply.pack(), self._worker, "a reply")

    def _lost_rank(self) -> int:
        failure = self._shard.failure
        if isinstance(failure, CommunicationError) and failure.peer is not None:
            return failure.peer
        return self._shard.rank


class ShardServer:
    """A shard, and the threads that serve it to the workers on other ranks."""

    def __init__(self, shard: Shard, group: Group, workers: Sequence[int], options: int, timeout: float):
        self.shard = shard
        self.workers = [
            WorkerThread(shard, worker, options, Links.over(group, timeout, requests=FOREVER)) for worker in workers
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
