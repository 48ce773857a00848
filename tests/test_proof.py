"""Totals of every door, the lines of attach and compress on rank 0, and the time of DDP calculated from exchanges."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipesgd import LocalSteps, Pipelined, Windows
from pipesgd.ddp import attach, compress
from pipesgd.planning.ddp_time import LEAST_EXCHANGES, Uncompressed, ddp_seconds
from pipesgd.process import QUIET
from pipesgd.ranks import Ranks
from pipesgd.strategy import FOLDED, Span, StepReport, Tally

ITERATIONS = FOLDED + 3
"""Enough for a tally that adds its reports up before it is asked."""


def _report(number: int, *, period: float, communication: float, sent: int) -> StepReport:
    """Return the report of a step that computes for 80 % of ``period`` and waits for the rest."""
    end = (number + 1) * period
    spans = (Span("communication", number, end - communication, end), Span("wait", number, end - 0.2 * period, end))
    return StepReport(spans=spans, wire_bytes=sent, width=2)


def _tally(exchanges: int, *, slow: float = 1.0) -> Tally:
    """Return a tally of exchanges that take 0.1 s for 1 MB, or ``slow`` times as long in every other iteration."""
    tally = Tally(uncompressed_bytes=4_000_000)
    for number in range(exchanges + 1):
        communication = 0.1 * (slow if number % 2 else 1.0)
        tally.take(_report(number, period=0.5, communication=communication, sent=1_000_000))
    return tally


def test_totals_are_those_of_all_reports() -> None:
    totals = _tally(ITERATIONS - 1).totals()
    assert (totals.iterations, totals.late) == (ITERATIONS, ITERATIONS)
    assert totals.iteration_seconds == pytest.approx(0.5)
    assert totals.waiting_seconds == pytest.approx(0.1)
    assert totals.hidden_share == pytest.approx(0.0)
    assert (totals.uncompressed_bytes, totals.wire_bytes) == (4_000_000 * ITERATIONS, 1_000_000 * ITERATIONS)
    assert totals.as_metrics()["pipesgd/late"] == ITERATIONS


def test_totals_of_no_iteration_have_no_times() -> None:
    totals = Tally().totals()
    assert (totals.iterations, totals.iteration_seconds, totals.hidden_share) == (0, None, None)
    assert "pipesgd/hidden_share" not in totals.as_metrics()


def test_ddp_takes_its_bytes_at_the_rate_of_the_exchanges() -> None:
    """One bucket of 4 MB is ready when the backward pass begins, or ends; two ranks send as many bytes as it has."""
    known = Uncompressed(latency=0.0, byte_seconds=1.0)
    assert ddp_seconds(_tally(40), known, [4e6], 2) == pytest.approx((0.4 / 3 + 4 * 0.1, 0.4 + 4 * 0.1))


def test_uncompressed_sums_bound_the_rate_from_below_and_the_latency_is_not_multiplied() -> None:
    faster = ddp_seconds(_tally(40), Uncompressed(latency=0.0, byte_seconds=0.8e-7), [4e6], 2)
    assert not isinstance(faster, str)
    assert faster[0] == pytest.approx(0.4 / 3 + 4 * 0.08)
    late = ddp_seconds(_tally(40), Uncompressed(latency=0.05, byte_seconds=1.0), [4e6], 2)
    assert not isinstance(late, str)
    assert late[1] == pytest.approx(0.4 + 4 * 0.05, rel=0.2)


def test_nothing_is_said_of_ddp_after_few_exchanges_or_at_rates_that_differ() -> None:
    known = Uncompressed(latency=0.0, byte_seconds=1.0)
    few, differ = "there were fewer than 20 exchanges", "the rates of exchanges differ by more than 2 times"
    assert not isinstance(ddp_seconds(_tally(LEAST_EXCHANGES), known, [4e6], 2), str)
    assert ddp_seconds(_tally(LEAST_EXCHANGES - 1), known, [4e6], 2) == few
    assert not isinstance(ddp_seconds(_tally(LEAST_EXCHANGES, slow=1.9), known, [4e6], 2), str)
    assert ddp_seconds(_tally(LEAST_EXCHANGES, slow=2.1), known, [4e6], 2) == differ


def test_in_longer_runs_blocks_of_exchanges_are_compared_and_not_single_ones() -> None:
    """Every tenth exchange takes three times as long, which changes no block's median."""
    known = Uncompressed(latency=0.0, byte_seconds=1.0)
    tally = Tally(uncompressed_bytes=4_000_000)
    for number in range(10 * LEAST_EXCHANGES + 1):
        communication = 0.3 if number % 10 == 0 else 0.1
        tally.take(_report(number, period=0.5, communication=communication, sent=1_000_000))
    assert ddp_seconds(tally, known, [4e6], 2) == pytest.approx((0.4 / 3 + 4 * 0.1, 0.4 + 4 * 0.1))


