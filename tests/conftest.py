"""Shared set-up: experiments are importable from the repository, pipesgd from where it is installed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, as the Makefile does: sums depend on it

REPOSITORY = Path(__file__).resolve().parent.parent

# Append to the path: CI tests the installed wheel, not the sources next to the tests.
sys.path += [str(REPOSITORY), str(REPOSITORY / "tests")]

# Let assertions in helpers show what they compared, as those in test files do.
pytest.register_assert_rewrite("_small_problem")

from _fashion_mnist import FASHION_MNIST  # noqa: E402 (its folder is in the path only now)

if "PIPESGD_TESTED_TRANSPORT" in os.environ:
    import _tested_transport  # noqa: F401

# A background job ignores Ctrl-C, and so would the runs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one under nohup hang-ups

# Ranks and threads may take any time on a busy machine; pytest-timeout watches for hangs.
# Its own profile for CI would try the same examples each time.
settings.register_profile(
    "pipesgd", parent=settings.get_profile("default"), deadline=None, print_blob=True, max_examples=50
)
settings.load_profile("pipesgd")


CENTRE, EXHAUSTIVE = "centre", "exhaustive"
_TOLD = tomllib.loads((REPOSITORY / "tests" / "tiers.toml").read_text(encoding="utf-8"))
SAMPLED: dict[str, int] = _TOLD.pop("sampled")
"""Number of cases that every change tries of these tests, each a file and a function."""
NAMED = {name: tier for tier, names in _TOLD.items() for name in names}
"""Files and folders of tests, with the tier that tiers.toml says."""
TIERS = (CENTRE, *dict.fromkeys(NAMED.values()), EXHAUSTIVE)


def tier_of(path: Path) -> str:
    """Return the tier of a file of tests, but for the cases of it that are exhaustive."""
    file = path.relative_to(REPOSITORY / "tests").as_posix()
    names = [name for name in NAMED if file == name or (name.endswith("/") and file.startswith(name))]
    return NAMED[max(names, key=len)] if names else CENTRE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="only tests of this tier (tests/tiers.toml)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files of other tiers aside without importing them."""
    tier = config.getoption("--tier")
    if not tier or not collection_path.is_file():
        return None
    if tier == EXHAUSTIVE:
        file = collection_path.relative_to(REPOSITORY / "tests").as_posix()
        return None if any(name.startswith(f"{file}::") for name in SAMPLED) else True
    return None if tier_of(collection_path) == tier else True


def evenly(number: int, among: int) -> set[int]:
    """Return ``number`` indices spread evenly over those below ``among``: the middles of equal parts.

    >>> sorted(evenly(2, 8)), sorted(evenly(3, 2)), evenly(0, 5)
    ([2, 6], [0, 1], set())
    """
    return {(2 * one + 1) * among // (2 * number) for one in range(number)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the other cases of sampled tests to the exhaustive tier, which has nothing else."""
    tier = config.getoption("--tier")
    if not tier:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        file = item.path.relative_to(REPOSITORY / "tests").as_posix()
        cases.setdefault(f"{file}::{getattr(item, 'originalname', item.name)}", []).append(item)
    left: set[pytest.Item] = set()
    for name, number in SAMPLED.items():
        of_test = cases.get(name, [])
        tried = evenly(number, len(of_test))
        left.update(item for index, item in enumerate(of_test) if index not in tried)
    chosen = [item for item in items if (item in left) == (tier == EXHAUSTIVE)]
    config.hook.pytest_deselected(items=[item for item in items if (item in left) != (tier == EXHAUSTIVE)])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Leave all that has been imported out of collections of garbage: each would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let this process end in good order: extension modules complain of what is left."""
    gc.unfreeze()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: processes in networks of their own")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 100 kB, for tests that fill it."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    disk = tmp_path / "small disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", disk], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture(autouse=True)
def fashion_mnist_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find the part of Fashion-MNIST in tests/data if the data set is not installed."""
    monkeypatch.setattr("pipesgd.data.datasets.DEBIAN_FASHION_MNIST", FASHION_MNIST)


@pytest.fixture(autouse=True)
def what_starts_processes_is_slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a process in a test that `make check` runs."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a test that starts a process must be marked slow")

    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        monkeypatch.setattr(BaseProcess, "start", refuse)


@pytest.fixture(autouse=True)
def no_threads_left_behind() -> Iterator[None]:
    """Fail a test that leaves a communication thread running."""
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipesgd")]
    assert not left, f"threads left behind: {left}"
