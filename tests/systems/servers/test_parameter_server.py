"""Parameter servers against one-process references and exact integers; failures; and the state in a checkpoint."""

from __future__ import annotations

import io
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _differences import Differences
from _ranks import RankFailed, run_ranks
from _reference import pipe_sgd
from _small_problem import falling_lr
from torch import Tensor, nn

from pipesgd.errors import CommunicationError, DeadlineExceeded, NonFiniteGradientError, UserInputError
from pipesgd.flat_buffer import FlatBuffer
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.systems.servers.strategy import ParameterServers
from pipesgd.systems.servers.update_rule import ShardLayout

pytestmark = pytest.mark.slow

Options = dict[str, Any]

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "nesterov": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "adagrad": lambda model: torch.optim.Adagrad(model.named_parameters(), lr=0.05),
    "two groups": lambda model: torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.01, "momentum": 0.5},
        ],
        lr=0.05,
    ),
}


class Odd(nn.Module):
    """A float64 network with parameters of no dimension, of one element, of no elements, transposed, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.first = nn.Parameter(torch.randn(4, 3).t())
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.second = nn.Linear(4, 2)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:  # (n, 3) -> (n, 2)
        hidden = (inputs * self.frozen) @ self.first * self.scale + self.shift
        return self.second(hidden.tanh()) + self.empty.sum()


class Line(nn.Module):
    """A network of two elements: fewer than three servers."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1, bias=False)
        self.line.weight = nn.Parameter(torch.tensor([[0.5, -0.5]]))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.line(inputs[:, :2])


MODELS: dict[str, Callable[[], nn.Module]] = {"odd": Odd, "line": Line}


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - 1.0).square().mean()


def batch(iteration: int, rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * iteration + rank), dtype=torch.float64)


def build(model: str, optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    made = MODELS[model]()
    return made, OPTIMIZERS[optimizer](made)


def start(
    ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options
) -> ParameterServers | None:
    """Return the strategy on a worker; on a dedicated server, serve until no worker needs it, then return None."""
    options = {"servers": 1, "placement": "colocated", "timeout": 20.0, **options}
    workers = ranks.world_size - (options["servers"] if options["placement"] == "dedicated" else 0)
    strategy = ParameterServers(model, optimizer, ranks=ranks, **options)
    if ranks.rank < workers:
        return strategy
    strategy.serve()
    return None


def _phase_at_the_end(ranks: Ranks) -> tuple[str, bool]:
    ranks.enter("loading of data and model")
    model = nn.Linear(2, 1)
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=0.1), {"placement": "dedicated"})
    if strategy is not None:
        strategy.close()
    beat = ranks.standing.beat(0.0)
    return beat.phase, beat.waiting


