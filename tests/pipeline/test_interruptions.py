"""Interruptions at every call inside a public call: nothing is lost, nothing is applied twice, nothing is left behind.

Ctrl-C or a signal's handler may raise between any two lines. Here ``KeyboardInterrupt`` is raised as the n-th function
of pipesgd is entered in the main thread, for many n. The gradients of the small models do not depend on their weights,
so that the weights in the end tell which gradients were applied, in which order, whatever was predicted in between.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pipesgd
from pipesgd import LocalSteps, Pipelined, Updates, Windows, Wire
from pipesgd.ddp import attach
from pipesgd.errors import RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256

SOURCES = pipesgd.__file__.removesuffix("__init__.py")
ITERATIONS, AT = 6, 3
"""Number of iterations, and the one in which, or before which, a call is interrupted."""
FIRST, STRIDE = int(os.environ.get("PIPESGD_INTERRUPT", 1)), 29
"""First function at which a call is interrupted, and the distance to the next ones: PIPESGD_INTERRUPT from 1 to 29
tries all of them."""


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Do ``call``, and interrupt it as it enters its function number ``at`` of pipesgd; return whether it was.

    Generators do not count: contexts are entered and left whole.
    """
    left = at

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES) and not code.co_flags & inspect.CO_GENERATOR:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@dataclass
class Job:
    """A training of a small model by a strategy, in which one call is interrupted."""

    make: Callable[..., Any]
    """Function that makes the strategy of a model and its optimizer."""
    ranks: Ranks | None = None
    rises: float = 0.0
    """Rise of the learning rate in an iteration."""
    model: nn.Module = field(init=False)
    seen: set[str] = field(default_factory=set)
    """Ways on after an interruption that were taken."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 3), nn.Linear(40, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        others = {} if self.ranks is None else {"ranks": self.ranks}
        self.strategy = self.make(self.model, self.optimizer, **others)
        self._parts = self.model, self.optimizer, self.strategy

    def backward(self, iteration: int) -> None:
        """Compute gradients that depend on the iteration and the rank alone."""
        rank = 0 if self.ranks is None else self.ranks.rank
        generator = torch.Generator().manual_seed(10 * iteration + rank)
        batch = torch.randn(4, 40, generator=generator)
        self.optimizer.param_groups[0]["lr"] = 0.1 + self.rises * iteration
        loss: Tensor = sum((one(batch).sum() for one in self.model.children()), torch.zeros(()))
        loss.backward()

    def train(self, iterations: Iterable[int]) -> None:
        """Train for these iterations."""
        for iteration in iterations:
            self.backward(iteration)
            self.strategy.step()

    def save(self) -> list[Any]:
        """Return copies of all states."""
        with self.strategy.true_weights():
            return [copy.deepcopy(part.state_dict()) for part in self._parts]

    def load(self, saved: Sequence[Any]) -> None:
        """Let all parts continue from ``saved``."""
        for part, state in zip(self._parts, saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))

    def gradients(self) -> list[Tensor | None]:
        """Return what is in ``.grad``."""
        return [parameter.grad for parameter in self.model.parameters()]

    def halfway(self) -> bool:
        """Return whether a call is refused since another one was interrupted halfway, on any rank."""
        found = ""
        try:
            self.strategy.state_dict()
        except (RunError, UserInputError) as refused:  # the other one is that some buckets have left
            found = str(refused)
        halfway = "was interrupted halfway" in found
        return halfway if self.ranks is None else any(self.ranks.all_gather_object("halfway", halfway))

    def finish(self) -> list[Tensor]:
        """Close the strategy; return the weights."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no gradient is dropped
            self.strategy.close()
        assert self.gradients() == [None] * 4
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def _step(job: Job, at: int) -> bool:
    """Interrupt a step or the backward pass before it."""
    saved, there = job.save(), False

    def both() -> None:
        nonlocal there
        job.backward(AT)
        there = True
        job.strategy.step()

    if not interrupted(both, at):
        return False
    if job.halfway():
        job.seen.add("loaded")
        job.load(saved)
        assert job.gradients() == [None] * 4
        job.train([AT])
    elif job.strategy.iteration == AT:
        job.seen.add("repeated")
        if not there:  # torch ends a backward pass in which a hook fails, after some parameters
            job.load(saved)
            for parameter in job.model.parameters():
                parameter.grad = None
            job.backward(AT)
        job.strategy.step()
    else:
        job.seen.add("resumed")
    return True


