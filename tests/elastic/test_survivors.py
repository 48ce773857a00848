"""Ranks that are killed while they train: the others continue, hold the same weights, and take over the samples."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from _links import new_secret

from experiments import elastic_ranks, forked_ranks, integer_sums
from experiments.elastic_ranks import CHECKPOINT, COMPUTING, EVALUATION, LAST_SEND, MESSAGES, Ended, Kill
from pipesgd.run.attempts import read_attempts

pytestmark = pytest.mark.slow

WORDS = (
    "--dataset digits --model mlp --hidden-sizes 32 --batch-size 16 --iterations 60 --width 2 --codec int4 "
    "--transport tcp --elastic 1 --timeout 20 --checkpoint-iterations 10 --evaluate-iterations 7"
)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    forked_ranks.import_all()


def _run(folder: Path, world_size: int, *kills: Kill, words: str = WORDS) -> tuple[Ended, str]:
    ended = elastic_ranks.run(words, world_size, folder, kills)
    log = (folder / "log").read_text(encoding="utf-8")
    assert not ended.hung, log
    return ended, log


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return found


def test_without_a_loss_it_trains_as_if_it_were_not_elastic(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("elastic", "plain")]
    for folder in folders:
        folder.mkdir()
    ended, log = _run(folders[0], 3)
    assert set(ended.codes.values()) == {0}, log
    plain = elastic_ranks.run(WORDS.replace("--elastic 1 ", ""), 3, folders[1])
    assert set(plain.codes.values()) == {0}
    summaries = [_summary(folder) for folder in folders]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert [one["members"] for one in summaries[0]["generations"]] == [[0, 1, 2]]


@pytest.mark.parametrize("phase", [COMPUTING, "hop", "arrival", EVALUATION, CHECKPOINT])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_continue_after_a_kill(tmp_path: Path, phase: str, rank: int) -> None:
    call = {EVALUATION: 2, CHECKPOINT: 2, "hop": 150}.get(phase, 20)
    ended, log = _run(tmp_path, 3, Kill(rank=rank, phase=phase, call=call, seconds=0.002))
    others = [one for one in range(3) if one != rank]
    assert ended.codes == {rank: -14} | dict.fromkeys(others, 0), log
    summary = _summary(tmp_path)
    assert summary["replicas_identical"]
    assert summary["iterations"] == 60
    last = summary["generations"][-1]
    assert last["members"] == others
    assert [one["rank"] for one in last["lost"]] == [rank]
    attempts = read_attempts(tmp_path / "run" / "attempts.jsonl")  # another first rank records from there on
    assert [one.start for one in attempts] == [0, last["first_iteration"]][: 2 - rank]
    assert f"rank {rank} is lost: its process has ended. Generation 1: ranks {others[0]}, {others[1]}" in log


@pytest.mark.parametrize("message", MESSAGES)
def test_a_second_death_in_the_change_is_survived_too(tmp_path: Path, message: str) -> None:
    """The rank after the one that is killed first lacks a mean, and fetches it from the first one that has it."""
    first = Kill(rank=0, phase=LAST_SEND, call=20) if message == "Fetch" else Kill(rank=3, phase=LAST_SEND, call=20)
    kills = [Kill(rank=rank, phase=message, call=0) for rank in (0, 1) if rank != first.rank]
    ended, log = _run(tmp_path, 5, first, *kills)
    assert ended.codes[2] == ended.codes[4] == 0, log
    assert ended.codes[first.rank] == -9
    assert message in [phase for notes in ended.notes.values() for phase in notes.kills]
    summary = _summary(tmp_path)
    assert summary["replicas_identical"]
    assert summary["generations"][-1]["members"] == [rank for rank in range(5) if ended.codes[rank] == 0]


def test_down_to_one(tmp_path: Path) -> None:
    kills = [Kill(rank=rank, phase=COMPUTING, call=10 * (1 + order)) for order, rank in enumerate((2, 0, 3))]
    ended, log = _run(tmp_path, 4, *kills)
    assert ended.codes[1] == 0, log
    summary = _summary(tmp_path)
    assert summary["generations"][-1]["members"] == [1]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary["final"]["train_loss"] > sum(losses[-37:]) / 37, "an epoch of one rank has 93 iterations"


def test_below_the_least_number_the_state_is_written(tmp_path: Path) -> None:
    kill = Kill(rank=1, phase=COMPUTING, call=20)
    ended, log = _run(tmp_path, 2, kill, words=WORDS.replace("--elastic 1", "--elastic 2"))
    assert ended.codes == {0: 75, 1: -9}, log
    assert "fewer than --elastic 2; --resume continues after iteration 2" in log
    again = elastic_ranks.run(f"{WORDS} --resume", 1, tmp_path)
    assert again.codes == {0: 0}, (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [1, 2])
def test_several_that_are_left_below_the_least_number_write_their_state_together(tmp_path: Path, width: int) -> None:
    """One of them may have begun an iteration that the other has not."""
    words = WORDS.replace("--elastic 1", "--elastic 3").replace("--width 2", f"--width {width}")
    kills = [Kill(rank=rank, phase=COMPUTING, call=20 + rank % 2, seconds=0.001) for rank in (1, 2)]
    ended, log = _run(tmp_path, 4, *kills, words=words)
    assert ended.codes == {0: 75, 1: -14, 2: -14, 3: 75}, log
    [newest] = {line for line in log.splitlines() if "--resume continues after iteration" in line}
    folder = tmp_path / "run" / "checkpoints" / f"iteration-{newest.rsplit(' ', 1)[1]}"
    assert sorted(path.name for path in folder.glob("*.pt")) == ["rank-0.pt", "rank-1.pt", "shared.pt"]
    again = elastic_ranks.run(f"{words} --resume", 3, tmp_path)
    assert set(again.codes.values()) == {0}, (tmp_path / "log").read_text(encoding="utf-8")


def test_epochs_end_with_their_samples_and_the_schedule_with_them(tmp_path: Path) -> None:
    words = WORDS.replace("--iterations 60", "--epochs 2 --schedule one-cycle")
    kills = [Kill(rank=rank, phase=COMPUTING, call=20 + rank) for rank in (1, 4)]
    ended, log = _run(tmp_path, 5, *kills, words=words)
    assert [ended.codes[rank] for rank in (0, 2, 3)] == [0, 0, 0], log
    summary = _summary(tmp_path)
    last = summary["generations"][-1]
    assert last["members"] == [0, 2, 3]
    given = sum(len(lost["slices_given_back"]) for one in summary["generations"] for lost in one["lost"])
    slices = 1497 // (5 * 16) * 5 * 2  # the training set of digits in whole batches of five ranks, twice
    first, second = (one["first_iteration"] for one in summary["generations"][1:])
    used = 5 * first + 4 * (second - first) + 3 * (summary["iterations"] - second) - given
    assert slices <= used < slices + 3


# ---- Ranks that are stopped, or asked to stop

LONG = WORDS.replace("--iterations 60", "--iterations 1000000").replace("--evaluate-iterations 7", "")
"""Options of a run that ends when it is told to, however fast the machine is."""


class _Signal:
    """Signals to ranks some time after training has begun, each once."""

    def __init__(self, folder: Path, *signals: tuple[float, int, int]):
        self._metrics = folder / "run" / "metrics.jsonl"
        self._due = sorted(signals)
        self._begin: float | None = None
        self._size = self._written()

    def _written(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else 0

    def __call__(self, pids: Mapping[int, int]) -> None:
        if self._begin is None and self._written() > self._size:
            self._begin = time.monotonic()
        while self._begin is not None and self._due and time.monotonic() >= self._begin + self._due[0][0]:
            _, rank, number = self._due.pop(0)
            if rank in pids:
                os.kill(pids[rank], number)


def _run_with(folder: Path, world_size: int, words: str, *signals: tuple[float, int, int]) -> tuple[Ended, str]:
    ended = elastic_ranks.run(words, world_size, folder, meanwhile=_Signal(folder, *signals))
    log = (folder / "log").read_text(encoding="utf-8")
    assert not ended.hung, log
    return ended, log


def _resume_and_end(folder: Path) -> None:
    ended, log = _run_with(folder, 3, f"{LONG} --resume", *((1.0, rank, signal.SIGTERM) for rank in range(3)))
    assert set(ended.codes.values()) == {143}, log
    assert "stopped by SIGTERM after iteration " in log.rpartition("starting rank 0 ")[2]


def test_a_rank_that_is_silent_for_a_second_is_not_left_behind(tmp_path: Path) -> None:
    stop = [(2.0, 1, signal.SIGSTOP), (3.2, 1, signal.SIGCONT)]
    end = [(5.5, rank, signal.SIGTERM) for rank in range(3)]
    ended, log = _run_with(tmp_path, 3, LONG, *stop, *end)
    assert set(ended.codes.values()) == {143}, log
    assert "rank 1 is lost" not in log
    assert "Generation 1: ranks 0, 1, 2" in log  # who is left writes the checkpoint: all of them


def test_a_rank_that_is_silent_for_long_is_left_behind_and_says_so(tmp_path: Path) -> None:
    stop = [(2.0, 0, signal.SIGSTOP), (6.5, 0, signal.SIGCONT)]
    end = [(9.0, rank, signal.SIGTERM) for rank in (1, 2)]
    ended, log = _run_with(tmp_path, 3, LONG, *stop, *end)
    assert ended.codes == {0: 1, 1: 143, 2: 143}, log
    assert "rank 0 is lost: it was silent for 3." in log
    assert "rank 0 was left behind: generation 1 is without it; a restart of the job takes it in again" in log


def test_a_rank_without_a_majority_keeps_what_it_has_aside(tmp_path: Path) -> None:
    """The first of two is silent: it may continue elsewhere, so what the other one has must not count by itself."""
    stop = [(2.0, 0, signal.SIGSTOP), (9.0, 0, signal.SIGKILL)]
    words = LONG.replace("--checkpoint-iterations 10", "--checkpoint-iterations 1000")
    ended, log = _run_with(tmp_path, 2, f"{words} --wait 2", *stop)
    assert ended.codes == {0: -9, 1: 75}, log
    assert "rank 1: 1 of 2 ranks of generation 0 are here: no majority came back within 2 s" in log
    assert "Traceback" not in log
    checkpoints = tmp_path / "run" / "checkpoints"
    [kept] = checkpoints.glob("alone-*")
    done = int(kept.name.removeprefix("alone-1-of-iteration-"))
    assert f"rank 1: what it has after iteration {done} is in {kept}, and does not count" in log
    assert done not in [int(path.name.rpartition("-")[2]) for path in checkpoints.glob("iteration-*")]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["iteration"] < done for line in lines)

    kept.rename(checkpoints / f"iteration-{done}")
    _resume_and_end(tmp_path)
    assert [one.start for one in read_attempts(tmp_path / "run" / "attempts.jsonl")][:2] == [0, done]


def test_a_rank_without_a_majority_that_is_asked_to_stop_waits_no_longer(tmp_path: Path) -> None:
    signals = [(2.0, 0, signal.SIGSTOP), (7.0, 1, signal.SIGTERM), (14.0, 0, signal.SIGKILL)]
    ended, log = _run_with(tmp_path, 2, f"{LONG} --wait 60", *signals)
    assert ended.codes == {0: -9, 1: 75}, log
    assert "no majority came back within 5 s" in log
    assert list((tmp_path / "run" / "checkpoints").glob("alone-1-of-iteration-*"))


def test_what_a_rank_without_a_majority_keeps_is_what_the_ranks_have_put_in(tmp_path: Path) -> None:
    """Its samples are those of the iterations that counted, and those that only it has summed, and no others."""
    words = f"{integer_sums.OPTIONS} --iterations 4000 --width 2 --transport tcp --elastic 1 --timeout 20 --wait 2"
    stop = [(1.0, 0, signal.SIGSTOP), (8.0, 0, signal.SIGKILL)]
    ended, log = _run_with(tmp_path, 2, words, *stop)
    assert ended.codes == {0: -9, 1: 75}, log
    [kept] = (tmp_path / "run" / "checkpoints").glob("alone-*")
    done = int(kept.name.rpartition("-")[2])
    state = torch.load(kept / "shared.pt", weights_only=True)
    assert state["world_size"] == 1
    spans = state["state"]["record"]["spans"]
    assert [span[:2] for span in spans] == [[0, 2], [done, 1]]
    *_, given, given_back = spans[1]
    assert given == 2 * done
    assert given_back
    assert set(given_back) <= {2 * iteration for iteration in range(done - 2, done)}, "rank 0's of what was in flight"
    first = {"members": [0, 1], "first_iteration": 0, "iterations_done": 0, "lost": []}
    lost = [{"rank": 0, "slices_given_back": list(given_back)}]
    lone = {"members": [1], "first_iteration": done, "iterations_done": done - len(given_back), "lost": lost}
    weights, [[mean]] = state["state"]["parameters"]["values"], state["state"]["means"]  # one is not applied yet
    assert weights.equal(integer_sums.replayed({"generations": [first, lone]}, done - 1))
    assert (weights - mean).equal(integer_sums.replayed({"generations": [first, lone]}, done))


def test_a_rank_that_is_asked_to_stop_leaves(tmp_path: Path) -> None:
    end = [(6.0, rank, signal.SIGTERM) for rank in (0, 2)]
    ended, log = _run_with(tmp_path, 3, LONG, (2.0, 1, signal.SIGTERM), *end)
    assert set(ended.codes.values()) == {143}, log
    assert "rank 1 is lost: it asked to leave" in log
    assert "what the codec of rank 1 had left out is with rank 0" in log


def test_the_first_rank_that_leaves_writes_its_measurements_before(tmp_path: Path) -> None:
    words = LONG.replace("--checkpoint-iterations 10", "--checkpoint-iterations 1000000")
    ended, log = _run_with(tmp_path, 3, words, *((6.0 * (rank > 0) + 2.0, rank, signal.SIGTERM) for rank in range(3)))
    assert set(ended.codes.values()) == {143}, log
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    numbers = [json.loads(line)["iteration"] for line in lines]
    assert numbers[-1] > 100
    assert len({*range(numbers[-1])} - {*numbers}) <= 2, "as many as the others had begun before they knew"


def test_a_folder_whose_lock_cannot_be_taken_any_more_costs_no_member(tmp_path: Path) -> None:
    lock = tmp_path / "run" / ".lock"
    kill, end = _Signal(tmp_path, (2.0, 0, signal.SIGKILL)), _Signal(tmp_path, *((5.0, one, 15) for one in (1, 2)))

    def meanwhile(pids: Mapping[int, int]) -> None:
        if lock.is_file() and end._begin is not None:
            lock.unlink()
            lock.mkdir()
        kill(pids)
        end(pids)

    ended = elastic_ranks.run(LONG, 3, tmp_path, meanwhile=meanwhile)
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert ended.codes == {0: -9, 1: 143, 2: 143}, log
    assert "warning: rank 1 continues without the lock of its folder: output must be" in log


def test_the_lock_is_taken_when_a_silent_first_rank_has_ended(tmp_path: Path) -> None:
    words = LONG.replace("--checkpoint-iterations 10", "--checkpoint-iterations 1000000")
    at = {0: [(2.0, signal.SIGSTOP), (7.0, signal.SIGKILL)], 1: [(10.0, signal.SIGTERM)], 2: [(10.0, signal.SIGTERM)]}
    signals = _Signal(tmp_path, *((seconds, rank, number) for rank, one in at.items() for seconds, number in one))
    holders: list[tuple[int, int]] = []

    def meanwhile(pids: Mapping[int, int]) -> None:
        if len(pids) == 2:
            holders.append((json.loads((tmp_path / "run" / ".lock").read_text())["process"], pids.get(1, 0)))
        signals(pids)

    ended = elastic_ranks.run(words, 3, tmp_path, meanwhile=meanwhile)
    assert ended.codes == {0: -9, 1: 143, 2: 143}, (tmp_path / "log").read_text(encoding="utf-8")
    assert holders[50][0] == holders[50][1], "a second after the first one's end"


def test_a_loss_in_the_last_evaluation_is_told(tmp_path: Path) -> None:
    ended, log = _run(tmp_path, 3, Kill(rank=1, phase=EVALUATION, call=8))
    assert ended.codes == {0: 0, 1: -9, 2: 0}, log
    assert log.count("rank 1 is lost: its process has ended") == 1


def test_all_that_are_asked_to_stop_write_a_checkpoint_together(tmp_path: Path) -> None:
    ended, log = _run_with(tmp_path, 3, LONG, *((2.0 + rank / 4, rank, signal.SIGTERM) for rank in range(3)))
    assert set(ended.codes.values()) == {143}, log
    iteration = log.split("stopped by SIGTERM after iteration ")[1].split(";")[0]
    files = (tmp_path / "run" / "checkpoints" / f"iteration-{iteration}").glob("rank-*.pt")
    assert sorted(path.name for path in files) == ["rank-0.pt", "rank-1.pt", "rank-2.pt"]
    _resume_and_end(tmp_path)


def test_over_tls(tmp_path: Path) -> None:
    secret = new_secret(tmp_path, certificate=True)
    words = WORDS.replace("--transport tcp", "--transport tls") + f" --secret-file {secret.path}"
    ended, log = _run(tmp_path, 3, Kill(rank=1, phase="hop", call=150), words=words)
    assert ended.codes == {0: 0, 1: -9, 2: 0}, log
