"""``pipesgd.train`` with a fault in one rank: FAULT=nan|memory|slow|load, AT=iteration, WHO=rank in the environment.

A fault that comes once is announced by a line "fault: ..." at the moment when it happens.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from pipesgd.exit import run_and_exit

FAULT, AT = os.environ["FAULT"], int(os.environ.get("AT", "0"))
CHOSEN = os.environ["WHO"] == os.environ["RANK"]
SLOW_SECONDS, LOAD_SECONDS = 0.3, 25.0
TOO_MUCH = 1 << 46
"""Numbers in a tensor that no machine has memory for."""

train: Any = importlib.import_module("pipesgd.train")
training: Any = importlib.import_module("pipesgd.training")
forward_backward, load = training.forward_backward, train.load


def announce() -> None:
    """Announce that the fault happens now."""
    sys.stderr.write(f"fault: {FAULT} in rank {os.environ['RANK']}\n")
    sys.stderr.flush()


def with_a_nan(samples: Iterator[Any]) -> Iterator[Any]:
    """Yield the next batch of ``samples``, with one value replaced by NaN."""
    inputs, *rest = next(samples)
    inputs = inputs.clone()
    inputs.view(-1)[3] = float("nan")
    yield (inputs, *rest)


def faulty_forward_backward(strategy: Any, samples: Iterator[Any], config: Any, scaler: Any, iteration: int) -> Any:
    """Run the iteration with the fault."""
    if CHOSEN and iteration == AT and FAULT in ("nan", "memory"):
        announce()
        if FAULT == "memory":
            torch.empty(TOO_MUCH)
        samples = with_a_nan(samples)
    if CHOSEN and FAULT == "slow":
        time.sleep(SLOW_SECONDS)
    return forward_backward(strategy, samples, config, scaler, iteration)


def slow_load(config: Any, ranks: Any) -> Any:
    """Load the data; with FAULT=load, the chosen rank first waits for two and a half deadlines."""
    if CHOSEN and FAULT == "load":
        announce()
        time.sleep(LOAD_SECONDS)
    return load(config, ranks)


if __name__ == "__main__":
    training.forward_backward = faulty_forward_backward
    train.load = slow_load
    run_and_exit(train.train, sys.argv[1:])
