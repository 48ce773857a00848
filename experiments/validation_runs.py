"""The runs of ``experiments/validate_timing_model.py``: its settings, and one of them, predicted and then measured."""

from __future__ import annotations

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
from pipesgd.command_line import parse as parse_training
from pipesgd.errors import RunError
from timing_model.choices import Choice
from timing_model.predict import Answer, predict
from timing_model.profile import Profile
from timing_model.question import OWN_ALL_REDUCE, Question, compute_of
from timing_model.search import Group

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A testbed, and what trains on it."""

    nodes: int
    rate: str
    latency: str = "0s"
    workload: str

    @property
    def name(self) -> str:
        late = "" if self.latency == "0s" else f" {self.latency}"
        return f"{self.nodes} x {self.rate}{late} {self.workload}"

    @property
    def link(self) -> Link:
        return Link(rate=parse_rate(self.rate), latency=parse_latency(self.latency))


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
QUICK = Setting(nodes=2, rate="200mbit", workload="digits")
QUICK_CONFIGURATIONS = (CONFIGURATIONS[0], "--width 2 --codec int8 --all-reduce ring")
ROUNDS, PASSES = 2, (0, 1, 1, 0)
"""Which round a pass through all cells counts for; every second one goes backwards. What two rounds differ by is by how
much a measurement can be trusted."""
SECONDS, QUICK_SECONDS, LEAST_ITERATIONS, MOST_ITERATIONS = 1.5, 0.2, 4, 100
"""Of a cell in a pass: as many iterations as are predicted to take so long."""
CALIBRATION_SECONDS, QUICK_CALIBRATION_SECONDS = 60.0, 4.0
DEADLINE = 1800.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting: what its cells, by their words, were predicted to take, and took; times in s."""

    commit: str | None
    cells: dict[str, dict[str, Any]]


def ask(profile: Profile, setting: Setting, words: str) -> Answer:
    """What the model says of a cell."""
    config = parse_training(shlex.split(f"{WORKLOADS[setting.workload]} {words}"))
    strategy = config.pipeline.strategy
    pipelined = strategy == "pipelined"
    return predict(
        Question(
            cluster=profile,
            compute=compute_of(profile, config.model.model, config.data.batch_size),
            world_size=setting.nodes,
            strategy=strategy,
            width=config.pipeline.width if pipelined else 1,
            codec=config.compression.codec,
            all_reduce=config.pipeline.all_reduce if pipelined else OWN_ALL_REDUCE[strategy],
        ),
        extrapolate=True,
    )


def measure(testbed: Testbed, setting: Setting, folder: Path, *, quick: bool = False) -> Measured:
    """Calibrate, predict all cells, and only then measure all.

    Raises:
        RunError: a job failed.
    """
    profile_file, plan_file, times_file = (folder / name for name in ("cluster.toml", "plan.json", "times.json"))
    calibration, seconds = (QUICK_CALIBRATION_SECONDS, QUICK_SECONDS) if quick else (CALIBRATION_SECONDS, SECONDS)
    workload = WORKLOADS[setting.workload]
    run(testbed, setting, f"pipesgd.calibrate --out {profile_file} --seconds {calibration} {workload}", folder)
    profile = Profile.load(profile_file)
    answers = {words: ask(profile, setting, words) for words in (QUICK_CONFIGURATIONS if quick else CONFIGURATIONS)}
    chosen = choose(answers)
    cells = [
        {
            "words": f"{workload} {words}",
            "iterations": int(np.clip(seconds / answer.iteration.total, LEAST_ITERATIONS, MOST_ITERATIONS)),
        }
        for words, answer in answers.items()
    ]
    plan_file.write_text(json.dumps([_turned(cells, number) for number in range(len(PASSES))]), encoding="utf-8")
    run(testbed, setting, f"experiments.timed_configurations {plan_file} {times_file}", folder)
    times = json.loads(times_file.read_text(encoding="utf-8"))
    passes = np.array([_turned(of_pass, number) for number, of_pass in enumerate(times)])  # (passes, cells)
    rounds = [passes[np.array(PASSES) == number].mean(axis=0) for number in range(ROUNDS)]
    return Measured(
        commit=code_state(),
        cells={
            words: {
                "codec": answer.question.codec,
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
                **{f"round_{number}_s": float(of_round[index]) for number, of_round in enumerate(rounds)},
            }
            for index, (words, answer) in enumerate(answers.items())
        },
    )


def _turned(values: list[T], number: int) -> list[T]:
    """Of a pass: every second one goes backwards."""
    return values if number % 2 == 0 else values[::-1]


def choose(answers: Mapping[str, Answer]) -> str:
    """What the planner would choose among them."""
    group = Group(lambda question: True)
    for answer in answers.values():
        iteration, collective = answer.iteration, answer.collective
        group.add(Choice(question=answer.question, iteration=iteration, collective=collective, score=iteration.total))
    chosen = group.chosen
    assert chosen is not None
    return next(words for words, answer in answers.items() if answer.question is chosen.question)


def run(testbed: Testbed, setting: Setting, line: str, folder: Path) -> None:
    """Run a module on all nodes. Raises ``RunError`` if it fails."""
    if failure := run_job(testbed, ["-m", *shlex.split(line)], folder / "log", deadline=DEADLINE):
        raise RunError(f"{setting.name}: {line.split()[0]} must succeed; got {failure}")
