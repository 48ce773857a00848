"""Exchange of each parameter's gradient: as a whole matrix, by rows, or by factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from pipesgd.checks import check_one_of
from pipesgd.errors import UserInputError
from pipesgd.pipeline.in_flight import WHOLE
from pipesgd.reducers.make import GATHERING, gathering
from pipesgd.sections import REDUCES

Reduce = str | Mapping[str, str]
"""One exchange for all parameters that it can exchange, or the exchange of each parameter by the parameter's name."""


class Exchanges:
    """Exchange of each parameter's gradient: "matrix", or the name of one of ``GATHERING``.

    Args:
        model: the model.
        reduce: "matrix" for all parameters; one of ``GATHERING`` for those that it can exchange; or the exchange of
            each parameter by its name in the model. What is not named is summed whole.

    Raises:
        UserInputError: there is no such exchange or parameter, or the one cannot exchange the other.
    """

    def __init__(self, model: nn.Module, reduce: Reduce):
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        if isinstance(reduce, str):
            check_one_of("reduce", reduce, REDUCES)
            weights = gathering(reduce).weights(model) if reduce in GATHERING else []
            self._of = {id(weight): reduce for weight in weights}
        else:
            _check_named(model, reduce)
            self._of = {one: reduce[name] for one, name in self._names.items() if name in reduce}
        self.reduce: Reduce = reduce if isinstance(reduce, str) else dict(reduce)

    def of(self, parameter: Tensor) -> str:
        """Return the exchange of a parameter."""
        return self._of.get(id(parameter), WHOLE)

    @property
    def gathered(self) -> set[str]:
        """Names of ``GATHERING`` that are asked for."""
        asked = [self.reduce] if isinstance(self.reduce, str) else self._of.values()
        return set(asked) - {WHOLE}

    def apart(self) -> list[set[int]]:
        """Return the ids of the parameters that each of ``GATHERING`` exchanges."""
        return [{one for one, how in self._of.items() if how == kind} for kind in GATHERING if kind in self.gathered]

    def named(self, parameters: Sequence[Tensor]) -> dict[str, str]:
        """Return the exchanges that ``reduce`` says of these parameters, by name."""
        identities = set(map(id, parameters))
        return {self._names[one]: how for one, how in self._of.items() if one in identities}


def words_of(reduce: Reduce) -> str:
    """Return ``reduce`` in words, for messages."""
    return reduce if isinstance(reduce, str) else ", ".join(f"{name} by {how}" for name, how in reduce.items())


def _check_named(model: nn.Module, reduce: Mapping[str, str]) -> None:
    """Raise ``UserInputError`` unless each parameter that is named can be exchanged as it says."""
    parameters = dict(model.named_parameters())
    for name, how in reduce.items():
        check_one_of(f"reduce of {name}", how, REDUCES)
        if name not in parameters:
            raise UserInputError(f"reduce must name parameters of the model; got {name!r}")
        if how in GATHERING and id(parameters[name]) not in set(map(id, gathering(how).weights(model))):
            raise UserInputError(f"reduce must be matrix unless {gathering(how).eligible}; got {name} by {how}")
