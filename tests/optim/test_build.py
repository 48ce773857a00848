"""Optimizers and schedules by name, and Muon with AdamW as one optimizer, compared with torch's two."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipesgd.config import OPTIMIZERS, SCHEDULES, OptimizationConfig
from pipesgd.data import build_model
from pipesgd.errors import UserInputError
from pipesgd.optim.build import build_optimizer, build_schedule
from pipesgd.optim.muon import MuonWithAdamW, hidden_matrices

ITERATIONS = 6


def small_model() -> nn.Module:
    """Build a model of two hidden matrices, three biases, a 4-D weight and an output layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)
    )


def parted(model: nn.Module) -> tuple[list[Parameter], list[Parameter]]:
    """Return the hidden matrices of ``small_model``, and its other parameters."""
    matrices = [model[2].weight, model[4].weight]
    return matrices, [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]


def muon_with_adamw(model: nn.Module, lr: float = 0.02) -> MuonWithAdamW:
    matrices, others = parted(model)
    return MuonWithAdamW(matrices, others, lr=lr, weight_decay=0.1)


def set_gradients(model: nn.Module, iteration: int) -> None:
    generator = torch.Generator().manual_seed(iteration)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(model: nn.Module, step: Callable[[], Any], iterations: Sequence[int]) -> list[Tensor]:
    """Return the weights after a step on the gradients of each of ``iterations``."""
    for iteration in iterations:
        set_gradients(model, iteration)
        step()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_loss(name: str) -> None:
    model = small_model()
    inputs = torch.randn(32, 1, 4, 4)
    labels = inputs.flatten(1)[:, :3].argmax(dim=1)
    optimizer = build_optimizer(OptimizationConfig(optimizer=name, lr=0.02, weight_decay=1e-3), model)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {1e-3}
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_every_name_is_another_optimizer() -> None:
    """No name falls through to another optimizer."""
    results = []
    for name in OPTIMIZERS:
        model = small_model()
        optimizer = build_optimizer(OptimizationConfig(optimizer=name, weight_decay=0.1), model)
        results.append(train(model, optimizer.step, range(3)))
    assert not any(same(one, other) for index, one in enumerate(results) for other in results[:index])


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_betas_are_those_of_the_optimizer(name: str) -> None:
    optimizer = build_optimizer(OptimizationConfig(optimizer=name, betas=(0.8, 0.95)), small_model())
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.95)]


