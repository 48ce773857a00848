"""The command ``pipesgd keys new FILE``, which makes the secret of a job. It imports neither torch nor the trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipesgd.checks import check_one_of
from pipesgd.errors import UserInputError
from pipesgd.membership.secret import VARIABLE, new_line
from pipesgd.process import answer

HELP = f"""usage: pipesgd keys new [--tls] FILE

Makes the secret of a job, a file that only you can read. Copy it to every
machine (scp -p keeps it private), and name it there with --secret-file FILE or
{VARIABLE}. Who has it is a rank of the job; ranks without it are
refused. With --tls it has a certificate, too, for --transport tls: that needs
the command openssl here, once."""

COMMAND = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", "36500", "-subj", "/CN=pipesgd", "-keyout", "-", "-out", "-"),
)
"""Command that prints a new key and its certificate."""


def main(argv: Sequence[str], program: str = "pipesgd") -> int:
    """Run ``keys new`` and return its exit code: 2 after a line on stderr if the words are wrong."""
    words = list(argv[1:])
    if not words or {"-h", "--help"} & set(words):
        return answer(HELP)
    try:
        check_one_of("keys", words[0], ["new"])
        files = [word for word in words[1:] if word != "--tls"]
        if len(files) != 1 or not files[0] or files[0].startswith("-") or words.count("--tls") > 1:
            raise UserInputError(
                f"keys new must be given the name of one new file, and may have --tls; got {' '.join(words[1:])!r}"
            )
        return answer(make(Path(files[0]), certificate="--tls" in words))
    except UserInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def make(path: Path, *, certificate: bool = False) -> str:
    """Write a new secret, with a certificate if one is asked for, to ``path``; return a line that says so.

    Raises:
        UserInputError: there is a file, or none can be written; or no certificate can be made.
    """
    text = new_line() + (_certificate() if certificate else "")
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserInputError(f"FILE must not exist yet, since a running job may use its secret; got {path}") from None
    except OSError as problem:
        raise UserInputError(f"FILE must be one that can be written; got {path} ({problem.strerror})") from None
    try:
        with os.fdopen(file, "w", encoding="ascii") as stream:
            stream.write(text)
    except OSError as problem:
        Path(path).unlink(missing_ok=True)
        raise UserInputError(f"FILE must be one that can be written; got {path} ({problem.strerror})") from None
    what = "a new secret and a certificate" if certificate else "a new secret"
    return f"{path}: {what}; copy it to all machines, and name it with --secret-file or {VARIABLE}"


def _certificate() -> str:
    """Return a new key and its certificate, as PEM."""
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        said = problem.stderr.strip().splitlines() if isinstance(problem, subprocess.CalledProcessError) else []
        reason = said[-1] if said else str(problem)
        raise UserInputError(f"openssl must be installed where a certificate is made; got {reason!r}") from None
    return done.stdout
