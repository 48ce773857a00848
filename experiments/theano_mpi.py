"""Theano-MPI's published times of an exchange, next to the timing model's with one number fitted.

    python -m experiments.theano_mpi        theano_mpi.csv, theano_mpi.png

Table 3 of the paper (Ma, Mao and Taylor, "Theano-MPI: a Theano-based distributed training framework", 2016) has the
communication time of 5,120 images on 8 GPUs, for MPI's all-reduce (AR), all-to-all, sum and all-gather (ASA), and the
same in half precision (ASA16). One exchange takes that over the number of iterations. Nothing is measured here.

The model has one number, the seconds that a byte takes on the link, as its formula for each of the two exchanges has no
other cost: latencies are 0, and the paper says that its sums take 1.6 % of the time. It is fitted twice, to the three
networks at once (the geometric mean of measured over formula):

- to AR. AR and ASA move the same number of bytes, so the model takes them to be equally fast, and misses ASA by the
  factor that the paper gained from not passing through the host's memory and processor, which this number contains.
- to ASA. Then ASA16 is a prediction: half of the bytes.

AlexNet and GoogLeNet ran on eight nodes, VGGNet on the eight GPUs of one: there the links are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from experiments import command
from experiments.results import Row, save, save_panels
from pipesgd.ranks import Ranks
from timing_model import LinkParams
from timing_model.all_reduce import all_reduce_time
from timing_model.params import CodecCost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GPUS, IMAGES = 8, 5120
NETWORKS = {
    "AlexNet, batch 128": (60_965_224, 128, {"AR": 2.01, "ASA": 0.75, "ASA16": 0.47}),
    "AlexNet, batch 32": (60_965_224, 32, {"AR": 8.03, "ASA": 2.94, "ASA16": 1.83}),
    "GoogLeNet, batch 32": (13_378_280, 32, {"AR": 2.07, "ASA": 1.96, "ASA16": 1.76}),
    "VGGNet, batch 32": (138_357_544, 32, {"AR": 41.41, "ASA": 8.60, "ASA16": 4.84}),
}
"""Number of parameters, batch size, and published seconds of communication for 5,120 images."""
HALF = CodecCost(name="fp16", bits=16.0, encode=0.0, decode=0.0, add=0.0, hop=0.0)
EXCHANGES = {"AR": ("ring", None), "ASA": ("all-to-all", None), "ASA16": ("all-to-all", HALF)}
"""All-reduce and codec of each exchange; MPI's is taken to be a ring, like all that are optimal in bandwidth."""
FITTED = {"AR": "fitted to AR", "ASA": "fitted to ASA"}


def per_exchange(seconds: float, batch: int) -> float:
    """Return the seconds of one exchange, given those for all images."""
    return seconds * GPUS * batch / IMAGES


def formula(exchange: str, numel: int, beta: float) -> float:
    """Return the model's time of an exchange, in s, on a link that takes ``beta`` seconds a byte."""
    all_reduce, codec = EXCHANGES[exchange]
    link = LinkParams(alpha=0.0, beta=beta, gamma=0.0)
    return all_reduce_time(all_reduce, link, numel, GPUS, codec=codec).total


def fit(exchange: str) -> float:
    """Return the seconds a byte that fit the published times of ``exchange`` best, in relative terms."""
    ratios = [
        per_exchange(published[exchange], batch) / formula(exchange, numel, 1.0)
        for numel, batch, published in NETWORKS.values()
    ]
    return float(np.exp(np.mean(np.log(ratios))))


def compute() -> list[Row]:
    """Return a row for every network and exchange."""
    betas = {fitted: fit(fitted) for fitted in FITTED}
    return [
        {
            "network": name,
            "exchange": exchange,
            "published_s": per_exchange(seconds, batch),
            **{f"fitted_to_{fitted}_s": formula(exchange, numel, beta) for fitted, beta in betas.items()},
            **{f"gbit_per_s_fitted_to_{fitted}": 8e-9 / beta for fitted, beta in betas.items()},
        }
        for name, (numel, batch, published) in NETWORKS.items()
        for exchange, seconds in published.items()
    ]


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Draw the published time of every exchange, and both of the model's."""
    places = np.arange(len(rows))[::-1]
    columns = {"published": "published_s", **{label: f"fitted_to_{name}_s" for name, label in FITTED.items()}}
    for number, (label, column) in enumerate(columns.items()):
        axes.barh(places + 0.27 * (1 - number), [1e3 * row[column] for row in rows], height=0.25, label=label)
    axes.set_yticks(places, [f"{row['network']}: {row['exchange']}" for row in rows])
    axes.set(xscale="log", xlabel="one exchange (ms)", title="Theano-MPI, 8 GPUs")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes


def draw(name: str, rows: list[Row], folder: Path) -> Path:
    """Write the figure."""
    return save_panels(name, [partial(plot, rows)], size=(8.0, 5.0), folder=folder)


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    arguments = command.parse(command.parser("theano_mpi", __doc__), words)
    rows = compute()
    save("theano_mpi", rows, folder=arguments.output)
    draw("theano_mpi", rows, arguments.output)
    command.show(
        "One exchange, ms",
        [
            {
                "network": row["network"],
                "exchange": row["exchange"],
                "published": f"{1e3 * row['published_s']:.0f}",
                **{
                    label: f"{1e3 * row[f'fitted_to_{name}_s']:.0f} "
                    f"({row[f'fitted_to_{name}_s'] / row['published_s'] - 1:+.0%})"
                    for name, label in FITTED.items()
                },
            }
            for row in rows
        ],
    )


if __name__ == "__main__":
    command.run(main)