def test_a_server_on_a_rank_of_its_own_waits_for_its_workers() -> None:
    """Every line about a long wait used to name it: "rank 1 (loading of data and model for 900 s)"."""
    assert run_ranks(2, _phase_at_the_end)[1] == ("serving", True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def placements(world_size: int) -> list[Options]:
    """Return every way to place one to three servers on this many ranks."""
    beside = [{"servers": servers, "placement": "colocated"} for servers in (1, 2, 3) if servers <= world_size]
    return beside + [{"servers": servers, "placement": "dedicated"} for servers in (1, 2, 3) if servers < world_size]


def workers_of(options: Options, world_size: int) -> int:
    return world_size - (options["servers"] if options["placement"] == "dedicated" else 0)


# ---- Synchronous rounds


def _train_in_rounds(ranks: Ranks, cases: list[Options], iterations: int) -> list[Any]:
    outcomes = []
    for case in cases:
        model, optimizer = build(case["model"], case["optimizer"], seed=ranks.rank)  # only rank 0's values count
        strategy = start(ranks, model, optimizer, {**case["options"], "staleness_bound": 0})
        if strategy is None:
            outcomes.append(None)
            continue
        losses, hashes, steps = [], [], 0
        for iteration in range(iterations):
            if case["scheduled"]:
                set_lr(optimizer, falling_lr(iteration))
            loss = loss_of(strategy.module, batch(iteration, ranks.rank))
            loss.backward()
            report = strategy.step()
            assert report.applied == (iteration,)
            steps += report.schedule_steps
            losses.append(loss.item())
            hashes.append(weights_sha256(model))
        assert strategy.replicated
        assert strategy.flush().schedule_steps == 0
        assert steps == iterations
        assert strategy.iteration == iterations
        strategy.close()
        outcomes.append((losses, hashes, model.state_dict()))
    return outcomes


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_rounds_are_synchronous_sgd(world_size: int) -> None:
    """In float64, nothing but the order of additions differs: 1e-11. Replicas are bit-identical after every round.

    Neither the number of servers nor their places change a bit.
    """
    iterations = 6
    cases = [
        {"model": model, "optimizer": optimizer, "options": options, "scheduled": optimizer != "two groups"}
        for index, options in enumerate(placements(world_size))
        for model, optimizer in (
            *itertools.product(["odd"], sorted(OPTIMIZERS)[index % 2 :: 1 if world_size == 3 else 2]),
            ("line", "adamw"),
        )
    ]
    results = run_ranks(world_size, _train_in_rounds, cases, iterations)
    seen: dict[tuple[int, str, str], list[str]] = {}
    for index, case in enumerate(cases):
        workers = workers_of(case["options"], world_size)
        outcomes = [results[rank][index] for rank in range(workers)]
        for hashes in zip(*(hashes for _, hashes, _ in outcomes), strict=True):
            assert len(set(hashes)) == 1
        assert seen.setdefault((workers, case["model"], case["optimizer"]), outcomes[0][1]) == outcomes[0][1]

        model, optimizer = build(case["model"], case["optimizer"], seed=0)
        if isinstance(model, Odd):
            del model._parameters["frozen"]  # the reference takes the gradients of all parameters
            model.frozen = torch.ones(3, dtype=torch.float64)
        batches = [[batch(iteration, rank) for rank in range(workers)] for iteration in range(iterations)]
        lr_of = falling_lr if case["scheduled"] else None
        losses = pipe_sgd(model, optimizer, loss_of, batches, width=1, lr_of=lr_of)
        for rank, (ours, _, weights) in enumerate(outcomes):
            assert ours == pytest.approx([of_ranks[rank] for of_ranks in losses], rel=1e-11), case
            for name, value in model.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=1e-11)
    assert all(results[rank][0] is not None for rank in range(world_size))


def test_every_element_belongs_to_one_server() -> None:
    tensors = [torch.empty(()), torch.empty(0, 3), torch.empty(4, 3), torch.empty(5, dtype=torch.float64)]
    for servers in range(1, 25):
        buffer = FlatBuffer(tensors)
        for index in range(servers):
            layout = ShardLayout(buffer, index, servers)
            for view in layout.views(layout.ranges_of(buffer)):
                view += 1
        assert all(bool((flat == 1).all()) for flat in buffer.flats)
    whole = ShardLayout(FlatBuffer(tensors), 0, 1)
    assert [piece.shape for piece in whole.pieces] == [(), (4, 3), (5,)], "whole parameters keep their shapes"


# ---- Asynchronous training


