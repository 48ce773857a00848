"""One table of what every transport must do: sums, messages, errors that name the right rank, new connections."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from _all_reduces import options
from _links import OWN_TRANSPORTS, ranks_of_threads, run, secured
from _memory_transport import integers
from _ranks import RankFailed, run_ranks
from _sections import sections
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesgd import Pipelined
from pipesgd.codecs.options import DENSE_CODECS
from pipesgd.comm.connections import Connections
from pipesgd.ddp import attach, compress
from pipesgd.errors import CommunicationError, DeadlineExceeded, OutOfStepError, PeerFailed, RunError
from pipesgd.membership.secret import VARIABLE
from pipesgd.ranks import Ranks
from pipesgd.sections import TRANSPORTS, Wire
from timing_model.schedules import SCHEDULES

pytestmark = pytest.mark.slow

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)
own_transports = pytest.mark.parametrize("transport", OWN_TRANSPORTS)


def connected(ranks: Ranks, transport: str, all_reduce: str = "ring", **others: Any) -> Connections:
    return Connections(all_reduce, secured(ranks, transport), timeout=ranks.timeout, transport=transport, **others)


# ---- Sums


def _sums(ranks: Ranks, transport: str, all_reduce: str) -> list[Tensor]:
    """Return the sums with every codec, and check the bytes that are counted."""
    connections = connected(ranks, transport, all_reduce, segment_bytes=512)
    found = []
    for number, codec in enumerate(DENSE_CODECS):
        for numel in (0, 1, 7, 1000):
            reduce = connections.all_reduce(options(codec).make())
            flat = integers(numel, ranks.rank)
            before = connections.transport.bytes_sent
            connections.run("step", number, lambda reduce=reduce, flat=flat: reduce(flat, None, 7))  # type: ignore[misc]
            assert connections.transport.bytes_sent - before == reduce.wire_bytes(flat)
            found.append(flat)
    connections.wait_for_all()
    connections.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("all_reduce", sorted(SCHEDULES))
def test_sums_are_the_same_bits_over_every_transport_and_on_every_rank(all_reduce: str, world_size: int) -> None:
    expected = None
    for transport in TRANSPORTS:
        for found in run(ranks_of_threads(world_size), _sums, transport, all_reduce):
            assert not isinstance(found, Exception), (transport, found)
            expected = expected or found
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), transport
    assert expected is not None
    assert torch.equal(expected[3], sum(integers(1000, rank) for rank in range(world_size)))  # fp32


def _both_ways(ranks: Ranks, transport: str, numel: int) -> bool:
    """Send to and receive from every other rank; the sends are waited for first."""
    connections = connected(ranks, transport)
    others = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    wire = connections.transport
    come = {rank: torch.empty(numel) for rank in others}
    receives = [wire.receive(come[rank], rank, "a message") for rank in others]
    sends = [wire.send(torch.full((numel,), ranks.rank + 1.0), rank, "a message") for rank in others]
    for one in (*sends, *receives):
        one.wait()
    connections.wait_for_all()
    connections.close()
    return all(bool((come[rank] == rank + 1.0).all()) for rank in others)


@every_transport
def test_messages_larger_than_every_buffer_cross(transport: str) -> None:
    assert run(ranks_of_threads(3), _both_ways, transport, 4 << 20) == [True] * 3


# ---- Errors


def _uneven(ranks: Ranks, transport: str, then: str) -> Any:
    """Give the last rank one batch more than the other, which then continues with another call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    secured(ranks, transport)
    pipeline = Pipelined(model, optimizer, width=1, ranks=ranks, **sections(transport=transport, timeout=3.0))
    try:
        for _ in range(3 + ranks.rank):
            model(torch.ones(5, 4)).square().mean().backward()
            pipeline.step()
        getattr(pipeline, then)()
    except RunError as error:
        return type(error), str(error)
    finally:
        pipeline.close()
        ranks.all_gather_object("the other", None)  # so that no rank fails because the other one is gone
    return None


@every_transport
@pytest.mark.parametrize("then", ["flush", "combine_buffers", "close"])
def test_ranks_out_of_step_add_nothing_up_and_are_both_named(then: str, transport: str) -> None:
    _, error = run_ranks(2, _uneven, transport, then)
    assert error[0] is OutOfStepError
    assert error[1].startswith(f"rank 1 is at step in iteration 3, but rank 0 is at {then} in iteration 3: ")


def _one_is_silent(ranks: Ranks, transport: str, silent: int) -> Any:
    connections = connected(ranks, transport)
    reduce, flat = connections.all_reduce(), torch.ones(1000)
    try:
        if ranks.rank != silent:
            connections.run("step", 7, lambda: reduce(flat))
    except CommunicationError as error:
        return error
    finally:
        ranks.all_gather_object("the others", None, within=20.0)
        connections.close()
    return None


@every_transport
def test_a_silent_rank_is_named_at_the_deadline(transport: str) -> None:
    answers = run(ranks_of_threads(3, timeout=1.0), _one_is_silent, transport, 1)
    assert answers[1] is None
    assert all(isinstance(answers[rank], CommunicationError) for rank in (0, 2))
    assert isinstance(answers[2], DeadlineExceeded), "its right neighbour"
    assert str(answers[2]).endswith("with rank 1 in iteration 7 failed: no answer within 1 s")


