"""A recorder of the user's own: what it is given, and that its errors end the recording and not the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipesgd.errors import UserInputError
from pipesgd.run.metrics import IterationMetrics
from pipesgd.run.recorder import OwnRecorder

MODULE = """
heard = []

class Tracker:
    def __call__(self, iteration, values):
        heard.append((iteration, values))

    def close(self):
        heard.append("closed")

def fails():
    def record(iteration, values):
        raise OSError("no space")
    return record

def nothing():
    pass

def refuses():
    raise RuntimeError("not logged in")
"""


@pytest.fixture
def trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "trackers_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "trackers_of_a_test"
    sys.modules.pop("trackers_of_a_test", None)


METRICS = IterationMetrics(
    iteration=7, epoch=0, loss=1.5, lr=0.1, samples_per_second=10.0, seconds={"iteration": 2.0}, wire_bytes=3, skipped=0
)


def test_a_recorder_gets_what_is_known_of_an_iteration(trackers: str) -> None:
    recorder = OwnRecorder(f"{trackers}:Tracker")
    recorder.record(METRICS)
    recorder.record_last(8, None, 0.5)
    recorder.close()
    values = {"train/loss": 1.5, "train/lr": 0.1, "train/samples_per_second": 10.0, "seconds/iteration": 2.0}
    assert sys.modules[trackers].heard == [(7, values), (8, {"test/loss": 0.5}), "closed"]


def test_an_error_ends_the_recording_with_one_warning(trackers: str, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = OwnRecorder(f"{trackers}:fails")
    recorder.record(METRICS)
    recorder.record(METRICS)
    recorder.close()
    said = capsys.readouterr().err
    assert said.startswith(f"warning: recorder {trackers}:fails must take what is recorded without an error; got OSErr")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "recorder must be a function that returns record(iteration, values); got {}:nothing, which"),
        ("refuses", "recorder must be made by {}:refuses without an error; got RuntimeError: not logged in"),
        ("Trackr", "recorder must be a function of {}; got {}:Trackr, which it does not have (did you mean Tracker?)"),
    ],
)
def test_what_makes_no_recorder_is_refused_in_one_line(trackers: str, function: str, message: str) -> None:
    with pytest.raises(UserInputError) as refused:
        OwnRecorder(f"{trackers}:{function}")
    assert str(refused.value).startswith(message.replace("{}", trackers))
    assert "\n" not in str(refused.value)
