"""What README and documentation quote: tables and sentences from result files, equations from the code.

Each function returns Markdown; its words are what follows its name in the page (see quotes.py).
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence

from experiments.results import RESULTS, Row, load
from experiments.staleness_runs import BASELINE, WORKLOADS
from experiments.staleness_runs import METHODS as ALL_METHODS
from experiments.validate_timing_model import EXTRAPOLATED, HELD_OUT, RAW, accuracy

RATES = {"100mbit": "100 Mbit/s", "200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
SLOW = ("100mbit", "200mbit")
TITLES = {
    "ps-sync": "parameter server, synchronous",
    "ps-async": "parameter server, asynchronous",
    "D-Sync, ring": "width 1: nothing hidden",
    "ddp": "DistributedDataParallel",
    "ddp fp16": "the same with torch's fp16 hook",
    "width 2, ring": "**width 2**",
    "width 2, int8": "**width 2, int8**",
    "width 2, int4": "**width 2, int4**",
    "local": "no communication at all",
}
REGRETS = ("regret", "crossed_regret")
PROGRESS = re.compile(r"iteration \d+/|calibrating: |.* s left$")
"""A line of it."""
RACERS = ("ps-sync", "D-Sync, ring", "ddp", "ddp fp16", "width 2, int8", "width 2, int4")
RACES = {"mlp": "MLP", "small-convnet": "convnet"}
METHODS = {
    "sync": "synchronous, fp32",
    "stale": "width 2, no prediction",
    "stale, warm-up": "the same, the first tenth at width 1",
    "local": "width 2, `--prediction local`",
    "eager": "**width 2** (`eager`, the default)",
    "eager, int8": "the same with int8",
    "eager, int4": "the same with int4",
    "eager, width 3": "width 3",
}
LEARNED = {"sgd": "SGD", "adamw": "AdamW", "adagrad": "Adagrad", "muon": "Muon"}
HEADLINES = {"mlp": ("MLP", "sgd"), "convnet": ("convnet", "sgd"), "transformer": ("transformer", "adamw")}
SHORT = {
    "short-mlp": "MLP",
    "short-convnet": "convnet",
    "short-resnet18": "resnet18",
    "short-transformer": "transformer (loss)",
}


def made_by(*names: str) -> str:
    """Which command made these results, from which code, on which machine: each one's manifest says it."""
    lines = []
    for name in names:
        manifest = json.loads((RESULTS / f"{name}.manifest.json").read_text(encoding="utf-8"))
        command = re.sub(r" --output \S+", "", manifest["made_by"])
        machine, day = manifest["machine"], manifest["started"][:10]
        lines.append(
            f"- `{name}`: `{command}`, at commit `{manifest['git']['commit'][:7]}`, {day}, on {machine['cores']} cores "
            f"({machine['cpu']})"
        )
    return "\n".join(["Made by (results and manifests are in `experiments/results/`):", "", *lines])


def iteration_times() -> str:
    """Of all strategies, at three rates."""
    results = [comparison("mlp", rate) for rate in RATES]

    def cells(seconds: Iterable[object]) -> list[str]:
        return [f"{1e3 * float(str(one)):.0f}" for one in seconds]

    shown = ("ps-sync", "ps-async", "D-Sync, ring", "ddp", "ddp fp16", "width 2, ring", "local")
    rows = [[TITLES[name], *cells(one[name]["iteration_median_s"] for one in results)] for name in shown]
    limits = cells(one["local"]["wire_limit_s"] for one in results)
    return table(["ms an iteration", *RATES.values()], [*rows, ["the wire's limit for an uncompressed ring", *limits]])


def codec_times() -> str:
    """What codecs gain, and cost in accuracy."""
    rows, lost = coded(), {(row["model"], row["codec"]): row for row in load(RESULTS / "codec_accuracy.csv")}
    lines = []
    for codec in ("int8", "int4", "ternary"):
        row = rows[f"width 2, {codec}"]
        seconds = float(row["iteration_median_s"])
        times = [float(rows[name]["iteration_median_s"]) / seconds for name in ("ddp", "ddp fp16")]
        points = [f"{float(lost[model, codec]['difference_to_fp32_points']):+.2f}" for model in ("mlp", "convnet")]
        milliseconds, megabytes = f"{1e3 * seconds:.0f}", f"{float(row['wire_bytes']) / 1e6:.2f}"
        cells = [milliseconds, megabytes, f"{times[0]:.1f} times as long", f"{times[1]:.1f} times", ", ".join(points)]
        lines.append([f"width 2, {codec}", *cells])
    heads = ["", "ms an iteration", "MB sent by a rank", "DistributedDataParallel takes", "with torch's fp16 hook"]
    return table([*heads, "points of accuracy, MLP, convnet"], lines)


