"""Local steps: ranks train by themselves for H iterations, and exchange what that moved their weights.

The window of H iterations takes the place of the iteration in Pipe-SGD, the movement (the weights at its start minus
those at its end) that of the gradient, and an outer optimizer that of the optimizer. The pipeline is the same.
With rank i of p, window n, outer weights w and width K:

.. math::

    \\theta_i^n &= \\text{H steps of rank i's own optimizer, from } s_i^n \\\\
    D_i^n &= s_i^n - \\theta_i^n \\\\
    w^{n+1} &= w^n - \\text{Outer}\\Big(\\frac 1 p \\sum_i D_i^{n-K+1}\\Big) \\\\
    s_i^{n+1} &= w^{n+1} - \\text{Outer}\\big(c_i^2 D_i^{n-K+2}\\big) - ... - \\text{Outer}\\big(c_i^2 D_i^{n}\\big)

At width 1 nothing is in flight when a window begins: it starts at the outer weights. With plain averaging,
Outer(D) = D, that is Local SGD (Stich, ICLR 2019), and with Nesterov momentum DiLoCo (Douillard et al., 2023). At
larger widths the movements travel while the next windows compute, and each rank expects its own movement in place of
the mean, at the share c^2 of its length; see ``OwnMovement``.

Elastic averaging (EASGD) exchanges differences from the outer weights instead, which it calls the centre, and ranks
keep their own weights; see ``pipesgd.systems.windows.elastic``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from pipesgd.checks import check_as_loaded
from pipesgd.codecs.base import OwnCodec
from pipesgd.codecs.options import CodecOptions
from pipesgd.codecs.own import codec_options
from pipesgd.comm.transport import Group
from pipesgd.errors import UserInputError, warn_of_line
from pipesgd.flat_buffer import check_shapes
from pipesgd.guests import guest
from pipesgd.nested import loadable
from pipesgd.optim.clipping import Clipping
from pipesgd.optim.step import OwnSteps, SynchronousUpdate, check_not_schedule_free, set_aside_gradients
from pipesgd.pipeline.cut import Cut
from pipesgd.pipeline.exchanges import Exchanges
from pipesgd.pipeline.on_pipeline import OnPipeline
from pipesgd.pipeline.pipeline import Pipeline
from pipesgd.pipeline.prediction import (
    Agreement,
    OwnGradients,
    share_memory,
)
from pipesgd.pipeline.sameness import check_same_settings, optimizer_settings
from pipesgd.pipeline.window import Window
from pipesgd.ranks import Ranks, given_ranks
from pipesgd.rules import GRADIENTS, OUTER, PARTS, WINDOWS, check_rules, options_of_sections
from pipesgd.sections import (
    Updates,
    Windows,
    Wire,
    check_parts,
    check_width,
)
from pipesgd.strategy import Comparison, Span, StepReport

AVERAGE_LR, LATE_AVERAGE_LR, NESTEROV_LR, NESTEROV_MOMENTUM = 1.0, 0.8, 0.7, 0.9
"""Defaults of the outer optimizer: the mean of the ranks' weights at width 1, a little less of a mean movement that is
late, which is more accurate (experiments/LOG.md), and DiLoCo's values."""


def outer_optimizer(
    parameters: Sequence[Tensor], outer: str, lr: float | None, momentum: float | None, *, width: int
) -> torch.optim.Optimizer:
    """Return the optimizer that applies mean movements at this width; None stands for the defaults.

    Elastic averaging has no default: ``lr`` is the moving rate times the number of ranks.
    """
    if outer == "nesterov":
        return torch.optim.SGD(
            parameters,
            lr=NESTEROV_LR if lr is None else lr,
            momentum=NESTEROV_MOMENTUM if momentum is None else momentum,
            nesterov=True,
        )
    default = AVERAGE_LR if width == 1 else LATE_AVERAGE_LR
    return torch.optim.SGD(parameters, lr=default if lr is None else lr)


