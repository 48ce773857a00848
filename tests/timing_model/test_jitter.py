"""Jitter: timing.md's figures, the simulator compared with the formulas, and properties for all numbers."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from timing_model import simulate
from timing_model.jitter import (
    expected_maximum,
    lasting_period,
    steady_state_bound,
    steady_state_period,
    variance_of_mean,
)
from timing_model.params import Noise
from timing_model.simulate import Draws, simulate_iterations
from timing_model.support import CHECKED_CV

Values = NDArray[np.float64]
SECONDS = st.floats(0, 10)


@st.composite
def noises(draw: st.DrawFn) -> Noise:
    cv = draw(st.floats(0, 0.5))
    slow_ranks = tuple(draw(st.lists(st.floats(1, 3), max_size=2)))
    persistence = draw(st.one_of(st.just(0.0), st.floats(0, 0.99)))
    comm_cv = draw(st.one_of(st.just(0.0), st.floats(0, 0.6)))
    return Noise(cv=cv, persistence=persistence, comm_cv=comm_cv, slow_ranks=slow_ranks)


def persist(normal: Values, persistence: float) -> Values:
    """Return AR(1) processes along the first axis, made of independent deviations."""
    for number in range(1, len(normal)):
        normal[number] = persistence * normal[number - 1] + np.sqrt(1 - persistence**2) * normal[number]
    return normal


# --- Expected maxima --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "sigmas"), [(8, 1.4236), (64, 2.3437), (512, 3.0439), (10_000, 3.8516)])
def test_expected_maxima_of_normals(world_size: int, sigmas: float) -> None:
    """A lognormal distribution that is hardly spread is normal."""
    exact = (expected_maximum(Noise(cv=1e-6), world_size) - 1) / 1e-6
    assert exact == pytest.approx(sigmas, abs=6e-5)


@pytest.mark.parametrize("run", [1, 4])
@pytest.mark.parametrize(
    "noise",
    [
        Noise(cv=0.3),
        Noise(cv=0.3, persistence=0.8),
        Noise(cv=0.1, slow_ranks=(1.2, 1.5)),
        Noise(cv=0.2, slow_ranks=(1.5, 1.5, 1.5)),
    ],
)
def test_expected_maxima_are_those_of_draws(noise: Noise, run: int) -> None:
    generator = np.random.default_rng(1)
    means = np.ones(10)
    means[: len(noise.slow_ranks)] = noise.slow_ranks
    normal = persist(generator.standard_normal((run, 20_000, 10)), noise.persistence)
    sigma = np.sqrt(np.log1p(noise.cv**2))
    draws = np.exp(sigma * normal - sigma**2 / 2)
    slowest = (draws.mean(0) * means).max(1)
    within = 5 * slowest.std() / np.sqrt(len(slowest)) + (0.004 if run > 1 else 0.0)  # error of Fenton's approximation
    assert expected_maximum(noise, 10, run=run) == pytest.approx(slowest.mean(), abs=within)
    floored = np.maximum(slowest, 1.2).mean()
    assert expected_maximum(noise, 10, run=run, floor=1.2) == pytest.approx(floored, abs=within)
    floors = 1.2 * np.exp(0.3 * generator.standard_normal(len(slowest)) - 0.3**2 / 2)
    varied = np.maximum(slowest, floors)
    within = 5 * varied.std() / np.sqrt(len(varied)) + (0.004 if run > 1 else 0.0)
    floor_cv = float(np.sqrt(np.expm1(0.3**2)))
    assert expected_maximum(noise, 10, run=run, floor=1.2, floor_cv=floor_cv) == pytest.approx(
        varied.mean(), abs=within
    )


def test_one_rank_takes_its_mean() -> None:
    assert expected_maximum(Noise(cv=0.2), 1) == pytest.approx(1, abs=3e-6)


@pytest.mark.parametrize("persistence", [0.0, 0.3, 0.9, 0.99])
def test_means_of_deviations_that_persist_vary_more(persistence: float) -> None:
    """The sum in closed form."""
    for run in (1, 2, 7, 128):
        long, short = (1 + persistence) / (1 - persistence), (1 - persistence**run) / run / (1 - persistence) ** 2
        assert variance_of_mean(persistence, run) == pytest.approx((long - 2 * persistence * short) / run)


def test_simulated_deviations_persist_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(cv=0.2, persistence=0.8, slow_ranks=(2.0,))
    draws = Draws(1.0, noise, 20, seed=5)
    times = np.array([draws.next().copy() for _ in range(20_000)])
    assert times.mean(axis=0) == pytest.approx([2.0] + 19 * [1.0], rel=0.02)
    assert (times.std(axis=0) / times.mean(axis=0)).mean() == pytest.approx(0.2, rel=0.02)
    deviations = np.log(times)
    deviations = (deviations - deviations.mean(axis=0)) / deviations.std(axis=0)
    for lag in (1, 3):
        assert (deviations[lag:] * deviations[:-lag]).mean() == pytest.approx(0.8**lag, abs=0.015)
    monkeypatch.setattr(simulate, "DRAWS", 7 * 20)
    in_pieces = Draws(1.0, noise, 20, seed=5)
    assert np.array_equal([in_pieces.next().copy() for _ in range(30)], times[:30])


def test_simulated_collectives_vary_by_themselves() -> None:
    """Without computation, iterations are the collectives; two series of the same seed have nothing in common."""
    simulated = simulate_iterations(
        t_compute=0, t_comm=3, width=2, world_size=4, iterations=20_000, noise=Noise(comm_cv=0.3), seed=0
    )
    times = np.diff(simulated.ends)
    assert (times.mean(), times.std() / times.mean()) == pytest.approx((3.0, 0.3), rel=0.02)
    draws = Draws(1.0, Noise(cv=0.3), 1, seed=0)
    computed = [float(draws.next()[0]) for _ in simulated.ends]
    assert abs(np.corrcoef(times, computed[1:])[0, 1]) < 0.03


# --- The steady state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cv", "world_size", "periods"), [(0.1, 512, (2.35, 1.19, 1.03, 1.02)), (0.2, 64, (2.56, 1.32, 1.09, 1.05))]
)
def test_timing_mds_table(cv: float, world_size: int, periods: tuple[float, ...]) -> None:
    for width, period in enumerate(periods, start=1):
        noise = Noise(cv=cv)
        simulated = simulate_iterations(
            t_compute=1, t_comm=1, width=width, world_size=world_size, iterations=3000, noise=noise
        )
        assert simulated.period == pytest.approx(period, abs=0.011)
        assert steady_state_period(1, 1, width, world_size, noise) == pytest.approx(period, rel=0.015)


def worst_and_mean_error(noises: list[Noise], t_comms: tuple[float, ...]) -> tuple[float, float]:
    errors = []
    for noise, p, width, t_comm in itertools.product(noises, (1, 4, 32, 128), (2, 3, 5), t_comms):
        if len(noise.slow_ranks) <= p:
            simulated = simulate_iterations(
                t_compute=1, t_comm=t_comm, width=width, world_size=p, iterations=1500, noise=noise, seed=p + width
            ).period
            errors.append(abs(steady_state_period(1, t_comm, width, p, noise) / simulated - 1))
            assert steady_state_bound(1, t_comm, width, p, noise) <= simulated * 1.015  # the simulation's own noise
    return max(errors), float(np.mean(errors))


@pytest.mark.parametrize(
    ("noises", "worst", "mean"),
    [
        ([Noise(cv=0.05), Noise(cv=0.1)], 0.015, 0.004),
        ([Noise(cv=0.2), Noise(cv=0.4)], 0.037, 0.011),
        ([Noise(cv=CHECKED_CV)], 0.08, 0.025),
        ([Noise(cv=0.1, slow_ranks=(1.3,)), Noise(cv=0.2, slow_ranks=(1.1, 1.2))], 0.04, 0.012),
    ],
)
def test_the_period_is_as_near_as_it_says(noises: list[Noise], worst: float, mean: float) -> None:
    """Errors are the docstring's, plus the simulator's own noise: 1,500 iterations, with other seeds than the fit's."""
    largest, average = worst_and_mean_error(noises, (0.5, 0.9, 1.0, 1.2, 1.8))
    assert largest < worst
    assert average < mean


