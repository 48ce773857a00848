"""The rule that says which parameters are sent as factors, and at which rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipesgd import PowerSgd
from pipesgd.errors import UserInputError
from pipesgd.reducers.low_rank import LEAST_COMPRESSION, LowRank, Matrix


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), []),
        ((1000,), []),  # a bias
        ((0, 1000), []),
        ((16, 16), [(16, 16, 4)]),
        ((15, 16), []),  # factors have more than half as many values
        ((10, 1000), [(10, 1000, 4)]),  # a last layer
        ((5000, 64), [(5000, 64, 4)]),  # an embedding
        ((64, 32, 3, 3), [(64, 288, 4)]),  # a convolution
        ((192, 64), [(64, 64, 4)] * 3),  # the stacked projections of an attention
        ((64, 192), [(64, 192, 4)]),
        ((30, 10), []),  # which are too small one by one
    ],
    ids=str,
)
def test_shapes_that_are_factored(shape: tuple[int, ...], expected: list[tuple[int, int, int]]) -> None:
    assert LowRank(rank=4).matrices(torch.empty(shape)) == [Matrix(*one) for one in expected]


def test_a_convolution_in_another_memory_order_has_rows_as_its_memory_has_them() -> None:
    weight = torch.empty(64, 32, 3, 3).to(memory_format=torch.channels_last)
    assert LowRank(rank=4).matrices(weight) == [Matrix(64, 288, 4)]
    assert LowRank(rank=2).matrices(torch.empty(20, 30).t()) == [Matrix(20, 30, 2)]


@given(rows=st.integers(1, 400), columns=st.integers(1, 400), compression=st.floats(LEAST_COMPRESSION, 50.0))
def test_a_rank_by_size_is_the_largest_that_saves_as_much(rows: int, columns: int, compression: float) -> None:
    made = LowRank(compression=compression).matrices(torch.empty(rows, columns))
    for one in made:
        numel, of_rank_1 = one.rows * one.columns, one.rows + one.columns
        assert one.rank == 1 or numel >= compression * one.rank * of_rank_1 * (1 - 1e-9)
        assert numel < compression * (one.rank + 1) * of_rank_1 * (1 + 1e-9)
        assert numel >= LEAST_COMPRESSION * one.rank * of_rank_1
    if not made and rows != 3 * columns:
        assert rows * columns < LEAST_COMPRESSION * (rows + columns), "not even rank 1 saves enough"


def test_ranks_by_size_are_larger_in_larger_matrices() -> None:
    rule = LowRank(compression=20)
    assert [rule.matrices(torch.empty(side, side))[0].rank for side in (64, 400, 4000)] == [1, 10, 100]


def test_a_codec_says_what_its_rule_does() -> None:
    parameters = [torch.empty(1000, 784), torch.empty(1000), torch.empty(10, 1000), torch.empty(10)]
    assert PowerSgd().said_of(parameters) == ", factors for 2 of 4 parameters, 65.2 times fewer values"
    assert PowerSgd(low_rank=2).describe() == "powersgd of rank 2"
    assert PowerSgd(compression=30, factors="int8").describe() == "powersgd with 30 times fewer values in int8"
    assert PowerSgd(dense_start=20).describe() == "powersgd of rank 4 after 20 whole gradients"


def test_one_rank_and_ranks_by_size_exclude_each_other() -> None:
    with pytest.raises(UserInputError) as caught:
        PowerSgd(low_rank=2, compression=30)
    assert str(caught.value) == "low-rank must be left out with --rank-compression, which chooses ranks; got 2"