class Counter(nn.Module):
    """A model whose gradient is ``scale`` times fixed integers, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.matrix = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.unused = nn.Parameter(torch.full((2,), 7.0))

    def loss(self, scale: float) -> Tensor:
        weight = torch.arange(12.0).view(4, 3)
        return scale * (self.scalar * 3 + (self.matrix * weight).sum()).double() + scale * self.wide.sum()

    def moved(self) -> dict[str, list[float]]:
        """Return how far the weights have moved down, in units of the gradient."""
        start = Counter()
        return {
            "scalar": [((start.scalar - self.scalar) / 3).item()],
            "wide": (start.wide - self.wide).tolist(),
            "matrix": ((start.matrix - self.matrix).reshape(-1)[1:] / torch.arange(1.0, 12.0)).tolist(),
            "unused": (start.unused - self.unused).tolist(),
        }


def _count(ranks: Ranks, options: Options, iterations: int) -> Any:
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = start(ranks, model, optimizer, options)
    if strategy is None:
        return None
    workers = workers_of(options, ranks.world_size)
    steps = 0
    for iteration in range(iterations):
        set_lr(optimizer, float(workers * (iteration + 1)))  # applied at 1/w of it: iteration + 1
        model.loss(float(ranks.rank + 1)).backward()
        report = strategy.step()
        assert report.applied == (iteration,)
        steps += report.schedule_steps
    assert strategy.replicated == (options["staleness_bound"] == 0)
    steps += strategy.flush().schedule_steps
    sha256 = weights_sha256(model)
    strategy.flush()
    assert weights_sha256(model) == sha256, "nothing twice"
    strategy.close()
    return model.moved(), steps, sha256


@pytest.mark.parametrize("bound", [None, 2])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {"servers": 1, "placement": "colocated"}),
        (3, {"servers": 2, "placement": "colocated"}),
        (4, {"servers": 1, "placement": "colocated"}),
        (4, {"servers": 2, "placement": "dedicated"}),
    ],
)
def test_every_gradient_is_applied_once_at_its_own_rate(world_size: int, options: Options, bound: int | None) -> None:
    """Sums of integers are exact; all ranks end with the same weights, and with schedules at the same step."""
    iterations = 9
    workers = workers_of(options, world_size)
    results = run_ranks(world_size, _count, {**options, "staleness_bound": bound}, iterations)[:workers]
    total = float(sum(range(1, workers + 1)) * sum(range(1, iterations + 1)))
    for moved, steps, sha256 in results:
        assert moved == {"scalar": [total], "wide": [total] * 5, "matrix": [total] * 11, "unused": [0.0] * 2}
        assert steps == iterations
        assert sha256 == results[0][2]


def _train_alone(ranks: Ranks, optimizer_name: str, options: Options) -> Any:
    model, optimizer = build("odd", optimizer_name, seed=3)
    strategy = start(ranks, model, optimizer, options)
    if strategy is None:
        return None
    plain, its_optimizer = build("odd", optimizer_name, seed=3)
    for iteration in range(5):
        for one, of in ((model, optimizer), (plain, its_optimizer)):
            set_lr(of, falling_lr(iteration))
            loss_of(one, batch(iteration, 0)).backward()
        strategy.step()
        its_optimizer.step()
        its_optimizer.zero_grad()
        assert weights_sha256(model) == weights_sha256(plain)
    strategy.close()
    return True


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_one_worker_is_plain_training_exactly(optimizer: str) -> None:
    options = {"servers": 2, "placement": "dedicated", "staleness_bound": None}
    assert run_ranks(3, _train_alone, optimizer, options)[0]


# ---- Staleness bound


@pytest.mark.parametrize("bound", [0, None])
def test_an_optimizer_of_servers_must_clone_gradients_that_it_keeps(bound: int | None) -> None:
    model = nn.Linear(2, 1)
    optimizer = Differences(model.parameters(), clones=False)
    model(torch.ones(1, 2)).sum().backward()
    with (
        pytest.raises(UserInputError, match=r"^optimizer must clone what it keeps of a gradient"),
        ParameterServers(model, optimizer, staleness_bound=bound) as servers,
    ):
        servers.step()


def _lead_as_far_as_possible(ranks: Ranks, bound: int, iterations: int) -> int:
    """Let rank 1 push only when rank 0 is as far ahead as allowed; return how far rank 0 was ahead at most.

    Every rank announces its pushes in the store, so a count read there is at least the number that has arrived.
    """

    def said(rank: int) -> int:
        key = f"clock of {rank}"
        return int(ranks.store.get(key)) if ranks.store.check([key]) else 0

    def wait_until_said(rank: int, clock: int) -> None:
        ranks.store.wait([f"clock {clock} of {rank}"])

    model = nn.Linear(2, 1)
    options = {"staleness_bound": bound}
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    assert strategy is not None
    lead = 0
    for iteration in range(iterations):
        if ranks.rank == 0:
            lead = max(lead, iteration - said(1))
        else:
            wait_until_said(0, min(iteration + bound + 1, iterations))
        model(torch.ones(1, 2)).sum().backward()
        ranks.store.set(f"clock of {ranks.rank}", str(iteration + 1))
        ranks.store.set(f"clock {iteration + 1} of {ranks.rank}", "")
        strategy.step()
    strategy.flush()
    strategy.close()
    return lead


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_in_a_real_run_the_fastest_leads_by_the_bound_at_most(bound: int) -> None:
    lead, _ = run_ranks(2, _lead_as_far_as_possible, bound, 12)
    assert max(0, bound - 1) <= lead <= bound, "a push that was announced may be counted early, by one"


def _one_after_the_other(ranks: Ranks) -> Any:
    """Train on both ranks; rank 1 computes nothing before rank 0 is done."""
    model = Counter()
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=2.0), {"staleness_bound": None})
    assert strategy is not None
    if ranks.rank == 1:
        ranks.store.wait(["rank 0 is done"])
    steps = []
    for _ in range(5):
        model.loss(1.0).backward()
        steps.append(strategy.step().schedule_steps)
    own = weights_sha256(model)
    if ranks.rank == 0:
        ranks.store.set("rank 0 is done", "")
    with strategy.true_weights():
        true = weights_sha256(model)
    assert weights_sha256(model) == own
    steps.append(strategy.flush().schedule_steps)
    assert weights_sha256(model) == true
    strategy.close()
    return steps, own, true


def test_schedules_follow_all_updates_and_evaluations_see_all_weights() -> None:
    (steps, own, true), (others_steps, others_own, others_true) = run_ranks(2, _one_after_the_other)
    assert steps == [0, 1, 0, 1, 0, 3], "half of the updates of both"
    assert others_steps == [3, 0, 1, 0, 1, 0]
    assert own != true
    assert others_own == others_true == true


def _one_waits_long(ranks: Ranks) -> int:
    """Finish rank 0 at once; rank 1 takes longer than the timeout, but none of its iterations does."""
    model = Counter()
    options = {"staleness_bound": None, "timeout": 2.0}
    ranks.timeout = 2.0
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=2.0), options)
    assert strategy is not None
    if ranks.rank == 0:
        ranks.store.set("rank 0 waits", "")
    else:
        ranks.store.wait(["rank 0 waits"])
        end = time.monotonic() + 3.0
        while time.monotonic() < end:  # not an event: the test is about slowness
            time.sleep(0.2)
            model.loss(1.0).backward()
            strategy.step()
    own = strategy.iteration
    with strategy.true_weights():
        pass
    ranks.all_gather_object("pace", own)  # any other exchange may find workers far apart too
    strategy.combine_buffers("average")
    strategy.flush()
    strategy.close()
    return own


def test_a_worker_waits_longer_than_the_timeout_for_one_that_makes_progress() -> None:
    first, second = run_ranks(2, _one_waits_long)
    assert first == 0
    assert second > 1


def _never_comes(ranks: Ranks, folder: Path) -> None:
    """Stop training on rank 2; without a bound, its absence is found by the next collective call."""
    model = Counter()
    options = {"staleness_bound": None, "timeout": 2.0, "placement": "dedicated"}
    strategy = None
    seen: Any = None
    try:
        strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=2.0), options)
        if strategy is not None:
            model.loss(1.0).backward()
            strategy.step()
            if ranks.rank == 2:
                ranks.store.wait(["failed 0", "failed 1", "failed 3"])
            else:
                strategy.flush()
    except CommunicationError as error:
        seen = [error.peer, str(error)]
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(seen))
    ranks.store.set(f"failed {ranks.rank}", "")
    if strategy is not None:
        strategy.close()
    wait_for_threads()


def test_a_worker_that_hangs_is_named_by_all_who_wait_for_it_in_a_collective_call(tmp_path: Path) -> None:
    run_ranks(4, _never_comes, tmp_path)
    assert [seen_by(tmp_path, rank)[0] for rank in (0, 1, 3)] == [2, 2, 2]
    assert "failed: nothing was heard of it for 2 s" in seen_by(tmp_path, 3)[1]


def _change_weights(ranks: Ranks, options: Options) -> Any:
    model = Counter()
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=float(ranks.world_size)), options)
    assert strategy is not None
    hashes = []
    for _ in range(2):
        model.loss(1.0).backward()
        strategy.step()
        with strategy.true_weights():
            for parameter in model.parameters():
                parameter.data.fill_(40.0)
        hashes.append(weights_sha256(model))
    model.loss(1.0).backward()
    strategy.step()
    strategy.flush()
    state = strategy.state_dict()
    strategy.load_state_dict(state)
    with strategy.true_weights():
        pass  # nothing is changed: the next line would wait forever if this were collective on one rank alone
    strategy.close()
    return model.wide.tolist(), hashes


@pytest.mark.parametrize("bound", [0, None])
@pytest.mark.parametrize("servers", [1, 2])
def test_weights_that_are_changed_within_true_weights_stay(servers: int, bound: int | None) -> None:
    results = run_ranks(2, _change_weights, {"servers": servers, "staleness_bound": bound})
    for wide, hashes in results:
        assert wide == [40.0 - 2.0] * 5
        assert hashes == results[0][1]
        assert hashes[0] == hashes[1]


def _schedule_options(ranks: Ranks, names: str) -> Any:
    """Change momentum, betas and weight decay every iteration; return hashes of the weights, ours and plain torch's."""
    model, optimizer = build("odd", names, seed=3)
    strategy = start(ranks, model, optimizer, {"staleness_bound": 0})
    assert strategy is not None
    plain, its_optimizer = build("odd", names, seed=3)
    for iteration in range(5):
        for one, of in ((model, optimizer), (plain, its_optimizer)):
            for group in of.param_groups:
                group["weight_decay"] = 0.01 * iteration
                if "momentum" in group:
                    group["momentum"] = 0.9 - 0.1 * iteration
                if "betas" in group:
                    group["betas"] = (0.9 - 0.1 * iteration, 0.99)
            loss_of(one, batch(iteration, 0)).backward()
        strategy.step()
        its_optimizer.step()
        its_optimizer.zero_grad()
    strategy.close()
    return weights_sha256(model), weights_sha256(plain)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "two groups"])
