"""``pipesgd.ddp``: a program with DistributedDataParallel trains as ``Pipelined`` does, and compresses its buckets."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _differences import Differences
from _ranks import RankFailed, run_ranks
from _runs import run_example
from _sections import sections
from conftest import REPOSITORY
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

from pipesgd import (
    CommunicationError,
    DisagreementError,
    LocalSteps,
    NonFiniteGradientError,
    Pipelined,
    ReplicasDivergedError,
    RunError,
    UserInputError,
)
from pipesgd.codecs.options import BUCKET_CODECS, CODECS, CodecOptions, codec_named
from pipesgd.ddp import AttachedPipeline, attach, compress
from pipesgd.pipeline.pipeline import Pipeline
from pipesgd.ranks import Ranks
from pipesgd.reducers.powersgd import PowerSgd
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates, Windows, Wire

pytestmark = pytest.mark.slow

ITERATIONS = 8
SMALL_BUCKETS = 0.004
"""Size of torch's buckets in MiB with which the models here have several."""

Weights = dict[str, Tensor]


class Model(nn.Module):
    """A model whose branches may be used in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 40)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))
        self.last = nn.Linear(40, 10)
        self.norm = nn.BatchNorm1d(40)

    def forward(self, inputs: Tensor, branch: int | None = None) -> Tensor:
        hidden = self.norm(self.first(inputs).relu())
        for number, layer in enumerate(self.branches):
            if branch is None or number == branch:
                hidden = layer(hidden).relu()
        outputs: Tensor = self.last(hidden)
        return outputs


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(rank: int, world_size: int, iterations: int = ITERATIONS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(iterations):
        inputs = torch.randn(world_size * 8, 20, generator=generator)
        targets = torch.randint(10, (world_size * 8,), generator=generator)
        yield inputs[rank::world_size], targets[rank::world_size]


class Derived(torch.optim.SGD):
    """An optimizer of whose steps torch calls the hooks twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name in ("adam", "fused adam"):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=name != "adam")
    if name in ("differences", "cloned differences"):
        return Differences(model.parameters(), clones=name != "differences")
    kind = Derived if name == "derived" else torch.optim.SGD
    return kind(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def snapshot(model: nn.Module) -> Weights:
    """Return copies of the parameters; buffers differ, since torch's DDP broadcasts those of rank 0."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# ---- attach: the trajectory of Pipelined


def by_pipelined(
    ranks: Ranks,
    optimizer_name: str = "sgd",
    accumulate: int = 1,
    branches: bool = False,
    poison: int | None = None,
    **options: Any,
) -> Weights:
    model = make_model()
    optimizer = make_optimizer(optimizer_name, model)
    schedule = falling(optimizer)
    kind: Any = LocalSteps if "local_steps" in options else Pipelined
    with kind(model, optimizer, ranks=ranks, **sections(**options)) as pipeline:
        for number, (inputs, targets) in enumerate(batches(ranks.rank, ranks.world_size)):
            loss = cross_entropy(model(inputs, number % 2 if branches else None), targets) / accumulate
            (loss * poisoned(ranks.rank, number, poison)).backward()
            if (number + 1) % accumulate == 0:
                pipeline.step()
                schedule.step()
    return snapshot(model)


def by_attached(
    ranks: Ranks,
    optimizer_name: str = "sgd",
    accumulate: int = 1,
    branches: bool = False,
    clip_norm: float | None = None,
    closure: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    ddp: dict[str, Any] | None = None,
    compiled: str | None = None,
    poison: int | None = None,
    **options: Any,
) -> Weights:
    """Train in the loop of a DDP program, whose model is ``compiled`` by this backend."""
    model = make_model()
    called: Any = torch.compile(model, backend=compiled) if compiled else model
    keywords = {"bucket_cap_mb": SMALL_BUCKETS, "broadcast_buffers": "local_steps" not in options} | (ddp or {})
    ddp_model = DistributedDataParallel(called, **keywords)
    optimizer = make_optimizer(optimizer_name, model)
    schedule = falling(optimizer)
    if "local_steps" not in options:
        options["clip_norm"] = clip_norm
    pipeline = attach(ddp_model, optimizer, scaler=scaler, **sections(**{"codec": "fp32"} | options))
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for number, (inputs, targets) in enumerate(batches(ranks.rank, ranks.world_size)):
        last = (number + 1) % accumulate == 0

        def backward(
            inputs: Tensor = inputs, targets: Tensor = targets, number: int = number, last: bool = last
        ) -> Tensor:
            with contextlib.nullcontext() if last else ddp_model.no_sync():
                loss = cross_entropy(ddp_model(inputs, number % 2 if branches else None), targets) / accumulate
                scaler.scale(loss * poisoned(ranks.rank, number, poison)).backward()
            return loss

        if closure:
            optimizer.zero_grad()
            optimizer.step(backward)
            schedule.step()
            continue
        backward()
        if last:
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    pipeline.close()
    return snapshot(model)


def poisoned(rank: int, number: int, poison: int | None) -> float:
    """Return the factor of rank 1's loss that makes its gradient infinite in iteration ``poison``."""
    return float("inf") if rank == 1 and number == poison else 1.0


def both(ranks: Ranks, options: dict[str, Any], only_here: dict[str, Any]) -> tuple[Weights, Weights]:
    return by_pipelined(ranks, **options), by_attached(ranks, **options, **only_here)


@pytest.mark.parametrize(
    ("options", "only_here"),
    [
        ({}, {}),
        ({}, {"ddp": {"gradient_as_bucket_view": True}}),
        ({}, {"ddp": {"static_graph": True}}),
        ({}, {"ddp": {"bucket_cap_mb": 25}}),
        ({"width": 1}, {}),
        ({"width": 3, "codec": "int4", "optimizer_name": "adam"}, {"ddp": {"gradient_as_bucket_view": True}}),
        ({"codec": "topk"}, {}),
        ({"codec": "powersgd", "synchronous_start": 3}, {}),
        ({"prediction": "none", "all_reduce": "native"}, {}),
        ({"accumulate": 2, "codec": "int8"}, {}),
        ({"branches": True}, {"ddp": {"find_unused_parameters": True}}),
        ({"branches": True}, {"ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": True}}),
        ({"clip_norm": 0.5}, {}),
        ({"codec": "int8"}, {"closure": True}),
        ({"codec": "int8"}, {"compiled": "aot_eager", "ddp": {"bucket_cap_mb": 25}}),
        ({"local_steps": 2}, {"compiled": "eager", "ddp": {"bucket_cap_mb": 25}}),  # at least 1, says torch
        ({"local_steps": 3, "width": 1}, {}),
        ({"local_steps": 3, "codec": "int4", "clip_norm": 0.5, "optimizer_name": "adam"}, {}),
        ({"local_steps": 3, "width": 1, "outer": "elastic"}, {"ddp": {"gradient_as_bucket_view": True}}),
        ({"local_steps": 2, "accumulate": 2}, {}),
        ({"local_steps": 3}, {"closure": True}),
    ],
    ids=lambda value: " ".join(f"{name}={one}" for name, one in value.items()) or "defaults",
)
def test_the_loop_of_a_ddp_program_trains_as_pipelined_does_bit_for_bit(
    options: dict[str, Any], only_here: dict[str, Any]
) -> None:
    answers = run_ranks(2, both, options, only_here)
    for expected, found in answers:
        assert same(expected, found)
        assert same(found, answers[0][1]), "replicas"


