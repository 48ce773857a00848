"""The strategy compared with one-process references, torch's DDP, and exact integers."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from _fashion_mnist import fashion_mnist_batches, momentum_sgd, paper_mlp
from _ranks import run_ranks
from _reference import pipe_sgd
from _sections import sections
from _small_problem import (
    OPTIMIZERS,
    Case,
    assert_as_in_one_process,
    assert_same_weights,
    classify,
    different,
    train_cases,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments.predictions import COMPARED
from pipesgd import Pipelined, flat_buffer
from pipesgd.errors import NonFiniteGradientError, UserInputError
from pipesgd.pipeline.prediction import Prediction
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates, Wire

pytestmark = pytest.mark.slow


def _train_on_fashion_mnist(
    ranks: Ranks, width: int, all_reduce: str, iterations: int, dtype: torch.dtype
) -> tuple[list[float], list[str], dict[str, Tensor]]:
    model = paper_mlp(dtype)
    pipeline = Pipelined(
        model,
        momentum_sgd(model),
        width=width,
        ranks=ranks,
        updates=Updates(prediction="none"),
        wire=Wire(all_reduce=all_reduce),
    )
    losses, hashes = [], []
    for batch in fashion_mnist_batches(ranks.rank, ranks.world_size, iterations, dtype):
        loss = classify(model, batch)
        loss.backward()
        pipeline.step()
        losses.append(loss.item())
        hashes.append(weights_sha256(model))
    pipeline.flush()
    pipeline.close()
    return losses, [*hashes, weights_sha256(model)], model.state_dict()


def _train_with_each(
    ranks: Ranks, width: int, iterations: int, dtype: torch.dtype
) -> list[tuple[list[float], list[str], dict[str, Tensor]]]:
    return [_train_on_fashion_mnist(ranks, width, name, iterations, dtype) for name in ("ring", "native")]


def _train_with_ddp(ranks: Ranks, iterations: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    model = paper_mlp(dtype)
    wrapped = DistributedDataParallel(model)
    optimizer = momentum_sgd(model)
    losses = []
    for batch in fashion_mnist_batches(ranks.rank, ranks.world_size, iterations, dtype):
        optimizer.zero_grad()
        loss = classify(wrapped, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("width", [1, 2, 3])
def test_on_fashion_mnist_it_is_the_recursion_of_the_paper(width: int) -> None:
    """In float64, nothing but the order of four additions differs: 1e-11 over 6 iterations.

    The weights are bit-identical on all ranks after every iteration.
    """
    iterations, dtype = 6, torch.float64
    model = paper_mlp(dtype)
    shards = [fashion_mnist_batches(rank, 4, iterations, dtype) for rank in range(4)]
    losses = pipe_sgd(model, momentum_sgd(model), classify, list(zip(*shards, strict=True)), width=width)
    for results in zip(*run_ranks(4, _train_with_each, width, iterations, dtype), strict=True):
        for hashes in zip(*(hashes for _, hashes, _ in results), strict=True):
            assert len(set(hashes)) == 1
        for rank, (ours, _, weights) in enumerate(results):
            assert ours == pytest.approx([of_ranks[rank] for of_ranks in losses], rel=1e-11)
            assert_same_weights(weights, model.state_dict(), rtol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_width_1_is_ddp_and_one_process_on_the_whole_batch(dtype: torch.dtype, tolerance: float) -> None:
    """DDP divides before it adds, in another order; one process adds 128 samples at once: only rounding differs.

    Over 6 iterations with momentum that is 1e-11 in float64 and 2e-5 in float32 (100 units in the last place).
    """
    iterations = 6
    ours = run_ranks(4, _train_on_fashion_mnist, 1, "ring", iterations, dtype)
    ddp = run_ranks(4, _train_with_ddp, iterations, dtype)
    for (losses, _, weights), (ddp_losses, ddp_weights) in zip(ours, ddp, strict=True):
        assert losses == pytest.approx(ddp_losses, rel=tolerance)
        assert_same_weights(weights, ddp_weights, rtol=tolerance)

    model = paper_mlp(dtype)
    optimizer = momentum_sgd(model)
    shards = [fashion_mnist_batches(rank, 4, iterations, dtype) for rank in range(4)]
    for iteration, of_ranks in enumerate(zip(*shards, strict=True)):
        optimizer.zero_grad()
        whole = tuple(torch.cat(parts) for parts in zip(*of_ranks, strict=True))
        loss = classify(model, whole)
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(sum(losses[iteration] for losses, _, _ in ours) / 4, rel=tolerance)
    assert_same_weights(ours[0][2], model.state_dict(), rtol=tolerance)


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "sizes": st.lists(st.integers(1, 6), min_size=2, max_size=4),
        "iterations": st.integers(1, 7),
        "width": st.integers(1, 5),
        "start": st.integers(0, 4),
        "prediction": st.just("none"),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "clip": st.just({}),
        "options": st.sampled_from(
            [
                {"all_reduce": "ring", "segment_bytes": 64},
                {"all_reduce": "native"},
                {"all_reduce": "ring", "buckets": 2},
                {"all_reduce": "native", "buckets": "64B"},
            ]
        ),
        "scheduled": st.booleans(),
    }
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@settings(max_examples=2)  # hypothesis begins with the simplest of all
@given(cases=st.lists(CASES, min_size=12, max_size=12))
def test_any_width_start_optimizer_and_schedule_is_the_recursion(world_size: int, cases: list[Case]) -> None:
    cases = different(cases)
    outcomes = run_ranks(world_size, train_cases, cases)
    assert_as_in_one_process(outcomes, cases, OPTIMIZERS, rtol=1e-9)


class OddParameters(nn.Module):
    """A module with the parameters and buffers that a layout can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.transposed = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.shared = nn.Linear(3, 3, bias=False)
        self.tied = self.shared
        self.unused = nn.Parameter(torch.full((2,), 7.0))
        self.frozen = nn.Parameter(torch.full((2,), 9.0), requires_grad=False)
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))

    def loss(self, scale: float) -> Tensor:
        """Return a loss linear in every parameter but the unused: its gradient is ``scale`` times fixed integers."""
        weight = torch.arange(12.0).view(4, 3)
        parts = [self.scalar * 3, self.one.sum(), self.empty.sum(), (self.transposed * weight).sum(), self.wide.sum()]
        parts += [self.shared.weight.sum(), (self.tied.weight * 2).sum()]
        return scale * torch.stack([part.double() for part in parts]).sum()


