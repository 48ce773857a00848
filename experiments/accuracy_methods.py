"""Trainings as people do them, and ways to exchange gradients, that ``experiments/accuracy.py`` compares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training as people do it."""

    words: str
    """Arguments of ``pipesgd.train`` for data, model and optimizer."""
    lr: float
    """Learning rate in the middle of those tried first."""
    ms: tuple[float, float]
    """Milliseconds of a rank's iteration at width 1 and at width 2, on one core of the machine of the results."""
    test_s: float
    """Seconds of the set-up and the evaluation on the whole test set."""
    long: bool = True
    """True if it is also tried at the longest length."""
    factored: bool = True
    """False if its matrices are too small for factors of low rank, which would be no method of its own there."""
    by_loss: bool = True
    """True if the loss is judged, False for the accuracy."""


OF_TEXT = "--batch-size 8 --context 64 --embedding 64 --layers 2 --clip-norm 1"
TIED = f"--model experiments.accuracy_models:tied_transformer {OF_TEXT}"
ADAMW = "--optimizer adamw --betas 0.9 0.95 --weight-decay 0.1"
WORKLOADS = {
    "transformer, bytes": Workload(words=f"--dataset python-stdlib {TIED} {ADAMW}", lr=0.008, ms=(13, 18), test_s=9),
    "transformer, byte pairs": Workload(
        words=f"--dataset experiments.accuracy_models:byte_pairs=1024 {TIED} {ADAMW}", lr=0.008, ms=(14, 20), test_s=6
    ),
    "convnet, batch norm": Workload(
        words="--dataset fashion-mnist --model experiments.accuracy_models:batch_norm_convnet --batch-size 32 "
        "--optimizer sgd --weight-decay 0.0005",
        lr=0.1,
        ms=(16, 18),
        test_s=3,
        by_loss=False,
    ),
    "LoRA": Workload(
        words=f"--dataset python-stdlib --model experiments.accuracy_models:adapted_transformer=8 {OF_TEXT} "
        "--optimizer adamw",
        lr=0.008,
        ms=(13, 15),
        test_s=9,
        factored=False,
    ),
    "transformer, Muon": Workload(
        words=f"--dataset python-stdlib {TIED} --optimizer muon --weight-decay 0.1",
        lr=0.016,
        ms=(14, 26),
        test_s=9,
        long=False,
    ),
    "MLP, Adagrad": Workload(
        words="--dataset fashion-mnist --model mlp --hidden-sizes 200 200 --batch-size 32 --optimizer adagrad",
        lr=0.02,
        ms=(2, 5),
        test_s=1,
        long=False,
        by_loss=False,
    ),
    "digits": Workload(
        words="--dataset digits --model mlp --hidden-sizes 64 --batch-size 16",
        lr=0.1,
        ms=(0.7, 2),
        test_s=1,
        by_loss=False,
    ),
}
"""Workloads, the most telling first; the last one is for trying out."""
TRAINED = tuple(name for name in WORKLOADS if name != "digits")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to exchange gradients."""

    words: str
    """Arguments of ``pipesgd.train`` for it."""
    rate_of: str
    """Name of the method whose search gives its rate, perhaps its own."""
    bounds: tuple[float, float] = (1.0, 0.2)
    """Percent of the loss, and points of accuracy, that it may lose to synchronous training."""
    work: float = 1.0
    """Time of an iteration as a multiple of that without a codec."""
    long: bool = False
    """True if it is also tried at the longest length."""
    way_of: str = ""
    """Method that this one is tried in place of, where that one misses its bound."""


SYNCHRONOUS, LATE, LOW_RANK = "synchronous", "width 2", "width 2, low rank"
OF_LOW_RANK = "--codec powersgd --low-rank 4"
LOW_RANK_BOUNDS = (1.5, 0.3)
METHODS = {
    SYNCHRONOUS: Method(words="--width 1", rate_of=SYNCHRONOUS, long=True),
    LATE: Method(words="--width 2", rate_of=LATE),
    LOW_RANK: Method(words=f"--width 2 {OF_LOW_RANK}", rate_of=LOW_RANK, bounds=LOW_RANK_BOUNDS, work=1.2, long=True),
    "width 2, int8": Method(words="--width 2 --codec int8", rate_of=LATE, long=True),
    "width 2, int4": Method(words="--width 2 --codec int4", rate_of=LATE, long=True),
    "compress int8": Method(words="--width 1 --codec int8", rate_of=SYNCHRONOUS),
    "compress int4": Method(words="--width 1 --codec int4", rate_of=SYNCHRONOUS, long=True),
    "compress low rank": Method(words=f"--width 1 {OF_LOW_RANK}", rate_of=LOW_RANK, bounds=LOW_RANK_BOUNDS, work=1.2),
}
"""Methods: first those whose rates are searched for."""
COMPARED = tuple(name for name in METHODS if name != SYNCHRONOUS)
_LONGER_STARTS = {
    "start of a quarter": "--synchronous-start {quarter}",
    "start of a half": "--synchronous-start {half}",
}
_LARGER_RANK = {"rank 16, dense start of a quarter": "--low-rank 16 --dense-start {quarter}"}
_TRIED: dict[str, tuple[str, dict[str, str]]] = {
    "width 2, int8": ("--width 2 --codec int8", _LONGER_STARTS),
    "compress int4": (
        "--width 1 --codec int4",
        {
            "blocks of 32": "--codec-block 32",
            "blocks of 128": "--codec-block 128",
            "stochastic": "--rounding stochastic",
        },
    ),
    LATE: ("--width 2", {**_LONGER_STARTS, "prediction local": "--prediction local"}),
    LOW_RANK: ("--width 2 --codec powersgd", _LARGER_RANK),
    "compress low rank": (
        "--width 1 --codec powersgd",
        {
            "rank 16": "--low-rank 16",
            "ranks by size": "--rank-compression 8",
            "dense start of a quarter": "--dense-start {quarter}",
            **_LARGER_RANK,
        },
    ),
}
WAYS = {
    f"{name}, {way}": Method(
        words=f"{words} {more}", rate_of=METHODS[name].rate_of, bounds=METHODS[name].bounds, work=1.2, way_of=name
    )
    for name, (words, ways) in _TRIED.items()
    for way, more in ways.items()
}
"""Ways tried where a method misses its bound, at the rates of that method."""


def named(name: str) -> Method:
    """Return a method, or a way."""
    return METHODS.get(name) or WAYS[name]
