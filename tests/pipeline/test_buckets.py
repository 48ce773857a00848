"""Buckets that leave while the backward pass runs: the sums, the order, and what may happen in between."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _sections import sections
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipesgd import Pipelined
from pipesgd.codecs.options import CodecOptions, codec_named
from pipesgd.errors import RunError, UserInputError
from pipesgd.flat_buffer import BucketedBuffer
from pipesgd.pipeline.buckets import BackwardHooks, bucket_indices
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Wire
from timing_model.buckets import Cut, completed
from timing_model.schedules import split

ITERATIONS = 5


class Net(nn.Module):
    """A network with a shared layer, one that a single rank uses, and one that nobody uses.

    On the ranks that do not use the former, only the last layer can leave early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 1, bias=False)
        self.first = nn.Linear(7, 9)
        self.shared = nn.Linear(9, 9)
        self.sometimes = nn.Linear(9, 9, bias=False)
        self.last = nn.Linear(9, 2, bias=False)

    def forward(self, inputs: Tensor, *, special: bool) -> Tensor:
        hidden: Tensor = self.shared(self.shared(self.first(inputs).tanh()).tanh())
        outputs: Tensor = self.last(self.sometimes(hidden) if special else hidden)
        return outputs


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _loss(model: Net, rank: int, iteration: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    return model(torch.randn(4, 7, generator=generator), special=rank == 1).square().mean()


# ---- The cut


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20), data=st.data())
def test_every_parameter_is_in_one_bucket_and_those_complete_first_come_first(sizes: list[int], data: Any) -> None:
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    shuffled = [model[place] for place in data.draw(st.permutations(range(len(sizes))))]
    by_count = data.draw(st.booleans())
    text = str(data.draw(st.integers(1, len(sizes)))) if by_count else f"{4 * data.draw(st.integers(1, 60))}B"
    buckets = bucket_indices(model, shuffled, text)
    places = {id(parameter): place for place, parameter in enumerate(model)}
    found = [sorted((places[id(shuffled[index])] for index in bucket), reverse=True) for bucket in buckets]
    assert [place for bucket in found for place in bucket] == list(range(len(sizes)))[::-1]
    assert all(bucket == sorted(bucket) and bucket for bucket in buckets)
    if by_count:
        assert len(buckets) == int(text)
    else:
        limit = int(text[:-1]) / 4
        totals = [sum(sizes[place] for place in bucket) for bucket in found]
        assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(totals, found, strict=True))
        following = [sizes[bucket[0]] for bucket in found[1:]]
        assert all(total + size > limit for total, size in zip(totals, following, strict=False)), "no bucket too many"


def test_buckets_of_a_number_are_about_equally_large_and_those_of_the_timing_model() -> None:
    model = nn.Sequential(nn.Linear(784, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 10))
    parameters = list(model.parameters())
    sizes = [parameter.nbytes for parameter in parameters]
    for text in ("1", "2", "3", "6", "4MiB", "1kB"):
        cut = bucket_indices(model, parameters, text)
        predicted = [nbytes for _, nbytes in completed(Cut.parse(text), sizes)]
        assert [sum(sizes[index] for index in bucket) for bucket in cut] == predicted
    assert bucket_indices(model, parameters, "2") == [[2, 3, 4, 5], [0, 1]]
    assert bucket_indices(model, parameters, "1") == [[0, 1, 2, 3, 4, 5]]
    assert bucket_indices(model, parameters, "4MiB") == [[1, 2, 3, 4, 5], [0]]


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ("0", "buckets must be at least 1; got 0"),
        ("-1", "buckets must be at least 1; got -1"),
        ("1.5", "buckets must be a whole number, or have a unit such as 25MiB; got '1.5'"),
        ("many", "buckets must be a whole number, or be a number with a unit such as 25MiB; got 'many'"),
        ("0.5B", "buckets must have at least 1B; got 0.5B"),
        ("9" * 30, f"buckets must be a whole number, or have a unit such as 25MiB; got '{'9' * 30}'"),
    ],
)
def test_what_is_no_cut_is_refused_in_one_line(buckets: str, message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        Wire(buckets=buckets)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 8}, "buckets must be at most the number of parameters, 7; got 8"),
        (
            {"buckets": "1MiB", "codec": "topk"},
            "buckets must be 1 with --codec topk, which compresses the gradient as a whole; got 1MiB",
        ),
    ],
)
def test_buckets_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    model = _net()
    with pytest.raises(UserInputError) as caught:
        Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), **sections(**options))
    assert str(caught.value) == message


