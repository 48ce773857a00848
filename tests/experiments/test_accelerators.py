"""Emulated accelerators: what they take from the real model, when gradients are released, and how times vary."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _ranks import run_ranks
from _runs import run, succeed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from experiments import accelerators
from experiments.accelerators import JUDGED, Accelerator, Emulated, Jitter, at_least, parse, synthetic
from pipesgd.data import build_model
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks

MLP: dict[str, Any] = {"sample_shape": (1, 2, 2), "num_classes": 3, "hidden_sizes": (8,)}
IMAGES, LABELS = torch.ones(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1])


class Clock:
    """A clock that stands still unless somebody sleeps or ``advance``s it, in place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(accelerators, "time", made)
    return made


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def train(model: nn.Module, iterations: int, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    for _ in range(iterations):
        optimizer.zero_grad()
        cross_entropy(model(IMAGES), LABELS).backward()
        optimizer.step()


def test_fixed_gradients_are_those_of_the_seed_in_every_pass_of_every_rank() -> None:
    first, second = synthetic("75ms", **MLP, seed=3), synthetic("10ms,jitter=0.2", **MLP, seed=3, rank=1)
    train(first, 1)
    train(second, 3, momentum=0.9)
    assert len(gradients(first)) == 4
    assert all(map(torch.equal, gradients(first), gradients(second)))
    assert all(one.abs().sum() > 0 for one in gradients(first))
    other = synthetic("75ms", **MLP, seed=4)
    train(other, 1)
    assert not any(map(torch.equal, gradients(first), gradients(other)))
    cross_entropy(first(IMAGES[:2]), LABELS[:2]).backward()  # of another batch size, and accumulated
    assert all(map(torch.equal, gradients(first), [2 * one for one in gradients(second)]))


def test_a_synthetic_model_returns_zeros_of_the_shape_of_its_models_outputs() -> None:
    text = synthetic("1ms,model=transformer", sample_shape=(6,), num_classes=7, heads=2, embedding=8, layers=1)
    outputs = text(torch.zeros(4, 6, dtype=torch.int64))
    assert outputs.shape == (4, 6, 7)
    assert not outputs.any()
    assert text(torch.zeros(3, 6, dtype=torch.int64)).shape == (3, 6, 7)


@pytest.mark.parametrize("make", [synthetic, at_least])
def test_layers_release_their_gradients_one_after_the_other(clock: Clock, make: Callable[..., Emulated]) -> None:
    """Layers of 4 * 8 and 8 * 3 weights: the multiplications and additions count, and the parameters themselves."""
    model = make("90ms,forward=0.5", **MLP)
    released: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():

        def note(_: Tensor, name: str = name) -> None:
            released.append((name, clock.now - begin))

        parameter.register_post_accumulate_grad_hook(note)
    for _ in range(2):
        released.clear()
        begin = clock.now
        loss = cross_entropy(model(IMAGES), LABELS)
        assert clock.now - begin == pytest.approx(0.045)
        loss.backward()
        costs = [2 * 5 * 4 * 8 + 40, 2 * 5 * 8 * 3 + 27]
        first = 0.045 + 0.045 * costs[1] / sum(costs)
        assert dict(released) == {
            "model.1.weight": pytest.approx(0.09),
            "model.1.bias": pytest.approx(0.09),
            "model.3.weight": pytest.approx(first),
            "model.3.bias": pytest.approx(first),
        }
        assert [name[:7] for name, _ in released] == ["model.3"] * 2 + ["model.1"] * 2


def test_convolutions_take_their_time_although_they_have_few_weights(clock: Clock) -> None:
    model = synthetic("1s,forward=0.5,model=convnet", sample_shape=(1, 28, 28), num_classes=10)
    model(torch.zeros(2, 1, 28, 28))
    large = model.get_parameter("model.7.weight")  # 94 % of the weights, and 7 % of the operations
    when: list[float] = []
    large.register_post_accumulate_grad_hook(lambda _: when.append(clock.now))
    begin = clock.now
    model(torch.zeros(2, 1, 28, 28)).sum().backward()
    assert when[0] - begin == pytest.approx(0.55, abs=0.01)
    assert clock.now - begin == pytest.approx(1.0)


def test_real_computation_is_part_of_the_time(clock: Clock) -> None:
    class Slow(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                clock.advance(0.02)
            return super().forward(inputs)

    model = Emulated(Slow(4, 3), Accelerator(seconds=0.09, synthetic=False, forward=0.5))
    begin = clock.now
    loss = model(IMAGES.flatten(1)).sum()
    assert clock.slept == pytest.approx([0.025])
    clock.advance(0.01)
    loss.backward()
    assert sum(clock.slept) == pytest.approx(0.06)
    assert clock.now - begin == pytest.approx(0.09)


def test_evaluation_does_not_wait_and_gives_the_models_outputs(clock: Clock) -> None:
    model = at_least("1h", **MLP).eval()
    assert torch.equal(model(IMAGES), model.model(IMAGES))
    assert not synthetic("1h", **MLP).eval()(IMAGES).any()
    with torch.no_grad():
        model.train()(IMAGES)
    assert not clock.slept


def test_real_training_gives_the_very_weights_of_the_model_without_an_accelerator() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    model[1].weight.requires_grad_(False)
    weights = {}
    for name, one in (
        ("alone", model),
        ("emulated", Emulated(copy.deepcopy(model), Accelerator(seconds=9, synthetic=False))),
    ):
        torch.manual_seed(2)
        train(one, 4, momentum=0.9)
        weights[name] = [value.clone() for value in one.state_dict().values()]
    assert all(map(torch.equal, weights["alone"], weights["emulated"]))


def test_a_copy_of_a_trained_model_waits_by_itself(clock: Clock) -> None:
    model = synthetic("75ms,jitter=0.3", **MLP)
    train(model, 2)
    other = copy.deepcopy(model)
    taken = []
    for one in (model, other):
        begin = clock.now
        train(one, 1)
        taken.append(clock.now - begin)
    assert taken[0] == pytest.approx(taken[1])
    assert len(gradients(other)) == 4
    assert [len(one._backward_hooks or ()) for one in model.parameters()] == [1] * 4  # those of earlier passes are gone


@pytest.mark.parametrize("kind", [True, False])
def test_weights_that_two_layers_share_are_trained(clock: Clock, kind: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[2].weight = model[1].weight
    begin = clock.now
    train(Emulated(model, Accelerator(seconds=0.1, synthetic=kind)), 2)
    assert clock.now - begin == pytest.approx(0.2)


def test_a_slow_rank_takes_longer(clock: Clock) -> None:
    taken = []
    for rank in range(3):
        begin = clock.now
        train(synthetic("100ms,slow=1x1.5,slow=2x3", **MLP, rank=rank, world_size=3), 1)
        taken.append(clock.now - begin)
    assert taken == pytest.approx([0.1, 0.15, 0.3])


def factors(number: int, *, rank: int = 0, seed: int = 0, jitter: float = 0.0, persistence: float = 0.0) -> Any:
    accelerator = Accelerator(seconds=1, synthetic=True, jitter=jitter, persistence=persistence)
    made = Jitter(accelerator, seed=seed, rank=rank)
    return np.array([made.next() for _ in range(number)])


@pytest.mark.parametrize("persistence", [0.0, 0.8])
def test_jitter_has_its_mean_variation_and_correlation(persistence: float) -> None:
    found = factors(4000, jitter=0.3, persistence=persistence)
    independent = len(found) * (1 - persistence) / (1 + persistence)
    assert found.mean() == pytest.approx(1, abs=4 * 0.3 / independent**0.5)
    assert found.std() == pytest.approx(0.3, rel=0.15)
    logs = np.log(found)
    assert np.corrcoef(logs[1:], logs[:-1])[0, 1] == pytest.approx(persistence, abs=0.07)


def test_jitter_is_a_function_of_seed_rank_and_pass() -> None:
    assert list(factors(5, jitter=0.3)) == list(factors(9, jitter=0.3))[:5]
    assert len({*factors(5, jitter=0.3), *factors(5, jitter=0.3, rank=1), *factors(5, jitter=0.3, seed=1)}) == 15
    assert list(factors(3)) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("75", "time of an accelerator's pass must have a unit such as 75us, 75ms or 75s; got '75'"),
        ("0ms", "time of an accelerator's pass must be above 0; got 0.0"),
        ("75ms,jiter=0.1", "option of an accelerator must be one of forward, jitter, persistence, slow, model; "
         "got 'jiter' (did you mean jitter?)"),
        ("75ms,jitter", "jitter must have a number; got 'jitter'"),
        ("75ms,jitter=-1", "jitter must be at least 0; got -1.0"),
        ("75ms,jitter=nan", "jitter must be at least 0; got nan"),
        ("1s,jitter=1,jitter=2", "jitter of an accelerator must be given once; got it twice in '1s,jitter=1,jitter=2'"),
        ("75ms,persistence=0.9", "persistence must come with a jitter above 0; got 0.9 without one"),
        ("75ms,jitter=1,persistence=1", "persistence must be at least 0 and below 1; got 1"),
        ("75ms,forward=1", "forward must be a share between 0 and 1; got 1"),
        ("75ms,slow=3", "slow must have a number; got 'slow=3'"),
        ("75ms,jitter=\u0663", "jitter must have a number; got 'jitter=\u0663'"),
        ("75ms,forward=\n", "forward must have a number; got 'forward=\\n'"),
        ("75ms,slow=ax2", "slow must be a rank and its factor, once for a rank, as 3x1.5; got 'slow=ax2'"),
        ("75ms,slow=1x2,slow=1x3", "slow must be a rank and its factor, once for a rank, as 3x1.5; got 'slow=1x3'"),
        ("75ms,slow=1x0", "factor of slow rank 1 must be above 0; got 0.0"),
        ("75ms,model=", "model must be one of mlp, convnet, resnet18, alexnet, transformer, module:function; got ''"),
        ("75ms,model=convnet", "hidden-sizes must be left out with --model convnet, which has no use for it "
         "(it belongs to mlp or module:function); got (8,)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        synthetic(text, **MLP)
    assert str(caught.value) == message


def test_slow_ranks_exist() -> None:
    synthetic("75ms,slow=3x2", **MLP, world_size=4)
    with pytest.raises(UserInputError, match=r"^slow must name ranks from 0 to 2; got 3$"):
        synthetic("75ms,slow=3x2", **MLP, world_size=3)


def test_options_are_read() -> None:
    accelerator, model = parse("2s,slow=1x2,persistence=0.5,forward=0.2,model=own:net=4,jitter=0.1", synthetic=False)
    assert model == "own:net=4"
    assert accelerator == Accelerator(
        seconds=2, synthetic=False, forward=0.2, jitter=0.1, persistence=0.5, slow={1: 2.0}
    )


@pytest.mark.parametrize(("real", "refused"), [(0.029, False), (0.031, True)])
def test_an_accelerator_that_is_not_much_longer_than_its_real_part_is_refused(
    clock: Clock, real: float, refused: bool
) -> None:
    """The first passes may be longer: the median counts."""
    model = at_least("90ms", **MLP)
    for number in range(JUDGED):
        loss = model(IMAGES).sum()
        clock.advance(0.08 if number < 3 else real)
        loss.backward()
    if refused:
        message = "^accelerator's pass must take at least 3 times as long as the model's own computation; "
        with pytest.raises(UserInputError, match=message + r"got 90.0 ms and 31.0 ms of computation \(median of 10"):
            model(IMAGES)
    for _ in range(2):
        clock.advance(1.0)  # what happens between passes is not part of one; later ones are not judged
        if not refused:
            model(IMAGES).sum().backward()


# ---------------------------------------------------------------- real ranks

SHORT = "--dataset digits --hidden-sizes 20 --batch-size 8 --iterations 6"


@pytest.mark.slow
def test_accelerators_are_trained_like_any_model(tmp_path: Path) -> None:
    plain = succeed(2, f"{SHORT} --width 2", tmp_path / "plain")
    real = succeed(2, f"{SHORT} --width 2 --model experiments.accelerators:at_least=20ms,jitter=0.5", tmp_path / "real")
    assert real["final"] == plain["final"]
    name = "experiments.accelerators:synthetic=1ms,slow=1x2"
    fixed = succeed(2, f"{SHORT} --model {name} --width 1", tmp_path / "fixed")
    assert fixed["options"]["model"] == name
    assert json.loads((tmp_path / "fixed" / "run.json").read_text())["options"]["model"] == name
    lines = [json.loads(line) for line in (tmp_path / "fixed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx([np.log(10)] * 6)


@pytest.mark.slow
def test_a_real_part_that_is_too_long_ends_the_run_with_one_line(tmp_path: Path) -> None:
    words = "--dataset digits --iterations 30 --model experiments.accelerators:at_least=1us"
    for error, _, _ in run(2, words, tmp_path):
        assert "accelerator's pass must take at least 3 times as long as the model's own computation" in error


def _with_ddp(ranks: Ranks) -> list[Tensor]:
    torch.manual_seed(0)
    model = build_model("mlp", **MLP)
    ddp = DistributedDataParallel(Emulated(model, Accelerator(seconds=1e-3, synthetic=True), rank=ranks.rank))
    train(ddp, 3)
    return gradients(ddp)


@pytest.mark.slow
def test_ddp_gets_fixed_gradients_too() -> None:
    first, second = run_ranks(2, _with_ddp)
    alone = synthetic("1ms", **MLP)
    train(alone, 1)
    for others in (first, second):
        assert all(map(torch.equal, others, gradients(alone)))
