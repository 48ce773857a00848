"""The summary of the ranks' computation, from times that are known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from _ranks import run_ranks
from torch import Tensor, nn

from experiments.accelerators import Accelerator, Jitter
from pipesgd.calibration import training
from pipesgd.calibration.computation import PARTS, Computation, summarize
from pipesgd.calibration.training import (
    BACKWARD,
    COMMUNICATION,
    CPU,
    DATA,
    FORWARD,
    LEAST_ITERATIONS,
    LOADING,
    LOCAL_UPDATE,
    UPDATE,
    WAIT,
    Laps,
    Training,
    brief_training_modes,
    training_modes,
)
from pipesgd.cli import parse
from pipesgd.ranks import Ranks
from pipesgd.run import forward_backward
from pipesgd.run.workload import load
from timing_model.measured import MOST_PERSISTENCE, Estimate
from timing_model.params import ComputeTimes, Noise

MEANS = (1.0, 2.0, 0.5, 0.75, 0.0, 0.0, 0.375)
"""Means of ``PARTS``, in seconds."""


def laps(
    scale: float = 1.0,
    *,
    seed: int = 0,
    cv: float = 0.0,
    count: int = 8,
    drift: Callable[[int], float] = lambda lap: 1.0,
    t_comm: float = 0.0,
    compute_slowdown: float = 0.0,
    late_handover: float = 0.0,
    processor_share: float = 1.0,
    waiting: float = 0.0,
    loading: float = 0.0,
) -> list[Laps]:
    """Return a rank's laps at widths 1 and 2: ``MEANS`` times ``scale`` and drift, with a ``t_comm`` s all-reduce.

    A batch takes ``loading`` s, of which the rank waits for ``waiting``.
    """
    generator = np.random.default_rng(seed)
    found: list[Laps] = []
    for width in (1, 2):
        forward, backward, update, late_update, *_ = (scale * mean for mean in MEANS)
        forward += waiting
        own = update if width == 1 else late_update
        times = ComputeTimes(
            forward=forward,
            backward=backward,
            update=own,
            compute_slowdown=compute_slowdown,
            processor_share=processor_share,
            handover=late_handover if width == 2 else 0.0,
        )
        computed, communicated = times.at_width(width, t_comm)
        total = computed + t_comm if width == 1 else max(computed, communicated)
        slower = (computed - own) / (forward + backward)
        found.append([])
        for lap in range(count):
            noise = drift(lap) * np.exp(cv * generator.standard_normal(10))
            times_of_lap = np.empty((10, 9))
            for column, seconds in (
                (FORWARD, slower * forward),
                (BACKWARD, slower * backward),
                (UPDATE, own),
                (WAIT, total - computed),
                (COMMUNICATION, communicated),
                (CPU, processor_share * sum(MEANS[:2])),
                (DATA, waiting),
                (LOADING, loading),
                (LOCAL_UPDATE, 0.75 * own),
            ):
                times_of_lap[:, column] = seconds * noise
            found[-1].append(times_of_lap.tolist())
    return found


def summary(ranks: list[list[Laps]], **options: Any) -> Computation:
    """Summarize ranks that wait only for the all-reduce, which takes no time unless ``options`` say otherwise."""
    defaults: dict[str, Any] = {
        "modes": training_modes(["ring"], []),
        "t_comms": [np.inf, 0.0],  # no handover
        "late_iteration": WithoutWaiting,
    }
    return summarize(ranks, **defaults | options)


@dataclass
class WithoutWaiting:
    """A model of late iterations in which the longer part takes the whole iteration."""

    world_size: int
    noise: Noise

    def all_reduce(self, total: float, computation: float) -> float:
        return total


def of(scales: list[float], **options: Any) -> Computation:
    return summary([laps(scale, seed=seed, **options) for seed, scale in enumerate(scales)])


def test_means_are_those_of_the_ranks_that_are_not_slow_and_their_difference_is_found() -> None:
    found = of([0.95, 1.05, 3.0], cv=0.05)
    assert [found.parts[name].value for name in PARTS] == pytest.approx(MEANS, rel=0.03)
    assert found.cv == pytest.approx(0.05, rel=0.15)
    assert found.compute_slowdown == Estimate.exact(0.0)
    assert found.late_handovers == {"ring": Estimate.exact(0.0)}


@pytest.mark.parametrize("waiting", [0.6, 0.1])
def test_the_wait_for_a_batch_is_not_computation_and_its_loading_is_known(waiting: float) -> None:
    found = of([1.0, 1.0], waiting=waiting, loading=0.6)
    assert found.parts["forward"].value == pytest.approx(1.0)
    assert found.parts["loading"].value == pytest.approx(0.6)


def test_a_rank_that_is_always_slow_is_found_by_its_factor() -> None:
    assert of([1.0, 1.0, 1.3, 1.0], cv=0.02).slow_ranks == {2: pytest.approx(1.3, rel=0.03)}
    assert of([1.0, 1.05, 1.0, 1.0], cv=0.02).slow_ranks == {}
    assert of([1.0]).slow_ranks == {}


@pytest.mark.parametrize("scales", [[1.0, 1.2], [1.0, 1.5], [1.0, 1.0, 1.5, 1.5]])
def test_where_half_of_the_ranks_are_slow_the_others_are_the_measure(scales: list[float]) -> None:
    found = of(scales, cv=0.02)
    assert found.slow_ranks == {rank: pytest.approx(scale, rel=0.03) for rank, scale in enumerate(scales) if scale > 1}
    assert [found.parts[name].value for name in PARTS] == pytest.approx(MEANS, rel=0.03)


def test_ranks_that_share_cores_are_compared_by_what_they_compute() -> None:
    ranks = [laps(scale, seed=seed, cv=0.02) for seed, scale in enumerate((1.0, 1.6, 1.0))]
    assert summary(ranks, ranks_per_core=2.0).slow_ranks == {}
    for iteration in (one for lap in ranks[2][0] for one in lap):
        iteration[CPU] *= 2
    assert summary(ranks, ranks_per_core=2.0).slow_ranks == {2: pytest.approx(2.0, rel=0.03)}


def test_a_slow_accelerator_is_slow_although_there_are_more_ranks_than_cores() -> None:
    ranks = [laps(scale, processor_share=0.1) for scale in (1.0, 1.3, 1.0)]
    assert summary(ranks, ranks_per_core=1.5).slow_ranks == {1: pytest.approx(1.3)}


def test_the_update_of_a_slow_rank_says_nothing_about_its_passes() -> None:
    ranks = [laps(scale) for scale in (1.0, 1.3, 1.0)]
    for iteration in (one for of_width in ranks[1] for lap in of_width for one in lap):
        iteration[UPDATE] /= 1.3
    assert summary(ranks).slow_ranks == {1: pytest.approx(1.3)}


def test_a_rank_that_was_slow_for_a_while_is_not_always_slow() -> None:
    ranks = [laps(), laps(drift=lambda lap: 3.0 if lap < 5 else 1.0), laps()]
    assert summary(ranks).slow_ranks == {}


def test_an_interrupted_iteration_does_not_count() -> None:
    ranks = [laps(seed=seed, cv=0.02) for seed in range(3)]
    ranks[1][0][4][7][FORWARD] = 100.0
    found = summary(ranks)
    assert found.parts["forward"].value == pytest.approx(1.0, rel=0.02)
    assert found.cv < 0.03


def test_half_of_a_lap_counts_even_if_every_iteration_was_interrupted_on_some_rank() -> None:
    ranks = [laps(seed=seed, cv=0.02) for seed in range(5)]
    for of_way in range(len(ranks[0])):
        for lap in range(len(ranks[0][of_way])):
            for number in range(len(ranks[0][of_way][lap])):
                ranks[number % 5][of_way][lap][number][FORWARD] = 50.0
    found = summary(ranks)
    assert all(np.isfinite(found.parts[name].value) for name in PARTS)


def test_what_slows_all_ranks_down_together_makes_none_wait() -> None:
    found = of([1.0, 1.0, 1.0], cv=0.02, drift=lambda lap: 1 + 0.2 * (lap % 2))
    assert found.cv == pytest.approx(0.02, rel=0.2)
    assert of([1.0], drift=lambda lap: 1 + 0.2 * (lap % 2)).cv == pytest.approx(0.1 / 1.1, rel=0.01)


def jittered(accelerator: Accelerator, *, seed: int, ranks: int = 4, between: int = 30, count: int = 20) -> list[Any]:
    """Return laps whose iterations take as long as those of emulated accelerators, with ``between`` others between
    them, in which the ranks do other things."""
    everybody = []
    for rank in range(ranks):
        jitter = Jitter(accelerator, seed=seed, rank=rank)
        own = laps(count=count)
        for lap in own[0]:
            for number, iteration in enumerate(lap):
                factor = jitter.next()
                lap[number] = [factor * seconds for seconds in iteration]
            for _ in range(between):
                jitter.next()
        everybody.append(own)
    return everybody


@pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
def test_the_persistence_of_an_accelerators_jitter_is_found(persistence: float) -> None:
    """20 laps of 10 iterations: their own means would make 0.9 look like 0.68."""
    accelerator = Accelerator(seconds=1.0, synthetic=True, jitter=0.1, persistence=persistence)
    found = [summary(jittered(accelerator, seed=seed)) for seed in range(12)]
    assert np.mean([one.cv for one in found]) == pytest.approx(0.1, rel=0.05)
    values = [one.persistence.value for one in found]
    assert np.mean(values) == pytest.approx(persistence, abs=0.02)
    assert np.std(values) < 0.07
    inside = [one.persistence.low <= persistence <= one.persistence.high for one in found]
    assert np.mean(inside) >= 0.75
    assert all(0 < one.persistence.high <= MOST_PERSISTENCE for one in found)


def test_a_short_calibration_is_less_sure_of_the_persistence() -> None:
    """Two ranks and 40 iterations: the value found is too low by a tenth on average, and the interval says so."""
    accelerator = Accelerator(seconds=1.0, synthetic=True, jitter=0.1, persistence=0.8)
    found = [summary(jittered(accelerator, seed=seed, ranks=2, count=4)).persistence for seed in range(30)]
    assert np.mean([one.value for one in found]) == pytest.approx(0.8, abs=0.1)
    assert np.mean([one.high - one.low for one in found]) > 0.2
    assert np.mean([one.low <= 0.8 <= one.high for one in found]) >= 0.75


def test_what_ranks_have_in_common_does_not_persist() -> None:
    """All ranks are slow in every second lap; what each has of its own is drawn again."""
    found = of([1.0, 1.0, 1.0], cv=0.02, count=20, drift=lambda lap: 1 + 0.2 * (lap % 2))
    assert found.persistence.value < 0.15
    assert of([1.0, 1.0], count=4).persistence == Estimate.exact(0.0)


def test_the_spread_of_the_all_reduce_is_that_within_laps_by_the_rank_that_waited_for_no_other() -> None:
    """Laps drift, one all-reduce is interrupted, and the others wait for rank 1, whose times are the all-reduce's."""
    generator = np.random.default_rng(2)
    ranks = [laps(t_comm=2.0, count=40, drift=lambda lap: 1 + 0.2 * (lap % 2)) for _ in range(3)]
    for lap in range(40):
        for number in range(10):
            factor = float(np.exp(0.1 * generator.standard_normal()))
            if (lap, number) == (3, 4):
                factor = 50.0
            for rank, waited in ((0, 2.0), (1, 0.0), (2, 6.0)):
                iteration = ranks[rank][0][lap][number]
                iteration[COMMUNICATION] = factor * iteration[COMMUNICATION] + waited * generator.random()
    found = summary(ranks, t_comms=[np.inf, 2.0])
    assert found.comm_cv.value == pytest.approx(0.1, rel=0.1)
    assert found.comm_cv.low < 0.1 < found.comm_cv.high < 0.13
    assert found.cv == pytest.approx(0.0, abs=1e-9)
    assert found.persistence == Estimate.exact(0.0)
    assert of([1.0, 1.0]).comm_cv == Estimate.exact(0.0), "an all-reduce that takes no time"


