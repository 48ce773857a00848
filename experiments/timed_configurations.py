"""A job that times the mean iteration of several configurations of pipesgd.train in turn, on the same ranks.

    torchrun ... -m experiments.timed_configurations PLAN.json TIMES.json

PLAN.json is a list of passes, each a list of {"words": arguments of pipesgd.train, "iterations": number to time}, in
any order. Rank 0 writes TIMES.json: for every pass a list of {"seconds": of an iteration, the median of ranks,
"fastest_seconds" and "slowest_seconds": those of the ranks that differ most, "communication_seconds" and
"exposed_seconds": those of an iteration's communication, and of waits for it, the mean of ranks, "wire_bytes": bytes of
an iteration that the reports of all ranks have, "memory_bytes": most that a rank takes beyond data and model,
"product_seconds": mean time of a fixed product of matrices before and after, which shows how fast the machine was just
then, "stolen": the share of the cores' time that a hypervisor gave to others meanwhile, "cpu_share": the share that the
ranks used}. A configuration that lost too much time is measured again at the end of its pass. All have the data, model
and batch size of the first one, and loader workers of their own. Starting a job takes longer than measuring a
configuration, and a machine's speed drifts, so the configurations share a job, which returns to each of them in every
pass. None keeps its process groups in between: an idle one's threads take 0.2 % of a core in every rank.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import nn

from experiments import command
from experiments.cpu_time import CpuTime
from experiments.footprint import PeakMemory
from pipesgd.calibration.machines import DISTURBED, StolenTime, product_seconds
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig
from pipesgd.data import ShardedBatches
from pipesgd.errors import UserInputError
from pipesgd.optim.build import build_optimizer
from pipesgd.ranks import Ranks
from pipesgd.run.forward_backward import forward_backward
from pipesgd.run.workload import load
from pipesgd.strategies import make_strategy
from pipesgd.strategy import StepReport

SCALER = torch.amp.GradScaler("cpu", enabled=False)


def mean_iteration(
    config: TrainConfig, model: nn.Module, batches: ShardedBatches, ranks: Ranks, iterations: int
) -> dict[str, float]:
    """Return the means of this many steady iterations on a copy of the model. Collective.

    The seconds are the median of ranks, and the memory is that of the rank with the most. Before those iterations, two
    fill the memory and make the connections, and others fill the pipeline. With local steps, windows do that, and
    ``iterations`` are whole windows.
    """
    model, untimed = copy.deepcopy(model).train(), (config.pipeline.width + 2) * config.windows.local_steps
    memory = PeakMemory()
    ranks.start_process_group("cpu", config.timeout)
    reports: list[StepReport] = []
    strategy = make_strategy(config, model, build_optimizer(config.optimization, model), SCALER, ranks)
    with contextlib.closing(strategy), contextlib.closing(batches.from_iteration(0)) as samples:
        for iteration in range(untimed + iterations):
            if iteration == untimed:
                begin = time.perf_counter()
            forward_backward(strategy, samples, config, SCALER, iteration)
            reports.append(strategy.step())
        seconds = (time.perf_counter() - begin) / iterations
        strategy.flush()
        peak = memory.nbytes()
    steady = reports[untimed:]
    own = (
        seconds,
        *(sum(report.seconds(what) for report in steady) / iterations for what in ("communication", "wait")),
        sum(report.wire_bytes for report in steady) / iterations,
        peak,
    )
    of_ranks = np.array(ranks.all_gather_object("times", own))  # (ranks, 5)
    ranks.leave()
    return {
        "seconds": float(np.median(of_ranks[:, 0])),
        "fastest_seconds": float(of_ranks[:, 0].min()),
        "slowest_seconds": float(of_ranks[:, 0].max()),
        "communication_seconds": float(of_ranks[:, 1].mean()),
        "exposed_seconds": float(of_ranks[:, 2].mean()),
        "wire_bytes": float(of_ranks[:, 3].sum()),
        "memory_bytes": float(of_ranks[:, 4].max()),
    }


def timed(
    config: TrainConfig, model: nn.Module, batches: ShardedBatches, ranks: Ranks, iterations: int
) -> dict[str, float]:
    """Measure one configuration in a pass. Collective."""
    before, stolen_time, cpu_time = product_seconds(ranks), StolenTime(), CpuTime()
    means = mean_iteration(config, model, batches, ranks, iterations)
    stolen, cpu_share = stolen_time.share(ranks), cpu_time.used(ranks).share
    return {
        **means,
        "product_seconds": (before + product_seconds(ranks)) / 2,
        "stolen": stolen,
        "cpu_share": cpu_share,
    }


def undisturbed(measure: Sequence[Callable[[], dict[str, float]]]) -> list[dict[str, float]]:
    """Measure all in this order, then the disturbed ones once more; return the less disturbed times."""
    found = [one() for one in measure]
    for index, one in enumerate(found):
        if one["stolen"] > DISTURBED:
            found[index] = min(one, measure[index](), key=lambda times: times["stolen"])
    return found


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the job."""
    if len(words) != 2:
        raise UserInputError(f"timed_configurations must be given two files, a plan and one for the times; got {words}")
    plan_file, times_file = map(Path, words)
    passes = ranks.raise_together("plan", lambda: json.loads(plan_file.read_text(encoding="utf-8")))
    configs = {one["words"]: parse_training(shlex.split(one["words"])) for one in passes[0]}
    first = next(iter(configs.values()))
    data, _, model, _ = ranks.raise_together("data and model", lambda: load(first, ranks))

    def measured(words: str, iterations: int) -> dict[str, float]:
        config = configs[words]
        batches = ShardedBatches(
            data.train,
            batch_size=config.samples_per_rank,
            rank=ranks.rank,
            world_size=ranks.world_size,
            seed=config.optimization.seed,
            loader_workers=config.data.workers,
        )
        return timed(config, model, batches, ranks, iterations)

    times = [undisturbed([partial(measured, **one) for one in of_pass]) for of_pass in passes]
    if ranks.rank == 0:
        times_file.write_text(json.dumps(times) + "\n", encoding="utf-8")
    ranks.all_gather_object("the end", None)


if __name__ == "__main__":
    command.run(main)
