"""A parameter server without its messages: it takes in gradients, and decides when a worker may continue."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipesgd.errors import CommunicationError, DeadlineExceeded, UserInputError, named
from pipesgd.flat_buffer import are_finite, take_mean, take_shares
from pipesgd.systems.servers.messages import Reply, Request, RequestMessage, pack_state, unpack_state
from pipesgd.systems.servers.update_rule import ShardLayout, UpdateRule
from pipesgd.systems.servers.waiting import Clocks, Meetings

MEETING_SECONDS = 1.0
"""Seconds that a server waits for all workers to come to a meeting before it replies that not all have."""


class Shard:
    """One server's range of the weights, shared by one thread per worker.

    Bound 0 makes rounds: when all workers' gradients have arrived, their sum, in the order of the workers, becomes the
    mean, by which ``rule`` updates the weights once, if it is finite. With any other bound (see ``Clocks``) each
    gradient updates them alone when it arrives, at 1/w of its learning rates. A worker that is silent for ``timeout``
    seconds is not waited for any longer. The first error, which names this process's ``rank``, ends the service for all
    workers.
    """

    def __init__(
        self, rule: UpdateRule, layout: ShardLayout, *, workers: int, bound: int | None, rank: int, timeout: float
    ):
        self.weights = rule.weights
        """Weights, changed only by a push, a load or a store; in rounds, only once all workers have pushed again or are
        in a meeting."""
        self.most_state_bytes = layout.most_state_bytes
        self.workers = workers
        self.clocks = Clocks(workers, bound)
        self.in_rounds = bound == 0
        self.rank = rank
        self.failure: BaseException | None = None
        """First failure in any of this server's threads, after which no request is served."""
        self._rule = rule
        self._meetings = Meetings(workers, timeout)
        self._changed = threading.Condition()
        self._round: dict[int, Sequence[Tensor]] = {}
        self._sum = [torch.zeros_like(part) for part in self.weights] if self.in_rounds else []
        self._added = 0
        self._round_is_finite = True
        self._round_applied = False

    def serve(self, worker: int, asked: RequestMessage, tensors: Sequence[Tensor] = ()) -> tuple[Reply, Tensor]:
        """Do what ``worker`` asks, with the tensors that it sent; return the reply and the state that goes with it."""
        self.heard(worker)
        done, state = True, torch.empty(0, dtype=torch.uint8)
        match asked.kind:
            case Request.PUSH:
                return self.push(worker, tensors, asked.finite, asked.options), state
            case Request.MEET:
                done = self.meet(worker, asked.number, asked.place, MEETING_SECONDS)
            case Request.SAVE:
                state = self.save()
            case Request.LOAD:
                self.load(tensors[0])
            case Request.STORE:
                with self._changed:  # all workers are in a meeting
                    _copy(tensors, self.weights)
            case Request.BYE:
                with self._changed:
                    self.clocks.left.add(worker)
                    self._changed.notify_all()
        return Reply(sum(self.clocks.arrivals), done, state_bytes=state.nbytes), state

    def push(self, worker: int, gradient: Sequence[Tensor], finite: bool, options: Sequence[float]) -> Reply:
        """Take ``worker``'s gradient, computed with these ``options``, and return once the worker may continue.

        Raises:
            CommunicationError: a worker that this one must wait for has left, was lost, or is silent.
        """
        with self._serving(worker):
            if self.in_rounds:
                self._add_to_round(worker, gradient, finite, options)
            elif finite:
                self._rule.update(gradient, options, lr_divisor=self.workers)
            if self.clocks.arrived(worker):
                self._changed.notify_all()
            self._wait_until_due(worker)
            # The outcome of the last round stays until this worker has pushed again.
            return Reply(sum(self.clocks.arrivals), self._round_applied if self.in_rounds else finite)

    def meet(self, worker: int, number: int, place: int, seconds: float) -> bool:
        """Return True as soon as all workers have come to meeting ``number``; False if not all have within ``seconds``.

        ``worker`` is there, in the collective call that ``place`` stands for, and asks again until the answer is True.

        Raises:
            CommunicationError: a missing worker has left, was lost, or is silent; or the workers made different calls.
        """
        with self._serving(worker):
            iteration, meetings = self.clocks.arrivals[worker], self._meetings
            try:
                meetings.come(worker, number, place, time.monotonic())
            except ValueError as failure:
                raise self._lost("receive of a request", iteration, [worker], str(failure)) from None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.failure is not None or not meetings.missing(worker), seconds)
            self._raise_failure()
            waiting = functools.partial(self._lost, "wait for all workers", iteration)
            if left := [one for one in meetings.missing(worker) if one in self.clocks.left]:
                raise waiting(left, "it has left")
            if elsewhere := meetings.elsewhere(worker):
                call = f"it has made another collective call than rank {worker}: all workers must make the same ones"
                raise waiting(elsewhere, call)
            if silent := meetings.silent(worker, time.monotonic()):
                raise waiting(silent, f"nothing was heard of it for {meetings.timeout:g} s", DeadlineExceeded)
            return not meetings.missing(worker)

    def save(self) -> Tensor:
        """Return the server's whole state as bytes (uint8); no worker may be waiting in ``push``."""
        with self._changed:
            state = {"weights": self.weights, "optimizer": self._rule.state_dict(), "arrivals": self.clocks.arrivals}
            return pack_state(state, self.most_state_bytes)

    def load(self, saved: Tensor) -> None:
        """Restore a saved state; raise ``UserInputError``, and change nothing, if ``saved`` is something else."""
        state = unpack_state(saved, self.weights, self.workers)
        with self._changed:
            try:
                self._rule.load_state_dict(state["optimizer"])
            except Exception as failure:  # noqa: BLE001 (a foreign object can cause any error)
                raise UserInputError(f"a server's state must be of its optimizer; got another one: {failure}") from None
            _copy(state["weights"], self.weights)
            self.clocks.arrivals = state["arrivals"]

    def copy_weights_to(self, ranges: Sequence[Tensor]) -> None:
        """Copy the weights out, all as of one moment."""
        with contextlib.nullcontext() if self.in_rounds else self._changed:
            _copy(self.weights, ranges)

    def copy_answer_to(self, ranges: Sequence[Tensor], kind: Request, sent: Sequence[Tensor]) -> None:
        """Copy out what a worker gets after a push of ``sent``, or a pull: the answer of the rule, or the weights."""
        if kind == Request.PUSH and self._rule.answers:
            _copy(sent, ranges)
        else:
            self.copy_weights_to(ranges)

    def heard(self, worker: int) -> None:
        """Note that something has arrived from ``worker``, or has reached it."""
        with self._changed:
            self._meetings.heard(worker, time.monotonic())

    def fail(self, worker: int, failure: BaseException) -> None:
        """End the service, since serving ``worker`` has failed; a second failure changes nothing."""
        with self._changed:
            if isinstance(failure, CommunicationError) and failure.iteration is None:
                failure.iteration = self.clocks.arrivals[worker]
            self.failure = self.failure or failure
            self._changed.notify_all()

    def wait_until_all_have_left(self) -> None:
        """Return once no worker needs this server any more; raise ``CommunicationError`` if one was lost."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or len(self.clocks.left) == self.workers)
            self._raise_failure()

    @contextlib.contextmanager
    def _serving(self, worker: int) -> Iterator[None]:
        """Keep other threads from changing anything, unless this one waits; its failure ends the service for all."""
        with self._changed:
            try:
                self._raise_failure()
                yield
            except BaseException as failure:
                self.fail(worker, failure)
                raise

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _add_to_round(self, worker: int, gradient: Sequence[Tensor], finite: bool, options: Sequence[float]) -> None:
        """Add the gradients that have arrived, in the order of the workers: the sum must not depend on timing."""
        self._round[worker] = gradient
        self._round_is_finite &= finite
        while (part := self._round.pop(self._added, None)) is not None:
            take_shares(part, self.workers)
            for total, values in zip(self._sum, part, strict=True):
                if self._added == 0:
                    total.copy_(values)
                else:
                    total.add_(values)
            self._added += 1
        if self._added == self.workers:
            for total in self._sum:
                take_mean(total, self.workers)
            self._round_applied = self._round_is_finite and are_finite(self._sum)
            if self._round_applied:
                self._rule.update(self._sum, options, lr_divisor=1)
            self._added, self._round_is_finite = 0, True

    def _wait_until_due(self, worker: int) -> None:
        def in_vain() -> tuple[list[int], str]:
            """Return the workers that will not push before this one continues, and the reason."""
            if left := self.clocks.waits_in_vain(worker):
                return left, "it has left"
            waiting = [one for one in self.clocks.waits_for(worker) if worker in self._meetings.missing(one)]
            return waiting, "it waits for this rank in a collective call"

        def is_settled() -> bool:
            return self.failure is not None or not self.clocks.waits_for(worker) or bool(in_vain()[0])

        self._changed.wait_for(is_settled, self._meetings.timeout)
        if slowest := self.clocks.waits_for(worker):
            self._raise_failure()
            lost = functools.partial(self._lost, "wait for gradients", self.clocks.arrivals[worker] - 1)
            missing, reason = in_vain()
            if missing:
                raise lost(missing, reason)
            raise lost(slowest, f"none within {self._meetings.timeout:g} s", DeadlineExceeded)

    def _lost(
        self,
        operation: str,
        iteration: int,
        ranks: Sequence[int],
        reason: str,
        kind: type[CommunicationError] = CommunicationError,
    ) -> CommunicationError:
        reason += f" ({named(ranks)})" if len(ranks) > 1 else ""
        return kind(rank=self.rank, peer=ranks[0], operation=operation, reason=reason, iteration=iteration)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
