"""Parameters of the formulas, named by the paper's letters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from timing_model.checks import check_above_0, check_at_least, check_count

FLOAT_BYTES = 4
"""Bytes of a float32 value."""


@dataclass(frozen=True, kw_only=True)
class LinkParams:
    """Costs of a link and of the ranks at its ends. All are finite and at least 0."""

    alpha: float
    """Latency, in s per message. The latencies of consecutive messages overlap."""
    beta: float
    """Transfer time, in s per byte."""
    gamma: float
    """Reduction time, in s per byte summed."""
    sync: float
    """Fixed cost of one collective (S), in s."""
    overhead: float = 0.0
    """CPU time of a message (o), in s, at the rank that sends it. Unlike latency, it never overlaps."""
    host: float = 0.0
    """CPU time that sending and receiving a byte takes of a rank, in s per byte. One core does it while the byte is on
    its way, so a byte takes no less, however fast the link is."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_at_least(field.name, getattr(self, field.name), 0)

    def byte_seconds(self, sharing: float = 1.0) -> float:
        """Return the time of a byte on a link that ``sharing`` ranks share, in s: the longer one of wire and core.

        >>> link = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0, host=3.0)
        >>> [link.byte_seconds(sharing) for sharing in (1, 4)]
        [3.0, 4.0]
        """
        return max(self.beta * sharing, self.host)

    def times(self, factor: float) -> LinkParams:
        """Return a link on which any collective takes ``factor`` times as long, codecs excluded."""
        return LinkParams(**{name: factor * value for name, value in dataclasses.asdict(self).items()})


