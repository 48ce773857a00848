"""Members that leave, letter by letter: who gets what they have left out, and whether they still have it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from _waiting import wait_until

from pipesgd.elastic.leaving import HANDED_OVER_SECONDS, PIECE_BYTES, SIGNALS_SECONDS, Leaving
from pipesgd.elastic.letters import LeftOut, Piece, Wish
from pipesgd.membership.change import State

DATA = [memoryview(b"a" * PIECE_BYTES), memoryview(b"b" * (2 * PIECE_BYTES + 7))]


@dataclass
class _Vote:
    leaves: bool = False


@dataclass
class _Record:
    members: tuple[int, ...]


@dataclass
class _Member:
    """A member as ``Leaving`` sees it."""

    record: _Record
    vote: _Vote = field(default_factory=_Vote)
    state: State = State.ACTIVE

    def leave(self, now: float) -> None:
        assert not self.vote.leaves, "once"
        self.vote.leaves = True


class _Sums:
    def __init__(self, taken: list[bytes]):
        self._taken = taken

    def left_out(self) -> Sequence[memoryview]:
        raise NotImplementedError

    def forget_left_out(self) -> None:
        raise NotImplementedError

    def take_over(self, parts: Sequence[bytes]) -> bool:
        self._taken += parts
        return True


class _Job:
    """Members whose letters wait until ``deliver`` takes them to their receivers, in one thread."""

    def __init__(self, number: int):
        self.now = 0.0
        self.letters: deque[tuple[int, int, Any]] = deque()
        self.posted: list[deque[Callable[[Any, float], None]]] = [deque() for _ in range(number)]
        self.members = [_Member(_Record(tuple(range(number)))) for _ in range(number)]
        self.taken: list[list[bytes]] = [[] for _ in range(number)]
        self.drops: Callable[[Any], bool] = lambda letter: False
        self.all = [self._leaving(one) for one in range(number)]

    def _leaving(self, me: int) -> Leaving:
        made = Leaving(
            me,
            lambda to, letter: self.letters.append((me, to, letter)),
            self.posted[me].append,
            lambda: 2 * HANDED_OVER_SECONDS,
        )

        made.sums = _Sums(self.taken[me])
        return made

    def ask(self, *those: int) -> None:
        for one in those:
            self.all[one].signal = lambda: "SIGTERM"
        self.tick()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for one in range(len(self.all)):
            self.look(one)
        self.deliver()

    def look(self, one: int) -> None:
        if one in self.members[one].record.members:
            self.all[one].look(self.members[one], self.now)  # type: ignore[arg-type]

    def deliver(self, most: int = 10_000) -> None:
        """Carry out what was posted, and deliver ``most`` letters at most."""
        for one, posted in enumerate(self.posted):
            while posted:
                posted.popleft()(self.members[one], self.now)
        while self.letters and most:
            most -= 1
            origin, to, letter = self.letters.popleft()
            present = self.members[to].record.members
            if origin in present and to in present and not self.drops(letter):
                self.all[to].hear(origin, letter, self.members[to], self.now)  # type: ignore[arg-type]
                self.look(to)

    def lose(self, one: int) -> None:
        for member in self.members:
            member.record.members = tuple(other for other in member.record.members if other != one)

    def is_leaving(self) -> list[int]:
        return [one for one, member in enumerate(self.members) if member.vote.leaves]


@dataclass
class _HandOver:
    """The main thread of a member that hands over."""

    thread: threading.Thread
    found: list[bool]

    def given(self) -> bool:
        self.thread.join(HANDED_OVER_SECONDS / 2)
        assert self.found, "it still waits, although nothing will come"
        [given] = self.found
        return given


@pytest.fixture
def job() -> Iterator[_Job]:
    made = _Job(4)
    yield made
    for one in made.all:
        one.end()


def hand_over(job: _Job, one: int, parts: Any = DATA) -> _HandOver:
    assert job.all[one].is_due
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(job.all[one].hand_over(parts)))
    thread.start()
    wait_until(lambda: bool(job.posted[one]))
    return _HandOver(thread, found)


def test_the_first_that_stays_gets_it_all_and_everybody_knows(job: _Job) -> None:
    job.ask(0, 2)
    job.tick(SIGNALS_SECONDS)
    assert not job.is_leaving(), "they hand over before"
    both = [hand_over(job, one) for one in (0, 2)]
    job.tick()
    assert [one.given() for one in both] == [True, True]
    assert job.taken == [[], [bytes(part) for part in DATA] * 2, [], []]
    assert [one.taken_over for one in job.all] == [{0: 1, 2: 1}] * 4
    assert job.is_leaving() == [0, 2]


def test_who_has_left_out_nothing_leaves_at_once(job: _Job) -> None:
    job.ask(1)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 1, [])
    job.tick()
    assert not one.given()
    assert job.is_leaving() == [1]
    assert job.taken == [[], [], [], []]


@pytest.mark.parametrize("letters", [1, 3, 5, 7])
def test_another_one_gets_it_if_the_first_is_lost_before_it_says_so(job: _Job, letters: int) -> None:
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.deliver(letters)
    job.lose(0)
    job.letters.clear()
    job.tick()
    assert one.given()
    assert job.taken[1] == [bytes(part) for part in DATA]
    assert job.all[2].taken_over[3] == 1


def test_who_is_asked_itself_takes_nothing_any_more(job: _Job) -> None:
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.deliver(2)
    job.ask(0)
    job.tick()
    assert one.given()
    assert job.taken == [[], [bytes(part) for part in DATA], [], []]


@pytest.mark.parametrize("letters", range(9))
def test_who_is_asked_itself_takes_only_what_is_all_there_even_if_the_other_does_not_know(
    job: _Job, letters: int
) -> None:
    """Once the last letter is on its way, the other one does not have it any more."""
    job.drops = lambda letter: isinstance(letter, Wish)
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.deliver(letters)
    job.all[0].signal = lambda: "SIGTERM"
    job.look(0)
    job.deliver()
    is_all_there = letters >= 6
    assert job.taken[0] == [bytes(part) for part in DATA] * is_all_there
    job.tick(HANDED_OVER_SECONDS)
    assert job.all[0].taken_over == ({3: 0} if is_all_there else {})
    assert one.given() == is_all_there


def test_who_knows_that_all_were_asked_says_so_before_it_leaves(job: _Job) -> None:
    """The wish of a third one may be on its way: a member that did not know would stay alone."""
    for one in (0, 1, 2):
        job.all[3].hear(one, Wish("SIGTERM"), None, job.now)
    job.all[3].signal = lambda: "SIGTERM"
    job.look(3)
    assert job.is_leaving() == [3]
    assert [(to, sorted(letter.asked)) for _, to, letter in job.letters] == [(to, [0, 1, 2, 3]) for to in (0, 1, 2)]
    job.all[0].signal = lambda: "SIGTERM"
    job.deliver(1)
    assert job.is_leaving() == [0, 3]


def test_who_leaves_alone_takes_nothing_any_more(job: _Job) -> None:
    """Its own share may be on its way already."""
    job.drops = lambda letter: isinstance(letter, Wish)
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.deliver(8)
    assert isinstance(job.letters[0][2], LeftOut)
    job.all[0].is_due = True
    job.deliver()
    assert job.taken[0] == []
    job.lose(0)
    job.tick()
    assert one.given()
    assert job.taken[1] == [bytes(part) for part in DATA]


def test_what_nobody_can_have_taken_is_still_there(job: _Job) -> None:
    """The receiver is lost with the last letter, and all others are asked, too: they end together."""
    job.drops = lambda letter: isinstance(letter, LeftOut)
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.tick()
    job.lose(0)
    job.ask(1, 2)
    assert not one.given()
    assert job.is_leaving() == [1, 2, 3]


def test_who_begins_again_is_not_taken_for_one_that_continues(job: _Job) -> None:
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.deliver(3)
    job.letters.clear()
    job.all[3].end()
    assert not one.given()
    again = hand_over(job, 3)
    job.tick()
    assert again.given()
    assert job.taken[0] == [bytes(part) for part in DATA]


def test_what_all_end_with_stays_with_each(job: _Job) -> None:
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.deliver(3)
    job.ask(0, 1, 2)
    job.tick()
    assert not one.given()
    assert job.taken == [[], [], [], []]
    assert job.is_leaving() == [0, 1, 2, 3]


@pytest.mark.parametrize(("lost", "given"), [(Piece, False), (LeftOut, True)])
def test_after_the_deadline_it_leaves_all_the_same_and_nothing_counts_twice(job: _Job, lost: type, given: bool) -> None:
    """The last letter may have arrived, so what it stands for must not be there any more."""
    job.drops = lambda letter: isinstance(letter, lost)
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.tick(HANDED_OVER_SECONDS - 0.1)
    assert not job.is_leaving()
    job.tick(0.2)
    assert one.given() == given
    assert job.is_leaving() == [3]
    assert job.taken == [[], [], [], []]
    assert job.all[0].taken_over == {}


def test_pieces_that_come_again_count_once(job: _Job) -> None:
    job.ask(3)
    job.tick(SIGNALS_SECONDS)
    one = hand_over(job, 3)
    job.deliver(0)
    job.letters.extend(list(job.letters))
    job.tick()
    assert one.given()
    assert job.taken[0] == [bytes(part) for part in DATA]
