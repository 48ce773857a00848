"""The guard against divergence: its conditions, and ranks that all fall back in the same iteration."""

from __future__ import annotations

import math

import pytest
import torch
from _ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipesgd import Pipelined
from pipesgd.pipeline.width import FACTOR, SETTLE, SYNCHRONOUS_ITERATIONS, make_width
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates

pytestmark = pytest.mark.slow


@given(norms=st.lists(st.floats(1.0, FACTOR), max_size=200))
def test_norms_within_the_factor_are_nothing(norms: list[float]) -> None:
    guard = make_width(2, guard=True)
    assert not any(guard.observe(norm, iteration) for iteration, norm in enumerate(norms))
    assert all(guard.of(iteration, []) == 2 for iteration in range(len(norms)))


def test_a_blow_up_begins_a_time_at_width_1_which_ends() -> None:
    guard = make_width(2, guard=True)
    for iteration in range(SETTLE):
        assert not guard.observe(1000.0 if iteration == 3 else 1.0, iteration), "the mean has not settled"
    mean = guard.state_dict()["mean"]
    assert guard.observe(FACTOR * mean * 1.01, SETTLE)
    assert not guard.observe(float("nan"), SETTLE + 1), "one fallback, not two"
    assert guard.of(SETTLE + SYNCHRONOUS_ITERATIONS - 1, []) == 1
    assert guard.of(SETTLE + SYNCHRONOUS_ITERATIONS, []) == 2
    other = make_width(2, guard=True)
    other.load_state_dict(guard.state_dict())
    assert other.observe(FACTOR * mean * 1.01, SETTLE + SYNCHRONOUS_ITERATIONS)


def _fallbacks(norms: list[float]) -> list[int]:
    guard = make_width(2, guard=True)
    return [iteration for iteration, norm in enumerate(norms) if guard.observe(norm, iteration)]


@pytest.mark.parametrize("level", [6.0, 100.0, 1000.0])
def test_norms_that_stay_at_another_level_cost_one_fallback(level: float) -> None:
    assert _fallbacks([1.0] * 50 + [level] * 1000) == [50]


def test_zero_norms_at_the_start_say_nothing_about_the_level() -> None:
    assert _fallbacks([0.0] * 2 * SETTLE + [1.0] * 200) == []
    assert _fallbacks([0.0] * 2 * SETTLE + [1.0] * SETTLE + [2 * FACTOR]) == [3 * SETTLE]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_never_enters_the_mean(bad: float) -> None:
    guard = make_width(2, guard=True)
    for iteration in range(SETTLE + 3):
        assert not guard.observe(bad if iteration < 3 else 1.0, iteration)
    assert guard.observe(bad, SETTLE + 3)
    assert not guard.observe(bad, SETTLE + 4)
    assert guard.state_dict()["mean"] == 1.0


def _infinite_now_and_then(ranks: Ranks) -> tuple[list[int], list[int]]:
    """Use gradients of 1, but infinite ones on rank 1, as from loss scaling; return fall-backs and skips."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipeline = Pipelined(
        model, optimizer, width=2, scaler=scaler, ranks=ranks, updates=Updates(prediction="none", guard=True)
    )
    fell_back, skipped = [], []
    for iteration in range(3 * SETTLE):
        infinite = ranks.rank == 1 and iteration in (0, 1, SETTLE + 10)
        scaler.scale(model(torch.ones(1, 1)).sum() * (math.inf if infinite else 1.0)).backward()
        report = pipeline.step()
        skipped += report.skipped
        if report.fell_back:
            fell_back.append(iteration)
    pipeline.flush()
    pipeline.close()
    return fell_back, skipped


def test_gradients_that_are_skipped_are_no_blow_up() -> None:
    assert run_ranks(2, _infinite_now_and_then) == [([], [0, 1, SETTLE + 10])] * 2


def _norms_of_complex_parameters(ranks: Ranks) -> float:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    pipeline = Pipelined(
        nn.ParameterList([parameter]),
        torch.optim.SGD([parameter], lr=0.1),
        ranks=ranks,
        updates=Updates(guard=True, prediction="none"),
    )
    for _ in range(2):
        parameter.grad = torch.tensor([3.0, 4.0j])
        pipeline.step()
    mean: float = pipeline.state_dict()["width"]["mean"]
    pipeline.flush()
    pipeline.close()
    return mean


def test_the_norm_of_complex_gradients_is_that_of_their_real_and_imaginary_parts() -> None:
    assert run_ranks(2, _norms_of_complex_parameters) == [5.0, 5.0]


def _blow_up(ranks: Ranks, width: int) -> tuple[list[int], list[int], str]:
    """Use gradients of 1, but a large one on rank 1 in iteration 30; return fall-backs, updates per step and a hash."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pipeline = Pipelined(model, optimizer, width=width, ranks=ranks, updates=Updates(prediction="none", guard=True))
    fell_back, applied = [], []
    for iteration in range(SYNCHRONOUS_ITERATIONS + 40):
        scale = 1000.0 if (ranks.rank, iteration) == (1, 30) else 1.0
        (model(torch.ones(1, 1)).sum() * scale).backward()
        report = pipeline.step()
        applied.append(len(report.applied))
        if report.fell_back:
            fell_back.append(iteration)
    pipeline.flush()
    pipeline.close()
    return fell_back, applied, weights_sha256(model)


def test_all_ranks_fall_back_in_the_same_iteration_and_return() -> None:
    results = run_ranks(3, _blow_up, 3)
    for fell_back, applied, sha256 in results:
        assert fell_back == [32], "computed in iteration 30, applied two later"
        assert applied[:2] == [0, 0]
        assert applied[33] == 3, "what was in flight is applied"
        back = 33 + SYNCHRONOUS_ITERATIONS
        assert applied[back : back + 3] == [0, 0, 1], "the pipeline fills again"
        assert sha256 == results[0][2]


def test_width_1_has_nothing_to_guard() -> None:
    for fell_back, applied, _ in run_ranks(2, _blow_up, 1):
        assert fell_back == []
        assert set(applied) == {1}
