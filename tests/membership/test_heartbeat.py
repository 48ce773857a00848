"""Decisions about who is alive and who is awaited, on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipesgd.membership.heartbeat import LEFT, Beat, Liveness, News, Patience, Standing, no_word_from


def beat(count: int, phase: str = "compute", *, waiting: bool = False, seconds: float = 0.0) -> Beat:
    return Beat(count, 7, phase, waiting, seconds)


def rank_0(rounds: int, *, missing: int | None = None, since: int = 0) -> Liveness:
    """Return rank 0's view of 3 ranks after ``rounds`` rounds of a second with heartbeats of all but ``missing``."""
    liveness = Liveness(0, 3, now=0.0)
    for now in range(rounds + 1):
        liveness.wake(now)
        for rank in range(3):
            liveness.observe(rank, beat(since if rank == missing and now > since else now), now)
    return liveness


def test_a_rank_whose_heartbeat_stops_is_silent_and_then_lost() -> None:
    assert rank_0(12).silent(12) == {}
    assert rank_0(6, missing=1, since=4).silent(6) == {}, "it may hold Python's lock for some seconds"
    assert rank_0(9, missing=1, since=4).silent(9) == {1: 5}
    assert rank_0(9, missing=1, since=4).lost(9, timeout=30) == {}
    assert rank_0(9, missing=1, since=4).lost(9, timeout=0.5) == {1: 5}
    assert rank_0(40, missing=1, since=4).lost(40, timeout=30) == {1: 36}


def test_a_rank_that_never_gave_a_heartbeat_is_missed_from_the_start() -> None:
    liveness = Liveness(0, 2, now=100.0)
    for now in range(100, 111):
        liveness.wake(now)
        liveness.observe(1, None, now)
    assert liveness.lost(110, timeout=10) == {1: 10}


def test_a_rank_that_has_ended_as_it_should_is_not_missed() -> None:
    liveness = rank_0(4)
    liveness.observe(1, beat(5, LEFT), 5)
    for now in range(5, 100):
        liveness.wake(now)
        liveness.observe(2, beat(now), now)
    assert liveness.silent(99) == {}


def test_a_rank_that_was_stopped_itself_accuses_nobody() -> None:
    liveness = rank_0(5)
    liveness.wake(200)
    assert liveness.silent(200) == {}
    for now in range(201, 207):
        liveness.wake(now)
        liveness.observe(1, beat(now), now)
    assert list(liveness.silent(206)) == [2], "who is dead then is found as ever"


def test_the_others_hear_from_rank_0_who_is_silent_and_notice_when_rank_0_is() -> None:
    rank_2 = Liveness(2, 3, now=0.0)
    for now in range(10):
        rank_2.wake(now)
        told = News.decode(rank_0(now, missing=1, since=2).news(now, now).encode().encode())
        rank_2.observe_news(told, now)
    assert rank_2.silent(9) == {1: 7.0}
    assert rank_2.lost(9, timeout=6) == {1: 7.0}
    for now in range(10, 20):
        rank_2.wake(now)
        rank_2.observe_news(told, now)
    assert rank_2.lost(19, timeout=10) == {0: 10.0}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b"[1]",
        b"[" * 9999,
        b'["1", null, "x", true, 0]',
        b"\xff",
        b"[1, [[7]]]",
        b'[1, null, "x", true, 1' + b"0" * 400 + b"]",
    ],
)
def test_what_is_no_heartbeat_and_no_news_counts_as_none(value: bytes) -> None:
    assert Beat.decode(value) is None
    assert News.decode(value) is None


def test_news_of_ranks_that_do_not_exist_are_left_out() -> None:
    liveness = Liveness(1, 3, now=0.0)
    liveness.observe_news(News(1, {7: 100.0, -4: 50.0, 2: 8.0, 1: 99.0}, last=False), 0.5)
    assert liveness.silent(1.0) == {2: 8.0}


def test_rank_0_is_not_missed_once_it_has_ended_as_it_should() -> None:
    """The other ranks used to take rank 0 for hung if they continued for longer than the timeout."""
    standing, first, second = Standing(), Liveness(0, 2, now=0.0), Liveness(1, 2, now=0.0)
    standing.enter(LEFT, 1.0)
    first.observe(0, standing.beat(1.0), 1.0)
    news = News.decode(first.news(1, 1.0).encode().encode())
    second.observe_news(news, 1.0)
    assert second.silent(1000.0) == {}
    standing.enter("start", 1001.0)
    first.observe(0, standing.beat(1001.0), 1001.0)
    second.observe_news(News.decode(first.news(2, 1001.0).encode().encode()), 1001.0)
    assert second.silent(1010.0) == {0: 9.0}