def _with_a_scaler(ranks: Ranks, poison: int | None, options: dict[str, Any]) -> tuple[Weights, Weights]:
    expected = by_pipelined(ranks, poison=poison, on_nonfinite="skip", **options)
    # The scale grows in every second iteration, so gradients arrive that were computed at another one.
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return expected, by_attached(ranks, poison=poison, scaler=scaler, **options)


@pytest.mark.parametrize(
    ("poison", "options"),
    [
        *((poison, {}) for poison in (None, 0, 3, ITERATIONS - 1)),
        *((poison, {"local_steps": 2}) for poison in (2, 3, 7)),
        (None, {"optimizer_name": "fused adam"}),
    ],
)
def test_loss_scaling_changes_no_bit_and_leaves_out_the_same_updates(
    poison: int | None, options: dict[str, Any]
) -> None:
    for expected, found in run_ranks(2, _with_a_scaler, poison, options):
        assert all(bool(value.isfinite().all()) for value in found.values())
        assert same(expected, found)


def _skips(ranks: Ranks, options: dict[str, Any]) -> tuple[Weights, Weights]:
    return tuple(run(ranks, poison=3, on_nonfinite="skip", **options) for run in (by_pipelined, by_attached))  # type: ignore[return-value]


@pytest.mark.parametrize("options", [{}, {"local_steps": 3}])
def test_an_update_that_is_not_finite_is_left_out(options: dict[str, Any]) -> None:
    for expected, found in run_ranks(2, _skips, options):
        assert same(expected, found)


def _gradients_after_a_step(ranks: Ranks) -> bool:
    ddp_model = DistributedDataParallel(make_model(), broadcast_buffers=False)
    optimizer, pipeline = start(ddp_model, local_steps=1)
    inputs, targets = next(batches(ranks.rank, ranks.world_size))
    cross_entropy(ddp_model(inputs), targets).backward()
    before = [parameter.grad.clone() for parameter in ddp_model.parameters()]
    optimizer.step()
    after = [parameter.grad for parameter in ddp_model.parameters()]
    pipeline.close()
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_window_that_ends_leaves_the_loop_its_own_gradients() -> None:
    assert run_ranks(2, _gradients_after_a_step) == [True, True]


def _skipped(ranks: Ranks, poisoned_iteration: int) -> list[list[tuple[Any, ...]]]:
    """Return skipped iterations and ranks by iteration: with "skip", and with GradScalers and both places of zero_grad.

    Rank 1 has an infinite gradient in one iteration. The loop sums its losses over ranks after each update.
    """
    found = []
    for scaled, zero_first in ((False, True), (True, True), (True, False)):
        ddp_model = DistributedDataParallel(nn.Linear(2, 1))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        optimizer, pipeline = start(ddp_model, local_steps=2, width=1, scaler=scaler, on_nonfinite="skip")
        found.append([])
        for number in range(4):
            if zero_first:
                optimizer.zero_grad()
            loss = ddp_model(torch.ones(4, 2)).sum() * poisoned(ranks.rank, number, poisoned_iteration)
            if not zero_first:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            dist.all_reduce(loss.detach())
            found[-1].append((pipeline.iteration, pipeline.report.skipped, pipeline.report.nonfinite_ranks))
        pipeline.close()
    return found


@pytest.mark.parametrize("poisoned_iteration", [0, 1])
def test_local_steps_report_the_iterations_that_a_rank_skips_and_stay_in_step(poisoned_iteration: int) -> None:
    for rank, found in enumerate(run_ranks(2, _skipped, poisoned_iteration)):
        expected: list[tuple[Any, ...]] = [(number + 1, (), ()) for number in range(4)]
        if rank == 1:
            expected[poisoned_iteration] = (poisoned_iteration + 1, (poisoned_iteration,), (1,))
        assert found == [expected] * 3


# ---- attach: evaluation, saving, resuming


def start(ddp_model: DistributedDataParallel, **options: Any) -> tuple[torch.optim.Optimizer, AttachedPipeline]:
    optimizer = make_optimizer("sgd", ddp_model)
    return optimizer, attach(ddp_model, optimizer, **sections(**{"codec": "fp32"} | options))


def train(ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    cross_entropy(ddp_model(batch[0]), batch[1]).backward()
    optimizer.step()


def _evaluates(ranks: Ranks) -> list[bool]:
    ddp_model = DistributedDataParallel(make_model())
    optimizer, pipeline = start(ddp_model)
    found = []
    for batch in batches(ranks.rank, ranks.world_size):
        train(ddp_model, optimizer, batch)
        predicted = snapshot(ddp_model.module)
        with pipeline.true_weights():
            true = snapshot(ddp_model.module)
        ddp_model.eval()
        with torch.no_grad():
            outputs = ddp_model(batch[0])
        ddp_model.module.train()  # as Lightning does, which leaves the wrapper in evaluation mode
        other = make_model()
        other.load_state_dict(ddp_model.module.state_dict())
        found.append(torch.equal(outputs, other.eval()(batch[0])))
        found += [same(snapshot(other), true), same(snapshot(ddp_model.module), predicted), not same(true, predicted)]
        ddp_model(batch[0])
        found.append(same(snapshot(ddp_model.module), predicted))
    pipeline.close()
    return found


def test_evaluating_and_saving_use_the_true_weights() -> None:
    for found in run_ranks(2, _evaluates):
        assert len(found) == 5 * ITERATIONS
        assert all(found)


def _in_evaluation_mode(ranks: Ranks) -> list[str]:
    """Return what is said of loops in evaluation mode, which drop gradients before the forward pass or after it."""
    messages = []
    for options, early in itertools.product(({}, {"local_steps": 4, "width": 1}), (True, False)):
        ddp_model = DistributedDataParallel(make_model(), broadcast_buffers=False)
        ddp_model.eval()
        optimizer, pipeline = start(ddp_model, **options)
        try:
            with pipeline:
                for inputs, targets in batches(ranks.rank, ranks.world_size):
                    if early:
                        optimizer.zero_grad()
                    loss = cross_entropy(ddp_model(inputs), targets)
                    if not early:
                        optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        except UserInputError as error:
            messages.append(f"{pipeline.iteration} {error}")
    return messages


@pytest.mark.filterwarnings("ignore:the pipeline was closed after an error")
def test_gradients_of_evaluation_mode_are_refused_in_a_loop_of_ddp() -> None:
    for messages in run_ranks(2, _in_evaluation_mode):
        assert len(messages) == 4
        for message in messages:
            assert message.startswith("1 model must be in training mode when it computes gradients for a step")


class Average:
    """An average of weights that is written into the parameters and taken out again, as by torch_ema or diffusers."""

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.parameters]

    def update(self) -> None:
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.lerp_(parameter.detach(), 0.1)

    def store(self) -> None:
        self.stored = [parameter.detach().clone() for parameter in self.parameters]

    def copy_to(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, weights, strict=True):
            parameter.data.copy_(value)


