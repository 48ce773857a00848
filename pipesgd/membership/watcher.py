"""The thread that watches the other ranks: it sends this rank's heartbeat, and notices silent or failed ranks."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist

from pipesgd.errors import CommunicationError, DeadlineExceeded, PeerFailed, RunError, StoppedBySignal
from pipesgd.membership.heartbeat import (
    BEAT_SECONDS,
    LEFT,
    SILENT_SECONDS,
    Beat,
    Liveness,
    News,
    Standing,
    no_word_from,
)
from pipesgd.membership.neighbours import Neighbours
from pipesgd.membership.sealed import forged
from pipesgd.membership.store import BoundedStore, MalformedValue, StoreSilent, decode, decode_text, poll, present

FAILURE = "a failure"
"""Key that is in the store as soon as a rank has failed."""

STOPPING = "stopping"
"""Key of the signal that asked a rank to stop."""

FAREWELL_SILENCE = 5.0
"""Seconds of a farewell in which a rank that has become silent must be heard again. A connection that was cut for a few
seconds stays silent for as long again, since TCP doubles its wait whenever a retransmission fails."""

CLOSE_SECONDS = 2.0

DOUBT_SECONDS = 0.5
"""Longest wait for word of a rank that a failed one has lost."""

ENDED_SECONDS = 0.3
"""Longest time between the loss of another connection, or of the store, and the news that a process has ended."""

_PLACE = re.compile(rb"[0-9]{1,18}")


def report_key(rank: int) -> str:
    """Return the key of the reason why ``rank`` has failed: a text, empty if another rank's failure has ended it."""
    return f"failure/{rank}"


class Cause(NamedTuple):
    """Failure of a rank that has ended the others."""

    rank: int
    text: str
    accused: int | None
    """Rank that it has lost, and that has reported nothing: that one may be the cause, and about to say so."""


def root_cause(reports: Mapping[int, bytes], first: int | None = None) -> Cause | None:
    """Return the failure that has ended the others, as far as the ranks' reports tell; no report is no bytes.

    A rank that has lost a peer which has failed, too, or was ended by a failure elsewhere, is no cause: the connections
    of that one were closed. Of ranks that accuse each other it is the one known to be the ``first``, or that of lowest
    number. Reports are JSON, [why, peer or None]; anything else counts as text. An empty text is a victim's.
    """
    said = {rank: one for rank, report in sorted(reports.items()) if (one := _why_and_peer(report))[0]}
    causes = [rank for rank, (_, peer) in said.items() if peer is None or not reports.get(peer)]
    causes = causes or [rank for rank in (first, *said) if rank in said]
    if not causes:
        return None
    text, peer = said[causes[0]]
    return Cause(causes[0], text, None if peer is None or reports.get(peer) else peer)


def _why_and_peer(report: bytes) -> tuple[str, int | None]:
    with contextlib.suppress(MalformedValue):
        match decode(report):
            case [str(text), int() | None as peer]:
                return text[:2000], peer
    return decode_text(report), None


def ended_text(number: int) -> str:
    """Return the reason that others give for the rank of this number, whose process has ended."""
    return f"its process has ended without a word: no heartbeat from rank {number} any more"


def report_ended(store: dist.Store, rank: int, number: int) -> None:
    """Report, in place of ``rank``, that its process has ended, unless it has reported itself why it fails."""
    if not store.check([report_key(rank)]):
        store.set(report_key(rank), json.dumps([ended_text(number), None]))
        store.set(FAILURE, "")


