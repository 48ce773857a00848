"""Copies for the case that a sum is interrupted: made while its messages travel, but before anything has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipesgd.codecs.options import codec_named
from pipesgd.elastic.flight import LEAVE_VALUES, ElasticFlight, _Bucket
from pipesgd.reducers.base import Undo


@pytest.mark.parametrize(
    ("dtype", "codec", "left_out", "at_once"),
    [
        (torch.float32, "int8", [], False),
        (torch.bfloat16, "int4", [], False),
        (torch.float16, "int8", [], True),
        (torch.float32, "int4", [7.0], True),
        (torch.float32, "fp32", [], True),
        (torch.float32, "module:Own", [], True),
    ],
)
def test_what_changes_before_the_first_message_arrives_is_copied_before(
    dtype: torch.dtype, codec: str, left_out: list[float], at_once: bool
) -> None:
    values, state = torch.ones(3, dtype=dtype), [torch.tensor(left_out)] if left_out else []
    flight: Any = SimpleNamespace(
        connections=SimpleNamespace(ranks=SimpleNamespace(world_size=2)),
        reducer=SimpleNamespace(state=lambda bucket: state),
        copies=Undo(),
        due=None,
        _codec=SimpleNamespace(codec=codec),
    )
    flight.keep_what_is_due = lambda: ElasticFlight.keep_what_is_due(flight)
    flight.end_copies = lambda *, put_back: ElasticFlight.end_copies(flight, put_back=put_back)
    buffer = SimpleNamespace(buckets=[SimpleNamespace(flats=[values])])
    bucket = _Bucket(flight, SimpleNamespace(buffer=buffer, norms=[]), 0)  # type: ignore[arg-type]
    assert (flight.due is None) == at_once
    flight.keep_what_is_due()
    for one in (values, *state):
        one.zero_()
    bucket.put_back()
    assert [one.tolist() for one in (values, *state)] == [[1.0] * 3, *([left_out] if left_out else [])]


@pytest.mark.parametrize("name", LEAVE_VALUES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_values_stay_when_the_first_message_is_encoded(name: str, rounding: str) -> None:
    codec = codec_named(name, rounding=rounding).make()
    values = torch.randn(3 * codec.block + 1, generator=torch.Generator().manual_seed(1))
    before = values.clone()
    codec.encode(values, None, torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8), key=7)
    assert values.equal(before)