def rates(iterations: int, **options: Any) -> list[float]:
    """Return the learning rate of each iteration."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule, found = build_schedule(OptimizationConfig(lr=2.0, **options), optimizer, iterations), []
    for _ in range(iterations):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_a_learning_rate_rises_linearly_and_then_follows_its_schedule() -> None:
    assert rates(6, lr_warmup=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(8, schedule="cosine", lr_warmup=4)[4:] == rates(4, schedule="cosine")
    assert rates(2, schedule="cosine", lr_warmup=4) == [0.5, 1.0], "a run that ends while it rises"
    assert rates(2, schedule="cosine", lr_warmup=2) == [1.0, 2.0], "and one that ends when it has risen"


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "adamw"])
def test_steps_are_fused_where_torch_can(name: str) -> None:
    config = OptimizationConfig(optimizer=name)
    complex_ones = nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])
    found = [build_optimizer(config, model).param_groups[0]["fused"] for model in (nn.Linear(2, 2), complex_ones)]
    assert found == [True, False]


def test_it_is_muon_and_adamw_side_by_side() -> None:
    ours, theirs = small_model(), small_model()
    matrices, others = parted(theirs)
    muon = Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(others, lr=0.02, weight_decay=0.1)
    optimizer = build_optimizer(OptimizationConfig(optimizer="muon", lr=0.02, weight_decay=0.1), ours)
    expected = train(theirs, lambda: (muon.step(), adamw.step()), range(ITERATIONS))
    assert same(train(ours, optimizer.step, range(ITERATIONS)), expected)
    assert not same(expected, weights(small_model()))
    theirs_kept = {**muon.state, **adamw.state}
    for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert optimizer.state[our].keys() == theirs_kept[their].keys()


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    for name in ("2.weight", "2.bias"):
        model = small_model()
        optimizer, left_out = muon_with_adamw(model), model.get_parameter(name)
        before = left_out.detach().clone()
        set_gradients(model, 0)
        left_out.grad = None
        optimizer.step()
        assert torch.equal(left_out, before)
        assert left_out not in optimizer.state


def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    model = small_model()
    optimizer, calls = muon_with_adamw(model), []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        set_gradients(model, 0)
        return 3.0

    before = weights(model)
    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    assert not any(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))


def test_a_state_dict_continues_bit_for_bit_in_a_fresh_optimizer() -> None:
    whole = small_model()
    expected = train(whole, muon_with_adamw(whole).step, range(ITERATIONS))

    first = small_model()
    optimizer = muon_with_adamw(first)
    train(first, optimizer.step, range(2))
    second = small_model()
    second.load_state_dict(first.state_dict())
    fresh = muon_with_adamw(second, lr=0.5)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {group["lr"] for group in fresh.param_groups} == {0.02}
    assert same(train(second, fresh.step, range(2, ITERATIONS)), expected)


def test_a_pickled_model_and_optimizer_continue_bit_for_bit() -> None:
    whole = small_model()
    expected = train(whole, muon_with_adamw(whole).step, range(ITERATIONS))

    model = small_model()
    optimizer = muon_with_adamw(model)
    train(model, optimizer.step, range(2))
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    assert same(train(model, optimizer.step, range(2, ITERATIONS)), expected)


@pytest.mark.parametrize("load", ["neither", "the copy", "the original"])
def test_a_deep_copy_holds_the_same_parameters_and_a_state_of_its_own(load: str) -> None:
    """A prediction needs this: the copy steps ahead on weights that are put back, and the original is not affected."""
    whole = small_model()
    expected = train(whole, muon_with_adamw(whole).step, range(ITERATIONS))

    model = small_model()
    original = muon_with_adamw(model)
    now = train(model, original.step, range(2))
    copied = copy.deepcopy(original, memo={id(parameter): parameter for parameter in model.parameters()})
    for one, other in zip(original.param_groups, copied.param_groups, strict=True):
        assert one is not other
        assert [id(p) for p in one["params"]] == [id(p) for p in other["params"]]
    if load != "neither":
        (copied if load == "the copy" else original).load_state_dict(copy.deepcopy(original.state_dict()))
    owned = [{id(value) for kept in found.state.values() for value in kept.values()} for found in (original, copied)]
    assert owned[0].isdisjoint(owned[1])
    assert len(owned[0]) == len(owned[1]) == 2 + 6 * 3, "a matrix has a momentum, another parameter three tensors"

    assert same(train(model, copied.step, range(2, ITERATIONS)), expected), "the copy continues as the original would"
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), now, strict=True):
            parameter.copy_(value)
    assert same(train(model, original.step, range(2, ITERATIONS)), expected), "and the original as if there were none"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_set_the_learning_rate_of_both(schedule: str) -> None:
    config = OptimizationConfig(optimizer="muon", lr=0.02, weight_decay=0.1, schedule=schedule)
    ours, theirs = small_model(), small_model()
    matrices, others = parted(theirs)
    both: list[Optimizer] = [
        Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=0.02, weight_decay=0.1),
    ]
    optimizer = build_optimizer(config, ours)

    def step_of(pairs: list[tuple[Optimizer, LRScheduler]]) -> Callable[[], None]:
        def step() -> None:
            for one, its_schedule in pairs:
                one.step()
                its_schedule.step()

        return step

    our_step = step_of([(optimizer, build_schedule(config, optimizer, ITERATIONS + 1))])
    their_step = step_of([(one, build_schedule(config, one, ITERATIONS + 1)) for one in both])
    for iteration in range(ITERATIONS):
        assert same(train(ours, our_step, [iteration]), train(theirs, their_step, [iteration]))
        assert [group["lr"] for group in optimizer.param_groups] == [one.param_groups[0]["lr"] for one in both]
    assert (optimizer.param_groups[0]["lr"] == 0.02) == (schedule == "constant")


class Tied(nn.Module):
    """A model with a tied embedding, positions, a matrix between them, and a norm after the last matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.positions = nn.EmbeddingBag(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.tokens.weight
        self.norm = nn.LayerNorm(7)


def shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(matrix.shape) for matrix in hidden_matrices(model)]


def test_which_matrices_are_hidden() -> None:
    assert shapes(small_model()) == [(12, 8), (5, 12)]
    assert shapes(build_model("mlp", sample_shape=(1, 8, 8), num_classes=10)) == [(500, 64), (500, 500)]
    assert shapes(build_model("convnet", sample_shape=(1, 8, 8), num_classes=10)) == [(256, 256)]
    tied = Tied()
    assert [id(matrix) for matrix in hidden_matrices(tied)] == [id(tied.hidden.weight)]
    ends_in_a_convolution = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2))
    assert shapes(ends_in_a_convolution) == [(4, 4)]
    assert shapes(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.LayerNorm(3))) == [(4, 4)]


@pytest.mark.parametrize(
    "model",
    [nn.Linear(3, 2), nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), nn.Sequential(nn.Conv2d(1, 1, 1))],
)
def test_a_model_without_a_hidden_matrix_is_refused(model: nn.Module) -> None:
    message = r"^model must have a weight matrix \(2-D, neither .*\) with --optimizer muon; got none$"
    with pytest.raises(UserInputError, match=message):
        build_optimizer(OptimizationConfig(optimizer="muon"), model)


@pytest.mark.parametrize(
    ("matrices", "options", "message"),
    [
        ([], {}, "muon_parameters must hold at least one matrix; got none"),
        ([(2, 2), (3, 2, 1, 1)], {}, "muon_parameters must be 2-D; got one of shape (3, 2, 1, 1)"),
        ([(2, 2)], {"lr": 0.0}, "lr must be above 0; got 0.0"),
        ([(2, 2)], {"lr": float("nan")}, "lr must be above 0; got nan"),
        ([(2, 2)], {"weight_decay": -1.0}, "weight_decay must be at least 0; got -1.0"),
    ],
)
def test_bad_input_gets_one_line(matrices: list[tuple[int, ...]], options: dict[str, float], message: str) -> None:
    parameters = [Parameter(torch.ones(shape)) for shape in matrices]
    with pytest.raises(UserInputError) as caught:
        MuonWithAdamW(parameters, [Parameter(torch.ones(2))], **{"lr": 0.1, **options})
    assert str(caught.value) == message


def test_a_parameter_of_both_lists_is_refused() -> None:
    matrix = Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        MuonWithAdamW([matrix], [matrix], lr=0.1)
