"""Traces: the parts that an iteration is divided into."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.traces import Traced, breakdown, read_trace
from tests.experiments._traces import trace_of


def test_an_iteration_is_cut_into_parts_that_sum_to_it() -> None:
    parts = breakdown(trace_of(5, wait=1.5), range(1, 4))
    expected = {"forward": 1.0, "backward": 2.0, "update": 1.0, "waiting": 1.5, "other": 0.25}
    assert {name: parts[name] for name in expected} == pytest.approx(expected)
    assert parts["iteration"] == pytest.approx(sum(expected.values()))
    assert parts["communication"] == pytest.approx(1.5)


def test_a_wait_within_a_backward_pass_is_no_part_of_it() -> None:
    """DDP has such waits: it waits for its last buckets in the backward pass."""
    spans = [one for one in trace_of(5, wait=0.0) if one.what != "wait"]
    backward = [one for one in spans if one.what == "backward"]
    waits = [dataclasses.replace(one, what="wait", start=one.start + 0.5, seconds=1.5) for one in backward]
    parts = breakdown([*spans, *waits], range(1, 4))
    expected = {"forward": 1.0, "backward": 0.5, "update": 1.0, "waiting": 1.5, "other": 0.25}
    assert {name: parts[name] for name in expected} == pytest.approx(expected)


def test_a_wait_counts_for_the_iteration_that_waits() -> None:
    spans = [one for one in trace_of(5, wait=1.5) if one.what != "wait"]
    late = [Traced(rank=r, what="wait", iteration=1, start=0.1 * r + 3.5 + 2 * 5.75, seconds=1.5) for r in range(2)]
    assert breakdown([*spans, *late], range(2, 3))["waiting"] == pytest.approx(1.5)
    assert breakdown([*spans, *late], range(1, 2))["waiting"] == 0.0


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        {"ph": "X", "name": "pack", "pid": 1, "tid": 0, "ts": 2e6, "dur": 5e5, "args": {"iteration": 3}},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert read_trace(tmp_path / "trace.json") == [Traced(rank=1, what="pack", iteration=3, start=2.0, seconds=0.5)]
