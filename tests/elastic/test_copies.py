"""Copies for the case that a sum is interrupted: made while its messages travel, but before anything has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipesgd.elastic.flight import ElasticFlight, _Bucket
from pipesgd.reducers.base import Undo


@pytest.mark.parametrize(
    ("dtype", "left_out", "at_once"),
    [(torch.float32, [], False), (torch.bfloat16, [], False), (torch.float16, [], True), (torch.float32, [7.0], True)],
)
def test_what_changes_before_the_first_message_arrives_is_copied_before(
    dtype: torch.dtype, left_out: list[float], at_once: bool
) -> None:
    values, state = torch.ones(3, dtype=dtype), [torch.tensor(left_out)] if left_out else []
    flight: Any = SimpleNamespace(
        connections=SimpleNamespace(ranks=SimpleNamespace(world_size=2)),
        reducer=SimpleNamespace(state=lambda bucket: state),
        copies=Undo(),
        due=None,
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
