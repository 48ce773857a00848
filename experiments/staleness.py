"""What staleness costs in accuracy, and what predictions take away of it.

    python -m experiments.staleness                               staleness.csv, staleness_summary.csv, staleness.png
    python -m experiments.staleness --workloads mlp --optimizers sgd --methods sync local stale --seeds 1
    python -m experiments.staleness --finished                    the same files, of the runs that are there

Every method trains with every optimizer at learning rates around the best one of synchronous training, on four ranks,
which are simulated exactly in one process (experiments/simulation.py). A run is named by the words that
``pipesgd.train`` would be given for it. One that diverges is a result as well. All of it takes a day of two cores.
Finished runs are kept in staleness.runs.json in the output folder: the same command makes only those that are missing.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import shlex
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import command
from experiments.iteration_times import COLOURS
from experiments.kept_runs import KeptRuns
from experiments.results import Row, code_state, save, save_panels
from experiments.simulation import SimulatedRanks
from pipesgd import evaluation
from pipesgd.command_line import parse as parse_training
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.launch import Ranks
from pipesgd.optimization import build_optimizer, build_schedule
from pipesgd.workloads import DataSplits, ShardedBatches, evaluation_batches, make_workload

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

WORLD_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and for how long; and what is tried on it where the command does not say."""

    words: str
    iterations: int
    """Three epochs of the mlp, fewer of what takes longer."""
    optimizers: tuple[str, ...]
    methods: tuple[str, ...] | None = None
    """None: all."""
    judged_by_loss: bool = False
    """Test loss, where accuracy is not what people look at."""


