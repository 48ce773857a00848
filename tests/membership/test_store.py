"""The store's calls have deadlines, and values read from it are checked."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from pipesgd.calibrate import calibrate
from pipesgd.comm.own_all_reduce import ranks_per_node
from pipesgd.errors import CommunicationError, DeadlineExceeded, DisagreementError
from pipesgd.membership.store import BoundedStore, StoreSilent, address
from pipesgd.ranks import Ranks, Standing, check_same_options
from pipesgd.run.console import screen
from pipesgd.train import train


class Hanging(dist.Store):
    """A store whose process has been stopped: no call returns before ``released`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.calls = 0

    def _hang(self) -> Any:
        self.calls += 1
        self.released.wait()

    def set(self, key: str, value: str) -> None:
        self._hang()

    def check(self, keys: list[str]) -> bool:
        return bool(self._hang())


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    store = Hanging()
    yield store
    store.released.set()
    for thread in threading.enumerate():
        if thread.name == "pipesgd-store":
            thread.join()


def test_a_call_that_hangs_ends_at_its_deadline_and_no_other_one_is_tried(hanging: Hanging) -> None:
    store = BoundedStore(hanging, lambda: 0.2)
    for _ in range(3):
        with pytest.raises(StoreSilent, match=r"has not answered within 0\.2 s"):
            store.check(["a key"])
    assert hanging.calls == 1


@pytest.mark.slow
def test_a_report_does_not_hold_up_the_line_of_the_rank_that_failed(hanging: Hanging) -> None:
    ranks = Ranks(rank=0, world_size=2, store=hanging, standing=Standing(600.0))
    found: list[BaseException] = []

    def report() -> None:
        try:
            ranks.report("the disk is full")
        except StoreSilent as silent:
            found.append(silent)

    reporting = threading.Thread(target=report, daemon=True)
    reporting.start()
    reporting.join(30.0)
    assert [str(one) for one in found] == ["the store that the ranks share has not answered within 3 s"]


def test_an_exchange_through_a_hanging_store_is_an_error_of_one_line(hanging: Hanging) -> None:
    ranks = Ranks(rank=0, world_size=2, store=hanging, standing=Standing(timeout=0.2))
    with pytest.raises(CommunicationError) as error:
        ranks.all_gather_object("a value", 1)
    assert str(error.value) == (
        "rank 0: exchange of a value through the store failed: "
        "the store that the ranks share has not answered within 0.2 s"
    )


@pytest.mark.parametrize("value", ["", "{", '{"a": }', b"\xff\xfe", "[" * 100_000, "0" * (17 << 20)])
def test_a_value_that_is_no_json_is_an_error_that_names_the_rank_and_the_key(value: Any) -> None:
    ranks = Ranks(rank=0, world_size=2, store=dist.HashStore())
    ranks.store.set("exchange of 2/1/a value/1", value)
    with pytest.raises(CommunicationError) as error:
        ranks.all_gather_object("a value", 1)
    start = "rank 0: exchange of a value with rank 1 failed: the store's value of 'exchange of 2/1/a value/1' cannot be"
    assert str(error.value).startswith(start)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("what", "own", "value"),
    [
        ("count of restarts", 0, '"x"'),
        ("configuration", {"lr": 1.0}, "[1]"),
        ("times", [1.0], "true"),
        ("a hash", "x", "{}"),
    ],
)
def test_a_value_of_another_kind_is_an_error_that_names_the_rank_and_the_key(what: str, own: Any, value: str) -> None:
    store = dist.HashStore()
    ranks = Ranks(rank=0, world_size=2, store=store, standing=Standing(timeout=5.0))
    key = f"exchange of 2/1/{what}/1"
    store.set(key, value)
    with pytest.raises(CommunicationError, match="of the same kind as this rank's own") as error:
        ranks.all_gather_object(what, own)
    assert key in str(error.value)


def test_options_that_a_rank_does_not_have_differ() -> None:
    store = dist.HashStore()
    ranks = Ranks(rank=0, world_size=2, store=store, standing=Standing(timeout=5.0))
    store.set("exchange of 2/1/configuration/1", "null")
    with pytest.raises(DisagreementError, match="lr must be the same on all ranks; got"):
        check_same_options(ranks, {"lr": 0.1}, free=frozenset())


@pytest.mark.parametrize("place", ["[]", "[0, 0]", "[2, 2]", "[1e400, 0]", '["2", 0]', "[2, -1]", "[true, 0]"])
def test_a_place_that_cannot_be_is_an_error_that_names_the_rank(place: str) -> None:
    store = dist.HashStore()
    ranks = Ranks(rank=0, world_size=2, store=store, local_world_size=2, standing=Standing(timeout=5.0))
    store.set("exchange of 2/1/ranks on each node/1", place)
    with pytest.raises(CommunicationError, match="with rank 1 failed: it must be a number of ranks and a place among"):
        ranks_per_node(ranks)


def test_another_ranks_report_may_hold_any_bytes() -> None:
    ranks = Ranks(rank=0, world_size=2, store=dist.HashStore())
    ranks.store.set("failure/1", b"\xff" * 100_000)  # type: ignore[arg-type]
    ranks.store.set("a failure", "")
    with pytest.raises(CommunicationError) as error:
        ranks.all_gather_object("a value", 1)
    assert len(str(error.value)) < 3000


def test_ranks_among_the_first_have_the_same_deadline_and_iteration() -> None:
    ranks = Ranks(rank=0, world_size=3, store=dist.HashStore())
    workers = ranks.first(2)
    ranks.timeout = 900.0
    ranks.iteration = 7
    assert (workers.timeout, workers.iteration) == (900.0, 7)


@pytest.mark.parametrize("command", [train, calibrate])
def test_the_first_exchange_waits_for_as_long_as_timeout_says(command: Any) -> None:
    ranks = Ranks(rank=0, world_size=2, store=dist.HashStore(), standing=Standing(timeout=30.0))
    with pytest.raises(DeadlineExceeded, match=r"exchange of options .* no message within 0\.3 s from rank 1"):
        command(["--timeout", "0.3"], ranks, screen(ranks, io.StringIO()))


def test_an_exchange_may_wait_for_longer_than_the_deadline() -> None:
    """A rank that compiles a codec for the first time may take longer than ``--timeout``."""
    store = dist.HashStore()
    one, other = (Ranks(rank=rank, world_size=2, store=store, standing=Standing(0.2)) for rank in range(2))
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(one.all_gather_object("a compiled codec", 1, within=60.0)))
    waiting.start()
    waiting.join(0.6)  # three deadlines
    assert waiting.is_alive()
    assert other.all_gather_object("a compiled codec", 2, within=60.0) == [1, 2]
    waiting.join(20.0)
    assert found == [[1, 2]]
    with pytest.raises(DeadlineExceeded, match=r"no message within 0\.2 s from rank 1"):
        one.all_gather_object("another one", 1)


def test_a_store_is_named_by_where_it_is() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert address(dist.PrefixStore("job", store)) == f" (127.0.0.1:{store.port}, rank 0's machine)"
    assert address(dist.HashStore()) == ""
