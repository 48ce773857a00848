"""What was measured of a cluster, with intervals: the parts of a ``profile.Profile``."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

from timing_model.checks import check_above_0, check_at_least
from timing_model.params import FLOAT_BYTES, CodecCost, ComputeTimes, LinkParams, Noise

MOST = 1e9
"""Of any number that is no count: what is larger is a mistake, and could overflow."""
PARAMETER_SERVER = "ps-sync"
"""By which name it stands among what was measured."""
UNCOMPRESSED = "fp32"
LINK = tuple(one.name for one in dataclasses.fields(LinkParams))
"""Names of the parameters of a link."""
BACKWARD = 2 / 3
"""Share of the backward pass, where only the sum with the forward pass is known."""


@dataclass(frozen=True)
class Estimate:
    """A number that was measured, and its 90 % interval: 0 <= low <= value <= high."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            check_at_least(name, getattr(self, name), 0)
        if not self.low <= self.value <= self.high <= MOST:
            raise ValueError(
                f"value must be from low to high, and at most {MOST:g}; got {self.value}, {self.low} and {self.high}"
            )

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """A number that is given, not measured."""
        return cls(value, value, value)

    def times(self, factor: float) -> Estimate:
        """Of a multiple."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def towards(self, other: Estimate, share: float) -> Estimate:
        """Between this one and ``other``, which is a share of 1."""
        value = self.value + share * (other.value - self.value)
        low = min(value, self.low + share * (other.low - self.low))
        return Estimate(value, low, max(value, self.high + share * (other.high - self.high)))


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What collectives were found to take, over what the formula makes of the link's parameters: one for each size and
    number of ranks that was measured, in order.

    A formula knows of no TCP window, and of no message that is late since another one was on its way.
    """

    world_sizes: tuple[int, ...]
    nbytes: tuple[int, ...]
    """Of what travels in place of the gradient."""
    factors: tuple[float, ...]
    errors: tuple[float, ...]
    """By what share a corrected formula is off that was made without this one."""

    def __post_init__(self) -> None:
        if not len(self.world_sizes) == len(self.nbytes) == len(self.factors) == len(self.errors) > 0:
            raise ValueError("corrections must be as many of each kind, and at least one")
        for factor, error in zip(self.factors, self.errors, strict=True):
            check_above_0("factors", factor)
            check_at_least("errors", error, 0)

    def at(self, world_size: int, nbytes: float) -> tuple[float, float] | None:
        """The factor for so many bytes, between those of its neighbours, and the larger one of their errors; None if
        this number of ranks was not measured."""
        own = [number for number, size in enumerate(self.world_sizes) if size == world_size]
        if not own:
            return None
        sizes = np.log([self.nbytes[number] for number in own])
        factors, errors = ([of[number] for number in own] for of in (self.factors, self.errors))
        above = int(np.searchsorted(sizes, math.log(nbytes)))
        error = max(errors[max(above - 1, 0) : above + 1])
        return float(np.interp(math.log(nbytes), sizes, factors)), error


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """A ``LinkParams``, measured."""

    alpha: Estimate
    beta: Estimate
    gamma: Estimate
    sync: Estimate
    overhead: Estimate
    corrections: Corrections | None = None
    """None if the formula is all that is known."""

    @classmethod
    def exact(cls, link: LinkParams) -> LinkProfile:
        """A link that is given, not measured."""
        return cls(corrections=None, **{name: Estimate.exact(getattr(link, name)) for name in LINK})

    def params(self) -> LinkParams:
        return LinkParams(**{name: getattr(self, name).value for name in LINK})

    def at_least_off(self, error: float) -> LinkProfile:
        """Whose corrections have errors of no less than that."""
        if self.corrections is None:
            return self
        errors = tuple(max(error, own) for own in self.corrections.errors)
        return dataclasses.replace(self, corrections=dataclasses.replace(self.corrections, errors=errors))


@dataclass(frozen=True, kw_only=True)
class CodecRates:
    """What the operations of a ``CodecCost`` take, in s per value."""

    encode: Estimate
    decode: Estimate
    add: Estimate
    hop: Estimate


@dataclass(frozen=True, kw_only=True)
class CodecProfile:
    """A ``CodecCost``, measured in memory and, maybe, in cache."""

    bits: float
    """On the wire, per value, scales included."""
    call: Estimate
    """Fixed cost of any operation, in s."""
    rates: CodecRates
    """On messages that come from memory."""
    in_cache: CodecRates | None = None
    """On messages that fit into ``cache_bytes``."""
    cache_bytes: int = 0
    """Of float32."""
    gathered: bool = False
    """Every rank gets all parts, as topk's; nothing is added on the way."""

    @classmethod
    def exact(cls, cost: CodecCost, *, gathered: bool = False) -> CodecProfile:
        """A codec whose costs are given, not measured."""
        rates = {one.name: Estimate.exact(getattr(cost, one.name)) for one in dataclasses.fields(CodecRates)}
        return cls(bits=cost.bits, call=Estimate.exact(cost.call), rates=CodecRates(**rates), gathered=gathered)

    def rates_of(self, message_values: float) -> CodecRates:
        """Those for messages of so many values."""
        fits = FLOAT_BYTES * message_values <= self.cache_bytes
        return self.in_cache if fits and self.in_cache is not None else self.rates

    def cost(self, name: str, message_values: float) -> CodecCost:
        """Without intervals, on such messages."""
        rates = self.rates_of(message_values)
        costs = {one.name: getattr(rates, one.name).value for one in dataclasses.fields(rates)}
        return CodecCost(name=name, bits=self.bits, call=self.call.value, **costs)


