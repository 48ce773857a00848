"""Top-k compared with exact sums, and with Deep Gradient Compression written from the paper in one process."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from _memory_transport import MemoryTransport, first_of_equals, integers, run_threads
from _ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipesgd import Pipelined
from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import codec_named
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates
from pipesgd.systems.exchanges.topk import SAMPLE, TopK, count_of, density_in, largest
from timing_model.schedules import gather_ring

pytestmark = pytest.mark.slow

Kept = dict[str, Any]


def exchanged(
    gradients: list[list[Tensor]], *, first: int = 0, states: list[Kept] | None = None, **options: Any
) -> tuple[list[Tensor], list[Kept]]:
    """Return the sum of each iteration, and every rank's state at the end, for flat ``gradients[iteration][rank]``."""
    world_size = len(gradients[0])

    def run(transport: MemoryTransport) -> tuple[list[Tensor], Kept]:
        schedule = gather_ring(transport.rank, world_size)
        all_gather = ScheduledAllReduce(transport, schedule, Uncompressed(), segment_bytes=64)
        reducer = TopK(**options).sums(all_gather, rank=transport.rank, world_size=world_size)
        if states is not None:
            reducer.load_state_dict(states[transport.rank])
        sums = []
        for iteration, of_ranks in enumerate(gradients, first):
            own = of_ranks[transport.rank]
            buffer = FlatBuffer([own])
            buffer.fill_from([own])
            before, announced = transport.bytes_sent, reducer.wire_bytes(buffer, iteration)
            reducer.sum(buffer, iteration)
            assert transport.bytes_sent - before == announced == reducer.wire_bytes(buffer, iteration)
            sums.append(buffer.flats[0])
        return sums, reducer.state_dict()

    return first_of_equals(run_threads(world_size, run)[0])


def noise(numel: int, iterations: int, world_size: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(numel)
    return [[torch.randn(numel, generator=generator).to(dtype) for _ in range(world_size)] for _ in range(iterations)]


# --- Values that are chosen -------------------------------------------------------------------------------------------


def test_the_density_falls_by_a_factor_each_iteration_and_stays() -> None:
    densities = [density_in(iteration, 0.001, 40) for iteration in range(60)]
    assert densities[0] == 0.25
    assert densities[40:] == [0.001] * 20
    factors = [later / earlier for earlier, later in itertools.pairwise(densities[:41])]
    assert factors == pytest.approx([(0.001 / 0.25) ** (1 / 40)] * 40)
    assert density_in(0, 0.001, 0) == 0.001
    assert [density_in(iteration, 0.5, 3) for iteration in range(5)] == [0.5] * 5, "nothing to come down from"


@pytest.mark.parametrize(
    ("numel", "density", "count"), [(0, 0.5, 0), (1, 0.001, 1), (1000, 0.0155, 16), (10, 1.0, 10), (3, 0.5, 2)]
)
def test_how_many_are_sent(numel: int, density: float, count: int) -> None:
    assert count_of(numel, density) == count


def test_more_values_than_an_index_can_name_are_refused() -> None:
    TopK().check([torch.empty(2**30, device="meta"), torch.empty(2**30 - 1, device="meta")])
    with pytest.raises(
        UserInputError, match=r"parameters must be at most 2\*\*31 - 1 with --codec topk; got 2147483648"
    ):
        TopK().check([torch.empty(2**30, dtype=torch.complex64, device="meta")])


LARGE = 5 * SAMPLE + 3
SHAPES = {
    "noise": lambda numel: torch.randn(numel, generator=torch.Generator().manual_seed(0)),
    "heavy tails": lambda numel: torch.randn(numel, generator=torch.Generator().manual_seed(0)) ** 5,
    "zeros": torch.zeros,
    "few that are not zero": lambda numel: (torch.arange(numel) % 4001 == 0).float(),
    "rising": lambda numel: torch.arange(float(numel)),
    "large where the sample does not look": lambda numel: (torch.arange(numel) % 5 == 1).float(),
    "large where the sample looks": lambda numel: (torch.arange(numel) % 5 == 0).float(),
    "NaN": lambda numel: torch.where(torch.arange(numel) % 7 == 3, torch.nan, 1.0),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("numel", [1, 1000, LARGE])
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.3, 1.0])
def test_the_largest_are_exact_in_value_and_number(shape: str, numel: int, density: float) -> None:
    magnitudes = SHAPES[shape](numel).abs()
    count = count_of(numel, density)
    chosen = largest(magnitudes, count)
    assert len(torch.unique(chosen)) == count
    expected = magnitudes.nan_to_num(nan=torch.inf).sort(descending=True).values[:count]
    assert torch.equal(magnitudes[chosen].nan_to_num(nan=torch.inf).sort(descending=True).values, expected)


