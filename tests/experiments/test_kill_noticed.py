"""Kills whose rank the others must name: how they are drawn, and how the survivors' lines are judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experiments.kill_noticed import JOBS, MOMENTS, NODES, START, TRAINING, WHERE, Noticed, errors, kill_of, names

GOOD = {
    "run": 0,
    "job": "ddp",
    "rank_killed": 1,
    "after": START,
    "killed_after_s": 1.0,
    "ended_after_ms": 50.0,
    "operation": "evaluation",
    "in_all_reduce": False,
    "named_by": 2,
    "first_s": 0.01,
    "last_s": 0.02,
    "line": "",
}


def test_jobs_take_turns_and_each_is_killed_at_its_start_and_in_training() -> None:
    kills = [kill_of(run, 0) for run in range(60)]
    assert kills == [kill_of(run, 0) for run in range(60)]
    assert kills != [kill_of(run, 1) for run in range(60)]
    assert {(job, part) for job, part, _, _ in kills} == {(job, part) for job in JOBS for part in (START, TRAINING)}
    assert {rank for _, _, rank, _ in kills} == set(range(NODES))
    assert all(0.0 <= seconds <= MOMENTS[part] for _, part, _, seconds in kills)


@pytest.mark.parametrize(
    ("text", "operation", "is_right"),
    [
        ("stopped in evaluation in iteration 4: rank 1 has failed: its process has ended", "evaluation", True),
        ("stopped in exchange of a name through the store: rank 1 has failed: x", "exchange of a name", True),
        ("receive of the header with rank 1 in iteration 7 failed: reset", "receive of the header", True),
        ("barrier in iteration 7 failed: reset; the process of rank 1 has ended without a word", "barrier", True),
        (
            "receive of chunk 0 segment 1 at step 1 with rank 1 failed: x",
            "receive of chunk 0 segment 1 at step 1",
            True,
        ),
        ("receive of the header with rank 2 in iteration 7 failed: reset", "receive of the header", False),
        ("stopped in compute: rank 2 has failed: rank 2: receive with rank 1 failed: reset", "compute", False),
        ("exchange of a name through the store failed: reset", "exchange of a name", False),
    ],
)
def test_a_line_must_name_the_killed_rank_and_no_other(text: str, operation: str, is_right: bool) -> None:
    assert names(text, 1) is is_right
    found = WHERE.match(text)
    assert found is not None
    assert found[1] == operation


@pytest.mark.parametrize(
    ("changes", "is_good"),
    [({}, True), ({"named_by": 1}, False), ({"last_s": 3.1}, False), ({"last_s": None}, False)],
)
def test_all_survivors_must_name_the_rank_in_time(changes: dict[str, Any], is_good: bool) -> None:
    assert Noticed(**GOOD | changes).is_good is is_good


def test_only_the_first_error_of_a_rank_counts() -> None:
    lines = [(1.0, "[default0]:error: rank 2: first"), (2.0, "error: rank 2: second"), (3.0, "warning: rank 0: x")]
    assert errors(SimpleNamespace(lines=lines)) == {2: (1.0, "first")}  # type: ignore[arg-type]
