"""Content of files in memory that all processes of a machine share, also where the files are compressed."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import secrets
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipesgd.errors import DatasetError, warn

LARGEST_BYTES = 1 << 30
"""Most bytes of a file's content: the largest data sets of these formats have half. A .gz file can hold any amount."""

SMALLEST_SHARED = 4 << 20
"""Fewest bytes of unpacked content that are worth a file: a process needs far more itself."""

CRC_BYTES = 4
"""Bytes at the end of an unpacked file: the CRC-32 of its content, big-endian."""

Bytes = NDArray[np.uint8]


def read_mapped(path: Path) -> Bytes:
    """Return the content of ``path``, unpacked if it is a ``.gz``, as writable memory (n,).

    The system keeps one copy of a mapped file for all processes; what a process writes is seen by it alone. A ``.gz``
    is unpacked into a file in ``cache_folder()`` by the first process that needs it, unless its content is small. The
    file must not be shortened while it is mapped: the system ends a process that reads what is no longer there.

    Raises:
        DatasetError: the file cannot be read, or is too large.
    """
    try:
        content = _unpacked(path) if path.suffix == ".gz" else _mapped(path)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} must be readable and complete; got {type(error).__name__}: {error}") from None
    if len(content) > LARGEST_BYTES:
        raise DatasetError(f"{path} must hold at most {LARGEST_BYTES:,} bytes, unpacked; got more")
    return content


def cache_folder() -> Path:
    """Return the folder of unpacked files, which may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "pipesgd")


def _mapped(path: Path) -> Bytes:
    if path.stat().st_size == 0:  # which no system can map
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, mode="c")


def _unpacked(path: Path) -> Bytes:
    state = path.stat()
    name = hashlib.sha256(os.fsencode(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}")).hexdigest()
    if (shared := _intact(name)) is not None:
        return shared
    content = _unzip(path)
    if SMALLEST_SHARED <= len(content) <= LARGEST_BYTES:
        try:
            _publish(name, content)
            shared = _intact(name)
        except (OSError, RuntimeError) as failure:  # no home, say, or no room in it
            warn(f"every process holds its own copy of {path.name}: it could not be unpacked into a file ({failure})")
    return np.frombuffer(content, np.uint8) if shared is None else shared


def _unzip(path: Path) -> bytearray:
    """Unpack a ``.gz``, but not much more than ``LARGEST_BYTES`` of it, into memory that may be written."""
    content = bytearray()
    with gzip.open(path) as file:
        while len(content) <= LARGEST_BYTES and (piece := file.read(1 << 20)):
            content += piece
    return content


def _publish(name: str, content: bytearray) -> None:
    """Make ``content`` the unpacked file ``name``, whole, unless another process was faster."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.write(_crc(content))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, folder / name)  # unlike a rename, this keeps what others have mapped already
    finally:
        temporary.unlink(missing_ok=True)


def _intact(name: str) -> Bytes | None:
    """Return the content of the unpacked file ``name``; None if it is not there, or damaged, and then it is removed."""
    try:
        path = cache_folder() / name
        content = _mapped(path)
        if bytes(content[-CRC_BYTES:]) == _crc(content[:-CRC_BYTES].data):
            return content[:-CRC_BYTES]
        path.unlink()
    except (OSError, RuntimeError):
        pass
    return None


def _crc(content: bytearray | memoryview) -> bytes:
    return zlib.crc32(content).to_bytes(CRC_BYTES, "big")
