"""Notes of ranks that do not agree, and slices that were not summed once, are seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.rank_notes import Notes, Wrong, check_notes, check_slices

WIDTH = 2


def generations(given_back: list[int]) -> list[dict[str, Any]]:
    """Return those of three ranks of which the last one is lost in iteration 5, which with 4 is summed again."""
    lost = [{"rank": 2, "why": "", "slices_given_back": given_back}]
    return [
        {"number": 0, "members": [0, 1, 2], "first_iteration": 0, "iterations_done": 0, "lost": []},
        {"number": 1, "members": [0, 1], "first_iteration": 6, "iterations_done": 4, "lost": lost},
    ]


def slices() -> dict[tuple[int, int], int]:
    """Return the slices that these ranks take."""
    first = {(iteration, rank): 3 * iteration + rank for iteration in range(6) for rank in range(3)}
    return first | {(6, 0): 14, (6, 1): 17} | {(7 + n // 2, n % 2): 18 + n for n in range(6)}


@pytest.mark.parametrize("end", [6, 7, 10])
def test_slices_that_are_summed_once_are_right(end: int) -> None:
    check_slices(generations([14, 17]), end, slices())
    check_slices(generations([14, 17]), end, {})


@pytest.mark.parametrize("given_back", [[], [14], [11, 14, 17], [14, 14, 17], [14, 18]])
def test_slices_that_are_lost_or_summed_twice_are_seen(given_back: list[int]) -> None:
    with pytest.raises(Wrong, match="were used"):
        check_slices(generations(given_back), 10, {})


def test_a_slice_that_is_not_what_the_generations_say_is_seen() -> None:
    with pytest.raises(Wrong, match="were used"):
        check_slices(generations([14, 17]), 10, slices() | {(8, 0): 21})


def notes(folder: Path, weights: dict[int, list[int]]) -> dict[int, Notes]:
    """Return the notes of these ranks, given a number for their weights after each iteration."""
    for rank, checksums in weights.items():
        lines: list[Any] = [[n, float(n), one, slices().get((n, rank), 0)] for n, one in enumerate(checksums)]
        if rank < 2:
            lines.insert(6, generations([14, 17])[1] | {"time": 0.0})
        (folder / f"notes-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {rank: Notes(folder, rank) for rank in weights}
    for one in found.values():
        one.refresh()
    return found


def test_the_last_weights_of_a_lost_rank_may_have_another_mean(tmp_path: Path) -> None:
    right = [*range(10)]
    weights = check_notes(notes(tmp_path, {0: right, 1: right, 2: [*right[:5], 50]}), [2], WIDTH)
    assert weights == dict(enumerate(right))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({2: [0, 1, 2, 3, 40]}, "different weights after iteration 4"),
        ({2: [0, 1, 2, 3, 4, 50, 60]}, "completed iteration 6"),
        ({1: [0, 1, 2, 3, 4, 5, 60]}, "ranks 0 and 1 have different weights after iteration 6"),
    ],
)
def test_other_weights_are_seen(tmp_path: Path, others: dict[int, list[int]], words: str) -> None:
    right = [*range(10)]
    with pytest.raises(Wrong, match=words):
        check_notes(notes(tmp_path, {0: right, 1: right, 2: right[:4]} | others), [2], WIDTH)


def test_ranks_that_are_lost_together_hold_the_same_mean(tmp_path: Path) -> None:
    found = notes(tmp_path, {0: [*range(6)], 1: [0, 1, 2, 3, 4, 50], 2: [0, 1, 2, 3, 4, 51]})
    for own in found.values():
        own.generations = [one | {"members": [0]} for one in own.generations]
    with pytest.raises(Wrong, match="lost ranks have different weights after iteration 5"):
        check_notes(found, [1, 2], WIDTH)


def test_a_generation_of_ones_own_is_seen(tmp_path: Path) -> None:
    found = notes(tmp_path, {0: [*range(10)], 1: [*range(10)]})
    found[1].generations = [one | {"members": [1]} for one in found[1].generations]
    with pytest.raises(Wrong, match="generation of its own"):
        check_notes(found, [], WIDTH)
