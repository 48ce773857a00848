"""The secret of a job: a file of its own on each machine, by which ranks know each other.

``pipesgd keys new`` writes it. Whoever can read it is a rank of the job, so it must be readable by its owner alone.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from pipesgd.errors import UserInputError

VARIABLE = "PIPESGD_SECRET_FILE"
"""Variable that names the file where no option does."""

HOW_TO_MAKE = "pipesgd keys new job.key"
HOW_TO_MAKE_TLS = "pipesgd keys new --tls job.key"

SECRET_BYTES = 32
LARGEST_FILE = 1 << 16
"""Bytes of the largest file that is read."""

_FIRST_LINE = re.compile(rb"[0-9a-f]{64}\r?\n?")


@dataclass(frozen=True)
class Secret:
    """The secret of a job, and the file that it is from."""

    path: Path
    _bytes: bytes

    def __repr__(self) -> str:
        return f"Secret({str(self.path)!r})"  # its bytes belong into no message

    def key(self, purpose: str) -> bytes:
        """Return a key of 32 bytes for this purpose alone."""
        return hmac.digest(self._bytes, purpose.encode(), hashlib.sha256)


def job_secret(path: str | Path | None = None) -> Secret | None:
    """Return the secret in the file ``path``, by default in that which ``VARIABLE`` names; None if neither is given.

    Raises:
        UserInputError: the file cannot be read, can be read by others, or holds no secret.
    """
    source = "secret-file"
    if path is None:
        source, path = VARIABLE, os.environ.get(VARIABLE, "")
    return Secret(Path(path), _read(source, Path(path))) if str(path) else None


def new_line() -> str:
    """Return a new secret as the first line of its file."""
    return secrets.token_hex(SECRET_BYTES) + "\n"


def _read(source: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserInputError(f"{source} must be a file that {HOW_TO_MAKE!r} has made; got {path}, no file")
            if found.st_mode & 0o077:
                raise UserInputError(
                    f"{source} must be readable by its owner alone (chmod 600 {path}); got mode "
                    f"{stat.S_IMODE(found.st_mode):04o}"
                )
            line = file.read(LARGEST_FILE).partition(b"-----BEGIN")[0]
    except (OSError, ValueError) as problem:
        if isinstance(problem, UserInputError):
            raise
        reason = problem.strerror if isinstance(problem, OSError) else problem
        text = f"{source} must be a file that can be read; got {path} ({reason}). {HOW_TO_MAKE!r} makes one"
        raise UserInputError(text) from None
    if not _FIRST_LINE.fullmatch(line):
        raise UserInputError(
            f"{source} must hold a secret of {SECRET_BYTES} bytes, as {HOW_TO_MAKE!r} makes one; got another file: "
            f"{path}"
        )
    return bytes.fromhex(line.decode())
