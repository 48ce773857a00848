"""Idioms of other people's programs: on equal data, every door at every width computes what plain torch computes.

With the same data on all ranks the mean of their gradients is each rank's own, and a prediction is exact: so the bits
must be those of the same program in one process, without pipesgd.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _ranks import error_of, run_ranks
from _sections import sections
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

from pipesgd import LocalSteps, Pipelined, ReplicasDivergedError
from pipesgd.ddp import attach, compress
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

ITERATIONS = 7
DOORS = ("Pipelined 1", "Pipelined 2", "Pipelined 3", "attach 1", "attach 2", "attach 3")


class Loop:
    """A training loop of ``model`` and ``optimizer`` behind a door: "plain", or a class and a width."""

    def __init__(self, door: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any):
        name, _, width = door.partition(" ")
        self.inner, self.optimizer = model, optimizer
        self.model: nn.Module = model
        self.pipeline: Any = None
        if name in ("attach", "compress"):
            self.model = DistributedDataParallel(model, **options.pop("of_ddp", {}))
            make: Any = functools.partial(attach, width=int(width), codec="fp32") if name == "attach" else compress
            self.pipeline = make(self.model, *(() if name == "compress" else (optimizer,)), **sections(**options))
        elif name == "Pipelined":
            options.pop("of_ddp", None)
            self.pipeline = Pipelined(model, optimizer, width=int(width), **sections(**options))
        elif name == "LocalSteps":
            self.pipeline = LocalSteps(model, optimizer, width=int(width), **sections(local_steps=2, **options))
        self._steps_itself = name in ("plain", "attach", "compress")

    def update(self, loss: Tensor, before: Callable[[], None] = lambda: None, **how: Any) -> None:
        """Train on ``loss``; ``before`` is called between the backward pass and the step."""
        if self._steps_itself:
            self.optimizer.zero_grad()
        loss.backward(**how)
        before()
        self.optimizer.step() if self._steps_itself else self.pipeline.step()

    def close(self) -> list[Tensor]:
        """Apply what is in flight; return the weights."""
        if self.pipeline is not None:
            self.pipeline.close()
        return [parameter.detach().clone() for parameter in self.inner.parameters()]


def batches(shape: tuple[int, ...], seed: int = 1, iterations: int = ITERATIONS) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(iterations):
        yield torch.randn(8, *shape, generator=generator)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | options)


# ---- Parameters in another memory order


class Permuted(nn.Module):
    """A bilinear form and a linear layer whose parameters are views of other shapes, transposed and permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Parameter(torch.randn(5, 6, 4).permute(2, 1, 0))
        self.matrix = nn.Parameter(torch.randn(6, 3).t())
        self.gaps = nn.Parameter(torch.randn(4, 10)[:, ::2])
        self.bias = nn.Parameter(torch.randn(()))

    def forward(self, inputs: Tensor) -> Tensor:
        form = torch.einsum("bi,kij->bkj", inputs, self.form).tanh() * self.gaps
        return form.sum((1, 2)) + torch.nn.functional.linear(inputs, self.matrix).sum(1) + self.bias


def convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 1))
    return model.to(memory_format=torch.channels_last)


def in_space() -> nn.Module:
    model = nn.Sequential(nn.Conv3d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))
    return model.to(memory_format=torch.channels_last_3d)


ORDERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "channels last": (convolutions, (3, 6, 6)),
    "channels last in space": (in_space, (2, 3, 3, 3)),
    "permuted": (Permuted, (6,)),
}
STEPPERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "fused AdamW": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "fused Adagrad": functools.partial(torch.optim.Adagrad, lr=0.01, fused=True),
}
FUSED = [name for name in STEPPERS if name.startswith("fused")]


