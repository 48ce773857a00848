"""Baselines without code of ours to exchange gradients: torch's DistributedDataParallel, and no communication."""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _fashion_mnist import fashion_mnist_batches, momentum_sgd, paper_mlp
from _pretended_gpu import PretendedGpu
from _ranks import error_of, run_ranks
from _reference import pipe_sgd
from _small_problem import assert_same_weights, classify
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesgd.baselines.ddp import Ddp, _Buckets
from pipesgd.baselines.local import Local
from pipesgd.comm.native import ring_wire_bytes
from pipesgd.errors import CommunicationError, DeadlineExceeded, NonFiniteGradientError, UserInputError
from pipesgd.ranks import Ranks, alone
from pipesgd.replicas import weights_sha256

pytestmark = pytest.mark.slow

ITERATIONS = 8


def _train(ranks: Ranks, kind: str, iterations: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[str]]:
    model = paper_mlp(dtype)
    optimizer = momentum_sgd(model)
    strategy = Local(model, optimizer) if kind == "local" else Ddp(model, optimizer, ranks=ranks)
    hashes = []
    for iteration, batch in enumerate(fashion_mnist_batches(ranks.rank, ranks.world_size, iterations, dtype)):
        classify(strategy.module, batch).backward()
        assert strategy.step().applied == (iteration,)
        hashes.append(weights_sha256(model))
    strategy.flush()
    strategy.close()
    return model.state_dict(), hashes


def _train_plain(ranks: Ranks, iterations: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model = paper_mlp(dtype)
    wrapped, optimizer = DistributedDataParallel(model), momentum_sgd(model)
    for batch in fashion_mnist_batches(ranks.rank, ranks.world_size, iterations, dtype):
        optimizer.zero_grad()
        classify(wrapped, batch).backward()
        optimizer.step()
    return model.state_dict()


def test_ddp_is_torchs_own_bit_for_bit() -> None:
    # Four ranks, since without a hook torch multiplies by 1/p, which equals a division by p only for powers of two.
    ours = run_ranks(4, _train, "ddp", ITERATIONS, torch.float32)
    torchs = run_ranks(4, _train_plain, ITERATIONS, torch.float32)
    for (weights, hashes), plain in zip(ours, torchs, strict=True):
        assert_same_weights(weights, plain, rtol=0.0)
        assert hashes == ours[0][1]  # bit-identical after every iteration


def test_local_trains_every_rank_for_itself() -> None:
    results = run_ranks(2, _train, "local", ITERATIONS, torch.float64)
    assert results[0][1][0] != results[1][1][0]
    for rank, (weights, _) in enumerate(results):
        model = paper_mlp(torch.float64)
        batches = [[batch] for batch in fashion_mnist_batches(rank, 2, ITERATIONS, torch.float64)]
        pipe_sgd(model, momentum_sgd(model), classify, batches, width=1)
        assert_same_weights(weights, model.state_dict(), rtol=1e-14)


class Wide(nn.Module):
    """A model of 64 x 512 weights: one bucket, and worth compressing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _reports(ranks: Ranks, hook: str, iterations: int) -> list[tuple[int, Tensor]]:
    model = Wide()
    strategy = Ddp(model, torch.optim.SGD(model.parameters(), lr=0.0), ranks=ranks, hook=hook)
    generator = torch.Generator().manual_seed(ranks.rank)
    seen = []
    for _ in range(iterations):
        strategy.module(torch.randn(4, 512, generator=generator)).square().sum().backward()
        gradient = model.linear.weight.grad
        assert gradient is not None
        mean = gradient.clone()
        report = strategy.step()
        assert report.seconds("communication") > 0
        assert [span.what for span in report.spans] == ["communication", "wait", "update"]
        seen.append((report.wire_bytes, mean))
    strategy.close()
    return seen


def _mean_gradients(iterations: int, world_size: int) -> list[Tensor]:
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    means = []
    for _ in range(iterations):
        parts = []
        for generator in generators:
            model = Wide()
            model(torch.randn(4, 512, generator=generator)).square().sum().backward()
            assert model.linear.weight.grad is not None
            parts.append(model.linear.weight.grad)
        means.append(torch.stack(parts).mean(0))
    return means


class Turns(nn.Module):
    """A model whose gradients get ready in another order than its layers are in, and in every other iteration in a
    third one; with batch norm, dropout, and layers that torch puts into other buckets: of float64, or sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(784, 30), nn.BatchNorm1d(30)
        self.brightest = nn.EmbeddingBag(784, 30, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))
        self.precise = nn.Linear(30, 30, dtype=torch.float64)
        self.last = nn.Linear(30, 10)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.passes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = x.flatten(1)
        x = self.norm(self.first(x) + self.brightest(x.topk(5).indices))
        for layer in self.layers if self.passes % 2 else reversed(self.layers):
            x = nn.functional.dropout(layer(x).relu(), 0.2)
        last: Tensor = self.last(self.precise(x.double()).float())
        return last


