"""A report: the norm of the gradient that a step applied, and the share of communication that was hidden."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _sections import sections
from _small_problem import regress, small_problem

from pipesgd import Pipelined, StepReport
from pipesgd.ranks import Ranks
from pipesgd.sections import Updates
from pipesgd.strategy import Comparison, Span

ITERATIONS = 5


def _norms(ranks: Ranks, options: dict[str, Any]) -> tuple[list[float | None], list[float], list[float | None]]:
    """Return the norms that steps report and a flush, those of the updates themselves, and the hidden shares."""
    model, batches = small_problem(0, [4, 30, 2], ITERATIONS, ranks.world_size)
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0), ranks=ranks, **sections(**options)) as pipeline:

        def true() -> torch.Tensor:
            with pipeline.true_weights():
                return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()

        reports, weights = [], [true()]
        for of_ranks in batches:
            regress(model, of_ranks[ranks.rank]).backward()
            reports.append(pipeline.step())
            weights.append(true())
        reports.append(pipeline.flush())
        weights.append(true())
    updates = [float(torch.linalg.vector_norm(b - a)) for a, b in itertools.pairwise(weights)]
    return [report.gradient_norm for report in reports], updates, [report.hidden_share for report in reports]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"width": 1},
        {"width": 2, "codec": "int8", "segment_bytes": 64},  # parts arrive in another order on every rank
        {"width": 2, "guard": True},
        {"width": 2, "codec": "topk"},
    ],
)
def test_the_norm_is_that_of_the_update_on_every_rank(options: dict[str, Any]) -> None:
    """A step of SGD at a learning rate of 1 changes the weights by the averaged gradient."""
    of_ranks = run_ranks(3, _norms, options)
    reported, updates, shares = of_ranks[0]
    assert all(norms == reported for norms, _, _ in of_ranks)
    assert reported == [None if norm == 0 else pytest.approx(norm, rel=1e-6) for norm in updates]
    late = options["width"] - 1
    assert [norm is None for norm in reported] == [True] * late + [False] * (ITERATIONS - late) + [not late]
    assert [share is None for share in shares] == [norm is None for norm in reported]
    assert all(0 <= share <= 1 for _, _, shares in of_ranks for share in shares if share is not None)


def _clipped(ranks: Ranks) -> tuple[float | None, float | None]:
    model, [batch, *_] = small_problem(0, [4, 30, 2], 1, ranks.world_size)
    found = []
    for options in ({}, {"clip_norm": 1e-3, "clip_value": 1e-6}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Pipelined(model, optimizer, width=1, ranks=ranks, **sections(**options)) as pipeline:
            regress(model, batch[ranks.rank]).backward()
            found.append(pipeline.step().gradient_norm)
    one, other = found
    return one, other


@pytest.mark.slow
def test_the_norm_is_that_before_clipping() -> None:
    one, other = run_ranks(2, _clipped)[0]
    assert one is not None
    assert one > 0.01
    assert one == other


def test_a_gradient_that_is_left_out_has_no_norm() -> None:
    model = torch.nn.Linear(2, 1)
    with Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=0.1), width=1, updates=Updates(on_nonfinite="skip")
    ) as pipeline:
        (model(torch.ones(1, 2)).sum() * torch.nan).backward()
        report = pipeline.step()
    assert (report.skipped, report.gradient_norm) == ((0,), None)


def test_hidden_is_the_communication_that_was_not_waited_for() -> None:
    spans = Span("communication", 0, 1.0, 5.0), Span("wait", 0, 4.0, 5.0), Span("update", 0, 5.0, 9.0)
    assert StepReport(spans=spans).hidden_share == 0.75
    assert StepReport().hidden_share is None


def test_one_report_of_two_steps_is_about_the_gradient_that_was_applied_last_and_the_newest_that_arrived() -> None:
    spans = Span("wait", 0, 4.0, 5.0), Span("wait", 1, 6.0, 9.0)
    quality, better = Comparison(0.5, 1.0), Comparison(1.0, 0.0)
    first = StepReport(applied=(0,), spans=spans[:1], wire_bytes=10, gradient_norm=2.0, comparison=quality)
    then = StepReport(
        applied=(1,), spans=spans[1:], wire_bytes=20, gradient_norm=3.0, comparison=better, fell_back=True
    )
    assert first.followed_by(then) == StepReport(
        applied=(0, 1), spans=spans, wire_bytes=30, gradient_norm=3.0, comparison=better, fell_back=True
    )
    left_out = StepReport(skipped=(1,), nonfinite_ranks=(3,))
    assert first.followed_by(left_out) == dataclasses.replace(
        first, skipped=(1,), nonfinite_ranks=(3,), comparison=None
    )
    nothing_arrived = StepReport(wire_bytes=20)
    assert first.followed_by(nothing_arrived) == dataclasses.replace(first, wire_bytes=30)
