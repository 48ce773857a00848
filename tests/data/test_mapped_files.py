"""Files whose content all processes of a machine share, compressed or not."""

from __future__ import annotations

import functools
import gzip
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pipesgd.data import mapped_files
from pipesgd.data.binary_files import read_cifar100
from pipesgd.data.mapped_files import read_mapped
from pipesgd.data.samples import ImagesOfFiles, PixelScale

CONTENT = np.random.default_rng(0).integers(256, size=100_000, dtype=np.uint8).tobytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unpack files of any size below this folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mapped_files, "SMALLEST_SHARED", 1)
    return tmp_path / "cache" / "pipesgd"


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    path = tmp_path / "content.gz"
    path.write_bytes(gzip.compress(CONTENT))
    return path


def own_kilobytes_of(path: Path) -> list[int]:
    """Return, for each place where this process has mapped ``path``, the kB of it that it holds for itself."""
    blocks = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    own = [block for block in blocks if block.partition("\n")[0].endswith(str(path))]
    return [int(match[1]) for block in own if (match := re.search(r"^Anonymous: +(\d+) kB", block, re.MULTILINE))]


def test_a_plain_file_is_mapped_and_what_one_process_writes_stays_there(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(CONTENT)
    one, other = read_mapped(path), read_mapped(path)
    assert one.tobytes() == other.tobytes() == CONTENT
    assert own_kilobytes_of(path) == [0, 0]
    one[0] ^= 255
    assert other.tobytes() == path.read_bytes() == CONTENT
    assert sorted(own_kilobytes_of(path)) == [0, 4]


def test_a_compressed_file_is_unpacked_once_and_mapped_by_all(cache: Path, zipped: Path) -> None:
    one, other = read_mapped(zipped), read_mapped(zipped)
    assert one.tobytes() == other.tobytes() == CONTENT
    [unpacked] = cache.iterdir()
    assert own_kilobytes_of(unpacked) == [0, 0]
    before = unpacked.stat().st_ino
    assert read_mapped(zipped).tobytes() == CONTENT
    assert unpacked.stat().st_ino == before


def test_the_first_of_several_processes_wins(cache: Path, zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one has unpacked the file meanwhile: this one maps that one's, so that there is one copy."""
    unzip, first = mapped_files._unzip, []

    def slow(path: Path) -> bytearray:
        monkeypatch.setattr(mapped_files, "_unzip", unzip)
        read_mapped(path)
        first.extend(file.stat().st_ino for file in cache.iterdir())
        return unzip(path)

    monkeypatch.setattr(mapped_files, "_unzip", slow)
    content = read_mapped(zipped)
    assert content.tobytes() == CONTENT
    assert [file.stat().st_ino for file in cache.iterdir()] == first
    assert own_kilobytes_of(next(cache.iterdir())) == [0]


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT, b"\0" + CONTENT[1:] + b"1234"])
def test_a_damaged_unpacked_file_is_made_again(cache: Path, zipped: Path, damaged: bytes) -> None:
    read_mapped(zipped)
    [unpacked] = cache.iterdir()
    whole = unpacked.read_bytes()
    unpacked.unlink()
    unpacked.write_bytes(damaged)
    assert read_mapped(zipped).tobytes() == CONTENT
    assert unpacked.read_bytes() == whole


def test_another_content_is_unpacked_again(cache: Path, zipped: Path) -> None:
    read_mapped(zipped)
    zipped.write_bytes(gzip.compress(CONTENT[::-1]))
    assert read_mapped(zipped).tobytes() == CONTENT[::-1]


def test_without_a_folder_to_write_to_each_process_has_its_own_copy_and_says_so(
    tmp_path: Path, zipped: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.write_text("a file")
    assert read_mapped(zipped).tobytes() == CONTENT
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: every process holds its own copy of content.gz: it could not be unpacked into a")


def test_small_content_leaves_no_file(cache: Path, zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_files, "SMALLEST_SHARED", len(CONTENT) + 1)
    assert read_mapped(zipped).tobytes() == CONTENT
    assert not cache.exists()


def test_images_are_not_sent_to_other_processes_but_mapped_there(tmp_path: Path) -> None:
    records = np.random.default_rng(1).integers(100, size=(300, 3074), dtype=np.uint8)
    (tmp_path / "train.bin").write_bytes(records.tobytes())
    scale = PixelScale(mean=(0.5,) * 3, std=(0.25,) * 3)
    images = ImagesOfFiles(functools.partial(read_cifar100, tmp_path / "train.bin"), scale)
    sent = pickle.dumps(images)
    assert len(sent) < 2000
    everything = torch.arange(300)
    for ours, theirs in zip(images[everything], pickle.loads(sent)[everything], strict=True):
        assert torch.equal(ours, theirs)
    assert own_kilobytes_of(tmp_path / "train.bin") == [0]  # the other one's is gone
