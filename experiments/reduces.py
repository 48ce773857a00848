"""Time of an iteration by what of a gradient is exchanged, whole matrices, factors or rows, on emulated links.

    python -m experiments.reduces        4 nodes at 200 Mbit/s: reduces.csv

Two models: AlexNet for small images, most of whose weights are in a linear layer (factors), and a classifier of texts
with an embedding of 100,000 rows (rows), whose words are drawn uniformly, so that hardly any row is used twice in a
batch. All contenders train a copy of the same model on the same batches, which are already in memory. Their gradients
are real ones, since factors must be those of the gradient; each rank has an emulated accelerator, whose pass takes at
least as long as the title says, so that the cores are left to the network. Multiplying the factors of all ranks is not
emulated: four ranks do it on two cores. loops_on_links.py says how the loops are timed, in steady blocks. "auto" is
chosen as by ``--reduce auto``, by shapes and the batch. "sent" is what rank 0 has sent in an iteration, and "wire" the
time of these bytes on its link, headers included. "predicted" is what a run with these options would be told before it
begins, by a calibration of the same ranks before the loops.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments import accelerators, command
from experiments.bench_accelerators import CLUSTER, DDP, DDP_FP16
from experiments.bench_pipelined import Workload
from experiments.limits import wire_seconds
from experiments.loops import Loop, Piped, Plain, to_fp16
from experiments.loops_on_links import Effort, measure, on_testbed, show, show_verdicts, summarize, verdicts
from experiments.results import Row, save
from pipesgd.calibration.measure import measure as calibrate
from pipesgd.cli import parse
from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import CodecOptions
from pipesgd.config import TrainConfig
from pipesgd.data import DataSplits, ShardedBatches, load_dataset
from pipesgd.data.samples import Batch, BatchedDataset
from pipesgd.pipeline.exchanges import Reduce, fewest_bytes
from pipesgd.planning.choose import decide
from pipesgd.planning.parts import parts_of_run
from pipesgd.ranks import Ranks

FULL, QUICK = Effort(block=4, rounds=5, steady=True), Effort(block=2, rounds=1, steady=True)
CALIBRATION_SECONDS = 8.0
TEXTS = 1024
"""Number of texts."""


class Drawn(BatchedDataset):
    """Texts of words that are drawn uniformly, with one of two classes each."""

    def __init__(self, rows: int, words: int):
        numbers = torch.Generator().manual_seed(1)
        self._words = torch.randint(rows, (TEXTS, words), generator=numbers)
        self._classes = torch.randint(2, (TEXTS,), generator=numbers)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, indices: Tensor) -> Batch:
        return self._words[indices], self._classes[indices]


@dataclass(frozen=True, kw_only=True)
class Texts(Workload):
    """A classifier of synthetic texts: words (B, ``words``), each with a row in an embedding, of two classes."""

    rows: int
    """Rows of the embedding."""
    columns: int
    words: int
    """Words in a text."""

    def build(self, data: DataSplits) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(self.rows, self.columns), nn.Linear(self.columns, 2))

    def shards(self, data: DataSplits, ranks: Ranks) -> ShardedBatches:
        drawn = Drawn(self.rows, self.words)
        return ShardedBatches(drawn, batch_size=self.batch_size, rank=ranks.rank, world_size=ranks.world_size, seed=0)


WORKLOADS: dict[str, Workload] = {
    "alexnet": Workload(name="small AlexNet, batch 4", model="alexnet", batch_size=4),
    "texts": Texts(
        name="texts of 64 words, embedding of 100,000 x 16, batch 32",
        model="embedding",
        batch_size=32,
        rows=100_000,
        columns=16,
        words=64,
    ),
}


def rows_of(workload: Workload) -> int:
    """Return the rows of input of a layer on each rank in an iteration."""
    return workload.batch_size * (workload.words if isinstance(workload, Texts) else 1)


ACCELERATORS = {"alexnet": "400ms", "texts": "60ms"}
PIPELINES: dict[str, dict[str, Any]] = {
    f"width {width}, {codec}, {reduce}": {"width": width, "codec": codec, "reduce": reduce}
    for width, codec in ((1, "fp32"), (2, "fp32"), (2, "int8"))
    for reduce in ("matrix", "auto")
}
TARGETS = {
    ("width 1, fp32, auto", "width 1, fp32, matrix"): ("at most", 0.6),
    ("width 2, fp32, auto", "width 2, fp32, matrix"): ("at most", 0.6),
    ("width 2, int8, auto", "width 2, int8, matrix"): ("at most", 1.02),
    ("width 2, fp32, auto", DDP_FP16): ("at most", 0.75),
}
MOST_OFF = 0.03
"""Largest share by which a prediction may be off."""


def emulate(model: nn.Module, ranks: Ranks, accelerator: str | None) -> nn.Module:
    """Return a copy of ``model``, on an accelerator if its time is given."""
    copied = copy.deepcopy(model)
    if accelerator is None:
        return copied
    made, _ = accelerators.parse(accelerator, synthetic=False)
    return accelerators.Emulated(copied, made, rank=ranks.rank)


def exchange(model: nn.Module, rows: int, options: Mapping[str, Any], ranks: Ranks) -> Reduce:
    """Return the exchange of gradients of these options, with ``rows`` of input of each layer on each rank."""
    if options["reduce"] != "auto":
        return str(options["reduce"])
    return fewest_bytes(model, rows, make_codec(CodecOptions(codec=options["codec"])), ranks.world_size)


def make_loops(model: nn.Module, ranks: Ranks, *, rows: int, accelerator: str | None = None) -> dict[str, Loop]:
    """Return every loop, each with a copy of ``model``, on an accelerator if its time is given. Collective."""
    emulated = partial(emulate, model, ranks, accelerator)

    def piped(options: Mapping[str, Any]) -> Piped:
        own = emulated()
        return Piped(own, ranks, **{**options, "reduce": exchange(own, rows, options, ranks)})

    return {
        DDP: Plain(DistributedDataParallel(emulated())),
        DDP_FP16: Plain(DistributedDataParallel(emulated()), to_fp16),
        **{name: piped(options) for name, options in PIPELINES.items()},
    }


def config_of(workload: Workload, options: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a run with these options."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return parse(["--batch-size", str(workload.batch_size), *words])


def predictions(
    workload: Workload, model: nn.Module, batches: ShardedBatches, ranks: Ranks, console: Console, *, seconds: float
) -> dict[str, dict[str, float]]:
    """Return what the timing model predicts of every pipeline, by a calibration of about ``seconds``. Collective.

    On rank 0 alone; others get none. There must be no process group, and there is none afterwards.
    """
    codecs = sorted({str(options["codec"]) for options in PIPELINES.values()} - {"fp32"})
    config = config_of(workload, {"codec": codecs[0]})
    with torch.random.fork_rng(devices=[]):
        found = calibrate(
            config,
            model,
            batches,
            ranks,
            console,
            seconds=seconds,
            largest_bytes=sum(one.nbytes for one in model.parameters()),
            codecs=codecs,
            all_reduces=["ring"],
            servers=False,
            prediction=config.pipeline.prediction,
            brief=True,
        )
    ranks.leave()
    predicted = {}
    for name, options in PIPELINES.items():
        of_run = config_of(workload, options)
        reduce = exchange(model, rows_of(workload), options, ranks)
        parts = parts_of_run(of_run, ranks, model, batches, reduce)
        if found is None:
            continue
        profile = found.profile(config, model, samples=TEXTS, command=["-m experiments.reduces"])
        told = decide(
            profile,
            profile.compute[0],
            of_run,
            parts=parts,
            world_size=ranks.world_size,
            iterations=1000,
            source="a calibration",
            own=True,
        )
        predicted[name] = {
            "predicted_s": told.iteration_seconds,
            "predicted_low": told.low,
            "predicted_high": told.high,
        }
    return predicted


def off(row: Row) -> float | None:
    """Return the share by which the prediction of a row is off; None without one."""
    return None if row["predicted_s"] is None else row["predicted_s"] / row["median_s"] - 1


def judge(found: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> dict[str, dict[str, float | str]]:
    """Return the ratios that have a target, and the errors of the predictions."""
    judged = verdicts({name: one["seconds"] for name, one in found.items()}, TARGETS)
    for row in rows:
        if (error := off(row)) is not None:
            ratio = 1 + error
            judged[f"predicted / {row['contender']}"] = {
                "median": ratio,
                "low": row["predicted_low"] / row["median_s"],
                "high": row["predicted_high"] / row["median_s"],
                "target": f"{1 - MOST_OFF} to {1 + MOST_OFF}",
                "verdict": "met" if abs(error) <= MOST_OFF else "MISSED",
            }
    return judged


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command: on a testbed, or, started by torchrun, as one of its ranks."""
    options = command.parser("reduces", __doc__)
    options.add_argument("--workload", choices=sorted(WORKLOADS), help="one of the models; by default all, in turn")
    arguments = ranks.raise_together("options", lambda: command.parse(options, words))
    effort = QUICK if arguments.quick else FULL
    if ranks.by_torchrun:
        name = arguments.workload or "alexnet"
        workload, accelerator = WORKLOADS[name], ACCELERATORS[name]
        data = ranks.raise_together("data", lambda: load_dataset("fashion-mnist", None, image_size=64))
        model, batches = emulate(workload.build(data), ranks, accelerator), workload.shards(data, ranks)
        seconds = CALIBRATION_SECONDS / (4 if arguments.quick else 1)
        told = predictions(workload, model, batches, ranks, console, seconds=seconds)
        make = partial(make_loops, rows=rows_of(workload), accelerator=accelerator)
        measure(workload, make, ranks, effort, arguments.output, known=told)
        return
    rows: list[Row] = []
    judged = {}
    for name in [arguments.workload] if arguments.workload else WORKLOADS:
        job = ["--workload", name, *["--quick"] * arguments.quick]
        found = on_testbed("reduces", job, nodes=CLUSTER.nodes, link=CLUSTER.link)
        title = f"{WORKLOADS[name].name}, on accelerators of {ACCELERATORS[name]}, {CLUSTER.describe()} (all emulated)"
        of_workload: list[Row] = []
        for row in summarize(found, title, DDP):
            one = found[row["contender"]]
            sent = one["wire_bytes"]
            wire = None if sent is None else wire_seconds(sent, CLUSTER.link.rate)
            told_of = {key: one.get(key) for key in ("predicted_s", "predicted_low", "predicted_high")}
            of_workload.append({**row, "wire_bytes": sent, "wire_s": wire, **told_of})
        judged[name] = judge(found, of_workload)
        show(of_workload, wire_s="wire ms", predicted_s="predicted ms")
        show_verdicts(judged[name])
        rows += of_workload
    save("reduces", rows, extra={"block": effort.block, "targets": judged}, folder=arguments.output)


if __name__ == "__main__":
    command.run(main)
