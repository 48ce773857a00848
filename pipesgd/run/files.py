"""Files that are written whole or not at all, never through a link; and files that are appended to despite failures."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from io import BufferedRandom
from pathlib import Path

from pipesgd.errors import warn


def write_atomically(path: Path, write: Callable[[BufferedRandom], object]) -> None:
    """Make ``path`` the file that ``write`` fills. If anything fails, the old file stays, and nothing of the new one.

    The content goes to a new file in the same folder, whose name nobody can predict, and which replaces ``path`` once
    it is on the disk. A link at ``path`` is replaced, not followed.

    Raises:
        OSError: the file could not be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Make ``path`` a file that holds ``text``; see ``write_atomically``."""
    write_atomically(path, lambda file: file.write(text.encode()))


def sync_folder(folder: Path) -> None:
    """Write the file names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(failure: OSError, path: Path) -> str:
    """Describe ``failure`` briefly: the file, or ``path`` if the system names none, and what is wrong."""
    return f"{failure.filename or path}: {failure.strerror or failure}"


class Appender:
    """A file that is appended to, and whose failures never end a run.

    Data that cannot be written is kept in memory and tried again with the next write. Only the first failure causes a
    warning. After a failure the file is opened again. A file that was removed is created again, with a warning.
    """

    BUFFERED_BYTES, BUFFERED_SECONDS = 8192, 1.0

    def __init__(self, path: Path):
        self._path = path
        self._waiting = bytearray()
        self._descriptor: int | None = None
        self._warned = False
        self._is_dropped = False
        self._attempted = 0.0
        """Time of the last attempt to write."""

    def write(self, data: bytes) -> None:
        """Append ``data``, now or with a later write."""
        if self._is_dropped:
            return
        self._waiting += data
        if len(self._waiting) >= self.BUFFERED_BYTES or time.monotonic() - self._attempted >= self.BUFFERED_SECONDS:
            self._attempt(sync=False)

    def flush(self) -> None:
        """Write everything to the disk, if possible."""
        self._attempt(sync=True)

    def drop(self) -> None:
        """Forget what is not written yet, and write nothing any more."""
        self._waiting.clear()
        self._close_file()
        self._is_dropped = True

    def close(self) -> None:
        """Write what is left, or warn if that is impossible."""
        self.flush()
        if self._waiting:
            warn(f"{self._path} lacks its last {len(self._waiting)} bytes, which could not be written")
        self._close_file()

    def _close_file(self) -> None:
        """Close the file, if it is open; the next write opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # for instance if a file server no longer knows the file
                os.close(descriptor)

    def _attempt(self, *, sync: bool) -> None:
        if self._is_dropped:
            return
        self._attempted = time.monotonic()
        try:
            if self._descriptor is not None and sync and os.fstat(self._descriptor).st_nlink == 0:
                warn(f"{self._path} was removed; it is created again, without its former content")
                self._close_file()
            if self._descriptor is None:
                self._path.parent.mkdir(exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o666)
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
            if sync:
                os.fsync(self._descriptor)
        except OSError as failure:
            self._close_file()
            if not self._warned:
                self._warned = True
                warn(f"{reason(failure, self._path)}; training continues, and the rest is written as soon as possible")


@contextlib.contextmanager
def note_trouble(trouble: list[str], path: Path) -> Iterator[None]:
    """Add the reason why ``path`` could not be written to ``trouble`` instead of raising it."""
    try:
        yield
    except OSError as failure:
        trouble.append(f"{path} could not be written: {failure.strerror or failure}")
