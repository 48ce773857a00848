"""Each number of ranks that continues what each other number began: nothing is lost, and nothing is applied twice.

Gradients depend on the samples alone, and the learning rate is 1, so the movement of the weights is the mean of what
was put in, up to what codecs have left out. Sums over the ranks are compared: those of the part before and those after
the change, with the residuals that cross it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _sections import sections
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesgd import LocalSteps, Pipelined, Windows
from pipesgd.codecs.options import codec_named
from pipesgd.ddp import attach, compress
from pipesgd.membership.record import Record
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

SHAPE = (3, 70)
BEFORE, AFTER = 11, 10
"""Iterations before and after the change."""
SETTINGS: dict[str, dict[str, Any]] = {
    "exact": {"width": 2},
    "width 1 int8": {"width": 1, "codec": codec_named("int8", error_feedback=True)},
    "width 2 int8": {"width": 2, "codec": codec_named("int8", error_feedback=True)},
    "width 3 int4": {"width": 3, "codec": "int4"},
    "width 2 int4, 8 local steps": {"width": 2, "codec": "int4", "windows": 8},
}
MORE: dict[str, dict[str, Any]] = {
    "buckets": {"width": 2, "codec": "int4", "buckets": "2"},
    "powersgd": {"width": 2, "codec": codec_named("powersgd", low_rank=1)},
    "attach": {"width": 2, "codec": "int4", "door": "attach"},
    "attach, local steps": {"width": 2, "codec": "int4", "windows": 3, "door": "attach"},
    "compress": {"codec": "int4", "door": "compress"},
    "compress powersgd": {"codec": codec_named("powersgd", low_rank=1), "door": "compress"},
}


def _gradient(epoch: int, number: int) -> Tensor:
    """Return the gradient of a slice of the samples."""
    return torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1000 * epoch + number))


class Model(nn.Module):
    """Two matrices, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)])

    def forward(self, inputs: Tensor) -> Tensor:
        return sum(((weight * part).sum() for weight, part in zip(self.weights, inputs, strict=True)), torch.zeros(()))


class Trained:
    """A model in one of the doors, and what trains it."""

    def __init__(self, ranks: Ranks, options: dict[str, Any]):
        options = dict(options)
        door, windows = options.pop("door", None), options.pop("windows", None)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.called: nn.Module = self.model
        self.pipeline: Any
        window = None if windows is None else Windows(local_steps=windows, outer_lr=1.0)
        if door is not None:
            self.called = DistributedDataParallel(self.model, bucket_cap_mb=1e-4)
        self.loop_steps = door is not None
        if door == "compress":
            self.pipeline = compress(self.called, **options)
        elif door == "attach":
            self.pipeline = attach(self.called, self.optimizer, windows=window, **sections(**options))
        elif window is not None:
            self.pipeline = LocalSteps(self.model, self.optimizer, window, ranks=ranks, **sections(**options))
        else:
            self.pipeline = Pipelined(self.model, self.optimizer, ranks=ranks, **sections(**options))

    def step(self, inputs: Tensor) -> None:
        self.called(inputs).backward()
        if self.loop_steps:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.pipeline.step()


def _part(
    ranks: Ranks, folder: Path, settings: dict[str, dict[str, Any]], before: int | None, iterations: range
) -> dict[str, dict[str, Any]]:
    """Train one part in each of these settings; return the slices, the inputs, and the state at its end."""
    found = {}
    for name, options in settings.items():
        trained = Trained(ranks, options)
        record = Record.begun(8 * (before or ranks.world_size), before or ranks.world_size)
        with trained.pipeline:
            if before is not None:
                states = [torch.load(folder / f"{name} {before} {rank}.pt") for rank in range(before)]
                trained.model.load_state_dict(states[0]["model"])
                trained.pipeline.load_members([state["pipeline"] for state in states])
                record = record.changed(iterations.start, ranks.world_size)
            slices = [record.slice_of(iteration, ranks.rank) for iteration in iterations]
            for one in slices:
                trained.step(_gradient(*one))
            state = trained.pipeline.state_dict()
            saved = {"pipeline": state, "model": trained.model.state_dict()}
            if before is None:
                torch.save(saved, folder / f"{name} {ranks.world_size} {ranks.rank}.pt")
            elif "flush" in dir(trained.pipeline):
                trained.pipeline.flush()
                saved = {"pipeline": trained.pipeline.state_dict(), "model": trained.model.state_dict()}
            weights = torch.stack([one.detach().double() for one in saved["model"].values()])
            found[name] = {
                "slices": slices,
                "inputs": [_gradient(*one).double() for one in slices],
                "weights": weights,
                "in flight": _in_flight(saved["pipeline"]),
                "residual": _residual(saved["pipeline"]),
            }
    return found