def test_schedules_of_momentum_betas_and_weight_decay_are_followed(optimizer: str) -> None:
    [(ours, plain)] = run_ranks(1, _schedule_options, optimizer)
    assert ours == plain


# ---- Gradients that are not finite


def _one_rank_computes_nan(ranks: Ranks, options: Options) -> Any:
    model = Counter()
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=float(ranks.world_size)), options)
    assert strategy is not None
    skipped, error = [], None
    for iteration in range(5):
        scale = float("nan") if ranks.rank == 1 and iteration == 2 else 1.0
        model.loss(scale).backward()
        try:
            skipped.append(strategy.step().skipped)
        except NonFiniteGradientError as failure:
            error = (iteration, failure.iteration)
            break
    if options["on_nonfinite"] == "skip":
        strategy.flush()
    strategy.close()
    return skipped, error, model.moved()


@pytest.mark.parametrize("servers", [1, 2])
def test_in_rounds_all_stop_in_the_same_iteration(servers: int) -> None:
    options = {"servers": servers, "staleness_bound": 0, "on_nonfinite": "stop"}
    for skipped, error, _ in run_ranks(3, _one_rank_computes_nan, options):
        assert error == (2, 2)
        assert skipped == [(), ()]


@pytest.mark.parametrize("servers", [1, 2])
def test_in_rounds_all_skip_the_round(servers: int) -> None:
    options = {"servers": servers, "staleness_bound": 0, "on_nonfinite": "skip"}
    for skipped, error, moved in run_ranks(3, _one_rank_computes_nan, options):
        assert error is None
        assert skipped == [(), (), (2,), (), ()]
        assert moved["wide"] == [4 * 3.0] * 5


