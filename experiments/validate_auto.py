"""Regret of ``--width auto`` as a user runs it, against every configuration that it could have chosen.

    python -m experiments.validate_auto                   validate_auto.csv, .png, validate_auto_cells.csv
    python -m experiments.validate_auto --settings "4 x 200mbit, 75ms"

A setting is a testbed (nodes, rate, latency) and an emulated accelerator of each rank, which leaves the cores of this
machine to the network. In each, the command is that of a user who knows nothing: a run of two thousand iterations with
``--width auto --codec auto --all-reduce auto``, which calibrates, plans and auditions. It is stopped some iterations
after its decision. Then all configurations in the space of the planner are measured in one job, in four passes in
turns, every second one in reverse order. They are also the cells that the predictions of that calibration are compared
with; those in which the ranks leave at least 40 % of the cores to others count.

The fastest configuration by one half of the passes is judged by the other half, as is the choice of the run, and
the regret is the mean of both ways: a configuration that was measured to be fast by luck gains nothing. It may be
negative. "reported" is the time that the run said it measured.

Finished settings are kept in validate_auto.runs.json in the output folder: the same command measures only those that
are missing. All settings take an hour.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments import command
from experiments.kept_runs import KeptRuns
from experiments.results import Row, code_state, save, save_panels
from experiments.testbed_jobs import last_words, run_job
from experiments.validation_runs import Network, public
from pipesgd.config import AUTO_OPTIONS
from pipesgd.errors import RunError, UserInputError
from pipesgd.planning.choose import AUTO_CODECS
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from timing_model.choices import WIDTHS
from timing_model.cluster_profile import Profile
from timing_model.job import NATIVE_CODECS, Job
from timing_model.predict import predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKLOAD = "--dataset digits --hidden-sizes 1000 1000 --batch-size 16 --lr 0.01"
"""An MLP with a gradient of 4.3 MB. The accelerators are synthetic: it learns nothing."""
AUTO = "--width auto --codec auto --all-reduce auto"
ITERATIONS, OBSERVED = 2000, 40
"""Iterations that the run is asked for, and those that it makes after its decision before it is stopped."""
NEAR = 1.5
"""Multiple of the best prediction up to which a configuration may be the fastest, and is measured for longer."""
PASSES, QUICK_PASSES = (0, 1, 1, 0), (0, 1)
"""Half of the measurements that each pass counts for."""
SECONDS, QUICK_SECONDS, LEAST_ITERATIONS, MOST_ITERATIONS = 1.5, 0.3, 4, 60
"""Seconds of a configuration in a pass, for which as many iterations are timed as are predicted to take this long."""
FAR_SHARE = 0.5
"""Share of those seconds for a configuration that is not near the best one."""
DEADLINE, POLL = 900.0, 0.5
MEAN_REGRET, LARGEST_REGRET, REPORTED_ERROR = 0.005, 0.03, 0.02
"""Targets."""


@dataclass(frozen=True, kw_only=True)
class Setting(Network):
    """A testbed, and the accelerator of each of its nodes."""

    accelerator: str

    @property
    def name(self) -> str:
        return f"{self.place}, {self.accelerator}"

    @property
    def words(self) -> str:
        """Arguments of pipesgd.train for the workload."""
        return f"{WORKLOAD} --model experiments.accelerators:synthetic={self.accelerator}"


SETTINGS = {
    one.name: one
    for one in (
        Setting(nodes=2, rate="50mbit", accelerator="75ms"),
        Setting(nodes=2, rate="200mbit", accelerator="40ms"),
        Setting(nodes=2, rate="1gbit", accelerator="25ms"),
        Setting(nodes=3, rate="100mbit", latency="5ms", accelerator="100ms"),
        Setting(nodes=3, rate="200mbit", accelerator="75ms,jitter=0.1"),
        Setting(nodes=3, rate="500mbit", latency="2ms", accelerator="50ms"),
        Setting(nodes=3, rate="1gbit", accelerator="40ms,slow=1x1.3"),
        Setting(nodes=4, rate="100mbit", accelerator="150ms"),
        Setting(nodes=4, rate="200mbit", accelerator="75ms"),
        Setting(nodes=4, rate="200mbit", latency="20ms", accelerator="100ms,jitter=0.1,persistence=0.9"),
        Setting(nodes=4, rate="500mbit", accelerator="50ms"),
        Setting(nodes=4, rate="1gbit", latency="5ms", accelerator="60ms"),
        Setting(nodes=4, rate="500mbit", last_rate="150mbit", accelerator="60ms"),
        Setting(nodes=5, rate="200mbit", accelerator="100ms"),
        Setting(nodes=6, rate="500mbit", latency="1ms", accelerator="100ms"),
    )
}
QUICK = Setting(nodes=2, rate="200mbit", accelerator="20ms")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A setting: what the run chose, and the measured times of the configurations, in s."""

    commit: str | None
    choice: dict[str, Any]
    """The plan in the run's run.json: its choices, what it reported, and its audition."""
    calibration_s: float
    """Time that the calibration took."""
    began_after: float
    """Seconds from the start of torchrun to the first iteration: loading, connecting, and the calibration."""
    profile: str
    """Text of the cluster.toml behind the predictions, as far as ``public`` keeps it."""
    cells: dict[str, dict[str, Any]]
    """Configurations by their arguments of pipesgd.train: prediction with its interval, seconds of each half of the
    passes, share of the cores used."""


