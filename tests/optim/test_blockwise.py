"""Steps block by block compared with torch's own whole steps: the same bits, whatever the sizes and options."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pipesgd.optim import blockwise, hyperparameters
from pipesgd.optim.blockwise import COUNT, PIECE, blocks, in_blocks, pieces, steps_by_itself, steps_in_blocks

VECTORS = 64
"""Values that a vectorised loop takes at once, at most; tests cut into pieces this short, so that there are many."""
SIZES = st.one_of(st.integers(0, 3 * VECTORS), st.sampled_from([VECTORS, VECTORS + 1, 2 * VECTORS - 1, 5 * VECTORS]))
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adam, decoupled": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9), "foreach": False}),
}


@contextlib.contextmanager
def short_pieces() -> Iterator[None]:
    """Cut into pieces of ``VECTORS`` values while the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "PIECE", VECTORS)
        yield


def make(name: str, sizes: list[int], dtype: torch.dtype) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Return parameters of these sizes, and an optimizer with the first one in a group of its own."""
    torch.manual_seed(len(sizes))
    parameters = [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
    kind, options = OPTIMIZERS[name]
    groups = [{"params": parameters[:1], "lr": 0.3}, {"params": parameters[1:]}]
    return parameters, kind([group for group in groups if group["params"]], **options)  # type: ignore[call-arg]


def gradients_of(parameters: list[nn.Parameter], number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]


def step_whole(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    optimizer.zero_grad()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def assert_same_bits(one: Any, other: Any) -> None:
    """Compare parameters and the optimizers' states, also what is not a number."""
    (mine, my_optimizer), (others, their_optimizer) = one, other
    for a, b in zip(mine, others, strict=True):
        assert torch.equal(bits(a), bits(b))
        state, expected = my_optimizer.state.get(a, {}), their_optimizer.state.get(b, {})
        assert state.keys() == expected.keys()
        for name in state:
            assert torch.equal(bits(state[name]), bits(expected[name])), name


CASES = {
    "name": st.sampled_from(list(OPTIMIZERS)),
    "sizes": st.lists(SIZES, min_size=1, max_size=5),
    "dtype": st.sampled_from(DTYPES),
}


@given(**CASES)
@short_pieces()
def test_updates_in_blocks_have_the_bits_of_whole_ones(name: str, sizes: list[int], dtype: torch.dtype) -> None:
    parameters, optimizer = make(name, sizes, dtype)
    step_whole(parameters, optimizer, gradients_of(parameters, 0))  # makes the state
    ours = copy.deepcopy((parameters, optimizer))
    for number in range(1, 4):
        gradients = gradients_of(parameters, number)
        with hyperparameters.set_to(optimizer, [{"lr": 0.5 / number}]):  # of the first group alone
            step_whole(parameters, optimizer, gradients)
        steps = steps_in_blocks(ours[1], ours[0], [[{"lr": 0.5 / number}]], [gradients])
        assert steps is not None
        assert steps.has_state
        cut = pieces(gradients)
        with torch.no_grad():
            for block in steps:
                steps.update(block, cut[block])
        steps.count_update()
        assert_same_bits(ours, (parameters, optimizer))


