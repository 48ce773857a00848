"""State as optimizers and schedules have it: values in dicts, lists and tuples, which may be nested."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np


def changed(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``state`` with ``change(value)`` in place of each value, and of each key of its dicts.

    >>> changed({"a": [1, (2, 3)]}, str)
    {'a': ['1', ('2', '3')]}
    """
    if isinstance(state, dict):
        made = copy.copy(state)  # of the same kind and attributes, as torch's state_dict of a model has them
        made.clear()
        made.update({changed(key, change): changed(value, change) for key, value in state.items()})
        return made
    if type(state) in (list, tuple):  # a named tuple, or torch.Size, is a value
        return type(state)(changed(one, change) for one in state)
    return change(state)


def loadable(state: Any) -> Any:
    """Return ``state`` with Python's numbers in place of NumPy's, which torch saves but refuses to load.

    A schedule that computes with NumPy leaves such a learning rate in the optimizer.

    >>> loadable({"betas": (np.float64(0.5), np.float32(0.75))})
    {'betas': (0.5, 0.75)}
    """
    return changed(state, lambda value: value.item() if isinstance(value, np.generic) else value)
