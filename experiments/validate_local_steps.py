"""Predictions of local steps, and of a rate limit, compared with measurements on the testbed.

    python -m experiments.validate_local_steps      validate_local_steps.csv: three settings, about nine minutes each

Four emulated nodes train on synthetic accelerators, which leave the cores of this machine to the network. In each
setting, the links and the computation are calibrated once, without local steps and without a limit; the model predicts
the mean iteration of every configuration; and only then all are measured in one job, in three passes, the second one
in reverse order, of which the median counts. One setting limits the rate of ranks on faster links.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments import command
from experiments.results import Row, save
from experiments.validation_runs import Setting, calibrate, time_in_passes
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from timing_model.cluster_profile import Profile
from timing_model.job import Job
from timing_model.predict import Answer, predict
from timing_model.units import parse_bandwidth

CODECS = ("int8", "int4")
WIDTHS, STEPS = (1, 2), (1, 2, 4, 8)
WINDOWS, LEAST_ITERATIONS = 4, 16
"""Fewest windows, and fewest iterations, that are timed in a pass."""
PASSES = 3
CALIBRATION_SECONDS, QUICK_CALIBRATION_SECONDS = 60.0, 4.0
TARGET = 0.03


SETTINGS: tuple[tuple[Setting, str | None], ...] = (
    (Setting(nodes=4, rate="25mbit", accelerator="75ms"), None),
    (Setting(nodes=4, rate="50mbit", accelerator="75ms"), None),
    (Setting(nodes=4, rate="200mbit", accelerator="75ms"), "50mbit"),
)
"""Testbeds with accelerators, and the rates that ranks limit themselves to."""


def configurations() -> list[dict[str, Any]]:
    """Return the configurations that are measured in every setting, as fields of a ``Job``."""
    return [
        {"width": width, "codec": codec, "local_steps": steps}
        for steps in STEPS
        for codec in CODECS
        for width in WIDTHS
    ]


def ask(profile: Profile, nodes: int, rate_limit: str | None, configuration: dict[str, Any]) -> Answer:
    """Return the prediction of a configuration."""
    if rate_limit is not None:
        profile = profile.limited_to(parse_bandwidth("rate-limit", rate_limit))
    [compute] = profile.compute
    job = Job(cluster=profile, compute=compute, world_size=nodes, **configuration)
    return predict(job, extrapolate=True)


def words_of(rate_limit: str | None, configuration: dict[str, Any]) -> str:
    """Return the arguments of pipesgd.train that run a configuration."""
    options = configuration if rate_limit is None else configuration | {"rate_limit": rate_limit}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())


def windows_of(configuration: dict[str, Any]) -> int:
    """Return the windows that are timed in a pass."""
    return max(WINDOWS, LEAST_ITERATIONS // int(configuration["local_steps"]))


def measure(setting: Setting, rate_limit: str | None, folder: Path, *, quick: bool) -> list[Row]:
    """Calibrate, predict, and then measure; return a row for every configuration.

    Raises:
        RunError: a job failed.
    """
    seconds = QUICK_CALIBRATION_SECONDS if quick else CALIBRATION_SECONDS
    words = f"--seconds {seconds} --codecs {' '.join(CODECS)} --all-reduces ring {setting.words}"
    with setting.testbed() as testbed:
        profile = calibrate(testbed, words, folder)
    found = [(one, ask(profile, setting.nodes, rate_limit, one)) for one in configurations()[-4 if quick else 0 :]]
    cells = [
        {
            "words": f"{setting.words} {words_of(rate_limit, one)}",
            "iterations": one["local_steps"] * (1 if quick else windows_of(one)),
        }
        for one, _ in found
    ]
    with setting.testbed() as testbed:
        times = time_in_passes(testbed, cells, PASSES, folder)
    rows: list[Row] = []
    for (one, answer), of_cell in zip(found, times, strict=True):
        measured = [timed["seconds"] for timed in of_cell]
        rows.append(
            {
                "setting": setting.name + ("" if rate_limit is None else f", limited to {rate_limit}"),
                **one,
                "predicted_s": answer.iteration.total,
                "low_s": answer.low,
                "high_s": answer.high,
                "computation_s": answer.iteration.compute,
                "all_reduce_s": answer.collective.total,
                "measured_s": float(np.median(measured)),
                "passes_apart": max(measured) / min(measured) - 1,
                "error": answer.iteration.total / float(np.median(measured)) - 1,
                "cpu_share": float(np.mean([timed["cpu_share"] for timed in of_cell])),
            }
        )
    return rows


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the mean and largest error of predictions, in every setting and of local steps."""
    of = {setting: [row for row in rows if row["setting"] == setting] for setting in {row["setting"] for row in rows}}
    of["local steps"] = [row for row in rows if row["local_steps"] > 1]
    return {
        name: {
            "mean_error": float(np.mean([abs(row["error"]) for row in own])),
            "largest_error": max(abs(row["error"]) for row in own),
        }
        for name, own in of.items()
        if own
    }


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = command.parse(command.parser("validate_local_steps", __doc__), words)
    command.check_alone("validate_local_steps", ranks.by_torchrun, "it starts torchrun itself, on every node")
    rows: list[Row] = []
    settings = SETTINGS[:1] if arguments.quick else SETTINGS
    with command.progress(console, "settings", len(settings)) as advance:
        for setting, rate_limit in settings:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(setting, rate_limit, Path(folder), quick=arguments.quick)
            advance(1, setting.name)
    summary = summarize(rows)
    path = save("validate_local_steps", rows, extra={"summary": summary}, folder=arguments.output)
    command.show(
        "Local steps, predicted and measured",
        [
            {
                "setting": row["setting"],
                "configuration": f"width {row['width']}, {row['codec']}, H {row['local_steps']}",
                "predicted ms": f"{1e3 * row['predicted_s']:.1f}",
                "measured ms": f"{1e3 * row['measured_s']:.1f}",
                "error %": f"{100 * row['error']:+.1f}",
                "passes apart %": f"{100 * row['passes_apart']:.1f}",
                "cores used": f"{row['cpu_share']:.0%}",
            }
            for row in rows
        ],
    )
    say(
        console,
        *(
            f"{name}: mean error {one['mean_error']:.1%}, at most {one['largest_error']:.1%}"
            for name, one in summary.items()
        ),
        f"target: {TARGET:.0%} on average; wrote {path}",
    )


if __name__ == "__main__":
    command.run(main)