@pytest.mark.parametrize("t_comm", [2.0, 3.0, 8.0])
@pytest.mark.parametrize(("compute_slowdown", "late_handover"), [(0.0, 0.0), (0.4, 0.0), (0.3, 0.2)])
def test_what_each_loses_beside_the_other_is_found(
    t_comm: float, compute_slowdown: float, late_handover: float
) -> None:
    """The timing model's formula is inverted, whether the network or the computation is slower."""
    ranks = [laps(t_comm=t_comm, compute_slowdown=compute_slowdown, late_handover=late_handover)] * 2
    found = summary(ranks, t_comms=[np.inf, t_comm])
    assert found.compute_slowdown.value == pytest.approx(compute_slowdown, abs=1e-6)
    assert found.late_handovers["ring"].value == pytest.approx(late_handover, abs=1e-6)
    assert [found.parts[name].value for name in PARTS] == pytest.approx(MEANS)
    assert found.processor_share == pytest.approx(1.0)


def test_only_the_time_on_the_processor_is_slower() -> None:
    """The computation is the limit, and waits for an accelerator in nine tenths of its passes."""
    found = summary(
        [laps(t_comm=2.0, compute_slowdown=0.6, processor_share=0.1)] * 2,
        t_comms=[np.inf, 2.0],
    )
    assert found.processor_share == pytest.approx(0.1)
    assert found.compute_slowdown.value == pytest.approx(0.6)


