"""A pipeline is synchronous while the learning rate rises at its start, and what it was where the rate does not."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from pipesgd import Pipelined, Updates, Wire
from pipesgd.ddp import attach
from pipesgd.errors import OutOfStepError
from pipesgd.optim.build import scale_rates
from pipesgd.pipeline.width import ARRIVED, make_width
from pipesgd.ranks import Ranks

TOTAL = 20
Rates = Callable[[torch.optim.Optimizer], Callable[[int], None]]
"""Function that is called with an optimizer, and returns one that sets the rates of the next iteration."""


def _by_torch(make: Callable[[torch.optim.Optimizer], Any], *metrics: float) -> Rates:
    def begin(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        schedule = make(optimizer)
        return lambda iteration: schedule.step(*metrics)

    return begin


def _by_hand(rates: Sequence[float]) -> Rates:
    def begin(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        def set_rate(iteration: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = rates[min(iteration, len(rates) - 1)]

        set_rate(0)
        return set_rate

    return begin


def _once_in(iterations: int, begin: Rates) -> Rates:
    def slower(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        step = begin(optimizer)
        return lambda iteration: step(iteration // iterations) if iteration % iterations == 0 else None

    return slower


def _warm_up(optimizer: torch.optim.Optimizer) -> SequentialLR:
    rise = LinearLR(optimizer, start_factor=0.1, total_iters=6)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, T_max=TOTAL - 6)], milestones=[6])


def _one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=TOTAL, cycle_momentum=False)


RISE = [0.02, 0.04, 0.06, 0.08, 0.1, 0.1]
SCHEDULES: dict[str, tuple[Rates, list[int]]] = {
    "one cycle": (_by_torch(_one_cycle), [0, 1, 2, 3]),  # its rate is at 0.86 of the maximum in iteration 4
    "warm-up of a model of language": (
        _by_torch(lambda optimizer: _language_warm_up(optimizer)),
        [0, 1, 2, 3, 4, 5],
    ),
    "warm-up and cosine": (_by_torch(_warm_up), [0, 1, 2, 3, 4, 5, 6]),
    "cycles": (
        _by_torch(lambda optimizer: CyclicLR(optimizer, base_lr=0.02, max_lr=0.1, step_size_up=3)),
        [1, 2, 3],
    ),
    "plateau": (_by_torch(lambda optimizer: ReduceLROnPlateau(optimizer, patience=1), 1.0), []),
    "cosine": (_by_torch(lambda optimizer: CosineAnnealingLR(optimizer, T_max=TOTAL)), []),
    "lower at first": (_by_torch(lambda optimizer: ConstantLR(optimizer, factor=0.5, total_iters=3)), [0]),
    "constant": (_by_hand([0.1]), []),
    "set by hand": (_by_hand(RISE), [1, 2, 3, 4]),
    "rises again": (_by_hand([*RISE, 0.05, 0.1, 0.2]), [1, 2, 3, 4]),
    "rises late": (_by_hand([0.1, 0.1, *RISE]), []),
    "rises once in two iterations": (_once_in(2, _by_hand(RISE)), []),
}


def _rising_groups(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """Let one group's rate rise at first and the other one's fall, as with layers that are unfrozen."""
    first, second = optimizer.param_groups

    def set_rates(iteration: int) -> None:
        first["lr"], second["lr"] = 0.1 / (1 + iteration), 0.01 * min(iteration + 1, 3)

    set_rates(0)
    return set_rates


def _synchronous(optimizer: torch.optim.Optimizer, rates: Rates, *, reload_in: int | None = None) -> list[int]:
    step, width, found = rates(optimizer), make_width(2), []
    for iteration in range(TOTAL - 1):
        if width.of(iteration, optimizer.param_groups) == 1:
            found.append(iteration)
        if iteration == reload_in:
            state = json.loads(json.dumps(width.state_dict()))
            width = make_width(2)
            width.load_state_dict(state)
        optimizer.step()
        step(iteration + 1)
    return found


def _language_warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, step / 5))


def _sgd(*lrs: float) -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.1,)]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("reload_in", [None, 0, 1, 2, 10])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")
def test_the_start_lasts_while_the_rate_rises(name: str, reload_in: int | None) -> None:
    rates, expected = SCHEDULES[name]
    assert _synchronous(_sgd(), rates, reload_in=reload_in) == expected


def test_a_known_maximum_ends_the_start_before_it_is_reached() -> None:
    optimizer = _sgd()
    schedule = _one_cycle(optimizer)
    shares = []
    for _ in range(5):
        shares.append(schedule.get_last_lr()[0] / 0.1)
        optimizer.step()
        schedule.step()
    assert shares[3] < ARRIVED <= shares[4] < 1.0


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("skipped", [[0], [2], [0, 1], [1, 2, 4]])
def test_a_rate_that_waits_for_an_update_that_was_left_out_does_not_end_the_start(
    skipped: list[int], guard: bool
) -> None:
    """Accelerate, the Trainer and loops with a GradScaler let the schedule stand still then."""
    optimizer = _sgd()
    width, schedule, found = make_width(2, guard=guard), _language_warm_up(optimizer), []
    for iteration in range(TOTAL - 1):
        found.append(width.of(iteration, optimizer.param_groups))
        if iteration in skipped:
            width.note_skip()
            state = json.loads(json.dumps(width.state_dict()))
            width = make_width(2, guard=guard)
            width.load_state_dict(state)
        else:
            optimizer.step()
            schedule.step()
    late = SCHEDULES["warm-up of a model of language"][1][-1] + len(skipped) + 1
    assert found == [1] * late + [2] * (TOTAL - 1 - late)


@pytest.mark.parametrize("factor", [0.1, 3.0])
def test_rates_for_another_number_of_ranks_do_not_end_the_start(factor: float) -> None:
    optimizer, width, found = _sgd(), make_width(2), []
    schedule = _one_cycle(optimizer)
    for iteration in range(TOTAL - 1):
        if iteration == 2:
            scale_rates(optimizer, schedule, factor)
        if width.of(iteration, optimizer.param_groups) == 1:
            found.append(iteration)
        optimizer.step()
        schedule.step()
    assert found == SCHEDULES["one cycle"][1]


def test_any_group_that_rises_keeps_the_start_going() -> None:
    assert _synchronous(_sgd(0.1, 0.1), _rising_groups) == [1, 2]


def test_an_optimizer_without_a_rate_has_no_start() -> None:
    width = make_width(2)
    assert [width.of(iteration, [{"params": []}]) for iteration in range(3)] == [2, 2, 2]


def test_a_number_counts_whatever_the_rate_does_and_none_is_synchronous_with_zero() -> None:
    for start, expected in ((3, [1, 1, 1, 2, 2]), (0, [2] * 5)):
        width, optimizer = make_width(2, start), _sgd()
        found = []
        for iteration, rate in enumerate((0.1, 0.2, 0.3, 0.4, 0.5)):
            optimizer.param_groups[0]["lr"] = rate
            found.append(width.of(iteration, optimizer.param_groups))
        assert found == expected


def test_the_guard_and_the_start_go_together_and_are_loaded_together() -> None:
    width, optimizer = make_width(2, guard=True), _sgd()
    for iteration, rate in enumerate((0.1, 0.2, 0.3)):
        optimizer.param_groups[0]["lr"] = rate
        synchronous = width.of(iteration, optimizer.param_groups)
        width.observe(1.0, iteration)
    assert synchronous == 1
    other = make_width(2, guard=True)
    other.load_state_dict(width.state_dict())
    assert other.state_dict() == width.state_dict()
    optimizer.param_groups[0]["lr"] = 0.4
    assert other.of(3, optimizer.param_groups) == 1


# ---- Real ranks

SIDE, ROWS = 6, 4


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIDE, 8), nn.Tanh(), nn.Linear(8, 3))


def _batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(ROWS, SIDE, generator=generator), torch.randint(3, (ROWS,), generator=generator))
        for _ in range(TOTAL - 1)
    ]


def _by_pipelined(ranks: Ranks, name: str, interrupted: int | None = None, **options: Any) -> tuple[list[Any], Any]:
    """Train with a schedule of this name; return the reports, and the weights.

    The pipeline is made again after the iteration ``interrupted``, and continues from its state.
    """
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = SCHEDULES[name][0](optimizer)
    make = functools.partial(Pipelined, model, optimizer, ranks=ranks, **options)
    pipeline, reports = make(), []
    for iteration, (inputs, targets) in enumerate(_batches(ranks.rank)):
        cross_entropy(model(inputs), targets).backward()
        reports.append(pipeline.step())
        step(iteration + 1)
        if iteration == interrupted:
            state, weights = pipeline.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            moments = optimizer.state_dict()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of gradients in flight that are dropped
                pipeline.__exit__(RuntimeError, RuntimeError("interrupted"), None)
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            pipeline = make(init_sync=False)
            pipeline.load_state_dict(state)
    last = pipeline.flush().applied
    pipeline.close()
    applied = [report.applied for report in reports]
    return [[report.width for report in reports], [*applied, last]], _flat(model)


def _by_attached(ranks: Ranks, name: str, **options: Any) -> tuple[list[Any], Any]:
    model = _model()
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = SCHEDULES[name][0](optimizer)
    pipeline, reports = attach(ddp_model, optimizer, codec="fp32", **options), []
    for iteration, (inputs, targets) in enumerate(_batches(ranks.rank)):
        optimizer.zero_grad()
        cross_entropy(ddp_model(inputs), targets).backward()
        optimizer.step()
        reports.append(pipeline.report)  # type: ignore[union-attr]
        step(iteration + 1)
    last = pipeline.flush().applied
    pipeline.close()
    applied = [report.applied for report in reports]
    return [[report.width for report in reports], [*applied, last]], _flat(model)


def _with_skipped_updates(ranks: Ranks, *, by_attach: bool) -> list[int]:
    """Train with a warm-up that stands still where the scaler leaves an update out; return the widths of all steps."""
    model, scaler = _model(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule, widths = _language_warm_up(optimizer), []
    trained = DistributedDataParallel(model) if by_attach else model
    if by_attach:
        pipeline: Any = attach(trained, optimizer, codec="fp32", width=2, scaler=scaler)
    else:
        pipeline = Pipelined(model, optimizer, ranks=ranks, scaler=scaler, updates=Updates(on_nonfinite="skip"))
    for iteration, (inputs, targets) in enumerate(_batches(ranks.rank)):
        before = scaler.get_scale()
        loss = scaler.scale(cross_entropy(trained(inputs), targets))
        (loss * (math.inf if iteration in (0, 2) else 1.0)).backward()
        if by_attach:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            pipeline.step()
        widths.append(pipeline.pipeline.width_now)
        if scaler.get_scale() >= before:
            schedule.step()
    pipeline.close()
    return widths


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()]).tolist()


def _applied(synchronous: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Return the iterations that each step applies, and the flush at the end."""
    done, found = 0, []
    for iteration in range(TOTAL - 1):
        due = iteration + 1 - (0 if iteration in synchronous else width - 1)
        found.append(tuple(range(done, due)))
        done = max(done, due)
    return [*found, tuple(range(done, TOTAL - 1))]