def test_without_rounds_only_that_gradient_is_left_out() -> None:
    options = {"servers": 2, "staleness_bound": None, "on_nonfinite": "skip"}
    results = run_ranks(3, _one_rank_computes_nan, options)
    assert [skipped[2] for skipped, _, _ in results] == [(), (2,), ()]
    assert all(moved["wide"] == [14.0] * 5 for _, _, moved in results)


def test_without_rounds_only_that_rank_stops() -> None:
    options = {"staleness_bound": None, "on_nonfinite": "stop"}
    results = run_ranks(3, _one_rank_computes_nan, options)
    assert [error for _, error, _ in results] == [None, (2, 2), None]
    assert [len(skipped) for skipped, _, _ in results] == [5, 2, 5]


def _push_large_gradients(ranks: Ranks, dtype: torch.dtype, size: float, options: Options) -> Any:
    """Push two gradients whose sum overflows in ``dtype``; only those of the second iteration are small."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(2))])
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=1.0), {**options, "staleness_bound": 0})
    assert strategy is not None
    reports: list[Any] = []
    for gradient in (size, 2.0):
        model[0].grad, model[1].grad = torch.full_like(model[0], gradient), torch.ones(2)
        try:
            report = strategy.step()
        except NonFiniteGradientError as failure:
            reports.append(failure.iteration)
            break
        reports.append((report.applied, report.skipped))
    strategy.close()
    return reports, model[0].tolist()


@pytest.mark.parametrize("servers", [1, 2])
def test_a_round_of_float16_gradients_has_the_mean_of_width_1(servers: int) -> None:
    options = {"servers": servers, "on_nonfinite": "stop"}
    for reports, weights in run_ranks(4, _push_large_gradients, torch.float16, 30000.0, options):
        assert reports == [((0,), ()), ((1,), ())]
        assert weights == [-30000.0] * 3, "30002 is rounded to it in float16"


@pytest.mark.parametrize("servers", [1, 2])
def test_a_mean_that_overflows_is_not_applied(servers: int) -> None:
    options = {"servers": servers, "on_nonfinite": "stop"}
    for reports, weights in run_ranks(2, _push_large_gradients, torch.float32, 3e38, options):
        assert reports == [0]
        assert weights == [0.0] * 3
    for reports, weights in run_ranks(
        2, _push_large_gradients, torch.float32, 3e38, {**options, "on_nonfinite": "skip"}
    ):
        assert reports == [((), (0,)), ((1,), ())]
        assert weights == [-2.0] * 3


# ---- Checkpoints


def _resume_in_the_middle(ranks: Ranks, optimizer_name: str, options: Options, at: int) -> Any:
    """Return hashes and schedule steps of an uninterrupted run and of one resumed from a file of iteration ``at``."""

    def run(parts: Any, first: int, last: int) -> None:
        model, _, schedule, strategy = parts
        for iteration in range(first, last):
            loss_of(model, batch(iteration, ranks.rank)).backward()
            for _ in range(strategy.step().schedule_steps):
                schedule.step()

    def begin() -> Any:
        model, optimizer = build("odd", optimizer_name, seed=0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        strategy = start(ranks, model, optimizer, options)
        return None if strategy is None else (model, optimizer, schedule, strategy)

    file = io.BytesIO()
    one = begin()
    if one is not None:
        run(one, 0, at)
        torch.save([part.state_dict() for part in one], file)
        run(one, at, 8)
        one[3].flush()
        one[3].close()
    other = begin()
    if one is None:
        return None
    run(other, 0, 3)  # the servers are in another state when this one is loaded
    file.seek(0)
    for part, state in zip(other, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert other[3].iteration == at
    run(other, at, 8)
    other[3].flush()
    other[3].close()
    return [weights_sha256(parts[0]) for parts in (one, other)], [parts[2].last_epoch for parts in (one, other)]


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adagrad"])
@pytest.mark.parametrize(
    "options", [{"servers": 1, "placement": "colocated"}, {"servers": 3}, {"servers": 2, "placement": "dedicated"}]
)
def test_a_state_dict_continues_bit_for_bit(optimizer: str, options: Options) -> None:
    world_size = 4 if options.get("placement") == "dedicated" else 3
    results = run_ranks(world_size, _resume_in_the_middle, optimizer, {**options, "staleness_bound": 0}, 4)
    for (uninterrupted, resumed), steps in filter(None, results):
        assert resumed == uninterrupted
        assert steps == [8, 8]


def _resume_counting(ranks: Ranks, options: Options) -> Any:
    model = Counter()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=3.0, dampening=np.float64(0.0)
    )  # torch loads no numbers of NumPy
    strategy = start(ranks, model, optimizer, options)
    assert strategy is not None
    steps = 0

    def run(iterations: int) -> None:
        nonlocal steps
        for _ in range(iterations):
            model.loss(1.0).backward()
            steps += strategy.step().schedule_steps
        steps += strategy.flush().schedule_steps

    run(2)
    saved, steps_then = strategy.state_dict(), steps
    run(3)
    strategy.load_state_dict(saved)
    steps = steps_then
    assert strategy.iteration == 2
    run(4)
    strategy.close()
    return model.moved()["wide"], steps, saved["servers"] is None


def test_servers_without_rounds_go_back_too() -> None:
    options = {"servers": 2, "staleness_bound": 2}
    for rank, (moved, steps, nothing_saved) in enumerate(run_ranks(3, _resume_counting, options)):
        assert moved == [3.0 * 6] * 5
        assert steps == 6
        assert nothing_saved == (rank > 0), "only worker 0 keeps what the servers know"


# ---- Failures


def wait_for_threads() -> None:
    """Wait until the servers' threads have noticed that their workers left: the harness checks for leftovers."""
    for thread in threading.enumerate():
        if thread.name.startswith("pipesgd"):
            thread.join(20)


