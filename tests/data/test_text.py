"""Text as data: the split into training and test bytes, the cut into samples, and the errors for bad input."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipesgd.data import DataSplits, ShardedBatches, evaluation_batches, load_dataset
from pipesgd.data.samples import BatchedDataset
from pipesgd.data.text import SEPARATOR, TextWindows, read_text
from pipesgd.errors import DatasetError, UserInputError

NAMES = st.text("abcxyz._-", min_size=1, max_size=6).filter(lambda name: not name.startswith("."))
TEXTS = st.binary(max_size=40).map(lambda text: text.replace(SEPARATOR, b" "))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def numbered(folder: Path, count: int, size: int = 100) -> Path:
    """Write files that have no byte in common."""
    return write(folder, {f"{i}.txt": bytes([i + 1]) * size for i in range(count)})


def load(name: str, context: int) -> DataSplits:
    return load_dataset(name, None, image_size=64, context=context)


def windows(dataset: BatchedDataset) -> list[bytes]:
    inputs, labels = dataset[torch.arange(len(dataset))]
    return [bytes([*row.tolist(), last]) for row, last in zip(inputs, labels[:, -1].tolist(), strict=True)]


@given(text=st.binary(max_size=200), context=st.integers(1, 20))
def test_samples_are_the_text_cut_into_windows(text: bytes, context: int) -> None:
    dataset = TextWindows(text, context=context)
    assert len(dataset) == len(text) // (context + 1)
    inputs, labels = dataset[torch.arange(len(dataset))]
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape == (len(dataset), context)
    assert torch.equal(inputs[:, 1:], labels[:, :-1]), "a label is the byte after its input"
    assert b"".join(windows(dataset)) == text[: len(dataset) * (context + 1)]


def test_samples_come_in_the_order_that_is_asked_for() -> None:
    dataset = TextWindows(b"abcdefghi", context=2)
    inputs, labels = dataset[torch.tensor([2, 0, 2])]
    assert inputs.tolist() == [list(b"gh"), list(b"ab"), list(b"gh")]
    assert labels.tolist() == [list(b"hi"), list(b"bc"), list(b"hi")]


@given(files=st.dictionaries(NAMES, TEXTS, min_size=2, max_size=25))
def test_every_file_is_on_one_side_and_whole(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    folder = write(tmp_path_factory.mktemp("text"), files)
    sides = [side.split(SEPARATOR) for side in read_text(f"text:{folder}")]
    assert len(sides[1]) == -(-len(files) // 10)
    assert sorted(sides[0] + sides[1]) == sorted(files.values())
    for side in sides:
        orders = iter(text for _, text in sorted(files.items()))
        assert all(text in orders for text in side), "in the order of their names"


def test_no_window_of_a_test_file_is_trained_on(tmp_path: Path) -> None:
    splits = load(f"text:{numbered(tmp_path, 30)}", context=9)
    train, test = (set(b"".join(windows(side))) - {0} for side in (splits.train, splits.test))
    assert (len(train), len(test)) == (27, 3)
    assert train | test == set(range(1, 31))


def test_the_split_depends_on_names_alone(tmp_path: Path) -> None:
    """The choice of test files is permanent: another one would make earlier results incomparable."""
    names = ["a.txt", "b/a.txt", "b/c.txt", *(f"{i}.txt" for i in range(17))]
    one, other = (
        write(tmp_path / folder, {name: name.encode() + mark for name in order})
        for folder, order, mark in (("one", names, b"!"), ("other", sorted(names, reverse=True), b"?"))
    )
    assert read_text(f"text:{one}")[1] == b"1.txt!\0a.txt!"
    assert read_text(f"text:{other}") == tuple(side.replace(b"!", b"?") for side in read_text(f"text:{one}"))


@pytest.mark.parametrize("in_a_folder", [False, True])
def test_a_single_file_is_cut(tmp_path: Path, in_a_folder: bool) -> None:
    path = tmp_path / "book"
    path.write_bytes(bytes(range(1, 201)))
    train, test = read_text(f"text:{tmp_path if in_a_folder else path}")
    assert (train, test) == (bytes(range(1, 181)), bytes(range(181, 201)))


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    write(numbered(tmp_path, 3), {".git/config": b"hidden", "1.txt~/.swp": b"hidden"})
    assert b"hidden" not in b"".join(read_text(f"text:{tmp_path}"))


def test_the_standard_library() -> None:
    splits = load("python-stdlib", context=64)
    assert (splits.num_classes, splits.sample_shape) == (256, (64,))
    train, test = read_text("python-stdlib")
    assert len(train) > 2_000_000
    assert 0.05 < len(test) / len(train) < 0.2
    files = {*train.split(SEPARATOR), *test.split(SEPARATOR)}
    folder = Path(sysconfig.get_paths()["stdlib"])
    assert {(folder / name).read_bytes() for name in ("argparse.py", "json/decoder.py")} <= files
    for path in [*folder.glob("_sysconfigdata*.py"), *folder.glob("unittest/test/test_case.py")]:
        assert path.read_bytes() not in files
    assert load("python-stdlib", context=64).content == splits.content


def test_ranks_share_text_as_they_share_images(tmp_path: Path) -> None:
    splits = load(f"text:{numbered(tmp_path, 20)}", context=9)
    batches = [
        next(ShardedBatches(splits.train, batch_size=8, rank=rank, world_size=2, seed=3).from_iteration(0))
        for rank in range(2)
    ]
    assert all(inputs.shape == labels.shape == (8, 9) for inputs, labels in batches)
    assert not torch.equal(batches[0][0], batches[1][0])
    seen = [
        row
        for rank in range(2)
        for inputs, _ in evaluation_batches(splits.test, batch_size=4, rank=rank, world_size=2)
        for row in inputs.tolist()
    ]
    assert sorted(seen) == sorted(splits.test[torch.arange(len(splits.test))][0].tolist())


def test_texts_of_the_same_size_are_told_apart(tmp_path: Path) -> None:
    folders = [write(tmp_path / end, {"a": b"x" * 99 + end.encode(), "b": b"y" * 100}) for end in "12"]
    contents = [load(f"text:{folder}", context=9).content for folder in folders]
    assert contents[0] != contents[1]
    assert contents[0].startswith("100 and 100 bytes of text with the SHA-256 ")


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ({}, "nowhere", "text:PATH must name a text file or a folder of them; got {}/nowhere, which does not exist"),
        ({}, ".", "text:PATH must name a text file or a folder of them; got {}, a folder without files"),
        ({".a": b"x"}, ".", "text:PATH must name a text file or a folder of them; got {}, a folder without files"),
        (
            {"a": b""},
            "a",
            "text:{}/a must hold a sample of 10 bytes to train on and one to test on; got 0 bytes and 0 bytes",
        ),
        (
            {"a": b"x" * 90},
            "a",
            "text:{}/a must hold a sample of 10 bytes to train on and one to test on; got 81 bytes and 9 bytes",
        ),
        ({"a": b"x" * 50, "b": b"MZ\0"}, ".", "{}/b must be a text file; got one with a zero byte"),
    ],
)
def test_bad_text_gets_one_line(tmp_path: Path, files: dict[str, bytes], name: str, message: str) -> None:
    write(tmp_path, files)
    path = tmp_path if name == "." else tmp_path / name
    with pytest.raises(DatasetError) as caught:
        load(f"text:{path}", context=9)
    assert str(caught.value) == message.format(tmp_path)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = numbered(tmp_path, 1) / "0.txt"

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # a test that runs as root may read everything
    with pytest.raises(DatasetError) as caught:
        load(f"text:{path}", context=9)
    assert str(caught.value) == f"{path} must be readable; got Permission denied"


@pytest.mark.parametrize(("name", "near"), [("text:", "text:PATH"), ("text", "text:PATH"), ("python", "python-stdlib")])
def test_a_name_that_lacks_something_gets_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(UserInputError, match=rf"^dataset must be one of .*; got '{name}' \(did you mean {near}\?\)$"):
        load(name, context=9)