OPTIONS: dict[str, dict[str, Any]] = {
    "width 2": {},
    "width 3, int4 in buckets": {"width": 3, "codec": "int4", "wire": Wire(buckets=2)},
    "guarded": {"updates": Updates(guard=True)},
}


INTERRUPTED = [("one cycle", 0), ("one cycle", 5), ("set by hand", 0), ("set by hand", 1), ("set by hand", 2)]
"""Schedules, and the iteration after which a pipeline ends and another one continues from its state."""
ATTACHED = [("one cycle", 2), ("set by hand", 2), ("set by hand", 3), ("constant", 2)]
"""Schedules and widths of a loop with DistributedDataParallel."""


def _all_doors(ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (of, options) in itertools.product(("one cycle", "set by hand", "constant"), OPTIONS.items()):
        found[f"{name}, {of}"] = _by_pipelined(ranks, name, **options)
    for name, interrupted in INTERRUPTED:
        found[f"{name}, interrupted in {interrupted}"] = _by_pipelined(ranks, name, interrupted)
    for name, width in ATTACHED:
        found[f"attached, {name}, width {width}"] = _by_attached(ranks, name, width=width)
    found["set by hand, width 3"] = _by_pipelined(ranks, "set by hand", width=3)
    found["without"] = _by_pipelined(ranks, "constant", updates=Updates(synchronous_start=0))
    for by_attach in (False, True):
        found[f"skipped, {by_attach}"] = _with_skipped_updates(ranks, by_attach=by_attach)
    found["numbered"] = _by_pipelined(ranks, "one cycle", updates=Updates(synchronous_start=4))
    return found


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, _all_doors)


