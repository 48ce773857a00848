"""Values that a codec leaves out are sent later, are kept, or were a lost rank's: sums miss nothing else."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipesgd
from experiments.forked_ranks import fork_rank, store
from pipesgd import elastic
from pipesgd.elastic import leaving
from pipesgd.errors import LeftBehind
from pipesgd.membership.generation import Record

pytestmark = pytest.mark.slow

ITERATIONS, VALUES, RANKS = 40, 150_000, 5
KILLED, KILLED_AT, LEAVE_AT = 4, 12, 24


class Counted(torch.optim.SGD):
    """SGD that keeps the gradients that it is given."""

    def __init__(self, parameters: Iterator[nn.Parameter]):
        super().__init__(parameters, lr=0.01)
        self.given: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        (parameter,) = self.param_groups[0]["params"]
        self.given.append(parameter.grad.double())
        return super().step(closure)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(VALUES))


def _gradient(number: int) -> Tensor:
    """Return the gradient of slice ``number``."""
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(number))


def _left_out(state: dict[str, Any]) -> Tensor:
    """Return what a rank has left out by a ``state_dict`` of its pipeline, and has not sent."""
    found = torch.zeros(VALUES, dtype=torch.float64)
    for one in (*state["reducer"]["residuals"], *state["carried"].values()):
        found += one
    return found


def _train(folder: Path, width: int, leavers: Collection[int]) -> int:
    warnings.filterwarnings("ignore", "the pipeline was closed after an error")  # of the rank that leaves
    leaving.SIGNALS_SECONDS = 0.0
    ranks = elastic.join(least=1)
    me = ranks.rank
    model = Weights()
    optimizer = Counted(model.parameters())
    updates = pipesgd.Updates(prediction="none")
    wire = pipesgd.Wire()
    pipeline = pipesgd.Pipelined(model, optimizer, width=width, codec="int4", ranks=ranks, wire=wire, updates=updates)
    try:
        with ranks, pipeline:
            for share in ranks.iterations(ITERATIONS):
                if (me, share.iteration) == (KILLED, KILLED_AT):
                    torch.save(_left_out(pipeline.state_dict()), folder / "killed")
                    os.kill(os.getpid(), signal.SIGKILL)
                if me in leavers and share.iteration == LEAVE_AT:
                    ranks.members.leaving.signal = lambda: "SIGTERM"
                time.sleep(0.05 if share.iteration > LEAVE_AT else 0)  # it is not done before the change begins
                (model.values * _gradient(share.slice)).sum().backward()
                pipeline.step()
            pipeline.flush()
            left_out = _left_out(pipeline.state_dict())
    except LeftBehind:
        return 143
    history = [record for record, _ in ranks.members.history]
    torch.save([optimizer.given, history, left_out], folder / f"rank {me}")
    return 0


def _settled(history: list[Record], iteration: int) -> Record:
    """Return the generation that has summed the gradients of ``iteration``."""
    return next(record for record in reversed(history) if record.settled <= iteration)


@pytest.mark.parametrize(("width", "leavers"), [(1, {1}), (2, {1}), (2, {0, 1})])
def test_sums_and_what_is_left_out_are_what_was_put_in(tmp_path: Path, width: int, leavers: set[int]) -> None:
    """One rank of five is killed; others leave, whose share those who stay take over."""
    with store() as port:
        pids = [
            fork_rank(partial(_train, tmp_path, width, leavers), rank, RANKS, tmp_path, port) for rank in range(RANKS)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert codes == [143 if rank in leavers else -9 if rank == KILLED else 0 for rank in range(RANKS)], log
    stay = sorted({*range(RANKS)} - leavers - {KILLED})
    found = [torch.load(tmp_path / f"rank {rank}", weights_only=False) for rank in stay]
    given, history, _ = found[0]
    assert history[-1].members == tuple(stay)
    assert len(given) == ITERATIONS
    for others, _, _ in found:
        assert all(one.equal(two) for one, two in zip(given, others, strict=True)), "replicas differ"

    put_in = torch.zeros(VALUES, dtype=torch.float64)
    applied = torch.zeros(VALUES, dtype=torch.float64)
    for iteration, mean in enumerate(given):
        record = _settled(history, iteration)
        took_part = record.contributors(iteration)
        applied += len(took_part) * mean
        for member in took_part:
            number = record.slice_of(iteration, member)
            assert number is not None
            put_in += _gradient(number)
    lost = torch.load(tmp_path / "killed")
    missing = put_in - lost - applied - sum(left_out for _, _, left_out in found)
    assert lost.abs().max() > 0.01, "int4 has left out nothing"
    assert missing.abs().max() <= 1e-6 * put_in.abs().max()
