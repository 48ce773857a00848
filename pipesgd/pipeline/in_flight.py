"""Gradients on their way: those whose buckets are leaving, and those whose mean is awaited."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from pipesgd.flat_buffer import BucketedBuffer, on_device
from pipesgd.pipeline.prediction import Unapplied
from pipesgd.strategy import Comparison, Span


@dataclass(frozen=True)
class Reduction:
    """Report of the communication thread about a mean."""

    finite: bool
    spans: Sequence[Span]
    """Times in which the mean of each bucket was computed."""
    comparison: Comparison | None
    norm: float | None
    """Norm of the mean if that is finite; with a guard, the same bits on all ranks, whatever processors they have."""
    gathered_bytes: int
    """Bytes that this rank has sent to gather what gradients are made of."""


@dataclass
class Outgoing:
    """A gradient of this rank whose buckets are leaving, up to the step that hands it over."""

    iteration: int
    buffer: BucketedBuffer
    scale: float
    """Loss scale in effect when this gradient was computed."""
    local: list[Tensor | None]
    """Gradients of this rank, by parameter, of the buckets that have left; None for parameters without one."""
    packs: list[Span] = field(default_factory=list)
    sums: list[Span] = field(default_factory=list)
    """Times in which the buckets were packed, and in which the communication thread summed them."""
    own_finite: list[bool] = field(default_factory=list)
    """Finiteness of each bucket of this rank's own gradient, if the communication thread looks."""
    norms: list[float | None] = field(default_factory=list)
    """Norms of the parts of the mean; None for those that are not finite."""
    parts: Sequence[Any] = ()
    """What hooks have kept of the gradients of the bucket that is gathered."""
    gathered_bytes: int = 0
    """Bytes that this rank has sent to gather what gradients are made of."""


@dataclass(frozen=True)
class InFlight:
    """A gradient in flight, handed over in ``iteration``."""

    iteration: int
    buffer: BucketedBuffer
    unapplied: Unapplied
    scale: float
    """Loss scale in effect when this gradient was computed."""
    own_is_finite: Callable[[], bool]
    """Function that returns True if this rank's own gradient is finite; called only if the mean is not."""
    reduction: Future[Reduction]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the mean, after waiting for it, and of what is known of it."""
        arrived = self.reduction.result()
        return {
            "iteration": self.iteration,
            "hyperparameters": list(self.unapplied.hyperparameters),
            "finite": arrived.finite,
            "norm": arrived.norm,
            "gathered_bytes": arrived.gathered_bytes,
            "comparison": list(arrived.comparison or ()),
            "flats": [flat.clone() for flat in self.buffer.flats],
            "scale": self.scale,
            "kept": [tensor.clone() for tensor in self.unapplied.kept],
            "own_is_finite": arrived.finite or self.own_is_finite(),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], buffer: BucketedBuffer, device: torch.device) -> Self:
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
        return cls(
            iteration=state["iteration"],
            buffer=buffer,
            unapplied=Unapplied(on_device(state["kept"], device), state["hyperparameters"]),
            scale=state["scale"],
            own_is_finite=functools.partial(bool, state["own_is_finite"]),
            reduction=arrived,
        )
