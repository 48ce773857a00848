"""Every option of the commands with values that it cannot have: one line, and exit code 2."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from _refusals import refused

from pipesgd.calibration.options import CalibrateConfig
from pipesgd.cli import parse, parse_as
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.exit import _explain

BAD = ("abc", "1.5", "10k", "", "1e3", "--", "a b")
"""Values; "--" stands for none, and two words with a space between them are two values."""
RAW = ("NoneType", "Error parsing", "Got errors", "Unrecognized", "Missing value", "invalid literal", "instantiated")
"""Words of libraries' own messages."""
PARSERS = {"train": parse, "calibrate": functools.partial(parse_as, CalibrateConfig, "calibrate")}


def answer(read: Callable[[Sequence[str]], Any], words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line that refuses these words; empty if they are accepted."""
    refused = None
    try:
        read(words)
    except UserInputError as error:
        refused = error
    if refused is None:
        return ""
    assert _explain(refused, None) == 2
    said = capsys.readouterr().err
    assert said == f"error: {refused}\n"
    assert not any(word in said for word in RAW), said
    return str(refused)


@pytest.mark.slow
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("command", "kind"), [("train", TrainConfig), ("calibrate", CalibrateConfig)])
def test_every_option_answers_a_bad_value_in_one_line(
    command: str, kind: type[Any], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = kind().options()
    assert len(options) > 30
    for name, default in options.items():
        words = [f"--{name}"] if value == "--" else [f"--{name}", *value.split(" ")]
        said = answer(PARSERS[command], words, capsys)
        assert said or (value in ("1.5", "1e3", "abc", "10k", "--")), f"{words} was accepted"
        is_flag = isinstance(default, bool)
        if value in ("", "--") and not is_flag:
            assert said == f"{name} must have a value; got none"
        elif is_flag and value not in ("", "--"):
            assert said.startswith(f"{name} must have no value; got ")


@pytest.mark.parametrize(("words", "message"), refused("misspelled"))
def test_the_line_names_what_was_meant(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(parse, words.split(), capsys) == message


@pytest.mark.parametrize(("value", "near"), [("INT8", "int8"), ("Int4", "int4"), ("PowerSGD", "powersgd")])
def test_a_name_in_other_capitals_is_near(value: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(parse, ["--codec", value], capsys).endswith(f"got {value!r} (did you mean {near}?)")
