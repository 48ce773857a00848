"""Fuzzed arguments of the commands: command lines, TOML files of options, quantities with units, and descriptions of
emulated accelerators."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import accelerators
from experiments.testbed.links import parse_latency, parse_loss, parse_rate, parse_slow_node
from pipesgd.calibration.options import CalibrateConfig
from pipesgd.cli import FOR_ONE_RUN, HelpRequested, as_toml, parse, parse_as
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from tests.fuzzing._cases import Target, absurd_number, complaint_about_line
from tests.fuzzing._mutations import NASTY_TOML, NASTY_WORDS, damaged_text, nested
from timing_model import units
from timing_model.cli import main as timing_model

MOST = 1e18
"""Number larger than anybody could want for an option of a run."""
SEEDS = ("seed", "data-seed")
DEFAULTS = TrainConfig().options()
CALIBRATE_DEFAULTS = CalibrateConfig().options()


def _value(chance: random.Random, default: Any) -> str:
    if chance.random() < 0.5:
        return chance.choice(NASTY_WORDS)
    if isinstance(default, int) and not isinstance(default, bool):
        return str(chance.choice([default, default + 1, 0, -1, 1, 2, 3, 10**6, 10**18, 10**30]))
    if isinstance(default, float):
        return repr(chance.choice([default, -default, 0.0, 10 * default, 1e-300, 1e300, float("nan")]))
    return str(default)


def _words(chance: random.Random, defaults: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for _ in range(chance.choice([1, 1, 2, 2, 3, 4, 6])):
        name = chance.choice(list(defaults))
        spelled = chance.choices([name, name[:-1], name.upper(), name.replace("-", "_")], [90, 4, 2, 4])[0]
        values = [_value(chance, defaults[name]) for _ in range(chance.choice([0, 1, 1, 1, 1, 1, 2, 3]))]
        if isinstance(defaults[name], bool) and chance.random() < 0.8:
            values = []
        if values and chance.random() < 0.25:
            words += [f"--{spelled}={values[0]}", *values[1:]]
        else:
            words += [f"--{spelled}", *values]
    if chance.random() < 0.05:
        words.append(chance.choice(NASTY_WORDS))
    return words


def make_command_line(chance: random.Random, folder: Path) -> tuple[str, list[str]]:
    """Draw the arguments of one of the commands."""
    command = chance.choices(["train", "calibrate", "timing-model"], [6, 2, 2])[0]
    if command != "timing-model":
        return command, _words(chance, DEFAULTS if command == "train" else CALIBRATE_DEFAULTS)
    values = {
        "--latency": ("50us", "0s", "1e-300s", "1e300s", "1us"),
        "--bandwidth": ("10Gbit/s", "1bit/s", "1e-300bit/s", "1e300GB/s"),
        "--compute": ("0.3s", "0s", "1e300s", "1e-300s"),
        "--parameters": ("61.1M", "0", "1", "1e18", "1e300"),
        "--world-size": ("4", "1", "2", "1000", "99999999999999999999"),
        "--width": ("1", "2", "64", "100000"),
        "--codec": ("fp32", "int8", "ternary"),
        "--epochs": ("1", "1000000"),
        "--cv": ("0", "0.5", "1e9"),
        "--persistence": ("0", "0.99", "1", "0.999999999999"),
        "--comm-cv": ("0", "0.5", "1e8"),
        "--slow-ranks": ("1.5", "1", "1e8"),
        "--iterations": ("1000", "1", "1000000"),
        "--price": ("1.20/h", "0/h", "1.20", "1e300/h", "1e-300/d", "$1/h"),
        "--split": ("fsdp2", "tensor", "fsdp"),
        "--members": ("2", "1", "4", "3", "1000"),
        "--activations": ("8MiB", "0B", "1e18B", "8"),
        "--split-share": ("1", "0.5", "0", "1e-300", "2"),
        "--memory": ("1GB", "0B", "1B", "1e18B"),
        "--optimizer-state": ("2", "0", "1e8", "-1"),
        "--ranks-per-node": ("2", "1", "4", "3"),
        "--inner-latency": ("10us", "0s", "1e300s"),
        "--inner-bandwidth": ("20GB/s", "1bit/s", "1e300GB/s"),
    }
    words = [chance.choice(["predict", "predict", "plan", "simulate"]), "--json"]
    for name in (*list(values)[:5], *chance.sample(list(values)[5:], chance.randrange(5))):
        usual = chance.random() < 0.6
        words += [name, values[name][0] if usual else chance.choice((*values[name], chance.choice(NASTY_WORDS)))]
    return command, words


def try_command_line(case: tuple[str, list[str]], folder: Path) -> str | None:
    """Read the arguments, as far as the options; the timing model also answers."""
    command, words = case
    if command == "timing-model":
        return try_timing_model(words)
    try:
        config = parse(words) if command == "train" else parse_as(CalibrateConfig, "calibrate", words)
    except HelpRequested:
        return None
    found = _absurd_option(config.options())
    return _round_trip(config, folder) if found is None and isinstance(config, TrainConfig) else found


def try_timing_model(words: list[str]) -> str | None:
    """Ask the timing model, which must answer with possible numbers or refuse in one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = timing_model(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
    if code == 2:
        line = err.getvalue().removesuffix("\n")
        if not line.startswith("error: "):
            return f"an error must begin with 'error: '; got {line[:200]!r}"
        if (complaint := complaint_about_line(line)) is not None:
            return complaint
        raise UserInputError(line)
    text = out.getvalue()
    if code != 0 or err.getvalue():
        return f"exit code {code}, {err.getvalue()[:200]!r}"
    found = next((word for word in ("NaN", "Infinity") if word in text), None)
    return None if found is None else f"{found} in the answer"


def _absurd_option(options: dict[str, Any]) -> str | None:
    for name, value in options.items():
        if name not in SEEDS and (found := absurd_number(value, MOST)) is not None:
            return f"{name} {str(found)[:50]} was accepted"
        if isinstance(value, str) and "\0" in value:
            return f"{name} with a NUL was accepted"
    return None


def _round_trip(config: TrainConfig, folder: Path) -> str | None:
    """Check that the output of ``--dry-run`` reads back the same."""
    path = folder / "printed.toml"
    path.write_text(as_toml(config), encoding="utf-8")
    try:
        again = parse(["--config", str(path)]).options()
    except UserInputError as refusal:
        return f"what --dry-run prints is refused: {refusal}"
    options = config.options()
    changed = [name for name in options if name not in FOR_ONE_RUN and again[name] != options[name]]
    return f"what --dry-run prints reads back otherwise: {changed}" if changed else None


def make_toml(chance: random.Random, folder: Path) -> Path:
    """Write a file for ``--config``."""
    whole = as_toml(TrainConfig())
    names = [*DEFAULTS] * 5 + ["x", "Config", "help", "config", "__class__"]
    way = chance.random()
    if way < 0.55:
        lines = [f"{chance.choice(names)} = {chance.choice(NASTY_TOML)}" for _ in range(chance.choice([1, 1, 2, 3]))]
        text = "\n".join(lines)
    elif way < 0.85:
        text = damaged_text(chance, whole, "'\"[]{}\0\x9f=\n9.#-")
    elif way < 0.95:
        text = f"{chance.choice(['lr', 'codec', 'x'])} = " + nested(chance, *chance.choice([("[", "]"), ("{a=", "}")]))
    else:
        text = ".".join(["a"] * chance.choice([10, 1000, 20_000])) + " = 1"
    path = folder / "options.toml"
    path.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    return path


def try_toml(case: Path, folder: Path) -> str | None:
    """Read the file as training does."""
    config = parse(["--config", str(case)])
    return _absurd_option(config.options()) or _round_trip(config, folder)


QUANTITIES: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "seconds": (lambda text: units.parse_seconds("latency", text), tuple(units.SECONDS)),
    "bandwidth": (lambda text: units.parse_bandwidth("bandwidth", text), tuple(units.BYTES_PER_SECOND)),
    "count": (lambda text: units.parse_count("parameters", text), tuple(units.COUNT)),
    "bytes": (lambda text: units.parse_bytes("bucket", text), tuple(units.NBYTES)),
    "rate": (parse_rate, ("mbit", "gbit", "kbit", "bit")),
    "delay": (parse_latency, ("ms", "us", "s")),
    "loss": (parse_loss, ("%", "")),
    "slow node": (parse_slow_node, ("mbit", "gbit")),
    "price": (lambda text: units.parse_price("price", text), tuple(units.PER_SECOND)),
}
WITHOUT_UNIT = ("count", "loss")
"""Quantities that may have no unit."""
NUMBERS = (
    *("0", "00", "1", "1.", ".5", "-1", "+1", "-0", "1e5", "1E05", "1e308", "1e309", "1e-320", "1e99999", "9" * 300),
    *("9" * 400, "\u0663", "\uff11\uff12", "\u0967", "\u00b2", "\u00bd", "1_000", "1,5", "0x1F", "nan", "inf", "1e"),
    *("", "1 2", "1:5", "0:1", "0:1e400", "\u0663:5"),
)
UNITS = ("\u00b5s", "Gb", "foo", "s", "B", "%", "\uff11", "\0", "\u216f")


