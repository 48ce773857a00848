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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--width 0", "width must be at least 1; got 0"),
        ("--width -1", "width must be at least 1; got -1"),
        ("--width 1.5", "width must be a whole number or auto; got '1.5'"),
        ("--width 1000000", "width must be at most 64, since every unit costs a copy of the gradient; got 1000000"),
        ("--width two", "width must be a whole number or auto; got 'two'"),
        ("--width", "width must have a value; got none"),
        ("--width 2 --width 3", "width must be given once; got it 2 times"),
        ("--widht 2", "every option must be one that --help-all lists; got --widht (did you mean width?)"),
        (
            "--learning-rate 0.1",
            "every option must be one that --help-all lists; got --learning-rate (did you mean lr?)",
        ),
        (
            "--num_workers 2",
            "every option must be one that --help-all lists; got --num-workers (did you mean loader-workers?)",
        ),
        ("width", "every option must begin with --; got 'width' (did you mean --width?)"),
        ("--warmup-iterations -5", "warmup-iterations must be at least 0; got -5"),
        ("--lr fast", "lr must be a number; got 'fast'"),
        ("--lr nan", "lr must be above 0; got nan"),
        ("--lr inf", "lr must be at most 1e+15; got inf"),
        ("--lr 0", "lr must be above 0; got 0.0"),
        ("--strategy easgd-async --moving-rate 2", "moving-rate must be at most 1; got 2.0"),
        (
            "--strategy easgd-async --outer elastic",
            "outer must be left out with --strategy easgd-async, which has no use for it (it belongs to pipelined); "
            "got 'elastic'",
        ),
        ("--lr-scaling sqrt", "lr-scaling must be none or linear; got 'sqrt'"),
        ("--momentum 1", "momentum must be below 1; got 1.0"),
        ("--optimizer nesterov --momentum 0", "momentum must be above 0 with --optimizer nesterov; got 0"),
        (
            "--optimizer adam --momentum 0.5",
            "momentum must be left out with --optimizer adam, which has no use for it (it belongs to sgd or nesterov); "
            "got 0.5",
        ),
        (
            "--data-dir somewhere",
            "data-dir must be left out with --dataset digits, which has no use for it (it belongs to one of mnist, "
            "fashion-mnist, cifar100, images, module:function); got somewhere",
        ),
        (
            "--dataset mnist --image-size 32",
            "image-size must be left out with --dataset mnist, which has no use for it (it belongs to images or "
            "module:function); got 32",
        ),
        ("--weight-decay -1", "weight-decay must be at least 0; got -1.0"),
        (
            "--optimizer sdg",
            "optimizer must be one of sgd, nesterov, adam, adamw, adagrad, muon; got 'sdg' (did you mean sgd?)",
        ),
        ("--accumulation 0", "accumulation must be at least 1; got 0"),
        ("--local-steps 0", "local-steps must be at least 1; got 0"),
        (
            "--local-steps 4 --strategy ps-sync",
            "local-steps must be left out with --strategy ps-sync, which has no use for it (it belongs to pipelined or "
            "easgd-async); got 4",
        ),
        (
            "--strategy ddp --outer elastic",
            "outer must be left out with --strategy ddp, which has no use for it (it belongs to pipelined); "
            "got 'elastic'",
        ),
        ("--local-steps 2 --outer elastic --moving-rate 1.01", "moving-rate must be at most 1; got 1.01"),
        ("--fragments 0", "fragments must be at least 1; got 0"),
        (
            "--fragments 2 --strategy ddp",
            "fragments must be left out with --strategy ddp, which has no use for it (it belongs to pipelined); got 2",
        ),
        ("--clip-norm 0", "clip-norm must be above 0; got 0.0"),
        ("--clip-value -1", "clip-value must be above 0; got -1.0"),
        ("--precision fp8", "precision must be one of fp32, bf16, fp16; got 'fp8'"),
        ("--precision fp16 --loss-scale 0", "loss-scale must be above 0; got 0.0"),
        ("--precision fp16 --loss-scale 1e39", "loss-scale must be at most 1.70141e+38; got 1e+39"),
        (
            "--loss-scale 8 --precision bf16",
            "loss-scale must be left out with --precision bf16, which has no use for it (it belongs to fp16); got 8.0",
        ),
        ("--buffers mean", "buffers must be one of average, rank-0, own; got 'mean'"),
        ("--schedule linear", "schedule must be one of constant, cosine, one-cycle; got 'linear'"),
        (
            "--dataset fashion_mnist",
            "dataset must be one of digits, mnist, fashion-mnist, cifar100, images, python-stdlib, text:PATH, "
            "module:function; got 'fashion_mnist' (did you mean fashion-mnist?)",
        ),
        (
            "--dataset text:",
            "dataset must be one of digits, mnist, fashion-mnist, cifar100, images, python-stdlib, text:PATH, "
            "module:function; got 'text:' (did you mean text:PATH?)",
        ),
        ("--dataset python-stdlib --context 0", "context must be at least 1; got 0"),
        (
            "--context 128",
            "context must be left out with --dataset digits, which has no use for it "
            "(it belongs to one of python-stdlib, text:PATH, module:function); got 128",
        ),
        (
            "--model resnet",
            "model must be one of mlp, convnet, resnet18, alexnet, transformer, module:function; "
            "got 'resnet' (did you mean resnet18?)",
        ),
        (
            "--model alexnet --hidden-sizes 30",
            "hidden-sizes must be left out with --model alexnet, which has no use for it "
            "(it belongs to mlp or module:function); got (30,)",
        ),
        (
            "--layers 4",
            "layers must be left out with --model mlp, which has no use for it "
            "(it belongs to transformer or module:function); got 4",
        ),
        ("--loss mse", "loss must be cross-entropy or module:function; got 'mse'"),
        *(
            (
                f"--{option} {name}",
                f"{option} must be module:function, with a module as Python imports it, such as package.file:make; "
                f"got {name!r}",
            )
            for option in ("dataset", "model", "loss")
            for name in (
                "models.py:make",
                "folder/models:make",
                "models:",
                ":make",
                "models:make:other",
                "models:make=",
            )
        ),
        ("--model transformer --layers 0", "layers must be at least 1; got 0"),
        ("--model transformer --heads 0", "heads must be at least 1; got 0"),
        ("--model transformer --embedding 130", "embedding must be a multiple of --heads 4; got 130"),
        ("--hidden-sizes 500 0", "hidden-sizes must be at least 1; got 0"),
        (
            "--strategy pipeline",
            "strategy must be one of pipelined, ddp, ps-sync, ps-async, easgd-async, local; "
            "got 'pipeline' (did you mean pipelined?)",
        ),
        ("--strategy ddp --ddp-hook fp8", "ddp-hook must be one of none, fp16, bf16; got 'fp8'"),
        (
            "--strategy ddp --width 3",
            "width must be left out with --strategy ddp, which has no use for it (it belongs to pipelined); got 3",
        ),
        (
            "--staleness-bound 2",
            "staleness-bound must be left out with --strategy pipelined, which has no use for it "
            "(it belongs to ps-async); got 2",
        ),
        ("--strategy ps-async --staleness-bound -1", "staleness-bound must be at least 0; got -1"),
        ("--strategy ps-sync --servers 0", "servers must be at least 1; got 0"),
        ("--strategy ps-sync --server-placement apart", "server-placement must be colocated or dedicated; got 'apart'"),
        (
            "--codec int5",
            "codec must be one of fp32, truncate16, bf16, fp16, int8, int4, ternary, qsgd, sign, topk, powersgd, "
            "module:function; got 'int5' (did you mean int8?)",
        ),
        ("--codec int8 --codec-block 0", "codec-block must be at least 1; got 0"),
        ("--codec int8 --codec-block 10000000", "codec-block must be at most 1048576; got 10000000"),
        (
            "--codec-block 64",
            "codec-block must be left out with --codec fp32, which has no use for it "
            "(it belongs to one of int8, int4, ternary, qsgd, sign, module:function); got 64",
        ),
        ("--codec int8 --rounding up", "rounding must be nearest or stochastic; got 'up'"),
        ("--codec int8 --error-feedback yes", "error-feedback must be on or off; got 'yes'"),
        (
            "--codec ternary --rounding stochastic --error-feedback on",
            "error-feedback must be off with --codec ternary --rounding stochastic, whose errors are larger than most "
            "values: residuals would grow until they are not finite; got on",
        ),
        ("--codec qsgd --qsgd-levels 0", "qsgd-levels must be at least 1; got 0"),
        ("--codec qsgd --qsgd-levels 128", "qsgd-levels must be at most 127; got 128"),
        ("--codec topk --density 0", "density must be above 0; got 0.0"),
        ("--codec topk --density 1.5", "density must be at most 1; got 1.5"),
        ("--codec topk --density-warmup -1", "density-warmup must be at least 0; got -1"),
        ("--codec topk --momentum-correction 1", "momentum-correction must be below 1; got 1.0"),
        ("--codec powersgd --low-rank 0", "low-rank must be at least 1; got 0"),
        (
            "--strategy ddp --codec int8",
            "codec and its options must be left out with --strategy ddp, which has no use for them (they belong to "
            "pipelined); got --codec int8",
        ),
        ("--segment-bytes 0", "segment-bytes must be at least 1; got 0"),
        ("--connections 0", "connections must be at least 1; got 0"),
        ("--connections 17", "connections must be at most 16, which each rank opens to every other; got 17"),
        ("--buckets 0", "buckets must be at least 1; got 0"),
        ("--buckets 1.5", "buckets must be a whole number, or have a unit such as 25MiB; got '1.5'"),
        (
            "--strategy ddp --buckets 4",
            "buckets must be left out with --strategy ddp, which has no use for it (it belongs to pipelined); got '4'",
        ),
        ("--reduce row", "reduce must be one of matrix, rows, factors, auto; got 'row' (did you mean rows?)"),
        (
            "--reduce rows --strategy ddp",
            "reduce must be left out with --strategy ddp, which has no use for it (it belongs to pipelined); "
            "got 'rows'",
        ),
        (
            "--all-reduce native --connections 2",
            "connections and segment-bytes must be left out with --all-reduce native, torch's own",
        ),
        ("--rate-limit 50", "rate-limit must have a unit such as 10Gbit/s; got '50'"),
        (
            "--rate-limit 50Mb",
            "rate-limit must have a unit such as 10Gbit/s; got '50Mb' (did you mean 50Mbit/s or 50MB/s?)",
        ),
        ("--rate-limit 0.5mbit", "rate-limit must be at least 1mbit; got '0.5mbit'"),
        (
            "--rate-limit 50mbit --all-reduce native",
            "rate-limit must be left out with --all-reduce native, which torch sends unpaced; got '50mbit'",
        ),
        *(
            (
                f"--rate-limit 50mbit --strategy {strategy}",
                f"rate-limit must be left out with --strategy {strategy}, which has no use for it (it belongs to "
                "pipelined); got '50mbit'",
            )
            for strategy in ("ddp", "ps-sync", "ps-async", "local")
        ),
        (
            "--all-reduce rign",
            "all-reduce must be one of ring, halving-doubling, recursive-doubling, all-to-all, hierarchical, "
            "native, module:function; got 'rign' (did you mean ring?)",
        ),
        ("--epochs 3 --iterations 4", "epochs and iterations must not both be given; leave one of them out"),
        ("--epochs 0", "epochs must be at least 1; got 0"),
        ("--iterations 0", "iterations must be at least 1; got 0"),
        ("--batch-size 0", "batch-size must be at least 1; got 0"),
        ("--timeout 0", "timeout must be from 0.1 to 1,000,000 seconds; got 0.0"),
        ("--timeout 1e15", "timeout must be from 0.1 to 1,000,000 seconds; got 1000000000000000.0"),
        ("--on-nonfinite ignore", "on-nonfinite must be stop or skip; got 'ignore'"),
        ("--check-replicas 0", "check-replicas must be at least 1; got 0"),
        ("--evaluate-iterations 0", "evaluate-iterations must be at least 1; got 0"),
        ("--checkpoint-iterations 0", "checkpoint-iterations must be at least 1; got 0"),
        ("--keep-checkpoints 0", "keep-checkpoints must be at least 1; got 0"),
        ("--device gpu", "device must be cpu or cuda; got 'gpu' (did you mean cpu?)"),
        (
            "--resume --overwrite",
            "resume and overwrite must not both be given: one keeps what the other deletes",
        ),
        ("--accumulation 1" + "0" * 30, "accumulation must be at most 1e+15; got 1" + "0" * 30),
        (
            "--batch-size " + "9" * 400,
            "batch-size must be at most 1e+15; got " + "9" * 30 + "..." + "9" * 20 + " (400 characters)",
        ),
        ("--lr 1e300", "lr must be at most 1e+15; got 1e+300"),
        ("--width \u0663", "numbers must be written in the digits 0 to 9; got '\u0663'"),
        ("--lr=\uff11", "numbers must be written in the digits 0 to 9; got '\uff11'"),
        ("--output a\0b", "options must not hold a NUL character; got 'a\\x00b'"),
        ("--config", "config must be a TOML file; got nothing after --config"),
        ("--config nowhere.toml", "config must be a readable file; got nowhere.toml: No such file or directory"),
    ],
)
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


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("", 0, "-m pipesgd.train "),
        ("--version", 0, version()),
        ("train", 2, "error: subcommand must be one of plan, predict, simulate; got 'train'\n"),
        ("pln", 2, "got 'pln' (did you mean plan?)\n"),
        ("predict --help", 0, "usage: pipesgd predict "),
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
    for section in ("data", "model", "optimization", "pipeline", "compression", "planning", "run"):
        assert f" {section} options" in text
    assert text.count("(default:") == sum(value is not None and value is not False for value in defaults.values())
    assert "None" not in text


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
