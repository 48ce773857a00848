"""The output folder: one job at a time, and only files that this program wrote are ever deleted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from _rank_threads import run_rank_threads
from _runs import contents

from pipesgd.cli import parse
from pipesgd.config import TrainConfig
from pipesgd.errors import CheckpointError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run import output
from pipesgd.run.files import write_text_atomically
from pipesgd.run.output import earlier_run, take_folder


def _take(ranks: Ranks, config: TrainConfig) -> Any:
    earlier_run(config, ranks)
    return take_folder(config, ranks)


def configuration(folder: Path, words: str = "") -> TrainConfig:
    return parse(["--output", str(folder), *words.split()])


def take(folder: Path, words: str = "") -> Any:
    """Return the lock that a single rank gets, or the error if it does not get one."""
    return run_rank_threads(1, _take, configuration(folder, words))[0]


def attempts_of_one_job(
    folder: Path, words: str, number: int, *, counted: bool, between: Callable[[], object]
) -> list[Any]:
    """Return the locks of a job and its torchrun restarts, which share a store; call ``between`` after each of them."""
    store, got = dist.HashStore(), []
    for attempt in range(number):
        session = dist.PrefixStore(f"attempt {attempt}", store)
        count = attempt if counted else 0
        ranks = Ranks(rank=0, world_size=1, store=session, job_store=store, restart_count=count, processes=attempt + 1)
        got.append(_take(ranks, configuration(folder, words)))
        got[-1].release()
        between()
    return got


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("words", ["", "--overwrite"])
def test_a_restart_continues_what_its_job_has_begun(tmp_path: Path, words: str, counted: bool) -> None:
    """torchrun counts no restart when a machine joins: ``--overwrite`` used to delete the checkpoints of the job."""
    if words:
        take(tmp_path).release()
        (tmp_path / "model.pt").write_text("of an earlier job")
    found: list[bool] = []

    def look_and_train() -> None:
        found.append((tmp_path / "model.pt").exists())
        (tmp_path / "model.pt").write_text("of this job")

    attempts_of_one_job(tmp_path, words, 2, counted=counted, between=look_and_train)
    assert found == [False, True]


def test_a_second_run_of_a_job_continues_nothing_in_another_folder(tmp_path: Path) -> None:
    """A script that torchrun starts may run two commands."""
    first, second = tmp_path / "first", tmp_path / "second"
    take(second).release()
    (second / "model.pt").write_text("of an earlier job")
    store = dist.HashStore()
    for number, (folder, words) in enumerate([(first, ""), (second, "--overwrite")]):
        session = dist.PrefixStore(f"run {number}", store)
        _take(Ranks(rank=0, world_size=1, store=session, job_store=store), configuration(folder, words)).release()
    assert not (second / "model.pt").exists()


def test_a_restart_continues_nothing_of_an_earlier_job(tmp_path: Path) -> None:
    """The job's first attempt was refused, or failed before it took the folder."""

    def second_attempt(ranks: Ranks, words: str) -> Any:
        ranks.restart_count, ranks.processes = 1, 2
        return _take(ranks, configuration(tmp_path, words))

    take(tmp_path).release()
    (tmp_path / "model.pt").write_text("of an earlier job")
    before = contents(tmp_path)
    refused = run_rank_threads(1, second_attempt, "")[0]
    assert "output must not hold another run" in str(refused)
    assert contents(tmp_path) == before
    for lock in run_rank_threads(1, second_attempt, "--overwrite"):
        lock.release()
    assert not (tmp_path / "model.pt").exists()


def test_a_restart_with_a_new_store_deletes_nothing(tmp_path: Path) -> None:
    """Nobody knows then whose run is in the folder: ``--overwrite`` used to delete the checkpoints of the job."""

    def restarted(ranks: Ranks) -> Any:
        ranks.restart_count, ranks.processes = 1, 1 + ranks.rank
        return _take(ranks, config)

    take(tmp_path).release()
    (tmp_path / "model.pt").write_text("of an earlier attempt, or of an earlier job")
    before = contents(tmp_path)
    config = configuration(tmp_path, "--overwrite")
    for refused in run_rank_threads(2, restarted):
        assert str(refused) == (
            f"output must hold no run when torchrun restarts the ranks with a new store; got {tmp_path}, which may "
            "hold the run of this very job, so --overwrite does not delete it (--resume continues it)"
        )
    assert contents(tmp_path) == before