def _flush(job: Job, at: int) -> bool:
    """Interrupt a flush while there are gradients in ``.grad``, which stay there."""
    saved = job.save()
    job.backward(AT)
    expected = [gradient.clone() for gradient in job.gradients() if gradient is not None]
    if not interrupted(job.strategy.flush, at):
        return False
    if job.halfway():
        job.seen.add("loaded")
        job.load(saved)
        assert job.gradients() == [None] * 4
        job.backward(AT)
    else:
        job.seen.add("repeated")
        job.strategy.flush()
    kept = [gradient for gradient in job.gradients() if gradient is not None]
    assert len(kept) == len(expected)
    assert all(map(torch.equal, kept, expected))
    job.strategy.step()
    return True


def _load(job: Job, at: int) -> bool:
    """Interrupt the loading of a state, which is then loaded again."""
    saved = job.save()
    job.train([AT])
    job.model.load_state_dict(saved[0])
    job.optimizer.load_state_dict(copy.deepcopy(saved[1]))
    if not interrupted(lambda: job.strategy.load_state_dict(copy.deepcopy(saved[2])), at):
        return False
    job.load(saved)
    job.train([AT])
    return True


CALLS: dict[str, Callable[[Job, int], bool]] = {"step": _step, "flush": _flush, "load": _load}


Outcome = tuple[list[Tensor], set[str]]
"""Weights after a training, and the ways on after an interruption that were taken."""


def outcome(
    make: Callable[..., Any], call: str, at: int, ranks: Ranks | None = None, rises: float = 0.0
) -> Outcome | None:
    """Return what becomes of a training in which ``call`` is interrupted; None if that enters fewer functions.

    ``at`` 0 interrupts nothing.
    """
    job = Job(make, ranks, rises)
    job.train(range(AT))
    if at == 0:
        job.train([AT])
    elif not CALLS[call](job, at):
        job.strategy.close()
        return None
    job.train(range(AT + 1, ITERATIONS))
    return job.finish(), job.seen


KINDS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "width 1": (Pipelined, {"width": 1}),
    "width 2": (Pipelined, {"width": 2}),
    "width 3, none": (Pipelined, {"width": 3, "updates": Updates(prediction="none")}),
    "buckets": (Pipelined, {"width": 2, "wire": Wire(buckets=2)}),
    "local steps": (LocalSteps, {"windows": Windows(local_steps=2), "width": 2}),
    "local steps, width 1": (LocalSteps, {"windows": Windows(local_steps=2), "width": 1}),
    "fragments": (LocalSteps, {"windows": Windows(local_steps=2, fragments=2), "width": 2}),
    "start": (Pipelined, {"width": 2}),
}
RISES = {"start": 0.1}
"""Rise of the learning rate in each iteration, by the kind that is trained with one."""


def _maker(kind: str, **others: Any) -> Callable[..., Any]:
    strategy, options = KINDS[kind]
    return lambda model, optimizer, **more: strategy(model, optimizer, **options, **others, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "call"),
    [(kind, call) for kind in KINDS for call in CALLS if (kind, call) != ("buckets", "flush")],  # which is refused
)
def test_one_rank_that_is_interrupted_anywhere_trains_as_if_it_had_not_been(kind: str, call: str) -> None:
    make = _maker(kind)
    rises = RISES.get(kind, 0.0)
    [expected, _] = outcome(make, call, 0, rises=rises)  # type: ignore[misc]
    for at in itertools.count(FIRST, STRIDE):
        found = outcome(make, call, at, rises=rises)
        if found is None:
            break
        for weights, of_expected in zip(found[0], expected, strict=True):
            _check_same(weights, of_expected, exactly=KINDS[kind][0] is Pipelined)


def _check_same(weights: Tensor, expected: Tensor, *, exactly: bool) -> None:
    """Check that weights are those expected: but for rounding, if an interruption may have made a window longer."""
    near = 0.0 if exactly else 1e-5
    torch.testing.assert_close(weights, expected, atol=near, rtol=near)


