"""One random schedule: ranks that train, a network that delays, loses and reorders, and faults, in virtual time."""

from __future__ import annotations

import collections
import heapq
import random
from collections.abc import Callable
from typing import Any

from experiments.membership.invariants import Invariants, ViolationError
from experiments.membership.trainer import LOG_KEPT, MOST, Frame, Trainer
from pipesgd.membership.change import State
from pipesgd.membership.generation import first_record, is_quorum
from pipesgd.membership.messages import Beat, Log, Message, Results, Snapshot
from pipesgd.membership.newcomer import Newcomer
from pipesgd.membership.peers import TICK_SECONDS
from pipesgd.membership.protocol import Member

PROGRESS_SECONDS = 15.0
"""Seconds after the last fault within which the members complete three more units."""
ADMISSION_SECONDS = 40.0
"""Seconds after the last fault within which everybody alive is a member."""
UNITS = 3
"""Units by which progress is seen."""
FAULTS = ("kill", "kill", "power", "stop", "stop", "cut", "partition", "flap", "join", "join", "murder", "leave")
"""Kinds of faults, each as often as it comes. A murder is the kill of whoever leads a change."""
GAPS = (0.01, 0.05, 0.2, 0.6, 2.0, 3.2, 4.0)
"""Mean seconds between faults, so that several come during one change."""
HARD_SHARE = 0.2
"""Share of schedules with up to ten faults, most of them during changes, and fewer deaths, so that these last."""
HARD_FAULTS = ("murder", "stop", "stop", "cut", "partition", "partition", "flap", "join", "join", "leave")
HARD_GAPS = (0.05, 0.1, 0.2, 0.4, 0.8, 3.1)
PAUSES = (0.3, 1.0, 2.9, 3.1, 4.5, 8.0)
"""Seconds for which processes are stopped and connections are cut, about: below and above the longest silence."""
RATE_ERROR = 0.02
"""Largest error of the rate of a rank's clock."""
FRAMES, CONTROL, BULK = CONNECTIONS = (0, 1, 2)
"""Connections between two ranks: of the ring, of small messages, of results and states. Each keeps its own order."""
MISHAPS = (AssertionError, ArithmeticError, LookupError, ValueError, RecursionError, StopIteration)
"""Exceptions of a state machine that is confused, which are violations, too."""

Pair = tuple[int, int]


def pair_of(one: int, other: int) -> Pair:
    """Return two ranks in order."""
    return (one, other) if one < other else (other, one)


def connection_of(body: Message | Frame) -> int:
    """Return the connection that ``body`` takes."""
    if isinstance(body, Frame):
        return FRAMES
    return BULK if isinstance(body, Results | Snapshot | Log) else CONTROL


