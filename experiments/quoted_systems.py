"""Quotes of the table of all systems (``experiments.systems``), and of the headlines of the systems' authors."""

from __future__ import annotations

from functools import partial

from experiments.command import text_of
from experiments.first_screen import RATES
from experiments.markdown import table
from experiments.results import RESULTS, Row, load
from experiments.style import TITLES
from experiments.systems.headlines import ours_in_words
from experiments.systems.pictures import SPEEDUPS
from experiments.systems.table import REFERENCE
from experiments.systems.workloads import CORES, PLACES

WORKLOADS = {"mlp": "MLP", "alexnet": "AlexNet"}
"""Names of workloads in a heading, where they differ from those of the table."""
OURS = ("pipesgd", "pipesgd-int8", "pipesgd-int4")
EMPTY = ("not_measured", "failures", "not_reached")
"""Columns with the reasons for empty cells."""

Places = dict[tuple[str, str], Row]
"""Rows of one workload and system, by the rate of the links and what computes; in the order of the table."""


def the_table() -> dict[str, dict[str, Places]]:
    """Return the rows of the table by workload and system."""
    found: dict[str, dict[str, Places]] = {}
    for row in load(RESULTS / SPEEDUPS.file):
        of_system = found.setdefault(row["workload"], {}).setdefault(row["system"], {})
        of_system[row["rate"], row["computes"]] = row
    return found


def all_systems() -> str:
    """Return a table for every workload, and the reasons for empty cells."""
    return "\n\n".join(systems_of(workload) for workload in the_table())


def systems_of(workload: str, *names: str) -> str:
    """Return a table of the systems with these ``names``, or of all, and the reasons for its empty cells."""
    known = the_table()[workload]
    chosen = {name: known[name] for name in names or known}
    places = list(next(iter(chosen.values())))
    lines: list[list[str]] = []
    why: dict[str, list[str]] = {}
    for name, of_place in chosen.items():
        first = of_place[places[0]]
        timed = next((row for row in of_place.values() if row["iteration_s"] is not None), first)
        text, of_times = (partial(text_of, row, missing="") for row in (first, timed))
        accuracy = text("accuracy_mean", ".2f", 100)
        if accuracy and first["accuracy_difference"] is not None:
            accuracy += f" ({100 * first['accuracy_difference']:+.2f})"
        lines.append(
            [
                name,
                *(_time(of_place[place]) for place in places),
                of_times("hidden_share", ".0%"),
                of_times("wire_bytes", ".2f", 1e-6),
                of_times("memory_bytes", ".0f", 1e-6),
                accuracy,
                text("time_to_target_s", ".1f"),
            ]
        )
        reasons = [row[column] for row in of_place.values() for column in EMPTY if row[column] is not None]
        if first["share_of_lr"] not in (None, 1):
            reasons.append(f"trained at {first['share_of_lr']:g} of the learning rate")
        for reason in dict.fromkeys(reasons):
            why.setdefault(reason, []).append(f"`{name}`")
    heads = [
        WORKLOADS.get(workload, workload),
        *(f"ms at {RATES[rate]}{', cores alone' if computes == CORES else ''}" for rate, computes in places),
        *("communication hidden", "MB sent by all", "MB of memory a rank", "accuracy, % (points above d-sync)"),
        f"s to {_target(chosen)}, calculated",
    ]
    return "\n".join([table(heads, lines), "", *(f"- {', '.join(own)}: {reason}" for reason, own in why.items())])


def _time(row: Row) -> str:
    """Return the time of an iteration, and how many times as fast as DDP that is, with its interval."""
    if row["iteration_s"] is None:
        return ""
    return f"{1e3 * row['iteration_s']:.0f}" + ("" if row["times_as_fast_as_ddp"] is None else f", {_times(row)}")


def _times(row: Row, over: str = "ddp") -> str:
    middle, low, high = (row[f"times_as_fast_as_{over}{end}"] for end in ("", "_low", "_high"))
    return f"{middle:.1f}x ({low:.1f} to {high:.1f})"


def _target(of_systems: dict[str, Places]) -> str:
    row = next(iter(next(iter(of_systems.values())).values()))
    return "the target" if row["target_accuracy"] is None else f"{100 * row['target_accuracy']:.2f} %"


