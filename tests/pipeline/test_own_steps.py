"""Steps of the optimizer are the pipeline's: a training loop that takes one more would change one rank's weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipesgd import LocalSteps, Pipelined
from pipesgd.errors import UserInputError
from pipesgd.ranks import alone
from pipesgd.sections import Windows

Make = Callable[[nn.Module, torch.optim.Optimizer], Pipelined | LocalSteps]

PIPELINES: dict[str, Make] = {
    "width 1": lambda model, optimizer: Pipelined(model, optimizer, width=1),
    "width 2": lambda model, optimizer: Pipelined(model, optimizer, width=2),
    "local steps": lambda model, optimizer: LocalSteps(model, optimizer, Windows(local_steps=2)),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_step_by_the_loop_is_refused_until_the_pipeline_is_closed(kind: str) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward() -> float:
        model(torch.ones(1, 1)).sum().backward()
        return model.weight.item()

    with PIPELINES[kind](model, optimizer) as pipeline:
        for _ in range(3):
            before = backward()
            with pytest.raises(UserInputError, match=r"^optimizer.step\(\) must be left to the pipeline"):
                optimizer.step()
            assert model.weight.item() == before
            pipeline.step()
    before = backward()
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 0.1)


def test_an_optimizer_whose_pipeline_could_not_be_made_is_the_loops() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserInputError, match="process_group must be left out"):
        Pipelined(model, optimizer, ranks=alone(), process_group=object())  # type: ignore[arg-type]
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
