"""Notices of writes to predicted weights, which will be lost; and values that torch keeps of weights, dropped.

A change in place counts up a parameter's version, which is looked at whenever predicted weights leave. A write through
``.data`` counts nothing up, so now and then a sum of the bits is compared, too: in iterations 1, 2, 4, 8, ..., which
takes next to no time, and notices a habit of the loop by the time that it is as old as the training was before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipesgd.shards import local

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Notices:
    """A look, once for all, at whether ``parameters`` are written while they hold predicted weights.

    Attributes:
        tell: function that is called with the first parameter that was written; None looks no more.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.tell: Callable[[Tensor], None] | None = None
        self._parameters = parameters
        self._predictions = 0
        self._versions: list[int] | None = None
        """Versions of the parameters when they were given predicted weights; None while nothing is expected of them."""
        self._sums: list[Tensor] = []
        """Sums of the bits of those weights, if they are to be compared, too."""

    def begin(self) -> None:
        """Expect from now on that nobody writes to the weights that the parameters hold, a new prediction."""
        if self.tell is not None:
            self._predictions += 1
            self._note(with_values=self._predictions & (self._predictions - 1) == 0)

    def begin_again(self) -> None:
        """Expect the same of the weights of that prediction, which the parameters hold again."""
        if self._versions is not None:
            self._note(with_values=bool(self._sums))

    def look(self) -> None:
        """Tell, once, of a parameter that was written since then; the parameters must still hold those weights."""
        if self._versions is None or self.tell is None:
            return
        written = (
            one for one, version in zip(self._parameters, self._versions, strict=True) if one._version != version
        )
        found = next(written, None)
        if found is None and self._sums:
            same = torch.stack(self._sums).eq(torch.stack(_sums_of_bits(self._parameters))).tolist()
            found = next((one for one, is_same in zip(self._parameters, same, strict=True) if not is_same), None)
        if found is not None:
            tell, self.tell = self.tell, None
            self.end()
            tell(found)

    def end(self) -> None:
        """Expect nothing any more, until the next prediction."""
        self._versions = None
        self._sums = []

    def _note(self, *, with_values: bool) -> None:
        self._versions = [parameter._version for parameter in self._parameters]
        self._sums = _sums_of_bits(self._parameters) if with_values else []


def forget_computed_from_weights() -> None:
    """Drop what torch keeps of values that it has computed from weights, which are others from now on.

    That is the casts of an open block of ``torch.autocast``, and the weights of an open ``parametrize.cached``.
    """
    torch.clear_autocast_cache()
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    if parametrize is not None:
        parametrize._cache.clear()


def _sums_of_bits(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a sum of the bits of each parameter, int64, which nearly any change of a value changes."""
    parts = [local(parameter).detach() for parameter in parameters]
    real = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return [part.view(_INTEGERS[part.itemsize]).sum() for part in real]
