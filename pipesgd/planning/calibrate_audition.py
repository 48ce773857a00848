"""Audition outside of a run: ``pipesgd.calibrate --audition`` measures the configurations that a plan would compare."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from torch import nn

from pipesgd.calibration.training import WAIT, Training, TrainingMode
from pipesgd.config import AUTO_OPTIONS, PlanningConfig, TrainConfig
from pipesgd.data import ShardedBatches
from pipesgd.planning.audition import Pace
from pipesgd.planning.choose import decide
from pipesgd.planning.plan_run import measured_iterations
from pipesgd.planning.planned import shown, words
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from timing_model.cluster_profile import Profile
from timing_model.units import format_seconds

SECONDS, LAPS = 6.0, 4
"""Approximate seconds of training, and number of times that it is each candidate's turn."""
ENDLESS = 1 << 40
"""Iterations of a run that is long enough for any audition."""


def measure_candidates(
    profile: Profile | None,
    config: TrainConfig,
    model: nn.Module,
    batches: ShardedBatches,
    ranks: Ranks,
    console: Console,
    *,
    prediction: str,
) -> Profile | None:
    """Train copies of ``model`` in turns, as a plan would compare them; return the profile with the times on rank 0.

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

    def candidates_of_rank_0() -> list[dict[str, Any]] | None:
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
        return [planned.choices] if planned.audition is None else list(planned.audition.candidates)

    candidates: list[dict[str, Any]] = ranks.all_gather_object(
        "audition", ranks.raise_together("planning", candidates_of_rank_0)
    )[0]
    modes = [TrainingMode(one["width"], one["all-reduce"], one["codec"]) for one in candidates]
    with Training(config, model, batches, prediction, modes, ranks) as training:
        for _ in range(LAPS):
            training.lap(SECONDS / LAPS)
    if profile is None:
        return None
    paces = [Pace.of([sum(times[: WAIT + 1]) for lap in laps for times in lap]) for laps in training.laps]
    for choices, pace in zip(candidates, paces, strict=True):
        named = words(shown(choices, candidates) if len(candidates) > 1 else choices)
        say(
            console, f"audition: {named} takes {format_seconds(pace.mean)} +- {format_seconds(pace.error)} an iteration"
        )
    measured = measured_iterations(candidates, paces, config, ranks.world_size)
    return profile.with_measured(config.model.model, config.samples_per_rank, measured)