@pytest.mark.slow
@pytest.mark.parametrize("of", OPTIONS)
@pytest.mark.parametrize("name", ["one cycle", "set by hand", "constant"])
def test_ranks_apply_at_once_what_is_handed_over_in_the_start(
    on_ranks: list[dict[str, Any]], name: str, of: str
) -> None:
    width, synchronous = OPTIONS[of].get("width", 2), SCHEDULES[name][1]
    widths = [1 if iteration in synchronous else width for iteration in range(TOTAL - 1)]
    for found in on_ranks:
        assert found[f"{name}, {of}"][0] == [widths, _applied(synchronous, width)]
        assert found[f"{name}, {of}"] == on_ranks[0][f"{name}, {of}"], "replicas"


@pytest.mark.slow
def test_a_rate_that_does_not_rise_changes_no_bit(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        assert found["constant, width 2"] == found["without"]
        assert found["one cycle, width 2"] == found["numbered"]
        assert found["one cycle, width 2"][1] != found["constant, width 2"][1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "interrupted"), INTERRUPTED)
def test_a_start_goes_on_where_a_state_is_loaded(on_ranks: list[dict[str, Any]], name: str, interrupted: int) -> None:
    for found in on_ranks:
        assert found[f"{name}, interrupted in {interrupted}"] == found[f"{name}, width 2"]


