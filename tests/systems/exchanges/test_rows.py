"""Embeddings exchanged by the rows that are not zero, compared with the same gradients exchanged whole."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from _memory_transport import MemoryTransport, first_of_equals, integers, run_threads
from _ranks import run_ranks
from _sections import sections
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipesgd import Pipelined
from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import Fp32, codec_named
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.errors import DisagreementError, UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.pipeline.buckets import bucket_indices
from pipesgd.ranks import Ranks
from pipesgd.reducers.make import check_eligible
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates, Wire
from pipesgd.systems.exchanges.fewest_bytes import fewest_bytes
from pipesgd.systems.exchanges.gathering import sends_less
from pipesgd.systems.exchanges.rows import RowsReducer
from timing_model.schedules import gather_ring, ring

# --- The sum, between threads -----------------------------------------------------------------------------------------


def summed(gradients: list[list[Tensor]]) -> tuple[list[Tensor], list[int]]:
    """Return the sums of ``gradients[rank][matrix]`` by rows, the same bytes on all ranks, and the bytes each sends."""
    world_size = len(gradients)

    def run(transport: MemoryTransport) -> tuple[list[Tensor], int]:
        schedule = gather_ring(transport.rank, world_size)
        all_gather = ScheduledAllReduce(transport, schedule, Uncompressed(), segment_bytes=64)
        reducer = RowsReducer(all_gather, rank=transport.rank, world_size=world_size)
        buffer = FlatBuffer(gradients[transport.rank])
        for iteration in range(2):
            buffer.fill_from(gradients[transport.rank])
            finished: list[Tensor] = []
            before = transport.bytes_sent
            reducer.sum(buffer, iteration, finished.append)
            assert list(map(id, finished)) == list(map(id, buffer.flats))
            assert transport.bytes_sent - before == reducer.bytes_sent
        return buffer.views, reducer.bytes_sent

    return first_of_equals(run_threads(world_size, run)[0])


def summed_whole(gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return the sums by an all-reduce around the ring."""

    def run(transport: MemoryTransport) -> list[Tensor]:
        all_reduce = ScheduledAllReduce(transport, ring(transport.rank, len(gradients)), Uncompressed())
        buffer = FlatBuffer(gradients[transport.rank])
        buffer.fill_from(gradients[transport.rank])
        for flat in buffer.flats:
            all_reduce(flat)
        return buffer.views

    sums: list[Tensor] = run_threads(len(gradients), run)[0][0]
    return sums


def bytes_of_rows(gradients: list[list[Tensor]]) -> int:
    """Return the bytes that each rank must send: counts, and an index and a row of the most that any rank has."""
    total = 0
    for of_ranks in zip(*gradients, strict=True):
        most = max(sum(bool((row != 0).any()) for row in matrix) for matrix in of_ranks)
        total += 4 + most * (4 + of_ranks[0].shape[1] * of_ranks[0].element_size())
    return (len(gradients) - 1) * total


