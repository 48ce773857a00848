"""Fits to times that are known: made by the formulas, with noise and with interruptions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesgd.calibration import report
from pipesgd.calibration.computation import MOST_SLOWDOWN
from pipesgd.calibration.fit_cluster import ALPHA, BETA, CollectiveFit, fit_collective, fit_servers, sharing_of
from pipesgd.calibration.links import Probes
from pipesgd.calibration.robust_fit import Floats, Prior, fit, median_of, non_negative, spread
from pipesgd.calibration.sweep import Cell
from timing_model.all_reduce import all_reduce_time
from timing_model.measured import Estimate
from timing_model.parameter_server import parameter_server_time
from timing_model.params import LinkParams
from timing_model.presets import OVERHEAD

LINK = LinkParams(alpha=60e-6, beta=4.2e-8, gamma=2e-10, sync=40e-6, overhead=OVERHEAD)
SIZES = tuple(1 << k for k in range(10, 25, 2))


def made_cells(name: str, link: LinkParams, seed: int, *, noise: float, interrupted: float) -> list[Cell]:
    """Return times of the formula with lognormal noise, some of them interrupted and many times as long."""
    generator = np.random.default_rng(seed)
    cells = []
    for world_size in (2, 3, 4):
        for nbytes in SIZES:
            exact = all_reduce_time(name, link, nbytes / 4, world_size).total
            times = exact * np.exp(noise * generator.standard_normal(30))
            times *= np.where(generator.random(30) < interrupted, generator.uniform(3, 30, 30), 1)
            cells.append(Cell(all_reduce=name, world_size=world_size, nbytes=nbytes, seconds=times))
    return cells


def probes(link: LinkParams) -> Probes:
    """Return probes of ``link`` as they would be measured: not quite right."""
    one = np.full((4, 4), 1.0)
    return Probes(latency=1.4 * link.alpha * one, rate=0.9 / link.beta * one)


def fitted(name: str, cells: list[Cell], link: LinkParams = LINK) -> CollectiveFit:
    return fit_collective(name, cells, probes(link), Estimate.exact(1.3 * link.gamma))


@pytest.mark.parametrize("name", ["ring", "native"])
@pytest.mark.parametrize("seed", range(3))
def test_latency_and_bandwidth_are_recovered_from_noise_and_interruptions(name: str, seed: int) -> None:
    # A larger CPU time of a message becomes latency on a ring. native hides a part of it behind other messages.
    link = dataclasses.replace(LINK, overhead=2 * OVERHEAD) if name == "ring" else LINK
    found = fitted(name, made_cells(name, link, seed, noise=0.03, interrupted=0.15))
    assert found.fit.parameters[BETA] == pytest.approx(link.beta, rel=0.02)
    assert found.link.alpha + found.link.overhead == pytest.approx(link.alpha + link.overhead, rel=0.05)
    assert found.errors.mean() < 0.02


@pytest.mark.parametrize("name", ["ring", "native"])
def test_without_noise_the_fit_is_the_truth(name: str) -> None:
    cells = made_cells(name, LINK, 0, noise=0.0, interrupted=0.0)
    found = fit_collective(name, cells, probes(LINK), Estimate.exact(LINK.gamma))
    assert found.fit.parameters[[ALPHA, BETA]] == pytest.approx([LINK.alpha, LINK.beta], rel=1e-3)
    assert np.abs(found.fit.held_out).max() < 0.01
    for cell in found.cells:
        assert found.predicted(cell).total == pytest.approx(cell.median, rel=0.005)


def test_intervals_hold_the_truth_and_the_value() -> None:
    inside = 0
    for seed in range(10):
        found = fitted("ring", made_cells("ring", LINK, seed, noise=0.05, interrupted=0.1)).fit
        assert np.all(found.low <= found.parameters)
        assert np.all(found.parameters <= found.high)
        inside += bool(found.low[BETA] <= LINK.beta <= found.high[BETA])
    assert inside >= 7  # of 10, at 90 % confidence


def test_sizes_that_are_all_noise_bend_nothing_and_are_not_promised() -> None:
    cells = made_cells("ring", LINK, 0, noise=0.02, interrupted=0.0)
    generator = np.random.default_rng(1)
    factors = {cell.nbytes: generator.uniform(2, 12, 30) if cell.nbytes <= 1 << 14 else 1.0 for cell in cells}
    noisy = [dataclasses.replace(cell, seconds=cell.seconds * factors[cell.nbytes]) for cell in cells]
    found = fitted("ring", noisy)
    assert found.fit.parameters[BETA] == pytest.approx(LINK.beta, rel=0.02)
    assert found.smallest_bytes == 1 << 16
    assert found.residual < 0.05
    assert fitted("ring", cells).smallest_bytes == 1 << 10


def test_a_cell_that_is_far_off_all_the_time_bends_little() -> None:
    """A burst that passes a switch unhindered at one size makes such a cell: its own times agree with each other."""
    cells = made_cells("ring", LINK, 0, noise=0.02, interrupted=0.0)
    cells[-1] = dataclasses.replace(cells[-1], seconds=cells[-1].seconds / 3)
    assert fitted("ring", cells).fit.parameters[BETA] == pytest.approx(LINK.beta, rel=0.02)


def test_what_no_parameter_says_is_a_correction() -> None:
    """Messages of some sizes are faster among three ranks, as they are if they fit into a socket's buffer."""
    cells = made_cells("ring", LINK, 0, noise=0.005, interrupted=0.0)
    fast = {(3, 1 << 18), (3, 1 << 20)}
    factors = [0.7 if (cell.world_size, cell.nbytes) in fast else 1.0 for cell in cells]
    found = fitted(
        "ring",
        [dataclasses.replace(cell, seconds=f * cell.seconds) for cell, f in zip(cells, factors, strict=True)],
    )
    for world_size, nbytes, expected in ((3, 1 << 18, 0.7), (3, 1 << 19, 0.7), (3, 1 << 24, 1.0), (2, 1 << 19, 1.0)):
        truth = expected * all_reduce_time("ring", LINK, nbytes / 4, world_size).total
        assert found.seconds(nbytes // 4, world_size) == pytest.approx(truth, rel=0.03)
    assert found.corrections.at(5, 1 << 19) is None
    # The stated error is that of an estimate from the neighbours alone.
    [inner, edge, calm] = [found.corrections.at(3, nbytes) for nbytes in (1 << 18, 1 << 22, 1 << 25)]
    assert inner is not None
    assert edge is not None
    assert calm is not None
    assert 0.1 < inner[1] < 0.3
    assert 0.1 < edge[1] < 0.3
    assert calm[1] < 0.03


def test_noise_is_no_correction() -> None:
    cells = made_cells("ring", LINK, 0, noise=0.02, interrupted=0.0)
    cells[0] = dataclasses.replace(cells[0], seconds=cells[0].seconds[:4] * np.array([0.95, 1.05, 1.2, 1.25]))
    found = fitted("ring", cells)
    off = [cell.median / found.predicted(cell).total - 1 for cell in found.cells]
    corrected = [factor - 1 for factor in found.corrections.factors]
    assert abs(off[0]) > 0.1
    for one, other in zip(corrected, off, strict=True):
        assert abs(one) <= abs(other)
    assert abs(corrected[0]) < 0.8 * abs(off[0])
    assert max(map(abs, corrected[1:])) < 0.03


def test_few_cells_are_not_held_out() -> None:
    """Half of four sizes, of two numbers of ranks, could not tell latency from bandwidth."""
    cells = made_cells("native", LINK, 0, noise=0.003, interrupted=0.0)
    few = [cell for cell in cells if cell.world_size == 2 and cell.nbytes in (1 << 10, 1 << 12, 1 << 20, 1 << 22)]
    found = fitted("native", few)
    measured = np.array([cell.median for cell in found.cells])
    assert found.fit.held_out == pytest.approx(found.fit.fitted / measured - 1)
    assert found.errors.max() < 0.05


def test_one_cell_that_repeats_tells_little() -> None:
    cells = made_cells("native", LINK, 0, noise=0.003, interrupted=0.0)
    few = [cell for cell in cells if cell.world_size == 2 and cell.nbytes in (1 << 10, 1 << 12, 1 << 20, 1 << 22)]
    rough = [0.5 + np.arange(len(cell.seconds)) for cell in few]
    found = fitted(
        "native", [dataclasses.replace(cell, seconds=seconds) for cell, seconds in zip(few, rough, strict=True)]
    )
    assert len(found.errors) == 1
    assert report.held_out(found).endswith("% off, which tells little: only one repeats (4096 KiB)")
    assert " off on average, " in report.held_out(fitted("native", cells))


@pytest.mark.parametrize(("slowdown", "said"), [(0.045, "4.5% slower"), (2.999, "299.9% slower")])
def test_a_slowdown_beyond_what_a_fit_can_find_is_no_figure(slowdown: float, said: str) -> None:
    assert report.slower(Estimate.exact(slowdown)) == said
    limit = report.slower(Estimate.exact(MOST_SLOWDOWN))
    assert limit == "at least 300% slower: computing and communicating share too few cores"


def test_every_cell_is_held_out_by_the_half_that_it_is_in() -> None:
    """The two halves contradict each other: each is predicted by the other's slope."""
    x = np.array([1.0, 2.0, 3.0, 4.0])
    folds = np.array([0, 1, 0, 1])
    samples = [np.full(5, value) for value in (1.0 + folds) * x]
    found = fit(lambda parameters: parameters[0] * x, np.array([1.5]), samples, folds=folds)
    assert found.held_out == pytest.approx([1.0, -0.5, 1.0, -0.5])


def test_a_prior_decides_what_the_data_leave_open() -> None:
    """The data determine only the sum of two parameters."""
    x = np.array([1.0, 2.0, 3.0, 4.0])

    def predict(parameters: Floats) -> Floats:
        total: Floats = parameters.sum() * x
        return total

    samples = [np.full(5, 3.0 * value) for value in x]
    known = (Prior(1, value=1.0, share=0.1),)
    found = fit(predict, np.array([1.0, 1.0]), samples, folds=(x < 3).astype(int), priors=known)
    assert found.parameters == pytest.approx([2.0, 1.0], rel=1e-3)


@given(st.integers(0, 2**32 - 1))
def test_non_negative_is_no_worse_than_any_other_choice(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows, targets = generator.standard_normal((8, 4)), generator.standard_normal(8)
    found = non_negative(rows, targets)
    assert np.all(found >= 0)
    least = np.sum((rows @ found - targets) ** 2)
    for other in np.abs(found + 0.1 * generator.standard_normal((50, 4))):
        assert least <= np.sum((rows @ other - targets) ** 2) + 1e-12


def test_the_spread_is_the_standard_deviation_and_ignores_a_few_that_are_far_off() -> None:
    times = 2 + 0.1 * np.random.default_rng(0).standard_normal(4001)
    assert spread(times) == pytest.approx(0.05, rel=0.05)
    times[:200] = 100
    assert spread(times) == pytest.approx(0.05, rel=0.15)


def test_ranges_hold_the_value_and_shrink_with_more_times() -> None:
    times = np.random.default_rng(0).exponential(size=400)
    few, many = (median_of(times[:count]) for count in (10, 400))
    assert few.low < few.value < few.high
    assert many.high - many.low < few.high - few.low


@pytest.mark.parametrize("sharing", [0.0, 0.3, 1.0])
def test_how_far_workers_share_a_servers_card_is_recovered(sharing: float) -> None:
    generator = np.random.default_rng(0)
    ring = fitted("ring", made_cells("ring", LINK, 0, noise=0.0, interrupted=0.0))
    truth = dataclasses.replace(ring.link, beta=1.1 * LINK.beta, sync=3e-4)
    cells = [
        Cell(
            all_reduce="ps-sync",
            world_size=p,
            nbytes=n,
            seconds=parameter_server_time(truth, n, p, sharing=sharing).total
            * np.exp(0.01 * generator.standard_normal(6)),
        )
        for p in (2, 3, 4)
        for n in (1 << 16, 1 << 18, 1 << 20, 1 << 22)
    ]
    found = fit_servers(cells, ring)
    assert found.fit.parameters[0] == pytest.approx(truth.beta, rel=0.03)
    assert sharing_of(found).value == pytest.approx(sharing, abs=0.05)
    assert sharing_of(found).low <= sharing_of(found).value <= sharing_of(found).high <= 1
    assert found.errors.mean() < 0.03
