"""Transports in training: iterations over tcp and tls next to gloo, at 200 Mbit/s on emulated accelerators.

    python -m experiments.bench_transport_training             needs root: bench_transport_training.csv

The pipelines (width 2, int8 or int4, one for each transport) take turns in the same processes, see
pipelines_in_turns.py; at the end all must have the same weights, bit for bit. Exit code 1 if the whole interval of the
ratio to gloo is above the target: 1.00 of tcp, 1.03 of tls.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

import pipesgd
from experiments import command
from experiments.paired import median, paired_ratio, ratio_columns
from experiments.pipelines_in_turns import FULL, QUICK, Effort, Samples, of_slowest, pipeline, times_of
from experiments.results import Row, save
from experiments.testbed import Link
from pipesgd import keys
from pipesgd.errors import RunError
from pipesgd.membership.secret import VARIABLE
from pipesgd.ranks import Ranks, join
from pipesgd.sections import DEFAULT_TIMEOUT, TRANSPORTS

NODES = 4
LINK = Link(rate=200e6)
ACCELERATOR = {"int8": "100ms", "int4": "50ms"}
"""Emulated accelerator of each rank, whose time is about that of the communication."""
MOST_TIME = {"tcp": 1.00, "tls": 1.03}
"""Targets (at most) for an iteration's time next to gloo, which the interval must reach."""


def train(codec: str, effort: Effort, secret: str, file: Path) -> None:
    """Train on this rank over each transport in turns; rank 0 writes the times of rounds to ``file``.

    Raises:
        RunError: the weights differ.
    """
    torch.set_num_threads(1)
    os.environ[VARIABLE] = secret
    ranks, samples = join(), Samples()
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    with ExitStack() as stack:
        trained = {
            name: stack.enter_context(pipeline(ACCELERATOR[codec], ranks, codec=codec, transport=name))
            for name in TRANSPORTS
        }
        contenders = {name: partial(samples.seconds, one, range(effort.iterations)) for name, one in trained.items()}
        times = of_slowest(ranks, contenders, effort.rounds)
        check_same_weights(trained)
    if ranks.rank == 0:
        file.write_text(json.dumps(times), encoding="utf-8")


def check_same_weights(trained: dict[str, pipesgd.Pipelined]) -> None:
    """Raise ``RunError`` unless all pipelines have the weights of the first one, bit for bit."""
    first, *others = trained
    expected = list(trained[first].module.parameters())
    for name in others:
        if not all(map(torch.equal, trained[name].module.parameters(), expected)):
            raise RunError(f"weights over {name} must be those over {first}; they differ")


def measure(codec: str, effort: Effort, secret: Path) -> list[Row]:
    """Return a row for each transport.

    Raises:
        RunError: the job failed.
    """
    words = [codec, str(effort.rounds), str(effort.iterations), str(secret)]
    times = times_of("experiments.bench_transport_training", words, NODES, LINK)
    return [
        {
            "codec": codec,
            "transport": name,
            "rounds": effort.rounds,
            "iterations_of_a_round": effort.iterations,
            "median_s": round(median(own) / effort.iterations, 5),
            **ratio_columns("to_gloo", None if name == "gloo" else paired_ratio(own, times["gloo"])),
        }
        for name, own in times.items()
    ]


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("bench_transport_training", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    rows: list[Row] = []
    with command.progress(console, "codecs", len(ACCELERATOR)) as advance, tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "job.key")
        keys.make(secret, certificate=True)
        for codec in ACCELERATOR:
            rows += measure(codec, QUICK if arguments.quick else FULL, secret)
            advance(1, codec)
    extra = {"accelerators": ACCELERATOR, "nodes": NODES, "rate": LINK.rate, "target": MOST_TIME}
    save("bench_transport_training", rows, extra=extra, folder=arguments.output)
    command.show("transports in training", [{name: str(value) for name, value in row.items()} for row in rows])
    slow = [
        f"{row['transport']} with {row['codec']}"
        for row in rows
        if row["transport"] != "gloo" and row["to_gloo_low"] > MOST_TIME[row["transport"]]
    ]
    if slow and not arguments.quick:
        raise RunError(f"tcp and tls must take at most {MOST_TIME} of gloo's time; got more of {', '.join(slow)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        train(sys.argv[2], Effort(int(sys.argv[3]), int(sys.argv[4])), sys.argv[5], Path(sys.argv[6]))
    else:
        command.run(main)
