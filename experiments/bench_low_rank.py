"""Time of an iteration on a slow line with factors of low rank, next to DDP and other ways to send little.

    python -m experiments.bench_low_rank                                        5 and 4 nodes at 25 Mbit/s
    python -m experiments.bench_low_rank --settings "mlp, 5 nodes, command"     some of the settings

Every node has an emulated accelerator of 60 ms, which leaves the cores to the network, and to updates and predictions:
these are computed, by all nodes on the cores of one machine. "No prediction" leaves out the longer part of it, and with
two nodes each has a core. Most settings time configurations of ``pipesgd.train`` in turns in one job
(timed_configurations.py); "attach" times loops in DistributedDataParallel in the same way (loops_on_links.py), with
``pipesgd.ddp.attach``. DiLoCo is this project's, as in the table of systems (experiments/systems/diloco.toml). The
accuracy of all this is a matter of experiments.accuracy and experiments.systems.

Finished settings are kept in bench_low_rank.runs.json in the output folder: the same command makes only those that are
missing.
"""

from __future__ import annotations

import copy
import math
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments import accelerators, command, loops_on_links
from experiments.kept_runs import KeptRuns
from experiments.loops import Loop, Plain, to_fp16
from experiments.loops_on_links import ALONE, DDP, DDP_FP16, Effort, on_testbed
from experiments.paired import interquartile_range, median, paired_ratio, ratio_columns
from experiments.results import Row, code_state, save
from experiments.systems.workloads import TIMED_LR, WORKLOADS
from experiments.testbed import Link, Testbed
from experiments.validation_runs import time_in_passes
from pipesgd import PowerSgd
from pipesgd.cli import parse as parse_training
from pipesgd.ddp import attach
from pipesgd.ranks import Ranks

NAME = "bench_low_rank"
LINK = Link(rate=25e6)
ACCELERATOR = "60ms"
LOW_RANK = "low rank 4"
CONFIGURATIONS = {
    ALONE: "--strategy local",
    DDP: "--strategy ddp",
    DDP_FP16: "--strategy ddp --ddp-hook fp16",
    LOW_RANK: "--width 2 --codec powersgd --low-rank 4",
    f"{LOW_RANK}, no prediction": "--width 2 --codec powersgd --low-rank 4 --prediction none",
    f"{LOW_RANK}, bf16": "--width 2 --codec powersgd --low-rank 4 --factor-codec bf16",
    f"{LOW_RANK}, int8": "--width 2 --codec powersgd --low-rank 4 --factor-codec int8",
    "int4": "--width 2 --codec int4",
    "int4, 8 local steps": "--width 2 --codec int4 --local-steps 8",
    "DiLoCo, 30 local steps": "--width 1 --local-steps 30 --outer nesterov",
}
"""Arguments of ``pipesgd.train``, by contender."""
COMMAND, ATTACH = "command", "attach"
MLP = loops_on_links.Workload(name="mlp", model="mlp", hidden_sizes=(1000, 1000), batch_size=32)
"""The same training as "mlp" in the table of systems."""
ROUNDS, SHORT, BLOCK = 6, 2, 20
"""Rounds, and fewest iterations in a round: of DDP, which takes seconds for one, and of the others."""
QUICK_ROUNDS, QUICK_BLOCK = 1, 2
DEADLINE = 2 * 3600.0
"""Seconds after which a job counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on a number of nodes."""

    workload: str
    nodes: int
    by: str = COMMAND

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.nodes} nodes, {self.by}"


