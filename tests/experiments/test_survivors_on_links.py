"""Faults on emulated machines: what must come of them, real runs of a kind each, and that a wrong end is seen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from conftest import needs_root

from experiments import forked_ranks, survivors_on_links
from experiments.survivors_on_links import FIRST, ONE_WAY, PARTS, POWER, RUNS, Fault, faults_of, survived, who_continues


def test_who_continues_follows_from_the_rule() -> None:
    members = [0, 1, 2, 3]
    assert who_continues(Fault(kind=PARTS, ranks=(), seconds=9.0, parts=((1, 2), (0, 3))), members) == [0, 3]
    assert who_continues(Fault(kind=PARTS, ranks=(), seconds=9.0, parts=((1, 2), (0,), (3,))), members) == []
    assert who_continues(Fault(kind=ONE_WAY, ranks=(1,), seconds=9.0), [0, 1]) == [0]
    assert who_continues(Fault(kind=ONE_WAY, ranks=(0,), seconds=9.0), [0, 1]) == []
    assert who_continues(Fault(kind=ONE_WAY, ranks=(0,), seconds=2.0, loses=False), members) == []


@pytest.mark.parametrize("kind", RUNS)
def test_faults_hit_members_and_are_drawn_from_the_seed(kind: str) -> None:
    plans = [faults_of(kind, random.Random(seed), (3, 2), 1) for seed in (0, 0, 1)]
    assert plans[0] == plans[1]
    assert plans[1] != plans[2] or kind in (FIRST, POWER)
    assert all(rank in range(5) for plan in plans for fault in plan for rank in fault.ranks)


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "parts", "first", "power"])
def test_a_run_ends_as_it_must(tmp_path: Path, kind: str) -> None:
    forked_ranks.import_all()
    found = survived(kind, 1, 0, tmp_path)
    assert found.problem == "", [path.read_text() for path in tmp_path.glob("*.log")]
    assert found.lost > 0


@needs_root
@pytest.mark.slow
def test_a_run_that_ends_otherwise_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked_ranks.import_all()
    monkeypatch.setattr(survivors_on_links, "who_continues", lambda fault, members: [1])  # the first one does
    monkeypatch.setattr(survivors_on_links, "MOST_SECONDS", 8.0)
    found = survived("parts", 2, 0, tmp_path)
    assert "did not continue" in found.problem
    assert list(tmp_path.glob("*.log"))
