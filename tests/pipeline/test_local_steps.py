"""Local steps compared with a one-process reference, with synchronous training, and with themselves when resumed."""

from __future__ import annotations

import collections
import contextlib
import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import run_ranks
from _reference import elastic_averaging, local_steps, weight_streaming
from _sections import sections
from _small_problem import assert_same_weights, regress, small_problem
from torch import Tensor, nn

from pipesgd import LocalSteps, Pipelined
from pipesgd.codecs.options import codec_named
from pipesgd.config import TrainConfig
from pipesgd.errors import DisagreementError, NonFiniteGradientError, RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.run.state import RunState
from pipesgd.sections import Updates, Windows

Outcome = tuple[list[float], list[str], dict[str, Tensor]]
"""Losses, hashes of the true weights after every iteration and the flush, and the weights at the end."""

ITERATIONS = 11
"""Iterations of most runs here: no multiple of the windows' lengths, so the last window is shorter."""


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def _train(ranks: Ranks, cases: list[dict[str, Any]]) -> list[Outcome]:
    return [_train_one(ranks, case) for case in cases]


def _train_one(ranks: Ranks, options: dict[str, Any], make_optimizer: Any = _adamw) -> Outcome:
    model, batches = small_problem(3, [4, 5, 2], ITERATIONS, ranks.world_size)
    losses, hashes = [], []
    with LocalSteps(model, make_optimizer(model.parameters()), ranks=ranks, **sections(**options)) as strategy:
        for iteration, of_ranks in enumerate(batches):
            assert strategy.iteration == iteration
            loss = regress(model, of_ranks[ranks.rank])
            loss.backward()
            strategy.step()
            losses.append(loss.item())
            with strategy.true_weights():
                hashes.append(weights_sha256(model))
        strategy.flush()
        assert strategy.iteration == ITERATIONS
    return losses, [*hashes, weights_sha256(model)], model.state_dict()


CASES: list[dict[str, Any]] = [
    *({"local_steps": steps, "width": width} for steps in (1, 4) for width in (1, 2)),
    {"local_steps": 3, "width": 3},
    {"local_steps": 20, "width": 2},
    {"local_steps": 3, "width": 2, "synchronous_start": 4},
]


@pytest.mark.slow
def test_it_is_the_recursion_of_windows_bit_for_bit() -> None:
    """With two ranks a sum does not depend on the order of its parts."""
    outcomes = run_ranks(2, _train, [{"outer_lr": 1.0, **case} for case in CASES])
    for index, case in enumerate(CASES):
        model, batches = small_problem(3, [4, 5, 2], ITERATIONS, 2)
        rest = {name: value for name, value in case.items() if name != "local_steps"}
        losses = local_steps(model, _adamw, regress, batches, steps=case["local_steps"], **rest)
        for rank, of_rank in enumerate(outcomes):
            ours, hashes, weights = of_rank[index]
            assert ours == [of_ranks[rank] for of_ranks in losses], case
            assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items()), case
            assert hashes == outcomes[0][index][1], "the outer weights are the same on all ranks after every iteration"


STREAMS: list[dict[str, Any]] = [
    *({"local_steps": steps, "width": width, "fragments": 3} for steps in (1, 2) for width in (1, 2)),
    {"local_steps": 2, "width": 3, "fragments": 2},
    {"local_steps": 3, "width": 2, "fragments": 4},
]
"""Cases of weight streaming. The parameters have 20, 5, 10 and 2 values."""
FRAGMENTS = {
    2: [slice(1, 4), slice(0, 1)],
    3: [slice(2, 4), slice(1, 2), slice(0, 1)],
    4: [slice(number, number + 1) for number in (3, 2, 1, 0)],
}


@pytest.mark.slow
def test_weight_streaming_is_position_and_movement_bit_for_bit() -> None:
    outcomes = run_ranks(2, _train, [{"outer_lr": 1.0, **case} for case in STREAMS])
    for index, case in enumerate(STREAMS):
        model, batches = small_problem(3, [4, 5, 2], ITERATIONS, 2)
        steps, width = case["local_steps"], case["width"]
        fragments = FRAGMENTS[case["fragments"]]
        losses = weight_streaming(model, _adamw, regress, batches, steps=steps, width=width, fragments=fragments)
        for rank, of_rank in enumerate(outcomes):
            ours, hashes, weights = of_rank[index]
            assert ours == [of_ranks[rank] for of_ranks in losses], case
            assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items()), case
            assert hashes == outcomes[0][index][1], "the outer weights are the same on all ranks after every iteration"


def _bytes_of_fragments(ranks: Ranks) -> list[list[int]]:
    found: list[list[int]] = []
    for fragments in (1, 3):
        model, batches = small_problem(3, [4, 5, 2], 6, ranks.world_size)
        with LocalSteps(
            model, _sgd(model.parameters()), Windows(local_steps=1, fragments=fragments), ranks=ranks
        ) as strategy:
            found.append([])
            for of_ranks in batches:
                regress(model, of_ranks[ranks.rank]).backward()
                found[-1].append(strategy.step().wire_bytes)
    return found


@pytest.mark.slow
def test_an_exchange_sends_its_fragment_alone() -> None:
    for whole, parts in run_ranks(2, _bytes_of_fragments):
        assert parts[:3] == parts[3:]
        assert parts[2] == 8 * 20, "of two ranks, each sends half of the values twice"
        assert len(set(parts)) == 3
        assert abs(sum(parts[:3]) - whole[0]) <= 8, "fragments of odd sizes are split unevenly"


