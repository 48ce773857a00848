"""Kills in every phase of a run, drawn from a seed; one run is really killed, twice."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _ranks import run_ranks

from experiments import forked_ranks
from experiments.forked_ranks import PHASES, TRAINING, Kill
from experiments.kill_anywhere import QUICK_KILLS, STRATEGIES, WORLD_SIZE, kills_of, parse, strategy_of, trained
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

DURATIONS = {phase: [0.5, 1.0, 2.0] for phase in PHASES} | {"resume": [0.25]}
FEW = (
    "--dataset digits --hidden-sizes 8 --batch-size 64 --width 2 --iterations 12 --checkpoint-iterations 4 --timeout 60"
)


def test_kills_are_drawn_from_the_seed_and_the_number_of_the_run() -> None:
    assert kills_of(5, 0, DURATIONS) == kills_of(5, 0, DURATIONS)
    assert kills_of(5, 0, DURATIONS) != kills_of(5, 1, DURATIONS)
    assert kills_of(5, 0, DURATIONS) != kills_of(9, 0, DURATIONS)


def test_phases_take_turns_and_a_kill_lies_within_a_call_that_there_is() -> None:
    kills = [kills_of(run, 0, DURATIONS) for run in range(40)]
    assert [one[-1].phase for one in kills] == list(PHASES) * 10
    for one in (kill for some in kills for kill in some):
        assert 0 <= one.rank < WORLD_SIZE
        assert one.call < len(DURATIONS[one.phase])
        assert 0.0 <= one.seconds <= max(DURATIONS[one.phase])
    assert {one[-1].all_ranks for one in kills} == {True, False}


def test_every_strategy_is_killed_in_every_phase_as_often_as_the_others() -> None:
    runs = [(strategy_of(run), kills_of(run, 0, DURATIONS)[-1].phase) for run in range(16)]
    assert Counter(runs) == dict.fromkeys(itertools.product(STRATEGIES, PHASES), 2)
    assert {strategy for strategy, _ in runs[:QUICK_KILLS]} == set(STRATEGIES)


def test_who_is_killed_while_resuming_was_killed_in_training_before() -> None:
    first, second = kills_of(list(PHASES).index("resume"), 0, DURATIONS)
    assert (first.phase, second.phase) == (TRAINING, "resume")


Role = Callable[[tuple[int, int]], None]
"""Function that a forked rank runs; the pipe says when the other rank can take a signal."""


def _be_killed(pipe: tuple[int, int]) -> None:
    os.read(pipe[0], 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _stay(on_sigterm: Any) -> Role:
    def role(pipe: tuple[int, int]) -> None:
        signal.signal(signal.SIGTERM, on_sigterm)
        os.write(pipe[1], b" ")
        threading.Event().wait()

    return role


def _exit(code: int) -> Callable[..., None]:
    return lambda *arguments: os._exit(code)


@pytest.mark.parametrize(
    ("ranks", "all_ranks", "hits"),
    [
        ((_be_killed, _stay(signal.SIG_DFL)), False, 1),
        ((_be_killed, _stay(_exit(143))), False, 1),
        ((_be_killed, _stay(signal.SIG_IGN)), True, 1),
        ((_be_killed, _stay(signal.SIG_IGN)), False, None),  # the survivor hangs
        ((_stay(signal.SIG_IGN), _stay(signal.SIG_IGN)), False, None),  # the kill does not hit, and all hang
        ((_be_killed, _stay(_exit(2))), False, None),  # the survivor ends with an unexpected code
        ((_stay(signal.SIG_IGN), _exit(1)), True, None),  # rank 0 is killed because another one failed
    ],
)
def test_only_a_kill_after_which_the_others_end_by_themselves_is_a_hit(
    ranks: Sequence[Role],
    all_ranks: bool,
    hits: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = os.pipe()

    def fork(words: str, rank: int, world_size: int, folder: Path, port: int, attempt: int, kill: Kill | None) -> int:
        pid = os.fork()
        if pid == 0:
            if kill is not None:
                ranks[rank](pipe)
            os._exit(0)
        return pid

    monkeypatch.setattr(forked_ranks, "_fork", fork)
    kill = Kill(phase=TRAINING, rank=0, call=0, seconds=0.0, all_ranks=all_ranks)
    try:
        assert forked_ranks.run("", 2, tmp_path, [kill], deadline=2.0) == hits
    finally:
        for end in pipe:
            os.close(end)


def test_it_forks_its_ranks_itself(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="without torchrun"):
        parse(["--output", str(tmp_path)], by_torchrun=True)


def _run_forked(ranks: Ranks, folder: Path, kills: list[Kill]) -> int | None:
    return forked_ranks.run(FEW, 2, folder, kills)


def test_a_run_that_is_killed_in_a_checkpoint_and_while_resuming_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """The run has its own process: autograd refuses to work in a fork of one that used it, as earlier tests did."""
    kills = [
        Kill(phase="checkpoint", rank=1, call=1, seconds=60.0, all_ranks=False),  # takes effect at the end of the call
        Kill(phase="resume", rank=0, call=0, seconds=60.0, all_ranks=True),
    ]
    outcomes = []
    for name, some in (("undisturbed", []), ("killed", kills)):
        folder = tmp_path / name
        folder.mkdir()
        assert run_ranks(1, _run_forked, folder, some, process_group=False, deadline=150.0) == [len(some)]
        outcomes.append(trained(folder))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0].losses) == 12
    assert "continuing after iteration 8" in (tmp_path / "killed" / "log").read_text(encoding="utf-8")