WORKLOADS = {
    "mlp": Workload(
        words="--dataset fashion-mnist --model mlp --hidden-sizes 500 500 --batch-size 32",
        iterations=1404,
        optimizers=("sgd", "adamw", "adagrad"),
    ),
    "convnet": Workload(
        words="--dataset fashion-mnist --model convnet --batch-size 32",
        iterations=468,
        optimizers=("sgd", "adamw", "adagrad"),
    ),
    "transformer": Workload(
        words="--dataset python-stdlib --model transformer --batch-size 8",
        iterations=600,
        optimizers=("adamw", "muon"),
        judged_by_loss=True,
    ),
    "resnet18": Workload(
        words="--dataset fashion-mnist --model resnet18 --batch-size 8",
        iterations=200,
        optimizers=("sgd", "adamw"),
        methods=("sync", "stale", "eager", "local", "eager, width 3"),
    ),
    "digits": Workload(
        words="--dataset digits --model mlp --hidden-sizes 64 --batch-size 16", iterations=100, optimizers=("sgd",)
    ),
}
"""The last one is for trying out. Muon's products in bfloat16 take most of an iteration of the mlp on a CPU."""
OPTIMIZERS = {
    "sgd": ("--optimizer sgd --momentum 0.9", 0.05),
    "adamw": ("--optimizer adamw", 0.001),
    "adagrad": ("--optimizer adagrad", 0.01),
    "muon": ("--optimizer muon", 0.001),
}
"""Words, and the learning rate that the others are multiples of."""
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
FEW_MULTIPLES = (0.25, 1.0, 2.0, 4.0)
CLOSELY = ("sync", "stale", "eager", "local")
"""Methods that are tried at all multiples; the others at a few."""
METHODS = {
    "sync": "--width 1",
    "stale": "--width 2 --prediction none",
    "stale, warm-up": "--width 2 --prediction none --warmup-iterations {warmup}",
    "stale, guard": "--width 2 --prediction none --guard",
    "eager": "--width 2 --prediction eager",
    "local": "--width 2 --prediction local",
    "previous": "--width 2 --prediction previous",
    "nesterov": "--width 2 --prediction nesterov",
    "spectrain": "--width 2 --prediction spectrain",
    "dc": "--width 2 --prediction dc",
    "stale, width 3": "--width 3 --prediction none",
    "eager, width 3": "--width 3 --prediction eager",
    "local, width 3": "--width 3 --prediction local",
    "eager, int8": "--width 2 --prediction eager --codec int8",
    "eager, int4": "--width 2 --prediction eager --codec int4",
}
WARMUP = 0.1
"""Share of the iterations that a warm-up takes."""
BASELINE = "sync"
MOST_LOST = {"eager": 0.2, "eager, width 3": 0.4, "eager, int8": 0.3, "eager, int4": 0.3}
"""Points of accuracy that the default may lose, in the mean over seeds, at the best learning rate of synchronous
training."""
LOSS_PERCENT_PER_POINT = 2.5
"""What a point of accuracy is worth where the loss is judged: 0.2 points, or half a percent of the loss."""
CONVERGED = 0.9
"""A learning rate at which a seed ends below this share of the best synchronous accuracy is one that failed."""
STABILITY = 0.5
"""Share of the largest rate of synchronous training up to which the default must not fail either."""
SEEDS, QUICK_SEEDS, QUICK_ITERATIONS = 3, 1, 20
PANELS_ABREAST = 3
DIVERGED_LOSS = 20.0
"""A training loss above this, or none, ends a run: of ten classes, chance has 2.3."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run came to."""

    commit: str | None
    """Of the code that it was made with; None where there is no repository."""
    seconds: float
    diverged_at: int | None
    """The iteration, if the loss went beyond all bounds; then there is nothing else."""
    train_loss: float | None = None
    """Mean over ranks and the last tenth of the iterations."""
    test_loss: float | None = None
    test_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run to be made."""

    workload: str
    optimizer: str
    method: str
    multiple: float
    lr: float
    seed: int
    words: str
    """Of ``pipesgd.train``, all but --output."""


def plan(
    workloads: Sequence[str],
    optimizers: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    multiples: Sequence[float] | None = None,
    seeds: int = SEEDS,
    *,
    quick: bool = False,
) -> list[Planned]:
    """All runs, seed by seed. None: what the workload, and the method, are tried with."""
    planned = []
    for seed, name in itertools.product(range(seeds), workloads):
        workload = WORKLOADS[name]
        iterations = QUICK_ITERATIONS if quick else workload.iterations
        for optimizer, multiple in itertools.product(optimizers or workload.optimizers, multiples or MULTIPLES):
            words, base = OPTIMIZERS[optimizer]
            lr = base * multiple
            rest = f"{words} --lr {lr:g} --schedule one-cycle --iterations {iterations} --seed {seed}"
            for method in methods or workload.methods or METHODS:
                if not multiples and method not in CLOSELY and multiple not in FEW_MULTIPLES:
                    continue
                how = METHODS[method].format(warmup=round(WARMUP * iterations))
                planned.append(
                    Planned(
                        workload=name,
                        optimizer=optimizer,
                        method=method,
                        multiple=multiple,
                        lr=lr,
                        seed=seed,
                        words=f"{workload.words} {how} {rest}",
                    )
                )
    return planned


def simulate(words: str, world_size: int = WORLD_SIZE) -> Run:
    """What ``pipesgd.train`` with these words comes to on so many ranks."""
    begin = time.perf_counter()
    config = parse_training(shlex.split(words))
    optimization, pipeline = config.optimization, config.pipeline
    torch.manual_seed(optimization.seed)
    data, model = make_workload(config)
    torch.manual_seed(optimization.seed * world_size)
    optimizer = build_optimizer(optimization, model)
    iterations = optimization.iterations
    assert iterations is not None
    schedule = build_schedule(optimization, optimizer, iterations)
    ranks = SimulatedRanks(
        model,
        optimizer,
        world_size=world_size,
        width=pipeline.width,
        warmup_iterations=pipeline.warmup_iterations,
        prediction=pipeline.prediction,
        guard=pipeline.guard,
        codec=config.compression.codec,
    )
    batches = zip(*(_batches(config, data, rank, world_size) for rank in range(world_size)), strict=True)
    losses: list[float] = []
    commit = code_state()
    for iteration in range(iterations):
        losses.append(float(np.mean(ranks.iterate(_loss, next(batches)))))
        schedule.step()
        if not losses[-1] <= DIVERGED_LOSS:
            return Run(commit=commit, seconds=time.perf_counter() - begin, diverged_at=iteration)
    ranks.flush()
    parts = evaluation.sums(
        model, evaluation_batches(data.test, batch_size=100, rank=0, world_size=1), torch.device("cpu")
    )
    worth = evaluation.mean([parts])
    return Run(
        commit=commit,
        seconds=time.perf_counter() - begin,
        diverged_at=None,
        train_loss=float(np.mean(losses[-max(1, iterations // 10) :])),
        test_loss=worth.loss,
        test_accuracy=worth.accuracy,
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return cross_entropy(*evaluation.by_label(model(inputs), labels))


def _batches(config: TrainConfig, data: DataSplits, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    shards = ShardedBatches(
        data.train,
        batch_size=config.data.batch_size,
        rank=rank,
        world_size=world_size,
        seed=config.optimization.seed,
    )
    return shards.from_iteration(0)


def _start_worker() -> None:
    torch.set_num_threads(1)


def compute(planned: Sequence[Planned], runs: KeptRuns[Run], console: Console, *, processes: int) -> dict[str, Run]:
    """The runs of the plan by their words; those that are not there yet are made now, ``processes`` at a time."""
    done = runs.load()
    missing = [one for one in planned if one.words not in done]
    command.say_kept(console, len(planned), len(missing))
    context = multiprocessing.get_context("spawn")  # a fork would copy the state of torch's threads
    with (
        command.progress(console, "staleness", len(missing)) as advance,
        ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker) as pool,
    ):
        futures = {pool.submit(simulate, one.words): one for one in missing}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                one, run = futures[future], future.result()
                runs.add(one.words, run)
                done[one.words] = run
                name = f"{number}/{len(missing)} {one.workload}, {one.optimizer}, lr {one.lr:g}, {one.method}"
                came_to = "diverged" if run.test_accuracy is None else f"{run.test_accuracy:.2%}"
                advance(1, f"{name}: {came_to} in {run.seconds:.0f} s")
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for what has not begun
    return {one.words: done[one.words] for one in planned}


def tabulate(planned: Sequence[Planned], runs: Mapping[str, Run]) -> list[Row]:
    """A row for every workload, optimizer, method and learning rate, with all its seeds; none if one is missing."""
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
        rows.append(
            {
                "workload": workload,
                "optimizer": optimizer,
                "method": method,
                "multiple": multiple,
                "lr": lr,
                **{f"accuracy_seed_{seed}": run.test_accuracy for seed, run in zip(seeds, own, strict=True)},
                "accuracy_mean": _mean([run.test_accuracy for run in own]),
                "test_loss_mean": _mean([run.test_loss for run in own]),
                "train_loss_mean": _mean([run.train_loss for run in own]),
                "diverged": sum(run.diverged_at is not None for run in own),
                "accuracy_to_sync_points": _mean(
                    [
                        100 * (run.test_accuracy - other.test_accuracy)
                        if other and run.test_accuracy is not None and other.test_accuracy is not None
                        else None
                        for run, other in zip(own, base, strict=True)
                    ]
                ),
                "loss_to_sync_percent": _mean(
                    [
                        100 * (run.test_loss / other.test_loss - 1)
                        if other and run.test_loss is not None and other.test_loss is not None
                        else None
                        for run, other in zip(own, base, strict=True)
                    ]
                ),
            }
        )
    return rows


def summarize(rows: Sequence[Row]) -> list[Row]:
    """For every workload, optimizer and method: what it comes to at the best learning rate of synchronous training.

    And the largest rate up to which no seed fails, at any rate up to it that was tried.
    """
    summary = []
    for workload, optimizer in dict.fromkeys((row["workload"], row["optimizer"]) for row in rows):
        cell = sorted(
            (row for row in rows if (row["workload"], row["optimizer"]) == (workload, optimizer)),
            key=lambda row: row["lr"],
        )
        synchronous = [row for row in cell if row["method"] == BASELINE and row["accuracy_mean"] is not None]
        best = min(synchronous, key=partial(_badness, workload), default=None)
        least = CONVERGED * max((row["accuracy_mean"] for row in synchronous), default=0.0)
        sync_limit = _stable_up_to([row for row in cell if row["method"] == BASELINE], least)
        for method in dict.fromkeys(row["method"] for row in rows if row in cell):
            own = [row for row in cell if row["method"] == method]
            limit = _stable_up_to(own, least)
            at_best = next((row for row in own if best is not None and row["lr"] == best["lr"]), None)
            own_best = min((row for row in own if row["accuracy_mean"]), key=partial(_badness, workload), default=None)
            summary.append(
                {
                    "workload": workload,
                    "optimizer": optimizer,
                    "method": method,
                    "lr": None if best is None else best["lr"],
                    **{
                        name: None if at_best is None else at_best[name]
                        for name in (
                            "accuracy_mean",
                            "accuracy_to_sync_points",
                            "test_loss_mean",
                            "loss_to_sync_percent",
                        )
                    },
                    "own_best_lr": None if own_best is None else own_best["lr"],
                    "own_best_accuracy_mean": None if own_best is None else own_best["accuracy_mean"],
                    "own_best_test_loss_mean": None if own_best is None else own_best["test_loss_mean"],
                    "stable_up_to_lr": limit,
                    "target": verdict(workload, method, at_best),
                    "stability": stability(method, limit, sync_limit),
                }
            )
    return summary


def _badness(workload: str, row: Row) -> float:
    return float(row["test_loss_mean"] if WORKLOADS[workload].judged_by_loss else -row["accuracy_mean"])


def _stable_up_to(rows: Sequence[Row], least: float) -> float | None:
    """The largest rate of ``rows``, sorted by rate, before the first at which a seed ends below ``least``.

    Rates that are only too low to get anywhere do not count.
    """
    limit = None
    for row in rows:
        accuracies = [value for name, value in row.items() if name.startswith("accuracy_seed_")]
        if all(value is not None and value >= least for value in accuracies):
            limit = row["lr"]
        elif limit is not None or row["diverged"]:
            break
    return limit


def verdict(workload: str, method: str, row: Row | None) -> str:
    """Whether the method meets its target at a rate; empty where there is none, or nothing to compare with."""
    if method not in MOST_LOST or row is None:
        return ""
    if WORKLOADS[workload].judged_by_loss:
        more = row["loss_to_sync_percent"]
        return "met" if more is not None and more <= LOSS_PERCENT_PER_POINT * MOST_LOST[method] else "MISSED"
    lost = row["accuracy_to_sync_points"]
    return "met" if lost is not None and lost >= -MOST_LOST[method] else "MISSED"


def stability(method: str, limit: float | None, sync_limit: float | None) -> str:
    """Whether the method is stable far enough; empty where that is not asked for, or nothing to compare with."""
    if method not in MOST_LOST or sync_limit is None:
        return ""
    return "met" if limit is not None and limit >= STABILITY * sync_limit else "MISSED"


def plot(rows: Sequence[Row], axes: Axes) -> Axes:
    """For one workload and optimizer: accuracy, or loss, over the learning rate; methods that diverge end early."""
    workload, optimizer = rows[0]["workload"], rows[0]["optimizer"]
    by_loss = WORKLOADS[workload].judged_by_loss
    column, factor = ("test_loss_mean", 1) if by_loss else ("accuracy_mean", 100)
    good = [row for row in rows if row["accuracy_mean"] is not None]
    for number, method in enumerate(METHODS):
        own = sorted((row for row in good if row["method"] == method), key=lambda row: row["lr"])
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": "-" if number < len(COLOURS) else "--",
            "marker": "os^Dv<>P"[number % 8],
            "linewidth": 2.5 if method in CLOSELY else 1.0,
        }
        if own:
            axes.plot([row["lr"] for row in own], [factor * row[column] for row in own], label=method, **style)
    values = [factor * row[column] for row in good]
    if values:
        axes.set_ylim(*((0.98 * min(values), 1.3 * min(values)) if by_loss else (max(values) - 8, max(values) + 0.5)))
    axes.set_xscale("log", base=2)
    axes.set(
        title=f"{workload}, {optimizer}",
        xlabel="peak learning rate",
        ylabel="test loss (nats), mean of seeds" if by_loss else "test accuracy (%), mean of seeds",
    )
    axes.set_xticks(sorted({row["lr"] for row in rows}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes


def publish(rows: list[Row], runs: Mapping[str, Run], folder: Path) -> None:
    """Save the rows, their summary and their figure, and print the summary."""
    summary = summarize(rows)
    extra = {
        "world_size": WORLD_SIZE,
        "simulated": True,
        "target": {
            "points_of_accuracy_lost_at_most": MOST_LOST,
            "percent_of_loss_for_a_point": LOSS_PERCENT_PER_POINT,
            "stable_up_to_share_of_sync": STABILITY,
        },
        "runs": len(runs),
        "runs_made_with": sorted({str(run.commit) for run in runs.values()}),
    }
    save("staleness", rows, extra=extra, folder=folder)
    save("staleness_summary", summary, extra=extra, folder=folder)
    cells = list(dict.fromkeys((row["workload"], row["optimizer"]) for row in rows))
    panels = [partial(plot, [row for row in rows if (row["workload"], row["optimizer"]) == cell]) for cell in cells]
    lines = math.ceil(len(panels) / PANELS_ABREAST)
    size = (7.0 * min(len(panels), PANELS_ABREAST), 4.5 * lines)
    save_panels("staleness", panels, size=size, rows=lines, folder=folder)
    command.show("At the best learning rate of synchronous training", [_texts(row) for row in summary])


def _texts(row: Row) -> dict[str, str]:
    def text(name: str, form: str, factor: float = 1.0) -> str:
        return "-" if row[name] is None else format(factor * row[name], form)

    return {
        "workload": f"{row['workload']}, {row['optimizer']}",
        "method": row["method"],
        "lr": text("lr", "g"),
        "accuracy %": text("accuracy_mean", ".2f", 100),
        "to sync": text("accuracy_to_sync_points", "+.2f"),
        "loss": text("test_loss_mean", ".4f"),
        "to sync %": text("loss_to_sync_percent", "+.2f"),
        "target": row["target"],
        "stable to": f"{text('stable_up_to_lr', 'g')} {row['stability']}",
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one is missing: a mean over the seeds that survived would flatter. Rounded, for targets' very edges."""
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 6) if len(known) == len(values) else None


