"""Fuzzed files: cluster profiles, checkpoints, run.json, metrics.jsonl, and files of data sets."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import random
import re
import shutil
import struct
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from pipesgd.baselines.local import Local
from pipesgd.config import TrainConfig
from pipesgd.data.binary_files import read_cifar100, read_idx
from pipesgd.data.image_folder import ImageFolder
from pipesgd.data.samples import PixelScale
from pipesgd.errors import DatasetError, PipesgdError
from pipesgd.ranks import alone
from pipesgd.run import output
from pipesgd.run.checkpoint import Checkpoints
from pipesgd.run.metrics import SECONDS, read_metrics
from pipesgd.run.state import RunState
from tests.fuzzing._cases import Target, absurd_number
from tests.fuzzing._mutations import NASTY_JSON, damaged, damaged_text, nested
from tests.fuzzing._words import try_timing_model
from tests.timing_model._profiles import PROFILE

# ---- Cluster profiles

NUMBER = re.compile(r"(?<![\w.])-?\d[\d.e+-]*")
ESTIMATE = re.compile(r"\{value = [^}]*\}")
PROFILE_NUMBERS = (
    *("0", "-1", "nan", "inf", "1e300", "1e9", "1e-300", "1e-12", "5e-324", "0.5", "1", "2", "1000"),
    *("9" * 30, "9007199254740992", "true", '"x"', "[]", "1e400"),
)
JOBS = (
    ["predict", "--world-size", "4"],
    ["predict", "--world-size", "4", "--width", "2", "--codec", "int8", "--epochs", "3"],
    ["predict", "--world-size", "3", "--strategy", "ps-sync"],
    ["plan", "--world-size", "4"],
    ["simulate", "--world-size", "4", "--iterations", "50"],
)


@functools.cache
def whole_profile(folder: Path) -> str:
    """Return the text of a cluster.toml, of a cluster that nobody has."""
    path = folder / "whole.toml"
    PROFILE.save(path)
    return path.read_text(encoding="utf-8")


def make_profile(chance: random.Random, folder: Path) -> tuple[Path, list[str]]:
    """Write a damaged cluster.toml; return its path and the arguments of a question about it."""
    text = whole_profile(folder)
    way = chance.random()
    if way < 0.4:  # an extreme cluster whose intervals are whole
        for estimate in chance.sample(list(ESTIMATE.finditer(text)), chance.choice([1, 2, 5])):
            value = chance.choice([0.0, 1e-300, 1e-12, 1e-3, 1.0, 1e3, 1e9])
            text = text.replace(estimate.group(), f"{{value = {value!r}, low = 0.0, high = {value!r}}}")
    elif way < 0.8:
        for _ in range(chance.choice([1, 1, 2, 4])):
            number = chance.choice(list(NUMBER.finditer(text)))
            text = text[: number.start()] + chance.choice(PROFILE_NUMBERS) + text[number.end() :]
    else:
        text = damaged_text(chance, text, '"[]{}\0\x9f=\n9.#-')
    path = folder / "cluster.toml"
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    words = [*chance.choice(JOBS), "--json", "--cluster", str(path), "--model", "mlp", "--extrapolate"]
    return path, words


def try_profile(case: tuple[Path, list[str]], folder: Path) -> str | None:
    """Ask the timing model the question."""
    return try_timing_model(case[1])


# ---- Links that a person wrote

LINK_RANKS = 4
LINK_FIELDS = {
    "latency": ('"30us"', '"0s"', '"1e300s"', '"1e-300s"', '"30"', "3e-5", '"-1us"'),
    "bandwidth": ('"1Gbit/s"', '"1Gb"', '"0bit/s"', '"1e-300bit/s"', '"1e17GB/s"', "1e9"),
    "host": ('"0.5ns"', '"0s"', '"1e9s"', '"x"', "0"),
    "node": ("2", "4", "1", "0", "3", "9" * 30, "true"),
    "from": ("[0, 1, 2, 3]", "[3]", "[0]", "[]", "[4]", "[-1]", "0", "[0.5]", '["a"]'),
    "to": ("[0, 1, 2, 3]", "[1]", "[0, 2]", "[]", "[9007199254740992]", "all"),
    "speed": ("1",),
}
"""Fields of a ``[[link]]`` table, and values that are right or nearly so."""


def make_links(chance: random.Random, folder: Path) -> tuple[Path, list[str]]:
    """Write tables of links, most of them right but perhaps not between all ranks; return path and a question."""
    tables = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        names = ["latency", "bandwidth", *chance.sample(list(LINK_FIELDS)[2:], chance.choice([0, 0, 1, 1, 2]))]
        values = {name: chance.choice(LINK_FIELDS[name][: chance.choice([1, 3, 9])]) for name in names}
        if chance.random() < 0.1:
            del values[chance.choice(names)]
        tables.append("\n".join(["[[link]]", *(f"{name} = {value}" for name, value in values.items())]))
    text = "\n".join(tables) + "\n"
    if chance.random() < 0.15:
        text = damaged_text(chance, text, '"[]{}\0\x9f=\n9.#-')
    path = folder / "links.toml"
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    job = ["--world-size", str(LINK_RANKS), "--compute", "0.1s", "--parameters", "100k", "--json"]
    more = chance.choice([[], [], ["--width", "1"], ["--all-reduce", "all-to-all"], ["--codec", "int8"]])
    return path, ["predict", "--cluster", str(path), *job, *more]


def try_links(case: tuple[Path, list[str]], folder: Path) -> str | None:
    """Ask the timing model; of a ring, it must refuse links that do not lead from each rank to the next one."""
    found = try_timing_model(case[1])
    tables = tomllib.loads(case[0].read_text(encoding="utf-8"))["link"]
    for rank in range(LINK_RANKS):
        peer = (rank + 1) % LINK_RANKS
        if not any(
            rank in table.get("from", [rank])
            and peer in table.get("to", [peer])
            and ("node" not in table or rank // table["node"] == peer // table["node"])
            for table in tables
        ):
            return f"links that do not lead from rank {rank} to rank {peer} were accepted"
    return found


# ---- Checkpoints

FOREIGN: tuple[Any, ...] = ([], {}, 1, "x", None, {"parameters": {}}, {"a": torch.zeros(3)}, {1: {2: 3}})


class _Evil:
    """A pickle that would run a function if anybody let it."""

    def __init__(self, proof: Path):
        self._proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._proof,)


@functools.cache
def run_state() -> RunState:
    """Return the state of a run without communication."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = collections.deque([1.0, 2.0])
    return RunState(
        model=model, optimizer=optimizer, schedule=schedule, strategy=Local(model, optimizer), losses=losses
    )


