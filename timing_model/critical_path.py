"""The time of a schedule: the longest path through its work, its messages and its latencies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from timing_model.schedules import Event, Program, Schedule


@dataclass(frozen=True, kw_only=True)
class SegmentCosts:
    """What one segment costs, in s."""

    work: Mapping[str, float]
    """By operation: "encode", "decode", "add", "hop"."""
    alpha: float
    """Latency between nodes."""
    transfer: float
    """On a wire between nodes."""
    overhead: float
    """CPU time of sending it."""
    ranks_per_node: int = 1
    inner_alpha: float = 0.0
    """Latency inside a node."""
    inner_transfer: float = 0.0
    """On a wire inside a node."""


@dataclass(slots=True)
class _Rank:
    """How far a rank has come."""

    number: int
    program: Program
    position: int = 0
    cpu: float = 0.0
    wires: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """When the last message leaves its wire inside the node, and the one to other nodes."""
    taken: Counter[int] = field(default_factory=Counter)
    """Messages so far, by their sender."""


def critical_path(schedule: Schedule, segments: int, costs: SegmentCosts) -> float:
    r"""Time from a common start until the last rank has all that it waits for, in s.

    For each rank, its events e in order, m the message that e waits for, and m' the ones that it sends:

    .. math::

        C(e) = \max(C(e-1), A(m)) + work(e), \qquad
        C(m') = C(m'-1) + o, \qquad
        P(m') = \max(P(m'-1), C(m')) + w, \qquad
        A(m') = P(m') + \alpha

    C is the rank's CPU, P its wire, A the arrival at the other end. So messages that follow each other overlap in
    their latency, and one segment's wire with another's work: what the code does. Every rank has a wire inside its
    node and another to other nodes, both ways at once; who shares a card has a share of it in ``transfer``. That what
    was sent must have left before its memory is used again holds nobody up here: what comes into it has come later.
    Of ranks that do the same one is followed: a ring costs O(p). ``schedule.followed`` must not be None.
    """
    assert schedule.followed is not None, "a schedule to be simulated"
    arrivals: dict[tuple[int, int], list[float]] = defaultdict(list)
    g = costs.ranks_per_node
    wires = (costs.inner_transfer, costs.inner_alpha), (costs.transfer, costs.alpha)

    def run(rank: _Rank, event: Event) -> bool:
        """Do ``event`` if what it waits for is on its way."""
        if event.source is not None:
            pair = schedule.mirror(event.source, rank.number)
            if rank.taken[event.source] == len(arrivals[pair]):
                return False
            rank.cpu = max(rank.cpu, arrivals[pair][rank.taken[event.source]])
            rank.taken[event.source] += 1
        for operation in event.work:
            rank.cpu += costs.work[operation]
        for target in event.targets:
            rank.cpu += costs.overhead
            outside = target // g != rank.number // g
            transfer, alpha = wires[outside]
            rank.wires[outside] = max(rank.wires[outside], rank.cpu) + transfer
            arrivals[rank.number, target].append(rank.wires[outside] + alpha)
        return True

    ranks = [_Rank(number, schedule.program(number, segments)) for number in schedule.followed]
    waiting = ranks
    while waiting:
        moved = False
        for rank in waiting:
            while rank.position < len(rank.program) and run(rank, rank.program[rank.position]):
                rank.position += 1
                moved = True
        waiting = [rank for rank in waiting if rank.position < len(rank.program)]
        assert moved or not waiting, "a deadlock"
    return max(max(rank.cpu, *rank.wires) for rank in ranks)
