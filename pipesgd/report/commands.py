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
from pipesgd.report.compare import compare as comparison_of
from pipesgd.report.compare import comparison_page, lines
from pipesgd.report.folder import read_run
from pipesgd.report.page import write_report
from pipesgd.run.files import write_text_atomically
from pipesgd.run.output import REPORT_FILE

PAGES = (".html", ".htm")
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


def compare(argv: Sequence[str], *, program: str) -> int:
    """Print a comparison of runs, and return the exit code: 2 after a line on stderr if there is no run."""
    parser = _Parser(
        prog=f"{program} compare",
        description="Compare runs: at their ends, after equally many samples, and by the options that differ.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="folders of two runs or more")
    parser.add_argument("--output", type=Path, help=f"{OUTPUT_HELP}, with the loss of each run over samples and time")

    def command(words: argparse.Namespace) -> int:
        comparison = comparison_of([read_run(one) for one in words.runs])
        said = lines(comparison)
        if words.output is not None:
            _written(words.output, lambda: write_text_atomically(words.output, comparison_page(comparison)))
            said += f"\nwrote {words.output}"
        return answer(said)

    return _run(parser, argv, command)


def _written(path: Path, write: Callable[[], None]) -> None:
    """Call ``write``, which writes ``path``.

    Raises:
        UserInputError: it cannot be written, or is named as something else, which might be replaced.
    """
    if path.suffix.lower() not in PAGES:
        raise UserInputError(f"output must be a file of HTML, such as {path.stem or 'page'}.html; got {path.name!r}")
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
