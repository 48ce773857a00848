"""Models that take as long as if every rank had an accelerator of its own, on a machine that has none.

    --model experiments.accelerators:synthetic=75ms    fixed gradients, nothing is computed: for times
    --model experiments.accelerators:at_least=75ms     a real model that takes at least this long: for accuracies

An accelerator computes while the host's cores are free for the network. Ranks that share the cores of one machine
cannot compute and communicate at once without slowing one another down; a rank that sleeps instead of computing can.
The text after ``=`` is a time and options, separated by commas:

    75ms              time of a forward and backward pass
    forward=0.25      share of the forward pass; 1/3 by default, so that the backward pass takes twice as long
    jitter=0.1        coefficient of variation of the time of a pass, drawn for every rank and pass (log-normal, mean 1)
    persistence=0.9   correlation of a rank's jitter with that of its pass before, as in an AR(1) process; 0 by default
    slow=3x1.5        rank 3 takes 1.5 times as long; may be repeated
    model=convnet     model that is emulated, any value of --model; mlp by default, with --hidden-sizes

Gradients are released layer by layer over the backward pass, each layer taking its share of the floating-point
operations: whatever waits for gradients, such as DDP's buckets, gets them as from an accelerator. A pass takes the same
time whatever the batch size. Evaluation does not wait. The jitter depends on the seed, the rank and the number of the
pass, counted from the start of the process: a resumed run begins the same series again.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from pipesgd.checks import check_above_zero, check_at_least, check_one_of
from pipesgd.config import ModelConfig
from pipesgd.data import build_model
from pipesgd.errors import UserInputError
from timing_model.units import format_seconds, parse_seconds

LARGEST_REAL_SHARE = 1 / 3
"""Share of an emulated pass that real computation may take: with more, ranks that share cores slow one another down."""
JUDGED = 10
"""Passes whose median decides whether the real computation is short enough: the first ones are slower than the rest."""
GRADIENT_STD = 1e-3
"""Standard deviation of fixed gradients, with which weights stay finite for as long as anybody measures."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """An emulated accelerator of each rank."""

    seconds: float
    """Time of a forward and backward pass."""
    synthetic: bool
    """True for fixed gradients without any computation; False for a real model that takes at least ``seconds``."""
    forward: float = 1 / 3
    """Share of the forward pass."""
    jitter: float = 0.0
    """Coefficient of variation of the time of a pass."""
    persistence: float = 0.0
    """Correlation of a rank's jitter in two passes in a row."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Factors of the times of slow ranks, by rank."""

    def __post_init__(self) -> None:
        check_above_zero("time of an accelerator's pass", self.seconds)
        if not 0 < self.forward < 1:
            raise UserInputError(f"forward must be a share between 0 and 1; got {self.forward:g}")
        check_at_least("jitter", self.jitter, 0)
        if not 0 <= self.persistence < 1:
            raise UserInputError(f"persistence must be at least 0 and below 1; got {self.persistence:g}")
        if self.persistence and not self.jitter:
            raise UserInputError(f"persistence must come with a jitter above 0; got {self.persistence:g} without one")
        for rank, factor in self.slow.items():
            check_above_zero(f"factor of slow rank {rank}", factor)


def parse(text: str, *, synthetic: bool) -> tuple[Accelerator, str]:
    """Return the accelerator that ``text`` describes, and the name of the model that it runs.

    >>> accelerator, model = parse("75ms,jitter=0.1,slow=3x1.5", synthetic=True)
    >>> accelerator.seconds, accelerator.jitter, accelerator.slow, model
    (0.075, 0.1, {3: 1.5}, 'mlp')

    Raises:
        UserInputError: a part is not what it should be.
    """
    first, *parts = text.split(",")
    try:
        numbers: dict[str, Any] = {"seconds": parse_seconds("time of an accelerator's pass", first)}
    except ValueError as failure:
        raise UserInputError(str(failure)) from None
    slow: dict[int, float] = {}
    model = None
    for part in parts:
        name, _, value = part.partition("=")
        check_one_of("option of an accelerator", name, ["forward", "jitter", "persistence", "slow", "model"])
        if name in numbers or (name == "model" and model is not None):
            raise UserInputError(f"{name} of an accelerator must be given once; got it twice in {text!r}")
        if name == "model":
            model = value
        elif name == "slow":
            rank, _, factor = value.partition("x")
            if not (rank.isascii() and rank.isdecimal()) or int(rank) in slow:
                raise UserInputError(f"slow must be a rank and its factor, once for a rank, as 3x1.5; got {part!r}")
            slow[int(rank)] = _number(name, factor, part)
        else:
            numbers[name] = _number(name, value, part)
    return Accelerator(**numbers, slow=slow, synthetic=synthetic), "mlp" if model is None else model


