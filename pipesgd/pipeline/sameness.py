"""Checks that all ranks have the same settings and compute the same bits in an update, before anything depends on it.

Instruction sets differ in how they round a multiplication followed by an addition. So before they train, ranks also
compare the bits of a few updates by an optimizer of their kind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesgd.codecs.options import CodecOptions
from pipesgd.errors import DisagreementError, named
from pipesgd.flat_buffer import give_gradients, memory_layout
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.optimizer_copy import OptimizerCopy
from pipesgd.pipeline.cut import Cut
from pipesgd.pipeline.islands import OF_WHOLE_MATRICES
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Wire
from pipesgd.shards import layout, place

CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
"""Instruction sets of x86-64 that torch knows, each a subset of the next one."""
TRIAL_SIDE = 33
"""Longest side of a parameter in a trial: whole vectors of every instruction set, and a remainder."""
TRIAL_STEPS, TRIAL_LR = 3, 0.1
PRODUCT = (129, 257, 65)
"""Rows, columns and length of the sums of a product on trial: whole blocks of every library, and a remainder."""
LOW_RANK = 4
"""Columns of a matrix on trial whose columns are made orthonormal."""


def check_same_settings(ranks: Ranks, settings: Mapping[str, Any], tensors: Mapping[str, Sequence[str]]) -> None:
    """Compare this rank's settings, and descriptions of its tensors, with those of all other ranks. Collective.

    Descriptions are long, so ranks exchange hashes of them, and the descriptions themselves only if these differ.

    Raises:
        DisagreementError: some differ; the message names the first rank that differs from rank 0, and both values.
    """
    hashes = {name: _hash(described) for name, described in tensors.items()}
    everybody = ranks.all_gather_object("settings", {"settings": settings, "hashes": hashes})
    first = everybody[0]
    for rank, other in enumerate(everybody):
        names = sorted(first["settings"].keys() | other["settings"].keys())
        differing = [name for name in names if first["settings"].get(name) != other["settings"].get(name)]
        if differing:
            said = [_difference(ranks, n, first["settings"].get(n), rank, other["settings"].get(n)) for n in differing]
            raise DisagreementError("; ".join(said))
    for name, described in tensors.items():
        if any(other["hashes"][name] != first["hashes"][name] for other in everybody):
            _name_first_difference(ranks, name, ranks.all_gather_object(name, list(described)))


def check_same_training(all_ranks: Sequence[Ranks], settings: Mapping[str, Any], cut: Cut) -> None:
    """Compare settings, also of the optimizer, parameters, buffers and buckets with those of all ranks. Collective.

    The first of ``all_ranks`` have the same shares of the parameters; others are members of an island, with other ones.

    Raises:
        DisagreementError: as ``check_same_settings``.
    """
    settings = {**settings, **optimizer_settings(cut.optimizer)}
    described = {
        "parameters": describe_parameters(cut.model, cut.parameters),
        "buffers": describe_buffers(cut.model),
        "bucket": [f"parameters {indices}" for indices in cut.indices],
    }
    shares = describe_shares(cut.model, cut.parameters)
    check_same_settings(all_ranks[0], settings, described | {"parameters": shares})
    for members in all_ranks[1:]:
        check_same_settings(members, settings, described)


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the class of the optimizer and the options of its groups."""
    settings: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        options = {f"{name} of parameter group {number}": value for name, value in group.items() if name != "params"}
        settings |= options | {f"number of parameters in group {number}": len(group["params"])}
    return {name: plain(value) for name, value in settings.items()}


def describe_parameters(model: nn.Module, parameters: Iterable[Tensor]) -> list[str]:
    """Return name, shape, dtype and memory order of each of ``parameters``; those not of the model have no name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [_describe(names.get(id(parameter), "parameter"), parameter) for parameter in parameters]


def describe_shares(model: nn.Module, parameters: Iterable[Tensor]) -> list[str]:
    """Return what ``describe_parameters`` does, with the share that this rank holds of each DTensor."""
    parameters = list(parameters)
    pairs = zip(describe_parameters(model, parameters), map(place, parameters), strict=True)
    return [f"{text}, share {share}" if share else text for text, share in pairs]


def describe_buffers(model: nn.Module) -> list[str]:
    """Return name, shape, dtype and memory order of each of the model's buffers."""
    return [_describe(name, buffer) for name, buffer in model.named_buffers()]