def accuracies() -> str:
    """What staleness costs in full trainings, and what predictions take away of it."""
    rows = staleness()
    heads = ["test accuracy, %", *(f"{title}, {LEARNED[optimizer]}" for title, optimizer in HEADLINES.values()), "loss"]
    lines = []
    for method, title in METHODS.items():
        cells = [title]
        for workload, (_, optimizer) in HEADLINES.items():
            cells.append(with_change(rows.get((workload, optimizer, method)), by_loss=False))
        lines.append([*cells, with_change(rows.get(("transformer", "adamw", method)), by_loss=True)])
    return table(heads, lines)


def short_accuracies() -> str:
    """The same for short trainings with several optimizers: only the change."""
    rows = staleness()
    cells = [cell for cell in itertools.product(SHORT, LEARNED) if (*cell, BASELINE) in rows]
    heads = ["", *(f"{SHORT[workload]}, {LEARNED[optimizer]}" for workload, optimizer in cells)]
    lines = []
    for method in ALL_METHODS:
        if method != BASELINE:
            name = f"**{method}**" if method == "eager" else method
            lines.append([name, *(only_change(rows.get((*cell, method))) for cell in cells)])
    return table(heads, lines)


def staleness() -> dict[tuple[str, str, str], Row]:
    """By workload, optimizer and method."""
    summary = load(RESULTS / "staleness_summary.csv")
    return {(row["workload"], row["optimizer"], row["method"]): row for row in summary}


def with_change(row: Row | None, *, by_loss: bool) -> str:
    """A mean over seeds, and in brackets how far it is from synchronous training's; nothing of what was not tried."""
    if row is None:
        return ""
    mean = row["test_loss_mean"] if by_loss else row["accuracy_mean"]
    if mean is None:
        return "diverges"
    value = f"{mean:.3f}" if by_loss else f"{100 * mean:.2f}"
    return value if row["method"] == BASELINE else f"{value} ({change(row, by_loss=by_loss, digits=2)})"


def only_change(row: Row | None) -> str:
    """By what the workload is judged by; nothing of what was not tried."""
    if row is None:
        return ""
    by_loss = WORKLOADS[row["workload"]].judged_by_loss
    return "diverges" if row["accuracy_mean"] is None else change(row, by_loss=by_loss, digits=1)


def change(row: Row, *, by_loss: bool, digits: int) -> str:
    """In % of the loss, with so many ``digits``, or in points of accuracy."""
    return f"{row['loss_to_sync_percent']:+.{digits}f} %" if by_loss else f"{row['accuracy_to_sync_points']:+.2f}"


def times_to_accuracy() -> str:
    """Of all racers, on two workloads."""
    heads, lines = [""], {name: [TITLES[name]] for name in RACERS}
    for workload, title in RACES.items():
        rows = {row["contender"]: row for row in load(RESULTS / f"accuracy_{workload}_4x200mbit.json")}
        fastest = rows["width 2, int4"]["seconds_to_target"]
        target = f"{title}: s to {100 * rows['ddp']['target_accuracy']:g} %"
        heads += [target, "times int4's", "final accuracy, %"]
        for name in RACERS:
            seconds, accuracy = rows[name]["seconds_to_target"], 100 * rows[name]["final_accuracy"]
            lines[name] += [f"{seconds:.1f}", f"{seconds / fastest:.1f}", f"{accuracy:.2f}"]
    return table(heads, lines.values())


def paper_question() -> str:
    """What the model says of the paper's setting: speed-ups, and what a third width gains."""

    def answers(name: str) -> list[Row]:
        manifest = json.loads((RESULTS / f"{name}.manifest.json").read_text(encoding="utf-8"))
        return list(manifest["answers"])

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
    """How near the timing model came in each setting, and what its choice cost."""
    rows = load(RESULTS / "validate_timing_model.csv")
    decisions = {row["setting"]: row for row in load(RESULTS / "validate_timing_model_decisions.csv")}
    lines = []
    for kind in (HELD_OUT, EXTRAPOLATED):
        of_kind = [row for row in rows if row["kind"] == kind]
        names = dict.fromkeys(row["setting"] for row in of_kind)
        own = [decisions[name] for name in names if name in decisions]
        mean = {name: sum(one[name] for one in own) / len(own) for name in REGRETS} if own else None
        lines += [
            [name, *predicted([row for row in of_kind if row["setting"] == name], decisions.get(name))]
            for name in names
        ]
        lines.append([f"**all {kind}**", *predicted(of_kind, mean)])
    heads = ["", "cells", "mean error, %", "95 % within, %", "two rounds apart, %", "in the 90 % interval, %"]
    return table([*heads, "regret, %", "against the other round's best, %"], lines)


def predicted(rows: Sequence[Row], decision: Row | None) -> list[str]:
    """Of these cells."""
    found = accuracy(rows)
    raw, repeated = found[RAW], found["repeatability"]
    shares = [raw["mean_error"], raw["p95_error"], repeated["mean"]]
    regrets = ["" if decision is None else f"{100 * decision[name]:.1f}" for name in REGRETS]
    return [str(len(rows)), *(f"{100 * one:.1f}" for one in shares), f"{100 * raw['coverage']:.0f}", *regrets]