def _number(name: str, text: str, part: str) -> float:
    try:
        return float(text.encode("ascii"))  # float() also takes digits that nobody could read
    except ValueError:
        raise UserInputError(f"{name} must have a number; got {part!r}") from None


class Jitter:
    """Factors of the time of a rank's passes, one after the other: log-normal with mean 1.

    Pass t of a rank has the factor exp(s z_t - s^2 / 2), where s^2 = ln(1 + jitter^2), z_t = a z_(t-1) +
    sqrt(1 - a^2) e_t, a is the persistence, and e_t is a standard normal number that depends on seed, rank and t only.
    """

    def __init__(self, accelerator: Accelerator, *, seed: int, rank: int):
        self._sigma = math.sqrt(math.log1p(accelerator.jitter**2))
        self._persistence = accelerator.persistence
        self._seed, self._rank = seed, rank
        self._number, self._z = 0, 0.0

    def next(self) -> float:
        """Return the factor of the next pass."""
        drawn = float(np.random.default_rng([self._seed, self._rank, self._number]).standard_normal())
        weight = self._persistence if self._number else 0.0  # the first one has nothing before it
        self._z = weight * self._z + math.sqrt(1 - weight**2) * drawn
        self._number += 1
        return math.exp(self._sigma * self._z - self._sigma**2 / 2)


