"""Predictions compared with a reference that copies the whole model and optimizer, and with synchronous training."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _sections import sections
from _small_problem import (
    Case,
    MakeOptimizer,
    Outcome,
    assert_as_in_one_process,
    clip_by_torch,
    different,
    regress,
    small_problem,
    train_on_ranks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from experiments.predictions import COMPARED
from experiments.simulation import SimulatedRanks
from pipesgd import Pipelined
from pipesgd.errors import UserInputError
from pipesgd.optim.clipping import Clipping
from pipesgd.pipeline.prediction import COMPARED_DIGITS, Prediction, compare
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import PREDICTIONS, Updates

pytestmark = pytest.mark.slow


class Counting(torch.optim.Optimizer):
    """A user's optimizer: its step depends on an attribute and a number in its state; it changes gradients in place."""

    def __init__(self, parameters: Iterable[Tensor]):
        super().__init__(parameters, {"lr": 0.05})
        self.steps = 0
        self.history: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.history.append(1.0 / self.steps)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["times"] = state.get("times", 0) + 1
                state["sum"] = state.get("sum", 0.0) + parameter.grad  # a new tensor every time
                parameter.grad.mul_(0.5 + self.history[-1])
                parameter.add_(parameter.grad + state["sum"] / state["times"], alpha=-group["lr"])


class OddState(torch.optim.SGD):
    """A user's optimizer with a number in its state, an attribute made by its first step, and new parameter storage.

    The attribute is a bound method: a copy's must be bound to the copy.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        super().__init__(parameters, lr=0.05)
        self.lazy: Any

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not hasattr(self, "lazy"):
            self.lazy, self.warmth = self.rate, 0.5
        self.warmth += 0.1
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - self.lazy() * group["lr"] * parameter.grad

    def rate(self) -> float:
        rate: float = self.warmth / self.state["steps"]
        return rate


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov, foreach": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw, amsgrad, foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True, foreach=True),
    "adamw, fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1.0),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "muon": lambda ps: torch.optim.Muon(list(ps), lr=0.01),
    "a user's own": Counting,
    "a user's own, odder": OddState,
}


IN_MIND: dict[str, dict[str, Any]] = {
    "nothing": {},
    "clipped by norm": {"clip_norm": 0.05},
    "clipped by value": {"clip_value": 0.01},
}


def weights_after(
    ranks: Ranks, optimizer: str, width: int, prediction: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the weights after 9 iterations, of batches that are the same on all ranks."""
    model, batches = small_problem(3, [4, 5, 3], 9, ranks.world_size)
    if optimizer == "muon":  # takes matrices only
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.bias = None
    made = OPTIMIZERS[optimizer](model.parameters())
    pipeline = Pipelined(model, made, width=width, ranks=ranks, **sections(prediction=prediction, **options))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        made, max_lr=made.param_groups[0]["lr"], total_steps=len(batches), cycle_momentum=optimizer == "momentum"
    )
    for of_ranks in batches:
        regress(model, of_ranks[0]).backward()
        pipeline.step()
        with pipeline.true_weights():  # changes nothing
            pass
        schedule.step()
    pipeline.flush()
    pipeline.close()
    return model.state_dict()


WIDTHS = [(2, "local"), (2, "eager"), (3, "local"), (5, "eager")]


def _weights_of_widths(ranks: Ranks, options: dict[str, Any]) -> dict[tuple[Any, ...], list[dict[str, Tensor]]]:
    """Return, by optimizer, width and prediction, the weights of synchronous training, and those that it has with them.

    Every optimizer trains at all widths on one rank. It trains at one of them on two ranks, whose exchange does not
    depend on the optimizer, and where gradients are clipped, before it gets them.
    """
    found = {}
    for number, name in enumerate(OPTIMIZERS):
        synchronous = weights_after(ranks, name, 1, "none", options)
        one = options or ranks.world_size > 1
        for width, prediction in [WIDTHS[number % len(WIDTHS)]] if one else WIDTHS:
            found[name, width, prediction] = [synchronous, weights_after(ranks, name, width, prediction, options)]
    return found


@pytest.mark.parametrize("options", IN_MIND.values(), ids=IN_MIND)
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_rank_or_the_same_data_on_all_is_synchronous_training_bit_for_bit(
    world_size: int, options: dict[str, Any]
) -> None:
    for results in run_ranks(world_size, _weights_of_widths, options):
        assert {name for name, _, _ in results} == set(OPTIMIZERS)
        for case, (synchronous, weights) in results.items():
            for key in synchronous:
                assert torch.equal(weights[key], synchronous[key]), (*case, key)


def _train_predicted(ranks: Ranks, cases: list[Case]) -> list[Outcome]:
    return [train_on_ranks(ranks, case, OPTIMIZERS[case["optimizer"]]) for case in cases]


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "sizes": st.lists(st.integers(1, 6), min_size=2, max_size=4),
        "iterations": st.integers(1, 8),
        "width": st.integers(1, 4),
        "start": st.integers(0, 4),
        "prediction": st.sampled_from((*PREDICTIONS, *COMPARED)),
        "optimizer": st.sampled_from(["sgd", "momentum", "nesterov, foreach", "adam", "adagrad"]),
        "clip": st.sampled_from(list(IN_MIND.values())),
        "options": st.just({}),
        "scheduled": st.booleans(),
    }
)