def settings_of(wire: Wire, device: str) -> dict[str, Any]:
    """Return the options of ``wire`` that must be the same on all ranks: all but the timeout and a path."""
    names = {"all_reduce": wire.all_reduce_name, "transport": wire.transport_on(device)}
    return {**plain(wire), **names, "timeout": None, "secret_file": None}


def plain(value: Any) -> Any:
    """Return ``value`` as JSON would bring it to another rank."""
    if isinstance(value, Tensor):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({item.name: getattr(value, item.name) for item in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)  # no addresses: they differ


def _difference(ranks: Ranks, name: str, on_rank_0: Any, rank: int, on_rank: Any) -> str:
    first, other = ranks.number(0), ranks.number(rank)
    return f"{name} must be the same on all ranks; got {on_rank_0!r} on rank {first}, {on_rank!r} on rank {other}"


def _name_first_difference(ranks: Ranks, name: str, everybody: Sequence[Sequence[str]]) -> None:
    for rank, described in enumerate(everybody):
        for number in range(max(len(described), len(everybody[0]))):
            one, other = ([*of_rank, *["none"] * (number + 1)][number] for of_rank in (everybody[0], described))
            if one != other:
                raise DisagreementError(_difference(ranks, f"{name} (number {number})", one, rank, other))


def _describe(name: str, tensor: Tensor) -> str:
    shape = "x".join(str(size) for size in tensor.shape) or "scalar"
    strides = memory_layout(tensor)
    order = "" if strides is None else f"in memory order of strides {'x'.join(map(str, strides))}"
    return " ".join(filter(None, (name, shape, str(tensor.dtype).removeprefix("torch."), layout(tensor), order)))


def _hash(described: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(described)).encode()).hexdigest()


# ---- Bits of an update


def check_compute_alike(
    all_ranks: Sequence[Ranks],
    optimizer: torch.optim.Optimizer,
    clip: Clipping,
    gathered: Collection[str],
    codec: CodecOptions,
) -> None:
    """Check that all ranks, those of ``check_same_training``, compute the same bits where they must. Collective.

    Where ranks multiply matrices, because of the exchanges ``gathered``, the codec, the optimizer or an
    island, their products must have the same bits, too.

    Raises:
        DisagreementError: they differ.
    """
    for ranks in all_ranks:
        check_same_bits(ranks, optimizer, clip)
    is_own = not type(optimizer).__module__.startswith("torch.optim")  # of which nothing else is known
    multiplying = {
        "with reduce factors": "factors" in gathered,
        f"with codec {codec.codec}": codec.multiplies,
        f"with {type(optimizer).__name__}": is_own or isinstance(optimizer, OF_WHOLE_MATRICES),
    }
    places = [(all_ranks[0], what) for what, multiplies in multiplying.items() if multiplies][:1]
    places += [(members, "in an island") for members in all_ranks[1:]]
    device = optimizer.param_groups[0]["params"][0].device
    for ranks, what in places:
        check_same_products(ranks, device, what)


def check_same_bits(ranks: Ranks, optimizer: torch.optim.Optimizer, clip: Clipping) -> None:
    """Check that the updates of all ranks have the same bits. Collective.

    Raises:
        DisagreementError: they differ; the message says which ranks compute how.
    """
    if ranks.world_size == 1:
        return
    device = optimizer.param_groups[0]["params"][0].device
    own = [bits_of_updates(optimizer, clip), platform.machine(), _instruction_set(device)]
    found = ranks.all_gather_object("bits of an update", own)
    if len({bits for bits, _, _ in found}) == 1:
        return
    kinds: dict[str, list[int]] = {}
    for rank, (_, machine, instructions) in enumerate(found):
        kinds.setdefault(f"{machine} {instructions}", []).append(ranks.number(rank))
    if len(kinds) == 1:
        raise DisagreementError(
            f"updates by {type(optimizer).__name__} must have the same bits on all ranks; got others, although all "
            f"processors are {next(iter(kinds))}: let it draw the same random numbers on all ranks, if it draws any, "
            "or else install the same version of torch"
        )
    got = ", ".join(f"{kind} on {named(of)}" for kind, of in kinds.items())
    common = _common_capability([(machine, instructions) for _, machine, instructions in found])
    if common:
        remedy = f"set ATEN_CPU_CAPABILITY={common} on all ranks"
    else:
        remedy = "they have no ATEN_CPU_CAPABILITY in common"
    raise DisagreementError(f"processors must compute the same bits on all ranks; got {got}: {remedy}")


