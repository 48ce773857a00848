"""Islands of ranks that hold a model together, split by torch, compared with one process that holds it whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import error_of, run_ranks
from _reference import pipe_sgd
from _sections import sections
from _small_problem import Batch, assert_same_weights, clip_by_torch, falling_lr, regress, small_problem
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from pipesgd import DisagreementError, NonFiniteGradientError, Pipelined, RunError, Wire
from pipesgd.optim.muon import MuonWithAdamW
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.run.shard_file import ShardFile
from timing_model.collective_time import ring_all_reduce_bytes
from timing_model.mesh import Islands, Mesh

pytestmark = pytest.mark.slow

SIZES = [4, 6, 4, 3]
"""Layers of the model. With FSDP2, the second one has uneven shards over three members, and an empty one."""
ITERATIONS = 4
NAMES = ("islands", "data", "tensors")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of this shape, the same at every call: each has connections of its own."""
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES)


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split ``model`` inside islands: in tensor parallelism, of two of three layers, by FSDP2, or by both."""
    assert isinstance(model, nn.Sequential)
    if mesh.size(2) > 1:
        parallelize_module(model, mesh["tensors"], {"0.0": ColwiseParallel(), "1.0": RowwiseParallel()})
    if mesh.size(1) > 1:
        for layer in model[:2]:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])  # keeps the last layer's weights gathered after a forward pass


def batches_of(
    shape: tuple[int, int, int], sizes: list[int], iterations: int
) -> tuple[nn.Module, list[list[list[Batch]]]]:
    """Return the whole model, and batches[iteration][island][data-parallel member]."""
    islands, data, _ = shape
    model, batches = small_problem(0, sizes, iterations, islands * data)
    return model, [[of[number * data : (number + 1) * data] for number in range(islands)] for of in batches]


class Member:
    """A rank in training; ``case`` has "optimizer", "clip" and "options" of ``Pipelined``, and may have "sizes"."""

    def __init__(self, shape: tuple[int, int, int], case: dict[str, Any], iterations: int = ITERATIONS):
        self.mesh = mesh_of(shape)
        self.island, data, _ = self.mesh.get_coordinate()
        self.model, batches = batches_of(shape, case.get("sizes", SIZES), iterations)
        self.batches = [of[self.island][data] for of in batches]
        if self.island:  # only the first island's weights count, and of what is not sharded the first rank's
            self.model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
        split(self.model, self.mesh)
        if self.mesh.get_coordinate()[2] and not any(map(is_split, self.model[2].parameters())):
            nn.init.zeros_(self.model[2][0].weight)  # what a layer that is not split has on other ranks does not count
        self.optimizer = OPTIMIZERS[case["optimizer"]](self.model.parameters())
        self.pipeline = Pipelined(
            self.model, self.optimizer, mesh=self.mesh, **sections(**case["clip"], **case["options"])
        )
        self.scheduled = case.get("scheduled", False)

    def iterate(self, number: int) -> float:
        """Do an iteration; return the loss."""
        if self.scheduled:
            for group in self.optimizer.param_groups:
                group["lr"] = falling_lr(number)
        loss = regress(self.model, self.batches[number])
        loss.backward()
        self.pipeline.step()
        return loss.item()

    def hashed(self) -> tuple[str, str]:
        """Return hashes of what this rank holds of the true weights, and of those that are not sharded."""
        with self.pipeline.true_weights():
            same = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters() if not is_split(p)]
            return weights_sha256(self.model), weights_sha256(nn.ParameterList(p.detach() for p in same))

    def whole(self) -> dict[str, Tensor]:
        """Return the whole weights that this rank's model holds."""
        state = self.model.state_dict()
        return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in state.items()}