# ---- Hooks, without any rank


def _hooks(buckets: int, decline: bool = False) -> tuple[nn.Sequential, BackwardHooks, list[int]]:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    order: list[int] = []

    def leave() -> bool:
        if not decline:
            order.append(len(order))
        return not decline

    parameters = list(model.parameters())
    cut = [[parameters[index] for index in bucket] for bucket in bucket_indices(model, parameters, str(buckets))]
    hooks = BackwardHooks(cut, leave, lambda: len(order))
    return model, hooks, order


def test_buckets_leave_in_order_and_the_last_one_waits_for_the_step() -> None:
    model, hooks, order = _hooks(4)
    with hooks.held():
        model(torch.ones(1, 2)).sum().backward()
    assert order == []
    model(torch.ones(1, 2)).sum().backward()
    assert order == [0, 1, 2]
    order.clear()
    hooks.begin_iteration()
    model[2](torch.ones(1, 2)).sum().backward()
    assert order == [], "it is complete, and waits for the one before it"
    model[3](torch.ones(1, 2)).sum().backward()
    assert order == [0, 1]
    hooks.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert order == [0, 1]


def test_a_second_gradient_is_refused_once_the_bucket_has_left() -> None:
    model, hooks, order = _hooks(2)
    model[3](torch.ones(1, 2)).sum().backward()
    model[3](torch.ones(1, 2)).sum().backward()  # the bucket has not left, so this is added up
    model[2](torch.ones(1, 2)).sum().backward()
    assert order == [0]
    for context in (contextlib.nullcontext(), hooks.held()):
        with context, pytest.raises(UserInputError, match="another gradient of a parameter whose bucket has left"):
            model[2](torch.ones(1, 2)).sum().backward()
    with pytest.raises(UserInputError, match="another gradient"):
        hooks.check_taken()
    for parameter in model.parameters():
        parameter.grad = None
    hooks.check_taken()


def test_a_bucket_that_declines_to_leave_stays() -> None:
    model, _, order = _hooks(3, decline=True)
    model(torch.ones(1, 2)).sum().backward()
    assert order == []


def test_a_bucket_that_stayed_leaves_when_another_pass_has_completed_it() -> None:
    declines = [True]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    complete: list[list[bool]] = []

    def leave() -> bool:
        if declines:
            declines.pop()
            return False
        complete.append([parameter.grad is not None for parameter in model[1].parameters()])
        return True

    BackwardHooks([list(model[1].parameters()), list(model[0].parameters())], leave, lambda: len(complete))
    model(torch.ones(1, 2)).sum().backward()
    assert complete == []
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert complete == [[True, True]]


# ---- Sums


def _train(ranks: Ranks, options: dict[str, Any], *, by_hand: bool = False) -> tuple[list[str], list[float]]:
    """Return the hashes of the true weights after every iteration, and the norms of the gradients.

    Args:
        ranks: the ranks.
        options: options of ``Pipelined``; "accumulation", "scaler" and "optimizer" are the loop's.
        by_hand: whether gradients get into ``.grad`` without a backward pass, so that no hook is called.
    """
    own = dict(options)
    micro_batches = own.pop("accumulation", 1)
    if own.pop("scaler", False):
        own["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model = _net()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters if p.dim() > 1]}, {"params": [p for p in parameters if p.dim() < 2]}],
        lr=0.01,
    )
    hashes: list[str] = []
    norms: list[float] = []
    with Pipelined(model, optimizer, ranks=ranks, **sections(**own)) as pipeline:
        for iteration in range(ITERATIONS):
            for number in range(micro_batches):
                loss = _loss(model, ranks.rank, 10 * iteration + number) / micro_batches
                loss = own["scaler"].scale(loss) if "scaler" in own else loss
                if by_hand:
                    found = torch.autograd.grad(loss, parameters, allow_unused=True)
                    for parameter, gradient in zip(parameters, found, strict=True):
                        if gradient is not None:
                            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                    continue
                with pipeline.accumulating() if number + 1 < micro_batches else contextlib.nullcontext():
                    loss.backward()
            if (norm := pipeline.step().gradient_norm) is not None:
                norms.append(norm)
            with pipeline.true_weights():
                hashes.append(weights_sha256(model))
        pipeline.flush()
        hashes.append(weights_sha256(model))
    assert all(parameter.grad is None for parameter in parameters)
    return hashes, norms


