"""A plan for a program that there is: what is found in it, what is refused, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from _waiting import wait_until
from conftest import REPOSITORY

from experiments.command import torchrun
from pipesgd.errors import UserInputError
from pipesgd.observe.plan import describe, main, observe, split, world_size_of

SMALL = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(6)])
layers[0].bias.requires_grad_({bias})
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb={cap})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range({steps}):
    for micro in range({passes}):
        model.require_backward_grad_sync = micro == {passes} - 1
        model(torch.ones(2, 100)).square().mean().backward()
    total = torch.ones(3)
    dist.all_reduce(total)  # a sum of the program's own
    assert total.tolist() == [dist.get_world_size()] * 3
    gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.ones(1))
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {{"step": step}})
    assert objects == [{{"step": step}}] * dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    {more}
dist.barrier()
dist.destroy_process_group()
"""


def program(
    folder: Path, *, steps: int = 14, passes: int = 1, cap: float = 25, bias: bool = True, more: str = ""
) -> Path:
    path = folder / "train.py"
    text = SMALL.format(steps=steps, passes=passes, cap=cap, bias=bias, more=more or "pass")
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"passes": 3}, {"cap": 0.05}, {"bias": False, "cap": 0.05, "passes": 2}],
    ids=["plain", "micro-batches", "buckets", "all"],
)
def test_what_is_found_is_what_real_ranks_count(options: dict[str, float], tmp_path: Path) -> None:
    path = program(tmp_path, **options)
    found = observe(path, [], [], world_size=4)
    job = torchrun(2, str(REPOSITORY / "tests" / "observe" / "_counted.py"), str(path))
    done = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    counted = [line.removeprefix("counted:") for line in done.stdout.splitlines() if line.startswith("counted:")]
    assert len(counted) == 1, done.stderr
    expected = json.loads(counted[0])
    assert {name: found[name] for name in expected} == expected
    assert found["in_ddp"]
    assert found["compute_s"] > 0
    assert found["update_s"] > 0


