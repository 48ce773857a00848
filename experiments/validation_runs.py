"""Settings of ``experiments/validate_timing_model.py``, and one of them, predicted and then measured.

Other experiments calibrate, ask the timing model and time configurations by the functions here, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.results import code_state
from experiments.testbed import Link, Testbed
from experiments.testbed.links import parse_latency, parse_rate
from experiments.testbed_jobs import last_words, run_job
from experiments.workloads import WORKLOADS
from pipesgd.cli import parse as parse_training
from pipesgd.errors import RunError
from pipesgd.planning.choose import AUTO_CODECS
from pipesgd.ranks import alone
from pipesgd.run.workload import load
from timing_model.choices import WIDTHS
from timing_model.cluster_profile import Profile
from timing_model.job import NATIVE_CODECS, OWN_ALL_REDUCE, Job
from timing_model.measured import WITH_BATCH, ComputeProfile
from timing_model.predict import Answer, predict

HELD_OUT, EXTRAPOLATED, SHARED = "held out", "extrapolated", "shared cores"
"""Kinds of settings: calibrated where they are measured, calibrated on something smaller, and the hard case, in which
all ranks compute on the cores of one machine."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A testbed, and what is trained on it. All links are equal except perhaps the last node's."""

    nodes: int
    rate: str
    latency: str = "0s"
    last_rate: str | None = None
    """Rate of the last node's link, if it is another one."""
    accelerator: str | None = None
    """Synthetic accelerator of each node (``experiments/accelerators.py``); None if ranks compute on shared cores."""
    hidden: int = 1000
    """Size of both hidden layers."""
    iterations: int = 2000
    """Iterations that the run is asked for which chooses for itself; it is stopped earlier."""
    calibrated: Setting | None = None
    """Setting that is calibrated instead: with fewer nodes, or with a smaller model."""

    @property
    def kind(self) -> str:
        """One of the kinds of settings."""
        return SHARED if self.accelerator is None else HELD_OUT if self.calibrated is None else EXTRAPOLATED

    @property
    def name(self) -> str:
        """Nodes, links and computation in a few words."""
        last = f" (one {self.last_rate})" if self.last_rate else ""
        latency = "" if self.latency == "0s" else f" {self.latency}"
        name = f"{self.nodes} x {self.rate}{last}{latency}, {self.accelerator or SHARED}"
        return name if self.calibrated is None else f"{name}, from {self.calibrated.name}"

    @property
    def link(self) -> Link:
        """Link of all nodes but perhaps the last one."""
        return Link(rate=parse_rate(self.rate), latency=parse_latency(self.latency))

    @property
    def words(self) -> str:
        """Arguments of pipesgd.train for the workload. With accelerators it learns nothing."""
        if self.accelerator is None:
            return f"{WORKLOADS['mlp']} --lr 0.01"
        return (
            f"--dataset digits --hidden-sizes {self.hidden} {self.hidden} --batch-size 16 --lr 0.01 "
            f"--model experiments.accelerators:synthetic={self.accelerator}"
        )

    def testbed(self) -> Testbed:
        """Return a testbed with these nodes, to be entered."""
        slow = {self.nodes - 1: parse_rate(self.last_rate)} if self.last_rate else None
        return Testbed(nodes=self.nodes, link=self.link, slow_nodes=slow)


