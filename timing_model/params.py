"""The parameters of the formulas, under the paper's letters."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinkParams:
    """What a link and the ranks at its ends cost. All at least 0 and finite."""

    alpha: float
    """Latency, in s per message."""
    beta: float
    """Transfer, in s per byte."""
    gamma: float
    """Reduction, in s per byte summed."""
    sync: float
    """Fixed cost of one collective (S), in s."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} must be finite and at least 0; got {value}")
