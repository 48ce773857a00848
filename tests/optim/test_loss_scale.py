"""Loss scales compared with torch's own loop, and in a pipeline, where gradients arrive late; and autocast."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _runs import succeed
from _sections import sections
from _small_problem import assert_same_weights
from torch import Tensor, nn

from pipesgd import LocalSteps, Pipelined
from pipesgd.baselines.ddp import Ddp
from pipesgd.baselines.local import Local
from pipesgd.cli import parse
from pipesgd.errors import UserInputError
from pipesgd.optim.loss_scale import LossScale
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.run.forward_backward import forward_backward
from pipesgd.sections import Updates
from pipesgd.strategy import Strategy

pytestmark = pytest.mark.slow

ITERATIONS = 16


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, iteration: int, rank: int, infinite: bool) -> Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    loss: Tensor = model(torch.randn(3, 4, generator=generator)).square().mean()
    return loss * math.inf if infinite else loss


def gradscaler(growth_interval: int = 3) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=growth_interval)


def _train(
    ranks: Ranks, kind: str, width: int, infinite: dict[int, list[int]], growth_interval: int
) -> tuple[dict[str, Tensor], list[float], list[int], list[float], list[str]]:
    """Train; return weights, scale after every iteration, skipped iterations, losses, and true weights' hashes."""
    model, optimizer = network()
    scaler = gradscaler(growth_interval)
    strategy: Strategy
    if kind == "alone":
        strategy = Local(model, optimizer, scaler=scaler)
    elif kind == "ddp":
        strategy = Ddp(model, optimizer, scaler=scaler, ranks=ranks)
    else:
        strategy = Pipelined(
            model, optimizer, scaler=scaler, width=width, ranks=ranks, updates=Updates(prediction=kind)
        )
    scales, skipped, losses, hashes = [], [], [], []
    for iteration in range(ITERATIONS):
        blown = iteration in infinite.get(ranks.rank, [])
        losses.append(loss_of(model, iteration, ranks.rank, False).item())
        scaler.scale(loss_of(strategy.module, iteration, ranks.rank, blown)).backward()
        skipped += strategy.step().skipped
        scales.append(scaler.get_scale())
        with strategy.true_weights():
            hashes.append(weights_sha256(model))
    skipped += strategy.flush().skipped
    strategy.close()
    return model.state_dict(), scales, skipped, losses, hashes


def train_with_torch(infinite: list[int], growth_interval: int) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = network()
    scaler = gradscaler(growth_interval)
    scales = []
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, iteration, 0, iteration in infinite)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model.state_dict(), scales


INFINITE = [[], [0, 1, 7, 12], [2, 3, 4, 5, 15]]


def _train_each(ranks: Ranks, kind: str) -> list[Any]:
    return [_train(ranks, kind, 1, {0: infinite}, 3) for infinite in INFINITE]


@pytest.mark.parametrize("kind", ["none", "ddp", "alone"])
def test_weights_and_scales_are_those_of_torchs_own_loop(kind: str) -> None:
    [results] = run_ranks(1, _train_each, kind)
    for infinite, (weights, scales, skipped, _, _) in zip(INFINITE, results, strict=True):
        theirs, their_scales = train_with_torch(infinite, 3)
        assert scales == their_scales
        assert skipped == infinite
        assert_same_weights(weights, theirs, rtol=0.0)
        assert len(set(scales)) > 1


@pytest.mark.parametrize("kind", ["alone", "ddp"])
def test_with_ddp_all_ranks_skip_and_without_communication_only_one(kind: str) -> None:
    results = run_ranks(2, _train, kind, 1, {1: [4, 5]}, 100)
    assert [skipped for _, _, skipped, _, _ in results] == ([[4, 5], [4, 5]] if kind == "ddp" else [[], [4, 5]])
    assert [scales[-1] for _, scales, _, _, _ in results] == ([256.0, 256.0] if kind == "ddp" else [1024.0, 256.0])