def _train(ranks: Ranks, door: str, **options: Any) -> tuple[Any, list[StepReport], str]:
    """Train by ``door``; return the totals, the reports of all steps, and what was printed."""
    torch.manual_seed(0)
    model: Any = nn.Linear(20, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    called = model
    with contextlib.redirect_stderr(io.StringIO()) as said:
        if door in ("attach", "compress", "attached windows"):
            called = DistributedDataParallel(model)
        windows = Windows(local_steps=2)
        pipeline: Any = {
            "Pipelined": lambda: Pipelined(model, optimizer, ranks=ranks, **options),
            "LocalSteps": lambda: LocalSteps(model, optimizer, windows, ranks=ranks, **options),
            "attach": lambda: attach(called, optimizer, **options),
            "attached windows": lambda: attach(called, optimizer, windows=windows, **options),
            "compress": lambda: compress(called, **options),
        }[door]()
        reports = []
        for _ in range(ITERATIONS):
            called(torch.ones(4, 20)).square().sum().backward()
            if door in ("Pipelined", "LocalSteps"):
                reports.append(pipeline.step())
            else:
                optimizer.step()
                optimizer.zero_grad()
                reports.append(pipeline.report)
        totals = pipeline.totals()
        pipeline.close()
        pipeline.close()
    return totals, reports, said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("door", ["Pipelined", "LocalSteps", "attach", "attached windows", "compress"])
def test_every_door_has_totals(door: str) -> None:
    for totals, reports, _ in run_ranks(2, _train, door):
        assert totals.iterations == ITERATIONS
        assert totals.late == sum(report.width > 1 for report in reports)
        assert totals.wire_bytes == sum(report.wire_bytes for report in reports)
        waiting = sum(report.seconds("wait") for report in reports)
        assert totals.waiting_seconds == pytest.approx(waiting / ITERATIONS)
        assert 0 <= totals.hidden_share <= 1
        exchanges = ITERATIONS // 2 if "indows" in door or door == "LocalSteps" else ITERATIONS
        assert totals.uncompressed_bytes == ITERATIONS * 30 * 21 * 4
        assert sum(report.wire_bytes > 0 for report in reports) == exchanges


BEGIN = {
    "attach": "width 2, synchronous while the learning rate rises, int8 in blocks of 1024, 2 ranks, 2.52 kB an "
    "exchange -> 632 B",
    "attached windows": "width 2, 2 local steps an exchange, int8 in blocks of 1024, 2 ranks, 2.52 kB an exchange",
    "compress": "compress, int8 in blocks of 1024, 2 ranks, 2.52 kB an exchange -> 632 B",
}


@pytest.mark.slow
@pytest.mark.parametrize("door", BEGIN)
def test_rank_0_says_what_is_sent_and_what_was_hidden_once(door: str) -> None:
    (_, _, said), (_, _, by_the_other) = run_ranks(2, _train, door)
    assert by_the_other == ""
    begin, end, *accuracy = said.splitlines()
    assert begin.startswith(f"pipesgd: {BEGIN[door]}")
    hidden = "" if door == "compress" else r"\d+ % of the communication hidden; "
    assert re.match(rf"pipesgd: {hidden}an iteration \S+ \S+, of which \S+ \S+ waiting", end)
    assert (f"; {ITERATIONS} of {ITERATIONS} gradients were late" in end) == (door == "attach")
    of_ddp = r"; (DDP would take about .* calculated|what DDP would take is not calculated, as .*)$"
    assert bool(re.search(of_ddp, end)) == (door != "attached windows")
    late = (
        "pipesgd: accuracy: no training like this one was measured with width 2, int8 in blocks of 1024: compare it "
        "with one at width 1 without a codec"
    )
    assert accuracy == ([late] if door == "attach" else [])


def _quiet(ranks: Ranks) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(QUIET, "1")
        return _train(ranks, "attach")[2]


@pytest.mark.slow
def test_the_lines_can_be_silenced() -> None:
    assert run_ranks(2, _quiet) == ["", ""]