def test_every_all_reduce_has_its_own_handover_and_all_say_how_slow_the_computation_is() -> None:
    ring, other = (
        laps(t_comm=8.0, compute_slowdown=0.3, late_handover=0.8),
        laps(t_comm=9.0, compute_slowdown=0.5, late_handover=2.0),
    )
    ways = training_modes(["ring", "native"], [])
    found = summary([[*ring, other[1]]] * 2, modes=ways, t_comms=[np.inf, 8.0, 9.0])
    assert {name: one.value for name, one in found.late_handovers.items()} == pytest.approx(
        {"ring": 0.8, "native": 2.0}
    )
    assert found.compute_slowdown.value == found.codec_compute_slowdown.value == pytest.approx(0.4)


def test_beside_a_codec_the_computation_is_slower() -> None:
    plain, packed = laps(t_comm=8.0, compute_slowdown=0.3), laps(t_comm=3.0, compute_slowdown=0.9)
    ways = training_modes(["ring"], ["int8"])
    found = summary([[*plain, packed[1]]] * 2, modes=ways, t_comms=[np.inf, 8.0, 3.0])
    assert found.compute_slowdown.value == pytest.approx(0.3)
    assert found.codec_compute_slowdown.value == pytest.approx(0.9)
    assert [found.parts[name].value for name in PARTS] == pytest.approx(MEANS)
    assert list(found.late_handovers) == ["ring"]


