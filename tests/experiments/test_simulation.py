"""Simulated ranks compared with real ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _sections import sections
from _small_problem import classify
from torch import Tensor, nn

from experiments.predictions import COMPARED
from experiments.simulation import SimulatedLocalSteps, SimulatedRanks
from pipesgd import LocalSteps, Pipelined
from pipesgd.codecs.options import Int4, Int8
from pipesgd.data import ShardedBatches, build_model, load_dataset
from pipesgd.ranks import Ranks
from pipesgd.reducers.powersgd import PowerSgd

pytestmark = pytest.mark.slow

ITERATIONS = 9
CASES: dict[str, dict[str, Any]] = {
    "synchronous": {"width": 1},
    "local": {"width": 2, "prediction": "local"},
    "eager": {"width": 3, "prediction": "eager"},
    "local, width 3, warm-up, clipped": {"width": 3, "synchronous_start": 3, "clip_norm": 0.5},
    "previous": {"prediction": COMPARED["previous"]},
    "nesterov": {"prediction": COMPARED["nesterov"], "width": 3},
    "spectrain": {"prediction": COMPARED["spectrain"]},
    "dc": {"prediction": COMPARED["dc"], "width": 3},
    "none": {"prediction": "none"},
    "none, truncate16": {"prediction": "none", "codec": "truncate16"},
    "none, int8": {"prediction": "none", "codec": "int8"},
    "eager, width 2": {},
    "int8": {"codec": "int8"},
    "int4, width 2": {"codec": "int4"},
    "int4": {"codec": "int4", "width": 3},
    "int4 in small blocks, clipped": {"codec": Int4(block=64), "clip_norm": 0.5},
    "int4 stochastic, synchronous": {"width": 1, "codec": Int4(block=64, rounding="stochastic")},
    "int8 stochastic with feedback": {"codec": Int8(rounding="stochastic", error_feedback=True), "seed": 3},
    "int4 stochastic, clipped": {"codec": Int4(rounding="stochastic"), "clip_norm": 0.5},
    "low rank, synchronous": {"width": 1, "codec": "powersgd"},
    "low rank, synchronous, clipped": {"width": 1, "codec": PowerSgd(low_rank=1), "clip_norm": 0.5, "seed": 3},
    "low rank": {"codec": PowerSgd(low_rank=2), "seed": 3},
    "low rank, factors in int8": {"codec": PowerSgd(low_rank=2, factors="int8"), "seed": 3},
    "low rank, clipped": {"codec": "powersgd", "clip_norm": 0.5},
}


def _batches(rank: int) -> list[Any]:
    data = load_dataset("digits", None, image_size=8)
    shards = ShardedBatches(data.train, batch_size=8, rank=rank, world_size=4, seed=1)
    return list(itertools.islice(shards.from_iteration(0), ITERATIONS))


def _model() -> nn.Module:
    """Build a model with batch norm, whose buffers are each rank's own, and more values than an int8 block has."""
    torch.manual_seed(3)
    mlp = build_model("mlp", sample_shape=(1, 8, 8), num_classes=10, hidden_sizes=(64, 64))
    return nn.Sequential(nn.BatchNorm2d(1), mlp)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def _train(ranks: Ranks, optimizer: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    results = []
    for case in CASES.values():
        model = _model()
        pipeline = Pipelined(model, OPTIMIZERS[optimizer](model), ranks=ranks, **sections(**case))
        losses = []
        for batch in _batches(ranks.rank):
            loss = classify(model, batch)
            loss.backward()
            pipeline.step()
            losses.append(loss.item())
        pipeline.flush()
        pipeline.combine_buffers()
        pipeline.close()
        results.append((losses, model.state_dict()))
    return results


@functools.cache
def real(optimizer: str) -> dict[str, list[tuple[list[float], dict[str, Tensor]]]]:
    """Train on four real ranks; return losses and weights of each rank, by case."""
    results = run_ranks(4, _train, optimizer)
    return {name: [of_rank[index] for of_rank in results] for index, name in enumerate(CASES)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_simulated_ranks_are_real_ones_bit_for_bit(case: str, optimizer: str) -> None:
    model = _model()
    simulated = SimulatedRanks(model, OPTIMIZERS[optimizer](model), world_size=4, **CASES[case])
    losses = [simulated.iterate(classify, batches) for batches in zip(*map(_batches, range(4)), strict=True)]
    simulated.flush()
    for rank, (of_rank, weights) in enumerate(real(optimizer)[case]):
        assert [of_ranks[rank] for of_ranks in losses] == of_rank
        for name, value in model.state_dict().items():
            if "running" in name:  # sums taken in another order
                torch.testing.assert_close(value, weights[name], rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(value, weights[name]), name


WINDOWS: list[dict[str, Any]] = [
    {"width": 1},
    {"width": 2, "codec": "int4", "clip_norm": 0.5},
    {"width": 1, "outer": "nesterov"},
    {"width": 3, "outer": "nesterov"},
    {"width": 2, "fragments": 4, "local_steps": 1},
    {"width": 2, "fragments": 3, "codec": "int4"},
    {"width": 2, "fragments": 3, "codec": "int4", "local_steps": 3},
    {"width": 1, "outer": "elastic"},
    {"width": 2, "outer": "elastic", "moving_rate": 0.1, "codec": "int8"},
    {"width": 2, "fragments": 3, "codec": Int4(block=64, rounding="stochastic"), "seed": 3},
]
STEPS = 2
"""Iterations of a window, unless a case has others; the last window of 9 iterations is shorter."""


def _train_by_windows(ranks: Ranks, optimizer: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    results = []
    for case in WINDOWS:
        model = _model()
        losses = []
        with LocalSteps(
            model, OPTIMIZERS[optimizer](model), ranks=ranks, **sections(**{"local_steps": STEPS} | case)
        ) as strategy:
            for batch in _batches(ranks.rank):
                loss = classify(model, batch)
                loss.backward()
                strategy.step()
                losses.append(loss.item())
        results.append((losses, model.state_dict()))
    return results


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_simulated_windows_are_real_ones_bit_for_bit(optimizer: str) -> None:
    trained = run_ranks(4, _train_by_windows, optimizer)
    for index, case in enumerate(WINDOWS):
        model = _model()
        optimizers = [OPTIMIZERS[optimizer](model) for _ in range(4)]
        case = case.copy()
        steps = case.pop("local_steps", STEPS)
        simulated = SimulatedLocalSteps(model, optimizers, **case)
        of_ranks = list(zip(*map(_batches, range(4)), strict=True))
        losses = []
        for start in range(0, ITERATIONS, steps):
            losses += simulated.run_window(classify, of_ranks[start : start + steps])
        simulated.flush()
        for rank, of_rank in enumerate(trained):
            own, weights = of_rank[index]
            assert [all_losses[rank] for all_losses in losses] == own
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, weights[name]), (case, name)
