"""The meaning of a user's loop with each strategy, as docs/semantics.md describes it."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from _ranks import run_ranks
from _reference import pipe_sgd
from _runs import succeed, succeed_in
from _sections import sections
from _small_problem import assert_same_weights, clip_by_torch, regress, small_problem
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from experiments.predictions import COMPARED
from pipesgd import Pipelined
from pipesgd.baselines.ddp import Ddp
from pipesgd.baselines.local import Local
from pipesgd.cli import parse
from pipesgd.data import evaluation_batches
from pipesgd.data.samples import InMemoryImages, PixelScale
from pipesgd.errors import UserInputError
from pipesgd.optim.clipping import Clipping
from pipesgd.pipeline.prediction import Prediction
from pipesgd.pipeline_config import BUFFERS
from pipesgd.ranks import Ranks
from pipesgd.run.evaluation import evaluate, mean, sums
from pipesgd.run.forward_backward import forward_backward
from pipesgd.sections import Updates
from pipesgd.strategy import Strategy
from pipesgd.systems.servers.strategy import ParameterServers

pytestmark = pytest.mark.slow

DOCUMENTATION = Path(__file__).resolve().parent.parent / "docs" / "semantics.md"
STRATEGIES = ["pipelined 1", "pipelined 2", "ddp", "ps-sync"]


def make(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, clip: dict[str, float] | None = None
) -> Strategy:
    clip = clip or {}
    if name == "ddp":
        return Ddp(
            model, optimizer, ranks=ranks, clip=Clipping(norm=clip.get("clip_norm"), value=clip.get("clip_value"))
        )
    if name == "ps-sync":
        return ParameterServers(model, optimizer, staleness_bound=0, ranks=ranks)
    _, width, *prediction = name.split()
    prediction = prediction or ["local"]
    return Pipelined(model, optimizer, width=int(width), ranks=ranks, **sections(prediction=prediction[0], **clip))


def test_the_loop_in_the_documentation_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [loop] = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(encoding="utf-8"), re.DOTALL)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            inputs = torch.randn(16, 4, generator=generator)
            yield inputs, inputs[:, :3].argmax(1)

    torch.manual_seed(0)
    names: dict[str, Any] = {
        "torch": torch,
        "contextlib": contextlib,
        "Pipelined": Pipelined,
        "Updates": Updates,
        "cross_entropy": nn.functional.cross_entropy,
    }
    names |= {"iterations": 60, "micro_batches": 2, "batches": batches()}
    exec(loop, names)
    assert names["loss"].item() < 0.3, "half a loss, of half a batch; chance is 0.55"
    saved = torch.load("model.pt", weights_only=True)
    assert_same_weights(saved, names["model"].state_dict(), rtol=0.0)


# ---- Accumulation


def _accumulate(
    ranks: Ranks, strategy: str, micro_batches: int
) -> tuple[dict[str, Tensor], list[float], list[int], int]:
    """Return weights, losses, bytes sent in each iteration, and forward passes, of 5 iterations of 12 samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    made = make(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), ranks)
    config = parse(["--accumulation", str(micro_batches)])
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_hook(count)

    def samples() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(ranks.rank)
        while True:
            inputs = torch.randn(12, 4, generator=generator, dtype=torch.float64)
            yield inputs, torch.randint(3, (12,), generator=generator)

    batches, losses, sent = samples(), [], []
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for iteration in range(5):
        losses.append(forward_backward(made, batches, config, scaler, iteration)[0])
        sent.append(made.step().wire_bytes)
    made.flush()
    made.close()
    return model.state_dict(), losses, sent, passes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_are_one_batch_and_travel_once(strategy: str) -> None:
    """In float64 only the order of a few additions differs. DDP counts its bytes whenever its hook runs."""
    at_once = run_ranks(2, _accumulate, strategy, 1)
    for (weights, losses, sent, passes), (whole, of_whole, sent_whole, _) in zip(
        run_ranks(2, _accumulate, strategy, 3), at_once, strict=True
    ):
        assert passes == 15
        assert losses == pytest.approx(of_whole, rel=1e-12)
        assert_same_weights(weights, whole, rtol=1e-12)
        assert sent == sent_whole
        assert min(sent) > 0


# ---- Clipping


CLIPS = [{"clip_norm": 0.1}, {"clip_value": 0.02}, {"clip_norm": 0.1, "clip_value": 0.06}]


