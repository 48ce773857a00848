"""The parts that a run is expected to gather: the bytes of its first step, on real ranks, and the plan made of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _plans import SMALL, choose, cluster
from _ranks import run_ranks
from torch import nn

from pipesgd.cli import parse
from pipesgd.codecs.make import make_codec
from pipesgd.data import ShardedBatches
from pipesgd.errors import RunError, UserInputError
from pipesgd.pipeline.exchanges import fewest_bytes
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.planning import audition
from pipesgd.planning.parts import parts_of_run
from pipesgd.ranks import Ranks
from pipesgd.run.console import screen
from pipesgd.run.workload import load
from pipesgd.train import train
from timing_model import LinkParams
from timing_model.cluster_profile import Profile
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
    whole = dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, reduce="matrix"))
    _, batches, model, _ = load(whole, ranks)  # the data set's own model may have nothing to gather
    if own:
        torch.manual_seed(0)
        model = Words()
    before, state = [one.detach().clone() for one in model.parameters()], torch.get_rng_state()
    reduce: Any = config.pipeline.reduce
    if reduce == "auto":
        reduce = fewest_bytes(model, 4 * (8 if own else 1), make_codec(config.compression), ranks.world_size)
    parts = parts_of_run(config, ranks, model, batches, reduce)
    same = all(map(torch.equal, before, model.parameters())) and torch.equal(state, torch.get_rng_state())
    options = {"reduce": reduce, "codec": config.compression}
    sent = _sent(ranks, model, batches, **options)
    return {"parts": parts, "same": same and all(one.grad is None for one in model.parameters()), **sent}


def _sent(ranks: Ranks, model: nn.Module, batches: ShardedBatches, **options: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Pipelined(model, optimizer, width=1, ranks=ranks, **options) as pipeline:
        with contextlib.closing(batches.from_iteration(0)) as samples:
            inputs, targets = next(samples)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        total = pipeline.step().wire_bytes
        whole = sum(
            pipeline._summing.reducer.wire_bytes(bucket, 0)
            for number, bucket in enumerate(pipeline._packing.free_buffer().buckets)
            if pipeline._cut.exchange_of(number) == "matrix"
        )
        gathered = [
            list(indices)
            for number, indices in enumerate(pipeline._cut.indices)
            if pipeline._cut.exchange_of(number) != "matrix"
        ]
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


FEW = dataclasses.replace(SMALL, batch_size=4)
CLOSE = LinkParams(alpha=1e-4, beta=2e-7, gamma=0.0, sync=0.0)
"""A link with which all widths are predicted to be about equally fast."""
RUN = "--hidden-sizes 20 --batch-size 4 --lr 0.05 --iterations 60 --checkpoint-iterations 5 --keep-checkpoints 100"


def _train(ranks: Ranks, words: list[str]) -> tuple[str, str]:
    """Run once, with auditions that may take any share of the run; return (text of the error, stdout)."""
    audition.MOST_SHARE = 1e3
    out = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            train(words, ranks, screen(ranks, out))
            return "", out.getvalue()
        except (UserInputError, RunError) as failure:
            return str(failure), out.getvalue()


def _trained(folder: Path, words: str) -> tuple[dict[str, Any], str]:
    """Return (summary, output of rank 0) of a run of two ranks."""
    cluster(CLOSE, FEW).save(folder / "cluster.toml")
    options = [*words.split(), "--cluster", str(folder / "cluster.toml"), "--output", str(folder / "run")]
    (error, text), (other, _) = run_ranks(2, _train, options, process_group=False)
    assert (error, other) == ("", "")
    return json.loads((folder / "run" / "summary.json").read_text()), text


@pytest.mark.slow
def test_a_run_with_factors_is_planned_auditions_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    words = f"{RUN} --width auto --reduce auto"
    found, text = _trained(tmp_path, words)
    turns = found["planned"]["audition"]["turns"]
    assert len({choices["width"] for _, choices in turns}) > 1, "the pipeline was changed"
    assert "--reduce auto: 1.weight by factors, 3.weight by factors" in text
    assert "parts of gradients are gathered; measured: sums of whole gradients" in text
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert recorded["exchanges"] == {"1.weight": "factors", "3.weight": "factors"}
    assert recorded["planned"]["audition"]["turns"] == turns
    assert Profile.load(tmp_path / "run" / "cluster.toml").compute[0].measured == ()
    biases, parts = 20 + 10, 4 + 4 * 4 * (64 + 20) + 4 + 4 * 4 * (20 + 10)
    # What arrives while a pipeline is emptied is in no iteration's report.
    assert 0.9 * (parts + 4 * biases) < found["wire_bytes_per_iteration"] <= parts + 4 * biases
    middle = turns[1][0] + 5
    (tmp_path / "run" / "summary.json").unlink()
    for path in (tmp_path / "run" / "checkpoints").glob("iteration-*"):
        if int(path.name.partition("-")[2]) > middle:
            shutil.rmtree(path)
    resumed, text = _trained(tmp_path, f"{words} --resume")
    assert "continuing after iteration" in text
    assert resumed["weights_sha256"] == found["weights_sha256"]
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert recorded["exchanges"] == {"1.weight": "factors", "3.weight": "factors"}


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
