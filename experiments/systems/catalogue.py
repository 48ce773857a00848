"""Systems by name: each is a configuration of pipesgd.train, in a TOML file next to this module.

    torchrun --nproc-per-node 4 -m pipesgd.train --config experiments/systems/theano-awagd.toml

The comment at the head of a file says what the system was, what it is here, and what was substituted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NAME = "systems"
"""Name of the table."""
HOGWILD = "caffe-hogwild"
"""Name of the system that has a program of its own (hogwild.py): it is no strategy of the trainer."""
NOT_HERE = {
    "cuda-convnet2-model": "its layers are split over devices, and pipesgd.train gives every rank the whole model; "
    "experiments.one_weird_trick trains it by a plan of layers, in a loop of its own",
    "cuda-convnet2-hybrid": "its linear layers are split over devices, as those of cuda-convnet2-model",
}
"""Systems without a row, and the reason."""
WITHOUT_EFFECT = ("rate-limit", "loader-workers")
"""Options that change no weight: ``comm/test_pace.py`` and ``data/test_datasets.py`` show it."""

UNTIMED = ("synchronous-start",)
"""Options without an effect on times, which are those of a pipeline that is full, at a constant learning rate."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A system of the table."""

    name: str
    """Name of its file, without the ending."""
    title: str
    """Title: the system and its paper, in a sentence."""
    here: str
    """Description of its place here: the options that run it."""
    substituted: str
    """Parts of the original that something else takes the place of."""
    options: dict[str, Any]
    """Options of ``pipesgd.train`` by name."""

    @property
    def words(self) -> str:
        """Arguments of ``pipesgd.train``."""
        return words_of(self.options)

    @property
    def trained_words(self) -> str:
        """Arguments that determine the weights: two systems that share them train alike, bit for bit."""
        return words_of({name: value for name, value in self.options.items() if name not in WITHOUT_EFFECT})

    @property
    def timed_words(self) -> str:
        """Arguments that determine the time of an iteration."""
        return words_of({name: value for name, value in self.options.items() if name not in UNTIMED})


def words_of(options: dict[str, Any]) -> str:
    """Return these options as arguments of a command.

    >>> words_of({"width": 1, "average-state": True})
    '--width 1 --average-state'
    """
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items())


def load(path: Path) -> System:
    """Return the system that a file describes.

    Raises:
        ValueError: its head does not say what the system was, what it is here, and what was substituted.
    """
    text = path.read_text(encoding="utf-8")
    head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    found = re.fullmatch(r"(?P<title>.+?\.) Here: (?P<here>.+?\.) Substituted: (?P<substituted>.+\.)", head)
    if found is None:
        raise ValueError(f"{path.name} must begin with a title, 'Here: ...' and 'Substituted: ...'; got {head!r}")
    return System(name=path.stem, **found.groupdict(), options=tomllib.loads(text))


def systems() -> dict[str, System]:
    """Return the systems with a file, by name, in alphabetical order: those of one paper are next to each other."""
    return {path.stem: load(path) for path in sorted(FOLDER.glob("*.toml"))}


def keys_of(names: Iterable[str]) -> dict[str, str]:
    """Return what identifies each of these systems in a cell of times: its arguments, or ``HOGWILD``."""
    known = systems()
    return {name: HOGWILD if name == HOGWILD else known[name].timed_words for name in names}


def all_names() -> list[str]:
    """Return the names of all systems, sorted."""
    return sorted([*systems(), HOGWILD])
