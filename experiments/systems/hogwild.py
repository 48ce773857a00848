"""HogWild: ranks of one host train a single copy of the weights in shared memory, without locks. Not reproducible.

    python -m experiments.systems.hogwild --dataset digits --iterations 100 [--ranks 4] [options of pipesgd.train]

As in Caffe's pull request 1148, which shares the weights of the solvers of one machine (Niu et al., "Hogwild!", 2011).
Each rank computes gradients on its own samples at whatever weights it finds, and its own optimizer changes them in
place while the others read and write them: updates may be torn or lost, and no two runs are alike. A rank has 1/k of
the learning rate of k ranks, so an iteration of all moves the weights as far as one of the mean gradient. All ranks
begin together, and evaluations wait for all. This is a program of its own, since it is no strategy that pipesgd.train
could resume or check.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import multiprocessing

from experiments import command
from experiments.simulated_runs import DIVERGED_LOSS, WORLD_SIZE, accuracy_of, batches_of, evaluated, loss_of
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig, differing_options
from pipesgd.data import make_workload
from pipesgd.errors import RunError, UserInputError
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

READ = frozenset({
    "dataset", "data-dir", "batch-size", "image-size", "context", "model", "hidden-sizes", "layers", "heads",
    "embedding", "optimizer", "lr", "momentum", "weight-decay", "schedule", "iterations", "seed", "evaluate-iterations",
})  # fmt: skip
"""Options of ``pipesgd.train`` that this program has a use for."""
START_METHOD = "forkserver"  # a fork would copy the state of torch's threads
UNTIMED = 3
"""First iterations, which are not timed unless there are no others: they fill the memory."""
MEETING_SECONDS = 600.0
"""Seconds after which a rank that does not come to the start, or to an evaluation, counts as lost."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run."""

    iteration_s: float
    """Mean seconds of rank 0's iterations, without the first ones and without evaluations."""
    points: list[tuple[int, float]]
    """Iterations of a rank, and the test accuracy after them: at each evaluation and at the end."""


def parse(words: Sequence[str]) -> TrainConfig:
    """Return the training that ``words`` ask for.

    Raises:
        UserInputError: an option is wrong, or has no use here; or the length is not given in iterations.
    """
    config = parse_training(words)
    given, defaults = config.options(), TrainConfig().options()
    for name in differing_options(given, defaults, free=READ):
        raise UserInputError(f"{name} must be left out of hogwild, which has no use for it; got {given[name]}")
    if config.optimization.iterations is None:
        raise UserInputError("iterations must be given to hogwild; got none")
    return config


def train(words: str, world_size: int = WORLD_SIZE) -> Outcome:
    """Train as ``words`` say on this many ranks, which are processes of this machine.

    Raises:
        UserInputError: as ``parse``.
        RunError: a rank failed, or its loss went beyond all bounds.
    """
    config = parse(shlex.split(words))
    torch.manual_seed(config.optimization.seed)
    _, model = make_workload(config, world_size=world_size)
    context = multiprocessing.get_context(START_METHOD)
    meeting, results = context.Barrier(world_size, timeout=MEETING_SECONDS), context.SimpleQueue()
    weights = [parameter.detach().share_memory_() for parameter in model.parameters()]
    try:
        multiprocessing.start_processes(
            _train_rank, (world_size, words, weights, meeting, results), nprocs=world_size, start_method=START_METHOD
        )
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as failure:
        raise RunError(f"hogwild failed: {str(failure).strip().splitlines()[-1]}") from None
    outcome: Outcome = results.get()
    return outcome


def _train_rank(
    rank: int, world_size: int, words: str, weights: list[torch.Tensor], meeting: Any, results: Any
) -> None:
    torch.set_num_threads(1)
    config = parse(shlex.split(words))
    options, every = config.optimization, config.run.evaluate_iterations
    iterations = options.iterations
    assert iterations is not None
    torch.manual_seed(options.seed)
    data, model = make_workload(config, rank=rank, world_size=world_size)
    for parameter, shared in zip(model.parameters(), weights, strict=True):
        parameter.data = shared
    torch.manual_seed(options.seed * world_size + rank)  # from here on, ranks differ, as those of pipesgd.train
    own = dataclasses.replace(options, lr=options.lr / world_size)
    optimizer = build_optimizer(own, model)
    schedule = build_schedule(own, optimizer, iterations)
    seconds, points, untimed = 0.0, [], UNTIMED if iterations > UNTIMED else 0
    batches = iter(batches_of(config, data, rank, world_size))
    meeting.wait()  # else the first rank would train while the others still start
    for done in range(1, iterations + 1):
        begin = time.perf_counter()
        batch = next(batches)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if not loss.item() <= DIVERGED_LOSS:
            raise RunError(f"diverged in iteration {done - 1}")
        loss.backward()
        optimizer.step()
        schedule.step()
        seconds += (time.perf_counter() - begin) * (done > untimed)
        if done == iterations or (every is not None and done % every == 0):
            meeting.wait()
            if rank == 0:
                points.append((done, accuracy_of(evaluated(model, data))))
            meeting.wait()
    if rank == 0:
        results.put(Outcome(iteration_s=seconds / (iterations - untimed), points=points))


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.bare_parser("python -m experiments.systems.hogwild", __doc__)
    options.add_argument("--ranks", type=command.at_least(1), default=WORLD_SIZE, help=f"processes ({WORLD_SIZE})")
    given, rest = options.parse_known_args(words)
    command.check_alone("hogwild", ranks.by_torchrun, "it starts its ranks itself")
    outcome = train(shlex.join(rest), given.ranks)
    for done, accuracy in outcome.points:
        say(console, f"{done} iterations of each of {given.ranks} ranks: test accuracy {accuracy:.2%}")
    say(console, f"{1e3 * outcome.iteration_s:.1f} ms an iteration; another run ends elsewhere")


if __name__ == "__main__":
    command.run(main)
