"""The cost of surviving losses while none happens: iterations of elastic ranks next to those of a job that needs all.

    python -m experiments.elastic_cost             on loopback, and at 200 Mbit/s (needs root): elastic_cost.csv

Both pipelines (width 2, int8, over tcp) train an MLP of 1.8 million parameters in the same processes, on an emulated
accelerator for each rank, and take turns in rounds of some iterations and a flush. A round's time is that of the
slowest rank; times of one round are compared. Exit code 1 if the median ratio is above 1.01, or its interval ends above
1.03.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

import pipesgd
from experiments import accelerators, command
from experiments.paired import interleave_here, median, paired_ratio, ratio_columns
from experiments.results import REPOSITORY, Row, save
from experiments.testbed import Link, Testbed
from experiments.testbed_jobs import last_words, run_job
from pipesgd import elastic
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks, join

RANKS = 3
LINKS = {"loopback": None, "200mbit": Link(rate=200e6)}
ACCELERATOR = {"loopback": "40ms", "200mbit": "75ms"}
"""Emulated accelerator of each rank, whose time is about that of the communication."""
ROUNDS, ITERATIONS = 60, 10
QUICK_ROUNDS, QUICK_ITERATIONS = 3, 3
WARM_UP = 2
MOST_MEDIAN, MOST_HIGH = 1.01, 1.03
JOB_SECONDS = 900.0
BATCH = 32


def train(accelerator: str, rounds: int, iterations: int, file: Path) -> None:
    """Train on this rank by both pipelines in turns; rank 0 writes the times of rounds to ``file``."""
    torch.set_num_threads(1)
    everybody = join()
    inputs, targets = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))

    def pipeline(ranks: Ranks) -> pipesgd.Pipelined:
        torch.manual_seed(0)
        model = accelerators.synthetic(
            accelerator,
            sample_shape=(1, 28, 28),
            num_classes=10,
            hidden_sizes=(1000, 1000),
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        wire = pipesgd.Wire(transport="tcp")
        return pipesgd.Pipelined(model, optimizer, width=2, codec="int8", wire=wire, ranks=ranks)

    def seconds_of(trained: pipesgd.Pipelined, begin: Iterator[Any]) -> float:
        start = time.perf_counter()
        for _ in range(iterations):
            next(begin)
            cross_entropy(trained.module(inputs), targets).backward()
            trained.step()
        trained.flush()
        return time.perf_counter() - start

    members = elastic.join(least=1)
    with pipeline(everybody) as plain, members, pipeline(members) as surviving:
        total = (WARM_UP + rounds) * iterations
        shares = members.iterations(total + 1)
        contenders = {
            "plain": lambda: seconds_of(plain, iter(range(iterations))),
            "elastic": lambda: seconds_of(surviving, shares),
        }
        own = interleave_here(contenders, rounds, warm_up=WARM_UP)
        of_ranks = everybody.all_gather_object("times", own)
        next(shares)
    slowest = {name: [max(times) for times in zip(*(one[name] for one in of_ranks), strict=True)] for name in own}
    if everybody.rank == 0:
        file.write_text(json.dumps(slowest), encoding="utf-8")


def measure(link: str, rounds: int, iterations: int) -> Row:
    """Return what elastic ranks take next to others on this link.

    Raises:
        RunError: the job failed.
    """
    with tempfile.TemporaryDirectory() as name:
        file, log = Path(name) / "times.json", Path(name) / "log"
        words = ["-m", "experiments.elastic_cost", "--job", ACCELERATOR[link], str(rounds), str(iterations), str(file)]
        known = LINKS[link]
        if known is None:
            done = subprocess.run(
                command.torchrun(RANKS, *words), cwd=REPOSITORY, capture_output=True, text=True, check=False
            )
            failure = last_words(done.stdout + done.stderr) if done.returncode else None
        else:
            with Testbed(nodes=RANKS, link=known) as testbed:
                failure = run_job(testbed, words, log, deadline=JOB_SECONDS)
        if not file.exists():
            raise RunError(f"both pipelines must train on {link}; got {failure}")
        times = json.loads(file.read_text(encoding="utf-8"))
    ratio = paired_ratio(times["elastic"], times["plain"])
    return {
        "link": link,
        "ranks": RANKS,
        "rounds": rounds,
        "iterations_of_a_round": iterations,
        "plain_median_s": round(median(times["plain"]) / iterations, 5),
        "elastic_median_s": round(median(times["elastic"]) / iterations, 5),
        **ratio_columns("times_as_long", ratio),
    }


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("elastic_cost", __doc__)
    options.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS), help="links (all)")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    rounds, iterations = (QUICK_ROUNDS, QUICK_ITERATIONS) if arguments.quick else (ROUNDS, ITERATIONS)
    rows = []
    with command.progress(console, "links", len(arguments.links)) as advance:
        for link in arguments.links:
            rows.append(measure(link, rounds, iterations))
            advance(1, link)
    save("elastic_cost", rows, extra={"accelerators": ACCELERATOR}, folder=arguments.output)
    command.show("elastic ranks next to others", [{name: str(value) for name, value in row.items()} for row in rows])
    costly = [
        row["link"]
        for row in rows
        if row["times_as_long_median"] > MOST_MEDIAN or row["times_as_long_high"] > MOST_HIGH
    ]
    if costly and not arguments.quick:
        raise RunError(f"surviving must cost at most 1 % while no rank is lost; got more on {', '.join(costly)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        command.run(main)
