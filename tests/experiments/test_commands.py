"""Options of the experiments: errors take one line, and partial runs cannot overwrite full results."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _ranks import run_module
from rich.console import Console

from experiments import accuracy, command, forked_ranks, kill_anywhere
from experiments.faults import __main__ as faults
from experiments.faults import stage
from experiments.results import RESULTS, sources
from pipesgd.cli import HelpRequested
from pipesgd.errors import UserInputError

Parse = Callable[[Sequence[str]], Namespace]
PARSES: list[Parse] = [
    lambda words: kill_anywhere.parse(words, by_torchrun=False),
    lambda words: accuracy.parse(words, by_torchrun=False),
]


@pytest.mark.parametrize("parse", PARSES)
def test_a_quick_run_never_overwrites_full_results(parse: Parse, tmp_path: Path) -> None:
    for words in (["--quick"], ["--quick", "--output", str(RESULTS)]):
        with pytest.raises(UserInputError, match="--output must name another folder"):
            parse(words)
    assert parse(["--quick", "--output", str(tmp_path / "new")]).output.is_dir()
    assert parse([]).output == RESULTS


def test_a_part_of_an_experiment_never_overwrites_full_results(tmp_path: Path) -> None:
    words = ["--only", "S1"]
    for output in ([], ["--output", str(RESULTS)]):
        with pytest.raises(UserInputError, match=r"--output must name another folder .* with --only"):
            faults.parse([*words, *output], False)
    assert faults.parse([*words, "--output", str(tmp_path)], False).only


def test_kept_results_are_void_when_a_file_of_their_harness_changes(tmp_path: Path) -> None:
    file, folder = tmp_path / "experiment.py", tmp_path / "experiment"
    folder.mkdir()
    hashes = []
    for content in ("1", "2"):
        for path in (file, folder / "part.py"):
            path.write_text(content, encoding="utf-8")
            hashes.append(sources(file, folder))
    assert len(set(hashes)) == 4
    assert sources(file, folder) == hashes[-1] != sources()


@pytest.mark.parametrize(
    ("experiment", "parts"),
    [
        (faults, [stage]),
        (kill_anywhere, [forked_ranks]),
    ],
)
def test_the_harness_of_an_experiment_is_itself_and_what_runs_and_judges_the_code(
    experiment: Any, parts: list[ModuleType]
) -> None:
    for module in (experiment, *parts):
        path = Path(str(module.__file__))
        assert any(path == own or own in path.parents for own in experiment.HARNESS)


@pytest.mark.parametrize("parse", PARSES)
def test_help_and_errors_are_for_the_ranks_to_agree_on(parse: Parse, tmp_path: Path) -> None:
    with pytest.raises(HelpRequested, match="--quick"):
        parse(["--help"])
    (tmp_path / "file").touch()
    for words in (["--quik"], ["--output", str(tmp_path / "file")], ["--output"]):
        with pytest.raises(UserInputError) as error:
            parse(words)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("words", [["--kills", "0"], ["--kills", "two"], ["--kills", "-1"], ["--seed", "1.5"]])
def test_numbers_are_checked(words: list[str]) -> None:
    with pytest.raises(UserInputError, match=rf"{words[0]}: must be a whole number of at least .; got '{words[1]}'"):
        kill_anywhere.parse(words, by_torchrun=False)


def test_an_experiment_that_starts_its_own_ranks_is_refused_under_torchrun() -> None:
    with pytest.raises(UserInputError, match="without torchrun"):
        kill_anywhere.parse([], by_torchrun=True)


@pytest.mark.slow
def test_a_wrong_option_ends_the_command_with_one_line_and_code_2() -> None:
    done = run_module("experiments.kill_anywhere", "--kills", "none")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: --kills: must be a whole number of at least 1; got 'none'\n"


def test_progress_in_a_log_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 5.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with command.progress(Console(), "ring", 4.0) as advance:
        for _ in range(3):
            advance(1.0, "1 MiB")
    assert capsys.readouterr().out == "ring: 1 MiB, 50% done, 0:00:20 left\n"


def test_progress_does_not_go_back_where_more_work_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once divided by the work done less the work found, and said that a day less than nothing was left."""
    clock = iter([0.0, 20.0, 60.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with command.progress(Console(), "runs", 4.0) as advance:
        advance(1.0, "a", left=5.0)
        advance(2.0, "b", left=3.0)
    assert capsys.readouterr().out == "runs: a, 17% done, 0:01:40 left\nruns: b, 50% done, 0:01:00 left\n"


def test_a_table_in_a_file_is_as_wide_as_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    row = "r" * command.LOG_WIDTH
    command.show("Long names", [{"row": row, "figure": "0.123456789"}])
    said = capsys.readouterr().out
    assert row in said
    assert "0.123456789" in said
