"""Residuals of a codec, carried to the next gradient of another pipeline or other ranks."""

from __future__ import annotations

import pytest
import torch
from _ranks import run_ranks
from torch import Tensor, nn

from pipesgd import Pipelined
from pipesgd.codecs.options import CodecOptions, codec_named
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow


def _residual_in_the_next_gradient(ranks: Ranks, codec: str) -> tuple[list[float], list[float], list[float]]:
    """Return this rank's residual, its next gradient, and the update that follows at a learning rate of 1."""
    torch.manual_seed(0)
    model = nn.Linear(70, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.manual_seed(ranks.rank)
    inputs = torch.randn(4, 4, 70)
    with Pipelined(model, optimizer, width=1, codec="int4", ranks=ranks) as former:
        for batch in inputs[:3]:
            model(batch).square().mean().backward()
            former.step()
        [residual] = former.state_dict()["reducer"]["residuals"]
    with Pipelined(model, optimizer, width=1, codec=codec, ranks=ranks) as pipeline:
        pipeline.regroup(left_out=[residual])
        before = model.weight.detach().clone()
        model(inputs[3]).square().mean().backward()
        assert model.weight.grad is not None
        gradient = model.weight.grad.flatten().tolist()
        pipeline.step()
        update = (before - model.weight.detach()).flatten().tolist()
    return residual.tolist(), gradient, update


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_one_codec_has_left_out_is_in_the_next_gradient_of_another(world_size: int) -> None:
    found = run_ranks(world_size, _residual_in_the_next_gradient, "fp32")
    residuals, gradients, updates = (torch.tensor(one) for one in zip(*found, strict=True))
    assert (residuals.abs().max() > 1e-3) == (world_size > 1)
    torch.testing.assert_close(updates[0], (gradients + residuals).mean(dim=0), atol=1e-6, rtol=1e-5)
    assert all(torch.equal(updates[0], update) for update in updates)


def test_what_is_carried_is_added_once_also_by_one_rank() -> None:
    model = nn.Linear(1, 1)
    start = [parameter.item() for parameter in model.parameters()]
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0), width=1) as pipeline:
        pipeline.regroup(left_out=[torch.tensor([2.0, 4.0])])
        pipeline.load_state_dict(pipeline.state_dict())
        for _ in range(2):
            (0.0 * model(torch.ones(1, 1)).sum()).backward()
            pipeline.step()
    moved = [before - after.item() for before, after in zip(start, model.parameters(), strict=True)]
    assert moved == pytest.approx([2.0, 4.0])


def test_a_codec_with_the_momentum_of_gradients_is_refused() -> None:
    model = nn.Linear(4, 1)
    codec = codec_named("topk", momentum_correction=0.9)
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0), width=1, codec=codec) as pipeline:
        with pytest.raises(UserInputError, match=r"^momentum_correction must be 0 where ranks change; got 0.9$"):
            pipeline.regroup()
        model(torch.ones(1, 4)).sum().backward()
        pipeline.step()


def _regrouped(ranks: Ranks, width: int, codec: CodecOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Change the connections before an iteration; return the sums of gradients and of updates, and the residual."""
    torch.manual_seed(0)
    model = nn.Linear(70, 3, bias=False)
    torch.manual_seed(ranks.rank)
    start, gradients = model.weight.detach().clone(), torch.zeros(3, 70)
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=1.0), width=width, codec=codec, ranks=ranks) as one:
        for iteration, batch in enumerate(torch.randn(6, 4, 70)):
            for _ in range({3: 1, 5: 2}.get(iteration, 0)):
                one.regroup()
            model(batch).sum().backward()  # whose gradient depends on no weight
            assert model.weight.grad is not None
            gradients += model.weight.grad
            one.step()
        one.flush()
        [residual] = one.state_dict()["reducer"]["residuals"]
    return gradients, start - model.weight.detach(), residual.view(3, 70)


@pytest.mark.parametrize("codec", [codec_named("int4"), codec_named("powersgd", low_rank=1, factors="int8")], ids=str)
@pytest.mark.parametrize("width", [1, 3])
def test_nothing_is_lost_where_ranks_connect_anew(width: int, codec: CodecOptions) -> None:
    """Updates, and the mean of what is still left out, are together the mean of the ranks' gradients."""
    found = run_ranks(2, _regrouped, width, codec)
    gradients, updates, residuals = (torch.stack(one) for one in zip(*found, strict=True))
    assert torch.equal(updates[0], updates[1])
    assert residuals.abs().max() > 1e-3
    torch.testing.assert_close(updates[0] + residuals.mean(0), gradients.mean(0), atol=1e-4, rtol=1e-5)
