"""Doors into the real Accelerate and Transformers: ``make test-integrations``."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from _runs import EXAMPLES, on_a_gpu, run_program, run_scenario
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

run = functools.partial(run_scenario, Path(__file__).with_name("_hugging_face_program.py"))

with_local_steps = pytest.mark.parametrize(
    "windows",
    ["", " local steps", *on_a_gpu("", " local steps")],
    ids=["gradients", "local steps", "gradients on a GPU", "local steps on a GPU"],
)
"""Both ways to train through a door: by late gradients, and by local steps."""


@with_local_steps
def test_a_loop_of_accelerate_does_what_pipelined_does_bit_for_bit_and_resumes(windows: str, tmp_path: Path) -> None:
    answers = run(f"accelerate{windows}", tmp_path)
    for found in answers:
        assert found == answers[0], "replicas"
        assert found["found"] == found["expected"] == found["resumed"]
        refused = "optimizer must be what accelerator.prepare(model, optimizer) returned; got SGD"
        assert found["refused"] == refused
    assert {path.name for path in (tmp_path / "state").glob("pipesgd-*.pt")} == {
        "pipesgd-0-rank-0.pt",
        "pipesgd-0-rank-1.pt",
    }
    assert not list((tmp_path / "end").glob("pipesgd-*")), "a pipeline that is closed has nothing to save"


def test_an_accelerator_trains_again_and_other_programs_load_its_state(tmp_path: Path) -> None:
    answers = run("one_after_the_other", tmp_path)
    for found in answers:
        assert found["iterations"] == [found["batches"]] * 2
    refused = [found["refused"].partition(";")[0] for found in answers]
    assert refused == ["", "a checkpoint must have the pipeline of each rank"], "saved on the main process alone"


def test_accelerates_own_check_of_training_passes_with_every_model_attached(tmp_path: Path) -> None:
    for found in run("accelerates_own", tmp_path):
        assert found["iterations"]
        assert all(found["iterations"])


@with_local_steps
def test_a_trainer_of_transformers_does_what_pipelined_does_bit_for_bit(windows: str, tmp_path: Path) -> None:
    answers = run(f"equal{windows}", tmp_path)
    for found in answers:
        assert found == answers[0], "replicas"
        assert all(trained == expected for trained, expected in found.values())


@with_local_steps
def test_a_trainer_of_transformers_trains_evaluates_and_saves(windows: str, tmp_path: Path) -> None:
    answers = run(f"transformers{windows}", tmp_path)
    for found in answers:
        assert found["late"] == answers[0]["late"] == found["saved"]
        assert found["difference to DDP"] < 1e-5 * found["largest weight"], "sums in another order"
        assert found["evaluations with true weights"]
        assert all(found["evaluations with true weights"])
        assert found["refused"] == "clip_norm must be left out, since the Trainer has max_grad_norm; got 1.0"
        assert found["refused codec"].endswith("got 'int7' (did you mean int8?)")
        assert found["refused twice"] == "PipesgdCallback must be added to the Trainer once; got 2 of them"
        assert found["refused optimizer"] == (
            "optimizer must not be schedule-free, except at width 1 without local steps: its train() and eval() change "
            "weights in place; got ScheduleFree"
        )
        assert found.get("refused with local steps") == (
            "ddp_model must be made without find_unused_parameters=True for local steps: the parameters used would be "
            "sent in every backward pass"
            if "local steps" in windows
            else None
        )


@with_local_steps
def test_a_trainer_that_resumes_continues_bit_for_bit(windows: str, tmp_path: Path) -> None:
    for found in run(f"resumed{windows}", tmp_path):
        assert found["resumed"] == found["whole"]


def test_a_trainer_that_keeps_two_checkpoints_resumes_after_one_that_was_cut_short(tmp_path: Path) -> None:
    for found in run("cut_short", tmp_path):
        assert found["limit 1"] == (["checkpoint-6"], "a checkpoint must have the pipeline of each rank")
        assert found["limit 2"] == (["checkpoint-3", "checkpoint-6"], True)


def test_the_best_model_that_the_trainer_loads_at_the_end_stays_as_it_was_saved(tmp_path: Path) -> None:
    for found in run("best", tmp_path):
        assert found["step"] == "checkpoint-3"
        assert found["found"] == found["best"]


def test_a_trainer_trains_again_also_after_it_was_interrupted(tmp_path: Path) -> None:
    answers = run("repeated", tmp_path)
    for found in answers:
        first, interrupted, last = found["weights"]  # where it is interrupted, each rank holds predicted weights
        assert [first, last] == answers[0]["weights"][::2], "replicas"
        assert len({first, interrupted, last}) == 3
        assert found["steps"] == 12


def test_a_group_of_the_backend_that_is_made_before_compresses_in_both(tmp_path: Path) -> None:
    """The names for a backend are lists of Accelerate's and the Trainer's own; a page says so until this fails."""
    answers = run("backend", tmp_path)
    for found in answers:
        assert found["backend"] == "pipesgd"
        assert found["weights"] == answers[0]["weights"], "replicas"
        assert found["sums"][0] == 12  # one bucket in each iteration, of 192 samples in batches of 8 on two ranks
        assert found["sums"][1] >= 24
        not_available = "Your assigned backend pipesgd is not available, please use gloo"
        assert found["refused"] == [not_available, not_available, "2"], "the exit code of argparse"


def test_the_example_of_accelerate_learns(tmp_path: Path) -> None:
    output = run_program(EXAMPLES / "accelerate_loop.py", tmp_path)
    assert float(output.split()[-1]) > 0.85
    assert (tmp_path / "digits" / "0" / "pipesgd-0-rank-1.pt").is_file()


def test_the_example_of_the_trainer_learns_and_saves(tmp_path: Path) -> None:
    output = run_program(EXAMPLES / "hf_trainer.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"'eval_loss': '?([\d.e-]+)", output)]
    assert losses[-1] < 0.1 < losses[0]
    assert (tmp_path / "counting" / "final" / "model.safetensors").is_file()


def test_the_example_of_adapters_learns_and_saves_them_alone(tmp_path: Path) -> None:
    output = run_program(EXAMPLES / "hf_lora.py", tmp_path, deadline=170)
    losses = [float(loss) for loss in re.findall(r"'eval_loss': '?([\d.e-]+)", output)]
    assert losses[-1] < losses[0] < 5.0, "next to 5.5, the logarithm of 256, of a model that knows nothing"
    saved = load_file(tmp_path / "lora" / "adapters" / "adapter_model.safetensors")
    assert saved
    assert all(".lora_" in name for name in saved)
