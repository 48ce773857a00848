"""pipesgd: decentralized, pipelined, ring-all-reduce training on torch.distributed.

The names in ``__all__`` are the public API. A training loop of your own needs ``Pipelined``, whose ``step`` returns a
``StepReport``, or ``LocalSteps``. ``Int8``, ``Int4``, ``Bf16``, ``Fp16`` and ``PowerSgd`` are codecs with options, as
are those in ``pipesgd.systems``; ``OwnCodec`` is for one of your own. ``Ranks`` are the ranks to work with, and the
rest are the exceptions, drawn as a tree in ``pipesgd.errors``.

The doors into other programs are modules, each imported by its name, and only where it is used:

- ``pipesgd.ddp``: ``attach`` and ``compress`` for programs with DistributedDataParallel;
- ``pipesgd.backend``: the backend "pipesgd" of any program with torch.distributed;
- ``pipesgd.lightning``: the strategy "pipesgd" of PyTorch Lightning and Fabric;
- ``pipesgd.accelerate``: ``attach`` for a loop of Accelerate;
- ``pipesgd.transformers``: ``PipesgdCallback`` for the Trainer of Transformers.

Everything else may change in any version; docs/api.md says what a version promises.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipesgd.codecs.base import OwnCodec
    from pipesgd.codecs.options import Bf16, CodecOptions, Fp16, Int4, Int8
    from pipesgd.errors import (
        CheckpointError,
        CommunicationError,
        DatasetError,
        DeadlineExceeded,
        DisagreementError,
        LeftBehind,
        NonFiniteGradientError,
        NotEnoughMembers,
        OutOfStepError,
        PeerFailed,
        PipesgdError,
        ReplicasDivergedError,
        RunError,
        StoppedBySignal,
        UserInputError,
    )
    from pipesgd.pipeline.local_steps import LocalSteps
    from pipesgd.pipeline.pipelined import Pipelined
    from pipesgd.ranks import Ranks
    from pipesgd.reducers.powersgd import PowerSgd
    from pipesgd.sections import Updates, Windows, Wire
    from pipesgd.strategy import StepReport

__all__ = [
    "Bf16",
    "CheckpointError",
    "CodecOptions",
    "CommunicationError",
    "DatasetError",
    "DeadlineExceeded",
    "DisagreementError",
    "Fp16",
    "Int4",
    "Int8",
    "LeftBehind",
    "LocalSteps",
    "NonFiniteGradientError",
    "NotEnoughMembers",
    "OutOfStepError",
    "OwnCodec",
    "PeerFailed",
    "Pipelined",
    "PipesgdError",
    "PowerSgd",
    "Ranks",
    "ReplicasDivergedError",
    "RunError",
    "StepReport",
    "StoppedBySignal",
    "Updates",
    "UserInputError",
    "Windows",
    "Wire",
]
__version__ = "0.2.0"

_HOMES = {
    "Bf16": "pipesgd.codecs.options",
    "CodecOptions": "pipesgd.codecs.options",
    "Fp16": "pipesgd.codecs.options",
    "Int4": "pipesgd.codecs.options",
    "Int8": "pipesgd.codecs.options",
    "LocalSteps": "pipesgd.pipeline.local_steps",
    "OwnCodec": "pipesgd.codecs.base",
    "Pipelined": "pipesgd.pipeline.pipelined",
    "PowerSgd": "pipesgd.reducers.powersgd",
    "Ranks": "pipesgd.ranks",
    "StepReport": "pipesgd.strategy",
    "Updates": "pipesgd.sections",
    "Windows": "pipesgd.sections",
    "Wire": "pipesgd.sections",
}
"""Modules of public names; exceptions are in ``pipesgd.errors``."""


if not TYPE_CHECKING:  # to which every name would be one of ours

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first asked for.

        The import loads torch, which takes seconds, and a command has something to do first
        (``pipesgd.process.begin``).
        """
        if name not in __all__:
            raise AttributeError(f"module 'pipesgd' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES.get(name, "pipesgd.errors")), name)


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return __all__