def with_memory_order(
    door: str, order: str, stepper: str, iterations: int = ITERATIONS, **options: Any
) -> list[Tensor]:
    make, shape = ORDERS[order]
    model = seeded(make)
    parameters: Any = model.parameters()
    if stepper in FUSED:  # torch's own fused loops write into the gaps
        parameters = [one for name, one in model.named_parameters() if name != "gaps"]
        for name, one in model.named_parameters():
            one.requires_grad_(name != "gaps")
    loop = Loop(door, model, STEPPERS[stepper](parameters), **options)
    for inputs in batches(shape, iterations=iterations):
        loop.update((loop.model(inputs) - 1).square().mean())
    return loop.close()


DOORS_OF_ORDERS = [*DOORS, "compress 1, codec fp32", "Pipelined 1, buckets 3", "Pipelined 2, buckets 3"]


def differences_with_memory_orders(ranks: Ranks, door: str) -> list[str]:
    """Train in every order with SGD. Each fused step, and a single iteration, meets each order behind three doors.

    After a single iteration, all that is applied was in flight.
    """
    number = DOORS_OF_ORDERS.index(door)
    door, _, option = door.partition(", ")
    options = {option.split()[0]: option.split()[1]} if option else {}
    orders = list(ORDERS)
    cases = [(order, "SGD", ITERATIONS) for order in orders]
    for shift, (stepper, iterations) in enumerate((("SGD", 1), *((name, ITERATIONS) for name in FUSED))):
        cases.append((orders[(number + shift) % len(orders)], stepper, iterations))
    found = []
    for order, stepper, iterations in cases:
        expected = with_memory_order("plain", order, stepper, iterations)
        if not all(map(torch.equal, expected, with_memory_order(door, order, stepper, iterations, **options))):
            found.append(f"{order}, {stepper}, {iterations} iterations")
    return found


@pytest.mark.parametrize("door", DOORS_OF_ORDERS)
def test_the_memory_order_of_a_parameter_changes_no_value(door: str) -> None:
    assert run_ranks(2, differences_with_memory_orders, door) == [[], []]


def with_a_branch(door: str, **options: Any) -> list[Tensor]:
    """Train a model with a part that no rank uses in every other iteration; return its weights before the end."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, inputs: Tensor, use: bool) -> Tensor:
            hidden: Tensor = self.always(inputs)
            return hidden + self.sometimes(hidden) if use else hidden

    model = seeded(Branching).to(memory_format=torch.channels_last)
    loop = Loop(door, model, sgd(model), of_ddp={"find_unused_parameters": True}, prediction="none", **options)
    for number, inputs in enumerate(batches((3, 5, 5))):
        loop.update((loop.model(inputs, number % 2 == 0) - 1).square().mean())
    with loop.pipeline.true_weights():
        before = [parameter.detach().clone() for parameter in model.parameters()]
    return before + loop.close()


def branches_by_two_doors(ranks: Ranks) -> bool:
    return all(map(torch.equal, with_a_branch("Pipelined 2"), with_a_branch("attach 2")))


def test_a_part_in_another_memory_order_that_no_rank_has_used_gets_the_mean_of_its_values() -> None:
    assert run_ranks(2, branches_by_two_doors) == [True, True]


def compressed(ranks: Ranks, door: str, codec: str, order: torch.memory_format) -> Tensor:
    """Train on other samples on each rank with a codec; return the weights."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 1))).to(memory_format=order)
    loop = Loop(door, model, sgd(model, lr=0.02), codec=codec)
    for inputs in batches((3, 5, 5), seed=ranks.rank):
        loop.update((loop.model(inputs) - 1).square().mean())
    return torch.cat([weights.flatten() for weights in loop.close()])


def compressed_by_two_doors(ranks: Ranks, codec: str) -> bool:
    one, other = (compressed(ranks, door, codec, torch.channels_last) for door in ("Pipelined 2", "attach 2"))
    return torch.equal(one, other)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_two_doors_encode_parameters_in_another_memory_order_alike(codec: str) -> None:
    assert run_ranks(2, compressed_by_two_doors, codec) == [True, True]


