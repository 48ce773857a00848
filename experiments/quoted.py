"""Quotes for README and documentation: tables and sentences from result files, equations from the code.

Each function returns Markdown; its arguments are the words after its name in the page (see quotes.py).
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median

from experiments import accuracies as accuracies_of
from experiments import fig03_convergence, figures, first_screen
from experiments.markdown import table
from experiments.quoted_loops import LOOPS
from experiments.quoted_reliability import RELIABILITY
from experiments.quoted_staleness import (
    accuracies,
    late_layers,
    local_steps,
    local_steps_hidden,
    local_steps_times,
    short_accuracies,
)
from experiments.results import RESULTS, Row, command_of, grouped, load
from experiments.style import TITLES
from experiments.systems.headlines import ours_in_words
from experiments.validate_timing_model import accuracy
from experiments.validation_runs import EXTRAPOLATED, HELD_OUT, SHARED

RATES = {"100mbit": "100 Mbit/s", "200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
SLOW = ("100mbit", "200mbit")
PROGRESS = re.compile(r"iteration \d+/|calibrating: |.* s left$")
"""Pattern of a line that shows progress."""
PAPERS = {
    "ps-sync": "parameter server",
    "D-Sync": "synchronous (width 1)",
    "pipelined": "pipelined, no prediction",
    "ours": "**pipesgd**",
}
"""Methods of the paper's figures, by the first word of their name, and what users call them."""
RACES = {"mlp": "MLP", "small-convnet": "convnet"}
"""Workloads whose time to an accuracy was measured, and their names in a heading."""


def made_by(*names: str) -> str:
    """Return the command, commit and machine that made each of these results, from its manifest."""
    lines = []
    for name in names:
        manifest = figures.manifest(name)
        machine, day = manifest["machine"], manifest["started"][:10]
        commits = manifest.get("runs_made_with") or manifest.get("made_with") or []
        lines.append(
            f"- `{name}`: `{command_of(manifest)}`, at commit `{manifest['git']['commit'][:7]}`"
            f"{f' from runs at {len(commits)} commits' if len(commits) > 1 else ''}, {day}, "
            f"on {machine['cores']} cores ({machine['cpu']}){' and a GPU' if 'gpu' in machine else ''}"
        )
    return "\n".join(["Made by (results and manifests are in `experiments/results/`):", "", *lines])


def iteration_times() -> str:
    """Return the iteration times of all strategies, at three rates."""
    results = [comparison("mlp", rate) for rate in RATES]

    def cells(seconds: Iterable[float]) -> list[str]:
        return [f"{1e3 * one:.0f}" for one in seconds]

    shown = ("ps-sync", "ps-async", "D-Sync, ring", "ddp", "ddp fp16", "width 2, ring", "local")
    rows = [[titled(name), *cells(one[name]["iteration_median_s"] for one in results)] for name in shown]
    limits = cells(one["local"]["wire_limit_s"] for one in results)
    return table(["ms an iteration", *RATES.values()], [*rows, ["the wire's limit for an uncompressed ring", *limits]])


def codec_times() -> str:
    """Return the time that codecs gain, and their cost in accuracy."""
    rows, lost = coded(), {(row["model"], row["codec"]): row for row in load(RESULTS / "codec_accuracy.csv")}
    lines = []
    for codec in ("int8", "int4", "ternary"):
        row = rows[f"width 2, {codec}"]
        seconds = row["iteration_median_s"]
        times = [rows[name]["iteration_median_s"] / seconds for name in ("ddp", "ddp fp16")]
        points = [f"{lost[model, codec]['difference_to_fp32_points']:+.2f}" for model in ("mlp", "convnet")]
        milliseconds, megabytes = f"{1e3 * seconds:.0f}", f"{row['wire_bytes'] / 1e6:.2f}"
        cells = [milliseconds, megabytes, f"{times[0]:.1f}x", f"{times[1]:.1f}x", ", ".join(points)]
        lines.append([titled(f"width 2, {codec}"), *cells])
    heads = ["", "ms an iteration", "MB sent by a rank", "as fast as DDP", "as DDP, fp16 hook"]
    return table([*heads, "points of accuracy, MLP, convnet"], lines)