def with_rows(shape: tuple[int, int], rank: int, share: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return integers in about this share of the rows, other ones on each rank."""
    rows, columns = shape
    chosen = torch.rand(rows, 1, generator=torch.Generator().manual_seed(1000 * rank + rows)) < share
    return torch.where(chosen, integers(rows * columns, rank, dtype).view(shape), torch.zeros((), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@settings(max_examples=25)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), min_size=1, max_size=3),
    shares=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=6),
)
def test_sums_are_those_of_an_all_reduce_and_bytes_those_of_the_rows(
    dtype: torch.dtype, shapes: list[tuple[int, int]], shares: list[float]
) -> None:
    """Integers have the same sum in every order. Some ranks have no row, others all."""
    gradients = [[with_rows(shape, rank, share, dtype) for shape in shapes] for rank, share in enumerate(shares)]
    sums, sent = summed(gradients)
    assert all(map(torch.equal, sums, summed_whole(gradients)))
    assert sent == [bytes_of_rows(gradients)] * len(shares)


def test_matrices_of_several_dtypes_are_summed_each_in_its_own() -> None:
    kinds = [((9, 3), torch.float32), ((5, 2), torch.float64), ((7, 1), torch.bfloat16), ((4, 3), torch.float32)]
    gradients = [[with_rows(shape, rank, 0.5, dtype) for shape, dtype in kinds] for rank in range(3)]
    sums, sent = summed(gradients)
    assert [total.dtype for total in sums] == [dtype for _, dtype in kinds]
    assert all(map(torch.equal, sums, summed_whole(gradients)))
    assert sent == [bytes_of_rows(gradients)] * 3


def test_values_are_added_in_rank_order() -> None:
    """The same order on all ranks, which that of a ring is not: there, each chunk begins on another rank."""
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(30, 5, generator=generator) * 10.0**rank] for rank in (0, 4, 2, 3)]
    expected = torch.zeros(30, 5)
    for (gradient,) in gradients:
        expected += gradient
    assert torch.equal(summed(gradients)[0][0], expected)
    assert not torch.equal(summed(gradients[::-1])[0][0], expected), "another order gives another sum"


def test_a_row_of_negative_zeros_is_the_same_bytes_on_all_ranks() -> None:
    """It is not sent, so it must not stay on the rank that has it."""
    gradients = [[torch.zeros(3, 2)] for _ in range(3)]
    gradients[1][0][2] = -0.0
    (total,), sent = summed(gradients)
    assert not total.signbit().any()
    assert sent == [2 * 4] * 3


def test_rows_that_are_not_finite_arrive_and_others_stay_finite() -> None:
    gradients = [[with_rows((8, 3), rank, 0.3)] for rank in range(3)]
    gradients[2][0][5, 1] = torch.nan
    gradients[0][0][7, 0] = torch.inf
    (total,), _ = summed(gradients)
    assert total.isnan().nonzero().tolist() == [[5, 1]]
    assert total.isinf().nonzero().tolist() == [[7, 0]]


# --- Which parameters, and their bucket -------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A classifier of short texts, which are symbols (B, T); a layer shares one of its embeddings."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.symbols = nn.Embedding(40, 6, sparse=sparse)
        self.places = nn.EmbeddingBag(8, 6, mode="sum")
        self.tied = nn.Embedding(4, 6)
        self.hidden = nn.Linear(6, 6)
        self.output = nn.Linear(6, 4, bias=False)
        self.output.weight = self.tied.weight

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols).mean(dim=1) + self.places(symbols % 8) + self.tied(symbols[:, 0] % 4)
        logits: Tensor = self.output(self.hidden(x).tanh())
        return logits


def _tagger(*, sparse: bool = False) -> Tagger:
    torch.manual_seed(0)
    return Tagger(sparse=sparse)


def test_embeddings_are_found_unless_another_layer_shares_their_weights() -> None:
    model = _tagger()
    assert list(map(id, RowsReducer.weights(model))) == [id(model.symbols.weight), id(model.places.weight)]
    assert RowsReducer.weights(nn.Linear(2, 2)) == []
    alike = nn.ModuleList([nn.Embedding(3, 2), nn.Embedding(3, 2)])
    alike[1].weight = alike[0].weight
    assert len(RowsReducer.weights(alike)) == 1


class Scaled(nn.Embedding):
    """An embedding with a parameter in addition to its table."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, symbols: Tensor) -> Tensor:
        return self.scale * super().forward(symbols)


def test_other_parameters_of_an_embeddings_class_are_exchanged_whole() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(2, 1))
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=1, wire=Wire(reduce="rows")) as pipeline:
        model(torch.tensor([1])).sum().backward()
        assert pipeline.step().applied == (0,)
        assert list(pipeline.exchanges) == ["0.weight"]


def test_more_rows_than_an_index_can_name_are_refused() -> None:
    model = nn.Embedding(2**31, 1, device="meta")
    with pytest.raises(UserInputError, match=r"embeddings must have at most 2\*\*31 - 1 rows with .*; got 2147483648"):
        RowsReducer.weights(model)


NO_EMBEDDING = "torch.nn.Embedding is trained that shares its weights with no other layer"
NO_LINEAR = (
    "torch.nn.Linear is trained that shares its weight with no layer of another kind, in float32, float64 or bfloat16"
)