def _both(ranks: Ranks, kind: str, call: str, options: dict[str, Any]) -> list[tuple[int, str, list[str]]]:
    """Interrupt two ranks at the same places; return the hash of the weights of each training."""
    make, found = _maker(kind, **options), []
    for at in itertools.chain([0], itertools.count(FIRST, 2 * STRIDE)):
        one = outcome(make, call, at, ranks)
        if any(ranks.all_gather_object("end", one is None)):
            return found
        assert one is not None
        found.append((at, weights_sha256(nn.ParameterList(one[0])), sorted(one[1])))
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "call"), [("width 2", "step"), ("width 2", "flush"), ("buckets", "step")])
def test_two_ranks_that_are_interrupted_anywhere_lose_no_residual(kind: str, call: str) -> None:
    """int4 leaves something out of every sum, which the next gradient has in addition."""
    of_ranks = run_ranks(2, _both, kind, call, {"codec": "int4"})
    hashes = {sha256 for of_rank in of_ranks for _, sha256, _ in of_rank}
    assert len(hashes) == 1, of_ranks
    assert len(of_ranks[0]) > 2


def _close(make: Callable[..., Any], at: int) -> bool:
    """Interrupt ``close``, and close again; then nothing is left behind."""
    job = Job(make)
    job.train(range(AT))
    before = threading.active_count()
    with warnings.catch_warnings(record=True):  # that gradients are dropped
        warnings.simplefilter("always")
        found = interrupted(job.strategy.close, at)
        job.strategy.close()
    assert threading.active_count() == before - 1
    hooks = [hook for part in job.model.modules() for hook in (*part._forward_pre_hooks, *part._forward_hooks)]
    assert not hooks
    with pytest.raises(UserInputError, match=r"must not be used after close\(\)"):
        job.strategy.step()
    job.optimizer.step()  # which belongs to the loop again
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["width 1", "width 2", "local steps"])
def test_a_close_that_is_interrupted_anywhere_ends_when_it_is_repeated(kind: str) -> None:
    """A thread used to run on, and hooks to stay, after an interruption while the pipeline ended."""
    for at in itertools.count(FIRST, STRIDE):
        if not _close(_maker(kind), at):
            break


# ---- Loops with DistributedDataParallel


def _attached(ranks: Ranks, options: dict[str, Any], starts: bool) -> list[Tensor]:
    """Interrupt a step of a loop's optimizer at many places; return the weights of each training, the first without."""
    places = itertools.chain([0], itertools.count(FIRST, STRIDE))
    found: list[Tensor] = []
    while (weights := _train_attached(options, next(places), starts=starts)) is not None:
        found.append(weights)
    return found


def _train_attached(options: dict[str, Any], at: int, *, starts: bool) -> Tensor | None:
    """Return the weights after a training with an interruption; None if a step enters fewer functions.

    If it ``starts``, the rate rises from iteration 1 on, in which two gradients are due and the step is interrupted.
    """
    place = 1 if starts else AT
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 3), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    pipeline = attach(model, optimizer, **options)
    parts = model, optimizer, pipeline

    def backward(iteration: int) -> None:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * starts * iteration
        model(torch.randn(4, 40, generator=torch.Generator().manual_seed(iteration))).sum().backward()

    def step() -> None:
        try:
            optimizer.step()
        except UserInputError as refused:  # the step was done
            assert "must follow a backward pass" in str(refused)  # noqa: PT017

    for iteration in range(ITERATIONS):
        saved = [copy.deepcopy(part.state_dict()) for part in parts] if at and iteration == place else []
        backward(iteration)
        if not saved:
            optimizer.step()
        elif not interrupted(optimizer.step, at):
            pipeline.close()
            return None
        else:
            try:
                step()
            except RunError as halfway:
                assert "was interrupted halfway" in str(halfway)  # noqa: PT017
                for part, state in zip(parts, saved, strict=True):
                    part.load_state_dict(copy.deepcopy(state))
                backward(iteration)
                optimizer.step()
    pipeline.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({"width": 1}, False),
        ({"width": 2}, False),
        ({"width": 2}, True),
        ({"width": 3, "updates": Updates(prediction="none")}, False),
        ({"windows": Windows(), "width": 1}, False),
    ],
    ids=str,
)
def test_a_step_of_a_loop_with_ddp_that_is_interrupted_anywhere_is_done_once(
    options: dict[str, Any], starts: bool
) -> None:
    """An interruption between the update and its note used to let a repeated step apply it again."""
    [[expected, *found]] = run_ranks(1, _attached, options, starts)
    assert found
    for weights in found:
        _check_same(weights, expected, exactly="windows" not in options)