def _until_failure(ranks: Ranks, options: Options, victim: int, hangs: bool, folder: Path) -> None:
    """Kill or hang rank ``victim`` in iteration 3. The others' errors go into files: the dead return nothing."""
    model = nn.Linear(3, 2)
    strategy = None
    try:
        strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=0.1), options)
        if strategy is not None:
            for iteration in itertools.count():  # without a bound nobody waits for the victim
                if ranks.rank == victim and iteration == 3:
                    if not hangs:
                        os._exit(1)
                    others = [f"failed {rank}" for rank in range(ranks.world_size) if rank != victim]
                    ranks.store.wait(others)
                    break
                model(torch.ones(1, 3)).sum().backward()
                strategy.step()
        seen: Any = "nothing"
    except CommunicationError as error:
        seen = [error.rank, error.peer, error.iteration, isinstance(error, DeadlineExceeded), str(error)]
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(seen))
    ranks.store.set(f"failed {ranks.rank}", "")
    if strategy is not None:
        strategy.close()
    wait_for_threads()


def seen_by(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"rank-{rank}.json").read_text())


@pytest.mark.parametrize("bound", [0, None])
@pytest.mark.parametrize(
    ("options", "victim"),
    [
        ({"servers": 1}, 2),
        ({"servers": 1}, 0),
        ({"servers": 3}, 1),
        ({"servers": 1, "placement": "dedicated"}, 1),
    ],
)
def test_a_rank_that_dies_is_noticed_by_all_others(
    options: Options, victim: int, bound: int | None, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match=f"^rank {victim} died: without an answer$"):
        run_ranks(4, _until_failure, {**options, "staleness_bound": bound}, victim, False, tmp_path)
    for rank in {0, 1, 2, 3} - {victim}:
        own_rank, peer, iteration, _, text = seen_by(tmp_path, rank)
        assert own_rank == rank
        assert isinstance(iteration, int)
        assert text.startswith(f"rank {rank}: ")
        if options["servers"] == 1:
            assert peer == victim, "told by the server, or seen: not the rank that told"
        if bound == 0:  # a server may die before its last replies are out
            assert iteration == 3 or (iteration == 2 and victim < options["servers"])


