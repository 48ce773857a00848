"""The folder that a run leaves behind: taken before anything is written, never taken from somebody else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from pipesgd.config import FREE_ON_RESUME, TrainConfig, differing_options
from pipesgd.errors import CheckpointError, UserInputError
from pipesgd.launch import Ranks

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "trace.json"
WEIGHTS_FILE = "model.pt"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"

_OURS = (RUN_FILE, SUMMARY_FILE, METRICS_FILE, TRACE_FILE, WEIGHTS_FILE, CHECKPOINTS, TENSORBOARD)


def earlier_run(config: TrainConfig, ranks: Ranks) -> dict[str, Any] | None:
    """What rank 0's ``--output`` says of the run that is to be continued; None where one begins. Reads only.

    All ranks call this together, before they do what takes long.

    Raises:
        UserInputError: the folder holds something else, or a run that is neither to be continued nor to be deleted.
        CheckpointError: what it holds cannot be read.
    """
    folder, resume = config.run.output, _resumes(config, ranks)
    ranks.agree("what the output folder holds", lambda: _check_contents(folder, resume, config.run.overwrite))

    def read() -> dict[str, Any] | None:
        return _read(folder / RUN_FILE) if resume and (folder / RUN_FILE).exists() else None

    earlier: dict[str, Any] | None = ranks.exchange("earlier run", ranks.agree("reading an earlier run", read))[0]
    return earlier


def take_folder(config: TrainConfig, ranks: Ranks, planned: dict[str, Any] | None = None) -> Path:
    """Make ``--output`` this run's on every machine. All ranks call this together.

    An empty or new folder is taken; one that holds this very run is taken with ``--resume``, or when torchrun
    has restarted the job; one that holds any run is emptied of it with ``--overwrite``. What was ``planned`` is kept
    beside the options.

    Raises:
        UserInputError: the folder holds something else, or cannot be written to.
        CheckpointError: it holds a run of another world size or configuration.
    """
    folder = config.run.output
    resume = _resumes(config, ranks)
    description = _description(config, ranks, planned)
    ranks.agree("the output folder", lambda: _check(folder, description, resume, config.run.overwrite))
    first_of_machine = ranks.local_rank == 0
    if first_of_machine and config.run.overwrite and not resume:
        for name in _OURS:
            _delete(folder / name)
    ranks.exchange("an empty folder", None)  # on a disk shared by machines, nobody may write before
    _describe(folder, ranks, description)
    return folder


def replanned(folder: Path, config: TrainConfig, ranks: Ranks, planned: dict[str, Any]) -> None:
    """From now on, who continues this run has this configuration, and this plan."""
    _describe(folder, ranks, _description(config, ranks, planned))


def _description(config: TrainConfig, ranks: Ranks, planned: dict[str, Any] | None) -> dict[str, Any]:
    return {"world_size": ranks.world_size, "options": config.options(), "planned": planned}


def _describe(folder: Path, ranks: Ranks, description: dict[str, Any]) -> None:
    if ranks.local_rank == 0:
        aside = folder / f".{RUN_FILE}.{ranks.rank}.tmp"
        aside.write_text(json.dumps(description, indent=1), encoding="utf-8")
        aside.replace(folder / RUN_FILE)  # whole or not there, whenever this process is killed


def _resumes(config: TrainConfig, ranks: Ranks) -> bool:
    # One machine's torchrun may not count a restart that another one asked for: all go by the highest count.
    return config.run.resume or max(ranks.exchange("count of restarts", ranks.restart_count)) > 0


def _check(folder: Path, description: dict[str, Any], resume: bool, overwrite: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise UserInputError(f"output must be a folder to write to; got {folder}: {failure.strerror}") from None
    _check_contents(folder, resume, overwrite)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserInputError(f"output must be a folder to write to; got {folder}, which is read-only")
    if resume and (folder / RUN_FILE).exists():
        _check_same_run(folder / RUN_FILE, description)


def _check_contents(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raise ``UserInputError`` if the folder is there and must not be taken."""
    try:
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.exists() else set()
    except OSError as failure:
        raise UserInputError(f"output must be a folder to write to; got {folder}: {failure.strerror}") from None
    if not names:
        return
    if RUN_FILE not in names:
        raise UserInputError(
            f"output must be new, empty, or a run's own; got {folder}, which holds {min(names)} but no {RUN_FILE}"
        )
    if not (resume or overwrite):
        raise UserInputError(
            f"output must not hold another run; got {folder} (--resume continues it, --overwrite deletes it)"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        options, world_size, planned = dict(earlier["options"]), int(earlier["world_size"]), earlier.get("planned")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        raise CheckpointError(f"{path} must describe the run to resume; it cannot be read: {failure}") from None
    return {"options": options, "world_size": world_size, "planned": planned}


def _check_same_run(path: Path, description: dict[str, Any]) -> None:
    earlier = _read(path)
    options, world_size = earlier["options"], earlier["world_size"]
    if world_size != description["world_size"]:
        raise CheckpointError(
            f"world size must be that of the run to resume, {world_size}; got {description['world_size']}"
        )
    for name in differing_options(options, description["options"], free=FREE_ON_RESUME):
        raise CheckpointError(
            f"{name} must be that of the run to resume, {options.get(name)!r}; got {description['options'].get(name)!r}"
        )


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
