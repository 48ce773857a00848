"""The paper's question, put to the timing model alone: four nodes at 10 Gbit/s and the paper's four networks.

    python -m experiments.paper_question        paper_question.csv, paper_question_jitter.csv, paper_question.png

Nothing is measured here, and the only figure used from the paper is its abstract's "up to 5.4x compared to conventional
approaches". A network's computation time depended on the paper's GPUs, so every answer covers all computations from a
sixteenth of the time of the fp32 ring all-reduce to sixteen times that. Links and codecs are the presets of
``timing-model``; a parameter server runs next to the first node's worker, or on a fifth machine.

The second table is about jitter: computations spread by ``cv`` around a mean of one second, and a collective takes
``ratio`` seconds, whatever the network. Times come from the formula, and from the simulator, which does not know the
formula. All widths are simulated with the same draws.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments import command, style
from experiments.results import Row, grouped, save, save_panels
from pipesgd.ranks import Ranks
from timing_model import Noise, simulate_iterations, steady_state_period
from timing_model.cluster_profile import Profile
from timing_model.costs import collective_time, costs_of, iteration_time
from timing_model.job import Job
from timing_model.measured import LinkProfile
from timing_model.options import NOTHING, computation_of
from timing_model.presets import MODELS, NETWORKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NODES = 4
NETWORK = "10GbE"
WORKLOADS = ("mlp", "convnet", "alexnet", "resnet18")
CLAIM = 5.4
"""Largest speed-up over conventional approaches that the abstract claims."""
RATIOS = tuple(2.0 ** (step / 4) for step in range(-16, 17))
"""Ratios of the computation to the fp32 ring all-reduce."""
JITTER_RATIOS = tuple(2.0 ** (step / 4) for step in range(-8, 9))
"""Ratios of a collective to the mean computation."""
WIDTHS = (1, 2, 3, 4, 5, 6)
CVS = (0.0, 0.05, 0.1, 0.2, 0.4)
WORLD_SIZES = (NODES, 64)
ITERATIONS, QUICK_ITERATIONS = 20_000, 200
SATURATED = 0.01
"""Largest share that any other width may gain over a width that still counts as enough."""

SERVER = {"strategy": "ps-sync", "all_reduce": None}
METHODS: dict[str, dict[str, Any]] = {
    "ps-sync": SERVER,
    "ps-sync, server apart": {**SERVER, "world_size": NODES + 1, "placement": "dedicated"},
    "ddp": {"strategy": "ddp", "all_reduce": "native"},
    "D-Sync": {},
    "D-Sync + T": {"codec": "truncate16"},
    "D-Sync + Q": {"codec": "int8"},
    "pipelined": {"width": 2},
    "pipelined + T": {"width": 2, "codec": "truncate16"},
    "pipelined + Q": {"width": 2, "codec": "int8"},
    "width 3": {"width": 3},
    "width 3 + Q": {"width": 3, "codec": "int8"},
}
"""Options of each method: T truncates to 16 bits, Q quantizes to 8; all but ps-sync and ddp reduce around the ring."""
DRAWN = {
    "pipelined + Q": (style.METHODS["width 2"], ":"),
    "pipelined + T": (style.METHODS["width 2"], "--"),
    "pipelined": (style.METHODS["width 2"], "-"),
    "D-Sync + Q": (style.METHODS["D-Sync"], ":"),
    "D-Sync + T": (style.METHODS["D-Sync"], "--"),
    "D-Sync": (style.METHODS["D-Sync"], "-"),
    "ddp": (style.METHODS["ddp"], "-"),
    "ps-sync, server apart": (style.METHODS["ps-sync"], "-"),
}
"""Methods that are drawn, with a colour for each strategy and a line style for each codec."""


def compute(workloads: Sequence[str], ratios: Sequence[float]) -> list[Row]:
    """Return a row for every network, computation and method."""
    cluster = Profile(calibrated=NOTHING, link=LinkProfile.exact(NETWORKS[NETWORK]))
    rows: list[Row] = []
    for workload in workloads:
        ring = _question(cluster, workload, 0.0)
        t_ring = collective_time(ring, costs_of(ring), MODELS[workload]).total
        for ratio in ratios:
            times = {}
            for method, options in METHODS.items():
                job = _question(cluster, workload, ratio * t_ring, **options)
                times[method] = iteration_time(job, costs_of(job))
            for method, (iteration, collective) in times.items():
                rows.append(
                    {
                        "workload": workload,
                        "parameters": MODELS[workload],
                        "ratio": ratio,
                        "compute_s": ratio * t_ring,
                        "method": method,
                        "collective_s": collective.total,
                        "iteration_s": iteration.total,
                        "speed_up": times["ps-sync"][0].total / iteration.total,
                        "speed_up_over_server_apart": times["ps-sync, server apart"][0].total / iteration.total,
                    }
                )
    return rows


def compute_jitter(ratios: Sequence[float], iterations: int, console: Console) -> list[Row]:
    """Return a row for every number of ranks, spread, collective and width."""
    rows: list[Row] = []
    with command.progress(console, "jitter", len(WORLD_SIZES) * len(CVS) * len(ratios)) as advance:
        for world_size in WORLD_SIZES:
            for cv in CVS:
                for ratio in ratios:
                    for width in WIDTHS:
                        simulation = simulate_iterations(
                            t_compute=1.0,
                            t_comm=ratio,
                            width=width,
                            world_size=world_size,
                            iterations=iterations,
                            noise=Noise(cv=cv),
                        )
                        rows.append(
                            {
                                "world_size": world_size,
                                "cv": cv,
                                "ratio": ratio,
                                "width": width,
                                "formula": steady_state_period(1.0, ratio, width, world_size, Noise(cv=cv)),
                                "simulated": simulation.period,
                                "iterations": iterations,
                            }
                        )
                    advance(1, f"{world_size} ranks, cv {cv:g}")
    return rows


def _question(cluster: Profile, workload: str, seconds: float, **options: Any) -> Job:
    times = computation_of(workload, MODELS[workload], seconds)
    return Job(cluster=cluster, compute=times, **{"world_size": NODES, **options})


# --- Answers ----------------------------------------------------------------------------------------------------------


def answers(rows: Sequence[Row]) -> list[Row]:
    """Return, by network, width 2's best speed-ups, the ratios up to which they reach the claim, and width 3's gain."""
    found = []
    for workload, own in grouped(rows, "workload").items():
        quantized, plain = _of(own, "pipelined + Q"), _of(own, "pipelined")
        found.append(
            {
                "workload": workload,
                "ring_s": quantized[0]["compute_s"] / quantized[0]["ratio"],
                "most_plain": max(row["speed_up"] for row in plain),
                "most_plain_over_server_apart": max(row["speed_up_over_server_apart"] for row in plain),
                "most": max(row["speed_up"] for row in quantized),
                "most_over_server_apart": max(row["speed_up_over_server_apart"] for row in quantized),
                "claim_to_ratio": _last(quantized, "speed_up"),
                "claim_to_ratio_server_apart": _last(quantized, "speed_up_over_server_apart"),
                "claim_to_ratio_plain_server_apart": _last(plain, "speed_up_over_server_apart"),
                "widest_gain": max(
                    two["iteration_s"] / three["iteration_s"] - 1
                    for narrow, wide in (("pipelined", "width 3"), ("pipelined + Q", "width 3 + Q"))
                    for two, three in zip(_of(own, narrow), _of(own, wide), strict=True)
                ),
            }
        )
    return found


def order(rows: Sequence[Row], workload: str, ratio: float) -> list[Row]:
    """Return the methods at one computation, the fastest first."""
    chosen = [row for row in rows if row["workload"] == workload and row["ratio"] == ratio]
    return sorted(chosen, key=lambda row: row["iteration_s"])


def jitter_answers(rows: Sequence[Row]) -> list[Row]:
    """Return, for every number of ranks and spread, the width that is enough, and the most that width 3 gains."""
    found = []
    for (world_size, cv), own in grouped(rows, "world_size", "cv").items():
        answer: Row = {"world_size": world_size, "cv": cv}
        for source in ("formula", "simulated"):
            third = gains(own, source)
            answer[f"enough_{source}"] = max(_enough(own, ratio, source) for ratio in third)
            answer[f"gain_{source}"] = max(third.values())
            answer[f"gain_ratio_{source}"] = max(third, key=third.__getitem__)
        found.append(answer)
    return found


def gains(rows: Iterable[Row], source: str) -> dict[float, float]:
    """Return, by ratio, the share by which width 2 takes longer than width 3."""
    periods: dict[float, dict[int, float]] = {}
    for row in rows:
        periods.setdefault(row["ratio"], {})[row["width"]] = row[source]
    return {ratio: widths[2] / widths[3] - 1 for ratio, widths in periods.items()}


def _enough(rows: Iterable[Row], ratio: float, source: str) -> int:
    periods: dict[int, float] = {row["width"]: row[source] for row in rows if row["ratio"] == ratio}
    return min(width for width, period in periods.items() if period <= min(periods.values()) * (1 + SATURATED))


def _of(rows: Iterable[Row], method: str) -> list[Row]:
    return [row for row in rows if row["method"] == method]


def _last(rows: Sequence[Row], column: str) -> float | None:
    """Return the largest ratio at which the claim is reached; None if there is none."""
    return max((row["ratio"] for row in rows if row[column] >= CLAIM), default=None)


# --- Pictures ---------------------------------------------------------------------------------------------------------


def plot(rows: list[Row], axes: Axes) -> Axes:
    """Plot each method's speed-up over ps-sync against the computation, for one network."""
    for method, (colour, line) in DRAWN.items():
        own = _of(rows, method)
        axes.plot(
            [1e3 * row["compute_s"] for row in own],
            [row["speed_up"] for row in own],
            color=colour,
            linestyle=line,
            label=method,
        )
    axes.axhline(CLAIM, color="black", linewidth=1, linestyle="-.", label=f"{CLAIM}, the abstract's")
    axes.set(xscale="log", title=rows[0]["workload"])
    axes.set(xlabel="computation of an iteration, ms", ylabel="times as fast as ps-sync")
    return axes


