"""Losses by name. A loss is a function of a model's outputs and the targets, which returns their mean loss."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional

from pipesgd.config import LOSSES
from pipesgd.functions import check_function, function_of, kind


class Loss(Protocol):
    """A function of outputs and targets. Accuracy is measured if it has an attribute ``correct``, another function."""

    def __call__(self, outputs: Any, targets: Any, /) -> Tensor:
        """Return the mean loss of a batch, a scalar."""


class CrossEntropy:
    """Cross-entropy, in nats, of logits (B, classes) or (B, T, classes) and labels, int64 (B,) or (B, T)."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over all labels."""
        return functional.cross_entropy(*_by_label(logits, labels))

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return, for each label, whether it got the largest logit: bool (number of labels,)."""
        logits, labels = _by_label(logits, labels)
        return logits.argmax(dim=1) == labels


CROSS_ENTROPY = CrossEntropy()


def _by_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (N, classes) and labels (N,), whether there is one label per sample or one per byte of a sample."""
    return logits.flatten(0, -2), labels.flatten()


@functools.cache
def find_loss(name: str) -> Loss:
    """Return the loss ``name``, one of ``LOSSES``.

    Raises:
        UserInputError: the name is unknown, or the function cannot be imported.
    """
    check_function("loss", name, kind(name), LOSSES)
    loss: Loss = function_of("loss", name, {"cross-entropy": CROSS_ENTROPY})
    return loss
