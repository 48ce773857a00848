"""Signs of life of the other members: who is lost, who has certainly died, and how long a round trip takes.

There is no clock here: all times are seconds of one clock of the caller's.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from pipesgd.membership.generation import Ballot
from pipesgd.membership.messages import Beat

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
SILENT_SECONDS = 3.0
"""Seconds without a message after which a member is lost, by default and at least."""
LEASE_SECONDS = 2.8
"""Seconds after which a member may then call another one silent, at the earliest: clocks may differ by three per
cent."""
TICK_SECONDS = 0.5
"""Seconds between two ticks."""
SHORTEST_RETRY = 1.0
"""Seconds after which the steps of a change are tried again, at least."""
ROUND_TRIPS = 8
"""Round trips of heartbeats after which they are tried again, if those take longer."""
BEATS_KEPT = 64
"""Own heartbeats whose times are kept: an echo of an older one says nothing new."""
TRIPS_KEPT = 5
"""Round trips of which the median counts: one with a stopped process in it does not."""


class Peers:
    """Knowledge of one member about the others.

    A member is *lost* if it is proven dead, or silent for ``silence`` seconds, the same for all members; time in which
    this process was stopped does not count. It has died *for certain* if its end became known while its lease lasted:
    ``LEASE_SECONDS``, or as much of ``silence``, from the time at which this member sent the newest heartbeat that the
    other one has echoed. It cannot have called this member silent by then.
    """

    def __init__(self, me: int, now: float, silence: float = SILENT_SECONDS):
        self.me = me
        self.silence = silence
        self.lease = silence * LEASE_SECONDS / SILENT_SECONDS
        self.heard: dict[int, float] = {}
        """Time of the newest message of each."""
        self.dead: set[int] = set()
        """Members whose process is known to have ended."""
        self.certain: set[int] = set()
        """Members that have died for certain."""
        self._looked = now
        self._sent: collections.deque[float] = collections.deque(maxlen=BEATS_KEPT)
        self._count = 0
        self._newest: dict[int, tuple[int, float]] = {}
        self._lease: dict[int, float] = {}
        self._trips: dict[int, collections.deque[float]] = {}

    def hear(self, peer: int, now: float) -> None:
        """Note a message of ``peer``."""
        self.heard[peer] = now

    def hear_all(self, members: Iterable[int], now: float) -> None:
        """Forget everybody else, and let the silence of those who are new begin now."""
        self.heard = {member: max(now, self.heard.get(member, now)) for member in members}

    def count_beat(self, now: float) -> int:
        """Note that a heartbeat is sent now; return its count."""
        self._sent.append(now)
        self._count += 1
        return self._count - 1

    def echo(self, peer: int, now: float) -> tuple[int | None, float]:
        """Return the count of the newest heartbeat of ``peer``, and the seconds since it came."""
        if peer not in self._newest:
            return None, 0.0
        count, when = self._newest[peer]
        return count, now - when

    def hear_beat(self, peer: int, beat: Beat, now: float) -> None:
        """Note a heartbeat: it says which of this member's has arrived, and how long that took there and back."""
        self._newest[peer] = (beat.count, now)
        age = -1 if beat.echo is None else self._count - 1 - beat.echo
        if 0 <= age < len(self._sent):
            sent = self._sent[len(self._sent) - 1 - age]
            # Each heartbeat counts once: what waited while this process was stopped is one long round trip, not many.
            if sent > self._lease.get(peer, sent - 1.0):
                self._lease[peer] = sent
                trips = self._trips.setdefault(peer, collections.deque(maxlen=TRIPS_KEPT))
                trips.append(max(0.0, now - sent - beat.kept))

    def bury(self, peer: int, now: float) -> None:
        """Note that the process of ``peer`` has ended."""
        self.dead.add(peer)
        if peer in self._lease and now < self._lease[peer] + self.lease:
            self.certain.add(peer)

    def is_lost(self, peer: int, now: float) -> bool:
        """Return True if ``peer`` is proven dead, or silent."""
        return peer != self.me and (peer in self.dead or now - self.heard.get(peer, now) >= self.silence)

    def living(self, members: Iterable[int], now: float) -> list[int]:
        """Return those of ``members`` that are not lost, in their order."""
        return [member for member in members if not self.is_lost(member, now)]

    def why(self, peer: int, now: float) -> str:
        """Return why ``peer`` is lost, for the line that says so; empty if it is not."""
        if peer in self.dead:
            return "its process has ended"
        return f"it was silent for {now - self.heard[peer]:.1f} s" if self.is_lost(peer, now) else ""

    def wake(self, now: float) -> float:
        """Begin a tick; return the seconds for which this process was stopped, which are no silence of the others."""
        absent = now - self._looked - TICK_SECONDS
        self._looked = now
        if absent <= 2 * TICK_SECONDS:
            return 0.0
        self.heard = {peer: when + absent for peer, when in self.heard.items()}
        return absent

    def retry_seconds(self, members: Iterable[int], now: float) -> float:
        """Return the seconds after which a step of a change is tried again: by the slowest round trip to a member."""
        trips = [sorted(self._trips[member]) for member in self.living(members, now) if member in self._trips]
        slowest = max((one[(len(one) - 1) // 2] for one in trips), default=0.0)
        return max(SHORTEST_RETRY, ROUND_TRIPS * slowest)


def backoff(ballot: Ballot, retry: float) -> float:
    """Return the seconds for which a member waits for the next ballot: more after each one that came to nothing."""
    return retry * min(4.0, 1.0 + 0.5 * ballot.number)