def _train_both_ways(ranks: Ranks, one: dict[str, Any], other: dict[str, Any], by_hand: bool) -> Any:
    return _train(ranks, one), _train(ranks, other, by_hand=by_hand)


WAYS: list[dict[str, Any]] = [
    {"width": 1},
    {"width": 1, "clip_norm": 0.05, "on_nonfinite": "skip"},
    {"width": 1, "accumulation": 3, "scaler": True},
    {"width": 2, "scaler": True},
    {"width": 2, "prediction": "none", "synchronous_start": 2, "guard": True},
    {"width": 3, "prediction": "local", "clip_value": 0.01},
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_ranks_train_with_buckets_as_without_bit_for_bit(way: dict[str, Any]) -> None:
    """A sum of two is the same in either order, so nothing may differ but the norm's last digits."""
    for (cut, norms), (whole, expected) in run_ranks(2, _train_both_ways, {"buckets": 3, **way}, way, False):
        assert cut == whole
        assert norms == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        {"width": 1, "codec": "int4"},
        {"width": 2, "codec": codec_named("int8", rounding="stochastic", block=8)},
        {"width": 2, "codec": "sign", "prediction": "local", "accumulation": 2},
        {"width": 1, "codec": "bf16", "all_reduce": "native"},
        {"width": 1, "codec": "int4", "all_reduce": "halving-doubling", "segment_bytes": 16},
        {"width": 2, "codec": codec_named("powersgd", low_rank=1, factors="bf16")},
    ],
    ids=str,
)
def test_leaving_early_changes_no_bit(way: dict[str, Any]) -> None:
    """Gradients that no backward pass brings leave in the step, all buckets of them."""
    options = {"buckets": "200B", **way}
    results = run_ranks(3, _train_both_ways, options, options, True)
    for early, late in results:
        assert early == late
        assert early[0] == results[0][0][0], "replicas are the same"


