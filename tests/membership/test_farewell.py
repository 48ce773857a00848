"""Ranks that are told to stop agree on the first iteration that all can reach; here they are threads in step."""

from __future__ import annotations

import threading

import pytest

from pipesgd.membership.farewell import Farewell


def opened(start: int = 0, members: int = 3) -> Farewell:
    farewell = Farewell()
    farewell.open(members=members, start=start, seconds=20.0)
    return farewell


def test_nothing_is_due_before_a_signal_and_with_one_rank_the_next_iteration_is() -> None:
    farewell = opened(members=1)
    assert not any(farewell.is_due(iteration) for iteration in range(5))
    farewell.requested = "SIGTERM"
    assert farewell.is_due(5)


def test_zero_seconds_leave_it_closed() -> None:
    farewell = Farewell()
    farewell.open(members=2, start=0, seconds=0.0)
    assert not farewell.is_open


def test_a_rank_that_is_behind_goes_on_to_where_the_fastest_has_come_to() -> None:
    farewell = opened(start=40)
    assert not farewell.is_due(40)
    assert farewell.hold() == 41
    assert farewell.hold() == 41, "a place once said stays true"
    farewell.meet_at([41, 43, 42])
    assert [farewell.is_due(iteration) for iteration in (41, 42, 43)] == [False, False, True]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_ranks_in_step_all_stop_after_the_same_iteration_whenever_each_learns_of_it(width: int) -> None:
    """Rank r begins iteration t when all ranks have begun t - width + 1, as a pipeline of that width does."""
    ranks = 3
    farewells = [opened() for _ in range(ranks)]
    begun = [0] * ranks
    changed = threading.Condition()
    stopped: dict[int, int] = {}

    def train(rank: int) -> None:
        for iteration in range(1_000_000):
            if farewells[rank].is_due(iteration):
                stopped[rank] = iteration
                return
            with changed:
                begun[rank] = iteration + 1
                changed.notify_all()
                changed.wait_for(lambda at=iteration: min(begun) > at - width + 1)

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    places = []
    for rank, farewell in enumerate(farewells):  # one after another learns of it, at least 100 iterations apart
        with changed:
            goal = begun[rank] + 100
            assert changed.wait_for(lambda: min(begun) >= goal or rank > 0, 20)  # noqa: B023 (waited for here)
        places.append(farewell.hold())
    for farewell in farewells:
        farewell.meet_at(places)
    for thread in threads:
        thread.join(20)
    assert set(stopped.values()) == {max(places)}
    assert len(stopped) == ranks
    assert max(places) - min(places) <= width
