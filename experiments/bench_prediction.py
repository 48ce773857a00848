"""Cost of a prediction for a rank: time, next to the optimizer's own step, and memory, per million parameters.

    python -m experiments.bench_prediction                        bench_prediction.csv, bench_prediction.png

In every round each prediction predicts once from one gradient in flight (width 2), with each optimizer, in rotated
order, on the MLP 784-1000-1000-10; the optimizer's own step is among the contenders. Bytes are the memory of a
prediction, including gradients in flight, in addition to what the optimizer and the pipeline hold anyway.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor, nn

from experiments import command, paired
from experiments.paired import interquartile_range, median, paired_ratio
from experiments.predictions import COMPARED
from experiments.results import Row, save, save_figure
from pipesgd.data import build_model
from pipesgd.optim import hyperparameters
from pipesgd.optim.clipping import Clipping
from pipesgd.pipeline.prediction import Agreement, Prediction, Unapplied, make_prediction
from pipesgd.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-6),
}
STEP = "the optimizer's step"
NAMES = ("eager", "local", *COMPARED, "none")
ROUNDS, QUICK_ROUNDS, WARM_UP = 200, 3, 3
COLOUR = "#0072B2"


class Contender:
    """One prediction with its own model and optimizer."""

    def __init__(self, name: str, make: Callable[[nn.Module], torch.optim.Optimizer], hidden: tuple[int, ...]):
        torch.manual_seed(0)
        self._model = build_model("mlp", sample_shape=(1, 28, 28), num_classes=10, hidden_sizes=hidden)
        self._optimizer = make(self._model)
        self._parameters: list[Tensor] = list(self._model.parameters())
        self._gradients = [torch.randn_like(parameter) for parameter in self._parameters]
        self._name = name
        self._prediction: Prediction = make_prediction(
            COMPARED.get(name, "none" if name == STEP else name), self._parameters, self._optimizer, Clipping()
        )
        self._agreement = Agreement()
        self._agreement.cosine = 0.6  # as in training, so that eager has something to do

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters)

    def __call__(self) -> float:
        """Run an iteration and return the seconds of the part that is compared."""
        kept = self._prediction.keep(self._gradients)
        in_flight = [Unapplied(kept, hyperparameters.current(self._optimizer))]
        self._prediction.weights.restore()
        begin = time.perf_counter()
        self._prediction.learn(self._gradients, kept, None, self._agreement)
        self._prediction.correct(self._gradients, kept)
        corrected = time.perf_counter() - begin
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        begin = time.perf_counter()
        self._optimizer.step()
        stepped = time.perf_counter() - begin
        for parameter in self._parameters:
            parameter.grad = None
        begin = time.perf_counter()
        self._prediction.predict(in_flight, self._agreement)
        self._prediction.compare(self._gradients, kept)
        predicted = time.perf_counter() - begin
        return stepped if self._name == STEP else corrected + predicted

    def nbytes(self) -> int:
        """Return the bytes that the prediction holds."""
        self()
        kept = self._prediction.keep(self._gradients)
        return self._prediction.nbytes + self._agreement.nbytes + sum(tensor.nbytes for tensor in kept)


def compute(rounds: int, hidden: tuple[int, ...], console: Console) -> list[Row]:
    """Return a row for every optimizer and prediction."""
    rows: list[Row] = []
    with command.progress(console, "predictions", len(OPTIMIZERS) * (rounds + WARM_UP)) as advance:
        for optimizer, make in OPTIMIZERS.items():
            contenders = {name: Contender(name, make, hidden) for name in (STEP, *NAMES)}
            seconds = paired.interleave_here(
                contenders, rounds, warm_up=WARM_UP, after_round=partial(advance, 1, optimizer)
            )
            for name, times in seconds.items():
                ratio = paired_ratio(times, seconds[STEP])
                millions = contenders[name].numel / 1e6
                rows.append(
                    {
                        "optimizer": optimizer,
                        "prediction": name,
                        "parameters": contenders[name].numel,
                        "median_s": median(times),
                        "iqr_s": interquartile_range(times),
                        "s_per_million_parameters": median(times) / millions,
                        "ratio_to_step_median": ratio.median,
                        "ratio_to_step_low": ratio.low,
                        "ratio_to_step_high": ratio.high,
                        "bytes_per_parameter": contenders[name].nbytes() / contenders[name].numel,
                        "rounds": len(times),
                    }
                )
    return rows


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw a bar for every prediction of one optimizer."""
    names = [row["prediction"] for row in rows]
    axes.barh(names[::-1], [1e3 * row["s_per_million_parameters"] for row in rows][::-1], color=COLOUR)
    axes.set(title=rows[0]["optimizer"], xlabel="ms an iteration, per million parameters")
    return axes


def publish(rows: list[Row], folder: Path) -> None:
    """Save the rows and their figure, and print them."""
    save("bench_prediction", rows, folder=folder)
    save_figure("bench_prediction", rows, by="optimizer", plot=plot, folder=folder)
    command.show(
        "What a prediction costs a rank, width 2",
        [
            {
                "optimizer": row["optimizer"],
                "prediction": row["prediction"],
                "ms per million": f"{1e3 * row['s_per_million_parameters']:.2f}",
                "/ step": f"{row['ratio_to_step_median']:.2f}",
                "95 %": f"{row['ratio_to_step_low']:.2f} to {row['ratio_to_step_high']:.2f}",
                "bytes per parameter": f"{row['bytes_per_parameter']:.1f}",
            }
            for row in rows
        ],
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    arguments = command.parse(command.parser("bench_prediction", __doc__), words)
    command.check_alone("bench_prediction", by_torchrun, "it needs one process")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    rounds, hidden = (QUICK_ROUNDS, (30,)) if arguments.quick else (ROUNDS, (1000, 1000))
    publish(compute(rounds, hidden, console), arguments.output)


if __name__ == "__main__":
    command.run(main)
