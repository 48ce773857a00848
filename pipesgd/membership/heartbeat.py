"""Liveness and phases of the ranks, decided from their heartbeats, without input, output or a clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipesgd.config import DEFAULT_STALL_SECONDS
from pipesgd.errors import named
from pipesgd.membership.farewell import Farewell
from pipesgd.membership.store import MalformedValue, decode
from pipesgd.sections import DEFAULT_TIMEOUT

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a rank."""

SILENT_SECONDS = 3.0
"""Seconds without a heartbeat after which a rank is called silent; it may hold Python's lock in a long call."""

SHORTEST_SILENCE = 5.0
"""Seconds without a heartbeat that are never taken for the loss of a rank, however short the timeout."""

LONGEST_PHASE = 10.0
"""Timeouts for which a rank that others wait for may stay in one phase: one that hangs may send heartbeats, too."""

LEFT = "left"
"""Phase of a rank that has ended normally: it sends no more heartbeats, and is not missed."""


@dataclass(frozen=True)
class Beat:
    """Report of a rank on itself in one heartbeat."""

    count: int
    """Number of heartbeats so far."""
    iteration: int | None
    phase: str
    waiting: bool
    """True if the rank waits for other ranks in this phase."""
    seconds: float
    """Seconds in this phase so far."""

    def encode(self) -> str:
        return json.dumps([self.count, self.iteration, self.phase, self.waiting, self.seconds])

    @staticmethod
    def decode(value: bytes) -> Beat | None:
        """Decode a heartbeat that ``encode`` wrote; return None for anything else, which counts as no heartbeat."""
        try:
            match decode(value):
                case [int(count), int() | None as iteration, str(phase), bool(waiting), int() | float() as seconds]:
                    return Beat(count, iteration, phase[:100], waiting, float(seconds))
        except (MalformedValue, OverflowError):  # a whole number may be too large for a float
            pass
        return None

    def place(self) -> str:
        """Describe what the rank is doing: "compute of iteration 7 for 31 s"."""
        where = "" if self.iteration is None else f" of iteration {self.iteration}"
        return f"{self.phase}{where} for {self.seconds:.0f} s"


@dataclass(frozen=True)
class News:
    """Report of rank 0 to the others, so that not every rank needs to read every heartbeat."""

    count: int
    silent: Mapping[int, float]
    """Seconds since the last heartbeat of ranks that have been silent for a while."""
    last: bool
    """True if rank 0 has ended normally: no further news will come, and rank 0 is not missed."""

    def encode(self) -> str:
        return json.dumps([self.count, list(self.silent.items()), self.last])

    @staticmethod
    def decode(value: bytes) -> News | None:
        """Decode what ``encode`` wrote; return None for anything else."""
        try:
            match decode(value):
                case [int(count), list(silent), bool(last)]:
                    return News(count, {int(rank): float(seconds) for rank, seconds in silent}, last)
        except (MalformedValue, TypeError, ValueError, OverflowError):
            pass
        return None


class Liveness:
    """Knowledge of one rank about the others' heartbeats.

    Rank 0 reads all heartbeats (``observe``) and reports to the others which ranks are silent (``news``). They read
    only these reports (``observe_news``), which are rank 0's heartbeat to them. Each rank begins its round with
    ``wake``. All times are seconds of one clock of the caller's. Lines name each rank by its ``number``.
    """

    def __init__(self, rank: int, world_size: int, now: float, number: Callable[[int], int] = int):
        self.beats: list[Beat | None] = [None] * world_size
        """Newest heartbeat of each rank, as far as this rank has read it."""
        self._rank = rank
        self._number = number
        self._heard = [now] * world_size
        self._told: dict[int, float] = {}
        self._news = -1
        self._woke = now
        self._said_stall = now

    def wake(self, now: float) -> None:
        """Begin a round. Time in which this rank itself was stopped does not count as silence of the others."""
        absent = now - self._woke - BEAT_SECONDS
        self._woke = now
        if absent > SILENT_SECONDS:
            self._heard = [heard + absent for heard in self._heard]
            self._said_stall += absent

    def observe(self, rank: int, beat: Beat | None, now: float) -> None:
        """Record the heartbeat of ``rank`` that was found."""
        before = self.beats[rank]
        if beat is not None and (before is None or beat.count != before.count):
            self.beats[rank] = beat
            self._heard[rank] = now

    def overlook(self, rank: int, now: float) -> None:
        """Count no silence of ``rank`` up to ``now``: it was heard elsewhere, or its heartbeat was overwritten."""
        self._heard[rank] = max(self._heard[rank], now)

    def observe_news(self, news: News | None, now: float) -> None:
        """Record the news from rank 0."""
        if news is not None and news.count != self._news:
            self._news = news.count
            self._heard[0] = math.inf if news.last else now
            self._told = dict(news.silent)

    def news(self, count: int, now: float) -> News:
        """Return rank 0's news for the others."""
        return News(count, self.silent(now), last=self._has_left(0))

    def silent(self, now: float) -> dict[int, float]:
        """Return the seconds since the last heartbeat of each rank that has been silent for a while."""
        if self._rank == 0:
            silence = {rank: now - heard for rank, heard in enumerate(self._heard) if not self._has_left(rank)}
        else:
            silence = self._told | {0: now - self._heard[0]}
        return {
            rank: seconds
            for rank, seconds in silence.items()
            if rank != self._rank and 0 <= rank < len(self._heard) and seconds >= SILENT_SECONDS
        }

    def lost(self, now: float, timeout: float) -> dict[int, float]:
        """Return the silent ranks that are taken for dead or hanging, with the seconds that each has been silent."""
        longest = max(timeout, SHORTEST_SILENCE)
        return {rank: seconds for rank, seconds in self.silent(now).items() if seconds >= longest}

    def stall(self, now: float, seconds: float) -> str | None:
        """Return a line that names the ranks that this one, which reads all heartbeats, waits for; None if none is due.

        The line is due when this rank has waited in one phase for ``seconds``, and then again every ``seconds``.
        """
        own = self.beats[self._rank]
        if own is None or not own.waiting or own.seconds < seconds or now - self._said_stall < seconds:
            return None
        self._said_stall = now
        silent = self.silent(now)
        name = self._number
        awaited = [f"rank {name(rank)} (no heartbeat for {seconds:.0f} s)" for rank, seconds in sorted(silent.items())]
        for rank, beat in enumerate(self.beats):
            if beat is not None and not beat.waiting and rank not in silent and beat.phase != LEFT:
                awaited.append(f"rank {name(rank)} ({beat.place()})")
        return f"stalled: rank {name(self._rank)} waits in {own.place()}, for " + (
            ", ".join(awaited) or "the network: no rank is silent, and all of them wait"
        )

    def _has_left(self, rank: int) -> bool:
        beat = self.beats[rank]
        return beat is not None and beat.phase == LEFT


