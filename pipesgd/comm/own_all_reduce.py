"""All-reduces by name or as a function of the user's own, which all ranks check before they use them."""

from __future__ import annotations

import functools
import hashlib
import reprlib
from typing import Any

from pipesgd.errors import CommunicationError, UserInputError
from pipesgd.functions import OWN, function_of, in_one_line, kind
from pipesgd.ranks import Ranks, check_same
from pipesgd.sections import all_reduce_name
from timing_model.schedules import Algorithm, Schedule, make_schedule


def agreed_schedule(all_reduce: str | Algorithm, ranks: Ranks, ranks_per_node: int = 1) -> Schedule:
    """Return this rank's schedule. All ranks call this together if the all-reduce is one of the user's own.

    Args:
        all_reduce: its name, but not "native", or its function.
        ranks: the ranks that take part.
        ranks_per_node: ranks of a node, which only hierarchical reads.

    Raises:
        UserInputError: there is no such function, it fails, or its schedules are no all-reduce.
        DisagreementError: ranks have other schedules.
    """
    name = all_reduce_name(all_reduce)
    if isinstance(all_reduce, str) and kind(all_reduce) != OWN:
        return make_schedule(all_reduce, ranks.rank, ranks.world_size, ranks_per_node)
    schedules = ranks.raise_together("all-reduce", functools.partial(_own_schedules, all_reduce, ranks.world_size))
    check_same(ranks, f"schedules of {name}", hashlib.sha256(repr(schedules).encode()).hexdigest())
    return schedules[ranks.rank]


def ranks_per_node(ranks: Ranks) -> int:
    """Return the number of ranks on each node, as a hierarchical all-reduce needs it. Collective.

    Raises:
        UserInputError: nodes differ in it, there is one rank on each, or a node's ranks are not consecutive.
    """
    places = ranks.all_gather_object("ranks on each node", [ranks.local_world_size, ranks.local_rank])
    for rank, place in enumerate(places):
        if not _is_place(place):
            raise CommunicationError(
                rank=ranks.number(ranks.rank),
                peer=ranks.number(rank),
                operation="exchange of ranks on each node",
                reason=f"it must be a number of ranks and a place among them; got {reprlib.repr(place)}",
            )
    numbers = sorted({number for number, _ in places})
    number: int = numbers[0]
    if len(numbers) > 1 or ranks.world_size % number or any(r % number != p for r, (_, p) in enumerate(places)):
        raise UserInputError.on_all_ranks(
            "all-reduce must not be hierarchical unless all nodes have the same number of ranks, and those of a "
            f"node adjoining numbers; got {ranks.world_size} ranks on nodes of {' and '.join(map(str, numbers))}"
        )
    if number == 1 < ranks.world_size:
        raise UserInputError.on_all_ranks(
            "all-reduce must not be hierarchical with one rank on each node, where it would be a ring; got "
            f"{ranks.world_size} nodes of one rank (torchrun's LOCAL_WORLD_SIZE says how many ranks a node has)"
        )
    return number


def _is_place(place: Any) -> bool:
    """Return True if ``place`` is a number of ranks and a place among them."""
    numbers = isinstance(place, list) and len(place) == 2 and all(type(one) is int for one in place)
    return numbers and 0 <= place[1] < place[0]


def _own_schedules(all_reduce: str | Algorithm, world_size: int) -> list[Schedule]:
    from timing_model.own_schedules import check_schedules

    name = all_reduce_name(all_reduce)
    algorithm = function_of("all-reduce", all_reduce, {}) if isinstance(all_reduce, str) else all_reduce
    with in_one_line(f"all-reduce must be made by {name} without an error"):
        schedules = [algorithm(rank, world_size) for rank in range(world_size)]
    try:
        check_schedules(name, schedules)
    except ValueError as wrong:
        raise UserInputError(str(wrong)) from None
    return schedules
