"""Every option of every subcommand with values that it cannot have: one line, and exit code 2."""

from __future__ import annotations

import argparse

import pytest

from timing_model.arguments import Parser
from timing_model.cli import COMMANDS, main

GIVEN = {"--network": "1GbE", "--world-size": "4", "--compute": "0.3s", "--parameters": "25.6M"}
BAD = ("abc", "1.5", "10k", "", "1e3", "--", "25.6 M")
"""Values; "--" stands for none, and two words with a space between them are two values."""
RAW = ("NoneType", "Error parsing", "Got errors", "Unrecognized", "unrecognized", "invalid", "argument", "expected")
"""Words of argparse's own messages."""


def options_of(command: str) -> list[argparse.Action]:
    parser = Parser(prog=command)
    COMMANDS[command][0](parser)
    return [action for action in parser._actions if action.dest != "help"]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_answers_a_bad_value_in_one_line(
    command: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only how options are read is tried here: what is read is not computed.
    monkeypatch.setitem(COMMANDS, command, (COMMANDS[command][0], lambda given: "computed"))
    options = options_of(command)
    assert len(options) > 25
    for action in options:
        [name] = action.option_strings
        others = [word for option, one in GIVEN.items() if option != name for word in (option, one)]
        words = [name] if value == "--" else [name, *value.split(" ")]
        code = main([command, *others, *words])
        _, err = capsys.readouterr()
        assert (code, err.count("\n")) in [(0, 0), (2, 1)], (words, err)
        assert not any(word in err for word in RAW), err
        if value in ("", "--") and action.nargs != 0:
            assert err == f"error: {name[2:]} must have a value; got none\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --nodes 4", "every option must be one that --help lists; got --nodes (did you mean --world-size?)"),
        ("plan --gpus 4", "every option must be one that --help lists; got --gpus (did you mean --world-size?)"),
        ("plan --params 1M", "every option must be one that --help lists; got --params (did you mean --parameters?)"),
        ("plan --parameters 25.6 M", "parameters must have one value; got '25.6 M' (did you mean 25.6M?)"),
        ("predict --latency 50 us", "latency must have one value; got '50 us' (did you mean 50us?)"),
        ("predict --json yes", "every option must be one that --help lists; got yes"),
        ("predict 4", "every option must be one that --help lists; got 4"),
        ("predict --cluster= --world-size 4", "cluster must have a value; got none"),
    ],
)
def test_the_line_names_what_was_meant(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("words", "near"),
    [("--network 1gbe", "1GbE"), ("--network 10GBE", "10GbE"), ("--codec INT8", "int8"), ("--strategy DDP", "ddp")],
)
def test_a_name_in_other_capitals_is_near(words: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    option, value = words.split()
    given = [word for one, other in (GIVEN | {option: value}).items() for word in (one, other)]
    assert main(["predict", *given]) == 2
    assert capsys.readouterr().err.endswith(f"got {value} (did you mean {near}?)\n")
