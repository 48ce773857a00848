"""A job: the mean iteration of several configurations of pipesgd.train, one after the other, on the same ranks.

    torchrun ... -m experiments.timed_configurations PLAN.json TIMES.json

PLAN.json is a list of passes, each a list of {"words": of pipesgd.train, "iterations": to be timed}, in any order.
Rank 0 writes TIMES.json: for every pass a list of seconds. All have data, model and batch size of the first one. To
start a job takes longer than to measure a configuration, and a machine's speed drifts: so these share a job, which
comes back to each of them in every pass.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import nn

from experiments import command
from pipesgd.command_line import parse as parse_training
from pipesgd.computation import forward_backward, load
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.launch import Ranks
from pipesgd.optimization import build_optimizer
from pipesgd.strategies.base import Strategy
from pipesgd.strategies.make import make_strategy
from pipesgd.workloads import ShardedBatches

SCALER = torch.amp.GradScaler("cpu", enabled=False)


def start(config: TrainConfig, model: nn.Module, ranks: Ranks) -> Strategy:
    """The strategy, with a copy of the model. Collective."""
    model = copy.deepcopy(model).train()
    return make_strategy(config, model, build_optimizer(config.optimization, model), SCALER, ranks)


def mean_iteration(
    config: TrainConfig, strategy: Strategy, batches: ShardedBatches, ranks: Ranks, iterations: int
) -> float:
    """Seconds of an iteration in the steady state, the mean over so many. Collective.

    Not timed is as many as it takes to fill the pipeline, and one more.
    """
    untimed = config.pipeline.width + 1
    ranks.exchange("configuration", None)  # all begin together
    with contextlib.closing(batches.from_iteration(strategy.iteration)) as samples:
        for iteration in range(untimed + iterations):
            if iteration == untimed:
                begin = time.perf_counter()
            forward_backward(strategy, samples, config, SCALER, iteration)
            strategy.step()
        seconds = (time.perf_counter() - begin) / iterations
    strategy.flush()
    return float(np.median(ranks.exchange("seconds", seconds)))


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """The job."""
    if len(words) != 2:
        raise UserInputError(f"timed_configurations must be given two files, a plan and one for the times; got {words}")
    plan_file, times_file = map(Path, words)
    passes = ranks.agree("plan", lambda: json.loads(plan_file.read_text(encoding="utf-8")))
    configs = {one["words"]: parse_training(shlex.split(one["words"])) for one in passes[0]}
    first = next(iter(configs.values()))
    _, batches, model, _ = ranks.agree("data and model", lambda: load(first, ranks))
    ranks.start_process_group("cpu", first.run.timeout)
    with contextlib.ExitStack() as stack:
        strategies = {}
        for name, config in configs.items():
            strategies[name] = stack.enter_context(contextlib.closing(start(config, model, ranks)))

        def measure(name: str, iterations: int) -> float:
            return mean_iteration(configs[name], strategies[name], batches, ranks, iterations)

        times = [[measure(one["words"], one["iterations"]) for one in of_pass] for of_pass in passes]
    if ranks.rank == 0:
        times_file.write_text(json.dumps(times) + "\n", encoding="utf-8")
    ranks.exchange("the end", None)


if __name__ == "__main__":
    command.run(main)
