"""Asynchronous elastic averaging against the paper's algorithm, and exact sums that no timing can change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _small_problem import regress, small_problem
from torch import Tensor, nn

from pipesgd.errors import NonFiniteGradientError, UserInputError
from pipesgd.ranks import Ranks
from pipesgd.replicas import weights_sha256
from pipesgd.systems.servers.elastic import ElasticServers

pytestmark = pytest.mark.slow

Options = dict[str, Any]


def start(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> ElasticServers | None:
    """Return the strategy on a worker; on a dedicated server, serve until no worker needs it, then return None."""
    strategy = ElasticServers(model, optimizer, timeout=20.0, ranks=ranks, **options)
    dedicated = options.get("placement") == "dedicated"
    if ranks.rank < ranks.world_size - (options.get("servers", 1) if dedicated else 0):
        return strategy
    strategy.serve()
    return None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# ---- One worker: the algorithm


def algorithm_1(model: nn.Module, batches: list[Any], period: int, rate: float) -> tuple[list[str], list[Tensor]]:
    """Train ``model`` by the paper's algorithm 1 for one worker; return hashes of x in every iteration, and the centre.

    A difference is subtracted after the gradient step of its iteration. The algorithm adds up the same two terms.
    """
    optimizer = _adamw(model)
    parameters = list(model.parameters())
    centre = [parameter.detach().clone() for parameter in parameters]
    hashes = []

    @torch.no_grad()
    def difference() -> list[Tensor]:
        found = [rate * (x - own) for x, own in zip(parameters, centre, strict=True)]
        for own, d in zip(centre, found, strict=True):
            own.add_(d)
        return found

    for iteration, batch in enumerate(batches):
        due = difference() if iteration > 0 and iteration % period == 0 else []
        optimizer.zero_grad()
        regress(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for x, d in zip(parameters, due, strict=False):
                x.sub_(d)
        hashes.append(weights_sha256(model))
    difference()  # of the last iterations
    return hashes, centre


def _train_alone(ranks: Ranks, options: Options) -> Any:
    model, batches = small_problem(3, [4, 5, 2], 7, 1)
    strategy = start(ranks, model, _adamw(model), options)
    if strategy is None:
        return None
    hashes = []
    for (batch,) in batches:
        regress(model, batch).backward()
        report = strategy.step()
        assert report.applied == (strategy.iteration - 1,)
        assert report.schedule_steps == 1
        hashes.append(weights_sha256(model))
    strategy.flush()
    once = weights_sha256(model)
    strategy.flush()
    assert weights_sha256(model) == once, "nothing twice"
    strategy.close()
    return hashes, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("options", [{}, {"servers": 2, "placement": "dedicated"}])
def test_one_worker_is_the_papers_algorithm_bit_for_bit(period: int, options: Options) -> None:
    world_size = 1 + (options.get("servers", 0))
    ours, weights = run_ranks(world_size, _train_alone, {"local_steps": period, "moving_rate": 0.3, **options})[0]
    model, batches = small_problem(3, [4, 5, 2], 7, 1)
    hashes, centre = algorithm_1(model, [batch for (batch,) in batches], period, 0.3)
    assert ours == hashes
    assert all(map(torch.equal, weights, centre))


# ---- Several workers: exact sums


def _pull_each_other(ranks: Ranks, options: Options) -> Any:
    """Train with constant gradients; return this worker's weights, the centre, and the bytes announced and counted."""
    model = nn.Linear(3, 2, bias=False).double()
    nn.init.ones_(model.weight)
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=1.0), options)
    if strategy is None:
        return None
    announced = 0
    for _ in range(7):
        (model(torch.ones(1, 3, dtype=torch.float64)).sum() * (ranks.rank + 1)).backward()
        announced += strategy.step().wire_bytes
    counted = strategy.bytes_sent
    assert not strategy.replicated
    own = model.weight.detach().clone()
    with strategy.true_weights():
        centre = model.weight.detach().clone()
    assert torch.equal(model.weight, own)
    strategy.flush()
    strategy.close()
    return own, centre, model.weight.detach(), announced, counted


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(3, {}), (3, {"servers": 2}), (4, {"servers": 2, "placement": "dedicated"}), (3, {"placement": "dedicated"})],
)
def test_workers_and_the_centre_pull_each_other_by_the_same_amounts(world_size: int, options: Options) -> None:
    """Whatever the order of the exchanges, the sum of all weights is that of the gradients; all numbers are exact."""
    dedicated = options.get("placement") == "dedicated"
    workers = world_size - (options.get("servers", 1) if dedicated else 0)
    options = {"local_steps": 2, "moving_rate": 0.5, **options}
    results = run_ranks(world_size, _pull_each_other, options)[:workers]
    own = [result[0] for result in results]
    centre = results[0][1]
    moved = 7.0 * sum(range(1, workers + 1))
    assert torch.equal(sum(own) + centre, torch.full((2, 3), workers + 1 - moved, dtype=torch.float64))
    for _, same, last, announced, counted in results:
        assert torch.equal(same, centre), "the centre that is evaluated is the same everywhere"
        assert torch.equal(last, results[0][2]), "a flush gives all workers the centre"
        assert announced > 0
        if dedicated:
            assert announced == counted