def _clip(ranks: Ranks, strategy: str) -> list[dict[str, Tensor]]:
    results = []
    for clip in CLIPS:
        model, batches = small_problem(3, [4, 5, 3], 9, ranks.world_size)
        made = make(strategy, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), ranks, clip)
        for of_ranks in batches:
            regress(made.module, of_ranks[ranks.rank]).backward()
            made.step()
        made.flush()
        made.close()
        results.append(model.state_dict())
    return results


@pytest.mark.parametrize(
    ("strategy", "width", "prediction"),
    [
        ("pipelined 1", 1, "none"),
        ("ddp", 1, "none"),
        ("pipelined 3 none", 3, "none"),
        ("pipelined 3 local", 3, "local"),
    ],
)
def test_the_averaged_gradient_is_clipped_by_torchs_rules_when_it_is_applied(
    strategy: str, width: int, prediction: str
) -> None:
    """The reference is one process: the mean over ranks, torch's functions, torch's optimizer."""

    def reference(clip: dict[str, float]) -> dict[str, Tensor]:
        model, batches = small_problem(3, [4, 5, 3], 9, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        clipped = clip_by_torch(**clip)
        pipe_sgd(model, optimizer, regress, batches, width=width, prediction=prediction, clip=clipped)
        return model.state_dict()

    for of_rank in run_ranks(2, _clip, strategy):
        for clip, weights in zip(CLIPS, of_rank, strict=True):
            assert_same_weights(weights, reference(clip), rtol=1e-11)
            with pytest.raises(AssertionError):
                assert_same_weights(weights, reference({}), rtol=1e-2)


def test_an_iteration_without_a_gradient_can_be_clipped() -> None:
    model = nn.Linear(2, 1)
    strategy = Local(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=Clipping(norm=1.0, value=1.0))
    assert strategy.step().applied == (0,)


# ---- Buffers


def _combine(ranks: Ranks, strategy: str) -> list[tuple[list[float], int]]:
    model = nn.BatchNorm1d(2)
    made = make(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1), ranks)
    with pytest.raises(UserInputError, match="buffers must be one of average, rank-0, own; got 'mean'"):
        made.combine_buffers("mean")
    results = []
    for how in BUFFERS:
        model.running_mean.copy_(torch.tensor([1.0, 10.0]) * (ranks.rank + 1))
        model.num_batches_tracked.fill_(4 + ranks.rank)
        made.combine_buffers(how)
        results.append((model.running_mean.tolist(), int(model.num_batches_tracked)))
    made.flush()
    made.close()
    return results


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_are_averaged_or_rank_0s_or_stay(strategy: str) -> None:
    """Counters, which are not floating-point, stay as they are."""
    for rank, (average, rank_0, own) in enumerate(run_ranks(3, _combine, strategy)):
        assert average == ([2.0, 20.0], 4 + rank)
        assert rank_0 == ([1.0, 10.0], 4 + rank)
        assert own == ([1.0 + rank, 10.0 + 10 * rank], 4 + rank)


def _combine_not_finite(ranks: Ranks, strategy: str) -> list[tuple[list[float], str]]:
    """Average statistics that are not finite on rank 2, and then those that are finite on no rank."""
    model = nn.BatchNorm1d(2)
    made = make(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1), ranks)
    results = []
    for poisoned in ([2], [0, 1, 2]):
        model.running_mean.copy_(torch.tensor([1.0, 10.0]) * (ranks.rank + 1))
        if ranks.rank in poisoned:
            model.running_mean[0] = torch.nan
        with contextlib.redirect_stderr(io.StringIO()) as said:
            made.combine_buffers("average")
        results.append((model.running_mean.tolist(), said.getvalue()))
    made.flush()
    made.close()
    return results


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_that_are_not_finite_are_left_out_of_the_average(strategy: str) -> None:
    """Statistics of one rank's batch with a NaN, whose gradient is skipped, used to reach all ranks."""
    for rank, (some, every) in enumerate(run_ranks(3, _combine_not_finite, strategy)):
        warning = "warning: buffers of rank 2 are not finite: they are left out of the average\n"
        assert some == ([1.5, 15.0], "" if rank else warning)
        assert math.isnan(every[0][0])
        assert every[0][1] == 20.0
        assert ("ranks 0, 1, 2 are not finite: their average is not, either" in every[1]) == (rank == 0)