def test_what_is_not_finite_is_chosen_first() -> None:
    magnitudes = torch.ones(LARGE)
    for place in (12_345, 12_346):  # one place that the sample includes, and one that it does not
        magnitudes[place] = torch.nan
        magnitudes[54_321] = torch.inf
        assert largest(magnitudes, 1).tolist() == [place]
        assert sorted(largest(magnitudes, 2).tolist()) == [place, 54_321]
        magnitudes[place] = 1.0


# --- Sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@settings(max_examples=25)
@given(numel=st.integers(0, 300), world_size=st.integers(1, 6))
def test_with_density_1_it_is_the_exact_sum(dtype: torch.dtype, numel: int, world_size: int) -> None:
    gradients = [[integers(numel, rank + iteration, dtype) for rank in range(world_size)] for iteration in range(2)]
    sums, states = exchanged(gradients, density=1.0)
    for total, of_ranks in zip(sums, gradients, strict=True):
        assert total.dtype == dtype
        assert torch.equal(total, torch.stack(of_ranks).sum(0))
    assert not any(state["residuals"][0].any() for state in states)


@pytest.mark.parametrize("warmup", [0, 4])
@settings(max_examples=25)
@given(numel=st.integers(1, 300), world_size=st.integers(1, 6), density=st.sampled_from([0.001, 0.02, 0.1, 0.6]))
def test_what_has_arrived_and_what_is_kept_is_what_was_put_in(
    warmup: int, numel: int, world_size: int, density: float
) -> None:
    """The values are integers, so that sums are exact."""
    gradients = [[integers(numel, rank + iteration) for rank in range(world_size)] for iteration in range(6)]
    sums, states = exchanged(gradients, density=density, density_warmup=warmup)
    kept = torch.stack([state["residuals"][0] for state in states]).sum(0)
    assert torch.equal(torch.stack(sums).sum(0) + kept, torch.stack([g for row in gradients for g in row]).sum(0))
    for iteration, total in enumerate(sums):
        most = world_size * count_of(numel, density_in(iteration, density, warmup))
        assert int(total.count_nonzero()) <= most


def deep_gradient_compression(gradients: list[list[Tensor]], density: float, momentum: float) -> list[Tensor]:
    """Compute Lin et al., equations 4 and 6 to 8, value by value; return the sparse sum of every iteration."""
    world_size, numel = len(gradients[0]), len(gradients[0][0])
    u, v = [[[0.0] * numel for _ in range(world_size)] for _ in range(2)]
    sums = []
    for of_ranks in gradients:
        total = [0.0] * numel
        for rank, gradient in enumerate(of_ranks):
            u[rank] = [momentum * a + b for a, b in zip(u[rank], gradient.tolist(), strict=True)]
            v[rank] = [a + b for a, b in zip(v[rank], u[rank], strict=True)]
            order = sorted(range(numel), key=lambda index, kept=v[rank]: -abs(kept[index]))
            for index in order[: max(1, round(density * numel))]:
                total[index] += v[rank][index]
                u[rank][index] = v[rank][index] = 0.0
        sums.append(torch.tensor(total))
    return sums


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_it_is_deep_gradient_compression(momentum: float) -> None:
    """The reference is in float64: 12 iterations of float32 differ by rounding, of values up to about 10."""
    gradients = noise(200, 12, 3)
    sums, _ = exchanged(gradients, density=0.05, momentum_correction=momentum)
    for ours, reference in zip(sums, deep_gradient_compression(gradients, 0.05, momentum), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("how_many", [1, 50])
def test_what_is_not_finite_arrives_once_and_does_not_stay(momentum: float, bad: float, how_many: int) -> None:
    gradients = noise(100, 3, 3)
    gradients[1][2][:how_many] = bad
    sums, states = exchanged(gradients, density=0.05, momentum_correction=momentum)
    assert [bool(total.isfinite().all()) for total in sums] == [True, False, True]
    for state in states:
        assert all(kept.isfinite().all() for kept in state["residuals"] + state["velocities"])


def test_a_state_continues_bit_for_bit_also_in_a_warm_up() -> None:
    gradients = noise(100, 8, 2)
    options: dict[str, Any] = {"density": 0.02, "density_warmup": 6, "momentum_correction": 0.9}
    whole, _ = exchanged(gradients, **options)
    _, states = exchanged(gradients[:3], **options)
    before = copy.deepcopy(states)
    for _ in range(2):
        rest, _ = exchanged(gradients[3:], first=3, states=states, **options)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rest, whole[3:], strict=True))
        for state, unchanged in zip(states, before, strict=True):
            assert all(torch.equal(state[name][0], unchanged[name][0]) for name in ("residuals", "velocities"))


