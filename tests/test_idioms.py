"""Habits of other people's training programs: each trains here as with DDP alone, or is refused in one line."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from pipesgd import Pipelined
from pipesgd.ddp import attach, compress
from pipesgd.errors import PipesgdError
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

ITERATIONS = 6
DOORS = ("DDP", "compress", "attach 1", "attach 2", "Pipelined 1", "Pipelined 2")
"""Ways to train on several ranks, with the width where there is one."""

Answers = dict[str, str | list[Tensor]]
"""Weights by door, or how it refused."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


class Program:
    """A training program: its model, its optimizers, and what a door has put around them."""

    def __init__(self, door: str, model: nn.Module, optimizers: Sequence[Optimizer], **of_ddp: Any):
        kind, _, width = door.partition(" ")
        self.parallel: Any = model if kind == "Pipelined" else DistributedDataParallel(model, **of_ddp)
        self.optimizers = optimizers
        self.pipelines: list[Any] = []
        if kind == "compress":
            self.pipelines = [compress(self.parallel, codec="fp32")]
        elif kind == "attach":
            self.pipelines = [attach(self.parallel, optimizers[0], width=int(width), codec="fp32")]
        elif kind == "Pipelined":
            self.pipelines = [Pipelined(model, optimizer, width=int(width)) for optimizer in optimizers]
        self.steps = [one.step for one in (self.pipelines if kind == "Pipelined" else optimizers)]
        self.zero_grads = [] if kind == "Pipelined" else [optimizer.zero_grad for optimizer in optimizers]

    def backward(self, iteration: int) -> None:
        generator = torch.Generator().manual_seed(100 * iteration + dist.get_rank())
        inputs, targets = torch.randn(8, 8, generator=generator), torch.randn(8, 2, generator=generator)
        mse_loss(self.parallel(inputs), targets).backward()

    def iterate(self, iteration: int) -> None:
        for zero_grad in self.zero_grads:
            zero_grad()
        self.backward(iteration)
        for step in self.steps:
            step()


Loop = Callable[[Program], None]


def iterations(program: Program) -> None:
    for iteration in range(ITERATIONS):
        program.iterate(iteration)


def trained(
    model: Callable[[], nn.Module],
    optimizers: Callable[[nn.Module], Sequence[Optimizer]],
    loop: Loop = iterations,
    doors: Iterable[str] = DOORS,
    **of_ddp: Any,
) -> Answers:
    """Run a program through every door, on this rank."""
    answers: Answers = {}
    for door in doors:
        try:
            with contextlib.ExitStack() as closing:
                own = model()
                program = Program(door, own, optimizers(own), **of_ddp)
                for pipeline in program.pipelines:
                    closing.enter_context(pipeline)
                loop(program)
            answers[door] = [parameter.detach().clone() for parameter in own.parameters()]
        except PipesgdError as refusal:
            answers[door] = f"{type(refusal).__name__}: {refusal}"
    return answers


def assert_as_by_ddp(answers: Sequence[Answers], refused: dict[str, str]) -> None:
    """Check that doors of width 1 have DDP's weights, and others those of a late gradient, on all ranks alike."""
    for door, found in answers[0].items():
        if door in refused:
            assert all(str(of_rank[door]).startswith(refused[door]) for of_rank in answers), door
            continue
        assert not isinstance(found, str), f"{door}: {found}"
        for of_rank in answers:
            assert all(map(torch.equal, found, of_rank[door])), f"replicas of {door}"
        tolerance = 0.3 if door.endswith("2") else 1e-6
        for one, other in zip(found, answers[0]["DDP"], strict=True):
            assert isinstance(other, Tensor)
            torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance, msg=lambda text, of=door: f"{of}: {text}")


# ---- Sharpness-aware minimization: two backward passes for an update


class SharpnessAware(SGD):
    """SGD by the gradient at the top of the slope nearby; a base optimizer may make its steps, as in known packages."""

    def __init__(self, model: nn.Module, with_base: bool):
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.base = SGD(self.param_groups) if with_base else None
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def climb(self) -> None:
        self.before = [parameter.clone() for parameter in self.parameters]
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.add_(0.02 * parameter.grad)
        self.zero_grad()

    def descend(self) -> None:
        for parameter, before in zip(self.parameters, self.before, strict=True):
            parameter.data = before
        (super() if self.base is None else self.base).step()
        self.zero_grad()


