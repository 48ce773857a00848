"""Tiers of the tests: every file is in one, the targets of the Makefile run them all, and invariants name theirs."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from conftest import CENTRE, EXHAUSTIVE, NAMED, REPOSITORY, SAMPLED, TIERS, evenly, tier_of

TESTS = REPOSITORY / "tests"
FILES = [path for path in TESTS.rglob("test_*.py") if "integrations" not in path.relative_to(TESTS).parts]
"""Files of tests, but for those that need packages which are not installed."""


def test_every_file_is_in_one_tier_and_every_name_is_that_of_files() -> None:
    lines = re.findall(r'^    "(.+)",$', (TESTS / "tiers.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(lines) == sorted(NAMED), "a name is in two tiers"
    needed = {name for name in NAMED for path in FILES if path.relative_to(TESTS).as_posix().startswith(name)}
    assert set(NAMED) - needed == set(), "no file has this name"
    assert {tier_of(path) for path in FILES} == set(TIERS) - {EXHAUSTIVE}


def test_every_sampled_test_is_there() -> None:
    for name in SAMPLED:
        file, _, function = name.partition("::")
        assert f"\ndef {function}(" in (TESTS / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("among", [1, 2, 7, 100])
def test_a_sample_is_spread_evenly(among: int) -> None:
    for number in range(1, among + 1):
        chosen = sorted(evenly(number, among))
        assert len(chosen) == number
        gaps = {after - before for before, after in pairwise(chosen)}
        assert max(gaps, default=0) - min(gaps, default=0) <= 1
        assert chosen[0] <= among / number
        assert among - chosen[-1] <= among / number
    assert evenly(among + 5, among) == set(range(among))
    assert evenly(0, among) == set()


def test_the_targets_run_all_tiers_and_ci_calls_these_targets() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    target = re.compile(r"^(test[a-z-]*):.*\n\t\$\(BIN\)/pytest \$\(WORKERS\) --tier (\w+)$", re.MULTILINE)
    runs = dict(target.findall(makefile))
    assert sorted(runs.values()) == sorted(TIERS)
    [called] = re.findall(r"^make (.+) VENV=", (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(called.split()) == set(runs) - {"test-exhaustive"}
    assert runs["test-exhaustive"] == EXHAUSTIVE
    [in_all] = re.findall(r"^test-all: (.+)$", makefile, re.MULTILINE)
    assert set(in_all.split()) == {*runs, "test-integrations"}


def test_invariants_name_their_tiers() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("\n## Invariants")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    told = {invariant: named for invariant, _, named in rows}
    assert told == {invariant: tiers_of(where) for invariant, where, _ in rows}
    assert sum(CENTRE in named for named in told.values()) > len(rows) / 2


def tiers_of(where: str) -> str:
    """Return the tiers of the tests that a cell names."""
    names = re.findall(r"`([\w/]+(?:\.py|/))`", where)
    paths = [TESTS / name for name in names if not name.startswith("experiments/") or (TESTS / name).exists()]
    assert paths, where
    assert all(path.exists() for path in paths), where
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    found = {"packages" if "integrations" in file.parts else tier_of(file) for file in files}
    return ", ".join(tier for tier in (*TIERS, "packages") if tier in found)
