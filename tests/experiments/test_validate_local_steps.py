"""Predictions of local steps compared with measurements: the options of each run, and the arithmetic."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

from experiments import validate_local_steps as module
from experiments import validation_runs
from experiments.validate_local_steps import (
    LEAST_ITERATIONS,
    PASSES,
    SETTINGS,
    WINDOWS,
    ask,
    configurations,
    measure,
    summarize,
    windows_of,
    words_of,
)
from experiments.validation_runs import Setting
from pipesgd.cli import parse as parse_training
from tests.timing_model._profiles import PROFILE


def test_training_takes_the_options_of_every_run() -> None:
    for setting, rate_limit in SETTINGS:
        for one in configurations():
            config = parse_training([*shlex.split(setting.words), *shlex.split(words_of(rate_limit, one))])
            options = config.options()
            assert (options["width"], options["codec"]) == (one["width"], one["codec"])
            assert options["local-steps"] == one["local_steps"]
            assert (options["rate-limit"] is None) == (rate_limit is None)
    assert words_of("50mbit", {"width": 2, "local_steps": 4}) == "--width 2 --local-steps 4 --rate-limit 50mbit"


def test_predictions_are_of_the_configuration_at_the_rate_limit() -> None:
    for one in configurations():
        free, limited = (ask(PROFILE, 4, limit, one) for limit in (None, "50mbit"))
        assert {name: getattr(free.job, name) for name in one} == one
        assert limited.job.cluster.link.beta.value == 8 / 50e6 > free.job.cluster.link.beta.value
        assert limited.collective.total > free.collective.total


def test_every_pass_has_some_windows_and_some_iterations() -> None:
    for one in configurations():
        windows = windows_of(one)
        assert windows >= WINDOWS
        assert windows * one["local_steps"] >= LEAST_ITERATIONS
    assert [windows_of({"local_steps": steps}) for steps in (1, 4, 8)] == [16, 4, 4]


def test_each_row_has_the_times_of_its_own_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second pass runs in reverse order; the median of the passes counts."""

    def run(testbed: object, words: str, folder: Path, *, deadline: float) -> None:
        plan_file, times_file = map(Path, words.split()[1:])
        passes = json.loads(plan_file.read_text("utf-8"))
        assert len(passes) == PASSES
        times = [
            [{"seconds": len(cell["words"]) + factor * cell["iterations"], "cpu_share": 0.25} for cell in of_pass]
            for factor, of_pass in zip((1, 2, 4), passes, strict=True)
        ]
        times_file.write_text(json.dumps(times), "utf-8")

    monkeypatch.setattr(Setting, "testbed", lambda setting: nullcontext())
    monkeypatch.setattr(module, "calibrate", lambda testbed, words, folder: PROFILE)
    monkeypatch.setattr(validation_runs, "run", run)
    setting, rate_limit = SETTINGS[-1]
    rows = measure(setting, rate_limit, tmp_path, quick=False)
    assert [{name: row[name] for name in one} for one, row in zip(configurations(), rows, strict=True)] == (
        configurations()
    )
    for one, row in zip(configurations(), rows, strict=True):
        length, iterations = len(f"{setting.words} {words_of(rate_limit, one)}"), one["local_steps"] * windows_of(one)
        assert row["measured_s"] == length + 2 * iterations
        assert row["passes_apart"] == pytest.approx((length + 4 * iterations) / (length + iterations) - 1)
        assert row["predicted_s"] == ask(PROFILE, setting.nodes, rate_limit, one).iteration.total
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert row["low_s"] < row["predicted_s"] < row["high_s"]
        assert row["setting"] == f"{setting.name}, limited to {rate_limit}"
    assert len(measure(setting, None, tmp_path, quick=True)) == 4


def test_the_summary_is_by_setting_and_of_local_steps() -> None:
    rows = [
        {"setting": setting, "local_steps": steps, "error": error}
        for setting, steps, error in (("a", 1, 0.05), ("a", 4, -0.01), ("b", 8, 0.03))
    ]
    summary = summarize(rows)
    assert set(summary) == {"a", "b", "local steps"}
    assert summary["a"] == {"mean_error": pytest.approx(0.03), "largest_error": 0.05}
    assert summary["local steps"] == {"mean_error": pytest.approx(0.02), "largest_error": 0.03}
    assert "local steps" not in summarize(rows[:1])
