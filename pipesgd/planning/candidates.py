"""Auditions: the best predicted configurations train copies of the model in turns, and the fastest is chosen.

They take place before the training, or in ``pipesgd.calibrate --audition``: a run has one configuration from its first
iteration to its last.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from pipesgd.calibration.training import WAIT, Training, TrainingMode, least_iterations
from pipesgd.config import AUTO_OPTIONS, PlanningConfig, TrainConfig
from pipesgd.data import ShardedBatches
from pipesgd.pipeline.exchanges import Reduce
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.planning.choose import Known, decide, unmeasured
from pipesgd.planning.planned import MEASURED, Choices, Planned, shown, words
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from pipesgd.sections import PredictionKind
from pipesgd.strategies import make_pipeline, start_iterations
from timing_model.cluster_profile import Profile
from timing_model.measured import Estimate, MeasuredIteration
from timing_model.units import format_seconds

SECONDS, LAPS = 6.0, 4
"""Approximate seconds of an audition, and number of times that it is each candidate's turn."""
MOST_SHARE = 0.03
"""Most that an audition may take, as a share of the predicted time of the run."""
T90 = 1.645
"""Half the width of a 90 % interval, in standard errors."""
TIE, EARNED = 0.01, 1.0
"""Relative distance from the fastest, and standard errors of the difference, within which the simplest candidate is
chosen: staleness and coarser codecs cost accuracy, so a gain must be seen before they are accepted for it."""
LATE_TIE = 0.05
"""The same distance for a candidate without late gradients, from those with: that of a plan."""
ENDLESS = 1 << 40
"""Iterations of a run that is long enough for any audition."""


