"""Metrics, summary statistics and the trace, on data whose answer is known."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipesgd.ranks import join
from pipesgd.run.event_file import EventFile
from pipesgd.run.files import Appender
from pipesgd.run.metrics import IterationMetrics, MetricsWriter, read_metrics, statistics, step_seconds
from pipesgd.run.trace import Trace, chrome_events
from pipesgd.strategy import Span, StepReport, hidden_share

SECONDS = {
    "iteration": 3.0,
    "loading": 0.25,
    "compute": 1.25,
    "communication": 4.0,
    "exposed": 1.0,
    "update": 0.5,
}


def metrics(iteration: int, loss: float = 1.5, test_loss: float | None = None) -> IterationMetrics:
    return IterationMetrics(
        iteration=iteration,
        epoch=0,
        loss=loss,
        lr=0.1,
        samples_per_second=10.0,
        seconds=SECONDS,
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
    seconds = step_seconds(report, 3.0, 0.25)
    assert seconds == SECONDS
    assert sum(seconds[name] for name in ("loading", "compute", "exposed", "update")) == seconds["iteration"]


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


def test_events_of_a_resumed_run_void_earlier_ones_although_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for start, losses, clock in ((0, (0.0, 1.0, 2.0, 3.0), now), (2, (20.0,), now - 3600)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        with MetricsWriter(tmp_path, start=start) as writer:
            for iteration, loss in enumerate(losses, start):
                writer.record(metrics(iteration, loss=loss))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 0.0), (1, 1.0), (2, 20.0)]


GOOD = json.dumps(asdict(metrics(7)))


def test_lines_of_the_previous_version_stay_where_its_run_is_resumed(tmp_path: Path) -> None:
    old = {name: seconds for name, seconds in SECONDS.items() if name != "loading"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(asdict(metrics(0)) | {"seconds": old}) + "\n")
    with MetricsWriter(tmp_path, start=1) as writer:
        writer.record(metrics(1))
    assert [line["seconds"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [old, SECONDS]
    assert writer.history.known("loading").tolist() == [0.25]
    assert writer.history.known("compute").tolist() == [1.25, 1.25]


@pytest.mark.slow
def test_a_summary_has_the_numbers_of_all_iterations_whatever_the_disk_does(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(asdict(metrics(iteration)) | {"wire_bytes": iteration}) + "\n" for iteration in range(20)]
    (small_disk / "metrics.jsonl").write_text("".join([*lines[:12], *lines[10:]]))  # some are there twice
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with MetricsWriter(small_disk, start=15) as writer:
        writer.record(metrics(15))
    assert "lines of repeated iterations appear twice" in capsys.readouterr().err
    assert writer.history.known("wire_bytes").tolist() == [*range(15), 100]
    assert writer.history.known("iteration", start=14).tolist() == [3.0, 3.0]


def test_a_long_run_is_resumed_and_summarized_line_by_line(tmp_path: Path) -> None:
    number = 4000
    lines = [json.dumps(asdict(metrics(iteration))) + "\n" for iteration in range(number)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    EventFile(tmp_path, start=0).close()  # TensorBoard is imported by now
    tracemalloc.start()
    with MetricsWriter(tmp_path, start=number - 1) as writer:
        _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(writer.history.known("iteration")) == number - 1
    assert most < 200 * number
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:-1])


@pytest.mark.parametrize(
    "damaged",
    [
        "\0" * 50,
        GOOD[:40],
        GOOD[: GOOD.index("}") + 1],  # cut right after the inner brace: it ends like a whole line
        "[" * 100_000,
        "null",
        "{}",
        '"a string"',
        GOOD.replace('"skipped": 0', '"skipped": 1e400'),
        GOOD.replace('"iteration": 7', '"iteration": "7"'),
        GOOD.replace('"wire_bytes"', '"wire_bytgs"'),
        GOOD.replace('"exposed": 1.0', '"exposed": NaN'),
    ],
)
def test_a_damaged_line_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str) -> None:
    path = tmp_path / "metrics.jsonl"
    good = [json.dumps(asdict(metrics(iteration))) for iteration in range(3)]
    path.write_text("\n".join([good[0], damaged, good[1], good[2]]) + "\n")
    assert [line["iteration"] for line in read_metrics(path)] == [0, 1, 2]
    assert capsys.readouterr().err == f"warning: 1 damaged line of {path} left out\n"
    with MetricsWriter(tmp_path, start=2) as writer:
        writer.record(metrics(2))
    capsys.readouterr()
    assert [line["iteration"] for line in read_metrics(path)] == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_metrics_that_cannot_be_read_in_full_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged, unreadable = f"{GOOD}\n{GOOD[:40]}\n", f"{GOOD}\n"
    path.write_text(damaged)
    with MetricsWriter(tmp_path, start=9):
        pass
    assert (tmp_path / "metrics.jsonl.aside-1").read_text() == damaged
    assert path.read_text() == unreadable

    real = Path.open

    def fail(self: Path, mode: str = "r", **options: Any) -> Any:
        if self == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, mode, **options)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", fail)
        with MetricsWriter(tmp_path, start=9) as writer:
            writer.record(metrics(9))
    assert (tmp_path / "metrics.jsonl.aside-2").read_text() == unreadable
    assert [line["iteration"] for line in read_metrics(path)] == [9]
    warned = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in warned if " is kept as " in line] == [
        "metrics.jsonl.aside-1",
        "metrics.jsonl.aside-2",
    ]


@pytest.mark.slow
def test_metrics_that_cannot_be_written_are_written_when_there_is_room(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricsWriter(small_disk, start=0) as writer:
        writer.record(metrics(0))
        writer.flush()
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for iteration in range(1, 130):
            writer.record(metrics(iteration))
        writer.flush()
        warned = sorted(capsys.readouterr().err.splitlines())
        ballast.unlink()
    rest = "training continues, and the rest is written as soon as possible"
    assert len(warned) == 2
    assert warned[0] == f"warning: {small_disk}/metrics.jsonl: {os.strerror(errno.ENOSPC)}; {rest}"
    assert warned[1].startswith(f"warning: {small_disk}/tensorboard/events.out.tfevents.")
    assert [line["iteration"] for line in read_metrics(small_disk / "metrics.jsonl")] == list(range(130))
    events = EventAccumulator(str(small_disk / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(130))


@pytest.mark.slow
def test_metrics_that_stay_unwritten_are_said_to_be_lost(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is resumed on a full disk, and ends on it."""
    (small_disk / "metrics.jsonl").write_text(json.dumps(asdict(metrics(0))) + "\n")
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with MetricsWriter(small_disk, start=1) as writer:
        for iteration in range(1, 100):
            writer.record(metrics(iteration))
    warned = capsys.readouterr().err
    assert f"{small_disk}/metrics.jsonl lacks its last " in warned
    assert read_metrics(small_disk / "metrics.jsonl")[0]["iteration"] == 0


