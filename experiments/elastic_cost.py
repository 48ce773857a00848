"""The cost of surviving losses while none happens: iterations of elastic ranks next to those of a job that needs all.

    python -m experiments.elastic_cost             on loopback, and at 200 Mbit/s (needs root): elastic_cost.csv

Both pipelines (width 2, int8, over tcp) take turns in the same processes, see pipelines_in_turns.py. Exit code 1 if the
median ratio is above 1.01, or its interval ends above 1.03.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console

from experiments import command
from experiments.paired import median, paired_ratio, ratio_columns
from experiments.pipelines_in_turns import FULL, QUICK, WARM_UP, Effort, Samples, of_slowest, pipeline, times_of
from experiments.results import Row, save
from experiments.testbed import Link
from pipesgd import elastic
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks, join

RANKS = 3
LINKS = {"loopback": None, "200mbit": Link(rate=200e6)}
ACCELERATOR = {"loopback": "40ms", "200mbit": "75ms"}
"""Emulated accelerator of each rank, whose time is about that of the communication."""
MOST_MEDIAN, MOST_HIGH = 1.01, 1.03


def train(accelerator: str, effort: Effort, file: Path) -> None:
    """Train on this rank by both pipelines in turns; rank 0 writes the times of rounds to ``file``."""
    torch.set_num_threads(1)
    everybody, samples = join(), Samples()
    members = elastic.join(least=1)
    shares = members.iterations((WARM_UP + effort.rounds) * effort.iterations + 1)
    with (
        pipeline(accelerator, everybody, codec="int8", transport="tcp") as plain,
        members,
        pipeline(accelerator, members, codec="int8", transport="tcp") as surviving,
    ):
        contenders = {
            "plain": lambda: samples.seconds(plain, range(effort.iterations)),
            "elastic": lambda: samples.seconds(surviving, islice(shares, effort.iterations)),
        }
        times = of_slowest(everybody, contenders, effort.rounds)
        next(shares)
    if everybody.rank == 0:
        file.write_text(json.dumps(times), encoding="utf-8")


def measure(link: str, effort: Effort) -> Row:
    """Return what elastic ranks take next to others on this link.

    Raises:
        RunError: the job failed.
    """
    words = [ACCELERATOR[link], str(effort.rounds), str(effort.iterations)]
    times = times_of("experiments.elastic_cost", words, RANKS, LINKS[link])
    return {
        "link": link,
        "ranks": RANKS,
        "rounds": effort.rounds,
        "iterations_of_a_round": effort.iterations,
        "plain_median_s": round(median(times["plain"]) / effort.iterations, 5),
        "elastic_median_s": round(median(times["elastic"]) / effort.iterations, 5),
        **ratio_columns("times_as_long", paired_ratio(times["elastic"], times["plain"])),
    }


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.parser("elastic_cost", __doc__)
    options.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS), help="links (all)")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    rows = []
    with command.progress(console, "links", len(arguments.links)) as advance:
        for link in arguments.links:
            rows.append(measure(link, QUICK if arguments.quick else FULL))
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
        train(sys.argv[2], Effort(int(sys.argv[3]), int(sys.argv[4])), Path(sys.argv[5]))
    else:
        command.run(main)
