"""The command ``pipesgd keys new FILE``, which makes the secret of a job. It imports neither torch nor the trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipesgd.checks import check_one_of
from pipesgd.errors import UserInputError
from pipesgd.membership.secret import VARIABLE, new_line
from pipesgd.process import answer

HELP = f"""usage: pipesgd keys new FILE

Makes the secret of a job, a file that only you can read. Copy it to every
machine (scp keeps it private), and name it there with --secret-file FILE or
{VARIABLE}. Who has it is a rank of the job; ranks without it are
refused."""


def main(argv: Sequence[str], program: str = "pipesgd") -> int:
    """Run ``keys new`` and return its exit code: 2 after a line on stderr if the words are wrong."""
    words = list(argv[1:])
    if not words or {"-h", "--help"} & set(words):
        return answer(HELP)
    try:
        check_one_of("keys", words[0], ["new"])
        if len(words) != 2 or not words[1] or words[1].startswith("-"):
            raise UserInputError(f"keys new must be given the name of one new file; got {' '.join(words[1:])!r}")
        return answer(make(Path(words[1])))
    except UserInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def make(path: Path) -> str:
    """Write a new secret to ``path``, and return a line that says so.

    Raises:
        UserInputError: there is a file, or none can be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserInputError(f"FILE must not exist yet, since a running job may use its secret; got {path}") from None
    except OSError as problem:
        raise UserInputError(f"FILE must be one that can be written; got {path} ({problem.strerror})") from None
    with os.fdopen(file, "w", encoding="ascii") as stream:
        stream.write(new_line())
    return f"{path}: a new secret; copy it to all machines, and name it with --secret-file or {VARIABLE}"
