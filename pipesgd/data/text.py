"""Text as bytes: the source of Python's standard library, or any files, cut into windows of consecutive bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path, PurePath

import numpy as np
import torch

from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.errors import DatasetError

SEPARATOR = b"\0"
"""Byte between two files, which none of them contains."""

NOT_TAKEN = ("site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data")
"""Folders of the standard library that are left out: other people's packages; tests, which not every machine has; and
the manual, a single file as large as half of the test text would be."""

MADE_BY_THE_BUILD = ("_sysconfigdata", "config-")
"""Prefixes of names in the standard library that hold folders and flags of the machine which built Python."""


class TextWindows(BatchedDataset):
    """Windows of ``context + 1`` consecutive bytes, none of which overlap; bytes left over at the end are dropped.

    The inputs of a sample are the first ``context`` bytes of its window, and its labels are the last ``context``: the
    next byte at every position. Both are int64 (B, context), 0 to 255.
    """

    def __init__(self, text: bytes, *, context: int) -> None:
        assert context >= 1
        samples = len(text) // (context + 1)
        self._windows = torch.from_numpy(
            np.frombuffer(text, np.uint8, count=samples * (context + 1)).copy().reshape(samples, context + 1)
        )

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        windows = self._windows[indices].long()  # (B, context + 1)
        return windows[:, :-1], windows[:, 1:]


def read_text(name: str) -> tuple[bytes, bytes]:
    """Return the text to train on and the text to test on.

    ``name`` is ``python-stdlib``, the source files of the Python that runs without tests and packages; or ``text:`` and
    a path, to a folder (all files in it except hidden ones) or to a single file. A tenth of the files is for testing,
    or the last tenth of a single one.

    Raises ``DatasetError`` if there is no file, or one that cannot be read or is not text.
    """
    try:
        return _standard_library() if name == "python-stdlib" else _files(Path(name.removeprefix("text:")))
    except OSError as failure:
        raise DatasetError(f"{failure.filename} must be readable; got {failure.strerror}") from None


def _standard_library() -> tuple[bytes, bytes]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in folder.rglob("*.py") if _belongs(path.relative_to(folder))]
    if not paths:
        raise DatasetError(f"python-stdlib must be in {folder} as .py files; got none")
    return _split(folder, paths)


def _files(path: Path) -> tuple[bytes, bytes]:
    if path.is_file():
        return _cut(_read(path))
    if not path.is_dir():
        raise DatasetError(f"text:PATH must name a text file or a folder of them; got {path}, which does not exist")
    paths = [
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not paths:
        raise DatasetError(f"text:PATH must name a text file or a folder of them; got {path}, a folder without files")
    return _cut(_read(paths[0])) if len(paths) == 1 else _split(path, paths)


def _belongs(path: PurePath) -> bool:
    return not any(part in NOT_TAKEN or part.startswith(MADE_BY_THE_BUILD) for part in path.parts)


def _split(folder: Path, paths: Iterable[Path]) -> tuple[bytes, bytes]:
    """Keep a tenth of the files, rounded up, for testing: those whose names below ``folder`` have the smallest hashes.

    The split is therefore the same on every machine, and neither side is empty.
    """
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    by_hash = sorted(files, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    tested = set(by_hash[: -(-len(files) // 10)])
    train, test = (
        SEPARATOR.join(_read(files[name]) for name in sorted(files) if (name in tested) == is_test)
        for is_test in (False, True)
    )
    return train, test


def _cut(text: bytes) -> tuple[bytes, bytes]:
    """Return the first nine tenths of a single file, and the rest for testing."""
    train = len(text) * 9 // 10
    return text[:train], text[train:]


def _read(path: Path) -> bytes:
    text = path.read_bytes()
    if SEPARATOR in text:
        raise DatasetError(f"{path} must be a text file; got one with a zero byte")
    return text
