"""Whatever a plan of the pages names can be run: by ``pipesgd.train``, and by the call that it gives for a program."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
import torch
import torch.distributed as dist
from _ranks import run_ranks
from conftest import REPOSITORY
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import pipesgd
import pipesgd.ddp
from pipesgd.cli import parse
from pipesgd.ranks import Ranks, alone
from pipesgd.run.console import Screen
from pipesgd.train import train, who_works
from tests.timing_model.test_documented_commands import COMMANDS, write_cluster
from tests.timing_model.test_predict import by_hand, compute
from timing_model import cli
from timing_model.configurations import HOOK, in_program
from timing_model.job import Job
from timing_model.presets import NETWORKS

pytestmark = pytest.mark.slow

QUESTION = re.compile(r"`timing-model (plan [^`|]+ --[^`|]+)`")
VALUE = r"[\w.]+(?:-[a-z]+)*"
OPTIONS = re.compile(rf"--(?!accuracy-cost)[a-z-]+ {VALUE}(?: --[a-z-]+ {VALUE})*")
"""Options in a sentence, one after the other."""
CALL = re.compile(r"(?:pipesgd\.(?!Wire)[\w.]+|DistributedDataParallel|model\.register_comm_hook)\(")


def asked_on_pages() -> Iterator[str]:
    """Yield the arguments of every plan in README, documentation and help."""
    yield from (words for words in COMMANDS if words.startswith("plan "))
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        found = QUESTION.findall(page.read_text(encoding="utf-8"))
        yield from (words for words in found if not words.endswith(" ..."))


def asked_in_notebooks() -> Iterator[str]:
    """Yield the arguments of every plan in a notebook, whose cells make them."""
    for path in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        lines = "\n".join(cell.source for cell in cells if cell.cell_type == "code").splitlines()
        if any(line.startswith('main(["plan"') for line in lines):
            asked: list[list[str]] = []
            kept = [line for line in lines if not line.startswith(("%", "from timing_model.cli import"))]
            exec("\n".join(kept), {"main": asked.append})
            yield from (shlex.join(words) for words in asked if words[0] == "plan")


ASKED = sorted({*asked_on_pages(), *asked_in_notebooks()})


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Ask every plan, for all that it has found."""
    cluster, found = write_cluster(tmp_path_factory.mktemp("cluster")), {}
    for words in ASKED:
        everything = re.sub(r"--top \d+", "", words.replace("cluster.toml", str(cluster)))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert cli.main([*shlex.split(everything), "--top", "100000", "--json"]) == 0
        found[words] = json.loads(printed.getvalue())
    return found


def choices_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    named = [answer[name] for name in ("best", "ddp", "synchronous", "uncompressed")]
    return [one for one in (*named, *answer["ranking"], *answer["meshes"].values()) if one is not None]


def test_plans_of_pages_and_notebooks_are_found() -> None:
    assert len(ASKED) >= 15
    assert "plan --network 1GbE --world-size 4 --compute 0.3s --parameters 25.6M" in ASKED
    assert len(list(asked_in_notebooks())) == 1


def test_every_configuration_of_a_plan_passes_a_dry_run(answers: dict[str, dict[str, Any]]) -> None:
    """Options of the rows are run, and those that sentences advise, each by itself."""
    every: set[str] = set()
    for words, answer in answers.items():
        rows = {one["options"] for one in choices_of(answer)}
        loops = {one for one in rows if not one.startswith("--")}
        assert all(one.startswith("Pipelined(") or one.endswith(", by torch alone") for one in loops)
        assert ("--split" in words) == bool(loops)
        every |= rows - loops
        every |= {options for sentence in answer["advice"] for options in OPTIONS.findall(sentence)}
    assert len(every) > 50
    for options in sorted(every):
        printed = io.StringIO()
        train(["--dry-run", *options.split()], alone(), Screen(file=printed))
        assert "width = " in printed.getvalue()
    for strategy in {" ".join(options.split()[:4]) for options in every if options.startswith("--strategy")}:
        who_works(parse(strategy.split()), alone())  # refuses a hook that torch does not accept here


def test_every_call_of_a_plan_has_arguments_that_it_takes(answers: dict[str, dict[str, Any]]) -> None:
    programs: set[str] = set()
    for answer in answers.values():
        for one in choices_of(answer):
            programs.add(one["program"])
            if one["strategy"] == "pipelined" and "by torch alone" not in one["options"]:
                assert "pipesgd." in one["program"]
    called = [call for program in programs for call in calls_of(program)]
    assert len(called) > 50
    for call in called:
        check_arguments(call)


