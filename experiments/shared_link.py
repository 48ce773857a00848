"""Training on a link that another program loads, with and without a limit of what training sends.

    python -m experiments.shared_link            4 nodes at 200 Mbit/s: shared_link.csv

Another program on node 0 sends to node 1, by one TCP connection, as much as it can. The table has the time of an
iteration, and the rate at which the other program's bytes arrive meanwhile; without communication, it has the link for
itself. Accelerators are synthetic, as in bench_accelerators; loops_on_links.py says how the contenders are timed;
blocks are steady. "alone" is the time of an iteration of the same loops without another program, from a job of its own
before.

Every message of node 0 waits behind what the other program has queued there. So pipelines sum by a ring, in 2 (p-1)
steps one after the other for p ranks, and by an all-to-all, which sends as many bytes in two.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments import command
from experiments.bench_accelerators import ACCELERATOR, ALONE, CLUSTER, DDP, WORKLOAD, emulate
from experiments.loops import Loop, Piped, Plain
from experiments.loops_on_links import Effort, measure, on_testbed, show, show_verdicts, summarize, verdicts
from experiments.other_traffic import Arrived, make_count
from experiments.results import save
from experiments.testbed import Testbed
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks

FULL, QUICK = Effort(block=8, rounds=5, steady=True), Effort(block=2, rounds=1, steady=True)
PORT, COUNT_FILE = 39_000, "arrived"
LIMIT = "50mbit"
PIPELINES: dict[str, dict[str, Any]] = {
    ", ".join([f"width {options['width']}, {options['codec']}", *how, *limited]): options | how_options | limit
    for options in ({"width": 1, "codec": "int8", "buckets": 2}, {"width": 2, "codec": "int4"})
    for how, how_options in (([], {}), (["all-to-all"], {"all_reduce": "all-to-all"}))
    for limited, limit in (([], {}), ([f"at most {LIMIT}"], {"rate_limit": LIMIT}))
}
LIMITED = [name for name, options in PIPELINES.items() if "rate_limit" in options]
LEAST_LEFT = 0.7
"""Least rate of the other program next to a limited pipeline, as a share of that next to no communication: of the 200
Mbit/s of the link, the limit takes a quarter, headers not counted."""
MOST_LONGER = 1.05
"""Most that an iteration of a limited pipeline may take next to the other program, as a multiple of that alone."""


def make_loops(model: nn.Module, ranks: Ranks) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model`` on an accelerator. Collective."""
    return {
        ALONE: Plain(emulate(model, ranks.rank)),
        DDP: Plain(DistributedDataParallel(emulate(model, ranks.rank))),
        **{name: Piped(emulate(model, ranks.rank), ranks, **options) for name, options in PIPELINES.items()},
    }


def start_other(testbed: Testbed, folder: Path) -> None:
    """Start the other program on the first two nodes; its count is a file in ``folder``."""
    make_count(folder / COUNT_FILE)
    words = [sys.executable, "-m", "experiments.other_traffic"]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    testbed.start(1, [*words, "receive", str(PORT), str(folder / COUNT_FILE)], **quiet)
    testbed.start(0, [*words, "send", testbed.address(1), str(PORT)], **quiet)


def judge(
    alone: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float | str]]:
    """Return the ratios of limited pipelines that have a target: of the other program's rate, and of iterations.

    Rates are of the same rounds; times next to the other program and without are of two jobs, one after the other.
    """
    numbers = {f"other program next to {name}": one["figures"]["other_rate"] for name, one in shared.items()}
    targets: dict[tuple[str, str], tuple[str, float]] = {}
    for name in LIMITED:
        targets[f"other program next to {name}", f"other program next to {ALONE}"] = ("at least", LEAST_LEFT)
        numbers |= {f"{name}, shared": shared[name]["seconds"], f"{name}, alone": alone[name]["seconds"]}
        targets[f"{name}, shared", f"{name}, alone"] = ("at most", MOST_LONGER)
    return verdicts(numbers, targets)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser("shared_link", __doc__)
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    effort = QUICK if arguments.quick else FULL
    if ranks.by_torchrun:
        count = arguments.output / COUNT_FILE
        meters = {"other_rate": Arrived(count).rate} if count.exists() else {}
        measure(WORKLOAD, make_loops, ranks, effort, arguments.output, meters)
        return
    job = partial(on_testbed, "shared_link", ["--quick"] * arguments.quick, nodes=CLUSTER.nodes, link=CLUSTER.link)
    alone, shared = job(), job(before=start_other)
    if not all(one["other_rate"] > 0 for one in shared.values()):
        raise RunError("the other program must send all the time; got blocks in which nothing arrived")
    title = f"{WORKLOAD.name} on accelerators of {ACCELERATOR}, {CLUSTER.describe()} (all emulated), next to a download"
    without = {row["contender"]: row["median_s"] for row in summarize(alone, title, DDP)}
    rows = [
        {**row, "alone_s": without[row["contender"]], "other_rate": shared[row["contender"]]["other_rate"]}
        for row in summarize(shared, title, DDP)
    ]
    judged = judge(alone, shared)
    extra = {"accelerator": ACCELERATOR, "block": effort.block, "targets": judged}
    save("shared_link", rows, extra=extra, folder=arguments.output)
    show(rows, alone_s="alone, ms")
    show_verdicts(judged)
    command.show(
        "The other program",
        [{"next to": row["contender"], "Mbit/s": f"{8e-6 * row['other_rate']:.0f}"} for row in rows],
    )


if __name__ == "__main__":
    command.run(main)
