"""The comparison of transports: its options, its table, and a short run of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from _ranks import run_module

from experiments.bench_transport import medians, name_of, parse, summarize
from experiments.results import load
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow


def test_ratios_are_to_gloo_with_the_same_codec_in_the_same_round() -> None:
    times = {
        "gloo, fp32": np.array([1.0, 2.0, 4.0]),
        "gloo, int8": np.array([9.0, 9.0, 9.0]),
        "tcp, fp32": np.array([0.5, 1.0, 2.0]),
        "tls, fp32": np.array([2.0, 4.0, 8.0]),
    }
    names = ("gloo, fp32", "tcp, fp32", "tls, fp32")
    rows = [summarize(name, 2, 8, times, np.array([0.5] * 3), 2.0 * (1 << 20)) for name in names]
    assert [row["to_gloo_median"] for row in rows] == [None, 0.5, 2.0]
    assert [row["cpu_s_per_mib"] for row in rows] == [0.25] * 3
    assert medians(rows) == {"tcp": 0.5, "tls": 2.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "fast"], "rate must be a number and a unit"),
        (["--latency", "10"], "latency must be a number and a unit"),
        (["--loss", "200%"], "loss must be a percentage or a probability"),
        (["--codecs", "topk"], "--codecs must be one of"),
        (["--sizes", "4", "4"], "--sizes must name each once; got 4 twice"),
        (["--world-sizes", "1"], "--world-sizes: must be a whole number of at least 2"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=message) as error:
        parse(["--quick", "--output", str(tmp_path), *words])
    assert "\n" not in str(error.value)


def test_results_are_named_after_the_link(tmp_path: Path) -> None:
    words = ["--quick", "--output", str(tmp_path)]
    assert name_of(parse(words)) == "bench_transport_loopback"
    link = ["--rate", "200mbit", "--latency", "10ms", "--loss", "0.1%"]
    assert name_of(parse([*words, *link])) == "bench_transport_200mbit_10ms_lossy"


def test_a_quick_run_on_loopback(tmp_path: Path) -> None:
    words = ["--quick", "--world-sizes", "2", "--sizes", "4000", "--codecs", "fp32", "int8", "--output", str(tmp_path)]
    done = run_module("experiments.bench_transport", *words)
    assert done.returncode == 0, done.stderr
    rows = load(tmp_path / "bench_transport_loopback.csv")
    assert [(row["transport"], row["codec"]) for row in rows] == [
        (transport, codec) for transport in ("gloo", "tcp", "tls") for codec in ("fp32", "int8")
    ]
    assert all(row["median_s"] > 0 and row["cpu_s_per_mib"] > 0 for row in rows)