def _sharpness_aware(ranks: Ranks, with_base: bool, local_climb: bool) -> Answers:
    def loop(program: Program) -> None:
        [optimizer] = program.optimizers
        assert isinstance(optimizer, SharpnessAware)
        for iteration in range(ITERATIONS):
            with program.parallel.no_sync() if local_climb else contextlib.nullcontext():
                program.backward(iteration)
            optimizer.climb()
            program.backward(iteration)
            optimizer.descend()

    return trained(mlp, lambda model: [SharpnessAware(model, with_base)], loop, DOORS[:4])


@pytest.mark.parametrize(
    ("with_base", "local_climb", "refused_late"), [(False, False, True), (False, True, False), (True, True, True)]
)
def test_sharpness_aware_minimization_is_that_of_ddp_or_refused(
    with_base: bool, local_climb: bool, refused_late: bool
) -> None:
    refusal = "UserInputError: backward() must be followed by step() of the optimizer that was given to attach, "
    refused = {"attach 2": refusal} if refused_late else {}
    assert_as_by_ddp(run_ranks(2, _sharpness_aware, with_base, local_climb), refused)


# ---- Groups of parameters whose order is that of a set


def _groups_in_the_order_of_a_set(ranks: Ranks) -> Answers:
    def optimizers(model: nn.Module) -> list[Optimizer]:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        if ranks.rank:  # sets have the order of addresses, which differs between ranks by chance
            matrices.reverse()
            others.reverse()
        return [AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01)]

    return trained(mlp, optimizers)


def test_groups_in_another_order_on_each_rank_are_refused_where_gradients_have_the_order_of_groups() -> None:
    refusal = "DisagreementError: parameters (number 0) must be the same on all ranks; got '"
    refused = dict.fromkeys([door for door in DOORS if door not in ("DDP", "compress")], refusal)
    assert_as_by_ddp(run_ranks(2, _groups_in_the_order_of_a_set), refused)


# ---- Reentrant checkpoints of a layer that is used twice


class Twice(nn.Module):
    """A model with a layer that is used twice, each time in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True).tanh()
        outputs: Tensor = self.last(hidden)
        return outputs


def _reentrant(ranks: Ranks) -> Answers:
    return trained(Twice, lambda model: [SGD(model.parameters(), lr=0.1, momentum=0.9)], static_graph=True)


def test_a_layer_of_several_reentrant_checkpoints_trains_in_a_static_graph() -> None:
    assert_as_by_ddp(run_ranks(2, _reentrant), {})


# ---- Two optimizers of one model


def _two_optimizers(ranks: Ranks) -> Answers:
    def optimizers(model: nn.Module) -> list[Optimizer]:
        matrices = SGD([parameter for parameter in model.parameters() if parameter.ndim > 1], lr=0.1, momentum=0.9)
        return [matrices, AdamW([parameter for parameter in model.parameters() if parameter.ndim < 2], lr=0.01)]

    return trained(mlp, optimizers)


def test_two_optimizers_of_one_model_train_its_halves() -> None:
    refusal = "UserInputError: optimizer must hold all parameters of ddp_model that require a gradient; "
    assert_as_by_ddp(run_ranks(2, _two_optimizers), {"attach 1": refusal, "attach 2": refusal})


# ---- Processes that are forked while gradients are in flight


def _square(number: int) -> int:
    return number * number


def _forks(program: Program) -> None:
    for epoch in range(2):
        loader = DataLoader(range(3), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
        for batch, _ in enumerate(loader):
            program.iterate(3 * epoch + batch)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.map_async(_square, range(3)).get(timeout=20.0) == [0, 1, 4]


def _forked_processes(ranks: Ranks) -> Answers:
    multiprocessing.current_process().daemon = False  # a daemon may have no children
    doors = ("DDP", "compress", "attach 2", "Pipelined 2")
    return trained(mlp, lambda model: [SGD(model.parameters(), lr=0.1)], _forks, doors)


def test_processes_forked_in_the_middle_of_training_disturb_nothing() -> None:
    assert_as_by_ddp(run_ranks(2, _forked_processes), {})


# ---- Ranks that meet over a file, without torchrun


def _meet_over_a_file(ranks: Ranks, path: Path) -> Answers:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=ranks.rank, world_size=ranks.world_size)
    return trained(mlp, lambda model: [SGD(model.parameters(), lr=0.1)])


def test_ranks_may_meet_over_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    assert_as_by_ddp(run_ranks(2, _meet_over_a_file, folder / "store", process_group=False), {})
