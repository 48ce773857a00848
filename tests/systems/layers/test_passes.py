"""Members of an island with samples of their own, passed to split layers by three schemes: trained as in one process.

Four ranks train everything, once, in two islands of two or in one of four; the tests look at what they have found.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import error_of, run_ranks
from _reference import pipe_sgd
from _runs import run_example
from _sections import sections
from _small_problem import Batch, assert_same_weights, regress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from pipesgd import Pipelined
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.systems.layers.passes import Passes
from pipesgd.systems.layers.splitting import split_layers

pytestmark = pytest.mark.slow

ITERATIONS, RANKS, SAMPLES, TARGETS = 3, 4, 4, 3
FEATURES = 36
"""Activations of a sample that enter the split layers."""


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3)


def linears() -> nn.Module:
    """Return a convolution, and linear layers above it."""
    below = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten())
    above = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))
    return nn.Sequential(OrderedDict(below=below, above=above)).double()


def rectified() -> nn.Module:
    """Return the same with a layer without weights first among those above."""
    model = linears()
    model.above = nn.Sequential(nn.ReLU(), *model.above).double()
    return model


def convolutions() -> nn.Module:
    """Return a convolution, and another one above it, which is to be split."""
    below = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh())
    above = nn.Sequential(nn.Conv2d(4, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(OrderedDict(below=below, above=above)).double()


LAYERS = {
    "pair": """
        layers."above.0" = {style = "colwise"}
        layers."above.2" = {style = "rowwise"}
    """,
    "after ReLU": """
        layers."above.1" = {style = "colwise"}
        layers."above.3" = {style = "rowwise"}
    """,
    "rowwise": 'layers."above.0" = {style = "rowwise", input = "whole"}',
    "filters": 'layers."above.0" = {style = "split-filters"}',
}


@dataclass(frozen=True)
class Case:
    """A run: who passes samples how, and options of ``Pipelined``."""

    scheme: str
    layers: str = "pair"
    members: int = 2
    update_period: int | None = None
    devices: str = ""
    width: int = 1
    prediction: str = "none"
    codec: str = "fp32"
    sharded: bool = False
    """True if FSDP2 shards the layers below over the members, and one pipeline trains all layers."""

    @property
    def make(self) -> Callable[[], nn.Module]:
        return {"filters": convolutions, "after ReLU": rectified}.get(self.layers, linears)

    @property
    def plan(self) -> str:
        period = "" if self.update_period is None else f"update_period = {self.update_period}\n"
        return f'scheme = "{self.scheme}"\n{period}{self.devices}\n{LAYERS[self.layers]}'

    @property
    def count(self) -> int:
        """Passes in an iteration."""
        return 1 if self.scheme == "gather" else self.members


WHOLE_BATCH = {
    "gather": Case("gather"),
    "turns": Case("turns"),
    "portions": Case("portions"),
    "portions of four, in another order": Case("portions", members=4, devices="devices = [2, 0, 3, 1]"),
    "turns of four": Case("turns", members=4),
    "width 2": Case("portions", width=2),
    "rowwise": Case("turns", layers="rowwise"),
    "after ReLU": Case("portions", layers="after ReLU"),
    "filters, gather": Case("gather", layers="filters", members=4),
    "filters, portions": Case("portions", layers="filters"),
    "FSDP2 below, gather": Case("gather", sharded=True),
    "FSDP2 below, turns": Case("turns", sharded=True, width=2),
}
"""Runs that update all weights once an iteration."""
VARIABLE_BATCH = {
    "turns, 1 of 2": Case("turns", update_period=1),
    "portions, 1 of 2": Case("portions", update_period=1),
    "turns, 2 of 4": Case("turns", members=4, update_period=2),
    "portions, 1 of 4": Case("portions", members=4, update_period=1),
}
"""Runs that update the layers above more often than those below."""
INT8 = Case("portions", update_period=1, width=2, prediction="eager", codec="int8")


def batches() -> list[list[Batch]]:
    """Return batches[iteration][rank]."""
    generator = torch.Generator().manual_seed(5)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return [[(draw(SAMPLES, 2, 5, 5), draw(SAMPLES, TARGETS)) for _ in range(RANKS)] for _ in range(ITERATIONS)]


@functools.cache
def mesh_of(members: int) -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS // members, members), mesh_dim_names=("islands", "inside"))


def _train(ranks: Ranks, case: Case, folder: Path) -> dict[str, Any]:
    mesh = mesh_of(case.members)
    torch.manual_seed(0 if case.sharded else ranks.rank)  # only the first rank's weights count, except for fully_shard
    model = case.make()
    path = folder / f"rank-{ranks.rank}.toml"
    path.write_text(case.plan, encoding="utf-8")
    passes = split_layers(model, mesh["inside"], path)
    options: dict[str, Any] = {"width": case.width, "prediction": case.prediction, "codec": case.codec}
    losses = []
    with contextlib.ExitStack() as pipelines:

        def pipeline(part: nn.Module, mesh: DeviceMesh | None) -> Pipelined:
            return pipelines.enter_context(
                Pipelined(part, make_optimizer(part.parameters()), mesh=mesh, **sections(**options))
            )

        if case.sharded:
            fully_shard(model.below, mesh=mesh["inside"])
            below, above = pipeline(model, mesh), None
        else:
            below, above = pipeline(model.below, None), pipeline(model.above, mesh)
        for of_ranks in batches():
            inputs, targets = of_ranks[ranks.rank]
            losses.append([])
            for number, (entering, wanted) in enumerate(passes(model.below(inputs), targets), start=1):
                loss = mse_loss(model.above(entering), wanted)
                (loss / passes.update_period).backward()
                losses[-1].append(loss.item())
                if above is not None and number % passes.update_period == 0:
                    above.step()
            below.step()
    return {
        "losses": losses,
        "below": weights_sha256(model.below),
        "above": weights_sha256(model.above),
        "weights": {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()},
        "bytes": passes.sent_bytes,
    }


def _refuse(ranks: Ranks, folder: Path) -> dict[str, str]:
    path = folder / f"rank-{ranks.rank}.toml"
    path.write_text(Case("portions").plan, encoding="utf-8")
    passes = split_layers(linears(), mesh_of(2)["inside"], path)

    def attempt(samples: int, targets: int) -> None:
        list(passes(torch.ones(samples, FEATURES, requires_grad=True), torch.ones(targets)))

    model = linears()
    passes_of_model = split_layers(model, mesh_of(2)["inside"], path)

    def train_by_one_pipeline() -> None:
        with Pipelined(model, make_optimizer(model.parameters()), mesh=mesh_of(2)) as pipeline:
            inputs, targets = batches()[0][ranks.rank]
            for entering, wanted in passes_of_model(model.below(inputs), targets):
                mse_loss(model.above(entering), wanted).backward()
            pipeline.step()

    return {
        "one pipeline": error_of(train_by_one_pipeline),
        "disagree": error_of(attempt, *([6, 6] if ranks.rank % 2 else [4, 4])),
        "rows": error_of(attempt, 4, 3),
        "portions": error_of(attempt, 5, 5),
        "no backward": error_of(attempt, 4, 4),
        "left": error_of(attempt, 4, 4),
    }


def _leave(ranks: Ranks, folder: Path) -> dict[str, list[str]]:
    """Return, by who leaves an iteration, what is said of another one of the same passes, and of new ones."""
    path = folder / f"rank-{ranks.rank}.toml"
    path.write_text(Case("portions").plan, encoding="utf-8")
    said = {}
    for who, after, leaves in (("all", 1, True), ("first", 2, ranks.rank % 2 == 0)):
        mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("islands", "inside"))["inside"]
        passes = split_layers(linears(), mesh, path)
        for number, _ in enumerate(passes(torch.ones(SAMPLES, FEATURES)), start=1):
            if leaves and number == after:
                break

        def take(passes: Passes) -> None:
            list(passes(torch.ones(SAMPLES, FEATURES)))

        said[who] = [error_of(take, passes), error_of(take, split_layers(linears(), mesh, path))]
    return said


def _pass_nothing(ranks: Ranks, folder: Path) -> list[bool]:
    """Return whether the one pass of plans without a scheme has the tensors that were given."""
    path, found = folder / f"rank-{ranks.rank}.toml", []
    for plan in (LAYERS["pair"], "layers = {}"):
        path.write_text(plan, encoding="utf-8")
        model = linears()
        passes = split_layers(model, mesh_of(2)["inside"], path)
        given = torch.ones(3, FEATURES), torch.ones(3)
        [(entering, targets)] = passes(*given)
        split = isinstance(model.get_parameter("above.0.weight"), DTensor)
        same = entering is given[0] and targets is given[1]
        found.append(same and split == (plan != "layers = {}") and passes.count == passes.update_period == 1)
    return found


def _find(ranks: Ranks, folder: Path) -> dict[str, Any]:
    cases = WHOLE_BATCH | VARIABLE_BATCH | {"int8": INT8}
    found: dict[str, Any] = {name: _train(ranks, case, folder) for name, case in cases.items()}
    others = {"nothing": _pass_nothing, "refused": _refuse, "left": _leave}
    return found | {name: find(ranks, folder) for name, find in others.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of each of four ranks."""
    return run_ranks(RANKS, _find, tmp_path_factory.mktemp("plans"))