def _one_dies(ranks: Ranks, transport: str, child_lives: bool, folder: Path) -> None:
    connections = connected(ranks, transport)
    reduce, flat = connections.all_reduce(), torch.ones(1 << 20)
    try:
        for iteration in range(1000):
            if ranks.rank == 1 and iteration == 3:
                if child_lives and os.fork() == 0:
                    signal.alarm(15)
                    signal.pause()  # as a process that loads data does, which has copies of all files
                os.kill(os.getpid(), signal.SIGKILL)
            connections.run("step", iteration, lambda: reduce(flat))
    except CommunicationError as error:
        connections.close()
        (folder / str(ranks.rank)).write_text(f"{error.peer} {error}")


@own_transports
@pytest.mark.parametrize("child_lives", [False, True])
def test_a_rank_that_is_killed_ends_the_waits_of_the_others_although_a_child_lives(
    child_lives: bool, transport: str, tmp_path: Path
) -> None:
    """The deadline is far beyond that of the test. Who closes its connections then is not taken for the dead."""
    with pytest.raises(RankFailed, match="rank 1 died: without an answer"):
        run_ranks(3, _one_dies, transport, child_lives, tmp_path, fresh=True, timeout=1000.0, deadline=12.0)
    said = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert said.keys() == {"0", "2"}
    assert all(text.startswith("1 rank ") for text in said.values()), said


def _one_leaves(ranks: Ranks, transport: str) -> Any:
    connections = connected(ranks, transport)
    reduce, flat = connections.all_reduce(), torch.ones(1000)
    try:
        for iteration in range(5):
            if ranks.rank == 2 and iteration == 3:
                return None
            connections.run("step", iteration, lambda: reduce(flat))
    except CommunicationError as error:
        return error
    finally:
        connections.close()
    return "no error"


@every_transport
def test_a_rank_that_leaves_in_order_is_named_by_its_neighbour_and_a_survivor_is_not(transport: str) -> None:
    answers = run(ranks_of_threads(4, timeout=10.0), _one_leaves, transport)
    assert answers[2] is None
    assert all(isinstance(answers[rank], CommunicationError) for rank in (0, 1, 3))
    assert answers[3].peer == 2
    if transport != "gloo":
        assert {answers[rank].peer for rank in (0, 1, 3)} == {2}, "each survivor says whom it has lost"
        assert "it has closed its connections" in str(answers[3])


# ---- New connections


def _regroup(ranks: Ranks, transport: str) -> list[bytes]:
    torch.manual_seed(0)
    model = nn.Linear(7, 3)
    secured(ranks, transport)
    wire = sections(transport=transport, codec="int8", prediction="none")
    found = []
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, **wire) as pipeline:
        for iteration in range(6):
            model(torch.full((2, 7), ranks.rank + iteration / 4)).square().mean().backward()
            pipeline.step()
            if iteration == 3:
                pipeline.pipeline.flight.regroup(ranks, iteration + 1)
        pipeline.flush()
        found.append(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
    return found


def test_a_training_that_regroups_ends_in_the_same_bits_over_every_transport() -> None:
    found = {transport: run_ranks(2, _regroup, transport) for transport in TRANSPORTS}
    assert len({str(one) for of_ranks in found.values() for one in of_ranks}) == 1


def _failed_elsewhere(ranks: Ranks, transport: str) -> Any:
    """Wait for rank 2, which does not come, until another thread hears that rank 1 has failed."""
    connections = connected(ranks, transport)
    reduce, flat = connections.all_reduce(), torch.ones(10)
    answer = None
    if ranks.rank == 0:
        error = PeerFailed(rank=0, peer=1, operation="step", reason="the disk is full")
        teller = threading.Timer(0.2, connections.abort, [error])
        teller.start()
        try:
            connections.run("step", 0, lambda: reduce(flat))
        except CommunicationError as found:
            answer = found
        teller.join()
    ranks.all_gather_object("done", None)
    connections.close()
    return answer


@own_transports
def test_a_wait_ends_when_another_thread_hears_of_a_failure(transport: str) -> None:
    answer, *_ = run(ranks_of_threads(3, timeout=1000.0), _failed_elsewhere, transport)
    assert isinstance(answer, PeerFailed)
    assert str(answer) == "rank 0: stopped in receive of the header in iteration 0: rank 1 has failed: the disk is full"


# ---- Doors


def _through_a_door(ranks: Ranks, transport: str, door: str) -> bytes:
    """Return the weights of a DistributedDataParallel program after some steps."""
    os.environ[VARIABLE] = str(secured(ranks, "tls").secret.path)  # type: ignore[union-attr]
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = Wire(transport=transport, timeout=20.0)
    if door == "attach":
        closing: Any = attach(model, optimizer, codec="int8", wire=wire)
    else:
        closing = compress(model, codec="int8", wire=wire)
    for iteration in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 40), ranks.rank + iteration / 4)).square().mean().backward()
        optimizer.step()
    closing.close()
    return b"".join(one.detach().numpy().tobytes() for one in model.parameters())


@pytest.mark.parametrize("door", ["attach", "compress"])
def test_the_doors_of_ddp_programs_take_every_transport(door: str) -> None:
    found = {transport: run_ranks(2, _through_a_door, transport, door) for transport in TRANSPORTS}
    assert len({one for of_ranks in found.values() for one in of_ranks}) == 1
