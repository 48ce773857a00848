"""One rank's pipeline in a file next to a checkpoint that another framework writes."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipesgd.errors import RunError
from pipesgd.membership.record import former_ranks
from pipesgd.pipeline.on_pipeline import OnPipeline
from pipesgd.run.checkpoint_files import UnusableCheckpointError, checksum_of, read_file, save_atomically

SAVE_DIGITS = 8


@dataclass(frozen=True)
class PipelineFile:
    """The file with the gradients in flight and the residuals of one rank.

    Where a checkpoint may be replaced by another one of the same name, each save has a file of its own. Such a save is
    ``save`` on all ranks, then the framework's own, with the save's name in it, then ``remove_others`` on all ranks: a
    kill at any moment leaves the file that the checkpoint names.
    """

    stem: Path
    """Path of the files without the number of a rank and what follows it."""
    rank: int
    """Number of this rank in the job that saves or resumes."""
    world_size: int
    """Number of ranks of that job."""
    of_save: str | None = None
    """Name of the save, of ``SAVE_DIGITS`` hexadecimal digits; None where no checkpoint replaces another one."""
    ending: str = ""
    """End of the file's name, after the number of the rank."""

    @property
    def path(self) -> Path:
        """Path of this rank's file."""
        return self._path(self.rank)

    def save(self, pipeline: OnPipeline) -> None:
        """Write the pipeline's state, with its checksum in ``<path>.sha256``. Its folder is made if it is missing.

        Raises:
            OSError: a file could not be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_atomically(pipeline.state_dict(), self.path)

    def load(self, pipeline: OnPipeline, iteration: int) -> None:
        """Let ``pipeline`` continue from the file; its model must hold the weights of the checkpoint already.

        Where another number of ranks saved the checkpoint, it continues as ``OnPipeline.load_members`` says, which
        is collective, from the files of the former ranks that this rank takes over.

        Args:
            pipeline: a pipeline of the same model, optimizer and options.
            iteration: number of iterations that the checkpoint was saved after.

        Raises:
            RunError: a file is missing, damaged, or of another save than the checkpoint.
            UserInputError: only the ranks that saved the checkpoint can continue from it.
        """
        first = self.rank if self.path.exists() else 0
        before = self._read(first, iteration)["world_size"]
        if before == self.world_size:
            pipeline.load_state_dict(self._read(self.rank, iteration))
            return
        needed = former_ranks(before, self.rank, self.world_size) or [self.rank % before]
        pipeline.load_members([self._read(rank, iteration) for rank in needed])

    def remove(self) -> None:
        """Remove the files of all saves with their checksums, if they are there."""
        self._remove(but=())

    def remove_others(self) -> None:
        """Remove the files of other saves with their checksums, if they are there."""
        self._remove(but=(self.path, checksum_of(self.path)))

    def _path(self, rank: int) -> Path:
        of_save = "" if self.of_save is None else f".{self.of_save}"
        return self.stem.with_name(f"{self.stem.name}{rank}{self.ending}{of_save}")

    def _read(self, rank: int, iteration: int) -> dict[str, Any]:
        try:
            found = read_file(self._path(rank), {"iteration": int, "world_size": int})
        except UnusableCheckpointError as unusable:
            raise RunError(f"a checkpoint must have the pipeline of each rank; {unusable}") from None
        if (saved := found["iteration"]) != iteration:
            raise RunError(
                f"a checkpoint and its pipelines must be of one save; {self._path(rank)} is of iteration {saved}, "
                f"the checkpoint of {iteration}"
            )
        return found

    def _remove(self, but: Collection[Path]) -> None:
        """Remove this rank's files, and those of former ranks that it has taken over."""
        name = re.compile(
            rf"{re.escape(self.stem.name)}([0-9]+){re.escape(self.ending)}(\.[0-9a-f]{{{SAVE_DIGITS}}})?(\.sha256)?"
        )
        for path in self.stem.parent.glob("*"):
            match = name.fullmatch(path.name)
            if match and int(match[1]) % self.world_size == self.rank and path not in but:
                path.unlink(missing_ok=True)