def other_figures() -> str:
    """One line each."""
    server = comparison("mlp", "200mbit")
    to_server = float(server["ps-sync"]["iteration_median_s"]) / float(server["width 2, ring"]["iteration_median_s"])
    pipelined = [
        float(row["ratio_to_ddp_median"])
        for row in load(RESULTS / "bench_pipelined.csv")
        if str(row["contender"]).startswith("pipelined width 2")
    ]
    kills, testbeds = load(RESULTS / "kill_and_resume.csv"), load(RESULTS / "kill_testbed.csv")
    same = sum(row["identical"] is True for row in kills)
    clean = sum(all(int(row[name]) == 0 for name in row if name.endswith("_left")) for row in testbeds)
    figures = {
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
        "runs that lost a rank to `kill -9`, and ended in the very same weights": (
            f"{same} of {len(kills)}",
            "kill_and_resume",
        ),
        "testbeds killed in the middle of a job that left nothing behind": (
            f"{clean} of {len(testbeds)}",
            "kill_testbed",
        ),
    }
    lines = [[what, figure, f"`experiments.{command}`"] for what, (figure, command) in figures.items()]
    return table(["what", "figure", "made by"], lines)


def equation(name: str) -> str:
    """The equations in the docstring of a function of the timing model, "module.function"."""
    owner = importlib.import_module(f"timing_model.{name.partition('.')[0]}")
    for part in name.split(".")[1:]:
        owner = getattr(owner, part)
    blocks = re.findall(r"^\.\. math::(.*?)(?=^\S|\Z)", inspect.getdoc(owner) or "", re.DOTALL | re.MULTILINE)
    assert blocks, f"{name} has no equation"
    rows = [row for block in blocks for row in re.split(r",?\s*\\qquad\s*|\n\s*(?=\+ )", block.strip())]
    return "\n\n".join(f"$$\n{row}\n$$" for row in rows)


def output(step: str, first: str = "") -> str:
    """What a step of the tutorial printed, without lines of progress; from the line that begins with ``first`` on."""
    row = next(row for row in load(RESULTS / "tutorial.json") if row["step"] == step)
    lines = [line for line in row["output"] if not PROGRESS.match(line)]
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith(first)]
    assert begins, f"step {step} printed no line that begins with {first}"
    return "\n".join(["```text", *lines[begins[0] :], "```"])


QUOTES: dict[str, Callable[..., str]] = {
    quote.__name__: quote
    for quote in (
        made_by,
        iteration_times,
        codec_times,
        accuracies,
        short_accuracies,
        times_to_accuracy,
        other_figures,
        paper_question,
        predictions,
        equation,
        output,
    )
}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


def comparison(workload: str, rate: str) -> dict[str, Row]:
    """The rows of a comparison on four nodes, by contender."""
    return {str(row["contender"]): row for row in load(RESULTS / f"compare_{workload}_4x{rate}.csv")}


def coded() -> dict[str, Row]:
    """The same with codecs."""
    return {str(row["contender"]): row for row in load(RESULTS / "compare_mlp_4x200mbit_codecs.csv")}


def codec_ratio(codec: str) -> str:
    """Of width 2 with a codec to its limit."""
    return f"{float(coded()[f'width 2, {codec}']['ratio_to_limit_median']):.2f}"


def codec_speed(where: str) -> str:
    """Of the targeted operations to a copy."""
    rows = [row for row in load(RESULTS / "bench_codecs.csv") if row["size"] == where]
    ours = [row for row in rows if row["contender"] in ("bf16", "int8", "int4", "ternary")]
    hops = [float(row["ratio_median"]) for row in ours if row["operation"] in ("encode", "decode", "hop")]
    assert len(hops) == 4 * 3
    return spread(hops)


def wire_share() -> str:
    """How near to what the wire allows the ring comes with a codec."""
    rows = [row for rate in SLOW for row in load(RESULTS / f"bench_all_reduce_{rate}.csv")]
    ours = [row for row in rows if row["algorithm"] == "ring" and row["codec"] in ("int8", "int4")]
    assert {int(row["nbytes"]) for row in ours} >= {1_000_000, 40_000_000}
    return spread([float(row["efficiency"]) for row in ours if int(row["nbytes"]) >= 1_000_000])


def to_limit(workloads: Sequence[str], rates: Sequence[str]) -> str:
    """Of width 2, over both all-reduces."""
    return spread(
        [
            float(comparison(workload, rate)[f"width 2, {all_reduce}"]["ratio_to_limit_median"])
            for workload in workloads
            for rate in rates
            for all_reduce in ("ring", "native")
        ]
    )


def ring(name: str, from_nbytes: int) -> str:
    """Our ring's time over torch's."""
    return spread([float(row["ratio_median"]) for row in load(RESULTS / name) if int(row["nbytes"]) >= from_nbytes])


def spread(values: Sequence[float]) -> str:
    """The least and the largest."""
    return f"{min(values):.2f} to {max(values):.2f}"
