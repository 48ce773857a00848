"""Runs of ``experiments/accuracy.py``: which are to be made, from those that are done, and what these say."""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments import simulated_runs
from experiments.accuracy_methods import COMPARED, METHODS, OF_LOW_RANK, SYNCHRONOUS, WAYS, WORKLOADS, named
from experiments.simulated_runs import WORLD_SIZE, Run
from pipesgd.errors import UserInputError

SEARCHED, LONG = (200, 600), 3000
"""Lengths, in iterations, with rates of their own and all methods; and one with the rates of the longest of them."""
RATE_SEEDS, SEEDS, MORE_SEEDS = (100, 101), tuple(range(5)), tuple(range(5, 10))
"""Seeds that rates are chosen on, those of every cell, and those added to both sides of a difference that is open."""
FIRST_TRIED, MOST_TRIED = (-1, 0, 1), 8
"""Powers of two times a workload's rate that are tried first, and the most that are tried until the best has a worse
one on each side."""
STEADY, MOST_LOWERED = 3.0, 2
"""Most percent by which seeds of synchronous training may spread. Beyond that, its rate is at the edge of stability and
is halved, at most this many times: no method then has a higher one."""
QUICK_SEEDS, QUICK_LENGTHS = 2, (20,)
WARMUP = 0.1
"""Share of the iterations in which the learning rate rises."""


def seeds_of(arguments: Namespace) -> tuple[int, ...]:
    """Return the seeds of each cell, as many as the options ask for; raises ``UserInputError``."""
    number = simulated_runs.seeds_of(arguments, seeds=len(SEEDS), quick_seeds=QUICK_SEEDS)
    if not 2 <= number <= len(SEEDS):
        raise UserInputError(f"--seeds must be from 2 to {len(SEEDS)}; got {number}")
    return SEEDS[:number]


@dataclass(frozen=True, kw_only=True)
class Planned(simulated_runs.Planned):
    """A run to be made."""

    method: str
    lr: float
    iterations: int

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.iterations} iterations, {self.method}, lr {self.lr:g}, seed {self.seed}"

    @property
    def work(self) -> float:
        workload = WORKLOADS[self.workload]
        method = named(self.method)
        each = WORLD_SIZE * workload.ms[method.words.startswith("--width 2")] * method.work / 1000
        return workload.test_s + self.iterations * each


Runs = Mapping[str, Run]
"""Finished runs by their arguments."""


