"""What a strategy is: how the gradients of one iteration become a weight update."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from torch import nn


@dataclass(frozen=True)
class Span:
    """A stretch of time in which one iteration's data, forward, backward, pack, wait, update,
    predict or communication ran, on the clock of ``time.perf_counter``, in seconds."""

    what: str
    iteration: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Comparison(NamedTuple):
    """What stood for a mean, and the mean that arrived; to as many digits as sums of float32 have."""

    cosine: float | None
    """Of the angle between them; None if one is zero, or not finite."""
    relative_error: float | None
    """Length of their difference, in lengths of the mean; None likewise."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one ``step`` or ``flush`` did: by default nothing."""

    applied: tuple[int, ...] = ()
    """Iterations whose gradients were applied: none while the pipeline fills, all in flight in a flush."""
    skipped: tuple[int, ...] = ()
    """Iterations whose averaged gradients were not finite, and left out."""
    nonfinite_ranks: tuple[int, ...] = ()
    """Ranks whose own gradients were not finite in the iterations skipped, once for each; empty if not known."""
    spans: tuple[Span, ...] = ()
    """pack, wait, update and predict in this step; and the communication of what arrived, which may have run beside
    earlier steps."""
    wire_bytes: int = 0
    """Bytes that this rank sends for the gradient handed over in this step."""
    comparison: Comparison | None = None
    """How well the newest mean that arrived had been predicted."""
    fell_back: bool = False
    """Whether a guard has found that staleness hurts, and a time at width 1 begins."""
    schedule_steps: int = 1
    """How often a learning-rate schedule is to be stepped now: once, unless other ranks' updates count too."""

    def seconds(self, what: str) -> float:
        """Seconds in spans of this name: "wait" is exposed communication."""
        return sum(span.seconds for span in self.spans if span.what == what)


class Strategy(Protocol):
    """Turns the gradients that a backward pass left in ``.grad`` into weight updates.

    A strategy owns ``.grad`` from ``step`` on: there is no ``zero_grad`` in a loop that uses one.
    As a context manager it is closed at the end of the block.
    """

    iteration: int
    """Gradients taken over so far."""
    module: nn.Module
    """What the forward pass calls: the model, or a wrapper of it."""
    replicated: bool
    """Whether all ranks hold the same weights, bit for bit, after every step."""
    drifts: bool = False
    """Whether replicas drift apart, since the ranks' processors compute other bits (``pipesgd.pipeline.sameness``)."""

    def step(self) -> StepReport:
        """Take the gradients over and apply those that are due."""

    def flush(self) -> StepReport:
        """Apply the gradients that are still in flight, so that none is lost."""

    def true_weights(self) -> AbstractContextManager[None]:
        """While it is open, the model holds the weights that all ranks agree on."""

    def share_weights(self) -> None:
        """Give all ranks rank 0's true weights, if replicas drift. Collective then; by default nothing."""
        return

    def accumulating(self) -> AbstractContextManager[None]:
        """While it is open, backward passes add to the gradients of this rank, and nothing is exchanged."""

    def combine_buffers(self, how: str) -> None:
        """Give the model's buffers (batch norm's statistics) on every rank, ``how``: their "average" over ranks, those
        of "rank-0", or leave each its "own"."""

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to continue bit for bit, besides the model's and the optimizer's own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``; the model and the optimizer have theirs already."""

    def close(self) -> None:
        """End what runs beside the training loop. Closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
