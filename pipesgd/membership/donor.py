"""Feeding of newcomers: a snapshot and the results since, only of what all members hold, so that it stays true."""

from __future__ import annotations

from collections.abc import Collection

from pipesgd.membership.messages import Action, BeginAgain, FeedLog, FeedSnapshot, Send

READY_SECONDS = 1.0
"""Seconds for which a newcomer counts as ready after it has said so."""


class Donor:
    """A member's part of a donor, which does nothing while nobody joins.

    Args:
        actions: where its actions go.
        oldest: oldest unit whose result the member holds.
        results_kept: number of newest results, and of states after units, that it keeps.
    """

    def __init__(self, actions: list[Action], *, oldest: int, results_kept: int):
        self.stable = -1
        """Newest unit that all members hold."""
        self._actions = actions
        self._oldest = oldest
        self._results_kept = results_kept
        self._newest = oldest - 1
        self._next: dict[int, int | None] = {}
        """The next unit for each newcomer; None before its snapshot."""
        self._ready: dict[int, float] = {}

    def fed(self) -> tuple[int, ...]:
        """Return the newcomers that are fed."""
        return tuple(self._next)

    def begin(self, newcomer: int) -> None:
        """Feed ``newcomer`` from the beginning: what was sent before is lost."""
        self._next[newcomer] = None
        self._feed()

    def learn(self, newest: int, *, stable: int) -> None:
        """Note that the member holds units up to ``newest``, and everybody those up to ``stable``."""
        self._newest = newest
        self.stable = max(self.stable, stable)
        self._feed()

    def hear_ready(self, newcomer: int, newest: int, now: float) -> None:
        """Resume the log of ``newcomer``, which holds units up to ``newest``: its connection may have been broken."""
        if newcomer not in self._next:
            return
        if newest + 1 < self._first_kept() and newest < self.stable:
            del self._next[newcomer]
            self._actions.append(Send(newcomer, BeginAgain()))
            return
        self._next[newcomer] = newest + 1
        self._feed()
        if newest >= self.stable - 1:
            self._ready[newcomer] = now

    def take_ready(self, now: float) -> tuple[int, ...]:
        """Return the newcomers that are ready now, each once: who still waits says so again."""
        ready = tuple(sorted(one for one, when in self._ready.items() if now - when < READY_SECONDS))
        self._ready.clear()
        return ready

    def enter(self, members: Collection[int], base: int) -> None:
        """Begin a generation, all members of which hold units up to ``base``."""
        self._next = {newcomer: unit for newcomer, unit in self._next.items() if newcomer not in members}
        self._ready.clear()
        self.learn(base, stable=base)

    def drop(self, newcomer: int) -> None:
        """Forget a newcomer whose process has ended."""
        self._next.pop(newcomer, None)
        self._ready.pop(newcomer, None)

    def give_up(self) -> None:
        """Let all newcomers look for another donor."""
        self._actions.extend(Send(newcomer, BeginAgain()) for newcomer in self._next)
        self._next.clear()
        self._ready.clear()

    def _first_kept(self) -> int:
        return max(self._oldest, self._newest - self._results_kept + 1)

    def _feed(self) -> None:
        for newcomer, unit in self._next.items():
            if unit is None:
                if self.stable < self._first_kept() - 1:
                    continue
                self._actions.append(FeedSnapshot(newcomer, self.stable))
                unit = self.stable + 1
            while self._first_kept() <= unit <= self.stable:
                self._actions.append(FeedLog(newcomer, unit))
                unit += 1
            self._next[newcomer] = unit