def configurations() -> list[str]:
    """Return the arguments of all configurations in the planner's space."""
    return [
        f"--width {width} --codec {codec} --all-reduce {all_reduce}"
        for width, all_reduce, codec in itertools.product(WIDTHS, ("ring", "native"), AUTO_CODECS)
        if all_reduce == "ring" or codec in NATIVE_CODECS
    ]


def words_of(choices: Mapping[str, Any]) -> str:
    """Return the arguments of a choice, without the segment size, which is not chosen here."""
    return " ".join(f"--{name} {choices[name]}" for name in AUTO_OPTIONS if name != "segment-bytes")


def run_with_auto(setting: Setting, folder: Path, *, quick: bool) -> tuple[dict[str, Any], float]:
    """Run the command of a user until its decision, and a while longer; return its plan and the time to begin.

    Raises:
        RunError: it failed, or did not decide in time.
    """
    output, log = folder / "run", folder / "log"
    words = f"{setting.words} {AUTO} --iterations {ITERATIONS} --output {output}"
    observed = 5 if quick else OBSERVED
    begin, began_after = time.perf_counter(), None
    with setting.testbed() as testbed, log.open("wb") as file:
        job = testbed.torchrun(["-m", "pipesgd.train", *shlex.split(words)], stdout=file, stderr=subprocess.STDOUT)
        try:
            while job.running():
                if time.perf_counter() - begin > DEADLINE:
                    raise RunError(f"{setting.name}: a run must decide within {DEADLINE:.0f} s; got none")
                time.sleep(POLL)
                done = _lines(output / "metrics.jsonl")
                if done and began_after is None:
                    began_after = time.perf_counter() - begin
                planned = _planned(output / "run.json")
                audition = planned and planned["audition"]
                over_at = audition["turns"][-1][0] if audition and not audition["passes"] else 0
                if planned and began_after and not (audition and audition["passes"]) and done >= over_at + observed:
                    return planned, began_after
        finally:
            job.terminate()
    raise RunError(f"{setting.name}: a run with auto must train; got {last_words(log.read_text(errors='replace'))}")


def _planned(path: Path) -> dict[str, Any] | None:
    try:
        planned: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8"))["planned"]
    except FileNotFoundError:
        return None
    return planned


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def predicted(setting: Setting, profile: Profile) -> dict[str, dict[str, float]]:
    """Return the predictions of all configurations."""
    [compute] = [dataclasses.replace(one, measured=()) for one in profile.compute]
    found = {}
    for words in configurations():
        width, codec, all_reduce = shlex.split(words)[1::2]
        job = Job(
            cluster=profile,
            compute=compute,
            world_size=setting.nodes,
            width=int(width),
            codec=codec,
            all_reduce=all_reduce,
        )
        answer = predict(job, extrapolate=True)
        found[words] = {"predicted_s": answer.iteration.total, "low_s": answer.low, "high_s": answer.high}
    return found


