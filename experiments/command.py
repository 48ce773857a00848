"""Shared parts of the commands of all experiments: options, progress, tables, and starting torchrun."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from experiments.results import RESULTS, provenance
from experiments.testbed import InvalidInputError, TestbedFailedError
from pipesgd.checks import check_one_of
from pipesgd.cli import HelpRequested
from pipesgd.errors import RunError, UserInputError
from pipesgd.exit import run_and_exit
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

LINE_SECONDS = 10.0
"""Seconds between lines of progress if the output is not a terminal."""
LOG_WIDTH = 120
"""Columns of text if the output is not a terminal; a table that needs more is wider."""
MOST_WIDTH = 1000
"""Columns of the widest table."""
BAR_SECONDS = 0.5
"""Seconds between redraws of the bar on a terminal, made between timed calls: no thread draws during one."""


class Parser(argparse.ArgumentParser):
    """A parser that raises exceptions that ranks can agree on, where argparse would have every rank print and exit."""

    def print_help(self, file: object = None) -> NoReturn:
        raise HelpRequested(self.format_help())

    def error(self, message: str) -> NoReturn:
        raise UserInputError(message.removeprefix("argument "))


def bare_parser(prog: str, description: str | None) -> Parser:
    """Return a parser without options, whose help has the lines of ``description`` as they are."""
    return Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parser(name: str, description: str | None) -> Parser:
    """Return a parser with the options that every experiment has."""
    options = bare_parser(f"{{torchrun ... | python}} -m experiments.{name}", description)
    options.add_argument("--quick", action="store_true", help="a short run, to see that it works; needs --output")
    options.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="folder of the results (experiments/results)"
    )
    return options


def parse(options: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse ``words``; the ``output`` of the result is a folder to write to.

    Raises:
        HelpRequested: ``--help`` is among ``words``.
        UserInputError: a value is wrong, or a part of the experiment would overwrite the results of the whole.
    """
    arguments = options.parse_args(words)
    folder: Path = arguments.output
    for option in ("quick", "only"):
        if getattr(arguments, option, None) and is_published(folder):
            raise UserInputError(f"--output must name another folder than that of the full results with --{option}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise UserInputError(f"--output must be a folder to write to; got {folder}: {failure.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserInputError(f"--output must be a folder to write to; got {folder}")
    return arguments


def is_published(folder: Path) -> bool:
    """Return True if this is the folder of the full results, however it is written."""
    return folder.resolve() == RESULTS


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number of at least ``least``."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 19) or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}; got {text!r}")
        return int(text)

    return number


def check_each_once(arguments: argparse.Namespace, known: Mapping[str, Iterable[str] | None]) -> None:
    """Raise ``UserInputError`` if an option in ``known`` holds one value twice, or one that is not among its choices.

    With None for the choices, all values are right.
    """
    for option, choices in known.items():
        given, name = getattr(arguments, option) or [], option.replace("_", "-")
        for value in given:
            if choices is not None:
                check_one_of(f"--{name}", value, list(choices))
            if given.count(value) > 1:
                raise UserInputError(f"--{name} must name each once; got {value!r} twice")


def check_alone(name: str, by_torchrun: bool, reason: str) -> None:
    """Raise ``UserInputError`` if torchrun started this; ``reason`` says why it must not."""
    if by_torchrun:
        raise UserInputError(f"{name} must be run without torchrun: {reason}")


def say_kept(console: Console, planned: int, missing: int) -> None:
    """Say how many of the planned runs need not be made again."""
    if missing < planned:
        say(console, f"{planned - missing} of {planned} runs are there; --fresh makes them again")


@contextlib.contextmanager
def testbed_errors_as_ours() -> Iterator[None]:
    """Turn exceptions of the testbed, which knows nothing of pipesgd, into those that ranks agree on and exit with."""
    try:
        yield
    except InvalidInputError as failure:
        raise UserInputError(str(failure)) from None
    except TestbedFailedError as failure:
        raise RunError(str(failure)) from None


def run(experiment: Callable[[Sequence[str], Ranks, Console], None]) -> NoReturn:
    """Run ``experiment(words, ranks, console)`` on torchrun's ranks, or on one; exit as training does."""
    provenance()  # records the code as it is now, even if it is edited before the end
    run_and_exit(testbed_errors_as_ours()(experiment), sys.argv[1:])


def torchrun(world_size: int, *words: str) -> list[str]:
    """Return the arguments that start ``world_size`` ranks on this machine, at a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", *words]


@contextlib.contextmanager
def progress(console: Console, label: str, total: float, *, show: bool = True) -> Iterator[Callable[..., None]]:
    """Show how much of ``total`` is done and the time left: a bar on a terminal, else a line now and then.

    Yields a function to be called as ``advance(amount, what_is_being_done)``, with ``left=`` where the amount that is
    left is not what it was before, less what was done.
    """
    begin = time.perf_counter()
    spoke, done = begin, 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"))
    bar = Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not (show and console.is_terminal)
    )
    task = bar.add_task(label, total=total, what="")

    def advance(amount: float, what: str, *, left: float | None = None) -> None:
        nonlocal done, spoke, total
        now = time.perf_counter()
        done += amount
        total = total if left is None else done + left
        if not show or now - spoke < (BAR_SECONDS if console.is_terminal else LINE_SECONDS):
            return
        spoke = now
        time_left = timedelta(seconds=round((now - begin) / done * max(total - done, 0.0)))
        bar.update(task, completed=done, total=total, what=f"{what}, {time_left} left", refresh=True)
        if not console.is_terminal:
            say(console, f"{label}: {what}, {done / total:.0%} done, {time_left} left")

    with bar:
        yield advance


def text_of(row: Mapping[str, Any], name: str, form: str, factor: float = 1.0, *, missing: str = "-") -> str:
    """Return the number in a column of ``row``, times ``factor`` and formatted; ``missing`` for None."""
    return missing if row[name] is None else format(factor * row[name], form)


def show(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table whose column heads are the keys of ``rows``."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    width = None
    if not sys.stdout.isatty():
        width = max(LOG_WIDTH, Console(width=MOST_WIDTH).measure(table).maximum)  # a file has no edge to cut numbers at
    Console(width=width).print(table)
