"""A strategy that replaces another one during a run: the state it keeps, and the run after it."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from torch import Tensor, nn

from pipesgd.pipeline.divergence_guard import SETTLE
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.planning.swap import swap_strategy
from pipesgd.ranks import Ranks
from pipesgd.run.state import RunState

pytestmark = pytest.mark.slow


def _swapped(ranks: Ranks, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Replace a strategy with options ``before`` by one with ``after``; return properties of the run after that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(70), nn.Linear(70, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(ranks.rank)
    inputs = torch.randn(10, 4, 70)
    old = Pipelined(model, optimizer, ranks=ranks, **before)
    state = RunState(
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.ConstantLR(optimizer),
        strategy=old,
        losses=collections.deque(),
    )

    def step(batch: Tensor) -> tuple[int, ...]:
        model(batch).square().mean().backward()
        return state.strategy.step().applied

    for batch in inputs[:6]:
        step(batch)
    old.flush()
    kept = old.state_dict()
    values = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    swap_strategy(
        state,
        lambda former: Pipelined(model, optimizer, init_sync=False, ranks=ranks, successor_of=former, **after),
        same_codec=before["codec"] == after["codec"],
    )
    new = state.strategy
    assert isinstance(new, Pipelined)
    left_out, new._packing.left_out = new._packing.left_out, ()
    now = new.state_dict()
    new.add_to_next_gradient(left_out)
    same = all(map(torch.equal, values, (*model.parameters(), *model.buffers())))
    for batch in inputs[6:]:
        applied = step(batch)
    new.flush()
    new.close()
    return {
        "replaced": new is not old and old.closed,
        "connections kept": new._summing.connections is old._summing.connections,
        "iteration": now["iteration"],
        "same": same,
        "left out": [one.tolist() for one in left_out],
        "cosine": now["agreement"]["cosine"] == kept["agreement"]["cosine"] < 1,
        "residuals": [one.tolist() for one in now["reducer"].get("residuals", [])],
        "before": [one.tolist() for one in kept["reducer"].get("residuals", [])],
        "applied": applied,
        "statistics": model[0].running_mean.tolist(),  # type: ignore[union-attr]
        "after": model[1].weight.tolist(),
    }


def sorted_values(flats: list[list[float]]) -> list[float]:
    """Return the values of residuals, which other buckets hold in another order."""
    return sorted(value for flat in flats for value in flat)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"width": 2, "codec": "int4"}, {"width": 3, "codec": "int4", "all_reduce": "halving-doubling"}),
        ({"width": 2, "codec": "int4"}, {"width": 1, "codec": "fp32"}),
        ({"width": 1, "codec": "int4", "buckets": 4}, {"width": 1, "codec": "int4"}),
        ({"width": 2, "codec": "int4"}, {"width": 1, "codec": "fp32", "buckets": 2}),
        ({"width": 1, "codec": "fp32"}, {"width": 2, "codec": "int4"}),
        ({"width": 3, "codec": "int8", "prediction": "none"}, {"width": 1, "codec": "int8"}),
        (
            {"width": 2, "codec": "int4", "reduce": "auto"},
            {"width": 1, "codec": "int4", "reduce": "auto", "buckets": 2},
        ),
        ({"width": 2, "codec": "int4", "reduce": "factors"}, {"width": 1, "codec": "fp32", "reduce": "factors"}),
    ],
)
def test_a_strategy_follows_another_one_with_what_it_knew(before: dict[str, Any], after: dict[str, Any]) -> None:
    one, other = run_ranks(2, _swapped, before, after)
    for found in (one, other):
        assert found["replaced"]
        assert found["connections kept"] == ("all_reduce" not in after)
        assert (found["iteration"], found["same"]) == (6, True)
        assert found["applied"] == (9 - (after["width"] - 1),)
        assert found["cosine"] == (before["width"] > 1 and "prediction" not in before)
        assert sorted_values(found["left out"]) == (
            sorted_values(found["before"]) if before["codec"] != after["codec"] else []
        )
        if before["codec"] == after["codec"] == "int4":
            assert sorted_values(found["residuals"]) == sorted_values(found["before"])
            assert any(value != 0 for flat in found["residuals"] for value in flat)
    assert one["after"] == other["after"]
    assert one["statistics"] != other["statistics"]  # those of batch norm, over each rank's own samples


def _guard_over_width_1(ranks: Ranks) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """Return whether a guard falls back, and its state before and after a turn of width 1."""
    torch.manual_seed(0)
    model = nn.Linear(7, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    options: dict[str, Any] = {"guard": True, "ranks": ranks}
    old = Pipelined(model, optimizer, width=2, **options)
    state = RunState(model=model, optimizer=optimizer, schedule=schedule, strategy=old, losses=collections.deque())

    def step(scale: float = 1.0) -> bool:
        model(scale * torch.randn(4, 7)).square().mean().backward()
        return state.strategy.step().fell_back

    for _ in range(2 * SETTLE):
        assert not step()
    step(1e3)
    fell_back = step()
    old.flush()
    before = old.state_dict()["guard"]
    for width in (1, 2):
        make = functools.partial(Pipelined, model, optimizer, width=width, init_sync=False, **options)
        swap_strategy(state, lambda former, make=make: make(successor_of=former), same_codec=True)
        after = state.strategy.state_dict()["guard"]
        step()
    state.strategy.close()
    return fell_back, before, after


def test_a_guard_keeps_what_it_knows_over_a_turn_of_width_1() -> None:
    for fell_back, before, after in run_ranks(2, _guard_over_width_1):
        assert fell_back
        assert before == after


def _residual_in_the_next_gradient(ranks: Ranks) -> tuple[list[float], list[float], list[float]]:
    """Return this rank's residual, its next gradient, and the update that follows at a learning rate of 1."""
    torch.manual_seed(0)
    model = nn.Linear(70, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(ranks.rank)
    inputs = torch.randn(4, 4, 70)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    old = Pipelined(model, optimizer, width=1, codec="int4", ranks=ranks)
    state = RunState(model=model, optimizer=optimizer, schedule=schedule, strategy=old, losses=collections.deque())
    for batch in inputs[:3]:
        model(batch).square().mean().backward()
        old.step()
    [residual] = old.state_dict()["reducer"]["residuals"]
    options: dict[str, Any] = {"width": 1, "init_sync": False, "ranks": ranks}
    swap_strategy(state, lambda former: Pipelined(model, optimizer, successor_of=former, **options), same_codec=False)
    before = model.weight.detach().clone()
    model(inputs[3]).square().mean().backward()
    assert model.weight.grad is not None
    gradient = model.weight.grad.flatten().tolist()
    state.strategy.step()
    update = (before - model.weight.detach()).flatten().tolist()
    state.strategy.close()
    return residual.tolist(), gradient, update


def test_what_one_codec_has_left_out_is_in_the_next_gradient_of_another() -> None:
    found = run_ranks(2, _residual_in_the_next_gradient)
    residuals, gradients, updates = (torch.tensor(one) for one in zip(*found, strict=True))
    assert residuals.abs().max() > 1e-3
    torch.testing.assert_close(updates[0], (gradients + residuals).mean(dim=0), atol=1e-6, rtol=1e-5)
    assert torch.equal(updates[0], updates[1])
