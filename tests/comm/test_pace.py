"""The token bucket on a clock of the test's own, and what of a rank's messages it is asked about."""

from __future__ import annotations

import functools
import math
import threading

import pytest
import torch
from _ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import CodecOptions
from pipesgd.comm import connections as module
from pipesgd.comm.connections import Connections
from pipesgd.comm.pace import TokenBucket
from pipesgd.comm.thread import CommunicationThread
from pipesgd.ranks import Ranks
from timing_model.schedules import PACED_SECONDS, SAVED_SECONDS, paced_segment_bytes

RATE = 1e6
LARGEST = paced_segment_bytes(1 << 20, RATE)


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


def test_an_error_ends_the_wait_for_a_paced_message_at_once() -> None:
    """The bucket holds up the communication thread, not who waits for it."""
    asleep, over = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        asleep.set()
        assert over.wait(20.0)

    now = iter([0.0, 0.0, 0.0, 0.0, 2.0, 2.0])
    bucket = TokenBucket(1.0, clock=lambda: next(now), sleep=sleep)
    thread = CommunicationThread(torch.device("cpu"))
    bucket.take(1)
    waiting = thread.submit(lambda: bucket.take(1))
    assert asleep.wait(20.0)
    thread.fail(error := RuntimeError("rank 3 was lost"))
    assert waiting.exception(timeout=0) is error
    over.set()
    thread.close()


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
    for rate in (RATE, math.inf):
        connections = Connections("ring", ranks, timeout=ranks.timeout, rate_limit=rate, connections=2)
        all_reduce = connections.all_reduce(make_codec(CodecOptions(codec="int4")))
        flat = torch.randn(100_000, generator=torch.Generator().manual_seed(ranks.rank))
        connections.run("step", 0, functools.partial(all_reduce, flat))
        connections.wait_for_all()
        values.append(flat)
        sent = connections.transport.bytes_sent + connections.control.bytes_sent
        found.append((buckets[-1].taken, sent))
        connections.close()
    return values, found


def test_every_byte_that_is_sent_passes_the_bucket_and_the_sum_is_the_same() -> None:
    for (limited, unlimited), ((small, small_sent), (large, large_sent)) in run_ranks(2, _sums):
        assert torch.equal(limited, unlimited), "smaller messages, the same values"
        assert (sum(small), sum(large)) == (small_sent, large_sent)
        assert max(small) <= LARGEST < max(large)
        assert {16} == {min(small), min(large)}, "the headers are counted, too"
