"""The figures in the README are those of the result files."""

from __future__ import annotations

from pathlib import Path

from experiments.results import RESULTS, load

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_measured_figures_are_those_of_the_results() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    pipelined = [
        float(row["ratio_to_ddp_median"])
        for row in load(RESULTS / "bench_pipelined.csv")
        if str(row["contender"]).startswith("pipelined width 2")
    ]
    assert f"four workloads | {min(pipelined):.2f} to {max(pipelined):.2f} |" in readme
    ring = [float(row["ratio_median"]) for row in load(RESULTS / "bench_ring.csv") if int(row["nbytes"]) >= 1 << 20]
    assert f"2 to 4 ranks | {min(ring):.2f} to {max(ring):.2f} |" in readme
    kills = load(RESULTS / "kill_and_resume.csv")
    assert f"| {sum(str(row['identical']) == 'True' for row in kills)} of {len(kills)} |" in readme