def with_average(
    ranks: Ranks, options: dict[str, Any], evaluates: bool = True, in_module: bool = False, in_true_weights: bool = True
) -> tuple[bool, Weights]:
    """Train, and evaluate an average of the weights after each iteration, which is written into the model for it.

    Returns whether outputs were those of a model that holds the average, and the weights at the end.
    """
    ddp_model = DistributedDataParallel(make_model(), broadcast_buffers=False)
    optimizer, pipeline = start(ddp_model, **options)
    average = Average(ddp_model)
    right = True
    for batch in batches(ranks.rank, ranks.world_size):
        train(ddp_model, optimizer, batch)
        with pipeline.true_weights():
            average.update()
        if not evaluates:
            continue
        other = copy.deepcopy(ddp_model.module).eval()
        Average(other).copy_to(average.averages)
        with pipeline.true_weights() if in_true_weights else contextlib.nullcontext(), torch.no_grad():
            average.store()
            average.copy_to(average.averages)
            ddp_model.eval()
            outputs = (ddp_model.module if in_module else ddp_model)(batch[0])
            average.copy_to(average.stored)
            ddp_model.train()
        right &= torch.equal(outputs, other(batch[0]))
    pipeline.close()
    return right, snapshot(ddp_model.module)


def _with_averages(ranks: Ranks, options: dict[str, Any]) -> list[tuple[bool, Weights]]:
    return [with_average(ranks, options, *how) for how in ((False,), (True, False), (True, True))]


@pytest.mark.parametrize("options", [{}, {"local_steps": 2}])
def test_an_average_that_is_evaluated_in_true_weights_is_right_and_changes_no_training(options: dict[str, Any]) -> None:
    for answers in run_ranks(2, _with_averages, options):
        for right, weights in answers:
            assert right
            assert same(weights, answers[0][1])


def _writes_elsewhere(ranks: Ranks, options: dict[str, Any]) -> str:
    try:
        with_average(ranks, options, in_module=True, in_true_weights=False)
    except ReplicasDivergedError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("options", [{}, {"local_steps": 2}])
def test_weights_that_were_written_outside_of_true_weights_are_noticed_at_the_end(options: dict[str, Any]) -> None:
    """Predicted weights of this rank are written over the true ones, and used to be trained on from then on."""
    assert set(run_ranks(2, _writes_elsewhere, options)) == {
        "weights must be written in pipeline.true_weights() alone, and alike on all ranks; got other weights on rank 1 "
        "than on rank 0, first in module.first.weight"
    }


def saved_whole(model: nn.Module) -> nn.Module:
    return pickled(model, weights_only=False)  # type: ignore[no-any-return]


def _copies(ranks: Ranks) -> list[bool]:
    """Train a copy by DDP alone, between two iterations of the model; compare the latter's weights with no copies."""
    weights: list[Weights] = []
    alike = []
    doors: dict[str, Callable[..., Any]] = {
        "attach": attach,
        "local steps": lambda *pair: attach(*pair, windows=Windows(local_steps=2)),
        "compress": lambda model, _: compress(model),
    }
    for door, (copies, make_copy) in itertools.product(
        doors.values(), ((False, copy.deepcopy), (True, copy.deepcopy), (True, AveragedModel), (True, saved_whole))
    ):
        ddp_model = DistributedDataParallel(make_model(), broadcast_buffers=False)
        optimizer = make_optimizer("sgd", ddp_model)
        state = door(ddp_model, optimizer)
        for batch in batches(ranks.rank, ranks.world_size):
            train(ddp_model, optimizer, batch)
            if copies:
                other = make_copy(ddp_model)
                other = other.module if make_copy is AveragedModel else other
                alike.append(same(snapshot(other), snapshot(ddp_model)))
                train(other, make_optimizer("sgd", other), batch)
                other.load_state_dict(other.state_dict())
        state.close()
        weights = [*weights, snapshot(ddp_model)] if copies else [snapshot(ddp_model)]
        alike.append(same(weights[0], weights[-1]))
    return alike


def test_a_copy_of_an_attached_model_has_nothing_to_do_with_the_pipeline() -> None:
    for alike in run_ranks(2, _copies):
        assert alike == [True] * 3 * (4 + 3 * ITERATIONS)


def _resumes(ranks: Ranks, stop: int, options: dict[str, Any]) -> tuple[str, str]:
    hashes = []
    keywords = {"bucket_cap_mb": SMALL_BUCKETS, "broadcast_buffers": "local_steps" not in options}
    for interrupted in (False, True):
        ddp_model = DistributedDataParallel(make_model(), **keywords)
        optimizer, pipeline = start(ddp_model, **options)
        for number, batch in enumerate(batches(ranks.rank, ranks.world_size)):
            if interrupted and number == stop:
                saved = [ddp_model.module.state_dict(), optimizer.state_dict(), pipeline.state_dict()]
                saved = [pickled(state) for state in saved]
                pipeline.close()  # changes what was not saved
                model = make_model()
                model.load_state_dict(saved[0])
                ddp_model = DistributedDataParallel(model, **keywords)
                optimizer, pipeline = start(ddp_model, **options)
                optimizer.load_state_dict(saved[1])
                pipeline.load_state_dict(saved[2])
            train(ddp_model, optimizer, batch)
        pipeline.close()
        hashes.append(weights_sha256(ddp_model.module))
    return hashes[0], hashes[1]


def pickled(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **options)


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (1, {"codec": "int4", "width": 3}),
        (5, {"codec": "int4", "width": 3}),
        (5, {"local_steps": 3, "codec": "int4"}),
        (4, {"local_steps": 3, "outer": "elastic"}),
    ],
)
def test_a_resumed_program_continues_bit_for_bit(stop: int, options: dict[str, Any]) -> None:
    for whole, resumed in run_ranks(2, _resumes, stop, options):
        assert whole == resumed


def _interrupted_update(ranks: Ranks) -> list[float]:
    """Interrupt a step of the optimizer, load what was before the first one; return the learning rates of steps."""
    ddp_model = DistributedDataParallel(make_model())
    optimizer = make_optimizer("sgd", ddp_model)
    schedule = falling(optimizer)
    parts = ddp_model.module, optimizer, schedule, attach(ddp_model, optimizer, width=1)
    saved = [pickled(part.state_dict()) for part in parts]
    rates = []

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for number, batch in enumerate(batches(ranks.rank, ranks.world_size)):
        if number == 3:
            hook = optimizer.register_step_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(ddp_model, optimizer, batch)
            hook.remove()
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
        else:
            train(ddp_model, optimizer, batch)
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
    parts[-1].close()
    return rates


def test_options_from_before_an_interrupted_step_do_not_come_back() -> None:
    for rates in run_ranks(2, _interrupted_update):
        assert rates == pytest.approx([0.05 * 0.9**number for number in (0, 1, 2, 0, 1, 2, 3)])


