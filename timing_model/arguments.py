"""Arguments of a command: a parser whose errors are one line that names the option, and types of options."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from timing_model.units import MOST

FORMER_NAMES = {"--cards": "--nics"}
FORMER_VALUES = {("--server-placement", "beside"): "colocated", ("--server-placement", "own"): "dedicated"}
"""Names and values of options in the previous version, which this one still accepts, and what they are called now."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ``ValueError`` in one line that names the option."""

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"unrecognized arguments: (\S+)", message):
            names = [name for action in self._actions for name in action.option_strings]
            raise ValueError(f"every option must be one that --help lists; got {found[1]}{_nearest(found[1], names)}")
        if found := re.match(r"argument --([\w-]+): (?:\1 )?(.*)", message):
            what = "must have a value; got none" if found[2].startswith("expected") else found[2]
            raise ValueError(f"{found[1]} {what}")
        if found := re.match(r"the following arguments are required: (?:--)?([\w-]+)", message):
            raise ValueError(f"{found[1]} must be given; got none")
        raise ValueError(message)

    def parse(self, argv: Sequence[str]) -> Namespace:
        """Return the values of the arguments; a number below 0 is a value, too."""
        joined: list[str] = []
        for argument in argv:
            if joined and joined[-1].startswith("--") and "=" not in joined[-1] and re.match(r"-\.?\d", argument):
                joined[-1] += f"={argument}"
            else:
                joined.append(argument)
        before = ["", *joined]
        joined = [self._with_current_name(one, previous) for previous, one in zip(before, joined, strict=False)]
        names = [argument.partition("=")[0] for argument in joined if argument.startswith("--")]
        for name in names:
            if names.count(name) > 1:  # do not guess which of the values was meant
                raise ValueError(f"{name[2:]} must be given once; got it {names.count(name)} times")
        return self.parse_args(joined)

    def _with_current_name(self, argument: str, before: str) -> str:
        """Return ``argument`` under its current name, with a hint on stderr if that is another one."""
        option, equals, value = argument.partition("=")
        if option in FORMER_NAMES:
            _hint(option, FORMER_NAMES[option])
            return FORMER_NAMES[option] + equals + value
        name, given = (option, value) if equals else (before, argument)
        if (now := FORMER_VALUES.get((name, given))) is None:
            return argument
        _hint(f"{name} {given}", f"{name} {now}")
        return f"{option}={now}" if equals else now


def _hint(former: str, current: str) -> None:
    print(f"warning: {former} is now {current}; the former name works in this version only", file=sys.stderr)


def whole(least: int = 1) -> Callable[[str], int]:
    """Return the type of an option that is a whole number."""

    def number(text: str) -> int:
        is_whole = text.isascii() and text.isdecimal()
        if is_whole and len(text.lstrip("0")) > len(f"{MOST:.0f}"):  # else int() may fail
            raise argparse.ArgumentTypeError(f"must be at most {MOST:g}; got a number of {len(text)} digits")
        if not is_whole or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}; got {text!r}")
        return int(text)

    return number


def quantity(parse: Callable[[str, str], float], name: str) -> Callable[[str], float]:
    """Return the type of an option with a unit."""

    def number(text: str) -> float:
        try:
            return parse(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return number


def number_of(least: float, below: float = 1e9) -> Callable[[str], float]:
    """Return the type of an option that is a number without a unit, from ``least`` to below ``below``."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value < below:
            limit = f" and below {below:g}" if value >= below else ""
            raise argparse.ArgumentTypeError(f"must be a number of at least {least:g}{limit}; got {text!r}")
        return value

    return number


def _nearest(got: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(got, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
