"""One calibration, from its first measurement to a profile: what ``pipesgd.calibrate`` and a training that plans do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from rich.console import Console
from torch import nn

from pipesgd.calibration import codec_speeds, interfaces, links, machines, profile, report
from pipesgd.calibration.codec_speeds import CodecSpeed
from pipesgd.calibration.computation import Computation, Workload, summarize
from pipesgd.calibration.groups import groups_to_measure, places_of
from pipesgd.calibration.machines import Machine
from pipesgd.calibration.profile import CollectiveFit, Profile
from pipesgd.calibration.progress import Phases
from pipesgd.calibration.sweep import ALL_REDUCES, Sweep
from pipesgd.collectives.transport import TorchTransport, communication_group
from pipesgd.config import TrainConfig
from pipesgd.launch import Ranks
from pipesgd.workloads import ShardedBatches

COMPUTATION, CODECS, LINKS, COLLECTIVES, CONTENTION = (
    "computation",
    "codecs",
    "links",
    "collectives",
    "computation beside a collective",
)
SHARES = {COMPUTATION: 0.17, CODECS: 0.07, LINKS: 0.03, COLLECTIVES: 0.63, CONTENTION: 0.1}
"""Of the time that there is; what comes before the collectives takes as long as it takes."""
HOW_TO_START = "torchrun --nproc-per-node 4 -m pipesgd.calibrate ..."


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found."""

    hosts: list[Machine]
    """Of every rank."""
    codecs: dict[str, CodecSpeed]
    computation: Computation
    fits: dict[str, CollectiveFit]
    """Of the all-reduces; on rank 0, where there are several ranks."""

    def profile(self, config: TrainConfig, model: nn.Module, *, samples: int, command: Sequence[str]) -> Profile:
        """For the timing model; of rank 0, where there are several ranks.

        Args:
            config: of the training that was measured.
            model: that is trained.
            samples: in the training set.
            command: words after torchrun's own, for people who read the file later.
        """
        return profile.make_profile(
            fits=self.fits,
            codecs=self.codecs,
            compute=profile.compute_profile(
                self.computation,
                model=config.model.model,
                batch_size=config.samples_per_rank,
                tensors=[one.numel() for one in model.parameters() if one.requires_grad],
                samples=samples,
            ),
            ranks_per_core=machines.ranks_per_core(self.hosts),
            provenance=machines.provenance(self.hosts, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", command),
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
    prediction: str,
) -> Measured:
    """Measure the ranks, their network and the model's training; rank 0 says what is done, and what is amiss.

    All ranks call this together. It trains ``model``. Where there are several ranks, it starts torch's process group,
    of which there must be none yet, and leaves it to the caller to end it.

    Args:
        config: of the training; its deadline is that of the measurements, too.
        model: on a CPU.
        batches: of this rank.
        ranks: that take part.
        console: of rank 0.
        seconds: how long to measure, about.
        largest_bytes: of a gradient that is all-reduced.
        codecs: to measure, by name.
        prediction: what stands for gradients in flight.

    Raises:
        CommunicationError: a rank was lost.
    """
    timeout = config.run.timeout
    several = ranks.world_size > 1
    where, cards, hosts = places_of(ranks), interfaces.interfaces_of(ranks), machines.machines_of(ranks)
    shared = machines.ranks_per_core(hosts)
    workload = Workload(config, model, batches, prediction)

    def say(line: str) -> None:
        if ranks.rank == 0:
            console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(describe(ranks, shared, [one.address for one in cards], seconds))
    shares = SHARES if several else {COMPUTATION: 0.5, CODECS: 0.3}
    planned = {name: share * seconds for name, share in shares.items()}
    with Phases(console, planned, show=ranks.rank == 0) as shown:
        # 1. Each rank for itself, but all at once, as in training.
        ranks.exchange("computation", None)
        alone = workload.alone(planned[COMPUTATION], partial(shown.advance, COMPUTATION))
        every_alone = ranks.exchange("times of the computation", alone)
        own_codecs = codec_speeds.measure(codecs, planned[CODECS], partial(shown.advance, CODECS))
        every_codecs = ranks.exchange("times of the codecs", own_codecs)
        every_contended = []
        if several:
            # 2. Together.
            ranks.start_process_group("cpu", timeout)
            transport = TorchTransport([communication_group(ranks, timeout, "gloo")], timeout)
            probes = links.probe(ranks, transport, partial(shown.advance, LINKS))
            slow = links.slow_links(probes, where)
            groups = groups_to_measure(where, [one.rank for one in slow if one.rank is not None])
            sweep = Sweep(ranks, transport, groups, timeout=timeout)
            cells = sweep.run(
                largest_bytes=largest_bytes // 4 * 4,
                seconds=planned[COLLECTIVES],
                advance=partial(shown.advance, COLLECTIVES),
            )
            # 3. Both.
            contended = workload.contended(ranks, sweep.ring, planned[CONTENTION], partial(shown.advance, CONTENTION))
            every_contended = ranks.exchange("times beside a collective", contended)

    # 4. What it means.
    computation = summarize(every_alone, every_contended, shared_cores=shared > 1)
    fits = {}
    if ranks.rank == 0 and several:
        sums = codec_speeds.sum_seconds(every_codecs, ranks.world_size)
        fits = {name: profile.fit_collective(name, cells, probes, sums) for name in ALL_REDUCES}
        for line in [*interfaces.wrong_interfaces(cards, where), *(one.line for one in slow)]:
            say(line)
    for line in report.warnings(computation, fits):
        say(line)
    return Measured(
        hosts=hosts,
        codecs={name: codec_speeds.summarize(name, [times[name] for times in every_codecs]) for name in codecs},
        computation=computation,
        fits=fits,
    )


def describe(ranks: Ranks, ranks_per_core: float, addresses: Sequence[str], seconds: float) -> str:
    """What is about to be measured, in a line or two."""
    if ranks.world_size == 1:
        text = "one rank: computation and codecs are measured, but no network"
        return text if ranks.by_torchrun else f"{text}; on four: {HOW_TO_START}"
    here = f"all at {addresses[0]}" if len(set(addresses)) == 1 else "at " + ", ".join(addresses)
    text = f"calibrating {ranks.world_size} ranks, {here}, for about {seconds:.0f} s"
    if ranks_per_core > 1:
        text += (
            f"\n{ranks_per_core:g} ranks share a core: what is measured holds for so many ranks on this machine alone"
        )
    return text