_THREE = Setting(nodes=3, rate="200mbit", accelerator="75ms")
_THREE_FAR = Setting(nodes=3, rate="500mbit", latency="2ms", accelerator="50ms")
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
        dataclasses.replace(_THREE, nodes=6, calibrated=_THREE),
        dataclasses.replace(_THREE_FAR, nodes=6, calibrated=_THREE_FAR),
        *(
            dataclasses.replace(
                one, accelerator="96ms", calibrated=dataclasses.replace(one, accelerator="12ms", hidden=332)
            )
            for one in (_THREE, dataclasses.replace(_THREE_FAR, nodes=4))
        ),
        Setting(nodes=2, rate="200mbit"),
        Setting(nodes=3, rate="50mbit"),
        Setting(nodes=4, rate="500mbit"),
    )
}
"""A model of 1000 hidden units has a gradient of 4.3 MB, eight times as many values as one of 332."""
QUICK = Setting(nodes=2, rate="200mbit", accelerator="20ms", hidden=332, iterations=200)
"""A setting with short iterations, in a run that has too few of them for an audition and chooses a width alone."""
AUTO, QUICK_AUTO = "--width auto --codec auto --all-reduce auto", "--width auto --codec int4 --all-reduce ring"
WHOLE = "--buckets 1"
"""Option with which a run compares none of its choices in buckets, which are not in ``SPACE``."""
SPACE = tuple(
    f"--width {width} --codec {codec} --all-reduce {all_reduce}"
    for width, all_reduce, codec in itertools.product(WIDTHS, ("ring", "native"), AUTO_CODECS)
    if all_reduce == "ring" or codec in NATIVE_CODECS
)
QUICK_SPACE = tuple(words for words in SPACE if words.endswith(QUICK_AUTO.removeprefix("--width auto")))
"""Configurations that ``AUTO`` and ``QUICK_AUTO`` choose among."""
OTHERS = (
    "--width 2 --codec fp32 --all-reduce halving-doubling",
    "--width 2 --codec int8 --all-reduce all-to-all",
    "--strategy ddp",
    "--strategy ps-sync",
)
"""Configurations outside of that space, for settings that are extrapolated."""
ALL_MEASURED = "--all-reduces ring native halving-doubling all-to-all --servers"
"""Arguments of pipesgd.calibrate that measure what all these configurations need."""
OBSERVED, QUICK_OBSERVED = 100, 5
"""Iterations that a run makes before it is stopped."""
UNTIMED = 2
"""First iterations that do not count, in addition to those in which the pipeline fills: connections start slowly."""
NEAR, FAR_SHARE = 1.5, 0.5
"""Multiple of the best prediction up to which a configuration may be the fastest; others get this share of the time."""
PASSES, QUICK_PASSES = (0, 1, 1, 0), (0, 1)
"""Half of the measurements that each pass counts for; every second pass is in reverse order."""
SECONDS, QUICK_SECONDS, LEAST_ITERATIONS, MOST_ITERATIONS = 1.0, 0.1, 4, 60
"""Seconds of a configuration in a pass, for which as many iterations are timed as are predicted to take this long."""
DEADLINE, POLL = 1800.0, 0.5
PRIVATE = ("command", "hosts")
"""Fields of a profile's provenance that are not published."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting: the predicted and measured times of its configurations."""

    commit: str | None
    profile: str
    """Text of the cluster.toml behind the predictions, as far as ``public`` keeps it."""
    calibration_s: float
    """Time that the calibration took."""
    cells: dict[str, dict[str, Any]]
    """Configurations by their arguments: prediction with its interval, seconds of each half of the passes, share of the
    cores that all ranks used."""
    choice: dict[str, Any] | None = None
    """The plan in the run's run.json: its choices, and what it reported. None if nothing was chosen."""
    began_after: float | None = None
    """Seconds from the start of torchrun to the run's first iteration: loading, connecting, calibration, audition."""
    after_s: float | None = None
    """Mean of the run's own iterations, in s."""


def mean_of(cell: dict[str, Any]) -> float:
    """Return the mean time of a configuration, in s."""
    return float(cell["half_0_s"] + cell["half_1_s"]) / 2


def job_of(profile: Profile, compute: ComputeProfile, nodes: int, words: str) -> Job:
    """Return the job of a configuration, given by its arguments, on this many nodes."""
    config = parse_training(["--dataset", "digits", *shlex.split(words)])
    strategy = config.pipeline.strategy
    pipelined, hook = strategy == "pipelined", config.pipeline.ddp_hook
    return Job(
        cluster=profile,
        compute=compute,
        world_size=nodes,
        strategy=strategy,
        width=config.pipeline.width if pipelined else 1,
        codec=config.compression.codec if hook == "none" else hook,
        all_reduce=config.wire.all_reduce_name if pipelined else OWN_ALL_REDUCE[strategy],
        buckets=str(config.wire.buckets),
    )


