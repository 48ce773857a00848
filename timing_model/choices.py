"""Configurations that a plan chooses among, and which of two choices is the simpler one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from timing_model.all_reduce import CollectiveTime
from timing_model.arguments import option, whole
from timing_model.buckets import WHOLE, Cut
from timing_model.checks import check_count, check_one_of
from timing_model.iteration import IterationTime
from timing_model.job import STRATEGIES, Job
from timing_model.measured import LOW_RANK, UNCOMPRESSED
from timing_model.own_schedules import check_all_reduce
from timing_model.presets import CODECS
from timing_model.schedules import ALL_REDUCES, SEGMENT_BYTES

TIE = 0.03
"""Relative distance from the fastest configuration within which others count as equally fast: the simplest of them is
chosen. So a width, or a codec, is recommended only where it gains more."""
LATE_TIE = 0.05
"""Relative distance from the fastest configuration within which one without late gradients is chosen."""
WIDTHS = (1, 2, 3)
BUCKETS = ("1", "4", "16")
"""Buckets that are searched: numbers of them."""
ACCURATE = (UNCOMPRESSED, "bf16", "fp16", "int8", "int4")
"""Codecs that cost trainings the least, all but int4 next to nothing without lateness: int4 cost a small transformer up
to 1.5 % of its loss (``experiments/results/accuracy``). Others are searched only if asked for."""
ALL = "all"
"""Name that stands for every codec."""
LARGEST_ALL_TO_ALL = 32
"""Most ranks for which all-to-all is searched by default, unless more were measured: the formulas include neither the
connections nor the losses where all send to one."""
SEGMENTS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
SIMPLEST = ("ddp", "pipelined", "ps-sync")
"""Strategies of width 1, the simplest first."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Space of a search: every combination that works."""

    strategies: tuple[str, ...] = option(STRATEGIES, several=True)
    """Strategies to search: all of them without it."""
    widths: tuple[int, ...] = option(WIDTHS, whole(), "K", several=True)
    """Widths to search: 1 to 3 without it."""
    codecs: tuple[str, ...] = option((), several=True)
    """Codecs to search: without it fp32, bf16, fp16, int8 and int4; "all" includes those that cost accuracy."""
    all_reduces: tuple[str, ...] = option((), several=True)
    """All-reduces to search: without it those that were measured; with numbers typed in all, all-to-all up to 32
    ranks."""
    segments: tuple[int, ...] = option(SEGMENTS, whole(), "N", several=True)
    """Sizes of the largest message to search, in bytes: 64 KiB to 16 MiB without it."""
    buckets: tuple[str, ...] = option(("1",), shown="N|SIZE", several=True)
    """Buckets to search, in which gradients leave during the backward pass: numbers of them, or largest sizes. Without
    it 1, 4 and 16. At widths above 1, where they gain nothing, they are searched only if the whole gradient is not."""
    members: tuple[int, ...] = option((1,), whole(), "M", several=True)
    """Ranks of an island to search, with --split: without it all that divide the ranks, and fit into nodes."""

    def __post_init__(self) -> None:
        for name in ("codecs", "all_reduces", "strategies", "widths", "segments", "buckets", "members"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be at least one; got none")
        for strategy in self.strategies:
            check_one_of("strategy", strategy, STRATEGIES)
        for all_reduce in self.all_reduces:
            check_all_reduce("all_reduce", all_reduce)
        for name in ("widths", "segments", "members"):
            for number in getattr(self, name):
                check_count(name, number)

    @classmethod
    def of(cls, base: Job) -> Space:
        """Return the default space of a job: the all-reduces that were measured, or all of them on a cluster that is
        typed in; in the same way, the codecs that are ``ACCURATE``; as many of ``BUCKETS`` as there are tensors for;
        and all islands, if a model is to be split."""
        ranges, codecs = base.cluster.calibrated, all_codecs(base)
        most = max(LARGEST_ALL_TO_ALL, *ranges.world_sizes, 0)
        return cls(
            codecs=tuple(one for one in ACCURATE if one in codecs),
            all_reduces=tuple(
                one
                for one in (ranges.all_reduces if ranges.world_sizes else ALL_REDUCES)
                if one != "all-to-all" or base.world_size <= most
            ),
            buckets=tuple(one for one in BUCKETS if int(one) <= max(1, len(base.whole))),
            members=base.mesh.choices,
        )

    def widths_of(self, cut: Cut) -> tuple[int, ...]:
        """Return the widths that are searched with gradients that leave in these buckets."""
        if cut == WHOLE or all(Cut.parse(one) != WHOLE for one in self.buckets):
            return self.widths
        return tuple(width for width in self.widths if width == 1)


def all_codecs(job: Job) -> tuple[str, ...]:
    """Return every codec that was measured; on a cluster that is typed in, every one there is."""
    known = () if job.cluster.calibrated.world_sizes else tuple(CODECS)
    factors = () if job.compute.low_rank is None else (LOW_RANK,)
    return tuple(dict.fromkeys((UNCOMPRESSED, *job.cluster.codecs, *known, *factors)))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration and its times."""

    job: Job
    iteration: IterationTime
    collective: CollectiveTime
    score: float
    """Time of an iteration, in s, times the factor by which more iterations are needed (``accuracy_cost``)."""


def simplicity(job: Job) -> tuple[float, ...]:
    """Return a sort key, the simplest first: no late gradients, then smaller islands, then less staleness and less
    loss, then fewer differences from the defaults.

    Half the bits count as half a width more. Of codecs with equal bits the first of ``presets.CODECS`` is the simplest.
    """
    codecs = [UNCOMPRESSED, *CODECS]
    bits = 8 * job.wire_bytes / job.compute.numel if job.low_rank is not None else 32.0
    bits = bits if job.codec_profile is None else job.codec_profile.bits
    return (
        job.width > 1,
        job.islands.members,
        round(job.width - 1 + math.log2(32 / bits) / 2, 1),
        -bits,
        codecs.index(job.codec) if job.codec in codecs else len(codecs),
        SIMPLEST.index(job.strategy),
        0 if job.all_reduce is None else [*ALL_REDUCES, job.all_reduce].index(job.all_reduce),
        abs(math.log2(job.segment_bytes / SEGMENT_BYTES)),
        len(job.cut(job.compute.tensors)),
    )