@pytest.mark.parametrize("options", [{"servers": 1}, {"servers": 1, "placement": "dedicated"}])
def test_a_worker_that_hangs_is_named_within_the_deadline(options: Options, tmp_path: Path) -> None:
    run_ranks(4, _until_failure, {**options, "staleness_bound": 0, "timeout": 2.0}, 2, True, tmp_path)
    for rank in (0, 1, 3):
        _, peer, iteration, _, text = seen_by(tmp_path, rank)
        assert (peer, iteration) == (2, 3), text
    exceeded = seen_by(tmp_path, 3 if "placement" in options else 0)
    assert exceeded[3], exceeded
    assert exceeded[4].endswith("wait for gradients with rank 2 in iteration 3 failed: none within 2 s")


def _leave_early(ranks: Ranks) -> Any:
    model = nn.Linear(3, 2)
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=0.1), {"staleness_bound": 1})
    assert strategy is not None
    seen = None
    try:
        for _ in range(2 if ranks.rank == 1 else 9):
            model(torch.ones(1, 3)).sum().backward()
            strategy.step()
    except CommunicationError as error:
        seen = error.peer, error.iteration, error.reason
    strategy.close()
    wait_for_threads()
    return seen


def test_who_waits_for_a_worker_that_has_closed_is_told() -> None:
    first, second, third = run_ranks(3, _leave_early)
    assert second is None
    # The first worker to be two ahead ends the run for both.
    assert {first[0], third[0]} == {1}, "the worker that has left"
    assert max(first[1], third[1]) == 3
    assert {first[2], third[2]} <= {"it has left", "the server on rank 0 has lost it"}