def test_a_rings_handover_is_the_mean_over_codecs() -> None:
    plain, packed = laps(t_comm=8.0, late_handover=0.4), laps(t_comm=6.0, late_handover=0.8)
    ways = training_modes(["ring"], ["int8"])
    found = summary([[*plain, packed[1]]] * 2, modes=ways, t_comms=[np.inf, 8.0, 6.0])
    assert found.late_handovers["ring"].value == pytest.approx(0.6)


def test_updates_count_where_no_rank_waits_for_the_all_reduce() -> None:
    """Ranks that wait for it begin their updates all at once."""
    plain, packed = laps(t_comm=8.0), laps(t_comm=2.0)
    for lap in plain[1]:
        for iteration in lap:
            iteration[UPDATE] *= 2
            iteration[WAIT] -= MEANS[3]
    ways = training_modes(["ring"], ["int8"])
    found = summary([[*plain, packed[1]]] * 2, modes=ways, t_comms=[np.inf, 8.0, 2.0])
    assert found.parts["late_update"].value == pytest.approx(MEANS[3])
    found = summary([plain] * 2, t_comms=[np.inf, 8.0])
    assert found.parts["late_update"].value == pytest.approx(2 * MEANS[3])


def test_with_a_codec_alone_both_slowdowns_are_its_own() -> None:
    ways = brief_training_modes("ring", {"fp32": 32.0, "int4": 4.0}, t_comm=80.0, t_compute=1.0)
    ranks = [laps(t_comm=8.0, compute_slowdown=0.3, late_handover=0.5)] * 2
    found = summary(ranks, modes=ways, t_comms=[np.inf, 8.0])
    assert found.compute_slowdown.value == found.codec_compute_slowdown.value == pytest.approx(0.3)
    assert {name: one.value for name, one in found.late_handovers.items()} == pytest.approx({"ring": 0.5})


