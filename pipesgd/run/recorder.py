"""A recorder of the user's own, which takes a run's numbers to a tracker such as Weights & Biases or MLflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from pipesgd.errors import UserInputError, warn
from pipesgd.functions import call, function_of, in_one_line
from pipesgd.run.metrics import IterationMetrics, scalars_of


class OwnRecorder:
    """Calls ``record(iteration, values)`` after every iteration, where the function ``name`` returned ``record``.

    Values are floats by the names of TensorBoard's curves; those that are not known in an iteration are left out. An
    error of ``record`` ends the recording with a warning, and not the run. A method ``close`` of ``record``, if it has
    one, is called at the end.

    Raises:
        UserInputError: the function cannot be imported, fails, or returns something that cannot be called.
    """

    def __init__(self, name: str):
        self._name = name
        self._record = call("recorder", name, function_of("recorder", name, {}), {})
        if not callable(self._record):
            raise UserInputError(
                f"recorder must be a function that returns record(iteration, values); got {name}, which returned "
                f"{type(self._record).__name__}"
            )
        self._ended = False

    def record(self, metrics: IterationMetrics) -> None:
        """Hand over the numbers of an iteration."""
        self._hand_over(metrics.iteration, scalars_of(metrics))

    def record_last(self, iterations: int, accuracy: float | None, loss: float) -> None:
        """Hand over the evaluation after all ``iterations``."""
        self._hand_over(iterations, {"test/accuracy": accuracy, "test/loss": loss})

    def flush(self) -> None:
        """Do nothing: a tracker writes by itself."""

    def close(self) -> None:
        """Close what the user's function returned, if it has a ``close``."""
        if (close := getattr(self._record, "close", None)) is not None:
            with self._warning():
                close()

    def _hand_over(self, iteration: int, values: Mapping[str, float | None]) -> None:
        if not self._ended:
            with self._warning():
                self._record(iteration, {name: value for name, value in values.items() if value is not None})

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Warn of an error of the user's code, after which nothing is handed over any more."""
        try:
            with in_one_line(f"recorder {self._name} must take what is recorded without an error"):
                yield
        except UserInputError as failure:
            self._ended = True
            warn(f"{failure}; training continues, and nothing more is recorded there")
