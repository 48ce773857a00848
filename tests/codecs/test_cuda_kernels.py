"""Triton's kernels make the same bytes as those on the CPU: in Triton's interpreter, on a GPU if there is one, and,
as far as the compiled code shows it, without one."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipesgd.codecs.flat import CompressionConfig
from pipesgd.codecs.kernels import kernels_for
from pipesgd.errors import UserInputError

if sys.platform != "linux" or os.uname().machine != "x86_64":
    pytest.skip("Triton has wheels for Linux on x86-64 alone", allow_module_level=True)

CODECS = [
    # Blocks smaller than a byte, of a fractional number of bytes, and of more than one tile.
    {"codec": "int8", "codec_block": 37},
    {"codec": "int8", "codec_block": 1030, "rounding": "stochastic"},
    {"codec": "int4", "codec_block": 41},
    {"codec": "int4", "codec_block": 2101, "rounding": "stochastic"},
    {"codec": "ternary", "codec_block": 3},
    {"codec": "ternary", "codec_block": 42, "rounding": "stochastic"},
    {"codec": "qsgd", "codec_block": 50},
    {"codec": "qsgd", "codec_block": 2050, "rounding": "nearest", "error_feedback": "off"},
    {"codec": "qsgd", "codec_block": 39, "qsgd_levels": 1},
    {"codec": "qsgd", "codec_block": 33, "qsgd_levels": 100},
    {"codec": "sign", "codec_block": 45},
    {"codec": "sign", "codec_block": 8203},
    {"codec": "truncate16"},
    {"codec": "bf16"},
    {"codec": "fp16"},
]
LARGE = 1000
FLOATS = {"truncate16": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}
KEY = 0xDEADBEEF


def names(codec: dict[str, Any]) -> str:
    return " ".join(str(value) for value in codec.values())


def ordinary(numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) * 3


def special(block: int) -> torch.Tensor:
    """Return a block of each kind that is treated specially, and an ordinary one, each with zeros of both signs."""
    blocks = [ordinary(block, seed).abs() + 0.1 for seed in range(8)]
    for values, factor in zip(blocks, (0.0, -0.0, 1e-42, 1e-31, 3e37, 1.0, 1.0, 70000.0), strict=True):
        values *= factor
    blocks[3][block // 2] = 2.0**-100
    blocks[5][block // 2] = float("inf")
    blocks[6][-1] = float("nan")
    for values in blocks[2:5]:
        values[::2] *= -1
        values[-1] = -0.0
    return torch.cat(blocks)


def unlike(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> list[str]:
    """Return a line if any bits differ, except those of NaNs."""
    ours = ours.cpu()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    differ = (ours.view(bits) != theirs.view(bits)) & ~(ours.isnan() & theirs.isnan())
    return [f"{what}: {int(differ.sum())} of {differ.numel()} differ"] if differ.any() else []


def differences(options: dict[str, Any], device: str, values: torch.Tensor, given: tuple[bool, bool]) -> list[str]:
    """Return the differences between the kernels for GPUs, on tensors of ``device``, and those for CPUs."""
    here, there = CompressionConfig(**options).described.make(), CompressionConfig(**options).described.make("cuda")
    numel = values.numel()
    message = torch.empty(here.wire_bytes(numel), dtype=torch.uint8)
    here.encode(ordinary(numel, 1), None, message, 5)
    results = []
    for codec, place in ((here, "cpu"), (there, device)):
        received = message.to(place) if given[0] else None
        residual = ordinary(numel, 2).to(place) * 1e-3 if given[1] else None
        # Bytes that a kernel fails to write must show.
        wire = torch.full((codec.wire_bytes(numel),), 0xA5, dtype=torch.uint8, device=place)
        if received is None:
            codec.encode(values.clone().to(place), residual, wire, KEY)
        else:
            codec.decode_add_encode(received, values.clone().to(place), residual, wire, KEY)
        decoded, added = torch.full((numel,), 9.0, device=place), ordinary(numel, 3).to(place)
        codec.decode(wire, decoded)
        codec.decode_add(wire, added)
        results.append((wire, residual, decoded, added))
    (wire, residual, decoded, added), theirs = results[1], results[0]
    blocks = -(-numel // here.block)
    if options["codec"] in FLOATS:
        split, floats = wire.numel(), FLOATS[options["codec"]]
    else:
        split, floats = (8 if options["codec"] == "sign" else 4) * blocks, torch.float32
    found = unlike("floats on the wire", wire[:split].view(floats), theirs[0][:split].view(floats))
    found += unlike("whole numbers on the wire", wire[split:], theirs[0][split:])
    found += unlike("decoded", decoded, theirs[2]) + unlike("added", added, theirs[3])
    if residual is not None:
        found += unlike("residual", residual, theirs[1])
    return [f"{numel} values, received and residual {given}: {one}" for one in found]


def sizes(options: dict[str, Any]) -> list[int]:
    block = options.get("codec_block", 1024)
    return [block + 1, 0, 1, block - 1, block, 5 * block + 3]


def in_the_interpreter(options: dict[str, Any]) -> list[str]:
    """Return the differences for awkward sizes, mostly with a message and a residual: the interpreter is slow."""
    given = [(True, True), (True, True), (True, False), (False, True), (False, False), (True, True)]
    cases = list(zip(sizes(options), given, strict=True))
    if options.get("codec_block", 1) > LARGE:
        cases = cases[:3]
    return [one for numel, flags in cases for one in differences(options, "cpu", ordinary(numel, 0), flags)]


def special_in_the_interpreter(options: dict[str, Any]) -> list[str]:
    return differences(options, "cpu", special(options.get("codec_block", 32)), (False, True))


# --- In Triton's interpreter, in a dedicated process: it is chosen once, when Triton is imported ----------------------


def start_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    np.seterr(all="ignore")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=start_interpreter
    ) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("options", CODECS, ids=names)
def test_bytes_residuals_and_values_are_those_of_the_cpu(
    interpreter: ProcessPoolExecutor, options: dict[str, Any]
) -> None:
    assert interpreter.submit(in_the_interpreter, options).result() == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [one for one in CODECS if one.get("codec_block", 1) < LARGE], ids=names)
def test_so_they_are_of_zeros_tiny_huge_and_infinite_values_and_nan(
    interpreter: ProcessPoolExecutor, options: dict[str, Any]
) -> None:
    assert interpreter.submit(special_in_the_interpreter, options).result() == []


@pytest.mark.slow
def test_no_other_test_runs_in_the_interpreter(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(os.getenv, "TRITON_INTERPRET").result() == "1"
    assert os.getenv("TRITON_INTERPRET") is None


# --- On a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("options", CODECS, ids=names)
def test_a_gpu_makes_the_bytes_residuals_and_values_of_the_cpu(options: dict[str, Any]) -> None:
    inputs = [ordinary(numel, 0) for numel in (*sizes(options), 1_000_003)]
    inputs.append(special(options.get("codec_block", 32)))
    for values in inputs:
        for given in ((False, False), (False, True), (True, False), (True, True)):
            assert differences(options, "cuda", values, given) == []


# --- As compiled for a GPU, which need not be present -----------------------------------------------------------------


def compiled(options: dict[str, Any], cache: str) -> list[tuple[str, str]]:
    """Return name and PTX of each kernel that the codec runs on buffers of three sizes, once per compilation.

    Triton is given a GPU that does not exist, and compiles where it would launch.
    """
    os.environ["TRITON_CACHE_DIR"] = cache
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    gpu = {"get_current_target": lambda: GPUTarget("cuda", 90, 32), "get_current_device": lambda: 0}
    driver.set_active(SimpleNamespace(**gpu, get_current_stream=lambda device: 0))
    kernels = kernels_for("cuda")
    found = {}

    def compile_only(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        code = kernel.warmup(*arguments, **constants, **kernels._SETTINGS, grid=(programs,))
        found[id(code)] = (code.name, code.asm["ptx"])

    kernels._run = compile_only
    codec = CompressionConfig(**options).described.make("cuda")
    for numel, offset in ((1, 4), (5 * codec.block, 16), (1 + 7 * codec.block, 4)):
        wire, received = (torch.zeros(codec.wire_bytes(numel) + offset, dtype=torch.uint8)[offset:] for _ in range(2))
        values, residual = (torch.zeros(numel + offset // 4)[offset // 4 :] for _ in range(2))
        codec.decode_add_encode(received, values, residual, wire, numel)
        codec.encode(values, None, wire, KEY)
        codec.decode(wire, values)
    return list(found.values())


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        ({"codec": "int8"}, "div.rn.f32"),
        ({"codec": "ternary", "rounding": "stochastic"}, "sqrt.rn.f32"),
        ({"codec": "sign"}, "mul.rn.f32"),
        ({"codec": "fp16"}, "cvt.rn.f16.f32"),
    ],
    ids=["int8", "ternary", "sign", "fp16"],
)
@pytest.mark.slow
def test_compiled_code_rounds_every_operation_and_is_compiled_once(
    compiler: ProcessPoolExecutor, options: dict[str, Any], rounded: str, tmp_path: Path
) -> None:
    """Fused, approximate or flushing instructions would round differently from a CPU."""
    kernels = compiler.submit(compiled, options, str(tmp_path)).result()
    assert len(kernels) == 3, "two encodings and a decoding, whatever the number of values and where they begin"
    assert any(rounded in ptx for _, ptx in kernels)
    for name, ptx in kernels:
        assert re.findall(r"\b(?:fma|mad)\.\S*f32|\S*\.ftz\S*|\S*\.approx\S*|div\.full\S*", ptx) == [], name


def test_without_triton_a_codec_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "pipesgd.codecs.kernels.cuda", raising=False)
    with pytest.raises(UserInputError, match=r"^codec must be fp32 on a GPU unless Triton is installed; got none$"):
        kernels_for("cuda")
