"""Files written by ``save`` can be read back, say where they come from, and reveal nothing about this machine."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

from experiments.results import RESULTS, Row, command_line, command_of, load, save

ROWS: list[Row] = [
    {"name": "ring, ours", "nbytes": 4096, "seconds": 1.25e-05, "met": True, "restarts": None},
    {"name": "native", "nbytes": 100 << 20, "seconds": 0.1 + 0.2, "met": False, "restarts": 3},
]


@pytest.mark.slow
def test_a_table_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = save("bench", ROWS, folder=tmp_path)
    assert path == tmp_path / "bench.csv"
    assert load(path) == ROWS
    assert path.read_text().splitlines()[0] == "name,nbytes,seconds,met,restarts"


@pytest.mark.slow
def test_nested_values_make_it_json(tmp_path: Path) -> None:
    rows: list[Row] = [{"p": 2, "seconds": [0.1, 0.2]}]
    path = save("bench", rows, folder=tmp_path)
    assert path == tmp_path / "bench.json"
    assert load(path) == rows


@pytest.mark.slow
def test_the_manifest_says_where_the_table_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--seed", "1", "--output", str(tmp_path)])
    save("bench", ROWS, extra={"target": 1.1}, folder=tmp_path)
    text = (tmp_path / "bench.manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["made_by"].endswith(f"--seed 1 --output {tmp_path.name}")
    assert manifest["target"] == 1.1
    assert manifest["versions"].keys() == {"pipesgd", "torch", "numpy", "python"}
    assert manifest["machine"]["kernel"] == f"{platform.system()} {platform.release()}"
    assert manifest["machine"].keys() == {"cpu", "cores", "memory_gib", "kernel"}  # no host name
    assert manifest["started"].endswith("+00:00")
    assert str(tmp_path) not in text
    assert str(RESULTS.parent) not in text


@pytest.mark.parametrize("word", ["/home/me/quick", "--output=/home/me/quick"])
def test_the_command_line_holds_no_path_of_this_machine(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", word])
    assert command_line().endswith("quick")
    assert "/home" not in command_line()


def test_the_command_line_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--name", "two words"])
    assert command_line().endswith("--name 'two words'")


@pytest.mark.parametrize("word", ["--output runs", "--output 'my runs'", "'--output=my runs'"])
def test_a_quoted_command_does_not_say_where_its_results_were_written(word: str) -> None:
    manifest = {"made_by": f"python -m experiments.bench_ring {word} --name 'two words'"}
    assert command_of(manifest) == "python -m experiments.bench_ring --name 'two words'"
