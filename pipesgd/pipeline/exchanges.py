"""Choice of how the gradient of each parameter is exchanged: as a whole matrix, by rows, or by factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from pipesgd.codecs.base import Codec
from pipesgd.pipeline.factor_hooks import FactorHooks
from pipesgd.reducers.factors import NOT_THE_PRODUCT, checked_rows
from pipesgd.reducers.gathering import sends_less
from pipesgd.reducers.make import GATHERING
from pipesgd.reducers.rows import rows_of

CANNOT = -1
"""Number of pieces that stands for a gradient that cannot be gathered."""


class Exchanges:
    """Exchange of each parameter's gradient: "matrix", or the name of one of the reducers of ``GATHERING``.

    Args:
        model: the model.
        reduce: "matrix" for all parameters; one of ``GATHERING`` for those that it can exchange; or "auto" for what
            sends fewer bytes of the first gradient, which is chosen for each of them.
        choices: choices of "auto" so far, by the parameters' ids.
    """

    def __init__(self, model: nn.Module, reduce: str, choices: Mapping[int, str] | None = None):
        self.reduce = reduce
        self._model = model
        kinds = [kind for kind in GATHERING if reduce in (kind, "auto")]
        self._weights = {kind: GATHERING[kind].weights(model) for kind in kinds}
        self.kinds = {id(weight): kind for kind, weights in self._weights.items() for weight in weights}
        """Reducer of ``GATHERING`` that may exchange a parameter, by the parameter's id."""
        # Of weights that the model no longer has, choices are dropped: a later one may get the id.
        self.choices = {one: how for one, how in (choices or {}).items() if one in self.kinds}

    def again(self, choices: Mapping[int, str] | None = None) -> Exchanges:
        """Return the exchanges of the model as it is now, with ``choices``, or those that were made."""
        return Exchanges(self._model, self.reduce, self.choices if choices is None else choices)

    def of(self, parameter: Tensor) -> str:
        """Return the exchange of a parameter; "matrix" while it is undecided."""
        kind = self.kinds.get(id(parameter))
        if kind is None:
            return "matrix"
        return self.choices.get(id(parameter), "matrix") if self.reduce == "auto" else kind

    def undecided(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return those of ``parameters`` whose exchange is still to be chosen."""
        if self.reduce != "auto":
            return []
        return [one for one in parameters if id(one) in self.kinds and id(one) not in self.choices]

    def apart(self) -> list[set[int]]:
        """Return the ids of the parameters that each reducer of ``GATHERING`` exchanges."""
        return [{id(one) for one in weights if self.of(one) == kind} for kind, weights in self._weights.items()]

    def possible(self) -> set[int]:
        """Return the ids of the parameters that are gathered, or may be."""
        return {one for one in self.kinds if self.choices.get(one) != "matrix"}

    def by_factors(self) -> list[Tensor]:
        """Return the parameters that are exchanged by factors, or may be."""
        weights = self._weights.get("factors", [])
        undecided = set(map(id, self.undecided(weights)))
        return [one for one in weights if id(one) in undecided or self.of(one) == "factors"]

    def named(self, parameters: Sequence[Tensor]) -> dict[str, str]:
        """Return the exchanges of those of ``parameters`` that have a choice, by name; none while one is undecided."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        if self.undecided(parameters):
            return {}
        return {names[id(one)]: self.of(one) for one in parameters if id(one) in self.kinds}

    def choose(self, parameter: Tensor, counts: Sequence[int | None], codec: Codec, world_size: int) -> None:
        """Choose for a parameter by ``counts``: each rank's pieces of the gradient, ``CANNOT``, or None without one.

        What has a gradient on no rank is exchanged whole: nothing is known of it.
        """
        kind = self.kinds[id(parameter)]
        known = [count for count in counts if count is not None]
        part_bytes = GATHERING[kind].part_bytes(max(known, default=0), parameter)
        gathers = known and CANNOT not in known and sends_less(part_bytes, parameter, codec, world_size)
        self.choices[id(parameter)] = kind if gathers else "matrix"


def pieces_of(parameter: Tensor, kind: str, hooks: FactorHooks, scale: float) -> int | None:
    """Return the number of rows, or of rows of factors, of the gradient in ``.grad`` if any, or ``CANNOT``.

    Args:
        parameter: the parameter.
        kind: reducer of ``GATHERING`` that may exchange it.
        hooks: what keeps the factors, if ``kind`` is that of factors.
        scale: loss scale of the gradient.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if kind == "rows":
        return len(rows_of(gradient.to_dense()))
    factors = hooks.look(parameter)
    return CANNOT if checked_rows(gradient, factors, scale) == NOT_THE_PRODUCT else len(factors)
