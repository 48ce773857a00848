"""Simulation of messages one by one: who sends what to whom, and when it arrives. It uses no formula."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from timing_model.params import CodecCost, LinkParams, PlacedLink
from timing_model.schedules import Event, Schedule


class Task(NamedTuple):
    """Next task of a rank: wait for a message, work, and send."""

    source: int | None = None
    """Rank whose next message the task waits for."""
    seconds: float = 0.0
    """Seconds of work, once the message is there."""
    sends: tuple[tuple[int, float], ...] = ()
    """Ranks to send to, and the bytes for each."""
    memory: int | None = None
    """Memory that the task overwrites and sends from; the task waits until everything sent from it before has left."""
    posts: tuple[int, ...] = ()
    """Ranks whose next message may come once the task is done."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network of equal ranks, each with a full-duplex wire to the others. Instead, ``placed`` may name a link for each
    pair of ranks."""

    link: LinkParams
    """Link between ranks: alpha, beta and overhead count."""
    placed: tuple[PlacedLink, ...] = ()
    """Links in place of ``link``; of those that connect two ranks, the last one counts. Each has wires of its own."""

    def path(self, sender: int, receiver: int) -> tuple[int, LinkParams]:
        """Return the number of the wire from one rank to another, and its link.

        Raises ``ValueError`` if there is none.
        """
        for number in reversed(range(len(self.placed))):
            if self.placed[number].connects(sender, receiver):
                return number, self.placed[number].link
        if self.placed:
            raise ValueError(
                f"link must lead from rank {sender} to rank {receiver}, which is sent to; none of them does"
            )
        return 0, self.link


def simulate_messages(programs: Sequence[Sequence[Task]], network: Network) -> list[float]:
    """Return when each rank has done its program and sent its messages, in s since the common start.

    A rank does its tasks in order. A message waits for its sender's wire, occupies it for bytes * beta, reaches the
    receiver's wire alpha after it began, waits there for those that came before, and occupies that wire, too. Messages
    are served in the order of arrival; those from one rank to another stay in order. A message to a rank whose program
    posts receives leaves only when the notice has come that its receive is posted, alpha later, as in gloo; notices of
    receives posted at the common start are there at once.

    Raises ``ValueError`` if ranks wait for messages that nobody sends.

    >>> link = LinkParams(alpha=1.0, beta=2.0, gamma=0.0, sync=0.0)
    >>> simulate_messages([[Task(sends=((1, 8.0),))], [Task(source=0, seconds=3.0)]], Network(link=link))
    [16.0, 20.0]
    """
    return _Simulation(programs, network).run()


@dataclass(slots=True)
class _Rank:
    tasks: deque[Task]
    now: float = 0.0
    out_free: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Times, in s, at which wires are free to send, by their numbers (``Network.path``)."""
    in_free: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Times, in s, at which these wires are free to receive."""
    left: dict[int, float] = field(default_factory=dict)
    """Time, in s, at which everything sent from a memory has left, by memory."""
    held: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of messages whose time of leaving is not known yet, by memory."""


@dataclass(slots=True)
class _Pair:
    """Path from one rank to another, and the messages between them."""

    sender: int
    receiver: int
    wire: int
    alpha: float
    overhead: float
    byte_seconds: float
    arrived: deque[float] = field(default_factory=deque)
    """Times, in s, at which messages arrived that have not been taken yet."""
    held: deque[tuple[float, _Message]] = field(default_factory=deque)
    """Messages that wait for a notice, and since when."""
    notices: deque[float] = field(default_factory=deque)
    """Times, in s, at which notices come."""


class _Message(NamedTuple):
    pair: _Pair
    duration: float
    """Seconds for which the message occupies a wire."""
    memory: int | None


class _Pairs(dict[tuple[int, int], _Pair]):
    """Pairs of ranks, by sender and receiver, each made when it is first asked for."""

    def __init__(self, network: Network):
        self._network = network

    def __missing__(self, ranks: tuple[int, int]) -> _Pair:
        wire, link = self._network.path(*ranks)
        self[ranks] = pair = _Pair(*ranks, wire, link.alpha, link.overhead, link.byte_seconds())
        return pair


