"""The memory that gathering takes while it sums, counted in the middle of it, as docs/method.md states it."""

from __future__ import annotations

import gc
from collections import Counter

import torch
from torch import Tensor, nn

from pipesgd.comm.all_reduce import Finish, no_op
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.systems.exchanges.factor_hooks import Factors
from pipesgd.systems.exchanges.factors import FactorsReducer
from pipesgd.systems.exchanges.rows import RowsReducer

RANKS = 3


class Counted:
    """An all-gather of ranks that all have this one's parts; it counts the storages of each size, in bytes."""

    def __init__(self) -> None:
        self.found: list[Counter[int]] = []

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        parts = flat.view(RANKS, flat.numel() // RANKS)
        parts.copy_(parts[0].clone())
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        storages = [one.untyped_storage() for one in found if one.layout is torch.strided and one.device.type == "cpu"]
        self.found.append(Counter({one.data_ptr(): one.nbytes() for one in storages}.values()))

    def wire_bytes(self, flat: Tensor) -> int:
        return flat.nbytes


def test_rows_are_held_twice_and_once_for_every_rank_while_they_are_summed() -> None:
    rows, columns, used = 211, 97, 23  # sizes that no tensor of another test has
    gradient = torch.zeros(rows, columns)
    gradient[:used] = 1.0
    buffer, gather = FlatBuffer([gradient]), Counted()
    buffer.fill_from([gradient])
    RowsReducer(gather, rank=0, world_size=RANKS).sum(buffer, 0)
    assert torch.equal(buffer.views[0], RANKS * gradient)
    *_, values = gather.found
    row = 4 * columns
    assert (values[used * row], values[RANKS * used * row]) == (2, 1)
    assert values[RANKS * used * 4] == 1, "numbers of the rows, int32"
    assert values[rows * row] == 2, "the gradient and the buffer: no further matrix"


def test_factors_are_held_twice_and_once_for_every_rank_while_they_are_summed() -> None:
    rows, columns, samples = 113, 97, 5
    inputs, gradients = torch.ones(samples, columns), torch.ones(samples, rows)
    gradient = gradients.t() @ inputs
    buffer, gather = FlatBuffer([gradient]), Counted()
    buffer.fill_from([gradient])
    reducer = FactorsReducer(gather, rank=0, world_size=RANKS)
    reducer.parts = [Factors("weight", inputs=[inputs], gradients=[gradients], unit=2.0**-24)]
    reducer.sum(buffer, 0)
    assert torch.equal(buffer.views[0], RANKS * gradient)
    *_, values = gather.found
    message = 4 * samples * (rows + columns)
    assert (values[4 * samples * columns], values[4 * samples * rows]) == (1, 1), "kept since the backward pass"
    assert (values[message], values[RANKS * message]) == (1, 1)
    assert values[4 * rows * columns] == 2, "the gradient and the buffer: no further matrix"
