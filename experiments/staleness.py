"""What staleness costs in accuracy, and what predictions take away of it.

    python -m experiments.staleness                               staleness.csv, staleness_summary.csv, staleness.png
    python -m experiments.staleness --workloads mlp --optimizers sgd --methods sync local stale --seeds 1

Every method trains with every optimizer at learning rates around the best one of synchronous training, on four ranks,
which are simulated exactly in one process (experiments/simulation.py). A run is named by the words that
``pipesgd.train`` would be given for it. One that diverges is a result as well. Finished runs are kept in
staleness.runs.json in the output folder: the same command makes only those that are missing.
"""

from __future__ import annotations

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

from experiments import command, contenders
from experiments.iteration_times import COLOURS
from experiments.kept_runs import KeptRuns
from experiments.results import Row, provenance, save, save_panels
from experiments.simulation import SimulatedRanks
from pipesgd import evaluation
from pipesgd.checks import check_one_of
from pipesgd.command_line import parse as parse_training
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.launch import Ranks
from pipesgd.optimization import build_optimizer, build_schedule
from pipesgd.workloads import DataSplits, ShardedBatches, evaluation_batches

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

WORLD_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and for how long."""

    words: str
    iterations: int
    """Three epochs of the mlp, fewer of what takes longer."""


WORKLOADS = {
    "mlp": Workload(
        words="--dataset fashion-mnist --model mlp --hidden-sizes 500 500 --batch-size 32", iterations=1404
    ),
    "convnet": Workload(words="--dataset fashion-mnist --model convnet --batch-size 32", iterations=468),
    "resnet18": Workload(words="--dataset fashion-mnist --model resnet18 --batch-size 8", iterations=400),
    "digits": Workload(words="--dataset digits --model mlp --hidden-sizes 64 --batch-size 16", iterations=100),
}
"""The last one is for trying out."""
OPTIMIZERS = {
    "sgd": ("--optimizer sgd --momentum 0.9", 0.05),
    "adamw": ("--optimizer adamw", 0.001),
    "adagrad": ("--optimizer adagrad", 0.01),
    "muon": ("--optimizer muon", 0.001),
}
"""Words, and the learning rate that the others are multiples of."""
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
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
SEEDS, QUICK_SEEDS, QUICK_ITERATIONS = 3, 1, 20
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
    optimizers: Sequence[str],
    methods: Sequence[str],
    multiples: Sequence[float],
    seeds: int,
    *,
    quick: bool,
) -> list[Planned]:
    """All runs, seed by seed."""
    planned = []
    for seed in range(seeds):
        for workload in workloads:
            iterations = QUICK_ITERATIONS if quick else WORKLOADS[workload].iterations
            for optimizer in optimizers:
                words, base = OPTIMIZERS[optimizer]
                for multiple in multiples:
                    lr = base * multiple
                    rest = f"{words} --lr {lr:g} --schedule one-cycle --iterations {iterations} --seed {seed}"
                    for method in methods:
                        how = METHODS[method].format(warmup=round(WARMUP * iterations))
                        planned.append(
                            Planned(
                                workload=workload,
                                optimizer=optimizer,
                                method=method,
                                multiple=multiple,
                                lr=lr,
                                seed=seed,
                                words=f"{WORKLOADS[workload].words} {how} {rest}",
                            )
                        )
    return planned


def simulate(words: str, world_size: int = WORLD_SIZE) -> Run:
    """What ``pipesgd.train`` with these words comes to on so many ranks."""
    begin = time.perf_counter()
    config = parse_training(shlex.split(words))
    optimization, pipeline = config.optimization, config.pipeline
    torch.manual_seed(optimization.seed)
    data, model = contenders.build(config)
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
    git = provenance()["git"]
    commit = None if git is None else git["commit"] + (" and changes" if git["dirty"] else "")
    for iteration in range(iterations):
        losses.append(float(np.mean(ranks.iterate(_loss, next(batches)))))
        schedule.step()
        if not losses[-1] <= DIVERGED_LOSS:
            return Run(commit=commit, seconds=time.perf_counter() - begin, diverged_at=iteration)
    ranks.flush()
    parts = evaluation.sums(
        model, evaluation_batches(data.test, batch_size=500, rank=0, world_size=1), torch.device("cpu")
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
    if len(missing) < len(planned):
        _say(console, f"{len(planned) - len(missing)} of {len(planned)} runs are there; --fresh makes them again")
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
    """A row for every workload, optimizer, method and learning rate, with all its seeds."""
    seeds = sorted({one.seed for one in planned})
    of = {(one.workload, one.optimizer, one.method, one.lr, one.seed): runs[one.words] for one in planned}
    rows = []
    for workload, optimizer, method, multiple, lr in dict.fromkeys(
        (one.workload, one.optimizer, one.method, one.multiple, one.lr) for one in planned
    ):
        own = [of[workload, optimizer, method, lr, seed] for seed in seeds]
        base = [of.get((workload, optimizer, BASELINE, lr, seed)) for seed in seeds]
        good = [run for run in own if run.test_accuracy is not None]
        lost = [
            100 * (run.test_accuracy - other.test_accuracy)
            for run, other in zip(own, base, strict=True)
            if run.test_accuracy is not None and other is not None and other.test_accuracy is not None
        ]
        whole = len(good) == len(own)  # a mean over the seeds that survived would flatter
        rows.append(
            {
                "workload": workload,
                "optimizer": optimizer,
                "method": method,
                "multiple": multiple,
                "lr": lr,
                **{f"accuracy_seed_{seed}": run.test_accuracy for seed, run in zip(seeds, own, strict=True)},
                "accuracy_mean": _mean([run.test_accuracy for run in good]) if whole else None,
                "test_loss_mean": _mean([run.test_loss for run in good]) if whole else None,
                "train_loss_mean": _mean([run.train_loss for run in good]) if whole else None,
                "diverged": len(own) - len(good),
                "difference_to_sync_points": round(float(np.mean(lost)), 6) if len(lost) == len(own) else None,
            }
        )
    return rows


def summarize(rows: Sequence[Row]) -> list[Row]:
    """For every workload, optimizer and method: what it comes to at the best learning rate of synchronous training.

    And the largest multiple up to which no seed diverges, at any multiple up to it.
    """
    summary = []
    for workload, optimizer in dict.fromkeys((row["workload"], row["optimizer"]) for row in rows):
        cell = [row for row in rows if (row["workload"], row["optimizer"]) == (workload, optimizer)]
        synchronous = [row for row in cell if row["method"] == BASELINE and row["accuracy_mean"] is not None]
        best = max(synchronous, key=lambda row: row["accuracy_mean"], default=None)
        for method in dict.fromkeys(row["method"] for row in cell):
            own = sorted((row for row in cell if row["method"] == method), key=lambda row: row["lr"])
            stable: list[Row] = []
            for row in own:
                if row["diverged"]:
                    break
                stable.append(row)
            at_best = next((row for row in own if best is not None and row["lr"] == best["lr"]), None)
            summary.append(
                {
                    "workload": workload,
                    "optimizer": optimizer,
                    "method": method,
                    "lr": None if best is None else best["lr"],
                    "accuracy_mean": None if at_best is None else at_best["accuracy_mean"],
                    "difference_to_sync_points": None if at_best is None else at_best["difference_to_sync_points"],
                    "stable_up_to_lr": stable[-1]["lr"] if stable else None,
                    "best_accuracy_mean": max((r["accuracy_mean"] for r in own if r["accuracy_mean"]), default=None),
                    "target": verdict(method, at_best),
                }
            )
    return summary


def verdict(method: str, row: Row | None) -> str:
    """Whether the method meets its target; empty where there is none, or nothing to compare with."""
    if method not in MOST_LOST or row is None:
        return ""
    lost = row["difference_to_sync_points"]
    return "met" if lost is not None and lost >= -MOST_LOST[method] else "MISSED"


def plot(rows: Sequence[Row], axes: Axes) -> Axes:
    """For one workload and optimizer: the mean accuracy over the learning rate; methods that diverge end early."""
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        own = sorted((r for r in rows if r["method"] == method and r["accuracy_mean"]), key=lambda row: row["lr"])
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": "-" if number < len(COLOURS) else "--",
            "marker": "os^Dv<>P"[number % 8],
        }
        axes.plot([r["lr"] for r in own], [100 * r["accuracy_mean"] for r in own], label=method, **style)
    best = max((row["accuracy_mean"] or 0.0 for row in rows), default=1.0)
    axes.set_xscale("log", base=2)
    axes.set_ylim(100 * best - 8, 100 * best + 0.5)
    axes.set(
        title=f"{rows[0]['workload']}, {rows[0]['optimizer']}",
        xlabel="peak learning rate",
        ylabel="test accuracy, mean of seeds (%)",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small", loc="lower left")
    return axes


def publish(rows: list[Row], runs: Mapping[str, Run], folder: Path, console: Console) -> None:
    """Save the rows, their summary and their figure, and print the summary."""
    summary = summarize(rows)
    extra = {
        "world_size": WORLD_SIZE,
        "simulated": True,
        "target": {"difference_to_sync_points_at_least": {name: -lost for name, lost in MOST_LOST.items()}},
        "runs": len(runs),
        "runs_made_with": sorted({str(run.commit) for run in runs.values()}),
    }
    save("staleness", rows, extra=extra, folder=folder)
    save("staleness_summary", summary, extra=extra, folder=folder)
    cells = list(dict.fromkeys((row["workload"], row["optimizer"]) for row in rows))
    panels = [partial(plot, [row for row in rows if (row["workload"], row["optimizer"]) == cell]) for cell in cells]
    save_panels("staleness", panels, size=(6.0 * len(panels), 5.0), folder=folder)
    command.show("Test accuracy at the best learning rate of synchronous training", [_texts(row) for row in summary])


def _texts(row: Row) -> dict[str, str]:
    def text(name: str, form: str, factor: float = 1.0) -> str:
        return "-" if row[name] is None else format(factor * row[name], form)

    return {
        "workload": row["workload"],
        "optimizer": row["optimizer"],
        "method": row["method"],
        "lr": text("lr", "g"),
        "accuracy %": text("accuracy_mean", ".2f", 100),
        "to sync": text("difference_to_sync_points", "+.2f"),
        "stable up to": text("stable_up_to_lr", "g"),
        "best %": text("best_accuracy_mean", ".2f", 100),
        "target": row["target"],
    }


def _mean(values: Sequence[float | None]) -> float:
    return float(np.mean([value for value in values if value is not None]))


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


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
    add("--workloads", nargs="+", default=default, metavar="NAME", help=f"of {', '.join(WORKLOADS)}")
    add("--optimizers", nargs="+", default=list(OPTIMIZERS), metavar="NAME", help=f"of {', '.join(OPTIMIZERS)} (all)")
    add("--methods", nargs="+", default=list(METHODS), metavar="NAME", help=f"of {'; '.join(METHODS)} (all)")
    add("--multiples", nargs="+", default=list(MULTIPLES), type=_multiple, help="of the optimizer's learning rate")
    add("--seeds", type=number(1), help=f"how many ({SEEDS}; quick: {QUICK_SEEDS}, {QUICK_ITERATIONS} iterations)")
    add("--processes", type=number(1), default=os.cpu_count(), help="runs at a time (all cores)")
    add("--fresh", action="store_true", help="forget the finished runs in the output folder")
    arguments = command.parse(options, words)
    known = {"workloads": WORKLOADS, "optimizers": OPTIMIZERS, "methods": METHODS}
    for name, choices in known.items():
        given = getattr(arguments, name)
        for one in given:
            check_one_of(f"--{name}", one, list(choices))
            if given.count(one) > 1:
                raise UserInputError(f"--{name} must name each once; got {one!r} twice")
    if by_torchrun:
        raise UserInputError("staleness must be run without torchrun: it simulates the ranks")
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
    done = compute(planned, runs, console, processes=arguments.processes)
    publish(tabulate(planned, done), done, arguments.output, console)


if __name__ == "__main__":
    command.run(main)
