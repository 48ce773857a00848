"""Islands: replicas of the model of which each of several ranks holds a part.

Inside an island the model is split by torch (``parallelize_module``, ``fully_shard``), over fast links. Ranks that hold
the same part of every island form a ring of their own, over the slow links between islands. What concerns a replica as
a whole (norms of gradients, their agreement with means, whether all values are finite) is added up over its members.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesgd.comm.connections import Connections
from pipesgd.comm.transport import Group
from pipesgd.errors import UserInputError, named
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.pipeline_config import Buffers
from pipesgd.ranks import Ranks, among
from pipesgd.replicas import combine_buffers, share_rank_0s_values, sum_buffer
from pipesgd.shards import gathering_modules, is_dtensor, layout, local_gradient, place, ranks_of, sharded_dimensions

OF_WHOLE_MATRICES = (torch.optim.Muon, torch.optim.Adafactor)
"""torch's optimizers whose update of a value depends on others of its matrix, of which a rank may hold a part. Those
of our own say so by an attribute ``of_whole_matrices``."""
WITH_ISLANDS = "with a mesh of islands"
ALIKE = 1e-3
"""Most by which norms of the same gradient differ between members, relative to it: rounding is far below, and gradients
of other samples are far above."""


class Island:
    """A replica of which each member holds shards, and all hold what is not sharded.

    Args:
        mesh: ranks of all islands; the first dimension is the one between islands.
        model: the model, of which some parameters are DTensors.
        parameters: the parameters that are trained.
        optimizer: the optimizer that updates them, value by value.

    Raises:
        UserInputError: ``mesh``, a parameter or the optimizer does not fit; the message names it and the rule.
    """

    def __init__(self, mesh: Any, model: nn.Module, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer):
        self._numbers = _members_on(mesh)
        sharded = [parameter for parameter in parameters if sharded_dimensions(parameter)]
        if not sharded:
            raise UserInputError(
                "mesh must be left out unless the optimizer's parameters are sharded over its inner dimensions (by "
                "parallelize_module or fully_shard, before the optimizer is made); got none that is"
            )
        self._check(model, parameters)
        if isinstance(optimizer, OF_WHOLE_MATRICES) or getattr(optimizer, "of_whole_matrices", False):
            raise UserInputError(
                f"optimizer must update value by value {WITH_ISLANDS}; got {type(optimizer).__name__}, which needs the "
                f"whole of {_name(model, sharded[0])}"
            )
        self.between: Group = mesh.get_group(0)
        """Group of the ranks that hold the same part of every replica."""
        self.shape: Sequence[int] = tuple(mesh.shape)
        """Shape of the mesh that the replicas are on."""
        self.members: Sequence[Ranks] = ()
        """The ranks that hold the replica together, once it has joined them."""
        self._parameters = parameters
        self._counts: list[bool] = []
        """For each parameter, whether this rank counts the values that it holds of it."""
        self._gathering = gathering_modules(model)
        self._sums: list[_Sums] = []
        self._model = model
        self._not_compared: set[int] = set()
        """Identities of the parameters that members hold alike, and whose gradients were not compared yet."""

    def _check(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Refuse parameters of ``model`` that members of an island cannot train."""
        for parameter in parameters:
            name = _name(model, parameter)
            if parameter.is_complex():
                raise UserInputError(f"parameters must be real {WITH_ISLANDS}; got {name} in {parameter.dtype}")
            if not is_dtensor(parameter):
                continue
            if "Partial" in layout(parameter):
                raise UserInputError(f"parameters must be sharded or replicated; got {name} on {_on(parameter)}")
            if not set(ranks_of(parameter)) <= set(self._numbers):
                raise UserInputError(
                    f"parameters must be sharded inside an island, here {named(self._numbers)}; got {name} on "
                    f"{_on(parameter)}"
                )

    def join(self, between: Ranks) -> None:
        """Find the other members. All ranks call this together, as they do all that follows."""
        self._ranks = among(self._numbers, between.standing, between.secret)
        self.members = [self._ranks]

    def connect(self, transport: str) -> None:
        """Connect to the other members over ``transport``."""
        for _ in range(2):  # one for the main thread, one for the communication thread
            self._sums.append(_Sums(self._ranks, transport))
        self._in_main, self._in_thread = self._sums
        own = [place(parameter) for parameter in self._parameters]
        before = self._ranks.all_gather_object("places of shards", own)[: self._ranks.rank]
        self._counts = [all(places[index] != one for places in before) for index, one in enumerate(own)]
        self._not_compared = {id(one) for one in self._parameters if not sharded_dimensions(one)}

    def share(self, model: nn.Module, also: Sequence[Tensor]) -> None:
        """Give all members the first one's values of what is not sharded of ``model``'s parameters and buffers, and of
        the tensors in ``also``."""
        tensors = (*model.parameters(), *model.buffers(), *also)
        same = [tensor for tensor in tensors if not sharded_dimensions(tensor)]
        share_rank_0s_values(nn.Module(), same, self._ranks.rank, self._in_main.sum)

    def combine_buffers(self, model: nn.Module, how: Buffers) -> None:
        """Combine floating-point buffers of the members, as ``replicas.combine_buffers`` does."""
        combine_buffers(model, how, self._ranks, self._in_main.sum)

    def counted(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the values that this rank counts, so that all members together count each value once.

        ``gradients`` are those of the parameters, in their order; each that another member counts becomes empty.
        """
        if not gradients:  # none were kept
            return gradients
        pairs = zip(gradients, self._counts, strict=True)
        return [gradient if counts else gradient.reshape(-1)[:0] for gradient, counts in pairs]

    def check_alike(self, parameters: Sequence[Tensor]) -> None:
        """Refuse first gradients of these parameters that differ between members which hold a parameter alike."""
        compared = [one for one in parameters if id(one) in self._not_compared]
        if not compared:
            return
        self._not_compared -= set(map(id, compared))
        gradients = [local_gradient(one) for one in compared]
        norms = [0.0 if one is None else torch.linalg.vector_norm(one, dtype=torch.float64).item() for one in gradients]
        sums = self._in_main([*norms, *(norm**2 for norm in norms)])
        members = self._ranks.world_size
        for parameter, total, squares in zip(compared, sums, sums[len(norms) :], strict=False):
            if members * squares > (1 + ALIKE**2) * total**2:
                raise UserInputError(
                    "gradients of what members of an island hold alike must be the same on all of them, from the same "
                    "samples and random numbers; got others of "
                    f"{_name(self._model, parameter)} in the first step"
                )

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients of the replica, given this rank's part of them."""
        own = torch.nn.utils.get_total_norm(self.counted(gradients))
        [squares] = self._in_main([own.item() ** 2])
        return own.new_tensor(math.sqrt(squares))

    def is_so(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on all members."""
        [others] = self._in_main([float(not flag)])
        return not others

    def begin(self, iteration: int) -> None:
        """Let the communication thread's sums, those of the next two methods, be of ``iteration`` from now on."""
        self._in_thread.iteration = iteration

    def add_up(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the sums of ``numbers`` over the members."""
        return self._in_thread(numbers)

    def finite_norm(
        self, finite: bool, mean: Sequence[Tensor], agree: Callable[[Tensor], Tensor]
    ) -> tuple[bool, float]:
        """Return whether the whole mean is finite, and its norm, given whether this rank's part, ``mean``, is finite.

        ``agree`` returns what is near a number on all ranks that hold this part: one with the same bits on all of them.
        """
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in self.counted(mean)]
        own = agree(torch.stack(norms).square().sum()).item()
        squares, not_finite = self._in_thread([own if finite else 0.0, float(not finite)])
        return not not_finite, math.sqrt(squares)

    def gather_again(self) -> None:
        """Forget weights that were gathered from the members, since they have changed."""
        for module in self._gathering:
            module.reshard()

    def wait_for_all(self) -> None:
        """Return when all members have called this."""
        for sums in self._sums:
            sums.connections.wait_for_all()

    def abort(self, error: BaseException) -> None:
        """End every wait for the other members because of ``error``; any thread may call this."""
        for sums in self._sums:
            sums.connections.abort(error)

    def close(self) -> None:
        """End the connections to the members."""
        for sums in self._sums:
            sums.connections.close()


class _Sums:
    """Exact sums over ``ranks``, for one thread."""

    def __init__(self, ranks: Ranks, transport: str):
        self.connections = Connections("ring", ranks, timeout=ranks.timeout, transport=transport)
        self.iteration: int | None = None
        """Iteration of the sums, which all ranks must be in; None for that of ``ranks``."""
        self._ranks = ranks
        self._all_reduce = self.connections.all_reduce()

    def __call__(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of ``numbers``, the same on all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._run(functools.partial(self._all_reduce, values))
        return values.tolist()

    def sum(self, buffer: FlatBuffer) -> None:
        """Replace the buffer's values by their sums."""
        self._run(functools.partial(sum_buffer, buffer, self._all_reduce))

    def _run(self, job: Callable[[], None]) -> None:
        iteration = self._ranks.iteration if self.iteration is None else self.iteration
        self.connections.run("step", iteration or 0, job)


def island_of(
    mesh: Any,
    model: nn.Module,
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    refused: Mapping[str, bool],
) -> Island | None:
    """Return the island that this rank is a member of; None without a ``mesh``, where it holds the model alone.

    Args:
        mesh: ranks of all islands, the first dimension being the one between islands; None if there are none.
        model: the model.
        parameters: the parameters that are trained.
        optimizer: the optimizer that updates them.
        refused: options that need whole replicas, and whether each is used.

    Raises:
        UserInputError: a DTensor without a mesh, or what ``Island`` refuses.
    """
    if mesh is None:
        for parameter in parameters:
            if is_dtensor(parameter):
                raise UserInputError(
                    "mesh must be given where a parameter is a DTensor, with islands along its first dimension; got "
                    f"none, and {_name(model, parameter)} on {_on(parameter)}"
                )
        return None
    for option, used in refused.items():
        if used:
            raise UserInputError(f"{option} must be left out {WITH_ISLANDS}; got both")
    return Island(mesh, model, parameters, optimizer)


def _members_on(mesh: Any) -> list[int]:
    """Return the ranks of this rank's island on ``mesh``."""
    if not hasattr(mesh, "get_coordinate"):
        raise UserInputError(f"mesh must be a DeviceMesh of torch.distributed; got {type(mesh).__name__}")
    shape = " x ".join(map(str, mesh.shape))
    if mesh.ndim < 2:
        raise UserInputError(
            "mesh must have at least two dimensions, the first one between islands, the others inside; got one of "
            f"{shape} ranks (give the whole mesh, not a part of it)"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UserInputError(f"mesh must divide the job's ranks into islands; got one of {shape} without this rank")
    if any((mesh.mesh.diff(dim=inside) <= 0).any() for inside in range(1, mesh.ndim)):
        raise UserInputError(  # torch gives shares by the order of ranks in some places, by that of the mesh in others
            f"mesh must have the ranks inside each island in ascending order; got {mesh.mesh.tolist()}"
        )
    members: list[int] = mesh.mesh[coordinate[0]].flatten().tolist()
    return members


def _on(parameter: Tensor) -> str:
    return f"{named(list(ranks_of(parameter)))} as {layout(parameter)}"


def _name(model: nn.Module, parameter: Tensor) -> str:
    names = (name for name, one in model.named_parameters() if one is parameter)
    return next(names, "a parameter that is not the model's")
