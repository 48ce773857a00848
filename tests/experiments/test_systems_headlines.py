"""Headlines of other systems' authors: speed-ups by closed forms, and where they are reached; a run of the command."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import geometric_mean

import pytest
from rich.console import Console

from experiments.kept_runs import KeptRuns
from experiments.results import load
from experiments.systems import headlines
from experiments.systems.catalogue import all_names, keys_of, systems
from experiments.systems.headlines import (
    CLOSE,
    GPUS,
    HEADLINES,
    LEAST_S,
    MOST_S,
    NETWORKS,
    PUBLISHED,
    Headline,
    fit,
    main,
    on_their_cluster,
    ours_in_words,
    per_exchange,
    reached,
    speed_up,
)
from experiments.systems.times import KEPT, Cell, planned_cells
from experiments.systems.workloads import ACCELERATOR, CORES, WORKLOADS
from experiments.validation_runs import public
from pipesgd.ranks import alone
from tests.timing_model._profiles import PROFILE
from timing_model.all_reduce import all_reduce_time
from timing_model.cluster_profile import Profile
from timing_model.measured import LinkProfile
from timing_model.options import NOTHING, computation_of
from timing_model.params import LinkParams

pytestmark = pytest.mark.slow

NUMEL, BETA = 8_000_000, 1e-9
RING_S = 2 * 7 / 8 * 4 * NUMEL * BETA
ONE = Headline(
    name="one",
    claim="four times as fast on 8 ranks",
    theirs=4.0,
    ranks=8,
    network="a link",
    link=LinkParams(alpha=0.0, beta=BETA, gamma=0.0, sync=0.0),
    model="a model",
    parameters=NUMEL,
    systems=("d-sync", "pipe-sgd"),
    substituted="everything",
)
SERVED = dataclasses.replace(ONE, name="served", theirs=2.0, over="ps-sync", systems=("d-sync",))


def test_speed_ups_are_those_of_the_formulas() -> None:
    cluster = Profile(calibrated=NOTHING, link=LinkProfile.exact(ONE.link))
    for seconds in (RING_S / 3, RING_S, 3 * RING_S):
        compute = computation_of("a model", NUMEL, seconds)
        synchronous = speed_up(ONE, "d-sync", cluster)(compute)
        assert synchronous == pytest.approx(8 * seconds / (seconds + RING_S), rel=1e-3)
        assert synchronous < speed_up(ONE, "pmls-wait-free", cluster)(compute) < 8, "buckets leave early"
        pipelined = speed_up(ONE, "pipe-sgd", cluster)(compute)
        assert pipelined == pytest.approx(8 * seconds / max(seconds, RING_S), rel=1e-3)
        of_server = speed_up(SERVED, "d-sync", cluster)(compute) * (seconds + RING_S) - seconds
        least, most = (1 + 7) * 4 * NUMEL * BETA, 2 * 7 * 4 * NUMEL * BETA  # workers are served in turn, or all at once
        assert 0.999 * least <= of_server <= 1.001 * most


def test_a_speed_up_is_reached_from_a_computation_on_or_up_to_one() -> None:
    begin, end = reached(lambda seconds: 8 * seconds / (seconds + 0.5), 6.0)
    assert end is None
    assert begin is not None
    assert 1.5 <= begin <= 1.5 * CLOSE
    begin, end = reached(lambda seconds: 10 / (1 + seconds), 5.0)
    assert begin is None
    assert end is not None
    assert 1 / CLOSE <= end <= 1
    assert reached(lambda seconds: 5.0, 5.0) == (0.0, None)
    assert reached(lambda seconds: 4.9, 5.0) == (None, None)


def test_a_row_has_our_speed_up_if_theirs_has_a_computation_and_else_where_it_is_reached() -> None:
    row = on_their_cluster(ONE, "d-sync")
    assert row["reached_from_s"] == pytest.approx(RING_S, rel=2 * (CLOSE - 1))
    assert row["ours"] is row["reached_up_to_s"] is None
    assert ours_in_words(row | {"reached_from_s": 0.35}) == "as many, if an iteration computes at least 350 ms"
    known = on_their_cluster(dataclasses.replace(ONE, compute_s=RING_S), "d-sync")
    assert known["ours"] == pytest.approx(4.0, rel=1e-3)
    assert known["reached_from_s"] is known["reached_up_to_s"] is None
    assert ours_in_words(known) == "4.0"
    served = on_their_cluster(SERVED, "d-sync")
    assert served["reached_from_s"] is None
    assert LEAST_S < served["reached_up_to_s"] < MOST_S
    assert (
        ours_in_words(on_their_cluster(dataclasses.replace(ONE, theirs=8.1), "d-sync")) == "fewer with any computation"
    )


def test_published_speed_ups_are_those_of_the_published_times() -> None:
    for network, (seconds, speed_ups) in PUBLISHED.items():
        for exchange, theirs in speed_ups.items():
            assert GPUS * seconds / (seconds + NETWORKS[network][2][exchange]) == pytest.approx(theirs, abs=0.06)


def test_times_of_all_images_become_those_of_an_exchange() -> None:
    assert per_exchange(2.01, 128) == pytest.approx(2.01 / 5)
    assert per_exchange(8.03, 32) == pytest.approx(8.03 / 20)


@pytest.mark.parametrize(("exchange", "all_reduce"), [("AR", "ring"), ("ASA", "all-to-all")])
def test_exchanges_on_the_fitted_link_take_as_long_as_published_on_average(exchange: str, all_reduce: str) -> None:
    link = LinkParams(alpha=0.0, beta=fit(exchange), gamma=0.0, sync=0.0)
    ratios = [
        all_reduce_time(all_reduce, link, numel, GPUS).total / per_exchange(published[exchange], batch)
        for numel, batch, published in NETWORKS.values()
    ]
    assert geometric_mean(ratios) == pytest.approx(1, rel=1e-4)


def test_every_headline_is_compared_with_systems_of_the_table() -> None:
    known = systems()
    assert {name for one in HEADLINES for name in (*one.systems, one.over) if name} <= known.keys()
    assert {one.compute_s is not None for one in HEADLINES if one.network.startswith("fitted")} == {True}


def test_cells_are_scaled_to_the_ranks_of_the_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = public(PROFILE, tmp_path / "public.toml")
    cell = Cell(commit="c0ffee", workload="mlp", rate="1gbit", computes="75ms", profile=text, rounds={}, predictions={})
    kept = KeptRuns(tmp_path / KEPT, Cell)
    planned = planned_cells(WORKLOADS, keys_of(all_names()), quick=False)
    of_place = {(one.workload, one.rate, one.computes): words for words, one in planned.items()}
    kept.add(of_place["mlp", "1gbit", ACCELERATOR], cell)
    kept.add(of_place["mlp", "200mbit", CORES], dataclasses.replace(cell, computes=CORES))
    kept.add("a cell of other systems", cell)
    other = dataclasses.replace(ONE, model="another model")
    monkeypatch.setattr(headlines, "HEADLINES", (ONE, other, SERVED))
    main(["--output", str(tmp_path)], alone(), Console())
    rows = load(tmp_path / "systems_headlines.csv")
    asked = [(row["headline"], row["cell"] or None, row["system"]) for row in rows]
    theirs = [("one", None, "d-sync"), ("one", None, "pipe-sgd")]
    ours = [(name, "mlp, 1gbit", system) for name, _, system in (*theirs, ("served", None, "d-sync"))]
    assert asked == [*theirs, *theirs, ("served", None, "d-sync"), *ours]
    [compute] = PROFILE.compute
    for row in rows[-3:]:
        assert row["parameters"] == compute.numel
        one = SERVED if row["headline"] == "served" else ONE
        assert row["ours"] == pytest.approx(speed_up(one, row["system"], PROFILE)(compute), rel=1e-3)
        assert row["ranks"] == 8
