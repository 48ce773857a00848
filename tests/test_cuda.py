"""Tests that need a GPU: the order of work on its streams, and training on it with every all-reduce."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import RankFailed, run_ranks
from _sections import sections
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from pipesgd import LocalSteps, OwnCodec, Pipelined
from pipesgd.backend import BackendOptions
from pipesgd.comm.thread import CommunicationThread
from pipesgd.data import ShardedBatches
from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.ddp import attach, compress
from pipesgd.ranks import Ranks
from pipesgd.sections import PREDICTIONS
from timing_model.schedules import ALL_REDUCES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

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


class Fp8(OwnCodec):
    """A codec of one's own, in torch's operations: a scale, then a float of eight bits for each value."""

    gives_back = True

    def __repr__(self) -> str:
        return "Fp8"  # the same name in every process of tests

    def wire_bytes(self, numel: int) -> int:
        return 4 + numel

    def compress(self, values: Tensor, wire: Tensor, key: int) -> None:
        scale = (values.abs().max() / 256).clamp(min=2.0**-100)  # a division that is exact on every device
        wire[:4].view(torch.float32).copy_(scale)
        wire[4:].view(torch.float8_e4m3fn).copy_(values / scale)

    def decompress(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(wire[4:].view(torch.float8_e4m3fn))
        values.mul_(wire[:4].view(torch.float32))


def _weights(ranks: Ranks, device: str, options: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the weights after ten iterations, exact except for the codec, which computes the same on every device."""
    ranks.local_world_size, ranks.local_rank = 2, ranks.rank % 2
    model = nn.ParameterList([nn.Parameter(torch.zeros(numel, device=device)) for numel in (5000, 1, 301)])
    kind: Any = LocalSteps if "local_steps" in options else Pipelined
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pipeline = kind(model, optimizer, segment_bytes=4096, ranks=ranks, **options)
    for iteration in range(10):
        generator = torch.Generator().manual_seed(10 * iteration + ranks.rank)
        gradients = [torch.randn(parameter.shape, generator=generator).to(device) for parameter in model]
        sum((parameter * gradient).sum() for parameter, gradient in zip(model, gradients, strict=True)).backward()
        report = pipeline.step()
    pipeline.flush()
    pipeline.close()
    return torch.cat([parameter.detach().cpu() for parameter in model]), report.wire_bytes


OTHER_OPTIONS: list[dict[str, Any]] = [
    {"codec": "topk"},
    {"codec": Fp8()},
    {"width": 1, "buckets": 3},
    {"buckets": 2, "codec": "int4"},
    {"width": 3, "synchronous_start": 4, "codec": "int8"},
    {"connections": 2, "rate_limit": "800mbit"},
    {"local_steps": 4, "width": 1, "outer_lr": 1.0},
    {"local_steps": 2, "fragments": 2, "outer_lr": 0.5, "codec": "int4"},
]


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"all_reduce": name, "codec": codec}
            for name in ALL_REDUCES
            if name != "native"
            for codec in ("bf16", "int8", "int4", "ternary", "qsgd", "sign")
        ),
        *OTHER_OPTIONS,
    ],
    ids=str,
)
def test_training_on_a_gpu_leaves_the_weights_of_training_on_a_cpu(options: dict[str, Any]) -> None:
    here = run_ranks(4, _weights, "cpu", options)
    there = run_ranks(4, _weights, "cuda", options)
    for (expected, nbytes), (weights, counted) in zip(here, there, strict=True):
        assert torch.equal(weights, expected)
        assert torch.equal(weights, here[0][0])
        assert counted == nbytes


# ---- Loops with a model


def _batches(ranks: Ranks, device: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * ranks.world_size, 16, 20, generator=generator)
    targets = torch.randint(10, (2 * ranks.world_size, 16), generator=generator)
    found = [(inputs[number], targets[number]) for number in range(ranks.rank, len(inputs), ranks.world_size)] * 12
    return [(one.to(device), other.to(device)) for one, other in found]


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)


def _trained(
    ranks: Ranks, door: str, options: dict[str, Any], device: str = "cuda", float16: bool = False, compiled: str = ""
) -> tuple[Tensor, list[float]]:
    """Return the weights, and the loss of every iteration, of a loop on ``device``.

    The door is "pipelined", "attached" or "compressed". With ``float16`` the loop computes in it, at a loss scale at
    which nothing overflows. ``compiled`` is a mode of ``torch.compile``.
    """
    model = _model(device)
    called: Any = torch.compile(model, mode=compiled) if compiled else model
    if door != "pipelined":
        called = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, enabled=float16)
    if door == "pipelined":
        kind: Any = LocalSteps if "local_steps" in options else Pipelined
        opened = kind(called, optimizer, ranks=ranks, scaler=scaler, **options)
    elif door == "attached":
        opened = attach(called, optimizer, scaler=scaler, **sections(**options))
    else:
        opened = compress(called, **sections(**options))
    losses = []
    for inputs, targets in _batches(ranks, device):
        with torch.autocast(device, torch.float16, enabled=float16):
            loss = cross_entropy(called(inputs), targets)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if door == "pipelined":
            opened.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    opened.close()
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()]), losses


