"""Exchange of each parameter's gradient: as a whole matrix, by rows, or by factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from pipesgd.checks import check_one_of
from pipesgd.codecs.base import Codec
from pipesgd.errors import UserInputError
from pipesgd.reducers.gathering import sends_less
from pipesgd.reducers.make import GATHERING
from pipesgd.sections import REDUCES

WHOLE = "matrix"
"""Exchange of gradients that are summed whole."""

Reduce = str | Mapping[str, str]
"""One exchange for all parameters that it can exchange, or the exchange of each parameter by the parameter's name."""


class Exchanges:
    """Exchange of each parameter's gradient: "matrix", or the name of one of the reducers of ``GATHERING``.

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
            weights = GATHERING[reduce].weights(model) if reduce in GATHERING else []
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
        """Names of the reducers of ``GATHERING`` that are asked for."""
        asked = [self.reduce] if isinstance(self.reduce, str) else self._of.values()
        return set(asked) - {WHOLE}

    def apart(self) -> list[set[int]]:
        """Return the ids of the parameters that each reducer of ``GATHERING`` exchanges."""
        return [{one for one, how in self._of.items() if how == kind} for kind in GATHERING if kind in self.gathered]

    def named(self, parameters: Sequence[Tensor]) -> dict[str, str]:
        """Return the exchanges that ``reduce`` says of these parameters, by name."""
        identities = set(map(id, parameters))
        return {self._names[one]: how for one, how in self._of.items() if one in identities}


def words_of(reduce: Reduce) -> str:
    """Return ``reduce`` in words, for messages."""
    return reduce if isinstance(reduce, str) else ", ".join(f"{name} by {how}" for name, how in reduce.items())


def fewest_bytes(model: nn.Module, rows: int, codec: Codec, world_size: int) -> dict[str, str]:
    """Return what sends fewer bytes of each trained embedding and linear layer, by name, given the batch.

    The rule is that of structure-aware communication (Zhang et al., "Poseidon", USENIX ATC 2017), which knows shapes
    and the batch alone: a linear layer gathers as many factors, and an embedding as many rows, as a rank has ``rows``
    of input in an iteration. An embedding cannot have more than all of its rows, and one with sparse gradients is
    exchanged by rows whatever that sends.

    Args:
        model: the model.
        rows: rows of a layer's input on each rank in an iteration: samples, or symbols where samples are made of them.
        codec: codec of gradients that are summed whole.
        world_size: number of ranks.

    >>> from pipesgd.codecs.floats import Uncompressed
    >>> layers = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 2))
    >>> fewest_bytes(layers, 8, Uncompressed(), world_size=4)
    {'0.weight': 'factors', '1.weight': 'matrix'}
    """
    sparse = {id(one.weight) for one in model.modules() if getattr(one, "sparse", False) is True and _embeds(one)}
    kinds = {id(weight): kind for kind, one in GATHERING.items() for weight in one.weights(model)}
    chosen = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (kind := kinds.get(id(parameter))) is None:
            continue
        count = min(rows, len(parameter)) if kind == "rows" else rows
        gathers = sends_less(GATHERING[kind].part_bytes(count, parameter), parameter, codec, world_size)
        chosen[name] = kind if gathers or id(parameter) in sparse else WHOLE
    return chosen


def _embeds(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _check_named(model: nn.Module, reduce: Mapping[str, str]) -> None:
    """Raise ``UserInputError`` unless each parameter that is named can be exchanged as it says."""
    parameters = dict(model.named_parameters())
    for name, how in reduce.items():
        check_one_of(f"reduce of {name}", how, REDUCES)
        if name not in parameters:
            raise UserInputError(f"reduce must name parameters of the model; got {name!r}")
        if how in GATHERING and id(parameters[name]) not in set(map(id, GATHERING[how].weights(model))):
            raise UserInputError(f"reduce must be matrix unless {GATHERING[how].eligible}; got {name} by {how}")
