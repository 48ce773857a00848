"""Plans again while a run is under way: ``--replan``, when its iterations take another time than was predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from pipesgd import planning
from pipesgd.config import TrainConfig
from pipesgd.decision import Planned, choices_of, words
from pipesgd.drift import WINDOW, Drift
from pipesgd.launch import Ranks
from pipesgd.planning import agree_on_plan, calibrate_briefly
from pipesgd.progress import say
from pipesgd.state import RunState
from pipesgd.strategies.base import Strategy
from pipesgd.strategies.make import make_strategy
from pipesgd.workloads import ShardedBatches

MOST_REPLANS = 3
"""In one attempt at a run: where the prediction is off again and again, it is the model that is wrong."""


class Watch:
    """Compares a run with its prediction, on rank 0, and tells all ranks when it is time to plan again.

    Args:
        planned: the prediction.
        ranks: that train.
        console: of rank 0.
        replans: whether to plan again.
    """

    def __init__(self, planned: Planned, ranks: Ranks, console: Console, *, replans: bool):
        self._ranks = ranks
        self._console = console
        self._left = MOST_REPLANS if replans else 0
        self._restart(planned)

    def is_time(self, seconds: float, done: int, total: int) -> bool:
        """Take note of an iteration; whether all ranks are to plan again now, after so many iterations of ``total``.

        Collective at every ``WINDOW`` iterations, where it may be true: the ranks' own times differ.
        """
        if self._drift is not None and (line := self._drift.saw(seconds)):
            self._drifted = True
            say(self._console, line)
        if not self._left or done % WINDOW or done == total:
            return False
        # Rank 0 decides: the others have no clock of their own in this.
        worth_it = self._drifted and (total - done) * seconds > planning.CALIBRATION_SECONDS
        if self._drifted and not worth_it:
            left = total - done
            say(self._console, f"not planned again: the {left} iterations that are left take no longer than measuring")
            self._drifted = False
        return bool(self._ranks.exchange("time to plan again", worth_it)[0])

    def go_on(self, planned: Planned) -> None:
        """Watch another prediction."""
        self._left -= 1
        if not self._left and self._drift is not None:
            say(self._console, f"planned again {MOST_REPLANS} times: from now on what was chosen stays")
        self._restart(planned)

    def _restart(self, planned: Planned) -> None:
        self._drift = Drift(planned) if self._ranks.rank == 0 else None
        self._drifted = False


def replan(
    config: TrainConfig,
    planned: Planned,
    state: RunState,
    ranks: Ranks,
    batches: ShardedBatches,
    scaler: torch.amp.GradScaler,
    console: Console,
    *,
    samples: int,
    done: int,
    total: int,
) -> tuple[TrainConfig, Planned]:
    """Measure the ranks again, choose again what was auto, and go on with that. All ranks call this together.

    What is in flight is applied first, so that the run goes on as one that begins with these weights: its pipeline
    fills again. What the strategy has learned goes over into the new one (``carry_over``), in ``state``.

    Args:
        config: of the run so far.
        planned: likewise.
        state: of the run, whose strategy is ended, and replaced.
        ranks: that train.
        batches: of this rank.
        scaler: of the losses.
        console: of rank 0.
        samples: in the training set.
        done: iterations.
        total: of the job.

    Raises:
        CommunicationError: a rank was lost.
    """
    say(console, f"planning again after iteration {done} of {total} (--replan)")
    # 1. Nothing in flight, and no process group.
    state.strategy.flush()
    kept = state.strategy.state_dict()
    state.strategy.close()
    ranks.leave()
    # 2. Measure and choose.
    asked = as_asked(config, planned.asked)
    found = calibrate_briefly(asked, ranks, state.model, batches, console, samples=samples)
    source = f"a calibration of {planning.CALIBRATION_SECONDS:.0f} s after iteration {done}"
    chosen, planned = agree_on_plan(
        asked,
        ranks,
        found,
        console,
        iterations=total - done,
        source=source,
        own=True,
    )
    # 3. Go on.
    before, now = (words(choices_of(one)) for one in (config, chosen))
    say(console, f"going on with {now}" + (", as before" if before == now else f"; so far it was {before}"))
    ranks.start_process_group(chosen.run.device, chosen.run.timeout)
    strategy = make_strategy(chosen, state.model, state.optimizer, scaler, ranks)
    state.strategy = strategy
    dropped = carry_over(kept, strategy, same_codec=config.compression == chosen.compression)
    if dropped:
        codec = config.compression.codec
        say(console, f"{codec}'s residuals of error feedback are dropped: the new codec keeps none of them")
    return chosen, planned


def as_asked(config: TrainConfig, auto: Sequence[str]) -> TrainConfig:
    """The configuration before these options were chosen."""
    defaults = choices_of(TrainConfig())
    config = config.with_choices({name: defaults[name] for name in auto})
    return dataclasses.replace(config, planning=dataclasses.replace(config.planning, auto=tuple(auto)))


def carry_over(kept: dict[str, Any], strategy: Strategy, *, same_codec: bool) -> bool:
    """Give ``strategy`` what another one of the same model has learned, by its ``state_dict`` after a ``flush``.

    A codec's memory goes to the same codec only, and that of a prediction to the same prediction, which width 1 has
    none of. Returns whether residuals of error feedback were dropped.
    """
    fresh = strategy.state_dict()
    state = dict(kept)
    if not same_codec:
        state["exchange"] = fresh["exchange"]
    if kept["prediction"].keys() != fresh["prediction"].keys():
        state["prediction"] = fresh["prediction"]
    strategy.load_state_dict(state)
    return not same_codec and bool(kept["exchange"].get("residuals"))