def make_quantity(chance: random.Random, folder: Path) -> tuple[str, str]:
    """Draw a kind of quantity, and its text."""
    kind = chance.choice(list(QUANTITIES))
    known = QUANTITIES[kind][1]
    number = chance.choice(NUMBERS)
    unit = chance.choice([*known, *known, chance.choice(UNITS)])
    return kind, number + chance.choice(["", "", " ", "\t", "\u00a0"]) + unit


def try_quantity(case: tuple[str, str], folder: Path) -> str | None:
    """Read the quantity, which must have a unit and digits of ASCII."""
    kind, text = case
    value = QUANTITIES[kind][0](text)
    if (found := absurd_number(value, MOST)) is not None:
        return f"{found!r} was accepted"
    if kind not in WITHOUT_UNIT and not text.rstrip()[-1:].isalpha():
        return "a quantity without a unit was accepted"
    return _foreign_digits(text)


def _foreign_digits(text: str) -> str | None:
    """Return a complaint if ``text``, which was accepted, has digits that are not ASCII."""
    foreign = any(character.isdigit() and not character.isascii() for character in text)
    return "digits that are not ASCII were accepted" if foreign else None


ACCELERATOR = {
    "forward": ("0.25", "0", "1", "-0.5"),
    "jitter": ("0.1", "0", "-1", "1e15"),
    "persistence": ("0.9", "0", "1", "0.9999"),
    "slow": ("3x1.5", "0x2", "3x0", "3", "x", "3x1e15", "-1x2", "3x"),
    "model": ("mlp", "convnet", "", "mlp=1"),
    "speed": ("1",),
}
"""Options of an accelerator, and values that are right or nearly so."""
HOPELESS_SECONDS = 1e-6
"""Time of a pass in which no model can be computed."""


