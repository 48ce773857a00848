"""Simulation of many ranks by iteration, with jitter and stragglers: an independent check of the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timing_model.checks import check_at_least, check_count
from timing_model.params import Noise

Values = NDArray[np.float64]

DRAWS = 1 << 16
"""Random numbers drawn at once: 512 KiB."""
SETTLING = 0.1
"""Share of the iterations left out of the period at the start, while the pipeline fills."""
COLLECTIVES = 1
"""Number that makes the collectives' seed another one than the computations'."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result of a simulation, in s since the start."""

    ends: Values
    """Times at which each collective was done, that of an iteration or of a window, (collectives,)."""
    width: int
    iterations: int
    local_steps: int = 1
    """Iterations of a window, whose end each collective follows; the last window may have fewer."""

    @property
    def period(self) -> float:
        """Mean time of an iteration in the steady state, in s."""
        return float(np.mean(self.each))

    @property
    def each(self) -> Values:
        """Time of each iteration in the steady state, in s; with local steps, the mean of each whole window."""
        whole = self.ends[: max(1, self.iterations // self.local_steps)]
        first = int(len(whole) * SETTLING)
        times = np.diff(whole[first:]) if first < len(whole) - 1 else whole[-1:]
        return times / min(self.local_steps, self.iterations)


def simulate_iterations(
    *,
    t_compute: float,
    t_comm: float,
    width: int,
    world_size: int,
    iterations: int,
    local_steps: int = 1,
    t_batch: float = 0.0,
    noise: Noise | None = None,
    seed: int = 0,
) -> Simulation:
    """Simulate ``world_size`` ranks that compute and reduce for ``iterations`` iterations: Pipe-SGD of any width.

    In each iteration every rank waits for the sum of the iteration ``width`` before, and computes. When all ranks have
    computed and the last collective is done, the next collective begins. Ranks, and collectives, draw their times from
    ``noise``, whose slow ranks are the first. With ``local_steps``, ranks compute that many iterations in a row, or
    those that are left. A rank's loader workers have a batch for it every ``t_batch`` s, without which no iteration
    begins. 10,000 ranks and 1,000 iterations take a second or less, and 30 MB.

    Raises ``ValueError`` if a number is out of range, or more ranks are slow than there are.

    >>> simulation = simulate_iterations(t_compute=3.0, t_comm=4.0, width=2, world_size=4, iterations=5)
    >>> simulation.ends.tolist()
    [7.0, 11.0, 15.0, 19.0, 23.0]
    """
    check_at_least("t_compute", t_compute, 0)
    check_at_least("t_comm", t_comm, 0)
    check_at_least("t_batch", t_batch, 0)
    counts = {"width": width, "world_size": world_size, "iterations": iterations, "local_steps": local_steps}
    for name, value in counts.items():
        check_count(name, value)
    windows = math.ceil(iterations / local_steps)
    noise = noise or Noise()
    times, collectives = Draws(t_compute, noise, world_size, seed), collective_draws(t_comm, noise, seed)
    ready = np.zeros(world_size)  # when each rank has computed
    ends = np.zeros(windows + width)  # the first ``width`` are there from the start
    for window in range(windows):
        np.maximum(ready, ends[window], out=ready)
        first = window * local_steps
        for iteration in range(first, min(first + local_steps, iterations)):
            np.maximum(ready, (iteration + 1) * t_batch, out=ready)
            ready += times.next()
        ends[window + width] = max(ready.max(), ends[window + width - 1]) + collectives.next()[0]
    return Simulation(ends=ends[width:], width=width, iterations=iterations, local_steps=local_steps)


def collective_draws(t_comm: float, noise: Noise, seed: int) -> Draws:
    """Return the collectives' times, drawn iteration by iteration, (1,) each."""
    return Draws(t_comm, Noise(cv=noise.comm_cv), 1, seed, of=COLLECTIVES)


class Draws:
    """Times of all ranks' computations, drawn iteration by iteration, (world_size,) each, in s.

    ``of`` tells series of one seed apart.
    """

    def __init__(self, t_compute: float, noise: Noise, world_size: int, seed: int, *, of: int | None = None):
        noise.check_world_size(world_size)
        self._means = np.full(world_size, float(t_compute))
        self._means[: len(noise.slow_ranks)] *= noise.slow_ranks
        self._noise = noise
        self._generator = np.random.default_rng(seed if of is None else [seed, of])
        self._block = np.empty((0, world_size))
        self._before: Values | None = None
        """Standard normal deviations of the last iteration that was drawn."""
        self._taken = 0

    def next(self) -> Values:
        """Return the times of the next iteration."""
        if self._noise.cv == 0:
            return self._means
        if self._taken == len(self._block):
            self._block = self._draw(max(1, DRAWS // len(self._means)))
            self._taken = 0
        self._taken += 1
        drawn: Values = self._block[self._taken - 1]
        return drawn

    def _draw(self, iterations: int) -> Values:
        normal = self._generator.standard_normal((iterations, len(self._means)))
        if self._noise.persistence:
            self._persist(normal)
        sigma = np.sqrt(np.log1p(self._noise.cv**2))
        normal *= sigma
        normal -= sigma**2 / 2
        np.exp(normal, out=normal)
        normal *= self._means
        return normal

    def _persist(self, normal: Values) -> None:
        """Turn independent deviations, (iterations, world_size), into those of AR(1) processes, in place."""
        persistence = self._noise.persistence
        for number in range(len(normal)):
            if self._before is not None:  # the first ones have nothing before them
                normal[number] *= math.sqrt(1 - persistence**2)
                normal[number] += persistence * self._before
            self._before = normal[number].copy()
