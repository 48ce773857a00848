"""Tests that need a GPU: the order of work on its streams, and training on it with every all-reduce."""

from __future__ import annotations

import contextlib
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import run_ranks
from torch import nn

from pipesgd import Pipelined
from pipesgd.backend import BackendOptions
from pipesgd.codecs.options import CodecOptions
from pipesgd.comm.thread import CommunicationThread
from pipesgd.data import ShardedBatches
from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.pipeline_config import PREDICTIONS
from pipesgd.ranks import Ranks
from timing_model.schedules import ALL_REDUCES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

CYCLES = 200_000_000
"""Clock cycles of a delay on the GPU, about a tenth of a second: long enough to expose code that does not wait."""


def test_a_job_begins_after_the_computation_and_is_done_when_its_future_is() -> None:
    thread = CommunicationThread(torch.device("cuda", torch.cuda.current_device()))
    values, copied = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    torch.cuda._sleep(CYCLES)
    values.fill_(1.0)

    def copy() -> None:
        torch.cuda._sleep(CYCLES)
        copied.copy_(values)

    future = thread.submit(copy)
    other = torch.cuda.Stream()
    future.result(60)
    with torch.cuda.stream(other):  # a stream that has waited for nothing
        assert copied.cpu().eq(1.0).all()
    thread.close()


class Large(BatchedDataset):
    """Samples whose values are their numbers, large enough that a copy takes a while."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, indices: torch.Tensor) -> Batch:
        return indices.float().view(-1, 1).repeat(1, 1 << 20), indices


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_the_gpu_are_those_of_the_cpu_however_late_it_computes(workers: int) -> None:
    shards = ShardedBatches(Large(), batch_size=4, rank=0, world_size=1, seed=0, loader_workers=workers)
    sums, expected = [], []
    with contextlib.closing(shards.from_iteration(0, torch.device("cuda"))) as there:
        for inputs, targets in itertools.islice(there, 15):
            torch.cuda._sleep(CYCLES // 10)  # by then, batches far ahead are copied
            sums.append(torch.stack([inputs.double().mean(1).sum(), targets.double().sum()]))
            del inputs, targets  # their memory is free for the next copies once this stream has used it
    with contextlib.closing(shards.from_iteration(0)) as here:
        for _, targets in itertools.islice(here, 15):
            expected.append([float(targets.sum())] * 2)
    assert torch.stack(sums).tolist() == expected


def _weights(ranks: Ranks, device: str, all_reduce: str, codec: str) -> tuple[torch.Tensor, int]:
    """Return the weights after ten iterations, exact except for the codec, which computes the same on every device."""
    ranks.local_world_size, ranks.local_rank = 2, ranks.rank % 2
    model = nn.ParameterList([nn.Parameter(torch.zeros(numel, device=device)) for numel in (5000, 1, 301)])
    options = CodecOptions(codec=codec)
    pipeline = Pipelined(
        *(model, torch.optim.SGD(model.parameters(), lr=0.5)),
        width=2,
        all_reduce=all_reduce,
        codec=options,
        segment_bytes=4096,
        ranks=ranks,
    )
    for iteration in range(10):
        generator = torch.Generator().manual_seed(10 * iteration + ranks.rank)
        gradients = [torch.randn(parameter.shape, generator=generator).to(device) for parameter in model]
        sum((parameter * gradient).sum() for parameter, gradient in zip(model, gradients, strict=True)).backward()
        report = pipeline.step()
    pipeline.flush()
    pipeline.close()
    return torch.cat([parameter.detach().cpu() for parameter in model]), report.wire_bytes


@pytest.mark.parametrize("all_reduce", [name for name in ALL_REDUCES if name != "native"])
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "ternary", "qsgd", "sign"])
def test_training_on_a_gpu_leaves_the_weights_of_training_on_a_cpu(all_reduce: str, codec: str) -> None:
    _assert_same_weights(all_reduce, codec)


def test_training_on_a_gpu_with_topk_leaves_the_weights_of_training_on_a_cpu() -> None:
    _assert_same_weights("ring", "topk")


def _assert_same_weights(all_reduce: str, codec: str) -> None:
    here = run_ranks(4, _weights, "cpu", all_reduce, codec)
    there = run_ranks(4, _weights, "cuda", all_reduce, codec)
    for (expected, nbytes), (weights, counted) in zip(here, there, strict=True):
        assert torch.equal(weights, expected)
        assert torch.equal(weights, here[0][0])
        assert counted == nbytes


def _resumed(ranks: Ranks, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights after ten iterations, and those of a run that restarts from a file after the sixth."""
    ends = []
    for restart in (None, 6):
        torch.manual_seed(0)
        model = nn.Linear(20, 30, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pipeline = Pipelined(model, optimizer, width=3, ranks=ranks, **options)
        for iteration in range(10):
            if iteration == restart:
                with pipeline.true_weights():
                    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
                file = io.BytesIO()
                torch.save([weights, optimizer.state_dict(), pipeline.state_dict()], file)
                file.seek(0)
                weights, of_optimizer, of_pipeline = torch.load(file, map_location="cpu", weights_only=True)
                pipeline.flush()
                pipeline.close()
                model = nn.Linear(20, 30, device="cuda")
                model.load_state_dict(weights)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                optimizer.load_state_dict(of_optimizer)
                pipeline = Pipelined(model, optimizer, width=3, ranks=ranks, **options)
                pipeline.load_state_dict(of_pipeline)
            generator = torch.Generator().manual_seed(10 * iteration + ranks.rank)
            model(torch.randn(4, 20, generator=generator).to("cuda")).square().mean().backward()
            pipeline.step()
        pipeline.flush()
        pipeline.close()
        ends.append(model.weight.detach().cpu())
    return ends[0], ends[1]


RESUMED: list[dict[str, Any]] = [
    *({"prediction": prediction} for prediction in PREDICTIONS),
    *({"codec": codec} for codec in ("topk", "powersgd", "int4", "sign")),
    {"guard": True},
]


@pytest.mark.parametrize("options", RESUMED, ids=str)
def test_a_resumed_run_on_a_gpu_is_the_uninterrupted_one(options: dict[str, Any]) -> None:
    for uninterrupted, resumed in run_ranks(2, _resumed, options):
        assert torch.equal(uninterrupted, resumed)


def _large_sums(ranks: Ranks) -> list[torch.Tensor]:
    dist.init_process_group(
        "pipesgd",
        store=ranks.store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pg_options=BackendOptions(codec="int8", least_bytes=1024),
    )
    values = torch.randn(30_011, generator=torch.Generator().manual_seed(ranks.rank))
    small = torch.full((5,), float(ranks.rank + 1), device="cuda")
    on_device = [values.cuda(), values.cuda().bfloat16(), small]
    work = dist.all_reduce(on_device[0], async_op=True)
    assert work is not None
    work.get_future().wait()
    for tensor in on_device[1:]:
        dist.all_reduce(tensor)
    on_host = [values, values.bfloat16(), small.cpu() * 0 + 3]
    for tensor in on_host[:2]:
        dist.all_reduce(tensor)
    sums = [tensor.cpu() for tensor in on_device]
    dist.destroy_process_group()
    for there, here in zip(sums, on_host, strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=0)
    return sums


def test_large_sums_of_the_backend_are_those_of_the_cpu() -> None:
    of_0, of_1 = run_ranks(2, _large_sums, process_group=False)
    assert all(torch.equal(one, other) for one, other in zip(of_0, of_1, strict=True))
