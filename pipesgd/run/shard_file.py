"""One rank's part of a checkpoint of islands: its shards of weights and optimizer, and its pipeline, in a file."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipesgd.errors import RunError
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.pipeline.sameness import describe_shares
from pipesgd.run.checkpoint_files import save_atomically, what_is_wrong_with
from pipesgd.shards import is_dtensor, like, local


@dataclass(frozen=True)
class ShardFile:
    """The file of this rank in a checkpoint, to which each rank of each island contributes one."""

    folder: Path
    """Folder of one checkpoint, common to all ranks or each machine's own."""
    pipeline: Pipelined
    optimizer: torch.optim.Optimizer
    """The optimizer that ``pipeline`` steps."""

    @property
    def path(self) -> Path:
        """The file, named by this rank's island and by its number in there."""
        return self.folder / f"part-{'-'.join(str(ranks.rank) for ranks in self.pipeline.all_ranks)}.pt"

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
        self.folder.mkdir(parents=True, exist_ok=True)
        save_atomically(state, self.path)

    def load(self) -> None:
        """Let the model, the optimizer and the pipeline continue from the files. All ranks call this together.

        Raises:
            RunError: a rank's file is missing, damaged, of another mesh, of other parameters, or of another save than
                the others.
        """
        found: dict[str, Any] = {"save": ""}
        problem = what_is_wrong_with(self.path)
        if problem is None:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            if found["mesh"] != self._mesh:
                problem = f"of a mesh of {_by(found['mesh'])} ranks, not {_by(self._mesh)}"
            elif found["shares"] != self._shares:
                pairs = itertools.zip_longest(found["shares"], self._shares)
                theirs, ours = next(pair for pair in pairs if pair[0] != pair[1])
                problem = f"of other parameters: {theirs}, not {ours}"
        problems = [text for text in self._gathered(f"{self.path} is {problem}" if problem else "") if text]
        if problems:
            raise RunError(f"a checkpoint must have the part of each rank; {problems[0]}")
        if len(set(self._gathered(found["save"]))) > 1:
            raise RunError(f"the parts of a checkpoint must be of one save; got those of several in {self.folder}")
        model = self.pipeline.module
        parameters = model.state_dict()
        weights = {n: like(parameters[n], part) if n in parameters else part for n, part in found["model"].items()}
        model.load_state_dict(weights)
        self.optimizer.load_state_dict(self._of_optimizer(found["optimizer"]))
        self.pipeline.load_state_dict(found["pipeline"])

    @property
    def _mesh(self) -> list[int]:
        return [ranks.world_size for ranks in self.pipeline.all_ranks]

    @property
    def _shares(self) -> list[str]:
        return describe_shares(self.pipeline.module, self.pipeline.module.parameters())

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


def _parts(state: Any) -> Any:
    """Return ``state``, of dicts, lists and values, with this rank's part in place of each DTensor."""
    if is_dtensor(state):
        return local(state)
    if isinstance(state, dict):
        return {name: _parts(value) for name, value in state.items()}
    return [_parts(value) for value in state] if isinstance(state, list) else state


def _by(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes))
