"""Communication of ranks outside of training: exchange, agreement, deadlines, and the names of missing ranks."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import error_of, run_ranks
from conftest import REPOSITORY

from experiments.forked_ranks import rank_environment
from pipesgd.comm.own_all_reduce import ranks_per_node
from pipesgd.errors import CommunicationError, DeadlineExceeded, UserInputError
from pipesgd.membership import address
from pipesgd.membership.address import Address, own_address, unreachable
from pipesgd.ranks import Ranks, Standing, among, current, join

pytestmark = pytest.mark.slow

DEADLINE = 20.0


def _gather(ranks: Ranks) -> tuple[list[Any], int]:
    values = [ranks.all_gather_object("a value", [ranks.rank, i, math.nan]) for i in range(20)]
    return values, sum(
        ranks.store.check([f"exchange of {ranks.world_size}/{n}/a value/{ranks.rank}"]) for n in range(1, 21)
    )


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_everybody_gets_everybodys_value_and_old_ones_are_forgotten(world_size: int) -> None:
    for values, kept in run_ranks(world_size, _gather, process_group=False):
        assert [[rank, i] for i, row in enumerate(values) for rank, *_ in row] == [
            [rank, i] for i in range(20) for rank in range(world_size)
        ]
        assert kept <= 2


def _agree(ranks: Ranks, wrong: list[int]) -> tuple[str, bool] | int:
    def attempt() -> int:
        if ranks.rank in wrong:
            raise UserInputError("x must be 1; got 2")
        return ranks.rank

    try:
        return ranks.raise_together("x", attempt)
    except UserInputError as error:
        return str(error), error.known_to_all


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ([], [0, 1, 2]),
        ([2], [("rank 2: x must be 1; got 2", True)] * 3),
        ([0, 1, 2], [("x must be 1; got 2", True)] * 3),
    ],
)
def test_one_ranks_bad_input_is_everybodys(wrong: list[int], expected: list[Any]) -> None:
    assert run_ranks(3, _agree, wrong, process_group=False) == expected


def _one_stays_away(ranks: Ranks) -> Any:
    if ranks.rank == 1:
        return None
    begin = time.monotonic()
    try:
        ranks.all_gather_object("a value", 1)
    except DeadlineExceeded as error:
        return str(error), error.peer, time.monotonic() - begin


def test_a_missing_rank_is_named_when_the_deadline_has_passed() -> None:
    for rank, answer in enumerate(run_ranks(3, _one_stays_away, timeout=1.0, process_group=False)):
        if rank != 1:
            text, peer, seconds = answer
            assert peer == 1
            assert text == (f"rank {rank}: exchange of a value with rank 1 failed: no message within 1 s from rank 1")
            assert 1.0 <= seconds < 5.0


def _one_fails(ranks: Ranks) -> Any:
    if ranks.rank == 1:
        return ranks.report_and_wait("rank 1: the disk is full")
    try:
        ranks.all_gather_object("a value", 1)
    except CommunicationError as error:
        return str(error), error.peer, ranks.report_and_wait("rank 0: x")


def test_a_failure_elsewhere_ends_the_wait_with_its_reason() -> None:
    answer, report = run_ranks(2, _one_fails, timeout=30.0, process_group=False)
    text, peer, own = answer
    assert peer == 1
    assert "rank 1: the disk is full" in text
    assert own == [], "all ranks have spoken: nobody is missing"
    assert report == []


def _two_of_four_report(ranks: Ranks) -> list[int]:
    return ranks.report_and_wait(f"rank {ranks.rank}: x") if ranks.rank in (0, 3) else []


def test_who_does_not_report_is_named() -> None:
    reports = run_ranks(4, _two_of_four_report, process_group=False)
    assert reports[0] == reports[3] == [1, 2]


def _store_is_gone(ranks: Ranks) -> list[str]:
    """Let rank 0, which holds the store of a group of the user's own, end; return what rank 1 hears."""
    within = timedelta(seconds=2)
    holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks.rank == 0 else None
    port = ranks.all_gather_object("port", 0 if holder is None else holder.port)[0]
    store = holder or dist.TCPStore("127.0.0.1", port, timeout=within)
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.world_size)
    joined = current(DEADLINE)
    if ranks.rank == 0:
        return []
    with contextlib.suppress(dist.DistError):
        while True:
            store.check(["rank 0 is there"])
    return [
        error_of(current, DEADLINE),
        error_of(among, [1, 0], Standing(DEADLINE)),
        error_of(joined.watch, print),
    ]