def ask(profile: Profile, compute: ComputeProfile, nodes: int, words: str) -> Answer:
    """Return the model's answer about a configuration, given by its arguments, on this many nodes."""
    return predict(job_of(profile, compute, nodes, words), extrapolate=True)


def known_of(profile: Profile, setting: Setting) -> ComputeProfile:
    """Return the computation of a setting, from the profile of what was calibrated for it.

    Nothing that was measured later, such as an audition, is in it. Computation grows with the number of values.
    """
    [compute] = profile.compute
    compute = dataclasses.replace(compute, measured=())
    tensors = tensors_of(setting)
    if tensors == compute.tensors:
        return compute
    factor = sum(tensors) / compute.numel
    grown = {name: getattr(compute, name).times(factor) for name in ("update", "late_update", *WITH_BATCH)}
    return dataclasses.replace(compute, **grown, model="grown", tensors=tensors, released=())


def tensors_of(setting: Setting) -> tuple[int, ...]:
    """Return the number of values of each parameter's gradient."""
    if setting.accelerator:  # without what single ranks have, such as a slow one
        setting = dataclasses.replace(setting, accelerator=setting.accelerator.split(",")[0])
    _, _, model, _ = load(parse_training(shlex.split(setting.words)), alone())
    return tuple(one.numel() for one in model.parameters() if one.requires_grad)


def calibrate(testbed: Testbed, words: str, folder: Path) -> Profile:
    """Run pipesgd.calibrate on all nodes and return the profile. Raises ``RunError`` on failure."""
    file = folder / "cluster.toml"
    run(testbed, f"pipesgd.calibrate --out {file} --overwrite {words}", folder)
    return Profile.load(file)


def run_with_auto(setting: Setting, folder: Path, *, quick: bool) -> tuple[dict[str, Any], float, float]:
    """Run the command of a user until its decision, and for some iterations.

    Returns its plan, the time to begin, and the mean time of an iteration, in s.

    Raises:
        RunError: it failed, or did not train in time.
    """
    output, log = folder / "run", folder / "log"
    words = f"{setting.words} {QUICK_AUTO if quick else AUTO} {WHOLE} --iterations {setting.iterations}"
    words += f" --output {output}"
    observed = QUICK_OBSERVED if quick else OBSERVED
    begin, began_after = time.perf_counter(), None
    with setting.testbed() as testbed, log.open("wb") as file:
        job = testbed.torchrun(["-m", "pipesgd.train", *shlex.split(words)], stdout=file, stderr=subprocess.STDOUT)
        try:
            while job.running():
                if time.perf_counter() - begin > DEADLINE:
                    raise RunError(f"{setting.name}: a run must train within {DEADLINE:.0f} s; got none that does")
                time.sleep(POLL)
                lines = _lines(output / "metrics.jsonl")
                done = len(lines)
                if done and began_after is None:
                    began_after = time.perf_counter() - begin
                if began_after and done >= observed:
                    planned = json.loads((output / "run.json").read_text(encoding="utf-8"))["planned"]
                    return planned, began_after, _mean(planned["choices"]["width"], lines)
        finally:
            job.terminate()
    raise RunError(f"{setting.name}: a run with auto must train; got {last_words(log.read_text(errors='replace'))}")