def _assert_trained(found: list[tuple[Tensor, list[float]]]) -> None:
    for weights, losses in found:
        assert torch.equal(weights, found[0][0]), "replicas"
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"codec": "int4"}, {"width": 1}, {"width": 3, "codec": "int8"}, {"codec": "topk"}, {"codec": "powersgd"}],
    ids=str,
)
@pytest.mark.parametrize("float16", [False, True])
def test_the_loop_of_a_ddp_program_on_a_gpu_trains_as_pipelined_does(options: dict[str, Any], float16: bool) -> None:
    expected = run_ranks(2, _trained, "pipelined", options, "cuda", float16)
    found = run_ranks(2, _trained, "attached", options, "cuda", float16)
    _assert_trained(expected)
    _assert_trained(found)
    assert torch.equal(found[0][0], expected[0][0])


@pytest.mark.parametrize(
    "options", [*({"prediction": name} for name in PREDICTIONS), {"width": 1, "buckets": 2}], ids=str
)
def test_a_loop_on_a_gpu_ends_close_to_the_one_on_a_cpu(options: dict[str, Any]) -> None:
    here = run_ranks(2, _trained, "pipelined", options, "cpu")
    there = run_ranks(2, _trained, "pipelined", options, "cuda")
    _assert_trained(there)
    torch.testing.assert_close(there[0][0], here[0][0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(there[0][1], here[0][1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("door", ["pipelined", "attached"])
@pytest.mark.parametrize("float16", [False, True])
def test_local_steps_on_a_gpu_train_and_leave_equal_replicas(door: str, float16: bool) -> None:
    _assert_trained(run_ranks(2, _trained, door, {"local_steps": 2, "codec": "int4"}, "cuda", float16))


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_compressed_buckets_on_a_gpu_train_and_leave_equal_replicas(codec: str) -> None:
    _assert_trained(run_ranks(2, _trained, "compressed", {"codec": codec}))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("default", {}),
        ("reduce-overhead", {"prediction": "none"}),
        ("reduce-overhead", {"width": 1}),
    ],
    ids=str,
)
def test_a_compiled_model_on_a_gpu_ends_close_to_the_other(mode: str, options: dict[str, Any]) -> None:
    plain = run_ranks(2, _trained, "pipelined", options)
    compiled = run_ranks(2, _trained, "pipelined", options, "cuda", False, mode, deadline=120.0)
    _assert_trained(compiled)
    torch.testing.assert_close(compiled[0][0], plain[0][0], rtol=1e-3, atol=1e-4)


def test_a_prediction_with_cuda_graphs_ends_with_torchs_line_about_them() -> None:
    with pytest.raises(RankFailed, match="tensor output of CUDAGraphs that has been overwritten"):
        run_ranks(2, _trained, "pipelined", {}, "cuda", False, "reduce-overhead", deadline=120.0)


# ---- Restarts, the backend and the command


def _resumed(ranks: Ranks, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights after ten iterations, and those of a run that restarts from a file after the sixth."""
    ends = []
    for restart in (None, 6):
        torch.manual_seed(0)
        model = nn.Linear(20, 30, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        pipeline = Pipelined(model, optimizer, width=3, ranks=ranks, **sections(**options))
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
                pipeline = Pipelined(model, optimizer, width=3, ranks=ranks, **sections(**options))
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


def _train_on_two_nodes(folder: Path, words: str) -> dict[str, Any]:
    """Run the command on two nodes of one rank each, which share this machine and its GPU; return the summary."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "-m", "pipesgd.train", *words.split(), "--output", folder / "run"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]
    printed = [node.communicate(timeout=150)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return summary


@pytest.mark.parametrize("words", ["", "--codec int4 --precision fp16", "--local-steps 4", "--width 3 --codec topk"])
def test_the_command_trains_and_is_resumed_on_a_gpu(words: str, tmp_path: Path) -> None:
    words += " --device cuda --dataset digits --lr 0.05 --iterations 60 --checkpoint-iterations 20"
    whole = _train_on_two_nodes(tmp_path, words)
    assert whole["replicas_identical"]
    assert whole["options"]["device"] == "cuda"
    assert whole["final"]["test_accuracy"] > 0.7
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "iteration-60")
    resumed = _train_on_two_nodes(tmp_path, f"{words} --resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
