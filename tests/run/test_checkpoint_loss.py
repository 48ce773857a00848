"""Nothing on disk is lost: loading deletes nothing, and a checkpoint that cannot be written costs only itself.

Ranks are threads; each is the first on its own machine, with its own folder, unless a test says otherwise.
"""

from __future__ import annotations

import concurrent.futures
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _rank_threads import run_rank_threads
from _runs import contents

from pipesgd.errors import CheckpointError
from pipesgd.ranks import Ranks
from pipesgd.run.checkpoint import Checkpoints
from pipesgd.run.checkpoint_files import FORMAT
from pipesgd.run.checkpoint_folder import CheckpointFolder


def folder_of(tmp_path: Path, rank: int) -> Path:
    return tmp_path / f"machine-{rank}" / "checkpoints"


def _snapshot(iteration: int, **own: Any) -> Callable[[], tuple[dict[str, Any], dict[str, Any]]]:
    return lambda: ({"x": torch.tensor(iteration)}, own)


def save(ranks: Ranks, tmp_path: Path, *iterations: int, keep: int = 3) -> list[bool]:
    checkpoints = Checkpoints(folder_of(tmp_path, ranks.rank), ranks, keep=keep)
    return [checkpoints.save(iteration, _snapshot(iteration, rank=ranks.rank)) for iteration in iterations]


def load(ranks: Ranks, tmp_path: Path) -> Any:
    found = Checkpoints(folder_of(tmp_path, ranks.rank), ranks, keep=3).load_newest()
    return found and (found.iteration, int(found.shared["x"]), found.own)


def refused(results: list[Any]) -> str:
    """Return the line of the error that all ranks raised, which one of them prints."""
    assert all(isinstance(result, CheckpointError) and result.known_to_all for result in results), results
    assert len({str(result) for result in results}) == 1
    return str(results[0])


def test_a_machine_that_comes_back_empty_costs_the_others_nothing(tmp_path: Path) -> None:
    assert run_rank_threads(2, save, tmp_path, 20, 40, 60) == [[True] * 3] * 2
    shutil.rmtree(folder_of(tmp_path, 1))
    before = contents(tmp_path)
    line = refused(run_rank_threads(2, load, tmp_path))
    assert line == (
        "checkpoints must have an iteration that is whole on every rank; got 20, 40, 60 on rank 0; none on rank 1. "
        "Nothing was deleted: bring back what is missing, or begin again with --overwrite"
    )
    assert contents(tmp_path) == before


def test_swapped_machines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_rank_threads(2, save, tmp_path, 20, 40)
    folder_of(tmp_path, 0).rename(tmp_path / "other")
    folder_of(tmp_path, 1).rename(folder_of(tmp_path, 0))
    (tmp_path / "other").rename(folder_of(tmp_path, 1))
    before = contents(tmp_path)
    line = refused(run_rank_threads(2, load, tmp_path))
    assert "got none whole of 20, 40 on rank 0, 1; those of rank 0 are where rank 1 runs now (" in line
    assert line.endswith("): start every machine with the --node-rank it had (nothing was deleted)")
    assert contents(tmp_path) == before
    assert "rank-0.pt is not whole (rank-0.pt is missing)" in capsys.readouterr().err


def test_no_checkpoint_anywhere_is_said_to_be_none(tmp_path: Path) -> None:
    assert run_rank_threads(2, load, tmp_path) == [None, None]


def test_without_any_checksum_nothing_is_deleted(tmp_path: Path) -> None:
    run_rank_threads(2, save, tmp_path, 20, 40)
    for path in tmp_path.rglob("*.sha256"):
        path.unlink()
    before = contents(tmp_path)
    assert "none whole of 20, 40 on rank 0, 1" in refused(run_rank_threads(2, load, tmp_path))
    assert contents(tmp_path) == before


def test_newer_checkpoints_are_moved_aside_and_deleted_when_training_has_passed_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_rank_threads(2, save, tmp_path, 20, 40, 60)
    newest = contents(folder_of(tmp_path, 0) / "iteration-60")
    shutil.rmtree(folder_of(tmp_path, 1) / "iteration-60")

    def names(rank: int) -> list[str]:
        return sorted(path.name for path in folder_of(tmp_path, rank).iterdir())

    for times in (1, 2):  # a run that fails again and again loses nothing either
        assert [found[0] for found in run_rank_threads(2, load, tmp_path)] == [40, 40]
        assert contents(folder_of(tmp_path, 0) / "aside-1-of-iteration-60") == newest
        assert capsys.readouterr().err.count("rank 0: checkpoints newer than that of iteration 40") == (times == 1)
    run_rank_threads(2, save, tmp_path, 60)
    assert names(0) == ["aside-1-of-iteration-60", "iteration-20", "iteration-40", "iteration-60"]
    run_rank_threads(2, save, tmp_path, 80, 100, 120)
    assert names(0) == names(1) == ["iteration-100", "iteration-120", "iteration-80"]


