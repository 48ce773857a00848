"""Declaration of an option: next to its default, the values that it may have and the choices that read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipesgd.checks import check_above_zero, check_at_least, check_one_of, one_of
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, check_function


def option(
    default: Any,
    *,
    at_least: float | None = None,
    above_zero: bool = False,
    choices: Sequence[str] = (),
    kind: Callable[[str], str] | None = None,
    read_by: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Any:
    """Declare a field of a dataclass of options, which ``check_options`` checks.

    Args:
        default: default, which is not checked if it is None.
        at_least: least value, of each item if the option has several.
        above_zero: True if the value must be above zero.
        choices: values that it may have, as ``--help`` lists them.
        kind: function that returns the choice that a value stands for, if ``module:function`` is one of them, too.
        read_by: by the name of another field, its choices with which this option has an effect; with others, it must be
            left out. By default it always has one.
    """
    declared = {"at_least": at_least, "above_zero": above_zero, "choices": choices, "kind": kind, "read_by": read_by}
    return dataclasses.field(default=default, metadata=declared)


def check_options(section: Any) -> None:
    """Raise ``UserInputError`` unless the fields of the dataclass ``section`` have values that were declared."""
    check_values(section)
    check_read(section)


def check_values(section: Any) -> None:
    """Raise ``UserInputError`` unless each declared field of the dataclass ``section`` may have its value."""
    for item, rules, value in _declared(section):
        name, kind = dashed(item.name), rules["kind"]
        for one in () if value is None else value if isinstance(value, tuple) else (value,):
            if rules["at_least"] is not None:
                check_at_least(name, one, rules["at_least"])
            if rules["above_zero"]:
                check_above_zero(name, one)
            if kind is not None:  # some list OWN among their choices for --help, others only have it
                check_function(name, one, kind(one), tuple(dict.fromkeys((*rules["choices"], OWN))))
            elif rules["choices"]:
                check_one_of(name, one, rules["choices"])


def check_read(section: Any) -> None:
    """Raise ``UserInputError`` for a field of the dataclass ``section`` that is set although nothing reads it.

    An option that is not read must not be accepted silently.
    """
    declared = list(_declared(section))
    chosen = {item.name: value if rules["kind"] is None else rules["kind"](value) for item, rules, value in declared}
    for item, rules, value in declared:
        for other, readers in rules["read_by"].items():
            if chosen[other] not in readers and value != item.default:
                shown = value if isinstance(value, Path) else repr(value)
                raise UserInputError(
                    f"{dashed(item.name)} must be left out with --{other} {chosen[other]}, which has no use for it "
                    f"(it belongs to {one_of(readers)}); got {shown}"
                )


def _declared(section: Any) -> Iterator[tuple[dataclasses.Field[Any], Mapping[str, Any], Any]]:
    """Yield each field that ``option`` declares, what it declares, and the value."""
    for item in dataclasses.fields(section):
        if item.metadata:
            yield item, item.metadata, getattr(section, item.name)


def dashed(name: str) -> str:
    """Return the name on the command line of the option in a field ``name``."""
    return name.replace("_", "-")