def test_the_state_of_one_that_has_summed_nothing_is_that_of_the_start() -> None:
    def run(transport: MemoryTransport) -> list[Tensor]:
        all_gather = ScheduledAllReduce(transport, gather_ring(transport.rank, 1), Uncompressed())
        reducer = TopK(0.1, momentum_correction=0.5).sums(all_gather, rank=0, world_size=1)
        start, sums = reducer.state_dict(), []
        for _ in range(2):
            buffer = FlatBuffer([torch.empty(100)])
            buffer.fill_from(noise(100, 1, 1)[0])
            reducer.sum(buffer, 0)
            sums.append(buffer.flats[0])
            reducer.load_state_dict(start)
        return sums

    (sums,), _ = run_threads(1, run)
    assert torch.equal(*sums)


# --- In a pipeline ----------------------------------------------------------------------------------------------------

OPTIONS = codec_named("topk", density=0.05, density_warmup=5, momentum_correction=0.9)


def _in_a_pipeline(ranks: Ranks) -> tuple[list[str], str, list[int]]:
    """Return hashes of the weights after every iteration, the last of a run resumed in the middle, and bytes sent."""

    def build() -> tuple[nn.Module, Pipelined]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, Pipelined(
            model, optimizer, width=2, codec=OPTIONS, ranks=ranks, updates=Updates(prediction="none")
        )

    def run(model: nn.Module, pipeline: Pipelined, first: int, last: int) -> tuple[list[str], list[int]]:
        hashes, sent = [], []
        for iteration in range(first, last):
            generator = torch.Generator().manual_seed(100 * iteration + ranks.rank)
            model(torch.randn(3, 20, generator=generator)).square().sum().backward()
            sent.append(pipeline.step().wire_bytes)
            hashes.append(weights_sha256(model))
        return hashes, sent

    model, pipeline = build()
    hashes, sent = run(model, pipeline, 0, 4)
    weights, state = {name: value.clone() for name, value in model.state_dict().items()}, pipeline.state_dict()
    later = run(model, pipeline, 4, 10)
    pipeline.flush()
    hashes += [*later[0], weights_sha256(model)]

    other, resumed = build()
    run(other, resumed, 0, 2)  # something else is in flight when the state is loaded
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    run(other, resumed, 4, 10)
    resumed.flush()
    for one in (pipeline, resumed):
        one.close()
    return hashes, weights_sha256(other), sent + later[1]


def test_in_a_pipeline_replicas_are_identical_and_a_resumed_run_is_the_uninterrupted_one() -> None:
    results = run_ranks(3, _in_a_pipeline)
    assert results[0] == results[1] == results[2]
    hashes, resumed, sent = results[0]
    assert len(set(hashes)) == 11, "every iteration but the first one changes them, and so does the flush"
    assert resumed == hashes[-1]
    numel = 20 * 30 + 30 + 30 * 2 + 2
    assert sent == [2 * 8 * count_of(numel, density_in(iteration, 0.05, 5)) for iteration in range(10)]
