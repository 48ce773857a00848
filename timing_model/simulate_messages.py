"""Simulation of messages one by one: who sends what to whom, and when it arrives. It uses no formula."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from timing_model.checks import check_above_0, check_at_least, check_count
from timing_model.params import CodecCost, LinkParams, PlacedLink
from timing_model.schedules import Event, Schedule

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
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
    """Network of equal nodes with ranks of adjoining numbers. Every rank has a full-duplex wire to the others. Instead,
    ``placed`` may name a link for each pair of ranks."""

    link: LinkParams
    """Link between nodes: alpha, beta and overhead count."""
    ranks_per_node: int = 1
    inner: LinkParams | None = None
    """Link inside a node, where a rank has another wire; by default the one between nodes."""
    slow: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Factors by which transfers take longer than others, by sending and receiving rank."""
    placed: tuple[PlacedLink, ...] = ()
    """Links in place of ``link`` and ``inner``; of those that connect two ranks, the last one counts."""

    def __post_init__(self) -> None:
        check_count("ranks_per_node", self.ranks_per_node)
        for factor in self.slow.values():
            check_above_0("slow", factor)

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
        outside = sender // self.ranks_per_node != receiver // self.ranks_per_node
        return int(outside), self.link if self.inner is None or outside else self.inner


def simulate_messages(programs: Sequence[Sequence[Task]], network: Network) -> list[float]:
    """Return when each rank has done its program and sent its messages, in s since the common start.

    A rank does its tasks in order. A message waits for its sender's wire, occupies it for bytes * beta, reaches the
    receiver's wire alpha after it began, waits there for those that came before, and occupies that wire, too. Messages
    are served in the order of arrival; those from one rank to another stay in order. A message to a rank whose program
    posts receives leaves only when the notice has come that its receive is posted, alpha later, as in gloo; notices of
    receives posted at the common start are there at once. Raises ``ValueError`` if ranks wait for messages that nobody
    sends.

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
    held: Counter[int] = field(default_factory=Counter)
    """Number of messages whose time of leaving is not known yet, by memory."""


class _Message(NamedTuple):
    sender: int
    receiver: int
    duration: float
    """Seconds for which the message occupies a wire."""
    memory: int | None


class _Simulation:
    def __init__(self, programs: Sequence[Sequence[Task]], network: Network):
        self._network = network
        self._ranks = [_Rank(deque(program)) for program in programs]
        self._paths: dict[tuple[int, int], tuple[int, LinkParams]] = {}
        self._under_way: list[tuple[float, int, bool, _Message]] = []
        """Times at which messages may leave or reach the receiver, a number for ties, and True if they leave."""
        self._inbox: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        self._posts = [any(task.posts for task in program) for program in programs]
        """True for each rank that posts its receives explicitly (flow control)."""
        self._held: dict[tuple[int, int], deque[tuple[float, _Message]]] = defaultdict(deque)
        """Messages that wait for a notice, and since when, by sender and receiver."""
        self._notices: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        """Times at which notices come, by sender and receiver."""
        self._numbers = itertools.count()

    def run(self) -> list[float]:
        for number in range(len(self._ranks)):
            self._go_on(number)
        while self._under_way:
            time, _, leaves, message = heapq.heappop(self._under_way)
            if leaves:
                self._leave(time, message)
                if message.memory is not None:
                    self._ranks[message.sender].held[message.memory] -= 1
                self._go_on(message.sender)
                continue
            sender, receiver, duration, _ = message
            rank, (wire, _) = self._ranks[receiver], self._path(sender, receiver)
            rank.in_free[wire] = max(time, rank.in_free[wire]) + duration
            self._inbox[sender, receiver].append(rank.in_free[wire])
            self._go_on(receiver)
        waiting = {number: rank.tasks[0].source for number, rank in enumerate(self._ranks) if rank.tasks}
        for number, other in (waiting | {pair[0]: pair[1] for pair, held in self._held.items() if held}).items():
            raise ValueError(f"programs must not wait for ever; rank {number} waits for rank {other}")
        return [max([rank.now, *rank.out_free.values()]) for rank in self._ranks]

    def _go_on(self, number: int) -> None:
        """Do the rank's tasks up to one whose message has not arrived, or whose memory is still to be sent."""
        rank = self._ranks[number]
        while rank.tasks:
            task = rank.tasks[0]
            if task.memory is not None and rank.held[task.memory]:
                return
            if task.source is not None:
                inbox = self._inbox[task.source, number]
                if not inbox:
                    return
                rank.now = max(rank.now, inbox.popleft())
            rank.tasks.popleft()
            if task.memory is not None:
                rank.now = max(rank.now, rank.left.get(task.memory, 0.0))
            rank.now += task.seconds
            for target, nbytes in task.sends:
                self._send(number, target, nbytes, task.memory)
            for source in task.posts:
                notice = rank.now + self._path(source, number)[1].alpha if rank.now > 0 else 0.0
                self._notices[source, number].append(notice)
                self._release(source, number)

    def _send(self, number: int, target: int, nbytes: float, memory: int | None) -> None:
        rank, (_, link) = self._ranks[number], self._path(number, target)
        rank.now += link.overhead
        duration = nbytes * link.byte_seconds(self._network.slow.get((number, target), 1.0))
        message = _Message(number, target, duration, memory)
        if not self._posts[target]:
            self._leave(rank.now, message)
            return
        if memory is not None:
            rank.held[memory] += 1
        self._held[number, target].append((rank.now, message))
        self._release(number, target)

    def _release(self, sender: int, receiver: int) -> None:
        """Let messages leave whose receives are posted."""
        held, notices = self._held[sender, receiver], self._notices[sender, receiver]
        while held and notices:
            ready, message = held.popleft()
            heapq.heappush(self._under_way, (max(ready, notices.popleft()), next(self._numbers), True, message))

    def _leave(self, time: float, message: _Message) -> None:
        rank, (wire, link) = self._ranks[message.sender], self._path(message.sender, message.receiver)
        begin = max(time, rank.out_free[wire])
        rank.out_free[wire] = begin + message.duration
        if message.memory is not None:
            rank.left[message.memory] = begin + message.duration
        reached = begin + link.alpha
        heapq.heappush(self._under_way, (reached, next(self._numbers), False, message))

    def _path(self, sender: int, receiver: int) -> tuple[int, LinkParams]:
        found = self._paths.get((sender, receiver))
        if found is None:
            found = self._paths[sender, receiver] = self._network.path(sender, receiver)
        return found


