"""Whether the processors of all ranks compute the same bits, without which replicas drift apart.

Instruction sets differ in how they round a multiplication that is followed by an addition. So ranks compare, before
they train, the bits of a few updates by an optimizer of their kind.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pipesgd.errors import DisagreementError, named
from pipesgd.flat_buffer import give_gradients
from pipesgd.optim.optimizer_copy import OptimizerCopy
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256

CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
"""Instruction sets of x86-64 that torch knows, each a part of the next one."""
TRIAL_SIDE = 33
"""Longest side of the parameters of a trial: whole vectors of every instruction set, and a rest."""
TRIAL_STEPS, TRIAL_LR = 3, 0.1

Prepare = Callable[[Sequence[Tensor]], None]
"""What is done in place with gradients before the optimizer sees them: clipping."""


def check_same_bits(ranks: Ranks, optimizer: torch.optim.Optimizer, prepare: Prepare, *, allow_drift: bool) -> bool:
    """Return whether the updates of all ranks have the same bits. Collective.

    Raises:
        DisagreementError: they have not, and ``allow_drift`` is false; the message says which ranks compute how.
    """
    if ranks.world_size == 1:
        return True
    device = optimizer.param_groups[0]["params"][0].device
    own = [bits_of_updates(optimizer, prepare), platform.machine(), _instruction_set(device)]
    found = ranks.exchange("bits of an update", own)
    same = len({bits for bits, _, _ in found}) == 1
    if same or allow_drift:
        return same
    kinds: dict[str, list[int]] = {}
    for rank, (_, machine, instructions) in enumerate(found):
        kinds.setdefault(f"{machine} {instructions}", []).append(rank)
    got = ", ".join(f"{kind} on {named(of)}" for kind, of in kinds.items())
    common = _common_capability([(machine, instructions) for _, machine, instructions in found])
    remedy = (
        f"set ATEN_CPU_CAPABILITY={common} on all ranks"
        if common
        else "they have no ATEN_CPU_CAPABILITY in common; --allow-drift shares rank 0's weights now and then"
    )
    raise DisagreementError(f"processors must compute the same bits on all ranks; got {got}: {remedy}")


def bits_of_updates(optimizer: torch.optim.Optimizer, prepare: Prepare) -> str:
    """SHA-256 of small parameters after a few updates by a copy of ``optimizer``, of gradients made from integers.

    An optimizer that cannot be tried, alone or on small parameters, counts as SGD, whose arithmetic most share.
    """
    stand_ins: dict[int, Tensor] = {}
    kinds: dict[tuple[object, ...], Tensor] = {}  # one for each shape and group: a trial takes no time
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
        return _bits(trial, prepare, stepper.step)
    except Exception:  # noqa: BLE001 (what an optimizer of the user's own may raise on parameters that are not its own)
        others = [nn.Parameter(_values(tuple(parameter.shape), 0, parameter)) for parameter in trial]
        return _bits(others, prepare, torch.optim.SGD(others, lr=TRIAL_LR, momentum=0.9, weight_decay=0.01).step)


def _bits(trial: Sequence[Tensor], prepare: Prepare, step: Callable[[], object]) -> str:
    for number in range(1, TRIAL_STEPS + 1):
        gradients = [_values(tuple(parameter.shape), number, parameter) for parameter in trial]
        prepare(gradients)
        give_gradients(trial, gradients)
        step()
    return weights_sha256(nn.ParameterList(trial))


def _values(shape: tuple[int, ...], key: int, like: Tensor) -> Tensor:
    """Values from -1 to 1 that look random, the same on every processor."""
    numbers = torch.arange(torch.Size(shape).numel() or 0) + 1_000_003 * key
    mixed = (numbers * 2_654_435_761 % 2**32) ^ (numbers * 40_503 % 2**20)
    return ((mixed % 2**24).double() / 2**23 - 1).view(shape).to(like.device, like.dtype)


def _instruction_set(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def _common_capability(found: Sequence[tuple[str, str]]) -> str | None:
    """The value of ATEN_CPU_CAPABILITY by which all compute alike; None if there is none."""
    machines, capabilities = (set(values) for values in zip(*found, strict=True))
    if len(machines) > 1 or len(capabilities) == 1 or not capabilities <= set(CAPABILITIES):
        return None
    return CAPABILITIES[min(map(CAPABILITIES.index, capabilities))].lower()