def _in_flight(state: dict[str, Any]) -> Tensor:
    """Return the sum of the means in flight in a state."""
    total = torch.zeros(2, *SHAPE, dtype=torch.float64)
    for gradient in state.get("pipeline", state).get("in_flight", []):
        total += _in_order([flat.double() for flat in gradient["flats"]])
    return total


def _residual(state: dict[str, Any]) -> Tensor:
    """Return what a rank's codec has left out, and what is to be added to its next gradient."""
    if "kept" in state:  # of compress, by parameter
        values = [own[0].double() if own else torch.zeros(SHAPE[0] * SHAPE[1]).double() for own in state["kept"]]
        for place, value in state["carried"].items():
            values[place] = values[place] + value
        return torch.stack(values).view(2, *SHAPE)
    state = state.get("pipeline", state)
    total = torch.zeros(2, *SHAPE, dtype=torch.float64)
    for residuals in (state["reducer"].get("residuals"), list(state["carried"].values())):
        if residuals:
            total += _in_order([one.double() for one in residuals])
    return total


def _in_order(flats: list[Tensor]) -> Tensor:
    """Return both matrices of a gradient; two buckets leave in reverse order."""
    return torch.cat(list(reversed(flats))).view(2, *SHAPE)


def _check(
    options: dict[str, Any], ranks: int, others: int, begun: list[dict[str, Any]], continued: list[dict[str, Any]]
) -> None:
    """Check the sums of both parts, each in terms of its ranks, and that no slice is missing or given twice."""
    slices = [
        one["slices"][number] for part in (begun, continued) for number in range(len(part[0]["slices"])) for one in part
    ]
    per_epoch = 8 * ranks
    assert slices == [divmod(number, per_epoch) for number in range(len(slices))]
    assert all(torch.equal(one["weights"], continued[0]["weights"]) for one in continued)

    inputs, carried = (sum(one[name] for one in begun) for name in ("in flight", "residual"))
    window = options.get("windows", 1)
    whole = BEFORE // window * window
    exchanged = sum(sum(one["inputs"][:whole]) for one in begun)
    by_half = sum(sum(one["inputs"][whole:], torch.zeros(())) for one in begun)
    after = sum(sum(one["inputs"]) for one in continued)
    left = sum(one["residual"] for one in continued)
    size = sum(float(torch.stack(one["inputs"]).abs().sum(0).norm()) for one in (*begun, *continued))
    at_change = begun[0]["weights"] - inputs / ranks

    def differs(one: Tensor, other: Tensor) -> float:
        return float((one - other).norm()) / size

    assert differs(-ranks * at_change + carried, exchanged) < 1e-6
    moved = others * (at_change - continued[0]["weights"])
    assert differs(moved + left, carried + by_half * others / ranks + after) < 1e-6


class Begun:
    """The first parts of trainings, each done once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._found: dict[tuple[int, bool], list[dict[str, Any]]] = {}

    def by(self, ranks: int, settings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what each of ``ranks`` found."""
        key = ranks, settings is MORE
        if key not in self._found:
            self._found[key] = run_ranks(ranks, _part, self.folder, settings, None, range(BEFORE))
        return self._found[key]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    return Begun(tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("others", range(1, 7))
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_others_continue_in_each_setting(begun: Begun, ranks: int, others: int) -> None:
    _compare(begun, ranks, others, SETTINGS)


@pytest.mark.parametrize(("ranks", "others"), [(2, 3), (3, 2), (2, 1), (1, 2), (4, 2)])
def test_others_continue_in_every_door(begun: Begun, ranks: int, others: int) -> None:
    _compare(begun, ranks, others, MORE)


def _compare(begun: Begun, ranks: int, others: int, settings: dict[str, dict[str, Any]]) -> None:
    first = begun.by(ranks, settings)
    then = run_ranks(others, _part, begun.folder, settings, ranks, range(BEFORE, BEFORE + AFTER))
    for name, options in settings.items():
        _check(options, ranks, others, [one[name] for one in first], [one[name] for one in then])
