"""A lock on a folder, held for as long as a job uses it: no second job may resume or overwrite it meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import time
from pathlib import Path

from pipesgd.errors import UserInputError, warn

LOCK_FILE = ".lock"
PATIENCE_SECONDS = 1.0
"""How long a lock that somebody holds is tried again: he may only look, or be of this job and about to say so."""

_PAUSE_SECONDS = 0.02
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_CONTENT_BYTES = 256
"""The file always has this length, so that it can be written again on a full disk."""


class FolderLock:
    """Holds ``<folder>/.lock`` until it is released or this process ends.

    Machines with a common disk share the lock: the first one writes the ``job`` into the file, the others find it.
    """

    def __init__(self, folder: Path, job: str):
        """Take the lock.

        Raises:
            UserInputError: another job holds it, or there can be no such file.
        """
        self._descriptor: int | None = None
        path = folder / LOCK_FILE
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as failure:
            raise UserInputError(f"output must be a folder to write to; got {path}: {failure.strerror}") from None
        # A child that is forked (a loader's worker) may outlive this process, and would keep the lock.
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self.release)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _try_to_lock(descriptor, fcntl.LOCK_EX, folder):
            holder = _read_holder(path)
            if holder.get("job") == job:
                return
            if time.monotonic() > deadline:
                self.release()
                raise _in_use(folder, holder)
            time.sleep(_PAUSE_SECONDS)
        words = {"job": job, "process": os.getpid(), "machine": platform.node()}
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.pwrite(descriptor, json.dumps(words).encode().ljust(_CONTENT_BYTES), 0)
            os.fsync(descriptor)  # NFS: else other machines would not see it yet

    def release(self) -> None:
        """Let others have the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def check_unused(folder: Path) -> None:
    """Raise ``UserInputError`` if a job holds the lock of ``folder``. Writes nothing."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # there is none, or taking it will say what is wrong with it
    try:
        if not _try_to_lock(descriptor, fcntl.LOCK_SH, folder):
            raise _in_use(folder, _holder(descriptor))
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int, kind: int, folder: Path) -> bool:
    """Whether nobody else has the lock. Where the file system knows no locks, one warning, and nobody has."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as failure:
        if failure.errno not in _WITHOUT_LOCKS:
            raise UserInputError(
                f"output must be a folder whose {LOCK_FILE} can be locked; got {folder}: {failure.strerror}"
            ) from None
        if kind == fcntl.LOCK_EX:
            warn(f"{folder} is on a file system without locks ({failure.strerror}): do not start a second job in it")
    return True


def _read_holder(path: Path) -> dict[str, object]:
    """Who has the lock. The file is opened anew: NFS shows what another machine has written to it only then."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        return _holder(descriptor)
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(descriptor, _CONTENT_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _in_use(folder: Path, holder: dict[str, object]) -> UserInputError:
    who = f"process {holder.get('process')} on {holder.get('machine')}" if holder else "a job"
    who = who if who.isprintable() else "a job"
    return UserInputError(
        f"output must not be in use; got {folder}, which {who} is writing to "
        f"(if that machine is dead, delete {LOCK_FILE})"
    )
