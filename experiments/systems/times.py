"""Iteration times of all systems on the links of a testbed, measured in turns in one job, and predicted before.

Most often every node has an emulated accelerator, which leaves the cores of this machine to the network. A round has
some iterations of each system; every second one is in reverse order. The links, the computation and the codecs are
calibrated first, as pipesgd.calibrate does it for anybody, and the predictions are made from that alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.kept_runs import KeptRuns
from experiments.results import code_state
from experiments.systems import hogwild
from experiments.systems.catalogue import HOGWILD, NAME
from experiments.systems.workloads import CORES, NODES, PLACES, QUICK_PLACES, Workload
from experiments.testbed import Link, Testbed, parse_rate
from experiments.validation_runs import ask, calibrate, public, time_in_passes
from pipesgd.cli import parse as parse_training
from pipesgd.config import PlanningConfig, TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.planning.choose import decide
from timing_model.cluster_profile import Profile
from timing_model.job import STRATEGIES

ROUNDS, BLOCK = 6, 5
"""Rounds, as many in reverse order as not, and fewest iterations of each system in a round."""
QUICK_ROUNDS, QUICK_BLOCK = 1, 2
CODECS = ("truncate16", "fp16", "int8", "int4")
CALIBRATED = "--all-reduces ring native all-to-all --servers"
"""Arguments of pipesgd.calibrate that measure what the systems need."""
SECONDS, QUICK_SECONDS = 60.0, 2.0
KEPT = f"{NAME}.times.runs.json"
"""File of the finished cells, in the output folder."""
WITHOUT_ACTIVATIONS = "time: a synthetic accelerator has no activations, of which factors are made"
"""Reason why a system that may send factors is timed on cores alone."""
DEADLINE = 3 * 3600.0
"""Seconds after which the job of a cell counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A workload on the links of a testbed."""

    workload: str
    rate: str
    computes: str
    """Accelerators or cores that compute, as ``Workload.timed`` takes them."""
    quick: bool = False

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.workload}, {NODES} nodes at {self.rate}, {self.computes}"

    def testbed(self) -> Testbed:
        """Return a testbed with these links, to be entered."""
        return Testbed(nodes=NODES, link=Link(rate=parse_rate(self.rate)))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Times of all systems in one setting."""

    commit: str | None
    workload: str
    rate: str
    computes: str
    profile: str
    """Text of the cluster.toml behind the predictions, as far as ``validation_runs.public`` keeps it."""
    rounds: dict[str, list[dict[str, float]]]
    """Figures of each round (``timed_configurations``), by the arguments of a system."""
    predictions: dict[str, dict[str, Any]]
    """Prediction of each, by the same: ``seconds``, ``low`` and ``high``, or the ``reason`` why there is none."""
    not_timed: dict[str, str] = field(default_factory=dict)
    """Reasons why a system has no rounds, by the same."""


def block_of(config: TrainConfig, quick: bool) -> int:
    """Return the iterations of a round: whole windows, in which every fragment has its turn."""
    window = config.windows.local_steps * config.windows.fragments
    return window * math.ceil((QUICK_BLOCK if quick else BLOCK) / window)


def predicted(config: TrainConfig, words: str, profile: Profile, nodes: int) -> dict[str, Any]:
    """Return the prediction for a configuration, which ``words`` ask for, or the reason why there is none.

    Pipelines are predicted as the trainer itself does it, DDP and synchronous servers as the command timing-model does.
    """
    [compute] = profile.compute
    strategy = config.pipeline.strategy
    if strategy == "pipelined":
        if config.wire.reduce != "matrix":
            return {
                "reason": "reduce must be matrix, since only a run knows what else it will exchange; "
                f"got {config.wire.reduce}"
            }
        try:
            asked = dataclasses.replace(config, planning=PlanningConfig(cluster=Path("cluster.toml")))
            found = decide(profile, compute, asked, world_size=nodes, iterations=1000, source="calibrated", own=True)
        except UserInputError as reason:
            return {"reason": str(reason)}
        return {"seconds": found.iteration_seconds, "low": found.low, "high": found.high}
    if strategy not in STRATEGIES:
        return {"reason": f"the timing model has no strategy {strategy}"}
    answer = ask(profile, compute, nodes, words)
    return {"seconds": answer.iteration.total, "low": answer.low, "high": answer.high}


