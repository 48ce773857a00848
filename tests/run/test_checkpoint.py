"""Checkpoints: complete or absent, found by agreement, and written when all ranks think it is time."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipesgd.baselines.local import Local
from pipesgd.errors import CheckpointError
from pipesgd.ranks import Ranks, join
from pipesgd.run.checkpoint import Checkpoints, CheckpointSchedule
from pipesgd.run.checkpoint_files import (
    Checkpoint,
    read_checkpoint,
    save_atomically,
    what_is_wrong_with,
    write_checkpoint,
)
from pipesgd.run.checkpoint_folder import CheckpointFolder
from pipesgd.run.state import RunState

pytestmark = pytest.mark.slow


def test_a_file_is_the_old_one_or_the_whole_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save_atomically({"x": torch.ones(3)}, path)

    class Unpicklable:
        def __reduce__(self) -> str:
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        save_atomically({"x": torch.zeros(1000), "y": Unpicklable()}, path)
    assert torch.equal(torch.load(path, weights_only=True)["x"], torch.ones(3))
    save_atomically({"x": torch.zeros(3)}, path)
    assert torch.equal(torch.load(path, weights_only=True)["x"], torch.zeros(3))


def test_numbers_of_numpy_are_written_as_numbers_that_torch_loads(tmp_path: Path) -> None:
    """A schedule that computes with NumPy left its learning rate in files that no rank could load."""
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(0.5), betas=(np.float64(0.5), 0.75))
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [np.int64(3), np.int64(3)])
    path = tmp_path / "state.pt"
    save_atomically([one.state_dict() for one in (model, optimizer, schedule)], path)
    weights, of_optimizer, of_schedule = torch.load(path, weights_only=True)
    assert weights._metadata == model.state_dict()._metadata, "torch knows the versions of modules by it"
    [group] = of_optimizer["param_groups"]
    assert [(type(value), value) for value in (group["lr"], *group["betas"])] == [
        (float, 0.5),
        (float, 0.5),
        (float, 0.75),
    ]
    assert of_schedule["milestones"] == collections.Counter([3, 3])
    assert type(optimizer.param_groups[0]["lr"]) is np.float64, "the optimizer itself keeps its own"


@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), suffix=st.sampled_from(["", ".sha256"]))
def test_a_changed_byte_is_seen_wherever_it_is(
    tmp_path_factory: pytest.TempPathFactory, where: float, flip: int, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("changed") / "state.pt"
    save_atomically({"x": torch.arange(500.0), "name": "a string"}, path)
    assert what_is_wrong_with(path) is None
    spoilt = path.with_name(path.name + suffix)
    content = bytearray(spoilt.read_bytes())
    size = 64 if suffix else len(content)  # behind the digest is the name, for sha256sum
    content[int(where * size)] ^= flip
    spoilt.write_bytes(content)
    assert "truncated or corrupt" in str(what_is_wrong_with(path))


def test_a_file_without_its_checksum_is_not_whole(tmp_path: Path) -> None:
    """The process was killed after it wrote the file and before it wrote the checksum."""
    path = tmp_path / "state.pt"
    assert what_is_wrong_with(path) == "not whole (state.pt is missing)"
    save_atomically({"x": torch.ones(3)}, path)
    (tmp_path / "state.pt.sha256").unlink()
    assert what_is_wrong_with(path) == "not whole (state.pt.sha256 is missing)"


def test_no_meeting_at_a_parameter_server_ends_a_slow_write(tmp_path: Path) -> None:
    """A meeting waits for gradients; while a rank writes a checkpoint, its heartbeats make an exchange itself wait."""
    ranks, meetings = join(), []
    ranks.before_gather = meetings.append
    checkpoints = Checkpoints(tmp_path, ranks, keep=1)
    assert checkpoints.save(1, lambda: ({}, {}))
    assert meetings == ["a checkpoint's name"]
    assert checkpoints.load_newest() is not None
    assert meetings == ["a checkpoint's name"]


def test_what_is_saved_is_of_the_ranks_that_have_agreed_on_a_name(tmp_path: Path) -> None:
    """One of them may be lost before, where the others continue without it."""
    ranks = join()
    checkpoints, agreed = Checkpoints(tmp_path, ranks, keep=1), []
    ranks.before_gather = agreed.append
    assert checkpoints.save(1, lambda: ({"before": list(agreed)}, {}))
    found = checkpoints.load_newest()
    assert found is not None
    assert found.shared == {"before": ["a checkpoint's name"]}


def test_a_checkpoint_that_has_lost_a_writer_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part may be missing; where the others continue without it, they write theirs again."""
    ranks = join()
    checkpoints = Checkpoints(tmp_path, ranks, keep=1)
    assert checkpoints.save(1, lambda: ({}, {}))

    def gather(what: str, value: Any, **how: Any) -> list[Any]:
        if what == "a written checkpoint":
            ranks.numbers = (4,)
        return [value]

    monkeypatch.setattr(ranks, "all_gather_object", gather)
    assert not checkpoints.save(2, lambda: ({}, {}))
    assert checkpoints.newest == 1
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-1"]
    assert checkpoints.save(2, lambda: ({}, {}))


