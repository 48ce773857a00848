"""Cost of codecs on one thread: encode, decode and the fused hop, next to copying the same float32 values.

    python -m experiments.bench_codecs                 bench_codecs.csv

A round times the copy (numpy's, of float32, warm) and every contender once, in rotated order. A ratio compares times
of the same round, in CPU seconds of the thread, which do not advance while others have the core. "cache" is 256 KiB of
float32 in back-to-back calls, the first of them untimed; "memory" is 128 MiB in one call. Values are restored before
each measurement, untimed. The hop decodes the received message, adds it and encodes the sum; "hop, residual" also adds
a residual and subtracts what the message encodes from it; it has no target. Python's own overhead in a call counts.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from experiments import command, paired
from experiments.paired import interquartile_range, median, paired_ratio, ratio_columns
from experiments.results import Row, grouped, save
from pipesgd.codecs.base import Codec
from pipesgd.codecs.options import codec_named
from pipesgd.ranks import Ranks

CODECS = {
    **{name: codec_named(name) for name in ("truncate16", "bf16", "fp16")},
    **{
        name if rounding == "nearest" else f"{name} stochastic": codec_named(name, rounding=rounding)
        for name in ("int8", "int4", "ternary", "qsgd")
        for rounding in ("nearest", "stochastic")
    },
    "sign": codec_named("sign"),
}
OPERATIONS = ("encode", "decode", "hop", "hop, residual")
MOST_FOR_DECODE = 2.0
MOST_FOR_THE_REST = {"bf16": 2.0, "int8": 2.0, "int4": 3.0, "ternary": 3.0, "ternary stochastic": 3.0}
"""Limits in times of a copy: for any decode, and for an encode or a hop without residual of these codecs."""

Operation = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Size:
    """A number of values and how they are timed."""

    name: str
    numel: int
    calls: int
    """Calls that are timed together."""
    warm: bool
    """True if an untimed call precedes the timed ones."""
    rounds: int


FULL = (
    Size(name="cache", numel=64 << 10, calls=20, warm=True, rounds=101),
    Size(name="memory", numel=32 << 20, calls=1, warm=False, rounds=11),
)
QUICK = (
    Size(name="cache", numel=64 << 10, calls=3, warm=True, rounds=3),
    Size(name="memory", numel=1 << 20, calls=1, warm=False, rounds=3),
)


class Buffers:
    """Gradient-like float32 values that all contenders of one size share, so that caches hold no more."""

    def __init__(self, numel: int):
        generator = torch.Generator().manual_seed(0)
        self.original = 1e-3 * torch.randn(numel, generator=generator)
        self.values = self.original.clone()
        self.residual = torch.zeros(numel)

    def reset(self) -> None:
        self.values.copy_(self.original)
        self.residual.zero_()


def own_operations(codec: Codec, buffers: Buffers) -> dict[str, Operation]:
    """Return the operations of our ``codec``, by name."""
    values, residual = buffers.values, buffers.residual
    received, wire = (torch.zeros(codec.wire_bytes(values.numel()), dtype=torch.uint8) for _ in range(2))
    buffers.reset()
    codec.encode(values, None, received, 1)
    return {
        "encode": lambda: codec.encode(values, None, wire, 2),
        "decode": lambda: codec.decode(received, values),
        "hop": lambda: codec.decode_add_encode(received, values, None, wire, 2),
        "hop, residual": lambda: codec.decode_add_encode(received, values, residual, wire, 2),
    }


def compute(sizes: Sequence[Size], codecs: Sequence[str], console: Console) -> list[Row]:
    """Return a row for every size, codec and operation."""
    torch.set_num_threads(1)
    rows = []
    for size in sizes:
        buffers = Buffers(size.numel)
        copied = torch.empty_like(buffers.values)
        contenders: dict[tuple[str, str], Operation] = {
            (name, operation): function
            for name in codecs
            for operation, function in own_operations(CODECS[name].make(), buffers).items()
        }
        for function in contenders.values():  # the first call compiles loops
            function()
        timed = {str(key): partial(time_calls, function, buffers, size) for key, function in contenders.items()}
        timed["copy"] = partial(time_calls, partial(np.copyto, copied.numpy(), buffers.original.numpy()), buffers, size)
        with command.progress(console, f"codecs in {size.name}", size.rounds + 1) as advance:
            after_round = partial(advance, 1, f"{len(timed)} contenders")
            seconds = paired.interleave_here(timed, size.rounds, warm_up=1, after_round=after_round)
        for name, operation in contenders:
            rows.append(summarize(size, name, operation, seconds[str((name, operation))], seconds["copy"]))
    return rows


def time_calls(function: Operation, buffers: Buffers, size: Size) -> float:
    """Return the CPU seconds of a call."""
    buffers.reset()
    if size.warm:
        function()
    begin = time.thread_time()
    for _ in range(size.calls):
        function()
    return (time.thread_time() - begin) / size.calls


def summarize(size: Size, name: str, operation: str, times: Sequence[float], copy: Sequence[float]) -> Row:
    """Return a line of the table."""
    ratio, target = paired_ratio(times, copy), target_of(name, operation)
    return {
        "size": size.name,
        "nbytes": 4 * size.numel,
        "contender": name,
        "operation": operation,
        "median_s": median(times),
        "copy_median_s": median(copy),
        "copy_iqr_s": interquartile_range(copy),
        **ratio_columns("ratio", ratio),
        "ratio_iqr": interquartile_range(np.asarray(times) / np.asarray(copy)),
        "rounds": len(copy),
        "target_ratio": target,
        "target_met": None if target is None else ratio.median <= target,
    }


def target_of(name: str, operation: str) -> float | None:
    """Return the operation's limit, in times of a copy; None if it has no target."""
    if operation == "hop, residual":
        return None
    return MOST_FOR_DECODE if operation == "decode" else MOST_FOR_THE_REST.get(name)


def publish(rows: list[Row], folder: Path) -> None:
    """Save the rows and print them."""
    targets = {"decode_at_most": MOST_FOR_DECODE, "encode_and_hop_at_most": MOST_FOR_THE_REST}
    save("bench_codecs", rows, extra={"target": targets}, folder=folder)
    for size, some in grouped(rows, "size").items():
        us = 1e6 * some[0]["copy_median_s"]
        command.show(f"{size}: times in copies of the same float32 values, of {us:.1f} us", _table(some))


def _table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a line for every contender, with its operations side by side."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(row["contender"], {"contender": row["contender"], **dict.fromkeys(OPERATIONS, "")})
        line[row["operation"]] = _text(row)
    return list(lines.values())


def _text(row: Row) -> str:
    """Return a cell such as "1.52 +-0.03 met": the ratio, half of its interquartile range, and the verdict."""
    verdict = {None: "", True: " met", False: " MISSED"}[row["target_met"]]
    return f"{row['ratio_median']:.2f} +-{row['ratio_iqr'] / 2:.2f}{verdict}"


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Parse the options. Raises ``UserInputError``."""
    options = command.parser("bench_codecs", __doc__)
    options.add_argument(
        "--codecs", nargs="+", default=list(CODECS), metavar="NAME", help=f"any of {'; '.join(CODECS)} (all)"
    )
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"codecs": CODECS})
    command.check_alone("bench_codecs", by_torchrun, "it uses one thread of one process")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    rows = compute(QUICK if arguments.quick else FULL, arguments.codecs, console)
    publish(rows, arguments.output)


if __name__ == "__main__":
    command.run(main)