@pytest.mark.parametrize(
    ("reduce", "layers", "missing"),
    [
        ("rows", [nn.Linear(2, 2)], NO_EMBEDDING),
        ("rows", [nn.Embedding(3, 2).requires_grad_(False), nn.Linear(2, 2)], NO_EMBEDDING),
        ("factors", [nn.Embedding(3, 2)], NO_LINEAR),
        ("factors", [nn.Linear(3, 2).requires_grad_(False), nn.LayerNorm(2)], NO_LINEAR),
    ],
)
def test_a_model_without_a_layer_to_train_is_refused(reduce: str, layers: list[nn.Module], missing: str) -> None:
    model = nn.Sequential(*layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for check in (
        lambda: check_eligible(reduce, model, trained),
        lambda: Pipelined(model, torch.optim.SGD(trained, lr=0.1), wire=Wire(reduce=reduce)),
    ):
        with pytest.raises(UserInputError) as refused:
            check()
        assert str(refused.value) == f"reduce must be matrix unless a {missing}; got {reduce}"


def test_embeddings_are_the_last_bucket_in_addition_to_the_others() -> None:
    model = _tagger()
    parameters = list(model.parameters())
    by_rows = [set(map(id, RowsReducer.weights(model)))]
    names = [name for name, _ in model.named_parameters()]
    assert names == ["symbols.weight", "places.weight", "tied.weight", "hidden.weight", "hidden.bias"]
    assert bucket_indices(model, parameters, "1", by_rows) == [[2, 3, 4], [0, 1]]
    assert bucket_indices(model, parameters, "3", by_rows) == [[4], [3], [2], [0, 1]]
    assert bucket_indices(model, parameters[:2], "1", by_rows) == [[0, 1]], "nothing else is trained"
    assert bucket_indices(model, parameters[:2], "1MiB", by_rows) == [[0, 1]]
    with pytest.raises(UserInputError, match="buckets must be at most the number of parameters, 3; got 4"):
        bucket_indices(model, parameters, "4", by_rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce": "row"}, "reduce must be one of matrix, rows, factors, auto; got 'row' (did you mean rows?)"),
        (
            {"reduce": "rows", "all_reduce": "native"},
            "reduce must be matrix with --all-reduce native, in which torch sums whole gradients; got rows",
        ),
    ],
)
def test_what_rows_do_not_go_with_is_refused(options: dict[str, Any], message: str) -> None:
    model = _tagger()
    with pytest.raises(UserInputError) as refused:
        Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), **sections(**options))
    assert str(refused.value) == message


def test_sparse_adam_is_refused() -> None:
    model = _tagger(sparse=True)
    with pytest.raises(UserInputError, match=r"optimizer must take dense gradients, .*; got SparseAdam"):
        Pipelined(
            model,
            torch.optim.SparseAdam(model.parameters()),
            updates=Updates(prediction="none"),
            wire=Wire(reduce="rows"),
        )


# --- In a pipeline ----------------------------------------------------------------------------------------------------


def _backward(model: Tagger, rank: int, iteration: int) -> None:
    """Compute the gradients of this rank's batch; rank 1 uses no embedding in every third iteration."""
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    symbols = torch.randint(40, (3, 4), generator=generator)
    labels = torch.randint(4, (3,), generator=generator)
    logits = model.hidden(torch.ones(3, 6))[:, :4] if rank == 1 and iteration % 3 == 2 else model(symbols)
    nn.functional.cross_entropy(logits, labels).backward()


