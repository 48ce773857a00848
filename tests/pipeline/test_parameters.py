"""Parameters, buffers and optimizers that ``Pipelined`` accepts, and those that it refuses in one line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from _codec_cases import Half
from _differences import Differences
from _ranks import run_ranks
from _sections import sections
from torch import Tensor, nn

from pipesgd import Pipelined
from pipesgd.codecs.options import CODECS, codec_named
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.pipeline.local_steps import LocalSteps
from pipesgd.ranks import Ranks
from pipesgd.reducers.low_rank import LowRank
from pipesgd.reducers.make import check_reducer
from pipesgd.reducers.powersgd import PowerSgdReducer
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates, Windows, Wire

pytestmark = pytest.mark.slow

INTEGERS = (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"codec": codec_named("topk", momentum_correction=0.9)},
            "momentum must be 0 with momentum_correction, which replaces it; got 0.5",
        ),
        ({"seed": -1, "codec": "int8"}, "seed must be at least 0; got -1"),
        ({"seed": 2**64}, "seed must be at most 1e+15; got 18446744073709551616"),
    ],
)
def test_what_would_fail_or_mislead_later_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UserInputError) as refused:
        Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), **sections(**options))
    assert str(refused.value) == message


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("strategy", [Pipelined, partial(LocalSteps, windows=Windows(local_steps=2))])
def test_trained_embeddings_whose_rows_a_forward_pass_shortens_are_refused(
    make: Callable[..., nn.Module], strategy: Callable[..., Pipelined | LocalSteps]
) -> None:
    model = nn.Sequential(make(5, 2, max_norm=0.5), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserInputError, match=r"^max_norm must be None in an embedding .*; got 0\.5 in 0$"):
        strategy(model, optimizer)
    model[0].requires_grad_(False)
    strategy(model, optimizer).close()


def _weights_by_differences(make: Callable[..., Pipelined | LocalSteps], *, clones: bool) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with make(model, Differences(model.parameters(), clones=clones)) as pipeline:
        for iteration in range(5):
            model(torch.full((1, 2), 1.0 + iteration)).square().sum().backward()
            pipeline.step()
    return model.weight.detach()


@pytest.mark.parametrize("options", [{"width": 1}, {"updates": Updates(prediction="none")}, {"updates": Updates()}])
def test_an_optimizer_that_keeps_gradients_must_clone_them(options: dict[str, Any]) -> None:
    assert _weights_by_differences(partial(Pipelined, **options), clones=True).isfinite().all()
    with (
        pytest.warns(RuntimeWarning, match="gradients in flight are dropped")
        if options != {"width": 1}
        else nullcontext(),
        pytest.raises(UserInputError, match=r"^optimizer must clone what it keeps .*; got Differences, which"),
    ):
        _weights_by_differences(partial(Pipelined, **options), clones=False)


def test_an_optimizer_may_keep_the_gradients_of_local_steps() -> None:
    make = partial(LocalSteps, windows=Windows(local_steps=2))
    kept, cloned = (_weights_by_differences(make, clones=clones) for clones in (False, True))
    assert torch.equal(kept, cloned)


def _under_default_dtypes(ranks: Ranks, codec: str) -> list[tuple[str, int]]:
    """Return the hash of the weights and the bytes of a step under each of torch's default dtypes, float32 first."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Linear(30, 20)
        torch.set_default_dtype(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Pipelined(model, optimizer, codec=Half() if codec == "own" else codec, ranks=ranks) as pipeline:
            for iteration in range(3):
                numbers = torch.Generator().manual_seed(10 * iteration + ranks.rank)
                model(torch.randn(4, 30, generator=numbers, dtype=torch.float32)).square().mean().backward()
                report = pipeline.step()
        torch.set_default_dtype(torch.float32)
        found.append((weights_sha256(model), report.wire_bytes))
    return found


@pytest.mark.parametrize("codec", [*CODECS, "own"])
def test_torchs_default_dtype_changes_no_bit(codec: str) -> None:
    for found in run_ranks(2, _under_default_dtypes, codec):
        assert found == [found[0]] * 3


def test_topk_refuses_more_values_than_its_indices_can_count() -> None:
    parameters = [nn.Parameter(torch.empty(2**30, device="meta")) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with pytest.raises(
        UserInputError, match=r"parameters must be at most 2\*\*31 - 1 with --codec topk; got 2147483648"
    ):
        check_reducer(codec_named("topk"), optimizer, parameters, 0)
    check_reducer(codec_named("topk"), optimizer, parameters[:1], 0)
    check_reducer(codec_named("int8"), optimizer, parameters, 0)


def _buffers_of_8_bits(ranks: Ranks) -> list[float]:
    model = nn.Linear(2, 1)
    model.register_buffer("scale", torch.full((3,), 1.0 + ranks.rank).to(torch.float8_e4m3fn))
    model.register_buffer("mean", torch.tensor(2.0 + ranks.rank))
    pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks)
    with torch.inference_mode():  # as in an evaluation
        pipeline.combine_buffers("average")
    pipeline.combine_buffers("average")
    pipeline.close()
    scale = model.get_buffer("scale").float().tolist()
    return [*scale, model.get_buffer("mean").item()]


def test_floats_of_8_bits_are_shared_though_nothing_adds_them_up() -> None:
    assert run_ranks(2, _buffers_of_8_bits) == [[1.0, 1.0, 1.0, 2.0]] * 2


def _buffers_of_integers(ranks: Ranks, all_reduce: str) -> list[Any]:
    model = nn.Linear(2, 1)
    for number, dtype in enumerate(INTEGERS):
        model.register_buffer(f"scalar{number}", torch.tensor(250 + ranks.rank).to(dtype))
        model.register_buffer(f"columns{number}", torch.full((2, 3), 300 + ranks.rank).to(dtype).t())
    Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, wire=Wire(all_reduce=all_reduce)).close()
    return [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
def test_buffers_of_all_integers_are_shared(all_reduce: str) -> None:
    assert run_ranks(2, _buffers_of_integers, all_reduce) == [[250, [[300, 300]] * 3] * len(INTEGERS)] * 2


def _large_gradients(ranks: Ranks, codec: str) -> list[float]:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    pipeline = Pipelined(nn.ParameterList([parameter]), optimizer, width=1, codec=codec, ranks=ranks)
    parameter.grad = torch.full_like(parameter, 40000.0 + 64 * ranks.rank)
    pipeline.step()
    pipeline.close()
    values: list[float] = parameter.tolist()
    return values


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk"])
def test_the_mean_of_float16_gradients_is_finite_where_their_sum_is_not(codec: str) -> None:
    for values in run_ranks(2, _large_gradients, codec):
        assert any(values)
        assert all(value in (0.0, -40032.0) for value in values)


def _large_buffers(ranks: Ranks) -> tuple[list[float], tuple[int, bool], list[float]]:
    """Average buffers, of which rank 2's are not finite, and other tensors, all in float16."""
    model = nn.BatchNorm1d(2).half()
    pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks)
    model.running_var.copy_(torch.tensor([40000.0 + 64 * ranks.rank, torch.nan if ranks.rank == 2 else 1.0]))
    pipeline.combine_buffers("average")
    averaged = torch.full((2,), 60000.0, dtype=torch.float16)
    sent = pipeline.pipeline.average([averaged])
    pipeline.close()
    return model.running_var.tolist(), sent, averaged.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_averages_of_float16_buffers_and_states_are_finite_where_their_sums_are_not(world_size: int) -> None:
    for variances, (_, finite), averaged in run_ranks(world_size, _large_buffers):
        assert variances == [40032.0, 1.0]
        assert finite
        assert averaged == pytest.approx([60000.0] * 2, rel=2**-10)


class Alone:
    """The all-reduce of a rank whose peers have nothing to add."""

    def __call__(self, flat: Tensor, *args: Any, **kwargs: Any) -> None: ...

    def wire_bytes(self, flat: Tensor) -> int:
        return 0


def test_powersgd_begins_with_the_same_factors_on_every_processor() -> None:
    reducer = PowerSgdReducer(Alone(), world_size=2, rule=LowRank(1), seed=3)
    buffer = FlatBuffer([torch.zeros(30, 40)])
    buffer.views[0].fill_(torch.nan)  # the next sum starts from the first factors again
    reducer.sum(buffer, 0)
    first = reducer.state_dict()["rights"][0]
    assert torch.equal(first * 2**23, (first * 2**23).round()), "integers, which every processor draws alike"
    assert first.unique().numel() == 40
    assert first.abs().max() <= 1.0