def _refused_in_an_iteration(ranks: Ranks, options: dict[str, Any]) -> list[str]:
    """Load a state that is refused between a backward pass and its step, or do not; return hashes of the weights."""
    keywords = {"broadcast_buffers": False}
    _, other = start(DistributedDataParallel(make_model(), **keywords), codec="int8", **options)
    state = other.state_dict()
    other.close()
    hashes = []
    for loads in (False, True):
        ddp_model = DistributedDataParallel(make_model(), **keywords)
        optimizer, pipeline = start(ddp_model, **options)
        for number, (inputs, targets) in enumerate(batches(ranks.rank, ranks.world_size)):
            optimizer.zero_grad()
            cross_entropy(ddp_model(inputs), targets).backward()
            if loads and number == 3:
                with pytest.raises(UserInputError, match="codec must be int8"):
                    pipeline.load_state_dict(state)
            optimizer.step()
        pipeline.close()
        hashes.append(weights_sha256(ddp_model.module))
    return hashes


@pytest.mark.parametrize("options", [{}, {"local_steps": 2}])
def test_a_state_that_is_refused_leaves_the_present_iteration_as_it_is(options: dict[str, Any]) -> None:
    for without, refused in run_ranks(2, _refused_in_an_iteration, options):
        assert refused == without


