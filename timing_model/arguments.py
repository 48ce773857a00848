"""Arguments of a command: options made of the fields of dataclasses, and a parser whose errors are one line.

``option`` declares a field, whose docstring is the help; ``add_options`` makes the options of a command of such fields,
and ``taken`` returns what a user has given for them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

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
        near = " (pipesgd plan has it)" if name == "--from" else near
        shown = name if name.isprintable() else repr(name)
        return ValueError(f"every option must be one that --help lists; got {shown}{near}")


Kind = Callable[[str, str], Any]
"""Function that reads the value of an option, given its name for errors. It raises ``ValueError`` in one line."""


def whole(least: int = 1) -> Kind:
    """Return the kind of an option that is a whole number."""

    def number(name: str, text: str) -> int:
        is_whole = text.isascii() and text.isdecimal()
        if is_whole and len(text.lstrip("0")) > len(f"{MOST:.0f}"):  # else int() may fail
            raise ValueError(f"{name} must be at most {MOST:g}; got a number of {len(text)} digits")
        if not is_whole or int(text) < least:
            raise ValueError(f"{name} must be a whole number of at least {least}; got {text!r}")
        return int(text)

    return number


def number_of(least: float, below: float = 1e9) -> Kind:
    """Return the kind of an option that is a number without a unit, from ``least`` to below ``below``."""

    def number(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value < below:
            limit = f" and below {below:g}" if value >= below else ""
            raise ValueError(f"{name} must be a number of at least {least:g}{limit}; got {text!r}")
        return value

    return number


def words(name: str, text: str) -> str:
    """Read the value of an option that is a name."""
    return text


def option(
    default: Any,
    kind: Kind | None = words,
    shown: str = "NAME",
    *,
    name: str | None = None,
    choices: Sequence[str] = (),
    several: bool = False,
    says_default: bool = False,
) -> Any:
    """Declare a field of a dataclass as an option of a command, whose help is the docstring under the field.

    Args:
        default: default of the field.
        kind: function that reads the value, such as those of ``units``; None if the option is a flag.
        shown: placeholder of the value in the help.
        name: name of the option, with underscores, if that is not the field's.
        choices: names that the help lists; they are not checked.
        several: True if the option takes several values.
        says_default: True if the docstring says the default, which the help otherwise adds.
    """
    declared = {"kind": kind, "shown": shown, "name": name, "choices": choices, "several": several}
    return dataclasses.field(default=default, metadata=declared | {"says_default": says_default or several})


def options_in(section: Any) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yield the fields of a dataclass that are options, after the names of the options, with underscores."""
    for item in dataclasses.fields(section):
        if item.metadata:
            yield item.metadata["name"] or item.name, item


def add_options(group: argparse._ActionsContainer, section: type, *, without: Sequence[str] = ()) -> None:
    """Add the options that a dataclass declares, but those ``without``. None of them has a value until it is given."""
    helps = _docstrings(section)
    for name, item in options_in(section):
        if name in without:
            continue
        declared, dashed = item.metadata, name.replace("_", "-")
        text = helps[item.name]
        if declared["choices"]:
            text = f"{text.rstrip('.')} ({', '.join(declared['choices'])})."
        if declared["kind"] is None:
            group.add_argument(f"--{dashed}", action="store_true", help=text)
            continue
        if item.default not in (None, dataclasses.MISSING) and not declared["says_default"]:
            text += f" Default: {item.default}."
        group.add_argument(
            f"--{dashed}",
            type=_reader(declared["kind"], dashed),
            required=item.default is dataclasses.MISSING,
            metavar=declared["shown"],
            nargs="+" if declared["several"] else None,
            help=text.replace("%", "%%"),
        )


def taken(given: Namespace, section: type, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return what was given for the options that a dataclass declares, but those ``without``, by the options' names."""
    values = {name: getattr(given, name) for name, _ in options_in(section) if name not in without}
    return {name: value for name, value in values.items() if value is not None}


def _reader(kind: Kind, name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


@functools.cache
def _docstrings(section: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, on one line."""
    [body] = ast.parse(inspect.getsource(section)).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