PIPELINES = [(1, 4, "3"), (2, 5, "1"), (3, 2, "1B"), (4, 9, "1")]
"""Widths, iterations and buckets."""


def _sums_of_applied_gradients(ranks: Ranks) -> list[dict[str, Tensor]]:
    return [_sum_of_applied_gradients(ranks, *pipeline) for pipeline in PIPELINES]


def _sum_of_applied_gradients(ranks: Ranks, width: int, iterations: int, buckets: str) -> dict[str, Tensor]:
    """Train with SGD at lr 1, so that the weights fall by exactly the sum of all applied means; return that sum."""
    torch.manual_seed(ranks.rank)
    model = OddParameters()
    with torch.no_grad():
        model.shared.weight.copy_(torch.arange(9.0).view(3, 3) + ranks.rank)
        model.flag.copy_(torch.tensor([True, False]) if ranks.rank == 0 else torch.tensor([True, True]))
        model.count.fill_(3 + ranks.rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    pipeline = Pipelined(model, optimizer, width=width, ranks=ranks, wire=Wire(segment_bytes=16, buckets=buckets))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    applied = []
    for iteration in range(iterations):
        model.loss(float(ranks.world_size * (iteration + ranks.rank + 1))).backward()
        applied += pipeline.step().applied
    applied += pipeline.flush().applied
    assert applied == list(range(iterations)), "every gradient once, in order"
    assert pipeline.flush().applied == (), "nothing twice"
    assert pipeline.buffers_allocated == min(width, iterations)
    pipeline.close()
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: before[name].double() - value.double() for name, value in model.state_dict().items()} | {
        "flag before": before["flag"],
        "count before": before["count"],
        "shared before": before["shared.weight"],
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_no_gradient_is_lost_or_applied_twice(world_size: int) -> None:
    of_ranks = run_ranks(world_size, _sums_of_applied_gradients)
    for (_, iterations, _), moved in [pair for of_rank in of_ranks for pair in zip(PIPELINES, of_rank, strict=True)]:
        total = float(sum(iteration + rank + 1 for iteration in range(iterations) for rank in range(world_size)))
        assert moved["scalar"] == 3 * total
        assert moved["one"].tolist() == [total]
        assert moved["empty"].shape == (0, 3)
        assert torch.equal(moved["transposed"], torch.arange(12.0, dtype=torch.float64).view(4, 3) * total)
        assert moved["wide"].tolist() == [total] * 5
        assert torch.equal(moved["shared.weight"], torch.full((3, 3), 3 * total, dtype=torch.float64))
        assert moved["unused"].tolist() == moved["frozen"].tolist() == [0.0, 0.0]
        # All ranks started from rank 0's values.
        assert moved["flag before"].tolist() == [True, False]
        assert moved["count before"] == 3
        assert torch.equal(moved["shared before"], torch.arange(9.0).view(3, 3))


def _one_rank_computes_nan(ranks: Ranks, on_nonfinite: str, value: float) -> tuple[list[tuple[int, ...]], Any, str]:
    model = nn.Linear(2, 1)
    pipeline = Pipelined(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        width=2,
        ranks=ranks,
        updates=Updates(on_nonfinite=on_nonfinite),
    )
    skipped, error = [], None
    for iteration in range(6):
        scale = value if ranks.rank == 1 and iteration == 3 else 1.0
        (model(torch.ones(1, 2)).sum() * scale).backward()
        try:
            skipped.append(pipeline.step().skipped)
        except NonFiniteGradientError as failure:
            error = (iteration, failure.iteration)
            break
    pipeline.close()
    return skipped, error, weights_sha256(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_stops_all_ranks_in_the_same_iteration(value: float) -> None:
    for skipped, error, _ in run_ranks(3, _one_rank_computes_nan, "stop", value):
        assert error == (4, 3), "computed in iteration 3, due in iteration 4"
        assert len(skipped) == 4


def _whose_gradients(ranks: Ranks, culprits: list[int]) -> list[tuple[str, Any, list[tuple[int, ...]]]]:
    """Return, for each pipeline, whether it is to stop or skip, its error, and the ranks that it names."""
    return [
        (on_nonfinite, *_whose_gradient(ranks, prediction, width, on_nonfinite, culprits))
        for prediction, width in (("none", 1), ("none", 2), ("eager", 2))
        for on_nonfinite in ("stop", "skip")
    ]


def _whose_gradient(
    ranks: Ranks, prediction: str, width: int, on_nonfinite: str, culprits: list[int]
) -> tuple[Any, list[tuple[int, ...]]]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = Pipelined(
        model, optimizer, width=width, ranks=ranks, updates=Updates(prediction=prediction, on_nonfinite=on_nonfinite)
    )
    error, named = None, []
    for iteration in range(4):
        scale = float("nan") if ranks.rank in culprits and iteration == 1 else 1.0
        (model(torch.ones(1, 2)).sum() * scale).backward()
        try:
            named.append(pipeline.step().nonfinite_ranks)
        except NonFiniteGradientError as failure:
            error = failure.iteration, failure.ranks, str(failure)
            break
    pipeline.close()
    return error, named


@pytest.mark.parametrize(
    ("culprits", "advice"),
    [
        ([1], "so does the own gradient of rank 1, and of no other rank: look at the data there, or leave such"),
        ([0, 2], "so does the own gradient of ranks 0, 2, and of no other rank: look at the data there"),
        ([0, 1, 2], "so does every rank's own gradient, so training has diverged: lower --lr"),
    ],
)
def test_a_gradient_that_is_not_finite_is_traced_to_the_ranks_that_brought_it(culprits: list[int], advice: str) -> None:
    of_ranks = run_ranks(3, _whose_gradients, culprits)
    for on_nonfinite, error, named in [found for of_rank in of_ranks for found in of_rank]:
        if on_nonfinite == "stop":
            iteration, ranks, text = error
            assert (iteration, ranks) == (1, tuple(culprits))
            assert advice in text
        else:
            assert error is None
            assert [ranks for ranks in named if ranks] == [tuple(culprits)]


def test_a_sum_that_overflows_is_no_ranks_own() -> None:
    assert "every rank's own gradient is finite, so their sum overflows" in str(NonFiniteGradientError(3, (), 4))


def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks() -> None:
    results = run_ranks(3, _one_rank_computes_nan, "skip", float("nan"))
    for skipped, error, sha256 in results:
        assert error is None
        assert skipped == [(), (), (), (), (3,), ()]
        assert sha256 == results[0][2]


def _resume_in_the_middle(ranks: Ranks, width: int, prediction: str | type[Prediction], at: int) -> tuple[str, str]:
    def build() -> tuple[nn.Module, Any, Any, Pipelined]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        pipeline = Pipelined(model, optimizer, width=width, ranks=ranks, updates=Updates(prediction=prediction))
        return model, optimizer, schedule, pipeline

    def run(parts: tuple[nn.Module, Any, Any, Pipelined], first: int, last: int) -> None:
        model, _, schedule, pipeline = parts
        for iteration in range(first, last):
            generator = torch.Generator().manual_seed(100 * iteration + ranks.rank)
            model(torch.randn(3, 4, generator=generator)).square().sum().backward()
            pipeline.step()
            schedule.step()

    def states(parts: tuple[nn.Module, Any, Any, Pipelined]) -> list[dict[str, Any]]:
        with parts[3].true_weights():
            return copy.deepcopy([part.state_dict() for part in parts])

    one = build()
    run(one, 0, at)
    saved = states(one)
    run(one, at, 9)
    one[3].flush()

    other = build()
    run(other, 0, 3)  # something else is in flight when the state is loaded
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    run(other, at, 9)
    other[3].flush()
    for parts in (one, other):
        parts[3].close()
    return weights_sha256(one[0]), weights_sha256(other[0])


@pytest.mark.parametrize(
    ("width", "prediction", "at"),
    [(1, "local", 4), (2, "local", 1), (2, "none", 5), (3, "local", 2), (4, "local", 8)]
    + [(3, prediction, 4) for prediction in ("eager", *COMPARED.values())],
)
def test_a_state_dict_continues_bit_for_bit(width: int, prediction: str | type[Prediction], at: int) -> None:
    for uninterrupted, resumed in run_ranks(2, _resume_in_the_middle, width, prediction, at):
        assert resumed == uninterrupted


def _average_buffers(ranks: Ranks) -> tuple[list[float], int]:
    model = nn.BatchNorm1d(2)
    pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks)
    model.running_mean.copy_(torch.tensor([1.0, 10.0]) * (ranks.rank + 1))
    model.num_batches_tracked.fill_(4)
    pipeline.combine_buffers()
    pipeline.close()
    return model.running_mean.tolist(), int(model.num_batches_tracked)


def test_buffers_are_averaged_over_ranks() -> None:
    assert run_ranks(3, _average_buffers) == [([2.0, 20.0], 4)] * 3


def test_without_torchrun_one_rank_trains_alone() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.fill_(0.0)
    pipeline = Pipelined(model, optimizer, width=3)
    for _ in range(4):
        model(torch.ones(1, 1)).sum().backward()
        pipeline.step()
    with pipeline.true_weights():
        assert model.weight.item() == -2.0, "two of four are in flight"
    with pipeline.true_weights():
        assert model.weight.item() == -2.0
    pipeline.flush()
    assert model.weight.item() == -4.0
    pipeline.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width must be at least 1; got 0"),
        ({"width": 65}, "width must be at most 64"),
        ({"synchronous_start": -1}, "synchronous-start must be at least 0; got -1"),
        ({"all_reduce": "rign"}, "did you mean ring"),
        ({"on_nonfinite": "ignore"}, "on-nonfinite must be stop or skip; got 'ignore'"),
        ({"timeout": 0}, "timeout must be from 0.1 to 1,000,000 seconds; got 0"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UserInputError, match=message):
        Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0), **sections(**arguments))