def test_a_warning_names_ranks_by_their_numbers_in_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = join()
    ranks.numbers = (4,)
    monkeypatch.setattr("pipesgd.run.checkpoint.write_checkpoint", functools.partial(_full, "a disk"))
    assert not Checkpoints(tmp_path, ranks, keep=1).save(1, lambda: ({}, {}))
    assert "could not be written (rank 4: " in capsys.readouterr().err


def _full(disk: str, *arguments: Any) -> None:
    raise OSError(28, f"no space is left on {disk}")


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_seen(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    path = tmp_path_factory.mktemp("truncated") / "state.pt"
    save_atomically({"x": torch.arange(500.0)}, path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert "truncated or corrupt" in str(what_is_wrong_with(path))


def _save_and_spoil(ranks: Ranks, folder: str, spoilt: dict[int, str]) -> tuple[Any, list[str], str, list[str]]:
    """Save iterations 1 to 5, damage the ``spoilt`` files of rank 1, load; return state, folder names, warnings."""
    checkpoints = Checkpoints(Path(folder), ranks, keep=3)
    for iteration in range(1, 6):
        state = {"x": torch.tensor(iteration)}, {"rank": ranks.rank, "iteration": iteration}
        checkpoints.save(iteration, functools.partial(copy.copy, state))
    ranks.all_gather_object("pruned", None)
    kept = sorted(path.name for path in Path(folder).iterdir())
    ranks.all_gather_object("saved", None)
    if ranks.rank == 1:
        for iteration, name in spoilt.items():
            path = Path(folder) / f"iteration-{iteration}" / name
            path.write_bytes(path.read_bytes()[:-20])
    ranks.all_gather_object("spoilt", None)
    with contextlib.redirect_stderr(io.StringIO()) as warned:
        try:
            found = checkpoints.load_newest()
        except CheckpointError as failure:
            return str(failure), kept, warned.getvalue(), kept
    left = sorted(path.name for path in Path(folder).iterdir())
    return found and (found.iteration, int(found.shared["x"]), found.own), kept, warned.getvalue(), left


@pytest.mark.parametrize(
    ("spoilt", "expected"),
    [
        ({}, 5),
        ({5: "rank-1.pt"}, 4),
        ({5: "shared.pt", 4: "rank-0.pt"}, 3),
        ({5: "rank-1.pt", 4: "rank-1.pt", 3: "rank-0.pt"}, None),
    ],
)
def test_the_newest_checkpoint_that_is_whole_on_all_ranks_is_found(
    tmp_path: Path, spoilt: dict[int, str], expected: int | None
) -> None:
    results = run_ranks(2, _save_and_spoil, str(tmp_path), spoilt, process_group=False)
    for rank, (found, kept, _, left) in enumerate(results):
        assert kept == ["iteration-3", "iteration-4", "iteration-5"]
        if expected is None:
            assert found == (
                "checkpoints must have an iteration that is whole on every rank; got 4, 5 on rank 0; 3 on rank 1. "
                "Nothing was deleted: bring back what is missing, or begin again with --overwrite"
            )
            assert left == kept
        else:
            assert found == (expected, expected, {"rank": rank, "iteration": expected})
            aside = [f"aside-1-of-iteration-{i}" for i in range(expected + 1, 6)]
            assert left == aside + [f"iteration-{i}" for i in range(3, expected + 1)]
    warnings = "".join(warned for *_, warned, _ in results)
    for iteration, name in spoilt.items():
        assert f"iteration-{iteration}/{name} is truncated or corrupt" in warnings


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", join(), keep=1).load_newest() is None


def test_checkpoints_that_somebody_has_moved_away_end_no_run(tmp_path: Path) -> None:
    """A listing of a disk in the network may also be older than the checkpoint that was just written."""
    (aside := tmp_path / "aside-1-of-iteration-3").mkdir()
    folder = CheckpointFolder(tmp_path)
    folder.prune(1, 5)
    assert aside.exists()
    for iteration in (4, 5):
        (tmp_path / f"iteration-{iteration}").mkdir()
    folder.prune(1, 5)
    assert [path.name for path in folder.all()] == ["iteration-5"]
    shutil.rmtree(tmp_path)
    folder.prune(1, 5)


def test_a_schedule_in_iterations_is_exact() -> None:
    schedule = CheckpointSchedule(join(), iterations=4, seconds=60.0, start=6)
    assert [iteration for iteration in range(7, 21) if schedule.is_due(iteration, 0.1)] == [8, 12, 16, 20]


def _due(ranks: Ranks) -> list[int]:
    schedule = CheckpointSchedule(ranks, iterations=None, seconds=3.0, start=0)
    return [iteration for iteration in range(1, 100) if schedule.is_due(iteration, 0.1 if ranks.rank else 0.05)]


def test_a_schedule_in_seconds_is_the_same_on_all_ranks_by_the_slowest_ones_pace() -> None:
    assert run_ranks(2, _due, process_group=False) == [[30, 60, 90]] * 2


@pytest.mark.parametrize("start", [0, 11])
@pytest.mark.parametrize(
    ("seconds", "due"),
    [
        ([300.0] * 4, [1, 2, 3, 4]),  # each takes longer than --checkpoint-seconds
        ([25.0] * 11, [2, 4, 6, 8, 10]),
        ([600.0] + [1.0] * 140, [1, 2, 62, 122]),  # the first compiles
        ([20.0] + [1.0] * 140, [3, 63, 123]),
        ([1.0] * 60 + [20.0] * 66, [60, 120, 123, 126]),  # slower from now on
        ([20.0] * 60 + [1.0] * 63, [*range(3, 61, 3), 63, 123]),
    ],
)
def test_a_schedule_in_seconds_follows_the_pace_of_now(start: int, seconds: list[float], due: list[int]) -> None:
    schedule = CheckpointSchedule(join(), iterations=None, seconds=60.0, start=start)
    found = [number for number, one in enumerate(seconds, 1) if schedule.is_due(start + number, one)]
    assert found == due


def test_what_looks_like_a_snapshot_and_is_none_is_one_line() -> None:
    """Anybody who may write to the folder can forge a file whose parts have the right types."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Local(model, optimizer)
    state = RunState(
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.ConstantLR(optimizer),
        strategy=strategy,
        losses=collections.deque(),
    )
    shared, own = state.snapshot(1.0)
    forged = own | {"strategy": {}}
    assert state.what_is_wrong_with(shared, forged) is None
    line = r"^a checkpoint must be of this run; got one that cannot be restored \(KeyError"
    with pytest.raises(CheckpointError, match=line):
        state.restore(shared, forged)
    state.restore(shared, own)
    strategy.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_user_may_read_checkpoints_and_weights(umask: int, tmp_path: Path) -> None:
    """Training data can be partly reconstructed from weights and gradients."""
    before = os.umask(umask)
    try:
        folder = tmp_path / "run" / "checkpoints" / "iteration-1"
        ranks = Ranks(rank=0, world_size=1, store=dist.HashStore())
        write_checkpoint(folder, Checkpoint(1, "0" * 32, {"x": 1}, {"y": 2}), ranks)
        save_atomically({"weight": torch.zeros(1)}, weights := tmp_path / "model.pt")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, *folder.iterdir())}
    private = {"checkpoints": 0o700, "iteration-1": 0o700, "shared.pt": 0o600, "rank-0.pt": 0o600}
    assert modes == private | {"shared.pt.sha256": 0o600, "rank-0.pt.sha256": 0o600}
    assert stat.S_IMODE(weights.stat().st_mode) == 0o600
    assert read_checkpoint(folder, 1, ranks).own == {"y": 2}


def test_a_folder_that_the_user_has_made_keeps_its_mode(tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoints").mkdir()
    folder.chmod(0o750)
    ranks = Ranks(rank=0, world_size=1, store=dist.HashStore())
    write_checkpoint(folder / "iteration-1", Checkpoint(1, "0" * 32, {}, {}), ranks)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
