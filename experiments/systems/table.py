"""The table of all systems: a row for each on every workload and link, without an empty cell that nothing explains."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from experiments import command
from experiments.paired import median, paired_ratio
from experiments.results import Row
from experiments.simulated_tables import crossing_of, mean_change, mean_of_all
from experiments.systems.accuracy import Curve, Key, best_curves
from experiments.systems.catalogue import HOGWILD
from experiments.systems.times import Cell
from pipesgd.strategy import hidden_share

BASELINE, REFERENCE = "ddp", "d-sync"
"""Systems that times, and accuracies, are compared with."""
BASELINES = {"ddp": BASELINE, "fp16": "ddp-fp16"}
"""Systems that times are compared with, by their names in columns."""
TARGET_BELOW = 0.01
"""Distance of the target below the mean accuracy that the reference ends with."""
UNTRAINED = "no training: each rank would have a model of its own, and only its share of the samples"
"""Reason why the least time of an iteration has no accuracy."""
TIME_OF_OTHERS = {
    HOGWILD: "time to target: it has one host, without links",
    **dict.fromkeys(
        ("pmls-ssp", "ps-async", "theano-easgd-async"),
        "time to target: its accuracy is that of ranks of the same speed, and over links their speeds differ",
    ),
}
"""Systems whose iterations to the target were made in another setting than their time, and the reason."""
NOT_MEASURED = {
    "hidden_share": "hidden share: nothing is exchanged",
    "fastest_rank_s": "fastest and slowest rank: it has the time of the first one alone",
    "memory_bytes": "memory: the ranks share it",
    "cpu_share": "share of the cores: it has processes that are not counted",
    "times_as_fast_as_ddp": "times as fast as DDP: no rounds with DDP",
    "times_as_fast_as_fp16": "times as fast as DDP with fp16: no rounds with it",
}
"""Reasons for figures that a system does not have."""


def rows_of(
    titles: Mapping[str, str],
    times: Mapping[tuple[str, str, str], Cell],
    keys: Mapping[str, str],
    curves: Mapping[Key, Curve],
    starts: Mapping[tuple[str, str], int] = MappingProxyType({}),
) -> list[Row]:
    """Return the rows.

    Args:
        titles: names and titles of the systems.
        times: cells by workload, rate and what computes.
        keys: key of each system in a cell.
        curves: accuracies, of which the best share of the learning rate counts.
        starts: iterations of the synchronous start of each workload and system that has one.
    """
    first: dict[str, str] = {}
    best = best_curves(curves)
    rows = []
    for (workload, rate, computes), cell in times.items():
        _, reference = best.get((workload, REFERENCE), (None, []))
        target = target_of(reference)
        for name, title in titles.items():
            rounds = cell.rounds.get(keys[name], [])
            seconds = [one["seconds"] for one in rounds]
            share, own = best.get((workload, name), (None, []))
            row: Row = {
                "workload": workload,
                "rate": rate,
                "computes": computes,
                "system": name,
                "title": title,
                "timed_with": first.setdefault(keys[name], name),
                **_time(rounds),
                **_prediction(cell.predictions[keys[name]], median(seconds) if seconds else None),
                **_against(seconds, {} if name == HOGWILD else cell.rounds, keys),
                "start_iterations": starts.get((workload, name), 0),
                "share_of_lr": share,
                **accuracy_of(own, reference, target),
            }
            if "--loader-workers" in keys[name]:
                row["cpu_share"] = None
            row["not_reached"] = row["not_reached"] or TIME_OF_OTHERS.get(name) or cell.not_timed.get(keys[name], "")
            reached = row["iterations_to_target"]
            row["time_to_target_s"] = None if row["not_reached"] else seconds_until(row, reached)
            why = [reason for column, reason in NOT_MEASURED.items() if row[column] is None]
            row["not_measured"] = cell.not_timed.get(keys[name], "; ".join(why))
            rows.append(row)
    return rows


def seconds_until(row: Row, iterations: float) -> float:
    """Return the calculated seconds of this many ``iterations`` of a row: each takes what one takes in the median.

    Those of a synchronous start take longer by the communication that a late iteration hides.
    """
    start = min(row["start_iterations"], iterations)
    return float(iterations * row["iteration_s"] + start * row["hidden_s"])


def _time(rounds: Sequence[Mapping[str, float]]) -> Row:
    """Return the times of an iteration, its bytes and memory: medians over rounds. A missing figure is None."""

    def over(name: str) -> float | None:
        known = [one[name] for one in rounds if name in one]
        return median(known) if known else None

    seconds = [one["seconds"] for one in rounds]
    hidden = [one["communication_seconds"] - one["exposed_seconds"] for one in rounds]
    communication, exposed = (sum(one[f"{name}_seconds"] for one in rounds) for name in ("communication", "exposed"))
    return {
        "iteration_s": over("seconds"),
        "iteration_lowest_s": min(seconds, default=None),
        "iteration_highest_s": max(seconds, default=None),
        "fastest_rank_s": over("fastest_seconds"),
        "slowest_rank_s": over("slowest_seconds"),
        "rounds": len(seconds),
        "wire_bytes": over("wire_bytes"),
        "hidden_share": hidden_share(communication, exposed),
        "hidden_s": median(hidden) if hidden else None,
        "memory_bytes": over("memory_bytes"),
        "cpu_share": over("cpu_share"),
    }


def _prediction(predicted: Mapping[str, Any], measured: float | None) -> Row:
    seconds = predicted.get("seconds")
    return {
        "predicted_s": seconds,
        "predicted_low_s": predicted.get("low"),
        "predicted_high_s": predicted.get("high"),
        "prediction_error": None if seconds is None or measured is None else seconds / measured - 1,
        "not_predicted": predicted.get("reason", ""),
    }


def _against(
    seconds: Sequence[float], rounds: Mapping[str, Sequence[Mapping[str, float]]], keys: Mapping[str, str]
) -> Row:
    """Return how many times as fast as each baseline, in the same rounds of one job; None without any."""
    found: Row = {}
    for name, baseline in BASELINES.items():
        of_baseline = [one["seconds"] for one in rounds.get(keys.get(baseline, ""), [])]
        ratio = paired_ratio(of_baseline, seconds) if of_baseline and seconds else None
        for end, field in (("", "median"), ("_low", "low"), ("_high", "high")):
            found[f"times_as_fast_as_{name}{end}"] = None if ratio is None else getattr(ratio, field)
    return found


def target_of(reference: Sequence[Curve]) -> float | None:
    """Return the accuracy to reach, from the reference's curves; None if there are none, or one has failed."""
    end = mean_of_all([curve.end for curve in reference])
    return None if end is None else end - TARGET_BELOW


