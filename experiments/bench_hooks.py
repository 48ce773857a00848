"""Cost of the hooks that let buckets leave during the backward pass, on this machine, interleaved.

    torchrun --nproc-per-node 2 -m experiments.bench_hooks      bench_hooks.csv

All contenders train at width 1, as bench_pipelined says. Buckets that leave early are also summed early, so "buckets"
next to "one buffer" shows what they gain on loopback, and not what their hooks cost. Two more contenders have as many
buckets that all wait for the step, where they are summed one after the other: with hooks that are called for every
gradient and never let one leave, and without hooks. Nothing else differs, so their ratio is the cost of the hooks.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from torch import nn

from experiments import command
from experiments.bench_pipelined import WORKLOADS, Effort, Workload, time_in_rounds
from experiments.loops import Loop, Piped
from experiments.paired import Seconds, interquartile_range, median, paired_ratio, ratio_columns
from experiments.results import Row, save
from pipesgd.config import DEFAULT_TIMEOUT
from pipesgd.data import load_dataset
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

BUCKETS = 4
ONE, LEAVING, HOOKED, UNHOOKED = "one buffer", "buckets", "buckets that wait, hooks", "buckets that wait, no hooks"
BASELINES = {LEAVING: ONE, HOOKED: UNHOOKED}
"""Contender that each of these is compared with."""
MOST = {HOOKED: 1.02}
"""Bounds of these ratios."""
FULL = Effort(workloads=(WORKLOADS[0], WORKLOADS[3]), block=20, rounds=20)
QUICK = Effort(workloads=WORKLOADS[:1], block=5, rounds=3)


class Waiting(Piped):
    """A loop whose buckets all wait for the step, with hooks that are called all the same or, without, none."""

    def __init__(self, model: nn.Module, ranks: Ranks, *, hooks: bool, **options: Any):
        super().__init__(model, ranks, **options)
        if hooks:
            self._pipeline._leaving._leave = self._stay
        else:
            self._pipeline._leaving.remove()
        self.asked = 0
        """Number of times that a bucket was complete and did not leave."""

    def _stay(self) -> bool:
        self.asked += 1
        return False


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model``. Collective."""
    cut = {"width": 1, "buckets": BUCKETS}
    return {
        ONE: Piped(copy.deepcopy(model), ranks, width=1),
        LEAVING: Piped(copy.deepcopy(model), ranks, **cut),
        HOOKED: Waiting(copy.deepcopy(model), ranks, hooks=True, **cut),
        UNHOOKED: Waiting(copy.deepcopy(model), ranks, hooks=False, **cut),
    }


def summarize(workload: Workload, seconds: Mapping[str, Seconds]) -> list[Row]:
    """Return the lines of the table for one workload; times are per iteration."""
    rows = []
    for name, times in seconds.items():
        against = BASELINES.get(name)
        ratio = None if against is None else paired_ratio(times, seconds[against])
        rows.append(
            {
                "workload": workload.name,
                "contender": name,
                "median_s": median(times),
                "iqr_s": interquartile_range(times),
                "against": against,
                **ratio_columns("ratio", ratio),
                "rounds": len(times),
            }
        )
    return rows


def verdict(row: Row) -> str:
    """Return "met" or "MISSED" if the whole interval is on one side of the bound, else "open"; "" without a bound."""
    bound = MOST.get(row["contender"])
    if bound is None:
        return ""
    return "met" if row["ratio_high"] <= bound else "MISSED" if row["ratio_low"] > bound else "open"


def parse(words: Sequence[str], world_size: int) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    arguments = command.parse(command.parser("bench_hooks", __doc__), words)
    if world_size < 2:
        raise UserInputError("at least 2 ranks must be started (torchrun --nproc-per-node 2 ...); got 1")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.world_size))
    data = ranks.raise_together("data", lambda: load_dataset("fashion-mnist", None, image_size=64))
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    effort = QUICK if arguments.quick else FULL
    rows = time_in_rounds(ranks, effort, data, console, "cost of hooks", make_loops, summarize)
    if ranks.rank == 0:
        verdicts = {f"{row['workload']}: {row['contender']}": verdict(row) for row in rows if verdict(row)}
        save("bench_hooks", rows, extra={"at_most": MOST, "verdicts": verdicts}, folder=arguments.output)
        command.show(
            f"Time of an iteration at width 1; target: hooks at most {MOST[HOOKED]:.2f} of the same without",
            [
                {
                    "workload": row["workload"],
                    "contender": row["contender"],
                    "ms": f"{row['median_s'] * 1e3:.2f}",
                    "IQR ms": f"{row['iqr_s'] * 1e3:.2f}",
                    "/": row["against"] or "",
                    "ratio": command.text_of(row, "ratio_median", ".3f", missing=""),
                    "95 %": "" if row["against"] is None else f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
                    "target": verdict(row),
                }
                for row in rows
            ],
        )


if __name__ == "__main__":
    command.run(main)