def test_a_save_that_was_named_on_some_machines_only_counts(tmp_path: Path) -> None:
    """The job was killed between the ranks' last steps: all have written everything, one has not named its folder."""
    run_rank_threads(2, save, tmp_path, 20, 40)
    name = "0" * 32
    (folder_of(tmp_path, 1) / "iteration-40").rename(folder_of(tmp_path, 1) / f".iteration-40.{name}")
    assert [found[0] for found in run_rank_threads(2, load, tmp_path)] == [40, 40]
    assert [path.name for path in sorted(folder_of(tmp_path, 1).iterdir())] == ["iteration-20", "iteration-40"]


def _load_and_fail_to_save(ranks: Ranks, tmp_path: Path) -> tuple[int, bool]:
    """Continue from a checkpoint until its iteration is done again, but not written."""
    checkpoints = Checkpoints(folder_of(tmp_path, 0), ranks, keep=3)
    found = checkpoints.load_newest()
    assert found is not None
    return found.iteration, checkpoints.save(40, _snapshot(40, rank=0))


def test_a_checkpoint_whose_second_renaming_fails_is_loaded_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the two renamings that give it a name has moved it."""
    run_rank_threads(1, save, tmp_path, 20, 40)
    folder = folder_of(tmp_path, 0)
    (folder / "iteration-40").rename(folder / f".iteration-40.{'0' * 32}")
    rename = Path.rename

    def fail_to_name(self: Path, target: Path) -> Path:
        if target.name == "iteration-40":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", fail_to_name)
        assert run_rank_threads(1, _load_and_fail_to_save, tmp_path) == [(40, False)]
    assert f"checkpoints could not be put in order (rank 0: {folder}: {os.strerror(errno.EIO)})" in (
        capsys.readouterr().err
    )
    assert [found[0] for found in run_rank_threads(1, load, tmp_path)] == [40]


def test_a_save_that_was_cut_short_is_not_taken_and_makes_room_for_the_next(tmp_path: Path) -> None:
    run_rank_threads(2, save, tmp_path, 20, 40)
    cut = folder_of(tmp_path, 1) / f".iteration-60.{'0' * 32}"
    shutil.copytree(folder_of(tmp_path, 1) / "iteration-40", cut)
    (cut / "rank-1.pt").unlink()
    assert [found[0] for found in run_rank_threads(2, load, tmp_path)] == [40, 40]
    assert cut.exists()
    run_rank_threads(2, save, tmp_path, 60)
    assert not cut.exists()


def test_files_of_two_saves_are_never_one_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same iteration is written twice, and the second time only one rank's file reaches the disk."""
    run_rank_threads(1, save, tmp_path, 20, 40)
    once = folder_of(tmp_path, 0)
    shutil.copytree(once, tmp_path / "once")
    run_rank_threads(1, save, tmp_path, 40)
    assert contents(once / "aside-1-of-iteration-40") == contents(tmp_path / "once" / "iteration-40")
    for name in ("shared.pt", "shared.pt.sha256"):
        shutil.copy(tmp_path / "once" / "iteration-40" / name, once / "iteration-40" / name)
    assert [found[0] for found in run_rank_threads(1, load, tmp_path)] == [20]
    assert "rank-0.pt is of another save than shared.pt in the same folder" in capsys.readouterr().err


def _foreign_object(path: Path) -> None:
    write(path, [torch.zeros(3)])


def _other_rank(path: Path) -> None:
    found = torch.load(path.with_name("rank-0.pt"), weights_only=True)
    write(path.with_name("rank-0.pt"), found | {"rank": 1})


def _other_world_size(path: Path) -> None:
    found = torch.load(path.with_name("rank-0.pt"), weights_only=True)
    write(path.with_name("rank-0.pt"), found | {"world_size": 7})


def _pickle(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {path.parent}/executed",)

    write(path, Evil())
    assert not path.with_name("executed").exists()


def _number_of_numpy(path: Path) -> None:
    write(path, {"format": 2, "state": np.float64(1.0)})


def _nested(path: Path) -> None:
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    write(path, {"format": 2, "state": nested})


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)  # ELOOP; a bad sector's EIO and a lack of permission are errors of the same kind


