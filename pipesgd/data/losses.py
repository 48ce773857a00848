"""Losses by name. A loss is a function of a model's outputs and the targets, which returns their mean loss."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional

from pipesgd.config import LOSSES
from pipesgd.errors import UserInputError
from pipesgd.functions import check_function, function_of, kind


class Loss(Protocol):
    """A function of outputs and targets. Accuracy is measured if it has an attribute ``correct``, another function."""

    def __call__(self, outputs: Any, targets: Any, /) -> Tensor:
        """Return the mean loss of a batch, a scalar."""


IGNORED = -100
"""Label of a prediction that does not count, such as padding: torch's default."""


class CrossEntropy:
    """Cross-entropy, in nats, of logits (B, classes) or (B, T, classes) and labels, int64 (B,) or (B, T).

    Labels may be ``IGNORED``.
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over all labels that count; NaN if there is none.

        Raises:
            UserInputError: labels and logits do not have the same shape, or, on a CPU, a label is no class.
        """
        logits, labels = _by_label(logits, labels)
        try:
            return functional.cross_entropy(logits, labels, ignore_index=IGNORED)
        except IndexError:
            classes = logits.shape[1]
            wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
            raise UserInputError(
                f"labels must be 0 to {classes - 1}, or {IGNORED} for those that do not count; got {wrong[0].item()}"
            ) from None

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return, for each label that counts, whether it got the largest logit: bool (number of these labels,)."""
        logits, labels = _by_label(logits, labels)
        return (logits.argmax(dim=1) == labels)[labels != IGNORED]


CROSS_ENTROPY = CrossEntropy()


def _by_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (N, classes) and labels (N,), whether there is one label per sample or one per byte of a sample."""
    predictions, asked = ([size for size in shape if size > 1] for shape in (logits.shape[:-1], labels.shape))
    if predictions != asked:  # torch's own layout, (B, classes, T), can have as many numbers
        raise UserInputError(
            f"labels must have the shape of the logits without their last dimension, the classes, "
            f"{tuple(logits.shape[:-1])}; got {tuple(labels.shape)}"
        )
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
