"""Every tensor is on the parameters' device, after a restart too: shown without a GPU, by torch's fake tensors."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pretended_gpu import PretendedGpu, as_loaded, pretend_cuda
from _ranks import run_ranks
from _sections import sections
from torch import Tensor, nn

from pipesgd import Pipelined
from pipesgd.cli import parse
from pipesgd.codecs.options import CodecOptions, Fp32, codec_named
from pipesgd.comm.all_reduce import Finish, no_op
from pipesgd.data import ShardedBatches
from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.errors import UserInputError
from pipesgd.flat_buffer import FlatBuffer, on_device
from pipesgd.ranks import Ranks
from pipesgd.reducers.base import Reducer
from pipesgd.reducers.dense import DenseReducer
from pipesgd.reducers.low_rank import LowRank
from pipesgd.reducers.powersgd import PowerSgdReducer
from pipesgd.run.workload import load
from pipesgd.sections import PREDICTIONS
from pipesgd.systems.exchanges.topk import TopK

pytestmark = pytest.mark.slow

CODECS = [  # those that work on fake tensors: kernels of the others need a real GPU
    Fp32(),
    codec_named("topk", momentum_correction=0.5),
    codec_named("powersgd"),
]


def _pipeline(ranks: Ranks, options: dict[str, Any]) -> tuple[list[nn.Parameter], Pipelined]:
    parameters = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in ((20, 30), (7,))]
    momentum = 0.0 if isinstance(options.get("codec"), CodecOptions) and options["codec"].own_momentum else 0.9
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    return parameters, Pipelined(nn.ParameterList(parameters), optimizer, width=3, ranks=ranks, **sections(**options))


def _train(parameters: list[nn.Parameter], pipeline: Pipelined) -> None:
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        pipeline.step()


def _train_and_resume(ranks: Ranks, cases: list[dict[str, Any]]) -> list[set[str]]:
    """Train, save the state as a checkpoint does, continue from it; return the devices of the state kept at the end."""
    mode = PretendedGpu()
    pretend_cuda(mode)
    devices = []
    with mode:
        for options in cases:
            parameters, pipeline = _pipeline(ranks, options)
            _train(parameters, pipeline)
            state = as_loaded(pipeline.state_dict())
            pipeline.flush()
            pipeline.close()
            parameters, pipeline = _pipeline(ranks, options)
            pipeline.load_state_dict(state)
            _train(parameters, pipeline)
            devices.append(_devices(pipeline.state_dict()))
            pipeline.flush()
            pipeline.close()
    return devices


def _devices(state: Any) -> set[str]:
    if isinstance(state, torch.Tensor):
        return {state.device.type}
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else []
    return set().union(*map(_devices, values))


class OneRankOfTwo:
    """The exact all-reduce, and all-gather, of one of two ranks, where the other contributes nothing."""

    def __call__(self, flat: Tensor, residual: Tensor | None = None, key: int = 0, finish: Finish = no_op) -> None:
        if residual is not None:
            flat.add_(residual)
        finish(flat)

    def wire_bytes(self, flat: Tensor) -> int:
        return flat.nbytes


REDUCERS: dict[str, Callable[[], Reducer]] = {
    "dense": lambda: DenseReducer(OneRankOfTwo(), exact=False, error_feedback=True),
    "topk": lambda: TopK(0.1, momentum_correction=0.5).sums(OneRankOfTwo(), rank=1, world_size=2),
    "powersgd": lambda: PowerSgdReducer(OneRankOfTwo(), world_size=2, rule=LowRank(2)),
}


def _exchange_and_resume(ranks: Ranks) -> dict[tuple[str, torch.dtype], set[str]]:
    mode = PretendedGpu()
    pretend_cuda(mode)
    devices = {}
    with mode:
        for name, dtype in itertools.product(REDUCERS, (torch.float32, torch.bfloat16, torch.complex64)):
            buffer = FlatBuffer([torch.zeros(shape, dtype=dtype, device="cuda") for shape in ((20, 30), (7,))])
            first, second = REDUCERS[name](), REDUCERS[name]()
            first.sum(buffer, 0)
            second.load_state_dict(on_device(as_loaded(first.state_dict()), buffer.flats[0].device))
            second.sum(buffer, 1)
            second.wire_bytes(buffer, 1)
            devices[name, dtype] = _devices(second.state_dict())
    return devices


class InMode(BatchedDataset):
    """Twelve samples without values, which count how many batches were loaded."""

    loaded = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, indices: Tensor) -> Batch:
        self.loaded += 1
        return torch.zeros(len(indices), 3), {"labels": torch.zeros(len(indices), dtype=torch.int64)}


def _load_on_the_gpu(ranks: Ranks) -> list[tuple[int, list[int], set[str]]]:
    """Return for each of some batches: how many were loaded by then, whose copies were waited for, and its devices."""
    mode = PretendedGpu()
    pretend_cuda(mode)
    waited: list[int] = []
    copies = itertools.count()

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def record_event(self) -> int:
            return next(copies)

        def wait_event(self, number: int) -> None:
            waited.append(number)

    torch.cuda.Stream = torch.cuda.current_stream = Stream  # type: ignore[misc, assignment]
    found = []
    with mode, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no accelerator is found")  # to pin memory for
        data = InMode()
        shards = ShardedBatches(data, batch_size=4, rank=0, world_size=1, seed=0)
        with contextlib.closing(shards.from_iteration(0, torch.device("cuda", 0))) as batches:
            for images, targets in itertools.islice(batches, 4):
                devices = _devices([images, targets, batches.last.batch])
                found.append((data.loaded, list(waited), devices))
    return found


def test_batches_are_copied_to_the_gpu_one_ahead_and_each_waits_for_its_own_copy() -> None:
    [found] = run_ranks(1, _load_on_the_gpu, process_group=False)
    assert found == [(number + 2, list(range(number + 1)), {"cuda"}) for number in range(4)]


def test_an_exchange_keeps_what_it_remembers_on_the_gpu() -> None:
    [devices] = run_ranks(1, _exchange_and_resume, process_group=False)
    for case, found in devices.items():
        assert found == {"cuda"}, case


def test_a_run_on_a_gpu_is_resumed_with_every_prediction_and_every_codec_of_its_own() -> None:
    cases = [*({"codec": codec, "guard": True} for codec in CODECS), *({"prediction": name} for name in PREDICTIONS)]
    [devices] = run_ranks(1, _train_and_resume, cases)
    for case, found in zip(cases, devices, strict=True):
        assert found == {"cuda"}, case


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    ranks = Ranks(rank=0, world_size=3, store=dist.HashStore(), local_world_size=3)
    with pytest.raises(
        UserInputError, match=r"^nproc-per-node must be at most the number of GPUs, 2, with device cuda; got 3$"
    ):
        load(parse(["--device", "cuda"]), ranks)