def is_split(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def _train(ranks: Ranks, shape: tuple[int, int, int], cases: list[dict[str, Any]]) -> list[Any]:
    outcomes = []
    for case in cases:
        member = Member(shape, case)
        losses, hashes = [], []
        for number in range(ITERATIONS):
            losses.append(member.iterate(number))
            hashes.append(member.hashed())
        member.pipeline.close()
        outcomes.append((losses, hashes, member.whole()))
    return outcomes


def case(optimizer: str, clip: dict[str, float] | None = None, **options: Any) -> dict[str, Any]:
    scheduled = options.pop("scheduled", False)
    return {"optimizer": optimizer, "clip": clip or {}, "options": options, "scheduled": scheduled}


def assert_same_parts(outcomes: list[Any], shape: tuple[int, int, int], index: int) -> None:
    """Check that ranks hold the same bits as those of other islands, and, of what is not sharded, as all ranks."""
    members = shape[1] * shape[2]
    for rank, of_rank in enumerate(outcomes):
        assert [own for own, _ in of_rank[index][1]] == [own for own, _ in outcomes[rank % members][index][1]]
        assert [same for _, same in of_rank[index][1]] == [same for _, same in outcomes[0][index][1]]


CASES = [
    case("nesterov", width=1),
    case("adamw", width=1, clip={"clip_norm": 0.3}),
    case("sgd", width=2, prediction="none", guard=True),
    case("nesterov", width=2, prediction="eager", clip={"clip_norm": 0.3, "clip_value": 0.05}, scheduled=True),
    case("adamw", width=3, prediction="eager", buckets=2, on_nonfinite="skip"),
]


@pytest.mark.parametrize(
    ("shape", "cases"),
    [((2, 1, 3), CASES), ((2, 3, 1), CASES), ((3, 2, 1), CASES[1:3]), ((2, 2, 2), CASES[3:])],
    ids=["2x1x3", "2x3x1", "3x2x1", "2x2x2"],
)
def test_islands_train_as_one_process_does(shape: tuple[int, int, int], cases: list[dict[str, Any]]) -> None:
    """In float64, only the order of additions differs: 1e-9 over 4 iterations.

    Every case is trained with each of the two splits; more islands, and both splits together, are for some of them.
    """
    outcomes = run_ranks(shape[0] * shape[1] * shape[2], _train, shape, cases)
    for index, one in enumerate(cases):
        model, batches = batches_of(shape, SIZES, ITERATIONS)
        whole = [[tuple(map(torch.cat, zip(*parts, strict=True))) for parts in of] for of in batches]
        losses = pipe_sgd(
            model,
            OPTIMIZERS[one["optimizer"]](model.parameters()),
            regress,
            whole,
            width=one["options"]["width"],
            prediction=one["options"].get("prediction", "none"),
            clip=clip_by_torch(**one["clip"]),
            lr_of=falling_lr if one["scheduled"] else None,
        )
        members = shape[1] * shape[2]
        for rank, of_rank in enumerate(outcomes):
            _, _, weights = of_rank[index]
            assert_same_weights(weights, model.state_dict(), rtol=1e-9)
            island = outcomes[rank // members * members : (rank // members + 1) * members]
            together = [sum(of) / members for of in zip(*(other[index][0] for other in island), strict=True)]
            assert together == pytest.approx([of_islands[rank // members] for of_islands in losses], rel=1e-9)
        assert_same_parts(outcomes, shape, index)


ENCODED = [case("nesterov", width=2, codec=codec) | {"sizes": [20, 30, 2, 2]} for codec in ("fp32", "int8", "int4")]
"""Runs of a model with a large first layer, by whose scale all would be encoded that is next to it in a buffer."""


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 3, 1)], ids=["tensors", "data"])
def test_codecs_between_islands_leave_the_same_bits_on_all_of_them(shape: tuple[int, int, int]) -> None:
    outcomes = run_ranks(shape[0] * shape[1] * shape[2], _train, shape, ENCODED)
    exact = outcomes[0][0][2]
    for index, within in ((1, 2e-3), (2, 3e-2)):
        assert_same_parts(outcomes, shape, index)
        off = max(float((value - exact[name]).abs().max()) for name, value in outcomes[0][index][2].items())
        assert 0 < off < within


def _sent(ranks: Ranks, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the bytes that this rank sends in an iteration, and those of the model: of what is split, and of all."""
    member = Member(shape, case("sgd", width=1) | {"sizes": [8, 12, 8, 6]})
    parameters = list(member.model.parameters())
    regress(member.model, member.batches[0]).backward()
    report = member.pipeline.step()
    member.pipeline.close()
    nbytes = [one.numel() * one.element_size() for one in parameters]
    split = [size for one, size in zip(parameters, nbytes, strict=True) if is_split(one)]
    return report.wire_bytes, sum(split), sum(nbytes)


@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 2, 1)], ids=["tensors", "data"])
def test_the_timing_model_knows_the_bytes_between_islands(shape: tuple[int, int, int]) -> None:
    islands, data, tensors = shape
    outcomes = run_ranks(islands * data * tensors, _sent, shape)
    [(split, whole)] = {(split, whole) for _, split, whole in outcomes}
    options = {"split": "fsdp2"} if data > 1 else {"split": "tensor", "split_share": split / whole, "activations": 0.0}
    members = data * tensors
    mesh = Mesh(world_size=len(outcomes), islands=Islands(members=members, **options))
    sent = sum(ring_all_reduce_bytes(part, islands) for part in mesh.buffers(whole))
    for ring in range(members):
        assert sum(wire_bytes for wire_bytes, _, _ in outcomes[ring::members]) == pytest.approx(islands * sent)


def _evaluate_in_between(ranks: Ranks, shape: tuple[int, int, int]) -> tuple[list[Any], list[Any]]:
    plain, disturbed = Member(shape, case("nesterov", width=2)), Member(shape, case("nesterov", width=2))
    quiet, saved = [], []
    for number in range(ITERATIONS):
        quiet.append((plain.iterate(number), *plain.hashed()))
        loss = disturbed.iterate(number)
        disturbed.model.eval()
        with torch.no_grad():
            evaluated = regress(disturbed.model, disturbed.batches[0]).item()
        disturbed.model.train()
        whole = disturbed.whole()
        with disturbed.pipeline.true_weights(), torch.no_grad():
            again = regress(disturbed.model, disturbed.batches[0]).item()
            held = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in disturbed.model.named_parameters()}
            assert all(torch.equal(whole[name], value) for name, value in held.items()), "saved are the true weights"
        assert evaluated == again
        saved.append((loss, *disturbed.hashed()))
    plain.pipeline.close()
    disturbed.pipeline.close()
    return quiet, saved


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1)], ids=["tensors", "data"])
def test_evaluating_and_saving_use_true_weights_and_change_nothing(shape: tuple[int, int, int]) -> None:
    for quiet, disturbed in run_ranks(4, _evaluate_in_between, shape):
        assert quiet == disturbed


def _save_while_true_weights_are_shown(ranks: Ranks) -> list[bool]:
    """Return for each of some states whether it has the true weights after the predicted ones have returned."""
    member = Member((1, 2, 1), case("nesterov", width=2))
    member.iterate(0)
    member.iterate(1)
    true = member.whole()
    with member.pipeline.true_weights():
        states = [member.model.state_dict()]
        assert all(isinstance(value, nn.Parameter) for value in member.model.state_dict(keep_vars=True).values())
    member.model.eval()
    regress(member.model, member.batches[2])
    states.append(member.model.state_dict())
    member.model.train()
    regress(member.model, member.batches[2])
    states.append(dict(member.model.named_parameters()))
    have_true = [all(torch.equal(state[name].full_tensor(), true[name]) for name in true) for state in states]
    member.pipeline.close()
    return have_true


def test_a_state_made_while_the_true_weights_are_shown_has_copies_of_shards() -> None:
    """It held the memory of the shards, which got the predicted weights afterwards."""
    for kept in run_ranks(2, _save_while_true_weights_are_shown):
        assert kept == [True, True, False], "the parameters have others then"


def _resume(ranks: Ranks, shape: tuple[int, int, int], folder: Path) -> tuple[Any, Any, str]:
    options = case("adamw", width=2, codec="int4")
    whole, resumed = Member(shape, options), Member(shape, options)
    for number in range(ITERATIONS):
        if number == 2:
            ShardFile(folder, whole.pipeline, whole.optimizer).save()
        whole.iterate(number)
    file = ShardFile(folder, resumed.pipeline, resumed.optimizer)
    file.load()
    for number in range(2, ITERATIONS):
        resumed.iterate(number)
    for member in (whole, resumed):
        member.pipeline.flush()
    hashes = whole.hashed(), resumed.hashed()
    if ranks.rank == 3:
        file.path.unlink()
    ranks.all_gather_object("one file less", None)
    try:
        file.load()
    except RunError as error:
        said = str(error)
    for member in (whole, resumed):
        member.pipeline.close()
    return *hashes, said


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 1)], ids=["tensors", "data"])
def test_a_run_resumes_bit_for_bit_from_a_file_for_each_shard(shape: tuple[int, int, int], tmp_path: Path) -> None:
    missing = f"{tmp_path}/part-1-1.pt is not whole (part-1-1.pt is missing)"
    for whole, resumed, said in run_ranks(4, _resume, shape, tmp_path):
        assert whole == resumed
        assert said == f"a checkpoint must have the part of each rank; {missing}"


def _not_finite(ranks: Ranks, on_nonfinite: str) -> Any:
    member = Member((2, 1, 2), case("sgd", width=2, on_nonfinite=on_nonfinite))
    reports = []
    try:
        for number in range(4):
            regress(member.model, member.batches[number]).backward()
            if (ranks.rank, number) == (3, 1):  # one shard of one layer, which only one ring exchanges
                gradient: Any = member.model.get_parameter("0.0.weight").grad
                gradient.to_local()[0, 0] = torch.nan
            report = member.pipeline.step()
            reports.append((report.applied, report.skipped, report.nonfinite_ranks))
        member.pipeline.close()
    except NonFiniteGradientError as error:
        reports.append((error.iteration,))
        with pytest.warns(RuntimeWarning, match="gradients in flight are dropped"):
            member.pipeline.close()
    return reports, member.hashed() if on_nonfinite == "skip" else None


def test_a_gradient_that_is_not_finite_in_one_shard_is_left_out_by_all_ranks() -> None:
    outcomes = run_ranks(4, _not_finite, "skip")
    for rank, (reports, _) in enumerate(outcomes):
        assert reports == [((), (), ()), ((0,), (), ()), ((), (1,), (2 + rank % 2,)), ((2,), (), ())]
    assert outcomes[0][1] == outcomes[2][1]
    assert outcomes[1][1] == outcomes[3][1]
    assert [reports for reports, _ in run_ranks(4, _not_finite, "stop")] == 4 * [[((), (), ()), ((0,), (), ()), (1,)]]


def _start_with_other_threads(ranks: Ranks, within: bool) -> str:
    """Give members of an island other numbers of threads, or islands alone; return what is refused."""
    torch.set_num_threads(1 + (ranks.rank % 2 if within else ranks.rank // 2))
    try:
        Member((2, 1, 2), case("sgd", width=1)).pipeline.close()
    except DisagreementError as error:
        return str(error)
    return ""


def test_members_of_an_island_must_have_the_same_number_of_threads() -> None:
    """Parameters that they hold alike used to drift apart silently: each member computes their gradients."""
    threads = "number of torch's threads in an island must be the same on all ranks; got 1 on rank {}, 2 on rank {}"
    said = [f"{threads.format(first, first + 1)}: set OMP_NUM_THREADS" for first in (0, 0, 2, 2)]
    assert run_ranks(4, _start_with_other_threads, True) == said
    assert run_ranks(4, _start_with_other_threads, False) == [""] * 4


def _norms_of_others(ranks: Ranks) -> list[float | None]:
    """Return the norms of means, where the ranks of each island compute norms with rounding errors of their own."""
    exact = torch.linalg.vector_norm
    with pytest.MonkeyPatch.context() as patch:
        rounding = 1 + 1e-12 * ranks.rank
        patch.setattr(torch.linalg, "vector_norm", lambda *args, **options: exact(*args, **options) * rounding)
        member = Member((2, 1, 2), case("sgd", width=2, guard=True))
        norms = []
        for number in range(ITERATIONS):
            regress(member.model, member.batches[number]).backward()
            norms.append(member.pipeline.step().gradient_norm)
        member.pipeline.close()
    return norms


def test_all_ranks_give_the_guard_the_same_norm_however_they_round() -> None:
    """Islands used to judge by norms of their own, and would have fallen back one without the other."""
    first, *others = run_ranks(4, _norms_of_others)
    assert len([norm for norm in first if norm is not None]) == ITERATIONS - 1
    assert others == [first] * 3


def _train_in_float32(ranks: Ranks) -> dict[str, Tensor]:
    shape = (2, 2, 1)
    mesh = mesh_of(shape)
    model, batches = batches_of(shape, SIZES, 3)
    model.float()
    split(model, mesh)
    island, data, _ = mesh.get_coordinate()
    with Pipelined(model, OPTIMIZERS["nesterov"](model.parameters()), width=1, mesh=mesh) as pipeline:
        for of in batches:
            inputs, targets = of[island][data]
            regress(model, (inputs.float(), targets.float())).backward()
            pipeline.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_gradients_of_fsdp2_are_averages_in_float32_too() -> None:
    """On gloo, torch of 2025 took the sum of float32 values for their average (its issue 162338)."""
    weights = run_ranks(4, _train_in_float32)
    model, batches = batches_of((2, 2, 1), SIZES, 3)
    optimizer = OPTIMIZERS["nesterov"](model.parameters())
    for of in batches:
        optimizer.zero_grad()
        torch.stack([regress(model, batch) for island in of for batch in island]).mean().backward()
        optimizer.step()
    whole = {name: value.float() for name, value in model.state_dict().items()}
    for of_rank in weights:
        assert_same_weights(of_rank, whole, rtol=2e-5)


def _sequence() -> tuple[nn.Module, list[Batch]]:
    """Return a model of sequences, and a batch of four sequences of length 4 for each of two islands."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 3)).double()
    generator = torch.Generator().manual_seed(2)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return model, [(draw(4, 4, 4), draw(4, 4, 3)) for _ in range(2)]


def _train_in_sequence_parallel(ranks: Ranks) -> tuple[str, dict[str, Tensor]]:
    mesh = mesh_of((2, 1, 2))
    island, _, member = mesh.get_coordinate()
    model, batches = _sequence()
    styles = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensors"], styles)
    optimizer = OPTIMIZERS["nesterov"](model.parameters())
    inputs, targets = batches[island]
    with Pipelined(model, optimizer, width=1, mesh=mesh) as pipeline:
        for _ in range(3):
            regress(model, (inputs[:, 2 * member : 2 * member + 2], targets)).backward()
            gradient: Any = model.get_parameter("0.weight").grad
            placements = str(gradient.placements)
            pipeline.step()
    state = model.state_dict()
    return placements, {name: value.full_tensor() for name, value in state.items()}


def test_gradients_that_are_sums_to_be_taken_are_summed_inside_an_island() -> None:
    model, batches = _sequence()
    optimizer = OPTIMIZERS["nesterov"](model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([regress(model, batch) for batch in batches]).mean().backward()
        optimizer.step()
    for placements, weights in run_ranks(4, _train_in_sequence_parallel):
        assert "Partial" in placements
        assert_same_weights(weights, model.state_dict(), rtol=1e-9)


def _combine_buffers(ranks: Ranks) -> list[list[float]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fully_shard(model, mesh=mesh_of((2, 2, 1))["data"])
    found = []
    with Pipelined(model, OPTIMIZERS["sgd"](model.parameters()), mesh=mesh_of((2, 2, 1))) as pipeline:
        for how in ("average", "rank-0"):
            model[1].running_mean.fill_(ranks.rank)
            pipeline.combine_buffers(how)
            found.append(model[1].running_mean.tolist())
    return found


def test_buffers_are_combined_over_all_ranks() -> None:
    assert run_ranks(4, _combine_buffers) == 4 * [[[1.5, 1.5], [0.0, 0.0]]]


def _refused(ranks: Ranks) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("islands", "inside"))

    def attempt(
        given: Any,
        inside: DeviceMesh | None,
        make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["sgd"],
        **options: Any,
    ) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        if inside is not None:
            fully_shard(model, mesh=inside)
        return error_of(Pipelined, model, make(model.parameters()), mesh=given, **options)

    def muon(parameters: Any) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        return MuonWithAdamW(matrices, [], lr=0.1)

    return [
        attempt(None, mesh["inside"]),
        attempt("islands", mesh["inside"]),
        attempt(mesh["islands"], mesh["inside"]),
        attempt(mesh, None),
        attempt(mesh, mesh["islands"]),
        attempt(mesh, mesh),
        attempt(mesh, mesh["inside"], muon),
        attempt(mesh, mesh["inside"], codec="topk"),
        attempt(mesh, mesh["inside"], wire=Wire(reduce="rows")),
        attempt(mesh, mesh["inside"], ranks=ranks),
        attempt(DeviceMesh("cpu", [[1, 2], [0, 3]]), mesh["inside"]),
        attempt(DeviceMesh("cpu", [[1, 2], [3, 0]]), mesh["inside"]),
    ]


def test_what_cannot_be_islands_is_refused_in_one_line() -> None:
    said = run_ranks(4, _refused)[1]
    both = "must be left out with a mesh of islands; got both"
    on_ranks = "ranks {} as (Shard(dim=0),)"
    assert said == [
        f"UserInputError: {line}"
        for line in (
            "mesh must be given where a parameter is a DTensor, with islands along its first dimension; got none, and "
            "0.weight on " + on_ranks.format("0, 1"),
            "mesh must be a DeviceMesh of torch.distributed; got str",
            "mesh must have at least two dimensions, the first one between islands, the others inside; got one of 2 "
            "ranks (give the whole mesh, not a part of it)",
            "mesh must be left out unless the optimizer's parameters are sharded over its inner dimensions (by "
            "parallelize_module or fully_shard, before the optimizer is made); got none that is",
            "parameters must be sharded inside an island, here ranks 0, 1; got 0.weight on " + on_ranks.format("1, 3"),
            "parameters must be sharded inside an island, here ranks 0, 1; got 0.weight on ranks 0, 1, 2, 3 as "
            "(Replicate(), Shard(dim=0))",
            "optimizer must update value by value with a mesh of islands; got MuonWithAdamW, which needs the whole of "
            "0.weight",
            f"codec topk {both}",
            f"reduce rows {both}",
            f"ranks or process_group {both}",
            "parameters must be sharded inside an island, here ranks 1, 2; got 0.weight on " + on_ranks.format("0, 1"),
            "mesh must have the ranks inside each island in ascending order; got [[1, 2], [3, 0]]",
        )
    ]


def _outside(ranks: Ranks) -> str:
    mesh = DeviceMesh("cpu", [[0], [1]])
    model = nn.Linear(4, 2)
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2, 4), mesh, run_check=False))
    model.weight = parameter
    if ranks.rank < 2:
        return ""
    return error_of(Pipelined, model, OPTIMIZERS["sgd"](model.parameters()), mesh=mesh)


def test_a_mesh_that_leaves_a_rank_over_is_refused_there() -> None:
    assert run_ranks(3, _outside)[2] == (
        "UserInputError: mesh must divide the job's ranks into islands; got one of 2 x 1 without this rank"
    )
