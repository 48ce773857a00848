"""One rank's part of a checkpoint of islands: its shards of weights and optimizer, and its pipeline, in a file."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipesgd.errors import RunError, UserInputError
from pipesgd.nested import changed
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.pipeline.sameness import describe_shares
from pipesgd.run.checkpoint_files import PRIVATE, UnusableCheckpointError, read_file, save_atomically
from pipesgd.shards import like, local

_KINDS = {"save": str, "mesh": list, "shares": list, "model": dict, "optimizer": dict, "pipeline": dict}


@dataclass(frozen=True)
class ShardFile:
    """The file of this rank in a checkpoint, to which each rank of each island contributes one."""

    folder: Path
    """Folder of one checkpoint, common to all ranks or each machine's own."""
    pipeline: Pipelined
    optimizer: torch.optim.Optimizer
    """The optimizer that ``pipeline`` steps."""

    def __post_init__(self) -> None:
        if len(self.pipeline.all_ranks) < 2:
            raise UserInputError("pipeline must be one with a mesh of islands for a ShardFile; got one without")

    @property
    def path(self) -> Path:
        """The file, named by this rank's island and by its number in there."""
        return self._path(self._numbers[0])

    def save(self) -> None:
        """Write the file, with its checksum in ``<path>.sha256``. All ranks call this together.

        Raises:
            OSError: a file could not be written.
        """
        state = {
            "save": self._gathered(uuid.uuid4().hex)[0],
            "mesh": self._mesh,
            "shares": self._shares,
            "model": _parts(self.pipeline.module.state_dict()),
            "optimizer": _parts(self.optimizer.state_dict()),
            "pipeline": self.pipeline.state_dict(),
        }
        self.folder.mkdir(PRIVATE, parents=True, exist_ok=True)
        save_atomically(state, self.path)

    def load(self) -> None:
        """Let the model, the optimizer and the pipeline continue from the files. All ranks call this together.

        There may be more or fewer islands than those that saved, of as many members each, if the folder has the files
        of all of them. Each then begins with what the first one had, and its pipeline continues as
        ``Pipelined.load_members`` says.

        Raises:
            RunError: a rank's file is missing, damaged, of other islands, or of another save than the others.
        """
        found: dict[str, Any] = {"save": ""}
        problem = ""
        try:
            found = self._found()
        except UnusableCheckpointError as unusable:
            problem = str(unusable)
        problems = [text for text in self._gathered(problem) if text]
        if problems:
            raise RunError(f"a checkpoint must have the part of each rank; {problems[0]}")
        if len(set(self._gathered(found["save"]))) > 1:
            raise RunError(f"the parts of a checkpoint must be of one save; got those of several in {self.folder}")
        model = self.pipeline.module
        parameters = model.state_dict()
        weights = {n: like(parameters[n], part) if n in parameters else part for n, part in found["model"].items()}
        model.load_state_dict(weights)
        self.optimizer.load_state_dict(self._of_optimizer(found["optimizer"]))
        if found["mesh"] == self._mesh:
            self.pipeline.load_state_dict(found["pipeline"])
        else:
            self.pipeline.load_members(found["pipelines"])

    @property
    def _numbers(self) -> list[int]:
        """Number of this rank's island, and this rank's number in there."""
        return [ranks.rank for ranks in self.pipeline.all_ranks]

    @property
    def _mesh(self) -> list[int]:
        """Number of islands, and of the members of each."""
        return [ranks.world_size for ranks in self.pipeline.all_ranks]

    @property
    def _shares(self) -> list[str]:
        return describe_shares(self.pipeline.module, self.pipeline.module.parameters())

    def _path(self, island: int) -> Path:
        return self.folder / f"part-{island}-{self._numbers[1]}.pt"

    def _found(self) -> dict[str, Any]:
        """Return this rank's part; with another number of islands, that of the first one and all "pipelines".

        Raises:
            UnusableCheckpointError: a file that is needed is missing, damaged, or of other islands.
        """
        first = self._path(0)
        found = self._read(self.path if self.path.exists() or not first.exists() else first)
        saved = found["mesh"][0]
        if saved == self._mesh[0]:
            return found if self.path.exists() else self._read(self.path)
        parts = [self._read(self._path(number)) for number in range(saved)]
        if len({part["save"] for part in parts}) > 1:
            raise UnusableCheckpointError(f"{first} is of another save than those next to it")
        return parts[0] | {"pipelines": [part["pipeline"] for part in parts]}

    def _read(self, path: Path) -> dict[str, Any]:
        found = read_file(path, _KINDS)
        if found["mesh"][1:] != self._mesh[1:]:
            raise UnusableCheckpointError(f"{path} is of a mesh of {_by(found['mesh'])} ranks, not {_by(self._mesh)}")
        for theirs, ours in itertools.zip_longest(found["shares"], self._shares):
            if theirs != ours:
                raise UnusableCheckpointError(f"{path} is of other parameters: {theirs}, not {ours}")
        return found

    def _gathered(self, text: str) -> list[str]:
        """Return the texts of all ranks of all islands, in the same order on all of them."""
        texts = [text]
        for ranks in self.pipeline.all_ranks:
            texts = [one for of_rank in ranks.all_gather_object("parts of a checkpoint", texts) for one in of_rank]
        return texts

    def _of_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's ``state``, in which what is shaped like a shard becomes a DTensor again."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

        def again(parameter: Tensor, value: Any) -> Any:
            shaped_alike = isinstance(value, Tensor) and value.shape == local(parameter).shape
            return like(parameter, value.to(parameter.device)) if shaped_alike else value

        return state | {
            "state": {
                index: {name: again(parameters[index], value) for name, value in values.items()}
                for index, values in state["state"].items()
            }
        }


def _parts(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with this rank's part in place of each DTensor."""
    return dict(changed(state, lambda value: local(value) if isinstance(value, Tensor) else value))


def _by(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes))
