"""The token bucket on a clock of the test's own, and what of a rank's messages it is asked about."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass

import pytest
import torch
from _memory_transport import DEADLINE, MemoryTransport, integers, run_threads
from _ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipesgd.codecs.base import Codec
from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import DENSE_CODECS, FLOAT_CODECS, codec_named
from pipesgd.comm import pace as module
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.comm.connections import Connections
from pipesgd.comm.pace import PACED_SECONDS, SAVED_SECONDS, TokenBucket, paced_segment_bytes
from pipesgd.comm.thread import CommunicationThread
from pipesgd.comm.transport import Pending
from pipesgd.errors import CommunicationError, UserInputError
from pipesgd.ranks import Ranks
from timing_model.schedules import SCHEDULES

RATE = 1e6
LARGEST = paced_segment_bytes(1 << 20, RATE)
FAST = 1e12
"""A limit that splits no message."""
HEADER = 16
"""Bytes in front of each collective."""


class Clock:
    """A clock that only sleeping and ``pass_by`` move. Each sleep lasts a little too long, as real ones do."""

    def __init__(self, late: float = 0.0):
        self.now = 100.0
        self.slept = 0.0
        self._late = late

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late
        self.slept = max(self.slept, seconds)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def _sent(clock: Clock, messages: list[tuple[int, float]], rate: float = RATE) -> list[tuple[float, int]]:
    """Return when each message passed, and its bytes; the number after a message is the time until the next is due."""
    bucket = TokenBucket(rate, clock=clock, sleep=clock.sleep)
    passed = []
    for nbytes, then in messages:
        bucket.take(nbytes)
        passed.append((clock.now, nbytes))
        clock.pass_by(then)
    return passed


MESSAGES = st.lists(st.tuples(st.integers(16, LARGEST), st.sampled_from([0.0, 0.001, 0.02, 0.5])), max_size=200)


@given(messages=MESSAGES, late=st.sampled_from([0.0, 0.0001, 0.003]))
def test_no_second_has_more_than_the_rate_and_2_percent(messages: list[tuple[int, float]], late: float) -> None:
    passed = _sent(Clock(late), messages)
    for first, (begin, _) in enumerate(passed):
        total = 0
        for end, nbytes in passed[first:]:
            total += nbytes
            assert total <= RATE * (end - begin + SAVED_SECONDS) + nbytes + 1e-3
            assert total <= 1.02 * RATE * max(1.0, end - begin) + 1e-3


@pytest.mark.parametrize("late", [0.0, 0.0001, 0.004])
@pytest.mark.parametrize("nbytes", [16, 1000, LARGEST])
def test_a_rank_that_always_has_something_to_send_reaches_the_rate_within_2_percent(nbytes: int, late: float) -> None:
    """A message later than the time saved up would lose the rest of its delay."""
    clock = Clock(late)
    passed = _sent(clock, [(nbytes, 0.0)] * math.ceil(2 * RATE / nbytes))
    rate = sum(size for _, size in passed[:-1]) / (passed[-1][0] - passed[0][0])
    assert rate == pytest.approx(RATE, rel=0.02)
    assert clock.slept < PACED_SECONDS + 1e-9, "errors need not wait long"


def test_a_sleep_that_ends_early_is_continued() -> None:
    clock = Clock()
    bucket = TokenBucket(RATE, clock=clock, sleep=lambda seconds: clock.sleep(min(seconds, 0.001)))
    bucket.take(LARGEST)
    bucket.take(LARGEST)
    assert clock.now == pytest.approx(100.0 + PACED_SECONDS - SAVED_SECONDS)


def test_an_infinite_rate_lets_everything_pass_at_once() -> None:
    clock = Clock()
    _sent(clock, [(1 << 40, 0.0)] * 5, rate=math.inf)
    assert (clock.now, clock.slept) == (100.0, 0.0)


# --- On the wire ------------------------------------------------------------------------------------------------------


class Rendezvous:
    """A transport whose messages leave when their receivers are ready, as gloo's do. It notes what has not left."""

    def __init__(self, transport: MemoryTransport, posted: dict[tuple[int, int], threading.Semaphore]):
        self.rank, self.world_size = transport.rank, transport.world_size
        self.bytes_sent = self.bytes_received = 0
        self.waiting = self.most_waiting = 0
        self.largest = 0
        self._transport, self._posted = transport, posted

    def send(self, tensor: Tensor, peer: int, what: str) -> Pending:
        self._transport.send(tensor, peer, what)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        self.largest = max(self.largest, tensor.nbytes)
        return Leaving(self, peer)

    def receive(self, tensor: Tensor, peer: int, what: str) -> Pending:
        self._posted[peer, self.rank].release()
        return self._transport.receive(tensor, peer, what)

    def wait_for(self, peer: int) -> None:
        assert self._posted[self.rank, peer].acquire(timeout=DEADLINE), f"rank {peer} is not ready"
        self.waiting -= 1