class Training:
    """A model that a strategy trains by batches of this rank's, from its beginning or from a state."""

    def __init__(self, ranks: Ranks, hook: str, accumulation: int, state: dict[str, Any] | None = None):
        self.model = Turns(sparse=hook == "none")  # torch compresses no sparse gradients
        self.optimizer = momentum_sgd(self.model)
        self.strategy = Ddp(self.model, self.optimizer, ranks=ranks, hook=hook)
        self.batches = list(fashion_mnist_batches(ranks.rank, ranks.world_size, ITERATIONS, torch.float32))
        self.accumulation = accumulation
        torch.manual_seed(ranks.rank)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.strategy.load_state_dict(state["strategy"])
            torch.set_rng_state(state["rng"])
            assert all(parameter.grad is None for parameter in self.model.parameters())

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "strategy": self.strategy}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()} | {"rng": torch.get_rng_state()})

    def steps(self, number: int) -> list[tuple[str, int]]:
        """Make iterations; return the weights' hash and the bytes sent in each."""
        found = []
        for _ in range(number):
            batch = self.batches[self.strategy.iteration]
            for micro in range(self.accumulation):
                with self.strategy.accumulating() if micro < self.accumulation - 1 else contextlib.nullcontext():
                    classify(self.strategy.module, batch).backward()
            report = self.strategy.step()
            found.append((weights_sha256(self.model), report.wire_bytes))
        return found


def _train_and_continue(ranks: Ranks, hook: str, accumulation: int) -> dict[str, list[tuple[str, int]]]:
    whole = Training(ranks, hook, accumulation)
    states, expected = [whole.state()], []
    for _ in range(5):
        expected += whole.steps(1)
        states.append(whole.state())
    whole.strategy.close()
    found = {"uninterrupted": expected}
    for done in (0, 1, 2, 3):
        resumed = Training(ranks, hook, accumulation, states[done])
        at_once = resumed.state()["strategy"]
        assert at_once == states[done]["strategy"], "a state that is loaded and saved is the same"
        one_more = resumed.steps(1)
        again = Training(ranks, hook, accumulation, resumed.state())
        found[f"after {done}"] = expected[:done] + one_more + again.steps(4 - done)
        resumed.strategy.close()
        again.strategy.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "hook", "accumulation"), [(3, "none", 1), (4, "none", 1), (3, "fp16", 1), (3, "none", 2)]
)
def test_a_resumed_run_sums_in_the_buckets_of_the_uninterrupted_one(
    world_size: int, hook: str, accumulation: int
) -> None:
    """Three summands or more depend on their order, which the place of a gradient in its bucket determines."""
    for found in run_ranks(world_size, _train_and_continue, hook, accumulation):
        expected = found.pop("uninterrupted")
        assert found == dict.fromkeys(found, expected)


def _load_the_order_of_another_model(ranks: Ranks) -> str:
    model = nn.Linear(4, 4)
    with Ddp(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks) as strategy:
        return error_of(strategy.load_state_dict, strategy.state_dict() | {"ready_order": [2, 0, 1]})


def test_the_state_of_a_model_with_other_parameters_is_refused() -> None:
    message = "ValueError: ready_order must be an order of 2 parameters; got 3 numbers"
    assert run_ranks(1, _load_the_order_of_another_model) == [message]


def test_hooks_compress_as_announced() -> None:
    world_size, iterations = 3, 4
    numel = 512 * 64 + 64
    expected = _mean_gradients(iterations, world_size)
    for hook, element_size, error in (("none", 4, 1e-6), ("fp16", 2, 2e-3)):
        seen = run_ranks(world_size, _reports, hook, iterations)[0]
        for (wire_bytes, mean), right in zip(seen, expected, strict=True):
            assert wire_bytes == ring_wire_bytes(0, world_size, numel, element_size)
            assert (mean - right).norm() <= error * right.norm()


def test_communication_is_the_time_in_which_buckets_are_in_flight() -> None:
    sent: list[torch.futures.Future[Tensor]] = []

    def hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        sent.append(torch.futures.Future())
        return sent[-1]

    buckets = _Buckets(alone(), 60.0, lambda bucket: 5)
    observed: Any = buckets.around(hook)

    def leave(index: int) -> None:
        observed(None, SimpleNamespace(index=lambda: index, buffer=lambda: torch.zeros(2)))

    leave(0)
    sent[0].set_result(torch.zeros(2))
    leave(1)  # after a time without any in flight
    leave(2)
    for index in (2, 1):
        sent[index].set_result(torch.zeros(2))
    spans, wire_bytes = buckets.take(7)
    assert [span.what for span in spans] == ["communication", "communication", "wait"]
    first, second, wait = spans
    assert first.start < first.end < second.start < wait.start < wait.end == second.end
    assert wire_bytes == 15
    spans, wire_bytes = buckets.take(8)
    assert ([(span.what, span.seconds) for span in spans], wire_bytes) == ([("wait", 0.0)], 0)


