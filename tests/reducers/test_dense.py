"""Gradients through codecs: between processes in the pipelined strategy, and allocations of an all-reduce."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _memory_transport import MemoryTransport, run_threads
from _ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipesgd import Pipelined
from pipesgd.codecs.options import DENSE_CODECS, CodecOptions, codec_named
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates, Wire
from timing_model.schedules import SCHEDULES, hierarchical

pytestmark = pytest.mark.slow

ITERATIONS = 6


def small(codec: str, **others: Any) -> CodecOptions:
    """Return options with several blocks in each message of a small model."""
    block = {} if codec in ("fp32", "truncate16", "bf16", "fp16") else {"block": 16}
    return codec_named(codec, **block, **others)


class Run:
    """A small model in training; each rank has its own batches."""

    def __init__(
        self, ranks: Ranks, codec: CodecOptions, width: int, dtype: torch.dtype = torch.float32, seed: int = 0
    ):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3)).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.pipeline = Pipelined(
            self.model,
            self.optimizer,
            width=width,
            codec=codec,
            ranks=ranks,
            updates=Updates(prediction="none"),
            wire=Wire(segment_bytes=64),
        )
        self._rank, self._dtype = ranks.rank, dtype

    def iterate(self, begin: int, end: int) -> list[str]:
        """Train; return the hash of the weights after each iteration."""
        hashes = []
        for iteration in range(begin, end):
            generator = torch.Generator().manual_seed(1000 * iteration + self._rank)
            inputs = torch.randn(5, 9, generator=generator).to(self._dtype)
            self.model(inputs).float().square().mean().backward()
            self.pipeline.step()
            hashes.append(weights_sha256(self.model))
        return hashes

    def finish(self) -> str:
        self.pipeline.flush()
        self.pipeline.close()
        return weights_sha256(self.model)


# --- Between processes ------------------------------------------------------------------------------------------------

LOSSY = [
    small("int8"),
    small("int8", rounding="stochastic", error_feedback=True),
    small("int4"),
    small("ternary"),
    small("ternary", error_feedback=True),
    small("sign"),
]


def _hashes_with_every_codec(ranks: Ranks) -> list[list[str]]:
    results = []
    for codec in LOSSY:
        for width in (1, 2):
            run = Run(ranks, codec, width)
            results.append([*run.iterate(0, ITERATIONS), run.finish()])
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicas_are_identical_after_every_iteration(world_size: int) -> None:
    of_ranks = run_ranks(world_size, _hashes_with_every_codec)
    assert all(hashes == of_ranks[0] for hashes in of_ranks)
    assert all(len(set(hashes)) >= ITERATIONS for hashes in of_ranks[0]), "the weights did not move"
    ends = {hashes[-1] for hashes in of_ranks[0]}
    assert len(ends) == (2 if world_size == 1 else 2 * len(LOSSY)), "each codec leaves its own; on one rank none does"


def _continued(ranks: Ranks) -> list[tuple[list[str], list[str], list[str]]]:
    results = []
    for codec in LOSSY:
        whole = Run(ranks, codec, 2)
        expected = [*whole.iterate(0, ITERATIONS), whole.finish()]
        first = Run(ranks, codec, 2)
        first.iterate(0, 3)
        weights, momentum = copy.deepcopy([first.model.state_dict(), first.optimizer.state_dict()])
        saved = first.pipeline.state_dict()
        first.iterate(3, 5)  # must not change the saved state
        first.finish()
        outcomes = []
        for forget in (False, True):
            second = Run(ranks, codec, 2, seed=1)
            fresh = {"reducer": second.pipeline.state_dict()["reducer"]} if forget else {}
            second.model.load_state_dict(weights)
            second.optimizer.load_state_dict(copy.deepcopy(momentum))
            second.pipeline.load_state_dict({**saved, **fresh})
            outcomes.append([*second.iterate(3, ITERATIONS), second.finish()])
        results.append((expected[3:], *outcomes))
    return results


def test_a_saved_exchange_continues_bit_for_bit() -> None:
    """Residuals are included, without which the trajectory differs; random numbers depend on the iteration alone."""
    for results in run_ranks(2, _continued):
        for codec, (expected, continued, without_exchange) in zip(LOSSY, results, strict=True):
            assert continued == expected, codec.describe()
            assert (without_exchange == expected) == (not codec.gives_back), codec.describe()


def _train_other_dtypes(ranks: Ranks) -> list[bool]:
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        for codec in LOSSY:
            run = Run(ranks, codec, 2, dtype)
            hashes = run.iterate(0, ITERATIONS)
            run.finish()
            moved = len(set(hashes)) > ITERATIONS // 2
            same = len(set(ranks.all_gather_object("hashes", hashes[-1]))) == 1
            finite = all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())
            right = all(parameter.dtype == dtype for parameter in run.model.parameters())
            results.append(moved and same and finite and right)
    return results


def test_gradients_of_other_dtypes_go_through_float32() -> None:
    assert run_ranks(2, _train_other_dtypes) == [[True] * 2 * len(LOSSY)] * 2


def _alone(ranks: Ranks) -> list[str]:
    ends = []
    for codec in DENSE_CODECS:
        run = Run(ranks, small(codec), 2)
        run.iterate(0, ITERATIONS)
        ends.append(run.finish())
    return ends


def test_on_one_rank_no_codec_changes_anything() -> None:
    (ends,) = run_ranks(1, _alone)
    assert len(ends) == len(DENSE_CODECS)
    assert len(set(ends)) == 1


# --- Memory -----------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """A mode that records each tensor made on this thread that has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if not self.paused and isinstance(leaf, Tensor) and leaf.nbytes and _memory(leaf) not in given:
                self.made.append(str(func))
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        yield
        self.paused = False


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


ALGORITHMS = {**SCHEDULES, "hierarchical": lambda rank, p: hierarchical(rank, p, 2)}


def allocations(name: str, codec: str, world_size: int, waste: Callable[[], object] = lambda: None) -> list[list[str]]:
    """Return the allocations in each of three calls of one rank, without those for the transport's own copies."""

    def reduce(transport: MemoryTransport) -> list[list[str]]:
        mode = Allocations()
        send = transport.send

        def quiet_send(tensor: Tensor, peer: int, what: str) -> Any:
            with mode.pause():
                return send(tensor, peer, what)

        transport.send = quiet_send  # type: ignore[method-assign]
        schedule = ALGORITHMS[name](transport.rank, world_size)
        all_reduce = ScheduledAllReduce(transport, schedule, small(codec).make(), segment_bytes=64)
        flat, residual = torch.ones(333), None if codec == "fp32" else torch.zeros(333)
        calls = []
        for key in range(3):
            mode.made = []
            if transport.rank == 1:
                with mode:
                    all_reduce(flat, residual, key)
                    waste()
            else:
                all_reduce(flat, residual, key)
            calls.append(mode.made)
        return calls

    calls: list[list[str]] = run_threads(world_size, reduce)[0][1]
    return calls


@pytest.mark.parametrize("codec", ["fp32", "int8", "sign"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_the_first_all_reduce_of_a_buffer_allocates(name: str, codec: str) -> None:
    for world_size in (2, 4, 6):
        first, *later = allocations(name, codec, world_size)
        assert first, "the scratch space"
        assert later == [[], []]


def test_an_allocation_would_be_seen() -> None:
    _, *later = allocations("ring", "int8", 3, waste=lambda: torch.ones(1) + 1)
    assert [len(made) for made in later] == [2, 2]