def times_to_accuracy() -> str:
    """Return seconds to a test accuracy on two workloads: the median over seeds, and the extremes."""
    heads: list[str] = [""]
    lines: dict[str, list[str]] = {}
    for workload, title in RACES.items():
        rows = load(RESULTS / f"time_to_accuracy_{workload}_4x200mbit.json")
        found = {middle["contender"]: middle for middle in accuracies_of.medians(rows)}
        of_ddp = {row["seed"]: row["seconds_to_target"] for row in rows if row["contender"] == "ddp"}
        heads += [f"{title}: s to {100 * rows[0]['target_accuracy']:g} %", "as fast as DDP", "final accuracy, %"]
        for name, middle in found.items():
            of_seeds = {row["seed"]: row["seconds_to_target"] for row in rows if row["contender"] == name}
            own = of_seeds.values()
            seconds = middle["seconds_to_target_median"]
            if seconds is None:
                times, faster = f"{middle['reached']} of {middle['seeds']} seeds", ""
            else:
                times = f"{seconds:.1f} ({min(own):.1f} to {max(own):.1f})"
                # Seeds are paired: all contenders see the same samples in a seed.
                ratios = [of_ddp[seed] / one for seed, one in of_seeds.items() if of_ddp[seed] is not None]
                shown = len(ratios) == len(of_seeds) and name != "ddp"
                faster = f"{median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f})" if shown else ""
            line = lines.setdefault(name, [titled(name)])
            final = middle["final_accuracy_median"]
            line += [times, faster, "" if final is None else f"{100 * final:.2f}"]
    return table(heads, lines.values())


def seeds_that_arrived() -> str:
    """Return how many runs of ``times_to_accuracy`` reached their target, in a sentence."""
    rows = [row for workload in RACES for row in load(RESULTS / f"time_to_accuracy_{workload}_4x200mbit.json")]
    arrived = sum(row["seconds_to_target"] is not None for row in rows)
    seeds = len({row["seed"] for row in rows})
    evaluations = min(len(row["seconds_and_accuracy"]) for row in rows)
    return (
        f"{arrived} of {len(rows)} runs reached the target. Values are medians of {seeds} seeds, with the extremes in "
        f"brackets. Each run is evaluated at least {evaluations} times, with the clock stopped, and the time at which "
        "it crosses the target is interpolated."
    )


def training_times() -> str:
    """Return seconds of training, the same iterations for all, with the accuracy at their end: one seed."""
    heads: list[str] = [""]
    lines: dict[str, list[str]] = {}
    for workload, title in RACES.items():
        name = f"accuracy_{workload}_4x200mbit"
        rows, iterations = load(RESULTS / f"{name}.json"), figures.manifest(name)["iterations"]
        heads += [f"{title}: s of training ({iterations} iterations)", "final accuracy, %"]
        for row in rows:
            line = lines.setdefault(row["contender"], [titled(row["contender"])])
            line += [f"{row['final_seconds']:.1f}", f"{100 * row['final_accuracy']:.2f}"]
    return table(heads, lines.values())


