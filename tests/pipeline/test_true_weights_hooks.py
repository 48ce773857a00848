"""Evaluating, saving and loading a model between steps: with its true weights, without a word from the user."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from _sections import sections
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipesgd import LocalSteps, Pipelined, Updates, UserInputError, Windows, Wire

INPUTS = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).view(3, 4)


class TwoParts(nn.Module):
    """A model with parts that may be called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.head = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.encoder(inputs))
        return outputs


def make_model() -> TwoParts:
    torch.manual_seed(3)
    return TwoParts().double()


def train(model: nn.Module, pipeline: Pipelined, iterations: int) -> None:
    for _ in range(iterations):
        model(INPUTS).square().sum().backward()
        pipeline.step()


@pytest.fixture
def trained() -> Iterator[tuple[TwoParts, Pipelined, TwoParts, TwoParts]]:
    """Yield a model between two steps, its pipeline, and copies of it with true weights and with predicted ones."""
    model = make_model()
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), width=2) as pipeline:
        train(model, pipeline, 3)
        true, predicted = make_model(), make_model()
        copy_parameters(model, predicted)
        with pipeline.true_weights():
            copy_parameters(model, true)
        assert not torch.equal(true(INPUTS), predicted(INPUTS))
        yield model, pipeline, true, predicted


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(target.parameters(), source.parameters(), strict=True):
            one.copy_(other)


def holds(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


Trained = tuple[TwoParts, Pipelined, TwoParts, TwoParts]


@pytest.mark.parametrize("mode", [True, False])
def test_without_gradients_the_true_weights_are_used_and_the_predicted_ones_return(
    trained: Trained, mode: bool
) -> None:
    model, _, true, predicted = trained
    model.train(mode)
    with torch.no_grad():
        assert torch.equal(model(INPUTS), true(INPUTS))
    assert holds(model, predicted)


def test_in_evaluation_mode_the_true_weights_are_used_until_the_model_trains_again(trained: Trained) -> None:
    model, _, true, predicted = trained
    model.eval()
    outputs = model(INPUTS)
    assert torch.equal(outputs, true(INPUTS))
    assert holds(model, true), "a graph needs them"
    outputs.sum().backward()
    true(INPUTS).sum().backward()
    for own, wanted in zip(model.parameters(), true.parameters(), strict=True):
        assert own.grad is not None
        assert wanted.grad is not None
        assert torch.equal(own.grad, wanted.grad)
        own.grad = None
    model.train()
    assert torch.equal(model(INPUTS), predicted(INPUTS))


@pytest.mark.parametrize("mode", [True, False])
def test_a_part_that_is_called_by_itself_follows_the_whole_models_mode(trained: Trained, mode: bool) -> None:
    model, _, true, predicted = trained
    wanted = predicted if mode else true
    model.train(mode)
    assert torch.equal(model.head(model.encoder(INPUTS)), wanted.head(wanted.encoder(INPUTS)))
    model.train()
    assert torch.equal(model.encoder(INPUTS), predicted.encoder(INPUTS))


@pytest.mark.parametrize("reentrant", [True, False])
def test_parts_in_evaluation_mode_or_without_gradients_train_with_the_rest(trained: Trained, reentrant: bool) -> None:
    model, _, _, predicted = trained
    model.head.eval()
    inputs = INPUTS.clone().requires_grad_()

    def compute(of: TwoParts) -> None:
        hidden = checkpoint(of.encoder, inputs, use_reentrant=reentrant)
        of.head(hidden).square().sum().backward()

    for of in (model, predicted):
        of.zero_grad()
        compute(of)
    for own, wanted in zip(model.parameters(), predicted.parameters(), strict=True):
        assert torch.equal(own.grad, wanted.grad)  # type: ignore[arg-type]
    model.zero_grad()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_the_whole_model_trains_on_predicted_weights_unless_it_is_reentrant(
    trained: Trained, reentrant: bool
) -> None:
    model, _, true, predicted = trained
    outputs = checkpoint(model, INPUTS.clone().requires_grad_(), use_reentrant=reentrant)
    assert torch.equal(outputs, (true if reentrant else predicted)(INPUTS))
    if not reentrant:
        outputs.square().sum().backward()
        predicted(INPUTS).square().sum().backward()
        for own, wanted in zip(model.parameters(), predicted.parameters(), strict=True):
            assert torch.equal(own.grad, wanted.grad)  # type: ignore[arg-type]
    model.zero_grad()


MAKES: dict[str, Callable[..., Pipelined | LocalSteps]] = {
    "width 2": functools.partial(Pipelined, width=2),
    "buckets": functools.partial(Pipelined, width=1, wire=Wire(buckets=2)),
    "late buckets": functools.partial(Pipelined, width=2, wire=Wire(buckets=2)),
    "none": functools.partial(Pipelined, width=2, updates=Updates(prediction="none")),
    "local steps": functools.partial(LocalSteps, windows=Windows(local_steps=8), width=1),
}
PREDICTED = ("width 2", "late buckets", "local steps")


@pytest.mark.parametrize("called", ["whole", "parts"])
@pytest.mark.parametrize("kind", MAKES)
def test_gradients_of_evaluation_mode_are_refused_where_weights_are_predicted(kind: str, called: str) -> None:
    """They were computed on the true weights: without the prediction, or the rank's own steps of a window."""
    model = make_model()

    def iterate() -> None:
        outputs = model(INPUTS) if called == "whole" else model.head(model.encoder(INPUTS))
        outputs.square().sum().backward()
        pipeline.step()

    with MAKES[kind](model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)) as pipeline:
        model.eval()
        iterate()
        with (
            pytest.raises(UserInputError, match=r"^model must be in training mode .*; got gradients of evaluation mode")
            if kind in PREDICTED
            else contextlib.nullcontext()
        ):
            iterate()
        model.zero_grad()
        model.train()
        model.encoder.eval()
        iterate()
        assert pipeline.iteration == 3 - (kind in PREDICTED)