def measure(setting: Setting, folder: Path, *, quick: bool = False) -> Measured:
    """Let a run choose, then measure what it could have chosen.

    Raises:
        RunError: a job failed.
    """
    choice, began_after = run_with_auto(setting, folder, quick=quick)
    profile = Profile.load(folder / "run" / "cluster.toml")
    found = predicted(setting, profile)
    near = NEAR * min(one["predicted_s"] for one in found.values())
    cells = []
    for words, one in found.items():
        seconds = (QUICK_SECONDS if quick else SECONDS) * (1 if one["predicted_s"] <= near else FAR_SHARE)
        iterations = int(np.clip(seconds / one["predicted_s"], LEAST_ITERATIONS, MOST_ITERATIONS))
        cells.append({"words": f"{setting.words} {words}", "iterations": iterations})
    plan_file, times_file = folder / "plan.json", folder / "times.json"
    passes = QUICK_PASSES if quick else PASSES
    order = [cells if number % 2 == 0 else cells[::-1] for number in range(len(passes))]
    plan_file.write_text(json.dumps(order), encoding="utf-8")
    line = f"experiments.timed_configurations {plan_file} {times_file}"
    with setting.testbed() as testbed:
        if failure := run_job(testbed, ["-m", *shlex.split(line)], folder / "log", deadline=2 * DEADLINE):
            raise RunError(f"{setting.name}: the configurations must be timed; got {failure}")
    times = [
        of_pass if number % 2 == 0 else of_pass[::-1]
        for number, of_pass in enumerate(json.loads(times_file.read_text(encoding="utf-8")))
    ]
    for number, one in enumerate(found.values()):
        of_cell = [of_pass[number] for of_pass in times]
        one["cpu_share"] = float(np.mean([timed["cpu_share"] for timed in of_cell]))
        for half in (0, 1):
            one[f"half_{half}_s"] = float(
                np.mean([timed["seconds"] for timed, own in zip(of_cell, passes, strict=True) if own == half])
            )
    calibration_s = float(str(profile.provenance["calibration_seconds"]))
    return Measured(
        commit=code_state(),
        choice=choice,
        calibration_s=calibration_s,
        began_after=began_after,
        profile=public(profile, folder / "public.toml"),
        cells=found,
    )


def regret(cells: Mapping[str, Mapping[str, float]], chosen: str) -> float:
    """Return the share by which the choice takes longer than the configuration that was fastest in the other half."""
    found = []
    for own, other in ((0, 1), (1, 0)):
        best = min(cells, key=lambda words: cells[words][f"half_{other}_s"])
        found.append(cells[chosen][f"half_{own}_s"] / cells[best][f"half_{own}_s"] - 1)
    return float(np.mean(found))


def decisions(found: Mapping[str, Measured]) -> list[Row]:
    """Return a row for every setting."""
    rows: list[Row] = []
    for name, one in found.items():
        chosen = words_of(one.choice["choices"])
        cell = one.cells.get(chosen)
        if cell is None:
            raise RunError(f"{name}: the choice must be among the measured configurations; got {chosen}")
        means = {words: mean_of(other) for words, other in one.cells.items()}
        audition = one.choice["audition"]
        first = min(one.cells, key=lambda words: one.cells[words]["predicted_s"])
        job_seconds = ITERATIONS * means[chosen]
        rows.append(
            {
                "setting": name,
                "chosen": chosen,
                "fastest": min(means, key=lambda words: means[words]),
                "measured_s": means[chosen],
                "reported_s": one.choice["iteration_seconds"],
                "reported_error": one.choice["iteration_seconds"] / means[chosen] - 1,
                "reported_how": one.choice["support"],
                "regret": regret(one.cells, chosen),
                "regret_of_the_prediction": regret(one.cells, first),
                "predicted_error": cell["predicted_s"] / means[chosen] - 1,
                "audition_share": None if not audition or audition["cost"] is None else audition["cost"] / job_seconds,
                "calibration_s": one.calibration_s,
                "began_after_s": one.began_after,
            }
        )
    return rows


def mean_of(cell: Mapping[str, float]) -> float:
    """Return the mean time of a configuration, in s."""
    return (cell["half_0_s"] + cell["half_1_s"]) / 2


def tabulate(found: Mapping[str, Measured]) -> list[Row]:
    """Return a row for every measured configuration."""
    return [
        {"setting": name, "words": words, **cell, "error": cell["predicted_s"] / mean_of(cell) - 1}
        for name, one in found.items()
        for words, cell in one.cells.items()
    ]


