"""Requests to a parameter server, its replies, and its state, which are checked on arrival before they are used.

Requests and replies are numbers in float64. A state is a file written by torch.save, from another rank or a checkpoint.
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
from pipesgd.nested import loadable

MOST_COUNTED = 1 << 53
"""Largest count: a float64 holds all whole numbers up to it."""
MOST_CHECKSUM = (1 << 32) - 1
MOST_OPTION = 1e9
"""Largest learning rate, momentum, beta or weight decay that a server accepts."""


class Request(enum.IntEnum):
    """Kinds of a worker's requests."""

    PUSH = 0  # take this gradient; give the weights as soon as I may start my next iteration
    PULL = 1  # give the weights
    MEET = 2  # report whether all workers have come to this meeting
    SAVE = 3  # give your state
    LOAD = 4  # take this state
    STORE = 5  # take these weights, which come in place of a gradient
    BYE = 6  # nothing more will come from me


ONLY_FROM_WORKER_0 = (Request.SAVE, Request.LOAD, Request.STORE)
STATE_PARTS = {"weights", "optimizer", "arrivals"}
"""Parts of a server's state: ranges of the weights, state of the update rule, number of each worker's gradients."""

REQUEST_NUMBERS = 4
"""Count of the numbers in a request before the optimizer's options."""
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
    """Options of the optimizer's groups with which the gradient was computed (PUSH)."""

    def pack(self, options: int) -> Tensor:
        """Return the message as numbers, with room for this many ``options``."""
        numbers = [self.kind, self.finite, self.number, self.place, *(self.options or [0.0] * options)]
        return torch.tensor(numbers, dtype=torch.float64)

    @classmethod
    def unpack(cls, numbers: Sequence[float], *, worker: int, most_state_bytes: int) -> RequestMessage:
        """Return the message of ``worker`` that ``pack`` made; raise a one-line ``ValueError`` if it cannot be one."""
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
    """Number of gradients of all workers that have arrived so far."""
    applied: bool
    """True if the gradient was applied, with its round if there are rounds; for a meeting, if all workers are there."""
    lost: int | None = None
    """Rank whose loss or failure has ended the server's service; None while it serves."""
    state_bytes: int = 0
    """Bytes of the state that follows."""

    def pack(self) -> Tensor:
        """Return the message as numbers."""
        lost = 0 if self.lost is None else self.lost + 1
        return torch.tensor([self.arrivals, self.applied, lost, self.state_bytes], dtype=torch.float64)

    @classmethod
    def unpack(cls, numbers: Sequence[float], *, ranks: int, most_state_bytes: int) -> Reply:
        """Return the reply that ``pack`` made, in a job of ``ranks``; raise ``ValueError`` if it cannot be one."""
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
    """Return ``state``, of ``STATE_PARTS``, as bytes (uint8); raise ``UserInputError`` if it is too large to send."""
    file = io.BytesIO()
    torch.save(loadable(state), file)
    packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    check_state_bytes(packed.nbytes, most_bytes)
    return packed


def unpack_state(packed: Tensor, weights: Sequence[Tensor], workers: int) -> dict[str, Any]:
    """Return the state that ``pack_state`` packed on a server with such ``weights``, or raise ``UserInputError``."""
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