def _definition(of_ranks: Sequence[Sequence[Tensor]], buckets: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the means of ``of_ranks[rank][parameter]`` in float32, added up around the ring, bucket by bucket.

    Chunk c of a bucket begins at rank c, and each rank on the way adds its own.
    """
    p = len(of_ranks)
    means: dict[int, Tensor] = {}
    for bucket in buckets:
        flats = [torch.cat([gradients[index].reshape(-1) for index in bucket]) for gradients in of_ranks]
        parts = []
        for chunk, (start, stop) in enumerate(split(flats[0].numel(), p)):
            total = flats[chunk][start:stop].clone()
            for step in range(1, p):
                total = flats[(chunk + step) % p][start:stop] + total
            parts.append(total / p)
        values = torch.cat(parts).split([of_ranks[0][index].numel() for index in bucket])
        means |= {index: value.view(of_ranks[0][index].shape) for index, value in zip(bucket, values, strict=True)}
    return [means[index] for index in sorted(means)]


def _plain(ranks: Ranks, buckets: int) -> list[Tensor]:
    model = _net()
    with Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=0.3), width=1, ranks=ranks, wire=Wire(buckets=buckets)
    ) as pipeline:
        for iteration in range(ITERATIONS):
            _loss(model, ranks.rank, iteration).backward()
            pipeline.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [1, 2, 4, 7])
def test_width_1_is_one_process_that_adds_every_bucket_around_the_ring_bit_for_bit(buckets: int) -> None:
    model = _net()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.3)
    cut = bucket_indices(model, parameters, str(buckets))
    for iteration in range(ITERATIONS):
        of_ranks = []
        for rank in range(3):
            optimizer.zero_grad()
            _loss(model, rank, iteration).backward()
            of_ranks.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        for parameter, mean in zip(parameters, _definition(of_ranks, cut), strict=True):
            parameter.grad = mean
        optimizer.step()
    for found in run_ranks(3, _plain, buckets):
        assert all(torch.equal(one, other.detach()) for one, other in zip(found, parameters, strict=True))


def _apart(ranks: Ranks, options: dict[str, Any]) -> list[tuple[str, int]]:
    """Train with buckets, and with a pipeline for each bucket; return the hash of each and the bytes sent."""
    found = []
    for buckets in (3, 1):
        model = _net()
        cut = bucket_indices(model, list(model.parameters()), "3") if buckets == 1 else [list(range(7))]
        groups = [[list(model.parameters())[index] for index in bucket] for bucket in cut]
        with contextlib.ExitStack() as stack:
            pipelines = [
                stack.enter_context(
                    Pipelined(
                        model,
                        torch.optim.SGD(group, lr=0.1, momentum=0.9),
                        seed=number,  # with which powersgd begins the bucket of this number
                        ranks=ranks,
                        **sections(buckets=buckets, **options),
                    )
                )
                for number, group in enumerate(groups)
            ]
            transports = [pipeline.pipeline.flight.connections.transport for pipeline in pipelines]
            before = sum(transport.bytes_sent for transport in transports)
            announced = 0
            for iteration in range(ITERATIONS):
                _loss(model, ranks.rank, iteration).backward()
                announced += sum(pipeline.step().wire_bytes for pipeline in pipelines)
            for pipeline in pipelines:
                pipeline.flush()
            assert sum(transport.bytes_sent for transport in transports) - before == announced > 0
        found.append((weights_sha256(model), announced))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    "codec", ["int8", "int4", "bf16", codec_named("powersgd", low_rank=1, factors="int8")], ids=str
)
def test_buckets_are_summed_as_by_pipelines_of_their_own(width: int, codec: str | CodecOptions) -> None:
    """Each has its own chunks, padding, residuals and factors, and sends the bytes that it announces."""
    options = {"width": width, "codec": codec, "prediction": "none", "segment_bytes": 64}
    for together, apart in run_ranks(3, _apart, options):
        assert together == apart


# ---- The backward pass


def _look_during_backward(ranks: Ranks) -> tuple[bool, list[str], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reduced = threading.Event()
    with Pipelined(model, optimizer, width=1, ranks=ranks, wire=Wire(buckets=3)) as pipeline:
        flight = pipeline.pipeline.flight
        meet = flight.meet

        def tell(*arguments: Any) -> Any:
            future = meet(*arguments)
            future.add_done_callback(lambda _: reduced.set())
            return future

        flight.meet = tell  # type: ignore[method-assign]
        seen = []
        model[0].weight.register_hook(lambda gradient: seen.append(reduced.wait(20.0)))
        model(torch.ones(1, 4)).sum().backward()
        report = pipeline.step()
    return seen == [True], [span.what for span in report.spans], len(report.applied)


@pytest.mark.slow
def test_a_bucket_is_summed_while_the_backward_pass_still_runs() -> None:
    for seen, spans, applied in run_ranks(2, _look_during_backward):
        assert seen
        assert spans == ["pack"] * 3 + ["communication"] * 3 + ["wait", "update"]
        assert applied == 1


def _compiled(ranks: Ranks) -> tuple[str, str]:
    hashes = []
    for buckets in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        called: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Pipelined(called, optimizer, ranks=ranks, wire=Wire(buckets=buckets)) as pipeline:
            for iteration in range(4):
                generator = torch.Generator().manual_seed(100 * iteration + ranks.rank)
                called(torch.randn(3, 4, generator=generator)).square().sum().backward()
                pipeline.step()
        hashes.append(weights_sha256(model))
    return hashes[0], hashes[1]


@pytest.mark.slow
def test_a_compiled_model_trains_with_buckets_as_without() -> None:
    for whole, cut in run_ranks(2, _compiled):
        assert whole == cut


def _sometimes_fails(ranks: Ranks) -> tuple[list[str], str]:
    """Backward raises once on rank 0, when a bucket has left. Another pass is refused; a step takes what there is."""
    model = _net()
    messages = []
    broken = ["the user's own"]

    def fail(gradient: Tensor) -> None:
        if broken:
            raise KeyError(broken.pop())

    if ranks.rank == 0:
        model.first.weight.register_hook(fail)
    with Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=0.1), width=2, ranks=ranks, wire=Wire(buckets=7)
    ) as pipeline:
        for iteration in range(3):
            try:
                _loss(model, ranks.rank, iteration).backward()
            except KeyError:
                for attempt in (_loss(model, ranks.rank, iteration).backward, pipeline.step):
                    try:
                        attempt()
                    except UserInputError as refused:
                        messages.append(str(refused))
                model.zero_grad()
            pipeline.step()
    return messages, weights_sha256(model)


@pytest.mark.slow
def test_an_error_in_the_backward_pass_hangs_nobody() -> None:
    (messages, one), (none, other) = run_ranks(2, _sometimes_fails)
    assert none == []
    assert len(messages) == 2
    assert all(message.endswith("another gradient of a parameter whose bucket has left") for message in messages)
    assert one == other


CALLS: dict[str, Callable[[Pipelined], Any]] = {
    "flush": lambda pipeline: pipeline.flush(),
    "state_dict": lambda pipeline: pipeline.state_dict(),
    "load_state_dict": lambda pipeline: pipeline.load_state_dict({}),
    "combine_buffers": lambda pipeline: pipeline.combine_buffers(),
    "close": lambda pipeline: pipeline.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_between_backward_and_step_is_refused(call: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=1, wire=Wire(buckets=2))
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UserInputError) as caught:
        CALLS[call](pipeline)
    assert str(caught.value) == (
        f"{call} must not be called between backward() and step() with buckets; got it while those of iteration 0 leave"
    )
    model.requires_grad_(True)
    if call == "close":
        assert pipeline.closed
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()  # no hook is left
        return
    assert pipeline.step().applied == (0,)
    pipeline.close()


def test_a_sparse_gradient_is_refused_where_its_bucket_leaves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0), width=1, wire=Wire(buckets=2)) as pipeline:
        with pytest.raises(UserInputError, match="sparse=False"):
            model[1](torch.tensor([1])).sum().backward()
        model.zero_grad()
        model[0](torch.ones(1, 2)).sum().backward()
        assert pipeline.step().applied == (0,)


def _train_with_an_embedding(sparse: str) -> tuple[str, list[str]]:
    """Train for one iteration with a gradient that is sparse in the "hook" or in the "step", or not ("").

    Return the hash of the weights, and the message to which the loop reacts with a dense gradient.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.Embedding(2, 2, sparse=sparse == "hook"), nn.Linear(2, 2, bias=False)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    messages = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Pipelined(model, optimizer, width=1, scaler=scaler, wire=Wire(buckets=3)) as pipeline:
        table = model.get_parameter("1.weight")

        def attempt(call: Callable[[], Any]) -> None:
            try:
                call()
            except UserInputError as refused:
                messages.append(str(refused))

        with pipeline.accumulating() if sparse == "step" else contextlib.nullcontext():
            attempt(scaler.scale(model[2](model[1](torch.tensor([1]))).sum()).backward)
        if sparse == "step":
            assert table.grad is not None
            table.grad = table.grad.to_sparse()
        if sparse:
            attempt(pipeline.step)
            assert table.grad is not None
            table.grad = table.grad.to_dense()
        assert pipeline.step().applied == (0,)
    return weights_sha256(model), messages


@pytest.mark.parametrize(("sparse", "refused"), [("hook", 2), ("step", 1)])
def test_a_step_after_a_refused_bucket_takes_all_gradients(sparse: str, refused: int) -> None:
    """Gradients of earlier buckets were lost, and those of the refused one were divided by the loss scale twice."""
    expected, none = _train_with_an_embedding("")
    weights, messages = _train_with_an_embedding(sparse)
    assert none == []
    assert len(messages) == refused
    assert all(message.startswith("gradients must be dense; got a sparse one") for message in messages)
    assert weights == expected


# ---- State


def _resume(ranks: Ranks, width: int, codec: str | CodecOptions) -> tuple[str, str]:
    def build() -> tuple[Net, torch.optim.Optimizer, Pipelined]:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return (
            model,
            optimizer,
            Pipelined(model, optimizer, width=width, codec=codec, ranks=ranks, wire=Wire(buckets="300B")),
        )

    def run(parts: Any, first: int, last: int) -> None:
        for iteration in range(first, last):
            _loss(parts[0], ranks.rank, iteration).backward()
            parts[2].step()

    one, other = build(), build()
    run(one, 0, 3)
    with one[2].true_weights():
        saved = copy.deepcopy([part.state_dict() for part in one])
    run(one, 3, 6)
    run(other, 10, 12)
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    run(other, 3, 6)
    for _, _, pipeline in (one, other):
        pipeline.close()
    return weights_sha256(one[0]), weights_sha256(other[0])


def _interrupted(ranks: Ranks, buckets: int, method: str, call: int) -> tuple[list[str], str]:
    """Interrupt both ranks at the end of a call of a method in iteration 3, and load the state that was before it.

    Return what was refused after the interruption, and the hash of the weights in the end. Call 0 is none.
    """
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pipeline = Pipelined(model, optimizer, width=2, codec="int4", ranks=ranks, wire=Wire(buckets=buckets))
    parts = model, optimizer, pipeline

    def train(first: int, last: int) -> None:
        for iteration in range(first, last):
            _loss(model, 1, 10 * iteration + ranks.rank).backward()
            pipeline.step()

    train(0, 3)
    with pipeline.true_weights():
        saved = copy.deepcopy([part.state_dict() for part in parts])
    refused = []
    if call:
        owner: Any = pipeline if method == "_pack" else pipeline.pipeline.flight
        original, calls = getattr(owner, method), itertools.count(1)

        def interrupted(*arguments: Any) -> Any:
            result = original(*arguments)
            if next(calls) == call:
                raise KeyboardInterrupt
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(3, 4)
        for attempt in (pipeline.step, pipeline.state_dict):
            try:
                attempt()
            except RunError as error:
                refused.append(str(error))
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        assert all(parameter.grad is None for parameter in model.parameters())
    train(3, 6)
    pipeline.close()
    assert pipeline.buffers_allocated <= 2
    return refused, weights_sha256(model)


INTERRUPTIONS = [(1, "_pack", 1), (3, "_pack", 2), (3, "_pack", 3), (3, "meet", 1), (3, "meet", 3)]
"""Buckets, and calls that are interrupted: in the backward pass, unless they are for the last bucket."""


def _all_interruptions(ranks: Ranks) -> dict[int | tuple[int, str, int], tuple[list[str], str]]:
    return {buckets: _interrupted(ranks, buckets, "", 0) for buckets in (1, 3)} | {
        one: _interrupted(ranks, *one) for one in INTERRUPTIONS
    }


@pytest.mark.slow
def test_a_state_dict_is_the_way_back_from_an_interruption_with_buckets() -> None:
    for found in run_ranks(2, _all_interruptions):
        for one in INTERRUPTIONS:
            refused, weights = found[one]
            expected = "taking over the gradients of iteration 3 was interrupted halfway"
            assert [message.startswith(expected) for message in refused] == [True, True], one
            assert weights == found[one[0]][1], one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "codec"), [(1, "int4"), (3, "sign"), (2, codec_named("powersgd", low_rank=1, factors="int8"))], ids=str
)
def test_a_state_dict_continues_bit_for_bit(width: int, codec: str | CodecOptions) -> None:
    """It has residuals, factors and means in flight, bucket by bucket."""
    for uninterrupted, resumed in run_ranks(2, _resume, width, codec):
        assert uninterrupted == resumed


