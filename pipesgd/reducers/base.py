"""Protocols of sums of gradients, and their shared parts: undoing a sum, and float32 places for other dtypes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from pipesgd.codecs.base import Codec
from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import CodecOptions
from pipesgd.comm.all_reduce import AllReduce, Finish, no_op
from pipesgd.comm.connections import Connections
from pipesgd.flat_buffer import FlatBuffer, check_sizes, sizes_of_flats
from pipesgd.optim.loss_scale import LossScale


class Sum(Protocol):
    """Replaces the gradients of all ranks by their sum, or an approximation of it, with the same bytes on every rank.

    It runs on the communication thread, once per bucket, which is once per iteration by default.
    """

    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
        """Replace the values in ``buffer``, the gradients of ``iteration``, by their sum over the ranks. Collective.

        ``finish`` is called once with each part of the buffer when its sum is ready.

        Raises:
            UserInputError: buffers like this one cannot be summed.
            CommunicationError: a peer was lost, or silent for longer than the deadline.
        """


class Reducer(Sum, Protocol):
    """A sum that knows its bytes in advance, and may remember what it has not sent."""

    def wire_bytes(self, buffer: FlatBuffer, iteration: int) -> int:
        """Return the bytes that this rank sends in the ``sum`` of ``iteration`` for a buffer like this one.

        Headers of the network are not counted. This may be called while the communication thread sums.
        """

    def state(self, buffer: FlatBuffer) -> list[Tensor]:
        """Return the tensors, not copies, that a ``sum`` of a buffer like this one changes besides the buffer."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state needed to continue bit for bit."""

    def check_state(self, state: dict[str, Any], buckets: Sequence[Sequence[Tensor]]) -> None:
        """Raise ``UserInputError`` if ``state``, a ``state_dict``, is of other parameters than those of ``buckets``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of this rank that ``check_state`` accepts."""

    def of_members(self, alike: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state in which the values left out in the states ``taken`` over are added up.

        ``alike`` is the state of any former rank, for what all ranks hold alike.

        Raises ``UserInputError`` if the state belongs to the ranks that there were.
        """


class OfParameters(Reducer, Protocol):
    """A reducer that also sums the buckets of a buffer one by one, and whose state belongs to the parameters."""

    def state_of(self, number: int, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return, for each of the ``parameters`` of a bucket, the tensors of the state, not copies, that belong to it.

        There are none before the first ``state`` of the bucket, whose first flat tensor has this ``number``.
        """

    def forget_from(self, number: int) -> None:
        """Drop the state of all buckets but those in front of the flat tensor with this ``number``."""


class GradientCodec(CodecOptions, ABC):
    """A codec that compresses gradients in a reducer of its own, which keeps for later what it has not sent."""

    @property
    def remembers(self) -> bool:
        return True

    def make(self, device: str = "cpu") -> Codec:
        """Return the codec of the numbers that are sent, which leaves them as they are."""
        return Uncompressed()

    @abstractmethod
    def reducer(self, connections: Connections, codec: Codec, *, seed: int) -> Reducer:
        """Return the reducer that sums gradients over ``connections``; all ranks give the same ``seed``.

        ``codec`` is what ``make`` has made, on the device of the gradients.
        """

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Raise ``UserInputError`` unless gradients of ``parameters`` can be compressed like this."""


class Hooks(Protocol):
    """Hooks that keep what the gradients of some weights are made of, from the backward pass until it is forgotten."""

    def look(self, weight: Tensor) -> Any:
        """Return what the gradient in the ``.grad`` of ``weight`` is made of."""

    def forget(self) -> None:
        """Drop all that is kept. No backward pass may be running."""

    def remove(self) -> None:
        """Remove the hooks."""


class Gathering(ABC):
    """A sum of matrices that gathers what each rank's matrices are made of, and so knows its bytes only afterwards."""

    eligible: ClassVar[str]
    """Words for the layers whose weights can be exchanged like this."""
    parts: Sequence[Any] = ()
    """Parts that ``hooks`` have kept of this rank's gradients in the next ``sum``, in the order of its matrices."""
    bytes_sent: int
    """Bytes that this rank has sent in the last ``sum``; they depend on all ranks' gradients."""

    @abstractmethod
    def __init__(self, all_gather: AllReduce, *, rank: int, world_size: int): ...

    @staticmethod
    @abstractmethod
    def weights(model: nn.Module) -> list[Tensor]:
        """Return the model's weights whose gradients can be exchanged like this.

        Raises:
            UserInputError: one of them is too large.
        """

    @staticmethod
    def hooks(model: nn.Module, weights: Sequence[Tensor], loss_scale: LossScale | None) -> Hooks | None:
        """Return hooks that keep what gradients of these ``weights`` are made of; None if gradients say it alone."""
        return None

    @staticmethod
    @abstractmethod
    def pieces(gradient: Tensor, kept: Any) -> int:
        """Return the number of pieces of a gradient, of which ``hooks`` have ``kept`` this."""

    @staticmethod
    @abstractmethod
    def part_bytes(count: int, matrix: Tensor) -> int:
        """Return the bytes of one rank's part of a matrix if the rank with the most has ``count`` pieces of it."""

    @abstractmethod
    def sum(self, buffer: FlatBuffer, iteration: int, finish: Finish = no_op) -> None:
        """Replace the matrices in ``buffer``, (rows, columns) each, by their sums over the ranks; see ``Sum``."""


def check_kept(kept: Sequence[Tensor], buckets: Sequence[Sequence[Tensor]]) -> None:
    """Raise ``UserInputError`` unless ``kept`` has the sizes of the first flat tensors of ``buckets``, in float32.

    Where buckets are summed in turns, there is nothing of the later ones at first.
    """
    check_sizes([one.numel() for one in kept], sizes_of_flats(buckets)[: len(kept)])


def added_up(residuals: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the sums of the residuals of several ranks, for each flat tensor."""
    return [torch.stack(of_ranks).sum(0) for of_ranks in zip(*residuals, strict=True)]


def added_by_place(values: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Return the sums of ``values``, each by its place, where some may have none."""
    places = sorted(set().union(*values))
    return {place: torch.stack([one[place] for one in values if place in one]).sum(0) for place in places}


class Undo:
    """Copies of the state that the sums of a gradient change, to put it back if that gradient is left out.

    They are in memory that is used again for the next gradient, as large as the state.
    """

    def __init__(self) -> None:
        self._copies: dict[int, list[Tensor]] = {}  # by number of the bucket
        self._kept: dict[int, list[Tensor]] = {}

    def keep(self, number: int, state: list[Tensor]) -> None:
        """Copy the ``state`` that the sum of bucket ``number`` is about to change: the same tensors for each gradient,
        or others."""
        if number not in self._copies or [one.shape for one in self._copies[number]] != [one.shape for one in state]:
            self._copies[number] = [torch.empty_like(tensor) for tensor in state]
        _copy_all(self._copies[number], state)
        self._kept[number] = state

    def end(self, *, put_back: bool) -> None:
        """Put back all that was kept since the last ``end``, or leave it as the sums have left it."""
        if put_back:
            for number, state in self._kept.items():
                _copy_all(state, self._copies[number])
        self._kept.clear()


def _copy_all(targets: list[Tensor], origins: list[Tensor]) -> None:
    for target, origin in zip(targets, origins, strict=True):
        target.copy_(origin)


class Float32Places:
    """Memory for the float32 values of each flat tensor of a buffer; a float32 tensor is its own place."""

    def __init__(self) -> None:
        self._places: dict[int, Tensor] = {}  # by number of the flat tensor

    def place(self, number: int, flat: Tensor) -> Tensor:
        """Return ``flat``, or memory for its values in float32, the same at every call."""
        if flat.dtype == torch.float32:
            return flat
        if number not in self._places:
            self._places[number] = torch.empty_like(as_real(flat), dtype=torch.float32)
        return self._places[number]


def as_real(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view of a contiguous tensor; complex values become their real and imaginary parts."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
