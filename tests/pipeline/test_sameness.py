"""Arguments of ``Pipelined`` must be the same on all ranks: others are named at once, before anything is added up."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from _ranks import run_ranks
from _sections import sections
from torch import nn

from pipesgd import Pipelined
from pipesgd.codecs.options import codec_named
from pipesgd.errors import DisagreementError
from pipesgd.pipeline.sameness import plain
from pipesgd.ranks import Ranks
from pipesgd.sections import Updates, Wire

NOT_COMPARED = {"model", "optimizer", "timeout", "secret_file", "ranks", "process_group", "mesh"}
"""``timeout`` and ``secret_file``, which may differ, and objects of each rank; other tests have model and optimizer."""
PER_RANK: dict[str, tuple[tuple[dict[str, Any], dict[str, Any]], str]] = {
    "codec": (({"codec": "bf16"}, {"codec": "fp16"}), "codec must be the same on all ranks; got 'bf16' on rank 0"),
    "codec option": (
        ({"codec": codec_named("topk", density=0.1)}, {"codec": codec_named("topk", density=0.2)}),
        "codec's density must be the same on all ranks; got 0.1 on rank 0, 0.2 on rank 1",
    ),
    "width": (({"width": 2}, {"width": 3}), "width must be the same on all ranks; got 2 on rank 0, 3 on rank 1"),
    "warm-up": (({}, {"synchronous_start": 3}), "synchronous_start must"),
    "prediction": (({}, {"prediction": "none"}), "prediction must"),
    "guard": (({}, {"guard": True}), "guard must"),
    "clip_norm": (({"clip_norm": 0.01}, {"clip_norm": 0.02}), "got 0.01 on rank 0, 0.02 on rank 1"),
    "clip_value": (({}, {"clip_value": 0.02}), "got None on rank 0, 0.02 on rank 1"),
    "all_reduce": (({}, {"all_reduce": "all-to-all"}), "got 'ring' on rank 0, 'all-to-all' on rank 1"),
    "segments": (({}, {"segment_bytes": 4096}), "segment_bytes must"),
    "connections": (
        ({}, {"connections": 2}),
        "connections must be the same on all ranks; got 1 on rank 0, 2 on rank 1",
    ),
    "transport": (
        ({"transport": "gloo"}, {"transport": "tcp"}),
        "transport must be the same on all ranks; got 'gloo' on rank 0",
    ),
    "rate limit": (({}, {"rate_limit": "1mbit"}), "rate_limit must"),
    "buckets": (({}, {"buckets": 2}), "buckets must be the same on all ranks; got '1' on rank 0, '2' on rank 1"),
    "reduce": (({}, {"reduce": "factors"}), "reduce must"),
    "seed": (({}, {"seed": 1}), "seed must"),
    "init_sync": (({}, {"init_sync": False}), "init_sync must"),
    "on_nonfinite": (({}, {"on_nonfinite": "skip"}), "on_nonfinite must"),
    "scaler": (({}, {"scaler": torch.amp.GradScaler("cpu")}), "scaler must"),
}


def _construct(ranks: Ranks, of_ranks: tuple[dict[str, Any], ...], optimizers: str = "") -> str | None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = list(model.parameters())
    options: dict[str, Any] = {"lr": 0.1}
    if ranks.rank == 1:
        if optimizers == "order":
            parameters = [*parameters[2:], *parameters[:2]]
        elif optimizers == "fewer":
            parameters = parameters[:3]
        elif optimizers == "shape":
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
            parameters = list(model.parameters())
        elif optimizers == "buffers":
            model.register_buffer("mean", torch.zeros(3))
        elif optimizers == "momentum":
            options["momentum"] = 0.9
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, **options)
    if optimizers == "class" and ranks.rank == 1:
        optimizer = torch.optim.Adagrad(parameters, lr=0.1)
    try:
        Pipelined(model, optimizer, ranks=ranks, **sections(**of_ranks[ranks.rank])).close()
    except DisagreementError as error:
        return str(error)
    return None


def _construct_all(ranks: Ranks) -> dict[str, str | None]:
    return {name: _construct(ranks, of_ranks) for name, (of_ranks, _) in PER_RANK.items()}


@pytest.mark.slow
def test_options_that_differ_are_named_with_both_values() -> None:
    """Different options used to be summed with each other, or to make replicas diverge, silently."""
    one, other = run_ranks(2, _construct_all)
    assert one == other
    for name, (_, message) in PER_RANK.items():
        assert one[name] is not None, name
        assert message in one[name], name


def test_every_argument_is_compared() -> None:
    arguments = inspect.signature(Pipelined).parameters.keys() - {"wire", "updates"}
    arguments |= {item.name for section in (Wire, Updates) for item in dataclasses.fields(section)}
    assert {name for of_ranks, _ in PER_RANK.values() for options in of_ranks for name in options} == (
        arguments - NOT_COMPARED
    )


def _construct_with_optimizers(ranks: Ranks, kinds: list[str]) -> dict[str, str | None]:
    return {kind: _construct(ranks, ({}, {}), kind) for kind in kinds}


@pytest.mark.slow
def test_parameters_buffers_and_optimizers_that_differ_are_named() -> None:
    messages = {
        "order": "parameters (number 0) must be the same on all ranks; got '0.weight 4x4 float32' on rank 0, "
        "'1.weight 4x4 float32' on rank 1",
        "fewer": "number of parameters in group 0 must be the same on all ranks; got 4 on rank 0, 3 on rank 1",
        "shape": "got '0.weight 4x4 float32' on rank 0, '0.weight 6x4 float32' on rank 1",
        "buffers": "buffers (number 0) must be the same on all ranks; got 'none' on rank 0, 'mean 3 float32' on rank 1",
        "momentum": "momentum of parameter group 0 must be the same on all ranks; got 0 on rank 0, 0.9 on rank 1",
        "class": "optimizer must be the same on all ranks; got 'SGD' on rank 0, 'Adagrad' on rank 1",
    }
    one, other = run_ranks(2, _construct_with_optimizers, list(messages))
    assert one == other
    for kind, message in messages.items():
        assert one[kind] is not None, kind
        assert message in one[kind], kind


def _construct_with_own_timeouts(ranks: Ranks) -> str | None:
    return _construct(ranks, tuple({"timeout": 10.0 + rank} for rank in range(ranks.world_size)))


@pytest.mark.slow
def test_timeouts_may_differ() -> None:
    assert run_ranks(2, _construct_with_own_timeouts) == [None, None]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(torch.tensor(0.5), 0.5), ((0.9, 0.99), [0.9, 0.99]), (None, None), (len, "len"), (object(), "object")],
)
def test_settings_are_compared_as_plain_values_without_addresses(value: Any, expected: Any) -> None:
    assert plain(value) == expected
