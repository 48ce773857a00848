"""The figures in the README are those of the result files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.results import RESULTS, Row, load

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
RATES = {"100mbit": "100 Mbit/s", "200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
SLOW = ("100mbit", "200mbit")
CONTENDERS = {
    "ps-sync": "parameter server, synchronous",
    "ps-async": "parameter server, asynchronous",
    "D-Sync, ring": "width 1: nothing hidden",
    "ddp": "DistributedDataParallel",
    "ddp fp16": "the same with torch's fp16 hook",
    "width 2, ring": "**width 2**",
    "local": "no communication at all",
}


def comparison(workload: str, rate: str) -> dict[str, Row]:
    """The rows of a comparison on four nodes, by contender."""
    return {str(row["contender"]): row for row in load(RESULTS / f"compare_{workload}_4x{rate}.csv")}


def iteration_times() -> list[str]:
    """The lines of the README's first table."""
    results = [comparison("mlp", rate) for rate in RATES]

    def line(head: str, seconds: Iterable[object]) -> str:
        return f"| {head} | " + " | ".join(f"{1e3 * float(str(one)):.0f}" for one in seconds) + " |"

    lines = ["| ms an iteration | " + " | ".join(RATES.values()) + " |", "|---" * (1 + len(RATES)) + "|"]
    lines += [line(head, [one[name]["iteration_median_s"] for one in results]) for name, head in CONTENDERS.items()]
    lines.append(line("the wire's limit for an uncompressed ring", [one["local"]["wire_limit_s"] for one in results]))
    return lines


def codec_times() -> list[str]:
    """The lines of the README's table of codecs."""
    rows = {str(row["contender"]): row for row in load(RESULTS / "compare_mlp_4x200mbit_codecs.csv")}
    lines = [
        "| | ms an iteration | MB sent by a rank | DistributedDataParallel takes | with torch's fp16 hook "
        "| points of accuracy, MLP, convnet |",
        "|---|---|---|---|---|---|",
    ]
    lost = {
        (row["model"], row["codec"]): f"{float(row['difference_to_fp32_points']):+.2f}"
        for row in load(RESULTS / "codec_accuracy.csv")
    }
    for codec in ("int8", "int4", "ternary"):
        row = rows[f"width 2, {codec}"]
        milliseconds, megabytes = 1e3 * float(row["iteration_median_s"]), float(row["wire_bytes"]) / 1e6
        times = [f"{float(rows[name]['iteration_median_s']) * 1e3 / milliseconds:.1f}" for name in ("ddp", "ddp fp16")]
        lines.append(
            f"| width 2, {codec} | {milliseconds:.0f} | {megabytes:.2f} | {times[0]} times as long | {times[1]} times "
            f"| {lost['mlp', codec]}, {lost['convnet', codec]} |"
        )
    return lines


def codec_ratio(codec: str) -> str:
    """Of width 2 with a codec to its limit."""
    rows = {str(row["contender"]): row for row in load(RESULTS / "compare_mlp_4x200mbit_codecs.csv")}
    return f"{float(rows[f'width 2, {codec}']['ratio_to_limit_median']):.2f}"


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


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


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
    return spread([float(row["ratio_median"]) for row in load(RESULTS / name) if int(row["nbytes"]) >= from_nbytes])


