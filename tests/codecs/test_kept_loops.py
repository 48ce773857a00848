"""Compiled loops of the codecs: kept on disk where a folder can be written, else compiled in memory."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest

import pipesgd
from pipesgd.codecs.kernels import FOR_THIS_RUN, kept, kernels_for

LOOP = """
from numba import njit
from pipesgd.codecs.kernels.kept import keep

def double(x):
    return 2 * x

double = keep(njit(double))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an installation of ``LOOP``, of a user whose cache folder cannot be written."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(kept, "_said", set())
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "loops.py").write_text(LOOP)
    return folder


def load(folder: Path) -> ModuleType:
    """Return the module of ``LOOP`` as a new process would import it."""
    kept._said.clear()
    spec = importlib.util.spec_from_file_location("loops", folder / "loops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """Return what a process says that uses the loop."""
    assert load(folder).double(21) == 42
    return capsys.readouterr().err.rstrip("\n")


def blocked(path: Path) -> Path:
    """Make a file where a folder should be, which not even root can write to then."""
    path.touch()
    return path


def in_the_installation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only the folder next to the source."""


def in_the_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked(folder / "__pycache__")
    monkeypatch.setenv("HOME", str(folder.parent))


def in_the_cache_of_the_desktop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked(folder / "__pycache__")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))


def in_numbas_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked(folder / "__pycache__")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder.parent / "numba"))


def not_in_numbas_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(blocked(folder.parent / "numba")))


@pytest.mark.parametrize(
    "where",
    [in_the_installation, in_the_home, in_the_cache_of_the_desktop, in_numbas_folder, not_in_numbas_folder],
)
def test_they_are_kept_where_a_folder_can_be_written_and_compiled_once(
    where: Callable[..., None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where(folder, monkeypatch)
    assert said(capsys, folder) == kept.COMPILING
    assert said(capsys, folder) == "", "it was compiled again"


def test_they_are_compiled_in_memory_where_none_can(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked(folder / "__pycache__")
    assert said(capsys, folder) == said(capsys, folder) == kept.IN_MEMORY
    assert kept.IN_MEMORY.count("\n") == 0


def test_a_user_without_a_home_gets_no_folder_named_tilde(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a user is one of ``docker run --user 12345``, where HOME is not set."""
    blocked(folder / "__pycache__")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert said(capsys, folder) == kept.IN_MEMORY
    assert [path.name for path in tmp_path.iterdir()] == ["installed"]


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_files_are_written_again(folder: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, folder)
    for path in (folder / "__pycache__").glob(f"*.{ending}"):
        path.write_bytes(path.read_bytes()[:20])
    assert said(capsys, folder) == kept.COMPILING
    assert said(capsys, folder) == ""


def test_a_full_disk_costs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    lines = said(capsys, folder).splitlines()
    assert lines[0] == kept.COMPILING
    assert lines[1:] == [
        f"warning: the codec's compiled loops could not be kept in {folder / '__pycache__'}, so the next run compiles "
        "them again: [Errno 28] No space left on device"
    ]


def test_other_ranks_of_a_machine_say_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert said(capsys, folder) == ""


@pytest.mark.parametrize("archive", ["all.zip", "all.egg"])
def test_they_run_from_an_archive(
    folder: Path, archive: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """numba keeps nothing of an egg, and does not find out that the home cannot be written with a zip."""
    with zipfile.ZipFile(path := folder / archive, "w") as file:
        file.write(folder / "loops.py", "archived_loops.py")
    (folder / "loops.py").unlink()
    monkeypatch.syspath_prepend(str(path))
    try:
        assert importlib.import_module("archived_loops").double(21) == 42
    finally:
        del sys.modules["archived_loops"]
    first = kept.IN_MEMORY if archive == "all.egg" else kept.COMPILING
    assert capsys.readouterr().err.startswith(f"{first}\n")


@pytest.mark.slow
def test_two_processes_may_compile_at_once(folder: Path) -> None:
    words = [sys.executable, "-c", "import loops; assert loops.double(21) == 42"]
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    started = [subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path}) for _ in range(2)]
    assert [process.wait(timeout=90) for process in started] == [0, 0]


@pytest.mark.slow
def test_a_codec_works_where_neither_installation_nor_home_can_be_written(tmp_path: Path) -> None:
    """With the whole package in a folder of its own."""
    source = Path(pipesgd.__file__).parent
    for package in (source, source.parent / "timing_model"):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    blocked(tmp_path / "pipesgd" / "codecs" / "kernels" / "__pycache__")
    use = (
        "from pipesgd.codecs.options import codec_named\n"
        "from pipesgd.reducers.make import compile_loops\n"
        'compile_loops(codec_named("truncate16").make(), "cpu")'
    )
    environment = os.environ | {"HOME": os.devnull, "PYTHONPATH": str(tmp_path)}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", use], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, kept.IN_MEMORY + "\n")


@pytest.mark.parametrize("given", [{}, {"TRITON_CACHE_DIR": f"{os.devnull}/cache"}], ids=["its own", "one given"])
def test_triton_gets_a_folder_of_the_process_where_its_own_cannot_be_written(
    given: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs.cache, "home_dir", os.devnull)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the test sets is taken back
    monkeypatch.delenv("TRITON_CACHE_DIR")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    former = knobs.cache.dir
    kernels_for("cuda")
    assert capsys.readouterr().err == FOR_THIS_RUN.format(folder=former) + "\n"
    assert Path(knobs.cache.dir).is_dir()
    kernels_for("cuda")
    assert capsys.readouterr().err == "", "it was given another one"


def test_triton_keeps_its_folder_where_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    kernels_for("cuda")
    assert (knobs.cache.dir, capsys.readouterr().err) == (str(tmp_path / "triton"), "")