def _checks_of_a_load(ranks: Ranks, options: dict[str, Any]) -> list[str]:
    """Return the classes that check a state while it is loaded, in order."""
    checks: list[str] = []

    def noted(kind: type[Any], check: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def check_state(self: Any, state: Any) -> None:
            checks.append(kind.__name__)
            check(self, state)

        return check_state

    _, pipeline = start(DistributedDataParallel(make_model(), broadcast_buffers=False), **options)
    state = pipeline.state_dict()
    for kind in (LocalSteps, Pipeline):
        kind.check_state = noted(kind, kind.check_state)  # type: ignore[method-assign]
    pipeline.load_state_dict(state)
    pipeline.close()
    return checks


@pytest.mark.parametrize(("options", "checks"), [({}, ["Pipeline"]), ({"local_steps": 2}, ["LocalSteps", "Pipeline"])])
def test_a_state_that_is_loaded_is_checked_once(options: dict[str, Any], checks: list[str]) -> None:
    assert run_ranks(1, _checks_of_a_load, options) == [checks]


def derived(ranks: Ranks, options: dict[str, Any]) -> tuple[Weights, Weights]:
    return by_attached(ranks, "sgd", **options), by_attached(ranks, "derived", **options)


@pytest.mark.parametrize("options", [{"width": 2}, {"closure": True}, {"local_steps": 2}])
def test_an_optimizer_whose_step_calls_that_of_its_base_class_steps_once(options: dict[str, Any]) -> None:
    for by_sgd, by_derived in run_ranks(2, derived, options):
        assert same(by_sgd, by_derived)


def keeping(ranks: Ranks, options: dict[str, Any]) -> tuple[Weights, Weights]:
    return by_attached(ranks, "differences", **options), by_attached(ranks, "cloned differences", **options)


@pytest.mark.parametrize("options", [{"width": 1}, {"local_steps": 2}])
def test_an_optimizer_may_keep_gradients_where_torch_makes_new_ones(options: dict[str, Any]) -> None:
    for kept, cloned in run_ranks(2, keeping, options):
        assert same(kept, cloned)


def _one_after_the_other(ranks: Ranks) -> tuple[Weights, Weights]:
    """Train by two pipelines: on one model in DDP, and by ``Pipelined``."""
    model, other = make_model(), make_model()
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    optimizer, by_hand = make_optimizer("sgd", model), make_optimizer("sgd", other)
    closed = compress(ddp_model, "int8")
    closed.close()
    for options in ({"width": 3}, {"codec": "int4"}):
        attached = attach(ddp_model, optimizer, **sections(**{"codec": "fp32"} | options))  # type: ignore[arg-type]
        closed.close()  # once more, which leaves the model to the pipeline that has it
        refused = refusal(lambda: attach(ddp_model, optimizer))
        assert refused == "ddp_model must be attached or compressed once; got one that is: close() that first"
        for inputs, targets in batches(ranks.rank, ranks.world_size):
            train(ddp_model, optimizer, (inputs, targets))
        attached.close()
        closed = attached
        with Pipelined(other, by_hand, ranks=ranks, **sections(**options)) as pipeline:  # type: ignore[arg-type]
            for inputs, targets in batches(ranks.rank, ranks.world_size):
                cross_entropy(other(inputs), targets).backward()
                pipeline.step()
    return snapshot(model), snapshot(other)


def test_a_model_whose_pipeline_is_closed_may_be_attached_again() -> None:
    for attached, by_pipelines in run_ranks(2, _one_after_the_other):
        assert same(attached, by_pipelines)


def _changes_the_mean(ranks: Ranks, factor: float, clips: dict[str, float], options: dict[str, Any]) -> int:
    """Train in a loop that multiplies ``.grad`` by ``factor`` and clips it; return how many warnings that causes."""
    model = make_model()
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    optimizer = make_optimizer("sgd", model)
    scaler = options.get("scaler") or torch.amp.GradScaler("cpu", enabled=False)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        pipeline = attach(ddp_model, optimizer, **sections(**{"codec": "fp32"} | options))
        for inputs, targets in batches(ranks.rank, ranks.world_size):
            scaler.scale(cross_entropy(ddp_model(inputs), targets)).backward()
            if clips:
                scaler.unscale_(optimizer)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(factor)
            if "value" in clips:
                nn.utils.clip_grad_value_(model.parameters(), clips["value"])
            if "norm" in clips:
                nn.utils.clip_grad_norm_(model.parameters(), clips["norm"])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pipeline.close()
    return said.getvalue().count("warning: gradients must not be changed between backward() and optimizer.step()")


SMALL = 1e-3
"""Bound of a norm or a value that every gradient here exceeds."""


@pytest.mark.parametrize(
    ("factor", "clips", "options", "warnings"),
    [
        (0.5, {}, {}, 1),
        (1.0, {}, {}, 0),
        (0.5, {}, {"width": 1}, 0),
        (1.0, {"norm": SMALL}, {}, 1),
        (1.0, {"norm": SMALL}, {"clip_norm": SMALL}, 0),
        (1.0, {"norm": SMALL}, {"clip_norm": 2 * SMALL}, 1),
        (0.5, {"norm": 1e3}, {"clip_norm": 1e3}, 1),
        (1.0, {"value": SMALL, "norm": SMALL}, {"clip_value": SMALL, "clip_norm": SMALL}, 0),
        (1.0, {}, {"scaler": torch.amp.GradScaler("cpu", init_scale=7.0)}, 0),
        (1.0, {"norm": SMALL}, {"scaler": torch.amp.GradScaler("cpu", init_scale=7.0), "clip_norm": SMALL}, 0),
        (0.5, {}, {"scaler": torch.amp.GradScaler("cpu", init_scale=7.0)}, 1),
    ],
)
def test_a_loop_that_changes_a_late_mean_is_warned_once(
    factor: float, clips: dict[str, float], options: dict[str, Any], warnings: int
) -> None:
    assert run_ranks(1, _changes_the_mean, factor, clips, options) == [warnings]


def _state_while_waiting(ranks: Ranks) -> list[str]:
    """Ask for a state as a signal's handler does, while a mean is waited for."""
    model = DistributedDataParallel(make_model())
    optimizer, pipeline = start(model)
    wait, found = pipeline.pipeline.flight.next_mean, []

    def interrupted() -> Any:
        found.append(refusal(pipeline.state_dict))
        return wait()

    pipeline.pipeline.flight.next_mean = interrupted  # type: ignore[method-assign]
    for batch in batches(ranks.rank, ranks.world_size, 2):
        train(model, optimizer, batch)
    pipeline.close()
    return found


def test_a_state_is_refused_while_a_mean_is_waited_for() -> None:
    refused = "state_dict must not be called between backward() and optimizer.step()"
    for found in run_ranks(2, _state_while_waiting):
        assert found[0] == refused


# ---- attach: errors


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserInputError as error:
        return str(error)
    return "nothing was refused"


def _refusals(ranks: Ranks) -> dict[str, str]:
    found: dict[str, str] = {}
    batch = next(batches(ranks.rank, ranks.world_size))

    def ddp() -> DistributedDataParallel:
        return DistributedDataParallel(make_model())

    found["no DDP"] = refusal(lambda: attach(make_model(), make_optimizer("sgd", make_model())))  # type: ignore[arg-type]
    outside: Any = torch.compile(ddp(), backend="eager")
    found["compiled"] = refusal(lambda: start(outside))
    found["compiled, compressed"] = refusal(lambda: compress(outside))
    hooked = ddp()
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    found["hook"] = refusal(lambda: attach(hooked, make_optimizer("sgd", hooked)))
    found["hook, compressed"] = refusal(lambda: compress(hooked))
    model = ddp()
    shortened = DistributedDataParallel(nn.Embedding(5, 2, max_norm=0.5))
    found["max_norm"] = refusal(lambda: start(shortened))
    found["part"] = refusal(lambda: attach(model, make_optimizer("sgd", model.module.last)))
    found["guard"] = refusal(lambda: attach(model, make_optimizer("sgd", model), updates=Updates(guard=True)))
    found["buffers of local steps"] = refusal(lambda: start(model, local_steps=2))
    searching = DistributedDataParallel(nn.Linear(2, 1), find_unused_parameters=True)  # no buffers
    found["search of local steps"] = refusal(lambda: start(searching, local_steps=2))
    layers = nn.Sequential(nn.Linear(2, 1))
    synchronized = DistributedDataParallel(layers)
    layers.append(nn.SyncBatchNorm(1))  # afterwards, since torch wraps one on a GPU only
    found["statistics of local steps"] = refusal(lambda: start(synchronized, local_steps=2))
    alone = DistributedDataParallel(nn.Linear(2, 1))
    found["guard of local steps"] = refusal(lambda: start(alone, local_steps=2, guard=True))
    found["clipping of local steps"] = refusal(lambda: start(alone, local_steps=2, clip_norm=1.0))
    found["on_nonfinite of local steps"] = refusal(lambda: start(alone, local_steps=2, on_nonfinite="skp"))
    found["buckets of local steps"] = refusal(lambda: start(alone, local_steps=2, buckets=2))
    found["buckets"] = refusal(lambda: attach(model, make_optimizer("sgd", model), wire=Wire(buckets=2)))
    found["reduce"] = refusal(lambda: attach(model, make_optimizer("sgd", model), wire=Wire(reduce="rows")))
    found["topk"] = refusal(lambda: compress(model, "topk"))
    found["codec"] = refusal(lambda: attach(model, make_optimizer("sgd", model), codec="int7"))
    schedule: Any = torch.optim.lr_scheduler.ConstantLR(make_optimizer("sgd", model))
    found["schedule"] = refusal(lambda: attach(model, schedule))

    optimizer, pipeline = start(model)
    found["step()"] = refusal(pipeline.step)
    found["no backward"] = refusal(optimizer.step)
    train(model, optimizer, batch)
    cross_entropy(model(batch[0]), batch[1]).backward()
    found["flush"] = refusal(pipeline.flush)
    found["accumulated"] = refusal(lambda: model(batch[0]))
    optimizer.step()
    pipeline.close()
    found["closed"] = refusal(lambda: train(model, optimizer, batch))

    apart = DistributedDataParallel(make_model(), broadcast_buffers=False)
    own_optimizer, pipeline = start(apart, local_steps=2)
    pipeline.close()
    found["closed local steps"] = refusal(lambda: train(apart, own_optimizer, batch))

    half_frozen = ddp()
    optimizer, pipeline = start(half_frozen)
    train(half_frozen, optimizer, batch)
    half_frozen.module.first.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    found["frozen"] = refusal(lambda: train(half_frozen, optimizer, batch))
    pipeline.close()

    for name, take_over in (("attach", start), ("compress", compress)):
        late = DistributedDataParallel(make_model(), find_unused_parameters=True)
        late.module.first.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        taken = take_over(late)
        found[f"frozen before {name}"] = refusal(lambda: cross_entropy(late(batch[0]), batch[1]).backward())  # noqa: B023
        (taken[1] if isinstance(taken, tuple) else taken).close()

    kept = ddp()
    optimizer = make_optimizer("differences", kept)
    pipeline = attach(kept, optimizer)
    train(kept, optimizer, batch)
    found["kept gradients"] = refusal(lambda: train(kept, optimizer, batch))
    assert refusal(pipeline.close) == found["kept gradients"]

    scaled = ddp()
    optimizer, pipeline = start(scaled)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(cross_entropy(scaled(batch[0]), batch[1])).backward()
    found["scaler"] = refusal(lambda: scaler.step(optimizer))
    optimizer.step()
    pipeline.close()
    return found


def test_what_cannot_work_is_refused_in_one_line() -> None:
    compiled = (
        "ddp_model must be a DistributedDataParallel; got OptimizedModule: compile what is inside, "
        "DistributedDataParallel(torch.compile(layers))"
    )
    for found in run_ranks(2, _refusals):
        assert found == {
            "no DDP": "ddp_model must be a DistributedDataParallel; got Model: wrap it before, "
            "DistributedDataParallel(model)",
            "compiled": compiled,
            "compiled, compressed": compiled,
            "hook": "ddp_model must have no communication hook; got one with allreduce_hook",
            "hook, compressed": "ddp_model must have no communication hook; got one with allreduce_hook",
            "max_norm": "max_norm must be None in an embedding that is trained, since each rank's forward passes would "
            "shorten other rows of its weights; got 0.5 in module",
            "part": "optimizer must hold all parameters of ddp_model that require a gradient; got one without "
            "first.weight (8 of 10 are missing); pipesgd.ddp.compress works with any number of optimizers",
            "guard": "guard must be left out, since a loop with DistributedDataParallel has its own steps; got True",
            "buffers of local steps": "ddp_model must be made with broadcast_buffers=False for local steps: its "
            "buffers would be sent in every forward pass",
            "search of local steps": "ddp_model must be made without find_unused_parameters=True for local steps: the "
            "parameters used would be sent in every backward pass",
            "statistics of local steps": "ddp_model must be made without SyncBatchNorm for local steps: its statistics "
            "would be sent in every forward pass",
            "guard of local steps": "guard must be left out with local steps, since it judges averaged gradients; "
            "got True",
            "clipping of local steps": "clip_norm must be left out, since the loop clips its gradients itself; got 1.0",
            "on_nonfinite of local steps": "on-nonfinite must be stop or skip; got 'skp' (did you mean skip?)",
            "buckets of local steps": "buckets must be left out with local steps, since a movement is complete only "
            "when its window ends; got 2",
            "buckets": "buckets must be left out, since a loop with DistributedDataParallel has its own buckets; got 2",
            "reduce": "reduce must be matrix in a loop with DistributedDataParallel, whose buckets hold whole "
            "gradients; got rows",
            "topk": f"codec must be one of {', '.join(BUCKET_CODECS)}, module:function; got 'topk'",
            "codec": f"codec must be one of {', '.join(CODECS)}, module:function; got 'int7' (did you mean int8?)",
            "kept gradients": "optimizer must clone what it keeps of a gradient, as in state[p]['last'] = "
            "p.grad.clone(), since later gradients overwrite it; got Differences, which keeps p.grad itself",
            "schedule": "optimizer must be one of torch.optim; got ConstantLR",
            "frozen": "parameters must not be frozen while the model is attached; got first.weight (1 of 10): close() "
            "the pipeline, make the DistributedDataParallel again, and attach that",
            **{
                f"frozen before {name}": "parameters must be frozen before DistributedDataParallel is made; got some "
                "that were frozen since: close() the pipeline, make the DistributedDataParallel again, and attach that"
                for name in ("attach", "compress")
            },
            "step()": "an attached pipeline must be left to the loop: call optimizer.step() instead of step()",
            "no backward": "optimizer.step() must follow a backward pass outside of no_sync(), which hands over no "
            "gradient (to step on each rank's own: attach(..., windows=Windows(local_steps=H))); got a step without a "
            "new gradient",
            "flush": "flush must not be called between backward() and optimizer.step()",
            "accumulated": WITHOUT_A_STEP.format("forward"),
            "closed": "a strategy must not be used after close(); make a new one",
            "closed local steps": "a strategy must not be used after close(); make a new one",
            "scaler": "scaler must be the loop's GradScaler, whose steps reach this optimizer: "
            "attach(..., scaler=scaler)",
        }


WITHOUT_A_STEP = (
    "backward() must be followed by step() of the optimizer that was given to attach, or run in ddp_model.no_sync(), "
    "with its forward pass, if its gradients are accumulated or dropped; got another {} pass without a step"
)


def without_a_step(
    ranks: Ranks, left_out: int, drops: bool, evaluating: bool, width: int | None = None
) -> tuple[str, Weights]:
    """Train without the step of one iteration, whose gradients are dropped, or else added to the next ones.

    Returns what is refused, and the weights at the end. Without a width, it is a program with DDP alone.
    """
    ddp_model = DistributedDataParallel(make_model())
    optimizer = make_optimizer("sgd", ddp_model)
    prediction = "none" if evaluating else "eager"  # with another one, gradients of evaluation mode are refused
    pipeline = (
        contextlib.nullcontext()
        if width is None
        else attach(ddp_model, optimizer, width=width, codec="fp32", updates=Updates(prediction=prediction))
    )
    ddp_model.train(not evaluating)
    try:
        with pipeline:
            for number, (inputs, targets) in enumerate(batches(ranks.rank, ranks.world_size)):
                cross_entropy(ddp_model(inputs), targets).backward()
                if number != left_out:
                    optimizer.step()
                if number != left_out or drops:
                    optimizer.zero_grad()
    except UserInputError as error:
        return str(error), {}
    return "nothing", snapshot(ddp_model.module)


def _refused_without_a_step(ranks: Ranks) -> list[str]:
    cases = itertools.product((False, True), (0, 3), (False, True))  # no mean is due in the first iteration
    return [without_a_step(ranks, left_out, drops, evaluating, 2)[0] for evaluating, left_out, drops in cases]


def test_a_backward_pass_without_a_step_is_refused() -> None:
    """It used to lose the mean that was due, and the gradient that the loop had dropped was applied later."""
    forward, backward = (WITHOUT_A_STEP.format(refused_in) for refused_in in ("forward", "backward"))
    for refused in run_ranks(2, _refused_without_a_step):
        assert refused == [forward] * 4 + [backward] * 4


def _synchronous_without_a_step(ranks: Ranks) -> list[tuple[Weights, Weights]]:
    cases = itertools.product((False, True), (False, True))
    return [tuple(without_a_step(ranks, 3, *case, width)[1] for width in (None, 1)) for case in cases]  # type: ignore[misc]


def test_a_backward_pass_without_a_step_is_that_of_ddp_at_width_1() -> None:
    for answer in run_ranks(2, _synchronous_without_a_step):
        for expected, found in answer:
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0.0)