class Pace(NamedTuple):
    """Measured time of a candidate's iterations, in s."""

    mean: float
    median: float
    error: float
    """Standard error of the mean."""
    iterations: int
    """Number of iterations that were timed."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Return the pace of iterations, at least two, that took ``seconds``."""
        error = statistics.stdev(seconds) / math.sqrt(len(seconds))
        return cls(statistics.fmean(seconds), statistics.median(seconds), error, len(seconds))

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the mean."""
        return max(0.0, self.mean - T90 * self.error), self.mean + T90 * self.error


# ---- Which are compared, and which is chosen


def affordable(candidates: Sequence[Choices], predicted: Sequence[float], job_seconds: float) -> list[int]:
    """Return the numbers of the candidates that a run of ``job_seconds`` is long enough to compare, at least two.

    Those that are ``predicted`` to be slowest are left out first. Empty if not even two can be compared.
    """
    kept = sorted(range(len(candidates)), key=lambda number: predicted[number])
    while len(kept) > 1:
        modes = [(_mode(candidates[number]), predicted[number]) for number in kept]
        if sum(least_iterations([mode]) * seconds for mode, seconds in modes) <= MOST_SHARE * job_seconds:
            return sorted(kept)
        kept.pop()
    return []


def best_of(candidates: Sequence[Choices], paces: Sequence[Pace]) -> int:
    """Return the number of the simplest candidate among the fastest; the simplest come first."""
    judged = [_judged(choices, pace) for choices, pace in zip(candidates, paces, strict=True)]
    fastest = min(judged, key=lambda pace: pace.mean)
    return next(
        number
        for number, pace in enumerate(judged)
        if pace.mean <= fastest.mean * (1 + TIE)
        or pace.mean - fastest.mean <= EARNED * math.hypot(fastest.error, pace.error)
    )


def _judged(choices: Choices, pace: Pace) -> Pace:
    """Return the pace by which a candidate is compared: with late gradients, as much slower as these may not gain."""
    if choices["width"] == 1:
        return pace
    more = (1 + LATE_TIE) / (1 + TIE)
    return pace._replace(mean=more * pace.mean, error=more * pace.error)


def heard(planned: Planned, paces: Sequence[Pace], config: TrainConfig) -> Planned:
    """Return the plan after an audition of its candidates: with the winner, and what was measured of it."""
    best = best_of(planned.candidates, paces)
    low, high = paces[best].interval
    start = start_iterations(config.with_choices_of(planned.candidates[best]), planned.iterations)
    start_seconds = planned.start_seconds or planned.iteration_seconds  # else the plan was synchronous
    job_seconds = paces[best].mean * (planned.iterations - start) + start_seconds * start
    return dataclasses.replace(
        planned,
        choices=planned.candidates[best],
        source=f"an audition of {paces[best].iterations} iterations",
        iteration_seconds=paces[best].mean,
        low=low,
        high=high,
        median_share=paces[best].median / paces[best].mean,
        job_seconds=job_seconds + planned.dense_seconds,
        start=start,
        start_seconds=start_seconds if start else 0.0,
        support=MEASURED,
        reasons=[],
    )


# ---- Measuring


def audition(
    planned: Planned,
    known: Known | None,
    config: TrainConfig,
    ranks: Ranks,
    model: nn.Module,
    batches: ShardedBatches,
    reduce: Reduce,
    console: Console,
) -> tuple[Planned, Known | None]:
    """Return the plan with the fastest of its candidates, and on rank 0 what is ``known`` with their times.

    All ranks call this together, without a process group of torch's: it is started and ended. The state of random
    numbers is kept. A run too short for an audition keeps its plan.
    """
    kept = affordable(planned.candidates, planned.predicted, planned.job_seconds)
    if not kept:
        return planned, known
    candidates = [planned.candidates[number] for number in kept]

    def make(number: int, own: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> Pipelined:
        chosen = config.with_choices_of(candidates[number])
        settled = chosen.with_options(synchronous_start=0, dense_start=None, guard=False)
        return make_pipeline(settled, own, optimizer, scaler, ranks, reduce)

    modes, begin = list(map(_mode, candidates)), time.perf_counter()
    ranks.start_process_group("cpu", config.timeout)
    with (
        torch.random.fork_rng(devices=[]),
        Training(config, model, batches, config.updates.prediction, modes, ranks, make) as training,
    ):
        own_paces = _measured(training, min(SECONDS, MOST_SHARE * planned.job_seconds))
    ranks.leave()
    found, took = ranks.all_gather_object("audition", [own_paces, time.perf_counter() - begin])[0]
    paces = [Pace(*pace) for pace in found]
    planned = heard(dataclasses.replace(planned, candidates=candidates, audition_seconds=took), paces, config)
    chosen = words(shown(planned.choices, candidates))
    say(console, *_lines(candidates, paces), f"chosen by the audition: {chosen}")
    # The cluster is faster than a run with a limit, and a profile knows exchanges of whole gradients alone.
    if known is None or config.wire.rate_limit is not None or reduce != "matrix" or unmeasured(config):
        return planned, known
    measured = measured_iterations(candidates, paces, config, ranks.world_size)
    profile = known[0].with_measured(config.model.model, config.samples_per_rank, measured)
    return planned, (profile, profile.compute[0])


def measure_candidates(
    profile: Profile | None,
    config: TrainConfig,
    model: nn.Module,
    batches: ShardedBatches,
    ranks: Ranks,
    console: Console,
    *,
    prediction: PredictionKind,
) -> Profile | None:
    """Hold an audition of what a plan would compare, without buckets; return the profile with the times on rank 0.

    All ranks call this together, with torch's process group started; ``profile`` is rank 0's, None on the others.

    Args:
        profile: profile of the cluster, with one computation.
        config: configuration of the training.
        model: model on a CPU.
        batches: batches of this rank.
        ranks: ranks that take part.
        console: console of rank 0.
        prediction: how the weights are predicted from gradients in flight.

    Raises:
        UserInputError: the cluster allows no prediction.
        CommunicationError: a rank was lost.
    """

    def candidates_of_rank_0() -> list[Choices] | None:
        if profile is None:
            return None
        auto = tuple(name for name in AUTO_OPTIONS if name not in ("segment-bytes", "buckets", "fragments"))
        open_config = dataclasses.replace(config, planning=PlanningConfig(auto=auto))
        planned = decide(
            profile,
            profile.compute[0],
            open_config,
            world_size=ranks.world_size,
            iterations=ENDLESS,
            source="",
            own=True,
        )
        return list(planned.candidates) or [planned.choices]

    candidates: list[Choices] = ranks.all_gather_object(
        "audition", ranks.raise_together("planning", candidates_of_rank_0)
    )[0]
    with Training(config, model, batches, prediction, list(map(_mode, candidates)), ranks) as training:
        paces = _measured(training, SECONDS)
    if profile is None:
        return None
    say(console, *_lines(candidates, paces))
    measured = measured_iterations(candidates, paces, config, ranks.world_size)
    return profile.with_measured(config.model.model, config.samples_per_rank, measured)


def measured_iterations(
    candidates: Sequence[Choices], paces: Sequence[Pace], config: TrainConfig, world_size: int
) -> list[MeasuredIteration]:
    """Return what was measured of the candidates, as a profile keeps it."""
    return [
        MeasuredIteration(
            world_size=world_size,
            width=choices["width"],
            codec=choices["codec"],
            all_reduce=choices["all-reduce"],
            segment_bytes=choices["segment-bytes"],
            iteration=Estimate(pace.mean, *pace.interval),
            iterations=pace.iterations,
            loader_workers=config.data.workers,
            buckets=choices["buckets"],
        )
        for choices, pace in zip(candidates, paces, strict=True)
    ]


def _mode(choices: Choices) -> TrainingMode:
    return TrainingMode(choices["width"], choices["all-reduce"], choices["codec"])


def _measured(training: Training, seconds: float) -> list[Pace]:
    """Train in each way for about ``seconds`` together; return the pace of each on this rank. Collective."""
    for _ in range(LAPS):
        training.lap(seconds / LAPS)
    return [Pace.of([sum(times[: WAIT + 1]) for lap in laps for times in lap]) for laps in training.laps]


def _lines(candidates: Sequence[Choices], paces: Sequence[Pace]) -> list[str]:
    """Describe what was measured for the user."""
    names = [words(shown(one, candidates) if len(candidates) > 1 else one) for one in candidates]
    return [
        f"audition: {name} takes {format_seconds(pace.mean)} +- {format_seconds(pace.error)} an iteration"
        for name, pace in zip(names, paces, strict=True)
    ]
