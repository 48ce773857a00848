"""A folder of checkpoints on one disk, in which they get their names, are moved aside, and are deleted.

::

    iteration-<t>               a checkpoint that all ranks have written
    .iteration-<t>.<save>       one that is being written or named, or was when the run was stopped
    aside-<n>-of-iteration-<t>  one that was moved aside: newer than what all ranks had when the run was resumed
    alone-<r>-of-iteration-<t>  one of rank r of an elastic run, which had no majority: others may have continued
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import uuid
from pathlib import Path

from pipesgd.run.files import sync_folder

_PUBLISHED = re.compile(r"iteration-([0-9]{1,18})")
_UNFINISHED = re.compile(r"\.iteration-([0-9]{1,18})\.[0-9a-f]{32}")
_ASIDE = re.compile(r"(?:aside|alone)-[0-9]+-of-iteration-([0-9]{1,18})")


class CheckpointFolder:
    """The checkpoints below ``path``. Several machines may share its disk and do the same operations in it."""

    def __init__(self, path: Path):
        self.path = path

    def published(self) -> list[tuple[int, Path]]:
        """Return (iteration, folder) of every checkpoint that counts, oldest first. Raises ``OSError``."""
        return self._matching(_PUBLISHED)

    def unfinished(self) -> list[tuple[int, Path]]:
        """Return (iteration, folder) of the checkpoints that have no name yet. Raises ``OSError``."""
        return self._matching(_UNFINISHED)

    def all(self) -> list[Path]:
        """Return every checkpoint, including those that do not count. Raises ``OSError``."""
        return [path for pattern in (_PUBLISHED, _UNFINISHED, _ASIDE) for _, path in self._matching(pattern)]

    def place_for(self, iteration: int, save: str) -> Path:
        """Return the path of a checkpoint before it gets its name. ``save``: 32 hexadecimal digits."""
        return self.path / f".iteration-{iteration}.{save}"

    def name_of(self, iteration: int) -> Path:
        """Return the path of the checkpoint of ``iteration`` once it counts."""
        return self.path / f"iteration-{iteration}"

    def publish(self, unfinished: Path, iteration: int) -> None:
        """Give a checkpoint its name, moving another one of the same iteration aside. Raises ``OSError``.

        If several machines share this disk, the one that succeeds in renaming ``unfinished`` does all of it.
        """
        claimed = self.place_for(iteration, uuid.uuid4().hex)
        try:
            unfinished.rename(claimed)
        except FileNotFoundError:
            if all(other != iteration for other, _ in [*self.unfinished(), *self.published()]):
                raise
            return
        target = self.name_of(iteration)
        if target.exists():
            self.set_aside(iteration)
        claimed.rename(target)
        sync_folder(self.path)

    def place_alone(self, iteration: int, rank: int) -> Path:
        """Return the path of a checkpoint of ``rank`` alone, at which there is none. Raises ``OSError``."""
        place = self.path / f"alone-{rank}-of-iteration-{iteration}"
        if place.exists():
            shutil.rmtree(place)
        return place

    def set_aside(self, iteration: int) -> Path:
        """Move the checkpoint of ``iteration`` aside and return its new path. Raises ``OSError``."""
        names = (self.path / f"aside-{number}-of-iteration-{iteration}" for number in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        self.name_of(iteration).rename(aside)
        return aside

    def set_newer_aside(self, iteration: int) -> list[Path]:
        """Move checkpoints newer than ``iteration`` aside and return their new paths. Raises ``OSError``."""
        moved = []
        for newer, _ in self.published():
            if newer > iteration:
                with contextlib.suppress(FileNotFoundError):  # another machine with this disk was faster
                    moved.append(self.set_aside(newer))
        return moved

    def prune(self, keep: int, newest: int) -> None:
        """Delete checkpoints older than the last ``keep`` up to ``newest``, including those moved aside."""
        with contextlib.suppress(OSError):
            kept = [iteration for iteration, _ in self.published() if iteration <= newest][-keep:]
            oldest = min(kept, default=0)  # somebody may have moved them all
            for iteration, path in [*self.published(), *self._matching(_ASIDE)]:
                if iteration < oldest:
                    shutil.rmtree(path, ignore_errors=True)

    def remove_unfinished(self, *, but: set[Path | None]) -> None:
        """Delete what earlier runs did not finish writing, except ``but``, so that it does not fill the disk."""
        with contextlib.suppress(OSError):
            for _, path in self.unfinished():
                if path not in but:
                    shutil.rmtree(path, ignore_errors=True)

    def _matching(self, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
        try:
            matches = [(pattern.fullmatch(path.name), path) for path in self.path.iterdir()]
        except FileNotFoundError:
            return []
        return sorted((int(match[1]), path) for match, path in matches if match)