# ---- Bytes sent


def _count_bytes(ranks: Ranks, cases: list[Options]) -> list[Any]:
    counts = []
    for index, options in enumerate(cases):
        model, optimizer = build("odd", "two groups", seed=0)
        strategy = start(ranks, model, optimizer, options)
        if strategy is None:
            counts.append(None)
            continue
        announced = 0
        for iteration in range(4):
            loss_of(model, batch(iteration, ranks.rank)).backward()
            announced += strategy.step().wire_bytes
        # By now all workers have their replies, so none is being sent. An exchange would cause more requests.
        ranks.store.set(f"replies {index} are at {ranks.rank}", "")
        workers = workers_of(options, ranks.world_size)
        ranks.store.wait([f"replies {index} are at {worker}" for worker in range(workers)])
        counts.append((announced, strategy.bytes_sent))
        ranks.store.set(f"counted {index} at {ranks.rank}", "")
        ranks.store.wait([f"counted {index} at {worker}" for worker in range(workers)])
        strategy.flush()
        strategy.close()
    return counts


def test_bytes_counted_are_bytes_announced() -> None:
    world_size = 4
    cases = [{**options, "staleness_bound": bound} for options in placements(world_size) for bound in (0, 2)]
    results = run_ranks(world_size, _count_bytes, cases)
    weights = 8 * sum(p.numel() for p in Odd().parameters() if p.requires_grad)
    for index, options in enumerate(cases):
        workers = workers_of(options, world_size)
        counts = [results[rank][index] for rank in range(workers)]
        for announced, counted in counts:
            assert announced == counted > 0
        headers = 4 * 8 * (4 + 6)  # four requests: 4 numbers; lr, momentum, weight decay of two groups
        if options["placement"] == "dedicated":
            assert {announced for announced, _ in counts} == {4 * weights + headers * options["servers"]}
        elif options["servers"] == 1:
            assert counts[1][0] == 4 * weights + headers
            assert counts[0][0] == 3 * 4 * (weights + 8 * 4), "the replies to the three others"


# ---- Other behaviour


def _average_buffers(ranks: Ranks, options: Options) -> Any:
    model = nn.BatchNorm1d(2)
    model.weight.data.fill_(float(ranks.rank))
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=0.1), options)
    if strategy is None:
        return None
    model.running_mean.copy_(torch.tensor([1.0, 10.0]) * (ranks.rank + 1))
    strategy.combine_buffers("average")
    strategy.flush()
    strategy.close()
    return model.running_mean.tolist(), model.weight.tolist()


@pytest.mark.parametrize("options", [{"servers": 2}, {"servers": 1, "placement": "dedicated"}])
def test_buffers_are_averaged_over_workers_who_start_from_rank_0s_values(options: Options) -> None:
    results = run_ranks(4 if "placement" in options else 3, _average_buffers, options)
    assert results[:3] == [([2.0, 20.0], [0.0, 0.0])] * 3
    assert results[3:] == ([None] if "placement" in options else [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": 0}, "servers must be at least 1; got 0"),
        ({"servers": 2}, "servers must be at most 1 on 1 rank with --server-placement colocated; got 2"),
        ({"placement": "dedicated"}, "servers must be at most 0 on 1 rank with --server-placement dedicated; got 1"),
        ({"placement": "colocate"}, "did you mean colocated"),
        ({"staleness_bound": -1}, "staleness-bound must be at least 0; got -1"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be stop or skip; got 'ignore'"),
        ({"timeout": 0}, "timeout must be from 0.1 to 1,000,000 seconds; got 0"),
    ],
)
def test_values_out_of_range_are_refused(options: Options, message: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UserInputError, match=message):
        ParameterServers(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)


def test_without_torchrun_one_rank_is_worker_and_server() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    strategy = ParameterServers(model, torch.optim.SGD(model.parameters(), lr=1.0), staleness_bound=0)
    for _ in range(4):
        model(torch.ones(1, 1)).sum().backward()
        report = strategy.step()
    assert model.weight.item() == -4.0
    assert report.wire_bytes == 0
    assert {span.what for span in report.spans} == {"pack", "communication", "wait", "update"}
    strategy.close()