def speed_up() -> str:
    """Return the README's sentence of how much faster an iteration is than DDP's, at two rates of the links."""
    found = {(row["panel"], row["contender"]): row for row in load(RESULTS / first_screen.FIGURE.file)}

    def times(rate: str) -> tuple[str, str, str]:
        ours, fp16 = (found[f"links of {rate}", name] for name in ("width 2, int4", "ddp fp16"))
        over_fp16 = fp16["iteration_s"] / ours["iteration_s"]
        ends = (f"{ours[f'times_as_fast_{end}']:.1f}" for end in ("low", "high"))
        return f"{ours['times_as_fast_as_ddp']:.1f}x", f"{over_fp16:.1f}x", " to ".join(ends)

    assert {row["rounds"] for row in found.values()} == {3}, "the interval of three rounds is their range"
    (slow, slow_fp16, slow_range), (fast, fast_fp16, fast_range) = times("200 Mbit/s"), times("1 Gbit/s")
    without = [
        found[f"links of {rate}", "width 2, ring"]["times_as_fast_as_ddp"] for rate in ("200 Mbit/s", "1 Gbit/s")
    ]
    return (
        f"**At 200 Mbit/s, an iteration with int4 is {slow} as fast as that of DDP on gloo ({slow_fp16} with DDP's "
        f"fp16 hook); at 1 Gbit/s, where the two cores are the limit, {fast} ({fast_fp16}).** MLP 784-1000-1000-10, "
        "512 samples a rank, on four *emulated* nodes: one machine whose two cores compute for all four. Medians of "
        f"three interleaved rounds, which range from {slow_range} and from {fast_range}. Most of this is the codec: "
        f"without one, width 2 is {without[0]:.1f}x as fast as DDP, and {without[1]:.1f}x."
    )


def convergence() -> str:
    """Return time and accuracy of the same number of iterations, with the paper's methods and ours."""
    of: dict[str, list[list[float]]] = {}
    for row in load(RESULTS / fig03_convergence.FIGURE.file):
        if row["panel"] == fig03_convergence.ACCURACY_BY_TIME:
            of.setdefault(row["method"], []).append(row["points"][-1])
    ends = {method: tuple(zip(*last, strict=True)) for method, last in of.items()}  # seconds and accuracies, by seed
    shortest = min(mean(seconds) for seconds, _ in ends.values())
    lines = []
    for method, (seconds, finals) in ends.items():
        reached = f"{100 * mean(finals):.2f} ({100 * min(finals):.2f} to {100 * max(finals):.2f})"
        name, _, codec = method.partition(", ")
        shown = PAPERS[name] + (f", {codec}" if codec else "")
        lines.append([shown, f"{mean(seconds):.0f}", f"{mean(seconds) / shortest:.1f}", reached])
    return table(["", "s of training", "times the shortest", "final accuracy, %"], lines)


def paper_question() -> str:
    """Return the model's answers for the paper's setting: speed-ups, and the gain of width 3."""

    def answers(name: str) -> list[Row]:
        return list(figures.manifest(name)["answers"])

    speed_ups = [
        [
            one["workload"],
            *(f"{one[column]:.1f}" for column in ("most_plain", "most_plain_over_server_apart", "most")),
            f"{one['most_over_server_apart']:.1f}",
            f"{one['claim_to_ratio']:.2f}",
            f"{one['claim_to_ratio_server_apart']:.2f}",
        ]
        for one in answers("paper_question")
    ]
    heads = ["", "width 2 at most", "server apart", "with int8", "server apart", "5.4 up to", "server apart"]
    jitter = [
        [f"{one['cv']:.0%}", *(f"{100 * one[f'gain_{source}']:.1f}" for source in ("simulated", "formula"))]
        for one in answers("paper_question_jitter")
        if one["world_size"] == 4
    ]
    gains = ["spread of computation", "width 3 gains at most, %", "by the formula"]
    return table(heads, speed_ups) + "\n\n" + table(gains, jitter)


def predictions() -> str:
    """Return how near the timing model came in each setting."""
    rows = load(RESULTS / "validate_timing_model.csv")
    lines = []
    for kind in (HELD_OUT, EXTRAPOLATED, SHARED):
        of_kind = [row for row in rows if row["kind"] == kind and row["counts"]]
        if not of_kind:
            continue
        names = dict.fromkeys(row["setting"] for row in of_kind)
        lines += [[name, *predicted([row for row in of_kind if row["setting"] == name])] for name in names]
        lines.append([f"**all {kind}**", *predicted(of_kind)])
        if kind == HELD_OUT:
            for name, words in (("the ring", "ring"), ("torch's own all-reduce", "native")):
                if own := [row for row in of_kind if row["words"].endswith(f"--all-reduce {words}")]:
                    lines.append([f"of these, {name}", *predicted(own)])
    heads = ["", "cells", "mean error, %", "95 % within, %", "two halves apart, %", "in the 90 % interval, %"]
    return table(heads, lines)


