"""Checkpoints: written whole or not at all, found again by agreement of all ranks, and never lost in between.

A checkpoint of iteration t is a folder ``iteration-<t>`` on every machine, with the files of ``checkpoint_files``.
Machines need no common disk: every rank reads what its own machine wrote. All ranks first write into a hidden folder,
which gets its name once they have all succeeded. A machine that was stopped before then has a complete hidden folder,
which counts when checkpoints are loaded.
"""

from __future__ import annotations

import contextlib
import platform
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pipesgd.errors import CheckpointError, warn
from pipesgd.ranks import Ranks
from pipesgd.run.checkpoint_files import (
    Checkpoint,
    UnusableCheckpointError,
    ranks_in,
    read_checkpoint,
    write_checkpoint,
)
from pipesgd.run.checkpoint_folder import CheckpointFolder
from pipesgd.run.files import reason

Check = Callable[[dict[str, Any], dict[str, Any]], str | None]


class Checkpoints:
    """The newest ``keep`` checkpoints of a run, below ``folder``. All ranks call every method together."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int):
        self._folder = CheckpointFolder(folder)
        self._ranks = ranks
        self._keep = keep
        self._loaded_from: Path | None = None
        self.newest: int | None = None
        """Iteration of the newest checkpoint that all ranks are known to have."""

    def save(self, iteration: int, snapshot: Callable[[], tuple[dict[str, Any], dict[str, Any]]]) -> bool:
        """Write the checkpoint of ``iteration``, then delete old ones; return True if all ranks have written it.

        If a rank could not, one warning says which and why, what was written is deleted, and older checkpoints stay;
        without a warning if a rank was lost meanwhile.

        Args:
            iteration: number of iterations that the run has done.
            snapshot: function that returns (shared, own): tensors, numbers, strings, lists and dicts that are equal on
                all ranks, and values of the same kinds that belong to this rank. It is called once the ranks have
                agreed on a name: ranks may be lost before, and the checkpoint is then of those who remain.
        """
        save: str = self._ranks.all_gather_object("a checkpoint's name", uuid.uuid4().hex)[0]
        shared, own = snapshot()
        members = self._ranks.numbers
        place = self._folder.place_for(iteration, save)
        newest = "none is complete yet" if self.newest is None else f"the newest is that of iteration {self.newest}"
        warning = f"the checkpoint of iteration {iteration} could not be written ({{}}); training continues, {newest}"

        def write() -> None:
            if self._first_of_machine:
                self._folder.remove_unfinished(but={place, self._loaded_from})
            write_checkpoint(place, Checkpoint(iteration, save, shared, own), self._ranks)

        is_written = self._everywhere("a written checkpoint", warning, write)
        if not is_written or self._ranks.numbers != members:  # with a rank that was lost, its part may be, too
            if self._first_of_machine:
                self._folder.remove_unfinished(but={self._loaded_from})
            return False
        if not self._everywhere("a named checkpoint", warning, lambda: self._publish(place, iteration)):
            return False
        self.newest = iteration
        if self._first_of_machine:
            self._folder.prune(self._keep, iteration)
        return True

    def save_alone(self, iteration: int, shared: dict[str, Any], own: dict[str, Any], rank: int) -> Path:
        """Write the checkpoint of ``rank``, the only one that is left here, and return its path. It does not count.

        ``shared`` and ``own`` are those of a snapshot of ``save``. Raises ``OSError``.
        """
        place = self._folder.place_alone(iteration, rank)
        write_checkpoint(place, Checkpoint(iteration, uuid.uuid4().hex, shared, own), self._ranks)
        return place

    def load_newest(self, what_is_wrong: Check = lambda shared, own: None) -> Checkpoint | None:
        """Return the newest checkpoint that is whole on every rank; None if no rank has any. Nothing is deleted.

        Unusable checkpoints are named in a warning on stderr. Checkpoints newer than the one returned are moved
        aside, since the resumed run will write checkpoints of the same iterations.

        Args:
            what_is_wrong: returns why a run cannot be restored from (shared, own); None if it can.

        Raises:
            CheckpointError: ranks have checkpoints, but none in common, or somebody has just taken that away.
        """
        trouble, published, unfinished = None, [], []
        try:
            published, unfinished = self._folder.published(), self._folder.unfinished()
        except OSError as failure:
            trouble = reason(failure, self._folder.path)
        whole = self._usable(unfinished, what_is_wrong, warns=False) | self._usable(published, what_is_wrong)
        here = {
            "whole": sorted(whole),
            "published": [iteration for iteration, _ in published],
            "files of": sorted({rank for _, path in published for rank in ranks_in(path)}),
            "machine": platform.node(),
            "trouble": trouble,
        }
        newest = self._newest_in_common(self._ranks.all_gather_object("checkpoints at hand", here, close_by=True))
        if newest is None:
            return None
        self.newest, found = newest[0], whole[newest]
        warning = "checkpoints could not be put in order ({}); training continues"
        self._everywhere("checkpoints in order", warning, lambda: self._make_newest(found))
        return self._read(*newest)

    def _read(self, iteration: int, save: str) -> Checkpoint:
        """Return the checkpoint that ``save`` wrote, whichever name its folder has got or could not get."""
        for number, folder in [*self._folder.published(), *self._folder.unfinished()]:
            if number == iteration:
                with contextlib.suppress(UnusableCheckpointError):
                    checkpoint = read_checkpoint(folder, iteration, self._ranks)
                    if checkpoint.save == save:
                        self._loaded_from = folder
                        return checkpoint
        raise CheckpointError(
            f"a checkpoint must stay where it is while it is loaded; that of iteration {iteration} is gone from "
            f"{self._folder.path}"
        )

    def _usable(
        self, folders: Iterable[tuple[int, Path]], what_is_wrong: Check, *, warns: bool = True
    ) -> dict[tuple[int, str], Path]:
        """Return (iteration, save) -> folder for those ``folders`` that this rank could continue from."""
        usable = {}
        for iteration, folder in folders:
            try:
                checkpoint = read_checkpoint(folder, iteration, self._ranks)
                for own in (checkpoint.own, *checkpoint.others):
                    if problem := what_is_wrong(checkpoint.shared, own):
                        raise UnusableCheckpointError(f"{folder} is not of this run ({problem})")
                usable[iteration, checkpoint.save] = folder
            except UnusableCheckpointError as unusable:
                if warns:
                    warn(f"rank {self._ranks.rank}: checkpoint skipped, since {unusable}")
        return usable

    def _newest_in_common(self, everybody: list[dict[str, Any]]) -> tuple[int, str] | None:
        """Return (iteration, save) of the newest checkpoint that is whole on all ranks; None if no rank has any."""
        common = set.intersection(*({(iteration, save) for iteration, save in one["whole"]} for one in everybody))
        if common:
            return max(common)
        if not any(one["published"] or one["trouble"] for one in everybody):
            return None
        raise CheckpointError.on_all_ranks(_nothing_in_common(everybody))

    def _make_newest(self, found: Path) -> None:
        """Make ``found`` the newest checkpoint that counts, and move newer ones aside."""
        assert self.newest is not None
        if found != self._folder.name_of(self.newest):
            self._publish(found, self.newest)
        if self._first_of_machine and (moved := self._folder.set_newer_aside(self.newest)):
            names = ", ".join(path.name for path in moved)
            warn(
                f"rank {self._ranks.rank}: checkpoints newer than that of iteration {self.newest}, which all ranks "
                f"have, were moved aside in {self._folder.path}: {names}"
            )

    def _publish(self, place: Path, iteration: int) -> None:
        if self._first_of_machine:
            self._folder.publish(place, iteration)

    def _everywhere(self, what: str, warning: str, attempt: Callable[[], None]) -> bool:
        """Return True if ``attempt`` succeeded on all ranks; if not, rank 0 warns which ranks got which ``OSError``."""
        failure = None
        try:
            attempt()
        except OSError as error:
            failure = f"{self._folder.path}: {error.strerror or error}"
        said = self._ranks.all_gather_object(what, failure, close_by=True)
        failures = {self._ranks.number(rank): text for rank, text in enumerate(said) if text is not None}
        if failures and self._ranks.rank == 0:
            warn(warning.format("; ".join(f"rank {rank}: {text}" for rank, text in failures.items())))
        return not failures

    @property
    def _first_of_machine(self) -> bool:
        return self._ranks.local_rank == 0


def _nothing_in_common(everybody: list[dict[str, Any]]) -> str:
    """Return the line that says which ranks have which iterations, and what to do."""
    ranks_with: dict[str, list[int]] = {}
    for rank, one in enumerate(everybody):
        ranks_with.setdefault(_what_it_has(one), []).append(rank)
    parts = [f"{what} on rank {', '.join(map(str, ranks))}" for what, ranks in ranks_with.items()]
    line = f"checkpoints must have an iteration that is whole on every rank; got {'; '.join(parts)}"
    if set.intersection(*({iteration for iteration, _ in one["whole"]} for one in everybody)):
        line += " (the same iterations, of different saves)"
    misplaced = [
        f"those of rank {rank} are where rank {holder} runs now ({other['machine']})"
        for rank, one in enumerate(everybody)
        for holder, other in enumerate(everybody)
        if rank not in one["files of"] and rank in other["files of"]
    ]
    if misplaced:
        return f"{line}; {misplaced[0]}: start every machine with the --node-rank it had (nothing was deleted)"
    return f"{line}. Nothing was deleted: bring back what is missing, or begin again with --overwrite"


def _what_it_has(one: dict[str, Any]) -> str:
    """Return a short description of the checkpoints of one rank."""
    if one["trouble"]:
        return f"an unreadable folder ({one['trouble']})"
    if one["whole"]:
        return ", ".join(map(str, sorted({iteration for iteration, _ in one["whole"]})))
    if one["published"]:
        return f"none whole of {', '.join(map(str, one['published']))}"
    return "none"


class CheckpointSchedule:
    """The iterations after which a checkpoint is written, the same on every rank.

    Clocks differ between ranks, so seconds are converted into iterations by the pace of the slowest rank since it was
    last exchanged: at every checkpoint, and after the first iterations.
    """

    LOOKS = (1, 10)
    """Iterations after the start at which the pace is exchanged: all iterations may be slow, or the first alone."""

    def __init__(self, ranks: Ranks, *, iterations: int | None, seconds: float, start: int):
        self._ranks = ranks
        self._every = iterations
        self._seconds = seconds
        self._looks = [start + look for look in self.LOOKS]
        self._newest = self._looked_at = start
        self._next: int | None = None
        self._spent = 0.0

    def is_due(self, iteration: int, seconds: float) -> bool:
        """Return True if a checkpoint of ``iteration``, which took ``seconds``, is due now.

        Every rank calls this after every iteration.
        """
        if self._every is not None:
            return iteration % self._every == 0
        self._spent += seconds
        if iteration != self._next and iteration not in self._looks:
            return False
        pace = max(self._ranks.all_gather_object("pace", self._spent / (iteration - self._looked_at)))
        every = max(1, round(self._seconds / max(pace, 1e-9)))
        self._looked_at, self._spent = iteration, 0.0
        if iteration == self._next or iteration >= self._newest + every:
            self._newest = iteration
        self._next = self._newest + every
        return iteration == self._newest
