"""Updates and predictions in one pass over memory, compared with those by copies of optimizers: the same bits."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from experiments.predictions import COMPARED
from pipesgd import LocalSteps, Pipelined
from pipesgd.optim import blockwise
from pipesgd.optim.clipping import Clipping
from pipesgd.pipeline import prediction as predictions
from pipesgd.pipeline.delayed_update import DelayedUpdate, Guessed
from pipesgd.pipeline.prediction import Agreement, Unapplied
from pipesgd.ranks import Ranks

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (AdamW, {"lr": 0.01, "maximize": True}),
}


def make(name: str, parameters: Any, *, known: bool) -> torch.optim.Optimizer:
    """Return one of ``OPTIMIZERS``: torch's own, or one of another class that does the same, if it is not ``known``."""
    kind, options = OPTIMIZERS[name]
    return (kind if known else type(kind.__name__, (kind,), {}))(parameters, **options)  # type: ignore[call-arg]


class Training:
    """One rank of a training with synthetic gradients and means, without other ranks."""

    def __init__(self, case: dict[str, Any], known: bool, before: Training | None = None):
        self.case, self.known = case, known
        torch.manual_seed(case["seed"])
        self.parameters = [nn.Parameter(torch.randn(shape).to(case["dtype"])) for shape in case["shapes"]]
        border = case["border"] % len(self.parameters)
        groups = [{"params": part} for part in (self.parameters[:border], self.parameters[border:]) if part]
        self.optimizer = make(case["optimizer"], groups, known=known)
        self.updates = DelayedUpdate(
            self.optimizer,
            self.parameters,
            width=case["width"],
            warmup_iterations=case["warmup"],
            prediction=COMPARED.get(case["prediction"], case["prediction"]),
            guard=False,
            clip=Clipping(value=case["clip_value"]),
        )
        self.agreement = Agreement()
        self.in_flight: collections.deque[tuple[list[Tensor], Unapplied]] = collections.deque()
        if before is not None:  # continue from a checkpoint of it
            before.updates.weights.restore()
            for parameter, other in zip(self.parameters, before.parameters, strict=True):
                parameter.data = other.data.clone()
            self.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
            self.updates.load_state_dict(before.updates.state_dict())
            self.agreement.load_state_dict(before.agreement.state_dict())
            self.in_flight = copy.deepcopy(before.in_flight)
            self.predict()

    def predict(self) -> None:
        self.updates.predict([unapplied for _, unapplied in self.in_flight], self.agreement)

    def iterate(self, iteration: int) -> None:
        case, generator = self.case, torch.Generator().manual_seed(1000 * self.case["seed"] + iteration)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        own = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.parameters]
        mean = [gradient + torch.randn(gradient.shape, generator=generator).to(gradient.dtype) for gradient in own]
        absent = {number for number in range(len(own)) if (iteration + number) % 7 in case["absent"]}
        unapplied = self.updates.hand_over([None if n in absent else gradient for n, gradient in enumerate(own)])
        if iteration in case["not_finite"]:
            unapplied = dataclasses.replace(unapplied, kept=[])
        self.in_flight.append((mean, unapplied))
        self.updates.weights.restore()
        while len(self.in_flight) > self.updates.width_after(iteration + 1) - 1:
            mean, due = self.in_flight[0]
            if iteration not in case["skipped"]:
                guessed = Guessed(due, self.updates.compare(mean, due), self.agreement)
                then = [later for _, later in self.in_flight][1:]
                self.updates.arrived(mean, [guessed], norm=None, iteration=iteration, then=then)
            self.in_flight.popleft()
        self.predict()

    def bits(self) -> list[Any]:
        """Return all that a training consists of, its numbers as bytes."""
        with self.updates.weights.held_true():
            true = [parameter.detach().clone() for parameter in self.parameters]
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        tensors = [*self.parameters, *true, *self.agreement.missed]
        tensors += [value for state in states for _, value in sorted(state.items())]
        return [self.agreement.cosine, *(tensor.detach().view(-1).view(torch.uint8).tolist() for tensor in tensors)]

    @property
    def copied(self) -> bool:
        """True if a copy of the optimizer was made."""
        return getattr(self.updates._prediction, "_copy", None) is not None


SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 200)), st.tuples(st.integers(1, 9), st.integers(1, 50))),
    min_size=1,
    max_size=4,
)
FEW = st.sets(st.integers(0, 6), max_size=2)
CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "shapes": SHAPES,
        "dtype": st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
        "border": st.integers(0, 3),
        "optimizer": st.sampled_from(list(OPTIMIZERS)),
        "prediction": st.sampled_from(["eager", "eager", "local", "previous", "nesterov"]),
        "width": st.integers(2, 3),
        "warmup": st.integers(0, 2),
        "clip_value": st.sampled_from([None, 0.5]),
        "absent": FEW,
        "skipped": FEW,
        "not_finite": FEW,
        "checkpoint": st.integers(0, 6),
    }
)


@settings(max_examples=60)
@given(case=CASES)
def test_one_pass_has_the_bits_of_copies_of_the_optimizer(case: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "PIECE", 64)  # so that there are many
        one, other = Training(case, known=True), Training(case, known=False)
        for iteration in range(7):
            one.iterate(iteration)
            other.iterate(iteration)
            assert one.bits() == other.bits(), iteration
            if iteration == case["checkpoint"]:
                one, other = Training(case, True, one), Training(case, False, other)
                assert one.bits() == other.bits()
        assert not one.copied
        assert other.copied


