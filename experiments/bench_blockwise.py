"""Time of an iteration at real size: updates block by block, next to torch's fused and plain steps.

    torchrun --nproc-per-node 2 -m experiments.bench_blockwise        bench_blockwise.csv

Ranks have emulated accelerators, and an MLP of 25 million parameters, whose gradients of 8 bits are summed over
loopback. SGD with momentum and AdamW predict at width 2 in three ways: block by block (``pipesgd.optim.blockwise``),
which is the way of torch's optimizers without options that choose other code; by a copy of the optimizer with
``fused=True``; and by a copy of the plain optimizer. Contenders take turns in rotated order. A turn is some iterations,
of which the first ones are not timed, and a flush, which is not timed either. Times are those of the slower rank.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console

from experiments import command, paired
from experiments.accelerators import Accelerator, Emulated
from experiments.paired import interquartile_range, median, paired_ratio, ratio_columns
from experiments.results import Row, save
from pipesgd import Pipelined
from pipesgd.data import build_model
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

OPTIMIZERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-6}),
}
BLOCKS = "block by block"
WAYS: dict[str, dict[str, Any]] = {BLOCKS: {}, "fused": {"fused": True}, "plain": {"foreach": False}}
"""Further options of the optimizer, by the name of the way. The plain one is of a class that blocks do not know."""
PASSES = (0.075, 0.3)
"""Seconds of the emulated passes."""
HIDDEN, QUICK_HIDDEN = (4600, 4600), (30,)
UNTIMED, TIMED = 2, 4
"""Iterations of a turn."""
ROUNDS, QUICK_ROUNDS = 8, 2


class Contender:
    """A pipeline with its own model and optimizer."""

    def __init__(self, way: str, optimizer: str, seconds: float, hidden: tuple[int, ...], ranks: Ranks):
        torch.manual_seed(0)
        model = build_model("mlp", sample_shape=(1, 28, 28), num_classes=10, hidden_sizes=hidden)
        self._model = Emulated(model, Accelerator(seconds=seconds, synthetic=True), rank=ranks.rank)
        kind, options = OPTIMIZERS[optimizer]
        if way == "plain":
            kind = type(kind.__name__, (kind,), {})
        self._inputs = torch.zeros(8, 1, 28, 28)
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.pipeline = Pipelined(
            self._model, kind(self._model.parameters(), **options, **WAYS[way]), codec="int8", ranks=ranks
        )

    def __call__(self) -> float:
        """Return the seconds of an iteration, the mean of those of a turn."""
        begin = 0.0
        for iteration in range(UNTIMED + TIMED):
            if iteration == UNTIMED:
                begin = time.perf_counter()
            self._model(self._inputs).sum().backward()
            self.pipeline.step()
        seconds = (time.perf_counter() - begin) / TIMED
        self.pipeline.flush()
        return seconds


def compute(rounds: int, hidden: tuple[int, ...], ranks: Ranks, console: Console) -> list[Row]:
    """Return a row for every time of a pass, optimizer and way. Collective."""
    rows: list[Row] = []
    cells = [(seconds, optimizer) for seconds in PASSES for optimizer in OPTIMIZERS]
    with command.progress(console, "updates", len(cells) * (rounds + 1)) as advance:
        for of_pass, optimizer in cells:
            contenders = {way: Contender(way, optimizer, of_pass, hidden, ranks) for way in WAYS}
            seconds = paired.interleave(contenders, rounds, warm_up=1, after_round=partial(advance, 1, optimizer))
            for contender in contenders.values():
                contender.pipeline.close()
            rows += [
                {
                    "pass_s": of_pass,
                    "optimizer": optimizer,
                    "way": way,
                    "parameters": contenders[way].numel,
                    "iteration_s": median(times),
                    "iqr_s": interquartile_range(times),
                    **ratio_columns("ratio_to_blocks", paired_ratio(times, seconds[BLOCKS])),
                    "rounds": len(times),
                }
                for way, times in seconds.items()
            ]
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the rows."""
    command.show(
        "An iteration with a prediction, width 2",
        [
            {
                "pass, ms": f"{1e3 * row['pass_s']:.0f}",
                "optimizer": row["optimizer"],
                "way": row["way"],
                "iteration, ms": f"{1e3 * row['iteration_s']:.0f}",
                "/ block by block": f"{row['ratio_to_blocks_median']:.3f}",
                "95 %": f"{row['ratio_to_blocks_low']:.3f} to {row['ratio_to_blocks_high']:.3f}",
            }
            for row in rows
        ],
    )


def parse(words: Sequence[str], world_size: int) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    arguments = command.parse(command.parser("bench_blockwise", __doc__), words)
    if world_size < 2:
        raise UserInputError(f"bench_blockwise needs at least 2 ranks, started by torchrun; got {world_size}")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.world_size))
    ranks.start_process_group("cpu", 120.0)
    rounds, hidden = (QUICK_ROUNDS, QUICK_HIDDEN) if arguments.quick else (ROUNDS, HIDDEN)
    rows = compute(rounds, hidden, ranks, console)
    if ranks.rank == 0:
        save("bench_blockwise", rows, folder=arguments.output)
        show(rows)


if __name__ == "__main__":
    command.run(main)
