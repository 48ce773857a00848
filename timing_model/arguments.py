"""Arguments of a command: a parser whose errors are one line that names the option, and types of options."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from timing_model.checks import did_you_mean
from timing_model.units import MOST

OTHER_NAMES = {
    **dict.fromkeys(("--nodes", "--gpus", "--ranks", "--workers", "--nproc", "--machines"), "--world-size"),
    **dict.fromkeys(("--rate", "--bw"), "--bandwidth"),
    "--params": "--parameters",
}
"""Names that users try for our options, where the spelling alone gives no hint."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ``ValueError`` in one line that names the option."""

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"unrecognized arguments: (\S+)", message):
            raise self._unknown(found[1])
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
        names = [argument.partition("=")[0] for argument in joined if argument.startswith("--")]
        for name in names:
            if names.count(name) > 1:  # do not guess which of the values was meant
                raise ValueError(f"{name[2:]} must be given once; got it {names.count(name)} times")
        self._check_words(joined)
        return self.parse_args(joined)

    def _check_words(self, argv: Sequence[str]) -> None:
        """Raise ``ValueError`` for an unknown option, or one with more words than it takes: argparse names others."""
        takes = {name: action.nargs for action in self._actions for name in action.option_strings}
        name, words = "", list[str]()
        for argument in argv:
            if argument.startswith("--"):
                name, words = argument.partition("=")[0], argument.split("=", 1)[1:]
                if name not in takes:
                    raise self._unknown(name)
                if words == [""]:
                    raise ValueError(f"{name[2:]} must have a value; got none")
                continue
            words.append(argument)
            if name and takes[name] != 0 and argument == "":
                raise ValueError(f"{name[2:]} must have a value; got none")
            if name and takes[name] is None and len(words) == 2 and re.fullmatch(r"[\d.]+", words[0]):
                raise ValueError(
                    f"{name[2:]} must have one value; got {' '.join(words)!r} (did you mean {''.join(words)}?)"
                )
            if not name or takes[name] == 0 or (takes[name] is None and len(words) > 1):
                raise self._unknown(argument)

    def _unknown(self, name: str) -> ValueError:
        names = [name for action in self._actions for name in action.option_strings]
        other = OTHER_NAMES.get(name)
        near = f" (did you mean {other}?)" if other in names else did_you_mean(name, names)
        shown = name if name.isprintable() else repr(name)
        return ValueError(f"every option must be one that --help lists; got {shown}{near}")


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