@pytest.mark.slow
def test_the_command_answers_with_a_plan_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "given").write_text("7")
    more = """
    import pathlib, subprocess, sys
    assert pathlib.Path("data/given").read_text() == "7"
    pathlib.Path("written").write_text("by the program")
    if step == 0:
        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path(sys.argv[1]).write_text(str(child.pid))
    """
    path = program(
        tmp_path,
        more="\n    ".join(line.strip() for line in more.strip().splitlines())
        .replace("    child", "        child")
        .replace("    pathlib.Path(sys", "        pathlib.Path(sys"),
    )
    child = tmp_path / "child"
    words = ["plan", "--from", str(path), "--link", "data", "--network", "1GbE", "--world-size", "4", "--", str(child)]
    done = subprocess.run(
        [sys.executable, "-m", "pipesgd", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("train.py: 0.06 M parameters (242 kB) in 12 tensors; 1 backward pass and 1 bucket of Dist")
    assert second.startswith("train.py of 60.6 k parameters (242 kB), on 4 ranks: 956 Mbit/s of payload")
    assert "Choose " in done.stdout
    assert done.stderr.startswith(
        "running train.py as rank 0 of 4 for some iterations, in a temporary folder; what it "
    )
    assert {one.name for one in tmp_path.iterdir()} == {"data", "train.py", "child"}
    wait_until(lambda: not Path("/proc", child.read_text()).exists())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "from must be a program with at least 6 steps of an optimizer of torch's; got 3"),
        ({"more": "raise ValueError('lost')"}, "ValueError: lost"),
        ({"more": "dist.send(torch.ones(1), 1)"}, "a program must not send to single ranks while it is observed"),
        (
            {"more": "import pipesgd; pipesgd.Pipelined(layers, optimizer)"},
            "must have DistributedDataParallel, or sums of its own, while it is observed for a plan; got Pipelined",
        ),
    ],
    ids=["short", "fails", "sends", "Pipelined"],
)
def test_a_program_that_cannot_be_observed_is_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserInputError) as caught:
        observe(program(tmp_path, **options), [], [], world_size=2)
    assert message in str(caught.value)
    assert str(caught.value).startswith("from must be a program ")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_program_too(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    mark = tmp_path / "mark"
    path = program(
        tmp_path,
        more=f"import os, time, pathlib; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(1000)",
    )
    words = [sys.executable, "-m", "pipesgd", "plan", "--from", str(path), "--network", "1GbE", "--world-size", "2"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_until(mark.exists, timeout=60.0)
        time.sleep(0.1)
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert (said.splitlines()[-1] == "stopped by Ctrl-C") == (number == signal.SIGINT)
    if number != signal.SIGKILL:
        left = {one.name for one in (tmp_path / "temporary").iterdir()}
        assert all(name.startswith("torchinductor") for name in left), "torch has a folder of its own"
    wait_until(lambda: not Path("/proc", mark.read_text()).exists())


def test_words_are_those_of_the_plan_and_those_of_the_program(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.touch()
    words = [f"--from={path}", "--network", "1GbE", "--link", str(tmp_path), "--world-size=4", "--", "--compute", "x"]
    options, found, links, arguments = split(words)
    assert (options, found, links) == (["--network", "1GbE", "--world-size=4"], path, [tmp_path])
    assert arguments == ["--compute", "x"]
    assert world_size_of(options) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from absent.py", "from must be a Python program; got absent.py, which is no file"),
        ("--from", "from must be a path; got nothing"),
        ("--from --world-size 4", "from must be a path; got --world-size"),
        ("--from train.py --from train.py", "from must be given once; got it 2 times"),
        ("--from train.py --compute 1s", "compute must be left out with --from, since the program says it; got it"),
        (
            "--from train.py --link nowhere",
            "link must be a file or folder that the program reads; got nowhere, which is none",
        ),
        (
            "--from train.py --link train.py --link ./train.py",
            "link must have a name of its own in the program's folder; got train.py",
        ),
        ("--from train.py --link ..", "link must have a name of its own in the program's folder; got .."),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserInputError) as caught:
        split(words.split())
    assert str(caught.value) == message


def test_what_is_no_plan_is_refused_before_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for words, told in {
        "--world-size 4 --netwrok 1GbE": "error: every option must be one that --help lists; got --netwrok",
        "--world-size 4": "error: cluster must be given, or --network, or --latency and --bandwidth; got none",
    }.items():
        assert main(["plan", "--from", "train.py", *words.split()], program="pipesgd") == 2
        out, error = capsys.readouterr()
        assert (out, error[: len(told)]) == ("", told)
    assert main(["plan", "--from", "train.py", "--help"], program="pipesgd") == 0
    assert capsys.readouterr().out.startswith("usage: pipesgd plan ")


@pytest.mark.slow
def test_with_json_all_of_the_answer_is_json(tmp_path: Path) -> None:
    words = ["plan", "--from", str(program(tmp_path)), "--network", "1GbE", "--world-size", "4", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "pipesgd", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout)["predicted"]["job"]["model"] == "train.py"
    assert "train.py: 0.06 M parameters" in done.stderr


@pytest.mark.parametrize("words", ["", "--world-size", "--world-size 1", "--world-size four"])
def test_the_number_of_ranks_is_asked_for(words: str) -> None:
    with pytest.raises(UserInputError, match=r"^world-size must be a whole number of at least 2 with --from; got "):
        world_size_of(words.split())


def test_a_program_without_ddp_is_described_by_its_sums() -> None:
    found = {"tensors": [10], "in_ddp": False, "buckets": 2, "passes": 2, "compute_s": 0.5, "update_s": 0.25}
    found["compute_range_s"] = (0.4, 0.59)
    assert describe(Path("a/b.py"), found) == (
        "b.py: 0.00 M parameters (40.0 B) in 1 tensor; 2 backward passes and 2 sums in an iteration, "
        "which on this machine computes for 500 ms and updates weights for 250 ms"
    )


@pytest.mark.parametrize(("longest", "said"), [(0.59, False), (0.61, True)])
def test_times_that_differ_are_said(longest: float, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"tensors": [10], "in_ddp": True, "buckets": 2, "passes": 1, "compute_s": 0.5, "update_s": 0.25}
    describe(Path("b.py"), found | {"compute_range_s": (0.4, longest)})
    warning = "warning: an iteration computed for 400 ms to 610 ms, by the median for 500 ms: on a machine that does "
    assert capsys.readouterr().err.startswith(warning) == said
