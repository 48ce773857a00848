"""Doors into the real Accelerate and Transformers: ``make test-integrations``."""

from __future__ import annotations

import functools
from pathlib import Path

from _runs import run_scenario

run = functools.partial(run_scenario, Path(__file__).with_name("_hugging_face_program.py"))


def test_a_loop_of_accelerate_does_what_pipelined_does_bit_for_bit(tmp_path: Path) -> None:
    answers = run("accelerate", tmp_path)
    for found in answers:
        assert found == answers[0], "replicas"
        assert found["found"] == found["expected"]
        assert found["saved is true"]
        assert found["refused"] == ("optimizer must be what accelerator.prepare(model, optimizer) returned; got SGD")


def test_a_trainer_of_transformers_trains_evaluates_and_saves(tmp_path: Path) -> None:
    answers = run("transformers", tmp_path)
    for found in answers:
        assert found["late"] == answers[0]["late"] == found["saved"]
        assert found["difference to DDP"] < 1e-5 * found["largest weight"], "sums in another order"
        assert found["evaluations with true weights"]
        assert all(found["evaluations with true weights"])
        assert found["refused"] == "clip_norm must be left out: the Trainer has max_grad_norm"


def test_a_trainer_that_resumes_continues_bit_for_bit(tmp_path: Path) -> None:
    for found in run("resumed", tmp_path):
        assert found["resumed"] == found["whole"]