@functools.cache
def whole_checkpoints(folder: Path) -> Path:
    """Return a folder with checkpoints of iterations 10 and 20."""
    place = folder / "whole-checkpoints"
    checkpoints = Checkpoints(place, alone(), keep=100)
    for iteration in (10, 20):
        checkpoints.save(iteration, lambda: run_state().snapshot(1.5))
    return place


def make_checkpoint(chance: random.Random, folder: Path) -> tuple[Path, bool]:
    """Damage or forge a file of the newer checkpoint; return the folder, and True if the file's checksum is right."""
    place = folder / "checkpoints"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole_checkpoints(folder), place)
    file = place / "iteration-20" / chance.choice(["shared.pt", "rank-0.pt"])
    way = chance.random()
    if way < 0.6:
        content = damaged(chance, file.read_bytes())
    else:
        buffer = io.BytesIO()
        torch.save(chance.choice(FOREIGN) if way < 0.85 else _Evil(folder / "ran"), buffer)
        content = buffer.getvalue()
    if content == file.read_bytes():
        content += b"\0"
    file.write_bytes(content)
    checksum = file.with_name(f"{file.name}.sha256")
    forged = chance.random() < 0.6
    if forged:
        checksum.write_text(f"{hashlib.sha256(content).hexdigest()}  {file.name}\n", encoding="ascii")
    elif chance.random() < 0.3:
        checksum.write_bytes(damaged(chance, checksum.read_bytes()))
    return place, forged


def try_checkpoint(case: tuple[Path, bool], folder: Path) -> str | None:
    """Load the newest checkpoint that can be used; the older one is whole."""
    place, forged = case
    with contextlib.redirect_stderr(io.StringIO()):
        found = Checkpoints(place, alone(), keep=100).load_newest(run_state().what_is_wrong_with)
    if (folder / "ran").exists():
        (folder / "ran").unlink()
        return "a crafted pickle was run"
    if found is None:
        return "no checkpoint was found, though that of iteration 10 is whole"
    if found.iteration == 20 and not forged:
        return "a checkpoint with another checksum was taken"
    problem = run_state().what_is_wrong_with(found.shared, found.own)
    return None if problem is None else f"a foreign checkpoint was taken: {problem}"


# ---- run.json and metrics.jsonl


def make_run(chance: random.Random, folder: Path) -> Path:
    """Write a damaged run.json; return the folder of its run."""
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    whole = {"world_size": 1, "options": TrainConfig().options(), "planned": None}
    text = json.dumps(whole, indent=1)
    way = chance.random()
    if way < 0.4:
        text = damaged_text(chance, text, '"{}[]\n\0x9,:')
    elif way < 0.85:
        names = [*whole, *TrainConfig().options()]
        name = chance.choice(["world_size", "options", "planned", chance.choice(names)])
        value = chance.choice(NASTY_JSON)
        text = re.sub(f'"{name}": [^{{\n]*?(,?)\n', lambda match: f'"{name}": {value}{match[1]}\n', text)
    else:
        text = chance.choice([*NASTY_JSON, nested(chance, "[", "]"), nested(chance, '{"options":', "}")])
    (place / output.RUN_FILE).write_bytes(text.encode("utf-8", errors="surrogateescape"))
    return place