def make_accelerator(chance: random.Random, folder: Path) -> tuple[bool, str]:
    """Draw whether an accelerator is synthetic, and its description, of which most are nearly right."""
    unusual = chance.choice(NUMBERS) + chance.choice(UNITS)
    seconds = chance.choice(["75ms", "75ms", "1us", "0.1us", "1ns", "0s", unusual])
    parts = [seconds]
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        name = chance.choice(list(ACCELERATOR))
        value = chance.choice([*ACCELERATOR[name], *ACCELERATOR[name], chance.choice((*NUMBERS, *NASTY_WORDS))])
        parts.append(chance.choices([f"{name}={value}", name, value], [18, 1, 1])[0])
    return chance.random() < 0.5, ",".join(parts)


def try_accelerator(case: tuple[bool, str], folder: Path) -> str | None:
    """Read the description, and train a model on an accelerator that is too fast for it, which must be refused."""
    synthetic, text = case
    accelerator, _ = accelerators.parse(text, synthetic=synthetic)
    numbers = [accelerator.seconds, accelerator.forward, accelerator.jitter, accelerator.persistence]
    if (found := absurd_number([*numbers, dict(accelerator.slow)], MOST)) is not None:
        return f"{found!r} was accepted"
    if not accelerator.synthetic and accelerator.seconds <= HOPELESS_SECONDS:
        rank = max(accelerator.slow, default=0) + 1  # one that is not slow
        model = accelerators.Emulated(nn.Linear(8, 8), accelerator, rank=rank)
        for _ in range(accelerators.JUDGED + 1):
            model(torch.ones(4, 8)).sum().backward()
        return "an accelerator that is shorter than its real part was accepted"
    return _foreign_digits(text.partition("model=")[0])


TARGETS = (
    Target("command lines", 2000, make_command_line, try_command_line, (UserInputError,)),
    Target("TOML options", 1500, make_toml, try_toml, (UserInputError,)),
    Target("quantities", 2000, make_quantity, try_quantity, (ValueError,)),
    Target("accelerators", 1000, make_accelerator, try_accelerator, (UserInputError,)),
)
