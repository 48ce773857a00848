"""Random schedules of faults: the production code breaks nothing, and planted mistakes are found."""

from __future__ import annotations

import pytest

from experiments.explore_membership import BLOCK, explore
from experiments.membership.invariants import ViolationError
from experiments.membership.trainer import Trainer
from experiments.membership.world import World
from pipesgd.membership.protocol import Member
from tests.membership._mistakes import (
    AcceptedIgnored,
    DeadDoNotCount,
    EmptyUnitUpdates,
    MeanOverAll,
    NoFencing,
    NoLease,
    NoQuorum,
    ResidualInPlace,
    SlicesNotGivenBack,
    SumsAfterPromise,
)


@pytest.mark.parametrize("first", [0, BLOCK])
def test_no_schedule_breaks_an_invariant(first: int) -> None:
    block = explore(first, BLOCK)
    assert block.first_violation == ""
    assert block.all_are_members > block.no_quorum_left > block.too_few_members > 0
    assert block.generations > BLOCK
    assert block.generations_by_certain_deaths > 10


def test_a_newcomer_on_a_slow_line_is_admitted() -> None:
    """Its round trips are longer than what a proposer waited for newcomers that were behind: it was never level."""
    World(194338).run()


def violation(mistake: type[Trainer] | type[Member], seed: int) -> str:
    """Return how a schedule finds ``mistake``; empty if it does not."""
    trainer = mistake if issubclass(mistake, Trainer) else Trainer
    member = mistake if issubclass(mistake, Member) else Member
    try:
        World(seed, trainer_class=trainer, member_class=member).run()
    except ViolationError as found:
        return str(found)
    return ""


@pytest.mark.parametrize(
    ("mistake", "seeds", "words"),
    [
        (ResidualInPlace, range(10), "residual of"),
        (SlicesNotGivenBack, range(10), "never ["),
        (MeanOverAll, range(10), "has divisor"),
        (NoQuorum, range(50), "two generations"),
        (SumsAfterPromise, range(50), "with another state"),
        (AcceptedIgnored, range(100), "two generations"),
        (NoFencing, range(20, 60), "is not what was put in"),
        (DeadDoNotCount, range(120, 160), "two generations"),
        (NoLease, range(535, 565), "two generations"),
        (EmptyUnitUpdates, range(7210, 7230), "division"),
    ],
)
def test_a_planted_mistake_is_found(mistake: type[Trainer] | type[Member], seeds: range, words: str) -> None:
    """Rare mistakes are looked for where they were found; a change of the protocol or the world moves these seeds."""
    found = [text for seed in seeds if words in (text := violation(mistake, seed))]
    assert found, f"no schedule of {seeds} finds it"
    assert not any(violation(Trainer, seed) for seed in seeds[:3])