def _give_integers(model: Tagger, rank: int, iteration: int, *, sparse: bool) -> None:
    """Give every parameter a gradient of integers, embeddings one of few rows; on rank 1 every third one has none."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        share = 1.0 if name not in ("symbols.weight", "places.weight") else 0.0 if rank == 1 and iteration % 3 else 0.2
        shape = (len(parameter), parameter[0].numel())
        gradient = with_rows(shape, 10 * iteration + 100 * number + rank, share).view(parameter.shape)
        parameter.grad = gradient.to_sparse(1) if sparse and name == "symbols.weight" else gradient


Found = tuple[list[str], int, int]
"""Hashes of the weights after every iteration, bytes that the reports count, and bytes that the transport counts."""


def _train(ranks: Ranks, *, integers_only: bool, sparse: bool = False, **options: Any) -> Found:
    model = _tagger(sparse=sparse and not integers_only)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hashes, counted = [], 0
    with Pipelined(model, optimizer, ranks=ranks, **sections(**options)) as pipeline:
        transport = pipeline.pipeline.flight.connections.transport
        before = transport.bytes_sent
        for iteration in range(6):
            if integers_only:
                _give_integers(model, ranks.rank, iteration, sparse=sparse)
            else:
                _backward(model, ranks.rank, iteration)
            counted += pipeline.step().wire_bytes
            with pipeline.true_weights():
                hashes.append(weights_sha256(model))
        counted += pipeline.flush().wire_bytes
        sent = transport.bytes_sent - before
    return [*hashes, weights_sha256(model)], counted, sent


def _train_all(ranks: Ranks, cases: list[dict[str, Any]]) -> list[Found]:
    return [_train(ranks, **case) for case in cases]


CHEAPER = [{"reduce": "rows"}, {"reduce": "rows", "sparse": True}]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "integers_only"), [(1, False), (2, False), (3, True)])
def test_training_by_rows_is_training_by_matrices_bit_for_bit(world_size: int, integers_only: bool) -> None:
    """Two ranks add two values in one order only; for three, gradients are integers, whose sums are exact."""
    ways = [{"width": 1}, {"width": 2}, {"width": 3} if integers_only else {"width": 1, "buckets": 2}]
    cases = [{**way, **how, "integers_only": integers_only} for way in ways for how in ({}, *CHEAPER)]
    of_ranks = run_ranks(world_size, _train_all, cases)
    for number in range(0, len(cases), 3):
        for found in of_ranks:
            whole, *by_rows = found[number : number + 3]
            assert whole[0] == of_ranks[0][number][0], "replicas are identical"
            assert len(set(whole[0])) > 4
            for hashes, counted, sent in by_rows:
                assert hashes == whole[0], cases[number]
                assert counted == sent, "every byte that is sent is in a report"
                assert sent < whole[2] or world_size == 1
                assert sent == by_rows[0][2], "sparse or not"


def _bytes_of_a_step(ranks: Ranks) -> tuple[int, int]:
    """Return the bytes that the report of a step counts at width 1, and what they should be."""
    model = _tagger()
    with Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=0.1), width=1, ranks=ranks, wire=Wire(reduce="rows")
    ) as pipeline:
        table, bag = torch.zeros(40, 6), torch.zeros(8, 6)
        table[: 5 + ranks.rank] = 1.0  # at most 6 rows
        model.symbols.weight.grad, model.places.weight.grad = table, bag
        found = pipeline.step().wire_bytes
    others = 4 * 6 + 6 * 6 + 6  # tied, hidden: of two ranks, each sends half of them twice
    return found, 4 * others + 2 * 4 + 6 * (4 + 4 * 6)


@pytest.mark.slow
def test_the_bytes_of_a_step_are_those_of_its_rows_and_of_the_other_gradients() -> None:
    for found, expected in run_ranks(2, _bytes_of_a_step):
        assert found == expected


def _with_a_codec(ranks: Ranks, options: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a step applied the exact mean of the embedding's gradients, and the hash of all weights."""
    model = _tagger()
    before = model.symbols.weight.detach().clone()
    gradients = [with_rows((40, 6), rank, 0.2) for rank in range(ranks.world_size)]
    with Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=1.0), width=1, ranks=ranks, **sections(**options)
    ) as pipeline:
        _backward(model, ranks.rank, 0)
        model.symbols.weight.grad = gradients[ranks.rank]
        pipeline.step()
    exact = before - torch.stack(gradients).sum(0) / ranks.world_size
    return torch.equal(model.symbols.weight.detach(), exact), weights_sha256(model)


