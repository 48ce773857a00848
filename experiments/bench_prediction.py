"""Cost of an update with a prediction for a rank: CPU time, next to the optimizer's own step, and memory.

    python -m experiments.bench_prediction                        bench_prediction.csv

In every round each contender does all that a step of width 2 does with a mean that has arrived: it compares the mean
with the guess, learns from it, steps the optimizer, and predicts from one gradient in flight. "none" is without a
prediction, and the optimizer's own step alone is a contender, too. Contenders take turns in rotated order, with each
optimizer, on the MLP 784-1000-1000-10. "by a copy" is the way of optimizers that cannot step block by block
(``pipesgd.optim.blockwise``): before and after, side by side. Bytes are the memory of a prediction, including gradients
in flight, in addition to what the optimizer and the pipeline hold anyway.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from experiments import command, paired
from experiments.paired import interquartile_range, median, paired_ratio, ratio_columns
from experiments.predictions import COMPARED
from experiments.results import Row, save
from pipesgd.data import build_model
from pipesgd.optim.clipping import Clipping
from pipesgd.pipeline.delayed_update import DelayedUpdate, Guessed
from pipesgd.pipeline.prediction import Agreement
from pipesgd.ranks import Ranks

OPTIMIZERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-6}),
}
STEP = "the optimizer's step"
BY_A_COPY = " by a copy"
NAMES = ("eager", f"eager{BY_A_COPY}", "local", f"local{BY_A_COPY}", *COMPARED, "none")
ROUNDS, QUICK_ROUNDS, WARM_UP = 200, 3, 3


class Contender:
    """One prediction with its own model and optimizer."""

    def __init__(self, name: str, optimizer: str, hidden: tuple[int, ...]):
        torch.manual_seed(0)
        self._model = build_model("mlp", sample_shape=(1, 28, 28), num_classes=10, hidden_sizes=hidden)
        self._parameters: list[Tensor] = list(self._model.parameters())
        kind, options = OPTIMIZERS[optimizer]
        if name.endswith(BY_A_COPY):
            kind = type(kind.__name__, (kind,), {})  # as a user's own: no longer known to step block by block
        self._optimizer = kind(self._parameters, **options)
        self._name = name
        prediction = "none" if name == STEP else name.removesuffix(BY_A_COPY)
        self._updates = DelayedUpdate(
            self._optimizer,
            self._parameters,
            width=2,
            warmup_iterations=0,
            prediction=COMPARED.get(prediction, prediction),
            guard=False,
            clip=Clipping(),
        )
        self._agreement = Agreement()
        self._agreement.cosine = 0.6  # as in training, so that eager has something to do
        self._values, self._mean, *own = (
            [torch.randn_like(parameter) for parameter in self._parameters] for _ in range(4)
        )
        self._own: list[list[Tensor]] = own
        """Gradients of two iterations, which are in different memory, as in training."""
        self._in_flight = self._updates.hand_over(own[0])

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters)

    def __call__(self) -> float:
        """Run an iteration and return the CPU seconds of the part that is compared."""
        torch._foreach_copy_(self._mean, self._values)  # an update may have changed it
        self._own.reverse()
        due, self._in_flight = self._in_flight, self._updates.hand_over(self._own[0])
        if self._name == STEP:
            for parameter, gradient in zip(self._parameters, self._mean, strict=True):
                parameter.grad = gradient
            begin = time.thread_time()
            self._optimizer.step()
            return time.thread_time() - begin
        begin = time.thread_time()
        self._updates.compare(self._mean, due)
        self._updates.weights.restore()
        guessed = [Guessed(due, None, self._agreement)]
        self._updates.arrived(self._mean, guessed, norm=None, iteration=0, then=[self._in_flight])
        self._updates.predict([self._in_flight], self._agreement)
        return time.thread_time() - begin

    def nbytes(self) -> int:
        """Return the bytes that the prediction holds."""
        self()
        return self._updates.nbytes + self._agreement.nbytes + sum(tensor.nbytes for tensor in self._in_flight.kept)


def compute(rounds: int, hidden: tuple[int, ...], console: Console) -> list[Row]:
    """Return a row for every optimizer and prediction."""
    rows: list[Row] = []
    with command.progress(console, "predictions", len(OPTIMIZERS) * (rounds + WARM_UP)) as advance:
        for optimizer in OPTIMIZERS:
            contenders = {name: Contender(name, optimizer, hidden) for name in (STEP, *NAMES)}
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
                        **ratio_columns("ratio_to_step", ratio),
                        "bytes_per_parameter": contenders[name].nbytes() / contenders[name].numel,
                        "rounds": len(times),
                    }
                )
    return rows


def publish(rows: list[Row], folder: Path) -> None:
    """Save the rows and print them."""
    save("bench_prediction", rows, folder=folder)
    command.show(
        "What an update with a prediction costs a rank, width 2",
        [
            {
                "optimizer": row["optimizer"],
                "prediction": row["prediction"],
                "CPU ms per million": f"{1e3 * row['s_per_million_parameters']:.2f}",
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
