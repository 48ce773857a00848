"""Functions that options name: built-in ones, and those of the user's own, which are imported as ``module:function``.

Both kinds are called in the same way: with those of the offered values that their parameters name. A text after the
name, ``module:function=text``, becomes the function's first argument.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import pkgutil
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipesgd.checks import check_one_of, did_you_mean
from pipesgd.errors import UserInputError

Function = Callable[..., Any]

OWN = "module:function"
"""Value of an option that names a function of the user's own by the module to import it from."""

SOURCES = {
    "data_dir": "--data-dir gives it",
    "codec_block": "--codec-block gives it",
    "rounding": "--rounding gives it",
    "num_classes": "an attribute num_classes or classes of the training data gives it",
    "sample_shape": "it is known where an input is one tensor",
}
"""Sources of those offered values that may be missing."""

_NOT_THE_USERS = [str(folder) + os.sep for folder in (Path(__file__).parent, Path(os.__file__).parent)]
"""Folders of code that is not the user's own, in addition to those of installed packages."""


def kind(name: str) -> str:
    """Return ``OWN`` for any name with a colon, otherwise ``name`` itself."""
    return OWN if ":" in name else name


_FUNCTION = re.compile(r"(?![^=]*\.py:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*(=\S+)?")
"""Pattern of a module, a function in it, and perhaps a text for it. A file name is a common mistake."""


def check_function(option: str, name: str, of_kind: str, choices: Sequence[str]) -> None:
    """Raise ``UserInputError`` unless ``of_kind`` is one of ``choices``, and ``name`` written as that kind is."""
    check_one_of(option, of_kind, choices)
    if of_kind == OWN and not _FUNCTION.fullmatch(name):
        raise UserInputError(
            f"{option} must be {OWN}, with a module as Python imports it, such as package.file:make; got {name!r}"
        )


@contextlib.contextmanager
def in_one_line(expected: str) -> Iterator[None]:
    """Raise what a user's function raises as a ``UserInputError`` of one line, which says where that happened.

    ``expected`` says what must hold, and begins the line. Errors that have one line already stay as they are.
    """
    try:
        yield
    except UserInputError:
        raise
    except (Exception, SystemExit) as error:  # a function of the user's own may raise anything
        said = " ".join(str(error).split())
        raise UserInputError(
            f"{expected}; got {type(error).__name__}{': ' * bool(said)}{said}{_place(error)}"
        ) from error


def _place(error: BaseException) -> str:
    """Return the innermost line of the user's code that ``error`` came through, in brackets; empty if none is known."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_the_users(frame.filename)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _is_the_users(file: str) -> bool:
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not installed and not file.startswith(("<", *_NOT_THE_USERS))


def function_of(option: str, name: str, built_in: Mapping[str, Function]) -> Function:
    """Return the function that ``option`` names: one of ``built_in``, or that of a module, which is imported.

    With a text, as in ``module:function=text``, the function returned needs the other arguments only.

    Raises:
        UserInputError: there is no such module or function, or importing the module fails.
    """
    if name in built_in:
        return built_in[name]
    path, given, text = name.partition("=")
    module_name, _, attributes = path.partition(":")
    try:
        with in_one_line(f"{option} must be in a module that can be imported, {module_name}"):
            found: Any = importlib.import_module(module_name)
    except UserInputError as failure:
        missing = failure.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing.name}."):
            raise UserInputError(
                f"{option} must be in a module that can be imported from here; got {module_name}"
                f"{did_you_mean(str(missing.name), _modules_next_to(str(missing.name)))}"
            ) from None
        raise
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UserInputError(
                f"{option} must be a function of {module_name}; got {path}, which it does not have"
                f"{did_you_mean(attribute, dir(found))}"
            )
        found = getattr(found, attribute)
    if not callable(found):
        raise UserInputError(f"{option} must be a function; got {path}, which is of type {type(found).__name__}")
    return _with_first(found, text) if given else found


def _with_first(function: Function, text: str) -> Function:
    """Return ``function`` with its first argument, and with its attributes, such as ``sharded``."""
    bound = functools.partial(function, text)
    vars(bound).update(getattr(function, "__dict__", {}))
    vars(bound).pop("__wrapped__", None)  # its parameters would count, the first one included
    return bound


def _modules_next_to(name: str) -> list[str]:
    """Return the names of the modules that could be meant by ``name``, none of which is imported here."""
    package, _, _ = name.rpartition(".")
    folders = importlib.import_module(package).__path__ if package else None
    return [f"{package}.{one.name}" if package else one.name for one in pkgutil.iter_modules(folders)]


def call(option: str, name: str, function: Function, offered: Mapping[str, Any]) -> Any:
    """Return what ``function`` returns for those of the ``offered`` values that its parameters name.

    A value of None is not known: the parameter's own default counts.

    Args:
        option: option that named the function.
        name: value of that option.
        function: function to call.
        offered: values by the names of parameters.

    Raises:
        UserInputError: a parameter has neither a value nor a default, or the function fails.
    """
    known = {parameter: value for parameter, value in offered.items() if value is not None}
    for parameter in (required := _parameters(function, required=True)):
        if parameter not in offered:
            raise UserInputError(
                f"{option} must be a function whose parameters have defaults or are among {', '.join(offered)}; "
                f"got {name}({', '.join(required)})"
            )
        if parameter not in known:
            raise UserInputError(
                f"{parameter.replace('_', '-')} must be known for --{option} {name}, which needs it; got none "
                f"({SOURCES[parameter]})"
            )
    named = _parameters(function)
    with in_one_line(f"{option} must be made by {name} without an error"):
        return function(**{parameter: value for parameter, value in known.items() if parameter in named})


def check_used(option: str, name: str, function: Function, chosen: Mapping[str, Any]) -> None:
    """Raise ``UserInputError`` if ``function`` has no parameter for one of the options that the user has ``chosen``."""
    for parameter, value in chosen.items():
        if parameter not in _parameters(function):
            raise UserInputError(
                f"{parameter.replace('_', '-')} must be left out with --{option} {name}, which has no parameter "
                f"{parameter}; got {value}"
            )


def _parameters(function: Function, *, required: bool = False) -> Collection[str]:
    """Return the names of the parameters, or of those that must be given; none if they are not known, as in C code."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return ()
    fixed = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [one.name for one in fixed if not required or one.default is one.empty]
