"""Cost of staleness in accuracy, and how much of it predictions remove.

    python -m experiments.staleness                               staleness.csv, staleness_summary.csv, staleness.png
    python -m experiments.staleness --workloads mlp --seeds 1
    python -m experiments.staleness --finished                    the same files, from the finished runs

Every method trains with every optimizer at learning rates around the best one of synchronous training, on four ranks,
which are simulated exactly in one process (experiments/simulation.py). A run is named by the arguments that
``pipesgd.train`` would get for it. A run that diverges is a result as well. All runs take four hours of two cores.
Finished runs are kept in staleness.runs.json in the output folder: the same command makes only those that are missing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from experiments import command, simulated_runs, simulated_tables
from experiments.results import Row, grouped
from experiments.simulated_runs import Run
from experiments.simulated_tables import cost_of, mean_change, mean_of_all, percent, points, texts_next_to_sync
from experiments.staleness_figure import draw
from experiments.staleness_runs import BASELINE, METHODS, WORKLOADS, Planned, plan
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

if TYPE_CHECKING:
    from pathlib import Path

MOST_LOST = {"eager": 0.2, "eager, width 3": 0.4, "eager, int8": 0.3, "eager, int4": 0.3}
"""Points of accuracy that the default may lose, in the mean over seeds, at the best learning rate of synchronous
training."""
LOSS_PERCENT_PER_POINT = 2.5
"""Percent of the loss that counts as a point of accuracy where the loss is judged: 0.2 points are half a percent."""
CONVERGED = 0.9
"""Share of the best synchronous accuracy; a learning rate at which a seed ends below it has failed."""
STABILITY = 0.5
"""Share of the largest rate of synchronous training up to which the default must not fail either."""


def tabulate(planned: Sequence[Planned], runs: Mapping[str, Run]) -> list[Row]:
    """Return a row for every workload, optimizer, method and learning rate of which no seed is missing."""
    seeds = sorted({one.seed for one in planned})
    of = {(one.workload, one.optimizer, one.method, one.lr, one.seed): runs.get(one.words) for one in planned}
    rows = []
    for workload, optimizer, method, multiple, lr in dict.fromkeys(
        (one.workload, one.optimizer, one.method, one.multiple, one.lr) for one in planned
    ):
        own = [run for seed in seeds if (run := of[workload, optimizer, method, lr, seed])]
        if len(own) < len(seeds):
            continue
        base = [of.get((workload, optimizer, BASELINE, lr, seed)) for seed in seeds]
        accuracies, losses = [run.test_accuracy for run in own], [run.test_loss for run in own]
        base_accuracies = [None if run is None else run.test_accuracy for run in base]
        base_losses = [None if run is None else run.test_loss for run in base]
        rows.append(
            {
                "workload": workload,
                "optimizer": optimizer,
                "method": method,
                "multiple": multiple,
                "lr": lr,
                **{f"accuracy_seed_{seed}": accuracy for seed, accuracy in zip(seeds, accuracies, strict=True)},
                **{f"loss_seed_{seed}": loss for seed, loss in zip(seeds, losses, strict=True)},
                "accuracy_mean": mean_of_all(accuracies),
                "test_loss_mean": mean_of_all(losses),
                "train_loss_mean": mean_of_all([run.train_loss for run in own]),
                "diverged": sum(run.diverged_at is not None for run in own),
                "accuracy_to_sync_points": mean_change(accuracies, base_accuracies, points),
                "loss_to_sync_percent": mean_change(losses, base_losses, percent),
            }
        )
    return rows


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Return for every workload, optimizer and method the result at the best learning rate of synchronous training.

    Each row also holds the largest rate up to which no seed fails, at any rate up to it that was tried.
    """
    summary = []
    by_rate = sorted(rows, key=lambda row: row["lr"])
    for (workload, optimizer), some in grouped(by_rate, "workload", "optimizer").items():
        methods = grouped(some, "method")
        synchronous = [row for row in methods.get(BASELINE, []) if row["accuracy_mean"] is not None]
        lr = min(synchronous, key=partial(_badness, workload), default={}).get("lr")
        least = CONVERGED * max((row["accuracy_mean"] for row in synchronous), default=0.0)
        several = len(methods.get(BASELINE, [])) > 1
        sync_limit = _stable_up_to(methods[BASELINE], least) if several else None
        for method in (method for method in METHODS if method in methods):
            own = methods[method]
            limit = _stable_up_to(own, least)
            tried = [row["lr"] for row in own]
            far_enough = sync_limit is not None and len(tried) > 1 and max(tried) >= STABILITY * sync_limit
            at_best: Row = next((row for row in own if row["lr"] == lr), {})
            good = (row for row in own if row["accuracy_mean"] is not None)
            own_best: Row = min(good, key=partial(_badness, workload), default={})
            compared = ("accuracy_mean", "accuracy_to_sync_points", "test_loss_mean", "loss_to_sync_percent")
            summary.append(
                {
                    "workload": workload,
                    "optimizer": optimizer,
                    "method": method,
                    "lr": lr,
                    **{name: at_best.get(name) for name in compared},
                    **{f"own_best_{name}": own_best.get(name) for name in ("lr", "accuracy_mean", "test_loss_mean")},
                    "stable_up_to_lr": limit,
                    "target": verdict(workload, method, at_best),
                    "stability": stability(method, limit, sync_limit) if far_enough else "",
                }
            )
    return summary


