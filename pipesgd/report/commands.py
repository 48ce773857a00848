"""The commands ``pipesgd report`` and ``pipesgd compare``, which read what runs have written and train nothing.

pipesgd report runs/a [--output FILE]
pipesgd compare runs/a runs/b [...] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pipesgd.errors import UserInputError
from pipesgd.process import accept_all_text, answer
from pipesgd.report.page import write_report
from pipesgd.run.output import REPORT_FILE

OUTPUT_HELP = "file of HTML to write"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserInputError(f"{message} (see {self.prog} --help)")


def report(argv: Sequence[str], *, program: str) -> int:
    """Write the report of a run, and return the exit code: 2 after a line on stderr if there is no run."""
    parser = _Parser(
        prog=f"{program} report",
        description="Write the report of a run that has ended, or failed, or is still training: one file of HTML.",
    )
    parser.add_argument("run", type=Path, help="folder of the run: the --output of pipesgd.train")
    parser.add_argument("--output", type=Path, help=f"{OUTPUT_HELP}; by default {REPORT_FILE} in the run's folder")

    def command(words: argparse.Namespace) -> int:
        path = words.output or words.run / REPORT_FILE
        _written(path, lambda: write_report(words.run, path))
        return answer(f"wrote {path}")

    return _run(parser, argv, command)


def _written(path: Path, write: Callable[[], None]) -> None:
    """Call ``write``, which writes ``path``.

    Raises:
        UserInputError: it cannot be written.
    """
    try:
        write()
    except OSError as failure:
        raise UserInputError(f"output must be a file that can be written; got {path}: {failure.strerror}") from None


def _run(parser: argparse.ArgumentParser, argv: Sequence[str], command: Callable[[argparse.Namespace], int]) -> int:
    """Call ``command`` with the words that follow the subcommand's name; 2 after one line if something is wrong."""
    accept_all_text()
    try:
        return command(parser.parse_args(argv[1:]))
    except UserInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
