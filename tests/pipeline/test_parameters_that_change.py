"""Parameters that are frozen, unfrozen or added in the middle of training, which strategies refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _ranks import error_of, run_ranks
from _sections import sections
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipesgd import LocalSteps, Pipelined
from pipesgd.baselines.ddp import Ddp
from pipesgd.baselines.local import Local
from pipesgd.codecs.options import CodecOptions, codec_named
from pipesgd.ddp import attach
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.sections import Windows, Wire
from pipesgd.strategy import Strategy
from pipesgd.systems.servers.strategy import ParameterServers

pytestmark = pytest.mark.slow


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _backward(model: nn.Module, rank: int, iteration: int) -> None:
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    model(torch.randn(5, 4, generator=generator, dtype=torch.float64)).square().mean().backward()


def _change(model: nn.Sequential, optimizer: torch.optim.Optimizer, change: str) -> None:
    if change == "add":
        model[0].zero_grad()  # removes gradients that nobody has taken so far
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
    else:
        model[0].requires_grad_(change == "unfreeze")


def _build(change: str) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = _model()
    model[0].requires_grad_(change != "unfreeze")
    parameters = model[2].parameters() if change == "add" else model.parameters()
    return model, torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("change", ["unfreeze", "freeze", "add"])
@pytest.mark.parametrize("buckets", [1, 2])
def test_a_change_is_refused_and_loses_nothing(change: str, buckets: int) -> None:
    model, optimizer = _build(change)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in trained if parameter.requires_grad]
    with Pipelined(model, optimizer, width=2, wire=Wire(buckets=buckets)) as pipeline:
        for iteration in range(2):
            _backward(model, 0, iteration)
            pipeline.step()
        _change(model, optimizer, change)
        _backward(model, 0, 2)
        computed = [None if p.grad is None else p.grad.clone() for p in trained]
        for _ in range(2):
            with pytest.raises(UserInputError) as refused:
                pipeline.step()
            assert str(refused.value) == (
                "parameters must not be frozen, unfrozen or added while a pipeline trains them; close the strategy and "
                "make a new one"
            )
        assert pipeline.flush().applied == (1,)
        for parameter, gradient in zip(trained, computed, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            if parameter.grad is not None and gradient is not None:
                assert torch.equal(parameter.grad, gradient), "it waits for a step that there may be"


def test_a_change_that_is_undone_is_none() -> None:
    found = []
    for refused in (False, True):
        model, optimizer = _build("freeze")
        with Pipelined(model, optimizer, width=1) as pipeline:
            for iteration in range(2):
                _backward(model, 0, iteration)
                if refused:
                    model[0].requires_grad_(False)
                    with pytest.raises(UserInputError, match="must not be frozen"):
                        pipeline.step()
                    model[0].requires_grad_(True)
                assert pipeline.step().applied == (iteration,)
        found.append(weights_sha256(model))
    assert found[0] == found[1]


def _others(ranks: Ranks, change: str) -> dict[str, str]:
    makes: dict[str, Any] = {
        "ddp": lambda *of: Ddp(*of, ranks=ranks),
        "a parameter server": lambda *of: ParameterServers(*of, ranks=ranks, staleness_bound=0),
        "local training": Local,
    }
    messages = {}
    for name, make in makes.items():
        model, optimizer = _build(change)
        with make(model, optimizer) as strategy:
            _backward(strategy.module, ranks.rank, 0)
            strategy.step()
            _change(model, optimizer, change)
            messages[name] = error_of(strategy.step)
    return messages


@pytest.mark.parametrize("change", ["unfreeze", "freeze", "add"])
def test_other_strategies_refuse_a_change(change: str) -> None:
    expected = (
        "UserInputError: parameters must not be frozen, unfrozen or added while {} trains them; close the strategy"
    )
    [messages] = run_ranks(1, _others, change)
    assert len(messages) == 3
    for name, message in messages.items():
        assert message.startswith(expected.format(name))


KINDS: dict[str, dict[str, Any]] = {
    "none": {"prediction": "none"},
    "flushed": {},
}


def _start(kind: str, *, frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer, Strategy]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "local steps":
        return model, optimizer, LocalSteps(model, optimizer, Windows(local_steps=2, outer="nesterov"))
    return model, optimizer, Pipelined(model, optimizer, **sections(**KINDS[kind]))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("none", "trained parameters must have 31 values, as in the state that is loaded; got 16"),
        (
            "flushed",
            "trained parameters (number 0) must be of shape (3, 4), as in the state that is loaded; got (4, 3)",
        ),
        (
            "local steps",
            "groups of the outer optimizer must have [4] parameters, as in the state that is loaded; got [2]",
        ),
    ],
)
def test_a_state_of_other_trained_parameters_is_refused_and_nothing_is_lost(kind: str, said: str) -> None:
    """It used to be loaded by half, after the gradients in flight had been dropped."""

    def train(model: nn.Module, strategy: Strategy) -> None:
        for iteration in range(4):
            model(torch.full((5, 4), iteration - 1.0)).square().mean().backward()
            strategy.step()

    model, _, strategy = _start(kind, frozen=False)
    with strategy:
        train(model, strategy)
        if kind == "flushed":
            strategy.flush()
        state = strategy.state_dict()
    model, optimizer, strategy = _start(kind, frozen=True)
    with strategy:
        train(model, strategy)
        before = repr((strategy.state_dict(), optimizer.state_dict(), model.state_dict()))
        with pytest.raises(UserInputError) as refused:
            strategy.load_state_dict(state)
        assert str(refused.value) == said
        assert repr((strategy.state_dict(), optimizer.state_dict(), model.state_dict())) == before
        strategy.load_state_dict(strategy.state_dict())


def test_a_momentum_that_a_schedule_sets_is_refused_with_momentum_correction() -> None:
    """Made after the pipeline, the schedule gave the optimizer a momentum in addition to that of the codec."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codec = codec_named("topk", momentum_correction=0.9)
    with Pipelined(model, optimizer, width=1, codec=codec) as pipeline:
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UserInputError, match=r"momentum must be 0 with momentum_correction.*; got 0\.95"):
            pipeline.step()
        optimizer.param_groups[0]["momentum"] = 0.0
        assert pipeline.step().applied == (0,), "the gradient is still there"