def summarize(rows: Sequence[Row], cells: Sequence[Row]) -> dict[str, Any]:
    """Return the figures that have targets, and others."""
    regrets = [row["regret"] for row in rows]
    reported = [abs(row["reported_error"]) for row in rows if row["reported_how"] == "measured"]
    shares = [row["audition_share"] for row in rows if row["audition_share"] is not None]
    free = [row for row in cells if row["cpu_share"] < 0.6]
    errors = [abs(row["error"]) for row in free]
    return {
        "settings": len(rows),
        "mean_regret": float(np.mean(regrets)),
        "largest_regret": max(regrets),
        "mean_regret_of_the_prediction": float(np.mean([row["regret_of_the_prediction"] for row in rows])),
        "mean_reported_error": float(np.mean(reported)) if reported else None,
        "largest_reported_error": max(reported, default=None),
        "largest_audition_share": max(shares, default=None),
        "cells_below_60_percent_cpu": len(free),
        "mean_error_of_those": float(np.mean(errors)) if errors else None,
        "p95_error_of_those": float(np.quantile(errors, 0.95)) if errors else None,
        "covered_of_those": float(np.mean([row["low_s"] <= mean_of(row) <= row["high_s"] for row in free]))
        if free
        else None,
    }


def plot(rows: Sequence[Row], axes: Axes) -> Axes:
    """Draw the regret of every setting: of the run with its audition, and of the best prediction alone."""
    places = np.arange(len(rows))[::-1]
    for name, label, height in (("regret_of_the_prediction", "prediction alone", 0.2), ("regret", "audition", -0.2)):
        axes.barh(places + height, [100 * row[name] for row in rows], height=0.38, label=label)
    axes.set_yticks(places, [row["setting"] for row in rows])
    axes.axvline(0, color="black", linewidth=1)
    axes.set(xlabel="slower than the fastest configuration (%)", title="--width auto")
    axes.legend(loc="lower right")
    return axes


def draw(name: str, rows: list[Row], folder: Path) -> Path:
    """Write the figure."""
    return save_panels(name, [lambda axes: plot(rows, axes)], size=(7.5, 5.0), folder=folder)


def publish(found: Mapping[str, Measured], folder: Path, console: Console) -> None:
    """Save the rows and the figure, and print them with a summary."""
    rows, cells = decisions(found), tabulate(found)
    summary = summarize(rows, cells)
    extra = {"summary": summary, "made_with": sorted({str(one.commit) for one in found.values()})}
    path = save("validate_auto", rows, extra=extra, folder=folder)
    save("validate_auto_cells", cells, extra=extra, folder=folder)
    draw("validate_auto", rows, folder)
    command.show(
        "What --width auto chose",
        [
            {
                "setting": row["setting"],
                "chosen": row["chosen"],
                "fastest": row["fastest"],
                "ms": f"{1e3 * row['measured_s']:.1f}",
                "reported ms": f"{1e3 * row['reported_s']:.1f} ({row['reported_how']})",
                "regret %": f"{100 * row['regret']:+.1f}",
                "by prediction %": f"{100 * row['regret_of_the_prediction']:+.1f}",
                "audition %": "" if row["audition_share"] is None else f"{100 * row['audition_share']:.2f}",
            }
            for row in rows
        ],
    )
    say(
        console,
        f"regret {summary['mean_regret']:.2%} on average (target {MEAN_REGRET:.1%}), at most "
        f"{summary['largest_regret']:.1%} ({LARGEST_REGRET:.0%}); of the prediction alone "
        f"{summary['mean_regret_of_the_prediction']:.2%}",
        *(f"{name.replace('_', ' ')}: {value:.4g}" for name, value in summary.items() if isinstance(value, float)),
        f"wrote {path}",
    )


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    options = command.parser("validate_auto", __doc__)
    add = options.add_argument
    add("--settings", nargs="+", metavar="NAME", default=list(SETTINGS), help=f"settings: {'; '.join(SETTINGS)} (all)")
    add("--fresh", action="store_true", help="forget the finished settings in the output folder")
    arguments = command.parse(options, words)
    command.check_each_once(arguments, {"settings": SETTINGS})
    command.check_alone("validate_auto", by_torchrun, "it starts torchrun itself, on every node")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    kept = KeptRuns(arguments.output / "validate_auto.runs.json", Measured)
    if arguments.fresh:
        kept.forget()
    settings = [QUICK] if arguments.quick else [SETTINGS[name] for name in arguments.settings]
    done = kept.load()
    missing = [one for one in settings if one.name not in done]
    command.say_kept(console, len(settings), len(missing))
    with command.progress(console, "settings", len(missing)) as advance:
        for setting in missing:
            with tempfile.TemporaryDirectory() as folder:
                done[setting.name] = measure(setting, Path(folder), quick=arguments.quick)
            kept.add(setting.name, done[setting.name])
            advance(1, setting.name)
    found = {one.name: done[one.name] for one in settings if one.name in done}
    if not found:
        raise UserInputError("settings must be at least one; got none")
    publish(found, arguments.output, console)


if __name__ == "__main__":
    command.run(main)