def accuracy_of(curves: Sequence[Curve], reference: Sequence[Curve], target: float | None) -> Row:
    """Return the accuracies of the seeds of one system, and the iterations to ``target``: their median over seeds.

    There are no iterations unless every seed was seen to cross it, and ends no lower: a median of those that did would
    be of the lucky. Seeds are compared with the same ones of the reference.
    """
    ends, base = [curve.end for curve in curves], [curve.end for curve in reference[: len(curves)]]
    known = [end for end in ends if end is not None]
    crossings = [
        None if target is None or one.end is None or one.end < target else crossing_of(target, one.points)
        for one in curves
    ]
    reached = [one for one in crossings if one is not None]
    failures = "; ".join(f"seed {seed}: {curve.failure}" for seed, curve in enumerate(curves) if curve.failure)
    if target is None:
        why = "no target: synchronous training was left out, or failed"
    elif not curves:
        why = failures = UNTRAINED
    elif len(reached) < len(curves):
        why = f"reached and kept by {len(reached)} of {len(curves)} seeds"
        if early := sum(curve.points[0][1] >= target for curve in curves if curve.points):
            why += f", and in {early} above it in the first evaluation"
    else:
        why = ""
    return {
        "seeds": len(curves),
        "trained_on": curves[0].how if curves else "",
        "accuracy_mean": mean_of_all(ends),
        "accuracy_difference": mean_change(ends, base, operator.sub) if base else None,
        "accuracy_lowest": min(known, default=None),
        "accuracy_highest": max(known, default=None),
        "failures": failures,
        "target_accuracy": target,
        "iterations_to_target": median(reached) if reached and len(reached) == len(curves) else None,
        "not_reached": why,
    }


def show(rows: Sequence[Row], title: str) -> None:
    """Print the rows of one workload and link."""
    text, target = command.text_of, rows[0]["target_accuracy"]
    command.show(
        title if target is None else f"{title}; target accuracy {target:.2%}",
        [
            {
                "system": row["system"],
                "ms an iteration": text(row, "iteration_s", ".1f", 1e3),
                "predicted": text(row, "predicted_s", ".1f", 1e3),
                "as fast as DDP": text(row, "times_as_fast_as_ddp", ".2f"),
                "MB, all ranks": text(row, "wire_bytes", ".2f", 1e-6),
                "hidden": text(row, "hidden_share", ".0%"),
                "MB of memory": text(row, "memory_bytes", ".0f", 1e-6),
                "accuracy %": text(row, "accuracy_mean", ".2f", 100),
                "points above d-sync": text(row, "accuracy_difference", "+.2f", 100),
                "iterations to target": text(row, "iterations_to_target", ".0f"),
                "s to target, calculated": text(row, "time_to_target_s", ".1f"),
            }
            for row in rows
        ],
    )


def reasons(rows: Iterable[Row]) -> list[str]:
    """Return the reasons for cells without a figure, one a line and each once."""
    lines = []
    for row in rows:
        trained = f"{row['workload']}, {row['system']}"
        for name, why in (
            (row["system"], row["not_predicted"] and f"not predicted: {row['not_predicted']}"),
            (row["system"], row["not_measured"]),
            (trained, row["failures"]),
            (trained, row["not_reached"]),
        ):
            lines += [f"{name}: {why}"] if why else []
    return list(dict.fromkeys(lines))
