"""All-reduces of the user's own: found as ``module:function``, and checked before anybody runs or predicts them.

The check plays the schedules of all ranks, event by event as the trainer does, on symbols instead of numbers: a value
is known by how it was made, as a sum of two values or as an encoding. So it shows for all numbers and all codecs that
every rank ends with the same bytes. Its time grows with the number of messages, which is 2 p^2 for a ring of p ranks.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, cast

from timing_model.checks import check_one_of
from timing_model.schedules import ALL_REDUCES, SCHEDULES, Algorithm, Encode, Event, Receive, Schedule, Send


def check_all_reduce(name: str, value: str) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``ALL_REDUCES``, or ``module:function`` that can be imported."""
    if ":" in value:
        algorithm_of(value)
    else:
        check_one_of(name, value, ALL_REDUCES)


@functools.cache
def algorithm_of(all_reduce: str) -> Algorithm:
    """Return the algorithm of this name: one of ``SCHEDULES``, or the function that ``module:function`` imports.

    A text, as in ``module:function=text``, becomes the function's first argument.
    Raises ``ValueError`` if there is no such function.
    """
    if ":" not in all_reduce:
        return SCHEDULES[all_reduce]
    path, given, text = all_reduce.partition("=")
    module, _, function = path.partition(":")
    try:
        found: Any = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"all_reduce must be a function that can be imported; got {all_reduce}: {type(error).__name__}: {said}"
        ) from error
    return cast(Algorithm, functools.partial(found, text) if given else found)


def schedules_of(all_reduce: str, world_size: int) -> list[Schedule]:
    """Return the schedules of all ranks; those of an all-reduce of the user's own are checked.

    Raises ``ValueError`` if they are wrong.
    """
    algorithm = algorithm_of(all_reduce)
    if ":" not in all_reduce:
        return [algorithm(rank, world_size) for rank in range(world_size)]
    try:
        schedules = [algorithm(rank, world_size) for rank in range(world_size)]
    except Exception as error:  # a function of the user's own may raise anything
        said = " ".join(str(error).split())
        raise ValueError(
            f"all-reduce {all_reduce} must return a schedule for each of {world_size} ranks; got "
            f"{type(error).__name__}: {said}"
        ) from error
    check_schedules(all_reduce, schedules)
    return schedules


def check_schedules(name: str, schedules: Sequence[Schedule]) -> None:
    """Raise ``ValueError`` unless ``schedules``, one for each rank, are an all-reduce that the trainer can run.

    Every rank must end with the sum of all ranks' values, made in the same way as on every other rank, so that the
    bytes are the same. For error feedback, a rank encodes each chunk once by itself, otherwise with other ``holders``.
    """
    for rank, schedule in enumerate(schedules):
        if not isinstance(schedule, Schedule):
            raise ValueError(  # noqa: TRY004 (like all errors of callers)
                f"all-reduce {name} must return a timing_model.schedules.Schedule; got {type(schedule).__name__}"
            )
        if schedule.chunks < 1:
            raise ValueError(f"all-reduce {name} must cut the values into at least 1 chunk; got {schedule.chunks}")
        if schedule.chunks != schedules[0].chunks:
            raise ValueError(
                f"all-reduce {name} must cut the values into the same number of chunks on all ranks; "
                f"got {schedules[0].chunks} on rank 0, {schedule.chunks} on rank {rank}"
            )
        _check_operations(name, rank, len(schedules), schedule)
    play = Play(name, schedules)
    for rank, values in enumerate(play.values):
        for chunk, value in enumerate(values):
            if missing := set(range(len(schedules))) - play.summands(value):
                raise ValueError(
                    f"all-reduce {name} must sum every chunk over all ranks; got chunk {chunk} on rank {rank} without "
                    f"rank {min(missing)}"
                )
            if value != play.values[0][chunk]:
                raise ValueError(
                    f"all-reduce {name} must give all ranks the same bytes; got chunk {chunk} summed or encoded in "
                    f"another way on rank {rank} than on rank 0"
                )
    play.check_holders()


def _check_operations(name: str, rank: int, world_size: int, schedule: Schedule) -> None:
    prefix = f"all-reduce {name} must"
    used: set[int] = set()
    """Chunks that have been encoded or sent since they last arrived."""
    for operation in schedule.operations:
        if isinstance(operation, Encode):
            if operation.chunk in used:
                raise ValueError(
                    f"{prefix} encode a chunk at most once before it arrives again, and before it is sent; "
                    f"got chunk {operation.chunk} on rank {rank}"
                )
            used.add(operation.chunk)
            continue
        if not 0 <= operation.peer < world_size or operation.peer == rank:
            raise ValueError(f"{prefix} name other ranks as peers; got {operation.peer} on rank {rank} of {world_size}")
        if isinstance(operation, Receive):
            used.discard(operation.chunk)
        else:
            used.add(operation.chunk)
    alone = Counter(one.chunk for one in schedule.operations if isinstance(one, Encode) and one.holders == 1)
    for chunk in range(schedule.chunks if world_size > 1 else 0):
        if alone[chunk] != 1:
            raise ValueError(
                f"{prefix} have every rank encode every chunk once by itself; got chunk {chunk} encoded "
                f"{alone[chunk]} times on rank {rank}"
            )


