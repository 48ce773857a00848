"""Measurements of a cluster, with intervals: the parts of a ``cluster_profile.Profile``."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from timing_model.buckets import Cut
from timing_model.checks import check_above_0, check_at_least
from timing_model.jitter import noise_over
from timing_model.params import CodecCost, ComputeTimes, LinkParams, Noise
from timing_model.presets import OVERHEAD
from timing_model.schedules import ALL_REDUCES

MOST = 1e9
"""Largest value of a number that is not a count: a larger one is a mistake and could overflow."""
MOST_PERSISTENCE = 0.99
"""Largest persistence of jitter that is measured: in the time of a calibration, a rank whose deviations persist for
longer looks like one that is always slow."""
PARAMETER_SERVER = "ps-sync"
"""Name of the parameter server among the measurements."""
UNCOMPRESSED = "fp32"
LOW_RANK = "powersgd"
"""Name of the codec that sums factors of low rank."""
FURTHER = 1 / 3
"""Cost of the prediction for another gradient in flight, which is a step of the optimizer, as a share of that for one,
which also copies the weights: 0.2 to 0.45 with emulated accelerators and a gradient of 4.3 MB."""
CONFIGURATION = ("world_size", "width", "codec", "all_reduce", "segment_bytes", "loader_workers")
"""Fields of a ``MeasuredIteration`` that a job has, too."""
RING = "ring"
BESIDE_RING = (*(name for name in ALL_REDUCES if name != RING), PARAMETER_SERVER)
"""Names of the all-reduces, and of the parameter server, that may have a link of their own."""
MOST_CV = 10.0
SMALLEST_BITS, SMALLEST_SHARE = 1e-6, 1e-6
"""Fewest bits of a value on the wire, and fewest ranks per core."""
LINK = ("alpha", "beta", "gamma", "sync")
"""Names of the parameters of a link that are measured."""
WITH_BATCH = ("forward", "backward", "loading")
"""Fields of a ``ComputeProfile`` that grow with the batch."""
BACKWARD = 2 / 3
"""Share of the backward pass in both passes, where only their sum is known."""


@dataclass(frozen=True)
class Estimate:
    """A measured number and its 90 % interval: 0 <= low <= value <= high."""

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
        """Return the estimate of a number that is given, not measured."""
        return cls(value, value, value)

    def times(self, factor: float) -> Estimate:
        """Return the estimate multiplied by ``factor``."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, other: Estimate) -> Estimate:
        """Return the sum of two estimates that are off together."""
        return Estimate(self.value + other.value, self.low + other.low, self.high + other.high)

    def towards(self, other: Estimate, share: float) -> Estimate:
        """Return the estimate at ``share`` of the way to ``other``, which is at 1."""
        value = self.value + share * (other.value - self.value)
        low = min(value, self.low + share * (other.low - self.low))
        return Estimate(value, low, max(value, self.high + share * (other.high - self.high)))


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """Ratios of collectives' measured times to those of the formula with the link's parameters: one for each size and
    number of ranks that was measured, in order.

    A formula knows neither TCP windows nor messages that are late because another one was on its way.
    """

    world_sizes: tuple[int, ...] = field(metadata={"least": 2})
    nbytes: tuple[int, ...]
    """Bytes that travel in place of the gradient."""
    factors: tuple[float, ...] = field(metadata={"least": SMALLEST_SHARE})
    errors: tuple[float, ...]
    """Shares by which a corrected formula is off that was made without this measurement."""

    def __post_init__(self) -> None:
        count = len(self.world_sizes)
        for name in ("nbytes", "factors", "errors"):
            if len(getattr(self, name)) != count:
                got = list(getattr(self, name))
                raise ValueError(f"{name} must have {count} numbers, as world_sizes has; got {got}")
        if count == 0:
            raise ValueError("world_sizes must have at least one number; got []")
        for factor, error in zip(self.factors, self.errors, strict=True):
            check_above_0("factors", factor)
            check_at_least("errors", error, 0)

    def at(self, world_size: int, nbytes: float) -> tuple[float, float] | None:
        """Return the factor for ``nbytes``, interpolated between its neighbours, and the larger of their errors; None
        if this number of ranks was not measured."""
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
    """A ``LinkParams``, of which everything is measured but a message's CPU time: with the latency it is one number."""

    alpha: Estimate
    beta: Estimate
    gamma: Estimate
    sync: Estimate
    overhead: float = OVERHEAD
    host: float = 0.0
    """CPU time of a byte, in s; 0 if beta is measured and contains it."""
    corrections: Corrections | None = None
    """Corrections of the formula; None if the formula is all that is known."""

    @classmethod
    def exact(cls, link: LinkParams) -> LinkProfile:
        """Return the profile of a link that is given, not measured."""
        alpha, beta, gamma, sync = (Estimate.exact(getattr(link, name)) for name in LINK)
        return cls(alpha=alpha, beta=beta, gamma=gamma, sync=sync, overhead=link.overhead, host=link.host)

    def limited_to(self, rate: float) -> LinkProfile:
        """Return the link if it carries at most ``rate`` bytes a second, without corrections, which were measured at a
        higher rate."""
        beta = Estimate(*(max(end, 1 / rate) for end in dataclasses.astuple(self.beta)))
        return self if beta == self.beta else dataclasses.replace(self, beta=beta, corrections=None)

    def params(self) -> LinkParams:
        values = {name: getattr(self, name).value for name in LINK}
        return LinkParams(overhead=self.overhead, host=self.host, **values)


