"""Random programs on real ranks next to the recursion in one process, with all options that change no value.

A program fails if a loss or a weight differs from the reference, or the weights of two ranks. Programs are drawn from
the seed, each by itself. ``PIPESGD_FUZZ=all`` tries 300.
"""

from __future__ import annotations

import os
import random

import pytest
from _ranks import run_ranks
from _small_problem import OPTIMIZERS, Case, assert_as_in_one_process, train_cases

pytestmark = pytest.mark.slow

SEED = 2026
PROGRAMS = 300 if os.environ.get("PIPESGD_FUZZ") == "all" else 20
AT_ONCE = 10
"""Number of programs that the same ranks run one after another."""

PREDICTIONS = ("none", "local", "eager", "nesterov", "previous", "spectrain")
CLIPS: tuple[dict[str, float], ...] = ({}, {"clip_norm": 0.5}, {"clip_value": 0.05})
ALL_REDUCES = ("ring", "halving-doubling", "recursive-doubling", "all-to-all", "native")


def drawn(number: int) -> Case:
    """Return program ``number``."""
    chance = random.Random(f"{SEED}/{number}")
    all_reduce, width = chance.choice(ALL_REDUCES), chance.randint(1, 5)
    options = {"all_reduce": all_reduce, "buckets": chance.choice(["1", "2", "64B"])}
    if all_reduce != "native":
        options |= {"segment_bytes": chance.choice([16, 64, 1 << 20]), "transport": chance.choice(["gloo", "tcp"])}
    return {
        "seed": chance.randrange(1000),
        "sizes": [chance.randint(1, 6) for _ in range(chance.randint(2, 4))],
        "iterations": chance.randint(1, 9),
        "width": width,
        "start": chance.randint(0, 4),
        "prediction": chance.choice(PREDICTIONS),
        "optimizer": chance.choice(sorted(OPTIMIZERS)),
        "clip": chance.choice(CLIPS),
        "options": options,
        "scheduled": chance.random() < 0.5,
    }


@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_a_program_is_the_recursion_of_the_paper(first: int) -> None:
    cases = [drawn(number) for number in range(first, first + AT_ONCE)]
    world_size = 1 + (first // AT_ONCE + 1) % 5
    assert_as_in_one_process(run_ranks(world_size, train_cases, cases), cases, OPTIMIZERS, rtol=1e-9)
