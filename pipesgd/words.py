"""Words of a command line, checked option by option before tyro reads them, whose errors are those of its own types."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin, get_type_hints

from pipesgd.checks import did_you_mean
from pipesgd.config import AUTO_OPTIONS, sections_of
from pipesgd.errors import UserInputError
from pipesgd.options import dashed
from timing_model.units import parse_count

_TAKES_A_PATH = {"resume": "--output {value} --resume", "overwrite": "--output {value} --overwrite"}
"""What was meant where another trainer's flag of this name has a value."""


def check_words(argv: Sequence[str], config: Any) -> None:
    """Raise ``UserInputError`` unless each option in ``argv`` has as many words as it takes, of its own kind.

    All options are fields of the sections of ``config``, and have their current names.
    """
    hints = {
        dashed(name): hint
        for section in sections_of(config)
        for name, hint in get_type_hints(type(section)).items()
        if name in {item.name for item in dataclasses.fields(section)}
    }
    name, words = "", list[str]()
    for argument in [*argv, "--"]:
        if not argument.startswith("--"):
            words.append(argument)
            continue
        if name or words:
            _check(name, hints.get(name), words, list(hints))
        option, equals, value = argument.partition("=")
        name, words = dashed(option[2:]), [value] if equals else []


def _check(name: str, hint: Any, words: list[str], known: Sequence[str]) -> None:
    """Check the ``words`` after an option; ``hint`` is its type, None if it has none of its own (--help)."""
    for word in words:
        if re.match(r"-[^\W\d]", word) and not _reads(float, word):
            raise UserInputError(
                f"every option must be one that --help-all lists; got {word}{did_you_mean(word.strip('-'), known)}"
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
        raise UserInputError(f"{name} must have one value; got {len(words)}: {' '.join(words)}")
    kinds = get_args(hint) or (hint,)
    for word in words:
        if int in kinds and not _reads(int, word):
            raise _not_a_number(name, "a whole number", word)
        if float in kinds and not _reads(float, word):
            raise _not_a_number(name, "a number", word)


def _not_a_number(name: str, kind: str, word: str) -> UserInputError:
    """Return the error for a word that is no number, with the number that it may stand for."""
    near = ""
    try:
        meant = parse_count(name, word.replace(",", "" if re.fullmatch(r"\d{1,3}(,\d{3})+", word) else "."))
        if kind == "a number" or meant == int(meant):
            near = f" (did you mean {meant:.12g}?)"
    except ValueError:
        pass  # it stands for none
    kind += " or auto" if name in AUTO_OPTIONS else ""
    return UserInputError(f"{name} must be {kind}; got {word!r}{near}")


def _meant_by_a_flag(name: str, word: str, known: Sequence[str]) -> str:
    if name in _TAKES_A_PATH and "output" in known:
        return f" (did you mean {_TAKES_A_PATH[name].format(value=word)}?)"
    return f" (leave {word} out, or --{name})" if word.lower() in ("true", "false") else ""


def _reads(kind: type, word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True
