"""The command ``torchrun [torchrun's options] -m pipesgd.calibrate --out cluster.toml [options]``.

It measures the costs of a cluster, and of a model on it, and writes them to a file for the timing model. The code reads
from top to bottom as a calibration happens.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch is imported, which takes seconds
    import sys

    from pipesgd import process

    process.begin()  # before tyro is imported, too

    from pipesgd.calibration.options import CalibrateConfig
    from pipesgd.cli import answer_questions, parse_as

    answer_questions(lambda argv: parse_as(CalibrateConfig, "calibrate", argv), sys.argv[1:])

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipesgd.calibration import fit_cluster, report
from pipesgd.calibration.measure import measure
from pipesgd.calibration.options import FREE_BETWEEN_RANKS, CalibrateConfig
from pipesgd.cli import parse_as
from pipesgd.errors import UserInputError
from pipesgd.exit import run_and_exit
from pipesgd.planning.candidates import measure_candidates
from pipesgd.ranks import Ranks, check_same_options
from pipesgd.run.console import say
from pipesgd.run.workload import agree_on_workload, load

HOW_TO_START = "torchrun --nproc-per-node 4 -m pipesgd.calibrate ..."


def calibrate(argv: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run one calibration on this rank.

    Raises:
        UserInputError: before anything is measured, or when the file cannot be written.
        RunError: a rank was lost.
    """

    # 1. Agree on what to measure.
    def own() -> CalibrateConfig:
        config = parse_as(CalibrateConfig, "calibrate", argv)
        ranks.timeout = config.calibration.timeout  # the first exchange already waits for this long
        return config

    config = ranks.raise_together("options", own)
    check_same_options(ranks, config.options(), free=FREE_BETWEEN_RANKS)
    options, training = config.calibration, config.training()
    ranks.raise_together("files", lambda: check_files(config, ranks.rank))
    ranks.raise_together("ranks", lambda: check_ranks(ranks.world_size))
    ranks.addresses()  # before anything is loaded
    data, batches, model, _ = ranks.raise_together("data and model", lambda: load(training, ranks))
    samples = agree_on_workload(training, data, batches, model, ranks)

    # 2. Measure.
    found = measure(
        training,
        model,
        batches,
        ranks,
        console,
        seconds=options.seconds,
        largest_bytes=options.largest_bytes,
        codecs=options.codecs,
        all_reduces=options.all_reduces,
        servers=options.servers,
        prediction=options.prediction,
    )

    made = None
    if found is not None:
        made = found.profile(training, model, samples=samples, command=["-m pipesgd.calibrate", *argv])
        report.show(console, fits=found.fits, codecs=found.codecs, computation=found.computation)
    if options.audition:
        made = measure_candidates(made, training, model, batches, ranks, console, prediction=options.prediction)

    # 3. Write the result, on rank 0.
    def write() -> None:
        if found is None or made is None:
            return
        fit_cluster.save(made, options.out)  # before the picture, so that no failure of that loses it
        say(console, f"wrote {options.out}")
        if options.plot is not None:
            report.save_plot(found.fits, options.plot)
            say(console, f"wrote {options.plot}")
        plan = ["--cluster", str(options.out), "--model", training.model.model, "--world-size", str(ranks.world_size)]
        say(console, f"next: timing-model plan {shlex.join(plan)}")

    ranks.raise_together("the file", write)


def check_ranks(world_size: int) -> None:
    """Raise ``UserInputError`` for a single rank: without a network, the timing model would learn nothing."""
    if world_size == 1:
        raise UserInputError(f"ranks must be at least 2, or there is no network to measure; got 1 (try {HOW_TO_START})")


def check_files(config: CalibrateConfig, rank: int) -> None:
    """Raise ``UserInputError`` unless rank 0 can write the files that it will write at the end."""
    options = config.calibration
    if rank > 0:
        return
    for name, path in (("out", options.out), ("plot", options.plot)):
        if path is not None:
            check_file(name, path, overwrite=options.overwrite)
    report.check_plot(options.plot)


def check_file(name: str, path: Path, *, overwrite: bool) -> None:
    """Raise ``UserInputError`` unless ``path`` is a new file in a writable folder, or a file to be replaced."""
    if path.is_dir():
        raise UserInputError(f"{name} must be a file; got the folder {path}")
    if path.exists() and not overwrite:
        raise UserInputError(f"{name} must not exist yet; got {path} (--overwrite replaces it)")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)):
        raise UserInputError(f"{name} must be in a folder to write to; got {path}")


if __name__ == "__main__":
    run_and_exit(calibrate, sys.argv[1:])