@pytest.mark.parametrize(("width", "kind"), [(2, "local"), (3, "local"), (3, "none")])
def test_what_is_infinite_at_one_scale_is_one_step_back_however_much_is_in_flight(width: int, kind: str) -> None:
    """All gradients computed before the first infinity came back were computed at the same scale."""
    blown = [*range(4, 4 + width), 12]
    results = run_ranks(3, _train, kind, width, {1: blown}, 100)
    first, second = 4 + width - 1, 12 + width - 1  # when they arrive
    for _, scales, skipped, losses, hashes in results:
        assert skipped == blown
        assert scales == [1024.0] * first + [512.0] * (second - first) + [256.0] * (ITERATIONS - second)
        assert all(map(math.isfinite, losses)), "no rank predicts with an infinite gradient"
        assert hashes == results[0][4]


def test_a_scale_that_was_backed_off_from_says_nothing_new_and_a_smaller_one_does() -> None:
    scaler = gradscaler(growth_interval=1)
    scale = LossScale(scaler, [torch.zeros(1)])
    seen = []
    for finite, of_gradient in [(False, 1024), (False, 1024), (True, 512), (False, 512), (False, 1024), (True, 256)]:
        scale.observe(finite, float(of_gradient))
        seen.append(scaler.get_scale())
    assert seen == [512, 512, 1024, 256, 256, 512]


def test_a_scale_stays_finite_as_torchs_does() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    scale = LossScale(scaler, [torch.zeros(1)])
    for _ in range(3):
        scale.observe(True, scaler.get_scale())
    assert scaler.get_scale() == 2.0**127


def test_a_state_dict_continues_in_a_scaler_that_has_scaled_nothing_yet() -> None:
    one, other = gradscaler(), gradscaler()
    saved = LossScale(one, [torch.zeros(1)])
    for finite in (False, True, True):
        saved.observe(finite, one.get_scale())
    continued = LossScale(other, [torch.zeros(1)])
    continued.load_state_dict(saved.state_dict())
    assert other.get_scale() == one.get_scale() == 512.0
    continued.observe(True, 512.0)
    assert other.get_scale() == 1024.0, "the third finite one in a row"
    assert other.scale(torch.ones(1)).item() == 1024.0


def test_a_state_without_scaling_continues_at_the_scalers_own_scale() -> None:
    scaler = gradscaler()
    LossScale(scaler, [torch.zeros(1)]).load_state_dict(LossScale(None, [torch.zeros(1)]).state_dict())
    assert scaler.scale(torch.ones(1)).item() == 1024.0


def _resume(ranks: Ranks, width: int, at: int) -> tuple[str, str, list[float]]:
    def build() -> tuple[Any, ...]:
        model, optimizer = network()
        scaler = gradscaler()
        return model, optimizer, Pipelined(model, optimizer, width=width, scaler=scaler, ranks=ranks), scaler

    def run(parts: tuple[Any, ...], first: int, last: int) -> None:
        model, _, pipeline, scaler = parts
        for iteration in range(first, last):
            blown = ranks.rank == 1 and iteration in (3, 4)
            scaler.scale(loss_of(model, iteration, ranks.rank, blown)).backward()
            pipeline.step()

    one = build()
    run(one, 0, at)
    with one[2].true_weights():
        saved = copy.deepcopy([part.state_dict() for part in one[:3]])
    run(one, at, 10)
    other = build()
    for part, state in zip(other, saved, strict=False):
        part.load_state_dict(state)
    run(other, at, 10)
    for parts in (one, other):
        parts[2].flush()
        parts[2].close()
    return weights_sha256(one[0]), weights_sha256(other[0]), [one[3].get_scale(), other[3].get_scale()]


