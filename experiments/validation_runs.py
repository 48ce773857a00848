"""Settings of ``experiments/validate_timing_model.py``, and one run of them, predicted and then measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from experiments.contenders import WORKLOADS
from experiments.results import code_state
from experiments.testbed import Link, Testbed
from experiments.testbed.links import parse_latency, parse_rate
from experiments.testbed_jobs import run_job
from pipesgd.calibration.machines import DISTURBED
from pipesgd.cli import parse as parse_training
from pipesgd.errors import RunError
from pipesgd.ranks import alone
from pipesgd.run.workload import load
from timing_model.choices import Choice
from timing_model.cluster_profile import ComputeProfile, Profile
from timing_model.job import OWN_ALL_REDUCE, WITH_BATCH, Job
from timing_model.params import FLOAT_BYTES
from timing_model.predict import Answer, predict
from timing_model.search import Group

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Nodes of a testbed, with equal links except perhaps the last one's."""

    nodes: int
    rate: str
    latency: str = "0s"
    last_rate: str | None = None
    """Rate of the last node's link, if it is another one."""

    @property
    def place(self) -> str:
        """Nodes and links in a few words."""
        last = f" (one {self.last_rate})" if self.last_rate else ""
        return f"{self.nodes} x {self.rate}{last}{'' if self.latency == '0s' else f' {self.latency}'}"

    @property
    def link(self) -> Link:
        return Link(rate=parse_rate(self.rate), latency=parse_latency(self.latency))

    def testbed(self) -> Testbed:
        """Return a testbed with these nodes, to be entered."""
        slow = {self.nodes - 1: parse_rate(self.last_rate)} if self.last_rate else None
        return Testbed(nodes=self.nodes, link=self.link, slow_nodes=slow)


@dataclass(frozen=True, kw_only=True)
class Setting(Network):
    """A testbed, and the workload that trains on it."""

    workload: str
    calibrated_nodes: int | None = None
    """Number of nodes that are calibrated, if not all."""
    calibrated_workload: str | None = None
    """Workload that is calibrated, if it is another one: the computation is taken to grow with the parameters."""

    @property
    def name(self) -> str:
        name = f"{self.place} {self.workload}"
        if self.extrapolated:
            name += (
                f", calibrated on {self.calibrated_nodes or self.nodes} x {self.calibrated_workload or self.workload}"
            )
        return name

    @property
    def extrapolated(self) -> bool:
        """True if the setting is not itself calibrated."""
        return self.calibrated_nodes is not None or self.calibrated_workload is not None


