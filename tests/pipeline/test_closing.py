"""The end of a pipeline: nothing is lost, nothing is left behind, and nothing hangs."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _sections import sections
from torch import nn

from pipesgd import Pipelined
from pipesgd.comm.thread import CLOSE_SECONDS
from pipesgd.errors import NonFiniteGradientError, RunError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Updates

pytestmark = pytest.mark.slow


def _make(ranks: Ranks, **options: Any) -> tuple[nn.Module, Pipelined]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, **sections(**options))


def _backward(model: nn.Module, ranks: Ranks, iteration: int) -> None:
    generator = torch.Generator().manual_seed(100 * iteration + ranks.rank)
    model(torch.randn(5, 4, generator=generator)).square().mean().backward()


def _end_in_different_ways(ranks: Ranks) -> dict[str, str]:
    hashes = {}
    for way in ("flush", "close", "with", "error"):
        model, pipeline = _make(ranks, width=3)
        try:
            with pipeline:
                for iteration in range(4):
                    _backward(model, ranks, iteration)
                    pipeline.step()
                if way == "error":
                    with pipeline.true_weights():
                        hashes["true weights"] = weights_sha256(model)
                    raise KeyError("the user's own")
                if way != "with":
                    getattr(pipeline, way)()
        except KeyError:
            pass
        pipeline.close()  # closing again is harmless
        hashes[way] = weights_sha256(model)
    return hashes


def test_closing_applies_what_is_in_flight_and_leaves_true_weights_after_an_error() -> None:
    """An error used to leave predicted weights, which differ by rank, and to drop the gradients silently."""
    results = run_ranks(2, _end_in_different_ways)
    assert results[0] == results[1]
    hashes = results[0]
    assert hashes["close"] == hashes["with"] == hashes["flush"]
    assert hashes["error"] == hashes["true weights"] != hashes["flush"]


def test_what_is_dropped_after_an_error_is_said() -> None:
    model = nn.Linear(1, 1)
    pipeline = Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), width=3)
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        pipeline.step()
    pipeline.fail(OSError("rank 1 has failed"))
    with pytest.warns(RuntimeWarning, match=r"gradients in flight are dropped \(iterations 0, 1\)"):
        pipeline.close()


def test_a_closed_pipeline_refuses_every_call_at_once() -> None:
    model = nn.Linear(1, 1)
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1)) as pipeline:
        state = pipeline.state_dict()
    model(torch.ones(1, 1)).sum().backward()
    for call in (
        pipeline.step,
        pipeline.flush,
        pipeline.combine_buffers,
        pipeline.state_dict,
        lambda: pipeline.load_state_dict(state),
    ):
        with pytest.raises(UserInputError, match=r"must not be used after close\(\)"):
            call()
    assert model.weight.grad is not None, "nothing was taken away"


def _open_now() -> list[int]:
    return [sum(1 for _ in Path("/proc/self", kind).iterdir()) for kind in ("fd", "task")]


def _construct(ranks: Ranks, times: int, connections: int) -> tuple[list[int], list[int]]:
    for number in range(times):
        model, pipeline = _make(ranks, connections=connections)
        with pipeline:
            _backward(model, ranks, 0)
            pipeline.step()
        if number == 0:
            first = _open_now()
    deadline = time.monotonic() + 10.0
    while (last := _open_now()) > first and time.monotonic() < deadline:  # a thread that has ended may still be listed
        time.sleep(0.01)
    return first, last


@pytest.mark.parametrize("connections", [1, 2])  # over tcp and gloo
def test_twenty_pipelines_leave_no_file_descriptor_and_no_thread_behind(connections: int) -> None:
    for first, last in run_ranks(2, _construct, 20, connections):
        assert last <= first


def _fail_to_construct(ranks: Ranks, where: str) -> tuple[list[int], list[int], bool]:
    """Fail five times in the constructor of a pipeline.

    Return what is open after the first time and after the last one, and whether the model has no hooks left.
    """

    def refused(*_: object, **__: object) -> None:
        ranks.all_gather_object("connections", None)  # else one rank closes them while the other still connects
        raise UserInputError("refused")

    for number in range(5):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, refused)
            with pytest.raises(UserInputError, match="refused"):
                Pipelined(model, optimizer, ranks=ranks)
        if number == 0:
            first = _open_now()
    deadline = time.monotonic() + 10.0
    while (last := _open_now()) > first and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    hooks = [hook for part in model.modules() for hook in (*part._forward_pre_hooks, *part._forward_hooks)]
    return first, last, not hooks


@pytest.mark.parametrize(
    "where",
    [
        "pipesgd.pipeline.pipeline.share_rank_0s_state",
        "pipesgd.pipeline.flight.make_reducer",
        "pipesgd.pipeline.pipeline.drop_gradients",
    ],
)
def test_a_pipeline_that_cannot_be_made_leaves_no_file_descriptor_thread_or_hook_behind(where: str) -> None:
    for first, last, unhooked in run_ranks(2, _fail_to_construct, where):
        assert last <= first
        assert unhooked


def _interrupted(ranks: Ranks, interrupt: bool) -> tuple[list[tuple[int, ...]], Any, int, str]:
    """Send rank 0 a signal while it waits for gradient 2, which rank 1 provides only after that."""
    model, pipeline = _make(ranks, width=2, prediction="none")
    applied, saved = [], None

    def on_signal(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, on_signal)
    waiting = threading.Event()

    def send_signal() -> None:
        waiting.wait(20)
        time.sleep(0.2)  # so that rank 0 is waiting; if it is not yet, it is interrupted all the same
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send_signal)
    if interrupt and ranks.rank == 0:
        sender.start()
    for iteration in range(5):
        if interrupt and ranks.rank == 1 and iteration == 2:
            ranks.all_gather_object("rank 0 was interrupted", None)
        _backward(model, ranks, iteration)
        if interrupt and ranks.rank == 0 and iteration == 3:
            try:
                waiting.set()
                pipeline.step()
            except KeyboardInterrupt:
                sender.join()
                ranks.all_gather_object("rank 0 was interrupted", None)
                state = pipeline.state_dict()
                saved = state["iteration"], [gradient["iteration"] for gradient in state["in_flight"]]
        else:
            applied.append(pipeline.step().applied)
    applied.append(pipeline.flush().applied)
    pipeline.close()
    return applied, saved, pipeline.buffers_allocated, weights_sha256(model)


def test_an_interrupted_wait_loses_no_gradient() -> None:
    """Gradient 2 used to be in no state, and was never applied on rank 0."""
    (applied, saved, buffers, weights), (others_applied, *_, others_weights) = run_ranks(2, _interrupted, True)
    assert saved == (4, [2, 3])
    assert [iteration for of_call in applied for iteration in of_call] == [0, 1, 2, 3, 4]
    assert others_applied == [(), (0,), (1,), (2,), (3,), (4,)]
    assert weights == others_weights
    assert buffers <= 3


def test_an_update_that_is_interrupted_halfway_is_built_upon_by_nobody() -> None:
    class Interrupted(torch.optim.SGD):
        interrupt = False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            if self.interrupt:
                raise KeyboardInterrupt

    model = nn.Linear(1, 1)
    optimizer = Interrupted(model.parameters(), lr=0.1)
    pipeline = Pipelined(model, optimizer, width=2, updates=Updates(prediction="none"))
    state = pipeline.state_dict()
    for iteration in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.interrupt = iteration == 1
        if iteration == 0:
            pipeline.step()
        else:
            with pytest.raises(KeyboardInterrupt):
                pipeline.step()
    for call in (pipeline.step, pipeline.flush, pipeline.state_dict):
        with pytest.raises(RunError, match="the update of iteration 0 was interrupted halfway"):
            call()
    pipeline.load_state_dict(state)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    optimizer.interrupt = False
    pipeline.step()
    pipeline.close()


def test_a_gradient_that_is_not_finite_gives_its_buffer_back() -> None:
    model = nn.Linear(1, 1)
    pipeline = Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=0.1), width=2, updates=Updates(prediction="none")
    )
    failures = 0
    for iteration in range(12):
        (model(torch.ones(1, 1)).sum() * (float("nan") if iteration % 2 else 1.0)).backward()
        try:
            pipeline.step()
        except NonFiniteGradientError:
            failures += 1
    assert failures == 5
    assert pipeline.buffers_allocated == 2
    with pytest.raises(NonFiniteGradientError):
        pipeline.close()
    pipeline.close()


def test_weights_that_changed_in_true_weights_are_not_replaced_by_stale_predictions() -> None:
    """A step that kept no gradient used to leave the previous prediction in the parameters."""
    model = nn.Linear(1, 1)
    pipeline = Pipelined(
        model, torch.optim.SGD(model.parameters(), lr=0.1), width=2, updates=Updates(on_nonfinite="skip")
    )
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        pipeline.step()
    with pipeline.true_weights():
        (model(torch.ones(1, 1)).sum() * float("nan")).backward()
        pipeline.step()
        true = weights_sha256(model)
    assert weights_sha256(model) == true, "the only gradient in flight is not finite: nothing to predict with"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.close()


def _close_at_different_times(ranks: Ranks) -> list[str]:
    model, pipeline = _make(ranks)
    _backward(model, ranks, 0)
    pipeline.step()
    pipeline.flush()
    if ranks.rank == 0:
        time.sleep(CLOSE_SECONDS + 0.5)  # longer than a failing rank waits for its own thread
    pipeline.close()
    return [thread.name for thread in threading.enumerate()]


def test_close_waits_for_a_rank_that_closes_later() -> None:
    """The closing rank's thread used to be in gloo's barrier still when the script ended, which aborts the process."""
    for names in run_ranks(2, _close_at_different_times):
        assert "pipesgd-communication" not in names


def _flush_interrupted(ranks: Ranks, then: str) -> str:
    model, pipeline = _make(ranks, width=2, timeout=5.0)
    weights, state = copy.deepcopy(model.state_dict()), pipeline.state_dict()

    def load() -> None:
        model.load_state_dict(weights)
        pipeline.load_state_dict(state)

    def step(iteration: int) -> None:
        _backward(model, ranks, iteration)
        pipeline.step()

    def interrupted() -> None:
        raise KeyboardInterrupt

    step(0)
    if ranks.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline.pipeline, "apply_oldest", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pipeline.flush()
    else:
        pipeline.flush()
    {"step": lambda: step(1), "load": load, "sum": pipeline.combine_buffers}[then]()
    pipeline.flush()
    step(2)
    pipeline.close()
    return weights_sha256(model)


@pytest.mark.parametrize("then", ["step", "load", "sum"])
def test_a_flush_that_is_interrupted_and_not_repeated_is_over(then: str) -> None:
    """The next flush used to resume the interrupted one's meeting, while the other ranks were at another one."""
    weights, others = run_ranks(2, _flush_interrupted, then)
    assert weights == others


def test_an_interrupted_prediction_leaves_true_weights_and_no_gradient() -> None:
    """Its guess used to stay in ``.grad``, to which the next backward pass added; the predicted weights stayed too."""
    model = nn.Linear(1, 1)
    pipeline = Pipelined(model, torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9), width=2)
    true = weights_sha256(model)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    model(torch.ones(1, 1)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipesgd.pipeline.prediction.OptimizerCopy.step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.step()
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    assert weights_sha256(model) == true
    with pytest.warns(RuntimeWarning, match=r"gradients in flight are dropped \(iterations 0\)"):
        pipeline.close()
    assert weights_sha256(model) == true