def chosen_by_auto() -> str:
    """Return what ``--width auto`` chose in each setting, how far its report was from the truth, and the regret."""
    rows = load(RESULTS / "validate_timing_model_auto.csv")
    lines = [
        [
            row["setting"],
            ", ".join(row["chosen"].split()[1::2]),
            f"{1e3 * row['measured_s']:.0f}",
            f"{100 * row['predicted_error']:+.1f}",
            f"{100 * row['reported_error']:+.1f}",
            f"{100 * row['regret']:+.1f}",
            f"{100 * row['regret_of_the_prediction']:+.1f}",
            f"{row['calibration_s'] + row['audition_s']:.1f}",
        ]
        for row in rows
    ]
    heads = ["", "chosen", "iteration, ms", "predicted, % off", "reported, % off", "regret, %"]
    return table([*heads, "regret of the prediction, %", "calibration and audition, s"], lines)


def third_width() -> str:
    """Return the predicted and the measured gain of width 3 over width 2 with the same codec and all-reduce."""
    cells = {(row["setting"], row["words"]): row for row in load(RESULTS / "validate_timing_model.csv")}
    pairs = [
        (cells[setting, words.replace("--width 3", "--width 2")], row)
        for (setting, words), row in cells.items()
        if row["kind"] == HELD_OUT and row["counts"] and "--width 3" in words
    ]
    gains = [
        tuple(100 * (narrow[name] / wide[name] - 1) for name in ("predicted_s", "measured_s")) for narrow, wide in pairs
    ]
    lines = []
    for title, least in (("all pairs", -100.0), ("predicted to gain more than 3 %", 3.0)):
        own = [pair for pair in gains if pair[0] > least]
        found = sum(measured > 3 for _, measured in own)
        means = [f"{mean(side):.1f}" for side in zip(*own, strict=True)] or ["-", "-"]
        lines.append([title, str(len(own)), *means, str(found)])
    heads = ["width 3 over width 2", "pairs", "predicted gain, %", "measured gain, %", "that gained more than 3 %"]
    return table(heads, lines)


def local_steps_predictions() -> str:
    """Return how near the timing model came with local steps, and with a rate limit, in each setting."""
    rows = load(RESULTS / "validate_local_steps.csv")
    lines = []
    for setting, own in grouped(rows, "setting").items():
        for name, in_windows in (("every iteration", False), ("local steps", True)):
            cells = [row for row in own if (row["local_steps"] > 1) == in_windows]
            errors = [100 * abs(row["error"]) for row in cells]
            inside = mean(row["low_s"] <= row["measured_s"] <= row["high_s"] for row in cells)
            figures_of = (f"{mean(errors):.1f}", f"{max(errors):.1f}", f"{100 * inside:.0f}")
            lines.append([f"{setting}: {name}", str(len(cells)), *figures_of])
    return table(["", "cells", "mean error, %", "largest error, %", "in the 90 % interval, %"], lines)


def predicted(rows: Sequence[Row]) -> list[str]:
    """Return the cells of one line of ``predictions``."""
    found = accuracy(rows)
    shares = [f"{100 * found[name]:.1f}" for name in ("mean_error", "p95_error", "repeatability")]
    return [str(len(rows)), *shares, f"{100 * found['coverage']:.0f}"]