@dataclass(frozen=True, kw_only=True)
class PlacedLink:
    """A link from some ranks to others. Every rank has a full-duplex wire of its own for it."""

    link: LinkParams
    senders: tuple[int, ...] = ()
    """Ranks that send over the link; all ranks if empty."""
    receivers: tuple[int, ...] = ()
    """Ranks that receive over the link; all ranks if empty."""
    node: int = 0
    """Number of adjoining ranks that share a node, within which the link stays; 0 if it connects any ranks."""

    def connects(self, sender: int, receiver: int) -> bool:
        """Return True if the link leads from one rank to the other.

        >>> link = LinkParams(alpha=0.0, beta=0.0, gamma=0.0, sync=0.0)
        >>> [PlacedLink(link=link, senders=(3,), node=2).connects(3, receiver) for receiver in (2, 4)]
        [True, False]
        """
        return (
            (not self.senders or sender in self.senders)
            and (not self.receivers or receiver in self.receivers)
            and (not self.node or sender // self.node == receiver // self.node)
        )


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """Mean computation times of one iteration of one rank, in s. All fields are finite and at least 0."""

    update: float
    """Time of optimizer, prediction and packing, which follow the arrival of a gradient."""
    forward: float
    backward: float
    compute_slowdown: float = 0.0
    """Share by which a rank's processor is slower in forward and backward passes while a collective runs."""
    processor_share: float = 1.0
    """Share of the passes for which the rank's processor is busy; the rest, as on an accelerator, is not slower."""
    loading: float = 0.0
    """Time that one process takes to load a batch; not a part of the computation, unless the rank loads it itself."""
    handover: float = 0.0
    """Additional time of a collective in training: another thread runs it, on memory that left the caches meanwhile,
    and in a pipeline it begins while the rank updates."""
    outer_update: float = 0.0
    """Time of packing, outer optimizer and prediction at the end of a window of local steps; 0 without local steps."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_at_least(field.name, getattr(self, field.name), 0)
        if self.processor_share > 1:
            raise ValueError(f"processor_share must be at most 1; got {self.processor_share}")

    @property
    def total(self) -> float:
        """Time of the whole computation (c in the formulas), in s."""
        return self.update + self.forward + self.backward

    def window(self, local_steps: int) -> ComputeTimes:
        """Return the times of a window of this many iterations, which ends with the outer update.

        >>> ComputeTimes(update=1.0, forward=1.0, backward=2.0, outer_update=0.5).window(3).total
        12.5
        """
        return dataclasses.replace(
            self,
            update=local_steps * self.update + self.outer_update,
            forward=local_steps * self.forward,
            backward=local_steps * self.backward,
            loading=local_steps * self.loading,
            outer_update=0.0,
        )

    def with_workers(self, workers: int) -> ComputeTimes:
        """Return the times with this many loader workers: without any, the rank loads before its forward pass."""
        return self if workers else dataclasses.replace(self, forward=self.forward + self.loading, loading=0.0)

    def at_width(self, width: int, t_comm: float) -> tuple[float, float]:
        r"""Return the times, in s, of the whole computation and of a collective of ``t_comm`` s in a pipeline.

        A collective takes m = ``t_comm`` + ``handover``. At width 1 the two do not overlap. Otherwise the collective
        runs next to the update, whose time u is that of such an update, and then next to the passes. With p the time of
        both passes, k ``compute_slowdown`` and b ``processor_share``, a second of the processor does the work of
        1/(1+k) s meanwhile:

        .. math:: c' = u + \min\left(p (1 + b k),\; p + \frac{k}{1 + k} \max(m - u, 0)\right)

        >>> ComputeTimes(update=1.0, forward=1.0, backward=3.0, compute_slowdown=0.5).at_width(2, 4.0)
        (6.0, 4.0)
        >>> idle = ComputeTimes(update=1.0, forward=1.0, backward=3.0, compute_slowdown=0.5, processor_share=0.25)
        >>> idle.at_width(2, 4.0)
        (5.5, 4.0)
        """
        if t_comm > 0:
            t_comm += self.handover
        if width == 1:
            return self.total, t_comm
        slowed = self.slowed(self.forward + self.backward, max(t_comm - self.update, 0.0))
        return self.update + slowed, t_comm

    def hides(self, t_comm: float) -> bool:
        """Return True if a pipeline computes for at least as long as a collective of ``t_comm`` s takes meanwhile.

        >>> [ComputeTimes(update=0.0, forward=1.0, backward=3.0).hides(t_comm) for t_comm in (4.0, 4.1)]
        [True, False]
        """
        computation, communication = self.at_width(2, t_comm)
        return communication <= computation

    def slowness(self, factor: float) -> float:
        r"""Return the factor of the whole computation of a rank whose passes take ``factor`` times as long (f).

        Its processor does a share b of the passes, and is slower by as much in updates. The rest is an accelerator's,
        whose slowness slows no update. With p the time of both passes and u that of all updates:

        .. math:: \frac{f p + (1 + b (f - 1)) u}{p + u}

        >>> ComputeTimes(update=1.0, forward=1.0, backward=3.0).slowness(1.5)
        1.5
        >>> ComputeTimes(update=1.0, forward=1.0, backward=3.0, processor_share=0.0).slowness(1.5)
        1.4
        """
        passes, updates = self.forward + self.backward, self.update + self.outer_update
        if passes + updates == 0:
            return factor
        return factor - (1 - self.processor_share) * (factor - 1) * updates / (passes + updates)

    def slowed(self, seconds: float, t_comm: float) -> float:
        """Return the time, in s, of ``seconds`` of a pass while a collective runs for another ``t_comm`` s."""
        slowdown = self.compute_slowdown
        return min(seconds * (1 + self.processor_share * slowdown), seconds + t_comm * slowdown / (1 + slowdown))


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """Bits of a codec on the wire and its CPU time, in s per float32 value, at the message sizes it is used for."""

    name: str
    bits: float
    """Bits per value on the wire, scales included; above 0."""
    encode: float
    """Seconds per value to turn values into bytes."""
    decode: float
    """Seconds per value to turn bytes into values."""
    add: float
    """Seconds per value to decode values and add them to the rank's own."""
    hop: float
    """Seconds per value to decode, add and encode in one pass."""
    call: float = 0.0
    """Fixed cost of any of these operations, in s per call."""

    def __post_init__(self) -> None:
        check_above_0("bits", self.bits)
        for name in ("encode", "decode", "add", "hop", "call"):
            check_at_least(name, getattr(self, name), 0)

    def wire_bytes(self, numel: float) -> float:
        """Return the bytes that ``numel`` values take on the wire.

        >>> uncompressed(0.0).wire_bytes(10)
        40.0
        """
        return numel * self.bits / 8

    def seconds(self, numel: float) -> dict[str, float]:
        """Return the time of each operation on ``numel`` values, in s, by its name."""
        rates = {"encode": self.encode, "decode": self.decode, "add": self.add, "hop": self.hop}
        return {operation: rate * numel + self.call for operation, rate in rates.items()}

    def free(self) -> CodecCost:
        """Return a codec with the same bytes and no CPU time, which leaves the cost of the wire."""
        return dataclasses.replace(self, encode=0.0, decode=0.0, add=0.0, hop=0.0, call=0.0)


def uncompressed(gamma: float) -> CodecCost:
    """Return the cost of plain float32: nothing is encoded or decoded, and a sum costs ``gamma`` s per byte.

    >>> uncompressed(0.25).hop
    1.0
    """
    reduction = FLOAT_BYTES * gamma
    return CodecCost(name="fp32", bits=32.0, encode=0.0, decode=0.0, add=reduction, hop=reduction)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parts of some gradients, such as the rows of an embedding that are not zero, which every rank gathers."""

    tensors: tuple[int, ...]
    """Numbers of the tensors, in the order of the forward pass, at least one."""
    nbytes: float
    """Bytes of one rank's parts."""
    messages: int
    """Number of times that something is gathered: counts first, then what is counted."""
    work: float
    """Time, in s, in which a rank finds its own parts and adds up those of all ranks."""

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("tensors must be at least one; got none")
        check_at_least("nbytes", self.nbytes, 0)
        check_count("messages", self.messages)
        check_at_least("work", self.work, 0)


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Factors of low rank that are summed in place of a gradient, in two all-reduces (PowerSGD)."""

    left: float
    """Values of the first all-reduce."""
    right: float
    """Values of the second one, which begins when the first is complete."""
    work: float
    """Time, in s, of products and decompositions before, between and after them."""

    def __post_init__(self) -> None:
        for name in ("left", "right", "work"):
            check_at_least(name, getattr(self, name), 0)

    def share(self, share: float) -> Factors:
        """Return this share of the factors: those of a part of the gradient, in the mean of all parts."""
        return Factors(left=share * self.left, right=share * self.right, work=share * self.work)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Variation of the computation's time between iterations and between ranks, and of the collective's time.

    Both times are lognormal.
    """

    cv: float = 0.0
    """Standard deviation over mean of one rank's time, between iterations."""
    persistence: float = 0.0
    """Correlation of a rank's deviation with that of its iteration before, as in an AR(1) process, from 0 to below 1;
    with 0, times are drawn independently in every iteration. Ranks are independent of each other."""
    comm_cv: float = 0.0
    """Standard deviation over mean of the collective's time, which is independent in every iteration. It changes the
    time of a pipeline alone: where a collective is not hidden, its mean counts."""
    slow_ranks: tuple[float, ...] = ()
    """Factors, each 1 or more, by which ranks that are always slow are slower than the others. No width hides them."""

    def __post_init__(self) -> None:
        for name in ("cv", "comm_cv"):
            check_at_least(name, getattr(self, name), 0)
        if not 0 <= self.persistence < 1:
            raise ValueError(f"persistence must be at least 0 and below 1; got {self.persistence}")
        for factor in self.slow_ranks:
            check_at_least("slow_ranks", factor, 1)

    @property
    def slowest(self) -> float:
        """Factor of the slowest rank; 1 if none is always slow."""
        return max((1.0, *self.slow_ranks))

    def check_world_size(self, world_size: int) -> None:
        """Raise ``ValueError`` if more ranks are slow than there are."""
        if len(self.slow_ranks) > world_size:
            raise ValueError(f"slow_ranks must be at most world_size {world_size}; got {len(self.slow_ranks)}")