def test_nothing_to_train_is_refused() -> None:
    model = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(UserInputError, match="a parameter that requires a gradient"):
        Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_sparse_gradients_are_refused() -> None:
    """The message offered --reduce rows, too, which topk and others refuse."""
    model = nn.Embedding(3, 2, sparse=True)
    pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0), codec="topk")
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(
        UserInputError, match=r"^gradients must be dense; .* \(use sparse=False in torch.nn.Embedding\)$"
    ):
        pipeline.step()
    pipeline.close()


@pytest.mark.parametrize("prediction", ["none", COMPARED["previous"], COMPARED["dc"]])
def test_gradients_that_are_not_kept_are_looked_at_beside_the_computation(
    prediction: str | type[Prediction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's thread used to make one more pass over all gradients in every step."""
    threads = []

    def all_finite(buffer: flat_buffer.FlatBuffer) -> bool:
        threads.append(threading.current_thread().name)
        return flat_buffer.all_finite(buffer)

    monkeypatch.setattr("pipesgd.pipeline.flight.all_finite", all_finite)
    model = torch.nn.Linear(1, 1)
    with Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=0.1), updates=Updates(prediction=prediction)
    ) as pipeline:
        model(torch.ones(1, 1)).sum().backward()
        pipeline.step()
    assert threads == ["pipesgd-communication"]