def error_of(noise: Noise, p: int, width: int, t_comm: float, *, iterations: int) -> float:
    """Return how far the formula is from a simulation, as a share of it."""
    simulated = simulate_iterations(
        t_compute=1, t_comm=t_comm, width=width, world_size=p, iterations=iterations, noise=noise, seed=p + width
    ).period
    return abs(steady_state_period(1, t_comm, width, p, noise) / simulated - 1)


@pytest.mark.slow
def test_the_period_of_jitter_that_persists_is_as_near_as_it_says() -> None:
    noises = [Noise(cv=cv, persistence=persistence) for cv, persistence in ((0.1, 0.9), (0.3, 0.5), (0.3, 0.9))]
    cells = itertools.product(noises, (2, 32), (2, 4), (0.9, 1.2))
    errors = [error_of(*cell, iterations=10_000) for cell in cells]
    assert max(errors) < 0.04
    assert np.mean(errors) < 0.012


def test_jitter_that_persists_takes_the_gain_of_a_third_iteration_in_flight() -> None:
    """Eight ranks, a cv of 20 % and a collective as long as the computation, by a simulator written for a review."""
    for persistence, periods in ((0.0, (1.20, 1.05, 1.03)), (0.9, (1.28, 1.21, 1.17))):
        for width, period in enumerate(periods, start=2):
            noise = Noise(cv=0.2, persistence=persistence)
            assert steady_state_period(1, 1, width, 8, noise) == pytest.approx(period, rel=0.03)


