"""Quotes for the page on reliability: the outcome of every fault, and of every run that was killed."""

from __future__ import annotations

import math

from experiments.kill_noticed import JOBS, Noticed
from experiments.markdown import table
from experiments.results import RESULTS, Row, grouped, load


def faults() -> str:
    """Return what the user sees of every fault, when, and what is lost."""
    heads = ["fault, and what is seen of it", "after s", "named silent", "iterations lost", "processes left"]
    return table(heads, (_fault(row) for row in load(RESULTS / "faults.csv")))


def _fault(row: Row) -> list[str]:
    line = str(row["line"] or "").replace("|", "\\|").replace("`", "'")
    seen = f"`{line}`" if line else "nothing; it continues" if row["goes_on"] else "nothing"
    missed = f"<br>**not as expected:** {row['missed']}" if row["missed"] else ""
    after = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
    lost = "" if row["iterations_lost"] is None else str(row["iterations_lost"])
    what = f"**{row['scenario']}** {row['fault']}<br>{seen}{missed}"
    return [what, after, str(row["named_silent"]), lost, str(row["orphans"])]


def fault_counts() -> str:
    """Return how many faults came out as expected, and with which deadline."""
    rows = load(RESULTS / "faults.csv")
    good = sum(not row["missed"] for row in rows)
    return f"As expected: {good} of {len(rows)} faults. `--timeout` of all runs: {rows[0]['deadline_s']:g} s."


def killed_anywhere() -> str:
    """Return how many of the runs that were killed in each phase ended in the same weights."""
    of_phases = grouped(load(RESULTS / "kill_anywhere.csv"), "phase")
    lines = [
        [phase, str(len(own)), str(sum(row["identical"] is True for row in own))] for phase, own in of_phases.items()
    ]
    return table(["killed in", "runs", "ended in the same weights and losses"], lines)


def kills_noticed() -> str:
    """Return how many kills all survivors have noticed in time, and when the last of them said so."""
    lines = []
    for job, own in grouped(load(RESULTS / "kill_noticed.csv"), "job").items():
        good = [Noticed(**row).is_good for row in own]
        seconds = sorted(math.inf if row["last_s"] is None else row["last_s"] for row in own)
        inside = sum(row["in_all_reduce"] is True for row in own)
        figures = [str(len(own)), str(inside), str(sum(good)), f"{seconds[len(own) // 2]:.2f}", f"{seconds[-1]:.2f}"]
        lines.append([f"{job}: `{JOBS[job]}`", *figures])
    heads = ["run", "kills", "in an all-reduce", "named right by all in 3 s", "median, s", "last, s"]
    return table(heads, lines)


RELIABILITY = (faults, fault_counts, killed_anywhere, kills_noticed)