@given(**CASES, steps_before=st.integers(0, 2))
@short_pieces()
def test_steps_on_copies_have_the_bits_of_whole_ones_and_change_nothing_else(
    name: str, sizes: list[int], dtype: torch.dtype, steps_before: int
) -> None:
    parameters, optimizer = make(name, sizes, dtype)
    for number in range(steps_before):
        step_whole(parameters, optimizer, gradients_of(parameters, number))
    before = copy.deepcopy((parameters, optimizer))
    under = [hyperparameters.current(optimizer), [{"lr": 0.02}, {"lr": 0.05}][: len(optimizer.param_groups)]]
    other = {"momentum": 0.5, "betas": (0.7, 0.8)}  # as a schedule of the momentum
    under.append([{key: other[key] for key in other.keys() & group.keys()} for group in optimizer.param_groups])
    predicted = [parameter.detach().clone() for parameter in parameters]
    steps = steps_in_blocks(optimizer, parameters, under, [])
    assert steps is not None
    cut = pieces(predicted)
    all_gradients = [gradients_of(parameters, 10 + number) for number in range(len(under))]
    with torch.no_grad():
        for block in steps:
            state = steps.copied_state(block)
            for number, gradients in enumerate(all_gradients):
                steps.step(number, block, cut[block], pieces(gradients)[block], state)
    assert_same_bits((parameters, optimizer), before)
    for options, gradients in zip(under, all_gradients, strict=True):
        with hyperparameters.set_to(before[1], options):
            step_whole(before[0], before[1], gradients)
    for one, expected in zip(predicted, before[0], strict=True):
        assert torch.equal(bits(one), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_the_real_size_change_no_bit_either(dtype: torch.dtype) -> None:
    for name, tail in itertools.product(("momentum", "adam", "adamw"), (-33, 1)):
        parameters, optimizer = make(name, [5, 2 * PIECE + tail], dtype)
        step_whole(parameters, optimizer, gradients_of(parameters, 0))
        ours = copy.deepcopy((parameters, optimizer))
        gradients = gradients_of(parameters, 1)
        step_whole(parameters, optimizer, gradients)
        steps = steps_in_blocks(ours[1], ours[0], [[]], [gradients])
        assert steps is not None
        assert len(list(steps)) == 1 + 2 + (tail > 0)
        with torch.no_grad():
            for block in steps:
                steps.update(block, pieces(gradients)[block])
        steps.count_update()
        assert_same_bits(ours, (parameters, optimizer))


@given(sizes=st.lists(SIZES, max_size=8), borders=st.lists(st.integers(0, 1), min_size=8, max_size=8))
@short_pieces()
def test_blocks_hold_every_piece_once_and_no_more_than_fits(sizes: list[int], borders: list[int]) -> None:
    cut = pieces([torch.zeros(size) for size in sizes])
    groups = [sum(borders[: number % 8]) for number in range(len(cut))]
    groups.sort()
    found = list(blocks(cut, groups))
    assert [number for block in found for number in range(block.start, block.stop)] == list(range(len(cut)))
    for block in found:
        assert len(set(groups[block])) == 1
        assert sum(piece.numel() for piece in cut[block]) <= VECTORS
    for one, after in itertools.pairwise(found):  # none could have held the next piece, too
        values = sum(piece.numel() for piece in cut[one]) + cut[after.start].numel()
        assert values > VECTORS or groups[one.start] != groups[after.start]


@short_pieces()
def test_what_cannot_be_cut_comes_as_a_whole() -> None:
    flat, turned = torch.arange(200.0).view(20, 10), torch.zeros(10, 20).T
    assert [len(one[0]) for one, _ in in_blocks([flat], [flat])] == [64, 64, 64, 8]
    assert list(in_blocks([flat, flat], [flat, turned])) == [([flat, flat], [flat, turned])]


def several_threads(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    torch.set_num_threads(2)


def add_odd_state(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[parameters[0]] = {"momentum_buffer": torch.zeros(4, 3, dtype=torch.float64)}


def turn(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    parameters[0].data = torch.zeros(3, 4).T


def freeze_with_gradient(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    parameters.pop().requires_grad_(False).grad = torch.zeros(2)


def leave_out(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    parameters.pop()


def add_option(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.defaults["a later version's"] = None


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
REFUSED: dict[str, Any] = {
    "another optimizer": (torch.optim.Adagrad, {}, None),
    "a subclass": (type("Own", (SGD,), {}), {}, None),
    "amsgrad": (ADAMW, {"amsgrad": True}, None),
    "foreach": (SGD, {"foreach": True}, None),
    "fused": (ADAMW, {"fused": True}, None),
    "differentiable": (SGD, {"differentiable": True}, None),
    "capturable": (ADAMW, {"capturable": True}, None),
    "a tensor as learning rate": (SGD, {"lr": torch.tensor(0.1)}, None),
    "several threads": (SGD, {}, several_threads),
    "state of another kind": (SGD, {"momentum": 0.9}, add_odd_state),
    "memory in another order": (SGD, {}, turn),
    "a frozen parameter with a gradient": (SGD, {}, freeze_with_gradient),
    "a parameter that is not stepped": (SGD, {}, leave_out),
    "an option of a later version": (SGD, {}, add_option),
}


@pytest.mark.parametrize(("kind", "options", "change"), REFUSED.values(), ids=REFUSED)
def test_whatever_is_not_known_to_have_the_same_bits_steps_as_a_whole(kind: Any, options: Any, change: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(2))]
    optimizer = kind(parameters, **({"lr": 0.1} | options))
    known = steps_in_blocks(optimizer, parameters, [[]], [])
    assert (known is None) == (change is None)
    threads = torch.get_num_threads()
    try:
        if change is not None:
            change(parameters, optimizer)
        assert steps_in_blocks(optimizer, parameters, [[]], []) is None
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "tensors",
    [
        [[torch.zeros(4, 3), torch.zeros(2, dtype=torch.float64)]],
        [[torch.zeros(3, 4).T, torch.zeros(2)]],
        [[torch.zeros(4, 3).to_sparse(), torch.zeros(2)]],
        [[], [torch.zeros(12), torch.zeros(2)]],
    ],
    ids=["another dtype", "memory in another order", "sparse", "another shape"],
)
def test_other_tensors_must_be_cut_into_the_same_pieces(tensors: list[list[Tensor]]) -> None:
    parameters = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(2))]
    optimizer = SGD(parameters)
    assert steps_in_blocks(optimizer, parameters, [[]], [[], [p.detach() for p in parameters]]) is not None
    assert steps_in_blocks(optimizer, parameters, [[]], tensors) is None


def test_scheduled_hyperparameters_may_be_tensors_only_for_whole_steps() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    optimizer = SGD(parameters)
    assert steps_in_blocks(optimizer, parameters, [[], [{"lr": 0.1}]], []) is not None
    assert steps_in_blocks(optimizer, parameters, [[], [{"lr": torch.tensor(0.1)}]], []) is None


def test_complex_parameters_and_parameters_that_are_there_twice_step_as_a_whole() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    assert steps_in_blocks(SGD([parameter]), [parameter], [[]], []) is None
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = SGD([parameter, parameter])
    assert steps_in_blocks(optimizer, [parameter], [[]], []) is None


def test_hooks_and_wrappers_of_a_step_are_seen_but_for_the_schedulers_own() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]

    def made() -> torch.optim.Optimizer:
        return SGD(parameters)

    scheduled = made()
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda iteration: 1.0)
    assert steps_by_itself(made())
    assert steps_by_itself(scheduled)
    hooked = made()
    hook = hooked.register_step_post_hook(lambda *_: None)
    assert not steps_by_itself(hooked)
    hook.remove()
    assert steps_by_itself(hooked)
    wrapped = made()
    wrapped.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    assert not steps_by_itself(wrapped)

    class Wrapper:
        def __init__(self, function: Any):
            self.__func__ = function

    rescheduled = made()
    rescheduled.step = Wrapper(lambda *_: None)  # type: ignore[assignment]
    torch.optim.lr_scheduler.LambdaLR(rescheduled, lambda iteration: 1.0)
    assert not steps_by_itself(rescheduled), "the scheduler's wrapper is around a user's"
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert steps_in_blocks(made(), parameters, [[]], []) is None
    handle.remove()
    assert steps_in_blocks(made(), parameters, [[]], []) is not None


def test_state_that_is_not_there_yet_is_known() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    for kind, options, has_state in ((SGD, {}, True), (SGD, {"momentum": 0.9}, False), (ADAMW, {}, False)):
        optimizer = kind(parameters, **options)  # type: ignore[operator]
        steps = steps_in_blocks(optimizer, parameters, [[]], [])
        assert steps is not None
        assert steps.has_state == has_state
        step_whole(parameters, optimizer, [torch.ones(3)])
        steps = steps_in_blocks(optimizer, parameters, [[]], [])
        assert steps is not None
        assert steps.has_state


def test_every_parameter_counts_its_own_steps() -> None:
    parameters, optimizer = make("adamw", [3, 2 * PIECE], torch.float32)
    step_whole(parameters, optimizer, gradients_of(parameters, 0))
    steps = steps_in_blocks(optimizer, parameters, [[]], [])
    assert steps is not None
    with torch.no_grad():
        for block in steps:
            steps.update(block, pieces(gradients_of(parameters, 1))[block])
            assert {one.item() for one in steps.copied_state(block)[COUNT]} == {2.0}, "a prediction goes from there"
    steps.count_update()
    assert [optimizer.state[parameter][COUNT].item() for parameter in parameters] == [2.0, 2.0]