def factored_in_two_orders(ranks: Ranks) -> float:
    orders = (torch.contiguous_format, torch.channels_last)
    one, other = (compressed(ranks, "Pipelined 2", "powersgd", order) for order in orders)
    return float((one - other).abs().max())


def test_parameters_in_another_memory_order_have_factors_of_low_rank() -> None:
    assert max(run_ranks(2, factored_in_two_orders)) < 0.05  # the factors begin at random


def other_orders(ranks: Ranks) -> str:
    model = nn.Conv2d(3, 4, 3)
    if ranks.rank:
        model = model.to(memory_format=torch.channels_last)
    return error_of(Pipelined, model, sgd(model), ranks=ranks)


def test_ranks_with_parameters_in_other_memory_orders_are_refused() -> None:
    assert set(run_ranks(2, other_orders)) == {
        "DisagreementError: parameters (number 0) must be the same on all ranks; got 'weight 4x3x3x3 float32' on rank 0"
        ", 'weight 4x3x3x3 float32 in memory order of strides 27x1x9x3' on rank 1"
    }


def resumed_in_orders(ranks: Ranks) -> tuple[bool, str]:
    """Resume a training in the memory order that it had, and in another one."""
    x = list(batches((3, 5, 5), seed=ranks.rank, iterations=6))

    def trained(order: torch.memory_format, state: Any = None) -> tuple[list[Tensor], Any]:
        model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(72, 1)))
        model = model.to(memory_format=order)
        optimizer = sgd(model, lr=0.02)
        with Pipelined(model, optimizer, ranks=ranks, codec="int4") as pipeline:
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(copy.deepcopy(state[1]))
                pipeline.load_state_dict(pickle.loads(state[2]))
            saved = None
            for number in range(0 if state is None else 3, 6):
                model(x[number]).square().mean().backward()
                pipeline.step()
                if number == 2:
                    own = pickle.dumps(pipeline.state_dict())
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), own))
        return [weights.detach().clone() for weights in model.parameters()], saved

    whole, state = trained(torch.channels_last)
    again, _ = trained(torch.channels_last, state)
    return all(map(torch.equal, whole, again)), error_of(trained, torch.contiguous_format, state)


def test_a_state_is_loaded_only_where_parameters_have_its_memory_order() -> None:
    refusal = (
        "UserInputError: trained parameters (number 0) must have the strides (27, 1, 9, 3), as in the state that is "
        "loaded; got contiguous memory"
    )
    assert run_ranks(2, resumed_in_orders) == [(True, refusal)] * 2


# ---- Complex parameters