@pytest.mark.slow
def test_the_period_of_collectives_that_vary_is_as_near_as_it_says() -> None:
    noises = (
        Noise(comm_cv=0.2),
        Noise(comm_cv=0.5),
        Noise(cv=0.2, comm_cv=0.4),
        Noise(cv=0.3, persistence=0.9, comm_cv=0.4),
    )
    errors = [
        error_of(*cell, iterations=6000) for cell in itertools.product(noises, (2, 32), (2, 3, 5), (0.7, 1.0, 1.3))
    ]
    assert max(errors) < 0.05
    assert np.mean(errors) < 0.015


def test_where_a_collective_varies_width_1_takes_the_mean_and_width_2_the_mean_of_the_longer_part() -> None:
    """Without jitter of the computation, two in flight wait for the longer of computation and collective each time."""
    noise = Noise(comm_cv=0.5)
    sigma = np.sqrt(np.log1p(0.5**2))
    collectives = np.exp(sigma * np.random.default_rng(0).standard_normal(400_000) - sigma**2 / 2)
    assert steady_state_period(1, 1, 1, 8, noise) == 2.0
    assert lasting_period(1, 1, 2, 8, noise) == pytest.approx(np.maximum(1, collectives).mean(), rel=0.002)
    wide = [steady_state_period(1, 1, width, 8, noise) for width in (2, 3, 4, 8)]
    assert wide == sorted(wide, reverse=True)
    assert wide[0] == pytest.approx(1.19, rel=0.03)
    assert wide[-1] < 1.03


@pytest.mark.parametrize("width", [2, 3, 4])
def test_jitter_that_lasts_costs_at_most_what_the_bound_says(width: int) -> None:
    """Each rank keeps all but a hundredth of its deviation per iteration, in a plain recursion with its own draws."""
    p, cv, t_comm = 8, 0.2, 1.0
    sigma, generator, iterations = np.sqrt(np.log1p(cv**2)), np.random.default_rng(3), 40_000
    deviation, ready = generator.standard_normal(p), np.zeros(p)
    ends = np.zeros(iterations + width)
    for iteration in range(iterations):
        deviation = 0.99 * deviation + np.sqrt(1 - 0.99**2) * generator.standard_normal(p)
        ready = np.maximum(ready, ends[iteration]) + np.exp(sigma * deviation - sigma**2 / 2)
        ends[iteration + width] = max(ready.max(), ends[iteration + width - 1]) + t_comm
    taken = ends[-1] / iterations
    noise = Noise(cv=cv)
    assert steady_state_period(1, t_comm, width, p, noise) * 1.05 < taken
    assert taken == pytest.approx(lasting_period(1, t_comm, width, p, noise), rel=0.03)
    assert lasting_period(1, t_comm, 2, p, noise) == lasting_period(1, t_comm, 5, p, noise)
    assert steady_state_period(1, t_comm, width, p, Noise(cv=cv, persistence=0.99)) == pytest.approx(taken, rel=0.03)


