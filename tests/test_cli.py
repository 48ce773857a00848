"""Options, config files, and the errors for bad ones: one line that names what must hold and what was got."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _refusals import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesgd import __version__
from pipesgd.calibration.options import CalibrateConfig
from pipesgd.cli import BASIC, HelpRequested, as_toml, help_texts, parse, parse_as, version
from pipesgd.config import (
    FREE_BETWEEN_RANKS,
    FREE_ON_RESUME,
    TrainConfig,
    differing_options,
)
from pipesgd.errors import UserInputError
from timing_model.schedules import ALL_REDUCES


@pytest.mark.parametrize(("words", "message"), refused("train"))
def test_bad_words_get_one_line(words: str, message: str) -> None:
    with pytest.raises(UserInputError) as caught:
        parse(words.split())
    assert str(caught.value) == message


@pytest.mark.parametrize("dataset", ["python-stdlib", "text:a folder/b"])
def test_a_transformer_on_text(dataset: str) -> None:
    words = "--model transformer --layers 3 --heads 2 --embedding 64 --context 32"
    config = parse(["--dataset", dataset, *words.split()])
    assert (config.data.dataset, config.data.context, config.data.workers) == (dataset, 32, 0)
    assert (config.model.layers, config.model.heads, config.model.embedding) == (3, 2, 64)


WORDS = st.text(min_size=1, max_size=8) | st.sampled_from(["--width", "--lr", "--config", "3"])


@given(words=st.lists(WORDS, min_size=1, max_size=4))
def test_any_words_are_a_configuration_or_one_error_of_ours(words: list[str]) -> None:
    with contextlib.suppress(UserInputError, HelpRequested):
        assert isinstance(parse(words), TrainConfig)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht = 2", "every key in {} must be an option; got 'widht' (did you mean width?)"),
        ("width = 'two'", "width must be a whole number or auto; got 'two'"),
        ("width = 0", "width must be at least 1; got 0"),
        ("width = 1.5", "width must be a whole number or auto; got '1.5'"),
        ("width = true", "width must be a value, not true or false in a config file; got true"),
        ("learning-rate = 1.0", "every key in {} must be an option; got 'learning-rate' (did you mean lr?)"),
        ('loss = "--help"', "loss must be a value, and no option, in a config file; got '--help'"),
        (
            "output = {a = 1}",
            "output must be a value or a list of them in a config file, and no table; got {{'a': 1}}",
        ),
        (
            "[[output]]\na = 1",
            "output must be a value or a list of them in a config file, and no table; got [{{'a': 1}}]",
        ),
        ("trace = 1", "trace must be true or false in a config file; got 1"),
        ("width = ", "config must be a TOML file; got {}: Invalid value (at end of document)"),
        ("lr = " + "[" * 5000, "config must be a TOML file; got {}: it is nested too deeply"),
        (".".join(["a"] * 20_000) + " = 1", "config must have at most 16384 bytes; got a longer file: {}"),
        ("# a comment\n" * 2000, "config must have at most 16384 bytes; got a longer file: {}"),
        ("seed = 0x" + "f" * 5000, "config must be a TOML file; got {}: seed is too long, or nested"),
        ("[pipeline]\nwidth = 2", "every key in {} must be an option; got 'pipeline'"),
        (
            'rounding = "a\\nb"',
            "rounding must be left out with --codec fp32, which has no use for it "
            "(it belongs to one of int8, int4, ternary, qsgd, module:function); got 'a\\nb'",
        ),
    ],
)
def test_bad_config_files_get_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserInputError) as caught:
        parse(["--config", str(path)])
    assert str(caught.value) == message.format(path)


def test_a_config_file_is_options_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("width = 3\nbatch_size = 64\nhidden-sizes = [30, 40]\ntrace = true\noverwrite = false\nlr = 1e-3\n")
    config = parse([f"--config={path}", "--width", "4"])
    assert config.pipeline.width == 4
    assert config.data.batch_size == 64
    assert config.model.hidden_sizes == (30, 40)
    assert config.run.trace
    assert not config.run.overwrite
    assert config.optimization.lr == 1e-3


@settings(max_examples=40)
@given(
    width=st.integers(1, 64),
    lr=st.floats(1e-9, 1e3),
    hidden=st.lists(st.integers(1, 9999), min_size=1, max_size=3),
    trace=st.booleans(),
    output=st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1).filter(
        lambda text: not text.startswith("-") and str(Path(text)) == text
    ),
)
def test_a_dry_run_prints_a_config_file_that_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, width: int, lr: float, hidden: list[int], trace: bool, output: str
) -> None:
    words = ["--width", str(width), "--lr", str(lr), "--hidden-sizes", *map(str, hidden), "--output", output]
    config = parse(words + ["--trace"] * trace)
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(as_toml(config), encoding="utf-8")
    assert parse(["--config", str(path)]) == config


@pytest.mark.parametrize("once", ["--dry-run", "--dry-run --overwrite", "--dry-run --resume"])
def test_a_dry_runs_file_trains_when_it_is_read_back(tmp_path: Path, once: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(as_toml(parse(["--width", "3", *once.split()])), encoding="utf-8")
    assert parse(["--config", str(path)]) == parse(["--width", "3"])
    assert parse(["--config", str(path), "--resume"]).run.resume


@pytest.mark.parametrize("words", ["", "--width 1 --average-state", "--optimizer nesterov"])
def test_momentum_of_movements_leaves_that_of_the_local_steps_alone(words: str) -> None:
    """With averaged state, momentum had to be 0, and then above 0."""
    config = parse(f"--local-steps 2 --codec topk --momentum-correction 0.9 {words}".split())
    assert (config.compression.momentum_correction, config.optimization.momentum) == (0.9, 0.9)


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
def test_a_gpu_goes_with_every_all_reduce(all_reduce: str) -> None:
    assert parse(["--device", "cuda", "--all-reduce", all_reduce]).run.device == "cuda"


@pytest.mark.parametrize(("kind", "command"), [(TrainConfig, "train"), (CalibrateConfig, "calibrate")])
def test_the_text_of_an_option_is_broken_only_where_the_line_is_full(
    kind: type[TrainConfig] | type[CalibrateConfig], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "6000")
    with pytest.raises(HelpRequested) as caught:
        parse_as(kind, command, ["--help-all"])
    for item in dataclasses.fields(kind):
        texts = help_texts(type(getattr(kind(), item.name)))
        names = [name for name in texts if name not in ("auto", "chosen")]  # no options
        assert names
        for name in names:
            assert texts[name][:200] in str(caught.value), name  # the source has at most 116 in a line


@pytest.mark.parametrize(("kind", "command"), [(TrainConfig, "train"), (CalibrateConfig, "calibrate")])
def test_versions_are_said(kind: type[TrainConfig] | type[CalibrateConfig], command: str) -> None:
    with pytest.raises(HelpRequested) as caught:
        parse_as(kind, command, ["--version"])
    said = f"pipesgd {__version__} (torch {torch.__version__}, Python {platform.python_version()})"
    assert str(caught.value) == said
    if kind is TrainConfig:
        with pytest.raises(HelpRequested, match=re.escape(said)):
            parse(["--version"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("", 0, "-m pipesgd.train "),
        ("--version", 0, version()),
        ("train", 2, "error: subcommand must be one of plan, predict, simulate, report, compare, keys; got 'train'\n"),
        ("pln", 2, "got 'pln' (did you mean plan?)\n"),
        ("predict --help", 0, "usage: pipesgd predict "),
        ("report", 2, "error: the following arguments are required: run (see pipesgd report --help)\n"),
        ("compare --help", 0, "usage: pipesgd compare "),
        ("plan --world-size 0", 2, "error: world-size must be a whole number of at least 1; got '0'\n"),
    ],
)
def test_the_package_lists_its_commands_and_runs_subcommands(
    words: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipesgd", *words.split()])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("pipesgd", run_name="__main__")
    out, err = capsys.readouterr()
    assert stop.value.code == code
    assert said in (err if code else out)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "plan --network 1GbE --world-size 2 --compute 1s --model mlp"])
def test_questions_about_time_load_no_torch(words: str) -> None:
    script = f"import sys; from pipesgd.__main__ import main; main({words.split()}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def help_of(*arguments: str) -> str:
    with pytest.raises(HelpRequested) as caught:
        parse(arguments)
    return str(caught.value)


def test_help_shows_the_options_that_people_need_first_and_help_all_every_one_with_its_default() -> None:
    first, text = help_of("--help"), help_of("--help-all")
    assert help_of("-h") == first
    assert set(re.findall(r"^  --(\w[\w-]*)", first, re.MULTILINE)) == set(BASIC["train"])
    assert f"--help-all lists all {len(TrainConfig().options())} options" in first
    assert "--config FILE" in first
    assert "--config FILE" in text
    defaults = TrainConfig().options()
    for name in defaults:
        assert f"--{name}" in text
    for section in ("Training data", "Model and loss", "Weight updates"):
        assert f"\n {section}" in text
    assert text.count("(default:") == sum(value is not None and value is not False for value in defaults.values())
    assert "None" not in text


@pytest.mark.parametrize("command", ["train", "calibrate"])
def test_help_fits_eighty_columns_and_says_each_thing_once(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    kind = TrainConfig if command == "train" else CalibrateConfig
    for words in ("--help", "--help-all"):
        with pytest.raises(HelpRequested) as request:
            parse_as(kind, command, [words])
        assert max(map(len, str(request.value).splitlines())) <= 80
        assert " Training data." in str(request.value)
        assert "data options" not in str(request.value)
        assert f"\ntorchrun --nproc-per-node 4 -m pipesgd.{command} " in str(request.value), "a line of its own"


@pytest.mark.parametrize("columns", ["0", "1", "20", "nonsense"])
def test_help_fits_no_screen_that_is_too_narrow_but_ends(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "--hidden-sizes" in help_of("--help")
    assert os.environ["COLUMNS"] == columns


def test_help_shows_the_choices_of_an_option() -> None:
    text = help_of("--help-all")
    sections = [getattr(TrainConfig(), section.name) for section in dataclasses.fields(TrainConfig)]
    chosen = {item.name: found for one in sections for item in dataclasses.fields(one)
              if (found := item.metadata.get("choices"))}  # fmt: skip
    assert len(chosen) > 15
    for name, choices in chosen.items():
        assert re.search(rf"--{name.replace('_', '-')}\s+{re.escape('|'.join(choices))}", text), name
        with pytest.raises(UserInputError, match=r"must be .*; got .?nonsense"):
            parse([f"--{name.replace('_', '-')}", "nonsense"])


@pytest.mark.parametrize(
    ("words", "world_size", "workers"),
    [
        ("", 4, 4),
        ("--strategy ps-sync --servers 4", 4, 4),
        ("--strategy ps-sync --server-placement dedicated", 4, 3),
        ("--strategy ps-async --servers 3 --server-placement dedicated", 4, 1),
        ("--strategy ps-sync --servers 3", 2, "servers must be at most 2 on 2 ranks with --server-placement colocated"),
        (
            "--strategy ps-sync --server-placement dedicated",
            1,
            "servers must be at most 0 on 1 rank with --server-placement dedicated",
        ),
    ],
)
def test_who_computes(words: str, world_size: int, workers: int | str) -> None:
    pipeline = parse(words.split()).pipeline
    if isinstance(workers, int):
        assert pipeline.workers(world_size) == workers
    else:
        with pytest.raises(UserInputError, match=workers):
            pipeline.workers(world_size)


def test_options_that_are_free_to_differ_exist() -> None:
    assert TrainConfig().options().keys() >= FREE_ON_RESUME
    one, other = parse(["--width", "2", "--output", "a"]), parse(["--width", "3", "--output", "b", "--lr", "1"])
    assert differing_options(one.options(), other.options(), free=FREE_BETWEEN_RANKS) == ["lr", "width"]
