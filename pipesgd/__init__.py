"""pipesgd: decentralized, pipelined, ring-all-reduce training on torch.distributed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipesgd.codecs.options import CodecOptions
    from pipesgd.errors import (
        CommunicationError,
        DeadlineExceeded,
        DisagreementError,
        NonFiniteGradientError,
        OutOfStepError,
        PipesgdError,
        RunError,
        UserInputError,
    )
    from pipesgd.pipeline.local_steps import LocalSteps
    from pipesgd.pipeline.pipelined import Pipelined
    from pipesgd.ranks import Ranks

__all__ = [
    "CodecOptions",
    "CommunicationError",
    "DeadlineExceeded",
    "DisagreementError",
    "LocalSteps",
    "NonFiniteGradientError",
    "OutOfStepError",
    "Pipelined",
    "PipesgdError",
    "Ranks",
    "RunError",
    "UserInputError",
]
__version__ = "0.1.0.dev0"

_HOMES = {
    "CodecOptions": "pipesgd.codecs.options",
    "LocalSteps": "pipesgd.pipeline.local_steps",
    "Pipelined": "pipesgd.pipeline.pipelined",
    "Ranks": "pipesgd.ranks",
}
"""Modules of public names; exceptions are in ``pipesgd.errors``."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for.

    The import loads torch, which takes seconds, and a command has something to do first (``pipesgd.process.begin``).
    """
    if name not in __all__:
        raise AttributeError(f"module 'pipesgd' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "pipesgd.errors")), name)
