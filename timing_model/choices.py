"""What a plan chooses among, and which of two choices is the simpler one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from timing_model.all_reduce import ALL_REDUCES, SEGMENT_BYTES, CollectiveTime
from timing_model.checks import check_count, check_one_of
from timing_model.iteration import IterationTime
from timing_model.presets import CODECS
from timing_model.profile import UNCOMPRESSED, Profile
from timing_model.question import STRATEGIES, Question

TIE = 0.01
"""Configurations that are nearer than this to the fastest one are as fast: the simplest of them is chosen."""
WIDTHS = (1, 2, 3, 4)
SEGMENTS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
SIMPLEST = ("ddp", "pipelined", "ps-sync")
"""Strategies of width 1 in this order."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched: every combination that works."""

    codecs: tuple[str, ...]
    all_reduces: tuple[str, ...]
    strategies: tuple[str, ...] = STRATEGIES
    widths: tuple[int, ...] = WIDTHS
    segments: tuple[int, ...] = SEGMENTS
    """Bytes that a message has at most."""

    def __post_init__(self) -> None:
        for name in ("codecs", "all_reduces", "strategies", "widths", "segments"):
            if not getattr(self, name):
                raise ValueError(f"{name} must be at least one; got none")
        for strategy in self.strategies:
            check_one_of("strategy", strategy, STRATEGIES)
        for all_reduce in self.all_reduces:
            check_one_of("all_reduce", all_reduce, ALL_REDUCES)
        for name in ("widths", "segments"):
            for number in getattr(self, name):
                check_count(name, number)

    @classmethod
    def of(cls, cluster: Profile) -> Space:
        """All that was measured; of a cluster that is written by hand, all that there is."""
        codecs = (UNCOMPRESSED, *cluster.codecs)
        if cluster.calibrated.world_sizes:
            return cls(codecs=codecs, all_reduces=cluster.calibrated.all_reduces)
        return cls(codecs=tuple(dict.fromkeys((*codecs, *CODECS))), all_reduces=ALL_REDUCES)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration, and what it takes."""

    question: Question
    iteration: IterationTime
    collective: CollectiveTime
    score: float
    """Time of an iteration in s, times how many more of them are needed (``accuracy_cost``)."""


def simplicity(question: Question) -> tuple[float, ...]:
    """To sort by, the simplest first: less late and less lossy, then less that differs from the defaults.

    Half the bits count as half a width more.
    """
    bits = 32.0 if question.codec_profile is None else question.codec_profile.bits
    return (
        round(question.width - 1 + math.log2(32 / bits) / 2, 1),
        -bits,
        SIMPLEST.index(question.strategy),
        0 if question.all_reduce is None else ALL_REDUCES.index(question.all_reduce),
        abs(math.log2(question.segment_bytes / SEGMENT_BYTES)),
    )
