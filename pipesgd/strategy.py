"""Protocol of strategies, which turn the gradients of one iteration into a weight update."""

from __future__ import annotations

import collections
import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from pipesgd.pipeline_config import Buffers

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Span:
    """A stretch of time in which one iteration's data, forward, backward, pack, wait, update, predict or communication
    ran, or a loader process on its data, on the clock of ``time.perf_counter``, in seconds."""

    what: str
    iteration: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Comparison(NamedTuple):
    """Comparison of a predicted mean with the mean that arrived, to as many digits as float32 sums have."""

    cosine: float | None
    """Cosine of the angle between the two; None if one of them is zero or not finite."""
    relative_error: float | None
    """Length of the difference between the two, as a multiple of the mean's length; None like ``cosine``."""


def hidden_share(communication: float, exposed: float) -> float | None:
    """Return the share of the communication that the computation did not wait for; None without communication."""
    return None if communication <= 0 else max(0.0, 1 - exposed / communication)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report of one ``step`` or ``flush``; by default it did nothing."""

    applied: tuple[int, ...] = ()
    """Iterations whose gradients were applied: none while the pipeline fills, all in flight in a flush."""
    skipped: tuple[int, ...] = ()
    """Iterations whose averaged gradients were not finite and were left out."""
    nonfinite_ranks: tuple[int, ...] = ()
    """Ranks whose own gradients were not finite, once for each skipped iteration; empty if not known."""
    spans: tuple[Span, ...] = ()
    """Spans of pack, wait, update and predict in this step; and of the communication of the gradients that arrived,
    which may have run during earlier steps."""
    wire_bytes: int = 0
    """Bytes that this rank sends for the gradient handed over in this step. Those of rows and factors (``reduce``) are
    counted when they have arrived: how many there are depends on all ranks."""
    gradient_norm: float | None = None
    """Norm of the averaged gradient that was applied last, before clipping, to as many digits as float32 sums have. It
    is the same on all ranks that have the same processor and number of threads. With local steps it is that of the
    mean movement. None if none was applied, and from other strategies than ``Pipelined`` and ``LocalSteps``, which get
    it from the pass that looks for NaN and infinity."""
    comparison: Comparison | None = None
    """Quality of the prediction of the newest mean that arrived."""
    fell_back: bool = False
    """True if the guard has found that staleness hurts, so that a period at width 1 begins."""
    width: int = 1
    """Width at which the gradient handed over in this step is applied: 1 if that is in this step. With local steps it
    is that of this iteration's window."""
    schedule_steps: int = 1
    """Number of steps that a learning-rate schedule must take now: one, unless other ranks' updates count too."""

    @property
    def hidden_share(self) -> float | None:
        """Share of the communication of the gradients that arrived in this step which ran while this rank computed:
        1 - wait/communication, and at least 0. None if no gradient arrived."""
        return hidden_share(self.seconds("communication"), self.seconds("wait"))

    def seconds(self, what: str) -> float:
        """Return the seconds in spans of this name; "wait" is exposed communication."""
        return sum(span.seconds for span in self.spans if span.what == what)

    def followed_by(self, later: StepReport) -> StepReport:
        """Return one report of what this one and a ``later`` one are about."""
        return StepReport(
            applied=self.applied + later.applied,
            skipped=self.skipped + later.skipped,
            nonfinite_ranks=self.nonfinite_ranks + later.nonfinite_ranks,
            spans=self.spans + later.spans,
            wire_bytes=self.wire_bytes + later.wire_bytes,
            gradient_norm=later.gradient_norm if later.applied else self.gradient_norm,
            comparison=later.comparison if later.applied or later.skipped else self.comparison,
            fell_back=self.fell_back or later.fell_back,
            width=later.width,
        )


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals of a pipeline's iterations so far, on this rank."""

    iterations: int
    """Number of iterations."""
    late: int
    """Number of iterations whose gradient is applied in a later one."""
    iteration_seconds: float | None
    """Median time from the end of one step to that of the next, of the last ``RECENT`` ones: the pauses for evaluations
    and checkpoints, which few of them include, do not change it. None before the second iteration."""
    waiting_seconds: float
    """Mean time of an iteration in which this rank waited for gradients of other ranks."""
    hidden_share: float | None
    """Share of the communication that ran while this rank computed; None without communication."""
    uncompressed_bytes: int
    """Bytes that this rank would have sent without a codec, for gradients that are summed whole."""
    wire_bytes: int
    """Bytes that this rank has sent."""

    def as_metrics(self) -> dict[str, float]:
        """Return the totals by names for a logger, such as "pipesgd/hidden_share", without those that are None."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {f"pipesgd/{name}": value for name, value in values.items() if value is not None}


RECENT = 1000
"""Number of iterations whose times a ``Tally`` keeps."""
FOLDED = 100
"""Number of reports that a ``Tally`` keeps before it adds them up."""


class Step(NamedTuple):
    """Times of one iteration, in s."""

    period: float
    """Time since the step before it ended."""
    computing: float
    """Its part in which the program ran, without packing, waiting and predicting."""
    communication: float
    """Time that the exchange of the gradients took that arrived in it; 0 if none arrived."""


class Tally:
    """Reports of a pipeline's steps, added up now and then, since a step of the pipeline only puts its report here.

    Args:
        uncompressed_bytes: bytes that this rank would send in an iteration without a codec.
    """

    def __init__(self, uncompressed_bytes: int = 0):
        self.uncompressed_bytes = uncompressed_bytes
        self.reports: list[StepReport] = []
        """Reports that are not added up yet."""
        self.recent: collections.deque[Step] = collections.deque(maxlen=RECENT)
        """Times of the last iterations, all but the first one's."""
        self._iterations = self._late = self._wire_bytes = 0
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._last_end: float | None = None

    def take(self, report: StepReport) -> None:
        """Take the report of a step."""
        self.reports.append(report)
        if len(self.reports) >= FOLDED:
            self.fold()

    def fold(self) -> None:
        """Add up the reports that have come since the last call."""
        reports, self.reports = self.reports, []
        for report in reports:
            seconds: dict[str, float] = collections.defaultdict(float)
            for span in report.spans:
                seconds[span.what] += span.seconds
            self._iterations += 1
            self._late += report.width > 1
            self._wire_bytes += report.wire_bytes
            for what in seconds:
                self._seconds[what] += seconds[what]
            if not report.spans:
                continue
            end = max(span.end for span in report.spans)
            if self._last_end is not None:
                period = end - self._last_end
                own = seconds["pack"] + seconds["wait"] + seconds["predict"]
                self.recent.append(Step(period, period - own, seconds["communication"]))
            self._last_end = end

    def totals(self) -> Totals:
        """Return the totals so far."""
        self.fold()
        communication, waiting = self._seconds["communication"], self._seconds["wait"]
        periods = [step.period for step in self.recent]
        return Totals(
            iterations=self._iterations,
            late=self._late,
            iteration_seconds=statistics.median(periods) if periods else None,
            waiting_seconds=waiting / self._iterations if self._iterations else 0.0,
            hidden_share=hidden_share(communication, waiting),
            uncompressed_bytes=self.uncompressed_bytes * self._iterations,
            wire_bytes=self._wire_bytes,
        )


