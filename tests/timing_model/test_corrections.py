"""Corrections: measured times of collectives relative to the formula, by size."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.timing_model._profiles import LINK, MLP, PROFILE, about, ask
from timing_model.cluster_profile import Profile
from timing_model.measured import Corrections, Estimate
from timing_model.predict import predict


def test_between_two_sizes_the_factor_is_between_theirs_and_the_error_the_larger_one() -> None:
    found = Corrections(
        world_sizes=(2, 4, 4, 4), nbytes=(7, 1 << 10, 1 << 20, 1 << 22), factors=(9, 1, 2, 4), errors=(9, 0.1, 0.3, 0.2)
    )
    assert found.at(4, 1 << 15) == (pytest.approx(1.5), 0.3)  # halfway between the factors, on a log scale of sizes
    assert found.at(4, 1 << 21) == (pytest.approx(3.0), 0.3)
    assert found.at(4, 1) == (1.0, 0.1)  # beyond the ends, as at the ends
    assert found.at(4, 1 << 30) == (4.0, 0.2)
    assert found.at(2, 1 << 20) == (9.0, 9)
    assert found.at(3, 1 << 20) is None


def corrected(error: float = 0.01) -> Profile:
    """Return a profile whose all-reduces of four ranks take half of the formula's time from 1 MiB on."""
    corrections = Corrections(
        world_sizes=(2, 4, 4),
        nbytes=(1 << 20, 1 << 10, 1 << 20),
        factors=(3.0, 1.0, 0.5),
        errors=(0.5, 0.2, error),
    )
    return dataclasses.replace(PROFILE, link=dataclasses.replace(LINK, corrections=corrections))


def test_what_was_found_beside_the_formula_counts_where_it_was_measured() -> None:
    plain, other = (predict(ask(cluster=one)) for one in (PROFILE, corrected()))
    assert other.collective.total == pytest.approx(0.5 * plain.collective.total)
    # A codec sends fewer bytes, and its own work is not the network's.
    plain, other = (predict(ask(cluster=one, codec="int8")) for one in (PROFILE, corrected()))
    assert other.collective.codec == pytest.approx(plain.collective.codec)
    assert other.collective.wire == pytest.approx(0.5 * plain.collective.wire, rel=0.05)
    # Other numbers of ranks and other all-reduces were not measured.
    for options in ({"world_size": 3}, {"all_reduce": "halving-doubling"}, {"all_reduce": "native"}, {"codec": "topk"}):
        plain, other = (predict(ask(cluster=one, **options)) for one in (PROFILE, corrected()))
        assert other == dataclasses.replace(plain, job=other.job)
    assert predict(ask(cluster=corrected(), world_size=2)).collective.total == pytest.approx(
        3 * predict(ask(world_size=2)).collective.total
    )


def test_the_interval_is_of_the_corrections_error_where_there_is_one() -> None:
    """Only exposed communication counts: time hidden behind the computation adds no uncertainty."""
    widths = [
        answer.high - answer.iteration.total for answer in map(predict, (ask(cluster=corrected(e)) for e in (0, 1)))
    ]
    bound = predict(ask(cluster=corrected(0))).collective.total
    assert widths[1] == pytest.approx(math.hypot(widths[0], bound), rel=0.1)
    hidden = dataclasses.replace(MLP, forward=about(10.0), compute_slowdown=Estimate.exact(0.0))
    low, high = (predict(ask(cluster=corrected(error), compute=hidden, width=2)).high for error in (0.0, 1.0))
    assert low == high
