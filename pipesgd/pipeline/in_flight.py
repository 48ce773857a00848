"""Gradients on their way: their layout, those whose buckets are leaving, and those whose mean is awaited."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from pipesgd.flat_buffer import BucketedBuffer
from pipesgd.strategy import Comparison, Span

Known = TypeVar("Known")
"""Type of what the weight half of a pipeline knows of a gradient in flight."""

WHOLE = "matrix"
"""Exchange of gradients that are summed whole."""


@dataclass(frozen=True)
class Layout:
    """Tensors of a gradient, cut into buckets, each with one kind of exchange."""

    tensors: Sequence[Tensor]
    """Tensors of the shapes, strides, dtypes and device of the gradient."""
    buckets: Sequence[Sequence[int]]
    """Indices of the tensors of each bucket, in the order in which the buckets leave."""
    exchange: Sequence[str]
    """Exchange of each bucket."""

    def of_buckets(self, exchange: str | None = None) -> list[list[Tensor]]:
        """Return the tensors of each bucket, or of those with this ``exchange``."""
        pairs = zip(self.buckets, self.exchange, strict=True)
        return [[self.tensors[index] for index in one] for one, how in pairs if exchange in (None, how)]


class Members(Protocol):
    """The ranks that hold one replica of the model together with this one, each a part of it."""

    def connect(self, transport: str) -> None:
        """Connect to the other members. Collective, as is all that follows but ``abort`` and ``close``."""

    def abort(self, error: BaseException) -> None:
        """End every wait for the other members because of ``error``; any thread may call this."""

    def begin(self, iteration: int) -> None:
        """Let the sums on the communication thread be of ``iteration`` from now on."""

    def finite_norm(
        self, finite: bool, mean: Sequence[Tensor], agree: Callable[[Tensor], Tensor]
    ) -> tuple[bool, float]:
        """Return whether the whole mean is finite, and its norm."""

    def is_so(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on all members."""

    def wait_for_all(self) -> None:
        """Return when all members have called this."""

    def close(self) -> None:
        """End the connections to the members."""


@dataclass(frozen=True)
class Reduction:
    """Report of the communication thread about a mean."""

    finite: bool
    spans: Sequence[Span]
    """Times in which the mean of each bucket was computed."""
    comparison: Comparison | None
    norm: float | None
    """Norm of the mean if that is finite; where ranks agree on it, the same bits on all of them."""
    gathered_bytes: int
    """Bytes that this rank has sent to gather what gradients are made of."""


@dataclass
class Outgoing:
    """A gradient of this rank whose buckets are leaving, up to its departure."""

    iteration: int
    buffer: BucketedBuffer
    local: list[Tensor | None]
    """Gradients of this rank, by tensor, of the buckets that are packed; None for tensors without one."""
    scale: float = 1.0
    """Loss scale in effect when this gradient was computed."""
    packs: list[Span] = field(default_factory=list)
    sums: list[Span] = field(default_factory=list)
    """Times in which the buckets were packed, and in which the communication thread summed them."""
    own_finite: list[bool] = field(default_factory=list)
    """Finiteness of each bucket of this rank's own gradient, if the communication thread looks."""
    norms: list[float | None] = field(default_factory=list)
    """Norms of the parts of the mean; None for those that are not finite."""
    parts: Sequence[Any] = ()
    """Parts that hooks have kept of the gradients of the bucket that is gathered."""
    gathered_bytes: int = 0
    """Bytes that this rank has sent to gather what gradients are made of."""

    def own_is_finite(self) -> bool:
        """Return True if this rank's own gradient is finite, where the communication thread has looked."""
        return all(self.own_finite)


@dataclass(frozen=True)
class InFlight(Generic[Known]):
    """A gradient in flight, which departed in ``iteration``."""

    iteration: int
    buffer: BucketedBuffer
    known: Known
    """Knowledge of the other half of the pipeline about it, unread here."""
    own_is_finite: Callable[[], bool]
    """Function that returns True if this rank's own gradient is finite; called only if the mean is not."""
    reduction: Future[Reduction]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the mean, after waiting for it, and of what is known of it on the wire."""
        arrived = self.reduction.result()
        return {
            "iteration": self.iteration,
            "finite": arrived.finite,
            "norm": arrived.norm,
            "gathered_bytes": arrived.gathered_bytes,
            "comparison": list(arrived.comparison or ()),
            "flats": [flat.clone() for flat in self.buffer.flats],
            "own_is_finite": arrived.finite or self.own_is_finite(),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], buffer: BucketedBuffer, known: Known) -> Self:
        """Return the gradient of a ``state_dict``, whose mean is put into ``buffer``."""
        torch._foreach_copy_(buffer.flats, state["flats"])
        now = time.perf_counter()
        arrived: Future[Reduction] = Future()
        arrived.set_result(
            Reduction(
                finite=state["finite"],
                spans=[Span("communication", state["iteration"], now, now)],
                comparison=Comparison(*state["comparison"]) if state["comparison"] else None,
                norm=state["norm"],
                gathered_bytes=state["gathered_bytes"],
            )
        )
        return cls(state["iteration"], buffer, known, functools.partial(bool, state["own_is_finite"]), arrived)
