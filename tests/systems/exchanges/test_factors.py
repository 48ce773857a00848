"""Linear layers exchanged by the factors of their gradients, compared with the same gradients exchanged whole."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from _memory_transport import MemoryTransport, first_of_equals, integers, run_threads
from _ranks import run_ranks
from _sections import sections
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipesgd import Pipelined
from pipesgd.codecs.floats import Uncompressed
from pipesgd.codecs.options import codec_named
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.errors import DisagreementError, UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.optim.loss_scale import LossScale
from pipesgd.pipeline.buckets import bucket_indices
from pipesgd.pipeline.exchanges import Exchanges
from pipesgd.pipeline.true_weights_hooks import OutsideOfGraphs
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Wire
from pipesgd.systems.exchanges.factor_hooks import FactorHooks, Factors, smallest_error, unit_roundoff
from pipesgd.systems.exchanges.factors import NOT_FINITE, NOT_THE_PRODUCT, FactorsReducer, checked_rows
from pipesgd.systems.exchanges.fewest_bytes import fewest_bytes
from pipesgd.systems.exchanges.gathering import sends_less
from timing_model.schedules import gather_ring

REFUSAL = "reduce factors must be for linear layers whose weight is used nowhere else"

# --- The sum, between threads -----------------------------------------------------------------------------------------


def factors_of(inputs: list[Tensor], gradients: list[Tensor]) -> Factors:
    """Return factors of calls with these inputs and output gradients."""
    dtype = inputs[0].dtype if inputs else torch.float32
    return Factors("weight", inputs, gradients, unit=unit_roundoff(dtype), smallest=smallest_error(dtype))


def product(factors: Factors, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the gradient of which these are the factors, as the sum of the products of each call."""
    total = torch.zeros(shape, dtype=dtype)
    for inputs, gradients in zip(factors.inputs, factors.gradients, strict=True):
        total += gradients.t() @ inputs
    return total


def with_integers(shape: tuple[int, int], calls: list[int], rank: int, dtype: torch.dtype = torch.float32) -> Factors:
    """Return factors of integers, of calls with these numbers of rows, other ones on each rank."""
    rows, columns = shape
    inputs = [integers(count * columns, rank + call, dtype).view(count, columns) for call, count in enumerate(calls)]
    gradients = [integers(count * rows, 2 * rank + call, dtype).view(count, rows) for call, count in enumerate(calls)]
    return factors_of(inputs, gradients)


def summed(of_ranks: list[list[Factors]], gradients: list[list[Tensor]]) -> tuple[list[Tensor], list[int]]:
    """Return the sums of ``gradients[rank][matrix]`` by factors, the same bytes on all ranks, and what each sends."""
    world_size = len(of_ranks)

    def run(transport: MemoryTransport) -> tuple[list[Tensor], int]:
        schedule = gather_ring(transport.rank, world_size)
        all_gather = ScheduledAllReduce(transport, schedule, Uncompressed(), segment_bytes=64)
        reducer = FactorsReducer(all_gather, rank=transport.rank, world_size=world_size)
        buffer = FlatBuffer(gradients[transport.rank])
        for iteration in range(2):
            buffer.fill_from(gradients[transport.rank])
            finished: list[Tensor] = []
            before = transport.bytes_sent
            reducer.parts = of_ranks[transport.rank]
            reducer.sum(buffer, iteration, finished.append)
            assert list(map(id, finished)) == list(map(id, buffer.flats))
            assert transport.bytes_sent - before == reducer.bytes_sent
        return buffer.views, reducer.bytes_sent

    return first_of_equals(run_threads(world_size, run)[0])


def bytes_of_factors(of_ranks: list[list[Factors]], shapes: list[tuple[int, int]], element_size: int = 4) -> int:
    """Return the bytes that each rank must send: a count, and an input and a gradient for the most rows of any rank."""
    total = 0
    for number, (rows, columns) in enumerate(shapes):
        most = max(sum(len(call) for call in factors[number].inputs) for factors in of_ranks)
        total += 4 + most * (rows + columns) * element_size
    return (len(of_ranks) - 1) * total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=25)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3),
    calls=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
)
def test_sums_are_those_of_whole_matrices_and_bytes_those_of_the_factors(
    dtype: torch.dtype, shapes: list[tuple[int, int]], calls: list[list[int]]
) -> None:
    """Integers have the same sum in every order. Some ranks have no call, others several, of any number of rows."""
    of_ranks = [[with_integers(shape, counts, rank, dtype) for shape in shapes] for rank, counts in enumerate(calls)]
    gradients = [
        [product(factors, shape, dtype) for factors, shape in zip(of_rank, shapes, strict=True)] for of_rank in of_ranks
    ]
    sums, sent = summed(of_ranks, gradients)
    for number, total in enumerate(sums):
        assert torch.equal(total, torch.stack([of_rank[number] for of_rank in gradients]).sum(0))
    assert sent == [bytes_of_factors(of_ranks, shapes, dtype.itemsize)] * len(calls)


