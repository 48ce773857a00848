"""Gradients of any dtype as float32 values, and back."""

from __future__ import annotations

import torch
from torch import Tensor


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
