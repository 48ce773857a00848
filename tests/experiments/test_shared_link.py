"""The other program on a shared link, and the loops that train next to it."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from _ranks import run_ranks
from torch import nn
from torch.nn.utils import parameters_to_vector

from experiments import bench_accelerators, shared_link, testbed
from experiments.other_traffic import Arrived, connect, make_count, receive, send
from pipesgd.ranks import Ranks


def test_the_receiver_counts_what_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "count"
    make_count(path)
    arrived = Arrived(path)
    assert int(arrived) == 0
    rate = arrived.rate()
    server = socket.create_server(("", 0))  # a port that was freed for the receiver could be another program's by then
    port = server.getsockname()[1]
    monkeypatch.setattr(socket, "create_server", {("", port): server}.__getitem__)
    receiver = threading.Thread(target=receive, args=(port, path), daemon=True)
    receiver.start()
    with connect("127.0.0.1", port) as connection:
        connection.sendall(bytes(1_000_000))
    receiver.join(20)
    assert int(arrived) == 1_000_000
    assert rate() > 0


def test_the_sender_ends_with_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=send, args=server.getsockname(), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == bytes(100)
    sender.join(20)
    assert not sender.is_alive()


@pytest.mark.slow
def test_the_other_program_runs_between_two_nodes(tmp_path: Path) -> None:
    with testbed.Testbed(nodes=2, link=testbed.Link(rate=50e6)) as bed:
        shared_link.start_other(bed, tmp_path)
        arrived = Arrived(tmp_path / shared_link.COUNT_FILE)
        deadline = time.monotonic() + 20
        while int(arrived) == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert int(arrived) > 0


def _trained(ranks: Ranks) -> dict[str, list[float]]:
    """Return how far each loop moves the weights in an iteration."""
    bench_accelerators.ACCELERATOR = "1ms"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    before = parameters_to_vector(model.parameters())
    moved = {}
    for name, loop in shared_link.make_loops(model, ranks).items():
        loop.iterate(torch.zeros(4, 3), torch.tensor([0, 1, 1, 1]))
        loop.flush()
        loop.close()
        moved[name] = (parameters_to_vector(loop.model.parameters()) - before).tolist()
    return moved


@pytest.mark.slow
def test_every_loop_trains_and_half_of_the_pipelines_are_limited() -> None:
    first, second = run_ranks(2, _trained)
    exact = first[bench_accelerators.ALONE]
    assert any(exact)
    for name, moved in first.items():
        assert moved == second[name] == pytest.approx(exact, abs=2e-6), name
    limits = [options.get("rate_limit") for options in shared_link.PIPELINES.values()]
    assert limits == [None, shared_link.LIMIT] * 4


def test_limited_pipelines_must_leave_the_link_to_others_and_take_no_longer() -> None:
    names = [bench_accelerators.ALONE, bench_accelerators.DDP, *shared_link.PIPELINES]
    alone = {name: {"seconds": [1.0, 1.0, 1.0]} for name in names}
    rates = {name: [20.0, 20.0, 20.0] if name == bench_accelerators.ALONE else [15.0, 15.0, 15.0] for name in names}
    shared = {name: {"seconds": [1.02, 1.02, 1.02], "figures": {"other_rate": rates[name]}} for name in names}
    judged = shared_link.judge(alone, shared)
    assert len(judged) == 2 * len(shared_link.LIMITED) == 8
    assert {one["verdict"] for one in judged.values()} == {"met"}
    slow, greedy, *_ = shared_link.LIMITED
    shared[slow]["seconds"] = [1.1, 1.1, 1.1]
    rates[greedy][:] = [10.0, 10.0, 10.0]
    missed = [name for name, one in shared_link.judge(alone, shared).items() if one["verdict"] == "MISSED"]
    assert sorted(missed) == sorted(
        [f"{slow}, shared / {slow}, alone", f"other program next to {greedy} / other program next to no communication"]
    )
