"""Slow look-ups of names are reported with their cure."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from _waiting import wait_until

from pipesgd.errors import UserInputError
from pipesgd.membership import lookups
from pipesgd.membership.listening import listener_at
from pipesgd.membership.lookups import suspect_lookups, suspecting_lookups
from pipesgd.membership.store import BoundedStore, host_store

CURE = 'set "hosts: files" in /etc/nsswitch.conf, or start torchrun with RES_OPTIONS=attempts:0\n'


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make every look-up of a name take until the test's end; yield the addresses that were looked up."""
    end, addresses = threading.Event(), []

    def slow(place: tuple[str, int], flags: int) -> tuple[str, str]:
        addresses.append(place[0])
        end.wait(20.0)
        return place[0], "0"

    monkeypatch.setattr(socket, "getnameinfo", slow)
    monkeypatch.setattr(lookups, "_turn", threading.Lock())
    yield addresses
    end.set()
    wait_until(lambda: not any("lookup" in thread.name for thread in threading.enumerate()))


@pytest.fixture
def store() -> Any:
    held = host_store("127.0.0.1", 0)
    assert isinstance(held, dist.TCPStore)
    return held


@pytest.mark.slow
def test_slow_look_ups_are_reported_once_with_the_cure(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with suspecting_lookups("127.0.0.1"):
            time.sleep(lookups.SLOW_ANSWER_SECONDS + 3 * lookups.SLOW_LOOKUP_SECONDS)
    said = capsys.readouterr().err
    assert said.startswith("warning: a look-up of the name of 127.0.0.1 takes more than 0.5 s on this machine, ")
    assert said.endswith(CURE)
    assert said.count("\n") == 1
    assert asked == ["::ffff:127.0.0.1"], "the form in which torch asks"


def test_an_answer_of_the_store_that_takes_long_is_traced_to_look_ups(
    asked: list[str], store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(client: dist.Store) -> str:
        time.sleep(lookups.SLOW_ANSWER_SECONDS + 3 * lookups.SLOW_LOOKUP_SECONDS)
        return "the answer"

    assert BoundedStore(dist.PrefixStore("a", store), lambda: 20.0).run(answer) == "the answer"
    assert capsys.readouterr().err.endswith(CURE)


def test_quick_look_ups_are_not_blamed(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "getnameinfo", lambda place, flags: (place[0], "0"))
    BoundedStore(store, lambda: 20.0).run(lambda client: time.sleep(lookups.SLOW_ANSWER_SECONDS + 0.3))
    suspect_lookups("no-such-host.invalid")
    wait_until(lambda: not any("lookup" in thread.name for thread in threading.enumerate()))
    assert capsys.readouterr().err == ""


def test_only_the_first_rank_of_a_machine_reports(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    suspect_lookups("127.0.0.1")
    assert not any("lookup" in thread.name for thread in threading.enumerate())
    assert asked == []


def test_a_store_of_its_own_hears_only_those_who_speak_to_one_address(store: dist.TCPStore) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    strangers = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(300)]
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # served after all of them have been looked at
    other.set("a", "b")
    assert store.get("a") == b"b"
    assert descriptors() - before < 310, "each would take two, one of them the store's"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))
    for one in strangers:
        one.close()


def test_a_later_store_of_the_process_shares_the_server(store: dist.TCPStore) -> None:
    again = dist.TCPStore("127.0.0.1", store.port, 1, is_master=True, multi_tenant=True)
    again.set("a", "b")
    assert store.get("a") == b"b"
    assert host_store("127.0.0.1", store.port) is None, "torch finds the one that there is"


def test_an_address_that_cannot_be_had_is_left_to_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listener_at("192.0.2.1", 29500) is None
    assert capsys.readouterr().err == (
        "the store at 192.0.2.1:29500 listens at all addresses: that one is none of this machine's own\n"
    )
    with pytest.raises(UserInputError, match=r"^MASTER_ADDR must be .* rank 0's machine; got 'no-such\.invalid'"):
        listener_at("no-such.invalid", 29500)
    place = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [place])
    assert listener_at("a-name-of-this-machine", 0) is None, "other machines know it by another address"