def test_matrices_of_several_dtypes_are_summed_each_in_its_own() -> None:
    shapes = [(5, 3), (2, 4), (3, 3)]
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    of_ranks = [
        [with_integers(shape, [2, 1], rank, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        for rank in range(3)
    ]
    gradients = [[product(*one) for one in zip(of_rank, shapes, dtypes, strict=True)] for of_rank in of_ranks]
    sums, sent = summed(of_ranks, gradients)
    assert [total.dtype for total in sums] == dtypes
    for number, total in enumerate(sums):
        assert torch.equal(total, torch.stack([of_rank[number] for of_rank in gradients]).sum(0))
    assert sent == [2 * (3 * 4 + 3 * (8 * 4 + 6 * 8 + 6 * 2))] * 3


def test_products_are_added_in_rank_order() -> None:
    """The same order on all ranks, which that of a ring is not: there, each chunk begins on another rank."""
    numbers = torch.Generator().manual_seed(0)
    of_ranks = [
        [factors_of([torch.randn(4, 6, generator=numbers)], [torch.randn(4, 5, generator=numbers) * 10.0**magnitude])]
        for magnitude in (0, 4, 2, 3)
    ]
    expected = torch.zeros(5, 6)
    for (factors,) in of_ranks:
        expected.addmm_(factors.gradients[0].t(), factors.inputs[0])
    gradients = [[product(factors, (5, 6))] for (factors,) in of_ranks]
    assert torch.equal(summed(of_ranks, gradients)[0][0], expected)
    backwards = summed(of_ranks[::-1], gradients[::-1])[0][0]
    assert not torch.equal(backwards, expected), "another order gives another sum"


def test_a_gradient_that_is_not_finite_makes_its_sum_so_on_all_ranks_and_no_other() -> None:
    shapes = [(3, 2), (2, 2)]
    of_ranks = [[with_integers(shape, [2], rank) for shape in shapes] for rank in range(3)]
    of_ranks[1][0].gradients[0][1, 2] = torch.inf
    gradients = [
        [product(factors, shape) for factors, shape in zip(of_rank, shapes, strict=True)] for of_rank in of_ranks
    ]
    (bad, good), sent = summed(of_ranks, gradients)
    assert bad.isnan().all()
    assert torch.equal(good, torch.stack([of_rank[1] for of_rank in gradients]).sum(0))
    assert sent == [2 * (4 + 4 + 2 * 4 * 4)] * 3, "the factors of the first one do not travel"


def test_all_ranks_refuse_a_gradient_that_is_not_the_product_of_its_factors_on_one() -> None:
    of_ranks = [[with_integers((3, 2), [2], rank)] for rank in range(3)]
    gradients = [[product(factors, (3, 2))] for (factors,) in of_ranks]
    gradients[2][0][1, 1] += 1.0

    def run(transport: MemoryTransport) -> str:
        all_gather = ScheduledAllReduce(transport, gather_ring(transport.rank, 3), Uncompressed())
        reducer = FactorsReducer(all_gather, rank=transport.rank, world_size=3)
        buffer = FlatBuffer(gradients[transport.rank])
        buffer.fill_from(gradients[transport.rank])
        reducer.parts = of_ranks[transport.rank]
        with pytest.raises(UserInputError) as refused:
            reducer.sum(buffer, 7)
        assert refused.value.known_to_all
        return str(refused.value)

    said, _ = run_threads(3, run)
    assert (
        said
        == [
            f"{REFUSAL}, such as in a penalty or another function, and whose .grad nobody changes; got weight, whose "
            "gradient in iteration 7 is not that of its layer's calls (use --reduce matrix)"
        ]
        * 3
    )


# --- The check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 300)),
    calls=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    magnitude=st.integers(-12, 12),
    mean=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_gradients_by_torch_pass_the_check_and_a_large_change_does_not(
    dtype: torch.dtype, seed: int, shape: tuple[int, int], calls: list[int], magnitude: int, mean: float
) -> None:
    """Sums may cancel, or all values may be alike, so that rounding errors add up."""
    numbers = torch.Generator().manual_seed(seed)
    weight = torch.zeros(shape, dtype=dtype, requires_grad=True)
    factors = Factors("weight")
    for count in calls:
        x = ((torch.randn(count, shape[1], generator=numbers) + mean) * 10.0**magnitude).to(dtype)
        g = torch.randn(count, shape[0], generator=numbers).to(dtype)
        nn.functional.linear(x, weight).backward(g)
        factors.add(factors_of([x], [g]))
    gradient = weight.grad
    assert gradient is not None
    assert checked_rows(gradient, factors) == sum(calls)
    pairs = zip(factors.inputs, factors.gradients, strict=True)
    size = sum(float(g[:, 0].double().abs() @ x.double().norm(dim=1)) for x, g in pairs)
    changed = gradient.clone()
    changed[0, 0] += 100 * size
    assert checked_rows(changed, factors) == NOT_THE_PRODUCT


@pytest.mark.parametrize("penalty", [1e-2, 1e-4])
def test_a_penalty_of_a_ten_thousandth_of_the_gradient_is_noticed(penalty: float) -> None:
    """In float32, with a batch of 32."""
    numbers = torch.Generator().manual_seed(0)
    x, g = torch.randn(32, 400, generator=numbers), torch.randn(32, 300, generator=numbers)
    gradient = g.t() @ x
    weight = torch.randn(300, 400, generator=numbers)
    weight *= gradient.norm() / weight.norm()
    factors = factors_of([x], [g])
    assert checked_rows(gradient, factors) == 32
    assert checked_rows(gradient + penalty * weight, factors) == NOT_THE_PRODUCT


def test_what_is_not_finite_and_what_is_missing_is_told_apart() -> None:
    x, g = torch.ones(2, 3), torch.ones(2, 4)
    gradient = g.t() @ x
    assert checked_rows(gradient, factors_of([x], [g])) == 2
    assert checked_rows(8 * gradient, factors_of([x], [g]), scale=8.0) == 2
    assert checked_rows(torch.zeros(4, 3), factors_of([], [])) == 0
    assert checked_rows(gradient, factors_of([], [])) == NOT_THE_PRODUCT
    assert checked_rows(torch.zeros(4, 3), factors_of([x], [g])) == NOT_THE_PRODUCT
    for bad in (torch.nan, torch.inf):
        broken = gradient.clone()
        broken[3, 2] = bad
        assert checked_rows(broken, factors_of([x], [g])) == NOT_FINITE
    huge = torch.full((4, 3), torch.finfo(torch.float32).max)
    assert checked_rows(huge, factors_of([x], [g])) == NOT_THE_PRODUCT, "finite, though a sum of float32 would not be"


# --- Which parameters, and their bucket -------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A classifier of vectors (B, T, 6) with linear layers that are called twice, in place, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(input=x))
        x = x + self.twice(self.norm(x).transpose(0, 1)).transpose(0, 1)
        x = self.act(self.twice(x.mean(dim=-2)))
        scores: Tensor = self.last(x)
        return scores


def _mixed(dtype: torch.dtype = torch.float32) -> Mixed:
    torch.manual_seed(0)
    return Mixed().to(dtype)


class Derived(nn.Linear):
    """A linear layer of another class."""


def test_linear_layers_are_found_unless_another_kind_of_layer_shares_their_weights() -> None:
    model = _mixed()
    weights = [model.first.weight, model.twice.weight, model.last.weight]
    assert list(map(id, FactorsReducer.weights(model))) == list(map(id, weights))
    assert FactorsReducer.weights(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Embedding(3, 2), Derived(2, 2))) == []
    tied = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3))
    tied[0].weight = tied[1].weight
    assert FactorsReducer.weights(tied) == []
    alike = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    alike[0].weight = alike[1].weight
    assert len(FactorsReducer.weights(alike)) == 1
    assert FactorsReducer.weights(nn.Linear(2, 2).half()) == []
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert FactorsReducer.weights(normed) == []


