"""Bounds of the experiment of silent connections: which rows miss which."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.silent_connections import WARNING, Heard

SLOW = Heard(
    scene="one that answers after 2.5 s",
    strangers=1500,
    iterations=400,
    median_ms=76.0,
    longest_ms=90.0,
    longest_next_to_store_ms=400.0,
    warnings=1,
    started_s=12.2,
    warned_s=6.0,
    set_and_get_ms=None,
    set_and_gets=0,
    seconds=60.0,
)
CURED = dataclasses.replace(SLOW, scene="the cure", warnings=0, warned_s=None, set_and_get_ms=30.0, set_and_gets=90)


@pytest.mark.parametrize(
    ("row", "change", "missed"),
    [
        (SLOW, {}, []),
        (CURED, {}, []),
        (SLOW, {"longest_ms": 152.1}, ["iterations within 2 medians"]),
        (SLOW, {"strangers": 1200}, ["connections to the store's port and to the ranks'"]),
        (SLOW, {"warned_s": 10.1}, ["one warning within 10 s"]),
        (SLOW, {"warnings": 2}, ["one warning within 10 s"]),
        (SLOW, {"warnings": 0, "warned_s": None}, ["one warning within 10 s"]),
        (CURED, {"warnings": 1, "warned_s": 3.0}, ["no warning"]),
        (CURED, {"set_and_get_ms": 100.1}, ["set and get within 0.1 s"]),
        (CURED, {"set_and_get_ms": None}, ["set and get within 0.1 s"]),
    ],
)
def test_each_bound_can_be_missed(row: Heard, change: dict[str, object], missed: list[str]) -> None:
    assert dataclasses.replace(row, **change).missed == missed  # type: ignore[arg-type]


def test_the_line_that_counts_names_the_cure() -> None:
    assert WARNING.match('warning: a look-up of the name of x takes more than 0.5 s: set "a" or RES_OPTIONS=attempts:0')
    assert not WARNING.match("warning: a look-up of the name of x takes more than 0.5 s")