def check_same_products(ranks: Ranks, device: torch.device, what: str) -> None:
    """Check that products of matrices on all ranks have the same bits. Collective.

    Ranks that compute products of what all of them have must get the same ones. Libraries choose how to multiply by the
    processor and, on a CPU, the number of threads, which no trial of a few sizes shows: so both are compared.

    Args:
        ranks: the ranks.
        device: the device that multiplies.
        what: where ranks multiply, for messages: "with codec powersgd".

    Raises:
        DisagreementError: they differ; the message says on which ranks.
    """
    if ranks.world_size == 1:
        return
    threads = torch.get_num_threads() if device.type == "cpu" else None
    found = ranks.all_gather_object("bits of a product", [bits_of_a_product(device), threads])
    for rank, (bits, number) in enumerate(found):
        if number != found[0][1]:
            said = _difference(ranks, f"number of torch's threads {what}", found[0][1], rank, number)
            raise DisagreementError(f"{said}: set OMP_NUM_THREADS")
        if bits != found[0][0]:
            raise DisagreementError(
                f"processors must multiply matrices to the same bits on all ranks {what}; got other bits on rank "
                f"{ranks.number(rank)} than on rank {ranks.number(0)}"
            )


def bits_of_a_product(device: torch.device) -> str:
    """Return the SHA-256 of sums of products of synthetic matrices, and of a QR decomposition (PowerSGD)."""
    rows, columns, count = PRODUCT
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        like = torch.empty(0, dtype=dtype, device=device)
        total = _values((rows, columns), 0, like)
        total.addmm_(_values((count, rows), 1, like).t(), _values((count, columns), 2, like))
        found.append(total)
    found.append(torch.linalg.qr(found[0][:, :LOW_RANK]).Q)
    return weights_sha256(nn.ParameterList(map(nn.Parameter, found)))


def bits_of_updates(optimizer: torch.optim.Optimizer, clip: Clipping) -> str:
    """Return the SHA-256 of small parameters after a few updates by a copy of ``optimizer`` with synthetic gradients.

    An optimizer that cannot be tried, alone or on small parameters, counts as SGD, whose arithmetic most share.
    """
    stand_ins: dict[int, Tensor] = {}
    kinds: dict[tuple[object, ...], Tensor] = {}  # one for each shape and group, so that a trial takes no time
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            shape = tuple(min(side, TRIAL_SIDE) for side in parameter.shape)
            kind = (number, shape, parameter.dtype)
            if kind not in kinds:
                kinds[kind] = nn.Parameter(_values(shape, 0, parameter))
            stand_ins[id(parameter)] = kinds[kind]
    trial = list(kinds.values())
    try:
        stepper = OptimizerCopy(optimizer, stand_ins)
        stepper.begin(TRIAL_LR)
        return _bits(trial, clip, stepper.step)
    except Exception:  # noqa: BLE001 (what an optimizer of the user's own may raise on parameters that are not its own)
        others = [nn.Parameter(_values(tuple(parameter.shape), 0, parameter)) for parameter in trial]
        return _bits(others, clip, torch.optim.SGD(others, lr=TRIAL_LR, momentum=0.9, weight_decay=0.01).step)


def _bits(trial: Sequence[Tensor], clip: Clipping, step: Callable[[], object]) -> str:
    for number in range(1, TRIAL_STEPS + 1):
        gradients = [_values(tuple(parameter.shape), number, parameter) for parameter in trial]
        clip(gradients)
        give_gradients(trial, gradients)
        step()
    return weights_sha256(nn.ParameterList(trial))


def _values(shape: tuple[int, ...], key: int, like: Tensor) -> Tensor:
    """Return values from -1 to 1 that look random and are the same on every processor."""
    numbers = torch.arange(torch.Size(shape).numel() or 0) + 1_000_003 * key
    mixed = (numbers * 2_654_435_761 % 2**32) ^ (numbers * 40_503 % 2**20)
    return ((mixed % 2**24).double() / 2**23 - 1).view(shape).to(like.device, like.dtype)


def _instruction_set(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def _common_capability(found: Sequence[tuple[str, str]]) -> str | None:
    """Return the value of ATEN_CPU_CAPABILITY with which all ranks compute alike; None if there is none."""
    machines, capabilities = (set(values) for values in zip(*found, strict=True))
    if len(machines) > 1 or len(capabilities) == 1 or not capabilities <= set(CAPABILITIES):
        return None
    return CAPABILITIES[min(map(CAPABILITIES.index, capabilities))].lower()
