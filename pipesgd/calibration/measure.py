"""One calibration, from its first measurement to a profile, for ``pipesgd.calibrate`` and for a training that plans."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
from rich.console import Console
from torch import nn

from pipesgd.calibration import codec_speeds, fit_cluster, interfaces, links, low_rank, machines, report
from pipesgd.calibration import servers as server_rounds
from pipesgd.calibration.codec_speeds import TOPK, CodecSpeed
from pipesgd.calibration.computation import Computation, summarize
from pipesgd.calibration.fit_cluster import CollectiveFit
from pipesgd.calibration.groups import groups_to_measure, places_of
from pipesgd.calibration.machines import Machine
from pipesgd.calibration.options import RING, UNCOMPRESSED
from pipesgd.calibration.progress import Phases
from pipesgd.calibration.sweep import Cell, Sweep
from pipesgd.calibration.training import (
    LEAST_LAPS,
    SYNCHRONOUS,
    Training,
    TrainingMode,
    brief_training_modes,
    least_iterations,
    training_modes,
)
from pipesgd.comm.transport import TorchTransport, communication_group
from pipesgd.config import TrainConfig
from pipesgd.data import ShardedBatches
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from pipesgd.sections import PredictionKind
from timing_model.all_reduce import messages_meet
from timing_model.cluster_profile import Profile
from timing_model.measured import PARAMETER_SERVER, LowRankProfile
from timing_model.params import FLOAT_BYTES

CODECS, SERVERS, LINKS, TRAINING = (
    "codecs (compiled first on a new machine)",
    "parameter servers",
    "links",
    "training and collectives",
)
SHARES = {CODECS: 0.07, SERVERS: 0.15, LINKS: 0.03}
"""Shares of the available time. The last phase gets what is left; the one before it takes as long as it takes."""
RELEASED_DIGITS = 4
"""Decimal places of a share of the backward pass in a profile."""
TRAINED = 1.0
"""Seconds of training per second of all-reduces."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results of a calibration."""

    hosts: list[Machine]
    """Machine of every rank."""
    codecs: dict[str, CodecSpeed]
    low_rank: LowRankProfile | None
    """Factors of the model's gradient; None if it has none."""
    computation: Computation
    fits: dict[str, CollectiveFit]
    """Fits of the all-reduces, and of the parameter server."""
    released: list[float]
    """Share of the backward pass after which each parameter has its gradient, in the order of the parameters."""
    product: float
    """Mean of ``machines.product_seconds`` over the laps."""
    stolen: float
    """Mean of ``machines.StolenTime``'s share over the laps that count; disturbed laps do not, if there are enough
    others."""
    seconds: float
    """Time that the calibration took, in s."""

    def profile(self, config: TrainConfig, model: nn.Module, *, samples: int, command: Sequence[str]) -> Profile:
        """Make the profile for the timing model.

        Args:
            config: configuration of the training that was measured.
            model: model that is trained.
            samples: number of samples in the training set.
            command: arguments after torchrun's own, for people who read the file later.
        """
        return fit_cluster.make_profile(
            fits=self.fits,
            codecs=self.codecs,
            compute=fit_cluster.compute_profile(
                self.computation,
                model=config.model.model,
                batch_size=config.samples_per_rank,
                accumulation=config.optimization.accumulation,
                tensors=[one.numel() for one in model.parameters() if one.requires_grad],
                released=self.released,
                samples=samples,
                low_rank=self.low_rank,
            ),
            ranks_per_core=machines.ranks_per_core(self.hosts),
            provenance=machines.provenance(
                self.hosts, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", command, self.product, self.stolen, self.seconds
            ),
        )


