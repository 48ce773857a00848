"""The finished runs of an experiment, kept one by one, so that an experiment of hours can be cut off and continued."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Generic, TypeVar

Run = TypeVar("Run", bound=Any)


class KeptRuns(Generic[Run]):
    """Runs by the words that they were made with, in a JSON file; each is kept as soon as it is there.

    Args:
        path: the file.
        kind: the dataclass of a run.
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
        aside.replace(self._path)  # whole or not there, whenever this process is killed

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)
