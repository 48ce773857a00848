"""More bytes, latency or codec time, or less bandwidth, is never faster; and no result is ever NaN."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from timing_model import collective_time as closed
from timing_model.all_reduce import all_reduce_time, gather_time
from timing_model.parameter_server import Servers, parameter_server_time
from timing_model.params import CodecCost, LinkParams
from timing_model.schedules import ALL_REDUCES

ROOM = 1 + 1e-9
WHOLE = 1 << 40
"""Bytes of a segment that holds every chunk. If a chunk is cut in two, more bytes are faster: the halves overlap."""

SECONDS = st.one_of(st.just(0.0), st.floats(1e-12, 1e3))
FORMULAS = (
    closed.ring_all_reduce_time,
    closed.recursive_doubling_time,
    closed.halving_doubling_time,
    closed.all_to_all_time,
    closed.lower_bound_time,
    lambda link, nbytes, p: closed.hierarchical_time(link, link, nbytes, nodes=p, ranks_per_node=3, nics=2),
    lambda link, nbytes, p: (
        parameter_server_time(link, nbytes, p, servers=Servers(number=min(p, 2)), sharing=0.5).total
    ),
)


@st.composite
def links(draw: st.DrawFn) -> LinkParams:
    return LinkParams(**{field.name: draw(SECONDS) for field in dataclasses.fields(LinkParams)})


def worse(link: LinkParams) -> list[LinkParams]:
    return [
        dataclasses.replace(link, **{field.name: getattr(link, field.name) * 1.1 + 1e-9})
        for field in dataclasses.fields(link)
    ]


@given(link=links(), nbytes=st.floats(0, 1e12), p=st.integers(1, 5000))
def test_closed_forms(link: LinkParams, nbytes: float, p: int) -> None:
    for formula in FORMULAS:
        time = formula(link, nbytes, p)
        assert math.isfinite(time)
        assert time >= 0
        assert formula(link, nbytes * 1.1 + 1, p) * ROOM >= time
        for other in worse(link):
            assert formula(other, nbytes, p) * ROOM >= time


@settings(deadline=None, max_examples=60)
@given(
    link=links(),
    costs=st.tuples(*[SECONDS] * 5),
    bits=st.floats(0.1, 64),
    numel=st.floats(1, 1e4),
    p=st.integers(1, 12),
    name=st.sampled_from(ALL_REDUCES),
)
def test_all_reduces(link: LinkParams, costs: tuple[float, ...], bits: float, numel: float, p: int, name: str) -> None:
    encode, decode, add, hop, call = costs
    codec = CodecCost(name="", bits=bits, encode=encode, decode=decode, add=add, hop=hop, call=call)

    def time(link: LinkParams, codec: CodecCost, numel: float) -> float:
        parts = all_reduce_time(
            name,
            link,
            numel,
            p,
            codec=codec,
            segment_bytes=WHOLE,
            inner=link,
            ranks_per_node=2 if p % 2 == 0 else 1,
        )
        gathered = gather_time(link, numel, p, codec=codec, segment_bytes=WHOLE)
        assert all(math.isfinite(part) for part in (*parts, *gathered))
        assert min(*parts, *gathered) >= -1e-9 * parts.total
        assert gathered.total >= 0
        return parts.total

    base = time(link, codec, numel)
    if name.endswith("doubling") and p not in (1, 2, 4, 8):
        return  # messages meet at a wire, where a slightly later one can be just in time to be served before another
    assert time(link, codec, numel * 1.5) * ROOM >= base
    assert time(link, dataclasses.replace(codec, bits=bits * 1.5), numel) * ROOM >= base
    assert time(link, dataclasses.replace(codec, hop=hop + 1e-9, encode=encode * 1.5), numel) * ROOM >= base
    for other in worse(link):
        assert time(other, codec, numel) * ROOM >= base
