"""Checkpoints: written whole or not at all, and found again by agreement of all ranks.

A checkpoint of iteration t is a folder ``iteration-<t>``: ``shared.pt``, the same on every rank, written by
the first rank of each machine; and ``rank-<r>.pt``, what only rank r knows. Machines need no common disk:
every rank reads what its own machine wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipesgd.launch import Ranks

_FOLDER = re.compile(r"iteration-(\d+)")


def save_atomically(state: Any, path: Path, *, writer: int = 0) -> None:
    """Write ``state`` with ``torch.save``, so that ``path`` is the old file or the whole new one, never a part.

    Beside it goes ``<path>.sha256``, in the format of sha256sum: a zip archive, which is what torch writes, can be
    changed in ways that neither torch nor its own checksums notice.

    ``writer`` tells apart ranks that write the same file to one disk.
    """
    aside = path.with_name(f".{path.name}.{writer}.tmp")
    with aside.open("w+b") as file:
        torch.save(state, file)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _publish(aside, path)
    aside.write_text(f"{digest}  {path.name}\n", encoding="ascii")
    _publish(aside, _checksum_of(path))


def what_is_wrong_with(path: Path) -> str | None:
    """Why ``path`` is not what ``save_atomically`` wrote; None if it is."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        meant = _checksum_of(path).read_bytes().split()[:1]
    except FileNotFoundError as missing:
        return f"not whole ({Path(missing.filename).name} is missing)"
    return None if meant == [found.encode()] else "truncated or corrupt (its SHA-256 is not the one beside it)"


def _checksum_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _publish(aside: Path, path: Path) -> None:
    """Give ``aside`` the name ``path``, once its content is on the disk; then see that the name is, too."""
    _sync(aside)
    aside.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back: what all ranks had in common, and what was this rank's own."""

    iteration: int
    shared: dict[str, Any]
    own: dict[str, Any]


class Checkpoints:
    """The newest ``keep`` checkpoints of a run, below ``folder``. All ranks call every method together."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int):
        self._folder = folder
        self._ranks = ranks
        self._keep = keep

    def save(self, iteration: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Write the checkpoint of ``iteration``, then delete old ones.

        Args:
            iteration: how many iterations the run has done.
            shared: tensors, numbers, strings, lists and dicts that are equal on all ranks.
            own: the same kinds, of this rank.
        """
        folder = self._path(iteration)
        folder.mkdir(parents=True, exist_ok=True)
        if self._ranks.local_rank == 0:
            save_atomically(shared, folder / "shared.pt", writer=self._ranks.rank)
        save_atomically(own, folder / f"rank-{self._ranks.rank}.pt")
        # Old ones may go only when every rank has the new one.
        self._ranks.exchange("a saved checkpoint", iteration)
        if self._ranks.local_rank == 0:
            for old in sorted(self._iterations())[: -self._keep]:
                shutil.rmtree(self._path(old), ignore_errors=True)

    def load_newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole on every rank; None if there is none.

        Files that are not whole are named in a warning on stderr. Later checkpoints are deleted: the run that
        continues will write them anew.
        """
        whole = {iteration for iteration in self._iterations() if self._is_whole(iteration)}
        common = set.intersection(*map(set, self._ranks.exchange("checkpoints at hand", sorted(whole))))
        newest = max(common, default=None)
        if self._ranks.local_rank == 0:
            for iteration in self._iterations():
                if newest is None or iteration > newest:
                    shutil.rmtree(self._path(iteration), ignore_errors=True)
        # Nobody may write a checkpoint before these are gone.
        self._ranks.exchange("a clean folder", newest)
        if newest is None:
            return None
        folder = self._path(newest)
        shared, own = (
            torch.load(folder / name, map_location="cpu", weights_only=True)
            for name in ("shared.pt", f"rank-{self._ranks.rank}.pt")
        )
        return Checkpoint(newest, shared, own)

    def _is_whole(self, iteration: int) -> bool:
        whole = True
        for name in ("shared.pt", f"rank-{self._ranks.rank}.pt"):
            path = self._path(iteration) / name
            if problem := what_is_wrong_with(path):
                print(
                    f"warning: rank {self._ranks.rank}: checkpoint skipped, since {path} is {problem}",
                    file=sys.stderr,
                    flush=True,
                )
                whole = False
        return whole

    def _iterations(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            matches = [_FOLDER.fullmatch(path.name) for path in self._folder.iterdir()]
            return [int(match[1]) for match in matches if match]
        return []

    def _path(self, iteration: int) -> Path:
        return self._folder / f"iteration-{iteration}"


class CheckpointSchedule:
    """After which iterations a checkpoint is written: the same on every rank.

    Clocks differ between ranks, so seconds are turned into iterations, anew after every checkpoint, by the
    pace of the slowest rank.
    """

    FIRST_LOOK = 10
    """Iterations after which the pace is first asked for."""

    def __init__(self, ranks: Ranks, *, iterations: int | None, seconds: float, start: int):
        self._ranks = ranks
        self._every = iterations
        self._seconds = seconds
        self._look_at = start + self.FIRST_LOOK
        self._next: int | None = None

    def is_due(self, iteration: int, seconds_per_iteration: float) -> bool:
        """Whether to write one now, ``iteration`` being done. Every rank asks after every iteration."""
        if self._every is not None:
            return iteration % self._every == 0
        if self._next is None and iteration == self._look_at:
            self._plan(iteration, seconds_per_iteration)
        if iteration != self._next:
            return False
        self._plan(iteration, seconds_per_iteration)
        return True

    def _plan(self, iteration: int, seconds_per_iteration: float) -> None:
        pace = max(self._ranks.exchange("pace", seconds_per_iteration))
        self._next = iteration + max(1, round(self._seconds / max(pace, 1e-9)))
