"""Flat buffers: what goes in comes out, for all shapes and dtypes; finite means that every value is finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipesgd.flat_buffer import FlatBuffer, all_finite, finite_norm, give_gradients, pack_gradients, take_mean

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), max_size=6))
def test_values_go_in_and_come_out_in_their_places(kinds: list[tuple[list[int], torch.dtype]]) -> None:
    tensors = [torch.arange(math.prod(shape)).view(shape).to(dtype) + i for i, (shape, dtype) in enumerate(kinds)]
    buffer = FlatBuffer(tensors)
    assert len(buffer.flats) == len({dtype for _, dtype in kinds})
    assert buffer.nbytes == sum(tensor.nbytes for tensor in tensors)
    buffer.fill_from(tensors)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    buffer.copy_to(copies)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_gradients_move_in_and_out_without_leaving_anything_behind() -> None:
    parameters = [torch.zeros(2, 3, requires_grad=True), torch.zeros((), requires_grad=True)]
    buffer = FlatBuffer(parameters)
    buffer.flats[0].fill_(9.0)  # left by an earlier iteration
    parameters[0].grad = torch.arange(6.0).view(3, 2).t()
    pack_gradients(parameters, buffer)
    assert [parameter.grad for parameter in parameters] == [None, None]
    assert buffer.flats[0].tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 0.0], "no gradient counts as zero"
    for flat in buffer.flats:
        take_mean(flat, 2)
    give_gradients(parameters, buffer.views)
    gradient = parameters[0].grad
    assert isinstance(gradient, Tensor)
    assert gradient.tolist() == [[0.0, 1.0, 2.0], [0.5, 1.5, 2.5]]
    assert gradient.data_ptr() == buffer.flats[0].data_ptr(), "nothing is copied"


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([0.0, 1.0], True),
        ([], True),
        ([3e38, 3e38], True),  # each is finite, though their sum is not
        ([1.0, math.nan], False),
        ([1.0, math.inf], False),
        ([math.inf, -math.inf], False),
    ],
)
def test_finite_means_every_value(values: list[float], finite: bool) -> None:
    buffer = FlatBuffer([torch.zeros(len(values))])
    buffer.fill_from([torch.tensor(values)])
    assert all_finite(buffer) is finite
    assert (finite_norm(buffer.flats[0]) is not None) is finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e30])
def test_the_norm_is_that_of_the_values_in_float64(dtype: torch.dtype, scale: float) -> None:
    values = (torch.randn(1000, dtype=torch.float64) * scale).to(dtype)
    wide = values.to(torch.complex128 if dtype.is_complex else torch.float64)
    exact = float(torch.linalg.vector_norm(wide))
    assert finite_norm(values) == (pytest.approx(exact, rel=1e-5) if bool(values.isfinite().all()) else None)