def _evaluate(ranks: Ranks, strategy: str) -> None:
    for how in BUFFERS:
        _evaluate_with(ranks, strategy, how)


def _evaluate_with(ranks: Ranks, strategy: str, how: str) -> None:
    """Evaluate in the middle of training, with gradients in flight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    made = make(strategy, model, torch.optim.SGD(model.parameters(), lr=0.5), ranks)
    torch.manual_seed(1)
    images = torch.randint(256, (90, 1, 4, 4), dtype=torch.uint8)
    dataset = InMemoryImages(images, torch.randint(10, (90,)), PixelScale(mean=(0.5,), std=(0.3,)))
    torch.manual_seed(2 + ranks.rank)
    for _ in range(5):
        inputs = torch.randn(6, 1, 4, 4) * (1 + ranks.rank)
        nn.functional.cross_entropy(made.module(inputs), torch.randint(10, (6,))).backward()
        made.step()
    held = [parameter.detach().clone() for parameter in model.parameters()]
    with made.true_weights():
        expected = copy.deepcopy(model)
    assert any(not torch.equal(a, b) for a, b in zip(held, expected.parameters(), strict=True)) == strategy.startswith(
        "pipelined 2"
    ), "predicted weights are others"
    for buffer in expected.buffers():
        if buffer.is_floating_point():
            of_ranks = torch.tensor(ranks.all_gather_object("buffer", buffer.tolist()))
            buffer.copy_({"average": of_ranks.mean(0), "rank-0": of_ranks[0], "own": of_ranks[ranks.rank]}[how])
    batches = evaluation_batches(dataset, batch_size=64, rank=ranks.rank, world_size=ranks.world_size, loader_workers=0)
    parts = ranks.all_gather_object("expected", sums(expected, batches, torch.device("cpu")))
    found = evaluate(model, made, dataset, ranks, torch.device("cpu"), buffers=how)
    assert found.loss == pytest.approx(mean(parts).loss, rel=1e-6)
    assert found.accuracy == mean(parts).accuracy
    assert all(torch.equal(a, b) for a, b in zip(held, model.parameters(), strict=True)), "training continues as before"
    made.flush()
    made.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_has_true_weights_and_the_chosen_buffers(strategy: str) -> None:
    run_ranks(2, _evaluate, strategy)


NORMALIZED = """
import os

from torch import nn, zeros