class Play:
    """Schedules of all ranks, played to their end on symbols.

    ``values[rank][chunk]`` is the symbol of what a rank holds at the end. Raises ``ValueError`` if a message is not
    received as it was sent, bytes are sent that are not the values', or a value is added twice.
    """

    def __init__(self, name: str, schedules: Sequence[Schedule]):
        self._name = name
        self._symbols: dict[tuple[object, ...], int] = {}
        self._summands: list[int] = []
        """Ranks whose values each symbol holds, as a bit each."""
        self._encodings: Counter[tuple[int, int, int]] = Counter()
        """Number of ranks that have made each encoding together: by symbol, holders, and the first of these."""
        self.values = [
            [self._symbol(("own", rank, chunk), 1 << rank) for chunk in range(schedule.chunks)]
            for rank, schedule in enumerate(schedules)
        ]
        self._bytes: list[dict[int, int]] = [{} for _ in schedules]
        """Symbol of the bytes of each chunk that a rank can send."""
        self._wires: dict[tuple[int, int], deque[tuple[int, int, int]]] = {}
        self._run([deque(schedule.events) for schedule in schedules])

    def summands(self, symbol: int) -> set[int]:
        """Return the ranks whose values the symbol holds."""
        return {rank for rank in range(len(self.values)) if self._summands[symbol] >> rank & 1}

    def check_holders(self) -> None:
        """Raise ``ValueError`` unless ranks that encode together hold the same values."""
        for (_, holders, first), number in self._encodings.items():
            if number != holders:
                raise ValueError(
                    f"all-reduce {self._name} must have {holders} holders encode the same values; got {number} from "
                    f"rank {first} on"
                )

    def _run(self, events: list[deque[Event]]) -> None:
        moved = True
        while moved:
            moved = False
            for rank, waiting in enumerate(events):
                while waiting and self._is_ready(rank, waiting[0]):
                    self._do(rank, waiting.popleft())
                    moved = True
        for rank, waiting in enumerate(events):
            if waiting and (arrival := waiting[0].arrival) is not None:
                raise ValueError(
                    f"all-reduce {self._name} must end; got rank {rank} waiting for chunk {arrival.chunk} from rank "
                    f"{arrival.peer} for ever"
                )
        for (rank, peer), messages in self._wires.items():
            if messages:
                raise ValueError(
                    f"all-reduce {self._name} must receive every message; got chunk {messages[0][0]} from rank {rank} "
                    f"left over on rank {peer}"
                )

    def _is_ready(self, rank: int, event: Event) -> bool:
        return event.arrival is None or bool(self._wires.get((event.arrival.peer, rank)))

    def _do(self, rank: int, event: Event) -> None:
        chunk, values, own = event.chunk, self.values[rank], self._bytes[rank]
        if event.arrival is not None:
            self._receive(rank, event.arrival)
        if event.encode is not None:
            holders = event.encode.holders
            first = rank // holders * holders
            made = self._symbol(("encoded", values[chunk], holders, first), self._summands[values[chunk]])
            self._encodings[made, holders, first] += 1
            own[chunk] = made
            if event.keeps_encoded:
                values[chunk] = made
        returns = event.following is not None and not event.following.reduce
        for send in event.sends:
            self._send(rank, send, returns=returns and len(event.sends) > 1)

    def _receive(self, rank: int, arrival: Receive) -> None:
        chunk, values = arrival.chunk, self.values[rank]
        sent, step, symbol = self._wires[arrival.peer, rank].popleft()
        if (sent, step) != (chunk, arrival.step):
            raise ValueError(
                f"all-reduce {self._name} must list messages in the same order at both ends; got chunk {sent} of step "
                f"{step} sent by rank {arrival.peer}, chunk {chunk} of step {arrival.step} received by rank {rank}"
            )
        if not arrival.reduce:
            values[chunk] = self._bytes[rank][chunk] = symbol
            return
        self._bytes[rank].pop(chunk, None)
        if self._summands[values[chunk]] & self._summands[symbol]:
            raise ValueError(
                f"all-reduce {self._name} must add every rank's values once; got some again in chunk {chunk} from rank "
                f"{arrival.peer} on rank {rank}"
            )
        terms = frozenset((values[chunk], symbol))  # the sum of two floats does not depend on their order
        values[chunk] = self._symbol(("sum", terms), self._summands[values[chunk]] | self._summands[symbol])

    def _send(self, rank: int, send: Send, *, returns: bool) -> None:
        if send.chunk not in self._bytes[rank]:
            raise ValueError(
                f"all-reduce {self._name} must encode a chunk before it is sent, after each sum; got chunk "
                f"{send.chunk} sent by rank {rank} at step {send.step} without"
            )
        if returns:  # its bytes would be replaced while a slow peer still reads them
            raise ValueError(
                f"all-reduce {self._name} must send a chunk that it gets back to one rank only; got chunk {send.chunk} "
                f"of rank {rank}"
            )
        message = send.chunk, send.step, self._bytes[rank][send.chunk]
        self._wires.setdefault((rank, send.peer), deque()).append(message)

    def _symbol(self, made: tuple[object, ...], summands: int) -> int:
        if made not in self._symbols:
            self._symbols[made] = len(self._summands)
            self._summands.append(summands)
        return self._symbols[made]
