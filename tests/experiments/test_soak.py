"""The soak: what counts as growth, and a run whose ranks are looked at, and asked to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import forked_ranks, soak
from experiments.soak import Soaked, grown, growth, soaked


def of(**changed: object) -> Soaked:
    counts = {name: [[10], [10], [10]] for name in ("descriptors", "threads", "bytes")}
    return Soaked(**({"transport": "tcp", "seconds": [1.0, 2.0, 3.0], "problem": ""} | counts | changed))


@pytest.mark.parametrize(
    ("looks", "threads", "nbytes"),
    [
        ([[9, 1], [3, 1], [3, 1]], 0, 0),
        ([[1, 1], [3, 1], [3, 4]], 3, 3),
        ([[5]], 0, 0),
        ([[7]] * 6 + [[8], [7], [8]], 0, 1),  # threads that come and go are no leak
        ([[7]] * 6 + [[8], [8], [9]], 1, 1),
    ],
)
def test_growth_is_from_the_second_to_the_last_third(looks: list[list[int]], threads: int, nbytes: int) -> None:
    found = of(threads=looks, bytes=looks)
    assert (growth(found, "threads"), growth(found, "bytes")) == (threads, nbytes)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"descriptors": [[10], [10], [11]]}, "1 descriptors more"),
        ({"threads": [[10], [10], [12]]}, "2 threads more"),
        ({"bytes": [[0], [0], [6_000_000]]}, "6e+06 bytes more"),
        ({"problem": "exit codes [1]"}, "exit codes [1]"),
    ],
)
def test_what_has_grown_is_told(changed: dict[str, object], said: str) -> None:
    assert grown(of(**changed)) == said


@pytest.mark.slow
def test_ranks_are_looked_at_and_end_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "FOLDER", tmp_path)
    monkeypatch.setattr(soak, "WORDS", soak.WORDS.replace("fashion-mnist", "digits"))
    forked_ranks.import_all()
    found = soaked("tls", 0.1, 2.0, lambda minutes, what: None)
    assert found.problem == ""
    assert len(found.seconds) >= 2
    assert all(len(row) == 3 and min(row) > 5 for row in found.descriptors)
