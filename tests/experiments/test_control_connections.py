"""The measurement of control connections: real members, real strangers, and what counts as harm."""

from __future__ import annotations

import pytest

from experiments.control_connections import harm_of, measure

pytestmark = pytest.mark.slow


def test_a_short_measurement_sees_no_harm() -> None:
    rows = measure(3, 1.0, 60)
    assert [(row["phase"], row["members"], row["connections"]) for row in rows] == [
        ("alone", 3, 0),
        ("strangers", 3, 60),
    ]
    assert harm_of(rows) == ""
    assert all(0.0 < row["core_share_median"] <= row["core_share_most"] < 1.0 for row in rows)


def test_a_lost_member_and_open_descriptors_are_harm() -> None:
    alone = {"changes": 0, "members": 3, "members_least": 3, "descriptors_most": 20}
    assert harm_of([alone, alone]) == ""
    assert harm_of([alone, alone | {"changes": 1, "members_least": 2}]) == "1 changes of members, of which 2 are left"
    assert harm_of([alone, alone | {"descriptors_most": 21}]) == "21 descriptors are open, 20 before"
