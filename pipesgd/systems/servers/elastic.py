"""Asynchronous elastic averaging: workers train weights of their own, and pull a centre on servers and are pulled."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from pipesgd.errors import NonFiniteGradientError
from pipesgd.flat_buffer import FlatBuffer, all_finite
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.step import SynchronousUpdate
from pipesgd.pipeline_config import ServerPlacement
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT, Windows, moving_rate_for
from pipesgd.strategy import Span, StepReport
from pipesgd.systems.servers.messages import Request, RequestMessage
from pipesgd.systems.servers.strategy import Answers, ParameterServers
from pipesgd.systems.servers.update_rule import ElasticRule, ShardLayout, UpdateRule


class ElasticServers(ParameterServers):
    """Asynchronous EASGD (Zhang, Choromanska and LeCun, NeurIPS 2015, algorithm 1) with a centre on parameter servers.

    Every worker trains weights x of its own with its own ``optimizer``. The servers own the centre, which is what is
    evaluated and saved as the result. Each ``step`` of iteration t is

    1. update: the optimizer steps on this worker's own gradient;
    2. wait: if x was sent after iteration t-1, until every server has answered with the elastic difference
       ``d = moving_rate (x - centre)`` of its range, which it has added to the centre; d is subtracted from x;
    3. send: after every ``local_steps``-th iteration, x goes to the servers.

    The servers answer while the worker computes the gradient of its next iteration, at the x that was sent, as in the
    paper. Workers wait for no other worker, and their learning-rate schedules count their own iterations.

    Args:
        model, optimizer: as in ``ParameterServers``; the state of the optimizer is each worker's own.
        local_steps: iterations between two exchanges of a worker, the paper's communication period.
        moving_rate: share of its way to the centre by which a worker is pulled, and of its way to this worker by which
            the centre is; by default 0.9 divided by the number of workers.
        clip: clipping of a worker's own gradient; None clips nothing.
        scaler: loss scaler for float16; each worker's scale is its own.
        on_nonfinite: "stop" or "skip", for a worker's own gradients.
        servers, placement, timeout, ranks: as in ``ParameterServers``.

    Raises:
        UserInputError: a value out of range, or an optimizer without a parameter to train.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> servers = ElasticServers(model, torch.optim.SGD(model.parameters(), lr=0.1), local_steps=2)
        >>> for _ in range(4):
        ...     model(torch.ones(4, 2)).sum().backward()
        ...     report = servers.step()
        >>> report.applied, servers.flush().applied
        ((3,), ())
        >>> servers.close()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        local_steps: int = 1,
        moving_rate: float | None = None,
        clip: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: str = "stop",
        servers: int = 1,
        placement: ServerPlacement = "colocated",
        timeout: float = DEFAULT_TIMEOUT,
        ranks: Ranks | None = None,
    ):
        Windows(local_steps=local_steps, moving_rate=moving_rate)  # checks the values
        self._local_steps = local_steps
        self._moving_rate = moving_rate
        self._own_update = SynchronousUpdate(optimizer, clip=clip, scaler=scaler, on_nonfinite=on_nonfinite)
        self._asked: Future[tuple[Answers, float]] | None = None
        """The exchange whose answer has not been subtracted yet."""
        self._asked_at, self._asked_after = 0.0, 0
        """Time when the last exchange began, and number of iterations before it."""
        self._difference = FlatBuffer([])
        super().__init__(
            model,
            optimizer,
            servers=servers,
            placement=placement,
            on_nonfinite=on_nonfinite,
            timeout=timeout,
            ranks=ranks,
        )

    def step(self) -> StepReport:
        """Apply this worker's gradients to its weights, and exchange these with the servers; see the class.

        Raises:
            CommunicationError: a rank was lost, or silent for longer than the timeout.
            NonFiniteGradientError: the gradients, or the weights after them, hold a NaN or an infinity.
        """
        assert self._workers.rank < self._workers.world_size, "a rank that is a server alone calls serve"
        self._own_update.check_parameters("elastic averaging")
        self._workers.iteration = iteration = self.iteration
        report = self._own_update.apply(iteration)
        self.iteration += 1
        report = dataclasses.replace(report, spans=report.spans + self._subtract_answer())
        if self.iteration % self._local_steps == 0:
            report = dataclasses.replace(report, wire_bytes=self._send())
        return report

    def flush(self) -> StepReport:
        """Exchange what was trained since the last exchange, and give all workers the centre, when all are here.

        Collective. Further steps may follow, and begin at the centre.
        """
        wire_bytes = self._send() if self.iteration > self._asked_after else 0
        spans = self._subtract_answer()
        with self._at_rest():
            self._pull()
        return StepReport(spans=spans, wire_bytes=wire_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's progress, an answer that has not been subtracted, and the servers' state. Collective."""
        state = super().state_dict()
        if self._asked is not None:
            self._answers_of(self._asked)
        return state | {
            "asked_after": self._asked_after,
            "difference": None if self._asked is None else [flat.clone() for flat in self._difference.flats],
            "loss_scale": self._own_update.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``. Collective."""
        super().load_state_dict(state)
        self._asked, self._asked_after = None, state["asked_after"]
        if state["difference"] is not None:
            self._make_room()
            torch._foreach_copy_(self._difference.flats, state["difference"])
            self._asked, self._asked_at = Future(), time.perf_counter()
            self._asked.set_result(([], self._asked_at))
        self._own_update.loss_scale.load_state_dict(state["loss_scale"])

    def _drop_answer(self) -> None:
        self._asked, self._asked_after = None, self.iteration

    def _make_rule(self, layout: ShardLayout) -> UpdateRule:
        rate = moving_rate_for(self._moving_rate, self._workers.world_size)
        return ElasticRule(self._parameters, layout, rate)

    def _make_room(self) -> None:
        """Make room for differences, which only a worker needs."""
        if not self._difference.flats:
            self._difference = FlatBuffer(self._parameters)

    def _send(self) -> int:
        """Begin to exchange this worker's weights for the difference; return the number of bytes that go out."""
        self._gradient.fill_from(self._values)
        if not all_finite(self._gradient):
            raise NonFiniteGradientError(self.iteration - 1, own=True)
        self._make_room()
        self._asked_at, self._asked_after = time.perf_counter(), self.iteration
        push = RequestMessage(Request.PUSH)
        self._asked = self._begin_to_ask(push, values=self._gradient, into=self._difference)
        return sum(server.wire_bytes for server in self._servers)

    def _subtract_answer(self) -> tuple[Span, ...]:
        """Wait for the difference that was asked for, if any, and subtract it; return how long that took."""
        if self._asked is None:
            return ()
        begin = time.perf_counter()
        _, arrived = self._answers_of(self._asked)
        end = time.perf_counter()
        self._asked = None
        torch._foreach_sub_(self._values, self._difference.views)
        iteration = self._asked_after - 1
        return (
            Span("communication", iteration, self._asked_at, arrived),
            Span("wait", iteration, begin, end),
        )