@pytest.mark.parametrize("world_size", [1, 3])
@settings(max_examples=2)  # hypothesis begins with the simplest of all
@given(cases=st.lists(CASES, min_size=16, max_size=16))
def test_every_prediction_is_what_copies_of_model_and_optimizer_come_to(world_size: int, cases: list[Case]) -> None:
    cases = different(cases)
    outcomes = run_ranks(world_size, _train_predicted, cases)
    assert_as_in_one_process(outcomes, cases, OPTIMIZERS, rtol=1e-7)


@pytest.mark.parametrize("options", list(IN_MIND.values())[1:])
@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9))
def test_clipping_is_torchs(options: dict[str, float], values: list[float]) -> None:
    ours = [torch.tensor(values), torch.tensor(values[:1])]
    theirs = copy.deepcopy(ours)
    Clipping(norm=options.get("clip_norm"), value=options.get("clip_value"))(ours)
    clip_by_torch(**options)(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _look_at_true_weights(ranks: Ranks, prediction: str) -> list[Tensor]:
    """Use SGD at rate 1 and gradients of 1, 2, 3, ...: the true weights are minus the sum of the applied gradients."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    pipeline = Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=1.0), ranks=ranks, updates=Updates(prediction=prediction)
    )
    seen = []
    for iteration in range(1, 5):
        model(torch.full((1, 1), float(iteration))).sum().backward()
        pipeline.step()
        with pipeline.true_weights():
            seen.append((model.weight.item(), pipeline.iteration))
            with torch.no_grad():
                model.weight.add_(100.0)
            held = model.weight.detach().clone()
        with pipeline.true_weights():
            assert torch.equal(model.weight, held), "what changes the true weights is kept"
            with torch.no_grad():
                model.weight.sub_(100.0)
        seen.append(model.weight.item())
    pipeline.flush()
    pipeline.close()
    return [*seen, model.weight.item()]


def test_true_weights_are_those_without_what_is_in_flight() -> None:
    assert run_ranks(1, _look_at_true_weights, "local") == [
        [(0.0, 1), -1.0, (-1.0, 2), -3.0, (-3.0, 3), -6.0, (-6.0, 4), -10.0, -10.0]
    ]
    assert run_ranks(1, _look_at_true_weights, "none") == [
        [(0.0, 1), 0.0, (-1.0, 2), -1.0, (-3.0, 3), -3.0, (-6.0, 4), -6.0, -10.0]
    ]


def _one_rank_computes_nan(ranks: Ranks, width: int) -> tuple[list[float], list[int], str]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    pipeline = Pipelined(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        width=width,
        ranks=ranks,
        updates=Updates(on_nonfinite="skip"),
    )
    losses, skipped = [], []
    for iteration in range(7):
        loss = model(torch.ones(1, 2)).square().sum()
        (loss * (float("nan") if ranks.rank == 1 and iteration == 3 else 1.0)).backward()
        skipped += pipeline.step().skipped
        losses.append(loss.item())
    skipped += pipeline.flush().skipped
    pipeline.close()
    return losses, skipped, weights_sha256(model)


@pytest.mark.parametrize("width", [2, 3])
def test_a_rank_does_not_predict_with_a_gradient_that_is_not_finite(width: int) -> None:
    results = run_ranks(3, _one_rank_computes_nan, width)
    for losses, skipped, sha256 in results:
        assert skipped == [3]
        assert all(loss < 10 for loss in losses)
        assert sha256 == results[0][2]


class InPlace(torch.optim.SGD):
    """SGD that counts its steps among the options of its group, in place, and draws a random number in each."""

    def __init__(self, parameters: Iterable[Tensor]):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.drawn: list[float] = []
        for group in self.param_groups:
            group["steps"], group["history"] = torch.zeros(()), []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.drawn.append(torch.rand(()).item())
        for group in self.param_groups:
            group["steps"] += 1
            group["history"].append(len(group["history"]))
        super().step(closure)


def _train_in_place(bad: int | None) -> InPlace:
    """Train at width 3 with a gradient that is not finite in iteration ``bad``."""
    model = nn.Linear(2, 1)
    optimizer = InPlace(model.parameters())
    with Pipelined(model, optimizer, width=3, updates=Updates(on_nonfinite="skip")) as pipeline:
        torch.manual_seed(0)
        for iteration in range(5):
            model(torch.full((1, 2), float("nan") if iteration == bad else 1.0)).sum().backward()
            pipeline.step()
    return optimizer


@pytest.mark.parametrize("bad", [None, 2])
def test_steps_of_a_prediction_are_not_counted_in_the_options_of_the_optimizer(bad: int | None) -> None:
    """Options that are changed in place were those of the copy, too, which steps more often than the optimizer."""
    [group] = _train_in_place(bad).param_groups
    updates = 5 if bad is None else 4
    assert (group["steps"], group["history"]) == (updates, list(range(updates)))


@pytest.mark.parametrize("bad", [None, 2])
def test_a_prediction_takes_no_random_numbers_from_the_updates(bad: int | None) -> None:
    """A rank whose gradient is not finite predicts with fewer steps: its next update drew other numbers than others'.

    So updates draw those of synchronous training.
    """
    drawn = _train_in_place(bad).drawn
    torch.manual_seed(0)
    assert drawn == [torch.rand(()).item() for _ in range(5 if bad is None else 4)]


def _compare(ranks: Ranks, prediction: str | type[Prediction]) -> list[Any]:
    """Train with the r-th unit vector as rank r's gradient, on one rank or two."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = Pipelined(model, optimizer, ranks=ranks, updates=Updates(prediction=prediction))
    seen = []
    for iteration in range(3):
        model(torch.eye(2)[ranks.rank] * (iteration != 1)).sum().backward()
        seen.append(pipeline.step().comparison)
    pipeline.close()
    return seen


def test_what_was_predicted_is_compared_with_what_arrives() -> None:
    for first, second, zero in run_ranks(2, _compare, "local"):
        assert first is None, "nothing has arrived"
        assert (second.cosine, second.relative_error) == (round(0.5**0.5, COMPARED_DIGITS), 1.0)
        assert (zero.cosine, zero.relative_error) == (None, None)
    [[_, alone, _]] = run_ranks(1, _compare, "local")
    assert (alone.cosine, alone.relative_error) == (1.0, 0.0)
    assert run_ranks(1, _compare, "none") == [[None, None, None]]
    assert run_ranks(1, _compare, COMPARED["spectrain"]) == [[None, None, None]]


def _copies_optimizer(ranks: Ranks, prediction: str | type[Prediction], kind: Any) -> str:
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.lock = threading.Lock()  # type: ignore[attr-defined]
    try:
        Pipelined(model, optimizer, ranks=ranks, updates=Updates(prediction=prediction)).close()
    except UserInputError as error:
        return str(error)
    return ""


def test_an_optimizer_that_cannot_be_copied_is_refused_where_it_would_be() -> None:
    [message] = run_ranks(1, _copies_optimizer, "local", torch.optim.Adagrad)
    assert message.startswith("prediction must be none for an optimizer that cannot be copied; got Adagrad:")
    assert run_ranks(1, _copies_optimizer, "none", torch.optim.Adagrad) == [""]
    assert run_ranks(1, _copies_optimizer, COMPARED["spectrain"], torch.optim.Adagrad) == [""]


@pytest.mark.parametrize(("prediction", "swings"), [("local", True), ("eager", False)])
def test_eager_keeps_ranks_together_where_local_lets_them_swing_apart(prediction: str, swings: bool) -> None:
    """On (w - target)^2 / 2, momentum 0.9: the mean is stable up to lr 3.8, ranks' errors up to 1 (eager: to 1.27)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.2, momentum=0.9)
    ranks = SimulatedRanks(model, optimizer, world_size=4, width=2, prediction=prediction)
    losses = [
        max(ranks.iterate(lambda model, target: (model.weight - target).square().sum() / 2, torch.randn(4).tolist()))
        for _ in range(100)
    ]
    ranks.flush()
    assert (losses[-1] > 1e6) == swings
    assert max(losses[:10]) < 1e3


def _share_memory(ranks: Ranks, prediction: str | type[Prediction]) -> str:
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.weight.data = one.weight.data
    model = nn.Sequential(one, other)
    try:
        Pipelined(
            model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, updates=Updates(prediction=prediction)
        ).close()
    except UserInputError as error:
        return str(error)
    return ""


def test_parameters_that_share_memory_are_refused_where_they_would_be_predicted_apart() -> None:
    assert run_ranks(1, _share_memory, "eager") == [
        "prediction must be none where parameters share memory (tie them by assigning the Parameter itself, "
        "b.weight = a.weight); got eager"
    ]
    assert run_ranks(1, _share_memory, "none") == [""]
    assert run_ranks(1, _share_memory, COMPARED["spectrain"]) == [""]


@pytest.mark.parametrize("scale", [1e-150, 1e-100, 1.0, 1e100])
def test_gradients_of_any_size_are_compared(scale: float) -> None:
    mean, guess = (scale * torch.tensor(values, dtype=torch.float64) for values in ([3.0, 4.0], [0.0, 5.0]))
    comparison = compare([mean], [guess])
    assert comparison.cosine == 0.8
    assert comparison.relative_error == pytest.approx(0.4**0.5, abs=1e-5)
    assert compare([0.0 * mean], [guess]).cosine is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_comparisons_of_16_bit_gradients_have_the_digits_of_float32(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = (scale * torch.randn(1_000_000, generator=generator)).to(dtype)
    guess = (mean + 0.05 * scale * torch.randn(1_000_000, generator=generator)).to(dtype)
    exact = torch.nn.functional.cosine_similarity(mean.double(), guess.double(), dim=0).item()
    comparison = compare([mean], [guess])
    assert comparison == compare([mean.float()], [guess.float()])
    assert comparison.cosine == pytest.approx(exact, abs=1e-4)
