"""Finished runs of an experiment, saved one by one, so that an experiment of hours can be interrupted and continued."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Generic, TypeVar

Run = TypeVar("Run", bound=Any)


class KeptRuns(Generic[Run]):
    """Runs in a JSON file, each under a text that identifies it; a run is saved as soon as it has finished.

    Args:
        path: the file.
        kind: the dataclass that holds a run.
    """

    def __init__(self, path: Path, kind: type[Run]):
        self._path = path
        self._kind = kind

    def load(self) -> dict[str, Run]:
        if not self._path.exists():
            return {}
        return {words: self._kind(**run) for words, run in json.loads(self._path.read_text(encoding="utf-8")).items()}

    def add(self, words: str, run: Run) -> None:
        kept = {words: dataclasses.asdict(run) for words, run in (self.load() | {words: run}).items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".tmp")
        aside.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        aside.replace(self._path)  # the file is whole or absent, whenever this process is killed

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)