class Spectral(nn.Module):
    """Two complex parameters in one bucket, one of them transposed, and a real layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.second = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat).t())
        self.out = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(inputs) * self.first
        return self.out(inputs) + (spectrum @ self.second).abs()


def complex_weights(door: str, **options: Any) -> list[Tensor]:
    model = seeded(Spectral)
    loop = Loop(door, model, sgd(model, lr=0.01), **options)
    for inputs in batches((6,)):
        loop.update((loop.model(inputs) - 1).square().mean())
    return loop.close()


# ---- torch.autocast and parametrize.cached


def late(door: str) -> int:
    """Return how many iterations the true weights are behind those of plain torch."""
    return 0 if door == "plain" else int(door.partition(" ")[2]) - 1


def in_one_block(door: str, block: Callable[[], Any], before: bool, **options: Any) -> list[Tensor]:
    """Train in a block with an evaluation after the pass that trains and, if ``before``, a pass without gradients."""
    model = seeded(mlp)
    parametrizations.orthogonal(model[2])
    loop = Loop(door, model, sgd(model), **options)
    seen = []
    for inputs in batches((6,)):
        with block():
            if before:
                with torch.no_grad():
                    loop.model(inputs.flip(0))
            loss = (loop.model(inputs) - 1).square().mean()
            with torch.no_grad():
                seen.append(loop.model(torch.ones(2, 6)).float())
        loop.update(loss)
    return loop.close() + seen[late(door) : late(door) + ITERATIONS - 2]


def with_autocast(door: str, **options: Any) -> list[Tensor]:
    return in_one_block(door, functools.partial(torch.autocast, "cpu", torch.bfloat16), True, **options)


def with_cached_parametrizations(door: str, **options: Any) -> list[Tensor]:
    return in_one_block(door, parametrize.cached, False, **options)  # it keeps weights without gradients, too


# ---- Optimizers that count, and that wrap others


class Counting(torch.optim.Optimizer):
    """An optimizer that counts its steps in a group and in an attribute, and moves weights by both counts alone."""

    def __init__(self, parameters: Any, lr: float):
        super().__init__(parameters, {"lr": lr, "k": 0})
        self.steps_done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        self.steps_done += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] / (1 + group["k"] + self.steps_done)))
                if self.steps_done % 3 == 0:
                    parameter.mul_(0.9)
            group["k"] += 1
        return result


class Lookahead(torch.optim.Optimizer):
    """Lookahead (Zhang et al., 2019) around another optimizer, whose groups it shares; it counts in them."""

    def __init__(self, inner: torch.optim.Optimizer, share: float = 0.5, every: int = 2):
        self.inner, self.share, self.every = inner, share, every  # torch's constructor is left out, as in several
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state: Any = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if group["counter"] % self.every == 0:
                    slow.lerp_(parameter, self.share)
                    parameter.copy_(slow)
        return result


class SlowCopies(torch.optim.Optimizer):
    """The same, with the slow weights in a list of its own, through torch's constructor."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2):
        super().__init__(inner.param_groups, {})
        self.inner, self.every, self.counter = inner, every, 0
        self.slow = [[one.detach().clone() for one in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        self.counter += 1
        if self.counter % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, own in zip(group["params"], slow, strict=True):
                    own.lerp_(parameter, 0.5)
                    parameter.copy_(own)
        return result


WRAPPING: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "counting": lambda model: Counting(model.parameters(), lr=0.5),
    "Lookahead": lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=0.02)),
    "Lookahead of SGD": lambda model: Lookahead(sgd(model), every=3),
    "slow copies": lambda model: SlowCopies(torch.optim.Adam(model.parameters(), lr=0.02)),
}


