"""Wrong input of every kind must be accepted or refused in one line, in time, and nothing absurd accepted.

A case fails if an error comes out that no user should see (a traceback), if there is no answer within 30 s, if an error
has several lines, or if something absurd is accepted: NaN, infinity, a negative or astronomical number, a foreign file.
Cases are drawn from the seed, each by itself. ``PIPESGD_FUZZ=all`` tries all cases, 12,000 in two minutes.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from pipesgd.errors import UserInputError
from tests.fuzzing import _files, _messages, _words
from tests.fuzzing._cases import Target, draw, judge
from tests.fuzzing._mutations import damaged

TARGETS = {target.name: target for target in (*_words.TARGETS, *_files.TARGETS, *_messages.TARGETS)}
SLICE, SEED = 30, 1


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_wrong_input_is_accepted_or_refused_in_one_line(target: Target, tmp_path: Path) -> None:
    cases = target.cases if os.environ.get("PIPESGD_FUZZ") == "all" else SLICE
    verdicts = [judge(target, draw(target, SEED, index, tmp_path), tmp_path) for index in range(cases)]
    failed = [(index, one) for index, one in enumerate(verdicts) if one.outcome not in ("accepted", "refused")]
    assert failed == []


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
        (_raise(KeyError("x")), "traceback", "KeyError at test_wrong_input.py:"),
        (_raise(RecursionError()), "traceback", "RecursionError at test_wrong_input.py:"),
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
    verdict = judge(TARGETS[target], case, tmp_path)
    assert verdict.outcome == "refused"
    assert verdict.why.startswith(why)


def test_links_that_do_not_connect_fail_where_they_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "links.toml"
    path.write_text('[[link]]\nfrom = [0, 1, 2]\nlatency = "30us"\nbandwidth = "1Gbit/s"\n')
    words = f"predict --cluster {path} --world-size 4 --compute 0.1s --parameters 100k --json".split()
    verdict = judge(TARGETS["links by hand"], (path, words), tmp_path)
    assert verdict.outcome == "refused"
    assert verdict.why.startswith("error: link must lead from rank 3 to rank 0, which ring sends to")
    monkeypatch.setattr(_files, "try_timing_model", lambda words: None)
    verdict = judge(TARGETS["links by hand"], (path, words), tmp_path)
    assert (verdict.outcome, verdict.why) == ("absurd", "links that do not lead from rank 3 to rank 0 were accepted")


def test_what_must_be_refused_fails_where_it_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_words.accelerators.Emulated, "_judge", lambda model: None)
    verdict = judge(TARGETS["accelerators"], (False, "1us"), tmp_path)
    assert verdict.outcome == "absurd"
    assert verdict.why == "an accelerator that is shorter than its real part was accepted"


@pytest.mark.parametrize(
    "name", ["command lines", "quantities", "accelerators", "store values", "parameter-server messages"]
)
def test_a_case_is_the_same_whatever_was_tried_before(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    cases = [repr(draw(target, 0, index, tmp_path)) for index in (3, 4, 3)]
    assert cases[0] == cases[2] != cases[1]
    assert repr(draw(target, 1, 3, tmp_path)) != cases[0]


def test_damage_changes_a_file() -> None:
    chance = random.Random(0)
    content = bytes(range(256))
    assert sum(damaged(chance, content) != content for _ in range(100)) > 90