SETTINGS = {
    one.name: one
    for one in (
        Setting(nodes=2, rate="200mbit", workload="mlp"),
        Setting(nodes=2, rate="1gbit", workload="convnet"),
        Setting(nodes=3, rate="50mbit", workload="convnet"),
        Setting(nodes=3, rate="500mbit", workload="mlp"),
        Setting(nodes=3, rate="200mbit", latency="5ms", workload="small-mlp"),
        Setting(nodes=4, rate="100mbit", workload="mlp"),
        Setting(nodes=4, rate="200mbit", workload="mlp"),
        Setting(nodes=4, rate="1gbit", workload="mlp"),
        Setting(nodes=4, rate="500mbit", latency="2ms", workload="small-mlp"),
        Setting(nodes=5, rate="200mbit", workload="convnet"),
        Setting(nodes=5, rate="1gbit", workload="small-mlp"),
        *(Setting(nodes=nodes, rate="200mbit", workload="small-mlp", calibrated_nodes=3) for nodes in (4, 5, 6)),
        Setting(nodes=3, rate="200mbit", workload="large-mlp", calibrated_workload="small-mlp"),
    )
}
CONFIGURATIONS = (
    *(
        f"--width {width} --codec {codec} --all-reduce {all_reduce}"
        for width, codec, all_reduce in itertools.product(
            (1, 2, 3), ("fp32", "bf16", "int8", "int4"), ("ring", "halving-doubling")
        )
    ),
    "--width 2 --codec ternary --all-reduce ring",
    "--width 2 --codec fp32 --all-reduce all-to-all",
    "--width 2 --codec int8 --all-reduce all-to-all",
    "--width 2 --codec fp32 --all-reduce native",
    "--strategy ddp",
    "--strategy ps-sync",
)
EXTRAPOLATED_CONFIGURATIONS = (
    *(
        f"--width {width} --codec {codec} --all-reduce ring"
        for width, codec in itertools.product((1, 2), ("fp32", "int8"))
    ),
    "--width 2 --codec fp32 --all-reduce halving-doubling",
    "--width 2 --codec int8 --all-reduce all-to-all",
    "--strategy ddp",
    "--strategy ps-sync",
)
"""Configurations for settings that are extrapolated."""
ALL_REDUCES = ("ring", "halving-doubling", "all-to-all", "native")
"""All-reduces that are calibrated, as is the parameter server: everything that is measured has its own link profile."""
QUICK = Setting(nodes=2, rate="200mbit", workload="digits")
QUICK_CONFIGURATIONS = (CONFIGURATIONS[0], "--width 2 --codec int8 --all-reduce ring")
ROUNDS, PASSES = 2, (0, 1, 1, 0)
"""Number of rounds, and the round that each pass through all cells counts for; every second pass is in reverse order.
The difference between two rounds shows how far a measurement can be trusted."""
SECONDS, QUICK_SECONDS, LEAST_ITERATIONS, MOST_ITERATIONS = 1.5, 0.2, 4, 100
"""Seconds of a cell in a pass, for which as many iterations are timed as are predicted to take this long."""
FINAL_PASSES, QUICK_FINAL_PASSES = 10, 2
"""Passes over two cells: the least of thirty varying measurements is too low for its cell, which is measured again."""
CALIBRATIONS = 2
"""Most calibrations of a setting: a second one if the first was disturbed, as pipesgd.calibrate advises."""
CALIBRATION_SECONDS, QUICK_CALIBRATION_SECONDS = 90.0, 4.0
DEADLINE = 1800.0
PRIVATE = ("command", "hosts")
"""Fields of a profile's provenance that are not published."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting: the predicted and measured times of its cells in s, by their arguments."""

    commit: str | None
    profile: str
    """Text of the cluster.toml behind the predictions, as far as ``public`` keeps it."""
    cells: dict[str, dict[str, Any]]
    extrapolated: bool = False
    """True if the setting is not itself calibrated."""
    final: dict[str, list[float]] | None = None
    """Times in s of the cell that the planner would choose and of the one that was then the fastest, measured again, in
    turns. Empty if they are one, or the setting is extrapolated; None if that is still to be done."""

    @property
    def chosen(self) -> str:
        """The cell that the planner would choose."""
        return next(words for words, cell in self.cells.items() if cell["chosen"])

    @property
    def fastest(self) -> str:
        """The cell that took the least time."""
        return min(self.cells, key=lambda words: mean_of(self.cells[words]))


def mean_of(cell: Mapping[str, float]) -> float:
    """Return the mean time of a cell over all rounds, in s."""
    return float(np.mean([cell[f"round_{number}_s"] for number in range(ROUNDS)]))


def ask(profile: Profile, compute: ComputeProfile, setting: Setting, words: str) -> Answer:
    """Return the model's answer about a cell."""
    config = parse_training(shlex.split(f"{WORKLOADS[setting.workload]} {words}"))
    strategy = config.pipeline.strategy
    pipelined = strategy == "pipelined"
    return predict(
        Job(
            cluster=profile,
            compute=compute,
            world_size=setting.nodes,
            strategy=strategy,
            width=config.pipeline.width if pipelined else 1,
            codec=config.compression.codec,
            all_reduce=config.pipeline.all_reduce if pipelined else OWN_ALL_REDUCE[strategy],
        ),
        extrapolate=True,
    )