def adversaries(ranks: Ranks, door: str, width: int) -> Weights:
    """Train a critic and a generator, whose loss passes through the critic and whose gradients of that are dropped."""
    torch.manual_seed(0)
    models = [nn.Linear(20, 20), nn.Linear(20, 1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    own = contextlib.nullcontext
    if door == "Pipelined":
        pipelines: list[Any] = [
            Pipelined(*pair, width=width, ranks=ranks) for pair in zip(models, optimizers, strict=True)
        ]
        generator, critic = models
        steps = [pipeline.step for pipeline in pipelines]
    else:
        generator, critic = (DistributedDataParallel(model) for model in models)
        pipelines = [
            attach(model, optimizer, width=width, codec="fp32")
            for model, optimizer in zip((generator, critic), optimizers, strict=True)
        ]
        steps = [optimizer.step for optimizer in optimizers]
        if door == "attach in no_sync":
            own = critic.no_sync
    for inputs, _ in batches(ranks.rank, ranks.world_size):
        made = generator(inputs)
        optimizers[1].zero_grad()
        critic(torch.cat([inputs + 1, -made.detach()])).square().mean().backward()
        steps[1]()
        optimizers[0].zero_grad()
        with own():
            critic(made).mean().backward()
        steps[0]()
    for pipeline in pipelines:
        pipeline.close()
    return snapshot(nn.ModuleList(models))


def _adversaries_by_all_doors(ranks: Ranks) -> dict[int, list[Weights]]:
    doors = {2: ["Pipelined", "attach in no_sync"], 1: ["Pipelined", "attach in no_sync", "attach"]}
    return {width: [adversaries(ranks, door, width) for door in of_width] for width, of_width in doors.items()}


def test_a_loss_that_passes_through_another_model_trains_as_by_pipelined() -> None:
    for by_width in run_ranks(2, _adversaries_by_all_doors):
        for expected, *found in by_width.values():
            assert all(same(expected, one) for one in found)


def _in_join(ranks: Ranks) -> list[tuple[str, int]]:
    """Train in ``join`` with fewer batches on rank 1; return what is raised, and the number of iterations."""
    found = []
    for options in ({}, {"local_steps": 2}):
        for how in ({}, {"throw_on_early_termination": True}):
            ddp_model = DistributedDataParallel(make_model(), broadcast_buffers=False)
            optimizer, pipeline = start(ddp_model, **options)
            error = ""
            try:
                with ddp_model.join(**how):
                    for batch in batches(ranks.rank, ranks.world_size, ITERATIONS - 2 * ranks.rank):
                        train(ddp_model, optimizer, batch)
            except (RuntimeError, UserInputError) as raised:
                error = str(raised)
            pipeline.close()  # which compares weights
            found.append((error, pipeline.iteration))
    return found


def test_join_is_refused_unless_all_ranks_end_at_once() -> None:
    for rank, found in enumerate(run_ranks(2, _in_join)):
        refused = (
            "inputs must be even: all ranks must train on the same number of batches, since a rank that waits in "
            "ddp_model.join() takes no step; got a forward pass in join() without throw_on_early_termination=True",
            0,
        )
        ended = f"Rank {rank} exhausted all inputs." if rank else "Detected at least one rank that exhausted inputs."
        found = [(error.split(" Throwing")[0], count) for error, count in found]
        assert found == [refused, (ended, ITERATIONS - 2)] * 2


def _stops(ranks: Ranks) -> tuple[str, bool]:
    ddp_model = DistributedDataParallel(make_model())
    optimizer, pipeline = start(ddp_model)
    try:
        for number, (inputs, targets) in enumerate(batches(ranks.rank, ranks.world_size)):
            optimizer.zero_grad()
            (cross_entropy(ddp_model(inputs), targets) * poisoned(ranks.rank, number, 2)).backward()
            optimizer.step()
    except NonFiniteGradientError as error:
        with pipeline.true_weights():
            true = snapshot(ddp_model.module)
        answer = str(error), same(true, snapshot(ddp_model.module))
        with pytest.warns(RuntimeWarning, match="gradients in flight are dropped"):
            pipeline.close()
        return answer
    return "nothing was raised", False


def test_a_gradient_that_is_not_finite_is_raised_by_backward_on_all_ranks() -> None:
    for message, are_true in run_ranks(2, _stops):
        assert message.startswith(
            "the averaged gradient of iteration 2 holds a NaN or an infinity: so does the own gradient of rank 1"
        )
        assert are_true


def _timeouts(ranks: Ranks, of_group: float, options: dict[str, float]) -> list[tuple[float, float, float]]:
    """Return for each door how long it waits for a message, for a rank in the store, and for a heartbeat."""
    group = dist.new_group(timeout=timedelta(seconds=of_group))
    doors: list[tuple[Callable[..., Any], Callable[[Any], Any]]] = [
        (attach, lambda pipeline: pipeline.pipeline.flight.connections),
        (functools.partial(attach, windows=Windows()), lambda steps: steps.pipeline.flight.connections),
        (
            lambda ddp_model, _, **options: compress(ddp_model, **options),
            lambda state: state.flight.connections,
        ),
    ]
    found = []
    for door, connections_of in doors:
        ddp_model = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        state = door(ddp_model, make_optimizer("sgd", ddp_model), **sections(**options))
        connections = connections_of(state)
        standing = connections.ranks.standing
        found.append((connections._timeout, standing.timeout, standing.longest_silence))
        state.close()
    return found


@pytest.mark.parametrize(
    ("of_group", "options", "expected"),
    [(1800, {}, (1800, 1800, 120)), (55, {}, (55, 55, 55)), (1800, {"timeout": 300}, (300, 300, 300))],
)
def test_ranks_wait_as_long_as_their_group_unless_a_heartbeat_is_missing(
    of_group: float, options: dict[str, float], expected: tuple[float, float, float]
) -> None:
    """A rank that evaluated or saved alone for two minutes used to end the training."""
    for found in run_ranks(2, _timeouts, of_group, options):
        assert set(found) == {expected}


def _one_leaves(ranks: Ranks, door: str) -> None:
    ddp_model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 10)))
    optimizer = make_optimizer("sgd", ddp_model)
    state = attach(ddp_model, optimizer) if door == "attach" else compress(ddp_model)
    for number, batch in enumerate(batches(ranks.rank, ranks.world_size)):
        if ranks.rank == 1 and number == 4:
            os._exit(0)
        optimizer.zero_grad()
        loss = cross_entropy(ddp_model(batch[0]), batch[1])
        try:
            loss.backward()
        except CommunicationError as error:
            state.__exit__(type(error), error, None)
            return
        optimizer.step()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("door", ["attach", "compress"])
