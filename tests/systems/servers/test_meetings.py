"""Barriers of workers that may be far apart, on a clock set by the test; and a server that holds one, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _memory_transport import MemoryTransport, Network
from torch import Tensor, nn

from pipesgd.errors import CommunicationError, DeadlineExceeded
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.optim.hyperparameters import as_numbers
from pipesgd.systems.servers.ends import Links, WorkerThread
from pipesgd.systems.servers.messages import (
    MOST_COUNTED,
    REPLY_NUMBERS,
    REQUEST_NUMBERS,
    Reply,
    Request,
    RequestMessage,
)
from pipesgd.systems.servers.shard import Shard
from pipesgd.systems.servers.update_rule import OptimizerRule, ShardLayout
from pipesgd.systems.servers.waiting import Meetings


def test_a_worker_whose_gradients_keep_arriving_is_not_silent_however_long_another_waits() -> None:
    meetings = Meetings(3, timeout=10.0)
    meetings.come(0, 1, place=5, now=100.0)
    meetings.come(2, 1, place=5, now=101.0)
    for now in range(105, 1000, 9):
        meetings.heard(1, float(now))
        assert meetings.missing(0) == meetings.missing(2) == [1]
        assert not meetings.silent(0, now + 10.0)
    assert meetings.silent(0, 999.0 + 10.0) == [1]
    meetings.come(1, 1, place=5, now=2000.0)
    assert not meetings.missing(0)
    assert not meetings.silent(0, 9999.0)


def test_a_wait_is_at_least_as_long_as_the_timeout() -> None:
    """The last message of a worker in a long iteration may be old by the time another worker begins to wait."""
    meetings = Meetings(2, timeout=10.0)
    meetings.heard(1, 0.0)
    meetings.come(0, 1, place=5, now=100.0)
    assert not meetings.silent(0, 110.0)
    assert meetings.silent(0, 110.5) == [1]


def test_workers_in_different_calls_are_seen_and_meetings_cannot_be_skipped() -> None:
    meetings = Meetings(3, timeout=10.0)
    meetings.come(0, 1, place=5, now=0.0)
    meetings.come(0, 1, place=5, now=1.0)  # asks again
    meetings.come(1, 1, place=6, now=0.0)
    assert meetings.elsewhere(0) == [1]
    assert meetings.elsewhere(1) == [0]
    for number, place in ((1, 6), (2, 5), (0, 5), (3, 5)):
        with pytest.raises(ValueError, match="the number of a meeting must be 1 or one more; got"):
            meetings.come(0, number, place, now=2.0)


# ---- A server, and a remote worker whose messages the test sends


def make_shard(
    workers: int = 2, timeout: float = 20.0, bound: int | None = None
) -> tuple[Shard, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    layout = ShardLayout(FlatBuffer(list(model.parameters())), 0, 1)
    parameters = list(model.parameters())
    rule = OptimizerRule(parameters, optimizer, layout)
    shard = Shard(rule, layout, workers=workers, bound=bound, rank=0, timeout=timeout)
    return shard, optimizer


class Peer:
    """A stub for worker 1 of a server on rank 0, used from the test's thread."""

    def __init__(self, shard: Shard, optimizer: torch.optim.Optimizer):
        networks = [Network(2) for _ in range(5)]
        self._links = Links(*(MemoryTransport(network, 1) for network in networks))
        self.options = len(as_numbers(optimizer))
        self.thread = WorkerThread(
            shard, 1, self.options, Links(*(MemoryTransport(network, 0) for network in networks))
        )
        self.thread.start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *failure: object) -> None:
        self._links.requests.send(RequestMessage(Request.BYE).pack(self.options), 0, "a farewell").wait()
        self.thread.join(20)

    def say(self, numbers: Tensor) -> Reply:
        self._links.requests.send(numbers, 0, "a request").wait()
        answer = torch.empty(REPLY_NUMBERS, dtype=torch.float64)
        self._links.replies.receive(answer, 0, "a reply").wait()
        return Reply.unpack(answer.tolist(), ranks=2, most_state_bytes=MOST_COUNTED)

    def ask(self, request: RequestMessage) -> Reply:
        return self.say(request.pack(self.options))


FOREIGN = {
    "no such request": {0: 7.0},
    "half a request": {0: 0.5},
    "NaN": {0: float("nan")},
    "a flag of 2": {1: 2.0},
    "a negative size": {0: float(Request.LOAD), 2: -1.0},
    "a huge size": {0: float(Request.LOAD), 2: 1e15},
    "an infinite size": {0: float(Request.LOAD), 2: float("inf")},
    "another worker's right": {0: float(Request.STORE)},
    "a meeting far ahead": {0: float(Request.MEET), 2: 1e9},
    "a place that is none": {0: float(Request.MEET), 2: 1.0, 3: -5.0},
    "a learning rate of NaN": {REQUEST_NUMBERS: float("nan")},
    "a negative learning rate": {REQUEST_NUMBERS: -0.1},
    "a huge momentum": {REQUEST_NUMBERS + 1: 1e30},
}