def slower(compute: ComputeProfile, factor: float) -> ComputeProfile:
    """Return the same computation, taking ``factor`` times as long."""
    changed = {name: getattr(compute, name).times(factor) for name in ("update", "late_update", *WITH_BATCH)}
    return dataclasses.replace(compute, **changed)


def known_of(profile: Profile, setting: Setting) -> ComputeProfile:
    """Return the computation of a setting, from the profile of what was calibrated for it."""
    [compute] = profile.compute
    if setting.calibrated_workload is not None:
        tensors = tensors_of(setting.workload)
        grown = slower(compute, sum(tensors) / compute.numel)
        compute = dataclasses.replace(grown, model=setting.workload, tensors=tensors)
    if setting.calibrated_nodes is not None:
        compute = slower(compute, crowding(profile, setting))  # more share this machine's cores, unlike on a cluster
    return compute


def crowding(profile: Profile, setting: Setting) -> float:
    """Return the ratio of nodes per core in the setting to that in the calibration, each taken as at least 1."""
    crowd = profile.calibrated.ranks_per_core
    return max(1.0, crowd * setting.nodes / (setting.calibrated_nodes or setting.nodes)) / max(1.0, crowd)


def tensors_of(workload: str) -> tuple[int, ...]:
    """Return the number of values of each parameter's gradient of a workload's model."""
    _, _, model, _ = load(parse_training(shlex.split(WORKLOADS[workload])), alone())
    return tuple(one.numel() for one in model.parameters() if one.requires_grad)


def calibrate(setting: Setting, folder: Path, seconds: float) -> Profile:
    """Calibrate for a setting, again if that was disturbed, and return the profile. Raises ``RunError`` on failure."""
    file, workload = folder / "cluster.toml", setting.calibrated_workload or setting.workload
    words = f"--out {file} --overwrite --seconds {seconds} {WORKLOADS[workload]}"
    words += f" --all-reduces {' '.join(ALL_REDUCES)} --servers"
    if setting.calibrated_workload is not None:  # no larger than the calibrated model's gradient
        words += f" --largest-bytes {FLOAT_BYTES * sum(tensors_of(workload))}"
    for _ in range(CALIBRATIONS):
        with Testbed(nodes=setting.calibrated_nodes or setting.nodes, link=setting.link) as testbed:
            run(testbed, setting, f"pipesgd.calibrate {words}", folder)
        profile = Profile.load(file)
        if float(str(profile.provenance["stolen_share"])) <= DISTURBED:
            break
    return profile


def measure(setting: Setting, folder: Path, *, quick: bool = False) -> Measured:
    """Calibrate, predict all cells, and only then measure them.

    Raises:
        RunError: a job failed.
    """
    calibrated = calibrate(setting, folder, QUICK_CALIBRATION_SECONDS if quick else CALIBRATION_SECONDS)
    compute = known_of(calibrated, setting)
    configurations = EXTRAPOLATED_CONFIGURATIONS if setting.extrapolated else CONFIGURATIONS
    answers = {
        words: ask(calibrated, compute, setting, words) for words in (QUICK_CONFIGURATIONS if quick else configurations)
    }
    chosen = choose(answers)
    predicted = {words: answer.iteration.total for words, answer in answers.items()}
    turned = timed(setting, predicted, len(PASSES), folder, quick=quick)
    passes, products, stolen = (
        np.array([[cell[name] for cell in of_pass] for of_pass in turned])
        for name in ("seconds", "product_seconds", "stolen")
    )  # (passes, cells)
    rounds = [passes[np.array(PASSES) == number].mean(axis=0) for number in range(ROUNDS)]
    known = float(str(calibrated.provenance["product_seconds"])) * crowding(calibrated, setting)
    drifts = products.mean(axis=0) / known
    corrected = {
        words: ask(calibrated, slower(compute, drift), setting, words)
        for words, drift in zip(answers, drifts, strict=True)
    }
    return Measured(
        commit=code_state(),
        profile=public(calibrated, folder / "public.toml"),
        extrapolated=setting.extrapolated,
        cells={
            words: {
                "codec": answer.job.codec,
                "predicted_s": answer.iteration.total,
                "low_s": answer.low,
                "high_s": answer.high,
                "compute_s": answer.iteration.compute,
                "wire_s": answer.iteration.wire,
                "codec_s": answer.iteration.codec,
                "jitter_s": answer.iteration.jitter,
                "support": answer.support.kind,
                "limit": answer.limit,
                "chosen": words == chosen,
                "drift": float(drifts[index]),
                "corrected_s": corrected[words].iteration.total,
                "corrected_low_s": corrected[words].low,
                "corrected_high_s": corrected[words].high,
                "stolen": float(stolen[:, index].mean()),
                **{f"round_{number}_s": float(of_round[index]) for number, of_round in enumerate(rounds)},
            }
            for index, (words, answer) in enumerate(answers.items())
        },
    )