def test_a_store_that_is_gone_is_an_error_that_names_the_rank() -> None:
    """torch's own error used to be raised, which names no rank and is none of pipesgd's."""
    *joins, watch = run_ranks(2, _store_is_gone, process_group=False, fresh=True)[1]
    assert [one.partition(" failed: ")[0] for one in joins] == [
        "CommunicationError: rank 1: connection to the other ranks"
    ] * 2
    assert watch.startswith("DeadlineExceeded: rank 1: connection to the store failed: "), "torch tries for two seconds"


def test_half_of_torchruns_variables_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserInputError, match="got RANK without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        join()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"RANK": "x"}, "RANK must be a whole number from 0 to 1 (WORLD_SIZE is 2); got 'x'"),
        ({"RANK": "5"}, "RANK must be a whole number from 0 to 1 (WORLD_SIZE is 2); got '5'"),
        ({"RANK": "-1"}, "RANK must be a whole number from 0 to 1 (WORLD_SIZE is 2); got '-1'"),
        ({"RANK": "\N{ARABIC-INDIC DIGIT ONE}"}, "RANK must be "),
        ({"RANK": "1.0"}, "RANK must be "),
        ({"RANK": "1_0", "WORLD_SIZE": "20"}, "RANK must be "),
        ({"RANK": "5", "WORLD_SIZE": "1"}, "RANK must be 0 (WORLD_SIZE is 1); got '5'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number from 1 to 2147483647; got '0'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE must be "),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be "),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT must be a whole number from 1 to 65535; got 'abc'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be "),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be "),
        ({"MASTER_ADDR": " "}, "MASTER_ADDR must be the name or the address of rank 0's machine; got ''"),
        ({"MASTER_ADDR": "no-such.invalid"}, "MASTER_ADDR must be a name or an address of rank 0's machine; got 'no-"),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR must be a name or an address of rank 0's machine; got 'a b'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a whole number from 0 to 2147483647; got 'x'"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK must be a whole number from 0 to 1 (LOCAL_WORLD_"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE must be "),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT must be "),
        ({"TORCHELASTIC_MAX_RESTARTS": "-1"}, "TORCHELASTIC_MAX_RESTARTS must be "),
    ],
)
def test_what_a_launchers_variable_cannot_be_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, odd: dict[str, str], message: str
) -> None:
    """These were tracebacks, or waits of two minutes."""
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in (usual | odd).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserInputError) as refused:
        join()
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def _joined_by_hand(ranks: Ranks, port: int) -> list[str]:
    names = {"RANK": ranks.rank, "WORLD_SIZE": ranks.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    found = join()
    answers: list[str] = found.all_gather_object("a value", f"from {found.rank}")
    if found.rank == 0:
        found.wait_until_all_have_spoken()  # the store ends with this process
    else:
        found.need_not_speak()
    return answers


def test_rank_0_holds_the_store_at_one_address_where_no_agent_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    everybody = [f"from {rank}" for rank in range(3)]
    assert run_ranks(3, _joined_by_hand, port, process_group=False) == [everybody] * 3


def test_without_torchrun_there_is_one_rank() -> None:
    ranks = join()
    assert (ranks.rank, ranks.world_size, ranks.by_torchrun) == (0, 1, False)
    assert ranks.all_gather_object("a value", "x") == ["x"]


def test_processes_are_counted_in_the_store_that_torchrun_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted process that is the first one there has got a new store."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 0, 1)]))
    assert [join().processes for _ in range(2)] == [1, 2]


def _first(ranks: Ranks) -> Any:
    first = ranks.first(2)
    assert first.first(2) is first
    everybody = ranks.all_gather_object(
        "a value", first.all_gather_object("a value", ranks.rank) if ranks.rank < 2 else None
    )
    if ranks.rank == 2:
        ranks.report("the third has failed")
        return None
    try:
        if ranks.rank == 0:
            first.all_gather_object("another value", 0)  # rank 1 does not come, as if its server had failed
    except CommunicationError as failure:
        return everybody, failure.peer, failure.reason
    return everybody


def test_some_of_the_ranks_exchange_among_themselves_and_hear_of_the_others_failures() -> None:
    everybody = [[0, 1], [0, 1], None]
    assert run_ranks(3, _first, process_group=False)[:2] == [(everybody, 2, "the third has failed"), everybody]


def test_the_address_is_that_of_the_interface_that_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address().shown == "127.0.0.1 (lo)"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(UserInputError, match=r"^GLOO_SOCKET_IFNAME must be .*lo.*; got 'eth77'"):
        own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    own = own_address()
    assert own.shown in ("127.0.0.1 (lo)", "::1")
    assert own.stays_near
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    assert own_address().shown == "127.0.0.1 (lo)"  # as gloo does
    assert "127." not in own_address().others
    monkeypatch.setattr("socket.gethostname", lambda: 64 * "a")
    assert own_address().shown == "127.0.0.1 (lo)", "no name of a host is as long"
    found = [(socket.AF_INET6, 1, 6, "", ("fe80::1", 0, 0, 2)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **others: found)
    monkeypatch.setattr("socket.socket.bind", lambda own, place: None)
    assert own_address().shown == "127.0.0.1 (lo)", "one that is valid on a single link tells nobody which link"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,")
    assert own_address().shown == "127.0.0.1 (lo)"


@pytest.mark.parametrize("given", [",,lo", ",", "lo,,lo"])
def test_gloo_takes_no_empty_name_of_an_interface(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    with pytest.raises(UserInputError, match=r"^GLOO_SOCKET_IFNAME must be names of interfaces, with commas between"):
        own_address()


ASK = """
import os
from pipesgd.membership.address import own_address
print(own_address())
for name in ("one", "two", "three"):
    os.environ["GLOO_SOCKET_IFNAME"] = name
    print(own_address().shown)
"""
INTERFACES = """
for name in one two three; do ip link add $name type veth peer name $name-peer; ip link set $name up; done
ip link set lo up
ip addr add fd00::1/64 dev one nodad; ip addr add fd00::2/64 dev two nodad; ip addr add 10.0.0.2/24 dev two
ip addr add fe80::3/64 dev three nodad
exec "$0" -c "$1"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a network of its own")
def test_an_interface_with_ipv6_addresses_alone_is_named_with_one_that_others_can_use() -> None:
    command = ["unshare", "-n", "bash", "-ec", INTERFACES, sys.executable, ASK]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60)
    if "Operation not permitted" in done.stderr:
        pytest.skip("needs a network namespace")
    own, *chosen = done.stdout.splitlines()
    assert "others='one (fd00::1), two (10.0.0.2)'" in own, done.stderr
    assert chosen == ["fd00::1 (one)", "10.0.0.2 (two)", "fe80::3 (three)"]


@pytest.mark.parametrize("loopback", ["127.0.1.1 (lo)", "::1", "fe80::3 (eth0)"])
def test_loopback_is_no_address_for_other_machines(loopback: str) -> None:
    nic = Address("10.0.0.2 (eth0)", "eth0 (10.0.0.2)", "machine a")
    lost = Address(loopback, "eth0 (10.0.0.3), wlan0 (10.1.0.3)", "machine b")
    assert unreachable([nic, lost]) == (
        f"rank 1 must have an address that other machines can reach; got {loopback}, which its machine's name or "
        "GLOO_SOCKET_IFNAME stands for: set the latter there to the interface of your network, one of eth0 (10.0.0.3), "
        "wlan0 (10.1.0.3)"
    )
    assert str(unreachable([nic, lost], [4, 7].__getitem__)).startswith("rank 7 must "), "of a group of ranks"
    assert unreachable([lost, lost]) is None, "on one machine it is one"
    assert unreachable([nic, Address("fd00::3", "", "machine b")]) is None
    assert str(unreachable([nic, Address(loopback, "", "b")])).endswith(" which has no address yet")
    assert unreachable([nic, nic, lost._replace(shown="10.0.0.3 (eth0)")]) is None
    unknown = Address("no address (eth0)", "", "machine c")
    assert unreachable([nic, unknown, unknown._replace(network="machine d")]) is None
    assert str(unreachable([nic, lost._replace(shown="10.0.0.2 (docker0)")])).startswith(
        "rank 1 must have another address than rank 0 on another machine; got 10.0.0.2 (docker0), which "
    )


def _as_if_on_a_machine_of_its_own(ranks: Ranks) -> str:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    address._network = lambda: str(ranks.rank)  # a process of its own, which ends with this
    address._address_of_own_name = lambda: f"127.0.1.{ranks.rank + 1}"
    try:
        ranks.start_process_group("cpu", 60.0)
    except UserInputError as error:
        return f"{error.known_to_all}: {error}"
    return ""


def test_all_ranks_hear_of_an_address_that_the_others_cannot_reach_before_they_try() -> None:
    errors = run_ranks(2, _as_if_on_a_machine_of_its_own, process_group=False)
    assert errors[0] == errors[1]
    assert errors[0].startswith("True: rank 0 must have an address that other machines can reach; got 127.0.1.1 (lo), ")


def _place_in_a_group_of_the_users_own(ranks: Ranks, per_node: int, started: int) -> tuple[int, int] | str:
    os.environ.update(RANK=str(ranks.rank), WORLD_SIZE=str(started))
    os.environ.update(LOCAL_RANK=str(ranks.rank % per_node), LOCAL_WORLD_SIZE=str(per_node))
    found = current(ranks.timeout)
    try:
        return found.local_rank, ranks_per_node(found)
    except UserInputError as error:
        return str(error)


def test_in_a_process_group_of_the_users_own_torchrun_still_says_who_is_on_a_node() -> None:
    assert run_ranks(4, _place_in_a_group_of_the_users_own, 2, 4) == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(("per_node", "started"), [(1, 4), (2, 8)])
def test_hierarchical_is_refused_where_every_node_has_one_rank(per_node: int, started: int) -> None:
    """The process group belongs to another job than torchrun's variables, which therefore say nothing about it."""
    for found in run_ranks(4, _place_in_a_group_of_the_users_own, per_node, started):
        assert found == (
            "all-reduce must not be hierarchical with one rank on each node, where it would be a ring; got 4 nodes of "
            "one rank (torchrun's LOCAL_WORLD_SIZE says how many ranks a node has)"
        )


def _device_of_the_group(ranks: Ranks, port: int, gpus: Sequence[int]) -> list[str]:
    os.environ.update(rank_environment(ranks.rank, 2, port, attempt=0))
    torch.cuda.device_count = lambda: gpus[ranks.rank]
    started: list[str] = []
    Ranks.start_process_group = lambda own, device, timeout: started.append(device)  # type: ignore[method-assign]
    current(ranks.timeout)
    return started


@pytest.mark.parametrize(
    ("gpus", "device"), [((2, 2), "cuda"), ((3, 2), "cuda"), ((1, 1), "cpu"), ((2, 1), "cpu"), ((0, 0), "cpu")]
)
def test_nccl_is_for_ranks_that_all_have_a_gpu_of_their_own(gpus: tuple[int, int], device: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent holds one
    assert run_ranks(2, _device_of_the_group, store.port, gpus, process_group=False) == [[device]] * 2
