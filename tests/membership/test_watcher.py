"""The watcher's thread, over a store in memory: which ranks learn of what, and how their own processes continue."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _rank_threads import in_threads
from _ranks import run_ranks
from _waiting import wait_until

from pipesgd import Pipelined, process
from pipesgd.errors import CommunicationError, DeadlineExceeded, PeerFailed, StoppedBySignal
from pipesgd.membership import heartbeat, session, watcher
from pipesgd.membership.farewell import Farewell
from pipesgd.membership.heartbeat import LEFT, Beat, Standing
from pipesgd.membership.session import open_session
from pipesgd.ranks import Ranks
from pipesgd.reducers import make
from pipesgd.sections import Wire

pytestmark = pytest.mark.slow

DEADLINE = 20.0


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make heartbeats 50 times as fast, and silence count ten times as early, by the same rules."""
    monkeypatch.setattr(watcher, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(watcher, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(heartbeat, "SHORTEST_SILENCE", 0.5)
    monkeypatch.setattr(watcher, "DOUBT_SECONDS", 1.0)


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        ({0: '["closed", 2]', 1: "", 2: '["no answer", 1]'}, (2, "no answer", 1)),  # rank 1 hangs, gloo closes rank 2's
        ({0: '["", null]', 1: '["the disk is full", null]'}, (1, "the disk is full", None)),
        ({0: '["closed", 1]', 1: '["closed", 0]'}, (0, "closed", None)),
        ({0: '["closed", 1]', 1: '["", 0]'}, (0, "closed", None)),
        ({0: '["", 2]', 1: '["closed", 0]', 2: '["the disk is full", null]'}, (2, "the disk is full", None)),
        ({0: '["closed", 1]'}, (0, "closed", 1)),
        ({1: "no JSON"}, (1, "no JSON", None)),
        ({0: "", 1: '["", 0]'}, None),
    ],
)
def test_the_cause_is_a_rank_that_has_not_lost_another_failed_one(reports: Any, cause: Any) -> None:
    assert watcher.root_cause({rank: text.encode() for rank, text in reports.items()}) == cause


def test_of_ranks_that_accuse_each_other_it_is_the_first_one() -> None:
    reports = {0: b'["closed", 1]', 1: b'["no answer", 0]'}
    assert [watcher.root_cause(reports, first) for first in (1, 2)] == [(1, "no answer", None), (0, "closed", None)]


class Watching:
    """A job's ranks in one process, each with its own watcher."""

    def __init__(self, world_size: int, timeout: float = 0.5):
        self.store = dist.HashStore()
        self.ranks = [
            Ranks(rank=rank, world_size=world_size, store=self.store, standing=Standing(timeout))
            for rank in range(world_size)
        ]
        self.errors: list[queue.SimpleQueue[CommunicationError]] = [queue.SimpleQueue() for _ in self.ranks]
        self.stops: dict[int, Any] = {}

    def watch(self, *ranks: int) -> None:
        for rank in ranks:
            self.stops[rank] = self.ranks[rank].watch(self.errors[rank].put)

    def error(self, rank: int) -> CommunicationError:
        return self.errors[rank].get(timeout=DEADLINE)

    def close(self) -> None:
        for stop in self.stops.values():
            stop()


