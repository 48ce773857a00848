"""Faults injected into real runs: what their user sees, after how many seconds, what is lost, and what is left behind.

    python -m experiments.faults                              all: faults.csv; exit code 1 if one is not as expected
    python -m experiments.faults --list                       the faults, and what is expected of them
    python -m experiments.faults --only S1 S18c --output DIR  some of them, even if already done

Each fault hits a run of pipesgd.train by torchrun, on loopback, or on a testbed if links are cut. A run's deadline
(--timeout) is short, so that faults that only a deadline notices take seconds. Observations are kept in
runs/faults.json, by a hash of the code: the same command repeats only faults that are missing, or hit other code.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import command
from experiments.faults.observation import Observation
from experiments.faults.outcome import Scenario, misses, row
from experiments.faults.scenarios import QUICK, SCENARIOS
from experiments.faults.stage import Stage
from experiments.kept_runs import KeptRuns
from experiments.results import save, sources
from experiments.testbed import Link, Testbed, TestbedFailedError
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

STATE = Path("runs/faults.json")
"""File of the kept observations, below the folder where the command is started, as with pipesgd.train."""
HARNESS = (Path(__file__).parent,)
"""Folders hashed in addition to the code that is measured: results of another harness do not count."""
DEADLINE_SECONDS = 10
"""``--timeout`` of all runs."""
NODES, RATE = 3, 500e6
"""Nodes of the testbed, and the rate of their links in bit/s."""


def observe(scenario: Scenario) -> Observation:
    """Inject the fault and return what comes of it.

    Raises:
        UserInputError: the fault cannot be injected on this machine, or by this user.
    """
    if scenario.root and os.geteuid() != 0:
        raise UserInputError(f"{scenario.id} must be run by root, who can mount a small disk")
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        if not scenario.testbed:
            return _observe(scenario, Stage(Path(name), DEADLINE_SECONDS))
        with Testbed(nodes=NODES, link=Link(rate=RATE)) as testbed:
            return _observe(scenario, Stage(Path(name), DEADLINE_SECONDS, testbed))


def _observe(scenario: Scenario, stage: Stage) -> Observation:
    problem = ""
    with stage:
        try:
            scenario.play(stage)
        except (RunError, TestbedFailedError) as failure:
            problem = str(failure)
        return stage.observe(problem)


def compute(
    chosen: Sequence[Scenario], kept: KeptRuns[Observation], again: bool, console: Console
) -> list[tuple[Scenario, Observation]]:
    """Return the outcome of each chosen fault; those that have not hit this code yet are injected now."""
    code = sources(*HARNESS)[:16]
    keys = {one.id: f"{one.id}, {one.fault}, deadline {DEADLINE_SECONDS} s, code {code}" for one in chosen}
    done = {} if again else kept.load()
    missing = [one for one in chosen if keys[one.id] not in done]
    say(console, f"{len(chosen) - len(missing)} of {len(chosen)} faults are done; --fresh does them again")
    with command.progress(console, "faults", max(1, len(missing))) as advance:
        for number, one in enumerate(missing):
            seen = observe(one)
            kept.add(keys[one.id], seen)
            found = misses(one, seen)
            say(console, f"[{number + 1}/{len(missing)}] {one.id}, {one.fault}: {'; '.join(found) or 'as expected'}")
            advance(1, one.id)
    done = kept.load()
    return [(one, done[keys[one.id]]) for one in chosen]


def publish(found: Sequence[tuple[Scenario, Observation]], folder: Path) -> list[str]:
    """Save the table, print it, and return what was missed."""
    rows = [row(scenario, seen) for scenario, seen in found]
    save("faults", rows, extra={"deadline_s": DEADLINE_SECONDS, "nodes": NODES, "rate_bit_per_s": RATE}, folder=folder)
    shown = [
        {
            "": one["scenario"],
            "s": "" if one["seconds"] is None else f"{one['seconds']:.1f}",
            "silent": one["named_silent"],
            "lost": "" if one["iterations_lost"] is None else str(one["iterations_lost"]),
            "orphans": str(one["orphans"]),
            "missed": one["missed"][:70],
        }
        for one in rows
    ]
    command.show(f"{sum(not one['missed'] for one in rows)} of {len(rows)} faults came out as expected", shown)
    return [f"{one['scenario']}: {one['missed']}" for one in rows if one["missed"]]


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("faults", __doc__)
    options.add_argument("--list", action="store_true", help="list the faults")
    options.add_argument("--only", nargs="+", metavar="ID", help="run these faults, done or not; needs --output")
    options.add_argument("--fresh", action="store_true", help="run all faults again")
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"only": [one.id for one in SCENARIOS]})
    command.check_alone("faults", by_torchrun, "it starts torchrun itself")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    if arguments.list:
        rows = [{"": one.id, "fault": one.fault, "line": one.says[:50]} for one in SCENARIOS]
        command.show("Faults, and the line that each must lead to", rows)
        return
    only = arguments.only or (QUICK if arguments.quick else [one.id for one in SCENARIOS])
    chosen = [one for one in SCENARIOS if one.id in only]
    again = arguments.fresh or bool(arguments.only)
    found = compute(chosen, KeptRuns(STATE.resolve(), Observation), again, console)
    missed = publish(found, arguments.output)
    if missed:
        raise RunError(f"every fault must come out as expected; not so: {' | '.join(missed)}")


if __name__ == "__main__":
    command.run(main)