@dataclass
class Leaving:
    transport: Rendezvous
    peer: int

    def wait(self) -> None:
        self.transport.wait_for(self.peer)


def over_rendezvous(name: str, world_size: int, codec: Codec, paced: bool) -> list[tuple[Tensor, Rendezvous]]:
    """Return each rank's sum, in messages of about 64 bytes, and its transport."""
    posted = {(sender, to): threading.Semaphore(0) for sender in range(world_size) for to in range(world_size)}

    def reduce(transport: MemoryTransport) -> tuple[Tensor, Rendezvous]:
        meeting = Rendezvous(transport, posted)
        schedule = SCHEDULES[name](transport.rank, world_size)
        flat = integers(1000, transport.rank)
        ScheduledAllReduce(meeting, schedule, codec, segment_bytes=64, paced=paced)(flat)
        return flat, meeting

    return run_threads(world_size, reduce)[0]


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_paced_message_is_handed_over_when_the_one_before_has_left_and_no_rank_waits_forever(
    name: str, world_size: int
) -> None:
    expected = torch.stack([integers(1000, rank) for rank in range(world_size)]).sum(0)
    for flat, transport in over_rendezvous(name, world_size, Uncompressed(), paced=True):
        assert torch.equal(flat, expected)
        assert (transport.most_waiting, transport.waiting) == (1, 0)


@pytest.mark.parametrize("codec", [codec for codec in DENSE_CODECS if codec != "qsgd"])
def test_no_paced_message_is_larger_than_allowed_although_blocks_are_whole(codec: str) -> None:
    """Two messages for three blocks would have two blocks in one of them."""
    block = {} if codec in FLOAT_CODECS else {"block": 40}
    made = codec_named(codec, **block).make()
    for _, transport in over_rendezvous("ring", 2, made, paced=True):
        assert transport.largest <= 64


def _with_a_late_receiver(ranks: Ranks) -> list[bool]:
    """Sum up on ranks of which rank 1 begins after the first message to it was handed over. Return whether rank 1 had
    begun at each further message to it."""
    begun: list[bool] = []

    class Noting(TokenBucket):
        def take(self, nbytes: int) -> None:
            if nbytes != HEADER:
                begun.append(begun[-1:] == [True] or ranks.store.check(["begun"]))
                if not begun[:-1]:
                    ranks.store.set(f"rank {ranks.rank} sends", "")

    module.TokenBucket = Noting  # type: ignore[misc]  # in this rank's process
    connections = Connections("ring", ranks, timeout=ranks.timeout, rate_limit=RATE, transport="gloo")
    flat = torch.ones(100_000)
    if ranks.rank == 1:
        ranks.store.wait(["rank 0 sends"])
        ranks.store.set("begun", "")
    connections.run("step", 0, functools.partial(connections.all_reduce(), flat))
    connections.wait_for_all()
    connections.close()
    assert torch.equal(flat, torch.full_like(flat, ranks.world_size))
    return begun


@pytest.mark.slow
def test_over_gloo_no_messages_gather_for_a_late_receiver() -> None:
    """Rank 0's left neighbour is there, so that it is the message that has not left for which rank 0 waits."""
    first, *others = run_ranks(3, _with_a_late_receiver)[0]
    assert not first
    assert len(others) > 5
    assert all(others)