def test_the_default_moves_the_centre_by_0_9_of_its_way_to_the_workers() -> None:
    results = run_ranks(2, _one_exchange)
    assert results == [1.0 - 0.45, 1.0 - 0.45]


def _one_exchange(ranks: Ranks) -> float:
    """Let the worker on rank 0 alone move, by 1; return the centre."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=1.0), {})
    assert strategy is not None
    if ranks.rank == 0:
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        strategy.step()
    strategy.flush()
    strategy.close()
    return model.weight.item()


def _set_weights(ranks: Ranks, period: int) -> list[float]:
    """Set the weight to 8 after an iteration; return this worker's after another one without movement, and the last."""
    model = nn.Linear(1, 1, bias=False).double()
    strategy = start(ranks, model, torch.optim.SGD(model.parameters(), lr=1.0), {"local_steps": period})
    assert strategy is not None
    found = []
    for moves in (True, False):
        (model(torch.ones(1, 1, dtype=torch.float64)).sum() * moves).backward()
        strategy.step()
        found.append(model.weight.item())
        if moves:
            with strategy.true_weights(), torch.no_grad():
                model.weight.fill_(8.0)
            found.append(model.weight.item())
    strategy.flush()
    strategy.close()
    return [*found[1:], model.weight.item()]


@pytest.mark.parametrize("period", [1, 2])
def test_weights_that_were_set_are_not_moved_by_an_answer_about_earlier_ones(period: int) -> None:
    """With period 1, an answer is on its way when they are set."""
    assert run_ranks(2, _set_weights, period) == [[8.0, 8.0, 8.0]] * 2


# ---- State, and values that are refused


def _resume(ranks: Ranks, options: Options) -> Any:
    model, batches = small_problem(3, [4, 5, 2], 8, 1)
    optimizer = _adamw(model)
    strategy = start(ranks, model, optimizer, options)
    if strategy is None:
        return None

    def run(first: int, last: int) -> str:
        for (batch,) in batches[first:last]:
            regress(model, batch).backward()
            strategy.step()
        return weights_sha256(model)

    run(0, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), strategy.state_dict()))
    before = run(4, 7)
    run(7, 8)  # something else is under way when the state is loaded
    for part, state in zip((model, optimizer, strategy), saved, strict=True):
        part.load_state_dict(state)
    assert strategy.iteration == 4
    again = run(4, 7)
    strategy.flush()
    strategy.close()
    return before, again


@pytest.mark.parametrize("options", [{}, {"placement": "dedicated"}])
@pytest.mark.parametrize("period", [2, 3])
def test_a_state_dict_continues_bit_for_bit_with_an_answer_on_its_way(options: Options, period: int) -> None:
    """After iteration 4, an exchange has just begun with period 2, and one is over with period 3."""
    world_size = 2 if options else 1
    before, again = run_ranks(world_size, _resume, {"local_steps": period, **options})[0]
    assert again == before


def test_weights_that_are_not_finite_are_not_sent() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    strategy = ElasticServers(model, torch.optim.SGD(model.parameters(), lr=1e38))
    (model(torch.ones(1, 1)).sum() * 1e30).backward()
    with pytest.raises(NonFiniteGradientError):
        strategy.step()
    strategy.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "local-steps must be at least 1; got 0"),
        ({"moving_rate": 0.0}, "moving-rate must be above 0; got 0"),
        ({"moving_rate": 1.1}, "moving-rate must be at most 1; got 1.1"),
        ({"servers": 0}, "servers must be at least 1; got 0"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be stop or skip; got 'ignore'"),
    ],
)
def test_values_out_of_range_are_refused(options: Options, message: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UserInputError, match=message):
        ElasticServers(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)
