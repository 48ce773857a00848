"""Checks of callers' values; an error is one clear line that names the field."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

import numpy as np


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number of at least ``least``."""
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{name} must be finite and at least {least:g}; got {value}")


def check_above_0(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number above 0."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be finite and above 0; got {value}")


def check_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ``ValueError``, which names the nearest choice, unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value}{did_you_mean(value, choices)}")


def did_you_mean(value: str, choices: Sequence[str]) -> str:
    """Return a clause that names the choice nearest to ``value``, empty if none is near."""
    by_lower = {choice.lower(): choice for choice in reversed(choices)}
    near = difflib.get_close_matches(value.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[near[0]]}?)" if near else ""


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value}")