def calls_of(text: str) -> list[ast.Call]:
    """Return the calls in a text."""
    found = []
    for match in CALL.finditer(text):
        end = match.end()
        while text[match.start() : end].count("(") > text[match.start() : end].count(")"):
            end += 1
        [statement] = ast.parse(text[match.start() : end]).body
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.Call)
        found.append(statement.value)
    return found


def check_arguments(call: ast.Call) -> None:
    """Bind the arguments of a call to the signature of the function that it names."""
    name = ast.unparse(call.func)
    known = {"DistributedDataParallel": DistributedDataParallel, "pipesgd": pipesgd, "model": DistributedDataParallel}
    function = eval(name, dict(known))
    words = {str(one.arg): eval(ast.unparse(one.value), {"mesh": None, "pipesgd": pipesgd}) for one in call.keywords}
    if name == "model.register_comm_hook":
        assert ast.unparse(call.args[1]) == HOOK
        assert eval(HOOK, {"torch": torch}) is default_hooks.fp16_compress_hook
        return
    inspect.signature(function).bind(*call.args, **words)


# ---- The calls, for real

LAYERS = (1000, 500)
BASE = Job(
    cluster=by_hand(NETWORKS["1GbE"]),
    compute=compute(0.1, 1, tensors=(LAYERS[0] * LAYERS[1], LAYERS[1], LAYERS[1] * 10, 10)),
    world_size=2,
)
CONFIGURATIONS: list[dict[str, Any]] = [
    {"width": 1, "codec": "int4", "buckets": "4", "segment_bytes": 1 << 16},
    {"width": 1, "codec": "bf16", "all_reduce": "native"},
    {"width": 1, "buckets": "100kB", "all_reduce": "halving-doubling"},
    {"width": 1, "codec": "int8"},
    {"width": 2, "codec": "int4"},
    {"width": 3, "codec": "int8", "all_reduce": "all-to-all", "segment_bytes": 1 << 18},
    {"width": 2, "buckets": "4"},
    {"strategy": "ddp", "all_reduce": "native", "codec": "fp16"},
    {"strategy": "ddp", "all_reduce": "native"},
    {"width": 2, "codec": "int8", "accumulation": 2},
]


def _trains(ranks: Ranks, program: str, accumulation: int) -> tuple[float, float]:
    """Train as the calls of ``program`` say, by torch's own group of these ranks; return the losses at both ends."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(*LAYERS), nn.ReLU(), nn.Linear(LAYERS[1], 10))
    names: dict[str, Any] = {"pipesgd": pipesgd, "torch": torch, "layers": layers, "model": layers}
    names["DistributedDataParallel"] = DistributedDataParallel
    names["optimizer"] = torch.optim.SGD(layers.parameters(), lr=0.05)
    calls = sorted(calls_of(program), key=lambda call: not ast.unparse(call).startswith("Distributed"))
    first = ast.unparse(calls[0])
    if not first.startswith("pipesgd.Pipelined("):
        names["model"] = eval(first if first.startswith("Distributed") else "DistributedDataParallel(layers)", names)
    pipeline: Any = None
    for call in calls:
        text = ast.unparse(call)
        if not text.startswith("Distributed"):
            pipeline = eval(text, names)
    inputs = torch.randn(16, LAYERS[0], generator=torch.Generator().manual_seed(ranks.rank))
    targets, losses = torch.arange(16) % 10, []
    for _ in range(10):
        for _ in range(accumulation - 1):
            with names["model"].no_sync():
                nn.functional.cross_entropy(names["model"](inputs), targets).backward()
        loss = nn.functional.cross_entropy(names["model"](inputs), targets)
        loss.backward()
        losses.append(float(loss.detach()))
        stepper = pipeline if isinstance(pipeline, pipesgd.Pipelined) and "attach" not in program else None
        (stepper or names["optimizer"]).step()
        if stepper is None:
            names["optimizer"].zero_grad()
    if hasattr(pipeline, "close"):
        pipeline.close()
    assert dist.is_initialized()
    return losses[0], losses[-1]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_the_call_of_a_program_trains(options: dict[str, Any]) -> None:
    job = dataclasses.replace(BASE, **options)
    for first, last in run_ranks(2, _trains, in_program(job), job.micro_batches):
        assert last < first
