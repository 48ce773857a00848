"""Every command of README and documentation runs, and recommends nothing that is absurd."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.timing_model._profiles import LINK, MLP, PROFILE
from timing_model.choices import ACCURATE, LARGEST_ALL_TO_ALL
from timing_model.cli import HELP, main
from timing_model.presets import MODELS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TEXTS = [HELP, *(page.read_text(encoding="utf-8") for page in PAGES)]
COMMANDS = sorted(
    {
        " ".join(command.replace("\\\n", " ").split()[1:])
        for text in TEXTS
        for command in re.findall(r"^ *timing-model (?:predict|plan|simulate) (?:[^\\\n]|\\\n)*", text, re.MULTILINE)
        if "--" in command
    }
)


def write_cluster(folder: Path) -> Path:
    """Write a profile of the models that the pages name."""
    resnet18 = dataclasses.replace(MLP, model="resnet18", batch_size=64, tensors=(MODELS["resnet18"],))
    codecs = dict.fromkeys(("int4", "bf16", "fp16"), PROFILE.codecs["int8"]) | PROFILE.codecs
    links = {**PROFILE.links, "halving-doubling": LINK}
    profile = dataclasses.replace(PROFILE, codecs=codecs, links=links, compute=(*PROFILE.compute, resnet18))
    profile.save(folder / "cluster.toml")
    return folder / "cluster.toml"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return write_cluster(tmp_path)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 8
    assert any("10000" in one for one in COMMANDS)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_answers(words: str, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words.replace("cluster.toml", str(cluster)).split()
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "inf" not in text.split()
    assert "nan" not in text.split()
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    if arguments[0] == "plan":
        for one in (answer["best"], answer["ddp"] or answer["best"], answer["synchronous"], *answer["ranking"]):
            assert one["codec"] in ACCURATE
            assert one["width"] <= 3
            assert one["all_reduce"] != "all-to-all" or answer["predicted"]["job"]["world_size"] <= LARGEST_ALL_TO_ALL
        [told] = [line for line in text.splitlines() if line.startswith("Choose ")]
        assert told.endswith(f": {answer['best']['options']}")
