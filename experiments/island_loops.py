"""Training loops on islands of two ranks, next to torch's own ways of holding a model on several ranks.

All see the same samples: with data parallelism each member of an island takes its own half of the island's batch, with
tensor parallelism both take all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from experiments import loops
from experiments.bench_pipelined import Workload
from experiments.loops import Batch
from pipesgd import Pipelined, split_layers
from pipesgd.data import CROSS_ENTROPY, DataSplits, ShardedBatches, build_model, load_dataset
from pipesgd.ranks import Ranks

MEMBERS = 2
"""Ranks of an island, which are those of a node."""
PLANS = Path(__file__).resolve().parent / "island_plans"


@dataclass(frozen=True, kw_only=True)
class IslandWorkload(Workload):
    """A model that islands can hold, and its data; ``batch_size`` is that of a rank that has samples of its own."""

    dataset: str
    embedding: int = 128
    layers: int = 2
    seed: int = 0
    units: tuple[str, ...]
    """Modules that ``fully_shard`` gathers one by one; what is left of the model is gathered with the whole."""

    @property
    def plan(self) -> Path:
        """File that says how tensor parallelism splits the model."""
        return PLANS / f"{self.model}.toml"

    def load(self) -> DataSplits:
        return load_dataset(self.dataset, None, image_size=64)

    def build(self, data: DataSplits) -> nn.Module:
        torch.manual_seed(self.seed)
        return build_model(
            self.model,
            sample_shape=data.sample_shape,
            num_classes=data.num_classes,
            layers=self.layers,
            embedding=self.embedding,
        )

    def batches(self, data: DataSplits, ranks: Ranks, number: int) -> list[Batch]:
        """Return the first ``number`` batches of this rank's island."""
        shards = ShardedBatches(
            data.train,
            batch_size=MEMBERS * self.batch_size,
            rank=ranks.rank // MEMBERS,
            world_size=ranks.world_size // MEMBERS,
            seed=self.seed,
        )
        return list(itertools.islice(shards.from_iteration(0), number))


def transformer(layers: int, batch_size: int) -> IslandWorkload:
    """Return the transformer of pipesgd on text, in a width that gives its blocks linear layers of 1,024."""
    return IslandWorkload(
        name=f"transformer of {layers} blocks with linear layers of 1,024, {batch_size} x 64 bytes a rank",
        model="transformer",
        dataset="python-stdlib",
        embedding=256,
        layers=layers,
        batch_size=batch_size,
        units=tuple(f"blocks.{number}" for number in range(layers)),
    )


def alexnet(batch_size: int) -> IslandWorkload:
    """Return AlexNet for small images."""
    return IslandWorkload(
        name=f"small AlexNet, {batch_size} images a rank",
        model="alexnet",
        dataset="fashion-mnist",
        batch_size=batch_size,
        units=("0.13", "0.15"),
    )


@functools.cache
def islands_of(world_size: int) -> DeviceMesh:
    """Return the mesh of all ranks as islands, the same at every call: each has connections of its own. Collective."""
    return init_device_mesh("cpu", (world_size // MEMBERS, MEMBERS), mesh_dim_names=("islands", "inside"))


@functools.cache
def all_ranks(world_size: int) -> DeviceMesh:
    """Return the mesh of all ranks in a row, the same at every call. Collective."""
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("all",))


def gathered(model: nn.Module, workload: IslandWorkload, mesh: DeviceMesh) -> nn.Module:
    """Return ``model`` sharded by FSDP2: over ``mesh``, or over its second dimension with replicas along the first."""
    for name in workload.units:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split(model: nn.Module, workload: IslandWorkload, mesh: DeviceMesh) -> nn.Module:
    """Return ``model`` split by tensor parallelism over ``mesh``, as the workload's plan says."""
    split_layers(model, mesh, workload.plan)
    return model


Hold = Callable[[nn.Module, IslandWorkload, int], nn.Module]
"""Function of a model, its workload and the number of ranks that returns the model as this rank holds it."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train on several ranks."""

    hold: Hold
    shares: int = MEMBERS
    """Parts of an island's batch, of which each member takes one."""
    pipeline: dict[str, Any] | None = None
    """Options of ``Pipelined`` between islands; None if torch itself does all that is done."""


ALONE, DDP, FSDP2, HSDP = "no communication", "DDP", "FSDP2 over all ranks", "HSDP"
INSIDE = {
    "FSDP2": Way(hold=lambda model, workload, size: gathered(model, workload, islands_of(size)["inside"])),
    "TP": Way(hold=lambda model, workload, size: split(model, workload, islands_of(size)["inside"]), shares=1),
}
"""Ways to split a model inside islands that are pipelined: FSDP2 and tensor parallelism."""


def pipelined(inside: str, width: int, codec: str) -> str:
    """Return the name of a pipeline between islands."""
    return f"{inside} inside, width {width}, {codec}"


WAYS: dict[str, Way] = {
    ALONE: Way(hold=lambda model, workload, size: model),
    DDP: Way(hold=lambda model, workload, size: DistributedDataParallel(model)),
    FSDP2: Way(hold=lambda model, workload, size: gathered(model, workload, all_ranks(size))),
    HSDP: Way(hold=lambda model, workload, size: gathered(model, workload, islands_of(size))),
    **{
        pipelined(inside, width, codec): dataclasses.replace(way, pipeline={"width": width, "codec": codec})
        for (inside, way), width, codec in itertools.product(INSIDE.items(), (1, 2), ("int8", "int4"))
    },
}


class IslandLoop:
    """The training loop of one way.

    Args:
        way: the way to train.
        model: the model, which the loop changes: the same on all ranks.
        workload: what is trained.
        ranks: all ranks.
        optimize: function that makes the optimizer.
        least_seconds: seconds that a forward and backward pass takes at least. Whatever a way communicates during
            its passes is hidden behind that time as well as it could be.
    """

    def __init__(
        self,
        way: Way,
        model: nn.Module,
        workload: IslandWorkload,
        ranks: Ranks,
        *,
        optimize: Callable[[nn.Module], torch.optim.Optimizer] = loops.sgd,
        least_seconds: float = 0.0,
    ):
        self.model = way.hold(model, workload, ranks.world_size)
        self.wire_bytes: int | None = None
        self.optimizer = optimize(self.model)
        self._shares, self._share = way.shares, ranks.rank % MEMBERS % way.shares
        self._least_seconds = least_seconds
        self._pipeline: Pipelined | None = None
        if way.pipeline is not None:
            mesh = islands_of(ranks.world_size)
            self._pipeline = Pipelined(self.model, self.optimizer, mesh=mesh, **way.pipeline)

    def iterate(self, inputs: Tensor, labels: Tensor) -> None:
        begin = time.perf_counter()
        own_inputs, own_labels = (whole.chunk(self._shares)[self._share] for whole in (inputs, labels))
        CROSS_ENTROPY(self.model(own_inputs), own_labels).backward()
        time.sleep(max(0.0, begin + self._least_seconds - time.perf_counter()))
        if self._pipeline is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.wire_bytes = self._pipeline.step().wire_bytes

    def flush(self) -> None:
        if self._pipeline is not None:
            self._pipeline.flush()

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
