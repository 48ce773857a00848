"""Averages of the state of the ranks' optimizers whenever their weights are averaged: AWAGD of Theano-MPI."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pipesgd.errors import RunError, UserInputError, named
from pipesgd.flat_buffer import are_finite
from pipesgd.optim.optimizer_copy import state_of_a_zero_gradient
from pipesgd.pipeline.pipeline import Pipeline
from pipesgd.pipeline.sameness import describe_parameters
from pipesgd.replicas import nonfinite_ranks
from pipesgd.strategy import Span, StepReport


class AverageState:
    """Means of the tensors in an optimizer's state that are shaped like their parameters.

    Args:
        optimizer: the optimizer of this rank's own local steps.
        parameters: the parameters that it trains.

    Raises:
        UserInputError: there is no such tensor, or the optimizer cannot be copied to see what a step makes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]):
        self._optimizer = optimizer
        self._averaged = _tensors_of_state(optimizer, parameters)
        self.due = False
        """True from the exchange of a window until the state that belongs to it is averaged."""

    def names(self, model: torch.nn.Module) -> list[str]:
        """Return what is averaged in words, the same on all ranks."""
        described = describe_parameters(model, [parameter for parameter, _ in self._averaged])
        return [f"{name} of {of}" for of, (_, name) in zip(described, self._averaged, strict=True)]

    def average(self, pipeline: Pipeline) -> StepReport:
        """Give all ranks the mean of the state, if it is due: after an interruption, later. Collective.

        A parameter that this rank has not stepped with yet gets the state that a step with a gradient of zero makes.

        Raises:
            RunError: the mean is not finite, on every rank alike. Each rank keeps its own state.
        """
        if not self.due:
            return StepReport()
        iteration, begin = pipeline.iteration - 1, time.perf_counter()
        state = self._optimizer.state
        new = list({id(of): of for of, name in self._averaged if state.get(of, {}).get(name) is None}.values())
        with pipeline.whole(f"the averages that end with iteration {iteration}"):
            self.due = False
            if new:
                state.update(zip(new, state_of_a_zero_gradient(self._optimizer, new), strict=True))
            averaged = [state[of][name] for of, name in self._averaged]
            nbytes, finite = pipeline.average(averaged)
            culprits = [] if finite else nonfinite_ranks(pipeline.flight.ranks, "states", are_finite(averaged))
        if not finite:
            got = f"a NaN or an infinity from {named(culprits)}" if culprits else "finite ones, whose sum overflows"
            raise RunError(
                f"averaged states of optimizers must be finite; got {got}, after iteration {iteration}: lower --lr, or "
                "use --clip-norm"
            )
        end = time.perf_counter()
        spans = (Span("communication", iteration, begin, end), Span("wait", iteration, begin, end))
        return StepReport(spans=spans, wire_bytes=nbytes)


def _tensors_of_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[tuple[Tensor, str]]:
    """Return parameter and name of each tensor that is shaped like its parameter in the state after a first step.

    Raises:
        UserInputError: there is none, or the optimizer cannot be copied to see what a step makes.
    """
    kind = type(optimizer).__name__
    try:
        states = state_of_a_zero_gradient(optimizer, parameters)
    except Exception as failure:  # an optimizer of the user's own may raise anything
        raise UserInputError(
            f"average-state must be left out with an optimizer that a copy cannot try; got {kind}: "
            f"{failure.__cause__ or failure}"
        ) from failure
    found = [
        (parameter, name)
        for parameter, state in zip(parameters, states, strict=True)
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == parameter.dtype
    ]
    if not found:
        raise UserInputError(
            f"average-state must be left out with an optimizer that has no such state as momentum; got {kind}"
        )
    return found
