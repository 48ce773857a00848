"""Layers split by a plan: they train as they do in one process that has them whole.

Four ranks train everything, once, in two islands of two or in one of four; the tests look at what they have found.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import error_of, run_ranks
from _reference import pipe_sgd
from _sections import sections
from _small_problem import Batch, assert_same_weights, regress
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipesgd import Pipelined
from pipesgd.codecs.options import codec_named
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.run.shard_file import ShardFile
from pipesgd.systems.layers.splitting import split_layers

pytestmark = pytest.mark.slow

ITERATIONS = 3
NAMES = ("islands", "data", "inside")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


def convnet() -> nn.Module:
    """Return three convolutions, of which the second one is in two groups, and three linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Tanh()),
        *(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh()),
        *(nn.Conv2d(4, 6, 2, bias=False), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(24, 8), nn.Tanh()),
        *(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)),
    ).double()


def sentences() -> nn.Module:
    """Return a model of sequences of numbers below 8."""
    return nn.Sequential(
        *(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.RMSNorm(4)),
        nn.Linear(4, 2),
    ).double()


PLANS = {
    "towers": """
        devices = [1, 0]
        layers.0 = {style = "split-filters", output = "split"}
        layers.2 = {style = "split-filters", input = "split", output = "split"}
        layers.4 = {style = "split-filters", input = "split", output = "split"}
        layers.7 = {style = "colwise", input = "split"}
        layers.9 = {style = "rowwise"}
        layers.11 = {style = "colwise", output = "whole"}
    """,
    "gathered": """
        layers.0 = {style = "split-filters"}
        layers.2 = {style = "split-filters"}
        layers.4 = {style = "split-filters"}
        layers.7 = {style = "colwise", output = "whole"}
        layers.9 = {style = "rowwise", input = "whole"}
    """,
    "sequence": """
        layers.0 = {style = "rowwise", output = "sequence"}
        layers.1 = {style = "sequence"}
        layers.2 = {style = "colwise", input = "sequence"}
        layers.4 = {style = "rowwise", output = "sequence"}
        layers.5 = {style = "sequence"}
        layers.6 = {style = "colwise", input = "sequence", output = "whole"}
    """,
    "memory": """
        layers."" = {style = "rowwise", input = "whole"}
    """,
    "embedding": """
        layers.0 = {style = "colwise", output = "whole"}
        layers.2 = {style = "colwise"}
        layers.4 = {style = "rowwise"}
    """,
}


@dataclass(frozen=True)
class Case:
    """A run, by the names of its model, plan and optimizer, with options of ``Pipelined``."""

    make: Callable[[], nn.Module]
    plan: str
    optimizer: str
    width: int
    prediction: str = "none"
    codec: str = "fp32"
    fsdp: bool = False
    """True if all ranks are one island, in which FSDP2 shards what is left of each layer over pairs of ranks."""


CASES = {
    "width 1": Case(convnet, "towers", "nesterov", width=1),
    "width 2": Case(convnet, "towers", "nesterov", width=2, prediction="eager"),
    "gathered": Case(convnet, "gathered", "adamw", width=1),
    "sequence": Case(sentences, "sequence", "nesterov", width=1),
    "embedding": Case(sentences, "embedding", "adamw", width=2),
    "with FSDP2": Case(convnet, "gathered", "nesterov", width=1, fsdp=True),
}
INT8 = Case(convnet, "towers", "nesterov", width=2, prediction="eager", codec="int8")


def batches_of(make: Callable[[], nn.Module]) -> list[list[Batch]]:
    """Return batches[iteration][island], of three samples each; with one island of two pairs, each pair has one."""
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)

    def batch() -> Batch:
        if make is convnet:
            return draw(3, 2, 5, 5), draw(3, 4)
        return torch.randint(8, (3, 4), generator=generator), draw(3, 4, 2)

    return [[batch() for _ in range(2)] for _ in range(ITERATIONS)]