class Normalized(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(64)
        self.register_buffer("running_rank", zeros(()))

    def forward(self, inputs):
        if self.training:
            self.running_rank.fill_(1.0 + int(os.environ["OWN_RANK"]))
        return super().forward(inputs)

def model(num_classes):
    return nn.Sequential(nn.Flatten(), Normalized(), nn.Linear(64, num_classes))
"""


def test_what_a_run_saves_has_the_chosen_buffers(tmp_path: Path) -> None:
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    saved = {}
    for how in ("average", "own"):
        words = f"--model normalized:model --batch-size 2 --iterations 1 --buffers {how}"
        succeed_in(tmp_path, 2, words, tmp_path / how)
        saved[how] = torch.load(tmp_path / how / "model.pt", weights_only=True)
    assert saved["average"]["1.running_rank"] == 1.5
    assert saved["own"]["1.running_rank"] == 1.0, "rank 0's"
    for name, value in saved["own"].items():
        assert torch.equal(saved["average"][name], value) == ("running" not in name), name


# ---- Schedules


class Recording(torch.optim.Optimizer):
    """A mixin that records the options of each step; the copy that predicts has its own list."""

    seen: list[list[Any]]
    options: tuple[str, ...]

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        self.seen = [*getattr(self, "seen", []), [copy.deepcopy(group[name]) for name in self.options]]
        return super().step(closure)


class RecordingSGD(Recording, torch.optim.SGD):
    options = ("lr", "momentum")


class RecordingAdamW(Recording, torch.optim.AdamW):
    options = ("lr", "betas")


def train_one_cycle(kind: str, width: int, prediction: str) -> tuple[list[Any], list[Any]]:
    model = nn.Linear(2, 1)
    made: Any = (RecordingSGD if kind == "sgd" else RecordingAdamW)(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.1, total_steps=8, cycle_momentum=True)
    pipeline = Pipelined(model, made, width=width, updates=Updates(prediction=prediction))
    computed_under = []
    for _ in range(8):
        computed_under.append([made.param_groups[0][name] for name in made.options])
        model(torch.ones(1, 2)).sum().backward()
        pipeline.step()
        schedule.step()
    pipeline.flush()
    pipeline.close()
    return made.seen, computed_under


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("width", "prediction"), [(1, "none"), (2, "local"), (3, "none"), (3, "local"), (9, "local")])
def test_a_gradient_is_applied_with_the_options_that_it_was_computed_under(
    kind: str, width: int, prediction: str
) -> None:
    applied_with, computed_under = train_one_cycle(kind, width, prediction)
    assert applied_with == computed_under, "all of them, the first and the last included"
    assert len({str(options) for options in computed_under}) == 8, "no two iterations have the same"


def train_at_a_tensor_learning_rate(width: int) -> tuple[bool, list[float], list[float]]:
    model = nn.Linear(2, 1)
    lr = torch.tensor(0.1)
    optimizer = RecordingSGD(model.parameters(), lr=lr)
    pipeline = Pipelined(model, optimizer, width=width)
    rates = []
    for iteration in range(6):
        rates.append(lr.item())
        model(torch.ones(1, 2)).sum().backward()
        pipeline.step()
        lr.mul_(0.5)  # what torch's schedules do, in place
        assert optimizer.param_groups[0]["lr"] is lr, iteration
    pipeline.flush()
    pipeline.close()
    return optimizer.param_groups[0]["lr"] is lr, rates, [options[0].item() for options in optimizer.seen]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_tensor_learning_rate_stays_the_users_own(width: int) -> None:
    same, rates, applied = train_at_a_tensor_learning_rate(width)
    assert same
    assert applied == rates


# ---- torch.compile


def _compile(ranks: Ranks, width: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    results = []
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for compiled in (False, True):
        model, batches = small_problem(1, [4, 6, 3], 8, ranks.world_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        called = torch.compile(model, backend=counter) if compiled else model
        pipeline = Pipelined(called, optimizer, width=width, ranks=ranks)
        for of_ranks in batches:
            regress(called, of_ranks[ranks.rank]).backward()
            pipeline.step()
        pipeline.flush()
        pipeline.close()
        results.append(model.state_dict())
    return results[0], results[1], counter.frame_count


@pytest.mark.parametrize("width", [2, 3])
def test_a_compiled_model_is_compiled_once_and_trains_as_the_other(width: int) -> None:
    for plain, compiled, compilations in run_ranks(2, _compile, width):
        assert_same_weights(compiled, plain, rtol=1e-12)
        assert compilations == 1


# ---- Parameters


class Odd(nn.Module):
    """A module with a shared, a frozen and an unused parameter, and one that is used in every other iteration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.last = nn.Linear(4, 2)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor, iteration: int) -> Tensor:
        outputs = self.last(self.again(self.first(inputs).tanh()) * self.frozen)
        return outputs * self.sometimes if iteration % 2 else outputs

    def loss(self, seed: int, iteration: int) -> Tensor:
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        return self(inputs, iteration).square().mean()


