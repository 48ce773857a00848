"""The line of the closing table that names a rank for which others wait."""

from __future__ import annotations

import pytest

from pipesgd.run.metrics import number_of, slowest_rank


@pytest.mark.parametrize(
    ("compute", "iteration", "slow"),
    [
        ([0.1, 0.4, 0.1], 0.4, (1, 0.3)),
        ([0.1, 0.11, 0.1], 0.4, None),  # 2.5 % of an iteration
        ([0.4, 0.4], 0.4, None),
        ([0.1, None, 0.3], 0.3, (2, 0.2)),
        ([0.1], 0.1, None),
        ([None, None], 0.1, None),
    ],
)
def test_the_slowest_rank_is_named_where_it_costs_more_than_5_percent(
    compute: list[float | None], iteration: float, slow: tuple[int, float] | None
) -> None:
    found = slowest_rank(compute, iteration)
    assert found == (None if slow is None else (slow[0], pytest.approx(slow[1])))


def test_it_has_its_number_in_the_job_where_others_were_lost() -> None:
    assert [number_of(place, {"ranks": [0, 2]}) for place in (0, 1, 2)] == [0, 2, 2]
    assert number_of(1, {}) == number_of(1, {"ranks": 3}) == number_of(1, {"ranks": [0, "two"]}) == 1
