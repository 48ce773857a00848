"""Answers of the timing model about a run: the time of an iteration, and the choice of options that are ``auto``.

The trainer calls the timing model's formulas from here and from calibration alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipesgd.codecs.flat import CompressionConfig
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.planning.planned import Choices, Planned, choices_of
from pipesgd.strategies import start_iterations
from timing_model.advice import advice, reason
from timing_model.choices import ACCURATE, SEGMENTS, WIDTHS, Choice, Space, simplicity
from timing_model.cluster_profile import Profile
from timing_model.configurations import training_arguments
from timing_model.fragments import MOST_LOCAL_STEPS, hiding_fragments, hiding_windows, predict_in_turns
from timing_model.job import Job, Length
from timing_model.measured import UNCOMPRESSED, ComputeProfile
from timing_model.params import Parts
from timing_model.plan import Plan, plan
from timing_model.predict import Answer, predict
from timing_model.simulate_job import median_share
from timing_model.support import EXTRAPOLATED, INTERPOLATED, OUTSIDE, support_of

AUTO_CODECS = tuple(one for one in ACCURATE if one != "fp16")
"""Codecs to choose from: those that cost accuracy the least. bf16 takes as long as fp16, and cannot overflow."""

AUTO_BUCKETS = (1, 2, 4, 8, 16)
"""Numbers of buckets to choose from."""

MOST_CANDIDATES = 4
"""Most configurations that an audition compares."""

Known = tuple[Profile, ComputeProfile]
"""Profile of a cluster, and of the model's computation on it."""


