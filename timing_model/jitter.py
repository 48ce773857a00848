r"""Cost of jitter and stragglers.

X_i is the computation of rank i in one iteration, drawn again each time, with mean c unless the rank is always slow;
T_c is the collective, p the number of ranks and K the width. ``simulate.simulate_iterations`` uses none of these
formulas, so it is their test.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from timing_model.checks import check_at_least, check_count
from timing_model.params import Noise

Values = NDArray[np.float64]

LEAST_CV = 1e-12
"""Smallest cv that counts as noise."""
GRID: Values = np.linspace(-9.0, 9.0, 1201)
"""Grid, in standard deviations, over which expected maxima are integrated."""
RUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Numbers of iterations, in the bound, that a rank computes in a row without waiting."""
SPREAD, SPREAD_WIDTH = 1.3, -1.5
LIFT, LIFT_CV, LIFT_WIDTH = 0.63, 1.5, -0.5
"""Constants of the correction in ``steady_state_period``."""


def blom(world_size: int) -> float:
    r"""Expected maximum of p standard normal draws, in standard deviations.

    .. math:: \Phi^{-1}\left(\frac{p - 0.375}{p + 0.25}\right)

    It is within 0.7 % for p >= 8. Source: Blom, 1958.

    >>> [round(blom(p), 3) for p in (1, 8, 64, 512)]
    [0.0, 1.434, 2.337, 3.031]
    """
    check_count("world_size", world_size)
    return NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))


def expected_maximum(noise: Noise, world_size: int, *, run: int = 1, floor: float = 0.0) -> float:
    r"""Expected maximum over ranks of their mean time over ``run`` iterations, at least ``floor``, as a multiple of c.

    .. math:: E[\max(\max_i \bar X_i, f)] = f + \int_f^\infty \left(1 - \prod_i F_i(x)\right) dx

    The integral uses the trapezoidal rule. The mean of r draws is assumed to have the same distribution, with
    cv / sqrt(r) (Fenton's approximation if it is lognormal). Raises ``ValueError`` if a number is out of range, or more
    ranks are slow than there are.

    >>> round(expected_maximum(Noise(cv=0.1, distribution="normal"), 512), 4)
    1.3044
    >>> expected_maximum(Noise(slow_ranks=(1.5,)), 4)
    1.5
    """
    check_at_least("floor", floor, 0)
    x, above = _above(noise, world_size, run)
    if floor <= x[0]:
        return x[0] + above[0]
    if floor >= x[-1]:
        return floor
    after = bisect_right(x, floor)
    share = (floor - x[after - 1]) / (x[after] - x[after - 1])
    return floor + above[after - 1] + share * (above[after] - above[after - 1])


@lru_cache(maxsize=4096)
def _above(noise: Noise, world_size: int, run: int) -> tuple[list[float], list[float]]:
    """Return rising times x, and how far the maximum is above each of them on average."""
    check_count("world_size", world_size)
    check_count("run", run)
    noise.check_world_size(world_size)
    factors = Counter({1.0: world_size - len(noise.slow_ranks)}) + Counter(noise.slow_ranks)
    slowest = noise.slowest
    if noise.cv < LEAST_CV:
        return [slowest], [0.0]
    # The grid holds quantiles of the slowest rank; x are its times.
    deviation = noise.cv / math.sqrt(run)
    log_below: Values = np.zeros_like(GRID)  # log of the product of F
    if noise.distribution == "normal":
        x = slowest * (1 + deviation * GRID)
        for factor, ranks in factors.items():
            log_below += ranks * _log_cdf((x / factor - 1) / deviation)
    else:
        sigma = math.sqrt(math.log1p(deviation**2))
        x = slowest * np.exp(sigma * GRID - sigma**2 / 2)
        for factor, ranks in factors.items():
            log_below += ranks * _log_cdf(GRID + math.log(slowest / factor) / sigma)
    tails = -np.expm1(log_below)
    pieces = np.diff(x) * (tails[1:] + tails[:-1]) / 2
    return x.tolist(), [*np.cumsum(pieces[::-1])[::-1].tolist(), 0.0]