def measure(setting: Setting, workload: Workload, words_of_systems: Iterable[str], own_program: bool) -> Cell:
    """Calibrate, predict, and then measure all systems, each once if some share their arguments.

    Raises:
        RunError: a job failed.
    """
    commit = code_state()
    base = workload.timed(setting.computes)
    quick, rounds = setting.quick, QUICK_ROUNDS if setting.quick else ROUNDS
    configs = {words: parse_training(shlex.split(f"{base} {words}")) for words in words_of_systems}
    if own_program:  # before the job, which takes long
        length = f"--iterations {QUICK_BLOCK if quick else ROUNDS * BLOCK + hogwild.UNTIMED}"
        outcome = hogwild.train(f"{base} {length}", NODES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with setting.testbed() as testbed:
            seconds = QUICK_SECONDS if quick else SECONDS
            codecs = " ".join(CODECS)
            profile = calibrate(testbed, f"--seconds {seconds} --codecs {codecs} {CALIBRATED} {base}", folder)
        kept_profile = public(profile, folder / "public.toml")
        predictions = {words: predicted(one, words, profile, NODES) for words, one in configs.items()}
        not_timed = (
            {}
            if setting.computes == CORES
            else {words: WITHOUT_ACTIVATIONS for words, one in configs.items() if one.wire.reduce != "matrix"}
        )
        timed = [words for words in configs if words not in not_timed]
        plan: list[dict[str, Any]] = [
            {"words": f"{base} {words}", "iterations": block_of(configs[words], quick)} for words in timed
        ]
        with setting.testbed() as testbed:
            times = time_in_passes(testbed, plan, rounds, folder, deadline=DEADLINE)
    of_systems = {words: list(of_rounds) for words, of_rounds in zip(timed, times, strict=True)}
    if own_program:
        nothing = dict.fromkeys(("communication_seconds", "exposed_seconds", "wire_bytes"), 0.0)
        of_systems[HOGWILD] = [{"seconds": outcome.iteration_s} | nothing]
        predictions[HOGWILD] = {"reason": "the timing model has no shared memory"}
    return Cell(
        commit=commit,
        workload=setting.workload,
        rate=setting.rate,
        computes=setting.computes,
        profile=kept_profile,
        rounds=of_systems,
        predictions=predictions,
        not_timed=not_timed,
    )


def planned_cells(workloads: Mapping[str, Workload], keys: Mapping[str, str], *, quick: bool) -> dict[str, Setting]:
    """Return the settings of all cells, by the texts under which they are kept; see ``finished_cells``."""
    texts = {}
    for name, workload in workloads.items():
        # Systems take turns, so a cell is of these systems and no others.
        measured = [sorted(set(keys.values())), workload.timed(CORES), ROUNDS, BLOCK, SECONDS, CODECS, CALIBRATED]
        digest = hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:16]
        for rate, computes in QUICK_PLACES if quick else PLACES:
            setting = Setting(workload=name, rate=rate, computes=computes, quick=quick)
            texts[f"{setting.name}, systems {digest}"] = setting
    return texts


def finished_cells(
    workloads: Mapping[str, Workload], keys: Mapping[str, str], arguments: Namespace, console: Console
) -> dict[tuple[str, str, str], Cell]:
    """Return the cells by workload, rate and what computes, as the options of ``simulated_runs.add_options`` ask for.

    They are kept in the output folder. Those that are missing are measured now, unless only finished ones are wanted.

    Args:
        workloads: workloads by name.
        keys: key of each system in a cell: its arguments, or ``HOGWILD``.
        arguments: options of the command.
        console: where progress is shown.

    Raises:
        RunError: cells failed; all others were measured before.
    """
    planned = planned_cells(workloads, keys, quick=arguments.quick)
    words = sorted(set(keys.values()) - {HOGWILD})
    kept = KeptRuns(arguments.output / KEPT, Cell, fresh=arguments.fresh)
    done = kept.complete(
        planned,
        lambda one: measure(one, workloads[one.workload], words, HOGWILD in keys),
        console,
        "iteration times",
        finished=arguments.finished,
    )
    return {(one.workload, one.rate, one.computes): done[name] for name, one in planned.items() if name in done}
