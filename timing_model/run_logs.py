"""Measurements that a run of ``pipesgd.train`` made of itself, read from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from timing_model.toml_io import Table

SETTLING, FEWEST = 3, 10
"""Iterations left out at the beginning, and the fewest that must remain."""
FLOOR = 10
"""Percentile of the communication's times that counts as the time without waiting for other ranks."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Options of a run, and the times of its rank 0, in s."""

    name: str
    model: str
    batch_size: int
    world_size: int
    width: int
    codec: str
    all_reduce: str
    segment_bytes: int
    loader_workers: int
    wire_bytes: int
    """Bytes that rank 0 sent in an iteration."""
    iterations: int
    """Number of iterations that were timed."""
    compute: float
    """Median time of forward and backward."""
    update: float
    """Median time of the update."""
    communication: float
    """Time of an all-reduce at the percentile ``FLOOR``: its noise is the computation's."""
    iteration: float
    """Mean time of an iteration."""
    cv: float
    """Robust standard deviation of the computation over its median."""


IMAGE_WORKERS = 2
"""Loader workers of a run on a folder of images that asked for no number of them; on other data it has none."""


def read_run(folder: Path) -> Run:
    """Read ``run.json`` and ``metrics.jsonl``. Raises ``ValueError`` in one line that names folder and field."""
    description = Table(f"{folder.name}/run.json", "", _object(folder, "run.json", _read(folder / "run.json")))
    options = description.table("options")
    strategy = options.text("strategy")
    if strategy != "pipelined":
        raise options.error("strategy", "be pipelined, whose communication is timed", strategy)
    lines = _read(folder / "metrics.jsonl").splitlines()
    if lines and not lines[-1].endswith("}"):
        lines.pop()  # cut short by a crash
    width = options.count("width")
    kept = lines[SETTLING + width :]
    if len(kept) < FEWEST:
        raise ValueError(
            f"{folder.name}/metrics.jsonl must have at least {FEWEST + SETTLING + width} iterations; got {len(lines)}"
        )
    where = f"{folder.name}/metrics.jsonl"
    tables = [Table(where, "", _object(folder, "metrics.jsonl", line)) for line in kept]
    wire_bytes = [one.count("wire_bytes", least=0) for one in tables][-1]
    seconds = [one.table("seconds") for one in tables]
    times = {
        name: np.array([one.number(name) for one in seconds])
        for name in ("compute", "update", "communication", "iteration")
    }
    compute = float(np.median(times["compute"]))
    spread = 1.4826 * float(np.median(np.abs(times["compute"] - compute)))
    return Run(
        name=folder.name,
        model=options.text("model"),
        batch_size=options.count("batch-size"),
        world_size=description.count("world_size"),
        width=width,
        codec=options.text("codec"),
        all_reduce=options.text("all-reduce"),
        segment_bytes=options.count("segment-bytes"),
        loader_workers=_loader_workers(options),
        wire_bytes=wire_bytes,
        iterations=len(kept),
        compute=compute,
        update=float(np.median(times["update"])),
        communication=float(np.percentile(times["communication"], FLOOR)),
        iteration=float(np.mean(times["iteration"])),
        cv=spread / compute if compute > 0 else 0.0,
    )


def _loader_workers(options: Table) -> int:
    if "loader-workers" in options:
        return options.count("loader-workers", least=0)
    return IMAGE_WORKERS if "dataset" in options and options.text("dataset") == "images" else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ValueError(
            f"runs must be folders that pipesgd.train left; got {path.parent}, without {path.name}"
        ) from None


def _object(folder: Path, name: str, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{folder.name}/{name} must be as pipesgd.train wrote it; got {text[:40]!r}") from None