@settings(deadline=None)
@given(compute=st.floats(0.01, 10), communication=SECONDS, width=st.integers(1, 6), world_size=st.integers(1, 5))
def test_without_noise_the_period_is_the_simulators(
    compute: float, communication: float, width: int, world_size: int
) -> None:
    simulated = simulate_iterations(
        t_compute=compute, t_comm=communication, width=width, world_size=world_size, iterations=60
    )
    period = float(simulated.ends[-1] - simulated.ends[-11]) / 10
    for formula in (steady_state_period, steady_state_bound):
        assert formula(compute, communication, width, world_size, Noise()) == pytest.approx(period, rel=1e-9)


def test_the_upper_bound_is_what_two_in_flight_take_on_one_rank() -> None:
    """Each iteration waits for the longer of computation and collective."""
    noise = Noise(cv=0.4)
    simulated = simulate_iterations(t_compute=1, t_comm=1, width=2, world_size=1, iterations=100_000, noise=noise)
    assert expected_maximum(noise, 1, floor=1.0) == pytest.approx(simulated.period, rel=0.004)


def test_no_width_hides_a_rank_that_is_always_slow() -> None:
    noise = Noise(cv=0.05, slow_ranks=(2.0,))
    for width in (2, 4, 16):
        simulated = simulate_iterations(
            t_compute=1, t_comm=0.5, width=width, world_size=8, iterations=2000, noise=noise
        )
        assert simulated.period == pytest.approx(2.0, rel=0.01)
        assert steady_state_period(1, 0.5, width, 8, noise) == pytest.approx(2.0, rel=0.01)


@given(noise=noises(), compute=SECONDS, communication=SECONDS, width=st.integers(1, 8), p=st.integers(2, 2000))
def test_the_period_is_a_number_between_its_bounds_and_monotone(
    noise: Noise, compute: float, communication: float, width: int, p: int
) -> None:
    period = steady_state_period(compute, communication, width, p, noise)
    room = 1 + 1e-9
    assert period * room >= steady_state_bound(compute, communication, width, p, noise)
    assert period <= (compute * expected_maximum(noise, p) + communication) * room
    assert steady_state_period(compute, communication * 1.01, width, p, noise) * room >= period
    assert steady_state_period(compute * 1.01, communication, width, p, noise) * room >= period
    assert steady_state_period(compute, communication, width + 1, p, noise) <= period * room
    assert steady_state_period(compute, communication, width, p + 1, noise) * room >= period
    longer = dataclasses.replace(noise, persistence=(1 + noise.persistence) / 2)
    assert steady_state_period(compute, communication, width, p, longer) * room >= period


def test_impossible_numbers_are_refused() -> None:
    noise = Noise(slow_ranks=(2.0, 2.0))
    for arguments, message in (
        ((-1.0, 1.0, 1, 2), "t_compute must be finite and at least 0; got -1.0"),
        ((1.0, float("nan"), 1, 2), "t_comm must be finite and at least 0; got nan"),
        ((1.0, 1.0, 0, 2), "width must be a whole number of at least 1; got 0"),
        ((1.0, 1.0, 1, 1), "slow_ranks must be at most world_size 1; got 2"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            steady_state_period(*arguments, noise)
        t_compute, t_comm, width, world_size = arguments
        with pytest.raises(ValueError, match=f"^{message}$"):
            simulate_iterations(
                t_compute=t_compute, t_comm=t_comm, width=width, world_size=world_size, iterations=1, noise=noise
            )