class _Simulation:
    def __init__(self, programs: Sequence[Sequence[Task]], network: Network):
        self._ranks = [_Rank(deque(program)) for program in programs]
        self._pairs = _Pairs(network)
        self._under_way: list[tuple[float, int, bool, _Message]] = []
        """Times at which messages may leave or reach the receiver, a number for ties, and True if they leave."""
        self._posts = [any(task.posts for task in program) for program in programs]
        """True for each rank that posts its receives explicitly (flow control)."""
        self._numbers = itertools.count()

    def run(self) -> list[float]:
        for number in range(len(self._ranks)):
            self._go_on(number)
        while self._under_way:
            time, _, leaves, message = heapq.heappop(self._under_way)
            pair, duration, memory = message
            if leaves:
                self._leave(time, message)
                if memory is not None:
                    self._ranks[pair.sender].held[memory] -= 1
                self._go_on(pair.sender)
                continue
            free = self._ranks[pair.receiver].in_free
            free[pair.wire] = arrived = max(time, free[pair.wire]) + duration
            pair.arrived.append(arrived)
            self._go_on(pair.receiver)
        waiting = {number: rank.tasks[0].source for number, rank in enumerate(self._ranks) if rank.tasks}
        for number, other in (waiting | {one.sender: one.receiver for one in self._pairs.values() if one.held}).items():
            raise ValueError(f"programs must not wait for ever; rank {number} waits for rank {other}")
        return [max([rank.now, *rank.out_free.values()]) for rank in self._ranks]

    def _go_on(self, number: int) -> None:
        """Do the rank's tasks up to one whose message has not arrived, or whose memory is still to be sent."""
        rank, pairs = self._ranks[number], self._pairs
        tasks = rank.tasks
        while tasks:
            source, seconds, sends, memory, posts = tasks[0]
            if memory is not None and rank.held[memory]:
                return
            if source is not None:
                arrived = pairs[source, number].arrived
                if not arrived:
                    return
                rank.now = max(rank.now, arrived.popleft())
            tasks.popleft()
            if memory is not None:
                rank.now = max(rank.now, rank.left.get(memory, 0.0))
            rank.now += seconds
            for target, nbytes in sends:
                self._send(rank, pairs[number, target], nbytes, memory)
            for poster in posts:
                pair = pairs[poster, number]
                pair.notices.append(rank.now + pair.alpha if rank.now > 0 else 0.0)
                self._release(pair)

    def _send(self, rank: _Rank, pair: _Pair, nbytes: float, memory: int | None) -> None:
        rank.now += pair.overhead
        message = _Message(pair, nbytes * pair.byte_seconds, memory)
        if not self._posts[pair.receiver]:
            self._leave(rank.now, message)
            return
        if memory is not None:
            rank.held[memory] += 1
        pair.held.append((rank.now, message))
        self._release(pair)

    def _release(self, pair: _Pair) -> None:
        """Let messages leave whose receives are posted."""
        while pair.held and pair.notices:
            ready, message = pair.held.popleft()
            heapq.heappush(self._under_way, (max(ready, pair.notices.popleft()), next(self._numbers), True, message))

    def _leave(self, time: float, message: _Message) -> None:
        pair, duration, memory = message
        rank = self._ranks[pair.sender]
        begin = max(time, rank.out_free[pair.wire])
        rank.out_free[pair.wire] = begin + duration
        if memory is not None:
            rank.left[memory] = begin + duration
        heapq.heappush(self._under_way, (begin + pair.alpha, next(self._numbers), False, message))


class Step(NamedTuple):
    """Task whose values have no size yet, and whose work takes no time."""

    source: int | None
    work: tuple[str, ...]
    """Operations on a segment's values, by their names in ``CodecCost``."""
    peers: tuple[int, ...]
    memory: int | None
    posts: tuple[int, ...]


def steps_of(schedule: Schedule, segments: int, ahead: int | None) -> list[Step]:
    """Return a rank's program in a collective with ``segments`` messages per chunk, the same for all codecs and sizes.

    ``ahead`` receives of segments to be added up are posted at a time, in the schedule's order, and other receives as
    soon as their turn comes; if None, the program posts none.
    """
    events = [event for event in schedule.events for _ in range(segments)]
    first, *posts = [()] * (len(events) + 1) if ahead is None else _posts(events, ahead)
    done = [
        Step(
            source=None if event.arrival is None else event.arrival.peer,
            work=_work(event),
            peers=tuple(send.peer for send in event.sends),
            memory=event.chunk * segments + number % segments,
            posts=posted,
        )
        for number, (event, posted) in enumerate(zip(events, posts, strict=True))
    ]
    return [Step(None, (), (), None, first), *done] if first else done


def at_once(programs: Sequence[Sequence[Step]], groups: Sequence[Sequence[int]]) -> list[list[Step]]:
    """Return the programs of all ranks if each group of ranks runs ``programs`` by itself, and all groups at once.

    Args:
        programs: programs of the ranks of one group, numbered from 0.
        groups: ranks of each group; every rank is in one of them.
    """

    def renumbered(step: Step, group: Sequence[int]) -> Step:
        return step._replace(
            source=None if step.source is None else group[step.source],
            peers=tuple(group[peer] for peer in step.peers),
            posts=tuple(group[poster] for poster in step.posts),
        )

    by_rank = {
        rank: [renumbered(step, group) for step in steps]
        for group in groups
        for rank, steps in zip(group, programs, strict=True)
    }
    return [by_rank[rank] for rank in range(len(by_rank))]


def priced(programs: Sequence[Sequence[Step]], values: float, codec: CodecCost) -> list[list[Task]]:
    """Return the programs with the times of the codec on segments of ``values`` values, and with their bytes."""
    nbytes, seconds = codec.wire_bytes(values), codec.seconds(values)
    works = {step.work for program in programs for step in program}
    work = {names: sum(seconds[name] for name in names) for names in works}
    sends = {step.peers: tuple((peer, nbytes) for peer in step.peers) for program in programs for step in program}
    return [
        [Task(source, work[names], sends[peers], memory, posts) for source, names, peers, memory, posts in program]
        for program in programs
    ]


def _work(event: Event) -> tuple[str, ...]:
    """Return the operations on a segment's values, by their names in ``CodecCost``."""
    if event.reduces:
        work = "add" if event.encode is None else "hop"
    else:
        work = "decode" if event.encode is None else "encode"
    return (work, "decode") if event.keeps_encoded else (work,)


def _posts(events: Sequence[Event], ahead: int) -> list[tuple[int, ...]]:
    """Return the sources of the receives that are posted before the first event and after each one."""
    free, position = ahead, 0
    posts: list[tuple[int, ...]] = []
    for event in (None, *events):
        free += event is not None and event.reduces
        posted: list[int] = []
        while position < len(events) and (free or not events[position].reduces):
            free -= events[position].reduces
            arrival = events[position].arrival
            posted += [] if arrival is None else [arrival.peer]
            position += 1
        posts.append(tuple(posted))
    return posts
