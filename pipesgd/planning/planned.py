"""A plan: the choices for a run, and the time that the timing model predicts for its iterations."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pipesgd.config import AUTO_OPTIONS, TrainConfig
from timing_model.units import format_seconds

Choices = dict[str, Any]
"""Values of all ``AUTO_OPTIONS``."""
MEASURED = "measured"
"""Support of a plan whose time an audition has measured: ``timing_model.job.MEASURED``."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Choices for a run, and the times that are predicted with them, or were measured in an audition."""

    asked: Sequence[str]
    """Names of the ``AUTO_OPTIONS`` that were left to be chosen."""
    choices: Choices
    """Values of all ``AUTO_OPTIONS`` in this run."""
    source: str
    """Origin of what is known of the cluster."""
    iteration_seconds: float
    low: float
    """Lower end of the 90 % interval of ``iteration_seconds``."""
    high: float
    job_seconds: float
    """Seconds of all iterations."""
    support: str
    """Distance of the run from what was measured: one of ``timing_model.job.SUPPORTS``."""
    reasons: Sequence[str]
    """Reasons why the prediction is not interpolated."""
    why: Sequence[str]
    """Explanation of the choice; empty if nothing was to be chosen."""
    iterations: int
    """Number of iterations of the job."""
    median_share: float = 1.0
    """Median of a window over its mean: below 1 where a few are long."""
    start: int = 0
    """First iterations, which are synchronous, in a pipeline that later is not."""
    dense: int = 0
    """First iterations whose gradients are sent whole, where those of later ones are factors of low rank."""
    start_seconds: float = 0.0
    """Predicted seconds of a synchronous one; 0 if there is none."""
    dense_seconds: float = 0.0
    """Predicted seconds that whole gradients take longer than factors, in all."""
    window: int = 1
    """Iterations whose mean is compared with the prediction: those of a window of local steps, or, with fragments, of
    the windows in which each has a turn."""
    candidates: Sequence[Choices] = ()
    """Choices that could be the fastest, the simplest first, for an audition; empty if there is nothing to compare."""
    predicted: Sequence[float] = ()
    """Seconds of an iteration that the timing model predicts for each of ``candidates``."""
    audition_seconds: float = 0.0
    """Seconds that the audition took; 0 if there was none."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the plan that ``as_json`` has made into ``values``. Raises ``TypeError`` for other values."""
        return cls(**values)

    def lines(self) -> list[str]:
        """Describe the plan for the user."""
        # Imported here, since it loads the timing model, which only a run with a plan has loaded.
        from timing_model.support import INTERPOLATED

        interval = _interval(self.low, self.iteration_seconds, self.high)
        far = f"; {self.support}" if self.support not in (INTERPOLATED, MEASURED) else ""
        far += f": {', '.join(self.reasons)}" if self.reasons else ""
        return [
            *self.why,
            f"{self._how} by {self.source}: {interval} an iteration, {format_seconds(self.job_seconds)} for all "
            f"{self.iterations}{self._unlike}{far}",
        ]

    @property
    def settled(self) -> int:
        """Number of the first iteration that is neither synchronous nor has a whole gradient, unless all are so."""
        return max(self.start, self.dense)

    @property
    def _unlike(self) -> str:
        kinds = {"synchronous": self.start, "with whole gradients": self.dense}
        return "".join(f", the first {number} of them {kind}" for kind, number in kinds.items() if number)

    @property
    def _how(self) -> str:
        return "measured" if self.support == MEASURED else "predicted"

    @property
    def median(self) -> tuple[float, float, float]:
        """Predicted median iteration, in s: the low end of its interval, the middle, and the high end."""
        low, middle, high = (self.median_share * one for one in (self.low, self.iteration_seconds, self.high))
        return low, middle, high

    def windows(self, seconds: Sequence[float]) -> list[float]:
        """Return the mean of the iterations, in s, of each whole window of ``seconds``."""
        starts = range(0, len(seconds) - self.window + 1, self.window)
        return [statistics.fmean(seconds[start : start + self.window]) for start in starts]

    def compare(self, measured: float) -> str:
        """Describe the predicted median next to the measured one, in s."""
        low, middle, high = self.median
        if low <= measured <= high:
            place = "inside the interval"
        else:
            place = "above the interval" if measured > high else "below the interval"
        off = measured / middle - 1 if middle > 0 else 0.0
        what, took = self._told(measured)
        return (
            f"the median {what} took {took}, {self._how} {_interval(*self.median)}"
            f"{' in the audition' if self.support == MEASURED else ''}: {off:+.1%}, {place}"
        )

    def contradicted(self, measured: float) -> str:
        """Describe the contradiction when the median takes ``measured`` s, and not the predicted time."""
        word = "slower" if measured > self.median[2] else "faster"
        (what, took), interval = self._told(measured), _interval(*self.median)
        if self.support == MEASURED:
            return (
                f"the median {what} takes {took}, measured {interval} in the audition: the cluster is {word} than it "
                "was then"
            )
        return (
            f"the median {what} takes {took}, predicted {interval}: the cluster is {word} than the calibration found "
            "it, or the model is wrong"
        )

    def _told(self, seconds: float) -> tuple[str, str]:
        """Return what the median is of, and its time."""
        took = format_seconds(seconds)
        return ("iteration", took) if self.window == 1 else ("window", f"{took} an iteration")

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def shown(choices: Choices, among: Sequence[Choices]) -> Choices:
    """Return those of the choices in which ``among`` differ."""
    return {name: value for name, value in choices.items() if any(other[name] != value for other in among)}


def _interval(low: float, middle: float, high: float) -> str:
    return f"{format_seconds(middle)} ({format_seconds(low)} to {format_seconds(high)})"


def choices_of(config: TrainConfig) -> dict[str, Any]:
    """Return the ``AUTO_OPTIONS`` of a configuration."""
    options = config.with_choices({}).options()
    return {name: options[name] for name in AUTO_OPTIONS}


def words(choices: dict[str, Any]) -> str:
    """Format options as they are written on the command line."""
    return " ".join(f"--{name} {value}" for name, value in choices.items())