def _lines(path: Path) -> list[str]:
    """Return the finished lines of a file that is being written."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def _mean(width: int, lines: Sequence[str]) -> float:
    """Return the mean time of an iteration, in s, once the pipeline is full."""
    seconds = [json.loads(line)["seconds"]["iteration"] for line in lines[width - 1 + UNTIMED :]]
    return float(np.mean(seconds))


def measure(setting: Setting, folder: Path, *, quick: bool = False) -> Measured:
    """Calibrate, by a run that chooses for itself or by pipesgd.calibrate; predict all configurations; measure them.

    Raises:
        RunError: a job failed.
    """
    choice, began_after, after_s, configurations = None, None, None, QUICK_SPACE if quick else SPACE
    if setting.calibrated is None:
        choice, began_after, after_s = run_with_auto(setting, folder, quick=quick)
        profile = Profile.load(folder / "run" / "cluster.toml")
    else:
        configurations += OTHERS
        smaller = setting.calibrated
        with smaller.testbed() as testbed:
            profile = calibrate(testbed, f"{smaller.words} {ALL_MEASURED}", folder)
    compute = known_of(profile, setting)
    cells: dict[str, dict[str, Any]] = {}
    for words in configurations:
        answer = ask(profile, compute, setting.nodes, words)
        cells[words] = {"predicted_s": answer.iteration.total, "low_s": answer.low, "high_s": answer.high}
    for words, cell in time_all(setting, cells, folder, quick=quick).items():
        cells[words] |= cell
    return Measured(
        commit=code_state(),
        profile=public(profile, folder / "public.toml"),
        calibration_s=float(str(profile.provenance["calibration_seconds"])),
        cells=cells,
        choice=choice,
        began_after=began_after,
        after_s=after_s,
    )


def time_all(
    setting: Setting, predictions: dict[str, dict[str, Any]], folder: Path, *, quick: bool
) -> dict[str, dict[str, Any]]:
    """Return the times of these configurations in each half of the passes, and the share of the cores that they used.

    Raises:
        RunError: the job failed.
    """
    near, plan = NEAR * min(one["predicted_s"] for one in predictions.values()), []
    for words, one in predictions.items():
        seconds = (QUICK_SECONDS if quick else SECONDS) * (1 if one["predicted_s"] <= near else FAR_SHARE)
        iterations = int(np.clip(seconds / one["predicted_s"], LEAST_ITERATIONS, MOST_ITERATIONS))
        plan.append({"words": f"{setting.words} {words}", "iterations": iterations})
    passes = QUICK_PASSES if quick else PASSES
    with setting.testbed() as testbed:
        times = time_in_passes(testbed, plan, len(passes), folder)
    found = {}
    for words, of_cell in zip(predictions, times, strict=True):
        found[words] = {"cpu_share": float(np.mean([timed["cpu_share"] for timed in of_cell]))}
        for half in (0, 1):
            own = [timed["seconds"] for timed, count_for in zip(of_cell, passes, strict=True) if count_for == half]
            found[words][f"half_{half}_s"] = float(np.mean(own))
    return found


def time_in_passes(
    testbed: Testbed, plan: Sequence[dict[str, Any]], passes: int, folder: Path, *, deadline: float = DEADLINE
) -> list[tuple[dict[str, float], ...]]:
    """Measure everything in ``plan``, a pass of ``timed_configurations``, on all nodes in this many passes.

    Every second pass is in reverse order; all together take ``deadline`` seconds at most. Returns the passes of each
    configuration, in the order of ``plan``.

    Raises:
        RunError: the job failed.
    """
    plan_file, times_file = folder / "plan.json", folder / "times.json"
    plan_file.write_text(json.dumps([plan[:: _direction(number)] for number in range(passes)]), encoding="utf-8")
    run(testbed, f"experiments.timed_configurations {plan_file} {times_file}", folder, deadline=deadline)
    times = json.loads(times_file.read_text(encoding="utf-8"))
    return list(zip(*[of_pass[:: _direction(number)] for number, of_pass in enumerate(times)], strict=True))


def _direction(number: int) -> int:
    return 1 if number % 2 == 0 else -1


def public(profile: Profile, file: Path) -> str:
    """Return the text of a profile, by way of a file, without this machine's names and folders."""
    told = {name: value for name, value in profile.provenance.items() if name not in PRIVATE}
    dataclasses.replace(profile, provenance=told).save(file)
    return file.read_text(encoding="utf-8")


def run(testbed: Testbed, line: str, folder: Path, *, deadline: float = DEADLINE) -> None:
    """Run a module on all nodes, for ``deadline`` seconds at most. Raises ``RunError`` if it fails."""
    if failure := run_job(testbed, ["-m", *shlex.split(line)], folder / "log", deadline=deadline):
        raise RunError(f"{line.split()[0]} must succeed; got {failure}")