SETTINGS = {
    one.name: one
    for one in (
        Setting(workload="mlp", nodes=5),
        Setting(workload="mlp", nodes=5, by=ATTACH),
        Setting(workload="mlp", nodes=4),
        Setting(workload="mlp", nodes=4, by=ATTACH),
        Setting(workload="mlp", nodes=2),
        Setting(workload="convnet", nodes=4),
        Setting(workload="transformer", nodes=4),
        Setting(workload="alexnet", nodes=4),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Times of a setting."""

    commit: str | None
    seconds: dict[str, list[float]]
    """Seconds of an iteration in each round, by contender."""
    communication: dict[str, float]
    """Median seconds of an iteration's communication, hidden or not, where that is known."""
    wire_bytes: dict[str, float]
    """Bytes that a rank sends in an iteration, where that is known."""


def time_command(setting: Setting, *, quick: bool) -> Cell:
    """Return the times of all configurations of ``pipesgd.train``.

    Raises:
        RunError: the job failed.
    """
    workload = WORKLOADS[setting.workload]
    emulated = f"--lr {TIMED_LR} --model experiments.accelerators:synthetic={ACCELERATOR},model={workload.model}"
    plan = []
    for words in CONFIGURATIONS.values():
        whole = f"{workload.words} {emulated} {words}"
        window = parse_training(shlex.split(whole)).windows.local_steps
        least = QUICK_BLOCK if quick else SHORT if "ddp" in words else BLOCK
        plan.append({"words": whole, "iterations": window * math.ceil(least / window)})
    with tempfile.TemporaryDirectory() as folder, Testbed(nodes=setting.nodes, link=LINK) as testbed:
        rounds = QUICK_ROUNDS if quick else ROUNDS
        times = time_in_passes(testbed, plan, rounds, Path(folder), deadline=DEADLINE)
    found = dict(zip(CONFIGURATIONS, times, strict=True))

    def medians(column: str, per: int = 1) -> dict[str, float]:
        return {
            name: median([one[column] for one in of_rounds]) / per
            for name, of_rounds in found.items()
            if name not in (ALONE, DDP, DDP_FP16)  # torch's DDP reports neither
        }

    return Cell(
        commit=code_state(),
        seconds={name: [one["seconds"] for one in of_rounds] for name, of_rounds in found.items()},
        communication=medians("communication_seconds"),
        wire_bytes=medians("wire_bytes", per=setting.nodes),
    )


def time_attach(setting: Setting, *, quick: bool) -> Cell:
    """Return the times of loops in DistributedDataParallel.

    Raises:
        RunError: the job failed.
    """
    found = on_testbed(NAME, ["--quick"] * quick, nodes=setting.nodes, link=LINK)
    seconds = {name: list(one["seconds"]) for name, one in found.items()}
    return Cell(commit=code_state(), seconds=seconds, communication={}, wire_bytes={})


TIMED: Mapping[str, Callable[..., Cell]] = {COMMAND: time_command, ATTACH: time_attach}


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Return every loop of the settings with ``attach``, each with a copy of ``model`` on an accelerator."""
    made, _ = accelerators.parse(ACCELERATOR, synthetic=True)

    def emulated() -> accelerators.Emulated:
        return accelerators.Emulated(copy.deepcopy(model), made, rank=ranks.rank)

    def in_ddp() -> nn.Module:
        return DistributedDataParallel(emulated())

    return {
        ALONE: Plain(emulated()),
        DDP: Plain(in_ddp()),
        DDP_FP16: Plain(in_ddp(), to_fp16),
        LOW_RANK: Plain(in_ddp(), partial(attach, width=2, codec=PowerSgd(low_rank=4))),
        f"{LOW_RANK}, int8": Plain(in_ddp(), partial(attach, width=2, codec=PowerSgd(low_rank=4, factors="int8"))),
    }


def rows_of(setting: Setting, cell: Cell) -> list[Row]:
    """Return a row for every contender."""
    rows = []
    for name, seconds in cell.seconds.items():
        rows.append(
            {
                "workload": setting.workload,
                "nodes": setting.nodes,
                "by": setting.by,
                "contender": name,
                "median_s": median(seconds),
                "iqr_s": interquartile_range(seconds),
                **ratio_columns("times_as_fast_as_ddp", paired_ratio(cell.seconds[DDP], seconds)),
                **ratio_columns("times_as_long_as_alone", paired_ratio(seconds, cell.seconds[ALONE])),
                "communication_s": cell.communication.get(name),
                "wire_bytes_of_a_rank": cell.wire_bytes.get(name),
                "rounds": len(seconds),
                "commit": cell.commit,
            }
        )
    return rows


def show(setting: Setting, rows: Sequence[Row]) -> None:
    """Print the rows of a setting."""

    def interval(row: Row, name: str, digits: int) -> str:
        return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(
            *(row[f"{name}_{end}"] for end in ("median", "low", "high")), d=digits
        )

    command.show(
        f"{setting.name}, 25 Mbit/s, accelerators of {ACCELERATOR} (all emulated)",
        [
            {
                "contender": row["contender"],
                "ms": f"{row['median_s'] * 1e3:.0f}",
                "times as fast as DDP": interval(row, "times_as_fast_as_ddp", 1),
                "times as long as alone": interval(row, "times_as_long_as_alone", 2),
                "kB of a rank": ""
                if row["wire_bytes_of_a_rank"] is None
                else f"{row['wire_bytes_of_a_rank'] / 1e3:.0f}",
            }
            for row in rows
        ],
    )


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on testbeds, or, started by torchrun, as one of a testbed's ranks."""
    options = command.parser(NAME, __doc__)
    options.add_argument(
        "--settings", nargs="+", metavar="NAME", help=f"some of {'; '.join(SETTINGS)} (all); quick: the first two"
    )
    options.add_argument("--fresh", action="store_true", help="forget the finished settings in the output folder")
    options.add_argument("--finished", action="store_true", help="time nothing; publish the finished settings")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    if ranks.by_torchrun:
        effort = Effort(block=QUICK_BLOCK, rounds=QUICK_ROUNDS) if arguments.quick else Effort(block=8, rounds=ROUNDS)
        loops_on_links.measure(MLP, make_loops, ranks, effort, arguments.output)
        return
    command.check_each_once(arguments, {"settings": SETTINGS})
    names = arguments.settings or list(SETTINGS)[: 2 if arguments.quick else None]
    kept = KeptRuns(arguments.output / f"{NAME}.runs.json", Cell, fresh=arguments.fresh)
    done = kept.complete(
        {name: SETTINGS[name] for name in names},
        lambda one: TIMED[one.by](one, quick=arguments.quick),
        console,
        "iteration times",
        finished=arguments.finished,
    )
    done |= {name: cell for name, cell in kept.load().items() if name in SETTINGS}  # those of earlier commands
    rows = []
    for name, setting in SETTINGS.items():
        if name in done:
            own = rows_of(setting, done[name])
            show(setting, own)
            rows += own
    save(NAME, rows, extra={"accelerator": ACCELERATOR, "rate": LINK.rate}, folder=arguments.output)


if __name__ == "__main__":
    command.run(main)
