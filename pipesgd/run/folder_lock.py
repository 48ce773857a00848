"""A lock on a folder, held while a job uses it, so that no second job can resume or overwrite it."""

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
"""Seconds for which a held lock is tried again: its holder may only be checking, or be about to name this same job."""

_PAUSE_SECONDS = 0.02
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_CONTENT_BYTES = 256
"""Length of the lock file in bytes, always the same, so that it can be written again on a full disk."""


class FolderInUseError(UserInputError):
    """Another job uses the folder."""


class FolderLock:
    """A lock on ``<folder>/.lock`` that ``job`` holds, once it is taken, until it is released or this process ends.

    Machines with a common disk share the lock: the first one writes the ``job`` into the file, where others find it.
    """

    def __init__(self, folder: Path, job: str):
        self._folder, self._job = folder, job
        self.is_held = False
        """True while this process holds the lock, which another one of this job may do for it."""
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock, also in place of another process of this job, which has ended.

        Raises:
            FolderInUseError: another job holds the lock.
            UserInputError: its file cannot be created or locked.
        """
        if self.is_held:
            return
        folder, path = self._folder, self._folder / LOCK_FILE
        descriptor = self._open(path) if self._descriptor is None else self._descriptor
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _try_to_lock(descriptor, fcntl.LOCK_EX, folder):
            holder = _read_holder(path)
            if holder.get("job") == self._job:
                return
            if time.monotonic() > deadline:
                self.release()
                raise _in_use(folder, holder)
            time.sleep(_PAUSE_SECONDS)
        self.is_held = True
        words = {"job": self._job, "process": os.getpid(), "machine": platform.node()}
        with contextlib.suppress(OSError):  # if the disk is full, the lock still holds
            os.pwrite(descriptor, json.dumps(words).encode().ljust(_CONTENT_BYTES), 0)
            os.fsync(descriptor)  # else other machines would not see it yet on NFS

    def _open(self, path: Path) -> int:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as failure:
            raise UserInputError(f"output must be a folder to write to; got {path}: {failure.strerror}") from None
        # A forked child (a loader's worker) may outlive this process, and would keep the lock.
        os.register_at_fork(after_in_child=self.release)
        return self._descriptor

    def release(self) -> None:
        """Release the lock, so that others can take the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self.is_held = None, False


def check_unused(folder: Path) -> None:
    """Raise ``UserInputError`` if a job holds the lock of ``folder``. Writes nothing."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # there is no lock, or taking it will report what is wrong with it
    try:
        if not _try_to_lock(descriptor, fcntl.LOCK_SH, folder):
            raise _in_use(folder, _holder(descriptor))
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int, kind: int, folder: Path) -> bool:
    """Return True unless somebody else has the lock. If the file system has no locks, warn and return True."""
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
    """Return who has the lock. The file is opened again, since NFS shows other machines' writes only then."""
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


def _in_use(folder: Path, holder: dict[str, object]) -> FolderInUseError:
    who = f"process {holder.get('process')} on {holder.get('machine')}" if holder else "a job"
    who = who if who.isprintable() else "a job"
    return FolderInUseError(
        f"output must not be in use; got {folder}, which {who} is writing to "
        f"(if that machine is dead, delete {LOCK_FILE})"
    )