@dataclass(frozen=True, kw_only=True)
class CodecRates:
    """Times of the operations of a ``CodecCost``, in s per value."""

    encode: Estimate
    decode: Estimate
    add: Estimate
    hop: Estimate


@dataclass(frozen=True, kw_only=True)
class CodecProfile:
    """A measured ``CodecCost``."""

    bits: float = field(metadata={"least": SMALLEST_BITS})
    """Bits per value on the wire, scales included."""
    call: Estimate
    """Fixed cost of any operation, in s."""
    rates: CodecRates
    """Rates on messages that come from memory."""
    gathered: bool = False
    """True if every rank gets all parts, as with topk; nothing is added on the way."""

    @classmethod
    def exact(cls, cost: CodecCost, *, gathered: bool = False) -> CodecProfile:
        """Return a codec whose costs are given, not measured."""
        rates = {one.name: Estimate.exact(getattr(cost, one.name)) for one in dataclasses.fields(CodecRates)}
        return cls(bits=cost.bits, call=Estimate.exact(cost.call), rates=CodecRates(**rates), gathered=gathered)

    def cost(self, name: str) -> CodecCost:
        """Return the codec's cost, without intervals."""
        costs = {one.name: getattr(self.rates, one.name).value for one in dataclasses.fields(self.rates)}
        return CodecCost(name=name, bits=self.bits, call=self.call.value, **costs)


@dataclass(frozen=True, kw_only=True)
class LowRankProfile:
    """Factors of low rank that are summed in place of a model's gradient: their sizes, and the work with them."""

    rank: int
    """Rank of the factors."""
    left: int
    """Values of the first all-reduce: left factors, and gradients that are not factored."""
    right: int
    """Values of the second all-reduce: right factors."""
    work: Estimate
    """Time, in s, of an iteration's products and decompositions."""

    @property
    def numel(self) -> int:
        """Values of both all-reduces."""
        return self.left + self.right


@dataclass(frozen=True, kw_only=True)
class MeasuredIteration:
    """Time of an iteration of a pipeline that was measured as it is, in an audition."""

    world_size: int = field(metadata={"least": 2})
    width: int
    codec: str
    all_reduce: str
    segment_bytes: int
    iteration: Estimate
    """Mean of an iteration, in s."""
    iterations: int
    """Number of iterations that were timed."""
    loader_workers: int = field(metadata={"least": 0})
    """Processes of a rank that loaded batches."""
    buckets: str = "1"
    """Buckets in which gradients left during the backward pass."""

    def __post_init__(self) -> None:
        Cut.parse(self.buckets)


def configuration(of: Any) -> tuple[object, ...]:
    """Return what an iteration that was measured, and a job whose time it is, have in common."""
    return (*(getattr(of, name) for name in CONFIGURATION), Cut.parse(of.buckets))