def other_figures() -> str:
    """Return a table of all other figures, one line each."""
    server = comparison("mlp", "200mbit")
    to_server = server["ps-sync"]["iteration_median_s"] / server["width 2, ring"]["iteration_median_s"]
    pipelined = [
        row["ratio_to_ddp_median"]
        for row in load(RESULTS / "bench_pipelined.csv")
        if row["contender"].startswith("pipelined width 2")
    ]
    kills, testbeds = load(RESULTS / "kill_anywhere.csv"), load(RESULTS / "kill_testbed.csv")
    loading = load(RESULTS / "bench_loading.csv")
    same = sum(row["identical"] is True for row in kills)
    clean = sum(all(int(row[name]) == 0 for name in row if name.endswith("_left")) for row in testbeds)
    found = {
        "width 2 / the longer of computation and wire, 100 and 200 Mbit/s, MLP and convnet": (
            to_limit(("mlp", "convnet"), SLOW),
            "compare",
        ),
        "the same at 1 Gbit/s, MLP": (to_limit(("mlp",), ("1gbit",)), "compare"),
        "the same at 1 Gbit/s, convnet": (to_limit(("convnet",), ("1gbit",)), "compare"),
        "parameter server / width 2, 200 Mbit/s, MLP": (f"{to_server:.1f}", "compare"),
        "width 2, int8 / the longer of computation and wire, 200 Mbit/s, MLP": (codec_ratio("int8"), "compare"),
        "the same, int4": (codec_ratio("int4"), "compare"),
        "the same, ternary": (codec_ratio("ternary"), "compare"),
        "encode, decode or hop / a copy of the same float32 values in memory: bf16, int8, int4, ternary": (
            codec_speed("memory"),
            "bench_codecs",
        ),
        "the same in the second-level cache": (codec_speed("cache"), "bench_codecs"),
        "what the wire allows / our ring with int8 and int4, 1 to 40 MB, 4 nodes, 100 and 200 Mbit/s": (
            wire_share(),
            "bench_all_reduce",
        ),
        "our ring / torch's all-reduce, 1 to 40 MB, 3 to 5 nodes, 200 Mbit/s": (
            ring("bench_ring_200mbit.csv", 1_000_000),
            "bench_ring --all --rate 200mbit",
        ),
        "the same, 1 Gbit/s": (ring("bench_ring_1gbit.csv", 1_000_000), "bench_ring --all --rate 1gbit"),
        "the same on one machine, over loopback, 1 to 100 MiB, 2 to 4 ranks": (
            ring("bench_ring.csv", 1 << 20),
            "bench_ring --all",
        ),
        "width 2 / torch's DistributedDataParallel over loopback, 4 ranks, four workloads": (
            spread(pipelined),
            "bench_pipelined",
        ),
        "32 JPEGs a rank loaded by the rank itself / by one worker, 2 ranks on emulated accelerators of 60 ms": (
            f"{loading[1]['times_as_fast']:.2f}",
            "bench_loading",
        ),
        "the same / in memory already": (f"{loading[-1]['times_as_fast']:.2f}", "bench_loading"),
        "runs that lost a rank or all ranks at a random moment, and ended in the very same weights and losses": (
            f"{same} of {len(kills)}",
            "kill_anywhere",
        ),
        "testbeds killed in the middle of a job that left nothing behind": (
            f"{clean} of {len(testbeds)}",
            "kill_testbed",
        ),
    }
    lines = [[what, figure, f"`experiments.{command}`"] for what, (figure, command) in found.items()]
    return table(["what", "figure", "made by"], lines)


def equation(name: str) -> str:
    """Return the equations in the docstring of a function of the timing model, "module.function"."""
    owner = importlib.import_module(f"timing_model.{name.partition('.')[0]}")
    for part in name.split(".")[1:]:
        owner = getattr(owner, part)
    blocks = re.findall(r"^\.\. math::(.*?)(?=^\S|\Z)", inspect.getdoc(owner) or "", re.DOTALL | re.MULTILINE)
    assert blocks, f"{name} has no equation"
    rows = [row for block in blocks for row in re.split(r",?\s*\\qquad\s*|\n\s*(?=\+ )", block.strip())]
    return "\n\n".join(f"$$\n{row}\n$$" for row in rows)


