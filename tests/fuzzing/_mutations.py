"""Values that break parsers, and ways to damage a text or a file."""

from __future__ import annotations

import random

NASTY_WORDS = (
    *("", " ", "0", "-1", "-0.0", "1", "2", "3", "64", "65", "1.5", "1e9", "1e30", "1e308", "1e309", "1e-320"),
    *("9" * 400, "nan", "NaN", "inf", "-inf", "Infinity", "0x10", "1_000", "+5", "1e", "--", "-", "=", "a b"),
    *("\u0663", "\uff11\uff12", "\u00b2", "\u00e9", "\U0001f4a5", "\ud800", "\0", "\n", "\t", "\x1b[31m", "a" * 300),
    *("true", "True", "none", "None", "null", "auto", "AUTO", "ring", "rnig", "int8", "fp32", "ps-sync", "text:"),
    *("'", '"', "\\", "%s", "{0}", "$HOME", "~", "../..", "/dev/null", "/dev/zero", "/proc/self/mem", "text:/"),
    *("--help", "--output", "--config", "[]", "[1,2]", "{}"),
)
NASTY_TOML = (
    *("0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "1e308", "1e400", "9" * 400, "-" + "9" * 30),
    *("true", "false", '""', '"x"', '"auto"', '"a\\nb"', '"\\u0000"', "'''a\nb'''", '"--help"', '"ring"', "1979-05-27"),
    *("[]", "[1, 2]", '["a", 1]', "[[1]]", "[true]", "{}", "{a = 1}", '["--overwrite"]', "0x10", "1_000", "+5"),
    *("9223372036854775808", "07:32:00", "0x" + "f" * 5000),
)
NASTY_JSON = (
    *("0", "-1", "1.5", "1e400", "-1e400", "1e-400", "NaN", "Infinity", "9" * 5000, "null", "true", '""', '"x"'),
    *('"\\ud800"', "[]", "{}", "[1]", '{"a": 1}', "[" * 3000 + "]" * 3000, "[" * 100_000),
    '{"a":' * 3000 + "1" + "}" * 3000,
)


def damaged(chance: random.Random, content: bytes) -> bytes:
    """Return ``content`` cut, with bits or bytes changed, a part repeated or missing, or other content altogether."""
    way = chance.randrange(7)
    if way == 0 or not content:
        return chance.randbytes(chance.choice([0, 1, 16, 1000]))
    at = chance.randrange(len(content))
    until = min(len(content), at + chance.choice([1, 4, 30, 300]))
    if way == 1:
        return content[:at]
    if way == 2:
        return content[:at] + content[until:]
    if way == 3:
        return content[:until] + content[at:]
    if way == 4:
        return content + chance.choice([b"\0" * 50, b"\n", b"{}", chance.randbytes(100)])
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        where = chance.randrange(len(changed))
        changed[where] = changed[where] ^ 1 << chance.randrange(8) if way == 5 else chance.randrange(256)
    return bytes(changed)


def damaged_text(chance: random.Random, text: str, characters: str) -> str:
    """Return ``text`` as ``damaged`` leaves it, or with some of ``characters`` in it."""
    if chance.random() < 0.4:
        return damaged(chance, text.encode()).decode("latin-1")
    changed = list(text)
    for _ in range(chance.choice([1, 1, 2, 5])):
        changed[chance.randrange(len(changed))] = chance.choice(characters)
    return "".join(changed)


def nested(chance: random.Random, opening: str, closing: str) -> str:
    """Return deep nesting, closed or not."""
    depth = chance.choice([10, 500, 5_000, 50_000])
    return opening * depth + closing * chance.choice([0, depth])
