"""Options of codecs, the codecs they make, and the kernels' cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipesgd.codecs.flat import CompressionConfig
from pipesgd.codecs.options import BLOCK_CODECS, DENSE_CODECS, codec_named
from pipesgd.errors import UserInputError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("options", "block", "stochastic", "gives_back", "words"),
    [
        ({}, 1, False, False, "fp32"),
        ({"codec": "truncate16"}, 32, False, False, "truncate16"),
        ({"codec": "bf16", "error_feedback": "on"}, 32, False, True, "bf16 with error feedback"),
        ({"codec": "fp16"}, 32, False, False, "fp16"),
        ({"codec": "int8"}, 1024, False, False, "int8 in blocks of 1024"),
        (
            {"codec": "int8", "rounding": "stochastic", "error_feedback": "on", "codec_block": 7},
            *(7, True, True, "int8 in blocks of 7 rounded stochastically with error feedback"),
        ),
        ({"codec": "int4"}, 256, False, True, "int4 in blocks of 256 with error feedback"),
        (
            {"codec": "int4", "rounding": "stochastic"},
            *(256, True, False, "int4 in blocks of 256 rounded stochastically"),
        ),
        ({"codec": "ternary"}, 1024, True, False, "ternary in blocks of 1024 rounded stochastically"),
        (
            {"codec": "ternary", "error_feedback": "on"},
            *(1024, False, True, "ternary in blocks of 1024 with error feedback"),
        ),
        (
            {"codec": "ternary", "error_feedback": "off"},
            *(1024, True, False, "ternary in blocks of 1024 rounded stochastically"),
        ),
        ({"codec": "ternary", "rounding": "stochastic"}, 1024, True, False, None),
        ({"codec": "ternary", "rounding": "nearest", "error_feedback": "off"}, 1024, False, False, None),
        ({"codec": "qsgd"}, 64, True, False, "qsgd in blocks of 64 with 7 levels rounded stochastically"),
        (
            {"codec": "qsgd", "error_feedback": "on", "codec_block": 32},
            *(32, False, True, "qsgd in blocks of 32 with 7 levels with error feedback"),
        ),
        ({"codec": "qsgd", "rounding": "nearest"}, 64, False, True, None),
        ({"codec": "qsgd", "rounding": "nearest", "qsgd_levels": 8}, 64, False, False, None),
        ({"codec": "sign"}, 1024, False, True, "sign in blocks of 1024 with error feedback"),
        ({"codec": "sign", "error_feedback": "off"}, 1024, False, False, "sign in blocks of 1024"),
    ],
)
def test_defaults_and_the_codec_made(
    options: dict[str, Any], block: int, stochastic: bool, gives_back: bool, words: str | None
) -> None:
    chosen = CompressionConfig(**options).described
    codec = chosen.make()
    assert (codec.name, codec.block) == (chosen.codec, block)
    assert codec.unbiased == (stochastic or chosen.codec == "fp32")
    assert codec.in_place == (chosen.codec == "fp32")
    assert (chosen.stochastic, chosen.gives_back) == (stochastic, gives_back)
    assert words is None or chosen.describe() == words


def test_every_dense_codec_can_be_made() -> None:
    assert [codec_named(name).make().name for name in DENSE_CODECS] == list(DENSE_CODECS)
    for name in BLOCK_CODECS:
        assert codec_named(name, block=11).make().block == 11
    for levels, bits in ((1, 2), (2, 4), (7, 4), (8, 8), (127, 8)):
        codec = codec_named("qsgd", levels=levels).make()
        assert codec.wire_bytes(64) == 4 + 64 * bits // 8


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"block": 196}, 195),
        ({"levels": 1}, 3),
        ({"levels": 8, "rounding": "stochastic"}, 63),
        ({"levels": 127, "block": 1 << 20}, 64515),
    ],
)
def test_error_feedback_with_qsgd_needs_small_blocks(options: dict[str, Any], most: int) -> None:
    with pytest.raises(UserInputError, match=f"codec-block must be at most {most} with --codec qsgd"):
        codec_named("qsgd", error_feedback=True, **options)
    assert codec_named("qsgd", error_feedback=True, **{**options, "block": most}).gives_back


def test_no_block_is_small_enough_for_error_feedback_with_one_level_that_is_rounded_stochastically() -> None:
    """The least block that the message named was 0, which is refused."""
    with pytest.raises(
        UserInputError, match=r"^error-feedback must be off with --codec qsgd --qsgd-levels 1 .*; got on$"
    ):
        codec_named("qsgd", levels=1, rounding="stochastic", error_feedback=True, block=1)
    codec_named("qsgd", levels=1, rounding="stochastic", error_feedback=False, block=1)


DECODE_ONCE = """
import torch
from pipesgd.codecs.options import Bf16
from pipesgd.codecs.kernels import cpu
values = torch.zeros(1)
Bf16().make().decode(torch.tensor([0x80, 0x3F], dtype=torch.uint8), values)
assert values.tolist() == [1.0]
stats = cpu._decode_words.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def test_kernels_are_compiled_once_on_a_machine(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs = []
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-c", DECODE_ONCE], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(process.stdout.split())
    assert outputs == [["0", "1"], ["1", "0"]]
