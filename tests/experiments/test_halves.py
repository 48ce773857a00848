"""Training by means of half a batch: next to its recursion, and what runs are asked for."""

from __future__ import annotations

import shlex

import pytest
import torch
from torch import Tensor, nn

from experiments.accuracy_methods import SYNCHRONOUS
from experiments.accuracy_runs import FIRST_TRIED, RATE_SEEDS, SEARCHED, SEEDS, Cell, Planned
from experiments.halves import WAYS, WORKLOAD, Halves, WayCell, plan, row_of
from experiments.simulated_runs import Run, loss_of
from pipesgd.cli import parse as parse_training
from pipesgd.optim.clipping import Clipping


def batches(iteration: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(iteration)
    return [
        (
            torch.randn(6, 5, generator=generator, dtype=torch.float64),
            torch.randint(3, (6,), generator=generator),
        )
        for _ in range(2)
    ]


def test_first_halves_are_computed_on_a_guess_and_second_ones_on_the_true_weights() -> None:
    """The recursion with momentum m: w~[t+1] = w[t] - lr (m v[t-1] + G1), v[t] = m v[t-1] + (G1 + G2)/2."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    halves = Halves(model, optimizer, Clipping())
    guess = true = model.weight.detach().clone()
    moved = torch.zeros_like(true)

    def gradient(weights: Tensor, of_ranks: list[tuple[Tensor, Tensor]], part: slice) -> Tensor:
        own = nn.Linear(5, 3, bias=False).double()
        with torch.no_grad():
            own.weight.copy_(weights)
        losses = [loss_of(own, (inputs[part], labels[part])) for inputs, labels in of_ranks]
        return torch.autograd.grad(sum(losses[1:], losses[0]) / len(losses), [own.weight])[0]

    for iteration in range(4):
        of_ranks = batches(iteration)
        first, second = gradient(guess, of_ranks, slice(0, 3)), gradient(true, of_ranks, slice(3, 6))
        guess = true - 0.5 * (0.9 * moved + first)
        moved = 0.9 * moved + (first + second) / 2
        true = true - 0.5 * moved
        halves.iterate(of_ranks)
        torch.testing.assert_close(model.weight.detach(), true)
        torch.testing.assert_close(halves.guess[0], guess)
    assert not torch.allclose(guess, true)


@pytest.mark.parametrize("length", SEARCHED)
def test_ways_have_the_samples_of_the_pipeline_and_at_equal_bytes_its_number_of_exchanges(length: int) -> None:
    pipeline = parse_training(shlex.split(Cell(WORKLOAD, length).run("width 2", 0, 3).words))
    exchanges = {}
    for way in WAYS:
        config = parse_training(shlex.split(WayCell(WORKLOAD, length, way).run(SYNCHRONOUS, 0, 3).words))
        assert config.optimization.iterations is not None
        assert config.optimization.iterations * config.data.batch_size == length * pipeline.data.batch_size
        assert config.optimization.lr_warmup == config.optimization.iterations // 10
        exchanges[way] = 2 * config.optimization.iterations
    assert exchanges == {"equal bytes": length, "twice the bytes": 2 * length}


def test_a_row_compares_seeds_at_the_best_rate() -> None:
    def ran(loss: float) -> Run:
        return Run(commit="c", seconds=1.0, diverged_at=None, test_loss=loss, test_accuracy=0.5)

    cell = WayCell(WORKLOAD, 200, "equal bytes")
    best = cell.run(SYNCHRONOUS, 1, 0).lr

    def loss_at(one: Planned) -> float:
        return 2.0 + 0.1 * abs(one.lr / best - 1) + 0.01 * one.seed

    runs: dict[str, Run] = {}
    while left := [one for one in plan({200: -3}, SEEDS, runs) if one.words not in runs]:
        runs |= {one.words: ran(loss_at(one)) for one in left}
    tried = len({*FIRST_TRIED, 2, -3})
    assert len(runs) == len(WAYS) * (tried * len(RATE_SEEDS) + len(SEEDS))
    others = {"width_2": [ran((2.0 + 0.01 * seed) / 1.02) for seed in SEEDS]}
    row = row_of(cell, -3, SEEDS, runs, others)
    assert (row["lr"], row["lr_is_inside"]) == (best, True)
    assert row["above_width_2"] == pytest.approx(2.0)
    assert row["above_width_2_low"] == pytest.approx(2.0)
