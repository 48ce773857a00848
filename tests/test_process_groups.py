"""Ranks of a process group that train together, while other ranks of the job train another model, or do not train."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import error_of, run_ranks
from _sections import sections
from _small_problem import regress, small_problem
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipesgd import LocalSteps, Pipelined, UserInputError
from pipesgd.comm.connections import Connections
from pipesgd.ddp import attach, compress
from pipesgd.ranks import Ranks, among, current
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Wire

pytestmark = pytest.mark.slow

GROUPS = ([0, 2], [3, 1])
"""Two groups of the four ranks; the second counts its ranks in another order than the job does."""
KINDS = ("Pipelined", "LocalSteps", "attach", "compress")


def new_groups(ranks: Ranks, *numbers: list[int], **options: Any) -> list[Any]:
    """Make these groups. Collective for all ranks of the job, and back on none before all have all connections.

    torch does not wait: a rank that returns ends its process, and connections that others are still making.
    """
    groups = [dist.new_group(of_group, **options) for of_group in numbers]
    ranks.all_gather_object("groups", None)
    return groups


def own_group(ranks: Ranks) -> dist.ProcessGroup:
    """Return the group that this rank is in, after making all of ``GROUPS``. Collective for all ranks of the job."""
    groups = new_groups(ranks, *GROUPS, sort_ranks=False)
    return next(group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER)


def train(kind: str, job: int, rank: int, group: dist.ProcessGroup | None, **options: Any) -> str:
    """Train the model of ``job``, by one of ``KINDS``, on rank ``rank`` of two; return a hash of the weights.

    The jobs differ in their model and in the number of their iterations.
    """
    model, batches = small_problem(job, [4, 30 + job, 2], iterations=5 + 3 * job, world_size=2)
    own_loop = kind in ("Pipelined", "LocalSteps")
    network = model if own_loop else DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind == "Pipelined":
        strategy: Any = Pipelined(model, optimizer, codec="int8", process_group=group, **sections(**options))
    elif kind == "LocalSteps":
        strategy = LocalSteps(model, optimizer, codec="int8", process_group=group, **sections(local_steps=3, **options))
    elif kind == "attach":
        strategy = attach(network, optimizer, codec="int8", **sections(**options))
    else:
        strategy = compress(network, codec="int8", **sections(**options))
    step = strategy.step if own_loop else optimizer.step
    with strategy:
        for of_ranks in batches:
            optimizer.zero_grad()
            regress(network, of_ranks[rank]).backward()
            step()
    return weights_sha256(model)


def _in_groups(ranks: Ranks, kind: str, options: dict[str, Any]) -> tuple[list[int], list[str]]:
    group = own_group(ranks)
    numbers = dist.get_process_group_ranks(group)
    jobs = [GROUPS.index(numbers), 2]  # one after the other, the second after the first's connections have ended
    return numbers, [train(kind, job, dist.get_rank(group), group, **options) for job in jobs]


def _apart(ranks: Ranks, kind: str, options: dict[str, Any]) -> list[str]:
    return [train(kind, job, ranks.rank, None, **options) for job in range(3)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Pipelined", {}),
        ("Pipelined", {"guard": True, "width": 3, "all_reduce": "recursive-doubling", "connections": 2}),
        ("LocalSteps", {"outer": "elastic"}),
        ("attach", {}),
        ("compress", {}),
    ],
)
def test_two_groups_train_two_models_as_two_jobs_do_bit_for_bit(kind: str, options: dict[str, Any]) -> None:
    first, second, third = run_ranks(2, _apart, kind, options)[0]
    for numbers, hashes in run_ranks(4, _in_groups, kind, options):
        assert hashes == [first if numbers == GROUPS[0] else second, third]


def _by_native(ranks: Ranks) -> str:
    model, batches = small_problem(0, [4, 30, 2], iterations=5, world_size=2)
    group = own_group(ranks) if ranks.world_size == 4 else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Pipelined(model, optimizer, process_group=group, wire=Wire(all_reduce="native")) as pipeline:
        for of_ranks in batches:
            regress(model, of_ranks[dist.get_rank(group)]).backward()
            pipeline.step()
    return weights_sha256(model)


def test_the_all_reduce_of_a_group_may_be_torchs_own() -> None:
    assert set(run_ranks(4, _by_native)) == set(run_ranks(2, _by_native))


def _one_group_of_three(ranks: Ranks) -> str | None:
    """Train on ranks 0, 1 and 3, of which only 1 and 3 are in another group, too; rank 2 does nothing."""
    groups = new_groups(ranks, [1, 3], [0, 1, 3])
    if groups[1] is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    model, batches = small_problem(0, [4, 30, 2], iterations=5, world_size=3)
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.05), process_group=groups[1]) as pipeline:
        for of_ranks in batches:
            regress(model, of_ranks[dist.get_rank(groups[1])]).backward()
            pipeline.step()
    return weights_sha256(model)


def test_ranks_outside_of_a_group_need_not_take_part() -> None:
    one, two, outside, three = run_ranks(4, _one_group_of_three)
    assert one == two == three
    assert outside is None


def _wrong_ways(ranks: Ranks) -> list[str]:
    group, model = own_group(ranks), nn.Linear(4, 2)
    rank = dist.get_rank(group)
    if dist.get_process_group_ranks(group) != GROUPS[1]:
        return []

    def make(**options: Any) -> Pipelined:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Pipelined(model, optimizer, process_group=group, **sections(**options))

    def out_of_step() -> None:
        with make() as pipeline:
            model(torch.ones(1, 4)).sum().backward()
            if rank:
                pipeline.combine_buffers()
            pipeline.step()
            pipeline.flush()

    def not_finite() -> None:
        with make(width=1) as pipeline:
            (model(torch.ones(1, 4)).sum() * (torch.inf if rank else 1.0)).backward()
            pipeline.step()

    def absent() -> None:
        own = current(0.5, group)
        if rank == 0:
            own.all_gather_object("a value", 1)

    def late() -> None:
        if rank == 0:
            current(0.5, group)

    ways: list[Callable[[], object]] = [lambda: make(width=2 + rank), out_of_step, not_finite, absent, late]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of gradients that an error has dropped
        return [error_of(way) for way in ways]


def test_messages_name_ranks_by_their_numbers_in_the_job() -> None:
    of_ranks = run_ranks(4, _wrong_ways)
    assert of_ranks[0] == of_ranks[2] == []
    second, first = of_ranks[1], of_ranks[3]  # the group counts rank 3 first
    differs = "DisagreementError: width must be the same on all ranks; got 2 on rank 3, 3 on rank 1"
    assert first[0] == second[0] == differs
    assert first[1].startswith(
        "OutOfStepError: rank 3 is at step in iteration 0, but rank 1 is at combine_buffers in iteration 0: "
    )
    assert second[1].startswith(
        "OutOfStepError: rank 1 is at combine_buffers in iteration 0, but rank 3 is at step in iteration 0: "
    )
    assert first[2] == second[2]
    assert "so does the own gradient of rank 1, and of no other rank" in first[2]
    absent = "rank 3: exchange of a value with rank 1 failed: no message within 0.5 s from rank 1"
    assert (first[3], second[3]) == (f"DeadlineExceeded: {absent}", "no error")
    assert first[4] == "DeadlineExceeded: rank 3: start with rank 1 failed: no message within 0.5 s from rank 1"


def _sum_within_a_sum(ranks: Ranks) -> str:
    """Sum over rank pairs 0, 1 and 2, 3 within a sum over 0, 2 and 1, 3, as islands do. Rank 3 takes no part."""
    own = ranks.rank
    between, inside = (
        Connections("ring", among(numbers, ranks.standing), timeout=ranks.timeout)
        for numbers in ([own % 2, own % 2 + 2], [own // 2 * 2, own // 2 * 2 + 1])
    )
    sum_inside = functools.partial(inside.all_reduce(), torch.ones(1))
    if own == 3:
        between.close()
        inside.close()
        return ""
    return error_of(between.run, "step", 0, functools.partial(inside.run, "step", 0, sum_inside))


def test_a_sum_within_the_sum_of_other_ranks_names_its_ranks_itself() -> None:
    """The outer one used to name them, too: it took the numbers 2 and 3 for places among its own two ranks."""
    error = run_ranks(4, _sum_within_a_sum)[2]
    assert error.startswith("CommunicationError: rank 2: ")
    assert "of the header with rank 3 in iteration 0 failed: " in error


def _refused(ranks: Ranks) -> list[str]:
    group, other = new_groups(ranks, [0], [0, 1])  # one that a rank destroys exists on the other one by then
    model = nn.Linear(4, 2)

    def make(group: Any, **options: Any) -> None:
        Pipelined(
            model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group, **sections(**options)
        ).close()

    dist.destroy_process_group(other)
    return [
        error_of(make, group),
        error_of(make, "group 3"),
        error_of(make, other),
        error_of(make, group, ranks=ranks),
    ]


def test_groups_that_cannot_be_meant_are_refused_in_one_line() -> None:
    own, *rest = run_ranks(2, _refused)[1]
    assert own == "UserInputError: process_group must have this rank in it; got one without rank 1"
    assert rest == [
        "UserInputError: process_group must be a group of torch.distributed; got str",
        "UserInputError: process_group must be a group of torch.distributed that exists; got a destroyed one",
        "UserInputError: process_group must be left out where ranks= gives the ranks; got both",
    ]


def test_torchs_own_all_reduce_of_a_group_is_refused_on_gpus() -> None:
    ranks = Ranks(rank=0, world_size=1, store=dist.HashStore(), numbers=(3,))
    with pytest.raises(UserInputError, match=r"^all_reduce must not be native with a process_group of GPUs"):
        Connections("native", ranks, timeout=1.0, device="cuda")


def _places(ranks: Ranks) -> tuple[int, int]:
    os.environ.update(RANK=str(ranks.rank), WORLD_SIZE="6")
    os.environ.update(LOCAL_RANK=str(ranks.rank % 3), LOCAL_WORLD_SIZE="3")
    groups = new_groups(ranks, [0, 2, 3, 4], [1, 5])
    own = current(ranks.timeout, groups[0] if ranks.rank in (0, 2, 3, 4) else groups[1])
    return own.local_rank, own.local_world_size


def test_a_group_has_the_places_of_its_ranks_on_each_node() -> None:
    """Six ranks on two nodes: two of each are in the first group, one of each in the second."""
    assert run_ranks(6, _places) == [(0, 2), (0, 1), (1, 2), (0, 2), (1, 2), (0, 1)]
