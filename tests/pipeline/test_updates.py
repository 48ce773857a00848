"""Hooks of the optimizer, graphs and ``.grad`` around an update, and the memory of each prediction."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from _sections import sections
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from pipesgd import Pipelined
from pipesgd.sections import Updates

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "adamw": (AdamW, {"lr": 0.01, "maximize": True}),
}


def make(name: str, parameters: Any) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(parameters, **options)  # type: ignore[call-arg]


def test_hooks_of_the_optimizer_see_every_update_and_its_gradient() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.item()))  # type: ignore[union-attr]
    pipeline = Pipelined(model, optimizer, width=2)
    for iteration in range(4):
        model(torch.full((1, 1), float(iteration))).sum().backward()
        pipeline.step()
    pipeline.close()
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_a_graph_that_was_computed_before_an_update_cannot_be_used_after_it() -> None:
    """The weights that it was computed with are no longer there, as after a step of torch's own."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    pipeline = Pipelined(model, SGD(model.parameters(), lr=0.1), width=2)
    for _ in range(3):
        loss = model(torch.ones(1, 3)).sum()
        loss.backward(retain_graph=True)
        pipeline.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        pipeline.module.zero_grad()
    pipeline.close()


def test_gradients_in_grad_are_not_part_of_the_next_ones_after_a_state_is_loaded() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    pipeline = Pipelined(model, make("momentum", model.parameters()), width=2)
    model(torch.ones(1, 2)).sum().backward()
    pipeline.step()
    state = pipeline.state_dict()
    model(torch.ones(1, 2)).sum().backward()
    pipeline.load_state_dict(state)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    pipeline.close()


COPIES = [
    # optimizer, prediction, width: how often the memory of the parameters is held between two steps, counting the
    # weights, the optimizer's state, gradients in flight, predicted weights, the errors of guesses, and of the copy of
    # the optimizer its state and a gradient.
    ("momentum", "none", 1, 1 + 1 + 1),
    ("momentum", "none", 2, 1 + 1 + 2),
    ("momentum", "local", 2, 1 + 1 + 2 + 1 + 1 + 1 + 1),
    ("momentum", "eager", 2, 1 + 1 + 2 + 1 + 1 + 1 + 1 + 1),
    ("momentum", "eager", 3, 1 + 1 + 3 + 2 + 1 + 1 + 1 + 1),
    ("sgd", "eager", 2, 1 + 0 + 2 + 1 + 1 + 1 + 0 + 1),
    ("adamw", "none", 1, 1 + 2 + 1),
    ("adamw", "eager", 2, 1 + 2 + 2 + 1 + 1 + 1 + 2 + 1),
]


@pytest.mark.parametrize(("name", "prediction", "width", "copies"), COPIES)
def test_the_memory_of_each_prediction(name: str, prediction: str, width: int, copies: int) -> None:
    numel = 12_347  # of no other tensor

    def held() -> int:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        storages = [one.untyped_storage() for one in found if one.layout is torch.strided and one.device.type == "cpu"]
        return len({storage.data_ptr() for storage in storages if storage.nbytes() == 4 * numel})

    model = nn.Linear(numel, 1, bias=False)
    before = held()
    assert before == 1
    pipeline = Pipelined(model, make(name, model.parameters()), width=width, updates=Updates(prediction=prediction))
    for iteration in range(5):
        model(torch.full((1, numel), float(iteration))).sum().backward()
        pipeline.step()
    assert held() == copies
    pipeline.close()


class Both(nn.Module):
    """Two layers of one kind whose outputs are added."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, inputs: Tensor) -> Tensor:
        added: Tensor = self.first(inputs) + self.second(inputs)
        return added


@pytest.mark.parametrize("options", [{}, {"buckets": 2}, {"reduce": "rows"}, {"reduce": "factors"}])
@pytest.mark.parametrize(
    ("prediction", "width", "copies"),
    [("none", 1, 1 + 1 + 1), ("none", 2, 1 + 1 + 2), ("eager", 2, 1 + 1 + 2 + 1 + 1 + 1 + 1 + 1)],
)
def test_buckets_rows_and_factors_hold_no_further_copy(
    options: dict[str, Any], prediction: str, width: int, copies: int
) -> None:
    """Bytes of all tensors that are as large as one of two weights or a multiple of it, as a multiple of both."""
    numel = 12_347  # of no other tensor

    def held() -> float:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        strided = [one.untyped_storage() for one in found if one.layout is torch.strided and one.device.type == "cpu"]
        storages = {one.data_ptr(): one.nbytes() for one in strided}
        return sum(nbytes for nbytes in storages.values() if nbytes % (4 * numel) == 0) / (2 * 4 * numel)

    by_rows = options.get("reduce") == "rows"
    layers = [nn.Embedding(numel, 1) if by_rows else nn.Linear(1, numel, bias=False) for _ in range(2)]
    model = Both(*layers)
    del layers
    assert held() == 1
    optimizer = make("momentum", model.parameters())
    pipeline = Pipelined(model, optimizer, width=width, **sections(prediction=prediction, **options))
    for iteration in range(5):
        inputs = torch.tensor([iteration, 7]) if by_rows else torch.full((2, 1), float(iteration))
        model(inputs).sum().backward()
        del inputs
        pipeline.step()
    pipeline.pipeline.flight.wait_until_summed()  # what has left is summed
    assert held() == copies
    pipeline.close()