def _multiple(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)) and value > 0:
            return value
    raise ArgumentTypeError(f"must be numbers above 0; got {text!r}")


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """The options; raises ``UserInputError``."""
    options = command.parser("staleness", __doc__)
    add, number = options.add_argument, command.at_least
    default = [name for name in WORKLOADS if name != "digits"]
    own = "those of each workload"
    add("--workloads", nargs="+", default=default, metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    add("--optimizers", nargs="+", metavar="NAME", help=f"of {', '.join(OPTIMIZERS)} ({own})")
    add("--methods", nargs="+", metavar="NAME", help=f"of {'; '.join(METHODS)} ({own})")
    add("--multiples", nargs="+", type=_multiple, help=f"of the optimizer's learning rate ({own})")
    add("--seeds", type=number(1), help=f"how many ({SEEDS}; quick: {QUICK_SEEDS}, {QUICK_ITERATIONS} iterations)")
    add("--processes", type=number(1), default=os.cpu_count(), help="runs at a time (all cores)")
    one_of = options.add_mutually_exclusive_group()
    one_of.add_argument("--fresh", action="store_true", help="forget the finished runs in the output folder")
    one_of.add_argument(
        "--finished", action="store_true", help="make no runs: publish rows of which all seeds are there"
    )
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"workloads": WORKLOADS, "optimizers": OPTIMIZERS, "methods": METHODS})
    command.check_alone("staleness", by_torchrun, "it simulates the ranks")
    arguments.seeds = arguments.seeds or (QUICK_SEEDS if arguments.quick else SEEDS)
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """The command."""
    arguments = ranks.agree("options", lambda: parse(words, ranks.by_torchrun))
    runs = KeptRuns(arguments.output / "staleness.runs.json", Run)
    if arguments.fresh:
        runs.forget()
    chosen = (arguments.workloads, arguments.optimizers, arguments.methods, arguments.multiples, arguments.seeds)
    planned = plan(*chosen, quick=arguments.quick)
    if arguments.finished:
        kept = runs.load()
        done = {one.words: run for one in planned if (run := kept.get(one.words))}
        command.say(console, f"{len(done)} of {len(planned)} runs are there")
    else:
        done = compute(planned, runs, console, processes=arguments.processes)
    rows = tabulate(planned, done)
    if not rows:
        raise UserInputError("--finished must find all seeds of a method at a learning rate; there is none yet")
    publish(rows, done, arguments.output)


if __name__ == "__main__":
    command.run(main)
