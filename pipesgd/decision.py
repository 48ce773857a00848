"""What the timing model says of a run: how long an iteration takes, and what to choose where an option is ``auto``.

The one place, beside what writes calibrations, where the trainer knows the timing model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipesgd.codecs.options import CodecOptions
from pipesgd.config import AUTO_OPTIONS, TrainConfig
from pipesgd.errors import UserInputError
from timing_model.advice import advice, reason, words_for_training
from timing_model.choices import SEGMENTS, Space
from timing_model.plan import Plan, plan
from timing_model.predict import predict
from timing_model.profile import UNCOMPRESSED, ComputeProfile, Profile
from timing_model.question import EXTRAPOLATED, INTERPOLATED, OUTSIDE, Question, support_of
from timing_model.units import format_seconds

AUTO_WIDTHS = (1, 2, 3)
AUTO_CODECS = (UNCOMPRESSED, "bf16", "int8", "int4")
"""What is chosen from: what was found to cost next to no accuracy. Others are to be asked for by name."""

Known = tuple[Profile, ComputeProfile]
"""What is known of a cluster, and of the model on it."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What was chosen, and what it should take."""

    asked: Sequence[str]
    """The ``AUTO_OPTIONS`` that were left to be chosen."""
    choices: dict[str, Any]
    """All ``AUTO_OPTIONS``, as they are in this run."""
    source: str
    """Of what is known of the cluster."""
    iteration_seconds: float
    low: float
    """Where the 90 % interval of ``iteration_seconds`` begins."""
    high: float
    job_seconds: float
    """Of all iterations."""
    support: str
    """How far the run is from what was measured: one of ``timing_model.question.SUPPORTS``."""
    reasons: Sequence[str]
    """Why it is not interpolated."""
    why: Sequence[str]
    """The choice in words; empty if nothing was to be chosen."""
    iterations: int
    """Of the job."""

    def lines(self) -> list[str]:
        """For the person who waits."""
        far = "" if self.support == INTERPOLATED else f"; {self.support}: {', '.join(self.reasons)}"
        return [
            *self.why,
            f"predicted by {self.source}: {self._interval()} an iteration, {format_seconds(self.job_seconds)} for all "
            f"{self.iterations}{far}",
        ]

    def compare(self, measured: float) -> str:
        """The prediction beside the median of what iterations took, in s."""
        if self.low <= measured <= self.high:
            place = "inside the interval"
        else:
            place = "above the interval" if measured > self.high else "below the interval"
        off = measured / self.iteration_seconds - 1 if self.iteration_seconds > 0 else 0.0
        return f"an iteration took {format_seconds(measured)}, predicted {self._interval()}: {off:+.1%}, {place}"

    def contradicted(self, measured: float) -> str:
        """What to say when iterations take as long as ``measured``, in s, and not as predicted."""
        word = "slower" if measured > self.high else "faster"
        return (
            f"iterations take {format_seconds(measured)}, predicted {self._interval()}: the cluster is {word} than the "
            "calibration found it, or the model is wrong"
        )

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def _interval(self) -> str:
        low, middle, high = map(format_seconds, (self.low, self.iteration_seconds, self.high))
        return f"{middle} ({low} to {high})"


def of_file(path: Path, config: TrainConfig, tensors: Sequence[int]) -> Known:
    """The cluster in a file, and the computation of this run's model on it.

    Raises:
        UserInputError: it cannot be read, or this model with this many samples was not measured.
    """
    try:
        profile = Profile.load(path)
    except ValueError as failure:
        raise UserInputError(f"cluster must be a file that pipesgd.calibrate wrote: {failure}") from None
    model, batch_size = config.model.model, config.samples_per_rank
    for one in profile.compute:
        if (one.model, one.batch_size) == (model, batch_size):
            if one.tensors != tuple(tensors):
                raise UserInputError(
                    f"cluster must be of the model that is trained, {model} with {sum(tensors):,} parameters; "
                    f"got {path} with one of {one.numel:,}"
                )
            return profile, one
    there = ", ".join(f"{one.model} with {one.batch_size}" for one in profile.compute) or "none"
    raise UserInputError(
        f"cluster must be of the model that is trained, {model} with {batch_size} samples on each rank; "
        f"got {path} with {there}"
    )


