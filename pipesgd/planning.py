"""What a run leaves to the timing model: it predicts an iteration's time, and chooses what is ``auto``.

The one place, beside what writes calibrations, where the trainer knows the timing model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from pipesgd.calibration.measure import measure
from pipesgd.calibration.options import DEFAULT_ALL_REDUCES, LEAST_LARGEST_BYTES, MEASURED_ALL_REDUCES, RING
from pipesgd.codecs.options import CodecOptions
from pipesgd.config import AUTO_OPTIONS, TrainConfig
from pipesgd.errors import CheckpointError, UserInputError
from pipesgd.launch import Ranks
from pipesgd.progress import say
from pipesgd.workloads import ShardedBatches
from timing_model.advice import advice, reason, words_for_training
from timing_model.choices import SEGMENTS, Space
from timing_model.plan import Plan, plan
from timing_model.predict import predict
from timing_model.profile import UNCOMPRESSED, ComputeProfile, Profile
from timing_model.question import EXTRAPOLATED, INTERPOLATED, OUTSIDE, Question, support_of
from timing_model.units import format_seconds

CALIBRATION_SECONDS = 12.0
MOST_LARGEST_BYTES = 64 << 20
"""Of the gradients that such a calibration reduces."""
AUTO_WIDTHS = (1, 2, 3)
AUTO_CODECS = (UNCOMPRESSED, "bf16", "int8", "int4")
"""What is chosen from: what was found to cost next to no accuracy. Others are to be asked for by name."""


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


def plan_run(
    config: TrainConfig,
    ranks: Ranks,
    model: nn.Module,
    batches: ShardedBatches,
    console: Console,
    *,
    samples: int,
    iterations: int,
    earlier: dict[str, Any] | None,
) -> tuple[TrainConfig, Planned | None]:
    """The configuration with nothing left to be chosen, the same on all ranks; and the prediction, if there is one.

    All ranks call this together. Rank 0 decides, and says why. A run that continues one has what that one had. Else,
    where no cluster is given, the ranks are measured first: a copy of ``model`` is trained for some seconds, and
    torch's process group started and ended, of which there must be none. The state of random numbers is kept.

    Args:
        config: what was asked for.
        ranks: that train.
        model: that is trained, on a CPU.
        batches: of this rank.
        console: of rank 0.
        samples: in the training set.
        iterations: of the whole job.
        earlier: ``output.earlier_run``.

    Raises:
        UserInputError: the cluster cannot be read, or is another one.
        CommunicationError: a rank was lost while measuring.
    """

    path, asked = config.planning.cluster, config.planning.auto
    given = share_cluster(path, ranks, console)
    if earlier is not None:
        config, planned = ranks.agree("earlier choice", lambda: continued(config, earlier))
        if planned is not None:
            say(console, f"planned when the run began: {words(planned.choices)}", *planned.lines()[len(planned.why) :])
        if planned is not None or not given:
            return config, planned
    elif not (asked or given):
        return config, None
    if ranks.world_size == 1:
        say(
            console,
            f"one rank has no network, so that there is nothing to plan: {words(choices_of(config))}, the defaults",
        )
        return config.with_choices({}), None

    tensors = [one.numel() for one in model.parameters() if one.requires_grad]
    if given:
        found = ranks.agree("cluster", lambda: of_file(path, config, tensors) if ranks.rank == 0 and path else None)
        source = str(path)
    else:
        profile = calibrate_briefly(config, ranks, model, batches, console, samples=samples)
        found = None if profile is None else (profile, profile.compute[0])
        source = f"a calibration of {CALIBRATION_SECONDS:.0f} s"

    return agree_on_plan(config, ranks, found, console, iterations=iterations, source=source, own=not given)


def agree_on_plan(
    config: TrainConfig,
    ranks: Ranks,
    found: tuple[Profile, ComputeProfile] | None,
    console: Console,
    *,
    iterations: int,
    source: str,
    own: bool,
) -> tuple[TrainConfig, Planned]:
    """What rank 0 decides by what it has ``found``, with nothing left to be chosen, and said by it. Collective."""

    def decide_on_rank_0() -> dict[str, Any] | None:
        if found is None:
            return None
        decided = decide(*found, config, world_size=ranks.world_size, iterations=iterations, source=source, own=own)
        return decided.as_json()

    agreed = ranks.exchange("plan", ranks.agree("planning", decide_on_rank_0))[0]
    planned = Planned(**agreed)
    say(console, *planned.lines())
    return config.with_choices({name: planned.choices[name] for name in config.planning.auto}), planned


def share_cluster(path: Path | None, ranks: Ranks, console: Console) -> bool:
    """Whether a cluster is given, which rank 0 decides; says where others have none, or another one. Collective."""
    digest = None
    if path is not None:
        with contextlib.suppress(OSError):  # rank 0 says so when it reads it
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
    everybody = ranks.exchange("cluster", [path is not None, digest])
    given, own = everybody[0]
    if not given and any(other for other, _ in everybody):
        rank = next(rank for rank, (other, _) in enumerate(everybody) if other)
        failure = UserInputError(f"cluster must be given to rank 0, whose file counts; got it on rank {rank} only")
        failure.known_to_all = True
        raise failure
    if given and own is not None:
        without = [str(rank) for rank, (_, other) in enumerate(everybody) if other is None]
        unlike = [str(rank) for rank, (_, other) in enumerate(everybody) if other not in (None, own)]
        parts = [f"none on rank {', '.join(without)}"] * bool(without)
        parts += [f"another one on rank {', '.join(unlike)}"] * bool(unlike)
        if parts:
            say(console, f"rank 0's {path} counts: there is {' and '.join(parts)}")
    return bool(given)


def of_file(path: Path, config: TrainConfig, tensors: Sequence[int]) -> tuple[Profile, ComputeProfile]:
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


def calibrate_briefly(
    config: TrainConfig, ranks: Ranks, model: nn.Module, batches: ShardedBatches, console: Console, *, samples: int
) -> Profile | None:
    """What the ranks are found to cost, on rank 0. All ranks call this together; there must be no process group."""
    codec = config.compression.codec
    searched = AUTO_CODECS if "codec" in config.planning.auto else (codec,)
    measured = [name for name in MEASURED_ALL_REDUCES if name in (RING, config.pipeline.all_reduce)]
    nbytes = sum(4 * one.numel() for one in model.parameters() if one.requires_grad)
    with torch.random.fork_rng(devices=[]):
        found = measure(
            config,
            model,
            batches,
            ranks,
            console,
            seconds=CALIBRATION_SECONDS,
            largest_bytes=max(LEAST_LARGEST_BYTES, min(nbytes, MOST_LARGEST_BYTES)),
            codecs=[one for one in searched if one != UNCOMPRESSED],
            all_reduces=DEFAULT_ALL_REDUCES if "all-reduce" in config.planning.auto else measured,
            servers=False,
            prediction=config.pipeline.prediction,
        )
    ranks.leave()
    return None if found is None else found.profile(config, model, samples=samples, command=["-m pipesgd.train"])


def continued(config: TrainConfig, earlier: dict[str, Any]) -> tuple[TrainConfig, Planned | None]:
    """What the run that is continued had: its choices, and its prediction.

    Raises:
        CheckpointError: its folder does not tell.
    """
    options, planned = earlier["options"], earlier["planned"]
    try:
        config = config.with_choices({name: options[name] for name in config.planning.auto})
        return config, None if planned is None else Planned(**planned)
    except (KeyError, TypeError, UserInputError) as failure:
        raise CheckpointError(f"the run to resume must tell its choices; got {failure!r}") from None


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
