"""An all-reduce is added by its schedule and one entry in a dictionary: then it trains, and can be predicted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import _sixth_all_reduce
import pytest
from _fashion_mnist import FASHION_MNIST
from _runs import succeed, summary
from _virtual_time import virtual_time

from pipesgd.codecs.floats import Uncompressed
from timing_model import LinkParams, schedules, uncompressed
from timing_model.all_reduce import all_reduce_time
from timing_model.simulate_messages import Network

PROGRAM = str(Path(_sixth_all_reduce.__file__))
NAME = "binomial-tree"


@pytest.mark.slow
def test_it_trains_to_the_weights_of_the_ring(tmp_path: Path) -> None:
    job = f"train --data-dir {FASHION_MNIST} --hidden-sizes 20 --batch-size 16 --iterations 12 --lr 0.05".split()
    job += ["--dataset", "fashion-mnist"]
    ring = succeed(3, shlex.join(job[1:]), tmp_path / "ring")
    words = [*job, "--all-reduce", NAME, "--output", str(tmp_path / NAME)]
    done = _run("-m", "torch.distributed.run", "--nproc-per-node", "3", PROGRAM, *words)
    assert done.returncode == 0, done.stderr
    sixth = summary(tmp_path / NAME)
    for found, name in ((ring, "ring"), (sixth, NAME)):
        assert (found["all_reduce"], found["replicas_identical"]) == (name, True)
    loss = ring["final"]["train_loss"]
    assert sixth["final"]["train_loss"] == pytest.approx(loss, rel=1e-4)  # sums are added up in another order


def test_the_model_predicts_it_by_its_messages() -> None:
    job = "--latency 50us --bandwidth 1Gbit/s --world-size 6 --parameters 11.7M --compute 0.3s"
    done = _run(PROGRAM, *f"predict --all-reduce {NAME} {job}".split())
    assert (done.returncode, done.stderr) == (0, "")
    assert NAME in done.stdout


@pytest.mark.parametrize("world_size", range(1, 10))
def test_the_predicted_time_is_that_of_the_code(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schedules.SCHEDULES, NAME, _sixth_all_reduce.binomial_tree)
    monkeypatch.setattr("timing_model.all_reduce.ALL_REDUCES", (*schedules.SCHEDULES, "hierarchical", "native"))
    link = LinkParams(alpha=3e-4, beta=1.1e-8, gamma=0.7e-9, sync=0.0, overhead=2e-5)
    numel = 1 << 20
    measured = virtual_time(
        _sixth_all_reduce.binomial_tree,
        world_size,
        Network(link=link),
        Uncompressed(),
        uncompressed(link.gamma),
        numel,
        schedules.SEGMENT_BYTES,
        posted=True,
    )
    predicted = all_reduce_time(NAME, link, numel, world_size)
    assert predicted.total == pytest.approx(measured, rel=1e-9)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
