"""When the guard falls back, and that all ranks do so in the same iteration."""

from __future__ import annotations

import torch
from _ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipesgd import Pipelined
from pipesgd.guard import FACTOR, SETTLE, SYNCHRONOUS_ITERATIONS, Guard
from pipesgd.launch import Ranks
from pipesgd.replicas import weights_sha256


@given(norms=st.lists(st.floats(1.0, FACTOR), max_size=200))
def test_norms_within_the_factor_are_nothing(norms: list[float]) -> None:
    guard = Guard()
    assert not any(guard.saw(norm, iteration) for iteration, norm in enumerate(norms))
    assert not any(guard.is_synchronous(iteration) for iteration in range(len(norms) + 1))


def test_a_blow_up_begins_a_time_at_width_1_which_ends() -> None:
    guard = Guard()
    for iteration in range(SETTLE):
        assert not guard.saw(1000.0 if iteration == 3 else 1.0, iteration), "the mean has not settled"
    mean = guard.state_dict()["mean"]
    assert guard.saw(FACTOR * mean * 1.01, SETTLE)
    assert not guard.saw(float("nan"), SETTLE + 1), "one fallback, not two"
    assert guard.is_synchronous(SETTLE + SYNCHRONOUS_ITERATIONS - 1)
    assert not guard.is_synchronous(SETTLE + SYNCHRONOUS_ITERATIONS)
    other = Guard()
    other.load_state_dict(guard.state_dict())
    assert other.saw(FACTOR * mean * 1.01, SETTLE + SYNCHRONOUS_ITERATIONS)


def _blow_up(ranks: Ranks, width: int) -> tuple[list[int], list[int], str]:
    """Gradients of 1, but a large one on rank 1 in iteration 30: when who fell back, and what each step applied."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pipeline = Pipelined(model, optimizer, width=width, prediction="none", guard=True, ranks=ranks)
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
        back = 33 + SYNCHRONOUS_ITERATIONS - 1
        assert applied[back : back + 3] == [0, 0, 1], "the pipeline fills again"
        assert sha256 == results[0][2]


def test_width_1_has_nothing_to_guard() -> None:
    for fell_back, applied, _ in run_ranks(2, _blow_up, 1):
        assert fell_back == []
        assert set(applied) == {1}