def _with_codecs(ranks: Ranks, cases: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    return [_with_a_codec(ranks, options) for options in cases]


@pytest.mark.slow
def test_a_codec_encodes_all_gradients_but_those_by_rows_with_any_all_reduce() -> None:
    cases = [
        {"codec": "int4", "reduce": "matrix"},
        {"codec": "int4", "reduce": "rows"},
        {"codec": "int8", "reduce": "rows", "all_reduce": "all-to-all", "connections": 2},
        {"codec": codec_named("powersgd", low_rank=1), "reduce": "rows"},
        {"codec": "bf16", "reduce": "rows", "rate_limit": "1mbit", "segment_bytes": 64},
    ]
    one, other = run_ranks(2, _with_codecs, cases)
    assert one == other, "replicas are identical"
    assert [exact for exact, _ in one] == [False, True, True, True, True]


def _resume(ranks: Ranks, width: int) -> tuple[list[str], list[str], list[int], list[int]]:
    def build() -> tuple[Tagger, torch.optim.Optimizer, Pipelined]:
        model = _tagger(sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return (
            model,
            optimizer,
            Pipelined(model, optimizer, width=width, codec="int4", ranks=ranks, wire=Wire(reduce="rows")),
        )

    def run(parts: Any, first: int, last: int) -> tuple[list[str], list[int]]:
        hashes, sent = [], []
        for iteration in range(first, last):
            _backward(parts[0], ranks.rank, iteration)
            sent.append(parts[2].step().wire_bytes)
            hashes.append(weights_sha256(parts[0]))
        return hashes, sent

    one, other = build(), build()
    run(one, 0, 3)
    with one[2].true_weights():
        saved = copy.deepcopy([part.state_dict() for part in one])
    uninterrupted = run(one, 3, 7)
    run(other, 10, 12)
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    resumed = run(other, 3, 7)
    for _, _, pipeline in (one, other):
        pipeline.close()
    ends = [weights_sha256(one[0]), weights_sha256(other[0])]
    return [*uninterrupted[0], ends[0]], [*resumed[0], ends[1]], uninterrupted[1], resumed[1]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_a_state_dict_continues_bit_for_bit_and_byte_for_byte(width: int) -> None:
    for hashes, resumed, sent, sent_again in run_ranks(2, _resume, width):
        assert resumed == hashes
        assert sent_again == sent
        assert len(set(sent)) > 1, "rows differ in number between iterations"


def test_a_state_of_another_exchange_is_refused() -> None:
    states, pipelines = {}, {}
    for reduce in ("matrix", "rows"):
        model = _tagger()
        pipelines[reduce] = Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), wire=Wire(reduce=reduce))
        states[reduce] = pipelines[reduce].state_dict()
    with pytest.raises(UserInputError, match="reduce must be matrix, as in the state that is loaded; got rows"):
        pipelines["rows"].load_state_dict(states["matrix"])
    pipelines["matrix"].load_state_dict(states["matrix"])
    for pipeline in pipelines.values():
        pipeline.close()


def test_a_sparse_gradient_of_another_layer_is_refused_and_nothing_is_lost() -> None:
    model = _tagger(sparse=True)
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=1, wire=Wire(reduce="rows")) as pipeline:
        _backward(model, 0, 0)
        dense = model.hidden.weight.grad
        assert dense is not None
        model.hidden.weight.grad = dense.to_sparse(1)
        with pytest.raises(UserInputError, match="gradients must be dense; got a sparse one"):
            pipeline.step()
        table = model.symbols.weight.grad
        assert table is not None
        assert table.is_sparse, "it waits for its step"
        model.hidden.weight.grad = dense
        assert pipeline.step().applied == (0,)


def _scaled(ranks: Ranks, sparse: bool) -> tuple[str, float]:
    """Train with a loss scale; in one iteration rank 1's embedding has an infinite gradient, which is skipped."""
    model = _tagger(sparse=sparse)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped: list[int] = []
    with Pipelined(
        model, optimizer, width=2, scaler=scaler, ranks=ranks, updates=Updates(clip_norm=0.1), wire=Wire(reduce="rows")
    ) as pipeline:
        for iteration in range(5):
            loss = model(torch.tensor([[iteration, 7, 7]])).square().sum()
            if iteration == 2 and ranks.rank == 1:
                loss = loss + torch.inf * model.symbols(torch.tensor([3])).sum()
            scaler.scale(loss).backward()
            skipped += pipeline.step().skipped
        skipped += pipeline.flush().skipped
    assert skipped == [2]
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return weights_sha256(model), scaler.get_scale()