@pytest.fixture
def watching() -> Iterator[Any]:
    made: list[Watching] = []

    def make(*args: Any) -> Watching:
        made.append(Watching(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for thread in threading.enumerate():
        if thread.name == "pipesgd-store":
            thread.join(DEADLINE)


def test_a_failure_elsewhere_reaches_every_rank_with_its_reason(watching: Any) -> None:
    job = watching(3, 30.0)
    job.watch(0, 1, 2)
    job.ranks[0].iteration = 7
    job.ranks[1].report("rank 1: the disk is full")
    assert str(job.error(0)) == "rank 0: stopped in start in iteration 7: rank 1 has failed: rank 1: the disk is full"
    error = job.error(2)
    assert (type(error), error.peer) == (PeerFailed, 1)
    assert job.errors[1].empty()


def test_a_rank_that_another_ones_failure_has_ended_is_not_taken_for_the_cause(watching: Any) -> None:
    job = watching(3, 30.0)
    job.ranks[0].report("")
    job.ranks[1].report("rank 1: the disk is full")
    job.watch(2)
    assert job.error(2).peer == 1


def test_a_rank_that_has_lost_a_silent_one_is_not_taken_for_the_cause(watching: Any) -> None:
    """Its receive may end before the silence shows: it used to be named in place of the stopped rank."""
    job = watching(3, 30.0)
    job.watch(0, 1)
    job.ranks[0].report("rank 0: receive with rank 2 failed", 2)
    error = job.error(1)
    assert (type(error), error.peer) == (DeadlineExceeded, 2)
    assert "no heartbeat from rank 2 for" in str(error)


def test_a_rank_that_others_have_lost_is_heard_first(watching: Any) -> None:
    """A rank may close its connections before it has said why it fails."""
    job = watching(3, 30.0)
    job.watch(0, 1, 2)
    job.ranks[0].report("rank 0: receive with rank 2 failed", 2)
    job.ranks[2].report("rank 2: the disk is full")
    assert (error := job.error(1)).peer == 2
    assert "the disk is full" in str(error)


def test_a_rank_that_others_have_lost_and_that_is_well_is_not_named(watching: Any) -> None:
    job = watching(3, 30.0)
    job.watch(0, 1, 2)
    job.ranks[0].report("rank 0: receive with rank 2 failed", 2)
    assert [job.error(rank).peer for rank in (1, 2)] == [0, 0]


def test_an_exchange_waits_until_it_is_known_which_rank_has_failed(
    watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.8)  # the failure is known earlier
    job = watching(3, 30.0)
    job.watch(0, 1)
    job.ranks[0].report("rank 0: receive with rank 2 failed", 2)
    with pytest.raises(DeadlineExceeded, match="no heartbeat from rank 2 for"):
        job.ranks[1].all_gather_object("a value", None)


def test_a_rank_without_heartbeats_is_named_by_all_the_others(watching: Any) -> None:
    job = watching(3)
    job.watch(0, 1)
    for rank in (0, 1):
        error = job.error(rank)
        assert (type(error), error.peer) == (DeadlineExceeded, 2)
        assert "no heartbeat from rank 2 for" in str(error)
        assert set(job.ranks[rank].silent()) == {2}


def test_rank_0_without_heartbeats_is_named_too(watching: Any) -> None:
    job = watching(3)
    job.watch(1, 2)
    assert [job.error(rank).peer for rank in (1, 2)] == [0, 0]


def test_a_rank_that_has_left_is_not_missed(watching: Any) -> None:
    job = watching(2)
    job.watch(0, 1)
    job.stops.pop(1)()
    last = Beat.decode(job.store.get("beat/1"))
    assert last is not None
    assert last.phase == LEFT
    with pytest.raises(queue.Empty):
        job.errors[0].get(timeout=1.5)


def test_an_exchange_that_may_take_long_ends_when_the_watcher_finds_a_rank_lost(watching: Any) -> None:
    job = watching(2)
    job.watch(0)
    with pytest.raises(DeadlineExceeded, match="no heartbeat from rank 1 for") as caught:
        job.ranks[0].all_gather_object("a compiled codec", None, within=DEADLINE)
    assert caught.value.peer == 1


def _lost_while_it_compiles(ranks: Ranks) -> str:
    """Start ranks of which rank 1 gives no heartbeat, and takes longer to make its codec than rank 0 waits for it."""

    def compiles_for_long(codec: object, device: object) -> None:
        ranks.store.wait(["rank 0 has given up"])
        raise CommunicationError(rank=1, peer=0, operation="compilation", reason="rank 0 has given up")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat, "SHORTEST_SILENCE", 1.0)
        patch.setattr(heartbeat, "SILENT_SECONDS", 0.5)
        if ranks.rank == 1:
            patch.setattr(ranks, "watch", lambda on_failure: lambda: None)
            patch.setattr(make, "compile_loops", compiles_for_long)
        model = torch.nn.Linear(1, 1)
        try:
            Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, wire=Wire(timeout=1.0))
        except CommunicationError as error:
            ranks.store.set("rank 0 has given up", "")
            return str(error)
    return ""


