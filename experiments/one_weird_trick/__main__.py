"""AlexNet on four ranks by the plans of "One weird trick": bytes and accuracy of data, model and hybrid parallelism.

    torchrun --nproc-per-node 4 -m experiments.one_weird_trick        one_weird_trick.csv

Each row is a plan of layers, NAME.toml in this folder, for one island of all ranks, trained synchronously on the same
samples: 32 of each rank's own in an iteration, or, with model parallelism alone, those of all ranks. Of what a rank
sends in an iteration, activations and targets passed between members are counted, those by the formula of the paper
stand next to them, and gradients are counted by the pipelines. What torch exchanges inside split layers is counted
once, in the first iteration, as a ring would send it. No time is measured: the ranks share the cores of one machine.

With the variable batch, linear layers have as many updates in an iteration as ranks, each at a learning rate divided
by that number.

All runs take about two hours of two cores. Finished ones are kept in one_weird_trick.runs.json in the output folder:
the same command makes only those that are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shlex
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.results import Row, code_state, save
from experiments.simulated_runs import accuracy_of, batches_of, evaluated
from experiments.systems.workloads import WORKLOADS
from pipesgd import Pipelined
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig
from pipesgd.data import make_workload
from pipesgd.errors import UserInputError
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT
from pipesgd.systems.layers.passes import Passes
from pipesgd.systems.layers.plan import rows_of_passes
from pipesgd.systems.layers.splitting import split_layers

NAME = "one_weird_trick"
FOLDER = Path(__file__).parent
PLANS = ("data", "model", "hybrid-gather", "hybrid-turns", "hybrid-portions", "variable-turns", "variable-portions")
WORKLOAD = "alexnet"
SEEDS, QUICK_ITERATIONS = 3, 2
LABEL_BYTES = 8


@dataclass(frozen=True)
class Run:
    """A training by a plan."""

    row: Row
    commit: str | None
    """Commit of the code that made the run; None where there is no repository."""


class RingBytes(TorchDispatchMode):
    """Counts what this rank would send for torch's collectives of split layers, if all were rings."""

    def __init__(self, members: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = 0.0
        self._members = members

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # its own operations on this rank's tensors come next
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            others = self._members - 1
            shares = {
                "all_reduce": 2 * others / self._members,
                "reduce_scatter_tensor": others / self._members,
                "all_gather_into_tensor": others,
            }
            self.sent += shares[name] * args[0].nbytes
        return func(*args, **(kwargs or {}))


def divided(model: nn.Module) -> nn.Module:
    """Return the AlexNet as "features", up to where they are flattened, and "classifier", its linear layers."""
    hidden, output = model.children()
    layers = list(hidden.children())
    first = next(number for number, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    features, classifier = nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:], output)
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