OPTIMIZERS: dict[str, Callable[[Odd], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(
        [
            {"params": [*m.first.parameters(), m.frozen], "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            {"params": m.last.parameters(), "nesterov": True, "momentum": 0.5},
            {"params": [m.unused, m.sometimes], "weight_decay": 0.1},
        ],
        lr=0.05,
    ),
    "adamw": lambda m: torch.optim.AdamW(
        [
            {"params": [*m.first.parameters(), m.frozen], "betas": (0.5, 0.9)},
            {"params": [*m.last.parameters(), m.unused, m.sometimes], "amsgrad": True, "lr": 0.03},
        ],
        lr=0.01,
    ),
}


def train_odd_parameters(optimizer: str, width: int) -> dict[str, Tensor]:
    model = Odd()
    pipeline = Pipelined(model, OPTIMIZERS[optimizer](model), width=width)
    for iteration in range(7):
        model.loss(iteration, iteration).backward()
        pipeline.step()
    pipeline.flush()
    pipeline.close()
    return model.state_dict()


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_missing_gradient_is_zero_and_groups_frozen_and_shared_parameters_are_torchs(
    optimizer: str, width: int
) -> None:
    model = Odd()
    plain = OPTIMIZERS[optimizer](model)
    for iteration in range(7):
        plain.zero_grad()
        model.loss(iteration, iteration).backward()
        for parameter in model.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        plain.step()
    assert torch.equal(model.frozen, torch.ones(4))
    assert not torch.equal(model.unused, torch.ones(3)), "weight decay continues"
    assert_same_weights(train_odd_parameters(optimizer, width), model.state_dict(), rtol=0.0)


ODD_VALUES = 4 * 4 + 4 + 4 * 2 + 2 + 3 + 2
"""Values of the parameters of ``Odd`` that are trained, the shared ones counted once."""


def in_turn(iteration: int, rank: int) -> int:
    """Return an odd number if this rank of two uses ``Odd.sometimes``: none does, rank 0, rank 1, and both."""
    return iteration >> rank & 1


def _train_odd_parameters(ranks: Ranks) -> dict[str, tuple[dict[str, Tensor], set[int]]]:
    """Return by optimizer the weights at the end, and the bytes that this rank sends in an iteration."""
    found = {}
    for name, make_optimizer in OPTIMIZERS.items():
        model = Odd()
        wire_bytes = set()
        with Pipelined(model, make_optimizer(model), width=1, ranks=ranks) as pipeline:
            for iteration in range(7):
                model.loss(2 * iteration + ranks.rank, in_turn(iteration, ranks.rank)).backward()
                wire_bytes.add(pipeline.step().wire_bytes)
        found[name] = model.state_dict(), wire_bytes
    return found


def test_a_missing_gradient_is_zero_and_groups_frozen_and_shared_parameters_are_torchs_on_two_ranks() -> None:
    """The sum of two gradients does not depend on their order, so torch's weights are those of this loop bit for bit.

    Of two ranks, each sends every value once: its half of the gradient before, the other half after it is summed.
    """
    of_ranks = run_ranks(2, _train_odd_parameters)
    for name, make_optimizer in OPTIMIZERS.items():
        model = Odd()
        plain = make_optimizer(model)
        for iteration in range(7):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            for rank in range(2):
                (model.loss(2 * iteration + rank, in_turn(iteration, rank)) / 2).backward()
            plain.step()
        for weights, wire_bytes in (of_rank[name] for of_rank in of_ranks):
            assert_same_weights(weights, model.state_dict(), rtol=0.0)
            assert wire_bytes == {4 * ODD_VALUES}, "shared parameters are sent once, frozen ones are not sent"


# ---- What a prediction changes


def train_and_average(width: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the weights after every iteration, in the order in which they were averaged, and their average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    pipeline = Pipelined(model, torch.optim.AdamW(model.parameters(), lr=0.05), width=width)
    seen = [copy.deepcopy(model.state_dict())]
    for iteration in range(8):
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(iteration))).square().sum().backward()
        pipeline.step()
        with pipeline.true_weights():
            averaged.update_parameters(model)
            seen.append(copy.deepcopy(model.state_dict()))
    pipeline.flush()
    pipeline.close()
    return seen, averaged.module.state_dict()


@pytest.mark.parametrize("width", [2, 3])
def test_an_average_of_true_weights_is_that_of_synchronous_training_some_iterations_late(width: int) -> None:
    synchronous, _ = train_and_average(1)
    _, average = train_and_average(width)
    holder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    expected = AveragedModel(holder, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for iteration in range(8):
        holder.load_state_dict(synchronous[max(0, iteration + 1 - (width - 1))])
        expected.update_parameters(holder)
    assert_same_weights(average, expected.module.state_dict(), rtol=0.0)


def count_hooks(prediction: str | type[Prediction]) -> tuple[int, int]:
    """Return how often the optimizer's own hook and torch's global hook ran, in 5 updates."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own: list[Any] = []
    everywhere: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: own.append(None))
    handle = register_optimizer_step_post_hook(lambda *_: everywhere.append(None))
    pipeline = Pipelined(model, optimizer, width=3, updates=Updates(prediction=prediction))
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        pipeline.step()
    pipeline.flush()
    pipeline.close()
    handle.remove()
    return len(own), len(everywhere)


@pytest.mark.parametrize("prediction", ["local", COMPARED["previous"], COMPARED["nesterov"]])
def test_an_optimizers_hooks_run_for_updates_and_torchs_global_ones_for_predictions_too(
    prediction: str | type[Prediction],
) -> None:
    own, everywhere = count_hooks(prediction)
    assert own == 5
    # One call for each of two gradients in flight (one after the first step); "previous" needs a mean first.
    assert everywhere == 5 + (6 if prediction == COMPARED["previous"] else 9)


def pipeline_of_ones(width: int) -> tuple[nn.Linear, Pipelined, Callable[[], None]]:
    """Build a run of SGD at rate 1 with gradients of 1: the weight is minus the number of updates in it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0), width=width)

    def iterate() -> None:
        model(torch.ones(1, 1)).sum().backward()
        pipeline.step()

    return model, pipeline, iterate