def output(step: str, first: str = "") -> str:
    """Return the output of a step of the tutorial without progress, from the line that begins with ``first``."""
    row = next(row for row in load(RESULTS / "tutorial.json") if row["step"] == step)
    lines = [line for line in row["output"] if not PROGRESS.match(line)]
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith(first)]
    assert begins, f"step {step} printed no line that begins with {first}"
    return "\n".join(["```text", *lines[begins[0] :], "```"])


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


QUOTES: dict[str, Callable[..., str]] = {
    quote.__name__: quote
    for quote in (
        made_by,
        iteration_times,
        codec_times,
        accuracies,
        short_accuracies,
        late_layers,
        local_steps,
        local_steps_hidden,
        local_steps_times,
        times_to_accuracy,
        seeds_that_arrived,
        training_times,
        speed_up,
        convergence,
        other_figures,
        paper_question,
        predictions,
        local_steps_predictions,
        chosen_by_auto,
        third_width,
        equation,
        output,
        headlines,
        *LOOPS,
        *RELIABILITY,
    )
}


def titled(contender: str) -> str:
    """Return the name of a contender as users know it, in bold if it is pipesgd with width 2."""
    return f"**{TITLES[contender]}**" if contender.startswith("width 2") else TITLES[contender]


def comparison(workload: str, rate: str) -> dict[str, Row]:
    """Return the rows of a comparison on four nodes, by contender."""
    return {row["contender"]: row for row in load(RESULTS / f"compare_{workload}_4x{rate}.csv")}


def coded() -> dict[str, Row]:
    """Return the rows of the comparison with codecs, by contender."""
    return {row["contender"]: row for row in load(RESULTS / "compare_mlp_4x200mbit_codecs.csv")}


def codec_ratio(codec: str) -> str:
    """Return the ratio of width 2 with a codec to its limit."""
    return f"{float(coded()[f'width 2, {codec}']['ratio_to_limit_median']):.2f}"


def codec_speed(where: str) -> str:
    """Return the ratios of the targeted operations to a copy."""
    rows = [row for row in load(RESULTS / "bench_codecs.csv") if row["size"] == where]
    ours = [row for row in rows if row["contender"] in ("bf16", "int8", "int4", "ternary")]
    hops = [row["ratio_median"] for row in ours if row["operation"] in ("encode", "decode", "hop")]
    assert len(hops) == 4 * 3
    return spread(hops)


def wire_share() -> str:
    """Return the ring's efficiency with a codec, relative to what the wire allows."""
    rows = [row for rate in SLOW for row in load(RESULTS / f"bench_all_reduce_{rate}.csv")]
    ours = [row for row in rows if row["algorithm"] == "ring" and row["codec"] in ("int8", "int4")]
    assert {row["nbytes"] for row in ours} >= {1_000_000, 40_000_000}
    return spread([row["efficiency"] for row in ours if row["nbytes"] >= 1_000_000])


def to_limit(workloads: Sequence[str], rates: Sequence[str]) -> str:
    """Return the ratios of width 2 to its limit, over both all-reduces."""
    return spread(
        [
            float(comparison(workload, rate)[f"width 2, {all_reduce}"]["ratio_to_limit_median"])
            for workload in workloads
            for rate in rates
            for all_reduce in ("ring", "native")
        ]
    )


def ring(name: str, from_nbytes: int) -> str:
    """Return the ratios of our ring's time to torch's."""
    return spread([row["ratio_median"] for row in load(RESULTS / name) if row["nbytes"] >= from_nbytes])


def spread(values: Sequence[float]) -> str:
    """Return the least and the largest value as text."""
    return f"{min(values):.2f} to {max(values):.2f}"
