"""Strategy "pipesgd" in the real Lightning: ``make test-integrations``."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from _runs import run_scenario

run = functools.partial(run_scenario, Path(__file__).with_name("_lightning_program.py"))


@pytest.mark.parametrize("scenario", ["pytorch_lightning", "lightning.pytorch", "clip", "clip value", "accumulate"])
def test_a_trainer_does_what_pipelined_does_bit_for_bit_and_validates_true_weights(
    scenario: str, tmp_path: Path
) -> None:
    answers = run(scenario, tmp_path)
    for found in answers:
        assert found == answers[0], "replicas"
        assert found["found"] == found["expected"]
        assert len(found["validated"]) == 2
        assert found["validated"] == found["expected to be validated"]


def test_a_fit_that_is_resumed_from_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    for found in run("resumed", tmp_path):
        assert found["continued"] == found["whole"]
        assert [name for name in found["files"] if name.endswith(".ckpt.pipesgd-rank-1")]


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    for found in run("refused", tmp_path):
        assert found == {
            "clip_norm": "clip_norm must be left out of pipeline_options: the Trainer has gradient_clip_val",
            "hook": "ddp_comm_hook must be left out with strategy pipesgd, which has its own hook",
            "manual": "automatic_optimization must be True with strategy pipesgd",
        }


def test_lightnings_own_demonstration_runs_unchanged_but_for_the_strategy(tmp_path: Path) -> None:
    answers = run("boring", tmp_path)
    assert answers[0] == answers[1]
    assert answers[0]["steps"] == 32


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.6.2", "must be another version than 2.6.2, which was published with malware"),
        ("2.6.3", "must be another version than 2.6.3, which was published with malware"),
        ("2.4.0", "must be at least 2.5 for strategy pipesgd; got 2.4.0"),
    ],
)
def test_versions_that_do_not_work_are_refused(version: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipesgd.errors import UserInputError
    from pipesgd.lightning import check_version

    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(UserInputError, match=message):
        check_version("pytorch-lightning")
