"""A plan of how layers are split over the members of an island: a TOML file, read and checked against the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pipesgd.checks import check_one_of, did_you_mean, one_of
from pipesgd.errors import UserInputError
from pipesgd.shards import is_dtensor, layout
from pipesgd.toml_file import read_toml

WHOLE, SPLIT, SEQUENCE = "whole", "split", "sequence"
"""Forms of a layer's input or output: whole on every member; or each member's share of it, along the layer's features
(channels of a convolution), or along a sequence, the second dimension."""
GATHER, TURNS, PORTIONS = SCHEMES = ("gather", "turns", "portions")
"""Schemes by which members with samples of their own pass them through the split layers: all of them at once; those of
one member after the other; or a portion of each member's in every pass."""


@dataclass(frozen=True)
class Fit:
    """A kind of layer that a style can split, and how."""

    kind: type[nn.Module]
    divided: str
    """Attribute of the layer that the members divide; empty if each of them holds all weights."""
    inputs: tuple[str, ...]
    """Forms that the input may have; the first one is the default."""
    outputs: tuple[str, ...]
    """Forms that the output may have; the first one is the default."""


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
STYLES: dict[str, tuple[Fit, ...]] = {
    "colwise": (
        Fit(nn.Linear, "out_features", (WHOLE, SPLIT, SEQUENCE), (SPLIT, WHOLE)),
        Fit(nn.Embedding, "embedding_dim", (WHOLE,), (SPLIT, WHOLE)),
    ),
    "rowwise": (
        Fit(nn.Linear, "in_features", (SPLIT, WHOLE), (WHOLE, SEQUENCE)),
        Fit(nn.Embedding, "num_embeddings", (WHOLE,), (WHOLE, SEQUENCE)),
    ),
    "sequence": tuple(Fit(kind, "", (SEQUENCE,), (SEQUENCE,)) for kind in (nn.LayerNorm, nn.RMSNorm)),
    "split-filters": tuple(Fit(kind, "out_channels", (WHOLE, SPLIT), (WHOLE, SPLIT)) for kind in _CONVOLUTIONS),
}
"""Layers that each style splits. All but ``split-filters`` are torch's."""


@dataclass(frozen=True)
class SplitLayer:
    """A layer to split."""

    name: str
    """The module's name in the model."""
    style: str
    input: str
    output: str


@dataclass(frozen=True)
class LayerPlan:
    """The layers of a model to split, and who holds which share."""

    devices: tuple[int, ...]
    """Members of an island in the order in which they hold the shares of a layer."""
    layers: tuple[SplitLayer, ...]
    """Layers to split, in the order of the model."""
    scheme: str | None = None
    """Scheme of passing samples, one of ``SCHEMES``; None if members have the same samples, or no layer is split."""
    update_period: int = 1
    """Passes through the split layers from one update of their weights to the next."""


def read_plan(path: Path, model: nn.Module, members: int) -> LayerPlan:
    """Return the plan in the file ``path``, for ``model`` and islands of this many ``members``.

    Raises:
        UserInputError: the file is not a plan, or does not fit; the message names the layer and the rule.
    """
    table = read_toml("plan", path)
    _check_keys(f"key in {path}", table, ("layers", "devices", "scheme", "update_period"))
    tables = table.get("layers")
    if not isinstance(tables, dict):
        raise UserInputError(f'plan must name layers, each as [layers."NAME"]; got none in {path}')
    if not tables:
        return _without_layers(table, members)
    if stray := [key for key, value in tables.items() if not isinstance(value, dict)]:
        raise UserInputError(f'plan must name layers, each as [layers."NAME"]; got {stray[0]} in {path}')
    modules = dict(model.named_modules())
    layers: dict[str, SplitLayer] = {}
    for pattern, fields in _tables_by_name(tables):
        names = [name for name in modules if _matches(name, pattern)]
        if not names:
            hint = did_you_mean(pattern, list(modules))
            raise UserInputError(f"layer {pattern} must be a module of the model; got no module of this name{hint}")
        for name in names:
            if name in layers:
                raise UserInputError(f"layer {name} must be named once; got it again by {pattern}")
            layers[name] = _layer(name, modules[name], fields, members)
            _check_weights(name, modules)
    in_order = [layers[name] for name in modules if name in layers]
    if in_order[-1].output != WHOLE:
        raise UserInputError(
            f"output of layer {in_order[-1].name} must be whole where no layer of the plan follows, since a cost needs "
            f"whole outputs; got {in_order[-1].output}"
        )
    _check_between(modules, layers)
    devices = _devices(table.get("devices", list(range(members))), members)
    return LayerPlan(devices, tuple(in_order), *_scheme(table, members))


def _check_between(modules: Mapping[str, nn.Module], layers: Mapping[str, SplitLayer]) -> None:
    """Refuse a layer with weights that is not in the plan between two of it that pass shares on, in the model's order.

    Its gradient would be that of a share on each member, and nothing would add them up.
    """
    before: SplitLayer | None = None
    for name, module in modules.items():
        if name in layers:
            before = layers[name]
        elif before is not None and before.output != WHOLE and any(True for _ in module.parameters(recurse=False)):
            raise UserInputError(
                f"layer {name} must be in the plan, or follow a layer whose output is whole, since it has weights; got "
                f"output {before.output} of layer {before.name}"
            )