def _train(ranks: Ranks, name: str, known: bool, width: int, strategy: str) -> tuple[list[list[Tensor]], list[int]]:
    """Return parameters and true weights after each iteration, the last ones also after a return to a checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(150, 130), nn.Tanh(), nn.Linear(130, 3))
    optimizer = make(name, model.parameters(), known=known)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    options: dict[str, Any] = {"width": width, "scaler": scaler, "ranks": ranks, "codec": "int8"}
    made = (
        Pipelined(model, optimizer, buckets=2, **options)
        if strategy == "pipelined"
        else LocalSteps(model, optimizer, local_steps=2, **options)
    )
    seen: list[list[Tensor]] = []
    skipped: list[int] = []

    def iterate(iteration: int) -> None:
        generator = torch.Generator().manual_seed(100 * iteration + ranks.rank)
        loss = model(torch.randn(3, 150, generator=generator)).square().mean()
        blown = math.inf if (ranks.rank, iteration) == (1, 4) else 1.0
        scaler.scale(loss * blown).backward()
        skipped.extend(made.step().skipped)
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
        with made.true_weights():
            seen[-1] += [parameter.detach().clone() for parameter in model.parameters()]

    for iteration in range(8):
        iterate(iteration)
    weights = copy.deepcopy(model.state_dict())  # the true ones
    saved = copy.deepcopy((optimizer.state_dict(), made.state_dict()))
    for iteration in range(8, 10):
        iterate(iteration)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved[0])
    made.load_state_dict(saved[1])
    for iteration in range(8, 10):
        iterate(iteration)
    made.close()
    return seen, skipped


def _train_both(ranks: Ranks, cases: list[tuple[str, int, str]]) -> list[Any]:
    blockwise.PIECE = 4096  # in this process of its own, so that there are several
    return [[_train(ranks, name, known, width, how) for known in (True, False)] for name, width, how in cases]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_in_one_pass_as_by_copies_with_skipped_updates_and_a_checkpoint(world_size: int) -> None:
    cases = [("momentum", 2, "pipelined"), ("adamw", 3, "pipelined"), ("nesterov", 2, "local steps")]
    for results in run_ranks(world_size, _train_both, cases):
        for (_, _, how), ((seen, skipped), (others, others_skipped)) in zip(cases, results, strict=True):
            assert skipped == others_skipped
            assert how == "local steps" or 4 in skipped
            assert all(torch.equal(a, b) for x, y in zip(seen, others, strict=True) for a, b in zip(x, y, strict=True))
            for first, again in ((8, 10), (9, 11)):
                assert all(torch.equal(a, b) for a, b in zip(seen[first], seen[again], strict=True))


def refuse_copies(*_: object) -> None:
    raise AssertionError("a copy of the optimizer was made")


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_sgd_adam_and_adamw_take_one_pass(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first update is torch's own step, which makes the state."""
    kind, options = OPTIMIZERS[name]
    steps: list[None] = []

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            steps.append(None)
            return step(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(kind, "step", counted(kind.step))
    monkeypatch.setattr(predictions, "OptimizerCopy", refuse_copies)
    model = nn.Linear(5, 3)
    optimizer = make(name, model.parameters(), known=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=8, cycle_momentum="momentum" in options or "adam" in name
    )
    pipeline = Pipelined(model, optimizer, width=width)
    for _ in range(6):
        model(torch.ones(1, 5)).sum().backward()
        pipeline.step()
        schedule.step()
    pipeline.close()
    assert len(steps) == (0 if name == "sgd" else 1)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_clipping_by_the_norm_needs_a_copy(clip_norm: float | None) -> None:
    model = nn.Linear(5, 3)
    pipeline = Pipelined(model, SGD(model.parameters(), lr=0.1), clip_norm=clip_norm)
    assert (pipeline._updates._prediction._copy is not None) == (clip_norm is not None)  # type: ignore[attr-defined]
    pipeline.close()


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
    results = []
    for known in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        pipeline = Pipelined(model, make("momentum", model.parameters(), known=known), width=2)
        model(torch.ones(1, 2)).sum().backward()
        pipeline.step()
        state = pipeline.state_dict()
        model(torch.ones(1, 2)).sum().backward()
        pipeline.load_state_dict(state)
        results.append([parameter.grad for parameter in model.parameters()])
        pipeline.close()
    assert results == [[None, None], [None, None]]


COPIES = [
    # optimizer, known, prediction, width: how often the memory of the parameters is held between two steps, counting
    # the weights, the optimizer's state, gradients in flight, predicted weights and the errors of guesses.
    ("momentum", True, "none", 1, 1 + 1 + 1),
    ("momentum", True, "none", 2, 1 + 1 + 2),
    ("momentum", True, "local", 2, 1 + 1 + 2 + 1 + 1),
    ("momentum", True, "eager", 2, 1 + 1 + 2 + 1 + 1 + 1),
    ("momentum", True, "eager", 3, 1 + 1 + 3 + 2 + 1 + 1),
    ("sgd", True, "eager", 2, 1 + 0 + 2 + 1 + 1 + 1),
    ("adamw", True, "none", 1, 1 + 2 + 1),
    ("adamw", True, "eager", 2, 1 + 2 + 2 + 1 + 1 + 1),
    # by a copy of the optimizer: its state, and a gradient, once more
    ("momentum", False, "eager", 2, 1 + 1 + 2 + 1 + 1 + 1 + 1 + 1),
    ("adamw", False, "eager", 2, 1 + 2 + 2 + 1 + 1 + 1 + 2 + 1),
]


@pytest.mark.parametrize(("name", "known", "prediction", "width", "copies"), COPIES)
def test_the_memory_of_each_prediction(name: str, known: bool, prediction: str, width: int, copies: int) -> None:
    numel = 12_347  # of no other tensor

    def held() -> int:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        storages = [one.untyped_storage() for one in found if one.layout is torch.strided and one.device.type == "cpu"]
        return len({storage.data_ptr() for storage in storages if storage.nbytes() == 4 * numel})

    model = nn.Linear(numel, 1, bias=False)
    before = held()
    assert before == 1
    pipeline = Pipelined(model, make(name, model.parameters(), known=known), width=width, prediction=prediction)
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
    [("none", 1, 1 + 1 + 1), ("none", 2, 1 + 1 + 2), ("eager", 2, 1 + 1 + 2 + 1 + 1 + 1)],
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
    optimizer = make("momentum", model.parameters(), known=True)
    pipeline = Pipelined(model, optimizer, width=width, prediction=prediction, **options)
    for iteration in range(5):
        inputs = torch.tensor([iteration, 7]) if by_rows else torch.full((2, 1), float(iteration))
        model(inputs).sum().backward()
        del inputs
        pipeline.step()
    pipeline._summing.thread.submit(lambda: None).result()  # what has left is summed
    assert held() == copies
    pipeline.close()