def of_file(path: Path, config: TrainConfig, tensors: Sequence[int]) -> Known:
    """Load the cluster from a file, with the computation of this run's model alone: with as many micro-batches of this
    size as were measured, or with a multiple of them.

    Raises:
        UserInputError: the file cannot be read, or this model with micro-batches of this size was not measured.
    """
    try:
        profile = Profile.load(path)
    except ValueError as failure:
        raise UserInputError(f"cluster must be a file that pipesgd.calibrate wrote: {failure}") from None
    model, micro_batches = config.model.model, config.optimization.accumulation
    near = [
        one
        for one in profile.compute
        if one.model == model
        and one.batch_size == one.accumulation * config.data.batch_size
        and micro_batches % one.accumulation == 0
    ]
    if not near:
        there = ", ".join(f"{one.model} with {one.batch}" for one in profile.compute) or "none"
        raise UserInputError(
            f"cluster must be of the model that is trained, {model} with {config.samples()} samples on each rank; "
            f"got {path} with {there}"
        )
    nearest = max(near, key=lambda one: one.accumulation)
    if nearest.tensors != tuple(tensors):
        raise UserInputError(
            f"cluster must be of the model that is trained, {model} with {sum(tensors):,} parameters; "
            f"got {path} with one of {nearest.numel:,}"
        )
    compute = nearest.accumulate(micro_batches // nearest.accumulation)
    return dataclasses.replace(profile, compute=(compute,)), compute


class Decided(NamedTuple):
    """Choice of the options that are auto, and its prediction."""

    choices: dict[str, Any]
    """Values of all ``AUTO_OPTIONS``."""
    why: list[str]
    answer: Answer
    candidates: Sequence[Job] = ()
    """Jobs that could be the fastest, the simplest first; empty if there is nothing to compare."""


def decide(
    profile: Profile,
    compute: ComputeProfile,
    config: TrainConfig,
    *,
    world_size: int,
    iterations: int,
    source: str,
    own: bool,
    parts: Sequence[Parts] = (),
) -> Planned:
    """Choose the options that are auto, and predict the run.

    Args:
        profile: profile of the cluster.
        compute: computation of the model on it.
        config: options that were asked for.
        world_size: number of ranks.
        iterations: number of iterations of the whole job.
        source: origin of ``profile``, in words.
        own: True if ``profile`` was measured for this very run: it is then used however far it must be extrapolated.
        parts: what the ranks gather of gradients, in place of an all-reduce.

    Raises:
        UserInputError: the job is outside of what was measured.
    """
    limit = config.wire.rate
    if limit < math.inf:  # to the model, that is the bandwidth
        profile = dataclasses.replace(profile, compute=(compute,)).limited_to(limit)
        [compute] = profile.compute
    unmodelled = unmeasured(config)
    if unmodelled:
        compute = dataclasses.replace(compute, measured=())  # of runs without these properties
    try:
        base = Job(
            cluster=profile,
            compute=dataclasses.replace(compute, samples=None),  # the run's data set may be another one
            world_size=world_size,
            length=Length(iterations=iterations),
            loader_workers=config.data.workers,
            parts=tuple(parts),
        )
        measured = support_of(base)
        if measured.kind == OUTSIDE and not own:
            raise UserInputError(f"cluster must have been measured near this job; got {measured.reasons[0]}")
        # Options that are not auto may be outside of what was measured; the answer reports that.
        windows = config.in_windows or "fragments" in config.planning.auto
        decided = predict_windows(base, config) if windows else search(base, config)
    except UserInputError:
        raise
    except ValueError as failure:
        raise UserInputError(f"cluster must allow a prediction of this run; got {failure}") from None
    answer = decided.answer
    assert answer.total is not None
    support, reasons = answer.support.kind, list(answer.support.reasons)
    if unmodelled:
        support = EXTRAPOLATED if support == INTERPOLATED else support
        reasons += unmodelled
    chosen = config.with_choices(decided.choices)
    start, dense = start_iterations(chosen, iterations), min(chosen.compression.dense_start or 0, iterations)
    each = answer.total / iterations
    start_seconds, dense_seconds = _start_seconds(answer.job, each, start, dense)
    total = start * start_seconds + (iterations - start) * each + dense_seconds
    return Planned(
        asked=list(config.planning.auto),
        choices=decided.choices,
        source=source,
        iteration_seconds=answer.iteration.total,
        low=answer.low,
        high=answer.high,
        job_seconds=total,
        support=support,
        reasons=reasons,
        why=decided.why,
        iterations=iterations,
        start=start,
        dense=dense,
        start_seconds=start_seconds,
        dense_seconds=dense_seconds,
        median_share=median_share(answer.job),
        window=config.windows.local_steps * decided.choices["fragments"],
        candidates=[choices_in(job) for job in decided.candidates],
        predicted=[predict(job, extrapolate=True).iteration.total for job in decided.candidates],
    )


def _start_seconds(job: Job, each: float, start: int, dense: int) -> tuple[float, float]:
    """Return the seconds of an iteration that is synchronous, and how much longer ``dense`` whole gradients take.

    The first ``start`` iterations are synchronous, and a later one takes ``each`` seconds. Both are 0 where there are
    none. Whole gradients are taken to be fp32: with a codec they take less, but that may not be measured.
    """

    def seconds(**changes: Any) -> float:
        return predict(job.changed(**changes), extrapolate=True).iteration.total

    synchronous, whole = {"width": 1, "local_steps": 1}, {"codec": UNCOMPRESSED}
    both, dense_seconds = min(start, dense), 0.0
    start_seconds = seconds(**synchronous) if start else 0.0
    if both:
        dense_seconds += both * (seconds(**synchronous, **whole) - start_seconds)
    if dense > both:
        dense_seconds += (dense - both) * (seconds(**whole) - each)
    return start_seconds, dense_seconds


def search(base: Job, config: TrainConfig) -> Decided:
    """Choose the best configuration of the job of ``base``.

    Raises ``ValueError`` if nothing is left to search.
    """
    auto, space = config.planning.auto, space_of(base.cluster, config, max(1, len(base.whole)))
    found = plan(base, space, extrapolate=True)
    answer = predict(found.best.job, extrapolate=True)
    return Decided(
        choices=choices_in(found.best.job),
        why=why(found, auto, limited=config.wire.rate_limit is not None),
        answer=answer,
        candidates=candidates_of(found, answer, auto),
    )


def predict_windows(base: Job, config: TrainConfig) -> Decided:
    """Choose the number of fragments, if that is auto, and predict the job of ``base`` in windows of local steps.

    Raises:
        UserInputError: not even the exchange of a single parameter is hidden.
    """
    windows, asked = config.windows, bool(config.planning.auto)
    job = dataclasses.replace(
        base,
        width=config.pipeline.width,
        codec=config.compression.codec,
        all_reduce=config.wire.all_reduce_name,
        segment_bytes=config.wire.segment_bytes,
    )
    fragments = fewest_fragments(job, windows.local_steps) if asked else windows.fragments
    chosen = config.with_choices({"fragments": fragments})
    if chosen.in_windows:  # not one fragment in every iteration, unless --outer is given
        answer = predict_in_turns(job, windows.local_steps, fragments)
    else:
        answer = predict(job, extrapolate=True)
    why = f"chosen: --fragments {fragments}, the fewest of which each is exchanged while a window computes"
    return Decided(choices=choices_of(chosen), why=[why] if asked else [], answer=answer)


def fewest_fragments(job: Job, steps: int) -> int:
    """Return the fewest fragments of which each is exchanged while a window of ``steps`` iterations computes.

    Raises:
        UserInputError: not even the exchange of a single parameter is hidden.
    """
    found = hiding_fragments(job, steps)
    if found is not None:
        return found
    least = hiding_windows(job, len(job.compute.tensors))
    if least is None:
        raise UserInputError(
            f"fragments must be given where not even {max(steps, MOST_LOCAL_STEPS)} local steps hide the exchange of "
            "the largest parameter; got auto"
        )
    # Local steps refuse accumulation: as many micro-batches then have more updates, and take no less time.
    accumulation = job.compute.accumulation
    too, and_got = (", and accumulation 1,", f" and {accumulation}") if accumulation > 1 else ("", "")
    raise UserInputError(
        f"local-steps must be at least {least * accumulation}{too} with --fragments auto, to hide the exchange of the "
        f"largest parameter; got {steps}{and_got}"
    )


def choices_in(job: Job) -> Choices:
    """Return the values of all ``AUTO_OPTIONS`` in ``job``."""
    return {
        "width": job.width,
        "codec": job.codec,
        "all-reduce": job.all_reduce,
        "segment-bytes": job.segment_bytes,
        "buckets": job.buckets,
        "fragments": 1,
    }


def candidates_of(found: Plan, answer: Answer, auto: Sequence[str]) -> list[Job]:
    """Return the simplest and the fastest of each width that could be the fastest of all, or of each codec or
    all-reduce if the width is given, the simplest first; none if there are no two, or all were measured before.

    Errors of predictions are common to a width, so the best of each is worth more than the first few. The simplest is
    among them since a tie is a matter of predictions, in which all that is hidden takes the same time. The plan's own
    choice always is.
    """
    kind = next((name for name in ("width", "codec", "all-reduce") if name in auto), None)
    if kind is None:
        return []
    simplest: dict[Any, Choice] = {choices_in(found.best.job)[kind]: found.best}
    fastest: dict[Any, Choice] = {}
    for one in found.ranking:
        simplest.setdefault(choices_in(one.job)[kind], one)
    for one in sorted(found.ranking, key=lambda one: one.score):
        fastest.setdefault(choices_in(one.job)[kind], one)
    best = {id(one): one for one in (*simplest.values(), *fastest.values())}.values()
    could = [one for one in best if predict(one.job, extrapolate=True).low <= answer.high]
    could.sort(key=lambda one: (one is not found.best, one.score))
    candidates = sorted((one.job for one in could[:MOST_CANDIDATES]), key=simplicity)
    if len(candidates) == 1 or all(job.measured is not None for job in candidates):
        return []  # in the latter case an earlier audition has answered the question
    return candidates


def space_of(profile: Profile, config: TrainConfig, parameters: int) -> Space:
    """Return the space to search for a model with this number of parameters: everything measured that works with the
    options that are not auto."""
    auto, wire = config.planning.auto, config.wire
    codecs = [one for one in AUTO_CODECS if one == UNCOMPRESSED or one in profile.codecs]
    all_reduces = [one for one in profile.calibrated.all_reduces if one != "hierarchical" and goes_with(config, one)]
    buckets = [str(one) for one in AUTO_BUCKETS if one <= parameters]
    return Space(
        strategies=("pipelined",),
        widths=WIDTHS if "width" in auto else (config.pipeline.width,),
        codecs=tuple(codecs) if "codec" in auto else (config.compression.codec,),
        all_reduces=tuple(all_reduces) if "all-reduce" in auto else (wire.all_reduce_name,),
        segments=SEGMENTS if "segment-bytes" in auto else (wire.segment_bytes,),
        buckets=tuple(buckets) if "buckets" in auto else (str(wire.buckets),),
    )


def goes_with(config: TrainConfig, all_reduce: str) -> bool:
    """Return True if the all-reduce works with the options that are not auto."""
    try:
        config.with_choices({"all-reduce": all_reduce})
    except UserInputError:
        return False
    return True


def unmeasured(config: TrainConfig) -> list[str]:
    """Describe each property of a run that the timing model does not know."""
    found = []
    if config.wire.connections > 1:
        found.append(f"{config.wire.connections} connections; measured: 1")
    always = dataclasses.replace(config.compression, dense_start=None)  # after the start
    if always != CompressionConfig(codec=config.compression.codec):
        found.append(f"{config.compression.codec} with options of its own; measured: as it is by default")
    return found


def why(found: Plan, auto: Sequence[str], *, limited: bool) -> list[str]:
    """Explain the choice in words; ``limited`` if ranks limit their rate, which DDP does not."""
    if not auto:
        return []
    if limited:
        found = dataclasses.replace(found, ddp=None)
    if "codec" not in auto:
        found = dataclasses.replace(found, uncompressed=None)  # leaves out the advice on codecs
    chosen = f"chosen of {found.considered}: {training_arguments(found.best.job)}; {reason(found.best)}"
    return [chosen, " ".join(advice(found))]
