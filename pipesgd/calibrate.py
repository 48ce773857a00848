"""The command: ``torchrun [torchrun's options] -m pipesgd.calibrate --out cluster.toml [options]``.

Measures what a cluster, and a model on it, cost, and writes it down for the timing model. Reads from top to bottom as
it happens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from pipesgd import launch
from pipesgd.calibration import codec_speeds, computation, interfaces, links, machines, profile, report
from pipesgd.calibration.groups import groups_to_measure, places_of
from pipesgd.calibration.options import FREE_BETWEEN_RANKS, CalibrateConfig
from pipesgd.calibration.progress import Phases
from pipesgd.calibration.sweep import ALL_REDUCES, Sweep
from pipesgd.collectives.transport import TorchTransport, communication_group
from pipesgd.command_line import parse_as
from pipesgd.computation import load
from pipesgd.ending import run_and_exit
from pipesgd.errors import UserInputError
from pipesgd.launch import Ranks

COMPUTATION, CODECS, LINKS, COLLECTIVES, CONTENTION = (
    "computation",
    "codecs",
    "links",
    "collectives",
    "computation beside a collective",
)
SHARES = {COMPUTATION: 0.17, CODECS: 0.07, LINKS: 0.03, COLLECTIVES: 0.63, CONTENTION: 0.1}
"""Of the time that there is; what comes before the collectives takes as long as it takes."""


def calibrate(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """One calibration, on this rank.

    Raises:
        UserInputError: before anything is measured, or when the file cannot be written.
        RunError: a rank was lost.
    """
    # 1. What to measure: the same on all ranks.
    config = ranks.agree("options", lambda: parse_as(CalibrateConfig, "calibrate", words))
    launch.check_same_options(ranks, config.options(), free=FREE_BETWEEN_RANKS)
    options, training = config.calibration, config.training()
    ranks.timeout = options.timeout
    ranks.agree("files", lambda: check_files(config, ranks.rank))
    data, batches, model, _ = ranks.agree("data and model", lambda: load(training, ranks))
    where, cards, hosts = places_of(ranks), interfaces.interfaces_of(ranks), machines.machines_of(ranks)
    workload = computation.Workload(training, model, batches, options.prediction)
    several = ranks.world_size > 1

    def say(line: str) -> None:
        if ranks.rank == 0:
            console.print(line, highlight=False, soft_wrap=True, markup=False)

    say(describe(ranks, machines.ranks_per_core(hosts), [one.address for one in cards], options.seconds))
    phases = SHARES if several else {COMPUTATION: 0.5, CODECS: 0.3}
    seconds = {name: share * options.seconds for name, share in phases.items()}
    with Phases(console, seconds, show=ranks.rank == 0) as shown:
        # 2. Each rank for itself, but all at once, as in training.
        ranks.exchange("computation", None)
        alone = workload.alone(seconds[COMPUTATION], partial(shown.advance, COMPUTATION))
        every_alone = ranks.exchange("times of the computation", alone)
        own_codecs = codec_speeds.measure(options.codecs, seconds[CODECS], partial(shown.advance, CODECS))
        every_codecs = ranks.exchange("times of the codecs", own_codecs)
        speeds = {
            name: codec_speeds.summarize(name, [times[name] for times in every_codecs]) for name in options.codecs
        }
        if several:
            # 3. Together.
            ranks.start_process_group("cpu", options.timeout)
            transport = TorchTransport([communication_group(ranks, options.timeout, "gloo")], options.timeout)
            probes = links.probe(ranks, transport, partial(shown.advance, LINKS))
            slow = links.slow_links(probes, where)
            groups = groups_to_measure(where, [one.rank for one in slow if one.rank is not None])
            sweep = Sweep(ranks, transport, groups, timeout=options.timeout)
            cells = sweep.run(
                largest_bytes=options.largest_bytes // 4 * 4,
                seconds=seconds[COLLECTIVES],
                advance=partial(shown.advance, COLLECTIVES),
            )
            # 4. Both.
            contended = workload.contended(ranks, sweep.ring, seconds[CONTENTION], partial(shown.advance, CONTENTION))
            every_contended = ranks.exchange("times beside a collective", contended)
        else:
            every_contended = []

    # 5. What it means, said and written by rank 0.
    shared = machines.ranks_per_core(hosts) > 1
    found = computation.summarize(every_alone, every_contended, shared_cores=shared)
    fits = {}
    if ranks.rank == 0 and several:
        sums = codec_speeds.sum_seconds(every_codecs, ranks.world_size)
        fits = {name: profile.fit_collective(name, cells, probes, sums) for name in ALL_REDUCES}
        for line in [*interfaces.wrong_interfaces(cards, where), *(one.line for one in slow)]:
            say(line)
    if ranks.rank == 0:
        for line in report.warnings(found, fits):
            say(line)
        report.show(console, fits=fits, codecs=speeds, computation=found)

    def write() -> None:
        if ranks.rank > 0:
            return
        if not several:
            say(f"one rank has no network: nothing is written to {options.out}")
            return
        compute = profile.compute_profile(
            found,
            model=training.model.model,
            batch_size=training.data.batch_size * training.optimization.accumulation,
            tensors=[one.numel() for one in model.parameters() if one.requires_grad],
            samples=len(data.train),
        )
        made = profile.make_profile(
            fits=fits,
            codecs=speeds,
            compute=compute,
            ranks_per_core=machines.ranks_per_core(hosts),
            provenance=machines.provenance(hosts, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", words),
        )
        if options.plot is not None:
            report.save_plot(fits, options.plot)
            say(f"wrote {options.plot}")
        profile.save(made, options.out)
        say(f"wrote {options.out}")

    ranks.agree("the file", write)


def check_files(config: CalibrateConfig, rank: int) -> None:
    """Raise ``UserInputError`` unless rank 0 can write what it is to write at the end."""
    options = config.calibration
    if rank > 0:
        return
    for name, path in (("out", options.out), ("plot", options.plot)):
        if path is not None:
            check_file(name, path, overwrite=options.overwrite)
    report.check_plot(options.plot)


def check_file(name: str, path: Path, *, overwrite: bool) -> None:
    """Raise ``UserInputError`` unless ``path`` is a new file in a folder to write to, or one to be replaced."""
    if path.is_dir():
        raise UserInputError(f"{name} must be a file; got the folder {path}")
    if path.exists() and not overwrite:
        raise UserInputError(f"{name} must not be there yet; got {path} (--overwrite replaces it)")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)):
        raise UserInputError(f"{name} must be in a folder to write to; got {path}")


def describe(ranks: Ranks, ranks_per_core: float, addresses: Sequence[str], seconds: float) -> str:
    """What is about to be measured, in a line or two."""
    if ranks.world_size == 1:
        text = "one rank: computation and codecs are measured, but no network"
        return text if ranks.by_torchrun else f"{text}; on four: {HOW_TO_START}"
    here = f"all at {addresses[0]}" if len(set(addresses)) == 1 else "at " + ", ".join(addresses)
    text = f"{ranks.world_size} ranks, {here}, for about {seconds:.0f} s"
    if ranks_per_core > 1:
        text += (
            f"\n{ranks_per_core:g} ranks share a core: what is measured holds for so many ranks on this machine alone"
        )
    return text


HOW_TO_START = "torchrun --nproc-per-node 4 -m pipesgd.calibrate ..."

if __name__ == "__main__":
    run_and_exit(calibrate, sys.argv[1:])
