"""A parameter server's range of the weights, its optimizer, and when a worker may go on; no communication."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesgd.collectives.schedule import split
from pipesgd.errors import CommunicationError, DeadlineExceeded
from pipesgd.gradients import FlatBuffer, take_mean
from pipesgd.strategies.replication import set_learning_rates
from pipesgd.strategies.staleness import Clocks


@dataclass(frozen=True)
class Reply:
    """What a server says to a request."""

    arrivals: int
    """Gradients of all workers that have arrived so far."""
    applied: bool
    """Whether the gradient was, with the others of its round if there are rounds."""
    state_bytes: int = 0
    """Of the state that follows."""


@dataclass(frozen=True)
class _Piece:
    """The part of one parameter that a server owns: elements ``start`` to ``stop`` of it."""

    parameter: int
    flat: int
    offset: int
    """Where it begins in the server's range of that flat buffer."""
    start: int
    stop: int
    shape: tuple[int, ...]
    """The parameter's own if it is there as a whole, else (elements,)."""

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor that is shaped as the parameter."""
        return tensor.reshape(-1)[self.start : self.stop].view(self.shape)


class ShardLayout:
    """What of a model's flat buffers server ``index`` of ``servers`` owns: one contiguous range of each."""

    def __init__(self, buffer: FlatBuffer, index: int, servers: int):
        self._ranges = [split(flat.numel(), servers)[index] for flat in buffer.flats]
        self.pieces: list[_Piece] = []
        kinds = [flat.dtype for flat in buffer.flats]
        for parameter, view in enumerate(buffer.views):
            kind = kinds.index(view.dtype)
            offset, (first, last) = int(view.storage_offset()), self._ranges[kind]
            start, stop = max(offset, first) - offset, min(offset + view.numel(), last) - offset
            if start < stop:
                shape = tuple(view.shape) if stop - start == view.numel() else (stop - start,)
                self.pieces.append(_Piece(parameter, kind, offset + start - first, start, stop, shape))

    def ranges_of(self, buffer: FlatBuffer) -> list[Tensor]:
        """The server's ranges of ``buffer``, as views: one a flat tensor, in their order."""
        return [flat[start:stop] for flat, (start, stop) in zip(buffer.flats, self._ranges, strict=True)]

    def views(self, ranges: Sequence[Tensor]) -> list[Tensor]:
        """For each of ``pieces``, a view of its shape into the server's ranges."""
        return [
            ranges[piece.flat][piece.offset : piece.offset + piece.stop - piece.start].view(piece.shape)
            for piece in self.pieces
        ]


def optimizer_of_shard(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], layout: ShardLayout, weights: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` that updates ``weights``, the shard's pieces, in place of the parameters.

    Its groups and their options stay, and its state so far where that has an element for each of a parameter's;
    parameters of other shards are dropped.
    """
    absent = torch.empty(0)
    memo: dict[int, Any] = {id(parameter): absent for group in optimizer.param_groups for parameter in group["params"]}
    for piece, weight in zip(layout.pieces, weights, strict=True):
        parameter = parameters[piece.parameter]
        memo[id(parameter)] = weight
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                memo[id(value)] = piece.of(value).clone()
    copied = copy.deepcopy(optimizer, memo)
    copied.state.pop(absent, None)
    for group in copied.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not absent]
    return copied


class Shard:
    """One server's range of the weights and its optimizer, shared by one thread a worker.

    Bound 0 makes rounds: when all workers' gradients are there, their sum, in the order of the workers, becomes the
    mean, and the optimizer steps once, at the learning rates of that round. With any other bound each gradient is
    applied when it arrives, alone, at 1/w of the learning rates that were set when it was computed: w arrivals move
    the weights about as far as one synchronous update does, whatever the optimizer.

    Args:
        parameters: all trainable ones, with their initial values.
        optimizer: the model's; it is copied.
        layout: which part of them this server owns.
        workers: how many there are.
        bound: see ``Clocks``.
        rank: of this process, for errors.
        timeout: seconds that a worker waits here for the others' gradients.
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
        """Written only by ``push`` and ``load``; in rounds, only once all workers have pushed again."""
        self.failure: BaseException | None = None
        """The first one of any of this server's threads: nothing is served after it."""
        self._workers = workers
        self._timeout = timeout
        self._pieces = layout.views(self.weights)
        self._optimizer = optimizer_of_shard(optimizer, parameters, layout, self._pieces)
        self._changed = threading.Condition()
        self._due: set[int] = set()
        self._round: list[Sequence[Tensor] | None] = [None] * workers
        self._sum = FlatBuffer(self.weights if self.in_rounds else [])
        self._added = 0
        self._round_is_finite = True
        self._round_applied = False

    def push(self, worker: int, gradient: Sequence[Tensor], finite: bool, lrs: Sequence[float]) -> Reply:
        """Take ``worker``'s gradient, of this server's ranges, and return once it may start its next iteration.

        Raises:
            CommunicationError: a worker that this one must wait for has left, was lost, or is silent.
        """
        with self._changed:
            try:
                if self.failure is not None:
                    raise self.failure
                if self.in_rounds:
                    self._add_to_round(worker, gradient, finite, lrs)
                elif finite:
                    self._update(gradient, [lr / self._workers for lr in lrs])
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
        file = io.BytesIO()
        with self._changed:
            state = {
                "weights": self.weights,
                "optimizer": self._optimizer.state_dict(),
                "arrivals": self.clocks.arrivals,
            }
            torch.save(state, file)
        return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)

    def load(self, saved: Tensor) -> None:
        """Go back to what ``save`` gave."""
        state = torch.load(io.BytesIO(saved.numpy().tobytes()), weights_only=True)
        with self._changed:
            for weights, values in zip(self.weights, state["weights"], strict=True):
                weights.copy_(values)
            self._optimizer.load_state_dict(state["optimizer"])
            self.clocks.restore(state["arrivals"])

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
            if self.failure is not None:
                raise self.failure

    def _fail(self, failure: BaseException) -> None:
        self.failure = self.failure or failure
        self._changed.notify_all()

    def _add_to_round(self, worker: int, gradient: Sequence[Tensor], finite: bool, lrs: Sequence[float]) -> None:
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
                self._update(self._sum.flats, lrs)
            self._round_applied = self._round_is_finite
            self._added, self._round_is_finite = 0, True

    def _update(self, gradient: Sequence[Tensor], lrs: Sequence[float]) -> None:
        for weight, view in zip(self._pieces, self.layout.views(gradient), strict=True):
            weight.grad = view
        set_learning_rates(self._optimizer, lrs)
        self._optimizer.step()
        for weight in self._pieces:
            weight.grad = None

    def _wait_until_due(self, worker: int) -> None:
        def is_settled() -> bool:
            return worker in self._due or self.failure is not None or self.clocks.waits_in_vain(worker)

        iteration = self.clocks.arrivals[worker] - 1
        in_time = self._changed.wait_for(is_settled, self._timeout)
        if worker in self._due:
            self._due.remove(worker)
            return
        if self.failure is not None:
            raise self.failure
        slowest = self.clocks.waits_for(worker)
        missing = [one for one in slowest if one in self.clocks.left] if in_time else slowest
        raise (CommunicationError if in_time else DeadlineExceeded)(
            rank=self.rank,
            peer=missing[0],
            operation="wait for gradients",
            reason=("it has left" if in_time else f"none within {self._timeout:g} s")
            + (f" (ranks {', '.join(map(str, missing))})" if len(missing) > 1 else ""),
            iteration=iteration,
        )
