"""Gradients that are left out since they are not finite, with codecs that keep for later what they have not sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _sections import sections
from torch import Tensor, nn

from pipesgd import LocalSteps, Pipelined
from pipesgd.codecs.options import BUCKET_CODECS, CodecOptions, codec_named
from pipesgd.ranks import Ranks
from pipesgd.reducers.base import Undo
from pipesgd.sections import Updates, Windows
from pipesgd.strategy import Strategy

pytestmark = pytest.mark.slow

CODECS = {
    "topk": codec_named("topk", density=0.01),
    "topk, momentum": codec_named("topk", density=0.01, momentum_correction=0.9),
    "powersgd": codec_named("powersgd", low_rank=2),
    "powersgd, encoded": codec_named("powersgd", low_rank=2, factors="int8"),
    "int4": codec_named("int4"),
    "sign": codec_named("sign"),
    "ternary": codec_named("ternary", rounding="nearest", error_feedback=True),
}
ITERATIONS, BAD = 8, 3
"""Number of good gradients, and of those before the bad one."""

Outcome = tuple[list[list[Tensor]], int]
"""True weights after each step that has applied a gradient, and the number of those that were left out."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 40, dtype=torch.float64))


def _gradients(ranks: Ranks, model: nn.Module, bad_at: int | None, bad_value: float) -> Iterator[list[Tensor]]:
    """Yield small gradients and, before number ``bad_at``, one of large values; rank 1 has ``bad_value`` in it."""
    generator = torch.Generator().manual_seed(ranks.rank)
    for iteration in range(ITERATIONS):
        if iteration == bad_at:
            bad = [torch.full_like(parameter, 1e3 * (1 + ranks.rank)) for parameter in model.parameters()]
            if ranks.rank == 1:
                bad[0][0, 0] = bad_value
            yield bad
        yield [torch.randn(one.shape, generator=generator).to(one.dtype) * 1e-3 for one in model.parameters()]


def _train(strategy: Strategy, gradients: Iterator[list[Tensor]], scaler: torch.amp.GradScaler) -> Outcome:
    parameters = list(strategy.module.parameters())  # type: ignore[attr-defined]
    weights: list[list[Tensor]] = []
    left_out = 0
    with strategy:
        for of_iteration in gradients:
            loss = sum((one.double() * gradient).sum() for one, gradient in zip(parameters, of_iteration, strict=True))
            scaler.scale(loss).backward()  # type: ignore[arg-type]
            report = strategy.step()
            left_out += len(report.skipped)
            if report.applied:
                with strategy.true_weights():  # type: ignore[attr-defined]
                    weights.append([parameter.detach().clone() for parameter in parameters])
    return weights, left_out


def _pipelined(ranks: Ranks, cases: list[tuple[CodecOptions, dict[str, Any]]]) -> list[list[Outcome]]:
    """Train without and with the bad gradient, in all ``cases``."""
    return [[_pipelined_one(ranks, bad_at, codec, **others) for bad_at in (None, BAD, 0)] for codec, others in cases]


def _pipelined_one(
    ranks: Ranks, bad_at: int | None, codec: CodecOptions, *, scaled: bool = False, **options: Any
) -> Outcome:
    model = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=scaled)
    options |= {"scaler": scaler} if scaled else {"on_nonfinite": "skip"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Pipelined(model, optimizer, codec=codec, ranks=ranks, **sections(prediction="none", **options))
    return _train(strategy, _gradients(ranks, model, bad_at, float("nan")), scaler)


@pytest.mark.parametrize("options", [{"width": 1}, {"width": 2}, {"width": 2, "scaled": True}, {"buckets": 3}], ids=str)
def test_nothing_of_a_gradient_that_is_left_out_is_applied_later(options: dict[str, Any]) -> None:
    """All updates are bit for bit those of the run without that gradient, also if it is the first one."""
    codecs = {name: one for name, one in CODECS.items() if "buckets" not in options or one.codec in BUCKET_CODECS}
    for of_cases in run_ranks(2, _pipelined, [(codec, options) for codec in codecs.values()]):
        for name, outcomes in zip(codecs, of_cases, strict=True):
            _check(name, *outcomes)


def _check(name: str, without: Outcome, *with_bad: Outcome) -> None:
    expected, none = without
    assert none == 0
    for weights, left_out in with_bad:
        assert left_out == 1
        assert len(weights) == len(expected)
        for ours, theirs in zip(weights, expected, strict=True):
            assert all(map(torch.equal, ours, theirs)), name


def _local_steps(ranks: Ranks) -> list[list[Outcome]]:
    """Train without and with a window in which rank 1's weights overflow, with every codec."""
    return [[_local_steps_one(ranks, bad_at, codec) for bad_at in (None, BAD, 0)] for codec in CODECS.values()]


def _local_steps_one(ranks: Ranks, bad_at: int | None, codec: CodecOptions) -> Outcome:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    strategy = LocalSteps(
        model,
        optimizer,
        Windows(local_steps=1, outer="average"),
        width=1,
        codec=codec,
        ranks=ranks,
        updates=Updates(on_nonfinite="skip"),
    )
    no_scaler = torch.amp.GradScaler("cpu", enabled=False)
    return _train(strategy, _gradients(ranks, model, bad_at, 3e38), no_scaler)


def test_nothing_of_a_window_that_is_left_out_is_applied_later() -> None:
    """All updates are bit for bit those of the run without that window, also if it is the first one."""
    for of_cases in run_ranks(2, _local_steps):
        for name, outcomes in zip(CODECS, of_cases, strict=True):
            _check(name, *outcomes)


def test_only_what_the_last_sums_changed_is_put_back() -> None:
    """With fragments, each step sums another bucket, and what others have left out stays."""
    undo, one, other = Undo(), torch.tensor([1.0]), torch.tensor([2.0])
    for number, tensor, put_back in ((0, one, False), (1, other, True)):
        undo.keep(number, [tensor])
        tensor.fill_(5.0)
        undo.end(put_back=put_back)
    assert (one.item(), other.item()) == (5.0, 2.0)


def test_no_copies_are_kept_of_what_is_never_put_back() -> None:
    """With "stop", what the codec keeps is held once."""
    for on_nonfinite, number in (("stop", None), ("skip", 1)):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Pipelined(model, optimizer, width=1, codec="int4", updates=Updates(on_nonfinite=on_nonfinite)) as pipeline:
            sum(one.sum() for one in model.parameters()).backward()  # type: ignore[union-attr]
            pipeline.step()
            undo = pipeline.pipeline.flight._undo
            assert (None if undo is None else len(undo._copies)) == number