def plot_widths(rows: list[Row], axes: Axes) -> Axes:
    """Plot the time of an iteration against the width, by spread, where a collective takes as long as computation."""
    for cv, colour in zip(CVS, style.COLOURS, strict=False):
        own = [row for row in rows if row["cv"] == cv and row["ratio"] == 1 and row["world_size"] == NODES]
        widths = [row["width"] for row in own]
        axes.plot(widths, [row["formula"] for row in own], color=colour, label=f"cv {cv:.0%}")
        axes.plot(widths, [row["simulated"] for row in own], "o", color=colour, fillstyle="none", label="_")
    axes.set(title=f"{NODES} ranks, all-reduce as long as computation (o: simulated)", ylim=(0.9, None))
    axes.set(xlabel="width", ylabel="iteration over mean computation")
    axes.legend()
    return axes


def plot_third(rows: list[Row], axes: Axes) -> Axes:
    """Plot the gain of width 3 over width 2 against the ratio of collective and computation, by spread."""
    for cv, colour in zip(CVS, style.COLOURS, strict=False):
        own = [row for row in rows if row["cv"] == cv and row["world_size"] == NODES]
        for source, mark in (("formula", "-"), ("simulated", "o")):
            third = gains(own, source)
            axes.plot(
                list(third),
                [100 * gain for gain in third.values()],
                mark,
                color=colour,
                fillstyle="none",
                label=f"cv {cv:.0%}" if source == "formula" else "_",
            )
    axes.set(xscale="log", title=f"{NODES} ranks, width 3 instead of 2 (o: simulated)")
    axes.set(xlabel="all-reduce over mean computation", ylabel="gain, %")
    axes.set(xticks=(0.25, 0.5, 1, 2, 4), xticklabels=("1/4", "1/2", "1", "2", "4"))
    axes.minorticks_off()
    axes.legend(loc="upper right")
    return axes