def tasks_of(
    schedules: Sequence[Schedule], numel: float, codec: CodecCost, *, segments: int = 1, ahead: int | None = None
) -> list[list[Task]]:
    """Return all ranks' programs for a collective of ``numel`` float32 values, with ``segments`` messages per chunk.

    ``schedules`` are the parts of all ranks, in rank order. ``ahead`` receives of segments to be added up are posted at
    a time, in the schedule's order, and other receives as soon as their turn comes; if None, no program posts any.
    """
    values = numel / schedules[0].chunks / segments
    nbytes = codec.wire_bytes(values)
    seconds = codec.seconds(values)

    def tasks(schedule: Schedule) -> list[Task]:
        events = [event for event in schedule.events for _ in range(segments)]
        first, *posts = [()] * (len(events) + 1) if ahead is None else _posts(events, ahead)
        done = [
            Task(
                source=None if event.arrival is None else event.arrival.peer,
                seconds=sum(seconds[operation] for operation in _work(event)),
                sends=tuple((send.peer, nbytes) for send in event.sends),
                memory=event.chunk * segments + number % segments,
                posts=posted,
            )
            for number, (event, posted) in enumerate(zip(events, posts, strict=True))
        ]
        return [Task(posts=first), *done] if first else done

    return [tasks(schedule) for schedule in schedules]


def _work(event: Event) -> list[str]:
    """Return the operations on a segment's values, by their names in ``CodecCost``."""
    if event.reduces:
        work = ["add" if event.encode is None else "hop"]
    else:
        work = ["decode" if event.encode is None else "encode"]
    return [*work, "decode"] if event.keeps_encoded else work


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


def simulate_ring(
    link: LinkParams,
    nbytes: float,
    world_size: int,
    *,
    slow_links: Values | None = None,
    slow_sums: Values | None = None,
) -> Values:
    """Return when each rank has done a ring all-reduce of one segment per chunk, (world_size,), in s since the start.

    All ranks start together and are simulated at once, ring step by ring step: 10,000 ranks take a second.
    ``slow_links`` (world_size,) are factors of the transfer from each rank to its right neighbour, ``slow_sums``
    (world_size,) those of each rank's additions.

    Raises ``ValueError`` if a number is out of range.

    >>> simulate_ring(LinkParams(alpha=1.0, beta=0.5, gamma=0.0, sync=0.0), 8.0, 2).tolist()
    [6.0, 6.0]
    """
    check_count("world_size", world_size)
    check_at_least("nbytes", nbytes, 0)
    for name, factors in (("slow_links", slow_links), ("slow_sums", slow_sums)):
        if factors is not None and (factors.shape != (world_size,) or not np.all(factors > 0)):
            raise ValueError(f"{name} must be world_size numbers above 0; got {factors}")
    p, chunk = world_size, nbytes / world_size
    ones = np.ones(p)
    transfer = chunk * np.maximum(link.beta * (ones if slow_links is None else slow_links), link.host)
    sums = chunk * link.gamma * (ones if slow_sums is None else slow_sums)
    cpu, wire, arrival = np.zeros(p), np.zeros(p), np.empty(p)
    for step in range(2 * (p - 1)):
        if link.overhead:
            cpu += link.overhead
        np.maximum(wire, cpu, out=wire)
        wire += transfer
        np.add(wire[:-1], link.alpha, out=arrival[1:])
        arrival[0] = wire[-1] + link.alpha
        np.maximum(cpu, arrival, out=cpu)
        if step < p - 1:
            cpu += sums
    return np.maximum(cpu, wire) + (link.sync if p > 1 else 0.0)
