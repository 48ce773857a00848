"""Headers that tell ranks in different calls or iterations apart before anything is added up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _memory_transport import MemoryTransport, run_threads
from _ranks import run_ranks
from _sections import sections
from torch import nn

from pipesgd import Pipelined
from pipesgd.comm.headers import Headers
from pipesgd.errors import CommunicationError, OutOfStepError
from pipesgd.ranks import Ranks
from pipesgd.sections import Wire
from timing_model.schedules import ALL_REDUCES

pytestmark = pytest.mark.slow


def test_headers_of_the_same_call_and_iteration_pass() -> None:
    def meet(transport: MemoryTransport) -> tuple[int, int]:
        headers = Headers(transport)
        for iteration in range(3):
            headers.begin("step", iteration)
            headers.check()
            headers.check()  # a second call sends nothing
        return headers.tag, transport.bytes_sent

    for world_size in (1, 2, 3):
        results, _ = run_threads(world_size, meet)
        assert len(set(results)) == 1
        assert results[0][1] == (3 * 16 if world_size > 1 else 0)


def test_every_call_and_iteration_has_a_tag_of_its_own() -> None:
    headers = Headers(run_threads(1, lambda transport: transport)[0][0])
    tags = set()
    for iteration in range(100):
        for call in ("step", "flush", "combine_buffers", "close"):
            headers.begin(call, iteration)
            tags.add(headers.tag)
    assert len(tags) == 400
    headers.begin("close", 2**40)
    assert 0 < headers.tag < 2**31, "gloo's tags have 31 bits"


def test_a_rank_in_another_call_is_named_with_both_calls_and_iterations() -> None:
    def meet(transport: MemoryTransport) -> str | None:
        headers = Headers(transport)
        headers.begin(*(("flush", 3) if transport.rank == 1 else ("step", 4)))
        try:
            headers.check()
        except OutOfStepError as error:
            return str(error)
        return None

    results, _ = run_threads(3, meet)
    assert results[0] is None, "rank 2 is where rank 0 is"
    assert results[1].startswith("rank 1 is at flush in iteration 3, but rank 0 is at step in iteration 4: ")
    assert results[2].startswith("rank 2 is at step in iteration 4, but rank 1 is at flush in iteration 3: ")
    assert results[2].endswith("need the same number of batches for that (drop_last=True)")


def _uneven(ranks: Ranks, all_reduce: str, then: str, group_of: int, paced: bool = False) -> Any:
    """Give the last ``group_of`` ranks one batch more than the others, who then continue with another call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace: dict[str, Any] = {"rate_limit": "1mbit", "segment_bytes": 64} if paced else {}
    pipeline = Pipelined(model, optimizer, width=1, ranks=ranks, **sections(all_reduce=all_reduce, timeout=3.0, **pace))
    try:
        for _ in range(4 if ranks.rank >= ranks.world_size - group_of else 3):
            model(torch.ones(5, 4)).square().mean().backward()
            pipeline.step()
        getattr(pipeline, then)()
    except (OutOfStepError, CommunicationError) as error:
        return type(error), str(error)
    finally:
        pipeline.close()
        ranks.all_gather_object("the others", None)  # so that no rank fails because another one is gone
    return None


@pytest.mark.parametrize("then", ["flush", "combine_buffers", "close"])
def test_uneven_numbers_of_batches_end_with_a_line_that_names_both(then: str) -> None:
    """The message of the buffers was shorter than the gradient's: gloo terminated the process (SIGABRT)."""
    _, error = run_ranks(2, _uneven, "ring", then, 1)
    assert error[0] is OutOfStepError
    assert error[1].startswith(f"rank 1 is at step in iteration 3, but rank 0 is at {then} in iteration 3: ")


def test_a_rank_that_waits_for_a_paced_message_to_leave_compares_headers_first() -> None:
    _, error = run_ranks(2, _uneven, "ring", "flush", 1, True)
    assert error[0] is OutOfStepError
    assert error[1].startswith("rank 1 is at step in iteration 3, but rank 0 is at flush in iteration 3: ")


@pytest.mark.parametrize("all_reduce", sorted(set(ALL_REDUCES) - {"hierarchical"}))
def test_ranks_out_of_step_never_add_up_or_abort_with_any_all_reduce(all_reduce: str) -> None:
    """Half of the ranks are in another call, so some partners of one call have neighbours that are in it too."""
    results = run_ranks(4, _uneven, all_reduce, "combine_buffers", 2)
    assert [results[rank][0] for rank in (0, 2)] == [OutOfStepError] * 2, "the ranks whose left neighbour is elsewhere"
    heard = () if Wire(all_reduce=all_reduce).transport_on("cpu") == "gloo" else (OutOfStepError,)
    assert all(issubclass(results[rank][0], (CommunicationError, *heard)) for rank in (1, 3)), "the rest wait for these"