@dataclass(frozen=True, kw_only=True)
class ComputeProfile:
    """Measured computation of one model with one batch size; times are in s."""

    model: str
    """Name of the model, as ``--model`` of training has it, or module:factory."""
    batch_size: int
    """Samples of one rank in an iteration, those of all its micro-batches; 0 if that is not known, which no file may
    contain."""
    accumulation: int = 1
    """Micro-batches of an iteration, whose passes, loading and variation are those of all of them together."""
    tensors: tuple[int, ...]
    """Number of values in each parameter's gradient, in the order of the forward pass."""
    released: tuple[float, ...] = field(default=(), metadata={"most": 1.0})
    """Share of the backward pass after which each of these gradients is complete; empty if that was not measured, and
    then it is the share of the bytes that are complete with it."""
    samples: int | None = None
    """Samples of the data set, which make an epoch. None if there is no data set."""
    forward: Estimate
    backward: Estimate
    update: Estimate
    """Time of optimizer and packing where nothing is in flight."""
    late_update: Estimate
    """Time of the update at a width of 2, which includes the prediction, while a collective runs."""
    local_update: Estimate | None = None
    """Time of the part of ``update`` that a local step has, too: all but what hands a gradient over; None if it was not
    measured."""
    compute_slowdown: Estimate
    """Share by which the computation is slower while an uncompressed collective runs."""
    codec_compute_slowdown: Estimate
    """Share by which a compressed collective slows the computation: encoding and decoding take cores, too."""
    processor_share: float = field(default=1.0, metadata={"most": 1.0})
    """Share of the passes for which the rank's processor is busy, and which a collective can slow down."""
    handover: Estimate = Estimate(0.0, 0.0, 0.0)
    """Additional time of a collective in training, at width 1."""
    late_handover: Estimate = Estimate(0.0, 0.0, 0.0)
    """The same at a width above 1, of a ring and of any all-reduce that is not in ``late_handovers``."""
    late_handovers: dict[str, Estimate] = field(default_factory=dict, metadata={"names": BESIDE_RING})
    """The same of other all-reduces, by name."""
    loading: Estimate = Estimate(0.0, 0.0, 0.0)
    """Time that one process takes to load a batch."""
    cv: float = field(default=0.0, metadata={"most": MOST_CV})
    """Standard deviation over mean of one rank's time, between iterations."""
    persistence: Estimate = field(default=Estimate(0.0, 0.0, 0.0), metadata={"most": MOST_PERSISTENCE})
    """Correlation of a rank's deviation with that of its iteration before."""
    comm_cv: Estimate = field(default=Estimate(0.0, 0.0, 0.0), metadata={"most": MOST_CV})
    """Standard deviation over mean of an all-reduce's time, between iterations."""
    slow_ranks: tuple[float, ...] = field(default=(), metadata={"least": 1.0})
    """Factors of the passes of the ranks that are always slow, each at least 1."""
    low_rank: LowRankProfile | None = None
    """Factors of low rank, with ``LOW_RANK``; None if they were not measured."""
    measured: tuple[MeasuredIteration, ...] = ()
    """Configurations that were measured themselves, which no formula needs to predict."""

    def __post_init__(self) -> None:
        if self.released and len(self.released) != len(self.tensors):
            got = list(self.released)
            raise ValueError(f"released must have {len(self.tensors)} numbers, as tensors has; got {got}")

    @classmethod
    def exact(
        cls, *, model: str, batch_size: int, tensors: tuple[int, ...], compute: float, update: float
    ) -> ComputeProfile:
        """Return a computation whose times are given, not measured: of both passes together, and of any update."""
        return cls(
            model=model,
            batch_size=batch_size,
            tensors=tensors,
            forward=Estimate.exact(compute * (1 - BACKWARD)),
            backward=Estimate.exact(compute * BACKWARD),
            update=Estimate.exact(update),
            late_update=Estimate.exact(update),
            compute_slowdown=Estimate.exact(0.0),
            codec_compute_slowdown=Estimate.exact(0.0),
        )

    def accumulate(self, times: int) -> ComputeProfile:
        """Return the computation of an iteration with this many times the micro-batches, and one update.

        Slow micro-batches make up for fast ones, as iterations of a window do (``jitter.noise_over``).
        """
        if times == 1:
            return self

        def noise(persistence: float) -> Noise:
            return noise_over(Noise(cv=self.cv, persistence=persistence), times)

        return dataclasses.replace(
            self,
            batch_size=times * self.batch_size,
            accumulation=times * self.accumulation,
            measured=(),
            cv=noise(self.persistence.value).cv,
            persistence=Estimate(*(noise(end).persistence for end in dataclasses.astuple(self.persistence))),
            **{name: getattr(self, name).times(times) for name in WITH_BATCH},
        )

    @property
    def batch(self) -> str:
        """Samples of one rank in an iteration as a short text, by micro-batches if there are several."""
        each = self.batch_size // self.accumulation
        return f"{self.accumulation} x {each}" if self.accumulation > 1 else f"{each}"

    @property
    def numel(self) -> int:
        """Values of the whole gradient."""
        return sum(self.tensors)

    def handover_of(self, width: int, all_reduce: str | None) -> Estimate:
        """Return the additional time of this all-reduce in training."""
        return self.handover if width == 1 else self.late_handovers.get(all_reduce or "", self.late_handover)

    def compute_slowdown_of(self, codec: str) -> Estimate:
        """Return the share by which the computation is slower while a collective with this codec runs."""
        return self.compute_slowdown if codec == UNCOMPRESSED else self.codec_compute_slowdown

    def updates(self, width: int, local_steps: int = 1) -> dict[str, Estimate]:
        """Return the fields of ``times`` that an optimizer takes, by name.

        Every gradient in flight beyond the first adds ``FURTHER`` of what the prediction costs at width 2.

        With local steps, an iteration takes ``local_update``. The end of a window takes as long as the update of an
        iteration of the pipeline, since both pack, update and predict as many values; in a pipeline, less a
        ``local_update``. The update and the prediction are steps of the outer optimizer there, and no errors of guesses
        are added up, which saves more than a step of the rank's own optimizer; but the movement is subtracted, and the
        start of the next window copied. If ``local_update`` was not measured, an iteration takes a synchronous update,
        and the end of a window a late one.
        """
        update = self.update if width == 1 else self.late_update
        if width > 2 and update.value > self.update.value:
            update = update.times(1 + FURTHER * (width - 2) * (1 - self.update.value / update.value))
        if local_steps == 1:
            return {"update": update}
        inner = self.local_update
        if inner is None:
            return {"update": self.update, "outer_update": update}
        if width > 1 and update.value > inner.value:
            update = update.times(1 - inner.value / update.value)
        return {"update": inner, "outer_update": update}

    def times(
        self, width: int, all_reduce: str | None = None, codec: str = UNCOMPRESSED, local_steps: int = 1
    ) -> ComputeTimes:
        """Return the times of an iteration in a pipeline of this width; 1 is synchronous."""
        return ComputeTimes(
            **{name: one.value for name, one in self.updates(width, local_steps).items()},
            forward=self.forward.value,
            backward=self.backward.value,
            compute_slowdown=self.compute_slowdown_of(codec).value,
            processor_share=self.processor_share,
            loading=self.loading.value,
            handover=self.handover_of(width, all_reduce).value,
        )


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Ranges of what was measured; outside of them, an answer is extrapolated."""

    world_sizes: tuple[int, ...] = field(metadata={"least": 2})
    smallest_bytes: int
    """Bytes of the smallest gradient that was all-reduced."""
    largest_bytes: int
    residuals: dict[str, float] = field(metadata={"names": (RING, *BESIDE_RING)})
    """Residuals of what was run, by name in ``all_reduce.ALL_REDUCES``, and of ``PARAMETER_SERVER``: the 90th
    percentile of \\|fitted/measured - 1\\| over cells that were not fitted."""
    ranks_per_core: float = field(metadata={"least": SMALLEST_SHARE})
    """Ranks per core; above 1, ranks share cores, and only measured world sizes count as interpolated."""

    def __post_init__(self) -> None:
        for residual in self.residuals.values():
            check_at_least("residuals", residual, 0)
        check_above_0("ranks_per_core", self.ranks_per_core)
        if self.smallest_bytes > self.largest_bytes:
            raise ValueError(f"smallest_bytes must be at most {self.largest_bytes}; got {self.smallest_bytes}")

    @classmethod
    def nothing(cls) -> Calibrated:
        """Return the ranges of a cluster of which nothing was measured."""
        return cls(world_sizes=(), smallest_bytes=0, largest_bytes=0, residuals={}, ranks_per_core=1.0)

    @property
    def all_reduces(self) -> tuple[str, ...]:
        """Names of the all-reduces that were run."""
        return tuple(name for name in self.residuals if name != PARAMETER_SERVER)

    def residual_of(self, name: str) -> float:
        """Return the residual of an all-reduce, or of the parameter server; the largest one if it was not run."""
        return self.residuals.get(name, max(self.residuals.values(), default=0.0))
