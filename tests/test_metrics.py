"""Metrics, summary statistics and the trace, on data whose answer is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipesgd.launch import join
from pipesgd.metrics import IterationMetrics, MetricsWriter, hidden_share, read_metrics, statistics, step_seconds
from pipesgd.strategies.base import Span, StepReport
from pipesgd.trace import Trace, chrome_events


def metrics(iteration: int, loss: float = 1.5, test_loss: float | None = None) -> IterationMetrics:
    return IterationMetrics(
        iteration=iteration,
        epoch=0,
        loss=loss,
        lr=0.1,
        samples_per_second=10.0,
        seconds={"iteration": 3.0, "compute": 1.5, "communication": 4.0, "exposed": 1.0, "update": 0.5},
        wire_bytes=100,
        skipped=0,
        test_loss=test_loss,
    )


def test_the_parts_of_an_iteration_sum_to_it() -> None:
    spans = (
        Span("pack", 4, 9.0, 9.25),
        Span("communication", 3, 5.0, 9.0),
        Span("wait", 3, 10.0, 11.0),
        Span("update", 3, 11.0, 11.5),
    )
    report = StepReport(applied=(3,), skipped=(), spans=spans, wire_bytes=0)
    seconds = step_seconds(report, 3.0)
    assert seconds == metrics(0).seconds
    assert seconds["compute"] + seconds["exposed"] + seconds["update"] == seconds["iteration"]


def test_lines_events_and_what_an_interrupted_run_left(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, start=0) as writer:
        for iteration in range(4):
            loss, test_loss = (math.nan, math.inf) if iteration == 1 else (iteration, 4.0)
            writer.record(metrics(iteration, loss=loss, test_loss=test_loss))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "lo')  # cut short by a crash
    with MetricsWriter(tmp_path, start=2) as writer:
        writer.record(metrics(2, loss=20.0, test_loss=3.0))
        writer.flush()
        assert [line["iteration"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["loss"] for line in lines] == [0.0, None, 20.0]
    assert [line["test_loss"] for line in lines] == [4.0, None, 3.0]
    assert lines[2]["seconds"]["exposed"] == 1.0
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")][-1] == (2, 20.0)
    assert [(event.step, event.value) for event in events.Scalars("test/loss")][-1] == (2, 3.0)
    assert "seconds/exposed" in events.Tags()["scalars"]


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_statistics_are_numpys(values: list[float]) -> None:
    assert statistics(values) == {
        "median": np.median(values),
        "mean": np.mean(values),
        "p95": np.percentile(values, 95),
    }


def test_nothing_measured_is_not_zero() -> None:
    assert statistics([]) == {"median": None, "mean": None, "p95": None}
    assert hidden_share(0.0, 0.0) is None


@pytest.mark.parametrize(("exposed", "share"), [(0.0, 1.0), (1.0, 0.75), (4.0, 0.0), (5.0, 0.0)])
def test_hidden_is_what_was_not_waited_for(exposed: float, share: float) -> None:
    assert hidden_share(4.0, exposed) == share


def test_a_trace_has_one_process_row_per_rank_and_communication_over_computation(tmp_path: Path) -> None:
    rows = [("forward", 1, -1.0, 0.5), ("communication", 0, -0.75, 0.5)]
    events = chrome_events([rows, rows])  # type: ignore[list-item]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"], e["args"]["iteration"]) for e in complete] == [
        (pid, *row) for pid in (0, 1) for row in ((0, "forward", 0.0, 5e5, 1), (1, "communication", 2.5e5, 5e5, 0))
    ]
    names = {(e["name"], e["pid"], e.get("tid"), e["args"].get("name")) for e in events if e["ph"] == "M"}
    assert ("process_name", 1, None, "rank 1") in names
    assert ("thread_name", 0, 1, "communication") in names

    trace = Trace(join())
    trace.add([Span("forward", 1, 1.0, 1.5), Span("communication", 0, 1.25, 1.75)])
    trace.write(tmp_path / "trace.json")
    written: dict[str, Any] = json.loads((tmp_path / "trace.json").read_text())
    assert [e["ts"] for e in written["traceEvents"] if e["ph"] == "X"] == pytest.approx([0.0, 2.5e5])
