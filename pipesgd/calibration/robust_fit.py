"""Robust fits of parameters to measured times, with intervals, and checked on times that they were not fitted to."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from timing_model.measured import Estimate

Floats = NDArray[np.float64]
Predict = Callable[[Floats], Floats]
"""Function from parameters (k,) to times, one per cell (n,): piecewise linear in the parameters, and 0 at 0."""

MOST_ITERATIONS = 20
CONVERGED = 1e-4
"""Relative change of the parameters below which they have converged."""
SETTLED = 0.02
"""Share of a cell's spread: predictions that change by less need no further iteration."""
TRUSTED = 1.5
"""Multiple of the expected error: a cell that is off by more counts less (Huber)."""
LEAST_SPREAD = 0.01
"""Relative error that a median of a few times, and a formula, may have even where all times are alike."""
OPEN = 1e-14
NUDGE = 1e-7
"""Relative change of a parameter that shows its effect on the times, too small to reach the next piece."""
RESAMPLES = 200
LOW, HIGH = 0.05, 0.95
"""Quantiles that bound a 90 % interval."""


class Prior(NamedTuple):
    """Knowledge of a parameter from elsewhere, for data that say little about it."""

    parameter: int
    value: float
    share: float
    """Share of the value by which it may well be off."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Result of a fit."""

    parameters: Floats
    """Fitted parameters (k,), each at least 0."""
    low: Floats
    high: Floats
    fitted: Floats
    """Times of all cells (n,) by the parameters."""
    held_out: Floats
    """fitted / measured - 1 of every cell (n,), each by a fit to the cells of other folds, if there are any."""

    def estimates(self) -> list[Estimate]:
        """Return every parameter with its interval."""
        return [Estimate(*map(float, three)) for three in zip(self.parameters, self.low, self.high, strict=True)]


def spread(times: Floats) -> float:
    """Return the relative spread of times around their median: for a normal distribution, one standard deviation."""
    median = np.median(times)
    return float(1.4826 * np.median(np.abs(times - median)) / median)


def fit(
    predict: Predict,
    start: Floats,
    samples: Sequence[Floats],
    *,
    folds: NDArray[np.int64],
    priors: Sequence[Prior] = (),
    seed: int = 0,
) -> Fit:
    """Find non-negative parameters under which ``predict`` comes nearest to the medians of ``samples``.

    Distances are relative to each time, not in seconds, and in units of a cell's own spread: a size at which the
    machine's noise is half of the time must not bend what exact times of larger sizes say. Medians are used since a few
    interruptions determine a mean; and cells that are far off nevertheless count less (Huber's weights).

    Args:
        predict: see ``Predict``.
        start: (k,), above 0, of the magnitude that the parameters may have.
        samples: measured times of each of n cells.
        folds: (n,), the number of the fold that a cell is in. Each fold is predicted by a fit to the others; a single
            one by its own.
        priors: knowledge from other sources.
        seed: seed of the resampling of cells and of their times, which gives the intervals.
    """
    problem = _Problem(
        measured=np.array([np.median(times) for times in samples]),
        spreads=np.array([np.hypot(LEAST_SPREAD, spread(times)) for times in samples]),
        priors=priors,
        scale=start.astype(float),
    )
    parameters = _solve(predict, problem, np.ones(len(samples)))
    held_out = predict(parameters) / problem.measured - 1
    for fold in np.unique(folds):
        own = folds == fold
        if not own.all():
            others = _solve(predict, problem, (~own).astype(float))
            held_out[own] = predict(others)[own] / problem.measured[own] - 1
    # Near the optimum the times are linear, so a resample does not need the formula.
    slopes, base = _slopes(predict, parameters, start)
    offset = base - slopes @ parameters
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        counts = np.bincount(generator.integers(0, len(samples), len(samples)), minlength=len(samples))
        times = np.array([np.median(generator.choice(one, len(one))) for one in samples])
        resampled = dataclasses.replace(problem, measured=times)
        drawn.append(resampled.solve(slopes, offset, counts.astype(float)))
    low, high = np.quantile(drawn, (LOW, HIGH), axis=0)
    return Fit(
        parameters=parameters,
        low=np.minimum(low, parameters),
        high=np.maximum(high, parameters),
        fitted=base,
        held_out=held_out,
    )


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """Data that parameters are fitted to."""

    measured: Floats
    spreads: Floats
    """Relative spread of each cell's times."""
    priors: Sequence[Prior]
    scale: Floats
    """Units in which the parameters are counted, so that none is tiny."""

    def solve(self, slopes: Floats, offset: Floats, counts: Floats) -> Floats:
        """Solve where times are ``slopes @ parameters + offset``. Cell i counts ``counts[i]`` times."""
        used = counts > 0
        units = (self.measured * self.spreads)[used]
        rows = slopes[used] * self.scale / units[:, None]
        targets = (self.measured - offset)[used] / units
        known = np.zeros((len(self.priors), len(self.scale)))
        wanted = np.zeros(len(self.priors))
        for number, prior in enumerate(self.priors):
            known[number, prior.parameter] = self.scale[prior.parameter] / (prior.share * prior.value)
            wanted[number] = 1 / prior.share
        weights = np.ones(len(targets))
        solution = np.zeros(len(self.scale))
        for _ in range(MOST_ITERATIONS):
            roots, previous = np.sqrt(weights * counts[used]), solution
            solution = non_negative(
                np.concatenate([rows * roots[:, None], known]), np.concatenate([targets * roots, wanted])
            )
            if np.allclose(solution, previous, rtol=CONVERGED, atol=0):
                break
            residuals = np.abs(rows @ solution - targets)
            weights = np.minimum(1.0, TRUSTED / np.maximum(residuals, TRUSTED))
        return solution * self.scale