def test_a_lost_rank_is_raised_by_backward(door: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, _one_leaves, door)
    assert str(failure.value) == "rank 1 died: without an answer", "rank 0 returned"


def _differ(ranks: Ranks) -> str:
    model = DistributedDataParallel(make_model())
    try:
        compress(model, "int8" if ranks.rank else "int4")
    except DisagreementError as error:
        return str(error)
    return "nothing was raised"


def test_codecs_that_differ_between_ranks_are_named() -> None:
    assert set(run_ranks(2, _differ)) == {
        "codec must be the same on all ranks; got 'int4' on rank 0, 'int8' on rank 1; codec's block must be the same "
        "on all ranks; got 256 on rank 0, 1024 on rank 1"
    }


# ---- compress


def by_compressed(ranks: Ranks, codec: str | CodecOptions | None, interrupted: bool = False, **ddp: Any) -> Weights:
    def wrap(model: Model) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
        ddp_model = DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_BUCKETS} | ddp)
        state = compress(ddp_model, codec) if codec else contextlib.nullcontext()
        return ddp_model, make_optimizer("sgd", ddp_model), state

    ddp_model, optimizer, state = wrap(make_model())
    for number, batch in enumerate(batches(ranks.rank, ranks.world_size)):
        if interrupted and number == 4:
            saved = [pickled(of.state_dict()) for of in (ddp_model.module, optimizer, state)]
            state.close()
            model = make_model()
            model.load_state_dict(saved[0])
            ddp_model, optimizer, state = wrap(model)
            optimizer.load_state_dict(saved[1])
            state.load_state_dict(saved[2])
        train(ddp_model, optimizer, batch)
    if codec:
        assert state.report.wire_bytes > 0
        state.close()
    return snapshot(ddp_model.module)


def _compressed(ranks: Ranks, codec: str, ddp: dict[str, Any]) -> tuple[Weights, Weights]:
    return by_compressed(ranks, None), by_compressed(ranks, codec, **ddp)


