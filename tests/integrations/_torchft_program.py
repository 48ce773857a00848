"""A program for torchrun: ``_torchft_program.py SCENARIO FOLDER`` trains with torchft and writes what it found."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from experiments.bench_torchft import WINDOW, Torchft
from experiments.loops import sgd
from pipesgd import LocalSteps, RunError
from pipesgd.exit import run_and_exit
from pipesgd.ranks import Ranks
from pipesgd.sections import DEFAULT_TIMEOUT, Windows

SCENARIO, FOLDER = sys.argv[1], Path(sys.argv[2])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


def batches(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(ranks.rank)
    return [
        (torch.randn(8, 6, generator=numbers), torch.randint(3, (8,), generator=numbers)) for _ in range(2 * WINDOW)
    ]


def by_torchft(ranks: Ranks, delay: int) -> dict[str, Any]:
    loop = Torchft(make_model(), ranks, delay=delay)
    for batch in batches(ranks):
        loop.iterate(*batch)
    loop.flush()
    loop.iterate(*batches(ranks)[0])
    refused = ""
    try:
        loop.flush()
    except RunError as error:
        refused = str(error)
    # The weights at the end of the last whole window are those that its next one began at.
    [fragment] = loop.diloco._fragments
    weights = torch.cat([one.reshape(-1) for one in fragment.original_parameters.values()]).clone()
    loop.close()
    return {"weights": weights, "refused": refused}


def by_local_steps(ranks: Ranks) -> Tensor:
    model = make_model()
    with LocalSteps(model, sgd(model), Windows(local_steps=WINDOW, outer="nesterov"), width=1, ranks=ranks) as strategy:
        for inputs, labels in batches(ranks):
            cross_entropy(model(inputs), labels).backward()
            strategy.step()
        return parameters_to_vector(model.parameters()).detach().clone()


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    ranks.start_process_group("cpu", DEFAULT_TIMEOUT)
    found = {f"delay {delay}": by_torchft(ranks, delay) for delay in (0, 4)} | {"expected": by_local_steps(ranks)}
    torch.save(found, FOLDER / f"rank-{ranks.rank}.pt")


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
