"""Processes of ranks serve one case after another only if each leaves them as they were."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from _pool import waiting
from _ranks import RankFailed, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pipesgd import replicas
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_process_waits() -> None:
    """End those that earlier tests have left, and what their cases have loaded with them."""
    while waiting:
        waiting.pop().end()


@functools.cache
def asked(question: str) -> list[int]:
    return []


def _what_it_is(ranks: Ranks) -> tuple[int, float, float, str, int, int]:
    asked("again?").append(1)
    environment, threads = os.environ.get("OF_A_CASE", ""), torch.get_num_threads()
    return os.getpid(), random.random(), torch.rand(1).item(), environment, threads, len(asked("again?"))


def _changes_what_is_put_back(ranks: Ranks) -> int:
    os.environ["OF_A_CASE"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/")
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    return os.getpid()


def _changes_a_module(ranks: Ranks) -> int:
    replicas.weights_sha256 = _what_it_is  # type: ignore[assignment]
    return os.getpid()


def _changes_a_class(ranks: Ranks) -> int:
    Ranks.leave = _changes_a_module  # type: ignore[assignment, method-assign]
    return os.getpid()


def _leaves_a_thread(ranks: Ranks) -> int:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


def _leaves_a_thread_of_ours(ranks: Ranks) -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="pipesgd-communication").start()


def _shards_a_tensor(ranks: Ranks, groups: int) -> int:
    for _ in range(groups):
        dist.new_group()
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]
    return os.getpid()


class OwnStep(torch.optim.SGD):
    """An optimizer whose step torch wraps when the first one is made."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _makes_an_optimizer_of_its_own(ranks: Ranks) -> tuple[int, bool]:
    wrapped = hasattr(OwnStep.step, "hooked")
    OwnStep([torch.nn.Parameter(torch.ones(1))])
    assert hasattr(OwnStep.step, "hooked")
    return os.getpid(), wrapped


def _fails_alone(ranks: Ranks) -> None:
    assert ranks.rank == 0


def test_a_case_finds_the_process_of_the_one_before_as_that_one_did() -> None:
    first = run_ranks(2, _what_it_is)
    assert run_ranks(2, _changes_what_is_put_back) == [one[0] for one in first]
    assert run_ranks(2, _what_it_is, process_group=False) == first
    assert run_ranks(1, _what_it_is) == first[:1]


def _leaves_a_file_open(ranks: Ranks) -> int:
    os.open(__file__, os.O_RDONLY)
    return os.getpid()


@pytest.mark.parametrize("case", [_changes_a_module, _changes_a_class, _leaves_a_thread, _leaves_a_file_open])
def test_a_process_that_a_case_has_changed_ends_with_it(case: object) -> None:
    [changed] = run_ranks(1, case)
    assert run_ranks(1, _what_it_is)[0][0] != changed


def test_a_step_that_torch_has_wrapped_is_what_it_was() -> None:
    [(first, wrapped)] = run_ranks(1, _makes_an_optimizer_of_its_own)
    assert not wrapped
    assert run_ranks(1, _makes_an_optimizer_of_its_own) == [(first, True)]


def test_no_process_that_has_used_a_mesh_meets_groups_of_other_names() -> None:
    first = run_ranks(2, _shards_a_tensor, 3)
    assert not set(first) & set(run_ranks(2, _shards_a_tensor, 0))


def test_a_fresh_process_does_one_case() -> None:
    [kept] = run_ranks(1, _what_it_is)
    [fresh] = run_ranks(1, _what_it_is, fresh=True)
    assert fresh[0] != kept[0]
    assert run_ranks(1, _what_it_is) == [kept]


def test_a_rank_that_fails_or_leaves_a_thread_of_ours_is_named_and_none_of_its_case_is_used_again() -> None:
    before = {one[0] for one in run_ranks(2, _what_it_is)}
    with pytest.raises(RankFailed, match="rank 1 raised: "):
        run_ranks(2, _fails_alone)
    after = {one[0] for one in run_ranks(2, _what_it_is)}
    assert not after & before
    with pytest.raises(RankFailed, match=r"threads left behind: \['pipesgd-communication'\]"):
        run_ranks(1, _leaves_a_thread_of_ours)
