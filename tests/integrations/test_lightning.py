"""Strategy "pipesgd" in the real Lightning: ``make test-integrations``."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from _runs import EXAMPLES, on_a_gpu, run_program, run_scenario

pytestmark = pytest.mark.slow

run = functools.partial(run_scenario, Path(__file__).with_name("_lightning_program.py"))


@pytest.mark.parametrize(
    "scenario",
    [
        "pytorch_lightning",
        "lightning.pytorch",
        "clip",
        "clip value",
        "clip itself",
        "accumulate",
        "bf16-mixed",
        "16-mixed",
        "local steps",
        *on_a_gpu("pytorch_lightning", "clip", "accumulate", "bf16-mixed", "16-mixed", "local steps"),
    ],
)
def test_a_trainer_does_what_pipelined_does_bit_for_bit_and_validates_true_weights(
    scenario: str, tmp_path: Path
) -> None:
    answers = run(scenario, tmp_path)
    for found in answers:
        assert found == answers[0], "replicas"
        assert found["found"] == found["expected"]
        assert len(found["validated"]) == 2
        assert found["validated"] == found["expected to be validated"]


@pytest.mark.parametrize("scenario", ["resumed", "resumed local steps", *on_a_gpu("resumed", "resumed local steps")])
def test_a_fit_that_is_resumed_from_a_checkpoint_continues_bit_for_bit(scenario: str, tmp_path: Path) -> None:
    for found in run(scenario, tmp_path):
        assert found["continued"] == found["whole"]
        assert [name for name in found["files"] if ".ckpt.pipesgd-rank-1." in name]


@pytest.mark.parametrize("scenario", ["fabric", "fabric local steps", *on_a_gpu("fabric", "fabric local steps")])
def test_a_loop_of_fabric_does_what_pipelined_does_bit_for_bit_and_resumes(scenario: str, tmp_path: Path) -> None:
    answers = run(scenario, tmp_path)
    for found in answers:
        assert found == answers[0], "replicas"
        assert found["found"] == found["expected"] == found["resumed"]
        assert found["reloaded"] == found["saved"] != found["found"]
        assert found["files"] == 4, "a pipeline and its checksum, of the last save and of one that was cut short"
        assert found["by name"] == "PipesgdFabricStrategy"
        assert found["validated"] == found["expected to be validated"]


def test_files_of_a_checkpoint_that_the_trainer_removes_go_with_it(tmp_path: Path) -> None:
    answers = run("removed", tmp_path)
    for found in answers:
        assert found["files"] == found["expected"]
    assert [found["files at an address"] for found in answers] == [1, 0], "rank 0 writes"


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    for found in run("refused", tmp_path):
        assert found.pop("two").startswith("Training with multiple optimizers is only supported with manual"), "its own"
        average = (
            "callbacks must not average weights with strategy pipesgd, except at width=1 without local steps; got "
        )
        assert found == {
            "average": f"{average}Derived",
            "average of windows": f"{average}Derived",
            "average of the last epochs": f"{average}StochasticWeightAveraging",
            "clip_norm": "clip_norm must be left out, since the Trainer has gradient_clip_val; got 1.0",
            "address": "a checkpoint must be in a folder that all ranks can write to, where their pipelines are "
            "written next to it; got memory://run/a.ckpt",
            "hook": "ddp_comm_hook must be left out with strategy pipesgd, which has its own hook",
            "manual": "automatic_optimization must be True with strategy pipesgd",
            "none": "optimizer must hold a parameter that requires a gradient; got none",
            "buffers": "ddp_model must be made with broadcast_buffers=False for local steps: its buffers would be sent "
            "in every forward pass",
            "fabric's scaler": "scaler must be left out, since Fabric has precision; got GradScaler",
            "fabric's two": "fabric.setup must be called once, with one optimizer, with strategy pipesgd; "
            "got 2 optimizers",
            "fabric's optimizer alone": "an optimizer must be set up with its model with strategy pipesgd: "
            "fabric.setup",
            "fabric's model alone": "fabric.setup must be called with a model and its optimizer to train it with "
            "strategy pipesgd; got a model that was set up alone (call its eval() to evaluate it)",
        }


def test_an_average_of_weights_at_width_1_is_in_the_model_at_the_end(tmp_path: Path) -> None:
    for found in run("averaged", tmp_path):
        assert found["found"] == found["average"]


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
    from pipesgd.lightning import check_lightning

    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(UserInputError, match=message):
        check_lightning("pytorch-lightning")


def test_the_example_learns(tmp_path: Path) -> None:
    assert float(run_program(EXAMPLES / "lightning_digits.py", tmp_path).split()[-1]) > 0.85
