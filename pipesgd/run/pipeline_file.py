"""One rank's pipeline in a file next to a checkpoint that another framework writes."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pipesgd.errors import RunError, UserInputError
from pipesgd.run.checkpoint_files import UnusableCheckpointError, checksum_of, read_file, save_atomically
from pipesgd.strategy import Strategy

SAVE_DIGITS = 8


@dataclass(frozen=True)
class PipelineFile:
    """The file with the gradients in flight and the residuals of one rank.

    Where a checkpoint may be replaced by another one of the same name, each save has a file of its own. Such a save is
    ``save`` on all ranks, then the framework's own, with the save's name in it, then ``remove_others`` on all ranks: a
    kill at any moment leaves the file that the checkpoint names.
    """

    stem: Path
    """Path of the file without the name of a save."""
    world_size: int
    """Number of ranks of the job that saves or resumes."""
    of_save: str | None = None
    """Name of the save, of ``SAVE_DIGITS`` hexadecimal digits; None where no checkpoint replaces another one."""

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.stem if self.of_save is None else self.stem.with_name(f"{self.stem.name}.{self.of_save}")

    def save(self, pipeline: Strategy) -> None:
        """Write the pipeline's state, with its checksum in ``<path>.sha256``. Its folder is made if it is missing.

        Raises:
            OSError: a file could not be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_atomically({"world_size": self.world_size, "state": pipeline.state_dict()}, self.path)

    def load(self, pipeline: Strategy, iteration: int) -> None:
        """Let ``pipeline`` continue from the file; its model must hold the weights of the checkpoint already.

        Args:
            pipeline: a pipeline of the same model, optimizer and options.
            iteration: number of iterations that the checkpoint was saved after.

        Raises:
            RunError: the file is missing, damaged, or of another save than the checkpoint.
            UserInputError: the job has another number of ranks than the one that saved.
        """
        try:
            found = read_file(self.path, {"world_size": int, "state": dict})
        except UnusableCheckpointError as unusable:
            raise RunError(f"a checkpoint must have the pipeline of each rank; {unusable}") from None
        if (number := found["world_size"]) != self.world_size:
            raise UserInputError(
                f"the number of ranks must be that of the checkpoint, {number}, to resume its pipeline; "
                f"got {self.world_size}"
            )
        if (saved := found["state"]["iteration"]) != iteration:
            raise RunError(
                f"a checkpoint and its pipelines must be of one save; {self.path} is of iteration {saved}, "
                f"the checkpoint of {iteration}"
            )
        pipeline.load_state_dict(found["state"])

    def remove(self) -> None:
        """Remove the files of all saves with their checksums, if they are there."""
        self._remove(but=())

    def remove_others(self) -> None:
        """Remove the files of other saves with their checksums, if they are there."""
        self._remove(but=(self.path, checksum_of(self.path)))

    def _remove(self, but: Collection[Path]) -> None:
        name = re.compile(rf"{re.escape(self.stem.name)}(\.[0-9a-f]{{{SAVE_DIGITS}}})?(\.sha256)?")
        for path in self.stem.parent.glob("*"):
            if name.fullmatch(path.name) and path not in but:
                path.unlink(missing_ok=True)
