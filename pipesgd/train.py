"""The command ``torchrun [torchrun's options] -m pipesgd.train [options]``.

The code reads from top to bottom as a run happens, and is the same for every number of ranks.
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch is imported, which takes seconds
    import sys

    from pipesgd import process

    process.begin()  # before tyro is imported, too

    from pipesgd.cli import answer_questions, parse

    answer_questions(parse, sys.argv[1:])

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from pipesgd.cli import as_toml, parse
from pipesgd.config import FREE_BETWEEN_RANKS, TrainConfig
from pipesgd.errors import CommunicationError, PeerFailed, StoppedBySignal
from pipesgd.exit import reason_of, run_and_exit
from pipesgd.guests import guest
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.planning.plan_run import plan_run, save_cluster
from pipesgd.ranks import Ranks, check_same_options
from pipesgd.run import output
from pipesgd.run.console import Screen, say
from pipesgd.run.summary import (
    network_line,
)
from pipesgd.run.workload import agree_on_workload, check_exchange, load, reduce_of
from pipesgd.strategies import serve
from pipesgd.training import DEFAULT_EPOCHS, Job, Run

if TYPE_CHECKING:
    from pipesgd.run.recorder import OwnRecorder


def train(argv: Sequence[str], ranks: Ranks, console: Screen) -> None:
    """Run one training on this rank.

    Raises:
        UserInputError: before any training starts, and before anything is written or deleted.
        RunError: the run failed.
    """
    # 1. Agree on what to do.
    config = agree_on_configuration(argv, ranks)
    if config.run.dry_run:
        if ranks.rank == 0:
            console.answer(as_toml(config).rstrip("\n"))
        return
    if config.run.log_messages:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("pipesgd").setLevel(logging.DEBUG)

    # 2. Load data, model and optimizer, choose what was left open, and take the folder to write to.
    job = prepare(config, ranks, console)
    if ranks.rank >= job.workers.world_size:
        ranks.standing.farewell.open(members=job.workers.world_size, start=0, seconds=job.config.run.farewell_seconds)
        serve(job.config, job.model, job.optimizer, ranks)  # a parameter server on a rank of its own does nothing else
        return

    # 3. Train, starting from where an earlier run of the same command stopped.
    with run_of(job) as run:
        run.resume()
        # It ends first: the others must not take this rank for dead while it closes the rest.
        with reporting_failure(job.ranks):
            run.train()
            result = run.finish()

    # 4. Write the results.
    run.leave_behind(result)


def prepare(config: TrainConfig, ranks: Ranks, console: Console) -> Job:
    """Load data and model from one seed on all ranks, choose what was left open, and take the folder.

    Raises:
        UserInputError: one of these is not possible; nothing was written or deleted.
    """
    workers = ranks.raise_together("strategy", lambda: who_works(config, ranks))
    if config.pipeline.strategy == "pipelined":
        check_exchange(config, ranks)
    network = ranks.addresses()  # before anything is loaded or written
    if ranks.world_size > 1:
        say(console, network_line(network))  # before the ranks connect, which fails if they cannot reach each other
    ranks.enter("loading of data and model")
    data, batches, model, device = ranks.raise_together("data and model", lambda: load(config, workers))
    samples = agree_on_workload(config, data, batches, model, ranks)
    total = config.optimization.iterations or (
        (config.optimization.epochs or DEFAULT_EPOCHS) * batches.iterations_per_epoch
    )
    reduce = reduce_of(config, data, model, workers.world_size)
    earlier = output.earlier_run(config, ranks)
    recorders = ranks.raise_together("recorder", lambda: own_recorders(config, ranks))
    output.check_other_ranks(config, earlier, ranks.world_size, sharded=data.sharded)
    chosen, planned, known = plan_run(
        config, ranks, model, batches, reduce, console, samples=samples, iterations=total, earlier=earlier
    )
    exchanges = None if isinstance(reduce, str) else reduce
    lock = output.take_folder(chosen, ranks, planned.as_json() if planned else None, earlier, exchanges)
    if exchanges is not None:
        named_exchanges = ", ".join(f"{name} by {how}" for name, how in exchanges.items())
        none = "there is neither an embedding nor a linear layer to train"
        say(console, f"--reduce auto: {named_exchanges or none}")
    if known is not None and config.planning.auto:
        save_cluster(known[0], chosen.run.output / output.CLUSTER_FILE)
    if chosen.run.elastic is None:
        ranks.start_process_group(chosen.run.device, chosen.timeout)
    else:
        ranks = workers = as_members(chosen, ranks, device)
    model.to(device)
    optimization = chosen.optimization.for_ranks(workers.world_size)
    optimizer = build_optimizer(optimization, model)
    return Job(
        config=chosen,
        ranks=ranks,
        workers=workers,
        console=console,
        data=data,
        batches=batches,
        model=model,
        device=device,
        optimizer=optimizer,
        schedule=build_schedule(optimization, optimizer, total),
        iterations=total,
        reduce=reduce,
        planned=planned,
        recorders=recorders,
        lock=lock,
    )


def run_of(job: Job) -> Run:
    """Return the run of ``job``, which continues without ranks that are lost if it is elastic."""
    kind: type[Run] = Run if job.config.run.elastic is None else guest("elastic run")
    return kind(job)


def own_recorders(config: TrainConfig, ranks: Ranks) -> list[OwnRecorder]:
    """Return the recorder of ``--recorder``, on rank 0 alone.

    Raises:
        UserInputError: there is no such function, or it fails.
    """
    if config.run.recorder is None or ranks.rank > 0:
        return []
    from pipesgd.run.recorder import OwnRecorder

    return [OwnRecorder(config.run.recorder)]


@contextlib.contextmanager
def reporting_failure(ranks: Ranks) -> Iterator[None]:
    """Report an error that the context raises to the other ranks."""
    try:
        yield
    except StoppedBySignal:  # all ranks know of a signal
        raise
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store may be gone; this rank reports itself what happened
            ranks.report(
                "" if isinstance(error, PeerFailed) else reason_of(error, ranks),
                error.peer if isinstance(error, CommunicationError) else None,
                error.reason if isinstance(error, CommunicationError) else "",
            )
        raise


def agree_on_configuration(argv: Sequence[str], ranks: Ranks) -> TrainConfig:
    """Return the configuration that ``argv`` ask for, after checking that all ranks have the same options.

    Raises:
        UserInputError: a rank's arguments are wrong.
        DisagreementError: the ranks' options differ.
    """

    def own() -> TrainConfig:
        config = parse(argv)
        ranks.timeout = config.timeout  # the first exchange already waits for this long
        ranks.standing.stall_seconds = config.run.stall_seconds
        return config

    config = ranks.raise_together("options", own)
    check_same_options(ranks, config.options(), free=FREE_BETWEEN_RANKS)
    return config


def as_members(config: TrainConfig, ranks: Ranks, device: torch.device) -> Ranks:
    """Return the members that ``ranks`` become. Collective."""
    run = config.run
    assert run.elastic is not None
    if run.device == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    members: Ranks = guest("elastic members")(
        ranks, device, transport=config.transport, least=run.elastic, wait=run.wait, silence=run.silence
    )
    return members


def who_works(config: TrainConfig, ranks: Ranks) -> Ranks:
    """Return the ranks that compute gradients: all, or all but the parameter servers on ranks of their own.

    Raises:
        UserInputError: the strategy cannot run on these ranks or with this torch.
    """
    if config.pipeline.strategy == "ddp":
        from pipesgd.baselines.ddp import check_hook

        check_hook(config.pipeline.ddp_hook)
    return ranks.first(config.workers(ranks.world_size))


if __name__ == "__main__":
    run_and_exit(train, sys.argv[1:])