@pytest.mark.parametrize("kind", PREDICTED)
def test_gradients_that_are_dropped_or_from_before_an_evaluation_are_not_refused(kind: str) -> None:
    weights = []
    for evaluates in (False, True):
        model = make_model()
        with MAKES[kind](model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)) as pipeline:
            for _ in range(4):
                model(INPUTS).square().sum().backward()
                if evaluates:
                    model.eval()
                    model(INPUTS)
                pipeline.step()
                if evaluates:
                    with pipeline.accumulating():
                        model(INPUTS).sum().backward()
                    model.zero_grad()
                    model.train()
                    with pipeline.true_weights():
                        model(INPUTS)
        weights.append(model)
    assert holds(*weights)


def test_evaluating_while_a_backward_pass_is_still_to_come_changes_nothing(trained: Trained) -> None:
    model, _, true, predicted = trained
    loss, wanted = model(INPUTS).square().sum(), predicted(INPUTS).square().sum()
    with torch.no_grad():
        assert torch.equal(model(INPUTS), true(INPUTS))
    model.state_dict()
    loss.backward()
    wanted.backward()
    assert torch.equal(model.head.weight.grad, predicted.head.weight.grad)  # type: ignore[arg-type]
    model.zero_grad()


def test_a_backward_pass_through_the_other_weights_fails_as_torchs_own(trained: Trained) -> None:
    model, _, _, _ = trained
    loss = model(INPUTS).square().sum()
    model.eval()
    model(INPUTS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.train()


def test_an_exception_in_an_evaluation_leaves_the_predicted_weights(trained: Trained) -> None:
    model, _, true, predicted = trained
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 7, dtype=torch.float64))
    assert holds(model, predicted)
    model.eval()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 7, dtype=torch.float64))
    assert torch.equal(model.head(model.encoder(INPUTS)), true(INPUTS)), "hooks of parts work again"
    model.train()
    assert torch.equal(model(INPUTS), predicted(INPUTS))


@pytest.mark.parametrize("part", ["", "encoder"])
def test_a_state_dict_has_the_true_weights(trained: Trained, part: str) -> None:
    model, _, true, predicted = trained
    saved = model.get_submodule(part).state_dict()
    assert saved.keys() == true.get_submodule(part).state_dict().keys()
    for name, wanted in true.get_submodule(part).state_dict().items():
        assert torch.equal(saved[name], wanted)
    assert holds(model, predicted)


def test_a_state_made_while_the_true_weights_are_shown_keeps_them(trained: Trained) -> None:
    model, pipeline, true, predicted = trained
    with pipeline.true_weights():
        states = [model.state_dict()]
    model.eval()
    model(INPUTS)
    states.append(model.state_dict())
    model.train()
    model(INPUTS)
    assert holds(model, predicted)
    for state in states:
        for name, wanted in true.state_dict().items():
            assert torch.equal(state[name], wanted)


