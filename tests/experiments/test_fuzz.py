"""A slice of the fuzz program on every kind of input, and its definition of a failure."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import fuzz
from experiments.fuzzing import files
from experiments.fuzzing import words as fuzzed_words
from experiments.fuzzing.cases import Target, draw, judge
from experiments.fuzzing.mutations import damaged
from pipesgd.errors import UserInputError

SLICE = 30


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_wrong_input_is_accepted_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    outcomes = [fuzz.try_case(fuzz.TARGETS[name], 1, index, tmp_path) for index in range(SLICE)]
    assert [one for one in outcomes if one["outcome"] not in ("accepted", "refused")] == []


def _target(attempt: Any) -> Target:
    return Target("planted", 1, lambda chance, folder: chance.random(), attempt, (UserInputError,))


def _raise(error: Exception) -> Any:
    def attempt(case: Any, folder: Path) -> None:
        raise error

    return attempt


@pytest.mark.parametrize(
    ("attempt", "outcome", "why"),
    [
        (lambda case, folder: None, "accepted", ""),
        (lambda case, folder: "nan was accepted", "absurd", "nan was accepted"),
        (_raise(UserInputError("width must be at least 1; got 0")), "refused", "width must be at least 1; got 0"),
        (_raise(UserInputError("two\nlines")), "absurd", "an error must be one line; got 'two\\nlines'"),
        (_raise(UserInputError("")), "absurd", "an error must be one line; got ''"),
        (_raise(UserInputError("9" * 5000)), "absurd", "an error must have at most 2000 characters; got 5000"),
        (_raise(KeyError("x")), "traceback", "KeyError at test_fuzz.py:"),
        (_raise(RecursionError()), "traceback", "RecursionError at test_fuzz.py:"),
        (lambda case, folder: threading.Event().wait(), "hang", "no answer within 0.2 s"),
    ],
)
def test_what_a_failure_is(attempt: Any, outcome: str, why: str, tmp_path: Path) -> None:
    verdict = judge(_target(attempt), None, tmp_path, seconds=0.2)
    assert verdict.outcome == outcome
    assert verdict.why.startswith(why)


@pytest.mark.parametrize(
    ("target", "case", "why"),
    [
        ("accelerators", (False, "1us"), "accelerator's pass must take at least 3 times as long as the model's own"),
        ("quantities", ("price", "1.20"), "price must have a unit such as 1.20/h; got '1.20'"),
    ],
)
def test_what_must_be_refused_is(target: str, case: Any, why: str, tmp_path: Path) -> None:
    verdict = judge(fuzz.TARGETS[target], case, tmp_path)
    assert verdict.outcome == "refused"
    assert verdict.why.startswith(why)


def test_links_that_do_not_connect_fail_where_they_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "links.toml"
    path.write_text('[[link]]\nfrom = [0, 1, 2]\nlatency = "30us"\nbandwidth = "1Gbit/s"\n')
    words = f"predict --cluster {path} --world-size 4 --compute 0.1s --parameters 100k --json".split()
    verdict = judge(fuzz.TARGETS["links by hand"], (path, words), tmp_path)
    assert verdict.outcome == "refused"
    assert verdict.why.startswith("error: link must lead from rank 3 to rank 0, which ring sends to")
    monkeypatch.setattr(files, "try_timing_model", lambda words: None)
    verdict = judge(fuzz.TARGETS["links by hand"], (path, words), tmp_path)
    assert (verdict.outcome, verdict.why) == ("absurd", "links that do not lead from rank 3 to rank 0 were accepted")


def test_what_must_be_refused_fails_where_it_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fuzzed_words.accelerators.Emulated, "_judge", lambda model: None)
    verdict = judge(fuzz.TARGETS["accelerators"], (False, "1us"), tmp_path)
    assert verdict.outcome == "absurd"
    assert verdict.why == "an accelerator that is shorter than its real part was accepted"


@pytest.mark.parametrize(
    "name", ["command lines", "quantities", "accelerators", "store values", "parameter-server messages"]
)
def test_a_case_is_the_same_whatever_was_tried_before(name: str, tmp_path: Path) -> None:
    target = fuzz.TARGETS[name]
    cases = [repr(draw(target, 0, index, tmp_path)) for index in (3, 4, 3)]
    assert cases[0] == cases[2] != cases[1]
    assert repr(draw(target, 1, 3, tmp_path)) != cases[0]


def test_damage_changes_a_file() -> None:
    chance = random.Random(0)
    content = bytes(range(256))
    assert sum(damaged(chance, content) != content for _ in range(100)) > 90


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def attempt(case: float, folder: Path) -> None:
        tried.append(len(tried))
        if len(tried) == 3:
            raise KeyboardInterrupt

    monkeypatch.setitem(fuzz.TARGETS, "planted", _target(attempt))
    harness = tmp_path / "harness.py"
    harness.write_text("1\n")
    monkeypatch.setattr(fuzz, "HARNESS", (harness,))
    path = tmp_path / "runs" / "fuzz-0.jsonl"
    with pytest.raises(KeyboardInterrupt):
        fuzz.compute({"planted": 5}, 0, path, Console(quiet=True))
    assert [json.loads(line).get("index") for line in path.read_text().splitlines()] == [None, 0, 1]
    with path.open("a") as file:
        file.write('{"target": "plan')  # as if it was killed while it wrote
    outcomes = fuzz.compute({"planted": 5}, 0, path, Console(quiet=True))
    assert [one["index"] for one in outcomes] == [0, 1, 2, 3, 4]
    assert len(tried) == 3 + 3
    harness.write_text("2\n")
    fuzz.compute({"planted": 5}, 0, path, Console(quiet=True))
    assert len(tried) == 6 + 5
    assert fuzz.summarize(outcomes)[-1] | {"slowest_s": 0.0} == {
        "input": "all",
        "cases": 5,
        "accepted": 5,
        "refused": 0,
        "absurd": 0,
        "traceback": 0,
        "hang": 0,
        "slowest_s": 0.0,
    }


def test_options_are_checked(tmp_path: Path) -> None:
    for words, message in (
        (["--only", "TOML"], "--only must be one of"),
        (["--show", "run.json", "-1"], "--show|expected 2 arguments"),
        (["--show", "run.json", "x"], "--show must name a case by its number; got 'x'"),
        (["--seed", "\u0663"], "--seed: must be a whole number of at least 0; got"),
    ):
        with pytest.raises(UserInputError, match=message):
            fuzz.parse([*words, "--output", str(tmp_path)], by_torchrun=False)