def test_ranks_that_wait_for_a_compressed_all_reduce_do_not_say_how_slow_the_computation_is() -> None:
    """It takes longer than was predicted, so iterations do, too; but not because of the computation."""
    plain, packed = laps(t_comm=8.0, compute_slowdown=0.3), laps(t_comm=7.0, compute_slowdown=0.3)
    ways = training_modes(["ring"], ["int8"])
    found = summary([[*plain, packed[1]]] * 2, modes=ways, t_comms=[np.inf, 8.0, 6.0])
    assert found.codec_compute_slowdown.value == pytest.approx(0.3)


def test_ranks_waiting_for_each_other_are_no_handover() -> None:
    """The model says that the all-reduce takes 8 s of iterations of 10.4 s: as long as without computation."""
    asked = []

    class Waiting(WithoutWaiting):
        def all_reduce(self, total: float, computation: float) -> float:
            asked.append((total, computation, self))
            return 8.0

    ranks = [laps(t_comm=8.0, late_handover=2.4)] * 2
    assert summary(ranks, t_comms=[np.inf, 8.0]).late_handovers["ring"].value == pytest.approx(2.4)
    found = summary(ranks, t_comms=[np.inf, 8.0], late_iteration=Waiting)
    assert found.late_handovers["ring"] == Estimate.exact(0.0)
    assert asked[0][:2] == pytest.approx((10.4, 3.75))
    assert asked[0][2] == Waiting(world_size=2, noise=Noise())


def test_an_all_reduce_that_explains_nothing_is_not_hindered() -> None:
    class ComputationAlone(WithoutWaiting):
        def all_reduce(self, total: float, computation: float) -> float:
            return 0.0

    found = summary([laps(t_comm=8.0)] * 2, t_comms=[np.inf, 0.0], late_iteration=ComputationAlone)
    assert found.late_handovers["ring"] == Estimate.exact(0.0)


def test_nothing_is_gained_beside_the_other_and_a_short_all_reduce_says_little() -> None:
    faster = laps(t_comm=8.0)
    for lap in faster[1]:
        for iteration in lap:
            iteration[FORWARD] *= 0.9
    found = summary([faster] * 2, t_comms=[np.inf, 9.0])
    assert found.compute_slowdown.value == found.late_handovers["ring"].value == 0.0
    short = laps(t_comm=1e-6)
    for lap in short[1]:
        for iteration in lap:
            iteration[FORWARD] += 0.03  # of 3 s: noise
    assert summary([short] * 2, t_comms=[np.inf, 1e-6]).compute_slowdown.value == pytest.approx(0.05, rel=0.1)


def test_an_interval_is_where_another_calibration_would_be() -> None:
    generator = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        drifts, other = np.exp(0.1 * generator.standard_normal((2, 8)))
        found = of([1.0], drift=lambda lap, drifts=drifts: float(drifts[lap])).parts["forward"]
        inside += found.low <= other.mean() <= found.high
    assert 170 <= inside <= 190


def test_what_a_collective_takes_longer_in_training_is_its_handover() -> None:
    """The rank that waits least counts: the others wait for it, too."""
    ranks = [laps(t_comm=3.0), laps(t_comm=4.0)]
    found = summary(ranks, t_comms=[2.5, 2.5])
    assert found.parts["handover"].value == pytest.approx(0.5)
    assert summary([laps(t_comm=3.0)] * 2, t_comms=[9.0, 2.5]).parts["handover"].value == 0


def test_waiting_for_a_slow_rank_is_no_handover() -> None:
    """Rank 2 takes twice as long as the others, which wait for it, and then for the all-reduce as it does."""
    ranks = [laps(t_comm=3.0), laps(t_comm=3.0), laps(2.0, t_comm=3.0)]
    for rank in (0, 1):
        for lap in ranks[rank][0]:
            for iteration in lap:
                iteration[WAIT] += sum(MEANS[:3])
    found = summary(ranks, t_comms=[2.5, 2.5])
    assert found.slow_ranks == {2: pytest.approx(2.0)}
    assert found.parts["forward"].value == pytest.approx(MEANS[0])
    assert found.parts["handover"].value == pytest.approx(0.5)