def claims() -> list[str]:
    """What the README says, line by line."""
    mlp = comparison("mlp", "200mbit")
    server = float(mlp["ps-sync"]["iteration_median_s"]) / float(mlp["width 2, ring"]["iteration_median_s"])
    pipelined = [
        float(row["ratio_to_ddp_median"])
        for row in load(RESULTS / "bench_pipelined.csv")
        if str(row["contender"]).startswith("pipelined width 2")
    ]
    kills, testbeds = load(RESULTS / "kill_and_resume.csv"), load(RESULTS / "kill_testbed.csv")
    clean = [row for row in testbeds if all(int(row[name]) == 0 for name in row if name.endswith("_left"))]
    return [
        *iteration_times(),
        f"100 and 200 Mbit/s, MLP and convnet | {to_limit(('mlp', 'convnet'), SLOW)} |",
        f"the same at 1 Gbit/s, MLP | {to_limit(('mlp',), ('1gbit',))} |",
        f"the same at 1 Gbit/s, convnet | {to_limit(('convnet',), ('1gbit',))} |",
        f"parameter server / width 2, 200 Mbit/s, MLP | {server:.1f} |",
        *codec_times(),
        f"200 Mbit/s, MLP: int8 | {codec_ratio('int8')} |",
        f"the same, int4 | {codec_ratio('int4')} |",
        f"the same, ternary | {codec_ratio('ternary')} |",
        f"bf16, int8, int4, ternary | {codec_speed('memory')} |",
        f"the same in the second-level cache | {codec_speed('cache')} |",
        f"1 to 40 MB, 4 nodes, 100 and 200 Mbit/s | {wire_share()} |",
        f"3 to 5 nodes, 200 Mbit/s | {ring('bench_ring_200mbit.csv', 1_000_000)} |",
        f"the same, 1 Gbit/s | {ring('bench_ring_1gbit.csv', 1_000_000)} |",
        f"2 to 4 ranks | {ring('bench_ring.csv', 1 << 20)} |",
        f"four workloads | {spread(pipelined)} |",
        f"| {sum(str(row['identical']) == 'True' for row in kills)} of {len(kills)} |",
        f"left nothing behind | {len(clean)} of {len(testbeds)} |",
    ]


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


def accuracies() -> list[str]:
    """The lines of the README's table of what staleness costs."""
    rows = {
        row["method"]: row for row in load(RESULTS / "staleness.csv") if row["workload"] == "mlp" and row["lr"] == 0.1
    }
    lines = ["| MLP, SGD, peak learning rate 0.1 | test accuracy, % | points to synchronous |", "|---|---|---|"]
    for method, head in METHODS.items():
        row = rows[method]
        mean, lost = row["accuracy_mean"], row["accuracy_to_sync_points"]
        values = ("diverges", "") if mean is None else (f"{100 * mean:.2f}", f"{lost:+.2f}" if method != "sync" else "")
        lines.append(f"| {head} | {values[0]} | {values[1]} |")
    return lines


RACERS = {
    "ps-sync": "parameter server, synchronous",
    "D-Sync, ring": "width 1: nothing hidden",
    "ddp": "DistributedDataParallel",
    "ddp fp16": "the same with torch's fp16 hook",
    "width 2, int8": "**width 2, int8**",
    "width 2, int4": "**width 2, int4**",
}
RACES = {"mlp": "MLP", "small-convnet": "convnet"}


def times_to_accuracy() -> list[str]:
    """The lines of the README's table of times to accuracy."""
    head, lines = "| |", {name: f"| {text} |" for name, text in RACERS.items()}
    for workload, title in RACES.items():
        rows = {row["contender"]: row for row in load(RESULTS / f"accuracy_{workload}_4x200mbit.json")}
        fastest = rows["width 2, int4"]["seconds_to_target"]
        head += f" {title}: s to {100 * rows['ddp']['target_accuracy']:g} % | times int4's | final accuracy, % |"
        for name in RACERS:
            seconds, accuracy = rows[name]["seconds_to_target"], 100 * rows[name]["final_accuracy"]
            lines[name] += f" {seconds:.1f} | {seconds / fastest:.1f} | {accuracy:.2f} |"
    return [head, "|---" * (1 + 3 * len(RACES)) + "|", *lines.values()]


def test_the_times_to_accuracy_are_those_of_the_comparisons() -> None:
    assert "\n".join(times_to_accuracy()) in README


def test_the_accuracies_are_those_of_the_experiment() -> None:
    assert "\n".join(accuracies()) in README


def test_the_measured_figures_are_those_of_the_results() -> None:
    assert [claim for claim in claims() if claim not in README] == []
