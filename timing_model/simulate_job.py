"""Simulation of a job's iterations one by one: the mean, which the closed formulas predict, and its spread."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from timing_model.buckets import WHOLE
from timing_model.configurations import describe
from timing_model.costs import costs_of, times_of
from timing_model.iteration import loaded
from timing_model.jitter import noise_over
from timing_model.job import Job
from timing_model.plots import plot_timeline
from timing_model.predict import Answer, predict, refuse_outside
from timing_model.report import job_line, support_lines, table, with_cost
from timing_model.simulate import simulate_iterations
from timing_model.support import support_of
from timing_model.trace import timeline
from timing_model.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ITERATIONS = 1000
MEDIAN_ITERATIONS = 5000
"""Iterations for a median that varies by less than a percent with the seed."""
MOST_DRAWS, OTHER_DRAWS = 10**10, 300
"""Most times that are drawn, which takes minutes; and times drawn in as long as the rest of an iteration takes, which
counts where ranks are few."""
DRAWN_RANKS, DRAWN_ITERATIONS = 6, 6
"""Ranks and iterations in the picture."""


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """Result of simulating the iterations. Times are in s."""

    answer: Answer
    """Prediction by the formulas."""
    iterations: int
    period: float
    """Mean time of an iteration, after the pipeline has filled."""
    median: float
    p95: float
    slowest: float
    job: float
    """Time of all iterations."""

    def as_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        numbers = {name: getattr(self, name) for name in ("iterations", "period", "median", "p95", "slowest", "job")}
        return {"simulated_seconds": numbers, "predicted": self.answer.as_json()}

    def text(self) -> str:
        """Return the result as text for people."""
        job, predicted = self.answer.job, self.answer.iteration.total
        noise = job.noise
        jitter = f"jitter: cv {noise.cv:.1%} lognormal"
        jitter += f", persistence {noise.persistence:g}" if noise.persistence else ""
        jitter += f", all-reduce cv {noise.comm_cv:.1%}" if noise.comm_cv else ""
        slow = ", ".join(f"{one:g}x" for one in noise.slow_ranks)
        jitter += f", ranks always slow: {slow}" if slow else ""
        off = f"  ({predicted / self.period - 1:+.1%})" if self.period > 0 else ""
        rows = [
            ("an iteration, on average", format_seconds(self.period)),
            ("  by the formulas", format_seconds(predicted) + off),
            ("  median", format_seconds(self.median)),
            ("  95th percentile", format_seconds(self.p95)),
            ("  slowest", format_seconds(self.slowest)),
            (f"all {self.iterations:,} iterations", with_cost(job, self.job)),
        ]
        if job.length.price is not None and job.iterations_per_epoch is not None:
            rows.append(("an epoch", with_cost(job, self.period * job.iterations_per_epoch)))
        head = [job_line(job), describe(job), jitter, ""]
        return "\n".join([*head, *table(rows), "", *support_lines(self.answer.support)])


def simulate_job(job: Job, *, seed: int = 0, extrapolate: bool = False) -> SimulatedJob:
    """Simulate the job's iterations, 1000 if it does not say how many.

    Raises ``ValueError`` as ``predict`` does, for ddp and for buckets at width 1, and if it would take too long.
    """
    if job.strategy == "ddp":
        raise ValueError("strategy must be pipelined or ps-sync to be simulated; got ddp")
    if job.width == 1 and job.cut != WHOLE:
        raise ValueError(f"buckets must be 1 to be simulated at width 1; got {job.buckets}")
    calm = dataclasses.replace(job, compute=dataclasses.replace(job.compute, cv=0.0))
    refuse_outside(support_of(calm), extrapolate)  # the simulation needs none of the formulas that cv limits
    answer = predict(job, extrapolate=True)
    iterations = job.job_iterations or ITERATIONS
    most = MOST_DRAWS // (job.world_size + OTHER_DRAWS)
    if iterations > most:
        raise ValueError(f"iterations must be at most {most} to be simulated; got {iterations}")
    times, t_batch = loaded(times_of(job, costs_of(job)), job.loader_workers, job.cores_used)
    window, t_comm = times.window(job.local_steps).at_width(job.width, answer.collective.total)
    simulation = simulate_iterations(
        t_compute=window / job.local_steps,
        t_comm=t_comm,
        width=job.width,
        world_size=job.workers,
        iterations=iterations,
        local_steps=job.local_steps,
        t_batch=t_batch,
        noise=job.noise,
        seed=seed,
    )
    each = simulation.each
    return SimulatedJob(
        answer=answer,
        iterations=iterations,
        period=simulation.period,
        median=float(np.median(each)),
        p95=float(np.percentile(each, 95)),
        slowest=float(each.max()),
        job=float(simulation.ends[-1]),
    )


def median_share(job: Job) -> float:
    """Return the median of an iteration over its mean, as simulated without buckets: people measure the median of a
    run."""
    if job.noise.cv == job.noise.comm_cv == 0:
        return 1.0
    same = job.changed(iterations=MEDIAN_ITERATIONS, epochs=None, buckets="1")
    simulated = simulate_job(same, extrapolate=True)
    return simulated.median / simulated.period if simulated.period > 0 else 1.0


def plot_simulated_job(answer: Answer, axes: Axes, *, seed: int = 0) -> Axes:
    """Plot who computes and who communicates in the first iterations, for a few ranks."""
    job = answer.job
    ranks = min(job.workers, DRAWN_RANKS)
    noise = noise_over(dataclasses.replace(job.noise, slow_ranks=job.noise.slow_ranks[:ranks]), job.local_steps)
    servers = job.strategy == "ps-sync"
    t_comm = answer.collective.total / (2 * ranks if servers else 1)
    spans = timeline(
        "parameter-server" if servers else "pipelined",
        times_of(job, costs_of(job)).window(job.local_steps),
        t_comm,
        world_size=ranks,
        iterations=DRAWN_ITERATIONS,
        width=job.width,
        noise=noise,
        seed=seed,
    )
    title = describe(job) + ("" if ranks == job.workers else f": {ranks} of {job.workers} ranks")
    return plot_timeline(spans, axes, title=title)