def test_a_rank_that_is_lost_while_it_compiles_is_not_waited_for_as_one_that_compiles() -> None:
    """Rank 0 used to wait for 900 s, since it began to watch only afterwards."""
    assert "no heartbeat from rank 1 for" in run_ranks(2, _lost_while_it_compiles, timeout=2.0)[0]


def test_a_rank_that_left_and_watches_again_is_missed_again(watching: Any) -> None:
    """The second run's heartbeats used to say that the rank had left."""
    job = watching(2, 30.0)
    job.watch(0)
    job.stops.pop(0)()
    assert job.ranks[0].standing.beat(0.0).phase == LEFT
    job.watch(0)
    assert job.ranks[0].standing.beat(0.0).phase == "start"


def test_heartbeats_of_a_loop_of_ones_own_say_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats used to say "compilation of the codec" for the whole training."""
    seen = []
    model = torch.nn.Linear(1, 1)
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=1) as pipeline:
        ranks, apply = pipeline.pipeline.flight.ranks, pipeline.pipeline.apply_oldest
        monkeypatch.setattr(
            pipeline.pipeline, "apply_oldest", lambda: (seen.append(ranks.standing.beat(0.0)), apply())[1]
        )
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
            pipeline.step()
        seen.append(ranks.standing.beat(0.0))
    assert [(beat.iteration, beat.phase, beat.waiting) for beat in seen] == [
        (0, "all-reduce", True),
        (1, "all-reduce", True),
        (1, "compute", False),
    ]


def test_a_rank_that_hears_nobody_accuses_nobody(watching: Any) -> None:
    job = watching(3)
    job.watch(0)
    error = job.error(0)
    assert error.peer is None
    assert "no heartbeat from any other rank for" in str(error)


def told_to_stop(job: Watching, rank: int) -> None:
    for ranks in job.ranks:
        ranks.standing.farewell.open(members=len(job.ranks), start=0, seconds=20.0)
    job.ranks[rank].standing.farewell.requested = "SIGTERM"


def test_a_rank_that_is_silent_when_the_farewell_begins_is_waited_for(
    watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat may be on its way: a rank that was stopped or cut off for seconds used to cost the checkpoint."""
    monkeypatch.setattr(watcher, "FAREWELL_SILENCE", 10.0)
    job = watching(2, 30.0)
    job.watch(0)
    wait_until(lambda: set(job.ranks[0].silent()) == {1})
    told_to_stop(job, 0)
    wait_until(lambda: job.store.check(["place/0"]))
    with pytest.raises(queue.Empty):
        job.errors[0].get(timeout=0.3)
    job.watch(1)
    wait_until(lambda: all(ranks.standing.farewell._stop == 0 for ranks in job.ranks))
    assert job.errors[0].empty()


def test_a_rank_that_stays_silent_ends_the_farewell(watching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "FAREWELL_SILENCE", 0.6)
    job = watching(2, 30.0)
    told_to_stop(job, 0)
    job.watch(0)
    error = job.error(0)
    assert isinstance(error, StoppedBySignal)
    assert "without a farewell checkpoint, since no heartbeat from rank 1 for" in str(error)