def initial(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_every_scheme_trains_as_one_process_does_on_the_whole_batch(name: str, found: list[dict[str, Any]]) -> None:
    """In float64, only the order of additions differs. The losses of an iteration's passes have the mean of all."""
    case = WHOLE_BATCH[name]
    model = initial(case)
    losses = pipe_sgd(model, make_optimizer(model.parameters()), regress, batches(), width=case.width)
    for of_rank in found:
        assert_same_weights(of_rank[name]["weights"], model.state_dict(), rtol=1e-9)
    for iteration, of_ranks in enumerate(losses):
        together = [sum(of_rank[name]["losses"][iteration]) / case.count for of_rank in found]
        assert sum(together) / RANKS == pytest.approx(sum(of_ranks) / RANKS, rel=1e-9)


def rows_by_hand(case: Case, number: int) -> list[tuple[int, slice]]:
    """Return the members, and which of their samples are in pass ``number``, written from the paper's section 4."""
    if case.scheme == "turns":
        return [(number, slice(0, SAMPLES))]
    size = SAMPLES // case.members
    return [(member, slice(size * number, size * number + size)) for member in range(case.members)]


def variable_batch(case: Case, model: nn.Module) -> list[list[list[float]]]:
    """Train ``model`` in place, the layers above on smaller batches than those below; return losses by island.

    The layers below follow the mean of the losses of all passes, each taken when it was their turn.
    """
    optimizers = {part: make_optimizer(model.get_submodule(part).parameters()) for part in ("below", "above")}
    period, islands = case.update_period, RANKS // case.members
    assert period is not None
    losses: list[list[list[float]]] = []
    for of_ranks in batches():
        activations = [model.below(inputs) for inputs, _ in of_ranks]
        held = [one.detach().requires_grad_() for one in activations]
        losses.append([])
        for number in range(case.count):
            of_islands = []
            for island in range(islands):
                rows = [(island * case.members + member, which) for member, which in rows_by_hand(case, number)]
                entering = torch.cat([held[rank][which] for rank, which in rows])
                wanted = torch.cat([of_ranks[rank][1][which] for rank, which in rows])
                of_islands.append(mse_loss(model.above(entering), wanted))
            losses[-1].append([one.item() for one in of_islands])
            (sum(of_islands, torch.zeros(())) / islands / period).backward()
            if (number + 1) % period == 0:
                optimizers["above"].step()
                optimizers["above"].zero_grad()
        gradients: list[Tensor] = [one.grad * period / case.count for one in held if one.grad is not None]
        torch.autograd.backward(activations, gradients)
        optimizers["below"].step()
        optimizers["below"].zero_grad()
    return losses


@pytest.mark.parametrize("name", VARIABLE_BATCH)
def test_split_layers_may_be_updated_after_fewer_passes(name: str, found: list[dict[str, Any]]) -> None:
    case = VARIABLE_BATCH[name]
    model = initial(case)
    losses = variable_batch(case, model)
    for rank, of_rank in enumerate(found):
        own = [[of_islands[rank // case.members] for of_islands in of_passes] for of_passes in losses]
        assert of_rank[name]["losses"] == [pytest.approx(one, rel=1e-9) for one in own]
        assert_same_weights(of_rank[name]["weights"], model.state_dict(), rtol=1e-9)


@pytest.mark.parametrize("name", ["width 2", "int8"])
def test_two_pipelines_leave_the_same_bits_on_all_ranks_that_hold_the_same(
    name: str, found: list[dict[str, Any]]
) -> None:
    assert len({of_rank[name]["below"] for of_rank in found}) == 1
    above = [of_rank[name]["above"] for of_rank in found]
    assert above[:2] == above[2:]
    assert above[0] != above[1], "each member has a share of its own"


@pytest.mark.parametrize("name", [*WHOLE_BATCH, *VARIABLE_BATCH])
def test_every_scheme_moves_as_many_bytes_as_the_paper_says(name: str, found: list[dict[str, Any]]) -> None:
    """A member sends its activations to each other one, and each of these the gradients of theirs.

    Where torch has summed the gradient over the members before, all have the whole of it, and nothing returns.
    """
    case = (WHOLE_BATCH | VARIABLE_BATCH)[name]
    there, back = FEATURES + TARGETS, 0 if case.layers in ("rowwise", "after ReLU") else FEATURES
    values = ITERATIONS * (case.members - 1) * SAMPLES * (there + back)
    assert [of_rank[name]["bytes"] for of_rank in found] == [8 * values] * RANKS


def test_samples_that_do_not_fit_are_refused_on_all_members_in_one_line(found: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(found):
        first = rank // 2 * 2
        assert of_rank["refused"] == {
            "one pipeline": "UserInputError: gradients of what members of an island hold alike must be the same on all "
            "of them, from the same samples and random numbers; got others of below.0.weight in the first step",
            "disagree": "DisagreementError: tensors of a pass must have the same shapes on all members of an island; "
            f"got 6 samples of 36 and 6 samples of 1 on rank {first + 1}, 4 samples of 36 and 4 samples of 1 on rank "
            f"{first}",
            "rows": "UserInputError: tensors of a pass must have a row for each of its 4 samples; got 3",
            "portions": "UserInputError: samples must be a multiple of the 2 members of an island with scheme "
            "portions; got 5",
            "no backward": "UserInputError: each pass must be followed by backward() of a loss of its activations; got "
            "none after pass 1 of 2",
            "left": "RunError: passes must be taken to the end; got another iteration after one that was left on ranks "
            f"{first}, {first + 1}",
        }


def test_an_iteration_after_one_that_a_member_has_left_is_refused_on_all_members_of_the_mesh(
    found: list[dict[str, Any]],
) -> None:
    """An iteration of other passes is, too, since messages of the one that was left are on their way."""
    for rank, of_rank in enumerate(found):
        first = rank // 2 * 2
        refused = "RunError: passes must be taken to the end; got another iteration after one that was left on "
        assert of_rank["left"] == {
            "all": [f"{refused}ranks {first}, {first + 1}"] * 2,
            "first": [f"{refused}rank {first}"] * 2,
        }


def test_without_a_scheme_the_one_pass_has_what_was_given(found: list[dict[str, Any]]) -> None:
    assert [of_rank["nothing"] for of_rank in found] == [[True, True]] * RANKS


def test_the_example_learns(tmp_path: Path) -> None:
    output = run_example("weird_trick.py", tmp_path)
    assert [line.partition(":")[0] for line in output.splitlines()] == [f"epoch {number}" for number in range(3)]
    assert float(output.split()[-1]) > 0.9
