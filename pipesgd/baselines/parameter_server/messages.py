"""Requests to a parameter server, its replies, and its state: checked when they arrive, before they are used.

Requests and replies are numbers in float64. A state is a file of torch's, from another rank or from a checkpoint.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesgd.errors import UserInputError

MOST_COUNTED = 1 << 53
"""The largest count: a float64 holds all whole numbers up to it."""
MOST_CHECKSUM = (1 << 32) - 1
MOST_OPTION = 1e9
"""The largest learning rate, momentum, beta or weight decay that a server accepts."""


class Request(enum.IntEnum):
    """The kinds of a worker's requests."""

    PUSH = 0  # take this gradient; give the weights as soon as I may start my next iteration
    PULL = 1  # give the weights
    MEET = 2  # tell me whether all workers have come to this meeting
    SAVE = 3  # give your state
    LOAD = 4  # take this state
    STORE = 5  # take these weights; they have the place of a gradient
    BYE = 6  # nothing more will come from me


ONLY_FROM_WORKER_0 = (Request.SAVE, Request.LOAD, Request.STORE)
STATE_PARTS = {"weights", "optimizer", "arrivals"}
"""A server's state: its ranges of the weights, its update rule's state, each worker's gradients that have arrived."""

REQUEST_NUMBERS = 4
"""Numbers of a request before the optimizer's options."""
REPLY_NUMBERS = 4


@dataclass(frozen=True)
class RequestMessage:
    """A worker's request, without the tensors that follow it."""

    kind: Request
    finite: bool = True
    """True if the gradient that is pushed is finite, on all servers."""
    number: int = 0
    """Bytes of the state (LOAD), or the number of the meeting (MEET)."""
    place: int = 0
    """Checksum of the name of the collective call that the worker has come to (MEET)."""
    options: tuple[float, ...] = ()
    """Options of the optimizer's groups under which the gradient was computed (PUSH)."""

    def pack(self, options: int) -> Tensor:
        """The message as numbers, with room for this many ``options``."""
        numbers = [self.kind, self.finite, self.number, self.place, *(self.options or [0.0] * options)]
        return torch.tensor(numbers, dtype=torch.float64)

    @classmethod
    def unpack(cls, numbers: Sequence[float], *, worker: int, most_state_bytes: int) -> RequestMessage:
        """The message of ``worker`` that ``pack`` made; raises ``ValueError`` in one line if it cannot be one."""
        kind = Request(_whole("the request", numbers[0], max(Request)))
        if kind in ONLY_FROM_WORKER_0 and worker != 0:
            raise ValueError(f"a request to {kind.name.lower()} must come from rank 0; got it from rank {worker}")
        for option in numbers[REQUEST_NUMBERS:]:
            if not 0 <= option <= MOST_OPTION:
                raise ValueError(f"options of an optimizer must be from 0 to {MOST_OPTION:g}; got {option:g}")
        most = most_state_bytes if kind == Request.LOAD else MOST_COUNTED
        return cls(
            kind=kind,
            finite=bool(_whole("the flag of a finite gradient", numbers[1], 1)),
            number=_whole("bytes of a state" if kind == Request.LOAD else "the number of a meeting", numbers[2], most),
            place=_whole("the place of a meeting", numbers[3], MOST_CHECKSUM),
            options=tuple(numbers[REQUEST_NUMBERS:]),
        )


@dataclass(frozen=True)
class Reply:
    """A server's reply, without the tensors that follow it."""

    arrivals: int
    """Gradients of all workers that have arrived so far."""
    applied: bool
    """True if the gradient was applied, with its round if there are rounds; of a meeting, if all workers are there."""
    lost: int | None = None
    """The rank on which the server has given up; it serves nobody then."""
    state_bytes: int = 0
    """Bytes of the state that follows."""

    def pack(self) -> Tensor:
        """The message as numbers."""
        lost = 0 if self.lost is None else self.lost + 1
        return torch.tensor([self.arrivals, self.applied, lost, self.state_bytes], dtype=torch.float64)

    @classmethod
    def unpack(cls, numbers: Sequence[float], *, ranks: int, most_state_bytes: int) -> Reply:
        """The reply that ``pack`` made, in a job of ``ranks``; raises ``ValueError`` if it cannot be one."""
        lost = _whole("one more than the lost rank", numbers[2], ranks)
        return cls(
            arrivals=_whole("arrivals", numbers[0], MOST_COUNTED),
            applied=bool(_whole("the flag of an applied gradient", numbers[1], 1)),
            lost=lost - 1 if lost else None,
            state_bytes=_whole("bytes of a state", numbers[3], most_state_bytes),
        )


def _whole(name: str, number: float, most: int) -> int:
    if not (0 <= number <= most and number == int(number)):  # no comparison with a NaN is true
        raise ValueError(f"{name} must be a whole number from 0 to {most}; got {number:g}")
    return int(number)


def pack_state(state: dict[str, Any], most_bytes: int) -> Tensor:
    """``state``, of ``STATE_PARTS``, as bytes (uint8); raises ``UserInputError`` if these are too many to be sent."""
    file = io.BytesIO()
    torch.save(state, file)
    packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    check_state_bytes(packed.nbytes, most_bytes)
    return packed


def unpack_state(packed: Tensor, weights: Sequence[Tensor], workers: int) -> dict[str, Any]:
    """The state that ``pack_state`` packed, of a server with such ``weights``; else raises ``UserInputError``."""
    try:
        state = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    except Exception:  # noqa: BLE001 (torch raises many kinds: of archives, of pickles, and of what is in them)
        state = None
    if not (isinstance(state, dict) and set(state) == STATE_PARTS):
        raise UserInputError("a server's state must be one that a server has saved; got something else")
    saved, arrivals = state["weights"], state["arrivals"]
    if not (
        isinstance(saved, list)
        and all(isinstance(one, Tensor) for one in saved)
        and [(one.shape, one.dtype) for one in saved] == [(one.shape, one.dtype) for one in weights]
    ):
        raise UserInputError("a server's state must hold the weights of this model; got others")
    if not (
        isinstance(arrivals, list)
        and len(arrivals) == workers
        and all(type(one) is int and 0 <= one <= MOST_COUNTED for one in arrivals)
    ):
        raise UserInputError(f"a server's state must count the gradients of {workers} workers; got something else")
    return state


def check_state_bytes(nbytes: int, most: int) -> None:
    """Raise ``UserInputError`` if a server's state is too large to be sent."""
    if nbytes > most:
        raise UserInputError(f"a server's state must be at most 16 times its weights, {most} bytes; got {nbytes}")