class Patience:
    """Deadline of a wait for missing ranks: a slow rank is not a silent one.

    The wait ends ``timeout`` seconds after the last sign that one of them makes progress. A rank makes progress if it
    has moved to another iteration or phase, or if it sends heartbeats in a phase in which it does not itself wait for
    others: it computes, loads or writes. In one phase it may take ``longest`` seconds in all.

    >>> patience = Patience(timeout=5.0, longest=50.0, now=100.0)
    >>> for count in (1, 2, 3):
    ...     patience.observe({1: Beat(count, 7, "checkpoint", waiting=False, seconds=0.0)}, now=100.0 + count)
    >>> patience.end
    108.0
    """

    def __init__(self, *, timeout: float, longest: float, now: float):
        self.end = now + timeout
        """Time at which the wait ends."""
        self._begin = now
        self._timeout = timeout
        self._longest = longest
        self._seen: dict[int, tuple[Beat, float]] = {}

    def observe(self, beats: Mapping[int, Beat], now: float) -> None:
        """Record the newest heartbeats of ranks that are still missing."""
        for rank, beat in beats.items():
            before, since = self._seen.get(rank, (beat, self._begin))
            moved = (beat.iteration, beat.phase) != (before.iteration, before.phase)
            if moved:
                since = now
            self._seen[rank] = (beat, since)
            if moved or (beat.count != before.count and not beat.waiting):
                self.end = max(self.end, min(now + self._timeout, since + self._longest))

    def extend(self, now: float) -> None:
        """Wait as after a sign of progress, if there may have been one that cannot be read."""
        self.end = max(self.end, min(now + self._timeout, self._begin + self._longest))


@dataclass
class Standing:
    """State of this rank: one object for a process, whichever ranks it speaks to."""

    timeout: float = DEFAULT_TIMEOUT
    """Seconds that this rank waits for another one."""
    silence: float | None = None
    """Seconds without a heartbeat after which a rank is lost, if those are fewer than ``timeout``."""
    stall_seconds: float = DEFAULT_STALL_SECONDS
    """Seconds of waiting after which rank 0 reports the ranks that it waits for."""
    iteration: int | None = None
    """Iteration that the rank is in; None before training."""
    newest_checkpoint: int | None = None
    """Iteration after which the newest checkpoint was written."""
    farewell: Farewell = field(default_factory=Farewell)
    last_words: Callable[[str], object] | None = None
    """Function called with the line that says why this rank ends; None if nobody keeps it."""
    _phase: tuple[str, bool, float] = field(default=("start", False, 0.0), init=False)
    _count: int = field(default=0, init=False)

    def enter(self, phase: str, now: float, *, waiting: bool = False) -> tuple[str, bool, float]:
        """Begin ``phase``; return the phase before it, for ``resume``."""
        before = self._phase
        self._phase = (phase, waiting, now)
        return before

    @property
    def phase(self) -> tuple[str, bool, float]:
        """The present phase, for ``resume``."""
        return self._phase

    @property
    def longest_silence(self) -> float:
        """Seconds without a heartbeat, or without an answer to one, that this rank waits for."""
        return self.timeout if self.silence is None else min(self.timeout, self.silence)

    @property
    def has_left(self) -> bool:
        """True if this rank's last heartbeat reports that the rank has ended normally."""
        return self._phase[0] == LEFT

    def resume(self, phase: tuple[str, bool, float]) -> None:
        """Return to a phase that was interrupted."""
        self._phase = phase

    def beat(self, now: float) -> Beat:
        """Return the next heartbeat."""
        phase, waiting, since = self._phase
        self._count += 1
        return Beat(self._count, self.iteration, phase, waiting, now - since)


def no_word_from(silent: Mapping[int, float], world_size: int) -> str:
    """Return the clause that names silent ranks, with the seconds since the one that was heard last.

    If all others are silent, this machine has more likely lost its network.
    """
    seconds = min(silent.values())
    if 1 < len(silent) == world_size - 1:
        return f"no heartbeat from any other rank for {seconds:.0f} s: this machine may be cut off from the network"
    return f"no heartbeat from {named(sorted(silent))} for {seconds:.0f} s"
