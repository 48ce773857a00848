"""Refit of a profile to runs that were made: latency, bandwidth and computation are fitted to what they measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from timing_model.checks import check_one_of
from timing_model.cluster_profile import RING, Profile
from timing_model.costs import Costs, collective_time, costs_of, iteration_time
from timing_model.job import PASSES, Job
from timing_model.measured import Calibrated, ComputeProfile, Estimate, LinkProfile
from timing_model.report import table
from timing_model.run_logs import Run, read_run
from timing_model.units import format_bandwidth, format_seconds

NOISE, PRIOR = 0.03, math.log(2)
"""Standard deviations of the logarithms: of a measured collective's time, and of latency and bandwidth around the
profile's, which keep a parameter that the runs do not determine."""
Z90 = 1.645
"""Standard deviations to the ends of a 90 % interval."""
STEPS, DIFFERENCE, LONGEST = 50, 1e-4, 1.0
"""Most iterations of Gauss-Newton, change of the logarithm for a derivative, and its largest change in one step."""
LATENCIES = ("alpha", "sync", "overhead")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Result of a refit."""

    before: Profile
    profile: Profile
    runs: tuple[Run, ...]
    predicted: tuple[tuple[float, float], ...]
    """Predicted time of each run's iteration, in s, before and after the fit."""

    def as_json(self) -> dict[str, Any]:
        """Return the fit for programs; times are in s."""
        pairs = zip(self.runs, self.predicted, strict=True)
        return {
            "link": {name: dataclasses.asdict(getattr(self.profile.link, name)) for name in ("alpha", "beta")},
            "runs": [
                {"run": run.name, "measured_seconds": run.iteration, "before_seconds": before, "after_seconds": after}
                for run, (before, after) in pairs
            ],
        }


def fit(profile: Profile, folders: Sequence[Path]) -> Fit:
    """Refit link and computation to runs of ``pipesgd.train``.

    Each link of the profile, and torch's all-reduce, gets a factor for all latencies (alpha, S and o) and one for beta,
    so that the collectives' times agree with the runs' by least squares of logarithms. A parameter that the runs do
    not determine stays as it was, with an interval that says so. Forward, backward and update are scaled to the runs'
    medians. An all-reduce's residual is that of the fitted runs, where it is larger than the profile's.

    Raises:
        ValueError: a folder is not that of a run, or a run has a codec that was not measured.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        check_one_of("codec", run.codec, ["fp32", *profile.codecs])
    computed = _computes(profile, runs)
    fitted = dataclasses.replace(profile, compute=computed)
    by_link: dict[str, list[Run]] = {}
    for run in runs:
        if run.world_size > 1:
            apart = run.all_reduce == "native" or run.all_reduce in profile.links
            by_link.setdefault(run.all_reduce if apart else RING, []).append(run)
    for name, own in by_link.items():
        link = dataclasses.replace(profile.link_of(name), corrections=profile.corrections_of(name))
        link = _fitted_link(fitted, link, own)
        changed = {"link": link} if name == RING else {"links": {**fitted.links, name: link}}
        fitted = dataclasses.replace(fitted, **changed)
    fitted = dataclasses.replace(fitted, calibrated=_calibrated(fitted, runs))
    befores = dataclasses.replace(
        profile, compute=(*profile.compute, *[one for one in computed if not _has(profile, one.model, one.batch_size)])
    )
    predicted = tuple((_iteration(befores, run), _iteration(fitted, run)) for run in runs)
    off: dict[str, float] = {}
    for run, (_, after) in zip(runs, predicted, strict=True):
        off[run.all_reduce] = max(off.get(run.all_reduce, 0.0), abs(after / run.iteration - 1))
    old = fitted.calibrated.residuals
    residuals = old | {name: max(old.get(name, 0.0), error) for name, error in off.items()}
    fitted = dataclasses.replace(
        fitted,
        calibrated=dataclasses.replace(fitted.calibrated, residuals=residuals),
        link=fitted.link.at_least_off(off.get(RING, 0.0)),
        links={name: link.at_least_off(off.get(name, 0.0)) for name, link in fitted.links.items()},
    )
    return Fit(before=profile, profile=fitted, runs=tuple(runs), predicted=predicted)


def fit_text(fit: Fit) -> str:
    """Return the fit as text for people."""
    rows = [("run", "measured", "before", "", "after", "")]
    for run, predicted in zip(fit.runs, fit.predicted, strict=True):
        (before, worse), (after, better) = (
            (format_seconds(one), f"{one / run.iteration - 1:+.1%}") for one in predicted
        )
        rows.append((run.name, format_seconds(run.iteration), before, worse, after, better))
    lines = ["time of an iteration, measured, and predicted before and after the fit", ""]
    lines += [*table(rows, right=(1, 2, 3, 4, 5)), ""]
    links = [("", "before", "after", "90 % interval")]
    for name in (RING, *fit.profile.links):
        old, new = fit.before.link_of(name), fit.profile.link_of(name)
        if old == new:
            continue
        a, b = new.alpha, new.beta
        interval = f"{format_seconds(a.low)} to {format_seconds(a.high)}"
        links.append((f"{name}: latency", format_seconds(old.alpha.value), format_seconds(a.value), interval))
        rates = [
            format_bandwidth(1 / one) if one > 0 else "no limit" for one in (old.beta.value, b.value, b.high, b.low)
        ]
        links.append((f"{name}: bandwidth", rates[0], rates[1], f"{rates[2]} to {rates[3]}"))
    return "\n".join([*lines, *table(links, right=(1, 2))])


def _has(profile: Profile, model: str, batch_size: int) -> bool:
    return any((one.model, one.batch_size) == (model, batch_size) for one in profile.compute)


def _question(profile: Profile, run: Run) -> Job:
    compute = next(one for one in profile.compute if (one.model, one.batch_size) == (run.model, run.batch_size))
    return Job(
        cluster=profile,
        compute=compute,
        world_size=run.world_size,
        width=run.width,
        codec=run.codec,
        all_reduce=run.all_reduce,
        segment_bytes=run.segment_bytes,
        loader_workers=run.loader_workers,
    )


def _iteration(profile: Profile, run: Run) -> float:
    job = _question(profile, run)
    return iteration_time(job, costs_of(job))[0].total


def _computes(profile: Profile, runs: Sequence[Run]) -> tuple[ComputeProfile, ...]:
    """Return every computation, with those of the runs scaled to the runs' times."""
    computes = {(one.model, one.batch_size): one for one in profile.compute}
    for key in {(run.model, run.batch_size): None for run in runs}:
        of_key = [run for run in runs if (run.model, run.batch_size) == key]
        computes[key] = _scaled(computes.get(key) or _unknown(profile, of_key[0]), of_key)
    return tuple(computes.values())


