r"""Cost of jitter and stragglers.

X_i is the computation of rank i in one iteration, with mean c unless the rank is always slow; T_c is the collective, p
the number of ranks and K the width. ``simulate.simulate_iterations`` uses none of these formulas, so it is their test.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from timing_model.checks import check_at_least, check_count
from timing_model.params import Noise

Values = NDArray[np.float64]

LEAST_CV = 1e-12
"""Smallest cv that counts as noise."""
NEGLIGIBLE = 1e-12
"""Share of the collective's time up to which a computation counts as none."""
GRID: Values = np.linspace(-9.0, 9.0, 1201)
"""Grid, in standard deviations, over which expected maxima are integrated."""
WEIGHTS: Values = np.exp(-(GRID**2) / 2) / np.exp(-(GRID**2) / 2).sum()
"""Weight of each of them in the mean over a normal distribution."""
RUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Numbers of iterations, in the bound, that a rank computes in a row without waiting."""
SPREAD, LIFT = 1.3, 0.63
"""Constants of the correction in ``steady_state_period``."""


def expected_maximum(
    noise: Noise, world_size: int, *, run: int = 1, floor: float = 0.0, floor_cv: float = 0.0
) -> float:
    r"""Expected maximum over ranks of their mean time over ``run`` iterations, at least ``floor``, as a multiple of c.

    .. math:: E[\max(\max_i \bar X_i, f)] = f + \int_f^\infty \left(1 - \prod_i F_i(x)\right) dx

    The integral uses the trapezoidal rule. The mean of r times is assumed to be lognormal, too, with a smaller cv, by
    ``variance_of_mean`` (Fenton's approximation). With ``floor_cv``, ``floor`` is the mean of
    an f that is lognormal, and the result the mean over f. Raises ``ValueError`` if a number is out of range, or more
    ranks are slow than there are.

    >>> round(expected_maximum(Noise(cv=0.1), 512), 4)
    1.349
    >>> expected_maximum(Noise(slow_ranks=(1.5,)), 4)
    1.5
    >>> round(expected_maximum(Noise(), 4, floor=1.0, floor_cv=0.1), 3)
    1.04
    """
    for name, value in (("floor", floor), ("floor_cv", floor_cv)):
        check_at_least(name, value, 0)
    x, above = _above(noise, world_size, run)
    if floor_cv < LEAST_CV:
        least = max(floor, float(x[0]))
        return least + float(np.interp(least, x, above))
    floors = np.maximum(floor * _lognormal(floor_cv), x[0])
    return float(np.dot(WEIGHTS, floors + np.interp(floors, x, above)))


@lru_cache(maxsize=4096)
def variance_of_mean(persistence: float, run: int) -> float:
    r"""Variance of the mean of ``run`` deviations in a row of an AR(1) process, as a share of one's variance.

    .. math:: \frac{1}{r} \left(1 + 2 \sum_{k=1}^{r-1} \left(1 - \frac{k}{r}\right) \rho^k\right)

    r is ``run`` and rho is ``persistence``; it is 1/r if deviations are independent. Raises ``ValueError`` if
    ``run < 1``.

    >>> [variance_of_mean(persistence, 4) for persistence in (0.0, 1.0)]
    [0.25, 1.0]
    >>> round(variance_of_mean(0.9, 100), 3)
    0.172
    """
    check_count("run", run)
    lags = np.arange(1, run)
    return float(1 + 2 * np.dot(1 - lags / run, persistence**lags)) / run


def noise_over(noise: Noise, iterations: int) -> Noise:
    r"""Return the variation of the mean time of this many iterations in a row, for windows that follow each other.

    .. math:: cv_H = cv \sqrt{v_H}, \qquad \rho_H = 2 v_{2H} / v_H - 1

    v is ``variance_of_mean``, and H is ``iterations``. The mean is assumed to be lognormal, as one iteration's time is
    (Fenton's approximation). Collectives are one for each window, and vary as before.

    >>> noise_over(Noise(cv=0.2, comm_cv=0.1), 4)
    Noise(cv=0.1, persistence=0.0, comm_cv=0.1, slow_ranks=())
    """
    if iterations == 1:
        return noise
    one, two = (variance_of_mean(noise.persistence, number * iterations) for number in (1, 2))
    return dataclasses.replace(noise, cv=noise.cv * math.sqrt(one), persistence=max(0.0, 2 * two / one - 1))


@lru_cache(maxsize=4096)
def _above(noise: Noise, world_size: int, run: int) -> tuple[Values, Values]:
    """Return rising times x, and how far the maximum is above each of them on average."""
    check_count("world_size", world_size)
    check_count("run", run)
    noise.check_world_size(world_size)
    factors = Counter({1.0: world_size - len(noise.slow_ranks)}) + Counter(noise.slow_ranks)
    slowest = noise.slowest
    if noise.cv < LEAST_CV:
        return np.array([slowest]), np.zeros(1)
    # The grid holds quantiles of the slowest rank; x are its times.
    deviation = noise.cv * math.sqrt(variance_of_mean(noise.persistence, run))
    log_below: Values = np.zeros_like(GRID)  # log of the product of F
    x = slowest * _lognormal(deviation)
    sigma = math.sqrt(math.log1p(deviation**2))
    for factor, ranks in factors.items():
        log_below += ranks * _log_cdf(GRID + math.log(slowest / factor) / sigma)
    tails = -np.expm1(log_below)
    pieces = np.diff(x) * (tails[1:] + tails[:-1]) / 2
    return x, np.append(np.cumsum(pieces[::-1])[::-1], 0.0)


@lru_cache(maxsize=256)
def _lognormal(cv: float) -> Values:
    """Return the quantiles on the ``GRID`` of a lognormal distribution of mean 1."""
    sigma = math.sqrt(math.log1p(cv**2))
    return np.asarray(np.exp(sigma * GRID - sigma**2 / 2))


def steady_state_bound(t_compute: float, t_comm: float, width: int, world_size: int, noise: Noise) -> float:
    r"""Lower bound on the mean time of an iteration in the steady state, in s.

    .. math::

        T \ge \max\left(\max_i E[X_i],\; T_c,\;
        \max_{r \ge 1} \frac{E[\max_i (X_i^1 + \dots + X_i^r)] + T_c}{K + r - 1}\right)

    A result starts K iterations of computation, of which the slowest rank does r without a wait before their collective
    begins: these are paths of the recursion, and the longest path is not shorter. r = 1 is timing.md's third term.
    The bound is exact for K = 1, and without noise. T_c is the mean of the collective.

    Raises ``ValueError`` if a number is out of range.

    >>> steady_state_bound(3.0, 4.0, 2, 8, Noise())
    4.0
    """
    check_at_least("t_compute", t_compute, 0)
    check_at_least("t_comm", t_comm, 0)
    check_count("width", width)
    if width == 1:
        return expected_maximum(noise, world_size) * t_compute + t_comm
    return max(t_comm, _computing(t_compute, t_comm, width, noise.slowest, _runs(noise, world_size)))


def steady_state_period(t_compute: float, t_comm: float, width: int, world_size: int, noise: Noise) -> float:
    r"""Mean time of an iteration in the steady state, with jitter, in s.

    It is the limit of C(t) / t in

    .. math::

        G_i(t) = \max(G_i(t-1), C(t-K)) + X_i(t), \qquad
        C(t) = \max(\max_i G_i(t), C(t-1)) + T_c

    Without noise, and for K = 1, it is exactly ``steady_state_bound``. Otherwise that bound is up to 16 % low where
    several paths are nearly the longest. With A the longest of its computing paths and m the mean of T_c, a smooth
    maximum of A and m replaces the larger one, up to what ``lasting_period`` says:

    .. math::

        T = \min\left(s \log(e^{(A + d)/s} + e^{m/s}),\; E[\max(\max_i X_i, T_c)]\right)

    .. math::

        s = 1.3 \frac{1}{K} \sqrt{v_K \sigma^2 + \frac{1}{K} \sigma_c^2}, \qquad
        d = 0.63\, \sigma \sqrt{cv\, v_K}\, (1 - 1/p)

    Sigma and sigma_c are the standard deviations of the slowest rank and of the collective, and v_K is the variance of
    the mean of K times in a row, as a share of one's: 1/K if they are independent (``variance_of_mean``). So what K
    iterations in flight average out, and how fast that rounds the corner, follow from the persistence.

    Form and constants were fitted to the simulator with independent lognormal noise: p 1 to 512, cv 3 to 40 %, K 2 to
    6, T_c 0.3 to 2.5 c. In this range it is off by 3.0 % at worst and 0.4 % on average; up to a cv of 10 %, by 1.5 % at
    worst. With one or two ranks that are always slow it was off by 3.5 % at worst.
    Beyond the fit, at a cv of 60 %, it is off by 7 % at worst and 1.7 % on average; larger cvs are refused
    (``support.CHECKED_CV``). Nothing was fitted to noise that persists, or to collectives that vary. With a persistence
    of 90 % it was off by 4 % at worst and 0.8 % on average up to a cv of 40 %, by 2 % at worst up to 20 %; with 97 %
    and a cv of 40 % by 9 % at worst, of which the simulation's own error is a part. With a cv of the collective of 30 %
    it was off by 4 % at worst and 0.9 % on average, with 60 % by 6 % (``experiments.jitter``).

    It never falls as either time or the persistence grows, and never grows with K. Raises ``ValueError`` if a number is
    out of range.

    >>> noise = Noise(cv=0.1)
    >>> [round(steady_state_period(1.0, 1.0, width, 512, noise), 2) for width in (1, 2, 3, 4)]
    [2.35, 1.19, 1.04, 1.03]
    >>> noise = Noise(cv=0.1, persistence=0.95)
    >>> [round(steady_state_period(1.0, 1.0, width, 512, noise), 2) for width in (1, 2, 3, 4)]
    [2.35, 1.31, 1.24, 1.21]
    """
    check_at_least("t_compute", t_compute, 0)
    check_at_least("t_comm", t_comm, 0)
    check_count("width", width)
    sigma, of_mean = noise.cv * t_compute * noise.slowest, math.sqrt(variance_of_mean(noise.persistence, width))
    spread = SPREAD / width * math.hypot(sigma * of_mean, noise.comm_cv * t_comm / math.sqrt(width))
    if width == 1 or spread == 0:
        return steady_state_bound(t_compute, t_comm, width, world_size, noise)
    lift = LIFT * sigma * math.sqrt(noise.cv) * of_mean * (1 - 1 / world_size)
    computing = _computing(t_compute, t_comm, width, noise.slowest, _runs(noise, world_size)) + lift
    larger, smaller = max(computing, t_comm), min(computing, t_comm)
    smooth = larger + spread * math.log1p(math.exp((smaller - larger) / spread))
    return min(smooth, lasting_period(t_compute, t_comm, width, world_size, noise))


def lasting_period(t_compute: float, t_comm: float, width: int, world_size: int, noise: Noise) -> float:
    r"""Mean time of an iteration where ranks stay slow or fast for many iterations, in s: the most that jitter costs.

    .. math:: T = E[\max(\max_i X_i, T_c)], \qquad K \ge 2

    While nothing changes, the slowest rank or the collective sets the pace, and a width above 2 gains nothing. The time
    equals ``steady_state_period`` for K = 1, and without noise. No noise costs more.

    >>> noise = Noise(cv=0.2)
    >>> [round(lasting_period(1.0, 1.0, width, 8, noise), 2) for width in (2, 3)]
    [1.31, 1.31]
    """
    if width == 1 or t_compute <= NEGLIGIBLE * t_comm:
        return steady_state_bound(t_compute, t_comm, width, world_size, noise)
    return expected_maximum(noise, world_size, floor=t_comm / t_compute, floor_cv=noise.comm_cv) * t_compute


@lru_cache(maxsize=4096)
def _runs(noise: Noise, world_size: int) -> tuple[tuple[int, float], ...]:
    """Return r - 1 and the slowest rank's time for r iterations, as a multiple of c, for each r of ``RUNS``."""
    return tuple((run - 1, run * expected_maximum(noise, world_size, run=run)) for run in RUNS)


def _computing(
    t_compute: float, t_comm: float, width: int, slowest: float, runs: tuple[tuple[int, float], ...]
) -> float:
    """Return the time per iteration, in s, of the longest path with a computation, the endless one included."""
    return max(slowest * t_compute, *[(computed * t_compute + t_comm) / (width + more) for more, computed in runs])


def _log_cdf(z: Values) -> Values:
    """Return the logarithm of the standard normal distribution function at ``z``."""
    tails = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in z.tolist()])
    return np.asarray(np.log(np.maximum(tails, 1e-300)), dtype=np.float64)
