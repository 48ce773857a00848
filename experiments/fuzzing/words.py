"""Fuzzed arguments of the commands: command lines, TOML files of options, and quantities with units."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.fuzzing.cases import Target, absurd_number, complaint_about_line
from experiments.fuzzing.mutations import NASTY_TOML, NASTY_WORDS, damaged_text, nested
from experiments.testbed.links import parse_latency, parse_loss, parse_rate, parse_slow_node
from pipesgd.calibration.options import CalibrateConfig
from pipesgd.cli import FOR_ONE_RUN, HelpRequested, as_toml, parse, parse_as
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
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
    }
    words = [chance.choice(["predict", "predict", "plan", "simulate"]), "--json"]
    for name in (*list(values)[:5], *chance.sample(list(values)[5:], chance.randrange(3))):
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
}
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
    """Read the quantity, whose digits must be those of ASCII."""
    kind, text = case
    value = QUANTITIES[kind][0](text)
    if (found := absurd_number(value, MOST)) is not None:
        return f"{found!r} was accepted"
    foreign = any(character.isdigit() and not character.isascii() for character in text)
    return "digits that are not ASCII were accepted" if foreign else None


TARGETS = (
    Target("command lines", 2000, make_command_line, try_command_line, (UserInputError,)),
    Target("TOML options", 1500, make_toml, try_toml, (UserInputError,)),
    Target("quantities", 2000, make_quantity, try_quantity, (ValueError,)),
)