def stalled(beats: list[Beat | None], *, silent: bool = False) -> str | None:
    liveness = Liveness(0, len(beats), now=0.0)
    for now in range(41):
        liveness.wake(now)
        for rank, one in enumerate(beats):
            if one is not None and not (silent and rank == 1 and now):
                liveness.observe(rank, Beat(now, one.iteration, one.phase, one.waiting, one.seconds), now)
    return liveness.stall(40, 30)


def test_a_stall_line_names_who_is_awaited_and_what_it_does() -> None:
    waiting = beat(1, "all-reduce", waiting=True, seconds=31)
    start = "stalled: rank 0 waits in all-reduce of iteration 7 for 31 s, for "
    assert stalled([waiting, beat(1, seconds=32), waiting]) == start + "rank 1 (compute of iteration 7 for 32 s)"
    assert stalled([waiting, beat(1), waiting], silent=True) == start + "rank 1 (no heartbeat for 40 s)"
    assert stalled([waiting] * 3) == start + "the network: no rank is silent, and all of them wait"
    assert stalled([beat(1, seconds=31)] * 3) is None, "it computes, and waits for nobody"
    assert stalled([beat(1, "all-reduce", waiting=True, seconds=29)] * 3) is None


def test_a_stall_is_said_again_after_as_many_seconds_and_not_before() -> None:
    liveness = Liveness(0, 2, now=0.0)
    said = []
    for now in range(100):
        liveness.wake(now)
        liveness.observe(0, beat(now, "all-reduce", waiting=True, seconds=now), now)
        liveness.observe(1, beat(now, seconds=now), now)
        said += [now] if liveness.stall(now, 30) else []
    assert said == [30, 60, 90]


def end_of_wait(beats: Callable[[int], dict[int, Beat]]) -> int:
    """Return the seconds until a wait with a timeout of 5 s and at most 50 s per phase ends; 1000 if it does not."""
    patience = Patience(timeout=5.0, longest=50.0, now=0.0)
    for now in range(1, 1000):
        patience.observe(beats(now), now)
        if now >= patience.end:
            return now
    return 1000


def test_a_wait_for_a_rank_that_computes_loads_or_writes_lasts_while_it_gives_heartbeats() -> None:
    assert end_of_wait(lambda now: {1: beat(min(now, 8), "checkpoint")}) == 13


def test_a_wait_for_a_rank_that_hangs_in_a_phase_and_gives_heartbeats_has_a_bound() -> None:
    assert end_of_wait(lambda now: {1: beat(now)}) == 50
    assert end_of_wait(lambda now: {1: beat(now, "compute" if now < 8 else "checkpoint")}) == 58


def test_a_wait_for_a_rank_that_is_silent_or_waits_itself_is_as_long_as_the_timeout() -> None:
    assert end_of_wait(lambda now: {}) == 5
    assert end_of_wait(lambda now: {1: beat(3)}) == 5
    assert end_of_wait(lambda now: {1: beat(now, "all-reduce", waiting=True)}) == 5
    assert end_of_wait(lambda now: {1: beat(now, "compute" if now < 3 else "all-reduce", waiting=now >= 3)}) == 8


def test_a_wait_for_several_ranks_lasts_while_one_of_them_gets_on() -> None:
    assert end_of_wait(lambda now: {1: beat(now, "all-reduce", waiting=True), 2: beat(min(now, 8))}) == 13
    assert end_of_wait(lambda now: {1: Beat(now, now, "all-reduce", waiting=True, seconds=0.0)}) == 1000


def test_a_standing_counts_its_heartbeats_and_returns_to_the_phase_before() -> None:
    standing = Standing(timeout=5.0, iteration=3)
    standing.enter("compute", 10.0)
    before = standing.enter("exchange of x", 12.0, waiting=True)
    assert standing.beat(13.0) == Beat(1, 3, "exchange of x", waiting=True, seconds=1.0)
    standing.resume(before)
    assert standing.beat(14.0) == Beat(2, 3, "compute", waiting=False, seconds=4.0)


def test_silent_ranks_are_named_with_the_seconds_that_all_of_them_have_been_silent_for() -> None:
    assert no_word_from({1: 4.4}, 2) == "no heartbeat from rank 1 for 4 s"
    assert no_word_from({3: 9.0, 1: 6.0}, 4) == "no heartbeat from ranks 1, 3 for 6 s"


def test_a_rank_that_hears_nobody_suspects_its_own_network() -> None:
    assert no_word_from({1: 9.0, 2: 6.0}, 3) == (
        "no heartbeat from any other rank for 6 s: this machine may be cut off from the network"
    )