@dataclass(frozen=True)
class Cell:
    """A workload at a length."""

    workload: str
    iterations: int

    def run(self, method: str, power: int, seed: int) -> Planned:
        """Return the run at 2**power times the workload's rate."""
        workload, lr = WORKLOADS[self.workload], WORKLOADS[self.workload].lr * 2.0**power
        exchange = named(method).words.format(quarter=self.iterations // 4, half=self.iterations // 2)
        rest = f"--schedule cosine --lr-warmup {max(1, round(WARMUP * self.iterations))} --iterations {self.iterations}"
        return Planned(
            workload=self.workload,
            seed=seed,
            words=f"{workload.words} {exchange} --lr {lr:g} {rest} --seed {seed}",
            method=method,
            lr=lr,
            iterations=self.iterations,
        )

    def badness(self, run: Run) -> float:
        """Return what is judged, the less the better; infinity for a run that diverged."""
        value = run.test_loss if WORKLOADS[self.workload].by_loss else run.test_accuracy
        return math.inf if value is None else value if WORKLOADS[self.workload].by_loss else -value


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Powers of two that the rates of a cell are."""

    best: dict[str, int]
    """Best power of each method with a search."""
    inside: dict[str, bool]
    """True if the powers next to the best one were tried, too."""
    lowered: int = 0
    """Number of times that synchronous training's best rate was halved, since its seeds spread too far: no method then
    has a higher one."""

    def power(self, method: str) -> int | None:
        """Return the power of a method's rate; None if its search is not finished."""
        found, most = self.best.get(named(method).rate_of), self.best[SYNCHRONOUS] - self.lowered
        return found if found is None or not self.lowered else min(found, most)

    def halved(self, method: str) -> int:
        """Return how many times the best rate of a method, whose search is finished, is that at which it is used."""
        power = self.power(method)
        assert power is not None
        return self.best[named(method).rate_of] - power


def searched(cell: Cell, method: str, runs: Runs, also: int | None = None) -> tuple[list[Planned], int | None, bool]:
    """Return the runs of the search for a method's rate, the best power, and whether it is inside of those tried.

    The power is None until the runs are done. Another one is tried next to the best until those on both sides are, and
    then ``also``, the best of another method, within the most that are tried: the search could otherwise end at a worse
    rate that is best nearby.
    """
    tried = list(FIRST_TRIED)
    while True:
        planned = {power: [cell.run(method, power, seed) for seed in RATE_SEEDS] for power in tried}
        every = [one for of_power in planned.values() for one in of_power]
        if any(one.words not in runs for one in every):
            return every, None, False
        worth = {power: sum(cell.badness(runs[one.words]) for one in own) for power, own in planned.items()}
        best = min(worth, key=lambda power: (worth[power], power))
        untried = [power for power in (best - 1, best + 1) if power not in tried]
        more = untried or [power for power in (also,) if power is not None and power not in tried]
        if not more or len(tried) == MOST_TRIED:
            return every, best, not untried
        tried.append(more[0])


def spread(cell: Cell, runs: Sequence[Run]) -> float:
    """Return by how many percent of their mean the judged values of seeds spread; infinity if one diverged."""
    values = [abs(cell.badness(run)) for run in runs]
    return 100 * (max(values) - min(values)) * len(values) / sum(values) if max(values) < math.inf else math.inf


def lowered(cell: Cell, best: int, seeds: Sequence[int], runs: Runs) -> tuple[list[Planned], int | None]:
    """Return the runs that say how often the best rate must be halved, and how often; None until they are done."""
    every: list[Planned] = []
    for times in range(MOST_LOWERED + 1):
        planned = [cell.run(SYNCHRONOUS, best - times, seed) for seed in seeds]
        every += planned
        if any(one.words not in runs for one in planned):
            return every, None
        if spread(cell, [runs[one.words] for one in planned]) <= STEADY:
            break
    return every, times


def rates_of(cell: Cell, seeds: Sequence[int], runs: Runs) -> tuple[list[Planned], Rates | None]:
    """Return the runs that give the rates of a cell, and the rates; None until those of synchronous training are known.

    Rates of other methods, whose search is not finished, are left out.
    """
    first = searched(cell, SYNCHRONOUS, runs)
    others = [name for name in methods_of(cell) if METHODS[name].rate_of == name and name != SYNCHRONOUS]
    searches = {SYNCHRONOUS: first} | {name: searched(cell, name, runs, also=first[1]) for name in others}
    every = [one for planned, _, _ in searches.values() for one in planned]
    best_of = {name: best for name, (_, best, _) in searches.items() if best is not None}
    if SYNCHRONOUS not in best_of:
        return every, None
    planned, times = lowered(cell, best_of[SYNCHRONOUS], seeds, runs)
    every += planned
    if times is None:
        return every, None
    return every, Rates(best=best_of, inside={name: inside for name, (_, _, inside) in searches.items()}, lowered=times)


def methods_of(cell: Cell) -> list[str]:
    """Return the methods that are tried in a cell."""
    workload = WORKLOADS[cell.workload]
    fit = [name for name, method in METHODS.items() if workload.factored or OF_LOW_RANK not in method.words]
    if cell.iterations != LONG:
        return fit
    return [name for name in fit if METHODS[name].long] if workload.long else []


def ways_of(cell: Cell, rates: Rates | None, seeds: Sequence[int], runs: Runs) -> list[str]:
    """Return the ways that are tried in a cell: those of methods that have missed their bound, with all their seeds."""
    if rates is None or tuple(seeds) != SEEDS:
        return []
    found = {name: final(cell, name, rates, seeds, runs) for name in {way.way_of for way in WAYS.values()}}
    missed = {name for name, one in found.items() if one is not None and one.verdict == "missed"}
    return [way for way, method in WAYS.items() if method.way_of in missed]


def rates_for(cell: Cell, seeds: Sequence[int], runs: Runs) -> tuple[list[Planned], Rates | None]:
    """Return what ``rates_of`` does; those of the length ``LONG`` are the rates of the longest one with a search."""
    return rates_of(cell if cell.iterations != LONG else Cell(cell.workload, max(SEARCHED)), seeds, runs)


def plan_of(cell: Cell, seeds: Sequence[int], runs: Runs, *, most: bool = False) -> list[Planned]:
    """Return the runs of a cell that can be told from those that are done, in the order in which they are made.

    With ``most``, those of all its rates and seeds are there, at the workload's own rate where the best is not known.
    """
    every, rates = rates_for(cell, seeds, runs)
    if rates is None and not most:
        return every
    for method in methods_of(cell):
        power = None if rates is None else rates.power(method)
        if power is not None or most:
            every += [cell.run(method, power or 0, seed) for seed in seeds]
    if rates is not None and tuple(seeds) == SEEDS:
        for method in COMPARED:
            if is_open(cell, difference(cell, method, rates, SEEDS, runs)):
                every += [one for seed in MORE_SEEDS for one in both_of(cell, method, rates, seed) or ()]
        for way in ways_of(cell, rates, seeds, runs):
            every += [one for seed in seeds for one in both_of(cell, way, rates, seed) or ()]
    return list(dict.fromkeys(every))


def plan(
    workloads: Sequence[str], lengths: Sequence[int], seeds: Sequence[int], runs: Runs, *, most: bool = False
) -> list[Planned]:
    """Return the runs that can be told from those that are done, those that answer most first.

    Every workload comes at its shorter lengths before any comes at ``LONG``.
    """
    cells = sorted(
        itertools.starmap(Cell, itertools.product(workloads, lengths)), key=lambda cell: cell.iterations == LONG
    )
    return list(dict.fromkeys(one for cell in cells for one in plan_of(cell, seeds, runs, most=most)))


# ---- Differences


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Cost of a method next to synchronous training, in percent of the loss or points of accuracy, paired by seed."""

    seeds: tuple[int, ...]
    mean: float
    """Mean over seeds; above 0 where the method is worse, infinity if a seed diverged."""
    low: float
    high: float
    """Ends of the 95 % interval of the mean, by Student's t."""
    bound: float

    @property
    def verdict(self) -> str:
        """Return "met" if the mean is within the bound and the interval's upper end within twice it, else why not."""
        if not self.mean <= self.bound:
            return "missed"
        return "met" if self.high <= 2 * self.bound else f"unresolved at {len(self.seeds)} seeds"


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""0.975 quantiles of Student's t with 1 to 9 degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of at least two values, and the ends of its 95 % interval.

    >>> [round(value, 3) for value in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    number, mean = len(values), sum(values) / len(values)
    if math.isinf(mean):
        return math.inf, math.inf, math.inf
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (number - 1))
    half = STUDENT[number - 2] * deviation / math.sqrt(number)
    return mean, mean - half, mean + half


def both_of(cell: Cell, method: str, rates: Rates, seed: int) -> tuple[Planned, Planned] | None:
    """Return the run of a method and the synchronous one of the same seed; None if the method has no rate yet."""
    power, base = rates.power(method), rates.power(SYNCHRONOUS)
    assert base is not None, "there are rates"
    return None if power is None else (cell.run(method, power, seed), cell.run(SYNCHRONOUS, base, seed))


def difference(cell: Cell, method: str, rates: Rates, seeds: Sequence[int], runs: Runs) -> Difference | None:
    """Return what a method costs over ``seeds``; None until all are finished, or if a synchronous one diverged."""
    costs, by_loss = [], WORKLOADS[cell.workload].by_loss
    for seed in seeds:
        both = both_of(cell, method, rates, seed)
        if both is None or any(one.words not in runs for one in both):
            return None
        value, base = (cell.badness(runs[one.words]) for one in both)
        if math.isinf(base):
            return None
        costs.append(100 * (value / base - 1) if by_loss else 100 * (value - base))
    mean, low, high = interval(costs)
    bound = named(method).bounds[0 if by_loss else 1]
    return Difference(seeds=tuple(seeds), mean=mean, low=low, high=high, bound=bound)


def is_open(cell: Cell, found: Difference | None) -> bool:
    """Return whether more seeds are to settle the verdict: it is not met, and the interval reaches into the bound."""
    return cell.iterations != LONG and found is not None and found.verdict != "met" and found.low <= found.bound


def final(cell: Cell, method: str, rates: Rates, seeds: Sequence[int], runs: Runs) -> Difference | None:
    """Return what a method costs over ``seeds``, and with all more seeds where these left it open."""
    found = difference(cell, method, rates, seeds, runs)
    if tuple(seeds) != SEEDS or not is_open(cell, found):
        return found
    return difference(cell, method, rates, (*SEEDS, *MORE_SEEDS), runs) or found