def test_there_are_no_more_fragments_than_parameters() -> None:
    model = nn.Linear(2, 1)
    for options, message in (
        ({"fragments": 3}, "fragments must be at most 2, the number of parameters; got 3"),
        ({"fragments": 0}, "fragments must be at least 1; got 0"),
    ):
        with pytest.raises(UserInputError, match=message):
            LocalSteps(model, _sgd(model.parameters()), **sections(local_steps=2, **options))


class Nesterov:
    """DiLoCo's outer optimizer, from its equations: m <- mu m + D, and the weights fall by lr (D + mu m)."""

    def __init__(self, lr: float, momentum: float):
        self._lr, self._momentum = lr, momentum
        self._buffers: list[Tensor] = []

    def __call__(self, movement: list[Tensor]) -> list[Tensor]:
        if not self._buffers:
            self._buffers = [torch.zeros_like(part) for part in movement]
        self._buffers = [self._momentum * m + part for m, part in zip(self._buffers, movement, strict=True)]
        return [self._lr * (part + self._momentum * m) for part, m in zip(movement, self._buffers, strict=True)]


@pytest.mark.slow
def test_nesterov_is_diloco() -> None:
    cases = [
        {"local_steps": 3, "width": 1, "outer": "nesterov"},
        {"local_steps": 3, "width": 1, "outer": "nesterov", "outer_lr": 0.5, "outer_momentum": 0.6},
        {"local_steps": 3, "width": 1, "outer_lr": 0.8},
    ]
    outers = [Nesterov(0.7, 0.9), Nesterov(0.5, 0.6), Nesterov(0.8, 0.0)]
    outcomes = run_ranks(3, _train, cases)
    for index, outer in enumerate(outers):
        model, batches = small_problem(3, [4, 5, 2], ITERATIONS, 3)
        local_steps(model, _adamw, regress, batches, steps=3, width=1, outer=outer)
        for of_rank in outcomes:
            assert_same_weights(of_rank[index][2], model.state_dict(), rtol=1e-12)


