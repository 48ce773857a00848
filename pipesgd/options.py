"""Declaration of an option: next to its default, the values that it may have and the choices that read it.

``check_words`` checks the words of a command line before tyro reads them, whose errors are those of its own types.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pipesgd.checks import check_above_zero, check_at_least, check_one_of, did_you_mean, one_of
from pipesgd.errors import UserInputError
from pipesgd.functions import OWN, check_function
from timing_model.units import parse_count

_TAKES_A_PATH = {"resume": "--output {value} --resume", "overwrite": "--output {value} --overwrite"}
"""Arguments to use for a flag that has a path as its value in other trainers."""


def option(
    default: Any,
    *,
    at_least: float | None = None,
    above_zero: bool = False,
    choices: Sequence[str] = (),
    kind: Callable[[str], str] | None = None,
    read_by: Mapping[str, Sequence[str]] = MappingProxyType({}),
    named: str | None = None,
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
        named: name of the option in messages; by default that of the field, with dashes.
    """
    declared = {"at_least": at_least, "above_zero": above_zero, "choices": choices, "kind": kind, "read_by": read_by}
    declared["named"] = named
    return dataclasses.field(default=default, metadata=declared)


def check_options(section: Any) -> None:
    """Raise ``UserInputError`` unless the fields of the dataclass ``section`` have values that were declared."""
    check_values(section)
    check_read(section)


def check_values(section: Any) -> None:
    """Raise ``UserInputError`` unless each declared field of the dataclass ``section`` may have its value.

    What a program may give in place of a name, such as a class or a function, is left to those who use it.
    """
    for item, rules, value in _declared(section):
        name, kind = rules["named"] or dashed(item.name), rules["kind"]
        if callable(value) or isinstance(value, Mapping):
            continue
        for one in () if value is None else value if isinstance(value, tuple) else (value,):
            if rules["at_least"] is not None:
                check_at_least(name, one, rules["at_least"])
            if rules["above_zero"]:
                check_above_zero(name, one)
            if kind is not None:  # some list OWN among their choices for --help, others only have it
                check_function(name, one, kind(one), tuple(dict.fromkeys((*rules["choices"], OWN))))
            elif rules["choices"]:
                check_one_of(name, one, rules["choices"])


def check_read(*sections: Any) -> None:
    """Raise ``UserInputError`` for a field of these dataclasses that is set although nothing reads it.

    An option that is not read must not be accepted silently. A choice that it depends on is in one of ``sections``.
    """
    declared = [field for section in sections for field in _declared(section)]
    chosen = {
        item.name: value if rules["kind"] is None or value is None or callable(value) else rules["kind"](value)
        for item, rules, value in declared
    }
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


@functools.cache
def types_in_words(section: type) -> dict[str, Any]:
    """Return the type of each field of the dataclass ``section`` that the words of a command line can give it.

    Names from a closed set are strings, and classes and functions, which only a program can give, are left out.
    """
    return {name: _in_words(hint) for name, hint in get_type_hints(section).items()}


def _in_words(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) not in (Union, UnionType):
        return hint
    kinds = [_in_words(one) for one in get_args(hint)]
    return Union[tuple(one for one in kinds if one in (bool, int, float, str, Path, NoneType))]  # noqa: UP007 (a tuple)


def dashed(name: str) -> str:
    """Return the name on the command line of the option in a field ``name``."""
    return name.replace("_", "-")


def check_words(argv: Sequence[str], sections: Sequence[Any], *, or_auto: Sequence[str]) -> None:
    """Raise ``UserInputError`` unless each option in ``argv`` has as many words as it takes, of its own kind.

    Args:
        argv: arguments of a command, with the current names of its options.
        sections: dataclasses whose fields are its options.
        or_auto: options that may be left to the timing model, too.
    """
    hints: dict[str, Any] = {}
    for section in sections:
        kind: Any = type(section)
        types = types_in_words(kind)
        hints |= {dashed(item.name): types[item.name] for item in dataclasses.fields(section)}
    name, words = "", list[str]()
    for argument in [*argv, "--"]:
        if not argument.startswith("--"):
            words.append(argument)
            continue
        if name or words:
            _check_option(name, hints.get(name), words, list(hints), " or auto" if name in or_auto else "")
        option, equals, value = argument.partition("=")
        name, words = dashed(option[2:]), [value] if equals else []


def _check_option(name: str, hint: Any, words: list[str], known: Sequence[str], or_auto: str) -> None:
    """Check the ``words`` after an option; ``hint`` is its type, None if it has none of its own (--help)."""
    for word in words:
        if re.match(r"-[^\W\d]", word) and not _reads(float, word):
            raise UserInputError(
                f"every option must be one that --help-all lists; got {word!r}{did_you_mean(word.strip('-'), known)}"
            )
    if not name:
        near = f" (did you mean --{words[0]}?)" if words[0] in known else ""
        raise UserInputError(f"every option must begin with --; got {words[0]!r}{near}")
    if hint is bool or hint is None:
        if words:
            raise UserInputError(
                f"{name} must have no value; got {words[0]!r}{_meant_by_a_flag(name, words[0], known)}"
            )
        return
    several = get_origin(hint) is tuple
    if not words or words == [""]:
        raise UserInputError(f"{name} must have a value; got none")
    if len(words) > 1 and not several:
        raise UserInputError(f"{name} must have one value; got {' '.join(words)!r}")
    kinds = get_args(hint) or (hint,)
    if several and Ellipsis not in kinds and len(words) != len(kinds):
        raise UserInputError(f"{name} must have {len(kinds)} values; got {' '.join(words)!r}")
    for word in () if str in kinds else words:
        if int in kinds and not _reads(int, word):
            raise _not_a_number(name, f"a whole number{or_auto}", word)
        if float in kinds and not _reads(float, word):
            raise _not_a_number(name, f"a number{or_auto}", word)


def _not_a_number(name: str, kind: str, word: str) -> UserInputError:
    """Return the error for a word that is no number, with the number that it may stand for."""
    near = ""
    try:
        meant = parse_count(name, word.replace(",", "" if re.fullmatch(r"\d{1,3}(,\d{3})+", word) else "."))
        if "whole" not in kind or meant == int(meant):
            near = f" (did you mean {meant:.12g}?)"
    except ValueError:
        pass  # it stands for none
    return UserInputError(f"{name} must be {kind}; got {word!r}{near}")


def _meant_by_a_flag(name: str, word: str, known: Sequence[str]) -> str:
    if name in _TAKES_A_PATH and "output" in known and word.isprintable():
        return f" (did you mean {_TAKES_A_PATH[name].format(value=word)}?)"
    return f" (leave {word} out, or --{name})" if word.lower() in ("true", "false") else ""


def _reads(kind: type, word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True