@final
class OwnMovement(OwnGradients):
    """A prediction in which this rank's own movement takes the place of the mean, at the share c^2 of its length.

    c is the cosine between this rank's movement and the mean in the newest exchange that has arrived, 0 if it is
    negative; 1 before. With fragments it is measured on the fragment of that exchange, and used for the others, too.

    If the ranks' movements have about the same length, and what a rank's own one has in excess of what they have in
    common is independent of the others', then the mean is c times as long as a rank's own movement, and its projection
    on that is c^2 times as long: no other share of the movement is nearer to the mean. One rank, or ranks with the same
    data, have c = 1 and lose nothing by the delay. Four ranks whose movements have nothing in common have c^2 = 1/4,
    their own part of the mean.

    The comparison is kept at width 1, too, where nothing is predicted: it is how far ranks drift apart.
    """

    at_width_1 = True

    def learn(
        self, mean: Sequence[Tensor], kept: Sequence[Tensor], comparison: Comparison | None, agreement: Agreement
    ) -> None:
        if comparison is not None and comparison.cosine is not None:
            # The newest alone: where windows are few, a running mean was less accurate (experiments/LOG.md).
            agreement.cosine = comparison.cosine

    def _adapt(self, guess: list[Tensor], agreement: Agreement, *, oldest: bool) -> None:
        if agreement.cosine != 1.0:
            torch._foreach_mul_(guess, max(agreement.cosine, 0.0) ** 2)


