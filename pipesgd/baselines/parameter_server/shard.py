"""A parameter server's range of the weights, its optimizer, and when a worker may go on; no communication."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pipesgd.baselines.parameter_server.clocks import Clocks
from pipesgd.baselines.parameter_server.meetings import Meetings
from pipesgd.baselines.parameter_server.messages import Reply
from pipesgd.baselines.parameter_server.shard_layout import ShardLayout, optimizer_of_shard
from pipesgd.baselines.parameter_server.shard_state import ShardState, pack_state, unpack_state
from pipesgd.errors import CommunicationError, DeadlineExceeded, UserInputError
from pipesgd.flat_buffer import FlatBuffer, take_mean
from pipesgd.optim import hyperparameters


class Shard:
    """One server's range of the weights and its optimizer, shared by one thread a worker.

    Bound 0 makes rounds: when all workers' gradients are there, their sum, in the order of the workers, becomes the
    mean, and the optimizer steps once, under the options (learning rates, momentum, ...) of that round. With any other
    bound each gradient is applied when it arrives, alone, under the options that were set when it was computed, but at
    1/w of their learning rates: w arrivals move the weights about as far as one synchronous update does, whatever the
    optimizer.

    Args:
        parameters: all trainable ones, with their initial values.
        optimizer: the model's; it is copied.
        layout: which part of them this server owns.
        workers: how many there are.
        bound: see ``Clocks``.
        rank: of this process, for errors.
        timeout: seconds without anything from a worker after which others do not wait for it any longer.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        layout: ShardLayout,
        *,
        workers: int,
        bound: int | None,
        rank: int,
        timeout: float,
    ):
        initial = FlatBuffer(parameters)
        initial.fill_from([parameter.detach() for parameter in parameters])
        self.layout = layout
        self.clocks = Clocks(workers, bound)
        self.in_rounds = bound == 0
        self.rank = rank
        self.weights = [part.clone() for part in layout.ranges_of(initial)]
        """Written only by ``push``, ``load`` and ``store``; in rounds, only once all workers have pushed again or are
        in a meeting."""
        self.most_state_bytes = layout.most_state_bytes(initial)
        self.failure: BaseException | None = None
        """The first one of any of this server's threads: nothing is served after it."""
        self._workers = workers
        self._meetings = Meetings(workers, timeout)
        self._pieces = layout.views(self.weights)
        self._optimizer = optimizer_of_shard(optimizer, parameters, layout, self._pieces)
        self._changed = threading.Condition()
        self._due: set[int] = set()
        self._round: list[Sequence[Tensor] | None] = [None] * workers
        self._sum = FlatBuffer(self.weights if self.in_rounds else [])
        self._added = 0
        self._round_is_finite = True
        self._round_applied = False

    def push(self, worker: int, gradient: Sequence[Tensor], finite: bool, options: Sequence[float]) -> Reply:
        """Take ``worker``'s gradient, of this server's ranges, and return once it may start its next iteration.

        It was computed under these ``options`` of the optimizer (``hyperparameters.as_numbers``).

        Raises:
            CommunicationError: a worker that this one must wait for has left, was lost, or is silent.
        """
        with self._changed:
            try:
                self._raise_failure()
                self._meetings.heard(worker, time.monotonic())
                if self.in_rounds:
                    self._add_to_round(worker, gradient, finite, options)
                elif finite:
                    self._update(gradient, options, lr_divisor=self._workers)
                self._due.update(self.clocks.arrived(worker))
                self._changed.notify_all()
                self._wait_until_due(worker)
            except BaseException as failure:
                self._fail(failure)
                raise
            # What is known of the last round stays until this worker has pushed again.
            return Reply(self.arrivals, self._round_applied if self.in_rounds else finite)

    @property
    def arrivals(self) -> int:
        """Gradients of all workers that have arrived so far."""
        return sum(self.clocks.arrivals)

    def copy_weights_to(self, ranges: Sequence[Tensor]) -> None:
        """Copy the weights out, all of one moment."""
        with contextlib.nullcontext() if self.in_rounds else self._changed:
            for target, weights in zip(ranges, self.weights, strict=True):
                target.copy_(weights)

    def save(self) -> Tensor:
        """All that this server knows, as bytes (uint8); nobody may be waiting in ``push``."""
        with self._changed:
            state = ShardState(
                weights=self.weights, optimizer=self._optimizer.state_dict(), arrivals=self.clocks.arrivals
            )
            return pack_state(state, self.most_state_bytes)

    def load(self, saved: Tensor) -> None:
        """Go back to what ``save`` gave.

        Raises:
            UserInputError: it is something else; nothing has changed then.
        """
        state = unpack_state(saved, self.weights, self._workers)
        with self._changed:
            try:
                self._optimizer.load_state_dict(state["optimizer"])
            except Exception as failure:  # noqa: BLE001 (whatever a foreign object leads to)
                raise UserInputError(f"a server's state must be of its optimizer; got another one: {failure}") from None
            for weights, values in zip(self.weights, state["weights"], strict=True):
                weights.copy_(values)
            self.clocks.restore(state["arrivals"])

    def store(self, ranges: Sequence[Tensor]) -> None:
        """Take these weights in place of the server's own; all workers must be in a meeting."""
        with self._changed:
            for weights, values in zip(self.weights, ranges, strict=True):
                weights.copy_(values)

    def meet(self, worker: int, number: int, place: int, seconds: float) -> bool:
        """True as soon as all workers have come to meeting ``number``; false if not all have within ``seconds``.

        ``worker`` has come to it, and asks again until it hears that all have. ``place`` is a number that stands for
        the collective call.

        Raises:
            CommunicationError: a worker that has not come has left, was lost, or is silent; or the workers have made
                different calls.
        """
        with self._changed:
            try:
                self._raise_failure()
                self._come(worker, number, place)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.failure is not None or not self._meetings.missing(worker), seconds)
                self._raise_failure()
                self._check_meeting(worker)
            except BaseException as failure:
                self._fail(failure)
                raise
            return not self._meetings.missing(worker)

    def heard(self, worker: int) -> None:
        """Something has arrived from ``worker``, or has reached it."""
        with self._changed:
            self._meetings.heard(worker, time.monotonic())

    def leave(self, worker: int) -> None:
        """Nothing more will come from ``worker``."""
        with self._changed:
            self.clocks.leave(worker)
            self._changed.notify_all()

    def fail(self, worker: int, failure: BaseException) -> None:
        """End the service, since the thread that serves ``worker`` has failed."""
        with self._changed:
            if isinstance(failure, CommunicationError) and failure.iteration is None:
                failure.iteration = self.clocks.arrivals[worker]
            self._fail(failure)

    def wait_until_all_have_left(self) -> None:
        """Return once no worker needs this server any more.

        Raises:
            CommunicationError: a worker was lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or len(self.clocks.left) == self._workers)
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _fail(self, failure: BaseException) -> None:
        self.failure = self.failure or failure
        self._changed.notify_all()

    def _add_to_round(self, worker: int, gradient: Sequence[Tensor], finite: bool, options: Sequence[float]) -> None:
        """Add what has arrived, in the order of the workers: the sum must not depend on who was first."""
        self._round[worker] = gradient
        self._round_is_finite &= finite
        while self._added < self._workers and (part := self._round[self._added]) is not None:
            for total, values in zip(self._sum.flats, part, strict=True):
                if self._added == 0:
                    total.copy_(values)
                else:
                    total.add_(values)
            self._round[self._added] = None
            self._added += 1
        if self._added == self._workers:
            if self._round_is_finite:
                for flat in self._sum.flats:
                    take_mean(flat, self._workers)
                self._update(self._sum.flats, options)
            self._round_applied = self._round_is_finite
            self._added, self._round_is_finite = 0, True

    def _update(self, gradient: Sequence[Tensor], options: Sequence[float], *, lr_divisor: int = 1) -> None:
        for weight, view in zip(self._pieces, self.layout.views(gradient), strict=True):
            weight.grad = view
        hyperparameters.set_numbers(self._optimizer, options)
        for group in self._optimizer.param_groups:
            group["lr"] /= lr_divisor
        self._optimizer.step()
        for weight in self._pieces:
            weight.grad = None

    def _wait_until_due(self, worker: int) -> None:
        def is_settled() -> bool:
            return worker in self._due or self.failure is not None or bool(in_vain())

        def in_vain() -> list[tuple[str, list[int]]]:
            """The workers that will not push before this one goes on, by the reason why."""
            slowest = self.clocks.waits_for(worker)
            reasons = {
                "it has left": [one for one in slowest if one in self.clocks.left],
                "it waits for this rank in a collective call": [
                    one for one in slowest if worker in self._meetings.missing(one)
                ],
            }
            return [(reason, ranks) for reason, ranks in reasons.items() if ranks]

        iteration = self.clocks.arrivals[worker] - 1
        in_time = self._changed.wait_for(is_settled, self._meetings.timeout)
        if worker in self._due:
            self._due.remove(worker)
            return
        self._raise_failure()
        if not in_time:
            reason = f"none within {self._meetings.timeout:g} s"
            raise self._lost(DeadlineExceeded, self.clocks.waits_for(worker), "wait for gradients", reason, iteration)
        reason, missing = in_vain()[0]
        raise self._lost(CommunicationError, missing, "wait for gradients", reason, iteration)

    def _come(self, worker: int, number: int, place: int) -> None:
        try:
            self._meetings.come(worker, number, place, time.monotonic())
        except ValueError as failure:
            iteration = self.clocks.arrivals[worker]
            raise self._lost(CommunicationError, [worker], "receive of a request", str(failure), iteration) from None

    def _check_meeting(self, worker: int) -> None:
        missing, iteration = self._meetings.missing(worker), self.clocks.arrivals[worker]
        operation = "wait for all workers"
        if left := [one for one in missing if one in self.clocks.left]:
            raise self._lost(CommunicationError, left, operation, "it has left", iteration)
        if elsewhere := self._meetings.elsewhere(worker):
            reason = f"it has made another collective call than rank {worker}: all workers must make the same ones"
            raise self._lost(CommunicationError, elsewhere, operation, reason, iteration)
        if silent := self._meetings.silent(worker, time.monotonic()):
            reason = f"nothing was heard of it for {self._meetings.timeout:g} s"
            raise self._lost(DeadlineExceeded, silent, operation, reason, iteration)

    def _lost(
        self, kind: type[CommunicationError], ranks: list[int], operation: str, reason: str, iteration: int
    ) -> CommunicationError:
        if len(ranks) > 1:
            reason += f" (ranks {', '.join(map(str, ranks))})"
        return kind(rank=self.rank, peer=ranks[0], operation=operation, reason=reason, iteration=iteration)
