"""What a reducer is: the gradients of an iteration become their sum; and gradients of any dtype as float32 values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipesgd.comm.all_reduce import Finish, leave
from pipesgd.flat_buffer import FlatBuffer


class Exchange(Protocol):
    """Replaces the gradients of all ranks by their sum, or what stands for it, the same bytes on every rank.

    It runs on the communication thread, once an iteration, and may remember what it has not sent.
    """

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = leave) -> None:
        """Replace the values in ``buffer``, the gradients of ``iteration``, by their sum over the ranks. Collective.

        ``finish`` is called with the parts of the buffer, each once, when their sum is there.

        Raises:
            UserInputError: buffers like this one cannot be summed.
            CommunicationError: a peer was lost, or silent for longer than the deadline.
        """

    def wire_bytes(self, buffer: FlatBuffer, iteration: int) -> int:
        """Bytes that this rank sends in the ``sum`` of ``iteration`` for a buffer like this one.

        Headers of the network are apart. It may be asked for while the communication thread sums.
        """

    def rearrange(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Buffers are of the parameters ``new`` from now on, after those of ``old``.

        What is remembered of parameters that stay goes over; what is remembered of the others is dropped.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to continue bit for bit: a copy."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of this rank."""


class Float32Places:
    """For every flat tensor of a buffer, where its values lie in float32: in itself, if it is of that dtype."""

    def __init__(self) -> None:
        self._places: dict[int, Tensor] = {}  # by number of the flat tensor

    def place(self, number: int, flat: Tensor) -> Tensor:
        """``flat``, or room for its values in float32: the same at every call."""
        if flat.dtype == torch.float32:
            return flat
        if number not in self._places:
            self._places[number] = torch.empty_like(real(flat), dtype=torch.float32)
        return self._places[number]


def real(tensor: Tensor) -> Tensor:
    """The values of a contiguous tensor in one dimension, as a view; of complex ones their real and imaginary parts."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
