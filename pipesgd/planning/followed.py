"""A plan while its run trains: which configuration's turn it is, and whether iterations take the predicted time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from pipesgd.config import TrainConfig
from pipesgd.errors import CheckpointError
from pipesgd.pipeline.divergence_guard import SYNCHRONOUS_ITERATIONS
from pipesgd.pipeline.pipelined import Pipelined
from pipesgd.planning.audition import UNTIMED, Audition
from pipesgd.planning.drift import Drift
from pipesgd.planning.plan_run import remember
from pipesgd.planning.planned import Planned, choices_of
from pipesgd.planning.swap import swap_strategy
from pipesgd.ranks import Ranks
from pipesgd.run import output
from pipesgd.run.console import say
from pipesgd.run.metrics import MetricsLines
from pipesgd.run.state import RunState
from pipesgd.strategy import StepReport


class FollowedPlan:
    """The plan of a run, if there is one, and the configuration that trains by it now.

    ``swap_to``, ``follow`` and ``restore`` are collective.

    Args:
        config: configuration of the run, in which nothing is left to be chosen.
        planned: plan of the timing model; None if it was not asked.
        ranks: ranks that train.
        console: console of rank 0.
        state: the run, whose strategy is replaced when another configuration is to train.
        make: constructs the strategy of a configuration as the successor of the given one.
    """

    def __init__(
        self,
        config: TrainConfig,
        planned: Planned | None,
        ranks: Ranks,
        console: Console,
        state: RunState,
        make: Callable[[TrainConfig, Pipelined], Pipelined],
    ):
        self.config = config
        """Configuration that trains now: that of the run, with the choices of an audition."""
        self.planned = planned
        """The plan, or what an audition has made of it; None if there is none."""
        self._run_config = config
        self._choices = choices_of(config)
        """Values of the ``AUTO_OPTIONS`` in ``config``."""
        self._ranks = ranks
        self._console = console
        self._state = state
        self._make = make
        self._seconds: dict[int, float] = {}
        """Seconds of the iterations of auditions on rank 0, with those of an earlier attempt at this run."""
        self._fallback = set(range(config.pipeline.warmup_iterations))
        """Iterations of the warm-up, and those that a guard has run at width 1, those in which the pipeline fills again
        included."""
        self._changes: float | None = None
        """Seconds that changes of the configuration have taken in the present audition; None if it began in an earlier
        attempt at this run."""
        self._drift: Drift | None = None

    def begin(self, start: int) -> None:
        """Prepare for training from iteration ``start`` on."""
        if self.planned is None or self._ranks.rank > 0:
            return
        self._drift = Drift(self.planned)
        noted = self.planned.audition is not None or self._run_config.pipeline.guard
        if noted and start > 0:
            for _, line in MetricsLines(self._run_config.run.output / output.METRICS_FILE):
                self._note(line["iteration"], line["seconds"]["iteration"], fell_back=line.get("fell_back", False))

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the plan, equal on all ranks: run.json may lack the newest decisions."""
        return {} if self.planned is None else {"planned": json.dumps(self.planned.as_json())}

    def restore(self, done: int, shared: dict[str, Any]) -> None:
        """Let the configuration train whose state a checkpoint of ``done`` iterations has.

        A plan in ``shared``, a ``snapshot``, counts if it knows decisions that could not be written into run.json.
        """
        if self.planned is None:
            return
        try:
            saved = Planned.from_json(json.loads(shared["planned"]))
        except (KeyError, TypeError, ValueError) as failure:
            raise CheckpointError(f"a checkpoint must be of this version's plans; got {failure!r}") from None
        if saved.decision_at > self.planned.decision_at:
            self.planned = saved
            self._record(saved)
        self.swap_to(self.planned.at(done - 1))

    def follow(self, iteration: int) -> StepReport:
        """Let the configuration train whose turn it is, after rank 0's decision if one is due. See ``swap_to``."""
        if self.planned is None or self.planned.audition is None:
            return StepReport()
        if iteration >= self.planned.audition.decision_at:
            self.planned = self._decided(self.planned, self.planned.audition)
        report = self.swap_to(self.planned.at(iteration))
        if self.planned.audition is not None and iteration == self.planned.audition.begin:
            self._changes = 0.0
        return report

    def observe(self, iteration: int, seconds: float, *, fell_back: bool) -> None:
        """Report on rank 0 if iterations, of which the newest took ``seconds``, do not take the predicted time.

        Those at width 1, in the warm-up and after the guard ``fell_back``, are not compared with a prediction for
        another width.
        """
        if self._drift is None:
            return
        self._note(iteration, seconds, fell_back=fell_back)
        if iteration not in self._fallback and (line := self._drift.observe(seconds)):
            say(self._console, line)

    def _note(self, iteration: int, seconds: float, *, fell_back: bool) -> None:
        audition = None if self.planned is None else self.planned.audition
        if audition is not None and not audition.over and iteration >= audition.begin:
            self._seconds[iteration] = seconds
        if fell_back:
            self._fallback.update(range(iteration + 1, iteration + 1 + SYNCHRONOUS_ITERATIONS + UNTIMED))

    def swap_to(self, choices: dict[str, Any]) -> StepReport:
        """Train with these ``AUTO_OPTIONS`` from now on; return a report of the gradients applied for that.

        Nothing is done if they are those that train already.
        """
        if choices == self._choices:
            return StepReport()
        config = self.config.with_choices(choices)
        same_codec = config.compression == self.config.compression
        self.config, self._choices = config, choices
        begin = time.perf_counter()
        report = swap_strategy(self._state, lambda former: self._make(config, former), same_codec=same_codec)
        if self._changes is not None:
            self._changes += time.perf_counter() - begin
        return report

    def _record(self, planned: Planned) -> None:
        """Write what has been decided: the plan and its choices."""
        config = self._run_config.with_choices(planned.choices)
        assert isinstance(self._state.strategy, Pipelined)
        chosen = self._state.strategy.exchanges if config.pipeline.reduce == "auto" else None
        output.describe_again(config, self._ranks, planned.as_json(), chosen)

    def _decided(self, planned: Planned, audition: Audition) -> Planned:
        """Return the plan after rank 0's decision.

        It is recorded even if it changes nothing: a resumed run that looked again could decide differently.
        """
        ranks, config = self._ranks, self._run_config
        decided: dict[str, Any] | None = None
        if ranks.rank == 0:
            again = self._drift is not None and self._drift.contradicted
            took = [self._seconds.get(number) for number in range(audition.begin, audition.decision_at)]
            elapsed = None
            if self._changes is not None and None not in took:  # without evaluations and checkpoints
                elapsed = sum(one for one in took if one is not None) + self._changes
            heard = audition.decided(self._seconds, again=again, elapsed=elapsed, fallback=self._fallback)
            decided = planned.heard(heard).as_json()
        found = Planned.from_json(ranks.all_gather_object("audition", decided)[0])
        self._record(found)
        if len(found.turns) > len(planned.turns):
            for line in found.decision_lines():
                say(self._console, line)
            if ranks.rank == 0:
                self._drift = Drift(found)
                if found.audition is not None and found.audition.over:
                    remember(config.run.output / output.CLUSTER_FILE, config, found.audition, ranks.world_size)
        return found
