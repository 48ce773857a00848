"""Quotes of the table of all systems (``experiments.systems``), and of the headlines of the systems' authors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from experiments.command import text_of
from experiments.first_screen import RATES
from experiments.markdown import table
from experiments.results import RESULTS, Row, load
from experiments.style import TITLES
from experiments.systems import workloads as trainings
from experiments.systems.catalogue import HOGWILD, systems
from experiments.systems.headlines import ours_in_words
from experiments.systems.pictures import SPEEDUPS
from experiments.systems.table import REFERENCE
from experiments.systems.workloads import CORES, PLACES

TITLES_OF_WORKLOADS = {"mlp": "MLP", "alexnet": "AlexNet"}
"""Names of workloads in a text, where they differ from those of the table."""
OURS = ("pipesgd", "pipesgd-int8", "pipesgd-int4")
REORDERED = ("theano-ar", "theano-asa", "pmls-wait-free", "ddp", "ps-sync")
"""Systems that are synchronous training, but for the order in which gradients are added up."""
DDP = "times_as_fast_as_ddp"
TWO_DIGITS_BELOW = 1.5
"""Ratio below which one digit would leave it open what is faster."""
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


def at_first_place() -> dict[str, dict[str, Row]]:
    """Return the row of every workload and system at the first place of the table."""
    return {
        workload: {name: next(iter(of_place.values())) for name, of_place in of_systems.items()}
        for workload, of_systems in the_table().items()
    }


def _title(workload: str) -> str:
    return TITLES_OF_WORKLOADS.get(workload, workload)


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
            once = "; 1 seed" if first["seeds"] == 1 else ""
            accuracy += f" ({100 * first['accuracy_difference']:+.2f}{once})"
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
        _title(workload),
        *(f"ms at {RATES[rate]}{', cores alone' if computes == CORES else ''}" for rate, computes in places),
        *("communication hidden", "MB an iteration, all ranks", "MB of memory a rank"),
        "accuracy, % (points above d-sync)",
        f"s to {_target(chosen)}, calculated",
    ]
    return "\n".join([table(heads, lines), "", *(f"- {', '.join(own)}: {reason}" for reason, own in why.items())])


def _time(row: Row) -> str:
    """Return the time of an iteration, and how many times as fast as DDP that is, with its interval."""
    if row["iteration_s"] is None:
        return ""
    without = ", no links" if row["system"] == HOGWILD else ""
    return f"{1e3 * row['iteration_s']:.0f}" + (without if row[DDP] is None else f", {_times(row)}")


def _times(row: Row, over: str = "ddp") -> str:
    middle, low, high = (row[f"times_as_fast_as_{over}{end}"] for end in ("", "_low", "_high"))
    digits = 2 if middle < TWO_DIGITS_BELOW else 1
    return f"{middle:.{digits}f}x ({low:.{digits}f} to {high:.{digits}f})"


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
    [in_time] = [
        row
        for row in load(RESULTS / "bench_accelerators.csv")
        if row["contender"] == "width 1, int4, buckets"
        and f"accelerators of {slow['computes']}, 4 nodes at {RATES[slow['rate']]}" in row["title"]
    ]
    accuracies = (f"{_title(workload)} {_points(rows['pipesgd-int4'])}" for workload, rows in at_first_place().items())
    return (
        f"**At 200 Mbit/s, an iteration with int4 is {_times(slow)} as fast as that of DDP on gloo, and "
        f"{_times(slow, 'fp16')} as fast as with DDP's fp16 hook; at 1 Gbit/s, {_times(fast)} and "
        f"{_times(fast, 'fp16')}.** MLP 784-1000-1000-10 on four *emulated* nodes, each with an emulated accelerator "
        f"({milliseconds} ms an iteration); where one machine's two cores compute for all, {_times(cores)} and "
        f"{_times(cores, 'fp16')} at 200 Mbit/s. Medians of {slow['rounds']} interleaved rounds of one job, with 95 % "
        f"intervals. Most of this is the codec: without one, width 2 is {plain[0]:.1f}x and {plain[1]:.1f}x as fast as "
        "DDP on accelerators, and int4 at width 1 with buckets, where no gradient is late, was "
        f"{in_time['times_as_fast_as_ddp']:.1f}x as fast at 200 Mbit/s in another job. Where DDP hides nearly all "
        f"communication, as that of a convnet at 1 Gbit/s, int4 is {_times(hidden)} as fast. Accuracy with int4 after "
        f"the same samples of short trainings, in points from synchronous training: {', '.join(accuracies)} (means of "
        f"{slow['seeds']} seeds)."
    )


def _points(row: Row) -> str:
    """Return by how many points a system ends above synchronous training."""
    rate = "" if row["share_of_lr"] == 1 else f" (at {row['share_of_lr']:g} of the learning rate)"
    return text_of(row, "accuracy_difference", "+.2f", 100, missing="diverged") + rate


def times_to_target() -> str:
    """Return calculated seconds, and iterations, to the target accuracy of every workload, and the final accuracy."""
    shown = (REFERENCE, "ddp", "ddp-fp16", *OURS)
    lines = [[TITLES[name]] for name in shown]
    heads = [""]
    for workload, of_systems in the_table().items():
        heads += [f"{_title(workload)}: s (iterations) to {_target(of_systems)}", "accuracy, %"]
        for name, line in zip(shown, lines, strict=True):
            row = next(iter(of_systems[name].values()))
            reached = row["not_reached"] or f"{row['time_to_target_s']:.1f} ({row['iterations_to_target']:.0f})"
            line += [reached, text_of(row, "accuracy_mean", ".2f", 100)]
    return table(heads, lines)


def accuracy_next_to_synchronous() -> str:
    """Return a sentence of how far systems with late gradients end from synchronous training."""
    said = []
    for workload, rows in at_first_place().items():
        ours = ", ".join(_points(rows[name]) for name in OURS)
        late = _points(rows["pipe-sgd"])
        said.append(f"{_title(workload)} {ours}, and without a prediction {late}")
    return (
        "In the short trainings of [the table of all systems](systems.md#the-table), the accuracy of width 2 without a "
        "codec, with int8 and with int4 differs from that of synchronous training by these points: "
        f"{'; '.join(said)}. Differences as small as those of gradients that are only added up in another order say "
        f"nothing: these are {_points_of(*REORDERED)}, with one seed."
    )


def _points_of(*names: str) -> str:
    """Return by how many points these systems end above synchronous training on each workload, from least to most."""
    said = []
    for workload, rows in at_first_place().items():
        differences = [rows[name]["accuracy_difference"] for name in names]
        known = [100 * one for one in differences if one is not None]
        span = [_span(known, "+.2f")] if known else []
        said.append(f"{' or '.join(span + ['diverged'] * (None in differences))} ({_title(workload)})")
    return ", ".join(said)


def next_to_servers() -> str:
    """Return sentences of the time and the accuracy with asynchronous servers, next to ours."""
    rows = at_first_place()["mlp"]
    milliseconds = {name: text_of(row, "iteration_s", ".0f", 1e3) + " ms" for name, row in rows.items()}
    server = rows["ps-async"]
    return (
        "On [four emulated nodes at 200 Mbit/s](systems.md#the-table), an iteration of the MLP takes "
        f"{milliseconds['ps-async']} with one such server ({1e3 * server['fastest_rank_s']:.0f} ms on the fastest rank "
        f"and {1e3 * server['slowest_rank_s']:.0f} ms on the slowest), {milliseconds['pmls-ssp']} with four and a "
        f"bound on the staleness, {milliseconds['pipesgd']} with pipesgd, and {milliseconds['pipesgd-int4']} with its "
        "int4; these servers have no codec. Trained without emulated links, so with another staleness, the accuracy "
        f"differs from that of synchronous training by these points: {_points(server)} with one server, "
        f"{_points(rows['pmls-ssp'])} with four, {_points(rows['pipesgd'])} with pipesgd, and "
        f"{_points(rows['pipesgd-int4'])} with its int4."
    )


def learnt() -> str:
    """Return what the table says and the systems' authors did not: a list of ten sentences."""
    slow, fast, cores = PLACES
    found = the_table()

    def of(system: str, column: str, place: tuple[str, str] = slow) -> list[float]:
        """Return the figures of a column on all workloads."""
        return [of_systems[system][place][column] for of_systems in found.values()]

    def over(system: str, other: str, place: tuple[str, str] = slow, column: str = "iteration_s") -> list[float]:
        """Return the figures of a column on all workloads, as multiples of those of another system."""
        return [one / two for one, two in zip(of(system, column, place), of(other, column, place), strict=True)]

    hidden, soonest = max((of_systems["ddp"][fast]["hidden_share"], name) for name, of_systems in found.items())
    best = max(of_place[fast][DDP] or 0.0 for name, of_place in found[soonest].items() if name != "local")
    server = found["mlp"]["ps-async"][slow]
    int8 = (of(name, "iteration_s", fast) for name in ("pipesgd-int8", "pipe-sgd-q"))
    predicted = [1e3 * (one - two) for one, two in zip(*int8, strict=True)]
    factors = over("pmls-structure-aware", "ddp", cores, "wire_bytes")
    (_, fewest), (_, most) = (end(zip(factors, found, strict=True)) for end in (min, max))
    window = systems()["diloco"].options["local-steps"]
    windows = [trainings.WORKLOADS[name].iterations / window for name in found]
    sentences = (
        f"With one synchronous server an iteration takes {_span([1 / one for one in of('ps-sync', DDP)], '.1f')} times "
        "as long as with DDP at 200 Mbit/s, so a speed-up over such a server is as much larger than one over what "
        "people use today.",
        f"Width 2 without a codec is {_span(of('pipesgd', DDP), '.1f')} times as fast as DDP there, and with int4 "
        f"{_span(of('pipesgd-int4', DDP), '.1f')} times: overlap saves no more than the shorter of computation and "
        "communication, so the slower the links, the more of the gain is the codec's.",
        "Without a prediction and without warm-up, at the better of two learning rates, Pipe-SGD ends at "
        f"{_points_of('pipe-sgd')} points from synchronous training, and with T or Q at "
        f"{_points_of('pipe-sgd-t', 'pipe-sgd-q')}; with a prediction, at the learning rate of synchronous training, "
        f"and with int8 or int4 as well, at {_points_of(*OURS)}.",
        "A prediction is not free: where communication is hidden, at 1 Gbit/s, an iteration with int8 takes "
        f"{_span(predicted, '.0f')} ms longer with it, on hosts whose cores also move the bytes.",
        f"What DDP hides depends on where a model has its values: with the {_title(soonest)}, whose largest layer is "
        f"complete early in the backward pass, it is {hidden:.0%} of the communication at 1 Gbit/s, and the fastest "
        f"system is {best:.1f} times as fast.",
        f"ASA takes {_span(over('theano-asa', 'theano-ar'), '.2f')} times as long as AR here. Its authors gained by "
        "not copying through host memory what is summed, and here processors sum in both.",
        "AWAGD averages weights and the optimizer's state, and SUBGD only updates: an iteration takes "
        f"{_span(over('theano-awagd', 'theano-subgd'), '.1f')} times as long at 200 Mbit/s, with SGD for the same "
        "result.",
        f"With an asynchronous server the MLP's iteration takes {1e3 * server['fastest_rank_s']:.0f} ms on the fastest "
        f"rank, which is on the server's node, and {1e3 * server['slowest_rank_s']:.0f} ms on the slowest: one slow "
        "link for all makes ranks unequal that are alike.",
        f"Structure-aware communication sends {_span(factors, '.0%')} of DDP's bytes, fewest of the {_title(fewest)}'s "
        f"and most of the {_title(most)}'s, and is {_span(of('pmls-structure-aware', DDP, cores), '.1f')} times as "
        "fast as DDP where two cores compute for four nodes at 200 Mbit/s, with no gradient late and none rounded.",
        "EASGD and DiLoCo send less often, and at the better of two learning rates they end at "
        f"{_points_of('theano-easgd', 'theano-easgd-async', 'diloco')} points from synchronous training. This does not "
        f"rank DiLoCo, which is meant for hundreds of windows: here there were {_span(windows, '.0f')}.",
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