class Strategy(Protocol):
    """Turns the gradients that a backward pass left in ``.grad`` into weight updates.

    A strategy owns ``.grad``: a loop that uses one calls no ``zero_grad``, and gradients from before it was made are
    dropped.
    As a context manager it is closed at the end of the block.
    """

    iteration: int
    """Number of gradients taken over so far."""
    module: nn.Module
    """Module that the forward pass calls: the model, or a wrapper of it."""
    replicated: bool
    """True if all ranks hold the same weights, bit for bit, after every step."""
    owns_optimizer: bool = False
    """True if ``state_dict`` has the state of the optimizer, too, which is each rank's own."""

    def step(self) -> StepReport:
        """Take over the gradients and apply those that are due."""

    def flush(self) -> StepReport:
        """Apply the gradients that are still in flight, so that none is lost; by default there never are any."""
        return StepReport()

    def true_weights(self) -> AbstractContextManager[None]:
        """Make the model hold the weights that all ranks agree on while the context is open; by default it does."""
        return nullcontext()

    def accumulating(self) -> AbstractContextManager[None]:
        """Let backward passes add to this rank's gradients, without any exchange, while the context is open.

        By default gradients are sent only in ``step``.
        """
        return nullcontext()

    def combine_buffers(self, how: Buffers) -> None:
        """Set the model's buffers (batch norm's statistics) on every rank to their "average" over ranks or to those of
        "rank-0", or leave each rank its "own"; ``how`` is one of the three."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to continue bit for bit, besides that of the model and the optimizer."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``; the model and the optimizer have loaded theirs already."""

    def close(self) -> None:
        """End what runs alongside the training loop. Closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