@dataclass(frozen=True, kw_only=True)
class ComputeProfile:
    """The computation of one model with one batch size, measured; times are in s."""

    model: str
    """As ``--model`` of training says it, or module:factory."""
    batch_size: int
    """Of one rank; 0 if it is not known, which no file says."""
    tensors: tuple[int, ...]
    """Values of each parameter's gradient, in the order of the forward pass."""
    samples: int | None = None
    """Of the data set: an epoch. None if there is none."""
    forward: Estimate
    backward: Estimate
    update: Estimate
    """Optimizer and packing, where nothing is in flight."""
    late_update: Estimate
    """The same at a width above 1: with the prediction."""
    contention: Estimate
    """By what share it is slower while a collective runs beside it that is not compressed."""
    codec_contention: Estimate
    """The same for one that is: encoding and decoding take cores, too."""
    hindrance: Estimate
    """By what share a collective is slower with the computation beside it: a ring, and any not named below."""
    hindrances: dict[str, Estimate] = field(default_factory=dict)
    """The hindrance of other all-reduces, by name."""
    cv: float = 0.0
    """Standard deviation over mean of one rank's time, between iterations."""
    slow_ranks: tuple[float, ...] = ()
    """Factors of the ranks that are always slow, each at least 1."""

    @classmethod
    def exact(
        cls, *, model: str, batch_size: int, tensors: tuple[int, ...], compute: float, update: float
    ) -> ComputeProfile:
        """Times that are given, not measured: of both passes together, and of any update."""
        return cls(
            model=model,
            batch_size=batch_size,
            tensors=tensors,
            forward=Estimate.exact(compute * (1 - BACKWARD)),
            backward=Estimate.exact(compute * BACKWARD),
            update=Estimate.exact(update),
            late_update=Estimate.exact(update),
            contention=Estimate.exact(0.0),
            codec_contention=Estimate.exact(0.0),
            hindrance=Estimate.exact(0.0),
        )

    @property
    def numel(self) -> int:
        """Values of the whole gradient."""
        return sum(self.tensors)

    def hindrance_of(self, all_reduce: str | None) -> Estimate:
        """By what share this all-reduce is slower beside the computation."""
        return self.hindrances.get(all_reduce or "", self.hindrance)

    def contention_of(self, codec: str) -> Estimate:
        """By what share it is slower while a collective with this codec runs beside it."""
        return self.contention if codec == UNCOMPRESSED else self.codec_contention

    def times(self, width: int, all_reduce: str | None = None, codec: str = UNCOMPRESSED) -> ComputeTimes:
        """Of an iteration in a pipeline of this width; 1 is synchronous."""
        return ComputeTimes(
            update=(self.update if width == 1 else self.late_update).value,
            forward=self.forward.value,
            backward=self.backward.value,
            contention=self.contention_of(codec).value,
            hindrance=self.hindrance_of(all_reduce).value,
        )

    def noise(self) -> Noise:
        return Noise(cv=self.cv, slow_ranks=self.slow_ranks)


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What was measured: outside of it, an answer is extrapolated."""

    world_sizes: tuple[int, ...]
    smallest_bytes: int
    """Of gradients that were all-reduced."""
    largest_bytes: int
    residuals: dict[str, float]
    """Of what was run, the all-reduces by their names in ``all_reduce.ALL_REDUCES`` and ``PARAMETER_SERVER``: the 90th
    percentile of \\|fitted/measured - 1\\| over cells that were not fitted."""
    ranks_per_core: float
    """Above 1, ranks share cores, and only world sizes that were measured count as interpolated."""

    def __post_init__(self) -> None:
        for residual in self.residuals.values():
            check_at_least("residuals", residual, 0)
        check_above_0("ranks_per_core", self.ranks_per_core)
        if self.smallest_bytes > self.largest_bytes:
            raise ValueError(f"smallest_bytes must be at most {self.largest_bytes}; got {self.smallest_bytes}")

    @property
    def all_reduces(self) -> tuple[str, ...]:
        """That were run."""
        return tuple(name for name in self.residuals if name != PARAMETER_SERVER)

    def residual_of(self, name: str) -> float:
        """The residual of an all-reduce, or of the parameter server; the largest one if it was not run."""
        return self.residuals.get(name, max(self.residuals.values(), default=0.0))
