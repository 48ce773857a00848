"""Files of one checkpoint: the state that all ranks share, each rank's own state, and headers that name the writer.

``shared.pt`` and ``rank-<r>.pt`` hold a header with the state. ``save`` is a random name that all ranks agreed on for
this save, so that files of two saves of the same iteration are never taken for one checkpoint. ``rank`` and ``machine``
tell whose file it is; shared.pt has neither, since machines with a common disk must write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import torch

from pipesgd.membership.record import former_ranks
from pipesgd.nested import loadable
from pipesgd.ranks import Ranks
from pipesgd.run.files import reason, write_atomically, write_text_atomically

FORMAT = 4
SHARED = "shared.pt"
_OWN = re.compile(r"rank-(\d+)\.pt")
_HEADER = {"save": str, "iteration": int, "world_size": int, "state": dict}
PRIVATE = 0o700
"""Mode of folders of checkpoints: training data can be partly reconstructed from weights and gradients."""


class UnusableCheckpointError(Exception):
    """The files are not a whole checkpoint of this run; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: the state that all ranks share, and this rank's own."""

    iteration: int
    save: str
    """Random name of the save that wrote the checkpoint."""
    shared: dict[str, Any]
    own: dict[str, Any]
    """State of this rank. Where other ranks wrote the checkpoint, it is that of the former rank that it continues."""
    others: Sequence[dict[str, Any]] = ()
    """States of the other former ranks that this one takes over."""
    world_size: int | None = None
    """Number of the ranks that wrote it; None before that."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Write this rank's part: its own file, and ``shared.pt`` if it is the first rank of its machine.

    Raises:
        OSError: a file could not be written.
    """
    try:
        folder.mkdir(PRIVATE, exist_ok=True)
    except FileNotFoundError:
        folder.parent.mkdir(PRIVATE, parents=True, exist_ok=True)  # one that the user has made keeps its mode
        folder.mkdir(PRIVATE, exist_ok=True)
    header = {
        "format": FORMAT,
        "save": checkpoint.save,
        "iteration": checkpoint.iteration,
        "world_size": ranks.world_size,
    }
    if ranks.local_rank == 0:
        save_atomically(header | {"state": checkpoint.shared}, folder / SHARED)
    own = header | {"rank": ranks.rank, "machine": platform.node(), "state": checkpoint.own}
    save_atomically(own, folder / f"rank-{ranks.rank}.pt")


def read_checkpoint(folder: Path, iteration: int, ranks: Ranks) -> Checkpoint:
    """Read what ``write_checkpoint`` wrote on this rank, or on the former ranks that it takes over.

    Raises:
        UnusableCheckpointError: the files are missing, unreadable, damaged, torn, or not those of these ranks.
    """
    shared = _read(folder / SHARED)
    save, before = shared["save"], shared["world_size"]
    states = []
    for rank in former_ranks(before, ranks.rank, ranks.world_size) or [ranks.rank % before]:
        own = _read(path := folder / f"rank-{rank}.pt")
        for name, expected in (("iteration", iteration), ("world_size", before), ("rank", rank)):
            if own.get(name) != expected:
                raise UnusableCheckpointError(f"{path} is of {name.replace('_', ' ')} {own.get(name)}, not {expected}")
        if save != own["save"]:
            raise UnusableCheckpointError(f"{path} is of another save than {SHARED} in the same folder")
        states.append(own["state"])
    return Checkpoint(iteration, save, shared["state"], states[0], states[1:], before)


def ranks_in(folder: Path) -> list[int]:
    """Return the ranks that have a file in ``folder``; none if it cannot be read."""
    try:
        matches = [_OWN.fullmatch(path.name) for path in folder.iterdir()]
    except OSError:
        return []
    return [int(match[1]) for match in matches if match]


def read_file(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return what ``save_atomically`` wrote to ``path``, a dict that has values of these ``kinds`` by their keys.

    Raises:
        UnusableCheckpointError: the file is missing, unreadable, damaged, or does not hold these.
    """
    if problem := what_is_wrong_with(path):
        raise UnusableCheckpointError(f"{path} is {problem}")
    try:
        with path.open("rb") as file:  # torch itself opens no path that is not UTF-8
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as failure:  # noqa: BLE001 (a damaged or crafted archive raises nearly anything)
        # torch explains at length how to load the file anyway, which nobody should.
        _, _, cause = str(failure).rpartition("WeightsUnpickler error: ")
        cause = re.split(r"\. |\n", cause.strip())[0][:100]
        raise UnusableCheckpointError(f"{path} is no checkpoint ({type(failure).__name__}: {cause})") from None
    if not isinstance(found, dict):
        raise UnusableCheckpointError(f"{path} is no checkpoint of pipesgd")
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise UnusableCheckpointError(f"{path} is no checkpoint of pipesgd: it has no {name}")
    return found


def _read(path: Path) -> dict[str, Any]:
    found = read_file(path, {})
    if found.get("format") != FORMAT or any(type(found.get(name)) is not kind for name, kind in _HEADER.items()):
        raise UnusableCheckpointError(f"{path} is no checkpoint of pipesgd in format {FORMAT}")
    if found["world_size"] < 1:
        raise UnusableCheckpointError(f"{path} is of world size {found['world_size']}")
    return found


def save_atomically(state: Any, path: Path) -> None:
    """Write ``state`` with ``torch.save``, so that ``path`` is the old file or the whole new one, never a part.

    Only the user may read it, whatever the umask says.

    Its checksum is written to ``<path>.sha256`` in the format of sha256sum: torch writes a zip archive, which can be
    changed in ways that neither torch nor the archive's own checksums notice.

    Raises:
        OSError: a file could not be written.
    """
    digest = ""

    def write(file: BufferedRandom) -> None:
        nonlocal digest
        _make_private(file.fileno())  # while it is empty
        torch.save(loadable(state), file)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()

    try:
        write_atomically(path, write)
    except RuntimeError as failure:
        # torch reports that its archive is unfinished, which hides the cause.
        if isinstance(failure.__context__, OSError):
            raise failure.__context__ from None
        raise
    write_text_atomically(checksum_of(path), f"{digest}  {path.name}\n")
    _make_private(checksum_of(path))


def _make_private(file: Path | int) -> None:
    """Let only the user read a file, where the file system has modes."""
    with contextlib.suppress(PermissionError):
        os.chmod(file, 0o600)  # noqa: PTH101 (a descriptor, too)


def what_is_wrong_with(path: Path) -> str | None:
    """Return why ``path`` is not what ``save_atomically`` wrote; None if it is."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        meant = checksum_of(path).read_bytes().split()[:1]
    except FileNotFoundError as missing:
        return f"not whole ({Path(missing.filename).name} is missing)"
    except OSError as failure:
        return f"unreadable ({reason(failure, path)})"
    return None if meant == [found.encode()] else "truncated or corrupt (its SHA-256 differs from the recorded one)"


def checksum_of(path: Path) -> Path:
    """Return the path of the checksum of what ``save_atomically`` writes to ``path``."""
    return path.with_name(path.name + ".sha256")
