"""Units of work that all members do together, each done again by those who remain if a change interrupts it.

A unit is one job of the communication thread: a bucket's sum, or a *call*, an exchange of values that the main thread
asks for. All members do the same units in the same order. Whoever holds the result of a unit knows that all others have
put into it what they had to, so a unit is known to be done once one survivor holds it: the others fetch its result.
If none does, those who remain do it again, from what each of them has kept.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from pipesgd.comm.thread import CommunicationThread
from pipesgd.elastic.letters import Result
from pipesgd.elastic.members import Interrupted, Members
from pipesgd.errors import CommunicationError, DeadlineExceeded, UserInputError
from pipesgd.membership.generation import Record
from pipesgd.ranks import Ranks

T = TypeVar("T")

RESULTS_KEPT = 1
"""Number of newest units whose results are kept: in a generation nobody misses an older one."""
MOST_DEADLINES, MOST_FAILURES = 2, 10
"""Numbers of times that one unit of the same members may end because one is late that answers otherwise, and that it
may fail here at all: then this is an error."""


class Unit(Generic[T]):
    """A call: it changes nothing but by its result, which JSON can hold."""

    def __init__(self, do: Callable[[Ranks], T]):
        self.do = do
        """Function that does the unit together with all members of a generation, whose ranks it gets."""

    @property
    def settles(self) -> int | None:
        """Number of iterations whose means are there with this unit; None if it leaves them as they are."""
        return None

    def keep(self) -> None:
        """Keep what ``do`` is about to change."""

    def put_back(self) -> None:
        """Put back what was kept, since ``do`` has ended halfway."""

    def result(self, value: T) -> Result:
        """Return the result as it travels, given what ``do`` has returned."""
        return Result(value)

    def take(self, result: Result) -> T:
        """Take the result of another member, after ``do`` has ended halfway; return what ``do`` would have returned."""
        value: T = result.text
        return value


class Units:
    """The units of this process, in their order, on a communication thread of their own.

    Args:
        members: the membership of this process.
        ranks_of: function that returns the ranks of a generation, between which units are done.
        device: device of the tensors of sums.
    """

    def __init__(self, members: Members, ranks_of: Callable[[Record], Ranks], device: torch.device):
        self.members = members
        self.thread = CommunicationThread(device)
        self.on_change: Callable[[Ranks], None] | None = None
        """Function that connects to the ranks of a generation, called before the next unit; None without any sums."""
        self.abort: Callable[[BaseException], None] = lambda error: None
        """Function that ends the waits of the unit that is being done."""
        self.ranks = ranks_of(members.record)
        """Ranks of the newest generation, for the communication thread."""
        self._ranks_of = ranks_of
        self._connected: Record | None = None
        self._newest = -1
        self._settled = 0
        """Number of iterations whose means this process has."""
        self._results: deque[tuple[int, Result]] = deque(maxlen=RESULTS_KEPT)
        self._is_running = False
        self._lock = threading.Lock()
        members.result_of = self._result_of
        members.interrupt = self._interrupt
        members.is_summing = lambda: self._is_running

    # ---- For the main thread

    def start(self, first: Record) -> None:
        """Begin to survive losses, on all members alike, as generation ``first``; the next unit is number 0."""

        def begin() -> None:
            self._newest, self._settled = -1, first.settled
            self._results.clear()
            if self._connected is not None:  # the connections stay
                self._connected = first
            self.members.start(first)

        self.thread.submit(begin).result()

    def submit(self, unit: Unit[T]) -> Future[tuple[T, Record]]:
        """Do ``unit`` after those submitted before; the future holds its value, and the generation that has done it."""
        return self.thread.submit(lambda: self.run(unit))

    def call(self, do: Callable[[Ranks], T]) -> tuple[T, Record]:
        """Return what ``do`` returns, an exchange of values that JSON can hold, and the generation that has done it."""
        return self.submit(Unit(do)).result()

    def reconnect(self) -> None:
        """Let the next unit connect again, before it is done."""
        self._connected = None

    # ---- On the communication thread

    def run(self, unit: Unit[T]) -> tuple[T, Record]:
        """Do ``unit``; return its value, and the generation that has done it."""
        self._is_running = True
        try:
            return self._run(unit)
        except BaseException as failure:
            self.members.give_up(failure)  # the main thread may wait for the end of a change
            raise
        finally:
            self._is_running = False

    def _run(self, unit: Unit[T]) -> tuple[T, Record]:
        number = self._newest + 1
        unit.keep()
        failures = deadlines = 0
        members = self.members.record.members
        while True:
            has_begun = False
            try:
                self.members.check()
                if self.on_change is not None and self._connected is not self.members.record:
                    self.on_change(self.ranks)
                    self._connected = self.members.record
                    self.members.check()  # what was to end the waits may have come while nothing knew the connections
                has_begun = True
                value = unit.do(self.ranks)
                break
            except Interrupted:
                pass
            except (CommunicationError, dist.DistError) as failure:
                is_first, is_late = not self.members.is_interrupted, isinstance(failure, DeadlineExceeded)
                if members != self.members.record.members:
                    members, failures, deadlines = self.members.record.members, 0, 0
                failures += is_first or is_late
                deadlines += is_late
                if deadlines >= MOST_DEADLINES or failures >= MOST_FAILURES or not self.members.has_started:
                    raise
                if is_first:
                    self.members.trouble(failure.peer if isinstance(failure, CommunicationError) else None)
            taken = self._change(unit if has_begun else None, number)
            if taken:
                return taken[0]
            unit.put_back()
        self._hold(number, unit, unit.result(value))
        self.members.holds(number, self._settled)
        return value, self.members.record

    def _change(self, unit: Unit[T] | None, number: int) -> list[tuple[T, Record]]:
        """Go through a change of members; return the value of unit ``number`` if a survivor holds its result."""
        taken: list[tuple[T, Record]] = []
        before = self.members.record

        def take(of: int, result: Result) -> None:
            assert unit is not None
            assert of == number
            taken.append((unit.take(result), before))
            self._hold(number, unit, result)

        self.ranks = self._ranks_of(self.members.next_record(take))
        return taken

    def _hold(self, number: int, unit: Unit[Any], result: Result) -> None:
        self._settled = self._settled if unit.settles is None else unit.settles
        with self._lock:
            self._newest = number
            self._results.append((number, result))

    def _result_of(self, unit: int) -> Result | None:
        with self._lock:
            return next((result for number, result in self._results if number == unit), None)

    # ---- On the members' thread

    def _interrupt(self) -> None:
        """End what the communication thread does; if it does nothing, let it take part in the change all the same."""
        self.abort(Interrupted("a change of members has begun"))
        with contextlib.suppress(UserInputError):  # it was closed: nothing is done any more
            self.thread.submit(self._change_if_due)

    def _change_if_due(self) -> None:
        if self.members.is_interrupted:
            try:
                self._change(None, self._newest + 1)
            except BaseException as failure:
                self.members.give_up(failure)
                raise

    def close(self) -> None:
        """End the thread."""
        self.thread.close()


def gathered(what: str, value: Any, *, within: float, close_by: bool) -> Callable[[Ranks], list[Any]]:
    """Return the call that gathers every rank's ``value``; see ``Ranks.all_gather_object``."""
    return lambda ranks: ranks.all_gather_object(what, value, within=within, close_by=close_by)