@pytest.mark.slow
@pytest.mark.parametrize("by_attach", [False, True])
def test_a_scaler_that_leaves_out_updates_does_not_end_the_start(
    on_ranks: list[dict[str, Any]], by_attach: bool
) -> None:
    late = SCHEDULES["warm-up of a model of language"][1][-1] + 3
    for found in on_ranks:
        assert found[f"skipped, {by_attach}"] == [1] * late + [2] * (TOTAL - 1 - late)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "width"), ATTACHED)
def test_the_loop_of_a_ddp_program_has_the_same_start(on_ranks: list[dict[str, Any]], name: str, width: int) -> None:
    """A loop steps with one gradient an iteration, and the pipeline with all others that are due."""
    for found in on_ranks:
        assert found[f"attached, {name}, width {width}"] == found[f"{name}, width {width}"]


def _with_rates_of_their_own(ranks: Ranks) -> str:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = Pipelined(model, optimizer, ranks=ranks)
    error = "none"
    try:
        for iteration in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + iteration * (ranks.rank == 1))
            inputs, targets = _batches(ranks.rank)[iteration]
            cross_entropy(model(inputs), targets).backward()
            pipeline.step()
    except OutOfStepError as failure:
        error = str(failure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        pipeline.__exit__(OutOfStepError, None, None)
    return error


@pytest.mark.slow
def test_ranks_whose_rates_call_for_other_widths_are_told() -> None:
    for error in run_ranks(2, _with_rates_of_their_own):
        assert "synchronous step" in error
        assert "iteration 1" in error


def _sets_rates_before_its_steps(ranks: Ranks) -> str:
    model = _model()
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = attach(ddp_model, optimizer)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for iteration, (inputs, targets) in enumerate(_batches(ranks.rank)):
            cross_entropy(ddp_model(inputs), targets).backward()
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + iteration)
            optimizer.step()
            optimizer.zero_grad()
    pipeline.close()
    return said.getvalue()


@pytest.mark.slow
def test_a_loop_that_sets_rates_too_late_to_be_seen_is_told_once() -> None:
    [said] = run_ranks(1, _sets_rates_before_its_steps)
    assert said.count("warning: learning rates must be set before backward()") == 1


def _loads_into_a_smaller_width(ranks: Ranks) -> list[tuple[int, ...]]:
    """Continue at width 2 with the three gradients in flight of width 4."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = Pipelined(model, optimizer, width=4, ranks=ranks)
    batches = _batches(ranks.rank)
    for inputs, targets in batches[:5]:
        cross_entropy(model(inputs), targets).backward()
        pipeline.step()
    state, weights = pipeline.state_dict(), model.state_dict()
    model = _model()
    model.load_state_dict(weights)
    ddp_model, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    attached, applied = attach(ddp_model, optimizer, codec="fp32", ranks=ranks, init_sync=False), []
    attached.load_state_dict(state)
    for inputs, targets in batches[5:7]:
        optimizer.zero_grad()
        cross_entropy(ddp_model(inputs), targets).backward()
        optimizer.step()
        applied.append(attached.report.applied)  # type: ignore[union-attr]
    attached.close()
    pipeline.close()
    return applied


@pytest.mark.slow
def test_more_gradients_in_flight_than_the_width_has_are_applied_when_they_are_loaded() -> None:
    assert run_ranks(2, _loads_into_a_smaller_width) == [[(2, 3, 4), (5,)]] * 2
