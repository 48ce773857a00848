"""The parameters of the formulas, under the paper's letters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from timing_model.checks import check_above_0, check_at_least

FLOAT_BYTES = 4
"""Of a float32 value."""
MOST_NORMAL_CV = 0.25
"""With a larger one, a normal distribution has times below 0 that count."""


@dataclass(frozen=True, kw_only=True)
class LinkParams:
    """What a link and the ranks at its ends cost. All at least 0 and finite."""

    alpha: float
    """Latency, in s per message. Messages that follow each other overlap in it."""
    beta: float
    """Transfer, in s per byte."""
    gamma: float
    """Reduction, in s per byte summed."""
    sync: float
    """Fixed cost of one collective (S), in s."""
    overhead: float = 0.0
    """CPU time of a message (o), in s, at the rank that sends it. Unlike latency it never overlaps."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_at_least(field.name, getattr(self, field.name), 0)

    def times(self, factor: float) -> LinkParams:
        """A link on which any collective takes ``factor`` times as long, codecs apart."""
        return LinkParams(**{name: factor * value for name, value in dataclasses.asdict(self).items()})


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """What one iteration of one rank computes: means, in s. All at least 0 and finite."""

    update: float
    """Optimizer, prediction, packing: what follows the arrival of a gradient."""
    forward: float
    backward: float
    contention: float = 0.0
    """By what share the computation is slower while a collective runs beside it."""
    hindrance: float = 0.0
    """By what share a collective is slower in a pipeline, with the computation beside it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_at_least(field.name, getattr(self, field.name), 0)

    @property
    def total(self) -> float:
        """All of it, c in the formulas, in s."""
        return self.update + self.forward + self.backward

    def at_width(self, width: int, t_comm: float) -> tuple[float, float]:
        r"""All of it, and a collective of ``t_comm`` s, in an iteration of a pipeline, in s.

        At width 1 they are not beside each other. Else, with k ``contention`` and h ``hindrance``, a second of the
        computation does the work of 1/(1+k) while the collective runs, and this at worst stands still meanwhile:

        .. math::

            m' = \min(m (1 + h),\; m + c), \qquad c' = \min\left(c (1 + k),\; c + \frac{k}{1 + k} m'\right)

        >>> ComputeTimes(update=0.0, forward=1.0, backward=3.0, contention=0.5).at_width(2, 3.0)
        (5.0, 3.0)
        >>> ComputeTimes(update=0.0, forward=1.0, backward=1.0, contention=0.5, hindrance=1.0).at_width(2, 10.0)
        (3.0, 12.0)
        """
        if width == 1:
            return self.total, t_comm
        hindered = min(t_comm * (1 + self.hindrance), t_comm + self.total)
        return self.slowed(self.total, hindered), hindered

    def slowed(self, seconds: float, t_comm: float) -> float:
        """``seconds`` of the computation with a collective of ``t_comm`` s beside it, which takes so long, in s."""
        return _slowed(seconds, self.contention, t_comm)

    def hindered(self, t_comm: float, seconds: float) -> float:
        """A collective of ``t_comm`` s whose first ``seconds`` are beside the computation, in s."""
        return _slowed(t_comm, self.hindrance, max(seconds, 0.0))


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """What a codec saves on the wire, and costs on the CPU, in s per value of float32, in the sizes it is used for."""

    name: str
    bits: float
    """On the wire, per value, scales included; above 0."""
    encode: float
    """Values to bytes."""
    decode: float
    """Bytes to values."""
    add: float
    """Decode and add to the own values."""
    hop: float
    """Decode, add and encode in one pass."""
    call: float = 0.0
    """Fixed cost of any of these, in s per call."""

    def __post_init__(self) -> None:
        check_above_0("bits", self.bits)
        for name in ("encode", "decode", "add", "hop", "call"):
            check_at_least(name, getattr(self, name), 0)

    def wire_bytes(self, numel: float) -> float:
        """Bytes that ``numel`` values take on the wire.

        >>> uncompressed(0.0).wire_bytes(10)
        40.0
        """
        return numel * self.bits / 8

    def seconds(self, numel: float) -> dict[str, float]:
        """What each operation takes on ``numel`` values, in s, by its name."""
        rates = {"encode": self.encode, "decode": self.decode, "add": self.add, "hop": self.hop}
        return {operation: rate * numel + self.call for operation, rate in rates.items()}

    def free(self) -> CodecCost:
        """The same bytes for no CPU time: what is left is the wire."""
        return dataclasses.replace(self, encode=0.0, decode=0.0, add=0.0, hop=0.0, call=0.0)


def uncompressed(gamma: float) -> CodecCost:
    """Float32 as it is: nothing is encoded or decoded, and a sum costs ``gamma`` s per byte.

    >>> uncompressed(0.25).hop
    1.0
    """
    reduction = FLOAT_BYTES * gamma
    return CodecCost(name="fp32", bits=32.0, encode=0.0, decode=0.0, add=reduction, hop=reduction)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How the computation's time differs between iterations and between ranks."""

    cv: float = 0.0
    """Standard deviation over mean of one rank's time, drawn anew for every iteration and rank."""
    distribution: str = "lognormal"
    """"lognormal" or "normal"."""
    slow_ranks: tuple[float, ...] = ()
    """By what factor each rank that is always slow is slower than the others: 1 or more. No width hides these."""

    def __post_init__(self) -> None:
        check_at_least("cv", self.cv, 0)
        if self.distribution not in ("lognormal", "normal"):
            raise ValueError(f"distribution must be lognormal or normal; got {self.distribution}")
        if self.distribution == "normal" and self.cv > MOST_NORMAL_CV:
            raise ValueError(f"cv must be at most {MOST_NORMAL_CV} with a normal distribution; got {self.cv}")
        for factor in self.slow_ranks:
            check_at_least("slow_ranks", factor, 1)

    @property
    def slowest(self) -> float:
        """The factor of the slowest rank; 1 if none is always slow."""
        return max((1.0, *self.slow_ranks))

    def check_world_size(self, world_size: int) -> None:
        """Raise ``ValueError`` if more ranks are slow than there are."""
        if len(self.slow_ranks) > world_size:
            raise ValueError(f"slow_ranks must be at most world_size {world_size}; got {len(self.slow_ranks)}")


def _slowed(seconds: float, share: float, beside: float) -> float:
    """What takes ``seconds`` alone is slower by ``share`` while something else runs, which takes ``beside`` s."""
    return min(seconds * (1 + share), seconds + beside * share / (1 + share))
