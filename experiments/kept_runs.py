"""Finished runs of an experiment, saved one by one, so that an experiment of hours can be interrupted and continued."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from experiments import command
from experiments.results import write_json
from experiments.testbed import TestbedFailedError
from pipesgd.errors import RunError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say

Run = TypeVar("Run", bound=Any)
Planned = TypeVar("Planned")


class KeptRuns(Generic[Run]):
    """Runs in a JSON file, each under a text that identifies it; a run is saved as soon as it has finished.

    Args:
        path: the file.
        kind: the dataclass that holds a run.
        fresh: True to forget the runs that the file has.
    """

    def __init__(self, path: Path, kind: type[Run], *, fresh: bool = False):
        self._path = path
        self._kind = kind
        if fresh:
            path.unlink(missing_ok=True)

    def load(self) -> dict[str, Run]:
        if not self._path.exists():
            return {}
        return {words: self._kind(**run) for words, run in json.loads(self._path.read_text(encoding="utf-8")).items()}

    def add(self, words: str, run: Run) -> None:
        kept = {words: dataclasses.asdict(run) for words, run in (self.load() | {words: run}).items()}
        write_json(self._path, kept)

    def complete(
        self,
        planned: Mapping[str, Planned],
        make: Callable[[Planned], Run],
        console: Console,
        label: str,
        *,
        named: Callable[[Planned], str] | None = None,
        told: Callable[[Run], str] = lambda run: "",
        finished: bool = False,
        ranks: Ranks | None = None,
    ) -> dict[str, Run]:
        """Return the planned runs, by the texts that identify them; the missing ones are made now, unless ``finished``.

        ``label`` is that of the progress, which calls a run by ``named``, or else by its text. If ``ranks`` make runs
        together, all of them call this together, and rank 0 alone has the file, and gets the runs. What has come of a
        run is ``told`` in the progress, too.

        Raises:
            RunError: a run, or its testbed, failed. All others were made before, unless ``ranks`` make them, which the
                failure may have left in different places.
        """
        failures: list[str] = []
        has_the_file = ranks is None or ranks.rank == 0
        done = self.load() if has_the_file else {}
        there = done if ranks is None else ranks.all_gather_object("runs that are there", list(done))[0]
        missing = {words: one for words, one in planned.items() if words not in there}
        command.say_kept(console, len(planned), len(missing))
        if not finished:
            with command.progress(console, label, len(missing)) as advance:
                for words, one in missing.items():
                    name = outcome = words if named is None else named(one)
                    try:
                        run = make(one)
                    except (RunError, TestbedFailedError) as failure:
                        if ranks is not None:
                            raise
                        failures.append(f"{name}: {failure}")
                        say(console, f"{name} failed: {failure}")
                    else:
                        if has_the_file:
                            done[words] = run
                            self.add(words, run)
                        outcome = f"{name} {told(run)}".rstrip()
                    advance(1, outcome)
        if failures:
            raise RunError(
                f"{label}: {len(failures)} of {len(missing)} failed, and are made again by the same command; the first "
                f"was {failures[0]}"
            )
        return {words: done[words] for words in planned if words in done}