def decide(
    profile: Profile,
    compute: ComputeProfile,
    config: TrainConfig,
    *,
    world_size: int,
    iterations: int,
    source: str,
    own: bool,
) -> Planned:
    """Choose what is auto, and predict.

    Args:
        profile: of the cluster.
        compute: of the model on it.
        config: what was asked for.
        world_size: ranks.
        iterations: of the whole job.
        source: of ``profile``, in words.
        own: whether ``profile`` was measured for this very run: then it is asked however far it has to be extrapolated.

    Raises:
        UserInputError: the job is outside of what was measured.
    """
    try:
        base = Question(cluster=profile, compute=compute, world_size=world_size, iterations=iterations)
        job = support_of(base)
        if job.kind == OUTSIDE and not own:
            raise UserInputError(f"cluster must be near what is to be run; got {job.reasons[0]}")
        # The names that are not to be chosen may be outside of what was measured: it is said.
        found = plan(base, space_of(profile, config), extrapolate=True)
        answer = predict(found.best.question, extrapolate=True)
    except UserInputError:
        raise
    except ValueError as failure:
        raise UserInputError(f"cluster must be one that can tell of this run; got {failure}") from None
    assert answer.job is not None
    question, auto = found.best.question, config.planning.auto
    chosen = {
        "width": question.width,
        "codec": question.codec,
        "all-reduce": question.all_reduce,
        "segment-bytes": question.segment_bytes,
    }
    support, reasons = answer.support.kind, list(answer.support.reasons)
    unmodelled = unmeasured(config)
    if unmodelled:
        support = EXTRAPOLATED if support == INTERPOLATED else support
        reasons += unmodelled
    return Planned(
        asked=list(auto),
        choices=chosen,
        source=source,
        iteration_seconds=answer.iteration.total,
        low=answer.low,
        high=answer.high,
        job_seconds=answer.job,
        support=support,
        reasons=reasons,
        why=why(found, auto),
        iterations=iterations,
    )


def space_of(profile: Profile, config: TrainConfig) -> Space:
    """What is searched: of what was measured, all that goes with the options that are not auto."""
    auto, pipeline = config.planning.auto, config.pipeline
    codecs = [one for one in AUTO_CODECS if one == UNCOMPRESSED or one in profile.codecs]
    all_reduces = [one for one in profile.calibrated.all_reduces if one != "hierarchical" and goes_with(config, one)]
    return Space(
        strategies=("pipelined",),
        widths=AUTO_WIDTHS if "width" in auto else (pipeline.width,),
        codecs=tuple(codecs) if "codec" in auto else (config.compression.codec,),
        all_reduces=tuple(all_reduces) if "all-reduce" in auto else (pipeline.all_reduce,),
        segments=SEGMENTS if "segment-bytes" in auto else (pipeline.segment_bytes,),
    )


def goes_with(config: TrainConfig, all_reduce: str) -> bool:
    """Whether the all-reduce works with the options that are not auto."""
    try:
        config.with_choices({"all-reduce": all_reduce})
    except UserInputError:
        return False
    return True


def unmeasured(config: TrainConfig) -> list[str]:
    """What the timing model does not know of a run, in words."""
    found = []
    if config.pipeline.streams > 1:
        found.append(f"{config.pipeline.streams} streams; measured: 1")
    if config.compression != CodecOptions(codec=config.compression.codec):
        found.append(f"{config.compression.codec} with options of its own; measured: as it is by default")
    return found


def why(found: Plan, auto: Sequence[str]) -> list[str]:
    """The choice in words."""
    if not auto:
        return []
    if "codec" not in auto:
        found = dataclasses.replace(found, uncompressed=None)  # nothing to be said of codecs
    chosen = f"chosen of {found.considered}: {words_for_training(found.best.question)}; {reason(found.best)}"
    return [chosen, " ".join(advice(found))] if advice(found) else [chosen]


def choices_of(config: TrainConfig) -> dict[str, Any]:
    """``AUTO_OPTIONS`` as they are in a configuration."""
    options = config.with_choices({}).options()
    return {name: options[name] for name in AUTO_OPTIONS}


def words(choices: dict[str, Any]) -> str:
    """Options as they are written on the command line."""
    return " ".join(f"--{name} {value}" for name, value in choices.items())