def with_optimizer(door: str, name: str, **options: Any) -> list[Tensor]:
    """Train with a schedule, an update that is skipped, and a flush after which a pipeline fills again."""
    model = seeded(mlp)
    optimizer = WRAPPING[name](model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(getattr(optimizer, "inner", optimizer), 0.9)
    loop = Loop(door, model, optimizer, on_nonfinite="skip", **options)
    for number, inputs in enumerate(batches((6,), iterations=12)):
        if number != 8:
            loop.update((loop.model(inputs) - 1).square().mean())
        elif loop.pipeline is not None:
            loop.update((loop.model(inputs) * torch.nan).mean())
        schedule.step()
        if number == 5 and loop.pipeline is not None:
            loop.pipeline.flush()
    return loop.close()


# ---- The learning rate, graphs of gradients, closures


def with_rate_set_between(door: str, **options: Any) -> list[Tensor]:
    """Set the learning rate between the backward pass and the step."""
    model = seeded(mlp)
    optimizer = sgd(model, lr=123.0)
    loop = Loop(door, model, optimizer, **options)

    def set_rate(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)

    for number, inputs in enumerate(batches((6,))):
        loop.update((loop.model(inputs) - 1).square().mean(), functools.partial(set_rate, number))
    return loop.close()


def with_graphs(door: str, **options: Any) -> list[Tensor]:
    """Let gradients have graphs of their own."""
    model = seeded(mlp)
    loop = Loop(door, model, sgd(model), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph")
        for inputs in batches((6,)):
            loop.update((loop.model(inputs) - 1).square().mean(), create_graph=True)
    return loop.close()


def with_compiled_step(door: str, **options: Any) -> list[Tensor]:
    """Compile the step of the optimizer."""
    model = seeded(mlp)
    optimizer = sgd(model)
    loop = Loop(door, model, optimizer, **options)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    for inputs in batches((6,)):
        loop.update((loop.model(inputs) - 1).square().mean())
    return loop.close()


# ---- What reads and writes weights by the way


class Merging(nn.Module):
    """A LoRA layer that merges its factors into its frozen weight in ``eval()``, and takes them out in ``train()``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6) * 0.3), nn.Parameter(torch.zeros(6, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (self.b @ self.a).data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs @ self.weight.T
        return outputs if self.merged else outputs + (inputs @ self.a.T) @ self.b.T


def with_merging(door: str, **options: Any) -> list[Tensor]:
    """Evaluate a model with merged factors after each iteration, and average its weights."""
    model = seeded(lambda: nn.Sequential(Merging(), nn.Tanh(), Merging()))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    loop = Loop(door, model, optimizer, **options)
    average = AveragedModel(model, avg_fn=lambda mean, new, count: mean * 0.5 + new * 0.5)
    seen = []
    for number, inputs in enumerate(batches((6,))):
        loop.update((loop.model(inputs) - 1).square().mean())
        if number < late(door):
            continue
        loop.model.eval()
        with torch.no_grad():
            seen.append(loop.model(torch.ones(2, 6)))
        loop.model.train()
        average.update_parameters(loop.model)
        seen += [one.detach().clone() for one in average.module.parameters()]
    of_an_iteration = len(seen) // (ITERATIONS - late(door))
    return loop.close() + seen[: of_an_iteration * (ITERATIONS - 2)]


PROGRAMS: dict[str, Callable[..., list[Tensor]]] = {
    "complex parameters": complex_weights,
    "autocast": with_autocast,
    "cached parametrizations": with_cached_parametrizations,
    **{name: functools.partial(with_optimizer, name=name) for name in WRAPPING},
    "learning rate set between": with_rate_set_between,
    "graphs of gradients": with_graphs,
    "compiled step": with_compiled_step,
    "merging in eval": with_merging,
}
NEAR = {"merging in eval": 1e-5}
"""Largest difference of a value where bits differ: merging rounds the frozen weights, in other iterations."""


def unlike(ranks: Ranks, door: str) -> dict[str, str]:
    """Return the programs that compute something else than plain torch, and how far off, or why not."""
    found = {}
    for name, program in PROGRAMS.items():
        if name == ("compiled step" if door.startswith("Pipelined") else "graphs of gradients"):
            continue  # a pipeline steps the optimizer itself; DistributedDataParallel refuses such graphs
        torch.compiler.reset()
        expected = program("plain")
        try:
            got = program(door)
        except Exception as error:  # noqa: BLE001 (the test compares it)
            found[name] = f"{type(error).__name__}: {error}"
            continue
        off = max(float((one - other).abs().max()) for one, other in zip(expected, got, strict=True))
        if off > NEAR.get(name, 0.0):
            found[name] = f"off by {off:.1e}"
    return found


@pytest.mark.parametrize("door", DOORS)
def test_idioms_compute_on_equal_data_what_plain_torch_computes(door: str) -> None:
    assert run_ranks(2, unlike, door) == [{}, {}]


# ---- Local steps: programs without a late movement are those of one rank


def unlike_local_steps(ranks: Ranks) -> dict[str, str]:
    """Return the programs that compute something else than plain torch with windows at width 1 on equal data."""
    found = {}
    for name in ("complex parameters", "graphs of gradients", "learning rate set between", "counting", "Lookahead"):
        try:
            got = PROGRAMS[name]("LocalSteps 1")
        except Exception as error:  # noqa: BLE001 (the test compares it)
            found[name] = f"{type(error).__name__}: {error}"
            continue
        off = max(float((one - other).abs().max()) for one, other in zip(PROGRAMS[name]("plain"), got, strict=True))
        if off > 1e-6:  # movements are differences of weights
            found[name] = f"off by {off:.1e}"
    return found


def test_idioms_compute_with_local_steps_what_plain_torch_computes() -> None:
    assert run_ranks(2, unlike_local_steps) == [{}, {}]


def compiled_in_windows(ranks: Ranks) -> float:
    trained = []
    for compiled in (False, True):
        model = seeded(mlp)
        optimizer = sgd(model)
        loop = Loop("attach 2", model, optimizer, local_steps=2)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        for inputs in batches((6,)):
            loop.update((loop.model(inputs) - 1).square().mean())
        trained.append(torch.cat([weights.flatten() for weights in loop.close()]))
    return float((trained[0] - trained[1]).abs().max())


def test_a_compiled_step_trains_in_windows() -> None:
    assert max(run_ranks(2, compiled_in_windows)) < 1e-6


# ---- Weights that others write, and weights that are not the model's


def clamp(loop: Loop) -> None:
    with torch.no_grad():
        for parameter in loop.inner.parameters():
            parameter.clamp_(-0.1, 0.1)


def clamp_data(loop: Loop) -> None:
    for parameter in loop.inner.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def mask(loop: Loop) -> None:
    loop.inner[0].weight.data[:, ::2] = 0.0  # type: ignore[index, union-attr]


def normalize(loop: Loop) -> None:
    weight: Any = loop.inner[2].weight  # type: ignore[index]
    weight.data = weight.data / weight.data.norm()


def write_right(loop: Loop) -> None:
    with loop.pipeline.true_weights():
        clamp(loop)


def write_nothing(loop: Loop) -> None:
    """Do what writes nothing, or writes what is there: evaluate, save, load and average."""
    loop.inner.load_state_dict(copy.deepcopy(loop.inner.state_dict()))
    loop.inner.eval()
    loop.inner(torch.ones(1, 6))
    loop.inner.train()
    with torch.inference_mode():
        loop.inner(torch.ones(1, 6))
    with loop.pipeline.true_weights():
        nn.utils.parameters_to_vector(loop.inner.parameters())


def said_of(ranks: Ranks, door: str, write: Callable[[Loop], None], begin: int, **options: Any) -> list[str]:
    """Train, and ``write`` after each step from iteration ``begin`` on; return the warnings."""
    model = seeded(mlp)
    loop = Loop(door, model, sgd(model, lr=0.05), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for number, inputs in enumerate(batches((6,), seed=ranks.rank, iterations=18)):
            loop.update((loop.model(inputs) - 1).square().mean())
            if number >= begin:
                write(loop)
        loop.close()
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


SAID = (
    "parameters must be written in `with pipeline.true_weights():`, alike on all ranks: after a step they hold "
    "predicted weights, which the next update drops with all that was written to them; got another value of {} outside "
    "of it"
)


@pytest.mark.parametrize("door", ["Pipelined 2", "attach 2", "attach 3"])
@pytest.mark.parametrize(
    ("write", "name"),
    [(clamp, "0.weight"), (clamp_data, "0.weight"), (mask, "0.weight"), (normalize, "2.weight")],
    ids=["in place", "in data", "a mask", "other data"],
)
def test_weights_that_are_written_after_a_step_are_noticed_once(
    door: str, write: Callable[[Loop], None], name: str
) -> None:
    begin = 0 if door == "attach 3" else 6
    name = f"module.{name}" if door.startswith("attach") else name
    assert run_ranks(2, said_of, door, write, begin) == [[SAID.format(name)]] * 2


@pytest.mark.parametrize(
    ("door", "write"),
    [
        ("Pipelined 1", clamp_data),
        ("attach 1", clamp),
        ("Pipelined 2", write_right),
        ("attach 2", write_right),
        ("Pipelined 2", write_nothing),
        ("attach 3", write_nothing),
        ("LocalSteps 2", write_right),
    ],
)
def test_weights_that_are_written_where_they_stay_are_no_reason_to_warn(
    door: str, write: Callable[[Loop], None]
) -> None:
    assert run_ranks(2, said_of, door, write, 0) == [[], []]


def trained_outside(ranks: Ranks, width: int) -> list[str]:
    model, temperature = seeded(mlp), nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        Pipelined(model, optimizer, width=width, ranks=ranks).close()
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


@pytest.mark.parametrize("width", [1, 2])
def test_a_trained_parameter_that_is_not_the_models_is_named(width: int) -> None:
    said = (
        "trained parameters should be the model's, which is evaluated and saved with its true weights; got 1 others "
        "(of shape (2, 3)): read, write and save them in `with pipeline.true_weights():`, or make them a part of the "
        "model"
    )
    assert run_ranks(2, trained_outside, width) == [[said] * (width > 1)] * 2


def diverged(ranks: Ranks, door: str, of_frozen: bool) -> str:
    model = seeded(mlp)
    model[0].bias.requires_grad_(not of_frozen)  # type: ignore[index, union-attr]
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    loop = Loop(door, model, optimizer)
    for inputs in batches((6,), seed=ranks.rank, iterations=3):
        loop.update((loop.model(inputs) - 1).square().mean())
    with loop.pipeline.true_weights():
        model[0].bias.data += ranks.rank  # type: ignore[index, union-attr]
    return error_of(loop.close)


@pytest.mark.parametrize(
    ("door", "of_frozen"),
    [
        *((door, True) for door in ("Pipelined 1", "attach 1", "Pipelined 2", "attach 2", "LocalSteps 1")),
        *((door, False) for door in ("Pipelined 1", "attach 1", "attach 2")),
    ],
)
def test_replicas_are_compared_at_the_end_with_their_frozen_parameters(door: str, of_frozen: bool) -> None:
    name = "module.0.bias" if door.startswith("attach") else "0.bias"
    assert (
        run_ranks(2, diverged, door, of_frozen)
        == [
            f"{ReplicasDivergedError.__name__}: weights must be written in pipeline.true_weights() alone, and alike on "
            f"all ranks; got other weights on rank 1 than on rank 0, first in {name}"
        ]
        * 2
    )


class ScheduleFree(torch.optim.SGD):
    """An optimizer with the methods of a schedule-free one."""

    def train(self) -> None:
        """Take the weights of training."""

    def eval(self) -> None:
        """Take the weights of an evaluation."""


def schedule_free(ranks: Ranks, door: str, **options: Any) -> str:
    model = seeded(mlp)
    return error_of(Loop, door, model, ScheduleFree(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("door", ["Pipelined 2", "attach 3", "LocalSteps 1"])
def test_schedule_free_optimizers_are_refused_alike_where_weights_are_late(door: str) -> None:
    assert run_ranks(1, schedule_free, door) == [
        "UserInputError: optimizer must not be schedule-free, except at width 1 without local steps: its train() and "
        "eval() change weights in place; got ScheduleFree"
    ]


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        looked_up: Tensor = self.table(words)
        return looked_up


def sparse(ranks: Ranks, door: str) -> str:
    model = Words()
    return error_of(Loop, door, model, sgd(model, momentum=0.0))


@pytest.mark.parametrize("door", ["attach 1", "attach 2", "compress 1"])
def test_sparse_gradients_are_refused_before_the_training(door: str) -> None:
    assert run_ranks(1, sparse, door) == [
        "UserInputError: gradients must be dense in a loop with DistributedDataParallel, which hands over no other "
        "ones together; got sparse ones, those of table (use sparse=False in torch.nn.Embedding)"
    ]


def test_a_copy_of_a_model_changes_its_mode_by_itself(tmp_path: Any) -> None:
    model = seeded(Merging)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    with contextlib.closing(Pipelined(model, optimizer, width=2)):
        assert "train" in vars(model)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
    for one in copies:
        assert one.eval().merged
        assert not one.train().merged
    assert not model.merged
    assert not {"train", "eval"} & vars(model).keys()