def measure(
    config: TrainConfig,
    model: nn.Module,
    batches: ShardedBatches,
    ranks: Ranks,
    console: Console,
    *,
    seconds: float,
    largest_bytes: int,
    codecs: Sequence[str],
    all_reduces: Sequence[str],
    servers: bool,
    prediction: PredictionKind,
    brief: bool = False,
) -> Measured | None:
    """Measure the ranks, their network and the model's training; rank 0 reports what is done, and what is wrong.

    All ranks call this together; only rank 0 gets the results. The function starts torch's process group, of which
    there must be none yet, and leaves it to the caller to end it.

    Args:
        config: configuration of the training; its timeout is that of the measurements, too.
        model: model on a CPU; copies of it are trained.
        batches: batches of this rank.
        ranks: ranks that take part, at least 2.
        console: console of rank 0.
        seconds: approximate time for the measurements.
        largest_bytes: size of the largest gradient that is all-reduced.
        codecs: names of the codecs to measure.
        all_reduces: names of the all-reduces to measure, the ring among them.
        servers: True to measure a parameter server.
        prediction: how the weights are predicted from gradients in flight.
        brief: True to measure all ranks together only, and one link of each, or two: enough for a plan for these ranks.

    Raises:
        CommunicationError: a rank was lost.
    """
    begin, timeout = time.perf_counter(), config.timeout
    where, nics, hosts = places_of(ranks), interfaces.interfaces_of(ranks), machines.machines_of(ranks)
    shared = machines.ranks_per_core(hosts)

    say(console, describe(ranks, shared, [one.address for one in nics], seconds))
    asked = {CODECS, LINKS} | ({SERVERS} if servers else set())
    planned = {name: share * seconds for name, share in SHARES.items() if name in asked}
    planned[TRAINING] = seconds - sum(planned.values())
    products: list[float] = []
    stolen: list[float] = []
    cells: list[Cell] = []
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(Phases(console, planned))
        # 1. Each rank on its own, but all at once, as in training.
        ranks.all_gather_object("codecs", None)
        own_codecs = codec_speeds.measure(codecs, planned[CODECS], partial(shown.advance, CODECS))
        every_codecs = ranks.all_gather_object("times of the codecs", own_codecs)
        trained_parameters = [one for one in model.parameters() if one.requires_grad]
        factors, own_products = low_rank.measure(trained_parameters, ranks.world_size)
        every_products = ranks.all_gather_object("times of factors of low rank", own_products)
        # 2. All ranks together. Servers have their own process groups, whose threads must be gone later.
        if SERVERS in planned:
            cells += server_rounds.measure(
                ranks,
                where,
                largest_bytes=largest_bytes // 4 * 4,
                seconds=planned[SERVERS],
                timeout=timeout,
                advance=partial(shown.advance, SERVERS),
            )
        ranks.start_process_group("cpu", timeout)
        names = [RING, *(name for name in all_reduces if name != RING)]
        transport = TorchTransport([communication_group(ranks, timeout, "gloo")], timeout)
        probes = links.probe(ranks, transport, partial(shown.advance, LINKS), brief=brief)
        slow = links.slow_links(probes, where)
        groups = groups_to_measure(where, [one.rank for one in slow if one.rank is not None])
        groups = groups[-1:] if brief else groups
        sweep = Sweep(ranks, transport, groups, names, uneven=messages_meet, timeout=timeout)
        end = time.perf_counter() + planned[TRAINING]
        sizes = sweep.choose_sizes(largest_bytes // 4 * 4, planned[TRAINING] / (1 + TRAINED))
        values = sum(one.numel() for one in model.parameters() if one.requires_grad)
        bits = {name: codec_speeds.bits_of(name) for name in (UNCOMPRESSED, *codecs) if name != TOPK}
        t_comm = sizes.largest_seconds * FLOAT_BYTES * values / largest_bytes
        trial = [TrainingMode(SYNCHRONOUS, RING, min(bits, key=bits.__getitem__))]
        with Training(config, model, batches, prediction, trial, ranks) as trained_on_trial:
            passes = trained_on_trial.pace()
        modes = training_modes(names, codecs)
        if least_iterations(modes) * max(passes, t_comm) > planned[TRAINING]:
            modes = brief_training_modes(RING, bits, t_comm, passes)
        training = stack.enter_context(Training(config, model, batches, prediction, modes, ranks))
        trained: list[int] = []

        def between(lap: float) -> None:
            products.append(machines.product_seconds(ranks))
            if training.lap(TRAINED * lap):
                trained.append(len(products) - 1)

        stolen_time = machines.StolenTime()

        def quiet() -> bool:
            stolen.append(stolen_time.share(ranks))
            return stolen[-1] <= machines.DISTURBED

        swept, laps = sweep.run(
            sizes=sizes,
            seconds=end - time.perf_counter(),
            between=between,
            quiet=quiet,
            advance=partial(shown.advance, TRAINING),
        )
        cells += swept
    every_lap = ranks.all_gather_object(
        "times of training", [[of_way[lap] for lap in counted_laps(trained, laps)] for of_way in training.laps]
    )
    every_released = ranks.all_gather_object("when gradients are complete", training.released())
    if ranks.rank != 0:
        return None

    # 3. Interpret the measurements.
    sums = codec_speeds.sum_seconds(every_codecs, ranks.world_size)
    fits = {name: fit_cluster.fit_collective(name, cells, probes, sums) for name in names}
    measured_codecs = {name: codec_speeds.summarize(name, [times[name] for times in every_codecs]) for name in codecs}

    def seconds_of(way: TrainingMode) -> float:
        codec = fit_cluster.codec_profile(measured_codecs[way.codec]) if way.codec in measured_codecs else None
        return fits[way.all_reduce].seconds(values, ranks.world_size, codec)

    computation = summarize(
        every_lap,
        modes=modes,
        t_comms=[seconds_of(way) for way in modes],
        late_iteration=fit_cluster.LateIteration,
        ranks_per_core=shared,
    )
    if SERVERS in planned:
        fits[PARAMETER_SERVER] = fit_cluster.fit_servers(cells, fits[RING])
    lost = float(np.mean([stolen[lap] for lap in laps]))
    warnings = report.warnings(computation, fits, lost)
    say(console, *interfaces.wrong_interfaces(nics, where), *(one.line for one in slow), *warnings)
    return Measured(
        hosts=hosts,
        codecs=measured_codecs,
        low_rank=low_rank.summarize(factors, every_products),
        computation=computation,
        fits=fits,
        released=[round(float(share), RELEASED_DIGITS) for share in np.median(every_released, axis=0)],
        product=float(np.mean([products[lap] for lap in laps])),
        stolen=lost,
        seconds=time.perf_counter() - begin,
    )


def counted_laps(trained: Sequence[int], counted: Sequence[int]) -> list[int]:
    """Return which laps of training count: those in laps of the sweep that count, if these are enough, else all.

    ``trained`` are the numbers of the sweep's laps that were followed by training.

    >>> counted_laps([0, 1, 4], counted=[1, 2, 3, 4]), counted_laps([0, 1, 4], counted=[0, 2, 3])
    ([1, 2], [0, 1, 2])
    """
    found = [number for number, lap in enumerate(trained) if lap in counted]
    return found if len(found) >= LEAST_LAPS else list(range(len(trained)))


def describe(ranks: Ranks, ranks_per_core: float, addresses: Sequence[str], seconds: float) -> str:
    """Describe what is about to be measured, in a line or two."""
    here = f"all at {addresses[0]}" if len(set(addresses)) == 1 else "at " + ", ".join(addresses)
    text = f"calibrating {ranks.world_size} ranks, {here}, for about {seconds:.0f} s"
    if ranks_per_core > 1:
        text += f"\n{ranks_per_core:g} ranks share a core: the results hold for this many ranks on this machine only"
    return text
