"""Faults: the definition of a miss, what is observed of processes and files, and one fault done to real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.faults.__main__ import observe, parse
from experiments.faults.observation import Observation
from experiments.faults.outcome import Scenario, accused, misses, row, without_folders
from experiments.faults.scenarios import QUICK, SCENARIOS
from experiments.faults.stage import Stage, checkpoints, logged_iterations
from pipesgd.errors import RunError, UserInputError

pytestmark = pytest.mark.slow

KILLED = Scenario(
    id="K",
    fault="rank 1 killed",
    play=lambda stage: None,
    says=r"error: .*\brank 1\b",
    names=(1,),
    lost=21,
)
GOOD = Observation(
    lines=[
        [-3.0, "error: an old line about rank 1; no heartbeat from rank 2"],
        [2.0, "error: rank 0: receive with rank 1 in iteration 43 failed; no heartbeat from rank 1"],
        [2.1, "    exitcode  : 1 (pid: 7)"],
    ],
    ended=3.0,
    went_on=False,
    orphans=0,
    iterations_lost=3,
    files_lost=[],
    deadline=10.0,
)
GOES_ON = Scenario(id="G", fault="a short stop", play=lambda stage: None, goes_on=True)
WENT_ON = replace(GOOD, lines=[[1.0, "iteration 40/100"]], went_on=True)


def test_what_is_as_expected_is_no_miss() -> None:
    assert misses(KILLED, GOOD) == []
    assert misses(GOES_ON, WENT_ON) == []
    assert row(KILLED, GOOD)["seconds"] == 2.0
    assert row(KILLED, GOOD)["named_silent"] == "1"


@pytest.mark.parametrize(
    ("change", "miss"),
    [
        ({"lines": []}, "the expected line did not appear"),
        ({"lines": [[13.5, "error: rank 0: no heartbeat from rank 1"]]}, "the line came after 13.5 s instead of 13"),
        ({"lines": [[1.0, "error: rank 1: no heartbeat from ranks 0, 1"]]}, "named as silent: 0, 1 instead of 1"),
        ({"lines": [[1.0, "error: rank 1 is gone"]]}, "named as silent: nobody instead of 1"),
        (
            {"lines": [[1.0, '  File "/a/pipesgd/train.py", line 7, in train'], *GOOD.lines]},
            "a traceback appeared",
        ),
        ({"ended": None}, "the run did not end"),
        ({"orphans": 2}, "2 processes were left"),
        ({"iterations_lost": 22}, "22 iterations were lost instead of at most 21"),
        ({"iterations_lost": None}, "no checkpoint was left"),
        ({"files_lost": ["iteration-20/shared.pt"]}, "checkpoint files were lost: iteration-20/shared.pt"),
        ({"problem": "the run did not get under way"}, "the run did not get under way"),
    ],
)
def test_whatever_is_not_as_expected_is_a_miss(change: dict[str, object], miss: str) -> None:
    assert miss in misses(KILLED, replace(GOOD, **change))  # type: ignore[arg-type]


def test_a_run_that_is_to_survive_must_go_on_without_a_complaint() -> None:
    assert misses(GOES_ON, replace(WENT_ON, went_on=False)) == ["the run did not continue"]
    complaint = replace(WENT_ON, lines=[[1.0, "warning: something"]])
    assert misses(GOES_ON, complaint) == ["an error or a warning appeared"]
    own_stop = replace(WENT_ON, lines=[[1.0, "error: rank 0: told to stop (SIGTERM)"]])
    assert misses(GOES_ON, own_stop) == []


def test_exit_codes_are_those_of_all_ranks() -> None:
    refused = replace(KILLED, exit_code=2)
    assert misses(refused, GOOD) == ["exit codes of ranks: [1] instead of 2"]


def test_only_lines_after_the_fault_accuse() -> None:
    assert accused(GOOD) == {1}


def test_no_folder_of_this_machine_is_in_a_result() -> None:
    assert without_folders('cannot read "/tmp/a/b/run.json": no') == 'cannot read "run.json": no'
    assert without_folders("2.5/3 s, and/or") == "2.5/3 s, and/or"


def test_every_fault_has_a_name_of_its_own_and_an_expectation() -> None:
    names = [one.id for one in SCENARIOS]
    assert len(set(names)) == len(names)
    assert set(QUICK) <= set(names)


def test_options_name_faults_that_there_are(tmp_path: Path) -> None:
    words = ["--output", str(tmp_path)]
    assert parse([*words, "--only", "S1", "S18c"], by_torchrun=False).only == ["S1", "S18c"]
    with pytest.raises(UserInputError, match=r"only must be one of .*S1"):
        parse([*words, "--only", "S1x"], by_torchrun=False)
    with pytest.raises(UserInputError, match="without torchrun"):
        parse(words, by_torchrun=True)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Open an empty stage."""
    with Stage(tmp_path, deadline=5.0) as stage:
        yield stage


def test_processes_of_a_stage_are_found_and_killed_also_when_they_are_stopped(stage: Stage) -> None:
    words = [sys.executable, "-c", "print('started', flush=True); input()"]
    env = stage.environment({"RANK": "3"})
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert stage.rank(3) == process.pid
        os.kill(process.pid, signal.SIGSTOP)
        assert list(stage.alive()) == [process.pid]
        stage.spare(process.pid)
        assert stage.alive() == {}
        stage.kill()
        assert process.wait(60) == -signal.SIGKILL


def test_only_published_checkpoints_and_whole_lines_count(tmp_path: Path) -> None:
    for iteration, names in ((20, ("shared.pt", "rank-0.pt")), (40, ("shared.pt",))):
        folder = tmp_path / "checkpoints" / f"iteration-{iteration}"
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.sha256").touch()
    assert checkpoints(tmp_path) == [20]
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 7}\n{"iterat\n', encoding="utf-8")
    assert logged_iterations(tmp_path) == 8


def test_a_checkpoint_file_that_must_stay_may_move_but_not_go(stage: Stage) -> None:
    path = stage.folder / "checkpoints" / "iteration-20" / "shared.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    stage.keep(stage.folder)
    aside = path.parent.rename(path.parent.with_name("aside"))
    assert stage.lost_files() == []
    (aside / "shared.pt").unlink()
    assert stage.lost_files() == ["iteration-20/shared.pt"]


def test_a_killed_rank_is_named_by_the_others() -> None:
    killed = next(one for one in SCENARIOS if one.id == "S1")
    assert misses(killed, observe(killed)) == []


def test_a_fault_hits_the_rank_and_no_process_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine numbers of processes begin again: a rank's loader may have a lower one than the rank."""
    parents = {900: 1, 5: 900, 30: 900, 6: 5, 901: 1}
    monkeypatch.setattr("experiments.faults.stage._parent", parents.get)
    play = Stage(tmp_path, 10.0)  # never entered: at its end it would kill these processes
    monkeypatch.setattr(play, "alive", lambda: {pid: {"RANK": str(int(pid == 901))} for pid in parents})
    assert (play.rank(0), play.rank(1)) == (900, 901)
    monkeypatch.setattr(play, "alive", dict)
    with pytest.raises(RunError, match="rank 0 must be one process; got 0"):
        play.rank(0)