def try_run(case: Path, folder: Path) -> str | None:
    """Read the folder as a run does that continues."""
    config = TrainConfig()
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, output=case, resume=True))
    earlier = output.earlier_run(config, alone())
    if earlier is None:
        return None
    output.take_folder(config, alone())
    if not isinstance(earlier["options"], dict):
        return "options that are no table were accepted"
    size = earlier["world_size"]
    return None if type(size) is int and size >= 1 else f"world size {str(size)[:50]} was accepted"


LINE = {
    "iteration": 0,
    "epoch": 0,
    "loss": 2.3,
    "lr": 0.02,
    "samples_per_second": 1.0,
    "seconds": dict.fromkeys(SECONDS, 0.1),
    "wire_bytes": 3,
    "skipped": 0,
}


def make_metrics(chance: random.Random, folder: Path) -> Path:
    """Write a metrics.jsonl with one or more damaged lines."""
    lines = [json.dumps({**LINE, "iteration": iteration}) for iteration in range(4)]
    if chance.random() < 0.5:
        name = chance.choice(list(LINE))
        at = chance.randrange(4)
        value = chance.choice(NASTY_JSON)
        lines[at] = re.sub(f'"{name}": ([^{{,]*|{{.*?}})', lambda _: f'"{name}": {value}', lines[at])
    text = "\n".join(lines) + "\n"
    if chance.random() < 0.6:
        text = damaged_text(chance, text, '"{}[]\n\0x9,:')
    if chance.random() < 0.2:
        text += chance.choice(["\n", "{}\n", "null\n", "\0" * 50, *NASTY_JSON])
    path = folder / "metrics.jsonl"
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    return path


def try_metrics(case: Path, folder: Path) -> str | None:
    """Read the metrics; damaged lines are left out."""
    with contextlib.redirect_stderr(io.StringIO()):
        lines = read_metrics(case)
    for line in lines:
        if not isinstance(line, dict) or type(line.get("iteration")) is not int:
            return f"a line without an iteration was taken: {str(line)[:100]}"
        if absurd_number(line["iteration"], 1e15) is not None:
            return f"iteration {str(line['iteration'])[:50]} was accepted"
    return None


# ---- Files of data sets


def make_data(chance: random.Random, folder: Path) -> Path:
    """Write a damaged file of images: IDX, plain or zipped, CIFAR-100's format, or a picture."""
    place = folder / "pictures" / "class"
    place.mkdir(parents=True, exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    kind = chance.choice(["idx", "idx.gz", "bin", "png", "jpg", "bmp", "gif", "webp", "ppm"])
    path = place / f"file.{kind}"
    if kind.startswith("idx"):
        content = bytearray(struct.pack(">IIII", 0x803, 2, 28, 28) + bytes(2 * 784))
        if chance.random() < 0.7:
            content[chance.randrange(16)] = chance.randrange(256)
        plain = bytes(content)
        content_or_zipped = gzip.compress(plain) if kind == "idx.gz" else plain
    elif kind == "bin":
        content_or_zipped = bytes(2 * 3074)
    else:
        buffer = io.BytesIO()
        Image.new("RGB", (9, 7), (1, 2, 3)).save(buffer, {"jpg": "jpeg"}.get(kind, kind))
        content_or_zipped = buffer.getvalue()
    path.write_bytes(damaged(chance, content_or_zipped) if chance.random() < 0.8 else content_or_zipped)
    return path


def try_data(case: Path, folder: Path) -> str | None:
    """Read the file as training does."""
    if ".idx" in case.name:
        images = read_idx(case, item_shape=(28, 28))
        return None if images.shape[1:] == (28, 28) and len(images) else f"shape {tuple(images.shape)}"
    if case.suffix == ".bin":
        pixels, labels = read_cifar100(case)
        return None if len(pixels) == len(labels) > 0 else "no picture"
    scale = PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels, _ = ImageFolder(case.parent.parent, ["class"], image_size=8, scale=scale)[torch.tensor([0])]
    return None if bool(pixels.isfinite().all()) else "pixels that are not finite"


TARGETS = (
    Target("cluster profiles", 1000, make_profile, try_profile, (ValueError,)),
    Target("links by hand", 1000, make_links, try_links, (ValueError,)),
    Target("checkpoints", 700, make_checkpoint, try_checkpoint, (PipesgdError,)),
    Target("run.json", 600, make_run, try_run, (PipesgdError,)),
    Target("metrics.jsonl", 600, make_metrics, try_metrics, ()),
    Target("data files", 400, make_data, try_data, (DatasetError,)),
)
