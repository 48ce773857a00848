"""Results of an experiment: a table, and the manifest that says where it comes from."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import operator
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import pipesgd

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "experiments" / "results"

Row = dict[str, Any]
"""Row of a table: column names, which end in the unit, and values."""


def save(name: str, rows: list[Row], *, extra: dict[str, Any] | None = None, folder: Path = RESULTS) -> Path:
    """Write ``folder/name.csv`` and ``folder/name.manifest.json``; return the path of the table.

    The table is ``name.json`` instead if a value in it is a list or a dict. ``extra`` is added to the manifest.
    Call it while the ranks are still joined, since the manifest says how many there are.
    """
    assert rows, "an experiment without a row has failed"
    if any(isinstance(value, list | dict) for row in rows for value in row.values()):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    else:
        path = folder / f"{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    manifest = {"made_by": command_line(), **provenance(), **(extra or {})}
    (folder / f"{name}.manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return path


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path``, whose file is whole or absent, whenever this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def command_of(manifest: Mapping[str, Any]) -> str:
    """Return the command that made a result, as a shell takes it, without the folder that it wrote to."""
    words = shlex.split(manifest["made_by"])
    folders = [place + 1 for place, word in enumerate(words) if word == "--output"]
    return shlex.join(
        word for place, word in enumerate(words) if place not in folders and word.partition("=")[0] != "--output"
    )


def load(path: Path) -> list[Row]:
    """Return the rows that ``save`` wrote to ``path``."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".json":
            return list(json.load(file))
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def grouped(rows: Iterable[Row], *columns: str) -> dict[Any, list[Row]]:
    """Return the rows by their value in a column, or by their values in several, in the order in which these come.

    >>> grouped([{"p": 2, "s": 1.0}, {"p": 3, "s": 2.0}, {"p": 2, "s": 3.0}], "p")
    {2: [{'p': 2, 's': 1.0}, {'p': 2, 's': 3.0}], 3: [{'p': 3, 's': 2.0}]}
    """
    value_of = operator.itemgetter(*columns)
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(value_of(row), []).append(row)
    return found


def command_line() -> str:
    """Return the command that started this process, as a shell takes it, without the paths of this machine."""
    by_torchrun = dist.is_torchelastic_launched() and dist.is_initialized()
    start = f"torchrun --nproc-per-node {dist.get_world_size()}" if by_torchrun else "python"
    spec = sys.modules["__main__"].__spec__
    module = "-" if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    words = [shlex.quote(re.sub(r"(^|=)/.*/", r"\1", word)) for word in sys.argv[1:]]
    return " ".join([start, module, *words])


def code_state() -> str | None:
    """Return the commit that this process runs, "<hash>" or "<hash> and changes"; None without a repository."""
    git = provenance()["git"]
    return None if git is None else git["commit"] + (" and changes" if git["dirty"] else "")


def sources(*own: Path) -> str:
    """Return a hash of the measured code and links and of ``own``, an experiment's files, whether committed or not."""
    return hash_of(Path(pipesgd.__file__).parent, REPOSITORY / "experiments" / "testbed", *own)


def hash_of(*roots: Path) -> str:
    """Return a hash of the Python files ``roots``, and of all that are below those of them that are folders."""
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def provenance() -> dict[str, Any]:
    """Return when, from which code and where this runs. The first call's answer stays: how the experiment began."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git_state(),
        "versions": {
            "pipesgd": pipesgd.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(memory / 2**30, 1),
            "kernel": f"{platform.system()} {platform.release()}",
            **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        },
        "torch_threads": torch.get_num_threads(),
    }


def _git_state() -> dict[str, Any] | None:
    """Return the commit, and whether tracked or new files differ from it; None where there is no repository."""
    # Results are left out: those of the experiment before this one may not be committed yet.
    status = ("status", "--porcelain", "--", ".", ":!experiments/results")
    try:
        commit, changes = (_git("rev-parse", "HEAD"), _git(*status))
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(*words: str) -> str:
    command = ["git", "--no-optional-locks", *words]
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _value(text: str) -> Any:
    """Return the value that ``csv`` wrote as ``text``: None, a boolean, a number, or the text itself."""
    constants = {"": None, "True": True, "False": False}
    if text in constants:
        return constants[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
