"""Doors into packages that pipesgd does not need: absent packages, and imports that do not load them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from _ranks import run_module

import pipesgd.accelerate
from pipesgd.checks import check_left_out, check_version
from pipesgd.ddp.attached import with_clipping
from pipesgd.errors import UserInputError
from pipesgd.sections import Updates, Windows

OPTIONAL = ("pytorch_lightning", "lightning", "accelerate", "transformers", "datasets", "matplotlib")


@pytest.mark.parametrize(
    ("absence", "door", "message"),
    [
        (
            "import importlib.util; importlib.util.find_spec = lambda name: None",
            "lightning",
            "pytorch-lightning must be installed for pipesgd.lightning: "
            'pip install "pytorch-lightning>=2.5,!=2.6.2,!=2.6.3"',
        ),
        (
            "import sys; sys.modules['transformers'] = None",
            "transformers",
            "transformers must be installed for pipesgd.transformers: "
            'pip install "transformers>=5.24" "accelerate>=1.15"; got import of transformers halted; '
            "None in sys.modules",
        ),
    ],
)
@pytest.mark.slow
def test_a_door_into_an_absent_package_says_how_to_install_it(
    absence: str, door: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "enters.py").write_text(f"{absence}; import pipesgd.{door}", encoding="utf-8")
    done = run_module("enters", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"pipesgd.errors.UserInputError: {message}"


@pytest.mark.parametrize(("value", "shown"), [(True, "True"), (0, "0"), ("fp16", "fp16"), (run_module, "function")])
def test_what_a_loop_has_itself_is_refused_in_one_line(value: object, shown: str) -> None:
    in_the_loop = {"scaler": "the loop has its own", "clip_norm": "the loop clips"}
    check_left_out({"scaler": None, "clip_norm": False, "width": value}, in_the_loop)
    with pytest.raises(UserInputError, match=f"^clip_norm must be left out, since the loop clips; got {shown}$"):
        check_left_out({"width": 2, "clip_norm": value}, in_the_loop)


@pytest.mark.parametrize(("windows", "clip_norm"), [(None, 1.0), (Windows(), None), (Windows(local_steps=4), None)])
def test_local_steps_alone_need_not_know_how_the_loop_clips(windows: Windows | None, clip_norm: object) -> None:
    found = with_clipping(Updates(prediction="none"), windows, {"clip_norm": 1.0})
    assert found == Updates(prediction="none", clip_norm=clip_norm)


def test_a_package_that_is_too_old_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"accelerate": "1.9.2"}
    monkeypatch.setattr("importlib.metadata.version", versions.get)
    with pytest.raises(
        UserInputError, match=r"^accelerate must be at least 1\.15 for pipesgd\.accelerate; got 1\.9\.2$"
    ):
        pipesgd.accelerate.attach(None, None, None)
    for enough in ("1.15", "1.15.0rc1", "1.15.3", "2.0.dev0"):
        versions["accelerate"] = enough
        check_version("accelerate", "1.15", "pipesgd.accelerate")


@pytest.mark.slow
def test_no_optional_package_is_imported_unless_it_is_used() -> None:
    names = "Pipelined, pipesgd.CodecOptions, pipesgd.ddp, pipesgd.backend, pipesgd.accelerate"
    modules = "import sys, pipesgd, pipesgd.ddp, pipesgd.backend, pipesgd.accelerate"
    program = f"{modules}; pipesgd.{names}; print([name for name in {OPTIONAL} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr
