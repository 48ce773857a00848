"""The shared part of the users of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pipesgd.errors import UserInputError, named
from pipesgd.membership.record import former_ranks
from pipesgd.pipeline.pipeline import Pipeline
from pipesgd.pipeline_config import Buffers
from pipesgd.ranks import Ranks
from pipesgd.strategy import StepReport, Strategy, Tally, Totals


def taken_over(
    states: Sequence[dict[str, Any]], rank: int, world_size: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a former rank's state for all that is not added up, and the ``states`` of those that ``rank`` takes over.

    Raises:
        UserInputError: one of these is missing, or they are of several moments.
    """
    moments = {(state["world_size"], state["iteration"]) for state in states}
    if len(moments) != 1:
        raise UserInputError(f"states must be of one moment of a training; got those of {len(moments)}")
    [(before, _)] = moments
    of_rank = {state["rank"]: state for state in states}
    needed = former_ranks(before, rank, world_size)
    if missing := [one for one in needed or [rank % before] if one not in of_rank]:
        raise UserInputError(f"states must have those of {named(missing)}, of {before}; got {named(sorted(of_rank))}")
    return of_rank[rank % before if not needed else rank], [of_rank[one] for one in needed]


class OnPipeline(Strategy):
    """The shared part of the users of a pipeline: all but the way in which gradients come to it.

    Args:
        pipeline: the pipeline.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.module = pipeline.model
        """Model that is trained."""
        self.replicated = True
        self.tally = Tally(pipeline.flight.uncompressed_bytes())
        """Reports of all steps, which ``totals`` adds up."""

    @property
    def iteration(self) -> int:  # type: ignore[override]
        """Number of iterations so far."""
        return self.pipeline.iteration

    @property
    def closed(self) -> bool:
        """True once ``close`` was called."""
        return self.pipeline.closed

    @property
    def all_ranks(self) -> list[Ranks]:
        """The ranks that exchange gradients and, with islands, the members of this rank's island."""
        return self.pipeline.all_ranks

    def totals(self) -> Totals:
        """Return the totals of all steps so far: iterations, times, hidden share and bytes."""
        return self.tally.totals()

    @contextlib.contextmanager
    def true_weights(self) -> Iterator[None]:
        """Make the model hold the weights that all ranks agree on while the context is open; changes then are kept.

        Evaluating the model and its ``state_dict`` do so by themselves; whatever reads or changes parameters needs it.
        """
        with self.pipeline.weights.held_true():
            yield

    def combine_buffers(self, how: Buffers = "average") -> None:
        """Set floating-point buffers to their "average" or to "rank-0"'s values, or leave them "own". Collective."""
        self.pipeline.combine_buffers(how)

    def check_replicas(self) -> None:
        """Raise ``ReplicasDivergedError`` if the ranks hold different weights. Collective."""
        self.pipeline.check_replicas()

    def flush(self) -> StepReport:
        """Wait for and apply all gradients in flight. Collective. Further steps may follow and fill the pipeline again.

        Gradients in ``.grad`` stay there for the next step, at the loss scale of those that will be added to them. A
        call that was interrupted while it waited may be repeated, and resumes.

        Raises the same errors as ``step``, and ``UserInputError`` if buckets have left since then.
        """
        return self.pipeline.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the averaged gradients in flight, after waiting for them, and of the state of the codec."""
        return self.pipeline.state_dict()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise what ``load_state_dict`` raises before it changes anything: see there."""
        self.pipeline.check_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; the model must hold that moment's true weights. Gradients in flight are dropped.

        After an operation that was interrupted halfway, gradients in ``.grad`` and buckets that have left are dropped,
        too: all ranks must have been interrupted when the same buckets had left.

        Raises:
            CommunicationError: another rank has not sent a bucket or a gradient that has left on this rank.
            UserInputError: ``state`` is of a pipeline with another number of ranks, another codec, other buckets,
                another ``reduce`` or other trained parameters, or buckets have left since the last step. Nothing is
                changed.
        """
        self.check_state(state)
        self.load_checked(state)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Continue from a ``state`` that ``check_state`` has accepted."""
        self.pipeline.load_checked(state)

    def load_members(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the ``states`` of another number of ranks, as if these had flushed. Collective.

        The model must hold that moment's true weights. Gradients in flight are applied. What the codec has left out of
        the gradients of the former ranks r, r + p, r + 2p, ... is added to the next gradients of rank r of p, and the
        rest of its state is that of former rank r. A rank that is new has that of former rank r mod n, of n, and
        nothing was left out of its gradients.

        Args:
            states: the ``state_dict`` of all former ranks, or at least of those that this rank takes over.

        Raises:
            UserInputError: states are missing, or are of several moments; or as ``load_state_dict``, of which the
                number of ranks is free here. Nothing is changed.
        """
        ranks = self.pipeline.flight.ranks
        alike, taken = taken_over(states, ranks.rank, ranks.world_size)
        state = self.of_members(alike, taken)
        self.check_state(state)
        self.load_checked(state)
        self.flush()

    def of_members(self, alike: dict[str, Any], taken: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state with which this rank takes over the states ``taken``; none if it is new.

        ``alike`` is the state that it has the rest of, the first of these if there are any.
        """
        return self.pipeline.of_members(alike, taken)

    def fail(self, error: BaseException) -> None:
        """End every wait at once with ``error``, such as a failure of another rank. Thread-safe."""
        self.pipeline.fail(error)

    def close(self) -> None:
        """Apply the gradients in flight, and end the communication thread and its connections. May be called twice.

        It returns when all ranks have called it, or after ``timeout`` seconds without one of them.

        After an error it waits for no other rank: it drops the gradients in flight with a warning, and leaves the true
        weights in the model.

        Raises the same errors as ``flush``, and ``ReplicasDivergedError`` if the ranks' weights differ, those of frozen
        parameters, too; the pipeline is closed then, too.
        """
        self.pipeline.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.pipeline.error = self.pipeline.error or error
        self.close()
