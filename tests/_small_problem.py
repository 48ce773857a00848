"""A small network and batches for it, trained by ``Pipelined`` on real ranks and by the reference in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from _reference import pipe_sgd
from _sections import sections
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from experiments.predictions import COMPARED
from pipesgd import Pipelined
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256

Batch: TypeAlias = tuple[Tensor, Tensor]
MakeOptimizer: TypeAlias = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
}
Case: TypeAlias = dict[str, Any]
"""Parameters of a run: seed, sizes and iterations of the problem; optimizer, by name; width, synchronous start,
prediction; clip and other options of ``Pipelined``, as dictionaries; and True in "scheduled" if the learning rate
changes."""


def small_problem(seed: int, sizes: list[int], iterations: int, world_size: int) -> tuple[nn.Module, list[list[Batch]]]:
    """Return a float64 network with layers of ``sizes``, and batches[iteration][rank] for it."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    batches = [
        [
            (
                torch.randn(3, sizes[0], generator=generator, dtype=torch.float64),
                torch.randn(3, sizes[-1], generator=generator, dtype=torch.float64),
            )
            for _ in range(world_size)
        ]
        for _ in range(iterations)
    ]
    return nn.Sequential(*layers).double(), batches


def different(cases: Sequence[Case]) -> list[Case]:
    """Return ``cases`` without those that are there twice, as in the first example of hypothesis, the simplest."""
    return [case for number, case in enumerate(cases) if case not in cases[:number]]


def regress(model: nn.Module, batch: Batch) -> Tensor:
    return mse_loss(model(batch[0]), batch[1])


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def falling_lr(iteration: int) -> float:
    return 0.03 / (1 + iteration)


def clip_by_torch(clip_norm: float | None = None, clip_value: float | None = None) -> Callable[[list[Tensor]], None]:
    def clip(gradients: list[Tensor]) -> None:
        holders = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for holder, gradient in zip(holders, gradients, strict=True):
            holder.grad = gradient
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(holders, clip_value)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(holders, clip_norm)

    return clip


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor], *, rtol: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=rtol, atol=rtol, msg=lambda text, n=name: f"{n}: {text}"
        )


@dataclass(frozen=True)
class Outcome:
    """The result of one rank's run."""

    losses: list[float]
    hashes: list[str]
    """Hashes of the true weights after every iteration, and after the flush."""
    weights: dict[str, Tensor]
    buffers_allocated: int


def train_on_ranks(ranks: Ranks, case: Case, make_optimizer: MakeOptimizer) -> Outcome:
    """Train ``case`` on this rank."""
    model, batches = small_problem(case["seed"], case["sizes"], case["iterations"], ranks.world_size)
    if ranks.rank:  # only rank 0's initial weights count
        model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    optimizer = make_optimizer(model.parameters())
    pipeline = Pipelined(
        model,
        optimizer,
        width=case["width"],
        ranks=ranks,
        **sections(
            synchronous_start=case["start"],
            prediction=COMPARED.get(case["prediction"], case["prediction"]),
            **case["clip"],
            **case["options"],
        ),
    )
    losses, hashes = [], []
    for iteration, of_ranks in enumerate(batches):
        if case["scheduled"]:
            for group in optimizer.param_groups:
                group["lr"] = falling_lr(iteration)
        loss = regress(model, of_ranks[ranks.rank])
        loss.backward()
        pipeline.step()
        losses.append(loss.item())
        with pipeline.true_weights():
            hashes.append(weights_sha256(model))
    pipeline.flush()
    pipeline.close()
    return Outcome(losses, [*hashes, weights_sha256(model)], model.state_dict(), pipeline.buffers_allocated)


def train_cases(ranks: Ranks, cases: Sequence[Case]) -> list[Outcome]:
    """Train each of the ``cases`` on this rank, with those of ``OPTIMIZERS`` that they name."""
    return [train_on_ranks(ranks, case, OPTIMIZERS[case["optimizer"]]) for case in cases]


def assert_as_in_one_process(
    outcomes: Sequence[Sequence[Outcome]],
    cases: Sequence[Case],
    optimizers: Mapping[str, MakeOptimizer],
    *,
    rtol: float,
) -> None:
    """Check that ``outcomes[rank][index]`` of the ``cases`` agrees with the reference, with equal weights on all ranks.

    Check also that no more gradients were held than are in flight.
    """
    for index, case in enumerate(cases):
        model, batches = small_problem(case["seed"], case["sizes"], case["iterations"], len(outcomes))
        losses = pipe_sgd(
            model,
            optimizers[case["optimizer"]](model.parameters()),
            regress,
            batches,
            width=case["width"],
            synchronous_start=case["start"],
            prediction=case["prediction"],
            clip=clip_by_torch(**case["clip"]),
            lr_of=falling_lr if case["scheduled"] else None,
        )
        for rank, of_rank in enumerate(outcomes):
            ours = of_rank[index]
            assert ours.losses == pytest.approx([of_ranks[rank] for of_ranks in losses], rel=rtol)
            assert_same_weights(ours.weights, model.state_dict(), rtol=rtol)
            assert ours.hashes == outcomes[0][index].hashes, "the true weights are the same on all ranks"
            assert ours.buffers_allocated <= case["width"]
