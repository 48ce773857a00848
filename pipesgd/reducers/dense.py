"""Sum of every value in an all-reduce, with a codec on the wire and with error feedback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipesgd.codecs.base import mixed
from pipesgd.comm.all_reduce import AllReduce, Finish, ScheduledAllReduce, no_op
from pipesgd.flat_buffer import FlatBuffer, real_numel, take_mean
from pipesgd.reducers.base import Float32Places, added_up, as_real, check_kept


class DenseReducer:
    """One all-reduce for each flat tensor of the buffer, which may be a bucket of a larger one.

    With ``error_feedback``, what a rank's encodings leave out of the sum in one iteration is added to its own gradient
    in the next one (Seide et al., 2014; Karimireddy et al., ICML 2019). Sum and residuals together equal the ranks'
    inputs: nothing is lost, only delayed.

    A codec handles float32. With a codec, other gradients are summed in float32 and rounded back.

    Args:
        all_reduce: sums exactly, or with a codec on the wire.
        exact: whether ``all_reduce`` sums any dtype as it is.
        error_feedback: whether residuals are kept.
        seed: seed of random numbers, the same on all ranks; None if the codec draws none.
    """

    def __init__(self, all_reduce: AllReduce, *, exact: bool, error_feedback: bool = False, seed: int | None = None):
        self._all_reduce = all_reduce
        self._exact = exact
        self._error_feedback = error_feedback
        self._key: Callable[[int, int], int] = _no_key if seed is None else functools.partial(mixed, seed)
        self._residuals: dict[int, Tensor] = {}  # by number of the flat tensor
        self._places = Float32Places()

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
        self.state(buffer)  # makes residuals, if there are none
        for number, flat in enumerate(buffer.flats, buffer.first):
            own = self._float32(number, flat)
            if own is not flat:
                own.copy_(as_real(flat))
            key = self._key(iteration, number)
            self._all_reduce(own, self._residuals.get(number), key, finish if own is flat else no_op)
            if own is not flat:
                as_real(flat).copy_(own)
                finish(flat)

    def wire_bytes(self, buffer: FlatBuffer, iteration: int) -> int:
        flats = enumerate(buffer.flats, buffer.first)
        return sum(self._all_reduce.wire_bytes(self._float32(number, flat)) for number, flat in flats)

    def state(self, buffer: FlatBuffer) -> list[Tensor]:
        if not self._error_feedback:
            return []
        flats = dict(enumerate(buffer.flats, buffer.first))
        for number in flats.keys() - self._residuals.keys():
            self._residuals[number] = torch.zeros_like(self._float32(number, flats[number]))
        return [self._residuals[number] for number in flats]

    def result(self, buffer: FlatBuffer, before: Sequence[Tensor]) -> list[Tensor]:
        """Return what the other ranks have the mean in ``buffer`` from, uint8. Exact sums have the mean itself.

        The memory of the result ``before`` is used again, if there is one.
        """
        spares: Sequence[Tensor | None] = before or [None] * len(buffer.flats)
        if self._exact:
            return [_copied(flat.view(torch.uint8), spare) for flat, spare in zip(buffer.flats, spares, strict=True)]
        own = [self._float32(number, flat) for number, flat in enumerate(buffer.flats, buffer.first)]
        return [self._scheduled.take_encoded_sum(flat, spare) for flat, spare in zip(own, spares, strict=True)]

    def take_result(self, buffer: FlatBuffer, result: Sequence[Tensor], world_size: int) -> None:
        """Replace the values in ``buffer`` by the mean that another of ``world_size`` ranks has the ``result`` of."""
        for number, (flat, encoded) in enumerate(zip(buffer.flats, result, strict=True), buffer.first):
            if self._exact:
                flat.view(torch.uint8).copy_(encoded)
                continue
            own = self._float32(number, flat)
            self._scheduled.decode_sum(encoded, own)
            if own is not flat:
                as_real(flat).copy_(own)
            take_mean(flat, world_size)

    def reconnect(self, all_reduce: AllReduce) -> None:
        """Sum over other ranks, or other connections, from now on; what was left out of sums so far stays."""
        self._all_reduce = all_reduce

    @property
    def _scheduled(self) -> ScheduledAllReduce:
        assert isinstance(self._all_reduce, ScheduledAllReduce)
        return self._all_reduce

    def state_of(self, number: int, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        if number not in self._residuals:
            return [[] for _ in parameters]
        return [[part] for part in self._residuals[number].split([real_numel(one) for one in parameters])]

    def forget_from(self, number: int) -> None:
        self._residuals = {one: kept for one, kept in self._residuals.items() if one < number}

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": [residual.clone() for residual in self._in_order()]}

    def check_state(self, state: dict[str, Any], buckets: Sequence[Sequence[Tensor]]) -> None:
        check_kept(state["residuals"], buckets)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._residuals = {number: residual.clone() for number, residual in enumerate(state["residuals"])}

    def of_members(self, alike: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"residuals": added_up([state["residuals"] for state in taken])}

    def _in_order(self) -> list[Tensor]:
        return [self._residuals[number] for number in sorted(self._residuals)]

    def _float32(self, number: int, flat: Tensor) -> Tensor:
        """Return ``flat``, or a place for its values in float32."""
        return flat if self._exact else self._places.place(number, flat)


def _copied(values: Tensor, spare: Tensor | None) -> Tensor:
    return values.clone() if spare is None or spare.shape != values.shape else spare.copy_(values)


def _no_key(iteration: int, number: int) -> int:
    """Return the key of a codec that draws no random numbers."""
    return 0
