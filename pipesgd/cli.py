"""Parsing of a command's arguments: from those after ``-m pipesgd.train`` to a ``TrainConfig``, for instance.

tyro turns the dataclasses of config.py into options. A ``--config`` file is a TOML table of the same
options; it is put in front of the arguments, and an option on the command line wins.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import inspect
import io
import itertools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, cast, get_args, get_origin

import tyro

from pipesgd import __version__
from pipesgd.checks import did_you_mean
from pipesgd.codecs.flat import CompressionConfig
from pipesgd.config import AUTO_OPTIONS, TrainConfig, sections_of
from pipesgd.errors import UserInputError
from pipesgd.options import check_words, dashed, types_in_words
from pipesgd.process import answer, own_rank
from pipesgd.sections import AUTO

CONFIG_HELP = """
--config FILE reads options from a TOML file, one `name = value` a line, as
--dry-run prints them; options on the command line win. torchrun's own options
stand before -m. --version prints the versions.
"""

FOR_ONE_RUN = ("dry-run", "overwrite", "resume")
"""Options for a single run. The file that --dry-run prints leaves them out, so that reading it back trains."""

OTHER_NAMES = {"learning-rate": "lr", "bs": "batch-size", "output-dir": "output", "max-steps": "iterations"}
"""Names that other trainers use for our options, where the spelling alone gives no hint."""

WORKLOAD = ("dataset", "data-dir", "batch-size", "model", "hidden-sizes", "optimizer")
BASIC = {
    "train": (
        *WORKLOAD,
        *("lr", "epochs", "iterations", "width", "codec", "all-reduce", "cluster", "device"),
        *("output", "resume", "overwrite"),
    ),
    "calibrate": (*WORKLOAD, "out", "overwrite", "seconds", "codecs", "all-reduces", "servers"),
}
"""Options that ``--help`` shows, by command; ``--help-all`` shows all of them."""

NARROWEST = 60
"""Fewest columns that help is laid out for."""

TYRO = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff)
"""Markers for tyro: flags without a --no-..., options without the name of their section, and no help from comments, of
which there is none: to look for it would take most of the time of parsing."""


class Config(Protocol):
    """A dataclass whose fields are sections of options."""

    def options(self) -> dict[str, Any]:
        """Return every option by its name on the command line, as a JSON value."""


C = TypeVar("C", bound=Config)


def parse(argv: Sequence[str]) -> TrainConfig:
    """Return the training that ``argv`` ask for; see ``parse_as``."""
    rest, auto = _take_autos(_prepared(argv, TrainConfig().options()))
    config = parse_as(TrainConfig, "train", rest)
    if "width" in auto and _value_of("buckets", rest) is None:
        auto = tuple(name for name in AUTO_OPTIONS if name in (*auto, "buckets"))  # width 1 is compared at its best
    return dataclasses.replace(config, planning=dataclasses.replace(config.planning, auto=auto)) if auto else config


def parse_as(kind: type[C], command: str, argv: Sequence[str]) -> C:
    """Return the configuration of ``pipesgd.<command>`` that ``argv`` ask for.

    Raises:
        HelpRequested: ``--help`` or ``--version`` is among the arguments.
        UserInputError: an argument is wrong; the message is one line.
    """
    if "--version" in argv:
        raise HelpRequested(version())
    defaults = kind()
    argv = _prepared(argv, defaults.options())
    for name, everything in (("-h", False), ("--help", False), ("--help-all", True)):
        if name in argv:
            raise HelpRequested(_help(kind, command, everything=everything))
    check_words(argv, sections_of(defaults), or_auto=AUTO_OPTIONS)
    given = {dashed(argument[2:].partition("=")[0]) for argument in argv if argument.startswith("--")}
    out, err = io.StringIO(), io.StringIO()
    try:
        # tyro prints a box and exits, which every rank would do. Rank 0 should print one line instead.
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            read = tyro.cli(
                _in_words(defaults, given),
                args=argv,
                prog=_program(command),
                config=TYRO,
            )
    except SystemExit:
        raise UserInputError(_one_line(err.getvalue() or out.getvalue())) from None
    sections = {
        name: type(section)(**vars(getattr(read, name))) if hasattr(read, name) else section
        for name, section in vars(defaults).items()
    }
    config = kind(**sections)
    _check_digits(argv, config)
    return config


def _in_words(defaults: Config, given: Collection[str]) -> type[Any]:
    """Return a dataclass like that of ``defaults`` whose sections hold the options ``given``, with unchecked types.

    Those that are not given keep their defaults: tyro would take most of the time of parsing to look at them.
    """
    fields = []
    for name, default in vars(defaults).items():
        kind: Any = type(default)
        items = [copy.copy(item) for item in dataclasses.fields(kind) if dashed(item.name) in given]
        if items:
            options = [(item.name, types_in_words(kind)[item.name], item) for item in items]
            section = dataclasses.make_dataclass(kind.__name__, options, kw_only=True)
            fields.append((name, section, dataclasses.field(default_factory=section)))
    return dataclasses.make_dataclass(type(defaults).__name__, fields)


class HelpRequested(Exception):  # noqa: N818 (a request, not an error)
    """A request for the text of ``--help`` or ``--version``, which is the message."""


def answer_questions(parse_argv: Callable[[Sequence[str]], object], argv: Sequence[str]) -> None:
    """Print what ``--help`` or ``--version`` asks for, on rank 0, and exit; return if ``argv`` hold neither.

    A command calls this before it imports torch, which takes seconds. Wrong arguments are left to the run, whose ranks
    report them together.
    """
    if not {"--help", "-h", "--help-all", "--version"} & set(argv):
        return
    try:
        parse_argv(argv)
    except HelpRequested as request:
        sys.exit(answer(str(request)) if own_rank() == "0" else 0)
    except UserInputError:
        return


def _program(command: str) -> str:
    return f"torchrun [options of torchrun] -m pipesgd.{command}"


def version() -> str:
    """Return the versions of this package, of torch and of Python."""
    torch = importlib.metadata.version("torch")  # importing it takes seconds
    return f"pipesgd {__version__} (torch {torch}, Python {platform.python_version()})"


@functools.cache
def help_texts(section: type) -> dict[str, str]:
    """Return the docstring under each field of the dataclass ``section``, on one line."""
    body = ast.parse(inspect.getsource(section)).body[0]
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


def _help(kind: type[Config], command: str, *, everything: bool) -> str:
    """Return the help text of a command: its options by section, those in ``BASIC`` or ``everything``."""
    names = kind().options() if everything else BASIC[command]
    shown = dataclasses.make_dataclass(
        kind.__name__,
        [
            (item.name, section, dataclasses.field(default_factory=section))
            for item in dataclasses.fields(cast(Any, kind))
            if dataclasses.fields(section := _shown(type(getattr(kind(), item.name)), names))
        ],
        namespace={"__doc__": kind.__doc__},
    )
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit), _wide_enough():
        tyro.cli(shown, args=["--help"], prog=_program(command), config=TYRO)
    rest = "" if everything else f"\n--help-all lists all {len(kind().options())} options.\n"
    # tyro joins the lines of the docstring, and prints a section's docstring below its name, which says the same.
    doc = inspect.cleandoc(kind.__doc__ or "")
    text = out.getvalue().replace(" ".join(doc.partition("\n\n")[2].split()), doc.partition("\n\n")[2], 1)
    text = re.sub(
        r"^ \w+ options *\n( -+ *\n)((?:  .*\n)+?)  -+ *\n",
        lambda found: re.sub(r"^ ", "", found[2], flags=re.MULTILINE) + found[1],
        text,
        flags=re.MULTILINE,
    )
    return text + rest + CONFIG_HELP


@contextlib.contextmanager
def _wide_enough() -> Iterator[None]:
    """Make tyro lay out its help for at least ``NARROWEST`` columns; with very few it would never end."""
    given = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(max(shutil.get_terminal_size().columns, NARROWEST))
    try:
        yield
    finally:
        if given is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = given


def _shown(section: Any, names: Collection[str]) -> type[Any]:
    """Return the dataclass ``section`` with the fields among ``names``, as ``--help`` shows them."""
    texts, hints = help_texts(section), types_in_words(section)
    fields = []
    for item in dataclasses.fields(section):
        if dashed(item.name) in names:
            unset = item.default is None or item.default is False  # Python's words tell a user nothing
            shown = tyro.conf.arg(
                help=texts[item.name],
                metavar=_metavar(item, hints[item.name]),
                help_behavior_hint="" if unset else None,
            )
            fields.append((item.name, Annotated[hints[item.name], shown], dataclasses.field(default=item.default)))
    return dataclasses.make_dataclass(section.__name__, fields, kw_only=True, namespace={"__doc__": section.__doc__})


def _metavar(item: dataclasses.Field[Any], hint: Any) -> str | None:
    """Return what follows an option in ``--help``: its choices, or the kind of its value; None to let tyro say it."""
    kinds = [kind for kind in (*get_args(hint), hint) if kind in (int, float, str, Path)]
    if get_origin(hint) is tuple or not kinds:
        return None
    choices = "|".join(item.metadata.get("choices", ())) or kinds[0].__name__.upper()
    return f"{choices}|{AUTO}" if dashed(item.name) in AUTO_OPTIONS else choices


def as_toml(config: TrainConfig) -> str:
    """Return ``config`` as a file that ``--config`` reads back; options without a value are commented out.

    Options in ``FOR_ONE_RUN`` are left out.
    """
    lines = []
    for name, value in config.options().items():
        if name in FOR_ONE_RUN:
            continue
        # Strings, numbers, booleans and lists of them are written alike in JSON and TOML.
        lines.append(f"# {name} =" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def secret_file(argv: Sequence[str]) -> str | None:
    """Return the file of ``--secret-file``, which is read before the ranks meet; None if it is not given.

    Whatever is wrong with other arguments is left to the run, whose ranks report it together.
    """
    with contextlib.suppress(UserInputError):
        argv = _expand_config_file(list(argv), TrainConfig().options())
    return _value_of("secret-file", list(argv))


def _prepared(argv: Sequence[str], defaults: dict[str, Any]) -> list[str]:
    """Return the arguments with a --config file in front, all names of which are in ``defaults``."""
    prepared = _expand_config_file(list(argv), defaults)
    _check_names(prepared, defaults)
    return prepared


def _expand_config_file(argv: list[str], defaults: dict[str, Any]) -> list[str]:
    for index, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name != "--config":
            continue
        if not equals:
            if index + 1 == len(argv):
                raise UserInputError("config must be a TOML file; got nothing after --config")
            value = argv[index + 1]
        rest = argv[:index] + argv[index + (1 if equals else 2) :]
        given = {dashed(other.partition("=")[0]) for other in rest if other.startswith("--")}
        options = _read_options(Path(value), defaults)
        return [w for option in options if option[0] not in given for w in option] + rest
    return argv


def _read_options(path: Path, defaults: dict[str, Any]) -> list[list[str]]:
    """Return the options of a TOML file, each as the arguments that set it on the command line."""
    from pipesgd.toml_file import read_toml

    options = []
    for key, value in read_toml("config", path).items():
        name = dashed(key)
        if name not in defaults:
            raise UserInputError(
                f"every key in {path} must be an option; got {key!r}{_did_you_mean(name, list(defaults))}"
            )
        try:
            is_flag = isinstance(defaults[name], bool)
            options.append(_as_words(name, value, is_flag=is_flag))
        except (ValueError, RecursionError) as error:
            if isinstance(error, UserInputError):
                raise
            raise UserInputError(f"config must be a TOML file; got {path}: {key} is too long, or nested") from None
    return [option for option in options if option]


def _as_words(name: str, value: Any, *, is_flag: bool) -> list[str]:
    if is_flag or isinstance(value, bool):
        if not (is_flag and isinstance(value, bool)):
            expected = "true or false" if is_flag else "a value, not true or false"
            raise UserInputError(f"{name} must be {expected} in a config file; got {json.dumps(value, default=str)}")
        return [f"--{name}"] if value else []
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict) for item in items):
        raise UserInputError(f"{name} must be a value or a list of them in a config file, and no table; got {value}")
    for item in items:
        if isinstance(item, str) and (item.startswith("--") or item == "-h"):  # else it would be heeded as one
            raise UserInputError(f"{name} must be a value, and no option, in a config file; got {item!r}")
    # As the system gives the arguments: where it does not write UTF-8, a path has other characters.
    return [f"--{name}", *(os.fsdecode(str(item).encode()) for item in items)]


def _check_names(argv: list[str], defaults: dict[str, Any]) -> None:
    for argument in argv:
        if "\0" in argument:
            raise UserInputError(f"options must not hold a NUL character; got {argument!r}")
    known = [*defaults, "help", "help-all", "version"]
    names = [dashed(argument[2:].partition("=")[0]) for argument in argv if argument.startswith("--")]
    for name in names:
        if name not in known:
            raise UserInputError(
                f"every option must be one that --help-all lists; got --{name}{_did_you_mean(name, known)}"
            )
        if names.count(name) > 1:  # do not guess which of the values was meant
            raise UserInputError(f"{name} must be given once; got it {names.count(name)} times")


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    other = OTHER_NAMES.get(name)
    return f" (did you mean {other}?)" if other in known else did_you_mean(name, known)


def _check_digits(argv: list[str], config: Config) -> None:
    """Refuse numbers in the digits of other scripts, which Python reads but hardly anybody means."""
    texts = [value for value in config.options().values() if isinstance(value, str)]
    for argument in argv:
        value = argument.partition("=")[2] if argument.startswith("--") else argument
        if not value.isascii() and value not in texts and _is_number(value):
            raise UserInputError(f"numbers must be written in the digits 0 to 9; got {value!r}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _take_autos(argv: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the arguments without those that leave an option to the timing model, and the names of these options.

    A value that is nearly ``AUTO`` is refused here, since no later check would guess what was meant.
    """
    rest, auto = [], []
    queue = collections.deque(argv)
    while queue:
        argument = queue.popleft()
        name, equals, value = argument.partition("=")
        name = dashed(name[2:]) if name.startswith("--") else ""
        if name in AUTO_OPTIONS and (equals or queue):
            value = value if equals else queue[0]
            if value == AUTO:
                auto.append(name)
                if not equals:
                    queue.popleft()
                continue
            if hint := did_you_mean(value, [AUTO]):
                raise UserInputError(f"{name} must be auto, or a value that --help-all lists; got {value!r}{hint}")
        rest.append(argument)
    if "codec" in auto:
        for item in dataclasses.fields(CompressionConfig):
            option = dashed(item.name)
            given = _value_of(option, rest)
            if given not in (None, str(item.default)):  # a --config file may spell out the default
                raise UserInputError(
                    f"{option} must be left out with --codec auto, which chooses codecs as they are; got {given}"
                )
    return rest, tuple(sorted(auto, key=AUTO_OPTIONS.index))


def _value_of(option: str, argv: list[str]) -> str | None:
    """Return the first argument after this option; None if the option is not given."""
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name.startswith("--") and dashed(name[2:]) == option:
            return value if equals else following
    return None


def _one_line(box: str) -> str:
    """Return the message of tyro's error box, which is a title, a rule, the message, a rule, and hints."""
    lines = [line.strip("│ ") for line in box.splitlines()]
    parts = [" ".join(group) for is_rule, group in itertools.groupby(lines, _is_rule) if not is_rule]
    return re.sub(r"^Error parsing \w+: ", "", (parts[1] if len(parts) > 1 else parts[0]).strip())


def _is_rule(line: str) -> bool:
    return len(line) > 1 and set(line) <= set("-─")
