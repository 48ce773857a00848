"""Quotes of the table of all systems (``experiments.systems``), and of the headlines of the systems' authors."""

from __future__ import annotations

from collections.abc import Sequence
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
DDP = "times_as_fast_as_ddp"
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
    return f"{1e3 * row['iteration_s']:.0f}" + ("" if row[DDP] is None else f", {_times(row)}")


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
    plain = [mlp["pipesgd"][place][DDP] for place in PLACES[:2]]
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


def learnt() -> str:
    """Return what the table says and the systems' authors did not: a list of ten sentences."""
    slow, fast, cores = PLACES
    found = the_table()

    def of(system: str, column: str, place: tuple[str, str] = slow) -> list[float]:
        """Return the figures of a column on all workloads, of which some may be missing."""
        rows = (of_systems[system][place] for of_systems in found.values())
        return [row[column] for row in rows if row[column] is not None]

    def over(system: str, other: str, place: tuple[str, str] = slow, column: str = "iteration_s") -> list[float]:
        """Return the figures of a column on all workloads, as multiples of those of another system."""
        return [one / two for one, two in zip(of(system, column, place), of(other, column, place), strict=True)]

    def points(*systems: str) -> str:
        return _span([100 * one for name in systems for one in of(name, "accuracy_difference")], "+.2f")

    hidden, soonest = max((of_systems["ddp"][fast]["hidden_share"], name) for name, of_systems in found.items())
    best = max(of_place[fast][DDP] or 0.0 for name, of_place in found[soonest].items() if name != "local")
    server = found["mlp"]["ps-async"][slow]
    int8 = (of(name, "iteration_s", fast) for name in ("pipesgd-int8", "pipe-sgd-q"))
    predicted = [1e3 * (one - two) for one, two in zip(*int8, strict=True)]
    factors = over("pmls-structure-aware", "ddp", cores, "wire_bytes")
    sentences = (
        f"With one synchronous server an iteration takes {_span([1 / one for one in of('ps-sync', DDP)], '.1f')} times "
        "as long as with DDP at 200 Mbit/s, so a speed-up over such a server, as the authors of Pipe-SGD report it, is "
        "as much larger than one over what people use today.",
        f"Width 2 without a codec is {_span(of('pipesgd', DDP), '.1f')} times as fast as DDP there, and with int4 "
        f"{_span(of('pipesgd-int4', DDP), '.1f')} times: overlap saves no more than the shorter of computation and "
        "communication, so on slow links most of the gain is the codec's.",
        "Without a prediction, at the better of two learning rates, Pipe-SGD ends at "
        f"{points('pipe-sgd', 'pipe-sgd-t', 'pipe-sgd-q')} points from synchronous training; with it, at the learning "
        f"rate of synchronous training, at {points(*OURS)}.",
        "A prediction is not free: where communication is hidden, at 1 Gbit/s, an iteration with int8 takes "
        f"{_span(predicted, '.0f')} ms longer with it, on hosts whose cores also move the bytes.",
        f"What DDP hides depends on where a model has its values: with the {WORKLOADS.get(soonest, soonest)}, whose "
        f"largest layer is complete early in the backward pass, it is {hidden:.0%} of the communication at 1 Gbit/s, "
        f"and the fastest system is {best:.1f} times as fast.",
        f"ASA takes {_span(over('theano-asa', 'theano-ar'), '.2f')} times as long as AR here, with sums on processors "
        "in both, so what its authors gained was probably due to sums on GPUs.",
        "AWAGD averages weights and the optimizer's state, and SUBGD only updates, with SGD for the same result: "
        f"an iteration takes {_span(over('theano-awagd', 'theano-subgd'), '.1f')} times as long at 200 Mbit/s.",
        f"With an asynchronous server the MLP's iteration takes {1e3 * server['fastest_rank_s']:.0f} ms on the fastest "
        f"rank, which is on the server's node, and {1e3 * server['slowest_rank_s']:.0f} ms on the slowest: one slow "
        "link for all makes ranks unequal that are alike.",
        f"Factors and rows (structure-aware communication) send {_span(factors, '.0%')} of DDP's bytes in these small "
        f"batches and are {_span(of('pmls-structure-aware', DDP, cores), '.1f')} times as fast as it on two cores, "
        "with no gradient late and none rounded.",
        "EASGD and DiLoCo gain by sending less often, and at the better of two learning rates they end at "
        f"{points('theano-easgd', 'theano-easgd-async', 'diloco')} points from synchronous training.",
    )
    return "\n".join(f"{number}. {one}" for number, one in enumerate(sentences, start=1))


def _span(values: Sequence[float], form: str) -> str:
    """Return the lowest and the highest of these values in a text, or the one that both are in this form."""
    ends = [format(end, form) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


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
    learnt,
    headlines,
)
