"""All systems in one table, each by its own name: time of an iteration, bytes, memory, accuracy, time to accuracy.

    python -m experiments.systems                        systems.csv, .png, systems_convergence.json, .png: eight hours
    python -m experiments.systems --finished             the same files, from what is finished
    python -m experiments.systems --only ddp pipesgd-int4 caffe-hogwild --output DIR

A system is a file NAME.toml in this folder, also for pipesgd.train --config; its head says what was substituted.

- Iterations are timed on four emulated nodes, at 200 Mbit/s and 1 Gbit/s with an emulated accelerator on each, and at
  200 Mbit/s with two cores for all, in interleaved rounds of one job (times.py): seconds, bytes that all ranks report
  to send, the share of the communication that the computation hid, and the memory that a rank takes beyond data and
  model (on an accelerator without activations, and without that of processes that load). The timing model has
  predicted the seconds before, from a calibration.
- Accuracy is that after the same number of samples, on every fourth test sample, of three seeds, on simulated or real
  ranks (accuracy.py), at the learning rate of synchronous training, or a quarter of it where that ends better and
  the system may need a lower one.
- Time to accuracy is calculated, not measured: iterations to the target times the time of an iteration, where one of a
  synchronous start takes longer by the communication that a late one hides. The target is one point below the accuracy
  that d-sync ends with.

Finished parts are kept in systems.*.runs.json in the output folder, one workload after the other: the same command
makes those that are missing or have failed, and writes the table only when all are there. With --finished, the table
has the workloads and links of which nothing is missing.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence

from rich.console import Console

from experiments import command, simulated_runs
from experiments.results import Row, grouped, save
from experiments.systems import accuracy, pictures, table
from experiments.systems.accuracy import Curve, Key
from experiments.systems.catalogue import HOGWILD, NAME, NOT_HERE, all_names, keys_of, systems
from experiments.systems.times import Cell, finished_cells
from experiments.systems.workloads import QUICK, WORKLOADS
from pipesgd.cli import parse as parse_training
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from pipesgd.strategies import start_iterations

HOGWILD_TITLE = "HogWild of Caffe's pull request 1148: ranks of one host share the weights, without locks."


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser(NAME, __doc__)
    options.add_argument("--only", nargs="+", metavar="NAME", help="some of the systems; needs --output")
    simulated_runs.add_options(options)
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"only": [*systems(), HOGWILD]})
    if arguments.only == [HOGWILD]:
        raise UserInputError(f"--only must name a system of pipesgd.train, too; got {HOGWILD} alone")
    command.check_alone(NAME, by_torchrun, "it starts torchrun itself, on every node")
    return arguments


def compute(arguments: Namespace, console: Console) -> tuple[list[Row], list[Row], list[str]]:
    """Return all rows, those of the curves of some systems, and the commits that measured and trained.

    What is missing of them is measured and trained now, unless only finished ones are wanted.

    Raises:
        UserInputError: no testbed can be made here; or only finished rows are wanted, and there is none.
        RunError: something failed; all else was measured and trained before.
    """
    workloads, known = QUICK if arguments.quick else WORKLOADS, systems()
    chosen = arguments.only or all_names()
    titles = {name: HOGWILD_TITLE if name == HOGWILD else known[name].title for name in chosen}
    keys = keys_of(chosen)
    trained = {name: "" if name == HOGWILD else known[name].trained_words for name in chosen}
    planned = accuracy.plan(workloads, trained, simulated_runs.seeds_of(arguments))
    starts = {
        (workload, name): start_iterations(parse_training(shlex.split(f"{one.trained()} {words}")), one.iterations)
        for (workload, one), (name, words) in itertools.product(workloads.items(), trained.items())
        if name != HOGWILD
    }
    cells: dict[tuple[str, str, str], Cell] = {}
    curves: dict[Key, Curve] = {}
    failures: list[str] = []
    arguments = copy.copy(arguments)
    for workload, one in workloads.items():  # one after the other, so that --finished soon finds a whole one
        own = {key: training for key, training in planned.items() if key[0] == workload}
        with _noted(failures):
            cells |= finished_cells({workload: one}, keys, arguments, console)
        with _noted(failures):
            curves |= accuracy.finished_curves(own, arguments, console)
        arguments.fresh = False  # what comes next is added to these
    if failures:
        raise RunError("; ".join(failures))
    incomplete = {workload for workload, *_ in planned.keys() - curves.keys()}
    whole = {place: cell for place, cell in cells.items() if place[0] not in incomplete}
    if not whole:
        raise UserInputError("--finished must find the times and all trainings of a workload; there is none yet")
    rows = table.rows_of(titles, whole, keys, curves, starts)
    made: list[Cell | Curve] = [
        *whole.values(),
        *(curve for (workload, *_), curve in curves.items() if workload not in incomplete),
    ]
    return rows, pictures.curve_rows(rows, curves), sorted({str(one.commit) for one in made})


@contextlib.contextmanager
def _noted(failures: list[str]) -> Iterator[None]:
    """Add a ``RunError`` that ends the context to ``failures``."""
    try:
        yield
    except RunError as failure:
        failures.append(str(failure))


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    rows, curves, made_with = compute(arguments, console)
    extra = {
        "workloads": {
            name: f"{one.trained()} --iterations {one.iterations}"
            for name, one in (QUICK if arguments.quick else WORKLOADS).items()
            if name in {row["workload"] for row in rows}
        },
        "systems": {name: one.words for name, one in systems().items() if name in {row["system"] for row in rows}},
        "made_with": made_with,
        "not_here": NOT_HERE,
        "time_to_target": "calculated: iterations to the target times the time of an iteration; one of a synchronous "
        "start takes longer by the communication that a late one hides",
    }
    path = save(NAME, rows, extra=extra, folder=arguments.output)
    if any(row["times_as_fast_as_ddp"] is not None for row in rows):  # else DDP was left out
        pictures.SPEEDUPS.save(rows, arguments.output)
    if curves:  # else the systems that have one were
        save(pictures.CONVERGENCE.name, curves, extra=extra, folder=arguments.output)
        pictures.CONVERGENCE.save(curves, arguments.output)
    for place, own in grouped(rows, "workload", "rate", "computes").items():
        table.show(own, f"{', '.join(place)}; links and accelerators are emulated")
    not_here = (f"{name} is not here: {reason}" for name, reason in NOT_HERE.items())
    say(console, *table.reasons(rows), *not_here, f"wrote {path}")


if __name__ == "__main__":
    command.run(main)