def _fail_with_infinity(ranks: Ranks, on_nonfinite: str) -> Any:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Ddp(model, optimizer, ranks=ranks, on_nonfinite=on_nonfinite)
    try:
        for iteration in range(3):
            inputs = torch.ones(2, 4)
            if iteration == 1 and ranks.rank == ranks.world_size - 1:
                inputs[0, 0] = float("inf")
            strategy.module(inputs).sum().backward()
            assert strategy.step().skipped == ((1,) if iteration == 1 else ())
    except NonFiniteGradientError as failure:
        return type(failure), failure.iteration, failure.own
    finally:
        strategy.close()
    return float(model.weight.sum())


def _wait_for_a_silent_rank(ranks: Ranks, silent_in: int) -> Any:
    model = nn.Linear(4, 4)
    strategy = Ddp(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, timeout=4.0)
    try:
        for iteration in range(silent_in + 1):
            if iteration == silent_in:
                # Ranks begin together: one that is later than the deadline would find its peers gone instead.
                ranks.all_gather_object("ready", None)
                if ranks.rank == ranks.world_size - 1:
                    ranks.all_gather_object("the others have given up", None)
                    return None
            strategy.module(torch.ones(2, 4)).sum().backward()
            strategy.step()
    except CommunicationError as failure:
        ranks.all_gather_object("the others have given up", None)
        return type(failure), failure.operation, failure.iteration
    finally:
        strategy.close()


@pytest.mark.parametrize(
    ("silent_in", "operation", "second"),
    [
        # Torch rebuilds its buckets here. The first rank whose wait ends closes the connections of torch's process
        # group, and the second one is told of whichever comes first: that, or its own deadline.
        (1, "forward pass of DistributedDataParallel", CommunicationError),
        (2, "all-reduce by DistributedDataParallel", DeadlineExceeded),
    ],
)
def test_a_silent_rank_ends_the_wait_within_the_deadline(
    silent_in: int, operation: str, second: type[CommunicationError]
) -> None:
    told = run_ranks(3, _wait_for_a_silent_rank, silent_in)[:2]
    assert [where for _, *where in told] == [[operation, silent_in]] * 2
    kinds = [kind for kind, *_ in told]
    assert DeadlineExceeded in kinds
    assert all(issubclass(kind, second) for kind in kinds)


def test_a_gradient_that_is_not_finite_stops_or_is_skipped_on_all_ranks() -> None:
    assert run_ranks(2, _fail_with_infinity, "stop") == [(NonFiniteGradientError, 1, False)] * 2
    one, other = run_ranks(2, _fail_with_infinity, "skip")
    assert one == other
    assert one == one  # not NaN: the infinity did not get into the weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hook": "fp61"}, "ddp-hook must be one of none, fp16, bf16; got 'fp61' (did you mean fp16?)"),
        ({"on_nonfinite": "hope"}, "on_nonfinite must be stop or skip; got 'hope'"),
        ({"timeout": 0.0}, "timeout must be from 0.1 to 1,000,000 seconds; got 0.0"),
    ],
)
def test_bad_values(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(1, 1)
    ranks = Ranks(rank=0, world_size=1, store=torch.distributed.HashStore())
    with pytest.raises(UserInputError) as caught:
        Ddp(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, **options)
    assert str(caught.value) == message


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch accepts the bf16 hook where it has nccl")
def test_a_hook_that_torch_refuses_is_reported_as_such() -> None:
    model = nn.Linear(1, 1)
    ranks = Ranks(rank=0, world_size=1, store=torch.distributed.HashStore())
    with pytest.raises(UserInputError, match=r"^ddp-hook must be one that torch accepts here; got bf16: .*NCCL"):
        Ddp(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, hook="bf16")


def _on_a_gpu_with(ranks: Ranks, version: str) -> str:
    importlib.metadata.version = lambda name: version
    with PretendedGpu():
        model = nn.ParameterList([torch.zeros(2, device="cuda")])
        return error_of(Ddp, model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks)


def test_a_torch_that_sums_cuda_tensors_wrongly_over_gloo_is_refused() -> None:
    [old], [new] = (run_ranks(1, _on_a_gpu_with, version) for version in ("2.10.0+cu128", "2.11.0"))
    assert old == (
        "UserInputError: torch must be at least 2.11 for CUDA tensors that DistributedDataParallel sums over gloo; "
        "got 2.10.0+cu128"
    )
    assert "UserInputError" not in new  # torch's own errors about a GPU that is none


def test_torch_learns_on_which_device_the_sum_of_a_bucket_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the optimizer could read gradients on a GPU that a stream of nccl or gloo had yet to write."""
    named: list[Any] = []

    class Future:
        def __init__(self, *, devices: Any = None):
            named.append(devices)

        def then(self, call: Any) -> None: ...

    monkeypatch.setattr(torch.futures, "Future", Future)
    for device in ("cpu", "cuda"):
        buckets = _Buckets(alone(), 60.0, lambda bucket: 5)
        observed: Any = buckets.around(lambda state, bucket: Future(devices="the hook's"))  # type: ignore[arg-type, return-value]
        with PretendedGpu():
            buffer = torch.zeros(2, device=device)
        observed(None, SimpleNamespace(index=lambda: 0, buffer=lambda buffer=buffer: buffer))
    assert named == [None, "the hook's", [torch.device("cuda", 0)], "the hook's"]
