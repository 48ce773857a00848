"""A loop of the user's own whose ranks may be lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipesgd
from experiments.forked_ranks import rank_environment, store
from pipesgd import elastic
from pipesgd.errors import UserInputError
from pipesgd.replicas import weights_sha256

pytestmark = pytest.mark.slow

ITERATIONS, KILLED, AT = 40, 1, 15

Train = Callable[[Path, pipesgd.Wire], None]


def _train(folder: Path, wire: pipesgd.Wire) -> None:
    torch.manual_seed(0)
    ranks = elastic.join(least=2)
    model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shares = []
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire, codec="int8") as pipeline:
        for share in ranks.iterations(ITERATIONS):
            if int(os.environ["RANK"]) == KILLED and share.iteration == AT:
                os.kill(os.getpid(), signal.SIGKILL)
            shares.append(
                [share.iteration, share.slice, share.rank, share.world_size, [one.member for one in share.lost]]
            )
            numbers = torch.Generator().manual_seed(share.slice)
            model(torch.randn(8, 10, generator=numbers)).square().mean().backward()
            pipeline.step()
    text = json.dumps([weights_sha256(model), shares])
    (folder / f"{os.environ['RANK']}.json").write_text(text, encoding="utf-8")


def _fork(rank: int, port: int, folder: Path, wire: pipesgd.Wire, train: Train) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (folder / "log").open("a", encoding="utf-8") as log:
            sys.stdout = sys.stderr = log
            os.environ.update(rank_environment(rank, 3, port, 0))
            torch.set_num_threads(1)
            try:
                train(folder, wire)
                code = 0
            except UserInputError as problem:
                (folder / f"{rank}.error").write_text(str(problem), encoding="utf-8")
                code = 2
    finally:
        os._exit(code)


def _run(folder: Path, wire: pipesgd.Wire, train: Train = _train) -> list[int]:
    with store() as port:
        pids = [_fork(rank, port, folder, wire, train) for rank in range(3)]
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_the_others_continue_with_their_shares(tmp_path: Path) -> None:
    codes = _run(tmp_path, pipesgd.Wire(transport="tcp"))
    assert codes == [0, -9, 0], (tmp_path / "log").read_text(encoding="utf-8")
    (first, shares), (other, others) = (
        json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 2)
    )
    assert first == other
    assert [one[0] for one in shares] == list(range(ITERATIONS))
    lost: list[Any] = [one for one in shares if one[4]]
    assert [one[4] for one in lost] == [[KILLED]]
    assert [one[2:4] for one in shares[-5:]] == [[0, 2]] * 5
    assert [one[2:4] for one in others[-5:]] == [[1, 2]] * 5
    slices = [one[1] for one in (*shares, *others)]
    assert len(set(slices)) == len(slices)


def test_a_wire_that_cannot_lose_ranks_is_refused(tmp_path: Path) -> None:
    assert _run(tmp_path, pipesgd.Wire()) == [2, 2, 2]
    line = (tmp_path / "0.error").read_text(encoding="utf-8")
    assert line == "transport must be tcp or tls with --elastic, since gloo's waits cannot be ended; got gloo"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"least": 0}, "least must be at least 1; got 0"),
        ({"transport": "gloo"}, "transport must be tcp or tls; got 'gloo'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserInputError, match=line):
        elastic.join(**given)


# ---- What a unit's result shows


def _combine(folder: Path, wire: pipesgd.Wire) -> None:
    """Combine the buffers of a model that has none: nothing is summed. Rank 1 comes late."""
    ranks = elastic.join(least=2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire) as pipeline:
        for _ in ranks.iterations(1):
            model(torch.ones(2, 3)).sum().backward()
            pipeline.step()
            if ranks.rank == 1:
                time.sleep(LATE_SECONDS)
            begun = time.monotonic()
            pipeline.combine_buffers()
            ended = time.monotonic()
    (folder / f"{ranks.rank}.json").write_text(json.dumps([begun, ended]), encoding="utf-8")


LATE_SECONDS = 0.5


def test_a_unit_without_a_sum_ends_when_all_have_begun_it(tmp_path: Path) -> None:
    """Else a survivor could hold its result whom others are two units behind: none has what they miss."""
    assert _run(tmp_path, pipesgd.Wire(transport="tcp"), _combine) == [0, 0, 0], (tmp_path / "log").read_text("utf-8")
    times = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]
    assert min(ended for _, ended in times) >= max(begun for begun, _ in times)
