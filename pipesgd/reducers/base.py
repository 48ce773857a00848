"""What an exchange of gradients is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

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
