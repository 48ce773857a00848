"""Layers whose gradients are late, where those of the others are not: on simulated ranks alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def late_layers(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments without a ``--late``, which ``pipesgd.train`` does not have, and the layers that it names.

    Gradients of the other layers are not late, at any width; without ``--late``, all are.
    """
    if "--late" not in arguments:
        return arguments, None
    number = arguments.index("--late")
    return arguments[:number] + arguments[number + 2 :], arguments[number + 1].split(",")


def layers_of(model: nn.Module) -> list[str]:
    """Return the names of the layers that have parameters, in the model's order; of a ``Sequential``, those in it.

    >>> layers_of(nn.ModuleDict({"first": nn.Linear(1, 1), "rest": nn.Sequential(nn.ReLU(), nn.Linear(1, 1))}))
    ['first', 'rest.1']
    """
    found = []
    for name, child in model.named_children():
        inside = layers_of(child) if isinstance(child, nn.Sequential) else []
        found += [f"{name}.{one}" for one in inside] or [name] * any(True for _ in child.parameters())
    return found


def share_of(layers: Sequence[str], model: nn.Module) -> float:
    """Return the share of the model's values that is in these layers.

    >>> share_of(["1"], nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2)))
    0.6
    """
    others = not_in(layers, model)
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    return 1.0 - sum(sizes[one] for one in others) / sum(sizes.values())


def not_in(layers: Sequence[str], model: nn.Module) -> set[int]:
    """Return the ids of the model's parameters that are in none of these layers."""
    unknown = set(layers) - set(layers_of(model))
    assert not unknown, f"no such layers: {unknown}"
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if not any(name.startswith(f"{layer}.") for layer in layers)
    }