@pytest.mark.slow
def test_sparse_gradients_are_scaled_clipped_and_skipped_as_dense_ones() -> None:
    sparse, dense = (run_ranks(2, _scaled, sparse) for sparse in (True, False))
    assert sparse[0] == sparse[1] == dense[0] == dense[1]
    assert sparse[0][1] == 4.0


@given(
    rows=st.integers(0, 60),
    columns=st.integers(0, 8),
    used=st.integers(0, 60),
    world_size=st.integers(1, 7),
    codec=st.sampled_from(["fp32", "bf16", "int8"]),
)
def test_the_choice_is_by_the_bytes_of_both(rows: int, columns: int, used: int, world_size: int, codec: str) -> None:
    matrix = torch.zeros(rows, columns)
    numel = rows * columns
    encoded = {"fp32": 4 * numel, "bf16": 2 * numel, "int8": numel + 4 * math.ceil(numel / 1024)}[codec]
    around_a_ring = 2 * (world_size - 1) / world_size * encoded
    gathered = (world_size - 1) * (4 + used * (4 + 4 * columns * (rows > 0)))
    assume(gathered != pytest.approx(around_a_ring))
    codec_of_name = codec_named(codec).make()
    part_bytes = RowsReducer.part_bytes(used, matrix)
    assert sends_less(part_bytes, matrix, codec_of_name, world_size) == (gathered < around_a_ring)


def test_an_embedding_has_no_more_rows_than_its_table_and_sparse_ones_go_by_rows() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Embedding(100, 4, sparse=True), nn.Linear(4, 2))
    found = {rows: fewest_bytes(model, rows, Fp32().make(), 2) for rows in (10, 1000)}
    assert found[10] == {"0.weight": "rows", "1.weight": "rows", "2.weight": "matrix"}
    assert found[1000] == {"0.weight": "matrix", "1.weight": "rows", "2.weight": "matrix"}
    model[0].requires_grad_(False)
    assert "0.weight" not in fewest_bytes(model, 10, Fp32().make(), 2)


def _of_each(ranks: Ranks, reduce: Any) -> tuple[dict[str, str], str]:
    model = _tagger()
    with Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, wire=Wire(reduce=reduce)
    ) as pipeline:
        for iteration in range(3):
            _backward(model, ranks.rank, iteration)
            pipeline.step()
    return pipeline.exchanges, weights_sha256(model)


@pytest.mark.slow
def test_the_exchange_of_each_parameter_can_be_named() -> None:
    """Two ranks add two values: sums of rows and of matrices have the same bits."""
    named = {"symbols.weight": "rows", "places.weight": "matrix"}
    for reduce in (named, "matrix"):
        one, other = run_ranks(2, _of_each, reduce)
        assert one == other
        assert one[0] == (named if reduce is named else {})
    assert run_ranks(2, _of_each, named)[0][1] == run_ranks(2, _of_each, "matrix")[0][1]


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        ("auto", "reduce must be one of matrix, rows, factors; got 'auto'"),
        ({"symbols.weight": "auto"}, "reduce of symbols.weight must be one of matrix, rows, factors; got 'auto'"),
        ({"elsewhere": "rows"}, "reduce must name parameters of the model; got 'elsewhere'"),
        ({"hidden.weight": "rows"}, r"reduce must be matrix unless a torch.nn.Embedding .*; got hidden.weight by rows"),
    ],
)
def test_exchanges_that_cannot_be_are_refused(reduce: Any, message: str) -> None:
    model = _tagger()
    with pytest.raises(UserInputError, match=message):
        Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), wire=Wire(reduce=reduce))


def _of_another_kind(ranks: Ranks) -> str:
    model = _tagger()
    try:
        Pipelined(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ranks=ranks,
            wire=Wire(reduce=("matrix", "rows")[ranks.rank]),
        ).close()
    except DisagreementError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_must_exchange_embeddings_alike() -> None:
    expected = "reduce must be the same on all ranks; got 'matrix' on rank 0, 'rows' on rank 1"
    assert run_ranks(2, _of_another_kind) == [expected] * 2