def _solve(predict: Predict, problem: _Problem, counts: Floats) -> Floats:
    """Solve by Gauss-Newton: solve for the piece on which the parameters are, move there, and repeat."""
    parameters = problem.scale
    step, before = 1.0, np.zeros(len(problem.measured))
    for iteration in range(MOST_ITERATIONS):
        slopes, base = _slopes(predict, parameters, problem.scale)
        if np.all(np.abs(base - before) <= SETTLED * problem.spreads * problem.measured):
            break
        before = base
        solved = problem.solve(slopes, base - slopes @ parameters, counts)
        step = 1.0 if iteration < MOST_ITERATIONS // 4 else step * 0.7  # oscillation between pieces must end
        parameters = parameters + step * (solved - parameters)
    return parameters


def _slopes(predict: Predict, parameters: Floats, scale: Floats) -> tuple[Floats, Floats]:
    """Return the change of the times (n,) with each parameter (n, k), and the times."""
    base = predict(parameters)
    columns = []
    for index in range(len(parameters)):
        nudge = NUDGE * max(parameters[index], scale[index])
        moved = parameters.copy()
        moved[index] += nudge
        columns.append((predict(moved) - base) / nudge)
    return np.stack(columns, axis=1), base


def non_negative(rows: Floats, targets: Floats) -> Floats:
    """Return the x of at least 0 that brings ``rows @ x`` nearest to ``targets``, by trying all choices of zeros.

    >>> non_negative(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -1.0])).round(9).tolist()
    [2.0, 0.0]
    """
    gram, moments = rows.T @ rows, rows.T @ targets
    free = _choices(rows.shape[1])  # (choices, k): parameters that may be above 0
    grams = gram * free[:, :, None] * free[:, None, :]
    # The other equations set x to 0; a tiny diagonal term decides where the data leave a direction open.
    grams += np.eye(len(gram)) * (1 - free[:, :, None] + OPEN * np.trace(gram))
    solved = np.linalg.solve(grams, (moments * free)[:, :, None])[:, :, 0]
    costs = np.einsum("ci,ij,cj->c", solved, gram, solved) - 2 * solved @ moments  # without the targets' constant
    costs[np.any(solved < 0, axis=1)] = np.inf
    best: Floats = np.maximum(solved[np.argmin(costs)], 0.0)
    return best


@functools.cache
def _choices(count: int) -> Floats:
    """Return all ways to let some of ``count`` numbers be 0 and others not: rows of 0 and 1; all 0 first."""
    return np.array(list(itertools.product((0.0, 1.0), repeat=count)))


def median_of(times: Floats, seed: int = 0) -> Estimate:
    """Return the median, with the interval in which resampled medians lie."""
    drawn = np.random.default_rng(seed).choice(times, (RESAMPLES, len(times)))
    medians = np.median(drawn, axis=1)
    value = float(np.median(times))
    return Estimate(value, min(value, float(np.quantile(medians, LOW))), max(value, float(np.quantile(medians, HIGH))))
