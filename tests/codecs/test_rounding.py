"""Random rounding, and error feedback: means over many draws, and over many iterations."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from _codec_cases import encoded, made, through
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipesgd.codecs.base import Codec, mixed
from pipesgd.codecs.options import Bf16, Fp16, Int4, Int8
from pipesgd.systems.codecs.qsgd import Qsgd
from pipesgd.systems.codecs.sign import Sign
from pipesgd.systems.codecs.ternary import Ternary
from pipesgd.systems.codecs.truncate16 import Truncate16

ROUNDED = [partial(made, kind) for kind in (Int8, Int4, Ternary, Qsgd)]
ROUNDED += [partial(made, Qsgd, levels=levels) for levels in (1, 127)]


def uniform(numel: int) -> Tensor:
    """Return values in (-1, 1), and one that is 1: Ternary clips none of them."""
    values = torch.rand(numel, generator=torch.Generator().manual_seed(3)) * 2 - 1
    values[numel // 2] = 1.0
    return values


def scale_of(codec: Codec, values: Tensor) -> float:
    return float(encoded(codec, values)[:4].view(torch.float32))


# --- Random rounding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ROUNDED)
def test_the_mean_over_many_draws_is_the_value(make: Any) -> None:
    """The tolerance is six standard deviations (each at most half a scale) and the resolution of the random numbers."""
    draws, values = 3000, uniform(37)
    for stochastic in (True, False):
        codec = make(block=64, stochastic=stochastic)
        scale = scale_of(codec, values)
        total = torch.zeros(37, dtype=torch.float64)
        for draw in range(draws):
            total += through(codec, values, mixed(draw)).double()
        furthest = float((total / draws - values).abs().max())
        assert (furthest <= scale * (6 * 0.5 / math.sqrt(draws) + 2.0**-9)) == stochastic == codec.unbiased


@pytest.mark.parametrize("make", ROUNDED)
def test_the_key_chooses_the_random_numbers_and_nothing_else(make: Any) -> None:
    values = uniform(200)
    drawn, nearest = make(block=64, stochastic=True), make(block=64, stochastic=False)
    messages = [encoded(drawn, values, key) for key in range(50)]
    assert all(torch.equal(messages[key], encoded(drawn, values, key)) for key in range(50))
    assert len({bytes(message.numpy()) for message in messages}) == 50
    assert torch.equal(encoded(nearest, values, 1), encoded(nearest, values, 2))


@pytest.mark.parametrize("make", ROUNDED)
def test_values_draw_apart_from_each_other(make: Any) -> None:
    """Errors of two values of a block, in one byte or not, are not correlated: six standard deviations again."""
    draws, codec = 2000, make(block=8, stochastic=True)
    values = torch.tensor([1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3])
    errors = torch.stack([through(codec, values, mixed(draw)) for draw in range(draws)])[:, 1:]
    correlations = torch.corrcoef(errors.T) - torch.eye(7)
    assert float(correlations.abs().max()) < 6 / math.sqrt(draws)


def test_codecs_without_random_rounding_ignore_the_key() -> None:
    for codec in (Truncate16().make(), Bf16().make(), Fp16().make(), made(Sign, block=64)):
        assert not codec.unbiased
        assert torch.equal(encoded(codec, uniform(200), 1), encoded(codec, uniform(200), 2))


@given(
    numbers=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4), at=st.integers(0, 3), bit=st.integers(0, 63)
)
def test_a_key_depends_on_every_bit_of_every_number(numbers: list[int], at: int, bit: int) -> None:
    key = mixed(*numbers)
    assert 0 <= key < 2**32
    assert key == mixed(*numbers)
    other = list(numbers)
    other[at % len(numbers)] ^= 1 << bit
    assert mixed(*other) != key
    assert mixed(*numbers, 0) != key


def test_keys_are_the_same_on_every_machine_and_spread_over_32_bits() -> None:
    assert mixed(1, 2, 3) == 0x971024DB  # recorded
    keys = [mixed(number) for number in range(2000)]
    assert len(set(keys)) == 2000
    for bit in range(32):
        assert abs(sum(key >> bit & 1 for key in keys) - 1000) < 6 * math.sqrt(2000) / 2


# --- Error feedback ---------------------------------------------------------------------------------------------------


def fed_back(codec: Codec, gradient: Tensor, iterations: int) -> tuple[Tensor, float]:
    """Return the mean of what is sent of a constant gradient, and the largest magnitude that the residual ever has."""
    residual, largest = torch.zeros_like(gradient), 0.0
    total = torch.zeros_like(gradient, dtype=torch.float64)
    for iteration in range(iterations):
        total += through(codec, gradient, mixed(iteration), residual).double()
        largest = max(largest, float(residual.abs().max()))
    return total / iterations, largest


def gradient_of(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("codec", "times_the_largest"),
    [
        # The error is at most a share s of the largest value, gradient and residual together: s / (1 - s).
        (Truncate16().make(), 1 / 127),
        (Bf16().make(), 1 / 255),
        (Fp16().make(), 1 / 2047),
        (made(Int8, block=16), 1 / 253),
        (made(Int4, block=16), 1 / 13),
        (made(Int8, block=16, stochastic=True), 1 / 126),
        (made(Int4, block=16, stochastic=True), 1 / 6),
        (made(Qsgd, levels=7, block=16, stochastic=False), 4 / 10),
        # The squares of the errors are at most 1 - 1/n of those of the values: below 2 n, in Euclidean norm.
        (made(Ternary, block=16, stochastic=False), 2 * 16 * 4),
        (made(Sign, block=16), 2 * 16 * 4),
    ],
)
def test_with_error_feedback_the_mean_comes_as_near_as_1_over_the_iterations(
    codec: Codec, times_the_largest: float
) -> None:
    gradient = gradient_of(50)
    most = times_the_largest * float(gradient.abs().max()) * 1.01
    without = float((through(codec, gradient) - gradient).abs().max())
    iterations = math.ceil(4 * most / without)
    for times in (1, 10):
        mean, largest = fed_back(codec, gradient, times * iterations)
        assert largest <= most
        assert float((mean - gradient).abs().max()) <= most / (times * iterations) + 1e-6 <= without / times / 3


def test_qsgd_needs_small_blocks_for_error_feedback() -> None:
    """In a block of (2 s)**2 equal values, each is below half of a level: nothing of it is ever sent."""
    for levels in (1, 7):
        for block, sent in (((2 * levels) ** 2 - 1, True), ((2 * levels) ** 2, False)):
            mean, largest = fed_back(made(Qsgd, levels=levels, block=block, stochastic=False), torch.ones(block), 40)
            assert (float(mean[0]) > 0.5, largest < 20) == (sent, sent)


def test_random_rounding_to_few_levels_lets_residuals_grow() -> None:
    """QSGD's errors are larger than the values, and grow with them."""
    _, largest = fed_back(made(Qsgd, levels=7, block=512, stochastic=True), gradient_of(512), 150)
    assert largest > 1e3 * float(gradient_of(512).abs().max())