ELASTIC: list[dict[str, Any]] = [
    {"local_steps": 1, "width": 1, "moving_rate": 0.25},
    {"local_steps": 4, "width": 1, "moving_rate": 0.3},
    {"local_steps": 3, "width": 2},
    {"local_steps": 3, "width": 3, "synchronous_start": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_elastic_is_easgd(world_size: int) -> None:
    """Two ranks at width 1 are it bit for bit; otherwise sums are rounded in another order."""
    outcomes = run_ranks(world_size, _train, [{"outer": "elastic", **case} for case in ELASTIC])
    for index, case in enumerate(ELASTIC):
        model, batches = small_problem(3, [4, 5, 2], ITERATIONS, world_size)
        options = {"moving_rate": 0.9 / world_size, **case}
        losses = elastic_averaging(model, _adamw, regress, batches, steps=options.pop("local_steps"), **options)
        rtol = 0.0 if world_size == 2 and case["width"] == 1 else 1e-12
        for rank, of_rank in enumerate(outcomes):
            ours, hashes, weights = of_rank[index]
            assert ours == pytest.approx([of_ranks[rank] for of_ranks in losses], rel=rtol, abs=0.0), case
            assert_same_weights(weights, model.state_dict(), rtol=rtol)
            assert hashes == outcomes[0][index][1], "the centre is the same on all ranks after every iteration"


def _pull(ranks: Ranks) -> list[tuple[float, float]]:
    """Return this rank's weight and the centre after every iteration of a training with constant gradients."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    options = {"local_steps": 2, "outer": "elastic", "moving_rate": 0.25, "width": 1}
    with LocalSteps(model, optimizer, ranks=ranks, **sections(**options)) as strategy:
        for _ in range(6):
            (model(torch.ones(1, 1, dtype=torch.float64)).sum() * (ranks.rank + 1)).backward()
            strategy.step()
            own = model.weight.item()
            with strategy.true_weights():
                found.append((own, model.weight.item()))
        strategy.flush()
        assert model.weight.item() == found[-1][1], "a flush leaves the centre, and nothing was left to exchange"
        strategy.step()  # without a gradient
        assert model.weight.item() == found[-1][1], "the next window begins at the centre"
    return found


@pytest.mark.slow
def test_ranks_keep_their_own_weights_and_the_elastic_force_adds_up_to_zero() -> None:
    """All of these numbers are exact in binary."""
    one, other = run_ranks(2, _pull)
    for done, ((x, centre), (y, same)) in enumerate(zip(one, other, strict=True), 1):
        assert centre == same
        assert x != y
        assert x + y + centre == -3.0 * done
    assert one[1] == (-1.5, -1.5), "-2 + (0 - -2) / 4, and (-2 + -4) / 4"


def _overflow_once(ranks: Ranks, width: int) -> list[tuple[Any, ...]]:
    """Train elastically, where rank 1's weights overflow in iteration 1; return what was reported, and all centres."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"local_steps": 1, "outer": "elastic", "width": width, "on_nonfinite": "skip"}
    found: list[tuple[Any, ...]] = []
    with LocalSteps(model, optimizer, ranks=ranks, **sections(**options)) as strategy:
        for iteration in range(6):
            optimizer.param_groups[0]["lr"] = 1e38 if (ranks.rank, iteration) == (1, 1) else 0.01
            (model(torch.ones(1, 2)).sum() * 10.0).backward()
            report = strategy.step()
            with strategy.true_weights():
                found.append((report.applied, report.skipped, report.nonfinite_ranks, weights_sha256(model)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_a_rank_whose_weights_overflow_begins_at_the_centre_again(width: int) -> None:
    one, other = run_ranks(2, _overflow_once, width)
    assert one == other
    arrived = [(applied, skipped, ranks) for applied, skipped, ranks, _ in one[width - 1 :]]
    assert arrived == [((), (1,), (1,)) if i == 1 else ((i,), (), ()) for i in range(7 - width)]


def _average_states(ranks: Ranks, kinds: dict[str, Any], steps: int) -> list[Outcome]:
    """Train with averaged state and each optimizer of ``kinds``."""
    options = {"local_steps": steps, "width": 1, "average_state": True}
    return [_train_one(ranks, options, make) for make in kinds.values()]


OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_averages_of_weights_and_state_are_their_recursion_bit_for_bit(steps: int) -> None:
    outcomes = run_ranks(2, _average_states, OPTIMIZERS, steps)
    for index, make_optimizer in enumerate(OPTIMIZERS.values()):
        model, batches = small_problem(3, [4, 5, 2], ITERATIONS, 2)
        losses = local_steps(model, make_optimizer, regress, batches, steps=steps, width=1, average_state=True)
        for rank, of_rank in enumerate(outcomes):
            ours, hashes, weights = of_rank[index]
            assert ours == [of_ranks[rank] for of_ranks in losses]
            assert_same_weights(weights, model.state_dict(), rtol=0.0)
            assert hashes == outcomes[0][index][1]


def _states_with_gaps(ranks: Ranks, make: Any, steps: int) -> list[list[dict[str, Any]]]:
    """Train with averaged state, where rank 1 has a NaN first, or no gradient of the last layer until iteration 2."""
    found = []
    for gap in ("nan", "unused"):
        model, batches = small_problem(3, [4, 5, 2], 4, ranks.world_size)
        optimizer = make(model.parameters())
        options = {"local_steps": steps, "width": 1, "average_state": True, "on_nonfinite": "skip", "timeout": 10.0}
        with LocalSteps(model, optimizer, ranks=ranks, **sections(**options)) as strategy:
            for iteration, of_ranks in enumerate(batches):
                loss = regress(model, of_ranks[ranks.rank])
                if ranks.rank == 1 and iteration < 2:
                    loss = loss * float("nan") if gap == "nan" else model[0](of_ranks[1][0]).sum()
                loss.backward()
                assert (strategy.step().gradient_norm is None) == ((iteration + 1) % steps != 0)
        found.append([dict(optimizer.state[parameter]) for parameter in model.parameters()])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("make", "steps"), [(_sgd, 1), (_adamw, 2)])
def test_ranks_average_the_state_of_parameters_that_one_has_not_stepped_with(make: Any, steps: int) -> None:
    for one, other in zip(*run_ranks(2, _states_with_gaps, make, steps), strict=True):
        for state, same in zip(one, other, strict=True):
            for name, value in state.items():
                if value.dim() > 0:
                    assert value.isfinite().all()
                    assert torch.equal(value, same[name]), name


def _overflowing_state(ranks: Ranks) -> tuple[str, bool, str]:
    """Average the state of optimizers, of which rank 1's overflows in iteration 1, although its update is finite.

    Return the error, whether this rank's state is finite, and a hash of the weights.
    """
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = _adamw(model.parameters())
    strategy = LocalSteps(model, optimizer, Windows(local_steps=1, average_state=True), width=1, ranks=ranks)
    said = ""
    for iteration in range(3):
        (model(torch.ones(1, 2)).sum() * (1e25 if (ranks.rank, iteration) == (1, 1) else 1.0)).backward()
        try:
            strategy.step()
        except RunError as error:
            said = str(error)
            break
    strategy.close()
    finite = all(bool(value.isfinite().all()) for of in optimizer.state.values() for value in of.values())
    return said, finite, weights_sha256(model)


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_refused_by_all_ranks_and_reaches_no_other() -> None:
    """Its mean, an infinite second moment, used to end the training of all ranks without a word."""
    one, other = run_ranks(2, _overflowing_state)
    message = "averaged states of optimizers must be finite; got a NaN or an infinity from rank 1, after iteration 1: "
    assert one[0] == other[0]
    assert one[0].startswith(message)
    assert (one[1], other[1]) == (True, False)
    assert one[2] == other[2]


def test_an_optimizer_without_state_to_average_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UserInputError, match="an optimizer that has no such state as momentum; got SGD"):
        LocalSteps(model, torch.optim.SGD(model.parameters()), Windows(local_steps=2, average_state=True), width=1)


class OneOfAKind(torch.optim.SGD):
    """An optimizer that cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("one of a kind")


def test_an_optimizer_that_cannot_be_copied_has_no_state_to_average() -> None:
    """It was told that prediction must be none, an option that local steps refuse."""
    model = nn.Linear(2, 1)
    with pytest.raises(UserInputError) as refused:
        LocalSteps(model, OneOfAKind(model.parameters()), Windows(local_steps=2, average_state=True), width=1)
    assert str(refused.value) == (
        "average-state must be left out with an optimizer that a copy cannot try; got OneOfAKind: one of a kind"
    )


def _awagd(ranks: Ranks, lr: float) -> list[tuple[Outcome, list[float]]]:
    """Train by averages of weights, and by those of weights and momentum; return this rank's momentum, too."""
    results = []
    for average_state in (False, True):
        kept: list[torch.optim.Optimizer] = []

        def make(parameters: Any, kept: list[torch.optim.Optimizer] = kept) -> torch.optim.Optimizer:
            kept.append(torch.optim.SGD(parameters, lr=lr, momentum=0.9))
            return kept[0]

        outcome = _train_one(ranks, {"local_steps": 1, "width": 1, "average_state": average_state}, make)
        results.append((outcome, [state["momentum_buffer"].sum().item() for state in kept[0].state.values()]))
    return results


@pytest.mark.slow
def test_awagd_at_k_times_the_learning_rate_is_subgd() -> None:
    """Theano-MPI's rule: averages of weights, with or without momentum, need k times the rate of sums of updates."""
    ranks, lr, momentum = 3, 0.02, 0.9
    outcomes = run_ranks(ranks, _awagd, ranks * lr)
    model, batches = small_problem(3, [4, 5, 2], ITERATIONS, ranks)
    parameters = list(model.parameters())
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    for of_ranks in batches:
        gradients = [torch.autograd.grad(regress(model, batch), parameters) for batch in of_ranks]
        with torch.no_grad():
            for v, w, *parts in zip(velocities, parameters, *gradients, strict=True):
                v.mul_(momentum).add_(sum(parts))
                w.sub_(v, alpha=lr)
    for of_rank in outcomes:
        for (_, hashes, weights), _ in of_rank:
            assert len(hashes) == ITERATIONS + 1
            assert_same_weights(weights, model.state_dict(), rtol=1e-12)
    own, averaged = ([of_rank[index][1] for of_rank in outcomes] for index in (0, 1))
    assert own[0] != own[1], "each rank's momentum is its own, unless it is averaged"
    assert averaged[0] == averaged[1] == averaged[2]


def _train_synchronously(ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    results = []
    for kind, options in ((LocalSteps, {"windows": Windows()}), (Pipelined, {})):
        model, batches = small_problem(3, [4, 5, 2], 30, ranks.world_size)
        model.float()
        with kind(model, _sgd(model.parameters()), width=1, ranks=ranks, **options) as strategy:
            for of_ranks in batches:
                inputs, targets = of_ranks[ranks.rank]
                regress(model, (inputs.float(), targets.float())).backward()
                strategy.step()
        results.append(model.state_dict())
    return results[0], results[1]


@pytest.mark.slow
def test_one_local_step_with_sgd_is_synchronous_training() -> None:
    """SGD is linear in the gradient, momentum and weight decay included; the means differ in float32 rounding only."""
    for local, synchronous in run_ranks(4, _train_synchronously):
        assert_same_weights(local, synchronous, rtol=1e-5)


def test_one_rank_trains_at_any_width_as_at_width_1_bit_for_bit() -> None:
    """A rank's own movement is the mean, so nothing is lost by its arriving late."""
    weights = []
    cosines = []
    for width in (1, 2, 3):
        model, batches = small_problem(3, [4, 5, 2], ITERATIONS, 1)
        with LocalSteps(
            model, _adamw(model.parameters()), Windows(local_steps=3, outer_lr=1.0), width=width
        ) as strategy:
            for of_ranks in batches:
                regress(model, of_ranks[0]).backward()
                compared = strategy.step().comparison
                cosines += [] if compared is None else [compared.cosine]
        weights.append(weights_sha256(model))
    assert len(set(weights)) == 1
    assert cosines == [1.0] * (3 + 2 + 1), "at width 1, too: it is the drift between ranks"


def _expect(ranks: Ranks) -> tuple[float, float]:
    """Train with gradients 1 and -3 at width 2; return this rank's weight and the true one after two iterations."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with LocalSteps(model, optimizer, Windows(local_steps=1, outer_lr=1.0), ranks=ranks) as strategy:
        for _ in range(2):
            (model(torch.ones(1, 1, dtype=torch.float64)).sum() * (1.0, -3.0)[ranks.rank]).backward()
            strategy.step()
        own = model.weight.item()
        with strategy.true_weights():
            return own, model.weight.item()


@pytest.mark.slow
def test_a_movement_against_the_mean_predicts_nothing() -> None:
    """The cosine of -1 used to count as 1, so that rank 0 expected its own movement in full: a weight of 0."""
    assert run_ranks(2, _expect) == [(1.0, 1.0), (4.0, 1.0)]


def _reports(ranks: Ranks) -> list[tuple[Any, ...]]:
    model, batches = small_problem(3, [40, 50, 20], 8, ranks.world_size)
    model.float()
    found = []
    with LocalSteps(model, _sgd(model.parameters()), Windows(local_steps=3), codec="int4", ranks=ranks) as strategy:
        for of_ranks in batches:
            inputs, targets = of_ranks[ranks.rank]
            regress(model, (inputs.float(), targets.float())).backward()
            report = strategy.step()
            drift = None if report.comparison is None else report.comparison.relative_error
            found.append((report.applied, report.wire_bytes, drift, report.seconds("communication") > 0))
        found.append((strategy.flush().applied, weights_sha256(model)))
    return found


@pytest.mark.slow
def test_a_report_has_the_bytes_the_drift_and_the_communication_of_windows() -> None:
    outcomes = run_ranks(2, _reports)
    for found in outcomes:
        assert [applied for applied, *_ in found] == [(), (), (), (), (), (2,), (), (), (5, 7)]
        sent = [nbytes for _, nbytes, *_ in found[:-1]]
        assert [nbytes > 0 for nbytes in sent] == [False, False, True, False, False, True, False, False]
        values = 40 * 50 + 50 + 50 * 20 + 20
        assert sent[2] < values * 0.6, "about half a byte a value, for twice half of the values"
        drifts = [drift for *_, drift, _ in found[:-1]]
        assert [drift is not None for drift in drifts] == [index == 5 for index in range(8)]
        assert drifts[5] > 0
        assert [communicated for *_, communicated in found[:-1]] == [index == 5 for index in range(8)]
        assert found[-1] == outcomes[0][-1]


def _resume(ranks: Ranks, options: dict[str, Any], at: int) -> tuple[str, str, bool]:
    def build() -> tuple[nn.Module, Any, Any, LocalSteps]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return model, optimizer, schedule, LocalSteps(model, optimizer, ranks=ranks, **sections(**options))

    def run(parts: tuple[nn.Module, Any, Any, LocalSteps], first: int, last: int) -> None:
        model, _, schedule, strategy = parts
        for iteration in range(first, last):
            generator = torch.Generator().manual_seed(100 * iteration + ranks.rank)
            model(torch.randn(3, 4, generator=generator)).square().sum().backward()
            strategy.step()
            schedule.step()

    one, other = build(), build()
    run(one, 0, at)
    with one[3].true_weights():
        shared = copy.deepcopy([part.state_dict() for part in one[:3]])
    for state in shared[1]["state"].values():  # another rank's optimizer, as in a checkpoint for all
        state["exp_avg"] += ranks.rank
    own = copy.deepcopy(one[3].state_dict())
    run(one, at, 12)
    one[3].flush()

    run(other, 0, 5)  # something else is under way when the state is loaded
    for part, state in zip(other, (*shared, own), strict=True):
        part.load_state_dict(state)
    assert other[3].iteration == at
    run(other, at, 12)
    other[3].flush()
    for parts in (one, other):
        parts[3].close()
    same_inner = repr(one[1].state_dict()) == repr(other[1].state_dict())
    return weights_sha256(one[0]), weights_sha256(other[0]), same_inner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"local_steps": 4, "width": 1}, 6),
        ({"local_steps": 4, "width": 2}, 4),
        ({"local_steps": 4, "width": 2, "codec": "int4"}, 7),
        ({"local_steps": 2, "width": 2, "outer": "nesterov"}, 7),
        ({"local_steps": 2, "width": 2, "fragments": 3, "codec": "int4"}, 9),
        ({"local_steps": 2, "width": 2, "fragments": 3, "codec": codec_named("powersgd", low_rank=1)}, 9),
        ({"local_steps": 2, "width": 1, "fragments": 4}, 6),
        ({"local_steps": 4, "width": 1, "outer": "elastic"}, 6),
        ({"local_steps": 2, "width": 1, "average_state": True}, 6),
        ({"local_steps": 4, "width": 2, "outer": "elastic", "codec": "int8"}, 8),
    ],
)
def test_a_state_dict_continues_bit_for_bit_in_the_middle_of_a_window(options: dict[str, Any], at: int) -> None:
    results = run_ranks(2, _resume, options, at)
    for uninterrupted, resumed, same_inner in results:
        assert resumed == uninterrupted == results[0][0]
        assert same_inner, "each rank's optimizer continues with its own state, not with what was saved for all"


def test_a_checkpoint_has_the_state_of_the_optimizer_once_and_by_rank() -> None:
    model, batches = small_problem(3, [4, 5, 2], 3, 1)
    optimizer = _adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with LocalSteps(model, optimizer, Windows(local_steps=2), width=1) as strategy:
        state = RunState(
            model=model, optimizer=optimizer, schedule=schedule, strategy=strategy, losses=collections.deque()
        )
        for of_ranks in batches:
            regress(model, of_ranks[0]).backward()
            strategy.step()
        shared, own = copy.deepcopy(state.snapshot(1.0))
        assert shared["optimizer"]["state"] == {}
        before = repr(optimizer.state_dict())
        strategy.step()
        assert state.what_is_wrong_with(shared, own) is None
        state.restore(shared, own)
        assert repr(optimizer.state_dict()) == before


def test_a_state_dict_is_a_copy_and_can_be_loaded_again_and_again() -> None:
    model = nn.Linear(2, 1)
    with LocalSteps(model, _adamw(model.parameters()), Windows(local_steps=2, outer="nesterov"), width=1) as strategy:

        def train() -> None:
            for _ in range(3):
                model(torch.ones(4, 2)).sum().backward()
                strategy.step()

        train()
        state = strategy.state_dict()
        seen = [repr((state["optimizer"], state["outer"]))]
        for _ in range(2):
            train()
            seen.append(repr((state["optimizer"], state["outer"])))
            strategy.load_state_dict(state)
        assert seen == [seen[0]] * 3


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"fragments": 2}, "fragments must be 2, as in the state that is loaded; got 1"),
        ({"outer": "nesterov"}, "outer must be nesterov, as in the state that is loaded; got average"),
        ({"outer_lr": 0.5}, "outer-lr must be 0.5, as in the state that is loaded; got 0.8"),
        ({"codec": "int8"}, "codec must be int8 in blocks of 1024, as in the state that is loaded; got fp32"),
    ],
)
def test_a_state_of_another_exchange_is_refused_and_nothing_is_lost(options: dict[str, Any], refusal: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = _adamw(model.parameters())
    with LocalSteps(model, optimizer, **sections(local_steps=2, **options)) as strategy:
        state = strategy.state_dict()
    with LocalSteps(model, optimizer, Windows(local_steps=2)) as strategy:
        model(torch.ones(4, 2)).sum().backward()
        strategy.step()
        before = repr(optimizer.state_dict())
        with pytest.raises(UserInputError, match=re.escape(refusal)):
            strategy.load_state_dict(state)
        assert repr(optimizer.state_dict()) == before


EVALUATED: list[dict[str, Any]] = [
    *({"outer_lr": 1.0, "width": width} for width in (1, 2)),
    *({"outer": "elastic", "width": width} for width in (1, 2)),
]
"""Runs of windows of 4 iterations whose model is evaluated in each of them."""

Shown = list[tuple[int, dict[str, Tensor]]]
"""Weights that an evaluation or a saved model has, each with the number of iterations before it."""


def _weights_now(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _evaluate_now_and_then(ranks: Ranks, options: dict[str, Any], evaluates: bool) -> tuple[str, Shown]:
    """Return a hash of the weights at the end, and all that were shown."""
    model, batches = small_problem(3, [4, 5, 2], ITERATIONS, ranks.world_size)
    shown: Shown = []
    with LocalSteps(model, _adamw(model.parameters()), ranks=ranks, **sections(local_steps=4, **options)) as strategy:
        for number, of_ranks in enumerate(batches):
            regress(model, of_ranks[ranks.rank]).backward()
            if evaluates:
                with strategy.true_weights():
                    shown.append((number, _weights_now(model)))
                model.eval()
                with torch.no_grad():
                    model(torch.ones(1, 4, dtype=torch.float64))
                model(torch.ones(1, 4, dtype=torch.float64))
                shown.append((number, _weights_now(model)))
                strategy.step()
                model.train()
                shown.append((number + 1, copy.deepcopy(model.state_dict())))
            else:
                strategy.step()
    return weights_sha256(model), shown


def _evaluate_all(ranks: Ranks) -> list[tuple[str, str, Shown]]:
    """Return for each case the hash without evaluations, that with them, and what they have shown."""
    return [
        (_evaluate_now_and_then(ranks, options, False)[0], *_evaluate_now_and_then(ranks, options, True))
        for options in EVALUATED
    ]


def _outer_weights(options: dict[str, Any], windows: int) -> dict[str, Tensor]:
    """Return the reference's outer weights, or centre, after this many windows of two ranks.

    These are what it ends with after those windows that have arrived by then: at width 2, all but the last one.
    """
    width = options["width"]
    model, batches = small_problem(3, [4, 5, 2], ITERATIONS, 2)
    arrived = batches[: 4 * max(0, windows - (width - 1))]
    if arrived and "outer" in options:
        elastic_averaging(model, _adamw, regress, arrived, steps=4, width=width, moving_rate=0.9 / 2)
    elif arrived:
        local_steps(model, _adamw, regress, arrived, steps=4, width=width)
    return model.state_dict()


@pytest.mark.slow
def test_an_evaluation_in_a_window_has_the_outer_weights_and_changes_nothing() -> None:
    outcomes = run_ranks(2, _evaluate_all)
    for index, options in enumerate(EVALUATED):
        expected = [_outer_weights(options, windows) for windows in range(ITERATIONS // 4 + 1)]
        rtol = 1e-12 if options == {"outer": "elastic", "width": 2} else 0.0  # sums are rounded in another order
        for plain, evaluated, shown in (of_rank[index] for of_rank in outcomes):
            assert evaluated == plain, options
            assert len(shown) == 3 * ITERATIONS
            for number, weights in shown:
                assert_same_weights(weights, expected[number // 4], rtol=rtol)
            for (_, weights), (_, on_rank_0) in zip(shown, outcomes[0][index][2], strict=True):
                assert_same_weights(weights, on_rank_0, rtol=0.0)


def test_weights_loaded_in_a_window_begin_it_again() -> None:
    model, batches = small_problem(3, [4, 5, 2], 4, 1)
    loaded = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    with LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), Windows(local_steps=4), width=1) as strategy:
        for of_ranks in batches[:2]:
            regress(model, of_ranks[0]).backward()
            strategy.step()
        model.load_state_dict(loaded)
        assert strategy.flush().applied == (1,)
        assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items()), "no movement yet"
        regress(model, batches[2][0]).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        strategy.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, loaded[name] - 0.1 * gradients[name])


def test_gradients_that_have_not_been_stepped_with_survive_a_flush() -> None:
    model, batches = small_problem(3, [4, 5, 2], 2, 1)
    with LocalSteps(model, _sgd(model.parameters()), Windows(local_steps=4)) as strategy:
        regress(model, batches[0][0]).backward()
        strategy.step()
        regress(model, batches[1][0]).backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        strategy.flush()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_clipping_and_the_loss_scale_act_on_this_ranks_own_gradient() -> None:
    model = nn.Linear(2, 1, bias=False)
    start = model.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with LocalSteps(
        model, optimizer, Windows(local_steps=2), width=1, scaler=scaler, updates=Updates(clip_norm=0.5)
    ) as strategy:
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(model(torch.tensor([[3.0, 4.0]])).sum() * factor).backward()
            report = strategy.step()
            assert report.skipped == ((1,) if factor == float("inf") else ())
            assert report.nonfinite_ranks == ((0,) if factor == float("inf") else ())
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(start - model.weight.detach(), 2 * 0.5 * torch.tensor([[0.6, 0.8]]))


def test_a_report_names_a_rank_of_a_group_by_its_number_in_the_job() -> None:
    model = nn.Linear(2, 1)
    ranks = Ranks(rank=0, world_size=1, store=dist.HashStore(), numbers=(5,))
    options: dict[str, Any] = {"local_steps": 2, "width": 1, "on_nonfinite": "skip", "ranks": ranks}
    with LocalSteps(model, _sgd(model.parameters()), **sections(**options)) as strategy:
        (model(torch.ones(1, 2)).sum() * float("inf")).backward()
        assert strategy.step().nonfinite_ranks == (5,)


def test_a_sparse_gradient_that_is_not_finite_is_skipped() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSteps(
        model, optimizer, Windows(local_steps=2), width=1, updates=Updates(on_nonfinite="skip")
    ) as strategy:
        skipped = []
        for factor in (float("inf"), 1.0):
            (factor * model(torch.tensor([1])).sum()).backward()
            skipped.append(strategy.step().skipped)
        assert skipped == [(0,), ()]
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def _one_rank_fails(ranks: Ranks) -> tuple[str, str, bool]:
    model, batches = small_problem(3, [4, 5, 2], 6, ranks.world_size)
    strategy = LocalSteps(model, _sgd(model.parameters()), Windows(local_steps=4), width=1, ranks=ranks)
    before = weights_sha256(model)
    error = ""
    try:
        for number, of_ranks in enumerate(batches):
            scale = float("nan") if ranks.rank == 1 and number == 2 else 1.0
            (scale * regress(model, of_ranks[ranks.rank])).backward()
            strategy.step()
    except Exception as failure:  # noqa: BLE001 (the kind is what is tested)
        error = f"{type(failure).__name__}: {failure}"
    with pytest.warns(RuntimeWarning, match="closed after an error") as warned:
        strategy.close()
    return error, str(warned[0].message), weights_sha256(model) == before


@pytest.mark.slow
def test_a_rank_that_fails_in_a_window_ends_all_and_says_what_is_dropped() -> None:
    (other, said_0, true_0), (own, said_1, true_1) = run_ranks(2, _one_rank_fails, timeout=5.0)
    assert own == (
        "NonFiniteGradientError: this rank's own gradient of iteration 2 holds a NaN or an infinity: look at the data "
        "there, lower --lr, or leave such gradients out with --on-nonfinite skip"
    )
    assert other != ""
    assert "this rank's movements since the last exchange of each parameter are dropped (local steps: 2)" in said_1
    assert "gradients in flight are dropped (iterations 3)" in said_0
    assert true_0
    assert true_1


@pytest.mark.parametrize(
    ("options", "iterations", "dropped"),
    [
        ({"fragments": 2}, 2, 2),
        ({"fragments": 2}, 4, 2),
        ({"fragments": 2}, 5, 3),
        ({"fragments": 2}, 0, 0),
        ({}, 2, 0),
        ({}, 3, 1),
        ({"outer": "elastic"}, 2, 0),
        ({"outer": "elastic"}, 3, 1),
    ],
)
def test_a_failed_close_counts_the_local_steps_since_the_oldest_exchange(
    options: dict[str, Any], iterations: int, dropped: int
) -> None:
    """Right after an exchange, movements of all other fragments used to be dropped without a word."""
    model = nn.Linear(2, 1)
    strategy = LocalSteps(model, _sgd(model.parameters()), width=1, **sections(local_steps=2, **options))

    def iterate(factor: float = 1.0) -> None:
        (factor * model(torch.ones(4, 2)).sum()).backward()
        strategy.step()

    for _ in range(iterations):
        iterate()
    with pytest.raises(NonFiniteGradientError):
        iterate(float("nan"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        strategy.close()
    assert [f"(local steps: {dropped})" in str(one.message) for one in warned] == [True] * (dropped > 0)


@pytest.mark.parametrize("call", ["step", "flush"])
def test_a_movement_that_an_interruption_keeps_from_leaving_is_no_gradient_of_the_next_step(call: str) -> None:
    model = nn.Linear(2, 1)
    with LocalSteps(model, _sgd(model.parameters()), Windows(local_steps=2), width=1) as strategy:

        def step() -> None:
            model(torch.ones(4, 2)).sum().backward()
            strategy.step()

        saved = copy.deepcopy((model.state_dict(), strategy.state_dict()))
        step()
        if call == "step":
            model(torch.ones(4, 2)).sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(strategy.pipeline.flight, "depart", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                getattr(strategy, call)()
        number = 1 if call == "step" else 0
        with pytest.raises(RunError, match=f"the movement that ends with iteration {number} was interrupted halfway"):
            step()
        for part, state in zip((model, strategy), saved, strict=True):
            part.load_state_dict(state)
        assert all(parameter.grad is None for parameter in model.parameters())
        step()
        assert strategy.flush().applied == (0,)


def _interrupt(*_: object, **options: object) -> None:
    raise KeyboardInterrupt


def _flush_in_parts(ranks: Ranks, options: dict[str, Any], iterations: int, waits: int) -> list[tuple[bool, str]]:
    """Train once for each of this many waits of a flush, in which rank 0 is interrupted, and once without.

    Return whether it was interrupted, and the weights, together with the optimizer's state if that is averaged.
    """
    found = []
    for last in range(waits + 1):
        model, batches = small_problem(3, [4, 5, 2], iterations, ranks.world_size)
        optimizer = _sgd(model.parameters())
        with LocalSteps(model, optimizer, ranks=ranks, **sections(local_steps=2, timeout=5.0, **options)) as strategy:
            for of_ranks in batches:
                regress(model, of_ranks[ranks.rank]).backward()
                strategy.step()
            interrupted = False
            with pytest.MonkeyPatch.context() as patch:
                if ranks.rank == 0:
                    flight = strategy.pipeline.flight
                    outcomes = [flight.next_mean] * last + [_interrupt]
                    patch.setattr(flight, "next_mean", lambda outcomes=outcomes: outcomes.pop(0)())
                try:
                    strategy.flush()
                except KeyboardInterrupt:
                    interrupted = True
            if interrupted:
                strategy.flush()
        averaged = [of["momentum_buffer"] for of in optimizer.state.values()] if "average_state" in options else []
        found.append((interrupted, weights_sha256(nn.ParameterList([*model.parameters(), *averaged]))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "iterations", "waits"),
    [
        ({}, 5, 2),
        ({}, 6, 1),
        ({"fragments": 3}, 5, 4),
        ({"fragments": 3}, 6, 3),
        ({"outer": "elastic"}, 5, 2),
        ({"average_state": True, "width": 1}, 5, 1),
    ],
)
def test_a_flush_that_was_interrupted_is_resumed(options: dict[str, Any], iterations: int, waits: int) -> None:
    """Rank 0 used to begin again, while the other one had exchanged all fragments, and to leave averages out."""
    one, other = run_ranks(2, _flush_in_parts, options, iterations, waits)
    assert [interrupted for interrupted, _ in one] == [True] * waits + [False]
    assert {weights for _, weights in one} == {weights for _, weights in other}
    assert len({weights for _, weights in one}) == 1


def _average_late(ranks: Ranks, then: str) -> list[float]:
    """Interrupt rank 0 while it waits for the mean of a window; return the momentum after one more step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options: dict[str, Any] = {"local_steps": 2, "width": 1, "average_state": True, "timeout": 5.0}
    with LocalSteps(model, optimizer, ranks=ranks, **sections(**options)) as strategy:

        def step(gradient: float) -> None:
            (gradient * model(torch.ones(1, 2)).sum()).backward()
            strategy.step()

        step(1.0 + ranks.rank)
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 0:
                patch.setattr(strategy.pipeline.flight, "next_mean", _interrupt)
            with pytest.raises(KeyboardInterrupt) if ranks.rank == 0 else contextlib.nullcontext():
                step(1.0 + ranks.rank)
        if then == "load" and ranks.rank == 0:
            strategy.load_state_dict(strategy.state_dict())
        step(1.0)
        momentum = [of["momentum_buffer"].flatten()[0].item() for of in optimizer.state.values()]
        strategy.flush()
    return momentum


@pytest.mark.slow
@pytest.mark.parametrize("then", ["step", "load"])
def test_averages_that_an_interruption_left_out_are_taken_before_the_next_step(then: str) -> None:
    """Rank 0 used to keep its own momentum, while the other one waited for it."""
    for momentum in run_ranks(2, _average_late, then):
        assert momentum == pytest.approx([0.9 * 1.9 * 1.5 + 1] * 2)


def _differ(ranks: Ranks) -> str:
    model = nn.Linear(2, 1)
    try:
        LocalSteps(model, _sgd(model.parameters()), Windows(local_steps=2 + ranks.rank), ranks=ranks)
    except DisagreementError as failure:
        return str(failure)
    return ""


@pytest.mark.slow
def test_windows_of_different_lengths_are_named() -> None:
    for line in run_ranks(2, _differ):
        assert "local_steps" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_steps": 0}, "local-steps must be at least 1; got 0"),
        ({"outer": "elastics"}, "outer must be one of average, nesterov, elastic; got 'elastics'"),
        ({"outer": "elastic", "moving_rate": 0.0}, "moving-rate must be above 0; got 0"),
        ({"outer": "elastic", "moving_rate": 1.5}, "moving-rate must be at most 1; got 1.5"),
        ({"average_state": True}, "width must be 1 with --average-state, whose averages are never late; got 2"),
        ({"outer": "elastic", "codec": "topk"}, "codec must keep no residual with --outer elastic, .*; got topk"),
        (
            {"prediction": "local"},
            "prediction must be left out with local steps, since .* its own movement; got 'local'",
        ),
        ({"outer_lr": 0.0}, "outer-lr must be above 0; got 0"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "outer-momentum must be below 1; got 1"),
        ({"width": 0}, "width must be at least 1; got 0"),
        ({"clip_norm": -1.0}, "clip-norm must be above 0; got -1"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UserInputError, match=message):
        LocalSteps(model, _sgd(model.parameters()), **sections(**{"local_steps": 2} | arguments))


def test_a_moving_rate_must_leave_the_centre_on_its_way() -> None:
    config = TrainConfig(windows=Windows(outer="elastic", moving_rate=0.25))
    assert config.workers(4) == 4
    with pytest.raises(UserInputError, match="at most 1/5 with 5 ranks, whose mean the centre would move beyond; got"):
        config.workers(5)


def _frozen_in_a_window(ranks: Ranks, frozen: bool) -> str:
    model, batches = small_problem(3, [4, 5, 2], 3, ranks.world_size)
    with LocalSteps(model, _sgd(model.parameters()), Windows(local_steps=4), width=1, ranks=ranks) as strategy:
        for of_ranks in batches:
            regress(model, of_ranks[ranks.rank]).backward()
            strategy.step()
        for parameter in [*model.parameters()][: 2 * frozen]:
            parameter.requires_grad_(False)
    return weights_sha256(model)


@pytest.mark.slow
def test_a_window_ends_with_all_parameters_although_some_were_frozen_in_it() -> None:
    """Frozen parameters kept each rank's own weights, and the others got rank 0's and the mean movement in addition."""
    assert len({*run_ranks(2, _frozen_in_a_window, True), *run_ranks(2, _frozen_in_a_window, False)}) == 1


@pytest.mark.parametrize("outer", ["average", "elastic"])
def test_parameters_that_share_memory_are_refused(outer: str) -> None:
    """Ranks' own weights have storage of their own, in which such parameters would be two."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UserInputError, match="parameters must not share memory with local steps"):
        LocalSteps(model, _sgd(model.parameters()), Windows(local_steps=2, outer=outer), width=1)


def test_parameters_that_are_frozen_later_are_refused() -> None:
    model = nn.Linear(2, 1)
    with LocalSteps(model, _sgd(model.parameters()), Windows(local_steps=2), width=1) as strategy:
        model.bias.requires_grad_(False)
        with pytest.raises(UserInputError, match="must not be frozen, unfrozen or added while local steps"):
            strategy.step()
        model.bias.requires_grad_(True)