class LocalSteps(OnPipeline):
    """Local steps: each rank trains by itself for H iterations, a window, before the ranks exchange their movements.

    A movement is how far a window has moved a rank's weights. With outer "average" this is Local SGD (Stich, ICLR
    2019), with "nesterov" DiLoCo (Douillard et al., 2023), and with "elastic" EASGD (Zhang, Choromanska and LeCun,
    NeurIPS 2015), all of them pipelined at ``width`` 2 and more. docs/semantics.md has the equations.

    ``step`` is called in every iteration, as with ``Pipelined``: it steps ``optimizer`` on this rank's own gradients,
    which are divided by the loss scale, checked and clipped before. In every H-th iteration it also exchanges the
    movement, by a pipeline of the outer weights. A window bears the number of its last iteration, for instance in
    ``StepReport.applied``.

    In the middle of a window the parameters hold this rank's own weights. The true ones, which are the same on all
    ranks, are the outer weights. The state of ``optimizer`` is each rank's own, and is sent only with
    ``average_state``; it is part of ``state_dict``, so that each rank continues with its own wherever the pipeline is
    saved.

    With elastic averaging the outer weights are the centre. Between windows, too, the parameters hold this rank's own
    weights. A flush ends that: afterwards all ranks begin at the centre. So does a rank whose weights are no longer
    finite, if such means are skipped.

    With ``fragments``, an exchange is about one of them, in turns (weight streaming, as in Caffe's pull request 1148
    and in Streaming DiLoCo). A rank's weights are a position, which is the outer weights and what is expected of
    exchanges in flight, minus the movements that were not exchanged yet: exchanges change the position, and those
    movements stay. ``flush`` exchanges every fragment that has moved since its last exchange.

    Args:
        model: the module whose parameters ``optimizer`` updates, on one device. It must not be in
            DistributedDataParallel, which exchanges gradients, too; for that there is ``pipesgd.ddp``.
        optimizer: any ``torch.optim.Optimizer``. Schedules change its learning rate in every iteration.
        windows: length of the windows and their outer optimizer (``pipesgd.Windows``): "average" or "nesterov" apply
            mean movements, and "elastic" mean differences from the centre, which moves by p times the moving rate of
            its way to the ranks' mean.

            With ``average_state`` all ranks also get the mean of the tensors in the state of their optimizers, such as
            momentum, that are shaped like their parameters and that a first step makes. A rank that has not stepped
            with a parameter yet has the state of a gradient of zero.

            ``fragments`` are parts of about equal size, those of the last layers first; at most as many as parameters,
            with "average", and not topk.
        width: windows in flight, K.
        codec: encoding of movements, as in ``Pipelined``; with "elastic", one that keeps no residual.
        wire: how movements travel (``pipesgd.Wire``), without ``buckets`` and ``reduce``.
        updates: ``clip_norm`` and ``clip_value`` are about this rank's own gradient, ``on_nonfinite`` about that and
            mean movements. A number of ``synchronous_start`` is that of the first iterations, which are exchanged one
            by one at width 1; "auto" is none. ``prediction`` and ``guard`` are left out.
        scaler: loss scaler for float16, of these local steps alone, as in ``Pipelined``; each rank's scale is its own.
        seed: seed of random numbers, as in ``Pipelined``.
        init_sync: whether all ranks get rank 0's parameters and buffers, as in ``Pipelined``.
        ranks: the ranks to work with, as in ``Pipelined``.
        process_group: the group whose ranks these are, as in ``Pipelined``.

    Raises:
        UserInputError: a value out of range, an optimizer without a parameter to train, parameters that share memory,
            or ``average_state`` with an optimizer that keeps no such state.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with LocalSteps(model, optimizer, Windows(local_steps=2), width=1) as strategy:
        ...     for _ in range(3):
        ...         model(torch.ones(4, 2)).sum().backward()
        ...         print(strategy.step().applied)
        ...     strategy.flush().applied
        ()
        (1,)
        ()
        (2,)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
        *,
        width: int = 2,
        codec: str | CodecOptions | OwnCodec = "fp32",
        wire: Wire | None = None,
        updates: Updates | None = None,
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        init_sync: bool = True,
        ranks: Ranks | None = None,
        process_group: Group | None = None,
    ):
        wire, updates = wire or Wire(), updates or Updates()
        outer, fragments = windows.outer or "average", windows.fragments
        check_width(width)
        chosen_codec = codec_options(codec)
        given = {"outer": outer, "width": width, "asked": "local steps", **chosen_codec.facts()}
        check_rules(options_of_sections(wire, updates, windows, **given), WINDOWS, GRADIENTS, PARTS, OUTER)
        check_not_schedule_free(optimizer)
        clip = Clipping(norm=updates.clip_norm, value=updates.clip_value)
        self.owns_optimizer = True
        self._optimizer = optimizer
        self._local_steps = windows.local_steps
        self._fragments = fragments
        self._start = updates.start_in_windows
        self._inner = SynchronousUpdate(optimizer, clip=clip, scaler=scaler, on_nonfinite=updates.on_nonfinite)
        check_parts(fragments, len(self._inner.parameters))
        if share_memory(self._inner.parameters):
            raise UserInputError(
                "parameters must not share memory with local steps (tie them by assigning the Parameter itself, "
                "b.weight = a.weight); got some that do"
            )
        self._averages = guest("average state")(optimizer, self._inner.parameters) if windows.average_state else None
        ranks = given_ranks(ranks, process_group, wire)
        if ranks.is_elastic:
            raise UserInputError(
                "ranks must be those of a job that needs all of them with local steps; got elastic ones"
            )
        elastic = guest("elastic")(windows.moving_rate, ranks.world_size) if outer == "elastic" else None
        lr = windows.outer_lr if elastic is None else elastic.lr
        self._outer = outer_optimizer(self._inner.parameters, outer, lr, windows.outer_momentum, width=width)
        [group] = self._outer.param_groups
        self._settings = {
            "outer": outer,
            "moving-rate": None if elastic is None else elastic.moving_rate,
            "outer-lr": group["lr"],
            "outer-momentum": group["momentum"],
        }
        """Options of the outer optimizer, which must be those of a state that is loaded."""
        own = {
            "local_steps": windows.local_steps,
            "average_state": windows.average_state,
            "clip_norm": updates.clip_norm,
            "clip_value": updates.clip_value,
        }
        names = [] if self._averages is None else self._averages.names(model)
        check_same_settings(ranks, own | optimizer_settings(optimizer), {"averaged state": names})
        wire = dataclasses.replace(wire, buckets=fragments)
        self._cut = Cut.of(model, self._outer, str(fragments), Exchanges(model, wire.reduce))
        self._turn = 0
        """Number of the fragment that is exchanged next."""
        self._inner.loss_scale.take()
        try:
            pipeline = Pipeline(
                model,
                self._outer,
                self._cut,
                width=width,
                codec=chosen_codec,
                wire=wire,
                updates=Updates(
                    prediction=OwnMovement if elastic is None else elastic.prediction,
                    synchronous_start=self._start,
                    on_nonfinite=updates.on_nonfinite,
                ),
                seed=seed,
                init_sync=init_sync,
                ranks=ranks,
            )
        except BaseException:
            self._inner.loss_scale.leave()
            raise
        super().__init__(pipeline)
        window = Window if elastic is None else elastic.window
        self.window: Window = window(self._inner.parameters, pipeline.weights)
        """The iterations of this rank since the last exchange."""
        self.own_steps = OwnSteps(optimizer)
        """Steps of ``optimizer``, which are refused to the training loop until this is removed."""
        self.own_steps.refuse_others()

    def step(self) -> StepReport:
        """Apply this rank's gradients to its own weights, and exchange the movement if the window ends.

        The report's ``applied``, ``skipped`` and ``gradient_norm`` are about movements; ``skipped`` also has this
        iteration if this rank's own gradient was not finite. ``comparison`` compares this rank's movement with the
        mean: how far ranks drift apart in a window.

        Raises:
            NonFiniteGradientError: this rank's own gradient, or a mean movement, holds a NaN or an infinity.
            UserInputError: the strategy was closed, parameters were frozen, unfrozen or added, or gradients were
                computed in evaluation mode.
            CommunicationError: a rank was lost, or silent for longer than the timeout.
            OutOfStepError: another rank is in a different call or iteration.
            RunError: the averaged state of the ranks' optimizers is not finite.
        """
        pipeline, ranks = self.pipeline, self.pipeline.flight.ranks
        with pipeline.noting():
            pipeline.check_usable()
            pipeline.check_gradients()
            late = self.prepare()
            iteration = self.iteration
            with pipeline.whole(f"the local step of iteration {iteration}"), self.own_steps.taken():
                report = self.window.step(functools.partial(self._inner.apply, iteration))
                pipeline.iteration += 1
            culprits = (ranks.number(ranks.rank),) * len(report.skipped)
            report = dataclasses.replace(report, applied=(), nonfinite_ranks=culprits)
            return self.finish(late.followed_by(report))

    def prepare(self) -> StepReport:
        """Prepare a step of this rank's own; return a report of averages that an interruption has left out."""
        self._inner.check_parameters("local steps")
        return self._average()

    def finish(self, report: StepReport) -> StepReport:
        """End the window, after an iteration of which ``report`` is, if it is long enough."""
        if self.window.steps < (1 if self.iteration <= self._start else self._local_steps):
            report = dataclasses.replace(report, width=self.pipeline.width_now)
        else:
            report = report.followed_by(self._exchange())
        self.tally.take(report)
        return report

    def flush(self) -> StepReport:
        """Exchange the window so far, if there is one, and apply all movements in flight. Collective.

        All ranks then hold the outer weights, with elastic averaging, too.

        Gradients in ``.grad`` stay there for the next step, which begins another window. A call that was interrupted
        while it waited must be repeated, and resumes.

        Raises the same errors as ``step``.
        """
        with self.pipeline.noting(), set_aside_gradients(self._optimizer):
            self.pipeline.check_usable()
            report = self._average()
            while self.window.unexchanged:  # less after a call that was interrupted
                report = report.followed_by(self._exchange())
            return report.followed_by(self.pipeline.flush())

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the state of the pipeline, of both optimizers and of the window so far, after waiting for
        movements in flight."""
        pipeline = self.pipeline.state_dict()
        return {
            "iteration": self.iteration,
            "rank": pipeline["rank"],
            "world_size": pipeline["world_size"],
            "pipeline": pipeline,
            "settings": loadable(self._settings),
            "outer": loadable(copy.deepcopy(self._outer.state_dict())),
            "optimizer": loadable(copy.deepcopy(self._optimizer.state_dict())),
            "loss_scale": self._inner.loss_scale.state_dict(),
            "window": self.window.state_dict(),
            "turn": self._turn,
            "average_due": self._averages is not None and self._averages.due,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise what ``load_state_dict`` raises before it changes anything: see there."""
        if (before := state["pipeline"]["buckets"]) != str(self._fragments):
            raise UserInputError(f"fragments must be {before}, as in the state that is loaded; got {self._fragments}")
        check_as_loaded(state["settings"], self._settings)
        for name, before, now in (
            ("optimizer", state["optimizer"], self._optimizer),
            ("outer optimizer", state["outer"], self._outer),
        ):
            saved, here = ([len(group["params"]) for group in of["param_groups"]] for of in (before, now.state_dict()))
            if saved != here:
                raise UserInputError(
                    f"groups of the {name} must have {saved} parameters, as in the state that is loaded; got {here}"
                )
        check_shapes(state["window"]["start"], self._inner.parameters)
        self.pipeline.check_state(state["pipeline"])

    def load_checked(self, state: dict[str, Any]) -> None:
        """Continue from a ``state`` that ``check_state`` has accepted."""
        # Copies: torch's optimizers continue with the very tensors that they load.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._outer.load_state_dict(copy.deepcopy(state["outer"]))
        self._inner.loss_scale.load_state_dict(state["loss_scale"])
        self.pipeline.load_checked(state["pipeline"])
        with self.pipeline.whole("the loading of a state"):
            self.window.load_state_dict(state["window"])
            self._turn = state["turn"]
        if self._averages is not None:
            self._averages.due = state["average_due"]

    def of_members(self, alike: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state with which this rank takes over from other ranks, whose mean movement it keeps.

        Raises:
            UserInputError: the outer optimizer is elastic averaging, whose ranks keep their own weights.
        """
        if self._settings["moving-rate"] is not None:
            raise UserInputError("outer must be average or nesterov where the number of ranks changes; got elastic")
        share = self.pipeline.flight.ranks.world_size / alike["world_size"]
        pipeline = self.pipeline.of_members(alike["pipeline"], [state["pipeline"] for state in taken])
        return {
            **alike,
            "rank": pipeline["rank"],
            "world_size": pipeline["world_size"],
            "pipeline": pipeline,
            "window": self.window.of_members(alike["window"], [state["window"] for state in taken], share),
        }

    def close(self) -> None:
        """Flush, and end the pipeline, as ``Pipelined.close`` does; after an error, drop what was not exchanged."""
        if self.closed:
            return
        try:
            if not self.pipeline.failed:
                self.flush()
            elif self.window.unexchanged:
                warn_of_line(
                    "the pipeline was closed after an error: this rank's movements since the last exchange of each "
                    f"parameter are dropped (local steps: {self.window.unexchanged}), and the model holds the weights "
                    "without them"
                )
        finally:
            self.own_steps.remove()
            self._inner.loss_scale.leave()
            super().close()

    def _exchange(self) -> StepReport:
        pipeline, flight = self.pipeline, self.pipeline.flight
        iteration = pipeline.iteration - 1  # a window bears the number of its last iteration
        numbers = [self._turn]
        with pipeline.whole(f"the movement that ends with iteration {iteration}"):
            begin = time.perf_counter()
            moved = self.window.end(self._cut.indices[self._turn])
            if self._averages is not None:
                self._averages.due = True
            flight.ranks.iteration = iteration
            outgoing = flight.next_outgoing(iteration)
            outgoing.buffer.fill(moved)
            outgoing.local = moved
            pack = Span("pack", iteration, begin, time.perf_counter())
            gradient = pipeline.depart(outgoing, numbers)
            self._turn = (self._turn + 1) % len(self._cut.indices)
        report = pipeline.advance(gradient, numbers, [pack]).followed_by(self._average())
        with pipeline.whole(f"the window that begins with iteration {self.iteration}"):
            self.window.begin()
        return report

    def _average(self) -> StepReport:
        """Average the state of the ranks' optimizers, if that is asked for and due: after an interruption, later."""
        if self._averages is None:
            return StepReport()
        report: StepReport = self._averages.average(self.pipeline)
        return report