def steady_state_bound(t_compute: float, t_comm: float, width: int, world_size: int, noise: Noise) -> float:
    r"""Lower bound on the mean time of an iteration in the steady state, in s.

    .. math::

        T \ge \max\left(\max_i E[X_i],\; T_c,\;
        \max_{r \ge 1} \frac{E[\max_i (X_i^1 + \dots + X_i^r)] + T_c}{K + r - 1}\right)

    A result starts K iterations of computation, of which the slowest rank does r without a wait before their collective
    begins: these are paths of the recursion, and the longest path is not shorter. r = 1 is timing.md's third term.
    The bound is exact for K = 1, and without noise.

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
    several paths are nearly the longest. With A the longest of its computing paths, a smooth maximum of A and T_c
    replaces the larger one:

    .. math::

        T = \min\left(s \log(e^{(A + d)/s} + e^{T_c/s}),\; E[\max(\max_i X_i, T_c)]\right), \qquad
        s = 1.3\, \sigma K^{-3/2}, \quad d = 0.63\, \sigma \sqrt{cv}\, K^{-1/2} (1 - 1/p)

    Sigma is the standard deviation of the slowest rank. The second term is an upper bound for any K >= 2. Form and
    constants were fitted to the simulator with lognormal noise: p 1 to 512, cv 3 to 40 %, K 2 to 6, T_c 0.3 to 2.5 c.
    In this range it is off by 3.0 % at worst and 0.4 % on average; up to a cv of 10 %, by 1.5 % at worst. With normal
    noise of 20 % it was off by 3.3 % at worst, with one or two ranks that are always slow by 3.5 %. Beyond the fit, at
    a cv of 60 %, it is off by 7 % at worst and 1.7 % on average; larger cvs are refused (``job.CHECKED_CV``).

    It never falls as either time grows, and never grows with K. Raises ``ValueError`` if a number is out of range.

    >>> noise = Noise(cv=0.1)
    >>> [round(steady_state_period(1.0, 1.0, width, 512, noise), 2) for width in (1, 2, 3, 4)]
    [2.35, 1.19, 1.04, 1.03]
    """
    check_at_least("t_compute", t_compute, 0)
    check_at_least("t_comm", t_comm, 0)
    check_count("width", width)
    sigma = noise.cv * t_compute * noise.slowest
    spread = SPREAD * sigma * width**SPREAD_WIDTH
    if width == 1 or spread == 0:
        return steady_state_bound(t_compute, t_comm, width, world_size, noise)
    runs = _runs(noise, world_size)
    lift = LIFT * sigma * noise.cv ** (LIFT_CV - 1) * width**LIFT_WIDTH * (1 - 1 / world_size)
    computing = _computing(t_compute, t_comm, width, noise.slowest, runs) + lift
    larger, smaller = max(computing, t_comm), min(computing, t_comm)
    smooth: float = larger + spread * math.log1p(math.exp((smaller - larger) / spread))
    if smooth <= max(t_comm, runs[0][1] * t_compute):  # the upper bound is not smaller
        return smooth
    return min(smooth, lasting_period(t_compute, t_comm, width, world_size, noise))


def lasting_period(t_compute: float, t_comm: float, width: int, world_size: int, noise: Noise) -> float:
    r"""Mean time of an iteration where ranks stay slow or fast for many iterations, in s: the most that jitter costs.

    .. math:: T = E[\max(\max_i X_i, T_c)], \qquad K \ge 2

    While nothing changes, the slowest rank or the collective sets the pace, and a width above 2 gains nothing. The time
    equals ``steady_state_period`` for K = 1, and without noise.

    >>> noise = Noise(cv=0.2)
    >>> [round(lasting_period(1.0, 1.0, width, 8, noise), 2) for width in (2, 3)]
    [1.31, 1.31]
    """
    if width == 1 or t_compute == 0:
        return steady_state_bound(t_compute, t_comm, width, world_size, noise)
    return expected_maximum(noise, world_size, floor=t_comm / t_compute) * t_compute


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
