"""The output folder of a run: taken before anything is written, and never taken from another job."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesgd.config import FREE_ON_RESUME, TrainConfig, differing_options
from pipesgd.errors import CheckpointError, UserInputError, warn
from pipesgd.run.checkpoint_folder import CheckpointFolder
from pipesgd.run.event_file import EVENT_FILE
from pipesgd.run.files import reason, write_text_atomically
from pipesgd.run.folder_lock import FolderLock, check_unused

if TYPE_CHECKING:
    from pipesgd.ranks import Ranks

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.jsonl"
TRACE_FILE = "trace.json"
WEIGHTS_FILE = "model.pt"
CLUSTER_FILE = "cluster.toml"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
ATTEMPTS_FILE = "attempts.jsonl"
REPORT_FILE = "report.html"
RESULTS = (REPORT_FILE, SUMMARY_FILE, METRICS_FILE, WEIGHTS_FILE, TRACE_FILE, CLUSTER_FILE)
"""Files of which the end of a run tells, in this order, if they are there."""

TAKEN = "output folder taken"
"""Mark, before the name of rank 0's folder, of a job that has taken it: torchrun's restarts continue the run in it."""

_FILES = (
    SUMMARY_FILE, METRICS_FILE, TRACE_FILE, WEIGHTS_FILE, f"{WEIGHTS_FILE}.sha256", CLUSTER_FILE, ATTEMPTS_FILE,
    REPORT_FILE,
)  # fmt: skip
"""Files that a run writes in addition to run.json."""

_ASIDE = re.compile(rf"{re.escape(METRICS_FILE)}\.aside-[0-9]+")
_CUT_SHORT = re.compile(rf"\.({'|'.join(map(re.escape, (RUN_FILE, *_FILES)))})\.[0-9a-f]{{16}}\.tmp")
"""Pattern of the temporary files that a killed run may leave of a file that it was writing."""


def earlier_run(config: TrainConfig, ranks: Ranks) -> dict[str, Any] | None:
    """Return what rank 0's ``--output`` says about the run to be resumed; None if a new one begins. Writes nothing.

    All ranks call this together, before they do anything that takes long.

    Raises:
        UserInputError: the folder holds something else, or a run that is neither to be resumed nor to be deleted.
        CheckpointError: its content cannot be read.
    """
    folder, overwrite, resume = config.run.output, config.run.overwrite, _resumes(config, ranks)
    joined = ranks.all_gather_object("count of restarts", [ranks.restart_count, ranks.processes])
    restarts, processes = map(max, zip(*joined, strict=True))

    def check() -> None:
        check_unused(folder)
        _check_contents(folder, resume, overwrite)
        if overwrite and not resume and restarts and processes <= ranks.world_size and (folder / RUN_FILE).exists():
            raise UserInputError(
                f"output must hold no run when torchrun restarts the ranks with a new store; got {folder}, which may "
                "hold the run of this very job, so --overwrite does not delete it (--resume continues it)"
            )

    ranks.raise_together("what the output folder holds", check)

    def read() -> dict[str, Any] | None:
        return _read(folder / RUN_FILE) if resume and (folder / RUN_FILE).exists() else None

    earlier: dict[str, Any] | None = ranks.all_gather_object(
        "earlier run", ranks.raise_together("reading an earlier run", read)
    )[0]
    return earlier


def take_folder(
    config: TrainConfig,
    ranks: Ranks,
    planned: dict[str, Any] | None = None,
    earlier: dict[str, Any] | None = None,
    exchanges: Mapping[str, str] | None = None,
) -> FolderLock:
    """Take ``--output`` for this run on every machine, and return the lock on it. All ranks call this together.

    An empty or new folder is taken. A folder that holds this very run is taken with ``--resume``, or when torchrun has
    restarted a job that had taken it before. From a folder that holds any run, ``--overwrite`` deletes that run. The
    ``planned`` values and the ``exchanges`` of parameters with ``--reduce auto`` are stored with the options, and
    ``earlier`` is what ``earlier_run`` returned. The first rank of each machine has taken the lock, and must hold it as
    long as any rank writes; if it is lost, the next one must take it.

    Raises:
        UserInputError: the folder holds something else, cannot be written to, or is in use.
        CheckpointError: it holds a run of another configuration.
    """
    folder, overwrite = config.run.output, config.run.overwrite
    resume = _resumes(config, ranks)
    description = _description(config, ranks, planned, exchanges)
    chosen: dict[str, Any] = {}
    if planned is not None and earlier is not None:  # rank 0's: another machine may have missed the newest decision
        chosen = {name: earlier["options"].get(name) for name in planned["asked"]}
    first_of_machine = ranks.local_rank == 0

    def lock_first() -> None:
        if ranks.rank == 0:
            lock.take()

    def lock_and_check() -> None:
        if first_of_machine and ranks.rank > 0:
            lock.take()
        _check(folder, description, resume, overwrite, chosen)  # again: somebody may have come first
        if first_of_machine:  # before any machine with the same disk writes
            _delete(_matching(folder, _CUT_SHORT))

    def write() -> None:
        if first_of_machine:
            if overwrite and not resume:
                _delete(_written(folder, keep=config.planning.cluster))
            _describe(folder, description)

    ranks.raise_together("the output folder", lambda: _check(folder, description, resume, overwrite, chosen))
    lock = FolderLock(folder, ranks.all_gather_object("the job's name", uuid.uuid4().hex)[0])
    try:
        # Machines with a common disk then find the job's name in the lock, whichever of them is faster.
        ranks.raise_together("the lock of the output folder", lock_first)
        ranks.raise_together("the lock on every machine", lock_and_check)
        ranks.raise_together("the description of the run", write)
        if ranks.rank == 0:
            ranks.mark_job(f"{TAKEN} {folder}")
    except BaseException:
        lock.release()
        raise
    return lock


def check_no_results(folder: Path) -> None:
    """Refuse to begin a run in a folder that has the results of one.

    Raises:
        CheckpointError: it has them. They would be replaced by those of a run that begins again.
    """
    for name in (SUMMARY_FILE, WEIGHTS_FILE):
        if (folder / name).exists():
            raise CheckpointError(
                f"a finished run must have its checkpoints to be resumed; got {folder}, which has {name} and no "
                "checkpoint: bring the checkpoints back, or begin again with --overwrite"
            )


def check_other_ranks(config: TrainConfig, earlier: dict[str, Any] | None, world_size: int, *, sharded: bool) -> None:
    """Refuse what only the ranks of the ``earlier`` run can continue, if there are others now.

    Raises:
        CheckpointError: its strategy, outer optimizer or codec depends on the number of ranks, or each rank has data
            of its own (``sharded``).
    """
    if earlier is None or earlier["world_size"] == world_size:
        return
    reasons = {
        f"strategy {config.pipeline.strategy}": config.pipeline.strategy != "pipelined",
        "outer elastic": config.windows.outer == "elastic",
        "codec topk": config.compression.codec == "topk",
        "samples of each rank's own": sharded,
    }
    for reason_for_it, holds in reasons.items():
        if holds:
            raise CheckpointError(
                f"world size must be that of the run to resume with {reason_for_it}, {earlier['world_size']}; "
                f"got {world_size}"
            )


def _description(
    config: TrainConfig, ranks: Ranks, planned: dict[str, Any] | None, exchanges: Mapping[str, str] | None
) -> dict[str, Any]:
    chosen: dict[str, Any] = {} if exchanges is None else {"exchanges": dict(exchanges)}
    if config.pipeline.strategy == "pipelined":
        chosen |= {"transport": config.transport}
    return {"world_size": ranks.world_size, "options": config.options(), "planned": planned, **chosen}


def _describe(folder: Path, description: dict[str, Any]) -> None:
    try:
        write_text_atomically(folder / RUN_FILE, json.dumps(description, indent=1))
    except OSError as failure:
        if not (folder / RUN_FILE).exists():
            raise UserInputError(f"output must be a folder to write to; got {folder}: {failure.strerror}") from None
        warn(f"{reason(failure, folder)}; training continues, and {RUN_FILE} stays as it was")


def _resumes(config: TrainConfig, ranks: Ranks) -> bool:
    # torchrun does not count every restart. One does not continue the run of an earlier job: the options decide what
    # happens to its folder.
    folder = ranks.all_gather_object("name of the output folder", str(config.run.output))[0]
    return config.run.resume or ranks.job_has(f"{TAKEN} {folder}")


def _check(folder: Path, description: dict[str, Any], resume: bool, overwrite: bool, chosen: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise UserInputError(f"output must be a folder to write to; got {folder}: {failure.strerror}") from None
    _check_contents(folder, resume, overwrite)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserInputError(f"output must be a folder to write to; got {folder}, which is read-only")
    if resume and (folder / RUN_FILE).exists():
        _check_same_run(folder / RUN_FILE, description, chosen)


def _check_contents(folder: Path, resume: bool, overwrite: bool) -> None:
    """Raise ``UserInputError`` if the folder exists and must not be taken."""
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
            f"output must not hold another run; got {folder} (--resume continues it, --overwrite deletes it, "
            "another --output keeps it)"
        )
    if not resume and not _describes_a_run(folder / RUN_FILE):
        raise UserInputError(
            f"output must hold a run of pipesgd to be overwritten; got {folder}, whose {RUN_FILE} describes none"
        )
    for name in () if resume else (CHECKPOINTS, TENSORBOARD):
        if (folder / name).is_symlink():
            raise _undeletable(f"{folder / name}, which is a link")


def _read(path: Path) -> dict[str, Any]:
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        options, world_size, planned = earlier["options"], earlier["world_size"], earlier.get("planned")
        if not isinstance(options, dict) or type(world_size) is not int or not isinstance(planned, dict | None):
            raise TypeError("its world_size, options, or planned is of another type")
        if world_size < 1:
            raise ValueError(f"its world_size is {world_size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        cause = " ".join(f"{type(failure).__name__}: {failure}".split())
        raise CheckpointError(f"{path} must describe the run to resume; it cannot be read: {cause}") from None
    return {"options": options, "world_size": world_size, "planned": planned}


def _describes_a_run(path: Path) -> bool:
    """Return True if this program wrote ``path``: a user may have a run.json of another kind."""
    try:
        options: dict[str, Any] = _read(path)["options"]
        return {"dataset", "model", "output"} <= options.keys()
    except CheckpointError:
        return False


def _check_same_run(path: Path, description: dict[str, Any], chosen: dict[str, Any]) -> None:
    earlier = _read(path)
    # An option that is newer than the run has its default in it, since options are off until asked for.
    options = TrainConfig().options() | earlier["options"] | chosen
    for name in differing_options(options, description["options"], free=FREE_ON_RESUME):
        raise CheckpointError(
            f"{name} must be that of the run to resume, {options.get(name)!r}; got {description['options'].get(name)!r}"
        )


def _written(folder: Path, *, keep: Path | None) -> list[Path]:
    """Return what a run wrote into ``folder``, by its file names, except run.json, which is about to be replaced.

    The file to ``keep`` is left out, too: the cluster that the new run is told to use may be that of the old one.
    """
    kept = None if keep is None else os.path.realpath(keep)
    files = [path for name in _FILES if os.path.lexists(path := folder / name) and os.path.realpath(path) != kept]
    try:
        checkpoints = CheckpointFolder(folder / CHECKPOINTS).all()
        events = _matching(folder / TENSORBOARD, EVENT_FILE)
    except OSError as failure:
        raise _undeletable(reason(failure, folder)) from None
    return [*files, *_matching(folder, _ASIDE), *checkpoints, *events]


def _matching(folder: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.iterdir() if name.fullmatch(path.name)] if folder.is_dir() else []


def _delete(paths: list[Path]) -> None:
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            pass  # a machine with the same disk was faster
        except OSError as failure:
            raise _undeletable(reason(failure, path)) from None


def _undeletable(what: str) -> UserInputError:
    return UserInputError(f"output must hold a run that can be deleted; got {what} (--overwrite)")
