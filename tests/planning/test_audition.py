"""Auditions: whose turn it is, what is measured, and who stays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from _plans import cluster, prediction
from hypothesis import assume, given
from hypothesis import strategies as st

from pipesgd.cli import parse
from pipesgd.config import TrainConfig
from pipesgd.planning.audition import (
    AGAIN_AFTER,
    LATE_TIE,
    LEAST_PASSES,
    LEAST_TURN,
    LONGEST,
    MOST_AUDITIONS,
    MOST_SHARE,
    PRECISE,
    SWAP,
    TIE,
    TURN,
    UNTIMED,
    Audition,
    Pace,
    turn_of,
)
from pipesgd.planning.plan_run import measured_iterations, remember
from pipesgd.planning.planned import Planned
from timing_model.cluster_profile import Profile
from timing_model.job import Job


def choices(width: int, codec: str = "int8") -> dict[str, Any]:
    rest = {"all-reduce": "ring", "segment-bytes": 1 << 20, "buckets": "1", "fragments": 1}
    return {"width": width, "codec": codec} | rest


ONE, TWO, THREE = map(choices, (1, 2, 3))


def audition(*predicted: float, iterations: int = 10_000, begin: int = 0) -> Audition:
    candidates = [ONE, TWO, THREE][: len(predicted)]
    found = Audition.of(candidates, predicted, iterations=iterations, begin=begin)
    assert found is not None
    return found


def seconds(of: Audition, times: Mapping[int, float], noise: float = 0.0) -> dict[int, float]:
    """Return times of all iterations up to the next decision: those of the width that trains, more or less by turns.

    Iterations right after a change take ten times as long.
    """
    found = {}
    for number in range(of.decision_at):
        now = of.at(number) or ONE
        settling = now["width"] - 1 + UNTIMED
        settled = number >= settling and all(of.at(number - back) == now for back in range(settling + 1))
        found[number] = times[now["width"]] * (1 + noise * (-1) ** number if settled else 10)
    return found


def decide(of: Audition, times: Mapping[int, float], noise: float = 0.0) -> Audition:
    """Return the audition when it is over, with times as in ``seconds``."""
    while not of.over:
        of = of.decided(seconds(of, times, noise), again=False)
    return of


def test_candidates_take_turns_and_then_in_reverse() -> None:
    first = audition(0.13, 0.12, 0.125)
    assert (first.turn, first.decision_at) == (TURN, 3 * TURN)
    assert [(at, one["width"]) for at, one in first.turns] == [(0, 1), (TURN, 2), (2 * TURN, 3)]
    assert [first.at(number) for number in (0, TURN - 1, TURN, 99)] == [ONE, ONE, TWO, THREE]
    second = first.decided(seconds(first, {1: 0.13, 2: 0.12, 3: 0.125}, noise=0.3), again=False)
    assert (second.passes, second.decision_at) == (2, 6 * TURN)
    assert [(at, one["width"]) for at, one in second.turns[3:]] == [(3 * TURN, 3), (4 * TURN, 2), (5 * TURN, 1)]
    assert second.turns[:3] == first.turns
    times = seconds(second, {1: 0.13, 2: 0.12, 3: 0.125}, noise=0.02)
    last = second.decided(times, again=False, elapsed=10.0)
    assert last.over
    winner, pace = last.chosen
    assert winner == TWO
    assert pace is not None
    assert pace.mean == pytest.approx(0.12, rel=0.01)
    assert last.cost == pytest.approx(10 - 6 * TURN * pace.mean)
    assert pace.iterations == 2 * (TURN - 1 - UNTIMED)
    assert [one.iterations for one in last.paces if one] == [
        2 * TURN - UNTIMED - UNTIMED,
        pace.iterations,
        2 * TURN - 2 - UNTIMED,  # its second turn follows its first one, so nothing needs to settle
    ]
    assert last.turns[-1] == (6 * TURN, TWO)


def test_a_clear_lead_ends_it_after_one_pass_and_a_hopeless_one_is_out() -> None:
    first = audition(0.13, 0.12, 0.125)
    over = first.decided(seconds(first, {1: 0.3, 2: 0.12, 3: 0.2}, noise=0.01), again=False)
    assert over.over
    assert over.chosen[0] == TWO
    assert over.turns[-1] == (3 * TURN, TWO)
    second = first.decided(seconds(first, {1: 0.6, 2: 0.121, 3: 0.12}, noise=0.1), again=False)
    assert [one["width"] for _, one in second.turns[3:]] == [3, 2]
    assert second.decision_at == 5 * TURN


def test_the_simplest_of_those_that_are_about_equally_fast_stays() -> None:
    for excess, width in ((0.9 * TIE, 2), (1.1 * TIE, 3)):
        over = decide(audition(0.24, 0.12, 0.12), {1: 0.24, 2: 0.12 * (1 + excess), 3: 0.12})
        assert over.chosen[0]["width"] == width


def test_late_gradients_must_gain_more_than_five_percent() -> None:
    for excess, width in ((0.9 * LATE_TIE, 1), (1.1 * LATE_TIE, 2)):
        over = decide(audition(0.12, 0.12), {1: 0.12 * (1 + excess), 2: 0.12})
        assert over.chosen[0]["width"] == width
        assert over.chosen[1] == over.paces[width - 1], "what is recorded is the time that was measured"


def test_a_gain_that_is_within_the_noise_is_none() -> None:
    for noise, width in ((0.9, 1), (0.1, 2)):
        over = decide(audition(0.13, 0.12), {1: 0.128, 2: 0.12}, noise)
        assert over.chosen[0]["width"] == width


def test_those_that_are_about_equally_fast_have_longer_and_longer_turns() -> None:
    times = {1: 0.2, 2: 0.121, 3: 0.12}
    now = audition(0.13, 0.12, 0.125)
    passes = []
    while not now.over:
        passes.append((now.passes, now.decision_at - now.turns[-1][0], len(now.turns)))
        now = now.decided(seconds(now, times, noise=0.2), again=False)
    assert passes == [(1, TURN, 3), (2, TURN, 5), (3, 2 * TURN, 7), (4, 4 * TURN, 9), (5, 8 * TURN, 11)]
    assert now.chosen[0] == TWO
    assert [one["width"] for _, one in now.turns] == [1, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 2]


def test_changes_that_take_long_end_it_early() -> None:
    """It may cost 2.4 s, of which two changes have taken ``lost``."""
    for lost, left in ((0.1, 3), (1.0, 2), (2.3, 1)):
        first = audition(0.13, 0.12, 0.125, iterations=2000)
        times = seconds(first, {1: 0.121, 2: 0.12, 3: 0.12}, noise=0.3)
        elapsed = first.decision_at * 0.12 + lost
        second = first.decided(times, again=False, elapsed=elapsed)
        assert len(second.turns) == 3 + left, lost


def test_a_winner_without_rivals_trains_on_until_its_time_is_known() -> None:
    for noise, passes in ((0.01, 1), (0.1, 5)):
        over = decide(audition(0.13, 0.12), {1: 1.0, 2: 0.12}, noise)
        winner, pace = over.chosen
        assert winner == TWO
        assert pace is not None
        assert pace.error <= PRECISE * pace.mean
        assert len(over.turns) == 2 + passes
        assert pace.iterations == TURN * (2 ** (passes - 1)) - 1 - UNTIMED


@given(
    st.lists(st.floats(0.1, 1), min_size=3, max_size=3),
    st.floats(0, 0.05),
    st.integers(500, 20_000),
)
def test_further_passes_are_paid_for_and_short(means: list[float], noise: float, iterations: int) -> None:
    now = Audition.of([ONE, TWO, THREE], [0.12, 0.12, 0.12], iterations=iterations, begin=0)
    assume(now is not None)
    assert now is not None
    times = dict(zip((1, 2, 3), means, strict=True))
    while not now.over:
        before = now
        now = now.decided(seconds(now, times, noise), again=False)
        if not now.over and now.passes > LEAST_PASSES:
            assert now.decision_at <= LONGEST * iterations
            widths = [one["width"] for at, one in now.turns if at >= before.decision_at]
            swaps = sum(one["width"] != other["width"] for (_, one), (_, other) in pairwise(now.turns))
            fastest = min(times[one["width"]] for one in now.candidates)
            excess = sum(
                (end - at) * (times[one["width"]] / fastest - 1)
                for (at, one), (end, _) in pairwise([*now.turns, (now.decision_at, {})])
            )
            if len(widths) > 1:
                assert swaps * SWAP + excess <= MOST_SHARE * iterations + 0.02 * now.decision_at  # means are so exact


def test_a_candidate_without_a_time_is_neither_out_nor_chosen() -> None:
    first = audition(0.13, 0.12)
    known = {number: 0.13 + 0.001 * (number % 2) for number in range(TURN)}  # of the second, none
    second = first.decided(known, again=False)
    assert [one["width"] for _, one in second.turns[2:]] == [2, 1]
    assert second.paces[1] is None
    over = second.decided(known, again=False)
    assert over.chosen[0] == ONE


def test_iterations_that_a_guard_runs_at_width_1_are_no_time_of_larger_widths() -> None:
    first = audition(0.13, 0.12, 0.125)
    times = seconds(first, {1: 0.13, 2: 0.12, 3: 0.125}, noise=0.01)
    fallback = range(TURN // 2, 2 * TURN + UNTIMED + 6)
    paces = first.decided(times, again=False, fallback=fallback).paces
    ends = [times[number] for number in range(fallback.stop, 3 * TURN)]
    assert len(ends) > 1
    assert paces == [first.decided(times, again=False).paces[0], None, Pace.of(ends)]


def test_without_any_time_the_prediction_counts() -> None:
    second = audition(0.13, 0.12).decided({}, again=False)
    over = second.decided({}, again=False, elapsed=9.0)
    assert over.over
    assert over.chosen == (TWO, None)
    assert over.cost is None
    before = prediction()
    heard = before.heard(over)
    assert (heard.choices, heard.iteration_seconds, heard.support) == (TWO, before.iteration_seconds, before.support)
    assert heard.decision_lines() == ["audition: no iteration could be timed; --width 2 stays, as predicted"]


def test_it_begins_after_the_warm_up_and_before_it_the_plan_counts() -> None:
    found = audition(0.13, 0.12, begin=30)
    assert found.at(29) is None
    assert found.at(30) == ONE
    assert found.decision_at == 30 + 2 * TURN


def test_a_run_that_continues_before_its_first_audition_trains_as_it_began() -> None:
    found = audition(0.13, 0.12, begin=30)
    planned = dataclasses.replace(prediction(), choices=THREE, audition=found)
    over = found.decided(seconds(found, {1: 0.3, 2: 0.12}), again=False)
    again = over.decided({}, again=True)
    both = again.decided(seconds(again, {1: 0.1, 2: 0.3}), again=False)
    for auditions in ([over], [over, again, both]):
        heard = planned
        for one in auditions:
            heard = heard.heard(one)
        continued = Planned.from_json(json.loads(json.dumps(heard.as_json())))
        assert [continued.at(iteration) for iteration in (29, 30)] == [THREE, ONE]
        assert continued.choices == continued.at(10_000) == auditions[-1].chosen[0]


def test_a_short_run_has_fewer_candidates_or_none() -> None:
    found = Audition.of([ONE, TWO, THREE], [0.13, 0.12, 0.125], iterations=900, begin=0)
    assert found is not None
    assert found.candidates == [TWO, THREE]
    assert Audition.of([ONE, TWO, THREE], [0.13, 0.12, 0.125], iterations=400, begin=0) is None
    assert Audition.of([TWO], [0.12], iterations=10_000, begin=0) is None


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=3), st.integers(1, 10**6))
def test_it_costs_no_more_than_its_share_of_the_run(predicted: list[float], iterations: int) -> None:
    turn = turn_of(predicted, iterations)
    if turn is not None:
        assert LEAST_TURN <= turn <= TURN
        excess = LEAST_PASSES * turn * (sum(predicted) - len(predicted) * min(predicted))
        swaps = LEAST_PASSES * len(predicted) * SWAP * min(predicted)
        assert excess + swaps <= 1.000001 * MOST_SHARE * iterations * min(predicted)


def test_a_run_that_no_longer_takes_what_was_measured_has_another_audition() -> None:
    first = audition(0.13, 0.12)
    over = first.decided(seconds(first, {1: 0.3, 2: 0.12}), again=False)
    assert over.decision_at == 2 * TURN + AGAIN_AFTER
    later = over.decided({}, again=False)
    assert later.turns == over.turns
    assert later.decision_at == over.decision_at + 2 * AGAIN_AFTER
    again = later.decided({}, again=True)
    assert (again.number, again.passes, again.begin) == (2, 1, later.decision_at)
    assert [(at - again.begin, one["width"]) for at, one in again.turns[len(over.turns) :]] == [(0, 1), (again.turn, 2)]
    times = seconds(again, {1: 0.1, 2: 0.3}) | dict.fromkeys(range(again.begin), 99.0)
    assert again.decided(times, again=False).chosen[0] == ONE
    for _ in range(MOST_AUDITIONS):
        over = again.decided(times, again=False)
        again = over.decided({}, again=True)
        times |= dict.fromkeys(range(again.begin, again.decision_at), 0.1)
    assert again.number == MOST_AUDITIONS
    assert again.over


def test_it_survives_json() -> None:
    first = audition(0.13, 0.12)
    over = first.decided(seconds(first, {1: 0.3, 2: 0.12}), again=False)
    for one in (first, over):
        assert Audition.from_json(json.loads(json.dumps(dataclasses.asdict(one)))) == one


def test_an_audition_that_began_before_there_were_buckets_and_fragments_is_continued() -> None:
    first = audition(0.13, 0.12)
    planned = dataclasses.replace(prediction(), audition=first)
    recorded = json.loads(json.dumps(planned.as_json()))
    begun = recorded["audition"]
    for choices in (recorded["choices"], *begun["candidates"], *(choices for _, choices in begun["turns"])):
        assert (choices.pop("buckets"), choices.pop("fragments")) == ("1", 1)
    continued = Planned.from_json(recorded)
    assert continued.as_json() == planned.as_json()
    assert continued.audition is not None
    over = continued.audition.decided(seconds(first, {1: 0.3, 2: 0.12}), again=False)
    assert [one.width for one in measured_iterations(over.candidates, over.paces, TrainConfig(), 2)] == [1, 2]


def test_what_was_measured_in_buckets_is_remembered_as_that(tmp_path: Path) -> None:
    profile, path = cluster(), tmp_path / "cluster.toml"
    candidates = [ONE | {"buckets": buckets} for buckets in ("1", "01", "2", "1MiB")]
    paces = [Pace(float(number), 1.0, 0.1, 9) for number in range(1, 5)]
    measured = measured_iterations(candidates, paces, TrainConfig(), 4)
    [compute] = profile.compute
    profile.with_measured(compute.model, compute.batch_size, measured).save(path)
    found = Profile.load(path)
    assert [(one.buckets, one.iteration.value) for one in found.compute[0].measured] == [
        ("01", 2.0),
        ("2", 3.0),
        ("1MiB", 4.0),
    ], "01 is 1, and later"
    job = Job(cluster=found, compute=found.compute[0], world_size=4, codec="int8")
    times = {buckets: dataclasses.replace(job, buckets=buckets).measured for buckets in ("1", "2", "4", "1024KiB")}
    assert {buckets: one and one.iteration.value for buckets, one in times.items()} == {
        "1": 2.0,
        "2": 3.0,
        "4": None,
        "1024KiB": 4.0,
    }
    path.write_text(path.read_text().replace('buckets = "2"', 'buckets = "two"'))
    with pytest.raises(ValueError, match=r"measured\[1\]\.buckets must be a whole number, or .*; got 'two'"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("words", "remembered"),
    [
        ("--codec int8", 2),
        ("--codec int8 --connections 4", 0),
        ("--codec int8 --codec-block 64", 0),
        ("--codec int8 --rate-limit 50mbit", 0),
        ("--codec int8 --reduce rows", 0),
    ],
)
def test_an_audition_is_remembered_unless_the_run_has_options_that_a_profile_does_not_record(
    tmp_path: Path, words: str, remembered: int
) -> None:
    profile, path = cluster(), tmp_path / "cluster.toml"
    profile.save(path)
    first = audition(0.13, 0.12)
    over = first.decided(seconds(first, {1: 0.3, 2: 0.12}), again=False)
    remember(path, parse(["--batch-size", "512", *words.split()]), over, 2)
    assert len(Profile.load(path).compute[0].measured) == remembered


@pytest.mark.parametrize(
    ("words", "workers"), [("", 0), ("--dataset images --data-dir . --model resnet18", 2), ("--loader-workers 3", 3)]
)
def test_a_measured_time_is_remembered_with_the_workers_that_loaded(words: str, workers: int) -> None:
    config = parse(words.split())
    [measured] = measured_iterations([ONE], [Pace(1.0, 0.1, 1.0, 9)], config, 2)
    assert measured.loader_workers == workers