@pytest.mark.parametrize("words", ["", "--resume", "--overwrite"])
def test_a_folder_in_use_is_refused_and_not_touched(tmp_path: Path, words: str) -> None:
    lock = take(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("lines of the run that holds it\n")
    before = contents(tmp_path)
    refused = take(tmp_path / "run", words)
    assert isinstance(refused, UserInputError)
    assert str(refused).startswith(
        f"output must not be in use; got {tmp_path / 'run'}, which process {os.getpid()} on "
    )
    assert contents(tmp_path) == before
    lock.release()
    if words:
        take(tmp_path / "run", words).release()


def test_two_jobs_that_start_at_once_do_not_both_get_a_new_folder(tmp_path: Path) -> None:
    """Both jobs find it empty before either writes."""
    both_have_looked = threading.Barrier(2)
    results: list[Any] = [None, None]
    config = configuration(tmp_path / "run")

    def start(index: int) -> None:
        def run(ranks: Ranks) -> Any:
            earlier_run(config, ranks)
            both_have_looked.wait(20)
            return take_folder(config, ranks)

        results[index] = run_rank_threads(1, run)[0]

    threads = [threading.Thread(target=start, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    failures = [result for result in results if isinstance(result, Exception)]
    assert len(failures) == 1, results
    assert "output must not " in str(failures[0])
    next(result for result in results if not isinstance(result, Exception)).release()


def test_machines_with_a_common_disk_share_the_lock(tmp_path: Path) -> None:
    locks = run_rank_threads(3, _take, configuration(tmp_path / "run"))
    assert not [lock for lock in locks if isinstance(lock, Exception)]
    assert isinstance(take(tmp_path / "run", "--resume"), UserInputError)
    for lock in locks:
        lock.release()


def test_machines_with_a_common_disk_do_not_delete_what_one_of_them_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = threading.Event()
    seen: list[bool] = []

    def delete(paths: list[Path]) -> None:
        writing.wait(0.5)  # a slow machine
        seen.append(writing.is_set())

    def write(path: Path, text: str) -> None:
        writing.set()
        write_text_atomically(path, text)

    monkeypatch.setattr(output, "_delete", delete)
    monkeypatch.setattr(output, "write_text_atomically", write)
    first, second = run_rank_threads(2, _take, configuration(tmp_path))
    assert seen == [False, False]
    first.release()
    second.release()


def _sleep_until(event: Any) -> None:
    event.wait(60)


@pytest.mark.slow
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = take(tmp_path / "run")
    fork = multiprocessing.get_context("fork")
    end = fork.Event()
    child = fork.Process(target=_sleep_until, args=(end,))
    child.start()
    try:
        lock.release()
        take(tmp_path / "run", "--resume").release()
    finally:
        end.set()
        child.join(20)


def test_a_file_system_without_locks_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    take(tmp_path / "run").release()
    take(tmp_path / "run", "--resume").release()
    line = f"warning: {tmp_path / 'run'} is on a file system without locks (No locks available): "
    assert [text.startswith(line) for text in capsys.readouterr().err.splitlines()] == [True, True]


def test_machines_see_each_others_job_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, other machines see what one machine writes once it is flushed to the disk, and not before."""
    cached: dict[int, bytes] = {}
    real_write, real_sync = os.pwrite, os.fsync

    def write(descriptor: int, data: bytes, at: int) -> int:
        cached[descriptor] = data
        return len(data)

    def sync(descriptor: int) -> None:
        if descriptor in cached:
            real_write(descriptor, cached.pop(descriptor), 0)
        real_sync(descriptor)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fsync", sync)
    for lock in run_rank_threads(2, _take, configuration(tmp_path)):
        assert not isinstance(lock, Exception), lock
        lock.release()


def test_a_lock_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, kind: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", broken)
    refused = take(tmp_path)
    assert isinstance(refused, UserInputError)
    assert str(refused) == f"output must be a folder whose .lock can be locked; got {tmp_path}: Input/output error"


def test_overwrite_deletes_what_a_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    take(tmp_path).release()
    ours = ["model.pt", "model.pt.sha256", "summary.json", "metrics.jsonl.aside-1", "checkpoints/iteration-5/shared.pt"]
    ours += ["report.html", "attempts.jsonl"]
    ours += ["checkpoints/aside-1-of-iteration-7/rank-0.pt", "tensorboard/events.out.tfevents.1.a.2.0"]
    ours += [f"checkpoints/.iteration-8.{'0f' * 16}/rank-0.pt", ".run.json.0123456789abcdef.tmp"]
    others = ["thesis.tex", "checkpoints/of-another-program", "tensorboard/notes"]
    others += ["checkpoints/iteration-500-best/shared.pt", "checkpoints/aside-1-of-iteration-7-best/shared.pt"]
    others += [".summary.json.mine.tmp", "metrics.jsonl.aside-mine", "tensorboard/events.out.tfevents.mine"]
    for name in ours + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("content")
    take(tmp_path, "--overwrite --lr 0.5").release()
    assert contents(tmp_path).keys() == {*others, "run.json", ".lock"}
    assert json.loads((tmp_path / "run.json").read_text())["options"]["lr"] == 0.5


def take_planned(folder: Path, words: str, width: int) -> list[Any]:
    """Return what each of two ranks gets, which have a folder each."""
    configs = [configuration(folder / str(rank), words) for rank in range(2)]  # not by threads: tyro is made for one
    return run_rank_threads(2, _take_planned, configs, width)


def _take_planned(ranks: Ranks, configs: Sequence[TrainConfig], width: int) -> Any:
    config = configs[ranks.rank]
    planned = {"asked": ["width"], "choices": {"width": width}}
    earlier = earlier_run(config, ranks)
    return take_folder(config.with_choices({"width": width}), ranks, planned, earlier)


def test_a_machine_that_has_missed_a_decision_continues_by_that_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # on a busy disk, a rank could keep the others waiting
    for lock in take_planned(tmp_path, "--width auto", 1):
        lock.release()
    path = tmp_path / "0" / "run.json"
    path.write_text(path.read_text().replace('"width": 1', '"width": 2'))
    locks = take_planned(tmp_path, "--width auto --resume", 2)
    assert not any(isinstance(lock, Exception) for lock in locks), locks
    for lock in locks:
        lock.release()
    assert json.loads((tmp_path / "1" / "run.json").read_text())["options"]["width"] == 2
    for refused in take_planned(tmp_path, "--width 3 --resume", 3):
        assert str(refused) == "width must be that of the run to resume, 2; got 3"


@pytest.mark.parametrize("words", ["", "--width auto"])
def test_overwrite_keeps_the_cluster_that_it_is_told_to_use(tmp_path: Path, words: str) -> None:
    take(tmp_path / "run").release()
    (tmp_path / "run" / "cluster.toml").write_text("measured")
    take(tmp_path / "run", f"--overwrite {words} --cluster {tmp_path}/run/../run/cluster.toml").release()
    assert (tmp_path / "run" / "cluster.toml").read_text() == "measured"
    take(tmp_path / "run", "--overwrite").release()
    assert not (tmp_path / "run" / "cluster.toml").exists()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_overwrite_deletes_nothing_through_a_link(tmp_path: Path, name: str) -> None:
    take(tmp_path / "run").release()
    kept = tmp_path / "elsewhere" / "iteration-7" / "shared.pt"
    kept.parent.mkdir(parents=True)
    kept.write_text("of another run")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    assert str(take(tmp_path / "run", "--overwrite")) == (
        f"output must hold a run that can be deleted; got {tmp_path / 'run' / name}, which is a link (--overwrite)"
    )
    assert contents(tmp_path) == before
    take(tmp_path / "run", "--resume").release()


@pytest.mark.parametrize(
    "text", ['{"name": "another program\'s"}', "", '{"world_size": 1, "options": {"a": 1}}', "[" * 100_000]
)
def test_a_run_json_of_another_program_protects_its_folder(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "model.pt").write_text("a foreign model")
    before = contents(tmp_path)
    refused = take(tmp_path, "--overwrite")
    assert str(refused) == (
        f"output must hold a run of pipesgd to be overwritten; got {tmp_path}, whose run.json describes none"
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"options": {}, "world_size": 1e400}',
        '{"options": {}, "world_size": "1"}',
        '{"options": [["a", 1]], "world_size": 1}',
        '{"options": {}, "world_size": 1, "planned": []}',
    ],
)
def test_a_damaged_description_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    refused = take(tmp_path, "--resume")
    assert isinstance(refused, UserInputError | CheckpointError)
    assert f"{tmp_path}/run.json must describe the run to resume; it cannot be read: " in str(refused)
    assert "\n" not in str(refused)


@pytest.mark.slow
def test_a_full_disk_refuses_a_new_run_and_lets_an_old_one_continue(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    take(small_disk / "old").release()
    (small_disk / "new").mkdir()
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    take(small_disk / "old", "--resume").release()
    warned = capsys.readouterr().err
    assert "No space left on device; training continues, and run.json stays as it was" in warned
    assert warned.count("\n") == 1
    refused = take(small_disk / "new")
    assert str(refused) == f"output must be a folder to write to; got {small_disk / 'new'}: No space left on device"


@pytest.mark.parametrize(
    ("words", "refused"), [("", ""), ("--loss own:loss", "loss must be that of the run to resume")]
)
def test_a_run_older_than_an_option_continues_with_its_default(tmp_path: Path, words: str, refused: str) -> None:
    take(tmp_path).release()
    earlier = json.loads((tmp_path / "run.json").read_text())
    del earlier["options"]["loss"]
    (tmp_path / "run.json").write_text(json.dumps(earlier))
    found = take(tmp_path, f"--resume {words}")
    if refused:
        assert refused in str(found)
    else:
        found.release()


def test_no_link_is_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("two years of work")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".run.json.0.tmp", "run.json", ".lock"):
        (folder / name).symlink_to(victim)
    write_text_atomically(folder / "run.json", "{}")
    assert not (folder / "run.json").is_symlink()
    assert isinstance(take(folder, "--overwrite"), UserInputError)  # the lock is a link, and not followed
    assert victim.read_text() == "two years of work"
