"""Checks of option values, each of which raises a one-line error."""

from __future__ import annotations

import difflib
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipesgd.errors import UserInputError

SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 0.1, 1_000_000.0
"""Bounds of a timeout in seconds: torch counts whole milliseconds, and cannot count as many as a float can hold."""


MOST = 1e15
"""Largest value of an option: a larger one is a mistake and could overflow."""


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise ``UserInputError`` unless ``value`` is a number of at least ``least`` and at most ``MOST``."""
    if not value >= least:  # a NaN compares false
        raise UserInputError(f"{name} must be at least {least:g}; got {value}")
    _check_at_most(name, value, MOST)


def check_above_zero(name: str, value: float, most: float = MOST) -> None:
    """Raise ``UserInputError`` unless ``value`` is a number above zero and at most ``most``."""
    if not value > 0:
        raise UserInputError(f"{name} must be above 0; got {value}")
    _check_at_most(name, value, most)


def _check_at_most(name: str, value: float, most: float) -> None:
    if value > most:
        raise UserInputError(f"{name} must be at most {most:g}; got {_shortened(str(value))}")


def _shortened(text: str) -> str:
    """Return ``text``, with its middle left out if it is long."""
    return text if len(text) <= 60 else f"{text[:30]}...{text[-20:]} ({len(text)} characters)"


def check_timeout(value: float | None) -> None:
    """Raise ``UserInputError`` unless ``value`` is a number of seconds that torch and gloo can wait, or None."""
    if value is not None and not SHORTEST_TIMEOUT <= value <= LONGEST_TIMEOUT:
        raise UserInputError(
            f"timeout must be from {SHORTEST_TIMEOUT:g} to {LONGEST_TIMEOUT:,.0f} seconds; got {value}"
        )


def check_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ``UserInputError`` naming the nearest choice unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise UserInputError(f"{name} must be {one_of(choices)}; got {value!r}{did_you_mean(str(value), choices)}")


def check_version(distribution: str, oldest: str, door: str) -> None:
    """Raise ``UserInputError`` unless the installed ``distribution`` has at least the version that ``door`` needs.

    ``oldest`` is a version of two numbers, such as "2.5".
    """
    version = importlib.metadata.version(distribution)
    if _first_two_numbers(version) < _first_two_numbers(oldest):
        raise UserInputError(f"{distribution} must be at least {oldest} for {door}; got {version}")


def _first_two_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def refuse(*combinations: tuple[object, str]) -> None:
    """Raise ``UserInputError`` for the first of these combinations of options that is given.

    Each is a condition that is true if it is given, and the message.
    """
    for given, message in combinations:
        if given:
            raise UserInputError(message)


def check_as_loaded(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ``UserInputError`` for the first value of ``own`` that a ``state`` to be loaded has another one of."""
    for name, now in own.items():
        if (before := state[name]) != now:
            raise UserInputError(f"{name} must be {before}, as in the state that is loaded; got {now}")


def check_several(ranks: int, who: str) -> None:
    """Raise ``UserInputError`` if ``who`` has started one rank, whose model it does not wrap."""
    if ranks == 1:
        raise UserInputError(
            f"{who} must have several ranks, since it does not wrap the model of a single one in "
            "DistributedDataParallel: start the program with torchrun --nproc-per-node 2 program.py; got 1 rank"
        )


def check_left_out(options: Mapping[str, Any], in_the_loop: Mapping[str, str]) -> None:
    """Raise ``UserInputError`` for the first of ``options`` that a loop which is not pipesgd's has itself.

    ``in_the_loop`` says of each such option what the loop has in its place. None and False count as left out.
    """
    for name, instead in in_the_loop.items():
        value = options.get(name)
        if value is not None and value is not False:
            shown = value if isinstance(value, int | float | str) else type(value).__name__
            raise UserInputError(f"{name} must be left out, since {instead}; got {shown}")


def one_of(choices: Sequence[str]) -> str:
    """Return ``choices`` as a phrase: "fp32", "ring or native", "one of a, b, c"."""
    if len(choices) <= 2:
        return " or ".join(choices)
    return "one of " + ", ".join(choices)


def did_you_mean(value: str, choices: Sequence[str]) -> str:
    """Return a clause that names the choice nearest to ``value``, empty if none is near."""
    by_lower = {choice.lower(): choice for choice in reversed(choices)}
    near = difflib.get_close_matches(value.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[near[0]]}?)" if near else ""