class Emulated(nn.Module):
    """A model whose passes take as long as on an accelerator; DDP and ``Pipelined`` train it like any other.

    In training, a call waits for the end of the forward pass. Then the gradients of each layer wait, in the order of
    the backward pass, for their time after the beginning of the call. All waiting is until a time, not for a time, so
    that errors do not add up.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, *, seed: int = 0, rank: int = 0):
        super().__init__()
        self.model = model
        self._accelerator = accelerator
        self._jitter = Jitter(accelerator, seed=seed, rank=rank)
        self._slow = accelerator.slow.get(rank, 1.0)
        self._hooks: list[RemovableHandle] = []
        self._released: dict[str, float] = {}
        """Share of the backward pass after which a layer has its gradients, by the layer's name, in forward order."""
        self._shape: tuple[int, ...] = ()
        """Shape of the outputs for one sample."""
        self._begin = self._end = self._waited = 0.0
        self._real: list[float] = []
        """Seconds of the first passes for which nothing waited."""
        self._gradients: dict[str, Tensor] = {}
        if accelerator.synthetic:
            numbers = torch.Generator().manual_seed(seed)
            for name, one in model.named_parameters(remove_duplicate=False):
                self._gradients[name] = GRADIENT_STD * torch.randn(one.shape, generator=numbers)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's outputs, or zeros of their shape if the accelerator is synthetic."""
        if not self._released:
            self._try_out(inputs, named)
        compute = self._zeros if self._accelerator.synthetic else self.model
        if not (self.training and torch.is_grad_enabled()):
            return compute(*inputs, **named)
        self._judge()
        self._begin, self._waited = time.perf_counter(), 0.0
        seconds = self._accelerator.seconds * self._slow * self._jitter.next()
        forward = self._accelerator.forward
        outputs = compute(*inputs, **named)
        self._wait(self._begin + forward * seconds)
        for hook in self._hooks:
            hook.remove()
        # Parameters are found again in every pass, since a copy of the model has its own, and some may be frozen.
        self._hooks = [
            parameter.register_hook(partial(self._wait, self._begin + (forward + (1 - forward) * released) * seconds))
            for layer, released in self._released.items()
            for _, parameter in self._trained(layer)
        ]
        return outputs

    def _trained(self, layer: str) -> list[tuple[str, nn.Parameter]]:
        """Return the names and parameters of a layer, without those of the layers in it and those that are frozen."""
        of_layer = self.model.get_submodule(layer).named_parameters(prefix=layer, recurse=False)
        return [(name, parameter) for name, parameter in of_layer if parameter.requires_grad]

    def _try_out(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Find the outputs' shape and each layer's share of the backward pass, by a copy of the model."""
        model = copy.deepcopy(self.model).eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            outputs = model(*inputs, **named)
        if self._accelerator.synthetic and not isinstance(outputs, Tensor):
            raise UserInputError(f"model of a synthetic accelerator must return a tensor; got {type(outputs).__name__}")
        self._shape = tuple(outputs.shape[1:]) if isinstance(outputs, Tensor) else ()
        prefix = type(model).__name__
        counts: dict[str, int] = {name: sum(one.values()) for name, one in counter.get_flop_counts().items()}

        def operations(layer: str) -> int:
            return counts.get(f"{prefix}.{layer}" if layer else prefix, 0)

        costs = {
            layer: operations(layer)
            - sum(operations(f"{layer}.{child}" if layer else child) for child, _ in module.named_children())
            + sum(parameter.numel() for parameter in module.parameters(recurse=False))
            for layer, module in model.named_modules()
        }
        left = total = sum(costs.values())
        for layer, cost in costs.items():  # the first layer is the last one in the backward pass
            self._released[layer] = left / total
            left -= cost

    def _zeros(self, *inputs: Any, **named: Any) -> Tensor:
        """Return zeros of the outputs' shape, on which all parameters depend, with their fixed gradients."""
        samples = next(one for one in (*inputs, *named.values()) if isinstance(one, Tensor))
        signal = torch.zeros((), device=samples.device)
        for layer in self._released:
            if trained := self._trained(layer):
                gradients = [self._gradients[name].to(one.device, one.dtype) for name, one in trained]
                signal = _fix_gradients(signal, gradients, *(parameter for _, parameter in trained))
        return signal.expand(len(samples), *self._shape)

    def _wait(self, until: float, gradient: Tensor | None = None) -> None:
        """Wait until a time; as a hook of a parameter, before anybody else gets its gradient."""
        now = time.perf_counter()
        if until > now:
            time.sleep(until - now)
        self._end = time.perf_counter()
        self._waited += self._end - now

    def _judge(self) -> None:
        """Raise ``UserInputError`` if the first passes show that the accelerator is not longer than its real part.

        It is judged in the run itself: the batch size is not known before, and passes on trial would change what batch
        normalization and dropout do later.
        """
        if self._accelerator.synthetic or not self._end or len(self._real) == JUDGED:
            return
        self._real.append(self._end - self._begin - self._waited)
        median, seconds = statistics.median(self._real), self._accelerator.seconds
        if len(self._real) == JUDGED and median > LARGEST_REAL_SHARE * seconds:
            raise UserInputError(
                f"accelerator's pass must take at least {1 / LARGEST_REAL_SHARE:.0f} times as long as the model's own "
                f"computation; got {format_seconds(seconds)} and {format_seconds(median)} of computation "
                f"(median of {JUDGED} passes)"
            )


class _FixedGradients(torch.autograd.Function):
    """Identity of a signal; its backward pass gives parameters fixed gradients."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, gradients: Iterable[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *signal: Tensor) -> Any:
        return *signal, None, *ctx.gradients


_fix_gradients: Callable[..., Tensor] = _FixedGradients.apply


def make(
    text: str,
    *,
    synthetic: bool,
    sample_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    hidden_sizes: tuple[int, ...] = ModelConfig.hidden_sizes,
    layers: int = ModelConfig.layers,
    heads: int = ModelConfig.heads,
    embedding: int = ModelConfig.embedding,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Emulated:
    """Return the model that ``text`` names, on the accelerator that it describes; the rest is as for ``build_model``.

    Raises:
        UserInputError: there is no such accelerator or model, or the model has no use for an option.
    """
    accelerator, name = parse(text, synthetic=synthetic)
    for slow in accelerator.slow:
        if slow >= world_size:
            raise UserInputError(f"slow must name ranks from 0 to {world_size - 1}; got {slow}")
    # The same checks as without an accelerator: an option that the model does not read must not be ignored.
    ModelConfig(model=name, hidden_sizes=hidden_sizes, layers=layers, heads=heads, embedding=embedding)
    model = build_model(
        name,
        sample_shape=sample_shape,
        num_classes=num_classes,
        hidden_sizes=hidden_sizes,
        layers=layers,
        heads=heads,
        embedding=embedding,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )
    return Emulated(model, accelerator, seed=seed, rank=rank)


synthetic = partial(make, synthetic=True)
"""Function for ``--model``: passes are pauses, and gradients are fixed."""
at_least = partial(make, synthetic=False)
"""Function for ``--model``: passes are those of the model, then pauses."""
