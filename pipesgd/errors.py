"""The exceptions of pipesgd, as a tree:

PipesgdError
├── UserInputError (ValueError)                the input was wrong: one line, exit code 2
│   ├── DatasetError                           missing, truncated or foreign data files
│   ├── CheckpointError                        the run to resume is a different one
│   └── DisagreementError                      the ranks were started with different options
└── RunError (RuntimeError)                    the run failed: exit code 1
    ├── CommunicationError (ConnectionError)   a peer was lost
    │   ├── DeadlineExceeded (TimeoutError)    a peer did not answer within the deadline
    │   └── PeerFailed                         a peer has failed, as it or another rank says
    ├── OutOfStepError                         the ranks are in different calls or iterations
    ├── StoppedBySignal                        a signal such as Ctrl-C ended it in order: 128 and its number
    ├── LeftBehind                             the other members continue without this process
    ├── NotEnoughMembers                       too few members are left to continue: exit code 75
    ├── NonFiniteGradientError                 NaN or infinity in a gradient
    └── ReplicasDivergedError                  the true weights differ between ranks
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Self

from pipesgd.process import say

OURS = (
    *("pipesgd", "torch", "contextlib"),
    *("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"),
)
"""Packages whose lines are not the program's."""


def named(ranks: Sequence[int]) -> str:
    """Return ``ranks`` as readable text.

    >>> named([3]), named([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


class PipesgdError(Exception):
    """Base of every exception that pipesgd raises on purpose."""


class UserInputError(PipesgdError, ValueError):
    """The user asked for something that cannot be done; the message says what must hold and what was got."""

    known_to_all: bool = False
    """True if all ranks raise the error together, so that only rank 0 needs to report it."""

    @classmethod
    def on_all_ranks(cls, text: str) -> Self:
        """Return an error with this message that all ranks raise together."""
        error = cls(text)
        error.known_to_all = True
        return error


class DatasetError(UserInputError):
    """Data files are missing, truncated, or not what they should be."""


class CheckpointError(UserInputError):
    """The run to resume is a different one, or its checkpoints are not complete on every rank."""


class DisagreementError(UserInputError):
    """The ranks were started with different options. Every rank reports it, since each may have its own screen."""

    known_to_all = True


class RunError(PipesgdError, RuntimeError):
    """A run that had started could not continue."""

    _named = False
    """True once its ranks are named by their numbers in the job."""


class CommunicationError(RunError, ConnectionError):
    """Rank ``rank`` could not finish ``operation`` with ``peer`` in iteration ``iteration``.

    ``peer`` is None where the operation involves all ranks; ``iteration`` is None outside training.
    """

    def __init__(self, *, rank: int, peer: int | None, operation: str, reason: str, iteration: int | None = None):
        self.rank = rank
        self.peer = peer
        self.operation = operation
        self.reason = reason
        self.iteration = iteration
        super().__init__(rank, peer, operation, reason, iteration)

    def name_ranks(self, number: Callable[[int], int]) -> None:
        """Name the ranks by ``number`` of each from now on: those of a process group by their numbers in the job.

        Further calls change nothing: where sums of one group are a part of another's, the inner group names its ranks.
        """
        if not self._named:
            self._named = True
            self.rank = number(self.rank)
            self.peer = None if self.peer is None else number(self.peer)

    def __str__(self) -> str:
        where = f"rank {self.rank}: {self.operation}"
        if self.peer is not None:
            where += f" with rank {self.peer}"
        if self.iteration is not None:
            where += f" in iteration {self.iteration}"
        return f"{where} failed: {self.reason}"


class DeadlineExceeded(CommunicationError, TimeoutError):  # noqa: N818 (the name that torch and grpc users know)
    """The peer is alive as far as we know, but was silent for the whole deadline."""


class PeerFailed(CommunicationError):  # noqa: N818 (named as DeadlineExceeded is)
    """Rank ``peer`` has failed, and it or a rank that noticed it has reported why; this rank is healthy."""

    def __str__(self) -> str:
        where = "" if self.iteration is None else f" in iteration {self.iteration}"
        return f"rank {self.rank}: stopped in {self.operation}{where}: rank {self.peer} has failed: {self.reason}"


class StoppedBySignal(RunError):  # noqa: N818 (named after what happened)
    """The run was stopped by ``signal``, such as "SIGTERM" or "Ctrl-C", on one of its ranks.

    ``without`` is the reason why no farewell checkpoint could be written; None if there is one of ``iteration``.
    ``newest`` is the iteration after which the newest checkpoint was written; None if there is none.
    """

    def __init__(self, signal: str, *, iteration: int | None, newest: int | None, without: str | None = None):
        self.signal = signal
        self.iteration = iteration
        self.newest = newest
        self.without = without
        super().__init__(signal, iteration, newest, without)

    def __str__(self) -> str:
        if self.without is None:
            return f"stopped by {self.signal} after iteration {self.iteration}; --resume continues from its checkpoint"
        where = "" if self.iteration is None else f" in iteration {self.iteration}"
        last = (
            "there is no checkpoint yet" if self.newest is None else f"--resume continues after iteration {self.newest}"
        )
        return f"stopped by {self.signal}{where} without a farewell checkpoint, since {self.without}; {last}"


class LeftBehind(RunError):  # noqa: N818 (named after what happened)
    """The other members of an elastic run continue without this process, because of ``why``."""

    def __init__(self, rank: int, why: str, iteration: int | None):
        self.rank = rank
        self.why = why
        self.iteration = iteration
        super().__init__(rank, why, iteration)

    def __str__(self) -> str:
        where = "" if self.iteration is None else f" in iteration {self.iteration}"
        return f"rank {self.rank} was left behind{where}: {self.why}; a restart of the job takes it in again"


class NotEnoughMembers(RunError):  # noqa: N818 (named after what happened)
    """Too few members of an elastic run are left, or in reach, to continue; the message says how many."""


class OutOfStepError(RunError):
    """Rank ``rank`` is at ``call`` of ``iteration``, while ``peer`` is at ``peer_call`` of ``peer_iteration``."""

    def __init__(self, rank: int, call: str, iteration: int, peer: int, peer_call: str, peer_iteration: int):
        self.rank = rank
        self.call = call
        self.iteration = iteration
        self.peer = peer
        self.peer_call = peer_call
        self.peer_iteration = peer_iteration
        super().__init__(rank, call, iteration, peer, peer_call, peer_iteration)

    def name_ranks(self, number: Callable[[int], int]) -> None:
        """Name the ranks by ``number`` of each from now on, as ``CommunicationError.name_ranks`` does."""
        if not self._named:
            self._named = True
            self.rank, self.peer = number(self.rank), number(self.peer)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is at {self.call} in iteration {self.iteration}, but rank {self.peer} is at "
            f"{self.peer_call} in iteration {self.peer_iteration}: all ranks must make the same calls in the same "
            "order, and need the same number of batches for that (drop_last=True)"
        )


class NonFiniteGradientError(RunError, ArithmeticError):
    """The averaged gradient of ``iteration`` holds a NaN or an infinity, on every rank alike.

    ``ranks`` are the ranks, out of ``world_size``, whose own gradient holds one; None if they are not known. With
    ``own``, it is the gradient of this rank alone, which was not averaged.
    """

    def __init__(self, iteration: int, ranks: Sequence[int] | None = None, world_size: int = 1, *, own: bool = False):
        self.iteration = iteration
        self.ranks = ranks
        self.world_size = world_size
        self.own = own
        super().__init__(iteration, ranks, world_size)

    def __str__(self) -> str:
        if self.own:
            return (
                f"this rank's own gradient of iteration {self.iteration} holds a NaN or an infinity: look at the data "
                "there, lower --lr, or leave such gradients out with --on-nonfinite skip"
            )
        return f"the averaged gradient of iteration {self.iteration} holds a NaN or an infinity: {self._advice()}"

    def _advice(self) -> str:
        if self.ranks is None or self.world_size == 1:
            return "lower --lr, or leave such gradients out with --on-nonfinite skip"
        if not self.ranks:
            return "every rank's own gradient is finite, so their sum overflows: lower --lr, or use --codec bf16"
        if len(self.ranks) == self.world_size:
            return "so does every rank's own gradient, so training has diverged: lower --lr, or try --clip-norm"
        return (
            f"so does the own gradient of {named(self.ranks)}, and of no other rank: look at the data there, "
            "or leave such gradients out with --on-nonfinite skip"
        )


class ReplicasDivergedError(RunError):
    """The true weights are not bit-identical on all ranks."""


def warn_of_line(text: str) -> None:
    """Issue a ``RuntimeWarning`` at the line of the program that has called pipesgd.

    It is issued each time: Python would show the same text of a line once, and a process may train several models.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame = frame.f_back
    warnings.warn_explicit(text, RuntimeWarning, frame.f_code.co_filename, frame.f_lineno, registry={})


def warn(text: str) -> None:
    """Print ``warning: text`` on stderr in one piece, since other ranks write to the same screen."""
    say(f"warning: {text}")