def _tables_by_name(table: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the layers in ``table``, by names in which a dot may be one of TOML or in quotes."""
    fields = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if fields or not table:
        yield name, fields
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _tables_by_name(value, f"{name}.{key}" if name else key)


def _matches(name: str, pattern: str) -> bool:
    """Return True if ``name`` is ``pattern``, in which each "*" is for one or more characters between two dots."""
    parts, patterns = name.split("."), pattern.split(".")
    return (
        bool(name) == bool(pattern) and len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
    )


def _layer(name: str, module: nn.Module, fields: Mapping[str, Any], members: int) -> SplitLayer:
    _check_keys(f"key of layer {name}", fields, ("style", "input", "output"))
    if "style" not in fields:
        raise UserInputError(f"layer {name} must have a style, {one_of(list(STYLES))}; got none")
    style = str(fields["style"])
    check_one_of(f"style of layer {name}", style, list(STYLES))
    fit = _fit(name, module, style)
    forms = {}
    for end, choices in (("input", fit.inputs), ("output", fit.outputs)):
        forms[end] = str(fields.get(end, choices[0]))
        check_one_of(f"{end} of layer {name} in style {style}", forms[end], choices)
    among = f"the {members} members of an island"
    if fit.divided and getattr(module, fit.divided) % members:
        got = getattr(module, fit.divided)
        raise UserInputError(f"{fit.divided} of layer {name} must be a multiple of {among}; got {got}")
    groups = getattr(module, "groups", 1)
    if groups != 1 and groups % members:
        raise UserInputError(f"groups of layer {name} must be 1, or a multiple of {among}; got {groups}")
    return SplitLayer(name, style, forms["input"], forms["output"])


def _fit(name: str, module: nn.Module, style: str) -> Fit:
    kind = type(module)
    if any(base.__module__ == "torch.nn.modules.loss" for base in kind.__mro__):
        raise UserInputError(
            f"layer {name} must not be split, since it is a cost layer ({kind.__name__}); got style {style} (without "
            "one, every member computes the cost)"
        )
    for fit in STYLES[style]:
        if isinstance(module, fit.kind):
            return fit
    styles = [other for other, fits in STYLES.items() if any(isinstance(module, fit.kind) for fit in fits)]
    raise UserInputError(
        f"layer {name} must be {one_of([fit.kind.__name__ for fit in STYLES[style]])} for style {style}; got "
        f"{kind.__name__}{f' (its style may be {one_of(styles)})' if styles else ''}"
    )


def _check_weights(name: str, modules: Mapping[str, nn.Module]) -> None:
    """Refuse a layer whose weights are spread over ranks already, or are those of another layer, too."""
    for of_layer, weights in modules[name].named_parameters(recurse=False):
        if is_dtensor(weights):
            raise UserInputError(
                f"layer {name} must not be split already, and must be split before fully_shard; got {of_layer} as "
                f"{layout(weights)}"
            )
        for other, module in modules.items():
            if other != name and any(weights is one for one in module.parameters(recurse=False)):
                raise UserInputError(
                    f"layer {name} must have weights of its own; got {of_layer}, which layer {other} has, too"
                )


def _check_keys(what: str, table: Collection[str], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise UserInputError(f"every {what} must be {one_of(known)}; got {key!r}{did_you_mean(key, known)}")


def _devices(order: Any, members: int) -> tuple[int, ...]:
    are_numbers = isinstance(order, list) and all(type(one) is int for one in order)
    if not are_numbers or sorted(order) != list(range(members)):
        twice = [one for one in order if order.count(one) > 1] if are_numbers else []
        raise UserInputError(
            f"devices must name each of the {members} members of an island once, by a number from 0 to {members - 1}; "
            f"got {order}{f', with {twice[0]} twice' if twice else ''}"
        )
    return tuple(order)


# ---- Samples of the members


def number_of_passes(scheme: str | None, members: int) -> int:
    """Return how often an iteration goes forwards and backwards through the split layers.

    References:
        Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, section 4.

    >>> number_of_passes("gather", 4), number_of_passes("turns", 4), number_of_passes(None, 4)
    (1, 4, 1)
    """
    return members if scheme in (TURNS, PORTIONS) else 1


def rows_of_passes(scheme: str, members: int, samples: int) -> list[list[slice]]:
    """Return, for each pass and member, which of the member's ``samples`` are in the pass.

    With "portions", ``samples`` are a multiple of ``members``.

    >>> rows_of_passes("turns", 2, 6)
    [[slice(0, 6, None), slice(0, 0, None)], [slice(0, 0, None), slice(0, 6, None)]]
    >>> rows_of_passes("portions", 2, 6)
    [[slice(0, 3, None), slice(0, 3, None)], [slice(3, 6, None), slice(3, 6, None)]]
    """
    if scheme == TURNS:
        every, none = slice(0, samples), slice(0, 0)
        return [[every if member == turn else none for member in range(members)] for turn in range(members)]
    passes = number_of_passes(scheme, members)
    portion = samples // passes
    return [[slice(number * portion, (number + 1) * portion)] * members for number in range(passes)]


def _scheme(table: Mapping[str, Any], members: int) -> tuple[str | None, int]:
    """Return the scheme and the update period of a plan."""
    if "scheme" not in table:
        if "update_period" in table:
            raise UserInputError(f"update_period must be left out without a scheme; got {table['update_period']}")
        return None, 1
    scheme = str(table["scheme"])
    check_one_of("scheme", scheme, SCHEMES)
    passes = number_of_passes(scheme, members)
    period = table.get("update_period", passes)
    if type(period) is not int or period < 1 or passes % period:
        raise UserInputError(
            f"update_period must divide the {passes} backward {'pass' if passes == 1 else 'passes'} of an iteration "
            f"with scheme {scheme}; got {period}"
        )
    return scheme, period


def _without_layers(table: Mapping[str, Any], members: int) -> LayerPlan:
    """Return the plan that splits nothing, so that every member has the whole model."""
    for key in table:
        if key != "layers":
            raise UserInputError(f"{key} must be left out where no layer is split; got {table[key]}")
    return LayerPlan(tuple(range(members)), ())