def judge(setting: Setting, measured: Measured, folder: Path, *, quick: bool = False) -> Measured:
    """Return ``measured`` with its ``final``. Raises ``RunError`` if a job fails."""
    finalists = dict.fromkeys((measured.chosen, measured.fastest))
    if setting.extrapolated or len(finalists) == 1:
        return dataclasses.replace(measured, final={})
    predicted = {words: measured.cells[words]["predicted_s"] for words in finalists}
    turned = timed(setting, predicted, QUICK_FINAL_PASSES if quick else FINAL_PASSES, folder, quick=quick)
    seconds = ([cell["seconds"] for cell in passes] for passes in zip(*turned, strict=True))
    return dataclasses.replace(measured, final=dict(zip(finalists, seconds, strict=True)))


def timed(
    setting: Setting, predicted: Mapping[str, float], passes: int, folder: Path, *, quick: bool
) -> list[list[dict[str, float]]]:
    """Return the times of these cells in every pass by ``timed_configurations``; ``predicted`` is in s an iteration."""
    seconds = QUICK_SECONDS if quick else SECONDS
    cells = [
        {
            "words": f"{WORKLOADS[setting.workload]} {words}",
            "iterations": int(np.clip(seconds / iteration, LEAST_ITERATIONS, MOST_ITERATIONS)),
        }
        for words, iteration in predicted.items()
    ]
    plan_file, times_file = folder / "plan.json", folder / "times.json"
    plan_file.write_text(json.dumps([_turned(cells, number) for number in range(passes)]), encoding="utf-8")
    with Testbed(nodes=setting.nodes, link=setting.link) as testbed:
        run(testbed, setting, f"experiments.timed_configurations {plan_file} {times_file}", folder)
    return [_turned(of_pass, number) for number, of_pass in enumerate(json.loads(times_file.read_text("utf-8")))]


def public(profile: Profile, file: Path) -> str:
    """Return the text of a profile, by way of a file, without this machine's names and folders."""
    told = {name: value for name, value in profile.provenance.items() if name not in PRIVATE}
    dataclasses.replace(profile, provenance=told).save(file)
    return file.read_text(encoding="utf-8")


def _turned(values: list[T], number: int) -> list[T]:
    """Return the values in the order of a pass: every second pass is in reverse order."""
    return values if number % 2 == 0 else values[::-1]


def choose(answers: Mapping[str, Answer]) -> str:
    """Return the configuration that the planner would choose among ``answers``."""
    group = Group(lambda job: True)
    for answer in answers.values():
        iteration, collective = answer.iteration, answer.collective
        group.add(Choice(job=answer.job, iteration=iteration, collective=collective, score=iteration.total))
    chosen = group.chosen
    assert chosen is not None
    return next(words for words, answer in answers.items() if answer.job is chosen.job)


def run(testbed: Testbed, setting: Setting, line: str, folder: Path) -> None:
    """Run a module on all nodes. Raises ``RunError`` if it fails."""
    if failure := run_job(testbed, ["-m", *shlex.split(line)], folder / "log", deadline=DEADLINE):
        raise RunError(f"{setting.name}: {line.split()[0]} must succeed; got {failure}")