def test_a_flush_in_true_weights_leaves_the_weights_with_all_updates_in_them() -> None:
    model, pipeline, iterate = pipeline_of_ones(3)
    for _ in range(4):
        iterate()
    with pipeline.true_weights():
        assert model.weight.item() == -2.0
        with torch.no_grad():
            model.weight.sub_(100.0)
        pipeline.flush()
        assert model.weight.item() == -104.0
    assert model.weight.item() == -104.0
    pipeline.close()


def test_a_step_in_true_weights_loses_no_update() -> None:
    model, pipeline, iterate = pipeline_of_ones(2)
    iterate()
    with pipeline.true_weights():
        iterate()
    with pipeline.true_weights():
        assert model.weight.item() == -1.0
    pipeline.flush()
    assert model.weight.item() == -2.0
    pipeline.close()


@pytest.mark.parametrize("loads", [True, False])
def test_weights_loaded_in_true_weights_are_what_is_trained_on(loads: bool) -> None:
    model, pipeline, iterate = pipeline_of_ones(2)
    iterate()
    iterate()
    with pipeline.true_weights(), torch.no_grad():
        if loads:
            model.load_state_dict({"weight": torch.tensor([[50.0]])})
        else:
            model.weight.fill_(50.0)
    if loads:
        assert model.weight.item() == 50.0, "and not the weights predicted before"
    else:
        with torch.no_grad():
            model.weight.add_(1000.0)  # changes the predicted weights, which live until the next step
    said = contextlib.nullcontext() if loads else pytest.warns(RuntimeWarning, match="got another value of weight")
    with said:
        iterate()
    pipeline.flush()
    assert model.weight.item() == 48.0, "one gradient was in flight, one was new"
    pipeline.close()


def test_each_pipeline_of_a_process_warns_of_a_write() -> None:
    """Python shows the same text of the same line once."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            model, pipeline, iterate = pipeline_of_ones(2)
            iterate()
            with torch.no_grad():
                model.weight.add_(1.0)
            iterate()
            pipeline.close()
    written = [one for one in said if "got another value of weight" in str(one.message)]
    assert [one.filename for one in written] == [__file__] * 2


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # wraps the step
    with pytest.raises(UserInputError, match="optimizer must step without a closure; got LBFGS"):
        Pipelined(model, optimizer)
    with pytest.raises(UserInputError, match="optimizer must step without a closure; got LBFGS"):
        Local(model, optimizer)


def test_micro_batches_clipping_16_bits_and_buffers_go_together_in_a_run_that_is_continued(tmp_path: Path) -> None:
    """The first losses are too large for float16: infinities are in flight when the checkpoint is written."""
    words = (
        "--hidden-sizes 20 --batch-size 8 --iterations 20 --lr 0.05 --width 3 --checkpoint-iterations 5 "
        "--accumulation 2 --clip-norm 0.5 --precision fp16 --loss-scale 1e6 --buffers rank-0 --schedule one-cycle "
        "--keep-checkpoints 4 --synchronous-start 0"
    )
    whole = succeed(2, words, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for later in (10, 15, 20):
        shutil.rmtree(tmp_path / "checkpoints" / f"iteration-{later}")
    in_flight = torch.load(tmp_path / "checkpoints" / "iteration-5" / "rank-0.pt")["state"]["strategy"]["in_flight"]
    assert not all(gradient["finite"] for gradient in in_flight)
    resumed = succeed(2, words + " --resume", tmp_path)
    again = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert whole["skipped_updates"] == resumed["skipped_updates"]
    assert 3 < resumed["skipped_updates"] < 15
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