@pytest.mark.parametrize("changes", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_request_is_one_error_that_names_the_worker(changes: dict[int, float]) -> None:
    shard, optimizer = make_shard()
    with Peer(shard, optimizer) as peer:
        numbers = RequestMessage(Request.PULL).pack(peer.options)
        for index, value in changes.items():
            numbers[index] = value
        assert peer.say(numbers).lost == 1
    assert not peer.thread.is_alive()
    failure = shard.failure
    assert isinstance(failure, CommunicationError)
    assert (failure.rank, failure.peer) == (0, 1)
    assert " must " in failure.reason
    assert "; got " in failure.reason
    assert "\n" not in str(failure)
    with pytest.raises(CommunicationError):
        shard.push(0, shard.weights, True, as_numbers(optimizer))


@pytest.mark.parametrize(
    "numbers", [[float("nan"), 0, 0, 0], [-1, 0, 0, 0], [0, 0.5, 0, 0], [0, 1, 4, 0], [0, 1, 0, 1e12], [0, 1, 0, -8]]
)
def test_a_foreign_reply_is_refused(numbers: list[float]) -> None:
    with pytest.raises(ValueError, match=r"must be a whole number from 0 to .*; got "):
        Reply.unpack(numbers, ranks=3, most_state_bytes=1000)


def test_messages_arrive_as_they_were_sent() -> None:
    request = RequestMessage(Request.PUSH, finite=False, number=3, place=4, options=(0.1, 0.9))
    assert RequestMessage.unpack(request.pack(2).tolist(), worker=1, most_state_bytes=0) == request
    for reply in (Reply(7, True), Reply(0, False, lost=2, state_bytes=10)):
        assert Reply.unpack(reply.pack().tolist(), ranks=3, most_state_bytes=10) == reply


def _in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Start ``function()`` in a thread; return a function that waits for its result, or its exception as a value."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except CommunicationError as failure:
            outcome.append(failure)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(20)
        assert outcome, "a thread hangs"
        return outcome[0]

    return result


def test_whoever_waits_at_a_meeting_goes_on_when_the_last_has_come() -> None:
    shard, optimizer = make_shard(timeout=20.0)
    first = _in_thread(lambda: shard.meet(0, 1, 5, seconds=20.0))
    with Peer(shard, optimizer) as peer:
        assert peer.ask(RequestMessage(Request.MEET, number=1, place=5)).applied
        assert first() is True
        assert not shard.meet(0, 2, 5, seconds=0.0), "the next one is another"
        peer.ask(RequestMessage(Request.MEET, number=2, place=5))
        assert shard.meet(0, 2, 5, seconds=0.0)


def test_a_worker_that_is_silent_is_named_by_whoever_waits_at_a_meeting() -> None:
    shard, _ = make_shard(workers=3, timeout=0.05)
    shard.heard(2)

    def wait() -> None:
        while True:
            shard.heard(2)
            shard.meet(0, 1, 5, seconds=0.01)

    with pytest.raises(DeadlineExceeded, match="with rank 1 in iteration 0 failed: nothing was heard"):
        wait()


@pytest.mark.parametrize("bound", [0, 1])
def test_two_workers_that_wait_for_each_other_in_different_calls_are_told_at_once(bound: int) -> None:
    shard, optimizer = make_shard(bound=bound)
    options = as_numbers(optimizer)
    for _ in range(bound):
        shard.push(1, shard.weights, True, options)
    ahead = _in_thread(lambda: shard.push(1, shard.weights, True, options))
    other = _in_thread(lambda: shard.meet(0, 1, 5, seconds=20.0))
    failures = [ahead(), other()]
    assert all(isinstance(failure, CommunicationError) for failure in failures)
    assert "with rank 0 in iteration" in str(failures[0])
    assert failures[0].reason == "it waits for this rank in a collective call"


def test_two_workers_in_different_calls_are_told_at_once() -> None:
    shard, _ = make_shard()
    first = _in_thread(lambda: shard.meet(0, 1, 5, seconds=20.0))
    second = _in_thread(lambda: shard.meet(1, 1, 6, seconds=20.0))
    assert {str(type(one()).__name__) for one in (first, second)} == {"CommunicationError"}
    assert "all workers must make the same ones" in str(first())