def write(path: Path, value: object) -> None:
    """Write a file with the right checksum, whatever it holds."""
    torch.save(value, path)
    path.with_name(path.name + ".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_foreign_object, "shared.pt is no checkpoint of pipesgd"),
        (_other_rank, "rank-0.pt is of rank 1, not 0"),
        (_other_world_size, "rank-0.pt is of world size 7, not 1"),
        (_pickle, "shared.pt is no checkpoint (UnpicklingError: "),
        (_number_of_numpy, "shared.pt is no checkpoint (UnpicklingError: Unsupported global: GLOBAL numpy."),
        (_nested, f"shared.pt is no checkpoint of pipesgd in format {FORMAT}"),
        (_link_to_itself, f"shared.pt: {os.strerror(errno.ELOOP)})"),
    ],
)
def test_what_this_run_did_not_write_is_skipped_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], said: str
) -> None:
    run_rank_threads(1, save, tmp_path, 20, 40)
    spoil(folder_of(tmp_path, 0) / "iteration-40" / "shared.pt")
    assert run_rank_threads(1, load, tmp_path) == [(20, 20, {"rank": 0})]
    warnings = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert len(warnings) == 1
    assert said in warnings[0]
    assert not (folder_of(tmp_path, 0) / "aside-1-of-iteration-40" / "executed").exists()


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    folder_of(tmp_path, 0).parent.mkdir()
    folder_of(tmp_path, 0).write_text("a file")
    line = refused(run_rank_threads(1, load, tmp_path))
    assert f"got an unreadable folder ({folder_of(tmp_path, 0)}: {os.strerror(errno.ENOTDIR)}) on rank 0" in line


def _save_on_a_full_disk(ranks: Ranks, tmp_path: Path) -> tuple[list[bool], list[int | None]]:
    """Save 20, which fits; 40, which does not on rank 1; 60, which fails for another reason; 80, when there is room."""
    checkpoints = Checkpoints(folder_of(tmp_path, ranks.rank), ranks, keep=3)
    written, newest = [], []
    for iteration in (20, 40, 60, 80):
        folder = folder_of(tmp_path, ranks.rank)
        if ranks.rank == 1:
            if iteration == 60:
                folder.rename(folder.with_name("elsewhere"))
                folder.write_text("a file where the folder was")
            if iteration == 80:
                folder.unlink()
                folder.with_name("elsewhere").rename(folder)
        own = torch.zeros(100_000 if iteration == 40 else 10)
        written.append(checkpoints.save(iteration, _snapshot(iteration, own=own)))
        newest.append(checkpoints.newest)
    return written, newest


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_one_warning_and_the_next_is_tried(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "machine-1").symlink_to(small_disk)
    results = run_rank_threads(2, _save_on_a_full_disk, tmp_path)
    assert results == [([True, False, False, True], [20, 20, 20, 80])] * 2
    folder = folder_of(tmp_path, 1)
    assert capsys.readouterr().err.splitlines() == [
        f"warning: the checkpoint of iteration 40 could not be written (rank 1: {folder}: No space left on device); "
        "training continues, the newest is that of iteration 20",
        f"warning: the checkpoint of iteration 60 could not be written (rank 1: {folder}: Not a directory); "
        "training continues, the newest is that of iteration 20",
    ]
    for rank in (0, 1):
        assert sorted(path.name for path in folder_of(tmp_path, rank).iterdir()) == ["iteration-20", "iteration-80"]
    assert [found.iteration for found in run_rank_threads(2, _load_any, tmp_path)] == [80, 80]
    assert os.statvfs(small_disk).f_bavail > 0


def _load_any(ranks: Ranks, tmp_path: Path) -> Any:
    return Checkpoints(folder_of(tmp_path, ranks.rank), ranks, keep=3).load_newest()


def test_machines_with_a_common_disk_write_and_load_one_folder(tmp_path: Path) -> None:
    folder_of(tmp_path, 0).mkdir(parents=True)
    folder_of(tmp_path, 1).parent.mkdir()
    folder_of(tmp_path, 1).symlink_to(folder_of(tmp_path, 0))
    for _ in range(5):
        assert run_rank_threads(2, save, tmp_path, 20, 40) == [[True, True]] * 2
        assert [found[:2] for found in run_rank_threads(2, load, tmp_path)] == [(40, 40)] * 2


@pytest.mark.parametrize("machines", [2, 4])
def test_machines_with_a_common_disk_that_name_a_checkpoint_at_once_name_it_once(tmp_path: Path, machines: int) -> None:
    folder, save = CheckpointFolder(tmp_path), "0" * 32
    with concurrent.futures.ThreadPoolExecutor(machines) as threads:
        for iteration in range(100):
            folder.name_of(iteration).mkdir()
            (folder.name_of(iteration) / "old").touch()
            unfinished = folder.place_for(iteration, save)
            unfinished.mkdir()
            (unfinished / "new").touch()
            together = threading.Barrier(machines)

            def publish(unfinished: Path, iteration: int, together: threading.Barrier) -> None:
                together.wait()
                folder.publish(unfinished, iteration)

            for outcome in [threads.submit(publish, unfinished, iteration, together) for _ in range(machines)]:
                outcome.result()
            contents = {path.name: [file.name for file in path.iterdir()] for path in folder.all()}
            assert contents[f"iteration-{iteration}"] == ["new"]
            assert contents[f"aside-1-of-iteration-{iteration}"] == ["old"]
            assert len(contents) == 2 * (iteration + 1)


def test_a_checkpoint_that_is_gone_is_not_taken_for_one_that_was_named(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(FileNotFoundError):
        folder.publish(folder.place_for(20, "0" * 32), 20)
