"""The exceptions of pipesgd.

::

    PipesgdError
    ├── UserInputError (ValueError)                the input was wrong: one line, exit code 2
    │   ├── DatasetError                           missing, truncated or foreign data files
    │   ├── CheckpointError                        the run to continue is another one
    │   └── DisagreementError                      the ranks were started with different options
    └── RunError (RuntimeError)                    the run failed: exit code 1
        ├── CommunicationError (ConnectionError)   a peer was lost
        │   └── DeadlineExceeded (TimeoutError)    a peer did not answer within the deadline
        ├── NonFiniteGradientError                 NaN or infinity in an averaged gradient
        └── ReplicasDivergedError                  the true weights differ between ranks
"""

from __future__ import annotations


class PipesgdError(Exception):
    """Base of every exception that pipesgd raises on purpose."""


class UserInputError(PipesgdError, ValueError):
    """What the user asked for cannot be done; the message says what must hold and what was got."""

    known_to_all: bool = False
    """Whether all ranks raise it together, so that rank 0 alone needs to say it."""


class DatasetError(UserInputError):
    """Data files are missing, truncated, or not what they should be."""


class CheckpointError(UserInputError):
    """The run that is to be continued had another model, world size or configuration."""


class DisagreementError(UserInputError):
    """The ranks were started with different options: said by every rank, since each may have its own screen."""

    known_to_all = True


class RunError(PipesgdError, RuntimeError):
    """A run that had started could not go on."""


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

    def __str__(self) -> str:
        where = f"rank {self.rank}: {self.operation}"
        if self.peer is not None:
            where += f" with rank {self.peer}"
        if self.iteration is not None:
            where += f" in iteration {self.iteration}"
        return f"{where} failed: {self.reason}"


class DeadlineExceeded(CommunicationError, TimeoutError):  # noqa: N818 (the name that torch and grpc users know)
    """The peer is there as far as we know, but was silent for the whole deadline."""


class NonFiniteGradientError(RunError, ArithmeticError):
    """The averaged gradient of ``iteration`` holds a NaN or an infinity, on every rank alike."""

    def __init__(self, iteration: int):
        self.iteration = iteration
        super().__init__(iteration)

    def __str__(self) -> str:
        return (
            f"the averaged gradient of iteration {self.iteration} holds a NaN or an infinity: lower --lr, "
            "or leave such gradients out with --on-nonfinite skip"
        )


class ReplicasDivergedError(RunError):
    """The true weights are not bit-identical on all ranks."""