class World:
    """Ranks, network and faults of one schedule, which its seed determines.

    Args:
        seed: seed of all that is random.
        say: function that gets each line of the trace; None for no trace.
        trainer_class, member_class: what is explored. Tests replace them by ones with a mistake.
    """

    def __init__(
        self,
        seed: int,
        *,
        say: Callable[[str], None] | None = None,
        trainer_class: type[Trainer] = Trainer,
        member_class: type[Member] = Member,
    ):
        self.random = random.Random(seed)
        chance = self.random
        self.now = 0.0
        self.latency = chance.choice((0.001, 0.01, 0.03, 0.1))
        self.pace = chance.choice((0.15, 0.4, 0.8))
        self.width = chance.choice((1, 2, 2, 3))
        self.least = chance.choice((1, 1, 1, 2))
        self.ranks: dict[int, Trainer] = {}
        self.killed: set[int] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.resumed_after: float | None = None
        """Seconds from the last fault to three more units."""
        self.outcome: str | None = None
        self._say = say
        self._trainer_class = type("_Trainer", (trainer_class,), {"member_class": member_class})
        self._heap: list[tuple[float, int, str, int, Any]] = []
        self._sequence = 0
        self._clocks: dict[int, tuple[float, float]] = {}
        """Time at 0, and rate, of each rank's clock."""
        self._stopped: dict[int, list[tuple[str, Any]]] = {}
        """Events that wait until a stopped process continues."""
        self._leaving: set[int] = set()
        self._cut: dict[Pair, float] = {}
        self._held: dict[Pair, list[Message | Frame]] = {}
        """Messages that wait for the end of a cut, by sender and receiver."""
        self._epochs: collections.Counter[tuple[Pair, int]] = collections.Counter()
        """Number of times that a connection was lost with what was in flight."""
        self._last: dict[tuple[int, int, int], float] = {}
        self._unheard: dict[Pair, set[int]] = collections.defaultdict(set)
        """Deaths that are told when a cut ends."""
        self._mark: int | None = None
        self._calm = 1.0
        members = range(chance.choice((1, 2, 2, 3, 3, 4, 4, 5)))
        record = first_record(members)
        self.invariants = Invariants(record)
        self._next_id = len(members)
        for who in members:
            now = self._set_clock(who)
            self._add(member_class(who, record, now, results_kept=LOG_KEPT, least=self.least, most=MOST))
        self._plan_faults()

    # ---- Network of the ranks

    def send(self, source: int, to: int, body: Message | Frame) -> None:
        """Deliver ``body``, unless the receiver is dead; it waits for the end of a cut."""
        if to in self.killed or to not in self.ranks:
            return
        if pair_of(source, to) in self._cut:
            self._held.setdefault((source, to), []).append(body)
        else:
            self._deliver(source, to, body)

    def compute(self, who: int, iteration: int) -> None:
        """Let ``who`` compute for a while."""
        self._at(self.now + self.pace * (0.5 + self.random.random()), "computed", who, iteration)

    def stop_soon(self, who: int) -> None:
        """Interrupt the communication thread of ``who``, which may take a moment."""
        delay = 0.0 if self.random.random() < 0.7 else 0.02 * self.random.random()
        self._at(self.now + delay, "interrupted", who)

    def leave(self, who: int, why: str) -> None:
        """Let ``who`` end, and come back as a newcomer unless it has asked to leave."""
        self.counts["left behind"] += 1
        self._trace(f"{who} is out: {why}")
        self._kill(who, power=False)
        if who not in self._leaving:
            self._at(self.now + 0.3 + self.random.random(), "join", -1)

    def _set_clock(self, who: int) -> float:
        """Give ``who`` a clock; return its time."""
        rate = 1 + RATE_ERROR * (2 * self.random.random() - 1)
        self._clocks[who] = (1000 * self.random.random(), rate)
        return self._time(who)

    def _time(self, who: int) -> float:
        begin, rate = self._clocks[who]
        return begin + rate * self.now

    def _at(self, when: float, kind: str, who: int, data: Any = None) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, kind, who, data))

    def _add(self, machine: Member | Newcomer) -> None:
        trainer = self._trainer_class(machine, self, self.invariants, width=self.width, least=self.least)
        self.ranks[trainer.me] = trainer
        self._at(self.now + self.random.random() * TICK_SECONDS, "tick", trainer.me)
        trainer.start(self._time(trainer.me))

    def _deliver(self, source: int, to: int, body: Message | Frame) -> None:
        delay = self.latency * (0.5 + self.random.random())
        if self.random.random() < 0.03:
            delay *= 10
        connection = connection_of(body)
        when = max(self.now + delay, self._last.get((source, to, connection), 0.0) + 1e-6)
        self._last[source, to, connection] = when
        self._at(when, "message", to, (source, connection, self._epochs[pair_of(source, to), connection], body))

    def _last_from(self, source: int, to: int) -> float:
        return max(self.now, *(self._last.get((source, to, connection), 0.0) for connection in CONNECTIONS))

    def _kill(self, who: int, *, power: bool) -> None:
        """End a process; after a power cut its machine says so later, or never."""
        if who in self.killed or who not in self.ranks:
            return
        self.killed.add(who)
        self._stopped.pop(who, None)
        up_again = self.now + 1 + 5 * self.random.random()
        for other in self.ranks:
            if other in self.killed:
                continue
            pair = pair_of(who, other)
            if self.random.random() < 0.5:
                self._lose(pair)
            if pair in self._cut:
                self._unheard[pair].add(who)
            elif not power or self.random.random() < 0.7:
                soon = self._last_from(who, other) + 0.002 + 0.03 * self.random.random()
                self._at(max(up_again, soon) if power else soon, "gone", other, who)

    def _lose(self, pair: Pair, connections: tuple[int, ...] = CONNECTIONS) -> None:
        for connection in connections:
            self._epochs[pair, connection] += 1

    def _break(self, pair: Pair) -> None:
        """End one connection of two ranks, or all."""
        connections = self.random.choice((CONNECTIONS, CONNECTIONS, CONNECTIONS, (FRAMES,), (CONTROL,), (BULK,)))
        self._lose(pair, connections)
        for one, other in (pair, pair[::-1]):
            held = self._held.pop((one, other), [])
            kept = [body for body in held if connection_of(body) not in connections]
            if kept:
                self._held[one, other] = kept
            self._at(self.now + 0.05 * self.random.random(), "broken", one, other)

    def _mend(self, pair: Pair) -> None:
        if self._cut.pop(pair, None) is None:
            return
        dead = self._unheard.pop(pair, set())
        if self.random.random() < 0.5:
            self._break(pair)
        for one, other in (pair, pair[::-1]):
            for body in self._held.pop((one, other), []):
                if other not in self.killed:
                    self._deliver(one, other, body)
            if other in dead and one not in self.killed:
                self._at(self._last_from(other, one) + 0.05, "gone", one, other)

    # ---- Faults

    def _plan_faults(self) -> None:
        is_hard = self.random.random() < HARD_SHARE
        faults, gaps = (HARD_FAULTS, HARD_GAPS) if is_hard else (FAULTS, GAPS)
        when = 1.0
        for _ in range(self.random.randint(3, 10) if is_hard else self.random.randint(1, 6)):
            when += self.random.choice(gaps) * self.random.random() * 2
            self._at(when, "fault", -1, self.random.choice(faults))
            self._calm = when

    def _fault(self, kind: str) -> None:
        chance = self.random
        alive = [who for who in self.ranks if who not in self.killed]
        self.counts[kind] += 1
        self._trace(f"fault: {kind}; alive {alive}, stopped {list(self._stopped)}, cut {list(self._cut)}")
        if not alive:
            return
        until = self.now
        pause = chance.choice(PAUSES) * (0.8 + 0.4 * chance.random())
        if kind in ("kill", "power", "murder"):
            leading = [who for who in alive if (member := self.ranks[who].member) is not None and member.proposal]
            victim = chance.choice(leading or alive if kind == "murder" else alive)
            self._kill(victim, power=kind == "power" or (kind == "murder" and chance.random() < 0.3))
        elif kind == "stop":
            who = chance.choice(alive)
            if who not in self._stopped:
                self._stopped[who] = []
                until += pause
                self._at(until, "continue", who)
        elif kind == "join":
            self._join()
        elif kind == "leave":
            who = chance.choice(alive)
            self._leaving.add(who)
            self._at(self.now, "leave", who)
        elif len(alive) > 1 and kind == "flap":
            self._break(pair_of(*chance.sample(alive, 2)))
        elif len(alive) > 1:
            if kind == "cut":
                pairs = [pair_of(*chance.sample(alive, 2))]
            else:
                side = set(chance.sample(alive, chance.randint(1, len(alive) - 1)))
                pairs = [pair_of(a, b) for a in alive for b in alive if a < b and (a in side) != (b in side)]
            until += pause + 0.2
            for pair in pairs:
                self._cut[pair] = until
                self._at(until - 0.2 * chance.random(), "mend", -1, pair)
                if pause > 2 and chance.random() < 0.5:
                    self._at(self.now + 2 * chance.random(), "break", -1, pair)
        self._calm = max(self._calm, until)

    def _contacts(self) -> list[int]:
        """Return living members, in random order."""
        found = [who for who, one in self.ranks.items() if who not in self.killed and one.member is not None]
        self.random.shuffle(found)
        return found

    def _join(self) -> None:
        who, self._next_id = self._next_id, self._next_id + 1
        self._add(Newcomer(who, self._set_clock(who), contacts=self._contacts()))

    # ---- Running

    def run(self) -> str:
        """Play the schedule; return how it ends.

        Raises:
            ViolationError: an invariant does not hold.
        """
        self._at(1.0, "look", -1)
        try:
            while self.outcome is None:
                self.now, _, kind, who, data = heapq.heappop(self._heap)
                self.counts["events"] += 1
                self._one(kind, who, data)
            self.invariants.check_end([one for who, one in self.ranks.items() if who not in self.killed])
        except MISHAPS as mishap:
            raise ViolationError(f"{type(mishap).__name__}: {mishap}") from mishap
        return self.outcome

    def _one(self, kind: str, who: int, data: Any) -> None:
        if who < 0:
            self._happen(kind, data)
        elif who in self.killed:
            pass
        elif kind == "continue":
            self._continue(who)
        elif who in self._stopped:
            self._stopped[who].append((kind, data))
        else:
            self._act(kind, who, data)

    def _happen(self, kind: str, data: Any) -> None:
        """Let something happen that is no event of one rank."""
        if kind == "fault":
            self._fault(data)
        elif kind == "mend":
            self._mend(data)
        elif kind == "break":
            if data in self._cut:
                self._break(data)
        elif kind == "join":
            self._join()
        elif kind == "look":
            self._look()
            self._at(self.now + 0.5, "look", -1)

    def _act(self, kind: str, who: int, data: Any) -> None:
        rank, now = self.ranks[who], self._time(who)
        if kind == "message":
            source, connection, epoch, body = data
            pair = pair_of(source, who)
            if epoch != self._epochs[pair, connection]:
                return
            if pair in self._cut:
                if source not in self.killed:
                    self._held.setdefault((source, who), []).append(body)
                return
            if self._say is not None and not isinstance(body, Frame | Beat):
                self._trace(f"{source} -> {who}: {body}")
            rank.receive(source, body, now)
        elif kind == "computed":
            rank.computed(data, now)
        elif kind == "interrupted":
            rank.stop(now)
        elif kind == "leave":
            rank.ask_to_leave(now)
        elif kind == "tick":
            self._at(self.now + TICK_SECONDS, "tick", who)
            is_looking = rank.member is not None and rank.member.state in (State.FROZEN, State.STUCK)
            if (is_looking or rank.member is None) and self.random.random() < 0.1:
                rank.machine.contacts = self._contacts()
            rank.tick(now)
        elif kind == "gone":
            self._trace(f"{who} is told that {data} has ended")
            rank.gone(data, now)
        elif kind == "broken":
            self._trace(f"{who} is told that its connection to {data} has ended")
            rank.broken(data, now)

    def _continue(self, who: int) -> None:
        """Let a stopped process do what has waited; the tick that was due comes anywhere among it."""
        waiting = self._stopped.pop(who, [])
        for kind, data in sorted(waiting, key=lambda one: self.random.random() if one[0] == "tick" else 0.5):
            if who not in self.killed:
                self._act(kind, who, data)

    # ---- Liveness

    def _look(self) -> None:
        """Check that training has resumed since the last fault, with everybody, or may not resume."""
        if self.now < self._calm + 0.5:
            return
        living = {who for who in self.ranks if who not in self.killed}
        numbers = [one.member.record.number for who, one in self.ranks.items() if who in living and one.member]
        # A generation that was decided by members who have all died before they told is lost.
        record = self.invariants.decided[max(numbers, default=0)]
        inside = {
            who: member
            for who in record.members
            if who in living and (member := self.ranks[who].member) is not None and member.record == record
        }
        reached = max((member.newest for member in inside.values()), default=-2)
        if self._mark is None:
            self._mark = reached
        if not is_quorum(living, record.members) or len(living) < self.least:
            # Only certain deaths may let anybody continue; nobody must.
            if self.now > self._calm + PROGRESS_SECONDS:
                frozen = all(member.state in (State.FROZEN, State.STUCK) for member in inside.values())
                self.outcome = "no quorum left" if frozen else "too few members"
            return
        has_resumed = reached >= self._mark + UNITS
        if has_resumed and self.resumed_after is None:
            self.resumed_after = self.now - self._calm
        where = f"living {sorted(living)}, generation {record.number} of {record.members}, unit {reached}"
        if not has_resumed and self.now > self._calm + PROGRESS_SECONDS:
            raise ViolationError(f"no progress since unit {self._mark}: {where}")
        everybody = living == set(record.members) or len(record.members) >= MOST
        active = len(inside) == len(record.members) and all(one.state is State.ACTIVE for one in inside.values())
        if has_resumed and everybody and active:
            self.outcome = "all are members"
        elif self.now > self._calm + ADMISSION_SECONDS:
            raise ViolationError(f"not all are members: {where}")

    def _trace(self, line: str) -> None:
        if self._say is not None:
            self._say(f"{self.now:9.4f} {line}")