@functools.cache
def mesh_of(shape: tuple[int, int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}


def _train(ranks: Ranks, case: Case, folder: Path) -> dict[str, Any]:
    mesh = mesh_of((1, 2, 2) if case.fsdp else (2, 1, 2))
    torch.manual_seed(0 if case.fsdp else ranks.rank)  # only the first rank's weights count, except for fully_shard
    model = case.make()
    split_layers(model, mesh["inside"], folder / f"{case.plan}.toml")
    if case.fsdp:
        for layer in model.children():
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    options: dict[str, Any] = {"width": case.width, "prediction": case.prediction, "codec": case.codec}
    losses, hashes = [], []
    with Pipelined(model, optimizer, mesh=mesh, **sections(**options)) as pipeline:
        for of in batches_of(case.make):
            loss = regress(model, of[ranks.rank // 2])
            loss.backward()
            pipeline.step()
            losses.append(loss.item())
            with pipeline.true_weights():
                hashes.append(weights_sha256(model))
    first = model.get_parameter("0.weight")
    own = first.to_local().detach() if isinstance(first, DTensor) else first
    return {"losses": losses, "hashes": hashes, "weights": whole(model), "own": own}


def _refuse(ranks: Ranks, folder: Path) -> dict[str, str]:
    mesh = mesh_of((2, 1, 2))
    inside, plan = mesh["inside"], folder / "gathered.toml"
    own, of_island = folder / f"rank-{ranks.rank}.toml", folder / f"island-{ranks.rank // 2}.toml"
    if ranks.rank != 2:
        own.write_text(PLANS["towers" if ranks.rank == 1 else "gathered"], encoding="utf-8")
    of_island.write_text(f"devices = {[[0, 1], [1, 0]][ranks.rank // 2]}\n{PLANS['gathered']}", encoding="utf-8")
    said = {
        "no mesh": error_of(split_layers, convnet(), "inside", plan),
        "whole mesh": error_of(split_layers, convnet(), mesh, plan),
        "plan": error_of(split_layers, convnet(), inside, own).replace(f"{folder}/", ""),
    }
    model = convnet()
    fully_shard(model, mesh=inside)
    said["split"] = error_of(split_layers, model, inside, plan)
    ranks.all_gather_object("plans are written", None)
    for number in range(2):
        model = convnet()
        split_layers(model, inside, folder / f"island-{number}.toml")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        with Pipelined(model, optimizer, mesh=mesh) as pipeline:
            file = ShardFile(folder, pipeline, optimizer)
            said["parts"] = error_of(file.load if number else file.save).replace(f"{folder}/", "")
    model = convnet()
    split_layers(model, inside, of_island)
    return said | {"order": error_of(Pipelined, model, OPTIMIZERS["adamw"](model.parameters()), mesh=mesh)}


MEMORY: list[tuple[str, dict[str, Any], int]] = [
    # optimizer, options of Pipelined: how often the memory of a rank's share is held between two steps, as
    # docs/method.md counts it; the last one is a residual.
    ("nesterov", {"width": 1}, 1 + 1 + 1),
    (
        "adamw",
        {"width": 2, "prediction": "eager", "codec": codec_named("int8", error_feedback=True)},
        1 + 2 + 2 + 1 + 1 + 1 + 2 + 1 + 1,
    ),
]
NUMEL = 12_347
"""Number of values of a share, and of no other tensor."""


def _held() -> list[int]:
    """Return how many tensors of a share's size this process holds, and how many of that of both shares."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    storages = [one.untyped_storage() for one in found if one.layout is torch.strided and one.device.type == "cpu"]
    return [len({one.data_ptr() for one in storages if one.nbytes() == 4 * NUMEL * members}) for members in (1, 2)]


def _count_memory(ranks: Ranks, folder: Path) -> list[list[int]]:
    mesh = mesh_of((2, 1, 2))
    found = []
    for optimizer, options, _ in MEMORY:
        model = nn.Linear(2 * NUMEL, 1, bias=False)
        split_layers(model, mesh["inside"], folder / "memory.toml")
        with Pipelined(model, OPTIMIZERS[optimizer](model.parameters()), mesh=mesh, **sections(**options)) as pipeline:
            for iteration in range(3):
                model(torch.full((3, 2 * NUMEL), float(iteration))).sum().backward()
                pipeline.step()
            if ranks.rank < 2:  # it takes a while to look at all objects
                found.append(_held())
    return found


def _freeze(ranks: Ranks, folder: Path) -> list[list[str]]:
    """Return the names of the parameters that are trained after layers were split of which only one bias was."""
    found = []
    for make, plan in ((sentences, "sequence"), (convnet, "gathered")):
        model = make().requires_grad_(False)
        model.get_parameter("2.bias" if make is sentences else "0.bias").requires_grad_(True)
        split_layers(model, mesh_of((2, 1, 2))["inside"], folder / f"{plan}.toml")
        found.append([name for name, parameter in model.named_parameters() if parameter.requires_grad])
    return found


def _find(ranks: Ranks, folder: Path) -> dict[str, Any]:
    found = {name: _train(ranks, case, folder) for name, case in CASES.items()}
    found["int8"] = _train(ranks, INT8, folder)
    found |= {"memory": _count_memory(ranks, folder), "trained": _freeze(ranks, folder)}
    return found | {"refused": _refuse(ranks, folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of each of four ranks."""
    folder = tmp_path_factory.mktemp("plans")
    for name, text in PLANS.items():
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return run_ranks(4, _find, folder)


@pytest.mark.parametrize("name", CASES)
def test_split_layers_train_as_one_process_does(name: str, found: list[dict[str, Any]]) -> None:
    """In float64, only the order of additions differs."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    losses = pipe_sgd(
        model,
        OPTIMIZERS[case.optimizer](model.parameters()),
        regress,
        batches_of(case.make),
        width=case.width,
        prediction=case.prediction,
    )
    for rank, of_rank in enumerate(found):
        assert of_rank[name]["losses"] == pytest.approx([of[rank // 2] for of in losses], rel=1e-9)
        assert_same_weights(of_rank[name]["weights"], model.state_dict(), rtol=1e-9)


def test_what_was_frozen_stays_so_in_every_style(found: list[dict[str, Any]]) -> None:
    """torch's style of sequences made frozen norms trainable."""
    assert [of_rank["trained"] for of_rank in found] == [[["2.bias"], ["0.bias"]]] * 4


@pytest.mark.parametrize("name", ["width 2", "int8"])
def test_shares_have_the_same_bits_in_all_islands(name: str, found: list[dict[str, Any]]) -> None:
    assert [of_rank[name]["hashes"] for of_rank in found[:2]] == [of_rank[name]["hashes"] for of_rank in found[2:]]
    assert found[0][name]["hashes"] != found[1][name]["hashes"], "each rank has a share of its own"


def test_devices_hold_the_shares_of_a_layer_in_their_order(found: list[dict[str, Any]]) -> None:
    filters = found[0]["width 1"]["weights"]["0.weight"]
    for rank, of_rank in enumerate(found):
        assert torch.equal(of_rank["width 1"]["own"], filters[:2] if rank % 2 else filters[2:])
        assert torch.equal(of_rank["gathered"]["own"], of_rank["gathered"]["weights"]["0.weight"].chunk(2)[rank % 2])


def test_int8_between_islands_stays_near_fp32(found: list[dict[str, Any]]) -> None:
    exact = found[0]["width 2"]["weights"]
    off = max(float((value - exact[name]).abs().max()) for name, value in found[0]["int8"]["weights"].items())
    assert 0 < off < 2e-3


def test_a_rank_has_its_share_in_memory_and_the_copies_of_it_that_the_documentation_counts(
    found: list[dict[str, Any]],
) -> None:
    for of_rank in found[:2]:
        assert of_rank["memory"] == [[copies, 0] for _, _, copies in MEMORY]


def test_what_cannot_be_split_is_refused_in_one_line(found: list[dict[str, Any]]) -> None:
    said = [of_rank["refused"] for of_rank in found]
    for rank, of_rank in enumerate(said):
        assert of_rank["no mesh"] == "UserInputError: mesh must be a DeviceMesh of torch.distributed; got str"
        assert of_rank["whole mesh"] == (
            'UserInputError: mesh must have one dimension, that of an island\'s members (mesh["inside"]); got one of '
            "2 x 1 x 2 ranks"
        )
        assert of_rank["split"] == (
            "UserInputError: layer 0 must not be split already, and must be split before fully_shard; got weight as "
            "(Shard(dim=0),)"
        )
        assert of_rank["parts"] == (
            "RunError: a checkpoint must have the part of each rank; part-0-0.pt is of other parameters: 0.weight "
            "4x2x3x3 float64 (Shard(dim=0),), share 0, not 0.weight 4x2x3x3 float64 (Shard(dim=0),), share 1"
        )
        member, weight = rank % 2, "0.weight 4x2x3x3 float64 (Shard(dim=0),), share"
        assert of_rank["order"] == (
            f"DisagreementError: parameters (number 0) must be the same on all ranks; got '{weight} {member}' on rank "
            f"{member}, '{weight} {1 - member}' on rank {2 + member}"
        )
    other = "plan must be the same on all ranks of an island; got another one on rank 1 than on rank 0"
    missing = "plan must be a readable file; got rank-2.toml: No such file or directory"
    assert [of_rank["plan"] for of_rank in said] == [
        *[f"DisagreementError: {other}"] * 2,
        *(f"UserInputError: {missing}", f"UserInputError: rank 2: {missing}"),
    ]