@pytest.mark.parametrize(("width", "at"), [(1, 5), (2, 4), (3, 5)])
def test_a_resumed_pipeline_has_its_scale_and_its_infinities_in_flight(width: int, at: int) -> None:
    for uninterrupted, resumed, scales in run_ranks(2, _resume, width, at):
        assert resumed == uninterrupted
        assert scales[0] == scales[1]


def _flush_between_micro_batches(ranks: Ranks, infinite: bool) -> tuple[float, float]:
    """Return weight and scale after gradients of 1 (or infinity) in flight, 2 before a flush, 3 after it, at rate 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    scaler = gradscaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pipeline = Pipelined(model, optimizer, scaler=scaler, ranks=ranks, updates=Updates(prediction="none"))

    def backward(gradient: float) -> None:
        scaler.scale(model(torch.full((1, 1), gradient)).sum()).backward()

    backward(math.inf if infinite else 1.0)
    pipeline.step()
    backward(2.0)
    pipeline.flush()
    backward(3.0)
    pipeline.step()
    pipeline.flush()
    pipeline.close()
    return model.weight.item(), scaler.get_scale()


def test_a_flush_between_micro_batches_keeps_their_gradients_at_one_scale() -> None:
    assert run_ranks(1, _flush_between_micro_batches, False) == [(-6.0, 1024.0)]
    assert run_ranks(1, _flush_between_micro_batches, True) == [(-5.0, 512.0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scaler_is_refused_unless_parameters_are_float32(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 1).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = rf"scaler must be left out unless parameters are float32 .* got a GradScaler and parameters in {dtype}"
    with pytest.raises(UserInputError, match=message):
        Pipelined(model, optimizer, scaler=gradscaler())
    with pytest.raises(UserInputError, match=message):
        Local(model, optimizer, scaler=gradscaler())
    Local(model, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False)).close()


@pytest.mark.parametrize("kind", ["pipelined", "local steps"])
def test_a_scaler_is_refused_while_another_pipeline_has_it(kind: str) -> None:
    """When one of two pipelines had changed the scale, the other one divided its gradients by the wrong one."""
    scaler = gradscaler()

    def start(**options: Any) -> Strategy:
        if kind == "pipelined":
            return Pipelined(*network(), scaler=scaler, **sections(**options))
        return LocalSteps(*network(), scaler=scaler, **sections(local_steps=2, **options))

    for _ in range(2):
        with pytest.raises(UserInputError) as failed:  # which keeps all that the constructor has made
            start(segment_bytes=0)
        assert "scaler" not in str(failed.value)
        with start():
            for _ in range(2):
                with pytest.raises(
                    UserInputError, match=r"^scaler must be a GradScaler that no other open pipeline has"
                ):
                    start()
            Pipelined(*network(), scaler=gradscaler()).close()
            Pipelined(*network(), scaler=torch.amp.GradScaler("cpu", enabled=False)).close()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_loop_computes_in_the_precision_that_was_asked_for(precision: str, dtype: torch.dtype) -> None:
    model, optimizer = network()
    outputs = []
    model.register_forward_hook(lambda *arguments: outputs.append(arguments[2]))
    samples = iter([(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    forward_backward(Local(model, optimizer), samples, parse(["--precision", precision]), scaler, 0)
    assert [output.dtype for output in outputs] == [dtype]
    assert all(parameter.grad.dtype == parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("strategy", ["--width 2", "--strategy ddp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_digits_are_learned_in_16_bits(tmp_path: Path, precision: str, strategy: str) -> None:
    """The first scale of fp16 is too large, so that some updates are skipped before the loss falls."""
    scale = "--loss-scale 1e7" if precision == "fp16" else ""
    words = f"--hidden-sizes 20 --batch-size 16 --iterations 40 --lr 0.05 --precision {precision} {scale} {strategy}"
    result = succeed(2, words, tmp_path)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert (result["skipped_updates"] > 0) == (precision == "fp16")
    assert result["skipped_updates"] < 20
    assert result["replicas_identical"]
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
