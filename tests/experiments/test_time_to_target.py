"""Time to a target: the trainings that are asked for, and what is calculated from them and the times."""

from __future__ import annotations

import shlex

import pytest

from experiments.simulated_options import check_simulated
from experiments.simulated_runs import Run
from experiments.time_to_target import METHODS, RATE_SEED, RATES, REFERENCE, SCHEDULES, Planned, plan, rows_of
from pipesgd.cli import parse as parse_training

COSINE = next(iter(SCHEDULES))
ENDS = 0.5


def ran(one: Planned, crosses: float, end: float = ENDS) -> Run:
    """Return a run whose accuracy rises along a line from 0, which it is after no iteration, until it ``crosses``."""
    points = [[float(n), min(end, (end - 0.01) * n / crosses)] for n in range(100, 700, 100)]
    return Run(commit="c", seconds=1.0, diverged_at=None, test_accuracy=end, test_loss=1.0, points=points)


def finished(crosses: dict[str, float], worse: float = 0.0) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    while left := [one for one in plan(600, 3, runs) if one.words not in runs]:
        for one in left:
            best = f"--lr {RATES[1]:g} " in one.words
            name = next(name for name, method in METHODS.items() if f" {method.trained} --lr" in one.words)
            lower = worse if name == "int4" and one.seed == 2 else 0.0
            runs[one.words] = ran(one, crosses.get(name, 400.0), ENDS - lower if best else 0.3)
    return runs


def times(start: float) -> dict[str, list[float]]:
    found = {"--strategy local": [0.05, 0.05]}
    for name, method in METHODS.items():
        found[method.start] = [start, 2 * start]
        found[method.timed] = [0.1, 0.2] if name == REFERENCE else [0.05, 0.1]
    return found


def test_every_training_is_one_that_simulated_ranks_follow_and_a_rate_is_chosen_first() -> None:
    every = plan(600, 3, {}, most=True)
    for one in every:
        check_simulated(parse_training(shlex.split(one.words)))
    assert {one.seed for one in plan(600, 3, {})} == {RATE_SEED}
    assert len(every) == len(SCHEDULES) * (2 * len(RATES) + 5 * 3)
    assert f"--lr {RATES[1]:g} " in next(one for one in plan(600, 3, finished({})) if one.seed == 0).words


def test_no_rate_is_above_the_highest_at_which_seeds_of_the_reference_stay_together() -> None:
    runs: dict[str, Run] = {}
    while left := [one for one in plan(600, 3, runs) if one.words not in runs]:
        for one in left:
            apart = 0.1 if one.system == REFERENCE and one.seed == 1 and f"--lr {RATES[1]:g} " in one.words else 0.0
            runs[one.words] = ran(one, 400.0, ENDS - apart - (0.0 if f"--lr {RATES[1]:g} " in one.words else 0.01))
    found = rows_of(COSINE, 600, 3, runs, times(0.15))
    assert {(row["lr"], row["lr_is_inside"], row["lr_lowered"]) for row in found} == {(RATES[0], False, True)}


def test_iterations_of_the_start_take_their_own_time() -> None:
    """They are 50 of 400, in a rise to 0.85 of the rate in 60; one takes 150 ms, a later one 50, and of DDP 100."""
    found = {row["method"]: row for row in rows_of(COSINE, 600, 3, finished({"int8": 400.0}), times(0.15))}
    row, base = found["int8"], found[REFERENCE]
    assert (row["start_iterations"], base["start_iterations"]) == (50, 0)
    assert row["iterations_to_target"] == pytest.approx(400)
    faster = 0.1 * 400 / (0.05 * 350 + 0.15 * 50)
    assert row["times_as_fast_median"] == pytest.approx(faster)
    assert row["alone_times_as_fast"] == pytest.approx(3.0)  # of 2 and 4
    assert row["share_of_alone_high"] == pytest.approx(faster / 2)
    assert (base["times_as_fast_low"], base["times_as_fast_high"]) == (1, 1)


def test_a_target_that_one_seed_does_not_keep_has_no_time() -> None:
    found = {row["method"]: row for row in rows_of(COSINE, 600, 3, finished({}, worse=0.05), times(0.15))}
    assert found["int4"]["not_reached"] == "reached and kept by 2 of 3 seeds"
    assert found["int4"]["times_as_fast_median"] is None
    assert found["int8"]["time_to_target_s"] is not None