@pytest.mark.parametrize(
    ("codec", "tolerance", "ddp"),
    [
        ("fp32", 1e-6, {}),  # sums in another order
        ("fp32", 1e-6, {"gradient_as_bucket_view": True, "static_graph": True}),
        ("bf16", 2e-3, {}),
        ("int8", 5e-3, {}),
        ("int4", 6e-2, {"gradient_as_bucket_view": True}),
    ],
)
def test_a_compressed_program_stays_close_to_ddp(codec: str, tolerance: float, ddp: dict[str, Any]) -> None:
    answers = run_ranks(3, _compressed, codec, ddp)
    for expected, found in answers:
        assert same(found, answers[0][1]), "replicas"
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=tolerance, rtol=0.0)
        assert codec == "fp32" or not same(expected, found)


def _loads_the_state_of_another_codec(ranks: Ranks) -> str:
    ddp_model = DistributedDataParallel(nn.Linear(20, 10))
    with compress(ddp_model, PowerSgd()) as state:
        kept = state.state_dict()
    other = DistributedDataParallel(nn.Linear(20, 10))
    with compress(other, PowerSgd(dense_start=9)) as state:
        return refusal(lambda: state.load_state_dict(kept))


def test_the_state_of_another_codec_is_refused_by_compress() -> None:
    """Residuals of factors would be in place of those of whole gradients."""
    expected = "codec must be powersgd of rank 4, as in the state that is loaded; got powersgd of rank 4 after 9 whole"
    for said in run_ranks(2, _loads_the_state_of_another_codec):
        assert said == f"{expected} gradients"


def _one_closes_early(ranks: Ranks) -> str:
    """Let rank 1 begin a backward pass more than rank 0; return what each of them gets to hear."""
    ddp_model = DistributedDataParallel(nn.Linear(20, 10), bucket_cap_mb=25)
    said = "nothing was raised"
    try:
        with compress(ddp_model, "int8", wire=Wire(timeout=3.0)):
            for _ in range(2 + ranks.rank):
                ddp_model(torch.ones(5, 20)).sum().backward()
    except RunError as error:
        said = f"{type(error).__name__}: {error}"
    ranks.all_gather_object("the others", None)  # so that no rank fails because another one is gone
    return said


def test_ranks_with_other_numbers_of_backward_passes_are_told_at_once() -> None:
    """They used to wait for each other until the deadline, which is half an hour by default."""
    first, second = run_ranks(2, _one_closes_early)
    assert first.startswith("OutOfStepError: rank 0 is at close in iteration 2, but rank 1 is at step in iteration 2: ")
    assert second.startswith("OutOfStepError: rank 1 is at step in iteration 2, but rank 0 is at close in iteration 2")


def _residuals(ranks: Ranks, codec: str | CodecOptions) -> tuple[float, float]:
    """Return the difference of the sums of what was put in and of what came out, with residuals and without."""
    model = DistributedDataParallel(nn.Linear(300, 7, bias=False), bucket_cap_mb=25)
    state = compress(model, codec)
    inputs = torch.randn(ITERATIONS, 5, 300, generator=torch.Generator().manual_seed(ranks.rank))
    put_in, came_out = torch.zeros(7, 300), torch.zeros(7, 300)
    for batch in inputs:
        model.zero_grad()
        model(batch).square().sum().backward()
        came_out += model.module.weight.grad
        own = (2 * model.module(batch)).T @ batch
        put_in += own.detach()
    parts = [state.state_dict()["kept"][0][0].view(7, 300), put_in]
    for part in parts:
        dist.all_reduce(part)
        part /= ranks.world_size
    state.close()
    largest = float(parts[1].abs().max())
    return float((parts[1] - came_out - parts[0]).abs().max()) / largest, float(
        (parts[1] - came_out).abs().max()
    ) / largest


@pytest.mark.parametrize("codec", ["sign", codec_named("powersgd", low_rank=1)], ids=str)
def test_what_a_codec_leaves_out_of_a_bucket_is_in_its_residual(codec: str | CodecOptions) -> None:
    for with_residuals, without in run_ranks(2, _residuals, codec):
        assert with_residuals < 1e-5 < without


class Products(nn.Module):
    """Two weights, whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(40, 50) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        products: Tensor = sum((weight * own).sum() for weight, own in zip(self.weights, inputs, strict=True))  # type: ignore[assignment]
        return products


def _after_a_nan(ranks: Ranks, bad: int, codec: str) -> list[float]:
    """Return the largest value of each gradient after one of large values, among which weight ``bad`` has a NaN."""
    model = DistributedDataParallel(Products(), bucket_cap_mb=0.001)
    with compress(model, codec):
        for large in (False, False, True, False):
            inputs = torch.linspace(-1, 1, 4000).view(2, 40, 50) * (1e3 if large else 1e-3)
            if large and ranks.rank == 1:
                inputs[bad, 0, 7] = torch.nan
            model.zero_grad()
            model(inputs).backward()
    return [float(parameter.grad.abs().max()) for parameter in model.parameters()]


@pytest.mark.parametrize("codec", ["int4", "powersgd"])
@pytest.mark.parametrize("bad", [0, 1])
def test_nothing_of_gradients_that_are_not_finite_is_in_later_ones_of_a_compressed_program(
    bad: int, codec: str
) -> None:
    """A ``GradScaler`` has left them out. Both weights have a bucket of their own."""
    for largest in run_ranks(2, _after_a_nan, bad, codec):
        assert max(largest) < 1.2e-3


def _resumed(ranks: Ranks, codec: str | CodecOptions) -> tuple[Weights, Weights, int]:
    whole, resumed = (by_compressed(ranks, codec, interrupted) for interrupted in (False, True))
    return whole, resumed, ranks.rank


@pytest.mark.parametrize(("codec", "tolerance"), [("int4", 3e-2), (codec_named("powersgd", low_rank=2), 1e-4)], ids=str)
def test_a_resumed_compressed_program_has_its_residuals_and_factors(
    codec: str | CodecOptions, tolerance: float
) -> None:
    answers = run_ranks(2, _resumed, codec)
    for whole, resumed, _ in answers:
        assert same(resumed, answers[0][1]), "replicas"
        for name, value in whole.items():  # its first iteration is exact
            torch.testing.assert_close(resumed[name], value, atol=tolerance, rtol=0.0)


# ---- the programs in examples/


def test_three_lines_turn_a_ddp_program_into_pipe_sgd() -> None:
    before, after = (
        Path(REPOSITORY, "examples", name).read_text(encoding="utf-8").splitlines()[1:]
        for name in ("ddp.py", "ddp_pipesgd.py")
    )
    changed = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    assert len(changed) == 3
    assert all(line.startswith("+ ") for line in changed)


def test_the_example_learns(tmp_path: Path) -> None:
    """The one without these lines is torch's alone: on a busy machine, a rank of it may hang in torch at its end."""
    output = run_example("ddp_pipesgd.py", tmp_path)
    assert re.match(r"epoch 0: \d+\.\d s, accuracy 0\.", output)
    assert float(output.split()[-1]) > 0.85
    assert (tmp_path / "digits.pt").exists()
