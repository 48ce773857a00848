"""All-reduces without computation, on emulated links of 200 Mbit/s: measured times and the model's."""

from __future__ import annotations

import pytest

from experiments.results import RESULTS, load
from timing_model.all_reduce import all_reduce_time
from timing_model.params import LinkParams
from timing_model.presets import CODECS, PAYLOAD_SHARE

LINK = LinkParams(alpha=1e-4, beta=8 / (200e6 * PAYLOAD_SHARE), gamma=1e-10, sync=3e-4, overhead=5e-5)
"""Link of the testbed: its approximate latency, and nothing fitted."""
LARGE, OFF = 16_000_000, 0.05


@pytest.mark.parametrize(("algorithm", "world_size"), [("ring", 3), ("ring", 4), ("halving-doubling", 3)])
def test_large_all_reduces_take_as_long_as_was_measured(algorithm: str, world_size: int) -> None:
    """Codecs are fp32, int8 and int4. In halving-doubling on three ranks, it matters which receives are posted."""
    measured = [row for row in load(RESULTS / "bench_all_reduce_matrix.csv") if row["nbytes"] >= LARGE]
    rows = [row for row in measured if (row["algorithm"], row["p"]) == (algorithm, world_size)]
    assert {row["codec"] for row in rows} == {"fp32", "int8", "int4"}
    for row in rows:
        codec = CODECS.get(row["codec"])
        predicted = all_reduce_time(algorithm, LINK, row["nbytes"] / 4, world_size, codec=codec).total
        assert predicted == pytest.approx(row["median_s"], rel=OFF), row