def _unknown(profile: Profile, run: Run) -> ComputeProfile:
    """Return the computation of a model that the profile lacks; its size follows from the bytes that were sent."""
    if run.all_reduce not in ("ring", "halving-doubling", "all-to-all") or run.world_size == 1:
        raise ValueError(f"runs must tell the model's size, by a ring on 2 ranks or more; got {run.name}")
    share = 2 * (run.world_size - 1) / run.world_size
    numel = round(run.wire_bytes * 8 / (share * profile.codec_cost(run.codec).bits))
    return ComputeProfile.exact(
        model=run.model,
        batch_size=run.batch_size,
        tensors=(max(1, numel),),
        compute=run.compute,
        update=run.update,
    )


def _scaled(compute: ComputeProfile, runs: Sequence[Run]) -> ComputeProfile:
    factors = []
    for run in runs:
        times = compute.times(run.width, codec=run.codec)
        known = times.forward + times.backward
        if run.width > 1:
            known = times.slowed(known, run.communication)
        if known > 0:
            factors.append(run.compute / known)
    changes: dict[str, Any] = {"cv": float(np.median([run.cv for run in runs]))}
    if factors:
        error = Z90 * 1.2533 * changes["cv"] / math.sqrt(sum(run.iterations for run in runs))
        middle = float(np.median(factors))
        ends = min(*factors, middle * (1 - error)), max(*factors, middle * (1 + error))
        for name in PASSES:
            value = getattr(compute, name).value
            changes[name] = Estimate(value * middle, max(0.0, value * ends[0]), value * ends[1])
    for name, late in (("update", False), ("late_update", True)):
        updates = [run.update for run in runs if (run.width > 1) == late]
        if updates:
            changes[name] = Estimate(float(np.median(updates)), min(updates), max(updates))
    return dataclasses.replace(compute, **changes)


def _fitted_link(profile: Profile, link: LinkProfile, runs: Sequence[Run]) -> LinkProfile:
    asked = [(job, costs_of(job)) for job in (_question(profile, run) for run in runs)]
    measured = np.log([run.communication for run in runs])

    def errors(logs: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the errors of the runs' collectives, and of the factors, in standard deviations."""
        times = [
            costs.times.at_width(
                job.width,
                collective_time(job, _with_factors(costs, logs.tolist()), job.compute.numel).total,
            )[1]
            for job, costs in asked
        ]
        return np.concatenate([(np.log(times) - measured) / NOISE, logs / PRIOR])

    logs = np.zeros(2)
    for _ in range(STEPS):
        now = errors(logs)
        jacobian = np.stack([(errors(logs + step) - now) / DIFFERENCE for step in DIFFERENCE * np.eye(2)], axis=1)
        step = np.linalg.solve(jacobian.T @ jacobian, -jacobian.T @ now)
        logs = logs + step * min(1.0, LONGEST / max(1e-300, float(np.abs(step).max())))
        if np.abs(step).max() < DIFFERENCE:
            break
    deviations = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    changes = {}
    for number, names in enumerate((LATENCIES, ("beta",))):
        factor, reach = math.exp(logs[number]), math.exp(Z90 * deviations[number])
        for name in names:
            value = getattr(link, name).value * factor
            changes[name] = Estimate(value, value / reach, value * reach)
    return dataclasses.replace(link, corrections=link.corrections, **changes)


def _with_factors(costs: Costs, logs: Sequence[float]) -> Costs:
    latency, transfer = (math.exp(log) for log in logs)
    changed = {name: getattr(costs.link, name) * latency for name in LATENCIES} | {"beta": costs.link.beta * transfer}
    return dataclasses.replace(costs, link=dataclasses.replace(costs.link, **changed))


def _calibrated(profile: Profile, runs: Sequence[Run]) -> Calibrated:
    """Return the measured ranges of the profile, extended by those of the runs."""
    old = profile.calibrated
    ran = [run for run in runs if run.world_size > 1]
    sizes = [_question(profile, run).nbytes for run in ran]
    return dataclasses.replace(
        old,
        world_sizes=tuple(sorted({*old.world_sizes, *[run.world_size for run in ran]})),
        smallest_bytes=min([old.smallest_bytes, *sizes]),
        largest_bytes=max([old.largest_bytes, *sizes]),
    )
