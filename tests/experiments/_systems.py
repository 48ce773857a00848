"""Options of the systems, and a cell and curves of the table that were made up."""

from __future__ import annotations

import functools

from experiments.systems.accuracy import Curve
from experiments.systems.catalogue import FOLDER, HOGWILD, systems
from experiments.systems.times import Cell
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig

SYSTEMS = systems()


@functools.cache  # parsing takes a twentieth of a second
def config_of(name: str, *words: str) -> TrainConfig:
    return parse_training(["--config", str(FOLDER / f"{name}.toml"), *words])


TITLES = {name: SYSTEMS[name].title for name in ("d-sync", "ddp", "ddp-fp16", "local", "theano-easgd")}
TITLES |= {HOGWILD: "HogWild."}
KEYS = {name: HOGWILD if name == HOGWILD else SYSTEMS[name].words for name in TITLES}


def cell() -> Cell:
    def rounds(*seconds: float, communication: float, exposed: float) -> list[dict[str, float]]:
        figures = {"communication_seconds": communication, "exposed_seconds": exposed}
        figures |= {"wire_bytes": 1e6, "memory_bytes": 2e6, "cpu_share": 0.5}
        figures |= {"fastest_seconds": 0.05, "slowest_seconds": 0.6}
        return [{"seconds": one} | figures for one in seconds]

    return Cell(
        commit=None,
        workload="mlp",
        rate="1gbit",
        computes="75ms",
        profile="",
        rounds={
            KEYS["d-sync"]: rounds(0.2, 0.3, 0.25, communication=0.1, exposed=0.09),
            KEYS["ddp"]: rounds(0.4, 0.3, 0.5, communication=0.5, exposed=0.3),
            KEYS["ddp-fp16"]: rounds(0.2, 0.25, 0.25, communication=0.3, exposed=0.2),
            KEYS["local"]: rounds(0.1, 0.1, 0.1, communication=0, exposed=0),
            KEYS["theano-easgd"]: rounds(0.15, 0.15, 0.15, communication=0.02, exposed=0.03),
            HOGWILD: [{"seconds": 0.08, "communication_seconds": 0.0, "exposed_seconds": 0.0, "wire_bytes": 0.0}],
        },
        predictions={key: {"reason": "none"} for key in KEYS.values()}
        | {KEYS["ddp"]: {"seconds": 0.44, "low": 0.4, "high": 0.5}},
    )


def curve(*accuracies: float, failure: str | None = None) -> Curve:
    points = [[100.0 * (at + 1), value] for at, value in enumerate(accuracies)]
    return Curve(commit=None, how="real", failure=failure, points=points)