def test_few_laps_are_cut_in_halves_for_their_intervals() -> None:
    """The error of two laps would have one degree of freedom, and an interval six standard errors wide."""
    wide = of([1.0, 1.0], cv=0.05, count=2).parts["forward"]
    narrow = of([1.0, 1.0], cv=0.05, count=8).parts["forward"]
    assert narrow.high - narrow.low < wide.high - wide.low < 6 * (narrow.high - narrow.low)


def _training(ranks: Ranks) -> Training:
    config = parse(["--dataset", "digits", "--hidden-sizes", "8", "--batch-size", "4"])
    _, batches, model, _ = load(config, ranks)
    modes = brief_training_modes("ring", {"fp32": 32.0, "int4": 4.0}, t_comm=1.0, t_compute=1.0)
    return Training(config, model, batches, "eager", modes, ranks)


def _lap(ranks: Ranks, seconds: float) -> tuple[list[bool], list[int], list[int], float]:
    """Return if each of four laps trained, the numbers of laps, those of their iterations, and the pace."""
    with _training(ranks) as training:
        pace = training.pace()
        done = [training.lap(seconds) for _ in range(4)]
    return done, [len(one) for one in training.laps], [len(lap) for one in training.laps for lap in one], pace


@pytest.mark.slow
def test_training_goes_on_after_two_laps_only_once_there_is_time_for_it() -> None:
    for done, laps_of_ways, iterations, pace in run_ranks(2, _lap, 0.0):
        assert done == [True, True, False, False]
        assert laps_of_ways == [2, 2]
        assert iterations == [LEAST_ITERATIONS] * 4
        assert pace > 0
    for done, laps_of_ways, iterations, _ in run_ranks(2, _lap, 10.0):
        assert done == [True] * 4
        assert laps_of_ways == [4, 4]
        assert min(iterations[1:4]) > LEAST_ITERATIONS


class _Clock:
    """A clock that gradients move; it stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def pass_by(self, seconds: float, gradient: Tensor) -> None:
        self.now += seconds


class _Timed(nn.Module):
    """Two layers whose weights' gradients take 1 s, the last layer's, and 3 s on a clock."""

    def __init__(self, clock: _Clock):
        super().__init__()
        self.first, self.last = nn.Linear(64, 8, bias=False), nn.Linear(8, 10, bias=False)
        self._clock = clock
        self.first.weight.register_hook(partial(clock.pass_by, 3.0))
        self.last.weight.register_hook(partial(clock.pass_by, 1.0))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Timed:
        return _Timed(self._clock)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(inputs.flatten(1)))
        return outputs


def _released(ranks: Ranks, micro_batches: int) -> tuple[int, list[float]]:
    """Return the iterations of the first way, and the shares after which its gradients were complete."""
    config = parse(f"--dataset digits --batch-size 4 --accumulation {micro_batches}".split())
    _, batches, _, _ = load(config, ranks)
    clock = _Clock()
    training.time = forward_backward.time = clock  # in a process of its own, which ends with this
    modes = brief_training_modes("ring", {"fp32": 32.0, "int4": 4.0}, t_comm=1.0, t_compute=1.0)
    with Training(config, _Timed(clock), batches, "eager", modes, ranks) as trained:
        trained.lap(0.0)
        return len(trained.laps[0][0]), trained.released()


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_complete_after_shares_of_the_last_micro_batch(micro_batches: int) -> None:
    for iterations, shares in run_ranks(2, _released, micro_batches):
        assert iterations == LEAST_ITERATIONS
        assert shares == [1.0, 0.25]


def _fail(ranks: Ranks) -> None:
    """Fail on rank 0; the other rank waits within its training until rank 0 has left its own."""
    with contextlib.suppress(KeyError), _training(ranks) as training:
        training.pace()
        if ranks.rank == 1:
            ranks.all_gather_object("rank 0 has left", None)
        raise KeyError("the measurement failed")
    if ranks.rank == 0:
        ranks.all_gather_object("rank 0 has left", None)


@pytest.mark.slow
def test_a_rank_that_fails_leaves_its_training_without_the_others() -> None:
    run_ranks(2, _fail)