def _attached_with_momentum(ranks: Ranks) -> str:
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = attach(model, optimizer, codec=codec_named("topk", momentum_correction=0.9))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    with pytest.raises(UserInputError) as refused:
        model(torch.ones(1, 2)).sum().backward()
    pipeline.close()
    return str(refused.value)


def test_an_attached_loop_with_such_a_schedule_is_refused() -> None:
    [said] = run_ranks(1, _attached_with_momentum)
    assert "momentum must be 0 with momentum_correction" in said


def _state_of_two(ranks: Ranks) -> dict[str, Any]:
    model, optimizer = _build("freeze")
    with Pipelined(model, optimizer, ranks=ranks) as pipeline:
        _backward(model, ranks.rank, 0)
        pipeline.step()
        return pipeline.state_dict()


def test_a_state_of_another_number_of_ranks_is_refused() -> None:
    """Residuals and momentum of the ranks that were left out were lost."""
    state, _ = run_ranks(2, _state_of_two)
    model, optimizer = _build("freeze")
    expected = pytest.raises(UserInputError, match="world_size must be 2, as in the state that is loaded; got 1")
    with Pipelined(model, optimizer) as pipeline, expected:
        pipeline.load_state_dict(state)


def _states_with_more_and_fewer_residuals(ranks: Ranks, codec: CodecOptions) -> list[str]:
    said = []
    for frozen_at_first in (False, True):
        states = []
        for frozen in (frozen_at_first, not frozen_at_first):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            model[0].requires_grad_(not frozen)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with Pipelined(model, optimizer, width=1, codec=codec, ranks=ranks) as pipeline:
                model(torch.ones(5, 16)).square().mean().backward()
                pipeline.step()
                states.append(pipeline.state_dict())
                if len(states) == 2:
                    said.append(error_of(pipeline.load_state_dict, states[0]))
                    assert repr(pipeline.state_dict()) == repr(states[1]), "nothing is changed"
                    pipeline.load_state_dict(states[1])
    return said


@pytest.mark.parametrize(
    ("codec", "more", "fewer"),
    [
        (codec_named("int4"), "544", "272"),
        (codec_named("topk"), "544", "272"),
        (codec_named("topk", momentum_correction=0.9), "544", "272"),
        (codec_named("powersgd", low_rank=1), "544", "272"),
    ],
    ids=str,
)
def test_what_a_codec_remembers_of_other_parameters_is_refused(codec: CodecOptions, more: str, fewer: str) -> None:
    """The next gradient got residuals of other parameters, or the codec wrote past the end of the residuals."""
    said = "UserInputError: trained parameters must have {} values, as in the state that is loaded; got {}"
    for found in run_ranks(2, _states_with_more_and_fewer_residuals, codec):
        assert found == [said.format(more, fewer), said.format(fewer, more)]


def _with_each_strategy(ranks: Ranks, earlier: bool) -> dict[str, dict[str, Tensor]]:
    """Train a model whose first layer is frozen, perhaps after an ``earlier`` backward pass through all of it."""
    makes: dict[str, Any] = {
        "width 1": lambda *of: Pipelined(*of, width=1, ranks=ranks),
        "width 2": lambda *of: Pipelined(*of, width=2, ranks=ranks),
        "local steps": lambda *of: LocalSteps(*of, ranks=ranks, windows=Windows(local_steps=2)),
        "attach": lambda model, optimizer: attach(DistributedDataParallel(model), optimizer),
        "ddp": lambda *of: Ddp(*of, ranks=ranks),
        "ps": lambda *of: ParameterServers(*of, ranks=ranks, staleness_bound=0),
        "local": Local,
    }
    weights = {}
    for name, make in makes.items():
        model, optimizer = _build("freeze")
        if earlier:
            _backward(model, ranks.rank, 7)
        model[0].requires_grad_(False)
        with make(model, optimizer) as strategy:
            step = optimizer.step if name == "attach" else strategy.step
            for iteration in range(4):
                _backward(strategy.module, ranks.rank, iteration)
                step()
        weights[name] = model.state_dict()
    return weights


def test_gradients_from_before_a_strategy_was_made_are_dropped() -> None:
    """Every update applied those of frozen parameters, with the gradients of each rank alone."""
    untouched, _ = _build("freeze")
    [without], [after] = (run_ranks(1, _with_each_strategy, earlier) for earlier in (False, True))
    for name, weights in after.items():
        assert torch.equal(weights["0.weight"], untouched[0].weight), name
        assert not torch.equal(weights["2.weight"], untouched[2].weight), name
        for key, value in weights.items():
            assert torch.equal(value, without[name][key]), (name, key)
