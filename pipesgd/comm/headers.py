"""Headers that tell what each rank is about to sum, and are compared before anything is added up."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from pipesgd.comm.transport import Pending, Transport
from pipesgd.errors import CommunicationError, OutOfStepError

STEP, SYNCHRONOUS_STEP = "step", "synchronous step"
CALLS = ("Pipelined", STEP, SYNCHRONOUS_STEP, "flush", "combine_buffers", "regroup", "close")
"""Calls of a pipeline in which ranks meet, as error messages name them. In a synchronous step a pipeline of a larger
width applies all gradients, for which all ranks must have the same reason."""

DISTINCT_ITERATIONS = 1 << 20
"""Iterations after which tags repeat."""


class Headers:
    """Keeps ranks that are in different calls or iterations from adding up different things.

    1. ``begin`` sends the next rank around the ring the call and the iteration that this rank is at, and expects those
       of the previous rank. It waits for neither, so a header travels together with the first segments.
    2. ``check`` waits for the previous rank's header and compares it. A receiver calls it before it uses the first
       message.

    Ranks that are not neighbours may exchange messages before either has failed. These messages carry ``tag``, which
    differs between calls and between iterations. gloo never matches messages of different tags; otherwise it would add
    them up if they had the same size, and terminate the process if the one that arrives were longer.

    Args:
        transport: a transport for headers alone, whose counters count them.
    """

    def __init__(self, transport: Transport):
        self.tag = 0
        self._transport = transport
        self._at = (CALLS[0], 0)
        self._sent: Pending | None = None
        self._arriving: tuple[Pending, Tensor] | None = None

    def begin(self, call: str, iteration: int) -> None:
        """Announce that this rank is at ``call`` of ``iteration``. Earlier headers must have been checked."""
        kind = CALLS.index(call)
        self._at = (call, iteration)
        self.tag = 1 + iteration % DISTINCT_ITERATIONS * len(CALLS) + kind
        transport = self._transport
        if transport.world_size == 1:
            return
        if self._sent is not None:
            self._sent.wait()
        self._sent = transport.send(torch.tensor([kind, iteration], device="cpu"), self._next, "the header")
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        self._arriving = (transport.receive(header, self._previous, "the header"), header)

    def check(self) -> None:
        """Wait for the previous rank's header, once, and compare it.

        Raises:
            OutOfStepError: the previous rank is in a different call or iteration.
            CommunicationError: the previous rank was lost, or silent for longer than the deadline.
        """
        if self._arriving is None:
            return
        pending, header = self._arriving
        self._arriving = None
        pending.wait()
        kind, iteration = header.tolist()
        if (CALLS[kind], iteration) != self._at:
            if self._sent is not None:  # the next rank must learn of this, too, before this one closes its connections
                with contextlib.suppress(CommunicationError):
                    self._sent.wait()
            raise OutOfStepError(self._transport.rank, *self._at, self._previous, CALLS[kind], iteration)

    @property
    def _next(self) -> int:
        return (self._transport.rank + 1) % self._transport.world_size

    @property
    def _previous(self) -> int:
        return (self._transport.rank - 1) % self._transport.world_size
