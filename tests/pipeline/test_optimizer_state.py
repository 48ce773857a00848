"""State of the optimizer that ranks bring along: if it differs, all of them get rank 0's, as they get its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from _ranks import error_of, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipesgd import LocalSteps, Pipelined
from pipesgd.ddp import attach
from pipesgd.pipeline import optimizer_state
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Windows

pytestmark = pytest.mark.slow


class Counting(torch.optim.SGD):
    """SGD that counts its updates in state of the whole optimizer, and takes smaller steps with time."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["updates"] = self.state.get("updates", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["updates"]
        super().step(closure)


def _start(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    if kind == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    if kind == "counting":
        return model, Counting(model.parameters(), lr=0.1, momentum=0.9)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _backward(model: nn.Module, rank: int, iteration: int) -> None:
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    model(torch.randn(5, 4, generator=generator)).square().mean().backward()


def _after_local_steps(ranks: Ranks, kind: str) -> str:
    model, optimizer = _start(kind)
    with LocalSteps(model, optimizer, Windows(local_steps=2), ranks=ranks) as strategy:
        for iteration in range(4):
            _backward(model, ranks.rank, iteration)
            strategy.step()
    with Pipelined(model, optimizer, ranks=ranks) as pipeline:
        for iteration in range(4, 8):
            _backward(model, ranks.rank, iteration)
            pipeline.step()
    return weights_sha256(model)


@pytest.mark.parametrize("kind", ["momentum", "AdamW"])
def test_after_local_steps_all_ranks_have_one_state_of_the_optimizer(kind: str) -> None:
    """Each kept its own, applied the same means with it, and had other weights from the first update on."""
    first, second = run_ranks(2, _after_local_steps, kind)
    assert first == second


def _load_on(ranks: Ranks, kind: str, loading: int, door: str) -> tuple[str, str]:
    model, optimizer = _start(kind)
    if ranks.rank < loading:
        for iteration in range(3):
            optimizer.zero_grad()
            _backward(model, 0, iteration)
            optimizer.step()
        optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    if door == "attach":
        wrapped = DistributedDataParallel(model)
        with attach(wrapped, optimizer):
            for iteration in range(3, 6):
                optimizer.zero_grad()
                _backward(wrapped, ranks.rank, iteration)
                optimizer.step()
    else:
        with Pipelined(model, optimizer, width=1 if kind == "counting" else 2, ranks=ranks) as pipeline:
            for iteration in range(3, 6):
                _backward(model, ranks.rank, iteration)
                pipeline.step()
    return weights_sha256(model), repr(optimizer.state_dict())


@pytest.mark.parametrize(
    ("kind", "door"), [("momentum", "own"), ("AdamW", "own"), ("counting", "own"), ("AdamW", "attach")]
)
def test_a_state_that_rank_0_alone_has_loaded_is_that_of_all_ranks(kind: str, door: str) -> None:
    """The others had its weights, and no state."""
    loaded_by_all = run_ranks(2, _load_on, kind, 2, door)
    assert loaded_by_all[0] == loaded_by_all[1]
    assert run_ranks(2, _load_on, kind, 1, door) == loaded_by_all


def _of_other_kinds(ranks: Ranks) -> list[Any]:
    """Let ranks have states of other kinds than numbers and of other keys, and an object that cannot be sent."""
    model, optimizer = _start("momentum")
    weight = model[0].weight  # type: ignore[index]
    with Pipelined(model, optimizer, ranks=ranks):
        assert not optimizer.state, "nothing is made where there is no state"
    if ranks.rank == 0:
        half = torch.arange(3, dtype=torch.bfloat16)
        optimizer.state[weight] = {"list": [half, (True, None)], "sparse": torch.eye(2).to_sparse(), "empty": half[:0]}
    else:
        optimizer.state[model[2].bias] = {"other": torch.ones(3)}  # type: ignore[index]
        optimizer.state["whole"] = 3  # type: ignore[index]
    with Pipelined(model, optimizer, ranks=ranks):
        found = optimizer.state_dict()["state"]
        kept = optimizer.state[weight]["list"][0]
    with Pipelined(model, optimizer, ranks=ranks):
        assert optimizer.state[weight]["list"][0] is kept, "what is the same already is left alone"
    if ranks.rank == 0:
        optimizer.state[weight] = {"object": ranks.rank.__class__}
    return [repr(found), error_of(Pipelined, model, optimizer, ranks=ranks)]


def test_any_state_is_shared_or_refused_in_one_line() -> None:
    first, second = run_ranks(2, _of_other_kinds)
    assert first[0] == second[0]
    assert "bfloat16" in first[0]
    assert "other" not in first[0]
    assert "whole" not in first[0]
    for _, said in (first, second):
        assert (
            "state of the optimizer must be of tensors and numbers, or the same on all ranks: load it on each" in said
        )
        assert "init_sync=False" in said


def _in_slices(ranks: Ranks) -> list[str]:
    """Let states have keys that are equal as texts, a NumPy number, and more bytes than are sent at a time."""
    optimizer_state.SLICE_BYTES = 1000
    model, optimizer = _start("momentum")
    if ranks.rank == 0:
        optimizer.state["whole"] = {0: np.float64(0.5), "0": torch.arange(2000.0)}  # type: ignore[index]
    with Pipelined(model, optimizer, ranks=ranks):
        found = str(optimizer.state["whole"]["0"].sum().item())  # type: ignore[index]
        value = repr(float(optimizer.state["whole"][0]))  # type: ignore[index]
    if ranks.rank == 1:
        optimizer.state["whole"] = torch.ones(3, device="meta")  # type: ignore[index]
    return [found, value, error_of(Pipelined, model, optimizer, ranks=ranks)]


def test_states_are_sent_in_slices_and_what_one_rank_cannot_compare_is_refused_on_all() -> None:
    first, second = run_ranks(2, _in_slices)
    assert first[:2] == second[:2]
    assert first[1] == "0.5"
    for *_, said in (first, second):
        assert "rank 1: state of the optimizer must be" in said