def _left_alone(ranks: Ranks) -> tuple[str, int, bool] | None:
    """Sum up 5 MB at 1 Mbit/s. Rank 1 leaves when it has got a first message; return what rank 0 gets to hear, the
    bytes that it has sent, and whether its communication thread has ended."""
    connections = Connections("ring", ranks, timeout=ranks.timeout, rate_limit=RATE / 8, transport="gloo")
    flat = torch.zeros(1_250_000)
    if ranks.rank == 1:
        connections.begin("step", 0)
        connections.transport.receive(torch.empty(1872, dtype=torch.uint8), 0, "the first message").wait()
        connections.close()
        return None
    thread = CommunicationThread(torch.device("cpu"))
    job = functools.partial(connections.run, "step", 0, functools.partial(connections.all_reduce(), flat))
    failure = thread.submit(job).exception()
    thread.close()
    connections.close()
    alive = any(one.name == "pipesgd-communication" for one in threading.enumerate())
    assert isinstance(failure, CommunicationError), failure
    return str(failure), connections.transport.bytes_sent, alive


@pytest.mark.slow
def test_a_rank_that_waits_to_send_at_the_limit_hears_of_a_lost_one() -> None:
    """The sum would take 40 s, and the deadline is 20 s."""
    said, sent, alive = run_ranks(2, _left_alone)[0]
    assert "with rank 1 in iteration 0 failed" in said
    assert "no answer within" not in said, "it does not take the deadline to notice"
    assert sent < 1_250_000, "a quarter of what it has to send"
    assert not alive


def _with_large_blocks(ranks: Ranks) -> str:
    connections = Connections("ring", ranks, timeout=ranks.timeout, rate_limit=RATE / 8)
    connections.all_reduce(codec_named("int8", block=1871).make())
    with pytest.raises(UserInputError) as refused:
        connections.all_reduce(codec_named("int8", block=1872).make())
    connections.close()
    return str(refused.value)


@pytest.mark.slow
def test_blocks_that_are_larger_than_a_paced_message_are_refused() -> None:
    assert run_ranks(1, _with_large_blocks) == [
        "codec-block must encode to at most 1875 bytes, a message's at this rate-limit; got 1872 values, 1876 bytes"
    ]


class Counting(TokenBucket):
    """A bucket that notes what it is asked about, and never waits."""

    def __init__(self, rate: float):
        super().__init__(rate)
        self.taken: list[int] = []
        buckets.append(self)

    def take(self, nbytes: int) -> None:
        self.taken.append(nbytes)


buckets: list[Counting] = []


def _sums(ranks: Ranks) -> tuple[list[Tensor], list[tuple[list[int], int]]]:
    module.TokenBucket = Counting  # type: ignore[misc]  # in this rank's process
    values, found = [], []
    for rate in (RATE, FAST):
        connections = Connections("ring", ranks, timeout=ranks.timeout, rate_limit=rate, connections=2)
        all_reduce = connections.all_reduce(codec_named("int4").make())
        flat = torch.randn(100_000, generator=torch.Generator().manual_seed(ranks.rank))
        connections.run("step", 0, functools.partial(all_reduce, flat))
        connections.wait_for_all()
        values.append(flat)
        sent = connections.transport.bytes_sent + connections.control.bytes_sent
        found.append((buckets[-1].taken, sent))
        connections.close()
    return values, found


@pytest.mark.slow
def test_every_byte_that_is_sent_passes_the_bucket_and_the_sum_is_the_same() -> None:
    for (limited, unlimited), ((small, small_sent), (large, large_sent)) in run_ranks(2, _sums):
        assert torch.equal(limited, unlimited), "smaller messages, the same values"
        assert (sum(small), sum(large)) == (small_sent, large_sent)
        assert max(small) <= LARGEST < max(large)
        assert {16} == {min(small), min(large)}, "the headers are counted, too"
