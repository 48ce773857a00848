"""The clocks of parameter servers in every reachable state, without threads or ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pipesgd.systems.servers.waiting import Clocks


def started(clocks: Clocks, worker: int) -> int:
    """Return the last iteration that ``worker`` was let into."""
    return clocks.arrivals[worker] - bool(clocks.waits_for(worker))


class Workers(RuleBasedStateMachine):
    """A state machine in which any computing worker may push next; the clocks are checked against counts kept here."""

    @initialize(workers=st.integers(1, 5), bound=st.none() | st.integers(0, 4))
    def start(self, workers: int, bound: int | None) -> None:
        self.clocks = Clocks(workers, bound)
        self.bound = bound
        self.pushed = [0] * workers
        self.computing = set(range(workers))

    @rule(choice=st.integers(0, 4))
    def push(self, choice: int) -> None:
        worker = sorted(self.computing)[choice % len(self.computing)]
        self.computing.remove(worker)
        self.pushed[worker] += 1
        due = self.clocks.arrived(worker)
        assert not set(due) & self.computing, "one reply a push"
        self.computing.update(due)
        if self.bound is None:
            assert due == [worker], "without a bound nobody waits, nor is anybody told twice"
        if self.bound == 0 and due:
            assert due == list(range(len(self.pushed))), "bound 0 makes rounds"
            assert len(set(self.pushed)) == 1

    @invariant()
    def the_fastest_leads_by_the_bound_at_most(self) -> None:
        in_iteration = [pushed - (worker not in self.computing) for worker, pushed in enumerate(self.pushed)]
        assert [started(self.clocks, worker) for worker in range(len(self.pushed))] == in_iteration
        if self.bound is not None:
            assert max(in_iteration) - min(in_iteration) <= self.bound

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """Check that the slowest can always continue, and that others wait only for them and only if they must."""
        slowest = [worker for worker, pushed in enumerate(self.pushed) if pushed == min(self.pushed)]
        assert set(slowest) <= self.computing
        for worker, pushed in enumerate(self.pushed):
            waits = worker not in self.computing
            assert self.clocks.waits_for(worker) == (slowest if waits else [])
            assert waits == (self.bound is not None and pushed - min(self.pushed) > self.bound)


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(workers=st.integers(1, 5), bound=st.none() | st.integers(0, 4), iterations=st.integers(1, 6), data=st.data())
def test_all_come_to_the_end_in_whatever_order(
    workers: int, bound: int | None, iterations: int, data: st.DataObject
) -> None:
    clocks = Clocks(workers, bound)
    computing = set(range(workers))
    while computing:
        worker = data.draw(st.sampled_from(sorted(computing)))
        computing.remove(worker)
        computing.update(one for one in clocks.arrived(worker) if started(clocks, one) < iterations)
    assert clocks.arrivals == [iterations] * workers


def test_who_waits_for_a_worker_that_has_left_is_told() -> None:
    clocks = Clocks(3, bound=1)
    for worker in (0, 1, 1):
        clocks.arrived(worker)
    assert not clocks.waits_in_vain(1), "it waits for worker 2, who may come yet"
    clocks.left.add(0)
    assert not clocks.waits_in_vain(1)
    clocks.left.add(2)
    assert clocks.waits_in_vain(1)
    assert not clocks.waits_in_vain(0), "it waits for nobody"


@pytest.mark.parametrize("bound", [0, 2])
def test_restored_clocks_go_on_where_they_were(bound: int) -> None:
    clocks = Clocks(2, bound)
    clocks.arrivals = [5, 5]
    pushes = 0
    while clocks.arrived(0) == [0]:
        pushes += 1
    assert pushes == bound
    assert clocks.waits_for(0) == [1]
    assert clocks.arrived(1) == [0, 1]