def test_linear_layers_are_a_bucket_between_the_others_and_the_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    parameters = list(model.parameters())  # embedding; weight, bias; weight, bias; weight, bias
    exchanges = Exchanges(model, {"0.weight": "rows", "1.weight": "factors", "3.weight": "matrix"})
    assert bucket_indices(model, parameters, "1", exchanges.apart()) == [[2, 3, 4, 5, 6], [1], [0]]
    assert bucket_indices(model, parameters, "2", Exchanges(model, "factors").apart())[-1] == [1, 5]
    assert Exchanges(model, "matrix").apart() == []


@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 60),
    count=st.integers(0, 60),
    world_size=st.integers(1, 7),
    codec=st.sampled_from(["fp32", "int8"]),
)
def test_the_choice_is_by_the_bytes_of_both(rows: int, columns: int, count: int, world_size: int, codec: str) -> None:
    layer = nn.Linear(columns, rows, bias=False)
    encoded = {"fp32": 4 * rows * columns, "int8": rows * columns + 4 * -(-rows * columns // 1024)}[codec]
    gathered = (world_size - 1) * (4 + 4 * count * (rows + columns))
    fewer = gathered * world_size < 2 * (world_size - 1) * encoded
    chosen = fewest_bytes(layer, count, codec_named(codec).make(), world_size)
    assert chosen == {"weight": "factors" if fewer else "matrix"}
    part_bytes = FactorsReducer.part_bytes(count, layer.weight)
    assert sends_less(part_bytes, layer.weight, codec_named(codec).make(), world_size) == fewer


# --- The hooks --------------------------------------------------------------------------------------------------------


def _hooked(model: nn.Module, scale: float = 1.0) -> FactorHooks:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1.0 else None
    loss_scale = LossScale(scaler, [nn.Parameter(torch.zeros(()))])
    return FactorHooks(model, FactorsReducer.weights(model), loss_scale)


def _check(model: nn.Module, hooks: FactorHooks, scale: float = 1.0) -> list[int]:
    """Return the rows of the factors of each linear layer, or what the check finds."""
    found = []
    for weight in FactorsReducer.weights(model):
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        found.append(checked_rows(gradient, hooks.look(weight), scale))
    return found


X = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(1))


def test_all_calls_of_all_backward_passes_are_kept_as_they_were() -> None:
    model, x = _mixed(), X.clone()
    hooks = _hooked(model)
    model(x).square().sum().backward()
    x.zero_()  # the loop may use the memory of a batch again
    model(X[:2]).square().sum().backward()
    assert _check(model, hooks) == [28, 28 + 7, 7]
    hooks.forget()
    assert _check(model, hooks) == [NOT_THE_PRODUCT] * 3


def test_calls_whose_gradient_does_not_arrive_do_not_count() -> None:
    model = _mixed()
    hooks = _hooked(model)
    with torch.no_grad():
        model(X)
    model(X)
    model.eval()(X).detach()
    model.train()
    model.last.weight.requires_grad_(False)
    model(X[:1]).square().sum().backward()
    model.last.weight.requires_grad_(True)
    model.zero_grad()  # what was computed is dropped
    model(X).square().sum().backward()
    assert _check(model, hooks) == [20, 25, 5]


def _pending(hooks: FactorHooks) -> int:
    return sum(len(factors) for kept in hooks._kept.values() for factors in kept.pending.values())


def test_a_gradient_of_something_else_leaves_nothing() -> None:
    """Adversarial examples, for one, need the gradient of the input, of a pass through the layers, too."""
    model = _mixed()
    hooks = _hooked(model)
    x = X.clone().requires_grad_(True)
    (of_input,) = torch.autograd.grad(model(x).sum(), x)
    torch.autograd.grad(model(X).sum(), list(model.parameters()))
    assert _pending(hooks) == 0, "memory grows if no step follows"
    model(X + of_input.sign()).square().sum().backward()
    assert _check(model, hooks) == [20, 25, 5]


def test_a_backward_pass_that_fails_leaves_nothing_after_its_gradients_are_dropped() -> None:
    """It fails between two calls of a layer, when the gradient of one has arrived."""
    model = _mixed()
    hooks = _hooked(model)
    y = model.twice(model.first(X))
    y.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.twice(y).sum().backward()
    model.zero_grad()
    model(X).square().sum().backward()
    assert _check(model, hooks) == [20, 25, 5]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_activations_counts_once(reentrant: bool) -> None:
    """The same layers are called outside of it, too, in the pass within which a reentrant one runs another."""
    model = _mixed()
    hooks = _hooked(model)
    x = X.clone().requires_grad_(True)
    inner = checkpoint(model, x, use_reentrant=reentrant)
    (inner.square().sum() + model(x).square().sum()).backward()
    assert _check(model, hooks) == [40, 50, 10]
    assert _pending(hooks) == 0


class _NoGradient(torch.autograd.Function):
    """A function whose input gets no gradient, which torch passes on as None."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> None:
        return None


def test_output_gradients_that_others_change_or_leave_out_are_those_that_reach_the_layer() -> None:
    model = _mixed()
    hooks = _hooked(model)
    y = model.last(torch.randn(4, 8))
    y.register_hook(lambda gradient: gradient / 2)
    (y.sum() + _NoGradient.apply(model.last(torch.randn(3, 8))).sum()).backward()
    _NoGradient.apply(model.twice(torch.randn(3, 8))).sum().backward()
    assert _check(model, hooks) == [0, 0, 4]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_inputs_of_any_shape_and_layout_are_rows() -> None:
    for shape in [(6,), (0, 6), (3, 6), (2, 1, 3, 6)]:
        model = _mixed()
        hooks = _hooked(model)
        for x in (torch.randn(shape[::-1]).permute(*range(len(shape))[::-1]), torch.randn(6).expand(shape)):
            model.last(model.first(x)).sum().backward()
        rows = 2 * (math.prod(shape) // 6)
        assert _check(model, hooks) == [rows, 0, rows]
    for layer in (nn.Linear(0, 2), nn.Linear(2, 0)):
        hooks = _hooked(layer)
        layer(torch.ones(4, layer.in_features)).sum().backward()
        assert _check(layer, hooks) == [4]


def test_many_calls_in_few_bits_pass_although_some_values_have_no_gradient() -> None:
    """Rounding may add up to any size after 125 calls, but what is not computed with is not rounded."""
    layer = nn.Linear(3, 2).bfloat16()
    hooks = _hooked(layer)
    for _ in range(125):
        layer(torch.randn(2, 3, dtype=torch.bfloat16))[:, 0].sum().backward()
    assert _check(layer, hooks) == [250]
    assert layer.weight.grad is not None
    layer.weight.grad[1, 1] = 1e-3
    assert _check(layer, hooks) == [NOT_THE_PRODUCT]


def test_other_gradients_of_the_weight_are_noticed() -> None:
    def penalty(model: Mixed) -> None:
        (model(X).square().sum() + 1e-2 * model.first.weight.square().sum()).backward()

    def functional(model: Mixed) -> None:
        (model(X).square().sum() + nn.functional.linear(X, model.first.weight).sum()).backward()

    def changed(model: Mixed) -> None:
        model(X).square().sum().backward()
        assert model.first.weight.grad is not None
        model.first.weight.grad.mul_(0.99)

    for backward in (penalty, functional, changed):
        model = _mixed()
        hooks = _hooked(model)
        backward(model)
        assert _check(model, hooks) == [NOT_THE_PRODUCT, 25, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_weights_of_any_dtype_and_losses_of_any_scale_pass(dtype: torch.dtype, scale: float) -> None:
    model = _mixed(dtype)
    hooks = _hooked(model, scale)
    for _ in range(3):
        (scale * model(X.to(dtype)).square().sum()).backward()
    assert _check(model, hooks, scale) == [60, 75, 15]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_passes(dtype: torch.dtype) -> None:
    model = _mixed()
    scale = 128.0 if dtype == torch.float16 else 1.0
    hooks = _hooked(model, scale)
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype):
            x = X.clone()
            loss = model(x).square().sum()
        x.zero_()
        (scale * loss).backward()
    assert _check(model, hooks, scale) == [40, 50, 10]


def test_hooks_are_not_copied_and_end() -> None:
    model = _mixed()
    hooks = _hooked(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in copies:
        one(X).square().sum().backward()
        kept = [hook for module in one.modules() for hook in module._forward_hooks.values()]
        assert [type(hook) for hook in kept] == [OutsideOfGraphs] * 3, "those of copies do nothing"
    assert _check(model, hooks) == [0, 0, 0]
    hooks.remove()
    assert not any(module._forward_hooks for module in model.modules())
    model(X).square().sum().backward()


# --- In a pipeline ----------------------------------------------------------------------------------------------------


class Parallel(nn.Module):
    """Linear layers that all get the inputs, so that integers have gradients of integers, whose sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(6, 5, bias=False), nn.Linear(6, 2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def _loss(model: Parallel, x: Tensor, key: int) -> Tensor:
    """Return a loss whose gradients are integers if ``x`` is, of other ones for each key."""
    return _weighted(model(x), key)


def _weighted(outputs: list[Tensor], key: int) -> Tensor:
    return torch.stack([(integers(one.numel(), key).view(one.shape) * one).sum() for one in outputs]).sum()


def _exactly(ranks: Ranks, options: dict[str, Any]) -> tuple[list[str], int, int]:
    """Train by gradients of integers; rank 1 has other numbers of samples, and none for one layer in every third."""
    torch.manual_seed(0)
    model = Parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    hashes, counted = [], 0
    with Pipelined(model, optimizer, ranks=ranks, **sections(**options)) as pipeline:
        transport = pipeline.pipeline.flight.connections.transport
        before = transport.bytes_sent
        for iteration in range(6):
            for micro_batch in range(2):
                with pipeline.accumulating() if micro_batch == 0 else contextlib.nullcontext():
                    x = integers(6 * (2 + ranks.rank), iteration + micro_batch + ranks.rank).view(-1, 6)
                    outputs = model(x)
                    if ranks.rank == 1 and iteration % 3 == 1:
                        outputs = outputs[:2]
                    _weighted(outputs, iteration).backward()
            counted += pipeline.step().wire_bytes
            with pipeline.true_weights():
                hashes.append(weights_sha256(model))
        counted += pipeline.flush().wire_bytes
        sent = transport.bytes_sent - before
    return [*hashes, weights_sha256(model)], counted, sent


def _exactly_all(ranks: Ranks, cases: list[dict[str, Any]]) -> list[tuple[list[str], int, int]]:
    return [_exactly(ranks, case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_by_factors_is_training_by_matrices_bit_for_bit_if_sums_are_exact(world_size: int) -> None:
    ways = [{"width": 1}, {"width": 2, "prediction": "local"}, {"width": 3}, {"width": 1, "buckets": 2}]
    cases = [{**way, "reduce": reduce} for way in ways for reduce in ("matrix", "factors")]
    of_ranks = run_ranks(world_size, _exactly_all, cases)
    for number in range(0, len(cases), 2):
        for found in of_ranks:
            (whole, _, _), (hashes, counted, sent) = found[number : number + 2]
            assert whole == of_ranks[0][number][0], "replicas are identical"
            assert len(set(whole)) > 4
            assert hashes == whole, cases[number + 1]
            assert counted == sent, "every byte that is sent is in a report"


def _bytes_of_a_step(ranks: Ranks) -> tuple[int, int]:
    """Return the bytes that the report of a step counts at width 1, and what they should be."""
    model = Parallel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Pipelined(model, optimizer, width=1, ranks=ranks, wire=Wire(reduce="factors")) as pipeline:
        _loss(model, torch.ones(3 + ranks.rank, 6), 0).backward()  # at most 4 rows
        found = pipeline.step().wire_bytes
    biases = 9 + 2  # of two ranks, each sends half of them twice
    return found, 4 * biases + sum(4 + 4 * (6 + rows) * 4 for rows in (9, 5, 2))


@pytest.mark.slow
def test_the_bytes_of_a_step_are_those_of_its_factors_and_of_the_other_gradients() -> None:
    for found, expected in run_ranks(2, _bytes_of_a_step):
        assert found == expected


def _chained(ranks: Ranks, options: dict[str, Any], dtype: torch.dtype) -> tuple[str, Tensor, bool]:
    """Train a model of layers on layers; return the hash of its weights, the weights, and whether it ran by factors."""
    model = _mixed(dtype)
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.01), ranks=ranks, **sections(**options)) as pipeline:
        for iteration in range(5):
            numbers = torch.Generator().manual_seed(10 * iteration + ranks.rank)
            x = torch.randn(2 + ranks.rank, 4, 6, generator=numbers).to(dtype)
            model(x).square().mean().backward()
            pipeline.step()
            hooks = pipeline._of_exchanges.get("factors")
            assert hooks is None or not any(len(kept.complete) for kept in hooks._kept.values()), "freed"
        pipeline.flush()
        by_factors = set(pipeline.exchanges.values()) == {"factors"}
    weights = torch.cat([parameter.detach().double().view(-1) for parameter in model.parameters()])
    return weights_sha256(model), weights, by_factors


def _chained_all(ranks: Ranks, cases: list[tuple[dict[str, Any], torch.dtype]]) -> list[tuple[str, Tensor, bool]]:
    return [_chained(ranks, *case) for case in cases]


@pytest.mark.slow
def test_replicas_are_identical_and_training_is_that_by_matrices_up_to_rounding() -> None:
    cases: list[tuple[dict[str, Any], torch.dtype]] = [
        ({"width": width, "reduce": reduce}, dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for width in (1, 2)
        for reduce in ("matrix", "factors")
    ]
    of_ranks = run_ranks(3, _chained_all, cases)
    for number, (options, dtype) in enumerate(cases):
        found = [of_rank[number] for of_rank in of_ranks]
        assert len({hashed for hashed, _, _ in found}) == 1, "replicas are identical"
        assert found[0][2] == (options["reduce"] == "factors")
        if options["reduce"] == "factors":
            _, whole, _ = of_ranks[0][number - 1]
            largest = whole.abs().max().item()
            assert (found[0][1] - whole).abs().max().item() < 50 * torch.finfo(dtype).eps * largest


def _compiled(how: str | None) -> list[str]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    called = model if how is None else torch.compile(model, backend=how)
    with Pipelined(
        called, torch.optim.SGD(model.parameters(), lr=0.1), width=2, wire=Wire(reduce="factors")
    ) as pipeline:
        hashes = []
        for iteration in range(3):
            called(X[iteration]).square().mean().backward()
            pipeline.step()
            hashes.append(weights_sha256(model))
    return hashes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")  # torch, between graphs
def test_a_compiled_model_trains_by_factors_as_one_that_is_not() -> None:
    whole, compiled = _compiled(None), _compiled("aot_eager")
    assert whole == compiled
    assert len(set(whole)) == 3


def _with_codecs(ranks: Ranks, cases: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    """Return whether a step applied the exact mean of linear layers' gradients, and the hash of all weights."""
    found = []
    for options in cases:
        torch.manual_seed(0)
        model = Parallel()
        weights = [layer.weight for layer in model.layers]
        batches = [integers(12, rank).view(2, 6) for rank in range(ranks.world_size)]
        of_ranks = [torch.autograd.grad(_loss(model, x, rank), weights) for rank, x in enumerate(batches)]
        means = [sum(of_weight) / ranks.world_size for of_weight in zip(*of_ranks, strict=True)]
        expected = [weight.detach() - mean for weight, mean in zip(weights, means, strict=True)]
        with Pipelined(
            model, torch.optim.SGD(model.parameters(), lr=1.0), width=1, ranks=ranks, **sections(**options)
        ) as pipeline:
            _loss(model, batches[ranks.rank], ranks.rank).backward()
            pipeline.step()
        found.append((all(map(torch.equal, weights, expected)), weights_sha256(model)))
    return found


@pytest.mark.slow
def test_a_codec_encodes_all_gradients_but_those_by_factors_with_any_all_reduce() -> None:
    cases = [
        {"codec": "int4", "reduce": "matrix"},
        {"codec": "int4", "reduce": "factors"},
        {"codec": "int8", "reduce": "factors", "all_reduce": "all-to-all", "connections": 2},
        {"codec": "bf16", "reduce": "factors", "rate_limit": "1mbit", "segment_bytes": 64},
    ]
    one, other = run_ranks(2, _with_codecs, cases)
    assert one == other, "replicas are identical"
    assert [exact for exact, _ in one] == [False, True, True, True]


def _penalized(ranks: Ranks, reduce: str, width: int, buckets: int) -> str:
    """Train with a penalty on one weight, from the third iteration on, on rank 1 alone."""
    model = _mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = Pipelined(model, optimizer, width=width, ranks=ranks, wire=Wire(reduce=reduce, buckets=buckets))
    said, first = "", 2
    try:
        for iteration in range(6):
            loss = model(X[:1, :1]).square().mean()
            if ranks.rank == 1 and iteration >= first:
                loss = loss + 0.1 * model.twice.weight.square().sum()
            loss.backward()
            pipeline.step()
        pipeline.flush()
    except UserInputError as refused:
        said = str(refused) if refused.known_to_all else "refused by one rank alone"
    if said:
        with pytest.warns(RuntimeWarning, match="the pipeline was closed after an error"):
            pipeline.close()
    else:
        pipeline.close()
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("width", "buckets"), [(1, 1), (2, 1), (1, 2)])
def test_a_penalty_ends_all_ranks_with_one_line_that_names_the_layer(width: int, buckets: int) -> None:
    for said in run_ranks(3, _penalized, "factors", width, buckets):
        assert said == (
            f"{REFUSAL}, such as in a penalty or another function, and whose .grad nobody changes; got twice.weight, "
            "whose gradient in iteration 2 is not that of its layer's calls (use --reduce matrix)"
        )


def _scaled(ranks: Ranks, reduce: str) -> tuple[str, float]:
    """Train with a loss scale; in one iteration rank 1's gradient is infinite, which is skipped."""
    torch.manual_seed(0)
    model = Parallel()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    skipped: list[int] = []
    with Pipelined(model, optimizer, width=2, scaler=scaler, ranks=ranks, wire=Wire(reduce=reduce)) as pipeline:
        for iteration in range(5):
            loss = _loss(model, integers(12, ranks.rank).view(2, 6), iteration)
            if iteration == 2 and ranks.rank == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            if iteration == 3:
                skipped += pipeline.flush().skipped  # gradients wait in .grad while the scale backs off
            skipped += pipeline.step().skipped
        skipped += pipeline.flush().skipped
    assert skipped == [2]
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return weights_sha256(model), scaler.get_scale()


@pytest.mark.slow
def test_gradients_are_scaled_and_skipped_as_those_exchanged_whole() -> None:
    factors, matrices = (run_ranks(2, _scaled, reduce) for reduce in ("factors", "matrix"))
    assert factors[0] == factors[1] == matrices[0] == matrices[1]
    assert factors[0][1] == 4.0


def _resume(ranks: Ranks, width: int, reduce: Any) -> tuple[list[str], list[str], dict[str, str]]:
    def build() -> tuple[Mixed, torch.optim.Optimizer, Pipelined]:
        model = _mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return (
            model,
            optimizer,
            Pipelined(model, optimizer, width=width, codec="int4", ranks=ranks, wire=Wire(reduce=reduce)),
        )

    def run(parts: Any, first: int, last: int) -> list[str]:
        hashes = []
        for iteration in range(first, last):
            numbers = torch.Generator().manual_seed(10 * iteration + ranks.rank)
            parts[0](torch.randn(1, 2, 6, generator=numbers)).square().mean().backward()
            hashes.append(f"{parts[2].step().wire_bytes} {weights_sha256(parts[0])}")
        return hashes

    one, other = build(), build()
    run(one, 0, 3)
    with one[2].true_weights():
        saved = copy.deepcopy([part.state_dict() for part in one])
    uninterrupted = run(one, 3, 7)
    run(other, 10, 12)
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    resumed = run(other, 3, 7)
    exchanges = other[2].exchanges
    for _, _, pipeline in (one, other):
        pipeline.close()
    return [*uninterrupted, weights_sha256(one[0])], [*resumed, weights_sha256(other[0])], exchanges


@pytest.mark.slow
@pytest.mark.parametrize(("width", "reduce"), [(1, "factors"), (3, "factors"), (2, {"first.weight": "factors"})])
def test_a_state_dict_continues_bit_for_bit_and_byte_for_byte(width: int, reduce: Any) -> None:
    for hashes, resumed, exchanges in run_ranks(2, _resume, width, reduce):
        assert resumed == hashes
        assert "factors" in exchanges.values()


def _refusal(ranks: Ranks, **options: Any) -> str:
    model = _mixed()
    try:
        Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, **sections(**options)).close()
    except DisagreementError as error:
        return str(error)
    return ""


def _with_other_threads(ranks: Ranks) -> list[str]:
    torch.set_num_threads(1 + ranks.rank)
    return [_refusal(ranks, reduce=reduce) for reduce in ("matrix", "factors")]


def _with_other_products(ranks: Ranks) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipesgd.pipeline.sameness.bits_of_a_product", lambda device: f"bits of rank {ranks.rank}")
        return [_refusal(ranks, reduce=reduce) for reduce in ("matrix", "factors")]


@pytest.mark.slow
def test_ranks_must_multiply_alike() -> None:
    got = "got 1 on rank 0, 2 on rank 1: set OMP_NUM_THREADS"
    threads = f"number of torch's threads with reduce factors must be the same on all ranks; {got}"
    assert run_ranks(2, _with_other_threads) == [["", threads]] * 2
    products = (
        "processors must multiply matrices to the same bits on all ranks with reduce factors; got other bits on rank 1 "
        "than on rank 0"
    )
    assert run_ranks(2, _with_other_products) == [["", products]] * 2
