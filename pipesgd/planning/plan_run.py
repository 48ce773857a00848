"""Planning on all ranks: they share or measure a cluster, and agree on what rank 0 decides from it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

from pipesgd.config import TrainConfig
from pipesgd.data import ShardedBatches
from pipesgd.errors import CheckpointError, UserInputError, warn
from pipesgd.pipeline.exchanges import Reduce
from pipesgd.ranks import Ranks
from pipesgd.run.console import say, say_sentences
from pipesgd.sections import AUTO

if TYPE_CHECKING:
    from pipesgd.planning.choose import Known
    from pipesgd.planning.planned import Planned
    from timing_model.cluster_profile import Profile

CALIBRATION_SECONDS = 4.0
"""Approximate seconds of a calibration before training: an audition corrects what it gets wrong."""
MOST_LARGEST_BYTES = 64 << 20
"""Upper bound of the largest gradient that such a calibration reduces, in bytes."""


def plan_run(
    config: TrainConfig,
    ranks: Ranks,
    model: nn.Module,
    batches: ShardedBatches,
    reduce: Reduce,
    console: Console,
    *,
    samples: int,
    iterations: int,
    earlier: dict[str, Any] | None,
) -> tuple[TrainConfig, Planned | None, Known | None]:
    """Return the configuration with nothing left to choose, the same on all ranks; the prediction, if there is one; and
    on rank 0 what is known of the cluster, if anything is.

    All ranks call this together. Rank 0 decides, and reports why. A run that continues another one keeps its choices.
    Otherwise, if no cluster is given, the ranks are measured first: a copy of ``model`` is trained for some seconds,
    and torch's process group, of which there must be none, is started and ended. The state of random numbers is kept.

    Args:
        config: options that were asked for.
        ranks: ranks that train.
        model: model that is trained, on a CPU.
        batches: batches of this rank.
        reduce: exchange of gradients.
        console: console of rank 0.
        samples: number of samples in the training set.
        iterations: number of iterations of the whole job.
        earlier: ``output.earlier_run``.

    Raises:
        UserInputError: the cluster cannot be read, or is another one.
        CommunicationError: a rank was lost while measuring.
    """
    path, asked = config.planning.cluster, config.planning.auto
    asks_for_a_start = config.updates.synchronous_start not in (AUTO, 0)
    late = {"guard": config.updates.guard, "synchronous-start": asks_for_a_start}
    if "width" in asked and (used := [f"--{name}" for name, value in late.items() if value]):
        say(console, f"{' and '.join(used)} count at widths above 1 alone, since at width 1 no gradient is late")
    given = share_cluster(path, ranks, console)
    if earlier is None and not (asked or given):
        return config, None, None
    from pipesgd.planning.planned import Planned, choices_of, words

    if earlier is not None:
        config, planned = ranks.raise_together("earlier choice", lambda: continued(config, earlier))
        if planned is not None:
            say(console, f"planned when the run began: {words(planned.choices)}", *planned.lines()[len(planned.why) :])
        if planned is not None or not given:
            return config, planned, None
    if ranks.world_size == 1:
        say(
            console,
            f"one rank has no network, so there is nothing to plan: {words(choices_of(config))}, the defaults",
        )
        return config.with_choices({}), None, None

    # Here and below, since a run that plans nothing does not load the timing model.
    from pipesgd.planning.choose import decide, of_file
    from pipesgd.planning.parts import parts_of_run

    tensors = [one.numel() for one in model.parameters() if one.requires_grad]
    if given:
        found = ranks.raise_together(
            "cluster", lambda: of_file(path, config, tensors) if ranks.rank == 0 and path else None
        )
        source = str(path)
    else:
        found = calibrate_briefly(config, ranks, model, batches, console, samples=samples)
        source = f"a calibration of {CALIBRATION_SECONDS:.0f} s"

    parts = parts_of_run(config, ranks, model, batches, reduce)

    def decide_on_rank_0() -> dict[str, Any] | None:
        if found is None:
            return None
        decided = decide(
            *found,
            config,
            parts=parts,
            world_size=ranks.world_size,
            iterations=iterations,
            source=source,
            own=not given,
        )
        return decided.as_json()

    agreed = ranks.all_gather_object("plan", ranks.raise_together("planning", decide_on_rank_0))[0]
    planned = Planned.from_json(agreed)
    say_sentences(console, *planned.lines())
    if planned.candidates:
        from pipesgd.planning.candidates import audition

        planned, found = audition(planned, found, config, ranks, model, batches, reduce, console)
    return config.with_choices_of(planned.choices), planned, found


def save_cluster(profile: Profile, path: Path) -> None:
    """Write what is known of the cluster, for ``remember``; warn if that is not possible."""
    try:
        profile.save(path)
    except ValueError as failure:
        warn(f"the cluster could not be written: {failure}; training continues")


def share_cluster(path: Path | None, ranks: Ranks, console: Console) -> bool:
    """Return True if rank 0 is given a cluster; report the ranks that have none, or another one. Collective."""
    digest = None
    if path is not None:
        with contextlib.suppress(OSError):  # rank 0 reports it when it reads the file
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
    everybody = ranks.all_gather_object("cluster", [path is not None, digest])
    given, own = everybody[0]
    if not given and any(other for other, _ in everybody):
        rank = next(rank for rank, (other, _) in enumerate(everybody) if other)
        text = f"cluster must be given to rank 0, whose file counts; got it on rank {rank} only"
        raise UserInputError.on_all_ranks(text)
    if given and own is not None:
        without = [str(rank) for rank, (_, other) in enumerate(everybody) if other is None]
        unlike = [str(rank) for rank, (_, other) in enumerate(everybody) if other not in (None, own)]
        parts = [f"none on rank {', '.join(without)}"] * bool(without)
        parts += [f"another one on rank {', '.join(unlike)}"] * bool(unlike)
        if parts:
            say(console, f"rank 0's {path} counts: there is {' and '.join(parts)}")
    return bool(given)


def calibrate_briefly(
    config: TrainConfig, ranks: Ranks, model: nn.Module, batches: ShardedBatches, console: Console, *, samples: int
) -> Known | None:
    """Measure the ranks; return the result on rank 0. All ranks call this together; there must be no process group."""
    from pipesgd.calibration.measure import measure
    from pipesgd.calibration.options import DEFAULT_ALL_REDUCES, LEAST_LARGEST_BYTES, MEASURED_ALL_REDUCES, RING
    from pipesgd.planning.choose import AUTO_CODECS, goes_with
    from timing_model.measured import LOW_RANK, UNCOMPRESSED

    codec = config.compression.codec
    searched = AUTO_CODECS if "codec" in config.planning.auto else (codec,)
    if "all-reduce" in config.planning.auto:
        measured = [name for name in DEFAULT_ALL_REDUCES if goes_with(config, name)]
    else:
        measured = [name for name in MEASURED_ALL_REDUCES if name in (RING, config.wire.all_reduce)]
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
            codecs=[one for one in searched if one not in (UNCOMPRESSED, LOW_RANK)],
            all_reduces=measured,
            servers=False,
            prediction=config.updates.prediction,
            brief=True,
        )
    ranks.leave()
    if found is None:
        return None
    profile = found.profile(config, model, samples=samples, command=["-m pipesgd.train"])
    return profile, profile.compute[0]


def continued(config: TrainConfig, earlier: dict[str, Any]) -> tuple[TrainConfig, Planned | None]:
    """Return the choices and the prediction of the run that is continued.

    Raises:
        CheckpointError: the folder of that run does not record them.
    """
    from pipesgd.planning.planned import Planned

    options, planned = earlier["options"], earlier["planned"]
    try:
        config = config.with_choices_of(options)
        if planned is None:
            return config, None
        found = Planned.from_json(planned)
        # Even if the resuming command spells them out: a chosen width of 1 goes with options about late gradients.
        chosen = dataclasses.replace(config.planning, chosen=tuple(found.asked))
        return dataclasses.replace(config, planning=chosen), found
    except (KeyError, TypeError, UserInputError) as failure:
        raise CheckpointError(f"the run to resume must record its choices; got {failure!r}") from None
