"""Workloads and contenders of a comparison, as arguments of ``pipesgd.train``, checked before anything runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipesgd.checks import check_one_of
from pipesgd.cli import HelpRequested
from pipesgd.cli import parse as parse_training
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError

WORKLOADS = {
    "mlp": "--dataset fashion-mnist --model mlp --hidden-sizes 1000 1000 --batch-size 512",
    "convnet": "--dataset fashion-mnist --model convnet --batch-size 64",
    "small-convnet": "--dataset fashion-mnist --model convnet --batch-size 32 --lr 0.1 --schedule one-cycle",
    "small-mlp": "--dataset fashion-mnist --model mlp --hidden-sizes 500 500 --batch-size 32 "
    "--lr 0.1 --schedule one-cycle",
    "large-mlp": "--dataset fashion-mnist --model mlp --hidden-sizes 1913 1913 --batch-size 32 "
    "--lr 0.1 --schedule one-cycle",
    "transformer": "--dataset python-stdlib --model transformer --batch-size 8 "
    "--optimizer adamw --lr 0.008 --schedule one-cycle",
    "alexnet": "--dataset fashion-mnist --model alexnet --batch-size 32",
    "resnet18": "--dataset fashion-mnist --model resnet18 --batch-size 16",
    "digits": "--dataset digits --model mlp --hidden-sizes 64 --batch-size 16",
}
CONTENDERS = {
    "local": "--strategy local",
    "ps-sync": "--strategy ps-sync",
    "ps-async": "--strategy ps-async",
    "D-Sync, native": "--width 1 --all-reduce native",
    "D-Sync, ring": "--width 1 --all-reduce ring",
    "ddp": "--strategy ddp",
    "ddp fp16": "--strategy ddp --ddp-hook fp16",
    "width 2, native": "--width 2 --all-reduce native",
    "width 2, ring": "--width 2 --all-reduce ring",
    "width 3, ring": "--width 3 --all-reduce ring",
    "width 2, int8": "--width 2 --codec int8",
    "width 2, int4": "--width 2 --codec int4",
    "width 2, ternary": "--width 2 --codec ternary",
}
THEANO_MPI = {
    "awagd": "--width 1 --outer average",
    "awagd, momentum too": "--width 1 --outer average --average-state",
    "subgd": "--width 1 --all-reduce all-to-all",
    "easgd": "--width 1 --outer elastic",
    "easgd-async": "--strategy easgd-async",
}
"""Methods of Theano-MPI (Ma, Mao and Taylor, 2016), which are compared only if they are named.

AWAGD averages weights after each rank's own update, at k times the learning rate of a single one of k ranks; SUBGD sums
the updates of all ranks at that single rate, here by Theano-MPI's all-to-all exchange. A sum of k updates is their mean
at k times the rate, so both rows have the workload's rate, which all contenders apply to means. Where a rate was tuned
on a single rank, ``--lr-scaling linear`` multiplies it.
"""
DECIDED_HERE = (
    *("output", "resume", "overwrite", "dry-run", "config", "help"),
    *("iterations", "epochs", "seed", "timeout", "evaluate-iterations"),
    *("checkpoint-seconds", "checkpoint-iterations", "keep-checkpoints"),
)
"""Options of ``pipesgd.train`` that the comparison sets, the same for all contenders."""
NEVER = 10**9
"""Iterations between checkpoints, more than a run has, so that no contender's time includes one."""

Options = dict[str, tuple[str, ...]]
"""Values that follow each option, by its name without dashes."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A name in the table, and the training that is run for it."""

    name: str
    words: tuple[str, ...]
    """Arguments of ``pipesgd.train``, all but --output and --seed."""
    config: TrainConfig

    @property
    def codec(self) -> str:
        """Codec of what our own all-reduces send; fp32 for other strategies."""
        return self.config.compression.codec

    @property
    def method(self) -> str:
        """Method that its colour in a figure stands for: the strategy, or the width and codec of a pipeline."""
        pipeline = self.config.pipeline
        if pipeline.strategy != "pipelined":
            return pipeline.strategy
        return f"width {pipeline.width}" + ("" if self.codec == "fp32" else f", {self.codec}")


def choose(names: Sequence[str] | None, added: Iterable[str]) -> dict[str, str]:
    """Return names and arguments of the contenders in ``names`` and of those ``added``, "NAME=WORDS".

    By default, ``names`` are all of ``CONTENDERS``; those of ``THEANO_MPI`` can be named, too.

    Raises:
        UserInputError: a name is unknown or given twice, or has no arguments.
    """
    names = list(CONTENDERS) if names is None else names
    known = CONTENDERS | THEANO_MPI
    for name in names:
        check_one_of("contender", name, list(known))
    chosen = [(name, known[name]) for name in names]
    for text in added:
        name, _, words = (part.strip() for part in text.partition("="))
        if not name or not words.startswith("--") or name.startswith("-"):
            raise UserInputError(f'contender must be "NAME=WORDS", e.g. "width 4=--width 4"; got {text!r}')
        chosen.append((name, words))
    for name, _ in chosen:
        if [other for other, _ in chosen].count(name) + (name in known and name not in names) > 1:
            raise UserInputError(f"every contender must have a name of its own; got {name!r} twice")
    return dict(chosen)


def make(chosen: Mapping[str, str], workload: str, rules: str) -> list[Contender]:
    """Return the contenders. All get ``workload`` and ``rules`` as arguments; own options override the workload's.

    Raises:
        UserInputError: ``pipesgd.train`` would refuse them, or they would not train the same thing.
    """
    shared, base = own_options("workload", workload), config("workload", workload)
    contenders = []
    for name, words in chosen.items():
        options = shared | own_options(f"contender {name}", words) | _options("rules", rules)
        own = _config(f"contender {name}", options)
        if (own.data, own.model) != (base.data, base.model):
            raise UserInputError(f"contender {name}: data, batch size and model must be the workload's; got {words}")
        contenders.append(Contender(name=name, words=tuple(_words(options)), config=own))
    return contenders


def config(who: str, text: str) -> TrainConfig:
    """Return the config for the arguments ``text``. Raises ``UserInputError``, whose message begins with ``who``."""
    return _config(who, own_options(who, text))


def own_options(who: str, text: str) -> Options:
    """Return the options that ``text`` sets. Raises ``UserInputError`` if the comparison sets one of them."""
    options = _options(who, text)
    for name in options:
        if name in DECIDED_HERE:
            raise UserInputError(f"{who}: --{name} must be left out, since the comparison decides it; got {text!r}")
    return options


def _options(who: str, text: str) -> Options:
    try:
        words = shlex.split(text)
    except ValueError as failure:
        raise UserInputError(f"{who} must be words as a shell splits them; got {text!r}: {failure}") from None
    options: Options = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            if name in options:
                raise UserInputError(f"{who}: {name} must be given once; got it twice in {text!r}")
            options[name] = (value,) if equals else ()
        elif not name:
            raise UserInputError(f"{who} must begin with an option of pipesgd.train; got {text!r}")
        else:
            options[name] += (word,)
    return options


def _words(options: Options) -> list[str]:
    return [word for name, values in options.items() for word in (f"--{name}", *values)]


def _config(who: str, options: Options) -> TrainConfig:
    try:
        return parse_training(_words(options))
    except UserInputError as failure:
        raise UserInputError(f"{who}: {failure}") from None
    except HelpRequested:  # "-h" as the value of an option
        raise UserInputError(f"{who} must be options of pipesgd.train; got {' '.join(_words(options))}") from None