def test_a_state_dict_that_cannot_be_made_leaves_a_model_that_trains_as_before(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, true, predicted = trained

    def fail(*arguments: Any) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(model.head, "_save_to_state_dict", fail)
        with pytest.raises(OSError, match="no room"):
            model.state_dict()
    assert torch.equal(model(INPUTS), predicted(INPUTS))
    assert torch.equal(model.state_dict()["head.weight"], true.head.weight)


def test_loaded_weights_are_what_is_trained_on(trained: Trained) -> None:
    model, pipeline, _, _ = trained
    other = make_model()
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(INPUTS), other(INPUTS))
    with pipeline.true_weights():
        assert holds(model, other)


@pytest.mark.parametrize("shown_by", ["evaluation", "part without gradients", "true_weights"])
def test_weights_loaded_while_the_true_ones_are_shown_are_what_is_trained_on(trained: Trained, shown_by: str) -> None:
    model, pipeline, true, _ = trained
    other = TwoParts().double()
    with pipeline.true_weights() if shown_by == "true_weights" else contextlib.nullcontext():
        model.eval()
        with torch.set_grad_enabled(shown_by == "evaluation"):
            (model.encoder if shown_by == "part without gradients" else model)(INPUTS)
        assert holds(model, true)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(INPUTS), other(INPUTS))
    model.train()
    assert torch.equal(model(INPUTS), other(INPUTS))
    with pipeline.true_weights():
        assert holds(model, other)


def evaluate_and_save(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(INPUTS)
    model(INPUTS)
    model.state_dict()
    model.train()
    with torch.no_grad():
        model(INPUTS)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_evaluating_and_saving_leave_the_trajectory_as_it_is(width: int) -> None:
    weights = []
    for between in (lambda model: None, evaluate_and_save):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with Pipelined(model, optimizer, width=width) as pipeline:
            for _ in range(6):
                train(model, pipeline, 1)
                between(model)
        weights.append(model)
    assert holds(*weights)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_nothing_to_do_with_the_pipeline(
    trained: Trained, make_copy: Callable[[nn.Module], nn.Module]
) -> None:
    model, _, _, predicted = trained
    duplicate = make_copy(model)
    duplicate.eval()
    assert torch.equal(duplicate(INPUTS), predicted(INPUTS)), "whatever reads parameters gets the predicted ones"
    duplicate.load_state_dict(duplicate.state_dict())
    assert holds(model, predicted)


def test_closing_takes_the_hooks_off() -> None:
    model = make_model()
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert hooks_of(model)
    assert not hooks_of(model)


def hooks_of(model: nn.Module) -> int:
    names = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names) + sum(
        len(module._load_state_dict_pre_hooks) for module in model.modules()
    )


def test_a_model_that_is_never_predicted_has_no_hooks() -> None:
    for options in ({"width": 1}, {"prediction": "none"}):
        model = make_model()
        with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), **sections(**options)):  # type: ignore[arg-type]
            assert not hooks_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compiled before", "compiled after", "compiled in place"])
@pytest.mark.parametrize("make", [make_model, lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).double()])
def test_a_compiled_model_is_evaluated_with_true_weights_in_the_same_graphs(
    how: str, make: Callable[[], nn.Module]
) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model = make()
    compiled = torch.compile(model, backend=counter) if how == "compiled before" else model
    with Pipelined(compiled, torch.optim.SGD(model.parameters(), lr=0.05), width=2) as pipeline:
        if how == "compiled after":
            compiled = torch.compile(model, backend=counter)
        if how == "compiled in place":
            model.compile(backend=counter)
        true = make()
        for _ in range(3):
            train(compiled, pipeline, 1)
            with pipeline.true_weights():
                copy_parameters(model, true)
            for mode, context in ((True, torch.no_grad()), (False, torch.no_grad()), (False, contextlib.nullcontext())):
                compiled.train(mode)
                with context:
                    torch.testing.assert_close(compiled(INPUTS), true(INPUTS))
            compiled.train()
            if how == "compiled before":  # the mode is that of the model, whatever its wrapper says
                model.eval()
                torch.testing.assert_close(compiled(INPUTS), true(INPUTS))
            model.train()
    assert counter.frame_count == 2, "one graph with gradients and one without"


def test_what_torch_saves_can_be_loaded_without_the_pipeline(trained: Trained) -> None:
    model, _, true, _ = trained
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = make_model()
    other.load_state_dict(torch.load(file))
    assert holds(other, true)
