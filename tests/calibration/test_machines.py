"""Readings of the machines that the ranks are on."""

from pathlib import Path

import numpy as np
import pytest

from pipesgd.calibration import machines, report
from pipesgd.calibration.computation import Computation
from pipesgd.calibration.machines import StolenTime
from pipesgd.ranks import alone
from timing_model.measured import Estimate

UNKNOWN = Estimate(1.0, 0.0, 2.0)
COMPUTATION = Computation(
    parts={},
    cv=0.0,
    persistence=UNKNOWN,
    comm_cv=UNKNOWN,
    slow_ranks={},
    compute_slowdown=UNKNOWN,
    codec_compute_slowdown=UNKNOWN,
    processor_share=1.0,
    late_handovers={},
)


def test_stolen_time_is_a_share_of_all_that_the_cores_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields are user, nice, system, idle, iowait, irq, softirq, steal; user and nice include guest and guest_nice."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 50 500 5 1 4 30 60 6\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    monkeypatch.setattr(machines, "CORES", stat)
    stolen_time = StolenTime()
    assert stolen_time.share(alone()) == 0
    stat.write_text("cpu  140 20 60 520 5 2 5 38 90 9\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert stolen_time.share(alone()) == pytest.approx(8 / 90)
    assert stolen_time.share(alone()) == 0, "since the last time"


def test_where_no_hypervisor_tells_nothing_is_stolen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "CORES", tmp_path / "none")
    assert StolenTime().share(alone()) == 0


@pytest.mark.skipif(not machines.CORES.exists(), reason="only Linux counts stolen time, in /proc/stat")
def test_this_machine_tells() -> None:
    begin = np.array(machines._core_times())
    assert (begin > 0).any()
    assert (np.array(machines._core_times()) >= begin).all()


def test_a_busy_host_is_named_and_a_quiet_one_is_not() -> None:
    assert report.warnings(COMPUTATION, {}, 0.005) == []
    [line] = report.warnings(COMPUTATION, {}, 0.043)
    assert line.startswith("busy host: its hypervisor gave 4.3% of a machine's cores to other guests during the ")
