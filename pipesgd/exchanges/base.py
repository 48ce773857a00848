"""What an exchange of gradients is."""

from __future__ import annotations

from typing import Any, Protocol

from pipesgd.gradients import FlatBuffer


class Exchange(Protocol):
    """Replaces the gradients of all ranks by their sum, or what stands for it, the same bytes on every rank.

    It runs on the communication thread, once an iteration, and may remember what it has not sent.
    """

    def sum(self, buffer: FlatBuffer) -> None:
        """Replace the values in ``buffer`` by their sum over the ranks. Collective.

        Raises:
            CommunicationError: a peer was lost, or silent for longer than the deadline.
        """

    def wire_bytes(self, buffer: FlatBuffer) -> int:
        """Bytes that this rank sent in the last ``sum`` of a buffer like this one, headers of the network apart."""

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to continue bit for bit: a copy."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of this rank."""