def draw(name: str, rows: list[Row], jitter: list[Row], folder: Path) -> Path:
    """Write the figure."""
    panels = [functools.partial(plot, own) for own in grouped(rows, "workload").values()]

    def first(axes: Axes) -> Axes:
        panels[0](axes).legend(fontsize="small")
        return axes

    third = [functools.partial(panel, jitter) for panel in (plot_widths, plot_third)]
    return save_panels(name, [first, *panels[1:], *third], size=(15, 9), rows=2, folder=folder)


def publish(rows: list[Row], jitter: list[Row], folder: Path) -> None:
    """Save both tables and the figure, and print the answers."""
    save("paper_question", rows, folder=folder, extra={"answers": answers(rows)})
    save("paper_question_jitter", jitter, folder=folder, extra={"answers": jitter_answers(jitter)})
    draw("paper_question", rows, jitter, folder)
    _show(rows, jitter)


def _show(rows: list[Row], jitter: list[Row]) -> None:
    command.show(
        f"{NODES} nodes, {NETWORK}: how many times as fast as ps-sync at most, and up to which computation (in rings)",
        [
            {
                "network": one["workload"],
                "fp32 ring": f"{1e3 * one['ring_s']:.1f} ms",
                "width 2": f"{one['most_plain']:.1f}",
                "apart": f"{one['most_plain_over_server_apart']:.1f}",
                "with Q": f"{one['most']:.1f}",
                "Q, apart": f"{one['most_over_server_apart']:.1f}",
                f"Q: {CLAIM} up to": _times(one["claim_to_ratio"]),
                "Q, apart: up to": _times(one["claim_to_ratio_server_apart"]),
                "width 3": f"+{one['widest_gain']:.1%}",
            }
            for one in answers(rows)
        ],
    )
    for ratio in (0.25, 1.0, 4.0):
        ordered = {one["workload"]: order(rows, one["workload"], ratio) for one in answers(rows)}
        command.show(
            f"Computation {ratio:g} times the fp32 ring: times as fast as ps-sync",
            [
                {
                    workload: f"{places[place]['method']} {places[place]['speed_up']:.2f}"
                    for workload, places in ordered.items()
                }
                for place in range(len(METHODS))
            ],
        )
    command.show(
        "Jitter: the width that is enough, and what width 3 gains over 2 at most (at all-reduce over computation)",
        [
            {
                "ranks": f"{one['world_size']}",
                "cv": f"{one['cv']:.0%}",
                "enough": f"{one['enough_formula']}",
                "simulated": f"{one['enough_simulated']}",
                "gain": f"{one['gain_formula']:.1%} (at {one['gain_ratio_formula']:.2f})",
                "gain, simulated": f"{one['gain_simulated']:.1%} (at {one['gain_ratio_simulated']:.2f})",
            }
            for one in jitter_answers(jitter)
        ],
    )


def _times(ratio: float | None) -> str:
    return "never" if ratio is None else f"{ratio:.2f}"


def parse(words: Sequence[str], by_torchrun: bool) -> Namespace:
    """Return the options; raises ``UserInputError``."""
    arguments = command.parse(command.parser("paper_question", __doc__), words)
    command.check_alone("paper_question", by_torchrun, "it needs one process")
    return arguments


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """The command."""
    arguments = ranks.raise_together("options", lambda: parse(words, ranks.by_torchrun))
    quick = arguments.quick
    rows = compute(WORKLOADS, (0.25, 1.0, 4.0) if quick else RATIOS)
    jitter = compute_jitter((0.5, 1.0) if quick else JITTER_RATIOS, QUICK_ITERATIONS if quick else ITERATIONS, console)
    publish(rows, jitter, arguments.output)


if __name__ == "__main__":
    command.run(main)
