"""The communication thread, and the errors after the loss of a peer."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from torch import nn

from pipesgd import Pipelined
from pipesgd.comm.thread import CommunicationThread
from pipesgd.errors import CommunicationError, DeadlineExceeded, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.sections import Wire

pytestmark = pytest.mark.slow


def test_jobs_run_in_order_in_one_other_thread() -> None:
    thread = CommunicationThread(torch.device("cpu"))
    futures = [thread.submit(lambda i=i: (i, threading.get_ident())) for i in range(100)]
    results = [future.result(10) for future in futures]
    thread.close()
    assert [i for i, _ in results] == list(range(100))
    assert len({ident for _, ident in results} - {threading.get_ident()}) == 1


def test_after_a_failure_nothing_more_is_run_and_everybody_gets_it() -> None:
    """An operation in flight that has failed must never be reported as a success."""
    thread = CommunicationThread(torch.device("cpu"))
    ran: list[int] = []

    def fail() -> None:
        raise OSError("the network is down")

    futures = [thread.submit(lambda: ran.append(0)), thread.submit(fail), thread.submit(lambda: ran.append(2))]
    thread.close()
    assert futures[0].result(10) is None
    for future in futures[1:]:
        with pytest.raises(OSError, match="the network is down"):
            future.result(10)
    assert ran == [0]


def test_a_gpu_without_room_for_a_stream_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(CommunicationThread, "_in_order", lambda thread, job: job)
    thread = CommunicationThread(torch.device("cuda"))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        thread.submit(lambda: None).result(5)
    thread.close()


def test_a_closed_thread_refuses_jobs_at_once() -> None:
    """A caller would wait forever for a job that nobody runs."""
    thread = CommunicationThread(torch.device("cpu"))
    thread.close()
    thread.close()
    for use in (thread.check, lambda: thread.submit(lambda: None)):
        with pytest.raises(UserInputError, match=r"must not be used after close\(\)"):
            use()


def test_fail_ends_every_wait_at_once_although_a_job_still_runs() -> None:
    thread = CommunicationThread(torch.device("cpu"))
    begun, may_end = threading.Event(), threading.Event()
    ran: list[str] = []

    def hang() -> None:
        begun.set()
        assert may_end.wait(10)

    done = thread.submit(lambda: "done")
    futures = [thread.submit(hang), thread.submit(lambda: ran.append("queued"))]
    assert begun.wait(10)
    thread.fail(OSError("rank 1 has failed"))
    thread.fail(OSError("a later failure"))
    futures.append(thread.submit(lambda: ran.append("late")))
    for future in futures:
        with pytest.raises(OSError, match="rank 1 has failed"):
            future.result(0)
    with pytest.raises(OSError, match="rank 1 has failed"):
        thread.check()
    assert done.result(0) == "done", "what had arrived stays"
    may_end.set()
    thread.close()
    assert ran == []


def _told_of_a_failure_while_it_waits(ranks: Ranks) -> str | None:
    model = nn.Linear(10, 10)
    pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=1, ranks=ranks)
    said = None
    if ranks.rank == 0:  # the other one never steps
        model(torch.ones(1, 10)).sum().backward()
        teller = threading.Timer(0.1, pipeline.fail, [OSError("rank 1 has reported a failure")])
        teller.start()
        try:
            pipeline.step()
        except OSError as error:
            said = str(error)
        teller.join()
    ranks.all_gather_object("done", None)
    pipeline.fail(OSError("rank 0 has failed"))
    pipeline.close()
    return said


def test_a_pipeline_that_is_told_of_a_failure_waits_no_longer() -> None:
    assert run_ranks(2, _told_of_a_failure_while_it_waits) == ["rank 1 has reported a failure", None]


def _step_until_failure(ranks: Ranks, all_reduce: str, leaves: bool) -> Any:
    """Step on all ranks; after two steps rank 2 leaves, or stays without taking part. Return what the others see."""
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = Pipelined(model, optimizer, width=2, ranks=ranks, wire=Wire(all_reduce=all_reduce, timeout=5.0))
    begin = time.monotonic()
    try:
        for iteration in range(6):
            if ranks.rank == 2 and iteration == 2:
                if not leaves:
                    ranks.all_gather_object("the others' failure", None)
                pipeline.pipeline.flight.wait_until_summed()  # else the others may still wait for iteration 1
                pipeline.fail(OSError("this rank has had enough"))
                pipeline.close()
                return None
            model(torch.ones(1, 10)).sum().backward()
            pipeline.step()
    except CommunicationError as error:
        seconds = time.monotonic() - begin
        pipeline.close()
        if not leaves:
            ranks.all_gather_object("the others' failure", None)
        return type(error), error.rank, error.peer, error.operation, error.iteration, seconds, str(error)
    return "no failure"


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
def test_a_rank_that_leaves_is_noticed_by_all_others_at_once(all_reduce: str) -> None:
    results = run_ranks(4, _step_until_failure, all_reduce, True)
    for rank in (0, 1, 3):
        kind, own_rank, _, operation, iteration, seconds, text = results[rank]
        assert issubclass(kind, CommunicationError)
        assert own_rank == rank
        assert iteration == 2
        assert "header" in operation or ("native all-reduce" if all_reduce == "native" else "of chunk") in operation
        assert seconds < 15.0
        assert text.startswith(f"rank {rank}: {operation}")
    assert results[3][2] == 2, "its right neighbour names it"
    assert "with rank 2 in iteration 2" in results[3][6]


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
def test_a_rank_that_hangs_is_noticed_within_the_deadline(all_reduce: str) -> None:
    results = run_ranks(4, _step_until_failure, all_reduce, False)
    for rank in (0, 1, 3):
        kind, _, _, _, iteration, seconds, _ = results[rank]
        assert issubclass(kind, CommunicationError)
        assert iteration == 2
        assert 4.5 <= seconds < 15.0
    kind, _, peer, _, _, _, text = results[3]
    assert kind is DeadlineExceeded
    assert peer == 2
    assert text.endswith("with rank 2 in iteration 2 failed: no answer within 5 s")
