"""Errors of the formula for jitter, against simulated iterations, over a grid of jitter and jobs.

    python -m experiments.jitter        jitter.csv

``timing_model.jitter.steady_state_period`` predicts the mean time of an iteration from the cv of the computation, its
persistence and the cv of the collective; ``timing_model.simulate`` draws the times of every iteration. Nothing is
measured here. The simulation has an error of its own, which grows with the persistence, since fewer of the iterations
are independent: ``uncertainty`` is the standard error of the simulated time, from the means of 20 parts of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from experiments import command
from experiments.results import Row, grouped, save
from pipesgd.ranks import Ranks
from timing_model.jitter import steady_state_period
from timing_model.params import Noise
from timing_model.simulate import simulate_iterations

NOISES = tuple(
    Noise(cv=cv, persistence=persistence, comm_cv=comm_cv)
    for cv, persistence, comm_cv in (
        *itertools.product((0.1, 0.2, 0.4), (0.0, 0.5, 0.9, 0.97), (0.0, 0.3)),
        *itertools.product((0.0,), (0.0,), (0.1, 0.3, 0.6)),
    )
)
FULL = {"world_sizes": (2, 8, 32), "widths": (2, 3, 4), "ratios": (0.7, 1.0, 1.4), "iterations": (20_000,)}
"""Ranks, widths, times of the collective over that of the computation, and iterations that are simulated."""
QUICK = {"world_sizes": (2,), "widths": (2, 3), "ratios": (1.0,), "iterations": (400,)}
PARTS = 20


def compute(grid: Mapping[str, Sequence[float]], console: Console) -> list[Row]:
    """Return a row for every cell of the grid; times are in units of the computation's mean."""
    [iterations] = grid["iterations"]
    cells = list(itertools.product(NOISES, grid["world_sizes"], grid["widths"], grid["ratios"]))
    rows: list[Row] = []
    with command.progress(console, "jitter", len(cells)) as advance:
        for noise, world_size, width, ratio in cells:
            each = simulate_iterations(
                t_compute=1.0,
                t_comm=ratio,
                width=int(width),
                world_size=int(world_size),
                iterations=int(iterations),
                noise=noise,
                seed=len(rows),
            ).each
            parts = [float(part.mean()) for part in np.array_split(each, PARTS)]
            rows.append(
                {
                    "cv": noise.cv,
                    "persistence": noise.persistence,
                    "comm_cv": noise.comm_cv,
                    "world_size": int(world_size),
                    "width": int(width),
                    "ratio": ratio,
                    "formula": steady_state_period(1.0, ratio, int(width), int(world_size), noise),
                    "simulated": float(each.mean()),
                    "uncertainty": float(np.std(parts, ddof=1) / np.sqrt(PARTS)),
                }
            )
            advance(1, f"cv {noise.cv:g}, persistence {noise.persistence:g}")
    return rows


def summarize(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the errors of each kind of jitter, over ranks, widths and ratios, for people."""
    shown = []
    for (cv, persistence, comm_cv), own in grouped(rows, "cv", "persistence", "comm_cv").items():
        errors = np.array([row["formula"] / row["simulated"] - 1 for row in own])
        own_error = np.mean([row["uncertainty"] / row["simulated"] for row in own])
        shown.append(
            {
                "cv": f"{cv:.0%}",
                "persistence": f"{persistence:g}",
                "cv of the collective": f"{comm_cv:.0%}",
                "mean error": f"{np.abs(errors).mean():.1%}",
                "worst": f"{errors[np.abs(errors).argmax()]:+.1%}",
                "simulation": f"±{own_error:.1%}",
            }
        )
    return shown


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = command.parse(command.parser("jitter", __doc__), words)
    command.check_alone("jitter", ranks.by_torchrun, "it needs one process")
    rows = compute(QUICK if arguments.quick else FULL, console)
    save("jitter", rows, folder=arguments.output)
    command.show("The formula for jitter against simulated iterations", summarize(rows))


if __name__ == "__main__":
    command.run(main)
