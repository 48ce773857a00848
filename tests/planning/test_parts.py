"""The parts that a run is expected to gather: the bytes of its first step, on real ranks, and the plan made of them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from _plans import choose, cluster
from _ranks import run_ranks
from _sections import sections
from torch import nn

from pipesgd.cli import parse
from pipesgd.data import ShardedBatches
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.planning.parts import parts_of_run
from pipesgd.ranks import Ranks
from pipesgd.run.workload import load
from pipesgd.systems.exchanges.fewest_bytes import fewest_bytes
from timing_model.params import Parts


class Words(nn.Module):
    """Scores of texts of eight of 500 words, of which a batch uses few."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 8)
        self.scores = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        words: torch.Tensor = (images.flatten(1)[:, :64:8].abs() * 31).long() % 500
        scores: torch.Tensor = self.scores(self.words(words).mean(dim=1))
        return scores


def _first_step(ranks: Ranks, words: str, own: bool) -> dict[str, Any]:
    """Return the parts that are expected, and what is sent in the first step in addition to whole gradients."""
    config = parse(["--batch-size", "4", "--hidden-sizes", "200", *words.split()])
    whole = config.with_options(reduce="matrix")
    _, batches, model, _ = load(whole, ranks)  # the data set's own model may have nothing to gather
    if own:
        torch.manual_seed(0)
        model = Words()
    before, state = [one.detach().clone() for one in model.parameters()], torch.get_rng_state()
    reduce: Any = config.wire.reduce
    if reduce == "auto":
        reduce = fewest_bytes(model, 4, config.compression.chosen().make(), ranks.world_size)
    parts = parts_of_run(config, ranks, model, batches, reduce)
    same = all(map(torch.equal, before, model.parameters())) and torch.equal(state, torch.get_rng_state())
    options = {"reduce": reduce, "codec": config.compression.chosen()}
    sent = _sent(ranks, model, batches, **options)
    return {"parts": parts, "same": same and all(one.grad is None for one in model.parameters()), **sent}


def _sent(ranks: Ranks, model: nn.Module, batches: ShardedBatches, **options: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Pipelined(model, optimizer, width=1, ranks=ranks, **sections(**options)) as pipeline:
        with contextlib.closing(batches.from_iteration(0)) as samples:
            inputs, targets = next(samples)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        total = pipeline.step().wire_bytes
        flight, layout = pipeline.pipeline.flight, pipeline.pipeline.flight.layout
        whole = sum(
            flight.reducer.wire_bytes(bucket, 0)
            for bucket, how in zip(flight.free_buffer().buckets, layout.exchange, strict=True)
            if how == "matrix"
        )
        pairs = zip(layout.buckets, layout.exchange, strict=True)
        gathered = [list(indices) for indices, how in pairs if how != "matrix"]
    return {"sent": total - whole, "gathered": gathered}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "own", "messages"),
    [
        ("--reduce factors", False, [2]),
        ("--reduce auto --codec int8", False, [2]),
        ("--reduce rows", True, [3]),
        ("--reduce auto", True, [2, 3]),
    ],
)
def test_parts_are_those_of_the_first_step(words: str, own: bool, messages: list[int]) -> None:
    first, second = run_ranks(2, _first_step, words, own)
    assert first["parts"] == second["parts"]
    assert first["same"]
    assert second["same"]
    parts: tuple[Parts, ...] = first["parts"]
    assert [list(one.tensors) for one in parts] == first["gathered"]
    assert sum(one.nbytes for one in parts) == first["sent"] == second["sent"] > 0
    assert [one.messages for one in parts] == messages
    assert all(0 < one.work < 5 for one in parts)


def test_the_plan_is_made_of_the_parts() -> None:
    """AlexNet's case: nearly all bytes are in one layer."""
    parts = [Parts(tensors=(0, 2), nbytes=40_000.0, messages=2, work=0.001)]
    words = "--width auto --all-reduce auto --reduce factors"
    gathered, whole = choose(cluster(), words, parts=parts), choose(cluster(), "--width auto --all-reduce auto")
    assert gathered.iteration_seconds < whole.iteration_seconds
    assert gathered.choices["all-reduce"] != "native"
    assert gathered.support == "extrapolated"
    assert gathered.reasons == ["parts of gradients are gathered; measured: sums of whole gradients"]


def test_whole_gradients_have_no_parts() -> None:
    config = parse(["--batch-size", "4"])
    ranks: Any = None  # nobody is asked
    assert parts_of_run(config, ranks, nn.Linear(1, 1), ranks, "matrix") == ()