def speed_up() -> str:
    """Return the README's sentence of how much faster an iteration is than DDP's, and of the accuracy."""
    found = the_table()
    mlp, hidden = found["mlp"], found["convnet"]["pipesgd-int4"][PLACES[1]]
    slow, fast, cores = (mlp["pipesgd-int4"][place] for place in PLACES)
    plain = [mlp["pipesgd"][place]["times_as_fast_as_ddp"] for place in PLACES[:2]]
    milliseconds = slow["computes"].removesuffix("ms")
    return (
        f"**At 200 Mbit/s, an iteration with int4 is {_times(slow)} as fast as that of DDP on gloo, and "
        f"{_times(slow, 'fp16')} as fast as with DDP's fp16 hook; at 1 Gbit/s, {_times(fast)} and "
        f"{_times(fast, 'fp16')}.** MLP 784-1000-1000-10 on four *emulated* nodes, each with an emulated accelerator "
        f"({milliseconds} ms an iteration); where one machine's two cores compute for all, {_times(cores)} and "
        f"{_times(cores, 'fp16')} at 200 Mbit/s. Medians of {slow['rounds']} interleaved rounds, with 95 % intervals. "
        f"Without a codec, width 2 is {plain[0]:.1f}x and {plain[1]:.1f}x as fast as DDP on accelerators. Where DDP "
        f"hides nearly all communication, as that of a convnet at 1 Gbit/s, int4 is {_times(hidden)} as fast. Accuracy "
        f"of the MLP after the same samples: {_points(slow)} points from synchronous training ({slow['seeds']} seeds)."
    )


def _points(row: Row) -> str:
    """Return by how many points a system ends above synchronous training."""
    rate = "" if row["share_of_lr"] == 1 else f" (at {row['share_of_lr']:g} of the learning rate)"
    return text_of(row, "accuracy_difference", "+.2f", 100, missing="diverged") + rate


def times_to_target() -> str:
    """Return calculated seconds to the target accuracy on every workload, and the accuracy at the end."""
    shown = (REFERENCE, "ddp", "ddp-fp16", *OURS)
    lines = [[TITLES[name]] for name in shown]
    heads = [""]
    for workload, of_systems in the_table().items():
        heads += [f"{WORKLOADS.get(workload, workload)}: s to {_target(of_systems)}", "accuracy, %"]
        for name, line in zip(shown, lines, strict=True):
            row = next(iter(of_systems[name].values()))
            line += [row["not_reached"] or f"{row['time_to_target_s']:.1f}", text_of(row, "accuracy_mean", ".2f", 100)]
    return table(heads, lines)


def accuracy_next_to_synchronous() -> str:
    """Return a sentence of how far systems with late gradients end from synchronous training."""
    said = []
    for workload, of_systems in the_table().items():
        first = {name: next(iter(places.values())) for name, places in of_systems.items()}
        ours = ", ".join(_points(first[name]) for name in OURS)
        late = _points(first["pipe-sgd"])
        said.append(f"{WORKLOADS.get(workload, workload)} {ours}, and without a prediction {late}")
    return (
        "In the short trainings of [the table of all systems](systems.md#the-table), the accuracy of width 2 without a "
        "codec, with int8 and with int4 differs from that of synchronous training by these points: "
        f"{'; '.join(said)}."
    )


def next_to_servers() -> str:
    """Return a sentence of the time and the accuracy with an asynchronous server, next to ours."""
    rows = {name: next(iter(places.values())) for name, places in the_table()["mlp"].items()}
    server, ours = rows["ps-async"], rows["pipesgd-int4"]
    return (
        "On [four emulated nodes at 200 Mbit/s](systems.md#the-table), an iteration takes "
        f"{1e3 * server['slowest_rank_s']:.0f} ms on the slowest rank with such a server, and "
        f"{1e3 * ours['slowest_rank_s']:.0f} ms with pipesgd and int4; the accuracy of the MLP differs from "
        f"that of synchronous training by {_points(server)} and by {_points(ours)} points."
    )


def headlines() -> str:
    """Return the speed-ups that authors of other systems reported, next to the timing model's."""
    rows = [row for row in load(RESULTS / "systems_headlines.csv") if row["cell"] is None]
    lines = [
        [
            row["headline"],
            row["claim"],
            f"{row['network']}; {row['model']}",
            f"`{row['system']}`",
            ours_in_words(row),
            row["substituted"],
        ]
        for row in rows
    ]
    return table(["system", "reported", "network and model here", "system here", "times as fast", "substituted"], lines)


SYSTEMS = (
    all_systems,
    systems_of,
    speed_up,
    times_to_target,
    accuracy_next_to_synchronous,
    next_to_servers,
    headlines,
)
