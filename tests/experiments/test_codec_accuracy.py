"""Accuracy of codecs: the runs and the rows; and a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from _kept_runs import check_refused
from _ranks import run_module
from _runs import train_on_forked_ranks
from rich.console import Console

from experiments import codec_accuracy
from experiments.codec_accuracy import CODECS, Run, parse, plan, summarize, verdict
from experiments.results import RESULTS, Row, load
from experiments.testbed_jobs import run_training
from pipesgd.cli import parse as parse_training
from pipesgd.ranks import alone

pytestmark = pytest.mark.slow

NUMEL = {"mlp": 1000}
ACCURACIES = {"fp32": (0.88, 0.89), "int8": (0.879, 0.887), "int4": (0.88, 0.885), "sign": (0.7, 0.8)}
WIRE_BYTES = {"fp32": 6000, "int8": 1506, "int4": 1506, "sign": 200}


def ran(accuracy: float, wire: int) -> Run:
    return Run(started="2026-11-21", commit="c0ffee", seconds=9.0, test_accuracy=accuracy, wire_bytes=wire)


def rows(codecs: Sequence[str] = tuple(ACCURACIES)) -> list[Row]:
    planned = plan(["mlp"], codecs, 2, quick=False)
    runs = {one.words: ran(ACCURACIES[one.codec][one.seed], WIRE_BYTES[one.codec]) for one in planned}
    return summarize(planned, runs, NUMEL)


def test_every_run_is_one_that_pipesgd_makes_and_no_two_are_alike() -> None:
    planned = plan(["mlp", "convnet", "digits"], list(CODECS), 3, quick=False)
    assert len({one.words for one in planned}) == len(planned) == 3 * 3 * len(CODECS)
    for one in planned[-len(CODECS) :]:
        got = parse_training(one.words.split())
        assert (got.optimization.seed, got.pipeline.width) == (one.seed, 1)
        assert got.compression.described.stochastic == (one.codec in ("int8 stochastic", "ternary", "qsgd"))
        assert got.compression == parse_training(CODECS[one.codec].split()).compression
    quick = plan(["mlp"], ["fp32"], 1, quick=True)
    assert "--iterations 30" in quick[0].words
    assert "--epochs" not in quick[0].words


def test_a_row_has_all_seeds_and_differences_of_the_same_seeds() -> None:
    by_codec = {row["codec"]: row for row in rows()}
    int8 = by_codec["int8"]
    assert (int8["accuracy_seed_0"], int8["accuracy_seed_1"]) == (0.879, 0.887)
    assert int8["accuracy_mean"] == int8["accuracy_median"] == pytest.approx(0.883)
    assert int8["difference_to_fp32_points"] == pytest.approx(-0.2)
    assert int8["difference_lowest_points"] == pytest.approx(-0.3)
    assert int8["bits_per_value"] == pytest.approx(1506 * 8 / 1500)  # 2 (p-1)/p = 1.5
    assert by_codec["fp32"]["wire_bytes_to_fp32"] == 1.0
    assert by_codec["sign"]["difference_to_fp32_points"] == pytest.approx(-13.5)
    [row] = rows(["sign"])
    assert {value for name, value in row.items() if name.startswith("difference")} == {None}


def test_int8_and_int4_may_lose_a_fifth_of_a_point() -> None:
    said = {row["codec"]: verdict(row) for row in rows()}
    assert said == {"fp32": "", "int8": "met", "int4": "MISSED", "sign": ""}
    assert verdict({"codec": "int4", "difference_to_fp32_points": -0.19}) == "met"
    assert verdict({"codec": "int4", "difference_to_fp32_points": None}) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--codecs", "int9"], r"--codecs must be one of .*; got 'int9'"),
        (["--codecs", "int8", "int8"], "--codecs must name each once; got 'int8' twice"),
        (["--models", "resnet"], "--models must be one of"),
        (["--seeds", "0"], "--seeds: must be a whole number of at least 1; got '0'"),
        (["--output", str(RESULTS)], "--output must name another folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: Sequence[str], message: str, tmp_path: Path) -> None:
    check_refused(parse, words, message, tmp_path)


def test_a_wrong_option_ends_the_command_with_code_2() -> None:
    done = run_module("experiments.codec_accuracy", "--seeds", "many")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --seeds: must be a whole number of at least 1; got 'many'\n"


def test_runs_are_made_kept_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codec_accuracy, "run_training", train_on_forked_ranks)
    words = ["--quick", "--models", "digits", "--codecs", "fp32", "--output", str(tmp_path)]
    codec_accuracy.main(words, alone(), Console())
    (row,) = load(tmp_path / "codec_accuracy.csv")
    assert row["accuracy_seed_0"] > 0.5
    assert row["bits_per_value"] == pytest.approx(32, rel=0.01)
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".json"}
    kept = (tmp_path / "codec_accuracy.runs.json").read_bytes()
    codec_accuracy.main(words, alone(), Console())
    assert "1 of 1 runs are there" in capsys.readouterr().out
    assert (tmp_path / "codec_accuracy.runs.json").read_bytes() == kept


def test_a_training_is_started_by_torchrun_and_says_why_it_failed() -> None:
    assert run_training(["--width", "0"], 1) == "width must be at least 1; got 0"
