"""Random schedules of faults for the protocol of the members: does any of them break what must hold?

    python -m experiments.explore_membership                     200,000 schedules: explore_membership.csv
    python -m experiments.explore_membership --schedules 1000000
    python -m experiments.explore_membership --replay 8614       one schedule, with all that happens in it

The state machines are those of ``pipesgd.membership``; ranks, network and clocks are simulated, in virtual time, in
``experiments.membership``. A schedule has 1 to 5 ranks and 1 to 10 faults, most of them while the members change after
another one: kills, power cuts, stopped processes, cut and broken connections, partitions, newcomers, and ranks that
leave. It ends when all living ranks are members and train, or when too few are left.

Schedules run one after the other, at low priority. Blocks of them are kept in runs/explore_membership.json, by a hash
of the code: the same command continues where it was stopped. The exit code is 1 if a schedule breaks an invariant; the
seed and the end of the trace of the first one are printed.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import experiments.membership
import pipesgd.membership
from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.membership.invariants import ViolationError
from experiments.membership.world import World
from experiments.results import hash_of, save
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

STATE = Path("runs/explore_membership.json")
"""File of the kept blocks, below the folder where the command is started, as with pipesgd.train."""
HARNESS = (
    Path(__file__),
    Path(experiments.membership.__file__).parent,
    Path(pipesgd.membership.__file__).parent,
)
"""Files whose hash kept blocks belong to: what is explored, and what explores it."""
SCHEDULES, QUICK_SCHEDULES = 200_000, 1_000
BLOCK = 1_000
"""Schedules that are kept together."""
TRACE_LINES, LINE_WIDTH = 40, 200
"""Lines of the trace of a violation that are printed, and characters of each."""
NICENESS = 10
"""Niceness that is added to that of this process."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Outcomes of the schedules of consecutive seeds."""

    first_seed: int
    schedules: int
    violations: int
    all_are_members: int
    """Schedules after which all living ranks are members and train."""
    no_quorum_left: int
    too_few_members: int
    events: int
    units: int
    units_without_gradient: int
    generations: int
    generations_by_certain_deaths: int
    left_behind: int
    """Processes that the others continued without, though they lived."""
    deaths: int
    stops: int
    cuts: int
    """Connections cut for a while or broken, and partitions."""
    joins: int
    leaves: int
    resumed_median_s: float
    """Median of the virtual seconds from the last fault to three more units."""
    resumed_worst_s: float
    first_violation: str
    """Seed and text of the first violation; empty without one."""


def explore(first_seed: int, schedules: int) -> Block:
    """Play ``schedules`` schedules."""
    counts: collections.Counter[str] = collections.Counter()
    resumed: list[float] = []
    violations: list[str] = []
    for seed in range(first_seed, first_seed + schedules):
        world = World(seed)
        try:
            counts[world.run()] += 1
        except ViolationError as violation:
            violations.append(f"seed {seed}: {violation}")
        counts.update(world.counts)
        counts.update(world.invariants.counts)
        if world.resumed_after is not None:
            resumed.append(world.resumed_after)
    resumed.sort()
    return Block(
        first_seed=first_seed,
        schedules=schedules,
        violations=len(violations),
        all_are_members=counts["all are members"],
        no_quorum_left=counts["no quorum left"],
        too_few_members=counts["too few members"],
        events=counts["events"],
        units=counts["units"],
        units_without_gradient=counts["units without a gradient"],
        generations=counts["generations"],
        generations_by_certain_deaths=counts["generations by certain deaths"],
        left_behind=counts["left behind"],
        deaths=counts["kill"] + counts["power"] + counts["murder"],
        stops=counts["stop"],
        cuts=counts["cut"] + counts["flap"] + counts["partition"],
        joins=counts["join"],
        leaves=counts["leave"],
        resumed_median_s=resumed[len(resumed) // 2],
        resumed_worst_s=resumed[-1],
        first_violation=violations[0] if violations else "",
    )


def trace_of(seed: int) -> tuple[list[str], str]:
    """Return the trace of a schedule, and how it ends."""
    lines: list[str] = []
    try:
        end = World(seed, say=lines.append).run()
    except ViolationError as violation:
        end = f"violation: {violation}"
    return [line if len(line) <= LINE_WIDTH else f"{line[: LINE_WIDTH - 1]}…" for line in lines], end


def compute(schedules: int, kept: KeptRuns[Block], console: Console) -> list[Block]:
    """Return the blocks of seeds from 0 on; those that are not kept yet are played now."""
    code = hash_of(*HARNESS)[:16]
    blocks = {
        f"code {code}, seeds from {first}, {min(BLOCK, schedules - first)} schedules": first
        for first in range(0, schedules, BLOCK)
    }
    done = kept.complete(
        blocks,
        lambda first: explore(first, min(BLOCK, schedules - first)),
        console,
        "blocks of schedules",
        named=lambda first: f"{first:,} of {schedules:,} schedules",
    )
    return list(done.values())


def show(blocks: Sequence[Block]) -> None:
    """Print what happened in all schedules together."""
    rows = [
        {"": field.name.replace("_", " "), "in all": f"{sum(getattr(block, field.name) for block in blocks):,}"}
        for field in dataclasses.fields(Block)
        if field.type == "int" and field.name != "first_seed"
    ]
    worst = max(block.resumed_worst_s for block in blocks)
    command.show("Schedules of the members' protocol", [*rows, {"": "worst resumption", "in all": f"{worst:.1f} s"}])


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("explore_membership", __doc__)
    options.add_argument(
        "--schedules", type=command.at_least(1), help=f"number of schedules ({SCHEDULES}; quick: {QUICK_SCHEDULES})"
    )
    options.add_argument("--replay", type=command.at_least(0), metavar="SEED", help="print the trace of one schedule")
    options.add_argument("--fresh", action="store_true", help="repeat kept blocks")
    arguments = command.parse(options, words)
    command.check_alone("explore_membership", by_torchrun, "it simulates its ranks")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    if arguments.replay is not None:
        lines, end = trace_of(arguments.replay)
        print(*lines, end, sep="\n")
        return
    os.nice(NICENESS)
    kept = KeptRuns(STATE.resolve(), Block, fresh=arguments.fresh)
    blocks = compute(arguments.schedules or (QUICK_SCHEDULES if arguments.quick else SCHEDULES), kept, console)
    save("explore_membership", [dataclasses.asdict(block) for block in blocks], folder=arguments.output)
    show(blocks)
    wrong = [block.first_violation for block in blocks if block.violations]
    if wrong:
        seed = int(wrong[0].removeprefix("seed ").partition(":")[0])
        print(*trace_of(seed)[0][-TRACE_LINES:], sep="\n")
        say(console, f"python -m experiments.explore_membership --replay {seed} prints all of it")
        raise RunError(
            f"no schedule may break an invariant; {sum(block.violations for block in blocks)} did: {wrong[0]}"
        )


if __name__ == "__main__":
    command.run(main)
