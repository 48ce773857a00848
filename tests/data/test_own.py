"""Functions of the user's own: how they are found and called, and what they return."""

from __future__ import annotations

import importlib
import pickle
import random
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from _refusals import refused
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from pipesgd.cli import parse
from pipesgd.data import ShardedBatches, evaluation_batches, find_loss, make_workload
from pipesgd.data.loading import _Samples
from pipesgd.data.own import InOrder, MapStyle, own_splits
from pipesgd.data.samples import micro_batches_of
from pipesgd.errors import UserInputError
from pipesgd.ranks import alone
from pipesgd.run.workload import check_fit, load

MODULE = """
import os
import signal
import threading

import torch
from torch import nn
from torch.utils.data import TensorDataset

number = 3


class Points(TensorDataset):
    num_classes = 2


def points(seed=0):
    numbers = torch.Generator().manual_seed(7)
    return tuple(Points(torch.randn(20, 3, generator=numbers), torch.arange(20) % 2) for _ in range(2))


def bare():
    return [(torch.zeros(3), 0)] * 20, [(torch.zeros(3), 0)] * 20


def pictures(image_size, data_dir):
    samples = [(torch.zeros(1, image_size, image_size), 0)] * 20
    return samples, samples


def several():
    samples = [((torch.zeros(3), torch.ones(3)), 0)] * 20
    return samples, samples


def needs_more(seed, colour):
    return points()


def fails():
    return _fails()


def _fails():
    raise KeyError("no such\\n column")


def leaves():
    raise SystemExit


def one():
    return points()[0]


def empty():
    return [], []


def lengthless():
    return iter([1]), iter([1])


def not_pairs():
    return [torch.zeros(3)] * 5, [torch.zeros(3)] * 5


def uneven():
    samples = [(torch.zeros(n + 1), 0) for n in range(5)]
    return samples, samples


def words():
    samples = [("word", 0)] * 5
    return samples, samples


def unreadable():
    class Samples(list):
        def __getitem__(self, index):
            raise OSError(f"disk {index}")

    return Samples([1] * 5), Samples([1] * 5)


class Noisy:
    def __len__(self):
        return 15

    def __getitem__(self, index):
        return torch.rand(2), index


class Numbers(torch.utils.data.IterableDataset):
    def __len__(self):
        return 15

    def __iter__(self):
        return ((number, number) for number in range(15))


class Interrupted(Numbers):
    def __init__(self):
        self.state = "none"

    def __setstate__(self, state):
        os.kill(os.getpid(), signal.SIGINT)  # a worker process that has just begun

    def __iter__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return super().__iter__()


class WithThreads(Interrupted):
    def __iter__(self):
        for _ in range(8):
            threading.Thread(target=share_memory, daemon=True).start()
        return super().__iter__()


def share_memory():
    while True:
        torch.zeros(200).untyped_storage()._share_fd_cpu_()


def model(num_classes=2):
    return nn.Linear(3, num_classes)


def classifier(num_classes):
    return nn.Linear(3, num_classes)


def shaped(sample_shape):
    return nn.Linear(*sample_shape, 2)


def wide():
    return nn.Linear(4, 2)


def no_model():
    return 3


def frozen():
    return nn.Linear(3, 2).requires_grad_(False)


def batch_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def python_loss(outputs, targets):
    return 0.5


def constant_loss(outputs, targets):
    return torch.tensor(1.0)


def wrong_loss(outputs, targets):
    raise ValueError("kl_loss")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the module ``own``, a package with a broken module, and let them be imported."""
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").touch()
    (tmp_path / "kit" / "models.py").write_text("def (")
    (tmp_path / "kit" / "lacking.py").write_text("import json\nimport not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # type: ignore[no-untyped-call]
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own", "kit")]:
        del sys.modules[name]
    find_loss.cache_clear()


def load_alone(words: str) -> Any:
    return load(parse(["--batch-size", "4", *words.split()]), alone())


OWN = "--dataset own:points --model own:model"


@pytest.mark.parametrize(("words", "message"), refused("own data"))
def test_bad_input_is_one_line(words: str, message: str, folder: Path) -> None:
    options = {one.split()[0]: f"--{one}" for one in f" {words}".split(" --")[1:]}  # the last one of each counts
    with pytest.raises(UserInputError) as caught:
        load_alone(" ".join(options.values()))
    message = re.sub("<(.*)>", lambda found: str(MODULE[: MODULE.index(found[1])].count("\n") + 1), message)
    pattern = re.escape(message.replace("FOLDER", str(folder))).replace(r"\.\*", ".*")
    assert re.fullmatch(pattern, str(caught.value)), caught.value


def test_a_function_gets_the_options_that_it_names(folder: Path) -> None:
    (folder / "own.py").write_text(
        MODULE
        + "asked = []\n"
        + "def data(data_dir, image_size, context, seed, rank, world_size, colour='red'):\n"
        + "    asked.append((str(data_dir), image_size, context, seed, rank, world_size, colour))\n"
        + "    return points()\n"
        + "def net(sample_shape, num_classes, hidden_sizes, layers, heads, embedding, seed, rank, world_size, **o):\n"
        + "    sizes = hidden_sizes, layers, heads, embedding\n"
        + "    asked.append((sample_shape, num_classes, *sizes, seed, rank, world_size, o))\n"
        + "    return model()\n"
    )
    words = "--dataset own:data --data-dir here --image-size 9 --context 8 --seed 5 --model own:net --hidden-sizes 7 "
    words += "--layers 3 --heads 2 --embedding 6"
    make_workload(parse(words.split()), rank=1, world_size=2)
    assert importlib.import_module("own").asked == [
        ("here", 9, 8, 5, 1, 2, "red"),
        ((3,), 2, (7,), 3, 2, 6, 5, 1, 2, {}),
    ]


def test_a_text_after_the_name_is_the_first_argument(folder: Path) -> None:
    (folder / "own.py").write_text(
        MODULE
        + "asked = []\n"
        + "def data(kind, rank):\n"
        + "    asked.append((kind, rank))\n"
        + "    return points()\n"
        + "data.sharded = True\n"
        + "def net(text, layers):\n"
        + "    asked.append((text, layers))\n"
        + "    return model()\n"
        + "def loss(weight, outputs, targets):\n"
        + "    return float(weight) * nn.functional.cross_entropy(outputs, targets)\n"
    )
    words = "--dataset own:data=train/val --model own:net=a=1,b:c --layers 3"
    data, _ = make_workload(parse(words.split()), rank=1, world_size=2)
    assert importlib.import_module("own").asked == [("train/val", 1), ("a=1,b:c", 3)]
    assert data.sharded
    outputs, targets = torch.tensor([[1.0, 2.0]]), torch.tensor([0])
    assert find_loss("own:loss=0.5")(outputs, targets) == 0.5 * find_loss("cross-entropy")(outputs, targets)


def test_trying_model_and_loss_leaves_no_trace(folder: Path) -> None:
    (folder / "own.py").write_text(
        MODULE
        + "def net():\n"
        + "    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))\n"
    )
    _, _, tried, _ = load_alone("--dataset own:points --model own:net --seed 4")
    after = torch.get_rng_state()
    torch.manual_seed(4)
    expected = importlib.import_module("own").net()
    torch.manual_seed(4)
    assert torch.equal(torch.get_rng_state(), after)
    assert tried.training
    assert all(torch.equal(one, tried.state_dict()[name]) for name, one in expected.state_dict().items())
    assert all(parameter.grad is None for parameter in tried.parameters())


class Target(NamedTuple):
    """A target of two parts with names."""

    label: Tensor
    weight: Tensor


def test_a_loss_is_tried_on_the_types_that_it_is_trained_on() -> None:
    def loss(outputs: Tensor, targets: Any) -> Tensor:
        kinds.append(type(targets))
        return outputs.square().mean()

    kinds: list[type] = []
    for target, expected in ((Target(torch.tensor(1), torch.tensor(0.5)), Target), ([1, 0.5], tuple)):
        samples = [(torch.ones(3), target)] * 4
        data = own_splits((samples, samples), "own")
        check_fit(data, torch.nn.Linear(3, 2), loss)
        assert kinds[-2:] == [expected] * 2
        (_, part), *_ = micro_batches_of(data.train[torch.arange(4)], 2)
        assert type(part) is expected
    assert all(len(one) == 2 for one in part)


class MadeLate(torch.nn.Module):
    """A model with a buffer that its first forward pass makes, one that it enlarges, and one that it counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("calls", torch.zeros(()))
        self.layers = torch.nn.Sequential(
            torch.nn.LazyLinear(4),
            torch.nn.LazyBatchNorm1d(),
            torch.nn.Linear(4, 2),  # type: ignore[no-untyped-call]
        )

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(3)
        if len(self.cache) == 0:
            self.cache = torch.ones(3)
        self.calls += 1
        logits: Tensor = self.layers(inputs * self.mask * self.cache)
        return logits


def test_a_model_is_tried_that_makes_buffers_in_its_first_forward_pass() -> None:
    data, model = TensorDataset(torch.randn(20, 3), torch.arange(20) % 2), MadeLate()
    check_fit(own_splits((data, data), "own"), model, find_loss("cross-entropy"))
    assert model.calls == 0
    assert model.layers[1].running_mean.tolist() == [0] * 4
    assert model.cache.tolist() == model.mask.tolist() == [1] * 3


# ---------------------------------------------------------------- samples


class Counting(IterableDataset[tuple[Tensor, int]]):
    """The numbers from 0, one after the other."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.begun = 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        self.begun += 1
        return ((torch.tensor([float(i)]), i) for i in range(self.samples))


def labels_of(batches: Iterator[Any], count: int) -> list[list[int]]:
    return [next(batches)[1].tolist() for _ in range(count)]


def test_samples_by_index_are_collated_as_torch_does_it() -> None:
    rows = [({"x": np.float32(i), "y": torch.tensor([i, i])}, (i, i / 2)) for i in range(5)]
    inputs, targets = MapStyle(rows, "data")[torch.tensor([3, 1, 0, 4])]
    assert inputs["x"].tolist() == [3, 1, 0, 4]
    assert inputs["y"].tolist() == [[3, 3], [1, 1], [0, 0], [4, 4]]
    assert [one.tolist() for one in targets] == [[3, 1, 0, 4], [1.5, 0.5, 0, 2]]
    parts = list(micro_batches_of((inputs, targets), 2))
    assert [part["y"].tolist() for part, _ in parts] == [[[3, 3], [1, 1]], [[0, 0], [4, 4]]]
    assert [[one.tolist() for one in part] for _, part in parts] == [[[3, 1], [1.5, 0.5]], [[0, 4], [0, 2]]]


def test_a_batch_is_read_at_once_where_torch_would() -> None:
    class AtOnce(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(torch.tensor(len(indices)), index) for index in indices]

    data = MapStyle(AtOnce(torch.zeros(5)), "data")
    assert [values.tolist() for values in data[torch.tensor([4, 2])]] == [[2, 2], [4, 2]]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("iteration", [0, 1, 2, 5])
def test_ranks_share_every_batch_of_an_iterable_in_its_order(world_size: int, iteration: int) -> None:
    shares = []
    for rank in range(world_size):
        data = InOrder(Counting(14), "data")
        made = ShardedBatches(data, batch_size=2, rank=rank, world_size=world_size, seed=0)
        shares.append(labels_of(made.from_iteration(iteration), 6))
    per_epoch = 14 // (2 * world_size)
    expected = []
    for number in range(iteration, iteration + 6):
        begin = number % per_epoch * 2 * world_size
        expected.append(list(range(begin, begin + 2 * world_size)))
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == expected


def test_an_iterable_is_evaluated_once_and_sent_to_another_process_from_its_beginning() -> None:
    data = InOrder(samples := Counting(7), "data")
    for _ in range(2):
        batches = evaluation_batches(data, batch_size=3, rank=0, world_size=1)
        assert [labels.tolist() for _, labels in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert samples.begun == 2
    sent = pickle.loads(pickle.dumps(data))
    assert sent[torch.tensor([1, 4])][1].tolist() == [1, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left_to_collect")
def test_other_processes_load_an_iterable_in_the_same_order() -> None:
    data = InOrder(importlib.import_module("own").Numbers(), "data")
    with closing(
        ShardedBatches(data, batch_size=2, rank=1, world_size=2, seed=0, loader_workers=2).from_iteration(1)
    ) as batches:
        assert labels_of(batches, 4) == [[6, 7], [10, 11], [2, 3], [6, 7]]


@pytest.mark.parametrize("loader_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("nothing_is_left_to_collect")
def test_random_numbers_of_samples_depend_on_the_ranks_seed_and_the_batch_alone(loader_workers: int) -> None:
    data = MapStyle(importlib.import_module("own").Noisy(), "data")
    torch.manual_seed(2)
    other = _Samples(data)
    torch.manual_seed(1)
    resumed, before = _Samples(data), torch.get_rng_state()
    made = ShardedBatches(data, batch_size=2, rank=1, world_size=2, seed=0, loader_workers=loader_workers)
    with closing(made.from_iteration(1)) as batches:
        drawn = [inputs for inputs, _ in islice(batches, 6)]  # into the third epoch
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    for number, inputs in enumerate(drawn[2:]):
        asked = next(made._batches(3 + number))
        for samples, equal in ((resumed, True), (other, False)):
            batch = samples[asked].batch
            assert isinstance(batch, tuple)
            assert torch.equal(batch[0], inputs) == equal
    assert len({tuple(row) for inputs in drawn for row in inputs.tolist()}) == 12


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left_to_collect")
def test_other_processes_outlive_ctrl_c_and_end_in_good_order_while_threads_of_theirs_share_memory(
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = InOrder(importlib.import_module("own").WithThreads(), "data")
    with closing(
        ShardedBatches(data, batch_size=2, rank=1, world_size=2, seed=0, loader_workers=2).from_iteration(0)
    ) as batches:
        assert labels_of(batches, 1) == [[2, 3]]
    assert capfd.readouterr() == ("", "")  # "terminate called without an active exception"


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_left_to_collect")
def test_what_cannot_be_sent_to_other_processes_is_refused() -> None:
    class Local(Counting):
        """A class that no other process can import."""

    batches = ShardedBatches(InOrder(Local(9), "data"), batch_size=2, rank=0, world_size=1, seed=0, loader_workers=1)
    message = "^loader-workers must be 0 where the data cannot be sent to other processes; got AttributeError: .*Local"
    with pytest.raises(UserInputError, match=message):
        next(batches.from_iteration(0))


def test_an_iterable_must_begin_again() -> None:
    class Once(Counting):
        def __init__(self) -> None:
            super().__init__(4)
            self.samples_left = super().__iter__()

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            return self.samples_left

    batches = ShardedBatches(InOrder(Once(), "training data"), batch_size=2, rank=0, world_size=1, seed=0)
    message = "^training data must give 4 samples each time that it is iterated; got 0$"
    with pytest.raises(UserInputError, match=message):
        labels_of(batches.from_iteration(0), 3)


@pytest.mark.parametrize("changed", [0, 10, 19])
def test_the_mark_of_a_data_set_knows_its_first_middle_and_last_sample(changed: int) -> None:
    def mark(values: Tensor) -> str:
        data = TensorDataset(values, torch.arange(20))
        return own_splits((data, data), "own").content

    other = torch.zeros(20, 2)
    other[changed, 1] = 1
    assert mark(torch.zeros(20, 2)) == mark(torch.zeros(20, 2))
    assert mark(other) != mark(torch.zeros(20, 2))


def test_random_augmentation_is_not_taken_for_other_data() -> None:
    class Augmented(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.full((3,), random.random()), torch.tensor(index + self.shift)

        shift = 0

    data, other = Augmented([0] * 9), Augmented([0] * 9)
    other.shift = 1
    assert own_splits((data, data), "own").content == own_splits((data, data), "own").content
    assert own_splits((other, data), "own").content != own_splits((data, data), "own").content


@pytest.mark.parametrize(
    ("attributes", "number"), [({"classes": ["a", "b", "c"]}, 3), ({"num_classes": 4}, 4), ({}, None)]
)
def test_classes_are_those_that_the_training_data_declare(attributes: dict[str, Any], number: int | None) -> None:
    train, test = (TensorDataset(torch.zeros(5, 1, 4, 4), torch.zeros(5)) for _ in range(2))
    train.__dict__.update(attributes)
    splits = own_splits((train, test), "own")
    assert (splits.num_classes, splits.sample_shape, len(splits.test)) == (number, (1, 4, 4), 5)