def test_a_file_that_is_removed_under_a_run_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines"
    file = Appender(path)
    file.write(b"old\n")
    file.flush()
    path.unlink()
    file.write(b"new\n")
    file.flush()
    file.write(b"newer\n")
    file.close()
    assert path.read_bytes() == b"new\nnewer\n"
    assert capsys.readouterr().err == f"warning: {path} was removed; it is created again, without its former content\n"


def test_a_file_that_a_server_no_longer_knows_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines"
    file = Appender(path)
    file.write(b"old\n")
    file.flush()
    stale = file._descriptor
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if descriptor == stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    file.write(b"new\n")
    file.flush()
    other = os.open(os.devnull, os.O_RDONLY)  # takes the stale descriptor's number
    file.flush()
    os.close(other)
    file.close()
    assert path.read_bytes() == b"old\nnew\n"
    assert capsys.readouterr().err.count("Stale file handle; training continues") == 1


def test_a_link_in_place_of_the_metrics_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("two years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(victim)
    with MetricsWriter(tmp_path / "run", start=0) as writer:
        writer.record(metrics(0))
    assert victim.read_text() == "two years of work"


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


def test_every_loader_has_a_row_of_its_own_in_the_trace() -> None:
    rows = [[(f"loader {worker}", 3, 1.0, 0.5) for worker in (1, 0)], [("data", 3, 1.0, 0.5)]]
    events = chrome_events(rows)
    assert [(e["pid"], e["tid"], e["cat"]) for e in events if e["ph"] == "X"] == [
        (0, 3, "loader 1"),
        (0, 2, "loader 0"),
        (1, 0, "computation"),
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (0, 0): "computation",
        (0, 1): "communication",
        (0, 2): "loader 0",
        (0, 3): "loader 1",
        (1, 0): "computation",
        (1, 1): "communication",
    }


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
