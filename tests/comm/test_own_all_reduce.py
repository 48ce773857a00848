"""Schedules of the user's own: what is refused before it runs, and the predicted time of one that may run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import pytest
from _all_reduces import ALGORITHMS
from _virtual_time import virtual_time
from conftest import REPOSITORY

from pipesgd.codecs.floats import Uncompressed
from pipesgd.errors import UserInputError
from pipesgd.sections import all_reduce_name
from timing_model.all_reduce import all_reduce_time
from timing_model.cli import main
from timing_model.own_schedules import check_schedules
from timing_model.params import LinkParams, uncompressed
from timing_model.schedules import (
    SEGMENT_BYTES,
    Algorithm,
    Encode,
    Operation,
    Receive,
    Schedule,
    Send,
    recursive_doubling,
    ring,
)
from timing_model.simulate_messages import Network

NAME = "own_all_reduce:binomial_tree"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Algorithm:
    """Return the all-reduce of examples/, which can be imported during the test."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    from own_all_reduce import binomial_tree  # type: ignore[import-not-found]

    found: Algorithm = binomial_tree
    return found


@pytest.mark.parametrize("world_size", range(1, 18))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_built_in_all_reduces_pass_the_check(name: str, world_size: int) -> None:
    check_schedules(name, [ALGORITHMS[name](rank, world_size) for rank in range(world_size)])


def edited(change: Callable[[int, list[Operation]], object], algorithm: Algorithm = ring) -> Algorithm:
    """Return ``algorithm`` with a ``change`` of each rank's operations."""

    def other(rank: int, world_size: int) -> Schedule:
        schedule = algorithm(rank, world_size)
        operations = list(schedule.operations)
        change(rank, operations)
        return dataclasses.replace(schedule, operations=tuple(operations))

    return other


def everybody_adds(rank: int, world_size: int) -> Schedule:
    """All ranks send to all, and each adds what arrives to its own values first: in another order on each rank."""
    peers = [(rank + k) % world_size for k in range(1, world_size)]
    return Schedule(
        chunks=1,
        operations=(
            Encode(0),
            *(Send(0, peer, 0) for peer in peers),
            *(Receive(0, peer, 0, reduce=True) for peer in reversed(peers)),
        ),
    )


