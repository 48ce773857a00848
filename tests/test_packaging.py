"""The distribution: its license and what a package index shows of it."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import pipesgd
import timing_model
from experiments.results import REPOSITORY


def test_the_installed_package_names_its_license_and_authors() -> None:
    metadata = importlib.metadata.metadata("pipesgd")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "the pipesgd authors"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    [license_file] = [path for path in importlib.metadata.files("pipesgd") or [] if path.name == "LICENSE"]
    assert "Apache License" in license_file.read_text()


def test_a_source_distribution_has_what_the_readme_names() -> None:
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    included = config["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((REPOSITORY / name).exists() for name in included)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    linked = {link.split("/")[0].split("#")[0] for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", readme)}
    assert linked <= set(included)


def test_what_messages_tell_people_to_install_is_there() -> None:
    """pipesgd is on no package index: "pip install pipesgd[...]" would fail, or install a stranger's code."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = {*project["dependencies"], *(one for group in extras.values() for one in group)}
    known = declared | {re.split("[^A-Za-z0-9-]", one)[0] for one in declared} - {"pipesgd"}
    files = [*(REPOSITORY / "pipesgd").rglob("*.py"), *(REPOSITORY / "timing_model").rglob("*.py")]
    told = []
    for path in files:
        strings = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
        ]
        for text in (node.value for node in strings if isinstance(node.value, str)):
            assert "pipesgd[" not in text, f"{path}: {text}"
            for found in re.finditer(r"pip install ((?:\"[^\"]+\"|[\w.-]+)(?: \"[^\"]+\")*)", text):
                told += [(path.name, one) for one in re.findall(r"[^\s\"]+", found[1])]
    assert len(told) >= 4
    assert [one for one in told if one[1] not in known and one[1] not in {f".[{name}]" for name in extras}] == []


OLD_PYTHON = """#!/bin/sh
exec "{python}" -c 'import sys; sys.version_info = (3, 10, 4); sys.version = "3.10.4 (main)"; exec(sys.argv[1])' "$2"
"""
"""Python that calls itself an older one; it runs what follows its first argument, ``-c``."""


with_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # make may run the tests
    return subprocess.run(["make", *words], cwd=REPOSITORY, env=own, capture_output=True, text=True, check=False)


@pytest.mark.slow
@with_make
def test_make_refuses_an_old_python_before_it_installs_anything(tmp_path: Path) -> None:
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(OLD_PYTHON.format(python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    done = _make("train", f"PYTHON={python}", f"VENV={venv}")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith("Python must be 3.11 or newer: make train PYTHON=python3.12; got 3.10.4\n")
    assert not venv.exists()


@pytest.mark.slow
@with_make
def test_make_tests_with_another_torch_in_an_environment_of_its_own_or_not_at_all(tmp_path: Path) -> None:
    several = _make("test-torch", "TORCH=torch>=2.14")
    assert several.returncode != 0
    assert "TORCH must name one version: make test-torch TORCH=torch==2.14.1; got torch>=2.14" in several.stderr
    planned = _make("--dry-run", "test-torch", "TORCH=torch==9.8.7", "VENV=.venv").stdout
    assert '-m venv ".venv-torch-9.8.7"' in planned
    assert ".venv/" not in planned

    (tmp_path / "bin").mkdir()
    for name, line in (("python", f'exec "{sys.executable}" "$@"'), ("pytest", 'echo "tests:" "$@"')):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        program.chmod(0o755)
    for stamp in ("torch", "wheel", "test"):  # as of an environment that is ready
        (tmp_path / f"{stamp}.stamp").touch()
    installed = torch.__version__.split("+")[0]
    right, wrong = (_make("test-torch", f"TORCH=torch=={v}", f"OTHER={tmp_path}") for v in (installed, "9.8.7"))
    assert right.returncode == 0, right.stderr
    assert f"\ntorch {torch.__version__}\n" in right.stdout
    assert "\ntests: " in right.stdout
    assert wrong.returncode != 0
    assert f"torch must be 9.8.7 in {tmp_path}; got {torch.__version__}\n" in wrong.stderr
    assert "\ntests: " not in wrong.stdout


def test_one_version_is_named_everywhere() -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    [newest, *_] = re.findall(r"^## (\S+) \(", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"\nversion: {pipesgd.__version__}\n" in citation
    assert newest == pipesgd.__version__ == timing_model.__version__


def test_the_citation_names_the_license_of_the_package() -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert "license: Apache-2.0" in citation
    assert "arxiv.org/abs/1811.03619" in citation