def _badness(workload: str, row: Row) -> float:
    return float(row["test_loss_mean"] if WORKLOADS[workload].judged_by_loss else -row["accuracy_mean"])


def _stable_up_to(rows: Sequence[Row], least: float) -> float | None:
    """Return the largest rate of ``rows``, sorted by rate, before the first at which a seed ends below ``least``.

    Rates that are merely too low to get anywhere do not count.
    """
    limit = None
    for row in rows:
        accuracies = [value for name, value in row.items() if name.startswith("accuracy_seed_")]
        if all(value is not None and value >= least for value in accuracies):
            limit = row["lr"]
        elif limit is not None or row["diverged"]:
            break
    return limit


def verdict(workload: str, method: str, row: Row) -> str:
    """Return "met" or "MISSED" for a method's target at a rate; "" if it has none, or nothing to compare it with."""
    if method not in MOST_LOST or not row:
        return ""
    by_loss = WORKLOADS[workload].judged_by_loss
    cost, most = cost_of(row, "sync", by_loss=by_loss), MOST_LOST[method] * (LOSS_PERCENT_PER_POINT if by_loss else 1)
    return "met" if cost is not None and cost <= most else "MISSED"


def stability(method: str, limit: float | None, sync_limit: float | None) -> str:
    """Return "met" or "MISSED" for a method's stability; "" if it has no target, or nothing to compare it with."""
    if method not in MOST_LOST or sync_limit is None:
        return ""
    return "met" if limit is not None and limit >= STABILITY * sync_limit else "MISSED"


def publish(rows: list[Row], runs: Mapping[str, Run], folder: Path) -> None:
    """Save the rows, their summary and their figure, and print the summary."""
    summary = summarize(rows)
    target = {
        "points_of_accuracy_lost_at_most": MOST_LOST,
        "percent_of_loss_for_a_point": LOSS_PERCENT_PER_POINT,
        "stable_up_to_share_of_sync": STABILITY,
    }
    simulated_tables.publish("staleness", rows, summary, runs, {"target": target}, folder, draw)
    command.show("At the best learning rate of synchronous training", [_texts(row) for row in summary])


def _texts(row: Row) -> dict[str, str]:
    text = partial(command.text_of, row)
    return {
        "workload": f"{row['workload']}, {row['optimizer']}",
        "method": row["method"],
        "lr": text("lr", "g"),
        **texts_next_to_sync(row),
        "target": row["target"],
        "stable to": f"{text('stable_up_to_lr', 'g')} {row['stability']}",
    }


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("staleness", __doc__)
    default = [name for name in WORKLOADS if name != "digits"]
    options.add_argument(
        "--workloads", nargs="+", default=default, metavar="NAME", help=f"any of {', '.join(WORKLOADS)}"
    )
    simulated_runs.add_options(options)
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"workloads": WORKLOADS})
    command.check_alone("staleness", by_torchrun, "it simulates the ranks")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    planned = plan(arguments.workloads, seeds=simulated_runs.seeds_of(arguments), quick=arguments.quick)
    done = simulated_runs.finished_runs(planned, arguments, "staleness", console)
    rows = tabulate(planned, done)
    if not rows:
        raise UserInputError("--finished must find all seeds of a method at a learning rate; there is none yet")
    publish(rows, done, arguments.output)


if __name__ == "__main__":
    command.run(main)