def swapped(rank: int, operations: list[Operation]) -> None:
    """Receive in the opposite order on rank 1."""
    receives = [index for index, operation in enumerate(operations) if isinstance(operation, Receive)]
    if rank == 1:
        first, last = receives[0], receives[-1]
        operations[first], operations[last] = operations[last], operations[first]


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (lambda rank, p: None, "must return a timing_model.schedules.Schedule; got NoneType"),
        (
            lambda rank, p: dataclasses.replace(ring(rank, p), chunks=p + rank),
            "must cut the values into the same number of chunks on all ranks; got 3 on rank 0, 4 on rank 1",
        ),
        (lambda rank, p: Schedule(chunks=0, operations=()), "must cut the values into at least 1 chunk; got 0"),
        (
            lambda rank, p: Schedule(chunks=1, operations=()),
            "must have every rank encode every chunk once by itself; got chunk 0 encoded 0 times on rank 0",
        ),
        (
            lambda rank, p: Schedule(chunks=1, operations=(Encode(0),)),
            "must sum every chunk over all ranks; got chunk 0 on rank 0 without rank 1",
        ),
        (
            edited(lambda rank, operations: operations.insert(0, Encode(rank))),
            "must encode a chunk at most once before it arrives again, and before it is sent; got chunk 0 on rank 0",
        ),
        (
            edited(lambda rank, operations: operations.append(Send(0, 3, 9))),
            "must name other ranks as peers; got 3 on rank 0 of 3",
        ),
        (
            edited(lambda rank, operations: operations.append(Send(0, rank, 9))),
            "must name other ranks as peers; got 0 on rank 0 of 3",
        ),
        (
            edited(lambda rank, operations: operations.append(Send(operations[-1].chunk, (rank + 1) % 3, 9))),
            "must receive every message; got chunk 2 from rank 0 left over on rank 1",
        ),
        (
            edited(lambda rank, operations: operations.append(Receive(0, (rank + 1) % 3, 9, reduce=False))),
            "must end; got rank 0 waiting for chunk 0 from rank 1 for ever",
        ),
        (
            edited(swapped),
            "must list messages in the same order at both ends; got chunk 0 of step 0 sent by rank 0, "
            "chunk 0 of step 3 received by rank 1",
        ),
        (
            edited(lambda rank, operations: operations.insert(0, operations.pop(3))),
            "must encode a chunk before it is sent, after each sum; got chunk 0 sent by rank 1 at step 1 without",
        ),
        (
            edited(lambda rank, operations: operations.append(Encode(operations[-1].chunk))),
            "must have every rank encode every chunk once by itself; got chunk 2 encoded 2 times on rank 0",
        ),
        (
            edited(
                lambda rank, operations: operations.extend([[Receive(0, 1, 9, reduce=True)], [Send(0, 0, 9)], []][rank])
            ),
            "must add every rank's values once; got some again in chunk 0 from rank 1 on rank 0",
        ),
        (
            everybody_adds,
            "must give all ranks the same bytes; got chunk 0 summed or encoded in another way on rank 1 than on rank 0",
        ),
    ],
)
def test_schedules_that_are_no_all_reduce_are_refused_in_one_line(algorithm: Algorithm, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_schedules("my:own", [algorithm(rank, 3) for rank in range(3)])
    assert str(caught.value) == f"all-reduce my:own {message}"


def test_ranks_that_encode_together_must_hold_the_same_values() -> None:
    """Recursive doubling on four ranks, in which the second encoding is said to be made by all four."""

    def doubled(rank: int, operations: list[Operation]) -> None:
        operations[:] = [Encode(0, holders=4) if one == Encode(0, holders=2) else one for one in operations]

    schedules = [edited(doubled, recursive_doubling)(rank, 4) for rank in range(4)]
    with pytest.raises(ValueError, match=r"^all-reduce my:own must have 4 holders encode the same values; got 2 from"):
        check_schedules("my:own", schedules)


def test_a_chunk_that_returns_goes_to_one_rank() -> None:
    """Its bytes would be replaced by the sum while a slow rank still reads them."""

    def told_twice(rank: int, operations: list[Operation]) -> None:
        if rank == 0:
            operations.insert(1, Send(0, 2, 8))
        if rank == 2:
            operations.append(Receive(0, 0, 8, reduce=False))

    with pytest.raises(ValueError, match="must send a chunk that it gets back to one rank only; got chunk 0 of rank 0"):
        check_schedules("my:own", [edited(told_twice)(rank, 3) for rank in range(3)])


def test_an_all_reduce_has_a_name() -> None:
    assert all_reduce_name("ring") == "ring"
    assert all_reduce_name(ring) == "timing_model.schedules:ring"
    for wrong, message in (
        ("rings", r"^all-reduce must be one of ring, .*, module:function; got 'rings' \(did you mean ring\?\)$"),
        ("a b:c", "^all-reduce must be module:function, with a module as Python imports it"),
        (3, "^all-reduce must be a name or a function; got int$"),
    ):
        with pytest.raises(UserInputError, match=message):
            all_reduce_name(wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the timing model


def test_the_model_predicts_the_example_by_its_messages(example: Algorithm, capsys: pytest.CaptureFixture[str]) -> None:
    job = "--latency 50us --bandwidth 1Gbit/s --world-size 6 --parameters 11.7M --compute 0.3s"
    assert main(f"predict --all-reduce {NAME} {job}".split()) == 0
    assert NAME in capsys.readouterr().out


@pytest.mark.parametrize("world_size", range(1, 10))
def test_the_predicted_time_is_that_of_the_code(world_size: int, example: Algorithm) -> None:
    link = LinkParams(alpha=3e-4, beta=1.1e-8, gamma=0.7e-9, sync=0.0, overhead=2e-5)
    numel = 1 << 20
    measured = virtual_time(
        example,
        world_size,
        Network(link=link),
        Uncompressed(),
        uncompressed(link.gamma),
        numel,
        SEGMENT_BYTES,
        posted=True,
    )
    predicted = all_reduce_time(NAME, link, numel, world_size)
    assert predicted.total == pytest.approx(measured, rel=1e-9)


def test_a_text_of_the_name_is_the_first_argument(monkeypatch: pytest.MonkeyPatch, example: Algorithm) -> None:
    def named(text: str, rank: int, world_size: int) -> Schedule:
        return {"ring": ring, "tree": example}[text](rank, world_size)

    monkeypatch.setattr("own_all_reduce.named", named, raising=False)
    link = LinkParams(alpha=1.0, beta=1.0, gamma=0.0, sync=0.0)
    tree, same = (all_reduce_time(name, link, 64, 4) for name in (NAME, "own_all_reduce:named=tree"))
    assert tree == same != all_reduce_time("own_all_reduce:named=ring", link, 64, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:f", "ModuleNotFoundError: No module named 'nowhere'"),
        ("own_all_reduce:bush", "AttributeError: module 'own_all_reduce' has no attribute 'bush'"),
    ],
)
def test_the_model_refuses_what_cannot_be_imported(name: str, message: str, example: Algorithm) -> None:
    assert "own_all_reduce" in sys.modules
    with pytest.raises(ValueError) as caught:
        all_reduce_time(name, LinkParams(alpha=1.0, beta=1.0, gamma=0.0, sync=0.0), 8, 2)
    assert str(caught.value) == f"all_reduce must be a function that can be imported; got {name}: {message}"


def test_the_model_refuses_what_is_no_all_reduce(monkeypatch: pytest.MonkeyPatch, example: Algorithm) -> None:
    alone = Schedule(chunks=1, operations=(Encode(0),))
    monkeypatch.setattr("own_all_reduce.alone", lambda rank, world_size: alone, raising=False)
    with pytest.raises(ValueError, match="must sum every chunk over all ranks; got chunk 0 on rank 0 without rank 1"):
        all_reduce_time("own_all_reduce:alone", LinkParams(alpha=1.0, beta=1.0, gamma=0.0, sync=0.0), 8, 2)