class Watcher:
    """Thread that sends a heartbeat once a second, and calls ``on_failure`` when another rank is lost or has failed.

    gloo's waits cannot be ended from inside, and the main thread may be in one of them, so all of this happens in a
    thread. ``on_failure`` is called in it, once; the heartbeat continues afterwards. ``Liveness`` decides by heartbeats
    which ranks are lost; ``neighbours`` notices ends of processes at once.
    ``on_stall`` gets rank 0's line about a long wait. The thread needs its own client of the store. Messages name each
    rank by its ``number``. With ``beats_directly`` ranks give signs of life on their connections, too, which nobody can
    hide by writing older heartbeats to the store.
    """

    def __init__(
        self,
        store: BoundedStore,
        rank: int,
        world_size: int,
        standing: Standing,
        *,
        on_failure: Callable[[RunError], None],
        on_stall: Callable[[str], None],
        number: Callable[[int], int] = int,
        beats_directly: bool = False,
    ):
        self.store = store
        self._beats_directly = beats_directly
        self._rank = rank
        self._world_size = world_size
        self._standing = standing
        self._on_failure = on_failure
        self._on_stall = on_stall
        self._number = number
        self.neighbours = Neighbours(rank, world_size, on_stall, number)
        self._liveness = Liveness(rank, world_size, time.monotonic(), number)
        self._answered = time.monotonic()
        self._failed = False
        self._doubted: tuple[int, float] | None = None
        """Failed rank that accuses another one, which has not spoken, and the time at which this was found."""
        self._stopping: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipesgd-watcher", daemon=True)
        self._thread.start()

    def silent(self) -> dict[int, float]:
        """Return how many seconds each silent rank had been silent when the store last answered. No input or output."""
        return self._liveness.silent(self._answered)

    def ended(self, within: float = 0.0) -> list[int]:
        """Return the ranks whose processes have ended without a word; wait for the first one for some seconds."""
        if threading.current_thread() is not self._thread:
            poll(lambda: bool(self.neighbours.ended), within)
        elif not self.neighbours.ended:
            self.neighbours.wait(within)
        return sorted(self.neighbours.ended)

    def close(self) -> None:
        """Say goodbye and send a last heartbeat, so that this rank is not missed, and end the thread."""
        self.neighbours.say_goodbye()  # first, since the store may be slow and this process may end now
        self.store.hurry(CLOSE_SECONDS)
        self._closed.set()
        self.neighbours.wake()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            self._act(self._look, "heartbeat through the store")
            if not self._closed.is_set():
                self._act(self._rest, "watch of connections")
            if self._closed.is_set():
                break
        self._standing.enter(LEFT, time.monotonic())
        if not self._failed:
            self._look()
        self.neighbours.close()

    def _act(self, part: Callable[[], RunError | None], operation: str) -> None:
        """Do a ``part`` of the thread's round, and call ``on_failure`` with the first error."""
        try:
            error = part()
        except Exception as defect:  # noqa: BLE001 (without this thread the others would call this rank silent)
            error = self._error(CommunicationError, None, operation, repr(defect))
        if error is not None and not self._failed:
            self._failed = True
            self._on_failure(error)

    def _rest(self) -> None:
        """Wait for the next round, which is due at once when a process has ended."""
        seconds = BEAT_SECONDS if self._stopping is None and self._doubted is None else BEAT_SECONDS / 10
        try:
            self.neighbours.wait(seconds)
        except Exception:
            self._closed.wait(seconds)
            raise

    def _look(self) -> RunError | None:
        """Send a heartbeat and read the others'; return the error that ends this rank's run, if there is one."""
        self._liveness.wake(time.monotonic())
        beat = self._standing.beat(time.monotonic())
        try:
            failed = self.store.run(lambda store: self._meet(store, beat))
        except RuntimeError as problem:  # covers all of torch's errors
            if ended := self.ended(within=ENDED_SECONDS):  # rank 0's process may have taken the store along
                return self._error(PeerFailed, ended[0], beat.phase, ended_text(self._number(ended[0])))
            kind = DeadlineExceeded if isinstance(problem, StoreSilent) else CommunicationError
            reason = str(problem).split("] ", 1)[-1].split(". ")[0]
            return self._error(kind, None, "heartbeat through the store", reason)
        now = self._answered = time.monotonic()
        if failed is None:
            lost = self._liveness.lost(now, self._standing.longest_silence)
        else:
            lost = {rank: seconds for rank, seconds in self._liveness.silent(now).items() if rank == failed.accused}
            if not lost and failed.accused not in (None, self._rank):
                self._doubted = self._doubted or (failed.rank, now)
                if now - self._doubted[1] < DOUBT_SECONDS:
                    return None
            self._doubted = None
            if not lost:
                return self._error(PeerFailed, failed.rank, beat.phase, failed.text)
        if lost:
            silent = self._liveness.silent(now)
            if 1 < len(silent) == self._world_size - 1:  # more likely this rank is cut off: accuse nobody
                return self._error(DeadlineExceeded, None, "heartbeat", self._no_word_from(silent))
            return self._error(DeadlineExceeded, min(lost), "heartbeat", self._no_word_from(lost))
        if self._stopping is not None:
            return self._late_farewell(now)
        if self._rank == 0 and (line := self._liveness.stall(now, self._standing.stall_seconds)):
            self._on_stall(line)
        return None

    def _meet(self, store: dist.Store, beat: Beat) -> Cause | None:
        """Do one round through the store; return the failure of another rank, if there is one."""
        store.set(f"beat/{self._rank}", beat.encode())
        self.neighbours.meet(store)
        for rank in self.neighbours.ended:
            report_ended(store, rank, self._number(rank))
        if self._rank == 0:
            keys = [f"beat/{rank}" for rank in range(self._world_size)]
            beats = present(store, keys)
            now = time.monotonic()
            for rank, key in enumerate(keys):
                self._liveness.observe(rank, Beat.decode(beats.get(key, b"")), now)
            for key in forged(store, keys):
                self._liveness.overlook(keys.index(key), now)
            store.set("news", self._liveness.news(beat.count, now).encode())
        else:
            news = present(store, ["news"])
            self._liveness.observe_news(News.decode(news.get("news", b"")), time.monotonic())
            if forged(store, ["news"]):
                self._liveness.overlook(0, time.monotonic())
        if self._beats_directly:
            self.neighbours.beat()
            for rank, heard in self.neighbours.heard.items():
                self._liveness.overlook(rank, heard)
        if not store.check([FAILURE]):
            self._say_farewell(store)  # torchrun's SIGTERM after a failure begins none
            return None
        reports = present(store, [report_key(rank) for rank in range(self._world_size)])
        if report_key(self._rank) in reports:  # this rank has failed itself
            return None
        first = None if self._doubted is None else self._doubted[0]
        return root_cause({rank: reports.get(report_key(rank), b"") for rank in range(self._world_size)}, first)

    def _say_farewell(self, store: dist.Store) -> None:
        """Agree with the others on where to stop, once a rank got a signal: see ``Farewell``."""
        farewell = self._standing.farewell
        if self._stopping is None:
            if farewell.requested is not None:
                store.set(STOPPING, farewell.requested)
            elif not store.check([STOPPING]):
                return
            signal = decode_text(store.get(STOPPING))
            self._stopping = (signal, time.monotonic())
            if self._rank == 0:
                self._on_stall(f"{signal}: all ranks write a checkpoint and stop; a second one ends them at once")
        farewell.requested = farewell.requested or self._stopping[0]
        if not farewell.is_open or self._rank >= farewell.members:
            return
        store.set(f"place/{self._rank}", str(farewell.hold()))
        said = present(store, [f"place/{rank}" for rank in range(farewell.members)])
        places = [int(place) for place in said.values() if _PLACE.fullmatch(place)]
        if len(places) == farewell.members:
            farewell.meet_at(places)

    def _late_farewell(self, now: float) -> RunError | None:
        """Return the error that ends the run without a checkpoint, if none can be written or it takes too long."""
        assert self._stopping is not None
        signal, since = self._stopping
        farewell = self._standing.farewell
        silent = {rank: seconds for rank, seconds in self._liveness.silent(now).items() if rank < farewell.members}
        late = f"{farewell.seconds:g} s were not enough for it"
        lost = max(silent.values(), default=0.0) >= SILENT_SECONDS + FAREWELL_SILENCE
        patience = min(FAREWELL_SILENCE, farewell.seconds) if lost else farewell.seconds
        if not farewell.is_open or now - since < patience:
            return None
        return StoppedBySignal(
            signal,
            iteration=self._standing.iteration,
            newest=self._standing.newest_checkpoint,
            without=self._no_word_from(silent) if silent else late,
        )

    def _no_word_from(self, silent: Mapping[int, float]) -> str:
        return no_word_from({self._number(rank): seconds for rank, seconds in silent.items()}, self._world_size)

    def _error(
        self, kind: type[CommunicationError], peer: int | None, operation: str, reason: str
    ) -> CommunicationError:
        error = kind(rank=self._rank, peer=peer, operation=operation, reason=reason, iteration=self._standing.iteration)
        error.name_ranks(self._number)
        return error