def test_a_state_of_other_buckets_is_refused() -> None:
    model = nn.Linear(2, 2)
    states = {}
    for buckets in ("1", "2"):
        with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), wire=Wire(buckets=buckets)) as pipeline:
            states[buckets] = pipeline.state_dict()
            pipeline.load_state_dict(states[buckets])
            if buckets == "2":
                with pytest.raises(UserInputError, match="buckets must be 1, as in the state that is loaded; got 2"):
                    pipeline.load_state_dict(states["1"])


def test_memory_is_that_of_one_gradient() -> None:
    model = _net()
    parameters = list(model.parameters())
    whole = BucketedBuffer(parameters, [list(range(7))])
    cut = BucketedBuffer(parameters, bucket_indices(model, parameters, "3"))
    assert cut.nbytes == whole.nbytes == sum(parameter.nbytes for parameter in parameters)
    assert [bucket.first for bucket in cut.buckets] == [0, 1, 2]
    for parameter, view in zip(parameters, cut.views, strict=True):
        assert view.shape == parameter.shape
    assert {view.untyped_storage().data_ptr() for view in cut.views} == {flat.data_ptr() for flat in cut.flats}


def test_the_plans_of_all_buckets_are_kept() -> None:
    model = nn.ParameterList([torch.ones(size) for size in range(1, 31)])
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=1, wire=Wire(buckets=30)) as pipeline:
        for _ in range(2):
            sum(parameter.sum() for parameter in model).backward()
            pipeline.step()
        assert len(pipeline.pipeline.flight.reducer._all_reduce._plans) == 30  # type: ignore[attr-defined]
