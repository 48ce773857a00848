"""Layers split over the members of an island, each of which holds a share of their weights: by a plan in a file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pipesgd.checks import check_version
from pipesgd.errors import DisagreementError, UserInputError
from pipesgd.shards import is_dtensor
from pipesgd.systems.layers.passes import Passes
from pipesgd.systems.layers.plan import SEQUENCE, SPLIT, WHOLE, LayerPlan, SplitLayer, read_plan


def split_layers(model: nn.Module, mesh: Any, plan: str | Path) -> Passes:
    """Split layers of ``model`` over the ranks of ``mesh``, as the file ``plan`` says.

    Each rank keeps its share of their weights, as DTensors. The first rank's weights are the ones that count. All ranks
    of ``mesh`` call this together, before the optimizer is made and before ``fully_shard``; training with
    ``Pipelined(..., mesh=...)`` follows. They need the same samples, unless the plan has a scheme by which they pass
    theirs to each other.

    Args:
        model: the model, changed in place.
        mesh: a DeviceMesh of one dimension, that of the members of an island: ``mesh["inside"]``, for instance.
        plan: a TOML file with a table for each layer, as docs/islands.md describes it.

    Returns:
        The passes of an iteration through the split layers; without a scheme there is one, of the samples given to it.

    Raises:
        UserInputError: the mesh or the plan does not fit; the message names the layer and the rule. Nothing is changed.
        DisagreementError: ranks of ``mesh`` have different plans.
    """
    members = _size(mesh)
    agreed = _agree(mesh, functools.partial(read_plan, Path(plan), model, members))
    if agreed.devices != tuple(range(members)):
        mesh = _in_order(mesh, agreed.devices)
    first = agreed.devices.index(0)
    for layer in agreed.layers:
        module = model.get_submodule(layer.name)
        trained = {name: weights.requires_grad for name, weights in module.named_parameters()}
        _split(layer, module, mesh, first)
        for name, weights in module.named_parameters():  # torch's styles make others, not all of them frozen again
            weights.requires_grad_(trained[name])
    return Passes(mesh, agreed)


def _size(mesh: Any) -> int:
    """Return the number of ranks on ``mesh``."""
    if not hasattr(mesh, "get_coordinate"):
        raise UserInputError(f"mesh must be a DeviceMesh of torch.distributed; got {type(mesh).__name__}")
    if mesh.ndim != 1:
        shape = " x ".join(map(str, mesh.shape))
        raise UserInputError(
            f'mesh must have one dimension, that of an island\'s members (mesh["inside"]); got one of {shape} ranks'
        )
    if mesh.get_coordinate() is None:
        raise UserInputError(f"mesh must have this rank; got one of ranks {mesh.mesh.tolist()}")
    return int(mesh.size())


def _agree(mesh: Any, read: Callable[[], LayerPlan]) -> LayerPlan:
    """Return what ``read`` returns, if it does so on all ranks of ``mesh``, and returns the same."""
    plan: LayerPlan | None = None
    failure: UserInputError | None = None
    try:
        plan = read()
    except UserInputError as error:
        failure = error
    everybody: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everybody, (plan, None if failure is None else str(failure)), group=mesh.get_group())
    if failure is not None:
        raise failure
    for rank, (other, problem) in zip(mesh.mesh.tolist(), everybody, strict=True):
        if problem is not None:
            raise UserInputError(f"rank {rank}: {problem}")
        if other != everybody[0][0]:
            raise DisagreementError(
                f"plan must be the same on all ranks of an island; got another one on rank {rank} than on rank "
                f"{mesh.mesh[0]}"
            )
    assert plan is not None
    return plan


def _in_order(mesh: Any, devices: tuple[int, ...]) -> Any:
    """Return a mesh of the same ranks, in the order of ``devices``."""
    from torch.distributed.device_mesh import DeviceMesh

    check_version("torch", "2.13", "devices in a plan of layers")
    ranks = mesh.mesh[list(devices)].tolist()
    group = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False)
    return DeviceMesh.from_group(group, mesh.device_type)


def _split(layer: SplitLayer, module: nn.Module, mesh: Any, first: int) -> None:
    """Split ``module`` over the ranks of ``mesh``, the ``first`` of which has the weights that count."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    if layer.style == "split-filters":
        _split_filters(module, mesh, first, layer)
        return
    forms = {WHOLE: Replicate(), SPLIT: Shard(-1), SEQUENCE: Shard(1)}
    entering, leaving = forms[layer.input], forms[layer.output]
    styles = {
        "colwise": ColwiseParallel(input_layouts=entering, output_layouts=leaving),
        "rowwise": RowwiseParallel(input_layouts=entering, output_layouts=leaving),
        "sequence": SequenceParallel(use_local_output=True),
    }
    parallelize_module(module, mesh, styles[layer.style], src_data_rank=first)


# ---- Filters of convolutions


def _split_filters(convolution: Any, mesh: Any, first: int, layer: SplitLayer) -> None:
    """Leave this rank its share of the filters, which computes its share of the output's channels."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, weights in list(convolution.named_parameters(recurse=False)):
        shares = distribute_tensor(weights.detach(), mesh, [Shard(0)], src_data_rank=first)
        convolution.register_parameter(name, nn.Parameter(shares))
    in_groups = convolution.groups > 1
    if in_groups:
        convolution.groups //= mesh.size()  # those of this rank's filters, which torch's own computation reads
    convolution._conv_forward = functools.partial(
        _convolve, convolution._conv_forward, layer.input, layer.output, in_groups
    )


def _convolve(
    own: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    entering: str,
    leaving: str,
    in_groups: bool,
    inputs: Tensor,
    weights: Any,
    bias: Any,
) -> Tensor:
    """Convolve ``inputs`` with this rank's filters, by torch's ``own`` function; take and give channels in these forms.

    Filters in groups read only channels of their group, so that a rank needs only its share of the channels. Others
    read all channels, and the gradient of these is the sum over the members.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = weights.device_mesh
    channels = Shard(inputs.dim() - weights.dim() + 1)  # the first dimension is missing if there is one sample alone
    forms = {WHOLE: Replicate(), SPLIT: channels}
    given: Any = inputs  # a DTensor if they are the activations of a pass
    if not is_dtensor(inputs):
        given = DTensor.from_local(inputs, mesh, [forms[entering]], run_check=False)
    wanted = (channels,) if in_groups else (Replicate(),)
    if given.placements != wanted:
        given = given.redistribute(placements=wanted)
    read = given.to_local(grad_placements=wanted if in_groups else [Partial()])
    shares = own(read, weights.to_local(), None if bias is None else bias.to_local())
    outputs = DTensor.from_local(shares, mesh, [channels], run_check=False)
    return outputs.redistribute(placements=[forms[leaving]]).to_local()