class Trainer:
    """A rank that trains a part of AlexNet, or all of it, by a plan."""

    def __init__(self, config: TrainConfig, model: nn.Module, mesh: Any, plan: Path):
        self.features: nn.Module = model.get_submodule("features")
        self.classifier: nn.Module = model.get_submodule("classifier")
        self.passes: Passes = split_layers(model, mesh["inside"], plan)
        options = config.optimization
        assert options.iterations is not None
        self.activations: int = self.classifier.get_submodule("0").in_features  # type: ignore[assignment]
        """Values of a sample that enter the linear layers."""
        self._schedules, self.pipelines = [], []
        for part, updates in ((self.features, 1), (self.classifier, self.passes.count // self.passes.update_period)):
            own = dataclasses.replace(options, lr=options.lr / updates)
            optimizer = build_optimizer(own, part)
            self._schedules.append(build_schedule(own, optimizer, options.iterations))
            is_split = any(isinstance(parameter, DTensor) for parameter in part.parameters())
            self.pipelines.append(Pipelined(part, optimizer, width=1, mesh=mesh if is_split else None))

    def iterate(self, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """Train on one batch; return the mean loss, and the bytes of gradients that this rank has sent."""
        below, above = self.pipelines
        losses, sent = [], 0
        for number, (entering, labels) in enumerate(self.passes(self.features(inputs), targets), start=1):
            loss = cross_entropy(self.classifier(entering), labels)
            (loss / self.passes.update_period).backward()
            losses.append(loss.item())
            if number % self.passes.update_period == 0:
                sent += above.step().wire_bytes
        sent += below.step().wire_bytes
        for schedule in self._schedules:
            schedule.step()
        return float(np.mean(losses)), sent


def batches_for(config: TrainConfig, ranks: Ranks, data: Any, everybodys: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches, or those of all ranks together."""
    if not everybodys:
        yield from batches_of(config, data, ranks.rank, ranks.world_size)
        return
    for of_ranks in zip(
        *(batches_of(config, data, rank, ranks.world_size) for rank in range(ranks.world_size)), strict=True
    ):
        inputs, targets = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
        yield inputs, targets


def train(ranks: Ranks, mesh: Any, words: str, plan: str, seed: int, test_every: int) -> Row:
    """Train as ``words`` say by a plan; return the row. Collective."""
    config = parse_training(shlex.split(f"{words} --seed {seed}"))
    members, iterations = ranks.world_size, config.optimization.iterations
    assert iterations is not None
    torch.manual_seed(seed)
    data, whole = make_workload(config)
    model = divided(whole)
    trainer = Trainer(config, model, mesh, FOLDER / f"{plan}.toml")
    passes = trainer.passes
    in_layers, losses, gradients = RingBytes(members), [], 0
    with contextlib.ExitStack() as pipelines:
        for pipeline in trainer.pipelines:
            pipelines.enter_context(pipeline)
        batches = itertools.islice(batches_for(config, ranks, data, plan == "model"), iterations)
        for number, (inputs, targets) in enumerate(batches):
            with contextlib.nullcontext() if number else in_layers:
                loss, sent = trainer.iterate(inputs, targets)
            losses.append(loss)
            gradients += sent
    last = float(np.mean(losses[-max(1, iterations // 10) :]))
    loss = float(np.mean(ranks.all_gather_object("losses", last)))
    passed, in_layers_bytes, gradient_bytes = passes.sent_bytes / iterations, in_layers.sent, gradients / iterations
    return {
        "plan": plan,
        "seed": seed,
        "scheme": passes.scheme,
        "passes": passes.count,
        "update_period": passes.update_period,
        "iterations": iterations,
        "test_accuracy": accuracy_of(evaluated(model, data, test_every=test_every)),
        "train_loss": loss,
        "passed_bytes": passed,
        **by_formula(passes.scheme, members, config.samples_per_rank, trainer.activations),
        "in_layers_bytes": in_layers_bytes,
        "gradient_bytes": gradient_bytes,
        "bytes": passed + in_layers_bytes + gradient_bytes,
    }


def by_formula(scheme: str | None, members: int, samples: int, activations: int) -> Row:
    """Return the bytes of an iteration that each member sends by the paper: section 4, for float32 and labels of int64.

    Each member sends activations and labels of its samples to all others, and these return the gradients. The busiest
    member of a pass is the one that sends most before it; the sum over the passes is what a link must carry, one
    message after the other, until all activations are where they are needed.
    """
    if scheme is None:
        return {"formula_bytes": 0, "busiest_bytes": 0}
    others, there = members - 1, 4 * activations + LABEL_BYTES
    rows = [max(one.stop - one.start for one in of_pass) for of_pass in rows_of_passes(scheme, members, samples)]
    return {
        "formula_bytes": others * samples * (there + 4 * activations),
        "busiest_bytes": others * sum(rows) * there,
    }


def parse(words: Sequence[str], world_size: int) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    options = command.parser(NAME, __doc__)
    options.add_argument("--seeds", type=command.at_least(1), default=SEEDS, help=f"trainings of each plan ({SEEDS})")
    options.add_argument("--fresh", action="store_true", help="forget the finished runs in the output folder")
    arguments = command.parse(options, words)
    if world_size < 2:
        raise UserInputError("at least 2 ranks must be started (torchrun --nproc-per-node 4 ...); got 1")
    return arguments


def show(rows: Sequence[Row]) -> None:
    """Print the rows."""
    text = command.text_of
    command.show(
        "bytes that a rank sends in an iteration, and test accuracy",
        [
            {
                "plan": row["plan"],
                "seed": str(row["seed"]),
                "passed, kB": text(row, "passed_bytes", ",.1f", 1e-3),
                "by the paper": text(row, "formula_bytes", ",.1f", 1e-3),
                "the busiest": text(row, "busiest_bytes", ",.1f", 1e-3),
                "in split layers": text(row, "in_layers_bytes", ",.1f", 1e-3),
                "gradients": text(row, "gradient_bytes", ",.1f", 1e-3),
                "all": text(row, "bytes", ",.1f", 1e-3),
                "accuracy %": text(row, "test_accuracy", ".2f", 100),
                "train loss": text(row, "train_loss", ".4f"),
            }
            for row in rows
        ],
    )


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.world_size))
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    mesh = init_device_mesh("cpu", (1, ranks.world_size), mesh_dim_names=("islands", "inside"))
    length = QUICK_ITERATIONS if arguments.quick else WORKLOADS[WORKLOAD].iterations
    training = f"{WORKLOADS[WORKLOAD].trained()} --iterations {length}"
    planned = {
        f"{plan}, {ranks.world_size} ranks, {training} --seed {seed}": (plan, seed)
        for seed, plan in itertools.product(range(1 if arguments.quick else arguments.seeds), PLANS)
    }
    test_every = 100 if arguments.quick else 1

    def make(one: tuple[str, int]) -> Run:
        return Run(train(ranks, mesh, training, *one, test_every), code_state())

    kept = KeptRuns(arguments.output / f"{NAME}.runs.json", Run, fresh=arguments.fresh and ranks.rank == 0)
    runs = kept.complete(planned, make, console, NAME, named=lambda one: f"{one[0]}, seed {one[1]}", ranks=ranks)
    if ranks.rank == 0:
        plans = {plan: (FOLDER / f"{plan}.toml").read_text(encoding="utf-8") for plan in PLANS}
        made_with = sorted({str(run.commit) for run in runs.values()})
        extra = {"training": training, "ranks": ranks.world_size, "plans": plans, "runs_made_with": made_with}
        rows = [run.row for run in runs.values()]
        save(NAME, rows, extra=extra, folder=arguments.output)
        show(rows)


if __name__ == "__main__":
    command.run(main)