def test_a_rank_that_becomes_silent_late_in_a_farewell_is_waited_for_as_long(
    watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the fifth second on, a link that was cut for three seconds used to cost the checkpoint."""
    job = watching(2, 30.0)
    job.watch(0)
    one = job.ranks[0]._watcher
    one.close()  # the test makes its decisions by a clock of its own
    told_to_stop(job, 0)
    monkeypatch.setattr(one, "_stopping", ("SIGTERM", 100.0))
    monkeypatch.setattr(one, "_liveness", heartbeat.Liveness(0, 2, 112.0))
    assert set(one._liveness.silent(115.0)) == {1}
    assert one._late_farewell(115.0) is None
    assert one._late_farewell(117.2) is None
    assert "no heartbeat from rank 1 for 5 s" in str(one._late_farewell(117.4))


def test_a_sigterm_after_a_failure_begins_no_farewell(watching: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun ends the other ranks by it while they explain why they fail."""
    job = watching(2, 30.0)
    job.ranks[0].report("rank 0: the connection is lost", 1)
    told_to_stop(job, 0)
    job.watch(0)
    wait_until(lambda: job.store.check(["beat/0"]) and Beat.decode(job.store.get("beat/0")).count >= 3)
    assert not job.store.check([watcher.STOPPING])
    assert "all ranks write a checkpoint and stop" not in capsys.readouterr().err


def test_a_place_in_the_store_that_is_none_is_as_if_it_were_not_there(watching: Any) -> None:
    job = watching(2, 30.0)
    told_to_stop(job, 0)
    job.store.set("place/1", "no number")
    job.watch(0)
    wait_until(lambda: job.store.check(["place/0"]))
    with pytest.raises(queue.Empty):
        job.errors[0].get(timeout=0.2)


def test_a_defect_in_the_watcher_is_an_error_and_the_heartbeat_continues(
    watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Farewell, "hold", fail)
    job = watching(2, 30.0)
    told_to_stop(job, 0)
    job.watch(0)
    error = job.error(0)
    assert (type(error), error.peer) == (CommunicationError, None)
    assert "heartbeat through the store failed: ValueError" in str(error)
    first = Beat.decode(job.store.get("beat/0"))
    assert first is not None
    wait_until(lambda: (beat := Beat.decode(job.store.get("beat/0"))) is not None and beat.count > first.count)


class Hanging(dist.Store):
    """A store whose process has been stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def clone(self) -> Hanging:
        return self

    def set(self, key: str, value: str) -> None:
        self.released.wait()


def test_a_store_that_hangs_is_an_error_at_the_deadline_and_the_end_does_not_wait_for_it() -> None:
    store = Hanging()
    ranks = Ranks(rank=1, world_size=2, store=store, standing=Standing(0.3))
    errors: queue.SimpleQueue[CommunicationError] = queue.SimpleQueue()
    stop = ranks.watch(errors.put)
    error = errors.get(timeout=DEADLINE)
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == (
        "rank 1: heartbeat through the store failed: the store that the ranks share has not answered within 0.3 s"
    )
    assert ranks.silent() == {}, "nobody was asked: the store was"
    with pytest.raises(RuntimeError, match="has not answered"):
        ranks.report_and_wait("x")
    stop()
    store.released.set()
    for thread in threading.enumerate():
        if thread.name == "pipesgd-store":
            thread.join(DEADLINE)


class SlowForReports(dist.Store):
    """A store that does not answer to a report until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self._store = dist.HashStore()

    def clone(self) -> SlowForReports:
        return self

    def set(self, key: str, value: str) -> None:
        if key.startswith("failure/"):
            self.released.wait()
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get(keys)


def test_a_report_that_takes_too_long_does_not_end_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher used to end the process because of it, before the main thread could say why it failed."""
    monkeypatch.setattr("pipesgd.ranks.REPORT_GRACE_SECONDS", 0.2)
    store = SlowForReports()
    ranks = Ranks(rank=1, world_size=2, store=store, standing=Standing(30.0))
    errors: queue.SimpleQueue[CommunicationError] = queue.SimpleQueue()
    stop = ranks.watch(errors.put)
    with pytest.raises(RuntimeError, match="has not answered"):
        ranks.report("rank 1: the disk is full")

    def beats() -> int:
        beat = Beat.decode(store.multi_get(["beat/1"])[0])
        assert beat is not None
        return beat.count

    before = beats()
    wait_until(lambda: beats() >= before + 3)
    assert errors.empty()
    store.released.set()
    stop()
    for thread in threading.enumerate():
        if thread.name == "pipesgd-store":
            thread.join(DEADLINE)


def test_a_process_that_is_started_again_says_that_its_predecessor_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others notice it only after ``--timeout``: its successor used to wait for them in vain before that."""
    store = dist.HashStore()
    sessions: dict[str, dist.Store] = {}

    def meet(rank: int, attempt: str) -> threading.Thread:
        def run() -> None:
            sessions[f"{attempt} {rank}"] = open_session(store, rank, 2, DEADLINE)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    for thread in [meet(0, "first"), meet(1, "first")]:
        thread.join()
    monkeypatch.setattr(session, "_PROCESS", "another process")
    successor = meet(1, "second")
    healthy = Ranks(rank=0, world_size=2, store=sessions["first 0"], standing=Standing(30.0))
    errors: queue.SimpleQueue[CommunicationError] = queue.SimpleQueue()
    stop = healthy.watch(errors.put)
    error = errors.get(timeout=DEADLINE)
    stop()
    assert str(error) == (
        "rank 0: stopped in start: rank 1 has failed: rank 1: its process has ended without a word, and another one "
        "has been started"
    )
    meet(0, "second").join()
    successor.join()
    assert len(sessions) == 4
    assert not sessions["second 0"].check([watcher.FAILURE]), "the new session begins without a failure"


def test_a_process_that_had_not_joined_is_replaced_without_a_word() -> None:
    """Rank 0 may be waiting in that very session, which the successor then joins."""
    store = dist.HashStore()
    store.set("name of rank 1", "dead")
    store.set("answer to dead", "a session")
    meeting = threading.Thread(target=open_session, args=(store, 0, 2, DEADLINE))
    meeting.start()
    open_session(store, 1, 2, DEADLINE)
    meeting.join()
    assert not store.check([f"a session/{watcher.FAILURE}"])


class Overtaken(dist.HashStore):
    """A store in which rank 1 is at its second session before rank 0 hears that it was not yet in the first."""

    overtaken = False

    def check(self, keys: list[str]) -> bool:
        found = super().check(keys)
        if keys[0].endswith("/joined by 1") and super().check(["name of rank 1"]) and not self.overtaken:
            self.overtaken = True
            name = self.get("name of rank 1")
            self.set(f"answer to {name.decode()}", keys[0].removesuffix("/joined by 1"))
            wait_until(lambda: self.get("name of rank 1") != name)
        return found


def test_a_rank_that_has_joined_is_not_answered_again_when_it_is_at_its_next_session() -> None:
    store = Overtaken()
    sessions: list[list[dist.Store]] = [[], []]

    def meet_twice(rank: int) -> None:
        for _ in range(2):
            sessions[rank].append(open_session(store, rank, 2, DEADLINE))

    in_threads(2, meet_twice, 2 * DEADLINE)
    for attempt in range(2):
        sessions[0][attempt].set("attempt", f"{attempt}")
    assert [session.get("attempt") for session in sessions[1]] == [b"0", b"1"]


def test_a_wait_for_a_rank_that_gets_on_is_longer_than_the_timeout_and_one_for_a_rank_that_does_not_is_not(
    watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipesgd.ranks.LOOK_SECONDS", 0.05)
    job = watching(2, 2.0)
    job.watch(0, 1)
    done = threading.Event()

    def work() -> None:
        for iteration in range(16):  # twice the timeout in total
            job.ranks[1].iteration = iteration
            done.wait(0.25)
        job.ranks[1].all_gather_object("a value", 1)

    other = threading.Thread(target=work)
    other.start()
    assert job.ranks[0].all_gather_object("a value", 0) == [0, 1]
    other.join()
    job.ranks[1].iteration = 50
    job.ranks[1].enter("last all-reduce", waiting=True)
    with pytest.raises(DeadlineExceeded, match=r"no message within 2 s from rank 1; rank 1 is alive: last all-"):
        job.ranks[0].all_gather_object("another value", 0)


def test_a_slow_checkpoint_may_take_longer_than_the_timeout_and_a_rank_that_hangs_there_may_not_take_for_ever(
    watching: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipesgd.ranks.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("pipesgd.ranks.LONGEST_PHASE", 4.0)
    job = watching(2)
    job.watch(0, 1)

    def work() -> None:
        job.ranks[1].enter("checkpoint")
        threading.Event().wait(1.0)  # twice the timeout
        job.ranks[1].all_gather_object("a written checkpoint", 1)

    other = threading.Thread(target=work)
    other.start()
    assert job.ranks[0].all_gather_object("a written checkpoint", 0) == [0, 1]
    other.join()
    with pytest.raises(DeadlineExceeded, match=r"rank 1 is alive: checkpoint for "):
        job.ranks[0].all_gather_object("another value", 0)


def _one_fails_in_its_own_loop(ranks: Ranks) -> Any:
    model = torch.nn.Linear(2, 1)
    answer = None
    with (
        contextlib.suppress(OSError),  # includes CommunicationError
        warnings.catch_warnings(action="ignore"),  # the gradient in flight is dropped
        Pipelined(
            model, torch.optim.SGD(model.parameters(), lr=0.1), width=1, ranks=ranks, wire=Wire(timeout=60.0)
        ) as pipeline,
    ):
        if ranks.rank == 1:
            ranks.report("rank 1: the disk is full")
            ranks.store.wait(["rank 0 is done"])
            raise OSError("the disk is full")
        model(torch.ones(1, 2)).sum().backward()
        try:
            pipeline.step()  # rank 1 never comes, but is alive
        except CommunicationError as error:
            answer = type(error), str(error)
            ranks.store.set("rank 0 is done", "")
            raise
    return answer


def test_a_failure_elsewhere_ends_the_wait_of_a_loop_of_ones_own() -> None:
    kind, text = run_ranks(2, _one_fails_in_its_own_loop, deadline=40.0, fresh=True)[0]
    assert kind is PeerFailed
    assert "rank 1 has failed: rank 1: the disk is full" in text


def _stopped_together(ranks: Ranks) -> str:
    """Stop both ranks for 3 s, with a timeout of 2 s, while rank 0 waits for rank 1, which is busy for about a second.

    Returns the error.
    """
    model = torch.nn.Linear(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradients in flight are dropped
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with Pipelined(model, optimizer, width=1, ranks=ranks, wire=Wire(timeout=2.0)) as pipeline:
                pids = " ".join(map(str, ranks.all_gather_object("processes", os.getpid())))
                if ranks.rank == 1:
                    stop = f"sleep 0.5; kill -STOP {pids}; sleep 3; kill -CONT {pids}"
                    with subprocess.Popen(["sh", "-c", stop]):
                        time.sleep(4.0)  # three seconds of which it is stopped
                model(torch.ones(1, 2)).sum().backward()
                pipeline.step()
        except CommunicationError as error:
            return str(error)
    return "none"


def test_deadlines_of_messages_count_the_time_in_which_all_ranks_were_stopped() -> None:
    waited, _ = run_ranks(2, _stopped_together, timeout=2.0)
    assert waited.startswith("rank 0: receive of the header with rank 1"), waited
    assert waited.endswith("no answer within 2 s"), waited


def test_a_line_is_one_write_and_cannot_steer_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Screen())
    process.say("error: rank 1: \x1b[31mred\r\x07 über\nnext")
    assert writes == ["error: rank 1: \\x1b[31mred\\r\\x07 über next\n"]
