"""A plan: the choices for a run, and the time that the timing model predicts for its iterations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipesgd.config import AUTO_OPTIONS, TrainConfig
from timing_model.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Choices for a run, and the times that are predicted with them."""

    asked: Sequence[str]
    """Names of the ``AUTO_OPTIONS`` that were left to be chosen."""
    choices: dict[str, Any]
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
    """Median of an iteration over its mean: below 1 where a few are long; 1 in a run of an older version."""

    def lines(self) -> list[str]:
        """Describe the plan for the user."""
        # Imported here, since it loads the timing model, which only a run with a plan has loaded.
        from timing_model.job import INTERPOLATED

        interval = _interval(self.low, self.iteration_seconds, self.high)
        far = f"; {self.support}" if self.support != INTERPOLATED else ""
        far += f": {', '.join(self.reasons)}" if self.reasons else ""
        return [
            *self.why,
            f"predicted by {self.source}: {interval} an iteration, {format_seconds(self.job_seconds)} for all "
            f"{self.iterations}{far}",
        ]

    @property
    def median(self) -> tuple[float, float, float]:
        """Predicted median iteration, in s: the low end of its interval, the middle, and the high end."""
        low, middle, high = (self.median_share * one for one in (self.low, self.iteration_seconds, self.high))
        return low, middle, high

    def compare(self, measured: float) -> str:
        """Describe the predicted median next to the measured one, in s."""
        low, middle, high = self.median
        if low <= measured <= high:
            place = "inside the interval"
        else:
            place = "above the interval" if measured > high else "below the interval"
        off = measured / middle - 1 if middle > 0 else 0.0
        predicted = _interval(*self.median)
        return f"the median iteration took {format_seconds(measured)}, predicted {predicted}: {off:+.1%}, {place}"

    def contradicted(self, measured: float) -> str:
        """Describe the contradiction when the median iteration takes ``measured`` s, and not the predicted time."""
        word = "slower" if measured > self.median[2] else "faster"
        return (
            f"the median iteration takes {format_seconds(measured)}, predicted {_interval(*self.median)}: the cluster "
            f"is {word} than the calibration found it, or the model is wrong"
        )

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _interval(low: float, middle: float, high: float) -> str:
    return f"{format_seconds(middle)} ({format_seconds(low)} to {format_seconds(high)})"


def choices_of(config: TrainConfig) -> dict[str, Any]:
    """Return the ``AUTO_OPTIONS`` of a configuration."""
    options = config.with_choices({}).options()
    return {name: options[name] for name in AUTO_OPTIONS}


def words(choices: dict[str, Any]) -> str:
    """Format options as they are written on the command line."""
    return " ".join(f"--{name} {value}" for name, value in choices.items())
