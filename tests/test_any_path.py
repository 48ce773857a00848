"""Paths that are not UTF-8, and any path where the system does not write UTF-8; TOML as editors save it."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.command import torchrun
from pipesgd.errors import UserInputError
from pipesgd.toml_file import read_toml
from timing_model.toml_io import read_tables

WITHOUT_UTF8 = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
UTF8 = {"LC_ALL": "C.UTF-8"}
SMALL = ("--hidden-sizes", "8", "--iterations", "4", "--checkpoint-iterations", "2")


def run(
    folder: Path,
    *words: str | bytes,
    start: Sequence[str] = (sys.executable, "-m", "pipesgd.train"),
    **environment: str,
) -> tuple[int, bytes, bytes]:
    """Run ``pipesgd.train``, or what ``start`` says; return its exit code and what it printed, whatever the bytes."""
    command = [*start, *words]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, timeout=150
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "environment"),
    [(b"d\xe4ta", UTF8), ("été, 数据".encode(), WITHOUT_UTF8)],  # neither is what the other side expects
    ids=["Latin-1 in UTF-8", "UTF-8 in C"],
)
def test_a_run_trains_and_resumes_wherever_its_folder_is(
    name: bytes, environment: dict[str, str], tmp_path: Path
) -> None:
    output = os.fsencode(tmp_path) + b"/" + name
    code, said, err = run(tmp_path, *SMALL, "--output", output, **environment)
    assert (code, err) == (0, b"")
    assert b"wrote " + output + b"/summary.json" in said, "names of files are printed as they are"
    folder = Path(os.fsdecode(output))
    assert (folder / "model.pt").stat().st_size > 1000
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    newest = folder / "checkpoints" / "iteration-4"
    newest.rename(folder / "aside")
    code, said, err = run(tmp_path, *SMALL, "--output", output, "--resume", **environment)
    assert (code, err) == (0, b"")
    assert newest.is_dir()
    assert b"continuing after iteration 2 of 4" in said


@pytest.mark.slow
def test_paths_in_a_file_of_options_are_those_of_the_command_line(tmp_path: Path) -> None:
    """The text that --dry-run prints is read back, too."""
    (tmp_path / "été").mkdir()
    (tmp_path / "été" / "text").write_text("some text " * 2000)
    words = ["--model", "transformer", "--layers", "1", "--iterations", "2", "--dataset", "text:été/text"]
    words += ["--output", "été/run"]
    code, printed, err = run(tmp_path, *words, "--dry-run", **WITHOUT_UTF8)
    assert (code, err) == (0, b"")
    assert 'output = "été/run"' in printed.decode()
    (tmp_path / "été" / "options.toml").write_bytes(printed)
    code, _, err = run(tmp_path, "--config", "été/options.toml", **WITHOUT_UTF8)
    assert (code, err) == (0, b"")
    assert (tmp_path / "été" / "run" / "summary.json").exists()


@pytest.mark.slow
def test_what_a_model_prints_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\ndef model(**_):\n    print('café')\n    return torch.nn.Sequential(torch.nn.Flatten(), "
        "torch.nn.Linear(64, 10))\n",
        encoding="utf-8",
    )
    code, said, err = run(tmp_path, "--model", "own:model", "--iterations", "2", **WITHOUT_UTF8)
    assert (code, err) == (0, b"")
    assert b"caf\\xe9" in said


@pytest.mark.slow
def test_a_calibration_is_written_read_and_drawn_wherever_its_file_is(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/d\xe4ta"
    os.mkdir(folder)  # noqa: PTH102 (bytes)
    file = folder + b"/cluster.toml"
    measured = [
        "--hidden-sizes",
        "8",
        "--codecs",
        "int8",
        "--seconds",
        "1",
        "--out",
        file,
        "--plot",
        folder + b"/1.png",
    ]
    code, _, err = run(tmp_path, *measured, start=torchrun(2, "-m", "pipesgd.calibrate"), **WITHOUT_UTF8)
    assert code == 0, err
    asked = ["--model", "mlp", "--world-size", "2", "--extrapolate", "--cluster", file, "--plot", folder + b"/2.png"]
    code, _, err = run(tmp_path, *asked, start=[sys.executable, "-m", "timing_model", "plan"], **WITHOUT_UTF8)
    assert (code, err) == (0, b"")
    assert sorted(os.listdir(folder)) == [b"1.png", b"2.png", b"cluster.toml"]  # noqa: PTH208 (bytes)


TEXT = 'widths = [1, 2]\nname = "été"\n'


@pytest.mark.parametrize(
    "content", [codecs.BOM_UTF8 + TEXT.encode(), TEXT.encode(), TEXT.replace("\n", "\r\n").encode()]
)
def test_toml_is_read_as_editors_save_it(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "file.toml").write_bytes(content)
    assert read_toml("config", path) == {"widths": [1, 2], "name": "été"}
    table = read_tables(path)
    assert (table.counts("widths"), table.text("name")) == ((1, 2), "été")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_toml_in_another_encoding_is_refused_in_one_line(encoding: str, tmp_path: Path) -> None:
    (path := tmp_path / "file.toml").write_text(TEXT, encoding=encoding)
    why = "it is UTF-16 or UTF-32, and TOML must be saved as UTF-8"
    said: list[Any] = []
    for read in (lambda: read_toml("config", path), lambda: read_tables(path)):
        with pytest.raises(ValueError, match=why) as caught:
            read()
        said.append(caught.value)
    assert isinstance(said[0], UserInputError)
    assert str(said[0]) == f"config must be a TOML file; got {path}: {why}"
    assert str(said[1]) == f"file.toml must be whole and of TOML's form; {why}"
